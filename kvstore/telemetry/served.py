"""Which tier served the keys of the reads that this thread made last: a hierarchy is one backend to the store, whose
outcomes do not say it, and the store alone knows how many tokens a record holds."""

from __future__ import annotations

import threading

from kvstore.keys import Key

__all__ = ["SERVED"]


class _Served(threading.local):
    """Of this thread.

    Attributes:
        places: key → place of the tier that had it. Filled by hierarchies, emptied by the store.
    """

    def __init__(self) -> None:
        self.places: dict[Key, int] = {}


SERVED = _Served()
