"""RESP2 (https://valkey.io/topics/protocol/): commands, and a bounded parser of replies.

A reply is an `int`, `bytes`, None (nil), a list of replies, or a `ReplyError`. A bulk string that an `Ask` has a sink
for never becomes an object: `link` lets it land in the sink's views.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .errors import LinkError, ReplyError

__all__ = [
    "MULTI",
    "PENDING",
    "Ask",
    "Part",
    "about",
    "command",
    "count_of",
    "get_range",
    "number",
    "parse",
    "set_once",
]

Part = bytes | memoryview

PENDING: Any = type("Pending", (), {"__repr__": lambda self: "PENDING"})()
"""The reply of an `Ask` that has none yet."""

_MOST_BULK = 4 << 20  # of a bulk string without a sink
_MOST_ITEMS = 1 << 19  # of an array, with those in it; a cluster of 16384 ranges has 400 000
_MOST_DIGITS = 18
_MOST_DEPTH = 8
_MOST_LINE = 64 << 10


class Ask:
    """One command, and what comes of it.

    Attributes:
        parts: what is sent: bytes and flat byte views, none of them empty.
        sink: views (none empty) for the reply, if it is a bulk string; () if it becomes an object. The reply is then
            the number of bytes that came. Fewer than asked for fill the first views only; more are an error.
        expect: bytes that the reply may have, for the window.
        landed: with a sink: called with a view's index and how many of its bytes came, in order, as each is complete.
        follow: called with the reply; asks that are sent next, before anything else. Only for an ask that is the last
            one of its pipeline.
        accepts: types that the reply may have, if it is no error; another is a mistake, and ends the connection.
        halts: some errors in reply to it (`errors.HALTING`) would be the reply to all that comes after it, too, which
            is then not sent.
        reply: `PENDING`, or what came.
    """

    __slots__ = ("accepts", "expect", "follow", "halts", "landed", "parts", "reply", "sink")

    def __init__(
        self,
        parts: Sequence[Part],
        sink: Sequence[memoryview] = (),
        *,
        expect: int = 0,
        accepts: type | tuple[type, ...] = object,
        halts: bool = False,
        landed: Callable[[int, int], None] | None = None,
        follow: Callable[[Any], Sequence[Ask]] | None = None,
    ) -> None:
        self.parts = parts
        self.sink = sink
        self.expect = expect
        self.accepts = accepts
        self.halts = halts
        self.landed = landed
        self.follow = follow
        self.reply: Any = PENDING


def command(*words: bytes | int) -> bytes:
    """A command as an array of bulk strings."""
    pieces = [b"*%d\r\n" % len(words)]
    for word in words:
        text = b"%d" % word if isinstance(word, int) else word
        pieces.append(b"$%d\r\n%s\r\n" % (len(text), text))
    return b"".join(pieces)


MULTI = command(b"MULTI")


def about(verb: bytes, name: bytes) -> bytes:
    """`command(verb, name)`, at a third of its cost."""
    return b"*2\r\n$%d\r\n%s\r\n$%d\r\n%s\r\n" % (len(verb), verb, len(name), name)


def get_range(name: bytes, first: int, last: int) -> bytes:
    """GETRANGE name first last."""
    begin, end = b"%d" % first, b"%d" % last
    return b"*4\r\n$8\r\nGETRANGE\r\n$%d\r\n%s\r\n$%d\r\n%s\r\n$%d\r\n%s\r\n" % (
        len(name), name, len(begin), begin, len(end), end
    )  # fmt: skip


def set_once(name: bytes, views: Sequence[memoryview], nbytes: int, milliseconds: int) -> list[Part]:
    """SET name … NX PX milliseconds, with the value gathered from `views`."""
    life = b"%d" % milliseconds
    head = b"*6\r\n$3\r\nSET\r\n$%d\r\n%s\r\n$%d\r\n" % (len(name), name, nbytes)
    tail = b"\r\n$2\r\nNX\r\n$2\r\nPX\r\n$%d\r\n%s\r\n" % (len(life), life)
    return [head, *(view for view in views if len(view)), tail]


def parse(
    buffer: bytearray, begin: int, end: int, depth: int = 0, left: list[int] | None = None
) -> tuple[Any, int] | None:
    """The reply that begins at `begin`, and where it ends; None: not all of it is there yet.

    Args:
        depth, left: of the array that it is in; how many more items that may have.

    Raises:
        LinkError: "protocol": this is no reply, or one that is larger than anything we ask for.
    """
    at = buffer.find(b"\r\n", begin, end)
    if at < 0:
        if end - begin > _MOST_LINE:
            raise LinkError("protocol", "the server sends something that is not RESP")
        return None
    kind = buffer[begin]
    line = buffer[begin + 1 : at]
    at += 2
    if kind == 0x3A:  # :
        return number(line), at
    if kind == 0x2B:  # +
        return bytes(line), at
    if kind == 0x24:  # $
        size = number(line)
        if size == -1:
            return None, at
        if not 0 <= size <= _MOST_BULK:
            raise LinkError("protocol", f"the server sends a string of {size} bytes, which nobody asked for")
        if end - at < size + 2:
            return None
        if buffer[at + size : at + size + 2] != b"\r\n":
            raise LinkError("protocol", "a string of the server's is longer than it says")
        return bytes(buffer[at : at + size]), at + size + 2
    if kind == 0x2D:  # -
        return ReplyError(line.decode("utf-8", "replace")), at
    if kind == 0x2A:  # *
        return _array(buffer, at, end, number(line), depth, [_MOST_ITEMS] if left is None else left)
    raise LinkError("protocol", "the server does not speak RESP2")


def _array(buffer: bytearray, at: int, end: int, count: int, depth: int, left: list[int]) -> tuple[Any, int] | None:
    if count == -1:
        return None, at
    left[0] -= max(0, count)
    if count < 0 or left[0] < 0 or depth >= _MOST_DEPTH:
        raise LinkError("protocol", f"the server sends an array of {count} items at depth {depth}")
    items: list[Any] = []
    for _ in range(count):
        found = parse(buffer, at, end, depth + 1, left)
        if found is None:
            return None
        item, at = found
        items.append(item)
    return items, at


def number(text: bytes | bytearray) -> int:
    """A decimal integer. Raises `LinkError` "protocol"."""
    if len(text) <= 20 and (text.isdigit() or (text[:1] == b"-" and text[1:].isdigit())):
        return int(text)
    raise LinkError("protocol", "the server sends a length or number that is none")


def count_of(text: bytes) -> int | None:
    """A decimal number of few digits, without a sign; None if it is none."""
    return int(text) if len(text) <= _MOST_DIGITS and text.isdigit() else None
