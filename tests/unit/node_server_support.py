"""What the tests of the node server share: keys, a scripted request, and a client of plain calls."""

from __future__ import annotations

import hashlib
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

import kvstore_backends._node_pins as pins_module
import kvstore_backends._node_service as service_module
from kvstore.keys import Key
from kvstore_backends._node_service import Service
from kvstore_backends._node_space import Namespace, Space
from kvstore_backends.node.protocol import (
    Code,
    ListPage,
    Op,
    Status,
    pack_data,
    pack_get,
    pack_keys,
    pack_list,
    pack_put,
    unpack_outcomes,
    unpack_page,
    unpack_ticket,
)
from kvstore_transport.errors import ConnectionLost
from kvstore_transport.seam import Answer, Incoming, Peer

KiB, MiB = 1 << 10, 1 << 20


def key(name: object) -> Key:
    return Key(hashlib.sha256(str(name).encode()).digest())


def keys(count: int, name: str = "k") -> list[Key]:
    return [key((name, i)) for i in range(count)]


def payload(name: object, nbytes: int) -> bytes:
    return random.Random(str(name)).randbytes(nbytes)


def soon() -> float:
    return time.monotonic() + 60


@contextmanager
def impatient() -> Iterator[None]:
    """Within the block, requests wait only an instant for leave and for memory, whatever their deadline."""
    with pytest.MonkeyPatch.context() as patch:
        for module, name in ((pins_module, "LEAVE_S"), (service_module, "LEAVE_S"), (service_module, "_ROOM_S")):
            patch.setattr(module, name, 0.02)
        yield


def in_thread(function: Callable[[], Any]) -> Callable[[], Any]:
    """Run it in a thread; the returned function joins it, and returns or raises what it did."""
    result: list[Any] = []

    def run() -> None:
        try:
            result.append(function())
        except BaseException as error:
            result.append(error)

    thread = threading.Thread(target=run)
    thread.start()

    def join() -> Any:
        thread.join(60)
        assert not thread.is_alive()
        if isinstance(result[0], BaseException):
            raise result[0]
        return result[0]

    return join


class FakeIncoming(Incoming):
    """A request whose body comes as scripted.

    Args:
        cut: the connection dies after so many bytes of the body.
        wait: called when half of the body is there.
    """

    def __init__(
        self, peer: Peer, session: dict[str, object], op: int, meta: bytes, body: bytes = b"", *,
        deadline: float | None = None, cut: int | None = None, wait: Callable[[], object] | None = None,
    ) -> None:  # fmt: skip
        self.peer = peer
        self.session = session
        self.op = op
        self.meta = meta
        self.body_nbytes = len(body)
        self.deadline = soon() if deadline is None else deadline
        self.received = self.discarded = False
        self._body = body
        self._cut = cut
        self._wait = wait

    def receive(self, views: Sequence[memoryview]) -> None:
        assert not self.received
        assert not self.discarded
        self.received = True
        assert sum(map(len, views)) == self.body_nbytes
        at = 0
        for view in views:
            assert not view.readonly
            end = at + len(view)
            if self._cut is not None and end > self._cut:
                view[: max(0, self._cut - at)] = self._body[at : self._cut]
                raise ConnectionLost("scripted")
            view[:] = self._body[at:end]
            at = end
            if self._wait is not None and at * 2 >= self.body_nbytes:
                self._wait()
                self._wait = None

    def discard(self) -> None:
        assert not self.received
        self.discarded = True


class Caller:
    """A client of a `Service`, without a transport: one connection."""

    def __init__(self, service: Service, *, client: object = "client", namespace: str = "") -> None:
        name = hashlib.sha256(str(client).encode()).digest()[:16]
        self.peer = Peer("test", "inproc", "1", namespace, name, 16 * MiB, 256 * MiB, {})
        self.session: dict[str, object] = {}
        self.service = service

    def ask(self, op: int, meta: bytes, body: bytes = b"", **more: Any) -> Answer:
        return self.service(FakeIncoming(self.peer, self.session, op, meta, body, **more))

    def outcomes(self, answer: Answer) -> tuple[list[Code], list[int]]:
        assert answer.status == Status.OK, answer
        codes, sizes, self.notes = unpack_outcomes(answer.meta)
        return codes, sizes

    def about(self, op: Op, names: Sequence[Key], **more: Any) -> list[Code]:
        return self.outcomes(self.ask(op, pack_keys(names), **more))[0]

    def stat(self, names: Sequence[Key]) -> list[Code]:
        return self.about(Op.STAT, names)

    def put_at_once(self, records: Mapping[Key, bytes], **more: Any) -> list[Code]:
        meta = pack_put([*records], [*map(len, records.values())], [None] * len(records))
        return self.outcomes(self.ask(Op.PUT, meta, b"".join(records.values()), **more))[0]

    def question(
        self, records: Mapping[Key, bytes], parents: Sequence[Key | None] = (), **more: Any
    ) -> tuple[int, list[Code]]:
        """(ticket, codes)"""
        meta = pack_put([*records], [*map(len, records.values())], parents or [None] * len(records))
        answer = self.ask(Op.PUT, meta, **more)
        assert answer.status == Status.OK, answer
        ticket, rest = unpack_ticket(answer.meta)
        return ticket, unpack_outcomes(rest)[0]

    def data(self, ticket: int, body: bytes, **more: Any) -> Answer:
        return self.ask(Op.DATA, pack_data(ticket), body, **more)

    def put(self, records: Mapping[Key, bytes], parents: Sequence[Key | None] = ()) -> list[Code]:
        """With a question; the final codes."""
        ticket, codes = self.question(records, parents)
        wanted = [index for index, code in enumerate(codes) if code == Code.WANTED]
        if wanted:
            body = b"".join([*records.values()][index] for index in wanted)
            final, _ = self.outcomes(self.data(ticket, body))
            for index, code in zip(wanted, final, strict=True):
                codes[index] = code
        return codes

    def get_answer(self, reads: Sequence[tuple[Key, int, int]], **more: Any) -> Answer:
        meta = pack_get([r[0] for r in reads], [r[1] for r in reads], [r[2] for r in reads])
        return self.ask(Op.GET, meta, **more)

    def get(self, reads: Sequence[tuple[Key, int, int]]) -> list[bytes | Code]:
        """Bytes of what is OK, the code of the rest."""
        answer = self.get_answer(reads)
        codes, sizes = self.outcomes(answer)
        body = b"".join(answer.body)
        if answer.done is not None:
            answer.done()
        found: list[bytes | Code] = []
        at = 0
        for code, size in zip(codes, sizes, strict=True):
            if code == Code.OK:
                found.append(body[at : at + size])
                at += size
            else:
                found.append(code)
        assert at == len(body)
        return found

    def whole(self, name: Key, nbytes: int = 1 << 30) -> bytes | Code:
        return self.get([(name, 0, nbytes)])[0]

    def list_page(self, cursor: int = 0, page: int = 1000) -> ListPage:
        answer = self.ask(Op.LIST, pack_list(cursor, page))
        assert answer.status == Status.OK, answer
        return unpack_page(answer.meta)

    def list_all(self, page: int = 1000) -> dict[Key, int]:
        found: dict[Key, int] = {}
        cursor = 0
        while True:
            listed = self.list_page(cursor, page)
            assert not found.keys() & set(listed.keys)
            found.update(zip(listed.keys, listed.sizes, strict=True))
            cursor = listed.cursor
            if not cursor:
                return found

    def end(self) -> None:
        """The connection ends."""
        on_close = self.session.pop("on_close", None)
        if callable(on_close):
            on_close()


class Node:
    """A `Service` with its spaces, without a transport."""

    def __init__(
        self, *namespaces: Namespace, nbytes: int = 4 * MiB, share: float = 0.5, credits_bytes: int = 128 * MiB,
        max_body: int = 256 * MiB, stall_s: float = 60.0, clock: Callable[[], float] = time.time,
    ) -> None:  # fmt: skip
        self.spaces = {
            each.name: Space(
                each, each.memory_bytes or nbytes, shared=False, share=share, credits_bytes=credits_bytes, clock=clock
            )
            for each in namespaces or (Namespace(),)
        }
        self.space = next(iter(self.spaces.values()))
        self.service = Service(self.spaces, max_body=max_body, stall_s=stall_s)
        self.callers: list[Caller] = []

    def caller(self, client: object = "client", namespace: str = "") -> Caller:
        self.callers.append(Caller(self.service, client=client, namespace=namespace))
        return self.callers[-1]

    def stats(self, name: str = "") -> dict[str, Any]:
        return self.spaces[name].stats()

    def close(self, drain_s: float = 60.0) -> None:
        """End the connections, then the node; nothing may be held then."""
        for caller in self.callers:
            caller.end()
        self.service.stop()
        self.service.close()
        held = [space.gate.used for space in self.spaces.values()]
        pending = [bool(space.store.pending) for space in self.spaces.values()]
        for space in self.spaces.values():
            space.close(drain_s)
        assert not any(held)
        assert not any(pending)
        for space in self.spaces.values():
            stats = space.store.pool.stats()
            assert (stats.in_use, stats.buffers, stats.pinned) == (0, 0, 0)
