"""Holding a store still at one moment, and looking at what is left in it."""

from __future__ import annotations

import time
from typing import Any

from kvstore.completion import Completion
from kvstore.keys import Key
from kvstore.scheduler import deadline_passed
from kvstore.store import Store
from kvstore.testing import DictBackend, FaultyBackend
from tests.faults.support import SPEC

RAW = SPEC.raw_bytes


def faulty(script: Any = (), *, lanes: int = 1, **options: Any) -> FaultyBackend:
    inner = DictBackend(lanes=lanes)
    return FaultyBackend(inner, script, **options)


def order_of(backend: FaultyBackend, operation: str) -> list[Key]:
    return [key for call in backend.calls_of(operation) for key in dict.fromkeys(call.keys)]


def times(backend: FaultyBackend, operation: str, key: Key) -> int:
    """In how many calls a key was."""
    return order_of(backend, operation).count(key)


def until(condition: Any, seconds: float = 20.0) -> None:
    """Wait for what another thread is about to do."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.0005)


def idle(store: Store) -> bool:
    """Nothing is left anywhere."""
    stats = store.stats()
    lanes = stats["backends"].values()
    return (
        stats["write_queue_bytes"] == 0
        and len(store._machinery.reader.flights) == 0
        and all(each["queued"] == each["busy"] == each["failures"] == 0 for each in lanes)
    )


def expire(store: Store, done: Completion[Any]) -> None:
    """What the timer does to a batch at its deadline, at a moment of the test's choice."""
    for batch in list(store._machinery._batches):
        if batch.completion is done:
            batch.expire(lambda: deadline_passed(None, "test"))
