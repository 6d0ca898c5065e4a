"""What can go wrong, as a closed set of exceptions.

A miss is data, not an error. Everything else derives from `KVStoreError` and carries the backend, the
operation, a key prefix and the cause, and says whether trying again may help (`retryable`). Foreign
exceptions are mapped once, at the I/O edge: `from_os_error` holds the table for errno values.
"""

from __future__ import annotations

import errno
from typing import ClassVar

__all__ = [
    "BackendError",
    "ClosedError",
    "ConfigError",
    "CorruptRecord",
    "KVStoreError",
    "PermanentError",
    "PoolExhausted",
    "TransientError",
    "from_os_error",
]

_KEY_PREFIX_BYTES = 6


class KVStoreError(Exception):
    """Base of every error raised or returned by kvstore.

    Args:
        message: one sentence that names the offending thing. Never holds a secret.
        backend: name of the backend, if one was involved.
        operation: "stat", "get", "put", "delete", "list", "open", ...
        key: the key; only its first 6 bytes are shown.
        cause: the foreign exception, also set as `__cause__`.
    """

    retryable: ClassVar[bool] = False

    def __init__(
        self,
        message: str,
        *,
        backend: str | None = None,
        operation: str | None = None,
        key: bytes | None = None,
        cause: BaseException | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.backend = backend
        self.operation = operation
        self.key = key
        self.cause = cause
        if cause is not None:
            self.__cause__ = cause

    def __str__(self) -> str:
        where = [
            f"{name}={value}" for name, value in (("backend", self.backend), ("operation", self.operation)) if value
        ]
        if self.key is not None:
            where.append(f"key={self.key[:_KEY_PREFIX_BYTES].hex()}…")
        return f"{self.message} ({', '.join(where)})" if where else self.message


class ConfigError(KVStoreError, ValueError):
    """The configuration is wrong: unknown scheme or option, bad unit, missing extra. Raised at open."""


class ClosedError(KVStoreError):
    """The store, backend, pool or buffer was closed (or released) before this call."""


class PoolExhausted(KVStoreError):
    """No memory became free in the buffer pool before the deadline. Trying again later may help."""

    retryable = True


class BackendError(KVStoreError):
    """A backend could not do what was asked of it. For an engine each one degrades to a miss."""


class TransientError(BackendError):
    """Deadline passed, connection lost, throttled, stale handle: the same call may succeed later."""

    retryable = True


class PermanentError(BackendError):
    """Access denied, unsupported, too large, no space: the same call will fail again."""


class CorruptRecord(BackendError):
    """The stored bytes are not the record that was asked for: cut, flipped, another key, another format."""


# ENOSPC is permanent for this put: the caller degrades, eviction or a person makes room.
_TRANSIENT_ERRNO = frozenset({
    errno.EAGAIN, errno.EBUSY, errno.ECONNABORTED, errno.ECONNREFUSED, errno.ECONNRESET, errno.EHOSTDOWN,
    errno.EHOSTUNREACH, errno.EINTR, errno.EIO, errno.EMFILE, errno.ENETDOWN, errno.ENETRESET, errno.ENETUNREACH,
    errno.ENFILE, errno.ENOBUFS, errno.ENOLCK, errno.ENOMEM, errno.EPIPE, errno.EREMOTEIO, errno.ESTALE,
    errno.ETIMEDOUT, errno.ENOTCONN, errno.ESHUTDOWN,
})  # fmt: skip


def from_os_error(
    error: OSError, *, backend: str, operation: str, key: bytes | None = None, what: str = ""
) -> TransientError | PermanentError:
    """Map an `OSError` to `TransientError` or `PermanentError` by its errno; unknown values are permanent.

    Args:
        error: the exception as caught at the I/O edge.
        what: what was being done, for the message ("write /mnt/kv/…").
    """
    name = errno.errorcode.get(error.errno, str(error.errno)) if error.errno is not None else type(error).__name__
    text = f"{what + ': ' if what else ''}{error.strerror or error} [{name}]"
    transient = error.errno in _TRANSIENT_ERRNO or isinstance(error, TimeoutError | ConnectionError)
    kind = TransientError if transient else PermanentError
    return kind(text, backend=backend, operation=operation, key=key, cause=error)
