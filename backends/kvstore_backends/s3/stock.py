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
from botocore.exceptions import ClientError

from .client import BodyBroken, Client, Found, Got, Source, age_of
from .http import LinkError
from .lanes import Lanes
from .options import Settings
from .session import make_client, make_session, strip_expect

__all__ = ["StockClient", "found_of", "missing", "unsatisfiable"]

_SCRATCH = 256 << 10
_RESET_S = 0.02  # how exact a timeout is kept while bytes flow, seconds
_KEPT = 3  # clients that are kept open after renewals


def missing(error: ClientError) -> bool:
    """Whether an error of GET or HEAD means that there is no such object, or not in this version."""
    code = error.response.get("Error", {}).get("Code", "")
    return code in ("NoSuchKey", "404", "PreconditionFailed", "412")


def unsatisfiable(error: ClientError) -> bool:
    """416: the object ends before the range begins."""
    return bool(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode") == 416)


def found_of(answer: Mapping[str, Any]) -> Found:
    """From the answer of HeadObject."""
    headers = answer["ResponseMetadata"]["HTTPHeaders"]
    metadata = {name.lower(): value for name, value in answer.get("Metadata", {}).items()}
    return Found(int(answer["ContentLength"]), answer.get("ETag", ""), age_of(headers), metadata)


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
    """What is left of a body."""

    def __init__(self, body: Any, left: int, deadline: float, silence: float) -> None:
        self._body = body
        self.left = left
        self._deadline = deadline
        self._silence = silence
        self._timeout = -1.0
        self._reachable = True

    def some(self, into: memoryview) -> int:
        """At least one byte into `into`."""
        remaining = self._deadline - time.monotonic()
        if remaining <= 0:
            raise LinkError("deadline", "the deadline passed in the middle of the body")
        wanted = min(remaining, self._silence)
        if self._timeout < 0 or abs(wanted - self._timeout) > _RESET_S:
            self._wait_at_most(wanted)
        count = int(self._body.readinto(into[: min(_SCRATCH, self.left)]))
        if not count:
            raise LinkError("short", f"the server closed the connection {self.left} bytes before the end of the body")
        self.left -= count
        return count

    def _wait_at_most(self, seconds: float) -> None:
        self._timeout = seconds
        if self._reachable and _has_socket(self._body):
            try:
                self._body.set_socket_timeout(seconds)
            except AttributeError:  # a stream that botocore does not know: the client's own read_timeout holds
                self._reachable = False


class StockClient(Client):
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

    def head(self, key: str, *, deadline: float) -> Found | None:
        try:
            return found_of(self._run("HeadObject", {"Key": key}, deadline))
        except ClientError as error:
            if missing(error):
                return None
            raise

    def get(
        self, key: str, start: int, views: Sequence[memoryview], *, etag: str | None, deadline: float
    ) -> Got | None:
        params: dict[str, Any] = {"Key": key, "Range": f"bytes={start}-{start + sum(map(len, views)) - 1}"}
        if etag is not None:
            params["IfMatch"] = etag
        begin = time.monotonic()
        try:
            answer = self._run("GetObject", params, deadline)
        except ClientError as error:
            if missing(error):
                return None
            if unsatisfiable(error):
                return Got(0, "", 0.0)
            raise
        seconds = time.monotonic() - begin
        found, age = answer.get("ETag", ""), age_of(answer["ResponseMetadata"]["HTTPHeaders"])
        body = _Rest(answer["Body"], int(answer["ContentLength"]), deadline, self._settings.read_timeout)
        skip = start if "ContentRange" not in answer else 0  # the server ignores Range
        done = 0
        try:
            while skip and body.left:
                skip -= body.some(self._waste()[:skip])
            for view in views:
                at = 0
                while at < len(view) and body.left:
                    count = body.some(view[at:])
                    at += count
                    done += count
            return Got(done, found, age, seconds)
        except Exception as error:
            raise BodyBroken(done, found, error) from error
        finally:
            answer["Body"].close()

    def _waste(self) -> memoryview:
        scratch: memoryview | None = getattr(self._scratch, "view", None)
        if scratch is None:
            scratch = self._scratch.view = memoryview(bytearray(_SCRATCH))
        return scratch

    def put(self, operation: str, params: Mapping[str, Any], source: Source, *, deadline: float) -> dict[str, Any]:
        mine = Source(source.views, source.nbytes)
        try:
            return self._run(operation, {**params, "Body": mine if mine.nbytes else b""}, deadline)
        finally:
            mine.revoke()

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
