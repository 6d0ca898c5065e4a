"""What goes first when a place is full. The only eviction policies: memory, file, node and tiers use them.

A policy keeps the order, not the records: its owner tells it what came (`admit`), what was used (`touch`) and what
went (`forget`), and asks for `victims` when it needs room. It takes no lock; the owner calls it under its own.

| policy | order | good for |
|---|---|---|
| `default` | lowest learned reuse first; with a queue announced, what waits goes last | any tier; wins on the traces |
| `lru` | least recently used | small places, tests, where nothing should be learned |
| `fifo` | oldest | disks where reads must not write times |
| `s3fifo` | small trial queue, then a main one | shared prompts, with many records that are used only once |
| `ttl` | expired, then least recently used | data that must go after a time, per namespace or record |
| `session` | lowest weighted length, turns and age of the conversation | whole conversations as units, fixed weights |
| `value` | lowest seconds saved per byte x learned reuse | mixed record sizes, long contexts, slow links |
| `lookahead` | any of these; waiting jobs last or never | a scheduler that announces its queue |
| `none` | nothing goes | places that refuse when they are full |

Prefix chains. Without its head the tail of a prefix is worthless, so heads must outlive tails:

* Where the owner knows the preceding chunk (`admit(parent=…)`), no record is a victim while a record that names it
  as parent is resident, however old it is (leaf-first, as SGLang's radix cache does it; Zheng et al., 2024). That
  holds also if the heads are served from a faster tier, so that only tails are ever touched here.
* Within one `touch` the head ends up the most recent, so plain recency takes tails first. An owner that stores a batch
  admits each record and then touches the batch.

Cost: a few dictionary operations per call, whatever the number of records and the length of chains; nothing
recurses. Parents may come after their children, go before them, or never come.
"""

from __future__ import annotations

import inspect
import time
from typing import Any

from kvstore.errors import ConfigError

from .base import Clock, EvictionPolicy, RecordInfo
from .keep import KeepPolicy
from .learned import LearnedPolicy
from .lookahead import DefaultPolicy, LookAheadPolicy, eviction_window, prefetch_window
from .lru import FIFOPolicy, LRUPolicy
from .s3fifo import S3FIFOPolicy
from .session import SessionPolicy
from .ttl import TTLPolicy
from .value import ValuePolicy, prefill_seconds

__all__ = [
    "POLICIES", "Clock", "DefaultPolicy", "EvictionPolicy", "FIFOPolicy", "KeepPolicy", "LRUPolicy", "LearnedPolicy",
    "LookAheadPolicy", "RecordInfo", "S3FIFOPolicy", "SessionPolicy", "TTLPolicy", "ValuePolicy", "eviction_window",
    "make_policy", "prefetch_window", "prefill_seconds",
]  # fmt: skip

POLICIES: dict[str, type[EvictionPolicy]] = {
    policy.name: policy
    for policy in (
        LRUPolicy, FIFOPolicy, KeepPolicy, DefaultPolicy, S3FIFOPolicy, TTLPolicy, SessionPolicy, ValuePolicy,
        LookAheadPolicy,
    )
}  # fmt: skip
"""Policies by the name they have in options. A further policy is one class and one entry here."""


def make_policy(name: str, *, clock: Clock = time.monotonic, **options: Any) -> EvictionPolicy:
    """A new, empty policy.

    Args:
        clock: seconds that only grow.
        options: those of the policy, see its class.

    Raises:
        ConfigError: no policy has that name, it has no such option, or a value makes no sense; names the choices.
    """
    policy = POLICIES.get(name)
    if policy is None:
        raise ConfigError(f"unknown eviction policy {name!r}; choices: {', '.join(POLICIES)}")
    known = inspect.signature(policy).parameters
    if not any(each.kind is each.VAR_KEYWORD for each in known.values()):
        for option in options:
            if option not in known or option == "clock":
                choices = ", ".join(each for each in known if each != "clock") or "it has none"
                raise ConfigError(f"the eviction policy {name} has no option {option!r}; choices: {choices}")
    for option, value in options.items():
        default = known[option].default if option in known else None
        if _is_number(default) and not _is_number(value):
            raise ConfigError(f"option {option!r} of the eviction policy {name} must be a number, not {value!r}")
    try:
        return policy(clock=clock, **options)
    except TypeError as error:
        raise ConfigError(f"the eviction policy {name} does not take these options: {error}") from None


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
