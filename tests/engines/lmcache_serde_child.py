"""Runs in LMCache's environment: its MP mode's `SerdeL2AdapterWrapper` over our adapter and our serde.
`lmcache_serde_child.py JSON` prints JSON."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.config import L1ManagerConfig, L1MemoryManagerConfig
from lmcache.v1.distributed.l1_manager import L1Manager
from lmcache.v1.distributed.l2_adapters import create_l2_adapter
from lmcache.v1.distributed.l2_adapters.config import parse_args_to_l2_adapters_config
from lmcache.v1.distributed.l2_adapters.serde_wrapper import SerdeL2AdapterWrapper
from lmcache.v1.distributed.serde import SerdeConfig, create_serde_processor

SHAPE = torch.Size([2, 4, 64, 256])  # K and V, layers, tokens, heads times head size
LAYOUT = MemoryLayoutDesc(shapes=[SHAPE], dtypes=[torch.bfloat16])


def keys_of(numbers: list[int]) -> list[Any]:
    return [ObjectKey(chunk_hash=n.to_bytes(32, "big"), model_name="org/model", kv_rank=1 << 24) for n in numbers]


def reserve(l1: Any, keys: list[Any]) -> list[Any]:
    results = l1.reserve_write(keys=keys, is_temporary=[True] * len(keys), layout_desc=LAYOUT, tag="test")
    return [results[key][1] for key in keys]


def wait(ask: Callable[[], Any]) -> Any:
    end = time.monotonic() + 60
    while time.monotonic() < end:
        answer = ask()
        if answer is not None:
            return answer
        time.sleep(0.005)
    raise TimeoutError("LMCache's adapter gave no answer")


def refusal(options: dict[str, Any]) -> str:
    """What LMCache would stop with."""
    try:
        create_serde_processor(SerdeConfig("kvstore", options)).close()
    except Exception as error:
        return str(error)
    return ""


def main(given: dict[str, Any]) -> Any:
    """Store `numbers` (unless `stored`), damage the files of a folder if asked, look them up and load them. With
    `refuse`: what is said of each of these options of the serde."""
    if given.get("import"):  # for adapters of LMCache's own
        importlib.import_module("kvstore.integrations.lmcache.serde")
    spec = argparse.Namespace(l2_adapter=[json.dumps(given["adapter"])])
    config = parse_args_to_l2_adapters_config(spec).adapters[0]
    memory = L1MemoryManagerConfig(size_in_bytes=64 << 20, use_lazy=False, shm_name="")
    l1 = L1Manager(L1ManagerConfig(memory_config=memory))
    # In the order of LMCache's StorageManager: the adapter first, which imports us; then its serde, by name.
    adapter = create_l2_adapter(config, l1.get_l1_memory_desc())
    if "refuse" in given:
        adapter.close()
        return [refusal(options) for options in given["refuse"]]
    serde = create_serde_processor(config.serde_config)
    adapter = SerdeL2AdapterWrapper(inner=adapter, serde=serde, l1_manager=l1)
    result: dict[str, Any] = {}
    numbers = given["numbers"]
    keys = keys_of(numbers)
    made = torch.randn((len(numbers), *SHAPE), generator=torch.Generator().manual_seed(7)).to(torch.bfloat16)
    if not given.get("stored"):
        objects = reserve(l1, keys)
        for obj, tensor in zip(objects, made, strict=True):
            obj.tensor.copy_(tensor)
        task = adapter.submit_store_task(keys, objects)
        told = wait(lambda: adapter.pop_completed_store_tasks().get(task))
        result["stored"], result["bytes"] = told.is_successful(), told.bytes_transferred()
        l1.finish_write_and_delete(keys, tag="test")
    if given.get("damage"):
        for path in Path(given["damage"]).rglob("*"):
            if path.is_file() and path.stat().st_size > 4096:
                data = bytearray(path.read_bytes())
                data[-10] ^= 1
                path.chmod(0o644)
                path.write_bytes(data)
    ask = keys_of([*numbers, 999])
    lookup = adapter.submit_lookup_and_lock_task(ask, {0: LAYOUT})
    found = wait(lambda: adapter.query_lookup_and_lock_result(lookup))
    result["found"] = [found.test(index) for index in range(len(ask))]
    objects = reserve(l1, ask)
    for obj in objects:
        obj.tensor.fill_(5.0)
    load = adapter.submit_load_task(ask, objects)
    loaded = wait(lambda: adapter.query_load_result(load))
    result["loaded"] = [loaded.test(index) for index in range(len(ask))]
    off = [(obj.tensor - tensor).abs().max().item() for obj, tensor in zip(objects, made, strict=False)]
    result["off"], result["untouched"] = off, bool((objects[-1].tensor == 5.0).all())
    l1.finish_write_and_delete(ask, tag="test")
    adapter.close()
    used, _ = l1.get_memory_usage()
    result["leaked"] = used
    return result


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))), flush=True)
    os._exit(0)  # LMCache's monitors do not end by themselves
