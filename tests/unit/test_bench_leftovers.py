"""The file that lists what a run holds: written before records are put, swept only if its run is gone and ours."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore_bench.leftovers import Journal, sweep
from kvstore_bench.targets import BackendTarget


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@pytest.fixture
def target(tmp_path: Path) -> Iterator[BackendTarget]:
    from kvstore.registry import parse_url

    (tmp_path / "kv").mkdir()
    made = BackendTarget(parse_url(f"file://{tmp_path / 'kv'}"))
    yield made
    made.close()


def put(target: BackendTarget, prefix: str) -> None:
    keys = [target.key(f"{prefix}/{index}") for index in range(3)]
    outcomes = target.writer(keys, [memoryview(bytearray(b"x" * 100))] * 3)(time.monotonic() + 10)
    assert all(outcome.ok for outcome in outcomes)


def left_by_a_dead_run(folder: Path, **facts: object) -> Path:
    path = folder / "kvstore-bench-run-dead.json"
    path.write_text(json.dumps({"run": "dead", "folders": [], "live": {}, **facts}), encoding="utf-8")
    return path


def records(tmp_path: Path) -> int:
    return len(list((tmp_path / "kv").rglob("*.kv")))


def test_a_living_run_is_left_alone(temporary: Path, target: BackendTarget, tmp_path: Path) -> None:
    with Journal("alive") as journal, journal.row(target, 3):
        journal.batch("some/names")
        put(target, "some/names")
        assert sweep([(target, None)]) == []
        assert records(tmp_path) == 3
        said = json.loads(Path(journal.path).read_text(encoding="utf-8"))
        assert said["live"] == {"url": target.url, "kind": "backend", "count": 3, "prefix": "some/names"}
        journal.batch("s")  # shorter than what is there
        assert json.loads(Path(journal.path).read_text(encoding="utf-8"))["live"]["prefix"] == "s"
    assert not list(temporary.iterdir())


def test_only_its_own_records_are_removed(temporary: Path, target: BackendTarget, tmp_path: Path) -> None:
    put(target, "dead/names")
    put(target, "precious")
    live = {"url": target.url, "kind": "backend", "count": 3, "prefix": "dead/names"}
    left_by_a_dead_run(temporary, live=live)
    assert sweep([(target, None)]) == [f"removed 3 records that a killed run had left in {target.url}"]
    assert records(tmp_path) == 3
    assert not list(temporary.iterdir())


def test_only_folders_of_the_bench_are_removed(temporary: Path, tmp_path: Path) -> None:
    ours, foreign, link = tmp_path / "kvstore-bench-abc", tmp_path / "home", tmp_path / "kvstore-bench-link"
    ours.mkdir()
    foreign.mkdir()
    link.symlink_to(foreign)
    (foreign / "file").write_text("precious", encoding="utf-8")
    left_by_a_dead_run(temporary, folders=[str(ours), str(foreign), str(link)])
    sweep([])
    assert not ours.exists()
    assert (foreign / "file").exists()


@pytest.mark.parametrize("how", ["another's", "a link"])
def test_files_that_are_not_of_this_user_count_nothing(
    temporary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    ours = tmp_path / "kvstore-bench-abc"
    ours.mkdir()
    path = left_by_a_dead_run(temporary, folders=[str(ours)])
    if how == "a link":
        path.rename(tmp_path / "elsewhere.json")
        path.symlink_to(tmp_path / "elsewhere.json")
    else:
        uid = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: uid + 1)
    assert sweep([]) == []
    assert ours.exists()
    assert path.exists()


def test_what_makes_no_sense_goes_when_it_is_old(temporary: Path) -> None:
    young, old = temporary / "kvstore-bench-run-1.json", temporary / "kvstore-bench-run-2.json"
    young.touch()
    old.write_text("{", encoding="utf-8")
    os.utime(old, (1, 1))
    assert sweep([]) == []
    assert list(temporary.iterdir()) == [young]


def test_memory_and_folders_that_are_gone_hold_nothing(temporary: Path, tmp_path: Path) -> None:
    for url in ("memory://", f"file://{tmp_path}/gone?lanes=2"):
        left_by_a_dead_run(temporary, live={"url": url, "kind": "backend", "count": 3, "prefix": "x"})
        assert sweep([]) == []
        assert not list(temporary.iterdir())


def test_without_a_temporary_folder_there_is_no_file(monkeypatch: pytest.MonkeyPatch, target: BackendTarget) -> None:
    def nowhere() -> str:
        raise FileNotFoundError("no usable temporary directory")

    monkeypatch.setattr(tempfile, "gettempdir", nowhere)
    with Journal("x") as journal, journal.row(target, 1):
        journal.batch("x")
        assert journal.path == ""
    assert sweep([]) == []
