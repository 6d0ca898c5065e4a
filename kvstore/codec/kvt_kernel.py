"""Decode kvt segments into device memory, in Triton and torch.

Headers are read on the host. The entropy decoder (`rans.kernel`) takes a level of a segment per program; what its
symbols say is put together by torch; one kernel dequantises, turns back into K and V, applies the rotary embedding by
the table of `kvstore.rope`, and writes the destination's dtype. Indices are the CPU's, to the last bit. Values differ
by the order of fp32 additions: by at most 2^-20 of the largest of a token in fp32, and after rounding to 16 bits, by
one unit in the last place of what was near the middle of two.

Without a GPU the kernels run in Triton's interpreter (TRITON_INTERPRET=1, set before triton is imported).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from kvstore.errors import ConfigError, CorruptRecord
from kvstore.rope import RotarySpec

from .base import UnknownProfile
from .kvt_format import First, check_stream, parse_first, parse_refinement, profile_of, tag_of
from .kvt_reference import ABSENT, LARGEST
from .kvt_tables import Layer, Level, Side, Tables, tables_of
from .profile import Profile, find
from .rans import kernel as rans
from .rans.tables import LOW

__all__ = ["decode_segments"]

_DTYPES = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}
_TOKENS = 32  # of a program


@triton.jit  # type: ignore[untyped-decorator]
def _values_kernel(
    values_ptr: Any,
    centres_ptr: Any,
    scale_ptr: Any,
    offset_ptr: Any,
    basis_ptr: Any,
    columns_ptr: Any,
    cos_ptr: Any,
    sin_ptr: Any,
    tokens_ptr: Any,
    out_ptr: Any,
    rows: Any,
    channels: Any,
    first: Any,
    heads: Any,
    width: Any,
    half: Any,
    most: Any,
    ROTATED: tl.constexpr,
    BFLOAT16: tl.constexpr,
    TOKENS: tl.constexpr,
    WIDTH: tl.constexpr,
    HALF: tl.constexpr,
) -> None:
    """A head of some tokens: out = rotate((centre(values) + offset) @ basis). The columns of the basis come in two
    halves, so that the elements which are rotated with each other are at the same place of both."""
    row = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    head = tl.program_id(1)
    inner = tl.arange(0, WIDTH)
    pair = tl.arange(0, HALF)
    channel = first + head * width + inner
    live, known = row < rows, inner < width
    v = tl.load(
        values_ptr + row.to(tl.int64)[:, None] * channels + channel[None, :],
        mask=live[:, None] & known[None, :],
        other=0,
    ).to(tl.int32)
    size = tl.abs(v)
    one = tl.load(centres_ptr + channel, mask=known, other=0.0)[None, :]
    two = tl.load(centres_ptr + channels + channel, mask=known, other=0.0)[None, :]
    three = tl.load(centres_ptr + 2 * channels + channel, mask=known, other=0.0)[None, :]
    scale = tl.load(scale_ptr + channel, mask=known, other=0.0)[None, :]
    x = three + (size - 3).to(tl.float32) * scale
    x = tl.where(size == 2, two, x)
    x = tl.where(size == 1, one, x)
    x = tl.where(size == 0, 0.0, x)
    x = tl.where(v < 0, -x, x) + tl.load(offset_ptr + channel, mask=known, other=0.0)[None, :]
    there = pair < half
    a_at = tl.load(columns_ptr + pair, mask=there, other=0)
    b_at = tl.load(columns_ptr + half + pair, mask=there, other=0)
    base = basis_ptr + head * width * width + inner[:, None] * width
    full = known[:, None] & there[None, :]
    a = tl.dot(x, tl.load(base + a_at[None, :], mask=full, other=0.0), input_precision="ieee")
    b = tl.dot(x, tl.load(base + b_at[None, :], mask=full, other=0.0), input_precision="ieee")
    write = live[:, None] & there[None, :]
    if ROTATED:
        table = row.to(tl.int64)[:, None] * half + pair[None, :]
        cos = tl.load(cos_ptr + table, mask=write, other=1.0)
        sin = tl.load(sin_ptr + table, mask=write, other=0.0)
        a, b = a * cos - b * sin, b * cos + a * sin
    a = tl.minimum(tl.maximum(a, -most), most)
    b = tl.minimum(tl.maximum(b, -most), most)
    token = tl.load(tokens_ptr + row, mask=live, other=0).to(tl.int64)
    target = out_ptr + (token[:, None] * heads + head) * width
    if BFLOAT16:  # `out` is int16: rounded by hand, to nearest, ties to even, as everywhere in this package
        a_bits, b_bits = a.to(tl.uint32, bitcast=True), b.to(tl.uint32, bitcast=True)
        a_bits = (a_bits + 0x7FFF + ((a_bits >> 16) & 1)) >> 16
        b_bits = (b_bits + 0x7FFF + ((b_bits >> 16) & 1)) >> 16
        tl.store(target + a_at[None, :], a_bits.to(tl.int16), mask=write)
        tl.store(target + b_at[None, :], b_bits.to(tl.int16), mask=write)
    else:
        tl.store(target + a_at[None, :], a, mask=write)
        tl.store(target + b_at[None, :], b, mask=write)


def decode_segments(
    parts: Sequence[Sequence[bytes | memoryview]], out: torch.Tensor, profile: Profile | None = None
) -> None:
    """Decode segments into device memory.

    Args:
        parts: of each segment its levels 0, 1, …, in host memory; at least the first.
        out: `[segments, elements]`, contiguous, bfloat16, float16 or float32, on the device: each row becomes one raw
            segment (K, then V).
        profile: looked at first, before those that are registered.

    Raises:
        CorruptRecord, UnknownProfile: as decoding on the CPU. `out` is then undefined.
        ConfigError: `out` does not fit the parts.
    """
    dtype = _DTYPES.get(out.dtype)
    if dtype is None or out.ndim != 2 or out.shape[0] != len(parts) or not out.is_contiguous():
        raise ConfigError(f"{len(parts)} segments are decoded into contiguous [{len(parts)}, elements], "
                          f"not {out.dtype} {list(out.shape)}")  # fmt: skip
    ends = []
    for levels, row in zip(parts, out, strict=True):
        ends += _decode_segment([memoryview(level) for level in levels], row, dtype, profile)
    if ends and not bool(torch.stack(ends).all()):
        raise CorruptRecord("a stream of a kvt segment does not end where it should")


def _decode_segment(parts: Sequence[memoryview], out: torch.Tensor, dtype: str, profile: Profile | None) -> list[Any]:
    """Returns tensors that are all true if every stream was whole: looking at them here would wait for the device."""
    if not parts:
        raise CorruptRecord("a kvt segment has at least one level")
    name = profile_of(parts[0])
    found = profile if profile is not None and profile.id == name else find(name)
    if found is None or found.codec != "kvt":
        raise UnknownProfile(name)
    tables = tables_of(found)
    first = parse_first(
        parts[0], size=out.numel() * out.element_size(), values=tables.channels, layers=tables.layout.num_layers
    )
    if first.dtype != dtype or (first.rotated and tables.rotary is None):
        raise CorruptRecord(f"a kvt segment is {first.dtype}, or rotated, which its destination or profile is not")
    layer = tables.layer(first.layer)
    if len(parts) > len(layer.levels):
        raise CorruptRecord(f"a kvt segment of this profile has {len(layer.levels)} levels, not more")
    tokens = len(first.positions)
    coded = np.setdiff1d(np.arange(tokens), first.raw_tokens, assume_unique=True)
    values = torch.zeros((len(coded), tables.channels), dtype=torch.int8, device=out.device)
    ends = [*_merge(tables, layer.levels[0], first.lanes, first.escapes, first.stream, values)]
    tag = tag_of(parts[0])
    for number, part in enumerate(parts[1:], 1):
        more = parse_refinement(part, level=number, tag=tag)
        ends += _merge(tables, layer.levels[number], more.lanes, more.escapes, more.stream, values)
    _write(tables, layer, layer.levels[len(parts) - 1], first, coded, values, out)
    return ends


@functools.lru_cache(maxsize=64)
def _streams_on(tables: Tables, device: torch.device) -> rans.Tables:
    return rans.Tables(tables.distributions, device)


def _on(array: Any, device: torch.device, dtype: Any = None) -> torch.Tensor:
    return torch.from_numpy(np.array(array, dtype, order="C")).to(device)  # a copy: torch warns of read-only memory


def _merge(
    tables: Tables, level: Level, lanes: int, escapes: Any, stream: memoryview, values: torch.Tensor
) -> list[torch.Tensor]:
    """Bring `values` to the level; see `kvt_reference`. Returns whether the stream was whole, as a tensor."""
    rows, count = len(values), len(level.live)
    words, states = check_stream(stream, lanes, rows, count)
    if not lanes:
        return []
    device = values.device
    live = _on(level.live, device, np.int64)
    fresh = _on(level.before == ABSENT, device)
    known = values[:, live].to(torch.int32)
    classes = _on(level.classes, device, np.int64)
    kinds = classes.expand(rows, -1, -1).gather(2, known.abs().clamp(max=2).to(torch.int64)[..., None])[..., 0]
    begins = torch.tensor([0, len(words)], dtype=torch.int32, device=device)
    first = _on(states, device, np.int64)[None].contiguous()
    padded = _on(np.append(words, np.uint16(0)).view(np.int16), device)
    decoded, reads = rans.decode_many(
        padded, begins, first, kinds.to(torch.int16)[None].contiguous(), _streams_on(tables, device), rows
    )
    symbols = decoded[0].to(torch.int32)
    direct = symbols - tables.distributions.symbols // 2
    marked = (symbols == 0) & fresh
    limits = _on(LARGEST >> np.where(level.before == ABSENT, level.after, 0), device, np.int32)
    given = _on(escapes, device, np.int32)
    # A damaged stream may ask for more escapes than there are, or fewer: they are numbered, and that is checked.
    number = marked.flatten().to(torch.int64).cumsum(0).reshape(marked.shape) - 1
    if len(escapes):
        direct = torch.where(marked, given[number.clamp(0, len(escapes) - 1)], direct)
    fits = (marked.sum() == len(escapes)) & ((direct.abs() <= limits) | ~marked).all()
    born = (symbols & 1) - (symbols.clamp(max=2) >> 1)
    grown = torch.where(known == 0, born, known.sign() * (2 * known.abs() + (symbols & 1)))
    values[:, live] = torch.where(fresh, direct, grown).to(torch.int8)
    return [(first == LOW).all(), (reads == len(words)).all(), fits]


def _write(
    tables: Tables, layer: Layer, level: Level, first: First, coded: Any, values: torch.Tensor, out: torch.Tensor
) -> None:
    device, tokens = out.device, len(first.positions)
    sides = out[: tokens * tables.key_channels], out[tokens * tables.key_channels :]
    if len(first.raw_tokens):
        kept = _on(first.raw_tokens, device, np.int64)
        raw = torch.frombuffer(bytearray(first.raw), dtype=out.dtype).to(device)
        cut = len(first.raw_tokens) * tables.key_channels
        for target, source in zip(sides, (raw[:cut], raw[cut:]), strict=True):
            target.view(tokens, -1)[kept] = source.view(len(first.raw_tokens), -1)
    if not len(coded):
        return
    shared = (
        values, _on(level.centres, device), _on(level.scale, device), _on(layer.offset, device)
    )  # fmt: skip
    where = _on(coded, device, np.int32)
    rotary = tables.rotary if first.rotated else None
    for number, (side, target) in enumerate(zip((layer.k, layer.v), sides, strict=True)):
        rotates = rotary if not number else None
        _launch(tables, side, number * tables.key_channels, shared, rotates, first.positions[coded], where, target)


def _launch(tables: Tables, side: Side, begin: int, shared: tuple[torch.Tensor, ...], rotary: RotarySpec | None,
            positions: Any, where: torch.Tensor, target: torch.Tensor) -> None:  # fmt: skip
    heads, width, _ = side.basis.shape
    half = -(-width // 2)
    device = target.device
    columns, cos, sin = _pairs(rotary, width, positions)
    table = (_on(cos, device), _on(sin, device)) if rotary is not None else (target, target)
    rows = len(where)
    _values_kernel[(triton.cdiv(rows, _TOKENS), heads)](
        *shared,
        _on(side.basis, device),
        _on(columns, device),
        *table,
        where,
        target.view(torch.int16) if target.dtype == torch.bfloat16 else target,
        rows,
        tables.channels,
        begin,
        heads,
        width,
        half,
        float(torch.finfo(target.dtype).max),
        ROTATED=rotary is not None,
        BFLOAT16=target.dtype == torch.bfloat16,
        TOKENS=_TOKENS,
        WIDTH=max(16, triton.next_power_of_2(width)),
        HALF=max(16, triton.next_power_of_2(half)),
    )


def _pairs(rotary: RotarySpec | None, width: int, positions: Any) -> tuple[Any, Any, Any]:
    """Which columns are rotated with which, int32 `[2, half]`, and by what, float32 `[tokens, half]`. Those that are
    not rotated come last; an odd one is there twice."""
    every = np.arange(width, dtype=np.int32)
    if rotary is None:
        half = -(-width // 2)
        return np.stack([every[:half], every[width - half :]]), None, None
    turned = rotary.applying(positions)
    if rotary.layout == "neox":
        first, second = every[: rotary.width // 2], every[rotary.width // 2 : rotary.width]
    else:
        first, second = every[0 : rotary.width : 2], every[1 : rotary.width : 2]
    rest = every[rotary.width :]
    half = -(-len(rest) // 2)
    columns = np.stack(
        [np.concatenate((first, rest[:half])), np.concatenate((second, rest[len(rest) - half :]))]
    )  # fmt: skip
    cos = np.concatenate((turned.cos, np.ones((len(positions), half), np.float32)), axis=1)
    sin = np.concatenate((turned.sin, np.zeros((len(positions), half), np.float32)), axis=1)
    return columns, cos, sin
