"""`kvstore-bench io` against a scripted backend: what it counts, verifies, compares and cleans up."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import kvstore.registry
from kvstore.backend import EXISTS, MISS, OK, Backend, Limits, Outcome, Read, Status, Write
from kvstore.errors import ConfigError, TransientError
from kvstore.keys import Key, opaque_key
from kvstore.registry import BackendURL
from kvstore_bench import cli, io, measure
from kvstore_bench.ceilings import Job, Pass
from kvstore_bench.io import plan_run, run_io
from kvstore_bench.measure import GetSide, PutSide, lane_counts, percentile
from kvstore_bench.targets import BackendTarget
from kvstore_bench.workload import Region, Workload

KIB, MIB = 1 << 10, 1 << 20


class Double(Backend):
    """A dict, with hooks: `on_get` and `on_put` see each item and may answer instead."""

    def __init__(self, *, lanes: int = 4, max_value_bytes: int = 1 << 30) -> None:
        self.name = "double"
        self.limits = Limits(lanes=lanes, max_value_bytes=max_value_bytes)
        self.records: dict[Key, bytes] = {}
        self.ever: list[Key] = []
        self.threads: set[int] = set()
        self.calls: list[int] = []  # items per get call
        self.closed = 0
        self.on_get: Callable[[Read], Outcome | None] = lambda read: None
        self.on_put: Callable[[Write], Outcome | None] = lambda write: None
        self.lock = threading.Lock()

    def stat(self, keys: Sequence[Key], *, deadline: float) -> list[Outcome]:
        return [Outcome(Status.OK, len(self.records[key])) if key in self.records else MISS for key in keys]

    def get_into(self, reads: Sequence[Read], *, deadline: float) -> list[Outcome]:
        assert deadline > time.monotonic()
        self.threads.add(threading.get_ident())
        self.calls.append(len(reads))
        return [self._get(read) for read in reads]

    def _get(self, read: Read) -> Outcome:
        answer = self.on_get(read)
        if answer is not None:
            return answer
        if read.key not in self.records:
            return MISS
        read.dst[:] = self.records[read.key]
        return Outcome(Status.OK, len(read.dst))

    def put(self, writes: Sequence[Write], *, deadline: float) -> list[Outcome]:
        return [self._put(write) for write in writes]

    def _put(self, write: Write) -> Outcome:
        answer = self.on_put(write)
        if answer is not None:
            return answer
        with self.lock:
            self.ever.append(write.key)
            if write.key in self.records:
                return EXISTS
            self.records[write.key] = b"".join(write.src)
        return Outcome(Status.OK, write.nbytes)

    def delete(self, keys: Sequence[Key], *, deadline: float) -> list[Outcome]:
        return [OK if self.records.pop(key, None) is not None else MISS for key in keys]

    def quarantine(self, keys: Sequence[Key], *, deadline: float) -> list[Outcome]:
        return [MISS] * len(keys)

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def double(monkeypatch: pytest.MonkeyPatch) -> Iterator[Double]:
    backend = Double()
    monkeypatch.setattr(kvstore.registry, "open_backend", lambda url, /, **_: backend)
    monkeypatch.setattr(kvstore.registry, "backend_class", lambda scheme: Double)
    yield backend
    assert not backend.records, "the benchmark left records behind"


def quick(**options: Any) -> dict[str, Any]:
    return {"sizes": [4 * KIB], "batch": 4, "repeats": 2, "lanes": 2, "quick": True, **options}


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes as short as they get: the tests look at counts, not at speeds."""
    plan = plan_run

    def shortened(**options: Any) -> io.Plan:
        import dataclasses

        return dataclasses.replace(plan(**options), pass_s=1e-4, budget_s=0.5)

    monkeypatch.setattr(io, "plan_run", shortened)


# Planning.


def test_default_sizes_and_batches_keep_to_the_memory_limit() -> None:
    plan = plan_run()
    assert plan.sizes == (64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB)
    assert plan.batches == (64, 64, 64, 32, 8, 4)
    assert plan.ops == ("put", "get")
    assert 4 * plan.region_bytes <= plan.memory_bytes == 1 << 30
    assert 16 * MIB in plan_run(quick=True).sizes


def test_a_batch_that_does_not_fit_shrinks() -> None:
    assert plan_run(sizes=[16 * MIB], batch=1000, memory_bytes=256 * MIB).batches == (4,)
    assert plan_run(sizes=[64 * KIB], batch=3).batches == (3,)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"sizes": [0]}, "--sizes"),
        ({"sizes": []}, "--sizes"),
        ({"ops": ["get", "copy"]}, "'copy' is not known; known operations: put, get"),
        ({"ops": []}, "--ops"),
        ({"batch": 0}, "--batch must be at least 1"),
        ({"lanes": -1}, "--lanes must be at least 1"),
        ({"lanes": 1000}, "--lanes must be at most 64"),
        ({"repeats": 0}, "--repeats must be at least 1"),
        ({"sizes": [1 << 30]}, "1GiB need 4GiB of memory, and --memory allows 1GiB"),
    ],
)
def test_senseless_requests_are_refused_in_a_sentence(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        plan_run(**options)


@pytest.mark.parametrize(("most", "counts"), [(1, [1]), (2, [1, 2]), (4, [1, 2, 4]), (6, [1, 2, 4, 6]), (0, [1])])
def test_lane_counts(most: int, counts: list[int]) -> None:
    assert lane_counts(most) == counts


def test_percentiles_are_nearest_rank() -> None:
    values = [float(value) for value in range(1, 101)]
    assert (percentile(values, 0.5), percentile(values, 0.99), percentile([7.0], 0.99)) == (50.0, 99.0, 7.0)
    assert percentile([], 0.5) == 0.0


# Runs.


def test_a_sound_backend_passes_and_nothing_of_anothers_is_touched(double: Double) -> None:
    foreign = opaque_key("somebody else's")
    double.records[foreign] = b"precious"
    report = run_io(["memory://"], **quick(sizes=[4 * KIB, 5000]))
    assert double.records.pop(foreign) == b"precious"
    assert report.ok
    assert [(row.op, row.size_bytes) for row in report.rows] == [
        ("put", 4096), ("get", 4096), ("put", 5000), ("get", 5000),
    ]  # fmt: skip
    assert set(report.figures) == {
        f"io.memory.{op}.{size}.ratio" for op in ("put", "get") for size in ("4KiB", "5000B")
    }
    for row in report.rows:
        assert row.ceiling.name == "memcpy"
        assert row.batch == 4
        assert row.lanes == 2
        assert row.gbytes_per_s > 0
        assert row.seconds > 0
        assert 0 < row.p50_ms <= row.p99_ms
        assert row.ratio > 0 < row.ceiling.gbytes_per_s
        assert row.cpu_s_per_gib >= 0
    assert len(set(double.ever)) == len(double.ever)
    assert double.closed == 1
    assert {2, 4} >= set(double.calls)
    assert threading.get_ident() not in double.threads


def test_ops_can_be_chosen(double: Double) -> None:
    assert [row.op for row in run_io(["memory://"], ops=["get"], **quick()).rows] == ["get"]
    assert [row.op for row in run_io(["memory://"], ops=["put"], **quick()).rows] == ["put"]


def flipped(double: Double, read: Read) -> Outcome:
    data = bytearray(double.records[read.key])
    data[len(data) // 2] ^= 4
    read.dst[:] = data
    return Outcome(Status.OK, len(read.dst))


def untouched(double: Double, read: Read) -> Outcome:
    return Outcome(Status.OK, len(read.dst))


def another(double: Double, read: Read) -> Outcome:
    read.dst[:] = next(data for key, data in double.records.items() if key != read.key)
    return Outcome(Status.OK, len(read.dst))


@pytest.mark.parametrize("lie", [flipped, untouched, another])
@pytest.mark.parametrize("op", ["get", "put"])
def test_wrong_bytes_called_ok_are_not_verified(
    double: Double, lie: Callable[[Double, Read], Outcome], op: str
) -> None:
    double.on_get = lambda read: lie(double, read)
    report = run_io(["memory://"], ops=[op], **quick())
    assert not report.ok
    assert [row.verified for row in report.rows] == [False]
    assert any("other bytes" in note for note in report.notes)
    assert not report.figures  # neither fast nor slow


def test_failures_are_counted_and_left_out_of_throughput(double: Double) -> None:
    def every_second(read: Read) -> Outcome | None:
        position = sorted(double.records).index(read.key)
        return Outcome.failed(TransientError("the link is down")) if position % 2 else None

    double.on_get = every_second
    report = run_io(
        ["memory://"], ops=["get"], **quick(repeats=1)
    )  # of several, time and speed are medians of their own
    (row,) = report.rows
    assert row.failed > 0
    assert row.gbytes_per_s * 1e9 * row.seconds == pytest.approx(row.batch * row.size_bytes / 2, rel=0.5)
    assert not row.verified
    assert not report.ok
    assert any("the link is down" in note for note in report.notes)


@pytest.mark.parametrize("answer", [MISS, EXISTS, Outcome(Status.OK, 7), Outcome.failed(TransientError("full"))])
def test_a_put_that_did_not_store_is_a_failure(double: Double, answer: Outcome) -> None:
    double.on_put = lambda write: answer
    report = run_io(["memory://"], **quick())
    assert [row.verified for row in report.rows] == [False, False]
    put, get = report.rows
    assert put.failed > 0
    assert (put.gbytes_per_s, put.ratio) == (0.0, 0.0)
    assert (get.gbytes_per_s, get.failed) == (0.0, 4)
    assert report.to_json()


def test_a_put_that_was_acknowledged_and_dropped_is_a_failure(double: Double) -> None:
    puts = iter(range(10_000))

    def dropped(write: Write) -> Outcome | None:
        return Outcome(Status.OK, write.nbytes) if 30 <= next(puts) < 34 else None

    double.on_put = dropped
    report = run_io(["memory://"], ops=["put"], **quick(repeats=20))
    assert report.rows[0].failed == 4
    assert not report.ok
    assert any("acknowledged and is not there" in note for note in report.notes)


def test_records_larger_than_the_backend_takes_are_left_out_with_a_note(double: Double) -> None:
    double.limits = Limits(lanes=4, max_value_bytes=5000)
    steps: list[tuple[str, int, int]] = []
    report = run_io(["memory://"], **quick(sizes=[4 * KIB, 8 * KIB]), progress=lambda *step: steps.append(step))
    assert {row.size_bytes for row in report.rows} == {4 * KIB}
    assert any("8KiB is left out" in note for note in report.notes)
    assert steps[-1][1:] == (4, 4)


def test_two_urls_of_one_scheme_keep_their_figures_apart(double: Double) -> None:
    report = run_io(["memory://a", "memory://b"], ops=["get"], **quick())
    assert [(row.url, row.scheme) for row in report.rows] == [("memory://a", "memory"), ("memory://b", "memory_2")]
    assert set(report.figures) == {"io.memory.get.4KiB.ratio", "io.memory_2.get.4KiB.ratio"}


def test_files_are_compared_with_raw_files_on_the_same_file_system(double: Double, tmp_path: Path) -> None:
    root = tmp_path / "kv"
    root.mkdir()
    report = run_io([f"file://{root}"], **quick())
    assert [(row.op, row.ceiling.name) for row in report.rows] == [("put", "pwritev+rename"), ("get", "preadv")]
    assert list(tmp_path.rglob("*")) == [root]
    assert list(report.machine["file_systems"]) == [str(root)]


def test_a_full_disk_is_said_before_anything_is_written(
    double: Double, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=10 * MIB))
    with pytest.raises(ConfigError, match=r"10 MiB free.*need 64 MiB"):
        run_io([f"file://{tmp_path}"], **quick())
    assert not double.ever
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("moment", ["get", "put"])
def test_ctrl_c_cleans_up(double: Double, tmp_path: Path, moment: str, capsys: pytest.CaptureFixture[str]) -> None:
    seen = iter(range(10_000))

    def interrupt(item: Read | Write) -> None:
        if next(seen) == 9:  # in the middle of a pass, from a lane's thread
            os.kill(os.getpid(), signal.SIGINT)

    setattr(double, f"on_{moment}", interrupt)
    words = ["io", f"file://{tmp_path}", "--sizes", "4KiB", "--batch", "4", "--lanes", "1", "--quick"]
    assert cli.main(words) == 130
    said = capsys.readouterr()
    assert "interrupted" in said.err
    assert "Traceback" not in said.err
    assert not list(tmp_path.iterdir())
    assert double.closed == 1


@pytest.mark.parametrize("op", ["get", "put"])
def test_ctrl_c_during_the_clean_up_is_made_good(double: Double, monkeypatch: pytest.MonkeyPatch, op: str) -> None:
    real, calls = double.delete, iter(range(10_000))

    def delete(keys: Sequence[Key], *, deadline: float) -> list[Outcome]:
        if next(calls) == 0:
            raise KeyboardInterrupt
        return real(keys, deadline=deadline)

    monkeypatch.setattr(double, "delete", delete)
    with pytest.raises(KeyboardInterrupt):
        run_io(["memory://"], ops=[op], **quick())
    assert len(double.ever) >= 4
    assert not double.records


def test_the_disk_filling_up_under_the_raw_ceiling_is_one_sentence(
    double: Double, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwritev", full)
    assert cli.main(["io", f"file://{tmp_path}", "--sizes", "4KiB", "--batch", "4", "--quick"]) == 2
    assert capsys.readouterr().err == "kvstore-bench: No space left on device\n"
    assert not list(tmp_path.iterdir())


# Comparing.


class Script:
    """Lanes whose clock is a script: `ours` and `theirs` seconds for each pass."""

    def __init__(self, ours: Sequence[float], theirs: Sequence[float]) -> None:
        self.seconds = {"ours": iter(ours), "theirs": iter(theirs)}
        self.order: list[str] = []

    def run(self, jobs: Sequence[Job], rounds: int = 1) -> Pass:
        side = "theirs" if "ceilings" in jobs[0].__code__.co_filename else "ours"
        self.order.append(side)
        for _ in range(rounds):
            for job in jobs:
                job()
        seconds = next(self.seconds[side])
        return Pass(seconds, seconds / 2, [seconds / rounds])


def scripted(ours: Sequence[float], theirs: Sequence[float], **options: Any) -> tuple[measure.Measurement, Script]:
    from kvstore_bench.ceilings import Memcpy

    work = Workload(Region(1 << 16), Region(1 << 16), count=2, nbytes=1000, make_key=opaque_key, run_id="x")
    side = GetSide(BackendTarget(BackendURL("memory"), Double()), work, timeout=60)
    side.fill(Script([1], []), 1)  # type: ignore[arg-type]
    script = Script(ours, theirs)
    pool: Any = script
    done = measure.measure(
        pool, side, Memcpy(work.sources, work.destinations), our_lanes=[1], ceiling_lanes=[1], same_lanes=False,
        repeats=options.pop("repeats", 3), pass_s=1.0, budget_s=options.pop("budget_s", 0.0), **options,
    )  # fmt: skip
    return done, script


def test_the_ratio_is_the_median_of_paired_ratios() -> None:
    # Each list: warm-up, one look for the best lanes, three repeats. A slow spell meets both sides of repeat 2.
    done, script = scripted([1, 1, 1.0, 10.0, 4.0], [1, 1, 0.5, 9.0, 1.0])
    assert done.ratio == pytest.approx(0.5)  # of 0.5, 0.9 and 0.25
    assert done.seconds == 4.0
    assert done.speed == pytest.approx(2000 / 4.0)
    assert done.ceiling_speed == pytest.approx(2000 / 1.0)
    assert script.order[4:] == ["ours", "theirs", "theirs", "ours", "ours", "theirs"]
    assert done.spread == pytest.approx((4000.0 - 2000 / 9) / 2000)
    assert done.cpu_s_per_byte == pytest.approx(7.5 / 6000)


def test_a_row_stops_at_its_budget_but_not_before_three_repeats() -> None:
    done, _ = scripted([1] * 50, [1] * 50, repeats=20, budget_s=0.0)
    assert done.repeats == 3


def test_more_lanes_must_be_worth_it() -> None:
    class Speeds:
        """Seconds by number of jobs."""

        def run(self, jobs: Sequence[Job], rounds: int = 1) -> Pass:
            for job in jobs:
                job()
            return Pass({1: 1.0, 2: 0.99, 4: 0.5}[len(jobs)], 0.0, [])

    work = Workload(Region(1 << 16), Region(1 << 16), count=8, nbytes=100, make_key=opaque_key, run_id="x")
    side = PutSide(BackendTarget(BackendURL("memory"), Double()), work, timeout=60)
    pool: Any = Speeds()
    assert measure._best(pool, [(side, [1, 2])], 1.0) == [(1, 1.0)]
    assert measure._best(pool, [(side, [1, 2, 4])], 1.0) == [(4, 0.5)]
