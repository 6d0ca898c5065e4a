"""The s3 backend runs the shipped suite and the state machine over real servers: SeaweedFS, and the S3 Express stub."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from botocore.exceptions import ClientError

from kvstore.backend import Backend, Capability
from kvstore.keys import Key
from kvstore.testing import BackendSuite, backend_state_machine
from kvstore_backends.s3 import S3Backend
from tests.servers.express_stub import BUCKET, ExpressStub
from tests.servers.s3_support import SECRETS, settings
from tests.servers.seaweedfs import SeaweedFS

_NEEDED = Capability.RANGED_READ | Capability.LIST | Capability.SHARED | Capability.DURABLE | Capability.LANDING


_BUCKET = "suite"
_serial = itertools.count()


@pytest.fixture(scope="module")
def direct(seaweedfs: SeaweedFS) -> Iterator[Any]:
    """A plain client, and one bucket for all tests: a new one costs a second. Tests have prefixes of their own."""
    client = seaweedfs.client()
    with contextlib.suppress(client.exceptions.BucketAlreadyOwnedByYou):  # this module may have been here before
        client.create_bucket(Bucket=_BUCKET)
    yield client
    client.close()


class SeaweedSuite(BackendSuite):
    """Seeded and inspected by boto3, by the names that the manual promises."""

    requires = _NEEDED
    max_value = 4 << 20
    patience_s = 20.0
    forbidden_text = SECRETS
    client = "native"

    @pytest.fixture(autouse=True)
    def suite_place(self, tmp_path: Path, seaweedfs: SeaweedFS, direct: Any) -> Iterator[None]:
        self.server, self.direct, self.prefix = seaweedfs, direct, f"kv/{next(_serial)}/"
        self.begin(tmp_path)
        yield
        self.end()

    def make(self, **options: Any) -> S3Backend:
        fields = {"prefix": self.prefix, "miss_memory": 0.0, "read_timeout": 10.0, "lanes": 4, **options}
        return S3Backend(settings(self.server.endpoint, _BUCKET, client=self.client, **fields))

    def open(self) -> Backend:
        return self.make()

    def name(self, key: Key) -> str:
        return f"{self.prefix}{key.hex()[:2]}/{key.hex()}"

    def seed(self, backend: Backend, key: Key, data: bytes) -> None:
        self.direct.put_object(Bucket=_BUCKET, Key=self.name(key), Body=data)

    def inspect(self, backend: Backend, key: Key) -> bytes | None:
        try:
            body: bytes = self.direct.get_object(Bucket=_BUCKET, Key=self.name(key))["Body"].read()
        except ClientError as error:
            if error.response["Error"]["Code"] != "NoSuchKey":
                raise
            return None
        return body


class TestS3Native(SeaweedSuite):
    pass


@pytest.mark.slow
class TestS3Boto3(SeaweedSuite):
    client = "boto3"


@pytest.mark.slow
class TestS3Aioboto3(SeaweedSuite):
    client = "aioboto3"


@pytest.mark.slow
class TestS3SmallParts(SeaweedSuite):
    """Every read in many requests, with hedged ones among them."""

    def open(self) -> Backend:
        return self.make(part_size=64 << 10, part_adapt=False, gap=0, hedge_reads=True)


class TestS3Express(BackendSuite):
    """Over a directory bucket."""

    requires = _NEEDED
    max_value = 4 << 20
    patience_s = 20.0
    forbidden_text = SECRETS

    @pytest.fixture(autouse=True)
    def suite_place(self, tmp_path: Path, express_stub: ExpressStub) -> Iterator[None]:
        self.stub = express_stub
        self.begin(tmp_path)
        yield
        self.end()

    def open(self) -> Backend:
        fields = {"prefix": "kv/", "miss_memory": 0.0, "addressing": "auto", "region": self.stub.region, "lanes": 6}
        return S3Backend(settings(self.stub.endpoint, BUCKET, **fields))

    def place(self, key: Key) -> tuple[str, str]:
        return BUCKET, f"kv/{key.hex()[:2]}/{key.hex()}"

    def seed(self, backend: Backend, key: Key, data: bytes) -> None:
        self.stub.seed(*self.place(key), data)

    def inspect(self, backend: Backend, key: Key) -> bytes | None:
        found = self.stub.objects.get(self.place(key))
        return None if found is None else found.body


class _Place:
    """Where the state machines work: a prefix for each example."""

    endpoint = ""
    prefixes: ClassVar[dict[str, str]] = {}


@pytest.fixture(autouse=True)
def _place(seaweedfs: SeaweedFS, direct: Any) -> None:
    _Place.endpoint = seaweedfs.endpoint


def open_stateful(path: Path) -> Backend:
    prefix = _Place.prefixes.setdefault(str(path), f"stateful/{next(_serial)}/")
    fields = {"prefix": prefix, "read_timeout": 10.0, "part_size": 64 << 10, "miss_memory": 0.25}
    return S3Backend(settings(_Place.endpoint, _BUCKET, **fields))


TestS3Stateful = backend_state_machine(open_stateful, max_examples=20, steps=20).TestCase
