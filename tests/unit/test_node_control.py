"""`NodeInstance`: a real node, seen and handled through the control API's seam."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

import kvstore_backends._node_moves as moves_module
from kvstore.backend import NO_DEADLINE, Backend, Outcome, Write
from kvstore.control.instance import DONE, FAILED, Job, UnknownError
from kvstore.control.journal import split_keys
from kvstore.errors import ClosedError, ConfigError, PermanentError, TransientError
from kvstore.keys import Key
from kvstore.record import RecordSpec, build_record, parse_header
from kvstore.testing import Fault, FaultyBackend
from kvstore.wrappers import Wrapper
from kvstore.wrappers.base import Operation
from kvstore_backends._node_hands import Hands
from kvstore_backends._node_jobs import Jobs, Progress
from kvstore_backends.node_control import NodeInstance
from kvstore_backends.node_server import Namespace, NodeServer

from .node_server_support import KiB, MiB, key, keys, payload, soon

MEMORY, DISK, REMOTE = "memory", "disk", "remote"


class Served:
    """A node with an instance, and its tiers by name."""

    def __init__(self, **options: Any) -> None:
        options.setdefault("memory_bytes", MiB)
        self.node = NodeServer("127.0.0.1:0", **options)
        self.instance = NodeInstance(self.node, name="kv-0", http="http://10.0.0.1:80")
        self.hands = Hands(self.node.spaces[""])

    def put(self, records: Mapping[Key, bytes], parents: Sequence[Key | None] = ()) -> None:
        """As a client does it."""
        space = self.node.spaces[""]
        writes = [
            Write(name, [memoryview(data)], parent)
            for (name, data), parent in zip(records.items(), parents or [None] * len(records), strict=True)
        ]
        assert all(outcome.stored for outcome in space.backend.put(writes, deadline=soon()))
        if space.below is not None:
            space.below.backlog.offer([*records], [None] * len(records))
            assert space.below.settle(60)

    def forget(self, names: Sequence[Key]) -> None:
        """As eviction does it."""
        store = self.node.spaces[""].store
        with store.lock:
            for name in names:
                store.remove_locked(name)

    def whole(self, name: Key) -> bytes | None:
        """From the fastest tier."""
        (tier,) = self.instance.lookup("", [name], deadline=soon())
        if tier is None:
            return None
        with self.hands.whole(tier, [name], soon()) as (found, _):
            return bytes(found[0].view)

    def job(self, job_id: str) -> Job:
        """When it has ended."""
        end = time.monotonic() + 60
        while (job := self.instance.job(job_id)).state == "running":
            assert time.monotonic() < end, job
            time.sleep(0.002)
        return job

    def close(self) -> None:
        self.instance.close()
        self.node.close()
        for space in self.node.spaces.values():
            stats = space.store.pool.stats()
            assert (stats.in_use, stats.buffers, stats.pinned) == (0, 0, 0)


Serve = Callable[..., Served]


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    opened: list[Served] = []

    def make(*, below: bool = True, **options: Any) -> Served:
        if below:
            options.setdefault("disk", f"file://{tmp_path}/kv?bytes=4MiB")
            options.setdefault("remote", f"file://{tmp_path}/remote")
        opened.append(Served(**options))
        return opened[-1]

    yield make
    for each in opened:
        each.close()


def of(names: Sequence[Key], nbytes: int = 4 * KiB) -> dict[Key, bytes]:
    return {name: payload(name, nbytes) for name in names}


def kv_record(name: Key, model: str, nbytes: int = 8 * KiB) -> bytes:
    """A record of two layers that compresses well."""
    spec = RecordSpec.of(1, [nbytes, nbytes])
    layers = [memoryview(bytes(range(256)) * (nbytes // 256)) for _ in range(2)]
    meta = {"model": model, "dtype": "bfloat16"}
    return b"".join(build_record(name, spec, layers, meta=meta))


def test_who_it_is(serve: Serve) -> None:
    served = serve(namespaces=[Namespace("a", b"token")])
    info = served.instance.info()
    assert (info.name, info.http, info.address) == ("kv-0", "http://10.0.0.1:80", served.node.address)
    assert (info.namespaces, info.tiers) == (["", "a"], [MEMORY, DISK, REMOTE])
    assert served.instance.info() == info
    port = served.node.address.rpartition(":")[2]
    assert NodeInstance(served.node).info().name.endswith(f":{port}")
    for name in ("a/b", "x" * 129, "a@b", "\n"):
        with pytest.raises(ConfigError, match="an instance is not called"):
            NodeInstance(served.node, name=name)


def test_lookup_names_the_fastest_tier(serve: Serve) -> None:
    served = serve()
    names = keys(3)
    served.put(of(names))
    served.forget(names[1:])
    served.hands.remove(DISK, names[2:], soon())
    assert served.instance.lookup("", [*names, key("no")], deadline=soon()) == [MEMORY, DISK, REMOTE, None]
    with pytest.raises(UnknownError, match="no namespace 'b'"):
        served.instance.lookup("b", names, deadline=soon())
    with pytest.raises(TransientError, match="deadline passed"):
        served.instance.lookup("", [key("no")], deadline=time.monotonic() - 1)


def test_a_tier_that_fails_hides_no_other(serve: Serve) -> None:
    served = serve()
    names = keys(2)
    served.put(of(names[:1]))
    space = served.node.spaces[""]
    assert space.below is not None
    tiers = space.below.lower.tiers
    assert tiers is not None
    broken = FaultyBackend(tiers.tiers[1].backend, otherwise=Fault.error())
    space.below.lower.places[1] = space.below.lower.places[1]._replace(backend=broken)  # type: ignore[index]
    tiers.tiers[1].backend = broken
    hands = NodeInstance(served.node)
    assert hands.lookup("", names, deadline=soon()) == [MEMORY, None]
    assert hands.pin("", names, ttl_s=60, deadline=soon()) == [True, False]
    hands.close()


def test_pins_hold_what_would_be_evicted(serve: Serve) -> None:
    served = serve(memory_bytes=64 * KiB)
    names = keys(4)
    served.put(of(names[:2]))
    served.put(of(names[2:3]))
    served.forget(names[2:3])  # it comes up
    assert served.instance.pin("", [*names[:3], key("no")], ttl_s=60, deadline=soon()) == [True, True, True, False]
    assert served.instance.lookup("", names[:3], deadline=soon()) == [MEMORY] * 3
    for name, data in of(keys(32, "flood")).items():
        served.put({name: data})
    assert served.instance.lookup("", names[:3], deadline=soon()) == [MEMORY] * 3
    assert served.instance.usage()[0].pinned == 3
    assert served.instance.unpin("", [names[0], key("no")], deadline=soon()) == [True, False]
    assert served.instance.pin("", names[1:2], ttl_s=1e-6, deadline=soon()) == [True]  # sets the time anew
    end = time.monotonic() + 30
    while served.instance.usage()[0].pinned != 1:
        assert time.monotonic() < end
        time.sleep(0.01)
    for name, data in of(keys(32, "more")).items():
        served.put({name: data})
    assert served.instance.lookup("", names[:3], deadline=soon()) == [DISK, DISK, MEMORY]
    with pytest.raises(ConfigError, match="more than 0 seconds"):
        served.instance.pin("", names, ttl_s=0, deadline=soon())


def test_at_most_half_of_the_memory_can_be_pinned(serve: Serve) -> None:
    served = serve(memory_bytes=64 * KiB, below=False)
    names = keys(12)
    for name, data in of(names).items():
        served.put({name: data})
    assert served.instance.pin("", names, ttl_s=60, deadline=soon()) == [True] * 8 + [False] * 4


def test_clear_some_records(serve: Serve) -> None:
    served = serve()
    names = keys(5)
    served.put(of(names))
    job = served.job(served.instance.clear("", keys=[*names[:2], names[0], key("no")]))
    assert (job.kind, job.state, job.done, job.failed, job.total) == ("clear", DONE, 2, 0, 3)
    assert job.nbytes == 8 * KiB
    assert served.instance.lookup("", names, deadline=soon()) == [None, None, MEMORY, MEMORY, MEMORY]


def test_clear_a_model_wherever_its_records_are(serve: Serve) -> None:
    served = serve()
    mine, theirs, opaque = keys(4, "mine"), keys(2, "theirs"), keys(1, "opaque")
    served.put({name: kv_record(name, "llama") for name in mine})
    served.put({name: kv_record(name, "mistral") for name in theirs})
    served.put(of(opaque))
    served.forget(mine[:3])
    served.hands.remove(DISK, mine[:1], soon())
    job = served.job(served.instance.clear("", model="llama"))
    assert (job.state, job.done, job.failed) == (DONE, 4, 0)
    assert served.instance.lookup("", [*mine, *theirs, *opaque], deadline=soon()) == [None] * 4 + [MEMORY] * 3


def test_clear_a_prefix_and_what_hangs_on_it(serve: Serve) -> None:
    served = serve(below=False)
    head, other = keys(2, "head"), keys(1, "other")
    tails = keys(3, "tail")
    served.put(of([*head, *tails, *other]), [None, head[0], head[1], tails[0], tails[0], None])
    job = served.job(served.instance.clear("", prefix=head))
    assert (job.state, job.done) == (DONE, 5)
    assert served.instance.lookup("", [*head, *tails, *other], deadline=soon()) == [None] * 5 + [MEMORY]


def test_clear_a_namespace_and_nothing_else(serve: Serve, tmp_path: Path) -> None:
    served = serve(namespaces=[Namespace("a", b"token", 256 * KiB, disk=f"file://{tmp_path}/a")])
    names = keys(6)
    served.put(of(names))
    served.forget(names[:3])
    space = served.node.spaces["a"]
    assert space.backend.put([Write(names[0], [memoryview(b"theirs")])], deadline=soon())[0].ok
    job = served.job(served.instance.clear(""))
    assert (job.state, job.done) == (DONE, 6)
    assert served.instance.lookup("", names, deadline=soon()) == [None] * 6
    assert served.instance.lookup("a", names[:1], deadline=soon()) == [MEMORY]
    with pytest.raises(ConfigError, match="takes one of"):
        served.instance.clear("", model="x", keys=names)


@pytest.mark.parametrize(("src", "dst"), [(MEMORY, DISK), (DISK, MEMORY), (DISK, REMOTE), (REMOTE, DISK)])
def test_records_move_between_tiers(serve: Serve, src: str, dst: str) -> None:
    served = serve()
    names = keys(5)
    records = of(names)
    served.put(records)
    for tier in (MEMORY, DISK, REMOTE):
        if tier != src:
            served.hands.remove(tier, names, soon())
    job = served.job(served.instance.move("", [*names, key("no")], src=src, dst=dst))
    assert (job.state, job.done, job.failed, job.nbytes) == (DONE, 6, 1, 20 * KiB)
    assert job.error == "it is not there"
    assert all(outcome.ok for outcome in served.hands.stat(dst, names, soon()))
    assert not any(outcome.ok for outcome in served.hands.stat(src, names, soon()))
    assert [served.whole(name) for name in names] == [*records.values()]


def test_records_move_to_another_node_and_pinned_ones_stay(serve: Serve) -> None:
    served, other = serve(below=False), serve(below=False)
    names = keys(3)
    records = of(names)
    served.put(records)
    assert served.instance.pin("", names[:1], ttl_s=60, deadline=soon()) == [True]
    job = served.job(served.instance.move("", names, src=MEMORY, dst=other.node.address))
    assert (job.state, job.done, job.failed, job.error) == (DONE, 3, 1, "it is pinned")
    assert served.instance.lookup("", names, deadline=soon()) == [MEMORY, None, None]
    assert other.instance.lookup("", names, deadline=soon()) == [None, MEMORY, MEMORY]
    assert other.whole(names[1]) == records[names[1]]
    for dst, message in (("disk", "no tier 'disk'"), ("memory", "both 'memory'"), ("a:b", "neither a tier nor")):
        with pytest.raises(ConfigError, match=message):
            served.instance.move("", names, src=MEMORY, dst=dst)
    with pytest.raises(ConfigError, match="of another instance"):
        served.instance.move("", names, src=MEMORY, dst=served.node.address)


def test_to_a_node_that_is_not_there_nothing_moves(serve: Serve) -> None:
    served = serve(below=False)
    names = keys(2)
    served.put(of(names))
    job = served.job(served.instance.move("", names, src=MEMORY, dst="127.0.0.1:1"))
    assert (job.done, job.failed) == (2, 2)
    assert served.instance.lookup("", names, deadline=soon()) == [MEMORY] * 2


def test_records_are_encoded_anew_and_come_back_bit_by_bit(serve: Serve) -> None:
    served = serve()
    names = keys(3)
    records = {name: kv_record(name, "llama") for name in names}
    served.put(records)
    served.put(of(keys(1, "opaque")))
    served.forget(names[:1])
    job = served.job(served.instance.transcode("", [*names, *keys(1, "opaque")], codec="lz4", level=None))
    assert (job.state, job.done, job.failed) == (DONE, 4, 1)  # what is no record of ours cannot be
    assert job.nbytes > 3 * 8 * KiB
    packed = served.whole(names[0])
    assert packed is not None
    assert len(packed) < len(records[names[0]]) // 2
    header = parse_header(packed, key=names[0], nbytes=len(packed))
    assert {segment.codec for segment in header.segments} == {1}
    assert header.meta()["model"] == "llama"
    space = served.node.spaces[""]
    assert space.below is not None
    assert space.below.settle(60)
    for tier in (DISK, REMOTE):
        assert [outcome.nbytes for outcome in served.hands.stat(tier, names, soon())] == [len(packed)] * 3
    job = served.job(served.instance.transcode("", names, codec="raw", level=0))
    assert (job.state, job.failed) == (DONE, 0)
    assert job.nbytes < 0
    assert [served.whole(name) for name in names] == [*records.values()]
    with pytest.raises(ConfigError, match="int8 loses something"):
        served.instance.transcode("", names, codec="int8", level=None)
    with pytest.raises(ConfigError, match="level 3"):
        served.instance.transcode("", names, codec="lz4", level=3)


class Failing(Wrapper):
    """Puts fail as often as it is told."""

    def __init__(self, inner: Backend, times: int) -> None:
        super().__init__(inner)
        self.times = times

    def _run(self, operation: Operation, items: Sequence[Any], deadline: float) -> list[Outcome]:
        if operation == "put" and self.times > 0:
            self.times -= 1
            return [Outcome.failed(PermanentError("full", backend=self.name))] * len(items)
        return super()._run(operation, items, deadline)


@pytest.mark.parametrize("times", [1, 2])
def test_a_record_is_never_lost_because_its_new_bytes_cannot_be_stored(
    serve: Serve, tmp_path: Path, times: int
) -> None:  # fmt: skip
    """Failing once, the disk has what it had; failing twice, the memory has it and brings it down when it can."""
    served = serve(below=False, disk=f"file://{tmp_path}/kv?bytes=4MiB")
    name = keys(1)[0]
    record = kv_record(name, "llama")
    served.put({name: record})
    served.forget([name])
    below = served.node.spaces[""].below
    assert below is not None
    failing = Failing(below.backend, times)
    below.backend = failing
    job = served.job(served.instance.transcode("", [name], codec="lz4", level=None))
    assert (job.done, job.failed, job.error) == (1, 1, "full")
    assert below.settle(60)
    on_disk = served.hands.stat(DISK, [name], soon())[0]
    assert on_disk.ok
    packed = served.whole(name)  # of memory
    assert packed is not None
    assert len(packed) < len(record)
    assert on_disk.nbytes == (len(record) if times == 1 else len(packed))
    served.forget([name])
    assert served.whole(name) in (record, packed)


def test_without_memory_for_its_new_bytes_a_record_stays_as_it_was(serve: Serve) -> None:
    served = serve(below=False, memory_bytes=64 * KiB)
    names = keys(3)
    records = {name: kv_record(name, "llama") for name in names}
    served.put(records)
    assert served.job(served.instance.transcode("", names, codec="lz4", level=None)).failed == 0
    small = [served.whole(name) for name in names]
    store = served.node.spaces[""].store
    held = served.node.spaces[""].backend.put([Write(key("big"), [memoryview(bytes(50 * KiB))])], deadline=soon())
    assert held[0].ok
    pinned = store.pin([key("big"), *names])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(moves_module, "CALL_S", 0.05)
        job = served.job(served.instance.transcode("", names, codec="raw", level=None))
    store.let_go(pinned)
    assert (job.done, job.failed) == (3, 3)
    assert "no memory" in job.error
    assert [served.whole(name) for name in names] == small
    assert store.nbytes == sum(len(each or b"") for each in small) + 50 * KiB


def test_what_is_read_while_it_is_encoded_anew_stays_what_it_was(serve: Serve) -> None:
    served = serve(below=False)
    names = keys(4)
    records = {name: kv_record(name, "llama") for name in names}
    served.put(records, [None, *names[:3]])
    store = served.node.spaces[""].store
    pinned = store.pin(names)
    assert served.job(served.instance.transcode("", names, codec="lz4", level=None)).failed == 0
    assert [bytes(each.view) for each in pinned if each is not None] == [*records.values()]
    store.let_go(pinned)
    assert store.policy.links() == [(name, parent) for name, parent in zip(names[1:], names[:3], strict=True)]
    assert store.nbytes == store.policy.nbytes == sum(record.found.nbytes for record in store.records.values())


def test_pins_of_what_was_removed_hold_no_room(serve: Serve) -> None:
    served = serve(below=False)
    names = keys(4)
    served.put(of(names))
    assert served.instance.pin("", names, ttl_s=3600, deadline=soon()) == [True] * 4
    served.job(served.instance.clear("", keys=names[:1]))
    assert served.instance.usage()[0].pinned == 3
    assert served.node.spaces[""].delete(names[1:2], soon())[0].ok  # by a client
    served.instance._sweep()
    assert served.instance.usage()[0].pinned == 2
    served.job(served.instance.clear(""))
    served.instance._sweep()
    assert (served.instance.usage()[0].pinned, served.instance._pins[""]._nbytes) == (0, 0)


def test_usage_and_health(serve: Serve) -> None:
    served = serve(namespaces=[Namespace("a", b"token", 256 * KiB)])
    names = keys(4)
    served.put(of(names))
    usage = {(tier.namespace, tier.name): tier for tier in served.instance.usage()}
    assert [*usage] == [("", MEMORY), ("", DISK), ("", REMOTE), ("a", MEMORY)]
    memory, disk = usage["", MEMORY], usage["", DISK]
    assert (memory.used, memory.records, memory.capacity) == (16 * KiB, 4, 768 * KiB)
    assert (disk.used, disk.records, disk.capacity) == (16 * KiB, 4, 4 * MiB)
    assert (usage["", REMOTE].records, usage["", REMOTE].capacity) == (-1, 0)
    assert "bytes=…" in disk.url
    health = served.instance.health(deadline=soon())
    assert (health.ok, health.ready, health.problems, health.load) == (True, True, (), 0.0)
    served.node.draining = True
    assert served.instance.health(deadline=soon()).ready is False
    with pytest.raises(ClosedError, match="shutting down"):
        served.instance.lookup("", names, deadline=soon())


def test_a_snapshot_and_the_events_behind_it_tell_what_is_there(serve: Serve) -> None:
    served = serve(memory_bytes=32 * KiB)
    for name, data in of(keys(6, "before")).items():
        served.put({name: data})
    at = served.instance.journal.head
    there: dict[str, set[bytes]] = {MEMORY: set(), DISK: set()}
    for page in served.instance.snapshot(deadline=soon()):
        assert page.namespace == ""
        there[page.tier].update(split_keys(page.keys))
    for name, data in of(keys(6, "after")).items():
        served.put({name: data})
    space = served.node.spaces[""]
    space.sweep()
    for event in served.instance.events(at).events:
        some = split_keys(event.keys)
        (there[event.tier].update if event.op == "admit" else there[event.tier].difference_update)(some)
    assert there[MEMORY] == {*space.store.records}
    on_disk = served.hands.stat(DISK, [*map(Key, there[DISK])], soon())
    assert all(outcome.ok for outcome in on_disk)
    assert len(there[DISK]) == 12
    assert sum(len(page) for page in space.below.backend.list(deadline=NO_DEADLINE)) == 12 if space.below else False


def test_jobs_that_are_not_known_and_those_that_are_cut_off(serve: Serve) -> None:
    served = serve(below=False)
    with pytest.raises(UnknownError, match="no job 'x'"):
        served.instance.job("x")
    served.instance.close()
    with pytest.raises(ClosedError):
        served.instance.clear("")


def test_too_many_jobs_are_told_to_come_again(serve: Serve) -> None:
    jobs = Jobs()
    go = threading.Event()

    def work(_: Progress) -> None:
        assert go.wait(60)

    ids = [jobs.start("", "clear", work) for _ in range(64)]
    until = time.monotonic() + 30
    refused = False
    while not refused and time.monotonic() < until:
        try:
            ids.append(jobs.start("", "clear", work))
        except TransientError:
            refused = True
    assert refused
    assert jobs.running == len(ids)
    go.set()
    jobs.close()
    assert {jobs.get(each).state for each in ids} <= {DONE, FAILED}
