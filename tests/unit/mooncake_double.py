"""A Mooncake Store in memory, with the calls of its client that the backend uses, and switches to make it misbehave."""

from __future__ import annotations

import ctypes
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from kvstore_backends import _mooncake_client, mooncake
from kvstore_backends.mooncake import MooncakeBackend, Settings

__all__ = ["Double", "Place", "double_place"]


class Place:
    """What all clients of one double share.

    Attributes:
        objects: name → bytes, as stored.
        reserved: names that some session holds.
        leased: names that `batch_remove` refuses without force.
        calls: names of the calls made, in order.
        before: called with the name of a call and its first argument, before it does anything; may block, or return a
            list of codes to answer with.
    """

    def __init__(self) -> None:
        self.objects: dict[str, bytearray] = {}
        self.reserved: dict[str, int] = {}
        self.leased: set[str] = set()
        self.calls: list[str] = []
        self.joined: list[tuple[Any, ...]] = []
        self.closed = 0
        self.before: Callable[[str, Any], list[int] | None] = lambda call, what: None
        self.registered: dict[int, int] = {}
        self.refuses_memory = False
        self.setup_code = 0
        self.lock = threading.Lock()


class Double:
    """One client."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.sessions: dict[str, bytearray] = {}

    def _begin(self, call: str, what: Any) -> list[int] | None:
        self.place.calls.append(call)
        return self.place.before(call, what)

    def setup(self, *words: Any, **more: Any) -> int:
        self.place.joined.append((*words, more))
        return self.place.setup_code

    def close(self) -> int:
        self.place.closed += 1
        return 0

    def register_buffer(self, address: int, nbytes: int) -> int:
        if self.place.refuses_memory and self.place.registered:
            return -600
        assert address not in self.place.registered
        self.place.registered[address] = nbytes
        return 0

    def unregister_buffer(self, address: int) -> int:
        del self.place.registered[address]
        return 0

    def _inside(self, address: int, nbytes: int) -> bool:
        return any(start <= address and address + nbytes <= start + n for start, n in self.place.registered.items())

    def batch_is_exist(self, names: list[str]) -> list[int]:
        answer = self._begin("exist", names)
        return [int(name in self.place.objects) for name in names] if answer is None else answer

    def batch_get_replica_desc(self, names: list[str]) -> dict[str, list[Any]]:
        if self._begin("desc", names) is not None:
            return {}
        return {name: [_replica(len(self.place.objects[name]))] for name in names if name in self.place.objects}

    def get_size(self, name: str) -> int:
        answer = self._begin("size", name)
        return answer[0] if answer is not None else len(self.place.objects.get(name, b"")) or -704

    def get_into_ranges(
        self, bases: list[int], names: list[list[str]], to: list[list[list[int]]], at: list[list[list[int]]],
        sizes: list[list[list[int]]],
    ) -> list[list[list[int]]]:  # fmt: skip
        answer = self._begin("ranges", names)
        return [
            [
                [
                    answer[0] if answer is not None else self._range(base + dst, name, src, size)
                    for dst, src, size in zip(*per_name, strict=True)
                ]
                for name, *per_name in zip(*per_base, strict=True)
            ]
            for base, *per_base in zip(bases, names, to, at, sizes, strict=True)
        ]

    def _range(self, address: int, name: str, at: int, size: int) -> int:
        data = self.place.objects.get(name)
        if data is None:
            return -704
        if at + size > len(data) or not self._inside(address, size):
            return -600
        ctypes.memmove(address, bytes(data[at : at + size]), size)
        return size

    def batch_put_session_start(self, names: list[str], sizes: list[int], config: Any) -> list[int]:
        answer = self._begin("start", names)
        if answer is not None:
            return answer
        return [self._start(name, size) for name, size in zip(names, sizes, strict=True)]

    def _start(self, name: str, size: int) -> int:
        with self.place.lock:
            if name in self.sessions:
                return -600
            if name in self.place.objects or name in self.place.reserved:
                return -705
            self.place.reserved[name] = size
            self.sessions[name] = bytearray(size)
            return 0

    def batch_put_from_multi_buffer_ranges(
        self, names: list[str], addresses: list[list[int]], sizes: list[list[int]], places: list[list[int]]
    ) -> list[int]:
        answer = self._begin("transfer", names)
        if answer is not None:
            return answer
        moved = []
        for name, *runs in zip(names, addresses, sizes, places, strict=True):
            for address, size, place in zip(*runs, strict=True):
                assert self._inside(address, size), "memory that is not registered was given to Mooncake"
                self.sessions[name][place : place + size] = ctypes.string_at(address, size)
            moved.append(sum(runs[1]))
        return moved

    def batch_put_session_end(self, names: list[str]) -> list[int]:
        answer = self._begin("end", names)
        if answer is not None:
            return answer
        for name in names:
            self.place.objects[name] = self.sessions.pop(name)
            del self.place.reserved[name]
        return [0] * len(names)

    def batch_put_session_revoke(self, names: list[str]) -> list[int]:
        answer = self._begin("revoke", names)
        if answer is not None:
            return answer
        for name in names:
            self.sessions.pop(name, None)
            self.place.reserved.pop(name, None)
        return [0] * len(names)

    def batch_remove(self, names: list[str], force: bool) -> list[int]:
        self._begin("remove", names)
        return [
            -706
            if name in self.place.leased and not force
            else 0
            if self.place.objects.pop(name, None) is not None
            else -704
            for name in names
        ]


def _replica(nbytes: int) -> Any:
    memory = SimpleNamespace(buffer_descriptor=SimpleNamespace(size=nbytes))
    return SimpleNamespace(
        is_memory_replica=lambda: True, is_disk_replica=lambda: False, get_memory_descriptor=lambda: memory
    )


@contextmanager
def double_place(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Place, Callable[..., MooncakeBackend]]]:
    """A store, and a function that opens backends on it, by options. They are closed at the end."""
    place = Place()
    module = SimpleNamespace(MooncakeDistributedStore=lambda: Double(place), ReplicateConfig=SimpleNamespace)
    for user in (_mooncake_client, mooncake):
        monkeypatch.setattr(user, "load", lambda local_host=None: module)
    opened: list[MooncakeBackend] = []
    with socket.create_server(("127.0.0.1", 0)) as master:

        def open_backend(**options: Any) -> MooncakeBackend:
            fields = {"staging": 1 << 20, "lanes": 2, **options}
            backend = MooncakeBackend(Settings(("127.0.0.1", master.getsockname()[1]), **fields))
            opened.append(backend)
            return backend

        try:
            yield place, open_backend
        finally:
            for backend in opened:
                backend.close()
