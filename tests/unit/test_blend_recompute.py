"""Selective recompute: against full prefill, plain reuse, transformers' own layers, and with sentinels."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.errors import ConfigError

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from kvstore.blend.model import BlendModel  # noqa: E402
from kvstore.blend.recompute import Recompute  # noqa: E402
from kvstore.blend.selection import selector  # noqa: E402
from kvstore.blend.terms import MEASURES, SELECTIONS, BlendSettings, LayerKV, Span  # noqa: E402
from tests.unit.blend_model_support import (  # noqa: E402
    KINDS,
    LAYERS,
    LENGTHS,
    cache_name,
    encode,
    full_prefill,
    model_of,
    prompt,
    run_all,
    slow_blend,
    spans_of,
)

QUESTION = LENGTHS[-1]
TOKENS = sum(LENGTHS)
STORED = TOKENS - QUESTION


class World:
    """A model, a prompt of parts, and the stored KV of all of them but the last."""

    def __init__(self, kind: str, **config: Any) -> None:
        self.hf = model_of(kind, **config)
        self.model = BlendModel(self.hf)
        self.parts = prompt()
        self.ids = torch.cat(self.parts)
        self.spans = spans_of(self.parts)
        self.stored = encode(self.model, self.ids, self.spans)
        self.logits, self.kv = full_prefill(self.hf, self.ids)

    def run(self, settings: BlendSettings, **more: Any) -> tuple[Recompute, torch.Tensor]:
        run = Recompute(self.model, self.ids, self.spans, settings, **more)
        return run, run_all(run, self.stored)[1]


@pytest.fixture(scope="module", params=KINDS)
def world(request: pytest.FixtureRequest) -> World:
    return World(request.param)


@pytest.fixture(scope="module")
def llama() -> World:
    return World("llama")


def largest(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one.float() - other.float()).abs().max())


def test_everything_again_is_a_full_prefill(world: World) -> None:
    run, logits = world.run(BlendSettings(ratios=(1.0,)))
    assert not any(map(run.needs, range(LAYERS)))
    assert largest(logits, world.logits[-QUESTION:]) < 1e-4
    for mine, theirs in zip(run.kv, world.kv, strict=True):
        assert largest(mine[0], theirs[0]) < 1e-4
        assert largest(mine[1], theirs[1]) < 1e-4
    assert run.token_layers == 1
    assert run.ratios() == [1.0] * LAYERS


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
         "original_max_position_embeddings": 32},
        {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32},
        {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
    ],
    ids=lambda rope: rope["rope_type"],
)  # fmt: skip
def test_scaled_rotary_embeddings(rope: dict[str, Any]) -> None:
    world = World("llama", rope_parameters=rope)
    run, logits = world.run(BlendSettings(ratios=(1.0,)))
    assert largest(logits, world.logits[-QUESTION:]) < 1e-4
    # K of layer 0 depends on token and position alone: stored and moved, it is what a full prefill has.
    reuse, _ = world.run(BlendSettings(ratios=(0.0,)))
    first = world.kv[0][0]
    assert largest(reuse.kv[0][0], first) < 1e-3 * float(first.abs().max())
    assert run.tokens == TOKENS


def test_nothing_again_is_plain_reuse(world: World) -> None:
    """The question computed by the model itself, over the stored KV at its new place."""
    run, logits = world.run(BlendSettings(ratios=(0.0,)))
    cache = world.model.cache(
        [(kv.k.transpose(0, 1)[None].contiguous(), kv.v.transpose(0, 1)[None].contiguous()) for kv in world.stored]
    )
    with torch.no_grad():
        out = world.hf(world.parts[-1][None], use_cache=True, **{cache_name(world.hf): cache})
    assert largest(logits, out.logits[0]) < 1e-5
    for (k, v), kv in zip(run.kv, world.stored, strict=True):
        assert torch.equal(k[0, :, :STORED].transpose(0, 1), kv.k)
        assert torch.equal(v[0, :, :STORED].transpose(0, 1), kv.v)
    assert [rows.tolist() for rows in run.rows] == [list(range(STORED, TOKENS))] * LAYERS
    assert largest(logits, world.logits[-QUESTION:]) > 0.1  # and that is not the right thing


@pytest.mark.parametrize("measure", MEASURES)
def test_the_most_deviating_tokens_are_kept(world: World, measure: str) -> None:
    run, _ = world.run(BlendSettings(ratios=(0.3,), measure=measure))
    kept = round(0.3 * STORED)
    score = torch.zeros(STORED)
    for name, old, new in zip("kv", world.stored[1], world.kv[1], strict=True):
        if name in measure:
            now = new[0, :, :STORED].transpose(0, 1)
            unit = now.square().sum((1, 2)).mean() if measure == "kv" else 1.0
            score += (now - old).square().sum((1, 2)) / unit
    chosen = sorted(score.topk(kept).indices.tolist()) + list(range(STORED, TOKENS))
    assert run.rows[0].tolist() == list(range(TOKENS))
    assert [rows.tolist() for rows in run.rows[1:]] == [chosen] * (LAYERS - 1)
    assert run.ratios() == [1.0] + [kept / STORED] * (LAYERS - 1)
    assert run.token_layers == pytest.approx((TOKENS + (LAYERS - 1) * len(chosen)) / (TOKENS * LAYERS))


@settings(max_examples=40)
@given(data=st.data())
def test_equals_the_layers_of_transformers(data: st.DataObject) -> None:
    """Any settings, any parts from storage: the same KV and hidden states as with transformers' own layers."""
    world = _world(data.draw(st.sampled_from(KINDS), label="kind"))
    checks = tuple(sorted(data.draw(st.sets(st.integers(1, LAYERS - 1), min_size=1, max_size=3), label="checks")))
    ratios = data.draw(st.lists(st.floats(0, 1), min_size=len(checks), max_size=len(checks)), label="ratios")
    numbers = sorted(data.draw(st.sets(st.integers(0, len(LENGTHS) - 1), min_size=1), label="stored parts"))
    spans = spans_of(world.parts, numbers)
    if spans[0].begin == 0 and data.draw(st.booleans(), label="exact"):
        spans[0] = spans[0]._replace(exact=True)
    stored = encode(world.model, world.ids, spans)
    choice = BlendSettings(
        check_layers=checks,
        ratios=sorted(ratios, reverse=True),
        measure=data.draw(st.sampled_from(MEASURES)),
        selection=data.draw(st.sampled_from(SELECTIONS)),
    )
    run = Recompute(world.model, world.ids, spans, choice)
    _, logits = run_all(run, stored)
    incoming = [run.rows[0], *run.rows[:-1]]
    hidden, kv = slow_blend(world.hf, world.ids, spans, stored, run.rows, incoming)
    for mine, theirs in zip(run.kv, kv, strict=True):
        assert largest(mine[0], theirs[0]) < 1e-4
        assert largest(mine[1], theirs[1]) < 1e-4
    with torch.no_grad():
        assert largest(logits, world.hf.lm_head(hidden[-run.answers :])) < 1e-4
    # Whatever is chosen: rows only become fewer, and what no span covers is always among them, as is the last token.
    covered = {position for span in spans for position in range(span.begin, span.end)} - {TOKENS - 1}
    for earlier, later in itertools.pairwise(run.rows):
        assert set(later.tolist()) <= set(earlier.tolist())
    assert set(range(TOKENS)) - covered <= set(run.rows[-1].tolist())


_WORLDS: dict[str, World] = {}


def _world(kind: str) -> World:
    if kind not in _WORLDS:
        _WORLDS[kind] = World(kind)
    return _WORLDS[kind]


# Sentinels.


class Replayed:
    """Scores of an earlier run again, so that what is chosen stays the same while the prompt changes."""

    def __init__(self, settings: BlendSettings, scores: list[torch.Tensor] | None = None) -> None:
        self.inner = selector(settings)
        self.recorded: list[torch.Tensor] = []
        self.scripted = scores

    def scores(self, evidence: Any) -> torch.Tensor:
        if self.scripted is not None:
            return self.scripted.pop(0)
        self.recorded.append(self.inner.scores(evidence).clone())
        return self.recorded[-1]


@pytest.mark.parametrize("selection", SELECTIONS)
@pytest.mark.parametrize("where", [20, 40, TOKENS - 4])
def test_no_row_sees_a_later_position(world: World, selection: str, where: int) -> None:
    """Other tokens from a position on, and other stored KV there: nothing before it changes, in any layer."""
    choice = BlendSettings(check_layers=(1, 3), ratios=(0.5, 0.3), selection=selection)
    recorder = Replayed(choice)
    clean = Recompute(world.model, world.ids, world.spans, _with(choice, recorder))
    run_all(clean, world.stored)
    ids = world.ids.clone()
    ids[where:] = (ids[where:] + 1) % 1000
    stored = [LayerKV(kv.k.clone(), kv.v.clone()) for kv in world.stored]
    for kv in stored:
        kv.k[where:] = 50.0
        kv.v[where:] = -1000.0
    again = Replayed(choice, [scores.clone() for scores in recorder.recorded])
    poisoned = Recompute(world.model, ids, world.spans, _with(choice, again))
    run_all(poisoned, stored)
    for layer in range(LAYERS):
        assert torch.equal(clean.rows[layer], poisoned.rows[layer])
        before, after = clean.kv[layer], poisoned.kv[layer]
        assert largest(before[0][:, :, :where], after[0][:, :, :where]) < 1e-5
        assert largest(before[1][:, :, :where], after[1][:, :, :where]) < 1e-5
        if where < STORED:  # it did reach what comes later
            assert largest(before[1][:, :, where:], after[1][:, :, where:]) > 1
    assert largest(clean.kv[-1][1][:, :, -1], poisoned.kv[-1][1][:, :, -1]) > 1e-3


def _with(choice: BlendSettings, recorder: Replayed) -> BlendSettings:
    return BlendSettings(choice.check_layers, choice.ratios, choice.measure, recorder, choice.seed)


@pytest.mark.parametrize("selection", sorted(set(SELECTIONS) - {"query"}))
def test_what_is_chosen_does_not_depend_on_the_question(world: World, selection: str) -> None:
    choice = BlendSettings(selection=selection, ratios=(0.3,))
    run, _ = world.run(choice)
    other = Recompute(world.model, torch.cat([*world.parts[:-1], prompt(seed=9)[-1]]), world.spans, choice)
    run_all(other, world.stored)
    assert torch.equal(run.rows[-1], other.rows[-1])


@pytest.mark.parametrize("selection", SELECTIONS)
@pytest.mark.parametrize("ratio", [0.0, 0.01, 0.15, 0.6])
def test_the_question_is_always_fresh(world: World, selection: str, ratio: float) -> None:
    """Stored KV that would win every comparison does not push it out."""
    stored = [LayerKV(kv.k + 100, kv.v - 100) for kv in world.stored]
    run = Recompute(world.model, world.ids, world.spans, BlendSettings(ratios=(ratio,), selection=selection))
    run_all(run, stored)
    for rows in run.rows[1:]:
        assert rows[-QUESTION:].tolist() == list(range(STORED, TOKENS))
        assert len(rows) == QUESTION + round(ratio * STORED)


def test_stored_kv_may_be_overwritten_once_its_layer_is_done(llama: World) -> None:
    """A loader has one buffer for all layers, of any strides."""
    run = Recompute(llama.model, llama.ids, llama.spans, BlendSettings(check_layers=(1, 3), ratios=(0.4, 0.2)))
    _, expected = llama.run(run.settings)
    k, v = (torch.empty(2, 16, STORED).permute(2, 0, 1) for _ in range(2))
    for kv in llama.stored:
        run.layer(LayerKV(k.copy_(kv.k), v.copy_(kv.v)))
        k.fill_(float("nan"))
        v.fill_(float("nan"))
    assert torch.equal(run.finish()[1], expected)


def test_the_computing_generator_takes_one_layer_at_a_time(llama: World) -> None:
    taken: list[int] = []

    def loading() -> Any:
        for layer, kv in enumerate(llama.stored):
            taken.append(layer)
            yield kv

    run = Recompute(llama.model, llama.ids, llama.spans, BlendSettings())
    for layer in run.layers(loading()):
        assert (taken, len(run.rows), len(run.compute_s)) == ([*range(layer + 1)], layer + 1, layer + 1)
    assert taken == list(range(LAYERS))
    assert min(run.compute_s) > 0
    assert torch.equal(run.finish()[1], llama.run(BlendSettings())[1])


# What need not be loaded.


@pytest.mark.parametrize("selection", SELECTIONS)
def test_layers_that_need_no_stored_kv(llama: World, selection: str) -> None:
    choice = BlendSettings(check_layers=(2, 3), ratios=(0.4, 0.2), selection=selection)
    run, logits = llama.run(choice)
    first = 2 if selection == "deviation" else 3
    assert [run.needs(layer) for layer in range(LAYERS)] == [layer >= first for layer in range(LAYERS)]
    given = Recompute(llama.model, llama.ids, llama.spans, choice)
    for layer in range(LAYERS):
        given.layer(LayerKV(llama.stored[layer].k * 0, llama.stored[layer].v * 0) if layer < 2 else llama.stored[layer])
    assert torch.equal(given.finish()[1], logits)


def test_all_layers_are_needed_by_reuse_and_by_exact_spans(llama: World) -> None:
    def needs(spans: list[Span], ratio: float) -> list[bool]:
        run = Recompute(llama.model, llama.ids, spans, BlendSettings(ratios=(ratio,)))
        return [run.needs(layer) for layer in range(LAYERS)]

    exact = [llama.spans[0]._replace(exact=True), *llama.spans[1:]]
    assert needs(llama.spans, 0.0) == [True] * LAYERS
    assert needs(exact, 0.15) == [True] * LAYERS
    assert needs(exact, 1.0) == [True] * LAYERS
    assert needs(llama.spans, 0.15) == [False] + [True] * (LAYERS - 1)
    assert needs([], 0.15) == [False] * LAYERS
    missing = Recompute(llama.model, llama.ids, llama.spans, BlendSettings())
    missing.layer(None)
    with pytest.raises(ConfigError, match="stored KV of layer 1 is missing"):
        missing.layer(None)


def test_exact_spans_are_never_computed(llama: World) -> None:
    spans = [llama.spans[0]._replace(exact=True), *llama.spans[1:]]
    run = Recompute(llama.model, llama.ids, spans, BlendSettings(ratios=(0.3,)))
    run_all(run, llama.stored)
    assert [int(rows[0]) for rows in run.rows][:1] == [LENGTHS[0]]
    assert all(len(rows) == QUESTION + round(0.3 * STORED) for rows in run.rows[1:])
    whole = Recompute(llama.model, llama.ids, spans, BlendSettings(ratios=(1.0,)))
    _, logits = run_all(whole, llama.stored)
    assert largest(logits, llama.logits[-QUESTION:]) < 1e-4
    assert [len(rows) for rows in whole.rows] == [TOKENS - LENGTHS[0]] * LAYERS


def test_missing_parts_are_computed_where_they_stand(llama: World) -> None:
    spans = spans_of(llama.parts, [0, 2])
    run = Recompute(llama.model, llama.ids, spans, BlendSettings(ratios=(0.1,)))
    run_all(run, encode(llama.model, llama.ids, spans))
    middle = set(range(LENGTHS[0], LENGTHS[0] + LENGTHS[1]))
    assert all(middle <= set(rows.tolist()) for rows in run.rows)


def test_no_spans_at_all_is_a_prefill(llama: World) -> None:
    run = Recompute(llama.model, llama.ids, (), BlendSettings())
    _, logits = run_all(run, ())
    assert logits.shape[0] == 1
    assert largest(logits[0], llama.logits[-1]) < 1e-4
    run = Recompute(llama.model, llama.ids, (), BlendSettings(), logits=TOKENS)
    assert largest(run_all(run, ())[1], llama.logits) < 1e-4


def test_a_prompt_that_is_stored_to_its_end(llama: World) -> None:
    """Its last token is computed all the same: somebody must say what comes next."""
    spans = spans_of(llama.parts, range(len(LENGTHS)))
    stored = encode(llama.model, llama.ids, spans)
    for ratio in (0.0, 0.2, 1.0):
        run = Recompute(llama.model, llama.ids, spans, BlendSettings(ratios=(ratio,)))
        _, logits = run_all(run, stored)
        assert logits.shape[0] == 1
        assert all(int(rows[-1]) == TOKENS - 1 for rows in run.rows)
    assert largest(logits[0], llama.logits[-1]) < 1e-4


# Going on from it.


@pytest.mark.parametrize("ratio", [0.0, 0.3, 1.0])
def test_generation_goes_on(world: World, ratio: float) -> None:
    run, logits = world.run(BlendSettings(ratios=(ratio,)))
    cache, _ = run.finish()
    step = int(logits[-1].argmax())
    with torch.no_grad():  # by hand, a token at a time, over a cache of its own
        own = world.model.cache([(k.clone(), v.clone()) for k, v in run.kv])
        expected = [step]
        for _ in range(5):
            out = world.hf(torch.tensor([expected[-1:]]), use_cache=True, **{cache_name(world.hf): own})
            expected.append(int(out.logits[0, -1].argmax()))
    cache.crop(-1)
    out = world.hf.generate(
        world.ids[None], max_new_tokens=6, do_sample=False, pad_token_id=0, **{cache_name(world.hf): cache}
    )
    assert out[0, :TOKENS].tolist() == world.ids.tolist()
    assert out[0, TOKENS:].tolist() == expected
    if ratio == 1.0:
        plain = world.hf.generate(world.ids[None], max_new_tokens=6, do_sample=False, pad_token_id=0)
        assert torch.equal(out, plain)


def test_the_cache_is_the_memory_that_was_allocated(llama: World) -> None:
    run = Recompute(llama.model, llama.ids, llama.spans, BlendSettings())
    places = [(k.data_ptr(), v.data_ptr()) for k, v in run.kv]
    cache, _ = run_all(run, llama.stored)
    assert [(layer.keys.data_ptr(), layer.values.data_ptr()) for layer in cache.layers] == places
    assert cache.get_seq_length() == TOKENS


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(kind: str, dtype: Any) -> None:
    exact, half = _world(kind), World(kind, dtype=dtype)
    for ratio, bound in ((1.0, 0.1), (0.3, 0.15), (0.0, 0.1)):
        # The same tokens as in fp32 are kept, so that only the arithmetic differs.
        choice = BlendSettings(ratios=(ratio,), selection="first")
        run, logits = half.run(choice)
        _, expected = exact.run(choice)
        assert logits.dtype == dtype
        assert {k.dtype for k, _ in run.kv} == {dtype}
        assert float((logits.float() - expected).norm() / expected.norm()) < bound
    run, _ = half.run(BlendSettings(ratios=(0.3,)))
    assert len(run.rows[-1]) == QUESTION + round(0.3 * STORED)


# What is refused.


@pytest.mark.parametrize(
    ("spans", "message"),
    [
        ([Span(5, 5)], "5..5 is empty"),
        ([Span(0, 10), Span(9, 20)], "9..20 is empty, overlaps"),
        ([Span(0, TOKENS + 1)], "leaves the prompt"),
        ([Span(-1, 4)], "-1..4"),
    ],
)
def test_wrong_spans(llama: World, spans: list[Span], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Recompute(llama.model, llama.ids, spans, BlendSettings())


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (torch.zeros(0, dtype=torch.int64), r"shape \[tokens\]"),
        (torch.zeros(1, 4, dtype=torch.int64), r"shape \[tokens\]"),
        (torch.zeros(4), r"integers of shape"),
        ([[1, 2], [3]], "must be integers, not list"),
        ([1, 2, 1024], "token id 1024"),
        ([1, -3], "token id -3"),
    ],
)
def test_wrong_ids(llama: World, ids: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Recompute(llama.model, ids, (), BlendSettings())


def test_wrong_stored_kv(llama: World) -> None:
    run = Recompute(llama.model, llama.ids, llama.spans, BlendSettings())
    k, v = llama.stored[0]
    with pytest.raises(ConfigError, match="stored V of layer 0 has shape"):
        run.layer(LayerKV(k, v[:-1]))
    with pytest.raises(ConfigError, match=r"stored K of layer 0 is torch.bfloat16"):
        run.layer(LayerKV(k.bfloat16(), v))
    assert run.next_layer == 0
    run_all(run, llama.stored)
    with pytest.raises(ConfigError, match="all 5 layers are computed"):
        run.layer(None)


def test_wrong_numbers(llama: World) -> None:
    with pytest.raises(ConfigError, match=r"blend_check_layers=\[5\] names layer 5, but .* has 5"):
        Recompute(llama.model, llama.ids, llama.spans, BlendSettings(check_layers=(LAYERS,)))
    for wrong in (0, QUESTION + 1, "3"):
        with pytest.raises(ConfigError, match="logits="):
            Recompute(llama.model, llama.ids, llama.spans, BlendSettings(), logits=wrong)  # type: ignore[arg-type]
    run = Recompute(llama.model, llama.ids, llama.spans, BlendSettings())
    with pytest.raises(ConfigError, match="0 of 5 layers"):
        run.finish()
    run.layer(None)
    with pytest.raises(ConfigError, match="1 of 5 layers"):
        run.finish()


def test_fewer_logits(llama: World) -> None:
    _, whole = llama.run(BlendSettings())
    _, few = llama.run(BlendSettings(), logits=2)
    assert few.shape[0] == 2
    assert largest(few, whole[-2:]) < 1e-5
