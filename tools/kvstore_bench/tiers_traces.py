"""Request traces for `kvstore-bench tiers`: what came when, with which prefix.

* Mooncake's JSONL (`timestamp`, `input_length`, `hash_ids`): blocks of 512 tokens, equal id = equal block and prefix.
* Azure's CSV (`TIMESTAMP`, `ContextTokens`, `GeneratedTokens`): arrivals and lengths are the trace's; it says nothing
  about prefixes, so conversations are *assumed*: see `_link_azure`.
* `sharegpt[:name=value,...]`: a generator with the figures known of ShareGPT; see `sharegpt`.
"""

from __future__ import annotations

import csv
import hashlib
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from kvstore.errors import ConfigError
from kvstore.keys import Key

__all__ = ["Request", "Trace", "load_trace", "sharegpt"]

_MOONCAKE_BLOCK = 512
_SMALL_BLOCK = 128  # of traces without blocks of their own; their prompts are short
_CONTINUES_S = (3.0, 600.0)  # a follow-up comes at least and at most so many seconds later (Azure)
_CONTINUES_SHARE = 0.5  # … and at least this share of its context is what came before


class Request(NamedTuple):
    """One request.

    Attributes:
        at: seconds after the start of the trace.
        tokens: length of the prompt.
        keys: names of its blocks in prefix order; the last may be partial.
        session: conversation, as given or inferred.
        turn: 0 for the first request of the conversation.
    """

    at: float
    tokens: int
    keys: Sequence[Key]
    session: str
    turn: int


@dataclass
class Trace:
    """Requests in order of arrival.

    Attributes:
        name: as in the names of figures.
        block: tokens per block.
        note: what was assumed; "" if nothing was.
    """

    name: str
    block: int
    requests: list[Request] = field(default_factory=list)
    note: str = ""

    @property
    def references(self) -> int:
        return sum(len(request.keys) for request in self.requests)


def load_trace(source: str, *, limit: int | None = None) -> list[Trace]:
    """The trace in a file, or the generator's: then two, with and without K stored before RoPE.

    Args:
        source: a file, or `sharegpt`, or `sharegpt:sessions=2000,rate=1,seed=0,window=2048`.
        limit: requests to keep, from the start.

    Raises:
        ConfigError: not a trace, or not one we know; names the file, the line and what is wrong.
        OSError: the file cannot be read.
    """
    if source == "sharegpt" or source.startswith("sharegpt:"):
        options = _generator_options(source.partition(":")[2])
        traces = [sharegpt(pre_rope=True, **options), sharegpt(pre_rope=False, **options)]
    else:
        path = Path(source)
        with path.open(encoding="utf-8", newline="") as file:
            first = file.readline()
        if first.lstrip().startswith("{"):
            traces = [_mooncake(path)]
        elif first.strip().lstrip("\ufeff").split(",")[:2] == ["TIMESTAMP", "ContextTokens"]:
            traces = [_azure(path)]
        else:
            raise ConfigError(
                f"{source}: not a trace we know: Mooncake's JSONL (timestamp, input_length, hash_ids) or Azure's CSV "
                "(TIMESTAMP,ContextTokens,GeneratedTokens); or write sharegpt for the generator"
            )
    for trace in traces:
        if limit is not None:
            del trace.requests[limit:]
        if not trace.requests:
            raise ConfigError(f"{source}: no requests")
    return traces


def _name_of(path: Path) -> str:
    """mooncake_conversation_trace.jsonl → conversation; azure2023_code.csv → azure_code."""
    stem = path.stem.lower().removeprefix("mooncake_").removesuffix("_trace")
    stem = stem.replace("azure2023_", "azure_").removeprefix("azurellminferencetrace_")
    return "".join(each if each.isalnum() else "_" for each in stem) or "trace"


def _key(*parts: object) -> Key:
    return Key(hashlib.sha256(repr(parts).encode()).digest())


def _mooncake(path: Path) -> Trace:
    trace = Trace(_name_of(path), _MOONCAKE_BLOCK)
    names: dict[int, Key] = {}
    owner: dict[int, tuple[str, int]] = {}  # block -> session and turn that had it last
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            at, tokens, ids = _mooncake_line(line, f"{path}:{number}")
            # A request continues the session of the deepest block that was there before, unless that is only the first
            # block: that is the system prompt of all.
            session, turn = f"s{number}", 0
            for place in range(len(ids) - 1, 0, -1):
                if ids[place] in owner:
                    session, turn = owner[ids[place]]
                    turn += 1
                    break
            for each in ids:
                owner[each] = (session, turn)
                if each not in names:
                    names[each] = _key(trace.name, each)
            if trace.requests and at < trace.requests[-1].at:
                raise ConfigError(f"{path}:{number}: timestamp goes back")
            trace.requests.append(Request(at, tokens, [names[each] for each in ids], session, turn))
    return trace


def _mooncake_line(line: str, where: str) -> tuple[float, int, list[int]]:
    try:
        row: dict[str, Any] = json.loads(line)
        at, tokens, ids = row["timestamp"] / 1e3, row["input_length"], row["hash_ids"]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{where}: not a line of Mooncake's trace: {error!r}") from error
    blocks = -(-tokens // _MOONCAKE_BLOCK) if isinstance(tokens, int) and tokens > 0 else 0
    if not isinstance(ids, list) or not blocks or len(ids) > blocks or not all(isinstance(each, int) for each in ids):
        raise ConfigError(f"{where}: {len(ids) if isinstance(ids, list) else ids!r} hash_ids for {tokens!r} tokens")
    return at, tokens, ids


def _azure(path: Path) -> Trace:
    arrivals: list[tuple[float, int, int]] = []
    with path.open(encoding="utf-8-sig", newline="") as file:
        start: datetime | None = None
        for number, row in enumerate(csv.DictReader(file), 2):
            try:
                when = datetime.fromisoformat(row["TIMESTAMP"][:26])
                context, generated = int(row["ContextTokens"]), int(row["GeneratedTokens"])
            except (ValueError, KeyError, TypeError) as error:
                raise ConfigError(f"{path}:{number}: not a line of Azure's trace: {error!r}") from error
            start = start or when
            if context > 0:
                arrivals.append(((when - start).total_seconds(), context, generated))
    arrivals.sort()
    return _link_azure(_name_of(path), arrivals)


def _link_azure(name: str, arrivals: Sequence[tuple[float, int, int]]) -> Trace:
    """Assumed conversations: a request continues the open conversation with the longest history (context + generated)
    that fits into its context, makes up at least half of it, and ended 3 s to 10 min ago; else it begins a new one.
    It is a model to have arrivals and lengths that are real, not a measurement of how often prompts are shared."""
    low, high = _CONTINUES_S
    trace = Trace(name, _SMALL_BLOCK, note=(
        "the trace has no prefixes: a request is assumed to continue the conversation with the longest history that "
        f"fits, makes up at least {_CONTINUES_SHARE:.0%} of its context and is {low:g} to {high:g} s old"
    ))  # fmt: skip
    spread = _SMALL_BLOCK  # histories in classes of that many tokens
    ready: dict[int, list[tuple[float, int, int, int]]] = {}  # class -> (at, history, session, turn), oldest first
    for number, (at, context, generated) in enumerate(arrivals):
        session, turn = number, 0
        for place in range(context // spread, int(context * _CONTINUES_SHARE) // spread - 1, -1):
            waiting = ready.get(place)
            while waiting and at - waiting[0][0] > high:
                del waiting[0]
            found = None
            for index, (then, history, _, _) in enumerate(waiting or ()):
                if at - then < low:
                    break
                if context * _CONTINUES_SHARE <= history <= context:
                    found = index
            if waiting and found is not None:
                _, _, session, turn = waiting.pop(found)
                turn += 1
                break
        blocks, rest = divmod(context, spread)
        keys = [_key(name, session, index) for index in range(blocks)]
        if rest:
            keys.append(_key(name, session, blocks, rest))
        trace.requests.append(Request(at, context, keys, f"s{session}", turn))
        ready.setdefault((context + generated) // spread, []).append((at, context + generated, session, turn))
    return trace


def _generator_options(text: str) -> dict[str, Any]:
    kinds: dict[str, type] = {"sessions": int, "rate": float, "seed": int, "window": int}
    options: dict[str, Any] = {}
    for part in filter(None, text.split(",")):
        name, _, value = part.partition("=")
        if name not in kinds:
            raise ConfigError(f"sharegpt has no option {name!r}; choices: {', '.join(kinds)}")
        try:
            options[name] = kinds[name](value)
        except ValueError:
            raise ConfigError(f"sharegpt: {name}={value!r} is not a number") from None
    return options


def sharegpt(
    *, pre_rope: bool, sessions: int = 2000, rate: float = 1.0, seed: int = 0, window: int = 2048
) -> Trace:  # fmt: skip
    """Conversations with the figures known of ShareGPT (CachedAttention, ATC'24): 73 % have more than one turn, 5.75
    turns on average; they begin as a Poisson process; think times are exponential with a mean of 60 s. A context that
    outgrows the window drops its oldest half.

    Args:
        pre_rope: K is stored before RoPE, so that what remains after dropping can still be used (a slice of blocks,
            with new positions at loading). False: positions are in the stored K, and all that remains is computed anew.
        sessions: conversations.
        rate: conversations that begin per second.
        window: tokens of context.

    Raises:
        ConfigError: an option out of range.
    """
    if sessions < 1 or not rate > 0 or window < 4 * _SMALL_BLOCK:
        raise ConfigError(f"sharegpt: sessions={sessions}, rate={rate}, window={window} (at least {4 * _SMALL_BLOCK})")
    random_ = random.Random(seed)
    requests: list[Request] = []
    start, overflowed = 0.0, 0
    for session in range(sessions):
        start += random_.expovariate(rate)
        turns = 1 if random_.random() >= 0.73 else 2 + int(random_.expovariate(1 / 6.0))
        overflow = False
        for request, dropped in _conversation(random_, session, turns, start, window, pre_rope):
            overflow |= dropped
            requests.append(request)
        overflowed += overflow
    requests.sort(key=lambda request: request.at)
    name = "sharegpt" if pre_rope else "sharegpt_post_rope"
    return Trace(name, _SMALL_BLOCK, requests, note=(
        f"generated (seed {seed}): {sessions} conversations, {len(requests) / sessions:.2f} turns each on average, "
        f"{overflowed / sessions:.0%} outgrow {window} tokens; K is stored {'before' if pre_rope else 'after'} RoPE"
    ))  # fmt: skip


def _conversation(
    random_: random.Random, session: int, turns: int, start: float, window: int, pre_rope: bool
) -> Iterator[tuple[Request, bool]]:
    block = _SMALL_BLOCK
    begin = 0  # of what is left, in tokens of the whole conversation; always at the start of a block
    end = 0  # of the whole conversation
    at = start
    for turn in range(turns):
        question = max(4, min(window // 4, int(random_.lognormvariate(4.4, 1.0))))
        answer = max(4, min(window // 4, int(random_.lognormvariate(6.0, 0.7))))
        dropped = False
        while end + question + answer - begin > window:
            keep = (end - begin) // 2
            begin = max(begin + block, (end - keep) // block * block)
            dropped = True
        begin = min(begin, end // block * block)
        end += question
        # Names: with positions in the stored K, a block is another one after each truncation.
        generation = 0 if pre_rope else begin
        keys = [
            _key(session, generation, place) if (place + 1) * block <= end else _key(session, generation, place, end)
            for place in range(begin // block, -(-end // block))
        ]
        yield Request(at, end - begin, keys, f"s{session}", turn), dropped
        end += answer
        at += 5.0 + random_.expovariate(1 / 60.0)
