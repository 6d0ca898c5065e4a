"""What a chunk is called: token ids → chunks → chained content hash → fixed-width key.

    hash[-1]  = SHA-256(encode(["kvstore chunk", 1, chunk_size]))
    hash[i]   = SHA-256(hash[i-1] ‖ token count ‖ item count ‖ token ids ‖ items)
    context   = SHA-256(encode(["kvstore context", 1, name, value, name, value, …]))
    key[i]    = SHA-256(context ‖ hash[i])
    opaque    = SHA-256(encode(["kvstore opaque", 1, namespace, name]))
    content   = SHA-256(context ‖ SHA-256(SHA-256(encode(["kvstore content", 1])) ‖ prefix token count ‖
                token count ‖ prefix's token ids ‖ token ids))

Counts and token ids are u32 little-endian. `items` holds encode([identifier, offset relative to the chunk, length]) of
each multimodal item that overlaps the chunk, ordered by (offset, length, identifier). The context lists the fields of
`KeyContext` but `layout` in their order, `codec_profile` and `extra` last; then the names `layout.num_layers`,
`layout.num_kv_heads`, `layout.head_dim`, `layout.v_head_dim`, `layout.kind`; then their five values. encode() writes
None as `n`, an integer as `i<length>:<decimal>`, text as `s<length>:<UTF-8>`, bytes as `b<length>:<bytes>` and a list
as `l<count>:` and its parts, lengths in bytes.

Equal hash means equal prefix; of a content key, equal content behind an equal fixed prefix, wherever it stands in a
prompt (`kvstore.blend`). The context covers every other field that changes the bytes (`KeyContext`).
Everything is the same in every process and on every machine; nothing uses Python's `hash()`. 256 bits of a
cryptographic hash: prefixes of different tenants cannot be made to collide (compare CVE-2025-25183).
"""

from __future__ import annotations

import array
import hashlib
import operator
import reprlib
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, NamedTuple

from .errors import ConfigError
from .layout import KVLayout, canonical_dtype

if TYPE_CHECKING:
    import numpy as np

__all__ = [
    "DEFAULT_CHUNK_SIZE",
    "KEY_BYTES",
    "Key",
    "KeyContext",
    "MultimodalItem",
    "chunk_hashes",
    "chunk_keys",
    "content_key",
    "keys_of",
    "opaque_key",
]

KEY_BYTES = 32
DEFAULT_CHUNK_SIZE = 256
MIN_CHUNK_SIZE, MAX_CHUNK_SIZE = 8, 2048
HASH_VERSION = 1

_MAX_TOKEN = (1 << 32) - 1
_BLOCK_TOKENS = 1 << 14  # tokens converted at a time, so that the block stays in the L2 cache
_COUNTS = struct.Struct("<II")
_LENGTHS = struct.Struct("<QQ")


class Key(bytes):
    """Name of a stored record: 32 bytes, nothing else. Compares, hashes and sorts as `bytes`.

    Raises:
        ConfigError: not 32 bytes.
    """

    __slots__ = ()

    def __new__(cls, digest: bytes) -> Key:
        if not isinstance(digest, bytes | bytearray | memoryview):
            raise ConfigError(f"a key is made of bytes, not of {type(digest).__name__}")
        key = bytes.__new__(cls, digest)
        if len(key) != KEY_BYTES:
            raise ConfigError(f"a key has {KEY_BYTES} bytes, not {len(key)}")
        return key

    @classmethod
    def from_hex(cls, text: str) -> Key:
        """The key written as 64 hex digits. Raises `ConfigError` for anything else."""
        if isinstance(text, str) and len(text) == 2 * KEY_BYTES:
            try:
                return cls(bytes.fromhex(text))
            except ValueError:
                pass
        raise ConfigError(f"{reprlib.repr(text)} is not a key: {2 * KEY_BYTES} hex digits")

    def __repr__(self) -> str:
        return f"Key({self.hex()})"


class MultimodalItem(NamedTuple):
    """An image, audio clip, … whose embedding stands at placeholder tokens.

    Attributes:
        identifier: content hash or other identity of the item.
        offset: index of its first placeholder token in the prompt.
        length: number of placeholder tokens.
    """

    identifier: str
    offset: int
    length: int = 1


@dataclass(frozen=True)
class KeyContext:
    """Everything besides the tokens that changes the bytes of a chunk's KV, and whose it is.

    Changing any field changes every key. `None` and `""` differ.

    Attributes:
        model: name of the model ("org/name").
        layout: shape of the KV cache of this shard.
        dtype: dtype of the KV cache, as in `kvstore.layout.DTYPES`.
        revision: version of the weights, including whatever was changed at load (rotary scaling, quantisation).
        namespace: tenant boundary; nothing crosses it.
        cache_salt: a request's own isolation inside the namespace; not stored anywhere.
        lora: identity and version of the adapter, or None.
        tp_rank, tp_size, pp_rank, pp_size: the shard.
        codec: name of the codec of the stored segments; its level is not part of the key.
        codec_profile: id of the codec's profile, or None.
        extra: further (name, value) pairs of text of an integration, in any order.

    Raises:
        ConfigError: a field has the wrong type or an impossible value; names the field.
    """

    model: str
    layout: KVLayout
    dtype: str
    revision: str | None = None
    namespace: str = "default"
    cache_salt: str | None = None
    lora: str | None = None
    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    codec: str = "raw"
    codec_profile: str | None = None
    extra: tuple[tuple[str, str], ...] = ()
    digest: bytes = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", canonical_dtype(self.dtype))
        # No str() here: it would make None and "None", or 1 and "1", the same key.
        if not isinstance(self.extra, tuple | list) or not all(map(_is_text_pair, self.extra)):
            raise ConfigError(
                f"key context: extra must be a tuple of (name, value) pairs of text, not {reprlib.repr(self.extra)}"
            )
        object.__setattr__(self, "extra", tuple(sorted(map(tuple, self.extra))))
        if not isinstance(self.layout, KVLayout):
            raise ConfigError(f"key context: layout must be a KVLayout, not {type(self.layout).__name__}")
        for name in ("model", "namespace", "codec"):
            value = getattr(self, name)
            if not isinstance(value, str) or not value:
                raise ConfigError(f"key context: {name} must be non-empty text, not {value!r}")
        for name in ("revision", "cache_salt", "lora", "codec_profile"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                raise ConfigError(f"key context: {name} must be text or None, not {type(value).__name__}")
        for rank, size in (("tp_rank", "tp_size"), ("pp_rank", "pp_size")):
            for name in (rank, size):
                value = getattr(self, name)
                if not isinstance(value, int) or isinstance(value, bool):
                    raise ConfigError(f"key context: {name} must be an integer, not {value!r}")
            if not 0 <= getattr(self, rank) < getattr(self, size):
                raise ConfigError(
                    f"key context: {rank}={getattr(self, rank)} is not in 0..{size}-1 ({size}={getattr(self, size)})"
                )
        parts: list[Any] = ["kvstore context", HASH_VERSION]
        for f in fields(self):
            if f.name not in ("digest", "layout"):
                parts += [f.name, getattr(self, f.name)]
        parts += [f"layout.{f.name}" for f in fields(KVLayout)]
        parts += [getattr(self.layout, f.name) for f in fields(KVLayout)]
        object.__setattr__(self, "digest", hashlib.sha256(_encode(parts)).digest())

    def __repr__(self) -> str:
        shown = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "digest"}
        if shown["cache_salt"] is not None:
            shown["cache_salt"] = "…"
        return f"KeyContext({', '.join(f'{name}={value!r}' for name, value in shown.items())})"


def _is_text_pair(pair: object) -> bool:
    return isinstance(pair, tuple | list) and len(pair) == 2 and all(isinstance(part, str) for part in pair)


def _encode(value: object) -> bytes:
    """An injective encoding: type tag, length, content. No two values, and no two lists of values, encode alike."""
    if value is None:
        return b"n"
    if isinstance(value, bool):
        raise TypeError("no booleans in a key")
    if isinstance(value, int):
        text = str(value).encode()
        return b"i%d:%s" % (len(text), text)
    if isinstance(value, str):
        text = value.encode("utf-8", "surrogatepass")
        return b"s%d:%s" % (len(text), text)
    if isinstance(value, bytes):
        return b"b%d:%s" % (len(value), value)
    if isinstance(value, list | tuple):
        return b"l%d:%s" % (len(value), b"".join(map(_encode, value)))
    raise TypeError(f"cannot encode {type(value).__name__} into a key")


def _u32_blocks(token_ids: Sequence[int] | np.ndarray[Any, Any] | Any, chunk_size: int) -> Iterator[memoryview]:
    """Token ids as little-endian u32 bytes, in blocks of whole chunks (the last one may end anywhere).

    A block is valid until the next is asked for: wide arrays are converted into one scratch block that stays in
    the L2 cache.
    """
    import numpy as np

    if hasattr(token_ids, "detach"):  # a torch tensor, without importing torch
        tensor: Any = token_ids
        try:
            token_ids = tensor.detach().cpu().numpy()
        except (TypeError, RuntimeError) as error:  # no numpy twin (bfloat16), no data (meta), not dense
            raise ConfigError(f"token ids must be a dense tensor of integers, not {tensor.dtype}") from error
    shape = getattr(token_ids, "shape", None)
    if shape is None:
        values = _checked_list(token_ids)
        try:
            packed = array.array("I", values)
        except (OverflowError, TypeError):
            raise _bad_token(values) from None
        tokens = np.frombuffer(packed, dtype=np.uint32)
        # array.array takes True for 1. Only tokens 0 and 1 can be disguised booleans, and they are rare.
        if any(_is_bool(values[index]) for index in np.flatnonzero(tokens <= 1).tolist()):
            raise _bad_token(values)
    else:
        tokens = np.asarray(token_ids)
        if len(shape) != 1:
            raise ConfigError(
                f"token ids must be one-dimensional, not of shape {tuple(shape)}; pass one sequence at a time"
            )
        if tokens.dtype.kind not in "iu":
            raise ConfigError(f"token ids must be integers, not {tokens.dtype}")
    if tokens.dtype == np.dtype("<u4") and tokens.flags.c_contiguous:
        yield tokens.data.cast("B")
        return
    step = max(1, _BLOCK_TOKENS // chunk_size) * chunk_size
    scratch = np.empty(min(step, len(tokens)), dtype="<u4")
    for start in range(0, len(tokens), step):
        block = tokens[start : start + step]
        # One OR over the block finds a value outside 0..2^32-1: a negative number has its upper bits set.
        if not 0 <= int(np.bitwise_or.reduce(block)) <= _MAX_TOKEN:
            raise _bad_token(block.tolist())
        scratch[: len(block)] = block
        yield scratch[: len(block)].data.cast("B")


def _checked_list(token_ids: Any) -> Sequence[Any]:
    """Anything iterable as a list, but what only looks like a sequence of token ids."""
    if isinstance(token_ids, list | tuple):
        return token_ids
    if not isinstance(token_ids, str | bytes | bytearray | set | frozenset | Mapping):
        try:
            return list(token_ids)
        except TypeError:
            pass
    raise ConfigError(f"token ids must be a flat sequence of integers, not {type(token_ids).__name__}")


def _is_bool(value: object) -> bool:
    return isinstance(value, bool) or str(getattr(value, "dtype", "")).endswith("bool")


def _bad_token(values: Iterable[Any]) -> ConfigError:
    for index, value in enumerate(values):
        try:
            number = -1 if _is_bool(value) else operator.index(value)
        except TypeError:
            number = -1
        if not 0 <= number <= _MAX_TOKEN:
            return ConfigError(
                f"token id {reprlib.repr(value)} at index {index} is not an integer between 0 and 2^32-1"
            )
    return ConfigError("token ids must be a flat sequence of integers between 0 and 2^32-1")


def chunk_hashes(
    token_ids: Sequence[int] | np.ndarray[Any, Any] | Any,
    *,
    chunk_size: int = DEFAULT_CHUNK_SIZE,
    save_unfull_chunk: bool = False,
    multimodal: Sequence[MultimodalItem | tuple[str, int] | tuple[str, int, int]] = (),
) -> list[bytes]:
    """Chained content hashes (32 bytes each) of a prompt's chunks, in order.

    Args:
        token_ids: one prompt; list, tuple, or one-dimensional numpy or torch integers. All give the same result.
        chunk_size: tokens per chunk, 8 to 2048.
        save_unfull_chunk: also hash a last, partial chunk. It is found only as itself: its hash covers its length.
        multimodal: items whose content the tokens do not show, in any order. An item enters every chunk that it
            overlaps, so the chunks before it keep their hash. It may end behind the prompt, but not begin there.

    Raises:
        ConfigError: a bad token id, chunk size or item.
    """
    if not isinstance(chunk_size, int) or not MIN_CHUNK_SIZE <= chunk_size <= MAX_CHUNK_SIZE:
        raise ConfigError(f"chunk_size={chunk_size!r} must be an integer between {MIN_CHUNK_SIZE} and {MAX_CHUNK_SIZE}")
    sha256 = hashlib.sha256
    parent = sha256(_encode(["kvstore chunk", HASH_VERSION, chunk_size])).digest()
    items = _checked_items(multimodal)
    window = _Window(items)
    counts = _COUNTS.pack(chunk_size, 0)
    step, position, hashes = 4 * chunk_size, 0, []
    for data in _u32_blocks(token_ids, chunk_size):
        full = len(data) - len(data) % step
        for start in range(0, full, step):
            tokens = data[start : start + step]
            if items:
                parent = sha256(_chunk_input(parent, tokens, position + start // 4, window)).digest()
            else:  # what `_chunk_input` gives without items, without its overhead
                parent = sha256(b"".join((parent, counts, tokens))).digest()
            hashes.append(parent)
        position += full // 4
        if full < len(data):
            if save_unfull_chunk:
                hashes.append(sha256(_chunk_input(parent, data[full:], position, window)).digest())
            position += (len(data) - full) // 4
    if items and items[-1].offset >= position:
        raise ConfigError(f"multimodal item {items[-1]!r} begins behind the prompt of {position} tokens")
    return hashes


class _Window:
    """The items that overlap a chunk, for chunks asked for in order. Linear in items and chunks together."""

    def __init__(self, items: Sequence[MultimodalItem]) -> None:
        self._items = items
        self._next = 0
        self._open: list[MultimodalItem] = []

    def overlapping(self, start: int, end: int) -> list[MultimodalItem]:
        """Items that have a token in `start..end-1`, in order."""
        while self._next < len(self._items) and self._items[self._next].offset < end:
            self._open.append(self._items[self._next])
            self._next += 1
        self._open = [item for item in self._open if item.offset + item.length > start]
        return self._open


def _chunk_input(parent: bytes, tokens: memoryview, start: int, window: _Window) -> bytes:
    """What is hashed for one chunk that begins at token `start`."""
    count = len(tokens) // 4
    inside = [_encode([i.identifier, i.offset - start, i.length]) for i in window.overlapping(start, start + count)]
    return b"".join((parent, _COUNTS.pack(count, len(inside)), tokens, *inside))


def _checked_items(items: Iterable[Any]) -> list[MultimodalItem]:
    checked = []
    for raw in items:
        if not isinstance(raw, tuple | list) or not 2 <= len(raw) <= 3:
            raise ConfigError(f"multimodal item {reprlib.repr(raw)} must be (identifier, offset, length)")
        item = MultimodalItem(*raw)
        if not isinstance(item.identifier, str) or not item.identifier:
            raise ConfigError(f"multimodal item {reprlib.repr(raw)}: the identifier must be non-empty text")
        try:
            if _is_bool(item.offset) or _is_bool(item.length):
                raise TypeError
            item = MultimodalItem(item.identifier, operator.index(item.offset), operator.index(item.length))
        except TypeError:
            raise ConfigError(f"multimodal item {reprlib.repr(raw)}: offset and length must be integers") from None
        if item.offset < 0 or item.length < 1:
            raise ConfigError(f"multimodal item {reprlib.repr(raw)}: offset must be ≥ 0 and length ≥ 1")
        checked.append(item)
    return sorted(checked, key=lambda item: (item.offset, item.length, item.identifier))


def chunk_keys(
    token_ids: Sequence[int] | np.ndarray[Any, Any] | Any,
    *,
    context: KeyContext,
    chunk_size: int = DEFAULT_CHUNK_SIZE,
    save_unfull_chunk: bool = False,
    multimodal: Sequence[MultimodalItem | tuple[str, int] | tuple[str, int, int]] = (),
) -> list[Key]:
    """Keys of a prompt's chunks, in order. A prompt shorter than a chunk has none (unless `save_unfull_chunk`).

    See `chunk_hashes` for the arguments and errors. Cost: about 10 ns per token, most of it SHA-256.
    """
    hashes = chunk_hashes(token_ids, chunk_size=chunk_size, save_unfull_chunk=save_unfull_chunk, multimodal=multimodal)
    return keys_of(hashes, context=context)


def keys_of(hashes: Sequence[bytes], *, context: KeyContext) -> list[Key]:
    """What `chunk_keys` makes of chunks whose hashes are known, of `chunk_hashes`: one hash for several contexts."""
    sha256, digest, new = hashlib.sha256, context.digest, bytes.__new__  # `Key.__new__` would check what is known
    return [new(Key, sha256(digest + chunk_hash).digest()) for chunk_hash in hashes]


def content_key(
    token_ids: Sequence[int] | np.ndarray[Any, Any] | Any,
    *,
    context: KeyContext,
    prefix: Sequence[int] | np.ndarray[Any, Any] | Any = (),
) -> Key:
    """The key of a chunk of any length that is found by its content alone, wherever it stands in a prompt. It equals no
    key of `chunk_keys`.

    Args:
        token_ids: the chunk's tokens, at least one; types as in `chunk_hashes`.
        context: as for `chunk_keys`; what else the bytes depend on (the rotary parameters) belongs into its `extra`.
        prefix: tokens that stood before the chunk, from position 0 on, when its KV was computed.

    Raises:
        ConfigError: a bad token id, or no tokens.
    """
    parts = [b"".join(map(bytes, _u32_blocks(tokens, DEFAULT_CHUNK_SIZE))) for tokens in (prefix, token_ids)]
    if not parts[1]:
        raise ConfigError("a chunk that is found by its content needs at least one token")
    seed = hashlib.sha256(_encode(["kvstore content", HASH_VERSION])).digest()
    lengths = _LENGTHS.pack(len(parts[0]) // 4, len(parts[1]) // 4)
    content = hashlib.sha256(b"".join((seed, lengths, *parts))).digest()
    return Key(hashlib.sha256(context.digest + content).digest())


def opaque_key(name: str | bytes, *, namespace: str = "default") -> Key:
    """The key of an opaque record: for callers that hand over a key string and bytes. Injective in both arguments."""
    if not isinstance(name, str | bytes) or not name:
        raise ConfigError(f"the name of an opaque record must be non-empty text or bytes, not {reprlib.repr(name)}")
    if not isinstance(namespace, str) or not namespace:
        raise ConfigError(f"the namespace must be non-empty text, not {reprlib.repr(namespace)}")
    return Key(hashlib.sha256(_encode(["kvstore opaque", HASH_VERSION, namespace, name])).digest())
