"""A backend as the store sees it: with its wrappers, its lanes and its counters; and what travels with a request."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from .backend import Backend, Capability, Limits, Outcome
from .buffers import Buffer
from .errors import ConfigError, KVStoreError, PermanentError, TransientError
from .eviction import RecordInfo
from .keys import Key
from .record import Header, RecordSpec
from .scheduler import LaneGroup
from .wrappers.base import map_error

if TYPE_CHECKING:
    from .codec.base import Decoder

__all__ = ["Counters", "HeadMemo", "Item", "Pinned", "Progress", "Target", "Want", "attempt", "flat_bytes", "pin_all"]

logger = logging.getLogger("kvstore.targets")


class HeadMemo:
    """What one read learned from a record's header, for those that read other segments of it soon after: with it they
    need not read the header once more. Made empty; filled and emptied by the store.

    Attributes:
        checksums: of all segments, if the record is stored raw and its header was verified; else None.
        header: the header, if the record is encoded.
    """

    __slots__ = ("checksums", "header")

    def __init__(self) -> None:
        self.checksums: list[int] | None = None
        self.header: Header | None = None

    def forget(self) -> None:
        """What was learned led to trouble."""
        self.checksums = self.header = None


class Pinned(Protocol):
    """What a read holds while it is under way."""

    def pin(self) -> object: ...

    def unpin(self) -> object: ...


class Progress:
    """How far one reader has decoded some layers of one record, level by level. Made empty by the reader, one for each
    (record, run of layers, destination); filled by the store. A later want with the same progress, the same
    destination and a higher level fetches only the levels that are missing, and refines the destination in place,
    which must be as the store left it.

    It holds what refining needs, at most about half of the raw bytes, until all levels are there. One want at a time:
    the next may be submitted when the one before is settled (`Completion.settled`).

    Attributes:
        level: levels 0 to this one are in the destination, of every layer as far as it has them; None: nothing is, or
            what is there is undefined. After a want that failed the destination still holds this level, at least.
        complete: no more levels are stored than are in the destination.
        fetched_bytes: stored bytes that were fetched for it, headers included.
    """

    __slots__ = (
        "_busy",
        "_hold",
        "_lock",
        "_wanted",
        "complete",
        "decoders",
        "fetched_bytes",
        "have",
        "header",
        "level",
    )

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._busy = False
        self._hold: Buffer | None = None
        self._wanted: tuple[object, ...] | None = None
        self.fetched_bytes = 0
        self.header: Header | None = None  # of the record, once it is known
        self.have: list[int] = []  # levels of each layer that are decoded
        self.decoders: list[Decoder | None] = []  # of each layer, while there is more to come
        self.level: int | None = None
        self.complete = False

    def claim(self, wanted: tuple[object, ...], hold: Buffer | None) -> None:
        """A want is about to be submitted. `wanted`: what must be the same each time.

        Raises:
            ConfigError: it is used for something else, or by a read that is under way.
        """
        with self._lock:
            if self._busy:
                raise ConfigError("a progress is for one read at a time; wait until the one before is settled")
            if self._wanted is not None and self._wanted != wanted:
                raise ConfigError("a progress belongs to one record, one run of layers and one destination")
            self._wanted, self._hold = wanted, hold

    def pin(self) -> None:
        """A read begins. Raises `ClosedError` if the destination's buffer was released, `ConfigError` if another read
        is under way."""
        with self._lock:
            if self._busy:
                raise ConfigError("a progress is for one read at a time; wait until the one before is settled")
            if self._hold is not None:
                self._hold.pin()
            self._busy = True

    def unpin(self) -> None:
        """It has ended."""
        with self._lock:
            if self.level is None:  # what is there is undefined, so it may become anything before the next read
                self.forget()
            self._busy, hold = False, self._hold
        if hold is not None:
            hold.unpin()

    def begin(self, header: Header, layers: int) -> None:
        """The record's header is known; nothing of it is decoded."""
        self.header = header
        self.have, self.decoders = [0] * layers, [None] * layers

    def forget(self) -> None:
        """What was decoded is undefined."""
        self.header = self.level = None
        self.have, self.decoders = [], []
        self.complete = False

    def count(self, parts: Sequence[Sequence[object]]) -> None:
        """Set `level`, and let go of decoders that are done. `parts`: of each layer all its levels."""
        missing = [have for have, levels in zip(self.have, parts, strict=True) if have < len(levels)]
        self.level = min(missing, default=max(map(len, parts), default=1)) - 1
        if self.level < 0:
            self.level = None
        self.complete = not missing
        for index, levels in enumerate(parts):
            if self.have[index] == len(levels):
                self.decoders[index] = None


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
        level: how much precision of an encoded record is wanted: levels 0 to this one, fewer if it has fewer; None:
            the option `codec_level`, which is all unless it says otherwise.
        progress: given by those who read coarse levels first and refine them later, in place.
    """

    key: Key
    dst: memoryview | Sequence[memoryview]
    spec: RecordSpec
    first: int = 0
    num_segments: int | None = None
    hold: Buffer | None = None
    memo: HeadMemo | None = None
    level: int | None = None
    progress: Progress | None = None


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


def pin_all(holds: Sequence[Pinned]) -> None:
    """Pin buffers, all of them or none. Raises `ClosedError` if one was released."""
    pinned: list[Pinned] = []
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
    """What a store counts: plain integers, added to once per job under the lock of the part that counts.

    Attributes:
        served: (index of the target, place of the tier in its hierarchy, or -1) → records that were read and verified,
            tokens of these; under `lock`.
        missed, failed: records that a get did not bring, because they were not there, or for trouble; under `lock`.
    """

    values: Counter[str] = field(default_factory=Counter)
    served: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    missed: int = 0
    failed: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, name: str, amount: int = 1) -> None:
        self.values[name] += amount
