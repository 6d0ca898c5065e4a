"""One node's client: how batches are cut, what is sent, and what happens when the node misbehaves."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.backend import Capability, Outcome, Read, Status, Write
from kvstore.buffers import BufferPool
from kvstore.errors import ClosedError, KVStoreError, PermanentError, PoolExhausted, TransientError
from kvstore.keys import Key
from kvstore.wrappers.base import LocalWait
from kvstore_backends.node import NodeClient
from kvstore_backends.node import calls as calls_module
from kvstore_backends.node import client as client_module
from kvstore_backends.node.leases import NodeLease
from kvstore_backends.node.protocol import Code, Op, pack_outcomes, pack_ticket
from kvstore_backends.node.protocol import Status as Answered
from kvstore_backends.node.requests import Landing, split, split_by_key
from kvstore_backends.node_server import NodeServer
from kvstore_transport import Answer, Credentials, Incoming, Limits, ProtocolError, Server, connect
from tests.node_support import client, data, get, key, keys, put, servers, soon, statuses, wait_until

# Cutting.

_sizes = st.lists(st.integers(0, 300), max_size=60)


@given(sizes=_sizes, most_bytes=st.integers(1, 500), most_items=st.integers(1, 20))
def test_a_batch_is_cut_into_requests_that_fit(sizes: list[int], most_bytes: int, most_items: int) -> None:
    parts = split(sizes, most_bytes=most_bytes, most_items=most_items)
    assert [at for part in parts for at in part] == [*range(len(sizes))]
    for part in parts:
        assert 0 < len(part) <= most_items
        assert len(part) == 1 or sum(sizes[at] for at in part) <= most_bytes


@given(
    items=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 300)), max_size=60),
    most_bytes=st.integers(300, 900),
    most_items=st.integers(1, 60),
)
def test_all_reads_of_a_key_are_in_one_request(
    items: list[tuple[int, int]], most_bytes: int, most_items: int
) -> None:  # fmt: skip
    some, sizes = [key(name) for name, _ in items], [size for _, size in items]
    largest = 2 * most_bytes
    parts = split_by_key(some, sizes, most_bytes=most_bytes, largest=largest, most_items=most_items)
    assert sorted(at for part in parts for at in part) == [*range(len(items))]
    where: dict[Key, set[int]] = {}
    for number, part in enumerate(parts):
        assert 0 < len(part) <= most_items
        total = sum(sizes[at] for at in part)
        assert total <= most_bytes or len({some[at] for at in part}) == 1
        assert total <= largest or len(part) == 1
        for at in part:
            where.setdefault(some[at], set()).add(number)
    for name, numbers in where.items():
        mine = [size for each, size in zip(some, sizes, strict=True) if each == name]
        assert len(numbers) == 1 or sum(mine) > largest or len(mine) > most_items


def plan_of(codes: Sequence[int], sizes: Sequence[int], lengths: Sequence[int], nbytes: int) -> list[int]:
    reads = [Read(key(at), memoryview(bytearray(length))) for at, length in enumerate(lengths)]
    views = Landing(reads, lengths).views(Answered.OK, pack_outcomes(codes, sizes), nbytes)
    return [len(view) for view in views]


def test_bytes_land_where_they_were_asked_for() -> None:
    """Whole records, short ends, empty ones, and misses in the middle."""
    codes = [Code.OK, Code.MISS, Code.OK, Code.OK, Code.FAILED, Code.OK]
    assert plan_of(codes, [10, 0, 3, 0, 0, 7], [10, 10, 10, 10, 10, 7], 20) == [10, 3, 7]


@pytest.mark.parametrize(
    ("codes", "sizes", "nbytes"),
    [
        ([Code.OK], [11], 11),  # more than was asked for
        ([Code.OK], [10], 9),
        ([Code.OK], [10], 11),
        ([Code.MISS], [0], 10),
        ([Code.OK, Code.OK], [5, 5], 10),  # more outcomes than questions
        ([], [], 0),
        ([99], [0], 0),
    ],
)
def test_a_reply_that_does_not_fit_the_question_is_refused(
    codes: list[int], sizes: list[int], nbytes: int
) -> None:  # fmt: skip
    with pytest.raises(ProtocolError):
        plan_of(codes, sizes, [10], nbytes)


# With a real node.


def test_what_is_there_is_not_sent_again() -> None:
    """A small put goes at once; a large one asks first."""
    with servers(1) as (node,), contextlib.closing(client(node.address)) as backend:
        small, large = {key("small"): data(1000)}, {key("large"): data(1 << 20), key("other"): data(1 << 20, "o")}

        def received() -> int:
            return sum(node.stats()["received_bytes"].values())

        def requests() -> int:
            return sum(node.stats()["requests"].values())

        assert statuses(put(backend, small)) == [Status.OK]
        assert (received(), requests()) == (1000, 1)
        assert statuses(put(backend, {key("large"): large[key("large")]})) == [Status.OK]
        assert (received(), requests()) == (1000 + (1 << 20), 3)
        assert statuses(put(backend, large)) == [Status.EXISTS, Status.OK]
        assert (received(), requests()) == (1000 + (2 << 20), 5)
        assert statuses(put(backend, large)) == [Status.EXISTS] * 2
        assert (received(), requests()) == (1000 + (2 << 20), 6)


def test_a_large_batch_goes_in_several_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls_module, "_REQUEST_BYTES", 1 << 20)
    with servers(1) as (node,), contextlib.closing(client(node.address)) as backend:
        records = {each: data(300_000, each) for each in keys(10)}
        assert statuses(put(backend, records)) == [Status.OK] * 10
        before = sum(node.stats()["requests"].values())
        got = get(backend, [*records, key("missing"), *records], 300_001)
        assert [value for outcome, value in got if outcome.ok] == [*records.values()] * 2
        assert got[10][0].status is Status.MISS
        assert sum(node.stats()["requests"].values()) - before >= 7


def test_more_than_the_node_may_hold_at_a_time_is_read_and_written_all_the_same() -> None:
    options = {"memory_bytes": 16 << 20, "client_bytes": 1 << 20}
    with servers(1, **options) as (node,), contextlib.closing(client(node.address)) as backend:
        records = {each: data(100_000, each) for each in keys(40)}
        assert backend.info(deadline=soon())["credits"] == 1 << 20
        assert statuses(put(backend, records)) == [Status.OK] * 40
        assert [value for _, value in get(backend, [*records], 100_000)] == [*records.values()]
        assert [value for _, value in get(backend, [*records], 10)] == [value[:10] for value in records.values()]


def test_limits_and_capabilities_are_the_nodes() -> None:
    with servers(1, memory_bytes=1 << 20, ttl=60.0) as (node,), contextlib.closing(client(node.address)) as backend:
        assert Capability.TTL not in backend.capabilities
        facts = backend.info(deadline=soon())
        assert facts["ttl"] is True
        assert Capability.TTL in backend.capabilities
        assert Capability.DURABLE not in backend.capabilities
        assert Capability.LEASE not in backend.capabilities
        assert backend.limits.max_value_bytes == 1 << 20
        (outcome,) = put(backend, {key("large"): data((1 << 20) + 1)})
        assert isinstance(outcome.error, PermanentError)


def test_a_node_that_was_started_again_with_more_memory() -> None:
    """What it said of itself before bounds nothing: a record that is longer now is not cut, and one can be put."""
    big = data(3 << 20)
    with contextlib.ExitStack() as stack:
        with servers(1, memory_bytes=1 << 20) as (small,):
            address = small.address
            backend = stack.enter_context(contextlib.closing(client(address)))
            assert backend.info(deadline=soon())["max_value_bytes"] == 1 << 20
        stack.enter_context(NodeServer(address, memory_bytes=8 << 20))
        assert put(backend, {key("big"): big})[0].ok
        assert get(backend, [key("big")], len(big)) == [(Outcome(Status.OK, len(big)), big)]


def test_a_read_of_more_than_a_reply_holds_is_no_end_of_the_record() -> None:
    value = data(2000)
    with contextlib.ExitStack() as stack:
        with servers(1, limits=Limits(max_body=1000)) as (small,):
            address = small.address
            backend = stack.enter_context(contextlib.closing(client(address)))
            put(backend, {key("k"): value[:1000]})
            assert get(backend, [key("k")], 5000) == [(Outcome(Status.OK, 1000), value[:1000])]
        stack.enter_context(NodeServer(address, memory_bytes=1 << 20))
        with contextlib.closing(client(address)) as other:
            assert put(other, {key("k"): value, key("short"): value[:700], key("even"): value[:1000]})[0].ok
        names = [key("k"), key("short"), key("even")]
        outcomes = [outcome for outcome, _ in get(backend, names, 2000)]
        assert isinstance(outcomes[0].error, TransientError)
        assert outcomes[1:] == [Outcome(Status.OK, 700), Outcome(Status.OK, 1000)]
        assert [found for _, found in get(backend, names, 2000)] == [value, value[:700], value[:1000]]


def test_reads_that_make_no_sense_fail_alone() -> None:
    with servers(1) as (node,), contextlib.closing(client(node.address)) as backend:
        put(backend, {key("k"): b"0123456789"})
        memory = bytearray(10)
        reads = [
            Read(key("k"), memoryview(b"readonly!!")),
            Read(key("k"), memoryview(memory), 2),
            Read(key("k"), memoryview(bytearray(5)), -1),
            Read(key("k"), memoryview(bytearray(5)), 1 << 64),
        ]
        outcomes = backend.get_into(reads, deadline=soon())
        assert statuses(outcomes) == [Status.ERROR, Status.OK, Status.ERROR, Status.ERROR]
        assert all(isinstance(outcomes[at].error, PermanentError) for at in (0, 2, 3))
        assert memory[:8] == b"23456789"


def test_a_wrong_token_says_what_to_change_and_is_not_tried_again_at_once() -> None:
    with servers(1, token=b"right") as (node,):
        dialled = []
        wrong = Credentials("", b"wrong-secret")

        def dial(deadline: float) -> Any:
            dialled.append(deadline)
            return connect(node.address, deadline=deadline, credentials=wrong, transport="tcp")

        with contextlib.closing(NodeClient(dial, name="node")) as backend:
            for _ in range(3):
                (outcome,) = backend.stat([key("k")], deadline=soon())
                assert isinstance(outcome.error, PermanentError)
                assert "token" in str(outcome.error)
                assert "wrong-secret" not in str(outcome.error)
            assert len(dialled) == 1


def test_a_node_that_is_not_there() -> None:
    with servers(1) as (node,):
        address = node.address
    with contextlib.closing(client(address)) as backend:
        (outcome,) = backend.stat([key("k")], deadline=soon())
        assert isinstance(outcome.error, TransientError)
        assert outcome.error.operation == "stat"


def test_a_node_that_comes_back_at_once_costs_nothing() -> None:
    """Connections that died while they lay idle are not used."""
    with servers(1) as (node,):
        address = node.address
        backend = client(address)
        assert get(backend, [key("k")], 1)[0][0].status is Status.MISS
    with contextlib.closing(backend), NodeServer(address, memory_bytes=1 << 20):
        assert get(backend, [key("k")], 1)[0][0].status is Status.MISS


def test_lists_page_by_page_over_a_connection_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "_PAGE_RECORDS", 7)
    with servers(1) as (node,), contextlib.closing(client(node.address, lanes=1)) as backend:
        records = {each: b"x" * (at + 1) for at, each in enumerate(keys(30))}
        put(backend, records)
        pages = backend.list(deadline=soon())
        first = next(pages)
        assert len(first) == 7
        assert get(backend, [key("k")], 1)[0][0].status is Status.MISS  # the only lane is free meanwhile
        found = {info.key: info.nbytes for page in (first, *pages) for info in page}
        assert found == {each: len(value) for each, value in records.items()}
        again = backend.list(deadline=soon())
        next(again)
        again.close()  # type: ignore[attr-defined]
        wait_until(lambda: node.stats()["connections"] == 1, "the abandoned listing's connection is closed")


def test_a_listing_ends_with_the_client() -> None:
    with servers(1) as (node,):
        backend = client(node.address)
        put(backend, dict.fromkeys(keys(3), b"x"))
        pages = backend.list(deadline=soon())
        next(pages)
        backend.close()
        assert [*pages] == []  # it was the last page
        with pytest.raises(ClosedError):
            backend.list(deadline=soon())


# Leases.


@pytest.fixture
def folder() -> Iterator[Path]:
    path = tempfile.mkdtemp(prefix="kvstore-")  # a socket's path has at most 107 bytes
    yield Path(path)
    shutil.rmtree(path)


def test_a_lease_is_refused_once_its_memory_may_be_gone(folder: Path) -> None:
    node = NodeServer("", unix_path=folder / "s", memory_bytes=1 << 20)
    with contextlib.closing(client(node.unix_path, transport="shm")) as backend:
        put(backend, {key("k"): data(300_000)})
        (lease,) = backend.lease([key("k")], deadline=soon())
        assert isinstance(lease, NodeLease)
        assert lease.intact
        assert lease.view == data(300_000)
        assert lease.view.readonly
        second, third = lease.readonly(), lease.retain()
        lease.release()
        assert second.view == data(300_000)
        node.close()
        wait_until(lambda: not second.intact, "the lease notices that the node is gone")
        for each in (second, third):
            with pytest.raises(ClosedError, match="went away"):
                _ = each.view
            each.release()
        with pytest.raises(ClosedError, match="one release too many"):
            third.release()


def test_a_leased_record_keeps_its_memory_until_the_release(folder: Path) -> None:
    with (
        NodeServer("", unix_path=folder / "s", memory_bytes=1 << 20) as node,
        contextlib.closing(client(node.unix_path, transport="shm")) as backend,
    ):
        put(backend, {key("k"): data(300_000)})
        (lease,) = backend.lease([key("k")], deadline=soon())
        assert lease is not None
        lease.pin()
        lease.release()
        backend.delete([key("k")], deadline=soon())
        put(backend, {each: data(300_000, each) for each in keys(4)}, seconds=1.0)
        assert lease._view == data(300_000)
        lease.unpin()
        with pytest.raises(ClosedError):
            lease.retain()
        wait_until(lambda: node.stats()["namespaces"][""]["held"] == 0, "the node has its memory back")


# With a node that misbehaves: a real transport, and a handler that is a script.

Script = Callable[[Incoming], Answer]


@contextlib.contextmanager
def scripted(handler: Script, **options: Any) -> Iterator[Any]:
    with (
        Server(handler, listen=("127.0.0.1", 0)) as server,
        contextlib.closing(client(server.address, **options)) as backend,
    ):
        yield backend


def calls(backend: Any, seconds: float = 30.0) -> dict[str, Any]:
    """The outcome of one call of each operation. Memory around the destination of the read is looked after."""
    memory = bytearray(b"\xa5" * 30)
    large = [memoryview(data(300_000))]
    found = {
        "stat": backend.stat([key("k")], deadline=soon(seconds))[0],
        "get": backend.get_into([Read(key("k"), memoryview(memory)[10:20])], deadline=soon(seconds))[0],
        "put": backend.put([Write(key("k"), [memoryview(b"data")])], deadline=soon(seconds))[0],
        "large put": backend.put([Write(key("k"), large)], deadline=soon(seconds))[0],
        "delete": backend.delete([key("k")], deadline=soon(seconds))[0],
        "quarantine": backend.quarantine([key("k")], deadline=soon(seconds))[0],
    }
    assert memory[:10] == memory[20:] == b"\xa5" * 10
    try:
        found["list"] = [*backend.list(deadline=soon(seconds))]
    except KVStoreError as error:
        found["list"] = error
    try:
        found["info"] = backend.info(deadline=soon(seconds))
    except KVStoreError as error:
        found["info"] = error
    return found


def errors_of(found: dict[str, Any]) -> dict[str, Any]:
    return {name: getattr(outcome, "error", outcome) for name, outcome in found.items()}


@pytest.mark.parametrize(
    "meta",
    [
        b"",
        b"\xff" * 40,
        pack_outcomes([], []),
        pack_outcomes([Code.OK] * 2, [1, 1]),
        pack_outcomes([99], [0]),
        pack_outcomes([Code.OK], [1 << 63]),
        pack_outcomes([Code.WANTED], [0])[:-1],
        msgpack.packb(["a list"]),
        (1 << 40).to_bytes(8, "little") * 4,
    ],
)
def test_an_answer_that_makes_no_sense_is_an_error_and_nothing_worse(meta: bytes) -> None:
    with scripted(lambda incoming: Answer(Answered.OK, meta)) as backend:
        for name, error in errors_of(calls(backend)).items():
            if meta == pack_outcomes([Code.OK], [1 << 63]) and name in {"stat", "put", "delete", "quarantine"}:
                continue  # it makes sense there: a very large record; of a put the size is not looked at
            assert isinstance(error, TransientError), f"{name}: {error!r}"
            assert error.backend


def test_a_body_where_none_belongs_ends_the_connection() -> None:
    with scripted(lambda incoming: Answer(Answered.BUSY, b"busy", [memoryview(b"x" * 100)])) as backend:
        for name, error in errors_of(calls(backend)).items():
            assert isinstance(error, TransientError), name


@pytest.mark.parametrize(
    ("status", "kind", "word"),
    [
        (Answered.BUSY, TransientError, "busy"),
        (Answered.BAD, PermanentError, "refused"),
        (Answered.CLOSED, TransientError, "shutting down"),
        (Answered.LATE, TransientError, "deadline"),
        (77, TransientError, "unknown status 77"),
    ],
)
def test_an_answer_that_is_none(status: int, kind: type[Exception], word: str) -> None:
    with scripted(lambda incoming: Answer(status, b"for a reason")) as backend:
        for name, error in errors_of(calls(backend)).items():
            assert isinstance(error, kind), name
            assert word in str(error)
            assert "for a reason" in str(error) or status == 77


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (Code.FULL, PoolExhausted),
        (Code.TOO_LARGE, PermanentError),
        (Code.FAILED, TransientError),
        (Code.REFUSED, PermanentError),
    ],
)
def test_codes_of_items_become_errors(code: Code, kind: type[Exception]) -> None:
    notes = [(0, "because of the weather")]

    def handler(incoming: Incoming) -> Answer:
        answer = pack_outcomes([code], [0], notes)
        if incoming.op == Op.PUT and not incoming.body_nbytes:
            answer = pack_ticket(0, answer)
        return Answer(Answered.OK, answer)

    with scripted(handler) as backend:
        found = errors_of(calls(backend))
        for name in ("stat", "get", "put", "large put", "delete", "quarantine"):
            assert isinstance(found[name], kind), name
            assert "weather" in str(found[name])
            assert found[name].key == key("k")


@pytest.mark.parametrize("operation", ["stat", "get", "delete", "quarantine"])
def test_only_a_put_finds_that_something_exists(operation: str) -> None:
    with scripted(lambda incoming: Answer(Answered.OK, pack_outcomes([Code.EXISTS], [0]))) as backend:
        found = calls(backend)
        assert isinstance(found[operation].error, TransientError)
        assert found["put"].status is Status.EXISTS


@pytest.mark.parametrize("codes", [[Code.OK], [Code.MISS]])
def test_a_put_cannot_be_decided_before_its_bytes_were_sent(codes: list[int]) -> None:
    with scripted(lambda incoming: Answer(Answered.OK, pack_ticket(7, pack_outcomes(codes, [0])))) as backend:
        (outcome,) = put(backend, {key("k"): data(300_000)})
        assert isinstance(outcome.error, TransientError)


def test_a_put_that_breaks_after_the_question_says_what_is_known() -> None:
    """EXISTS stands; what was wanted has failed."""

    def handler(incoming: Incoming) -> Answer:
        if incoming.op == Op.PUT:
            return Answer(Answered.OK, pack_ticket(7, pack_outcomes([Code.EXISTS, Code.WANTED], [0, 0])))
        incoming.discard()
        return Answer(Answered.LATE, b"too slow")

    with scripted(handler) as backend:
        outcomes = put(backend, {key("a"): data(300_000), key("b"): data(300_000)})
        assert statuses(outcomes) == [Status.EXISTS, Status.ERROR]
        assert isinstance(outcomes[1].error, TransientError)


class Flaky:
    """Ends the connection, without an answer, at the requests whose numbers are given; else MISS."""

    def __init__(self, *numbers: int) -> None:
        self.numbers = numbers
        self.count = 0

    def __call__(self, incoming: Incoming) -> Answer:
        self.count += 1
        if self.count in self.numbers:
            raise ConnectionResetError("scripted")
        return Answer(Answered.OK, pack_outcomes([Code.MISS], [0]))


@pytest.mark.filterwarnings("ignore")
def test_a_used_connection_that_proves_dead_is_replaced_once() -> None:
    flaky = Flaky(2)
    with scripted(flaky) as backend:
        for _ in range(3):
            assert backend.stat([key("k")], deadline=soon())[0].status is Status.MISS
        assert flaky.count == 4


@pytest.mark.filterwarnings("ignore")
def test_a_fresh_connection_that_dies_is_an_error() -> None:
    flaky = Flaky(1, 3, 4)
    with scripted(flaky) as backend:
        assert backend.stat([key("k")], deadline=soon())[0].status is Status.ERROR  # it was fresh
        assert backend.stat([key("k")], deadline=soon())[0].status is Status.MISS
        assert isinstance(backend.stat([key("k")], deadline=soon())[0].error, TransientError)  # twice in a row
        assert flaky.count == 4


class Stuck:
    """A handler that answers when it is let go."""

    def __init__(self) -> None:
        self.entered = threading.Semaphore(0)
        self.go = threading.Event()

    def __call__(self, incoming: Incoming) -> Answer:
        self.entered.release()
        self.go.wait(60)
        return Answer(Answered.OK, pack_outcomes([Code.OK], [10]), [memoryview(b"late bytes")])


def test_a_node_that_never_answers_costs_a_deadline_and_writes_nothing_afterwards() -> None:
    stuck = Stuck()
    with scripted(stuck) as backend:
        try:
            memory = bytearray(10)
            start = time.monotonic()
            (outcome,) = backend.get_into([Read(key("k"), memoryview(memory))], deadline=start + 0.2)
            assert isinstance(outcome.error, TransientError)
            memory[:] = b"\xa5" * 10
        finally:
            stuck.go.set()
        wait_until(lambda: backend.channels.open == 0, "the connection is given up")
        assert memory == b"\xa5" * 10


def test_lanes_are_a_bound_and_waiting_for_one_is_no_fault_of_the_node() -> None:
    stuck = Stuck()
    with scripted(stuck, lanes=2) as backend:
        threads = [
            threading.Thread(target=backend.get_into, args=([Read(key("k"), memoryview(bytearray(10)))],),
                             kwargs={"deadline": soon()})
            for _ in range(2)
        ]  # fmt: skip
        try:
            for thread in threads:
                thread.start()
            for _ in threads:
                assert stuck.entered.acquire(timeout=30)
            (outcome,) = backend.stat([key("k")], deadline=soon(0.05))
            assert isinstance(outcome.error, LocalWait)
            assert backend.channels.open == 2
        finally:
            stuck.go.set()
            for thread in threads:
                thread.join()


def test_close_ends_calls_under_way() -> None:
    stuck = Stuck()
    with scripted(stuck) as backend:
        raised: list[BaseException] = []

        def call() -> None:
            try:
                backend.stat([key("k")], deadline=soon())
            except ClosedError as error:
                raised.append(error)

        thread = threading.Thread(target=call)
        try:
            thread.start()
            assert stuck.entered.acquire(timeout=30)
            backend.close()
            thread.join(30)
            assert len(raised) == 1
        finally:
            stuck.go.set()
            thread.join()


def test_every_connection_knows_every_slab() -> None:
    """Those that are there, and those that come; none is told twice."""
    with servers(1) as (node,), BufferPool(1 << 16) as first, BufferPool(1 << 16) as second:
        told: list[tuple[object, int]] = []
        backend = client(node.address)
        dial = backend._dial

        def recording(deadline: float) -> Any:
            channel = dial(deadline)
            channel.register = lambda memory, fd: told.append((channel, len(memory)))  # type: ignore[method-assign]
            return channel

        backend._dial = recording
        with contextlib.closing(backend):
            backend.register(first.slabs[0])
            backend.stat([key("k")], deadline=soon())
            assert [nbytes for _, nbytes in told] == [1 << 16]
            backend.register(second.slabs[0])
            backend.register(second.slabs[0])
            line = backend.channels.take(soon(), "test")
            assert [nbytes for _, nbytes in told] == [1 << 16] * 2
            backend.stat([key("k")], deadline=soon())  # over another connection
            assert len(told) == 4
            assert len({id(channel) for channel, _ in told}) == 2
            backend.channels.give(line)
