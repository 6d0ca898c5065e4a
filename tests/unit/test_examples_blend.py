"""examples/rag.py and examples/blend_quality_7b.py without a model: ranking, metrics, files, and what they refuse."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from kvstore.testing.models import NAME, smollm2_folder

EXAMPLES = Path(__file__).parents[2] / "examples"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"{name}_under_test", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def rag() -> ModuleType:
    return load("rag")


@pytest.fixture(scope="module")
def judge() -> ModuleType:
    return load("blend_quality_7b")


# rag.py


def test_the_best_documents_come_first(rag: ModuleType) -> None:
    texts = rag.read_folder(EXAMPLES / "documents")
    assert len(texts) == 8
    assert rag.rank(texts, rag.QUESTION)[0] == "lighthouse.txt"
    assert rag.rank(texts, "Which comet did Lina Farkas discover?")[0] == "observatory.txt"
    assert rag.rank({"b": "one two", "a": "one two"}, "three") == ["a", "b"]


def test_a_folder_without_texts_is_named(rag: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert rag.main([str(tmp_path)]) == 2
    assert str(tmp_path) in capsys.readouterr().err
    (tmp_path / "a.txt").write_bytes(b"\xff\xfe\xff")
    assert rag.main([str(tmp_path)]) == 2
    assert "a.txt" in capsys.readouterr().err
    assert rag.main([str(tmp_path), "--top", "0"]) == 2
    assert "--top" in capsys.readouterr().err


def test_what_the_model_needs_is_named_before_anything_is_downloaded(
    rag: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = importlib.util.find_spec

    def without(name: str, package: str | None = None) -> Any:
        return None if name in ("gguf", "accelerate") else found(name, package)

    def downloads(*_: object, **__: object) -> None:
        raise AssertionError("pip was run")

    monkeypatch.setattr(importlib.util, "find_spec", without)
    monkeypatch.setattr("kvstore.testing.models.subprocess.run", downloads)
    monkeypatch.setenv("KVSTORE_MODEL_DIR", str(tmp_path / "models"))
    assert rag.main([]) == 2
    said = capsys.readouterr().err
    assert "without gguf, accelerate: in kvstore's checkout run pip install -c constraints.txt '.[demo]'" in said
    assert said.count("\n") == 1
    assert not (tmp_path / "models").exists()
    # A model that is there needs none of it.
    (tmp_path / "models" / NAME).mkdir(parents=True)
    (tmp_path / "models" / NAME / "config.json").write_text("{}")
    assert smollm2_folder() == tmp_path / "models" / NAME


class Templated:
    chat_template = "yes"

    def apply_chat_template(self, turns: list[dict[str, str]], **_: object) -> str:
        return "".join(f"[{turn['role']}]{turn['content']}[/]" for turn in turns) + "[assistant]"


def test_documents_stand_inside_the_chat_template(rag: ModuleType) -> None:
    before, behind = rag.frame(Templated())
    assert before == f"[system]{rag.SYSTEM}[/][user]"
    assert behind == "[/][assistant]"


# blend_quality_7b.py


@pytest.mark.parametrize(
    ("answer", "truth", "score"),
    [
        ("The Lina Farkas!", "lina farkas", 1.0),
        ("Lina", "Lina Farkas", 2 / 3),
        ("somebody else", "Lina Farkas", 0.0),
        ("", "Lina", 0.0),
        ("the", "a", 1.0),  # nothing is left of either
        ("red red blue", "red green", 0.4),
    ],
)
def test_f1_is_that_of_squad(judge: ModuleType, answer: str, truth: str, score: float) -> None:
    assert judge.f1(answer, truth) == pytest.approx(score)


@pytest.mark.parametrize(
    ("answer", "truth", "score"),
    [
        ("police killed the gunman", "police kill the gunman", 0.75),  # Lin 2004, section 3.1
        ("the gunman kill police", "police kill the gunman", 0.5),
        ("a b c d e", "A, c. E!", 0.75),
        ("", "a", 0.0),
        ("x", "y", 0.0),
    ],
)
def test_rouge_l_is_over_the_longest_common_subsequence(
    judge: ModuleType, answer: str, truth: str, score: float
) -> None:
    assert judge.rouge_l(answer, truth) == pytest.approx(score)


def test_the_best_answer_and_the_first_line_count(judge: ModuleType) -> None:
    task = judge.TASKS["2wikimqa"]
    assert judge.best_score(task, "\n Perth\nBecause it says so", ["Lima", "Perth"]) == 1.0
    assert judge.best_score(judge.TASKS["multi_news"], "one\ntwo", ["one two"]) == 1.0


def test_the_sample_has_one_of_each_data_set(judge: ModuleType) -> None:
    samples = list(judge.read_samples(judge.SAMPLE_FILE, 100))
    assert [sample.dataset for sample in samples] == list(judge.TASKS)
    assert all(sample.context and sample.answers for sample in samples)


def test_lines_that_are_no_samples_are_named(judge: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "musique.jsonl"
    good = {"input": "q", "context": "c", "answers": ["a"]}
    path.write_text(json.dumps(good) + "\n\n" + json.dumps({**good, "dataset": "musique_e"}) + "\n", encoding="utf-8")
    assert [sample.dataset for sample in judge.read_samples(path, 5)] == ["musique", "musique"]
    assert len(list(judge.read_samples(path, 1))) == 1
    for line, said in (
        ("{", "line 3"), ("[]", "line 3"), (json.dumps({"input": "q"}), "line 3"),
        (json.dumps({**good, "dataset": "other"}), "other"), (json.dumps({**good, "answers": []}), "no answers"),
    ):  # fmt: skip
        path.write_text(json.dumps(good) + "\n\n" + line + "\n", encoding="utf-8")
        with pytest.raises(SystemExit, match=said):
            list(judge.read_samples(path, 5))
    path.write_text("\n", encoding="utf-8")
    with pytest.raises(SystemExit, match="no samples"):
        list(judge.read_samples(path, 5))


def test_the_table_says_what_is_lost(judge: ModuleType) -> None:
    rows = [
        judge.Scored("musique", way, score, seconds, 100, "x")
        for way, score, seconds in (
            ("full prefill", 0.5, 2.0), ("full prefill", 0.7, 4.0), ("blend 0.15", 0.5, 1.0), ("blend 0.15", 0.6, 0.5),
        )
    ]  # fmt: skip
    last = judge.table(rows).splitlines()[-1].split()
    assert last == ["musique", "blend", "0.15", "2", "0.550", "+0.050", "0.750", "0.25"]


def test_ratios_that_are_none(judge: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    for given in ("2", "x"):
        assert judge.main(["--ratios", given]) == 2
        assert "--ratios" in capsys.readouterr().err
