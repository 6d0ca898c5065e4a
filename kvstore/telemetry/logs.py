"""Log lines that machines read: one JSON object a line, with the id of the request they are about.

    configure_logs()                                     # a daemon, or a program of one's own
    with request_scope("req-17", model="llama", prompt_length=4096):
        store.submit_get(wants).result()                 # its lines and spans say so

`kvstore` configures no logging by itself: a library's host does. Where the host is an engine whose logging cannot be
told, the option `event_log` of a store attaches a handler to the logger `kvstore.events` alone.

What happens per batch or per request is told on `kvstore.events`, at INFO, so at no cost where nobody listens. The
fields are those that terraform/modules/observability/queries read; docs/metrics.md has them all.
"""

from __future__ import annotations

import contextlib
import contextvars
import json
import logging
import math
import re
import sys
import time
from collections.abc import Iterator, Mapping
from typing import IO, Any, NamedTuple

from kvstore.errors import ConfigError

from .lines import LineHandler

__all__ = [
    "CACHE_HIT", "CACHE_STORE", "EVENTS", "TOKEN_USAGE", "JsonLines", "RequestInfo", "attach_event_log",
    "configure_logs", "current_request", "current_request_id", "log_event", "request_scope", "resume_request",
]  # fmt: skip

EVENTS = logging.getLogger("kvstore.events")

CACHE_HIT = "kv_cache_hit"
"""Marker of a line about records that were had: tokens_saved, hit_chunks, cache_size_bytes."""

CACHE_STORE = "kv_cache_store"
"""Marker of a line about records that were stored: cache_size_bytes, encoded_size_bytes, compression_ratio."""

TOKEN_USAGE = "token_usage"
"""Marker of a line about a finished request: input_tokens, output_tokens, ttft_ms, …"""

_FIELDS = "kvstore_fields"  # attribute of a log record
_LONGEST = 256  # characters of an id or a model's name


class RequestInfo(NamedTuple):
    """What is known of the request that the code under way works for.

    Attributes:
        id: of the engine's, or anybody's; "" for none.
        model: name of the model; "" if it is not known.
        prompt_length: tokens; 0 if it is not known.
        doc_count: documents that the prompt is made of; 0 if it is not known.
    """

    id: str = ""
    model: str = ""
    prompt_length: int = 0
    doc_count: int = 0


_NONE = RequestInfo()
_current: contextvars.ContextVar[RequestInfo] = contextvars.ContextVar("kvstore_request", default=_NONE)


@contextlib.contextmanager
def request_scope(request_id: str, *, model: str = "", prompt_length: int = 0, doc_count: int = 0) -> Iterator[None]:
    """What is submitted in this block, by this thread or task, is for one request: log lines and spans name it. Ids and
    names are cut to 256 characters.

    Raises:
        ConfigError: an id or a name that is no text.
    """
    if not isinstance(request_id, str) or not isinstance(model, str):
        raise ConfigError(f"request_scope: id and model are text, not {request_id!r:.40} and {model!r:.40}")
    info = RequestInfo(request_id[:_LONGEST], model[:_LONGEST], prompt_length, doc_count)
    with resume_request(info):
        yield


@contextlib.contextmanager
def resume_request(info: RequestInfo) -> Iterator[None]:
    """What is submitted in this block is for the request that `current_request` told of in another thread."""
    token = _current.set(info)
    try:
        yield
    finally:
        _current.reset(token)


def current_request() -> RequestInfo:
    """What `request_scope` said last, in this thread or task."""
    return _current.get()


def current_request_id() -> str:
    """The id of the request that this thread or task works for; "" for none."""
    return _current.get().id


def log_event(marker: str, fields: Mapping[str, Any], *, request: RequestInfo | None = None) -> None:
    """Tell of something on `kvstore.events`, at INFO.

    Args:
        marker: what happened; the line's `message`.
        fields: go into the line beside it, as far as they are not None.
        request: for which request; None: the current one.
    """
    if not EVENTS.isEnabledFor(logging.INFO):
        return
    info = _current.get() if request is None else request
    shown = {name: value for name, value in fields.items() if value is not None}
    if info.model:
        shown.setdefault("model_name", info.model)
    if info.id:
        shown.setdefault("request_id", info.id)
    EVENTS.info("%s", marker, extra={_FIELDS: shown})


_encode = json.JSONEncoder(default=str, separators=(",", ":")).encode


class JsonLines(logging.Formatter):
    """One line a record: `time` (RFC 3339, UTC, ms), `level`, `logger`, `message`, then fields, `request_id` if there
    is one, and `exception`. What is no JSON (NaN, bytes, objects) is left out or shown as text; a line never fails, and
    is ASCII: there are characters beyond it that some readers take for the end of a line."""

    def format(self, record: logging.LogRecord) -> str:
        """See the class."""
        milliseconds = math.floor(record.created * 1000)
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(milliseconds // 1000))
        line: dict[str, Any] = {
            "time": f"{stamp}.{milliseconds % 1000:03d}Z",
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        for name, value in getattr(record, _FIELDS, {}).items():
            if isinstance(value, float) and not math.isfinite(value):
                continue
            line.setdefault(name, value)
        if (request_id := _current.get().id) and "request_id" not in line:
            line["request_id"] = request_id
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return _encode(line)


# What moves a cursor, colours a terminal, begins a line, or turns the order of what follows.
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def _plain(text: str) -> str:
    """Text as one line: what it says cannot look like another line, or do something to a terminal."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def _value(value: object) -> str:
    """A field's value, in quotes where it could be taken for several fields."""
    text = _plain(str(value))
    return json.dumps(text, ensure_ascii=False) if not text or set(text) & set(' "=') else text


class TextLines(logging.Formatter):
    """For people: level, logger, message, and the fields as name=value. Control characters are shown as escapes, and
    the lines of a traceback are indented: whatever a message quotes, it does not begin a line."""

    def format(self, record: logging.LogRecord) -> str:
        """See the class."""
        text = f"{record.levelname} {record.name}: {_plain(record.getMessage())}"
        fields = getattr(record, _FIELDS, {})
        text += "".join(f" {name}={_value(value)}" for name, value in fields.items())
        if (request_id := _current.get().id) and "request_id" not in fields:
            text += f" request_id={_value(request_id)}"
        told = self.formatException(record.exc_info).split("\n") if record.exc_info else ()
        return "\n  ".join((text, *map(_plain, told)))


def configure_logs(
    form: str = "json", *, level: str = "info", stream: IO[str] | None = None, logger: str = "kvstore"
) -> logging.Handler:
    """Have what `logger` and those below it say written to `stream` (standard error), and nowhere else. A second call
    replaces what the first one did.

    Args:
        form: "json" or "text".
        level: debug, info, warning or error.

    Returns:
        The handler, for who wants to take it away again.

    Raises:
        ConfigError: an unknown form or level.
    """
    levels = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
    if form not in ("json", "text"):
        raise ConfigError(f"log format {form!r} is not known; choices: json, text")
    if level not in levels:
        raise ConfigError(f"log level {level!r} is not known; choices: {', '.join(levels)}")
    handler = LineHandler(sys.stderr if stream is None else stream)
    handler.setFormatter(JsonLines() if form == "json" else TextLines())
    root = logging.getLogger(logger)
    for old in [each for each in root.handlers if isinstance(each, LineHandler)]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(levels[level])
    root.propagate = False
    return handler


def attach_event_log(where: str) -> None:
    """Option `event_log` of a store: have `kvstore.events` written as JSON lines.

    Args:
        where: "stdout", "stderr", or "off": leave it as it is.
    """
    if where == "off" or any(isinstance(each, LineHandler) for each in EVENTS.handlers):
        return
    configure_logs(stream=sys.stdout if where == "stdout" else None, logger=EVENTS.name)
