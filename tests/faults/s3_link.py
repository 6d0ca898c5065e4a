"""A bare backend behind a bad link, one record, and one call of each operation. For the tests of S3's faults."""

from __future__ import annotations

import http.client
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from kvstore.backend import Outcome, Status
from kvstore.errors import BackendError
from kvstore_backends.s3 import S3Backend
from tests.servers.fault_proxy import FaultProxy
from tests.servers.null_server import NullServer
from tests.servers.s3_support import data, get, key, opened, put, soon

SLACK_S = 0.25  # in one of several tries (`in_time`); the bar of 100 ms is measured by tests/bench/bench_s3.py
SIZE = 400_000
BODY = data(SIZE)
BUCKET = "faults"


def begin_with_one_record(server: NullServer) -> bytes:
    """The record "k" is `BODY`, and "new" is not there: done without the backend."""
    names = {name: f"/{BUCKET}/{key(name).hex()[:2]}/{key(name).hex()}" for name in ("k", "new")}
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    for method, name, body in (("DELETE", "new", None), ("PUT", "k", BODY)):
        connection.request(method, names[name], body)
        if connection.getresponse().read():
            raise RuntimeError("the null server did not take it")
    connection.close()
    return BODY


@contextmanager
def bad_link(proxy: FaultProxy, **options: Any) -> Iterator[S3Backend]:
    """The timeouts are long: what a test calls silence must be longer than a stall of the machine."""
    fields = {"connect_timeout": 5.0, "read_timeout": 10.0, "conditional_writes": "on", "miss_memory": 0.0, **options}
    with opened(proxy.endpoint, BUCKET, **fields) as backend:
        yield backend


def listed(backend: S3Backend, seconds: float) -> Outcome:
    try:
        list(backend.list(deadline=soon(seconds)))
    except BackendError as error:
        return Outcome.failed(error)
    return Outcome(Status.OK)


IMPATIENT: dict[str, Any] = {"connect_timeout": 0.3, "read_timeout": 0.3}
STALLED_S = 1.5  # read_timeout of a test in which one request of several stalls


OPERATIONS: dict[str, Callable[[S3Backend, float], Outcome]] = {
    "stat": lambda backend, s: backend.stat([key("k")], deadline=soon(s))[0],
    "get": lambda backend, s: get(backend, "k", SIZE, seconds=s)[0],
    "put": lambda backend, s: put(backend, "new", BODY, seconds=s),
    "delete": lambda backend, s: backend.delete([key("k")], deadline=soon(s))[0],
    "quarantine": lambda backend, s: backend.quarantine([key("k")], deadline=soon(s))[0],
    "list": listed,
}
