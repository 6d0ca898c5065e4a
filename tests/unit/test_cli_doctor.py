"""`kvstore doctor` on this host: folders, memory, nodes, what makes no sense, and what a probe may find."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvstore.backend import MISS, Backend, Capability, KeyInfo, Outcome, Read, Status, Write
from kvstore.errors import ConfigError, PermanentError, TransientError
from kvstore.keys import Key
from kvstore_backends.memory import MemoryBackend
from kvstore_backends.node_server import NodeServer
from kvstore_cli.doctor import diagnose
from kvstore_cli.doctor_checks import Late, Place, within
from kvstore_cli.doctor_network import Target, check_way
from kvstore_cli.doctor_probe import _Trial
from kvstore_cli.main import main

Checks = dict[str, dict[str, Any]]


def look(*urls: str, **options: Any) -> tuple[int, Checks]:
    """Exit status, and the checks of the only place by name (the last one of a name)."""
    status, report = diagnose(urls, **{"nbytes": 64 << 10, **options})
    (place,) = report["places"]
    return status, {check["name"]: check for check in place["checks"]}


def stats(checks: Checks) -> dict[str, str]:
    return {name: check["status"] for name, check in checks.items()}


# What works.


def test_a_folder(tmp_path: Path) -> None:
    status, checks = look(f"file://{tmp_path}")
    assert status == 0
    assert set(stats(checks).values()) <= {"ok", "warn"}
    assert checks["folder"]["data"]["free_bytes"] > 0
    assert checks["put"]["data"]["bytes"] == 64 << 10
    assert checks["get"]["data"]["bytes_per_s"] > 0
    assert checks["lookup"]["data"]["median_ms"] >= 0
    assert "durable" in checks["capabilities"]["data"]["capabilities"]
    assert checks["delete"]["status"] == "ok"
    left = [path for path in tmp_path.rglob("*") if path.is_file() and path.stat().st_size >= 64 << 10]
    assert left == [], "the probe was removed"


def test_memory_is_seen_by_this_process_only() -> None:
    status, checks = look("memory://?bytes=16MiB")
    assert status == 0
    assert checks["capabilities"]["status"] == "warn"
    assert "this process only" in checks["capabilities"]["detail"]


def test_read_only_stores_nothing(tmp_path: Path) -> None:
    status, checks = look(f"file://{tmp_path}", read_only=True)
    assert status == 0
    assert [checks[name]["status"] for name in ("put", "get", "delete")] == ["skip"] * 3
    assert checks["lookup"]["status"] == checks["list"]["status"] == "ok"


def test_a_folder_that_was_not_there_is_noted(tmp_path: Path) -> None:
    status, checks = look(f"file://{tmp_path}/kv")
    assert status == 0
    assert checks["folder"]["status"] == "warn"
    assert "was not there" in checks["folder"]["detail"]


def test_a_node_over_tcp_and_over_its_socket(tmp_path: Path) -> None:
    with NodeServer("127.0.0.1:0", unix_path=str(tmp_path / "kv.sock"), memory_bytes=16 << 20) as node:
        status, checks = look(f"node://{node.address}")
        assert status == 0
        assert {"dns", "tcp", "lookup", "put", "get", "delete"} <= checks.keys()
        status, checks = look(f"node://{tmp_path}/kv.sock")
        assert status == 0
        assert checks["socket"]["status"] == "ok"


def test_a_configuration_with_tiers_has_all_its_places_looked_at(tmp_path: Path) -> None:
    file = tmp_path / "kv.yaml"
    file.write_text(f"tiers: ['memory://?bytes=16MiB', 'file://{tmp_path}/kv']\n", encoding="utf-8")
    (tmp_path / "kv").mkdir()
    status, report = diagnose((), config_file=str(file), nbytes=4096)
    assert status == 0
    assert [place["url"] for place in report["places"]] == ["memory://", f"file://{tmp_path}/kv"]


# What does not.


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("file://", "path of a folder"),
        ("file:///", "path of a folder"),
        ("s4://bucket", "unknown scheme s4://; known schemes"),
        ("weka://x", "file:///mnt/weka"),
        ("file:///tmp/kv?lane=3", "did you mean 'lanes'"),
        ("file:///tmp/kv?lanes=many", "'lanes'.*integer"),
        ("s3://b", "not the name of a bucket"),
        ("node://127.0.0.1:99999", "port"),
        ("valkey://", "servers"),
        ("s3://user:hunter2@bucket", "."),
        ("s3://bucket?secret_access_key=hunter2", "must not stand in a URL"),
        ("/mnt/kv", "file://"),
    ],
)
def test_a_url_that_makes_no_sense_is_status_2(url: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["doctor", url, "--json", "-"])
    out = capsys.readouterr().out
    report = json.loads(out)
    texts = [report["error"], *(check["detail"] for place in report["places"] for check in place["checks"])]
    assert status == 2
    assert any(re.search(message, text) for text in texts), texts
    assert "hunter2" not in out


def test_a_missing_extra_names_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvstore import registry

    def gone(name: str) -> Any:
        raise ModuleNotFoundError("No module named 'boto3'", name="boto3")

    monkeypatch.setattr(registry.importlib, "import_module", gone)
    status, report = diagnose(("s3://bucket/kv",))
    (check,) = report["places"][0]["checks"]
    assert (status, check["status"]) == (2, "fail")
    assert "pip install -c constraints.txt '.[s3]'" in check["detail"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written_to(tmp_path: Path) -> None:
    (tmp_path / "kv").mkdir(mode=0o500)
    status, checks = look(f"file://{tmp_path}/kv")
    assert status == 1
    assert "cannot be written to" in checks["folder"]["detail"]


def test_a_folder_whose_parent_is_missing(tmp_path: Path) -> None:
    status, checks = look(f"file://{tmp_path}/not/mounted")
    assert status == 1
    assert list(checks) == ["options", "folder"]
    assert "mount" in checks["folder"]["advice"]
    assert not (tmp_path / "not").exists()


def test_a_path_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "kv").write_text("x", encoding="utf-8")
    status, checks = look(f"file://{tmp_path}/kv")
    assert status == 1
    assert "not a folder" in checks["open"]["detail"]


@pytest.mark.leaves("a resolver that does not answer is left behind")
def test_a_name_without_address() -> None:
    status, checks = look("node://no-such-host.invalid:7070", timeout=10)
    assert status == 1
    assert list(checks) == ["options", "dns"]
    assert "no-such-host.invalid" in checks["dns"]["detail"]


def test_nobody_listens() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, not listening: refused
        status, checks = look(f"node://127.0.0.1:{taken.getsockname()[1]}")
    assert status == 1
    assert checks["tcp"]["status"] == "fail"
    assert "nothing listens there" in checks["tcp"]["advice"]
    assert "lookup" not in checks


def test_a_socket_that_is_not_there(tmp_path: Path) -> None:
    status, checks = look(f"node://{tmp_path}/kv.sock")
    assert status == 1
    assert "kvstore serve --unix" in checks["socket"]["advice"]


@contextmanager
def silent() -> Iterator[int]:
    """A server that accepts connections (as its backlog) and never says a word."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(64)
        yield server.getsockname()[1]


@pytest.mark.parametrize("url", ["node://127.0.0.1:{}", "valkey://127.0.0.1:{}", "valkeys://127.0.0.1:{}"])
def test_what_says_nothing_is_given_up_in_time(url: str) -> None:
    with silent() as port:
        began = time.monotonic()
        status, checks = look(url.format(port), timeout=1.0)
        took = time.monotonic() - began
    assert status == 1
    assert checks["tcp"]["status"] == "ok"
    failed = [check for check in checks.values() if check["status"] == "fail"]
    assert failed
    assert all(check["advice"] for check in failed), failed
    assert took < 30, "by its deadline, not by that of the system (minutes)"


def test_plain_text_where_tls_is_wanted() -> None:
    def answer(server: socket.socket) -> None:
        connection, _ = server.accept()
        with connection:
            connection.recv(1024)
            connection.sendall(b"-ERR what?\r\n" * 20)

    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(8)
        thread = threading.Thread(target=answer, args=(server,))
        thread.start()
        status, checks = look(f"valkeys://127.0.0.1:{server.getsockname()[1]}", timeout=10)
        thread.join(30)
    assert status == 1
    assert checks["tls"]["status"] == "fail"
    assert "valkey://" in checks["tls"]["advice"]


def test_a_wrong_token_is_refused_and_shown_nowhere(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from kvstore_backends.node_server import Namespace

    monkeypatch.setenv("KVSTORE_NODE_TOKEN", "hunter2-wrong")
    with NodeServer(
        "127.0.0.1:0", memory_bytes=16 << 20, default_namespace=False, namespaces=[Namespace("a", b"hunter2-right", 0)]
    ) as node:
        assert main(["doctor", f"node://{node.address}?namespace=a", "--bytes", "4KiB"]) == 1
        out = capsys.readouterr().out
        assert "hunter2" not in out
        assert "token" in out
        monkeypatch.setenv("KVSTORE_NODE_TOKEN", "hunter2-right")
        assert main(["doctor", f"node://{node.address}?namespace=a", "--bytes", "4KiB"]) == 0
        assert "hunter2" not in capsys.readouterr().out


# The trial, against backends that misbehave.


class Bad(MemoryBackend):
    """Memory that fails at one operation."""

    def __init__(self, operation: str, outcome: Outcome) -> None:
        super().__init__(16 << 20)
        self.operation, self.outcome = operation, outcome
        self.deleted: list[Key] = []

    def _is(self, operation: str) -> bool:
        return self.operation == operation

    def stat(self, keys: Sequence[Key], *, deadline: float) -> list[Outcome]:
        return [self.outcome] * len(keys) if self._is("stat") else super().stat(keys, deadline=deadline)

    def put(self, writes: Sequence[Write], *, deadline: float) -> list[Outcome]:
        return [self.outcome] * len(writes) if self._is("put") else super().put(writes, deadline=deadline)

    def get_into(self, reads: Sequence[Read], *, deadline: float) -> list[Outcome]:
        found = super().get_into(reads, deadline=deadline)
        if self._is("flip"):
            reads[0].dst[0] ^= 1
        return [self.outcome] * len(reads) if self._is("get") else found

    def delete(self, keys: Sequence[Key], *, deadline: float) -> list[Outcome]:
        self.deleted += keys
        return [self.outcome] * len(keys) if self._is("delete") else super().delete(keys, deadline=deadline)

    def list(self, *, deadline: float) -> Iterator[Sequence[KeyInfo]]:
        if self._is("list"):
            raise PermanentError("listing is denied", backend="bad", operation="list")
        return super().list(deadline=deadline)


DENIED = Outcome.failed(PermanentError("access denied", backend="bad"))
LATE = Outcome.failed(TransientError("the deadline passed", backend="bad"))


def tried(backend: Backend, seconds: float = 30.0) -> Checks:
    place = Place("x://", time.monotonic() + seconds)
    try:
        _Trial(place, backend, 4096).run(read_only=False)
    finally:
        backend.close()
    return {check["name"]: check for check in place.to_dict()["checks"]}


@pytest.mark.parametrize(
    ("operation", "outcome", "failed", "said"),
    [
        ("stat", DENIED, "lookup", "access denied"),
        ("stat", LATE, "lookup", "deadline"),
        ("stat", Outcome(Status.OK, 5), "lookup", "said to be there"),
        ("put", DENIED, "put", "access denied"),
        ("put", Outcome(Status.EXISTS), "put", "exists"),
        ("get", DENIED, "get", "access denied"),
        ("get", MISS, "get", "miss"),
        ("flip", MISS, "get", "other bytes"),
        ("list", MISS, "list", "listing is denied"),
        ("delete", DENIED, "delete", "access denied"),
        ("delete", MISS, "delete", "not there to be removed"),
    ],
)
def test_each_operation_that_fails_is_named(operation: str, outcome: Outcome, failed: str, said: str) -> None:
    backend = Bad(operation, outcome)
    checks = tried(backend)
    assert [name for name, check in checks.items() if check["status"] == "fail"] == [failed]
    assert said in checks[failed]["detail"]
    if operation in ("get", "flip", "list"):
        assert checks["delete"]["status"] == "ok", "the probe is removed whatever failed"
    if operation == "delete" and outcome is DENIED:
        assert "kvstore rm" in checks["delete"]["advice"]
        assert len(backend.deleted) == 2
    if operation == "stat":
        assert list(checks) == ["lookup"]


def test_a_put_that_failed_may_have_been_done_and_is_undone() -> None:
    class Halfway(Bad):
        def put(self, writes: Sequence[Write], *, deadline: float) -> list[Outcome]:
            MemoryBackend.put(self, writes, deadline=deadline)
            return [LATE] * len(writes)

    backend = Halfway("", LATE)
    place = Place("x://", time.monotonic() + 30)
    _Trial(place, backend, 4096).run(read_only=False)
    assert [info for page in backend.list(deadline=time.monotonic() + 30) for info in page] == []
    backend.close()


@pytest.mark.leaves("the call that hangs ends after the test has seen that nobody waits for it")
def test_a_call_that_hangs_is_left_behind() -> None:
    release = threading.Event()
    began = time.monotonic()
    with pytest.raises(Late):
        within(lambda: release.wait(60), began + 0.05)
    release.set()
    assert time.monotonic() - began < 30
    assert within(lambda: 3, time.monotonic() + 30) == 3
    with pytest.raises(ZeroDivisionError):
        within(lambda: 1 // 0, time.monotonic() + 30)


def test_a_hung_resolver(monkeypatch: pytest.MonkeyPatch) -> None:
    import kvstore_cli.doctor_network as network

    def late(*_: object) -> Any:
        raise Late

    monkeypatch.setattr(network, "within", late)
    place = Place("x://", time.monotonic() + 5)
    assert not check_way(place, Target("example.invalid", 443))
    assert "name server did not answer" in place.checks[0].detail


def test_what_cannot_list_is_not_asked_to() -> None:
    class Mute(MemoryBackend):
        def __init__(self) -> None:
            super().__init__(16 << 20)
            self.capabilities &= ~Capability.LIST

    assert tried(Mute())["list"]["status"] == "skip"


# The command line.


def test_the_text_says_what_to_change(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", f"file://{tmp_path}", f"file://{tmp_path}/not/mounted"]) == 1
    out = capsys.readouterr().out
    assert f"file://{tmp_path}/not/mounted\n" in out
    assert "✗ folder" in out
    assert "→ mount the file system first" in out
    assert out.endswith("1 failed, 0 to look at\n")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "name a URL"),
        (("memory://", "--timeout", "0"), "'timeout'"),
        (("memory://", "--timeout", "soon"), "'timeout'"),
        (("memory://", "--bytes", "0"), "'bytes'"),
        (("memory://", "--bytes", "1GiB"), "'bytes'"),
        (("--config", "/no/such.yaml"), "'config'"),
        (("memory://", "--json", "/no/such/folder/x"), "'json'"),
    ],
)
def test_what_makes_no_sense(words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", *words]) == 2
    assert message in capsys.readouterr().err


def test_advice_names_the_scheme(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Backend:
        raise ConfigError("no")

    monkeypatch.setattr("kvstore_cli.doctor_probe.open_backend", refuse)
    assert look("memory://")[1]["open"]["advice"] == "see `kvstore options memory`"


def test_a_node_that_fails_is_said_once() -> None:
    """In a process of its own: there are no handlers for the log there, and Python prints warnings itself."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection:
                    connection.recv(100)
                    connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n" * 20)

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        url = f"node://127.0.0.1:{listener.getsockname()[1]}"
        done = subprocess.run(
            [sys.executable, "-m", "kvstore_cli", "doctor", url, "--timeout", "20s"],
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        listener.shutdown(socket.SHUT_RDWR)
    thread.join()
    assert done.returncode == 1
    assert done.stdout.count("no frame of ours") == 1
    assert done.stderr == ""
