"""kvstore: remote storage for the KV caches of large language models.

    import kvstore

    with kvstore.open_store("file:///mnt/kv") as store:
        store.put_many({"name": b"bytes"})

Everything here, submodules included, is imported when first used: `import kvstore` itself costs next to nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ._version import __version__

if TYPE_CHECKING:
    from . import integrations as integrations
    from . import testing as testing
    from .backend import Backend, Capability, KeyInfo, Limits, Outcome, Read, Status, Write
    from .buffers import Buffer, BufferPool
    from .completion import Completion, CompletionQueue
    from .config import Config, load_config
    from .errors import (
        BackendError,
        ClosedError,
        ConfigError,
        CorruptRecord,
        KVStoreError,
        PermanentError,
        PoolExhausted,
        TransientError,
    )
    from .keys import Key, KeyContext, MultimodalItem, chunk_hashes, chunk_keys, content_key, opaque_key
    from .layout import KVLayout
    from .record import RecordSpec, kv_spec, opaque_spec
    from .registry import BackendURL, open_backend, parse_url
    from .store import Item, Priority, Progress, Store, Want, open_store

__all__ = [
    "Backend",
    "BackendError",
    "BackendURL",
    "Buffer",
    "BufferPool",
    "Capability",
    "ClosedError",
    "Completion",
    "CompletionQueue",
    "Config",
    "ConfigError",
    "CorruptRecord",
    "Item",
    "KVLayout",
    "KVStoreError",
    "Key",
    "KeyContext",
    "KeyInfo",
    "Limits",
    "MultimodalItem",
    "Outcome",
    "PermanentError",
    "PoolExhausted",
    "Priority",
    "Progress",
    "Read",
    "RecordSpec",
    "Status",
    "Store",
    "TransientError",
    "Want",
    "Write",
    "__version__",
    "chunk_hashes",
    "chunk_keys",
    "content_key",
    "kv_spec",
    "load_config",
    "opaque_key",
    "opaque_spec",
    "open_backend",
    "open_store",
    "parse_url",
]

_MODULES = {
    "backend": ("Backend", "Capability", "KeyInfo", "Limits", "Outcome", "Read", "Status", "Write"),
    "buffers": ("Buffer", "BufferPool"),
    "completion": ("Completion", "CompletionQueue"),
    "config": ("Config", "load_config"),
    "errors": (
        "BackendError", "ClosedError", "ConfigError", "CorruptRecord", "KVStoreError", "PermanentError",
        "PoolExhausted", "TransientError",
    ),
    "keys": ("Key", "KeyContext", "MultimodalItem", "chunk_hashes", "chunk_keys", "content_key", "opaque_key"),
    "layout": ("KVLayout",),
    "record": ("RecordSpec", "kv_spec", "opaque_spec"),
    "registry": ("BackendURL", "open_backend", "parse_url"),
    "store": ("Item", "Priority", "Progress", "Store", "Want", "open_store"),
}  # fmt: skip
_HOME = {name: module for module, names in _MODULES.items() for name in names}
_SUBMODULES = frozenset(
    {
        *_MODULES,
        "blend",
        "codec",
        "control",
        "dropping",
        "eviction",
        "integrations",
        "metrics",
        "options",
        "prefetch",
        "rope",
        "sessions",
        "stream",
        "telemetry",
        "testing",
        "tiers",
        "wrappers",
    }
)


def __getattr__(name: str) -> Any:
    if name in _HOME:
        value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
        globals()[name] = value
        return value
    if name in _SUBMODULES:
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_SUBMODULES})
