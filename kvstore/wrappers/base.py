"""What all wrappers share: forwarding, and mapping what a broken backend raises, once."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from kvstore.backend import Backend, Capability, KeyInfo, Limits, Outcome
from kvstore.errors import ClosedError, ConfigError, KVStoreError, PermanentError, TransientError, from_os_error
from kvstore.metrics import Metrics, renew_after_fork

if TYPE_CHECKING:
    from kvstore.buffers import Buffer, Slab
    from kvstore.keys import Key
    from kvstore.options import Option
    from kvstore.registry import BackendURL

__all__ = ["LocalWait", "Operation", "Unexpected", "Wrapper", "call_backend", "item_bytes", "map_error"]

logger = logging.getLogger("kvstore.wrappers")

Operation = Literal["stat", "get", "put", "delete", "quarantine"]
"""The operations that take a batch and answer with outcomes, as errors and metrics call them."""

_METHODS = {"stat": "stat", "get": "get_into", "put": "put", "delete": "delete", "quarantine": "quarantine"}


class Unexpected(PermanentError):
    """The backend broke its contract: it raised a foreign exception, or answered another number of items. Counted
    as `PermanentError`; a breaker tells it from a permanent error of one item."""


class LocalWait(TransientError):
    """Waiting for a turn ended without one: no slot became free, others hold a lock or all of the room. It says nothing
    about the backend's health. Counted as `TransientError`."""


def map_error(error: Exception, *, backend: str, operation: str) -> KVStoreError:
    """The error of ours for whatever a backend raised. Ours stay as they are; the rest become the cause.

    The text of a foreign exception is not repeated, since it may hold a secret; it is in the cause.
    """
    if isinstance(error, KVStoreError):
        return error
    if isinstance(error, OSError):
        return from_os_error(error, backend=backend, operation=operation)
    text = f"the backend raised {type(error).__name__}"
    if isinstance(error, MemoryError | CancelledError):
        return TransientError(text, backend=backend, operation=operation, cause=error)
    return Unexpected(text, backend=backend, operation=operation, cause=error)


def call_backend(backend: Backend, operation: Operation, items: Sequence[Any], deadline: float) -> list[Outcome]:
    """One call of `backend`, with one outcome per item whatever it does.

    Raises:
        ClosedError, ConfigError: as the backend raised them: it is unusable as a whole. BaseExceptions that are not
            Exceptions pass too. Everything else becomes the outcome of each item.
    """
    try:
        outcomes: list[Outcome] = getattr(backend, _METHODS[operation])(items, deadline=deadline)
        if len(outcomes) == len(items):
            return outcomes
        text = f"the backend gave {len(outcomes)} outcomes for {len(items)} items"
        mapped: KVStoreError = Unexpected(text, backend=backend.name, operation=operation)
    except (ClosedError, ConfigError):
        raise
    except Exception as error:  # noqa: BLE001 - a broken backend must not reach the engine
        mapped = map_error(error, backend=backend.name, operation=operation)
    return [Outcome.failed(mapped)] * len(items)


def item_bytes(operation: Operation, item: Any) -> int:
    """Bytes that an item moves: of a read its `dst`, of a write its `src`, of anything else 0."""
    if operation == "get":
        return len(item.dst)
    return item.nbytes if operation == "put" else 0


class Wrapper(Backend):
    """A backend around another: forwards everything. Subclasses change `_run`, which all five operations with outcomes
    pass through, and what else they must.

    Overrides every public method and attribute of `Backend`, so that no default of `Backend` ever hides what the
    inner backend does; a test holds it to that.
    """

    options: ClassVar[Sequence[Option]] = ()

    def __init__(self, inner: Backend) -> None:
        self._inner = inner
        self._closed = False
        renew_after_fork(self)

    @property
    def inner(self) -> Backend:
        """The wrapped backend."""
        return self._inner

    @property
    def name(self) -> str:  # type: ignore[override]  # forwarded, never set
        """The inner backend's name."""
        return self._inner.name

    @property
    def capabilities(self) -> Capability:  # type: ignore[override]
        """The inner backend's capabilities, as they are now."""
        return self._inner.capabilities

    @property
    def limits(self) -> Limits:  # type: ignore[override]
        """The inner backend's limits, as they are now."""
        return self._inner.limits

    @property
    def identity(self) -> Hashable | None:  # type: ignore[override]
        """The inner backend's identity."""
        return self._inner.identity

    @property
    def distance(self) -> int:  # type: ignore[override]
        """The inner backend's distance."""
        return self._inner.distance

    @property
    def metrics(self) -> Metrics | None:  # type: ignore[override]
        """The inner backend's metrics; what a wrapper counts goes where it was told to."""
        return self._inner.metrics

    @classmethod
    def from_url(cls, url: BackendURL, options: Mapping[str, Any]) -> Backend:
        """Always raises `ConfigError`: a wrapper goes around a backend, see `kvstore.wrappers.wrap`."""
        raise ConfigError(f"{cls.__name__} is not opened by URL; kvstore.wrappers.wrap puts it around a backend")

    def _after_fork(self) -> None:
        """In a forked child: new locks, and nothing in flight."""

    def _check_open(self, operation: str) -> None:
        if self._closed:
            raise ClosedError("the backend is closed", backend=self.name, operation=operation)

    def _run(self, operation: Operation, items: Sequence[Any], deadline: float) -> list[Outcome]:
        """One call with a list of outcomes. Overrides call `call_backend` for the inner backend."""
        self._check_open(operation)
        return call_backend(self._inner, operation, items, deadline)

    def stat(self, keys: Sequence[Key], *, deadline: float) -> list[Outcome]:
        return self._run("stat", keys, deadline)

    def get_into(self, reads: Sequence[Any], *, deadline: float) -> list[Outcome]:
        return self._run("get", reads, deadline)

    def put(self, writes: Sequence[Any], *, deadline: float) -> list[Outcome]:
        return self._run("put", writes, deadline)

    def delete(self, keys: Sequence[Key], *, deadline: float) -> list[Outcome]:
        return self._run("delete", keys, deadline)

    def quarantine(self, keys: Sequence[Key], *, deadline: float) -> list[Outcome]:
        return self._run("quarantine", keys, deadline)

    def lease(self, keys: Sequence[Key], *, deadline: float) -> list[Buffer | None]:
        """As the inner backend. A lease is a short cut: whatever goes wrong with it, the answer is None (and the
        caller reads), unless the backend is unusable."""
        self._check_open("lease")
        try:
            leases = self._inner.lease(keys, deadline=deadline)
            if len(leases) == len(keys):
                return leases
            for lease in leases:
                if lease is not None:
                    lease.release()
            logger.error("backend %s gave %d leases for %d keys", self.name, len(leases), len(keys))
        except (ClosedError, ConfigError):
            raise
        except Exception as error:  # noqa: BLE001 - a broken backend must not reach the engine
            logger.warning("backend %s: lease failed: %s", self.name, type(error).__name__)
        return [None] * len(keys)

    def announce(self, waiting: Sequence[Sequence[Key]]) -> None:
        self._inner.announce(waiting)

    def register(self, slab: Slab) -> None:
        self._check_open("register")
        self._register_with(self._inner, slab)

    def _register_with(self, backend: Backend, slab: Slab) -> None:
        try:
            backend.register(slab)
        except KVStoreError:
            raise
        except Exception as error:
            raise map_error(error, backend=backend.name, operation="register") from error

    def _pages(self, pages: Iterator[Sequence[KeyInfo]]) -> Iterator[Sequence[KeyInfo]]:
        """The pages, with foreign exceptions mapped."""
        try:
            yield from pages
        except KVStoreError:
            raise
        except Exception as error:
            raise map_error(error, backend=self.name, operation="list") from error

    def list(self, *, deadline: float) -> Iterator[Sequence[KeyInfo]]:
        self._check_open("list")
        try:
            return self._pages(self._inner.list(deadline=deadline))
        except KVStoreError:
            raise
        except Exception as error:
            raise map_error(error, backend=self.name, operation="list") from error

    def close(self) -> None:
        """Close this and the inner backend. Returns whatever the inner backend raises, which is logged."""
        self._closed = True
        self._close_inner(self._inner)

    def _close_inner(self, backend: Backend) -> None:
        try:
            backend.close()
        except Exception:
            logger.exception("closing backend %s failed", backend.name)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._inner!r})"
