"""What a node and its clients say to each other: the meta bytes of requests and replies over a transport.

All integers are little-endian. A batch of n items starts with n (u32); then come arrays, one after another, so that a
batch of 1,024 is packed and unpacked by a few calls and not by thousands:

    STAT, DELETE, QUARANTINE   n · keys (32 bytes each)
    GET      n · keys · offsets u64 · lengths u64           the reply's body: the bytes of all OK items, in order
    PUT      n · keys · sizes u64 · has-parent u8 · parents (32 bytes for each that has one)
             With a body (small batches): it holds all records, and the reply is final; so it is if the records have no
             bytes at all. Without: a question. The reply has WANTED for the records to send, and in front of the
             outcomes a ticket (u64; 0: nothing is wanted). A key's second place in a batch is EXISTS, which is true
             only if the first is stored. Two who are asked for the same record both send it; the second is EXISTS.
    DATA     ticket u64                                     body: the records that were WANTED, in order of the batch;
                                                            reply: outcomes of those; LATE: the ticket is no more
    LIST     cursor u64 · page u32                          reply: next cursor u64 (0: the end) · n · keys · sizes u64 ·
                                                            last used f64 (seconds since the epoch)
    INFO     nothing                                        reply: msgpack map of plain facts
    ANNOUNCE n · keys · jobs u32 · keys of each job u32     reply: nothing. The queue of the client's scheduler, first
                                                            to run first; replaces the last one of this connection

The reply to a batch, status `Status.OK`:

    outcomes  n (u32) · codes u8 · sizes u64 · length u32 of notes · notes: msgpack list of [index, message]

A reply with another status has a message (UTF-8) as its meta, and no body. Tickets and cursors belong to a
connection. A ticket's memory is given back when the connection ends, or another PUT comes on it.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import msgpack

from kvstore.keys import Key

__all__ = [
    "Code",
    "GetRequest",
    "ListPage",
    "Malformed",
    "Op",
    "PutRequest",
    "Status",
    "pack_announce",
    "pack_data",
    "pack_get",
    "pack_keys",
    "pack_list",
    "pack_outcomes",
    "pack_page",
    "pack_put",
    "pack_ticket",
    "unpack_announce",
    "unpack_data",
    "unpack_get",
    "unpack_keys",
    "unpack_list",
    "unpack_outcomes",
    "unpack_page",
    "unpack_put",
    "unpack_ticket",
]

KEY_BYTES = 32
MAX_ITEMS = 1 << 16  # of one request


class Op(enum.IntEnum):
    """What a request asks for."""

    STAT = 1
    GET = 2
    PUT = 3
    DATA = 4
    DELETE = 5
    QUARANTINE = 6
    LIST = 7
    INFO = 8
    ANNOUNCE = 9


class Status(enum.IntEnum):
    """Of a whole reply."""

    OK = 0
    BUSY = 1  # no credit or no memory became free in time: come again
    BAD = 2  # the request makes no sense, and will make none
    CLOSED = 3  # the node is shutting down
    LATE = 4  # the deadline passed on the way here


class Code(enum.IntEnum):
    """Of one item."""

    OK = 0
    MISS = 1
    EXISTS = 2
    WANTED = 3  # PUT: send it
    FULL = 4  # PUT: no memory became free in time → PoolExhausted
    TOO_LARGE = 5  # PUT → PermanentError
    FAILED = 6  # something passing → TransientError
    REFUSED = 7  # something lasting → PermanentError


class Malformed(Exception):
    """Meta bytes that do not parse. The message says what is wrong with them."""


class GetRequest(NamedTuple):
    keys: list[Key]
    offsets: list[int]
    lengths: list[int]


class PutRequest(NamedTuple):
    keys: list[Key]
    sizes: list[int]
    parents: list[Key | None]


class ListPage(NamedTuple):
    cursor: int
    keys: list[Key]
    sizes: list[int]
    last_used: list[float]


_CODES = tuple(Code)
_key_of = partial(bytes.__new__, Key)  # of 32 bytes, which need no check any more: a quarter of the time of `Key`
_BLOCK = 64  # keys that are cut off at a time; `struct` remembers formats, and those of many keys are large
_KEYS = struct.Struct(f"{KEY_BYTES}s" * _BLOCK)
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_LIST = struct.Struct("<QI")


def _count(meta: bytes) -> int:
    """How many items a batch has."""
    if len(meta) < 4:
        raise Malformed(f"a batch of {len(meta)} bytes")
    (n,) = _U32.unpack_from(meta)
    if n > MAX_ITEMS:
        raise Malformed(f"{n} items in one request; at most {MAX_ITEMS}")
    return int(n)


def _keys(meta: bytes, begin: int, n: int) -> list[Key]:
    """`n` keys from byte `begin` on, which are there."""
    keys: list[Key] = []
    whole = n - n % _BLOCK
    for at in range(0, whole, _BLOCK):
        keys += map(_key_of, _KEYS.unpack_from(meta, begin + at * KEY_BYTES))
    keys += map(_key_of, struct.unpack_from(f"{KEY_BYTES}s" * (n - whole), meta, begin + whole * KEY_BYTES))
    return keys


class _Reader:
    """Takes arrays off meta bytes, and never more than there is."""

    def __init__(self, meta: bytes) -> None:
        self.meta = meta
        self.at = 0

    def take(self, nbytes: int) -> bytes:
        part = self.meta[self.at : self.at + nbytes]
        if len(part) != nbytes:
            raise Malformed(f"{nbytes} bytes wanted at {self.at} of {len(self.meta)}")
        self.at += nbytes
        return part

    def count(self) -> int:
        return _count(self.take(4))

    def keys(self, n: int) -> list[Key]:
        return _keys(self.take(n * KEY_BYTES), 0, n)

    def u64s(self, n: int) -> list[int]:
        return [*struct.unpack(f"<{n}Q", self.take(8 * n))]

    def f64s(self, n: int) -> list[float]:
        return [*struct.unpack(f"<{n}d", self.take(8 * n))]

    def end(self) -> None:
        if self.at != len(self.meta):
            raise Malformed(f"{len(self.meta) - self.at} bytes too many")


def _packed(form: str, *values: Any) -> bytes:
    """Raises `ValueError` for a number that does not fit."""
    try:
        return struct.pack(form, *values)
    except struct.error as error:
        raise ValueError(f"a number that cannot be sent: {error}") from None


def _u64s(values: Sequence[int]) -> bytes:
    return _packed(f"<{len(values)}Q", *values)


def pack_keys(keys: Sequence[Key]) -> bytes:
    return b"".join((_U32.pack(len(keys)), *keys))


def unpack_keys(meta: bytes) -> list[Key]:
    """Raises `Malformed`, as all `unpack_…` do."""
    reader = _Reader(meta)
    keys = reader.keys(reader.count())
    reader.end()
    return keys


def pack_get(keys: Sequence[Key], offsets: Sequence[int], lengths: Sequence[int]) -> bytes:
    return b"".join((_U32.pack(len(keys)), *keys, _u64s([*offsets, *lengths])))


def unpack_get(meta: bytes) -> GetRequest:
    n = _count(meta)
    at = 4 + n * KEY_BYTES
    if len(meta) != at + 16 * n:
        raise Malformed(f"{len(meta)} bytes for {n} reads")
    numbers = [*struct.unpack_from(f"<{2 * n}Q", meta, at)]
    return GetRequest(_keys(meta, 4, n), numbers[:n], numbers[n:])


def pack_put(keys: Sequence[Key], sizes: Sequence[int], parents: Sequence[Key | None]) -> bytes:
    has = bytes([parent is not None for parent in parents])
    known = [parent for parent in parents if parent is not None]
    return b"".join((_U32.pack(len(keys)), *keys, _u64s(sizes), has, *known))


def unpack_put(meta: bytes) -> PutRequest:
    reader = _Reader(meta)
    n = reader.count()
    keys, sizes, has = reader.keys(n), reader.u64s(n), reader.take(n)
    if any(flag > 1 for flag in has):
        raise Malformed("a has-parent flag that is neither 0 nor 1")
    known = iter(reader.keys(sum(has)))
    reader.end()
    return PutRequest(keys, sizes, [next(known) if flag else None for flag in has])


def pack_data(ticket: int) -> bytes:
    return _U64.pack(ticket)


def unpack_data(meta: bytes) -> int:
    reader = _Reader(meta)
    (ticket,) = _U64.unpack(reader.take(8))
    reader.end()
    return int(ticket)


def pack_outcomes(codes: Sequence[int], sizes: Sequence[int], notes: Sequence[tuple[int, str]] = ()) -> bytes:
    """`notes`: (index, message) of items that failed."""
    tail: bytes = msgpack.packb([list(note) for note in notes]) if notes else b""
    return b"".join((_U32.pack(len(codes)), bytes(codes), _u64s(sizes), _U32.pack(len(tail)), tail))


def unpack_outcomes(meta: bytes) -> tuple[list[Code], list[int], dict[int, str]]:
    """(codes, sizes, messages by index)."""
    n = _count(meta)
    end = 4 + 9 * n
    if len(meta) < end + 4:
        raise Malformed(f"{len(meta)} bytes for {n} outcomes")
    raw = meta[4 : 4 + n]
    sizes = [*struct.unpack_from(f"<{n}Q", meta, 4 + n)]
    (tail_nbytes,) = _U32.unpack_from(meta, end)
    tail = meta[end + 4 :]
    if len(tail) != tail_nbytes:
        raise Malformed(f"{tail_nbytes} bytes of messages announced, {len(tail)} there")
    try:
        codes = [*map(_CODES.__getitem__, raw)]
    except IndexError:
        raise Malformed(f"an unknown code: {max(raw)}") from None
    notes: dict[int, str] = {}
    if tail:
        try:
            pairs = msgpack.unpackb(tail, raw=False, max_array_len=MAX_ITEMS, max_str_len=1 << 16)
            notes = {int(index): str(message) for index, message in pairs}
        except (ValueError, TypeError, msgpack.UnpackException) as error:
            raise Malformed(f"notes that are no msgpack list: {error}") from error
    return codes, sizes, notes


def pack_ticket(ticket: int, outcomes: bytes) -> bytes:
    return _U64.pack(ticket) + outcomes


def unpack_ticket(meta: bytes) -> tuple[int, bytes]:
    """(ticket, the outcomes behind it)."""
    reader = _Reader(meta)
    (ticket,) = _U64.unpack(reader.take(8))
    return int(ticket), meta[8:]


def pack_announce(waiting: Sequence[Sequence[Key]]) -> bytes:
    """`waiting`: keys of each job, first to run first."""
    keys = [key for job in waiting for key in job]
    lengths = _packed(f"<{len(waiting)}I", *map(len, waiting))
    return b"".join((_U32.pack(len(keys)), *keys, _U32.pack(len(waiting)), lengths))


def unpack_announce(meta: bytes) -> list[list[Key]]:
    reader = _Reader(meta)
    keys = reader.keys(reader.count())
    jobs = reader.count()
    lengths = struct.unpack(f"<{jobs}I", reader.take(4 * jobs))
    reader.end()
    if sum(lengths) != len(keys):
        raise Malformed(f"jobs of {sum(lengths)} records, and {len(keys)} keys")
    waiting: list[list[Key]] = []
    at = 0
    for length in lengths:
        waiting.append(keys[at : at + length])
        at += length
    return waiting


def pack_list(cursor: int, page: int) -> bytes:
    return _LIST.pack(cursor, page)


def unpack_list(meta: bytes) -> tuple[int, int]:
    """(cursor, page)."""
    reader = _Reader(meta)
    cursor, page = _LIST.unpack(reader.take(_LIST.size))
    reader.end()
    return int(cursor), int(page)


def pack_page(page: ListPage) -> bytes:
    stamps = _packed(f"<{len(page.last_used)}d", *page.last_used)
    return b"".join((_U64.pack(page.cursor), _U32.pack(len(page.keys)), *page.keys, _u64s(page.sizes), stamps))


def unpack_page(meta: bytes) -> ListPage:
    reader = _Reader(meta)
    (cursor,) = _U64.unpack(reader.take(8))
    n = reader.count()
    page = ListPage(int(cursor), reader.keys(n), reader.u64s(n), reader.f64s(n))
    reader.end()
    return page
