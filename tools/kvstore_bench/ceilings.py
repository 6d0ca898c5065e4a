"""What this machine does without us: the ceilings that `kvstore-bench` prints next to its results.

This file imports nothing of kvstore. Each ceiling moves the same number of bytes between the same buffers as the
measurement beside it, with its own best number of threads, through the same `Lanes`:

* `Memcpy`: libc's `memmove`, called without the GIL.
* `ReadFiles`: `preadv(2)` of the same warm files, open already: no lookup, no open, no header, no checksum.
* `WriteFiles`: create a file exclusively, `pwritev(2)`, close, `rename(2)`. No fsync. With `posix_fallocate(3)` before
  the write where a short trial shows that to be faster (ext4: 1.3 to 1.6 times for 16 MiB).
* `PythonLoop`: one dict lookup and one slice assignment per key; the floor of what Python can do per tiny record.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import NamedTuple

__all__ = ["Job", "Lanes", "Memcpy", "Pass", "PythonLoop", "ReadFiles", "WriteFiles", "split"]

Job = Callable[[], None]
"""One call of one lane."""


class Pass(NamedTuple):
    """One timed pass of all lanes.

    Attributes:
        seconds: wall time from the first lane's start to the last lane's end.
        cpu_s: CPU seconds of the whole process in that time, user and system, all threads.
        calls: wall seconds of each single call, of all lanes.
    """

    seconds: float
    cpu_s: float
    calls: list[float]


class Lanes:
    """Threads that start together: each calls its own job a number of times.

    The calling thread only waits, so that Ctrl-C never lands inside a job.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._pool = ThreadPoolExecutor(most, thread_name_prefix="kvstore-bench")
        self._stop = threading.Event()

    def run(self, jobs: Sequence[Job], rounds: int = 1) -> Pass:
        """Call every job `rounds` times, each in a thread of its own. Raises what a job raised, after all ended."""
        if not 0 < len(jobs) <= self._most:
            raise ValueError(f"{len(jobs)} jobs do not fit into {self._most} lanes")
        self._stop.clear()
        barrier = threading.Barrier(len(jobs))
        cpu = time.process_time()
        futures: list[Future[list[float]]] = []
        try:
            for job in jobs:
                futures.append(self._pool.submit(self._lane, job, rounds, barrier))
            wait(futures)
        except BaseException:
            self._stop.set()
            barrier.abort()  # lanes whose partners were never submitted
            wait(futures)
            raise
        cpu = time.process_time() - cpu
        marks = [future.result() for future in futures]
        calls = [end - begin for times in marks for begin, end in itertools.pairwise(times)]
        return Pass(max(times[-1] for times in marks) - min(times[0] for times in marks), cpu, calls)

    def _lane(self, job: Job, rounds: int, barrier: threading.Barrier) -> list[float]:
        clock, stopped = time.perf_counter, self._stop.is_set
        barrier.wait()
        times = [clock()]
        for _ in range(rounds):
            if stopped():
                break
            job()
            times.append(clock())
        return times

    def close(self) -> None:
        self._stop.set()
        self._pool.shutdown()

    def __enter__(self) -> Lanes:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def split(count: int, parts: int) -> list[range]:
    """`range(count)` cut into at most `parts` runs of nearly equal length, none of them empty."""
    parts = max(1, min(parts, count))
    return [range(count * part // parts, count * (part + 1) // parts) for part in range(parts)]


def _address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


class Memcpy:
    """Copies `sources[i]` to `destinations[i]` (writable flat byte views of equal lengths)."""

    name = "memcpy"
    repeatable = True

    def __init__(self, sources: Sequence[memoryview], destinations: Sequence[memoryview]) -> None:
        self._plan = [(_address(dst), _address(src), len(dst)) for src, dst in zip(sources, destinations, strict=True)]
        self._keep = (sources, destinations)

    def jobs(self, lanes: int) -> list[Job]:
        return [self._job(self._plan[part.start : part.stop]) for part in split(len(self._plan), lanes)]

    @staticmethod
    def _job(plan: Sequence[tuple[int, int, int]]) -> Job:
        memmove = ctypes.memmove

        def job() -> None:
            for dst, src, nbytes in plan:
                memmove(dst, src, nbytes)

        return job

    def settle(self, rounds: int) -> int:
        return rounds * sum(nbytes for _, _, nbytes in self._plan)

    def close(self) -> None:
        return


class ReadFiles:
    """`preadv` of warm files that are open already, into `destinations`.

    Where they lie in files, they are the very files that the other side reads: where the kernel happened to put a
    file's pages makes twice the difference here, so copies would compare two places in memory, not two programs.

    Args:
        folder: where copies of `sources` are written if `files` is None; they are removed by `close`.
        files: one file per destination, and the offset in it from which the destination is filled.
    """

    name = "preadv"
    repeatable = True

    def __init__(
        self,
        folder: Path,
        sources: Sequence[memoryview],
        destinations: Sequence[memoryview],
        files: Sequence[tuple[Path, int]] | None = None,
    ) -> None:
        self._destinations = destinations
        self._files: list[tuple[int, int]] = []
        self._copies: list[Path] = []
        try:
            if files is not None:
                for path, offset in files:
                    self._files.append((os.open(path, os.O_RDONLY | os.O_CLOEXEC), offset))
                return
            for index, source in enumerate(sources):
                path = folder / f"read-{index}"
                fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
                self._copies.append(path)
                self._files.append((fd, 0))
                _write(fd, source)
        except BaseException:
            self.close()
            raise

    def jobs(self, lanes: int) -> list[Job]:
        plan = [(fd, offset, dst) for (fd, offset), dst in zip(self._files, self._destinations, strict=True)]
        return [self._job(plan[part.start : part.stop]) for part in split(len(plan), lanes)]

    @staticmethod
    def _job(plan: Sequence[tuple[int, int, memoryview]]) -> Job:
        preadv = os.preadv

        def job() -> None:
            for fd, offset, dst in plan:
                done = preadv(fd, [dst], offset)
                while done < len(dst):
                    more = preadv(fd, [dst[done:]], offset + done)
                    if more == 0:
                        raise OSError(f"a file of the raw ceiling ended after {done} of {len(dst)} bytes")
                    done += more

        return job

    def settle(self, rounds: int) -> int:
        return rounds * sum(map(len, self._destinations))

    def close(self) -> None:
        files, self._files = self._files, []
        for fd, _ in files:
            os.close(fd)
        copies, self._copies = self._copies, []
        for path in copies:
            path.unlink(missing_ok=True)


class WriteFiles:
    """Create, `pwritev`, close and `rename` one file per source in `folder`; `settle` removes them again.

    Args:
        allocate: reserve the blocks first; None tries both ways and keeps the faster one.
    """

    name = "pwritev+rename"
    repeatable = False

    def __init__(self, folder: Path, sources: Sequence[memoryview], *, allocate: bool | None = None) -> None:
        self._folder = folder
        self._sources = sources
        self._round = 0
        self._live: list[tuple[str, str]] = []
        self.allocate = self._faster() if allocate is None else allocate

    def _faster(self) -> bool:
        """True if reserving the blocks pays: the best of three writes each, in turn."""
        seconds = {False: [math.inf], True: [math.inf]}
        try:
            for _ in range(3):
                for self.allocate, times in seconds.items():
                    (job,) = self.jobs(1)
                    begin = time.perf_counter()
                    job()
                    times.append(time.perf_counter() - begin)
                    self.close()
        except OSError:
            self.close()
            if not self.allocate:
                raise
            return False  # the file system cannot reserve
        return min(seconds[True]) < min(seconds[False])

    def jobs(self, lanes: int) -> list[Job]:
        self._round += 1
        names = [str(self._folder / f"write-{self._round}-{index}") for index in range(len(self._sources))]
        self._live = [(f"{name}.tmp", name) for name in names]
        plan = [(*paths, source) for paths, source in zip(self._live, self._sources, strict=True)]
        return [self._job(plan[part.start : part.stop], self.allocate) for part in split(len(plan), lanes)]

    @staticmethod
    def _job(plan: Sequence[tuple[str, str, memoryview]], allocate: bool) -> Job:
        def job() -> None:
            for temporary, name, source in plan:
                fd = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
                try:
                    if allocate:
                        os.posix_fallocate(fd, 0, len(source))
                    _write(fd, source)
                finally:
                    os.close(fd)
                os.rename(temporary, name)

        return job

    def settle(self, rounds: int) -> int:
        self.close()
        return rounds * sum(map(len, self._sources))

    def close(self) -> None:
        live, self._live = self._live, []
        for paths in live:
            for path in paths:
                try:
                    os.unlink(path)
                except FileNotFoundError:
                    pass


def _write(fd: int, source: memoryview) -> None:
    done = os.pwritev(fd, [source], 0)
    while done < len(source):
        done += os.pwritev(fd, [source[done:]], done)


class PythonLoop:
    """For each key: look it up in a dict of bytes and assign to the destination slice (or the reverse, for `put`)."""

    name = "python loop"
    repeatable = True

    def __init__(
        self, op: str, keys: Sequence[bytes], sources: Sequence[memoryview], destinations: Sequence[memoryview]
    ) -> None:
        self._op = op
        self._table = {key: bytes(source) for key, source in zip(keys, sources, strict=True)}
        self._sources = list(zip(keys, sources, strict=True))
        self._destinations = list(zip(keys, destinations, strict=True))

    def jobs(self, lanes: int) -> list[Job]:
        parts = split(len(self._sources), lanes)
        make = self._put if self._op == "put" else self._get
        return [make(part) for part in parts]

    def _get(self, part: range) -> Job:
        table, plan = self._table, self._destinations[part.start : part.stop]

        def job() -> None:
            for key, dst in plan:
                dst[:] = table[key]

        return job

    def _put(self, part: range) -> Job:
        table, plan = self._table, self._sources[part.start : part.stop]

        def job() -> None:
            for key, source in plan:
                table[key] = bytes(source)

        return job

    def settle(self, rounds: int) -> int:
        return rounds * sum(len(dst) for _, dst in self._destinations)

    def close(self) -> None:
        return
