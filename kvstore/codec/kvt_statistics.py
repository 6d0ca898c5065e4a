"""What the kvt profile is computed from: a model's K and V, and how much it minds errors in them.

The metric of a head is the average of g gᵀ, where g is the gradient, with respect to K before the rotary embedding (or
V) of one token, of the log-probability of a next token drawn from the model's own prediction: the Fisher information.
To second order, the KL divergence that an error e in the cache causes is ½ eᵀ (g gᵀ) e. The alternative is the metric
of attention itself: K in E[q qᵀ], V in WoᵀWo.

Everything is accumulated: no more than one context's KV is held. torch is imported when something is asked for.
"""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvstore.errors import ConfigError
from kvstore.layout import KVLayout
from kvstore.rope import RotarySpec

__all__ = ["METRICS", "Prefilled", "Runner", "Statistics", "attention_metric", "gather"]

METRICS = ("fisher", "attention")
Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]


class Prefilled(NamedTuple):
    """A context in the cache.

    Attributes:
        cache: the model's, not to be continued on itself: `Runner.logits` copies it.
        keys: float32 `[layers, tokens, heads, head_dim]`, before the rotary embedding.
        values: float32 `[layers, tokens, heads, v_head_dim]`.
    """

    cache: Any
    keys: Floats
    values: Floats


class Statistics(NamedTuple):
    """Sums over tokens, sinks excluded; `[layers, heads, ...]`, of K and of V.

    Attributes:
        tokens: how many.
        mean: `[..., width]`.
        covariance: `[..., width, width]`.
        metric: `[..., width, width]`, symmetric and not negative.
    """

    tokens: int
    mean: tuple[Doubles, Doubles]
    covariance: tuple[Doubles, Doubles]
    metric: tuple[Doubles, Doubles]


class Runner:
    """A causal language model of transformers, as profiling uses it.

    Raises:
        ConfigError: its rotary embedding is not one that `kvstore.rope` knows.
    """

    def __init__(self, model: Any) -> None:
        import torch

        self.torch: Any = torch
        self.model = model.eval()
        self.rotary = RotarySpec.from_config(model.config)
        self.device = next(model.parameters()).device
        self._cache_name = "past_key_values"
        for module in model.modules():
            if hasattr(module, "self_attn"):
                names = inspect.signature(module.forward).parameters
                self._cache_name = "cache" if "cache" in names else "past_key_values"
                break

    def _forward(self, ids: Sequence[int], **more: Any) -> Any:
        given = self.torch.tensor([list(ids)], dtype=self.torch.long, device=self.device)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            return self.model(input_ids=given, use_cache=True, **more)

    def prefill(self, ids: Sequence[int]) -> Prefilled:
        """Run the model over a context.

        Raises:
            ConfigError: its cache is not K and V of every token and layer.
        """
        with self.torch.no_grad():
            out = self._forward(ids, logits_to_keep=1)
            cache = getattr(out, "cache", None) or out.past_key_values  # as newer and older transformers call it
        layers = getattr(cache, "layers", None) or ()
        shapes = {(tuple(layer.keys.shape[:3]), layer.keys.shape[3], layer.values.shape[3]) for layer in layers}
        if len(shapes) != 1 or next(iter(shapes))[0][::2] != (1, len(ids)):
            raise ConfigError("the model's cache is not K and V of every token, in the same shape in each layer")
        keys, values = (
            np.stack([self.host(getattr(layer, name)[0].transpose(0, 1)) for layer in layers])
            for name in ("keys", "values")
        )
        return Prefilled(cache, self.rotary.undo(keys, np.arange(len(ids))), values)

    def host(self, tensor: Any) -> Floats:
        """A tensor as a float32 array."""
        array: Floats = tensor.detach().float().cpu().numpy()
        return array

    def logits(self, ids: Sequence[int], prefilled: Prefilled, parts: Sequence[tuple[Any, Any]] | None = None) -> Any:
        """Log-probabilities after each of `ids`, continued on a cache: float32 tensor `[len(ids), vocabulary]`.

        Args:
            parts: per layer K (rotated) and V, `[1, heads, tokens, width]`; None: as the model computed them.
        """
        cache = copy.copy(prefilled.cache)
        cache.layers = [copy.copy(layer) for layer in prefilled.cache.layers]
        for layer, part in zip(cache.layers, parts or (), strict=False):
            layer.keys, layer.values = part
        out = self._forward(ids, **{self._cache_name: cache})
        return self.torch.log_softmax(out.logits[0].float(), dim=-1)

    def as_cache(self, keys: Floats, values: Floats, like: Prefilled) -> list[tuple[Any, Any]]:
        """K (before the rotary embedding) and V as `logits` takes them."""
        turned = self.rotary.apply(keys, np.arange(keys.shape[1]))
        parts = []
        for layer, k, v in zip(like.cache.layers, turned, values, strict=True):
            pair = (self.torch.from_numpy(x).transpose(0, 1)[None].contiguous() for x in (k, v))
            parts.append(tuple(x.to(layer.keys.device, layer.keys.dtype) for x in pair))
        return [(k, v) for k, v in parts]

    def gradients(self, ids: Sequence[int], prefilled: Prefilled, draws: int, seed: int) -> Iterator[list[Any]]:
        """Gradients of the summed log-probability of drawn next tokens, per draw: of K (before the rotary embedding) of
        all layers, then of V; float32 tensors `[tokens, heads, width]`."""
        torch = self.torch
        leaves = [
            [getattr(layer, name).detach().clone().requires_grad_() for layer in prefilled.cache.layers]
            for name in ("keys", "values")
        ]
        undo = self.rotary.undoing(np.arange(prefilled.keys.shape[1]))
        generator = torch.Generator(device=self.device).manual_seed(seed)
        with torch.enable_grad(), _frozen(self.model):
            said = self.logits(ids, prefilled, list(zip(*leaves, strict=True)))
            for draw in range(draws):
                drawn = torch.multinomial(said.detach().exp(), 1, generator=generator)
                sums = said.gather(1, drawn).sum()
                found = torch.autograd.grad(sums, [*leaves[0], *leaves[1]], retain_graph=draw + 1 < draws)
                own = [each[0].transpose(0, 1).float().contiguous() for each in found]
                half = len(own) // 2
                # K rotated is magnitude · R · K, so the gradient takes the transpose: R⁻¹ times the magnitude.
                own[:half] = [undo(each) * self.rotary.magnitude**2 for each in own[:half]]
                yield own


@contextmanager
def _frozen(model: Any) -> Iterator[None]:
    """No gradients of the weights: they would take as much memory as the model."""
    wanted = [p for p in model.parameters() if p.requires_grad]
    for parameter in wanted:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in wanted:
            parameter.requires_grad_(True)


def gather(runner: Runner, lists: Sequence[Sequence[int]], *, context: int, sinks: int, draws: int, metric: str,
           seed: int, tell: Callable[[str], None] = lambda _: None) -> tuple[Statistics, KVLayout]:  # fmt: skip
    """Statistics over contexts: one forward pass over each, and one forward and backward pass over what follows it.

    Args:
        lists: token lists of more than `context` tokens; what is beyond it is the continuation.
        draws: next tokens drawn at each position of the continuation.
        metric: one of `METRICS`.
        tell: told what is being done, once per context.
    """
    sums: list[Doubles] = []
    squares: list[Doubles] = []
    weights: list[Any] = []
    tokens = 0
    layout = None
    for number, ids in enumerate(lists):
        tell(f"statistics: context {number + 1} of {len(lists)} ({metric})")
        prefilled = runner.prefill(ids[:context])
        both = [x[:, sinks:].transpose(0, 2, 1, 3) for x in (prefilled.keys, prefilled.values)]
        if layout is None:
            layers, _, heads, width = prefilled.keys.shape
            layout = KVLayout(layers, heads, width, prefilled.values.shape[-1])
            sums = [np.zeros(x.shape[:2] + x.shape[3:]) for x in both]
            squares = [np.zeros((*x.shape[:2], x.shape[3], x.shape[3])) for x in both]
            weights = [np.zeros_like(x) for x in squares]
        for total, square, x in zip(sums, squares, both, strict=True):
            np.add(total, x.sum(2, dtype=np.float64), out=total)
            np.add(square, np.matmul(x.swapaxes(2, 3), x), out=square)
        tokens += context - sinks
        if metric == "fisher":
            for found in runner.gradients(ids[context:], prefilled, draws, seed + number):
                for place, gradient in enumerate(found):
                    side, layer = divmod(place, len(found) // 2)
                    g = gradient[sinks:].transpose(0, 1)
                    weights[side][layer] += runner.host(g.transpose(1, 2) @ g)
    if layout is None:
        raise ConfigError("there are no contexts to profile")
    if metric == "attention":
        weights = attention_metric(runner, lists, context)
    else:
        weights = [weight / (tokens * draws) for weight in weights]
    means = [total / tokens for total in sums]
    covariances = [
        square / tokens - mean[..., :, None] * mean[..., None, :] for square, mean in zip(squares, means, strict=True)
    ]
    return Statistics(tokens, (means[0], means[1]), (covariances[0], covariances[1]), (weights[0], weights[1])), layout


def attention_metric(runner: Runner, lists: Sequence[Sequence[int]], context: int) -> list[Doubles]:
    """The metric of attention itself, `[layers, heads, width, width]` of K and of V.

    K in E[q qᵀ] / head_dim, over queries and the distances at which they may look back: the variance of a logit. V in
    WoᵀWo, divided by the mean square of what attention adds to the residual stream: the relative error of that.

    Raises:
        ConfigError: the model has no `q_proj`, or no `o_proj` of the right shape.
    """
    from .profiling import collect

    rng = np.random.default_rng(0)
    outputs = [module for name, module in runner.model.named_modules() if name.rpartition(".")[2] == "o_proj"]
    power = np.zeros(len(outputs))

    def watch(number: int) -> Any:
        def hook(_: Any, __: Any, output: Any) -> None:
            power[number] += float(output.detach().float().pow(2).mean())

        return hook

    hooks = [module.register_forward_hook(watch(number)) for number, module in enumerate(outputs)]
    total: Any = 0.0
    try:
        for ids in lists:
            captured = collect(runner.model, ids[:context], queries=True)
            assert captured.queries is not None
            queries, heads = captured.queries, captured.keys.shape[2]
            distances = (rng.random(context) * np.arange(1, context + 1)).astype(np.int64)
            seen = runner.rotary.apply(queries, distances)
            layers, tokens, _, width = seen.shape
            grouped = seen.reshape(layers, tokens, heads, -1, width).transpose(0, 2, 1, 3, 4)
            flat = grouped.reshape(layers, heads, -1, width)
            total = total + np.matmul(flat.swapaxes(2, 3), flat).astype(np.float64) / (flat.shape[2] * width)
    finally:
        for hook in hooks:
            hook.remove()
    shape = captured.values.shape
    if len(outputs) != shape[0]:
        raise ConfigError(f"the model has {len(outputs)} o_proj for {shape[0]} layers")
    metrics = np.zeros((shape[0], shape[2], shape[3], shape[3]))
    for layer, module in enumerate(outputs):
        weight = runner.host(module.weight).astype(np.float64)
        if weight.shape[1] % (shape[2] * shape[3]):
            raise ConfigError(f"o_proj takes {weight.shape[1]} values, which are not heads of {shape[3]}")
        of = weight.reshape(len(weight), shape[2], -1, shape[3])
        own = np.einsum("nhgd,nhge->hde", of, of, optimize=True) / (of.shape[2] * len(weight))
        metrics[layer] = own / max(power[layer] / len(lists), 1e-30)
    return [np.asarray(total) / len(lists), metrics]
