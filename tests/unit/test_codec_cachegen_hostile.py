"""Damaged and hostile cachegen segments: refused, or decoded to as many bytes as were asked for, nothing else."""

from __future__ import annotations

import random
import struct
import tracemalloc

import numpy as np
import pytest

from kvstore.codec.base import UnknownProfile
from kvstore.codec.cachegen import CachegenCodec
from kvstore.codec.profile import Profile, register
from kvstore.errors import CorruptRecord

from .codec_profile_support import LAYOUT, encode, segment_of, small_profile, synthetic_kv

HEAD = struct.Struct("<BBHIBBH8sIII")
FIELDS = ("version", "dtype", "layer", "tokens", "level", "part", "reserved", "profile", "anchors", "deltas", "escapes")
TOKENS = 37


def profiles() -> list[Profile]:
    return [
        small_profile(levels=(1.0, 0.25)),
        small_profile(levels=((8, 5, 3),)),
        small_profile(levels=(1.8, 0.6, 0.2), embedded=True),
    ]


def segment(profile: Profile, dtype: str = "float16", layer: int = 1) -> tuple[list[bytes], int]:
    """A segment with some deltas beyond the alphabet, if the steps are fixed; its raw length."""
    k, v = synthetic_kv(LAYOUT, TOKENS)
    k[:, 5] *= 30
    raw = segment_of(k, v, layer, dtype)
    return encode(CachegenCodec(profile), raw, layer, dtype, TOKENS), len(raw)


def changed(encoded: bytes, /, **fields: int | bytes) -> bytes:
    values = dict(zip(FIELDS, HEAD.unpack_from(encoded), strict=True))
    return HEAD.pack(*{**values, **fields}.values()) + encoded[HEAD.size :]


def attempt(codec: CachegenCodec, parts: list[bytes], nbytes: int) -> bool:
    """Whether it decoded. Nothing around the destination is touched; no other error comes out."""
    guarded = bytearray(b"\x77" * (nbytes + 128))
    try:
        codec.decode_into([memoryview(part) for part in parts], memoryview(guarded)[64 : 64 + nbytes])
    except (CorruptRecord, UnknownProfile):
        decoded = False
    else:
        decoded = True
    assert guarded[:64] == guarded[-64:] == b"\x77" * 64
    return decoded


@pytest.mark.parametrize("profile", profiles(), ids=["steps", "bits", "embedded"])
def test_every_cut_and_extension_is_refused(profile: Profile) -> None:
    codec = CachegenCodec(profile)
    parts, nbytes = segment(profile)
    assert attempt(codec, parts, nbytes)
    for at, part in enumerate(parts):
        for length in range(0, len(part), 1 if at else 3):
            assert not attempt(codec, [*parts[:at], part[:length]], nbytes)
        for more in (1, 2, 64):
            assert not attempt(codec, [*parts[:at], part + bytes(more)], nbytes)
    for other in (0, 2, nbytes - 2, nbytes + 2, nbytes * 2):
        assert not attempt(codec, parts, other)


@pytest.mark.parametrize(
    "fields",
    [
        {"version": 0}, {"version": 2}, {"dtype": 3}, {"dtype": 2}, {"dtype": 255}, {"layer": 3}, {"layer": 65535},
        {"tokens": 0}, {"tokens": TOKENS - 1}, {"tokens": TOKENS + 1}, {"tokens": (1 << 32) - 1}, {"level": 9},
        {"level": 255}, {"part": 1}, {"part": 200}, {"reserved": 1}, {"anchors": 0}, {"anchors": (1 << 32) - 1},
        {"deltas": 0}, {"deltas": (1 << 32) - 1}, {"escapes": (1 << 32) - 1}, {"escapes": 0},
    ],
)  # fmt: skip
@pytest.mark.parametrize("profile", profiles(), ids=["steps", "bits", "embedded"])
def test_every_field_of_the_head_is_checked(profile: Profile, fields: dict[str, int]) -> None:
    parts, nbytes = segment(profile)
    values = dict(zip(FIELDS, HEAD.unpack_from(parts[0]), strict=True))
    fields = {name: value + (values[name] == value) for name, value in fields.items()}  # another one than it has
    with pytest.raises(CorruptRecord):
        CachegenCodec(profile).decode_into([memoryview(changed(parts[0], **fields))], memoryview(bytearray(nbytes)))


def test_lengths_that_claim_the_moon_cost_nothing() -> None:
    profile = profiles()[0]
    codec = CachegenCodec(profile)
    parts, nbytes = segment(profile)
    attempt(codec, parts, nbytes)  # tables are made
    bad = changed(parts[0], tokens=(1 << 32) - 1, anchors=(1 << 32) - 1, deltas=(1 << 32) - 1, escapes=(1 << 32) - 1)
    tracemalloc.start()
    assert not attempt(codec, [bad], nbytes)
    assert tracemalloc.get_traced_memory()[1] < 1 << 16
    tracemalloc.stop()


def test_sums_that_hide_what_is_missing() -> None:
    """Bytes moved from one stream to the other: lengths add up, streams do not."""
    profile = profiles()[0]
    codec = CachegenCodec(profile)
    (part,), nbytes = segment(profile)
    values = dict(zip(FIELDS, HEAD.unpack_from(part), strict=True))
    for shift in (2, -2, 1, 64):
        moved = changed(part, anchors=values["anchors"] + shift, deltas=values["deltas"] - shift)
        assert not attempt(codec, [moved], nbytes)
    for shift in (1, -1):
        moved = changed(part, escapes=values["escapes"] + shift, deltas=values["deltas"] - 2 * shift)
        assert not attempt(codec, [moved], nbytes)


def test_streams_of_half_a_word() -> None:
    """What is decoded on a GPU is looked at as words, all segments together."""
    pytest.importorskip("triton")
    torch = pytest.importorskip("torch")
    from kvstore.codec.cachegen_kernel import decode_segments

    profile = profiles()[0]
    (part,), nbytes = segment(profile)
    longer = changed(part, deltas=dict(zip(FIELDS, HEAD.unpack_from(part), strict=True))["deltas"] + 1) + b"\0"
    assert not attempt(CachegenCodec(profile), [longer], nbytes)
    with pytest.raises(CorruptRecord):
        decode_segments([longer], torch.empty((1, nbytes // 2), dtype=torch.float16), profile)


def test_steps_that_no_encoder_writes() -> None:
    for profile in profiles():
        parts, nbytes = segment(profile)
        for bits in (0x7F80, 0x7FC0, 0xFF80, 0x8001, 0x7F00, 0xFFFF):
            bad = bytearray(parts[0])
            struct.pack_into("<H", bad, HEAD.size, bits)
            with pytest.raises(CorruptRecord, match="impossible step"):
                CachegenCodec(profile).decode_into([memoryview(bad)], memoryview(bytearray(nbytes)))


def test_another_codecs_profile_or_a_broken_one() -> None:
    (part,), nbytes = segment(profiles()[0])
    other = Profile("kvt", "m", LAYOUT)
    broken = Profile("cachegen", "m", LAYOUT)
    register(other)
    register(broken)
    with pytest.raises(CorruptRecord, match="names profile"):
        CachegenCodec().decode_into([memoryview(changed(part, profile=other.id_bytes))], memoryview(bytearray(nbytes)))
    with pytest.raises(UnknownProfile, match=broken.id):
        CachegenCodec().decode_into([memoryview(changed(part, profile=broken.id_bytes))], memoryview(bytearray(nbytes)))


def fuzz(cases: int, seed: int) -> tuple[int, int]:
    """(refused, decoded to something of the right size)."""
    rng = random.Random(seed)
    ready = [(CachegenCodec(profile), *segment(profile)) for profile in profiles()]
    refused = decoded = 0
    for _ in range(cases):
        codec, parts, nbytes = rng.choice(ready)
        bad = [bytearray(part) for part in parts[: rng.randint(1, len(parts))]]
        part = rng.choice(bad)
        for _ in range(rng.choice((1, 1, 1, 2, 5))):
            kind = rng.randrange(5)
            place = rng.randrange(len(part)) if rng.random() < 0.6 else rng.randrange(min(len(part), 40))
            if kind <= 1:
                part[place] ^= 1 << rng.randrange(8)
            elif kind == 2:
                part[place : place + 4] = rng.randbytes(4)
            elif kind == 3:
                part[place : place + rng.randrange(1, 9)] = b""
            else:
                part[place:place] = rng.randbytes(rng.randrange(1, 9))
            if not part:
                part += b"\0"
        if attempt(codec, [bytes(each) for each in bad], nbytes):
            decoded += 1
        else:
            refused += 1
    return refused, decoded


def test_fuzzed_segments() -> None:
    refused, decoded = fuzz(300, 1)
    assert refused > 150
    assert refused + decoded == 300


@pytest.mark.slow
def test_ten_thousand_fuzzed_segments() -> None:
    refused, decoded = fuzz(10_000, 2)
    assert refused > 5_000
    assert refused + decoded == 10_000


def test_what_decodes_is_finite() -> None:
    """Damage that only a checksum can see (records have one) makes other numbers, not inf or nan."""
    rng = np.random.default_rng(4)
    profile = profiles()[1]
    codec = CachegenCodec(profile)
    (part,), nbytes = segment(profile)
    found = 0
    for _ in range(60):
        bad = bytearray(part)
        place = HEAD.size + int(rng.integers(0, 60))  # steps
        bad[place] ^= 1 << int(rng.integers(0, 8))
        out = bytearray(nbytes)
        try:
            codec.decode_into([memoryview(bad)], memoryview(out))
        except CorruptRecord:
            continue
        found += 1
        assert np.isfinite(np.frombuffer(out, np.float16)).all()
    assert found
