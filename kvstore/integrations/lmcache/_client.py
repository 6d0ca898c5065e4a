"""What LMCache's surfaces have in common: how they open a store, and how they name its objects."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import Any

from kvstore.integrations import _opaque

__all__ = ["SIZES", "logger", "names_of", "open_client"]

logger = logging.getLogger("kvstore.integrations.lmcache")

SIZES = ("exact", "at_most")
"""How long a view must be: as the record; or at least so long, for what a serde wrote, which says its own length."""


def open_client(
    surface: str, remote_url: Any, config_file: str | os.PathLike[str] | None, options: dict[str, Any]
) -> _opaque.Client:
    """A client for one of LMCache's surfaces.

    LMCache's own environment and file describe LMCache, not our store: `LMCACHE_*` is not read here.

    Args:
        surface: part of every name, so that what different surfaces call by one name stays apart.

    Raises:
        ConfigError: as `kvstore.open_store`; or `backend_options`, or `on_error: raise`, among the options.
    """
    env = {name: value for name, value in os.environ.items() if not name.startswith("LMCACHE_")}
    return _opaque.open_client("LMCache", f"lmcache/{surface}/", remote_url, config_file, options, env=env)


def names_of(keys: Sequence[Any]) -> list[str]:
    """LMCache's object keys as text, as `native_plugin` writes them, so that both surfaces share records."""
    return [
        f"{key.model_name}@{key.kv_rank:08x}@{key.object_group_id:x}@{key.chunk_hash.hex()}"
        + (f"@{key.cache_salt}" if key.cache_salt else "")
        for key in keys
    ]
