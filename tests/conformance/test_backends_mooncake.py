"""The mooncake backend runs the shipped suite and the state machine over a real Mooncake Store.

Nothing of the suite is overridden but its hooks and two knobs. What Mooncake's semantics force:

* `force_delete`: the suite deletes what it has just read, and Mooncake gives every object that was read a lease of
  10 s, for which `delete` otherwise waits (tested in tests/unit/test_mooncake_backend.py).
* `leaves`: Mooncake's library keeps sockets and event loops for the life of the process. Our threads are looked at
  here. The backends of one process share a membership, which takes a second to close: one is kept open for all tests.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from kvstore.backend import Backend, Capability
from kvstore.keys import Key
from kvstore.testing import BackendSuite, backend_state_machine
from kvstore_backends._mooncake_reads import HEADER_BYTES, new_header
from kvstore_backends.mooncake import MooncakeBackend, Settings
from tests.servers.mooncake import Mooncake

_NEEDED = (
    Capability.RANGED_READ
    | Capability.NATIVE_BATCH
    | Capability.REGISTERED_MEMORY
    | Capability.SHARED
    | Capability.DURABLE
)
_serial = itertools.count()

pytestmark = pytest.mark.leaves("Mooncake's library keeps sockets and event loops for the life of the process")


@pytest.fixture(scope="module")
def direct(mooncake: Mooncake) -> Iterator[Any]:
    """Mooncake's own client. It also brings up what its library keeps for the life of the process."""
    client = mooncake.client()
    kept = MooncakeBackend(Settings(("127.0.0.1", mooncake.port)))
    yield client
    kept.close()
    client.close()


class MooncakeSuite(BackendSuite):
    """Seeded and inspected by Mooncake's own client, by the names and the header that the manual promises."""

    requires = _NEEDED
    max_value = 16 << 20
    patience_s = 30.0
    options: ClassVar[dict[str, Any]] = {}

    @pytest.fixture(autouse=True)
    def suite_place(self, tmp_path: Path, mooncake: Mooncake, direct: Any) -> Iterator[None]:
        self.server, self.direct, self.prefix = mooncake, direct, f"suite/{next(_serial)}/"
        self.begin(tmp_path)
        yield
        self.end()
        assert [each.name for each in threading.enumerate() if each.name.startswith("kvstore-mooncake")] == []

    def make(self, **options: Any) -> MooncakeBackend:
        fields = {"prefix": self.prefix, "force_delete": True, "staging": 4 << 20, **self.options, **options}
        return MooncakeBackend(Settings(("127.0.0.1", self.server.port), **fields))

    def open(self) -> Backend:
        return self.make()

    def open_limited(self, max_value_bytes: int) -> Backend:
        return self.make(max_value=max_value_bytes)

    def seed(self, backend: Backend, key: Key, data: bytes) -> None:
        name = self.prefix + key.hex()
        self.direct.remove(name, True)
        assert self.direct.put(name, new_header(len(data)) + data) == 0

    def inspect(self, backend: Backend, key: Key) -> bytes | None:
        data: bytes = self.direct.get(self.prefix + key.hex())
        return data[HEADER_BYTES:] if data else None


class TestMooncake(MooncakeSuite):
    pass


class TestMooncakeDirectReads(MooncakeSuite):
    options: ClassVar[dict[str, Any]] = {"direct_reads": True, "lanes": 2}


class _Place:
    """Of the state machine, whose backends are opened from a folder: a prefix for each example."""

    port = 0
    prefixes: ClassVar[dict[str, str]] = {}


@pytest.fixture(autouse=True)
def _place(mooncake: Mooncake, direct: Any) -> None:
    _Place.port = mooncake.port


def open_stateful(path: Path) -> Backend:
    prefix = _Place.prefixes.setdefault(str(path), f"stateful/{next(_serial)}/")
    return MooncakeBackend(Settings(("127.0.0.1", _Place.port), prefix=prefix, force_delete=True, staging=1 << 20))


TestMooncakeStateful = backend_state_machine(open_stateful, max_examples=20, steps=20).TestCase
