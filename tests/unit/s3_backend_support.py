"""A moto server, and calls of one record, for the tests of `S3Backend`."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from typing import Any

import pytest

from kvstore.backend import Outcome, Read, Status, Write
from kvstore.errors import KVStoreError
from kvstore.keys import Key
from kvstore_backends.s3 import S3Backend
from tests.s3_support import (
    BUCKET,
    moto_server,
    plain_client,
)  # fmt: skip

MIB = 1 << 20
OLD = "Wed, 01 Jan 2025 00:00:00 GMT"


@pytest.fixture(scope="module")
def moto() -> Iterator[str]:
    with moto_server() as endpoint:
        yield endpoint


@pytest.fixture
def plain(moto: str) -> Iterator[Any]:
    with plain_client(moto) as client:
        yield client


def key(name: object) -> Key:
    return Key(hashlib.sha256(str(name).encode()).digest())


def soon(seconds: float = 30.0) -> float:
    return time.monotonic() + seconds


def put(backend: S3Backend, name: object, data: bytes) -> Outcome:
    return backend.put([Write(key(name), [memoryview(data)])], deadline=soon())[0]


def read(backend: S3Backend, name: object, size: int) -> tuple[Status, bytes]:
    memory = bytearray(size)
    (outcome,) = backend.get_into([Read(key(name), memoryview(memory))], deadline=soon())
    return outcome.status, bytes(memory[: outcome.nbytes])


def failure(outcome: Outcome) -> KVStoreError:
    assert outcome.error is not None, outcome
    return outcome.error


def names(plain: Any, prefix: str) -> list[str]:
    found = plain.list_objects_v2(Bucket=BUCKET, Prefix=prefix)
    return [entry["Key"] for entry in found.get("Contents", ())]
