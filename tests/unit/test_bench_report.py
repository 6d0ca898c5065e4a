"""The report: JSON for tools, a table for people, a page for people in a hurry."""

from __future__ import annotations

import dataclasses
import io
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from kvstore_bench.html import page, verdict
from kvstore_bench.report import Ceiling, Figure, Report, Row, plain_table

SIZES = (64 << 10, 1 << 20, 16 << 20)


def row(op: str = "get", size: int = 16 << 20, **changes: Any) -> Row:
    base = Row(
        url="file:///mnt/kv", scheme="file", op=op, size_bytes=size, batch=8, lanes=2, seconds=0.033,
        gbytes_per_s=4.07, ceiling=Ceiling("preadv", 4.38), ratio=0.93, p50_ms=16.5, p99_ms=20.25, cpu_s_per_gib=0.25,
        verified=True, failed=0,
    )  # fmt: skip
    return dataclasses.replace(base, **changes)


def sample(**changes: Any) -> Report:
    rows = [row(op, size) for size in SIZES for op in ("put", "get")]
    rows += [row(op, size, scheme="store_file", ratio=0.8) for size in SIZES for op in ("put", "get")]
    tiny = {"scheme": "store_memory", "url": "memory://", "batch": 64, "seconds": 64 * 9.5e-6, "lanes": 1}
    rows += [row("get", 256, ceiling=Ceiling("python loop", 1.0), **tiny)]
    report = Report(
        "io", rows=rows, version="0.1", command="kvstore-bench io", started="2026-01-02T03:04:05+00:00", seconds=42.0,
        machine={"cpu": "A CPU", "cores": 2, "memory_bytes": 8 << 30, "file_systems": {"/mnt/kv": "ext4"}},
        figures={
            "io.file.get.16MiB.ratio": Figure(0.93, "ratio", "higher", 0.9),
            "io.file.put.16MiB.ratio": Figure(0.80, "ratio", "higher", 0.85),
            "io.file.put.1MiB.ratio": Figure(0.8, "ratio", "higher"),
            "io.store_memory.overhead_us_per_key": Figure(9.5, "us/key", "lower", 15.0),
        },
    )  # fmt: skip
    return dataclasses.replace(report, **changes)


def test_json_has_the_agreed_names() -> None:
    data = json.loads(sample().to_json())
    assert list(data["rows"][0]) == [
        "url", "scheme", "op", "size_bytes", "batch", "lanes", "seconds", "gbytes_per_s", "ceiling", "ratio", "p50_ms",
        "p99_ms", "cpu_s_per_gib", "verified", "failed",
    ]  # fmt: skip
    assert data["rows"][1]["ceiling"] == {"name": "preadv", "gbytes_per_s": 4.38}
    assert data["figures"]["io.file.get.16MiB.ratio"] == {
        "value": 0.93, "unit": "ratio", "better": "higher", "bar": 0.9,
    }  # fmt: skip
    assert data["figures"]["io.file.put.1MiB.ratio"]["bar"] is None
    assert data["ok"] is True


def test_json_goes_to_a_file(tmp_path: Path) -> None:
    sample().write_json(str(tmp_path / "x.json"))
    assert json.loads((tmp_path / "x.json").read_text(encoding="utf-8"))["subcommand"] == "io"


@pytest.mark.parametrize(
    ("figure", "met"),
    [
        (Figure(0.9, "ratio", "higher", 0.9), True),
        (Figure(0.89, "ratio", "higher", 0.9), False),
        (Figure(15.0, "us/key", "lower", 15.0), True),
        (Figure(15.1, "us/key", "lower", 15.0), False),
        (Figure(1.0, "ratio", "higher"), None),
    ],
)
def test_whether_a_bar_is_met(figure: Figure, met: bool | None) -> None:
    assert figure.met is met


@pytest.mark.parametrize(("changes", "good"), [({}, True), ({"verified": False}, False), ({"failed": 1}, False)])
def test_a_report_is_ok_only_if_every_row_is(changes: dict[str, Any], good: bool) -> None:
    assert Report("io", rows=[row(), row(**changes)]).ok is good
    assert not Report("io").ok


def test_the_plain_table_is_aligned() -> None:
    out = io.StringIO()
    sample(notes=["one thing"]).print_table(out)
    lines = out.getvalue().splitlines()
    table = lines[: len(sample().rows) + 1]
    assert len({line.index("  get") for line in table if " get" in line}) == 1
    assert all(line == line.rstrip() for line in lines)
    assert "io.file.get.16MiB.ratio = 0.93  (bar ≥ 0.9: met)" in lines
    assert "io.file.put.16MiB.ratio = 0.8  (bar ≥ 0.85: NOT met)" in lines
    assert "io.store_memory.overhead_us_per_key = 9.5 us/key  (bar ≤ 15: met)" in lines
    assert lines[-1] == "note: one thing"
    assert plain_table(["a", "b"], []) == "a  b\n"


@pytest.mark.parametrize(("spread", "busy"), [(0.05, False), (0.4, True)])
def test_a_busy_machine_is_said(spread: float, busy: bool) -> None:
    report = sample(machine={"ceiling_spread": spread})
    out = io.StringIO()
    report.print_table(out)
    assert ("varied by 40%" in out.getvalue()) is busy
    _, text = parsed(report)
    assert ("varied by 40%" in text) is busy
    assert f"{spread:.0%} between the quartiles" in text


def test_a_bar_that_a_noisy_run_misses_is_not_called_a_failure() -> None:
    quiet, noisy = sample(), sample(machine={"ceiling_spread": 0.4})
    said = {}
    for name, report in (("quiet", quiet), ("noisy", noisy)):
        out = io.StringIO()
        report.print_table(out)
        found, text = parsed(report)
        said[name] = (out.getvalue(), "".join(found.text), text)
    for text in said["noisy"][:2]:
        assert "not met in this noisy run" in text
        assert "NOT met" not in text
        assert "1 of 3 bars is not met in this noisy run, which says little about kvstore; the exit status" in text
    assert 'aria-label="a bar is not met in this noisy run"' in said["noisy"][2]
    for text in said["quiet"][:2]:
        assert "NOT met" in text
        assert "noisy" not in text
        assert "1 of 3 bars is not met; the exit status" in text


def test_bars_all_met_need_no_sentence_about_it() -> None:
    assert sample(figures={"io.file.get.16MiB.ratio": Figure(0.93, "ratio", "higher", 0.9)}).bars_missed == ""
    assert sample(figures={}).bars_missed == ""


def test_a_tick_means_a_bar_for_every_operation_beside_it() -> None:
    get, put = Figure(0.93, "ratio", "higher", 0.9), Figure(0.93, "ratio", "higher", 0.85)
    rows = [row("put", ratio=0.2), row()]
    only_get = sample(rows=rows, figures={"io.file.get.16MiB.ratio": get})
    both = sample(rows=rows, figures={"io.file.get.16MiB.ratio": get, "io.file.put.16MiB.ratio": put})
    found, text = parsed(only_get)
    said = "".join(found.text)
    assert "✓" not in said
    assert 'aria-label="verified; not every operation has a bar"' in text
    assert "(4.07 GB/s) [bar ≥ 0.9: met], put reaches 0.20 of preadv at 16 MiB (4.07 GB/s) [no bar]" in said
    assert "Without a bar here: file put." in said
    out = io.StringIO()
    only_get.print_table(out)
    assert "without a bar here: file put\n" in out.getvalue()
    found, _ = parsed(both)
    assert "✓" in "".join(found.text)
    assert "[no bar]" not in "".join(found.text)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("columns", [80, 200])
def test_the_table_on_a_terminal_is_not_cut(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", "xterm")
    out = Terminal()
    sample().print_table(out)
    text = re.sub(r"\x1b\[[0-9;]*m", "", out.getvalue())
    table = [line for line in text.splitlines() if "│" in line]
    assert table
    assert "…" not in "".join(table)
    assert max(map(len, table)) <= columns
    assert ("CPU s/GiB" in text) is (columns == 200)
    assert "ratio" in text


@pytest.mark.parametrize(
    ("scheme", "rows", "said"),
    [
        ("file", [row("put", ratio=0.8), row()], "get reaches 0.93 of preadv at 16 MiB (4.07 GB/s), put reaches 0.80"),
        ("store_file", [row("get", 1 << 20)], "store over file: get reaches 0.93 of preadv at 1 MiB"),
        ("file", [row(verified=False, failed=3)], "file: not verified: get 16 MiB; 3 records failed."),
        ("file", [row(failed=3)], "3 records failed."),
        ("store_memory", [row("get", 256, batch=64, seconds=64e-5)], "10.0 µs per key in a get of 64 records of 256 B"),
    ],
)  # fmt: skip
def test_verdicts(scheme: str, rows: list[Row], said: str) -> None:
    assert said in verdict(scheme, rows)


class Checker(HTMLParser):
    """Counts elements, remembers attributes, and insists that every element is closed."""

    VOID = frozenset({"meta", "line", "circle", "rect", "polyline", "br"})

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.count: dict[str, int] = {}
        self.attributes: list[tuple[str, str, str]] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.count[tag] = self.count.get(tag, 0) + 1
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        assert tag in self.VOID

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def parsed(report: Report) -> tuple[Checker, str]:
    text = page(report)
    checker = Checker()
    checker.feed(text)
    checker.close()
    assert not checker.open
    return checker, text


def test_the_page_is_self_contained_and_complete() -> None:
    report = sample()
    found, text = parsed(report)
    assert not {"script", "link", "img", "iframe", "object"} & set(found.count)
    assert not [each for each in found.attributes if each[1] in ("src", "href", "srcset") or each[1].startswith("on")]
    assert "http" not in text
    assert "url(" not in text
    assert "@import" not in text
    said = "".join(found.text)
    for word in ("A CPU", "ext4", "kvstore-bench io", "2026-01-02", "store over file", "0.93", "16 MiB", "8.0 GiB"):
        assert word in said
    assert found.count["svg"] == 2  # file and store over file; the tiny records have no size axis
    lines = [value.split() for tag, name, value in found.attributes if tag == "polyline" and name == "class"]
    assert sorted(lines) == sorted(
        [["line", "get"], ["line", "put"], ["line", "get", "dashed"], ["line", "put", "dashed"]] * 2
    )
    assert found.count["title"] == 1 + 2 * 2 * 2 * 3  # the page's; ours and the ceiling's, op, URL, size
    assert found.count["tr"] == 1 + len(report.rows) + 1 + 3
    assert ("svg", "role", "img") in found.attributes
    assert "prefers-color-scheme:dark" in text
    assert "@media print" in text
    assert 'name="viewport"' in text


def test_larger_values_lie_higher_and_larger_sizes_further_right() -> None:
    rows = [row("get", size, gbytes_per_s=value) for size, value in zip(SIZES, (1.0, 2.0, 4.0), strict=True)]
    _, text = parsed(sample(rows=rows))
    (points,) = re.findall(r'<polyline class="line get" points="([^"]*)"', text)
    x, y = zip(*(map(float, each.split(",")) for each in points.split()), strict=True)
    assert list(x) == sorted(x)
    assert list(y) == sorted(y, reverse=True)
    assert (x[1] - x[0]) == pytest.approx(x[2] - x[1], abs=0.2)  # 64 KiB, 1 MiB, 16 MiB: a log axis
    assert (y[0] - y[1]) * 2 == pytest.approx(y[1] - y[2], abs=0.2)


def test_names_cannot_break_the_page() -> None:
    nasty = 'file:///<b onclick="x">&'
    found, _ = parsed(
        sample(rows=[row(url=nasty), row(url=nasty, size=1 << 20)], command="io '<script>'", notes=["<i>"])
    )
    assert "b" in found.count  # ours, in the captions
    assert "script" not in found.count
    assert "i" not in found.count
    assert nasty in "".join(found.text)


@pytest.mark.parametrize(
    "rows",
    [
        [row()],
        [row(gbytes_per_s=0.0, ratio=0.0, ceiling=Ceiling("memcpy", 0.0), verified=False, failed=8)],
        [row("put", 100), row("put", 3 << 30, gbytes_per_s=123.4)],
        [row(gbytes_per_s=0.0003)],
        [],
    ],
    ids=["one size", "all failed", "far apart", "slow", "none"],
)
def test_odd_reports_make_a_page_too(rows: list[Row]) -> None:
    _, text = parsed(sample(rows=rows, notes=["something"]))
    assert "nan" not in text.lower().replace("nanum", "")
    assert "inf" not in re.sub(r"[a-z]*inf[a-z]+", "", text.lower())
    if any(not each.verified for each in rows):
        assert "Not everything verified" in text
        assert "✗" in text
