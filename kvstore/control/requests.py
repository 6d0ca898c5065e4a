"""What the control API takes: bodies of requests, with every length bounded. Server side only (pydantic)."""

from __future__ import annotations

import binascii
from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from kvstore.errors import ConfigError
from kvstore.keys import (
    DEFAULT_CHUNK_SIZE,
    KEY_BYTES,
    MAX_CHUNK_SIZE,
    MIN_CHUNK_SIZE,
    Key,
    KeyContext,
    chunk_keys,
)
from kvstore.layout import KVLayout

__all__ = [
    "MAX_KEYS",
    "MAX_TOKENS",
    "CheckFinish",
    "Clear",
    "Decompress",
    "LookupRequest",
    "Move",
    "Pin",
    "Prompt",
    "Report",
    "RouteRequest",
    "Transcode",
    "Unpin",
]

MAX_KEYS = 8192
"""Keys of one request."""
MAX_TOKENS = 1 << 20
"""Tokens of one prompt."""
_MAX_INSTANCES = 1024
_MAX_EVENT = 1 << 16
_MAX_NUMBER = (1 << 53) - 1


class Prompt(NamedTuple):
    """The chunks that a request is about.

    Attributes:
        keys: in the order of the prompt.
        chunk_size: tokens of each.
    """

    keys: list[Key]
    chunk_size: int


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid")


def _number(value: Any) -> Any:
    """JSON has no booleans among its numbers."""
    if isinstance(value, bool):
        raise ValueError("a number is needed, not a boolean")
    return value


Hex = Annotated[str, Field(pattern=f"^[0-9a-f]{{{2 * KEY_BYTES}}}$")]
NamespaceName = Annotated[str, Field(max_length=256, description="Of the node; empty: the default one.")]
InstanceName = Annotated[str, Field(min_length=1, max_length=128)]
TierName = Annotated[str, Field(min_length=1, max_length=64)]
Text = Annotated[str, Field(min_length=1, max_length=1024)]
ChunkSize = Annotated[int, Field(ge=MIN_CHUNK_SIZE, le=MAX_CHUNK_SIZE, strict=True)]
Token = Annotated[int, Field(ge=0, lt=1 << 32, strict=True)]
Instances = Annotated[
    list[InstanceName] | None,
    Field(max_length=_MAX_INSTANCES, description="Only these; null: all that it concerns."),
]


class LayoutModel(_Body):
    """As `kvstore.layout.KVLayout`."""

    num_layers: Annotated[int, Field(ge=1, le=1 << 20, strict=True)]
    num_kv_heads: Annotated[int, Field(ge=1, le=1 << 20, strict=True)]
    head_dim: Annotated[int, Field(ge=1, le=1 << 20, strict=True)]
    v_head_dim: Annotated[int, Field(ge=0, le=1 << 20, strict=True)] | None = None
    kind: Literal["kv", "mla"] = "kv"


class ContextModel(_Body):
    """As `kvstore.keys.KeyContext`: what besides the tokens decides a chunk's key."""

    model: Text
    layout: LayoutModel
    dtype: Text
    revision: str | None = Field(None, max_length=1024)
    namespace: Text = "default"
    cache_salt: str | None = Field(None, max_length=1024)
    lora: str | None = Field(None, max_length=1024)
    tp_rank: Annotated[int, Field(ge=0, lt=1 << 16, strict=True)] = 0
    tp_size: Annotated[int, Field(ge=1, le=1 << 16, strict=True)] = 1
    pp_rank: Annotated[int, Field(ge=0, lt=1 << 16, strict=True)] = 0
    pp_size: Annotated[int, Field(ge=1, le=1 << 16, strict=True)] = 1
    codec: Text = "raw"
    codec_profile: str | None = Field(None, max_length=1024)
    extra: list[tuple[Text, Annotated[str, Field(max_length=1024)]]] = Field([], max_length=64)

    def context(self) -> KeyContext:
        """Raises `ConfigError`: fields that do not go together, or an unknown dtype."""
        fields = self.model_dump()
        return KeyContext(**{**fields, "layout": KVLayout(**fields["layout"]), "extra": tuple(fields["extra"])})


class KeysOf(_Body):
    """Chunks by their keys."""

    keys: Annotated[list[Hex], Field(min_length=1, max_length=MAX_KEYS)]
    chunk_size: ChunkSize = DEFAULT_CHUNK_SIZE

    def prompt(self, contexts: Mapping[str, KeyContext]) -> Prompt:
        return Prompt([bytes.__new__(Key, binascii.unhexlify(key)) for key in self.keys], self.chunk_size)


class TokensOf(_Body):
    """The whole chunks of a prompt."""

    tokens: Annotated[list[Token], Field(min_length=1, max_length=MAX_TOKENS)]
    context: ContextModel | Text | None = Field(
        None,
        description="The fields of a KeyContext, or the name of one that the server has; null: its only one.",
    )
    chunk_size: ChunkSize = DEFAULT_CHUNK_SIZE

    def prompt(self, contexts: Mapping[str, KeyContext]) -> Prompt:
        """Raises `ConfigError`: a context that makes no sense, or of no name known here."""
        known = ", ".join(sorted(contexts)) or "none"
        if isinstance(self.context, ContextModel):
            context = self.context.context()
        elif self.context is not None:
            if self.context not in contexts:
                raise ConfigError(f"no context of the name {self.context[:80]!r} is configured here; known: {known}")
            context = contexts[self.context]
        elif len(contexts) == 1:
            (context,) = contexts.values()
        else:
            raise ConfigError(f"tokens need a context: its fields, or the name of one that is configured here: {known}")
        return Prompt(chunk_keys(self.tokens, context=context, chunk_size=self.chunk_size), self.chunk_size)


Chunks = KeysOf | TokensOf


class LookupRequest(_Body):
    namespace: NamespaceName = ""
    chunks: Chunks
    instances: Instances = None


class Pin(_Body):
    namespace: NamespaceName = ""
    chunks: Chunks
    ttl_s: Annotated[float, BeforeValidator(_number), Field(gt=0, le=30 * 86400)] = 3600.0
    instances: Instances = None


class Unpin(_Body):
    namespace: NamespaceName = ""
    chunks: Chunks
    instances: Instances = None


class All(_Body):
    """Everything in the namespace."""

    all: Literal[True]


class OfModel(_Body):
    """Records that name this model."""

    model: Text


class OfPrefix(_Body):
    """The chunks of a prompt, and what is known to hang on them."""

    prefix: Chunks


class OfChunks(_Body):
    """These chunks alone."""

    chunks: Chunks


class Clear(_Body):
    namespace: NamespaceName = ""
    what: All | OfModel | OfPrefix | OfChunks
    instances: Instances = None


class Source(_Body):
    tier: TierName
    instance: InstanceName | None = Field(None, description="null: all that have the records in this tier.")


class ToTier(_Body):
    """A tier of the same instance."""

    tier: TierName


class ToInstance(_Body):
    """Another instance: its name at a controller, host:port at a node."""

    instance: Annotated[str, Field(min_length=1, max_length=256)]


class Move(_Body):
    namespace: NamespaceName = ""
    chunks: Chunks
    src: Source
    dst: ToTier | ToInstance


class Transcode(_Body):
    namespace: NamespaceName = ""
    chunks: Chunks
    codec: Annotated[str, Field(min_length=1, max_length=64)]
    level: Annotated[int, Field(ge=-100, le=100, strict=True)] | None = None
    instances: Instances = None


class Decompress(_Body):
    namespace: NamespaceName = ""
    chunks: Chunks
    instances: Instances = None


class CheckFinish(_Body):
    event: Annotated[str, Field(min_length=1, max_length=_MAX_EVENT)]


class Candidate(_Body):
    instance: InstanceName
    queued_tokens: Annotated[float, BeforeValidator(_number), Field(ge=0, le=1e12)] | None = Field(
        None, description="Tokens that wait to be prefilled there; null: estimated from the load of the node."
    )


class RouteRequest(_Body):
    namespace: NamespaceName = ""
    chunks: Chunks
    candidates: Annotated[list[Candidate], Field(min_length=1, max_length=_MAX_INSTANCES)] | None = Field(
        None, description="null: all instances that are ready."
    )


# What nodes tell a controller.

_Count = Annotated[int, Field(ge=0, le=_MAX_NUMBER, strict=True)]
_Short = Annotated[str, Field(max_length=1024)]
_Joined = Annotated[str, Field(max_length=4 * (MAX_KEYS * 2 * KEY_BYTES) // 3 + 4, pattern="^[A-Za-z0-9+/]*={0,2}$")]


class InfoModel(_Body):
    name: Annotated[str, Field(min_length=1, max_length=128, pattern="^[^/,@\\x00-\\x1f]+$")]
    address: _Short
    unix: _Short
    http: Annotated[str, Field(max_length=1024, pattern="^(https?://[^\\s@]+)?$")]
    version: _Short
    namespaces: Annotated[list[NamespaceName], Field(max_length=4096)]
    tiers: Annotated[list[TierName], Field(max_length=16)]
    started: Annotated[float, BeforeValidator(_number), Field(ge=0, le=1e12)]


class HealthModel(_Body):
    ok: Annotated[bool, Field(strict=True)]
    ready: Annotated[bool, Field(strict=True)]
    load: Annotated[float, BeforeValidator(_number), Field(ge=0, le=1e6)]
    problems: Annotated[list[_Short], Field(max_length=64)] = []


class UsageModel(_Body):
    namespace: NamespaceName
    name: TierName
    url: _Short
    used: _Count
    capacity: _Count
    records: Annotated[int, Field(ge=-1, le=_MAX_NUMBER, strict=True)]
    pinned: _Count = 0
    hits: _Count = 0
    evicted: _Count = 0


class EventModel(_Body):
    namespace: NamespaceName
    tier: TierName
    op: Literal["admit", "evict", "clear"]
    keys: _Joined = Field("", description="The 32-byte digests, joined, as base64.")


class SnapshotModel(_Body):
    id: Annotated[str, Field(min_length=1, max_length=64)]
    page: _Count
    last: Annotated[bool, Field(strict=True)]
    at: _Count = Field(description="Number of the last event before the snapshot was begun.")
    pages: Annotated[list[EventModel], Field(max_length=4096)]


class Report(_Body):
    """What came and went at an instance since its last report; or pages of all that it has."""

    instance: InfoModel
    epoch: Annotated[str, Field(min_length=1, max_length=64)]
    health: HealthModel
    usage: Annotated[list[UsageModel], Field(max_length=65536)] | None = Field(None, description="null: as before.")
    since: _Count = Field(description="Number of the last event before these.")
    next: _Count = Field(description="Number of the last event of which all is told by now.")
    events: Annotated[list[EventModel], Field(max_length=8192)] = []
    snapshot: SnapshotModel | None = None
