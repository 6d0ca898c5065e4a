"""kvt: a transform codec for KV caches with levels that refine each other in place. The default lossy codec.

K (its rotary embedding undone) and V of each head are turned into a basis in which the model notices an error of one
step alike in every direction, and in which the values of a token are uncorrelated; then rounded to steps, and the
indices entropy-coded bit by bit of precision: a coarse level first, refinements after it. The first tokens of a prompt,
which attention leans on, and tokens beyond what an index can hold are stored as they are.

Basis, distributions and levels are profiled offline (`kvstore.codec.kvt_profiling`) and named by the profile's id.
Format and reasons: docs/codec-format-kvt.md.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from types import ModuleType
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from kvstore.errors import ConfigError, CorruptRecord
from kvstore.layout import dtype_itemsize
from kvstore.rope import RotarySpec, Rotation

from . import kvt_reference
from .base import Codec, Decoder, Encoded, SegmentInfo, UnknownProfile, stored_raw
from .kvt_format import (
    First,
    Refinement,
    build_first,
    build_refinement,
    check_stream,
    lanes_for,
    parse_first,
    parse_refinement,
    profile_of,
    tag_of,
)  # fmt: skip
from .kvt_reference import Float32, Int8
from .kvt_tables import Layer, Level, Side, Tables, tables_of
from .profile import Profile, find

__all__ = ["KvtCodec", "KvtDecoder"]

_BLOCK = 1 << 16  # values handled in one step: what is computed of them stays in the cache
_LARGEST = {"bfloat16": 3.3895313892515355e38, "float16": 65504.0, "float32": 3.4028234663852886e38}


@functools.cache
def loops() -> ModuleType:
    """`kvt_native` if numba is installed (`pip install 'kvstore[codec]'`), else `kvt_reference`."""
    try:
        from . import kvt_native
    except ImportError:
        return kvt_reference
    return kvt_native


@functools.lru_cache(maxsize=8)
def _rotations(rotary: RotarySpec, positions: bytes) -> tuple[Rotation, Rotation]:
    """What undoes and what applies the embedding: the layers of a chunk share them."""
    where = np.frombuffer(positions, np.int32)
    return rotary.undoing(where), rotary.applying(where)


class KvtCodec(Codec):
    """See the module. Safe for use from several threads at once.

    Args:
        profile: what it encodes with; None: it only decodes, by whatever registered profile a segment names.

    Raises:
        ConfigError: the profile is not one of kvt.
    """

    name: ClassVar[str] = "kvt"
    number: ClassVar[int] = 6
    lossless: ClassVar[bool] = False

    def __init__(self, profile: Profile | None = None) -> None:
        self.profile = profile
        self._tables = None if profile is None else tables_of(profile)
        self.levels = 1 if self._tables is None else self._tables.levels

    def encode(self, raw: memoryview, about: SegmentInfo) -> Sequence[Encoded]:
        """Encode one segment: see `Codec.encode`. Needs the layout, dtype, positions and rotary state of the segment.

        Raises:
            ConfigError: it has no profile; or layout, dtype, layer or rotary state are not the profile's, or are not
                said; the message names both sides.
        """
        tables = self._tables
        if tables is None:
            raise ConfigError("codec 'kvt' needs a profile to encode: option codec_profile")
        if about.layout is None:
            return stored_raw(raw)
        positions, rotated = self._fits(tables, raw, about)
        dtype = str(about.dtype)
        if not about.tokens or not loops().finite(raw, dtype):
            return stored_raw(raw)
        with np.errstate(over="ignore", invalid="ignore"):  # such tokens are stored raw
            indices, kept = self._quantised(tables, raw, about, positions, rotated)
        layer = tables.layer(about.layer)
        parts: list[bytearray] = []
        for number, level in enumerate(layer.levels):
            lanes, escapes, stream = _encode_level(tables, level, indices)
            view = memoryview(stream)
            if number:
                data = build_refinement(Refinement(number, tag_of(memoryview(parts[0])), lanes, escapes, view))
            else:
                same = _raw_rows(raw, tables, dtype, kept)
                first = First(
                    dtype, rotated, tables.profile.id, about.layer, positions, kept.astype(np.uint32),
                    same, lanes, escapes, view,
                )  # fmt: skip
                data = build_first(first)
            parts.append(data)
        if sum(map(len, parts)) >= len(raw):
            return stored_raw(raw)
        return [Encoded(self.number, number, memoryview(part)) for number, part in enumerate(parts)]

    def decode_into(self, parts: Sequence[memoryview], dst: memoryview) -> None:
        """Decode levels 0 to `len(parts) - 1` at once: see `Codec.decode_into`."""
        decoder = KvtDecoder(dst)
        if not parts:
            raise CorruptRecord("a kvt segment has at least one level")
        for part in parts:
            decoder.take(part)
        decoder.write()

    def decoder(self, dst: memoryview) -> Decoder:
        """See `Codec.decoder`. It holds a byte per value, half of a bfloat16 segment."""
        return KvtDecoder(dst)

    def _fits(self, tables: Tables, raw: memoryview, about: SegmentInfo) -> tuple[npt.NDArray[np.int32], bool]:
        """(position of each token, is K rotated), or `ConfigError`."""
        profile = tables.profile
        assert about.layout is not None
        profile.check_layout(about.layout, str(about.dtype))
        if about.rope not in ("applied", "none"):
            raise ConfigError(
                f"{profile} needs to know how K is stored, rope 'applied' or 'none'; the segment says {about.rope!r}"
            )
        rotated = about.rope == "applied"
        if rotated and tables.rotary is None:
            raise ConfigError(f"{profile} is for K without a rotary embedding, the segment has rope 'applied'")
        positions = about.token_positions()
        if positions is None:
            raise ConfigError(f"{profile} needs the position of each token, the segment says none")
        positions = np.ascontiguousarray(positions, np.int32)
        if positions.shape != (about.tokens,):
            raise ConfigError(f"the segment has {about.tokens} tokens and positions {list(positions.shape)}")
        expected = about.layout.segment_bytes(about.tokens, str(about.dtype))
        if len(raw) != expected:
            raise ConfigError(f"{about.tokens} tokens of {profile} are {expected} bytes, the segment has {len(raw)}")
        return positions, rotated

    @staticmethod
    def _quantised(
        tables: Tables, raw: memoryview, about: SegmentInfo, positions: npt.NDArray[np.int32], rotated: bool
    ) -> tuple[Int8, npt.NDArray[np.int64]]:
        """(indices of the coded tokens `[rows, channels]`, numbers of the raw tokens)."""
        layer = tables.layer(about.layer)
        tokens, dtype = about.tokens, str(about.dtype)
        undo = None
        if rotated and tables.rotary is not None:
            undo = _rotations(tables.rotary, positions.tobytes())[0]
        keys, values = _sides(raw, tables, dtype, tokens)
        indices = np.empty((tokens, tables.channels), np.int8)
        raw_tokens = positions < tables.sinks
        raw_tokens[max(0, tokens - tables.raw_last) :] = True
        step = max(1, _BLOCK // tables.channels)
        z: Float32 = np.empty((min(step, tokens), tables.channels), np.float32)
        room: Float32 = np.empty(z.size, np.float32)
        load, quantise = loops().load, loops().quantise
        for begin in range(0, tokens, step):
            end = min(begin + step, tokens)
            part = z[: end - begin]
            k, v = _heads(room, tables, end - begin)
            load(keys[begin:end], dtype, None if undo is None else undo.part(begin, end), k)
            load(values[begin:end], dtype, None, v)
            _into_steps(k, layer.k, part[:, : tables.key_channels])
            _into_steps(v, layer.v, part[:, tables.key_channels :])
            raw_tokens[begin:end] |= quantise(part, layer.offset, tables.rounding, indices[begin:end])
        kept = np.flatnonzero(raw_tokens)
        if len(kept):
            first = len(kept)
            indices = indices[first:] if kept[-1] == first - 1 else indices[~raw_tokens]
        return indices, kept


class KvtDecoder(Decoder):
    """Decodes one segment level by level: see `Decoder`."""

    def __init__(self, dst: memoryview) -> None:
        self._dst = dst
        self._tables: Tables | None = None
        self._layer: Layer
        self._first: First
        self._values: Int8
        self._tag = 0
        self._levels = 0
        self._broken = False

    def feed(self, part: memoryview) -> None:
        """See `Decoder.feed`."""
        self.take(part)
        self.write()

    def take(self, part: memoryview) -> None:
        """The next level, without writing to the destination: `write` does that for all that was taken."""
        if self._broken:
            raise CorruptRecord("this decoder met a broken level before")
        self._broken = True
        if self._tables is None:
            self._begin(part)
        else:
            self._refine(part)
        self._levels += 1
        self._broken = False

    def _begin(self, part: memoryview) -> None:
        name = profile_of(part)
        profile = find(name)
        if profile is None or profile.codec != KvtCodec.name:
            raise UnknownProfile(name)
        tables = tables_of(profile)
        layout = tables.layout
        first = parse_first(part, size=len(self._dst), values=tables.channels, layers=layout.num_layers)
        if first.rotated and tables.rotary is None:
            raise CorruptRecord(f"a kvt segment has rotated K, which {profile} has not")
        if first.dtype not in profile.dtypes:
            raise CorruptRecord(f"a kvt segment is {first.dtype}, which {profile} is not for")
        # The bytes that it came in may be gone when the next level comes; the raw tokens are written at once.
        self._tables, self._tag = tables, tag_of(part)
        self._layer = tables.layer(first.layer)
        self._values = np.zeros((len(first.positions) - len(first.raw_tokens), tables.channels), np.int8)
        self._merge(self._layer.levels[0], first.lanes, first.escapes, first.stream)
        _write_raw_rows(self._dst, tables, first)
        self._first = first._replace(
            raw=memoryview(b""), stream=memoryview(b""), escapes=first.escapes[:0], raw_tokens=first.raw_tokens.copy()
        )

    def _refine(self, part: memoryview) -> None:
        levels = self._layer.levels
        if self._levels >= len(levels):
            raise CorruptRecord(f"a kvt segment of this profile has {len(levels)} levels, not more")
        found = parse_refinement(part, level=self._levels, tag=self._tag)
        self._merge(levels[self._levels], found.lanes, found.escapes, found.stream)

    def _merge(self, level: Level, lanes: int, escapes: Int8, stream: memoryview) -> None:
        assert self._tables is not None
        words, states = check_stream(stream, lanes, len(self._values), len(level.live))
        if not lanes:
            done = not len(escapes)
        else:
            done = loops().decode_level(
                words, states, level, self._tables.distributions, lanes, escapes, self._values
            )  # fmt: skip
        if not done:
            raise CorruptRecord("a stream of a kvt level does not end where it should, or has other escapes")

    def write(self) -> None:
        """Bring the destination to what was taken."""
        tables, first, layer = self._tables, self._first, self._layer
        assert tables is not None
        level = layer.levels[self._levels - 1]
        tokens = len(first.positions)
        rows = _coded(tokens, first.raw_tokens)
        apply = None
        if first.rotated and tables.rotary is not None:
            apply = _rotations(tables.rotary, first.positions[rows].tobytes())[1]
        keys, values = _sides(self._dst, tables, first.dtype, tokens)
        total = len(self._values)
        step = max(1, _BLOCK // tables.channels)
        z: Float32 = np.empty((min(step, total), tables.channels), np.float32)
        room: Float32 = np.empty(z.size, np.float32)
        split = tables.key_channels
        for begin in range(0, total, step):
            end = min(begin + step, total)
            part = z[: end - begin]
            loops().dequantise(self._values[begin:end], level.centres, level.scale, layer.offset, part)
            k, v = _heads(room, tables, len(part))
            _into_values(part[:, :split], layer.k, k.reshape(len(part), -1))
            _into_values(part[:, split:], layer.v, v.reshape(len(part), -1))
            where: Any = slice(rows.start + begin, rows.start + end) if isinstance(rows, slice) else rows[begin:end]
            turn = None if apply is None else apply.part(begin, end)
            _store(k, keys, where, first.dtype, turn, layer.k.reach)
            _store(v, values, where, first.dtype, None, layer.v.reach)


def _encode_level(tables: Tables, level: Level, indices: Int8) -> tuple[int, Int8, bytes]:
    """(lanes, escapes, stream) of a level."""
    lanes = lanes_for(len(indices), len(level.live))
    if not lanes:
        return 0, np.empty(0, np.int8), b""
    words, states, escapes = loops().encode_level(indices, level, tables.distributions, lanes)
    return lanes, escapes, states.astype("<u4").tobytes() + words.astype("<u2", copy=False).tobytes()


def _sides(
    segment: memoryview, tables: Tables, dtype: str, tokens: int
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    """Bytes of K and of V, `[tokens, bytes of a token]` each, not copied."""
    flat = np.frombuffer(segment, np.uint8)
    cut = tokens * tables.key_channels * dtype_itemsize(dtype)
    return flat[:cut].reshape(tokens, -1), flat[cut:].reshape(tokens, -1)


def _raw_rows(raw: memoryview, tables: Tables, dtype: str, kept: npt.NDArray[np.int64]) -> memoryview:
    keys, values = _sides(raw, tables, dtype, len(raw) // (tables.channels * dtype_itemsize(dtype)))
    return memoryview(keys[kept].tobytes() + values[kept].tobytes())


def _write_raw_rows(dst: memoryview, tables: Tables, first: First) -> None:
    kept = first.raw_tokens
    if len(kept):
        targets = _sides(dst, tables, first.dtype, len(first.positions))
        sources = _sides(first.raw, tables, first.dtype, len(kept))
        for target, source in zip(targets, sources, strict=True):
            target[kept] = source


def _coded(tokens: int, raw_tokens: npt.NDArray[np.uint32]) -> Any:
    """Which tokens are coded: a slice if the raw ones are the first, else their numbers."""
    count = len(raw_tokens)
    if not count or int(raw_tokens[-1]) == count - 1:
        return slice(count, tokens)
    coded = np.ones(tokens, np.bool_)
    coded[raw_tokens] = False
    return np.flatnonzero(coded)


def _heads(room: Float32, tables: Tables, tokens: int) -> tuple[Float32, Float32]:
    """Room for K and V of so many tokens, float32 `[tokens, heads, width]` each."""
    cut = tokens * tables.key_channels
    k = room[:cut].reshape(tokens, -1, tables.widths[0])
    return k, room[cut : tokens * tables.channels].reshape(tokens, -1, tables.widths[1])


def _into_steps(x: Float32, side: Side, out: Float32) -> None:
    """out = x @ inverse, per head; x is `[tokens, heads, width]`, out `[tokens, heads * width]`."""
    width = x.shape[2]
    for head in range(x.shape[1]):
        np.matmul(x[:, head], side.inverse[head], out=out[:, head * width : (head + 1) * width])


def _into_values(z: Float32, side: Side, out: Float32) -> None:
    """out = z @ basis, per head; both are `[tokens, heads * width]`."""
    heads, width, _ = side.basis.shape
    for head in range(heads):
        own = slice(head * width, (head + 1) * width)
        np.matmul(z[:, own], side.basis[head], out=out[:, own])


def _store(
    values: Float32, target: npt.NDArray[np.uint8], where: Any, dtype: str, turn: Rotation | None, reach: float
) -> None:
    """Write rows of float32 values, changed by that, as rows of elements, rotated: the nearest that are finite."""
    most = _LARGEST[dtype]
    if reach > most:
        if turn is not None:
            turn(values, out=values)
            turn = None
        np.nan_to_num(values, copy=False, posinf=most, neginf=-most)
        np.clip(values, -most, most, out=values)
    if isinstance(where, slice):
        loops().store(values, dtype, turn, target[where])
    else:
        rows = np.empty((len(values), target.shape[1]), np.uint8)
        loops().store(values, dtype, turn, rows)
        target[where] = rows
