"""A real vLLM 0.32 engine over our connector: the same text, from the store, whatever happens to the store."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from kvstore.testing.models import smollm2_folder, tiny_model

from .support import environment, interpreter, run_child

pytestmark = pytest.mark.engines

_CHILD = "vllm_child.py"
_DEADLINE_S = 2.5  # lookup_timeout and blocking_timeout of the engines in trouble, together
_NOTHING = {
    "pool": {"in_use": 0, "buffers": 0, "pinned": 0, "quarantined": 0, "waiting": 0},
    "blocks": 0, "requests": 0, "streams": 0,
}  # fmt: skip


@pytest.fixture(scope="module")
def python() -> Path:
    return interpreter("vllm")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights; vLLM's CPU kernels want heads of 32 or more."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    tiny_model("llama", hidden_size=128, head_dim=32, num_hidden_layers=4).save_pretrained(folder)
    return folder


def child(python: Path, what: str, **given: Any) -> Any:
    return run_child(python, _CHILD, what, json.dumps(given), timeout=900)


def same_text(answers: dict[str, Any], *names: str) -> None:
    for name in names:
        assert answers[name]["tokens"] == answers["cold"]["tokens"], name
        assert answers[name]["text"] == answers["cold"]["text"], name


@pytest.mark.model
def test_text_is_the_same_from_the_store_and_in_a_new_process(python: Path, tmp_path: Path) -> None:
    facts = " ".join(f"Fact {n}: item {n} costs {n * 3} coins." for n in range(60))
    prompt = f"You are a helpful assistant. {facts} Question: how much does item 7 cost? Answer:"
    given = {"model": str(smollm2_folder()), "url": f"file://{tmp_path}/kv", "prompt": prompt}
    first = child(python, "cold", **given)
    stored = first["cold"]["length"] // 256 * 256
    assert stored >= 768
    assert first["cold"]["cached"] == 0
    assert first["again"]["cached"] == first["salted again"]["cached"] == stored
    assert first["salted"]["cached"] == first["other"]["cached"] == 0, "nothing is shared across salts"
    same_text(first, "again", "salted", "salted again", "other")
    assert first["transformers"]["hit"] == stored
    assert first["transformers"]["worst"] < 1e-3

    second = child(python, "warm", **given, folder=str(tmp_path / "kv"))
    second["cold"] = first["cold"]
    assert second["warm"]["cached"] == second["healed"]["cached"] == second["stored again"]["cached"] == stored
    assert second["missing"]["cached"] == 256, "nothing behind a hole"
    same_text(second, "warm", "corrupt", "healed", "missing", "stored again")
    counters = second["counters"]
    assert counters["loads"] == 5
    assert counters["loads_failed"] == 1
    assert counters["failed_tokens"] == stored - 256
    assert second["burst"] == {"same": True, "again": True, "left": [], "failed": 1, "told again": True}
    assert second["leaked"] == _NOTHING


class Server:
    """vLLM's API server over a store, in processes of its own. `role`, `options`: of the connector."""

    def __init__(
        self, python: Path, folder: Path, model: str, *, role: str = "kv_both", wait: bool = True, **options: Any
    ) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.port = listener.getsockname()[1]
        transfer = {
            "kv_connector": "KVStoreConnector", "kv_role": role, "kv_load_failure_policy": "recompute",
            "kv_connector_module_path": "kvstore.integrations.vllm",
            "kv_connector_extra_config": {"remote_url": f"file://{folder}/kv", **options},
        }  # fmt: skip
        command = [
            python, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--served-model-name", "m",
            "--port", self.port, "--host", "127.0.0.1", "--dtype", "float32", "--max-model-len", "2048",
            "--enforce-eager", "--enable-prompt-tokens-details", "--num-gpu-blocks-override", "64",
            "--max-num-batched-tokens", "256",
            "--kv-transfer-config", json.dumps(transfer),
        ]  # fmt: skip
        env = environment(
            {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_SERVER_DEV_MODE": "1"}
        )
        self._log = folder / f"{role}.log"
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [str(part) for part in command], env=env, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
        if wait:
            self.started()

    def started(self) -> None:
        """Wait until it answers."""
        end = time.monotonic() + 400
        while True:
            with contextlib.suppress(OSError):
                self.call("/health")
                return
            if self.process.poll() is not None or time.monotonic() > end:
                self.stop()
                pytest.fail(f"the server does not start:\n{self._log.read_text()[-4000:]}")
            time.sleep(0.5)

    def call(self, path: str, body: dict[str, Any] | None = None) -> str:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", data, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=300) as answer:
            text: str = answer.read().decode()
        return text

    def ask(self, prompt: str, **fields: Any) -> tuple[str, int]:
        """The text, and how many tokens of the prompt were cached; afterwards vLLM's own cache is empty."""
        body = {"model": "m", "prompt": prompt, "max_tokens": 12, "temperature": 0, **fields}
        answer = json.loads(self.call("/v1/completions", body))
        details = answer["usage"].get("prompt_tokens_details") or {}
        end = time.monotonic() + 60
        while json.loads(self.call("/reset_prefix_cache", {}) or "{}").get("error"):
            assert time.monotonic() < end
        return answer["choices"][0]["text"], details.get("cached_tokens") or 0

    def metric(self, name: str) -> float:
        lines = [line for line in self.call("/metrics").splitlines() if line.startswith(name)]
        assert lines, name
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)

    def signal(self, number: int) -> None:
        """To all of its processes."""
        os.killpg(self.process.pid, number)

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.signal(signal.SIGKILL)
                self.process.wait()


@pytest.mark.model
def test_the_api_server_shares_nothing_across_salts_and_tells_it_in_its_metrics(python: Path, tmp_path: Path) -> None:
    prompt = " ".join(f"Fact {n}: item {n} costs {n * 3} coins." for n in range(30)) + " Item 7 costs"
    server = Server(python, tmp_path, str(smollm2_folder()))
    try:
        text, cached = server.ask(prompt)
        assert cached == 0
        again, stored = server.ask(prompt)
        assert again == text
        assert stored >= 256
        for salt in ("tenant-a", "tenant-b"):
            assert server.ask(prompt, cache_salt=salt) == (text, 0)
            assert server.ask(prompt, cache_salt=salt) == (text, stored)
        assert server.metric("vllm:kvstore_load_tokens_total") == 3 * stored
        assert server.metric("vllm:kvstore_lookups_total") == 6
        assert server.metric("vllm:external_prefix_cache_hits_total") == 3 * stored
        assert server.metric("vllm:kvstore_save_chunks_total") == 3 * stored // 256
        assert server.metric("vllm:kvstore_loads_failed_total") == 0
    finally:
        server.stop()


def test_a_tier_behind_vllms_own_offloading(python: Path, tiny: Path, tmp_path: Path) -> None:
    given = {"model": str(tiny), "url": f"file://{tmp_path}/kv"}
    first = child(python, "tier", **given)["answers"]
    assert [answer["cached"] for answer in first] == [0, 0]
    second = child(python, "tier", **given, damage=str(tmp_path / "kv"))["answers"]
    assert [answer["tokens"] for answer in second] == [answer["tokens"] for answer in first]
    cached = sorted(answer["cached"] for answer in second)
    assert cached[1] == 640, "5 blocks of 128"
    assert cached[0] < 640, "a damaged record is computed, with all behind it"


def test_the_tier_as_its_manager_drives_it(python: Path) -> None:
    found = child(python, "tier_alone")
    assert found["empty"] == ["MISS"] * 4
    assert found["questions"] == [4], "the lookups of a step are one question"
    assert found["store"] == [1, True, None, 3 * 4096]
    assert found["stored"] == ["HIT", "HIT", "HIT", "MISS"]
    assert found["again"] == [2, True, None, 3 * 4096]
    assert found["load"] == [3, True, None, 3 * 4096]
    assert found["bytes"], "the chunks that were asked for, and no others"
    assert found["partly"][:2] == [4, False]
    assert len(found["partly"][2]) == 2
    assert found["trouble"] == ["MISS"] * 4
    assert found["hung"] == [True, []], "memory that a backend may still write to is not given back"
    assert found["after"] == [True]
    assert found["idle"]


@pytest.mark.parametrize("mode", ["layerwise", "async"])
def test_a_remote_in_trouble_costs_its_deadline_at_most(python: Path, tiny: Path, mode: str) -> None:
    extra = {
        "load_mode": mode, "chunk_size": 128 if mode == "async" else 96, "lookup_timeout": "1s",
        "blocking_timeout": "1500ms", "put_timeout": "5s",
    }  # fmt: skip
    # With few blocks requests are preempted.
    found = child(python, "trouble", model=str(tiny), url="", extra=extra, blocks=12, longest=1024)
    size = extra["chunk_size"]
    assert found["warm"]["cached"] == 700 // size * size
    cold = found["cold"]["tokens"]
    for name in ("warm", "hangs while it loads", "dies while it loads"):
        assert found[name]["tokens"] == cold, name
    for name in ("hangs", "is dead"):
        assert found[name]["tokens"] == found["cold other"]["tokens"], name
    slowest = max(found["cold"]["seconds"], found["cold other"]["seconds"])
    for name in ("hangs while it loads", "dies while it loads", "hangs", "is dead"):
        assert found[name]["seconds"] <= slowest + _DEADLINE_S, name
    assert found["counters"]["loads_failed"] == 2
    crowd = found["crowd"]
    assert crowd["same"]
    assert crowd["finished"] >= 2 * 13
    assert crowd["loads"] > 0
    assert crowd["preempted"] > 0
    assert crowd["leaked"] == found["leaked"] == _NOTHING
