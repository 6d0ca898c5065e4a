"""The native client: botocore for parameters, credentials, endpoints, signatures, S3 Express sessions and errors; our
own connections for the bytes.

A handler on botocore's public event `before-send.s3` sends every request of the client over our pool and answers with
an `AWSResponse`, so botocore's own HTTP layer is never used, and one deadline covers whatever botocore sends
(CreateSession and region redirects too). Of a GetObject the handler writes the body into the caller's memory; a body
to send is taken as views from `Source`.

Most of what a call of botocore costs (0.7 ms) is the same for every object. So HEAD, GET and PUT are **traced** once:
the unsigned request is copied at the event `request-created.s3`. Later calls put another name into the copy and emit
that event again, which has botocore sign it (0.1 ms), sessions included. An answer that is anything but ordinary
drops the trace and the call is made again in full.
"""

from __future__ import annotations

import contextlib
import http
import ssl
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import quote, urlsplit
from urllib.request import getproxies, proxy_bypass

from botocore import xform_name
from botocore.awsrequest import AWSRequest, AWSResponse
from botocore.exceptions import ClientError
from botocore.parsers import ResponseParserFactory

from .answers import behind, coming, finished, found_of, missing, unsatisfiable
from .client import BodyBroken, Client, Found, Got, Source
from .credentials import Gate, Identities, Session, gated
from .errors import EXPIRED
from .express import zone_of
from .http import Body, Connection, Head, Stopped, Timing, request_head
from .options import Settings
from .session import is_aws, make_client, make_session, named, refuse_mock, tls_context
from .transport import Hedging, Origin, Pool, Request, Resolver, Transport

__all__ = ["NativeClient", "uses_proxy"]

_MOST_ANSWER = 64 << 20  # bytes of an answer that is kept in memory (a page of a listing is below 1 MiB)
_SCRATCH = 256 << 10  # for bytes that nobody wants
_DRAIN = 1 << 20  # rather than read more than this, a connection is closed
_PLAIN = {  # ordinary answers
    "HeadObject": frozenset({200, 404}), "GetObject": frozenset({200, 206, 404, 412, 416}),
    "PutObject": frozenset(range(200, 300)),
}  # fmt: skip
_SESSION_EARLY_S = 60.0  # before the end of its five minutes a session of S3 Express is renewed
_TRACED = {
    "Key": "", "IfNoneMatch": "If-None-Match", "ChecksumCRC32": "x-amz-checksum-crc32",
    "ChecksumCRC32C": "x-amz-checksum-crc32c", "ChecksumCRC64NVME": "x-amz-checksum-crc64nvme",
}  # fmt: skip
_DROPPED = frozenset({
    "authorization", "x-amz-date", "date", "x-amz-content-sha256", "x-amz-security-token", "x-amz-s3session-token",
    "amz-sdk-invocation-id", "amz-sdk-request", "range", "if-match", "content-length", "expect",
})  # fmt: skip


class _Sink:
    """Where the body of a GetObject goes, and what was found."""

    __slots__ = ("got", "start", "views")

    def __init__(self, start: int, views: Sequence[memoryview]) -> None:
        self.start = start
        self.views = views
        self.got: Got | None = None


class _Call(threading.local):
    """What the handlers must know of the call that this thread is in."""

    operation: str = ""
    until: float = 0.0
    sink: _Sink | None = None
    trace: _Trace | None = None


class _Trace:
    """An unsigned request, for other names."""

    __slots__ = ("base", "context", "headers", "key", "method")

    def __init__(self, key: str) -> None:
        self.key = key
        self.base = ""
        self.method = ""
        self.headers: dict[str, str] = {}
        self.context: dict[str, Any] = {}


class _Raw:
    """The `raw` of an `AWSResponse`, in memory."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def read(self, amt: int | None = None) -> bytes:
        data, self._data = (self._data, b"") if amt is None else (self._data[:amt], self._data[amt:])
        return data

    def stream(self, amt: int = 0, **_: Any) -> Iterator[bytes]:
        yield self.read()

    def close(self) -> None:
        self._data = b""


class NativeClient(Client):
    """See the module's docstring.

    Args:
        settings: what to connect to.
        resolver: for tests.
    """

    name = "native"

    def __init__(self, settings: Settings, *, resolver: Resolver | None = None) -> None:
        super().__init__()
        self._settings = settings
        self._bucket = settings.bucket
        self._call = _Call()
        self._tls: ssl.SSLContext | None = None
        self._aws: Any = None  # botocore's session
        pool = Pool(
            resolver or Resolver(), connect_timeout=settings.connect_timeout, tls=self._tls_context,
            most_idle=settings.lanes + settings.meta_lanes,
        )  # fmt: skip
        self.transport = Transport(pool, Hedging() if settings.hedge_reads else None)
        self._scratch = threading.local()
        self._parser = ResponseParserFactory().create_parser("rest-xml")
        self.reopen()
        if settings.ca_bundle is not None or urlsplit(self.endpoint).scheme == "https":
            self._tls_context()

    def reopen(self) -> None:
        session = make_session(self._settings)
        if self._settings.access_key_id is None:
            with named(self._settings):
                gated(session, self._until)
        boto = make_client(self._settings, session)
        self.endpoint = boto.meta.endpoint_url
        refuse_mock(self._settings, self.endpoint)
        self._identities = Identities(
            Gate(Session(lambda: self._create_session(boto)), self._until, early=_SESSION_EARLY_S)
        )
        events = boto.meta.events
        events.register_first("before-send.s3", self._before_send)
        events.register_first("request-created.s3", self._request_created)
        events.register_last("before-sign.s3", self._before_sign)
        self._aws, self._boto, self._traces = session, boto, dict[str, _Trace]()

    def _until(self) -> float:
        return self._call.until

    def _create_session(self, boto: Any) -> dict[str, Any]:
        """In a thread of the gate's."""
        self._call.until = time.monotonic() + self._settings.connect_timeout + self._settings.read_timeout
        answer: dict[str, Any] = boto.create_session(Bucket=self._bucket)
        return answer

    def _tls_context(self) -> ssl.SSLContext:
        if self._tls is None:
            self._tls = tls_context(self._settings, self._aws)
        return self._tls

    # Handlers of botocore's events.

    def _request_created(self, request: Any, operation_name: str, **_: Any) -> None:
        trace = self._call.trace
        if trace is None or operation_name != self._call.operation:
            return
        path = quote(trace.key, safe="/~")
        if request.url.endswith("/" + path):
            trace.base = request.url[: -len(path)]
            trace.method = request.method
            trace.headers = {n: _text(v) for n, v in request.headers.items() if n.lower() not in _DROPPED}
            trace.context = {name: value for name, value in request.context.items() if name != "retries"}

    def _before_sign(self, request: Any, **_: Any) -> None:
        signing = request.context.get("signing", {})
        if signing.get("identity_cache") is not None:  # a request to S3 Express that is signed with a session
            signing["identity_cache"] = self._identities

    def _before_send(self, request: Any, event_name: str, **_: Any) -> AWSResponse:
        operation = event_name.rpartition(".")[2]
        headers = {name: _text(value) for name, value in request.headers.items()}
        prepared = _prepare(request.method, request.url, headers, request.body)
        call = self._call
        sink = call.sink if operation == call.operation else None
        status, found, body = self._send(prepared, operation, call.until, sink)
        return AWSResponse(request.url, status, found, _Raw(body))

    def _timing(self, until: float) -> Timing:
        return Timing(until, self._settings.read_timeout)

    def _send(
        self, request: Request, operation: str, until: float, sink: _Sink | None
    ) -> tuple[int, dict[str, str], bytes]:
        """One exchange: status, headers and body. A body that went to the sink is given as an empty one."""
        hedge = operation if operation in ("GetObject", "HeadObject") else ""
        start = time.monotonic()
        timing = self._timing(until)
        connection, head = self.transport.exchange(request, timing, hedge=hedge)
        ended = False
        try:
            body = Body(connection, request.method, head, timing)
            headers = dict(head.headers)
            if sink is not None and http.HTTPStatus.OK <= head.status < http.HTTPStatus.MULTIPLE_CHOICES:
                seconds = time.monotonic() - start
                ended = self._into_sink(sink, head, body, connection, seconds)
                headers = {n: v for n, v in headers.items() if not n.startswith("x-amz-checksum-")}
                headers.pop("transfer-encoding", None)
                headers["content-length"] = "0"
                return head.status, headers, b""
            data = body.read(_MOST_ANSWER)
            ended = True
            return head.status, headers, data
        finally:
            self.transport.done(request, connection, head, ended=ended)

    def _into_sink(self, sink: _Sink, head: Head, body: Body, connection: Connection, seconds: float) -> bool:
        """Write the body to where it belongs. Returns whether it was read to its end."""
        what = coming(head.status, head.headers, sink.start, sum(map(len, sink.views)))
        done = 0
        try:
            if self._skip(body, what.skip) == what.skip:
                for view in sink.views:
                    count = body.readinto(view)
                    done += count
                    if count < len(view):
                        break
        except Stopped as stopped:
            raise BodyBroken(done + stopped.done, what.etag, stopped.error) from stopped.error
        sink.got = finished(what, done, seconds)
        if not body.ended and body.left is not None and body.left <= _DRAIN:
            with contextlib.suppress(Stopped):
                self._skip(body, body.left)
        return body.ended

    def _skip(self, body: Body, count: int) -> int:
        scratch: memoryview | None = getattr(self._scratch, "view", None)
        if scratch is None:
            scratch = self._scratch.view = memoryview(bytearray(_SCRATCH))
        skipped = 0
        while skipped < count and not body.ended:
            try:
                skipped += body.readinto(scratch[: count - skipped])
            except Stopped as stopped:
                raise Stopped(0, stopped.error) from stopped.error  # none of these bytes is wanted
        return skipped

    # Calls.

    def _full(
        self, operation: str, params: Mapping[str, Any], deadline: float, *, sink: _Sink | None = None,
        trace: _Trace | None = None, kind: str = "",
    ) -> dict[str, Any]:  # fmt: skip
        """A call through all of botocore."""
        call = self._call
        call.operation, call.until, call.sink, call.trace = operation, deadline, sink, trace
        ordinary = False
        try:
            answer: dict[str, Any] = getattr(self._boto, xform_name(operation))(Bucket=self._bucket, **params)
            ordinary = True
        except ClientError as error:
            ordinary = missing(error)  # as most lookups are, and what comes before most puts
            raise
        finally:
            call.operation, call.until, call.sink, call.trace = "", 0.0, None, None
            if ordinary and trace is not None and trace.base:
                self._traces[kind or operation] = trace
        return answer

    def _fast(
        self, operation: str, key: str, extra: Mapping[str, str], deadline: float, *, sink: _Sink | None = None,
        source: Source | None = None,
        kind: str = "",
    ) -> tuple[int, Mapping[str, str]] | None:  # fmt: skip
        """The call by a trace: status and headers of an ordinary answer. None: it must be made in full.

        Raises:
            ClientError: an error of the service that trying again in full would not change.
        """
        trace = self._traces.get(kind or operation)
        if trace is None:
            return None
        url = trace.base + quote(key, safe="/~")
        request = AWSRequest(method=trace.method, url=url, headers={**trace.headers, **extra}, data=source)
        request.context = dict(trace.context)
        call = self._call
        call.operation, call.until = "", deadline  # signing may wait for credentials
        try:
            self._boto.meta.events.emit(f"request-created.s3.{operation}", request=request, operation_name=operation)
        finally:
            call.until = 0.0
        headers = {name: _text(value) for name, value in request.headers.items()}
        status, found, body = self._send(_prepare(trace.method, url, headers, source), operation, deadline, sink)
        if operation == "PutObject" and status < 300 and b"<Error>" in body:
            status = 500  # as botocore has it: S3 may find out that it failed after it has answered
        if status in _PLAIN[operation] and not (
            status == 404 and operation == "GetObject" and b"NoSuchKey" not in body
        ):
            return status, found
        parsed = self._parser.parse({"status_code": status, "headers": found, "body": body}, None)
        if status >= 429 or status in (408, 409, 412) or parsed.get("Error", {}).get("Code") in EXPIRED:
            raise ClientError(parsed, operation)
        self._traces.pop(kind or operation, None)
        return None

    def head(self, key: str, *, deadline: float) -> Found | None:
        answered = self._fast("HeadObject", key, {}, deadline)
        if answered is not None:
            status, headers = answered
            return None if status == http.HTTPStatus.NOT_FOUND else found_of(status, headers)
        try:
            meta = self._full("HeadObject", {"Key": key}, deadline, trace=_Trace(key))["ResponseMetadata"]
        except ClientError as error:
            if missing(error):
                return None
            raise
        return found_of(meta["HTTPStatusCode"], meta["HTTPHeaders"])

    def get(
        self, key: str, start: int, views: Sequence[memoryview], *, etag: str | None, deadline: float
    ) -> Got | None:
        sink = _Sink(start, views)
        span = f"bytes={start}-{start + sum(map(len, views)) - 1}"
        extra = {"Range": span} if etag is None else {"Range": span, "If-Match": etag}
        answered = self._fast("GetObject", key, extra, deadline, sink=sink)
        if answered is not None:
            status, headers = answered
            if status in (404, 412):
                return None
            return behind(headers, start) if status == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE else sink.got
        params: dict[str, Any] = {"Key": key, "Range": span}
        if etag is not None:
            params["IfMatch"] = etag
        try:
            self._full("GetObject", params, deadline, sink=sink, trace=_Trace(key))
        except ClientError as error:
            if missing(error):
                return None
            if unsatisfiable(error):
                return behind(error.response["ResponseMetadata"].get("HTTPHeaders", {}), start)
            raise
        return sink.got

    def put(self, operation: str, params: Mapping[str, Any], source: Source, *, deadline: float) -> dict[str, Any]:
        body: Any = source if len(source) else b""
        if operation != "PutObject" or not params.keys() <= _TRACED.keys():
            return self._full(operation, {**params, "Body": body}, deadline)
        # One trace for each kind of put: the condition and the kind of checksum are headers of it.
        kind = "PutObject" + "".join(sorted(params.keys() - {"Key"}))
        extra = {_TRACED[name]: value for name, value in params.items() if name != "Key"}
        extra["Content-Length"] = str(source.nbytes)
        key = params["Key"]
        answered = self._fast("PutObject", key, extra, deadline, source=source, kind=kind)
        if answered is not None:
            return {"ETag": answered[1].get("etag", "")}
        return self._full(operation, {**params, "Body": body}, deadline, trace=_Trace(key), kind=kind)

    def invoke(self, operation: str, params: Mapping[str, Any], *, deadline: float) -> dict[str, Any]:
        return self._full(operation, params, deadline)

    # Life.

    def close(self) -> None:
        self.transport.pool.close()
        self._boto.close()

    def after_fork(self) -> None:
        super().after_fork()
        self.transport.after_fork()


def _prepare(method: str, url: str, headers: dict[str, str], body: Any) -> Request:
    """A request of botocore's as bytes and views."""
    parts = urlsplit(url)
    origin = Origin(parts.scheme, parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80))
    target = f"{parts.path or '/'}{'?' + parts.query if parts.query else ''}"
    views: Sequence[memoryview] = ()
    length = 0
    if isinstance(body, Source):
        views, length = body.views, body.nbytes
    elif body:
        data = body if isinstance(body, bytes | bytearray) else _read_all(body)
        views, length = [memoryview(data)], len(data)
    lower = {name.lower() for name in headers}
    if "host" not in lower:
        headers = {"Host": parts.netloc, **headers}
    if "transfer-encoding" in lower:
        headers = {name: value for name, value in headers.items() if name.lower() != "transfer-encoding"}
    if "content-length" not in lower and (length or method in ("PUT", "POST")):
        headers = {**headers, "Content-Length": str(length)}
    return Request(origin, method, request_head(method, target, headers), views)


def _read_all(body: Any) -> bytes:
    data = body.read() if hasattr(body, "read") else body
    return data.encode() if isinstance(data, str) else bytes(data)


def _text(value: Any) -> str:
    return value.decode("latin-1") if isinstance(value, bytes) else str(value)


def uses_proxy(settings: Settings, endpoint: str) -> bool:
    """Whether the environment sends requests to the endpoint through a proxy, which botocore's own HTTP layer knows
    how to do and ours does not."""
    scheme, host = urlsplit(endpoint)[:2]
    if is_aws(endpoint):
        if settings.express:
            host = host.replace("s3.", f"s3express-{zone_of(settings.bucket)}.", 1)
        host = f"{settings.bucket}.{host}"
    return scheme in getproxies() and not proxy_bypass(host)
