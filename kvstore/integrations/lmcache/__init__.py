"""LMCache uses our store, unmodified: four classes for its plug points. docs/lmcache.md has a configuration for each.

| class | where LMCache loads it |
|---|---|
| `KVStoreL2` | MP mode: `lmcache server --l2-adapter '{"type": "native_plugin", …}'`, its most stable surface |
| `KVStoreL2Adapter` | MP mode: the same with `"type": "plugin"`; also knows usage, and tells listeners |
| `KVStoreAdapter` | in-process mode: `remote_storage_plugins`; claims `kvstore+SCHEME://` URLs of `remote_url` |
| `KVStoreConnector` | in-process mode: what `KVStoreAdapter` makes |

`serde` registers our codecs for the MP mode. Where that is loaded, which is where LMCache imports this package to make
an adapter, it is registered here, before LMCache asks for it.

Written against LMCache 0.5.6, which is imported when a class that needs it is used; `KVStoreL2` never needs it.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

from .native import KVStoreL2

__all__ = ["KVStoreAdapter", "KVStoreConnector", "KVStoreL2", "KVStoreL2Adapter"]

_WHERE = {"KVStoreL2Adapter": "plugin", "KVStoreAdapter": "remote", "KVStoreConnector": "remote"}


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        return getattr(importlib.import_module(f".{_WHERE[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


if "lmcache.v1.distributed.serde" in sys.modules:
    try:
        importlib.import_module(".serde", __name__)
    except ImportError as error:  # a release whose serde is another: the adapters work all the same
        from ._client import logger

        logger.warning("serde kvstore cannot be used with this LMCache: %s", error)
