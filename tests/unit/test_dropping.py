"""Dropping tokens: which are kept, how a reduced chunk is stored, and a model that goes on at the right place."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from kvstore.dropping import (
    choose_tokens,
    dropped_extra,
    gather_tokens,
    kept_positions,
    pack_positions,
    reduced_item,
    unpack_positions,
)
from kvstore.errors import ConfigError, CorruptRecord
from kvstore.keys import chunk_keys
from kvstore.layout import KVLayout
from kvstore.record import kv_spec
from kvstore.store import Item, Store, Want
from kvstore.testing import DictBackend
from tests.faults.support import chain, store_over

LAYOUT = KVLayout(3, 2, 8, v_head_dim=4)


# Which tokens.


def test_sinks_recent_ones_and_heavy_hitters_are_kept() -> None:
    scores = np.zeros(20)
    scores[[7, 9, 12]] = (1.0, 5.0, 3.0)
    assert choose_tokens(scores, budget=8, recent=2, sinks=4).tolist() == [0, 1, 2, 3, 9, 12, 18, 19]
    assert choose_tokens(scores, budget=8, recent=2, sinks=4, begin=2).tolist() == [0, 1, 2, 7, 9, 12, 18, 19]
    assert choose_tokens(scores, budget=4, recent=0, sinks=0).tolist() == [0, 7, 9, 12]  # of equal ones the earlier
    assert choose_tokens(scores, budget=0.2, begin=256).tolist() == [9, 12, 18, 19]  # half of the budget is recent
    assert choose_tokens(scores, budget=100).tolist() == [*range(20)]
    layered = np.stack([scores / 4] * 4).reshape(2, 2, 20)
    assert choose_tokens(layered, budget=8, recent=2).tolist() == [0, 1, 2, 3, 9, 12, 18, 19]


@settings(max_examples=100)
@given(
    scores=hnp.arrays(np.float32, st.integers(1, 70), elements=st.floats(0, 1, width=32)),
    budget=st.integers(1, 80) | st.floats(0.01, 1.0),
    begin=st.integers(0, 9),
    recent=st.none() | st.integers(0, 90),
    sinks=st.integers(0, 9),
)
def test_the_budget_is_kept(scores: Any, budget: float | int, begin: int, recent: int | None, sinks: int) -> None:
    kept = choose_tokens(scores, budget=budget, begin=begin, recent=recent, sinks=sinks)
    tokens = len(scores)
    expected = min(budget, tokens) if isinstance(budget, int) else max(1, round(budget * tokens))
    assert len(kept) == expected
    assert kept.dtype == np.int32
    assert (np.diff(kept) > 0).all()
    assert kept[0] >= 0
    assert kept[-1] < tokens
    free = sorted({*range(tokens)} - {*kept.tolist()})
    chosen = [n for n in kept.tolist() if begin + n >= sinks and n < tokens - (expected if recent is None else recent)]
    if free and chosen:  # whatever is neither a sink nor recent was heavier than all that was dropped
        assert min(scores[chosen]) >= max(scores[free])


@pytest.mark.parametrize(
    ("scores", "options", "says"),
    [
        ([1.0, float("nan")], {"budget": 1}, "finite"),
        ([1.0, -1.0], {"budget": 1}, "not negative"),
        (1.0, {"budget": 1}, "shape"),
        ([], {"budget": 1}, "shape"),
        ([1.0], {"budget": 0}, "budget=0"),
        ([1.0], {"budget": 1.5}, "at most 1.0"),
        ([1.0], {"budget": True}, "budget=True"),
        ([1.0], {"budget": float("nan")}, "budget=nan"),
        ([1.0], {"budget": 1, "recent": -1}, "recent=-1"),
    ],
)
def test_scores_and_budgets_that_make_no_sense(scores: Any, options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        choose_tokens(np.asarray(scores), **options)


# Positions in the meta block.


@given(kept=st.sets(st.integers(0, 2047), min_size=1), begin=st.integers(0, 1 << 20))
def test_positions_come_back(kept: set[int], begin: int) -> None:
    packed = pack_positions(sorted(kept), 2048)
    assert len(packed) == 256
    assert unpack_positions(packed, begin, begin + 2048).tolist() == [begin + n for n in sorted(kept)]


@pytest.mark.parametrize("kept", [[], [3, 2], [1, 1], [-1, 2], [0, 10], [[1]], [0.5]])
def test_positions_must_ascend_in_their_range(kept: Any) -> None:
    with pytest.raises(ConfigError, match="kept tokens"):
        pack_positions(kept, 10)


@pytest.mark.parametrize("packed", [b"", b"\0\0", b"\1", b"\1\0\0", b"\0\xfc", [1, 2], None])
def test_maps_that_are_none_are_refused(packed: Any) -> None:
    with pytest.raises(ConfigError, match="meta positions"):
        unpack_positions(packed, 0, 10)


# Records.


def rows(layout: KVLayout, dtype_bytes: int, raw: bytes, tokens: int, kept: Any) -> bytes:
    """What a reduced segment must hold, element by element."""
    k = layout.num_kv_heads * layout.head_dim * dtype_bytes
    v = layout.num_kv_heads * (layout.v_head_dim or 0) * dtype_bytes
    keys = [raw[n * k : (n + 1) * k] for n in kept]
    values = [raw[tokens * k + n * v : tokens * k + (n + 1) * v] for n in kept]
    return b"".join(keys + values)


@pytest.mark.parametrize("layout", [LAYOUT, KVLayout(1, 1, 12, kind="mla")])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "int8"])
def test_gathering_takes_whole_rows(layout: KVLayout, dtype: str) -> None:
    nbytes = {"bfloat16": 2, "float32": 4, "int8": 1}[dtype]
    raw = np.random.default_rng(0).bytes(layout.segment_bytes(30, dtype))
    kept = np.array([0, 3, 4, 29])
    got = gather_tokens(memoryview(raw), layout, dtype, 30, kept)
    assert got.tobytes() == rows(layout, nbytes, raw, 30, kept)
    with pytest.raises(ConfigError, match="30 tokens"):
        gather_tokens(memoryview(raw)[:-1], layout, dtype, 30, kept)
    with pytest.raises(ConfigError, match=r"0\.\.29"):
        gather_tokens(memoryview(raw), layout, dtype, 30, np.array([30]))


@pytest.mark.parametrize("serde", ["raw", "lz4", "shuffle-zstd", "int8", "fp8"])
def test_a_reduced_chunk_comes_back_with_its_positions(serde: str) -> None:
    random = np.random.default_rng(1)
    segments = [random.standard_normal(64 * LAYOUT.elements_per_token).astype("<f4") for _ in range(3)]
    kept = choose_tokens(random.random(64), budget=0.3, begin=128)
    (key,) = chain(1)
    with store_over(DictBackend(), remote_serde=serde) as store:
        item = reduced_item(key, segments, LAYOUT, "float32", kept, begin=128, end=192, meta={"rope": "applied"})
        assert store.submit_put([item]).result()[0].ok
        (head,) = store.submit_heads([key]).result()
        assert head is not None
        assert head.meta()["rope"] == "applied"
        positions = kept_positions(head)
        assert positions is not None
        assert positions.tolist() == [128 + n for n in kept]
        spec = kv_spec(LAYOUT, "float32", len(positions))
        got = bytearray(spec.raw_bytes)
        assert store.submit_get([Want(key, memoryview(got), spec)]).result()[0].ok
        expected = b"".join(rows(LAYOUT, 4, segment.tobytes(), 64, kept) for segment in segments)
        if serde in ("int8", "fp8"):
            assert np.allclose(np.frombuffer(got, "<f4"), np.frombuffer(expected, "<f4"), atol=0.2)
        else:
            assert got == expected
        full = kv_spec(LAYOUT, "float32", 64)  # who thinks that it is full gets nothing
        assert not store.submit_get([Want(key, memoryview(bytearray(full.raw_bytes)), full)]).result()[0].ok
        assert store.stats().get("corrupt_records", 0) == 0


def test_records_of_full_chunks_name_no_positions() -> None:
    keys = chain(2)
    spec = kv_spec(LAYOUT, "float32", 4)
    views = spec.split(memoryview(bytes(spec.raw_bytes)))
    with store_over(DictBackend()) as store:
        store.submit_put([Item(keys[0], views, spec), Item(keys[1], views, spec, {"positions": b"?"})]).result()
        full, odd = store.submit_heads(keys).result()
        assert full is not None
        assert odd is not None
        assert kept_positions(full) is None
        with pytest.raises(CorruptRecord):
            kept_positions(odd)


def test_reduced_chunks_have_keys_of_their_own() -> None:
    with store_over(DictBackend()) as store:
        extras = [(), (dropped_extra(budget=0.5),), (dropped_extra(budget=128),), (dropped_extra(budget=0.5, sinks=0),)]
        contexts = [store.key_context(model="m", layout=LAYOUT, dtype="bf16", extra=extra) for extra in extras]
    keys = {chunk_keys([*range(16)], context=context, chunk_size=16)[0] for context in contexts}
    assert len(keys) == 4


@pytest.mark.parametrize(
    ("change", "says"),
    [({"segments": [b""]}, "1 segments"), ({"end": 65}, "65 tokens"), ({"kept": [64]}, r"0\.\.63")],
)
def test_what_is_no_chunk_is_refused(change: dict[str, Any], says: str) -> None:
    (key,) = chain(1)
    given_: dict[str, Any] = {
        "segments": [bytes(LAYOUT.segment_bytes(64, "bf16"))] * 3, "kept": [1, 2], "begin": 0, "end": 64, **change,
    }  # fmt: skip
    segments, kept = given_.pop("segments"), given_.pop("kept")
    with pytest.raises(ConfigError, match=says):
        reduced_item(key, segments, LAYOUT, "bf16", kept, **given_)


def test_rope_is_said_where_it_is_given() -> None:
    (key,) = chain(1)
    segments = [bytes(LAYOUT.segment_bytes(64, "bf16"))] * 3

    def meta(**more: Any) -> dict[str, Any]:
        return dict(reduced_item(key, segments, LAYOUT, "bf16", [1, 2], begin=0, end=64, **more).meta or {})

    assert "rope" not in meta()
    assert meta(rope="applied")["rope"] == "applied"
    assert meta(rope="none", meta={"rope": "none", "mine": 1}) == {**meta(rope="none"), "mine": 1}
    assert meta(meta={"rope": "applied"})["rope"] == "applied"
    with pytest.raises(ConfigError, match="rope='yes' is not known"):
        meta(rope="yes")
    with pytest.raises(ConfigError, match="meta says rope='none'"):
        meta(rope="applied", meta={"rope": "none"})


def test_a_miss_has_no_kept_positions() -> None:
    with store_over(DictBackend()) as store:
        (head,) = store.submit_heads(chain(1)).result()
    with pytest.raises(ConfigError, match="no header: submit_heads gives None"):
        kept_positions(head)


# A model that goes on.


def _prefill(model: Any, ids: Any) -> tuple[Any, Any]:
    """The cache, and the attention that each token received, over all layers, heads and queries."""
    import torch

    model.set_attn_implementation("eager")
    with torch.no_grad():
        out = model(ids, use_cache=True, output_attentions=True)
    scores = torch.stack([layer[0] for layer in out.attentions]).sum(dim=(0, 1, 2))
    return getattr(out, _argument(model)), scores.numpy()


def _argument(model: Any) -> str:
    """Under which name this version of transformers takes and gives a cache."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def _segments(cache: Any) -> list[np.ndarray[Any, Any]]:
    """A cache as raw segments, token-major."""
    return [
        np.concatenate([part[0].transpose(0, 1).contiguous().numpy().ravel() for part in (layer.keys, layer.values)])
        for layer in cache.layers
    ]


def _restored(store: Store, key: Any, layout: KVLayout) -> tuple[Any, Any]:
    """A cache of what is stored, and the positions of its tokens."""
    import torch
    from transformers import DynamicCache

    (head,) = store.submit_heads([key]).result()
    assert head is not None
    positions = kept_positions(head)
    assert positions is not None
    spec = kv_spec(layout, "float32", len(positions))
    raw = bytearray(spec.raw_bytes)
    assert store.submit_get([Want(key, memoryview(raw), spec)]).result()[0].ok
    cache = DynamicCache()
    for number, view in enumerate(spec.split(memoryview(raw))):
        values = torch.frombuffer(view, dtype=torch.float32)
        shape = (2, len(positions), layout.num_kv_heads, layout.head_dim)
        keys, vals = values.view(shape).transpose(1, 2)[:, None]
        cache.update(keys.clone(), vals.clone(), number)
    return cache, positions


def _go_on(model: Any, cache: Any, steps: int, position: int, *, mask: Any = None) -> Any:
    """Greedy tokens and logits from `position` on; the next token is 7. `mask`: of the tokens in the cache."""
    import torch

    token, logits = torch.tensor([[7]]), []
    for step in range(steps):
        seen = torch.ones(1, cache.get_seq_length() + 1, dtype=torch.long)
        if mask is not None:
            seen[0, : len(mask)] = mask
        with torch.no_grad():
            out = model(
                token,
                attention_mask=seen,
                position_ids=torch.tensor([[position + step]]),
                use_cache=True,
                **{_argument(model): cache},
            )
        logits.append(out.logits[0, -1])
        token = logits[-1].argmax()[None, None]
    return torch.stack(logits)


@pytest.mark.parametrize("serde", ["raw", "shuffle-zstd", "int8"])
@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_generation_goes_on_from_a_reduced_cache(kind: str, serde: str) -> None:
    """Exactly as from the full cache with the dropped tokens masked: the kept ones are where they were."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from kvstore.testing.models import tiny_model

    model = tiny_model(kind)
    layout = KVLayout(2, 2, 16)
    ids = torch.randint(2, 1000, (1, 48), generator=torch.Generator().manual_seed(5))
    cache, scores = _prefill(model, ids)
    kept = choose_tokens(scores, budget=0.5)
    assert kept[:4].tolist() == [0, 1, 2, 3]
    (key,) = chain(1)
    with store_over(DictBackend(), remote_serde=serde) as store:
        item = reduced_item(key, _segments(cache), layout, "float32", kept, begin=0, end=48)
        assert item.spec.raw_bytes * 2 == kv_spec(layout, "float32", 48).raw_bytes
        assert store.submit_put([item]).result()[0].ok
        reduced, positions = _restored(store, key, layout)
        astray, _ = _restored(store, key, layout)
    assert positions.tolist() == kept.tolist()
    mask = torch.zeros(48, dtype=torch.long)
    mask[torch.from_numpy(kept).long()] = 1
    got = _go_on(model, reduced, 6, 48)
    want = _go_on(model, cache, 6, 48, mask=mask)
    scale = float(want.std())
    off = float((got[0] - want[0]).square().mean().sqrt())
    assert off < (1e-4 if serde != "int8" else 0.05) * scale
    if serde != "int8":
        assert torch.equal(got.argmax(-1), want.argmax(-1))
        assert torch.allclose(got, want, atol=1e-3 * scale)
    wrong = _go_on(model, astray, 1, len(kept))  # as if the kept tokens were all there ever were
    assert float((wrong[0] - want[0]).square().mean().sqrt()) > max(2 * off, 0.05 * scale)
