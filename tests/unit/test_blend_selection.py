"""Settings of blending, and who is chosen."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import ConfigError

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from kvstore.blend.model import BlendModel  # noqa: E402
from kvstore.blend.recompute import Recompute  # noqa: E402
from kvstore.blend.selection import Evidence, FirstTokens, RandomTokens, best, selector  # noqa: E402
from kvstore.blend.terms import BlendSettings, Span  # noqa: E402
from tests.unit.blend_model_support import LENGTHS, encode, full_prefill, model_of, prompt, run_all, spans_of  # noqa: E402


def evidence(positions: list[int], spans: list[Span], **made: Any) -> Evidence:
    def nothing() -> torch.Tensor:
        raise AssertionError("this selector has no business with it")

    return Evidence(1, torch.tensor(positions), spans, made.get("deviation", nothing), made.get("attention", nothing))


# Settings.


def test_defaults() -> None:
    settings = BlendSettings()
    assert settings.check_layers == (1,)
    assert settings.ratios == (0.15,)
    assert settings.ratio == 0.15
    assert settings.selection == "deviation"


def test_one_ratio_for_several_layers_is_the_last() -> None:
    settings = BlendSettings(check_layers=[1, 4, 9], ratios=[0.15])
    assert settings.ratios == pytest.approx((0.2, 0.175, 0.15))
    assert BlendSettings(check_layers=[1, 2], ratios=[0.9]).ratios == (1.0, 0.9)
    assert BlendSettings(check_layers=[1, 2], ratios=[0]).ratios == (0.0, 0.0)


def test_another_ratio() -> None:
    settings = BlendSettings(check_layers=(1, 4), ratios=(0.3, 0.15), measure="k", seed=5)
    assert settings.at(0.3).ratios == pytest.approx((0.6, 0.3))
    assert settings.at(0.6).ratios == pytest.approx((1.0, 0.6))
    assert settings.at(1).ratios == (1.0, 1.0)
    assert settings.at(0).ratios == (0.0, 0.0)
    assert settings.at(0).at(0.2).ratios == (0.2, 0.2)
    assert (settings.at(0.3).measure, settings.at(0.3).seed, settings.at(0.3).check_layers) == ("k", 5, (1, 4))
    with pytest.raises(ConfigError, match=r"blend_recompute_ratios=1.5 must lie between 0 and 1"):
        settings.at(1.5)


def test_equal_ratios_stay_equal() -> None:
    for number in range(1, 1000):
        ratios = BlendSettings(check_layers=(1, 2), ratios=(0.15, 0.15)).at(number / 1000).ratios
        assert ratios[0] == pytest.approx(ratios[1])


@given(
    ratios=st.lists(st.floats(0, 1), min_size=1, max_size=4),
    other=st.floats(0, 1),
)
def test_ratios_never_rise(ratios: list[float], other: float) -> None:
    layers = tuple(range(1, len(ratios) + 1))
    settings = BlendSettings(check_layers=layers, ratios=sorted(ratios, reverse=True)).at(other)
    assert settings.ratio == other
    assert list(settings.ratios) == sorted(settings.ratios, reverse=True)
    assert all(0 <= ratio <= 1 for ratio in settings.ratios)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"check_layers": ()}, r"blend_check_layers=\(\) must be a list of at least one"),
        ({"check_layers": 1}, "blend_check_layers=1 must be a list"),
        ({"check_layers": (0, 2)}, r"blend_check_layers=\[0, 2\] must be rising"),
        ({"check_layers": (2, 2)}, "must be rising"),
        ({"check_layers": (1.5,)}, "must be a list of integers"),
        ({"check_layers": (True,)}, "must be a list of integers"),
        ({"ratios": (1.1,)}, r"blend_recompute_ratios=\[1.1\] must lie between 0 and 1"),
        ({"ratios": (-0.1,)}, "must lie between 0 and 1"),
        ({"ratios": (float("nan"),)}, "must be a list of numbers"),
        ({"ratios": "0.1"}, "must be a list"),
        ({"ratios": (0.2, 0.1)}, "has 2 ratios for 1 check layers"),
        ({"check_layers": (1, 2), "ratios": (0.1, 0.2)}, "must not rise"),
        ({"measure": "q"}, "blend_measure='q' is not known; use k, v, kv"),
        ({"selection": "best"}, "blend_selection='best' is not known; use deviation, first, query, random"),
        ({"selection": object()}, r"has no method scores\(evidence\)"),
        ({"seed": -1}, "blend_seed=-1"),
        ({"seed": 0.5}, "blend_seed=0.5"),
    ],
)
def test_wrong_settings(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        BlendSettings(**fields)


# The best.


@given(
    values=st.lists(st.integers(-3, 3), min_size=1, max_size=40),
    count=st.integers(0, 40),
)
def test_the_best_in_order_and_the_first_of_equals(values: list[int], count: int) -> None:
    count = min(count, len(values))
    chosen = best(torch.tensor(values), count, len(values)).tolist()
    assert chosen == sorted(sorted(range(len(values)), key=lambda index: (-values[index], index))[:count])


@pytest.mark.parametrize(
    "scores", [torch.zeros(3), torch.zeros(4, 1), [1, 2, 3, 4], torch.zeros(4, dtype=torch.cfloat)]
)
def test_scores_that_are_none(scores: Any) -> None:
    with pytest.raises(ConfigError, match=r"must give scores of shape \(4,\)"):
        best(scores, 2, 4)


@pytest.mark.parametrize(
    "scores",
    [torch.tensor([1.0, float("nan"), 3, 4]), torch.zeros(4).to_sparse(), torch.zeros(4, device="meta")],
    ids=["nan", "sparse", "meta"],
)
def test_scores_that_cannot_be_ordered(scores: Any) -> None:
    with pytest.raises(ConfigError, match="no numbers"):
        best(scores, 2, 4)


def test_scores_may_be_infinite_or_answers() -> None:
    assert best(torch.tensor([1.0, math.inf, -math.inf, 4]), 2, 4).tolist() == [1, 3]
    assert best(torch.tensor([False, True, False, True]), 3, 4).tolist() == [0, 1, 3]


# Selectors.


def test_first_tokens_of_each_chunk() -> None:
    spans = [Span(2, 8), Span(8, 10), Span(15, 25)]
    positions = [*range(2, 10), *range(15, 25)]
    where = evidence(positions, spans)
    assert where.offsets.tolist() == [0, 1, 2, 3, 4, 5, 0, 1, *range(10)]
    kept = best(FirstTokens().scores(where), 7, len(positions))
    assert [positions[index] for index in kept] == [2, 3, 4, 8, 9, 15, 16]


def test_random_tokens() -> None:
    spans = [Span(0, 400)]
    everywhere = evidence(list(range(400)), spans)
    one, again = RandomTokens(7).scores(everywhere), RandomTokens(7).scores(everywhere)
    assert torch.equal(one, again)
    assert not torch.equal(one, RandomTokens(8).scores(everywhere))
    # Who survives one check layer keeps the same draw at the next.
    some = list(range(0, 400, 3))
    assert torch.equal(RandomTokens(7).scores(evidence(some, spans)), one[some])
    kept = best(one, 100, 400)
    assert 20 < int((kept < 200).sum()) < 80


def test_names() -> None:
    assert isinstance(selector(BlendSettings(selection="first")), FirstTokens)
    assert selector(BlendSettings(selection="random", seed=3)).seed == 3  # type: ignore[attr-defined]
    own = FirstTokens()
    assert selector(BlendSettings(selection=own)) is own


class LastTokens:
    """A selector of a user's own, that looks at everything."""

    def __init__(self) -> None:
        self.seen: list[Evidence] = []

    def scores(self, evidence: Evidence) -> torch.Tensor:
        assert evidence.deviation.shape == evidence.attention.shape == evidence.positions.shape
        self.seen.append(evidence)
        return evidence.positions


def test_one_of_a_users_own() -> None:
    hf = model_of("llama")
    model, parts = BlendModel(hf), prompt()
    ids, spans = torch.cat(parts), spans_of(parts)
    own = LastTokens()
    run = Recompute(model, ids, spans, BlendSettings(check_layers=(1, 3), ratios=(0.4, 0.2), selection=own))
    run_all(run, encode(model, ids, spans))
    total = sum(LENGTHS[:-1])
    for layers, ratio in (((1, 2), 0.4), ((3, 4), 0.2)):
        for layer in layers:
            assert run.rows[layer].tolist() == list(range(total - round(ratio * total), sum(LENGTHS)))
    assert [seen.layer for seen in own.seen] == [1, 3]
    assert len(own.seen[1].positions) == round(0.4 * total)


def test_what_the_question_attends_to() -> None:
    """The same as transformers' own attention says of a full prefill."""
    hf = model_of("llama", attn_implementation="eager")
    model, parts = BlendModel(hf), prompt()
    ids, spans = torch.cat(parts), spans_of(parts)
    own = LastTokens()
    run_all(Recompute(model, ids, spans, BlendSettings(selection=own, ratios=(0.2,))), encode(model, ids, spans))
    with torch.no_grad():
        theirs = hf(ids[None], output_attentions=True).attentions[1][0]  # heads, rows, tokens
    total = sum(LENGTHS[:-1])
    assert torch.allclose(own.seen[0].attention, theirs[:, total:, :total].sum((0, 1)), atol=1e-4)
    expected = theirs[:, total:, :total].sum((0, 1)).topk(round(0.2 * total)).indices
    for logits in (None, 1):  # of how many tokens logits are wanted does not matter
        query = Recompute(model, ids, spans, BlendSettings(selection="query", ratios=(0.2,)), logits=logits)
        run_all(query, encode(model, ids, spans))
        assert query.rows[-1][: round(0.2 * total)].tolist() == sorted(expected.tolist())


def test_a_selector_that_wants_what_it_said_it_does_not() -> None:
    class Careless:
        compares = False

        def scores(self, evidence: Evidence) -> torch.Tensor:
            return evidence.deviation

    hf = model_of("llama")
    model, parts = BlendModel(hf), prompt()
    ids, spans = torch.cat(parts), spans_of(parts)
    run = Recompute(model, ids, spans, BlendSettings(selection=Careless()))
    run.layer(None)
    with pytest.raises(ConfigError, match="the selector wants it"):
        run.layer(None)
    assert full_prefill(hf, ids)[0].shape[0] == len(ids)
