"""Selective recompute: a prompt's KV from stored chunks, repaired by computing a few tokens again (CacheBlend).

    run = Recompute(model, input_ids, spans, BlendSettings())
    for layer in run.layers(loader.layers(run.needs)):
        ...  # it is computed, and the next one is on its way
    cache, logits = run.finish()

Layers before the first check layer are computed for all tokens. At a check layer K and V of all tokens that are still
under way are computed, and compared with the stored ones; the tokens that a selector likes best go on, and from there
on Q, K, V and MLP are computed for these only. Their K and V replace the stored ones, and they attend to all tokens
before them, which a mask by absolute position says. Whatever lies outside the spans, and the last token, is computed in
every layer. (arXiv 2405.16444 §4; the authors' code forces only the last token of the question, and masks packed rows
by their number instead of their position, so that rows see later ones. Neither is so here.)
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import DynamicCache

from kvstore.errors import ConfigError

from .model import BlendModel, Rotations
from .selection import Evidence, best, selector
from .terms import BlendSettings, LayerKV, Span

__all__ = ["LayerInput", "Recompute"]


@dataclass(frozen=True)
class LayerInput:
    """What a layer is computed from (the paper's input dictionary).

    Attributes:
        layer: its number.
        hidden: states of the rows under way, `[1, rows, hidden_size]`.
        positions: of these rows in the prompt, int64 `[rows]`, rising (the paper's HKVD indices).
        rotations: cosines and sines of these positions.
        mask: additive, `[1, 1, rows, tokens]`; None: the rows are all tokens.
    """

    layer: int
    hidden: torch.Tensor
    positions: torch.Tensor
    rotations: Rotations
    mask: torch.Tensor | None


class Recompute:
    """One prompt; consumes the stored KV of its layers in order. Nothing is computed before the first `layer`.

    Args:
        model: the model.
        input_ids: of the whole prompt, integers `[tokens]`.
        spans: which of them are stored; rising, apart.
        settings: how much is computed again, and what.
        logits: for how many of the last tokens logits are wanted; all of them must lie behind the last span (but for
            the very last token). None: all that lie behind it; the last one, if there are no spans.
        timed: a device is waited for behind layer 0, so that `compute_s` is true of this one.

    Attributes:
        tokens: of the prompt.
        kv: K and V of all layers, `[1, kv_heads, tokens, head_dim]`, allocated once; the cache is made of them.
        rows: of each layer done, the positions that were computed in it, int64 `[rows]`. (In a check layer K and V of
            all rows that came in are fresh, and `rows` are those that went on.)
        compute_s: of each layer done, seconds that it took; on a device without waiting for it, but see `timed`.

    Raises:
        ConfigError: spans that overlap or leave the prompt, a check layer that the model does not have, token ids that
            it does not know, more logits than fresh tokens.
    """

    def __init__(
        self,
        model: BlendModel,
        input_ids: Any,
        spans: Sequence[Span],
        settings: BlendSettings,
        *,
        logits: int | None = None,
        timed: bool = False,
    ) -> None:
        self.model = model
        self.settings = settings
        ids = _token_ids(input_ids, model)
        self.tokens = len(ids)
        self.spans = _checked(spans, self.tokens)
        if settings.check_layers[-1] >= model.num_layers:
            raise ConfigError(
                f"blend_check_layers={list(settings.check_layers)} names layer {settings.check_layers[-1]}, but "
                f"{model.name} has {model.num_layers}, counted from 0"
            )
        self._ids = ids
        self._selector = selector(settings)
        self._behind = max(1, self.tokens - self.spans[-1].end) if self.spans else self.tokens
        self.answers = self._answers(logits)
        self._classify()
        self.kv = model.empty_kv(self.tokens)
        self.rows: list[torch.Tensor] = []
        self.compute_s: list[float] = []
        self._timed = timed
        self._state: LayerInput | None = None

    @property
    def next_layer(self) -> int:
        """The layer that `layer` computes next; the number of layers once all are done."""
        return len(self.rows)

    @property
    def token_layers(self) -> float:
        """Share of a full prefill's tokens × layers that were computed in the layers done, 0 to 1."""
        return sum(map(len, self.rows)) / (self.tokens * self.model.num_layers)

    def ratios(self) -> list[float]:
        """Of each layer done, the share of the spans' tokens that was computed again."""
        stored = max(1, int(self._stored.sum()))
        return [int(self._stored[rows].sum()) / stored for rows in self.rows]

    def needs(self, layer: int) -> bool:
        """Whether stored KV of this layer will be looked at. If not, it need not be loaded."""
        if not self.spans:
            return False
        if self._exact or not self._checks:
            return bool(self._exact) or self._plain
        first = min(self._checks)
        return layer > first or (layer == first and getattr(self._selector, "compares", True))

    def layers(self, loaded: Iterable[LayerKV | None]) -> Iterator[int]:
        """The computing generator: takes layer after layer from a loading one, and gives the number of each that is
        computed. Raises as `layer`."""
        for kv in loaded:
            self.layer(kv)
            yield self.next_layer - 1

    @torch.no_grad()
    def layer(self, kv: LayerKV | None) -> None:
        """Compute the next layer.

        Args:
            kv: its stored KV; may be None where `needs` says so.

        Raises:
            ConfigError: there is no further layer; `kv` is missing, or has another shape, dtype or device.
        """
        layer = self.next_layer
        if layer == self.model.num_layers:
            raise ConfigError(f"all {layer} layers are computed")
        if kv is None and self.needs(layer):
            raise ConfigError(
                f"the stored KV of layer {layer} is missing; without it, make a Recompute with less spans"
            )
        if kv is not None:
            self._check_kv(layer, kv)
        began = time.monotonic()
        self._state = self.prefill_layer(self._begin() if self._state is None else self._state, kv)
        if self._timed and layer == 0:
            self.model.synchronize()
        self.compute_s.append(time.monotonic() - began)

    def prefill_layer(self, state: LayerInput, kv: LayerKV | None) -> LayerInput:
        """One layer: stored and fresh K and V are scattered into the cache, rows are chosen if it is a check layer,
        and those that go on are computed (the paper's call of this name).

        Returns:
            The input of the next layer.
        """
        model, layer = self.model, state.layer
        keys, values = self.kv[layer]
        everything = len(state.positions) == self.tokens
        normed = model.normed(layer, state.hidden)
        k = model.keys(layer, normed, state.rotations)
        v = model.values(layer, normed)
        if everything:
            keys.copy_(k)
            values.copy_(v)
        else:
            if kv is not None:
                self._scatter(layer, kv)
            keys[:, :, state.positions] = k
            values[:, :, state.positions] = v
        if layer in self._checks:
            chosen = self._choose(state, normed, (k, v), kv)
            state, normed = self._only(state, chosen), normed[:, chosen]
        self.rows.append(state.positions)
        if layer == model.num_layers - 1 and self.answers < len(state.positions):
            # Nobody asks for the hidden states of the others behind the last layer.
            tail = torch.arange(len(state.positions) - self.answers, len(state.positions), device=model.device)
            state, normed = self._only(state, tail), normed[:, tail]
        q = model.queries(layer, normed, state.rotations)
        hidden = state.hidden + model.attend(layer, q, keys, values, state.mask)
        hidden = hidden + model.feed(layer, hidden)
        return replace(state, layer=layer + 1, hidden=hidden)

    @torch.no_grad()
    def finish(self) -> tuple[DynamicCache, torch.Tensor]:
        """The cache of the whole prompt, and the logits of its last tokens, `[answers, vocabulary]`.

        To continue, `model.generate` wants a token to compute: crop the cache by one, and pass it with all ids.

        Raises:
            ConfigError: not all layers are done.
        """
        if self._state is None or self.next_layer < self.model.num_layers:
            raise ConfigError(f"{self.next_layer} of {self.model.num_layers} layers are computed")
        return self.model.cache(self.kv), self.model.logits(self._state.hidden)

    # Which rows.

    def _answers(self, wanted: int | None) -> int:
        behind = self._behind
        if wanted is None:
            return behind if self.spans else 1
        if not isinstance(wanted, int) or not 1 <= wanted <= behind:
            raise ConfigError(
                f"logits={wanted!r} must be between 1 and {behind}, the tokens that are computed at the end"
            )
        return wanted

    def _classify(self) -> None:
        """Which positions are stored, exact, and to choose from; and how many are kept at which layer."""
        kinds = torch.zeros(self.tokens, dtype=torch.int8)
        for span in self.spans:
            kinds[span.begin : span.end] = 2 if span.exact else 1
        kinds[-1] = 0  # always computed: its logits are wanted
        slots = torch.cat([torch.arange(span.begin, span.end) for span in self.spans] or [torch.empty(0).long()])
        places = torch.zeros(self.tokens, dtype=torch.int64)
        places[slots] = torch.arange(len(slots))
        device = self.model.device
        self._exact = bool((kinds == 2).any())
        self._candidates = (kinds == 1).to(device)
        self._stored = (kinds > 0).to(device)
        self._places = places.to(device)  # of a stored position, its row in a LayerKV
        self._stored_tokens = len(slots)
        candidates = int((kinds == 1).sum())
        counts = [min(candidates, int(ratio * len(slots) + 0.5)) for ratio in self.settings.ratios]
        self._plain = candidates > 0 and counts[0] == 0
        self._checks = {
            layer: count
            for layer, count in zip(self.settings.check_layers, counts, strict=True)
            if count < candidates and not self._plain
        }
        first = kinds == 0 if self._plain else kinds < 2
        self._first = first.nonzero().flatten().to(device)

    def _begin(self) -> LayerInput:
        positions, model = self._first, self.model
        mask = None if len(positions) == self.tokens else model.mask(positions, self.tokens)
        return LayerInput(0, model.embed(self._ids[positions]), positions, model.rotations(positions), mask)

    def _only(self, state: LayerInput, rows: torch.Tensor) -> LayerInput:
        """The same for the rows with these indices."""
        cos, sin = state.rotations
        positions = state.positions[rows]
        mask = self.model.mask(positions, self.tokens)
        return LayerInput(state.layer, state.hidden[:, rows], positions, (cos[:, rows], sin[:, rows]), mask)

    def _choose(
        self, state: LayerInput, normed: torch.Tensor, fresh: tuple[torch.Tensor, torch.Tensor], kv: LayerKV | None
    ) -> torch.Tensor:
        """Indices of the rows that go on: the best candidates, and all that is no candidate."""
        layer = state.layer
        candidate = self._candidates[state.positions]
        rows = candidate.nonzero().flatten()
        positions = state.positions[rows]

        def deviation() -> torch.Tensor:
            if kv is None:
                raise ConfigError(
                    f"the stored KV of layer {layer} is missing; the selector wants it (compares = False?)"
                )
            return self._deviation(kv, fresh, rows, self._places[positions])

        def attention() -> torch.Tensor:
            return self._attention(layer, state, normed)[positions]

        evidence = Evidence(layer, positions, self.spans, deviation, attention)
        kept = best(self._selector.scores(evidence), self._checks[layer], len(positions))
        going = ~candidate
        going[rows[kept]] = True
        return going.nonzero().flatten()

    def _deviation(
        self, kv: LayerKV, fresh: tuple[torch.Tensor, torch.Tensor], rows: torch.Tensor, places: torch.Tensor
    ) -> torch.Tensor:
        measure = self.settings.measure
        total = torch.zeros(len(rows), device=rows.device)
        for name, old, new in zip("kv", kv, fresh, strict=True):
            if name in measure:
                now = new[0].transpose(0, 1)[rows].float()
                squares = (now - old[places].float()).square().sum((1, 2))
                # K and V are of different sizes: each counts in units of its own mean square.
                total += squares / now.square().sum((1, 2)).mean() if measure == "kv" else squares
        return total

    def _attention(self, layer: int, state: LayerInput, normed: torch.Tensor) -> torch.Tensor:
        """What the tokens behind the last span attend to, `[tokens]`."""
        tail = slice(len(state.positions) - self._behind, None)
        cos, sin = state.rotations
        q = self.model.queries(layer, normed[:, tail], (cos[:, tail], sin[:, tail]))
        mask = self.model.mask(state.positions[tail], self.tokens)
        return self.model.scores(layer, q, self.kv[layer][0], mask).sum((0, 1))

    # Stored KV.

    def _scatter(self, layer: int, kv: LayerKV) -> None:
        keys, values = (each[0].transpose(0, 1) for each in self.kv[layer])
        begin = 0
        for span in self.spans:
            end = begin + span.end - span.begin
            keys[span.begin : span.end] = kv.k[begin:end]
            values[span.begin : span.end] = kv.v[begin:end]
            begin = end

    def _check_kv(self, layer: int, kv: LayerKV) -> None:
        model = self.model
        expected = (self._stored_tokens, model.layout.num_kv_heads, model.layout.head_dim)
        for name, tensor in zip("KV", kv, strict=True):
            if tuple(tensor.shape) != expected:
                raise ConfigError(
                    f"stored {name} of layer {layer} has shape {tuple(tensor.shape)} instead of {expected}"
                )
            if tensor.dtype != model.dtype or tensor.device != model.device:
                raise ConfigError(
                    f"stored {name} of layer {layer} is {tensor.dtype} on {tensor.device}, the model {model.dtype} on "
                    f"{model.device}"
                )


def _token_ids(input_ids: Any, model: BlendModel) -> torch.Tensor:
    try:
        ids = torch.as_tensor(input_ids)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"token ids must be integers, not {type(input_ids).__name__}: {error}", cause=error
        ) from error
    if ids.dim() != 1 or not len(ids) or ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise ConfigError(f"token ids must be integers of shape [tokens], not {ids.dtype} {tuple(ids.shape)}")
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= model.vocabulary:
        raise ConfigError(
            f"token id {low if low < 0 else high} is not one of {model.name}'s 0 to {model.vocabulary - 1}"
        )
    return ids.to(model.device, torch.int64)


def _checked(spans: Sequence[Span], tokens: int) -> tuple[Span, ...]:
    end = 0
    for span in spans:
        if not end <= span.begin < span.end <= tokens:
            raise ConfigError(
                f"span {span.begin}..{span.end} is empty, overlaps the one before it (which ends at {end}) or leaves "
                f"the prompt of {tokens} tokens"
            )
        end = span.end
    return tuple(spans)
