"""`Service`: what a node does with requests. The wire protocol is `kvstore_backends.node.protocol`.

It is the handler of a `kvstore_transport` server: called in the thread of a connection, for one request at a time. A
record that is put is received straight into the memory it stays in; one that is got is sent from there. Records are
pinned until the transport is done with them, and what may be pinned is bounded (`Gate`).

Nothing a client says is believed: each length is bounded before anything is taken for it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgpack

from kvstore._version import __version__
from kvstore.backend import Outcome
from kvstore.backend import Status as Ended
from kvstore.errors import ClosedError, KVStoreError
from kvstore.keys import Key
from kvstore_transport.errors import TransportError
from kvstore_transport.seam import Answer, Incoming

from ._memory_reservation import Record, Reservation, span, spans
from ._node_below import GLANCE_S, before
from ._node_pins import LEAVE_S, Refused, code_of, pin
from ._node_session import Cursor, Cursors, Session, Sessions, Ticket
from ._node_space import Space
from .node.protocol import (
    MAX_ITEMS,
    Code,
    ListPage,
    Malformed,
    Op,
    Status,
    pack_outcomes,
    pack_page,
    pack_ticket,
    unpack_announce,
    unpack_data,
    unpack_get,
    unpack_keys,
    unpack_list,
    unpack_put,
)

__all__ = ["Service"]

logger = logging.getLogger("kvstore.node")

_ROOM_S = 5.0  # longest wait for memory, even if the deadline is later
_PATIENCE_S = 0.5  # for somebody else who is storing the same key; then both do, and the first one wins
_TICKET_S = 60.0  # longest time from the answer to a PUT until its DATA
_MOST_SPARE = 1 << 20  # bytes of a PUT with a body that are taken and thrown away; who has more asks first
_MOST_TEXT = 2000  # characters of a message
_MOST_NOTES = 32 << 10  # bytes of all messages of a reply
_PAGE_RECORDS = 4096
_PAGE_HEAD, _PAGE_RECORD = 64, 48  # bytes that a page of a listing takes, and each of its records
_LIST_S = 600.0  # for a whole listing, however slowly it is asked for


class Service:
    """The handler of a node.

    Args:
        spaces: by the name of their namespace.
        max_body: longest body that the transport takes, in bytes.
        stall_s: longest time without any progress of a client, in seconds: so long, the memory promised to a writer
            waits for the first of his bytes.
    """

    def __init__(self, spaces: Mapping[str, Space], *, max_body: int, stall_s: float = _TICKET_S) -> None:
        self._spaces = spaces
        self._max_body = max_body
        self._ticket_s = min(stall_s, _TICKET_S)
        self._cursors = Cursors()
        self._sessions = Sessions(self._cursors.drop)
        self._closing = False
        self._handlers: dict[int, Callable[[Incoming, Space, Session], Answer]] = {
            Op.STAT: self._stat, Op.GET: self._get, Op.PUT: self._put, Op.DATA: self._data,
            Op.DELETE: self._delete, Op.QUARANTINE: self._quarantine, Op.LIST: self._list, Op.INFO: self._info,
            Op.ANNOUNCE: self._announce,
        }  # fmt: skip

    def __call__(self, incoming: Incoming) -> Answer:
        """Answer a request. Raises what `Incoming.receive` raises."""
        space = self._spaces.get(incoming.peer.namespace)
        handler = self._handlers.get(incoming.op)
        if self._closing:
            return _message(Status.CLOSED, "the node is shutting down")
        if space is None or handler is None:
            return _message(Status.BAD, f"unknown operation {incoming.op}" if space else "unknown namespace")
        if time.monotonic() >= incoming.deadline:
            space.count(late=1)
            return _message(Status.LATE, "the deadline passed on the way")
        session = self._sessions.of(incoming.session, space)
        try:
            return handler(incoming, space, session)
        except Malformed as error:
            return _message(Status.BAD, str(error))
        except Refused as refused:
            if refused.status == Status.BUSY:
                space.count(busy=1)
            return _message(refused.status, str(refused))
        except ClosedError:
            return _message(Status.CLOSED, "the node is shutting down")
        except KVStoreError as error:
            return _message(Status.BUSY if error.retryable else Status.BAD, error.message)

    # Questions about keys.

    def _stat(self, incoming: Incoming, space: Space, session: Session) -> Answer:
        keys = unpack_keys(incoming.meta)
        outcomes = space.backend.stat(keys, deadline=incoming.deadline)
        if space.below is not None:
            missing = [index for index, outcome in enumerate(outcomes) if outcome.status is Ended.MISS]
            if missing:
                below = space.below.sizes([keys[index] for index in missing], before(incoming.deadline))
                for index, outcome in zip(missing, below, strict=True):
                    outcomes[index] = outcome
        space.count(absent=sum([outcome.status is Ended.MISS for outcome in outcomes]))
        return _reply(outcomes, incoming)

    def _delete(self, incoming: Incoming, space: Space, session: Session) -> Answer:
        outcomes = space.delete(unpack_keys(incoming.meta), _told_by(space, incoming))
        space.count(deleted=sum(outcome.ok for outcome in outcomes))
        return _reply(outcomes, incoming)

    def _quarantine(self, incoming: Incoming, space: Space, session: Session) -> Answer:
        outcomes = space.quarantine(unpack_keys(incoming.meta), _told_by(space, incoming))
        space.count(quarantined=sum(outcome.ok for outcome in outcomes))
        return _reply(outcomes, incoming)

    # Reading.

    def _get(self, incoming: Incoming, space: Space, session: Session) -> Answer:
        keys, offsets, lengths = unpack_get(incoming.meta)
        pinned = pin(incoming, space, keys)
        notes = pinned.notes
        codes: list[int] = []
        sizes: list[int] = []
        body: list[memoryview] = []
        total = reads = hits = 0
        last: Record | None = None
        start = end = 0  # of what was taken last, within `last`
        fine = Code.OK
        try:
            for index, record in enumerate(pinned.records):
                if record is None:
                    codes.append(notes[index][0] if index in notes else Code.MISS)
                    sizes.append(0)
                    continue
                offset = offsets[index]
                size = min(lengths[index], max(0, record.found[1] - offset))
                reads += 1
                hits += not offset  # a record that is read in parts is one hit
                codes.append(fine)
                sizes.append(size)
                if not size:
                    continue
                total += size
                if record is last and offset == end:  # neighbours travel as one
                    end += size
                    body[-1] = record.view[start:end].toreadonly()
                    continue
                last, start, end = record, offset, offset + size
                view = record.view
                body.append((view if size == len(view) else view[start:end]).toreadonly())
            if total > incoming.peer.max_body:
                raise Refused(Status.BAD, f"{total} bytes asked for; this client takes {incoming.peer.max_body}")
            missed = [index for index, code in enumerate(codes) if code == Code.MISS] if reads < len(codes) else ()
            brought = pinned.brought
            space.count(
                hits=hits, misses=sum([not offsets[index] for index in missed]), bytes_out=total,
                from_below=sum([not offsets[at] for at, key in enumerate(keys) if key in brought]) if brought else 0,
                failed=len(codes) - reads - len(missed) - pinned.postponed, postponed=pinned.postponed,
            )  # fmt: skip
            meta = _pack(incoming, codes, sizes, {index: note for index, (_, note) in notes.items()})
        except BaseException:
            pinned.drop()
            raise
        if not body:
            pinned.drop()
            return Answer(Status.OK, meta)
        return Answer(Status.OK, meta, body, pinned.drop)

    # Writing.

    def _put(self, incoming: Incoming, space: Space, session: Session) -> Answer:
        keys, sizes, parents = unpack_put(incoming.meta)
        session.drop()
        total = sum(sizes)
        final = incoming.body_nbytes > 0 or total == 0
        if final and total != incoming.body_nbytes:
            raise Malformed(f"records of {total} bytes, but a body of {incoming.body_nbytes}")
        codes: list[int] = [Code.EXISTS] * len(keys)
        notes: dict[int, str] = {}
        reservation = self._claim(incoming, space, keys, sizes, parents, codes, notes)
        spare = total - sum(reservation.sizes) if final else 0
        if spare > _MOST_SPARE:
            for place in reservation.places:
                codes[place], notes[place] = Code.FAILED, "sent along with much that is not wanted: ask first"
            reservation.close()
            _count_codes(space, codes)
            return Answer(Status.OK, _pack(incoming, codes, [0] * len(codes), notes))
        charge = spans(reservation.sizes) + spare
        held = space.gate.enter(incoming.peer.client, charge, min(incoming.deadline, time.monotonic() + LEAVE_S))
        if held is None:
            reservation.close()
            raise Refused(Status.BUSY, f"no leave to hold {charge} bytes of memory came in time")
        ticket = Ticket(reservation, held)
        kept = False
        try:
            with_room: list[int] = []
            if reservation.places:
                until = min(incoming.deadline, time.monotonic() + _ROOM_S)
                with_room = [index for wave in reservation.rooms(until) for index in wave]
            if len(with_room) == len(keys):
                codes = [Code.WANTED] * len(keys)
            else:
                for place in reservation.places:
                    codes[place] = Code.FULL
                for index in with_room:
                    codes[reservation.places[index]] = Code.WANTED
            if final:
                return self._receive_all(incoming, space, reservation, with_room, sizes, codes, notes)
            _count_codes(space, codes, postponed=len(notes))
            number = 0
            if with_room:
                ticket.indices = with_room
                ticket.until = min(incoming.deadline, time.monotonic() + self._ticket_s)
                number = session.keep(ticket)
                kept = True
            return Answer(Status.OK, pack_ticket(number, _pack(incoming, codes, [0] * len(codes), notes)))
        except TransportError:
            space.count(abandoned=len(reservation.places))
            raise
        finally:
            if not kept:
                ticket.drop()

    def _claim(
        self, incoming: Incoming, space: Space, keys: Sequence[Key], sizes: Sequence[int],
        parents: Sequence[Key | None], codes: list[int], notes: dict[int, str],
    ) -> Reservation:  # fmt: skip
        """Announce what is not there yet, in memory or below, and fits into one body and into what one client may hold.
        The others get their code."""
        store = space.store
        places: list[int] = []
        largest = min(store.pool.largest, self._max_body)
        most, total = min(space.gate.room(incoming.peer.client), self._max_body), 0
        with store.lock:
            store.check("put")
            there = store.look_locked(keys, use=True)
        absent = [place for place, record in enumerate(there) if record is None]
        if space.below is not None and absent:
            until = min(before(incoming.deadline), time.monotonic() + GLANCE_S)
            below = space.below.sizes([keys[place] for place in absent], until)
            space.below.touch([keys[place] for place, found in zip(absent, below, strict=True) if found.ok])
            absent = [place for place, found in zip(absent, below, strict=True) if not found.ok]
        wanted = [sizes[place] for place in absent]
        if wanted and max(wanted) <= largest and spans(wanted) <= most:  # all, as nearly always
            places, absent = absent, []
        for place in absent:
            if sizes[place] > largest:
                codes[place] = Code.TOO_LARGE
            elif places and total + span(sizes[place]) > most:
                codes[place] = Code.FULL
                notes[place] = f"more than {most} bytes of the node's memory at a time: send fewer records"
            else:
                total += span(sizes[place])
                places.append(place)
        until = min(incoming.deadline, time.monotonic() + _PATIENCE_S)
        while time.monotonic() < until:
            with store.lock:
                being_stored = [keys[place] for place in places if keys[place] in store.pending]
            if not being_stored:
                break
            store.wait_for_others(being_stored, until)
        return store.claim(keys, sizes, parents, places, rival=True).reservation

    def _receive_all(
        self, incoming: Incoming, space: Space, reservation: Reservation, with_room: Sequence[int],
        sizes: Sequence[int], codes: list[int], notes: Mapping[int, str],
    ) -> Answer:  # fmt: skip
        """The bytes came with the question: what is wanted goes into its memory, the rest nowhere."""
        if with_room or not incoming.body_nbytes:
            if incoming.body_nbytes:
                taken = {reservation.places[index]: index for index in with_room}
                scratch = memoryview(bytearray(sum(n for place, n in enumerate(sizes) if place not in taken)))
                views: list[memoryview] = []
                at = 0
                for place, nbytes in enumerate(sizes):
                    if place in taken:
                        views.append(reservation.views[taken[place]])
                    else:
                        views.append(scratch[at : at + nbytes])
                        at += nbytes
                incoming.receive([view for view in views if len(view)])
            done = self._commit(incoming, space, reservation, with_room)
            for index, code in zip(with_room, done, strict=True):
                codes[reservation.places[index]] = code
        else:
            incoming.discard()
        _count_codes(space, codes, sizes, postponed=len(notes))
        return Answer(Status.OK, _pack(incoming, codes, sizes, notes))

    def _commit(
        self, incoming: Incoming, space: Space, reservation: Reservation, indices: Sequence[int]
    ) -> list[int]:  # fmt: skip
        """Make records visible and have them written below; their codes."""
        lost: set[int] = set()
        if space.below is not None and reservation.contested:  # a rival's may have gone below in the meantime
            until = min(before(incoming.deadline), time.monotonic() + GLANCE_S)
            below = space.below.sizes([reservation.keys[index] for index in indices], until)
            lost = {index for index, found in zip(indices, below, strict=True) if found.ok}
        lost.update(reservation.commit([index for index in indices if index not in lost]))
        if space.below is not None:
            stored = [index for index in indices if index not in lost]
            space.below.backlog.offer([reservation.keys[i] for i in stored], [reservation.parents[i] for i in stored])
        return [Code.EXISTS if index in lost else Code.OK for index in indices] if lost else [Code.OK] * len(indices)

    def _data(self, incoming: Incoming, space: Space, session: Session) -> Answer:
        ticket = session.give(unpack_data(incoming.meta))
        if ticket is None:
            raise Refused(Status.LATE, "this ticket is not, or no longer, one of this connection")
        reservation, indices = ticket.reservation, ticket.indices
        sizes = [reservation.sizes[index] for index in indices]
        try:
            if sum(sizes) != incoming.body_nbytes:
                raise Malformed(f"records of {sum(sizes)} bytes were wanted; the body has {incoming.body_nbytes}")
            incoming.receive([reservation.views[index] for index in indices if reservation.sizes[index]])
            codes = self._commit(incoming, space, reservation, indices)
        except TransportError:
            space.count(abandoned=len(indices))
            raise
        finally:
            ticket.drop()
        _count_codes(space, codes, sizes)
        return Answer(Status.OK, _pack(incoming, codes, sizes))

    # The rest.

    def _list(self, incoming: Incoming, space: Space, session: Session) -> Answer:
        number, page = unpack_list(incoming.meta)
        cursor = self._cursors.give(session, number) if number else Cursor(space, time.monotonic() + _LIST_S)
        if cursor is None:
            raise Refused(Status.BAD, f"this connection has no listing {number}, or none any more")
        more = False
        most = min(_PAGE_RECORDS, (incoming.peer.max_meta - _PAGE_HEAD) // _PAGE_RECORD)
        try:
            infos = cursor.next(max(1, min(page, most)))
            more = not cursor.ended
        finally:
            if not more:
                cursor.close()
        number = self._cursors.keep(session, cursor) if more else 0
        if more and not number:
            raise Refused(Status.BUSY, "too many listings are under way")
        page_of = ListPage(
            number, [info.key for info in infos], [info.nbytes for info in infos], [info.last_used for info in infos]
        )
        return Answer(Status.OK, pack_page(page_of))

    def _announce(self, incoming: Incoming, space: Space, session: Session) -> Answer:
        session.announce(incoming.peer.client, unpack_announce(incoming.meta))
        return Answer(Status.OK, b"")

    def _info(self, incoming: Incoming, space: Space, session: Session) -> Answer:
        return Answer(Status.OK, msgpack.packb(self.facts(space)))

    def facts(self, space: Space) -> dict[str, Any]:
        """What a node says about a namespace: plain facts."""
        return {
            "version": __version__,
            "max_value_bytes": min(space.store.pool.largest, self._max_body),
            "max_items": MAX_ITEMS,
            "credits": space.gate.per_client,
            "durable": space.below is not None,
            "ttl": space.store.expiry.ttl != float("inf"),
            "capacity": space.namespace.policy != "none",
            "stats": space.stats(),
        }

    # Life.

    def sweep(self) -> None:
        """Give back what was promised and never came; remove what has become too old."""
        self._sessions.sweep()
        self._cursors.sweep()
        for space in self._spaces.values():
            space.sweep()

    def stop(self) -> None:
        """Do no more work: from now on the answer is CLOSED."""
        self._closing = True

    def close(self) -> None:
        """When no request is under way any more."""
        self._cursors.close()

    def stats(self) -> dict[str, int]:
        """Connections that asked for something, and listings half read."""
        return {"sessions": len(self._sessions), "listings": len(self._cursors)}


def _message(status: Status, text: str) -> Answer:
    return Answer(status, text[:_MOST_TEXT].encode(errors="replace"))


_CODES = {Ended.OK: Code.OK, Ended.MISS: Code.MISS, Ended.EXISTS: Code.EXISTS}


def _reply(outcomes: Sequence[Outcome], incoming: Incoming) -> Answer:
    codes: list[int] = []
    notes: dict[int, str] = {}
    for index, (status, _, error) in enumerate(outcomes):
        if error is None:
            codes.append(_CODES[status])
        else:
            codes.append(code_of(error))
            notes[index] = error.message
    return Answer(Status.OK, _pack(incoming, codes, [outcome[1] for outcome in outcomes], notes))


def _pack(incoming: Incoming, codes: Sequence[int], sizes: Sequence[int], notes: Mapping[int, str] = {}) -> bytes:
    """Outcomes, with the size of those that are OK, and as many of the notes as the client takes: the first ones."""
    fine = Code.OK
    sizes = [n if code == fine else 0 for code, n in zip(codes, sizes, strict=True)]
    if not notes:
        return pack_outcomes(codes, sizes)
    left = min(_MOST_NOTES, incoming.peer.max_meta - 32 - 9 * len(codes))
    fitting: list[tuple[int, str]] = []
    for index, note in notes.items():
        said = note[:_MOST_TEXT].encode(errors="replace")
        left -= 16 + len(said)
        if left < 0:
            break
        fitting.append((index, said.decode()))
    return pack_outcomes(codes, sizes, fitting)


def _told_by(space: Space, incoming: Incoming) -> float:
    """When a removal must have ended: what lies below may hang, and the answer must be in time all the same."""
    return incoming.deadline if space.below is None else before(incoming.deadline)


def _count_codes(space: Space, codes: Sequence[int], sizes: Sequence[int] = (), *, postponed: int = 0) -> None:
    """`postponed`: items that are FULL only because the batch is too large: the client offers them again."""
    fine = Code.OK
    stored = [n for code, n in zip(codes, sizes, strict=False) if code == fine]
    space.count(
        puts=len(stored), bytes_in=sum(stored), exists=codes.count(Code.EXISTS),
        refused=codes.count(Code.FULL) + codes.count(Code.TOO_LARGE) - postponed, postponed=postponed,
    )  # fmt: skip
