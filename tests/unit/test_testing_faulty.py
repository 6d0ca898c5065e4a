"""`FaultyBackend`: each fault does what its docstring says, once, where the script says."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from kvstore.backend import NO_DEADLINE, KeyInfo, Read, Status, Write
from kvstore.buffers import BufferPool
from kvstore.errors import ClosedError, ConfigError, PermanentError, TransientError
from kvstore.keys import Key
from kvstore.testing import Call, DictBackend, Fault, FaultyBackend

KEYS = [Key(bytes([i]) * 32) for i in range(4)]
DATA = bytes(range(100))


@pytest.fixture
def inner() -> DictBackend:
    backend = DictBackend()
    backend.records.update(dict.fromkeys(KEYS[:3], DATA))
    return backend


def get(backend: FaultyBackend, *keys: Key, length: int = 100, deadline: float = NO_DEADLINE) -> list[Any]:
    memories = [bytearray(b"\xa5" * length) for _ in keys]
    outcomes = backend.get_into(
        [Read(k, memoryview(m)) for k, m in zip(keys, memories, strict=True)], deadline=deadline
    )
    return [(outcome.status, outcome.nbytes, bytes(memory)) for outcome, memory in zip(outcomes, memories, strict=True)]


def put(backend: FaultyBackend, *keys: Key, data: bytes = b"new record") -> list[Any]:
    writes = [Write(key, [memoryview(data)[:3], memoryview(data)[3:]]) for key in keys]
    return [(outcome.status, outcome.nbytes) for outcome in backend.put(writes, deadline=NO_DEADLINE)]


def in_thread(work: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    results: list[Any] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:
            results.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, results


WHOLE = (Status.OK, 100, DATA)
UNTOUCHED = b"\xa5" * 100


def test_without_a_script_nothing_changes(inner: DictBackend) -> None:
    backend = FaultyBackend(inner)
    assert get(backend, *KEYS) == [WHOLE] * 3 + [(Status.MISS, 0, UNTOUCHED)]
    assert put(backend, KEYS[3], KEYS[0]) == [(Status.OK, 10), (Status.EXISTS, 0)]
    assert backend.name == inner.name
    assert backend.limits is inner.limits


def test_one_step_per_call_in_order(inner: DictBackend) -> None:
    backend = FaultyBackend(inner, [Fault.miss(), Fault.ok(), Fault.error()])
    assert get(backend, KEYS[0]) == [(Status.MISS, 0, UNTOUCHED)]
    assert get(backend, KEYS[0]) == [WHOLE]
    with pytest.raises(AssertionError, match="steps left: any: 1"):
        backend.assert_done()
    (outcome,) = backend.stat([KEYS[0]], deadline=NO_DEADLINE)
    assert isinstance(outcome.error, TransientError)
    assert (outcome.error.backend, outcome.error.operation, outcome.error.key) == ("dict", "stat", KEYS[0])
    assert get(backend, KEYS[0]) == [WHOLE]
    backend.assert_done()


def test_steps_per_operation_and_otherwise(inner: DictBackend) -> None:
    gone = PermanentError("gone")
    backend = FaultyBackend(inner, {"get": [Fault.miss()], "delete": [Fault.drop()]}, otherwise=Fault.error(gone))
    assert backend.stat(KEYS[:1], deadline=NO_DEADLINE)[0].error is gone
    assert get(backend, KEYS[0])[0][0] is Status.MISS
    assert backend.delete(KEYS[:1], deadline=NO_DEADLINE)[0].ok
    assert KEYS[0] in inner.records
    assert get(backend, KEYS[0])[0][0] is Status.ERROR
    backend.assert_done()


def test_steps_per_key_are_consumed_by_calls_that_have_it(inner: DictBackend) -> None:
    backend = FaultyBackend(inner, by_key={KEYS[1]: [Fault.miss(), Fault.flip(0)], ("put", KEYS[3]): [Fault.drop()]})
    assert get(backend, KEYS[0], KEYS[2]) == [WHOLE, WHOLE]
    assert get(backend, KEYS[0], KEYS[1], KEYS[1]) == [WHOLE, (Status.MISS, 0, UNTOUCHED), (Status.MISS, 0, UNTOUCHED)]
    assert get(backend, KEYS[1])[0][2] == bytes([1]) + DATA[1:]
    assert get(backend, KEYS[3])[0][0] is Status.MISS
    assert put(backend, KEYS[3]) == [(Status.OK, 10)]
    assert KEYS[3] not in inner.records
    backend.assert_done()


def test_an_item_of_a_batch(inner: DictBackend) -> None:
    backend = FaultyBackend(inner, [Fault.error().on(2), Fault.each({0: Fault.miss(), 1: Fault.short(7)})])
    assert [status for status, _, _ in get(backend, *KEYS)] == [Status.OK, Status.OK, Status.ERROR, Status.MISS]
    assert get(backend, *KEYS[:3]) == [
        (Status.MISS, 0, UNTOUCHED),
        (Status.OK, 7, DATA[:7] + b"\xa5" * 93),
        WHOLE,
    ]
    backend.assert_done()


def test_raises_anything(inner: DictBackend) -> None:
    for error in (OSError(5, "I/O"), ValueError("foreign"), KeyboardInterrupt(), ClosedError("gone"), MemoryError):
        backend = FaultyBackend(inner, [Fault.raises(error)])
        kind = error if isinstance(error, type) else type(error)
        with pytest.raises(kind):
            get(backend, KEYS[0])
        assert isinstance(backend.calls[0].exception, kind)
        assert get(backend, KEYS[0]) == [WHOLE]


def test_faults_of_a_body(inner: DictBackend) -> None:
    backend = FaultyBackend(inner, [Fault.short(10), Fault.cut(10), Fault.flip(805), Fault.flip(-1), Fault.drop()])
    assert get(backend, KEYS[0]) == [(Status.OK, 10, DATA[:10] + b"\xa5" * 90)]
    assert get(backend, KEYS[0]) == [(Status.ERROR, 0, DATA[:10] + b"\xa5" * 90)]
    assert get(backend, KEYS[0]) == [(Status.OK, 100, bytes([1 << 5]) + DATA[1:])]
    assert get(backend, KEYS[0]) == [(Status.OK, 100, DATA[:99] + bytes([99 ^ 128]))]
    assert get(backend, KEYS[0]) == [(Status.OK, 100, UNTOUCHED)]
    assert inner.records[KEYS[0]] == DATA


def test_a_fault_of_a_body_finds_no_record(inner: DictBackend) -> None:
    backend = FaultyBackend(inner, [Fault.cut(10), Fault.flip(3), Fault.short(5)])
    for _ in range(3):
        assert get(backend, KEYS[3]) == [(Status.MISS, 0, UNTOUCHED)]


def test_faults_of_a_put(inner: DictBackend) -> None:
    backend = FaultyBackend(inner, [Fault.short(4), Fault.flip(8), Fault.cut(4), Fault.drop()])
    a, b, c, d = (Key(bytes([9, i]) * 16) for i in range(4))
    source = bytearray(b"new record")
    for key in (a, b, c, d):
        status = backend.put([Write(key, [memoryview(source)])], deadline=NO_DEADLINE)[0].status
        assert status is (Status.ERROR if key == c else Status.OK)
    assert source == b"new record"
    assert inner.records[a] == b"new "
    assert inner.records[b] == b"n" + bytes([ord("e") ^ 1]) + b"w record"
    assert c not in inner.records
    assert d not in inner.records
    assert put(backend, c) == [(Status.OK, 10)]


def test_a_short_stat(inner: DictBackend) -> None:
    backend = FaultyBackend(inner, [Fault.short(3), Fault.miss()])
    assert backend.stat(KEYS[:1], deadline=NO_DEADLINE) == [(Status.OK, 3, None)]
    assert backend.stat(KEYS[:1], deadline=NO_DEADLINE) == [(Status.MISS, 0, None)]


def test_a_hang_lasts_until_release_and_keeps_the_deadline(inner: DictBackend) -> None:
    backend = FaultyBackend(inner, [Fault.hang(), Fault.hang(Fault.miss()), Fault.hang(Fault.raises(OSError))])
    calls: list[Any] = []
    for number, key in enumerate(KEYS[:3]):
        calls.append(in_thread(lambda key=key: get(backend, key, deadline=time.monotonic() + 60)))
        backend.wait_hung(number + 1)
    assert backend.hung == 3
    assert [call.done for call in backend.calls] == [False] * 3
    assert backend.release(1) == 1
    calls[0][0].join(30)
    assert calls[0][1] == [[WHOLE]]
    assert calls[1][0].is_alive()
    assert backend.release() == 2
    for thread, _ in calls:
        thread.join(30)
    assert calls[1][1] == [[(Status.MISS, 0, UNTOUCHED)]]
    assert isinstance(calls[2][1][0], OSError)
    backend.assert_done()


def test_a_hang_past_the_deadline_fails(inner: DictBackend) -> None:
    backend = FaultyBackend(inner, [Fault.hang()])
    thread, results = in_thread(lambda: get(backend, KEYS[0], deadline=time.monotonic()))
    backend.wait_hung()
    backend.release()
    thread.join(30)
    assert results == [[(Status.ERROR, 0, UNTOUCHED)]]


def test_late_success_writes_only_then_even_after_close(inner: DictBackend) -> None:
    backend = FaultyBackend(inner, [Fault.late()])
    memory = bytearray(b"\xa5" * 120)
    read = Read(KEYS[0], memoryview(memory))
    thread, results = in_thread(lambda: backend.get_into([read], deadline=time.monotonic()))
    backend.wait_hung()
    assert memory == b"\xa5" * 120
    backend.close()
    assert thread.is_alive()
    backend.release()
    thread.join(30)
    assert results == [[(Status.OK, 100, None)]]
    assert memory == DATA + b"\xa5" * 20


def test_late_success_of_other_operations(inner: DictBackend) -> None:
    backend = FaultyBackend(inner, {"put": [Fault.late()], "stat": [Fault.late().on(0)], "list": [Fault.late()]})
    works: list[tuple[Callable[[], Any], Any]] = [
        (lambda: backend.put([Write(KEYS[3], [memoryview(b"1")])], deadline=0.0), [(Status.OK, 1, None)]),
        (lambda: backend.stat(KEYS[:1], deadline=0.0), [(Status.OK, 100, None)]),
        (lambda: list(backend.list(deadline=0.0)), [[*[KeyInfo(key, 100) for key in KEYS[:3]], KeyInfo(KEYS[3], 1)]]),
    ]
    for work, wanted in works:
        thread, results = in_thread(work)
        backend.wait_hung()
        backend.release()
        thread.join(30)
        assert results == [wanted]


def test_a_forgotten_hang_ends_in_an_error(inner: DictBackend) -> None:
    backend = FaultyBackend(inner, [Fault.hang()], hang_limit_s=0.01)
    with pytest.raises(RuntimeError, match="not released"):
        get(backend, KEYS[0])
    assert backend.hung == 0


def test_an_item_that_hangs_hangs_its_batch(inner: DictBackend) -> None:
    backend = FaultyBackend(inner, by_key={KEYS[1]: [Fault.hang(Fault.error())]})
    thread, results = in_thread(lambda: get(backend, *KEYS[:3]))
    backend.wait_hung()
    backend.release()
    thread.join(30)
    assert [status for status, _, _ in results[0]] == [Status.OK, Status.ERROR, Status.OK]


def test_list_and_close_and_register(inner: DictBackend) -> None:
    script = {
        "list": [Fault.miss(), Fault.cut(1), Fault.cut(0), Fault.error(PermanentError("no")), Fault.ok()],
        "close": [Fault.raises(OSError)],
        "register": [Fault.raises(OSError)],
    }
    backend = FaultyBackend(inner, script)
    assert list(backend.list(deadline=NO_DEADLINE)) == []
    pages = backend.list(deadline=NO_DEADLINE)
    assert len(next(pages)) == 3
    with pytest.raises(TransientError):
        next(pages)
    with pytest.raises(TransientError):
        next(backend.list(deadline=NO_DEADLINE))
    with pytest.raises(PermanentError):
        backend.list(deadline=NO_DEADLINE)
    assert len(list(backend.list(deadline=NO_DEADLINE))) == 1
    with BufferPool(4096) as pool, pytest.raises(OSError, match=r"^$"):
        backend.register(pool.slabs[0])
    with pytest.raises(OSError, match=r"^$"):
        backend.close()
    backend.close()
    backend.assert_done()


def test_close_and_register_consume_no_general_step(inner: DictBackend) -> None:
    backend = FaultyBackend(inner, [Fault.miss()])
    with BufferPool(4096) as pool:
        backend.register(pool.slabs[0])
    assert get(backend, KEYS[0])[0][0] is Status.MISS
    backend.close()


class Leasing(DictBackend):
    def __init__(self, pool: BufferPool) -> None:
        super().__init__()
        self.pool = pool

    def lease(self, keys: Any, *, deadline: float) -> list[Any]:
        return [self.pool.acquire(8) for _ in keys]


def test_leases() -> None:
    with BufferPool(1 << 16) as pool:
        backend = FaultyBackend(Leasing(pool), [Fault.miss().on(1), Fault.error(), Fault.raises(OSError)])
        leases = backend.lease(KEYS[:3], deadline=NO_DEADLINE)
        assert [lease is None for lease in leases] == [False, True, False]
        assert backend.lease(KEYS[:2], deadline=NO_DEADLINE) == [None, None]
        with pytest.raises(OSError, match=r"^$"):
            backend.lease(KEYS[:2], deadline=NO_DEADLINE)
        for lease in leases:
            if lease is not None:
                lease.release()


def test_what_was_called(inner: DictBackend) -> None:
    backend = FaultyBackend(inner, [Fault.ok(), Fault.miss()])
    backend.get_into(
        [Read(KEYS[0], memoryview(bytearray(10)), 5), Read(KEYS[3], memoryview(bytearray(4)))], deadline=NO_DEADLINE
    )
    get(backend, KEYS[0])
    put(backend, KEYS[3], KEYS[0])
    first, second, third = backend.calls
    assert (first.operation, first.keys, first.ranges, first.nbytes) == (
        "get",
        (KEYS[0], KEYS[3]),
        ((5, 10), (0, 4)),
        14,
    )
    assert first.outcomes == [(Status.OK, 10, None), (Status.MISS, 0, None)]
    assert first.done
    assert second.fault == Fault.miss()
    assert (third.operation, third.nbytes) == ("put", 20)
    assert backend.count("get") == 3
    assert backend.count("get", KEYS[0]) == 2
    assert backend.calls_of("put") == [third]
    assert isinstance(first, Call)


def test_a_fault_that_cannot_happen_is_told(inner: DictBackend) -> None:
    backend = FaultyBackend(inner, {"put": [Fault.miss()], "stat": [Fault.miss().on(3)]})
    with pytest.raises(TypeError, match=r"Fault\.miss does not apply to put"):
        put(backend, KEYS[3])
    backend.stat(KEYS[:1], deadline=NO_DEADLINE)
    with pytest.raises(AssertionError, match="miss on put, stat of 1 items has no item 3"):
        backend.assert_done()
    with pytest.raises(ConfigError, match=r"no operation 'read'"):
        FaultyBackend(inner, {"read": [Fault.miss()]})
    with pytest.raises(ConfigError, match=r"no operation 'read'"):
        FaultyBackend(inner, by_key={("read", KEYS[0]): [Fault.miss()]})


def test_many_threads_consume_each_step_once(inner: DictBackend) -> None:
    backend = FaultyBackend(inner, [Fault.miss()] * 200)
    hits: list[int] = []

    def work() -> None:
        hits.extend(get(backend, KEYS[0])[0][0] is Status.OK for _ in range(100))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    backend.wait_done(400, "get")
    for thread in threads:
        thread.join()
    assert sum(hits) == 200
    assert len(backend.calls) == 400
    with pytest.raises(TimeoutError, match="400 calls ended"):
        backend.wait_done(401, timeout=0.01)
    with pytest.raises(TimeoutError, match="0 calls hang"):
        backend.wait_hung(timeout=0.01)
