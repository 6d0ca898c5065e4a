"""Encode and decode of the GPU codecs, in GB/s of raw KV, on a CUDA device.

    python tests/bench/codec_gpu.py [--tokens 256,1536] [--segments 30] [--kv FILE.npy] [--profile FILE ...]
                                    [--repeats 20] [--json FILE]

One run, one device: the entropy coder alone (`rans`, GB/s of the bf16 KV that its symbols stand for), and each codec
whose GPU path is there and whose profile is given (`cachegen` makes one of the KV itself if none is). Every result is
compared, byte by byte, with the CPU's before anything is timed. The ceiling is a copy on the device, in the same turns.
Medians of the repeats. Without a device it says so and exits with 2; with 1 if something came out wrong.

`--kv` is what `kv_data.real_kv` keeps: uint8 [segments, bytes] of bf16, per layer K and then V. Without it the KV is
made up: normal numbers, a scale per channel. In Triton's interpreter (TRITON_INTERPRET=1) `--interpreter` does the same
on the CPU, to see that everything comes out right; its speeds mean nothing and are not told.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.codec import codec_by_name
from kvstore.codec.base import RAW, SegmentInfo
from kvstore.codec.profile import Profile, register
from kvstore.errors import ConfigError, KVStoreError
from kvstore.layout import KVLayout

__all__ = ["Row", "main", "parse", "segments_of"]

HEADS, WIDTH = 3, 64  # of SmolLM2, if the KV is made up
SYMBOLS, CLASSES = 24, 64

Segments = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Row:
    """One codec at one record size; GB/s of raw bf16 KV, medians. `encode_gb_s` is None where only decoding is."""

    codec: str
    tokens: int
    segments: int
    encode_gb_s: float | None
    decode_gb_s: float
    copy_gb_s: float
    same_as_cpu: bool


@dataclass(frozen=True)
class Options:
    """The command line, checked."""

    tokens: tuple[int, ...]
    segments: int
    kv: Path | None
    profiles: tuple[Path, ...]
    repeats: int
    json: Path | None
    device: str = "cuda"


def parse(words: Sequence[str] | None = None) -> Options:
    """The command line.

    Raises:
        ConfigError: a number makes no sense, or a file is not there.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", default="256,1536", metavar="LIST", help="tokens per record (default 256,1536)")
    parser.add_argument("--segments", type=int, default=30, help="layer segments per call (default 30)")
    parser.add_argument("--kv", type=Path, metavar="FILE", help="real KV, as kv_data.real_kv keeps it")
    parser.add_argument("--profile", type=Path, nargs="+", default=[], metavar="FILE")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write rows and figures")
    parser.add_argument("--interpreter", action="store_true", help="on the CPU, for correctness only")
    given = parser.parse_args(words)
    try:
        tokens = tuple(int(each) for each in given.tokens.split(","))
    except ValueError:
        raise ConfigError(f"--tokens {given.tokens!r}: numbers separated by commas") from None
    if min(tokens) < 1 or given.segments < 1 or given.repeats < 1:
        raise ConfigError("--tokens, --segments and --repeats are at least 1")
    for path in (given.kv, *given.profile):
        if path is not None and not path.is_file():
            raise ConfigError(f"{path}: there is no such file")
    device = "cpu" if given.interpreter else "cuda"
    return Options(tokens, given.segments, given.kv, tuple(given.profile), given.repeats, given.json, device)


def segments_of(path: Path | None, layout: KVLayout, tokens: int, count: int) -> Segments:
    """uint8 `[count, bytes]`: bf16 segments of `tokens` tokens, of a file (its tokens repeated if it has fewer) or made
    up from a fixed seed.

    Raises:
        ConfigError: the file's segments are no whole number of tokens.
    """
    values = layout.elements_per_token
    if path is None:
        rng = np.random.default_rng(0)
        scales = np.exp(rng.normal(0, 1, (count, 1, values))).astype(np.float32)
        made = rng.standard_normal((count, tokens, values), np.float32) * scales
        words = (made.view(np.uint32) >> 16).astype(np.uint16)
    else:
        kept = np.load(path)
        if kept.dtype != np.uint8 or kept.ndim != 2 or kept.shape[1] % (2 * values):
            raise ConfigError(f"{path}: {kept.dtype} {list(kept.shape)} is no KV of {values} values per token")
        had = kept.shape[1] // (2 * values)
        both = kept.view(np.uint16).reshape(len(kept), 2, had, values // 2)
        words = np.concatenate([both[:, 0], both[:, 1]], axis=-1)
        words = words[np.arange(count) % len(kept)][:, np.arange(tokens) % had]
    k, v = words[..., : values // 2], words[..., values // 2 :]
    flat = np.stack([k, v], axis=1)  # [count, 2, tokens, heads * width]
    return np.ascontiguousarray(flat).reshape(count, -1).view(np.uint8)


def _timed(torch: Any, work: Sequence[Callable[[], object]], repeats: int) -> list[float]:
    """Median seconds of each, in turn."""
    seconds: list[list[float]] = [[] for _ in work]
    wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    for repeat in range(repeats + 2):
        for each, taken in zip(work, seconds, strict=True):
            wait()
            begin = time.perf_counter()
            each()
            wait()
            if repeat >= 2:  # compiled and warm
                taken.append(time.perf_counter() - begin)
    return [statistics.median(each) for each in seconds]


def _rans(torch: Any, raw: Segments, tokens: int, channels: int, options: Options) -> Row:
    """The entropy coder alone, over symbols of the sizes that codecs give it."""
    from kvstore.codec import rans
    from kvstore.codec.rans import kernel

    rng = np.random.default_rng(1)
    widths = rng.uniform(0.5, 4.0, CLASSES)
    grid = np.arange(SYMBOLS) - SYMBOLS // 2
    distributions = rans.Distributions.from_counts(np.exp(-0.5 * (grid / widths[:, None]) ** 2) + 1e-4)
    classes = rng.integers(0, CLASSES, (len(raw), channels)).astype(np.uint16)
    # Symbols as their distributions have them: by inverting the table.
    slots = rng.integers(0, 4096, (len(raw), tokens, channels))
    symbols = distributions.lookup[classes[:, None, :], slots]
    lanes = rans.lanes_for(tokens, channels)
    on_device = kernel.Tables(distributions, options.device)
    given = torch.from_numpy(symbols).to(options.device)
    kinds = torch.from_numpy(classes.astype(np.int16)).to(options.device)
    words, begins, states = kernel.encode_many(given, kinds, on_device, lanes)
    expected = [rans.encode(one, kind, distributions) for one, kind in zip(symbols, classes, strict=True)]
    streams = [
        states[n].cpu().numpy().astype("<u4").tobytes()
        + words[n, int(begins[n]) :].cpu().numpy().astype("<u2").tobytes()
        for n in range(len(raw))
    ]
    same = streams == expected
    bodies = [np.frombuffer(each, "<u2", offset=4 * lanes) for each in expected]
    flat = torch.from_numpy(np.append(np.concatenate(bodies), np.uint16(0)).view(np.int16)).to(options.device)
    starts = torch.tensor(np.cumsum([0, *map(len, bodies)]), dtype=torch.int32).to(options.device)
    firsts = torch.from_numpy(np.stack([np.frombuffer(each, "<u4", lanes) for each in expected]).astype(np.int64)).to(
        options.device
    )
    back, reads = kernel.decode_many(flat, starts, firsts.clone(), kinds, on_device, tokens)
    same &= bool((back == given).all()) and reads.cpu().tolist() == list(map(len, bodies))
    work = [
        lambda: kernel.encode_many(given, kinds, on_device, lanes),
        lambda: kernel.decode_many(flat, starts, firsts.clone(), kinds, on_device, tokens),
    ]
    return _row(torch, "rans", raw, tokens, work, options, same)


def _row(
    torch: Any,
    name: str,
    raw: Segments,
    tokens: int,
    work: Sequence[Callable[[], object]],
    options: Options,
    same: bool,
) -> Row:
    source = torch.from_numpy(raw).to(options.device)
    target = torch.empty_like(source)
    *encode_s, decode_s, copy_s = _timed(torch, [*work, lambda: target.copy_(source)], options.repeats)
    gigabytes = raw.nbytes / 1e9
    encode = gigabytes / encode_s[0] if encode_s else None
    return Row(name, tokens, len(raw), encode, gigabytes / decode_s, gigabytes / copy_s, same)


def _codec(torch: Any, name: str, profile: Profile, raw: Segments, tokens: int, options: Options) -> Row | None:
    """A codec's GPU path, `kvstore.codec.<name>_kernel`; None if there is none."""
    import importlib

    try:
        module = importlib.import_module(f"kvstore.codec.{name}_kernel")
    except ModuleNotFoundError:
        return None
    layers = [n % profile.layout.num_layers for n in range(len(raw))]
    codec = codec_by_name(name, profile)
    expected: list[list[bytes]] = []
    decoded = np.empty_like(raw)
    for n, layer in enumerate(layers):
        about = SegmentInfo(2, layer, profile.layout, "bfloat16", tokens, start=256, rope=_rope(profile))
        levels = codec.encode(raw[n].data, about)
        if levels[0].codec == RAW:
            raise ConfigError(f"{profile} stores this KV raw; give KV of its model with --kv")
        parts = [each.data for each in levels]
        expected.append(list(map(bytes, parts)))
        codec.decode_into(parts, decoded[n].data)
    # cachegen's takes one part of each segment, kvt's all levels.
    stored = [parts[0] for parts in expected] if name == "cachegen" else expected
    kv = torch.from_numpy(raw).to(options.device).view(torch.bfloat16)
    out = torch.empty_like(kv)
    module.decode_segments(stored, out, profile)
    same = bool(np.array_equal(out.view(torch.uint8).cpu().numpy(), decoded))
    work: list[Callable[[], object]] = [lambda: module.decode_segments(stored, out, profile)]
    if hasattr(module, "encode_segments"):
        same &= list(map(bytes, module.encode_segments(kv, layers, profile))) == stored
        work.insert(0, lambda: module.encode_segments(kv, layers, profile))
    return _row(torch, name, raw, tokens, work, options, same)


def _rope(profile: Profile) -> str:
    return str(profile.parameters.get("rope", "applied"))


def _profiles(options: Options, layout: KVLayout) -> list[Profile]:
    """Those given, and one of cachegen made of the KV if there is none."""
    found = [Profile.load(path) for path in options.profiles]
    for profile in found:
        register(profile)
    if not any(profile.codec == "cachegen" for profile in found):
        from kvstore.codec.profiling_cachegen import profile_of

        raw = segments_of(options.kv, layout, max(options.tokens[0], 256), layout.num_layers)
        floats = (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        both = floats.reshape(layout.num_layers, 2, -1, layout.num_kv_heads, layout.head_dim)
        made = profile_of(lambda: [(both[:, 0], both[:, 1])], name="made up")
        register(made)
        found.append(made)
    return found


def main(words: Sequence[str] | None = None) -> int:
    """Measure. Returns the exit status."""
    try:
        options = parse(words)
    except ConfigError as error:
        print(f"codec_gpu: {error}", file=sys.stderr)
        return 2
    try:
        import torch
    except ImportError as error:
        print(f"codec_gpu: no CUDA device: {error}", file=sys.stderr)
        return 2
    if options.device == "cuda" and not torch.cuda.is_available():
        print("codec_gpu: no CUDA device; run this where torch.cuda.is_available()", file=sys.stderr)
        return 2
    layout = KVLayout(30, HEADS, WIDTH)
    rows: list[Row] = []
    try:
        profiles = _profiles(options, layout)
        for tokens in options.tokens:
            raw = segments_of(options.kv, layout, tokens, options.segments)
            rows.append(_rans(torch, raw, tokens, layout.elements_per_token, options))
            for profile in profiles:
                row = _codec(torch, profile.codec, profile, raw, tokens, options)
                if row is None:
                    print(f"{profile.codec}: has no GPU path of its own")
                else:
                    rows.append(row)
    except KVStoreError as error:
        print(f"codec_gpu: {error}", file=sys.stderr)
        return 2
    if options.device == "cpu":
        for row in rows:
            print(f"{row.codec} {row.tokens}: {'as on the CPU' if row.same_as_cpu else 'NOT as on the CPU'}")
        return 0 if all(row.same_as_cpu for row in rows) else 1
    print(f"{torch.cuda.get_device_name()}; GB/s of raw bf16 KV, medians of {options.repeats}")
    print(f"{'codec':<10}{'tokens':>8}{'segments':>10}{'encode':>10}{'decode':>10}{'copy':>10}  same as the CPU")
    for row in rows:
        encode = "-" if row.encode_gb_s is None else f"{row.encode_gb_s:.2f}"
        print(
            f"{row.codec:<10}{row.tokens:>8}{row.segments:>10}{encode:>10}{row.decode_gb_s:>10.2f}"
            f"{row.copy_gb_s:>10.1f}  {'yes' if row.same_as_cpu else 'NO'}"
        )
    if options.json:
        figures = {
            f"codec.gpu.{row.codec}.{way}_gb_s.{row.tokens}": {
                "value": getattr(row, f"{way}_gb_s"), "unit": "GB/s", "better": "higher", "bar": None
            }
            for row in rows for way in ("encode", "decode") if getattr(row, f"{way}_gb_s") is not None
        }  # fmt: skip
        document = {"device": torch.cuda.get_device_name(), "rows": [asdict(row) for row in rows], "figures": figures}
        options.json.write_text(json.dumps(document, indent=1) + "\n")
    return 0 if all(row.same_as_cpu for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
