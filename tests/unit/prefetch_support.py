"""Stores with prompts in them, for the tests of `kvstore.prefetch`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvstore.backend import Backend
from kvstore.keys import Key
from kvstore.layout import KVLayout
from kvstore.prefetch import LayerPlan, LayerStream, Prefetcher
from kvstore.record import RecordSpec, kv_spec
from kvstore.store import Item, Store
from kvstore.testing import DictBackend, FaultyBackend
from tests.faults.support import chain, payload, soon, store_over

LAYERS = 12
LAYOUT = KVLayout(num_layers=LAYERS, num_kv_heads=2, head_dim=64)
SPEC = kv_spec(LAYOUT, "bfloat16", 16)
SEGMENT = SPEC.sizes[0]
CHUNKS = 6
LAYER = CHUNKS * SEGMENT  # 48 KiB


def records(keys: Sequence[Key], spec: RecordSpec = SPEC) -> list[Item]:
    return [
        Item(key, spec.split(memoryview(payload(key, spec.raw_bytes))), spec, {"dtype": "bfloat16"}) for key in keys
    ]


def fill(backend: Backend, keys: Sequence[Key], **options: Any) -> None:
    """Put the records of these keys behind a store's back; the backend stays open."""
    store = store_over(_Kept(backend), **options)
    with store:
        assert all(outcome.stored for outcome in store.submit_put(records(keys), deadline=soon()).result())


class _Kept(FaultyBackend):
    """A backend that outlives its store."""

    def close(self) -> None:
        return


def filled(count: int = CHUNKS, script: Any = (), *, lanes: int = 4, **options: Any) -> tuple[FaultyBackend, list[Key]]:
    """A scripted backend with a prompt of `count` chunks in it."""
    inner = DictBackend(lanes=lanes)
    keys = chain(count)
    fill(inner, keys)
    return FaultyBackend(inner, script, **options), keys


def expected(key: Key, layer: int) -> bytes:
    return payload(key, SPEC.raw_bytes)[layer * SEGMENT : (layer + 1) * SEGMENT]


def read_all(stream: LayerStream, keys: Sequence[Key], prefix: int = 0) -> int:
    """Read a stream to its end; every view holds what was stored. Returns the hit prefix."""
    for layer in range(stream.num_layers):
        with stream.wait(layer) as loaded:
            views = loaded.views(prefix)
            assert len(views) == stream.hit_prefixes[prefix]
            for key, view in zip(keys, views, strict=False):
                assert view == expected(key, layer)
    return stream.hit_prefixes[prefix]


def single(store: Store, **options: Any) -> Prefetcher:
    """A prefetcher whose groups are single layers."""
    return Prefetcher(store, **{"first_group_bytes": 1, "max_group_bytes": LAYER, **options})


def plan(keys: Sequence[Key], **options: Any) -> LayerPlan:
    return LayerPlan.of(keys, SPEC, **{"deadline": soon(), **options})


def gone(prefetcher: Prefetcher) -> bool:
    """Nothing is left of any stream."""
    stats, pool = prefetcher.stats(), prefetcher.store.pool.stats()
    return stats["used_bytes"] == stats["streams"] == stats["late"] == pool.in_use == pool.pinned == 0
