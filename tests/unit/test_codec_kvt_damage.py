"""Damaged kvt segments: refused, or decoded to some values; nothing else happens."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from kvstore.codec.base import UnknownProfile
from kvstore.codec.floats import to_float32
from kvstore.codec.kvt import KvtCodec
from kvstore.codec.kvt_format import pack_positions, unpack_positions
from kvstore.errors import CorruptRecord
from kvstore.rope import MAX_POSITION

from .kvt_support import SMALL, info, make_profile, segment

TOKENS = 40


def original(seed: int) -> list[bytes]:
    """Levels of a segment with sinks, an outlier, missing tokens and, most likely, escapes."""
    profile = make_profile(levels=3, spread=3.0)
    _, k, v = segment(SMALL, TOKENS, "float16", seed=seed, scale=2.0)
    k[9] *= 100
    positions = np.sort(np.random.default_rng(seed).choice(500, TOKENS, replace=False)).astype(np.int32)
    positions[0] = 0
    raw = np.concatenate([k.ravel(), v.ravel()]).astype(np.float16).tobytes()
    about = info(SMALL, TOKENS, "float16", positions=positions)
    return [bytes(each.data) for each in KvtCodec(profile).encode(memoryview(raw), about)]


def damaged(parts: list[bytes], rng: np.random.Generator) -> list[bytes]:
    """One to three changes: bits, numbers of the header, cuts, additions, foreign bytes, other orders."""
    parts = list(parts)
    for _ in range(int(rng.integers(1, 4))):
        level = int(rng.integers(len(parts)))
        data = bytearray(parts[level])
        if not data:
            continue
        at, kind = int(rng.integers(len(data))), int(rng.integers(7))
        if kind == 0:
            data[at] ^= 1 << int(rng.integers(8))
        elif kind == 1:
            at = int(rng.integers(min(40, len(data))))
            data[at] = int(rng.choice([0, 1, 2, 127, 128, 255]))
        elif kind == 2:
            at = int(rng.integers(min(40, len(data))))
            data[at : at + 4] = int(rng.choice([0, 1, 4096, 1 << 31, (1 << 32) - 1])).to_bytes(4, "little")
        elif kind == 3:
            del data[at:]
        elif kind == 4:
            data += rng.bytes(int(rng.integers(1, 30)))
        elif kind == 5:
            data[at : at + 8] = rng.bytes(8)
        else:
            data[:] = parts[int(rng.integers(len(parts)))]
        parts[level] = bytes(data)
    return parts


def try_decoding(parts: list[bytes]) -> bool:
    """Whether it decoded. Checks that only the destination was written, with finite values."""
    size = SMALL.segment_bytes(TOKENS, "float16")
    room = bytearray(b"\xa5" * (size + 128))
    outcomes = []
    dst = memoryview(room)[64 : 64 + size]
    for one_by_one in (False, True):
        try:
            if one_by_one:
                decoder = KvtCodec().decoder(dst)
                for part in parts:
                    decoder.feed(memoryview(part))
            else:
                KvtCodec().decode_into([memoryview(part) for part in parts], dst)
        except (CorruptRecord, UnknownProfile):
            outcomes.append(None)
        else:
            outcomes.append(bytes(dst))
        assert set(room[:64]) | set(room[-64:]) == {0xA5}
    assert outcomes[0] == outcomes[1]
    return outcomes[0] is not None


def run(cases: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    sources = [original(n) for n in range(4)]
    assert all(try_decoding(parts) for parts in sources)
    decoded = sum(try_decoding(damaged(sources[n % 4], rng)) for n in range(cases))
    assert decoded < cases / 4  # a raw value was hit, or a position, or it is the same again


def test_damage_is_refused_or_decodes() -> None:
    run(300, seed=1)


@pytest.mark.slow
def test_damage_is_refused_or_decodes_ten_thousand_times() -> None:
    run(10_000, seed=2)


def test_a_coded_token_is_finite_whatever_the_stream_says() -> None:
    """Values are bounded by the profile: a decoder makes no inf of them."""
    parts = original(7)
    rng = np.random.default_rng(3)
    size = SMALL.segment_bytes(TOKENS, "float16")
    seen = 0
    for _ in range(400):
        data = bytearray(parts[1])
        data[int(rng.integers(16, len(data)))] ^= 1 << int(rng.integers(8))
        dst = bytearray(size)
        try:
            KvtCodec().decode_into([memoryview(parts[0]), memoryview(data)], memoryview(dst))
        except CorruptRecord:
            continue
        seen += 1
        assert np.isfinite(to_float32(memoryview(dst), "float16")).all()
    assert seen < 400


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.integers(0, MAX_POSITION - 1), min_size=1, max_size=60))
def test_positions_come_back(positions: list[int]) -> None:
    given_ = np.array(positions, np.int32)
    packed = pack_positions(given_)
    assert np.array_equal(unpack_positions(memoryview(packed), len(positions)), given_)
    for wrong in (packed[:-1], packed + b"\0", packed + b"\x80"):
        with pytest.raises(CorruptRecord):
            unpack_positions(memoryview(wrong), len(positions))


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=40), st.integers(1, 12))
def test_arbitrary_positions_are_refused_or_in_range(data: bytes, tokens: int) -> None:
    try:
        found = unpack_positions(memoryview(data), tokens)
    except CorruptRecord:
        return
    assert len(found) == tokens
    assert found.min() >= 0
    assert found.max() < MAX_POSITION
