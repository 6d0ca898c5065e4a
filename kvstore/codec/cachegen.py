"""CacheGen: groups of tokens with an 8-bit anchor, quantised deltas to it, and entropy coding by a profile.

The paper is arXiv 2310.07240 (SIGCOMM 2024). What it leaves open, the bytes of a segment and of a profile, and what its
released code does otherwise, are in docs/codec-format.md; the arithmetic is in `cachegen_reference`.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Sequence
from types import ModuleType
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from kvstore.errors import ConfigError, CorruptRecord
from kvstore.layout import KVLayout, dtype_itemsize

from . import cachegen_reference, rans
from .base import Codec, Decoder, Encoded, SegmentInfo, UnknownProfile, stored_raw
from .cachegen_reference import LARGEST_STEP, MOST, steps_from_bits
from .cachegen_tables import MAGNITUDES, NAME, SPLIT, Tables, tables_for, third_of
from .floats import finite
from .profile import ID_BYTES, Profile, find

__all__ = ["HEAD_BYTES", "CachegenCodec", "Head", "halves_of", "pack_head", "quantiser", "read_head"]

NUMBER = 5
_HEAD = struct.Struct(f"<BBHIBBH{ID_BYTES}sIII")
HEAD_BYTES = _HEAD.size
_FORMAT = 1
_DTYPES = ("bfloat16", "float16", "float32")
_WORDS: dict[int, np.dtype[Any]] = {2: np.dtype("<u2"), 4: np.dtype("<u4")}
_WIDE = 127  # what 8 bits hold

Symbols = npt.NDArray[np.uint8]
Whole = npt.NDArray[np.signedinteger[Any]]


@functools.cache
def quantiser() -> ModuleType:
    """`cachegen_native` if numba is installed (`pip install 'kvstore[codec]'`), else `cachegen_reference`."""
    try:
        from . import cachegen_native
    except ImportError:
        return cachegen_reference
    return cachegen_native


class Head(NamedTuple):
    """What stands in front of a segment, checked against the destination and the profile.

    Attributes:
        tables: of the profile it names.
        dtype: of the KV.
        layer, tokens, level, part: as encoded; part 0 is a segment by itself, part n refines the parts before it.
        anchors, deltas: bytes of the two streams.
        escapes: deltas that have no symbol.
    """

    tables: Tables
    dtype: str
    layer: int
    tokens: int
    level: int
    part: int
    anchors: int
    deltas: int
    escapes: int

    @property
    def groups(self) -> int:
        return -(-self.tokens // self.tables.group)

    @property
    def third(self) -> int:
        return third_of(self.layer, self.layout.num_layers)

    @property
    def layout(self) -> KVLayout:
        return self.tables.profile.layout

    @property
    def own_steps(self) -> bool:
        """Each delta vector has a step of its own."""
        return not self.tables.levels[self.level].steps[0, 0]

    @property
    def halves(self) -> list[slice]:
        """The channels of K and, unless there is none, of V."""
        return halves_of(self.layout)


def halves_of(layout: KVLayout) -> list[slice]:
    """The channels of K and, unless there is none, of V."""
    middle = layout.num_kv_heads * layout.head_dim
    return [slice(0, middle), slice(middle, layout.elements_per_token)][: 2 if layout.v_head_dim else 1]


class CachegenCodec(Codec):
    """CacheGen with static distributions. One segment is one layer of one chunk.

    Args:
        profile: what it encodes with; None: it only decodes.
        level: which of the profile's levels is encoded; None: the one the profile says. Levels that are embedded are
            encoded all.

    Raises:
        ConfigError: the profile is another codec's or impossible; there is no such level.
    """

    name = NAME
    number: ClassVar[int] = NUMBER
    lossless = False

    def __init__(self, profile: Profile | None = None, *, level: int | None = None) -> None:
        self.profile = profile
        self._tables = None if profile is None else tables_for(profile)
        self._level = 0
        if self._tables is not None:
            self._level = self._tables.level if level is None else level
            if not 0 <= self._level < (1 if self._tables.embedded else len(self._tables.levels)):
                raise ConfigError(f"there is no level {level!r} to encode in {profile}")
            self.levels = len(self._tables.levels) if self._tables.embedded else 1

    def encode(self, raw: memoryview, about: SegmentInfo) -> Sequence[Encoded]:
        """Encode one segment; see `Codec.encode`. The arithmetic is fp32."""
        tables = self._tables
        if tables is None:
            raise ConfigError(f"codec {NAME} needs a profile to encode: option codec_profile")
        if about.layout is None or about.dtype is None or not about.tokens:
            return stored_raw(raw)
        _check(tables, raw, about)
        if not finite(raw, about.dtype):
            return stored_raw(raw)
        parts = _encode(tables, self._level, raw, about)
        if parts is None or sum(map(len, parts)) >= len(raw):
            return stored_raw(raw)
        return [Encoded(NUMBER, part, memoryview(data)) for part, data in enumerate(parts)]

    def decode_into(self, parts: Sequence[memoryview], dst: memoryview) -> None:
        """Decode a segment, or its first levels; see `Codec.decode_into`."""
        if not parts:
            raise CorruptRecord(f"a {NAME} segment has at least one level")
        decoder = _CachegenDecoder(self.profile, dst)
        for part in parts[:-1]:
            decoder.take(part)
        decoder.feed(parts[-1])

    def decoder(self, dst: memoryview) -> Decoder:
        """A decoder that refines `dst` in place, if the profile's levels are embedded."""
        return _CachegenDecoder(self.profile, dst, keep=True)


def _check(tables: Tables, raw: memoryview, about: SegmentInfo) -> None:
    profile, layout = tables.profile, about.layout
    assert layout is not None  # `encode` saw to it
    assert about.dtype is not None
    profile.check_layout(layout, about.dtype)
    if (about.rope or "applied") != tables.rope:
        raise ConfigError(f"{profile} is for K stored with rope={tables.rope!r}, not {about.rope or 'applied'!r}")
    if not 0 <= about.layer < layout.num_layers:
        raise ConfigError(f"layer {about.layer} is not one of the {layout.num_layers} that {profile} is for")
    if len(raw) != layout.segment_bytes(about.tokens, about.dtype):
        raise ConfigError(f"a segment of {about.tokens} tokens has {len(raw)} bytes, which is not that of {profile}")


def _encode(tables: Tables, level: int, raw: memoryview, about: SegmentInfo) -> list[bytes] | None:
    """The parts of a segment; None if it must be stored raw."""
    layout, dtype = tables.profile.layout, about.dtype
    assert dtype is not None
    tokens, channels, third = about.tokens, layout.elements_per_token, third_of(about.layer, layout.num_layers)
    groups = -(-tokens // tables.group)
    finest = tables.levels[-1 if tables.embedded else level]
    limit = _WIDE if tables.embedded else finest.limit(third)
    anchors: Symbols = np.empty((groups, channels), np.uint8)
    deltas: Symbols = np.empty((tokens - groups, channels), np.uint8)
    steps: list[npt.NDArray[np.uint16]] = []
    own: list[npt.NDArray[np.uint16]] = []
    escapes: list[npt.NDArray[np.int16]] = []
    at = 0
    for half, columns in enumerate(halves_of(layout)):
        width = columns.stop - columns.start
        words = np.frombuffer(raw, _WORDS[dtype_itemsize(dtype)], tokens * width, at).reshape(tokens, width)
        at += words.nbytes
        step = finest.steps[half, about.layer]
        anchor_steps: npt.NDArray[np.uint16] = np.empty(groups, np.uint16)
        delta_steps: npt.NDArray[np.uint16] = np.empty(0 if step else tokens - groups, np.uint16)
        beyond = quantiser().quantise(
            words if words.flags.aligned else words.copy(), dtype, tables.group, step, limit,
            anchors[:, columns], deltas[:, columns], anchor_steps, delta_steps,
        )  # fmt: skip
        if beyond is None:
            return None
        steps.append(anchor_steps)
        own.append(delta_steps)
        escapes.append(beyond)
    kinds = tables.anchor_classes[about.layer]
    first = rans.encode(anchors, kinds, tables.anchors)

    refinements: list[bytes] = []
    if tables.embedded:
        whole = _whole(deltas, limit, np.concatenate(escapes), halves_of(layout))
        for part in range(len(tables.levels) - 1, 0, -1):
            whole, stream = _refine(tables, part, about.layer, whole)
            refinements.insert(0, pack_head(tables, dtype, about.layer, tokens, 0, part, 0, len(stream), 0) + stream)
        deltas, listed = _symbols(whole, tables.levels[0].limit(third), halves_of(layout))
        level = 0
    else:
        listed = np.concatenate(escapes)
    chosen = tables.levels[level]
    second = rans.encode(deltas, chosen.classes[about.layer], chosen.distributions[third])
    sides = b"".join(part.astype("<u2", copy=False).tobytes() for part in (*steps, *own))
    coarse = (
        pack_head(tables, dtype, about.layer, tokens, level, 0, len(first), len(second), len(listed)),
        sides,
        listed.astype("<i2", copy=False).tobytes(),
        first,
        second,
    )
    return [b"".join(coarse), *refinements]


def _whole(deltas: Symbols, limit: int, escapes: npt.NDArray[np.int16], halves: list[slice]) -> Whole:
    """The quantised deltas, int16 `[deltas, channels]`; the escapes must suffice."""
    whole = deltas.astype(np.int16) - np.int16(limit)
    at = 0
    for columns in halves:
        large = deltas[:, columns] > 2 * limit
        count = int(large.sum())
        whole[:, columns][large] = escapes[at : at + count]
        at += count
    return whole


def _symbols(whole: Whole, limit: int, halves: list[slice]) -> tuple[Symbols, npt.NDArray[np.int16]]:
    """The opposite of `_whole`."""
    large = np.abs(whole.astype(np.int32)) > limit
    symbols = np.where(large, 2 * limit + 1, whole.astype(np.int32) + limit).astype(np.uint8)
    listed = [whole[:, columns][large[:, columns]].astype(np.int16) for columns in halves]
    return symbols, np.concatenate(listed)


def _contexts(tables: Tables, part: int, layer: int, coarse: Whole) -> npt.NDArray[np.uint16]:
    """The class of each symbol of a refinement."""
    size = np.minimum(np.abs(coarse), MAGNITUDES - 1).astype(np.uint16)
    size += tables.levels[part].classes[layer] * np.uint16(MAGNITUDES)
    return size


def _refine(tables: Tables, part: int, layer: int, fine: Whole) -> tuple[Whole, bytes]:
    """The next coarser deltas, and the stream that refines them."""
    coarse = ((fine.astype(np.int32) + (1 + SPLIT * MOST)) // SPLIT - MOST).astype(np.int16)
    rest = fine - coarse * np.int16(SPLIT)
    symbols = (np.where(coarse < 0, -rest, rest) + 1).astype(np.uint8)
    contexts = _contexts(tables, part, layer, coarse)
    third = third_of(layer, tables.profile.layout.num_layers)
    return coarse, rans.encode(symbols, contexts, tables.levels[part].distributions[third])


def pack_head(
    tables: Tables, dtype: str, layer: int, tokens: int, level: int, part: int, anchors: int, deltas: int, escapes: int
) -> bytes:
    """The bytes of a `Head`."""
    kind, profile = _DTYPES.index(dtype), tables.profile.id_bytes
    return _HEAD.pack(_FORMAT, kind, layer, tokens, level, part, 0, profile, anchors, deltas, escapes)


class _CachegenDecoder(Decoder):
    """Holds the symbols of the anchors and the quantised deltas, if there may be refinements."""

    def __init__(self, profile: Profile | None, dst: memoryview, *, keep: bool = False) -> None:
        self._profile = profile
        self._dst = dst
        self._keep = keep
        self._head: Head | None = None
        self._next = 0

    def feed(self, part: memoryview) -> None:
        self.take(part)
        self._write()

    def take(self, part: memoryview) -> None:
        """Decode the symbols of the next level, and write nothing yet."""
        try:
            self._take(part)
        except BaseException:
            self._next = -1  # of no use any more
            raise

    def _take(self, part: memoryview) -> None:
        if self._next < 0:
            raise CorruptRecord(f"a level of a {NAME} segment was broken")
        head = read_head(part, len(self._dst), self._profile)
        before = self._head
        if head.part != self._next or (before is not None and not _follows(before, head)):
            raise CorruptRecord(f"not level {self._next} of this {NAME} segment")
        if head.part:
            self._take_refinement(head, part)
        else:
            self._take_coarse(head, part)
        self._next += 1

    def _take_coarse(self, head: Head, part: memoryview) -> None:
        tables, layer = head.tables, head.layer
        groups, deltas = head.groups, head.tokens - head.groups
        level = tables.levels[head.level]
        at = _HEAD.size
        self._steps = []
        count = groups * len(head.halves)
        bits = np.frombuffer(part, "<u2", count + deltas * len(head.halves) * head.own_steps, at)
        if (bits >= LARGEST_STEP).any():
            raise CorruptRecord(f"a {NAME} segment has an impossible step")
        at += bits.nbytes
        steps = steps_from_bits(bits)
        for half in range(len(head.halves)):
            of_deltas = (
                steps[count + half * deltas : count + (half + 1) * deltas]
                if head.own_steps
                else np.full(deltas, level.steps[half, layer], np.float32)
            )
            self._steps.append((steps[half * groups : (half + 1) * groups], of_deltas))
        self._escapes = np.frombuffer(part, "<i2", head.escapes, at).astype(np.int16)
        at += self._escapes.nbytes
        channels = head.layout.elements_per_token
        self._anchors: Symbols = np.empty((groups, channels), np.uint8)
        self._deltas: Symbols = np.empty((deltas, channels), np.uint8)
        rans.decode(part[at : at + head.anchors], self._anchors, tables.anchor_classes[layer], tables.anchors)
        at += head.anchors
        distributions = level.distributions[head.third]
        rans.decode(part[at:], self._deltas, level.classes[layer], distributions)
        self._limit = level.limit(head.third)
        self._head = head

    def _take_refinement(self, head: Head, part: memoryview) -> None:
        tables, layer = head.tables, head.layer
        if np.count_nonzero(self._deltas > 2 * self._limit) != len(self._escapes):
            raise CorruptRecord(f"a {NAME} segment lists another number of large deltas than it has")
        whole = _whole(self._deltas, self._limit, self._escapes, head.halves)
        if whole.size and int(np.abs(whole.astype(np.int32)).max()) > MOST // SPLIT:
            raise CorruptRecord(f"a delta of a {NAME} segment is too large to be refined")
        symbols: Symbols = np.empty_like(self._deltas)
        contexts = _contexts(tables, head.part, layer, whole)
        rans.decode(part[_HEAD.size :], symbols, contexts, tables.levels[head.part].distributions[head.third])
        rest = symbols.astype(np.int16) - np.int16(1)
        whole = whole * np.int16(SPLIT) + np.where(whole < 0, -rest, rest)
        self._deltas, self._escapes = _symbols(whole, _WIDE, head.halves)
        self._limit = _WIDE
        self._steps = [
            (steps, np.full(len(old), tables.levels[head.part].steps[half, layer], np.float32))
            for half, (steps, old) in enumerate(self._steps)
        ]

    def _write(self) -> None:
        head = self._head
        assert head is not None  # something was taken
        out = np.frombuffer(self._dst, _WORDS[dtype_itemsize(head.dtype)])
        aligned = out if out.flags.aligned else np.empty_like(out)
        at = used = 0
        for columns, (anchor_steps, delta_steps) in zip(head.halves, self._steps, strict=True):
            count = head.tokens * (columns.stop - columns.start)
            took = quantiser().dequantise(
                self._anchors[:, columns], self._deltas[:, columns], anchor_steps, delta_steps, self._limit,
                self._escapes[used:], head.tables.group, aligned[at : at + count].reshape(head.tokens, -1), head.dtype,
            )  # fmt: skip
            if took < 0:
                raise CorruptRecord(f"a {NAME} segment has more large deltas than it lists")
            used += took
            at += count
        if used != len(self._escapes):
            raise CorruptRecord(f"a {NAME} segment has fewer large deltas than it lists")
        if aligned is not out:
            out[:] = aligned
        if not (self._keep and head.tables.embedded):
            self._anchors = self._deltas = np.empty((0, 0), np.uint8)


def _follows(before: Head, head: Head) -> bool:
    same = ("dtype", "layer", "tokens", "level")
    same_profile = before.tables.profile == head.tables.profile  # tables may have been made anew
    return same_profile and all(getattr(before, name) == getattr(head, name) for name in same)


def read_head(part: memoryview, room: int, profile: Profile | None) -> Head:
    """The head of a segment or refinement, checked against its own length and that of the destination.

    Args:
        room: bytes of the destination.
        profile: looked at first, before those that are registered.

    Raises:
        CorruptRecord: this is no such segment.
        UnknownProfile: its profile is not loaded here.
    """
    if len(part) < _HEAD.size:
        raise CorruptRecord(f"a {NAME} segment of {len(part)} bytes ends inside its header")
    (version, kind, layer, tokens, level, number, reserved, name, anchors, deltas, escapes) = _HEAD.unpack_from(part)
    if version != _FORMAT or kind >= len(_DTYPES) or reserved:
        raise CorruptRecord(f"not a {NAME} segment of format {_FORMAT}")
    found = profile if profile is not None and profile.id_bytes == name else find(name.hex())
    if found is None:
        raise UnknownProfile(name.hex())
    if found.codec != NAME:
        raise CorruptRecord(f"a {NAME} segment names {found}")
    try:
        tables = tables_for(found)
    except ConfigError as error:  # nobody looked into it when it was loaded
        raise UnknownProfile(name.hex()) from error
    head = Head(tables, _DTYPES[kind], layer, tokens, level, number, anchors, deltas, escapes)
    layout, levels = found.layout, len(head.tables.levels)
    if head.dtype not in found.dtypes or layer >= layout.num_layers:
        raise CorruptRecord(f"a {NAME} segment has a dtype or layer that {found} does not know")
    if not tokens or layout.segment_bytes(tokens, head.dtype) != room:
        raise CorruptRecord(f"a {NAME} segment of {tokens} tokens does not decode to {room} bytes")
    if level >= levels or number >= (levels if head.tables.embedded else 1) or (head.tables.embedded and level):
        raise CorruptRecord(f"a {NAME} segment has a level that {found} does not have")
    if number:
        expected = _HEAD.size + deltas
        if anchors or escapes:
            raise CorruptRecord(f"a refinement of a {NAME} segment has what only its level 0 has")
    else:
        vectors = len(head.halves) * (head.groups + (tokens - head.groups) * head.own_steps)
        expected = _HEAD.size + 2 * (vectors + escapes) + anchors + deltas
    if expected != len(part) or anchors % 2 or deltas % 2:  # streams are made of 16-bit words
        raise CorruptRecord(f"a {NAME} segment has {len(part)} bytes instead of {expected}, or half a word in a stream")
    return head
