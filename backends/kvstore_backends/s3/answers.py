"""What an answer to HEAD or GET must say to be believed; the same for all clients.

S3 always sends an ETag, a length, and with a 206 a Content-Range (RFC 9110, 15.3.7). What does not is no S3 service, or
comes from something in between: a page of a proxy with status 200, a body that was compressed on the way, a cache that
answers with another range. All of it is refused by name, and never taken for a short or a corrupt record.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, NamedTuple

from botocore.exceptions import ClientError

from .client import BEHIND, BodyBroken, Found, Got
from .http import LinkError

__all__ = [
    "UNKNOWN",
    "Coming",
    "age_of",
    "answered_at",
    "behind",
    "coming",
    "content_range",
    "finished",
    "found_of",
    "missing",
    "unsatisfiable",
]

UNKNOWN = -1
"""A number of bytes that an answer does not tell."""

_RANGE = re.compile(r"bytes ([0-9]{1,18})-([0-9]{1,18})/([0-9]{1,18})", re.ASCII)
_LENGTH = re.compile(r"[0-9]{1,18}", re.ASCII)
_PLAIN = frozenset({"", "identity", "aws-chunked"})  # the last is how a body was sent to S3, which keeps the word
_META = "x-amz-meta-"


class Coming(NamedTuple):
    """The body that follows the headers of a GET.

    Attributes:
        etag, age: as in `Found`.
        skip: bytes before the first one that was asked for (a server that ignores Range sends everything).
        nbytes: wanted bytes in the body; fewer than were asked for only because the object ends. UNKNOWN: a body in
            chunks that ignores Range tells by its end.
        total: size of the object, or UNKNOWN.
    """

    etag: str
    age: float
    skip: int
    nbytes: int
    total: int


def coming(status: int, headers: Mapping[str, str], start: int, asked: int) -> Coming:
    """What the answer to a GET of `asked` bytes from `start` on brings.

    Args:
        headers: names in lower case.

    Raises:
        LinkError: "protocol": it cannot be the answer of an S3 service to this request.
    """
    etag = _etag(status, headers, (200, 206))
    encoding = headers.get("content-encoding", "").strip().lower()
    if encoding not in _PLAIN:
        raise LinkError("protocol", f"the body is encoded ({encoding[:20]}): a proxy on the way changes it")
    age = age_of(headers)
    length = _length(headers)
    if status == 200:
        if length == UNKNOWN:
            if not headers.get("transfer-encoding"):
                raise LinkError("protocol", "the answer does not say how long its body is")
            return Coming(etag, age, start, UNKNOWN, UNKNOWN)
        return Coming(etag, age, start, max(0, min(asked, length - start)), length)
    found = content_range(headers.get("content-range", ""))
    if found is None:
        raise LinkError("protocol", "the server answered with a part and does not say which")
    first, last, total = found
    if first != start or last != min(start + asked, total) - 1:
        raise LinkError("protocol", "the server answered with another range than was asked for")
    if length not in (UNKNOWN, last + 1 - first):
        raise LinkError("protocol", "the lengths that the server sent contradict each other")
    return Coming(etag, age, 0, last + 1 - first, total)


def found_of(status: int, headers: Mapping[str, str]) -> Found:
    """What the answer to a HEAD says.

    Raises:
        LinkError: "protocol": it has no ETag, no length, or a status that HEAD does not have.
    """
    etag, length = _etag(status, headers, (200,)), _length(headers)
    if length == UNKNOWN:
        raise LinkError("protocol", "the answer does not say how long the object is")
    metadata = {name[len(_META) :]: value for name, value in headers.items() if name.startswith(_META)}
    return Found(length, etag, age_of(headers), metadata)


def _etag(status: int, headers: Mapping[str, str], good: tuple[int, ...]) -> str:
    etag = headers.get("etag", "")
    if status not in good or not etag:
        what = "no ETag" if status in good else f"status {status}"
        raise LinkError("protocol", f"the answer has {what}, so it is not from an S3 service (a proxy's page?)")
    return etag


def _length(headers: Mapping[str, str]) -> int:
    if headers.get("transfer-encoding"):  # it decides how long the body is (RFC 9112, 6.3)
        return UNKNOWN
    text = headers.get("content-length", "")
    return int(text) if _LENGTH.fullmatch(text) else UNKNOWN


def content_range(text: str) -> tuple[int, int, int] | None:
    """First byte, last byte and size of the object from a Content-Range; None if it is not all of that."""
    match = _RANGE.fullmatch(text.strip())
    if match is None:
        return None
    first, last, total = map(int, match.groups())
    return (first, last, total) if first <= last < total else None


def age_of(headers: Mapping[str, str]) -> float:
    """Seconds between the headers Last-Modified and Date, both the server's. 0.0 if there is no Last-Modified; our own
    clock stands in for a Date that something on the way took out."""
    try:
        modified = parsedate_to_datetime(headers["last-modified"])
        now = parsedate_to_datetime(headers["date"]) if "date" in headers else datetime.now(UTC)
        return max(0.0, (now - modified).total_seconds())
    except (KeyError, ValueError, TypeError):
        return 0.0


def answered_at(answer: Mapping[str, Any]) -> float:
    """The time of an answer (as botocore parses one) by the service's clock, seconds since the epoch; ours if it does
    not say."""
    text = answer.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("date", "")
    try:
        return parsedate_to_datetime(text).timestamp()
    except (ValueError, TypeError):
        return time.time()


def finished(what: Coming, done: int, seconds: float) -> Got:
    """The result of a body that was read to its end, or until the views were full.

    Raises:
        BodyBroken: `done` bytes are fewer than the headers promised.
    """
    if what.nbytes != UNKNOWN and done < what.nbytes:
        short = LinkError("short", f"the body ended {what.nbytes - done} bytes early")
        raise BodyBroken(done, what.etag, short)
    return Got(done, what.etag, what.age, what.total, seconds)


def missing(error: ClientError) -> bool:
    """Whether an error of GET or HEAD means that there is no such object, or not in this version.

    A 404 to a GET has a code; without one it is not S3's, and the endpoint is likely to be wrong.
    """
    code = error.response.get("Error", {}).get("Code", "")
    gone = ("404", "NotFound") if error.operation_name == "HeadObject" else ()
    return code in ("NoSuchKey", "PreconditionFailed", "412", *gone)


def unsatisfiable(error: ClientError) -> bool:
    """416: the object ends before the range begins."""
    return bool(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode") == 416)


def behind(headers: Mapping[str, str], start: int) -> Got:
    """The result of a 416 to a range from `start` on. Raises `LinkError` if the object is longer than that."""
    total = headers.get("content-range", "").removeprefix("bytes */")
    if _LENGTH.fullmatch(total) and int(total) > start:
        raise LinkError("protocol", "the server refused a range that the object has")
    return BEHIND
