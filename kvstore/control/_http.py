"""A small HTTP/1.1 client over `http.client`: connections kept, one deadline for everything, answers bounded."""

from __future__ import annotations

import http.client
import io
import json
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from kvstore.errors import ConfigError, TransientError
from kvstore.metrics import renew_after_fork

__all__ = ["Answer", "Connections", "parse"]

_MOST_ANSWER = 64 << 20
_KEPT = 8

_Place = tuple[int, int, int, str, Any]
"""Of `socket.getaddrinfo`."""


class Answer(NamedTuple):
    """An HTTP response, read to its end."""

    status: int
    body: bytes


class _Raw(io.RawIOBase):
    """Reads of a socket that end by a deadline, however many there are."""

    def __init__(self, sock: socket.socket, deadline: float) -> None:
        self._sock = sock
        self._file = sock.makefile("rb", buffering=0)  # keeps the socket open until it is closed, too
        self._deadline = deadline

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        self._file.close()
        super().close()

    def readinto(self, buffer: Any) -> int:
        self._sock.settimeout(_left(self._deadline))
        return self._file.readinto(buffer) or 0


class _Timed:
    """What `http.client.HTTPResponse` needs of a socket."""

    def __init__(self, sock: socket.socket, deadline: float) -> None:
        self._sock = sock
        self._deadline = deadline

    def makefile(self, *_: Any, **__: Any) -> io.BufferedReader:
        return io.BufferedReader(_Raw(self._sock, self._deadline))


def _response(deadline: float) -> Callable[..., http.client.HTTPResponse]:
    """What makes the response of a connection (`HTTPConnection.response_class`), with a deadline for its reads."""

    def make(sock: socket.socket, **given: Any) -> http.client.HTTPResponse:
        return http.client.HTTPResponse(_Timed(sock, deadline), **given)  # type: ignore[arg-type]

    return make


def _left(deadline: float) -> float:
    """Seconds. Raises `TimeoutError`: none."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("the deadline passed")
    return left


class _Names:
    """Resolves one name, by a deadline: the system's resolver has none. Whoever asks while it is at it waits for the
    same answer, so that a resolver that hangs holds one thread and not one for each call."""

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port
        self._lock = threading.Lock()
        self._asked: Future[Sequence[_Place]] | None = None

    def places(self, deadline: float) -> Sequence[_Place]:
        """Raises `OSError`: there is no such name, or no answer by the deadline (`TimeoutError`)."""
        try:  # an address needs no resolver
            return socket.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
        except socket.gaierror:
            pass
        with self._lock:
            asked = self._asked
            if asked is None:
                asked = self._asked = Future()
                threading.Thread(target=self._resolve, args=(asked,), name="kvstore-resolve", daemon=True).start()
        return asked.result(_left(deadline))

    def _resolve(self, asked: Future[Sequence[_Place]]) -> None:
        try:
            found = socket.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
        except Exception as error:  # noqa: BLE001 - whoever waits gets it
            self._forget()
            asked.set_exception(error)
        else:
            self._forget()
            asked.set_result(found)

    def _forget(self) -> None:
        with self._lock:
            self._asked = None


class Connections:
    """Connections to one server, kept between requests. Safe from any thread; a forked child makes its own.

    Args:
        url: "http://host:port" or "https://host:port", with a path in front of all paths if need be.
        ca: PEM file with the authorities to trust; "": those of the system.
        cert, key: PEM files to show to the server; "": none.

    Raises:
        ConfigError: the URL or a file makes no sense.
    """

    def __init__(self, url: str, *, ca: str = "", cert: str = "", key: str = "") -> None:
        try:
            parts = urlsplit(url)
            self._host, self._port = parts.hostname or "", parts.port
        except ValueError as error:
            raise ConfigError(f"the URL of a control API makes no sense: {error}") from None
        if parts.scheme not in ("http", "https") or not self._host or parts.query or parts.fragment:
            raise ConfigError(f"the URL of a control API is http://HOST:PORT or https://HOST:PORT, not {url[:200]!r}")
        if parts.username is not None:
            raise ConfigError("no secret stands in a URL: give the token as 'token', or in a token file")
        self.url = f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}"
        self._path = parts.path.rstrip("/")
        self._tls = _tls(ca, cert, key) if parts.scheme == "https" else None
        if self._tls is None and (ca or cert or key):
            raise ConfigError(f"TLS files are given, but the URL is {self.url}: write https://")
        default = http.client.HTTP_PORT if self._tls is None else http.client.HTTPS_PORT
        self._port = default if self._port is None else self._port
        self._after_fork()
        renew_after_fork(self)

    def _after_fork(self) -> None:
        self._lock = threading.Lock()
        self._kept: list[http.client.HTTPConnection] = []
        self._names = _Names(self._host, self._port or 0)

    def request(
        self, method: str, path: str, *, body: bytes | None, headers: dict[str, str], deadline: float, again: bool
    ) -> Answer:
        """One request and its answer.

        Args:
            again: may be sent a second time, if a kept connection proves to be closed.

        Raises:
            TransientError: nobody answers, or not by the deadline, or the answer is cut or too long.
        """
        while True:
            connection = self._take()
            kept = connection is not None
            try:
                if connection is None:
                    connection = self._connect(deadline)
                answer, reusable = self._exchange(connection, method, path, body, headers, deadline)
            except (OSError, http.client.HTTPException) as error:
                if connection is not None:
                    connection.close()
                cut = isinstance(error, ConnectionError | http.client.RemoteDisconnected)
                if kept and again and cut and time.monotonic() < deadline:
                    continue
                late = isinstance(error, TimeoutError) or time.monotonic() >= deadline
                text = "no answer by the deadline" if late else str(error) or type(error).__name__
                raise TransientError(f"{self.url}: {text}", operation="control", cause=error) from error
            except BaseException:
                if connection is not None:
                    connection.close()
                raise
            if reusable:
                self._keep(connection)
            else:
                connection.close()
            return answer

    def _connect(self, deadline: float) -> http.client.HTTPConnection:
        if self._tls is None:
            connection = http.client.HTTPConnection(self._host, self._port)
        else:
            connection = http.client.HTTPSConnection(self._host, self._port, context=self._tls)
        connection._create_connection = lambda *_: self._dial(deadline)  # type: ignore[attr-defined]
        connection.connect()
        return connection

    def _dial(self, deadline: float) -> socket.socket:
        """A connection to the first of the server's addresses that answers; each has its part of the time."""
        places = self._names.places(deadline)
        failure: OSError = OSError(f"{self._host} has no address")
        for number, (family, kind, protocol, _, address) in enumerate(places):
            sock = socket.socket(family, kind, protocol)
            try:
                sock.settimeout(_left(deadline) / (len(places) - number))
                sock.connect(address)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                sock.settimeout(_left(deadline))  # of the TLS handshake
            except OSError as error:
                sock.close()
                failure = error
            except BaseException:
                sock.close()
                raise
            else:
                return sock
        raise failure

    def _exchange(
        self, connection: http.client.HTTPConnection, method: str, path: str, body: bytes | None,
        headers: dict[str, str], deadline: float,
    ) -> tuple[Answer, bool]:  # fmt: skip
        connection.sock.settimeout(_left(deadline))  # of sending all of it
        try:
            connection.request(method, self._path + path, body=body, headers=headers)
        except (BrokenPipeError, ConnectionResetError):
            if body is None:
                raise  # else it may have refused the body (413), and said so
        connection.response_class = _response(deadline)  # type: ignore[assignment]
        response = connection.getresponse()
        content = response.read(_MOST_ANSWER + 1)
        if len(content) > _MOST_ANSWER:
            raise http.client.HTTPException(f"an answer of more than {_MOST_ANSWER >> 20} MiB")
        return Answer(response.status, content), not response.will_close

    def _take(self) -> http.client.HTTPConnection | None:
        while True:
            with self._lock:
                if not self._kept:
                    return None
                connection = self._kept.pop()
            readable, _, _ = select.select([connection.sock], [], [], 0) if connection.sock else ([1], [], [])
            if not readable:
                return connection
            connection.close()  # closed by the server, or it says what nobody asked

    def _keep(self, connection: http.client.HTTPConnection) -> None:
        with self._lock:
            if len(self._kept) < _KEPT:
                self._kept.append(connection)
                return
        connection.close()

    def close(self) -> None:
        """Close those that are kept."""
        with self._lock:
            kept, self._kept = self._kept, []
        for connection in kept:
            connection.close()


def _tls(ca: str, cert: str, key: str) -> ssl.SSLContext:
    if bool(cert) != bool(key):
        raise ConfigError("a certificate and its key go together")
    try:
        context = ssl.create_default_context(cafile=ca or None)
        if cert:
            context.load_cert_chain(cert, key)
    except (OSError, ssl.SSLError) as error:
        files = ", ".join(filter(None, (ca, cert, key)))
        raise ConfigError(f"the TLS files {files} cannot be used: {error}", cause=error) from error
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context


def parse(answer: Answer, url: str) -> Any:
    """The JSON of an answer. Raises `TransientError`: it is none."""
    try:
        return json.loads(answer.body)
    except (ValueError, RecursionError):
        text = f"{url} answers {answer.status} with something that is not JSON: is it a control API of kvstore?"
        raise TransientError(text, operation="control") from None
