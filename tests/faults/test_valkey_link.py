"""Every failure between us and a Valkey server, each inside the deadline and each named; none of them is ever a hit.

Numbers of faults are those of the project's list. Bare backends; what wrappers add is theirs.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvstore.backend import Outcome, Read, Status, Write
from kvstore.errors import BackendError, ClosedError, KVStoreError, PermanentError, TransientError
from kvstore.keys import Key, opaque_key
from kvstore.registry import open_backend
from kvstore.store import open_store
from kvstore_backends.valkey import ValkeyBackend
from tests.servers.valkey import Server, needs_server, until
from tests.servers.valkey_doubles import BadLink, black_hole

SLACK_S = 3.0  # two busy cores
HASTY = {"connect_timeout": 0.08, "read_timeout": 0.08}
SIZE = 400_000
BODY = os.urandom(SIZE)


def key(name: object) -> Key:
    return opaque_key(f"faults {name}")


def soon(seconds: float = 20.0) -> float:
    return time.monotonic() + seconds


@contextmanager
def opened(address: str, **options: Any) -> Iterator[ValkeyBackend]:
    fields = {"connect_timeout": 10.0, "read_timeout": 10.0, "cluster": "off", **options}
    backend = open_backend(f"valkey://{address}/faults", **fields)
    assert isinstance(backend, ValkeyBackend)
    try:
        yield backend
    finally:
        backend.close()


def get(backend: ValkeyBackend, name: object, nbytes: int = SIZE, seconds: float = 20.0) -> tuple[Outcome, bytes]:
    dst = bytearray(b"\xa5" * nbytes)
    (outcome,) = backend.get_into([Read(key(name), memoryview(dst))], deadline=soon(seconds))
    return outcome, bytes(dst[: outcome.nbytes])


def put(backend: ValkeyBackend, name: object, data: bytes = BODY, seconds: float = 20.0) -> Outcome:
    return backend.put([Write(key(name), [memoryview(data)])], deadline=soon(seconds))[0]


def listed(backend: ValkeyBackend, seconds: float) -> Outcome:
    try:
        list(backend.list(deadline=soon(seconds)))
    except BackendError as error:
        return Outcome.failed(error)
    return Outcome(Status.OK)


OPERATIONS: dict[str, Callable[[ValkeyBackend, float], Outcome]] = {
    "stat": lambda backend, s: backend.stat([key("k")], deadline=soon(s))[0],
    "get": lambda backend, s: get(backend, "k", seconds=s)[0],
    "put": lambda backend, s: put(backend, "new", seconds=s),
    "delete": lambda backend, s: backend.delete([key("k")], deadline=soon(s))[0],
    "quarantine": lambda backend, s: backend.quarantine([key("k")], deadline=soon(s))[0],
    "list": listed,
}


def error_of(outcome: Outcome, kind: type[KVStoreError], *said: str) -> KVStoreError:
    assert outcome.status is Status.ERROR, outcome
    assert isinstance(outcome.error, kind), outcome.error
    assert all(word in str(outcome.error) for word in said), outcome.error
    return outcome.error


@pytest.fixture
def stored(valkey_server: Server) -> bytes:
    """The record "k" is `BODY`, and "new" is not there: done without the backend."""
    with valkey_server.client() as client:
        client.set(f"faults/{key('k').hex()}", BODY)
        client.delete(f"faults/{key('new').hex()}")
    return BODY


@pytest.fixture
def link(valkey_server: Server) -> Iterator[BadLink]:
    with BadLink(valkey_server.port) as link:
        yield link


# Fault 19.


def refuse(link: BadLink) -> None:
    link.refuse()


def silent(link: BadLink) -> None:
    link.mode = "silent"
    link.hang_up()  # new connections are accepted and never answered


def fall_silent(link: BadLink) -> None:
    link.mode = "silent"


def drip(link: BadLink) -> None:
    link.mode, link.drip_s = "drip", 0.06  # the shortest answer has four bytes: 0.18 s


def stall(link: BadLink) -> None:
    link.mode = "stall"


TROUBLE: dict[str, tuple[Callable[[BadLink], None], tuple[str, ...]]] = {
    "refused": (refuse, ("no connection", "closed", "broke")),
    "accepts and never answers": (silent, ("does not answer", "no connection")),
    "falls silent": (fall_silent, ("silent", "does not answer")),
    "takes nothing": (stall, ("silent", "does not answer")),
    "a byte now and then": (drip, ("silent", "does not answer")),
}


@pytest.mark.parametrize("trouble", TROUBLE)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_each_trouble_ends_each_call_in_time_and_by_name(
    link: BadLink, stored: bytes, operation: str, trouble: str
) -> None:
    begin, names = TROUBLE[trouble]
    with opened(link.address, **HASTY) as backend:
        begin(link)
        start = time.monotonic()
        error = error_of(OPERATIONS[operation](backend, 0.12), TransientError)
        assert time.monotonic() - start < 0.12 + SLACK_S
        assert any(name in str(error) for name in (*names, "deadline")), error


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_black_hole_costs_the_deadline_and_no_more(operation: str) -> None:
    with black_hole() as port, opened(f"127.0.0.1:{port}", connect_timeout=0.05) as backend:
        start = time.monotonic()
        error_of(OPERATIONS[operation](backend, 0.2), TransientError, "no connection")
        assert time.monotonic() - start < 0.2 + SLACK_S


def test_a_deadline_shorter_than_the_time_to_connect() -> None:
    with black_hole() as port, opened(f"127.0.0.1:{port}", connect_timeout=0.6) as backend:
        start = time.monotonic()
        error_of(get(backend, "k", seconds=0.1)[0], TransientError)
        assert time.monotonic() - start < 0.1 + SLACK_S


def test_a_server_that_let_us_wait_is_not_waited_for_again_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls that need others, too, would each be held up for `connect_timeout`."""
    monkeypatch.setattr("kvstore_backends.valkey.pool._MOST_DOWN_S", 60.0)
    monkeypatch.setattr("kvstore_backends.valkey.pool._DOWN_S", 60.0)
    with black_hole() as port, opened(f"127.0.0.1:{port}", connect_timeout=0.1) as backend:
        error_of(get(backend, "k")[0], TransientError)
        before = backend.counters["connections"]
        for _ in range(5):
            error_of(get(backend, "k")[0], TransientError, "a moment ago")
        assert backend.counters["connections"] == before
        monkeypatch.setattr("kvstore_backends.valkey.pool._MOST_DOWN_S", 0.0)
        backend._pool._down.clear()
        error_of(get(backend, "k")[0], TransientError, "in time")
        error_of(get(backend, "k")[0], TransientError, "in time")
        assert backend.counters["connections"] > before


def test_a_slow_link_is_not_a_silent_one(link: BadLink, stored: bytes) -> None:
    """A byte every 50 ms, and `read_timeout` counts from the last one: the deadline ends it, not the silence."""
    with opened(link.address, read_timeout=0.5) as backend:
        assert until(lambda: get(backend, "k", 10)[0].ok)
        link.mode = "drip"
        start = time.monotonic()
        error_of(get(backend, "k", seconds=0.9)[0], TransientError)
        assert time.monotonic() - start >= 0.6, "it went on after half a second"


def test_all_lanes_in_use_is_a_wait_within_the_deadline(link: BadLink, stored: bytes) -> None:
    with opened(link.address, lanes=1) as backend:
        assert get(backend, "k", 10)[0].ok
        link.mode = "silent"
        hanging = threading.Thread(target=lambda: get(backend, "k"))
        hanging.start()
        assert until(lambda: backend._pool._busy == 1)
        start = time.monotonic()
        error_of(get(backend, "k", seconds=0.1)[0], TransientError, "all lanes")
        assert time.monotonic() - start < 0.1 + SLACK_S
        link.drop_answers()
        hanging.join()


def test_close_ends_calls_under_way(link: BadLink, stored: bytes) -> None:
    with opened(link.address) as backend:
        assert get(backend, "k", 10)[0].ok
        link.mode = "silent"
        found: list[str] = []

        def call() -> None:
            try:
                found.append(str(get(backend, "k", seconds=30.0)[0].error))
            except ClosedError as error:
                found.append(str(error))

        hanging = threading.Thread(target=call)
        hanging.start()
        assert until(lambda: backend._pool._busy == 1)
        start = time.monotonic()
        backend.close()
        hanging.join(10)
        assert time.monotonic() - start < SLACK_S
        assert "closed" in found[0]


# Answers that are cut.


@pytest.mark.parametrize("after", [0, 1, 20, 200_000])
def test_a_value_cut_on_the_way_is_an_error_and_never_short(link: BadLink, stored: bytes, after: int) -> None:
    with opened(link.address) as backend:
        assert get(backend, "k", 10)[0].ok
        link.hang_up()
        with opened(link.address) as fresh:
            assert get(fresh, "k", 10)[0].ok
            link.cut = after
            outcome, _ = get(fresh, "k")
            error_of(outcome, TransientError)
            link.cut = None
            assert get(fresh, "k") == (Outcome(Status.OK, SIZE), stored), "with a new connection"
        assert get(backend, "k") == (Outcome(Status.OK, SIZE), stored), "an idle connection that ended is no error"


def test_memory_of_a_failed_read_is_not_written_later(link: BadLink, stored: bytes) -> None:
    """Fault 2: the deadline passes in the middle of a value; what comes later goes nowhere."""
    with opened(link.address) as backend:
        assert get(backend, "k", 10)[0].ok
        gate = threading.Event()
        link.pause = lambda total: None if total < 100_000 else (gate.wait(20), None)[1]
        memory = bytearray(b"\xa5" * SIZE)
        (outcome,) = backend.get_into([Read(key("k"), memoryview(memory))], deadline=soon(0.3))
        error_of(outcome, TransientError, "deadline")
        memory[:] = pattern = os.urandom(SIZE)
        gate.set()
        link.pause = None
        assert get(backend, "k") == (Outcome(Status.OK, SIZE), stored)
        assert memory == pattern


def test_a_put_whose_answer_is_lost_says_exists_when_repeated(
    valkey_server: Server, link: BadLink, stored: bytes
) -> None:
    with opened(link.address, ask_from=1 << 30) as backend:
        assert get(backend, "k", 10)[0].ok
        link.mode = "silent"
        found: list[Outcome] = []
        waiting = threading.Thread(target=lambda: found.append(put(backend, "new")))
        waiting.start()
        assert until(lambda: valkey_server.call("EXISTS", f"faults/{key('new').hex()}") == 1)
        link.drop_answers()
        waiting.join(20)
        assert found[0].status in (Status.ERROR, Status.EXISTS), "that depends on how much of the answer had come"
        assert put(backend, "new").status is Status.EXISTS
        assert get(backend, "new") == (Outcome(Status.OK, SIZE), BODY)


def test_a_put_cut_on_the_way_leaves_nothing_and_can_be_repeated(link: BadLink, stored: bytes) -> None:
    with opened(link.address, ask_from=1 << 30) as backend:
        assert get(backend, "k", 10)[0].ok
        link.mode = "stall"
        error_of(put(backend, "new", os.urandom(30 << 20), seconds=0.4), TransientError)
        link.hang_up()
        link.mode = "pass"
        assert get(backend, "new", 10)[0].status is Status.MISS
        assert put(backend, "new") == Outcome(Status.OK, SIZE)


# Processes.


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[Server]:
    """A server that the test may kill."""
    with Server(tmp_path / "own", "--maxmemory", "100mb", "--maxmemory-policy", "allkeys-lru") as server:
        yield server


@pytest.fixture(autouse=True)
def _installed() -> None:
    needs_server()


def test_a_server_killed_and_started_again_on_its_port(own_server: Server) -> None:
    with opened(own_server.address) as backend:
        assert put(backend, "k").ok
        own_server.stop()
        for operation in ("get", "put", "stat"):
            start = time.monotonic()
            error_of(OPERATIONS[operation](backend, 2.0), TransientError)
            assert time.monotonic() - start < 2.0 + SLACK_S
        own_server.start()
        assert get(backend, "k")[0].status is Status.MISS, "it kept nothing"
        assert put(backend, "k").ok
        assert get(backend, "k") == (Outcome(Status.OK, SIZE), BODY)


def test_a_restart_between_two_calls_is_not_noticed(own_server: Server) -> None:
    with opened(own_server.address) as backend:
        assert put(backend, "k").ok
        own_server.stop()
        own_server.start()
        assert put(backend, "k").ok
        assert get(backend, "k")[0].ok


def test_a_server_that_is_down_at_open_is_used_when_it_is_up(
    own_server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    own_server.stop()
    with opened(own_server.address) as backend:
        assert "is tried again when it is used" in caplog.text
        error_of(get(backend, "k", seconds=2.0)[0], TransientError, "no connection")
        own_server.start()
        assert put(backend, "k").ok


def test_a_stopped_server_costs_the_silence_and_works_on(own_server: Server) -> None:
    """SIGSTOP: half open. The kernel goes on accepting."""
    with opened(own_server.address, read_timeout=0.1) as backend:
        assert until(lambda: put(backend, "k").stored)
        own_server.signal(signal.SIGSTOP)
        try:
            for operation in ("get", "put", "stat"):
                start = time.monotonic()
                error_of(OPERATIONS[operation](backend, 0.4), TransientError)
                assert time.monotonic() - start < 0.4 + SLACK_S
        finally:
            own_server.signal(signal.SIGCONT)
        assert until(lambda: get(backend, "k")[0].ok)


# Fault 30.


def test_a_full_server_stores_nothing_torn(valkey_full: Server) -> None:
    """40 MB into 20 MB with noeviction: what did not fit is refused by name, what did is exact, and reads go on."""
    data = os.urandom(1 << 20)
    keys = [f"full {n}" for n in range(40)]
    with opened(valkey_full.address) as backend:
        assert any("noeviction" in advice for advice in backend.facts.advice)
        outcomes = [put(backend, name, data[n:] + data[:n]) for n, name in enumerate(keys)]
        stored = [n for n, outcome in enumerate(outcomes) if outcome.ok]
        assert 10 < len(stored) < 20
        for n, outcome in enumerate(outcomes):
            if n in stored:
                assert get(backend, keys[n], 1 << 20) == (Outcome(Status.OK, 1 << 20), data[n:] + data[:n])
            else:
                error_of(outcome, PermanentError, "not stored", "maxmemory-policy")
                assert get(backend, keys[n], 10)[0].status is Status.MISS
        batch = backend.put([Write(key(f"more {n}"), [memoryview(data)]) for n in range(20)], deadline=soon())
        assert all(outcome.error is not None for outcome in batch)
        assert all(outcome.ok for outcome in backend.delete([key(keys[n]) for n in stored], deadline=soon()))
        assert until(lambda: put(backend, "more 0", data).ok), "there is room again"
        assert backend.delete([key("more 0")], deadline=soon())[0].ok


def test_two_hundred_gets_over_ten_connections(valkey_server: Server, stored: bytes) -> None:
    with opened(valkey_server.address, lanes=10) as backend:
        found: list[bool] = []
        start = threading.Barrier(200)

        def one() -> None:
            start.wait(60)
            found.append(get(backend, "k", seconds=60) == (Outcome(Status.OK, SIZE), stored))

        threads = [threading.Thread(target=one) for _ in range(200)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == [True] * 200
        assert backend.counters["connections"] <= 11, "ten lanes, and the one that asked who they are"


def test_six_hundred_megabytes_are_refused_before_they_are_sent(valkey_server: Server) -> None:
    with opened(valkey_server.address) as backend:
        before = int(valkey_server.info("INFO", "stats")["total_net_input_bytes"])
        piece = memoryview(bytes(1 << 20))
        (outcome,) = backend.put([Write(key("huge"), [piece] * 600)], deadline=soon())
        error_of(outcome, PermanentError, "too large", "max_value_bytes")
        assert int(valkey_server.info("INFO", "stats")["total_net_input_bytes"]) - before < 100_000


def test_a_value_too_large_for_the_server_is_said_to_be(own_server: Server) -> None:
    own_server.call("CONFIG", "SET", "proto-max-bulk-len", 1 << 20)
    with opened(own_server.address) as backend:
        outcome = put(backend, "k", bytes(2 << 20))
        assert outcome.status is Status.ERROR
        assert get(backend, "k", 10)[0].status is Status.MISS
        assert put(backend, "k", bytes(1000)).ok


# With the store around it.


def test_a_store_over_a_server_that_goes_away_serves_misses_within_the_deadline(own_server: Server) -> None:
    url = f"valkey://{own_server.address}/kv?connect_timeout=200ms&read_timeout=200ms"
    with open_store(url, buffer_pool_bytes=8 << 20) as store:
        assert all(outcome.stored for outcome in store.put_many([(key("k"), b"x" * 100_000)]))
        own_server.stop()
        start = time.monotonic()
        for _ in range(30):
            assert store.hit_prefix([key("k")]) == 0
        assert time.monotonic() - start < 10.0 + SLACK_S, "the breaker answers while it is down"
