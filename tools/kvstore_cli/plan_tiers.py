"""What each tier costs a month, and from which hit rate on it pays. Pure functions.

A tier's bill is a list of items; nothing is rounded, so that each is monotone in what it depends on. Nodes are whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from kvstore.stream.estimates import PrefillModel

from .plan_core import (
    DAYS_PER_MONTH,
    GB,
    HOURS_PER_MONTH,
    Codec,
    Link,
    Machine,
    Traffic,
    load_of,
    saved_gpu_seconds,
    stored_bytes,
)
from .plan_models import Model
from .plan_prices import Prices

__all__ = ["TIERS", "Tier", "Usage", "break_even_hit_rate", "idle_seconds", "link_of", "monthly_usd", "usage_of"]

_PART_BYTES = 8 << 20  # one ranged read of s3://
_ASK_FIRST_BYTES = 1 << 20  # from here on s3:// asks whether a record is there before it sends it
_MULTIPART_BYTES, _WRITE_PART_BYTES = 64 << 20, 16 << 20
_LUSTRE_LEAST, _LUSTRE_STEP = 1200 * GB, 2400 * GB
_LUSTRE_BYTES_PER_S_PER_TIB = 500e6
_SERVERLESS_LEAST = GB / 10
_CROSS_ZONE_SHARE = 0.5  # of the bytes of a service whose nodes lie in one zone each
_HOST_SHARE = 0.25  # of a GPU host's memory that a tier gets
_DISK_SHARE = 0.9  # of its disks
_STEPS = 200


@dataclass(frozen=True, slots=True)
class Usage:
    """What a tier has to do in a month.

    Attributes:
        stored: bytes that lie there.
        records_put, records_got, lookups: records written, read and asked for.
        bytes_put, bytes_got: what they carry.
        record_bytes: stored bytes of one record.
        machines: GPU hosts; their memory and disks come with them.
    """

    stored: float
    records_put: float
    records_got: float
    lookups: float
    bytes_put: float
    bytes_got: float
    record_bytes: float
    machines: int


def usage_of(traffic: Traffic, *, record_bytes: float, chunk_size: int, ttl: float, machines: int) -> Usage:
    """The month of this traffic if one tier holds all of it."""
    per_token = record_bytes / chunk_size
    tokens = traffic.requests_per_day * DAYS_PER_MONTH * traffic.prompt_tokens
    got, put = tokens * traffic.hit_rate, tokens * (1 - traffic.hit_rate)
    return Usage(
        stored=stored_bytes(traffic, per_token, ttl=ttl),
        records_put=put / chunk_size,
        records_got=got / chunk_size,
        lookups=tokens / chunk_size,
        bytes_put=put * per_token,
        bytes_got=got * per_token,
        record_bytes=record_bytes,
        machines=machines,
    )


Bill = Mapping[str, float]
"""Item → USD a month."""


@dataclass(frozen=True, slots=True)
class Tier:
    """One kind of place.

    Attributes:
        name: as in the price file's links.
        title: for people.
        bill: what a month costs.
        shared: whether other hosts find what one host stored.
    """

    name: str
    title: str
    bill: Callable[[Usage, Prices, Machine], Bill]
    shared: bool = True


def _gets(usage: Usage) -> float:
    """GET-priced requests: a lookup each, ranged reads, and one question before a large put."""
    reads = max(1, math.ceil(usage.record_bytes / _PART_BYTES))
    asks = usage.records_put if usage.record_bytes >= _ASK_FIRST_BYTES else 0.0
    return usage.lookups + usage.records_got * reads + asks


def _puts(usage: Usage) -> float:
    parts = 1
    if usage.record_bytes > _MULTIPART_BYTES:
        parts = 2 + math.ceil(usage.record_bytes / _WRITE_PART_BYTES)  # begin, parts, complete
    return usage.records_put * parts


def _s3(usage: Usage, prices: Prices, _: Machine) -> Bill:
    return {
        "storage": usage.stored / GB * prices.usd["s3.storage"],
        "puts": _puts(usage) / 1000 * prices.usd["s3.put"],
        "gets": _gets(usage) / 1000 * prices.usd["s3.get"],
    }


def _s3express(usage: Usage, prices: Prices, _: Machine) -> Bill:
    return {
        "storage": usage.stored / GB * prices.usd["s3express.storage"],
        "puts": _puts(usage) / 1000 * prices.usd["s3express.put"],
        "gets": _gets(usage) / 1000 * prices.usd["s3express.get"],
        "upload": usage.bytes_put / GB * prices.usd["s3express.upload"],
        "retrieval": usage.bytes_got / GB * prices.usd["s3express.retrieval"],
    }


def _efs(usage: Usage, prices: Prices, _: Machine) -> Bill:
    return {
        "storage": usage.stored / GB * prices.usd["efs.storage"],
        "reads": usage.bytes_got / GB * prices.usd["efs.read"],
        "writes": usage.bytes_put / GB * prices.usd["efs.write"],
    }


def lustre_bytes(stored: float) -> float:
    """Provisioned capacity: 1,200 GiB, else a multiple of 2,400 GiB, with a tenth free."""
    wanted = stored / 0.9
    return _LUSTRE_LEAST if wanted <= _LUSTRE_LEAST else math.ceil(wanted / _LUSTRE_STEP) * _LUSTRE_STEP


def _lustre(usage: Usage, prices: Prices, _: Machine) -> Bill:
    return {"storage": lustre_bytes(usage.stored) / GB * prices.usd["fsx-lustre.storage"]}


def _serverless(usage: Usage, prices: Prices, _: Machine) -> Bill:
    units = (usage.bytes_put + usage.bytes_got) / 1024 + usage.lookups
    return {
        "storage": max(_SERVERLESS_LEAST, usage.stored)
        / GB
        * HOURS_PER_MONTH
        * prices.usd["valkey-serverless.storage"],
        "requests": units / 1e6 * prices.usd["valkey-serverless.ecpu"],
    }


def _cross_zone(usage: Usage, prices: Prices) -> float:
    """Both directions are charged for what crosses."""
    return (usage.bytes_put + usage.bytes_got) / GB * _CROSS_ZONE_SHARE * 2 * prices.usd["transfer.cross-zone"]


def _whole_nodes(stored: float, prices: Prices, name: str, *, least: int) -> tuple[int, float]:
    usd, usable = prices.nodes[name]
    count = max(least, math.ceil(stored / usable))
    return count, count * usd * HOURS_PER_MONTH


def _valkey(usage: Usage, prices: Prices, _: Machine) -> Bill:
    return {
        "nodes": _whole_nodes(usage.stored, prices, "cache.r7g.xlarge", least=1)[1],
        "transfer": _cross_zone(usage, prices),
    }


def _nvme(usage: Usage, prices: Prices, machine: Machine) -> Bill:
    over = max(0.0, usage.stored - usage.machines * machine.nvme_bytes * _DISK_SHARE)
    return {"own disks": 0.0, "further i4i.xlarge": _whole_nodes(over, prices, "i4i.xlarge", least=0)[1]}


def _dram(usage: Usage, prices: Prices, machine: Machine) -> Bill:
    over = max(0.0, usage.stored - usage.machines * machine.memory_bytes * _HOST_SHARE)
    return {"own memory": 0.0, "further r6i.2xlarge": _whole_nodes(over, prices, "r6i.2xlarge", least=0)[1]}


TIERS: tuple[Tier, ...] = (
    Tier("dram", "host memory", _dram, shared=False),
    Tier("nvme", "instance NVMe", _nvme, shared=False),
    Tier("valkey-node", "Valkey, nodes", _valkey),
    Tier("valkey-serverless", "Valkey serverless", _serverless),
    Tier("s3express", "S3 Express One Zone", _s3express),
    Tier("fsx-lustre", "FSx for Lustre", _lustre),
    Tier("efs", "EFS elastic", _efs),
    Tier("s3", "S3 Standard", _s3),
)
"""The fastest first, by first byte."""


def monthly_usd(tier: Tier, usage: Usage, prices: Prices, machine: Machine) -> float:
    return sum(tier.bill(usage, prices, machine).values())


def link_of(tier: Tier, prices: Prices, machine: Machine, usage: Usage, *, network: float | None = None) -> Link:
    """What one host gets from a tier: the service's own limit, the disks', or the network's (bytes per second), as far
    as it goes through them."""
    link = prices.links[tier.name]
    speed = link.bytes_per_s
    network = machine.network_bytes_per_s if network is None else network
    if tier.name == "dram":
        speed *= machine.gpus
    elif tier.name == "nvme":
        speed = min(speed, machine.nvme_bytes_per_s or network)  # without disks of its own: those of further nodes
    else:
        speed = min(speed, network)
    if tier.name == "fsx-lustre":
        speed = min(speed, lustre_bytes(usage.stored) / (1 << 40) * _LUSTRE_BYTES_PER_S_PER_TIB)
    return Link(link.latency, speed)


def break_even_hit_rate(
    tier: Tier,
    prices: Prices,
    machine: Machine,
    model: Model,
    codec: Codec,
    prefill: PrefillModel,
    traffic: Traffic,
    *,
    record_bytes: float,
    chunk_size: int,
    ttl: float,
    machines: int,
) -> float | None:
    """The lowest hit rate, to half a percent, at which the GPU time saved is worth the tier's bill; None: none is.

    Searched, since neither side is smooth: nodes are whole, and a prefix that is faster computed saves nothing.
    """
    monthly = DAYS_PER_MONTH * traffic.requests_per_day * machine.usd_per_hour / 3600
    for step in range(_STEPS + 1):
        some = replace(traffic, hit_rate=step / _STEPS)
        usage = usage_of(some, record_bytes=record_bytes, chunk_size=chunk_size, ttl=ttl, machines=machines)
        load = load_of(model, codec, link_of(tier, prices, machine, usage), vcpus=machine.vcpus)
        saved = monthly * saved_gpu_seconds(prefill, load, some)
        if saved > 0 and saved >= monthly_usd(tier, usage, prices, machine):
            return step / _STEPS
    return None


def idle_seconds(
    tier: Tier,
    prices: Prices,
    machine: Machine,
    prefill: PrefillModel,
    *,
    record_bytes: float,
    chunk_size: int,
    depth: int,
) -> float:
    """How long a record may lie unused before keeping it costs more than computing it again (the five-minute rule):
    GPU dollars of one chunk in the middle of a prefix of `depth` tokens, over the dollars of its bytes per second."""
    worth = chunk_size / prefill.tokens_per_s(depth // 2) * machine.usd_per_hour / 3600
    per_month: Sequence[str] = ("s3.storage", "s3express.storage", "efs.storage", "fsx-lustre.storage")
    name = f"{tier.name}.storage"
    if name in per_month:
        rate = prices.usd[name]
    elif tier.name == "valkey-serverless":
        rate = prices.usd[name] * HOURS_PER_MONTH
    else:
        node = {"dram": "r6i.2xlarge", "nvme": "i4i.xlarge", "valkey-node": "cache.r7g.xlarge"}[tier.name]
        usd, usable = prices.nodes[node]
        rate = usd * HOURS_PER_MONTH / (usable / GB)
    per_second = record_bytes / GB * rate / (HOURS_PER_MONTH * 3600)
    return worth / per_second if per_second > 0 else math.inf
