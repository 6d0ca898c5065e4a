"""`bytes=` of the `file` backend: the cap holds, across processes and restarts, and the right records go first."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore.backend import EXISTS, MISS, OK, Status, Write
from kvstore.errors import PermanentError, TransientError
from kvstore.wrappers import BreakerBackend, BreakerState
from kvstore.wrappers.base import LocalWait
from kvstore_backends.file import FileBackend
from kvstore_backends.file import capacity as capacity_module
from tests.faults.file_support import (
    HALF_WRITER,
    Opened,
    Script,
    disk_usage,
    file_of,
    files_in,
    finish,
    get,
    is_intact,
    key,
    line_of,
    payload,
    present,
    put,
    reap,
    soon,
    start,
)

CAP = 10_000
NAMES = range(10)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "kv"


@pytest.fixture
def full(root: Path) -> Iterator[FileBackend]:
    """Ten records of 1000 bytes under a cap of 10,000."""
    opened = FileBackend(root, nbytes=CAP)
    for name in NAMES:
        assert put(opened, name)[0].ok
    yield opened
    opened.close()


def in_use(backend: FileBackend) -> int:
    return backend.bytes_in_use(deadline=soon())


def test_the_least_recently_used_goes_first(full: FileBackend, root: Path) -> None:
    assert is_intact(full, 0)
    assert full.stat([key(1)], deadline=soon())[0].ok  # a lookup is no use
    assert put(full, "x", "y")[1].ok
    assert present(full, NAMES) == [0, 3, 4, 5, 6, 7, 8, 9]
    assert in_use(full) == disk_usage(root) == CAP
    assert full.counters["evicted"] == 2


def test_storing_again_is_a_use(full: FileBackend) -> None:
    assert put(full, 0) == [EXISTS]
    put(full, "x")
    assert present(full, NAMES) == [0, *range(2, 10)]


def test_an_oversize_record_is_refused_before_anything_goes(full: FileBackend) -> None:
    """… and leaves nothing behind that hinders the key (faults.md 15)."""
    outcome = put(full, "large", nbytes=CAP + 1)[0]
    assert isinstance(outcome.error, PermanentError)
    assert "exceeds the capacity of 10000 bytes" in str(outcome.error)
    assert present(full, NAMES) == list(NAMES)
    assert full.delete([key(name) for name in NAMES], deadline=soon()) == [OK] * 10
    assert in_use(full) == 0
    assert put(full, "large")[0].ok
    assert put(full, "exact", nbytes=CAP)[0].ok
    assert present(full, ["large", "exact"]) == ["exact"]


def test_an_oversize_record_costs_only_itself(full: FileBackend) -> None:
    writes = [Write(key(name), [memoryview(payload(name, n))]) for name, n in (("a", 10), ("b", CAP + 1), ("c", 10))]
    assert [outcome.status for outcome in full.put(writes, deadline=soon())] == [Status.OK, Status.ERROR, Status.OK]


def test_a_batch_larger_than_the_cap(full: FileBackend, root: Path) -> None:
    outcomes = put(full, *[f"b{n}" for n in range(25)])
    assert all(outcome.ok for outcome in outcomes)
    assert in_use(full) == disk_usage(root) == CAP
    assert len(present(full, [f"b{n}" for n in range(25)])) == 10


def test_the_head_of_a_prefix_outlives_its_tail(root: Path) -> None:
    """Capacity 8; a chain of 8 in two calls; two unrelated; now and after a restart (faults.md 12)."""
    for restart in (False, True):
        folder = root / str(restart)
        opened = FileBackend(folder, nbytes=8000)
        try:
            put(opened, 0, 1, 2, 3, parents=[-1, 0, 1, 2])
            put(opened, 4, 5, 6, 7, parents=[3, 4, 5, 6])
            if restart:
                opened.close()
                opened = FileBackend(folder, nbytes=8000)
            put(opened, "x")
            put(opened, "y")
            assert present(opened, range(8)) == [0, 1, 2, 3, 4, 5]
        finally:
            opened.close()


def test_a_restart_forgets_nothing(full: FileBackend, root: Path) -> None:
    assert is_intact(full, 0)
    full.close()
    with Opened(root, nbytes=CAP) as again:
        assert in_use(again) == CAP
        assert present(again, NAMES) == list(NAMES)
        put(again, "x")
        assert present(again, NAMES) == [0, *range(2, 10)]  # the read of 0 was written down at close
        for name in range(10, 30):
            assert put(again, name)[0].ok
            assert disk_usage(root) <= CAP
        assert present(again, NAMES) == []


def test_a_killed_process_forgets_nothing(root: Path) -> None:
    """Fill, kill, reopen, fill again (faults.md 16)."""
    script = """
b = FileBackend(sys.argv[1], nbytes=10_000)
for name in range(15): assert put(b, name)[0].ok
print("full", flush=True)
sys.stdin.read()
"""
    process = start(script, root)
    assert line_of(process) == "full"
    reap(process)
    with Opened(root, nbytes=CAP) as again:
        assert present(again, range(15)) == list(range(5, 15))
        for name in range(15, 30):
            assert put(again, name)[0].ok
            assert disk_usage(root) <= CAP
        assert in_use(again) == CAP
        assert present(again, range(30)) == list(range(20, 30))


@pytest.mark.parametrize("how", ["anonymous", "named"])
def test_what_a_killed_writer_had_reserved_is_given_back(root: Path, how: str) -> None:
    cap = 250_000
    with Opened(root, nbytes=cap, calls=Script(anonymous=how == "anonymous")) as opened:
        put(opened, "a", nbytes=100_000)
        process = start(HALF_WRITER, root, how, "half", cap)
        assert line_of(process) == "half"
        assert put(opened, "b", nbytes=50_000)[0].ok
        assert opened.stat([key("half")], deadline=soon()) == [MISS]
        reap(process)
        # 150 kB stored and 100 kB that nobody will ever write: 100 kB more fit, and nothing has to go for them.
        assert put(opened, "c", nbytes=100_000)[0].ok
        assert present(opened, "abc") == ["a", "b", "c"]
        assert in_use(opened) == 250_000


def test_a_live_writers_reservation_counts(root: Path) -> None:
    cap = 250_000
    with Opened(root, nbytes=cap) as opened:
        put(opened, "a", nbytes=100_000)
        process = start(HALF_WRITER, root, "anonymous", "half", cap)
        try:
            assert line_of(process) == "half"
            assert put(opened, "b", nbytes=100_000)[0].ok
            assert present(opened, "ab") == ["b"]
        finally:
            reap(process)


def test_two_processes_share_one_cap(root: Path) -> None:
    """Four writers on one folder; a fifth process looks at the disk all the time."""
    script = """
b = FileBackend(sys.argv[1], nbytes=100_000)
print("ready", flush=True)
sys.stdin.readline()
for n in range(60): assert put(b, f"{sys.argv[2]}-{n}", nbytes=5_000)[0].ok, n
b.close()
"""
    writers = [start(script, root, name) for name in range(4)]
    for writer in writers:
        assert line_of(writer) == "ready"
    peak, stop = [0], threading.Event()

    def watch() -> None:
        while not stop.is_set():
            peak[0] = max(peak[0], disk_usage(root))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        for writer in writers:
            assert writer.stdin is not None
            writer.stdin.write("go\n")
            writer.stdin.flush()
        for writer in writers:
            finish(writer)
    finally:
        stop.set()
        watcher.join()
    assert 50_000 < peak[0] <= 105_000
    with Opened(root, nbytes=100_000) as opened:
        # Nothing was lost in the books, and what they say lies there (counts made meanwhile may err upwards).
        assert disk_usage(root) <= in_use(opened) <= 100_000
        assert len(files_in(root)) >= 15


def test_two_backends_of_one_process_share_one_cap(root: Path) -> None:
    with Opened(root, nbytes=CAP) as one, Opened(root, nbytes=CAP) as two:
        for name in range(40):
            assert put((one, two)[name % 2], name)[0].ok
            assert disk_usage(root) <= CAP
        assert in_use(one) == in_use(two) == disk_usage(root) == CAP


def test_what_another_process_uses_is_spared(full: FileBackend, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its reads show in the modification times; ours are older."""
    monkeypatch.setattr("kvstore_backends.file.reader.read_stamp", lambda mtime, now, position: now)
    with Opened(root, nbytes=CAP) as other:
        assert is_intact(other, 0)
        assert is_intact(other, 1)
    put(full, "x", "y")
    assert present(full, NAMES) == [0, 1, 4, 5, 6, 7, 8, 9]


def test_a_lowered_cap_is_enforced_at_open(full: FileBackend, root: Path) -> None:
    full.close()
    with Opened(root, nbytes=3500) as again:
        assert present(again, NAMES) == [7, 8, 9]
        assert in_use(again) == disk_usage(root) == 3000


def test_a_folder_that_was_filled_without_a_cap(root: Path) -> None:
    with Opened(root) as opened:
        put(opened, *NAMES)
        opened.quarantine([key(9)], deadline=soon())
    with Opened(root, nbytes=5500) as capped:
        assert disk_usage(root) == in_use(capped) == 5000
    assert list((root / ".kvstore/quarantine").iterdir()) == []  # goes before good records


@pytest.mark.parametrize("damage", [b"", b"rubbish" * 20, b"kvusage1" + b"\x01" + b"\xff" * 30])
def test_damaged_books_are_made_anew(full: FileBackend, root: Path, damage: bytes) -> None:
    full.close()
    (root / ".kvstore/usage").write_bytes(damage)
    with Opened(root, nbytes=CAP) as again:
        assert in_use(again) == CAP
        put(again, "x")
        assert disk_usage(root) == CAP


def test_books_that_drifted_are_healed_when_room_is_short(full: FileBackend, root: Path) -> None:
    """An operator removed records by hand: the counter says full, the first eviction looks and sees."""
    full.close()
    for name in range(5):
        file_of(root, name).unlink()
    with Opened(root, nbytes=CAP) as again:
        assert in_use(again) == CAP
        put(again, "x")
        assert in_use(again) == disk_usage(root) <= CAP
        assert len(present(again, range(5, 10))) >= 4


def test_fifo_ignores_use(root: Path) -> None:
    with Opened(root, nbytes=CAP, policy="fifo") as opened:
        put(opened, *NAMES)
        before = file_of(root, 9).stat().st_mtime_ns
        assert is_intact(opened, 9)
        assert file_of(root, 9).stat().st_mtime_ns == before
        put(opened, "x")
        assert len(present(opened, NAMES)) == 9


def test_a_policy_that_keeps_refuses_when_full(root: Path) -> None:
    with Opened(root, nbytes=CAP, policy="none") as opened:
        for name in NAMES:
            put(opened, name)
        outcome = put(opened, "x")[0]
        assert isinstance(outcome.error, PermanentError)
        assert "the policy evicts nothing" in str(outcome.error)
        assert present(opened, NAMES) == list(NAMES)
    with Opened(root, nbytes=CAP, policy="none") as opened:
        assert not put(opened, "x")[0].ok
        assert present(opened, NAMES) == list(NAMES)


def test_quarantined_bytes_count_and_go_first(full: FileBackend, root: Path) -> None:
    assert full.quarantine([key(3)], deadline=soon()) == [OK]
    assert in_use(full) == disk_usage(root) == CAP
    assert put(full, 3)[0].ok
    assert present(full, NAMES) == list(NAMES)
    assert in_use(full) == disk_usage(root) == CAP
    assert list((root / ".kvstore/quarantine").iterdir()) == []


@pytest.mark.parametrize("number", [errno.EPERM, errno.EBUSY, errno.EACCES])
@pytest.mark.parametrize("restart", [False, True])
def test_a_victim_that_cannot_be_removed_is_passed_over(root: Path, number: int, restart: bool) -> None:
    calls = Script()
    stuck = {file_of(root, name).name for name in (0, 1, 2)}
    opened = FileBackend(root, nbytes=CAP, calls=calls)
    try:
        for name in NAMES:
            put(opened, name)
        if restart:
            opened.close()
            opened = FileBackend(root, nbytes=CAP, calls=calls)
        calls.fail("unlink", number, times=None, when=lambda name, *_: name in stuck)
        assert put(opened, "x", "y", nbytes=2000)[1].ok
        assert present(opened, NAMES) == [0, 1, 2, 7, 8, 9]
        assert in_use(opened) == disk_usage(root) == CAP
        # Nothing but such victims left: the put says so, and the next one may work.
        everything = [file_of(root, name).name for name in [*NAMES, "x", "y"]]
        stuck.update(everything)
        outcome = put(opened, "z")[0]
        assert "could not be removed" in str(outcome.error)
        stuck.clear()
        assert put(opened, "z")[0].ok
    finally:
        opened.close()


def test_a_failed_put_gives_its_room_back(full: FileBackend, root: Path) -> None:
    calls = Script()
    calls.fail("pwritev", errno.EIO, times=None)
    with Opened(root, nbytes=CAP, calls=calls) as broken:
        for name in range(50, 70):
            assert isinstance(put(broken, name)[0].error, TransientError)
    assert in_use(full) == disk_usage(root) < CAP
    assert put(full, "x")[0].ok


def test_the_deadline_covers_waiting_for_the_books(full: FileBackend, root: Path) -> None:
    """A process that holds the lock and is stopped must not hold anybody."""
    process = start("""
b = FileBackend(sys.argv[1], nbytes=10_000)
b._held.capacity._usage.acquire(soon())
print("locked", flush=True)
sys.stdin.read()
""", root)  # fmt: skip
    try:
        assert line_of(process) == "locked"
        began = time.monotonic()
        outcome = full.put([Write(key("x"), [memoryview(b"x")])], deadline=began + 0.1)[0]
        assert isinstance(outcome.error, TransientError)
        assert time.monotonic() - began < 5
        assert is_intact(full, 3)  # readers do not care
        assert full.delete([key(3)], deadline=soon()) == [OK]  # … and what was freed is noted later
    finally:
        reap(process)
    assert put(full, "x")[0].ok
    assert in_use(full) == disk_usage(root) == CAP


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL])
def test_without_locks_the_cap_is_each_processs_own(root: Path, number: int, caplog: pytest.LogCaptureFixture) -> None:
    calls = Script()
    calls.fail("try_lock", number, times=None)
    with Opened(root, nbytes=CAP) as first:
        put(first, *NAMES)
    for _ in range(2):
        with Opened(root, nbytes=CAP, calls=calls) as opened:
            assert in_use(opened) == CAP  # counted at open
            for name in range(20, 30):
                put(opened, name)
                assert disk_usage(root) <= CAP
    assert [r.message for r in caplog.records if "for each process by itself" in r.message and r.levelname == "WARNING"]
    assert len(caplog.records) == 2  # once per backend


def test_a_walk_in_steps(full: FileBackend, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large folder is walked a leaf at a time by the puts that evict; the cap holds all the while."""
    full.close()
    monkeypatch.setattr(capacity_module, "_FIRST_SCAN_SECONDS", 0.0)
    monkeypatch.setattr(capacity_module, "_STEP_SECONDS", 0.0)
    with Opened(root, nbytes=CAP) as again:
        for name in range(10, 40):
            assert put(again, name)[0].ok
            assert disk_usage(root) <= CAP
        assert in_use(again) == disk_usage(root)
        assert len(present(again, range(40))) >= 8


def test_lanes_share_the_cap(root: Path) -> None:
    failures: list[Any] = []
    with Opened(root, nbytes=CAP) as opened:

        def lane(number: int) -> None:
            for n in range(40):
                outcome = put(opened, f"{number}-{n}")[0]
                if not outcome.ok:
                    failures.append(outcome)
                get(opened, f"{number}-{n}")

        threads = [threading.Thread(target=lane, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures
        assert disk_usage(root) <= in_use(opened) <= CAP
        assert in_use(opened) >= CAP - 4000


def test_reads_are_written_down_once_per_interval(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Script()
    with Opened(root, nbytes=CAP, calls=calls) as opened:
        put(opened, 1)
        for _ in range(5):
            assert is_intact(opened, 1)
        assert calls.count("utime") == 1  # the put's
        os.utime(file_of(root, 1), (1, 1))
        for _ in range(5):
            assert is_intact(opened, 1)
        assert calls.count("utime") == 2
        assert time.time() - file_of(root, 1).stat().st_mtime < 120
        os.utime(file_of(root, 1), (1, 1))
        calls.fail("utime", errno.EPERM, times=None)  # another owner's file
        assert is_intact(opened, 1)


def test_empty_folders_go_with_their_records(full: FileBackend, root: Path) -> None:
    for name in range(100, 200):
        assert put(full, name)[0].ok
    assert len([path for path in root.iterdir() if path.name != ".kvstore"]) <= 10
    assert full.delete([key(name) for name in range(190, 200)], deadline=soon()) == [OK] * 10
    assert [path.name for path in root.iterdir()] == [".kvstore"]


def test_waiting_for_others_says_nothing_about_the_folder(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a breaker nor a limit may take a full house for a folder in trouble."""
    monkeypatch.setattr(capacity_module, "_WAIT_SECONDS", 0.0)
    with Opened(root, nbytes=CAP) as opened:
        backend = BreakerBackend(opened, failures=1)
        write = [Write(key(1), [memoryview(payload(1, 1000))])]
        capacity = opened._held.capacity
        assert capacity is not None
        capacity.reserve(CAP, soon())
        (outcome,) = backend.put(write, deadline=soon())
        assert isinstance(outcome.error, LocalWait)
        capacity.commit([], CAP, soon())
        capacity._usage.acquire(soon())
        try:
            (outcome,) = backend.put(write, deadline=time.monotonic() + 0.01)
        finally:
            capacity._usage.release()
        assert isinstance(outcome.error, LocalWait)
        assert backend.state is BreakerState.CLOSED
        assert backend.put(write, deadline=soon())[0].ok
