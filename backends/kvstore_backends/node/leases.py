"""Leases on records in a node's memory, which this process sees through shared memory: `Buffer`s without a copy."""

from __future__ import annotations

import threading
from collections.abc import Callable

from kvstore.buffers import Buffer, Slab
from kvstore.errors import ClosedError, PermanentError
from kvstore_transport.seam import Leased

__all__ = ["NodeLease"]


class NodeLease(Buffer):
    """A read-only lease on one record of a node of this host.

    The node keeps the record where it is until the last reference and pin are gone. It cannot promise that if it dies,
    or cuts the connection: its memory then may hold something else. So `view` raises `ClosedError` from then on, and
    whoever has read from it asks `intact` afterwards.

    Args:
        leased: the reply; released with the last reference.
        ended: called then, too.
    """

    __slots__ = ("_alive", "_ended", "_lock", "_parent_lease", "_release")

    def __init__(
        self, leased: Leased, ended: Callable[[], None] | None = None, parent: NodeLease | None = None
    ) -> None:
        # Not `super().__init__`: there is no pool, and no slab of ours.
        self._view = leased.body
        self._nbytes = len(leased.body)
        self._alive = leased.alive
        self._release = leased.release
        self._ended = ended
        self._parent_lease = parent
        self._lock = threading.Lock()
        self._refs = 1
        self._pins = 0

    @property
    def view(self) -> memoryview:
        """As `Buffer.view`. Raises `ClosedError` also when the node's memory may be gone."""
        if self._refs <= 0:
            raise ClosedError("this buffer was released")
        if not self._alive():
            raise ClosedError("the node that this record was leased from went away; read it again")
        return self._view

    @property
    def intact(self) -> bool:
        """Whether all that was read through the lease so far was the record. False once the node may have reused the
        memory."""
        return self._refs > 0 and self._alive()

    @property
    def slab(self) -> Slab:
        raise PermanentError("a record in a node's memory lies in no slab of this process", operation="lease")

    @property
    def offset(self) -> int:
        return 0

    def retain(self) -> NodeLease:
        with self._lock:
            if self._refs <= 0:
                raise ClosedError("this buffer was released; it cannot be retained")
            self._refs += 1
        return self

    def pin(self) -> NodeLease:
        with self._lock:
            if self._refs <= 0:
                raise ClosedError("this buffer was released; no I/O may begin on it")
            self._pins += 1
        return self

    def _drop(self, *, pin: bool) -> None:
        with self._lock:
            if pin:
                if self._pins <= 0:
                    raise ClosedError("this buffer has no pin to drop")
                self._pins -= 1
            else:
                if self._refs <= 0:
                    raise ClosedError("this buffer was released before: one release too many")
                self._refs -= 1
            if self._refs or self._pins:
                return
        if self._parent_lease is not None:
            self._parent_lease.release()
            return
        try:
            self._view.release()
        except BufferError:  # an array made from it is still alive
            pass
        self._release()
        if self._ended is not None:
            self._ended()

    def readonly(self) -> NodeLease:
        """Another lease on the same memory, which lives as long as either."""
        self.retain()
        return NodeLease(Leased(0, b"", self._view, self._release, self._alive), None, self)
