"""Jobs go to the servers that own their slots, grouped by server, in order; and again where MOVED and ASK say.

A server that is down costs its own jobs and no others. When a connection fails, the map is learnt again, and the jobs
whose slots have a new owner go there at once, within the same call.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Sequence

from .errors import LinkError, ReplyError
from .exchange import Run, exchange
from .options import Node, Settings
from .pool import Pool
from .resp import MULTI, PENDING, Ask, command
from .topology import Topology, View, node_at

__all__ = ["ASKING", "Dispatch", "Job"]

_TURNS = 6  # at most so often is one job sent
_REDIRECT = re.compile(r"(?:MOVED|ASK) (\d{1,5}) (.*):(\d{1,5})")
ASKING = command(b"ASKING")
_NO_TOUCH = command(b"CLIENT", b"NO-TOUCH", b"ON")
_TOUCH = command(b"CLIENT", b"NO-TOUCH", b"OFF")


class Job:
    """What is asked about one name: a few asks that go to one server, next to each other.

    Attributes:
        slot: of the name.
        asks: in order; what `Ask.follow` returns is to be added to it.
        error: why some of them have no reply.
        settled: whether what came so far is final, so that the job must not be sent again; None: never.
    """

    __slots__ = ("_first", "_tries", "asking", "asks", "error", "node", "settled", "slot")

    def __init__(self, slot: int, asks: Sequence[Ask], settled: Callable[[], bool] | None = None) -> None:
        self.slot = slot
        self.asks = list(asks)
        self.error: Exception | None = None
        self.settled = settled
        self.asking: Node | None = None
        self.node: Node | None = None
        self._first = len(self.asks)
        self._tries = 0

    @property
    def trouble(self) -> Exception | None:
        """Why it has not all its replies, or the first reply that is an error."""
        if self.error is not None:
            return self.error
        for ask in self.asks:
            if isinstance(ask.reply, ReplyError):
                return ask.reply
        return None

    @property
    def answered(self) -> bool:
        for ask in self.asks:  # noqa: SIM110 - a generator costs three times as much, and this runs for each key
            if ask.reply is PENDING:
                return False
        return True

    def again(self) -> bool:
        """Forget what came, for another try. False: it must not be, or was tried often enough."""
        self._tries += 1
        if self._tries >= _TURNS or (self.settled is not None and self.settled()):
            return False
        del self.asks[self._first :]
        for ask in self.asks:
            ask.reply = PENDING
        return True

    def fail(self, error: Exception) -> None:
        """`error` unless it has one, or all its replies."""
        if self.error is None and (not self.answered or any(ask.reply is error for ask in self.asks)):
            self.error = error


class Dispatch:
    """Attributes:
    counters: how often a job was sent on by ASK ("asked"), and calls that met a broken connection ("broken").
    """

    def __init__(self, settings: Settings, pool: Pool, topology: Topology) -> None:
        self._settings = settings
        self._pool = pool
        self._topology = topology
        self._lock = threading.Lock()
        self.counters = {"asked": 0, "broken": 0}

    def after_fork(self) -> None:
        self._lock = threading.Lock()

    def run(self, jobs: Sequence[Job], deadline: float, *, quietly: bool = False) -> None:
        """Do the jobs. Afterwards each has replies, or an `error`; nothing is raised but `ClosedError`.

        Args:
            quietly: not as a use of what is asked about (CLIENT NO-TOUCH).
        """
        todo = list(jobs)
        if not todo:
            return
        try:
            with self._pool.lane(deadline):
                while todo:
                    todo = self._turn(todo, deadline, quietly)
        except (LinkError, ReplyError) as error:
            for job in todo:
                job.fail(error)

    def on(self, node: Node, asks: Sequence[Ask], deadline: float, *, quietly: bool = False) -> None:
        """Ask one server. Raises `LinkError` or `ReplyError` if it does not answer."""
        asks = _quiet(asks) if quietly else asks
        with self._pool.lane(deadline):
            for fresh in (False, True):
                with self._pool.runs() as runs:
                    run = self._pool.run(node, asks, deadline=deadline, fresh=fresh)
                    runs.append(run)
                    self._exchange(runs, deadline)
                if not _was_stale(run):
                    break
        if run.error is not None:
            raise run.error

    def on_each(self, pairs: Sequence[tuple[Node, Ask]], deadline: float) -> None:
        """Ask several servers one thing each, side by side; one that does not answer leaves its ask pending."""
        with self._pool.lane(deadline), self._pool.runs() as runs:
            for node, ask in pairs:
                try:
                    runs.append(self._pool.run(node, [ask], deadline=deadline))
                except LinkError:  # its name could not be resolved
                    continue
            self._exchange(runs, deadline)

    def _exchange(self, runs: Sequence[Run], deadline: float) -> None:
        exchange(runs, deadline=deadline, silence=self._settings.read_timeout)

    def _turn(self, todo: Sequence[Job], deadline: float, quietly: bool) -> list[Job]:
        """Send each job once. Returns those that must be sent again."""
        view = self._topology.view(deadline)
        if time.monotonic() >= deadline:
            raise LinkError("deadline", "the deadline passed")
        groups: dict[Node, list[Job]] = {}
        for job in todo:
            job.node = job.asking or view.slots[job.slot]
            if job.node is not None:
                groups.setdefault(job.node, []).append(job)
        sent: list[tuple[Run, list[Job]]] = []
        again: list[Job] = []
        lost: list[tuple[Job, Exception]] = [
            (job, LinkError("topology", f"no server serves slot {job.slot}; see CLUSTER SLOTS"))
            for job in todo
            if job.node is None
        ]
        with self._pool.runs() as runs:
            for node, group in groups.items():
                asks = [ask for job in group for ask in _asks_of(job)]
                try:
                    run = self._pool.run(node, _quiet(asks) if quietly else asks, deadline=deadline)
                except LinkError as error:  # its name could not be resolved
                    lost += [(job, error) for job in group]
                    continue
                runs.append(run)
                sent.append((run, group))
            self._exchange(runs, deadline)
        learn = bool(lost)
        for run, group in sent:
            if run.error is not None:
                self._count("broken")
            for job in group:
                learn |= self._sort(job, run, again, lost)
        if learn:
            self._settle(lost, again, view, deadline)
        return again

    def _sort(self, job: Job, run: Run, again: list[Job], lost: list[tuple[Job, Exception]]) -> bool:
        """Where a job goes now. True: the map seems to be old."""
        job.asking = None
        trouble = job.trouble
        if isinstance(trouble, ReplyError):
            return self._redirect(job, trouble, run, again, lost)
        if job.answered:
            return False
        error = run.error or LinkError("protocol", f"{run.node} did not answer")
        if _was_stale(run) and job.again():
            self._pool.forget(run.node)  # the other idle ones have most likely ended, too
            again.append(job)
            return False
        if isinstance(error, LinkError) and error.kind in ("connect", "closed", "silence"):
            self._pool.forget(run.node)
            lost.append((job, error))
            return True
        job.fail(error)
        return False

    def _redirect(
        self, job: Job, said: ReplyError, run: Run, again: list[Job], lost: list[tuple[Job, Exception]]
    ) -> bool:
        match = _REDIRECT.fullmatch(said.text) if said.code in ("MOVED", "ASK") else None
        node = node_at(match[2], int(match[3]), run.node) if match is not None else None
        if match is not None and node is not None and self._settings.cluster != "off" and job.again():
            again.append(job)
            if said.code == "ASK":
                job.asking = node
                self._count("asked")
                return False
            self._topology.moved(int(match[1]), node)
            return True
        if match is not None and self._settings.cluster == "off":
            said = ReplyError(f"{said.text}: this server is part of a cluster, but cluster=off is set")
            for ask in job.asks:
                ask.reply = said
        if said.code == "READONLY":
            self._pool.forget(run.node)
            lost.append((job, said))
            return True
        job.fail(said)
        return said.code in ("CLUSTERDOWN", "MASTERDOWN")

    def _settle(self, lost: Sequence[tuple[Job, Exception]], again: list[Job], view: View, deadline: float) -> None:
        """Learn the map; jobs whose slot has another owner by now are tried there, the others have failed."""
        newer: View | None = None
        if time.monotonic() < deadline:
            try:
                newer = self._topology.learn(view, deadline)
            except (LinkError, ReplyError):
                pass  # the old map has to do, and the next call tries again
        for job, error in lost:
            if newer is not None and newer.slots[job.slot] not in (None, job.node) and job.again():
                again.append(job)
            else:
                job.fail(error)

    def _count(self, what: str) -> None:
        with self._lock:
            self.counters[what] += 1


def _asks_of(job: Job) -> list[Ask]:
    if job.asking is None:
        return list(job.asks)
    asks: list[Ask] = []
    queued = False
    for ask in job.asks:
        if not queued:
            asks.append(Ask([ASKING]))
        queued = queued or ask.parts[0] is MULTI  # holds until EXEC, and would be one more item of its reply
        asks.append(ask)
    return asks


def _quiet(asks: Sequence[Ask]) -> list[Ask]:
    """Where the server does not allow it, they count as uses: its reply is not looked at."""
    return [Ask([_NO_TOUCH]), *asks, Ask([_TOUCH])]


def _was_stale(run: Run) -> bool:
    """An idle connection had been closed by the other side: the server saw nothing of this run."""
    return run.idle and not run.heard and isinstance(run.error, LinkError) and run.error.kind == "closed"
