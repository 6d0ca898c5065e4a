"""Dropping tokens: keep of a chunk only the tokens that attention looks at (H2O, arXiv 2306.14048, adapted to records).

A reduced chunk holds the KV of some tokens of its range, in every layer the same ones, in their order. Which ones is
kept in the record's meta: `tokens: [begin, end]` is the range as it was, and `positions` has one bit per token of it.
K stays rotated to the positions that the tokens had, so attention with the kept tokens goes on from the next position
of the prompt, not from the number of tokens kept. A record of a reduced chunk is smaller in proportion, and any codec
works on it as on another one.

    keep = choose_tokens(scores, budget=0.4)               # positions in the chunk
    context = store.key_context(..., extra=(dropped_extra(budget=0.4),))
    item = reduced_item(key, raw, layout, dtype, keep, begin=begin, end=end, rope="applied")
    ...
    head, = store.submit_heads([key]).result()
    positions = kept_positions(head)                       # then Want(key, dst, kv_spec(layout, dtype, len(positions)))

A reader who wants full caches never meets a reduced one: `dropped_extra` goes into the key context, so their keys
differ. What is dropped is gone; whether that does harm depends on the text, so it is never done by itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from .errors import ConfigError, CorruptRecord
from .layout import KVLayout, dtype_itemsize
from .record import Header, kv_spec
from .targets import Item, flat_bytes

if TYPE_CHECKING:
    from .keys import Key

__all__ = [
    "choose_tokens",
    "dropped_extra",
    "gather_tokens",
    "kept_positions",
    "pack_positions",
    "reduced_item",
    "unpack_positions",
]

Positions = npt.NDArray[np.int32]

_RECENT_SHARE = 0.5  # of the budget, as in the paper: half heavy hitters, half the most recent
_SINKS = 4  # the first tokens of a prompt draw attention whatever they are (arXiv 2309.17453)
_MAX_RANGE = 1 << 19  # tokens; a bit for each fits into the meta block


def choose_tokens(
    scores: npt.NDArray[Any],
    *,
    budget: float | int,
    begin: int = 0,
    recent: int | None = None,
    sinks: int = _SINKS,
) -> Positions:
    """Which tokens of a chunk to keep: sinks, the most recent, and of the others those that got most attention.

    Args:
        scores: accumulated attention that each token of the chunk received, `[tokens]`, or `[..., tokens]` of which
            all leading axes (layers, heads, queries) are summed. Not negative, finite.
        budget: how many tokens to keep: a number, or a fraction of the chunk (0 < budget <= 1.0, a float).
        begin: position of the chunk's first token in the prompt; sinks are the first tokens of the prompt.
        recent: how many of the last tokens are kept in any case; None: half of the budget.
        sinks: how many of the first tokens of the prompt are.

    Returns:
        int32 `[kept]`, ascending indices into the chunk. Of equal scores the earlier token is kept.

    Raises:
        ConfigError: scores or numbers that make no sense.
    """
    values = np.asarray(scores, np.float64)
    if values.ndim == 0 or not values.shape[-1]:
        raise ConfigError(f"attention scores have the shape [..., tokens], not {list(values.shape)}")
    total = values.reshape(-1, values.shape[-1]).sum(axis=0)
    if not np.isfinite(total).all() or (total < 0).any():
        raise ConfigError("attention scores must be finite and not negative")
    tokens = len(total)
    kept = _budget(budget, tokens)
    last = round(kept * _RECENT_SHARE) if recent is None else recent
    if begin < 0 or last < 0 or sinks < 0:
        raise ConfigError(f"begin={begin}, recent={last} and sinks={sinks} must not be negative")
    chosen = np.zeros(tokens, bool)
    chosen[: min(max(sinks - begin, 0), kept)] = True
    chosen[tokens - min(last, tokens, kept - int(chosen.sum())) :] = True
    left = kept - int(chosen.sum())
    if left > 0:
        order = np.lexsort((np.arange(tokens), -total))
        chosen[order[~chosen[order]][:left]] = True
    return np.flatnonzero(chosen).astype(np.int32)


def _budget(budget: float | int, tokens: int) -> int:
    if isinstance(budget, bool) or not isinstance(budget, int | float) or not math.isfinite(budget) or budget <= 0:
        raise ConfigError(f"budget={budget!r} must be a number of tokens, or a fraction of them up to 1.0")
    if isinstance(budget, float):
        if budget > 1:
            raise ConfigError(f"budget={budget!r} is a fraction, at most 1.0; give a number of tokens as an integer")
        return max(1, round(budget * tokens))
    return min(budget, tokens)


def dropped_extra(*, budget: float | int, recent: int | None = None, sinks: int = _SINKS) -> tuple[str, str]:
    """What goes into `KeyContext.extra` for chunks reduced this way, so that nobody else finds them."""
    return ("dropped", f"h2o;budget={budget!r};recent={'half' if recent is None else recent};sinks={sinks}")


def pack_positions(kept: npt.NDArray[np.integer[Any]] | Sequence[int], tokens: int) -> bytes:
    """Kept tokens as the meta name `positions`: one bit per token of the range, lowest first in each byte.

    Args:
        kept: ascending indices into the range.
        tokens: length of the range.

    Raises:
        ConfigError: they are not ascending, none, or outside the range; or the range is longer than 2^19 tokens.
    """
    indices = np.asarray(kept)
    if not 0 < tokens <= _MAX_RANGE:
        raise ConfigError(f"a range of {tokens} tokens cannot be reduced; it may have 1 to {_MAX_RANGE}")
    if indices.ndim != 1 or not len(indices) or indices.dtype.kind not in "iu":
        raise ConfigError("kept tokens are a list of at least one index into the chunk")
    if indices[0] < 0 or indices[-1] >= tokens or (np.diff(indices.astype(np.int64)) <= 0).any():
        raise ConfigError(f"kept tokens must ascend and lie in 0..{tokens - 1}")
    bits = np.zeros(tokens, np.uint8)
    bits[indices] = 1
    return np.packbits(bits, bitorder="little").tobytes()


def unpack_positions(packed: object, begin: int, end: int) -> Positions:
    """The absolute positions of the tokens that a record holds, int32 `[kept]`.

    Args:
        packed: the meta name `positions`; begin, end: the meta name `tokens`.

    Raises:
        ConfigError: it is not such a map of these tokens.
    """
    tokens = end - begin
    if not isinstance(packed, bytes) or not 0 < tokens <= _MAX_RANGE or len(packed) != -(-tokens // 8):
        raise ConfigError(f"meta positions must be bytes with one bit for each of {tokens} tokens")
    bits = np.unpackbits(np.frombuffer(packed, np.uint8), bitorder="little")
    if not bits.any() or bits[tokens:].any():
        raise ConfigError(f"meta positions names no token, or one beyond the {tokens} of its range")
    return (np.flatnonzero(bits) + begin).astype(np.int32)


def kept_positions(header: Header | None) -> Positions | None:
    """The absolute positions of the tokens that a stored chunk holds, int32 `[kept]`; None if none were dropped.

    Args:
        header: of the record (`Store.submit_heads`). None, which stands there for a miss, is refused.

    Raises:
        ConfigError: there is no header.
        CorruptRecord: its meta does not say so clearly.
    """
    if header is None:
        raise ConfigError("there is no header: submit_heads gives None where no record was found; ask for that before")
    meta = header.meta()
    if "positions" not in meta:
        return None
    span = meta.get("tokens")
    try:
        if not (isinstance(span, list) and len(span) == 2 and all(type(n) is int and 0 <= n < 1 << 31 for n in span)):
            raise ConfigError("meta tokens is not [begin, end]")
        return unpack_positions(meta["positions"], *span)
    except ConfigError as error:
        raise CorruptRecord(error.message, key=header.key, cause=error) from error


def gather_tokens(
    segment: memoryview, layout: KVLayout, dtype: str, tokens: int, kept: npt.NDArray[np.integer[Any]]
) -> npt.NDArray[np.uint8]:
    """The rows of some tokens of one layer segment (K, then V), as a layer segment of that many tokens.

    Args:
        segment: flat bytes of `tokens` tokens.
        kept: ascending indices into them.

    Returns:
        uint8 `[layout.segment_bytes(len(kept), dtype)]`; each byte copied once.

    Raises:
        ConfigError: the segment is not that long, or an index is outside.
    """
    if len(segment) != layout.segment_bytes(tokens, dtype):
        need = layout.segment_bytes(tokens, dtype)
        raise ConfigError(f"a segment of {tokens} tokens has {need} bytes in this layout, not {len(segment)}")
    indices = np.asarray(kept)
    if not len(indices) or int(indices.min()) < 0 or int(indices.max()) >= tokens:
        raise ConfigError(f"kept tokens must lie in 0..{tokens - 1}")
    split = layout.key_bytes(tokens, dtype)
    flat: npt.NDArray[np.uint8] = np.frombuffer(segment, np.uint8)
    out = np.empty(layout.segment_bytes(len(indices), dtype), np.uint8)
    at = layout.key_bytes(len(indices), dtype)
    row = layout.num_kv_heads * dtype_itemsize(dtype)
    np.take(flat[:split].reshape(tokens, row * layout.head_dim), indices, axis=0,
            out=out[:at].reshape(len(indices), -1), mode="clip")  # fmt: skip
    if layout.v_head_dim:
        np.take(flat[split:].reshape(tokens, row * layout.v_head_dim), indices, axis=0,
                out=out[at:].reshape(len(indices), -1), mode="clip")  # fmt: skip
    return out


def reduced_item(
    key: Key,
    segments: Sequence[Any],
    layout: KVLayout,
    dtype: str,
    kept: npt.NDArray[np.integer[Any]] | Sequence[int],
    *,
    begin: int,
    end: int,
    rope: str | None = None,
    meta: Mapping[str, Any] | None = None,
    parent: Key | None = None,
) -> Item:
    """The record of a chunk of which only some tokens are kept, to be given to `Store.submit_put`.

    Args:
        key: of a context that says so (`dropped_extra`).
        segments: the full chunk: one contiguous buffer per layer.
        kept: ascending indices into the chunk (`choose_tokens`).
        begin, end: the positions of the full chunk in the prompt.
        rope: how K is stored: "applied", after the rotary embedding (as attention leaves it in a cache), or "none",
            before it. None leaves it unsaid; the codec kvt refuses such a record, no other codec asks.
        meta: further meta; `tokens`, `positions` and, where it is given, `rope` are set here.

    Raises:
        ConfigError: the segments are not those of such a chunk; `rope` is neither, or `meta` says something else.
    """
    if rope not in (None, "applied", "none"):
        raise ConfigError(f"rope={rope!r} is not known; use 'applied', or 'none' for K before the rotation")
    said = dict(meta or {})
    if rope is not None and said.setdefault("rope", rope) != rope:
        raise ConfigError(f"rope={rope!r} is given, and meta says rope={said['rope']!r}; give one")
    if len(segments) != layout.num_layers:
        raise ConfigError(f"{len(segments)} segments were given for {layout.num_layers} layers")
    indices = np.asarray(kept)
    packed = pack_positions(indices, end - begin)
    views = [
        gather_tokens(flat_bytes(segment, writable=False), layout, dtype, end - begin, indices).data
        for segment in segments
    ]
    spec = kv_spec(layout, dtype, len(indices))
    return Item(key, views, spec, {**said, "tokens": [begin, end], "positions": packed}, parent)
