"""`kvstore plan`: models, prices, the calculation against figures worked out by hand, and the command line."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from kvstore.config import load_config
from kvstore.errors import ConfigError
from kvstore.options import parse_duration
from kvstore.stream.estimates import PrefillModel
from kvstore.stream.planner import COMPUTED, Group, Policy, Speeds, Standing
from kvstore.stream.planner import plan as stream_plan
from kvstore_cli.main import main
from kvstore_cli.plan_core import CODECS, GB, Load, Traffic, bandwidth_for_target, break_even_tokens, prefill_of
from kvstore_cli.plan_models import find_model
from kvstore_cli.plan_page import page
from kvstore_cli.plan_prices import load_prices
from kvstore_cli.plan_report import Inputs, make_plan
from kvstore_cli.plan_tiers import TIERS, Usage, monthly_usd
from kvstore_cli.plan_trace import facts_of, read_trace

VIRGINIA = load_prices("us-east-1", "on-demand")
KiB = 1 << 10


def small(**changes: Any) -> Inputs:
    """8,000 tokens of Llama-3.1-8B on one g5.xlarge."""
    traffic = Traffic(1000, 8000, 0.6)
    base = Inputs(find_model("Llama-3.1-8B"), traffic, VIRGINIA.machines["g5.xlarge"], CODECS["raw"])
    return replace(base, **changes)


def run(*words: str) -> tuple[int, dict[str, Any]]:
    """Exit status and JSON of `kvstore plan`."""
    status = main(["plan", *words, "--json", "plan.json"])
    return status, json.loads(Path("plan.json").read_text(encoding="utf-8")) if status == 0 else {}


LLAMA = {
    "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8,
    "intermediate_size": 14336, "vocab_size": 128256, "torch_dtype": "bfloat16", "model_type": "llama",
}  # fmt: skip


# The calculation, by hand.


def test_prefill_of_an_8b_model_by_hand() -> None:
    # 2 FLOPs per weight and token; attention: 32 layers, 2·32·128 wide, 2 FLOPs per pair and value.
    prefill = prefill_of(find_model("Llama-3.1-8B"), VIRGINIA.machines["g5.xlarge"], mfu=0.5)
    matrices = 2 * 8.03e9 * 8000 / 35e12
    pairs = 8000 * 7999 / 2 * 32 * 8192 * 2 / 35e12
    assert prefill.seconds(0, 8000) == pytest.approx(matrices + pairs)
    assert prefill_of(find_model("Llama-3.1-8B"), VIRGINIA.machines["g5.xlarge"], mfu=0.5, tokens_per_s=2000).seconds(
        0, 8000
    ) == pytest.approx(4)


def test_volume_and_bills_by_hand() -> None:
    plan = make_plan(small(), VIRGINIA)
    # 1,000 requests × 3,200 new tokens × 128 KiB, and the record's header of 4 KiB for each 256 tokens.
    per_token = 128 * KiB + 4096 / 256
    assert plan["kv"]["bytes_per_chunk"] == 32 << 20
    assert plan["kv"]["stored_bytes_per_token"] == pytest.approx(per_token, rel=1e-3)
    assert plan["volume"]["by_ttl"]["1d"] == pytest.approx(3.2e6 * per_token, rel=1e-3)
    assert plan["volume"]["by_ttl"]["7d"] == pytest.approx(7 * plan["volume"]["by_ttl"]["1d"])
    s3 = next(tier for tier in plan["tiers"] if tier["name"] == "s3")
    month = 1000 * 730 / 24
    put, got, asked = month * 3200 / 256, month * 4800 / 256, month * 8000 / 256
    assert s3["items"]["storage"] == pytest.approx(plan["volume"]["stored_bytes"] / GB * 0.023)
    assert s3["items"]["puts"] == pytest.approx(put * 0.005 / 1000)
    assert s3["items"]["gets"] == pytest.approx(
        (asked + put + 5 * got) * 0.0004 / 1000
    )  # 5 reads of 8 MiB: 32 and a bit
    assert s3["monthly_usd"] == pytest.approx(sum(s3["items"].values()))


@pytest.mark.parametrize(
    ("tier", "usd"),
    [
        ("s3express", 100 * 0.11 + 50 * 0.0032 + 200 * 0.0006 + 0.00113 + 0.00003 * (3 + 2 + 1)),
        ("efs", 100 * 0.30 + 200 * 0.03 + 50 * 0.06),
        ("fsx-lustre", 1200 * 0.34),
        ("valkey-node", 6 * 730 * 0.3496 + 250 * 0.5 * 2 * 0.01),
        ("valkey-serverless", 100 * 730 * 0.084 + (250 * (1 << 20) + 3000) / 1e6 * 0.0023),
        ("nvme", 0),
        ("dram", 2 * 730 * 0.504),
    ],
)
def test_each_tiers_bill_by_hand(tier: str, usd: float) -> None:
    usage = Usage(100 * GB, 1000, 2000, 3000, 50 * GB, 200 * GB, 4 << 20, machines=2)
    found = next(each for each in TIERS if each.name == tier)
    assert monthly_usd(found, usage, VIRGINIA, VIRGINIA.machines["g5.xlarge"]) == pytest.approx(usd)


def test_bandwidth_for_a_target_by_hand() -> None:
    prefill, traffic = PrefillModel(0.001), Traffic(1, 1000, 0.6)
    # 400 tokens are computed in 0.4 s; 600 tokens of 1,000 bytes have 0.1 s.
    assert bandwidth_for_target(prefill, 1000, traffic, target=0.55, latency=0.05) == pytest.approx(6e6)
    assert bandwidth_for_target(prefill, 1000, traffic, target=0.45, latency=0.05) is None
    assert bandwidth_for_target(prefill, 1000, traffic, target=1.0, latency=0.05) == 0
    assert bandwidth_for_target(prefill, 1000, replace(traffic, hit_rate=0), target=0.9, latency=0) is None


def test_break_even_by_hand() -> None:
    assert break_even_tokens(PrefillModel(0.001), Load(0.5, 0.0005)) == 1000
    assert break_even_tokens(PrefillModel(0.001), Load(0.5, 0.001)) is None
    assert break_even_tokens(PrefillModel(0.001), Load(0.0, 0.001)) == 1
    assert break_even_tokens(PrefillModel(0.001, 1e-6), Load(0.0, 0.0011)) == 201


@pytest.mark.parametrize("tokens_off", [-3, -1, 0, 1, 3, 1000])
def test_the_stream_planner_draws_the_line_at_the_same_length(tokens_off: int) -> None:
    prefill = PrefillModel(1e-4, 2e-9)
    nbytes, speed, latency = 131072, 2.5e9, 0.03
    least = break_even_tokens(prefill, Load(latency, nbytes / speed))
    assert least is not None
    assert least > 100
    tokens = least + tokens_off
    chosen = stream_plan(
        [Group(0, tokens, (tokens * nbytes,), lossless=True)], [Standing()], Speeds(speed, latency, (), prefill),
        policy=Policy(text="time", pointers=False, safety=1.0),
    )  # fmt: skip
    assert (chosen.levels[0] == COMPUTED) == (tokens_off < 0)


def test_a_codec_shrinks_what_is_stored_and_its_decoding_can_be_what_limits() -> None:
    raw, kvt = make_plan(small(), VIRGINIA), make_plan(small(codec=CODECS["kvt"]), VIRGINIA)
    assert kvt["volume"]["stored_bytes"] < raw["volume"]["stored_bytes"] / 9
    assert any("loses precision" in note for note in kvt["notes"])
    dram = {tier["name"]: tier for tier in kvt["tiers"]}["dram"]
    assert dram["load_s_per_token"] == pytest.approx(128 * KiB / (2 * 0.2e9))  # two of four cores


# What comes out of it.


def test_sizes_follow_the_load() -> None:
    found = []
    for requests in (100, 30_000, 2_000_000):
        plan = make_plan(small(traffic=Traffic(requests, 8000, 0.6), codec=CODECS["kvt"]), VIRGINIA)
        found.append(plan["recommendation"]["size"])
    assert found == ["small", "medium", "large"]


def test_nothing_is_recommended_that_is_slower_than_computing() -> None:
    plan = make_plan(small(traffic=Traffic(1000, 20, 0.1)), VIRGINIA)
    assert all(tier["tier"] in ("dram", "nvme") for tier in plan["recommendation"]["tiers"])
    assert any("no shared tier" in reason for reason in plan["recommendation"]["reasons"])
    assert plan["gpu"]["saved_hours"] == 0
    assert plan["gpu"]["instances"] == plan["gpu"]["instances_without"]


@pytest.mark.parametrize("requests", [100, 30_000, 2_000_000])
@pytest.mark.parametrize("region", ["us-east-1", "ap-northeast-1"])
def test_the_recommended_configuration_is_one(requests: int, region: str) -> None:
    inputs = small(traffic=Traffic(requests, 8000, 0.6), codec=CODECS["shuffle-zstd"], network=5e9)
    advice = make_plan(inputs, load_prices(region, "on-demand"))["recommendation"]
    config = load_config(env={}, **advice["config"])
    assert len(config.urls) == len(advice["tiers"])
    assert config.remote_serde == "shuffle-zstd"
    for tier, url in zip(advice["tiers"], config.urls, strict=True):
        if url.scheme in ("s3", "valkeys"):
            assert parse_duration(url.options["ttl"], name="ttl") == pytest.approx(tier["ttl_s"], rel=0.34)


def test_every_tier_and_region_has_prices() -> None:
    for region in ("us-east-1", "ap-northeast-1"):
        for mode in ("on-demand", "spot", "reserved", "savings-plan"):
            plan = make_plan(small(), load_prices(region, mode))
            assert [tier["name"] for tier in plan["tiers"]] == [tier.name for tier in TIERS]
            assert plan["inputs"]["pricing"] == mode
    costs = [
        load_prices("us-east-1", mode).machines["g5.xlarge"].usd_per_hour
        for mode in ("on-demand", "savings-plan", "reserved", "spot")
    ]
    assert costs == sorted(costs, reverse=True)


# The price file.


def override(tmp_path: Path, text: str) -> str:
    path = tmp_path / "prices.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_prices_are_overridden_entry_by_entry(tmp_path: Path) -> None:
    path = override(
        tmp_path,
        "date: 2027-01-02\nsources: {list: AWS price list}\nprices: {s3.storage: {us-east-1: 0.5, source: list}}\n"
        "instances: {g5.xlarge: {us-east-1: 2.0}}\n",
    )
    prices = load_prices("us-east-1", "on-demand", path)
    assert prices.usd["s3.storage"] == 0.5
    assert prices.usd["s3.put"] == VIRGINIA.usd["s3.put"]
    assert prices.machines["g5.xlarge"].usd_per_hour == 2.0
    assert (prices.date, prices.overridden) == ("2027-01-02", ("prices.s3.storage", "instances.g5.xlarge"))
    assert "AWS price list" in prices.origins


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prices: {s3.storge: {us-east-1: 1}}", "did you mean 's3.storage'"),
        ("prices: {s3.storage: {us-east-1: -1}}", "must be a number from 0 on"),
        ("prices: {s3.storage: {us-east-1: .inf}}", "must be a number"),
        ("prices: {s3.storage: {us-east-1: cheap}}", "must be a number"),
        ("prices: {s3.storage: 3}", "must be a map"),
        ("price: {}", "did you mean 'prices'"),
        ("gpus: {A10G: {tflops: 0}}", "more than 0"),
        ("instances: {x1.big: {gpu: H100}}", "x1.big lacks"),
        ("instances: {g5.xlarge: {gpu: Z9}}", "not among gpus"),
        ("instances: {g5.xlarge: {gpsu: 3}}", "did you mean 'gpu'"),
        ("links: {s33: {gb_s: 1}}", "did you mean 's3'"),
        ("currency: EUR", "must be USD"),
        ("[]", "must hold a map"),
    ],
)
def test_price_files_that_make_no_sense(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_prices("us-east-1", "on-demand", override(tmp_path, text))


def test_every_packaged_price_says_that_it_is_unchecked() -> None:
    assert VIRGINIA.origins
    assert all("general knowledge" in origin and "check" in origin for origin in VIRGINIA.origins)


# Traces.


def test_hit_rate_of_a_trace_by_hand(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    rows = [(0, [1, 2]), (1000, [1, 2]), (2000, [1, 3]), (100_000, [1])]
    lines = [{"timestamp": at, "input_length": 512 * len(ids), "output_length": 1, "hash_ids": ids} for at, ids in rows]
    path.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    facts = read_trace(str(path), ttl=3600)
    assert facts.hit_rate == pytest.approx((2 + 1 + 1) / 7)
    assert facts.prompt_tokens == round(512 * 7 / 4)
    assert facts.requests_per_day == pytest.approx(4 / 100 * 86400)
    assert read_trace(str(path), ttl=50).hit_rate == pytest.approx((2 + 1) / 7)


def test_a_trace_fills_in_what_is_not_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    status, plan = run("--model", "Qwen2.5-7B", "--trace", "sharegpt:sessions=40", "--hit-rate", "0.25")
    assert status == 0
    assert plan["inputs"]["hit_rate"] == 0.25
    assert plan["inputs"]["prompt_tokens"] > 1
    assert any("trace" in note for note in plan["notes"])


def test_a_trace_in_no_time_is_refused() -> None:
    from kvstore_bench.tiers_traces import Request, Trace

    with pytest.raises(ConfigError, match="at one time"):
        facts_of(Trace("x", 512, [Request(1.0, 5, [], "s", 0)]), ttl=1)


# The command line.

ENOUGH = ("--model", "Llama-3.1-8B", "--requests-per-day", "1000", "--prompt-tokens", "4000", "--hit-rate", "0.5")


def test_json_on_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *ENOUGH, "--json", "-"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["recommendation"]["size"] in ("small", "medium", "large")
    assert {"kv", "volume", "ttft", "gpu", "tiers", "prices", "notes"} <= plan.keys()


def test_the_table_says_what_matters(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *ENOUGH, "--codec", "kvt"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("recommended: terraform/")
    for text in ("128 KiB", "S3 Express One Zone", "100Gbps", "general knowledge", "never checked against AWS"):
        assert text in out
    assert "nan" not in out


class _Page(HTMLParser):
    """Whether tags are balanced, and what the page would load from elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.foreign: list[str] = []
        self.circles = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "line", "circle", "polyline", "br"):
            self.open.append(tag)
        self.circles += tag == "circle"
        self.foreign += [value for name, value in attrs if name in ("src", "href") and value]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        if tag in ("circle", "polyline"):
            return
        assert self.open.pop() == tag


def test_the_page_is_whole_and_stands_alone(tmp_path: Path) -> None:
    path = tmp_path / "plan.html"
    assert main(["plan", *ENOUGH, "--codec", "kvt", "--html", str(path)]) == 0
    text = path.read_text(encoding="utf-8")
    page = _Page()
    page.feed(text)
    assert page.open == []
    assert page.foreign == []
    assert "<script" not in text
    assert page.circles >= 3  # points where a tier's line meets the GPU's
    for tier in TIERS:
        assert tier.title in text
    numbers = [float(number) for pair in re.findall(r'points="([^"]+)"', text) for number in re.split("[ ,]", pair)]
    assert all(math.isfinite(number) and -1 <= number <= 800 for number in numbers)


@pytest.mark.parametrize("model", ["SmolLM2-135M", "Llama-3.1-70B", "DeepSeek-V3"])
def test_names_at_the_ends_of_lines_do_not_cover_each_other(model: str) -> None:
    given = find_model(model)
    machine = next(each for each in VIRGINIA.machines.values() if each.fits(given))
    text = page(make_plan(small(model=given, machine=machine), VIRGINIA))
    heights = sorted(float(y) for y in re.findall(r'class="name [^"]+" x="[0-9.]+" y="([0-9.]+)"', text))
    assert len(heights) == len(TIERS) + 1
    assert all(high - low >= 16 for low, high in pairwise(heights))
    assert 0 < heights[0] < heights[-1] < 420


def test_text_from_the_user_is_escaped_on_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "<b>evil"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA), encoding="utf-8")
    assert main(["plan", "--model", str(folder), *ENOUGH[2:], "--html", "x.html"]) == 0
    assert "<b>evil" not in Path("x.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--model", "Lama-3.1-8B"), "did you mean Llama"),
        (("--requests-per-day", "0"), "'requests_per_day'.*from --requests-per-day"),
        (("--requests-per-day", "1e11"), "'requests_per_day'"),
        (("--requests-per-day", "nan"), "'requests_per_day'"),
        (("--requests-per-day", "-5"), "'requests_per_day'"),
        (("--prompt-tokens", "0"), "'prompt_tokens'"),
        (("--prompt-tokens", "16777217"), "'prompt_tokens'"),
        (("--prompt-tokens", "many"), "'prompt_tokens'"),
        (("--prompt-tokens", "16000000"), "'prompt_tokens': .* of KV"),
        (("--hit-rate", "1.1"), "'hit_rate'"),
        (("--hit-rate", "-0.1"), "'hit_rate'"),
        (("--hit-rate", "60%"), "'hit_rate'"),
        (("--gpu", "g5.huge"), "'gpu'.*g5.xlarge"),
        (("--model", "DeepSeek-V3", "--gpu", "g5.xlarge"), "'gpu': DeepSeek-V3 has"),
        (("--region", "moon-1"), "'region'.*us-east-1"),
        (("--pricing", "free"), "'pricing'.*spot"),
        (("--codec", "zip"), "'codec'.*kvt"),
        (("--codec-ratio", "0.5"), "'codec_ratio'"),
        (("--ttl", "5parsec"), "'ttl'"),
        (("--ttft-target", "0s"), "'ttft_target'"),
        (("--dtype", "int3"), "'dtype'"),
        (("--mfu", "0"), "'mfu'"),
        (("--network", "0"), "'network'"),
        (("--prices", "/no/such"), "/no/such"),
        (("--scenario", "x"), "'scenario'"),
        (("--trace", "/no/such"), "'trace'"),
        (("--json", "/no/such/folder/x"), "'json'"),
        (("--json", "-", "--html", "-"), "standard output"),
    ],
)
def test_what_makes_no_sense_names_the_option(
    words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [word for pair in zip(ENOUGH[::2], ENOUGH[1::2], strict=True) if pair[0] not in words for word in pair]
    assert main(["plan", *given, *words]) == 2
    said = capsys.readouterr()
    assert re.search(message, said.err), said.err
    assert said.out == ""
    assert len(said.err.splitlines()) == 1


@pytest.mark.parametrize("missing", ["--model", "--requests-per-day", "--prompt-tokens", "--hit-rate"])
def test_a_missing_option_is_named(missing: str, capsys: pytest.CaptureFixture[str]) -> None:
    given = [word for pair in zip(ENOUGH[::2], ENOUGH[1::2], strict=True) if pair[0] != missing for word in pair]
    assert main(["plan", *given]) == 2
    assert missing[2:].replace("-", "_") in capsys.readouterr().err
