"""What a model still says when its KV cache came back from a lossy codec: KL, ΔNLL, top-1 agreement.

The model computes in fp32 on the CPU. Its KV cache is stored in bfloat16, as an engine would have it, so the reference
is the model continuing on its own uncompressed bfloat16 cache, and a lossless codec scores exactly 0.

torch is imported when a model is asked for.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import statistics
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from kvstore.errors import ConfigError
from kvstore.layout import KVLayout

__all__ = ["DTYPE", "Judge", "Reference", "Score", "Summary", "summarise"]

DTYPE = "bfloat16"

Segments = list[npt.NDArray[np.uint8]]
"""Of one context, per layer: K `[tokens, heads, head_dim]`, then V `[tokens, heads, head_dim]`, bfloat16, as bytes."""


@dataclass(frozen=True, slots=True)
class Score:
    """One context, one cache, against the uncompressed cache.

    Attributes:
        kl: mean over the continuation of KL(reference ‖ this), nats.
        dnll: mean negative log-likelihood of the true next tokens minus the reference's, nats.
        top1: share of positions whose most likely token is the reference's.
    """

    kl: float
    dnll: float
    top1: float


@dataclass(frozen=True, slots=True)
class Summary:
    """Means over contexts, with the standard error of the means (0 for a single context)."""

    contexts: int
    kl: float
    kl_se: float
    dnll: float
    dnll_se: float
    top1: float


def summarise(scores: Sequence[Score]) -> Summary:
    """The mean of each measure over the contexts, all alike."""

    def both(values: list[float]) -> tuple[float, float]:
        error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0
        return statistics.fmean(values), error

    kl, dnll = both([each.kl for each in scores]), both([each.dnll for each in scores])
    return Summary(len(scores), *kl, *dnll, statistics.fmean(each.top1 for each in scores))


@dataclass(frozen=True, slots=True)
class Reference:
    """A context, its uncompressed cache, and what the model says on it.

    Attributes:
        ids: the continuation: token ids that are fed, and one more that is only a target.
        tokens: tokens in the cache.
        segments: the cache, layer by layer.
        log_probs: torch fp32 `[continuation, vocabulary]`.
        nll: of the true next tokens, mean, nats.
        prefill_s: seconds that the model took to compute the cache.
    """

    ids: tuple[int, ...]
    tokens: int
    segments: Segments
    log_probs: Any
    nll: float
    prefill_s: float

    def without_log_probs(self) -> Reference:
        """The same, without what takes 25 MB of a vocabulary of 49,152."""
        return replace(self, log_probs=None)


class Judge:
    """A transformers model that prefills contexts and continues on caches.

    Args:
        model: a folder that transformers loads (as fp32), or such a model itself.

    Raises:
        ConfigError: torch or transformers is missing, or the model cannot be loaded or is not of a kind whose cache
            has K and V per layer.
    """

    def __init__(self, model: Any) -> None:
        try:
            import torch
            from transformers import DynamicCache
        except ImportError as error:
            raise ConfigError(f"a model is needed, and {error}; pip install transformers torch") from error
        self.torch: Any = torch
        self._cache_class: Any = DynamicCache
        self.model: Any = _load(Path(model)) if isinstance(model, str | Path) else model.eval()
        config = self.model.config
        heads = config.num_key_value_heads
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.layout = KVLayout(config.num_hidden_layers, heads, size)
        names = inspect.signature(self.model.model.layers[0].forward).parameters
        self._cache_name = "cache" if "cache" in names else "past_key_values"

    @contextlib.contextmanager
    def one_thread(self) -> Iterator[None]:
        """Compute with one thread, so that speeds are of one core."""
        before: int = self.torch.get_num_threads()
        self.torch.set_num_threads(1)
        try:
            yield
        finally:
            self.torch.set_num_threads(before)

    def _forward(self, ids: Sequence[int], cache: Any, **more: Any) -> Any:
        with self.torch.inference_mode(), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            given = self.torch.tensor([list(ids)])
            return self.model(given, use_cache=True, **{self._cache_name: cache}, **more)

    def prefill(self, ids: Sequence[int]) -> tuple[Segments, float]:
        """The KV cache of a context as it is stored, and the seconds the model took."""
        torch = self.torch
        cache = self._cache_class(config=self.model.config)
        begin = time.perf_counter()
        self._forward(ids, cache, logits_to_keep=1)
        seconds = time.perf_counter() - begin
        segments = []
        for layer in cache.layers:
            parts = [part[0].transpose(0, 1).to(torch.bfloat16).flatten() for part in (layer.keys, layer.values)]
            segments.append(torch.cat(parts).view(torch.uint8).numpy())
        return segments, seconds

    def refer(self, ids: Sequence[int], tokens: int) -> Reference:
        """Prefill the first `tokens` of `ids` and continue with the rest on the uncompressed cache.

        Args:
            ids: context, continuation, and one more token as the last target.
        """
        segments, seconds = self.prefill(ids[:tokens])
        rest = tuple(ids[tokens:])
        log_probs = self._continue(segments, tokens, rest)
        return Reference(rest, tokens, segments, log_probs, self._nll(log_probs, rest), seconds)

    def bare(self, ids: Sequence[int], tokens: int) -> Reference:
        """As `refer`, without continuing: only the cache is wanted."""
        segments, seconds = self.prefill(ids[:tokens])
        return Reference(tuple(ids[tokens:]), tokens, segments, None, math.nan, seconds)

    def score(self, reference: Reference, segments: Segments) -> Score:
        """Continue on another cache of the same context. Values that are not finite score as infinitely bad."""
        torch = self.torch
        log_probs = self._continue(segments, reference.tokens, reference.ids)
        known = reference.log_probs
        kl = float((known.exp() * (known - log_probs)).double().sum(-1).mean())
        dnll = self._nll(log_probs, reference.ids) - reference.nll
        same = float((known.argmax(-1) == log_probs.argmax(-1)).double().mean())
        if not torch.isfinite(log_probs).all():
            return Score(math.inf, math.inf, same)
        return Score(kl, dnll, same)

    def _continue(self, segments: Segments, tokens: int, ids: Sequence[int]) -> Any:
        """Log probabilities, fp32 `[len(ids) - 1, vocabulary]`, of what follows each fed token."""
        out = self._forward(ids[:-1], self._filled(segments, tokens))
        return self.torch.log_softmax(out.logits[0].float(), dim=-1)

    def _nll(self, log_probs: Any, ids: Sequence[int]) -> float:
        targets = self.torch.tensor(ids[1:])[:, None]
        return -float(log_probs.gather(1, targets).double().mean())

    def _filled(self, segments: Segments, tokens: int) -> Any:
        torch, layout = self.torch, self.layout
        cache = self._cache_class(config=self.model.config)
        for layer, segment in zip(cache.layers, segments, strict=True):
            flat = torch.from_numpy(segment).view(torch.bfloat16).to(self.model.dtype)
            k, v = flat.view(2, tokens, layout.num_kv_heads, layout.head_dim).transpose(1, 2)[:, None]
            layer.lazy_initialization(k, v)
            layer.keys, layer.values = k.contiguous(), v.contiguous()
        return cache


def _load(folder: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    cast(Any, disable_progress_bar)()
    try:
        return cast(Any, AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)).eval()
    except (OSError, ValueError) as error:
        raise ConfigError(f"the model {str(folder)!r} cannot be loaded: {error}", cause=error) from error
