"""S3 backends over the servers of this folder, and what the S3 tests check again and again."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlencode

from kvstore.backend import Outcome, Read, Status, Write
from kvstore.errors import KVStoreError
from kvstore.keys import Key
from kvstore_backends.s3 import S3Backend
from kvstore_backends.s3.options import Settings
from tests.servers.express_stub import ExpressStub
from tests.servers.seaweedfs import SeaweedFS

SECRETS = (SeaweedFS.secret_key, ExpressStub.secret_key)


def settings(endpoint: str, bucket: str, **options: Any) -> Settings:
    """Settings with the servers' credentials and timeouts that suit tests."""
    fields: dict[str, Any] = {
        "region": "us-east-1", "endpoint_url": endpoint, "addressing": "path", "access_key_id": SeaweedFS.access_key,
        "secret_access_key": SeaweedFS.secret_key, "connect_timeout": 2.0, "read_timeout": 5.0, "hedge_reads": False,
    }  # fmt: skip
    return Settings(bucket=bucket, **{**fields, **options})


@contextmanager
def opened(endpoint: str, bucket: str, **options: Any) -> Iterator[S3Backend]:
    """A bare backend, closed afterwards."""
    backend = S3Backend(settings(endpoint, bucket, **options))
    try:
        yield backend
    finally:
        backend.close()


def url(endpoint: str, bucket: str, prefix: str = "", **options: object) -> str:
    """A URL for `open_store`; the credentials go by `secrets()`."""
    query = {"endpoint_url": endpoint, "region": "us-east-1", "addressing": "path", **options}
    return f"s3://{bucket}/{prefix}?{urlencode({name: str(value) for name, value in query.items()})}"


def secrets(**options: Any) -> dict[str, Any]:
    """The option `backend_options` with the servers' credentials."""
    own = {"access_key_id": SeaweedFS.access_key, "secret_access_key": SeaweedFS.secret_key, **options}
    return {"s3": own}


def key(name: object) -> Key:
    return Key(hashlib.sha256(f"s3 test {name}".encode()).digest())


def data(nbytes: int, tag: object = "") -> bytes:
    """Bytes that look random, the same in every run."""
    return hashlib.shake_256(f"{nbytes} {tag}".encode()).digest(nbytes)


def soon(seconds: float = 30.0) -> float:
    return time.monotonic() + seconds


def put(backend: S3Backend, name: object, body: bytes, *, seconds: float = 30.0) -> Outcome:
    (outcome,) = backend.put([Write(key(name), [memoryview(body)])], deadline=soon(seconds))
    return outcome


def get(
    backend: S3Backend, name: object, nbytes: int, offset: int = 0, *, seconds: float = 30.0
) -> tuple[Outcome, bytes]:
    dst = bytearray(b"\xa5") * nbytes
    (outcome,) = backend.get_into([Read(key(name), memoryview(dst), offset)], deadline=soon(seconds))
    return outcome, bytes(dst[: outcome.nbytes])


def error_of(outcome: Outcome, kind: type[KVStoreError], *said: str) -> KVStoreError:
    """The error of an outcome, which is of this kind, names these things and shows no secret."""
    assert outcome.status is Status.ERROR, outcome
    error = outcome.error
    assert isinstance(error, kind), f"{type(error).__name__}: {error}"
    text = str(error)
    for words in said:
        assert words.lower() in text.lower(), f"{words!r} is not in {text!r}"
    assert_no_secret(text, repr(error))
    return error


def assert_no_secret(*texts: str) -> None:
    for text in texts:
        assert not [secret for secret in SECRETS if secret in text], text


def all_of(outcomes: Sequence[Outcome], status: Status) -> bool:
    return all(outcome.status is status for outcome in outcomes)
