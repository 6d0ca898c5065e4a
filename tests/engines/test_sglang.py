"""An unmodified SGLang 0.5.23 over our storage backend: its own factory and host pools, and its engine on a CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvstore.testing.models import smollm2_folder
from tests.node_support import NodeProcess

from .support import interpreter, run_child

pytestmark = pytest.mark.engines

_SHIM = str(Path(__file__).with_name("sglang_shim"))
_PAGE = 16
_DEADLINES = {"batch_exists": 2.0, "batch_get_v1": 4.0, "batch_set_v1": 4.0}  # seconds
_SLACK_S = 2.0  # a thread on a busy machine wakes up late


@pytest.fixture(scope="module")
def python() -> Path:
    return interpreter("sglang")


def child(python: Path, what: str, calls: Path | None = None, **given: Any) -> Any:
    env = {"PYTHONPATH": _SHIM, **({} if calls is None else {"SHIM_CALLS": str(calls)})}
    return run_child(python, "sglang_child.py", what, json.dumps(given), timeout=600, **env)


def test_pages_of_its_host_pools_come_back(python: Path, tmp_path: Path) -> None:
    layouts = ["layer_first", "page_first", "page_first_direct"]
    cases = child(python, "pools", url=f"file://{tmp_path}/kv", layouts=layouts)
    assert [(case["layout"], case["mla"]) for case in cases] == [(each, mla) for each in layouts for mla in (0, 1)]
    for case in cases:
        assert len(set(case["before"])) == 4
        assert (case["empty"], case["exists"]) == (0, 4)
        assert case["stored"] == case["loaded"] == [True] * 4
        assert case["after"] == case["flat"] == case["before"]
        assert case["flat stored"]
        assert case["flat missing"]
        assert case["crossed"] == [True], "both interfaces make the same records"
        assert case["crossed page"] == case["before"][1]
        assert case["moved"] == [[4, 4, 1], [2, 2, 1]]
        assert case["bandwidth"]
        assert case["other rank stores"] == [True]
        if case["mla"]:  # all ranks have the same, and the first one writes it
            assert (case["other rank"], case["other rank stored"]) == (4, False)
        else:
            assert (case["other rank"], case["other rank stored"]) == (0, True)
        assert case["other model"] == 0
        assert case["cleared"] == [0, True]


def test_what_it_cannot_serve_is_said_by_name(python: Path) -> None:
    said = child(python, "refused", url="memory://")
    assert said.keys() == {"option", "revision", "split", "swa"}
    assert all(each.startswith("ConfigError: ") for each in said.values()), said
    assert "no_option_of_anybody" in said["option"]
    assert "give revision in the backend's extra config" in said["revision"]
    assert "tp_lcm_size" in said["split"]
    assert "host pool 'swa'" in said["swa"]


def test_the_revision_tells_whatever_changes_kv(python: Path, tmp_path: Path) -> None:
    folder, copy, trained = (tmp_path / name for name in ("model", "copy", "trained"))
    for each, weights in ((folder, b"w"), (copy, b"w"), (trained, b"v")):
        each.mkdir()
        (each / "model.safetensors").write_bytes(weights * 1000)
        (each / "config.json").write_text(json.dumps({"model_type": "llama", "rope_theta": 1e4, "use_cache": True}))
    same = [{"model_path": str(folder)}, {"model_path": str(copy)}, {"model_path": str(folder), "context_length": 99}]
    others = [
        {"model_path": str(trained)},
        *({"model_path": str(folder), **more} for more in (
            {"json_model_override_args": '{"rope_theta": 5}'}, {"quantization": "fp8"}, {"dtype": "float16"},
            {"load_format": "dummy", "random_seed": 1}, {"load_format": "dummy", "random_seed": 2},
            {"speculative_draft_model_path": "x"},
        )),
    ]  # fmt: skip
    *found, kinds = child(python, "revisions", settings=[*same, *others, {"model_path": "nobody/nothing"}])
    assert kinds == ["uint8 of fp8_e4m3", "uint8 of fp8_e5m2"]
    assert len(set(found[:3])) == 1
    assert len(set(found[2:-1])) == 1 + len(others)
    assert found[-1].startswith("ConfigError: it cannot be told which weights the model 'nobody/nothing' has")


def questions(node: NodeProcess, layout: str) -> dict[str, Any]:
    facts = " ".join(f"Fact {n}: item {n} costs {n * 3} coins." for n in range(30))
    return {
        "model": str(smollm2_folder()), "url": f"node://{node.address}?breaker_interval=200ms", "layout": layout,
        "prompt": f"You are a helpful assistant. {facts} Question: how much does item 7 cost? Answer:",
        "other": f"Once upon a time. {facts}",
        "extra": {
            "lookup_timeout": _DEADLINES["batch_exists"], "blocking_timeout": _DEADLINES["batch_get_v1"],
            "put_timeout": _DEADLINES["batch_set_v1"],
        },
    }  # fmt: skip


def whole_pages(first: dict[str, Any]) -> int:
    """Checks an engine that began with an empty store; returns how many tokens of its prompt are stored."""
    cold = first["cold"]
    whole: int = (cold["length"] - 1) // _PAGE * _PAGE
    assert whole >= 256
    assert (cold["cached"], cold["from_storage"]) == (0, 0)
    assert first["pages"] >= cold["length"] // _PAGE
    assert first["again"]["from_storage"] == first["again"]["cached"] == whole
    assert first["again"]["backend"] == "KVStoreHiCache"
    assert first["other"]["cached"] == 0
    metrics = first["metrics"]
    assert metrics["sglang:prefetched_tokens_total"] == metrics["sglang:storage_prefetch_hit_tokens_total"] == whole
    assert metrics["sglang:backuped_tokens_total"] >= whole
    assert metrics["sglang:prefetch_pgs_sum"] == whole // _PAGE
    assert metrics["sglang:backup_pgs_sum"] >= whole // _PAGE
    assert metrics["sglang:prefetch_bandwidth_sum"] > 0
    assert first["cleared"] == 0
    assert first["after"]["cached"] == 0
    assert first["again"]["text"] == first["after"]["text"] == cold["text"]
    return whole


@pytest.mark.slow
@pytest.mark.model
def test_text_is_the_same_from_the_store_in_a_new_process_and_without_it(python: Path, tmp_path: Path) -> None:
    with NodeProcess(memory=512 << 20) as node:
        given = questions(node, "page_first_direct")
        first = child(python, "cold", **given)
        whole = whole_pages(first)
        assert node._process is not None
        second = child(python, "warm", tmp_path / "calls", **given, server=node._process.pid)
    assert second["warm"]["from_storage"] == whole, "in another process"
    for name in ("warm", "hangs", "dead"):
        assert second[name]["text"] == first["cold"]["text"], name
    assert second["still dead"]["text"] == first["other"]["text"]
    for name in ("hangs", "dead", "still dead"):
        assert second[name]["cached"] == 0, name
    calls = second["calls"]
    assert {name for name, _, _ in calls} == {"batch_exists", "batch_set_v1"}
    assert not any(result if name == "batch_exists" else any(result) for name, _, result in calls)
    for name, seconds, _ in calls:
        assert seconds <= _DEADLINES[name] + _SLACK_S, name


@pytest.mark.slow
@pytest.mark.model
def test_text_is_the_same_with_pages_in_pieces_per_layer(python: Path) -> None:
    with NodeProcess(memory=512 << 20) as node:
        assert whole_pages(child(python, "cold", **questions(node, "layer_first")))
