"""Integrations with engines. Each imports its engine, when it is first used; nothing else in kvstore does."""

from __future__ import annotations

import importlib
from typing import Any

_MODULES = ("lmcache", "sglang", "transformers", "vllm")


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
