"""`kvstore-bench layers`: the link carries real bytes at its rate, and what is reported was measured and verified."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from kvstore.backend import Read, Status, Write
from kvstore.errors import ConfigError
from kvstore.keys import opaque_key
from kvstore.prefetch import pipeline_seconds
from kvstore.testing.models import default_model_folder, tiny_model
from kvstore_bench import cli
from kvstore_bench.layers_link import LinkBackend, TokenBucket
from kvstore_bench.layers_report import LayerRow, LayersReport
from kvstore_bench.report import Figure

LATER = float("inf")


class Clock:
    def __init__(self) -> None:
        self.now = 100.0
        self.slept = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now += seconds
        self.slept += seconds


def test_the_bucket_gives_its_rate_and_an_idle_link_brings_nothing() -> None:
    clock = Clock()
    bucket = TokenBucket(1000.0, buffer=300, clock=clock, sleep=clock.sleep)
    with bucket.transfer():
        for _ in range(10):
            assert bucket.take(100, LATER)
        assert clock.now == pytest.approx(101.0)
        clock.now += 0.25  # the reader did not run; meanwhile the bytes came in
        assert bucket.take(250, LATER)
        assert clock.now == pytest.approx(101.25)
        clock.now += 50  # no more than the buffer holds
        with bucket.transfer():
            assert bucket.take(300, LATER)
        assert clock.now == pytest.approx(151.25)
        assert bucket.take(100, LATER)
        assert clock.now == pytest.approx(151.35)
    clock.now += 50
    with bucket.transfer():
        begin = clock.now
        for _ in range(10):
            assert bucket.take(100, LATER)
        assert clock.now - begin == pytest.approx(1.0)
        assert not bucket.take(1000, clock.now + 0.5)  # it would not be there in time, and nothing is taken
        assert bucket.take(100, clock.now + 0.5)
    for rate, buffer in ((0, 1), (-1.0, 1), (float("nan"), 1), (1.0, 0)):
        with pytest.raises(ConfigError, match="makes no sense"):
            TokenBucket(rate, buffer=buffer)


def test_the_link_carries_the_bytes() -> None:
    link = LinkBackend()
    key, data = opaque_key("a"), bytes(range(256)) * 1024
    link.put([Write(key, [memoryview(data)])], deadline=LATER)
    clock = Clock()
    link.bucket = TokenBucket(1e6, clock=clock, sleep=clock.sleep)
    room = bytearray(200_000)
    (outcome,) = link.get_into([Read(key, memoryview(room), 62_144)], deadline=LATER)
    assert (outcome.status, outcome.nbytes) == (Status.OK, 200_000)
    assert room == data[62_144:]
    assert clock.slept == pytest.approx(0.2, rel=0.01)
    assert link.carried == 200_000
    short, missing = link.get_into(
        [Read(key, memoryview(room), len(data) - 5), Read(opaque_key("b"), memoryview(room))], deadline=LATER
    )
    assert (short.nbytes, missing.status) == (5, Status.MISS)
    (late,) = link.get_into([Read(key, memoryview(room))], deadline=time.monotonic() - 1)
    assert late.status is Status.ERROR
    link.bucket = TokenBucket(1.0)
    (late,) = link.get_into([Read(key, memoryview(room))], deadline=time.monotonic() + 5)  # at once: it cannot be there
    assert late.status is Status.ERROR
    link.close()


def row(**fields: Any) -> LayerRow:
    load, compute = [0.01, 0.01], [0.02, 0.02]
    values: dict[str, Any] = {
        "rate_bytes_per_s": 1e8, "latency_s": 1e-3, "repeats": 3, "load_s": load, "compute_s": compute,
        "pipelined_s": 0.055, "formula_s": pipeline_seconds(load, compute), "sequential_s": 0.06, "recompute_s": 0.3,
        "t_vs_formula": 1.1, "t_vs_formula_each": [1.0, 1.1, 1.2], "t_vs_sequential": 0.9, "extra_layers": 2.0,
        "verified": True, "failed": 0,
    }  # fmt: skip
    return LayerRow(**{**values, **fields})


def test_the_report_says_what_is_met_and_what_is_not(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    import sys

    report = LayersReport("layers", layer_rows=[row()])
    report.figures["layers.t_vs_formula"] = Figure(1.2, "ratio", "lower", 1.1)
    report.figures["layers.extra_memory_layers"] = Figure(2.0, "layers", "lower", 2.0)
    report.print_table(sys.stdout)
    said = capsys.readouterr().out
    assert "layers.t_vs_formula = 1.2  (bar ≤ 1.1: NOT met)" in said
    assert "layers.extra_memory_layers = 2 layers  (bar ≤ 2: met)" in said
    assert report.ok
    assert not LayersReport("layers").ok
    assert not LayersReport("layers", layer_rows=[row(verified=False, failed=1)]).ok
    report.write_html(str(tmp_path / "page.html"))
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert page.count("<svg") == 1
    assert "NOT met" in page
    report.write_html("-")
    assert capsys.readouterr().out == page


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--rate", "fast"], "--rate"),
        (["--rate", "0"], "at least 1 byte per second"),
        (["--latency", "soon"], "--latency"),
        (["--lanes", "0"], "--lanes 0"),
        (["--model", "/nowhere"], "no config.json"),
        (["--json", "-", "--html", "-"], "cannot both"),
    ],
)
def test_a_command_line_that_makes_no_sense(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["layers", *words]) == 2
    assert said in capsys.readouterr().err


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("tiny")
    tiny_model("llama", num_hidden_layers=6).save_pretrained(folder)
    return folder


@pytest.mark.leaves("torch keeps threads of its own")
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_whole_run_with_a_tiny_model(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["layers", "--model", str(tiny), "--history", "64", "--new", "8", "--chunk", "16", "--repeats", "2"]
    words += ["--rate", "20MiB,40MiB", "--latency", "0s"]
    found, page = tmp_path / "out" / "layers.json", tmp_path / "layers.html"
    assert cli.main([*words, "--json", str(found), "--html", str(page)]) == 0
    assert "layers.t_vs_formula" in capsys.readouterr().out
    data = json.loads(found.read_text(encoding="utf-8"))
    assert data["ok"] is True
    assert set(data["figures"]) == {
        "layers.t_vs_formula", "layers.t_vs_sequential", "layers.t_vs_recompute", "layers.extra_memory_layers"
    }  # fmt: skip
    assert data["figures"]["layers.t_vs_formula"]["bar"] == 1.10
    assert 0 < data["figures"]["layers.extra_memory_layers"]["value"] <= 2.0
    assert [each["rate_bytes_per_s"] for each in data["rows"]] == [20 << 20, 40 << 20]
    for each in data["rows"]:
        assert each["verified"] is True
        assert len(each["load_s"]) == len(each["compute_s"]) == 6
        assert min(each["load_s"]) > 0
        assert len(each["t_vs_formula_each"]) == 2
    assert page.read_text(encoding="utf-8").count("<svg") == 2
    assert cli.main([*words[:-2], "--latency", "0s", "--history", "65"]) == 2
    assert "65 tokens of history in chunks of 16" in capsys.readouterr().err


@pytest.mark.leaves("torch keeps threads of its own")
def test_a_cache_that_is_not_the_computed_one_is_noticed(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvstore_bench.layers import run_layers
    from kvstore_bench.layers_model import LayeredModel

    fill = LayeredModel.fill

    def wrong(self: Any, cache: Any, layer: int, segments: Any) -> None:
        fill(self, cache, layer, segments)
        if layer == 3:
            cache.layers[3].values[0, 0, 5, 1] += 1e-3

    monkeypatch.setattr(LayeredModel, "fill", wrong)
    report = run_layers(tiny, history=32, new=4, chunk=16, rates=[1e9], latency_s=0.0, repeats=1)
    assert not report.ok
    assert report.layer_rows[0].failed >= 3


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.leaves("torch keeps threads of its own")
def test_the_real_model(tmp_path: Path) -> None:
    folder = default_model_folder() / "SmolLM2-135M-Instruct"
    if not (folder / "config.json").exists():
        pytest.skip("the model is not there; `make model` makes it")
    found = tmp_path / "layers.json"
    assert cli.main(["layers", "--quick", "--model", str(folder), "--json", str(found)]) == 0
    data = json.loads(found.read_text(encoding="utf-8"))
    assert len(data["rows"]) == 3
    assert data["figures"]["layers.extra_memory_layers"]["value"] <= 2.0
