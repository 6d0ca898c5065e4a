"""What came of blending one prompt, and of storing documents."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from kvstore.telemetry.requests import RequestReport

if TYPE_CHECKING:
    import torch

    from kvstore.errors import KVStoreError

__all__ = ["BlendReport", "PrecomputeReport"]


class PrecomputeReport(NamedTuple):
    """What `Blender.precompute` did, in chunks (parts of the documents, and the fixed prefix).

    Attributes:
        chunks: how many there are.
        stored: computed and written now.
        existing: were in the store already, or came in by another writer.
        short: have fewer than `blend_min_tokens` tokens; they are not stored.
        failed: could not be written; they will be computed with every prompt.
        nbytes: bytes written.
        error: why the first of `failed` could not be written, or None.
    """

    chunks: int
    stored: int
    existing: int
    short: int
    failed: int
    nbytes: int
    error: KVStoreError | None = None


@dataclass
class BlendReport:
    """What came of blending one prompt. Times in seconds.

    Attributes:
        input_ids: the prompt, int64 `[1, tokens]` on the model's device.
        logits: of the next token, `[vocabulary]`.
        tokens: of the prompt.
        question: tokens from the beginning of the last part on.
        reused: tokens that came from the store, those of `exact` among them.
        exact: tokens that stand where they were computed, behind the same tokens.
        hits: chunks that were loaded.
        misses: parts (and the fixed prefix) that could have been stored, and of which nothing is; or that were lost.
        lost: chunks that were there at first, and failed or were late in some layer.
        left: chunks that were there and were not loaded: computing was faster, or they did not fit into memory.
        short: parts with fewer than `blend_min_tokens` tokens.
        restarts: how often computing began again, because chunks were lost.
        ratio: r, the share of reused tokens that was to be computed again.
        level: highest level of encoded records that was loaded; None: the store's `codec_level`.
        recomputed: of each layer, the share of reused tokens that was computed again.
        computed: of each layer, the share of all tokens that was computed.
        nbytes: raw bytes of what was loaded.
        bytes_per_s: speed of the link that the decision was made with; None: it was not known.
        expected_s: what the planner expected from then on; inf: nothing was known.
        lookup_s: to find out what is stored.
        load_s, wait_s, move_s: of each layer: in which it came, for which it was waited, to move K to its new
            position (`ChunkLoader`).
        compute_s: of each layer; on a device without waiting for it.
        total_s: all of it, restarts included: the time to the first token, but for choosing it.
    """

    input_ids: torch.Tensor
    logits: torch.Tensor
    tokens: int = 0
    question: int = 0
    reused: int = 0
    exact: int = 0
    hits: int = 0
    misses: int = 0
    lost: int = 0
    left: int = 0
    short: int = 0
    restarts: int = 0
    ratio: float = 0.0
    level: int | None = None
    recomputed: list[float] = field(default_factory=list)
    computed: list[float] = field(default_factory=list)
    nbytes: int = 0
    bytes_per_s: float | None = None
    expected_s: float = float("inf")
    lookup_s: float = 0.0
    load_s: list[float] = field(default_factory=list)
    wait_s: list[float] = field(default_factory=list)
    move_s: list[float] = field(default_factory=list)
    compute_s: list[float] = field(default_factory=list)
    total_s: float = 0.0

    @property
    def token_layers(self) -> float:
        """Share of a full prefill's tokens × layers that was computed, 0 to 1."""
        return sum(self.computed) / len(self.computed) if self.computed else 0.0

    def request(self, model: str) -> RequestReport:
        """What is told of it: metrics, a line of the event log, a span. Documents are the parts that could have been
        stored, and the fixed prefix; a document was had if it was found, whether loading it was faster or not."""
        found = self.hits + self.left
        return RequestReport(
            model=model,
            input_tokens=self.tokens,
            tokens_saved=round(self.tokens * (1.0 - self.token_layers)),
            ttft_s=self.total_s,
            doc_count=found + self.misses,
            doc_hits=found,
            hit_chunks=self.hits,
            cache_size_bytes=self.nbytes,
        )

    def __str__(self) -> str:
        return (
            f"{self.tokens} tokens: {self.reused} reused ({self.hits} chunks, {self.misses} missing, {self.lost} lost, "
            f"{self.left} left), r={self.ratio:.3g}, {self.token_layers:.1%} of a prefill computed, "
            f"loading {sum(self.load_s):.3f} s (waited {sum(self.wait_s):.3f} s), computing "
            f"{sum(self.compute_s):.3f} s, {self.total_s:.3f} s in all"
        )
