"""Make a profile of kvt: `kvstore-codec profile --codec kvt`, or

    profile = build_profile(model, tokenizer, token_lists(tokenizer, texts, tokens=1128, limit=12))
    profile.save("model.kvt")

The texts are split: most are profiled, a few judge what came out. The step, the same everywhere, is searched so that
the finest level causes the KL divergence asked for; then the distributions are counted, and every level is judged on
the texts kept back, with everything counted. That is the profile's parameter "quality".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvstore.errors import ConfigError
from kvstore.layout import KVLayout

from .base import RAW, SegmentInfo
from .floats import from_float32
from .kvt import KvtCodec, loops
from .kvt_fitting import Basis, Histogram, basis_of, fit_arrays, plan_shifts
from .kvt_statistics import METRICS, Prefilled, Runner, gather
from .profile import Profile, register
from .profiling import model_name

__all__ = ["build_profile"]

Floats = npt.NDArray[np.float32]

_DTYPES = ("bfloat16", "float16", "float32")
_TRIES = 6  # of the step search, on each of the judging contexts
_CLOSE = 0.04  # it ends when log KL is this near


class _Judged(NamedTuple):
    """A context that nothing is learned from: what follows it, its cache, and what the model says on that."""

    rest: Sequence[int]
    prefilled: Prefilled
    said: Any


def build_profile(
    model: Any,
    tokenizer: Any,
    token_lists: Sequence[Sequence[int]],
    *,
    name: str | None = None,
    revision: str | None = None,
    metric: str = "fisher",
    ridge: float = 1.0,
    levels: int = 3,
    kl: float = 0.01,
    rounding: float = 0.5,
    sinks: int = 4,
    raw_last: int = 0,
    judges: int = 3,
    draws: int = 2,
    continuation: int | None = None,
    seed: int = 0,
    progress: Callable[[str], None] | None = None,
) -> Profile:
    """Profile a model.

    Takes two forward passes over each list, and with metric "fisher" a backward pass over its last part; SmolLM2-135M
    with 11 lists of 1128 tokens takes two to three minutes on a CPU core. Holds the KV of the judging contexts.

    Args:
        model: a causal language model of transformers whose KV cache has K and V of every token, on any device.
        tokenizer: unused but for its name; the lists are tokens already.
        token_lists: contexts of one model, of the same length; at least two.
        name, revision: of the model, for the profile; default its own.
        metric: "fisher", or "attention"; see `kvt_statistics`.
        ridge: share of the metric's mean diagonal added to it; larger is safer on texts unlike these.
        levels: of a segment, half a bit of precision apart.
        kl: wanted of the finest level, nats per token.
        rounding: an index is ⌊|value| + rounding⌋.
        sinks: tokens at positions below it are stored raw.
        raw_last: so many last tokens of each segment are stored raw, too.
        judges: so many of the lists are kept back.
        draws: next tokens drawn per position.
        continuation: tokens at the end of each list that speak of those before; default a ninth, at least 16.
        progress: told what is being done.

    Raises:
        ConfigError: an option or a list is impossible, or the model's cache or rotary embedding is not understood.
    """
    tell = progress or (lambda _: None)
    context = _check(token_lists, metric, ridge, levels, kl, rounding, sinks, judges, draws, continuation)
    runner = Runner(model)
    learn, judge = token_lists[judges:], token_lists[:judges]
    statistics, layout = gather(
        runner, learn, context=context, sinks=sinks, draws=draws, metric=metric, seed=seed, tell=tell
    )  # fmt: skip
    sides = [
        basis_of(mean, covariance, weight, ridge)
        for mean, covariance, weight in zip(statistics.mean, statistics.covariance, statistics.metric, strict=True)
    ]
    judged = [_prepare(runner, ids, context) for ids in judge]
    step = _search(runner, judged, sides, kl, rounding, sinks, tell)
    sides = [Basis(side.basis * step, side.inverse / step, side.mean) for side in sides]
    histogram = Histogram(layout.num_layers, layout.elements_per_token)
    for number, ids in enumerate(learn):
        tell(f"distributions: context {number + 1} of {len(learn)}")
        prefilled = runner.prefill(ids[:context])
        _count(histogram, prefilled, sides, rounding, sinks)
    arrays = fit_arrays(histogram, plan_shifts(histogram, levels))
    for letter, side in zip("kv", sides, strict=True):
        arrays[f"{letter}_basis"] = side.basis.astype(np.float32)
        arrays[f"{letter}_mean"] = side.mean.astype(np.float32)
    parameters: dict[str, Any] = {
        "sinks": sinks, "raw_last": raw_last, "rounding": float(rounding), "metric": metric, "ridge": float(ridge),
        "step": float(step), "contexts": len(learn), "context_tokens": context,
    }  # fmt: skip
    named = name or model_name(model)

    def made(**more: Any) -> Profile:
        return Profile(
            "kvt", named, layout, dtypes=_DTYPES, revision=revision, rotary=runner.rotary.text,
            parameters={**parameters, **more}, arrays=arrays,
        )  # fmt: skip

    tell("judging the levels")
    return made(quality=_quality(runner, judged, made()))


def _check(lists: Sequence[Sequence[int]], metric: str, ridge: float, levels: int, kl: float, rounding: float,
           sinks: int, judges: int, draws: int, continuation: int | None) -> int:  # fmt: skip
    """How many tokens of a list are context, or `ConfigError`."""
    if metric not in METRICS:
        raise ConfigError(f"metric {metric!r} is not one of {', '.join(METRICS)}")
    for option, value, low, high in (
        ("ridge", ridge, 0, 1e6), ("levels", levels, 1, 8), ("kl", kl, 1e-6, 10), ("rounding", rounding, 0.01, 1),
        ("sinks", sinks, 0, 1 << 20), ("judges", judges, 1, len(lists) - 1), ("draws", draws, 1, 1000),
    ):  # fmt: skip
        if not low <= value <= high:
            raise ConfigError(f"option {option}={value!r} of a kvt profile must be between {low} and {high}")
    lengths = {len(each) for each in lists}
    if len(lengths) != 1:
        raise ConfigError(f"a kvt profile needs token lists of one length, not of {sorted(lengths)[:4]}")
    (length,) = lengths
    rest = max(16, length // 9) if continuation is None else continuation
    if rest < 2 or length - rest < sinks + 8:
        raise ConfigError(f"token lists of {length} are too short for a continuation of {rest} tokens")
    return length - rest


def _prepare(runner: Runner, ids: Sequence[int], context: int) -> _Judged:
    prefilled = runner.prefill(ids[:context])
    with runner.torch.no_grad():
        said = runner.logits(ids[context:], prefilled)
    return _Judged(ids[context:], prefilled, said)


def _score(runner: Runner, judged: _Judged, keys: Floats, values: Floats) -> tuple[float, float, float]:
    """(KL, ΔNLL, share of equal most likely tokens) of a changed cache."""
    with runner.torch.no_grad():
        parts = runner.as_cache(keys, values, judged.prefilled)
        known, said = judged.said, runner.logits(judged.rest, judged.prefilled, parts)
        kl = float((known.exp() * (known - said)).double().sum(-1).mean())
        after = runner.torch.tensor(list(judged.rest[1:]), device=said.device)[:, None]
        dnll = float((known[:-1].gather(1, after) - said[:-1].gather(1, after)).double().mean())
        same = float((known.argmax(-1) == said.argmax(-1)).double().mean())
    return kl, dnll, same


def _steps(x: Floats, side: Basis) -> Floats:
    """`[layers, tokens, heads, width]`, from values to steps."""
    moved = (x - side.mean[:, None].astype(np.float32)).transpose(0, 2, 1, 3)
    turned: Floats = np.matmul(moved, side.inverse.astype(np.float32)).transpose(0, 2, 1, 3)
    return turned


def _back(z: Floats, side: Basis) -> Floats:
    turned = np.matmul(z.transpose(0, 2, 1, 3), side.basis.astype(np.float32)).transpose(0, 2, 1, 3)
    moved: Floats = turned + side.mean[:, None].astype(np.float32)
    return moved


def _search(runner: Runner, judged: Sequence[_Judged], sides: Sequence[Basis], kl: float, rounding: float, sinks: int,
            tell: Callable[[str], None]) -> float:  # fmt: skip
    """The step at which the judging contexts see the KL wanted: a secant search, since log KL is nearly a line in the
    logarithm of the step."""
    # A step of one standard deviation of the median channel is where the search begins.
    spread = [np.sqrt(np.mean(np.square(_steps(j.prefilled.values[:, sinks:], sides[1])), (1, 2))) for j in judged[:1]]
    step = float(np.median(spread)) or 1.0
    points: list[tuple[float, float]] = []
    for _ in range(_TRIES):
        found = [_rounded(runner, each, sides, step, rounding, sinks) for each in judged]
        mean = max(sum(found) / len(found), 1e-12)
        tell(f"step {step:.4g}: KL {mean:.4f}")
        points.append((math.log(step), math.log(mean)))
        miss = math.log(mean) - math.log(kl)
        if abs(miss) < _CLOSE:
            break
        slope = 2.0
        if len(points) > 1:
            (x0, y0), (x1, y1) = points[-2:]
            slope = min(max((y1 - y0) / (x1 - x0), 1.0), 4.0) if x1 != x0 else 2.0
        step = math.exp(points[-1][0] - max(-2.0, min(2.0, miss / slope)))
    best = min(points, key=lambda point: abs(point[1] - math.log(kl)))
    return math.exp(best[0])


def _rounded(
    runner: Runner, judged: _Judged, sides: Sequence[Basis], step: float, rounding: float, sinks: int
) -> float:
    """KL if the cache is rounded to steps."""
    given = judged.prefilled
    changed = []
    for x, side in zip((given.keys, given.values), sides, strict=True):
        z = _steps(x[:, sinks:], side) / np.float32(step)
        size = np.abs(z)
        index = np.floor(size + np.float32(rounding))
        for low, high in ((1, 1), (2, 2), (3, math.inf)):  # centres, as a profile has them
            cell = (index >= low) & (index <= high)
            number = cell.sum((1, 2, 3), keepdims=True)
            shift = ((size - index) * cell).sum((1, 2, 3), keepdims=True) / np.maximum(number, 1)
            index += cell * shift.astype(np.float32)
        whole = x.copy()
        whole[:, sinks:] = _back(np.copysign(index, z) * np.float32(step), side)
        changed.append(whole)
    return _score(runner, judged, changed[0], changed[1])[0]


def _count(histogram: Histogram, prefilled: Prefilled, sides: Sequence[Basis], rounding: float, sinks: int) -> None:
    z = np.concatenate(
        [
            _steps(x[:, sinks:], side).reshape(x.shape[0], x.shape[1] - sinks, -1)
            for x, side in zip((prefilled.keys, prefilled.values), sides, strict=True)
        ],
        axis=2,
    )
    indices, nothing = np.empty(z.shape[1:], np.int8), np.zeros(z.shape[2], np.float32)
    for layer, own in enumerate(np.ascontiguousarray(z)):
        beyond = loops().quantise(own, nothing, rounding, indices)
        histogram.add(layer, indices[~beyond], own[~beyond])
    histogram.tokens += z.shape[1]


def _quality(runner: Runner, judged: Sequence[_Judged], profile: Profile) -> list[dict[str, float]]:
    """Of each level: bits per value (everything counted), KL, ΔNLL, top-1 agreement, on the judging contexts."""
    register(profile)
    codec = KvtCodec(profile)
    layout = profile.layout
    table = []
    encoded = [_encoded(codec, runner, each, layout) for each in judged]
    for level in range(codec.levels):
        nbytes, scores = 0, []
        for each, segments in zip(judged, encoded, strict=True):
            keys, values = np.empty_like(each.prefilled.keys), np.empty_like(each.prefilled.values)
            for layer, parts in enumerate(segments):
                used = parts[: level + 1]
                nbytes += sum(map(len, used))
                _decoded(codec, runner, used, keys[layer], values[layer])
            scores.append(_score(runner, each, keys, values))
        kl, dnll, top1 = np.mean(scores, axis=0)
        total = sum(each.prefilled.keys.size + each.prefilled.values.size for each in judged)
        table.append({"bits": 8 * nbytes / total, "kl": float(kl), "dnll": float(dnll), "top1": float(top1)})
    return table


def _encoded(codec: KvtCodec, runner: Runner, judged: _Judged, layout: KVLayout) -> list[list[memoryview]]:
    """The levels of each layer, of float16 values before the rotary embedding."""
    out = []
    tokens = judged.prefilled.keys.shape[1]
    for layer in range(layout.num_layers):
        both = (judged.prefilled.keys[layer], judged.prefilled.values[layer])
        raw = bytearray(layout.segment_bytes(tokens, "float16"))
        from_float32(np.concatenate([x.ravel() for x in both]), "float16", memoryview(raw))
        about = SegmentInfo(2, layer, layout, "float16", tokens, start=0, rope="none")
        parts = codec.encode(memoryview(raw), about)
        out.append([each.data for each in parts if each.codec != RAW] or [memoryview(raw)])
    return out


def _decoded(codec: KvtCodec, runner: Runner, parts: Sequence[memoryview], keys: Floats, values: Floats) -> None:
    size = 2 * (keys.size + values.size)
    dst = bytearray(size)
    if len(parts) == 1 and len(parts[0]) == size:  # stored raw
        dst[:] = parts[0]
    else:
        codec.decode_into(parts, memoryview(dst))
    flat = np.frombuffer(dst, np.float16).astype(np.float32)
    keys[:] = flat[: keys.size].reshape(keys.shape)
    values[:] = flat[keys.size :].reshape(values.shape)
