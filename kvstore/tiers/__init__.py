"""Several places as one: host memory, local NVMe, remote storage, the fastest first. See docs/tiers.md.

Names are imported when they are first used: a configuration is read without any of it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .backend import TIER_METRICS, TieredBackend
    from .options import TIER_OPTIONS, TierConfig, parse_tiers
    from .tier import Tier

__all__ = ["TIER_METRICS", "TIER_OPTIONS", "Tier", "TierConfig", "TieredBackend", "parse_tiers"]

_HOME = {
    "TIER_METRICS": "backend",
    "TIER_OPTIONS": "options",
    "Tier": "tier",
    "TierConfig": "options",
    "TieredBackend": "backend",
    "parse_tiers": "options",
}


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{home}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
