"""`kvstore plan`: what a model's KV cache takes, what storing it costs and saves, and which size of terraform/ fits.

Everything is calculated from the command line, a model's shape and a dated price file; nothing is asked of AWS.
docs/plan.md has the formulas.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import click

from kvstore.errors import ConfigError
from kvstore.layout import DTYPES, canonical_dtype
from kvstore.options import Option, show_value
from kvstore.registry import Given

from .output import check_targets, write_html, write_json
from .plan_core import CODECS, Codec, Machine, Traffic
from .plan_models import Model, find_model
from .plan_prices import Prices, load_prices
from .plan_report import Inputs, make_plan
from .plan_scenarios import SCENARIOS, scenario_report
from .plan_show import print_plan, print_scenarios, scenario_table

__all__ = ["PLAN_OPTIONS", "plan"]

PLAN_OPTIONS = (
    Option("model", "str", None, "A known model's name, or a Hugging Face config.json or its folder."),
    Option("requests_per_day", "float", None, "Requests a day.", minimum=1, maximum=1e10),
    Option("prompt_tokens", "int", None, "Tokens of a prompt, on average.", minimum=1, maximum=1 << 24),
    Option("hit_rate", "float", None, "Share of a prompt's tokens that is found stored.", minimum=0, maximum=1),
    Option("output_tokens", "int", 256, "Tokens of an answer, on average.", minimum=0, maximum=1 << 20),
    Option(
        "trace",
        "str",
        None,
        "File of requests (Mooncake's JSONL, Azure's CSV), or sharegpt: it gives requests a "
        "day, prompt tokens and hit rate, as far as they are not given.",
    ),
    Option("gpu", "str", "auto", "GPU instance of the price file; auto: the cheapest one that holds the weights."),
    Option("region", "str", "us-east-1", "Region of the price file: us-east-1, ap-northeast-1."),
    Option("pricing", "str", "on-demand", "How instances are paid for: on-demand, spot, reserved, savings-plan."),
    Option("ttft_target", "duration", 1.0, "Wanted time to first token of a hit.", minimum=1e-3, maximum=3600),
    Option(
        "ttl", "duration", 86400.0, "How long a record is kept after it was stored.", minimum=1, maximum=366 * 86400
    ),
    Option("codec", "choice", "raw", "How records are encoded.", choices=tuple(CODECS)),
    Option("codec_ratio", "float", None, "Raw over stored bytes, if it was measured.", minimum=1, maximum=64),
    Option("chunk_size", "int", 256, "Tokens per chunk.", minimum=16, maximum=1 << 16),
    Option("dtype", "str", None, "Of the KV cache, if not the model's: float8_e4m3fn, bfloat16, ..."),
    Option(
        "prefill_tokens_per_s",
        "float",
        None,
        "Prefill speed of one instance, if it was measured.",
        minimum=1e-2,
        maximum=1e9,
    ),
    Option(
        "decode_tokens_per_s",
        "float",
        None,
        "Output of one instance over all its requests, if it was measured.",
        minimum=1e-2,
        maximum=1e9,
    ),
    Option(
        "gpu_price", "float", None, "USD per hour of one instance, instead of the price file's.", minimum=0, maximum=1e6
    ),
    Option("mfu", "float", 0.5, "Share of the data sheet's FLOPs that prefilling reaches.", minimum=0.01, maximum=1),
    Option("peak_factor", "float", 3.0, "The busiest hour over the average one.", minimum=1, maximum=1000),
    Option(
        "network",
        "float",
        None,
        "Gbit/s that one host really gets, instead of the instance's baseline.",
        minimum=1e-3,
        maximum=1e5,
    ),
    Option("prices", "str", None, "YAML like tools/kvstore_cli/prices.yaml; overrides it entry by entry."),
    Option(
        "scenario", "str", None, "Reproduce published estimates instead: all, or one of " + ", ".join(SCENARIOS) + "."
    ),
)
"""The options, with units and bounds."""

_BY_NAME = {option.name: option for option in PLAN_OPTIONS}


def _plan(as_json: str, html: str, markdown: bool, **given: str | None) -> int:
    """What a KV cache takes, what storing it costs and saves a month, and which size of terraform/ fits.

    Needs --model, and either --requests-per-day, --prompt-tokens and --hit-rate, or --trace. Prices are dated, from
    general knowledge, and can be overridden.
    """
    check_targets(as_json, html)
    values = _values(given)
    if values["scenario"] is not None:
        if given["region"] is not None:
            raise ConfigError("option 'region': each scenario has its own region; leave it out with --scenario")
        mode = None if given["pricing"] is None else values["pricing"]
        report = scenario_report(values["scenario"], mode, values["prices"] or "")
        if html:
            raise ConfigError("option 'html': there is a page for plans, not for scenarios; use --json")
        if as_json:
            write_json(report, as_json)
        if markdown:
            print(scenario_table(report))
        elif as_json != "-":
            print_scenarios(report)
        return 0
    if markdown:
        raise ConfigError("option 'markdown': it prints the table of scenarios; give --scenario all")
    prices = load_prices(values["region"], values["pricing"], values["prices"] or "")
    result = make_plan(_inputs(values, prices), prices)
    if as_json:
        write_json(result, as_json)
    if html:
        from .plan_page import page

        write_html(page(result), html)
    if "-" not in (as_json, html):
        print_plan(result)
    return 0


def _values(given: dict[str, str | None]) -> dict[str, Any]:
    """Typed values of all options; the messages name the flag."""
    values = {}
    for name, option in _BY_NAME.items():
        text = given.get(name)
        flag = f"from --{name.replace('_', '-')}"
        values[name] = option.default if text is None else Given(text, flag).parse(option)
    return values


def _inputs(values: dict[str, Any], prices: Prices) -> Inputs:
    _require(values, "model", "for instance --model Llama-3.1-8B")
    model = find_model(values["model"])
    if values["dtype"] is not None:
        try:
            model = dataclasses.replace(model, dtype=canonical_dtype(values["dtype"]))
        except ConfigError:
            raise ConfigError(f"option 'dtype': {values['dtype']!r} is not one of {', '.join(DTYPES)}") from None
    traffic, notes = _traffic(values)
    codec = CODECS[values["codec"]]
    if values["codec_ratio"] is not None:
        codec = Codec(codec.name, values["codec_ratio"], codec.decode_bytes_per_s, "given")
    return Inputs(
        model=model,
        traffic=traffic,
        machine=_machine(values, model, prices),
        codec=codec,
        chunk_size=values["chunk_size"],
        ttl=values["ttl"],
        target=values["ttft_target"],
        mfu=values["mfu"],
        prefill_tokens_per_s=values["prefill_tokens_per_s"],
        decode_tokens_per_s=values["decode_tokens_per_s"],
        network=None if values["network"] is None else values["network"] * 1e9 / 8,
        notes=notes,
    )


def _require(values: dict[str, Any], name: str, example: str) -> None:
    if values[name] is None:
        raise ConfigError(f"option '{name}' is missing; give it, {example}")


def _traffic(values: dict[str, Any]) -> tuple[Traffic, tuple[str, ...]]:
    notes: tuple[str, ...] = ()
    if values["trace"] is not None:
        from .plan_trace import read_trace

        found = read_trace(values["trace"], ttl=values["ttl"])
        for name in ("requests_per_day", "prompt_tokens", "hit_rate"):
            if values[name] is None:
                values[name] = getattr(found, name)
        notes = found.notes
    _require(values, "requests_per_day", "for instance --requests-per-day 1000, or --trace FILE")
    _require(values, "prompt_tokens", "for instance --prompt-tokens 4000, or --trace FILE")
    _require(values, "hit_rate", "for instance --hit-rate 0.6, or --trace FILE")
    traffic = Traffic(
        values["requests_per_day"],
        values["prompt_tokens"],
        values["hit_rate"],
        values["output_tokens"],
        values["peak_factor"],
    )
    return traffic, notes


def _machine(values: dict[str, Any], model: Model, prices: Prices) -> Machine:
    name = values["gpu"]
    if name == "auto":
        fitting = [machine for machine in prices.machines.values() if machine.fits(model)]
        if not fitting:
            most = max(prices.machines.values(), key=lambda machine: machine.gpu_bytes)
            raise ConfigError(
                f"option 'model': no instance of the price file holds {model.name}; the largest, {most.name}, has "
                f"{most.gpu_bytes / (1 << 30):.0f} GiB of GPU memory; add one with --prices"
            )
        machine = min(fitting, key=lambda each: (each.usd_per_hour, each.name))
    elif name in prices.machines:
        machine = prices.machines[name]
    else:
        raise ConfigError(f"option 'gpu': {name[:60]!r} is not in the price file; known: {', '.join(prices.machines)}")
    if values["gpu_price"] is not None:
        machine = dataclasses.replace(machine, usd_per_hour=values["gpu_price"])
    if not math.isfinite(machine.usd_per_hour):
        raise ConfigError(f"option 'gpu_price': {machine.usd_per_hour} is not a price")
    return machine


def _flag(option: Option) -> click.Option:
    """Values stay text: `kvstore.options` reads them, with the messages of all other sources."""
    default = "" if option.default is None else f" Default: {show_value(option, option.default)}."
    metavar = {"trace": "FILE", "prices": "FILE", "model": "NAME|FILE", "network": "GBPS"}.get(option.name)
    return click.Option(
        [option.name, f"--{option.name.replace('_', '-')}"],
        default=None,
        help=option.doc + default,
        metavar="|".join(option.choices) or metavar or option.kind.upper(),
    )


plan = click.Command(
    "plan",
    callback=_plan,
    help=_plan.__doc__,
    params=[
        *map(_flag, PLAN_OPTIONS),
        click.Option(["markdown", "--markdown"], is_flag=True, help="Scenarios as a Markdown table."),
        click.Option(
            ["as_json", "--json"], default="", metavar="FILE", help="Write it as JSON; -: to standard output."
        ),
        click.Option(["html", "--html"], default="", metavar="FILE", help="Write a page with the break-even plot."),
    ],
)
