"""S3 for tests: a moto server in this process, and backends and plain clients on it."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import secrets
import socket
import ssl
import struct
import threading
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO, NamedTuple

import boto3
from botocore.config import Config
from botocore.exceptions import ClientError
from moto.server import ThreadedMotoServer

from kvstore.keys import Key
from kvstore_backends.s3 import S3Backend
from kvstore_backends.s3.options import Settings

BUCKET = "kvstore-tests"
_BUFFER = "MOTO_S3_DEFAULT_KEY_BUFFER_SIZE"
ACCESS_KEY, SECRET_KEY = "testkey", "hunter2-testsecret"


@contextlib.contextmanager
def moto_server() -> Iterator[str]:
    """The endpoint of a moto server that holds the bucket `BUCKET`. It takes any credentials."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    before = os.environ.get(_BUFFER)
    os.environ[_BUFFER] = str(256 << 20)  # else moto keeps large objects in temporary files, which look like leaks
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        endpoint = f"http://{host}:{port}"
        with plain_client(endpoint) as client:
            client.create_bucket(Bucket=BUCKET)
        for thread in threading.enumerate():
            if "process_request_thread" in thread.name:  # the server's end of that connection
                thread.join(5)
        yield endpoint
    finally:
        server.stop()
        if before is None:
            del os.environ[_BUFFER]
        else:
            os.environ[_BUFFER] = before


@functools.cache
def _session() -> Any:
    return boto3.Session()  # keeps the service models, which take 0.1 s to read


@contextlib.contextmanager
def plain_client(endpoint: str) -> Iterator[Any]:
    """A stock boto3 client, to look behind the backend's back."""
    client = _session().client(
        "s3", endpoint_url=endpoint, region_name="us-east-1", aws_access_key_id=ACCESS_KEY,
        aws_secret_access_key=SECRET_KEY, config=Config(s3={"addressing_style": "path"}),
    )  # fmt: skip
    try:
        yield client
    finally:
        client.close()


def unique_prefix() -> str:
    return f"{secrets.token_hex(6)}/"


def settings(endpoint: str, prefix: str | None = None, **options: Any) -> Settings:
    given = {
        "bucket": BUCKET, "prefix": unique_prefix() if prefix is None else prefix, "endpoint_url": endpoint,
        "region": "us-east-1", "addressing": "path", "connect_timeout": 5.0, "access_key_id": ACCESS_KEY,
        "secret_access_key": SECRET_KEY, **options,
    }  # fmt: skip
    return Settings(**given)


def open_s3(endpoint: str, prefix: str | None = None, **options: Any) -> S3Backend:
    return S3Backend(settings(endpoint, prefix, **options))


def put_object(endpoint: str, backend: S3Backend, key: Key, data: bytes) -> None:
    with plain_client(endpoint) as client:
        client.put_object(Bucket=BUCKET, Key=backend.object_name(key), Body=data)


def read_object(endpoint: str, backend: S3Backend, key: Key) -> bytes | None:
    with plain_client(endpoint) as client:
        try:
            answer = client.get_object(Bucket=BUCKET, Key=backend.object_name(key))
        except ClientError as error:
            if error.response["Error"]["Code"] == "NoSuchKey":
                return None
            raise
        data: bytes = answer["Body"].read()
        return data


class Asked(NamedTuple):
    """A request that a `ScriptedServer` got; header names in lower case."""

    method: str
    target: str
    headers: dict[str, str]
    body: bytes
    connection: int

    @property
    def path(self) -> str:
        return self.target.partition("?")[0]


class Raw(NamedTuple):
    """An answer as bytes, and what happens to the connection then: "keep", "close", "reset" or "hang"."""

    data: bytes
    then: str = "keep"


def answer(status: int, body: bytes = b"", **headers: str) -> Raw:
    """An ordinary answer with Content-Length. `etag="x"` becomes `ETag: x`."""
    fields = {"content-length": str(len(body)), **{name.replace("_", "-"): text for name, text in headers.items()}}
    head = "".join(f"{name}: {text}\r\n" for name, text in fields.items())
    return Raw(f"HTTP/1.1 {status} X\r\n{head}\r\n".encode() + body)


def error_answer(status: int, code: str, **headers: str) -> Raw:
    """An error of S3's."""
    body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>said so</Message></Error>".encode()
    return answer(status, body, content_type="application/xml", **headers)


def range_of(asked: Asked, data: bytes, etag: str = '"v1"') -> Raw:
    """The answer to a ranged GET of `data`."""
    first, _, last = asked.headers["range"].removeprefix("bytes=").partition("-")
    start, end = int(first), min(int(last) + 1, len(data))
    if start >= len(data):
        return error_answer(416, "InvalidRange")
    return answer(206, data[start:end], etag=etag, content_range=f"bytes {start}-{end - 1}/{len(data)}")


class ScriptedServer:
    """An HTTP server whose answers are a function of the request. `asked` holds all requests, in order."""

    def __init__(self, script: Callable[[Asked], Raw], *, tls: ssl.SSLContext | None = None) -> None:
        self.asked: list[Asked] = []
        self.connections = 0
        self._script = script
        self._tls = tls
        self._hung = threading.Event()
        self._lock = threading.Lock()
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.endpoint = f"{'https' if tls else 'http'}://127.0.0.1:{self.port}"

    def __enter__(self) -> ScriptedServer:
        self._threads.append(threading.Thread(target=self._accept, daemon=True))
        self._threads[0].start()
        return self

    def __exit__(self, *_: object) -> None:
        self._hung.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._threads[0].join(5)
        with self._lock:
            sockets = list(self._sockets)
        for sock in sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads[1:]:
            thread.join(5)
        for sock in sockets:
            sock.close()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            with self._lock:
                self.connections += 1
                self._sockets.append(sock)
                number = self.connections
            thread = threading.Thread(target=self._serve, args=(sock, number), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _serve(self, sock: socket.socket, number: int) -> None:
        with contextlib.suppress(OSError, ValueError):
            if self._tls is not None:
                sock = self._tls.wrap_socket(sock, server_side=True)
                with self._lock:
                    self._sockets.append(sock)
            with sock.makefile("rb") as file:
                while (asked := _read_request(file, number)) is not None:
                    with self._lock:
                        self.asked.append(asked)
                    raw = self._script(asked)
                    sock.sendall(raw.data)
                    if raw.then == "hang":
                        self._hung.wait()
                    if raw.then == "reset":
                        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    if raw.then != "keep":
                        break
        sock.close()


def _read_request(file: BinaryIO, connection: int) -> Asked | None:
    line = file.readline().decode("latin-1").split()
    if len(line) < 2:
        return None
    headers: dict[str, str] = {}
    while (text := file.readline().decode("latin-1").strip()) != "":
        name, _, value = text.partition(":")
        headers[name.lower()] = value.strip()
    body = file.read(int(headers.get("content-length", 0)))
    return Asked(line[0], line[1], headers, body, connection)
