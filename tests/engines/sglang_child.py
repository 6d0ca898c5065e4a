"""Runs in SGLang's environment: its factory, its host pools and its engine over our backend.
`sglang_child.py WHAT JSON` prints JSON. sglang_shim is on PYTHONPATH."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

os.environ.update(SGLANG_CPU_OMP_THREADS_BIND="0")
sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

from kvstore import open_store

BACKEND = {
    "backend_name": "kvstore", "module_path": "kvstore.integrations.sglang", "class_name": "KVStoreHiCache",
    "interface_v1": 1,
}  # fmt: skip
LAYERS, PAGE, TOKENS = 3, 16, 256


def host_pool(layout: str, *, mla: bool) -> Any:
    """SGLang's own host pool, of 512 tokens, full of noise."""
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
    from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost

    common = {"device_capacity_tokens": TOKENS, "start_layer": 0, "end_layer": LAYERS}
    fixed = {"pin_memory": False, "device": "cpu"}
    host: Any
    if mla:
        device: Any = MLATokenToKVPool(TOKENS, PAGE, torch.bfloat16, 32, 8, LAYERS, "cpu", False)
        info = device._mla_buffer_info()
        host = MLATokenToKVPoolHost(info, 2.0, 0, PAGE, layout, **fixed, target_layer_num=LAYERS, **common)
    else:
        device = MHATokenToKVPool(TOKENS, PAGE, torch.bfloat16, 2, 32, LAYERS, "cpu", False)
        host = MHATokenToKVPoolHost(device._mha_buffer_info(), 2.0, 0, PAGE, layout, **fixed, **common)
    host.kv_buffer.copy_(torch.randn(host.kv_buffer.shape, generator=torch.Generator().manual_seed(1)))
    return host


def made(host: Any, given: dict[str, Any], **fields: Any) -> Any:
    """Our backend, as SGLang's factory makes it and its controller registers the pool."""
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
    from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory

    extra = {**BACKEND, "remote_url": given["url"], "revision": "r", **given.get("extra", {})}
    shape = {
        "tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0, "attn_cp_size": 1,
        "is_mla_model": False, "enable_storage_metrics": True, "is_page_first_layout": host.layout == "page_first",
        "model_name": "m",
    }  # fmt: skip
    config = HiCacheStorageConfig(**{**shape, **fields}, extra_config=extra)
    backend = StorageBackendFactory.create_backend("dynamic", config, host)
    backend.register_mem_pool_host(host)
    return backend


def digest(page: Any) -> str:
    return hashlib.sha256(page.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


def pools(given: dict[str, Any]) -> Any:
    """`case` of all layouts that there are, over a folder of its own each."""
    cases = [(layout, mla) for layout in given["layouts"] for mla in (False, True)]
    return [
        {"layout": layout, "mla": mla, **case({"url": f"{given['url']}/{number}"}, layout, mla)}
        for number, (layout, mla) in enumerate(cases)
    ]


def case(given: dict[str, Any], layout: str, mla: bool) -> dict[str, Any]:
    """Both interfaces over a real host pool of a layout: digests of pages before and after, in other places."""
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageExtraInfo, PoolName
    from sglang.srt.mem_cache.utils import get_hash_str

    host = host_pool(layout, mla=mla)
    backend = made(host, given, is_mla_model=mla)
    backend.register_mem_host_pool_v2(host, PoolName.KV)
    backend.on_host_pools_registered()
    there = host.alloc(4 * PAGE)
    elsewhere = host.alloc(4 * PAGE)
    keys = get_hash_str(list(range(4 * PAGE)), None, page_size=PAGE)

    def digests(indices: Any) -> list[str]:
        return [digest(host.get_data_page(int(indices[n * PAGE]))) for n in range(4)]

    found: dict[str, Any] = {"before": digests(there), "empty": backend.batch_exists(keys)}
    found["stored"] = backend.batch_set_v1(keys[:2], there[: 2 * PAGE])
    info = HiCacheStorageExtraInfo(prefix_keys=keys[:2])
    found["stored"] += backend.batch_set_v1(keys[2:], there[2 * PAGE :], info)
    found["exists"] = backend.batch_exists([*keys, "x"])
    host.kv_buffer.zero_()
    found["loaded"] = backend.batch_get_v1(keys, elsewhere, info)
    found["after"] = digests(elsewhere)
    flats = [host.get_dummy_flat_data_page() for _ in keys]
    found["flat"] = [digest(page) for page in backend.batch_get(keys, flats)]
    found["flat stored"] = backend.batch_set(["y"], [flats[1]]) and backend.exists("y")
    found["flat missing"] = backend.get("x", flats[0]) is None
    host.kv_buffer.zero_()
    found["crossed"] = backend.batch_get_v1(["y"], there[:PAGE])
    found["crossed page"] = digests(there)[0]
    stats = backend.get_stats()
    found["moved"] = [stats.prefetch_pgs, stats.backup_pgs]
    found["bandwidth"] = min(stats.prefetch_bandwidth + stats.backup_bandwidth) > 0
    other = made(host, given, is_mla_model=mla, tp_rank=1, tp_size=2)
    found["other rank"] = other.batch_exists(keys)
    found["other rank stores"] = other.batch_set_v1(["z"], there[:PAGE])
    found["other rank stored"] = other.exists("z")
    alien = made(host, given, is_mla_model=mla, model_name="other")
    found["other model"] = alien.batch_exists(keys)
    alien.batch_set_v1(["z"], there[:PAGE])
    backend.clear()
    found["cleared"] = [backend.batch_exists(keys), alien.exists("z")]
    for each in (backend, other, alien):
        each.close()
    return found


def refused(given: dict[str, Any]) -> Any:
    """What it says of options and pools that it cannot serve."""
    from sglang.srt.mem_cache.hicache_storage import PoolName

    said: dict[str, str] = {}

    def note(what: str, call: Any) -> None:
        try:
            call().close()
        except Exception as error:
            said[what] = f"{type(error).__name__}: {error}"

    host = host_pool("page_first", mla=False)
    note("option", lambda: made(host, {**given, "extra": {"no_option_of_anybody": 1}}))
    note("revision", lambda: made(host, {**given, "extra": {"revision": None}}))
    note("split", lambda: made(host, given, tp_lcm_size=4))
    backend = made(host, given)
    note("swa", lambda: backend.register_mem_host_pool_v2(host, PoolName.SWA))
    backend.close()
    return said


def revisions(given: dict[str, Any]) -> Any:
    """What stands for the weights of published configurations, `settings` of each; and last the kinds of 8-bit KV."""
    from sglang.srt.runtime_context import get_context

    from kvstore.integrations.sglang._identity import dtype_of, revision_of
    from kvstore.integrations.sglang._pages import Pages

    found = []
    for settings in given["settings"]:
        with get_context().override_server_args(**settings):
            try:
                found.append(revision_of())
            except Exception as error:
                found.append(f"{type(error).__name__}: {error}")
    pages = Pages(host_pool("page_first", mla=False))
    pages.dtype = "uint8"
    kinds = []
    for kind in ("fp8_e4m3", "fp8_e5m2"):
        with get_context().override_server_args(kv_cache_dtype=kind):
            kinds.append(dtype_of(pages))
    return [*found, kinds]


class Engine:
    """SGLang's engine with HiCache over `url`."""

    def __init__(self, given: dict[str, Any]) -> None:
        import sglang

        extra = {**BACKEND, "remote_url": given["url"], "prefetch_threshold": PAGE, **given.get("extra", {})}
        self.engine = sglang.Engine(
            model_path=given["model"], json_model_override_args=json.dumps({"architectures": ["LlamaForCausalLM"]}),
            device="cpu", attention_backend="torch_native", sampling_backend="pytorch",
            disable_cuda_graph=True, dtype="float32", context_length=1024, max_total_tokens=4096,
            mem_fraction_static=0.3, skip_server_warmup=True, disable_overlap_schedule=True, log_level="error",
            grammar_backend="none", enable_metrics=True, enable_hierarchical_cache=True, page_size=PAGE,
            hicache_io_backend="direct", hicache_mem_layout=given["layout"], hicache_ratio=2.0,
            hicache_storage_backend="dynamic", hicache_storage_prefetch_policy="wait_complete",
            hicache_storage_backend_extra_config=json.dumps(extra),
        )  # fmt: skip

    def ask(self, prompt: str) -> dict[str, Any]:
        """Generate; then SGLang's own caches are emptied, so that the next hit must come from the store."""
        begin = time.monotonic()
        out = self.engine.generate(prompt, {"temperature": 0, "max_new_tokens": 16, "ignore_eos": True})
        seconds = time.monotonic() - begin
        meta = out["meta_info"]
        details = meta.get("cached_tokens_details") or {}
        return {
            "text": out["text"], "seconds": seconds, "length": meta["prompt_tokens"], "cached": meta["cached_tokens"],
            "from_storage": details.get("storage", 0), "backend": details.get("storage_backend"),
        }  # fmt: skip

    def flush(self) -> None:
        """Empty SGLang's own caches, on device and host."""
        end = time.monotonic() + 60
        while not self.engine.flush_cache().success:
            assert time.monotonic() < end, "the cache cannot be flushed"
            time.sleep(0.05)

    def clear(self) -> None:
        """As its HTTP endpoint clear_hicache_storage_backend does."""
        done = self.engine.loop.run_until_complete(self.engine.tokenizer_manager.clear_hicache_storage())
        assert done.success

    def metrics(self) -> dict[str, float]:
        """What its /metrics would show of all of its processes."""
        from prometheus_client import CollectorRegistry, multiprocess

        registry = CollectorRegistry()
        multiprocess.MultiProcessCollector(registry)
        samples = [sample for metric in registry.collect() for sample in metric.samples]
        found: dict[str, float] = {}
        for sample in samples:
            found[sample.name] = found.get(sample.name, 0.0) + sample.value
        return {name: value for name, value in found.items() if "prefetch" in name or "backup" in name}


def stored_pages(url: str) -> int:
    with open_store(url) as store:
        return sum(len(page) for page in store.list())


def until_stored(url: str, pages: int) -> int:
    """Wait until so many pages are stored."""
    end = time.monotonic() + 60
    while (count := stored_pages(url)) < pages:
        assert time.monotonic() < end, f"{count} of {pages} pages were stored"
        time.sleep(0.05)
    return count


def cold(given: dict[str, Any]) -> Any:
    """An empty store: computed, and then from the store. Then the store is emptied, and filled again."""
    engine = Engine(given)
    found = {"cold": engine.ask(given["prompt"])}
    found["pages"] = until_stored(given["url"], found["cold"]["length"] // PAGE)
    engine.flush()
    found["again"] = engine.ask(given["prompt"])
    engine.flush()
    found["other"] = engine.ask(given["other"])
    until_stored(given["url"], found["pages"] + 1)
    found["metrics"] = engine.metrics()
    engine.clear()
    found["cleared"] = stored_pages(given["url"])
    engine.flush()
    found["after"] = engine.ask(given["prompt"])
    until_stored(given["url"], found["cold"]["length"] // PAGE)
    engine.engine.shutdown()
    return found


def warm(given: dict[str, Any]) -> Any:
    """Another process; then `server`, which has the store, hangs, and then it is dead."""
    engine = Engine(given)
    found = {"warm": engine.ask(given["prompt"])}
    engine.flush()
    Path(os.environ["SHIM_CALLS"]).unlink()
    os.kill(given["server"], signal.SIGSTOP)
    found["hangs"] = engine.ask(given["prompt"])
    engine.flush()
    os.kill(given["server"], signal.SIGKILL)
    found["dead"] = engine.ask(given["prompt"])
    engine.flush()
    found["still dead"] = engine.ask(given["other"])
    engine.flush()
    found["calls"] = [json.loads(line) for line in Path(os.environ["SHIM_CALLS"]).read_text().splitlines()]
    engine.engine.shutdown()
    return found


if __name__ == "__main__":
    actions = {"pools": pools, "refused": refused, "revisions": revisions, "cold": cold, "warm": warm}
    result = actions[sys.argv[1]](json.loads(sys.argv[2]))
    print(json.dumps(result), flush=True)
    os._exit(0)  # SGLang's atexit hooks wait for what is gone
