"""What `kvstore plan` calculates with: times, bytes and volumes. Pure functions and values; no I/O, no prices of tiers.

Units: seconds, bytes, tokens, US dollars; GB is 2^30 bytes (as AWS bills), a month 730 hours.

Notation (docs/plan.md): n tokens of a prompt, h hit rate = share of a prompt's tokens that are found stored as its
prefix, T(n) = a·n + b·n(n-1)/2 seconds to prefill n tokens, t₀ + n·β seconds to load the KV of n tokens. T is
`kvstore.stream`'s model, so that its planner and this one agree.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvstore.errors import ConfigError
from kvstore.stream.estimates import PrefillModel

from .plan_models import Model

__all__ = [
    "CODECS",
    "DAYS_PER_MONTH",
    "GB",
    "HOURS_PER_MONTH",
    "MOST_TOKENS",
    "Codec",
    "Link",
    "Load",
    "Machine",
    "Traffic",
    "bandwidth_for_target",
    "break_even_tokens",
    "decode_seconds",
    "instances_needed",
    "load_of",
    "new_bytes_per_day",
    "prefill_of",
    "saved_gpu_seconds",
    "stored_bytes",
    "ttft_seconds",
]

GB = 1 << 30
HOURS_PER_MONTH = 730.0
DAYS_PER_MONTH = HOURS_PER_MONTH / 24
MOST_TOKENS = 1 << 40
"""A break-even beyond so many tokens counts as none."""

_FREE_FOR_KV = 0.9  # of a GPU's memory, for weights and KV
_DECODE_SHARE = 0.7  # of memory speed that decoding reaches
_MOST_BATCH = 256
_CORES_FOR_US = 0.5  # of a host's, for decoding codecs


@dataclass(frozen=True, slots=True)
class Codec:
    """How much smaller a codec makes bfloat16 KV, and how fast one core takes it apart.

    Attributes:
        ratio: raw bytes over stored bytes.
        decode_bytes_per_s: raw bytes per second and core; infinite for raw.
        source: where the two numbers come from.
    """

    name: str
    ratio: float
    decode_bytes_per_s: float
    source: str


CODECS: dict[str, Codec] = {
    codec.name: codec
    for codec in (
        Codec("raw", 1.0, math.inf, "no codec"),
        Codec("lz4", 1.164, 2.534e9, "measured, docs/figures.md"),
        Codec("shuffle-zstd", 1.473, 2.034e9, "measured, docs/figures.md"),
        Codec("cachegen", 6.15, 0.2e9, "2.60 bits a value at KL 0.15, 100 M symbols/s a core: of one 135M model"),
        Codec("kvt", 9.25, 0.2e9, "1.73 bits a value at KL 0.03, 100 M symbols/s a core: of one 135M model"),
    )
}
"""By name. The lossy ones are estimates from a small model; `--codec-ratio` replaces them by what was measured."""


@dataclass(frozen=True, slots=True)
class Machine:
    """A GPU instance. Rates are of all its GPUs together; `flops` is the data sheet's, dense, 16 bit."""

    name: str
    gpu: str
    gpus: int
    vcpus: int
    flops: float
    gpu_bytes: float
    gpu_bytes_per_s: float
    memory_bytes: float
    nvme_bytes: float
    nvme_bytes_per_s: float
    network_bytes_per_s: float
    efa: bool
    usd_per_hour: float

    def fits(self, model: Model) -> bool:
        """Whether the weights leave room for at least a tenth of the memory as KV."""
        return model.weight_bytes <= self.gpu_bytes * (_FREE_FOR_KV - 0.1)


@dataclass(frozen=True, slots=True)
class Traffic:
    """What comes in.

    Attributes:
        prompt_tokens, output_tokens: of one request, on average.
        hit_rate: share of a prompt's tokens that is found stored, 0 to 1.
        peak_factor: the busiest hour over the average one.
    """

    requests_per_day: float
    prompt_tokens: int
    hit_rate: float
    output_tokens: int = 256
    peak_factor: float = 3.0

    @property
    def hit_tokens(self) -> int:
        """Tokens of one prompt that are loaded."""
        return round(self.prompt_tokens * self.hit_rate)

    @property
    def peak_requests_per_s(self) -> float:
        return self.requests_per_day / 86400 * self.peak_factor


@dataclass(frozen=True, slots=True)
class Link:
    """t₀ and bandwidth of a way from a tier to a machine: seconds, bytes per second."""

    latency: float
    bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Load:
    """t₀ + n·β: seconds until the KV of n tokens is there."""

    latency: float
    per_token: float

    def seconds(self, tokens: float) -> float:
        return self.latency + tokens * self.per_token if tokens > 0 else 0.0


def prefill_of(model: Model, machine: Machine, *, mfu: float, tokens_per_s: float | None = None) -> PrefillModel:
    """How long a machine takes to prefill: 2 FLOPs per weight and token, and 2 · attention width per pair of tokens and
    layer, at `mfu` of the data sheet's FLOPs; or at a measured rate, for any length."""
    if tokens_per_s is not None:
        return PrefillModel(1 / tokens_per_s)
    speed = machine.flops * mfu
    return PrefillModel(2 * model.active / speed, 2 * model.attention_width * model.layout.num_layers / speed)


def decode_seconds(model: Model, machine: Machine, traffic: Traffic, *, tokens_per_s: float | None = None) -> float:
    """Seconds of one machine that one request's output takes, at the largest batch whose KV fits (up to 256), limited
    by memory speed: every step reads the weights and the KV of the batch.

    Raises:
        ConfigError: not even one request fits.
    """
    if traffic.output_tokens == 0:
        return 0.0
    if tokens_per_s is not None:
        return traffic.output_tokens / tokens_per_s
    kv = model.kv_bytes(1) * (traffic.prompt_tokens + traffic.output_tokens)
    room = machine.gpu_bytes * _FREE_FOR_KV - model.weight_bytes
    batch = min(_MOST_BATCH, math.floor(room / kv))
    if batch < 1:
        raise ConfigError(
            f"option 'prompt_tokens': {traffic.prompt_tokens + traffic.output_tokens} tokens of {model.name} need "
            f"{kv / GB:.1f} GiB of KV, and {machine.name} has {max(0.0, room) / GB:.1f} GiB beside the weights; "
            "choose a larger instance with --gpu, or shorter prompts"
        )
    step = (model.weight_bytes + batch * kv) / (machine.gpu_bytes_per_s * _DECODE_SHARE)
    return traffic.output_tokens * step / batch


def load_of(model: Model, codec: Codec, link: Link, *, vcpus: int) -> Load:
    """How long loading takes over a link: transfer and decoding overlap, so the slower of the two counts."""
    raw = model.kv_bytes(1)
    cores = max(1.0, vcpus * _CORES_FOR_US)
    return Load(link.latency, max(raw / codec.ratio / link.bytes_per_s, raw / (codec.decode_bytes_per_s * cores)))


def break_even_tokens(prefill: PrefillModel, load: Load) -> int | None:
    """The shortest prefix, in tokens, that is loaded no slower than it is computed: t₀ + n·β <= T(n). All longer ones
    are, too (T is convex, and 0 at 0). None: no prefix up to `MOST_TOKENS` is.
    """
    half = prefill.b / 2
    gain = prefill.a - half - load.per_token
    if half > 0:
        root = math.sqrt(gain * gain + 4 * half * load.latency)
        # The two forms of the positive root; each is exact where the other one loses digits.
        exact = 2 * load.latency / (gain + root) if gain > 0 else (root - gain) / (2 * half)
    elif gain > 0:
        exact = load.latency / gain
    else:
        return 1 if gain == 0 and load.latency == 0 else None
    if exact > MOST_TOKENS:
        return None
    tokens = max(1, math.floor(exact) - 2)
    while load.seconds(tokens) > prefill.seconds(0, tokens):  # a few steps at most: rounding
        tokens += max(1, tokens >> 40)
    return tokens


def ttft_seconds(prefill: PrefillModel, load: Load, traffic: Traffic) -> float:
    """Time to first token of a hit: the prefix is loaded, or computed if that is faster, then the rest is computed.
    Nothing is overlapped: an upper bound for loading layer by layer."""
    hit = traffic.hit_tokens
    rest = prefill.seconds(hit, traffic.prompt_tokens - hit)
    return min(load.seconds(hit), prefill.seconds(0, hit)) + rest


def bandwidth_for_target(
    prefill: PrefillModel, stored_bytes_per_token: float, traffic: Traffic, *, target: float, latency: float
) -> float | None:
    """Bytes per second that one request needs for its prefix so that the first token is there after `target` seconds.
    0: nothing has to be loaded. None: no bandwidth is enough, since the rest of the prompt alone takes too long."""
    hit = traffic.hit_tokens
    if prefill.seconds(0, traffic.prompt_tokens) <= target:
        return 0.0
    left = target - prefill.seconds(hit, traffic.prompt_tokens - hit) - latency
    return None if left <= 0 or hit == 0 else hit * stored_bytes_per_token / left


def saved_gpu_seconds(prefill: PrefillModel, load: Load, traffic: Traffic) -> float:
    """GPU seconds per request that need not be computed: those of the prefix, if loading it is not slower than that
    (otherwise kvstore recomputes, and saves nothing)."""
    hit = prefill.seconds(0, traffic.hit_tokens)
    return hit if load.seconds(traffic.hit_tokens) <= hit else 0.0


def new_bytes_per_day(traffic: Traffic, stored_bytes_per_token: float) -> float:
    """Bytes written per day: the tokens that were not found."""
    return traffic.requests_per_day * traffic.prompt_tokens * (1 - traffic.hit_rate) * stored_bytes_per_token


def stored_bytes(traffic: Traffic, stored_bytes_per_token: float, *, ttl: float) -> float:
    """Bytes that lie stored if each record goes `ttl` seconds after it was put."""
    return new_bytes_per_day(traffic, stored_bytes_per_token) * ttl / 86400


def instances_needed(busy_seconds_per_request: float, traffic: Traffic, *, utilisation: float) -> int:
    """Machines for the busiest hour, each busy for at most `utilisation` of it; at least one."""
    return max(1, math.ceil(traffic.peak_requests_per_s * busy_seconds_per_request / utilisation - 1e-9))
