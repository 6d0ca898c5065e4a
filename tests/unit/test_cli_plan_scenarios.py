"""Published estimates against ours: the arithmetic, where each lands, and the table in docs/plan.md."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvstore.errors import ConfigError
from kvstore_cli.main import main
from kvstore_cli.plan_prices import load_prices
from kvstore_cli.plan_scenarios import SCENARIOS, estimate, scenario_report
from kvstore_cli.plan_show import scenario_table

ROOT = Path(__file__).parents[2]


def test_all_published_estimates_are_there() -> None:
    """Four guides, three sizes each."""
    published = {name: (scenario.low, scenario.high) for name, scenario in SCENARIOS.items()}
    assert published == {
        "cacheblend-small": (150, 300), "cacheblend-medium": (800, 2000), "cacheblend-large": (5000, 15000),
        "cachedattention-small": (50, 150), "cachedattention-medium": (500, 1200),
        "cachedattention-large": (3000, 8000),
        "cachegen-small": (800, 1200), "cachegen-medium": (2500, 4000), "cachegen-large": (8000, 15000),
        "lmcache-small": (150, 300), "lmcache-medium": (800, 1500), "lmcache-large": (3000, 6000),
    }  # fmt: skip
    regions = {name.partition("-")[0]: scenario.region for name, scenario in SCENARIOS.items()}
    assert regions == {
        "cacheblend": "ap-northeast-1", "cachedattention": "ap-northeast-1", "cachegen": "us-east-1",
        "lmcache": "ap-northeast-1",
    }  # fmt: skip


def test_a_bill_by_hand() -> None:
    found = scenario_report("cachegen-small", None)["scenarios"][0]
    usd = 730 * 1.006 + 500 * 0.023 + 100 * 0.08 + 730 * 0.0225 + 730 * 0.045 + 10 * 0.5
    assert found["monthly_usd"] == pytest.approx(usd)
    assert found["verdict"] == "inside"
    assert found["why"] == ""


@pytest.mark.parametrize("name", SCENARIOS)
@pytest.mark.parametrize("mode", [None, "on-demand", "spot", "reserved", "savings-plan"])
def test_where_each_lands_and_why(name: str, mode: str | None) -> None:
    (found,) = scenario_report(name, mode)["scenarios"]
    low, high = found["published_usd"]
    inside = low <= found["monthly_usd"] <= high
    assert (found["verdict"] == "inside") == inside
    assert bool(found["why"]) != inside
    assert all(usd > 0 for usd in found["items"].values())
    assert sum(found["items"].values()) == pytest.approx(found["monthly_usd"])


def test_a_gpu_around_the_clock_is_more_than_the_small_guide_says_and_the_hours_named_would_fit() -> None:
    scenario = SCENARIOS["lmcache-small"]
    for mode in ("spot", "on-demand"):
        prices = load_prices(scenario.region, mode)
        found = estimate(scenario, prices)
        assert found["verdict"] == "above"
        hours = float(found["why"].partition("up to ")[2].split()[0])
        gpu = prices.machines["g5.xlarge"].usd_per_hour * 730
        assert found["monthly_usd"] - gpu + gpu * hours / 24 == pytest.approx(300, rel=0.02)


def test_modes_are_in_order() -> None:
    totals = [
        sum(each["monthly_usd"] for each in scenario_report("all", mode)["scenarios"])
        for mode in ("spot", "reserved", "savings-plan", "on-demand")
    ]
    assert totals == sorted(totals)


def test_the_table_in_the_documentation_is_what_comes_out() -> None:
    """Make it anew with: kvstore plan --scenario all --markdown."""
    text = (ROOT / "docs" / "plan.md").read_text(encoding="utf-8")
    assert scenario_table(scenario_report("all", None)) in text


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--scenario", "lmcache-small", "--json", "-"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["scenarios"][0]["pricing"] == "spot"
    assert main(["plan", "--scenario", "all", "--pricing", "on-demand"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in SCENARIOS)
    assert main(["plan", "--scenario", "all", "--markdown"]) == 0
    assert capsys.readouterr().out.strip() == scenario_table(scenario_report("all", None))


def test_what_makes_no_sense() -> None:
    with pytest.raises(ConfigError, match=r"'scenario'.*lmcache-small"):
        scenario_report("lmcache", None)
    assert main(["plan", "--scenario", "all", "--region", "us-east-1"]) == 2
    assert main(["plan", "--scenario", "all", "--html", "x.html"]) == 2
    assert main(["plan", "--markdown"]) == 2
