"""`kvstore-bench stream`: the link keeps to its schedule, draws are the seed's, and what is reported was measured."""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from xxhash import xxh3_64_intdigest

from kvstore.errors import ConfigError
from kvstore.layout import KVLayout
from kvstore.record import kv_spec, parse_header
from kvstore.store import Item
from kvstore.stream import Policy, PrefillModel
from kvstore.stream.shapes import level_sizes
from kvstore_bench import cli
from kvstore_bench.layers_link import LinkBackend, TokenBucket
from kvstore_bench.report import Figure
from kvstore_bench.stream import Setting, draw_requests
from kvstore_bench.stream_report import StreamReport, StreamRow
from kvstore_bench.stream_run import Cell, Draw, decisions, run_adaptive, run_fixed, run_together
from kvstore_bench.stream_world import Shelf
from tests.faults.support import chain, payload, store_over
from tests.unit.level_codec import level_codec, masked
from tests.unit.test_bench_layers import Clock

LATER = float("inf")
SPEC = kv_spec(KVLayout(num_layers=3, num_kv_heads=2, head_dim=32), "bfloat16", 64)
COUNT = 6
PREFILL = PrefillModel(1e-3)


def test_a_links_rate_changes_when_it_is_said_to() -> None:
    clock = Clock()
    bucket = TokenBucket(1000.0, then=[(1.0, 100.0), (3.0, 2000.0)], buffer=1, clock=clock, sleep=clock.sleep)
    bucket.start()
    with bucket.transfer():
        for _ in range(10):
            bucket.take(100, LATER)
        assert clock.now == pytest.approx(101.0)
        assert bucket.take(100, LATER)
        assert clock.now == pytest.approx(102.0)
        assert bucket.take(1100, LATER)  # 100 in the second that is left, 1000 in half a second
        assert clock.now == pytest.approx(103.5)
        assert not bucket.take(2000, clock.now + 0.9)
    for wrong in ([(2.0, 5.0), (1.0, 5.0)], [(1.0, 0.0)], [(-1.0, 5.0)]):
        with pytest.raises(ConfigError):
            TokenBucket(10.0, then=wrong)


def test_requests_are_drawn_by_the_seed_and_scaled_to_the_slo() -> None:
    setting = Setting(requests=400)
    one, again = (draw_requests(setting, [], 1000, 100) for _ in range(2))
    assert one == again
    assert one != draw_requests(Setting(requests=400, seed=1), [], 1000, 100)
    mean_rate = setting.mean * 1000 / (10 * setting.slo_s)  # raw KV of the mean takes ten SLOs
    rates = [draw.rate / mean_rate for draw in one]
    assert statistics.mean(rates) == pytest.approx(1, rel=0.1)
    assert 0.1 / 5.05 <= min(rates) < 0.1
    assert 1.8 < max(rates) <= 10 / 5.05
    drops = [draw for draw in one if draw.drop is not None]
    assert 0.4 < len(drops) / len(one) < 0.6
    for draw in drops:
        assert draw.drop is not None
        assert 0.1 <= draw.drop[0] <= 0.8
        assert 2 <= draw.rate / draw.drop[1] <= 10
    assert draw_requests(Setting(requests=3), [1000, 2000, 3000], 1000, 10**6)[0].chunks == 4
    assert max(draw.chunks for draw in draw_requests(setting, [], 1000, 9)) == 9


@pytest.fixture
def shelf() -> Iterator[Shelf]:
    keys = chain(COUNT)
    link = LinkBackend(latency_s=0.0)
    with level_codec(), store_over(link, remote_serde="kvt", codec_profile="x", buffer_pool_bytes=16 << 20) as store:
        truth = [payload(key, SPEC.raw_bytes) for key in keys]
        items = [Item(key, SPEC.split(memoryview(t)), SPEC, {}) for key, t in zip(keys, truth, strict=True)]
        assert all(outcome.ok for outcome in store.submit_put(items).result())
        made = Shelf("kvt", store, link, keys, SPEC, decode_s_per_token=(0.0, 0.0, 0.0))
        for key, whole in zip(keys, truth, strict=True):
            made.sizes.append(level_sizes(parse_header(link.records[key], key=key)))
            layers = [SPEC.split(memoryview(masked(whole, level))) for level in range(3)]
            made.digests.append([[xxh3_64_intdigest(v) for v in views] for views in layers])
        yield made


def test_one_request_every_way(shelf: Shelf) -> None:
    quick = Draw(COUNT, 1e9)
    slow_engine = PrefillModel(1.0)  # so that nothing is computed, however busy this machine is
    ran = run_adaptive(shelf, quick, slo_s=600.0, prefill=slow_engine, new_tokens=4, policy=Policy(text="time"))
    assert (ran.violated, ran.wrong, ran.levels) == (False, 0, (2,) * COUNT)
    assert ran.ttft_s > 4
    fixed = run_fixed(shelf, quick, slo_s=30.0, suffix_s=0.25)
    assert (fixed.violated, fixed.wrong, fixed.followed) == (False, 0, False)
    assert fixed.ttft_s >= 0.25
    slow = Draw(COUNT, 1e4)
    late = run_fixed(shelf, slow, slo_s=0.05, suffix_s=0.0)
    assert late.violated
    assert late.followed
    assert late.ttft_s == pytest.approx(shelf.nbytes(COUNT) / 1e4)  # when it would have come
    text = run_adaptive(shelf, Draw(2, 1e9), slo_s=30.0, prefill=PrefillModel(1e-5), new_tokens=0, policy=Policy())
    assert text.levels == (-2, -2)
    assert text.nbytes == 0
    shelf.digests[0][2][0] ^= 1
    ran = run_adaptive(shelf, quick, slo_s=600.0, prefill=slow_engine, new_tokens=0, policy=Policy(text="time"))
    assert ran.wrong == 1


def test_several_at_once(shelf: Shelf) -> None:
    ran = run_together(
        shelf, [Draw(COUNT, 1e9)] * 3, slo_s=30.0, prefill=PREFILL, new_tokens=0, policy=Policy(text="time")
    )
    assert [(each.violated, each.wrong) for each in ran] == [(False, 0)] * 3


def test_the_grid_is_executed_both_ways(shelf: Shelf) -> None:
    # Far from break-even on both sides: no noise of the machine changes that.
    middle = shelf.nbytes(2) / PREFILL.seconds(0, 128)
    cells = decisions(shelf, PREFILL, [middle / 20, middle * 100], [2, 4])
    assert [cell.loads for cell in cells] == [False, False, True, True]
    assert all(cell.right for cell in cells)
    assert cells[0].load_s == math.inf
    assert cells[2].load_s < cells[2].text_s == pytest.approx(0.128)


def example() -> StreamReport:
    report = StreamReport("stream", version="1", command="kvstore-bench stream")
    for number in range(3):
        for name, ttft in (("adaptive kvt", 0.5), ("fixed int8", 2.0), ("oracle", 0.5), ("text", 1.5)):
            drop = (0.3, 5.0) if number else None
            report.stream_rows.append(
                StreamRow(number, 256, 10.0, 1.0, drop, 1.0, name, ttft, ttft > 1, (0, -2), 100, True, False)
            )
    report.cells = [Cell(128, 1e6, math.inf, 0.1, False, True), Cell(128, 2e6, 0.05, 0.1, False, False)]
    report.figures["stream.ttft_vs_oracle"] = Figure(1.0, "ratio", "lower", 1.15)
    report.sizes = {"kvt": [9.0, 7.0]}
    return report


def test_the_report_says_what_was_measured(tmp_path: Path, capsys: Any) -> None:
    report = example()
    assert report.ok
    report.print_table(__import__("sys").stdout)
    shown = capsys.readouterr().out
    assert "fixed int8" in shown
    assert "stream.ttft_vs_oracle = 1  (bar ≤ 1.15: met)" in shown
    assert "the faster of the two in 1 of 2 cells" in shown
    report.write_json(str(tmp_path / "r.json"))
    data = json.loads((tmp_path / "r.json").read_text())
    assert len(data["rows"]) == 12
    assert data["decisions"][0]["load_s"] is None
    report.write_html(str(tmp_path / "r.html"))
    page = (tmp_path / "r.html").read_text()
    assert page.count("<circle") >= 3
    assert "✗" in page
    broken = example()
    broken.stream_rows[0] = broken.stream_rows[0].__class__(
        **{**{name: getattr(broken.stream_rows[0], name) for name in StreamRow.__slots__}, "verified": False}
    )
    assert not broken.ok


def test_the_command_line(capsys: Any) -> None:
    assert cli.main(["stream", "--help"]) == 0
    assert "--trace" in capsys.readouterr().out
    for words in (["--requests", "0"], ["--slo", "soon"], ["--text", "-1"], ["--trace", "/nowhere"]):
        begun = time.monotonic()
        assert cli.main(["stream", "--model", "/nowhere", *words]) == 2
        assert time.monotonic() - begun < 60
        assert capsys.readouterr().err.startswith("kvstore-bench: ")
