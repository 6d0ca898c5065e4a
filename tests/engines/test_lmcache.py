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
from kvstore_bench.compare_lmcache import run_compare_lmcache

from .support import environment, interpreter, run, run_child

pytestmark = pytest.mark.engines

_SURFACES = {"native_plugin": "KVStoreL2", "plugin": "KVStoreL2Adapter"}
_CHILD = "lmcache_child.py"
_SERDE_CHILD = "lmcache_serde_child.py"


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
def daemon(python: Path, spec: str, log: Path) -> Iterator[tuple[int, int]]:
    """`lmcache server` over an adapter: (its port, its HTTP port)."""
    port, http = free_port(), free_port()
    command = [
        python.with_name("lmcache"), "server", "--host", "127.0.0.1", "--port", port, "--http-port", http,
        "--l1-size-gb", 1, "--no-l1-use-lazy", "--eviction-policy", "LRU", "--supported-transfer-mode", "auto",
        "--l2-adapter", spec,
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


@pytest.mark.parametrize("packed", [False, True], ids=["raw", "serde"])
def test_a_daemon_finds_everything_again_after_a_restart(python: Path, tmp_path: Path, packed: bool) -> None:
    def bench(port: int, http: int) -> str:
        command = [
            python.with_name("lmcache"), "bench", "server", "--mode", "cpu", "--rpc-url", f"tcp://127.0.0.1:{port}",
            "--url", f"http://127.0.0.1:{http}", "--num-tokens", 1024, "--start", 0, "--end", 4, "--interval", 0,
            "--kvcache-shape-spec", "(2,256,16,8,128):bfloat16:8",
        ]  # fmt: skip
        return run(command)

    spec = adapter("native_plugin", f"file://{tmp_path}/kv", **({"sizes": "at_most"} if packed else {}))
    if packed:
        spec = json.dumps({**json.loads(spec), "serde": {"type": "kvstore", "codec": "shuffle-zstd"}})
    with daemon(python, spec, tmp_path / "log") as (port, http):
        output = bench(port, http)
        assert _number(output, "Checksum OK") == 4, output[-3000:]
        assert _number(output, "Checksum FAIL") == 0
    with daemon(python, spec, tmp_path / "log") as (port, http):
        bench(port, http)
        with urllib.request.urlopen(f"http://127.0.0.1:{http}/metrics") as reply:
            metrics = reply.read().decode()
    tokens = re.search(r"^lmcache_mp_lookup_hit_l2_tokens_total\{.*\} ([\d.]+)", metrics, re.MULTILINE)
    assert tokens, metrics[:2000]
    assert float(tokens[1]) == 8192  # 2 x 4 prompts of 1024 tokens: all of them, and from our store


# Our codecs as its serde.


def serde(python: Path, spec: dict[str, Any], numbers: list[int], **more: Any) -> Any:
    return run_child(python, _SERDE_CHILD, json.dumps({"adapter": spec, "numbers": numbers, **more}))


def spec_of(surface: str, url: str, sizes: str = "at_most", **options: Any) -> dict[str, Any]:
    spec: dict[str, Any] = json.loads(adapter(surface, url, sizes=sizes))
    return {**spec, "serde": {"type": "kvstore", **options}}


_RAW_BYTES = 2 * 4 * 64 * 256 * 2  # of one object of the child's


@pytest.mark.parametrize(
    ("surface", "options", "ratio", "off"),
    [
        ("native_plugin", {"codec": "int8", "head_size": 64, "max_workers": 2}, 0.53, 0.05),
        ("plugin", {"codec": "fp8", "head_size": 64}, 0.53, 0.3),
        ("plugin", {"codec": "shuffle-zstd"}, 0.95, 0),
    ],
)
def test_its_serde_wrapper_uses_our_codecs(
    python: Path, tmp_path: Path, surface: str, options: dict[str, Any], ratio: float, off: float
) -> None:
    spec = spec_of(surface, f"file://{tmp_path}/kv", **options)
    got = serde(python, spec, [1, 2, 3])
    assert got["stored"]
    assert 0.3 * 3 * _RAW_BYTES < got["bytes"] < ratio * 3 * _RAW_BYTES
    assert got["found"] == got["loaded"] == [True, True, True, False]
    assert max(got["off"]) <= off
    assert got["untouched"]
    assert got["leaked"] == 0
    again = serde(python, spec, [1, 2, 3], stored=True, damage=f"{tmp_path}/kv")
    assert again["loaded"] == [False] * 4
    assert again["leaked"] == 0


def test_its_own_adapter_learns_to_see_damage(python: Path, tmp_path: Path) -> None:
    """Its `fs` has no checksums; what our serde wrote has."""
    spec = {"type": "fs", "base_path": f"{tmp_path}/kv", "serde": {"type": "kvstore", "codec": "raw"}}
    got = serde(python, spec, [1, 2], **{"import": True})
    assert got["loaded"] == [True, True, False]
    assert got["off"] == [0, 0]
    got = serde(python, spec, [1, 2], **{"import": True, "stored": True, "damage": f"{tmp_path}/kv"})
    assert got["found"] == [True, True, False]
    assert got["loaded"] == [False] * 3


def test_with_exact_sizes_a_serde_gets_misses(python: Path, tmp_path: Path) -> None:
    spec = spec_of("native_plugin", f"file://{tmp_path}/kv", sizes="exact", codec="int8", head_size=64)
    got = serde(python, spec, [1])
    assert (got["stored"], got["found"], got["loaded"]) == (True, [True, False], [False, False])
    assert got["leaked"] == 0


def test_a_serde_that_makes_no_sense_stops_it(python: Path, tmp_path: Path) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"codec": "kvt"}, "where in the prompt a chunk begins"),
        ({"codec": "int8"}, "needs option head_size"),
        ({"codec": "zip"}, "unknown codec 'zip'"),
        ({"codec": "raw", "level": 3}, "unknown option 'level'"),
        ({"codec": "cachegen"}, "needs a profile"),
        ({}, "option codec must name a codec"),
        ({"codec": "raw", "max_workers": 0}, "max_workers"),
        ({"codec": "raw"}, ""),
    ]
    spec = spec_of("native_plugin", f"file://{tmp_path}/kv", codec="raw")
    said = serde(python, spec, [1], refuse=[options for options, _ in cases])
    for (options, message), refusal in zip(cases, said, strict=True):
        assert message in refusal, options
        assert bool(message) == bool(refusal), options


# Speed.


def test_the_comparison_runs_the_real_one(tmp_path: Path, python: Path) -> None:
    report = run_compare_lmcache(sizes=[1 << 20], repeats=2, python=str(python))
    assert report.ok, report.notes
    for op in ("store", "load"):
        for peer in ("fs_native", "fs"):
            assert report.figures[f"compare.lmcache.{op}.1MiB.vs_{peer}"].value > 0.01


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


def test_every_scheme_of_ours_is_what_it_is_in_kvstore(python: Path, tmp_path: Path) -> None:
    """`kvstore+` says that a URL is for our plug-in; `kvstore+ucx` is a scheme of ours as it stands."""
    a, b = f"{tmp_path}/a", f"{tmp_path}/b"
    urls = [
        f"kvstore+file://{a}",
        f"kvstore+file://{a},kvstore+file://{b}",
        f"kvstore+fs://host:0{a}",
        "kvstore+memory://",
    ]
    urls += ["kvstore+ucx://127.0.0.1:7070", "kvstore+nothing://x"]
    *places, ucx, nothing = child(python, "opened", urls=urls)
    assert places == [f"file://{a}", f"file://{a} file://{b}", f"file://{a}", "memory://"]
    # UCX is not installed there, and whoever asks for it is told so.
    assert ucx == "kvstore+ucx://127.0.0.1:7070" or "kvstore[ucx]" in ucx
    assert nothing.startswith("IrrecoverableException: kvstore: ")
    assert "nothing" in nothing


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


def test_a_place_that_hangs_holds_neither_references_nor_the_end(python: Path) -> None:
    """Connections are taken, and nothing is ever said. Reads and writes end at their deadlines, `close` at its own."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"node://127.0.0.1:{silent.getsockname()[1]}"
        got = child(python, "get", plugin=address, numbers=[0, 1], timeout=1, extra=_QUICK)
        assert got["digests"] == [None, None]
        assert got["leaked"] == 0
        assert got["close_seconds"] < 5
        stored = child(python, "put", plugin=address, numbers=[0], timeout=1, extra=_QUICK)
        assert (stored["failed"], stored["leaked"]) == (1, 0)


_QUICK = {f"remote_storage_plugin.kvstore.{name}": "1s" for name in ("lookup_timeout", "put_timeout", "close_timeout")}


def test_what_lmcache_cancels_is_given_back(python: Path, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/kv"
    child(python, "put", plugin=url, numbers=[0, 1, 2])
    got = child(python, "cancel", plugin=url, numbers=[0, 1, 2, 3], times=60)
    assert got["leaked"] == 0
    assert got["cancelled"] > 0
    assert got["after"] == [True, True, True, False]
    assert got["counts"] == [1] * got["put"]


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
