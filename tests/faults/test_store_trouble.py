"""Whatever a backend, a caller or the system does to a store: nobody waits for ever, and nothing stays pinned."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore import writes
from kvstore.backend import EXISTS, MISS, OK, Outcome, Read, Status, Write
from kvstore.buffers import Buffer, BufferPool
from kvstore.completion import Completion
from kvstore.errors import ClosedError, ConfigError, TransientError
from kvstore.keys import Key, opaque_key
from kvstore.reads import _read
from kvstore.record import opaque_spec
from kvstore.scheduler import Batch
from kvstore.store import Item, Want
from kvstore.testing import DictBackend, Fault, FaultyBackend
from kvstore.timer import Timer
from tests.faults.store_support import RAW, faulty, idle, until
from tests.faults.support import SPEC, chain, items, payload, poisoned, soon, store_over, wants

# Whatever happens inside, nobody waits for ever and nothing stays pinned.


class _Rude(DictBackend):
    """Answers with what is no answer, as many times as told."""

    def __init__(self, answer: Any) -> None:
        super().__init__(lanes=1)
        self.answer = answer
        self.rude = True

    def get_into(self, reads: Sequence[Read], *, deadline: float) -> list[Outcome]:
        return [self.answer] * len(reads) if self.rude else super().get_into(reads, deadline=deadline)

    def put(self, writes: Sequence[Write], *, deadline: float) -> list[Outcome]:
        return [self.answer] * len(writes) if self.rude else super().put(writes, deadline=deadline)

    def stat(self, keys: Sequence[Key], *, deadline: float) -> list[Outcome]:
        return [self.answer] * len(keys) if self.rude else super().stat(keys, deadline=deadline)


@pytest.mark.parametrize("answer", [None, 7, (Status.OK,)])
@pytest.mark.parametrize("serde", ["raw", "lz4"])
def test_a_backend_that_answers_nonsense_costs_an_error_and_nothing_else(answer: Any, serde: str) -> None:
    keys = chain(3)
    backend = _Rude(answer)
    with store_over(backend, remote_serde=serde) as store, BufferPool(1 << 20) as pool:
        for _ in range(2):
            buffers = pool.acquire_many([RAW] * 3)
            put = store.submit_put([i._replace(hold=b) for i, b in zip(items(keys), buffers, strict=True)])
            got = store.submit_get([Want(k, b.view, SPEC, hold=b) for k, b in zip(keys, buffers, strict=True)])
            for done in (put, got):
                assert all(outcome.status is Status.ERROR for outcome in done.result(20))
                assert done.settled(20)
            for buffer in buffers:
                buffer.release()
            assert pool.stats()[1:5] == (0, 0, 0, 0)
            assert store.stats()["write_queue_bytes"] == 0
        backend.rude = False
        assert all(outcome.ok for outcome in store.submit_put(items(keys)).result(20))
        assert all(outcome.ok for outcome in store.submit_get(wants(keys, poisoned(3))).result(20))


class _BadMap(dict[str, Any]):
    def items(self) -> Any:
        raise RuntimeError("dictionary changed size during iteration")


def test_a_record_that_cannot_be_built_fails_alone_and_its_name_stays_free() -> None:
    keys = chain(3)
    with store_over(DictBackend()) as store:
        bad = items(keys)
        bad[1] = bad[1]._replace(meta=_BadMap(x=1))
        assert [outcome.ok for outcome in store.submit_put(bad).result(20)] == [True, False, True]
        assert store.submit_put(items(keys[1:2])).result(20)[0].ok
        assert store._machinery.writer.drain(time.monotonic() + 1)


@pytest.mark.parametrize("operation", ["get", "put"])
def test_a_released_buffer_in_a_batch_refuses_it_and_pins_nothing(operation: str) -> None:
    keys = chain(3)
    with store_over(DictBackend()) as store, BufferPool(1 << 20) as pool:
        buffers = pool.acquire_many([RAW] * 3)
        views = [memoryview(bytearray(RAW)) for _ in buffers]
        buffers[2].release()
        three = zip(items(keys), views, buffers, strict=True)
        want = [Want(item.key, view, SPEC, hold=hold) for item, view, hold in three]
        put = [item._replace(hold=hold) for item, hold in zip(items(keys), buffers, strict=True)]
        call = (lambda: store.submit_get(want)) if operation == "get" else (lambda: store.submit_put(put))
        with pytest.raises(ClosedError):
            call()
        buffers[0].release()
        buffers[1].release()
        assert pool.stats()[1:5] == (0, 0, 0, 0)
        assert all(outcome.ok for outcome in store.submit_put(items(keys)).result(20))
        assert all(outcome.ok for outcome in store.submit_get(wants(keys, poisoned(3))).result(20))


def test_a_released_view_is_refused_with_a_sentence() -> None:
    view = memoryview(bytearray(RAW))
    view.release()
    with store_over(DictBackend()) as store, pytest.raises(ConfigError, match="memoryview"):
        store.submit_get([Want(chain(1)[0], view, SPEC)])


@pytest.mark.parametrize("raised", [ValueError("x"), SystemExit(3), asyncio.CancelledError(), KeyboardInterrupt()])
def test_a_callback_that_raises_hurts_nobody(raised: BaseException, caplog: pytest.LogCaptureFixture) -> None:
    (key,) = chain(1)
    backend = faulty()

    def callback(done: Completion[Any]) -> None:
        raise raised

    with store_over(backend) as store:
        store.submit_put(items([key])).result()
        backend.push(Fault.hang(), operation="get")
        leader = store.submit_get(wants([key], poisoned(1)))
        backend.wait_hung()
        riders = [store.submit_get(wants([key], poisoned(1))) for _ in range(3)]
        for done in (leader, *riders):
            done.add_done_callback(callback)
        backend.release()
        for done in (leader, *riders):
            assert done.result(20)[0].ok
            assert done.settled(20)
        # The timer's thread survives one, too.
        backend.push(Fault.hang(), operation="get")
        late = [store.submit_get(wants([key], poisoned(1)), deadline=time.monotonic() + 0.02 * n) for n in (1, 2, 3)]
        for done in late:
            done.add_done_callback(callback)
        assert all(done.result(20)[0].status is Status.ERROR for done in late)
        backend.release()
        assert "a callback failed" in caplog.text
        until(lambda: idle(store))


def test_callbacks_submit_more_from_the_only_lane() -> None:
    keys = chain(2)
    finished = threading.Event()
    results: list[bool] = []
    with store_over(faulty()) as store:
        store.submit_put(items(keys)).result()

        def go_on(done: Completion[Any]) -> None:
            results.append(done.result(0)[0].ok)
            if len(results) == 300:
                finished.set()
            else:
                store.submit_get(wants(keys[:1], poisoned(1))).add_done_callback(go_on)

        store.submit_get(wants(keys[:1], poisoned(1))).add_done_callback(go_on)
        assert finished.wait(20)
    assert all(results)


def test_without_threads_every_call_fails_at_once_and_the_store_still_closes(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = chain(2)

    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    store = store_over(DictBackend())
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        assert all(o.status is Status.ERROR for o in store.submit_get(wants(keys, poisoned(2))).result(20))
        assert all(o.status is Status.ERROR for o in store.submit_put(items(keys)).result(20))
        assert store.submit_lookup(keys).result(20) == 0
        store.submit_put(items(keys), deadline=float("inf")).result(20)
    assert all(outcome.ok for outcome in store.submit_put(items(keys)).result(20))
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        assert all(outcome.ok for outcome in store.submit_get(wants(keys, poisoned(2))).result(20))
        store.close()


@pytest.mark.parametrize("far", [1e12, 1e300, float("inf")])
def test_far_deadlines_end_no_thread(far: float) -> None:
    keys = chain(2)
    backend = faulty({"get": [Fault.hang()]})
    with store_over(backend) as store:
        endless = store.submit_get(wants(keys[:1], poisoned(1)), deadline=far)
        backend.wait_hung()
        assert store.submit_get(wants(keys[1:], poisoned(1)), deadline=time.monotonic() + 0.05).result(20)
        assert not endless.done()
        backend.release()
        assert endless.result(20)[0].status is Status.MISS
        with pytest.raises(ConfigError, match="deadline"):
            store.submit_lookup(keys, deadline=float("nan"))


def test_a_foreign_error_in_an_outcome_reaches_the_caller_when_errors_are_raised() -> None:
    backend = _Rude(Outcome(Status.ERROR, 0, ValueError("theirs")))  # type: ignore[arg-type]
    with store_over(backend, on_error="raise") as store:
        with pytest.raises(ValueError, match="theirs"):
            store.submit_get(wants(chain(1), poisoned(1))).result(20)
        with pytest.raises(ValueError, match="theirs"):
            store.submit_put(items(chain(1))).result(20)
        assert store.submit_lease(chain(2)).result(20) == [None, None]
        assert store.submit_lookup(chain(2)).result(20) == 0


def test_on_error_raise_lets_misses_and_existing_records_pass() -> None:
    keys = chain(2)
    with store_over(DictBackend(), on_error="raise") as store:
        store.submit_put(items(keys)).result()
        assert store.submit_put(items(keys)).result() == [EXISTS, EXISTS]
        assert store.submit_get(wants(chain(1, start=77), poisoned(1))).result() == [MISS]
        assert store.submit_delete(keys).result() == [OK, OK]


# Blocking calls.


def test_put_many_waits_for_room_that_background_writes_take() -> None:
    backend = faulty({"put": [Fault.hang()]}, lanes=2)
    keys = chain(2)
    with store_over(backend, write_queue_bytes=2 * SPEC.nbytes) as store:
        background = store.submit_put(items(keys))
        backend.wait_hung()
        outcomes: list[Outcome] = []
        values = {f"name {n}": bytes(SPEC.nbytes // 2) for n in range(9)}
        thread = threading.Thread(target=lambda: outcomes.extend(store.put_many(values)))
        thread.start()
        assert store.submit_put(items(chain(1, start=999))).result(20)[0].status is Status.ERROR  # no room
        backend.release()
        thread.join(20)
        assert [outcome.ok for outcome in outcomes] == [True] * 9
        assert all(outcome.ok for outcome in background.result(20))
        until(lambda: idle(store))


def test_put_many_gets_the_room_that_it_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others may come at any moment before it is in the queue: it waits for them too."""
    real, others = writes.pin_all, [chain(1, start=n * 100) for n in range(3)]
    backend = faulty()
    with store_over(backend, write_queue_bytes=2 * SPEC.nbytes) as store:
        dones: list[Completion[Any]] = []

        def rush(holds: Sequence[Any]) -> None:
            monkeypatch.setattr(writes, "pin_all", real)
            backend.push(Fault.hang(), operation="put")
            dones.append(store.submit_put(items([*others[0], *others[1]])))
            backend.wait_hung()
            releaser.start()
            real(holds)

        def let_go() -> None:
            until(lambda: store._machinery.writer._less._waiters)  # type: ignore[attr-defined]
            backend.release()

        releaser = threading.Thread(target=let_go)
        monkeypatch.setattr(writes, "pin_all", rush)
        outcomes = store.put_many({"x": bytes(SPEC.nbytes)})
        releaser.join(20)
        assert [outcome.status for outcome in outcomes] == [Status.OK]
        assert all(outcome.ok for outcome in dones[0].result(20))
        until(lambda: idle(store))


def test_an_interrupt_while_waiting_for_room_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = faulty({"put": [Fault.hang()]})

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with store_over(backend, write_queue_bytes=SPEC.nbytes) as store:
        background = store.submit_put(items(chain(1)))
        backend.wait_hung()
        writer = store._machinery.writer
        with monkeypatch.context() as patch:
            patch.setattr(writer, "_await_room", interrupted)
            with pytest.raises(KeyboardInterrupt):
                store.put_many({"x": bytes(SPEC.nbytes)})
        assert (writer.queued_bytes, len(writer._current)) == (SPEC.nbytes, 1)
        assert all(not batch.alive for batch in store._machinery._batches if batch.completion is not background)
        backend.release()
        assert background.result(20)[0].ok
        assert store.put_many({"x": bytes(SPEC.nbytes)})[0].status is Status.OK
        until(lambda: idle(store))


def test_blocking_calls_end_while_a_backend_hangs() -> None:
    backend = faulty({"get": [Fault.hang()], "put": [Fault.hang()] * 2}, lanes=4)
    ends: dict[str, Any] = {}

    def call(name: str, work: Callable[[], Any]) -> None:
        try:
            ends[name] = work()
        except TransientError as error:
            ends[name] = error

    with store_over(backend) as store:
        calls: dict[str, Callable[[], Any]] = {
            "get": lambda: store.get_many(["x"], into=[bytearray(8)], timeout=1.5),
            "put": lambda: store.put_many({"y": bytearray(8)}, timeout=1.5),
            "constant": lambda: store.put_many({"z": bytes(8)}, timeout=1.5),  # nothing can change it
        }
        threads = [threading.Thread(target=call, args=each) for each in calls.items()]
        for thread in threads:
            thread.start()
        backend.wait_hung(3)
        for thread in threads:
            thread.join(20)
        assert "still holds" in str(ends["get"])
        assert "still holds" in str(ends["put"])
        assert [outcome.status for outcome in ends["constant"]] == [Status.ERROR]
        until(lambda: (backend.release(), idle(store))[1])


def test_an_interrupt_while_waiting_withdraws_what_has_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = faulty({"get": [Fault.hang()]})

    def interrupted(self: Completion[Any], timeout: float | None = None) -> Any:
        raise KeyboardInterrupt

    with store_over(backend) as store:
        running = store.submit_get(wants(chain(1), poisoned(1)))
        backend.wait_hung()
        with monkeypatch.context() as patch:
            patch.setattr(Completion, "result", interrupted)
            with pytest.raises(KeyboardInterrupt):
                store.get_many(["x"], into=[bytearray(4)])
            with pytest.raises(KeyboardInterrupt):
                store.put_many({"x": bytearray(4)})
        assert store.stats()["backends"]["dict"]["queued"] == 0
        assert store.stats()["write_queue_bytes"] == 0
        backend.release()
        assert running.result(20)


# Many, and few.


def test_no_items_at_all() -> None:
    with store_over(DictBackend()) as store:
        assert store.submit_get([]).result(0) == []
        assert store.submit_put([]).result(0) == []
        assert store.submit_delete([]).result(0) == []
        assert store.submit_lease([]).result(0) == []
        assert store.submit_heads([]).result(0) == []
        assert store.submit_lookup([]).result(0) == 0
        assert store.put_many({}) == []
        assert store.get_many([]) == []


def test_a_batch_of_a_hundred_thousand() -> None:
    spec = opaque_spec(1)
    keys = [opaque_key(str(number)) for number in range(2000)] * 50
    byte = memoryview(b"x")
    memory = memoryview(bytearray(len(keys)))
    with store_over(DictBackend(), write_queue_bytes=1 << 30) as store:
        outcomes = store.submit_put([Item(key, (byte,), spec) for key in keys], deadline=soon(60)).result()
        assert all(outcome.stored for outcome in outcomes)
        views = [memory[at : at + 1] for at in range(len(keys))]
        got = store.submit_get([Want(key, view, spec) for key, view in zip(keys, views, strict=True)]).result()
        assert all(outcome.ok for outcome in got)
        assert memory == b"x" * len(keys)
        assert store.submit_lookup(keys).result() == len(keys)
        until(lambda: idle(store))


def test_the_timer_forgets_batches_that_ended_long_before_their_deadline() -> None:
    timer = Timer()
    deadline = time.monotonic() + 3600
    open_ = [Batch(1, deadline, list) for _ in range(300)]
    for batch in open_:
        timer.watch(batch, lambda: MISS)
    most = 0
    for number in range(100_000):
        batch = Batch(1, deadline, list)
        timer.watch(batch, lambda: MISS)
        batch.settle([(0, OK)])
        if number % 1000 == 0:
            most = max(most, timer.pending())
    assert most < 2000
    assert timer.pending() >= 300
    timer.close()


def test_nothing_is_left_for_the_garbage_collector() -> None:
    keys = chain(3)
    with store_over(DictBackend()) as store:
        store.submit_put(items(keys)).result()
        seen: list[weakref.ref[Any]] = []

        def submit() -> list[Completion[Any]]:
            done: list[Completion[Any]] = [
                store.submit_lookup(keys), store.submit_get(wants(keys, poisoned(3))), store.submit_put(items(keys)),
                store.submit_lease(keys), store.submit_delete(chain(2, start=50)), store.submit_heads(keys),
            ]  # fmt: skip
            batches = list(store._machinery._batches)
            seen.extend(weakref.ref(batch) for batch in batches)
            for each in done:
                each.add_done_callback(lambda _: None)
                each.result(20)
            return done

        submit()
        gc.collect()
        seen.clear()
        gc.disable()
        try:
            for _ in range(20):
                submit()
            until(lambda: not any(ref() is not None for ref in seen))
        finally:
            gc.enable()


# The fast path.


@settings(max_examples=80)
@given(
    kinds=st.lists(
        st.sampled_from(["ok", "error", "miss", "drop", "cut", "short", "flip", "gone"]), min_size=1, max_size=9
    ),
    amount=st.integers(0, 9000),
    size=st.sampled_from([0, 1, 64, 5000]),
)
def test_the_fast_path_of_reads_equals_the_general_one(kinds: list[str], amount: int, size: int) -> None:
    seen = []
    for quick in (True, False):
        keys = [opaque_key(f"{number}") for number in range(len(kinds))]
        made = {
            "ok": Fault.ok(), "error": Fault.error(), "miss": Fault.miss(), "drop": Fault.drop(),
            "cut": Fault.cut(amount), "short": Fault.short(amount), "flip": Fault.flip(amount), "gone": Fault.ok(),
        }  # fmt: skip
        script = {("get", key): [made[kind]] for key, kind in zip(keys, kinds, strict=True)}
        inner = DictBackend()
        with store_over(FaultyBackend(inner, by_key=script)) as store:
            store._machinery.reader.quick = quick
            store.put_many([(key, payload(key, size)) for key in keys])
            for key, kind in zip(keys, kinds, strict=True):
                if kind == "gone":
                    del inner.records[key]
            got = poisoned(len(keys), size)
            outcomes = store.submit_get(wants(keys, got, opaque_spec(size))).result(20)
            for key, dst, outcome in zip(keys, got, outcomes, strict=True):
                assert not outcome.ok or dst == payload(key, size)
            stats = {name: value for name, value in store.stats().items() if isinstance(value, int)}
            seen.append(([(o.status, o.nbytes, type(o.error), str(o.error)) for o in outcomes], stats))
    assert seen[0] == seen[1]


def test_a_read_made_in_a_hurry_is_a_read() -> None:
    key, view = chain(1)[0], memoryview(bytearray(1))
    made = _read((key, view, 5, None))
    assert type(made) is Read
    assert made == Read(key, view, 5)
    assert len(made) == len(Read._fields)


# Leases.


class _Leasing(DictBackend):
    """Leases everything; what it leases is good, bad, or too few."""

    def __init__(self, pool: BufferPool, how: str) -> None:
        super().__init__(lanes=1)
        self.pool, self.how = pool, how

    def lease(self, keys: Sequence[Key], *, deadline: float) -> list[Buffer | None]:
        leases: list[Buffer | None] = []
        for key in keys:
            data = self.records[key]
            buffer = self.pool.acquire(len(data))
            buffer.view[:] = data
            if self.how == "bad":
                buffer.view[-1] ^= 1
            leases.append(buffer)
        if self.how == "raises":
            leases[-1].release()  # type: ignore[union-attr]
        return leases + [None] * (self.how == "many")


@pytest.mark.parametrize("how", ["good", "bad", "many", "raises"])
def test_leases_that_nobody_gets_are_given_back(how: str) -> None:
    keys = chain(3)
    with BufferPool(1 << 20) as pool, store_over(_Leasing(pool, how)) as store:
        store.submit_put(items(keys)).result()
        leases = store.submit_lease(keys).result(20)
        usable = {"good": [True] * 3, "raises": [True, True, False]}.get(how, [False] * 3)
        assert [lease is not None for lease in leases] == usable
        for lease in leases:
            if lease is not None:
                lease.release()
        assert pool.stats().in_use == 0
        assert "corrupt_records" not in store.stats()  # what is stored is good


def test_a_corrupt_record_that_is_leased_is_counted_and_put_aside(caplog: pytest.LogCaptureFixture) -> None:
    keys = chain(3)
    with BufferPool(1 << 20) as pool:
        backend = _Leasing(pool, "good")
        with store_over(backend) as store:
            store.submit_put(items(keys)).result()
            backend.records[keys[1]] = backend.records[keys[1]][:-1] + b"?"
            leases = store.submit_lease(keys).result(20)
            assert [lease is not None for lease in leases] == [True, False, True]
            for lease in leases:
                if lease is not None:
                    lease.release()
            assert pool.stats().in_use == 0
            assert [key for key, _ in backend.quarantined] == [keys[1]]
            assert store.stats()["corrupt_records"] == 1
            assert f"corrupt record {keys[1][:6].hex()}" in caplog.text
            assert store.submit_put(items(keys)).result(20)[1].status is Status.OK  # healed
