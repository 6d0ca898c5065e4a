"""int8 and fp8: how far an element may be off, both implementations alike, the bytes themselves, and lies."""

from __future__ import annotations

import struct

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from kvstore.codec import codec_by_name
from kvstore.codec.base import RAW, SegmentInfo
from kvstore.codec.floats import FLOATS, finite, from_float32, to_float32
from kvstore.codec.scaled import ScaledCodec
from kvstore.errors import ConfigError, CorruptRecord
from kvstore.layout import DTYPES, KVLayout

HEAD = struct.Struct("<BBBBIIII")
CODECS = ("int8", "fp8")
LAYOUT = KVLayout(1, 2, 16)


def scaled(name: str) -> ScaledCodec:
    codec = codec_by_name(name)
    assert isinstance(codec, ScaledCodec)
    return codec


@pytest.fixture(params=["native", "numpy"])
def loops(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "native":
        pytest.importorskip("numba")
    else:
        monkeypatch.setattr("kvstore.codec.scaled.native", lambda: None)
    return str(request.param)


def about(layout: KVLayout, dtype: str, tokens: int) -> SegmentInfo:
    return SegmentInfo(DTYPES[dtype], 0, layout, dtype, tokens)


def segment(values: npt.NDArray[np.float32], dtype: str) -> bytes:
    out = bytearray(values.size * DTYPES[dtype])
    from_float32(values, dtype, memoryview(out))
    return bytes(out)


def round_trip(name: str, raw: bytes, info: SegmentInfo) -> tuple[int, bytes, bytes]:
    (encoded,) = scaled(name).encode(memoryview(raw), info)
    out = bytearray(len(raw))
    if encoded.codec == RAW:
        return RAW, bytes(encoded.data), raw
    scaled(name).decode_into((encoded.data,), memoryview(out))
    return encoded.codec, bytes(encoded.data), bytes(out)


def scales_of(data: bytes) -> npt.NDArray[np.float64]:
    """The scale of each vector, K then V, read from the bytes by the format's description."""
    _, _, nbytes, _, tokens, heads, _, v = HEAD.unpack_from(data)
    count = tokens * heads * (2 if v else 1)
    return np.frombuffer(data, f"<f{nbytes}", count, HEAD.size).astype(np.float64)


def half_step(values: npt.NDArray[np.float64], dtype: str) -> npt.NDArray[np.float64]:
    """Half of the distance between neighbours in `dtype`, around these values."""
    bits, least = {"bfloat16": (8, -133), "float16": (11, -24), "float32": (24, -149)}[dtype]
    exponent = np.frexp(values)[1] - bits
    return np.exp2(np.maximum(exponent, least).astype(np.float64)) / 2


@pytest.mark.parametrize("name", CODECS)
@settings(max_examples=40)
@given(
    dtype=st.sampled_from(FLOATS),
    layout=st.sampled_from(
        [KVLayout(1, 1, 16), KVLayout(1, 2, 8), KVLayout(1, 3, 16, v_head_dim=24), KVLayout(1, 1, 40, kind="mla")]
    ),
    tokens=st.integers(1, 6),
    data=st.data(),
)
def test_no_element_is_off_by_more_than_half_a_step(
    name: str, dtype: str, layout: KVLayout, tokens: int, data: st.DataObject
) -> None:
    count = tokens * layout.elements_per_token
    most = 65504.0 if dtype == "float16" else float(np.float32(3.3895e38))
    elements = st.floats(-most, most, width=32) | st.floats(-4, 4, width=32) | st.just(0.0)
    values = data.draw(hnp.arrays(np.float32, count, elements=elements))
    raw = segment(values, dtype)
    exact = to_float32(memoryview(raw), dtype).astype(np.float64)
    number, stored, out = round_trip(name, raw, about(layout, dtype, tokens))
    if number == RAW:
        assert len(stored) == len(raw)
        return
    after = to_float32(memoryview(out), dtype).astype(np.float64)
    widths = [layout.head_dim] + ([layout.v_head_dim] if layout.v_head_dim else [])
    rows = tokens * layout.num_kv_heads
    steps = np.concatenate(
        [np.repeat(scales_of(stored)[n * rows : (n + 1) * rows], width or 0) for n, width in enumerate(widths)]
    )
    allowed = steps / 2 if name == "int8" else np.maximum(np.abs(exact) / 16, steps * 2.0**-10)
    allowed = allowed * (1 + 1e-6) + half_step(np.maximum(np.abs(exact), np.abs(after)), dtype)
    assert (np.abs(after - exact) <= allowed).all()
    assert not after[steps == 0].any()
    # The scale is no larger than it must be.
    peaks = np.concatenate(
        [np.abs(part.reshape(rows, -1)).max(axis=1) for part in np.split(exact, [rows * layout.head_dim]) if part.size]
    )
    most_code = scaled(name).most
    assert (scales_of(stored) >= peaks / most_code).all()
    assert (scales_of(stored) <= peaks / most_code * (1 + 2**-9) + 2e-45).all()


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e-42, 1e37])
def test_machine_code_and_numpy_give_the_same_bytes(name: str, dtype: str, scale: float) -> None:
    pytest.importorskip("numba")
    if dtype == "float16":
        scale = {1e-30: 1e-4, 1e-42: 3e-7, 1e37: 1e4}.get(scale, scale)
    layout = KVLayout(1, 2, 64, v_head_dim=48)
    random = np.random.default_rng(3)
    values = (random.standard_normal(300 * layout.elements_per_token) * scale).astype(np.float32)
    values[:128] = 0
    raw, info, codec = segment(values, dtype), about(layout, dtype, 300), scaled(name)
    with pytest.MonkeyPatch.context() as patch:
        (machine,) = codec.encode(memoryview(raw), info)
        first = bytearray(len(raw))
        codec.decode_into((machine.data,), memoryview(first))
        patch.setattr("kvstore.codec.scaled.native", lambda: None)
        (plain,) = codec.encode(memoryview(raw), info)
        second = bytearray(len(raw))
        codec.decode_into((plain.data,), memoryview(second))
    assert machine.codec == plain.codec == codec.number
    assert bytes(machine.data) == bytes(plain.data)
    assert first == second


def test_every_half_and_every_e4m3_converts_as_torch_does(loops: str) -> None:
    torch = pytest.importorskip("torch")
    layout = KVLayout(1, 1, 128, kind="mla")
    # fp8: every code times scale 1 exists in float32.
    codes = np.arange(256, dtype=np.uint8)
    codes = codes[(codes & 0x7F) != 0x7F]
    codes = np.append(codes, [0, 0]).astype(np.uint8)  # 256, two vectors of 128
    data = HEAD.pack(1, 2, 4, 0, 2, 1, 128, 0) + struct.pack("<2f", 1, 1) + codes.tobytes()
    out = np.empty(256, np.float32)
    scaled("fp8").decode_into((memoryview(data),), out.data.cast("B"))
    expected = torch.frombuffer(bytearray(codes), dtype=torch.float8_e4m3fn).to(torch.float32).numpy()
    assert np.array_equal(out, expected)
    # To e4m3: ties and subnormals, against torch.
    random = np.random.default_rng(0)
    values = np.concatenate([random.uniform(-448, 448, 2000), random.uniform(-0.05, 0.05, 2000), expected,
                             (expected[:-1] + expected[1:]) / 2]).astype(np.float32)  # fmt: skip
    values = np.append(values, np.zeros(-len(values) % 127, np.float32)).reshape(-1, 127)
    values = np.concatenate([np.full((len(values), 1), 448, np.float32), values], axis=1)  # so that every scale is 1
    (encoded,) = scaled("fp8").encode(memoryview(values.tobytes()), about(layout, "float32", len(values)))
    assert set(scales_of(bytes(encoded.data))) == {1.0}
    got = np.frombuffer(encoded.data, np.uint8)[-values.size :]
    want = torch.from_numpy(values).to(torch.float8_e4m3fn).view(torch.uint8).numpy().ravel()
    assert np.array_equal(got, want)
    # Every finite half comes back from a code of its own scale, if it is the largest of its vector.
    halves = np.arange(0x7C00, dtype=np.uint16)
    halves = np.concatenate([halves, halves | 0x8000])
    rows = np.zeros((len(halves), 128), np.uint16)
    rows[:, 5] = halves
    _, _, back = round_trip("int8", rows.tobytes(), about(layout, "float16", len(rows)))
    restored = np.frombuffer(back, "<f2").reshape(-1, 128)[:, 5].astype(np.float64)
    original = halves.view("<f2").astype(np.float64)
    assert (np.abs(restored - original) <= np.abs(original) * 2.0**-9 + 2.0**-25).all()


def test_the_format_is_pinned() -> None:
    """One token, one head, K and V of 6 elements, float32."""
    layout = KVLayout(1, 1, 6)
    raw = struct.pack("<12f", 1, -2, 0.5, 0, 0, 0, 0, 0, 0, 0, 0, 127)
    number, data, _ = round_trip("int8", raw, about(layout, "float32", 1))
    assert number == 3
    scale = np.float16(2 / 127)
    if float(scale) < 2 / 127:  # rounded up
        scale = np.nextafter(scale, np.float16(1))
    head = HEAD.pack(1, 2, 2, 0, 1, 1, 6, 6)
    codes = bytes([63, 129, 32, 0, 0, 0, 0, 0, 0, 0, 0, 127])
    assert data == head + np.array([scale, 1], "<f2").tobytes() + codes
    number, data, _ = round_trip("fp8", raw, about(layout, "float32", 1))
    assert number == 4
    assert data[:20] == head
    assert data[24:] == bytes([0x76, 0xFE, 0x6E, 0, 0, 0, 0, 0, 0, 0, 0, 0x7E])


@pytest.mark.parametrize("name", CODECS)
def test_scales_of_huge_and_tiny_values_are_single(name: str) -> None:
    for scale, dtype, nbytes in (
        (1.0, "bfloat16", 2),
        (1e38, "bfloat16", 4),
        (1e-38, "bfloat16", 4),
        (6e4, "float16", 2),
        (1e-7, "float16", 4),
    ):
        values = np.linspace(-1, 1, 10 * LAYOUT.elements_per_token, dtype=np.float32) * np.float32(scale)
        _, data, out = round_trip(name, segment(values, dtype), about(LAYOUT, dtype, 10))
        assert data[2] == nbytes
        assert finite(memoryview(out), dtype)


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_the_largest_finite_values_do_not_overflow(name: str, dtype: str, loops: str) -> None:
    most = {"bfloat16": 0x7F7F, "float16": 0x7BFF, "float32": 0x7F7FFFFF}[dtype]
    words = np.full(10 * LAYOUT.elements_per_token, most, f"<u{DTYPES[dtype]}")
    words[::3] |= 1 << (8 * words.itemsize - 1)
    raw = words.tobytes()
    number, _, out = round_trip(name, raw, about(LAYOUT, dtype, 10))
    assert number != RAW
    assert out == raw


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("dtype", ["int8", "uint8", "float8_e4m3fn", "float8_e5m2"])
def test_elements_of_8_bits_are_stored_as_they_are(name: str, dtype: str) -> None:
    raw = bytes(range(256)) * 2
    assert round_trip(name, raw, about(LAYOUT, dtype, 8))[0] == RAW


@pytest.mark.parametrize("name", CODECS)
def test_a_vector_too_short_to_gain_is_stored_as_it_is(name: str) -> None:
    raw = segment(np.ones(20, np.float32), "bfloat16")
    assert round_trip(name, raw, about(KVLayout(1, 1, 1), "bfloat16", 10))[0] == RAW


@pytest.mark.parametrize("name", CODECS)
def test_a_segment_of_another_length_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"4 tokens of bfloat16 has 512 bytes in this layout, not 510"):
        scaled(name).encode(memoryview(bytes(510)), about(LAYOUT, "bfloat16", 4))


GOOD = HEAD.pack(1, 0, 2, 0, 1, 1, 2, 2) + struct.pack("<2e", 1, 1) + bytes([1, 2, 3, 4])
LIES = {
    "version": GOOD.replace(b"\1", b"\2", 1),
    "dtype": GOOD[:1] + b"\3" + GOOD[2:],
    "scale bytes": GOOD[:2] + b"\3" + GOOD[3:],
    "reserved": GOOD[:3] + b"\1" + GOOD[4:],
    "no tokens": HEAD.pack(1, 0, 2, 0, 0, 1, 2, 2) + GOOD[20:],
    "2^32 tokens": HEAD.pack(1, 0, 2, 0, 2**32 - 1, 2**32 - 1, 2**32 - 1, 2**32 - 1) + GOOD[20:],
    "no K": HEAD.pack(1, 0, 2, 0, 1, 1, 0, 4) + GOOD[20:],
    "an infinite scale": GOOD[:20] + struct.pack("<e", float("inf")) + GOOD[22:],
    "a nan scale": GOOD[:20] + struct.pack("<e", float("nan")) + GOOD[22:],
    "a negative scale": GOOD[:20] + struct.pack("<e", -1.0) + GOOD[22:],
    "cut": GOOD[:-1],
    "more": GOOD + b"\0",
    "cut in the header": GOOD[:19],
    "empty": b"",
}


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("lie", LIES)
def test_lies_are_corrupt(name: str, lie: str) -> None:
    scaled(name).decode_into((memoryview(GOOD),), memoryview(bytearray(8)))
    with pytest.raises(CorruptRecord):
        scaled(name).decode_into((memoryview(LIES[lie]),), memoryview(bytearray(8)))


@pytest.mark.parametrize(("name", "code"), [("int8", 0x80), ("fp8", 0x7F), ("fp8", 0xFF)])
def test_codes_that_no_encoder_writes_are_corrupt(name: str, code: int, loops: str) -> None:
    with pytest.raises(CorruptRecord, match="code"):
        scaled(name).decode_into((memoryview(GOOD[:-1] + bytes([code])),), memoryview(bytearray(8)))


# --- conversion


def test_conversion_is_that_of_torch() -> None:
    torch = pytest.importorskip("torch")
    random = np.random.default_rng(1)
    bits = random.integers(0, 2**32, 200_000, dtype=np.uint32)
    bits[:4] = (0x7F800000, 0xFF800000, 0x7FC00000, 0x7F800001)  # inf, nan, and a nan whose upper half is that of inf
    values = bits.view(np.float32)
    for dtype in ("bfloat16", "float16"):
        out = bytearray(2 * len(values))
        from_float32(values, dtype, memoryview(out))
        got = torch.frombuffer(out, dtype=getattr(torch, dtype))
        want = torch.from_numpy(values).to(got.dtype)
        assert torch.equal(got.isnan(), want.isnan())
        kept = ~want.isnan()
        assert torch.equal(got[kept].view(torch.int16), want[kept].view(torch.int16))
        every = np.arange(1 << 16, dtype="<u2").tobytes()
        back = to_float32(memoryview(every), dtype)
        expected = torch.frombuffer(bytearray(every), dtype=getattr(torch, dtype)).float().numpy()
        assert np.array_equal(back, expected, equal_nan=True)
        again = bytearray(len(every))
        from_float32(back, dtype, memoryview(again))
        words, before = np.frombuffer(again, "<u2"), np.frombuffer(every, "<u2")
        assert np.array_equal(words[~np.isnan(back)], before[~np.isnan(back)])
        assert np.isnan(to_float32(memoryview(again), dtype)[np.isnan(back)]).all()
        assert [finite(memoryview(every)[2 * n : 2 * n + 2], dtype) for n in (0, 0x7C00, 0x7F7F, 0x7F80, 0xFF80)] == (
            [True, True, True, False, False] if dtype == "bfloat16" else [True, False, False, False, False]
        )


def test_float32_is_kept_bit_by_bit_and_bad_input_named() -> None:
    bits = np.random.default_rng(2).integers(0, 2**32, 1000, dtype=np.uint32)
    shifted = memoryview(b"x" + bits.tobytes())[1:]
    values = to_float32(shifted, "float32")
    assert values.flags.aligned
    assert values.tobytes() == bits.tobytes()
    out = bytearray(4001)
    from_float32(values, "fp32", memoryview(out)[1:])
    assert out[1:] == bits.tobytes()
    assert finite(memoryview(b""), "bfloat16")
    for bad in ("int8", "float64"):
        with pytest.raises(ConfigError, match=bad):
            to_float32(memoryview(bytes(8)), bad)
    with pytest.raises(ConfigError, match="whole number"):
        to_float32(memoryview(bytes(7)), "bfloat16")
    with pytest.raises(ConfigError, match="3 values do not fit"):
        from_float32(np.zeros(3, np.float32), "bfloat16", memoryview(bytearray(8)))
