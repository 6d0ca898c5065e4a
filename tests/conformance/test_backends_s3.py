"""The shipped suite and state machine over `S3Backend` with each of its clients, on a moto server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest

from kvstore.backend import Backend, Capability
from kvstore.keys import Key
from kvstore.metrics import Metrics
from kvstore.testing import BackendSuite, backend_state_machine
from kvstore.wrappers import wrap
from kvstore_backends.s3 import S3Backend
from tests.s3_support import BUCKET, SECRET_KEY, moto_server, open_s3, plain_client, unique_prefix

_endpoint = ""


@pytest.fixture(scope="module", autouse=True)
def server() -> Iterator[str]:
    global _endpoint
    with moto_server() as endpoint:
        _endpoint = endpoint
        yield endpoint


class S3Suite(BackendSuite):
    """Seeded and inspected with a stock client, by the names that the manual promises."""

    client: ClassVar[str] = "native"
    max_value = 8 << 20
    forbidden_text = (SECRET_KEY,)
    requires = (
        Capability.RANGED_READ | Capability.LIST | Capability.SHARED | Capability.DURABLE | Capability.NATIVE_BATCH
        | Capability.LANDING
    )  # fmt: skip

    def begin(self, path: Path) -> None:
        super().begin(path)
        self.prefix = unique_prefix()
        self._plain = plain_client(_endpoint)
        self.plain = self._plain.__enter__()

    def end(self) -> None:
        super().end()
        self._plain.__exit__(None, None, None)

    def open(self) -> Backend:
        return open_s3(_endpoint, self.prefix, client=self.client, lanes=6, meta_lanes=8)

    def name(self, key: Key) -> str:
        return f"{self.prefix}{key.hex()[:2]}/{key.hex()}"

    def seed(self, backend: Backend, key: Key, data: bytes) -> None:
        self.plain.put_object(Bucket=BUCKET, Key=self.name(key), Body=data)

    def inspect(self, backend: Backend, key: Key) -> bytes | None:
        try:
            data: bytes = self.plain.get_object(Bucket=BUCKET, Key=self.name(key))["Body"].read()
        except self.plain.exceptions.NoSuchKey:
            return None
        return data


class TestNative(S3Suite):
    pass


class TestBoto3(S3Suite):
    client = "boto3"


class TestAioboto3(S3Suite):
    client = "aioboto3"


class TestNativeStack(S3Suite):
    """With the standard wrappers, small parts, a ttl and a checksum."""

    requires = S3Suite.requires | Capability.TTL

    def open(self) -> Backend:
        backend = open_s3(
            _endpoint, self.prefix, lanes=6, meta_lanes=8, part_size=64 << 10, part_adapt=False, ttl=3600.0,
            checksum="crc32", head_first="always", miss_memory=0.0,
        )  # fmt: skip
        return wrap(backend, {}, metrics=Metrics())


_prefixes: dict[str, str] = {}


def _open(path: Path) -> S3Backend:
    prefix = _prefixes.setdefault(str(path), unique_prefix())
    return open_s3(_endpoint, prefix, lanes=4, meta_lanes=5, part_size=64 << 10)


TestNativeStateful = backend_state_machine(_open, max_examples=6, steps=15).TestCase
