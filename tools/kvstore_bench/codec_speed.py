"""The speed side of `kvstore-bench codec`: symbols per second on one core, next to memcpy and LMCache's own codec.

A symbol is one element of K or V. Encoding is everything from the segment's bytes to the stored bytes, decoding
everything back to the segment's dtype. All contestants take turns, repeat by repeat; medians are given. Wall time
counts; CPU time is kept beside it, which says what a core can do where other processes take their share of it.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvstore.codec import codec_by_number
from kvstore.layout import KVLayout

from .codec_measure import LMCACHE, Scheme
from .codec_records import about
from .codec_report import SpeedRow
from .quality import Segments

if TYPE_CHECKING:
    from .codec_lmcache import LMCacheProcess

__all__ = ["MEMCPY", "Times", "a_core", "measure_speed", "one_core"]

MEMCPY = "memcpy"


class Times(NamedTuple):
    """Seconds of one repeat: wall time and CPU time of this process."""

    encode_s: float
    decode_s: float
    encode_cpu_s: float
    decode_cpu_s: float


def a_core() -> int:
    """The CPU that everything timed runs on: the last one that this process may use."""
    return max(os.sched_getaffinity(0))


@contextlib.contextmanager
def one_core(core: int) -> Iterator[None]:
    """All threads of this process on one CPU, and back: whatever a library does with threads, a core is a core."""
    before = {}
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it ended meanwhile
            before[int(task.name)] = os.sched_getaffinity(int(task.name))
            os.sched_setaffinity(int(task.name), {core})
    try:
        yield
    finally:
        for thread, cores in before.items():
            with contextlib.suppress(OSError):
                os.sched_setaffinity(thread, cores)


@dataclass
class _Contestant:
    name: str
    level: str
    once: Callable[[], Times]
    times: list[Times] = field(default_factory=list)


def measure_speed(
    schemes: Sequence[tuple[Scheme, int]],
    chunks: Sequence[tuple[int, int, Segments]],
    layout: KVLayout,
    *,
    repeats: int,
    lmcache: LMCacheProcess | None = None,
    told: Callable[[str], None] = lambda _: None,
) -> list[SpeedRow]:
    """Encode and decode the chunks with every scheme, in turn.

    Args:
        schemes: and the level that is decoded, of each.
        chunks: (first token, tokens, segments) of each record.
        repeats: timed ones; one more, before them, is not.
        lmcache: LMCache's own codec, at what it picks by itself.
    """
    contestants = [_Contestant(MEMCPY, "", _memcpy(chunks))]
    contestants += [
        _Contestant(each.name, each.label(level), _ours(each, level, chunks, layout)) for each, level in schemes
    ]
    if lmcache is not None:
        lmcache.load("default", [segments for _, _, segments in chunks])
        contestants.append(_Contestant(LMCACHE, "default", lambda: Times(*lmcache.once())))
    for repeat in range(repeats + 1):
        told(f"speed, repeat {repeat} of {repeats}")
        for each in contestants:
            times = each.once()
            if repeat:
                each.times.append(times)
    tokens = sum(count for _, count, _ in chunks)
    symbols = tokens * layout.elements_per_token * layout.num_layers
    record = max(count for _, count, _ in chunks)

    def rate(seconds: float) -> float:
        return symbols / max(seconds, 1e-9) / 1e6

    return [
        SpeedRow(
            codec=each.name,
            level=each.level,
            record_tokens=record,
            tokens=tokens,
            repeats=repeats,
            encode_msym_s=rate(times.encode_s),
            decode_msym_s=rate(times.decode_s),
            encode_cpu_msym_s=rate(times.encode_cpu_s),
            decode_cpu_msym_s=rate(times.decode_cpu_s),
            spread=_spread([one.encode_s + one.decode_s for one in each.times]),
        )
        for each in contestants
        for times in [Times(*(statistics.median(column) for column in zip(*each.times, strict=True)))]
    ]


def _spread(seconds: Sequence[float]) -> float:
    """Between the quartiles, as a share of the median."""
    if len(seconds) < 2:
        return 0.0
    low, middle, high = statistics.quantiles(seconds, n=4, method="inclusive")
    return (high - low) / middle


def _memcpy(chunks: Sequence[tuple[int, int, Segments]]) -> Callable[[], Times]:
    rooms = [np.empty_like(segment) for _, _, segments in chunks for segment in segments]
    sources = [segment for _, _, segments in chunks for segment in segments]

    def once() -> Times:
        begin = _now()
        for source, room in zip(sources, rooms, strict=True):
            room[:] = source
        return _between(begin, _now(), begin)

    return once


def _ours(
    scheme: Scheme, level: int, chunks: Sequence[tuple[int, int, Segments]], layout: KVLayout
) -> Callable[[], Times]:
    codec = scheme.codec
    work = [
        (segment.data, about(layout, layer, begin, tokens), np.empty_like(segment).data)
        for begin, tokens, segments in chunks
        for layer, segment in enumerate(segments)
    ]

    def once() -> Times:
        begin = _now()
        encoded = [codec.encode(raw, info) for raw, info, _ in work]
        middle = _now()
        for parts, (_, _, room) in zip(encoded, work, strict=True):
            codec_by_number(parts[0].codec).decode_into([part.data for part in parts[: level + 1]], room)
        return _between(begin, middle, middle)

    return once


def _now() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def _between(begin: tuple[float, float], middle: tuple[float, float], decoding: tuple[float, float]) -> Times:
    """Encoding took from `begin` to `middle`, decoding from `decoding` until now."""
    end = _now()
    return Times(middle[0] - begin[0], end[0] - decoding[0], middle[1] - begin[1], end[1] - decoding[1])
