"""Checksums taken as bytes land: the same answers as without, and nothing slips through."""

from __future__ import annotations

import os
from collections.abc import Sequence

import pytest

from kvstore import reads as reads_module
from kvstore.backend import Capability, Limits, Outcome, Read, Status
from kvstore.errors import TransientError
from kvstore.store import Want
from kvstore.testing import DictBackend
from kvstore.wrappers import RetryingBackend
from tests.faults.corpus import corrupt_variants
from tests.faults.support import SPEC, chain, items, payload, poisoned, soon, store_over, wants


class Landing(DictBackend):
    """Says what has landed; with `failures` set, calls break afterwards and leave garbage behind."""

    def __init__(self, preferred: int = 8 << 20) -> None:
        super().__init__()
        self.capabilities |= Capability.LANDING
        self.limits = Limits(lanes=4, preferred_io_bytes=preferred)
        self.landed = 0
        self.failures = 0  # so many calls fail after everything has landed

    def get_into(self, reads: Sequence[Read], *, deadline: float) -> list[Outcome]:
        outcomes = super().get_into([read._replace(landed=None) for read in reads], deadline=deadline)
        for read, outcome in zip(reads, outcomes, strict=True):
            if outcome.ok and read.landed is not None:
                read.landed()
                self.landed += 1
        if self.failures:
            self.failures -= 1
            for read in reads:
                read.dst[:] = b"\xee" * len(read.dst)
            return [Outcome.failed(TransientError("broken after it had landed"))] * len(reads)
        return outcomes


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reads_module, "_LANDING_BYTES", 1024)


@pytest.mark.parametrize("preferred", [8 << 20, 2048, 1024])
def test_what_lands_is_what_was_stored(preferred: int) -> None:
    backend, keys = Landing(preferred), chain(6)
    with store_over(backend) as store:
        store.submit_put(items(keys)).result()
        got = poisoned(6)
        assert all(outcome.ok for outcome in store.submit_get(wants(keys, got)).result())
        assert [bytes(each) for each in got] == [payload(key) for key in keys]
        assert backend.landed >= 6 * len(SPEC.sizes)
        separate = [memoryview(bytearray(size)) for size in SPEC.sizes[1:]]
        assert store.submit_get([Want(keys[0], separate, SPEC, 1)]).result()[0].ok
        assert b"".join(separate) == payload(keys[0])[SPEC.sizes[0] :]
        big = os.urandom(5 << 20)
        store.put_many({"big": big})
        assert store.get_many(["big"]) == [big]


@pytest.mark.parametrize("preferred", [8 << 20, 1024])
def test_every_corrupt_record_is_a_miss(preferred: int) -> None:
    keys = chain(2)
    backend = Landing(preferred)
    with store_over(backend) as store:
        store.submit_put(items(keys)).result()
        good = [backend.records[key] for key in keys]
        for name, bad in corrupt_variants(good[0], good[1]):
            backend.records[keys[0]] = bad
            got = poisoned(1)
            outcome = store.submit_get(wants(keys[:1], got)).result()[0]
            assert not outcome.ok or got[0] == payload(keys[0]), name
            if not outcome.ok:
                assert outcome.status is Status.MISS, name
            backend.records[keys[0]] = good[0]


@pytest.mark.parametrize("preferred", [8 << 20, 1024])
def test_a_try_that_broke_after_landing_leaves_no_checksum_behind(preferred: int) -> None:
    inner, keys = Landing(preferred), chain(2)
    with store_over(RetryingBackend(inner, base_delay=0.0)) as store:
        store.submit_put(items(keys)).result()
        inner.failures = 1
        got = poisoned(2)
        assert all(outcome.ok for outcome in store.submit_get(wants(keys, got), deadline=soon()).result())
        assert [bytes(each) for each in got] == [payload(key) for key in keys]
    inner = Landing(preferred)
    with store_over(inner) as store:
        store.submit_put(items(keys)).result()
        inner.failures = 9
        assert not any(outcome.ok for outcome in store.submit_get(wants(keys, poisoned(2))).result())


def test_bytes_that_change_after_they_landed_break_the_contract_and_a_wrapper_must_not_claim_it() -> None:
    from kvstore.testing import FaultyBackend
    from kvstore.wrappers import HedgedBackend

    assert Capability.LANDING not in FaultyBackend(Landing()).capabilities
    hedged = HedgedBackend(Landing(), Landing())
    try:
        assert Capability.LANDING not in hedged.capabilities
    finally:
        hedged.close()
