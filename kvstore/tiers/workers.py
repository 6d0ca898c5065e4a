"""The background: a few threads that are started when there is work for them, and none per record."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice

from kvstore.backend import Capability, KeyInfo
from kvstore.errors import BackendError, ClosedError, KVStoreError
from kvstore.keys import Key
from kvstore.scheduler import seconds_left

from .hierarchy import Hierarchy
from .moving import MOVE_SECONDS, Mover
from .window import window_of

__all__ = ["Background", "Worker"]

logger = logging.getLogger("kvstore.tiers")

_BATCH = 64
_BATCH_BYTES = 32 << 20
_PROMOTE_BATCH = 16
_MAX_WAITING = 4096  # records that wait to come up; older ones are given up
_PROMOTERS = 2
_PATIENCE_S = 0.5  # of a promotion, for room
_PREFETCH_PATIENCE_S = 5.0
_RETRY_S, _MAX_RETRY_S = 0.25, 30.0
_EXPIRY_S = 5.0
_LIST_SECONDS = 600.0
_ADMIT_SLICE = 2000
_RETRY_ABSENT_S = 5.0  # a record of the queue that was nowhere is looked for again after that
_ANNOUNCE_WAIT_S = 1.0
_JOIN_S = 2.0


class Worker:
    """A daemon thread that runs `step` whenever it is woken.

    Args:
        step: does some work; returns after how many seconds to run again (0: at once), or None: when it is woken.
    """

    def __init__(self, name: str, step: Callable[[], float | None]) -> None:
        self._name = name
        self._step = step
        self._event = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._stopped = False

    def wake(self) -> None:
        """Run soon. Never blocks, never raises."""
        if self._event.is_set():
            return
        self._event.set()
        if self._thread is None:
            with self._lock:
                if self._thread is None and not self._stopped:
                    thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                    try:
                        thread.start()
                    except RuntimeError:  # no more threads: the next one who wakes it tries again
                        self._event.clear()
                    else:
                        self._thread = thread

    def _run(self) -> None:
        pause: float | None = None
        while True:
            self._event.wait(pause)
            self._event.clear()
            if self._stopped:
                return
            try:
                pause = self._step()
            except ClosedError:
                pause = _RETRY_S
            except Exception:
                logger.exception("%s: a step failed", self._name)
                pause = _MAX_RETRY_S

    def stop(self) -> None:
        with self._lock:
            self._stopped = True
        self._event.set()

    def join(self, end: float) -> bool:
        """Wait until the monotonic time `end` for the thread. False if it is still busy."""
        thread = self._thread
        if thread is None or thread is threading.current_thread():
            return True
        thread.join(seconds_left(end))
        return not thread.is_alive()


class Background:
    """All that goes on behind the calls of one `TieredBackend`."""

    def __init__(self, hierarchy: Hierarchy, mover: Mover) -> None:
        self._h = h = hierarchy
        self._mover = mover
        self._waiting: deque[tuple[Key, int]] = deque()  # (key, tier it should come up to)
        self._queued: set[Key] = set()
        self._prefetch: deque[tuple[Key, int]] = deque()
        self._absent: dict[Key, float] = {}  # of the window: when it was looked for in vain
        self._retry: dict[int, float] = {}
        names = [f"kvstore-tier{place}" for place in range(h.last + 1)]
        self.relief = {p: Worker(f"{names[p]}-relief", lambda p=p: self._relieve(p)) for p in h.bounded}  # type: ignore[misc]
        self.settling = {
            p: Worker(f"{names[p]}-down", lambda p=p: self._settle(p))  # type: ignore[misc]
            for p in range(h.last + 1)
        }
        self._listers = {p: Worker(f"{names[p]}-list", lambda p=p: self._list(p)) for p in h.bounded}  # type: ignore[misc]
        self._promoters = [Worker(f"kvstore-tiers-up{n}", self._promote) for n in range(_PROMOTERS)]
        h.wake_relief, h.wake_settling = self.relief, self.settling

    def start(self) -> None:
        """Find out what lies in the bounded tiers already."""
        h = self._h
        for place in h.bounded:
            tier = h.tiers[place]
            if Capability.LIST in tier.backend.capabilities:
                tier.listing = True
                self._listers[place].wake()
            if tier.expires:
                self.relief[place].wake()

    @property
    def _workers(self) -> list[Worker]:
        return [*self.relief.values(), *self.settling.values(), *self._listers.values(), *self._promoters]

    def stop(self) -> None:
        for worker in self._workers:
            worker.stop()

    def join(self) -> None:
        """Wait a little for the threads to end; one that hangs in a backend is a daemon, and ends with it."""
        end = time.monotonic() + _JOIN_S
        for worker in self._workers:
            if not worker.join(end):
                logger.warning("%s: a thread still waits for a backend", self._h.name)

    # What was there before.

    def _list(self, place: int) -> float | None:
        """List a tier and take over what is found: the least recently used first, so that the order is kept."""
        h = self._h
        tier = h.tiers[place]
        found: list[KeyInfo] = []
        try:
            for page in tier.backend.list(deadline=time.monotonic() + _LIST_SECONDS):
                found += page
                if h.closed:
                    return None
        except BackendError as error:
            logger.warning("tier %s: what lies there cannot be listed: %s", tier.name, error)
            return self._backoff(-1 - place)
        found.sort(key=lambda info: info.last_used)
        for at in range(0, len(found), _ADMIT_SLICE):
            with h.lock:
                policy = tier.policy
                if policy is None:
                    return None
                for info in found[at : at + _ADMIT_SLICE]:
                    if info.key not in policy and info.key not in tier.gone:
                        h.loosen_locked(info.key, place)
                        tier.admit(info.key, info.nbytes, place, None, None)
        with h.changed:
            tier.listing = False
            tier.gone.clear()
            h.changed.notify_all()
        self.relief[place].wake()
        return None

    # Room, and age.

    def _relieve(self, place: int) -> float | None:
        """Remove what has expired, then move down until the low watermark is reached."""
        h = self._h
        tier = h.tiers[place]
        self._expire(place)
        while not h.closed:
            with h.lock:
                excess = tier.excess()
                keys = h.pick_locked(place, excess) if excess > 0 else []
                if place == h.last:
                    h.dropping.update(keys)
            if excess <= 0:
                break
            if not keys:  # all of it is pinned, leased, waited for or at work
                self._unwant(place)
                return _RETRY_S
            if place == h.last:
                gone = h.drop(place, keys, time.monotonic() + MOVE_SECONDS)
            else:
                gone = self._mover.demote(place, keys)
            with h.changed:
                h.changed.notify_all()
            if not gone:
                self._unwant(place)
                return self._backoff(place)
        self._retry.pop(place, None)
        self._unwant(place)
        return _EXPIRY_S if tier.expires else None

    def _unwant(self, place: int) -> None:
        with self._h.changed:
            self._h.tiers[place].wanted = 0
            self._h.changed.notify_all()

    def _expire(self, place: int) -> None:
        h = self._h
        tier = h.tiers[place]
        if tier.policy is None or not tier.expires:
            return
        while not h.closed:
            with h.lock:
                due = [
                    key
                    for key in islice(tier.policy.expired(), 4 * _BATCH)
                    if key not in h.window.rank and key not in tier.owed and not tier.leased(key)
                ]
                keys = h.take_locked(due[:_BATCH])
                h.dropping.update(keys)
            if not keys or not h.drop(place, keys, time.monotonic() + MOVE_SECONDS, why="expired"):
                return

    def _backoff(self, what: int) -> float:
        pause = self._retry.get(what, _RETRY_S)
        self._retry[what] = min(2 * pause, _MAX_RETRY_S)
        return pause

    # Down.

    def _settle(self, place: int) -> float | None:
        """Bring down what is owed, and find out about what nobody knows."""
        h = self._h
        tier = h.tiers[place]
        while not h.closed:
            with h.lock:
                unsure = h.take_locked(islice(tier.unsure, _BATCH))
            if unsure:
                try:
                    found = h.look_again(place, unsure, time.monotonic() + MOVE_SECONDS)
                finally:
                    h.give(unsure)
                if all(outcome.error is not None for outcome in found):
                    return self._backoff(place + 1000)
            with h.lock:
                keys: list[Key] = []
                room = _BATCH_BYTES
                for key, nbytes in islice(tier.owed.items(), 4 * _BATCH):
                    if key not in h.claimed:
                        keys.append(key)
                        room -= nbytes
                    if room <= 0 or len(keys) >= _BATCH:
                        break
                h.claimed.update(keys)
                blocked = bool(tier.owed) and not keys
            if not keys:
                if not blocked and not tier.unsure:
                    break
                if blocked:
                    return 0.01
                continue
            if not self._mover.bring_down(place, keys):
                return self._backoff(place + 1000)
        self._retry.pop(place + 1000, None)
        return None

    def drain(self, end: float) -> dict[str, int]:
        """Wait until nothing is owed, or until the monotonic time `end`. Returns the bytes that are, by tier."""
        h = self._h
        self.hurry()
        while True:
            with h.changed:
                left = {tier.name: len(tier.owed) for tier in h.tiers if tier.owed}
                if not left or h.closed or time.monotonic() >= end:
                    return left
                h.changed.wait(min(0.05, seconds_left(end)))
            self.hurry()

    # Up.

    def used(self, keys: Sequence[Key], place: int) -> None:
        """Records were read from a tier that is not the fastest: some should come up."""
        h = self._h
        ask = False
        with h.lock:
            for dst in range(place):
                tier = h.tiers[dst]
                if tier.promote == "never":
                    continue
                for key in keys:
                    if (
                        key not in self._queued
                        and (tier.policy is None or key not in tier.policy)
                        and tier.second_use(key)
                    ):
                        self._queued.add(key)
                        self._waiting.append((key, dst))
                        ask = True
            while len(self._waiting) > _MAX_WAITING:
                self._queued.discard(self._waiting.popleft()[0])
        if ask:
            for promoter in self._promoters:
                promoter.wake()

    def _promote(self) -> float | None:
        h = self._h
        while not h.closed:
            with h.lock:
                queue, patience = self._waiting, _PATIENCE_S
                if self._prefetch:
                    queue, patience = self._prefetch, _PREFETCH_PATIENCE_S
                if not queue:
                    return None
                prefetching = queue is self._prefetch
                dst = queue[0][1]
                room = int(h.mean_bytes_locked() * min(len(queue), _PROMOTE_BATCH))
            h.make_way(dst, room, time.monotonic() + patience)
            with h.lock:
                if not queue or queue[0][1] != dst:  # another one took it
                    continue
                policy = h.tiers[dst].policy
                keys: list[Key] = []
                while queue and queue[0][1] == dst and len(keys) < _PROMOTE_BATCH:
                    key, _ = queue.popleft()
                    self._queued.discard(key)
                    if key not in h.claimed and (policy is None or key not in policy):
                        keys.append(key)
                h.claimed.update(keys)
            if not keys:
                continue
            try:
                self._mover.promote(dst, keys)
            except KVStoreError as error:
                logger.debug("%s: records could not come up: %s", h.name, error)
            if prefetching:
                now = time.monotonic()
                with h.lock:
                    for key in keys:
                        if not h.resident_locked(key):
                            self._absent[key] = now
        return None

    def announce(self, waiting: Sequence[Sequence[Key]]) -> None:
        """See `TieredBackend.announce`."""
        h = self._h
        with h.changed:
            capacities = [h.tiers[place].capacity or 0 for place in h.bounded]
            h.window = window = window_of(waiting, capacities, h.mean_bytes_locked())
            within = [[key for key in chain if key in window.rank] for chain in waiting]
            for place in h.bounded:
                policy = h.tiers[place].policy
                if policy is not None:
                    policy.announce(within)
            now = time.monotonic()
            self._absent = {
                key: when for key, when in self._absent.items() if key in window.rank and now - when < _RETRY_ABSENT_S
            }
            self._prefetch.clear()
            for key, rank in window.rank.items():
                number = window.place(rank)
                if number >= len(h.bounded) or key in self._absent:
                    continue
                dst = h.bounded[number]
                if h.tiers[dst].promote != "never" and not self._within_locked(key, number):
                    self._prefetch.append((key, dst))
            ask = bool(self._prefetch)
            # What is about to leave the store was chosen before it was known to be needed: it goes first, or stays.
            end = time.monotonic() + _ANNOUNCE_WAIT_S
            while not h.dropping.isdisjoint(window.rank) and not h.closed and time.monotonic() < end:
                h.changed.wait(seconds_left(end))
        if ask:
            for promoter in self._promoters:
                promoter.wake()

    def _within_locked(self, key: Key, number: int) -> bool:
        """Whether the `number`-th bounded tier, or a faster one, has the record."""
        h = self._h
        return any(key in policy for place in h.bounded[: number + 1] if (policy := h.tiers[place].policy) is not None)

    def hurry(self) -> None:
        """Try again at once what waits after a failure."""
        h = self._h
        with h.lock:
            self._retry.clear()
            busy = [self.settling[p] for p, tier in enumerate(h.tiers) if tier.owed or tier.unsure]
            busy += [self.relief[p] for p in h.bounded if h.tiers[p].excess() > 0]
            busy += [self._listers[p] for p in h.bounded if h.tiers[p].listing]
        for worker in busy:
            worker.wake()

    def quiet(self) -> bool:
        """Whether nothing waits and nothing is at work. For tests and tools."""
        h = self._h
        with h.lock:
            busy = bool(h.claimed or self._waiting or self._prefetch)
            return not busy and not any(
                tier.owed or tier.unsure or tier.listing or tier.excess() > 0 for tier in h.tiers
            )
