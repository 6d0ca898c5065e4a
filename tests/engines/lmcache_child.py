"""Runs in LMCache's environment: its in-process mode over our connector. `lmcache_child.py WHAT JSON` prints JSON."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import sys
import threading
import time
from typing import Any

import torch
from lmcache.utils import CacheEngineKey, mock_up_broadcast_fn, mock_up_broadcast_object_fn
from lmcache.v1.cache_engine import LMCacheEngineBuilder
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.gpu_connector.mock_gpu_connector import MockGPUConnector
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend
from lmcache.v1.storage_backend.remote_backend import RemoteBackend

SHAPE = (4, 2, 256, 2, 64)  # layers, K and V, tokens, heads, head size
MODEL = "mistralai/Mistral-7B-Instruct-v0.2"  # its CacheGen knows few models by name, and asks a hub about others
PLUGIN = {
    "remote_storage_plugin.kvstore.module_path": "kvstore.integrations.lmcache",
    "remote_storage_plugin.kvstore.class_name": "KVStoreAdapter",
}


def settings(given: dict[str, Any]) -> tuple[Any, Any]:
    """LMCache's configuration: `url` is its remote_url, `plugin` the one under extra_config."""
    extra = dict(PLUGIN, **given.get("extra", {}))
    if "plugin" in given:
        extra["remote_storage_plugin.kvstore.remote_url"] = given["plugin"]
    more = {"remote_url": given["url"]} if "url" in given else {}
    config = LMCacheEngineConfig.from_defaults(
        chunk_size=256, local_cpu=False, max_local_cpu_size=0.5, remote_serde=given.get("serde", "naive"),
        remote_storage_plugins=["kvstore"], extra_config=extra, save_unfull_chunk=given.get("unfull", False),
        blocking_timeout_secs=given.get("timeout", 10), **more,
    )  # fmt: skip
    metadata = LMCacheMetadata(
        model_name=MODEL, world_size=1, local_world_size=1, worker_id=0, local_worker_id=0,
        kv_dtype=torch.bfloat16, kv_shape=(given.get("layers", SHAPE[0]), *SHAPE[1:]), chunk_size=256, role="worker",
    )  # fmt: skip
    return config, metadata


class Remote:
    """LMCache's RemoteBackend on a loop of its own."""

    def __init__(self, given: dict[str, Any]) -> None:
        self.config, self.metadata = settings(given)
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        self.cpu = LocalCPUBackend(self.config, self.metadata, "cpu")
        name = None if "url" in given else "kvstore"
        self.backend = RemoteBackend(self.config, self.metadata, self.loop, self.cpu, "cpu", plugin_name=name)
        assert self.backend.connection is not None, "no connection"

    def filled(self, seed: int, tokens: int = 256) -> Any:
        shapes = [torch.Size([*shape[:2], tokens, *shape[3:]]) for shape in self.metadata.get_shapes()]
        obj = self.cpu.allocate(shapes, self.metadata.get_dtypes())
        values = torch.randn(obj.get_size() // 2, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)
        obj.tensor.view(torch.bfloat16).flatten().copy_(values)
        return obj

    def put(self, keys: list[Any], objects: list[Any]) -> None:
        left = threading.Semaphore(0)
        self.backend.batched_submit_put_task(keys, objects, on_complete_callback=lambda _: left.release())
        for _ in keys:
            assert left.acquire(timeout=60)

    def close(self) -> None:
        self.backend.close()
        self.loop.call_soon_threadsafe(self.loop.stop)


def key(number: int) -> Any:
    chunk_hash = int.from_bytes(hashlib.sha256(b"%d" % number).digest()[:7])
    return CacheEngineKey(MODEL, 1, 0, chunk_hash, torch.bfloat16)


def data(obj: Any) -> str | None:
    return None if obj is None else hashlib.sha256(bytes(memoryview(obj.byte_array).cast("B"))).hexdigest()


def free_bytes(remote: Remote) -> int:
    """What the pool could still give: all of it, if no reference was lost."""
    return int(remote.cpu.memory_allocator.pin_allocator.total_allocated_size)


def lost(remote: Remote, before: int) -> int:
    """Bytes of the pool that are not given back within some seconds, in which backends let go of what they hold."""
    end = time.monotonic() + 10
    while free_bytes(remote) != before and time.monotonic() < end:
        time.sleep(0.005)
    return free_bytes(remote) - before


def put_some(given: dict[str, Any]) -> Any:
    """Store the chunks `numbers` (of `tokens` tokens); their digests."""
    remote = Remote(given)
    before = free_bytes(remote)
    objects = [remote.filled(n, given.get("tokens", 256)) for n in given["numbers"]]
    digests = [data(obj) for obj in objects]
    remote.put([key(n) for n in given["numbers"]], objects)
    failed = remote.backend.put_failed_count
    for obj in objects:
        obj.ref_count_down()
    leaked = lost(remote, before)
    remote.close()
    return {"digests": digests, "failed": failed, "leaked": leaked}


def get_some(given: dict[str, Any]) -> Any:
    """Read the chunks `numbers`: digests by index, the leading run, and what the asynchronous read hands out."""
    remote = Remote(given)
    before = free_bytes(remote)
    keys = [key(n) for n in given["numbers"]]
    begin = time.monotonic()
    run = remote.backend.batched_contains(keys)
    got = remote.backend.batched_get_blocking(keys)
    seconds = time.monotonic() - begin
    digests = [data(obj) for obj in got]
    shapes = [None if obj is None else list(obj.get_shape()) for obj in got]
    for obj in got:
        if obj is not None:
            obj.ref_count_down()
    connection = remote.backend.connection
    future = asyncio.run_coroutine_threadsafe(connection.batched_get_non_blocking("id", keys), remote.loop)
    prefix = future.result(60)
    lengths = len(prefix)
    for obj in prefix:
        obj.ref_count_down()
    one = remote.backend.get_blocking(keys[0])
    single = data(one)
    if one is not None:
        one.ref_count_down()
    ping = asyncio.run_coroutine_threadsafe(connection.ping(), remote.loop).result(60)
    leaked = lost(remote, before)
    result = {
        "digests": digests, "shapes": shapes, "run": run, "prefix": lengths, "single": single, "ping": ping,
        "exists": [connection.exists_sync(k) for k in keys], "leaked": leaked, "seconds": seconds,
    }  # fmt: skip
    if given.get("remove"):
        result["removed"] = [connection.remove_sync(k) for k in keys]
        result["after"] = [connection.exists_sync(k) for k in keys]
    begin = time.monotonic()
    remote.close()
    result["close_seconds"] = time.monotonic() - begin
    return result


def cancel(given: dict[str, Any]) -> Any:
    """Reads and writes that are cancelled `times` times, each after a little longer than the one before: bytes of the
    pool that are lost, and references that are left of objects that were put."""
    remote = Remote(given)
    keys = [key(n) for n in given["numbers"]]
    connection = remote.backend.connection
    before, cancelled, counts = free_bytes(remote), 0, []

    async def cut(call: Any, seconds: float) -> bool:
        task = asyncio.ensure_future(call)
        await asyncio.sleep(seconds)
        task.cancel()
        try:
            got = await task
        except asyncio.CancelledError:
            return True
        for obj in got or ():
            if obj is not None:
                obj.ref_count_down()
        return False

    for n in range(given["times"]):
        seconds = n * 2e-4
        calls = [connection.batched_get(keys), connection.batched_get_non_blocking("id", keys)]
        if n % 4 == 0:
            obj = remote.filled(n)
            obj.ref_count_up()  # LMCache's wrapper of a connector counts down once for each put
            calls.append(connection.put(key(1000 + n), obj))
        for call in calls:
            cancelled += asyncio.run_coroutine_threadsafe(cut(call, seconds), remote.loop).result(60)
        if n % 4 == 0:
            end = time.monotonic() + 10
            while obj.get_ref_count() > 1 and time.monotonic() < end:
                time.sleep(0.001)
            counts.append(obj.get_ref_count())
            obj.ref_count_down()
    leaked = lost(remote, before)
    after = [connection.exists_sync(k) for k in keys]
    remote.close()
    return {"leaked": leaked, "cancelled": cancelled, "after": after, "counts": counts, "put": len(counts)}


def engine(given: dict[str, Any]) -> Any:
    """LMCache's engine: look up, retrieve and store the KV of `tokens` tokens."""
    config, metadata = settings(given)
    made = LMCacheEngineBuilder.get_or_create(
        "test", config, metadata, MockGPUConnector(SHAPE), mock_up_broadcast_fn, mock_up_broadcast_object_fn
    )
    made.post_init()
    tokens = torch.arange(given["tokens"])
    hit = made.lookup(tokens)
    retrieved = int(made.retrieve(tokens).sum()) if hit else 0
    made.store(tokens)
    end = time.monotonic() + 30
    while made.lookup(tokens) < given["expect"] and time.monotonic() < end:
        time.sleep(0.02)
    after = made.lookup(tokens)
    LMCacheEngineBuilder.destroy("test")
    return {"hit": hit, "retrieved": retrieved, "after": after}


def opened(given: dict[str, Any]) -> Any:
    """What our adapter makes of each of the URLs `urls`: the places of its store, or why it refuses."""
    from lmcache.v1.storage_backend.connector import ConnectorContext

    from kvstore.integrations.lmcache import KVStoreAdapter

    config, metadata = settings({"url": given["urls"][0]})
    adapter, found = KVStoreAdapter(), []
    for url in given["urls"]:
        assert adapter.can_parse(url), url
        context = ConnectorContext(url, asyncio.new_event_loop(), None, config, metadata)
        try:
            connector = adapter.create_connector(context)
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
        else:
            found.append(" ".join(place.base for place in connector._client.store.config.remote_url))
            connector._client.close()
    return found


if __name__ == "__main__":
    actions = {"put": put_some, "get": get_some, "cancel": cancel, "engine": engine, "opened": opened}
    result = actions[sys.argv[1]](json.loads(sys.argv[2]))
    print(json.dumps(result), flush=True)
    os._exit(0)  # LMCache's monitors do not end by themselves
