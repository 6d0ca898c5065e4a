"""What all requests to one node have in common: a connection for each, a second try, errors, and what the node said.

A call whose connection, used before, proves dead before anything came back is made once more, on a fresh one. All
operations bear that: a PUT whose first try landed says EXISTS, a DELETE says MISS.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import msgpack

from kvstore.backend import Backend, Capability, Limits, Outcome
from kvstore.buffers import Slab
from kvstore.errors import ClosedError, KVStoreError, TransientError
from kvstore.keys import Key
from kvstore_transport import Channel, ConnectionLost, Reply, TransportClosed, TransportError
from kvstore_transport.process import process_id

from .channels import Channels, Dial, Line
from .errors import Trouble, item_outcome, map_trouble, refused_reply
from .protocol import MAX_ITEMS, Code, Malformed, Op, Status

__all__ = ["TROUBLE", "NodeCalls"]

_REQUEST_BYTES = 64 << 20
_META_PER_ITEM = 80  # bytes of a request's meta that an item of a PUT takes, rounded up
_MAX_BODY = 256 << 20  # until the node has said
_MAX_META = 16 << 20

TROUBLE = (TransportError, OSError, Malformed, ValueError, TypeError, BufferError)
"""What a call may raise besides errors of ours; `NodeCalls.error` says what it is."""


class NodeCalls(Backend):
    """A backend whose operations are requests to one node; the operations themselves are `NodeClient`'s.

    Args:
        dial: opens a connection by a deadline.
        name: of the node, for errors and metrics.
        lanes: connections at most.
        connect_timeout: longest wait for one, seconds.

    Attributes:
        facts: what the node said about itself (INFO), or empty.
    """

    def __init__(self, dial: Dial, *, name: str, lanes: int = 4, connect_timeout: float = 1.0) -> None:
        self.name = name
        self._lanes = lanes
        self._dial = dial
        self._connect_timeout = connect_timeout
        self.channels = Channels(self._connect, lanes, name)
        self.pid = process_id()
        self.closed = False
        self.max_body, self.max_meta = _MAX_BODY, _MAX_META
        self.shared_memory = False
        self.transport = ""
        self.note = ""
        self.facts: dict[str, Any] = {}

    # What it is.

    @property
    def capabilities(self) -> Capability:  # type: ignore[override]
        """Those of every node, and what this one said of itself when it was last asked (`info`)."""
        found = (
            Capability.RANGED_READ
            | Capability.NATIVE_BATCH
            | Capability.LIST
            | Capability.SHARED
            | Capability.REGISTERED_MEMORY
        )
        if self.shared_memory:
            found |= Capability.LEASE | Capability.MAPPED_MEMORY
        for fact, flag in (("durable", Capability.DURABLE), ("ttl", Capability.TTL), ("capacity", Capability.CAPACITY)):
            if self.facts.get(fact):
                found |= flag
        return found

    @property
    def limits(self) -> Limits:  # type: ignore[override]
        return Limits(max_value_bytes=self.largest, lanes=self._lanes, preferred_io_bytes=8 << 20)

    @property
    def largest(self) -> int:
        """Bytes of the largest record that the node takes."""
        said = self.facts.get("max_value_bytes")
        return said if isinstance(said, int) and 0 < said < self.max_body else self.max_body

    def _connect(self, deadline: float) -> Channel:
        channel = self._dial(min(deadline, time.monotonic() + self._connect_timeout))
        peer = channel.peer
        self.max_body, self.max_meta = peer.max_body, peer.max_meta
        self.shared_memory = peer.transport == "shm"
        self.transport, self.note = peer.transport, peer.note
        return channel

    def check(self, operation: str) -> None:
        if self.pid != process_id():
            text = "this client was opened before fork(); open another one in the child"
            raise ClosedError(text, backend=self.name, operation=operation)
        if self.closed:
            raise ClosedError("the client is closed", backend=self.name, operation=operation)

    # Calls.

    def call(
        self,
        operation: str,
        deadline: float,
        talk: Callable[[Line], Reply],
        begun: Callable[[], bool] = lambda: False,
    ) -> Reply:
        """`talk` over a connection; once more over a fresh one if the first, used before, was dead.

        Raises: as `Channels.take` and `Channel.call`.
        """
        line = self.channels.take(deadline, operation)
        try:
            return self._talk(line, talk)
        except (ConnectionLost, TransportClosed, OSError):
            if line.fresh or begun() or self.closed or time.monotonic() >= deadline:
                raise
        line = self.channels.take(deadline, operation, fresh=True)
        return self._talk(line, talk)

    def _talk(self, line: Line, talk: Callable[[Line], Reply]) -> Reply:
        fine = False
        try:
            reply = talk(line)
            fine = reply.status != Status.CLOSED
            return reply
        except ValueError:
            fine = line.channel.usable  # too long for the peer: nothing was sent
            raise
        finally:
            (self.channels.give if fine else self.channels.drop)(line)

    def error(self, error: Trouble | KVStoreError, operation: str) -> KVStoreError:
        """What `call` raised, as the error of each item; raises `ClosedError` if this client was closed meanwhile."""
        self.check(operation)
        return error if isinstance(error, KVStoreError) else map_trouble(error, backend=self.name, operation=operation)

    def failed(self, error: Trouble | KVStoreError, operation: str, count: int) -> list[Outcome]:
        return [Outcome.failed(self.error(error, operation))] * count

    def late(self, operation: str, count: int) -> list[Outcome]:
        error = TransientError("the deadline passed before it was asked", backend=self.name, operation=operation)
        return [Outcome.failed(error)] * count

    @property
    def most_bytes(self) -> int:
        """Of one request: what the node lets one client hold of its memory at a time, at most."""
        granted = self.facts.get("credits")
        return max(1, min(_REQUEST_BYTES, granted // 2)) if isinstance(granted, int) else _REQUEST_BYTES

    @property
    def most_items(self) -> int:
        return max(1, min(MAX_ITEMS, self.max_meta // _META_PER_ITEM))

    def refusal(self, reply: Reply, operation: str) -> KVStoreError | None:
        return refused_reply(reply.status, reply.meta, backend=self.name, operation=operation)

    def outcomes(
        self, codes: Sequence[Code], sizes: Sequence[int], notes: dict[int, str], keys: Sequence[Key], operation: str
    ) -> list[Outcome]:
        known: dict[int, Outcome] = {}  # by size; most records of a batch have one
        outcomes = []
        fine = Code.OK  # looked for by identity: a hash of a code is a call of Python
        for index, (code, size) in enumerate(zip(codes, sizes, strict=True)):
            outcome = known.get(size) if code is fine else None
            if outcome is None:
                note = notes.get(index, "")
                outcome = item_outcome(
                    code, size, note, backend=self.name, operation=operation, key=keys[index]
                )  # fmt: skip
                if code is fine:
                    known[size] = outcome
            outcomes.append(outcome)
        return outcomes

    # What every node answers.

    def info(self, *, deadline: float) -> dict[str, Any]:
        """What the node says about itself: plain facts. Also remembered as `facts`.

        Raises:
            TransientError, PermanentError: no answer.
            ClosedError: closed.
        """
        self.check("info")
        try:
            reply = self.call("info", deadline, lambda line: line.channel.call(Op.INFO, b"", deadline=deadline))
            error = self.refusal(reply, "info")
            if error is not None:
                raise error
        except KVStoreError:
            raise
        except TROUBLE as error:
            raise self.error(error, "info") from error
        try:
            facts = msgpack.unpackb(reply.meta, raw=False)
        except (ValueError, TypeError, msgpack.UnpackException):
            facts = None
        if not isinstance(facts, dict):
            text = "the node said nothing about itself that makes sense"
            raise TransientError(text, backend=self.name, operation="info")
        self.facts = {str(name): value for name, value in facts.items()}
        return self.facts

    def register(self, slab: Slab) -> None:
        self.check("register")
        self.channels.register(slab)

    def close(self) -> None:
        self.closed = True
        if self.pid == process_id():
            self.channels.close()
