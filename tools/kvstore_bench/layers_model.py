"""The computation that loading is to hide behind: a real model's decoder layers, one by one, over new tokens.

torch is imported when a model is asked for.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

__all__ = ["LayeredModel"]


class LayeredModel:
    """SmolLM2 (or a folder of another model shaped like Llama), in fp32 on the CPU.

    Args:
        folder: a folder that transformers loads.
        history: tokens whose KV is loaded.
        new: tokens that are computed.

    Attributes:
        model: the model.
        ids: token ids `[1, history + new]`.
        num_layers: of the model.
    """

    def __init__(self, folder: Path, *, history: int, new: int) -> None:
        import torch
        from transformers import AutoModelForCausalLM
        from transformers.utils.logging import disable_progress_bar

        cast(Any, disable_progress_bar)()
        self.torch = torch
        self.model = cast(Any, AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)).eval()
        self.history, self.new = history, new
        self.num_layers: int = self.model.config.num_hidden_layers
        seeded = torch.Generator().manual_seed(0)
        self.ids = torch.randint(3, self.model.config.vocab_size - 1, (1, history + new), generator=seeded)
        self._layers = self.model.model.layers
        names = inspect.signature(self._layers[0].forward).parameters
        self._cache_name = "cache" if "cache" in names else "past_key_values"
        self._cached = self._inputs(history, new)
        self._whole = self._inputs(0, history + new)

    def one_thread(self) -> Callable[[], None]:
        """Compute with one thread from now on: with all cores taken by the computation, what loads beside it would
        disturb it, and that would be measured. Returns what undoes it."""
        before: int = self.torch.get_num_threads()
        self.torch.set_num_threads(1)

        def undo() -> None:
            self.torch.set_num_threads(before)

        return undo

    def _inputs(self, past: int, new: int) -> tuple[Any, dict[str, Any]]:
        """Embedded tokens and what every layer is given besides, for `new` tokens behind `past`."""
        torch = self.torch
        with torch.inference_mode():
            hidden = self.model.model.embed_tokens(self.ids[:, past : past + new])
            positions = torch.arange(past, past + new)[None]
            rotary = self.model.model.rotary_emb(hidden, position_ids=positions)
            seen = torch.arange(past + new)[None, :] <= positions[0][:, None]
            mask = torch.zeros(1, 1, new, past + new).masked_fill(~seen, torch.finfo(torch.float32).min)
        return hidden, {"attention_mask": mask, "position_ids": positions, "position_embeddings": rotary}

    def empty_cache(self) -> Any:
        """A cache without KV."""
        from transformers import DynamicCache

        return DynamicCache(config=self.model.config)

    def fill(self, cache: Any, layer: int, segments: Sequence[memoryview]) -> None:
        """Put a layer's loaded segments (chunks of the history, K then V, token-major) into the cache: the one copy
        that an engine makes on the way in."""
        torch = self.torch
        keys, values = self.new_layer()
        at = 0
        for segment in segments:
            heads, size = keys.shape[1], keys.shape[3]
            flat = torch.frombuffer(segment, dtype=torch.float32).view(2, -1, heads, size)
            tokens = flat.shape[1]
            keys[0, :, at : at + tokens] = flat[0].transpose(0, 1)
            values[0, :, at : at + tokens] = flat[1].transpose(0, 1)
            at += tokens
        slot = cache.layers[layer]
        slot.lazy_initialization(keys, values)
        slot.keys, slot.values = keys, values

    def new_layer(self) -> tuple[Any, Any]:
        """Keys and values of one layer over the history, `[1, kv_heads, history, head_dim]`, not yet filled."""
        config = self.model.config
        heads = config.num_key_value_heads
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        shape = (1, heads, self.history, size)
        return self.torch.empty(shape), self.torch.empty(shape)

    def begin(self) -> Any:
        """The hidden states that go into layer 0, for the new tokens."""
        return self._cached[0]

    def step(self, cache: Any, layer: int, hidden: Any) -> Any:
        """One layer over the new tokens, with the history in the cache."""
        return self._run(layer, hidden, cache, self._cached[1])

    def recompute(self, cache: Any) -> Any:
        """All layers over history and new tokens. Returns the last hidden states `[1, history + new, width]`."""
        hidden = self._whole[0]
        for layer in range(self.num_layers):
            hidden = self._run(layer, hidden, cache, self._whole[1])
        return hidden

    def _run(self, layer: int, hidden: Any, cache: Any, more: dict[str, Any]) -> Any:
        with self.torch.inference_mode():
            out = self._layers[layer](hidden, use_cache=True, **{self._cache_name: cache}, **more)
        return out[0] if isinstance(out, tuple) else out

    def same_history(self, cache: Any, truth: Any) -> bool:
        """Whether a cache holds, over the history, exactly the KV of another."""
        end = self.history
        return all(
            self.torch.equal(got.keys[:, :, :end], known.keys[:, :, :end])
            and self.torch.equal(got.values[:, :, :end], known.values[:, :, :end])
            for got, known in zip(cache.layers, truth.layers, strict=True)
        )
