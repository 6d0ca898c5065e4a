"""What goes wrong between a client and its node, as errors of ours. The one table, at the one edge."""

from __future__ import annotations

import operator

from kvstore.backend import EXISTS, MISS, Outcome
from kvstore.backend import Status as Answer
from kvstore.errors import KVStoreError, PermanentError, PoolExhausted, TransientError, from_os_error
from kvstore.wrappers.base import LocalWait
from kvstore_transport.errors import (
    DeadlinePassed,
    PeerRefused,
    ProtocolError,
    TransportClosed,
    TransportError,
    TransportUnavailable,
)

from .protocol import Code, Malformed, Status

__all__ = [
    "NodeDown",
    "NodeSilent",
    "Trouble",
    "error_of",
    "for_another",
    "item_outcome",
    "map_trouble",
    "refused_reply",
]

Trouble = TransportError | OSError | Malformed | ValueError | TypeError | BufferError
"""What a call of a channel may raise, and what our own packing may."""


error_of = operator.itemgetter(2)
"""The error of an outcome; the quickest way to look at those of a batch."""


class NodeDown(LocalWait):
    """One of several nodes does not answer, while others do. Says nothing about the pool as a whole, so that a breaker
    around it does not open for the share of one node."""


class NodeSilent(NodeDown):
    """One of several nodes did not answer within the time that a call had. It is not tried again within that call: what
    the others answered must be back with the caller before his deadline."""

    retryable = False


def for_another(error: KVStoreError) -> bool:
    """Whether another node may take what this one did not: it failed, or would not have us (a wrong token, another
    version), which says nothing about the record."""
    return error.retryable or isinstance(error.cause, PeerRefused | TransportUnavailable)


def map_trouble(error: Trouble, *, backend: str, operation: str) -> KVStoreError:
    """The error of ours."""
    if isinstance(error, PeerRefused | TransportUnavailable):
        return PermanentError(str(error), backend=backend, operation=operation, cause=error)
    if isinstance(error, DeadlinePassed):
        return TransientError(f"the deadline passed: {error}", backend=backend, operation=operation, cause=error)
    if isinstance(error, ProtocolError | Malformed):
        text = f"the node sent what makes no sense: {error}"
        return TransientError(text, backend=backend, operation=operation, cause=error)
    if isinstance(error, TransportClosed):
        return TransientError(f"the connection was closed: {error}", backend=backend, operation=operation, cause=error)
    if isinstance(error, TransportError):
        return TransientError(str(error), backend=backend, operation=operation, cause=error)
    if isinstance(error, OSError):
        return from_os_error(error, backend=backend, operation=operation)
    text = f"the memory is not made of flat views of bytes, or too much for a request: {error}"
    return PermanentError(text, backend=backend, operation=operation, cause=error)


def refused_reply(status: int, meta: bytes, *, backend: str, operation: str) -> KVStoreError | None:
    """The error of a whole reply; None if there is none."""
    if status == Status.OK:
        return None
    text = meta[:500].decode(errors="replace")
    if status == Status.BUSY:
        return TransientError(f"the node is busy: {text}", backend=backend, operation=operation)
    if status == Status.CLOSED:
        return TransientError(f"the node is shutting down: {text}", backend=backend, operation=operation)
    if status == Status.LATE:
        return TransientError(f"the deadline passed: {text}", backend=backend, operation=operation)
    if status == Status.BAD:
        return PermanentError(f"the node refused the request: {text}", backend=backend, operation=operation)
    return TransientError(f"the node answered with unknown status {status}", backend=backend, operation=operation)


def item_outcome(code: Code, nbytes: int, note: str, *, backend: str, operation: str, key: bytes) -> Outcome:
    """The outcome of one item. WANTED is none of its own: the caller knows what to do about it."""
    if code == Code.OK:
        return Outcome(Answer.OK, nbytes)
    if code == Code.MISS:
        return MISS
    if code == Code.EXISTS and operation == "put":
        return EXISTS
    kind: type[KVStoreError]
    if code == Code.FULL:
        kind, text = PoolExhausted, "the node has no memory free"
    elif code == Code.TOO_LARGE:
        kind, text = PermanentError, "the record is larger than the node takes"
    elif code == Code.REFUSED:
        kind, text = PermanentError, "the node refused it"
    else:
        kind, text = TransientError, "the node failed at it"
    return Outcome.failed(kind(note or text, backend=backend, operation=operation, key=key))
