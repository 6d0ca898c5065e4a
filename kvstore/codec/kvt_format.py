"""The encoded bytes of the kvt codec: the parts of levels, their bounds, and the entropy-coded stream in them.

docs/codec-format-kvt.md says what each field means. Nothing here is trusted: every length is compared with the bytes
there are and with the destination's before anything is allocated.
"""

from __future__ import annotations

import itertools
import struct
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from kvstore.errors import CorruptRecord
from kvstore.rope import MAX_POSITION

from .profile import ID_BYTES
from .rans import PROBABILITY_BITS
from .rans.tables import LOW, stream_words

__all__ = [
    "DTYPE_CODES", "FIRST", "FORMAT", "First", "Refinement", "build_first", "build_refinement", "check_stream",
    "lanes_for", "pack_positions", "parse_first", "parse_refinement", "profile_of",
    "tag_of", "unpack_positions",
]  # fmt: skip

FORMAT = 1
DTYPE_CODES = {"bfloat16": 1, "float16": 2, "float32": 3}
_DTYPES = {code: name for name, code in DTYPE_CODES.items()}

FIRST = struct.Struct(f"<BBBB{ID_BYTES}sHHIIIIII")
"""Of level 0: format, level, dtype, flags, profile, layer, lanes, tokens, start, raw tokens, bytes of positions,
escapes, bytes of the stream."""

_REFINEMENT = struct.Struct("<BBHIII")
"""Of a further level: format, level, lanes, tag of level 0, escapes, bytes of the stream."""

_ROTATED, _LISTED = 1, 2  # flags
_PER_LANE = 4096  # symbols; a lane loses 16 bits
_FEWEST = 8


class First(NamedTuple):
    """Level 0 of a segment.

    Attributes:
        dtype: canonical name.
        rotated: K is stored after the rotary embedding.
        profile: its id, 16 hex digits.
        layer: number of the layer.
        positions: int32 `[tokens]`, absolute.
        raw_tokens: uint32, rising: tokens that are not coded.
        raw: their bytes, K of all of them, then V.
        lanes, escapes, stream: of the entropy coder.
    """

    dtype: str
    rotated: bool
    profile: str
    layer: int
    positions: npt.NDArray[np.int32]
    raw_tokens: npt.NDArray[np.uint32]
    raw: memoryview
    lanes: int
    escapes: npt.NDArray[np.int8]
    stream: memoryview


class Refinement(NamedTuple):
    """A further level; `tag` is that of the level 0 that it refines."""

    level: int
    tag: int
    lanes: int
    escapes: npt.NDArray[np.int8]
    stream: memoryview


def tag_of(first: memoryview) -> int:
    """What ties refinements to the stored bytes of level 0: the low 32 bits of their XXH3-64."""
    return xxhash.xxh3_64_intdigest(first) & 0xFFFFFFFF


def build_first(first: First) -> bytearray:
    """The stored bytes of a level 0."""
    positions = first.positions
    tokens = len(positions)
    start = int(positions[0]) if tokens else 0
    steps = b"" if (np.diff(positions) == 1).all() else pack_positions(positions)
    flags = _ROTATED * first.rotated | _LISTED * bool(steps)
    head = FIRST.pack(
        FORMAT, 0, DTYPE_CODES[first.dtype], flags, bytes.fromhex(first.profile), first.layer, first.lanes, tokens,
        start, len(first.raw_tokens), len(steps), len(first.escapes), len(first.stream),
    )  # fmt: skip
    parts = (head, steps, first.raw_tokens.astype("<u4").tobytes(), first.escapes.tobytes(), first.raw, first.stream)
    return bytearray().join(parts)


def build_refinement(refinement: Refinement) -> bytearray:
    """The stored bytes of a further level."""
    escapes, stream = refinement.escapes, refinement.stream
    head = _REFINEMENT.pack(
        FORMAT, refinement.level, refinement.lanes, refinement.tag, len(escapes), len(stream)
    )  # fmt: skip
    return bytearray().join((head, escapes.tobytes(), stream))


def profile_of(data: memoryview) -> str:
    """The profile that a level 0 names. Raises `CorruptRecord` if this is none."""
    if len(data) < FIRST.size or data[0] != FORMAT or data[1] != 0:
        raise CorruptRecord(f"not level 0 of a kvt segment of format {FORMAT}")
    return bytes(data[4 : 4 + ID_BYTES]).hex()


def parse_first(data: memoryview, *, size: int, values: int, layers: int) -> First:
    """A level 0.

    Args:
        data: its stored bytes.
        size: bytes of the raw segment.
        values: of a token, by the profile.
        layers: of the shard, by the profile.

    Raises:
        CorruptRecord: a length does not fit another one.
    """
    profile = profile_of(data)
    _, _, code, flags, _, layer, lanes, tokens, start, raw_tokens, listed, escapes, stream = FIRST.unpack_from(data)
    dtype = _DTYPES.get(code)
    if dtype is None or flags & ~(_ROTATED | _LISTED) or layer >= layers:
        raise CorruptRecord("a kvt segment has an unknown dtype, flag or layer")
    itemsize = {"bfloat16": 2, "float16": 2, "float32": 4}[dtype]
    if tokens * values * itemsize != size or not tokens:
        raise CorruptRecord(f"a kvt segment of {tokens} tokens of {values} {dtype} values is not {size} bytes long")
    if raw_tokens > tokens or escapes > tokens * values or bool(listed) != bool(flags & _LISTED):
        raise CorruptRecord("a kvt segment has more raw tokens, escapes or positions than there are tokens")
    raw_bytes = raw_tokens * values * itemsize
    ends = [FIRST.size]
    for length in (listed, 4 * raw_tokens, escapes, raw_bytes, stream):
        ends.append(ends[-1] + length)
    if ends[-1] != len(data):
        raise CorruptRecord(f"the parts of a kvt segment are {ends[-1]} bytes, not {len(data)}")
    parts = [data[a:b] for a, b in itertools.pairwise(ends)]
    if listed:
        positions = unpack_positions(parts[0], tokens)
        if positions[0] != start:
            raise CorruptRecord("a kvt segment does not begin at the first of its positions")
    elif start + tokens > MAX_POSITION:
        raise CorruptRecord(f"a kvt segment claims positions up to {start + tokens}")
    else:
        positions = np.arange(start, start + tokens, dtype=np.int32)
    kept = np.frombuffer(parts[1], "<u4")
    if raw_tokens and (int(kept[-1]) >= tokens or (kept[1:] <= kept[:-1]).any()):
        raise CorruptRecord("the raw tokens of a kvt segment are not in order")
    return First(
        dtype, bool(flags & _ROTATED), profile, layer, positions, kept, parts[3], lanes,
        np.frombuffer(parts[2], np.int8), parts[4],
    )  # fmt: skip


def parse_refinement(data: memoryview, *, level: int, tag: int) -> Refinement:
    """The next level.

    Raises:
        CorruptRecord: it is another level or another segment's, or a length does not fit.
    """
    if len(data) < _REFINEMENT.size:
        raise CorruptRecord(f"a refinement of {len(data)} bytes ends inside its header")
    version, found, lanes, belongs, escapes, stream = _REFINEMENT.unpack_from(data)
    if version != FORMAT or found != level:
        raise CorruptRecord(f"not level {level} of a kvt segment of format {FORMAT}")
    if belongs != tag:
        raise CorruptRecord("a refinement is not of the segment that it was given for")
    begin = _REFINEMENT.size + escapes
    if begin + stream != len(data):
        raise CorruptRecord(f"the parts of a refinement are {begin + stream} bytes, not {len(data)}")
    return Refinement(
        level, tag, lanes, np.frombuffer(data[_REFINEMENT.size : begin], np.int8), data[begin:]
    )  # fmt: skip


# Positions of what is left when tokens were dropped: differences to the position before, as LEB128.


def pack_positions(positions: npt.NDArray[np.int32]) -> bytes:
    """Each position minus the one before (the first: minus 0), zigzag, in groups of 7 bits, lowest first."""
    wide = positions.astype(np.int64)
    steps = wide - np.concatenate(([0], wide[:-1]))
    out = bytearray()
    for folded in ((steps << 1) ^ (steps >> 63)).tolist():
        value = folded
        while value > 0x7F:
            out.append(value & 0x7F | 0x80)
            value >>= 7
        out.append(value)
    return bytes(out)


def unpack_positions(data: memoryview, tokens: int) -> npt.NDArray[np.int32]:
    """Undo `pack_positions`.

    Raises:
        CorruptRecord: they are not `tokens` positions.
    """
    raw = np.frombuffer(data, np.uint8)
    ends = np.flatnonzero(raw < 0x80)
    if len(ends) != tokens or ends[-1] != len(raw) - 1:
        raise CorruptRecord(f"a kvt segment lists {len(ends)} positions for {tokens} tokens")
    begins = np.concatenate(([0], ends[:-1] + 1))
    places = np.arange(len(raw)) - np.repeat(begins, ends - begins + 1)
    if int(places.max()) > 4:
        raise CorruptRecord("a position in a kvt segment is longer than 5 bytes")
    groups = (raw & 0x7F).astype(np.int64) << (7 * places)
    folded = np.add.reduceat(groups, begins)
    positions = np.cumsum((folded >> 1) ^ -(folded & 1))
    if int(positions.min()) < 0 or int(positions.max()) >= MAX_POSITION:
        raise CorruptRecord("a position in a kvt segment is not between 0 and 2^24")
    return positions.astype(np.int32)


# Entropy coding. The lanes are said in the header: a lane costs 16 bits, and levels differ in how much they hold.


def lanes_for(rows: int, channels: int) -> int:
    """How many lanes the encoder takes: one per 4096 symbols, at least 8, at most one per channel."""
    if not rows or not channels:
        return 0
    return min(channels, max(_FEWEST, rows * channels // _PER_LANE))


def check_stream(
    stream: memoryview, lanes: int, rows: int, channels: int
) -> tuple[npt.NDArray[np.uint16], npt.NDArray[np.uint32]]:
    """(words, first states) of a stream of `[rows, channels]` symbols.

    Raises:
        CorruptRecord: its length, the lanes or the states are impossible.
    """
    if not rows or not channels:
        if lanes or len(stream):
            raise CorruptRecord("a kvt level without symbols has a stream")
    elif not 1 <= lanes <= channels:
        raise CorruptRecord(f"a kvt level of {channels} channels cannot have {lanes} lanes")
    most = 4 * lanes + 2 * stream_words(rows, channels, lanes)
    if len(stream) < 4 * lanes or len(stream) % 2 or len(stream) > most:
        raise CorruptRecord(f"a stream of {rows} x {channels} symbols cannot have {len(stream)} bytes")
    states = np.frombuffer(stream, "<u4", lanes).astype(np.uint32)
    if (states < LOW).any():
        raise CorruptRecord("a stream begins with a state that no encoder leaves")
    return np.frombuffer(stream, "<u2", offset=4 * lanes), states


assert PROBABILITY_BITS == 12  # the profile's frequencies sum to 2^12
