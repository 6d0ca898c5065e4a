"""The leak audit, the forwarding check, and importing without pytest and hypothesis."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence

import pytest

import kvstore.testing
from kvstore.backend import Backend, Capability, KeyInfo, Limits, Outcome, Write
from kvstore.buffers import BufferPool
from kvstore.errors import ClosedError
from kvstore.keys import Key
from kvstore.testing import DictBackend, FaultyBackend, LatencyBackend, LeakAudit, assert_forwards_everything
from kvstore.testing.audit import track_pools
from kvstore.testing.suite_base import run_in_child, run_threads


def test_the_audit_finds_a_thread() -> None:
    audit = LeakAudit()
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait, name="left-over")
    thread.start()
    assert audit.problems(settle_s=0.01) == ["thread 'left-over' is still running"]
    stop.set()
    assert audit.problems() == []


def test_the_audit_finds_descriptors() -> None:
    audit = LeakAudit()
    reading, writing = os.pipe()
    try:
        assert len(audit.problems()) == 2
    finally:
        os.close(reading)
        os.close(writing)
    assert audit.problems() == []
    reading, writing = os.pipe()
    audit = LeakAudit()
    os.close(reading)
    os.close(writing)
    assert len(audit.problems()) == 2


def test_the_audit_finds_a_child() -> None:
    audit = LeakAudit()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        found = audit.problems()
        assert f"child process {child.pid} was not waited for" in found
        assert child.stdin is not None
        child.communicate(b"\n")
    assert audit.problems() == []


def test_the_audit_finds_memory_in_use() -> None:
    with track_pools() as pools:
        pool = BufferPool(1 << 16)
        buffer = pool.acquire(10)
        assert pools == [pool]
        assert "a buffer pool is in use" in LeakAudit().problems(pools)[0]
        buffer.pin()
        buffer.release()
        assert "pinned=1" in LeakAudit().problems(pools)[0]
        buffer.unpin()
        assert LeakAudit().problems(pools) == []
        pool.close()
    BufferPool(1 << 16).close()
    assert pools == [pool]


def test_canaries_are_on() -> None:
    with BufferPool(4096) as pool, pool.acquire(100) as buffer:
        assert buffer.view == bytes([0xA5]) * 100


def test_threads_report_the_first_error_and_the_time() -> None:
    stop = threading.Event()

    def fail() -> None:
        raise ValueError("first")

    with pytest.raises(ValueError, match="first"):
        run_threads([fail, lambda: None])
    with pytest.raises(AssertionError, match="still busy"):
        run_threads([lambda: None, lambda: stop.wait(30) and None], limit_s=0.05)
    stop.set()


def test_children_report() -> None:
    assert run_in_child(lambda: "fine", limit_s=30) == (True, "fine")
    failed = run_in_child(lambda: str(1 // 0), limit_s=30)
    assert not failed.ok
    assert "ZeroDivisionError" in failed.text
    with pytest.raises(AssertionError, match="hung"):
        run_in_child(lambda: str(threading.Event().wait()), limit_s=0.05)


class Careless(FaultyBackend):
    """Forwards everything, as its base class does."""


class Forgetful(Backend):
    """Forwards what it must, and inherits the rest."""

    def __init__(self, inner: Backend) -> None:
        self.inner = inner
        self.name = inner.name

    def stat(self, keys: Sequence[Key], *, deadline: float) -> list[Outcome]:
        return self.inner.stat(keys, deadline=deadline)

    get_into = put = delete = quarantine = stat  # type: ignore[assignment]

    def close(self) -> None:
        self.inner.close()


class Wrong(LatencyBackend):
    """Forwards everything, and some of it wrongly."""

    @property
    def limits(self) -> Limits:  # type: ignore[override]
        return Limits()

    def delete(self, keys: Sequence[Key], *, deadline: float) -> list[Outcome]:
        return self.inner.quarantine(keys, deadline=deadline)

    def list(self, *, deadline: float) -> Iterator[Sequence[KeyInfo]]:
        return iter(())

    def close(self) -> None:
        return


def test_forwarding() -> None:
    for kind in (FaultyBackend, LatencyBackend, Careless):
        assert_forwards_everything(kind)
    assert_forwards_everything(Careless, Careless)
    with pytest.raises(
        AssertionError, match=r"instead of forwarding: announce, lease, list, register, name, capabilities, limits$"
    ):
        assert_forwards_everything(Forgetful)
    with pytest.raises(
        AssertionError, match=r"inherits from Backend instead of forwarding: announce, lease, list, register$"
    ):
        assert_forwards_everything(Forgetful, Forgetful)
    assert_forwards_everything(Wrong)
    with pytest.raises(AssertionError) as caught:
        assert_forwards_everything(Wrong, lambda inner: Wrong(inner, 0.0))
    for part in ("limits.max_value_bytes", "limits.alignment", "delete (arguments)", "list", "close"):
        assert part in str(caught.value)
    for part in ("stat", "register", "lease", "capabilities"):
        assert part not in str(caught.value)


def test_the_doubles_need_neither_pytest_nor_hypothesis() -> None:
    code = (
        "import sys; sys.modules['pytest'] = sys.modules['hypothesis'] = None\n"
        "from kvstore.testing import DictBackend, FaultyBackend, LatencyBackend, LeakAudit, Fault, Call\n"
        "from kvstore.testing import assert_forwards_everything\n"
        "LatencyBackend(FaultyBackend(DictBackend()), 0.0).close()\n"
        "assert 'torch' not in sys.modules\n"
        "try: from kvstore.testing import BackendSuite\n"
        "except ImportError: print('needs pytest')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "needs pytest\n", "")


def test_the_doubles_do_not_hang_in_a_child_that_was_forked_while_a_lock_was_held() -> None:
    inner = DictBackend()
    faulty, slow = FaultyBackend(inner), LatencyBackend(inner, 0.0, gbytes_per_s=1.0)
    write = Write(Key(bytes(32)), [memoryview(b"1")])

    def work() -> str:
        for backend in (inner, faulty, slow):
            try:
                backend.put([write], deadline=float("inf"))
                return f"{backend} works"
            except ClosedError as error:
                if "fork" not in str(error):
                    return f"does not name the fork: {error}"
            backend.close()
        return "closed"

    with inner._lock, faulty._changed, slow._lock:
        assert run_in_child(work, limit_s=30) == (True, "closed")
    assert slow.put([write], deadline=float("inf"))[0].ok


def test_every_exported_name_is_there() -> None:
    for name in kvstore.testing.__all__:
        assert getattr(kvstore.testing, name).__name__ == name
        assert name in dir(kvstore.testing)
    with pytest.raises(AttributeError, match="no attribute 'Nonsense'"):
        _ = kvstore.testing.Nonsense


def test_dict_backend_keeps_what_it_quarantines() -> None:
    backend = DictBackend(name="here")
    key = Key(bytes(32))
    backend.records[key] = b"bad"
    assert backend.quarantine([key], deadline=float("inf"))[0].ok
    assert backend.quarantined == [(key, b"bad")]
    assert Capability.LIST in backend.capabilities
    assert "here" in repr(backend)
