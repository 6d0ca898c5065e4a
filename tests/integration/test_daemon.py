"""The daemon and its engines as processes: either is killed, stopped and started again."""

from __future__ import annotations

import ctypes
import http.client
import json
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvstore
from kvstore.backend import Read, Write
from kvstore.keys import Key
from kvstore_backends._memory_reservation import span
from kvstore_backends.node import NodeBackend
from kvstore_backends.node.protocol import Op, pack_put
from kvstore_transport import connect
from kvstore_transport.channel import SocketChannel
from kvstore_transport.frames import Header, Kind
from tests.s3_support import ACCESS_KEY, BUCKET, SECRET_KEY, moto_server, unique_prefix

from .daemon_support import Daemon, Engines, chosen, connected, content, facts_of, name_of, until

MiB = 1 << 20


@pytest.fixture
def daemons() -> Iterator[list[Daemon]]:
    running: list[Daemon] = []
    yield running
    for each in running:
        each.close()


@pytest.fixture
def engines() -> Iterator[Engines]:
    found = Engines()
    yield found
    found.close()


class Bystander(threading.Thread):
    """Another engine, which puts and reads its own records all the time and must notice nothing. `pause` while its
    requests would be seen in what the node counts."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self.backend = connected(url)
        self.turn = threading.Lock()
        self.rounds = 0
        self.trouble: list[object] = []
        self._over = threading.Event()

    def run(self) -> None:
        names = [name_of(-1, index) for index in range(4)]
        for name in names:
            self._put(name)
        while not self._over.is_set():
            with self.turn:
                for name in names:
                    data = content(name)
                    dst = bytearray(len(data))
                    outcome = self.backend.get_into([Read(name, memoryview(dst))], deadline=time.monotonic() + 60)[0]
                    if outcome.ok and dst != data:
                        self.trouble.append("wrong bytes")
                    elif outcome.error is not None:
                        self.trouble.append(outcome.error)
                    elif not outcome.ok:  # evicted
                        self._put(name)
                self.rounds += 1
            time.sleep(0.001)

    def _put(self, name: Key) -> None:
        outcome = self.backend.put([Write(name, [memoryview(content(name))])], deadline=time.monotonic() + 60)[0]
        if not outcome.stored:
            self.trouble.append(outcome)

    def end(self) -> None:
        self._over.set()
        self.join(60)
        self.backend.close()


def nothing_is_left(backend: NodeBackend) -> None:
    """No lease, no reservation, no torn record: all memory that is taken is of records that can be read."""

    def idle() -> bool:
        stats = facts_of(backend)
        return bool(stats["held"] == 0 and stats["waiting"] == 0)

    until(idle, "memory is still held for an engine that is dead")

    def exact() -> bool:
        stats = facts_of(backend)
        sizes = [info.nbytes for page in backend.list(deadline=time.monotonic() + 60) for info in page]
        return bool(stats["in_use"] == sum(map(span, sizes)) and stats["records"] == len(sizes))

    until(exact, f"memory is taken by what is no record: {facts_of(backend)}")


def whole_or_absent(backend: NodeBackend, names: list[Key]) -> int:
    """How many of the records are there; each of them is what it must be."""
    there = 0
    for name in names:
        data = content(name)
        dst = bytearray(len(data) + 100)
        outcome = backend.get_into([Read(name, memoryview(dst))], deadline=time.monotonic() + 60)[0]
        assert outcome.error is None
        if outcome.ok:
            there += 1
            assert outcome.nbytes == len(data)
            assert dst[: len(data)] == data
    return there


def killed_engines(daemons: list[Daemon], engines: Engines, tmp_path: Path, count: int) -> None:
    daemons.append(Daemon("--unix", str(tmp_path / "node.sock"), "--memory", "48MiB"))
    url = daemons[0].url
    bystander = Bystander(url)
    bystander.start()
    watcher = connected(url)
    chance = random.Random(count)
    held = 0
    for number in range(count):
        engines.start(url, number)
        leases = engines.wait_puts(chance.choice((1, 7, 33, 66, 99, 101)))
        held += max(0, leases)
        if chance.random() < 0.5:
            time.sleep(chance.random() * 0.004)  # anywhere within a put
        engines.kill()
        with bystander.turn:
            nothing_is_left(watcher)
            whole_or_absent(watcher, chosen([number]))
    before = bystander.rounds
    until(lambda: bystander.rounds > before, "the other engine does not go on")
    bystander.end()
    assert bystander.trouble == []
    assert held > 0  # some of them were killed with their leases
    assert whole_or_absent(watcher, chosen(range(count))) > 0
    nothing_is_left(watcher)
    watcher.close()
    assert daemons[0].end() == 0


def test_engines_that_are_killed_leave_nothing_and_disturb_nobody(
    daemons: list[Daemon], engines: Engines, tmp_path: Path
) -> None:
    killed_engines(daemons, engines, tmp_path, 8)


@pytest.mark.slow
def test_fifty_engines_that_are_killed(daemons: list[Daemon], engines: Engines, tmp_path: Path) -> None:
    killed_engines(daemons, engines, tmp_path, 50)


def test_a_daemon_that_is_killed_under_load_costs_misses_only_and_is_found_again(
    daemons: list[Daemon], tmp_path: Path
) -> None:
    words = ["--unix", str(tmp_path / "node.sock"), "--memory", "32MiB", "--disk", f"file://{tmp_path}/kv?bytes=64MiB"]
    daemons.append(Daemon(*words))
    names = [f"record {index}" for index in range(16)]
    data = {name: (name * 20_000).encode() for name in names}
    stop = threading.Event()
    slowest: list[float] = []
    trouble: list[object] = []
    missed: set[int] = set()
    back: set[int] = set()

    def engine(number: int) -> None:
        with kvstore.open_store(daemons[0].url, buffer_pool_bytes=16 * MiB) as store:
            ready.wait(60)
            while not stop.is_set():
                began = time.monotonic()
                try:
                    found = store.get_many(names, timeout=1.0)
                    store.put_many({f"new {number}/{began}": b"x" * 1000}, timeout=1.0)
                except Exception as error:
                    trouble.append(error)
                    return
                slowest.append(time.monotonic() - began)
                if any(each is not None and each != data[name] for name, each in zip(names, found, strict=True)):
                    trouble.append("wrong bytes")
                if None in found:
                    missed.add(number)
                elif number in missed:
                    back.add(number)

    with kvstore.open_store(daemons[0].url) as store:
        store.put_many(data)
        assert all(each == data[name] for name, each in zip(names, store.get_many(names), strict=True))
    watcher = connected(daemons[0].url)
    until(lambda: facts_of(watcher)["disk_backlog"] == 0 and facts_of(watcher)["disk_written"] == 16, "not written")
    ready = threading.Barrier(4)
    threads = [threading.Thread(target=engine, args=(number,), daemon=True) for number in range(3)]
    for thread in threads:
        thread.start()
    ready.wait(60)
    until(lambda: len(slowest) > 30 or trouble, "the engines do not run")
    assert not missed
    assert trouble == []
    daemons[0].kill()  # with requests under way; its socket is left behind
    until(lambda: len(missed) == 3 or trouble, "engines do not notice")
    asked = len(slowest)
    until(lambda: len(slowest) > asked + 30 or trouble, "engines do not go on without it")
    daemons.append(Daemon(*words))
    until(lambda: len(back) == 3 or trouble, "engines do not come back")
    stop.set()
    for thread in threads:
        thread.join(60)
    assert trouble == []
    assert max(slowest) < 2 * 1.0 + 5.0  # the deadlines, and what this machine may take to wake a thread
    watcher.close()
    assert daemons[1].end() == 0


def test_a_restart_finds_the_disk_and_what_is_remote(daemons: list[Daemon], tmp_path: Path) -> None:
    words = [
        "--unix", str(tmp_path / "node.sock"), "--memory", "16MiB", "--disk", f"file://{tmp_path}/kv?bytes=8MiB",
        "--remote", f"file://{tmp_path}/remote",
    ]  # fmt: skip
    daemons.append(Daemon(*words))
    client = connected(daemons[0].url)
    names = chosen([0])
    for name in names:
        assert client.put([Write(name, [memoryview(content(name))])], deadline=time.monotonic() + 60)[0].ok
        until(lambda: facts_of(client)["disk_backlog"] < 2 * MiB, "the disk does not keep up")
    until(lambda: facts_of(client)["disk_backlog"] == 0, "it is not written")
    assert facts_of(client)["disk_written"] == len(names)
    daemons[0].kill()
    daemons.append(Daemon(*words))
    until(lambda: whole_or_absent(client, names[:1]) == 1, "the client does not come back")
    assert whole_or_absent(client, names) == len(names)
    assert daemons[1].end() == 0
    client.close()

    daemons.append(Daemon("--unix", str(tmp_path / "other.sock"), "--memory", "16MiB", *words[-2:]))
    other = connected(daemons[2].url)  # SIGTERM brought all of it down: another node has it, too
    assert whole_or_absent(other, names) == len(names)
    other.close()


def test_at_sigterm_it_says_so_lets_requests_end_and_brings_down_what_it_owes(
    daemons: list[Daemon], tmp_path: Path
) -> None:
    daemons.append(
        Daemon(
            "--listen", "127.0.0.1:0", "--http", "127.0.0.1:0", "--memory", "16MiB", "--drain-timeout", "20s",
            "--remote", f"file://{tmp_path}/remote",
        )
    )  # fmt: skip
    daemon = daemons[0]
    address = daemon.facts["address"]
    assert daemon.ask("/readyz")[0] == 200
    client = connected(f"node://{address}")
    name = name_of(0, 0)
    assert client.put([Write(name, [memoryview(content(name))])], deadline=time.monotonic() + 60)[0].ok
    channel = connect(address, deadline=time.monotonic() + 60, transport="tcp")
    assert isinstance(channel, SocketChannel)
    late = name_of(0, 1)
    data = content(late)
    header = Header(Kind.REQUEST, Op.PUT, number=1, body_nbytes=len(data))  # a request whose body comes later
    channel._control.send_frame(header, pack_put([late], [len(data)], [None]), deadline=time.monotonic() + 60)
    until(lambda: facts_of(client)["held"] > 0, "the request has not come")
    daemon.process.terminate()
    until(lambda: daemon.ask("/readyz")[0] == 503, "it does not say that it drains")
    assert json.loads(daemon.ask("/readyz")[1])["problems"] == ["the node is shutting down"]
    assert daemon.ask("/healthz")[0] == 200
    assert daemon.process.poll() is None
    channel._control._sock.sendall(data)
    assert daemon.process.wait(60) == 0  # the request has ended, and then the node
    client.close()
    channel.close()
    with kvstore.open_store(f"file://{tmp_path}/remote") as store:
        assert sum(1 for _ in store_keys(store)) == 2


def test_sigterm_ends_it_whichever_thread_the_kernel_gives_it_to(daemons: list[Daemon], tmp_path: Path) -> None:
    """One that is just starting another thread takes it from the main thread, which has not run yet."""
    daemons.append(Daemon("--unix", str(tmp_path / "node.sock"), "--memory", "8MiB"))
    process = daemons[0].process
    others = {int(thread) for thread in os.listdir(f"/proc/{process.pid}/task")} - {process.pid}
    assert ctypes.CDLL(None).tgkill(process.pid, max(others), signal.SIGTERM) == 0
    assert process.wait(30) == 0


def test_tokens_of_the_http_side(daemons: list[Daemon], tmp_path: Path) -> None:
    for name, token in (("admin", "of-admin"), ("default", "of-default"), ("a", "of-a")):
        (tmp_path / name).write_text(token + "\n", encoding="utf-8")
    log = tmp_path / "log"
    daemons.append(
        Daemon(
            "--listen", "127.0.0.1:0", "--http", "127.0.0.1:0", "--memory", "8MiB",
            "--token-file", f"{tmp_path}/default", "--http-admin-token-file", f"{tmp_path}/admin",
            "--name", "kv-7", "--advertise", "kv-7.local",
            "--namespace", "a", "--token-file", f"{tmp_path}/a", "--memory", "2MiB", errors=log,
        )
    )  # fmt: skip
    daemon = daemons[0]
    assert [daemon.ask(path)[0] for path in ("/healthz", "/readyz", "/", "/openapi.json")] == [200] * 4
    assert [daemon.ask(path)[0] for path in ("/metrics", "/page/data", "/v1/workers")] == [401] * 3
    assert [daemon.ask(path, "of-a")[0] for path in ("/metrics", "/page/data")] != [200] * 2
    assert daemon.ask("/v1/workers", "wrong")[0] == 401
    (seen,) = json.loads(daemon.ask("/v1/workers", "of-a")[1])
    assert {tier["namespace"] for tier in seen["usage"]} == {"a"}
    (all_of_it,) = json.loads(daemon.ask("/v1/workers", "of-admin")[1])
    assert {tier["namespace"] for tier in all_of_it["usage"]} == {"", "a"}
    port = daemon.facts["address"].rpartition(":")[2]
    assert (all_of_it["instance"], all_of_it["address"]) == ("kv-7", f"kv-7.local:{port}")
    assert all_of_it["http"].startswith("http://kv-7.local:")
    status, body = daemon.ask("/metrics", "of-admin")
    assert status == 200
    assert b'kvstore_node_tier_capacity_bytes{namespace="a",tier="memory"}' in body
    assert daemon.end() == 0
    assert not any(secret in log.read_text(encoding="utf-8") for secret in ("of-admin", "of-default", "of-a"))


@pytest.mark.leaves("boto3 and moto keep connections and threads of their own")
def test_daemons_over_one_bucket_with_credentials_from_the_environment(daemons: list[Daemon], tmp_path: Path) -> None:
    with moto_server() as endpoint:
        remote = f"s3://{BUCKET}/{unique_prefix()}?endpoint_url={endpoint}&region=us-east-1&addressing=path"
        secrets = {"KVSTORE_S3_ACCESS_KEY_ID": ACCESS_KEY, "KVSTORE_S3_SECRET_ACCESS_KEY": SECRET_KEY}
        log = tmp_path / "log"
        names = [name_of(0, index) for index in range(12)]
        for host in ("one", "other"):
            disk = f"file://{tmp_path}/{host}?bytes=16MiB"
            words = ["--unix", f"{tmp_path}/{host}.sock", "--memory", "16MiB", "--disk", disk, "--remote", remote]
            daemons.append(Daemon(*words, errors=log, **secrets))
        one, other = (connected(daemon.url) for daemon in daemons)
        writes = [Write(name, [memoryview(content(name))]) for name in names]
        assert all(outcome.ok for outcome in one.put(writes, deadline=time.monotonic() + 60))
        assert daemons[0].end() == 0  # it brings down what it owes
        assert whole_or_absent(other, names) == len(names)
        assert facts_of(other)["disk_loaded"] == len(names)
        one.close()
        other.close()
        assert daemons[1].end() == 0
        assert SECRET_KEY not in log.read_text(encoding="utf-8")


class Silent(threading.Thread):
    """Takes connections and never says a word."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.address = "{}:{}".format(*self._socket.getsockname())
        self.heard: list[socket.socket] = []

    def run(self) -> None:
        while True:
            try:
                self.heard.append(self._socket.accept()[0])
            except OSError:
                return

    def end(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self.join(60)
        for each in (self._socket, *self.heard):
            each.close()


@pytest.fixture
def silent() -> Iterator[Silent]:
    found = Silent()
    found.start()
    yield found
    found.end()


@pytest.mark.parametrize("second", [None, signal.SIGINT])
def test_a_remote_place_that_says_nothing_holds_up_neither_start_nor_end(
    daemons: list[Daemon], tmp_path: Path, silent: Silent, second: signal.Signals | None
) -> None:
    remote = f"s3://bucket/kv?endpoint_url=http://{silent.address}&region=us-east-1&addressing=path"
    secrets = {"KVSTORE_S3_ACCESS_KEY_ID": "x", "KVSTORE_S3_SECRET_ACCESS_KEY": "y"}
    log = tmp_path / "log"
    daemons.append(
        Daemon(
            "--unix",
            str(tmp_path / "node.sock"),
            "--http",
            "127.0.0.1:0",
            "--memory",
            "16MiB",
            "--remote",
            remote,
            "--drain-timeout",
            "1s" if second is None else "600s",
            errors=log,
            **secrets,
        )
    )
    daemon = daemons[0]
    client = connected(daemon.url)
    name = name_of(0, 0)
    assert client.put([Write(name, [memoryview(content(name))])], deadline=time.monotonic() + 60)[0].ok
    assert whole_or_absent(client, [name]) == 1
    host = daemon.facts["http"].removeprefix("http://")
    asking = http.client.HTTPConnection(host, timeout=60)  # an HTTP client that hangs as well
    body = json.dumps({"chunks": {"keys": [name_of(0, 1).hex()]}})
    asking.request("POST", "/v1/lookup?timeout_s=50", body, {"content-type": "application/json"})
    client.close()
    until(lambda: silent.heard, "nobody asks what is remote")
    daemon.process.terminate()
    if second is None:
        assert daemon.process.wait(30) == 0
        assert "1 records were not written in time" in log.read_text(encoding="utf-8")
    else:
        until(lambda: daemon.ask("/readyz")[0] == 503, "it does not say that it drains")
        assert daemon.process.poll() is None
        daemon.process.send_signal(second)
        assert daemon.process.wait(30) == -second
    asking.close()


def test_seconds_of_prefill_that_were_saved(daemons: list[Daemon], tmp_path: Path) -> None:
    daemons.append(
        Daemon(
            "--unix",
            str(tmp_path / "node.sock"),
            "--http",
            "127.0.0.1:0",
            "--memory",
            "16MiB",
            "--prefill-per-record",
            "1500ms",
        )
    )
    daemon = daemons[0]
    client = connected(daemon.url)
    name = name_of(0, 0)
    assert client.put([Write(name, [memoryview(content(name))])], deadline=time.monotonic() + 60)[0].ok
    assert whole_or_absent(client, [name, name]) == 2
    client.close()
    assert b"\nkvstore_node_prefill_saved_seconds_total 3.0\n" in daemon.ask("/metrics")[1]
    assert sum(filter(None, json.loads(daemon.ask("/page/data")[1])["hour"]["saved_s"])) == 3.0
    assert daemon.end() == 0


def store_keys(store: kvstore.Store) -> Iterator[Key]:
    for target in store._machinery.targets:
        for page in target.backend.list(deadline=time.monotonic() + 60):
            yield from (info.key for info in page)
