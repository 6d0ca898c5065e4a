"""`kvstore-bench blend` without a model: prompts as promised, an independent search for r, figures, table and page."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from kvstore.errors import ConfigError
from kvstore.stream import PrefillModel
from kvstore_bench import blend, blend_prompts, cli
from kvstore_bench.blend_control import Choice, ChunkCost, brute_force
from kvstore_bench.blend_prompts import make_documents, make_prompts
from kvstore_bench.blend_report import BlendBenchReport, CurvePoint, LinkRow, SchemeRow
from kvstore_bench.blend_speed import formula_seconds


def words(text: str) -> int:
    return len(text.split())


# Prompts.


def test_documents_have_one_fact_each_and_the_length_asked_for() -> None:
    documents = make_documents(48, words, tokens=100)
    assert documents == make_documents(48, words, tokens=100)
    assert documents != make_documents(48, words, tokens=100, seed=1)
    longest = max(map(words, blend_prompts._SENTENCES)) + 2  # a word of two words in it
    places = set()
    for document in documents:
        assert 100 - longest <= words(document.text) <= 100
        assert document.text.count(document.fact.said) == 1
        assert document.fact.said.removesuffix(".") == f"{document.fact.begun} {document.fact.answer}"
        assert " " not in document.fact.answer
        places.add(document.text.index(document.fact.said) * 4 // len(document.text))
    assert len({document.fact.asked for document in documents}) == 48, "each is about another person"
    assert places == {0, 1, 2, 3}, "facts stand anywhere"


def test_prompts_ask_about_one_of_their_documents() -> None:
    documents = make_documents(12, words, tokens=60)
    prompts = make_prompts(documents, 40)
    assert prompts[:7] == make_prompts(documents, 7)  # however many there are
    assert len({prompt.documents for prompt in prompts}) > 35
    for prompt in prompts:
        assert len(set(prompt.documents)) == 6
        fact = documents[prompt.documents[prompt.asked]].fact
        assert fact.asked in prompt.question
        assert prompt.question.endswith(fact.begun)
        assert prompt.answer == f" {fact.answer}"
    assert {prompt.asked for prompt in prompts} == set(range(6))
    assert len({document for prompt in prompts for document in prompt.documents}) == 12


@pytest.mark.parametrize(("count", "tokens", "said"), [(0, 50, "0 documents"), (49, 50, "49"), (3, 2, "no room")])
def test_documents_that_cannot_be_made(count: int, tokens: int, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make_documents(count, words, tokens=tokens)


def test_prompts_need_enough_documents() -> None:
    with pytest.raises(ConfigError, match="6 documents cannot be made of 5"):
        make_prompts(make_documents(5, words, tokens=60), 1)


# Brute force.

PREFILL = PrefillModel(0.001)
CHUNKS = [ChunkCost(0, 100, 1000), ChunkCost(100, 200, 1000)]


@pytest.mark.parametrize(
    ("load_s", "best"),
    [
        (1.0, 1.0),  # slower than computing all 210 tokens
        (0.209, 0.95),  # 10 + r · 200 ms beside it: 0.995
        (0.11, 0.5),
        (0.1, 0.45),
        (0.0105, 0.15),
    ],
)
def test_brute_force_finds_the_most_that_costs_nothing(load_s: float, best: float) -> None:
    found = brute_force(CHUNKS, 210, 10, 2000 / load_s, PREFILL, r_min=0.15)
    assert found == pytest.approx(best)


def test_exact_chunks_cost_brute_force_nothing() -> None:
    exact = [CHUNKS[0], ChunkCost(100, 200, 1000, exact=True)]
    # 10 + 2 r · 100 ms beside 60 ms of loading: all that is repaired, is among half of the tokens.
    assert brute_force(exact, 210, 10, 2000 / 0.06, PREFILL, r_min=0.15) == pytest.approx(0.25)
    assert brute_force(exact, 210, 10, 2000 / 0.12, PREFILL, r_min=0.15) == pytest.approx(1.0), "all of it"


def test_fixed_costs_come_once() -> None:
    slow = PrefillModel(0.001, fixed_s=0.05)
    assert brute_force(CHUNKS, 210, 10, 2000 / 0.16, slow, r_min=0.15) == pytest.approx(0.5)


def test_the_formula_takes_the_longer_of_each_layer() -> None:
    total, layer = formula_seconds([1.0, 1.0, 1.0, 1.0], [3.0, 0.5, 2.0, 0.5])
    assert (total, layer) == (7.0, 1.75)


# Figures, table, page.


def scheme(name: str, form: str, ratio: float, kl: float, **fields: Any) -> SchemeRow:
    values: dict[str, Any] = {
        "prompts": 50, "kl_se": 0.01, "kl_last": kl, "kl_vs_reuse": kl / 0.4, "nll": 2.0, "nll_se": 0.1, "exact": 0.5,
        "token_layers": 0.2, "cpu_ratio": 0.25,
    }  # fmt: skip
    return SchemeRow(scheme=name, form=form, ratio=ratio, kl=kl, **{**values, **fields})


def link(ratio: float = 1.05) -> LinkRow:
    return LinkRow(1.0, 2e7, 1e-3, 0.15, 3, 1.0, 0.9, 1.2, 1.1, 0.04, 3.0, ratio, [ratio], True)


def quality(**fields: Any) -> Any:
    from kvstore_bench.blend_quality import Quality

    rows = [
        scheme("full prefill", "", 1.0, 0.0), scheme("full reuse", "alone", 0.0, 0.4),
        scheme("random", "alone", 0.15, 0.36), scheme("deviation", "alone", 0.15, 0.16, cpu_ratio=0.3),
        scheme("full reuse", "shared_prefix", 0.0, 0.2), scheme("random", "shared_prefix", 0.15, 0.18),
        scheme("deviation", "shared_prefix", 0.15, 0.1, token_layers=0.19),
    ]  # fmt: skip
    return Quality(**{"rows": rows, "r1_logits": 5e-5, "tokens": [920, 950], **fields})


def test_figures_are_those_of_the_rows_and_have_their_bars() -> None:
    figures = blend.figures_of(quality(), [link(1.05), link(1.12)], 0.7)
    barred = {name: (each.value, each.bar, each.met) for name, each in figures.items() if each.bar is not None}
    assert barred == {
        "blend.kl_ratio.0.15": (0.4, 0.5, True),
        "blend.kl_ratio_shared_prefix.0.15": (0.25, 0.35, True),
        "blend.random_vs_deviation.0.15": (2.25, 1.5, True),
        "blend.prefill_compute.0.15": (0.2, 0.25, True),
        "blend.prefill_cpu.0.15": (0.3, 0.35, True),
        "blend.r1_logits": (5e-5, 1e-4, True),
        "blend.r0_unequal": (0.0, 0, True),
        "blend.ttft_vs_formula": (1.12, 1.1, False),
        "blend.controller_vs_bruteforce": (0.7, 1, True),
    }
    assert figures["blend.answer_nll.reuse"].bar is None
    assert figures["blend.exact_match.blend"].value == 0.5
    short = blend.figures_of(quality(tokens=[700, 850]), [link()], 0.0)
    assert "blend.prefill_cpu.0.15" not in short, "the bar is for 900 tokens and more"
    wrong = blend.figures_of(quality(r0_unequal=1), [link()], 0.0)
    assert wrong["blend.r0_unequal"].met is False


def report() -> BlendBenchReport:
    made = BlendBenchReport("blend", started="now", setting={"model": "<tiny>"})
    found = quality()
    made.schemes, made.links = found.rows, [link(1.12)]
    made.curve = [CurvePoint(2e7, 0.0, 1.0), CurvePoint(2e7, 0.15, 1.2)]
    made.choices = [Choice(1e6, 1.0, 1.0, 0.0), Choice(1e7, 0.2, 0.15, 1.0)]
    made.figures = blend.figures_of(found, made.links, 1.0)
    return made


def test_the_report_says_what_is_met_and_what_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    made = report()
    assert made.ok
    made.print_table(sys.stdout)
    said = capsys.readouterr().out
    assert "blend.kl_ratio.0.15 = 0.4  (bar ≤ 0.5: met)" in said
    assert "blend.ttft_vs_formula = 1.12  (bar ≤ 1.1: NOT met)" in said
    assert "blend.answer_nll.full = 2 nats\n" in said
    assert "1 of 9 bars is not met" in said
    rows = json.loads(made.to_json())["rows"]
    assert [row["kind"] for row in rows] == ["scheme"] * 7 + ["link"] + ["ttft"] * 2 + ["controller"] * 2
    broken = report()
    broken.wrong = 1
    assert not broken.ok
    assert not BlendBenchReport("blend").ok


def test_few_prompts_are_not_judged_by_their_means(capsys: pytest.CaptureFixture[str]) -> None:
    made = report()
    blend._do_not_judge(made, 2)
    made.print_table(sys.stdout)
    said = capsys.readouterr().out
    assert "blend.kl_ratio.0.15 = 0.4  (too few prompts to judge)" in said
    assert "blend.prefill_compute.0.15 = 0.2  (bar ≤ 0.25: met)" in said
    assert "2 prompts: KL is judged from 50 on" in said


def test_the_page_stands_alone_and_has_both_plots(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    report().write_html(str(tmp_path / "blend.html"))
    page = (tmp_path / "blend.html").read_text(encoding="utf-8")
    assert page.count("<svg") == 3
    assert "KL over that of full reuse" in page
    assert "20 MB/s" in page
    assert "&lt;tiny&gt;" in page
    for outside in ("http:", "https:", "<script", "<link", "@import", "url("):
        assert outside not in page


def test_the_curve_takes_ratios_to_the_same_prompts() -> None:
    from kvstore_bench.blend_page import kl_over_r

    made = report()
    made.schemes.append(scheme("deviation", "alone", 0.5, 0.04, prompts=10, kl_vs_reuse=0.2))
    points = kl_over_r(made)["alone"]
    assert [point[0] for point in points] == [0.0, 0.15, 0.5]
    assert [point[1] for point in points] == pytest.approx([1.0, 0.4, 0.2])


# The command line.


def test_the_command_is_what_was_asked_for() -> None:
    parser = argparse.ArgumentParser()
    blend.add_arguments(parser)
    args = parser.parse_args(["--quick", "--prompts", "3", "--html", "-"])
    assert blend._command(args) == "kvstore-bench blend --quick --prompts 3"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (["--prompts", "0"], "at least 1"),
        (["--repeats", "0"], "at least 1"),
        (["--model", "/nowhere"], "there is no config.json"),
        (["--latency", "soon"], "--latency"),
        (["--json", "-", "--html", "-"], "standard output"),
    ],
)
def test_nonsense_is_one_sentence(line: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    assert cli.main(["blend", *line]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err
    assert err.count("\n") == 1
