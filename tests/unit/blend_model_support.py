"""Prompts of stored parts over tiny models, and a slow, independent way to blend them."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicLayer

from kvstore.blend.model import BlendModel
from kvstore.blend.recompute import Recompute
from kvstore.blend.terms import LayerKV, Span
from kvstore.testing.models import tiny_model

KINDS = ("llama", "qwen2", "mistral")
LAYERS = 5
LENGTHS = (13, 21, 17, 9)  # of parts, the last of which is the question


def model_of(kind: str, *, dtype: Any = torch.float32, **config: Any) -> Any:
    made = tiny_model(kind, num_hidden_layers=LAYERS, **config)
    for parameter in made.parameters():  # but not the rotary frequencies, as `from_pretrained(dtype=...)` does it
        parameter.data = parameter.data.to(dtype)
    if kind == "qwen2":  # biases are zero when made: they must count
        generator = torch.Generator().manual_seed(1)
        for layer in made.model.layers:
            for name in ("q_proj", "k_proj", "v_proj"):
                bias = getattr(layer.self_attn, name).bias
                bias.data.copy_(torch.randn(bias.shape, generator=generator) * 0.3)
    return made


def prompt(lengths: Sequence[int] = LENGTHS, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(2, 1000, (length,), generator=generator) for length in lengths]


def spans_of(parts: Sequence[torch.Tensor], stored: Sequence[int] | None = None) -> list[Span]:
    """Spans of the parts with these numbers; None: of all but the last."""
    spans, begin = [], 0
    for number, part in enumerate(parts):
        if number in (range(len(parts) - 1) if stored is None else stored):
            spans.append(Span(begin, begin + len(part)))
        begin += len(part)
    return spans


def cache_of(output: Any) -> Any:
    return output.cache if "cache" in output else output.past_key_values


def cache_name(owner: Any) -> str:
    return "cache" if "cache" in inspect.signature(owner.forward).parameters else "past_key_values"


@torch.no_grad()
def full_prefill(model: Any, ids: torch.Tensor) -> tuple[torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]]]:
    """Logits `[tokens, vocabulary]`, and K and V per layer as caches hold them."""
    out = model(ids[None], use_cache=True)
    return out.logits[0], [(layer.keys, layer.values) for layer in cache_of(out).layers]


def encode(blend: BlendModel, ids: torch.Tensor, spans: Sequence[Span], prefix: int = 0) -> list[LayerKV]:
    """Each span's KV from encoding it alone, or behind the first `prefix` tokens of the prompt, moved to its place."""
    pieces = []
    for span in spans:
        lead = ids[: min(prefix, span.begin)]
        _, kv = full_prefill(blend.model, torch.cat([lead, ids[span.begin : span.end]]))
        move = blend.rotary.moving(range(len(lead), len(lead) + span.end - span.begin), range(span.begin, span.end))
        pieces.append(
            [(move(k[0, :, len(lead) :].transpose(0, 1)), v[0, :, len(lead) :].transpose(0, 1)) for k, v in kv]
        )
    return [
        LayerKV(torch.cat([piece[layer][0] for piece in pieces]), torch.cat([piece[layer][1] for piece in pieces]))
        for layer in range(blend.num_layers)
    ]


def run_all(run: Recompute, stored: Sequence[LayerKV]) -> tuple[Any, torch.Tensor]:
    for layer in range(run.model.num_layers):
        run.layer(stored[layer] if run.needs(layer) else None)
    return run.finish()


class _Scattering(DynamicLayer):  # type: ignore[misc]
    """A cache layer whose update replaces some positions and gives back all."""

    def __init__(self, k: torch.Tensor, v: torch.Tensor) -> None:
        super().__init__()
        self.keys, self.values = k, v
        self.is_initialized, self.device = True, k.device
        self.positions: torch.Tensor = torch.arange(0)

    def update(self, k: torch.Tensor, v: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        self.keys[:, :, self.positions], self.values[:, :, self.positions] = k, v
        return self.keys, self.values


@torch.no_grad()
def slow_blend(
    model: Any, ids: torch.Tensor, spans: Sequence[Span], stored: Sequence[LayerKV], rows: Sequence[torch.Tensor],
    incoming: Sequence[torch.Tensor],
) -> tuple[torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]]]:  # fmt: skip
    """What the decoder layers of transformers themselves compute if, in each layer, K and V are fresh for `incoming`
    positions and the rest is computed for `rows`. Returns hidden states behind the norm of the last rows, and KV."""
    body = model.model
    places = torch.cat([torch.arange(span.begin, span.end) for span in spans])
    states = body.embed_tokens(ids[incoming[0]][None])
    cached = []
    for number, layer in enumerate(body.layers):
        shape = (1, stored[number].k.shape[1], len(ids), stored[number].k.shape[2])
        k, v = torch.zeros(shape), torch.zeros(shape)
        k[0, :, places], v[0, :, places] = stored[number].k.transpose(0, 1), stored[number].v.transpose(0, 1)
        kept = torch.isin(incoming[number], rows[number])
        for positions, picked in ((incoming[number], slice(None)), (rows[number], kept)):
            # Twice: first for the KV of all that come in, then for the hidden states of those that go on.
            cache = Cache(layers=[_Scattering(k, v) for _ in body.layers])
            cache.layers[number].positions = positions
            allowed = torch.arange(len(ids))[None] <= positions[:, None]
            mask = torch.where(allowed, 0.0, torch.finfo(torch.float32).min)[None, None]
            given = states[:, picked]
            out = layer(
                given,
                attention_mask=mask,
                position_ids=positions[None],
                position_embeddings=body.rotary_emb(given, position_ids=positions[None]),
                use_cache=True,
                **{cache_name(layer): cache},
            )
        states = out
        cached.append((k, v))
    return body.norm(states)[0], cached
