"""Prefill by another engine: what `kv_transfer_params` say of it, and watching its chunks arrive in the store.

The engine that computes a prompt and the one that waits for it share a store and names by content, so that all there is
to tell is that somebody computes it. vLLM's own words are used, as its proxies and other connectors do:

| sent to | `kv_transfer_params` |
|---|---|
| the engine that computes | `{"do_remote_decode": true}` |
| the engine that waits | `{"do_remote_prefill": true}`, and `"tokens"` where that is known: how many are stored |
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvstore.completion import CancelledError, Completion
from kvstore.errors import KVStoreError
from kvstore.keys import Key

if TYPE_CHECKING:
    from kvstore.store import Store

__all__ = ["Arrivals", "announced_tokens", "handed_over"]

logger = logging.getLogger("kvstore.integrations.vllm")

# A question costs a decoder 0.7 ms of CPU (SmolLM2 on one core, node:// over TCP), which running requests pay.
_EAGER = 8  # asked again after this part of the time that nothing has come,
_SOON_S, _LATE_S = 0.01, 0.05  # within these bounds;
_QUEUED_S = 0.5  # this is the upper one until the first record has come: the prompt waits for its turn
_ANSWER_S = 0.002  # between looks whether the store has answered
_TOGETHER_S = 0.05  # what comes within this time is of one step of the prefill
_SURE = 0.6  # of the time that steps took, the shorter of the last two: before that no further one has ended


def announced_tokens(request: Any) -> int | None:
    """How many of a prompt's first tokens another engine computes and stores; None: none. What a client wrote there
    that makes no sense is logged, and announces nothing."""
    params = request.kv_transfer_params
    if not isinstance(params, Mapping) or params.get("do_remote_prefill") is not True:
        return None
    prompt: int = request.num_prompt_tokens
    tokens = params.get("tokens", prompt)
    if not isinstance(tokens, int) or isinstance(tokens, bool) or tokens < 0:
        logger.warning("kv_transfer_params: tokens=%r is no number of tokens; the prompt is looked up", tokens)
        return None
    return min(tokens, prompt)


def handed_over(request: Any, stored: int) -> dict[str, Any] | None:
    """What the answer to a request tells of its prefill, if it was asked to (`do_remote_decode`): the parameters of the
    request to the engine that goes on. `stored`: tokens from the first one on that are stored or being stored."""
    params = request.kv_transfer_params
    if not isinstance(params, Mapping) or params.get("do_remote_decode") is not True:
        return None
    return {"do_remote_prefill": True, "do_remote_decode": False, "tokens": min(stored, request.num_prompt_tokens)}


class Arrivals:
    """How far the records of a prompt have come that somebody else is storing. Never waits: whoever wants to know calls
    `look` again and again.

    Args:
        keys: of the records, in the order of the prefix.
        patience: how long nothing may come until no more is expected. Seconds.

    Attributes:
        here: how many leading records are stored.
        over: no more is to be expected: all are here, or nothing came for too long, or the store cannot be asked.
    """

    def __init__(
        self, store: Store, keys: Sequence[Key], *, patience: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._store = store
        self._keys = keys
        self._patience = patience
        self._clock = clock
        self._news = self._next = clock()
        self._asked: Completion[int] | None = None
        self._steps = (0.0, 0.0)  # how long the last two took
        self._burst = 0  # records of the last one
        self.here = 0
        self.over = not keys

    def look(self) -> int:
        """`here`, by what is known now; asks the store, when it is time to."""
        if self.over:
            return self.here
        if self._asked is None:
            if self._clock() < self._next:
                return self.here
            try:
                self._asked = self._store.submit_lookup(self._keys[self.here :])
            except KVStoreError as error:
                logger.warning("the store cannot be asked: %s", error)
                self.over = True
                return self.here
        if self._asked.done():
            self._answered(self._asked)
        return self.here

    def _answered(self, asked: Completion[int]) -> None:
        self._asked = None
        try:
            found = asked.result(0)
        except (KVStoreError, CancelledError):  # on_error="raise": it may work next time
            found = 0
        now = self._clock()
        if found:
            apart = now - self._news
            if apart >= _TOGETHER_S:
                self._steps = (self._steps[1], apart if self.here else 0.0)
                self._burst = 0
            self._burst += found
            self.here += found
            self._news = now
        self.over = self.here == len(self._keys) or now - self._news >= self._patience
        self._next = min(now + self._wait(now - self._news), self._news + self._patience)

    def _wait(self, age: float) -> float:
        """Seconds until the store is asked again, if nothing has come for `age`."""
        wait = min(max(age / _EAGER, _SOON_S), _LATE_S if self.here else _QUEUED_S)
        # Another whole step is to come, not only the rest of the prompt, which takes less.
        if age >= _TOGETHER_S and len(self._keys) - self.here > self._burst:
            wait = max(wait, min(_SURE * min(self._steps) - age, _QUEUED_S))
        return wait

    @property
    def pause(self) -> float:
        """Seconds until it makes sense to look again, while nothing is expected to have changed."""
        return _ANSWER_S if self._asked is not None else max(self._next - self._clock(), 0.0)

    def close(self) -> None:
        """Nobody wants to know any more."""
        asked, self._asked, self.over = self._asked, None, True
        if asked is not None:
            asked.cancel()
