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

Copies beyond the packing itself: `encode` writes each plane once into memory of exactly the encoded size, `decode_into`
merges the planes straight into the destination (unpacked blocks of one plane are joined before, in cache). Numpy and
the libraries release the GIL meanwhile. Giving it up and getting it back costs more than 10 µs when several threads do
it, so the steps are few and large: four for a layer of 192 KiB, whatever the number of its blocks.
"""

from __future__ import annotations

import struct
import threading
from abc import abstractmethod
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from kvstore.errors import ConfigError, CorruptRecord

from .base import RAW, Codec, Encoded

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

    def encode(self, raw: memoryview, *, itemsize: int) -> Encoded:
        """Encode one segment.

        Args:
            raw: flat, contiguous bytes; not modified; may be read-only, of any length and content.
            itemsize: bytes per element: 1, 2, 4 or 8.

        Returns:
            What to store; `raw` itself, as codec `RAW`, if less than 1/32 would be saved.

        Raises:
            ConfigError: another itemsize.
        """
        word = _WORD_TYPES.get(itemsize)
        if word is None:
            raise ConfigError(f"itemsize {itemsize!r} is not supported; use 1, 2, 4 or 8 bytes per element")
        size = len(raw)
        as_it_is = Encoded(RAW, 0, raw)
        if size < _MIN_SEGMENT:
            return as_it_is
        source: Bytes = np.frombuffer(raw, np.uint8)
        tail = size % itemsize
        words: Words = source[: size - tail].view(word)
        packs = self._choose_all(words, itemsize)
        if not any(packs):
            return as_it_is
        block = _block_elements(len(words))
        packed = [self._pack_plane(words, plane, pack, block) for plane, pack in enumerate(packs)]
        lengths = [len(piece) for pieces in packed for piece in pieces]
        flags = [_PACKED if isinstance(piece, bytes) else 0 for pieces in packed for piece in pieces]
        at = _HEAD.size + 4 * len(lengths)
        total = at + sum(lengths) + tail
        if total > size - size // _MIN_GAIN:
            return as_it_is
        out: Bytes = np.empty(total, np.uint8)
        view = out.data
        _HEAD.pack_into(view, 0, _FORMAT, itemsize, 0, block, size)
        struct.pack_into(f"<{len(lengths)}I", view, _HEAD.size, *map(operator.or_, lengths, flags))
        for plane, pieces in enumerate(packed):
            for piece in pieces:
                if isinstance(piece, bytes):
                    view[at : at + len(piece)] = piece
                else:
                    _take_plane(piece, plane, out[at : at + len(piece)])
                at += len(piece)
        view[at:] = raw[size - tail :]
        return Encoded(self.number, 0, view)

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

    def _pack_plane(self, part: Words, plane: int, pack: Pack | None) -> bytes | None:
        """The packed plane; None if it is better stored as it is."""
        if pack is None:
            return None
        if part.itemsize == 1:
            bytes_of: Bytes = part
        else:
            bytes_of = self._scratch.plane[: len(part)]
            _take_plane(part, plane, bytes_of)
        piece = pack(bytes_of.data)
        return piece if len(piece) < len(part) - len(part) // _MIN_GAIN else None

    def decode_into(self, data: memoryview, dst: memoryview) -> None:
        """Decode a segment into `dst`, filling it exactly.

        Args:
            data: flat bytes, read only.
            dst: flat, writable bytes, as long as the raw segment.

        Raises:
            CorruptRecord: `data` is not a segment of this codec, is cut or too long, or has another raw length.
                `dst` is then undefined. Costs no more memory and time than a good segment of these lengths.
        """
        itemsize, block, lengths = self._parse(data, len(dst))
        target: Bytes = np.frombuffer(dst, np.uint8)
        stored: Bytes = np.frombuffer(data, np.uint8)
        tail = len(dst) % itemsize
        words: Words = target[: len(dst) - tail].view(_WORD_TYPES[itemsize])
        at = _HEAD.size + 4 * len(lengths)
        step = block // itemsize
        for index in range(0, len(lengths), itemsize):
            begin = index // itemsize * step
            part = words[begin : begin + step]
            planes: list[Bytes] = []
            for flagged in lengths[index : index + itemsize]:
                length = flagged & ~_PACKED
                if flagged & _PACKED:
                    plane: Bytes = np.frombuffer(self._unpack(data[at : at + length], len(part)), np.uint8)
                else:
                    plane = stored[at : at + length]
                if len(plane) != len(part):
                    raise CorruptRecord(f"a {self.name} plane has {len(plane)} bytes instead of {len(part)}")
                planes.append(plane)
                at += length
            _merge(planes, part)
        if tail:
            dst[len(dst) - tail :] = data[at:]

    def _parse(self, data: memoryview, size: int) -> tuple[int, int, tuple[int, ...]]:
        """Itemsize, block size and table; everything adds up to `len(data)` and `size`, or `CorruptRecord`."""
        if len(data) < _HEAD.size:
            raise CorruptRecord(f"a {self.name} segment of {len(data)} bytes ends inside its header")
        version, itemsize, reserved, block, raw_length = _HEAD.unpack_from(data)
        if version != _FORMAT or reserved or itemsize not in _WORD_TYPES:
            raise CorruptRecord(f"not a {self.name} segment of format {_FORMAT}")
        if raw_length != size:
            raise CorruptRecord(f"a {self.name} segment holds {raw_length} bytes instead of {size}")
        if not _MIN_BLOCK <= block <= _MAX_BLOCK or block % itemsize:
            raise CorruptRecord(f"a {self.name} segment has an impossible block size of {block}")
        tail = size % itemsize
        entries = -(-(size - tail) // block) * itemsize
        begin = _HEAD.size + 4 * entries
        if len(data) < begin:
            raise CorruptRecord(f"a {self.name} segment of {len(data)} bytes ends inside its table")
        lengths = struct.unpack_from(f"<{entries}I", data, _HEAD.size)
        if begin + sum(length & ~_PACKED for length in lengths) + tail != len(data):
            raise CorruptRecord(f"the table of a {self.name} segment does not add up to its {len(data)} bytes")
        return itemsize, block, lengths


def _block_bytes(whole: int, itemsize: int) -> int:
    """Block size for `whole` raw bytes: an even number of equal blocks, so that one ends where V begins."""
    pairs = -(-whole // (2 * _PLANE_BYTES * itemsize))
    return max(_MIN_BLOCK, -(-whole // (2 * pairs * itemsize)) * itemsize)


def _take_plane(words: Words, plane: int, out: Bytes) -> None:
    """Byte `plane` of each element. Shift and narrow: numpy has SIMD loops for both, not for strided bytes (2.5×)."""
    if plane == 0:
        np.copyto(out, words, casting="unsafe")
    else:
        np.right_shift(words, 8 * plane, out=out, casting="unsafe")


def _merge(planes: list[Bytes], words: Words) -> None:
    """The elements whose bytes are `planes`, lowest first; the opposite of `_take_plane`."""
    np.copyto(words, planes[-1])
    for plane in reversed(planes[:-1]):
        np.left_shift(words, 8, out=words)
        np.bitwise_or(words, plane, out=words)
