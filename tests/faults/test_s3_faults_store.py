"""What the whole store makes of S3's faults: credentials, retries, verification, breaker, storms."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import kvstore
from kvstore.backend import Outcome, Status
from kvstore.errors import PermanentError
from kvstore.store import Store
from tests.faults.s3_link import BODY, BUCKET, OPERATIONS, SIZE, SLACK_S, STALLED_S, bad_link, begin_with_one_record
from tests.servers.fault_proxy import Answer, Cut, FaultProxy, Flip, Link, Request, Silence
from tests.servers.null_server import NullServer
from tests.servers.s3_support import all_of, error_of, get, secrets, url


@pytest.fixture
def stored(null_server: NullServer) -> bytes:
    """The record "k"."""
    return begin_with_one_record(null_server)


# Fault 29: credentials.


@pytest.fixture
def profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """A profile whose credentials come from a program; each call of it gives new ones. Returns how often it ran."""
    log = tmp_path / "calls"
    log.write_text("")
    program = tmp_path / "credentials.py"
    program.write_text(
        "import datetime, json\n"
        f"log = {str(log)!r}\n"
        "open(log, 'a').write('x')\n"
        "number = len(open(log).read())\n"
        f"seconds = float(open({str(tmp_path / 'seconds')!r}).read())\n"
        "end = datetime.datetime.now(datetime.timezone.utc) + datetime.timedelta(seconds=seconds)\n"
        "print(json.dumps({'Version': 1, 'AccessKeyId': f'KEY{number}', 'SecretAccessKey': 's', 'SessionToken': 't',\n"
        "                  'Expiration': end.isoformat()}))\n"
    )
    (tmp_path / "seconds").write_text("3600")
    config = tmp_path / "config"
    config.write_text(f"[profile test]\nregion = us-east-1\ncredential_process = {sys.executable} {program}\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    return lambda: len(log.read_text())


FROM_PROFILE = {"profile": "test", "access_key_id": None, "secret_access_key": None}


def test_credentials_that_expire_under_64_lanes_are_fetched_once(
    null_proxy: FaultProxy, stored: bytes, profile: Callable[[], int]
) -> None:
    with bad_link(null_proxy, **FROM_PROFILE, lanes=64, meta_lanes=64) as backend:
        assert get(backend, "k", SIZE)[0].status is Status.OK
        assert profile() == 1

        def old(request: Request) -> bool:
            return "KEY1/" in request.headers.get("authorization", "")

        null_proxy.every(Answer(400, "ExpiredToken"), match=old)
        barrier, outcomes = threading.Barrier(64), list[Outcome]()

        def work() -> None:
            barrier.wait(20)
            outcome, brought = get(backend, "k", 1000)
            assert outcome.status is not Status.OK or brought == stored[:1000]
            outcomes.append(outcome)

        threads = [threading.Thread(target=work) for _ in range(64)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert len(outcomes) == 64
        assert all_of(outcomes, Status.OK)
        assert profile() == 2, "one refresh for all"


def test_credentials_are_refreshed_before_they_end(
    null_proxy: FaultProxy, stored: bytes, profile: Callable[[], int], tmp_path: Path
) -> None:
    (tmp_path / "seconds").write_text("660")  # botocore refreshes 15 minutes ahead if it can, 10 if it must
    with bad_link(null_proxy, **FROM_PROFILE) as backend:
        (tmp_path / "seconds").write_text("3600")
        for _ in range(5):
            assert get(backend, "k", 1000)[0].status is Status.OK
        end = time.monotonic() + 5
        while profile() < 2 and time.monotonic() < end:
            assert get(backend, "k", 1000)[0].status is Status.OK
        assert profile() == 2


def test_credentials_that_stay_expired_are_an_error_that_says_so(null_proxy: FaultProxy, stored: bytes) -> None:
    with bad_link(null_proxy) as backend:
        null_proxy.every(Answer(400, "ExpiredToken"))
        error_of(get(backend, "k", 10)[0], PermanentError, "expired")
        assert null_proxy.count("GET") <= 2


# Through the whole store: retries, breaker, verification.


@contextmanager
def store_over(endpoint: str, **options: Any) -> Iterator[Store]:
    fields = {"connect_timeout": 1.0, "read_timeout": STALLED_S, "conditional_writes": "on", "miss_memory": 0.0}
    own = {
        name: options.pop(name) for name in list(options) if name in ("breaker_failures", "breaker_interval", "lanes")
    }
    where = url(endpoint, BUCKET, "store", **own)
    with kvstore.open_store(where, backend_options=secrets(**fields), close_timeout=2.0, **options) as store:
        yield store


def test_a_flipped_byte_heals_if_it_was_on_the_way(null_proxy: FaultProxy) -> None:
    with store_over(null_proxy.endpoint) as store:
        store.delete_many(["flip"])
        assert all_of(store.put_many({"flip": BODY}), Status.OK)
        null_proxy.next(Flip(200_000), only="GET")
        into = bytearray(SIZE)
        assert store.get_many(["flip"], into=[into]) == [SIZE]
        assert into == BODY
        assert null_proxy.pending == 0


def test_a_byte_that_is_flipped_each_time_is_a_miss_never_a_hit(null_proxy: FaultProxy) -> None:
    with store_over(null_proxy.endpoint) as store:
        store.delete_many(["flip"])
        store.put_many({"flip": BODY})
        for at in (0, 10, 70, 5000, 200_000):
            null_proxy.every(Flip(at), only="GET")
            assert store.get_many(["flip"], into=[bytearray(SIZE)]) == [None]
            null_proxy.clear()
            store.put_many({"flip": BODY})  # it was set aside
            into = bytearray(SIZE)
            assert store.get_many(["flip"], into=[into]) == [SIZE]
            assert into == BODY


def test_six_faults_of_the_link_cost_retries_not_hits(null_proxy: FaultProxy) -> None:
    with store_over(null_proxy.endpoint, breaker_failures=0) as store:
        store.delete_many(["six"])
        store.put_many({"six": BODY})
        for fault in (
            Link(latency_s=0.05), Link(bytes_per_s=5e6), Cut("rst", after=SIZE // 3), Cut("fin", after=SIZE // 3),
            Cut("stall", after=SIZE // 3), Silence(), Flip(1000), Answer(503, "SlowDown"), Cut("rst", after=None),
        ):  # fmt: skip
            null_proxy.next(fault, only="GET")
            into = bytearray(SIZE)
            assert store.get_many(["six"], into=[into], timeout=20.0) == [SIZE], fault
            assert into == BODY
            assert null_proxy.pending == 0, fault


@pytest.mark.parametrize("operation", ["get_many", "hit_prefix", "put_many"])
def test_a_black_hole_costs_each_call_its_deadline_then_next_to_nothing(null_proxy: FaultProxy, operation: str) -> None:
    """Fault 19. After the breaker has opened a call is answered at once, and after recovery the store is back."""
    with store_over(null_proxy.endpoint, breaker_failures=3, breaker_interval="400ms") as store:
        store.put_many({"here": b"value"})
        calls: dict[str, Callable[[], Any]] = {
            "get_many": lambda: store.get_many(["here"], into=[bytearray(5)], timeout=0.3),
            "hit_prefix": lambda: store.hit_prefix(["here"], timeout=0.3),
            "put_many": lambda: store.put_many({"other": b"x"}, timeout=0.3)[0].stored,
        }
        null_proxy.black_hole()
        times = []
        for _ in range(12):
            start = time.monotonic()
            assert calls[operation]() in ([None], 0, False)
            times.append(time.monotonic() - start)
        assert sorted(times)[-3] < 0.3 + SLACK_S, "but for a machine that stalls"
        assert sorted(times)[len(times) // 2] < 0.1, "most were refused by the breaker"
        null_proxy.recover()
        start = time.monotonic()
        while not store.get_many(["here"], into=[bytearray(5)], timeout=0.5)[0]:
            assert time.monotonic() - start < 20.0
            time.sleep(0.02)


def test_a_throttling_storm(null_server: NullServer) -> None:
    """Fault 28: nine of ten requests get 503, 200 threads want something. At most three requests for each."""
    keys = [f"storm {number}" for number in range(64)]
    with store_over(null_server.endpoint, lanes=16) as store:
        assert all(outcome.stored for outcome in store.put_many(dict.fromkeys(keys, b"x" * 1000)))
        answers: list[int] = []
        times: list[float] = []
        stop = threading.Event()

        def work(number: int) -> None:
            turn = number
            while not stop.is_set():
                start = time.monotonic()
                found = store.get_many([keys[turn % 64]], into=[bytearray(1000)], timeout=0.5)
                times.append(time.monotonic() - start)
                answers.append(int(found[0] is not None))
                turn += 7

        threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(200)]
        null_server.set(slowdown_percent=90)
        before = null_server.stats()["requests"]
        try:
            for thread in threads:
                thread.start()
            time.sleep(2.0)
        finally:
            stop.set()
            for thread in threads:
                thread.join(60)
            requests = null_server.stats()["requests"] - before
            null_server.set(slowdown_percent=0)
        assert not any(thread.is_alive() for thread in threads)
        assert requests <= 3 * len(answers), f"{requests} requests for {len(answers)} reads"
        assert sorted(times)[len(times) // 2] < 0.5 + SLACK_S
        start = time.monotonic()
        while store.get_many(keys[:1], into=[bytearray(1000)], timeout=1.0) != [1000]:
            assert time.monotonic() - start < 20.0
            time.sleep(0.05)


def test_no_secret_in_logs_or_reprs(null_proxy: FaultProxy, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG", logger="kvstore")
    with bad_link(null_proxy) as backend, store_over(null_proxy.endpoint) as store:
        null_proxy.repeat(Answer(403, "SignatureDoesNotMatch", message="testsecret"), 20)
        assert "testsecret" not in f"{backend!r} {backend.name} {backend.settings!r} {store.config!r}"
        for operation in OPERATIONS.values():
            error = operation(backend, 1.0).error
            assert error is None or "testsecret" not in f"{error} {error!r}"
        store.get_many(["k"], into=[bytearray(3)])
    assert "testsecret" not in caplog.text
