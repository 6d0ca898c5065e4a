"""Published estimates of what such systems cost a month, and what the same parts cost by our price file.

Four guides give a range in USD for about 100, 1,000 and 10,000 or more requests a day each. They name services, rarely
quantities: those are assumed here, one line each, and shown. `kvstore plan --scenario all` prints the table of
docs/plan.md; a test compares the two.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvstore.errors import ConfigError

from .plan_core import DAYS_PER_MONTH, HOURS_PER_MONTH
from .plan_prices import Prices, load_prices

__all__ = ["SCENARIOS", "Line", "Scenario", "estimate", "scenario_report"]


@dataclass(frozen=True, slots=True)
class Line:
    """One item of a bill: `quantity` units of `what`.

    Attributes:
        kind: "gpu": hours of a GPU instance (`what`), at the mode's price; "node": hours of another node; "host": hours
            of another node of EC2, at the mode's price; "price": units of an entry of the price file.
    """

    label: str
    kind: str
    what: str
    quantity: float

    def usd(self, prices: Prices) -> float:
        if self.kind == "price":
            unit = prices.usd[self.what]
            per = prices.per[self.what]
            return self.quantity * unit / (1000 if per.startswith("1000 ") else 1)
        factor = prices.factor if self.kind == "host" else 1.0
        return self.quantity * prices.hourly(self.what) * factor


@dataclass(frozen=True, slots=True)
class Scenario:
    """One published estimate.

    Attributes:
        low, high: USD a month, as published.
        mode: how the guide pays for instances, where it says so; else what is assumed.
        named: what the guide names.
        remark: what has to be known about it; "" if nothing.
    """

    name: str
    region: str
    requests_per_day: int
    low: float
    high: float
    mode: str
    named: str
    lines: Sequence[Line]
    remark: str = ""


def _always(label: str, kind: str, what: str, count: int = 1) -> Line:
    return Line(f"{count} × {what}, {label}", kind, what, count * HOURS_PER_MONTH)


def _gpus(what: str, count: int = 1) -> Line:
    return _always("24 hours a day", "gpu", what, count)


def _storage(what: str, gigabytes: float) -> Line:
    return Line(f"{gigabytes:,.0f} GB of {what.partition('.')[0]}", "price", what, gigabytes)


def _bedrock(requests_per_day: int) -> list[Line]:
    """4,000 tokens in and 300 out of each request, and 10 s of a function of 1 GB."""
    month = requests_per_day * DAYS_PER_MONTH
    return [
        Line("Bedrock, 4,000 tokens in", "price", "bedrock.input", month * 4000),
        Line("Bedrock, 300 tokens out", "price", "bedrock.output", month * 300),
        Line("Lambda, 10 s at 1 GB", "price", "lambda.compute", month * 10),
    ]


_NAT = Line("NAT gateway", "price", "nat.hour", HOURS_PER_MONTH)
_ALB = Line("load balancer", "price", "alb.hour", HOURS_PER_MONTH)
_EKS = Line("EKS control plane", "price", "eks.hour", HOURS_PER_MONTH)
_LOGS = Line("10 GB of logs", "price", "cloudwatch.logs", 10)
_FARGATE = (
    Line("Fargate, 16 vCPU", "price", "fargate.vcpu", 16 * HOURS_PER_MONTH),
    Line("Fargate, 64 GB", "price", "fargate.memory", 64 * HOURS_PER_MONTH),
)
_TOKYO, _VIRGINIA = "ap-northeast-1", "us-east-1"

SCENARIOS: dict[str, Scenario] = {
    scenario.name: scenario
    for scenario in (
        Scenario(
            "cacheblend-small",
            _TOKYO,
            100,
            150,
            300,
            "on-demand",
            "Lambda, Bedrock, ElastiCache",
            [*_bedrock(100), _always("cache", "node", "cache.t4g.small"), _NAT, _LOGS],
            "Bedrock hands out no KV cache: nothing can be blended, the cache holds answers and text",
        ),
        Scenario(
            "cacheblend-medium",
            _TOKYO,
            1000,
            800,
            2000,
            "on-demand",
            "ECS Fargate, vLLM, EFS",
            [
                *_FARGATE,
                _storage("efs.storage", 500),
                Line("500 GB read from EFS", "price", "efs.read", 500),
                Line("200 GB written to EFS", "price", "efs.write", 200),
                _ALB,
                _NAT,
                _LOGS,
            ],
            "Fargate has no GPUs: this is vLLM on 16 virtual CPUs; with a GPU it is ECS on EC2",
        ),
        Scenario(
            "cacheblend-large",
            _TOKYO,
            10000,
            5000,
            15000,
            "spot",
            "EKS, spot GPUs, LMCache, NVMe",
            [_EKS, _gpus("g5.12xlarge", 4), _storage("s3.storage", 2000), _ALB, _NAT, _LOGS],
            "the guide names no instance; 4 × g5.12xlarge are assumed, their NVMe is part of the price",
        ),
        Scenario(
            "cachedattention-small",
            _TOKYO,
            100,
            50,
            150,
            "on-demand",
            "no parts are named",
            [*_bedrock(100), _always("cache", "node", "cache.t4g.small"), _LOGS],
            "assumed: as CacheBlend's small one, without a NAT gateway",
        ),
        Scenario(
            "cachedattention-medium",
            _TOKYO,
            1000,
            500,
            1200,
            "spot",
            "no parts are named",
            [
                _gpus("g5.xlarge"),
                _always("cache", "node", "cache.r6g.large"),
                _storage("efs.storage", 200),
                _ALB,
                _NAT,
                _LOGS,
            ],
            "assumed: one g5.xlarge on spot, one Valkey node, EFS",
        ),
        Scenario(
            "cachedattention-large",
            _TOKYO,
            10000,
            3000,
            8000,
            "on-demand",
            "EKS, i3.xlarge NVMe, g5.xlarge, r6g.large Valkey",
            [
                _EKS,
                _gpus("g5.xlarge", 4),
                _always("NVMe tier", "host", "i3.xlarge", 2),
                _always("cache", "node", "cache.r6g.large", 3),
                _ALB,
                _NAT,
                _LOGS,
            ],
            "numbers of instances are assumed: 4 g5.xlarge, 2 i3.xlarge, 3 cache nodes",
        ),
        Scenario(
            "cachegen-small",
            _VIRGINIA,
            100,
            800,
            1200,
            "on-demand",
            "ECS, S3, g5.xlarge",
            [_gpus("g5.xlarge"), _storage("s3.storage", 500), _storage("ebs.gp3", 100), _ALB, _NAT, _LOGS],
        ),
        Scenario(
            "cachegen-medium",
            _VIRGINIA,
            1000,
            2500,
            4000,
            "on-demand",
            "ECS, ElastiCache, 2 × g5.2xlarge, S3, CloudFront",
            [
                _gpus("g5.2xlarge", 2),
                _always("cache", "node", "cache.r7g.xlarge", 2),
                _storage("s3.storage", 2000),
                Line("1,000 GB through CloudFront", "price", "cloudfront.transfer", 1000),
                _storage("ebs.gp3", 200),
                _ALB,
                _NAT,
                _LOGS,
            ],
        ),
        Scenario(
            "cachegen-large",
            _VIRGINIA,
            10000,
            8000,
            15000,
            "spot",
            "EKS, Karpenter, 4 × g5.12xlarge spot",
            [
                _EKS,
                _gpus("g5.12xlarge", 4),
                _always("cache", "node", "cache.r7g.xlarge", 3),
                _storage("s3.storage", 5000),
                Line("5,000 GB through CloudFront", "price", "cloudfront.transfer", 5000),
                _ALB,
                _NAT,
                _LOGS,
            ],
        ),
        Scenario(
            "lmcache-small",
            _TOKYO,
            100,
            150,
            300,
            "spot",
            "g5.xlarge spot, DRAM, S3",
            [_gpus("g5.xlarge"), _storage("s3.storage", 500), _storage("ebs.gp3", 100), _LOGS],
            "host memory is part of the instance",
        ),
        Scenario(
            "lmcache-medium",
            _TOKYO,
            1000,
            800,
            1500,
            "spot",
            "ECS, Valkey, S3 Express",
            [
                _gpus("g5.xlarge", 2),
                _always("cache", "node", "cache.r6g.large"),
                _storage("s3express.storage", 500),
                _ALB,
                _NAT,
                _LOGS,
            ],
            "the guide names no GPUs; 2 × g5.xlarge on spot are assumed",
        ),
        Scenario(
            "lmcache-large",
            _TOKYO,
            10000,
            3000,
            6000,
            "spot",
            "EKS, g5.12xlarge spot, 3-node Valkey as PD hub",
            [
                _EKS,
                _gpus("g5.12xlarge"),
                _always("cache", "node", "cache.r6g.large", 3),
                _storage("s3express.storage", 1000),
                _ALB,
                _NAT,
                _LOGS,
            ],
        ),
    )
}
"""By name: guide and size."""


def estimate(scenario: Scenario, prices: Prices) -> dict[str, Any]:
    """Our bill for one scenario, where it lands, and if that is outside the published range, why."""
    items = {line.label: line.usd(prices) for line in scenario.lines}
    total = sum(items.values())
    verdict = "below" if total < scenario.low else "above" if total > scenario.high else "inside"
    return {
        "name": scenario.name,
        "region": scenario.region,
        "requests_per_day": scenario.requests_per_day,
        "named": scenario.named,
        "published_usd": [scenario.low, scenario.high],
        "pricing": prices.mode,
        "items": items,
        "monthly_usd": total,
        "verdict": verdict,
        "why": _why(scenario, items, prices, total, verdict),
        "remark": scenario.remark,
    }


def _why(scenario: Scenario, items: Mapping[str, float], prices: Prices, total: float, verdict: str) -> str:
    """What makes the difference; "" inside the range."""
    if verdict == "inside":
        return ""
    label = max(items, key=lambda each: items[each])
    largest = f"{label}: ${items[label]:,.0f} of ${total:,.0f}"
    if verdict == "below":
        return (
            f"the parts that the guide names come to less ({largest}); longer prompts, a larger model or parts that it "
            "does not name make up the rest"
        )
    gpu = sum(line.usd(prices) for line in scenario.lines if line.kind == "gpu")
    rest = total - gpu
    if gpu == 0 or rest >= scenario.high:
        return f"more than the guide counts with: {largest}"
    hours = 24 * (scenario.high - rest) / gpu
    alone = "already more than the range" if gpu > scenario.high else "most of it"
    return (
        f"the GPU alone ({prices.mode}, 24 hours a day) is ${gpu:,.0f}, {alone}; the range is reached at up to "
        f"{hours:.1f} hours a day (terraform/ has a schedule for that)"
    )


def scenario_report(name: str, mode: str | None, path: str = "") -> dict[str, Any]:
    """The report of one scenario, or of "all". `mode`: pay for instances so, instead of as the guide does.

    Raises:
        ConfigError: no such scenario, or as `load_prices`.
    """
    if name != "all" and name not in SCENARIOS:
        raise ConfigError(f"option 'scenario': {name[:60]!r} is not known; use all, or one of {', '.join(SCENARIOS)}")
    chosen = SCENARIOS.values() if name == "all" else [SCENARIOS[name]]
    found, books = [], dict[tuple[str, str], Prices]()
    for scenario in chosen:
        place = (scenario.region, mode or scenario.mode)
        if place not in books:
            books[place] = load_prices(*place, path)
        found.append(estimate(scenario, books[place]))
    first = next(iter(books.values()))
    return {
        "tool": "kvstore plan",
        "scenarios": found,
        "prices": {
            "date": first.date,
            "files": list(first.files),
            "sources": list(first.origins),
            "overridden": list(first.overridden),
        },
    }
