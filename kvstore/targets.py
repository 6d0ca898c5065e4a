"""A backend as the store sees it: with its wrappers, its lanes and its counters; and what travels with a request."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from .backend import Backend, Capability, Limits, Outcome
from .buffers import Buffer
from .errors import ConfigError, KVStoreError, PermanentError, TransientError
from .eviction import RecordInfo
from .keys import Key
from .record import RecordSpec
from .scheduler import LaneGroup
from .wrappers.base import map_error

__all__ = ["Counters", "Item", "Target", "Want", "attempt", "flat_bytes", "pin_all"]

logger = logging.getLogger("kvstore.targets")


class HeadMemo:
    """What one read learned from a record's header, for those that read other segments of it soon after: with it they
    need not read the header once more. Made empty; filled and emptied by the store.

    Attributes:
        checksums: of all segments, if the record is stored raw and its header was verified; else None.
    """

    __slots__ = ("checksums",)

    def __init__(self) -> None:
        self.checksums: list[int] | None = None


class Want(NamedTuple):
    """One record, or a run of its segments, to read.

    Attributes:
        dst: writable flat bytes: one view for all wanted segments, or one view per segment. Exactly as long as the
            raw segments are. Until the completion is settled it belongs to the store. Destinations of different wants
            must not overlap, in one batch or in several at once: OK says nothing about bytes that another read spoils.
        spec: shape of the record: `kv_spec(layout, dtype, tokens)` or `opaque_spec(nbytes)`.
        first: first segment (layer) wanted.
        num_segments: how many; None means all from `first` on.
        hold: pool buffer that `dst` lies in. It is pinned while I/O runs, so it may be released at any time.
        memo: given by those who read one record in several wants: one for all of them.
    """

    key: Key
    dst: memoryview | Sequence[memoryview]
    spec: RecordSpec
    first: int = 0
    num_segments: int | None = None
    hold: Buffer | None = None
    memo: HeadMemo | None = None


class Item(NamedTuple):
    """One record to store.

    Attributes:
        segments: raw bytes of each segment (layer), flat views as long as `spec` says. They are not copied: until
            the completion is settled they must not change.
        meta: small map of msgpack values, kept in the record's header: model, dtype, token range, rotary state, …
        parent: key of the chunk before this one in its prefix (a hint for eviction).
        info: what else an eviction policy may use: place in the prefix, session, time to live.
        hold: pool buffer that the segments lie in. It is pinned while I/O runs, so it may be released at any time.
    """

    key: Key
    segments: Sequence[memoryview]
    spec: RecordSpec
    meta: Mapping[str, Any] = {}
    parent: Key | None = None
    hold: Buffer | None = None
    info: RecordInfo | None = None


def flat_bytes(view: object, *, writable: bool) -> memoryview:
    """`view` as a flat view of bytes, without copying. Raises `ConfigError` if it is not contiguous or not writable."""
    if isinstance(view, str):
        raise ConfigError("bytes are needed, not text; encode it first")
    try:
        flat = view if isinstance(view, memoryview) else memoryview(view)  # type: ignore[arg-type]
        if flat.format != "B" or flat.ndim != 1:
            flat = flat.cast("B")
    except (TypeError, ValueError) as error:  # ValueError: a view that was released
        raise ConfigError(f"{type(view).__name__} is not contiguous memory: {error}") from error
    if not flat.c_contiguous:
        raise ConfigError("the memory is not contiguous")
    if writable and flat.readonly:
        raise ConfigError("the destination is read-only")
    return flat


def pin_all(holds: Sequence[Buffer]) -> None:
    """Pin buffers, all of them or none. Raises `ClosedError` if one was released."""
    pinned: list[Buffer] = []
    try:
        for hold in holds:
            hold.pin()
            pinned.append(hold)
    except BaseException:
        for hold in pinned:
            hold.unpin()
        raise


@dataclass(slots=True)
class Target:
    """One backend of a store.

    Attributes:
        copies: in how many places of its own a backend may have a record: when one copy proves corrupt and is put
            aside, another one may still serve.
    """

    index: int
    name: str
    backend: Backend
    lanes: LaneGroup
    limits: Limits
    capabilities: Capability
    copies: int = 1


def attempt(
    name: str, operation: str, count: int, call: Callable[[], Sequence[Any]], kinds: tuple[type, ...] = (Outcome,)
) -> Sequence[Any]:
    """One call of the backend `name`: its answers, `count` of them, each of one of these kinds. Whatever it raises
    becomes the outcome of each item: a lane must outlive whatever a backend does."""
    error: KVStoreError
    try:
        answers = call()
        if len(answers) == count and all(issubclass(kind, kinds) for kind in set(map(type, answers))):
            return answers
        what = f"it gave {len(answers)} answers for {count} items, or answers of another kind"
        error = PermanentError(what, backend=name, operation=operation)
    except KVStoreError as raised:
        error = raised
    except Exception as raised:
        logger.exception("backend %s raised", name)
        error = map_error(raised, backend=name, operation=operation)
    except BaseException as raised:  # a cancelled event loop of a library, sys.exit in a plug-in
        logger.exception("backend %s raised", name)
        message = f"the backend raised {type(raised).__name__}"
        error = TransientError(message, backend=name, operation=operation, cause=raised)
    return [Outcome.failed(error)] * count


@dataclass
class Counters:
    """What a store counts: plain integers, added to once per job under the store's lock."""

    values: Counter[str] = field(default_factory=Counter)

    def add(self, name: str, amount: int = 1) -> None:
        self.values[name] += amount
