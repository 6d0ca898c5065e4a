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
from .window import Window, window_of

__all__ = ["DROP_WAIT_S", "Background", "Worker"]

logger = logging.getLogger("kvstore.tiers")

_BATCH = 64
_BATCH_BYTES = 32 << 20
_PROMOTE_BATCH = 16
_MAX_WAITING = 4096  # records that wait to come up; older ones are given up
_PROMOTERS = 2
_PATIENCE_S = 0.5  # of a promotion, for room
_PREFETCH_PATIENCE_S = 5.0
_RETRY_S, _MAX_RETRY_S = 0.25, 30.0
_BUSY_S = 0.02  # somebody else is at work on it
_EXPIRY_S = 5.0
_LIST_SECONDS = 600.0
_ADMIT_SLICE = 2000
_ASK = 256  # records about which a slower tier is asked at a time
_RETRY_ABSENT_S = 5.0  # a record of the queue that was nowhere is looked for again after that
DROP_WAIT_S = 1.0  # for what is leaving the store just now
_ANNOUNCE_SLICE = 2000
_JOIN_S = 2.0

Promotions = deque[tuple[Key, tuple[int, ...]]]
"""Records, and the tiers that each should come up to."""


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
        self._waiting: Promotions = deque()
        self._queued: set[Key] = set()
        self._prefetch: Promotions = deque()
        self._announcing = threading.Lock()
        self._uncut: list[list[Key]] | None = None  # the queue, if no size was known by which to cut the window
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
        self._found: dict[int, deque[Key]] = {
            p: deque() for p in h.bounded if h.tiers[p].write == "back" and p < h.last
        }
        self._checkers = {p: Worker(f"{names[p]}-check", lambda p=p: self._check(p)) for p in self._found}  # type: ignore[misc]
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
        each = (self.relief, self.settling, self._listers, self._checkers)
        return [*(worker for workers in each for worker in workers.values()), *self._promoters]

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
            if place in self._found:  # in one breath: who waits for quiet must not look in between
                self._found[place].extend(info.key for info in found)
            h.changed.notify_all()
        self.relief[place].wake()
        if place in self._found:
            self._checkers[place].wake()
        return None

    def _check(self, place: int) -> float | None:
        """What a tier that brings records down had when its process ended may have been owed: ask the slower ones, and
        owe what none of them has."""
        h = self._h
        tier, found = h.tiers[place], self._found[place]
        while not h.closed:
            with h.lock:
                some = [key for key in islice(found, _ASK) if tier.policy is not None and key in tier.policy]
                taken = min(len(found), _ASK)
            if not taken:
                break
            absent = some
            for lower in range(place + 1, h.last + 1):
                answers = h.ask(lower, "stat", absent, time.monotonic() + MOVE_SECONDS)
                if any(answer.error is not None for answer in answers):
                    return self._backoff(place + 2000)
                absent = [key for key, answer in zip(absent, answers, strict=True) if not answer.ok]
            with h.lock:
                for _ in range(taken):
                    found.popleft()
                if h.tiers[h.last].policy is None:
                    h.loose.difference_update({*some}.difference(absent))
                for key in absent:
                    if tier.policy is not None and key in tier.policy:
                        tier.owe(key, tier.policy.size_of(key))
            if absent:
                self.settling[place].wake()
        self._retry.pop(place + 2000, None)
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
            if not keys:  # all of it is pinned, leased, waited for or at work; or no slower tier took it
                with h.lock:
                    stuck = bool(tier.stuck)
                    tier.stuck.clear()
                self._unwant(place)
                return self._backoff(place) if stuck else _RETRY_S
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
            self._h.tiers[place].wanted = self._h.tiers[place].pressed = 0
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
                blocked = (bool(tier.owed) and not keys) or (bool(tier.unsure) and not unsure)  # by other claims
            if not keys:
                if blocked:
                    return _BUSY_S
                if not tier.unsure:
                    break
                continue
            if not self._mover.bring_down(place, keys):
                return self._backoff(place + 1000)
        self._retry.pop(place + 1000, None)
        return None

    def drain(self, end: float) -> dict[str, int]:
        """Wait until nothing is owed, or until the monotonic time `end`. Returns how many records are, by tier."""
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
            open_to = [dst for dst in range(place) if h.tiers[dst].promote != "never"]
            for key in keys if open_to else ():
                if key not in self._queued and (
                    dsts := tuple([dst for dst in open_to if self._wants_locked(dst, key)])
                ):
                    self._queued.add(key)
                    self._waiting.append((key, dsts))
                    ask = True
            while len(self._waiting) > _MAX_WAITING:
                self._queued.discard(self._waiting.popleft()[0])
        if ask:
            for promoter in self._promoters:
                promoter.wake()

    def _wants_locked(self, dst: int, key: Key) -> bool:
        """Whether a record that was read further down should come up to a tier."""
        tier = self._h.tiers[dst]
        return (tier.policy is None or key not in tier.policy) and tier.second_use(key)

    def _promote(self) -> float | None:
        h = self._h
        while not h.closed:
            if self._can_cut():
                self._announce_again()
            with h.lock:
                queue, patience = self._waiting, _PATIENCE_S
                if self._prefetch:
                    queue, patience = self._prefetch, _PREFETCH_PATIENCE_S
                if not queue:
                    return None
                prefetching = queue is self._prefetch
                dsts = queue[0][1]
                room = int(h.mean_bytes_locked() * min(len(queue), _PROMOTE_BATCH))
            end = time.monotonic() + patience
            for dst in dsts:
                h.make_way(dst, room, end)
            with h.lock:
                if not queue or queue[0][1] != dsts:  # another one took it
                    continue
                policies = [h.tiers[dst].policy for dst in dsts]
                keys: list[Key] = []
                later: Promotions = deque()
                while queue and queue[0][1] == dsts and len(keys) < _PROMOTE_BATCH:
                    key, _ = queue.popleft()
                    self._queued.discard(key)
                    if prefetching and h.window.parents.get(key) in self._absent:  # behind a hole it is of no use
                        self._absent[key] = time.monotonic()
                    elif all(policy is not None and key in policy for policy in policies):
                        continue
                    elif key not in h.claimed:
                        keys.append(key)
                    elif prefetching:
                        later.append((key, dsts))
                queue.extendleft(reversed(later))
                h.claimed.update(keys)
            if not keys:
                if later:
                    return _BUSY_S
                continue
            try:
                nowhere = self._mover.promote(dsts, keys)
            except KVStoreError as error:
                logger.debug("%s: records could not come up: %s", h.name, error)
                continue
            if prefetching:
                with h.lock:
                    self._absent |= dict.fromkeys(nowhere, time.monotonic())
        return None

    def announce(self, waiting: Sequence[Sequence[Key]]) -> None:
        """See `TieredBackend.announce`."""
        h = self._h
        with self._announcing:  # one after the other
            self._announce(waiting)
        with h.changed:
            h.wait_dropped_locked(h.window.rank, time.monotonic() + DROP_WAIT_S)

    def _can_cut(self) -> bool:
        """Whether the window had to be left uncut, and now need not be."""
        if self._uncut is None:
            return False
        with self._h.lock:
            return self._h.mean_bytes_locked() > 0

    def _announce_again(self) -> None:
        """The first records are there, and tell how many of the queue there is room for."""
        with self._announcing:
            if self._uncut is not None:
                self._announce(self._uncut)

    def _announce(self, waiting: Sequence[Sequence[Key]]) -> None:
        """Takes the lock of all for short, not for the length of the queue."""
        h = self._h
        with h.lock:
            capacities, mean = [h.tiers[place].capacity or 0 for place in h.bounded], h.mean_bytes_locked()
        window = window_of(waiting, capacities, mean)
        within = [[key for key in chain if key in window.rank] for chain in waiting]
        with h.lock:
            h.window = window
            self._uncut = None if mean else within
            self._prefetch.clear()
        for place in h.bounded:
            policy = h.tiers[place].policy
            if policy is not None:
                with h.lock:
                    policy.announce(within)
        if self._fetch_ahead(window):
            for promoter in self._promoters:
                promoter.wake()

    def _fetch_ahead(self, window: Window) -> bool:
        """Queue what should come up, the most urgent first. True if there is something."""
        h = self._h
        places = [(number, most, h.bounded[number]) for number, most in enumerate(window.wanted)]
        keys = list(window.rank)
        ask = False
        start, now = 0, time.monotonic()
        with h.lock:
            self._absent = {
                key: when for key, when in self._absent.items() if key in window.rank and now - when < _RETRY_ABSENT_S
            }
        for number, most, dst in places:
            if h.tiers[dst].promote != "never":
                for at in range(start, min(most, len(keys)), _ANNOUNCE_SLICE):
                    with h.lock:
                        missing = [
                            (key, (dst,))
                            for key in keys[at : min(most, at + _ANNOUNCE_SLICE)]
                            if key not in self._absent and not self._within_locked(key, number)
                        ]
                        self._prefetch += missing
                    ask = ask or bool(missing)
            start = max(start, most)
        return ask

    def _within_locked(self, key: Key, number: int) -> bool:
        """Whether the `number`-th bounded tier, or a faster one, has the record."""
        for place in self._h.bounded[: number + 1]:
            policy = self._h.tiers[place].policy
            if policy is not None and key in policy:
                return True
        return False

    def hurry(self) -> None:
        """Try again at once what waits after a failure."""
        h = self._h
        with h.lock:
            self._retry.clear()
            busy = [self.settling[p] for p, tier in enumerate(h.tiers) if tier.owed or tier.unsure]
            busy += [self.relief[p] for p in h.bounded if h.tiers[p].excess() > 0]
            busy += [self._listers[p] for p in h.bounded if h.tiers[p].listing]
            busy += [self._checkers[p] for p, found in self._found.items() if found]
        if self._can_cut():
            busy += self._promoters
        for worker in busy:
            worker.wake()

    def quiet(self) -> bool:
        """Whether nothing waits and nothing is at work. For tests and tools."""
        h = self._h
        if self._can_cut() and self._uncut:
            return False
        with h.lock:
            busy = bool(h.claimed or self._waiting or self._prefetch or any(self._found.values()))
            return not busy and not any(
                tier.owed or tier.unsure or tier.listing or tier.excess() > 0 for tier in h.tiers
            )
