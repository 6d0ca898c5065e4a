"""A plan as text: what fits on a screen, the answer first."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import yaml

from .output import print_table

__all__ = ["bytes_text", "print_plan", "print_scenarios", "scenario_table", "seconds_text", "tokens_text"]


def bytes_text(nbytes: float) -> str:
    """Binary units, three digits."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB", "PiB"):
        if nbytes < 1024 or unit == "PiB":
            return f"{nbytes:,.0f} {unit}" if unit == "B" or nbytes >= 100 else f"{nbytes:.3g} {unit}"
        nbytes /= 1024
    raise AssertionError


def seconds_text(seconds: float | None) -> str:
    """A duration for people; "never" for None and infinity."""
    if seconds is None or math.isinf(seconds):
        return "never"
    for unit, size in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:,.1f} {unit}"
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def tokens_text(tokens: int | None) -> str:
    """A number of tokens; "never" for None."""
    return "never" if tokens is None else f"{tokens:,}"


def _speed(value: float | None) -> str:
    return "none is enough" if value is None else f"{value / 1e9:,.3g} GB/s"


def print_plan(plan: Mapping[str, Any]) -> None:
    """The recommendation, what it follows from, and the tiers."""
    inputs, kv, advice, gpu = plan["inputs"], plan["kv"], plan["recommendation"], plan["gpu"]
    print(
        f"recommended: {advice['folder']}, about ${advice['monthly_usd']:,.0f} a month ({inputs['pricing']}, "
        f"{inputs['region']}, prices of {plan['prices']['date']})"
    )
    for reason in advice["reasons"]:
        print(f"  {reason}")
    for each in advice["tiers"]:
        print(f"  {each['title']}: {each['url']}, ttl {seconds_text(each['ttl_s'])}")
    volume, ttft = plan["volume"], plan["ttft"]
    print()
    print_table(
        ("what", "value"),
        [
            (
                "model",
                f"{inputs['model']}: {inputs['layers']} layers, {inputs['kv_heads']} KV heads of "
                f"{inputs['head_dim']}, {inputs['dtype']}, {inputs['kind']}",
            ),
            (
                "KV per token, per chunk",
                f"{bytes_text(kv['bytes_per_token'])}, {bytes_text(kv['bytes_per_chunk'])} of "
                f"{inputs['chunk_size']} tokens",
            ),
            (
                "stored per token",
                f"{bytes_text(kv['stored_bytes_per_token'])} ({inputs['codec']}, {inputs['codec_ratio']:g} to 1)",
            ),
            ("KV of a prompt", bytes_text(kv["prompt_bytes"])),
            ("stored", "; ".join(f"{name}: {bytes_text(value)}" for name, value in volume["by_ttl"].items())),
            ("at your ttl", f"{bytes_text(volume['stored_bytes'])} ({seconds_text(inputs['ttl_s'])})"),
            (
                "prefill of a prompt",
                f"{seconds_text(plan['prefill']['prompt_s'])} "
                f"({plan['prefill']['tokens_per_s']:,.0f} tokens/s, {plan['prefill']['source']})",
            ),
            (
                f"bandwidth for {seconds_text(ttft['target_s'])}",
                f"{_speed(ttft['bandwidth_bytes_per_s']['s3'])} a request from S3's first byte on",
            ),
            ("at the peak", f"{ttft['peak_bytes_per_s'] / 1e9:,.3g} GB/s over all hosts"),
            (
                "GPU hours a month",
                f"{gpu['busy_hours_without']:,.1f} busy without, {gpu['busy_hours_with']:,.1f} with: "
                f"{gpu['saved_hours']:,.1f} saved (${gpu['saved_usd']:,.2f})",
            ),
            (
                "instances at the peak",
                f"{gpu['instances_without']} × {gpu['name']} without, {gpu['instances']} with "
                f"(${gpu['monthly_usd_without']:,.0f} and ${gpu['monthly_usd']:,.0f} a month)",
            ),
        ],
        text=(0, 1),
    )
    print()
    print_table(
        ("tier", "$/month", "saves $", "load", "TTFT", "from tokens", "from hit rate", "keep idle"),
        [
            (
                tier["title"],
                f"{tier['monthly_usd']:,.2f}",
                f"{tier['saved_usd']:,.2f}",
                seconds_text(tier["load_s"]),
                seconds_text(tier["ttft_s"]),
                tokens_text(tier["break_even_tokens"]),
                _rate(tier["break_even_hit_rate"]),
                seconds_text(tier["idle_s"]),
            )
            for tier in plan["tiers"]
        ],
    )
    print("\nbreak-even prefix in tokens, by network of a host")
    links = list(plan["tiers"][0]["break_even_by_link"])
    print_table(
        ("tier", *links),
        [
            (tier["title"], *(tokens_text(each) for each in tier["break_even_by_link"].values()))
            for tier in plan["tiers"]
        ],
    )
    if advice["config"] is not None:
        print("\nconfiguration (buckets and hosts: outputs of terraform)")
        print(yaml.safe_dump(advice["config"], sort_keys=False), end="")
    print()
    for note in plan["notes"]:
        print(f"note: {note}")


def _rate(value: float | None) -> str:
    return "never" if value is None else f"{value:.1%}"


def print_scenarios(report: Mapping[str, Any]) -> None:
    """The table of published and own estimates, and why some differ."""
    scenarios = report["scenarios"]
    print_table(
        ("scenario", "requests/day", "published $", "ours $", "is", "pricing"),
        [
            (
                each["name"],
                f"{each['requests_per_day']:,}",
                "{:,}–{:,}".format(*each["published_usd"]),
                f"{each['monthly_usd']:,.0f}",
                each["verdict"],
                each["pricing"],
            )
            for each in scenarios
        ],
        text=(0, 4, 5),
    )
    if len(scenarios) == 1:
        print()
        print_table(("item", "$/month"), [(name, f"{usd:,.2f}") for name, usd in scenarios[0]["items"].items()])
    for each in scenarios:
        for text in (each["why"], each["remark"]):
            if text:
                print(f"{each['name']}: {text}")
    print(f"prices of {report['prices']['date']}, {'; '.join(report['prices']['sources'])}")


def scenario_table(report: Mapping[str, Any]) -> str:
    """The scenarios as a Markdown table, as docs/plan.md has it."""
    lines = [
        "| scenario | requests a day | what the guide names | published, $ | ours, $ | paid for | where ours lands |",
        "|---|---|---|---|---|---|---|",
    ]
    for each in report["scenarios"]:
        published = "{:,} to {:,}".format(*each["published_usd"])
        said = "; ".join(filter(None, (each["why"], each["remark"])))
        lines.append(
            f"| `{each['name']}` | {each['requests_per_day']:,} | {each['named']} | {published} | "
            f"{each['monthly_usd']:,.0f} | {each['pricing']} | {each['verdict']}{f': {said}' if said else ''} |"
        )
    return "\n".join(lines)
