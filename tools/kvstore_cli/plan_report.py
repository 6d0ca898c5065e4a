"""One plan, calculated: all that `kvstore plan` shows, as plain values. Pure; the table and the page only print it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from kvstore.errors import ConfigError
from kvstore.record import kv_spec
from kvstore.stream.estimates import PrefillModel

from .plan_core import (
    DAYS_PER_MONTH,
    GB,
    HOURS_PER_MONTH,
    Codec,
    Load,
    Machine,
    Traffic,
    bandwidth_for_target,
    break_even_tokens,
    decode_seconds,
    instances_needed,
    load_of,
    prefill_of,
    saved_gpu_seconds,
    stored_bytes,
    ttft_seconds,
)
from .plan_models import Model
from .plan_prices import Prices
from .plan_tiers import TIERS, Tier, Usage, break_even_hit_rate, idle_seconds, link_of, usage_of

__all__ = ["LINKS_GBPS", "SIZES", "Inputs", "make_plan", "size_of"]

LINKS_GBPS = (5, 10, 25, 100, 400)
_TTLS = {"1h": 3600.0, "6h": 21600.0, "1d": 86400.0, "7d": 604800.0, "30d": 2592000.0}
_UTILISATION = 0.7
_MEDIUM_INSTANCES = 8
_MEDIUM_BYTES = 20 << 40
_ZONES = {"us-east-1": "use1-az4", "ap-northeast-1": "apne1-az4"}  # some zone of each that has S3 Express
_LEAST_TTL, _MOST_TTL = 300.0, 30 * 86400.0

SIZES: Mapping[str, tuple[str, ...]] = {
    "small": ("dram", "nvme", "s3"),
    "medium": ("dram", "nvme", "valkey-node", "s3express", "s3"),
    "large": ("dram", "nvme", "s3express", "s3"),
}
"""Folder of terraform/ → the tiers it sets up (of several shared ones the cheapest useful one is recommended)."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """What to plan for.

    Attributes:
        ttl: how long records are kept, seconds.
        target: wanted time to first token of a hit, seconds.
        prefill_tokens_per_s, decode_tokens_per_s: of one machine, measured; None: estimated from the data sheet.
        network: bytes per second of one host; None: the instance's.
        notes: what was assumed on the way here.
    """

    model: Model
    traffic: Traffic
    machine: Machine
    codec: Codec
    chunk_size: int = 256
    ttl: float = 86400.0
    target: float = 1.0
    mfu: float = 0.5
    prefill_tokens_per_s: float | None = None
    decode_tokens_per_s: float | None = None
    network: float | None = None
    notes: tuple[str, ...] = field(default=())


def size_of(instances: int, nbytes: float) -> str:
    """small: one GPU instance; medium: up to 8 and 20 TiB; large: more."""
    if instances > _MEDIUM_INSTANCES or nbytes > _MEDIUM_BYTES:
        return "large"
    return "small" if instances == 1 else "medium"


def make_plan(inputs: Inputs, prices: Prices) -> dict[str, Any]:
    """The whole plan. Bytes, seconds, USD; `None` where something is not reached at all.

    Raises:
        ConfigError: the model does not fit into the instance, or a prompt does not.
    """
    model, traffic, machine, codec = inputs.model, inputs.traffic, inputs.machine, inputs.codec
    if not machine.fits(model):
        raise ConfigError(
            f"option 'gpu': {model.name} has {model.weight_bytes / GB:.0f} GiB of weights, and {machine.name} "
            f"{machine.gpu_bytes / GB:.0f} GiB of GPU memory; use --gpu auto, or a larger instance"
        )
    spec = kv_spec(model.layout, model.dtype, inputs.chunk_size)
    record = spec.nbytes - spec.raw_bytes + spec.raw_bytes / codec.ratio
    per_token = record / inputs.chunk_size
    prefill = prefill_of(model, machine, mfu=inputs.mfu, tokens_per_s=inputs.prefill_tokens_per_s)
    usage = usage_of(traffic, record_bytes=record, chunk_size=inputs.chunk_size, ttl=inputs.ttl, machines=1)
    helps = any(_loads_faster(tier, inputs, prices, prefill, usage) for tier in TIERS if tier.shared)
    fleet = _fleet(inputs, prefill, helps=helps)
    usage = replace(usage, machines=fleet["instances"])
    tiers = [_tier(tier, inputs, prices, prefill, usage) for tier in TIERS]
    volume = {name: stored_bytes(traffic, per_token, ttl=ttl) for name, ttl in _TTLS.items()}
    full = prefill.seconds(0, traffic.prompt_tokens)
    needed = {
        tier.name: bandwidth_for_target(
            prefill, per_token, traffic, target=inputs.target, latency=prices.links[tier.name].latency
        )
        for tier in TIERS
    }
    return {
        "tool": "kvstore plan",
        "inputs": _inputs(inputs, prices),
        "kv": {
            "bytes_per_token": model.kv_bytes(1),
            "bytes_per_chunk": spec.raw_bytes,
            "record_bytes": record,
            "stored_bytes_per_token": per_token,
            "prompt_bytes": model.kv_bytes(traffic.prompt_tokens),
        },
        "volume": {
            "stored_bytes": usage.stored,
            "by_ttl": volume,
            "new_bytes_per_month": usage.bytes_put,
            "read_bytes_per_month": usage.bytes_got,
        },
        "prefill": {
            "tokens_per_s": traffic.prompt_tokens / full,
            "prompt_s": full,
            "a": prefill.a,
            "b": prefill.b,
            "source": "estimated" if inputs.prefill_tokens_per_s is None else "given",
        },
        "ttft": {
            "target_s": inputs.target,
            "hit_tokens": traffic.hit_tokens,
            "without_s": full,
            "bandwidth_bytes_per_s": needed,
            "peak_bytes_per_s": traffic.peak_requests_per_s * traffic.hit_tokens * per_token,
        },
        "gpu": fleet,
        "tiers": tiers,
        "recommendation": _recommendation(inputs, fleet, usage, tiers, prices),
        "prices": {
            "date": prices.date,
            "files": list(prices.files),
            "sources": list(prices.origins),
            "overridden": list(prices.overridden),
        },
        "notes": _notes(inputs),
    }


def _inputs(inputs: Inputs, prices: Prices) -> dict[str, Any]:
    layout, traffic = inputs.model.layout, inputs.traffic
    return {
        "model": inputs.model.name,
        "layers": layout.num_layers,
        "kv_heads": layout.num_kv_heads,
        "head_dim": layout.head_dim,
        "kind": layout.kind,
        "dtype": inputs.model.dtype,
        "params": inputs.model.params,
        "active_params": inputs.model.active,
        "requests_per_day": traffic.requests_per_day,
        "prompt_tokens": traffic.prompt_tokens,
        "output_tokens": traffic.output_tokens,
        "hit_rate": traffic.hit_rate,
        "peak_factor": traffic.peak_factor,
        "gpu": inputs.machine.name,
        "gpu_usd_per_hour": inputs.machine.usd_per_hour,
        "region": prices.region,
        "pricing": prices.mode,
        "codec": inputs.codec.name,
        "codec_ratio": inputs.codec.ratio,
        "chunk_size": inputs.chunk_size,
        "ttl_s": inputs.ttl,
    }


def _loads_faster(tier: Tier, inputs: Inputs, prices: Prices, prefill: PrefillModel, usage: Usage) -> bool:
    """Whether a tier that some size of terraform/ has brings the prefix sooner than it is computed."""
    if not any(tier.name in names for names in SIZES.values()):
        return False
    link = link_of(tier, prices, inputs.machine, usage, network=inputs.network)
    load = load_of(inputs.model, inputs.codec, link, vcpus=inputs.machine.vcpus)
    return saved_gpu_seconds(prefill, load, inputs.traffic) > 0


def _fleet(inputs: Inputs, prefill: PrefillModel, *, helps: bool) -> dict[str, Any]:
    """GPU time and instances without and with kvstore. `helps`: some shared tier is faster than computing; else every
    prefix is computed as before."""
    traffic, machine = inputs.traffic, inputs.machine
    full = prefill.seconds(0, traffic.prompt_tokens)
    decode = decode_seconds(inputs.model, machine, traffic, tokens_per_s=inputs.decode_tokens_per_s)
    prefix = prefill.seconds(0, traffic.hit_tokens)
    hit = prefix if helps else 0.0
    requests = traffic.requests_per_day * DAYS_PER_MONTH
    before = instances_needed(full + decode, traffic, utilisation=_UTILISATION)
    after = instances_needed(full - hit + decode, traffic, utilisation=_UTILISATION)
    monthly = HOURS_PER_MONTH * machine.usd_per_hour
    return {
        "name": machine.name,
        "usd_per_hour": machine.usd_per_hour,
        "decode_s_per_request": decode,
        "hit_prefill_s": prefix,
        "busy_hours_without": requests * (full + decode) / 3600,
        "busy_hours_with": requests * (full - hit + decode) / 3600,
        "saved_hours": requests * hit / 3600,
        "saved_usd": requests * hit / 3600 * machine.usd_per_hour,
        "instances_without": before,
        "instances": after,
        "monthly_usd_without": before * monthly,
        "monthly_usd": after * monthly,
    }


def _tier(tier: Tier, inputs: Inputs, prices: Prices, prefill: PrefillModel, usage: Usage) -> dict[str, Any]:
    machine, traffic = inputs.machine, inputs.traffic
    bill = tier.bill(usage, prices, machine)

    def load(network: float | None) -> Load:
        link = link_of(tier, prices, machine, usage, network=network)
        return load_of(inputs.model, inputs.codec, link, vcpus=machine.vcpus)

    own = load(inputs.network)
    saved = saved_gpu_seconds(prefill, own, traffic) * traffic.requests_per_day * DAYS_PER_MONTH / 3600
    total = sum(bill.values())
    least = break_even_tokens(prefill, own)
    return {
        "name": tier.name,
        "title": tier.title,
        "shared": tier.shared,
        "items": dict(bill),
        "monthly_usd": total,
        "latency_s": own.latency,
        "link_bytes_per_s": link_of(tier, prices, machine, usage, network=inputs.network).bytes_per_s,
        "load_s": own.seconds(traffic.hit_tokens),
        "load_s_per_token": own.per_token,
        "ttft_s": ttft_seconds(prefill, own, traffic),
        "break_even_tokens": least,
        "break_even_by_link": {f"{gbps}Gbps": break_even_tokens(prefill, load(gbps * 1e9 / 8)) for gbps in LINKS_GBPS},
        "break_even_hit_rate": break_even_hit_rate(
            tier,
            prices,
            machine,
            inputs.model,
            inputs.codec,
            prefill,
            traffic,
            record_bytes=usage.record_bytes,
            chunk_size=inputs.chunk_size,
            ttl=inputs.ttl,
            machines=usage.machines,
        ),
        "saved_gpu_hours": saved,
        "saved_usd": saved * machine.usd_per_hour,
        "net_usd": saved * machine.usd_per_hour - total,
        "faster_than_prefill": least is not None and 0 < least <= traffic.hit_tokens,
        "meets_target": ttft_seconds(prefill, own, traffic) <= inputs.target,
        "idle_s": idle_seconds(
            tier,
            prices,
            machine,
            prefill,
            record_bytes=usage.record_bytes,
            chunk_size=inputs.chunk_size,
            depth=traffic.hit_tokens,
        ),
    }


def _recommendation(
    inputs: Inputs, fleet: Mapping[str, Any], usage: Usage, tiers: list[dict[str, Any]], prices: Prices
) -> dict[str, Any]:
    by_name = {tier["name"]: tier for tier in tiers}
    needed = size_of(fleet["instances"], usage.stored)
    # The smallest size that is large enough and has a shared tier which is faster than computing; else just that size.
    sizes = list(SIZES)[list(SIZES).index(needed) :]
    size = next((each for each in sizes if any(_useful_shared(by_name[name]) for name in SIZES[each])), needed)
    candidates = [by_name[name] for name in SIZES[size]]
    shared = [tier for tier in candidates if _useful_shared(tier)]
    # Those that meet the target first, then the cheapest.
    best = min(shared, key=lambda tier: (not tier["meets_target"], tier["monthly_usd"]), default=None)
    chosen = [tier for tier in candidates if tier["faster_than_prefill"] and not tier["shared"]]
    chosen += [best] if best is not None else []
    reasons = [
        f"{fleet['instances']} × {inputs.machine.name} at the peak, {usage.stored / GB:,.1f} GiB stored: {needed} "
        "(small: one instance; medium: up to 8 and 20 TiB; large: more)"
    ]
    if size != needed:
        reasons.append(f"{size}, since no shared tier of {needed} is faster than computing the prefix")
    if best is None:
        reasons += _why_none(inputs, tiers)
    else:
        reasons.append(
            f"{best['title']}: {best['load_s']:.2f} s to load what takes {fleet['hit_prefill_s']:.2f} s to compute"
            + (
                ""
                if best["meets_target"]
                else f"; TTFT {best['ttft_s']:.2f} s, beyond the target of {inputs.target:g} s"
            )
        )
        reasons.append(
            f"the bill: {fleet['instances_without']} instances, ${fleet['monthly_usd_without']:,.0f}, without; "
            f"{fleet['instances']} and the tier, ${fleet['monthly_usd'] + best['monthly_usd']:,.0f}, with. By the hour "
            f"of GPU time the tier saves ${best['saved_usd']:,.0f} and costs ${best['monthly_usd']:,.0f}"
        )
    plan = []
    for tier in chosen:
        ttl = min(_MOST_TTL, max(_LEAST_TTL, tier["idle_s"]))
        url = _url(tier["name"], inputs.machine, prices, size, ttl=ttl)
        plan.append({"tier": tier["name"], "title": tier["title"], "url": url, "ttl_s": ttl})
    return {
        "size": size,
        "folder": f"terraform/{size}",
        "instances": fleet["instances"],
        "tiers": plan,
        "monthly_usd": fleet["monthly_usd"] + (best["monthly_usd"] if best is not None else 0.0),
        "reasons": reasons,
        "config": _config(plan, inputs),
    }


def _useful_shared(tier: Mapping[str, Any]) -> bool:
    return bool(tier["shared"] and tier["faster_than_prefill"])


def _why_none(inputs: Inputs, tiers: list[dict[str, Any]]) -> list[str]:
    """Why nothing shared is recommended, and what would change that."""
    hit = inputs.traffic.hit_tokens
    shared = [tier for tier in tiers if tier["shared"] and any(tier["name"] in names for names in SIZES.values())]
    least = [tier["break_even_tokens"] for tier in shared if tier["break_even_tokens"] is not None]
    reasons = [
        f"no shared tier brings {hit:,} tokens sooner than {inputs.machine.name} computes them"
        + (f"; the first would from {min(least):,} tokens on" if least else ", and none would at any length")
    ]
    if hit == 0:
        return ["nothing is found stored (hit rate 0), so nothing is saved"]
    wanted = {
        link
        for tier in shared
        for link, tokens in tier["break_even_by_link"].items()
        if tokens is not None and tokens <= hit
    }
    links = [f"{gbps}Gbps" for gbps in LINKS_GBPS]
    if first := next((link for link in links if link in wanted), None):
        reasons.append(
            f"with {first} to each host one would (--network; {inputs.machine.name} is counted with its baseline)"
        )
    if inputs.codec.ratio < 4:
        reasons.append("a smaller encoding shifts that too: try --codec kvt")
    return reasons


def _url(name: str, machine: Machine, prices: Prices, size: str, *, ttl: float) -> str:
    """`ttl`, seconds: memory and disk of a host have none, since they evict what was used least."""
    zone = _ZONES.get(prices.region, "use1-az4")
    keep = f"ttl={round(ttl / 3600)}h" if ttl >= 3600 else f"ttl={round(ttl / 60)}min"
    memory = max(1, int(machine.memory_bytes * 0.25 / GB))
    disk = max(1, int(machine.nvme_bytes * 0.9 / GB))
    return {
        "dram": f"memory://?bytes={memory}GiB",
        "nvme": f"file:///nvme/kv?bytes={disk}GiB",
        "s3": f"s3://kvstore-{size}/kv?region={prices.region}&{keep}",
        "s3express": f"s3://kvstore-{size}--{zone}--x-s3/kv?region={prices.region}&{keep}",
        "valkey-node": f"valkeys://cache.example.internal:6379?{keep}",
    }[name]


def _config(plan: list[dict[str, Any]], inputs: Inputs) -> dict[str, Any] | None:
    """The configuration that `kvstore config check` accepts; the names of buckets and hosts are terraform's outputs."""
    if not plan:
        return None
    config: dict[str, Any] = {"chunk_size": inputs.chunk_size}
    if len(plan) > 1:
        config["tiers"] = [each["url"] for each in plan]
    else:
        config["remote_url"] = plan[0]["url"]
    if inputs.codec.name in ("lz4", "shuffle-zstd"):
        config["remote_serde"] = inputs.codec.name
    return config


def _notes(inputs: Inputs) -> list[str]:
    notes = list(inputs.notes)
    if inputs.model.note:
        notes.append(f"{inputs.model.name}: {inputs.model.note}")
    if inputs.prefill_tokens_per_s is None:
        notes.append(
            f"prefill speed is estimated: {inputs.mfu:.0%} of the data sheet's FLOPs; measure it and give "
            "--prefill-tokens-per-s"
        )
    if inputs.codec.name in ("cachegen", "kvt"):
        notes.append(f"codec {inputs.codec.name} loses precision; its size is an estimate: {inputs.codec.source}")
    notes.append("prices are from general knowledge, never checked against AWS; nothing here was ever applied to AWS")
    return notes
