"""`kvstore-bench io node://local` and `kvstore-bench transports` as a user runs them: processes of their own."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from kvstore_backends.node_server import NodeServer
from kvstore_bench.ceilings_socket import RawClient, RawServer, runs
from kvstore_bench.nodes import Perftest, open_place

SMALL = ["--sizes", "64KiB,1MiB", "--batch", "4", "--repeats", "2", "--quick"]
ONE = ["--sizes", "1MiB", "--batch", "4", "--repeats", "1", "--quick"]


def bench(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kvstore_bench", *words], capture_output=True, text=True, timeout=240, check=False
    )


def measured(path: Path, *words: str) -> dict[str, Any]:
    done = bench("io", "node://local", *words, "--json", str(path))
    assert done.returncode == 0, done.stdout + done.stderr
    data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    assert data["rows"], data["notes"]
    assert all(row["verified"] and not row["failed"] and row["ratio"] > 0 for row in data["rows"]), data["notes"]
    return data


def test_tcp_stands_next_to_plain_sockets(tmp_path: Path) -> None:
    data = measured(tmp_path / "io.json", "--transport", "tcp", *SMALL, "--store")
    seen = {(row["scheme"], row["op"], row["size_bytes"], row["ceiling"]["name"]) for row in data["rows"]}
    ours = [(scheme, op) for scheme in ("node_tcp", "store_node_tcp") for op in ("get", "put")]
    assert seen == {(*each, size, "raw socket") for each in ours for size in (1 << 16, 1 << 20)}
    figures = data["figures"]
    assert {"io.node_tcp.get.1MiB.ratio", "io.node_tcp.put.64KiB.ratio"} <= figures.keys()
    assert figures["io.node_tcp.get.round_trip_us"]["bar"] == 150
    assert figures["io.node_tcp.get.64KiB.batched_vs_single"]["value"] > 1
    assert all(row["cpu_s_per_gib"] > 0 for row in data["rows"])


def test_shared_memory_stands_next_to_memcpy(tmp_path: Path) -> None:
    data = measured(tmp_path / "io.json", "--transport", "shm", *ONE)
    assert {(row["scheme"], row["ceiling"]["name"]) for row in data["rows"]} == {("node_shm", "memcpy")}


@pytest.mark.skipif(find_spec("ucxx") is None, reason="ucxx is not installed")
def test_ucx_stands_next_to_its_own_benchmark(tmp_path: Path) -> None:
    data = measured(tmp_path / "io.json", "--transport", "ucx", *ONE)
    ceiling = "ucx_perftest" if Perftest(1 << 20, 4).there else "memcpy"
    assert {(row["scheme"], row["ceiling"]["name"]) for row in data["rows"]} == {("node_ucx", ceiling)}


def test_two_words_about_the_transport_must_agree() -> None:
    done = bench("io", "node://local?transport=shm", "--transport", "tcp", *SMALL)
    assert done.returncode == 2
    assert "--transport tcp, but the URL says shm" in done.stderr


def test_a_node_that_is_not_there_is_one_sentence() -> None:
    done = bench("io", "node://127.0.0.1:9", *SMALL)
    assert done.returncode in (1, 2)
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("own", [True, False])
def test_a_node_with_a_token_is_measured(own: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the token in the environment, as a store takes it; a node of its own has the same one."""
    monkeypatch.setenv("KVSTORE_NODE_TOKEN", "hunter2-of-the-nodes")
    monkeypatch.setenv("KVSTORE_SERVE_TOKEN", "another one")
    with contextlib.ExitStack() as stack:
        address = "local"
        if not own:
            address = stack.enter_context(NodeServer(memory_bytes=64 << 20, token=b"hunter2-of-the-nodes")).address
        words = ("--sizes", "64KiB", "--batch", "2", "--repeats", "1", "--quick", "--store", "--transport", "tcp")
        done = bench("io", f"node://{address}", *words, "--json", str(tmp_path / "io.json"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "hunter2" not in done.stdout + done.stderr + (tmp_path / "io.json").read_text()
    assert all(row["verified"] for row in json.loads((tmp_path / "io.json").read_text())["rows"])


def test_a_node_of_its_own_ends_with_the_run() -> None:
    from kvstore.registry import parse_url

    with open_place(parse_url("node://local"), "tcp", 64 << 20) as (url, label, place):
        (pid,) = place.pids
        assert Path(f"/proc/{pid}").exists()
        assert (url.authority.startswith("127.0.0.1:"), label) == (True, "node_tcp")
    assert not Path(f"/proc/{pid}").exists()


def test_the_raw_socket_ceiling_moves_what_it_says() -> None:
    with RawServer() as server:
        client = RawClient(server.port)
        view = memoryview(bytearray(3 << 20))
        client.get(view)
        assert bytes(view) == b"\xa5" * (3 << 20)
        client.put(view)
        client.close()
    region = memoryview(bytearray(1 << 20))
    pages = [region[at : at + 4096] for at in range(0, 1 << 20, 4096)]
    (joined,) = runs(region, pages)
    assert len(joined) == 1 << 20
    odd = [region[at * 4096 : at * 4096 + 100] for at in range(4)]
    assert runs(region, odd) == odd


def test_transports_are_listed(tmp_path: Path) -> None:
    path = tmp_path / "transports.json"
    done = bench("transports", "--quick", "--json", str(path))
    assert done.returncode == 0, done.stderr
    facts = json.loads(path.read_text(encoding="utf-8"))["machine"]["transports"]
    assert facts.keys() == {"tcp", "ucx", "shm"}
    assert facts["tcp"]["usable"]
    assert facts["ucx"]["usable"] is (find_spec("ucxx") is not None)
    for name in ("tcp", "ucx", "shm"):
        assert f"{name}: {'usable' if facts[name]['usable'] else 'not usable'}" in done.stdout


def test_rdma_can_be_required(tmp_path: Path) -> None:
    path = tmp_path / "transports.json"
    assert bench("transports", "--quick", "--json", str(path)).returncode == 0
    there = json.loads(path.read_text(encoding="utf-8"))["machine"]["transports"]["ucx"].get("rdma", False)
    done = bench("transports", "--quick", "--require-rdma")
    assert (done.returncode, "install" in done.stderr) == ((0, False) if there else (2, True))


@pytest.mark.slow
def test_transports_are_measured(tmp_path: Path) -> None:
    path = tmp_path / "transports.json"
    done = bench("transports", "--json", str(path), "--html", str(tmp_path / "page.html"))
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads(path.read_text(encoding="utf-8"))["figures"]
    assert {"transports.tcp.get.16MiB.gbytes_per_s", "transports.shm.put.16MiB.ratio"} <= figures.keys()
