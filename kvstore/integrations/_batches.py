"""Batches of prompts: their rows and chunks, and how far reading them has come."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvstore.buffers import Buffer
from kvstore.errors import ConfigError
from kvstore.keys import Key

__all__ = ["Group", "Reading", "Row", "put_back", "real_tokens", "two_dimensional"]


@dataclass(frozen=True)
class Row:
    """One row of a batch: its real tokens, where they begin in the row, and their chunks."""

    begin: int
    tokens: int
    keys: Sequence[Key]


class Reading:
    """A batch that is being read: what of it can still be used, and what has come.

    Args:
        size: tokens of a chunk.
        columns: how many columns are wanted at most.

    Attributes:
        columns: leading columns that all rows can still get.
        tensors: keys and values per layer, `[batch, kv_heads, columns or more, head_dim]`.
    """

    def __init__(self, rows: Sequence[Row], size: int, columns: int) -> None:
        self.rows = rows
        self.size = size
        self.columns = columns
        self.tensors: list[tuple[torch.Tensor, torch.Tensor]] = []

    def limit(self, number: int, chunks: int) -> None:
        """Row `number` has no more than its first `chunks` chunks."""
        row = self.rows[number]
        self.columns = min(self.columns, row.begin + min(chunks * self.size, row.tokens))

    @property
    def hopeless(self) -> bool:
        """True if nothing is left for some row: padding alone is no hit."""
        return self.columns <= max(row.begin for row in self.rows)

    def usable(self, row: Row) -> int:
        """How many chunks of a row lie within the columns."""
        return -(-(self.columns - row.begin) // self.size)

    def needs(self, number: int, chunk: int) -> bool:
        return chunk < self.usable(self.rows[number])


@dataclass
class Group:
    """Some consecutive layers of some chunks, each (row, chunk), that are read together."""

    first: int
    count: int
    chunks: Sequence[tuple[int, int]]
    buffers: Sequence[Buffer] = ()

    def release(self) -> None:
        for buffer in self.buffers:
            buffer.release()
        self.buffers = ()


def put_back(group: Group, groups: Iterator[Group]) -> Iterator[Group]:
    yield group
    yield from groups


def two_dimensional(ids: Any) -> torch.Tensor:
    try:
        tensor = torch.as_tensor(ids)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"token ids must be integers, not {type(ids).__name__}: {error}") from error
    if tensor.dim() == 1:
        tensor = tensor[None]
    if tensor.dim() != 2 or not len(tensor) or tensor.is_floating_point():
        raise ConfigError(f"token ids must be integers of shape [tokens] or [batch, tokens], not {tuple(tensor.shape)}")
    return tensor.cpu()


def real_tokens(mask: torch.Tensor, number: int) -> tuple[int, int]:
    """Begin and end of the ones in a row of an attention mask. Raises `ConfigError` if they have gaps."""
    ones = mask.nonzero().flatten()
    if not len(ones):
        raise ConfigError(f"row {number} of the attention mask has no tokens")
    begin, end = int(ones[0]), int(ones[-1]) + 1
    if end - begin != len(ones):
        raise ConfigError(f"row {number} of the attention mask has padding between tokens")
    return begin, end
