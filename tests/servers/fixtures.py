"""pytest fixtures for the servers of this folder. `tests/conftest.py` imports them.

`seaweedfs` is one server for the whole session (it takes 3.5 s to start); each test takes a bucket of its own. What
runs in this process is made for one test, because threads and descriptors are audited after each.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.servers.express_stub import ExpressStub
from tests.servers.fault_proxy import FaultProxy
from tests.servers.null_server import NullServer
from tests.servers.seaweedfs import MISSING, SeaweedFS, bucket, weed_binary

__all__ = [
    "certificate",
    "express_stub",
    "null_proxy",
    "null_server",
    "null_server_tls",
    "s3_bucket",
    "s3_proxy",
    "seaweedfs",
]

_serial = itertools.count()


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A PEM file with key and certificate for 127.0.0.1 and localhost."""
    from tests.servers.certificate import make_certificate

    return make_certificate(tmp_path_factory.mktemp("certificate") / "server.pem")


@pytest.fixture(scope="session")
def seaweedfs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SeaweedFS]:
    """A real S3 server on loopback."""
    if weed_binary() is None:
        pytest.skip(MISSING)
    with SeaweedFS(tmp_path_factory.mktemp("seaweedfs")) as server:
        yield server


@pytest.fixture
def s3_bucket(seaweedfs: SeaweedFS) -> Iterator[str]:
    """A new bucket of `seaweedfs`."""
    with bucket(seaweedfs, f"t-{os.getpid()}-{next(_serial)}") as name:
        yield name


@pytest.fixture
def s3_proxy(seaweedfs: SeaweedFS) -> Iterator[FaultProxy]:
    """A bad network in front of `seaweedfs`."""
    with FaultProxy(seaweedfs.port) as proxy:
        yield proxy


@pytest.fixture
def express_stub() -> Iterator[ExpressStub]:
    with ExpressStub() as stub:
        yield stub


def _null(certificate: Path | None = None) -> Iterator[NullServer]:
    try:
        server = NullServer(arena_mib=512, certificate=certificate)
    except RuntimeError as error:
        pytest.skip(f"no null server: {error}")
    with server:
        yield server


@pytest.fixture(scope="session")
def null_server() -> Iterator[NullServer]:
    """An S3 server that costs next to nothing, over plain HTTP. A test that changes it with `set` sets it back."""
    yield from _null()


@pytest.fixture(scope="session")
def null_server_tls(certificate: Path) -> Iterator[NullServer]:
    """The same over TLS; clients trust it by the file `certificate`."""
    yield from _null(certificate)


@pytest.fixture
def null_proxy(null_server: NullServer) -> Iterator[FaultProxy]:
    """A bad network in front of `null_server`."""
    with FaultProxy(null_server.port) as proxy:
        yield proxy
