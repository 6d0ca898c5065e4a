"""A lossy codec with three levels whose workings are plain: level n holds some bits of every 16-bit element."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np

import kvstore.codec
from kvstore.codec.base import Codec, Decoder, Encoded, SegmentInfo, UnknownProfile, stored_raw
from kvstore.codec.profile import Profile
from kvstore.errors import CorruptRecord

BITS = (8, 4, 4)
HEAD = struct.Struct("<BI")


class LevelDecoder(Decoder):
    def __init__(self, dst: memoryview, profiles: set[str]) -> None:
        self.dst = dst
        self.level = 0
        self.profiles = profiles

    def feed(self, part: memoryview) -> None:
        words = np.frombuffer(self.dst, np.uint8).view("<u2")
        if len(part) < HEAD.size or self.level >= len(BITS):
            raise CorruptRecord("no such level")
        level, count = HEAD.unpack_from(part)
        if "p" not in self.profiles:
            raise UnknownProfile("p")
        if level != self.level or count != len(words):
            raise CorruptRecord("not the next level")
        shift = 16 - sum(BITS[: level + 1])
        if BITS[level] == 8:
            if len(part) != HEAD.size + count:
                raise CorruptRecord("wrong length")
            bits = np.frombuffer(part, np.uint8, offset=HEAD.size).astype(np.uint16)
            words[:] = bits << shift
        else:
            if len(part) != HEAD.size + -(-count // 2):
                raise CorruptRecord("wrong length")
            pairs = np.frombuffer(part, np.uint8, offset=HEAD.size)
            nibbles = np.stack((pairs & 15, pairs >> 4), axis=1).ravel()[:count].astype(np.uint16)
            words |= nibbles << shift
        self.level += 1


class LevelCodec(Codec):
    """Stands in for kvt in tests of the store."""

    name = "kvt"
    number = 6
    lossless = False
    levels = 3

    def __init__(self) -> None:
        self.profile: Any = SimpleNamespace(
            id="00112233445566aa", codec="kvt", model="org/model", check_layout=lambda layout, dtype: None
        )
        self.profile.is_of = partial(Profile.is_of, self.profile)
        self.seen: list[SegmentInfo] = []
        self.profiles = {"p"}
        self.decoded: list[int] = []

    def encode(self, raw: memoryview, about: SegmentInfo) -> Sequence[Encoded]:
        self.seen.append(about)
        if about.layout is None:
            return stored_raw(raw)
        words = np.frombuffer(raw, np.uint8).view("<u2")
        out = []
        for level, bits in enumerate(BITS):
            part = (words >> (16 - sum(BITS[: level + 1]))) & ((1 << bits) - 1)
            if bits == 8:
                data = part.astype(np.uint8)
            else:
                even = np.append(part, 0)[: len(part) // 2 * 2 + 2 * (len(part) % 2)].reshape(-1, 2)
                data = (even[:, 0] | even[:, 1] << 4).astype(np.uint8)
            packed = HEAD.pack(level, len(words)) + data.tobytes()
            out.append(Encoded(self.number, level, memoryview(packed)))
        return out

    def decode_into(self, parts: Sequence[memoryview], dst: memoryview) -> None:
        self.decoded.append(len(parts))
        decoder = self.decoder(dst)
        for part in parts:
            decoder.feed(part)

    def decoder(self, dst: memoryview) -> Decoder:
        return LevelDecoder(dst, self.profiles)


def masked(data: bytes, level: int) -> bytes:
    """What `data` decodes to with levels 0 to `level`."""
    keep = 0xFFFF << (16 - sum(BITS[: level + 1])) & 0xFFFF
    return (np.frombuffer(data, "<u2") & np.uint16(keep)).tobytes()


@contextmanager
def level_codec() -> Iterator[LevelCodec]:
    """In this context the codec of number 6 is a `LevelCodec`."""
    codec = LevelCodec()
    with (
        mock.patch.dict(kvstore.codec._loaded, {6: codec}),
        mock.patch("kvstore.machinery.open_codec", lambda name, _: codec if name == "kvt" else _real(name)),
    ):
        yield codec


def _real(name: str) -> Codec:
    return kvstore.codec.codec_by_name(name)
