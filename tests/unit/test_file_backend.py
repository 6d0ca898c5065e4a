"""The `file` backend: layout, URL, gathering, safety of paths, O_DIRECT, listing, quarantine, lifetime."""

from __future__ import annotations

import math
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore.backend import EXISTS, MISS, NO_DEADLINE, Capability, Outcome, Read, Status, Write
from kvstore.errors import ClosedError, ConfigError, TransientError
from kvstore.registry import open_backend
from kvstore.testing.suite_base import run_in_child
from kvstore_backends.file import FileBackend
from kvstore_backends.file.naming import new_temp_name
from kvstore_backends.file.stamps import TOUCH_NS, read_stamp
from tests.faults.file_support import (
    POISON,
    Opened,
    Script,
    file_of,
    files_in,
    finish,
    get,
    is_intact,
    key,
    payload,
    present,
    put,
    soon,
    start,
)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "kv"


@pytest.fixture
def backend(root: Path) -> Iterator[FileBackend]:
    opened = FileBackend(root)
    yield opened
    opened.close()


# Opening.


def test_open_by_url(tmp_path: Path) -> None:
    opened = open_backend(f"file://{tmp_path}/a%20b?bytes=1MiB&policy=fifo&fsync=data&direct=auto&lanes=7&quarantine=0")
    try:
        assert isinstance(opened, FileBackend)
        assert (tmp_path / "a b").is_dir()
        assert opened.limits.lanes == 7
        assert opened.limits.max_value_bytes == 1 << 20
        assert Capability.CAPACITY in opened.capabilities
        assert put(opened, 1)[0].ok
    finally:
        opened.close()


@pytest.mark.parametrize(
    ("url", "match"),
    [
        ("file://mnt/kv", r"takes no host.*'mnt'.*file:///mnt/kv"),
        ("file://", "needs the path"),
        ("file:///tmp/x?bytes=10XB", "unknown unit"),
        ("file:///tmp/x?fsync=maybe", "one of off, data, full"),
        ("file:///tmp/x?policy=best&bytes=1GiB", "'best' is not one of lru, fifo, none"),
        ("file:///tmp/x?lane=4", "did you mean 'lanes'"),
        ("file:///tmp/x?lanes=0", "at least 1"),
        ("file:///tmp/x?bytes=0", "at least 1"),
    ],
)
def test_bad_urls_are_explained(url: str, match: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=match):
        open_backend(url.replace("/tmp/x", f"{tmp_path}/x"))


def test_a_bad_argument_is_a_config_error(tmp_path: Path) -> None:
    bad: list[dict[str, Any]] = [{"fsync": "x"}, {"direct": "x"}, {"lanes": 0}, {"nbytes": 0}, {"policy": "x"}]
    for arguments in bad:
        with pytest.raises(ConfigError):
            FileBackend(tmp_path / "kv", **({"nbytes": 10} | arguments))


def test_the_root_must_be_a_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ConfigError, match="file is not a folder"):
        FileBackend(tmp_path / "file")
    with pytest.raises(ConfigError, match=r"cannot be used.*ENOTDIR"):
        FileBackend(tmp_path / "file" / "below")
    assert (tmp_path / "file").read_text() == "mine"


def test_a_missing_root_is_made_with_its_parents(tmp_path: Path) -> None:
    with Opened(tmp_path / "a" / "b" / "c") as opened:
        assert put(opened, 1)[0].ok
    assert (tmp_path / "a/b/c/.kvstore/format").read_text() == "kvstore file 2\n"


@pytest.mark.parametrize("text", ["kvstore file 1\n", "kvstore file 3\n"])
def test_another_format_is_refused(root: Path, text: str) -> None:
    FileBackend(root).close()
    (root / ".kvstore/format").write_text(text)
    with pytest.raises(ConfigError, match=text.strip()):
        FileBackend(root)


@pytest.mark.parametrize("text", ["", "kvsto"])
def test_a_format_being_written_is_no_error(root: Path, text: str) -> None:
    FileBackend(root).close()
    (root / ".kvstore/format").write_text(text)
    FileBackend(root).close()


def test_our_folder_must_not_be_a_link(tmp_path: Path, root: Path) -> None:
    root.mkdir()
    (tmp_path / "elsewhere").mkdir()
    (root / ".kvstore").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="something else"):
        FileBackend(root)
    assert not list((tmp_path / "elsewhere").iterdir())


# Layout, modes.


def test_layout(backend: FileBackend, root: Path) -> None:
    assert put(backend, "name")[0] == Outcome(Status.OK, 1000)
    assert files_in(root) == [file_of(root, "name")]
    assert file_of(root, "name").read_bytes() == payload("name", 1000)
    text = key("name").hex()
    assert file_of(root, "name") == root / text[:2] / f"{text}.kv"


@pytest.mark.parametrize("anonymous", [True, False], ids=["O_TMPFILE", "named"])
@pytest.mark.parametrize(("umask", "mode", "folder"), [(0o022, 0o644, 0o755), (0o077, 0o600, 0o700)])
def test_the_umask_is_respected(root: Path, anonymous: bool, umask: int, mode: int, folder: int) -> None:
    before = os.umask(umask)
    try:
        with Opened(root, calls=Script(anonymous=anonymous)) as opened:
            put(opened, 1)
    finally:
        os.umask(before)
    assert file_of(root, 1).stat().st_mode & 0o777 == mode
    assert file_of(root, 1).parent.stat().st_mode & 0o777 == folder


def test_another_user_reads_with_umask_022_and_not_with_077(tmp_path: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("needs root, to become another user")
    os.chmod(tmp_path, 0o755)
    for folder in list(tmp_path.parents)[:3]:
        os.chmod(folder, os.stat(folder).st_mode | 0o055)
    found = {}
    for umask in (0o022, 0o077):
        before = os.umask(umask)
        try:
            root = tmp_path / f"{umask:o}"
            root.mkdir(mode=0o755)
            os.chmod(root, 0o755)
            with Opened(root) as opened:
                put(opened, 1)
        finally:
            os.umask(before)
        code = """
os.setgid(65534)
os.setuid(65534)
b = FileBackend(sys.argv[1])
outcome, data = get(b, 1)
refused = put(b, 2)[0].error
print(outcome.status.name, data == payload(1, 1000), type(outcome.error).__name__, type(refused).__name__)
"""
        found[umask] = finish(start(code, root)).split()
    assert found[0o022] == ["OK", "True", "NoneType", "PermanentError"]
    assert found[0o077] == ["ERROR", "False", "PermanentError", "PermanentError"]


# Gathering.


def test_neighbouring_ranges_share_one_open_and_one_read(root: Path) -> None:
    calls = Script()
    with Opened(root, calls=calls) as opened:
        put(opened, "r", nbytes=1 << 20)
        data = payload("r", 1 << 20)
        ranges = [(4096, 1000), (0, 4096), (5096, 10), (70_000, 30), (900_000, 50)]  # a gap of 64 KiB, and a larger one
        memory = [bytearray([POISON]) * length for _, length in ranges]
        reads = [Read(key("r"), memoryview(m), offset) for m, (offset, _) in zip(memory, ranges, strict=True)]
        calls.log.clear()
        outcomes = opened.get_into([*reads, Read(key("none"), memoryview(bytearray(1)))], deadline=soon())
        assert [outcome.nbytes for outcome in outcomes] == [length for _, length in ranges] + [0]
        assert outcomes[-1] == MISS
        assert [bytes(m) for m in memory] == [data[offset : offset + length] for offset, length in ranges]
        assert calls.count("preadv") == 2
        assert sum(1 for name, path in calls.log if name == "open_beneath" and key("r").hex() in path) == 1


def test_overlapping_ranges(backend: FileBackend) -> None:
    put(backend, "r", nbytes=10_000)
    memory = [bytearray(5000) for _ in range(3)]
    reads = [Read(key("r"), memoryview(m), offset) for m, offset in zip(memory, (0, 2500, 0), strict=True)]
    assert [outcome.nbytes for outcome in backend.get_into(reads, deadline=soon())] == [5000] * 3
    data = payload("r", 10_000)
    assert [bytes(m) for m in memory] == [data[:5000], data[2500:7500], data[:5000]]


def test_the_end_of_a_record(backend: FileBackend) -> None:
    put(backend, "r", nbytes=100)
    assert get(backend, "r", 150) == (Outcome(Status.OK, 100), payload("r", 100) + bytes([POISON]) * 50)
    assert get(backend, "r", 50, offset=80)[0] == Outcome(Status.OK, 20)
    for offset in (100, 101, 1 << 62):
        assert get(backend, "r", 50, offset=offset)[0] == Outcome(Status.OK, 0)
    assert get(backend, "r", 0)[0] == Outcome(Status.OK, 0)


def test_an_empty_record_is_no_miss(backend: FileBackend) -> None:
    assert put(backend, "empty", nbytes=0)[0] == Outcome(Status.OK, 0)
    assert get(backend, "empty")[0] == Outcome(Status.OK, 0)
    assert backend.stat([key("empty")], deadline=soon()) == [Outcome(Status.OK, 0)]


def test_more_views_than_one_call_takes(backend: FileBackend) -> None:
    data = payload("many", 30_000)
    views = [memoryview(data)[at : at + 10] for at in range(0, len(data), 10)]
    assert len(views) > 2 * os.sysconf("SC_IOV_MAX")
    assert backend.put([Write(key("many"), views)], deadline=soon())[0].ok
    memory = memoryview(bytearray(len(data)))
    reads = [Read(key("many"), memory[at : at + 10], at) for at in range(0, len(data), 10)]
    assert all(outcome.nbytes == 10 for outcome in backend.get_into(reads, deadline=soon()))
    assert memory == data


def test_more_bytes_than_one_call_moves(backend: FileBackend) -> None:
    data = payload("large", 1000) * 40_000  # 40 MB: three calls
    assert backend.put([Write(key("large"), [memoryview(data)[:7], memoryview(data)[7:]])], deadline=soon())[0].ok
    memory = bytearray(len(data))
    view = memoryview(memory)
    reads = [Read(key("large"), view[:5]), Read(key("large"), view[5:], 5)]
    assert all(outcome.ok for outcome in backend.get_into(reads, deadline=soon()))
    assert memory == data


def test_put_of_what_is_there_writes_nothing(root: Path) -> None:
    calls = Script()
    with Opened(root, calls=calls) as opened:
        assert [outcome.status for outcome in put(opened, 1, 1, 2)] == [Status.OK, Status.EXISTS, Status.OK]
        calls.log.clear()
        assert put(opened, 1, 2) == [EXISTS, EXISTS]
        assert calls.count("open") == calls.count("pwritev") == 0


@pytest.mark.parametrize("fsync", ["off", "data", "full"])
@pytest.mark.parametrize("anonymous", [True, False], ids=["O_TMPFILE", "named"])
def test_the_fsync_policy(root: Path, fsync: str, anonymous: bool) -> None:
    calls = Script(anonymous=anonymous)
    with Opened(root, calls=calls, fsync=fsync) as opened:
        assert put(opened, 1)[0].ok
        assert is_intact(opened, 1)
    names = [name for name, _ in calls.log]
    published = names.index("link_anonymous" if anonymous else "link")
    before, after = names[:published], names[published:]
    assert before.count("fdatasync") == (fsync == "data")
    # The file, and the root for the folder that was made; then the folder with the new name.
    assert (before.count("fsync"), after.count("fsync")) == ((2, 1) if fsync == "full" else (0, 0))


# Deadlines.


def test_the_deadline_is_looked_at_between_calls(root: Path) -> None:
    """A transfer whose first call takes too long stops before the second."""
    calls = Script()
    with Opened(root, calls=calls) as opened:
        put(opened, "r", nbytes=1000)
        for name in ("preadv", "pwritev"):
            late = time.monotonic() + 0.05
            calls.fail(name, short=10)
            real = getattr(calls, name)

            def slow(fd: int, views: list[memoryview], offset: int, real: Any = real, late: float = late) -> int:
                done: int = real(fd, views, offset)
                threading.Event().wait(max(0.0, late - time.monotonic()) + 0.01)
                return done

            setattr(calls, name, slow)
            if name == "preadv":
                outcome = opened.get_into([Read(key("r"), memoryview(bytearray(1000)))], deadline=late)[0]
            else:
                outcome = opened.put([Write(key("w"), [memoryview(bytes(1000))])], deadline=late)[0]
            assert isinstance(outcome.error, TransientError), name
        assert len(files_in(root)) == 1
    assert opened.counters.get("read_retries", 0) == 0


# Listing and sweeping.


def test_foreign_files_are_left_alone(root: Path) -> None:
    root.mkdir()
    leaf = file_of(root, "ours").parent
    leaf.mkdir(parents=True)
    text = key("ours").hex()
    foreign = [
        root / "README", root / "abc" / "x", root / "zz" / "yy" / file_of(root, 1).name, root / ".kvstore" / "notes",
        leaf / ".nfs0000000012345678", leaf / "x.kv", leaf / f"{text}.tmp", leaf / f"{text.upper()}.kv",
        leaf / file_of(root, "elsewhere").name, leaf / ".hidden" / file_of(root, "ours").name,
        root / ".kvstore" / "quarantine" / "mine.kv",
    ]  # fmt: skip
    for path in foreign:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"foreign" * 1000)
    with Opened(root, nbytes=3000) as opened:
        for name in ("ours", 1, 2, 3, 4, 5, 6):
            assert put(opened, name)[0].ok
        assert sum(map(len, opened.list(deadline=soon()))) == 3
        for name in ("ours", 4, 5, 6):
            opened.quarantine([key(name)], deadline=soon())
        assert put(opened, 7, 8, 9)[2].ok
        assert opened.bytes_in_use(deadline=soon()) == 3000
    for path in foreign:
        assert path.read_bytes() == b"foreign" * 1000, path


def test_listing_in_pages(backend: FileBackend) -> None:
    names = range(2500)
    put(backend, *names, nbytes=3)
    pages = list(backend.list(deadline=soon()))
    assert [len(page) >= 1000 for page in pages] == [True, True, False]
    infos = [info for page in pages for info in page]
    assert {info.key for info in infos} == {key(name) for name in names}
    assert {info.nbytes for info in infos} == {3}
    assert all(abs(info.last_used - time.time()) < 100 for info in infos)


def test_listing_ends_at_its_deadline_and_at_close(backend: FileBackend) -> None:
    put(backend, *range(1500), nbytes=1)
    with pytest.raises(TransientError):
        list(backend.list(deadline=time.monotonic() - 1))
    pages = backend.list(deadline=NO_DEADLINE)
    next(pages)
    backend.close()
    with pytest.raises(ClosedError):
        next(pages)


def test_opening_walks_nothing(root: Path) -> None:
    """However many records there are: no cap and no crash, no scan."""
    with Opened(root) as opened:
        put(opened, *range(20))

    class Counting(Script):
        folders: list[str]

        def scandir(self, fd: int) -> Any:
            self.folders.append(os.readlink(f"/proc/self/fd/{fd}"))
            return super().scandir(fd)

    calls = Counting()
    calls.folders = []
    FileBackend(root, calls=calls).close()
    assert [Path(folder).name for folder in calls.folders if "writers" not in folder] == []


def test_temporary_files_are_judged_by_owner_and_age(root: Path) -> None:
    """Of dead processes of this host at once, of other hosts after an hour, of living ones not."""
    dead = subprocess.Popen(["true"])
    dead.wait()
    mine = new_temp_name()
    host = mine.split("-")[1]
    hour, day = time.time() - 4000, time.time() - 90_000
    leaf = file_of(root, 1).parent
    leaf.mkdir(parents=True)
    cases = {
        f".kv-{host}-{dead.pid}-{'0' * 16}.tmp": (None, False),
        f".kv-{host}-{os.getpid()}-{'1' * 16}.tmp": (hour, True),
        f".kv-{host}-{os.getpid()}-{'2' * 16}.tmp": (day, False),  # the process id was given again
        f".kv-{'f' * 16}-{dead.pid}-{'3' * 16}.tmp": (None, True),
        f".kv-{'f' * 16}-{os.getpid()}-{'4' * 16}.tmp": (hour, False),
        ".kv-foreign.tmp": (day, True),
    }
    for name, (when, _) in cases.items():
        (leaf / name).write_bytes(b"x" * 10)
        if when is not None:
            os.utime(leaf / name, (when, when))
    FileBackend(root).close()
    assert all((leaf / name).exists() for name in cases)  # nobody crashed: nothing is walked
    (root / ".kvstore/writers").mkdir()
    (root / ".kvstore/writers" / f"{host}-{dead.pid}-{'0' * 16}").touch()
    FileBackend(root).close()
    assert {name: (leaf / name).exists() for name in cases} == {name: stays for name, (_, stays) in cases.items()}
    assert not list((root / ".kvstore/writers").iterdir())


def test_the_marker_of_a_writer_goes_with_a_clean_end(root: Path) -> None:
    with Opened(root, calls=Script(anonymous=False)) as opened:
        put(opened, 1)
        assert len(list((root / ".kvstore/writers").iterdir())) == 1
    assert not list((root / ".kvstore/writers").iterdir())
    # … also for a process that forgets close().
    finish(start("b = FileBackend(sys.argv[1], calls=Script(anonymous=False)); assert put(b, 2)[0].ok", root))
    assert not list((root / ".kvstore/writers").iterdir())


# Lifetime.


def test_close_with_work_in_flight(root: Path) -> None:
    calls = Script()
    entered, proceed = threading.Event(), threading.Event()
    opened = FileBackend(root, calls=calls, nbytes=1 << 20)
    put(opened, 1)
    real = calls.preadv

    def slow(fd: int, views: list[memoryview], offset: int) -> int:
        entered.set()
        assert proceed.wait(10)
        return real(fd, views, offset)

    calls.replace("preadv", slow)
    results: list[bool] = []
    thread = threading.Thread(target=lambda: results.append(is_intact(opened, 1)))
    thread.start()
    assert entered.wait(10)
    opened.close()
    opened.close()
    with pytest.raises(ClosedError):
        opened.stat([key(1)], deadline=soon())
    proceed.set()
    thread.join(10)
    assert results == [True]


def test_a_forgotten_backend_gives_its_descriptors_back(root: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    opened: FileBackend | None = FileBackend(root, nbytes=1000)
    assert len(os.listdir("/proc/self/fd")) > before
    del opened
    import gc

    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("nbytes", [None, 10_000])
def test_fork(root: Path, nbytes: int | None) -> None:
    with Opened(root, nbytes=nbytes, calls=Script(anonymous=False)) as opened:
        put(opened, *range(5))

        def child() -> str:
            assert is_intact(opened, 3)
            for name in range(5, 25):
                assert put(opened, name)[0].ok
            opened.close()
            return f"{os.getpid()}"

        result = run_in_child(child, limit_s=20)
        assert result.ok, result.text
        assert result.text != f"{os.getpid()}"
        for name in range(25, 30):
            assert put(opened, name)[0].ok
            assert is_intact(opened, name)
        if nbytes:
            assert sum(path.stat().st_size for path in files_in(root)) == nbytes
            assert opened.bytes_in_use(deadline=soon()) == nbytes
        else:
            assert present(opened, range(30)) == list(range(30))


def test_a_forked_child_does_not_share_the_parents_lock(root: Path) -> None:
    """The parent holds the usage counter: the child waits as any other process does, and not past its deadline."""
    with Opened(root, nbytes=10_000) as opened:
        put(opened, 1)
        capacity = opened._held.capacity
        assert capacity is not None
        capacity._usage.acquire(soon())
        try:

            def child() -> str:
                assert is_intact(opened, 1)
                write = Write(key(2), [memoryview(b"x")])
                return type(opened.put([write], deadline=soon(0.1))[0].error).__name__

            result = run_in_child(child, limit_s=20)
            assert result.text == "LocalWait"
        finally:
            capacity._usage.release()


# Time stamps of use.


def test_stamps_keep_heads_newer_than_tails() -> None:
    start_ns = 1_000 * TOUCH_NS
    old = start_ns - 10 * TOUCH_NS
    first = [read_stamp(old, start_ns + 5, position) for position in range(3)]
    second = [read_stamp(old, start_ns + 7_000_000, position) for position in range(3)]  # the next chunks, 7 ms later
    later = [read_stamp(old, start_ns + TOUCH_NS + 9, position) for position in range(3)]
    assert first + second == sorted(first + second, reverse=True)
    assert min(later) > max(first)
    assert max(first) <= start_ns
    assert read_stamp(first[0], start_ns + 10**9, 0) == 0  # once per interval
    assert read_stamp(first[2], start_ns + TOUCH_NS, 0) > 0
    assert math.isclose(first[0], start_ns, abs_tol=TOUCH_NS)
