"""What a trace of requests says about traffic: requests a day, prompt length, and the hit rate that a TTL allows."""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.errors import ConfigError
from kvstore.keys import Key
from kvstore_bench.tiers_traces import Request, Trace, load_trace

__all__ = ["TraceFacts", "facts_of", "read_trace"]


@dataclass(frozen=True, slots=True)
class TraceFacts:
    """Averages over a trace.

    Attributes:
        hit_rate: share of all prompt tokens that lie in blocks at the head of the prompt which were all stored less
            than the TTL ago, with room for everything.
        notes: what is assumed, and what the trace cannot say.
    """

    requests_per_day: float
    prompt_tokens: int
    hit_rate: float
    notes: tuple[str, ...]


def read_trace(source: str, *, ttl: float) -> TraceFacts:
    """The facts of a file, or of the generator `sharegpt`. `ttl`: seconds since a block was stored or used.

    Raises:
        ConfigError: not a trace (see `kvstore_bench.tiers_traces`), or one that takes no time.
    """
    try:
        trace = load_trace(source)[0]
    except OSError as error:
        raise ConfigError(f"option 'trace': {source} cannot be read: {error.strerror or error}") from error
    return facts_of(trace, ttl=ttl)


def facts_of(trace: Trace, *, ttl: float) -> TraceFacts:
    """See `read_trace`."""
    seconds = trace.requests[-1].at - trace.requests[0].at
    if seconds <= 0:
        raise ConfigError("option 'trace': all requests come at one time, so there are no requests a day")
    stored: dict[Key, float] = {}
    hit = total = 0
    for request in trace.requests:
        hit += _hit_tokens(request, stored, trace.block, ttl)
        total += request.tokens
        for key in request.keys:
            stored[key] = request.at
    notes = [f"trace {trace.name}: {len(trace.requests):,} requests in {seconds / 3600:.2f} h"]
    if seconds < ttl:
        notes.append(
            "the trace is shorter than the TTL, so reuse after its end is not seen: the hit rate is a lower bound"
        )
    if trace.note:
        notes.append(trace.note)
    return TraceFacts(
        len(trace.requests) / seconds * 86400, max(1, round(total / len(trace.requests))), hit / total, tuple(notes)
    )


def _hit_tokens(request: Request, stored: dict[Key, float], block: int, ttl: float) -> int:
    blocks = 0
    for key in request.keys:
        if request.at - stored.get(key, -float("inf")) > ttl:
            break
        blocks += 1
    return min(request.tokens, blocks * block)
