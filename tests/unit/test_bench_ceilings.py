"""The ceilings: they move every byte, leave nothing behind, and know nothing of kvstore."""

from __future__ import annotations

import ast
import errno
import os
import threading
import time
from pathlib import Path

import pytest

from kvstore_bench import ceilings
from kvstore_bench.ceilings import Lanes, Memcpy, PythonLoop, ReadFiles, WriteFiles, split


def views(count: int, nbytes: int, *, fill: int | None = None) -> list[memoryview]:
    return [memoryview(bytearray([index + 1 if fill is None else fill]) * nbytes) for index in range(count)]


def test_it_imports_nothing_of_kvstore() -> None:
    tree = ast.parse(Path(ceilings.__file__).read_text(encoding="utf-8"))
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "." for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert not any(node.level for node in ast.walk(tree) if isinstance(node, ast.ImportFrom))
    assert not [name for name in names if name.startswith("kvstore")]


@pytest.mark.parametrize(("count", "parts"), [(1, 1), (1, 8), (7, 3), (8, 4), (64, 5), (3, 1)])
def test_split_covers_everything_once(count: int, parts: int) -> None:
    pieces = split(count, parts)
    assert [index for piece in pieces for index in piece] == list(range(count))
    assert len(pieces) == min(count, parts)
    lengths = [len(piece) for piece in pieces]
    assert max(lengths) - min(lengths) <= 1
    assert min(lengths) >= 1


def test_lanes_run_at_the_same_time_and_count_each_call() -> None:
    meet = threading.Barrier(3, timeout=10)
    seen: list[int] = []

    def job(number: int) -> None:
        meet.wait()  # comes back only if all three lanes are inside a job together
        seen.append(number)

    with Lanes(4) as pool:
        done = pool.run([lambda number=number: job(number) for number in range(3)], rounds=5)  # type: ignore[misc]
    assert sorted(seen) == sorted(list(range(3)) * 5)
    assert len(done.calls) == 15
    assert 0 < done.seconds <= sum(done.calls) + 1
    assert done.seconds >= max(done.calls)


def test_what_a_job_raises_arrives_after_all_have_ended() -> None:
    ended = []

    def bad() -> None:
        raise OSError("no")

    with Lanes(2) as pool:
        with pytest.raises(OSError, match="no"):
            pool.run([bad, lambda: ended.append(1)])
        assert ended == [1]
        assert pool.run([lambda: None]).calls  # and the lanes still work


def test_lanes_refuse_more_jobs_than_threads() -> None:
    with Lanes(1) as pool, pytest.raises(ValueError, match="2 jobs"):
        pool.run([lambda: None, lambda: None])


@pytest.mark.parametrize("lanes", [1, 2, 5])
def test_memcpy_copies_every_byte(lanes: int) -> None:
    sources, destinations = views(5, 4097), views(5, 4097, fill=0)
    side = Memcpy(sources, destinations)
    for job in side.jobs(lanes):
        job()
    assert destinations == sources
    assert side.settle(3) == 3 * 5 * 4097


@pytest.mark.parametrize("lanes", [1, 3])
def test_raw_reads_fill_the_destinations_and_leave_no_file(tmp_path: Path, lanes: int) -> None:
    sources, destinations = views(4, 10_000), views(4, 10_000, fill=0)
    side = ReadFiles(tmp_path, sources, destinations)
    assert len(list(tmp_path.iterdir())) == 4
    for job in side.jobs(lanes):
        job()
    assert destinations == sources
    assert side.settle(2) == 2 * 4 * 10_000
    side.close()
    side.close()
    assert not list(tmp_path.iterdir())


def test_raw_reads_of_given_files_read_from_their_offsets_and_leave_them(tmp_path: Path) -> None:
    sources, destinations = views(3, 5000), views(3, 5000, fill=0)
    files = [(tmp_path / f"record-{index}", 100 * index) for index in range(3)]
    for (path, offset), source in zip(files, sources, strict=True):
        path.write_bytes(bytes(offset) + bytes(source))
    side = ReadFiles(tmp_path, sources, destinations, files)
    for job in side.jobs(2):
        job()
    side.close()
    assert destinations == sources
    assert len(list(tmp_path.iterdir())) == 3


def test_raw_reads_notice_a_file_that_ends_early(tmp_path: Path) -> None:
    side = ReadFiles(tmp_path, views(1, 100), views(1, 100, fill=0))
    with open(next(tmp_path.iterdir()), "r+b") as file:
        file.truncate(60)
    with pytest.raises(OSError, match="60 of 100"):
        side.jobs(1)[0]()
    side.close()


def test_raw_reads_clean_up_when_the_files_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "read-2").write_bytes(b"in the way")
    with pytest.raises(FileExistsError):
        ReadFiles(tmp_path, views(4, 10), views(4, 10))
    assert [path.name for path in tmp_path.iterdir()] == ["read-2"]


@pytest.mark.parametrize("allocate", [False, True])
def test_raw_writes_publish_by_rename_and_are_removed(tmp_path: Path, allocate: bool) -> None:
    sources = views(3, 5000)
    side = WriteFiles(tmp_path, sources, allocate=allocate)
    for expected in (1, 2):
        for job in side.jobs(2):
            job()
        written = sorted(tmp_path.iterdir())
        assert [path.name for path in written] == [f"write-{expected}-{index}" for index in range(3)]
        assert [path.read_bytes() for path in written] == [bytes(source) for source in sources]
        assert side.settle(1) == 15_000
        assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("slow", [True, False])
def test_raw_writes_reserve_blocks_only_where_it_pays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slow: bool
) -> None:
    clock, calls = [0.0], []

    def reserve(fd: int, offset: int, nbytes: int) -> None:
        calls.append(nbytes)
        clock[0] += 1.0 if slow else -0.1

    real = ceilings._write

    def write(fd: int, source: memoryview) -> None:
        clock[0] += 0.5
        real(fd, source)

    monkeypatch.setattr(os, "posix_fallocate", reserve)
    monkeypatch.setattr(ceilings, "_write", write)
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    side = WriteFiles(tmp_path, views(2, 10))
    assert calls == [10] * 6  # three trials of two files
    assert side.allocate is not slow
    assert not list(tmp_path.iterdir())


def test_raw_writes_do_without_where_blocks_cannot_be_reserved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "no")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    assert WriteFiles(tmp_path, views(2, 10)).allocate is False
    assert not list(tmp_path.iterdir())


def test_raw_writes_remove_temporary_files_of_a_broken_pass(tmp_path: Path) -> None:
    side = WriteFiles(tmp_path, views(2, 10), allocate=False)
    side.jobs(1)
    (tmp_path / "write-1-0.tmp").write_bytes(b"half")
    side.close()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("op", ["get", "put"])
def test_the_python_loop_moves_tiny_records(op: str) -> None:
    keys = [bytes([index]) * 32 for index in range(4)]
    sources, destinations = views(4, 16), views(4, 16, fill=0)
    side = PythonLoop(op, keys, sources, destinations)
    for job in side.jobs(1):
        job()
    if op == "get":
        assert destinations == sources
    assert side.settle(2) == 2 * 4 * 16
