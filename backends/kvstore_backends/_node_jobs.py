"""`Jobs`: what goes on behind a call of the control API, in a few threads, one job each."""

from __future__ import annotations

import dataclasses
import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable

from kvstore.control.instance import DONE, FAILED, RUNNING, Job, UnknownError
from kvstore.errors import ClosedError, KVStoreError, TransientError

__all__ = ["Jobs", "Progress"]

logger = logging.getLogger("kvstore.node")

_THREADS = 2
_MOST_WAITING = 64
_KEPT = 256  # jobs that ended
_JOIN_S = 2.0


class Progress:
    """What a job says of itself while it goes on."""

    def __init__(self, jobs: Jobs, job_id: str) -> None:
        self._jobs = jobs
        self._id = job_id

    def total(self, records: int) -> None:
        """How many records it will deal with."""
        self._jobs._change(self._id, total=records)

    def add(self, done: int, *, failed: int = 0, nbytes: int = 0, error: str = "") -> None:
        """`done` more records, `failed` of them in vain; `error`: why, of the first of these.

        Raises:
            ClosedError: the instance is closing; the job ends.
        """
        self._jobs._add(self._id, done, failed, nbytes, error)

    def check(self) -> None:
        """Raises `ClosedError` if the instance is closing."""
        if self._jobs.closed:
            raise ClosedError("the node is shutting down")


Work = Callable[[Progress], None]


class Jobs:
    """A bounded number of jobs: two at work, some that wait for their turn, and the last ones that ended."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._jobs: dict[str, Job] = {}  # the oldest first
        self._waiting: deque[tuple[str, Work]] = deque()
        self._threads: list[threading.Thread] = []
        self._idle = 0
        self.closed = False

    def start(self, namespace: str, kind: str, work: Work) -> str:
        """Have `work` done; returns the id of the job.

        Raises:
            TransientError: too many wait already.
            ClosedError: closed.
        """
        with self._changed:
            if self.closed:
                raise ClosedError("the node is shutting down")
            if len(self._waiting) >= _MOST_WAITING:
                raise TransientError(f"{_MOST_WAITING} jobs wait already; come again")
            job = Job(secrets.token_hex(8), namespace, kind, RUNNING, started=time.time())
            self._jobs[job.id] = job
            self._waiting.append((job.id, work))
            ended = [each.id for each in self._jobs.values() if each.state != RUNNING]
            for old in ended[: max(0, len(ended) - _KEPT)]:
                del self._jobs[old]
            if not self._idle and len(self._threads) < _THREADS:
                thread = threading.Thread(target=self._run, name="kvstore-node-job", daemon=True)
                try:
                    thread.start()
                    self._threads.append(thread)
                except RuntimeError as error:
                    if not self._threads:
                        self._waiting.pop()
                        del self._jobs[job.id]
                        raise TransientError("the system gives no more threads", cause=error) from error
            self._changed.notify_all()
        return job.id

    def get(self, job_id: str) -> Job:
        """Raises `UnknownError`."""
        with self._lock:
            job = self._jobs.get(job_id)
        if job is None:
            raise UnknownError(f"there is no job {job_id[:64]!r} here, or none any more")
        return job

    @property
    def running(self) -> int:
        """Jobs that have not ended."""
        with self._lock:
            return sum(job.state == RUNNING for job in self._jobs.values())

    def _run(self) -> None:
        while True:
            with self._changed:
                self._idle += 1
                while not self._waiting and not self.closed:
                    self._changed.wait()
                self._idle -= 1
                if self.closed:
                    return
                job_id, work = self._waiting.popleft()
            try:
                work(Progress(self, job_id))
                self._change(job_id, state=DONE)
            except KVStoreError as error:
                self._change(job_id, state=FAILED, error=error.message)
            except Exception as error:
                logger.exception("a job failed")
                self._change(job_id, state=FAILED, error=f"{type(error).__name__}; the log of the node says more")

    def _change(self, job_id: str, **more: object) -> None:
        with self._lock:
            job = self._jobs.get(job_id)
            if job is not None:
                if more.get("state") == FAILED and job.error:
                    more.pop("error", None)
                self._jobs[job_id] = dataclasses.replace(job, **more)  # type: ignore[arg-type]

    def _add(self, job_id: str, done: int, failed: int, nbytes: int, error: str) -> None:
        with self._lock:
            job = self._jobs[job_id]
            self._jobs[job_id] = dataclasses.replace(
                job, done=job.done + done, failed=job.failed + failed, nbytes=job.nbytes + nbytes,
                error=job.error or error,
            )  # fmt: skip
        if self.closed:
            raise ClosedError("the node is shutting down")

    def close(self) -> None:
        """Jobs end with the batch they are at; those that wait do not begin."""
        with self._changed:
            self.closed = True
            waiting, self._waiting = self._waiting, deque()
            self._changed.notify_all()
        for job_id, _ in waiting:
            self._change(job_id, state=FAILED, error="the node is shutting down")
        end = time.monotonic() + _JOIN_S
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
