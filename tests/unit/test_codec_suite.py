"""The shipped codec suite over the codecs without a profile."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import pytest

from kvstore.codec import codec_by_name
from kvstore.codec.base import Codec, Encoded, SegmentInfo, only_part, stored_raw
from kvstore.codec.raw import RawCodec
from kvstore.layout import DTYPES, KVLayout
from kvstore.testing import CodecSuite


class TestRaw(CodecSuite):
    dtypes = tuple(name for name in DTYPES if "float8" not in name and "int8" not in name)

    def make(self, layout: KVLayout) -> Codec:
        return codec_by_name("raw")


class TestLz4(CodecSuite):
    def make(self, layout: KVLayout) -> Codec:
        return codec_by_name("lz4")


class TestShuffleZstd(CodecSuite):
    def make(self, layout: KVLayout) -> Codec:
        return codec_by_name("shuffle-zstd")


class TestInt8(CodecSuite):
    stable = False  # the largest element of a vector is rounded to its dtype, and makes another scale
    error_share = (4e-4,)

    def make(self, layout: KVLayout) -> Codec:
        return codec_by_name("int8")


class TestFp8(CodecSuite):
    stable = False
    error_share = (1.5e-3,)

    def make(self, layout: KVLayout) -> Codec:
        return codec_by_name("fp8")


# The suite itself must find what it is there to find.


class _Broken(RawCodec):
    """Says that it is lossless, and is wrong in one way."""

    def __init__(self, way: str) -> None:
        self.way = way

    def encode(self, raw: memoryview, about: SegmentInfo) -> Sequence[Encoded]:
        if self.way == "changes the source" and not raw.readonly and len(raw):
            raw[0] ^= 1
        if self.way == "loses a bit" and len(raw) > 100:
            data = bytearray(raw)
            data[50] &= 0xFE
            return (Encoded(0, 0, memoryview(data)),)
        if self.way == "levels from 1":
            return (Encoded(0, 1, raw),)
        return stored_raw(raw)

    def decode_into(self, parts: Sequence[memoryview], dst: memoryview) -> None:
        only_part(parts, self.name)


class _Suite(CodecSuite):
    layouts = (KVLayout(2, 2, 16),)
    dtypes = ("bfloat16",)
    way: ClassVar[str]

    def make(self, layout: KVLayout) -> Codec:
        return _Broken(self.way)


@pytest.mark.parametrize("way", ["changes the source", "loses a bit", "levels from 1"])
def test_the_suite_finds_broken_codecs(way: str) -> None:
    suite = _Suite()
    type(suite).way = way
    with pytest.raises(AssertionError):
        suite.test_lengths_of_every_kind()
