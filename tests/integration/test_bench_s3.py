"""`kvstore-bench io s3://…` as a user runs it: a process of its own, against the null server."""

from __future__ import annotations

import http.client
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.servers.null_server import NullServer

SMALL = ["--sizes", "4KiB,1MiB", "--batch", "4", "--repeats", "2", "--quick"]


def url_of(server: NullServer, certificate: Path | None = None) -> str:
    trust = f"&ca_bundle={certificate}" if certificate else ""
    return f"s3://bench/kv?endpoint_url={server.endpoint}&region=us-east-1&addressing=path{trust}"


def bench(*words: str, secret: str = "hunter2-secret") -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    environment = {
        **clean, "AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": secret, "AWS_EC2_METADATA_DISABLED": "true",
    }  # fmt: skip
    return subprocess.run(
        [sys.executable, "-W", "error", "-m", "kvstore_bench", "io", *words],
        capture_output=True, text=True, timeout=120, check=False, env=environment,
    )  # fmt: skip


def objects_in(server: NullServer) -> list[str]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=5)
    connection.request("GET", "/bench?list-type=2")
    body = connection.getresponse().read().decode()
    connection.close()
    return re.findall("<Key>(.*?)</Key>", body)


def test_s3_stands_next_to_plain_sockets(null_server: NullServer, tmp_path: Path) -> None:
    report = tmp_path / "io.json"
    done = bench(url_of(null_server), *SMALL, "--store", "--json", str(report))
    assert done.returncode == 0, done.stdout + done.stderr
    data = json.loads(report.read_text(encoding="utf-8"))
    seen = {(row["scheme"], row["op"], row["size_bytes"], row["ceiling"]["name"]) for row in data["rows"]}
    ours = [(scheme, op) for scheme in ("s3", "store_s3") for op in ("get", "put")]
    assert seen == {(*each, size, "raw http") for each in ours for size in (4096, 1 << 20)}
    assert all(row["verified"] and not row["failed"] and row["ratio"] > 0 for row in data["rows"])
    assert data["figures"].keys() >= {"io.s3.get.1MiB.ratio", "io.s3.put.4KiB.ratio", "io.store_s3.get.1MiB.ratio"}
    assert "hunter2" not in done.stdout + done.stderr + report.read_text(encoding="utf-8")
    assert objects_in(null_server) == []


def test_all_clients_that_are_installed_are_compared(null_server: NullServer, tmp_path: Path) -> None:
    report = tmp_path / "io.json"
    words = ["--sizes", "100000B", "--batch", "4", "--lanes", "2", "--repeats", "1", "--quick"]
    done = bench(url_of(null_server), *words, "--compare-clients", "--json", str(report))
    assert done.returncode == 0, done.stdout + done.stderr
    data = json.loads(report.read_text(encoding="utf-8"))
    installed = {name for name in ("aioboto3", "obstore", "awscrt") if importlib.util.find_spec(name)}
    assert {row["scheme"] for row in data["rows"]} == {"s3", "s3_boto3", *(f"s3_{name}" for name in installed)}
    assert all(row["verified"] and not row["failed"] for row in data["rows"]), data["notes"]
    for name in {"aioboto3", "obstore", "awscrt"} - installed:
        assert f"{name} is not installed and was left out" in data["notes"]
    assert objects_in(null_server) == []


@pytest.mark.slow
def test_all_clients_over_tls(null_server_tls: NullServer, certificate: Path, tmp_path: Path) -> None:
    report = tmp_path / "io.json"
    done = bench(url_of(null_server_tls, certificate), *SMALL, "--compare-clients", "--json", str(report))
    assert done.returncode == 0, done.stdout + done.stderr
    data = json.loads(report.read_text(encoding="utf-8"))
    assert len({row["scheme"] for row in data["rows"]}) >= 3
    assert all(row["verified"] and not row["failed"] for row in data["rows"]), data["notes"]


def test_an_endpoint_that_is_not_there_is_one_sentence() -> None:
    done = bench("s3://bench/kv?endpoint_url=http://127.0.0.1:9&region=us-east-1", *SMALL)
    assert done.returncode in (1, 2)
    assert "Traceback" not in done.stderr
    assert "hunter2" not in done.stdout + done.stderr


def test_what_a_killed_run_left_in_a_bucket_is_removed_by_the_next(null_server: NullServer, tmp_path: Path) -> None:
    """kill -9 while both sides of a row hold objects: ours and those of the raw ceiling."""
    program = (
        "import os, sys, signal\n"
        "from kvstore_bench import cli, measure\n"
        "measure.percentile = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"  # first called after the timed passes
        "sys.exit(cli.main(['io', *sys.argv[1:]]))\n"
    )
    words = [url_of(null_server), "--sizes", "4KiB", "--batch", "4", "--lanes", "1", "--ops", "get", "--quick"]
    environment = {
        **os.environ, "AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "hunter2-secret", "TMPDIR": str(tmp_path),
        "AWS_EC2_METADATA_DISABLED": "true",
    }  # fmt: skip
    common: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 120, "env": environment}
    killed = subprocess.run([sys.executable, "-c", program, *words], check=False, **common)
    assert killed.returncode == -9, killed.stderr
    left = objects_in(null_server)
    assert len(left) == 8
    assert sum("kvstore-bench-raw" in name for name in left) == 4
    (journal,) = tmp_path.iterdir()
    assert "hunter2" not in journal.read_text(encoding="utf-8")
    done = subprocess.run([sys.executable, "-W", "error", "-m", "kvstore_bench", "io", *words], check=False, **common)
    assert done.returncode == 0, done.stderr
    assert "removed 4 records that a killed run had left in s3://" in done.stdout
    assert objects_in(null_server) == []
    assert not list(tmp_path.iterdir())
