"""Where tokens lie in vLLM's paged KV cache, and copying them to and from segments in the canonical order.

Every layout served here is, per layer, two strided views `[blocks, tokens, kv_heads, head_dim]`, one of K and one of V,
over the engine's own tensor:

* strided (GPU; NHD, HND and all others of vLLM's layouts): a tensor `[blocks, heads, tokens, head_dim + v_head_dim]`
  of any strides, K and V the two parts of its last axis;
* transposed (CPU, instruction sets vec and vec16): `[blocks, heads, tokens, 2 · head_dim]`, contiguous, where the page
  of a head is K `[head_dim, tokens]` and then V `[tokens, head_dim]`;
* latent (MLA): `[blocks, tokens, width]` or `[blocks, 1, tokens, width]`, all of it K.

So one slice of one block is one strided copy, and tokens need not begin or end at a block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from kvstore.errors import ConfigError
from kvstore.layout import KVLayout

__all__ = ["Pages", "Run", "blocks_covering", "segment_tensors", "slots", "token_runs"]


class Run(NamedTuple):
    """Consecutive tokens in one block.

    Attributes:
        block: which of the request's blocks, counted from its first token.
        offset: the first one's place in the block.
        token: its place among the tokens that were asked for.
        length: how many.
    """

    block: int
    offset: int
    token: int
    length: int


def token_runs(begin: int, end: int, block_size: int) -> Iterator[Run]:
    """Tokens `begin` to `end` of a request, block by block."""
    at = begin
    while at < end:
        block, offset = divmod(at, block_size)
        count = min(block_size - offset, end - at)
        yield Run(block, offset, at - begin, count)
        at += count


def blocks_covering(begin: int, end: int, block_size: int) -> range:
    """The blocks, counted from the request's first token, that hold some of the tokens `begin` to `end`."""
    return range(begin // block_size, -(-end // block_size)) if begin < end else range(0)


def slots(blocks: Sequence[int], begin: int, end: int, block_size: int) -> torch.Tensor:
    """The slot (block · block size + offset) of each of the tokens, `[tokens]` int64."""
    ids = torch.tensor(blocks[: -(-end // block_size)], dtype=torch.int64)
    at = torch.arange(begin, end)
    return ids[at // block_size] * block_size + at % block_size


def segment_tensors(
    segment: memoryview, tokens: int, layout: KVLayout, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """K `[tokens, kv_heads, head_dim]` and V `[tokens, kv_heads, v_head_dim]` over the memory of a layer segment."""
    flat = torch.frombuffer(segment, dtype=torch.uint8).view(dtype)
    heads, width, v_width = layout.num_kv_heads, layout.head_dim, layout.v_head_dim or 0
    cut = tokens * heads * width
    return flat[:cut].view(tokens, heads, width), flat[cut:].view(tokens, heads, v_width)


class Pages:
    """The pages of one layer.

    Attributes:
        keys, values: `[blocks, tokens, kv_heads, head_dim]` and `[…, v_head_dim]`, views of the engine's memory.
        block_size: tokens in a block.
    """

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.keys = keys
        self.values = values
        self.block_size = keys.shape[1]

    @classmethod
    def strided(cls, cache: torch.Tensor, layout: KVLayout, block_size: int) -> Pages:
        """Pages of a tensor `[blocks, heads, tokens, head_dim + v_head_dim]` with any strides.

        Raises:
            ConfigError: another shape.
        """
        width, v_width = layout.head_dim, layout.v_head_dim or 0
        if layout.kind == "mla" and cache.dim() == 3:
            cache = cache[:, None]
        expected = (layout.num_kv_heads, block_size, width + v_width)
        if tuple(cache.shape[1:]) != expected:
            raise ConfigError(f"a layer's KV cache has shape {tuple(cache.shape)}, not [blocks, {expected}]")
        by_token = cache.transpose(1, 2)
        return cls(by_token[..., :width], by_token[..., width:])

    @classmethod
    def transposed(cls, cache: torch.Tensor, layout: KVLayout, block_size: int) -> Pages:
        """Pages of a contiguous tensor `[blocks, heads, tokens, 2 · head_dim]` whose keys are transposed in each page,
        as vLLM's CPU kernels have them.

        Raises:
            ConfigError: another shape, or not contiguous.
        """
        heads, width = layout.num_kv_heads, layout.head_dim
        expected = (heads, block_size, 2 * width)
        if tuple(cache.shape[1:]) != expected or not cache.is_contiguous() or layout.v_head_dim != width:
            raise ConfigError(f"a layer's KV cache has shape {tuple(cache.shape)}, not [blocks, {expected}] contiguous")
        keys = cache.view(len(cache), heads, 2, width, block_size)[:, :, 0].permute(0, 3, 1, 2)
        values = cache.view(len(cache), heads, 2, block_size, width)[:, :, 1].permute(0, 2, 1, 3)
        return cls(keys, values)

    def gather(self, blocks: Sequence[int], begin: int, end: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Copy tokens `begin` to `end` of a request with these blocks into `[tokens, kv_heads, …]`."""
        for run in token_runs(begin, end, self.block_size):
            block = blocks[run.block]
            here, there = slice(run.offset, run.offset + run.length), slice(run.token, run.token + run.length)
            keys[there] = self.keys[block, here]
            values[there] = self.values[block, here]

    def scatter(self, blocks: Sequence[int], begin: int, end: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Copy `[tokens, kv_heads, …]` into tokens `begin` to `end` of a request with these blocks."""
        for run in token_runs(begin, end, self.block_size):
            block = blocks[run.block]
            here, there = slice(run.offset, run.offset + run.length), slice(run.token, run.token + run.length)
            self.keys[block, here] = keys[there]
            self.values[block, here] = values[there]
