"""What the jobs of a node do with records: clear, move and transcode, batch by batch."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice

from kvstore.backend import Backend, Outcome, Write
from kvstore.codec import codec_by_number
from kvstore.codec.base import Codec, SegmentInfo
from kvstore.config import load_config
from kvstore.errors import CorruptRecord, KVStoreError, PermanentError
from kvstore.keys import Key
from kvstore.layout import dtype_itemsize
from kvstore.record import Header, RecordSpec, build_record, checksum, parse_header
from kvstore.registry import Given, open_backend

from ._node_hands import BATCH_BYTES, CALL_S, Hands, Held
from ._node_jobs import Progress
from ._node_tiers import MEMORY

__all__ = ["clear_keys", "clear_model", "clear_namespace", "hanging_on", "move", "open_node", "put_to", "transcode"]

_BATCH = 64
_SETTLE_S = 5.0  # for what must first be written below

Pinned = Callable[[Sequence[Key]], set[Key]]
"""Which of these keys are pinned."""


def _batches(keys: Iterable[Key], most: int = _BATCH) -> Iterator[list[Key]]:
    todo = iter(keys)
    while batch := [*islice(todo, most)]:
        yield batch


# Clearing.


def hanging_on(links: Sequence[tuple[Key, Key]], keys: Sequence[Key]) -> list[Key]:
    """The records whose prefix goes through one of `keys`, nearest first, by (record, parent)."""
    children: dict[Key, list[Key]] = {}
    for key, parent in links:
        children.setdefault(parent, []).append(key)
    found: dict[Key, None] = {}
    todo = [*keys]
    while todo:
        todo = [child for key in todo for child in children.get(key, ()) if child not in found]
        found.update(dict.fromkeys(todo))
    return [*found]


def clear_keys(hands: Hands, keys: Sequence[Key], progress: Progress) -> None:
    """Remove these records from all tiers."""
    keys = [*dict.fromkeys(keys)]
    progress.total(len(keys))
    for batch in _batches(keys, 1024):
        _clear(hands, batch, progress)


def _clear(hands: Hands, keys: Sequence[Key], progress: Progress) -> None:
    deadline = time.monotonic() + CALL_S
    freed = sum(size for size in hands.in_memory(keys) if size > 0)
    outcomes = hands.remove_all(keys, deadline)
    failed = [outcome.error for outcome in outcomes if outcome.error is not None]
    removed = sum(outcome.ok for outcome in outcomes)
    progress.add(
        removed + len(failed), failed=len(failed), nbytes=freed, error=failed[0].message if failed else ""
    )  # fmt: skip


def clear_namespace(hands: Hands, progress: Progress) -> None:
    """Remove all records of the namespace from all tiers."""
    for tier in hands.tiers:
        for page in hands.pages(tier):
            for batch in _batches([info.key for info in page], 1024):
                _clear(hands, batch, progress)


def clear_model(hands: Hands, model: str, progress: Progress) -> None:
    """Remove the records that name a model. Of what is not in memory the headers are read."""
    for tier in hands.tiers:
        for page in hands.pages(tier):
            for at in range(0, len(page), _BATCH):
                progress.check()
                some = page[at : at + _BATCH]
                headers = hands.headers(tier, some, time.monotonic() + CALL_S)
                theirs = [
                    info.key
                    for info, header in zip(some, headers, strict=True)
                    if header is not None and _model_of(header) == model
                ]
                if theirs:
                    _clear(hands, theirs, progress)


def _model_of(header: Header) -> object:
    try:
        return header.meta().get("model")
    except CorruptRecord:
        return None


# Moving.


def open_node(address: str, namespace: str, token: bytes) -> Backend:
    """The namespace of that name of another node. TLS, and what else is needed, comes from `KVSTORE_NODE_…`.

    Raises:
        ConfigError: the address makes no sense, or the node refuses us.
    """
    env = {name: value for name, value in os.environ.items() if name.startswith("KVSTORE_NODE_")}
    config = load_config(f"node://{address}", env=env)
    overrides = config.backend_overrides(config.remote_url[0])
    if namespace:
        overrides["namespace"] = Given(namespace, "of the namespace")
    if token and "token" not in overrides:
        overrides["token"] = Given(token.decode(errors="strict"), "of the namespace")
    return open_backend(config.remote_url[0], **overrides)


def move(
    hands: Hands, keys: Sequence[Key], src: str, put: Callable[[Sequence[Held], float], list[Outcome]],
    pinned: Pinned, progress: Progress,
) -> None:  # fmt: skip
    """Move records out of one tier: each leaves it once `put` has stored it."""
    keys = [*dict.fromkeys(keys)]
    progress.total(len(keys))
    for batch in _batches(keys):
        deadline = time.monotonic() + CALL_S
        stay = pinned(batch)
        if stay:
            progress.add(len(stay), failed=len(stay), error="it is pinned")
        for some in _by_bytes(hands, src, [key for key in batch if key not in stay], deadline):
            _move(hands, some, src, put, deadline, progress)


def put_to(node: Backend, records: Sequence[Held], deadline: float) -> list[Outcome]:
    """Store records elsewhere."""
    return node.put([Write(held.key, (held.view,)) for held in records], deadline=deadline)


def _by_bytes(hands: Hands, tier: str, keys: Sequence[Key], deadline: float) -> Iterator[list[Key]]:
    """In groups of at most about `BATCH_BYTES`; what is not there goes along."""
    group: list[Key] = []
    room = BATCH_BYTES
    for key, found in zip(keys, hands.stat(tier, keys, deadline) if keys else [], strict=True):
        nbytes = found.nbytes if found.ok else 0
        if group and nbytes > room:
            yield group
            group, room = [], BATCH_BYTES
        group.append(key)
        room -= nbytes
    if group:
        yield group


def _move(
    hands: Hands, keys: Sequence[Key], src: str, put: Callable[[Sequence[Held], float], list[Outcome]],
    deadline: float, progress: Progress,
) -> None:  # fmt: skip
    sizes: dict[Key, int] = {}
    with hands.whole(src, keys, deadline) as (found, failures):
        for held, outcome in zip(found, put(found, deadline) if found else [], strict=True):
            if outcome.stored:
                sizes[held.key] = len(held.view)
            else:
                failures[held.key] = "it was not taken" if outcome.error is None else outcome.error.message
        del found
    removed = hands.remove(src, [*sizes], deadline) if sizes else []
    busy = [key for key, outcome in zip(sizes, removed, strict=True) if outcome.error is not None]
    if busy and src == MEMORY and hands.space.below is not None:
        hands.space.below.backlog.settle(_SETTLE_S)
        removed = hands.remove(src, busy, deadline)
        busy = [key for key, outcome in zip(busy, removed, strict=True) if outcome.error is not None]
    failures.update((key, "it is there, but could not be removed here") for key in busy)
    progress.add(
        len(keys), failed=len(failures), nbytes=sum(sizes[key] for key in sizes if key not in failures),
        error=next(iter(failures.values()), ""),
    )  # fmt: skip


# Transcoding.


def transcode(hands: Hands, keys: Sequence[Key], codec: Codec, progress: Progress) -> None:
    """Encode stored records anew. Each is verified, encoded, proven by decoding it again, and takes the place of the
    old one in all tiers; it comes into memory for that. What cannot be encoded or stored stays as it was."""
    keys = [*dict.fromkeys(keys)]
    progress.total(len(keys))
    for batch in _batches(keys):
        deadline = time.monotonic() + CALL_S
        left = [*batch]
        for tier in hands.tiers:
            there = {
                key
                for key, found in zip(left, hands.stat(tier, left, deadline) if left else [], strict=True)
                if found.ok
            }
            for some in _by_bytes(hands, tier, [key for key in left if key in there], deadline):
                _transcode(hands, some, tier, codec, deadline, progress)
            left = [key for key in left if key not in there]
        if left:
            progress.add(len(left), failed=len(left), error="it is not here")


def _transcode(
    hands: Hands, keys: Sequence[Key], tier: str, codec: Codec, deadline: float, progress: Progress
) -> None:  # fmt: skip
    failures: dict[Key, str] = {}
    held: Held | None = None
    anew: list[tuple[Held, memoryview]] = []
    with hands.whole(tier, keys, deadline) as (found, missing):
        failures.update(missing)
        for held in found:
            try:
                views = _encoded(held, codec)
            except KVStoreError as error:
                failures[held.key] = error.message
                continue
            if views is not None:
                anew.append((held, memoryview(b"".join(views))))
        failures.update(hands.replace(anew, deadline))
        saved = sum(len(held.view) - len(data) for held, data in anew if held.key not in failures)
        del found, anew, held
    progress.add(len(keys), failed=len(failures), nbytes=saved, error=next(iter(failures.values()), ""))


def _encoded(held: Held, codec: Codec) -> list[memoryview] | None:
    """The record anew, as views; None if it is encoded so already. Raises `CorruptRecord`, or `PermanentError` for what
    a lossy codec encoded."""
    header = parse_header(held.view, key=held.key, nbytes=len(held.view))
    meta = header.meta()
    sizes = [segment.raw_length for segment in header.segments[: header.layers]]
    dtype = meta.get("dtype")
    about = SegmentInfo(dtype_itemsize(dtype) if isinstance(dtype, str) else 1)
    segments: list[memoryview] = []
    numbers: list[int] = []
    for layer, parts in enumerate(header.parts(0, header.layers)):
        views = [held.view[part.offset : part.offset + part.length] for part in parts]
        for view, part in zip(views, parts, strict=True):
            if checksum(view) != part.checksum:
                raise CorruptRecord(f"layer {layer} fails its checksum", key=held.key)
        decoder = codec_by_number(parts[0].codec)
        if not decoder.lossless:
            raise PermanentError(f"it is encoded by {decoder.name}, which loses something: that is part of its name")
        raw = views[0]
        if parts[0].codec:
            raw = memoryview(bytearray(sizes[layer]))
            decoder.decode_into(views, raw)
        encoded = codec.encode(raw, about)[0]
        if encoded.codec:
            again = memoryview(bytearray(sizes[layer]))
            codec.decode_into([encoded.data], again)
            if again != raw:
                raise PermanentError(f"layer {layer} did not come back from {codec.name} as it was")
        segments.append(encoded.data)
        numbers.append(encoded.codec)
    if numbers == [segment.codec for segment in header.segments[: header.layers]]:
        return None
    spec = RecordSpec.of(header.kind, sizes)
    return build_record(held.key, spec, segments, meta=meta, codecs=numbers if any(numbers) else None)
