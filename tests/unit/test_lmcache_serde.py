"""What the serde of LMCache's MP mode writes and reads. LMCache itself is not needed here."""

from __future__ import annotations

import os
import struct
import threading
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import pytest

from kvstore.codec import codec_by_name, open_codec
from kvstore.codec.base import Codec, Encoded, SegmentInfo
from kvstore.codec.profile import register
from kvstore.errors import ConfigError, CorruptRecord
from kvstore.integrations.lmcache._blob import Blobs, Group
from kvstore.record import checksum

from .codec_profile_support import LAYOUT, segment_of, small_profile, synthetic_kv

LAYERS, TOKENS, HEADS, WIDTH = 3, 40, 2, 64
KV = Group((2, LAYERS, TOKENS, HEADS * WIDTH), "bfloat16", 2)
MLA = Group((LAYERS, TOKENS, 96), "float16", 2)
BYTES = Group(((1 << 20) + 77,), "uint8", 1)
NAME = "org/model@00000000@0@ab"


def values(group: Group, seed: int = 0) -> bytearray:
    """Normal numbers, as far as the group holds numbers."""
    count = int(np.prod(group.shape))
    numbers = np.random.default_rng(seed).standard_normal(count, np.float32)
    if group.dtype == "bfloat16":
        return bytearray((numbers.view(np.uint32) >> 16).astype("<u2").tobytes())
    if group.dtype == "float16":
        return bytearray(numbers.astype("<f2").tobytes())
    return bytearray((numbers * 10).astype(np.uint8).tobytes())


def floats(data: bytes | bytearray, group: Group) -> np.ndarray:
    if group.dtype == "bfloat16":
        return (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(data, "<f2").astype(np.float32)


def encoded(blobs: Blobs, data: bytearray, groups: Sequence[Group], name: str = NAME) -> bytearray:
    room = bytearray(blobs.bound(groups))
    length = blobs.encode(memoryview(data), groups, name, memoryview(room))
    return room[:length]


def decoded(blobs: Blobs, blob: bytes | bytearray, groups: Sequence[Group], name: str = NAME) -> bytearray:
    into = bytearray(sum(group.nbytes for group in groups))
    blobs.decode(memoryview(blob), groups, name, memoryview(into))
    return into


@pytest.mark.parametrize("codec", ["raw", "lz4", "shuffle-zstd"])
@pytest.mark.parametrize("groups", [(KV,), (MLA,), (BYTES,), (KV, MLA, BYTES)], ids=["kv", "mla", "bytes", "all"])
def test_exact_codecs_give_back_every_byte(codec: str, groups: Sequence[Group]) -> None:
    blobs = Blobs(open_codec(codec))
    data = bytearray().join(values(group, seed) for seed, group in enumerate(groups))
    blob = encoded(blobs, data, groups)
    # LMCache loads into the most that it might have been; what lies behind is nobody's.
    assert decoded(blobs, blob + os.urandom(500), groups) == data
    if codec == "shuffle-zstd":
        assert len(blob) < 0.9 * len(data)


@pytest.mark.parametrize("codec", ["int8", "fp8"])
@pytest.mark.parametrize("group", [KV, MLA], ids=["kv", "mla"])
def test_lossy_codecs_halve_and_keep_each_value_in_its_place(codec: str, group: Group) -> None:
    blobs = Blobs(open_codec(codec), head_size=WIDTH)
    data = values(group)
    blob = encoded(blobs, data, [group])
    assert len(blob) < 0.56 * len(data)
    there, back = floats(data, group), floats(decoded(blobs, blob, [group]), group)
    assert np.abs(there - back).max() < (0.03 if codec == "int8" else 0.3)
    assert not np.array_equal(there, back)


def test_each_head_has_a_scale_of_its_own() -> None:
    """K and V of a layer are put together as our layout has them: a head of large values spoils no other."""
    data = np.frombuffer(values(Group(KV.shape, "float16", 2)), "<f2").reshape(KV.shape).copy()
    data[0, :, :, :WIDTH] *= 1000  # K of the first head
    group = Group(KV.shape, "float16", 2)
    blobs = Blobs(open_codec("int8"), head_size=WIDTH)
    back = decoded(blobs, encoded(blobs, bytearray(data.tobytes()), [group]), [group])
    error = np.abs(np.frombuffer(back, "<f2").reshape(KV.shape).astype(np.float32) - data.astype(np.float32))
    assert error[0, :, :, WIDTH:].max() < 0.03
    assert error[1].max() < 0.03
    assert 1 < error[0, :, :, :WIDTH].max() < 30


def test_what_a_lossy_codec_cannot_do_justice_to_comes_back_exactly() -> None:
    blobs = Blobs(open_codec("int8"), head_size=WIDTH)
    data = values(KV)
    data[100:102] = b"\x80\x7f"  # inf, in layer 0
    back = decoded(blobs, encoded(blobs, data, [KV]), [KV])
    layer = TOKENS * HEADS * WIDTH * 2
    assert back[:layer] == data[:layer]
    assert back[layer : 2 * layer] != data[layer : 2 * layer]
    bare = values(BYTES)
    assert decoded(blobs, encoded(blobs, bare, [BYTES]), [BYTES]) == bare


@pytest.mark.parametrize("codec", ["raw", "int8"])
def test_noise_stays_within_the_bound(codec: str) -> None:
    blobs = Blobs(open_codec(codec), head_size=WIDTH)
    for group in (KV, BYTES):
        data = bytearray(os.urandom(group.nbytes))
        assert len(encoded(blobs, data, [group])) <= blobs.bound([group])


def test_every_damaged_byte_is_seen() -> None:
    small = Group((2, 1, 4, 8), "float16", 2)
    blobs = Blobs(open_codec("int8"), head_size=8)
    blob = encoded(blobs, values(small), [small])
    decoded(blobs, blob, [small])
    for at in range(len(blob)):
        damaged = bytearray(blob)
        damaged[at] ^= 1
        with pytest.raises(CorruptRecord):
            decoded(blobs, damaged, [small])
    for length in range(len(blob)):
        with pytest.raises(CorruptRecord):
            decoded(blobs, blob[:length], [small])


def test_a_table_that_lies_under_a_good_checksum_is_refused() -> None:
    small = Group((2, 1, 4, 8), "float16", 2)
    blobs = Blobs(open_codec("raw"))
    blob = encoded(blobs, values(small), [small])

    def signed(table: bytes) -> bytearray:
        forged = bytearray(blob)
        forged[64 : 64 + len(table)] = table
        struct.pack_into("<Q", forged, 48, checksum(memoryview(forged)[64:]))
        struct.pack_into("<Q", forged, 56, checksum(memoryview(forged)[:56]))
        return forged

    entry = struct.Struct("<IBBHQ")
    first, second = entry.pack(0, 0, 0, 0, 64), entry.pack(1, 0, 0, 0, 64)
    assert decoded(blobs, signed(first + second), [small]) == values(small)
    for table in (
        first + first,  # a segment twice, the other one never
        first + entry.pack(7, 0, 0, 0, 64),  # no such segment
        first + entry.pack(1, 0, 1, 0, 64),  # level 1 without level 0
        first + entry.pack(1, 0, 0, 0, 1 << 60),
        first + entry.pack(1, 0, 0, 0, 63),  # a byte is nobody's
        entry.pack(0, 0, 0, 0, 63) + entry.pack(1, 0, 0, 0, 65),  # not as long as raw
        first + entry.pack(1, 200, 0, 0, 64),  # no such codec
    ):
        with pytest.raises(CorruptRecord):
            decoded(blobs, signed(table), [small])


def test_another_objects_bytes_are_refused() -> None:
    blobs = Blobs(open_codec("shuffle-zstd"))
    blob = encoded(blobs, values(KV), [KV])
    with pytest.raises(CorruptRecord, match="another name"):
        decoded(blobs, blob, [KV], NAME + "0")
    with pytest.raises(CorruptRecord, match="another shape or dtype"):
        decoded(blobs, blob, [KV._replace(dtype="float16")])
    with pytest.raises(CorruptRecord, match="another shape or dtype"):
        decoded(blobs, blob, [KV._replace(shape=(2, TOKENS, LAYERS, HEADS * WIDTH))])
    with pytest.raises(CorruptRecord, match="not written by serde kvstore"):
        decoded(blobs, values(KV), [KV])


def test_lossy_bytes_of_another_codec_are_refused_and_exact_ones_read() -> None:
    int8, fp8, raw = (Blobs(open_codec(name), WIDTH) for name in ("int8", "fp8", "raw"))
    with pytest.raises(CorruptRecord, match=r"'int8'.*'fp8'"):
        decoded(fp8, encoded(int8, values(KV), [KV]), [KV])
    with pytest.raises(CorruptRecord, match=r"'int8'.*'raw'"):
        decoded(raw, encoded(int8, values(KV), [KV]), [KV])
    # Exact ones are cut otherwise: by K and V. Cut so, they are of another table than lossy ones expect.
    with pytest.raises(CorruptRecord):
        decoded(int8, encoded(raw, values(KV), [KV]), [KV])
    zstd = Blobs(open_codec("shuffle-zstd"))
    assert decoded(zstd, encoded(raw, values(KV), [KV]), [KV]) == values(KV)


def test_what_does_not_fit_is_named() -> None:
    with pytest.raises(ConfigError, match="head_size"):
        Blobs(open_codec("int8")).bound([KV])
    with pytest.raises(ConfigError, match="128 elements per token are no multiple of head_size 48"):
        Blobs(open_codec("int8"), 48).bound([KV])
    blobs = Blobs(open_codec("raw"))
    with pytest.raises(ConfigError, match="holds 7"):
        blobs.encode(memoryview(bytes(7)), [KV], NAME, memoryview(bytearray(blobs.bound([KV]))))
    with pytest.raises(ConfigError, match="room for 10"):
        blobs.encode(memoryview(values(KV)), [KV], NAME, memoryview(bytearray(10)))
    with pytest.raises(ConfigError, match="holds nothing"):
        blobs.bound([Group((0,), "uint8", 1)])


def test_a_codec_with_a_profile_sees_the_layers_as_a_store_would() -> None:
    profile = small_profile(levels=(1,))
    register(profile)
    codec = codec_by_name("cachegen", profile)
    blobs = Blobs(codec)
    tokens = 50
    k, v = synthetic_kv(LAYOUT, tokens, seed=5)
    layers = [segment_of(k, v, layer, "bfloat16") for layer in range(LAYOUT.num_layers)]
    half = len(layers[0]) // 2
    parts = [*(each[:half] for each in layers), *(each[half:] for each in layers)]  # all K, then all V
    data = bytearray().join(bytes(part) for part in parts)
    group = Group((2, LAYOUT.num_layers, tokens, LAYOUT.num_kv_heads * LAYOUT.head_dim), "bfloat16", 2)
    blob = encoded(blobs, data, [group])
    assert len(blob) < 0.6 * len(data)
    back = decoded(blobs, blob, [group])
    assert back != data
    for layer, raw in enumerate(layers):
        about = SegmentInfo(2, layer, LAYOUT, "bfloat16", tokens, rope="applied")
        alone = bytearray(len(raw))
        codec.decode_into([part.data for part in codec.encode(raw, about)], memoryview(alone))
        assert back[layer * half : (layer + 1) * half] == alone[:half]
        at = (LAYOUT.num_layers + layer) * half
        assert back[at : at + half] == alone[half:]
    with pytest.raises(ConfigError, match="layers"):
        encoded(blobs, data[: 2 * half * 2], [group._replace(shape=(2, 2, *group.shape[2:]))])


class _TwoLevels(Codec):
    """Two levels, each nearly as long as the segment: more than it may take."""

    name = "two"
    number: ClassVar[int] = 77
    lossless = False
    levels = 2

    def encode(self, raw: memoryview, about: SegmentInfo) -> Sequence[Encoded]:
        return [Encoded(self.number, level, raw[1:]) for level in range(2)]

    def decode_into(self, parts: Sequence[memoryview], dst: memoryview) -> None:
        raise AssertionError("it was stored raw")


def test_levels_that_do_not_pay_together_are_left_out() -> None:
    blobs = Blobs(_TwoLevels(), WIDTH)
    data = values(KV)
    blob = encoded(blobs, data, [KV])
    assert len(blob) < len(data) + 200
    assert decoded(blobs, blob, [KV]) == data


def test_several_threads_share_one() -> None:
    blobs = Blobs(open_codec("int8"), WIDTH)
    data = [values(KV, seed) for seed in range(4)]
    alone = [decoded(blobs, encoded(blobs, each, [KV]), [KV]) for each in data]
    wrong: list[int] = []

    def work(number: int) -> None:
        for _ in range(10):
            if decoded(blobs, encoded(blobs, data[number], [KV]), [KV]) != alone[number]:
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
