"""An engine as vLLM's connectors see it, without vLLM: requests, blocks, steps, and a model whose KV is a function of
the tokens up to each position."""

from __future__ import annotations

import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from kvstore.errors import ConfigError
from kvstore.integrations.vllm._messages import Isolation
from kvstore.integrations.vllm._paging import Pages
from kvstore.integrations.vllm._scheduler import SchedulerSide
from kvstore.integrations.vllm._worker import WorkerSide
from kvstore.keys import KeyContext
from kvstore.layout import KVLayout
from kvstore.store import Store

LAYOUT = KVLayout(3, 2, 4)
PATIENCE_S = 60.0


@dataclass
class Request:
    """What the connector reads of vLLM's `Request`."""

    request_id: str
    all_token_ids: list[int]
    num_prompt_tokens: int
    cache_salt: str | None = None
    lora_request: Any = None
    mm_features: list[Any] = field(default_factory=list)
    skip_reading_prefix_cache: bool = False
    prompt_embeds: Any = None
    kv_transfer_params: Any = None

    @property
    def prompt_token_ids(self) -> list[int]:
        return self.all_token_ids[: self.num_prompt_tokens]

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)


def request(name: str, tokens: Sequence[int], **fields: Any) -> Request:
    return Request(name, list(tokens), len(tokens), **fields)


def kv_of(tokens: Sequence[int], layer: int, layout: KVLayout = LAYOUT) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V `[tokens, heads, width]`: each position's depends on all tokens up to it."""
    states, state = [], layer + 1
    for token in tokens:
        state = zlib.crc32(token.to_bytes(4, "little"), state)
        states.append(state % 65521)
    flat = torch.tensor(states)[:, None] + torch.arange(layout.elements_per_token) / 64
    cut = layout.num_kv_heads * layout.head_dim
    keys = flat[:, :cut].reshape(len(tokens), layout.num_kv_heads, layout.head_dim)
    return keys, flat[:, cut:].reshape(len(tokens), layout.num_kv_heads, layout.v_head_dim or 0)


def context_of(store: Store, layout: KVLayout = LAYOUT, **shard: int) -> Any:
    def context(isolation: Isolation) -> KeyContext:
        return store.key_context(
            model="m", layout=layout, dtype="float32", revision="r", cache_salt=isolation.cache_salt,
            lora=isolation.lora, extra=(("epoch", isolation.epoch),) if isolation.epoch else (), **shard,
        )  # fmt: skip

    return context


def isolation_of(r: Request) -> Isolation:
    if r.lora_request == "broken":
        raise ConfigError("no weights")
    return Isolation(r.cache_salt, r.lora_request)


class Engine:
    """One engine. `transposed`: pages as vLLM's CPU kernels have them."""

    def __init__(
        self, store: Store, *, block_size: int = 4, blocks: int = 64, asynchronous: bool = False,
        transposed: bool = False, prefill_timeout: float = PATIENCE_S, **options: Any,
    ) -> None:  # fmt: skip
        self.block_size = block_size
        shape = (blocks, LAYOUT.num_kv_heads, block_size, 2 * LAYOUT.head_dim)
        make = Pages.transposed if transposed else Pages.strided
        self.pages = [make(torch.full(shape, float("nan")), LAYOUT, block_size) for _ in range(LAYOUT.num_layers)]
        context = context_of(store)
        self.side = SchedulerSide(
            store, [context], isolation=isolation_of, block_size=block_size,
            asynchronous=asynchronous, **options,
        )  # fmt: skip
        self.worker = WorkerSide(
            store, context, layout=LAYOUT, dtype=torch.float32, pages=self.pages, prefill_timeout=prefill_timeout
        )
        self.free = list(range(blocks))[::-1]
        self.tables: dict[str, list[int]] = {}

    def close(self) -> None:
        self.worker.close()

    def matched(self, r: Request, computed: int = 0) -> int:
        """Ask until there is an answer, as the scheduler does."""
        end = time.monotonic() + PATIENCE_S
        while (found := self.side.matched(r, computed)) is None:
            assert time.monotonic() < end
            time.sleep(0.0005)
        return found

    def admit(self, r: Request, computed: int = 0, *, external: int | None = None) -> int:
        """Allocate blocks for all of a request; returns how many of its tokens are to be loaded."""
        if r.request_id not in self.side._states:
            self.side.arrived(r)
        external = self.matched(r, computed) if external is None else external
        need = -(-r.num_tokens // self.block_size)
        self.tables[r.request_id] = [self.free.pop() for _ in range(need)]
        self.side.allocated(r, self.tables[r.request_id], external)
        return external

    def step(self, work: Sequence[tuple[Request, int, int]]) -> set[int]:
        """One step: each request with its tokens computed before and those of this step. Returns the failed blocks."""
        counts = [(r.request_id, computed, count) for r, computed, count in work]
        orders = self.side.step(counts, self.tables.get)
        self.worker.begin(orders)
        self.worker.start_loads()
        for layer in range(LAYOUT.num_layers):
            self.worker.wait_for_layer(layer)
            for r, computed, count in work:
                keys, values = kv_of(r.all_token_ids[: computed + count], layer)
                table = self.tables[r.request_id]
                self.pages[layer].scatter(table, computed, computed + count, keys[computed:], values[computed:])
            self.worker.save_layer(layer)
        self.worker.finish()
        failed = self.worker.take_failed()
        if failed:
            self.side.failed(failed, self.tables.get)
        self.side.loaded(self.worker.take_finished())
        return failed

    def holds(self, r: Request, begin: int, end: int) -> bool:
        """The pages have the KV of these tokens, in all layers."""
        for layer, pages in enumerate(self.pages):
            keys, values = kv_of(r.all_token_ids[:end], layer)
            got_keys, got_values = torch.zeros(end - begin, 2, 4), torch.zeros(end - begin, 2, 4)
            pages.gather(self.tables[r.request_id], begin, end, got_keys, got_values)
            if not torch.equal(got_keys, keys[begin:]) or not torch.equal(got_values, values[begin:]):
                return False
        return True

    def idle(self) -> tuple[set[str], set[int]]:
        """One step without work. Returns the requests whose load between steps has ended, and the failed blocks."""
        self.worker.begin(self.side.step([], self.tables.get))
        self.worker.start_loads()
        self.worker.finish()
        finished, failed = self.worker.take_finished(), self.worker.take_failed()
        if failed:
            self.side.failed(failed, self.tables.get)
        self.side.loaded(finished)
        return finished, failed

    def wait_for_load(self, r: Request) -> set[int]:
        """Steps without work, until a load between steps has ended. Returns its failed blocks."""
        end, failed = time.monotonic() + PATIENCE_S, set[int]()
        while True:
            finished, now = self.idle()
            failed |= now
            if r.request_id in finished:
                return failed
            assert time.monotonic() < end
            time.sleep(0.0005)

    def end(self, r: Request) -> Any:
        """Returns what the answer tells the next engine."""
        told = self.side.finished(r.request_id)
        self.free += self.tables.pop(r.request_id, [])
        return told

    def drain(self) -> None:
        end = time.monotonic() + PATIENCE_S
        while self.worker.stats()["writer"]["used_bytes"]:
            assert time.monotonic() < end
            time.sleep(0.0005)

    def compute(self, r: Request, *, budget: int = 10**6) -> set[int]:
        """Serve a request's prompt, in steps of `budget` tokens, and again what could not be loaded. Its pages are
        right in the end. Returns the blocks that failed."""
        external = self.admit(r)
        computed, failed_ever = external, set[int]()
        if external and self.side._loading[r.request_id].asynchronous:
            failed = self.wait_for_load(r)
            if failed:
                failed_ever |= failed
                computed = self.first_of(r, failed)
        while computed < r.num_tokens:
            count = min(budget, r.num_tokens - computed)
            failed = self.step([(r, computed, count)])
            failed_ever |= failed
            computed = self.first_of(r, failed) if failed else computed + count
        assert self.holds(r, 0, r.num_tokens)
        self.drain()
        return failed_ever

    def first_of(self, r: Request, failed: set[int]) -> int:
        """The first token of the first failed block, as vLLM goes on from there."""
        return min(n for n, block in enumerate(self.tables[r.request_id]) if block in failed) * self.block_size
