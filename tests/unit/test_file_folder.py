"""Which folder the `file` backend works on: one folder is one backend, never `/`; what is said of one that cannot be
written, or that holds too much."""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path
from typing import Any

import pytest

import kvstore
from kvstore.backend import MISS
from kvstore.errors import ConfigError
from kvstore.registry import open_backend
from kvstore.wrappers import wrap
from kvstore_backends.file import FileBackend
from kvstore_backends.file.oscalls import OsCalls
from tests.faults.file_support import Opened, Script, disk_usage, get, payload, present, put

OPTIONS: dict[str, Any] = {"buffer_pool_bytes": 1 << 20}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "kv"


def warnings_of(caplog: pytest.LogCaptureFixture, text: str) -> list[str]:
    return [r.message for r in caplog.records if text in r.message and r.levelno == logging.WARNING]


# One folder, one backend.


@pytest.mark.parametrize("link", ["itself", "above"])
@pytest.mark.parametrize("named", ["", "?name=other"])
def test_a_store_refuses_one_folder_under_two_names(tmp_path: Path, root: Path, link: str, named: str) -> None:
    root.mkdir()
    (tmp_path / "link").symlink_to(root if link == "itself" else tmp_path)
    second = f"file://{tmp_path}/link{'' if link == 'itself' else '/kv'}{named}"
    with pytest.raises(ConfigError) as caught:
        kvstore.open_store([f"file://{root}", second], replicas=2, **OPTIONS)
    assert f"the backends file://{root} and {'other' if named else second} are one and the same" in str(caught.value)
    with kvstore.open_store([f"file://{root}", f"file://{root}-2{named}"], replicas=2, **OPTIONS) as store:
        store.put_many({"a": b"b"})
    assert len(list(root.rglob("*.kv"))) == len(list(tmp_path.glob("kv-2/**/*.kv"))) == 1


def test_backends_opened_by_hand_are_compared_inside_their_wrappers(tmp_path: Path, root: Path) -> None:
    root.mkdir()
    (tmp_path / "link").symlink_to(root)
    one, other = FileBackend(root), FileBackend(tmp_path / "link")
    assert one.identity == other.identity is not None
    backends = [wrap(backend, {}, metrics=kvstore.metrics.Metrics()) for backend in (one, other)]
    with pytest.raises(ConfigError, match="one and the same place"):
        kvstore.Store(kvstore.load_config("memory://", **OPTIONS), backends=backends)
    with Opened(tmp_path / "else") as third:
        assert third.identity != one.identity


@pytest.mark.parametrize("path", ["/", "//", "/./", "/%2e"])
def test_the_root_of_the_machine_is_refused(path: str) -> None:
    before = os.path.lexists("/.kvstore")
    with pytest.raises(ConfigError, match=r"/ is the root of the file system; name a folder of its own"):
        open_backend(f"file://{path}")
    assert os.path.lexists("/.kvstore") == before


def test_a_link_to_the_root_of_the_machine_is_refused(tmp_path: Path) -> None:
    before = os.path.lexists("/.kvstore")
    (tmp_path / "link").symlink_to("/")
    with pytest.raises(ConfigError, match=r"link is the root of the file system"):
        open_backend(f"file://{tmp_path}/link")
    assert os.path.lexists("/.kvstore") == before


# Folders that cannot be written.


@pytest.mark.parametrize("nbytes", [None, 100_000])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES])
def test_the_first_put_that_cannot_be_written_is_said_once(
    root: Path, number: int, nbytes: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    calls = Script()
    for instance in range(2):
        with Opened(root, calls=calls, nbytes=nbytes) as opened:
            calls.fail("pwritev", number, times=None)
            caplog.clear()
            for batch in (("a", "b"), ("c",)):
                assert all(outcome.error is not None for outcome in put(opened, *batch))
            assert warnings_of(caplog, "") == [
                f"{opened.name}: storing in {root} fails: {os.strerror(number)} [{errno.errorcode[number]}]; "
                "this is said once, further puts may fail as well"
            ]
            calls.rules.clear()
            assert put(opened, f"well {instance}")[0].ok


def test_trouble_of_another_kind_is_not_called_a_full_folder(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    calls = Script()
    with Opened(root, calls=calls) as opened:
        put(opened, "a")
        calls.fail("pwritev", errno.EIO)
        assert put(opened, "b")[0].error is not None
        calls.fail("open_beneath", errno.EACCES)
        assert get(opened, "a")[0].error is not None  # reading, not storing
    assert warnings_of(caplog, "storing in") == []


def test_a_capped_folder_whose_records_cannot_be_removed_is_said(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    calls = Script()
    with Opened(root, calls=calls, nbytes=1000) as opened:
        assert put(opened, "a")[0].ok
        for name in ("unlink", "rename", "rename_noreplace"):
            calls.fail(name, errno.EROFS, times=None)
        for _ in range(2):
            assert put(opened, "b")[0].error is not None
    assert len(warnings_of(caplog, f"storing in {root} fails: Read-only file system [EROFS]")) == 1


def test_a_read_only_folder_is_said_at_open(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Opened(root) as opened:
        put(opened, "a")
    assert caplog.records == []
    calls = Script()
    calls.replace("may_write", lambda _: False)
    with Opened(root, calls=calls) as opened:
        assert get(opened, "a")[1] == payload("a", 1000)
    assert warnings_of(caplog, "") == [
        f"{opened.name}: the folder {root} is read-only for this process: it reads records and stores none"
    ]


def test_whether_a_folder_may_be_written_is_asked_for_the_effective_user(tmp_path: Path) -> None:
    folder = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        assert OsCalls().may_write(folder)
        os.chmod(tmp_path, 0o555)
        if os.geteuid() == 0:  # whom no mode hinders
            os.seteuid(65534)
            try:
                assert not OsCalls().may_write(folder)
            finally:
                os.seteuid(0)
        else:
            assert not OsCalls().may_write(folder)
    finally:
        os.chmod(tmp_path, 0o755)
        os.close(folder)


# More than the cap.


def test_an_open_that_finds_more_than_its_cap_says_both_numbers(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Opened(root) as uncapped:
        put(uncapped, *range(10))
    with Opened(root, nbytes=3500) as capped:
        assert len(present(capped, range(10))) == 3
        put(capped, *range(20, 25))
    assert disk_usage(root) <= 3500
    found = warnings_of(caplog, "")
    assert len(found) == 1
    assert "held 10000 bytes, more than its capacity of 3500 bytes; records were evicted" in found[0]
    caplog.clear()
    with Opened(root, nbytes=3500) as again:
        assert get(again, "nothing")[0] == MISS
    assert caplog.records == []


def test_the_manual_says_that_every_process_needs_the_cap() -> None:
    doc = next(option.doc for option in FileBackend.options if option.name == "bytes")
    assert "Every process on the folder must give the same cap" in doc
