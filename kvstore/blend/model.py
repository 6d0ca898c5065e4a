"""A transformers model as blending needs it: its own modules, one layer at a time, for any set of rows.

Nothing of a model is copied or replaced: norms, projections, MLP, rotary embedding and head are called as they are, so
quantised linears and LoRA work. That calling them in this order is what the model itself computes is not assumed: it is
compared once, on a short prompt, and a model that does something else (soft caps, scaled residuals, norms elsewhere)
is refused by name.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.nn import functional
from transformers import DynamicCache

from kvstore.errors import ConfigError
from kvstore.integrations._models import cache_layout
from kvstore.integrations._rotary import model_rotary
from kvstore.layout import KVLayout
from kvstore.rope import RotarySpec

__all__ = ["BlendModel", "Rotations"]

_PROBE_TOKENS = 12
_TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}  # of logits, against their norm

_OF_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj", "head_dim", "scaling")
_OF_LAYER = ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp")

Rotations = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines of some positions, `[1, rows, rotary_dim]`."""


class BlendModel:
    """One causal language model, layer by layer. Hidden states are `[1, rows, hidden_size]`.

    Args:
        model: of transformers, in evaluation mode and on one device: Llama, Qwen2, Mistral and models that compute as
            they do, in fp32, fp16 or bf16.

    Attributes:
        model: as given.
        layout: layers, KV heads and head_dim of its cache.
        rotary: its rotary embedding, with its own frequencies.
        dtype, device: of hidden states and of the cache.
        vocabulary: number of token ids.

    Raises:
        ConfigError: this model cannot be blended; says which and why.
    """

    def __init__(self, model: Any) -> None:
        if not hasattr(model, "config") or not hasattr(model, "get_decoder"):
            raise ConfigError(f"a causal language model of transformers is needed, not {type(model).__name__}")
        self.model = model
        self._config = model.config.get_text_config(decoder=True)
        self.name = f"{type(model).__name__} ({self._config.model_type})"
        self.layout: KVLayout = cache_layout(model, self._config)
        self.rotary: RotarySpec = model_rotary(model, self._config, self.layout.head_dim)
        self._body = model.get_decoder()
        self._head = model.get_output_embeddings()
        self._check_structure()
        self._rotate: Any = sys.modules[type(self._body.rotary_emb).__module__].apply_rotary_pos_emb
        weight = self._body.embed_tokens.weight
        self.dtype: torch.dtype = weight.dtype
        self.device: torch.device = weight.device
        self.vocabulary = int(weight.shape[0])
        if self.dtype not in _TOLERANCE:
            known = ", ".join(str(dtype).removeprefix("torch.") for dtype in _TOLERANCE)
            raise ConfigError(f"{self.name} is {self.dtype}; blending works in {known}")
        devices = {str(parameter.device) for parameter in model.parameters()}
        if len(devices) > 1:
            raise ConfigError(f"{self.name} lies on several devices ({', '.join(sorted(devices))}); put it on one")
        self.require_evaluation()
        self._compare()

    @property
    def num_layers(self) -> int:
        return self.layout.num_layers

    def require_evaluation(self) -> None:
        """Raises `ConfigError` if the model is in training mode: with dropout it computes something else every time."""
        if self.model.training:
            raise ConfigError(f"{self.name} is in training mode (dropout); call model.eval() first")

    def synchronize(self) -> None:
        """Wait until the device has computed all that it was told to."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    # The steps of a layer.

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Hidden states before the first layer of token ids `[rows]`."""
        hidden: torch.Tensor = self._body.embed_tokens(input_ids[None].to(self.device))
        return hidden

    def rotations(self, positions: torch.Tensor) -> Rotations:
        """Of positions `[rows]`, as the model computes them."""
        like = torch.empty(0, dtype=self.dtype, device=self.device)
        cos, sin = self._body.rotary_emb(like, position_ids=positions[None])
        return cos, sin

    def normed(self, layer: int, hidden: torch.Tensor) -> torch.Tensor:
        """What the projections of a layer read."""
        states: torch.Tensor = self._body.layers[layer].input_layernorm(hidden)
        return states

    def keys(self, layer: int, normed: torch.Tensor, rotations: Rotations) -> torch.Tensor:
        """K after the rotary embedding, `[1, kv_heads, rows, head_dim]`."""
        return self._heads(layer, "k", normed, rotations)

    def queries(self, layer: int, normed: torch.Tensor, rotations: Rotations) -> torch.Tensor:
        """Q after the rotary embedding, `[1, heads, rows, head_dim]`."""
        return self._heads(layer, "q", normed, rotations)

    def values(self, layer: int, normed: torch.Tensor) -> torch.Tensor:
        """V, `[1, kv_heads, rows, head_dim]`."""
        return self._heads(layer, "v", normed, None)

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        """What attention adds to the hidden states of the rows of `q`.

        Args:
            q: `[1, heads, rows, head_dim]`.
            k, v: `[1, kv_heads, tokens, head_dim]`.
            mask: added to the scores, `[1, 1, rows, tokens]`; None: causal, where the rows are all tokens.
        """
        attention = self._body.layers[layer].self_attn
        groups = q.shape[1] // k.shape[1]
        if groups > 1 and mask is not None and q.device.type != "cpu":
            # With a mask, CUDA's fast kernels know no shared KV heads.
            k, v, groups = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1), 1
        mixed = functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=attention.scaling, enable_gqa=groups > 1
        )
        out: torch.Tensor = attention.o_proj(mixed.transpose(1, 2).reshape(1, q.shape[2], -1))
        return out

    def feed(self, layer: int, hidden: torch.Tensor) -> torch.Tensor:
        """What the MLP adds to the hidden states."""
        own = self._body.layers[layer]
        out: torch.Tensor = own.mlp(own.post_attention_layernorm(hidden))
        return out

    def scores(self, layer: int, q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Attention as a matrix, fp32 `[heads, rows, tokens]`, each row summing to 1; arguments as in `attend`."""
        groups = q.shape[1] // k.shape[1]
        scaling = self._body.layers[layer].self_attn.scaling
        raw = q[0].float() @ k[0].float().repeat_interleave(groups, 0).transpose(1, 2) * scaling
        shares: torch.Tensor = (raw + mask[0].float()).softmax(-1)
        return shares

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """`[rows, vocabulary]` of the hidden states after the last layer."""
        out: torch.Tensor = self._head(self._body.norm(hidden))
        return out[0]

    # Masks and caches.

    def mask(self, positions: torch.Tensor, tokens: int) -> torch.Tensor:
        """Additive, `[1, 1, rows, tokens]`: a row sees the positions up to its own, wherever the row lies."""
        later = torch.arange(tokens, device=positions.device)[None] > positions[:, None]
        mask = torch.zeros(later.shape, dtype=self.dtype, device=positions.device)
        return mask.masked_fill_(later, float("-inf"))[None, None]

    def empty_kv(self, tokens: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Memory for K and V of all layers, each `[1, kv_heads, tokens, head_dim]`."""
        shape = (1, self.layout.num_kv_heads, tokens, self.layout.head_dim)
        return [
            (
                torch.empty(shape, dtype=self.dtype, device=self.device),
                torch.empty(shape, dtype=self.dtype, device=self.device),
            )
            for _ in range(self.num_layers)
        ]

    def cache(self, kv: list[tuple[torch.Tensor, torch.Tensor]]) -> DynamicCache:
        """A cache over this memory; nothing is copied."""
        cache = DynamicCache(config=self.model.config)
        layer: Any
        for layer, (keys, values) in zip(cache.layers, kv, strict=True):
            layer.lazy_initialization(keys, values)  # not through `update`, which would copy everything
            layer.keys, layer.values = keys, values
        return cache

    # What was given.

    def _heads(self, layer: int, which: str, normed: torch.Tensor, rotations: Rotations | None) -> torch.Tensor:
        attention = self._body.layers[layer].self_attn
        flat = getattr(attention, f"{which}_proj")(normed)
        heads: torch.Tensor = flat.view(1, flat.shape[1], -1, self.layout.head_dim)
        norm = getattr(attention, f"{which}_norm", None)  # Qwen3
        if norm is not None:
            heads = norm(heads)
        heads = heads.transpose(1, 2)
        if rotations is None:
            return heads
        cos, sin = rotations
        width = cos.shape[-1]
        turned: torch.Tensor = self._rotate(heads[..., :width], heads[..., :width], cos, sin)[0]
        return turned if width == heads.shape[-1] else torch.cat((turned, heads[..., width:]), -1)

    def _check_structure(self) -> None:
        body = self._body
        wanted = [(body, name, "the decoder") for name in ("embed_tokens", "layers", "norm", "rotary_emb")]
        for number, layer in enumerate(getattr(body, "layers", ())):
            wanted += [(layer, name, f"layer {number}") for name in _OF_LAYER]
            attention = getattr(layer, "self_attn", None)
            wanted += [(attention, name, f"the attention of layer {number}") for name in _OF_ATTENTION]
        for owner, name, where in wanted:
            if not hasattr(owner, name):
                raise ConfigError(
                    f"{self.name} has no {name} in {where}; blending is for Llama, Qwen2, Mistral and alike"
                )
        if self._head is None:
            raise ConfigError(f"{self.name} has no language model head")
        if len(body.layers) != self.num_layers:
            raise ConfigError(f"{self.name} has {len(body.layers)} layers, its configuration says {self.num_layers}")

    @torch.no_grad()
    def _compare(self) -> None:
        """Raises `ConfigError` unless the steps above, in their order, give the model's own logits."""
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(self.vocabulary, (_PROBE_TOKENS,), generator=generator).to(self.device)
        theirs = self.model(ids[None], use_cache=False).logits[0].float()
        try:
            hidden = self.embed(ids)
            rotations = self.rotations(torch.arange(_PROBE_TOKENS, device=self.device))
            for layer in range(self.num_layers):
                normed = self.normed(layer, hidden)
                q, k = self.queries(layer, normed, rotations), self.keys(layer, normed, rotations)
                hidden = hidden + self.attend(layer, q, k, self.values(layer, normed), None)
                hidden = hidden + self.feed(layer, hidden)
            ours = self.logits(hidden).float()
            error = float((ours - theirs).norm() / theirs.norm())
        except (RuntimeError, TypeError, ValueError, AttributeError) as problem:
            raise ConfigError(f"{self.name} cannot be computed layer by layer: {problem}", cause=problem) from problem
        if not error <= _TOLERANCE[self.dtype]:
            raise ConfigError(
                f"{self.name} does more than Llama, Qwen2 and Mistral do: computed layer by layer its logits are "
                f"{error:.1%} off; it cannot be blended"
            )
