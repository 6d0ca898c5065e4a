"""Lossless codecs: exact for any bytes, smaller on KV, and unimpressed by lies in what they decode."""

from __future__ import annotations

import struct
import subprocess
import sys
import textwrap
import threading
import time
import tracemalloc

import lz4.block
import numpy as np
import pytest
import zstandard
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvstore.codec import CODEC_NAMES, LOSSY, codec_by_name, codec_by_number
from kvstore.codec.base import RAW, Codec, Encoded, SegmentInfo
from kvstore.errors import ConfigError, CorruptRecord

LOSSLESS = ("raw", "lz4", "shuffle-zstd")
PACKING = ("lz4", "shuffle-zstd")
ITEMSIZES = (1, 2, 4, 8)
HEAD = struct.Struct("<BBHIQ")
PACKED = 1 << 31


def kv_like(nbytes: int, dtype: str = "bfloat16", seed: int = 0) -> bytes:
    """Gaussian values whose scale differs from channel to channel, as in a KV cache: 192 channels, token-major."""
    random = np.random.default_rng(seed)
    count = nbytes // {"bfloat16": 2, "float16": 2, "float32": 4, "int8": 1}[dtype] + 1
    scale = np.exp(random.normal(0, 0.7, 192))
    values = (random.standard_normal((-(-count // 192), 192)) * scale).astype(np.float32).ravel()[:count]
    if dtype == "bfloat16":
        return (values.view(np.uint32) >> 16).astype("<u2").tobytes()[:nbytes]
    if dtype == "int8":
        return np.clip(values * 20, -127, 127).astype(np.int8).tobytes()[:nbytes]
    return values.astype("<f2" if dtype == "float16" else "<f4").tobytes()[:nbytes]


def encode(codec: Codec, raw: bytes | memoryview, *, itemsize: int) -> Encoded:
    """The one level of a segment."""
    (encoded,) = codec.encode(raw if isinstance(raw, memoryview) else memoryview(raw), SegmentInfo(itemsize=itemsize))
    return encoded


def decode(encoded: Encoded, nbytes: int, *, offset: int = 0) -> bytes:
    """Decode into the middle of a larger buffer, `offset` bytes off its alignment; what is around must not change."""
    room = bytearray(b"\xa5" * (nbytes + 64))
    view = memoryview(room)[16 + offset : 16 + offset + nbytes]
    codec_by_number(encoded.codec).decode_into((encoded.data,), view)
    assert room[: 16 + offset] == b"\xa5" * (16 + offset)
    assert set(room[16 + offset + nbytes :]) == {0xA5}
    return bytes(view)


def reference_decode(codec: Codec, data: bytes, nbytes: int) -> bytes:
    """The format read plainly, byte by byte, from its description alone."""
    version, itemsize, reserved, block, raw_length = HEAD.unpack_from(data)
    assert (version, reserved, raw_length) == (1, 0, nbytes)
    elements = nbytes // itemsize
    blocks = -(-elements // block)
    table = struct.unpack_from(f"<{blocks * itemsize}I", data, HEAD.size)
    at = HEAD.size + 4 * len(table)
    out = bytearray(nbytes)
    for index, entry in enumerate(table):
        plane, begin = index // blocks, index % blocks * block
        count = min(block, elements - begin)
        piece = data[at : at + (entry & ~PACKED)]
        at += len(piece)
        if entry & PACKED and codec.name == "lz4":
            piece = lz4.block.decompress(piece, uncompressed_size=count)
        elif entry & PACKED:
            piece = zstandard.ZstdDecompressor().decompress(piece)
        assert len(piece) == count
        out[begin * itemsize + plane : (begin + count) * itemsize : itemsize] = piece
    out[elements * itemsize :] = data[at:]
    return bytes(out)


def segment(payload: bytes, *, nbytes: int, packed: bool = True, itemsize: int = 1) -> memoryview:
    """A hand-made segment of one block per plane, all in `payload`, which is given to the first plane."""
    first = len(payload) | (PACKED if packed else 0)
    head = HEAD.pack(1, itemsize, 0, 1 << 20, nbytes) + struct.pack(f"<{itemsize}I", first, *[0] * (itemsize - 1))
    return memoryview(head + payload)


# --- the registry


def test_registry_knows_each_codec_by_name_and_number() -> None:
    assert (*LOSSLESS, "int8", "fp8", "cachegen", "kvt") == CODEC_NAMES
    assert frozenset({3, 4, 5, 6}) == LOSSY
    for number, name in enumerate(LOSSLESS):
        codec = codec_by_name(name)
        assert (codec.name, codec.number, codec.lossless) == (name, number, True)
        assert codec_by_number(number) is codec
    assert codec_by_name("none") is codec_by_name("raw")
    assert codec_by_name("raw").number == RAW


def test_unknown_name_lists_the_known_ones() -> None:
    known = "raw, lz4, shuffle-zstd, int8, fp8, cachegen, kvt, none"
    with pytest.raises(ConfigError, match=f"'zip'; known codecs: {known}"):
        codec_by_name("zip")


@pytest.mark.parametrize("name", ["cachegen", "kvt"])
def test_a_codec_that_needs_a_profile_says_how_to_make_one(name: str) -> None:
    with pytest.raises(ConfigError, match=f"codec_profile.*kvstore-codec profile --codec {name} --model"):
        codec_by_name(name)


@pytest.mark.parametrize("number", [7, 255, -1])
def test_unknown_number_is_a_corrupt_record(number: int) -> None:
    with pytest.raises(CorruptRecord, match=str(number)):
        codec_by_number(number)


def test_the_registry_loads_no_library_before_it_is_needed() -> None:
    code = """
        import sys
        from kvstore.codec import codec_by_name
        codec_by_name("raw")
        print(sorted({"numpy", "zstandard", "lz4"} & set(sys.modules)))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"


# --- exactness

structured = st.builds(
    lambda pattern, repeat, junk: (pattern * repeat)[: 1 << 18] + junk,
    st.binary(max_size=300),
    st.integers(0, 4000),
    st.binary(max_size=40),
)
kv_bytes = st.builds(
    kv_like,
    st.integers(0, 70_000),
    st.sampled_from(["bfloat16", "float16", "float32", "int8"]),
    st.integers(0, 3),
)


@pytest.mark.parametrize("name", LOSSLESS)
@settings(max_examples=150, deadline=None, derandomize=True)
@given(raw=st.one_of(structured, kv_bytes), itemsize=st.sampled_from(ITEMSIZES), offset=st.integers(0, 7))
@example(raw=b"", itemsize=2, offset=0)
@example(raw=b"\x80", itemsize=4, offset=1)
@example(raw=bytes(256), itemsize=8, offset=3)
@example(raw=bytes(1 << 20) + b"tail!!!", itemsize=8, offset=1)
def test_any_bytes_come_back(name: str, raw: bytes, itemsize: int, offset: int) -> None:
    codec = codec_by_name(name)
    backing = bytes(offset) + raw  # read-only, and perhaps not aligned
    encoded = encode(codec, memoryview(backing)[offset:], itemsize=itemsize)
    assert encoded.codec in (codec.number, RAW)
    assert encoded.level == 0
    assert (encoded.data.format, encoded.data.ndim, encoded.data.itemsize) == ("B", 1, 1)
    assert len(encoded.data) <= len(raw)
    assert decode(encoded, len(raw), offset=offset) == raw
    if encoded.codec != RAW:
        assert reference_decode(codec, bytes(encoded.data), len(raw)) == raw


@pytest.mark.parametrize("name", PACKING)
@pytest.mark.parametrize("itemsize", ITEMSIZES)
@pytest.mark.parametrize("nbytes", [(256 << 10) * 2 + 3, (1 << 20) + 8, (3 << 20) + 5])
def test_segments_of_many_blocks_and_steps(name: str, itemsize: int, nbytes: int) -> None:
    dtype = {1: "int8", 2: "bfloat16", 4: "float32", 8: "float32"}[itemsize]
    # A stretch of zeros and one of noise: some blocks of a plane pack well, others not at all.
    raw = bytearray(kv_like(nbytes, dtype))
    raw[: nbytes // 8] = bytes(nbytes // 8)
    raw[-nbytes // 5 :] = np.random.default_rng(1).bytes(len(raw[-nbytes // 5 :]))
    codec = codec_by_name(name)
    encoded = encode(codec, raw, itemsize=itemsize)
    assert decode(encoded, nbytes) == raw
    if encoded.codec != RAW:
        assert reference_decode(codec, bytes(encoded.data), nbytes) == raw


@pytest.mark.parametrize("name", LOSSLESS)
def test_every_bit_pattern_of_bf16(name: str) -> None:
    every = np.arange(1 << 16, dtype="<u2").tobytes()  # NaN payloads, infinities, subnormals, both zeros
    encoded = encode(codec_by_name(name), every, itemsize=2)
    assert decode(encoded, len(every)) == every


@pytest.mark.parametrize("name", LOSSLESS)
def test_the_input_is_left_alone_and_the_output_repeats(name: str) -> None:
    raw = bytearray(kv_like(100_000))
    before = bytes(raw)
    codec = codec_by_name(name)
    first = bytes(encode(codec, raw, itemsize=2).data)
    assert raw == before
    assert bytes(encode(codec, raw, itemsize=2).data) == first


PINNED = {  # 600 bytes: element i is 7·i mod 5 + 256·(i mod 3), little-endian; written down once, read for ever
    "lz4": (
        "01020000001000005802000000000000100000800e0000805f00020401030500ff105000020401033f0001020300ff12500102000102"
    ),
    "shuffle-zstd": (
        "01020000001000005802000000000000160000801400008028b52ffd602c00650000280002040103010024508b1628b52ffd"
        "602c0055000018000102010026aa6e08"
    ),
}


@pytest.mark.parametrize("name", PACKING)
def test_stored_segments_stay_readable(name: str) -> None:
    i = np.arange(300)
    raw = (7 * i % 5 + 256 * (i % 3)).astype("<u2").tobytes()
    out = bytearray(len(raw))
    codec_by_name(name).decode_into((memoryview(bytes.fromhex(PINNED[name])),), memoryview(out))
    assert out == raw


# --- size


def test_kv_shrinks() -> None:
    raw = kv_like(2 * 98304)
    sizes = {name: len(encode(codec_by_name(name), raw, itemsize=2).data) for name in LOSSLESS}
    assert sizes["raw"] == len(raw)
    assert len(raw) / sizes["shuffle-zstd"] >= 1.40
    assert len(raw) / sizes["lz4"] >= 1.10


@pytest.mark.parametrize(
    ("dtype", "itemsize", "least"), [("float32", 4, 1.15), ("float16", 2, 1.08), ("int8", 1, 1.10)]
)
def test_other_dtypes_shrink_too(dtype: str, itemsize: int, least: float) -> None:
    raw = kv_like(200_000, dtype)
    encoded = encode(codec_by_name("shuffle-zstd"), raw, itemsize=itemsize)
    assert len(raw) / len(encoded.data) >= least
    assert decode(encoded, len(raw)) == raw


def test_fp32_that_was_bf16_loses_its_empty_planes() -> None:
    raw = np.frombuffer(kv_like(100_000), "<u2").astype("<u4") << 16
    encoded = encode(codec_by_name("shuffle-zstd"), raw.data.cast("B"), itemsize=4)
    assert raw.nbytes / len(encoded.data) >= 2.7
    assert decode(encoded, raw.nbytes) == raw.tobytes()


def test_k_and_v_do_not_share_statistics() -> None:
    k, v = (np.frombuffer(kv_like(98304, seed=seed), "<u2").astype(np.uint32) << 16 for seed in (1, 2))
    wide = (k.view(np.float32) * np.float32(64.0)).view(np.uint32)
    raw = np.concatenate([wide, v])
    raw = (raw >> 16).astype("<u2")
    codec = codec_by_name("shuffle-zstd")
    together = len(encode(codec, raw.data.cast("B"), itemsize=2).data)
    apart = sum(len(encode(codec, part.copy().data.cast("B"), itemsize=2).data) for part in np.split(raw, 2))
    assert together <= apart * 1.001


@pytest.mark.parametrize("name", PACKING)
@pytest.mark.parametrize("itemsize", [1, 2, 4])
def test_noise_passes_through_without_a_copy(name: str, itemsize: int) -> None:
    raw = memoryview(np.random.default_rng(7).bytes(200_001))
    encoded = encode(codec_by_name(name), raw, itemsize=itemsize)
    assert encoded.codec == RAW
    assert encoded.data is raw


@pytest.mark.parametrize("name", PACKING)
def test_repeats_are_found_where_the_histogram_is_flat(name: str) -> None:
    raw = bytes(range(256)) * 1000
    assert len(encode(codec_by_name(name), raw, itemsize=1).data) < len(raw) / 20


@pytest.mark.parametrize("name", PACKING)
@pytest.mark.parametrize("itemsize", [0, 3, 16, -2])
def test_other_itemsizes_are_refused(name: str, itemsize: int) -> None:
    with pytest.raises(ConfigError, match="itemsize"):
        encode(codec_by_name(name), memoryview(bytes(1000)), itemsize=itemsize)


def test_memory_stays_near_what_the_format_needs() -> None:
    raw = kv_like(16 << 20)
    codec = codec_by_name("shuffle-zstd")
    codec.decode_into((encode(codec, raw, itemsize=2).data,), memoryview(bytearray(len(raw))))
    out = bytearray(len(raw))
    tracemalloc.start()
    try:
        encoded = encode(codec, raw, itemsize=2)
        encoding = tracemalloc.get_traced_memory()[1]
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        codec.decode_into((encoded.data,), memoryview(out))
        decoding = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
    assert out == raw
    # the result, the packed plane (python-zstandard does not shrink what it allocated for it), and one step
    assert encoding < len(encoded.data) + len(raw) // 2 + (2 << 20)
    assert decoding < 3 << 20  # one step


# --- threads


@pytest.mark.parametrize("name", PACKING)
def test_one_codec_serves_many_threads(name: str) -> None:
    codec = codec_by_name(name)
    start = threading.Barrier(6)
    wrong: list[object] = []

    def work(seed: int) -> None:
        raw = kv_like(150_000 + 2 * seed, seed=seed)
        start.wait(timeout=30)
        try:
            for _ in range(20):
                if decode(encode(codec, raw, itemsize=2), len(raw)) != raw:
                    wrong.append(seed)
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert not wrong
    assert not any(thread.is_alive() for thread in threads)


# --- lies


def test_raw_segments_of_another_length_are_refused() -> None:
    for data in (b"", b"123", b"12345"):
        with pytest.raises(CorruptRecord, match="instead of 4"):
            codec_by_name("raw").decode_into((memoryview(data),), memoryview(bytearray(4)))


@pytest.mark.parametrize("name", PACKING)
def test_every_truncation_and_any_addition_is_corrupt(name: str) -> None:
    raw = kv_like(301) * 9  # odd, and with repeats for LZ4
    codec = codec_by_name(name)
    encoded = encode(codec, raw, itemsize=2)
    assert encoded.codec == codec.number
    out = memoryview(bytearray(len(raw)))
    whole = bytes(encoded.data)
    for cut in [*(whole[:length] for length in range(len(whole))), whole + b"\0", whole + whole]:
        with pytest.raises(CorruptRecord):
            codec.decode_into((memoryview(cut),), out)


@pytest.mark.parametrize("name", PACKING)
def test_another_destination_length_is_corrupt(name: str) -> None:
    raw = kv_like(300) * 10
    codec = codec_by_name(name)
    encoded = encode(codec, raw, itemsize=2)
    assert encoded.codec == codec.number
    for length in (0, 1, 2999, 3001, 3002, 6000):
        with pytest.raises(CorruptRecord):
            codec.decode_into((encoded.data,), memoryview(bytearray(length)))


@pytest.mark.parametrize("name", PACKING)
@pytest.mark.parametrize(
    ("offset", "form", "value"),
    [
        (0, "B", 0), (0, "B", 2), (1, "B", 0), (1, "B", 3), (1, "B", 255), (2, "H", 1),
        (4, "I", 0), (4, "I", 1), (4, "I", 4095), (4, "I", (1 << 20) + 1), (4, "I", (1 << 32) - 1),
        (8, "Q", 0), (8, "Q", 1 << 40), (8, "Q", (1 << 64) - 1),
        (16, "I", 0), (16, "I", PACKED), (16, "I", PACKED - 1), (16, "I", (1 << 32) - 1),
    ],
)  # fmt: skip
def test_each_field_is_checked(name: str, offset: int, form: str, value: int) -> None:
    raw = kv_like(300) * 10
    codec = codec_by_name(name)
    encoded = encode(codec, raw, itemsize=2)
    assert encoded.codec == codec.number
    data = bytearray(encoded.data)
    struct.pack_into(f"<{form}", data, offset, value)
    with pytest.raises(CorruptRecord):
        codec.decode_into((memoryview(data),), memoryview(bytearray(len(raw))))


@pytest.mark.parametrize("name", PACKING)
def test_unpacked_blocks_must_be_as_long_as_they_stand_for(name: str) -> None:
    data = HEAD.pack(1, 2, 0, 1 << 20, 20) + struct.pack("<2I", 9, 11) + bytes(20)  # adds up, but not plane by plane
    with pytest.raises(CorruptRecord, match="9 bytes instead of 10"):
        codec_by_name(name).decode_into((memoryview(data),), memoryview(bytearray(20)))


def zstd_frame(content: bytes, claim: int | None) -> bytes:
    """A frame of raw blocks that claims another content size (RFC 8878, 3.1.1.1)."""
    descriptor = b"\x00\x58" if claim is None else b"\xc0\x58" + claim.to_bytes(8, "little")  # window of 2 MiB
    return b"\x28\xb5\x2f\xfd" + descriptor + (len(content) << 3 | 1).to_bytes(3, "little") + content


def zstd_bomb(blocks: int, claim: int | None) -> bytes:
    """Run-length blocks of 128 KiB in four bytes each."""
    descriptor = b"\x00\x58" if claim is None else b"\xc0\x58" + claim.to_bytes(8, "little")
    block = (128 << 10) << 3 | 1 << 1
    body = (block.to_bytes(3, "little") + b"\0") * (blocks - 1) + (block | 1).to_bytes(3, "little") + b"\0"
    return b"\x28\xb5\x2f\xfd" + descriptor + body


FRAME = zstandard.ZstdCompressor(level=1, write_content_size=True).compress(bytes(1000))
LIES = {
    "zstd claims 2^40": ("shuffle-zstd", zstd_frame(bytes(100), 1 << 40), 1000),
    "zstd claims 2^63": ("shuffle-zstd", zstd_frame(bytes(100), 1 << 63), 1000),
    "zstd claims nothing": ("shuffle-zstd", zstd_frame(bytes(1000), None), 1000),
    "zstd claims too little": ("shuffle-zstd", zstd_frame(bytes(2000), 1000), 1000),
    "zstd holds too little": ("shuffle-zstd", zstd_frame(bytes(100), 1000), 1000),
    "zstd bomb, no claim": ("shuffle-zstd", zstd_bomb(20_000, None), 1000),
    "zstd bomb, right claim": ("shuffle-zstd", zstd_bomb(20_000, 1000), 1000),
    "zstd bomb, its own claim": ("shuffle-zstd", zstd_bomb(20_000, 20_000 << 17), 1000),
    "zstd window of 2^41": ("shuffle-zstd", b"\x28\xb5\x2f\xfd\xc0\xf8" + (1000).to_bytes(8, "little"), 1000),
    "zstd skippable frame": ("shuffle-zstd", b"\x50\x2a\x4d\x18" + (1000).to_bytes(4, "little") + bytes(1000), 1000),
    "zstd wants a dictionary": ("shuffle-zstd", b"\x28\xb5\x2f\xfd\x63\x07\0\0\0\xe8\x03\0\0" + bytes(40), 1000),
    "zstd and garbage": ("shuffle-zstd", FRAME + b"garbage", 1000),
    "zstd twice": ("shuffle-zstd", FRAME * 2, 1000),
    "zstd cut": ("shuffle-zstd", FRAME[:-1], 1000),
    "zstd header cut": ("shuffle-zstd", FRAME[:5], 1000),
    "zstd empty": ("shuffle-zstd", b"", 1000),
    "not zstd": ("shuffle-zstd", b"lz4?" * 10, 1000),
    "lz4 bomb": ("lz4", lz4.block.compress(bytes(20 << 20), store_size=False), 1000),
    "lz4 holds too little": ("lz4", lz4.block.compress(bytes(999), store_size=False), 1000),
    "lz4 and garbage": ("lz4", lz4.block.compress(bytes(1000), store_size=False) + b"garbage", 1000),
    "lz4 with a size of 2^31 - 1": ("lz4", b"\xff\xff\xff\x7f" + lz4.block.compress(bytes(9), store_size=False), 1000),
    "lz4 run without end": ("lz4", b"\x1f\x00\x01\x00" + b"\xff" * 5000, 1000),
    "lz4 empty": ("lz4", b"", 1000),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lying_block_is_corrupt_at_once(lie: str) -> None:
    """faults.md 26: in under 50 ms, whatever it claims."""
    name, payload, nbytes = LIES[lie]
    codec = codec_by_name(name)
    out = memoryview(bytearray(nbytes))
    data = segment(payload, nbytes=nbytes)
    begin = time.process_time()
    with pytest.raises(CorruptRecord):
        codec.decode_into((data,), out)
    assert time.process_time() - begin < 0.05


def test_lies_cost_no_memory() -> None:
    """faults.md 26: the peak of a fresh process grows by less than 10 MB over all of them."""
    code = f"""
        import importlib.util, resource, sys
        from kvstore.codec import codec_by_name
        from kvstore.errors import CorruptRecord
        spec = importlib.util.spec_from_file_location("lies", {__file__!r})
        lies = importlib.util.module_from_spec(spec)
        sys.modules["lies"] = lies
        spec.loader.exec_module(lies)
        jobs = [
            (codec_by_name(name), lies.segment(payload, nbytes=nbytes), memoryview(bytearray(nbytes)))
            for name, payload, nbytes in lies.LIES.values()
        ]
        for name in lies.PACKING:
            lies.decode(lies.encode(codec_by_name(name), bytes(5000), itemsize=2), 5000)
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")  # the peak begins again at what is resident now
        peak = lambda: int(next(l for l in open("/proc/self/status") if l.startswith("VmHWM")).split()[1])
        before = peak()
        for codec, data, out in jobs:
            try:
                codec.decode_into((data,), out)
            except CorruptRecord:
                continue
            raise SystemExit("decoded a lie")
        print(peak() - before)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 10_000  # KiB


def _seed(name: str, dtype: str, itemsize: int) -> bytes:
    encoded = encode(codec_by_name(name), memoryview(kv_like(300, dtype) * 30), itemsize=itemsize)
    assert encoded.codec != RAW
    return bytes(encoded.data)


SEEDS = {
    (name, itemsize): _seed(name, dtype, itemsize)
    for name in PACKING
    for itemsize, dtype in ((1, "int8"), (2, "bfloat16"), (4, "float32"))
}


@settings(max_examples=600, deadline=None, derandomize=True)
@given(data=st.data())
def test_mutated_segments_never_escape(data: st.DataObject) -> None:
    """Only `CorruptRecord`, or the destination filled; never another exception, nor a byte outside."""
    name, itemsize = data.draw(st.sampled_from(sorted(SEEDS)))
    mutant = bytearray(SEEDS[name, itemsize])
    for _ in range(data.draw(st.integers(1, 4))):
        kind = data.draw(st.sampled_from(["set", "flip", "cut", "insert", "splice"]))
        # half of the changes go where they do most harm: header, table, frame headers
        limit = max(1, len(mutant) if data.draw(st.booleans()) else min(len(mutant), 64))
        at = data.draw(st.integers(0, limit - 1))
        if kind == "set" and at < len(mutant):
            mutant[at] = data.draw(st.integers(0, 255))
        elif kind == "flip" and at < len(mutant):
            mutant[at] ^= 1 << data.draw(st.integers(0, 7))
        elif kind == "cut":
            del mutant[at : at + data.draw(st.integers(1, 200))]
        elif kind == "insert":
            mutant[at:at] = data.draw(st.binary(max_size=20))
        else:
            mutant[at : at + 8] = struct.pack("<Q", data.draw(st.sampled_from([0, 1, 1 << 31, 1 << 40, (1 << 64) - 1])))
    room = bytearray(b"\xa5" * 9064)
    try:
        codec_by_name(name).decode_into((memoryview(bytes(mutant)),), memoryview(room)[32:9032])
    except CorruptRecord:
        pass
    assert set(room[:32]) == set(room[9032:]) == {0xA5}


@pytest.mark.parametrize("name", PACKING)
@settings(max_examples=200, deadline=None, derandomize=True)
@given(data=st.binary(max_size=200), nbytes=st.integers(0, 5000))
def test_foreign_bytes_never_decode(name: str, data: bytes, nbytes: int) -> None:
    with pytest.raises(CorruptRecord):
        codec_by_name(name).decode_into((memoryview(b"\x89" + data),), memoryview(bytearray(nbytes)))
