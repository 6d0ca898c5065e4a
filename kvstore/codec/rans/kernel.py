"""The coder for GPUs, in Triton. A program takes one stream, a SIMD lane one lane of it.

The words that the lanes of a step read are numbered by a prefix sum over those that need one, so that no lane's place
in the stream has to be stored. States and tables lie in device memory; `decode_many` takes all layer segments of a
group at once, one program each, since a single stream cannot fill a GPU.

Without a GPU the same kernels run in Triton's interpreter (TRITON_INTERPRET=1, set before triton is imported), which is
how they are tested here.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from .tables import PROBABILITY_BITS, Distributions, stream_words

__all__ = ["Tables", "decode", "decode_many", "encode", "encode_many"]


@triton.jit  # type: ignore[untyped-decorator]
def _decode_kernel(
    words_ptr: Any,
    begins_ptr: Any,
    states_ptr: Any,
    classes_ptr: Any,
    lookup_ptr: Any,
    packed_ptr: Any,
    out_ptr: Any,
    reads_ptr: Any,
    tokens: Any,
    channels: Any,
    lanes: Any,
    alphabet: Any,
    class_step: Any,
    class_stride: Any,
    BITS: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    stream = tl.program_id(0)
    lane = tl.arange(0, WIDTH)
    begin = tl.load(begins_ptr + stream)
    count = tl.load(begins_ptr + stream + 1) - begin
    state = tl.load(states_ptr + stream * lanes + lane, mask=lane < lanes, other=65536).to(tl.int64)
    at = count * 0
    rows = (channels + lanes - 1) // lanes
    for row in range(rows):
        channel = row * lanes + lane
        live = (lane < lanes) & (channel < channels)
        for token in range(tokens):
            of = stream.to(tl.int64) * class_stride + token * class_step + channel
            kind = tl.load(classes_ptr + of, mask=live, other=0).to(tl.int64)
            slot = state & ((1 << BITS) - 1)
            symbol = tl.load(lookup_ptr + kind * (1 << BITS) + slot, mask=live, other=0)
            place = (stream.to(tl.int64) * tokens + token) * channels + channel
            tl.store(out_ptr + place, symbol, mask=live)
            entry = tl.load(packed_ptr + kind * alphabet + symbol.to(tl.int64), mask=live, other=0)
            entry = entry.to(tl.int64) & 0xFFFFFFFF
            following = (entry & 0xFFFF) * (state >> BITS) + slot - (entry >> 16)
            state = tl.where(live, following, state)
            need = live & (state < 65536)
            asks = need.to(tl.int32)
            where = at + tl.cumsum(asks, 0) - asks
            word = tl.load(words_ptr + begin + where, mask=need & (where < count), other=0).to(tl.int64) & 0xFFFF
            state = tl.where(need, (state << 16) | word, state)
            at += tl.sum(asks, 0)
    tl.store(states_ptr + stream * lanes + lane, state, mask=lane < lanes)
    tl.store(reads_ptr + stream, at)


@triton.jit  # type: ignore[untyped-decorator]
def _encode_kernel(
    symbols_ptr: Any,
    classes_ptr: Any,
    frequencies_ptr: Any,
    starts_ptr: Any,
    words_ptr: Any,
    states_ptr: Any,
    begins_ptr: Any,
    tokens: Any,
    channels: Any,
    lanes: Any,
    alphabet: Any,
    room: Any,
    class_step: Any,
    class_stride: Any,
    BITS: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    stream = tl.program_id(0)
    lane = tl.arange(0, WIDTH)
    state = tl.full([WIDTH], 65536, tl.int64)
    at = room + 0
    rows = (channels + lanes - 1) // lanes
    for back_row in range(rows):
        channel = (rows - 1 - back_row) * lanes + lane
        live = (lane < lanes) & (channel < channels)
        for back in range(tokens):
            token = tokens - 1 - back
            of = stream.to(tl.int64) * class_stride + token * class_step + channel
            kind = tl.load(classes_ptr + of, mask=live, other=0).to(tl.int64)
            place = (stream.to(tl.int64) * tokens + token) * channels + channel
            symbol = tl.load(symbols_ptr + place, mask=live, other=0).to(tl.int64)
            frequency = tl.load(frequencies_ptr + kind * alphabet + symbol, mask=live, other=1).to(tl.int64)
            start = tl.load(starts_ptr + kind * alphabet + symbol, mask=live, other=0).to(tl.int64)
            frequency = tl.where(live, frequency, 1)
            full = live & (state >= (frequency << (32 - BITS)))
            gives = full.to(tl.int32)
            # The decoder reads lane by lane in rising order, so the last lane's word is written last in memory.
            total = tl.sum(gives, 0)
            where = at - total + tl.cumsum(gives, 0) - gives
            tl.store(words_ptr + stream.to(tl.int64) * room + where, (state & 0xFFFF).to(tl.int32), mask=full)
            at -= total
            state = tl.where(full, state >> 16, state)
            quotient = state // frequency
            following = (quotient << BITS) + (state - quotient * frequency) + start
            state = tl.where(live, following, state)
    tl.store(states_ptr + stream * lanes + lane, state, mask=lane < lanes)
    tl.store(begins_ptr + stream, at)


class Tables:
    """`Distributions` in device memory.

    Args:
        device: of the streams and symbols, for example "cuda"; "cpu" works in the interpreter only.
    """

    def __init__(self, distributions: Distributions, device: torch.device | str) -> None:
        self.symbols = distributions.symbols
        self.device = torch.device(device)
        self.lookup = torch.from_numpy(distributions.lookup).to(self.device)
        self.packed = torch.from_numpy(distributions.packed.view(np.int32)).to(self.device)
        self.frequencies = torch.from_numpy(distributions.frequencies.astype(np.int32)).to(self.device)
        self.starts = torch.from_numpy(distributions.starts.astype(np.int32)).to(self.device)


def decode_many(
    words: torch.Tensor, begins: torch.Tensor, states: torch.Tensor, classes: torch.Tensor, tables: Tables, tokens: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Decode streams of equal shape, one program each. Nothing is copied to the host: the caller checks afterwards that
    `states` are all 2^16 and `reads` are the streams' lengths.

    Args:
        words: int16 `[all words]` of the streams one after the other.
        begins: int32 `[streams + 1]`: where each begins in `words`, and the end.
        states: int64 `[streams, lanes]`; the last states are left in it.
        classes: int16 `[streams, channels]`, or `[streams, tokens, channels]`.

    Returns:
        symbols uint8 `[streams, tokens, channels]`, and reads int32 `[streams]`: how many words each took.
    """
    streams, lanes = states.shape
    channels = classes.shape[-1]
    out = torch.empty((streams, tokens, channels), dtype=torch.uint8, device=words.device)
    reads = torch.zeros(streams, dtype=torch.int32, device=words.device)
    if out.numel():
        per_symbol = classes.ndim == 3
        _decode_kernel[(streams,)](
            words,
            begins,
            states,
            classes,
            tables.lookup,
            tables.packed,
            out,
            reads,
            tokens,
            channels,
            lanes,
            tables.symbols,
            channels if per_symbol else 0,
            channels * tokens if per_symbol else channels,
            BITS=PROBABILITY_BITS,
            WIDTH=triton.next_power_of_2(lanes),
        )
    return out, reads


def encode_many(
    symbols: torch.Tensor, classes: torch.Tensor, tables: Tables, lanes: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Encode streams of equal shape, one program each.

    Args:
        symbols: uint8 `[streams, tokens, channels]`.
        classes: int16 `[streams, channels]`, or `[streams, tokens, channels]`.

    Returns:
        words int32 `[streams, room]`, begins int32 `[streams]`, states int64 `[streams, lanes]`: the words of stream i
        are the low 16 bits of `words[i, begins[i]:]`.
    """
    streams, tokens, channels = symbols.shape
    room = stream_words(tokens, channels, lanes)
    words = torch.zeros((streams, room), dtype=torch.int32, device=symbols.device)
    states = torch.full((streams, lanes), 1 << 16, dtype=torch.int64, device=symbols.device)
    begins = torch.full((streams,), room, dtype=torch.int32, device=symbols.device)
    if symbols.numel():
        per_symbol = classes.ndim == 3
        _encode_kernel[(streams,)](
            symbols,
            classes,
            tables.frequencies,
            tables.starts,
            words,
            states,
            begins,
            tokens,
            channels,
            lanes,
            tables.symbols,
            room,
            channels if per_symbol else 0,
            channels * tokens if per_symbol else channels,
            BITS=PROBABILITY_BITS,
            WIDTH=triton.next_power_of_2(lanes),
        )
    return words, begins, states


# One stream, as the other coders take it. For tests, and for whoever has a single segment.


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def encode(
    symbols: npt.NDArray[np.uint8], classes: npt.NDArray[np.uint16], distributions: Distributions, lanes: int
) -> tuple[npt.NDArray[np.uint16], npt.NDArray[np.uint32]]:
    """See `reference.encode`."""
    device = _device()
    tables = Tables(distributions, device)
    given = torch.from_numpy(np.ascontiguousarray(symbols)).to(device)[None]
    kinds = torch.from_numpy(classes.astype(np.int16)).to(device)[None]
    words, begins, states = encode_many(given, kinds, tables, lanes)
    mine = words[0, int(begins[0]) :].cpu().numpy().astype(np.uint16)
    return mine, states[0].cpu().numpy().astype(np.uint32)


def decode(
    words: npt.NDArray[np.uint16],
    states: npt.NDArray[np.uint32],
    classes: npt.NDArray[np.uint16],
    distributions: Distributions,
    out: npt.NDArray[np.uint8],
    lanes: int,
) -> int:
    """See `reference.decode`."""
    device = _device()
    tables = Tables(distributions, device)
    stream = torch.from_numpy(np.append(words, np.uint16(0)).view(np.int16)).to(device)
    first = torch.from_numpy(states.astype(np.int64)).to(device)[None].contiguous()
    begins = torch.tensor([0, len(words)], dtype=torch.int32, device=device)
    kinds = torch.from_numpy(classes.astype(np.int16)).to(device)[None]
    symbols, reads = decode_many(stream, begins, first, kinds, tables, out.shape[0])
    out[:] = symbols[0].cpu().numpy()
    states[:] = first[0].cpu().numpy().astype(np.uint32)
    return int(reads[0])
