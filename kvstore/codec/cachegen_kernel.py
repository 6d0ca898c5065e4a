"""CacheGen on a GPU: segments are decoded straight into device memory, and encoded from it.

    encoded = encode_segments(kv, range(30), profile)         # kv: [segments, elements] on the device
    decode_segments(encoded, kv, profile)

Entropy coding is `kvstore.codec.rans.kernel`, one program a segment; one more kernel makes values of symbols. What is
given and taken is byte by byte and bit by bit that of the CPU (`cachegen_reference` has the definitions). Segments of
one call have one number of tokens; they may be of any layers. Refinements of embedded levels are the CPU's.

Without a GPU everything runs in Triton's interpreter (TRITON_INTERPRET=1, set before triton is imported).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

from kvstore.errors import ConfigError, CorruptRecord

from .cachegen import HEAD_BYTES, Head, halves_of, pack_head, read_head
from .cachegen_reference import ANCHOR_LIMIT, LARGEST, LARGEST_STEP, MOST, SMALLEST_STEP, steps_from_bits
from .cachegen_tables import Tables, tables_for, third_of
from .profile import Profile
from .rans import Distributions, lanes_for
from .rans import kernel as rans

__all__ = ["decode_segments", "encode_segments"]

_DTYPES = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}
_LOW = 1 << 16


@triton.jit  # type: ignore[untyped-decorator]
def _dequantise_kernel(
    anchors_ptr: Any,
    deltas_ptr: Any,
    anchor_steps_ptr: Any,
    delta_steps_ptr: Any,
    rows_ptr: Any,
    out_ptr: Any,
    tokens: Any,
    groups: Any,
    channels: Any,
    middle: Any,
    group: Any,
    limit: Any,
    anchor_limit: Any,
    largest: Any,
    KIND: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    """One program: one token of one segment. `rows_ptr` says which row of `out` each segment has."""
    segment = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1)
    of_group = token // group
    channel = tl.arange(0, WIDTH)
    live = channel < channels
    half = (channel >= middle).to(tl.int32)
    deltas = tokens - groups
    symbol = tl.load(anchors_ptr + (segment * groups + of_group) * channels + channel, mask=live, other=0)
    size = tl.load(anchor_steps_ptr + (segment * 2 + half) * groups + of_group, mask=live, other=0.0)
    value = (symbol.to(tl.int32) - anchor_limit).to(tl.float32) * size
    if token % group != 0:
        at = token - of_group - 1
        symbol = tl.load(deltas_ptr + (segment * deltas + at) * channels + channel, mask=live, other=0)
        size = tl.load(delta_steps_ptr + (segment * 2 + half) * deltas + at, mask=live, other=0.0)
        value = value + (symbol.to(tl.int32) - limit).to(tl.float32) * size
    value = tl.minimum(tl.maximum(value, -largest), largest)
    width = tl.where(half == 0, middle, channels - middle)
    place = half * (tokens * middle) + token * width + channel - half * middle
    row = tl.load(rows_ptr + segment).to(tl.int64)
    out = out_ptr + row * tokens * channels + place
    if KIND == 0:  # to bfloat16 by bits: the interpreter has its own way to round
        bits = value.to(tl.int32, bitcast=True)
        odd = (bits >> 16) & 1
        tl.store(out, ((bits + 0x7FFF + odd) >> 16).to(tl.int16), mask=live)
    elif KIND == 1:
        tl.store(out, value.to(tl.float16), mask=live)
    else:
        tl.store(out, value, mask=live)


@functools.lru_cache(maxsize=128)
def _on(distributions: Distributions, device: torch.device) -> rans.Tables:
    return rans.Tables(distributions, device)


class _Streams(NamedTuple):
    """Where the streams of a call lie in `words`."""

    begins: torch.Tensor
    states: torch.Tensor
    lengths: torch.Tensor


def decode_segments(parts: Sequence[bytes | memoryview], out: torch.Tensor, profile: Profile | None = None) -> None:
    """Decode segments into device memory.

    Args:
        parts: their level 0, in host memory.
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
    if not parts:
        return
    room = out.shape[1] * out.element_size()
    heads = [read_head(memoryview(part), room, profile) for part in parts]
    one = heads[0].tables.profile
    if any(head.dtype != dtype or head.part or head.tables.profile != one for head in heads):
        raise CorruptRecord("segments decoded together have one profile and dtype, and are no refinements")
    joined = np.frombuffer(b"".join(parts), "<i2")
    words = torch.from_numpy(np.append(joined, np.int16(0))).to(out.device)
    offsets = np.cumsum([0, *map(len, parts)])
    kinds: dict[tuple[int, int], list[int]] = {}
    for number, head in enumerate(heads):
        kinds.setdefault((head.third, head.level), []).append(number)
    checks = []
    for chosen in kinds.values():
        checks += _decode_kind(
            [heads[n] for n in chosen], [int(offsets[n]) for n in chosen], chosen, joined, words, out
        )
    if not bool(torch.stack(checks).all()):
        raise CorruptRecord("a stream of a cachegen segment does not end where it should")


def _decode_kind(
    heads: Sequence[Head], offsets: Sequence[int], rows: Sequence[int], joined: Any, words: torch.Tensor, out: Any
) -> list[torch.Tensor]:
    """Decode segments of one third of the layers. Returns what must be true, not yet looked at."""
    head, device = heads[0], out.device
    tables, third, tokens, groups = head.tables, head.third, head.tokens, head.groups
    deltas, channels, limit = tokens - groups, head.layout.elements_per_token, tables.levels[head.level].limit(third)
    level = tables.levels[head.level]
    sides, places, escapes = [], [], []
    for one, offset in zip(heads, offsets, strict=True):
        count = len(one.halves) * (groups + deltas * one.own_steps)
        begin = (offset + HEAD_BYTES) // 2
        bits = joined[begin : begin + count].view(np.uint16)
        if (bits >= LARGEST_STEP).any():
            raise CorruptRecord("a cachegen segment has an impossible step")
        sides.append(bits)
        escapes.append(joined[begin + count : begin + count + one.escapes])
        places.append(begin + count + one.escapes)
    steps = [_steps(one, bits) for one, bits in zip(heads, sides, strict=True)]
    anchor_steps = torch.from_numpy(np.stack([each[0] for each in steps])).to(device)
    delta_steps = torch.from_numpy(np.stack([each[1] for each in steps])).to(device)
    checks = []
    symbols = []
    for distributions, classes, length, of, starts in (
        (tables.anchors, tables.anchor_classes, [one.anchors for one in heads], groups, places),
        (
            level.distributions[third],
            level.classes,
            [one.deltas for one in heads],
            deltas,
            [place + one.anchors // 2 for place, one in zip(places, heads, strict=True)],
        ),
    ):
        lanes = lanes_for(of, channels)
        if not lanes:
            symbols.append(torch.empty((len(heads), 0, channels), dtype=torch.uint8, device=device))
            checks.append(torch.tensor(not any(length), device=device))
            continue
        streams = _streams(joined, starts, length, lanes, device)
        mine = np.stack([classes[one.layer] for one in heads]).astype(np.int16)
        found, reads = rans.decode_many(
            words, streams.begins, streams.states, torch.from_numpy(mine).to(device), _on(distributions, device), of
        )
        symbols.append(found)
        checks += [(reads == streams.lengths).all(), (streams.states == _LOW).all()]
    where = torch.tensor(list(rows), dtype=torch.int32, device=device)
    kind = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}[out.dtype]
    _dequantise_kernel[(len(heads), tokens)](
        symbols[0],
        symbols[1] if deltas else symbols[0],
        anchor_steps,
        delta_steps if deltas else anchor_steps,
        where,
        out.view(torch.int16) if kind == 0 else out,
        tokens,
        groups,
        channels,
        head.halves[0].stop,
        tables.group,
        limit,
        ANCHOR_LIMIT,
        LARGEST[head.dtype],
        KIND=kind,
        WIDTH=triton.next_power_of_2(channels),
        enable_fp_fusion=False,  # a fused multiply-add would round once, the CPU rounds twice
    )
    large = symbols[1] > 2 * limit
    counts = torch.tensor([one.escapes for one in heads], device=device)
    checks.append((large.sum((1, 2)) == counts).all())
    for number, (one, row) in enumerate(zip(heads, rows, strict=True)):
        if one.escapes:
            values = torch.from_numpy(escapes[number].astype(np.float32)).to(device)
            _patch(one, out[row], large[number], symbols[0][number], anchor_steps[number], delta_steps[number], values)
    return checks


def _steps(head: Head, bits: Any) -> tuple[Any, Any]:
    """(steps of anchors `[2, groups]`, steps of deltas `[2, deltas]`), fp32; without V its rows are not used."""
    groups, halves = head.groups, len(head.halves)
    deltas = head.tokens - groups
    anchors = np.zeros((2, groups), np.float32)
    anchors[:halves] = steps_from_bits(bits[: halves * groups]).reshape(halves, groups)
    own = np.zeros((2, deltas), np.float32)
    if head.own_steps:
        own[:halves] = steps_from_bits(bits[halves * groups :]).reshape(halves, deltas)
    else:
        own[:] = head.tables.levels[head.level].steps[:, head.layer, None]
    return anchors, own


def _streams(joined: Any, starts: Sequence[int], lengths: Sequence[int], lanes: int, device: torch.device) -> _Streams:
    """Streams inside of the joined segments: what follows one is not read by a good stream, and harmless."""
    if any(length < 4 * lanes or length % 2 for length in lengths):
        raise CorruptRecord("a stream of a cachegen segment is too short")
    states = np.stack([joined[start : start + 2 * lanes].view(np.uint32) for start in starts])
    if (states < _LOW).any():
        raise CorruptRecord("an entropy-coded stream begins with a state that no encoder leaves")
    begins = [start + 2 * lanes for start in starts] + [starts[-1] + lengths[-1] // 2]
    return _Streams(
        torch.tensor(begins, dtype=torch.int32, device=device),
        torch.from_numpy(states.astype(np.int64)).to(device),
        torch.tensor([length // 2 - 2 * lanes for length in lengths], dtype=torch.int32, device=device),
    )


def _patch(
    head: Head, row: Any, large: torch.Tensor, anchors: torch.Tensor, anchor_steps: Any, delta_steps: Any, values: Any
) -> None:
    """Write the values of deltas that have no symbol. Each operation is a kernel of its own, so it rounds by itself."""
    at = begin = 0
    largest = LARGEST[head.dtype]
    for half, columns in enumerate(head.halves):
        width = columns.stop - columns.start
        places = large[:, columns].nonzero()
        mine = values[at : at + len(places)]
        if len(mine) < len(places):  # the caller sees it by the counts
            return
        at += len(places)
        delta, channel = places[:, 0], places[:, 1]
        group = delta // (head.tables.group - 1)
        first = (anchors[group, columns.start + channel].float() - ANCHOR_LIMIT) * anchor_steps[half, group]
        found = (first + mine * delta_steps[half, delta]).clamp(-largest, largest)
        row[begin + (delta + group + 1) * width + channel] = found.to(row.dtype)
        begin += head.tokens * width


def encode_segments(
    kv: torch.Tensor, layers: Sequence[int], profile: Profile, *, level: int | None = None
) -> list[bytes | None]:
    """Encode segments that lie in device memory.

    Args:
        kv: `[segments, elements]`, bfloat16, float16 or float32: raw segments (K, then V) of one number of tokens.
        layers: the layer of each.
        level: as in `CachegenCodec`. Embedded levels are refused.

    Returns:
        The bytes of each segment's level 0; None for one that has to be stored raw.

    Raises:
        ConfigError: they do not fit the profile.
    """
    tables = tables_for(profile)
    dtype = _DTYPES.get(kv.dtype)
    per_token = profile.layout.elements_per_token
    if dtype is None or kv.ndim != 2 or not kv.shape[1] or kv.shape[1] % per_token or len(layers) != kv.shape[0]:
        raise ConfigError(f"{len(layers)} segments of {profile} cannot be {kv.dtype} {list(kv.shape)}")
    profile.check_layout(profile.layout, dtype)
    if tables.embedded:
        raise ConfigError(f"{profile} has embedded levels, which are encoded on the CPU")
    number = tables.level if level is None else level
    if not 0 <= number < len(tables.levels) or not all(0 <= n < profile.layout.num_layers for n in layers):
        raise ConfigError(f"{profile} has no level {number} or not all of the layers")
    found: list[bytes | None] = [None] * len(layers)
    for third in range(3):
        mine = [n for n, layer in enumerate(layers) if third_of(layer, profile.layout.num_layers) == third]
        if mine:
            made = _encode_third(kv[mine], [layers[n] for n in mine], tables, number, third, dtype)
            for n, each in zip(mine, made, strict=True):
                found[n] = each if each is not None and len(each) < kv.shape[1] * kv.element_size() else None
    return found


def _encode_third(
    kv: torch.Tensor, layers: Sequence[int], tables: Tables, number: int, third: int, dtype: str
) -> list[bytes | None]:
    level, layout, device = tables.levels[number], tables.profile.layout, kv.device
    tokens = kv.shape[1] // layout.elements_per_token
    limit = level.limit(third)
    bad = ~torch.isfinite(kv).all(1)
    anchors, deltas, steps, own, large = [], [], [], [], []
    begin = 0
    which = torch.arange(tokens, device=device)
    is_anchor = which % tables.group == 0
    group = which[~is_anchor] // tables.group
    for half, columns in enumerate(halves_of(layout)):
        width = columns.stop - columns.start
        x = kv[:, begin : begin + tokens * width].view(len(layers), tokens, width).float()
        begin += tokens * width
        bits = _step_bits(x[:, is_anchor], ANCHOR_LIMIT)
        steps.append(bits)
        size = _as_step(bits)
        q = torch.round(x[:, is_anchor] * _inverse(size)).clamp(-ANCHOR_LIMIT, ANCHOR_LIMIT)
        anchors.append((q + ANCHOR_LIMIT).to(torch.uint8))
        rest = x[:, ~is_anchor] - (q * size)[:, group]
        static = torch.from_numpy(level.steps[half, list(layers)].copy()).to(device)[:, None, None]
        if level.steps[0, 0]:
            q = (rest * (1 / static)).nan_to_num(0.0).clamp(-MOST - 9, MOST + 9)
        else:
            bits = _step_bits(rest, limit)
            own.append(bits)
            bad |= (bits >= LARGEST_STEP).any(1)
            q = (rest * _inverse(_as_step(bits))).nan_to_num(0.0).clamp(-limit, limit)
        bad |= (steps[-1] >= LARGEST_STEP).any(1)
        whole = torch.round(q).to(torch.int32)
        bad |= (whole.abs() > MOST).flatten(1).any(1)
        beyond = whole.abs() > limit
        deltas.append(torch.where(beyond, 2 * limit + 1, whole + limit).to(torch.uint8))
        large.append((whole, beyond))
    streams = []
    for symbols, classes, distributions in (
        (torch.cat(anchors, 2), tables.anchor_classes, tables.anchors),
        (torch.cat(deltas, 2), level.classes, level.distributions[third]),
    ):
        kinds = torch.from_numpy(classes[list(layers)].astype(np.int16)).to(device)
        streams.append(_coded(symbols.contiguous(), kinds, _on(distributions, device)))
    sides = torch.cat([*steps, *own], 1).to(torch.int32).cpu().numpy().astype("<u2")
    refused = bad.cpu().numpy()
    made: list[bytes | None] = []
    for n, layer in enumerate(layers):
        if refused[n]:
            made.append(None)
            continue
        listed = [whole[n][beyond[n]].to(torch.int16).cpu().numpy() for whole, beyond in large]
        count = sum(map(len, listed))
        head = pack_head(tables, dtype, layer, tokens, number, 0, len(streams[0][n]), len(streams[1][n]), count)
        escapes = b"".join(each.astype("<i2").tobytes() for each in listed)
        made.append(head + sides[n].tobytes() + escapes + streams[0][n] + streams[1][n])
    return made


def _coded(symbols: torch.Tensor, kinds: torch.Tensor, tables: rans.Tables) -> list[bytes]:
    lanes = lanes_for(symbols.shape[1], symbols.shape[2])
    if not lanes:
        return [b""] * len(symbols)
    words, begins, states = rans.encode_many(symbols, kinds, tables, lanes)
    firsts = states.cpu().numpy().astype("<u4")
    narrow = words.to(torch.int16).cpu().numpy()  # keeps the low 16 bits
    return [
        first.tobytes() + row[begin:].tobytes()
        for first, row, begin in zip(firsts, narrow, begins.cpu().tolist(), strict=True)
    ]


def _step_bits(x: torch.Tensor, limit: int) -> torch.Tensor:
    """int64 `[segments, vectors]`: bfloat16 bits of the step of each vector of `[segments, vectors, channels]`."""
    if not x.shape[1]:
        return torch.zeros(x.shape[:2], dtype=torch.int64, device=x.device)
    share = torch.tensor(float(np.float32(1) / np.float32(limit)), device=x.device)
    exact = (x.abs().amax(2) * share).view(torch.int32).to(torch.int64)
    bits = (exact + 0xFFFF) >> 16
    return torch.where(bits < SMALLEST_STEP, 0, bits)


def _as_step(bits: torch.Tensor) -> torch.Tensor:
    """fp32 `[segments, vectors, 1]`."""
    return (bits << 16).to(torch.int32).view(torch.float32)[..., None]


def _inverse(steps: torch.Tensor) -> torch.Tensor:
    return torch.where(steps > 0, 1 / steps, 0.0)
