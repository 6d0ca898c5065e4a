"""Opens the tiers that a configuration names."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from kvstore.eviction import make_policy
from kvstore.metrics import Metrics
from kvstore.registry import backend_class, open_backend, split_options
from kvstore.wrappers import wrap

from .backend import TieredBackend
from .options import TierConfig, policy_of
from .tier import Tier

if TYPE_CHECKING:
    from kvstore.config import Config

__all__ = ["open_tiers"]


def open_tiers(config: Config, metrics: Metrics) -> TieredBackend:
    """The hierarchy of `config.tiers`, with `config.remote_url` as its last tier if there is one.

    Each backend has the usual wrappers. One with a capacity of its own is opened so that it refuses when it is full:
    its tier decides what goes.

    Raises:
        ConfigError: a backend cannot be opened, or two tiers are one place.
    """
    specs = [*config.tiers, *(TierConfig(url) for url in config.remote_url)]
    with contextlib.ExitStack() as undo:
        tiers = []
        for place, spec in enumerate(specs):
            url, found = spec.url, backend_class(spec.url.scheme)
            overrides = config.backend_overrides(url)
            split = split_options(url, found, overrides)
            own = {option.name for option in found.options}
            capacity = spec.get("bytes")
            if capacity is None and "bytes" in own:
                capacity = split.own["bytes"]
            policy: str | None = None
            if "policy" in own and ("policy" in url.options or "policy" in overrides):
                policy = split.own["policy"]
            if capacity is not None:
                overrides |= {name: each for name, each in (("bytes", capacity), ("policy", "none")) if name in own}
            backend = open_backend(url, **overrides)
            undo.callback(backend.close)
            if backend.metrics is not None:
                metrics.include(backend.metrics)
            name = policy_of(spec, policy)
            parameters = dict(spec.get("policy_options"))
            if name in ("default", "lookahead"):  # what waiting jobs need may go down, but not out
                parameters.setdefault("last", place == len(specs) - 1)
            tiers.append(
                Tier(
                    wrap(backend, split.wrapper, metrics=metrics),
                    capacity,
                    policy=make_policy(name, **parameters),
                    high=spec.get("high_watermark"),
                    low=spec.get("low_watermark"),
                    promote=spec.get("promote"),
                    write=spec.get("write"),
                    queue_bytes=spec.get("queue"),
                    timeout=spec.get("timeout"),
                    ttl_factor=spec.get("ttl_factor"),
                    name=config.backend_name(url),
                )
            )
        hierarchy = TieredBackend(tiers, staging_bytes=config.tier_staging_bytes)
        undo.pop_all()
    return hierarchy
