"""Recency and arrival: the plain orders."""

from __future__ import annotations

from .base import RecordInfo
from .chain import ChainPolicy, Record

__all__ = ["FIFOPolicy", "LRUPolicy"]


class LRUPolicy(ChainPolicy):
    """Least recently used first, among the records that no resident record names as its parent."""

    name = "lru"


class FIFOPolicy(ChainPolicy):
    """First in, first out, among the records that no resident record names as its parent. Use changes nothing."""

    name = "fifo"

    def _again(self, record: Record, info: RecordInfo | None) -> None:
        return

    def _use(self, record: Record, now: float) -> None:
        return
