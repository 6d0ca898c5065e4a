"""`kvstore-codec`: profiles made, shown and judged from the command line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvstore.codec.profile import Profile
from kvstore.layout import KVLayout
from kvstore.testing.models import tiny_model
from kvstore_codec.main import main

from .codec_profile_support import small_profile

_TOOLS = Path(__file__).parents[2] / "tools"
WORDS = [f"w{n}" for n in range(300)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama with a tokenizer of 300 words, as a folder that transformers loads."""
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("models") / "tiny"
    tiny_model("llama").save_pretrained(folder)
    words = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"<unk>": 0, **{word: n + 1 for n, word in enumerate(WORDS)}}, unk_token="<unk>")
    )
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>").save_pretrained(folder)
    return folder


def texts(folder: Path, seed: int) -> Path:
    folder.mkdir()
    for number in range(3):
        (folder / f"{number}.txt").write_text(" ".join(WORDS[(seed + 7 * i * (number + 1)) % 300] for i in range(150)))
    return folder


def failing(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The sentence that it fails with; status 2, nothing on standard output."""
    assert main(words) == 2
    out = capsys.readouterr()
    assert out.out == ""
    (line,) = out.err.splitlines()
    assert line.startswith("kvstore-codec: ")
    return line.removeprefix("kvstore-codec: ")


def test_profile_show_and_report(tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "tiny.kvprofile"
    words = ["profile", "--codec", "cachegen", "--model", str(model), "--out", str(file), "--tokens", "60",
             "--contexts", "3", "--levels", "1,0.3", "--level", "1", "--revision", "r1", "--json"]  # fmt: skip
    assert main([*words, "--texts", str(texts(tmp_path / "profile", 0))]) == 0
    made: dict[str, Any] = json.loads(capsys.readouterr().out)
    profile = Profile.load(file)
    assert made["id"] == profile.id
    assert (profile.codec, profile.model, profile.revision) == ("cachegen", "tiny", "r1")
    assert profile.layout == KVLayout(2, 2, 16)
    assert [level["scale"] for level in profile.parameters["levels"]] == [1.0, 0.3]
    assert profile.parameters["level"] == 1
    assert profile.parameters["tokens"] == 180

    assert main(["show", str(file)]) == 0
    shown = capsys.readouterr().out
    for word in (profile.id, "cachegen", "tiny @ r1", "2 layers x 2 KV heads x 16", "level 1", "bits_per_value"):
        assert word in shown
    assert main(["show", str(file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {name: made[name] for name in made if name != "file"}

    held_out = str(texts(tmp_path / "held-out", 1))
    judged = ["report", str(file), held_out, "--model", str(model), "--tokens", "96", "--next", "16", "--contexts", "2"]
    assert main([*judged, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["profile"], found["contexts"]) == (profile.id, 2)
    rows = {row["codec"]: row for row in found["rows"]}
    assert set(rows) == {"int8", "cachegen 0", "cachegen 1"}
    assert rows["int8"]["smaller_than_int8"] == 1
    assert 0 <= rows["cachegen 1"]["kl"] < rows["cachegen 0"]["kl"]
    assert rows["cachegen 0"]["bits_per_value"] < rows["cachegen 1"]["bits_per_value"] < 16
    assert all(0 <= row["top1"] <= 1 for row in rows.values())
    assert main(judged) == 0
    table = capsys.readouterr().out.splitlines()
    assert profile.id in table[0]
    assert [line.split()[0] for line in table[2:]] == ["int8", "cachegen", "cachegen"]


def test_show_of_kvt_has_a_table_of_levels(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    quality = [
        {"bits": 0.96, "kl": 0.0927, "dnll": 0.0845, "top1": 0.861},
        {"bits": 2.0975, "kl": 0.0082, "dnll": -0.01},
    ]
    Profile("kvt", "org/m", KVLayout(2, 2, 16), parameters={"sinks": 4, "quality": quality}).save(tmp_path / "p")
    assert main(["show", str(tmp_path / "p")]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert any(line.split() == ["sinks", "4"] for line in shown)
    assert [line.split() for line in shown[-3:]] == [
        ["level", "bits/value", "KL", "dNLL", "top-1"],
        ["0", "0.960", "0.0927", "+0.0845", "0.861"],
        ["1", "2.098", "0.0082", "-0.0100", "-"],
    ]
    assert not any("quality" in line for line in shown)


def test_progress_and_too_little_text_are_said(tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", str(texts(tmp_path / "texts", 0)), "--codec", "cachegen", "--tokens", "200", "--model",
                 str(model), "--contexts", "5", "--out", str(tmp_path / "p")]) == 0  # fmt: skip
    said = capsys.readouterr().err.splitlines()
    assert "warning: the texts give 2 contexts of 200 tokens, not the 5" in said[0]
    assert said[1:] == ["kvstore-codec: context 1 of 2", "kvstore-codec: context 2 of 2"]


def test_embedded_levels_are_judged_each(tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, some = tmp_path / "tiny.kvprofile", str(texts(tmp_path / "texts", 0))
    words = ["--model", str(model), "--contexts", "2", "--json"]
    assert main(["profile", some, "--codec", "cachegen", "--levels", "1.2,0.4", "--embedded", "--rope", "applied",
                 "--tokens", "60", "--name", "org/tiny", "--out", str(file), *words]) == 0  # fmt: skip
    assert json.loads(capsys.readouterr().out)["model"] == "org/tiny"
    assert main(["report", str(file), some, "--tokens", "96", "--next", "16", *words]) == 0
    rows = [row for row in json.loads(capsys.readouterr().out)["rows"] if row["codec"] == "cachegen"]
    assert [row["level"] for row in rows] == [0, 1]
    assert rows[0]["bits_per_value"] < rows[1]["bits_per_value"]
    assert rows[0]["kl"] > rows[1]["kl"]


def test_bits_per_third(tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "tiny.kvprofile"
    assert main(["profile", str(texts(tmp_path / "texts", 0)), "--codec", "cachegen", "--levels", "8/5/3,8/6/4",
                 "--level", "0", "--tokens", "60", "--model", str(model), "--contexts", "1",
                 "--out", str(file)]) == 0  # fmt: skip
    assert "bits [8, 5, 3]" in capsys.readouterr().out
    assert Profile.load(file).parameters["levels"][1]["bits"] == [8, 6, 4]
    assert Profile.load(file).parameters["level"] == 0


def test_command_lines_that_make_no_sense(tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    some, out = str(texts(tmp_path / "texts", 0)), str(tmp_path / "out")
    made = ("profile", "--codec", "cachegen", "--model", str(model), "--out", out)
    assert "no texts" in failing(capsys, *made)
    assert "--levels x: it must be like 1,0.6,0.4" in failing(capsys, *made, some, "--levels", "x")
    assert "bits of three thirds" in failing(
        capsys, *made, some, "--levels", "8/5", "--tokens", "60", "--contexts", "1"
    )
    assert "--out" in failing(capsys, *made[:-1], str(tmp_path / "no" / "out"), some)
    assert "--out" in failing(capsys, *made[:-1], str(tmp_path), some)
    assert "450 tokens, fewer than one context of 9999" in failing(capsys, *made, some, "--tokens", "9999")
    assert "missing.txt: No such file" in failing(capsys, *made, str(tmp_path / "missing.txt"))
    nobody = ("profile", "--codec", "cachegen", "--model", str(tmp_path / "nobody"), "--out", out, some)
    assert f"--model {tmp_path / 'nobody'}: it cannot be loaded" in failing(capsys, *nobody)
    for option in ("--embedded", "--level=1", "--rope=none"):
        kvt = ("profile", "--codec", "kvt", "--model", str(model), "--out", out, some, option)
        assert "is an option of codec cachegen, not of kvt" in failing(capsys, *kvt)
    assert "--levels x: it must be a number" in failing(capsys, *kvt[:-1], "--levels", "x")
    assert "Missing option '--out'" in failing(capsys, "profile", "--model", "m")
    assert "No such command" in failing(capsys, "nothing")
    assert not Path(out).exists()


def test_files_that_are_no_profiles(tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = tmp_path / "bad"
    bad.write_bytes(b"KVPROFIL but short")
    for command in (("show",), ("report", "--texts", str(tmp_path))):
        assert f"{bad} is not a codec profile: it ends after 18 bytes" in failing(capsys, *command, str(bad))
        assert "No such file" in failing(capsys, *command, str(tmp_path / "none"))
    other = tmp_path / "other"
    small_profile().save(other)
    assert "no texts" in failing(capsys, "report", str(other))
    message = failing(capsys, "report", str(other), str(texts(tmp_path / "texts", 0)), "--model", str(model),
                      "--tokens", "60", "--next", "8", "--contexts", "1")  # fmt: skip
    assert "3 layers x 2 heads x 8, not kv 2 layers x 2 heads x 16" in message


def test_it_runs_as_a_module() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kvstore_codec", "--help"], capture_output=True, text=True, cwd=_TOOLS, timeout=60,
        check=True,
    )  # fmt: skip
    for command in ("profile", "show", "report"):
        assert command in done.stdout


@pytest.mark.model
@pytest.mark.slow
def test_the_rate_on_a_real_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Less than int8 / 2.2 at a change of NLL of 0.03, on texts that the profile never saw."""
    from pydoc_data.topics import topics

    from kvstore.testing.models import smollm2_folder

    names = sorted(topics)
    for folder, chosen in (("profile", names[::2]), ("held-out", names[1::2])):
        (tmp_path / folder).mkdir()
        for name in chosen:
            (tmp_path / folder / f"{name}.txt").write_text(topics[name])
    words = ["--model", str(smollm2_folder()), "--json"]
    file = str(tmp_path / "p")
    assert main(["profile", str(tmp_path / "profile"), "--codec", "cachegen", "--contexts", "8", "--tokens", "1000",
                 "--out", file, *words]) == 0  # fmt: skip
    capsys.readouterr()
    assert main(["report", file, str(tmp_path / "held-out"), "--contexts", "10", *words]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert max(row["smaller_than_int8"] for row in rows if row["dnll"] <= 0.03) >= 2.2
