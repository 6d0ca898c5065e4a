"""Random work by several threads over backends that fail in every way they can. Whatever happens:

* every completion is resolved by its deadline (plus what a busy machine needs), and settled once no call hangs;
* what is OK has exactly the bytes that belong to its key; damage never passes;
* afterwards nothing is left: no pin, no buffer, no byte in the write queue, no job, no flight, no thread.

The script of faults and each thread's choices follow from a seed; how the threads interleave does not, so that one seed
sees many orders over the runs. `KVSTORE_STRESS_SEEDS=a-b` runs others.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from kvstore.backend import Backend, Outcome, Status
from kvstore.buffers import Buffer, BufferPool
from kvstore.completion import CancelledError, Completion
from kvstore.errors import ClosedError, PoolExhausted, TransientError
from kvstore.keys import Key, opaque_key
from kvstore.record import opaque_spec, parse_header
from kvstore.store import Item, Priority, Store, Want
from kvstore.testing import DictBackend, Fault, FaultyBackend
from kvstore_backends.memory import MemoryBackend
from tests.faults.support import DTYPE, SPEC, chain, payload, store_over

SLACK_S = 10.0  # for a machine that is busy with other things; a lost wake-up would take for ever
KEYS = chain(24)
SMALL = [opaque_key(f"small {number}") for number in range(12)]
SMALL_BYTES = 200
SMALL_SPEC = opaque_spec(SMALL_BYTES)


def faults(rng: random.Random, operation: str, count: int) -> list[Fault]:
    """A script for one operation: mostly well, then everything that can be scripted."""
    plain: dict[str, list[Callable[[], Fault]]] = {
        "stat": [Fault.miss, Fault.error, lambda: Fault.short(7)],
        "get": [
            Fault.miss, Fault.error, Fault.drop, lambda: Fault.short(rng.randrange(6000)),
            lambda: Fault.cut(rng.randrange(6000)), lambda: Fault.flip(rng.randrange(1 << 16)),
        ],
        "put": [
            Fault.error, Fault.drop, lambda: Fault.cut(10), lambda: Fault.short(rng.randrange(4000)),
            lambda: Fault.flip(rng.randrange(1 << 16)),
        ],
        "delete": [Fault.error, Fault.miss, Fault.drop],
        "quarantine": [Fault.error],
        "lease": [Fault.error, Fault.miss],
    }  # fmt: skip
    raised = [OSError(5, "io"), ValueError("x"), ClosedError("gone"), MemoryError(), SystemExit(1), TransientError("t")]

    def one() -> Fault:
        kind = rng.random()
        if kind < 0.55:
            return Fault.ok()
        if kind < 0.80:
            fault = rng.choice(plain[operation])()
            return fault.on(0) if rng.random() < 0.5 and operation != "lease" else fault
        if kind < 0.88:
            return Fault.raises(rng.choice(raised))
        if kind < 0.94:
            return Fault.late()
        return Fault.hang(rng.choice([Fault.ok, *plain[operation]])())

    return [one() for _ in range(count)]


@dataclass
class Pending:
    """A completion that somebody waits for."""

    done: Completion[Any]
    deadline: float
    resolved: float = 0.0

    def __post_init__(self) -> None:
        self.done.add_done_callback(self._note)

    def _note(self, done: Completion[Any]) -> None:
        self.resolved = time.monotonic()


class Worker:
    """One thread's random work."""

    def __init__(self, store: Store, pool: BufferPool, seed: str) -> None:
        self.store = store
        self.pool = pool
        self.rng = random.Random(seed)
        self.pending: list[Pending] = []
        self.trouble: list[str] = []
        self.steps = [self.get, self.get, self.put, self.put, self.get_small, self.ask, self.lease, self.blocking]

    def run(self, count: int) -> None:
        try:
            for _ in range(count):
                self.rng.choice(self.steps)()
        except ClosedError as error:
            if "the store" not in str(error):
                self.trouble.append(repr(error))
        except BaseException as error:
            self.trouble.append(repr(error))
            raise

    def deadline(self) -> float:
        return time.monotonic() + self.rng.choice([-0.01, 0.0, 0.002, 0.01, 0.03, 0.1, 0.3])

    def follow(self, done: Completion[Any], deadline: float) -> Any:
        """Wait for a completion, or cancel it, or look at it later. Its result, if there is one."""
        rng = self.rng
        self.pending.append(Pending(done, deadline))
        if rng.random() < 0.1:
            done.add_done_callback(self.disturb)
        choice = rng.random()
        if choice < 0.15:
            done.cancel()
        elif choice < 0.35:
            return None
        try:
            return done.result(SLACK_S + 1)
        except CancelledError:
            return None
        except TimeoutError:
            self.trouble.append("a completion was not resolved")
            return None
        except ClosedError:
            return None

    def disturb(self, done: Completion[Any]) -> None:
        """A callback as it should not be: it submits more, and raises."""
        try:
            self.store.submit_get(
                [Want(KEYS[0], memoryview(bytearray(SPEC.raw_bytes)), SPEC)], deadline=time.monotonic()
            )
        except ClosedError:
            pass
        raise RuntimeError("a callback that fails")

    def acquire(self, count: int, nbytes: int) -> list[Buffer]:
        try:
            return self.pool.acquire_many([nbytes] * count, 0)
        except PoolExhausted:
            return []

    def check(self, key: Key, view: Any, first: int, outcome: Outcome, spec: Any = SPEC) -> None:
        if not isinstance(outcome, Outcome):
            self.trouble.append(f"{outcome!r} is no outcome")
        elif outcome.ok:
            begin = sum(spec.sizes[:first])
            if bytes(view) != payload(key, spec.raw_bytes)[begin : begin + len(view)]:
                self.trouble.append(f"wrong bytes under {key!r}")
        elif (outcome.error is not None) != (outcome.status is Status.ERROR):
            self.trouble.append(f"{outcome!r} contradicts itself")

    def get(self) -> None:
        rng, wants, views, buffers = self.rng, [], [], []
        first = rng.choice([0, 0, 0, 1, 2])
        num = rng.randint(1, len(SPEC.sizes) - first)
        nbytes = sum(SPEC.sizes[first : first + num])
        keys = [rng.choice(KEYS) for _ in range(rng.choice([1, 1, 3, 8]))]
        if rng.random() < 0.5:
            buffers = self.acquire(len(keys), nbytes)
        for index, key in enumerate(keys):
            view = buffers[index].view if buffers else memoryview(bytearray(nbytes))
            view[:] = b"\xa5" * nbytes
            dst: Any = view
            if rng.random() < 0.3:
                dst, at = [], 0
                for size in SPEC.sizes[first : first + num]:
                    dst.append(view[at : at + size])
                    at += size
            views.append(view)
            wants.append(Want(key, dst, SPEC, first, num, buffers[index] if buffers else None))
        deadline = self.deadline()
        try:
            done = self.store.submit_get(wants, priority=rng.choice(list(Priority)), deadline=deadline)
            outcomes = self.follow(done, deadline)
            if outcomes is not None:
                for key, view, outcome in zip(keys, views, outcomes, strict=True):
                    self.check(key, view, first, outcome)
        finally:
            for buffer in buffers:
                buffer.release()  # late I/O keeps it out of the pool

    def get_small(self) -> None:
        keys = [self.rng.choice(SMALL) for _ in range(self.rng.choice([1, 5, 30]))]
        views = [memoryview(bytearray(SMALL_BYTES)) for _ in keys]
        wants = [Want(key, view, SMALL_SPEC) for key, view in zip(keys, views, strict=True)]
        deadline = self.deadline()
        outcomes = self.follow(self.store.submit_get(wants, deadline=deadline), deadline)
        for key, view, outcome in zip(keys, views, outcomes or [], strict=False):
            self.check(key, view, 0, outcome, SMALL_SPEC)

    def put(self) -> None:
        rng, items = self.rng, []
        keys = [rng.choice(KEYS) for _ in range(rng.choice([1, 1, 2, 6]))]
        buffers = self.acquire(len(keys), SPEC.raw_bytes) if rng.random() < 0.5 else []
        for index, key in enumerate(keys):
            data: Any = memoryview(payload(key))
            if buffers:
                buffers[index].view[:] = data
                data = buffers[index].view
            hold = buffers[index] if buffers else None
            items.append(Item(key, SPEC.split(data), SPEC, {"dtype": DTYPE}, None, hold))
        deadline = self.deadline()
        try:
            done = self.store.submit_put(items, priority=rng.choice(list(Priority)), deadline=deadline)
            for outcome in self.follow(done, deadline) or ():
                if outcome.status is Status.MISS:
                    self.trouble.append("a put that is a miss")
        finally:
            for buffer in buffers:
                buffer.release()

    def ask(self) -> None:
        rng, deadline = self.rng, self.deadline()
        keys = rng.sample(KEYS, rng.randint(1, 6))
        what = rng.choice(["lookup", "delete", "heads"])
        if what == "lookup":
            found = self.follow(self.store.submit_lookup(keys, deadline=deadline), deadline)
            if found is not None and not 0 <= found <= len(keys):
                self.trouble.append(f"{found} of {len(keys)} keys")
        elif what == "delete":
            self.follow(self.store.submit_delete(keys, deadline=deadline), deadline)
        else:
            heads = self.follow(self.store.submit_heads(keys, deadline=deadline), deadline)
            for head in heads or ():
                if head is not None and head.raw_bytes != SPEC.raw_bytes:
                    self.trouble.append("a header of another record")

    def lease(self) -> None:
        keys = self.rng.sample(KEYS, 3)
        deadline = self.deadline()
        done = self.store.submit_lease(keys, deadline=deadline)
        self.pending.append(Pending(done, deadline))
        if self.rng.random() < 0.3:
            done.cancel()
        try:
            leases = done.result(SLACK_S + 1)
        except (CancelledError, ClosedError):
            return
        for key, lease in zip(keys, leases, strict=True):
            if lease is not None:
                with lease:
                    for number, segment in enumerate(parse_header(lease.view, key=key).segments):
                        stored = lease.view[segment.offset : segment.offset + segment.length]
                        self.check(key, stored, number, Outcome(Status.OK))

    def blocking(self) -> None:
        rng = self.rng
        keys = rng.sample(SMALL, rng.randint(1, 5))
        timeout = rng.choice([0.0, 0.01, 0.1])
        try:
            if rng.random() < 0.6:
                self.store.put_many([(key, payload(key, SMALL_BYTES)) for key in keys], timeout=timeout)
                return
            for key, found in zip(keys, self.store.get_many(keys, timeout=timeout), strict=True):
                if found is not None:
                    self.check(key, found, 0, Outcome(Status.OK), SMALL_SPEC)
        except TransientError as error:
            if "still holds" not in str(error):
                self.trouble.append(repr(error))


def a_store(rng: random.Random) -> tuple[Store, list[FaultyBackend]]:
    count = rng.choice([1, 1, 2, 3])
    backends = []
    for number in range(count):
        inner: Backend = DictBackend(name=f"dict-{number}")
        if count == 1 and rng.random() < 0.4:
            inner = MemoryBackend(nbytes=1 << 17, name="memory")  # small: it evicts
        preferred = rng.choice([SPEC.sizes[0], SPEC.raw_bytes, 1 << 20])
        inner.limits = inner.limits.__class__(
            max_value_bytes=inner.limits.max_value_bytes, lanes=rng.choice([1, 2, 3]), preferred_io_bytes=preferred
        )
        backend = FaultyBackend(inner)
        for operation in ("stat", "get", "put", "delete", "quarantine", "lease"):
            backend.push(*faults(rng, operation, 150), operation=operation)
        backends.append(backend)
    store = store_over(
        *backends,
        replicas=rng.randint(1, min(2, count)),
        remote_serde=rng.choice(["raw", "raw", "lz4", "shuffle-zstd"]),
        buffer_pool_bytes=1 << 20,
        write_queue_bytes=rng.choice([1, 4 * SPEC.nbytes, 1 << 20]),
        close_timeout=5,
    )
    return store, backends


@contextmanager
def releasing(backends: list[FaultyBackend], seed: int) -> Iterator[None]:
    """Calls that hang go on sooner or later."""
    stop = threading.Event()

    def work() -> None:
        rng = random.Random(seed)
        while not stop.wait(rng.choice([0.001, 0.01, 0.05])):
            for backend in backends:
                backend.release(rng.choice([1, None]))

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        for backend in backends:
            backend.release()


def stress(seed: int, *, threads: int, steps: int) -> None:
    rng = random.Random(seed)
    store, backends = a_store(rng)
    early = rng.random() < 0.3  # close in the middle of it
    with BufferPool(32 * SPEC.raw_bytes) as pool, releasing(backends, seed):
        workers = [Worker(store, pool, f"{seed}/{number}") for number in range(threads)]
        running = [threading.Thread(target=worker.run, args=(steps,)) for worker in workers]
        for thread in running:
            thread.start()
        if early:
            running[0].join(rng.random() * 0.3)
            store.close(drain=rng.random() < 0.5, timeout=rng.choice([0.0, 0.05, 5.0]))
        for thread in running:
            thread.join(120)
            assert not thread.is_alive(), f"seed {seed}: a thread hangs"
        trouble = [line for worker in workers for line in worker.trouble]
        for each in [pending for worker in workers for pending in worker.pending]:
            try:
                each.done.result(SLACK_S)
            except (CancelledError, ClosedError):
                pass
            if each.resolved > each.deadline + SLACK_S:
                trouble.append(f"resolved {each.resolved - each.deadline:.3f} s late")
            if not each.done.settled(SLACK_S):
                trouble.append("never settled")
        assert not trouble, f"seed {seed}: {trouble[:5]}"
        end = time.monotonic() + SLACK_S
        while left := what_is_left(store, pool):
            assert time.monotonic() < end, f"seed {seed}: {left}"
            time.sleep(0.001)
        store.close()
        assert not what_is_left(store, pool), f"seed {seed}: {what_is_left(store, pool)}"


def what_is_left(store: Store, pool: BufferPool) -> list[str]:
    stats = store.stats()
    found = {
        "bytes in the write queue": stats["write_queue_bytes"],
        "puts": len(store._machinery.writer._current),
        "flights": len(store._machinery.reader.flights),
    }
    for owner, each in (("store", store.pool.stats()), ("caller", pool.stats())):
        found |= {f"{name} of the {owner}'s pool": getattr(each, name) for name in ("in_use", "pinned", "quarantined")}
    for target in store._machinery.targets:
        lanes = target.lanes
        found |= {f"{name} in {target.name}": lanes.stats()[name] for name in ("queued", "busy", "failures")}
        found |= {f"background in {target.name}": lanes._background}
    return [f"{value} {name}" for name, value in found.items() if value]


@pytest.mark.parametrize("seed", range(12))
def test_random_work_over_faulty_backends(seed: int) -> None:
    stress(seed, threads=4, steps=60)


def _seeds() -> range:
    first, _, last = os.environ.get("KVSTORE_STRESS_SEEDS", "100-160").partition("-")
    return range(int(first), int(last or first) + 1)


@pytest.mark.slow
@pytest.mark.parametrize("seed", _seeds())
def test_much_random_work_over_faulty_backends(seed: int) -> None:
    stress(seed, threads=6, steps=400)
