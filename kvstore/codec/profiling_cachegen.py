"""Profiles of the `cachegen` codec: steps from the size of the deltas, distributions from counts.

    profile = build_profile(model, tokenizer, token_lists, name="org/model")
    profile.save("model.cachegen")

The RMS of the deltas of K and of V is taken per layer (without the first group: attention sinks are unlike all else).
Then everything is quantised as the codec does it, and symbols are counted per (layer, channel). Channels whose counts
are alike share a distribution: classes are found by k-means in the number of bits that sharing costs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from kvstore.errors import ConfigError
from kvstore.layout import KVLayout
from kvstore.rope import RotarySpec

from .cachegen import quantiser
from .cachegen_reference import ANCHOR_LIMIT, MOST
from .cachegen_tables import FORMAT, MAGNITUDES, MAX_LEVELS, NAME, ROPES, SPLIT, third_of
from .profile import Profile
from .profiling import collect, model_name
from .rans import PROBABILITY_BITS, Distributions

__all__ = ["DEFAULT_LEVELS", "GROUP", "THIRDS", "build_profile", "profile_of"]

GROUP = 10
THIRDS = (0.5, 1.0, 1.5)
"""Steps of the first, middle and last third of the layers, in units of the level's scale and the RMS of the deltas."""
DEFAULT_LEVELS: tuple[float, ...] = (1.0, 0.6, 0.4, 0.25)
VALUE_SCALE = 1.75
"""V takes coarser steps than K: at equal size this has the least KL, measured on SmolLM2."""

_DEFAULT_SCALE = 0.4
_LIMITS = (3, 5, 7, 9, 11, 15, 19, 23, 31, 47, 63, 95, 127)
_CLASSES = 32  # of deltas, per level and third
_ANCHOR_CLASSES = 128
_KEEP_BYTES = 2 << 30  # what is collected is held in memory up to here, else the model runs again
_BEYOND = 255  # symbol of what is beyond ±127, while counting

Counts = npt.NDArray[np.int64]
Context: TypeAlias = tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]
LevelSpec: TypeAlias = float | Sequence[int]


def build_profile(
    model: Any,
    tokenizer: Any,
    token_lists: Sequence[Sequence[int]],
    *,
    name: str | None = None,
    revision: str | None = None,
    rope: str = "applied",
    progress: Callable[[str], None] | None = None,
    **options: Any,
) -> Profile:
    """Run a transformers model over contexts and make a profile of its KV.

    Args:
        model: see `kvstore.codec.profiling.collect`.
        tokenizer: not used; all codecs' builders have the same arguments.
        token_lists: contexts, as `kvstore.codec.profiling.token_lists` makes them; 8 of 1000 tokens suffice.
        name: of the model, as in `KeyContext.model`; default: what its configuration says.
        rope: whether the KV will be stored with K after ("applied") or before ("none") its rotary embedding.
        progress: told what is being done.
        options: see `profile_of`.

    Raises:
        ConfigError: there are no contexts, the model's KV cannot be collected, or an option is impossible.
    """
    if rope not in ROPES:
        raise ConfigError(f"rope={rope!r} is not known; use {' or '.join(map(repr, ROPES))}")
    rotary = RotarySpec.from_config(model.config) if rope == "applied" else None

    def run(ids: Sequence[int]) -> Context:
        kv = collect(model, ids)
        return (kv.keys if rotary is None else kv.rotated(rotary)), kv.values

    kept: list[Context] = []

    def contexts() -> Iterator[Context]:
        for number, ids in enumerate(token_lists):
            if number < len(kept):
                yield kept[number]
                continue
            if progress is not None:
                progress(f"context {number + 1} of {len(token_lists)}")
            got = run(ids)
            if len(kept) == number and sum(k.nbytes + v.nbytes for k, v in (*kept, got)) <= _KEEP_BYTES:
                kept.append(got)
            yield got

    return profile_of(
        contexts,
        name=name or model_name(model),
        revision=revision,
        rope=rope,
        rotary=None if rotary is None else rotary.text,
        **options,
    )


def profile_of(
    contexts: Callable[[], Iterable[Context]],
    *,
    name: str,
    revision: str | None = None,
    rope: str = "applied",
    rotary: str | None = None,
    levels: Sequence[LevelSpec] = DEFAULT_LEVELS,
    level: int | None = None,
    value_scale: float = VALUE_SCALE,
    embedded: bool = False,
    group: int = GROUP,
    dtypes: Sequence[str] = ("bfloat16", "float16", "float32"),
) -> Profile:
    """Make a profile of KV that was collected.

    Args:
        contexts: gives (K, V) of each context, fp32 `[layers, tokens, heads, width]`; called twice.
        name, revision: of the model.
        rope: how K is stored: "applied" or "none".
        rotary: `RotarySpec.text`, for information.
        levels: coarse to fine. A number is a scale: steps are scale x `THIRDS` x RMS. Three integers are bits of the
            deltas per third of the layers, for example (8, 5, 3): each delta vector then has a step of its own.
        level: which one is encoded; None: the scale nearest to 0.4.
        value_scale: by what V's steps are larger than K's.
        embedded: put all levels into one record, each refining the one before; scales must fall by a factor of 3.
        group: tokens per group.

    Raises:
        ConfigError: an option is impossible, or there is too little KV.
    """
    specs = _specs(levels, embedded=embedded)
    if not 0.01 <= value_scale <= 100:
        raise ConfigError(f"value_scale={value_scale!r} must be between 0.01 and 100")
    if not isinstance(group, int) or not 2 <= group <= 256:
        raise ConfigError(f"group={group!r} must be an integer between 2 and 256")
    chosen = _default_level(specs) if level is None else level
    if not 0 <= chosen < len(specs):
        raise ConfigError(f"level={level!r} is not one of the {len(specs)} levels")
    layout, rms = _measure(contexts, group)
    steps = [_steps(spec, rms, value_scale) for spec in specs]
    if embedded:  # nested exactly: the next coarser step is three times this one
        for number in range(len(steps) - 2, -1, -1):
            steps[number] = steps[number + 1] * np.float32(SPLIT)
    counted = _Counted(layout, specs, steps, group, embedded)
    for keys, values in contexts():
        counted.add(keys, values)
    arrays, bits = counted.tables()
    described = [
        {"bits": list(spec), "bits_per_value": each}
        if isinstance(spec, tuple)
        else {"scale": float(spec), "value_scale": value_scale, "thirds": list(THIRDS), "bits_per_value": each}
        for spec, each in zip(specs, bits, strict=True)
    ]
    return Profile(
        NAME,
        name,
        layout,
        tuple(dtypes),
        revision,
        rotary,
        parameters={
            "format": FORMAT, "group": group, "rope": rope, "level": 0 if embedded else chosen, "embedded": embedded,
            "levels": described, "tokens": counted.tokens,
        },
        arrays={"rms": rms, **arrays},
    )  # fmt: skip


def _specs(levels: Sequence[LevelSpec], *, embedded: bool) -> list[float | tuple[int, ...]]:
    specs: list[float | tuple[int, ...]] = []
    for each in levels:
        if isinstance(each, int | float) and not isinstance(each, bool):
            if not 0.001 <= each <= 1000:
                raise ConfigError(f"a level's scale must be between 0.001 and 1000, not {each!r}")
            specs.append(float(each))
            continue
        bits = tuple(each) if isinstance(each, list | tuple) else ()
        if len(bits) != 3 or not all(type(b) is int and 2 <= b <= 8 for b in bits):
            raise ConfigError(f"a level is a scale, or the bits of three thirds, 2 to 8 each; not {each!r}")
        specs.append(bits)
    if not 1 <= len(specs) <= MAX_LEVELS:
        raise ConfigError(f"a profile has 1 to {MAX_LEVELS} levels, not {len(specs)}")
    if embedded:
        scales = [spec for spec in specs if isinstance(spec, float)]
        if len(scales) < len(specs) or any(
            abs(one / other - SPLIT) > 0.02 * SPLIT for one, other in itertools.pairwise(scales)
        ):
            raise ConfigError(f"embedded levels are scales that fall by a factor of {SPLIT}, as in 1.2, 0.4")
    return specs


def _default_level(specs: Sequence[float | tuple[int, ...]]) -> int:
    scales = [(abs(np.log(spec / _DEFAULT_SCALE)), n) for n, spec in enumerate(specs) if isinstance(spec, float)]
    return min(scales)[1] if scales else len(specs) - 1


def _steps(spec: float | tuple[int, ...], rms: npt.NDArray[np.float32], value_scale: float) -> npt.NDArray[np.float32]:
    layers = rms.shape[1]
    if isinstance(spec, tuple):
        return np.zeros((2, layers), np.float32)
    thirds = np.array([THIRDS[third_of(layer, layers)] for layer in range(layers)])
    made = spec * thirds * np.array([[1.0], [value_scale]]) * rms
    steps: npt.NDArray[np.float32] = np.clip(made, 2.0**-50, 2.0**50).astype(np.float32)
    return steps


def _halves(keys: npt.NDArray[Any], values: npt.NDArray[Any]) -> list[npt.NDArray[np.float32]]:
    """K and V as `[layers, tokens, channels]`; V only if there is one."""
    both = [np.ascontiguousarray(each, np.float32).reshape(*each.shape[:2], -1) for each in (keys, values)]
    return both if both[1].shape[2] else both[:1]


def _measure(contexts: Callable[[], Iterable[Context]], group: int) -> tuple[KVLayout, npt.NDArray[np.float32]]:
    """The layout, and the RMS of the deltas, `[2, layers]`, of K and V."""
    layout: KVLayout | None = None
    total: Any = 0.0
    count = 0
    for keys, values in contexts():
        if keys.ndim != 4 or values.ndim != 4 or keys.shape[:2] != values.shape[:2]:
            raise ConfigError(f"K and V of a context have the shapes {list(keys.shape)} and {list(values.shape)}")
        layers, tokens, heads, width = keys.shape
        kind = "kv" if values.shape[3] else "mla"
        mine = KVLayout(layers, heads, width, values.shape[3], kind)
        if layout not in (None, mine):
            raise ConfigError("contexts differ in layers, heads or widths")
        layout = mine
        where = np.arange(tokens)
        counts_from = group if tokens > group + 1 else 0
        used = (where % group != 0) & (where >= counts_from)
        if not used.any():
            continue
        squares = np.zeros((2, layers))
        for half, x in enumerate(_halves(keys, values)):
            if not np.isfinite(x).all():
                raise ConfigError("K or V of a context holds inf or nan")
            delta = x[:, used] - x[:, where[used] // group * group]
            squares[half] = np.square(delta, dtype=np.float64).mean((1, 2))
        total = total + squares * used.sum()
        count += int(used.sum())
    if layout is None or not count:
        raise ConfigError(f"a profile needs contexts of more than {group} tokens")
    return layout, np.sqrt(total / count).astype(np.float32)


class _Counted:
    """Counts of all symbols."""

    def __init__(
        self,
        layout: KVLayout,
        specs: Sequence[float | tuple[int, ...]],
        steps: Sequence[npt.NDArray[np.float32]],
        group: int,
        embedded: bool,
    ) -> None:
        self.layout, self.specs, self.steps, self.group, self.embedded = layout, specs, steps, group, embedded
        self.tokens = 0
        layers, channels = layout.num_layers, layout.elements_per_token
        self.thirds = np.array([third_of(layer, layers) for layer in range(layers)])
        self.anchors: Counts = np.zeros((layers, channels, 2 * ANCHOR_LIMIT + 1), np.int64)
        self.deltas: list[Counts] = []
        for number in range(len(specs)):
            symbols = MAGNITUDES * SPLIT if embedded and number else _BEYOND + 1
            self.deltas.append(np.zeros((layers, channels, symbols), np.int64))

    def _limit(self, number: int, layer: int) -> int:
        spec = self.specs[number]
        return 2 ** (spec[self.thirds[layer]] - 1) - 1 if isinstance(spec, tuple) else ANCHOR_LIMIT

    def add(self, keys: npt.NDArray[np.float32], values: npt.NDArray[np.float32]) -> None:
        tokens = keys.shape[1]
        self.tokens += tokens
        begin = 0
        for half, x in enumerate(_halves(keys, values)):
            columns = slice(begin, begin + x.shape[2])
            begin = columns.stop
            for layer in range(len(x)):
                words = np.ascontiguousarray(x[layer]).view(np.uint32)
                if self.embedded:
                    self._add_embedded(words, layer, half, columns)
                    continue
                for number in range(len(self.specs)):
                    limit = self._limit(number, layer)
                    anchors, deltas = self._quantised(words, self.steps[number][half, layer], limit)
                    if number == 0:
                        _count(self.anchors[layer, columns], anchors)
                    deltas[deltas > 2 * limit] = _BEYOND
                    _count(self.deltas[number][layer, columns], deltas)

    def _add_embedded(self, words: npt.NDArray[np.uint32], layer: int, half: int, columns: slice) -> None:
        anchors, deltas, whole = self._quantised_whole(words, self.steps[-1][half, layer])
        _count(self.anchors[layer, columns], anchors)
        for number in range(len(self.specs) - 1, 0, -1):
            coarse = (whole + (1 + SPLIT * MOST)) // SPLIT - MOST
            rest = whole - coarse * SPLIT
            symbols = np.where(coarse < 0, -rest, rest) + 1 + SPLIT * np.minimum(np.abs(coarse), MAGNITUDES - 1)
            _count(self.deltas[number][layer, columns], symbols)
            whole = coarse
        deltas = np.where(np.abs(whole) > ANCHOR_LIMIT, _BEYOND, whole + ANCHOR_LIMIT)
        _count(self.deltas[0][layer, columns], deltas)

    def _quantised(self, words: npt.NDArray[np.uint32], step: float, limit: int) -> tuple[Any, Any]:
        tokens, channels = words.shape
        groups = -(-tokens // self.group)
        anchors: npt.NDArray[np.uint8] = np.empty((groups, channels), np.uint8)
        deltas: npt.NDArray[np.uint8] = np.empty((tokens - groups, channels), np.uint8)
        of_anchors, of_deltas = np.empty(groups, np.uint16), np.empty(tokens - groups, np.uint16)
        self._escapes = quantiser().quantise(
            words, "float32", self.group, step, limit, anchors, deltas, of_anchors, of_deltas
        )
        if self._escapes is None:
            raise ConfigError("a context has K or V that is too large to be quantised by the steps of the others")
        return anchors, deltas

    def _quantised_whole(self, words: npt.NDArray[np.uint32], step: float) -> tuple[Any, Any, Any]:
        anchors, deltas = self._quantised(words, step, ANCHOR_LIMIT)
        whole = deltas.astype(np.int64) - ANCHOR_LIMIT
        whole[deltas > 2 * ANCHOR_LIMIT] = self._escapes
        return anchors, deltas, whole

    def tables(self) -> tuple[dict[str, npt.NDArray[Any]], list[float]]:
        """The profile's arrays, and the modelled bits per value of each level (with all coarser ones, if embedded)."""
        layers, channels = self.layout.num_layers, self.layout.elements_per_token
        found, classes = _cluster(self.anchors.reshape(layers * channels, -1), _ANCHOR_CLASSES)
        arrays: dict[str, npt.NDArray[Any]] = {
            "anchor.classes": classes.reshape(layers, channels).astype(np.uint16),
            "anchor.frequencies": found.frequencies,
        }
        values = float(self.anchors.sum() + self.deltas[0].sum())
        halves = 2 if self.layout.v_head_dim else 1
        vectors = self.anchors.sum() / channels * halves
        before = _bits(self.anchors.reshape(layers * channels, -1), found, classes) + 16.0 * vectors
        modelled: list[float] = []
        for number, counts in enumerate(self.deltas):
            level = np.zeros((layers, channels), np.uint16)
            bits = 0.0
            for third in range(3):
                mine = np.flatnonzero(self.thirds == third)
                flat = counts[mine].reshape(len(mine) * channels, counts.shape[2])
                refines = self.embedded and number > 0
                if not refines:
                    limit = self._limit(number, int(mine[0])) if len(mine) else 1
                    if not isinstance(self.specs[number], tuple):
                        limit = _best_limit(flat) if len(mine) else 1
                        flat = _cut(flat, limit)
                        bits += 16.0 * flat[:, -1].sum()
                    else:
                        flat = np.pad(flat[:, : 2 * limit + 1], ((0, 0), (0, 1)))
                made, classes = _cluster(flat, _CLASSES, SPLIT if refines else None)
                bits += _bits(flat, made, classes)
                arrays[f"level.{number}.frequencies.{third}"] = made.frequencies
                level[mine] = classes.reshape(len(mine), channels)
            arrays[f"level.{number}.classes"] = level
            arrays[f"level.{number}.steps"] = self.steps[number]
            if isinstance(self.specs[number], tuple):
                bits += 16.0 * counts.sum() / channels * halves
            before += bits if self.embedded else 0.0
            modelled.append(round((before if self.embedded else before + bits) / values, 4))
        return arrays, modelled


def _count(into: Counts, symbols: npt.NDArray[Any]) -> None:
    """Add the symbols `[n, channels]` to the counts `[channels, symbols]`."""
    channels, alphabet = into.shape
    flat = symbols.astype(np.int64) + np.arange(channels) * alphabet
    into += np.bincount(flat.reshape(-1), minlength=channels * alphabet).reshape(channels, alphabet)


def _best_limit(counts: Counts) -> int:
    """Where the alphabet ends: what is beyond costs 16 bits more, and each symbol takes 1/4096 from the others."""
    total = counts.sum(0)
    best, least = _LIMITS[-1], np.inf
    for limit in _LIMITS:
        beyond = total.sum() - total[ANCHOR_LIMIT - limit : ANCHOR_LIMIT + limit + 1].sum()
        cost = 26.0 * beyond - total.sum() * np.log2(1 - (2 * limit + 2) / (1 << PROBABILITY_BITS))
        if cost < least:
            best, least = limit, cost
    return best


def _cut(counts: Counts, limit: int) -> Counts:
    """Counts over the symbols of -limit … limit, and of what is beyond."""
    inside = counts[:, ANCHOR_LIMIT - limit : ANCHOR_LIMIT + limit + 1]
    return np.concatenate((inside, (counts.sum(1) - inside.sum(1))[:, None]), 1)


def _bits(counts: Counts, made: Distributions, classes: npt.NDArray[np.integer[Any]]) -> float:
    bits = made.bits
    if bits.shape[1] != counts.shape[1]:  # a refinement: one class is several distributions
        bits = bits.reshape(-1, counts.shape[1])
    return float((bits[classes] * counts).sum())


def _cluster(
    counts: Counts, most: int, conditional: int | None = None
) -> tuple[Distributions, npt.NDArray[np.integer[Any]]]:
    """At most so many classes of the rows of `counts`, and the class of each row.

    k-means where the distance of a row to a class is what the row costs in bits if it is coded by it; begins with
    groups of rows of equal entropy.

    Args:
        conditional: the rows are several distributions of so many symbols each, one after the other.
    """
    rows, symbols = counts.shape
    width = conditional or symbols
    if not rows:
        return Distributions.from_counts(np.ones((symbols // width, width))), np.zeros(0, np.int64)
    weights = counts.astype(np.float64)
    total = weights.sum(1, keepdims=True)
    shares = weights / np.maximum(total, 1)
    with np.errstate(divide="ignore", invalid="ignore"):
        entropy = -np.nansum(np.where(shares > 0, shares * np.log2(shares), 0), 1)
    order = np.argsort(entropy, kind="stable")
    classes = np.empty(rows, np.int64)
    classes[order] = np.arange(rows) * min(most, rows) // rows
    cost: Any = None
    for _ in range(12):
        pooled = _pooled(weights, classes)
        bits = _smooth(pooled, width)
        cost = shares @ bits.T
        closest = cost.argmin(1)
        if np.array_equal(closest, classes):
            break
        classes = closest
    used, classes = np.unique(classes, return_inverse=True)
    pooled = _pooled(weights, classes)
    del used
    return Distributions.from_counts((pooled + 1e-9).reshape(-1, width)), classes


def _pooled(weights: npt.NDArray[np.float64], classes: npt.NDArray[np.integer[Any]]) -> npt.NDArray[np.float64]:
    pooled = np.zeros((int(classes.max()) + 1, weights.shape[1]))
    np.add.at(pooled, classes, weights)
    return pooled


def _smooth(pooled: npt.NDArray[np.float64], width: int) -> npt.NDArray[np.float64]:
    """Bits of each symbol in each class, about as `Distributions.from_counts` gives them."""
    parts = pooled.reshape(-1, width)
    total = parts.sum(1, keepdims=True)
    shares = np.where(total > 0, parts / np.maximum(total, 1), 1 / width)
    floor = 1 / (1 << PROBABILITY_BITS)
    bits = -np.log2(shares * (1 - width * floor) + floor)
    return bits.reshape(pooled.shape)
