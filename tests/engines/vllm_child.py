"""Runs in vLLM's environment: a real engine over our connector. `vllm_child.py WHAT JSON` prints JSON."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

os.environ.update(VLLM_CPU_KVCACHE_SPACE="1", VLLM_CPU_OMP_THREADS_BIND="nobind", VLLM_ENABLE_V1_MULTIPROCESSING="0",
                  VLLM_LOGGING_LEVEL="ERROR")  # fmt: skip
sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig

from kvstore.integrations.vllm._keys import hashed
from kvstore.integrations.vllm._messages import Isolation
from kvstore.keys import keys_of

BLOCKS = 64


def open_engine(given: dict[str, Any], **more: Any) -> LLM:
    """An engine of `model` over the store at `url`; `extra` goes into kv_connector_extra_config."""
    transfer = KVTransferConfig(
        kv_connector="KVStoreConnector", kv_role=given.get("role", "kv_both"),
        kv_connector_module_path="kvstore.integrations.vllm", kv_load_failure_policy="recompute",
        kv_connector_extra_config={"remote_url": given["url"], **given.get("extra", {})},
    )  # fmt: skip
    return LLM(
        model=given["model"], dtype="float32", max_model_len=given.get("longest", 2048), enforce_eager=True,
        max_num_seqs=8, max_num_batched_tokens=given.get("batched", 256), enable_prefix_caching=True,
        num_gpu_blocks_override=given.get("blocks", BLOCKS), kv_transfer_config=transfer, **more,
    )  # fmt: skip


class Engine:
    """An engine, and looking into its connector."""

    def __init__(self, given: dict[str, Any], **more: Any) -> None:
        self.llm = open_engine(given, **more)
        self.blocks = given.get("blocks", BLOCKS)
        core = self.llm.llm_engine.engine_core.engine_core
        self.scheduler = core.scheduler
        self.connector = core.scheduler.connector
        self.side = self.connector.scheduler
        self.store = self.connector._shared.store
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        self.worker = get_kv_transfer_group().worker

    def ask(self, prompt: Any, tokens: int = 20, *, reset: bool = True, **fields: Any) -> dict[str, Any]:
        """Generate; then vLLM's own prefix cache is emptied, so that the next hit must come from the store."""
        wanted = {"prompt": prompt} if isinstance(prompt, str) else {"prompt_token_ids": prompt}
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=isinstance(prompt, str))
        begin = time.monotonic()
        out = self.llm.generate([{**wanted, **fields}], params, use_tqdm=False)[0]
        seconds = time.monotonic() - begin
        if reset:
            self.drain()
            assert self.llm.reset_prefix_cache()
        answer, self.last = out.outputs[0], list(out.prompt_token_ids)
        return {"tokens": list(answer.token_ids), "text": answer.text, "cached": out.num_cached_tokens or 0,
                "length": len(self.last), "seconds": seconds}  # fmt: skip

    def drain(self) -> None:
        """Wait until nothing is being written any more."""
        end = time.monotonic() + 60
        while self.worker._writer.stats()["used_bytes"]:
            assert time.monotonic() < end, "puts do not end"
            time.sleep(0.01)

    def keys(self, prompt: list[int]) -> list[Any]:
        hashes = hashed(prompt, chunk_size=self.side.chunk_size, unfull=False)
        return keys_of(hashes, context=self.side._contexts[0](Isolation()))

    def files(self, folder: str, prompt: list[int]) -> list[Path]:
        """Where the file backend has the chunks of a prompt."""
        return [
            next(path for path in Path(folder).rglob(f"*{key.hex()}*") if path.is_file()) for key in self.keys(prompt)
        ]

    def leaked(self) -> dict[str, Any]:
        """What is not given back when nothing runs any more; all zero, or else."""
        self.drain()
        self.worker._prefetcher.announce([])
        end = time.monotonic() + 60
        pool = self.store.stats()["pool"]
        while any(value for name, value in pool.items() if name not in ("total", "nbytes")) and time.monotonic() < end:
            time.sleep(0.01)
            pool = self.store.stats()["pool"]
        blocks = self.scheduler.kv_cache_manager.block_pool
        return {
            "pool": {name: value for name, value in pool.items() if name not in ("total", "nbytes")},
            "blocks": self.blocks - 1 - blocks.get_num_free_blocks(),  # one is vLLM's null block
            "requests": self.side.outstanding + len(self.scheduler.requests),
            "streams": self.worker._prefetcher.stats()["streams"],
        }


def prompt_of(seed: int, tokens: int) -> list[int]:
    return torch.randint(2, 1000, (tokens,), generator=torch.Generator().manual_seed(seed)).tolist()


def cold(given: dict[str, Any]) -> Any:
    """An empty store: computed, then from the store, then in the names of two tenants."""
    engine = Engine(given, skip_tokenizer_init=not isinstance(given["prompt"], str))
    prompt = given["prompt"]
    return {
        "cold": engine.ask(prompt), "again": engine.ask(prompt), "salted": engine.ask(prompt, cache_salt="tenant-a"),
        "salted again": engine.ask(prompt, cache_salt="tenant-a"), "other": engine.ask(prompt, cache_salt="tenant-b"),
        "transformers": same_as_transformers(engine, given, engine.last),
    }  # fmt: skip


def same_as_transformers(engine: Engine, given: dict[str, Any], prompt: list[int]) -> dict[str, float]:
    """The store has what transformers computes: read with the other integration, in the canonical order."""
    from transformers import AutoModelForCausalLM

    from kvstore.integrations.transformers import KVCacheStore

    model = AutoModelForCausalLM.from_pretrained(given["model"], dtype=torch.float32).eval()
    context = engine.side._contexts[0](Isolation())
    kv = KVCacheStore(engine.store, model, model_name=context.model, revision=context.revision)
    assert kv.context.digest == context.digest, "both integrations call the same record by one name"
    cache, hit = kv.load(prompt)
    with torch.no_grad():
        computed = model(torch.tensor([prompt]), use_cache=True).past_key_values
    worst = 0.0
    for mine, theirs in zip(cache.layers, computed.layers, strict=True):
        for a, b in ((mine.keys, theirs.keys), (mine.values, theirs.values)):
            worst = max(worst, float((a - b[:, :, :hit]).abs().max() / b.abs().max()))
    return {"hit": hit, "worst": worst}


def warm(given: dict[str, Any]) -> Any:
    """A new process on a full store; then records are damaged and removed."""
    engine = Engine(
        given,
        skip_tokenizer_init=not isinstance(given["prompt"], str),
        long_prefill_token_threshold=128,  # so that others run while a long prompt is computed
    )
    prompt, folder = given["prompt"], given["folder"]
    found = {"warm": engine.ask(prompt)}
    ids = engine.last
    corrupt(engine.files(folder, ids)[1])
    found["corrupt"] = engine.ask(prompt)
    found["healed"] = engine.ask(prompt)
    engine.files(folder, ids)[1].unlink()
    found["missing"] = engine.ask(prompt)
    found["stored again"] = engine.ask(prompt)
    found["counters"] = {**engine.worker.counters, **engine.side.counters}
    found["burst"] = burst(engine, ids[:768], engine.files(folder, ids)[1])
    found["leaked"] = engine.leaked()
    return found


def corrupt(path: Path) -> None:
    with open(path, "r+b") as file:
        file.seek(path.stat().st_size // 2)
        file.write(b"\xff" * 64)


def burst(engine: Engine, prefix: list[int], path: Path) -> dict[str, Any]:
    """Requests of one step that share blocks, which one of them loads, in vain: it takes several steps to compute them,
    and meanwhile nobody may use them."""
    prompts = [[*prefix, *range(100 + 10 * n, 106 + 10 * n)] for n in range(4)]
    alone = [engine.ask(prompt, 8, cache_salt=f"alone {n}")["tokens"] for n, prompt in enumerate(prompts)]
    corrupt(path)
    before = engine.worker.counters["loads_failed"]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
    llm, texts, told = engine.llm.llm_engine, {}, []
    dirty = engine.side._dirty
    engine.side._dirty = lambda *args: (told.append(dirty(*args)), told[-1])[1]
    for n, prompt in enumerate(prompts):
        llm.add_request(str(n), {"prompt_token_ids": prompt}, params)
    while not all(engine.side._answered(state) for state in engine.side._states.values()):
        time.sleep(0.001)  # so that one step takes them all
    while llm.has_unfinished_requests():
        texts.update({out.request_id: list(out.outputs[0].token_ids) for out in llm.step() if out.finished})
    together = [texts[str(n)] for n in range(len(prompts))]
    engine.side._dirty = dirty
    engine.drain()
    assert engine.llm.reset_prefix_cache()
    again = [engine.ask(prompt, 8)["tokens"] for prompt in prompts]  # from what they stored
    return {"same": together == alone, "again": again == alone, "left": sorted(engine.side._bad),
            "told again": any(requests for requests, _ in told),
            "failed": engine.worker.counters["loads_failed"] - before}  # fmt: skip


def trouble(given: dict[str, Any]) -> Any:
    """The remote is killed, or hangs, while it loads or is asked; then many requests at once, some of them aborted."""
    from tests.node_support import NodeProcess

    with NodeProcess() as node:
        engine = Engine({**given, "url": f"node://{node.address}?breaker_interval=200ms"}, skip_tokenizer_init=True)
        prompt, other = prompt_of(1, 700), prompt_of(2, 700)
        found = {"cold": engine.ask(prompt), "cold other": engine.ask(other)}
        found["crowd"] = crowd(engine)
        found["warm"] = engine.ask(prompt)
        start = engine.worker._start

        def hanging(load: Any) -> Any:
            node.stop()  # what is asked for now is on its way for ever
            return start(load)

        def dying(load: Any) -> Any:
            node.stop()
            begun = start(load)
            threading.Timer(0.3, node.kill).start()
            return begun

        engine.worker._start = hanging
        found["hangs while it loads"] = engine.ask(prompt)
        engine.worker._start = start
        found["hangs"] = engine.ask(other)
        node.go_on()
        # The breaker finds out by itself.
        end = time.monotonic() + 60
        while engine.ask(prompt, 1)["cached"] == 0:
            assert time.monotonic() < end, "the store does not come back"
            time.sleep(0.2)
        engine.worker._start = dying
        found["dies while it loads"] = engine.ask(prompt)
        engine.worker._start = start
        found["is dead"] = engine.ask(other)
        found["leaked"] = engine.leaked()
        found["counters"] = {**engine.worker.counters, **engine.side.counters}
    return found


def crowd(engine: Engine) -> dict[str, Any]:
    """20 requests at once that share prefixes, every third aborted at some step; then each alone, to compare."""
    prompts = [prompt_of(10 + n % 4, 300 + 40 * (n % 4)) + prompt_of(100 + n, 30 + n) for n in range(20)]
    llm = engine.llm.llm_engine
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True, detokenize=False)
    texts: dict[str, list[int]] = {}
    preempted: list[str] = []
    preempt = engine.scheduler._preempt_request
    engine.scheduler._preempt_request = lambda request, *args, **more: (
        preempted.append(request.request_id), preempt(request, *args, **more)
    )[1]  # fmt: skip
    for round_number in range(2):  # the second finds the prefixes in the store
        aborted = {f"{round_number}-{n}" for n in range(20) if n % 3 == 1}
        for n, prompt in enumerate(prompts):
            llm.add_request(f"{round_number}-{n}", {"prompt_token_ids": prompt}, params)
        steps = 0
        while llm.has_unfinished_requests():
            for out in llm.step():
                if out.finished:
                    texts[out.request_id] = list(out.outputs[0].token_ids)
            steps += 1
            if steps % 3 == 0 and aborted:
                llm.abort_request([aborted.pop()])
            assert steps < 20000
        engine.drain()
        assert engine.llm.reset_prefix_cache()
    leaked = engine.leaked()
    alone = {n: engine.ask(prompts[n], 64)["tokens"] for n in (0, 5, 12, 18)}
    same = all(texts[f"{r}-{n}"] == tokens for n, tokens in alone.items() for r in (0, 1) if f"{r}-{n}" in texts)
    return {"finished": len(texts), "same": same, "leaked": leaked, "loads": engine.worker.counters["loads"],
            "preempted": len(preempted)}  # fmt: skip


def tier(given: dict[str, Any]) -> Any:
    """Behind vLLM's own offloading. `damage`: one record is corrupted first."""
    extra = {
        "spec_name": "CpuTieringSpec", "spec_module_path": "vllm_cpu_offload", "cpu_bytes_to_use": 64 << 20,
        "secondary_tiers": [
            {"type": "KVStoreTier", "module_path": "kvstore.integrations.vllm", "remote_url": given["url"]}
        ],
    }  # fmt: skip
    transfer = KVTransferConfig(kv_connector="OffloadingConnector", kv_role="kv_both", kv_connector_extra_config=extra)
    llm = LLM(
        model=given["model"], dtype="float32", max_model_len=2048, enforce_eager=True, max_num_seqs=8,
        enable_prefix_caching=True, num_gpu_blocks_override=BLOCKS, kv_transfer_config=transfer,
        skip_tokenizer_init=True,
    )  # fmt: skip
    if given.get("damage"):
        path = sorted(path for path in Path(given["damage"]).rglob("*") if path.stat().st_size > 1 << 16)[0]
        with open(path, "r+b") as file:
            file.seek(path.stat().st_size // 2)
            file.write(b"\xff" * 64)
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, detokenize=False)
    found = []
    for n in (1, 2):
        out = llm.generate([{"prompt_token_ids": prompt_of(n, 700)}], params, use_tqdm=False)[0]
        found.append({"tokens": list(out.outputs[0].token_ids), "cached": out.num_cached_tokens or 0})
    llm.llm_engine.engine_core.shutdown()  # finishes what is being written
    return {"answers": found}


def tier_alone(given: dict[str, Any]) -> Any:
    """The tier as vLLM's manager drives it, over memory of our own and a store that fails where it is told to."""
    from types import SimpleNamespace as Some

    import numpy as np
    from vllm.v1.kv_offload.base import LookupResult, ReqContext
    from vllm.v1.kv_offload.tiering.base import TransferJob

    from kvstore.integrations.vllm import _settings
    from kvstore.integrations.vllm.tier import KVStoreTier
    from kvstore.store import Store
    from kvstore.testing import DictBackend, Fault, FaultyBackend

    backend = FaultyBackend(DictBackend())
    _settings.Store = lambda config: Store(config, backends=[backend])  # type: ignore[misc,assignment]
    parallel = Some(tp_size=1, pp_size=1, pcp_size=1, dcp_size=1)
    config = Some(model=Some(name="m", dtype="float32"), cache=Some(tokens_per_hash=8, blocks_per_chunk=1),
                  parallel=parallel, kv_cache_layout="LBHNC", groups=())  # fmt: skip
    memory = np.random.default_rng(0).integers(0, 256, (8, 4096), dtype=np.uint8)
    before = memory.copy()
    tier = KVStoreTier(Some(config=config), memoryview(memory), "t", remote_url="memory://unused")
    questions: list[int] = []
    submit_stat = tier._store.submit_stat
    tier._store.submit_stat = lambda asked: (questions.append(len(asked)), submit_stat(asked))[1]
    keys = [b"%032d\0\0\0\0" % n for n in range(4)]

    def look(request: str) -> list[str]:
        """All answers, once no lookup is under way."""
        context = ReqContext(request)
        end = time.monotonic() + 60
        while True:
            answers = [tier.lookup(key, context) for key in keys]
            tier.on_schedule_end(None)
            if LookupResult.RETRY not in answers:
                tier.on_request_finished(context)
                return [answer.name for answer in answers]
            assert time.monotonic() < end
            time.sleep(0.001)

    def job(number: int, which: list[int], chunks: list[int], load: bool) -> Any:
        work = TransferJob(number, [keys[n] for n in which], np.array(chunks), load, ReqContext("r"))
        (tier.submit_load if load else tier.submit_store)(work)
        tier.drain_jobs()
        (result,) = tier.get_finished_jobs()
        good = result.successful_keys
        return [result.job_id, result.success, None if good is None else [keys.index(key) for key in good],
                result.transfer_bytes]  # fmt: skip

    found = {"empty": look("a"), "questions": list(questions), "store": job(1, [0, 1, 2], [0, 1, 2], False)}
    found["stored"] = look("b")
    found["again"] = job(2, [0, 1, 2], [0, 1, 2], False)
    found["load"] = job(3, [0, 1, 2], [4, 5, 6], True)
    found["bytes"] = bool(
        (memory[4:7] == before[:3]).all() and (memory[[0, 1, 2, 3, 7]] == before[[0, 1, 2, 3, 7]]).all()
    )
    backend.inner.records.popitem()
    found["partly"] = job(4, [0, 1, 2], [4, 5, 6], True)
    backend.push(Fault.error(), operation="stat")
    found["trouble"] = look("c")
    backend.push(Fault.hang(), operation="get")
    work = TransferJob(5, keys[:1], np.array([7]), True, ReqContext("r"))
    tier.submit_load(work)
    backend.wait_hung()
    found["hung"] = [tier.has_pending_work(), list(tier.get_finished_jobs())]
    backend.release()
    tier.drain_jobs()
    found["after"] = [result.success for result in tier.get_finished_jobs()]
    found["idle"] = not tier.has_pending_work() and not tier._answers and not tier._asked
    tier.shutdown()
    return found


def main() -> None:
    what, given = sys.argv[1], json.loads(sys.argv[2])
    signal.alarm(int(given.get("alarm", 600)))  # a hang is a failure, not a lost machine
    print(
        json.dumps(
            {"cold": cold, "warm": warm, "trouble": trouble, "tier": tier, "tier_alone": tier_alone}[what](given)
        )
    )


if __name__ == "__main__":
    main()
