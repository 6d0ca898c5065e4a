"""`NodeClient`: one node, over any transport.

One copy at most between the wire and its destination, which the transport makes (`Bodies.copies`): a GET lands straight
where the reads want it, a PUT sends the writer's views, gathered. Requests are at most about 64 MiB; all reads of one
key travel in one, so they come from one version of the record. A call takes one connection for as long as it runs:
several lanes gain by several calling threads, not by threads of this client.

A PUT of more than 256 KiB asks first, and sends only what the node wants. A smaller one sends at once.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from kvstore.backend import EXISTS, MISS, KeyInfo, Outcome, Read, Write
from kvstore.buffers import Buffer
from kvstore.errors import KVStoreError, PermanentError, TransientError
from kvstore.keys import Key
from kvstore_transport import Plan, ProtocolError, Reply

from .calls import TROUBLE, NodeCalls
from .channels import Line
from .leases import NodeLease
from .protocol import (
    Code,
    Malformed,
    Op,
    Status,
    pack_announce,
    pack_data,
    pack_get,
    pack_keys,
    pack_list,
    pack_put,
    unpack_page,
    unpack_ticket,
)
from .requests import Landing, outcomes_of, split, split_by_key

__all__ = ["NodeClient"]

_AT_ONCE_BYTES = 256 << 10  # a PUT of so many bytes is sent without a question: that costs a round trip of ~0.1 ms
_PAGE_RECORDS = 4096


class NodeClient(NodeCalls):
    """The records of one node. See the module's docstring, and `NodeCalls` for the arguments."""

    # Questions about keys.

    def stat(self, keys: Sequence[Key], *, deadline: float) -> list[Outcome]:
        return self._about(Op.STAT, "stat", keys, deadline)

    def delete(self, keys: Sequence[Key], *, deadline: float) -> list[Outcome]:
        return self._about(Op.DELETE, "delete", keys, deadline)

    def quarantine(self, keys: Sequence[Key], *, deadline: float) -> list[Outcome]:
        return self._about(Op.QUARANTINE, "quarantine", keys, deadline)

    def _about(self, op: Op, operation: str, keys: Sequence[Key], deadline: float) -> list[Outcome]:
        self.check(operation)
        outcomes: list[Outcome] = []
        most = self.most_items
        for at in range(0, len(keys), most):
            outcomes += self._about_some(op, operation, keys[at : at + most], deadline)
        return outcomes

    def _about_some(self, op: Op, operation: str, keys: Sequence[Key], deadline: float) -> list[Outcome]:
        if time.monotonic() >= deadline:
            return self.late(operation, len(keys))
        meta = pack_keys(keys)
        try:
            reply = self.call(operation, deadline, lambda line: line.channel.call(op, meta, deadline=deadline))
            error = self.refusal(reply, operation)
            if error is not None:
                return [Outcome.failed(error)] * len(keys)
            codes, sizes, notes = outcomes_of(reply.meta, len(keys))
        except (*TROUBLE, KVStoreError) as error:
            return self.failed(error, operation, len(keys))
        if op != Op.STAT:
            sizes = [0] * len(keys)
        return self.outcomes(codes, sizes, notes, keys, operation)

    # Reading.

    def get_into(self, reads: Sequence[Read], *, deadline: float) -> list[Outcome]:
        self.check("get")
        lengths = [len(read[1]) for read in reads]
        if lengths and max(lengths) > self.max_body:
            return self._get_cut(reads, deadline)
        bad = [index for index, read in enumerate(reads) if not 0 <= read[2] < 1 << 63 or read[1].readonly]
        if bad:
            return self._without(reads, bad, deadline)
        keys = [read[0] for read in reads]
        parts = split_by_key(
            keys, lengths, most_bytes=self.most_bytes, largest=self.max_body, most_items=self.most_items
        )
        if len(parts) == 1 and len(parts[0]) == len(reads):
            return self._get(reads, keys, lengths, deadline)
        outcomes: list[Outcome] = [MISS] * len(reads)
        for part in parts:
            some = self._get(
                [reads[at] for at in part], [keys[at] for at in part], [lengths[at] for at in part], deadline
            )
            for at, outcome in zip(part, some, strict=True):
                outcomes[at] = outcome
        return outcomes

    def _get_cut(self, reads: Sequence[Read], deadline: float) -> list[Outcome]:
        """Some destinations are longer than any reply. What fills all that a reply can bring may go on behind it, if
        the node was started again with larger limits: it is not presented as the end of the record."""
        most = self.max_body
        cut = [read if len(read[1]) <= most else read._replace(dst=read[1][:most]) for read in reads]
        outcomes = self.get_into(cut, deadline=deadline)
        full = [at for at, read in enumerate(reads) if len(read[1]) > most and outcomes[at].nbytes == most]
        sizes = self.stat([reads[at][0] for at in full], deadline=deadline) if full else []
        for at, found in zip(full, sizes, strict=True):
            if not found.ok or found.nbytes - reads[at][2] > most:
                text = f"a reply of this node had at most {most} bytes, and the record has more, or is gone"
                kind = TransientError if self.max_body > most else PermanentError
                outcomes[at] = Outcome.failed(kind(text, backend=self.name, operation="get", key=reads[at][0]))
        return outcomes

    def _without(self, reads: Sequence[Read], bad: Sequence[int], deadline: float) -> list[Outcome]:
        """The outcomes of a batch in which some reads make no sense."""
        wrong = set(bad)
        rest = iter(self.get_into([read for at, read in enumerate(reads) if at not in wrong], deadline=deadline))
        text = "the destination is not writable, or the offset is out of range"
        return [
            Outcome.failed(PermanentError(text, backend=self.name, operation="get", key=read.key))
            if at in wrong
            else next(rest)
            for at, read in enumerate(reads)
        ]

    def _get(
        self, reads: Sequence[Read], keys: Sequence[Key], lengths: Sequence[int], deadline: float
    ) -> list[Outcome]:
        """One request; and further ones for what the node could not hold in its memory together with the rest (it
        counts whole records, of which we may want a part)."""
        outcomes = self._get_once(reads, keys, lengths, deadline)
        left = _again(outcomes)
        while 0 < len(left) < len(outcomes) and time.monotonic() < deadline:
            some = self._get_once(
                [reads[at] for at in left], [keys[at] for at in left], [lengths[at] for at in left], deadline
            )
            for at, outcome in zip(left, some, strict=True):
                outcomes[at] = outcome
            rest = [left[place] for place in _again(some)]
            if len(rest) == len(left):
                break
            left = rest
        return outcomes

    def _get_once(
        self, reads: Sequence[Read], keys: Sequence[Key], lengths: Sequence[int], deadline: float
    ) -> list[Outcome]:
        if time.monotonic() >= deadline:
            return self.late("get", len(reads))
        landing = Landing(reads, lengths)
        plan: Plan = landing.views
        try:
            meta = pack_get(keys, [read[2] for read in reads], lengths)
            reply = self.call(
                "get",
                deadline,
                lambda line: line.channel.call(Op.GET, meta, plan=plan, deadline=deadline),
                lambda: landing.begun,
            )
            error = self.refusal(reply, "get")
            if error is not None:
                return [Outcome.failed(error)] * len(reads)
            if not landing.begun:  # a transport need not ask where no bytes go
                landing.views(reply.status, reply.meta, 0)
        except (*TROUBLE, KVStoreError) as error:
            return self.failed(error, "get", len(reads))
        return self.outcomes(landing.codes, landing.sizes, landing.notes, keys, "get")

    def lease(self, keys: Sequence[Key], *, deadline: float) -> list[Buffer | None]:
        """One request per record that is there: a lease is of one record, wherever in the node's memory it lies. A node
        that has no room for another one is not asked for those behind it."""
        self.check("lease")
        leases: list[Buffer | None] = [None] * len(keys)
        if not keys or time.monotonic() >= deadline:
            return leases
        if not self.shared_memory and self.channels.open:
            return leases
        largest = self.max_body
        for at, found in enumerate(self.stat(keys, deadline=deadline)):
            if not self.shared_memory:
                break
            if found.ok and found.nbytes <= largest:
                leases[at], go_on = self._lease(keys[at], found.nbytes, deadline)
                if not go_on:
                    break
        return leases

    def _lease(self, key: Key, nbytes: int, deadline: float) -> tuple[Buffer | None, bool]:
        """(the lease, if any; whether to ask for others)."""
        try:
            line = self.channels.take(deadline, "lease")
        except (*TROUBLE, TransientError):
            return None, False
        fine = False
        try:
            meta = pack_get([key], [0], [nbytes])
            leased = line.channel.call_leased(Op.GET, meta, deadline=deadline)
            if leased is None:
                fine = True
                return None, True
            self.channels.hold(line, 1)
            lease = NodeLease(leased, lambda: self.channels.hold(line, -1))
            good = False
            try:
                if leased.status == Status.OK:
                    codes, sizes, _ = outcomes_of(leased.meta, 1)
                    good = codes[0] == Code.OK and sizes[0] == len(leased.body) == nbytes
                fine = True
            finally:
                if not good:
                    lease.release()
            return lease if good else None, leased.status == Status.OK
        except TROUBLE:
            return None, False
        finally:
            (self.channels.give if fine else self.channels.drop)(line)

    # Writing.

    def put(self, writes: Sequence[Write], *, deadline: float) -> list[Outcome]:
        self.check("put")
        if not writes:
            return []
        whole = [len(src[0]) if len(src) == 1 else sum(map(len, src)) for src in [write[1] for write in writes]]
        if max(whole) <= self.max_body and len({write[0] for write in writes}) == len(writes):
            return self._put_all(writes, whole, deadline)
        outcomes: list[Outcome] = [MISS] * len(writes)  # each is replaced
        first: dict[Key, int] = {}
        again: list[int] = []
        todo: list[int] = []
        sizes: list[int] = []
        largest = self.max_body  # what the node takes is asked of the node: it may have been started again with more
        for at, (key, size) in enumerate(zip([write[0] for write in writes], whole, strict=True)):
            if key in first:
                again.append(at)
                continue
            if size > largest:
                text = f"a record of {size} bytes; this node takes at most {largest} bytes"
                outcomes[at] = Outcome.failed(PermanentError(text, backend=self.name, operation="put", key=key))
                continue
            first[key] = at
            todo.append(at)
            sizes.append(size)
        for at, outcome in zip(todo, self._put_all([writes[at] for at in todo], sizes, deadline), strict=True):
            outcomes[at] = outcome
        for at in again:  # the first of equal keys wins; if it failed, so does this
            outcome = outcomes[first[writes[at].key]]
            outcomes[at] = EXISTS if outcome.stored else outcome
        return outcomes

    def _put_all(self, writes: Sequence[Write], sizes: Sequence[int], deadline: float) -> list[Outcome]:
        """Of different keys, and none too large: as many requests as it takes."""
        parts = split(sizes, most_bytes=self.most_bytes, most_items=self.most_items)
        if len(parts) == 1:
            return self._put(writes, sizes, deadline)
        outcomes: list[Outcome] = []
        for part in parts:
            some = slice(part.start, part.stop)
            outcomes += self._put(writes[some], sizes[some], deadline)
        return outcomes

    def _put(self, writes: Sequence[Write], sizes: Sequence[int], deadline: float) -> list[Outcome]:
        """One request; and further ones for what the node could not hold in its memory together with the rest, as one
        does that was started again with less memory than it last told us of."""
        outcomes = self._put_once(writes, sizes, deadline)
        left = _again(outcomes)
        while 0 < len(left) < len(outcomes) and time.monotonic() < deadline:
            some = self._put_once([writes[at] for at in left], [sizes[at] for at in left], deadline)
            for at, outcome in zip(left, some, strict=True):
                outcomes[at] = outcome
            rest = [left[place] for place in _again(some)]
            if len(rest) == len(left):
                break
            left = rest
        return outcomes

    def _put_once(self, writes: Sequence[Write], sizes: Sequence[int], deadline: float) -> list[Outcome]:
        """One request, or two: the question and the bytes."""
        if time.monotonic() >= deadline:
            return self.late("put", len(writes))
        keys = [write[0] for write in writes]
        at_once = sum(sizes) <= _AT_ONCE_BYTES
        wanted: list[int] = []
        outcomes: list[Outcome] = []

        def talk(line: Line) -> Reply:
            nonlocal outcomes
            outcomes = []
            wanted.clear()
            if at_once:
                body = [view for write in writes for view in write[1]]
                return line.channel.call(Op.PUT, meta, body, deadline=deadline)
            reply = line.channel.call(Op.PUT, meta, deadline=deadline)
            if reply.status != Status.OK:
                return reply
            ticket, codes, notes = _answer(reply.meta, len(writes))
            want = Code.WANTED
            wanted.extend([at for at, code in enumerate(codes) if code is want])
            outcomes = [MISS] * len(writes)  # of what is wanted it is not decided yet: each is replaced
            rest = [at for at, code in enumerate(codes) if code is not want]
            told = {place: notes[at] for place, at in enumerate(rest) if at in notes} if notes else {}
            plain, theirs = [codes[at] for at in rest], [keys[at] for at in rest]
            for at, outcome in zip(rest, self.outcomes(plain, [0] * len(rest), told, theirs, "put"), strict=True):
                outcomes[at] = outcome
            if not wanted:
                return reply
            body = [view for at in wanted for view in writes[at][1]]
            return line.channel.call(Op.DATA, pack_data(ticket), body, deadline=deadline)

        try:
            meta = pack_put(keys, sizes, [write[2] for write in writes])
            reply = self.call("put", deadline, talk)
            error = self.refusal(reply, "put")
            if error is not None:
                failed = Outcome.failed(error)
                if not outcomes:
                    return [failed] * len(writes)
                for at in wanted:
                    outcomes[at] = failed
                return outcomes
            if at_once:
                return self._stored(reply.meta, keys, sizes)
            if len(wanted) == len(writes):
                return self._stored(reply.meta, keys, sizes)
            if wanted:
                stored = self._stored(reply.meta, [keys[at] for at in wanted], [sizes[at] for at in wanted])
                for at, outcome in zip(wanted, stored, strict=True):
                    outcomes[at] = outcome
            return outcomes
        except (*TROUBLE, KVStoreError) as error:
            failed = self.failed(error, "put", 1)[0]
            if not outcomes:
                return [failed] * len(writes)
            for at in wanted:
                outcomes[at] = failed
            return outcomes

    def _stored(self, meta: bytes, keys: Sequence[Key], sizes: Sequence[int]) -> list[Outcome]:
        codes, _, notes = outcomes_of(meta, len(keys))
        if Code.WANTED in codes or Code.MISS in codes:
            raise ProtocolError("a put that ended with neither success nor failure")
        return self.outcomes(codes, sizes, notes, keys, "put")

    # The rest.

    def tell_waiting(self, waiting: Sequence[Sequence[Key]], *, deadline: float) -> None:
        """Tell the node which records the jobs that wait will need, first to run first, so that it brings them up from
        below its memory. Takes the place of what was announced before; an empty queue ends it. Of very many records
        the first ones are told.

        Raises:
            TransientError, PermanentError: no answer, or a node that knows no announcements.
        """
        self.check("announce")
        told: list[Sequence[Key]] = []
        left = self.most_items
        for job in waiting:
            if left <= 0 or len(told) >= self.most_items:
                break
            told.append(job[:left])
            left -= len(job)
        try:
            meta = pack_announce(told)
            reply = self.call(
                "announce", deadline, lambda line: line.channel.call(Op.ANNOUNCE, meta, deadline=deadline)
            )
            error = self.refusal(reply, "announce")
        except KVStoreError:
            raise
        except TROUBLE as trouble:
            raise self.error(trouble, "announce") from trouble
        if error is not None:
            raise error

    def list(self, *, deadline: float) -> Iterator[Sequence[KeyInfo]]:
        """Over a connection of its own, so that a caller who takes his time with a page keeps no lane from others."""
        self.check("list")
        return self._pages(deadline)

    def _pages(self, deadline: float) -> Iterator[Sequence[KeyInfo]]:
        line: Line | None = None
        try:
            cursor = 0
            while True:
                self.check("list")
                if time.monotonic() >= deadline:
                    raise TransientError("the deadline passed", backend=self.name, operation="list")
                try:
                    if line is None:
                        line = self.channels.extra(deadline, "list")
                    reply = line.channel.call(Op.LIST, pack_list(cursor, _PAGE_RECORDS), deadline=deadline)
                    error = self.refusal(reply, "list")
                    if error is not None:
                        raise error
                    page = unpack_page(reply.meta)
                except KVStoreError:
                    raise
                except TROUBLE as error:
                    raise self.error(error, "list") from error
                if page.keys:
                    yield [*map(KeyInfo, page.keys, page.sizes, page.last_used)]
                cursor = page.cursor
                if not cursor:
                    return
        finally:
            if line is not None:
                self.channels.drop(line)

    def __repr__(self) -> str:
        return f"<NodeClient {self.name!r}{', closed' * self.closed}>"


def _again(outcomes: Sequence[Outcome]) -> list[int]:
    """Those for which another try may help."""
    return [at for at, outcome in enumerate(outcomes) if outcome.error is not None and outcome.error.retryable]


def _answer(meta: bytes, count: int) -> tuple[int, list[Code], dict[int, str]]:
    """(ticket, codes, notes) of the reply to a PUT without a body. Raises `ProtocolError`."""
    try:
        ticket, rest = unpack_ticket(meta)
    except Malformed as error:
        raise ProtocolError(f"a ticket that does not parse: {error}") from error
    codes, _, notes = outcomes_of(rest, count)
    if Code.OK in codes or Code.MISS in codes:
        raise ProtocolError("a put that was OK before its bytes were sent")
    return ticket, codes, notes
