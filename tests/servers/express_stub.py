"""S3 Express One Zone (a directory bucket) in memory: what differs from S3, and nothing of its speed.

What it insists on, from the AWS user guide (s3-express-differences, s3-express-optimizing-performance):

* CreateSession, HeadBucket and CopyObject are signed with the account's keys; everything else with the session's keys
  and `x-amz-s3session-token`; service `s3express`. Sessions live `ttl_s` seconds (5 minutes at AWS), and are
  `ExpiredToken` afterwards.
* Every signature is verified, and so are SHA-256 payload hashes and CRC32 checksums, in headers and in trailers.
* ETags are random. No Content-MD5, versions, tags, ACLs.
* ListObjectsV2: no order, no StartAfter, a prefix that ends in "/", no other delimiter, prefixes of unfinished uploads
  listed.
* Part numbers are consecutive from 1. PUT with If-None-Match, DELETE with If-Match, RenameObject, append.
* A bucket that slept answers 503 first: `sleep`.

boto3: `endpoint_url=stub.endpoint`, path style, bucket "kv--usw2-az1--x-s3"; buckets of that form exist by themselves.
"""

from __future__ import annotations

import hashlib
import random
import re
import secrets
import socket
import threading
import time
import zlib
from base64 import b64encode
from collections import Counter
from dataclasses import dataclass, field
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, unquote, urlsplit
from xml.sax.saxutils import escape, unescape

from tests.servers.sigv4 import canonical_request, parse_authorization, signature

__all__ = ["BUCKET", "ExpressStub", "Seen"]

BUCKET = "kv--usw2-az1--x-s3"
_BY_ACCOUNT = ("create_session", "head_bucket", "copy")  # signed with the account's keys, as their API pages say
_BUCKET = re.compile(r"[a-z0-9-]+--[a-z0-9-]+--x-s3")


class Seen(NamedTuple):
    """One request: what was asked for, and the access key it was signed with."""

    operation: str
    key: str
    access_key: str
    bucket: str


@dataclass
class _Object:
    body: bytes
    etag: str
    kept: dict[str, str]  # headers that come back with it


@dataclass
class _Session:
    bucket: str
    token: str
    access_key: str
    secret_key: str
    expires: float


@dataclass
class _Upload:
    key: str
    kept: dict[str, str]
    parts: dict[int, bytes] = field(default_factory=dict)


class _Refused(Exception):
    def __init__(self, status: int, code: str, message: str = "") -> None:
        super().__init__(code)
        self.status, self.code, self.message = status, code, message or code


class ExpressStub:
    """A running stub; a context manager.

    Attributes:
        endpoint: "http://127.0.0.1:PORT".
        ttl_s: how long sessions live that are made from now on.
        counts: "create_session", "requests", "expired", "refused" so far.
        seen: every request, in order.
        gate: CreateSession waits until it is set.
    """

    access_key = "testkey"
    secret_key = "testsecret"
    region = "us-west-2"

    def __init__(self, *, ttl_s: float = 300.0) -> None:
        self.ttl_s = ttl_s
        self.counts: Counter[str] = Counter()
        self.seen: list[Seen] = []
        self.objects: dict[tuple[str, str], _Object] = {}
        self.uploads: dict[str, _Upload] = {}
        self.lock = threading.RLock()
        self.gate = threading.Event()
        self.gate.set()
        self._sessions: dict[str, _Session] = {}
        self._asleep = 0
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.stub = self
        self.port: int = self._server.server_address[1]
        self.endpoint = f"http://127.0.0.1:{self.port}"
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, name="express-stub", daemon=True
        )
        self._thread.start()

    def sleep(self, requests: int) -> None:
        """The bucket is inactive: the next so many requests are answered 503."""
        with self.lock:
            self._asleep = requests

    def expire_sessions(self) -> None:
        """All sessions of now are over, whatever their Expiration said."""
        with self.lock:
            for session in self._sessions.values():
                session.expires = 0.0

    def seed(self, bucket: str, key: str, body: bytes) -> None:
        """Put an object there behind everybody's back."""
        with self.lock:
            self.objects[bucket, key] = _Object(body, _random_etag(), {})

    def stop(self) -> None:
        self.gate.set()
        self._server.shutdown()
        self._server.hang_up()
        self._server.server_close()
        self._thread.join(10)

    def __enter__(self) -> ExpressStub:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    # What the handler asks.

    def awake(self) -> bool:
        with self.lock:
            if self._asleep:
                self._asleep -= 1
                return False
        return True

    def new_session(self, bucket: str) -> _Session:
        session = _Session(bucket, secrets.token_hex(24), f"ASIA{secrets.token_hex(8).upper()}", secrets.token_hex(20),
                           time.time() + self.ttl_s)  # fmt: skip
        with self.lock:
            self._sessions[session.token] = session
            self.counts["create_session"] += 1
        return session

    def secret_of(self, access_key: str, token: str | None, bucket: str, *, by_account: bool) -> str:
        """The secret key a request must be signed with."""
        if by_account:
            if access_key != self.access_key:
                raise _Refused(403, "InvalidAccessKeyId")
            return self.secret_key
        session = self._sessions.get(token or "")
        if session is None or (session.access_key, session.bucket) != (access_key, bucket):
            raise _Refused(403, "AccessDenied", "no x-amz-s3session-token, or one of other credentials or buckets")
        if session.expires < time.time():
            with self.lock:
                self.counts["expired"] += 1
            raise _Refused(400, "ExpiredToken", "The provided token has expired.")
        return session.secret_key


class _Server(ThreadingHTTPServer):
    request_queue_size = 256
    daemon_threads = False  # joined by server_close
    stub: ExpressStub

    def __init__(self, *arguments: Any) -> None:
        self._sockets: set[socket.socket] = set()
        super().__init__(*arguments)

    def process_request(self, request: Any, client_address: Any) -> None:
        self._sockets.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._sockets.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        return  # the client went away

    def hang_up(self) -> None:
        for each in list(self._sockets):
            try:
                each.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass


def _random_etag() -> str:
    return f'"{random.getrandbits(128):032x}"'


def _xml(root: str, *children: str | tuple[str, object]) -> bytes:
    inner = "".join(c if isinstance(c, str) else f"<{c[0]}>{escape(str(c[1]))}</{c[0]}>" for c in children)
    space = "" if root == "Error" else ' xmlns="http://s3.amazonaws.com/doc/2006-03-01/"'
    return f'<?xml version="1.0" encoding="UTF-8"?><{root}{space}>{inner}</{root}>'.encode()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = 1 << 16
    disable_nagle_algorithm = True
    server: _Server
    headers: Message

    def log_message(self, *_: object) -> None:
        return

    def _answer(self, status: int, body: bytes = b"", headers: dict[str, str] | None = None) -> None:
        self.send_response_only(status)
        fields = {"x-amz-request-id": "STUB", **(headers or {})}
        fields.setdefault("Content-Length", str(len(body)))
        if body[:1] == b"<":
            fields.setdefault("Content-Type", "application/xml")
        for name, value in fields.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _serve(self) -> None:
        stub = self.server.stub
        self._name = {name.lower(): value for name, value in self.headers.items()}
        body, claimed = self._body()
        parts = urlsplit(self.path)
        self._query = dict(parse_qsl(parts.query, keep_blank_values=True))
        path = unquote(parts.path).lstrip("/")
        host = re.match(r"(.+--x-s3)\.", self._name.get("host", ""))
        self._bucket, _, self._key = (host[1], "", path) if host else path.partition("/")
        operation = self._operation()
        with stub.lock:
            stub.counts["requests"] += 1
        try:
            credential = parse_authorization(self._name.get("authorization", ""))
            with stub.lock:
                stub.seen.append(Seen(operation, self._key, credential.access_key if credential else "", self._bucket))
            if not _BUCKET.fullmatch(self._bucket):
                raise _Refused(400, "InvalidBucketName", self._bucket)
            if not stub.awake():
                raise _Refused(503, "SlowDown", "the bucket is being activated")
            self._authenticate(parts.path, parts.query, body, by_account=operation in _BY_ACCOUNT)
            self._check_payload(body, claimed)
            if operation == "create_session":
                stub.gate.wait(60)
            with stub.lock:
                getattr(self, f"_{operation}")(body)
        except _Refused as no:
            with stub.lock:
                stub.counts["refused"] += 1
            text = b"" if self.command == "HEAD" else _xml("Error", ("Code", no.code), ("Message", no.message))
            self._answer(no.status, text)

    do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = _serve

    def _operation(self) -> str:
        query, method = self._query, self.command
        if any(name in query for name in ("versioning", "tagging", "acl", "versionId", "versions", "lifecycle")):
            return "unsupported"
        if not self._key:
            if method == "GET":
                return "create_session" if "session" in query else "list_uploads" if "uploads" in query else "list"
            return {"PUT": "create_bucket", "HEAD": "head_bucket", "POST": "delete_objects"}.get(method, "unsupported")
        if method == "PUT":
            if "uploadId" in query:
                return "upload_part"
            return "rename" if "renameObject" in query else "copy" if "x-amz-copy-source" in self._name else "put"
        if method == "POST":
            return "create_upload" if "uploads" in query else "complete_upload"
        if method == "DELETE":
            return "abort_upload" if "uploadId" in query else "delete"
        return {"GET": "get", "HEAD": "head"}[method]

    # Bodies, signatures, checksums.

    def _body(self) -> tuple[bytes, dict[str, str]]:
        """The body, and the checksums claimed for it in headers or trailers."""
        if self._name.get("expect", "").lower() == "100-continue":
            self.wfile.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            self.wfile.flush()
        if "chunked" in self._name.get("transfer-encoding", "").lower():
            pieces = []
            while size := int(self.rfile.readline().split(b";")[0], 16):
                pieces.append(self.rfile.read(size))
                self.rfile.readline()
            while self.rfile.readline().strip():
                pass
            body = b"".join(pieces)
        else:
            body = self.rfile.read(int(self._name.get("content-length", 0)))
        claimed = {name: value for name, value in self._name.items() if name.startswith("x-amz-checksum-")}
        if self._name.get("x-amz-content-sha256", "").startswith("STREAMING"):
            pieces, at = [], 0
            while True:
                end = body.index(b"\r\n", at)
                size = int(body[at:end].split(b";")[0], 16)
                at = end + 2
                if not size:
                    break
                pieces.append(body[at : at + size])
                at += size + 2
            for line in body[at:].decode("latin-1").split("\r\n"):
                name, colon, value = line.partition(":")
                if colon:
                    claimed[name.strip().lower()] = value.strip()
            body = b"".join(pieces)
        return body, claimed

    def _authenticate(self, path: str, query: str, body: bytes, *, by_account: bool) -> None:
        credential = parse_authorization(self._name.get("authorization", ""))
        if credential is None:
            raise _Refused(403, "AccessDenied", "not signed with SigV4")
        if credential.service != "s3express":
            raise _Refused(403, "AccessDenied", f"the scope's service must be s3express, not {credential.service}")
        token = self._name.get("x-amz-s3session-token")
        if not by_account and "x-amz-s3session-token" not in credential.signed_headers:
            raise _Refused(403, "AccessDenied", "x-amz-s3session-token is not sent, or not signed")
        secret = self.server.stub.secret_of(credential.access_key, token, self._bucket, by_account=by_account)
        canonical = canonical_request(self.command, path, query, self._name, credential.signed_headers)
        if signature(secret, self._name.get("x-amz-date", ""), credential, canonical) != credential.signature:
            raise _Refused(403, "SignatureDoesNotMatch")
        payload = self._name.get("x-amz-content-sha256", "UNSIGNED-PAYLOAD")
        if re.fullmatch(r"[0-9a-f]{64}", payload) and hashlib.sha256(body).hexdigest() != payload:
            raise _Refused(400, "XAmzContentSHA256Mismatch")

    def _check_payload(self, body: bytes, claimed: dict[str, str]) -> None:
        if "content-md5" in self._name:
            raise _Refused(400, "InvalidRequest", "Content-MD5 is not supported for directory buckets")
        crc = claimed.get("x-amz-checksum-crc32")
        if crc is not None and crc != b64encode(zlib.crc32(body).to_bytes(4, "big")).decode():
            raise _Refused(400, "BadDigest", "the CRC32 you specified did not match what we received")

    def _kept(self) -> dict[str, str]:
        return {
            name: value
            for name, value in self._name.items()
            if name.startswith("x-amz-meta-")
            or name == "content-type"
            or (name.startswith("x-amz-checksum-") and name != "x-amz-checksum-algorithm")
        }

    # Operations. The stub's lock is held.

    @property
    def _place(self) -> tuple[str, str]:
        return self._bucket, self._key

    def _unsupported(self, _: bytes) -> None:
        raise _Refused(501, "NotImplemented")

    def _create_session(self, _: bytes) -> None:
        session = self.server.stub.new_session(self._bucket)
        expires = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(session.expires))
        fields = [("SessionToken", session.token), ("SecretAccessKey", session.secret_key),
                  ("AccessKeyId", session.access_key), ("Expiration", expires)]  # fmt: skip
        self._answer(200, _xml("CreateSessionResult", "<Credentials>", *fields, "</Credentials>"))

    def _create_bucket(self, _: bytes) -> None:
        self._answer(200)

    _head_bucket = _create_bucket

    def _find(self) -> _Object:
        found = self.server.stub.objects.get(self._place)
        if found is None:
            raise _Refused(404, "NoSuchKey")
        wanted = self._name.get("if-match")
        if wanted not in (None, "*", found.etag):
            raise _Refused(412, "PreconditionFailed")
        return found

    def _get(self, _: bytes) -> None:
        found = self._find()
        size = len(found.body)
        headers = {"ETag": found.etag, "Accept-Ranges": "bytes", "Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT"}
        match = re.fullmatch(r"bytes=(\d*)-(\d*)", self._name.get("range", ""))
        if match:
            low = int(match[1]) if match[1] else max(0, size - int(match[2]))
            high = min(size, int(match[2]) + 1) if match[1] and match[2] else size
            if low >= size:
                raise _Refused(416, "InvalidRange")
            kept = {name: value for name, value in found.kept.items() if "checksum" not in name}
            headers |= {"Content-Range": f"bytes {low}-{high - 1}/{size}", **kept}
            if self.command == "HEAD":
                headers["Content-Length"] = str(high - low)
            self._answer(206, b"" if self.command == "HEAD" else found.body[low:high], headers)
            return
        headers |= {"Content-Length": str(size), **found.kept}
        self._answer(200, b"" if self.command == "HEAD" else found.body, headers)

    _head = _get

    def _refuse_existing(self) -> None:
        objects = self.server.stub.objects
        if self._name.get("if-none-match") == "*" and self._place in objects:
            raise _Refused(412, "PreconditionFailed")
        if "if-match" in self._name:
            self._find()

    def _put(self, body: bytes) -> None:
        self._refuse_existing()
        objects, kept = self.server.stub.objects, self._kept()
        offset = self._name.get("x-amz-write-offset-bytes")
        if offset is not None:
            before = objects[self._place].body if self._place in objects else b""
            if int(offset) != len(before):
                raise _Refused(400, "InvalidWriteOffset")
            body = before + body
            kept = {name: value for name, value in kept.items() if "checksum" not in name}
        self._store(body, kept)

    def _store(self, body: bytes, kept: dict[str, str], root: str | None = None) -> None:
        etag = _random_etag()
        self.server.stub.objects[self._place] = _Object(body, etag, kept)
        checksums = {name: value for name, value in kept.items() if "checksum" in name}
        text = _xml(root, ("ETag", etag), ("LastModified", "2026-01-01T00:00:00.000Z")) if root else b""
        self._answer(200, text, {"ETag": etag, **checksums})

    def _source(self, name: str) -> tuple[str, str]:
        text = unquote(self._name[name]).lstrip("/")
        return self._bucket, text.removeprefix(f"{self._bucket}/")

    def _copy(self, _: bytes) -> None:
        self._refuse_existing()
        found = self.server.stub.objects.get(self._source("x-amz-copy-source"))
        if found is None:
            raise _Refused(404, "NoSuchKey")
        if self._name.get("x-amz-copy-source-if-match") not in (None, found.etag):
            raise _Refused(412, "PreconditionFailed")
        replace = self._name.get("x-amz-metadata-directive") == "REPLACE"
        self._store(found.body, self._kept() if replace else dict(found.kept), "CopyObjectResult")

    def _rename(self, _: bytes) -> None:
        self._refuse_existing()
        objects, source = self.server.stub.objects, self._source("x-amz-rename-source")
        if source not in objects:
            raise _Refused(404, "NoSuchKey")
        objects[self._place] = objects.pop(source)
        self._answer(200)

    def _delete(self, _: bytes) -> None:
        objects = self.server.stub.objects
        if self._place in objects:
            self._find()
            del objects[self._place]
        self._answer(204)

    def _delete_objects(self, body: bytes) -> None:
        text = body.decode()
        asked = [(name, tag) for name, _, tag in re.findall("<Key>(.*?)</Key>(<ETag>(.*?)</ETag>)?", text)]
        if len(asked) > 1000:
            raise _Refused(400, "MalformedXML", "more than 1000 keys")
        objects, names, errors = self.server.stub.objects, list[str](), list[str]()
        for name, tag in asked:
            found = objects.get((self._bucket, unescape(name)))
            if found is not None and tag and unescape(tag, {"&quot;": '"'}) != found.etag:
                errors.append(f"<Error><Key>{name}</Key><Code>PreconditionFailed</Code></Error>")
                continue
            objects.pop((self._bucket, unescape(name)), None)
            names.append(unescape(name))
        quiet = "<Quiet>true</Quiet>" in text
        deleted = [] if quiet else [f"<Deleted><Key>{escape(name)}</Key></Deleted>" for name in names]
        self._answer(200, _xml("DeleteResult", *deleted, *errors))

    def _list(self, _: bytes) -> None:
        stub, query = self.server.stub, self._query
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        if (prefix and not prefix.endswith("/")) or delimiter not in ("", "/") or "start-after" in query:
            raise _Refused(400, "InvalidRequest", "directory buckets: prefix ends in /, delimiter /, no start-after")
        names = [name for bucket, name in stub.objects if bucket == self._bucket and name.startswith(prefix)]
        names.sort(key=lambda name: hashlib.sha256(name.encode()).digest())  # stable, and in no useful order
        common: list[str] = []
        if delimiter:
            pending = [upload.key for upload in stub.uploads.values() if upload.key.startswith(prefix)]
            tails = [name[len(prefix) :] for name in (*names, *pending)]
            common = list(dict.fromkeys(tail.split("/")[0] + "/" for tail in tails if "/" in tail))
            names = [name for name in names if "/" not in name[len(prefix) :]]
        start, most = int(query.get("continuation-token", 0)), int(query.get("max-keys", 1000))
        page, more = names[start : start + most], start + most < len(names)
        fields: list[str | tuple[str, object]] = [
            ("Name", self._bucket), ("Prefix", prefix), ("KeyCount", len(page)), ("MaxKeys", most),
            ("IsTruncated", str(more).lower()),
        ]  # fmt: skip
        if more:
            fields.append(("NextContinuationToken", start + most))
        for name in page:
            found = stub.objects[self._bucket, name]
            fields.append(
                f"<Contents><Key>{escape(name)}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified>"
                f"<ETag>{escape(found.etag)}</ETag><Size>{len(found.body)}</Size>"
                "<StorageClass>EXPRESS_ONEZONE</StorageClass></Contents>"
            )
        if not start:
            fields += [f"<CommonPrefixes><Prefix>{escape(prefix + each)}</Prefix></CommonPrefixes>" for each in common]
        self._answer(200, _xml("ListBucketResult", *fields))

    def _list_uploads(self, _: bytes) -> None:
        entries = [
            f"<Upload><Key>{escape(upload.key)}</Key><UploadId>{number}</UploadId>"
            "<Initiated>2026-01-01T00:00:00.000Z</Initiated></Upload>"
            for number, upload in self.server.stub.uploads.items()
        ]
        self._answer(200, _xml("ListMultipartUploadsResult", ("IsTruncated", "false"), *entries))

    def _create_upload(self, _: bytes) -> None:
        number = secrets.token_hex(8)
        self.server.stub.uploads[number] = _Upload(self._key, self._kept())
        self._answer(200, _xml("InitiateMultipartUploadResult", ("Key", self._key), ("UploadId", number)))

    def _upload(self) -> _Upload:
        found = self.server.stub.uploads.get(self._query["uploadId"])
        if found is None or found.key != self._key:
            raise _Refused(404, "NoSuchUpload")
        return found

    def _upload_part(self, body: bytes) -> None:
        self._upload().parts[int(self._query["partNumber"])] = body
        self._answer(200, headers={"ETag": _random_etag()})

    def _complete_upload(self, _: bytes) -> None:
        upload = self._upload()
        self._refuse_existing()
        if sorted(upload.parts) != list(range(1, len(upload.parts) + 1)):
            raise _Refused(400, "InvalidPart", "part numbers must be consecutive from 1 in directory buckets")
        del self.server.stub.uploads[self._query["uploadId"]]
        body = b"".join(upload.parts[number] for number in sorted(upload.parts))
        self._store(
            body, {n: v for n, v in upload.kept.items() if "checksum" not in n}, "CompleteMultipartUploadResult"
        )

    def _abort_upload(self, _: bytes) -> None:
        self._upload()
        del self.server.stub.uploads[self._query["uploadId"]]
        self._answer(204)
