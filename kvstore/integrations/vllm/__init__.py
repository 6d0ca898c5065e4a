"""vLLM uses a store for its KV cache, unmodified. docs/vllm.md has the flags.

| class | where vLLM loads it |
|---|---|
| `KVStoreConnector` | `--kv-transfer-config`: `kv_connector` and `kv_connector_module_path` |
| `KVStoreTier` | a tier behind vLLM's own offloading to host memory: `secondary_tiers` |

Written against vLLM 0.32, which is imported when one of them is used.
"""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["KVStoreConnector", "KVStoreTier"]

_WHERE = {"KVStoreConnector": "connector", "KVStoreTier": "tier"}


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        return getattr(importlib.import_module(f".{_WHERE[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
