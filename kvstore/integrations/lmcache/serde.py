"""Our codecs as a serde of LMCache's MP mode: `"serde": {"type": "kvstore", "codec": "int8", "head_size": 128}` beside
an L2 adapter of any type.

Importing this module registers the type. Importing `kvstore.integrations.lmcache` imports it where LMCache's MP mode is
loaded, and LMCache imports that to make our adapters, before it looks at their serde. For adapters of LMCache's own
somebody must import this module first; docs/lmcache.md says how.

LMCache stores what the serde wrote, and loads it into memory as long as the most that it might have written: our
adapters need `"sizes": "at_most"` for that.
"""

from __future__ import annotations

from typing import Any

from lmcache.v1.distributed.serde import (
    AsyncSerdeProcessor,
    Deserializer,
    SerdeProcessor,
    Serializer,
    get_registered_serde_types,
    register_serde_factory,
)

from kvstore.codec import codec_number, open_codec
from kvstore.errors import ConfigError

from ._blob import Blobs, Group
from ._client import names_of

__all__ = ["NAME", "KVStoreDeserializer", "KVStoreSerializer", "open_serde"]

NAME = "kvstore"
_OPTIONS = ("codec", "profile", "head_size", "max_workers")


class KVStoreSerializer(Serializer):  # type: ignore[misc]
    """Encodes objects, whatever their format; see `_blob`."""

    def __init__(self, blobs: Blobs) -> None:
        self._blobs = blobs

    def serialize(self, src: Any, dst: Any, key: Any) -> int:
        """Encode `src` into `dst`; returns the number of bytes.

        Raises:
            ConfigError: the object is not of the kind that the codec, or its profile, is for.
        """
        (name,) = names_of([key])
        return self._blobs.encode(_bytes_of(src), _groups(src.get_shapes(), src.get_dtypes()), name, _bytes_of(dst))

    def estimate_serialized_size(self, layout_desc: Any) -> int:
        """The most bytes that an object of this layout takes."""
        return self._blobs.bound(_groups(layout_desc.shapes, layout_desc.dtypes))


class KVStoreDeserializer(Deserializer):  # type: ignore[misc]
    """Decodes what `KVStoreSerializer` encoded."""

    def __init__(self, blobs: Blobs) -> None:
        self._blobs = blobs

    def deserialize(self, src: Any, dst: Any, key: Any) -> None:
        """Decode the head of `src` into `dst`.

        Raises:
            CorruptRecord: it is damaged, another object's, of another shape or of another lossy codec.
            UnknownProfile: it was encoded with a profile that is not loaded here.
        """
        (name,) = names_of([key])
        self._blobs.decode(_bytes_of(src), _groups(dst.get_shapes(), dst.get_dtypes()), name, _bytes_of(dst))


def open_serde(options: dict[str, Any]) -> SerdeProcessor:
    """What LMCache makes of `"serde": {"type": "kvstore", …}`.

    Args:
        options: `codec` (a name of `kvstore.codec`), `profile` (path of its profile, or several with commas between),
            `head_size` (elements of a head; int8 and fp8 need it), `max_workers` (threads; 1).

    Raises:
        ConfigError: an option that is unknown or makes no sense; a codec that cannot do it.
    """
    for option in options:
        if option not in _OPTIONS:
            raise ConfigError(f"serde {NAME}: unknown option {option!r}; known options: {', '.join(_OPTIONS)}")
    codec = options.get("codec")
    if not isinstance(codec, str):
        raise ConfigError(f"serde {NAME}: option codec must name a codec, not {codec!r}")
    codec_number(codec)
    if codec == "kvt":
        raise ConfigError(
            f"serde {NAME}: codec kvt must know where in the prompt a chunk begins, and LMCache does not say it; "
            "use cachegen, int8 or fp8"
        )
    profile = options.get("profile", "")
    if not isinstance(profile, str):
        raise ConfigError(f"serde {NAME}: option profile must be a path, not {profile!r}")
    paths = [path.strip() for path in profile.split(",") if path.strip()]
    workers = _integer(options, "max_workers", 1)
    head_size = _integer(options, "head_size", None)
    if head_size is None and codec in ("int8", "fp8"):
        raise ConfigError(f"serde {NAME}: codec {codec} needs option head_size, the elements of a head of K and V")
    blobs = Blobs(open_codec(codec, paths), head_size)
    return AsyncSerdeProcessor(KVStoreSerializer(blobs), KVStoreDeserializer(blobs), max_workers=workers)


def _integer(options: dict[str, Any], name: str, default: int | None) -> Any:
    value = options.get(name, default)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise ConfigError(f"serde {NAME}: option {name} must be a number from 1 on, not {value!r}")
    return value


def _bytes_of(obj: Any) -> memoryview:
    return memoryview(obj.byte_array).cast("B")


def _groups(shapes: Any, dtypes: Any) -> list[Group]:
    return [
        Group(tuple(int(n) for n in shape), str(dtype).removeprefix("torch."), dtype.itemsize)
        for shape, dtype in zip(shapes, dtypes, strict=True)
    ]


if NAME not in get_registered_serde_types():
    register_serde_factory(NAME, open_serde)
