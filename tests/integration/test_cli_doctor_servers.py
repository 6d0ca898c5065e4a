"""`kvstore doctor` against real servers, healthy ones and such as a bad network or a wrong setting makes them."""

from __future__ import annotations

import json
import time
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import pytest

from kvstore_cli.doctor import diagnose
from kvstore_cli.main import main
from tests.servers.fault_proxy import Answer, FaultProxy, Flip, Silence
from tests.servers.s3_support import SECRETS, assert_no_secret, url
from tests.servers.seaweedfs import SeaweedFS
from tests.servers.valkey import PASSWORD, USER, Server

Checks = dict[str, dict[str, Any]]


@pytest.fixture(autouse=True)
def _credentials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Those of SeaweedFS, and nothing else from this machine."""
    for name in ("AWS_PROFILE", "AWS_REGION", "AWS_DEFAULT_REGION", "AWS_SESSION_TOKEN", "KVSTORE_CONFIG_FILE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", SeaweedFS.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SeaweedFS.secret_key)


def look(place: str, *, timeout: float = 30.0, nbytes: int = 64 << 10, **options: Any) -> tuple[int, Checks]:
    """Exit status, and the checks by name. No secret is in the report."""
    status, report = diagnose((place,), timeout=timeout, nbytes=nbytes, **options)
    assert_no_secret(json.dumps(report))
    return status, {check["name"]: check for check in report["places"][0]["checks"]}


def failed(checks: Checks) -> list[str]:
    return [name for name, check in checks.items() if check["status"] == "fail"]


def objects(server: SeaweedFS, bucket: str) -> list[str]:
    client = server.client()
    try:
        return [entry["Key"] for entry in client.list_objects_v2(Bucket=bucket).get("Contents", ())]
    finally:
        client.close()


# S3


def test_a_healthy_bucket(seaweedfs: SeaweedFS, s3_bucket: str) -> None:
    status, checks = look(url(seaweedfs.endpoint, s3_bucket, "kv"), nbytes=1 << 20)
    assert (status, failed(checks)) == (0, [])
    way = ["options", "dns", "tcp", "clock", "region", "credentials", "capabilities"]
    assert list(checks) == [*way, "lookup", "list", "put", "get", "delete"]
    assert checks["credentials"]["data"]["method"] == "env"
    assert abs(checks["clock"]["data"]["skew_s"]) < 60
    assert checks["get"]["data"]["bytes"] == 1 << 20
    assert [name for name in objects(seaweedfs, s3_bucket) if "probe" not in name] == []


def test_read_only_leaves_the_bucket_alone(seaweedfs: SeaweedFS, s3_bucket: str, s3_proxy: FaultProxy) -> None:
    status, checks = look(url(s3_proxy.endpoint, s3_bucket), read_only=True)
    assert (status, checks["put"]["status"]) == (0, "skip")
    assert {request.method for request in s3_proxy.requests} <= {"HEAD", "GET"}


def test_a_wrong_secret(seaweedfs: SeaweedFS, s3_bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hunter2-is-wrong")
    status, checks = look(url(seaweedfs.endpoint, s3_bucket))
    assert (status, failed(checks)) == (1, ["lookup"])
    assert "403" in checks["lookup"]["detail"]
    assert "hunter2" not in json.dumps(checks)


def test_no_such_bucket(seaweedfs: SeaweedFS) -> None:
    status, checks = look(url(seaweedfs.endpoint, "no-such-bucket"))
    assert status == 1
    assert any("no-such-bucket" in checks[name]["detail"] for name in failed(checks))


def test_no_credentials(seaweedfs: SeaweedFS, s3_bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    status, checks = look(url(seaweedfs.endpoint, s3_bucket))
    assert (status, failed(checks)) == (1, ["credentials"])
    assert "AWS_ACCESS_KEY_ID" in checks["credentials"]["advice"]
    assert "lookup" not in checks


def test_no_region(s3_bucket: str) -> None:
    status, checks = look(f"s3://{s3_bucket}/kv")
    assert status == 2
    assert "which region?" in checks["options"]["detail"]


def test_a_clock_that_is_wrong(s3_bucket: str, s3_proxy: FaultProxy) -> None:
    for minutes, expected in ((5, "warn"), (30, "fail"), (-30, "fail")):
        date = format_datetime(datetime.now(UTC) + timedelta(minutes=minutes), usegmt=True)
        s3_proxy.next(Answer(403, "AccessDenied", headers=(("Date", date),)), only="HEAD")
        status, checks = look(url(s3_proxy.endpoint, s3_bucket))
        assert checks["clock"]["status"] == expected
        assert status == (0 if expected == "warn" else 1)
        assert checks["clock"]["data"]["skew_s"] == pytest.approx(-60 * minutes, abs=20)
        assert ("behind" if minutes > 0 else "ahead of") in checks["clock"]["detail"]
        assert "NTP" in checks["clock"]["advice"]


def test_a_bucket_in_another_region(s3_bucket: str, s3_proxy: FaultProxy) -> None:
    s3_proxy.next(Answer(400, headers=(("x-amz-bucket-region", "eu-west-1"),)), only="HEAD")
    status, checks = look(url(s3_proxy.endpoint, s3_bucket))
    assert (status, failed(checks)) == (1, ["region"])
    assert checks["region"]["advice"] == "set region=eu-west-1"


@pytest.mark.parametrize(
    ("method", "name"), [("PUT", "put"), ("POST", "delete")],
)  # fmt: skip
def test_a_permission_that_is_missing(method: str, name: str, s3_bucket: str, s3_proxy: FaultProxy) -> None:
    s3_proxy.every(Answer(403, "AccessDenied"), only=method)
    status, checks = look(url(s3_proxy.endpoint, s3_bucket, conditional_writes="on"))
    assert (status, failed(checks)) == (1, [name])
    assert "access denied" in checks[name]["detail"]
    assert "s3:PutObject" in checks[name]["detail"]
    assert ("--read-only" in checks[name]["advice"]) == (name == "put")


def test_a_listing_that_is_denied(s3_bucket: str, s3_proxy: FaultProxy) -> None:
    s3_proxy.every(Answer(403, "AccessDenied"), match=lambda request: "list-type=2" in request.target)
    status, checks = look(url(s3_proxy.endpoint, s3_bucket))
    assert (status, failed(checks)) == (1, ["list"])
    assert checks["delete"]["status"] == "ok"


def test_bytes_that_change_on_the_way(s3_bucket: str, s3_proxy: FaultProxy) -> None:
    s3_proxy.every(Flip(100), only="GET", match=lambda request: "list-type" not in request.target)
    status, checks = look(url(s3_proxy.endpoint, s3_bucket))
    assert (status, failed(checks)) == (1, ["get"])
    assert "other bytes" in checks["get"]["detail"]


def test_a_black_hole_is_given_up_in_time(s3_bucket: str, s3_proxy: FaultProxy) -> None:
    s3_proxy.black_hole()
    began = time.monotonic()
    status, checks = look(url(s3_proxy.endpoint, s3_bucket), timeout=1.0)
    assert time.monotonic() - began < 20  # a second, and what a busy machine adds; TCP itself gives up after minutes
    assert (status, failed(checks)) == (1, ["tcp"])
    assert "security groups" in checks["tcp"]["advice"]


def test_a_service_that_accepts_and_says_nothing(s3_bucket: str, s3_proxy: FaultProxy) -> None:
    s3_proxy.every(Silence())
    began = time.monotonic()
    status, checks = look(url(s3_proxy.endpoint, s3_bucket), timeout=1.0)
    assert time.monotonic() - began < 20
    assert (status, failed(checks)) == (1, ["http"])
    s3_proxy.clear()
    s3_proxy.every(Silence(), match=lambda request: "authorization" in request.headers)  # signed ones only
    status, checks = look(url(s3_proxy.endpoint, s3_bucket), timeout=2.0)
    assert (status, failed(checks)) == (1, ["lookup"])
    assert "--timeout" in checks["lookup"]["advice"]


def test_a_service_that_refuses_connections(s3_bucket: str, s3_proxy: FaultProxy) -> None:
    s3_proxy.refuse()
    status, checks = look(url(s3_proxy.endpoint, s3_bucket))
    assert (status, failed(checks)) == (1, ["tcp"])
    assert "nothing listens there" in checks["tcp"]["advice"]


def test_the_command_shows_no_secret(seaweedfs: SeaweedFS, s3_bucket: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", url(seaweedfs.endpoint, s3_bucket), "--bytes", "4KiB"]) == 0
    said = capsys.readouterr()
    assert said.out.endswith("nothing is wrong\n")
    assert not any(secret in said.out + said.err for secret in SECRETS)


# Valkey


def test_a_healthy_valkey(valkey_server: Server) -> None:
    status, checks = look(f"valkey://127.0.0.1:{valkey_server.port}/doctor")
    assert (status, failed(checks)) == (0, [])
    assert checks["delete"]["status"] == "ok"


def test_a_valkey_with_tls_and_users(valkey_tls: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    place = f"valkeys://127.0.0.1:{valkey_tls.port}/doctor"
    status, checks = look(place)
    assert (status, failed(checks)) == (1, ["tls"])
    assert "tls_ca" in checks["tls"]["advice"]
    place += f"?tls_ca={valkey_tls.certificate}"
    monkeypatch.setenv("KVSTORE_VALKEYS_USERNAME", USER)
    monkeypatch.setenv("KVSTORE_VALKEYS_PASSWORD", "hunter2-wrong")
    status, checks = look(place)
    assert (status, failed(checks)) == (1, ["open"])
    assert "WRONGPASS" in checks["open"]["detail"]
    assert "hunter2" not in json.dumps(checks)
    monkeypatch.setenv("KVSTORE_VALKEYS_PASSWORD", PASSWORD)
    status, checks = look(place)
    assert (status, failed(checks)) == (1, ["lookup"])  # this user may use names under kv/ only
    assert "ACL SETUSER" in checks["lookup"]["detail"]
    status, checks = look(place.replace("/doctor", "/kv"))
    assert (status, failed(checks)) == (0, [])
    assert checks["tls"]["data"]["version"].startswith("TLS")
    assert PASSWORD not in json.dumps(checks)
