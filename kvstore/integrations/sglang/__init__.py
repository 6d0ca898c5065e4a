"""SGLang's HiCache keeps its pages in a store, unmodified: `--hicache-storage-backend dynamic`. docs/sglang.md has the
flags.

`KVStoreHiCache` is written against SGLang 0.5.23, which is imported when the class is used; all but the class itself
knows nothing of it.
"""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["KVStoreHiCache"]


def __getattr__(name: str) -> Any:
    if name == "KVStoreHiCache":
        return getattr(importlib.import_module(".storage", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
