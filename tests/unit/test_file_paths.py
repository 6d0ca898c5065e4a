"""The `file` backend: nothing outside its root, only regular files, quarantine, publishing without links."""

from __future__ import annotations

import errno
import os
import resource
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvstore.backend import EXISTS, MISS, OK, Read, Status
from kvstore.errors import PermanentError
from kvstore_backends.file import FileBackend
from tests.faults.file_support import (
    Opened,
    Script,
    file_of,
    files_in,
    get,
    is_intact,
    key,
    payload,
    present,
    put,
    soon,
)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "kv"


@pytest.fixture
def backend(root: Path) -> Iterator[FileBackend]:
    opened = FileBackend(root)
    yield opened
    opened.close()


# Paths.


@pytest.mark.parametrize("openat2", [True, False], ids=["openat2", "walk"])
def test_links_do_not_lead_out(tmp_path: Path, root: Path, openat2: bool) -> None:
    outside = tmp_path / "outside"
    with Opened(root, calls=Script(openat2=openat2)) as opened:
        for number, depth in enumerate(("folder", "file")):
            name = f"victim-{number}"
            inside = file_of(root, name)
            mirror = file_of(outside / depth, name)
            mirror.parent.mkdir(parents=True)
            mirror.write_bytes(b"secret")
            at = {"folder": inside.parent, "file": inside}[depth]
            to = {"folder": mirror.parent, "file": mirror}[depth]
            at.parent.mkdir(parents=True, exist_ok=True)
            at.symlink_to(to)
            assert opened.stat([key(name)], deadline=soon()) == [MISS]
            assert get(opened, name)[0] == MISS
            outcome = put(opened, name)[0]
            assert isinstance(outcome.error, PermanentError), depth
            assert "put there by somebody else" in str(outcome.error)
            assert opened.delete([key(name)], deadline=soon()) == [MISS]
            assert opened.quarantine([key(name)], deadline=soon()) == [MISS]
            assert mirror.read_bytes() == b"secret"
            assert at.is_symlink()
            assert not any(path.suffix != ".kv" for path in files_in(outside))
        assert list(opened.list(deadline=soon())) == []


@pytest.mark.parametrize("openat2", [True, False], ids=["openat2", "walk"])
def test_only_regular_files_are_records(root: Path, openat2: bool) -> None:
    """A FIFO must not hang the reader; a folder, a socket and a hard link's neighbour are left alone."""
    with Opened(root, calls=Script(openat2=openat2)) as opened:
        for name in ("fifo", "folder", "socket"):
            file_of(root, name).parent.mkdir(parents=True, exist_ok=True)
        os.mkfifo(file_of(root, "fifo"))
        file_of(root, "folder").mkdir()
        server = socket.socket(socket.AF_UNIX)
        here = os.open(file_of(root, "socket").parent, os.O_RDONLY)
        try:
            server.bind(f"/proc/self/fd/{here}/{file_of(root, 'socket').name}")
        finally:
            os.close(here)
            server.close()
        for name in ("fifo", "folder", "socket"):
            assert opened.stat([key(name)], deadline=soon()) == [MISS], name
            assert get(opened, name)[0] == MISS, name
            assert isinstance(put(opened, name)[0].error, PermanentError), name
            assert opened.delete([key(name)], deadline=soon()) == [MISS], name
            assert file_of(root, name).exists()
        assert list(opened.list(deadline=soon())) == []


def test_a_file_where_a_folder_should_be(backend: FileBackend, root: Path) -> None:
    folder = file_of(root, 1).parent
    folder.write_text("mine")
    assert backend.stat([key(1)], deadline=soon()) == [MISS]
    assert get(backend, 1)[0] == MISS
    assert isinstance(put(backend, 1)[0].error, PermanentError)
    assert folder.read_text() == "mine"


def test_both_ways_of_opening_agree(root: Path) -> None:
    """The fast path (openat2) and the slow one (step by step) on the same folder."""
    names = range(30)
    with Opened(root) as fast, Opened(root, calls=Script(openat2=False)) as slow:
        put(fast, *names[::2])
        put(slow, *names[1::3])
        assert present(fast, names) == present(slow, names)
        for name in names:
            assert get(fast, name) == get(slow, name)
        assert sorted(map(str, fast.list(deadline=soon()))) == sorted(map(str, slow.list(deadline=soon())))


def test_descriptors_stay_few(root: Path) -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(os.listdir("/proc/self/fd"))
    with Opened(root) as opened:
        names = range(500)
        put(opened, *names)
        before = os.listdir("/proc/self/fd")
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(128, used + 16), hard[1]))
        try:
            reads = [Read(key(name), memoryview(bytearray(1000))) for name in names]
            assert all(outcome.nbytes == 1000 for outcome in opened.get_into(reads, deadline=soon()))
            assert present(opened, names) == list(names)
            pages = list(opened.list(deadline=soon()))
            assert opened.get_into(
                [Read(key(-name - 1), memoryview(bytearray(1))) for name in names], deadline=soon()
            ) == ([MISS] * 500)
            assert opened.delete([key(name) for name in names], deadline=soon()) == [OK] * 500
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, hard)
        assert sum(map(len, pages)) == 500
        assert len(os.listdir("/proc/self/fd")) == len(before)


# Quarantine.


def test_quarantine_keeps_the_bytes_within_bounds(root: Path) -> None:
    aside = root / ".kvstore/quarantine"
    with Opened(root, quarantine=5000) as opened:
        for name in range(10):
            put(opened, name)
            assert opened.quarantine([key(name)], deadline=soon()) == [OK]
            assert get(opened, name)[0] == MISS
        kept = sorted(aside.iterdir())
        assert [path.read_bytes() for path in kept] == [payload(name, 1000) for name in range(5, 10)]
        assert put(opened, 9)[0].ok  # the name is free
        assert sum(map(len, opened.list(deadline=soon()))) == 1
        put(opened, "large", nbytes=9000)
        opened.quarantine([key("large")], deadline=soon())
        assert [path.stat().st_size for path in aside.iterdir()] == [9000]  # the newest stays whatever its size
    with Opened(root, quarantine=0) as opened:
        put(opened, "x")
        assert opened.quarantine([key("x"), key("none")], deadline=soon()) == [OK, MISS]
        assert len(list(aside.iterdir())) == 1


def test_quarantine_does_not_follow_links(tmp_path: Path, root: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    with Opened(root) as opened:
        (root / ".kvstore/quarantine").symlink_to(outside)
        put(opened, 1)
        assert opened.quarantine([key(1)], deadline=soon()) == [OK]  # unlinked: there is no place to keep it
        assert get(opened, 1)[0] == MISS
    assert not list(outside.iterdir())


@pytest.mark.parametrize("refused", [(), ("link",), ("link", "rename_noreplace")], ids=["link", "renameat2", "rename"])
def test_quarantine_puts_back_what_was_stored_in_between(root: Path, refused: Sequence[str]) -> None:
    """Another process heals the record between our look at the name and the rename."""
    calls = Script()
    with Opened(root, calls=calls) as opened:
        put(opened, 1)
        real = calls.rename
        for name in refused:
            calls.fail(name, errno.EPERM if name == "link" else errno.EINVAL, times=None)

        def heal(*args: Any, **kwargs: Any) -> None:
            fresh = root / "fresh"
            fresh.write_bytes(b"healed")
            fresh.replace(file_of(root, 1))
            calls.replace("rename", real)
            real(*args, **kwargs)

        calls.replace("rename", heal)
        opened.quarantine([key(1)], deadline=soon())
        assert file_of(root, 1).read_bytes() == b"healed"
        assert not list((root / ".kvstore/quarantine").iterdir())


# Publishing where link() is not what it should be.


@pytest.mark.parametrize("number", [errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK])
@pytest.mark.parametrize("noreplace", [True, False], ids=["renameat2", "rename"])
def test_file_systems_without_links(root: Path, number: int, noreplace: bool) -> None:
    calls = Script(anonymous=False)
    calls.fail("link", number, times=None)
    if not noreplace:
        calls.fail("rename_noreplace", errno.EINVAL, times=None)
    with Opened(root, calls=calls) as opened, Opened(root) as other:
        assert put(opened, 1)[0].ok
        assert is_intact(opened, 1)
        assert put(opened, 1) == [EXISTS]
        real = calls.stat  # the other one comes between our look and our publication

        def late(*args: Any, **kwargs: Any) -> os.stat_result:
            calls.replace("stat", real)
            try:
                return real(*args, **kwargs)
            finally:
                assert put(other, 2)[0].ok

        calls.replace("stat", late)
        assert put(opened, 2) == [EXISTS]
        assert is_intact(opened, 2)
    assert files_in(root) == sorted([file_of(root, 1), file_of(root, 2)])


def test_files_without_a_name_that_cannot_be_linked(root: Path) -> None:
    calls = Script()
    calls.fail("link_anonymous", errno.EPERM, times=None)
    with Opened(root, calls=calls) as opened:
        assert [outcome.status for outcome in put(opened, 1, 2)] == [Status.OK] * 2
        assert calls.count("link_anonymous") == 1
        assert is_intact(opened, 1)
    assert len(files_in(root)) == 2
