"""What the tests of the disk below a node share."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvstore.backend import NO_DEADLINE, Outcome, Read, Write
from kvstore.keys import Key
from kvstore_backends._node_below import Below
from kvstore_backends._node_space import Namespace

from .node_server_support import KiB, Node


class Nodes:
    """Opens nodes over the folder `kv`; options of the namespace by keyword."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._nodes: list[Node] = []

    def __call__(
        self, *, query: str = "", nbytes: int = 64 * KiB, share: float = 0.5,
        clock: Callable[[], float] = time.time, **fields: Any,
    ) -> Node:  # fmt: skip
        space = Namespace(disk=f"file://{self._folder}/kv{query}", **fields)
        self._nodes.append(Node(space, nbytes=nbytes, share=share, clock=clock))
        return self._nodes[-1]

    def close(self) -> None:
        for node in self._nodes:
            node.close()


def disk_of(node: Node) -> Below:
    assert node.space.below is not None
    return node.space.below


def settled(node: Node) -> Below:
    disk = disk_of(node)
    assert disk.settle(60)
    return disk


def on_disk(node: Node, names: Sequence[Key]) -> list[bool]:
    return [outcome.ok for outcome in disk_of(node).backend.stat(names, deadline=NO_DEADLINE)]


def in_memory(node: Node, names: Sequence[Key]) -> list[bool]:
    return [name in node.space.store.records for name in names]


def forget_memory(node: Node) -> None:
    """As eviction would do it, all at once."""
    store = node.space.store
    with store.lock:
        for name in [*store.records]:
            store.remove_locked(name)


class SlowDisk:
    """Makes `backend.put` of a node wait until `open` is set."""

    def __init__(self, node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.open = threading.Event(), threading.Event()
        backend = disk_of(node).backend
        original = backend.put

        def put(writes: Sequence[Write], *, deadline: float) -> list[Outcome]:
            self.begun.set()
            assert self.open.wait(60)
            return original(writes, deadline=deadline)

        monkeypatch.setattr(backend, "put", put)


class SlowReads:
    """Makes `backend.get_into` of a node wait, when its bytes are there, until `open` is set."""

    def __init__(self, node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.open = threading.Event(), threading.Event()
        self.counts: list[int] = []
        backend = disk_of(node).backend
        original = backend.get_into

        def get_into(reads: Sequence[Read], *, deadline: float) -> list[Outcome]:
            outcomes = original(reads, deadline=deadline)
            if reads:
                self.counts.append(len(reads))
                self.begun.set()
                assert self.open.wait(60)
            return outcomes

        monkeypatch.setattr(backend, "get_into", get_into)
