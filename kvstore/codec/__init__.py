"""Codecs of layer segments, by name (configuration, key) and by number (record)."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Final, NamedTuple

from kvstore.errors import ConfigError, CorruptRecord, PermanentError

from .base import Codec

if TYPE_CHECKING:
    from .profile import Profile

__all__ = [
    "CODEC_NAMES",
    "LOSSY",
    "PROFILED",
    "check_profile",
    "codec_by_name",
    "codec_by_number",
    "codec_number",
    "load_profiles",
    "open_codec",
]


class _Entry(NamedTuple):
    name: str
    module: str
    attribute: str
    lossless: bool = False
    profiled: bool = False


# Number → where it is. Loaded on first use: neither numpy nor a compression library is needed to import kvstore.
_TABLE: Final = {
    0: _Entry("raw", ".raw", "RawCodec", lossless=True),
    1: _Entry("lz4", ".lz4_block", "Lz4Codec", lossless=True),
    2: _Entry("shuffle-zstd", ".shuffle", "ShuffleZstdCodec", lossless=True),
    3: _Entry("int8", ".int8", "Int8Codec"),
    4: _Entry("fp8", ".fp8", "Fp8Codec"),
    5: _Entry("cachegen", ".cachegen", "CachegenCodec", profiled=True),
    6: _Entry("kvt", ".kvt", "KvtCodec", profiled=True),
}
_NUMBERS: Final = {entry.name: number for number, entry in _TABLE.items()} | {"none": 0}
_loaded: dict[int, Codec] = {}

CODEC_NAMES: Final = tuple(entry.name for entry in _TABLE.values())
"""Names of the codecs there are; "none" is another word for "raw"."""

LOSSY: Final = frozenset(number for number, entry in _TABLE.items() if not entry.lossless)
"""Numbers of the codecs that do not give back the exact bytes."""

PROFILED: Final = frozenset(entry.name for entry in _TABLE.values() if entry.profiled)
"""Names of the codecs that encode by a profile of the model."""


def codec_number(name: str) -> int:
    """The number of the codec called `name`. Imports nothing.

    Raises:
        ConfigError: no codec has this name; the message lists the known ones.
    """
    number = _NUMBERS.get(name)
    if number is None:
        raise ConfigError(f"unknown codec {name!r}; known codecs: {', '.join(CODEC_NAMES)}, none")
    return number


def codec_by_name(name: str, profile: Profile | None = None) -> Codec:
    """The codec called `name` in the configuration, to encode and decode with. "none" is "raw". Safe from any thread.

    Args:
        profile: what it encodes with, for those that need one.

    Raises:
        ConfigError: no codec has this name (the message lists the known ones); it needs a profile and none is given,
            or the other way round; the profile is another codec's.
    """
    number = codec_number(name)
    entry = _TABLE[number]
    if profile is None:
        check_profile(entry.name, ())
        try:
            return codec_by_number(number)
        except PermanentError as error:
            raise ConfigError(error.message, cause=error) from error
    if profile.codec != entry.name:
        raise ConfigError(f"codec {name!r} cannot use profile {profile.id}, which is for codec {profile.codec!r}")
    codec: Codec = _class(entry)(profile)
    return codec


def check_profile(name: str, profiles: Sequence[str]) -> None:
    """Raises `ConfigError` if the codec called `name` needs a profile and none is named, or the other way round."""
    if name in PROFILED and not profiles:
        raise ConfigError(
            f"codec {name!r} needs a profile of the model: option codec_profile; make one with "
            f"kvstore-codec profile --codec {name} --model MODEL --texts FILES --out FILE"
        )
    if profiles and name not in PROFILED:
        raise ConfigError(
            f"option codec_profile is given, but codec {name!r} needs none, only {' and '.join(sorted(PROFILED))} do"
        )


def open_codec(name: str, profiles: Sequence[str] = ()) -> Codec:
    """The codec called `name`, by a profile that is read from a file; ready to work.

    Args:
        profiles: paths of profile files. The first is what is encoded with; segments of all of them can be decoded.

    Raises:
        ConfigError: as `codec_by_name`; a profile cannot be read; or profiles are given and the codec needs none.
    """
    check_profile(name, profiles)
    if not profiles:
        return _ready(codec_by_name(name))
    from .profile import register

    loaded = load_profiles(name, profiles)
    codecs = [codec_by_name(name, profile) for profile in loaded]  # all are looked into now, not when a record comes
    for profile in loaded:
        register(profile)
    return _ready(codecs[0])


def load_profiles(name: str, profiles: Sequence[str]) -> list[Profile]:
    """The profiles of these files, for the codec called `name`.

    Raises:
        ConfigError: there is no such file, it is damaged or no profile, or it is another codec's; names the file.
    """
    from .profile import Profile

    loaded = []
    for path in profiles:
        profile = Profile.load(path)
        if profile.codec != name:
            raise ConfigError(
                f"codec {name!r} cannot use {path}: profile {profile.id}, which is for codec {profile.codec!r}"
            )
        loaded.append(profile)
    return loaded


def _ready(codec: Codec) -> Codec:
    """The codec, its loops compiled: seconds, once on a machine, for which no read with a deadline shall wait."""
    if codec.lossless:
        return codec
    import numpy as np

    from kvstore.layout import KVLayout, dtype_itemsize

    from .base import RAW, SegmentInfo, UnknownProfile
    from .floats import from_float32

    layout, dtype = KVLayout(1, 1, 64), "bfloat16"
    if codec.profile is not None:
        layout, dtype = codec.profile.layout, codec.profile.dtypes[0]
    tokens = 16
    raw = memoryview(bytearray(layout.segment_bytes(tokens, dtype)))
    noise = np.random.default_rng(0).standard_normal(layout.elements_per_token * tokens, np.float32)
    from_float32(noise, dtype, raw)
    about = SegmentInfo(dtype_itemsize(dtype), 0, layout, dtype, tokens, start=tokens, rope="applied")
    levels = codec.encode(raw, about)
    if levels[0].codec != RAW:
        with contextlib.suppress(UnknownProfile):  # readers will say so
            codec.decode_into([level.data for level in levels], raw)
    return codec


def codec_by_number(number: int) -> Codec:
    """The codec with this number in a record's table, to decode with. Always the same object, safe from any thread.

    Raises:
        CorruptRecord: this release knows no codec of that number, so it cannot read the segment.
        PermanentError: a library that the codec needs is not installed.
    """
    codec = _loaded.get(number)
    if codec is None:
        if number not in _TABLE:
            raise CorruptRecord(f"codec number {number} is not known to this release")
        codec = _loaded.setdefault(number, _class(_TABLE[number])())
    return codec


def _class(entry: _Entry) -> type:
    try:
        found: type = getattr(import_module(entry.module, __name__), entry.attribute)
    except ImportError as error:
        message = f"codec {entry.name!r} cannot be used here: {error}; pip install 'kvstore[codec]'"
        raise PermanentError(message, cause=error) from error
    return found
