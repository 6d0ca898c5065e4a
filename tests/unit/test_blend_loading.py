"""Chunks loaded layer by layer: what comes, in which order, and what becomes of those that fail."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from kvstore.blend import Blender, ChunkForm, ChunkLoader, ChunksLost
from kvstore.blend.chunks import Placed, token_array
from kvstore.errors import ConfigError
from kvstore.prefetch import Prefetcher
from kvstore.testing import Fault
from tests.unit.blend_world import DOCUMENTS, LAYERS, Kept, backend, blender, damage, form_of, model, store

BEGINS = (300, 20, 150)


@pytest.fixture(scope="module")
def some_model() -> Any:
    return model()


@contextmanager
def shelf(some_model: Any) -> Iterator[tuple[Kept, Blender, ChunkForm, list[Placed], Prefetcher]]:
    """Three stored documents and where they stand, in a prefetcher that loads one layer at a time."""
    kept = backend()
    with store(kept) as opened, Prefetcher(opened, first_group_bytes=1) as prefetcher:
        some = blender(some_model, opened)
        assert some.precompute(DOCUMENTS[:3]).stored == 4
        form = form_of(some)
        placed = sorted(form.place(token_array(d), b) for d, b in zip(DOCUMENTS, BEGINS, strict=False))
        yield kept, some, form, placed, prefetcher


def later() -> float:
    return time.monotonic() + 60


def expected(form: ChunkForm, placed: Sequence[Placed], layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    by_key = {form.key(token_array(document)): token_array(document) for document in DOCUMENTS}
    ks, vs = [], []
    for each in placed:
        k, v = form.compute(by_key[each.key])[layer]
        part = slice(each.first, each.first + each.length)
        ks.append(form.moving(each)(k[0].transpose(0, 1)[part].contiguous()))
        vs.append(v[0].transpose(0, 1)[part])
    return torch.cat(ks), torch.cat(vs)


def test_layers_come_moved_and_in_order(some_model: Any) -> None:
    with shelf(some_model) as (_, _, form, placed, prefetcher):
        placed[1] = placed[1]._replace(first=5, end=placed[1].end - 5)  # of the second a part
        with ChunkLoader(form, placed, prefetcher, deadline=later()) as loader:
            for layer, kv in enumerate(loader.layers()):
                assert kv is not None
                for got, want in zip(kv, expected(form, placed, layer), strict=True):
                    assert torch.equal(got, want)
        assert all(seconds > 0 for seconds in loader.load_s)
        assert all(seconds > 0 for seconds in loader.move_s)
        assert prefetcher.stats()["used_bytes"] == 0


def test_the_papers_calls(some_model: Any) -> None:
    with (
        shelf(some_model) as (_, _, form, placed, prefetcher),
        ChunkLoader(form, placed, prefetcher, deadline=later()) as loader,
    ):
        for layer in range(LAYERS):
            for chunk, each in enumerate(placed):
                kv = loader.fetch_kv(chunk, layer)
                loader.synchronize()
                assert kv is not None
                for got, want in zip(kv, expected(form, [each], layer), strict=True):
                    assert torch.equal(got, want)
        for chunk, layer in ((3, 0), (-1, 0), (0, LAYERS), (0, 0)):
            with pytest.raises(ConfigError):
                loader.fetch_kv(chunk, layer)


def test_layers_that_nobody_needs_are_not_waited_for(some_model: Any) -> None:
    with shelf(some_model) as (_, _, form, placed, prefetcher):
        with ChunkLoader(form, placed, prefetcher, deadline=later()) as loader:
            got = list(loader.layers(lambda layer: layer == 2))
        assert [kv is None for kv in got] == [True, True, False, True]
        assert loader.wait_s[0] == loader.wait_s[1] == loader.wait_s[3] == 0
        assert loader.load_s[0] == loader.load_s[1] == loader.load_s[2] > 0


def test_the_next_layer_is_on_its_way_while_one_is_computed(some_model: Any) -> None:
    with (
        shelf(some_model) as (kept, _, form, placed, prefetcher),
        ChunkLoader(form, placed, prefetcher, deadline=later()) as loader,
    ):
        layers = loader.layers()
        next(layers)
        # Nobody asks for layer 1 yet, and it comes all the same: each record was read for layer 0 and once more.
        reads = 2 * len(placed)
        end = time.monotonic() + 30
        while sum(len(call.keys) for call in kept.calls if call.operation == "get") < reads:
            assert time.monotonic() < end, "the next layer was not asked for"
            threading.Event().wait(0.001)
        assert next(layers) is not None


@pytest.mark.parametrize("layer", range(LAYERS))
@pytest.mark.parametrize("chunk", [0, 2])
def test_a_chunk_damaged_in_any_layer_is_lost_and_no_other(some_model: Any, layer: int, chunk: int) -> None:
    with shelf(some_model) as (kept, _, form, placed, prefetcher):
        damage(kept, placed[chunk].key, layer)
        with ChunkLoader(form, placed, prefetcher, deadline=later()) as loader:
            with pytest.raises(ChunksLost) as lost:
                list(loader.layers())
            assert lost.value.chunks == (chunk,)
            assert lost.value.layer <= layer
            for other in (0, 1, 2):
                assert (loader.fetch_kv(other, lost.value.layer) is None) == (other == chunk)


def test_chunks_that_are_missing_or_late_are_lost(some_model: Any) -> None:
    with shelf(some_model) as (kept, _, form, placed, prefetcher):
        kept.inner.records.pop(placed[1].key)  # type: ignore[attr-defined]
        with ChunkLoader(form, placed, prefetcher, deadline=later()) as loader:
            with pytest.raises(ChunksLost) as lost:
                loader.fetch_layer(0)
            assert lost.value.chunks == (1,)
        kept.push(*[Fault.hang()] * 8, operation="get")
        with ChunkLoader(form, placed[:1], prefetcher, deadline=time.monotonic() + 0.05) as loader:
            with pytest.raises(ChunksLost):
                loader.fetch_layer(0)
            loader.close()
            while not loader._stream.settled(0.01):
                kept.release()


def test_nothing_to_load_is_refused(some_model: Any) -> None:
    with shelf(some_model) as (_, _, form, _, prefetcher), pytest.raises(ConfigError):
        ChunkLoader(form, [], prefetcher, deadline=later())
