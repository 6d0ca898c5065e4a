"""Nodes that join and leave under load, as DNS (a headless service) and a watched file tell of them."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

import pytest

from kvstore.backend import Status
from kvstore.keys import Key
from kvstore_backends.node import NodeBackend
from kvstore_backends.node.members import parse_authority
from kvstore_backends.node.options import Settings
from kvstore_backends.node_server import NodeServer
from tests.node_support import MEMORY, copies, data, get, keys, put, statuses, wait_until

HOSTS = ("127.0.0.1", "127.0.0.2", "127.0.0.3", "127.0.0.4")
SIZE = 5000


@pytest.fixture
def nodes() -> Iterator[list[NodeServer]]:
    """All on one port, as the pods behind a service; the addresses are those of one loopback."""
    for _ in range(20):
        with contextlib.ExitStack() as stack:
            found = [stack.enter_context(NodeServer("127.0.0.1:0", memory_bytes=MEMORY))]
            port = found[0].address.rpartition(":")[2]
            try:
                for host in HOSTS[1:]:
                    found.append(stack.enter_context(NodeServer(f"{host}:{port}", memory_bytes=MEMORY)))
            except OSError:  # somebody else has that port there
                continue
            yield found
            return
    raise AssertionError("no port is free on all addresses")


class Membership(Protocol):
    """Where a pool learns of its nodes."""

    def open(self) -> NodeBackend: ...
    def name(self, some: Sequence[NodeServer]) -> None: ...
    def fail(self) -> None: ...


class Dns:
    """A scripted resolver."""

    def __init__(self, nodes: Sequence[NodeServer], folder: Path) -> None:
        self._port = int(nodes[0].address.rpartition(":")[2])
        self._answer: list[str] | OSError = []

    def open(self) -> NodeBackend:
        found = Settings(
            members=parse_authority(f"kv.test:{self._port}"), discover="dns", refresh=0.05, transport="tcp", replicas=2
        )
        return NodeBackend(found, resolve=self._resolve)

    def _resolve(self, host: str, port: int) -> Sequence[str]:
        assert (host, port) == ("kv.test", self._port)
        if isinstance(self._answer, OSError):
            raise self._answer
        return self._answer

    def name(self, some: Sequence[NodeServer]) -> None:
        self._answer = [node.address.rpartition(":")[0] for node in reversed(some)]  # a server shuffles them

    def fail(self) -> None:
        self._answer = OSError("temporary failure in name resolution")


class File:
    """A file that is replaced by `rename`."""

    def __init__(self, nodes: Sequence[NodeServer], folder: Path) -> None:
        self._path = folder / "nodes"

    def open(self) -> NodeBackend:
        return NodeBackend(Settings(path=str(self._path), discover="file", refresh=0.05, transport="tcp", replicas=2))

    def _write(self, text: str) -> None:
        new = self._path.with_suffix(".new")
        new.write_text(text)
        os.replace(new, self._path)

    def name(self, some: Sequence[NodeServer]) -> None:
        self._write("".join(f"{node.address}\n" for node in some))

    def fail(self) -> None:
        self._write("what is this\n")


class Load:
    """Reads all records and puts a new one, again and again; every byte must be right, and nothing may be missing."""

    def __init__(self, backend: NodeBackend, records: dict[Key, bytes]) -> None:
        self._backend, self._records = backend, records
        self._done = threading.Event()
        self.rounds = 0
        self.errors: list[BaseException] = []
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._done.is_set():
                found = get(self._backend, [*self._records], SIZE)
                assert statuses([outcome for outcome, _ in found]) == [Status.OK] * len(found)
                assert [value for _, value in found] == [*self._records.values()]
                (new,) = keys(1, f"new {self.rounds} ")
                assert statuses(put(self._backend, {new: b"x"})) == [Status.OK]
                self.rounds += 1
        except BaseException as error:
            self.errors.append(error)

    def go_on(self, rounds: int = 5) -> None:
        until = self.rounds + rounds
        wait_until(lambda: bool(self.errors) or self.rounds >= until, "reads and writes go on")
        if self.errors:
            raise self.errors[0]

    def stop(self) -> None:
        self._done.set()
        self._thread.join()
        if self.errors:
            raise self.errors[0]


@pytest.mark.parametrize("kind", [Dns, File])
def test_nodes_join_and_leave_under_load(kind: type[Dns] | type[File], nodes: list[NodeServer], tmp_path: Path) -> None:
    """Two replicas, and one node at a time: no read misses, and in the end each record is where it belongs."""
    told: Membership = kind(nodes, tmp_path)
    told.name(nodes[:2])
    with contextlib.closing(told.open()) as backend:
        records = {each: data(SIZE, each) for each in keys(40)}
        assert statuses(put(backend, records)) == [Status.OK] * 40

        def members() -> set[str]:
            return {state["address"] for state in backend.stats()["nodes"].values()}

        def counted(what: str) -> float:
            return backend.metrics.value(f"kvstore_node_membership_{what}_total", backend.name)

        load = Load(backend, records)
        try:
            load.go_on()
            for number, now in enumerate(([0, 1, 2], [0, 1, 2, 3], [0, 2, 3], [2, 3]), 1):
                some = [nodes[at] for at in now]
                left = [node for node in nodes if node.address in members() and node not in some]
                told.name(some)
                wanted = {node.address for node in some}
                wait_until(lambda wanted=wanted: members() == wanted, "the pool knows")  # type: ignore[misc]
                load.go_on()
                assert counted("changes") == number
                assert backend.repairer.settled(60)
                load.go_on()
                assert backend.repairer.settled(60)
                for node in left:
                    node.close()
                load.go_on()
            failures = counted("errors")
            told.fail()
            wait_until(lambda: counted("errors") >= failures + 3, "the failure is noticed")
            load.go_on()
            assert members() == {nodes[2].address, nodes[3].address}
            assert counted("changes") == 4
            addresses = [nodes[2].address, nodes[3].address]
            wait_until(
                lambda: all(copies(addresses, each, SIZE) == [value, value] for each, value in records.items()),
                "reads have noticed what a node lacks, and it was given to it",
            )
        finally:
            load.stop()
        assert load.rounds > 60
