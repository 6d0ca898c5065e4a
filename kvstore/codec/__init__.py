"""Codecs of layer segments, by name (configuration, key) and by number (record)."""

from __future__ import annotations

from importlib import import_module
from typing import Final

from kvstore.errors import ConfigError, CorruptRecord

from .base import Codec

__all__ = ["CODEC_NAMES", "codec_by_name", "codec_by_number"]

# Number → where it is. Loaded on first use: neither numpy nor a compression library is needed to import kvstore.
_TABLE: Final = {
    0: ("raw", ".raw", "RawCodec"),
    1: ("lz4", ".lz4_block", "Lz4Codec"),
    2: ("shuffle-zstd", ".shuffle", "ShuffleZstdCodec"),
}
_NUMBERS: Final = {name: number for number, (name, _, _) in _TABLE.items()} | {"none": 0}
_loaded: dict[int, Codec] = {}

CODEC_NAMES: Final = tuple(name for name, _, _ in _TABLE.values())
"""Names of the codecs there are; "none" is another word for "raw"."""


def codec_by_name(name: str) -> Codec:
    """The codec called `name` in the configuration; "none" is "raw". Always the same object, safe from any thread.

    Raises:
        ConfigError: no codec has this name; the message lists the known ones.
    """
    number = _NUMBERS.get(name)
    if number is None:
        raise ConfigError(f"unknown codec {name!r}; known codecs: {', '.join(CODEC_NAMES)}, none")
    return codec_by_number(number)


def codec_by_number(number: int) -> Codec:
    """The codec with this number in a record's table.

    Raises:
        CorruptRecord: this release knows no codec of that number, so it cannot read the segment.
    """
    codec = _loaded.get(number)
    if codec is None:
        if number not in _TABLE:
            raise CorruptRecord(f"codec number {number} is not known to this release")
        _, module, attribute = _TABLE[number]
        codec = _loaded.setdefault(number, getattr(import_module(module, __name__), attribute)())
    return codec
