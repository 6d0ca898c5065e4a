"""`kvstore plan` is monotone wherever it must be, has no negative figure, and its units fit together."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.layout import KVLayout
from kvstore.stream.estimates import PrefillModel
from kvstore_cli.plan_core import (
    CODECS,
    Codec,
    Link,
    Load,
    Traffic,
    bandwidth_for_target,
    break_even_tokens,
    instances_needed,
    load_of,
    prefill_of,
    saved_gpu_seconds,
    stored_bytes,
    ttft_seconds,
)
from kvstore_cli.plan_models import MODELS, Model
from kvstore_cli.plan_prices import Prices, load_prices
from kvstore_cli.plan_report import SIZES, Inputs, make_plan, size_of
from kvstore_cli.plan_tiers import TIERS, break_even_hit_rate, monthly_usd, usage_of

PRICES = load_prices("us-east-1", "on-demand")
G5 = PRICES.machines["g5.xlarge"]
LLAMA = MODELS["llama-3.1-8b"]

requests = st.floats(1, 1e9)
prompts = st.integers(1, 1 << 17)
rates = st.floats(0, 1)
traffics = st.builds(Traffic, requests, prompts, rates)
prefills = st.builds(PrefillModel, st.floats(1e-7, 1e-1), st.one_of(st.just(0.0), st.floats(1e-14, 1e-6)))
loads = st.builds(Load, st.floats(0, 10), st.floats(1e-9, 1))
factors = st.floats(1, 1000)
tiers = st.sampled_from(TIERS)
models = st.sampled_from(sorted(MODELS.values(), key=lambda model: model.name))


def at_most(low: float | None, high: float | None, *, slack: float = 1e-9) -> bool:
    """low <= high, where None is infinite, up to rounding."""
    return high is None or (low is not None and low <= high * (1 + slack) + 1e-12)


# Volumes and bills.


def volume(traffic: Traffic, model: Model = LLAMA, ttl: float = 86400.0, ratio: float = 1.0) -> float:
    return stored_bytes(traffic, model.kv_bytes(1) / ratio, ttl=ttl)


@given(traffics, factors, st.integers(1, 1 << 16), st.floats(0, 1), models)
def test_volume(traffic: Traffic, factor: float, more: int, rate: float, model: Model) -> None:
    base = volume(traffic, model)
    assert base >= 0
    assert at_most(base, volume(replace(traffic, requests_per_day=traffic.requests_per_day * factor), model))
    assert at_most(base, volume(replace(traffic, prompt_tokens=traffic.prompt_tokens + more), model))
    assert at_most(base, volume(traffic, model, ttl=86400.0 * factor))
    assert at_most(volume(traffic, model, ratio=factor), base)
    assert at_most(volume(replace(traffic, hit_rate=max(rate, traffic.hit_rate)), model), base)


@given(st.integers(1, 100), st.integers(1, 64), st.integers(1, 256), st.integers(1, 64))
def test_kv_bytes_grow_with_every_dimension(layers: int, heads: int, width: int, more: int) -> None:
    def nbytes(layers: int, heads: int, width: int, dtype: str = "bfloat16") -> int:
        return Model("x", KVLayout(layers, heads, width), dtype, 1, 1, 1, 1).kv_bytes(1)

    base = nbytes(layers, heads, width)
    assert base == 2 * layers * heads * width * 2
    assert base < nbytes(layers + more, heads, width)
    assert base < nbytes(layers, heads + more, width)
    assert base < nbytes(layers, heads, width + more)
    assert nbytes(layers, heads, width, "float8_e4m3fn") * 2 == base == nbytes(layers, heads, width, "float32") // 2


def bill(tier: Any, traffic: Traffic, prices: Prices = PRICES, *, ttl: float = 86400.0, machines: int = 1) -> float:
    usage = usage_of(traffic, record_bytes=32 << 20, chunk_size=256, ttl=ttl, machines=machines)
    return monthly_usd(tier, usage, prices, G5)


@given(tiers, traffics, factors, st.integers(0, 1 << 16), st.integers(0, 50))
def test_bills(tier: Any, traffic: Traffic, factor: float, more: int, machines: int) -> None:
    base = bill(tier, traffic)
    assert 0 <= base < math.inf
    assert at_most(base, bill(tier, replace(traffic, requests_per_day=traffic.requests_per_day * factor)))
    assert at_most(base, bill(tier, replace(traffic, prompt_tokens=traffic.prompt_tokens + more)))
    assert at_most(base, bill(tier, traffic, ttl=86400.0 * factor))
    assert at_most(bill(tier, traffic, machines=1 + machines), base)  # their memory and disks come with them


@given(tiers, traffics, st.sampled_from(sorted(PRICES.usd)), factors)
def test_no_bill_falls_when_a_price_rises(tier: Any, traffic: Traffic, name: str, factor: float) -> None:
    dearer = replace(PRICES, usd={**PRICES.usd, name: PRICES.usd[name] * factor})
    assert at_most(bill(tier, traffic), bill(tier, traffic, dearer))


@given(tiers, traffics)
def test_the_items_of_a_bill_are_not_negative_and_add_up(tier: Any, traffic: Traffic) -> None:
    usage = usage_of(traffic, record_bytes=32 << 20, chunk_size=256, ttl=86400, machines=1)
    items = tier.bill(usage, PRICES, G5)
    assert all(usd >= 0 for usd in items.values())
    assert math.isclose(sum(items.values()), monthly_usd(tier, usage, PRICES, G5))


@given(traffics, st.integers(4096, 1 << 30))
def test_bytes_and_records_of_a_month_fit_together(traffic: Traffic, record: int) -> None:
    usage = usage_of(traffic, record_bytes=record, chunk_size=256, ttl=86400, machines=1)
    assert math.isclose(usage.bytes_put, usage.records_put * record, rel_tol=1e-9)
    assert math.isclose(usage.bytes_got, usage.records_got * record, rel_tol=1e-9, abs_tol=1e-200)
    assert math.isclose(usage.records_put + usage.records_got, usage.lookups, rel_tol=1e-9)
    assert math.isclose(usage.stored * 730 / 24, usage.bytes_put, rel_tol=1e-9)  # a day of a month of 30.4


# Times and break-evens.


@given(models, st.sampled_from(sorted(PRICES.machines.values(), key=lambda each: each.name)), prompts, factors)
def test_prefill(model: Model, machine: Any, tokens: int, factor: float) -> None:
    base = prefill_of(model, machine, mfu=0.5)
    assert base.seconds(0, tokens) > 0
    assert at_most(base.seconds(0, tokens), base.seconds(0, tokens + 1))
    assert at_most(prefill_of(model, machine, mfu=0.9).seconds(0, tokens), base.seconds(0, tokens))
    faster = replace(machine, flops=machine.flops * factor)
    assert at_most(prefill_of(model, faster, mfu=0.5).seconds(0, tokens), base.seconds(0, tokens))


@given(models, st.floats(0, 1), st.floats(1e3, 1e12), factors, st.sampled_from(sorted(CODECS)))
def test_loading(model: Model, latency: float, speed: float, factor: float, codec: str) -> None:
    base = load_of(model, CODECS[codec], Link(latency, speed), vcpus=8)
    assert base.per_token > 0
    assert at_most(load_of(model, CODECS[codec], Link(latency, speed * factor), vcpus=8).per_token, base.per_token)
    assert at_most(load_of(model, CODECS[codec], Link(latency, speed), vcpus=64).per_token, base.per_token)
    smaller = Codec("x", CODECS[codec].ratio * factor, CODECS[codec].decode_bytes_per_s, "")
    assert at_most(load_of(model, smaller, Link(latency, speed), vcpus=8).per_token, base.per_token)
    assert base.seconds(0) == 0


@given(prefills, loads, factors)
def test_break_even_is_the_first_length_from_which_loading_wins(
    prefill: PrefillModel, load: Load, factor: float
) -> None:
    least = break_even_tokens(prefill, load)
    if least is not None:
        assert least >= 1
        for tokens in (least, least + 1, 2 * least, 10 * least):
            assert load.seconds(tokens) <= prefill.seconds(0, tokens) * (1 + 1e-9)
        if least > 3:
            shorter = least - max(2, least >> 30)
            assert load.seconds(shorter) >= prefill.seconds(0, shorter) * (1 - 1e-6)
    assert at_most(least, break_even_tokens(prefill, Load(load.latency * factor, load.per_token)), slack=1e-6)
    assert at_most(least, break_even_tokens(prefill, Load(load.latency, load.per_token * factor)), slack=1e-6)
    assert at_most(least, break_even_tokens(prefill.scaled(1 / factor), load), slack=1e-6)


@given(prefills, loads, traffics, rates, st.integers(0, 1 << 16), factors)
def test_what_is_saved(
    prefill: PrefillModel, load: Load, traffic: Traffic, rate: float, more: int, factor: float
) -> None:
    base = saved_gpu_seconds(prefill, load, traffic)
    whole = prefill.seconds(0, traffic.prompt_tokens)
    assert 0 <= base <= whole
    assert at_most(base, saved_gpu_seconds(prefill, load, replace(traffic, hit_rate=max(rate, traffic.hit_rate))))
    assert at_most(base, saved_gpu_seconds(prefill, load, replace(traffic, prompt_tokens=traffic.prompt_tokens + more)))
    assert at_most(saved_gpu_seconds(prefill, Load(load.latency * factor, load.per_token), traffic), base)
    assert at_most(saved_gpu_seconds(prefill, Load(load.latency, load.per_token * factor), traffic), base)
    first = ttft_seconds(prefill, load, traffic)
    assert 0 <= first <= whole * (1 + 1e-9)  # never worse than recomputing
    assert at_most(first, ttft_seconds(prefill, Load(load.latency, load.per_token * factor), traffic))


@given(prefills, traffics, st.floats(1, 1e7), st.floats(1e-3, 100), st.floats(0, 1), factors)
def test_bandwidth_needed(
    prefill: PrefillModel, traffic: Traffic, nbytes: float, target: float, latency: float, factor: float
) -> None:
    need = bandwidth_for_target(prefill, nbytes, traffic, target=target, latency=latency)
    assert need is None or need >= 0
    assert at_most(bandwidth_for_target(prefill, nbytes, traffic, target=target * factor, latency=latency), need)
    assert at_most(need, bandwidth_for_target(prefill, nbytes * factor, traffic, target=target, latency=latency))
    assert at_most(need, bandwidth_for_target(prefill, nbytes, traffic, target=target, latency=latency + factor))
    if need:  # it is enough, and not more than enough
        took = Load(latency, nbytes / need).seconds(traffic.hit_tokens)
        rest = prefill.seconds(traffic.hit_tokens, traffic.prompt_tokens - traffic.hit_tokens)
        assert math.isclose(took + rest, target, rel_tol=1e-6)


@given(tiers, prompts, st.floats(1, 1e7), factors)
def test_break_even_hit_rate_falls_with_the_price_of_the_gpu(
    tier: Any, tokens: int, requests: float, factor: float
) -> None:
    def least(machine: Any) -> float | None:
        return break_even_hit_rate(
            tier, PRICES, machine, LLAMA, CODECS["kvt"], prefill_of(LLAMA, G5, mfu=0.5), Traffic(requests, tokens, 0.5),
            record_bytes=4 << 20, chunk_size=256, ttl=86400, machines=1,
        )  # fmt: skip

    base = least(G5)
    assert base is None or 0 < base <= 1
    assert at_most(least(replace(G5, usd_per_hour=G5.usd_per_hour * factor)), base)
    assert least(replace(G5, usd_per_hour=0.0)) is None or tier.name in ("nvme", "dram")  # nothing to save pays nothing


@given(traffics, st.floats(0, 100), factors)
def test_instances(traffic: Traffic, busy: float, factor: float) -> None:
    count = instances_needed(busy, traffic, utilisation=0.7)
    assert count >= 1
    more = replace(traffic, requests_per_day=traffic.requests_per_day * factor)
    assert count <= instances_needed(busy, more, utilisation=0.7)
    assert count <= instances_needed(busy * factor, traffic, utilisation=0.7)
    assert count >= instances_needed(busy, traffic, utilisation=1.0)


# The whole plan.


def plan_for(traffic: Traffic, **changes: Any) -> dict[str, Any]:
    return make_plan(replace(Inputs(LLAMA, traffic, G5, CODECS["kvt"]), **changes), PRICES)


def no_figure_is_negative(value: Any, name: str = "") -> None:
    if isinstance(value, dict):
        for key, each in value.items():
            no_figure_is_negative(each, key)
    elif isinstance(value, list):
        for each in value:
            no_figure_is_negative(each, name)
    elif isinstance(value, float | int) and name != "net_usd":
        assert value >= 0, name
        assert not math.isnan(value), name


small_prompts = st.builds(Traffic, requests, st.integers(1, 30_000), rates)


@given(small_prompts)
def test_no_figure_of_a_plan_is_negative(traffic: Traffic) -> None:
    no_figure_is_negative(plan_for(traffic))


@settings(max_examples=40)
@given(small_prompts, factors, rates)
def test_the_plan_as_a_whole(traffic: Traffic, factor: float, rate: float) -> None:
    base = plan_for(traffic)
    busier = plan_for(replace(traffic, requests_per_day=traffic.requests_per_day * factor))
    order = list(SIZES)
    assert order.index(base["recommendation"]["size"]) <= order.index(busier["recommendation"]["size"])
    assert base["gpu"]["instances"] <= busier["gpu"]["instances"]
    assert base["gpu"]["instances"] <= base["gpu"]["instances_without"]
    luckier = plan_for(replace(traffic, hit_rate=max(rate, traffic.hit_rate)))
    assert luckier["gpu"]["instances"] <= base["gpu"]["instances"]
    assert at_most(base["gpu"]["saved_hours"], luckier["gpu"]["saved_hours"])


@given(st.integers(1, 1000), st.integers(1, 1000), st.floats(0, 1e15), st.floats(0, 1e15))
def test_sizes_are_monotone(few: int, many: int, little: float, much: float) -> None:
    order = list(SIZES)
    low = size_of(min(few, many), min(little, much))
    high = size_of(max(few, many), max(little, much))
    assert order.index(low) <= order.index(high)
