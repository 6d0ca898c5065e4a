"""boto3 as it is, behind the same seam. Slower (its body is copied twice), but nothing of ours is in the path.

boto3's timeouts are per wait and fixed when a client is made. So each call runs in a thread of its own, which is left
alone at the deadline: it ends by itself within the timeouts, and touches none of the caller's memory: a destination is
filled by the calling thread, and the source of a put is revoked.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from botocore import xform_name

from .answers import UNKNOWN, finished
from .client import BodyBroken, Got
from .http import LinkError
from .lanes import Lanes
from .library import LibraryClient, coming_from
from .options import Settings
from .session import make_client, make_session, strip_expect

__all__ = ["StockClient"]

_SCRATCH = 256 << 10
_RESET_S = 0.02  # how exact a timeout is kept while bytes flow, seconds
_KEPT = 3  # clients that are kept open after renewals


class _Late:
    """One call in a thread, which may be left alone."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call = call
        self._lock = threading.Lock()
        self._given_up = False
        self._done = threading.Event()
        self._answer: Any = None
        self._error: BaseException | None = None

    def __call__(self) -> None:
        with self._lock:
            if self._given_up:
                return
        answer: Any = None
        try:
            answer = self._call()
        except BaseException as error:  # noqa: BLE001 - it belongs to the caller
            self._error = error
        with self._lock:
            self._answer = answer
            self._done.set()
            self._dispose(answer)

    def _dispose(self, answer: Any) -> None:
        """Close a body that nobody waits for any more."""
        if self._given_up and isinstance(answer, dict) and hasattr(answer.get("Body"), "close"):
            answer["Body"].close()

    def wait(self, deadline: float) -> Any:
        if not self._done.wait(min(max(0.0, deadline - time.monotonic()), threading.TIMEOUT_MAX)):
            with self._lock:
                if not self._done.is_set():
                    self._given_up = True
                    raise LinkError("deadline", "the deadline passed")
        if self._error is not None:
            error, self._error = self._error, None  # its traceback leads here: a cycle would keep connections open
            raise error
        return self._answer


def _has_socket(body: Any) -> bool:
    """Whether there is a socket behind a body: not under moto's `mock_aws`, and not once it was read to its end.

    botocore's `set_socket_timeout` would log an error of its own before it raises. In doubt it is asked all the same.
    """
    if not hasattr(body, "_raw_stream"):
        return True
    return getattr(getattr(body._raw_stream, "_fp", None), "fp", None) is not None


class _Rest:
    """What is left of a body: `left` bytes, or UNKNOWN."""

    def __init__(self, body: Any, left: int, deadline: float, silence: float) -> None:
        self._body = body
        self.left = left
        self._deadline = deadline
        self._silence = silence
        self._timeout = -1.0
        self._reachable = True

    def some(self, into: memoryview) -> int:
        """At least one byte into `into`; 0 only at the end of a body of unknown length."""
        remaining = self._deadline - time.monotonic()
        if remaining <= 0:
            raise LinkError("deadline", "the deadline passed in the middle of the body")
        wanted = min(remaining, self._silence)
        if self._timeout < 0 or abs(wanted - self._timeout) > _RESET_S:
            self._wait_at_most(wanted)
        count = self._read(into[: _SCRATCH if self.left == UNKNOWN else min(_SCRATCH, self.left)])
        if self.left == UNKNOWN:
            if not count:
                self.left = 0  # the end of a body in chunks
        elif not count:
            raise LinkError("short", f"the server closed the connection {self.left} bytes before the end of the body")
        else:
            self.left -= count
        return count

    def _read(self, into: memoryview) -> int:
        if hasattr(self._body, "readinto"):
            return int(self._body.readinto(into))
        data = self._body.read(len(into))  # an older botocore
        into[: len(data)] = data
        return len(data)

    def _wait_at_most(self, seconds: float) -> None:
        self._timeout = seconds
        if self._reachable and _has_socket(self._body):
            try:
                self._body.set_socket_timeout(seconds)
            except AttributeError:  # a stream that botocore does not know: the client's own read_timeout holds
                self._reachable = False


class StockClient(LibraryClient):
    """See the module's docstring."""

    name = "boto3"

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self._settings = settings
        self._lanes = Lanes(settings.lanes + settings.meta_lanes + 8, "s3-boto3")
        self._scratch = threading.local()
        self._opened: list[Any] = []
        self._gate = threading.Lock()  # a call has begun before `close`, or does not begin
        self._closed = False
        self.reopen()

    def reopen(self) -> None:
        boto = make_client(self._settings, make_session(self._settings))
        boto.meta.events.register_first("before-sign.s3", strip_expect)
        self.endpoint = boto.meta.endpoint_url
        self._opened.append(boto)
        self._boto = boto
        while len(self._opened) > _KEPT:  # calls may still be under way in the last ones
            self._opened.pop(0).close()

    def _run(self, operation: str, params: Mapping[str, Any], deadline: float) -> dict[str, Any]:
        boto = self._boto
        late = _Late(lambda: self._call(boto, operation, params))
        with self._gate:
            if self._closed:
                raise LinkError("closed", "the backend was closed")
            self._lanes.spawn(late)
        answer: dict[str, Any] = late.wait(deadline)
        return answer

    def _call(self, boto: Any, operation: str, params: Mapping[str, Any]) -> Any:
        try:
            return getattr(boto, xform_name(operation))(Bucket=self._settings.bucket, **params)
        finally:
            if boto not in self._opened:  # closed meanwhile, and this call may have connected once more
                boto.close()

    def _fetch(self, params: Mapping[str, Any], start: int, views: Sequence[memoryview], deadline: float) -> Got:
        begin = time.monotonic()
        answer = self._run("GetObject", params, deadline)
        seconds = time.monotonic() - begin
        try:
            what = coming_from(answer, start, views)
            left = UNKNOWN if what.nbytes == UNKNOWN else min(what.skip, what.total) + what.nbytes
            body = _Rest(answer["Body"], left, deadline, self._settings.read_timeout)
            skip, done = what.skip, 0
            try:
                while skip and body.left:
                    skip -= body.some(self._waste()[:skip])
                for view in views:
                    at = 0
                    while at < len(view) and body.left:
                        count = body.some(view[at:])
                        at += count
                        done += count
            except Exception as error:
                raise BodyBroken(done, what.etag, error) from error
            return finished(what, done, seconds)
        finally:
            answer["Body"].close()

    def _waste(self) -> memoryview:
        scratch: memoryview | None = getattr(self._scratch, "view", None)
        if scratch is None:
            scratch = self._scratch.view = memoryview(bytearray(_SCRATCH))
        return scratch

    def invoke(self, operation: str, params: Mapping[str, Any], *, deadline: float) -> dict[str, Any]:
        return self._run(operation, params, deadline)

    def after_fork(self) -> None:
        super().after_fork()
        self._gate = threading.Lock()
        self._lanes.after_fork()

    def close(self) -> None:
        with self._gate:
            self._closed = True
        self._lanes.close(1.0)  # before the clients: a call that begins in a closed one opens connections again
        while self._opened:
            self._opened.pop().close()
