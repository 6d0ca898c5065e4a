"""What is measured of blending, against the same by hand, and its page."""

from __future__ import annotations

import math
import re
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import ConfigError

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from kvstore.blend.diagnostics import (  # noqa: E402
    attention_matrices,
    diagnose,
    kl_divergence,
    kv_deviation,
    rank_correlation,
    token_deviation,
)
from kvstore.blend.model import BlendModel  # noqa: E402
from kvstore.blend.plot import heat_map, line_chart, page  # noqa: E402
from kvstore.blend.terms import BlendSettings  # noqa: E402
from tests.unit.blend_model_support import (  # noqa: E402
    LAYERS,
    LENGTHS,
    cache_name,
    encode,
    full_prefill,
    model_of,
    prompt,
    spans_of,
)

QUESTION = LENGTHS[-1]
STORED = sum(LENGTHS) - QUESTION


class World:
    def __init__(self) -> None:
        self.hf = model_of("llama", attn_implementation="eager")
        self.model = BlendModel(self.hf)
        self.ids = torch.cat(prompt())
        self.spans = spans_of(prompt())
        self.stored = encode(self.model, self.ids, self.spans)
        self.logits, self.kv = full_prefill(self.hf, self.ids)
        self.diagnosis = diagnose(
            self.model, self.ids, self.spans, self.stored, BlendSettings(), ratios=(0.15, 0.5, 1.0)
        )


@pytest.fixture(scope="module")
def world() -> World:
    return World()


def test_a_diagnosis(world: World) -> None:
    diagnosis = world.diagnosis
    assert [run.ratio for run in diagnosis.runs] == [0.0, 0.15, 0.5, 1.0]
    reuse, _, _, whole = diagnosis.runs
    assert reuse.kv_deviation[0] < 1e-3  # layer 0 depends on token and position alone
    assert min(reuse.kv_deviation[1:]) > 0.05
    assert max(whole.kv_deviation) < 1e-5
    assert max(whole.attention_deviation) < 1e-4
    assert whole.kl < 1e-6 < reuse.kl
    assert [run.token_layers for run in diagnosis.runs] == sorted(run.token_layers for run in diagnosis.runs)
    for run in diagnosis.runs:
        assert len(run.kv_deviation) == len(run.attention_deviation) == LAYERS
    means = [sum(run.kv_deviation) for run in diagnosis.runs]
    assert means == sorted(means, reverse=True)
    assert diagnosis.positions.tolist() == list(range(STORED))
    assert diagnosis.deviation.shape == (LAYERS, STORED)
    assert diagnosis.correlation.shape == (LAYERS, LAYERS)
    assert diagnosis.neighbours == tuple(diagnosis.correlation[i, i + 1].item() for i in range(1, LAYERS - 1))


def test_deviation_by_hand(world: World) -> None:
    noisy = [(k.clone(), v.clone()) for k, v in world.kv]
    noisy[2][0][0, 1, 7] += 0.5  # all 16 elements of one head of K
    noisy[3][1][0, 0, 4, 3] -= 2.0
    unit_k = float(world.kv[2][0].square().sum((0, 1, 3)).mean())
    unit_v = float(world.kv[3][1].square().sum((0, 1, 3)).mean())
    moved = token_deviation(noisy, world.kv)
    assert {tuple(where) for where in moved.nonzero().tolist()} == {(2, 7), (3, 4)}
    assert float(moved[2, 7]) == pytest.approx(math.sqrt(16 * 0.25 / unit_k), rel=1e-5)
    assert float(moved[3, 4]) == pytest.approx(2 / math.sqrt(unit_v), rel=1e-5)
    assert not token_deviation(noisy, world.kv, "v")[2].any()
    assert not token_deviation(noisy, world.kv, "k")[3].any()
    tokens = sum(LENGTHS)
    by_layer = kv_deviation(noisy, world.kv)
    assert by_layer[2] == pytest.approx(math.sqrt(16 * 0.25 / unit_k / tokens / 2), rel=1e-5)
    assert by_layer[0] == by_layer[1] == by_layer[4] == 0


def test_attention_is_that_of_transformers(world: World) -> None:
    with torch.no_grad():
        theirs = world.hf(world.ids[None], output_attentions=True).attentions
    for mine, other in zip(attention_matrices(world.model, world.ids, world.kv, QUESTION), theirs, strict=True):
        assert torch.allclose(mine, other[0, :, -QUESTION:], atol=1e-5)


def test_attention_deviation_by_hand(world: World) -> None:
    """Of plain reuse: the question computed by transformers over the stored KV."""
    kv = [(k.transpose(0, 1)[None].contiguous(), v.transpose(0, 1)[None].contiguous()) for k, v in world.stored]
    with torch.no_grad():
        full = world.hf(world.ids[None], output_attentions=True).attentions
        name = cache_name(world.hf)
        reuse = world.hf(world.ids[None, STORED:], output_attentions=True, **{name: world.model.cache(kv)}).attentions
    expected = [float((mine[0] - other[0, :, -QUESTION:]).norm()) for mine, other in zip(reuse, full, strict=True)]
    assert world.diagnosis.runs[0].attention_deviation == pytest.approx(expected, abs=1e-4)


# Ranks.


def test_rank_correlation_of_known_series() -> None:
    series = torch.tensor(
        [[1.0, 2, 3, 4, 5], [10.0, 20, 30, 40, 1000], [5.0, 4, 3, 2, 1], [2.0, 1, 4, 3, 5], [7.0] * 5]
    )
    found = rank_correlation(series)
    assert found[0, 1].item() == pytest.approx(1)
    assert found[0, 2].item() == pytest.approx(-1)
    assert found[0, 3].item() == pytest.approx(1 - 6 * 4 / (5 * 24))  # 1 - 6 sum d^2 / (n (n^2 - 1))
    assert found[4].isnan().all()
    # Ties: ranks 1, 2.5, 2.5, 4 against 1, 2, 3, 4.
    tied = rank_correlation(torch.tensor([[1.0, 2, 2, 3], [1.0, 2, 3, 4]]))
    assert tied[0, 1].item() == pytest.approx(4.5 / math.sqrt(4.5 * 5))


@given(
    rows=st.integers(3, 30).flatmap(
        lambda n: st.tuples(*[st.lists(st.integers(0, 9), min_size=n, max_size=n) for _ in range(2)])
    )
)
def test_rank_correlation_with_ties(rows: tuple[list[int], list[int]]) -> None:
    def ranks(values: list[int]) -> list[float]:
        return [sum(v < x for v in values) + (sum(v == x for v in values) - 1) / 2 for x in values]

    one, two = map(ranks, rows)
    mean = (len(one) - 1) / 2
    cov = sum((a - mean) * (b - mean) for a, b in zip(one, two, strict=True))
    size = math.sqrt(sum((a - mean) ** 2 for a in one) * sum((b - mean) ** 2 for b in two))
    found = rank_correlation(torch.tensor(rows, dtype=torch.float32))[0, 1].item()
    assert math.isnan(found) if size == 0 else found == pytest.approx(cov / size, abs=1e-6)


def test_kl_by_hand() -> None:
    full, mine = torch.tensor([[0.0, 0.0], [0.0, 0.0]]), torch.tensor([[0.0, 0.0], [math.log(3.0), 0.0]])
    second = 0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(0.5 / 0.25)
    assert kl_divergence(mine, full) == pytest.approx(second / 2)
    assert kl_divergence(full, full) == 0


# What is refused.


def test_wrong_input(world: World) -> None:
    with pytest.raises(ConfigError, match=r"has 4 layers, .* 5"):
        diagnose(world.model, world.ids, world.spans, world.stored[:-1], BlendSettings())
    exact = [span._replace(exact=True) for span in world.spans]
    with pytest.raises(ConfigError, match="nothing to diagnose"):
        diagnose(world.model, world.ids, exact, world.stored, BlendSettings())
    with pytest.raises(ConfigError, match="layer 0 has shapes"):
        token_deviation([(k[:, :, 1:], v) for k, v in world.kv], world.kv)
    with pytest.raises(ConfigError, match="one cache has 5 layers, the other 4"):
        kv_deviation(world.kv, world.kv[:-1])
    with pytest.raises(ConfigError, match="measure='q'"):
        token_deviation(world.kv, world.kv, "q")


# The page.


def charts_of(html: str) -> list[ElementTree.Element]:
    return [ElementTree.fromstring(found) for found in re.findall(r"<svg.*?</svg>", html, re.DOTALL)]


def test_the_page(world: World) -> None:
    html = page(world.diagnosis)
    charts = charts_of(html)
    assert len(charts) == 4
    lines = [len(chart.findall("polyline")) for chart in charts]
    assert lines == [4, 4, 1, 0]
    points = charts[0].findall("polyline")[0].attrib["points"].split()
    assert len(points) == LAYERS
    heights = [float(point.split(",")[1]) for point in points]
    reuse = world.diagnosis.runs[0].kv_deviation
    assert heights.index(min(heights)) == reuse.index(max(reuse))  # y counts downwards
    assert len(charts[3].findall("rect")) == LAYERS**2
    assert "plain reuse" in html
    assert "r = 0.15" in html
    assert "<script" not in html
    assert not re.search(r"(src|href)=|url\(|@import", html)


def test_charts_of_anything() -> None:
    cases: list[dict[str, Any]] = [
        {},
        {"empty": []},
        {"a": [(0, 0.0)]},
        {"a": [(0, 1.0), (1, math.nan), (2, 3.0), (3, 4.0)], "b": [(0, -2.0), (3, -1.0)]},
        {'<b> & "c"': [(0.05, 1e-9), (0.3, 2e-9)]},
    ]
    drawn = [ElementTree.fromstring(line_chart(case, "x < y", 'y "&"')) for case in cases]
    assert [len(chart.findall("polyline")) for chart in drawn] == [0, 0, 1, 3, 1]
    assert drawn[4].attrib["aria-label"] == 'y "&" over x < y: <b> & "c"'
    for chart in drawn:
        for mark in chart.iter("circle"):
            assert 0 <= float(mark.attrib["cx"]) <= 560
            assert 0 <= float(mark.attrib["cy"]) <= 340


def test_a_map() -> None:
    drawn = ElementTree.fromstring(heat_map([[1.0, -1.0], [math.nan, 0.0]], "layer"))
    assert [cell.attrib["fill"] for cell in drawn.findall("rect")] == ["#0072b2", "#d55e00", "#999999", "#ffffff"]
