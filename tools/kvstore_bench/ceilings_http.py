"""What plain sockets do with the same objects: the ceiling next to `s3://` results.

This file imports nothing of kvstore. A request is one `sendall` of a head that was made before the clock started
(presigned by boto3, so that signing costs nothing in the timing), a body is `sendall` of the caller's memory or
`recv_into` it, on one keep-alive connection per lane. Nothing is retried, checked or hedged: whatever is not a plain
success ends the measurement with an `OSError`.
"""

from __future__ import annotations

import itertools
import os
import socket
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from .ceilings import Job, split

__all__ = ["Connection", "HttpGet", "HttpPlace", "HttpPut"]

_EXPIRES_S = 6 * 3600
_HEAD_MAX = 64 << 10
_TIMEOUT_S = 60.0
_DELETE_MOST = 1000


@dataclass
class HttpPlace:
    """A bucket, by boto3's words: what the ceiling's own objects are called and how their URLs are signed.

    Attributes:
        prefix: of the names of the objects, without a slash at its end.
        client: arguments of `boto3.Session.client("s3", …)`: region_name, endpoint_url, verify, config, …
        session: arguments of `boto3.Session`: profile_name, aws_access_key_id, …
    """

    bucket: str
    prefix: str
    client: Mapping[str, Any] = field(default_factory=dict, repr=False)
    session: Mapping[str, Any] = field(default_factory=dict, repr=False)

    def open(self) -> Any:
        """A boto3 client."""
        import boto3

        return boto3.Session(**self.session).client("s3", **self.client)

    def connect(self, url: str) -> Connection:
        """A connection to where a presigned URL leads."""
        parts = urlsplit(url)
        verify = self.client.get("verify")
        return Connection(parts.scheme, parts.hostname or "", parts.port, verify if isinstance(verify, str) else None)


class Connection:
    """One keep-alive connection, TLS or not."""

    def __init__(self, scheme: str, host: str, port: int | None, cafile: str | None) -> None:
        sock = socket.create_connection((host, port or (443 if scheme == "https" else 80)), timeout=_TIMEOUT_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sock = sock
        self._flags: int = socket.MSG_WAITALL
        if scheme == "https":
            context = ssl.create_default_context(cafile=cafile or os.environ.get("AWS_CA_BUNDLE"))
            self._sock = context.wrap_socket(sock, server_hostname=host)
            self._flags = 0
        self._head = bytearray(_HEAD_MAX)
        self._view = memoryview(self._head)

    def get(self, request: bytes, dst: memoryview) -> None:
        """Send `request` and receive a body of exactly `len(dst)` bytes.

        Raises:
            OSError: the answer is not 200, or another length.
        """
        self._sock.sendall(request)
        length, have, start = self._answer()
        if length != len(dst):
            raise OSError(f"the raw HTTP ceiling got {length} bytes where {len(dst)} were expected")
        early = have - start
        dst[:early] = self._view[start:have]
        receive, flags, done = self._sock.recv_into, self._flags, early
        while done < length:
            count = receive(dst[done:], length - done, flags)
            if not count:
                raise OSError(f"the raw HTTP ceiling's body ended after {done} of {length} bytes")
            done += count

    def put(self, request: bytes, src: memoryview) -> None:
        """Send `request` and the body, and receive the answer. Raises `OSError` if it is not 200."""
        self._sock.sendall(request)
        self._sock.sendall(src)
        length, have, start = self._answer()
        left = length - (have - start)
        while left > 0:
            left -= self._sock.recv_into(self._view, min(left, _HEAD_MAX)) or left

    def _answer(self) -> tuple[int, int, int]:
        """The body's length, how many bytes have come, and where in them the body begins."""
        have = 0
        while (end := self._head.find(b"\r\n\r\n", 0, have)) < 0:
            count = self._sock.recv_into(self._view[have:])
            if not count:
                raise OSError("the server closed a connection of the raw HTTP ceiling")
            have += count
        lines = self._head[: end + 2].lower()
        if lines[9:12] != b"200":
            status = bytes(lines.split(b"\r\n")[0]).decode("latin-1")
            raise OSError(f"the raw HTTP ceiling was answered {status!r}")
        at = lines.find(b"\r\ncontent-length:")
        length = int(lines[at + 17 : lines.find(b"\r\n", at + 2)]) if at >= 0 else 0
        return length, have, end + 4

    def close(self) -> None:
        self._sock.close()


class _Side:
    """What both directions share: names, presigned requests, connections by lane."""

    def __init__(self, place: HttpPlace, count: int) -> None:
        self._place = place
        self._count = count
        self._client = place.open()
        self._connections: list[Connection] = []
        self._serial = itertools.count()
        self._live: list[str] = []

    def _names(self) -> list[str]:
        turn = next(self._serial)
        return [f"{self._place.prefix}/{turn}-{index}" for index in range(self._count)]

    def _request(self, operation: str, name: str, length: int | None = None) -> tuple[bytes, str]:
        params = {"Bucket": self._place.bucket, "Key": name}
        url = self._client.generate_presigned_url(operation, Params=params, ExpiresIn=_EXPIRES_S)
        parts = urlsplit(url)
        lines = [f"{'GET' if length is None else 'PUT'} {parts.path}?{parts.query} HTTP/1.1", f"Host: {parts.netloc}"]
        if length is not None:
            lines.append(f"Content-Length: {length}")
        return "\r\n".join([*lines, "", ""]).encode("ascii"), url

    def _lanes(self, count: int, url: str) -> list[Connection]:
        while len(self._connections) < count:
            self._connections.append(self._place.connect(url))
        return self._connections[:count]

    def _writing(self, sources: Sequence[memoryview], lanes: int) -> list[Job]:
        names = self._names()
        requests = [self._request("put_object", name, len(src)) for name, src in zip(names, sources, strict=True)]
        plan = [(request, src) for (request, _), src in zip(requests, sources, strict=True)]
        self._live = [*self._live, *names]
        parts = split(len(plan), lanes)
        return [
            _put_job(connection, plan[part.start : part.stop])
            for part, connection in zip(parts, self._lanes(len(parts), requests[0][1]), strict=True)
        ]

    def _delete(self) -> None:
        """Remove what this side has put."""
        from botocore.exceptions import BotoCoreError, ClientError

        live, self._live = self._live, []
        for at in range(0, len(live), _DELETE_MOST):
            objects = [{"Key": name} for name in live[at : at + _DELETE_MOST]]
            try:
                self._client.delete_objects(Bucket=self._place.bucket, Delete={"Objects": objects, "Quiet": True})
            except (BotoCoreError, ClientError) as error:
                raise OSError(f"objects of the raw HTTP ceiling could not be deleted: {error}") from error

    def close(self) -> None:
        connections, self._connections = self._connections, []
        for connection in connections:
            connection.close()
        if self._live:
            self._delete()
        self._client.close()


def _get_job(connection: Connection, plan: Sequence[tuple[bytes, memoryview]]) -> Job:
    def job() -> None:
        for request, dst in plan:
            connection.get(request, dst)

    return job


def _put_job(connection: Connection, plan: Sequence[tuple[bytes, memoryview]]) -> Job:
    def job() -> None:
        for request, src in plan:
            connection.put(request, src)

    return job


class HttpGet(_Side):
    """GET of objects that it puts there itself, into `destinations`."""

    name = "raw http"
    repeatable = True

    def __init__(self, place: HttpPlace, sources: Sequence[memoryview], destinations: Sequence[memoryview]) -> None:
        super().__init__(place, len(sources))
        self._destinations = destinations
        try:
            for job in self._writing(sources, 1):
                job()
            requests = [self._request("get_object", name) for name in self._live]
        except BaseException:
            self.close()
            raise
        self._plan = [(request, dst) for (request, _), dst in zip(requests, destinations, strict=True)]
        self._url = requests[0][1]

    def jobs(self, lanes: int) -> list[Job]:
        parts = split(len(self._plan), lanes)
        return [
            _get_job(connection, self._plan[part.start : part.stop])
            for part, connection in zip(parts, self._lanes(len(parts), self._url), strict=True)
        ]

    def settle(self, rounds: int) -> int:
        return rounds * sum(map(len, self._destinations))


class HttpPut(_Side):
    """PUT of `sources` under new names; `settle` deletes them again."""

    name = "raw http"
    repeatable = False

    def __init__(self, place: HttpPlace, sources: Sequence[memoryview]) -> None:
        super().__init__(place, len(sources))
        self._sources = sources

    def jobs(self, lanes: int) -> list[Job]:
        return self._writing(self._sources, lanes)

    def settle(self, rounds: int) -> int:
        self._delete()
        return rounds * sum(map(len, self._sources))
