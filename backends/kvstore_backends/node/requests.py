"""How a batch becomes requests, and where the bytes of a reply go. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.backend import Read
from kvstore.keys import Key
from kvstore_transport.errors import ProtocolError

from .protocol import Code, Malformed, Status, unpack_outcomes

__all__ = ["Landing", "outcomes_of", "split", "split_by_key"]


def split(sizes: Sequence[int], *, most_bytes: int, most_items: int) -> list[range]:
    """Cut items into consecutive requests of at most so many bytes (unless one item alone has more) and items."""
    count = len(sizes)
    if count <= most_items and sum(sizes) <= most_bytes:
        return [range(count)] if count else []
    parts, begin, total = [], 0, 0
    for index, size in enumerate(sizes):
        if index > begin and (total + size > most_bytes or index - begin >= most_items):
            parts.append(range(begin, index))
            begin, total = index, 0
        total += size
    parts.append(range(begin, count))
    return parts


def split_by_key(
    keys: Sequence[Key], sizes: Sequence[int], *, most_bytes: int, largest: int, most_items: int
) -> list[Sequence[int]]:
    """Cut reads into requests, such that all reads of one key are in one: they come from one version of the record.

    A key whose reads alone have more than `most_bytes` is a request of its own; only if they have more than `largest`,
    or are more than `most_items`, they are spread over several.
    """
    count = len(keys)
    if count <= most_items and sum(sizes) <= most_bytes:
        return [range(count)] if count else []
    by_key: dict[Key, list[int]] = {}
    for index, key in enumerate(keys):
        by_key.setdefault(key, []).append(index)
    parts: list[Sequence[int]] = []
    part: list[int] = []
    total = 0
    for unit in by_key.values():
        size = sum(sizes[index] for index in unit)
        if part and (total + size > most_bytes or len(part) + len(unit) > most_items):
            parts.append(part)
            part, total = [], 0
        if size > largest or len(unit) > most_items:
            pieces = split([sizes[index] for index in unit], most_bytes=largest, most_items=most_items)
            parts += [[unit[at] for at in piece] for piece in pieces]
            continue
        part += unit
        total += size
    if part:
        parts.append(part)
    return parts


class Landing:
    """The plan of one GET: the bytes of the items that are OK land, in order, in their destinations.

    Args:
        reads: what was asked for.
        lengths: bytes asked for, of each.

    Attributes:
        begun: whether a reply has come.
        codes, sizes, notes: its outcomes, once `views` was called.
    """

    def __init__(self, reads: Sequence[Read], lengths: Sequence[int]) -> None:
        self._reads = reads
        self._lengths = lengths
        self.begun = False
        self.codes: Sequence[Code] = ()
        self.sizes: Sequence[int] = ()
        self.notes: dict[int, str] = {}

    def views(self, status: int, meta: bytes, body_nbytes: int) -> Sequence[memoryview]:
        """See `kvstore_transport.seam.Plan`. Raises `ProtocolError` if the reply does not fit the question."""
        self.begun = True
        if status != Status.OK:
            if body_nbytes:
                raise ProtocolError("a body with a reply that has none")
            return ()
        self.codes, self.sizes, self.notes = outcomes_of(meta, len(self._reads))
        views = []
        total, fine = 0, Code.OK
        for code, size, length, read in zip(self.codes, self.sizes, self._lengths, self._reads, strict=True):
            if code is fine and size:
                if size > length:
                    raise ProtocolError(f"{size} bytes where {length} were asked for")
                total += size
                dst = read[1]
                views.append(dst if size == length else dst[:size])
        if total != body_nbytes:
            raise ProtocolError(f"a body of {body_nbytes} bytes whose items have {total}")
        return views


def outcomes_of(meta: bytes, count: int) -> tuple[list[Code], list[int], dict[int, str]]:
    """The outcomes of a reply. Raises `ProtocolError` if they do not parse, or are not `count`."""
    try:
        codes, sizes, notes = unpack_outcomes(meta)
    except Malformed as error:
        raise ProtocolError(f"outcomes that do not parse: {error}") from error
    if len(codes) != count:
        raise ProtocolError(f"{len(codes)} outcomes for {count} items")
    return codes, sizes, notes
