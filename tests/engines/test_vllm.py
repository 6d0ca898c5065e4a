"""A real vLLM 0.32 engine over our connector: the same text, from the store, whatever happens to the store."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvstore.testing.models import smollm2_folder, tiny_model

from .support import interpreter, run_child

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
    assert second["leaked"] == _NOTHING


@pytest.mark.parametrize("mode", ["layerwise", "async"])
def test_a_remote_in_trouble_costs_its_deadline_at_most(python: Path, tiny: Path, mode: str) -> None:
    extra = {
        "load_mode": mode, "chunk_size": 128 if mode == "async" else 96, "lookup_timeout": "1s",
        "blocking_timeout": "1500ms", "put_timeout": "5s", "breaker_interval": "200ms",
    }  # fmt: skip
    found = child(python, "trouble", model=str(tiny), url="", extra=extra)
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
    assert crowd["leaked"] == found["leaked"] == _NOTHING
