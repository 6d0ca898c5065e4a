"""How a chunk is stored for any place in a prompt: its key, its KV, its record.

K is stored as the model computed it, embedded at the position that the chunk had then, and turned to its new position
by the difference in one rotation (`RotarySpec.moving`, fp32). Stored before the embedding, as `kvstore.sessions` does,
it would be rounded once more: in bf16 |error| ≤ 2u · ‖pair‖ instead of u (u = 2^-8), and a chunk that stands where it
was computed would not come back bit by bit.

Two forms: "shared_prefix" (the default) computes a chunk behind the fixed prefix that all prompts begin with, so that
the attention sink lies in the prefix as it does in the prompt, which is half the repair for no work online; "alone"
computes it from position 0. What it was computed behind is part of its key, so forms and prefixes never mix.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from kvstore.errors import ConfigError
from kvstore.eviction.base import RecordInfo
from kvstore.keys import Key, KeyContext, content_key
from kvstore.layout import KVLayout
from kvstore.record import RecordSpec, kv_spec
from kvstore.rope import RotarySpec, Rotation
from kvstore.stream import PrefillSample
from kvstore.targets import Item

from .chunks import Ids, Placed, Prompt

if TYPE_CHECKING:
    from kvstore.buffers import Buffer

    from .model import BlendModel

__all__ = ["FORMS", "ChunkForm"]

FORMS = ("shared_prefix", "alone")

Layers = Sequence[tuple[torch.Tensor, torch.Tensor]]


class ChunkForm:
    """The chunks of one model behind one prefix.

    Args:
        model: computes them.
        context: of the model, without what this adds: the kind of the record, rotary parameters and separator.
        form: one of `FORMS`.
        prefix: ids that every prompt begins with, `[tokens]`.
        separator: text between parts. It changes no KV, but it is part of the key: who changes how prompts are built
            does not meet what was stored before.

    Attributes:
        context: in which chunks have their keys.
        behind: ids that chunks are computed behind.
        samples: how long that took.

    Raises:
        ConfigError: the prefix has ids that the model does not know.
    """

    def __init__(self, model: BlendModel, context: KeyContext, *, form: str, prefix: Ids, separator: str) -> None:
        self.model = model
        self.rotary: RotarySpec = model.rotary
        self.layout: KVLayout = model.layout
        self.context = replace(
            context,
            extra=(
                *context.extra,
                ("kind", "content"),
                ("rope", "applied"),
                ("rotary", self.rotary.text),
                ("separator", separator),
            ),
        )
        self.prefix = prefix
        self.behind = prefix if form == "shared_prefix" else prefix[:0]
        self.samples: list[PrefillSample] = []
        self._body = model.model.get_decoder()
        parameters = inspect.signature(self._body.forward).parameters
        self._argument = "cache" if "cache" in parameters else "past_key_values"
        self._prefix_kv: Layers | None = None
        self.require_known(prefix)

    # Names and places.

    def key(self, ids: Ids, *, is_prefix: bool = False) -> Key:
        """Of a chunk with these tokens; or of the prefix itself, which stands at position 0."""
        return content_key(ids, context=self.context, prefix=self.behind[:0] if is_prefix else self.behind)

    def place(
        self, ids: Ids, begin: int, *, first: int = 0, length: int | None = None, key: Key | None = None
    ) -> Placed:
        """Where tokens `first` to `first + length - 1` of a chunk with these ids stand in a prompt."""
        length = len(ids) - first if length is None else length
        return Placed(begin, begin + length, key or self.key(ids), len(ids), first, len(self.behind))

    def place_prefix(self) -> Placed:
        """The prefix at the beginning of a prompt."""
        return Placed(0, len(self.prefix), self.key(self.prefix, is_prefix=True), len(self.prefix), 0, 0)

    def exact(self, placed: Placed, prompt: Prompt) -> bool:
        """Whether all before it in the prompt is what it was computed behind, so its KV is what a prefill computes."""
        if placed.first or placed.begin != placed.stored_at:
            return False
        return bool((prompt.ids[: placed.begin] == self.prefix[: placed.begin]).all())

    def spec(self, tokens: int) -> RecordSpec:
        """Of a record of so many tokens."""
        return kv_spec(self.layout, self.context.dtype, tokens)

    def moving(self, *chunks: Placed) -> Rotation:
        """What turns K of the tokens of chunks, one behind the other, to where they stand."""
        old = [np.arange(each.length) + each.stored_at + each.first for each in chunks]
        new = [np.arange(each.begin, each.end) for each in chunks]
        return self.rotary.moving(np.concatenate(old), np.concatenate(new))

    def tensors(self, segment: memoryview, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V `[tokens, kv_heads, head_dim]` over the memory of a layer segment."""
        flat = torch.frombuffer(segment, dtype=torch.uint8).view(self.model.dtype)
        key, value = flat.view(2, tokens, self.layout.num_kv_heads, self.layout.head_dim)
        return key, value

    # Computing and storing.

    def require_known(self, ids: Ids) -> None:
        """Raises `ConfigError` for ids that the model does not know."""
        if len(ids) and int(ids.max()) >= self.model.vocabulary:
            raise ConfigError(
                f"token id {ids.max()} is not one of {self.model.name}'s 0 to {self.model.vocabulary - 1}"
            )

    @torch.no_grad()
    def compute(self, ids: Ids, *, is_prefix: bool = False) -> Layers:
        """K and V of each layer, `[1, kv_heads, tokens, head_dim]`, K embedded at the positions behind `behind`. The
        model must know the ids (`require_known`)."""
        if is_prefix or not len(self.behind):
            return self._prefill(ids, ())
        if self._prefix_kv is None:
            self._prefix_kv = self._prefill(self.behind, ())
        return self._prefill(ids, self._prefix_kv)

    def _prefill(self, ids: Ids, past: Layers) -> Layers:
        begin = past[0][0].shape[2] if past else 0
        tokens = torch.from_numpy(ids)[None].to(self.model.device)
        positions = torch.arange(begin, begin + len(ids), device=self.model.device)[None]
        cache = self.model.cache([(k, v) for k, v in past]) if past else None
        started = time.perf_counter()
        out: Any = self._body(tokens, position_ids=positions, use_cache=True, **{self._argument: cache})
        layers = [(layer.keys[:, :, begin:], layer.values[:, :, begin:]) for layer in out[self._argument].layers]
        self.model.synchronize()
        self.samples.append(PrefillSample(begin, len(ids), time.perf_counter() - started))
        return layers

    def item(self, key: Key, ids: Ids, layers: Layers, buffer: Buffer, *, is_prefix: bool = False) -> Item:
        """The record of a chunk, written into pool memory: the one copy on the way out, transposed to token-major."""
        spec = self.spec(len(ids))
        views = spec.split(buffer.view)
        for (k, v), view in zip(layers, views, strict=True):
            key_view, value_view = self.tensors(view, len(ids))
            key_view.copy_(k[0].transpose(0, 1))
            value_view.copy_(v[0].transpose(0, 1))
        begin = 0 if is_prefix else len(self.behind)
        meta = {
            "model": self.context.model, "revision": self.context.revision, "namespace": self.context.namespace,
            "dtype": self.context.dtype, "tokens": [begin, begin + len(ids)], "layers": self.layout.num_layers,
            "kv_heads": self.layout.num_kv_heads, "head_dim": self.layout.head_dim,
            "rope": "applied", "rotary": self.rotary.text, "kind": "content",
        }  # fmt: skip
        return Item(key, views, spec, meta, None, buffer, RecordInfo(0, len(ids)))
