"""Profiles: what a codec learned offline of one model, in a small file with an id.

Records name the profile that they were encoded with by its id and hold no tables of their own. A profile is loaded once
(`Profile.load`, option `codec_profile`) and registered; from then on any segment that names it can be decoded.

A profile file, little-endian:

    0   8   magic, "KVPROFIL"
    8   4   format version (1)
    12  4   length h of the head
    16  8   length b of the body
    24  32  SHA-256 of head and body
    56  h   head: one msgpack map, keys sorted (see `Profile`; "arrays" lists [name, dtype, shape])
    …   b   body: the arrays in the order of the list, C order, each padded with zeros to a multiple of 64 bytes

The same profile is the same bytes in every process, and its id is the first 8 bytes of that SHA-256, as 16 hex digits.
Nothing here is executed or trusted: lengths are compared with the file's before anything is read, and the hash with
what was read. There is no pickle.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import reprlib
import struct
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import numpy.typing as npt

from kvstore.errors import ConfigError
from kvstore.layout import KVLayout, canonical_dtype

__all__ = ["ID_BYTES", "Profile", "find", "register", "registered"]

ID_BYTES = 8
"""Bytes of a profile's id, as records hold it; as text it is twice as many hex digits."""

MAGIC = b"KVPROFIL"
FORMAT = 1
_HEAD = struct.Struct("<8sIIQ32s")
_MAX_HEAD = 1 << 20
_MAX_BODY = 1 << 30
_MAX_ARRAYS = 1024
_MAX_NAME = 256
_MAX_DIMS = 8
_MAX_DEPTH = 16
_ALIGN = 64
_FIELDS = ("arrays", "codec", "dtypes", "layout", "model", "parameters", "revision", "rotary")
_LAYOUT = ("num_layers", "num_kv_heads", "head_dim", "v_head_dim", "kind")
_TYPES = ("|u1", "|i1", "<u2", "<i2", "<u4", "<i4", "<u8", "<i8", "<f2", "<f4", "<f8")

Array = npt.NDArray[Any]


@dataclass(frozen=True, eq=False)
class Profile:
    """What a codec learned of a model. Immutable; equal profiles have equal ids; safe for use from any thread.

    Attributes:
        codec: name of the codec that it is for.
        model: name of the model ("org/name"), as people write it in `KeyContext.model`.
        layout: shape of the KV cache of the shard.
        dtypes: names of the KV dtypes that it fits.
        revision: of the weights, or None.
        rotary: `RotarySpec.text` of the model, or None where the codec does not rotate.
        parameters: the codec's own: text, numbers, booleans, None, and lists and maps (by text) of them.
        arrays: name → array of integers or finite floats; read-only, C-contiguous, little-endian.
        id: 16 hex digits, over all of the above.

    Raises:
        ConfigError: a field is not of this kind; names it.
    """

    codec: str
    model: str
    layout: KVLayout
    dtypes: tuple[str, ...] = ("bfloat16", "float16", "float32")
    revision: str | None = None
    rotary: str | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict)
    arrays: Mapping[str, Array] = field(default_factory=dict)
    id: str = field(init=False)
    _head: bytes = field(init=False, repr=False)
    _digest: bytes = field(init=False, repr=False)

    def __post_init__(self) -> None:
        for name in ("codec", "model", "revision", "rotary"):
            value = getattr(self, name)
            if not (isinstance(value, str) and value) and (value is not None or name in ("codec", "model")):
                raise ConfigError(f"a profile's {name} is text, not {reprlib.repr(value)}")
        if not isinstance(self.layout, KVLayout):
            raise ConfigError(f"a profile's layout is a KVLayout, not {reprlib.repr(self.layout)}")
        if not self.dtypes:
            raise ConfigError("a profile names at least one dtype")
        object.__setattr__(self, "dtypes", tuple(canonical_dtype(dtype) for dtype in self.dtypes))
        object.__setattr__(self, "parameters", _plain(self.parameters, "parameters"))
        if not isinstance(self.parameters, dict):
            raise ConfigError("a profile's parameters are a map")
        if len(self.arrays) > _MAX_ARRAYS:
            raise ConfigError(f"a profile has at most {_MAX_ARRAYS} arrays, not {len(self.arrays)}")
        object.__setattr__(self, "arrays", {name: _frozen(name, self.arrays[name]) for name in sorted(self.arrays)})
        head = {
            "arrays": [[name, array.dtype.str, list(array.shape)] for name, array in self.arrays.items()],
            "codec": self.codec,
            "dtypes": list(self.dtypes),
            "layout": [getattr(self.layout, name) for name in _LAYOUT],
            "model": self.model,
            "parameters": self.parameters,
            "revision": self.revision,
            "rotary": self.rotary,
        }
        try:
            packed: bytes = msgpack.packb(head, use_bin_type=True)
        except UnicodeEncodeError as error:
            raise ConfigError("a profile's texts must be UTF-8", cause=error) from error
        if len(packed) > _MAX_HEAD:
            raise ConfigError(f"a profile's parameters are too large: {len(packed)} bytes, at most {_MAX_HEAD}")
        object.__setattr__(self, "_head", packed)
        digest = hashlib.sha256(packed)
        for part in _body(self.arrays):
            digest.update(part)
        object.__setattr__(self, "_digest", digest.digest())
        object.__setattr__(self, "id", self._digest[:ID_BYTES].hex())

    def __eq__(self, other: object) -> bool:
        return self._digest == other._digest if isinstance(other, Profile) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._digest)

    def __str__(self) -> str:
        return f"profile {self.id} ({self.codec} of {self.model})"

    @property
    def id_bytes(self) -> bytes:
        """The id as records hold it: 8 bytes."""
        return self._digest[:ID_BYTES]

    # Does it fit?

    def is_of(self, model: str) -> bool:
        """True if it was made of the model of this name; only the last part of names is compared ("org/name", "name").

        KV of another model has other distributions and other directions that matter: nothing is wrong with the bytes,
        but nothing is gained, and quality is lost.
        """
        return _last(model) == _last(self.model)

    def check_layout(self, layout: KVLayout, dtype: str) -> None:
        """Refuse KV of another shape or dtype.

        Raises:
            ConfigError: names what the profile has and what was given.
        """
        if layout != self.layout:
            raise ConfigError(f"{self} is for the layout {_shown(self.layout)}, not {_shown(layout)}")
        if dtype not in self.dtypes:
            raise ConfigError(f"{self} is for {', '.join(self.dtypes)}, not {dtype}")

    def array(self, name: str, dtype: npt.DTypeLike, shape: Sequence[int | None]) -> Array:
        """One of the arrays, whose dtype and shape are checked (None: any length).

        Raises:
            ConfigError: there is no such array, or it is another one.
        """
        found = self.arrays.get(name)
        if found is None:
            raise ConfigError(f"{self} has no array {name!r}")
        fits = len(found.shape) == len(shape) and all(
            want in (None, have) for want, have in zip(shape, found.shape, strict=True)
        )
        if found.dtype != np.dtype(dtype) or not fits:
            wanted = ", ".join("any" if length is None else str(length) for length in shape)
            raise ConfigError(
                f"array {name!r} of {self} is {found.dtype} {list(found.shape)}, not {np.dtype(dtype)} [{wanted}]"
            )
        return found

    # Files.

    def to_bytes(self) -> bytes:
        """The profile as a file holds it."""
        body = b"".join(_body(self.arrays))
        return _HEAD.pack(MAGIC, FORMAT, len(self._head), len(body), self._digest) + self._head + body

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the file; what was there is replaced at once, never seen half-written.

        Raises:
            OSError: it cannot be written.
        """
        target = Path(path)
        descriptor, temporary = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
        try:
            with open(descriptor, "wb") as file:
                file.write(self.to_bytes())
            os.chmod(temporary, 0o644)  # it holds no secret, and others read it
            os.replace(temporary, target)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
            raise

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Profile:
        """Read a profile file.

        Raises:
            ConfigError: there is no such file, or it is none: cut, damaged, of another version. Names file and cause.
        """
        where = os.fspath(path)
        try:
            with open(where, "rb", opener=_open_at_once) as file:
                start = file.read(_HEAD.size)
                head_length, body_length = _lengths(start)
                size = os.fstat(file.fileno()).st_size
                if size != _HEAD.size + head_length + body_length:
                    raise _Damaged(f"it has {size} bytes instead of {_HEAD.size + head_length + body_length}")
                return cls.from_bytes(start + file.read())
        except _Damaged as error:
            raise ConfigError(f"codec profile {where} is damaged: {error}; copy it anew") from error
        except _Broken as error:
            raise ConfigError(f"{where} is not a codec profile: {error}") from error
        except (OSError, ValueError) as error:  # ValueError: a path that cannot be one
            reason = getattr(error, "strerror", None) or error
            raise ConfigError(f"codec profile {where}: {reason}", cause=error) from error
        except ConfigError as error:
            raise ConfigError(f"{where} is not a codec profile: {error.message}", cause=error) from error

    @classmethod
    def from_bytes(cls, data: bytes | memoryview) -> Profile:
        """What `to_bytes` made.

        Raises:
            ConfigError: it is no profile; says why.
        """
        data = memoryview(data)
        head_length, body_length = _lengths(data)
        if len(data) != _HEAD.size + head_length + body_length:
            raise _Damaged(f"it has {len(data)} bytes instead of {_HEAD.size + head_length + body_length}")
        stored = data[_HEAD.size - 32 : _HEAD.size]
        if hashlib.sha256(data[_HEAD.size :]).digest() != bytes(stored):
            raise _Damaged("its content has another SHA-256 than it says")
        head = _parse_head(data[_HEAD.size : _HEAD.size + head_length])
        arrays = _parse_arrays(head["arrays"], data[_HEAD.size + head_length :])
        layout, dtypes = head["layout"], head["dtypes"]
        if not isinstance(layout, list) or len(layout) != len(_LAYOUT):
            raise _Broken("its layout is none")
        if not isinstance(dtypes, list) or not all(isinstance(dtype, str) for dtype in dtypes):
            raise _Broken("its dtypes are no list of names")
        made = cls(
            codec=head["codec"],
            model=head["model"],
            layout=KVLayout(**dict(zip(_LAYOUT, layout, strict=True))),
            dtypes=tuple(dtypes),
            revision=head["revision"],
            rotary=head["rotary"],
            parameters=head["parameters"],
            arrays=arrays,
        )
        if made._digest != bytes(stored):
            raise _Broken("it is written in another way than profiles are")
        return made


def _open_at_once(path: str, flags: int) -> int:
    """A pipe that nobody writes to is empty; nobody waits for a writer."""
    return os.open(path, flags | os.O_NONBLOCK)


class _Broken(ConfigError):
    """What is wrong with the bytes of a profile."""


class _Damaged(_Broken):
    """They begin as a profile does, and are not all there, or not as they were written."""


def _lengths(start: bytes | memoryview) -> tuple[int, int]:
    if len(start) < _HEAD.size:
        raise _Broken(f"it ends after {len(start)} bytes")
    magic, version, head, body, _ = _HEAD.unpack_from(start)
    if magic != MAGIC:
        raise _Broken("it begins with other bytes")
    if version != FORMAT:
        raise _Broken(f"it has format {version}; this release reads format {FORMAT}")
    if head > _MAX_HEAD or body > _MAX_BODY:
        raise _Broken(f"it claims {head} + {body} bytes, more than a profile may have")
    return head, body


def _parse_head(packed: memoryview) -> dict[str, Any]:
    try:
        head = msgpack.unpackb(packed, raw=False, strict_map_key=True, ext_hook=_no_ext, max_ext_len=0)
    except (ValueError, TypeError, RecursionError, msgpack.exceptions.UnpackException) as error:
        raise _Broken(f"its head is no msgpack: {error}") from error
    if not isinstance(head, dict) or set(head) != set(_FIELDS):
        raise _Broken("its head is not a map of the fields of a profile")
    if not isinstance(head["parameters"], dict):
        raise _Broken("its parameters are no map")
    return head


def _no_ext(code: int, _: bytes) -> Any:
    raise ValueError(f"extension type {code}")


def _parse_arrays(listed: Any, body: memoryview) -> dict[str, Array]:
    if not isinstance(listed, list) or len(listed) > _MAX_ARRAYS:
        raise _Broken("its list of arrays is none")
    arrays: dict[str, Array] = {}
    at = 0
    for entry in listed:
        if not isinstance(entry, list) or len(entry) != 3:
            raise _Broken("its list of arrays is none")
        name, kind, shape = entry
        if not isinstance(name, str) or name in arrays or kind not in _TYPES or not isinstance(shape, list):
            raise _Broken(f"array {reprlib.repr(name)} is none, or is there twice")
        if len(shape) > _MAX_DIMS or not all(type(length) is int and 0 <= length <= _MAX_BODY for length in shape):
            raise _Broken(f"array {reprlib.repr(name)} has an impossible shape")
        dtype = np.dtype(kind)
        nbytes = dtype.itemsize
        for length in shape:
            nbytes *= length
        if nbytes > len(body) - at:
            raise _Broken(f"array {reprlib.repr(name)} is longer than the file")
        try:
            arrays[name] = np.frombuffer(body[at : at + nbytes], dtype).reshape(shape)
        except ValueError as error:  # nothing, but of sides that numpy cannot multiply
            raise _Broken(f"array {reprlib.repr(name)} has an impossible shape") from error
        at += -(-nbytes // _ALIGN) * _ALIGN
    if at != len(body):
        raise _Broken("its arrays do not add up to its length")
    return arrays


def _body(arrays: Mapping[str, Array]) -> list[bytes]:
    parts = []
    for array in arrays.values():
        parts += [array.tobytes(), bytes(-array.nbytes % _ALIGN)]
    return parts


def _frozen(name: Any, given: Any) -> Array:
    """A read-only, contiguous, little-endian array."""
    if not isinstance(name, str) or not 0 < len(name) <= _MAX_NAME:
        raise ConfigError(f"an array of a profile has a name of 1 to {_MAX_NAME} characters, not {reprlib.repr(name)}")
    array = np.asarray(given)
    little = array.dtype.newbyteorder("<")
    if little.str not in _TYPES or array.ndim > _MAX_DIMS or array.nbytes > _MAX_BODY:
        raise ConfigError(f"array {name!r} of a profile cannot be {array.dtype} {list(array.shape)}")
    array = np.array(array, little, order="C")  # a copy: the caller's may change
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise ConfigError(f"array {name!r} of a profile holds inf or nan")
    array.flags.writeable = False
    return array


def _plain(value: Any, where: str, depth: int = 0) -> Any:
    """A copy in plain types, maps sorted, so that equal parameters have equal bytes."""
    if depth > _MAX_DEPTH:
        raise ConfigError(f"a profile's {where} is nested too deeply")
    if value is None or isinstance(value, str | bool):
        return value
    if isinstance(value, int | np.integer):
        if not -(1 << 63) <= int(value) < 1 << 63:
            raise ConfigError(f"a profile's {where} has more than 64 bits")
        return int(value)
    if isinstance(value, float | np.floating):
        if not np.isfinite(value):
            raise ConfigError(f"a profile's {where} is {value}")
        return float(value)
    if isinstance(value, Mapping):
        if not all(isinstance(name, str) for name in value):
            raise ConfigError(f"a profile's {where} has a name that is no text")
        return {name: _plain(value[name], f"{where}.{name}", depth + 1) for name in sorted(value)}
    if isinstance(value, list | tuple):
        return [_plain(each, f"{where}[{i}]", depth + 1) for i, each in enumerate(value)]
    raise ConfigError(f"a profile's {where} cannot be a {type(value).__name__}")


def _last(model: str) -> str:
    return model.rstrip("/").rpartition("/")[2]


def _shown(layout: KVLayout) -> str:
    v = "" if layout.v_head_dim == layout.head_dim else f"/{layout.v_head_dim}"
    return f"{layout.kind} {layout.num_layers} layers x {layout.num_kv_heads} heads x {layout.head_dim}{v}"


# The profiles of this process.

_lock = threading.Lock()
_registered: dict[str, Profile] = {}


def register(profile: Profile) -> None:
    """Make a profile known, so that segments encoded with it can be decoded. A second time does nothing.

    Raises:
        ConfigError: another profile has the same id.
    """
    with _lock:
        known = _registered.setdefault(profile.id, profile)
    if known != profile:
        raise ConfigError(f"two profiles have the id {profile.id}: {known.codec} of {known.model}, and {profile.codec} "
                          f"of {profile.model}")  # fmt: skip


def find(profile_id: str) -> Profile | None:
    """The registered profile with this id (16 hex digits), or None."""
    return _registered.get(profile_id)


def registered() -> list[Profile]:
    """All that are registered, in the order in which they came."""
    with _lock:
        return list(_registered.values())
