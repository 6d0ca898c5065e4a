"""Byte planes: the lossless codecs' common part, format and bounds.

Byte k of every element goes into plane k (the shuffle filter of HDF5 and Blosc), because the bytes of a float are
unlike each other: measured on real bf16 KV, the low byte (mantissa and one exponent bit) holds 7.95 bits, noise, and
the high byte 2.8. So each plane is packed or stored as it is, as a sample of it suggests. It is cut into an even
number of blocks, each packed on its own, so that K and V (if equally long) never share statistics.

An encoded segment, little-endian:

    0   1   format version (1)
    1   1   itemsize s: 1, 2, 4 or 8
    2   2   reserved (0)
    4   4   block size b in elements, 4 Ki … 1 Mi; the last block of a plane may be shorter
    8   8   raw length n
    16  4ks table, k = ⌈⌊n / s⌋ / b⌉: per plane, lowest first, and block the stored length; bit 31 is set if the
            block is packed, else it is stored as it is
    …       the stored blocks in the order of the table, so that an unpacked plane is contiguous
    …       the last n mod s raw bytes

Nothing here is trusted: all lengths must add up to the bytes there are and to the destination before anything is
decoded, and a packed block may only yield exactly the bytes there is room for.

Copies beyond the packing itself: `encode` writes each plane once into memory of exactly the encoded size; `decode_into`
joins the unpacked blocks of a plane, in cache, and merges the planes straight into the destination. Numpy and the
libraries release the GIL in each step. When threads contend for it, getting it back costs more than a short step takes,
so the steps are few and large: for a bf16 layer of 192 KiB two unpackings and two passes of numpy.
"""

from __future__ import annotations

import itertools
import operator
import struct
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from kvstore.errors import ConfigError, CorruptRecord

from .base import Codec, Encoded, SegmentInfo, only_part, stored_raw

__all__ = ["Pack", "PlaneCodec"]

Bytes: TypeAlias = npt.NDArray[np.uint8]
Words: TypeAlias = npt.NDArray[Any]  # of unsigned integers, one per element
Pack: TypeAlias = Callable[[memoryview], bytes]

_HEAD = struct.Struct("<BBHIQ")
_FORMAT = 1
_PACKED = 1 << 31
_WORD_TYPES: dict[int, np.dtype[Any]] = {1: np.dtype("<u1"), 2: np.dtype("<u2"), 4: np.dtype("<u4"), 8: np.dtype("<u8")}

_MIN_BLOCK = 4 << 10  # elements, which is to say bytes of one plane
_MAX_BLOCK = 1 << 20
_BLOCK = 128 << 10  # at most, when encoding: what zstd packs with one set of tables
_GROUP = 512 << 10  # elements handled in one step, at most (or one block): the planes should stay in the cache
_MIN_SEGMENT = 256  # below, header and tables eat the gain
_SLICE = 1024  # elements; a sample is two slices
_MIN_GAIN = 32  # one part in … must be saved, else decoding is not worth its time


class PlaneCodec(Codec):
    """Splits a segment into byte planes and packs those that gain by it. Subclasses say how a plane is packed."""

    lossless = True

    @abstractmethod
    def _choose(self, sample: memoryview) -> Pack | None:
        """How to pack a plane that looks like `sample` (at most 2048 bytes); None if packing would not pay."""

    @abstractmethod
    def _unpack(self, data: memoryview, nbytes: int) -> bytes:
        """Undo any `Pack`. Never allocates more than about `nbytes`.

        Raises:
            CorruptRecord: `data` is not a packed plane, or something follows it. (Its length is checked by the caller.)
        """

    def encode(self, raw: memoryview, about: SegmentInfo) -> Sequence[Encoded]:
        """Encode one segment.

        Args:
            raw: flat, contiguous bytes; not modified; may be read-only, of any length and content.
            about: only its itemsize is looked at: 1, 2, 4 or 8.

        Returns:
            What to store, in one level; `raw` itself, as codec `RAW`, if less than 1/32 would be saved.

        Raises:
            ConfigError: another itemsize.
        """
        itemsize = about.itemsize
        word = _WORD_TYPES.get(itemsize)
        if word is None:
            raise ConfigError(f"itemsize {itemsize!r} is not supported; use 1, 2, 4 or 8 bytes per element")
        size = len(raw)
        if size < _MIN_SEGMENT:
            return stored_raw(raw)
        source: Bytes = np.frombuffer(raw, np.uint8)
        tail = size % itemsize
        words: Words = source[: size - tail].view(word)
        packs = self._choose_all(words, itemsize)
        if not any(packs):
            return stored_raw(raw)
        block = _block_elements(len(words))
        packed = [self._pack_plane(words, plane, pack, block) for plane, pack in enumerate(packs)]
        lengths: list[int] = []
        for pieces in packed:
            lengths += [
                n if piece is None else len(piece) for n, piece in zip(_cut(len(words), block), pieces, strict=True)
            ]
        at = _HEAD.size + 4 * len(lengths)
        total = at + sum(lengths) + tail
        if total > size - size // _MIN_GAIN:
            return stored_raw(raw)
        out: Bytes = np.empty(total, np.uint8)
        view = out.data
        flags = (0 if piece is None else _PACKED for pieces in packed for piece in pieces)
        _HEAD.pack_into(view, 0, _FORMAT, itemsize, 0, block, size)
        struct.pack_into(f"<{len(lengths)}I", view, _HEAD.size, *map(operator.or_, lengths, flags))
        for plane, pieces in enumerate(packed):
            if not any(pieces):
                _take_plane(words, plane, out[at : at + len(words)])
                at += len(words)
                continue
            for begin, piece in zip(range(0, len(words), block), pieces, strict=True):
                length = len(words[begin : begin + block]) if piece is None else len(piece)
                if piece is None:
                    _take_plane(words[begin : begin + block], plane, out[at : at + length])
                else:
                    view[at : at + length] = piece
                at += length
        view[at:] = raw[size - tail :]
        return (Encoded(self.number, 0, view),)

    def _choose_all(self, words: Words, itemsize: int) -> list[Pack | None]:
        """One decision per plane, from the same two slices of the segment (of K and of V, if it is a KV segment)."""
        count = len(words)
        if count > 2 * _SLICE:
            first, second = count // 4, count - count // 4 - _SLICE
            words = np.concatenate((words[first : first + _SLICE], words[second : second + _SLICE]))
        sample: Bytes = np.empty(len(words), np.uint8)
        packs = []
        for plane in range(itemsize):
            _take_plane(words, plane, sample)
            packs.append(self._choose(sample.data))
        return packs

    @staticmethod
    def _pack_plane(words: Words, plane: int, pack: Pack | None, block: int) -> Sequence[bytes | None]:
        """The packed blocks of a plane; None for one that is better stored as it is."""
        if pack is None:
            return [None] * len(_cut(len(words), block))
        group = _group_elements(block)
        room: Bytes = np.empty(0 if words.itemsize == 1 else min(group, len(words)), np.uint8)
        pieces: list[bytes | None] = []
        for begin in range(0, len(words), group):
            part = words[begin : begin + group]
            if words.itemsize > 1:
                part, source = room[: len(part)], part
                _take_plane(source, plane, part)
            for at in range(0, len(part), block):
                some = part[at : at + block]
                piece = pack(some.data)
                pieces.append(piece if len(piece) < len(some) - len(some) // _MIN_GAIN else None)
        return pieces

    def decode_into(self, parts: Sequence[memoryview], dst: memoryview) -> None:
        """Decode a segment into `dst`, filling it exactly.

        Args:
            parts: one view of flat bytes, read only.
            dst: flat, writable bytes, as long as the raw segment.

        Raises:
            CorruptRecord: the bytes are not a segment of this codec, are cut or too long, or have another raw length.
                `dst` is then undefined. Costs no more memory and time than a good segment of these lengths.
        """
        data = only_part(parts, self.name)
        itemsize, block, table = self._parse(data, len(dst))
        tail = len(dst) % itemsize
        target: Bytes = np.frombuffer(dst, np.uint8)
        words: Words = target[: len(dst) - tail].view(_WORD_TYPES[itemsize])
        counts = _cut(len(words), block)
        lengths = [entry & ~_PACKED for entry in table]
        offsets = list(itertools.accumulate(lengths, initial=_HEAD.size + 4 * len(table)))
        step = _group_elements(block) // block
        for first in range(0, len(counts), step):
            some = counts[first : first + step]
            planes: list[Bytes] = []
            for entry in range(first, len(table), len(counts)):
                entries = slice(entry, entry + len(some))
                part = data[offsets[entry] : offsets[entry + len(some)]]
                planes.append(self._plane(part, table[entries], lengths[entries], some))
            begin = first * block
            _merge(planes, words[begin : begin + sum(some)])
        if tail:
            dst[len(dst) - tail :] = data[offsets[-1] :]

    def _plane(self, data: memoryview, table: Sequence[int], lengths: Sequence[int], counts: Sequence[int]) -> Bytes:
        """The bytes of consecutive blocks of one plane, which `data` holds; not copied if none is packed."""
        pieces: list[bytes | memoryview] = []
        at = 0
        for entry, length, count in zip(table, lengths, counts, strict=True):
            piece = data[at : at + length]
            pieces.append(self._unpack(piece, count) if entry & _PACKED else piece)
            if len(pieces[-1]) != count:
                raise CorruptRecord(f"a block of a {self.name} segment has {len(pieces[-1])} bytes instead of {count}")
            at += length
        if not any(entry & _PACKED for entry in table):
            return np.frombuffer(data, np.uint8)
        return np.frombuffer(pieces[0] if len(pieces) == 1 else b"".join(pieces), np.uint8)

    def _parse(self, data: memoryview, size: int) -> tuple[int, int, tuple[int, ...]]:
        """Itemsize, block size and table; everything adds up to `len(data)` and `size`, or `CorruptRecord`."""
        if len(data) < _HEAD.size:
            raise CorruptRecord(f"a {self.name} segment of {len(data)} bytes ends inside its header")
        version, itemsize, reserved, block, raw_length = _HEAD.unpack_from(data)
        if version != _FORMAT or reserved or itemsize not in _WORD_TYPES:
            raise CorruptRecord(f"not a {self.name} segment of format {_FORMAT}")
        if raw_length != size:
            raise CorruptRecord(f"a {self.name} segment holds {raw_length} bytes instead of {size}")
        if not _MIN_BLOCK <= block <= _MAX_BLOCK:
            raise CorruptRecord(f"a {self.name} segment has an impossible block size of {block}")
        entries = itemsize * len(_cut(size // itemsize, block))
        begin = _HEAD.size + 4 * entries
        if len(data) < begin:
            raise CorruptRecord(f"a {self.name} segment of {len(data)} bytes ends inside its table")
        table = struct.unpack_from(f"<{entries}I", data, _HEAD.size)
        if begin + sum(entry & ~_PACKED for entry in table) + size % itemsize != len(data):
            raise CorruptRecord(f"the table of a {self.name} segment does not add up to its {len(data)} bytes")
        return itemsize, block, table


def _block_elements(count: int) -> int:
    """Block size for `count` elements: an even number of equal blocks, so that one ends where V begins."""
    pairs = -(-count // (2 * _BLOCK))
    return max(_MIN_BLOCK, -(-count // (2 * pairs)))


def _group_elements(block: int) -> int:
    """As many blocks as are handled in one step, in elements."""
    return max(_GROUP // block, 1) * block


def _cut(count: int, block: int) -> list[int]:
    """The lengths of the blocks of `count` elements."""
    whole, rest = divmod(count, block)
    return [block] * whole + [rest] * (rest > 0)


def _take_plane(words: Words, plane: int, out: Bytes) -> None:
    """Byte `plane` of each element. Shift and narrow: numpy has SIMD loops for both, not for strided bytes (2.5×)."""
    if plane == 0:
        np.copyto(out, words, casting="unsafe")
    else:
        np.right_shift(words, 8 * plane, out=out, casting="unsafe")


def _merge(planes: list[Bytes], words: Words) -> None:
    """The elements whose bytes are `planes`, lowest first; the opposite of `_take_plane`."""
    if len(planes) == 1:
        np.copyto(words, planes[0])
        return
    np.left_shift(planes[-1], 8, out=words, dtype=words.dtype)
    np.bitwise_or(words, planes[-2], out=words)
    for plane in reversed(planes[:-2]):
        np.left_shift(words, 8, out=words)
        np.bitwise_or(words, plane, out=words)
