"""The valkey backend runs the shipped suite and the state machine over real servers: one, one with TLS and ACL, a
cluster. Seeded and inspected by redis-py, by the names that the manual promises."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from kvstore.backend import Backend, Capability
from kvstore.keys import Key
from kvstore.registry import open_backend
from kvstore.testing import BackendSuite, backend_state_machine
from kvstore_backends.valkey import ValkeyBackend
from tests.servers.valkey import PASSWORD, USER, Cluster, Server

_NEEDED = Capability.RANGED_READ | Capability.LIST | Capability.SHARED | Capability.DURABLE | Capability.LANDING
_serial = itertools.count()


class ValkeySuite(BackendSuite):
    """Subclasses have a fixture `served`: a URL without prefix, and a client of redis-py."""

    requires = _NEEDED
    max_value = 8 << 20
    patience_s = 30.0
    forbidden_text = (PASSWORD, USER)
    options: ClassVar[dict[str, Any]] = {}

    @pytest.fixture(autouse=True)
    def suite_place(self, tmp_path: Path, served: tuple[str, Any]) -> Iterator[None]:
        self.prefix = f"kv/{next(_serial)}"
        self.url, self.client = served
        self.begin(tmp_path)
        yield
        self.end()
        names = list(self.client.scan_iter(match=f"{self.prefix}/*", count=1000))
        for name in names:
            self.client.unlink(name)
        self.client.close()

    def make(self, **options: Any) -> Backend:
        return open_backend(f"{self.url}/{self.prefix}", **{"lanes": 4, **self.options, **options})

    def open(self) -> Backend:
        return self.make()

    def open_limited(self, max_value_bytes: int) -> Backend:
        return self.make(max_value_bytes=max_value_bytes)

    def name(self, key: Key) -> str:
        return f"{self.prefix}/{key.hex()}"

    def seed(self, backend: Backend, key: Key, data: bytes) -> None:
        self.client.set(self.name(key), data)

    def inspect(self, backend: Backend, key: Key) -> bytes | None:
        found: bytes | None = self.client.get(self.name(key))
        return found


class TestValkeySingle(ValkeySuite):
    @pytest.fixture
    def served(self, valkey_server: Server) -> tuple[str, Any]:
        return f"valkey://{valkey_server.address}", valkey_server.client()


class TestValkeyCluster(ValkeySuite):
    @pytest.fixture
    def served(self, valkey_cluster: Cluster) -> tuple[str, Any]:
        return f"valkey://{valkey_cluster.shards[0].address}", valkey_cluster.client()


@pytest.mark.slow
class TestValkeyTLS(ValkeySuite):
    """Over TLS, as a user who may do no more than the manual says. tests/integration has the short of it."""

    @pytest.fixture
    def served(self, valkey_tls: Server) -> tuple[str, Any]:
        self.server = valkey_tls
        # Another user for the tests themselves: ours may not read whole values.
        return f"valkeys://{valkey_tls.address}", valkey_tls.client(username="tests", password=PASSWORD)

    def make(self, **options: Any) -> Backend:
        secrets = {"username": USER, "password": PASSWORD, "tls_ca": str(self.server.certificate)}
        return super().make(**secrets, **options)


@pytest.mark.slow
class TestValkeySmallParts(TestValkeySingle):
    """Every read in many requests, hardly any of them ahead."""

    options: ClassVar[dict[str, Any]] = {"part_size": 64 << 10, "window": 64 << 10, "ask_from": 0}


class _Place:
    """Where the state machines work: a prefix for each example."""

    addresses: ClassVar[dict[str, str]] = {}
    prefixes: ClassVar[dict[str, str]] = {}


@pytest.fixture(autouse=True)
def _place(valkey_server: Server, valkey_cluster: Cluster) -> None:
    _Place.addresses = {"single": valkey_server.address, "cluster": valkey_cluster.shards[1].address}


def _open(where: str, path: Path) -> Backend:
    prefix = _Place.prefixes.setdefault(str(path), f"stateful/{next(_serial)}")
    found = open_backend(f"valkey://{_Place.addresses[where]}/{prefix}?part_size=64KiB&ask_from=4KiB")
    assert isinstance(found, ValkeyBackend)
    return found


TestValkeyStateful = backend_state_machine(lambda path: _open("single", path), max_examples=15, steps=20).TestCase
TestValkeyClusterStateful = backend_state_machine(
    lambda path: _open("cluster", path), max_examples=8, steps=20
).TestCase
