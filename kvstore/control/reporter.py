"""`Reporter`: tells a controller what comes into a node and what leaves it. One thread, one connection, batches.

Every second at least, it says how the node is; events go along as they come. When the controller does not know the node
(it was started anew, or has missed something) it asks for a snapshot, and gets all that the node has in pages; what
happens meanwhile is told afterwards, from the event before the first page on.
"""

from __future__ import annotations

import base64
import itertools
import logging
import random
import secrets
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from kvstore.errors import KVStoreError
from kvstore.keys import KEY_BYTES

from .client import Client
from .instance import Instance, SnapshotPage
from .journal import Event

__all__ = ["Reporter"]

logger = logging.getLogger("kvstore.control")

_KEYS = 8192  # of one report
_FEW_EVENTS = 4096
_SNAPSHOT_S = 600.0
_BACKOFF_S = (0.2, 5.0)
_HEALTH_S = 1.0
_LAST_S = 1.0  # for the last word, when the node ends


class Reporter:
    """Reports until `close`.

    Args:
        instance: what it reports of.
        controller: a client with the controller's report token. It belongs to the reporter now.
        interval_s: the longest time between two reports.
    """

    def __init__(self, instance: Instance, controller: Client, *, interval_s: float = 1.0) -> None:
        self._instance = instance
        self._client = controller
        self._interval = interval_s
        self._info = asdict(instance.info())
        self._stop = threading.Event()
        self._since = 0
        self._told_usage = -1e9
        self._failing = False
        self._random = random.Random()
        self._thread = threading.Thread(target=self._run, name="kvstore-reporter", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Say that the node takes nobody new any more, if the controller listens, and end."""
        if self._stop.is_set():
            return
        self._stop.set()
        self._instance.journal.wake()
        self._thread.join()
        self._client.close()

    @property
    def failing(self) -> bool:
        """The controller could not be told the last time."""
        return self._failing

    def _run(self) -> None:
        snapshot = True
        failures = 0
        while not self._stop.is_set():
            try:
                snapshot = self._snapshot() if snapshot else self._events()
                if self._failing:
                    logger.warning("the controller at %s answers again", self._client.url)
                failures, self._failing = 0, False
            except KVStoreError as error:
                if not self._failing:
                    logger.warning("the controller at %s cannot be told what is here: %s", self._client.url, error)
                failures, self._failing = failures + 1, True
                low, high = _BACKOFF_S
                self._stop.wait(min(high, low * 2 ** min(failures, 10)) * self._random.uniform(0.5, 1.0))
            except Exception:
                logger.exception("the reporter failed; it goes on with a snapshot")
                snapshot, self._failing = True, True
                self._stop.wait(_BACKOFF_S[1])
        try:
            self._say(self._since, self._since, [], draining=True)
        except KVStoreError:
            pass

    def _events(self) -> bool:
        """Wait for events and report them. True: a snapshot is wanted."""
        found = self._instance.events(self._since, limit=_KEYS, timeout=self._interval)
        if found.gap:
            return True
        if not found.events:
            return self._say(self._since, self._since, [])
        for batch, upto in _batches(found.events, self._since):
            if self._say(self._since, upto, batch):
                return True
            self._since = upto
        return False

    def _snapshot(self) -> bool:
        """Report all that there is. True: it has to be done again."""
        at = self._instance.journal.head
        pages = _packed(self._instance.snapshot(deadline=time.monotonic() + _SNAPSHOT_S))
        name = secrets.token_hex(8)
        page = next(pages, [])
        for number in itertools.count():
            if self._stop.is_set():
                return True
            following = next(pages, None)
            snapshot = {
                "id": name, "page": number, "last": following is None, "at": at,
                "pages": [_event(each.namespace, each.tier, "admit", each.keys) for each in page],
            }  # fmt: skip
            if self._say(at, at, [], snapshot=snapshot):
                return True
            if following is None:
                break
            page = following
        self._since = at
        return False

    def _say(
        self, since: int, upto: int, events: Sequence[dict[str, Any]], *, snapshot: dict[str, Any] | None = None,
        draining: bool = False,
    ) -> bool:  # fmt: skip
        """One report. True: the controller wants a snapshot."""
        now = time.monotonic()
        health = asdict(self._instance.health(deadline=now + _HEALTH_S))
        usage = None
        if now - self._told_usage >= self._interval:
            usage = [asdict(tier) for tier in self._instance.usage()]
        reply = self._client.report(
            {
                "instance": self._info,
                "epoch": self._instance.journal.epoch,
                "health": health | ({"ready": False} if draining else {}),
                "usage": usage,
                "since": since,
                "next": upto,
                "events": list(events),
                "snapshot": snapshot,
            },
            timeout=_LAST_S if draining else None,
        )
        if usage is not None:
            self._told_usage = now
        return reply.snapshot


def _event(namespace: str, tier: str, op: str, keys: bytes) -> dict[str, Any]:
    return {"namespace": namespace, "tier": tier, "op": op, "keys": base64.b64encode(keys).decode()}


def _batches(events: Sequence[Event], since: int) -> Iterator[tuple[list[dict[str, Any]], int]]:
    """Events as reports of at most `_KEYS` keys, each with the number of the last event that is whole by then."""
    batch: list[dict[str, Any]] = []
    room = _KEYS * KEY_BYTES
    whole = since
    for event in events:
        left = event.keys
        while True:
            part, left = left[:room], left[room:]
            batch.append(_event(event.namespace, event.tier, event.op, part))
            room -= len(part)
            if not left:
                whole = event.seq
            if not room or len(batch) >= _FEW_EVENTS:
                yield batch, whole
                batch, room = [], _KEYS * KEY_BYTES
            if not left:
                break
    if batch:
        yield batch, whole


def _packed(pages: Iterator[SnapshotPage]) -> Iterator[list[SnapshotPage]]:
    """Pages put together, and cut, so that each report has about `_KEYS` keys."""
    batch: list[SnapshotPage] = []
    room = _KEYS * KEY_BYTES
    for page in pages:
        left = page.keys
        while left:
            part, left = left[:room], left[room:]
            batch.append(SnapshotPage(page.namespace, page.tier, part))
            room -= len(part)
            if not room or len(batch) >= _FEW_EVENTS:
                yield batch
                batch, room = [], _KEYS * KEY_BYTES
    if batch:
        yield batch
