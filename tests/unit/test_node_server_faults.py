"""What goes wrong below a node or on its way out: nothing is lost, nobody waits for ever, and it says so."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import kvstore_backends._node_backlog as backlog_module
import kvstore_backends._node_below as below_module
import kvstore_backends._node_service as service_module
from kvstore.backend import NO_DEADLINE, Backend, Outcome
from kvstore.errors import ConfigError, PermanentError, TransientError
from kvstore.wrappers import Wrapper
from kvstore.wrappers.base import Operation, call_backend
from kvstore_backends._node_space import Namespace
from kvstore_backends.node.protocol import Code, Op
from kvstore_backends.node_control import NodeInstance
from kvstore_backends.node_server import NodeServer

from .node_server_disk_support import forget_memory, in_memory
from .node_server_support import KiB, MiB, Node, in_thread, key, keys, payload, soon

Opened = Callable[..., Node]


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Opened]:
    nodes: list[Node] = []

    def make(**fields: Any) -> Node:
        fields.setdefault("remote", f"file://{tmp_path}/remote")
        nodes.append(Node(Namespace(**fields), nbytes=256 * KiB))
        return nodes[-1]

    yield make
    for node in nodes:
        node.close()


class Broken(Wrapper):
    """Fails some operations as it is told, until it is whole; or hangs until the deadline."""

    def __init__(self, inner: Backend, error: Exception | None, *operations: str) -> None:
        super().__init__(inner)
        self.error, self.operations = error, operations
        self.whole = threading.Event()
        self.asked = 0

    def _run(self, operation: Operation, items: Sequence[Any], deadline: float) -> list[Outcome]:
        if self.whole.is_set() or operation not in self.operations or not items:
            return call_backend(self._inner, operation, items, deadline)
        self.asked += 1
        if self.error is None:
            self.whole.wait(max(0.0, deadline - time.monotonic()))
        return [Outcome.failed(self.error or TransientError("silent", backend=self.name))] * len(items)  # type: ignore[arg-type]


def broken(node: Node, error: Exception | None, *operations: str, place: int = -1) -> Broken:
    below = node.space.below
    assert below is not None
    tiers = below.lower.tiers
    if tiers is None:
        wrapper = Broken(below.backend, error, *operations)
        below.backend = below.backlog._backend = wrapper
        return wrapper
    wrapper = Broken(tiers.tiers[place].backend, error, *operations)
    tiers.tiers[place].backend = wrapper
    return wrapper


def away() -> TransientError:
    return TransientError("away", backend="remote")


def test_what_is_away_gets_what_waits_when_it_is_back(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a disk in between: the records wait in memory, which does not let them go meanwhile."""
    monkeypatch.setattr(backlog_module, "_PAUSE_S", 0.002)
    monkeypatch.setattr(backlog_module, "_MOST_PAUSE_S", 0.01)
    node = opened()
    caller = node.caller()
    wrapper = broken(node, away(), "stat", "put")
    below = node.space.below
    assert below is not None
    names = keys(4)
    for name in names:
        assert caller.put({name: payload(name, 4 * KiB)}) == [Code.OK]
    end = time.monotonic() + 30
    while wrapper.asked < 12:  # it is tried again and again
        assert time.monotonic() < end
        time.sleep(0.002)
    assert not below.backlog.settle(0.0)
    for name in keys(60, "flood"):
        caller.put({name: payload(name, 4 * KiB)})
    assert in_memory(node, names) == [True] * 4
    stats = node.stats()
    assert stats["disk_failed"] == 0
    assert stats["disk_dropped"] > 0  # what the backlog has no room for lives in memory only
    assert caller.about(Op.DELETE, names[3:], deadline=time.monotonic() + 5) == [Code.OK]
    wrapper.whole.set()
    assert below.settle(60)
    assert [each.ok for each in below.backend.stat(names, deadline=NO_DEADLINE)] == [True] * 3 + [False]
    assert node.stats()["disk_backlog"] == 0


def test_what_is_refused_for_good_is_not_tried_again(opened: Opened) -> None:
    node = opened()
    wrapper = broken(node, PermanentError("never", backend="remote"), "put")
    assert node.caller().put({key("x"): b"x"}) == [Code.OK]
    assert node.space.below is not None
    assert node.space.below.backlog.settle(60)
    stats = node.stats()
    assert (wrapper.asked, stats["disk_failed"], stats["disk_backlog"]) == (1, 1, 0)


def test_a_put_with_a_rival_does_not_wait_for_what_hangs_below(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    node = opened()
    monkeypatch.setattr(service_module, "GLANCE_S", 0.05)
    monkeypatch.setattr(service_module, "_PATIENCE_S", 0.01)
    name = key("contested")
    one, other = node.caller("one"), node.caller("other")
    ticket, codes = one.question({name: bytes(4 * KiB)})
    assert codes == [Code.WANTED]
    rival, codes = other.question({name: bytes(4 * KiB)})
    assert codes == [Code.WANTED]
    wrapper = broken(node, None, "stat")
    try:
        began = time.monotonic()
        final, _ = other.outcomes(other.data(rival, bytes(4 * KiB), deadline=began + 50))
        assert final == [Code.OK]
        assert time.monotonic() - began < 40
    finally:
        wrapper.whole.set()
    assert one.outcomes(one.data(ticket, bytes(4 * KiB)))[0] == [Code.EXISTS]


def test_a_removal_answers_in_time_although_what_is_below_hangs(opened: Opened) -> None:
    node = opened()
    caller = node.caller()
    names = keys(2)
    assert caller.put({name: payload(name, KiB) for name in names}) == [Code.OK] * 2
    assert node.space.below is not None
    assert node.space.below.settle(60)
    wrapper = broken(node, None, "delete", "quarantine", "stat", "get")
    try:
        for op in (Op.DELETE, Op.QUARANTINE):
            deadline = time.monotonic() + 1.0
            assert caller.about(op, names, deadline=deadline)[0] in (Code.FAILED, Code.MISS)
            assert time.monotonic() < deadline
    finally:
        wrapper.whole.set()


def test_two_nodes_do_not_share_a_disk(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/kv?bytes=1MiB"
    script = (
        "import sys; from kvstore_backends.node_server import NodeServer\n"
        f"node = NodeServer(memory_bytes=1 << 20, disk={url!r}); print('up', flush=True); sys.stdin.read()"
    )
    path = ":".join(str(Path(__file__).parents[2] / part) for part in (".", "backends", "transport"))
    other = subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={"PYTHONPATH": path}
    )
    try:
        assert other.stdout is not None
        assert other.stdout.readline() == b"up\n"
        for remote in ("", f"file://{tmp_path}/remote"):
            with pytest.raises(ConfigError, match="the disk of another node"):
                NodeServer(memory_bytes=MiB, disk=url, remote=remote)
    finally:
        other.kill()
        other.communicate()
    with NodeServer(memory_bytes=MiB, disk=url):  # its end, however it came, freed it
        pass
    with NodeServer(memory_bytes=MiB, disk=url):
        pass


def unready(instance: NodeInstance) -> bool:
    return not instance.health(deadline=soon()).ready


@pytest.mark.parametrize("remote", [False, True])
def test_a_node_whose_disk_failed_is_ready_again_without_being_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, remote: bool
) -> None:
    """Who is not ready gets no requests, so it must look by itself whether the disk works again."""
    monkeypatch.setattr(below_module, "_PROBE_S", 0.01)
    url = f"file://{tmp_path}/kv?bytes=1MiB"
    far = f"file://{tmp_path}/remote" if remote else ""
    with NodeServer(memory_bytes=MiB, disk=url, remote=far) as served:
        instance = NodeInstance(served)
        space = served.spaces[""]
        assert space.below is not None
        node = Node.__new__(Node)
        node.spaces, node.space = served.spaces, space
        inner = space.below.lower.places[0].backend
        while isinstance(inner, Wrapper):
            outer, inner = inner, inner.inner
        outer._inner = wrapper = Broken(inner, TransientError("no disk", backend="disk"), "put", "stat")
        if remote:
            for _ in range(20):
                space.below.sizes(keys(1), soon())
        else:
            space.backend.put([], deadline=soon())
            assert not unready(instance)
            names = keys(1)
            put_as_a_client(space, names[0])
        end = time.monotonic() + 30
        while not unready(instance):
            assert time.monotonic() < end
            time.sleep(0.005)
        space.sweep()
        time.sleep(0.05)
        assert unready(instance)
        wrapper.whole.set()
        end = time.monotonic() + 60
        while unready(instance):
            assert time.monotonic() < end
            space.sweep()
            time.sleep(0.02)
        assert below_module._PROBE_KEY not in {info.key for page in inner.list(deadline=soon()) for info in page}
        instance.close()


def put_as_a_client(space: Any, name: Any, nbytes: int = KiB) -> None:
    from kvstore.backend import Write

    assert space.backend.put([Write(name, [memoryview(bytes(nbytes))])], deadline=soon())[0].ok
    space.below.backlog.offer([name], [None])


def test_a_record_that_no_disk_takes_makes_no_node_unready(tmp_path: Path) -> None:
    with NodeServer(memory_bytes=MiB, disk=f"file://{tmp_path}/kv?bytes=16KiB") as served:
        instance = NodeInstance(served)
        space = served.spaces[""]
        put_as_a_client(space, key("too large"), 32 * KiB)
        assert served.settle(60)
        assert space.stats()["disk_failed"] == 1
        assert not unready(instance)
        instance.close()


def test_the_end_takes_as_long_as_one_remote_place_that_hangs_not_as_all(tmp_path: Path) -> None:
    names = ("a", "b", "c", "d")
    served = NodeServer(
        memory_bytes=4 * MiB, default_namespace=False,
        namespaces=[Namespace(name, b"token", remote=f"file://{tmp_path}/{name}") for name in names],
    )  # fmt: skip
    wrappers = []
    for name in names:
        space = served.spaces[name]
        node = Node.__new__(Node)
        node.spaces, node.space = served.spaces, space
        wrappers.append(broken(node, None, "put", "stat"))
        put_as_a_client(space, key(name))
    end = time.monotonic() + 30
    while not all(wrapper.asked for wrapper in wrappers):
        assert time.monotonic() < end
        time.sleep(0.002)
    began = time.monotonic()
    served.close(1.0)
    took = time.monotonic() - began
    for wrapper in wrappers:
        wrapper.whole.set()
    assert took < 6.0  # one after the other: 4 times the drain, and as long again for the threads


def test_deleting_waits_for_whoever_replaces_a_record_and_it_does_not_come_back(opened: Opened) -> None:
    node = opened()
    caller = node.caller()
    name = key("x")
    assert caller.put({name: payload(name, KiB)}) == [Code.OK]
    below = node.space.below
    assert below is not None
    assert below.settle(60)
    with below.replacing([name], soon()) as late:
        assert late == set()
        with below.replacing([name], time.monotonic() + 0.01) as mine:
            assert mine == {name}
        assert caller.about(Op.DELETE, [name], deadline=time.monotonic() + 0.05) == [Code.FAILED]
        deleted = in_thread(lambda: node.caller("other").about(Op.DELETE, [name]))
    assert deleted() == [Code.OK]
    forget_memory(node)
    assert caller.stat([name]) == [Code.MISS]
    with below.removing([name], soon()), below.replacing([name], time.monotonic() + 0.01) as late:
        assert late == {name}
