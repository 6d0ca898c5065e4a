"""The wrappers around backends; the only ones in the project. Backends only configure them.

The standard stack, outermost first, is Metered(Breaker(Retrying(Limited(backend)))): the counters see what the store
sees; an open breaker costs neither tries nor slots; each try waits for a slot of its own, so that a sleeping retry
holds none. `HedgedBackend` goes around two such stacks, where the store keeps replicas.

Each wrapper is a `Backend` and keeps its contract, whatever the inner backend does: a foreign exception becomes an
error outcome of each item, once, with its cause.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvstore.backend import Backend
from kvstore.metrics import Metrics
from kvstore.options import Option

from .base import Wrapper
from .breaker import BreakerBackend, BreakerState, Probe
from .hedged import HedgedBackend
from .limited import LimitedBackend
from .metered import CallTrace, MeteredBackend, Trace
from .retrying import RetryingBackend

__all__ = [
    "WRAPPER_OPTIONS",
    "BreakerBackend",
    "BreakerState",
    "CallTrace",
    "HedgedBackend",
    "LimitedBackend",
    "MeteredBackend",
    "Probe",
    "RetryingBackend",
    "Trace",
    "Wrapper",
    "hedge",
    "unwrap",
    "wrap",
]

WRAPPER_OPTIONS: tuple[Option, ...] = (
    *RetryingBackend.options,
    *BreakerBackend.options,
    *LimitedBackend.options,
    *HedgedBackend.options,
)
"""Options that every backend has, whatever its scheme; each stands with the wrapper it configures."""


def _typed(values: Mapping[str, Any]) -> dict[str, Any]:
    """All wrapper options, defaults filled in. Other names in `values` are somebody else's."""
    return {
        option.name: option.parse(values[option.name]) if option.name in values else option.default
        for option in WRAPPER_OPTIONS
    }


def wrap(backend: Backend, values: Mapping[str, Any], *, metrics: Metrics, trace: Trace | None = None) -> Backend:
    """The standard stack around `backend`, without what is switched off.

    Args:
        values: values of `WRAPPER_OPTIONS` by name; what is missing has its default.
        metrics: where all of them count.
        trace: see `MeteredBackend`.

    Raises:
        ConfigError: a value is out of range.
    """
    option = _typed(values)
    concurrency = backend.limits.lanes if option["max_calls"] is None else option["max_calls"]
    inflight = option["max_inflight"] or None
    if concurrency or inflight is not None:
        # A bound on bytes alone still needs a number; 4096 is the option's upper end.
        backend = LimitedBackend(
            backend, concurrency=concurrency or 4096, bytes_in_flight=inflight, adaptive=bool(concurrency),
            metrics=metrics,
        )  # fmt: skip
    if option["retries"]:
        delay = option["retry_delay"]
        backend = RetryingBackend(
            backend, attempts=option["retries"] + 1, base_delay=delay, max_delay=max(1.0, 2 * delay), metrics=metrics
        )
    if option["breaker_failures"]:
        interval = option["breaker_interval"]
        backend = BreakerBackend(
            backend, failures=option["breaker_failures"], open_for=interval,
            max_open_for=max(interval, option["breaker_max_interval"]), metrics=metrics,
        )  # fmt: skip
    return MeteredBackend(backend, metrics, trace=trace)


def hedge(primary: Backend, alternate: Backend, values: Mapping[str, Any], *, metrics: Metrics) -> Backend:
    """`HedgedBackend` around two (wrapped) replicas, or `primary` itself if the option `hedge` is off.

    Args: as for `wrap`.
    """
    option = _typed(values)
    if not option["hedge"]:
        return primary
    return HedgedBackend(
        primary, alternate, quantile=option["hedge_quantile"], max_extra=option["hedge_extra"],
        scratch_bytes=option["hedge_memory"], metrics=metrics,
    )  # fmt: skip


def unwrap(backend: Backend) -> Backend:
    """The backend inside all wrappers; of a `HedgedBackend` the primary's. `backend` itself if it is not wrapped."""
    while isinstance(backend, Wrapper):
        backend = backend.inner
    return backend
