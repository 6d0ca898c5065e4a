"""The entropy coder: numpy, numba and Triton give and take the same bytes, and a damaged stream is refused."""

from __future__ import annotations

import os
import subprocess
import sys
from types import ModuleType

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from kvstore.codec import rans
from kvstore.codec.rans import native, reference
from kvstore.errors import ConfigError, CorruptRecord

CODERS: tuple[ModuleType, ...] = (reference, native)


@st.composite
def cases(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, rans.Distributions]:
    """Symbols, contexts, distributions: skewed, flat, and with only one symbol."""
    tokens = draw(st.integers(1, 40) | st.just(600))
    channels = draw(st.integers(1, 40))
    alphabet = draw(st.sampled_from([1, 2, 3, 17, 256]))
    classes = draw(st.integers(1, 9))
    rng = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    distributions = rans.Distributions.from_counts(rng.random((classes, alphabet)) ** draw(st.sampled_from([0, 1, 30])))
    contexts = rng.integers(0, classes, (tokens, channels) if draw(st.booleans()) else channels)
    if draw(st.booleans()):  # what is likely
        kinds = np.broadcast_to(contexts, (tokens, channels))
        ends = np.cumsum(distributions.frequencies, axis=1, dtype=np.int64)[kinds]
        symbols = (rng.integers(0, 4096, (tokens, channels, 1)) >= ends).sum(-1)
    else:
        symbols = rng.integers(0, alphabet, (tokens, channels))
    return symbols.astype(np.uint8), contexts, distributions


@settings(max_examples=120, deadline=None)
@given(cases())
def test_the_coders_give_and_take_the_same_bytes(case: tuple[np.ndarray, np.ndarray, rans.Distributions]) -> None:
    symbols, contexts, distributions = case
    streams = {rans.encode(symbols, contexts, distributions, using=coder) for coder in CODERS}
    assert len(streams) == 1
    (stream,) = streams
    assert len(stream) <= rans.stream_bound(*symbols.shape)
    for coder in CODERS:
        out = np.full_like(symbols, 255)
        rans.decode(stream, out, contexts, distributions, using=coder)
        assert np.array_equal(out, symbols)


def test_the_triton_kernels_are_the_same_coder() -> None:
    pytest.importorskip("torch")
    pytest.importorskip("triton")
    code = """
import numpy as np
from kvstore.codec import rans
from kvstore.codec.rans import kernel, reference
rng = np.random.default_rng(3)
for tokens, channels, alphabet, classes, per_symbol in [
    (1, 1, 2, 1, False), (9, 7, 5, 3, True), (21, 40, 256, 40, True), (9, 96, 17, 40, False), (530, 3, 16, 9, False)
]:
    distributions = rans.Distributions.from_counts(rng.random((classes, alphabet)) ** 8)
    symbols = rng.integers(0, alphabet, (tokens, channels)).astype(np.uint8)
    contexts = rng.integers(0, classes, (tokens, channels) if per_symbol else channels)
    stream = rans.encode(symbols, contexts, distributions, using=kernel)
    assert stream == rans.encode(symbols, contexts, distributions, using=reference)
    out = np.zeros_like(symbols)
    rans.decode(stream, out, contexts, distributions, using=kernel)
    assert np.array_equal(out, symbols)
    short = np.zeros_like(symbols)
    try:
        rans.decode(stream[:-2], short, contexts, distributions, using=kernel)
    except Exception as error:
        assert type(error).__name__ == "CorruptRecord", error
    else:
        raise AssertionError("a short stream was decoded")
print("equal")
"""
    # Triton decides at its import whether it interprets, so this has a process of its own.
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout.strip() == "equal", done.stderr


@pytest.mark.parametrize("coder", CODERS)
@settings(max_examples=60, deadline=None)
@given(case=cases(), damage=st.data())
def test_a_damaged_stream_is_refused_or_decodes_to_symbols(
    coder: ModuleType, case: tuple[np.ndarray, np.ndarray, rans.Distributions], damage: st.DataObject
) -> None:
    """It has no checksum of its own (records have); but nothing is read or written out of bounds."""
    symbols, contexts, distributions = case
    stream = bytearray(rans.encode(symbols, contexts, distributions))
    kind = damage.draw(st.sampled_from(["flip", "cut", "more", "noise"]))
    if kind == "flip":
        stream[damage.draw(st.integers(0, len(stream) - 1))] ^= damage.draw(st.integers(1, 255))
    elif kind == "cut":
        del stream[damage.draw(st.integers(0, len(stream) - 1)) :]
    elif kind == "more":
        stream += damage.draw(st.binary(min_size=1, max_size=64))
    else:
        stream[:] = damage.draw(st.binary(max_size=2 * len(stream)))
    guarded = np.full(symbols.size + 64, 77, np.uint8)
    out = guarded[32 : 32 + symbols.size].reshape(symbols.shape)
    try:
        rans.decode(bytes(stream), out, contexts, distributions, using=coder)
    except CorruptRecord:
        pass
    else:
        assert kind in ("flip", "noise"), "its length shows that it is another one"
        assert int(out.max()) < distributions.symbols
    assert (guarded[:32] == 77).all()
    assert (guarded[-32:] == 77).all()


@pytest.mark.parametrize(("tokens", "most"), [(256, 1.10), (1536, 1.03)])
def test_a_stream_is_hardly_longer_than_the_entropy(tokens: int, most: float) -> None:
    rng = np.random.default_rng(5)
    distances = np.abs(np.arange(16) - 7)
    weights = np.exp(-distances / np.linspace(0.3, 2, 64)[:, None])
    distributions = rans.Distributions.from_counts(weights)
    contexts = rng.integers(0, 64, 192)
    shares = weights / weights.sum(1, keepdims=True)
    ends = np.cumsum(shares, axis=1)[contexts]
    symbols = (rng.random((tokens, 192, 1)) >= ends).sum(-1).clip(max=15).astype(np.uint8)
    entropy = -np.log2(shares[contexts, symbols]).sum() / 8  # of the true distributions, not the rounded ones
    assert entropy / symbols.size < 2.5 / 8
    assert len(rans.encode(symbols, contexts, distributions)) <= most * entropy


def test_the_bits_of_a_class_are_those_of_its_frequencies() -> None:
    distributions = rans.Distributions([[4096, 0, 0], [2048, 1024, 1024]])
    assert distributions.bits.tolist() == [[0.0, np.inf, np.inf], [1.0, 2.0, 2.0]]


def test_a_symbol_that_is_certain_costs_nothing() -> None:
    distributions = rans.Distributions([[0, 4096]])
    symbols = np.ones((300, 8), np.uint8)
    assert len(rans.encode(symbols, np.zeros(8, int), distributions)) == 4 * rans.lanes_for(300, 8)


@pytest.mark.parametrize(
    "counts", [[[1.0, -1.0]], [[np.nan, 1.0]], [[np.inf, 1.0]], [1.0, 2.0], np.ones((1, 257)), np.ones((1, 0))]
)
def test_counts_that_make_no_distribution_are_refused(counts: object) -> None:
    with pytest.raises(ConfigError):
        rans.Distributions.from_counts(np.asarray(counts))


@pytest.mark.parametrize("frequencies", [[[4095]], [[4097]], [[-1, 4097]], [4096], [[0.5, 4095.5]]])
def test_frequencies_must_sum_to_4096(frequencies: object) -> None:
    with pytest.raises(ConfigError):
        rans.Distributions(frequencies)


def test_what_cannot_be_coded_is_said() -> None:
    distributions = rans.Distributions([[4096, 0], [2048, 2048]])
    zeros = np.zeros((2, 3), np.uint8)
    with pytest.raises(ConfigError, match="frequency 0"):
        rans.encode(zeros + 1, np.zeros(3, int), distributions)
    with pytest.raises(ConfigError, match="beyond the 2"):
        rans.encode(zeros + 2, np.ones(3, int), distributions)
    with pytest.raises(ConfigError, match="class beyond the 2"):
        rans.encode(zeros, np.full(3, 2), distributions)
    with pytest.raises(ConfigError, match="contexts have the shape"):
        rans.encode(zeros, np.zeros(2, int), distributions)
    with pytest.raises(ConfigError, match="uint8"):
        rans.encode(zeros.astype(np.int32), np.zeros(3, int), distributions)


def test_reciprocals_divide_exactly() -> None:
    """At the ends of what a state may be, for every frequency, and around multiples of it."""
    first = np.arange(1, 4096)
    table = rans.Distributions(np.stack((first, 4096 - first), 1)).reciprocals.reshape(-1, 2, 2)[:, 0]
    table = np.concatenate((table, rans.Distributions([[4096]]).reciprocals.reshape(-1, 2)))
    f = np.arange(1, 4097, dtype=np.uint64)
    assert np.array_equal(table[:, 1] & np.uint64(0xFFFF), f)
    assert np.array_equal(table[:, 1] >> np.uint64(16) & np.uint64(0xFFFF), 4096 - f)
    rng = np.random.default_rng(0)
    quotients = np.concatenate((np.arange(300), [2**20 - 1, 2**20 - 2], rng.integers(0, 2**20, 300))).astype(np.uint64)
    for q in quotients:
        for rest in (0 * f, f // 2, f - 1):
            state = q * f + rest
            assert np.array_equal(state * table[:, 0] >> np.uint64(44), np.full(4096, q))


def test_an_empty_matrix_is_an_empty_stream() -> None:
    distributions = rans.Distributions([[4096]])
    empty = np.zeros((0, 5), np.uint8)
    assert rans.encode(empty, np.zeros(5, int), distributions) == b""
    rans.decode(b"", empty, np.zeros(5, int), distributions)
    with pytest.raises(CorruptRecord):
        rans.decode(b"\0\0", empty, np.zeros(5, int), distributions)


def test_the_reference_serves_where_numba_is_missing() -> None:
    code = """
import sys
sys.modules["numba"] = None
from kvstore.codec.rans import coder, reference
assert coder.coder() is reference
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
