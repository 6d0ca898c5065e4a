"""Faults of files (faults.md 6, 14–17, 24, 25): scripted system calls, disks that are really full, killed writers."""

from __future__ import annotations

import errno
import mmap
import os
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvstore.backend import EXISTS, MISS, OK, Outcome, Read, Status, Write
from kvstore.errors import BackendError, ConfigError, PermanentError, TransientError
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


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "kv"


def named(*args: Any) -> bool:
    """Of `open`: it makes a temporary file with a name."""
    return str(args[0]).startswith(".kv-")


# Reading.


@pytest.mark.parametrize("where", ["open_beneath", "preadv", "fstat"])
@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO])
def test_what_may_pass_is_tried_once_more(root: Path, where: str, number: int) -> None:
    calls = Script()
    with Opened(root, calls=calls) as opened:
        put(opened, 1, 2)
        calls.fail(where, number)
        assert is_intact(opened, 1)
        assert is_intact(opened, 2)
        assert opened.counters == {"read_retries": 1}
        assert calls.count("unlink") == calls.count("rename") == 0


@pytest.mark.parametrize("where", ["open_beneath", "preadv", "fstat"])
@pytest.mark.parametrize(
    ("number", "kind"),
    [(errno.ESTALE, None), (errno.EIO, TransientError), (errno.EACCES, PermanentError), (errno.EMFILE, TransientError)],
)
def test_what_stays_is_a_miss_or_an_error_and_nothing_is_deleted(
    root: Path, where: str, number: int, kind: type[BackendError] | None
) -> None:
    calls = Script()
    with Opened(root, calls=calls) as opened:
        put(opened, 1, 2)
        calls.log.clear()
        calls.fail(where, number, times=None)
        outcome = get(opened, 1)[0]
        if kind is None:
            assert outcome == MISS
        else:
            assert type(outcome.error) is kind
            assert errno.errorcode[number] in str(outcome.error)
            assert str(file_of(root, 1)) in str(outcome.error)
        tried = sum(1 for name, path in calls.log if name == "open_beneath")
        assert tried == (2 if number in (errno.ESTALE, errno.EIO) else 1)
        assert {name for name, _ in calls.log} <= {"open_beneath", "fstat", "preadv", "close", "open"}
        calls.rules.clear()
        assert is_intact(opened, 1)  # it is still there
        assert len(files_in(root)) == 2


def test_a_name_that_another_client_sees_late(root: Path) -> None:
    """ENOENT on open is asked again once (NFS answers from its cache), and is then a miss."""
    calls = Script()
    with Opened(root, calls=calls) as opened:
        put(opened, 1)
        calls.fail("open_beneath", errno.ENOENT)
        assert is_intact(opened, 1)
        calls.fail("open_beneath", errno.ENOENT, times=2)
        assert get(opened, 1)[0] == MISS


def test_one_bad_record_costs_only_itself(root: Path) -> None:
    calls = Script()
    with Opened(root, calls=calls) as opened:
        put(opened, *range(4))
        bad = os.path.join(*file_of(root, 2).parts[-2:])
        real = calls.open_beneath

        def broken(folder: int, path: str, flags: int) -> int:
            if path == bad:
                raise OSError(errno.EIO, "Input/output error")
            return real(folder, path, flags)

        calls.replace("open_beneath", broken)
        memory = [bytearray(1000) for _ in range(4)]
        reads = [Read(key(name), memoryview(m)) for name, m in enumerate(memory)]
        outcomes = opened.get_into(reads, deadline=soon())
        assert [outcome.status for outcome in outcomes] == [Status.OK, Status.OK, Status.ERROR, Status.OK]
        assert [bytes(memory[n]) for n in (0, 1, 3)] == [payload(n, 1000) for n in (0, 1, 3)]
        looked = opened.stat([key(name) for name in range(4)], deadline=soon())
        assert [outcome.status for outcome in looked] == [Status.OK, Status.OK, Status.ERROR, Status.OK]


def test_short_reads_are_continued(root: Path) -> None:
    calls = Script()
    with Opened(root, calls=calls) as opened:
        put(opened, 1, nbytes=10_000)
        calls.fail("preadv", short=1, times=3)
        calls.fail("preadv", short=777, times=None)
        assert is_intact(opened, 1, 10_000)
        assert calls.count("preadv") == 3 + 13


def test_a_body_that_is_cut_is_never_a_short_ok(root: Path) -> None:
    """The file says 10,000 bytes and ends after 4,000 (a server's page that was lost): an error."""
    calls = Script()
    with Opened(root, calls=calls) as opened:
        put(opened, 1, nbytes=10_000)
        real = calls.preadv

        def cut(fd: int, views: list[memoryview], offset: int) -> int:
            if offset >= 4000:
                return 0
            done: int = real(fd, [views[0][: 4000 - offset]], offset)
            return done

        calls.replace("preadv", cut)
        outcome = get(opened, 1, 10_000)[0]
        assert isinstance(outcome.error, TransientError)
        assert "ends at byte 4000" in str(outcome.error)
        memory = memoryview(bytearray(6000))
        reads = [Read(key(1), memory[:1000], 0), Read(key(1), memory[1000:], 1000)]
        assert all(outcome.status is Status.ERROR for outcome in opened.get_into(reads, deadline=soon()))
        calls.replace("preadv", real)
        assert is_intact(opened, 1, 10_000)


@pytest.mark.parametrize("nbytes", [0, 1, 500, 999])
def test_a_truncated_file_ends_where_it_ends(root: Path, nbytes: int) -> None:
    """Whether that is a whole record is for the reader of the record to say; quarantine and put heal it."""
    with Opened(root) as opened:
        put(opened, 1)
        os.truncate(file_of(root, 1), nbytes)
        assert get(opened, 1)[0] == Outcome(Status.OK, nbytes)
        assert opened.quarantine([key(1)], deadline=soon()) == [OK]
        assert put(opened, 1)[0].ok
        assert opened.quarantine([key(1)], deadline=soon()) == [MISS]  # the reader of the old one comes late
        assert is_intact(opened, 1)


# Writing.


@pytest.mark.parametrize("anonymous", [True, False], ids=["O_TMPFILE", "named"])
def test_short_writes_are_continued(root: Path, anonymous: bool) -> None:
    calls = Script(anonymous=anonymous)
    calls.fail("pwritev", short=1, times=3)
    calls.fail("pwritev", short=777, times=None)
    with Opened(root, calls=calls) as opened:
        views = [memoryview(payload(1, 5000))[at : at + 9] for at in range(0, 5000, 9)]
        assert opened.put([Write(key(1), views)], deadline=soon())[0].ok
        assert is_intact(opened, 1, 5000)


def test_a_write_that_accepts_nothing_is_an_error(root: Path) -> None:
    calls = Script()
    calls.replace("pwritev", lambda fd, views, offset: 0)
    with Opened(root, calls=calls) as opened:
        assert isinstance(put(opened, 1)[0].error, TransientError)


_STEPS = [("pwritev", "off"), ("fdatasync", "data"), ("fsync", "full"), ("close", "off")]


def close_of_the_file(calls: Script) -> None:
    """Let only the close of the temporary file fail: what NFS reports there."""
    real_open = calls.open
    mine: set[int] = set()

    def opening(path: str, *args: Any, **kwargs: Any) -> int:
        fd: int = real_open(path, *args, **kwargs)
        if named(path):
            mine.add(fd)
        return fd

    def closing(fd: int) -> None:
        if fd in mine:
            mine.discard(fd)
            os.close(fd)
            for rule in calls.rules.get("close", ()):
                if rule["times"] != 0:
                    rule["times"] = rule["times"] and rule["times"] - 1
                    raise OSError(rule["errno"], os.strerror(rule["errno"]))
            return
        os.close(fd)

    calls.replace("open", opening)
    calls.replace("close", closing)


@pytest.mark.parametrize(("step", "fsync"), _STEPS)
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG])
def test_a_put_that_fails_leaves_nothing(root: Path, step: str, fsync: str, number: int) -> None:
    calls = Script(anonymous=False)
    if step == "close":
        close_of_the_file(calls)
    with Opened(root, calls=calls, fsync=fsync) as opened:
        assert put(opened, 0)[0].ok  # makes the folders, so that the next fsync is the file's
        calls.fail(step, number, times=2)
        outcome = put(opened, 1)[0]
        assert isinstance(outcome.error, TransientError if number == errno.EIO else PermanentError)
        assert errno.errorcode[number] in str(outcome.error)
        assert opened.stat([key(1)], deadline=soon()) == [MISS]
        assert files_in(root) == [file_of(root, 0)]
        calls.rules.clear()
        assert put(opened, 1)[0].ok  # nothing blocks the name
        assert is_intact(opened, 1)


@pytest.mark.parametrize(("step", "fsync"), _STEPS)
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_below_the_cap_evicts_once_and_tries_again(root: Path, step: str, fsync: str, number: int) -> None:
    for times, stored in ((1, True), (2, False)):
        folder = root / str(times)
        calls = Script(anonymous=False)
        if step == "close":
            close_of_the_file(calls)
        with Opened(folder, calls=calls, fsync=fsync, nbytes=1 << 30) as opened:
            put(opened, *range(5))
            (folder / key("x").hex()[:2]).mkdir(exist_ok=True)
            calls.fail(step, number, times=times)
            outcome = put(opened, "x")[0]
            assert outcome.ok == stored
            if not stored:
                assert isinstance(outcome.error, PermanentError)
                assert errno.errorcode[number] in str(outcome.error)
            assert present(opened, range(5)) == [0, 1, 2, 3]  # one round, as large as the record
            assert opened.counters == {"evicted": 1, "put_retries": 1}
            assert disk_usage(folder) == opened.bytes_in_use(deadline=soon()) == (5000 if stored else 4000)


def test_fsync_of_the_folder_fails(root: Path) -> None:
    """The name is not on the device, so the put must not count as done, and must not stay."""
    calls = Script()
    with Opened(root, calls=calls, fsync="full") as opened:
        put(opened, 1)
        file_of(root, 1).unlink()
        calls.fail("fsync", errno.EIO, after=1)
        assert isinstance(put(opened, 1)[0].error, TransientError)
        assert files_in(root) == []
        assert put(opened, 1)[0].ok


@pytest.mark.parametrize("number", [errno.EIO, errno.EEXIST, errno.ESTALE])
def test_a_link_that_reports_an_error_may_have_happened(root: Path, number: int) -> None:
    """An NFS request that was sent twice: the count of links says that it was us."""
    calls = Script(anonymous=False)
    calls.fail("link", number, happens=True)
    with Opened(root, calls=calls) as opened:
        assert put(opened, 1) == [Outcome(Status.OK, 1000)]
        assert is_intact(opened, 1)
    assert files_in(root) == [file_of(root, 1)]
    assert file_of(root, 1).stat().st_nlink == 1


def test_folders_that_vanish_under_a_writer_are_made_again(root: Path) -> None:
    """Another process removed them, being empty, between our mkdir and our open."""
    for anonymous in (True, False):
        calls = Script(anonymous=anonymous)
        real = calls.open
        left = [3]

        def vanish(path: str, *args: Any, real: Any = real, left: list[int] = left, **kwargs: Any) -> int:
            if left[0] and (path == "." or named(path)):
                left[0] -= 1
                file_of(root, 1).parent.rmdir()
            fd: int = real(path, *args, **kwargs)
            return fd

        calls.replace("open", vanish)
        with Opened(root, calls=calls) as opened:
            assert put(opened, 1)[0].ok
            assert left == [0]
            assert is_intact(opened, 1)
            assert opened.delete([key(1)], deadline=soon()) == [OK]


@pytest.mark.parametrize("nbytes", [None, 5000])
def test_the_whole_root_is_removed_under_us(root: Path, nbytes: int | None) -> None:
    with Opened(root, nbytes=nbytes) as opened:
        put(opened, 1)
        subprocess.run(["rm", "-rf", root], check=True)
        assert get(opened, 1)[0] == MISS
        assert list(opened.list(deadline=soon())) == []
        for name in range(2, 12):
            assert put(opened, name)[0].ok
            assert is_intact(opened, name)
        assert file_of(root, 11).exists()
        if nbytes:
            assert disk_usage(root) <= nbytes


def test_writers_and_pruners_race(root: Path) -> None:
    """Deletes remove empty folders while puts make them."""
    failures: list[Outcome] = []
    with Opened(root) as opened:

        def work(number: int) -> None:
            for _ in range(150):
                outcome = put(opened, "same")[0]
                if not outcome.stored:
                    failures.append(outcome)
                opened.delete([key("same")], deadline=soon())

        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert failures == []
    assert files_in(root) == []


# Many writers, killed writers (14).


@pytest.mark.parametrize("how", ["anonymous", "named"])
def test_many_writers_of_one_key(root: Path, how: str) -> None:
    """Eight processes put one key again and again, while readers look and a third party deletes it."""
    script = """
b = FileBackend(sys.argv[1], calls=Script(anonymous=sys.argv[2] == "anonymous"))
print("ready", flush=True)
sys.stdin.readline()
for _ in range(60):
    outcome = put(b, "one", nbytes=50_000)[0]
    assert outcome.stored, outcome
b.close()
"""
    writers = [start(script, root, how) for _ in range(8)]
    for writer in writers:
        assert line_of(writer) == "ready"
    stop = threading.Event()
    seen = {"ok": 0, "bad": 0}
    with Opened(root) as opened:

        def read() -> None:
            last = False
            while not last:
                last = stop.is_set()  # one more look when the writers are done: it finds the record, if none did before
                outcome, data = get(opened, "one", 50_000)
                if outcome == Outcome(Status.OK, 50_000) and data == payload("one", 50_000):
                    seen["ok"] += 1
                    opened.delete([key("one")], deadline=soon())
                elif outcome != MISS:
                    seen["bad"] += 1

        reader = threading.Thread(target=read)
        reader.start()
        try:
            for writer in writers:
                assert writer.stdin is not None
                writer.stdin.write("go\n")
                writer.stdin.flush()
            for writer in writers:
                finish(writer)
        finally:
            stop.set()
            reader.join()
        opened.delete([key("one")], deadline=soon())
    assert seen["bad"] == 0
    assert seen["ok"] > 0
    assert files_in(root) == []  # no temporary file is left
    assert not (root / ".kvstore/writers").exists() or not list((root / ".kvstore/writers").iterdir())


@pytest.mark.parametrize("how", ["anonymous", "named"])
def test_a_writer_is_killed_in_the_middle(root: Path, how: str) -> None:
    process = start(HALF_WRITER, root, how, "half")
    assert line_of(process) == "half"
    temps = files_in(root)
    assert len(temps) == (how == "named")
    with Opened(root) as opened:  # while it lives, nobody sweeps its file
        assert files_in(root) == temps
        assert get(opened, "half", 100_000)[0] == MISS
    reap(process)
    with Opened(root) as opened:
        assert files_in(root) == []
        assert put(opened, "half", nbytes=100_000)[0].ok
        assert is_intact(opened, "half", 100_000)


# Read-only, no room, no permission: real ones.


def mount_tmpfs(folder: Path, options: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if os.getuid() != 0:
        pytest.skip("needs root, to mount a tmpfs")
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "none", folder], check=False, capture_output=True, text=True
    )
    if done.returncode != 0:
        pytest.skip(f"a tmpfs cannot be mounted here: {done.stderr.strip()}")


@contextmanager
def tmpfs(folder: Path, options: str) -> Iterator[Path]:
    mount_tmpfs(folder, options)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def test_a_disk_that_is_really_full(root: Path) -> None:
    with tmpfs(root, "size=1m"):
        with Opened(root) as opened:
            outcomes = [put(opened, name, nbytes=100_000)[0] for name in range(14)]
            failed = [outcome for outcome in outcomes if not outcome.ok]
            assert 4 <= len(failed) <= 6
            assert all(isinstance(outcome.error, PermanentError) for outcome in failed)
            assert all("ENOSPC" in str(outcome.error) for outcome in failed)
            good = [name for name, outcome in enumerate(outcomes) if outcome.ok]
            assert present(opened, range(14)) == good
            assert files_in(root) == sorted(file_of(root, name) for name in good)  # no partial file
            assert all(is_intact(opened, name, 100_000) for name in good)
        with Opened(root, nbytes=1 << 30) as opened:  # the cap is larger than the disk: eviction makes the room
            for name in range(20, 40):
                assert put(opened, name, nbytes=100_000)[0].ok
                assert is_intact(opened, name, 100_000)


def test_a_read_only_file_system(root: Path) -> None:
    with tmpfs(root, "size=1m"):
        with Opened(root) as opened:
            put(opened, 1)
        subprocess.run(["mount", "-o", "remount,ro", root], check=True)
        for nbytes in (None, 10_000, 500):
            with Opened(root, nbytes=nbytes, direct="on") as opened:
                assert is_intact(opened, 1)
                assert sum(map(len, opened.list(deadline=soon()))) == 1
                assert put(opened, 1) == [EXISTS]
                outcome = put(opened, 2, nbytes=400)[0]
                assert isinstance(outcome.error, PermanentError)
                assert "EROFS" in str(outcome.error) or "Read-only" in str(outcome.error)
                for method in (opened.delete, opened.quarantine):
                    assert isinstance(method([key(1)], deadline=soon())[0].error, PermanentError)
                assert is_intact(opened, 1)


def test_a_new_folder_on_a_read_only_file_system(root: Path) -> None:
    with tmpfs(root, "size=1m,ro"):
        with pytest.raises(ConfigError, match="EROFS"):
            Opened(root / "new")
        with Opened(root) as opened:
            assert get(opened, 1)[0] == MISS
            assert "EROFS" in str(put(opened, 1)[0].error)


def test_tmpfs_has_no_direct_io_or_does(root: Path) -> None:
    """Whatever this kernel's tmpfs says, bytes are exact (old ones refuse O_DIRECT)."""
    block = memoryview(mmap.mmap(-1, 1 << 20))
    block[:] = payload(1, 1 << 20)
    with tmpfs(root, "size=8m"), Opened(root, direct="auto") as opened:
        assert opened.put([Write(key(1), [block])], deadline=soon())[0].ok
        target = memoryview(mmap.mmap(-1, 1 << 20))
        assert opened.get_into([Read(key(1), target)], deadline=soon()) == [Outcome(Status.OK, 1 << 20)]
        assert target == block
