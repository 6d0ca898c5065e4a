"""What is to be loaded, in which groups of layers, and how far ahead. Pure functions and values; no I/O.

Notation as in ARCHITECTURE.md and docs/prefetch.md: t_l seconds to load layer l, c_l seconds to compute it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvstore.errors import ConfigError
from kvstore.keys import Key
from kvstore.record import RecordSpec
from kvstore.scheduler import Priority

__all__ = ["FIRST_GROUP_BYTES", "Chunk", "LayerPlan", "layer_groups", "pipeline_seconds", "read_buffer_bytes"]

FIRST_GROUP_BYTES = 1 << 20
_GROWTH = 2
_GROUP_SHARE = 0.1  # of the layers in one group: a larger one would be waited for longer than its I/O saves


class Chunk(NamedTuple):
    """One record of a prefix: its key and its shape (`kv_spec`)."""

    key: Key
    spec: RecordSpec


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """Prefixes to load, layer by layer.

    Attributes:
        prefixes: one or several prompts that are computed together, each as its chunks in order. All records have the
            same number of layers.
        deadline: absolute monotonic seconds for all of it; None: the store's `blocking_timeout` from `start` on. In a
            queue that is announced: when the job has to be ready; None: after those that say when.
        priority: PREFETCH gives way to every other stream.
        compute_s: seconds that computing one layer is expected to take (T_pref · L_new / L), None if unknown. With it
            no more is loaded ahead than loading could be short of by the end; see `read_buffer_bytes`.
        level: highest level of encoded records that is wanted; None: the store's option `codec_level`.
        split: a layer that is larger than the prefetcher's budget comes in several parts, which `LayerStream.parts`
            gives one by one. Otherwise such a layer is loaded whole, alone.

    Raises:
        ConfigError: no chunk at all, or records of different numbers of layers.
    """

    prefixes: Sequence[Sequence[Chunk]]
    deadline: float | None = None
    priority: Priority = Priority.DEMAND
    compute_s: float | None = None
    split: bool = False
    level: int | None = None

    def __post_init__(self) -> None:
        counts = {len(chunk.spec.sizes) for prefix in self.prefixes for chunk in prefix}
        if not counts:
            raise ConfigError("a layer plan needs at least one chunk")
        if len(counts) > 1:
            raise ConfigError(f"the records of a layer plan have different numbers of layers: {sorted(counts)}")
        for name, value in (("deadline", self.deadline), ("compute_s", self.compute_s)):
            if value is not None and math.isnan(value):
                raise ConfigError(f"{name} of a layer plan is not a number")
        if self.compute_s is not None and self.compute_s < 0:
            raise ConfigError(f"compute_s={self.compute_s} of a layer plan must not be negative")

    @classmethod
    def of(
        cls, keys: Sequence[Key], spec: RecordSpec, *, deadline: float | None = None,
        priority: Priority = Priority.DEMAND, compute_s: float | None = None, split: bool = False,
        level: int | None = None,
    ) -> LayerPlan:  # fmt: skip
        """The plan of one prompt whose chunks all have the same shape."""
        return cls(([Chunk(key, spec) for key in keys],), deadline, priority, compute_s, split, level)

    @property
    def num_layers(self) -> int:
        return next(len(chunk.spec.sizes) for prefix in self.prefixes for chunk in prefix)

    @property
    def name(self) -> tuple[int | None, tuple[tuple[tuple[Key, int], ...], ...]]:
        """Equal for two plans over the same level of the same records."""
        return self.level, tuple(tuple((chunk.key, chunk.spec.nbytes) for chunk in prefix) for prefix in self.prefixes)

    def layer_bytes(self, layer: int) -> int:
        """Raw bytes of one layer over all chunks."""
        return sum(chunk.spec.sizes[layer] for prefix in self.prefixes for chunk in prefix)


def layer_groups(
    totals: Sequence[int], largest: Sequence[int], *, preferred: int, most: int, first: int = FIRST_GROUP_BYTES
) -> list[tuple[int, int]]:
    """The layers in order, in groups that are loaded together: (first layer, number of layers).

    The first group is small, so that computing begins early; each next one may be twice as large, until the range it
    takes from a record reaches `preferred`, the size from which the backend runs at full speed. No group has more than
    a tenth of the layers (unless it is tiny), and towards the end they shrink again: the layers of a group are computed
    only once all of it is there, so large groups would take from the overlap what they save in requests. With equal
    t and c the pipeline of the groups is within a tenth of that of single layers.

    Args:
        totals: bytes of each layer over all chunks.
        largest: bytes of each layer in the chunk that has most of it.
        preferred: the backend's preferred I/O size, in bytes.
        most: no group is larger than this, in bytes, unless it is a single layer.
        first: the first group may be so large; no group needs to be smaller. Bytes.
    """
    groups: list[tuple[int, int]] = []
    end, begin, target = len(totals), 0, first
    share = max(1, int(end * _GROUP_SHARE))
    while begin < end:
        count, total, piece = 1, totals[begin], largest[begin]
        left = end - begin
        while count < left:
            total += totals[begin + count]
            piece += largest[begin + count]
            tiny = total <= first
            few = count + 1 <= share and count + 1 <= -(-left // 2)
            if total > min(target, most) or piece > preferred or not (tiny or few):
                break
            count += 1
        groups.append((begin, count))
        begin += count
        target *= _GROWTH
    return groups


def pipeline_seconds(load: Sequence[float], compute: Sequence[float]) -> float:
    """T = t₁ + Σ max(c_l, t_{l+1}) + c_L: the exact time of a two-stage pipeline that loads layer l + 1 while it
    computes layer l (LMCache, arXiv 2510.09665, as in docs/prefetch.md). Seconds per layer in, seconds out.

    Raises:
        ConfigError: no layer, or not as many of one as of the other.
    """
    if not load or len(load) != len(compute):
        raise ConfigError(f"{len(load)} loads and {len(compute)} computations are no pipeline")
    return load[0] + sum(max(c, t) for c, t in zip(compute[:-1], load[1:], strict=True)) + compute[-1]


def read_buffer_bytes(
    bandwidth: float, load_s_per_token: float, history_tokens: float, prefill_s_per_token: float, new_tokens: float
) -> int:
    """S_buf = B · (T_load · L_hist - T_pref · L_new): what has to be loaded before a job starts, so that loading the
    rest hides behind its computation (CachedAttention, arXiv 2403.19708, section 3.2). 0 if all of it hides.

    Args:
        bandwidth: B, bytes per second.
        load_s_per_token: T_load, seconds to load the KV of one token.
        history_tokens: L_hist, tokens whose KV is loaded.
        prefill_s_per_token: T_pref, seconds to compute one new token.
        new_tokens: L_new.
    """
    short = load_s_per_token * history_tokens - prefill_s_per_token * new_tokens
    return max(0, math.ceil(bandwidth * short))
