"""An unmodified LMCache 0.5.6 over our store: its own acceptance tests and benchmark drive us, as a client would."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvstore.config import load_config
from kvstore.errors import ConfigError

from .support import environment, interpreter, run, run_child

pytestmark = pytest.mark.engines

_SURFACES = {"native_plugin": "KVStoreL2", "plugin": "KVStoreL2Adapter"}
_CHILD = "lmcache_child.py"


@pytest.fixture(scope="module")
def python() -> Path:
    return interpreter("lmcache")


def adapter(surface: str, url: str, **options: object) -> str:
    return json.dumps(
        {
            "type": surface,
            "module_path": "kvstore.integrations.lmcache",
            "class_name": _SURFACES[surface],
            "adapter_params": {"remote_url": url, **options},
        }
    )


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


# MP mode: LMCache's own tools.


@pytest.mark.parametrize("surface", _SURFACES)
def test_its_check_of_l2_adapters_passes(python: Path, tmp_path: Path, surface: str) -> None:
    command = [python, "-m", "lmcache.v1.basic_check", "--mode", "test_l2_adapter", "--l2-adapter"]
    output = run([*command, adapter(surface, f"file://{tmp_path}/kv")])
    rates = re.findall(r"\|\s+(\d+)/(\d+)\s+\|\s+([\d.]+)%", output)
    assert len(rates) == 4, output[-3000:]
    assert all(passed == total and rate == "100.0" for passed, total, rate in rates)


@pytest.mark.parametrize("surface", _SURFACES)
def test_its_benchmark_of_l2_adapters_verifies_what_it_loads(python: Path, tmp_path: Path, surface: str) -> None:
    command = [
        python.with_name("lmcache"), "bench", "l2", "--l2-adapter", adapter(surface, f"file://{tmp_path}/kv"),
        "--num-keys", 16, "--in-flight", 2, "--data-size-kb", 4096, "--rounds", 2, "--lookup-max-hit-rate", "1.0",
        "--no-skip-verify",
    ]  # fmt: skip
    output = run(command)
    sections = dict(re.findall(r"-+ (Store|Lookup|Load) -+((?:\n[^-].*)+)", output))
    assert set(sections) == {"Store", "Lookup", "Load"}, output[-3000:]
    for section in sections.values():
        assert _number(section, "Rounds timed out") == 0
        assert _number(section, "Total success") == _number(section, "Total keys") == 64
    assert _number(sections["Lookup"], "Actual hit rate") == 1


def _number(text: str, name: str) -> float:
    found = re.search(rf"{name}:\s+([\d.]+)", text)
    assert found, f"no {name!r} in {text}"
    return float(found[1])


@contextlib.contextmanager
def daemon(python: Path, url: str, log: Path) -> Iterator[tuple[int, int]]:
    """`lmcache server` over our store: (its port, its HTTP port)."""
    port, http = free_port(), free_port()
    command = [
        python.with_name("lmcache"), "server", "--host", "127.0.0.1", "--port", port, "--http-port", http,
        "--l1-size-gb", 1, "--no-l1-use-lazy", "--eviction-policy", "LRU", "--supported-transfer-mode", "auto",
        "--l2-adapter", adapter("native_plugin", url),
    ]  # fmt: skip
    with log.open("a") as out:
        process = subprocess.Popen([str(part) for part in command], env=environment(), stdout=out, stderr=out)
        try:
            end = time.monotonic() + 90
            while True:
                assert process.poll() is None, log.read_text()[-3000:]
                assert time.monotonic() < end, log.read_text()[-3000:]
                with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{http}/healthcheck"):
                    break
                time.sleep(0.1)
            yield port, http
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def test_a_daemon_finds_everything_again_after_a_restart(python: Path, tmp_path: Path) -> None:
    def bench(port: int, http: int) -> str:
        command = [
            python.with_name("lmcache"), "bench", "server", "--mode", "cpu", "--rpc-url", f"tcp://127.0.0.1:{port}",
            "--url", f"http://127.0.0.1:{http}", "--num-tokens", 1024, "--start", 0, "--end", 4, "--interval", 0,
            "--kvcache-shape-spec", "(2,256,16,8,128):bfloat16:8",
        ]  # fmt: skip
        return run(command)

    url = f"file://{tmp_path}/kv"
    with daemon(python, url, tmp_path / "log") as (port, http):
        output = bench(port, http)
        assert _number(output, "Checksum OK") == 4, output[-3000:]
        assert _number(output, "Checksum FAIL") == 0
    with daemon(python, url, tmp_path / "log") as (port, http):
        bench(port, http)
        with urllib.request.urlopen(f"http://127.0.0.1:{http}/metrics") as reply:
            metrics = reply.read().decode()
    tokens = re.search(r"^lmcache_mp_lookup_hit_l2_tokens_total\{.*\} ([\d.]+)", metrics, re.MULTILINE)
    assert tokens, metrics[:2000]
    assert float(tokens[1]) == 8192  # 2 x 4 prompts of 1024 tokens: all of them, and from our store


# In-process mode: what `remote_url` means.

_PLUGIN = {
    "remote_storage_plugins": ["kvstore"],
    "extra_config": {
        "remote_storage_plugin.kvstore.module_path": "kvstore.integrations.lmcache",
        "remote_storage_plugin.kvstore.class_name": "KVStoreAdapter",
    },
}


@pytest.mark.parametrize("mode", ["test_remote", "test_storage_manager"])
def test_its_check_of_remote_backends_passes(python: Path, tmp_path: Path, mode: str) -> None:
    config = {"chunk_size": 256, "local_cpu": False, "max_local_cpu_size": 1, "remote_serde": "naive", **_PLUGIN}
    config["remote_url"] = f"kvstore+file://{tmp_path}/kv"
    file = tmp_path / "lmcache.yaml"
    file.write_text(yaml.safe_dump(config))
    output = run([python, "-m", "lmcache.v1.basic_check", "--mode", mode], {"LMCACHE_CONFIG_FILE": str(file)})
    assert len(re.findall(r"\|\s+5/5\s+\|\s+100.0%", output)) == 4, output[-3000:]


def child(python: Path, what: str, **given: Any) -> Any:
    return run_child(python, _CHILD, what, json.dumps(given))


def test_chunks_come_back_in_another_process(python: Path, tmp_path: Path) -> None:
    stored = child(python, "put", url=f"kvstore+file://{tmp_path}/kv", numbers=[0, 1, 3])
    assert (stored["failed"], stored["leaked"]) == (0, 0)
    digests = stored["digests"]
    # The same place by the other way; a hole stays a hole, and nothing behind it moves up.
    got = child(python, "get", plugin=f"file://{tmp_path}/kv", numbers=[0, 1, 2, 3], remove=True)
    assert got["digests"] == [digests[0], digests[1], None, digests[2]]
    assert got["exists"] == [True, True, False, True]
    assert (got["run"], got["prefix"], got["ping"]) == (2, 2, 0)
    assert got["single"] == digests[0]
    assert got["leaked"] == 0
    assert got["removed"] == [True, True, False, True]
    assert got["after"] == [False] * 4


def test_a_partial_chunk_keeps_its_shape(python: Path, tmp_path: Path) -> None:
    url = f"kvstore+file://{tmp_path}/kv"
    stored = child(python, "put", url=url, numbers=[5], tokens=100, unfull=True)
    got = child(python, "get", url=url, numbers=[5], unfull=True)
    assert got["digests"] == stored["digests"]
    assert got["shapes"] == [[2, 4, 100, 128]]
    assert got["leaked"] == 0


def test_what_its_cachegen_compressed_comes_back(python: Path, tmp_path: Path) -> None:
    """A compressed object has a size of its own; both of its ways of reading decode it."""
    url = f"kvstore+file://{tmp_path}/kv"
    stored = child(python, "put", url=url, numbers=[1], serde="cachegen", layers=32)
    assert stored["failed"] == 0
    record = max(path.stat().st_size for path in (tmp_path / "kv").rglob("*") if path.is_file())
    assert record < 32 * 2 * 256 * 2 * 64 * 2  # smaller than raw
    got = child(python, "get", url=url, numbers=[1], serde="cachegen", layers=32)
    assert got["shapes"] == [[2, 32, 256, 128]]
    assert got["digests"][0] == got["single"] is not None


def test_damage_is_a_miss(python: Path, tmp_path: Path) -> None:
    url = f"kvstore+file://{tmp_path}/kv"
    child(python, "put", url=url, numbers=[0])
    (record,) = [path for path in (tmp_path / "kv").rglob("*") if path.is_file() and path.stat().st_size > 100_000]
    damaged = bytearray(record.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    record.chmod(0o644)
    record.write_bytes(damaged)
    got = child(python, "get", url=url, numbers=[0])
    assert got["digests"] == [None]
    assert got["leaked"] == 0


def test_a_node_that_is_gone_costs_misses_not_time(python: Path) -> None:
    got = child(python, "get", plugin=f"node://127.0.0.1:{free_port()}", numbers=[0, 1], timeout=2)
    assert (got["digests"], got["run"], got["prefix"], got["ping"]) == ([None, None], 0, 0, 1)
    assert got["seconds"] < 2 * 2 + 1
    assert got["leaked"] == 0


def test_its_engine_retrieves_in_a_new_process(python: Path, tmp_path: Path) -> None:
    given = {"plugin": f"file://{tmp_path}/kv", "tokens": 1024, "expect": 1024}
    assert child(python, "engine", **given) == {"hit": 0, "retrieved": 0, "after": 1024}
    assert child(python, "engine", **given) == {"hit": 1024, "retrieved": 1024, "after": 1024}


# A file written for LMCache.


def test_its_configuration_opens_here(tmp_path: Path) -> None:
    file = tmp_path / "lmcache.yaml"
    file.write_text(
        f"chunk_size: 512\nlocal_cpu: true\nmax_local_cpu_size: 5\nremote_url: 'kvstore+file://{tmp_path}/kv'\n"
        "remote_serde: naive\nsave_unfull_chunk: false\n"
    )
    config = load_config(config_file=file, env={})
    assert config.chunk_size == 512
    file.write_text("chunk_size: 256\nremote_url: memory://\nno_option_of_anybody: 1\n")
    with pytest.raises(ConfigError, match="no_option_of_anybody"):
        load_config(config_file=file, env={})
