"""What the servers are like, for people: versions, memory, and whether they evict as a cache should."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from .dispatch import Dispatch
from .options import Node
from .resp import Ask, command, count_of
from .topology import View

__all__ = ["Facts", "advice_on", "read_facts"]

_GOOD = ("allkeys-lru", "allkeys-lfu")


@dataclass(frozen=True, slots=True)
class Facts:
    """What was found when the backend was opened; all empty if the servers could not be reached.

    Attributes:
        mode: "single", "cluster", or "" if not known.
        version: of the server, "7.2".
        primaries: their addresses.
        policies: maxmemory-policy by address; without those that do not tell.
        maxmemory: bytes by address; 0 is no limit.
        advice: sentences for an operator; empty if all is well.
    """

    mode: str = ""
    version: str = ""
    primaries: tuple[str, ...] = ()
    policies: dict[str, str] = field(default_factory=dict)
    maxmemory: dict[str, int] = field(default_factory=dict)
    advice: tuple[str, ...] = ()


def read_facts(view: View, dispatch: Dispatch, deadline: float) -> Facts:
    """INFO memory of every primary; one that does not tell (a service that restricts INFO) is left out."""
    asks = {node: Ask([command(b"INFO", b"memory")]) for node in view.primaries}
    dispatch.on_each(list(asks.items()), deadline)
    policies: dict[str, str] = {}
    maxmemory: dict[str, int] = {}
    for node, ask in asks.items():
        said = _fields(ask.reply) if isinstance(ask.reply, bytes) else {}
        if "maxmemory_policy" in said:
            policies[str(node)] = said["maxmemory_policy"]
        limit = count_of(said.get("maxmemory", "").encode())
        if limit is not None:
            maxmemory[str(node)] = limit
    return Facts(
        "cluster" if view.cluster else "single",
        ".".join(map(str, view.version)),
        tuple(map(str, view.primaries)),
        policies,
        maxmemory,
        advice_on(policies, maxmemory),
    )


def _fields(text: bytes) -> dict[str, str]:
    lines = text.decode("utf-8", "replace").splitlines()
    return {name: value.strip() for name, colon, value in (line.partition(":") for line in lines) if colon}


def advice_on(policies: dict[str, str], maxmemory: dict[str, int]) -> tuple[str, ...]:
    """What to change, one sentence for each kind of trouble."""
    by_policy: dict[str, list[str]] = {}
    for node, policy in policies.items():
        by_policy.setdefault(policy, []).append(node)
    advice = [
        f"maxmemory-policy is {policy} on {_some(nodes)}: {_trouble(policy)}; set it to allkeys-lru"
        for policy, nodes in by_policy.items()
        if _trouble(policy)
    ]
    unlimited = [node for node, limit in maxmemory.items() if not limit]
    if unlimited:
        advice.append(f"maxmemory is not set on {_some(unlimited)}: it grows until the system ends it; set a limit")
    return tuple(advice)


def _trouble(policy: str) -> str:
    if policy in _GOOD:
        return ""
    if policy == "noeviction":
        return "when it is full, nothing more is stored"
    if policy in ("volatile-lru", "volatile-lfu"):
        return ""  # each of our records has an expiry, so these work for us; other users' data without one stays
    if policy in ("volatile-ttl", "volatile-random", "allkeys-random"):
        return "it evicts at random what is used most"
    return "it is not known here"


def _some(nodes: Sequence[str | Node]) -> str:
    return ", ".join(map(str, nodes[:3])) + (f" and {len(nodes) - 3} more" if len(nodes) > 3 else "")
