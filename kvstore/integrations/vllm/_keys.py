"""What vLLM's requests and shards are called in the store: our own token hashes, and all else that must match.

vLLM's block hashes cover tokens, adapters, salts and multimodal items, but neither model nor weights, dtype or shard,
so they are not used as names.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from kvstore.errors import ConfigError
from kvstore.keys import KeyContext, MultimodalItem, chunk_hashes
from kvstore.layout import KVLayout

from ._messages import ChunkRef, Isolation

__all__ = ["ContextOf", "Shard", "chunk_refs", "hashed", "multimodal_items", "shards_of"]

ContextOf = Callable[[Isolation], KeyContext]


class Shard(NamedTuple):
    """One part of a model's KV cache, as it is named in keys.

    Attributes:
        tp_rank, tp_size: which KV heads; replicas of one part have the same numbers.
        pp_rank, pp_size: which layers.
        layout: what it holds.
        writer: of several ranks with the same part, the one that stores it.
    """

    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int
    layout: KVLayout
    writer: bool = True


def shards_of(
    *, tp_size: int, layers: Sequence[int], kv_heads: int, head_dim: int, v_head_dim: int, mla: bool, replicas: int = 1
) -> list[Shard]:
    """The shards of all ranks, in rank order (tensor-parallel ranks of the first pipeline stage first).

    Ranks that hold the same bytes have the same name, and the first of them writes: with MLA all tensor-parallel ranks
    (the latent vectors are not split), with fewer KV heads than ranks `replicas` consecutive ones.

    Args:
        layers: number of layers of each pipeline stage.
        kv_heads: KV heads of one rank.
        replicas: consecutive tensor-parallel ranks that hold the same heads.

    Raises:
        ConfigError: the ranks cannot be divided by the replicas.
    """
    same = tp_size if mla else replicas
    if same < 1 or tp_size % same:
        raise ConfigError(f"{tp_size} tensor-parallel ranks cannot hold {same} replicas each")
    found = []
    for stage, count in enumerate(layers):
        layout = KVLayout(count, 1, head_dim, 0, "mla") if mla else KVLayout(count, kv_heads, head_dim, v_head_dim)
        for rank in range(tp_size):
            found.append(Shard(rank // same, tp_size // same, stage, len(layers), layout, rank % same == 0))
    return found


def multimodal_items(features: Sequence[Any]) -> list[MultimodalItem]:
    """A request's images, clips, … from vLLM's `mm_features`."""
    return [MultimodalItem(f.identifier, f.mm_position.offset, f.mm_position.length) for f in features]


def hashed(
    tokens: Sequence[int], *, chunk_size: int, unfull: bool, items: Sequence[MultimodalItem] = ()
) -> list[bytes]:
    """Hashes of the chunks of a prompt. Items that begin behind the tokens are left out: a request that goes on has
    them in later chunks."""
    inside = [item for item in items if item.offset < len(tokens)]
    return chunk_hashes(tokens, chunk_size=chunk_size, save_unfull_chunk=unfull, multimodal=inside)


def chunk_refs(hashes: Sequence[bytes], tokens: int, chunk_size: int) -> list[ChunkRef]:
    """The chunks with these hashes of a prompt of `tokens` tokens; the last one may be short."""
    return [
        ChunkRef(digest, begin, min(chunk_size, tokens - begin))
        for digest, begin in zip(hashes, range(0, tokens, chunk_size), strict=False)
    ]
