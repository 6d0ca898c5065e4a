"""The requests of `kvstore-bench stream`, one by one over a throttled link: adaptive, fixed, text, and several at once.

Loading is real: real records cross the token bucket and are decoded by the store. Computing is a sleep as long as the
measured prefill curve says, so that it neither disturbs the link nor depends on how busy the machine is.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from kvstore.backend import Status
from kvstore.store import Want
from kvstore.stream import COMPUTED, Group, LinkShare, Policy, PrefillModel, Speeds, Standing, Streamer, TextPart, plan

from .layers_link import TokenBucket
from .stream_sim import LinkTrace
from .stream_world import Shelf

__all__ = ["Cell", "Draw", "Ran", "decisions", "load_seconds", "run_adaptive", "run_fixed", "run_together"]

_TIMEOUT_S = 60.0
_GIVE_UP = 1.02  # times the SLO: a fixed load that is not there by then is late; how late follows from the link


@dataclass(frozen=True, slots=True)
class Draw:
    """One request as it was drawn.

    Attributes:
        chunks: its length.
        rate: bytes per second of its link in the beginning.
        drop: (seconds, rate) from which on the link is slower; None: it is steady.
    """

    chunks: int
    rate: float
    drop: tuple[float, float] | None = None

    @property
    def trace(self) -> LinkTrace:
        return LinkTrace(((0.0, self.rate), *((self.drop,) if self.drop else ())))

    def bucket(self, share: float = 1.0) -> TokenBucket:
        """The link itself, `share` times as fast."""
        then = [(self.drop[0], self.drop[1] * share)] if self.drop else []
        return TokenBucket(self.rate * share, then=then)


@dataclass(frozen=True, slots=True)
class Ran:
    """What became of a request.

    Attributes:
        ttft_s: seconds to the first token.
        violated: beyond the SLO.
        levels: of each group; -2: computed.
        nbytes: that crossed the link.
        wrong: groups that came back with other bytes than were stored.
        followed: it was given up when it was late; `ttft_s` follows from the link's schedule.
    """

    ttft_s: float
    violated: bool
    levels: tuple[int, ...]
    nbytes: int
    wrong: int = 0
    followed: bool = False


def run_adaptive(
    shelf: Shelf, draw: Draw, *, slo_s: float, prefill: PrefillModel, new_tokens: int, policy: Policy,
    streamer: Streamer | None = None, start: bool = True,
) -> Ran:  # fmt: skip
    """One request through a `Streamer` that knows nothing of the link yet.

    Args:
        streamer: shared by several requests; None: a new one.
        start: lay the link of `draw`; False: it is there.
    """
    mine = streamer or new_streamer(shelf, prefill, policy)
    if start:
        shelf.link.bucket = bucket = draw.bucket()
        bucket.start()
    wrong = 0

    def compute(part: TextPart) -> None:
        time.sleep(prefill.seconds(part.begin, part.end - part.begin))

    with mine.stream(
        shelf.chunks[: draw.chunks], recompute=compute, slo_s=slo_s, timeout=_TIMEOUT_S, new_tokens=new_tokens
    ) as stream:
        for group in stream:
            if group.level is not None:
                pairs = zip(group.chunks, group.views, strict=True)
                wrong += not all(shelf.holds(number, view, group.level) for number, view in pairs)
        report = stream.report
    return Ran(report.ttft_s, report.violated, report.levels, report.loaded_bytes + report.wasted_bytes, wrong)


def new_streamer(shelf: Shelf, prefill: PrefillModel, policy: Policy) -> Streamer:
    """A streamer to whom the sizes of records are known, as after the first request, but not the link."""
    link = LinkShare(latency_s=shelf.link.latency_s)
    streamer = Streamer(
        shelf.store, link=link, prefill=prefill, decode_s_per_token=shelf.decode_s_per_token, policy=policy,
        group_chunks=1,
    )  # fmt: skip
    bucket, shelf.link.bucket = shelf.link.bucket, None
    try:
        with streamer.stream(shelf.chunks[:1], slo_s=None, timeout=_TIMEOUT_S, policy=Policy(text="never")) as stream:
            stream.close()
    finally:
        shelf.link.bucket = bucket
    streamer.link = LinkShare(latency_s=shelf.link.latency_s)
    return streamer


def run_fixed(shelf: Shelf, draw: Draw, *, slo_s: float, suffix_s: float) -> Ran:
    """Load everything, all levels, come what may. What is late is given up then; when it would have ended follows from
    the link's schedule."""
    rooms = [memoryview(bytearray(shelf.spec.raw_bytes)) for _ in range(draw.chunks)]
    shelf.link.bucket = bucket = draw.bucket()
    carried = shelf.link.carried
    wants = [Want(key, room, shelf.spec) for key, room in zip(shelf.keys[: draw.chunks], rooms, strict=True)]
    bucket.start()
    begin = time.monotonic()
    done = shelf.store.submit_get(wants, deadline=begin + _GIVE_UP * slo_s)
    outcomes = done.result()
    seconds = time.monotonic() - begin
    complete = all(outcome.status is Status.OK for outcome in outcomes)
    done.settled(_TIMEOUT_S)
    wrong = 0
    if complete:
        finest = len(shelf.sizes[0]) - 1
        wrong = sum(not shelf.holds(number, room, finest) for number, room in enumerate(rooms))
    else:
        seconds = max(seconds, draw.trace.end(shelf.link.latency_s, shelf.nbytes(draw.chunks)))
    ttft = seconds + suffix_s
    top = len(shelf.sizes[0]) - 1
    nbytes = shelf.link.carried - carried
    return Ran(ttft, ttft > slo_s, (top,) * draw.chunks, nbytes, wrong, followed=not complete)


def run_together(
    shelf: Shelf, draws: Sequence[Draw], *, slo_s: float, prefill: PrefillModel, new_tokens: int, policy: Policy
) -> list[Ran]:
    """Several requests at once over one link that is as many times as fast as the first one's."""
    streamer = new_streamer(shelf, prefill, policy)
    shelf.link.bucket = bucket = draws[0].bucket(len(draws))
    results: list[Ran | BaseException] = [RuntimeError("it never ran")] * len(draws)

    def one(number: int) -> None:
        try:
            results[number] = run_adaptive(
                shelf, draws[number], slo_s=slo_s, prefill=prefill, new_tokens=new_tokens, policy=policy,
                streamer=streamer, start=False,
            )  # fmt: skip
        except BaseException as error:  # noqa: BLE001 - raised below, in the caller's thread
            results[number] = error

    bucket.start()
    threads = [threading.Thread(target=one, args=(number,)) for number in range(len(draws))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [result for result in results if isinstance(result, Ran)]


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell of the grid of bandwidth × length.

    Attributes:
        load_s: measured; inf: it took longer than computing and a tenth more.
        text_s: by the curve that computing follows.
        loads: the planner's choice.
        right: it is the faster of the two.
    """

    tokens: int
    rate: float
    load_s: float
    text_s: float
    loads: bool
    right: bool


def decisions(shelf: Shelf, prefill: PrefillModel, rates: Sequence[float], lengths: Sequence[int]) -> list[Cell]:
    """Load or recompute, decided by the planner from what it measured on one other transfer, against both done.

    Args:
        rates: bytes per second.
        lengths: in chunks.
    """
    cells = []
    spec, latency = shelf.spec, shelf.link.latency_s
    rooms = [memoryview(bytearray(spec.raw_bytes)) for _ in range(max(lengths))]
    for rate in rates:
        shelf.link.bucket = TokenBucket(rate, buffer=64 << 10)
        link = LinkShare(latency_s=latency)
        transfer = link.begin(shelf.nbytes(1), time.monotonic())
        load_seconds(shelf, rooms, 1, _TIMEOUT_S)
        link.end(transfer, time.monotonic())
        for count in lengths:
            tokens = count * spec.tokens
            text_s = prefill.seconds(0, tokens)
            whole = Group(0, tokens, (shelf.nbytes(count),))
            speeds = Speeds(link.share(time.monotonic()), latency, shelf.decode_s_per_token[-1:], prefill)
            found = plan([whole], [Standing()], speeds, policy=Policy(text="time", safety=1.0))
            loads = found.levels[0] != COMPUTED
            took = load_seconds(shelf, rooms, count, 1.1 * text_s)
            cells.append(Cell(tokens, rate, took, text_s, loads, loads == (took < text_s)))
    return cells


def load_seconds(shelf: Shelf, rooms: Sequence[memoryview], count: int, patience_s: float) -> float:
    """How long loading the first `count` chunks takes; inf: longer than `patience_s`."""
    wants = [Want(key, room, shelf.spec) for key, room in zip(shelf.keys[:count], rooms, strict=False)]
    begin = time.monotonic()
    done = shelf.store.submit_get(wants, deadline=begin + patience_s)
    complete = all(outcome.status is Status.OK for outcome in done.result())
    seconds = time.monotonic() - begin
    done.settled(_TIMEOUT_S)
    return seconds if complete else math.inf
