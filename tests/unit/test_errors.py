"""The closed set of exceptions, and the one table that maps foreign ones."""

from __future__ import annotations

import copy
import errno
import os
import socket

import pytest

from kvstore.errors import (
    BackendError,
    ClosedError,
    ConfigError,
    CorruptRecord,
    KVStoreError,
    PermanentError,
    PoolExhausted,
    TransientError,
    from_os_error,
)
from kvstore.keys import Key
from kvstore.record import NeedMore

KEY = Key(bytes(range(32)))


def test_the_tree() -> None:
    for kind in (ConfigError, ClosedError, PoolExhausted, BackendError):
        assert issubclass(kind, KVStoreError)
        assert not issubclass(kind, BackendError) or kind is BackendError
    for backend_kind in (TransientError, PermanentError, CorruptRecord):
        assert issubclass(backend_kind, BackendError)
    assert issubclass(ConfigError, ValueError)
    retryable = {ConfigError: False, ClosedError: False, PoolExhausted: True, BackendError: False,
                 TransientError: True, PermanentError: False, CorruptRecord: False}  # fmt: skip
    assert {kind: kind.retryable for kind in retryable} == retryable


def test_the_text_says_where_and_hides_most_of_the_key() -> None:
    cause = OSError(errno.EIO, "broken")
    error = TransientError("it broke", backend="file", operation="get", key=KEY, cause=cause)
    assert str(error) == "it broke (backend=file, operation=get, key=000102030405…)"
    assert KEY.hex() not in str(error) + repr(error)
    assert error.__cause__ is cause
    assert (error.message, error.backend, error.operation, error.key) == ("it broke", "file", "get", KEY)
    assert str(PermanentError("plain")) == "plain"
    assert PermanentError("plain").__cause__ is None
    assert str(PermanentError("x", key=b"")) == "x (key=…)"


@pytest.mark.parametrize(
    "error", [TransientError("m", backend="b", operation="get", key=KEY), ConfigError("m"), NeedMore(4096, KEY)]
)
def test_errors_survive_copying_and_so_the_way_to_another_process(error: KVStoreError) -> None:
    """copy and pickle rebuild an exception in the same way."""
    for other in (copy.copy(error), copy.deepcopy(error)):
        assert type(other) is type(error)
        assert str(other) == str(error)
        assert (other.backend, other.operation, other.key) == (error.backend, error.operation, error.key)
        assert getattr(other, "need", None) == getattr(error, "need", None)


TRANSIENT = ["EAGAIN", "EBUSY", "ECONNABORTED", "ECONNREFUSED", "ECONNRESET", "EHOSTUNREACH", "EINTR", "EIO", "EMFILE",
             "ENETUNREACH", "ENFILE", "ENOMEM", "EPIPE", "ESTALE", "ETIMEDOUT"]  # fmt: skip
PERMANENT = ["EACCES", "EDQUOT", "EEXIST", "EFBIG", "EINVAL", "EISDIR", "ELOOP", "ENAMETOOLONG", "ENODEV", "ENOENT",
             "ENOSPC", "ENOTDIR", "EOPNOTSUPP", "EPERM", "EROFS", "EXDEV"]  # fmt: skip


@pytest.mark.parametrize("name", TRANSIENT + PERMANENT)
def test_errno_table(name: str) -> None:
    number = getattr(errno, name)
    cause = OSError(number, os.strerror(number), "/mnt/kv/x")
    error = from_os_error(cause, backend="file", operation="put", key=KEY, what="write /mnt/kv/x")
    assert type(error) is (TransientError if name in TRANSIENT else PermanentError)
    assert error.retryable is (name in TRANSIENT)
    assert error.cause is cause
    text = str(error)
    assert text.startswith("write /mnt/kv/x: ")
    for part in (errno.errorcode[number], os.strerror(number), "backend=file", "operation=put"):
        assert part in text


def test_os_errors_without_a_number() -> None:
    for cause in (TimeoutError(), TimeoutError("timed out"), ConnectionError("gone"), ConnectionResetError()):
        error = from_os_error(cause, backend="node", operation="get")
        assert type(error) is TransientError
        assert type(cause).__name__ in str(error)
    assert type(from_os_error(OSError("odd"), backend="file", operation="get")) is PermanentError
    assert "odd" in str(from_os_error(OSError("odd"), backend="file", operation="get"))
    assert "99999" in str(from_os_error(OSError(99999, "new"), backend="file", operation="get"))


def test_real_os_errors() -> None:
    with pytest.raises(FileNotFoundError) as missing:
        os.open("/nonexistent/file", os.O_RDONLY)
    assert type(from_os_error(missing.value, backend="file", operation="get")) is PermanentError
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    with pytest.raises(ConnectionRefusedError) as refused:
        socket.create_connection(("127.0.0.1", port), timeout=1)
    assert type(from_os_error(refused.value, backend="node", operation="get")) is TransientError
