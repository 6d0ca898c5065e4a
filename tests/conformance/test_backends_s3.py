"""The shipped suite and state machine over `S3Backend` with each of its clients, on a moto server.

By default the whole suite runs with the native client, and a few tests of it with the others: their code is the five
calls of `Client`, all the rest is the same. `-m slow` runs everything with everything.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest

from kvstore.backend import Backend, Capability
from kvstore.keys import Key
from kvstore.metrics import Metrics
from kvstore.testing import BackendSuite, backend_state_machine
from kvstore.testing.suite_base import SuiteBase
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


class OnMoto(SuiteBase):
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


class ShortSuite(OnMoto):
    """A few tests: every call of the client, in one batch and in many threads, its deadlines and its end."""

    threads = BackendSuite.threads
    test_many_ranges_of_many_records_in_one_batch = BackendSuite.test_many_ranges_of_many_records_in_one_batch
    test_what_is_not_there_is_a_miss = BackendSuite.test_what_is_not_there_is_a_miss
    test_views_are_gathered = BackendSuite.test_views_are_gathered
    test_the_first_bytes_survive = BackendSuite.test_the_first_bytes_survive
    test_a_deleted_record_is_gone_and_its_key_free = BackendSuite.test_a_deleted_record_is_gone_and_its_key_free
    test_a_quarantined_record_is_out_of_reach_and_heals = (
        BackendSuite.test_a_quarantined_record_is_out_of_reach_and_heals
    )
    test_list_is_what_is_there = BackendSuite.test_list_is_what_is_there
    test_a_deadline_that_has_passed = BackendSuite.test_a_deadline_that_has_passed
    test_close_returns_while_work_is_under_way = BackendSuite.test_close_returns_while_work_is_under_way


class TestNative(OnMoto, BackendSuite):
    """Batches of 300 are left to SeaweedFS (test_backends_s3_seaweedfs.py): here they take four seconds each."""

    @pytest.mark.parametrize("count", [0, 1, 64])
    def test_outcomes_align_in_mixed_batches(self, backend: Backend, count: int) -> None:
        super().test_outcomes_align_in_mixed_batches(backend, count)

    @pytest.mark.parametrize("count", [0, 1, 64])
    def test_a_batch_is_stored(self, backend: Backend, count: int) -> None:
        super().test_a_batch_is_stored(backend, count)


class TestBoto3Short(ShortSuite):
    client = "boto3"


class TestAioboto3Short(ShortSuite):
    client = "aioboto3"


@pytest.mark.slow
class TestBoto3(OnMoto, BackendSuite):
    client = "boto3"


@pytest.mark.slow
class TestAioboto3(OnMoto, BackendSuite):
    client = "aioboto3"


class Stack(OnMoto):
    """With the standard wrappers, small parts, a ttl and a checksum."""

    requires = OnMoto.requires | Capability.TTL

    def open(self) -> Backend:
        backend = open_s3(
            _endpoint, self.prefix, lanes=6, meta_lanes=8, part_size=64 << 10, part_adapt=False, ttl=3600.0,
            checksum="crc32", head_first="always", miss_memory=0.0,
        )  # fmt: skip
        return wrap(backend, {}, metrics=Metrics())


class TestNativeStackShort(Stack, ShortSuite):
    pass


@pytest.mark.slow
class TestNativeStack(Stack, BackendSuite):
    pass


_prefixes: dict[str, str] = {}


def _open(path: Path) -> S3Backend:
    prefix = _prefixes.setdefault(str(path), unique_prefix())
    return open_s3(_endpoint, prefix, lanes=4, meta_lanes=5, part_size=64 << 10)


TestNativeStateful = backend_state_machine(_open, max_examples=6, steps=15).TestCase
