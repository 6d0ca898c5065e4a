"""Lets SGLang 0.5.23 run its HiCache on a CPU, for tests only: first on PYTHONPATH, so that each of its processes
imports this at start.

A GPU build copies pages between device and host pool with CUDA kernels, on streams. Here both pools are host memory:
the three copies of its "direct" I/O are written out with torch, streams and events of `torch.cpu` do nothing, and
memory is not registered with CUDA. The folders beside this file stand in for torchvision and torchaudio, which do not
load beside vLLM's build of torch.

With SHIM_CALLS, the path of a file, it also writes down how long each call of our backend took: a line of JSON each.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

_POOLS = "sglang.srt.mem_cache.pool_host"


def copy_tokens(
    src_layers: Sequence[Any], dst_layers: Sequence[Any], src_indices: Any, dst_indices: Any, page_size: int
) -> None:
    """Tokens of layers `[tokens, …]` to others."""
    for source, target in zip(src_layers, dst_layers, strict=True):
        target[dst_indices] = source[src_indices].reshape(len(src_indices), *target.shape[1:])


def tokens_to_pages(
    src_ptrs: Sequence[Any], dst_ptrs: Sequence[Any], src_indices: Any, dst_indices: Any, page_size: int
) -> None:
    """Tokens of all layers `[tokens, …]` (those of K, then those of V) to pages `[page, layer, token, …]`."""
    layers = len(src_ptrs) // len(dst_ptrs)
    page, token = dst_indices // page_size, dst_indices % page_size
    for number, source in enumerate(src_ptrs):
        target = dst_ptrs[number // layers]
        target[page, number % layers, token] = source[src_indices].reshape(len(src_indices), *target.shape[3:])


def pages_to_tokens(
    src_ptrs: Sequence[Any], dst_ptrs: Sequence[Any], src_indices: Any, dst_indices: Any, layer_id: int, page_size: int
) -> None:
    """One layer of pages `[page, layer, token, …]` to tokens `[tokens, …]`."""
    page, token = src_indices // page_size, src_indices % page_size
    for source, target in zip(src_ptrs, dst_ptrs, strict=True):
        target[dst_indices] = source[page, layer_id, token].reshape(len(dst_indices), *target.shape[1:])


def _copies(module: ModuleType) -> None:
    module.__dict__.update(
        transfer_kv_direct=copy_tokens,
        transfer_kv_all_layer_direct_lf_pf=tokens_to_pages,
        transfer_kv_per_layer_direct_pf_lf=pages_to_tokens,
    )


def _unregistered(module: ModuleType) -> None:
    module.__dict__["_cuda_host_register"] = lambda *args, **kwargs: None


def _timed(module: ModuleType) -> None:
    path = os.environ.get("SHIM_CALLS")
    if path:
        for name in ("batch_exists", "batch_get_v1", "batch_set_v1"):
            _note_calls(module.KVStoreHiCache, name, path)


def _note_calls(kind: Any, name: str, path: str) -> None:
    inner = getattr(kind, name)

    def call(self: Any, *args: Any) -> Any:
        begin = time.monotonic()
        result = inner(self, *args)
        with open(path, "a") as file:
            file.write(json.dumps([name, time.monotonic() - begin, result]) + "\n")
        return result

    setattr(kind, name, call)


_AFTER: dict[str, Callable[[ModuleType], None]] = {
    f"{_POOLS}.common": _unregistered,
    f"{_POOLS}.mha": _copies,
    f"{_POOLS}.mla": _copies,
    "kvstore.integrations.sglang.storage": _timed,
}


class _Then(Loader):
    """Loads a module as its own loader does, and then changes it."""

    def __init__(self, inner: Loader, change: Callable[[ModuleType], None]) -> None:
        self._inner, self._change = inner, change

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._inner.exec_module(module)
        self._change(module)


class _Finder(MetaPathFinder):
    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        change = _AFTER.get(name)
        spec = PathFinder.find_spec(name, path, target) if change is not None else None
        if spec is not None and spec.loader is not None and change is not None:
            spec.loader = _Then(spec.loader, change)
        return spec


class Event:
    """An event of a stream that has always happened."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Event) -> float:
        return 0.0

    def record(self, stream: Any = None) -> None:
        pass

    wait = synchronize = record


def _nothing(self: Any, *args: Any, **kwargs: Any) -> None:
    pass


def _patch_torch() -> None:
    import torch

    torch.cpu.Event = Event
    for name in ("synchronize", "record_event", "wait_event", "wait_stream"):
        setattr(torch.cpu.Stream, name, _nothing)
    torch.cpu.Stream.query = lambda self: True


sys.meta_path.insert(0, _Finder())
try:
    _patch_torch()
except ImportError:  # another Python, started with this folder on its path
    pass
