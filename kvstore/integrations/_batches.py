"""Batches of prompts: their rows, the stored pieces of these, and how far reading them has come."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvstore._session_state import Piece
from kvstore.errors import ConfigError
from kvstore.keys import Key

__all__ = ["Reading", "Row", "real_tokens", "two_dimensional"]


@dataclass(frozen=True)
class Row:
    """One row of a batch.

    Attributes:
        begin: column of its first real token.
        tokens: how many it has.
        pieces: where their KV is stored, in order; positions are counted from `begin`.
        parent: key of the chunk before the first piece.
    """

    begin: int
    tokens: int
    pieces: Sequence[Piece]
    parent: Key | None = None

    @classmethod
    def of(cls, begin: int, tokens: int, keys: Sequence[Key], size: int) -> Row:
        """A row of chunks of `size` tokens, the last one perhaps shorter."""
        pieces = []
        for key, first in zip(keys, range(0, tokens, size), strict=False):
            length = min(size, tokens - first)
            pieces.append(Piece(key, length, 0, length, first))
        return cls(begin, tokens, pieces)

    @property
    def keys(self) -> list[Key]:
        return [piece.key for piece in self.pieces]


class Reading:
    """A batch that is being read: what of it can still be used, and what has come.

    Args:
        columns: how many columns are wanted at most.

    Attributes:
        columns: leading columns that all rows can still get.
        tensors: keys and values per layer, `[batch, kv_heads, columns or more, head_dim]`.
    """

    def __init__(self, rows: Sequence[Row], columns: int) -> None:
        self.rows = rows
        self.columns = columns
        self.tensors: list[tuple[torch.Tensor, torch.Tensor]] = []

    def limit(self, number: int, pieces: int) -> None:
        """Row `number` has no more than its first `pieces` pieces."""
        row = self.rows[number]
        self.columns = min(self.columns, row.begin + (row.pieces[pieces - 1].end if pieces else 0))

    @property
    def hopeless(self) -> bool:
        """True if nothing is left for some row: padding alone is no hit."""
        return self.columns <= max(row.begin for row in self.rows)

    def usable(self, row: Row) -> int:
        """How many pieces of a row lie within the columns, in full or in part."""
        return bisect.bisect_left(row.pieces, self.columns - row.begin, key=lambda piece: piece.position)

    def needs(self, number: int, piece: int) -> bool:
        row = self.rows[number]
        return row.pieces[piece].position < self.columns - row.begin


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
