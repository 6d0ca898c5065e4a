"""What the scheduler's side tells the workers in one step. Plain values: they are pickled to other processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["Announced", "ChunkRef", "Isolation", "Load", "Save", "Step"]


class Isolation(NamedTuple):
    """What keeps a request's records apart from those of others with the same tokens.

    Attributes:
        cache_salt: of the request, or None.
        lora: identity and version of its adapter, or None.
        epoch: of the engine, once it was told that what is stored is not its own any more; or None.
    """

    cache_salt: str | None = None
    lora: str | None = None
    epoch: str | None = None

    def __repr__(self) -> str:  # a salt is a secret
        salt = None if self.cache_salt is None else "…"
        return f"Isolation(cache_salt={salt}, lora={self.lora!r}, epoch={self.epoch!r})"


class ChunkRef(NamedTuple):
    """One chunk of a prompt: its content hash, the position of its first token, and how many it has."""

    hash: bytes
    begin: int
    tokens: int

    @property
    def end(self) -> int:
        return self.begin + self.tokens


class Load(NamedTuple):
    """Tokens `begin` to `end` of a request, out of `chunks`, into its pages.

    Attributes:
        blocks: the request's blocks in order, from its first token on, at least up to `end`.
        asynchronous: between steps, and told of once it is done; otherwise layer by layer within this step.
        awaited: another engine is computing them: each chunk is loaded once it is stored. Only between steps.
    """

    request: str
    isolation: Isolation
    chunks: Sequence[ChunkRef]
    begin: int
    end: int
    blocks: Sequence[int]
    asynchronous: bool
    awaited: bool = False


class Save(NamedTuple):
    """Chunks of a request that this step makes complete.

    Attributes:
        parent: hash of the chunk before the first one, or None.
        blocks: as of `Load`.
    """

    request: str
    isolation: Isolation
    chunks: Sequence[ChunkRef]
    parent: bytes | None
    blocks: Sequence[int]


class Announced(NamedTuple):
    """Chunks that a waiting request will want."""

    isolation: Isolation
    chunks: Sequence[ChunkRef]


@dataclass(frozen=True, slots=True)
class Step:
    """All that one step asks of a worker.

    Attributes:
        announced: the queue, the next to run first; None: as before.
        spoiled: blocks that some request of this step reads, and that hold no good KV since a load failed.
    """

    loads: Sequence[Load] = ()
    saves: Sequence[Save] = ()
    announced: Sequence[Announced] | None = None
    spoiled: Sequence[int] = ()
