"""Reading from Mooncake Store: byte ranges into staging memory, and from there, by the caller, into `dst`.

An object begins with 32 bytes of ours, which every call fetches along with what it is after: they say how long the
record is, and which writing of it this is (16 random bytes). So parts that come in several calls are known to be of one
version, and a late report that a record is corrupt does not hit its successor.
"""

from __future__ import annotations

import os
import struct
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from kvstore.backend import MISS, Outcome, Read, Status
from kvstore.buffers import Buffer, BufferPool
from kvstore.errors import CorruptRecord, TransientError
from kvstore.keys import Key

from ._mooncake_calls import Call, seconds_left
from ._mooncake_client import MISSING, NOT_READY, OUT_OF_RANGE, Client, Region, address_of, error_of

__all__ = ["HEADER_BYTES", "Arrived", "Landed", "Reader", "Seen", "new_header"]

_HEADER = struct.Struct("<4sIQ16s")
_MAGIC, _VERSION = b"KVMC", 1
HEADER_BYTES = _HEADER.size
_SEEN = 1 << 16  # records whose last read is remembered


def new_header(nbytes: int) -> bytes:
    """The first 32 bytes of an object: magic, version, length of the record in bytes, 16 random bytes."""
    return _HEADER.pack(_MAGIC, _VERSION, nbytes, os.urandom(16))


def record_nbytes(header: bytes) -> int | None:
    """The record's length; None if these bytes are no header of ours."""
    magic, version, nbytes, _ = _HEADER.unpack(header)
    return int(nbytes) if (magic, version) == (_MAGIC, _VERSION) else None


class Seen:
    """The header that each record had when it was last read; the least recently read are forgotten."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._headers: OrderedDict[str, bytes] = OrderedDict()

    def note(self, found: Iterable[tuple[str, bytes]]) -> None:
        with self._lock:
            for name, header in found:
                self._headers[name] = header
                self._headers.move_to_end(name)
            while len(self._headers) > _SEEN:
                self._headers.popitem(last=False)

    def get(self, names: Sequence[str]) -> list[bytes | None]:
        with self._lock:
            return [*map(self._headers.get, names)]


class _Part(NamedTuple):
    """A run of bytes of one read.

    Attributes:
        item: the read's place in the batch.
        start: where it begins in `dst`.
        offset: where it begins in the record.
        at: where it goes: in the piece's staging memory, or from the beginning of `region`.
        region: registered memory that it goes to directly; None: staging.
    """

    item: int
    name: str
    start: int
    offset: int
    nbytes: int
    at: int
    region: Region | None


class _Piece(NamedTuple):
    """What one call of Mooncake's client fetches.

    Attributes:
        headers: for each object, where its header goes in staging.
        staged: bytes of staging memory.
    """

    headers: dict[str, int]
    parts: list[_Part]
    staged: int


class Arrived(NamedTuple):
    """How a part ended: `outcome.nbytes` bytes for `dst[start:]`; `at`: where they are in staging, -1: in `dst`."""

    item: int
    start: int
    at: int
    outcome: Outcome


class Landed(NamedTuple):
    """Parts that have ended, and the staging memory they lie in."""

    buffer: Buffer
    parts: list[Arrived]

    def release(self) -> None:
        self.buffer.release()


class Reader:
    """Plans reads and does them, in a worker's thread."""

    def __init__(self, client: Client, pool: BufferPool, seen: Seen, piece_bytes: int) -> None:
        self._client, self._pool, self._seen, self._piece_bytes = client, pool, seen, piece_bytes
        self._name = client.settings.name

    def plan(self, reads: Sequence[Read], names: Sequence[str]) -> list[_Piece]:
        """Cut the reads into pieces of at most `piece_bytes` bytes of staging memory each. Reads with a negative offset
        are left out."""
        pieces: list[_Piece] = []
        headers: dict[str, int] = {}
        parts: list[_Part] = []
        staged = total = 0
        most = self._piece_bytes - 2 * HEADER_BYTES
        for item, (read, name) in enumerate(zip(reads, names, strict=True)):
            if read.offset < 0:
                continue
            region, address = self._direct(read.dst)
            nbytes, start = len(read.dst), 0
            while True:
                size = min(nbytes - start, most)
                need = (0 if region else size) + (0 if name in headers else HEADER_BYTES)
                if parts and (staged + need > self._piece_bytes or total + size > 4 * self._piece_bytes):
                    pieces.append(_Piece(headers, parts, staged))
                    headers, parts, staged, total = {}, [], 0, 0
                if name not in headers:
                    headers[name] = staged
                    staged += HEADER_BYTES
                at = staged if region is None else address + start - region.start
                parts.append(_Part(item, name, start, read.offset + start, size, at, region))
                staged += 0 if region else size
                total += size
                start += size
                if start >= nbytes:
                    break
        if parts:
            pieces.append(_Piece(headers, parts, staged))
        return pieces

    def _direct(self, dst: memoryview) -> tuple[Region | None, int]:
        if not self._client.settings.direct_reads or not self._client.regions:
            return None, 0
        try:
            address = address_of(dst)
        except (TypeError, ValueError, BufferError):
            return None, 0  # the copy will say what is wrong with it
        return self._client.find(address, len(dst)), address

    def read(self, call: Call, pieces: Sequence[_Piece]) -> None:
        """Fetch the pieces in turn and post them."""
        store = self._client.joined(call.operation)
        first: dict[str, bytes] = {}
        for piece in pieces:
            if not call.room():
                return
            buffer = self._pool.acquire(piece.staged, seconds_left(call.deadline))
            posted = False
            try:
                parts = self._fetch(store, call, piece, buffer, first)
                if parts is not None:
                    call.post(Landed(buffer, parts))
                    posted = True
            finally:
                if not posted:
                    buffer.release()

    def _fetch(
        self, store: Any, call: Call, piece: _Piece, buffer: Buffer, first: dict[str, bytes]
    ) -> list[Arrived] | None:
        """One piece, and once more what did not lie in its record, cut to what does. None: the caller has left."""
        arrived: list[Arrived] = []
        todo: list[_Part] = piece.parts
        seen: list[tuple[str, bytes]] = []
        for again in (False, True):
            direct = any(part.region is not None for part in todo)
            if direct and not call.touch():
                return None
            try:
                codes = _ranges(store, buffer, piece.headers, todo)
            finally:
                if direct:
                    call.untouched()
            headers = self._headers(codes, todo, piece.headers, buffer, first, seen)
            rest: list[_Part] = []
            for part in todo:
                found = headers[part.name]
                if isinstance(found, Outcome):
                    arrived.append(Arrived(part.item, part.start, -1, found))
                    continue
                code, there = codes.get(part, 0), max(0, min(part.nbytes, found - part.offset))
                if there == part.nbytes and code == there:
                    at = part.at if part.region is None else -1
                    arrived.append(Arrived(part.item, part.start, at, Outcome(Status.OK, there)))
                elif there == 0:
                    arrived.append(Arrived(part.item, part.start, -1, Outcome(Status.OK)))
                elif code == OUT_OF_RANGE and there < part.nbytes and not again:
                    rest.append(part._replace(nbytes=there))
                else:
                    arrived.append(Arrived(part.item, part.start, -1, self._failed(code, call.operation)))
            if not rest:
                break
            todo = rest
        self._seen.note(seen)
        return arrived

    def _headers(
        self, codes: _Codes, parts: Sequence[_Part], places: dict[str, int], buffer: Buffer,
        first: dict[str, bytes], seen: list[tuple[str, bytes]],
    ) -> dict[str, int | Outcome]:  # fmt: skip
        """For each object the length of its record, or why it cannot be read."""
        found: dict[str, int | Outcome] = {}
        for name in dict.fromkeys(part.name for part in parts):
            code = codes.headers[name]
            header = bytes(buffer.view[places[name] : places[name] + HEADER_BYTES]) if code == HEADER_BYTES else b""
            if code in (HEADER_BYTES, OUT_OF_RANGE):  # an object shorter than a header is none of ours
                seen.append((name, header))
                nbytes = record_nbytes(header) if header else None
                if nbytes is None:
                    text = "a Mooncake object under a name of ours that does not begin as ours do"
                    found[name] = Outcome.failed(CorruptRecord(text, backend=self._name, operation="get"))
                elif first.setdefault(name, header) != header:
                    text = "the record was replaced while it was read"
                    found[name] = Outcome.failed(TransientError(text, backend=self._name, operation="get"))
                else:
                    found[name] = nbytes
            else:
                found[name] = self._failed(code, "get")
        return found

    def _failed(self, code: int, operation: str) -> Outcome:
        if code in (MISSING, NOT_READY):
            return MISS
        if code >= 0 or code == OUT_OF_RANGE:
            text = f"Mooncake moved other bytes than it was asked for ({code}): the record was replaced meanwhile"
            return Outcome.failed(TransientError(text, backend=self._name, operation=operation))
        return Outcome.failed(error_of(code, backend=self._name, operation=operation))

    def headers(self, call: Call, names: Sequence[str]) -> list[bytes | Outcome]:
        """The header that each object has now; b"" for an object too short to have one; or why there is none."""
        store = self._client.joined(call.operation)
        found: list[bytes | Outcome] = []
        at_once = self._piece_bytes // HEADER_BYTES
        for begin in range(0, len(names), at_once):
            some = names[begin : begin + at_once]
            with self._pool.acquire(len(some) * HEADER_BYTES, seconds_left(call.deadline)) as buffer:
                places = {name: index * HEADER_BYTES for index, name in enumerate(dict.fromkeys(some))}
                codes = _ranges(store, buffer, places, ()).headers
                for name in some:
                    code, at = codes[name], places[name]
                    if code == HEADER_BYTES:
                        found.append(bytes(buffer.view[at : at + HEADER_BYTES]))
                    else:
                        found.append(b"" if code == OUT_OF_RANGE else self._failed(code, call.operation))
        return found


class _Codes(dict[_Part, int]):
    """Mooncake's codes: by part, and of the headers by name."""

    def __init__(self) -> None:
        self.headers: dict[str, int] = {}


def _ranges(store: Any, buffer: Buffer, headers: dict[str, int], parts: Sequence[_Part]) -> _Codes:
    """One `get_into_ranges`: the headers of all objects of `parts` (of all of `headers` if there are no parts), and the
    parts that are not empty."""
    wanted = dict.fromkeys(part.name for part in parts) if parts else headers
    staging: dict[str, list[_Part | None]] = {name: [None] for name in wanted}
    groups: list[tuple[int, dict[str, list[_Part | None]]]] = [(address_of(buffer.view), staging)]
    regions: dict[Region, dict[str, list[_Part | None]]] = {}
    for part in parts:
        if part.region is None:
            if part.nbytes:
                staging[part.name].append(part)
        elif part.nbytes:
            regions.setdefault(part.region, {}).setdefault(part.name, []).append(part)
    groups += [(region.start, by_name) for region, by_name in regions.items()]
    answers = store.get_into_ranges(
        [base for base, _ in groups],
        [list(by_name) for _, by_name in groups],
        [
            [[headers[name] if part is None else part.at for part in some] for name, some in by_name.items()]
            for _, by_name in groups
        ],
        [
            [[0 if part is None else HEADER_BYTES + part.offset for part in some] for some in by_name.values()]
            for _, by_name in groups
        ],
        [
            [[HEADER_BYTES if part is None else part.nbytes for part in some] for some in by_name.values()]
            for _, by_name in groups
        ],
    )
    codes = _Codes()
    for asked, name, code in _flat(groups, answers):
        if asked is None:
            codes.headers[name] = code
        else:
            codes[asked] = code
    return codes


def _flat(
    groups: Sequence[tuple[int, dict[str, list[_Part | None]]]], answers: Sequence[Sequence[Sequence[int]]]
) -> Iterator[tuple[_Part | None, str, int]]:
    for (_, by_name), per_group in zip(groups, answers, strict=True):
        for (name, parts), codes in zip(by_name.items(), per_group, strict=True):
            for part, code in zip(parts, codes, strict=True):
                yield part, name, int(code)


def names_of(prefix: str, keys: Iterable[Key]) -> list[str]:
    """The names of the objects that hold these records."""
    return [prefix + key.hex() for key in keys]
