"""A tiny model, documents and a question, for the tests of storing, loading and blending."""

from __future__ import annotations

from typing import Any

import torch

from kvstore.blend import Blender, ChunkForm
from kvstore.store import Store
from kvstore.testing import DictBackend, FaultyBackend
from kvstore.testing.models import tiny_model
from tests.faults.support import store_over

LAYERS = 4
OPTIONS = {"enable_blending": True, "blend_min_tokens": 16}


def tokens(seed: int, count: int) -> torch.Tensor:
    return torch.randint(2, 1024, (count,), generator=torch.Generator().manual_seed(seed))


PREFIX = tokens(0, 20)
DOCUMENTS = [tokens(n, 40 + n) for n in range(1, 5)]
QUESTION = tokens(9, 9)


def model(kind: str = "llama", dtype: torch.dtype = torch.float32, **more: Any) -> Any:
    """With rotary frequencies in fp32 whatever the dtype, as `from_pretrained` loads them."""
    made = tiny_model(kind, num_hidden_layers=LAYERS, **more)
    buffers = {name: buffer.clone() for name, buffer in made.named_buffers() if name.endswith("inv_freq")}
    made = made.to(dtype)
    for name, buffer in buffers.items():
        owner, _, last = name.rpartition(".")
        setattr(made.get_submodule(owner), last, buffer)
    return made


class Kept(FaultyBackend):
    """Outlives its stores."""

    def close(self) -> None:
        return


def backend() -> Kept:
    return Kept(DictBackend())


def store(kept: Kept, **options: Any) -> Store:
    return store_over(kept, **options)


def blender(some_model: Any, some_store: Store, options: dict[str, object] | None = None, **more: Any) -> Any:
    """A `Blender`, untyped: its caches are of a union of classes that tests do not care for."""
    fields = {"prefix": PREFIX, **more}
    return Blender(some_model, some_store, {**OPTIONS, **(options or {})}, **fields)


def form_of(some: Any) -> ChunkForm:
    """How its chunks are stored."""
    form: ChunkForm = some._form
    return form


def damage(kept: Kept, key: Any, layer: int, layers: int = LAYERS) -> None:
    """Change a byte in a layer segment of a stored record, and nothing before it."""
    record = bytearray(kept.inner.records[key])  # type: ignore[attr-defined]
    from kvstore.record import parse_header

    segment = parse_header(bytes(record), key=key).segments[layer]
    record[segment.offset + segment.length // 2] ^= 0x10
    kept.inner.records[key] = bytes(record)  # type: ignore[attr-defined]


def prefill(some_model: Any, ids: torch.Tensor) -> tuple[torch.Tensor, Any]:
    """Logits `[tokens, vocabulary]` and the cache of a plain prefill."""
    with torch.no_grad():
        out = some_model(ids[None], use_cache=True)
    return out.logits[0], out["cache"] if "cache" in out else out["past_key_values"]
