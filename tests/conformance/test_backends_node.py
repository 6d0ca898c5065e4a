"""The shipped suite and state machine over `node://`: one node, three, with replicas, with TLS, over shared memory."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from kvstore.backend import Backend, Capability
from kvstore.keys import Key
from kvstore.metrics import Metrics
from kvstore.testing import BackendSuite, backend_state_machine
from kvstore.testing.suite_base import SuiteBase
from kvstore.wrappers import wrap
from kvstore_backends.node import NodeBackend, NodeClient
from kvstore_backends.node_server import NodeServer
from kvstore_transport import Credentials, connect
from tests.node_support import MEMORY, client, settings

_NEEDED = (
    Capability.RANGED_READ | Capability.NATIVE_BATCH | Capability.LIST | Capability.SHARED | Capability.CAPACITY
    | Capability.REGISTERED_MEMORY
)  # fmt: skip


class OnNodes(SuiteBase):
    """Seeded through a second pool, and inspected at each node: the copies of a record are the same everywhere."""

    requires = _NEEDED
    max_value = 8 << 20
    nodes: ClassVar[int] = 1
    options: ClassVar[dict[str, Any]] = {}

    def begin(self, path: Path) -> None:
        super().begin(path)
        self.servers = self.start(MEMORY)
        self.other: Backend | None = None

    def serve(self, memory: int) -> NodeServer:
        return NodeServer(memory_bytes=memory)

    def start(self, memory: int) -> list[NodeServer]:
        return [self.serve(memory) for _ in range(self.nodes)]

    def end(self) -> None:
        super().end()
        for server in self.servers:
            server.close()

    def address(self, server: NodeServer) -> str:
        return server.address

    def pool(self, servers: list[NodeServer]) -> NodeBackend:
        addresses = [self.address(server) for server in servers]
        return NodeBackend(settings(addresses, lanes=4, connect_timeout=10.0, **self.options))

    def open(self) -> Backend:
        return self.pool(self.servers)

    def bare(self, server: NodeServer) -> NodeClient:
        return client(self.address(server))

    def second(self) -> Backend:
        if self.other is None:
            self.other = self.opened(self.pool(self.servers))
        return self.other

    def seed(self, backend: Backend, key: Key, data: bytes) -> None:
        self.put_through(self.second(), key, data)

    def inspect(self, backend: Backend, key: Key) -> bytes | None:
        found = set()
        for server in self.servers:
            with contextlib.closing(self.bare(server)) as each:
                found.add(self.read_through(each, key))
        found.discard(None)
        assert len(found) <= 1, "two nodes have different bytes of one record"
        return found.pop() if found else None

    def open_limited(self, max_value_bytes: int) -> Backend:
        more = self.start(max_value_bytes)
        self.servers += more
        return self.pool(more)


class TestOneNode(OnNodes, BackendSuite):
    def open_capacity(self, capacity_bytes: int) -> Backend:
        more = self.start(capacity_bytes)
        self.servers += more
        return self.pool(more)


class TestThreeNodes(OnNodes, BackendSuite):
    nodes = 3


class TestReplicas(OnNodes, BackendSuite):
    nodes = 3
    options: ClassVar[dict[str, Any]] = {"replicas": 2, "write_quorum": 2}


@pytest.mark.slow
class TestReplicasUnhedged(OnNodes, BackendSuite):
    nodes = 4
    options: ClassVar[dict[str, Any]] = {"replicas": 3, "hedge_reads": False, "checksum": "xxh3"}


class TestSecured(OnNodes, BackendSuite):
    """TLS, a token, and a namespace; with the standard wrappers around it."""

    token = "hunter2-testtoken"
    forbidden_text = (token,)

    @pytest.fixture(autouse=True)
    def suite_place(self, tmp_path: Path, certificate: Path) -> Iterator[None]:
        self.certificate = str(certificate)
        self.options = {  # type: ignore[misc]
            "tls": True, "tls_ca": self.certificate, "token": self.token, "namespace": "tenant",
        }  # fmt: skip
        self.begin(tmp_path)
        yield
        self.end()

    def serve(self, memory: int) -> NodeServer:
        from kvstore_backends.node_server import Namespace

        return NodeServer(
            memory_bytes=memory, tls_cert=self.certificate, tls_key=self.certificate, default_namespace=False,
            namespaces=[Namespace("tenant", self.token.encode())],
        )  # fmt: skip

    def open(self) -> Backend:
        return wrap(self.pool(self.servers), {}, metrics=Metrics())

    def bare(self, server: NodeServer) -> NodeClient:
        from kvstore_backends.node.dial import tls_context

        tls = tls_context(settings([server.address], **self.options))
        credentials = Credentials("tenant", self.token.encode())
        return NodeClient(
            lambda deadline: connect(server.address, deadline=deadline, credentials=credentials, tls=tls),
            name="bare",
        )


class TestSharedMemory(OnNodes, BackendSuite):
    """Three nodes of this host: records are leased where they lie."""

    requires = _NEEDED | Capability.LEASE
    nodes = 3
    options: ClassVar[dict[str, Any]] = {"transport": "shm"}

    def begin(self, path: Path) -> None:
        self.sockets = Path(tempfile.mkdtemp(prefix="kvstore-"))  # the path of a socket has at most 107 bytes
        self.serial = 0
        super().begin(path)

    def end(self) -> None:
        super().end()
        shutil.rmtree(self.sockets)

    def serve(self, memory: int) -> NodeServer:
        self.serial += 1
        return NodeServer("", unix_path=self.sockets / f"{self.serial}.sock", memory_bytes=memory)

    def address(self, server: NodeServer) -> str:
        return server.unix_path


@pytest.mark.slow
@pytest.mark.leaves("UCX has threads and descriptors of the process")
class TestUcx(OnNodes, BackendSuite):
    """Over UCX, which falls back on TCP and shared memory where there is no RDMA."""

    nodes = 2
    options: ClassVar[dict[str, Any]] = {"transport": "ucx", "replicas": 2}

    @pytest.fixture(autouse=True)
    def suite_place(self, tmp_path: Path) -> Iterator[None]:
        pytest.importorskip("ucxx")
        self.begin(tmp_path)
        yield
        self.end()


class _Cluster:
    """Nodes that a state machine opens anew for every example."""

    servers: ClassVar[list[NodeServer]] = []


@pytest.fixture(autouse=True)
def _cluster() -> Iterator[None]:
    yield
    for server in _Cluster.servers:
        server.close()
    _Cluster.servers.clear()


def _open(nodes: int, **options: Any) -> NodeBackend:
    for server in _Cluster.servers:
        server.close()
    _Cluster.servers[:] = [NodeServer(memory_bytes=8 << 20) for _ in range(nodes)]
    return NodeBackend(settings([server.address for server in _Cluster.servers], connect_timeout=10.0, **options))


TestOneNodeStateful = backend_state_machine(lambda path: _open(1), max_examples=10, steps=20).TestCase
TestReplicasStateful = backend_state_machine(lambda path: _open(3, replicas=2), max_examples=10, steps=20).TestCase
