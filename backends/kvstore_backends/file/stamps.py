"""When a record was last used, as its modification time on disk."""

from __future__ import annotations

__all__ = ["STEP_NS", "TOUCH_NS", "read_stamp"]

TOUCH_NS = 30 * 10**9
"""Interval in which a record's time of last use is written at most once, in ns."""
STEP_NS = 1000
"""Between neighbours of a chain, in ns."""


def read_stamp(mtime_ns: int, now_ns: int, position: int) -> int:
    """The modification time to set for a record read as number `position` of its batch; 0: it is recent enough.

    It lies in the interval before the current one, mirrored: within one interval the earlier use gets the later time,
    so that heads of a prefix, which are read first, stay newer than its tails, which another batch reads.
    """
    start = now_ns - now_ns % TOUCH_NS
    if mtime_ns > start - TOUCH_NS:
        return 0
    return 2 * start - now_ns - position * STEP_NS
