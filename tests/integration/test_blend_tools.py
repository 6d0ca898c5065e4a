"""`kvstore-bench blend`, examples/rag.py and examples/blend_quality_7b.py for real: a model and a tokenizer in a
folder, stores, records. The model is tiny and random, so what it says means nothing; what was reused does."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvstore.testing.models import default_model_folder, tiny_model
from kvstore_bench import cli

pytest.importorskip("torch")
pytest.importorskip("transformers")

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.leaves("torch keeps threads of its own")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of four layers that reads bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    path = tmp_path_factory.mktemp("model")
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer: Any = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast: Any = PreTrainedTokenizerFast
    fast(tokenizer_object=tokenizer, eos_token="<eos>").save_pretrained(path)
    tiny_model("llama", vocab_size=512, num_hidden_layers=4, max_position_embeddings=8192).save_pretrained(path)
    return path


def example(name: str, *words: str) -> int:
    """Run an example as a program, in this process: importing torch takes seconds."""
    spec = importlib.util.spec_from_file_location(f"{name}_for_real", ROOT / "examples" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    status: int = module.main(words)
    return status


def test_the_bench_measures_what_it_says(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = tmp_path / "blend.json"
    words = ["blend", "--quick", "--model", str(folder), "--latency", "0.1ms", "--json", str(results)]
    assert cli.main([*words, "--html", str(tmp_path / "blend.html")]) == 0, capsys.readouterr()
    data = json.loads(results.read_text(encoding="utf-8"))
    assert data["ok"] is True
    assert data["wrong"] == 0
    rows = {(row["scheme"], row["form"], row["ratio"]): row for row in data["rows"] if row["kind"] == "scheme"}
    reuse, shared = (rows["full reuse", form, 0.0] for form in ("alone", "shared_prefix"))
    assert rows["full prefill", "", 1.0]["kl"] == 0
    assert reuse["kl"] > 0
    assert reuse["token_layers"] < 0.1 < rows["deviation", "alone", 0.15]["token_layers"] < 1
    assert rows["deviation", "shared_prefix", 1.0]["kl"] < 1e-6
    assert shared["kl"] != reuse["kl"]
    assert data["figures"]["blend.r1_logits"]["value"] <= 1e-4
    assert data["figures"]["blend.r0_unequal"]["value"] == 0
    assert data["figures"]["blend.kl_ratio.0.15"]["bar"] is None, "two prompts are too few"
    (link,) = [row for row in data["rows"] if row["kind"] == "link"]
    assert link["verified"] is True
    assert link["ttft_s"] >= link["load_s"] * 0.5  # it went over the link
    assert [row["ratio"] for row in data["rows"] if row["kind"] == "ttft"] == [0.0, 0.15, 0.5]
    assert (tmp_path / "blend.html").read_text(encoding="utf-8").count("<svg") == 3


def test_rag_stores_documents_once_and_finds_them_again(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = tmp_path / "texts"
    texts.mkdir()
    for number in range(3):
        (texts / f"{number}.txt").write_text(f"Text {number} is about rivers. " * 6, encoding="utf-8")
    words = [
        str(texts), "--question", "What about rivers?", "--top", "2", "--model", str(folder), "--new-tokens", "3",
        "--rounds", "1", "--url", f"file://{tmp_path}/kv", "--json", str(tmp_path / "rag.json"), "--ratio", "0.15",
    ]  # fmt: skip
    for run, said in enumerate(("4 stored now, 0 were there", "0 stored now, 4 were there")):
        assert example("rag", *words) == 0
        out = capsys.readouterr().out
        assert said in out, f"run {run}: the prefix and three documents"
        ways = {way["name"]: way for way in json.loads((tmp_path / "rag.json").read_text(encoding="utf-8"))}
        assert list(ways) == ["full prefill", "prefix caching only", "full reuse", "blend"]
        for way in ways.values():
            assert f"{way['name']:<20} {way['ttft_s']:>8.3f}" in out
        tokens = ways["full prefill"]["tokens"]
        assert {way["tokens"] for way in ways.values()} == {tokens}
        prefix = ways["prefix caching only"]["reused"]
        assert 0 < prefix < ways["full reuse"]["reused"] < tokens, "the system prompt alone"
        assert ways["full reuse"]["reused"] == ways["blend"]["reused"]
        assert ways["full reuse"]["computed"] < ways["blend"]["computed"] < 1


def test_a_store_that_is_none_is_one_sentence(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert example("rag", "--model", str(folder), "--url", "nowhere") == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("rag.py: ")
    assert err.count("\n") == 1


def test_the_judge_of_answers_runs_on_its_sample(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = tmp_path / "answers.json"
    words = ["--model", str(folder), "--ratios", "0.15,1", "--new-tokens", "4", "--chunk", "200"]
    assert example("blend_quality_7b", *words, "--json", str(results)) == 0
    out = capsys.readouterr().out
    rows = json.loads(results.read_text(encoding="utf-8"))
    ways = ["full prefill", "full reuse", "blend 0.15", "blend 1"]
    assert [row["way"] for row in rows] == ways * 4
    assert {row["dataset"] for row in rows} == {"2wikimqa", "musique", "samsum", "multi_news"}
    for row in rows:
        assert row["dataset"] in out
        assert 0 <= row["score"] <= 1
    for full, whole in zip(rows[::4], rows[3::4], strict=True):
        assert full["answer"] == whole["answer"], "with everything computed again nothing is lost"
        assert full["tokens"] == whole["tokens"]


def program(*words: str) -> subprocess.CompletedProcess[str]:
    clean = {key: value for key, value in os.environ.items() if not key.startswith("KVSTORE_")}
    return subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, timeout=900, check=False, cwd=ROOT,
        env={**clean, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.model
def test_rag_as_the_readme_has_it() -> None:
    if not (default_model_folder() / "SmolLM2-135M-Instruct" / "config.json").exists():
        pytest.skip("make model was not run")
    done = program("examples/rag.py")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Ada Quill" in next(line for line in done.stdout.splitlines() if line.startswith("full prefill"))
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("blend  ")]
    reused, computed = line.split()[3:5]
    assert int(reused) > 800
    assert float(computed.removesuffix("%")) < 30


@pytest.mark.slow
@pytest.mark.model
def test_the_quick_bench_on_smollm2(tmp_path: Path) -> None:
    if not (default_model_folder() / "SmolLM2-135M-Instruct" / "config.json").exists():
        pytest.skip("make model was not run")
    done = program("-m", "kvstore_bench", "blend", "--quick", "--json", str(tmp_path / "blend.json"))
    assert done.returncode == 0, done.stderr
    data = json.loads((tmp_path / "blend.json").read_text(encoding="utf-8"))
    figures = {name: figure["value"] for name, figure in data["figures"].items()}
    assert figures["blend.prefill_compute.0.15"] <= 0.25
    assert figures["blend.prefill_cpu.0.15"] <= 0.5  # 0.35 is the bar, of a quiet machine
    assert figures["blend.kl_ratio_shared_prefix.0.15"] < figures["blend.kl_ratio_shared_prefix.0"] < 1
