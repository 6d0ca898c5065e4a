"""What the lossless codecs cost and save on real KV, per core, next to alternatives and to memcpy in the same run.

    OMP_NUM_THREADS=1 python tests/bench/bench_codecs.py [--json FILE] [--tokens 256] [--chunks 1] [--repeats 15]

One thread. All contestants take turns, repeat by repeat, so that a busy machine slows all of them; medians are given,
in raw (decoded) megabytes (10^6) per second. Rows in brackets are not codecs of ours but what they were chosen from;
blosc2 and zipnn show up if they are installed. Exits with 1 if a codec of ours does not give back the exact bytes.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import lz4.block
import numpy as np
import numpy.typing as npt
import zstandard
from kv_data import real_kv

from kvstore.codec import codec_by_name, codec_by_number
from kvstore.codec.base import Encoded, SegmentInfo

LOSSLESS = ("raw", "lz4", "shuffle-zstd")
BARS = {"shuffle-zstd": {"ratio": 1.40, "encode_mb_s": 350.0, "decode_mb_s": 1000.0}}
Segment = npt.NDArray[np.uint8]


class Contestant(NamedTuple):
    """`encode` takes a raw segment; `decode` what it gave and the destination; `size` its stored bytes."""

    name: str
    encode: Callable[[Segment], Any]
    decode: Callable[[Any, Segment], object]
    size: Callable[[Any], int] = len


def ours(name: str) -> Contestant:
    codec = codec_by_name(name)

    def encode(raw: Segment) -> Encoded:
        (encoded,) = codec.encode(raw.data, SegmentInfo(itemsize=2))
        return encoded

    return Contestant(
        name,
        encode,
        lambda encoded, out: codec_by_number(encoded.codec).decode_into((encoded.data,), out.data),
        lambda encoded: len(encoded.data),
    )


def plain(name: str, compress: Callable[..., bytes], decompress: Callable[..., bytes]) -> Contestant:
    def decode(data: bytes, out: Segment) -> None:
        out.data[:] = decompress(data)

    return Contestant(f"[{name}]", lambda raw: compress(raw.data), decode)


def shuffled_level(level: int) -> Contestant:
    """Planes over the whole segment, both given to zstd with its usual parameters: the obvious way to do it."""
    compressor, decompressor = zstandard.ZstdCompressor(level=level), zstandard.ZstdDecompressor()

    def encode(raw: Segment) -> tuple[bytes, bytes]:
        return compressor.compress(raw[0::2].tobytes()), compressor.compress(raw[1::2].tobytes())

    def decode(planes: tuple[bytes, bytes], out: Segment) -> None:
        for index, plane in enumerate(planes):
            out[index::2] = np.frombuffer(decompressor.decompress(plane), np.uint8)

    return Contestant(f"[strided shuffle, zstd {level}]", encode, decode, lambda planes: sum(map(len, planes)))


def alternatives(segment_bytes: int) -> list[Contestant]:
    zstd, unzstd = zstandard.ZstdCompressor(level=1), zstandard.ZstdDecompressor()
    found = [
        plain(
            "plain lz4",
            lambda raw: lz4.block.compress(raw, store_size=False),
            lambda data: lz4.block.decompress(data, uncompressed_size=segment_bytes),
        ),
        plain("plain zstd 1", zstd.compress, unzstd.decompress),
        shuffled_level(1),
        shuffled_level(-1),
    ]
    if importlib.util.find_spec("blosc2"):
        import blosc2  # type: ignore[import-untyped, unused-ignore]

        blosc2.set_nthreads(1)
        for codec in (blosc2.Codec.ZSTD, blosc2.Codec.LZ4):
            found.append(
                Contestant(
                    f"[blosc2 shuffle {codec.name.lower()} 1]",
                    lambda raw, codec=codec: blosc2.compress2(  # type: ignore[misc]
                        raw, typesize=2, clevel=1, codec=codec, filters=[blosc2.Filter.SHUFFLE], nthreads=1
                    ),
                    lambda data, out: blosc2.decompress2(data, dst=out, nthreads=1),
                )
            )
    if importlib.util.find_spec("zipnn"):
        import zipnn  # type: ignore[import-not-found, unused-ignore]

        coder = zipnn.ZipNN(input_format="byte", bytearray_dtype="bfloat16", threads=1)
        # It changes its input in place: it is given a copy, as any caller who keeps the data must.
        found.append(plain("zipnn", lambda raw: coder.compress(bytearray(raw)), coder.decompress))
    return found


def entropy(plane: npt.NDArray[np.uint8]) -> float:
    counts = np.bincount(plane.ravel(), minlength=256)
    share = counts[counts > 0] / plane.size
    return float(-(share * np.log2(share)).sum())


def measure(contestants: Sequence[Contestant], segments: Segment, repeats: int) -> list[dict[str, Any]]:
    """One row per contestant, the ceiling first."""
    out = np.empty_like(segments[0])
    copies: list[float] = []
    seconds: dict[str, tuple[list[float], list[float]]] = {each.name: ([], []) for each in contestants}
    sizes: dict[str, int] = {}
    exact: dict[str, bool] = {}
    for repeat in range(repeats + 1):
        begin = time.perf_counter()
        for raw in segments:
            out[:] = raw
        copies.append(time.perf_counter() - begin)
        for each in contestants:
            begin = time.perf_counter()
            stored = [each.encode(raw) for raw in segments]
            middle = time.perf_counter()
            for data in stored:
                each.decode(data, out)
            end = time.perf_counter()
            if repeat == 0:  # warm-up, and the check
                sizes[each.name] = sum(map(each.size, stored))
                exact[each.name] = True
                for raw, data in zip(segments, stored, strict=True):
                    out[:] = 0
                    each.decode(data, out)
                    exact[each.name] &= bool(np.array_equal(out, raw))
                continue
            seconds[each.name][0].append(middle - begin)
            seconds[each.name][1].append(end - middle)
    mb = segments.nbytes / 1e6
    ceiling = mb / statistics.median(copies[1:])
    rows: list[dict[str, Any]] = [
        {"codec": "memcpy", "ratio": 1.0, "encode_mb_s": ceiling, "decode_mb_s": ceiling, "exact": True}
    ]
    for name, (encode, decode) in seconds.items():
        rows.append({
            "codec": name,
            "ratio": segments.nbytes / sizes[name],
            "encode_mb_s": mb / statistics.median(encode),
            "decode_mb_s": mb / statistics.median(decode),
            "exact": exact[name],
        })  # fmt: skip
    return rows


def figures(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """`codec.lossless.<codec>.ratio`, `.encode_mb_s`, `.decode_mb_s` of our codecs."""
    found = {}
    for row in rows:
        if row["codec"] in LOSSLESS:
            for what, unit in (("ratio", "raw/stored"), ("encode_mb_s", "MB/s"), ("decode_mb_s", "MB/s")):
                bar = BARS.get(row["codec"], {}).get(what)
                name = f"codec.lossless.{row['codec']}.{what}"
                found[name] = {"value": row[what], "unit": unit, "better": "higher", "bar": bar}
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write rows and figures")
    parser.add_argument("--tokens", type=int, default=256, help="tokens per chunk (default 256)")
    parser.add_argument("--chunks", type=int, default=1, help="chunks of 30 layers each (default 1)")
    parser.add_argument("--repeats", type=int, default=15, help="timed repeats (default 15)")
    given = parser.parse_args(arguments)
    segments = real_kv(given.tokens, given.chunks)
    contestants = [ours(name) for name in LOSSLESS] + alternatives(segments.shape[1])
    rows = measure(contestants, segments, given.repeats)
    print(
        f"{len(segments)} segments of {segments.shape[1]} bytes of real bf16 KV; entropy of a segment's planes: "
        f"low {np.mean([entropy(each[0::2]) for each in segments]):.2f}, "
        f"high {np.mean([entropy(each[1::2]) for each in segments]):.2f} bits per byte"
    )
    print(f"{'codec':<28}{'ratio':>8}{'encode MB/s':>13}{'decode MB/s':>13}{'decode/memcpy':>15}  exact")
    for row in rows:
        print(
            f"{row['codec']:<28}{row['ratio']:>8.3f}{row['encode_mb_s']:>13.0f}{row['decode_mb_s']:>13.0f}"
            f"{row['decode_mb_s'] / rows[0]['decode_mb_s']:>15.3f}  {'yes' if row['exact'] else 'NO'}"
        )
    found = figures(rows)
    for name, figure in found.items():
        if figure["bar"] is not None:
            verdict = "reached" if figure["value"] >= figure["bar"] else "MISSED"
            print(f"{name}: {figure['value']:.4g} (bar {figure['bar']:g}: {verdict})")
    if given.json:
        given.json.write_text(json.dumps({"rows": rows, "figures": found}, indent=1) + "\n")
    return 0 if all(row["exact"] for row in rows if row["codec"] in LOSSLESS) else 1


if __name__ == "__main__":
    sys.exit(main())
