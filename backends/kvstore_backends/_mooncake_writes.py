"""Writing to Mooncake Store through put sessions: reserve, transfer, complete; or revoke, and nothing was there.

`put_from` and its batch forms answer 0 for a key that exists, so they cannot say EXISTS. A session can, before any byte
moves; it takes runs of bytes from several places, so nothing has to be joined; and it is as fast (see docs/peers.md).
An object becomes visible when its session is completed. That is done only while the caller waits: what was transferred
when its deadline had passed may have been read from memory that changed meanwhile, and is revoked.

A process that dies between the two leaves a name that nobody can write until the master gives it up
(`put_start_discard_timeout_sec`, 30 s); until then other writers wait, and get a `TransientError` at their deadline.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from kvstore.backend import EXISTS, Outcome, Status
from kvstore.buffers import Buffer, BufferPool, copy_bytes
from kvstore.errors import KVStoreError, PermanentError, TransientError
from kvstore.keys import Key

from ._mooncake_calls import Call, seconds_left
from ._mooncake_client import EXISTS as ALREADY
from ._mooncake_client import OK, OUT_OF_RANGE, Client, address_of, error_of
from ._mooncake_reads import HEADER_BYTES, new_header

__all__ = ["Job", "Writer"]

_DIRECT_BYTES = 256 << 10  # shorter runs of registered memory are copied: one more range costs more than that
_DIRECT_PIECES = 4  # so many pieces' worth of bytes at most are transferred in one go
_POLL_S = (0.002, 0.1)  # first and longest pause before a key that somebody else is storing is looked at again
_WRONG_VIEW = (TypeError, ValueError, BufferError, NotImplementedError)


class Job(NamedTuple):
    """One record to store: its place in the batch, its object's name, its bytes."""

    item: int
    key: Key
    name: str
    nbytes: int
    src: Sequence[memoryview]


class Writer:
    """Stores batches, in a worker's thread."""

    def __init__(self, client: Client, pool: BufferPool, piece_bytes: int) -> None:
        self._client, self._pool, self._piece_bytes = client, pool, piece_bytes
        self._name = client.settings.name

    def put(self, call: Call, jobs: Sequence[Job], outcomes: list[Outcome | None]) -> None:
        """Store what is not there; each outcome is set as it is known."""
        store = self._client.joined(call.operation)
        todo, pause = list(jobs), _POLL_S[0]
        while todo and not call.left.is_set():
            mine: dict[str, Job] = {}
            with self._client.member.lock:
                for job in todo:
                    if job.name not in self._client.member.pending:
                        mine.setdefault(job.name, job)
                self._client.member.pending.update(mine)
            others = [job for job in todo if mine.get(job.name) is not job]
            todo = others
            try:
                todo = [*self._store(store, call, list(mine.values()), outcomes), *others]
            finally:
                with self._client.member.lock:
                    self._client.member.pending.difference_update(mine)
            if todo and not mine:  # others are storing these; they may also fail
                pause = min(2 * pause, _POLL_S[1])
                call.left.wait(pause)

    def _store(self, store: Any, call: Call, jobs: Sequence[Job], outcomes: list[Outcome | None]) -> list[Job]:
        """Store these; returns those that another process is storing at the moment."""
        begun, busy = self._begin(store, call, jobs, outcomes)
        transfer = _Transfer(self._client, self._pool, self._piece_bytes, store, call, begun, outcomes)
        try:
            transfer.run()
        finally:
            transfer.release()
            if begun:
                store.batch_put_session_revoke([job.name for job in begun.values()])
        if busy:
            call.left.wait(_POLL_S[0])
        return busy

    def _begin(
        self, store: Any, call: Call, jobs: Sequence[Job], outcomes: list[Outcome | None]
    ) -> tuple[dict[int, Job], list[Job]]:
        """(jobs that have a session now, by item; those that somebody else has one for)."""
        begun: dict[int, Job] = {}
        taken: list[Job] = []
        for job, code in zip(jobs, self._start(store, jobs), strict=True):
            if code == OK:
                begun[job.item] = job
            elif code == ALREADY:
                taken.append(job)
            else:
                outcomes[job.item] = self._failed(code, job)
        busy = []
        for job, code in zip(taken, store.batch_is_exist([job.name for job in taken]) if taken else (), strict=True):
            if code == 1:
                outcomes[job.item] = EXISTS
            elif code == 0:
                text = "another client is storing this record, or died while it did"
                error = TransientError(text, backend=self._name, operation="put", key=job.key)
                outcomes[job.item] = Outcome.failed(error)
                busy.append(job)
            else:
                outcomes[job.item] = self._failed(code, job)
        return begun, busy

    def _start(self, store: Any, jobs: Sequence[Job]) -> list[int]:
        if not jobs:
            return []
        names, sizes = [job.name for job in jobs], [HEADER_BYTES + job.nbytes for job in jobs]
        codes = [*map(int, store.batch_put_session_start(names, sizes, self._client.config()))]
        # A revocation that did not reach the master leaves the session in the client: once more, after another one.
        stuck = [index for index, code in enumerate(codes) if code == OUT_OF_RANGE]
        if stuck:
            some = [names[index] for index in stuck]
            store.batch_put_session_revoke(some)
            again = store.batch_put_session_start(some, [sizes[index] for index in stuck], self._client.config())
            for index, code in zip(stuck, again, strict=True):
                codes[index] = int(code)
        return codes

    def _failed(self, code: int, job: Job) -> Outcome:
        return Outcome.failed(error_of(code, backend=self._name, operation="put", key=job.key))


class _Transfer:
    """Moves the bytes of jobs that have sessions, and completes these.

    Args:
        begun: jobs with an open session, by item. Those that were completed are taken out; the rest is to be revoked.
    """

    def __init__(
        self, client: Client, pool: BufferPool, piece_bytes: int, store: Any, call: Call, begun: dict[int, Job],
        outcomes: list[Outcome | None],
    ) -> None:  # fmt: skip
        self._find, self._name = client.find, client.settings.name
        self._pool, self._piece_bytes = pool, piece_bytes
        self._store, self._call, self._begun, self._outcomes = store, call, begun, outcomes
        self._buffer: Buffer | None = None
        self._base = self._filled = self._total = 0
        self._runs: dict[int, list[tuple[int, int, int]]] = {}  # by job: address, length, place in the object
        self._whole: list[Job] = []  # jobs whose last run is among them
        self._bad: set[int] = set()

    def run(self) -> None:
        for job in [*self._begun.values()]:
            place = 0
            try:
                for view in (memoryview(new_header(job.nbytes)), *job.src):
                    for address, nbytes in self._pieces(view):
                        self._runs.setdefault(job.item, []).append((address, nbytes, place))
                        self._total += nbytes
                        place += nbytes
                    if job.item in self._bad or self._call.left.is_set():
                        break
            except _WRONG_VIEW as error:
                text = f"the source is not made of flat views of bytes: {error}"
                self._fail(job, PermanentError(text, backend=self._name, operation="put", key=job.key, cause=error))
            if self._call.left.is_set():
                return
            self._whole.append(job)
        self._flush()

    def _pieces(self, view: memoryview) -> Iterator[tuple[int, int]]:
        """(address, length) of registered memory that holds the bytes of `view`: its own, or staging."""
        nbytes = len(view)
        if nbytes >= _DIRECT_BYTES and self._find(address := address_of(view), nbytes) is not None:
            if self._total >= _DIRECT_PIECES * self._piece_bytes:
                self._flush()
            yield address, nbytes
            return
        at = 0
        while at < nbytes:
            buffer = self._staging()
            if self._filled == buffer.nbytes:
                self._flush()
            size = min(nbytes - at, buffer.nbytes - self._filled)
            copy_bytes(buffer.view[self._filled : self._filled + size], view[at : at + size])
            yield self._base + self._filled, size
            self._filled += size
            at += size

    def _staging(self) -> Buffer:
        if self._buffer is None:
            need = sum(HEADER_BYTES + job.nbytes for job in self._begun.values())
            self._buffer = self._pool.acquire(min(need, self._piece_bytes), seconds_left(self._call.deadline))
            self._base = address_of(self._buffer.view)
        return self._buffer

    def _flush(self) -> None:
        """Transfer what was collected, and complete the records that are whole."""
        runs = {index: _joined(runs) for index, runs in self._runs.items() if index not in self._bad}
        whole, self._whole, self._runs = self._whole, [], {}
        self._filled = self._total = 0
        if not runs or self._call.left.is_set():
            return
        codes = self._store.batch_put_from_multi_buffer_ranges(
            [self._begun[index].name for index in runs],
            [[run[0] for run in some] for some in runs.values()],
            [[run[1] for run in some] for some in runs.values()],
            [[run[2] for run in some] for some in runs.values()],
        )
        for (index, some), code in zip(runs.items(), codes, strict=True):
            if code != sum(run[1] for run in some):
                self._fail(self._begun[index], self._error(code, self._begun[index]))
        whole = [job for job in whole if job.item not in self._bad]
        if not whole or self._call.left.is_set():
            return
        for job, code in zip(whole, self._store.batch_put_session_end([job.name for job in whole]), strict=True):
            if code == OK:
                self._outcomes[job.item] = Outcome(Status.OK, job.nbytes)
                del self._begun[job.item]
            else:
                self._fail(job, self._error(code, job))

    def _error(self, code: int, job: Job) -> KVStoreError:
        if code < 0:
            return error_of(code, backend=self._name, operation="put", key=job.key)
        return TransientError("Mooncake moved only a part", backend=self._name, operation="put", key=job.key)

    def _fail(self, job: Job, error: KVStoreError) -> None:
        self._bad.add(job.item)
        self._outcomes[job.item] = Outcome.failed(error)

    def release(self) -> None:
        if self._buffer is not None:
            self._buffer.release()
            self._buffer = None


def _joined(runs: Sequence[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Runs that lie next to each other, in memory and in the object, as one."""
    joined: list[tuple[int, int, int]] = []
    for address, nbytes, place in runs:
        if joined and sum(joined[-1][:2]) == address:  # places always follow each other
            joined[-1] = (joined[-1][0], joined[-1][1] + nbytes, joined[-1][2])
        else:
            joined.append((address, nbytes, place))
    return joined
