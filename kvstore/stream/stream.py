"""`Stream`: one request under way. What it does is decided by its `Course`; this is what does it."""

from __future__ import annotations

import functools
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from kvstore.backend import Status
from kvstore.completion import CancelledError, Completion
from kvstore.errors import ClosedError, ConfigError, KVStoreError, PoolExhausted
from kvstore.prefetch.mailbox import Mailbox
from kvstore.prefetch.plan import Chunk
from kvstore.scheduler import Priority, seconds_left
from kvstore.targets import Progress, Want, flat_bytes
from kvstore.telemetry.logs import current_request, resume_request

from .course import Course, Report
from .shapes import level_sizes
from .terms import Step

if TYPE_CHECKING:
    from kvstore.backend import Outcome
    from kvstore.buffers import Buffer

    from .streamer import Streamer

__all__ = ["ReadyGroup", "Stream", "TextPart"]

logger = logging.getLogger("kvstore.stream")

_POLL_S = 1e-3  # between looks whether late I/O has ended; there is no notice of that


class TextPart(NamedTuple):
    """What is to be computed: a group, once all groups before it are there and were given.

    Attributes:
        group: its number.
        begin, end: positions of its tokens.
        chunks: which of the request's chunks it is.
    """

    group: int
    begin: int
    end: int
    chunks: range


class ReadyGroup(NamedTuple):
    """A group that is there, or is finer than it was.

    Attributes:
        group: its number.
        begin, end: positions of its tokens.
        chunks: which of the request's chunks it is.
        level: the level that its memory holds; None: it was computed, and `views` is empty. Where refining was given
            up because the time was over, some of its layers may be finer.
        first: it was not given before.
        views: for each chunk its raw bytes, layer after layer (`spec.split` cuts them). They hold still until the
            stream is asked for the next group; copy them by then, or look at `Stream.views` at the end.
    """

    group: int
    begin: int
    end: int
    chunks: range
    level: int | None
    first: bool
    views: Sequence[memoryview]


class _Load:
    """A transfer of a group: its completion, and what came before."""

    __slots__ = ("completion", "fetched", "step")

    def __init__(self, step: Step, fetched: int) -> None:
        self.step = step
        self.fetched = fetched
        self.completion: Completion[Sequence[Outcome]] | None = None


class Stream(Mailbox):
    """One request under way. Made by `Streamer.stream`. One thread iterates; any may cancel.

    Attributes:
        report: what came of it; complete when the iteration has ended.
    """

    def __init__(
        self,
        streamer: Streamer,
        course: Course,
        chunks: Sequence[Chunk],
        parts: Sequence[TextPart],
        recompute: Callable[[TextPart], object] | None,
        deadline: float,
        into: Sequence[memoryview] | None,
    ) -> None:
        super().__init__()
        self._streamer = streamer
        self._course = course
        self._chunks, self._parts = chunks, parts
        self._recompute = recompute
        self._deadline = deadline
        self._request = current_request()  # transfers also begin in threads of the store's
        self._wake = threading.Event()
        self._ready: dict[int, None] = {}  # groups that are there or finer, to be given
        self._given: set[int] = set()
        self._memory: dict[int, Sequence[memoryview]] = {}
        self._buffers: dict[int, Sequence[Buffer]] = {}
        self._progress: dict[int, Sequence[Progress]] = {}
        self._loads: dict[Step, _Load] = {}
        self._leaving: list[_Load] = []  # cancelled, and maybe not settled yet
        self._compute: int | None = None
        self._wake_at = 0.0
        self._finished = self._closed = False
        self._error: KVStoreError | None = None
        if into is not None:
            views = [flat_bytes(view, writable=True) for view in into]
            self._memory = {part.group: [views[i] for i in part.chunks] for part in parts}
        self._finalizer = weakref.finalize(self, _let_go, self._loads, self._buffers, course)
        self._finalizer.atexit = False
        with self._locked():
            self._act()

    @property
    def report(self) -> Report:
        return self._course.report

    @property
    def missing(self) -> Sequence[TextPart]:
        """Groups that are not there: behind a deadline or, without `recompute`, from the first hole on."""
        states = self._course.standing
        end = len(states)
        if self._recompute is None:
            end = next((i for i, state in enumerate(states) if not state.there), end)
        return [part for part in self._parts if part.group >= end or not states[part.group].there]

    def views(self, group: int) -> Sequence[memoryview]:
        """The memory of a loaded group, one view per chunk; empty if it was computed or is missing. Valid until
        `close`; see `ReadyGroup.views` for when it holds still."""
        state = self._course.standing[group]
        return self._memory.get(group, ()) if state.level >= 0 and not state.computed else ()

    # Iteration.

    def __iter__(self) -> Iterator[ReadyGroup]:
        return self

    def __next__(self) -> ReadyGroup:
        with self._locked():
            self._course.hold(None)
            self._act()
        while True:
            if self._finished and self._leaving and not self._closed:
                self._settle()
            with self._locked():
                ready = self._next_ready()
                if ready is not None:
                    return ready
                if self._error is not None:
                    raise self._error
                if self._closed:
                    raise CancelledError("the stream was closed")
                if self._finished:
                    break
                compute = self._compute
                if compute is not None:
                    self._course.computing(compute, time.monotonic())
                    self._compute = None
                else:
                    self._wake.clear()
                wake_at = self._wake_at
            if compute is not None:
                self._run_recompute(compute)
            elif not self._wake.wait(max(0.0, min(seconds_left(wake_at), threading.TIMEOUT_MAX))):
                with self._locked():
                    self._act()
        raise StopIteration

    def _next_ready(self) -> ReadyGroup | None:
        """The next group to give: not one that is being refined just now."""
        busy = {step.group for step in self._loads} if not self._finished else ()
        group = next((group for group in self._ready if group not in busy), None)
        if group is None:
            return None
        del self._ready[group]
        part, state = self._parts[group], self._course.standing[group]
        first = group not in self._given
        self._given.add(group)
        self._course.hold(group)
        level = None if state.computed else state.level
        return ReadyGroup(group, part.begin, part.end, part.chunks, level, first, self.views(group))

    def _run_recompute(self, group: int) -> None:
        assert self._recompute is not None
        try:
            self._recompute(self._parts[group])
        except BaseException:
            self.close()
            raise
        with self._locked():
            self._course.computed(group, time.monotonic())
            if not self._closed:
                self._ready[group] = None
            self._act()

    def _settle(self) -> None:
        """Refinements that were given up may be in the middle of it: wait as long as the SLO's margin allows."""
        end = min(self._deadline, time.monotonic() + max(0.01, self._course.margin_s))
        states = self._course.standing
        for load in self._leaving:
            state = states[load.step.group]
            if load.completion is not None and state.level >= 0 and not state.computed:  # else nobody will look at it
                load.completion.settled(seconds_left(end))
        self._leaving.clear()

    def refinements(self) -> Iterator[ReadyGroup]:
        """After the first token: what is not at its finest level yet, each time it is finer, until all is or `timeout`
        is over. Gives way to what others wait for. The memory is refined in place: not while the engine reads it.

        Raises:
            ConfigError: the iteration has not ended yet.
        """
        with self._locked():
            if not self._finished:
                raise ConfigError("first comes the first token: iterate over the stream to its end")
            if not self._closed:
                self._finished = False
                self._course.refine()
                self._act()
        return self

    def close(self) -> None:
        """Cancel what is under way and give the memory back. May be called twice."""
        with self._locked():
            if self._closed:
                return
            self._closed = True
            self._course.close(time.monotonic())
            self._finish()
            for load in list(self._loads.values()):
                self._cancel(load)
            self._ready.clear()
            buffers = [buffer for some in self._buffers.values() for buffer in some]
            self._buffers.clear()
            self._memory = {}
        for buffer in buffers:  # pinned as long as late I/O may touch them
            buffer.release()
        self._finalizer.detach()

    cancel = close

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # The machine behind it. With the lock held.

    def _pump(self) -> None:
        self._act()

    def _act(self) -> None:
        """Do what the course says; nothing once the stream is closed or has ended."""
        if self._finished or self._closed:
            return
        now = time.monotonic()
        found = self._course.decide(now)
        for step in found.cancel:
            load = self._loads.get(step)
            if load is not None:
                self._cancel(load)
        if found.finished:
            self._finish()
            return
        self._wake_at = found.wake_at
        # Before a group is computed those before it are given, and not refined meanwhile.
        first = [group for group in self._ready if found.compute is not None and group < found.compute]
        self._compute = None if first else found.compute
        for step in found.load:
            if step.group not in first:
                self._load(step)
        if self._compute is not None:
            self._wake.set()

    def _finish(self) -> None:
        if not self._finished:
            self._finished = True
            if not self._course.report.counted:
                self._course.report.counted = True
                report = self._course.report
                loaded = [
                    self._chunks[place].spec.raw_bytes
                    for group, level in enumerate(report.levels)
                    if level >= 0
                    for place in self._parts[group].chunks
                ]
                with resume_request(self._request):
                    self._streamer._ended(report, loaded)
        self._wake.set()

    def _load(self, step: Step) -> None:
        """Begin a transfer. What cannot be begun is as good as missing."""
        if any(each.step.group == step.group and not _settled(each) for each in self._leaving):
            self._wake_at = min(self._wake_at, time.monotonic() + _POLL_S)  # its progress is still in use
            return
        part = self._parts[step.group]
        memory = self._memory.get(step.group)
        if memory is None:
            sizes = [self._chunks[i].spec.raw_bytes for i in part.chunks]
            try:
                buffers = self._streamer.store.pool.acquire_many(sizes, 0.0)
            except ClosedError as error:
                self._fail_all(error)
                return
            except PoolExhausted:
                self._streamer.count("no_memory")
                logger.warning("no memory in the pool for a group of %d bytes; it is not loaded", sum(sizes))
                self._fail(step)
                return
            self._buffers[step.group] = buffers
            memory = self._memory[step.group] = [
                buffer.view[:size] for buffer, size in zip(buffers, sizes, strict=True)
            ]
        group = self._course.groups[step.group]
        progress: Sequence[Progress | None] = [None] * len(part.chunks)
        if group.finest:
            progress = self._progress.setdefault(step.group, [Progress() for _ in part.chunks])
        holds: Sequence[Buffer | None] = self._buffers.get(step.group) or [None] * len(part.chunks)
        level = step.level if group.finest else None
        wants = [
            Want(self._chunks[i].key, view, self._chunks[i].spec, hold=hold, progress=each, level=level)
            for i, view, hold, each in zip(part.chunks, memory, holds, progress, strict=True)
        ]
        load = _Load(step, sum(each.fetched_bytes for each in progress if each is not None))
        more = self._course.ready
        self._course.started(step, time.monotonic())
        try:
            with resume_request(self._request):
                load.completion = self._streamer.store.submit_get(
                    wants, priority=Priority.PREFETCH if more else Priority.DEMAND, deadline=self._deadline
                )
        except KVStoreError as error:  # the store is closed, or cannot store such KV: no other want will do better
            self._course.ended(step, time.monotonic(), ok=False)
            self._fail_all(error)
            return
        self._loads[step] = load
        load.completion.add_done_callback(functools.partial(self._done, load))

    def _fail_all(self, error: KVStoreError) -> None:
        """The store takes no wants: there is nothing more to come."""
        self._error = error
        self._course.close(time.monotonic())
        self._finish()

    def _fail(self, step: Step) -> None:
        self._course.missing(step.group)
        self.look_again()

    def _cancel(self, load: _Load) -> None:
        self._leaving.append(load)
        if load.completion is not None:
            self._later.append(load.completion.cancel)  # calls back: not with the lock held

    def _done(self, load: _Load, completion: Completion[Sequence[Outcome]]) -> None:
        """In a thread of the store's."""
        self.post(functools.partial(self._landed, load, time.monotonic()))

    def _landed(self, load: _Load, now: float) -> None:
        completion, step = load.completion, load.step
        if completion is None or self._loads.get(step) is not load:
            return
        ok, cancelled = False, completion.cancelled()
        if not cancelled:
            try:
                ok = all(outcome.status is Status.OK for outcome in completion.result(0))
            except KVStoreError as error:  # on_error="raise": for a stream it is a group that cannot be loaded
                logger.info("a group could not be loaded: %s", error)
        self._loads.pop(step, None)
        self._account(load, now, ok=ok, cancelled=cancelled)
        if ok and not self._closed and not self._course.standing[step.group].computed:
            self._ready[step.group] = None
        self._wake.set()

    def _account(self, load: _Load, now: float, *, ok: bool, cancelled: bool) -> None:
        progress = self._progress.get(load.step.group, ())
        nbytes = sum(each.fetched_bytes for each in progress) - load.fetched if progress else None
        self._course.ended(load.step, now, ok=ok, nbytes=nbytes, cancelled=cancelled)
        if ok:
            self._learn(load.step.group, progress)
        elif self._course.standing[load.step.group].level >= 0 and any(each.level is None for each in progress):
            self._course.spoiled(load.step.group)  # nobody knows what its memory holds
        self._wake.set()

    def _learn(self, group: int, progress: Sequence[Progress]) -> None:
        """The exact sizes of a group's levels are known from its headers."""
        headers = [each.header for each in progress]
        known = [level_sizes(header) for header in headers if header is not None]
        if not known or len(known) != len(headers):
            return
        finest = max(map(len, known))
        sizes = tuple(sum(each[min(level, len(each) - 1)] for each in known) for level in range(finest))
        self._course.resize(group, sizes)
        chunk = self._chunks[self._parts[group].chunks.start]
        header = headers[0]
        if header is not None:
            self._streamer.learn(chunk, header)


def _settled(load: _Load) -> bool:
    return load.completion is None or load.completion.settled()


def _let_go(loads: dict[Step, _Load], buffers: dict[int, Sequence[Buffer]], course: Course) -> None:
    """A stream was dropped without having been closed. In a garbage collection, which may hold any lock but the
    link's: that one is taken for arithmetic only."""
    course.abandon()
    for load in list(loads.values()):
        if load.completion is not None:
            load.completion.cancel()
    for some in list(buffers.values()):
        for buffer in some:
            buffer.release()
