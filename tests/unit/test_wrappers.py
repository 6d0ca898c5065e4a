"""What all wrappers share: forwarding, mapping of what a broken backend raises, closing; the standard stack."""

from __future__ import annotations

import math
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from kvstore.backend import MISS, OK, Backend, Capability, KeyInfo, Limits, Outcome, Read, Status, Write
from kvstore.buffers import BufferPool
from kvstore.errors import ClosedError, ConfigError, PermanentError, TransientError
from kvstore.keys import Key
from kvstore.metrics import Metrics
from kvstore.options import format_manual, parse_options
from kvstore.testing import DictBackend, Fault, FaultyBackend, LeakAudit, assert_forwards_everything
from kvstore.wrappers import (
    WRAPPER_OPTIONS,
    BreakerBackend,
    HedgedBackend,
    LimitedBackend,
    MeteredBackend,
    RetryingBackend,
    Wrapper,
    hedge,
    unwrap,
    wrap,
)

FAR = math.inf


def key(number: int) -> Key:
    return Key(number.to_bytes(32, "big"))


def write(number: int, data: bytes = b"data") -> Write:
    return Write(key(number), [memoryview(data)])


def hedged(inner: Backend) -> Backend:
    return HedgedBackend(inner, DictBackend(name="alternate"), scratch_bytes=1 << 16)


def stack(inner: Backend) -> Backend:
    return wrap(inner, {"retry_delay": 0.0, "max_inflight": 1 << 20}, metrics=Metrics())


MAKE: dict[str, Callable[[Backend], Backend]] = {
    "retrying": lambda inner: RetryingBackend(inner, base_delay=0.0),
    "limited": lambda inner: LimitedBackend(inner, concurrency=4, bytes_in_flight=1 << 20),
    "metered": lambda inner: MeteredBackend(inner, Metrics()),
    "breaker": lambda inner: BreakerBackend(inner, failures=1000),
    "hedged": hedged,
    "stack": stack,
}
CLASSES: list[type[Wrapper]] = [RetryingBackend, LimitedBackend, MeteredBackend, BreakerBackend, HedgedBackend]


@pytest.fixture(params=MAKE)
def make(request: pytest.FixtureRequest) -> Callable[[Backend], Backend]:
    return MAKE[request.param]


# Forwarding.


@pytest.mark.parametrize("cls", CLASSES)
def test_nothing_public_is_inherited_from_backend(cls: type[Wrapper]) -> None:
    """A method added to Backend later must be added to the wrappers, or this fails."""
    public = [name for name in vars(Backend) if not name.startswith("_")]
    assert {"stat", "get_into", "put", "delete", "quarantine", "lease", "list", "register", "close"} <= set(public)
    assert {"capabilities", "limits", "options", "from_url"} <= set(public)
    for name in [*public, "name"]:
        owner = next(base for base in cls.__mro__ if name in vars(base))
        assert owner is not Backend, f"{cls.__name__}.{name} is Backend's default"


def test_every_method_reaches_the_inner_backend(make: Callable[[Backend], Backend]) -> None:
    seen: list[type[Backend]] = []

    def noted(inner: Backend) -> Backend:
        backend = make(inner)
        seen.append(type(backend))
        return backend

    assert_forwards_everything(MeteredBackend, noted)
    assert_forwards_everything(seen[0])


def test_attributes_follow_the_inner_backend_when_it_learns_more(make: Callable[[Backend], Backend]) -> None:
    inner = DictBackend()
    backend = make(inner)
    inner.limits, inner.capabilities, inner.name = Limits(lanes=99), Capability.TTL, "renamed"
    assert (backend.limits.lanes, backend.capabilities, backend.name) == (99, Capability.TTL, "renamed")
    backend.close()


@pytest.mark.parametrize("cls", CLASSES)
def test_a_wrapper_is_not_opened_by_url(cls: type[Wrapper]) -> None:
    with pytest.raises(ConfigError, match=f"{cls.__name__} is not opened by URL"):
        cls.from_url(None, {})  # type: ignore[arg-type]


# What a broken backend raises.

OPERATIONS: dict[str, Callable[[Backend], list[Outcome]]] = {
    "stat": lambda backend: backend.stat([key(1), key(2)], deadline=FAR),
    "get": lambda backend: backend.get_into(
        [Read(key(1), memoryview(bytearray(4))), Read(key(2), memoryview(bytearray(4)))], deadline=FAR
    ),
    "put": lambda backend: backend.put([write(1), write(2)], deadline=FAR),
    "delete": lambda backend: backend.delete([key(1), key(2)], deadline=FAR),
    "quarantine": lambda backend: backend.quarantine([key(1), key(2)], deadline=FAR),
}


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (OSError(5, "Input/output error"), TransientError),
        (TimeoutError(), TransientError),
        (MemoryError(), TransientError),
        (PermissionError(13, "Permission denied"), PermanentError),
        (ValueError("password=hunter2"), PermanentError),
        (PermanentError("no such bucket"), PermanentError),
    ],
)
def test_whatever_is_raised_becomes_outcomes(
    make: Callable[[Backend], Backend], operation: str, error: Exception, kind: type[Exception]
) -> None:
    backend = make(FaultyBackend(DictBackend(), otherwise=Fault.raises(error)))
    outcomes = OPERATIONS[operation](backend)
    assert [outcome.status for outcome in outcomes] == [Status.ERROR] * 2
    for outcome in outcomes:
        assert isinstance(outcome.error, kind)
        assert outcome.error is error or outcome.error.cause is error  # mapped once: the cause is the foreign one
        assert "hunter2" not in str(outcome.error)
    backend.close()


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("error", [ClosedError("gone"), ConfigError("bad"), KeyboardInterrupt(), SystemExit()])
def test_what_must_pass_passes(make: Callable[[Backend], Backend], operation: str, error: BaseException) -> None:
    """The backend is unusable, or the process ends. A hedged read of an unusable primary asks the alternate first."""
    backend = make(FaultyBackend(DictBackend(), otherwise=Fault.raises(error)))
    if isinstance(backend, HedgedBackend):
        backend.alternate.close()
    with pytest.raises(type(error)):
        OPERATIONS[operation](backend)
    backend.close()


class WrongCount(DictBackend):
    register_fails = False

    def stat(self, keys: Sequence[Key], *, deadline: float) -> list[Outcome]:
        return [OK] * (len(keys) + 1)

    def get_into(self, reads: Sequence[Read], *, deadline: float) -> list[Outcome]:
        return None  # type: ignore[return-value]

    def register(self, slab: object) -> None:
        if self.register_fails:
            raise RuntimeError("no such device")

    def list(self, *, deadline: float) -> Iterator[Sequence[KeyInfo]]:
        yield [KeyInfo(key(1), 1)]
        raise RuntimeError("half-way")


def test_answers_that_do_not_align_are_errors(make: Callable[[Backend], Backend]) -> None:
    inner = WrongCount()
    backend = make(inner)
    (outcome,) = backend.stat([key(1)], deadline=FAR)
    assert isinstance(outcome.error, PermanentError)
    assert "2 outcomes for 1 items" in str(outcome.error)
    (outcome,) = backend.get_into([Read(key(1), memoryview(bytearray(1)))], deadline=FAR)
    assert isinstance(outcome.error, PermanentError)
    inner.register_fails = True
    with BufferPool(4096) as pool, pytest.raises(PermanentError, match="RuntimeError") as raised:
        backend.register(pool.slabs[0])
    assert isinstance(raised.value.cause, RuntimeError)
    pages = backend.list(deadline=FAR)
    assert next(pages) == [KeyInfo(key(1), 1)]
    with pytest.raises(PermanentError, match="RuntimeError"):
        next(pages)
    backend.close()


class Leasing(DictBackend):
    """Leases one buffer too few, or raises."""

    def __init__(self, pool: BufferPool, error: Exception | None = None) -> None:
        super().__init__()
        self.pool, self.error = pool, error

    def lease(self, keys: Sequence[Key], *, deadline: float) -> list[Any]:
        if self.error is not None:
            raise self.error
        return [self.pool.acquire(10) for _ in keys[1:]]


def test_bad_leases_are_none_and_do_not_leak(make: Callable[[Backend], Backend]) -> None:
    with BufferPool(1 << 16) as pool:
        for inner in (Leasing(pool), Leasing(pool, OSError(5, "x")), Leasing(pool, TransientError("busy"))):
            backend = make(inner)
            assert backend.lease([key(1), key(2), key(3)], deadline=FAR) == [None] * 3
            backend.close()
        assert pool.stats().in_use == 0
        backend = make(Leasing(pool, ClosedError("closed")))
        with pytest.raises(ClosedError):
            backend.lease([key(1)], deadline=FAR)
        backend.close()


# Closing.


def test_after_close_everything_raises_closed_error(make: Callable[[Backend], Backend]) -> None:
    backend = make(DictBackend())
    backend.close()
    backend.close()
    for call in OPERATIONS.values():
        with pytest.raises(ClosedError):
            call(backend)
    with pytest.raises(ClosedError):
        backend.lease([key(1)], deadline=FAR)
    with pytest.raises(ClosedError):
        backend.list(deadline=FAR)
    with BufferPool(4096) as pool, pytest.raises(ClosedError):
        backend.register(pool.slabs[0])


def test_close_returns_with_a_call_in_flight(make: Callable[[Backend], Backend]) -> None:
    inner = FaultyBackend(DictBackend(), {"stat": [Fault.hang(Fault.miss())]})
    backend = make(inner)
    answers: list[list[Outcome]] = []
    caller = threading.Thread(target=lambda: answers.append(backend.stat([key(1)], deadline=FAR)))
    caller.start()
    inner.wait_hung()
    backend.close()  # must return although the call hangs
    assert answers == []
    inner.release()
    caller.join(30)
    assert answers == [[MISS]]


def test_close_returns_when_the_inner_close_fails(make: Callable[[Backend], Backend]) -> None:
    inner = FaultyBackend(DictBackend(), {"close": [Fault.raises(OSError(5, "x"))]})
    make(inner).close()
    assert len(inner.calls_of("close")) == 1


def test_nothing_is_left_behind(make: Callable[[Backend], Backend]) -> None:
    audit = LeakAudit()
    backend = make(DictBackend())
    for _ in range(100):
        for call in OPERATIONS.values():
            call(backend)
    backend.close()
    assert audit.problems() == []


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_is_not_blocked_by_a_lock_of_the_parent(make: Callable[[Backend], Backend]) -> None:
    """The fork happens while other threads use (and lock) the wrapper all the time."""

    class Forkable(DictBackend):
        def stat(self, keys: Sequence[Key], *, deadline: float) -> list[Outcome]:
            return [MISS] * len(keys)

    backend = make(Forkable())
    stop = threading.Event()

    def busy() -> None:
        while not stop.is_set():
            backend.stat([key(1)], deadline=FAR)

    threads = [threading.Thread(target=busy) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(5):
            pid = os.fork()
            if pid == 0:
                answer = [backend.stat([key(1)], deadline=FAR) for _ in range(50)]
                os._exit(0 if answer == [[MISS]] * 50 else 1)
            end = time.monotonic() + 20
            while (done := os.waitpid(pid, os.WNOHANG)) == (0, 0) and time.monotonic() < end:
                time.sleep(0.002)
            if done == (0, 0):
                os.kill(pid, 9)
                os.waitpid(pid, 0)
            assert done == (pid, 0)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
        backend.close()


# The stack and its options.


def layers(backend: Backend) -> list[str]:
    names = [type(backend).__name__]
    while isinstance(backend, Wrapper):
        backend = backend.inner
        names.append(type(backend).__name__)
    return names


def options(text: str) -> dict[str, Any]:
    return parse_options(WRAPPER_OPTIONS, dict(part.split("=") for part in text.split("&") if part), where="test")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ["MeteredBackend", "BreakerBackend", "RetryingBackend", "LimitedBackend", "DictBackend"]),
        ("retries=0", ["MeteredBackend", "BreakerBackend", "LimitedBackend", "DictBackend"]),
        ("breaker_failures=0", ["MeteredBackend", "RetryingBackend", "LimitedBackend", "DictBackend"]),
        ("max_calls=0", ["MeteredBackend", "BreakerBackend", "RetryingBackend", "DictBackend"]),
        ("max_calls=0&max_inflight=1MiB&retries=0&breaker_failures=0",
         ["MeteredBackend", "LimitedBackend", "DictBackend"]),
        ("retries=0&breaker_failures=0&max_calls=0", ["MeteredBackend", "DictBackend"]),
    ],
)  # fmt: skip
def test_wrap_leaves_out_what_is_switched_off(text: str, expected: list[str]) -> None:
    inner = DictBackend()
    backend = wrap(inner, options(text), metrics=Metrics())
    assert layers(backend) == expected
    assert unwrap(backend) is inner
    assert unwrap(inner) is inner
    backend.close()


def test_wrap_configures_what_it_builds() -> None:
    inner = FaultyBackend(DictBackend(), otherwise=Fault.error())
    metrics = Metrics()
    values = options("retries=1&retry_delay=0s&breaker_failures=2&breaker_interval=1h&max_calls=3&max_inflight=1MiB")
    backend = wrap(inner, {**values, "chunk_size": 256}, metrics=metrics)  # names of others are left alone
    for _ in range(3):
        assert [outcome.status for outcome in backend.stat([key(1)], deadline=FAR)] == [Status.ERROR]
    assert len(inner.calls) == 4  # two tries each, until the breaker opens after two calls
    assert metrics.value("kvstore_retries_total", "dict", "stat") == 2
    assert metrics.value("kvstore_breaker_state", "dict", "reads") == 2
    assert metrics.value("kvstore_breaker_refused_total", "dict", "stat") == 1
    assert metrics.value("kvstore_backend_calls_total", "dict", "stat") == 3
    backend.close()


def test_wrap_bounds_calls_by_the_lanes_unless_told_otherwise() -> None:
    def limit(values: dict[str, Any]) -> int:
        backend = wrap(DictBackend(lanes=7), values, metrics=Metrics())
        while not isinstance(backend, LimitedBackend):
            assert isinstance(backend, Wrapper)
            backend = backend.inner
        return backend.allowed

    assert limit({}) == 7
    assert limit({"max_calls": "3"}) == 3


@pytest.mark.parametrize(
    "text", ["retries=3", "retries=-1", "breaker_interval=0s", "hedge_extra=1.5", "max_inflight=x"]
)
def test_bad_options_are_config_errors(text: str) -> None:
    with pytest.raises(ConfigError, match=text.partition("=")[0]):
        options(text)


def test_hedge_is_off_unless_asked_for() -> None:
    primary, alternate = DictBackend(name="a"), DictBackend(name="b")
    assert hedge(primary, alternate, options(""), metrics=Metrics()) is primary
    backend = hedge(primary, alternate, options("hedge=on&hedge_memory=1MiB"), metrics=Metrics())
    assert isinstance(backend, HedgedBackend)
    assert (unwrap(backend), backend.alternate) == (primary, alternate)
    backend.close()


def test_option_names_are_unique_and_documented() -> None:
    names = [option.name for option in WRAPPER_OPTIONS]
    assert len(names) == len(set(names))
    manual = format_manual(WRAPPER_OPTIONS)
    assert all(f"`{name}`" in manual for name in names)
    for option in WRAPPER_OPTIONS:
        assert option.doc.endswith(".")
        assert option.default is None or option.parse(option.default) == option.default


# Cost.


class Instant(DictBackend):
    """Answers at once, so that what is measured is the wrappers."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.answer = [Outcome(Status.OK, 16)] * count

    def get_into(self, reads: Sequence[Read], *, deadline: float) -> list[Outcome]:
        return self.answer[:]


def test_the_whole_stack_costs_less_than_a_microsecond_per_key() -> None:
    """64 tiny reads, median over rounds of 200 calls; the bare backend is measured in the same rounds. Loose by a
    factor of about 3 on an idle machine: it guards against work per key, not against noise."""
    count, calls = 64, 200
    inner = Instant(count)
    backend = wrap(inner, options("max_inflight=64MiB"), metrics=Metrics())
    reads = [Read(key(at), memoryview(bytearray(16))) for at in range(count)]

    def per_key(target: Backend) -> float:
        start = time.perf_counter()
        for _ in range(calls):
            target.get_into(reads, deadline=FAR)
        return (time.perf_counter() - start) / calls / count

    extra = statistics.median(per_key(backend) - per_key(inner) for _ in range(15))
    assert extra < 1e-6, f"{extra * 1e6:.2f} µs per key"
    backend.close()
