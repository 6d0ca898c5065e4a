"""What the control API answers, as its servers make it and its client gives it to callers. Plain data, JSON in between.

The servers describe these classes in their OpenAPI document; `decode` turns the JSON of an answer back into them.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from kvstore.errors import TransientError

from .instance import Health, Job, TierUsage

__all__ = [
    "Acted",
    "Address",
    "Failure",
    "Finished",
    "InstanceHealth",
    "Lookup",
    "Place",
    "ReportReply",
    "Route",
    "Score",
    "Started",
    "Worker",
    "decode",
]


@dataclass(frozen=True, slots=True)
class Place:
    """What one instance has of a prompt.

    Attributes:
        instance: its name.
        hit_chunks: leading chunks that it has, in whatever tiers.
        hit_tokens: tokens in them.
        tier: the slowest tier that these chunks need; "" without any.
        tiers: tokens by the tier that they are in.
    """

    instance: str
    hit_chunks: int
    hit_tokens: int
    tier: str
    tiers: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Lookup:
    """Who has how much of a prompt.

    Attributes:
        chunks, tokens: of the prompt, whole chunks only.
        instance, tier, hit_chunks, hit_tokens: of the best place; "" and 0 if nobody has the first chunk.
        places: all instances that have the first chunk, the longest hit first.
    """

    chunks: int
    tokens: int
    instance: str
    tier: str
    hit_chunks: int
    hit_tokens: int
    places: Sequence[Place]


@dataclass(frozen=True, slots=True)
class Address:
    """Where an instance is.

    Attributes:
        instance: its name.
        ip: host of `address`, as it was given there.
        address: "host:port" for `node://`; "" without TCP.
        unix: path of its Unix socket; "" without one.
        http: URL of its control API.
    """

    instance: str
    ip: str
    address: str
    unix: str
    http: str


@dataclass(frozen=True, slots=True)
class Failure:
    """An instance that could not do its part.

    Attributes:
        instance: its name.
        error: one sentence.
    """

    instance: str
    error: str


@dataclass(frozen=True, slots=True)
class Acted:
    """What came of `pin` and `unpin`.

    Attributes:
        count: records that were pinned, or are not any more, over all instances.
        instances: how many of them by instance.
        failures: instances that could not.
    """

    count: int
    instances: Mapping[str, int]
    failures: Sequence[Failure] = ()


@dataclass(frozen=True, slots=True)
class Started:
    """Something goes on now.

    Attributes:
        event: for `check_finish`; "" if nothing was started.
        failures: instances that did not start their part.
    """

    event: str
    failures: Sequence[Failure] = ()


@dataclass(frozen=True, slots=True)
class Finished:
    """How something goes on.

    Attributes:
        event: as it was asked for.
        finished: all its jobs have ended.
        ok: and none of them failed, nor did any of their records.
        jobs: by instance.
        failures: instances that could not be asked, or do not know the job any more.
    """

    event: str
    finished: bool
    ok: bool
    jobs: Mapping[str, Job]
    failures: Sequence[Failure] = ()


@dataclass(frozen=True, slots=True)
class InstanceHealth:
    """How an instance is.

    Attributes:
        instance: its name.
        state: "ready", "draining" (it takes nobody new), "loading" (it is telling what it has) or "lost" (not heard
            of).
        health: as it said last.
        age_s: seconds since it said so.
    """

    instance: str
    state: str
    health: Health
    age_s: float


@dataclass(frozen=True, slots=True)
class Worker:
    """An instance, as far as the caller may see it.

    Attributes:
        instance, address, unix, http, version, started: see `InstanceInfo`.
        namespaces, usage: those that the caller sees.
        tiers: names, the fastest first.
        state, age_s: see `InstanceHealth`.
        load: see `Health`.
        chunks: records that the index knows it to have, in the namespaces that the caller sees; a record in two tiers
            counts once.
    """

    instance: str
    address: str
    unix: str
    http: str
    version: str
    started: float
    namespaces: Sequence[str]
    tiers: Sequence[str]
    state: str
    age_s: float
    load: float
    chunks: int
    usage: Sequence[TierUsage]


@dataclass(frozen=True, slots=True)
class Score:
    """Why a candidate was taken, or not.

    Attributes:
        instance: its name.
        hit_tokens: see `Place`.
        queued_tokens: tokens that wait to be prefilled there.
        cost: tokens of prefill until this prompt's first token, as estimated; the least wins.
        reports: the instance is known here; else nothing is known of what it has.
    """

    instance: str
    hit_tokens: int
    queued_tokens: float
    cost: float
    reports: bool = True


@dataclass(frozen=True, slots=True)
class Route:
    """Where a prompt should go.

    Attributes:
        instance: the candidate to take.
        hit_tokens: what it has of the prompt.
        tokens: of the prompt, whole chunks only.
        scores: of all candidates, the best first.
    """

    instance: str
    hit_tokens: int
    tokens: int
    scores: Sequence[Score]


@dataclass(frozen=True, slots=True)
class ReportReply:
    """What a controller wants next of a node.

    Attributes:
        snapshot: all that it has; events come after that.
        next: number of the last event that the controller knows.
    """

    snapshot: bool
    next: int = 0


T = TypeVar("T")


def decode(kind: type[T], value: Any) -> T:
    """An object of one of these classes from parsed JSON; fields that we do not know are ignored.

    Raises:
        TransientError: it does not fit: whatever answered is no control API of ours.
    """
    try:
        found: T = _decode(kind, value)
    except (TypeError, KeyError, ValueError) as error:
        raise TransientError(
            f"the answer is not what a control API of kvstore says ({kind.__name__}): {error}", operation="control"
        ) from error
    return found


def _decode(kind: Any, value: Any) -> Any:
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        if not isinstance(value, dict):
            raise TypeError(f"{kind.__name__} from {type(value).__name__}")
        hints = _hints(kind)
        return kind(**{name: _decode(hints[name], value[name]) for name in hints if name in value})
    origin = typing.get_origin(kind)
    if origin is types.UnionType or origin is typing.Union:
        return None if value is None else _decode(next(k for k in typing.get_args(kind) if k is not type(None)), value)
    if origin is not None and issubclass(origin, Mapping):
        if not isinstance(value, dict):
            raise TypeError(f"a map from {type(value).__name__}")
        of = typing.get_args(kind)[1]
        return {str(name): _decode(of, each) for name, each in value.items()}
    if origin is not None and issubclass(origin, Sequence):
        if not isinstance(value, list):
            raise TypeError(f"a list from {type(value).__name__}")
        return [_decode(typing.get_args(kind)[0], each) for each in value]
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise TypeError(f"{kind.__name__} from {type(value).__name__}")
    return value


_known: dict[type, dict[str, Any]] = {}


def _hints(kind: type) -> dict[str, Any]:
    found = _known.get(kind)
    if found is None:
        found = _known[kind] = typing.get_type_hints(kind)
    return found
