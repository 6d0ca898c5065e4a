"""Fault kinds met in the field, against the whole store. Numbers are those of the project's fault list."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.backend import OK, Outcome, Status
from kvstore.buffers import BufferPool
from kvstore.errors import KVStoreError, PermanentError, TransientError
from kvstore.record import build_record
from kvstore.store import Item, Want
from kvstore.testing import DictBackend, Fault, FaultyBackend
from tests.faults.corpus import corrupt_variants
from tests.faults.support import (
    POISON,
    SPEC,
    chain,
    items,
    payload,
    poisoned,
    soon,
    store_over,
    wants,
)


def one_lane(inner: DictBackend) -> DictBackend:
    inner.limits = inner.limits.__class__(lanes=1, preferred_io_bytes=inner.limits.preferred_io_bytes)
    return inner


# 1: part of a batch fails, and its untouched buffers come back as hits.


@pytest.mark.parametrize("serde", ["raw", "shuffle-zstd"])
@pytest.mark.parametrize("fault", [Fault.error(), Fault.miss(), Fault.cut(100), Fault.drop(), Fault.short(40)])
def test_1_only_what_was_really_read_is_a_hit(fault: Fault, serde: str) -> None:
    keys = chain(4)
    backend = FaultyBackend(DictBackend(), by_key={("get", keys[2]): [fault] * 9})
    with store_over(backend, remote_serde=serde) as store:
        store.submit_put(items(keys)).result()
        got = poisoned(4)
        outcomes = store.submit_get(wants(keys, got)).result()
        assert [outcome.ok for outcome in outcomes] == [True, True, False, True]
        for index in (0, 1, 3):
            assert got[index] == payload(keys[index])
        assert store.pool.stats().in_use == 0


@settings(max_examples=60)
@given(st.lists(st.sampled_from(["ok", "error", "miss", "drop", "cut", "short", "flip"]), min_size=6, max_size=6))
def test_1_any_mixture_of_faults_never_shows_a_poisoned_byte(kinds: list[str]) -> None:
    keys = chain(6)
    made = {
        "ok": Fault.ok(), "error": Fault.error(), "miss": Fault.miss(), "drop": Fault.drop(), "cut": Fault.cut(5000),
        "short": Fault.short(4100), "flip": Fault.flip(12345),
    }  # fmt: skip
    script = {("get", key): [made[kind]] * 9 for key, kind in zip(keys, kinds, strict=True)}
    with store_over(FaultyBackend(DictBackend(), by_key=script)) as store:
        store.submit_put(items(keys)).result()
        got = poisoned(6)
        for key, dst, outcome in zip(keys, got, store.submit_get(wants(keys, got)).result(), strict=True):
            assert not outcome.ok or dst == payload(key)


# 2: a timed-out or cancelled transfer still touches memory that has a new owner.


@pytest.mark.parametrize("how", ["deadline", "cancel"])
def test_2_memory_of_a_hung_read_stays_out_of_the_pool(how: str) -> None:
    (key,) = chain(1)
    backend = FaultyBackend(one_lane(DictBackend()), {"get": [Fault.late()]})
    with store_over(backend, buffer_pool_bytes=1 << 20) as store, BufferPool(2 * SPEC.raw_bytes) as pool:
        store.submit_put(items([key])).result()
        buffer = pool.acquire(SPEC.raw_bytes)
        deadline = time.monotonic() + 0.1 if how == "deadline" else soon()
        completion = store.submit_get([Want(key, buffer.view, SPEC, hold=buffer)], deadline=deadline)
        backend.wait_hung()
        if how == "cancel":
            assert completion.cancel()
        else:
            assert isinstance(completion.result(20)[0].error, TransientError)
        buffer.release()  # the owner gives it up; the read still hangs
        assert pool.stats().quarantined == 1
        assert not completion.settled()
        other = pool.acquire(SPEC.raw_bytes)
        other.view[:] = b"\x11" * SPEC.raw_bytes
        backend.release()
        assert completion.settled(20)
        assert other.view == b"\x11" * SPEC.raw_bytes
        other.release()
        assert pool.stats().in_use == 0


def test_2_memory_of_a_hung_write_may_be_released_and_is_written_as_it_was() -> None:
    (key,) = chain(1)
    inner = DictBackend()
    backend = FaultyBackend(one_lane(inner), {"put": [Fault.hang()]})
    with store_over(backend) as store, BufferPool(2 * SPEC.raw_bytes) as pool:
        buffer = pool.acquire(SPEC.raw_bytes)
        buffer.view[:] = payload(key)
        completion = store.submit_put([Item(key, SPEC.split(buffer.view), SPEC, hold=buffer)])
        buffer.release()
        backend.wait_hung()
        other = pool.acquire(SPEC.raw_bytes)  # a new owner gets other memory
        other.view[:] = bytes(SPEC.raw_bytes)
        backend.release()
        assert completion.result(20)[0].ok
        got = poisoned(1)
        assert store.submit_get(wants([key], got)).result(20)[0].ok
        assert got[0] == payload(key)
        other.release()


# 3: references and pins leak on abort, deadline or disconnect.


@pytest.mark.parametrize("when", ["before", "during", "after"])
def test_3_a_thousand_cancelled_calls_leave_nothing(when: str) -> None:
    keys = chain(2)
    backend = FaultyBackend(one_lane(DictBackend()))
    with store_over(backend) as store:
        store.submit_put(items(keys)).result()
        for _ in range(20):
            if when != "after":
                backend.push(Fault.hang(), operation="get")
            buffers = store.pool.acquire_many([SPEC.raw_bytes] * 50)
            completions = [store.submit_get([Want(keys[n % 2], b.view, SPEC, hold=b)]) for n, b in enumerate(buffers)]
            if when == "during":
                backend.wait_hung()
            if when == "after":
                for completion in completions:
                    completion.result(20)
            for completion, buffer in zip(completions, buffers, strict=True):
                completion.cancel()
                buffer.release()
            backend.release()
            if when == "before":
                backend.push(operation="get")
            for completion in completions:
                while not completion.settled(0.01):
                    backend.release()
        stats = store.pool.stats()
        assert (stats.in_use, stats.pinned, stats.buffers) == (0, 0, 0)


def test_3_a_lease_that_nobody_takes_is_given_back() -> None:
    from kvstore_backends.memory import MemoryBackend

    keys = chain(3)
    inner = MemoryBackend(nbytes=1 << 20)
    backend = FaultyBackend(inner, {"lease": [Fault.late()]})
    with store_over(backend) as store:
        store.submit_put(items(keys)).result()
        completion = store.submit_lease(keys)
        backend.wait_hung()
        completion.cancel()
        backend.release()
        backend.wait_done(1, "lease")
        assert completion.settled(20)
        assert all(outcome.ok for outcome in store.submit_delete(keys).result())


# 4: allocation waits for ever when the pool is full and nobody can free.


def test_4_encoded_reads_larger_than_the_pool_go_in_waves_or_end_in_time() -> None:
    keys = chain(200)
    with store_over(DictBackend(), remote_serde="lz4", buffer_pool_bytes=1 << 20) as store:
        assert all(outcome.ok for outcome in store.submit_put(items(keys)).result())
        got = poisoned(200)
        assert all(outcome.ok for outcome in store.submit_get(wants(keys, got), deadline=soon()).result())
        assert [bytes(each) for each in got] == [payload(key) for key in keys]
        held = store.pool.acquire(store.pool.nbytes)
        start = time.monotonic()
        outcomes = store.submit_get(wants(keys[:4], poisoned(4)), deadline=start + 0.2).result()
        assert all(outcome.status is Status.ERROR for outcome in outcomes)
        assert time.monotonic() - start < 10
        held.release()


def test_4_concurrent_encoded_reads_do_not_block_each_other() -> None:
    keys = chain(64)
    with store_over(DictBackend(), remote_serde="shuffle-zstd", buffer_pool_bytes=1 << 20) as store:
        store.submit_put(items(keys)).result()
        buffers = [poisoned(16) for _ in range(4)]
        done = [
            store.submit_get(wants(keys[16 * n : 16 * n + 16], dst), deadline=soon()) for n, dst in enumerate(buffers)
        ]
        assert all(outcome.ok for completion in done for outcome in completion.result())


# 9, 10: what a lookup said is not believed; a hole is not counted over.


def test_9_a_record_that_vanishes_after_the_lookup_is_a_miss() -> None:
    keys, inner = chain(4), DictBackend()
    with store_over(inner) as store:
        store.submit_put(items(keys)).result()
        assert store.submit_lookup(keys).result() == 4
        inner.delete([keys[2]], deadline=soon())
        got = poisoned(4)
        outcomes = store.submit_get(wants(keys, got)).result()
        assert [outcome.status for outcome in outcomes] == [Status.OK, Status.OK, Status.MISS, Status.OK]
        assert store.submit_lookup(keys).result() == 2


# 13: a failed store is reported as stored.


def test_13_refused_writes_are_errors_and_a_later_put_really_tries() -> None:
    refused = PermanentError("no")
    backend = FaultyBackend(DictBackend(), {"put": [Fault.error(refused)] * 10})
    keys = chain(10)
    with store_over(backend) as store:
        outcomes = [store.submit_put(items([key])).result()[0] for key in keys]
        assert all(outcome.status is Status.ERROR and outcome.nbytes == 0 for outcome in outcomes)
        stats = store.stats()
        assert (stats["put_errors"], stats.get("put_stored", 0), stats.get("put_bytes", 0)) == (10, 0, 0)
        assert store.submit_lookup(keys).result() == 0
        assert all(outcome.ok for outcome in store.submit_put(items(keys)).result())


def test_13_a_put_that_waited_for_one_that_failed_tries_itself() -> None:
    (key,) = chain(1)
    backend = FaultyBackend(one_lane(DictBackend()), {"put": [Fault.hang(Fault.error())]})
    with store_over(backend) as store:
        first = store.submit_put(items([key]))
        backend.wait_hung()
        second, third = store.submit_put(items([key])), store.submit_put(items([key]))
        backend.release()
        assert first.result(20)[0].status is Status.ERROR
        assert second.result(20)[0].status is Status.OK
        assert third.result(20)[0].status is Status.EXISTS
        assert backend.count("put", key) == 2


def test_13_a_put_that_was_acknowledged_but_dropped_is_a_miss_later() -> None:
    (key,) = chain(1)
    with store_over(FaultyBackend(DictBackend(), {"put": [Fault.drop()]})) as store:
        assert store.submit_put(items([key])).result()[0].ok
        assert store.submit_get(wants([key], poisoned(1))).result()[0].status is Status.MISS
        assert store.submit_put(items([key])).result()[0].ok
        assert store.submit_get(wants([key], poisoned(1))).result()[0].ok


# 15: simultaneous puts cost one write; a refused one leaves no marker.


def test_15_two_puts_of_one_key_cost_one_write() -> None:
    (key,) = chain(1)
    backend = FaultyBackend(one_lane(DictBackend()), {"put": [Fault.hang()]})
    with store_over(backend) as store:
        first = store.submit_put(items([key]))
        backend.wait_hung()
        others = [store.submit_put(items([key])) for _ in range(10)]
        backend.release()
        assert first.result(20)[0].status is Status.OK
        assert {other.result(20)[0].status for other in others} == {Status.EXISTS}
        assert backend.count("put", key) == 1


def test_15_a_put_that_the_queue_has_no_room_for_is_dropped_and_said_to_be() -> None:
    keys = chain(8)
    backend = FaultyBackend(one_lane(DictBackend()), {"put": [Fault.hang()]})
    with store_over(backend, write_queue_bytes=2 * SPEC.nbytes) as store:
        first = store.submit_put(items(keys[:1]))
        backend.wait_hung()
        start = time.monotonic()
        outcomes = store.submit_put(items(keys[1:]))
        assert time.monotonic() - start < 5
        backend.release()
        statuses = [outcome.status for outcome in outcomes.result(20)]
        assert statuses == [Status.OK] + [Status.ERROR] * 6
        assert first.result(20)[0].ok
        assert store.stats()["put_dropped"] == 6
        assert store.stats()["write_queue_bytes"] == 0
        assert all(outcome.stored for outcome in store.submit_put(items(keys[2:4])).result(20))


# 17, 26: truncated, flipped, swapped and lying records.


@pytest.mark.parametrize("serde", ["raw", "lz4", "shuffle-zstd"])
def test_17_every_corrupt_record_is_a_miss_is_counted_and_heals(serde: str) -> None:
    keys = chain(3)
    inner = DictBackend()
    with store_over(inner, remote_serde=serde) as store:
        store.submit_put(items(keys)).result()
        good = {key: _stored(inner, key) for key in keys}
        number = 0
        for name, bad in corrupt_variants(good[keys[1]], good[keys[0]]):
            inner.delete([keys[1]], deadline=soon())
            assert inner.put([_write(keys[1], bad)], deadline=soon())[0].ok
            got = poisoned(3)
            outcomes = store.submit_get(wants(keys, got)).result()
            assert (outcomes[0].ok, outcomes[2].ok) == (True, True), name
            assert (got[0], got[2]) == (payload(keys[0]), payload(keys[2])), name
            if outcomes[1].ok:  # damage where no byte of the record lies
                assert got[1] == payload(keys[1]), name
                continue
            number += 1
            assert outcomes[1].status is Status.MISS, name
            assert store.stats()["corrupt_records"] == number, name
            assert store.submit_lookup(keys).result() == 1, name  # the name is free again
            assert store.submit_put(items([keys[1]])).result()[0].status is Status.OK, name
            assert store.submit_get(wants(keys, poisoned(3))).result()[1].ok, name
        assert number > 10


def _stored(backend: DictBackend, key: object) -> bytes:
    from kvstore.backend import Read
    from kvstore.keys import Key

    name = Key(bytes(key))  # type: ignore[call-overload]
    size = backend.stat([name], deadline=soon())[0].nbytes
    data = bytearray(size)
    assert backend.get_into([Read(name, memoryview(data))], deadline=soon())[0].nbytes == size
    return bytes(data)


def _write(key: object, data: bytes) -> object:
    from kvstore.backend import Write
    from kvstore.keys import Key

    return Write(Key(bytes(key)), [memoryview(data)])  # type: ignore[call-overload]


def test_17_damage_on_the_way_is_read_again_and_nothing_is_quarantined() -> None:
    (key,) = chain(1)
    backend = FaultyBackend(DictBackend(), {"get": [Fault.flip(99)]})
    with store_over(backend) as store:
        store.submit_put(items([key])).result()
        got = poisoned(1)
        assert store.submit_get(wants([key], got)).result()[0].ok
        assert got[0] == payload(key)
        assert backend.calls_of("quarantine") == []
        assert store.stats()["second_looks"] == 1


def test_17_a_record_of_another_key_under_this_name_is_a_miss() -> None:
    one, two = chain(2)
    inner = DictBackend()
    with store_over(inner) as store:
        store.submit_put(items([one])).result()
        inner.put([_write(two, _stored(inner, one))], deadline=soon())  # type: ignore[list-item]
        assert store.submit_get(wants([two], poisoned(1))).result()[0].status is Status.MISS
        assert store.submit_get(wants([one], poisoned(1))).result()[0].ok


def test_17_a_zero_length_value_is_not_a_miss() -> None:
    with store_over(DictBackend()) as store:
        store.put_many({"empty": b""})
        assert store.get_many(["empty", "absent"]) == [b"", None]


# 18: the first exception kills the background worker.


@pytest.mark.parametrize(
    "error", [OSError(5, "io"), ValueError("x"), TimeoutError(), asyncio.CancelledError(), KeyError("k"), MemoryError()]
)
def test_18_whatever_a_backend_raises_the_next_call_works(error: BaseException) -> None:
    keys = chain(3)
    script = {"put": [Fault.raises(error)], "get": [Fault.raises(error)], "stat": [Fault.raises(error)]}
    backend = FaultyBackend(one_lane(DictBackend()), script)
    with store_over(backend) as store:
        failed = store.submit_put(items(keys)).result(20)
        assert all(isinstance(outcome.error, KVStoreError) for outcome in failed)
        assert all(outcome.ok for outcome in store.submit_put(items(keys)).result(20))
        assert all(not outcome.ok for outcome in store.submit_get(wants(keys, poisoned(3))).result(20))
        got = poisoned(3)
        assert all(outcome.ok for outcome in store.submit_get(wants(keys, got)).result(20))
        assert [bytes(each) for each in got] == [payload(key) for key in keys]
        assert store.submit_lookup(keys).result(20) == 0
        assert store.submit_lookup(keys).result(20) == 3


def test_18_a_backend_that_gives_too_few_outcomes_is_an_error() -> None:
    class Wrong(DictBackend):
        def get_into(self, reads: Sequence[object], *, deadline: float) -> list[Outcome]:
            return [OK]

    with store_over(Wrong()) as store:
        got = poisoned(3)
        assert {o.status for o in store.submit_get(wants(chain(3), got)).result(20)} == {Status.ERROR}
        assert all(byte == POISON for dst in got for byte in dst)


# 19, 20: the remote hangs, and every call still ends by its deadline.


def test_19_every_kind_of_call_ends_by_its_deadline_while_the_backend_hangs() -> None:
    keys = chain(4)
    hang = [Fault.hang()]
    script = dict.fromkeys(("stat", "get", "put", "delete", "lease"), hang)
    backend = FaultyBackend(DictBackend(), script)
    with store_over(backend) as store:
        start = time.monotonic()
        until = start + 0.2
        assert store.submit_lookup(keys, deadline=until).result(20) == 0
        late = store.submit_get(wants(keys, poisoned(4)), deadline=until)
        assert {outcome.status for outcome in late.result(20)} == {Status.ERROR}
        put = store.submit_put(items(keys), deadline=until)
        assert {outcome.status for outcome in put.result(20)} == {Status.ERROR}
        assert {o.status for o in store.submit_delete(keys, deadline=until).result(20)} == {Status.ERROR}
        assert store.submit_lease(keys, deadline=until).result(20) == [None] * 4
        assert time.monotonic() - start < 10
        backend.release()
        while not (late.settled(0.01) and put.settled(0.01)):
            backend.release()
        while backend.hung:
            backend.release()


def test_20_what_is_complete_by_the_deadline_counts() -> None:
    keys = chain(40)
    backend = FaultyBackend(DictBackend())
    backend.inner.limits = backend.limits.__class__(lanes=2, preferred_io_bytes=8 * SPEC.raw_bytes)  # type: ignore[misc]
    with store_over(backend) as store:
        store.submit_put(items(keys)).result()
        backend.push(Fault.hang(), operation="get")  # the first job hangs, the other lane goes on
        got = poisoned(40)
        completion = store.submit_get(wants(keys, got), deadline=time.monotonic() + 0.5)
        outcomes = completion.result(20)
        complete = [outcome.ok for outcome in outcomes]
        assert 0 < sum(complete) < len(complete)
        for key, dst, good in zip(keys, got, complete, strict=True):
            assert not good or dst == payload(key)
        backend.release()
        assert completion.settled(20)


def test_20_a_deadline_that_has_passed_costs_nothing() -> None:
    backend = FaultyBackend(DictBackend())
    with store_over(backend) as store:
        past = time.monotonic() - 1
        got = poisoned(2)
        outcomes = store.submit_get(wants(chain(2), got), deadline=past).result(20)
        assert {outcome.status for outcome in outcomes} == {Status.ERROR}
        assert all(byte == POISON for dst in got for byte in dst)
        assert store.submit_lookup(chain(2), deadline=past).result(20) == 0


# 22: many readers of one prefix.


def test_22_fifty_readers_cost_one_read_per_key_and_a_cancelled_leader_fails_nobody() -> None:
    keys = chain(20)
    backend = FaultyBackend(one_lane(DictBackend()), {"get": [Fault.hang()]})
    with store_over(backend) as store:
        store.submit_put(items(keys)).result()
        leader = store.submit_get(wants(keys, poisoned(20)))
        backend.wait_hung()
        got = [poisoned(20) for _ in range(49)]
        followers = [store.submit_get(wants(keys, dst)) for dst in got]
        leader.cancel()
        backend.release()
        for dst, completion in zip(got, followers, strict=True):
            assert all(outcome.ok for outcome in completion.result(20))
            assert [bytes(each) for each in dst] == [payload(key) for key in keys]
        assert all(sum(key in call.keys for call in backend.calls_of("get")) == 1 for key in keys)
        assert leader.settled(20)


def test_22_a_follower_with_a_longer_deadline_outlives_its_leader() -> None:
    keys = chain(2)
    backend = FaultyBackend(one_lane(DictBackend()), {"get": [Fault.hang(Fault.error())]})
    with store_over(backend) as store:
        store.submit_put(items(keys)).result()
        leader = store.submit_get(wants(keys, poisoned(2)), deadline=time.monotonic() + 0.1)
        backend.wait_hung()
        got = poisoned(2)
        follower = store.submit_get(wants(keys, got), deadline=soon())
        assert leader.result(20)[0].status is Status.ERROR
        backend.release()
        assert all(outcome.ok for outcome in follower.result(20))
        assert [bytes(each) for each in got] == [payload(key) for key in keys]


def test_22_a_leader_that_scribbles_over_its_memory_after_cancel_harms_nobody() -> None:
    (key,) = chain(1)
    backend = FaultyBackend(one_lane(DictBackend()), {"get": [Fault.hang()]})
    with store_over(backend) as store:
        store.submit_put(items([key])).result()
        mine = poisoned(1)
        leader = store.submit_get(wants([key], mine))
        backend.wait_hung()
        got = poisoned(1)
        follower = store.submit_get(wants([key], got))
        leader.cancel()
        stop = threading.Event()

        def scribble() -> None:
            while not stop.is_set():
                mine[0][:] = bytes(SPEC.raw_bytes)

        thread = threading.Thread(target=scribble)
        thread.start()
        backend.release()
        outcome = follower.result(20)[0]
        stop.set()
        thread.join()
        assert not outcome.ok or got[0] == payload(key)


def test_a_meta_block_beyond_the_reserve_is_read_all_the_same() -> None:
    (key,) = chain(1)
    inner = DictBackend()
    big = {"note": "x" * 9000}
    with store_over(inner) as store:
        item = items([key])[0]._replace(meta=big)
        assert store.submit_put([item]).result()[0].ok
        got = poisoned(1)
        assert store.submit_get(wants([key], got)).result()[0].ok
        assert got[0] == payload(key)
        header = store.submit_heads([key]).result()[0]
        assert header is not None
        assert header.meta() == big
        assert b"".join(build_record(key, SPEC, SPEC.split(memoryview(payload(key))), meta=big)) == _stored(inner, key)
