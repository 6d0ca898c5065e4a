"""`Service`: what answers the control API. A node answers for itself, a controller for all nodes that report to it.

The routes check who asks and turn bodies into keys; a service is told both.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from kvstore.keys import Key

from .access import Principal
from .instance import TierUsage
from .messages import (
    Acted,
    Address,
    Finished,
    InstanceHealth,
    Lookup,
    Place,
    ReportReply,
    Route,
    Started,
    Worker,
)
from .requests import Prompt, Report

__all__ = ["Ask", "Readiness", "Service", "Target", "best_of", "place_of", "seen_usage"]


class Ask(NamedTuple):
    """What every request has.

    Attributes:
        who: sent it.
        namespace: it is about; he may see it.
        instances: it is meant for; None: all that it concerns.
        deadline: seconds of `time.monotonic()`.
    """

    who: Principal
    namespace: str
    instances: Sequence[str] | None
    deadline: float


class Target(NamedTuple):
    """What `clear` removes, one of: everything (none is given), a model's records, these keys, what hangs on them."""

    model: str | None = None
    keys: Sequence[Key] | None = None
    prefix: Sequence[Key] | None = None


class Readiness(NamedTuple):
    """Whether a service takes requests; if not, why."""

    ready: bool
    problems: Sequence[str]


class Service(ABC):
    """Answers the control API.

    Attributes:
        role: "node" or "controller".
    """

    role: Literal["node", "controller"]

    @abstractmethod
    async def lookup(self, ask: Ask, prompt: Prompt) -> Lookup:
        """Who has how much of a prompt."""

    @abstractmethod
    async def addresses(self, ask: Ask) -> Sequence[Address]:
        """Where instances are."""

    @abstractmethod
    async def pin(self, ask: Ask, keys: Sequence[Key], ttl_s: float) -> Acted:
        """Keep records for `ttl_s` seconds."""

    @abstractmethod
    async def unpin(self, ask: Ask, keys: Sequence[Key]) -> Acted:
        """Let them go."""

    @abstractmethod
    async def clear(self, ask: Ask, target: Target) -> Started:
        """Remove records."""

    @abstractmethod
    async def move(self, ask: Ask, keys: Sequence[Key], *, src: str, to_tier: str, to_instance: str) -> Started:
        """Move records from tier `src` to another tier, or to another instance (one of the two is "")."""

    @abstractmethod
    async def transcode(self, ask: Ask, keys: Sequence[Key], *, codec: str, level: int | None) -> Started:
        """Encode records anew."""

    @abstractmethod
    async def check_finish(self, ask: Ask, event: str) -> Finished:
        """How something goes on. `ask.namespace` means nothing here."""

    @abstractmethod
    async def workers(self, ask: Ask) -> Sequence[Worker]:
        """All instances. `ask.namespace` means nothing here."""

    @abstractmethod
    async def health(self, ask: Ask) -> Sequence[InstanceHealth]:
        """How they are. `ask.namespace` means nothing here."""

    @abstractmethod
    async def route(self, ask: Ask, prompt: Prompt, candidates: Mapping[str, float | None] | None) -> Route:
        """Where a prompt should go. The candidates' values are tokens that wait there, or None."""

    @abstractmethod
    async def report(self, report: Report) -> ReportReply:
        """Something that a node tells a controller."""

    @abstractmethod
    async def readiness(self) -> Readiness:
        """For probes: cheap."""

    async def start(self) -> None:
        """The server's loop runs now."""
        return

    async def stop(self) -> None:
        """It ends."""
        return


def place_of(instance: str, tiers: Sequence[str], order: Sequence[str], chunk_size: int) -> Place:
    """What an instance has of a prompt.

    Args:
        tiers: name of the tier of each leading chunk that it has.
        order: names of its tiers, the fastest first.
        chunk_size: tokens of a chunk.
    """
    counts = Counter(tiers)
    slowest = max(counts, key=order.index) if counts else ""
    return Place(
        instance, len(tiers), len(tiers) * chunk_size, slowest,
        {tier: counts[tier] * chunk_size for tier in order if tier in counts},
    )  # fmt: skip


def best_of(places: Sequence[Place], orders: Mapping[str, Sequence[str]], prompt: Prompt) -> Lookup:
    """All places, the longest hit first; of equal ones that whose hit lies in faster tiers, then by name.

    Args:
        orders: names of the tiers of each instance, the fastest first.
    """
    chunks, tokens = len(prompt.keys), len(prompt.keys) * prompt.chunk_size
    if not places:
        return Lookup(chunks, tokens, "", "", 0, 0, ())

    def rank(place: Place) -> tuple[int, int, str]:
        slow = sum(orders[place.instance].index(tier) * part for tier, part in place.tiers.items())
        return -place.hit_tokens, slow, place.instance

    ranked = sorted(places, key=rank)
    first = ranked[0]
    return Lookup(chunks, tokens, first.instance, first.tier, first.hit_chunks, first.hit_tokens, ranked)


def seen_usage(usage: Sequence[TierUsage], who: Principal) -> list[TierUsage]:
    """The part of it that he may see."""
    return [tier for tier in usage if who.sees(tier.namespace)]
