"""pytest fixtures for the servers of this folder. `tests/conftest.py` imports them.

`seaweedfs` is one server for the whole session (it takes 3.5 s to start). What runs in this process is made for one
test, because threads and descriptors are audited after each.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.servers.express_stub import ExpressStub
from tests.servers.fault_proxy import FaultProxy
from tests.servers.mooncake import MISSING as MOONCAKE_MISSING
from tests.servers.mooncake import Mooncake, mooncake_folder
from tests.servers.null_server import NullServer
from tests.servers.seaweedfs import MISSING, SeaweedFS, weed_binary
from tests.servers.valkey import valkey_cluster, valkey_full, valkey_server, valkey_tls

__all__ = [
    "_bucket",
    "certificate",
    "express_stub",
    "mooncake",
    "null_proxy",
    "null_server",
    "null_server_tls",
    "s3_bucket",
    "s3_proxy",
    "seaweedfs",
    "valkey_cluster",
    "valkey_full",
    "valkey_server",
    "valkey_tls",
]

_BUCKET = "tests"


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


@pytest.fixture(scope="session")
def _bucket(seaweedfs: SeaweedFS) -> Iterator[tuple[Any, str]]:
    client = seaweedfs.client()
    client.create_bucket(Bucket=_BUCKET)
    yield client, _BUCKET
    client.close()


@pytest.fixture
def s3_bucket(_bucket: tuple[Any, str]) -> Iterator[str]:
    """An empty bucket of `seaweedfs`. It is one and the same, emptied after each test: a new one costs a second."""
    client, name = _bucket
    yield name
    for page in client.get_paginator("list_objects_v2").paginate(Bucket=name):
        objects = [{"Key": entry["Key"]} for entry in page.get("Contents", ())]
        if objects:
            client.delete_objects(Bucket=name, Delete={"Objects": objects, "Quiet": True})
    for upload in client.list_multipart_uploads(Bucket=name).get("Uploads", ()):
        client.abort_multipart_upload(Bucket=name, Key=upload["Key"], UploadId=upload["UploadId"])


@pytest.fixture
def s3_proxy(seaweedfs: SeaweedFS) -> Iterator[FaultProxy]:
    """A bad network in front of `seaweedfs`."""
    with FaultProxy(seaweedfs.port) as proxy:
        yield proxy


@pytest.fixture(scope="session")
def mooncake(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mooncake]:
    """A real Mooncake Store on loopback."""
    if mooncake_folder() is None:
        pytest.skip(MOONCAKE_MISSING)
    with Mooncake(tmp_path_factory.mktemp("mooncake")) as server:
        yield server


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
