"""`kvstore-bench compare lmcache`: what it refuses, what it makes of what the other process says, and that nothing
unverified has a figure. That process is a program of this file; tests/engines runs the real one."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from kvstore.errors import ConfigError, PermanentError
from kvstore_bench import cli
from kvstore_bench.compare_lmcache import BARS, default_python, run_compare_lmcache
from kvstore_bench.io import MIB

FAKE = """#!{python}
import json, sys
seconds = {{"kvstore": 0.5, "fs_native": 0.4, "fs": 1.0}}
log = open({log!r}, "a")
for line in sys.stdin:
    asked = json.loads(line)
    log.write(line)
    log.flush()
    answer = {{}}
    do = asked["do"]
    if do == "open":
        answer = {{"versions": {{"lmcache": "9.8", "kvstore": "1"}}, "sides": list(seconds)}}
    elif do == "size":
        answer = {{"nbytes": asked["nbytes"] * asked["tasks"] * asked["keys"]}}
    elif do == "memcpy":
        answer = {{"seconds": 0.01}}
    elif do == "once":
        factor = 2 if asked["op"] == "store" else 1
        answer = {{"seconds": factor * seconds[asked["side"]], "cpu": 0.1, "failed": 0, "verified": True}}
    {trouble}
    sys.stdout.write(json.dumps(answer) + "\\n")
    sys.stdout.flush()
"""


def fake(tmp_path: Path, trouble: str = "pass") -> tuple[str, Path]:
    """An interpreter that runs nothing but the program above; and what it was asked."""
    program, log = tmp_path / "python", tmp_path / "log"
    program.write_text(FAKE.format(python=sys.executable, log=str(log), trouble=trouble))
    program.chmod(0o755)
    return str(program), log


def test_ratios_are_those_of_a_round_and_bars_are_the_issues(tmp_path: Path) -> None:
    python, log = fake(tmp_path)
    report = run_compare_lmcache(sizes=[4 * MIB], repeats=3, python=python)
    assert report.ok
    figures = {name: (figure.value, figure.bar) for name, figure in report.figures.items()}
    assert figures["compare.lmcache.load.4MiB.vs_fs_native"] == (0.8, 0.9)
    assert figures["compare.lmcache.load.4MiB.vs_fs"] == (2.0, None)
    assert figures["compare.lmcache.store.4MiB.vs_fs_native"] == (0.8, 1.0)
    assert figures["compare.lmcache.store.4MiB.vs_fs"] == (2.0, 1.5)
    assert figures["compare.lmcache.store.4MiB.kvstore.gbytes_per_s"][0] == pytest.approx(128 * MIB / 1e9, abs=1e-4)
    assert figures["compare.lmcache.memcpy.4MiB.gbytes_per_s"][0] == pytest.approx(12.8 * MIB / 1e6, abs=1e-1)
    assert [(row.op, row.ceiling.name) for row in report.rows] == [
        ("put", "LMCache fs_native"), ("put", "LMCache fs"), ("get", "LMCache fs_native"), ("get", "LMCache fs"),
    ]  # fmt: skip
    assert "LMCache 9.8" in report.notes[0]
    json.loads(report.to_json())
    asked = [json.loads(line) for line in log.read_text().splitlines()]
    # Each round: fresh keys, all sides store, all sides load; the one that begins changes.
    rounds = [(each["op"], each["side"]) for each in asked if each["do"] == "once"]
    assert len(rounds) == 4 * 6
    assert [rounds[6 * n] for n in range(4)] == [
        ("store", "kvstore"), ("store", "fs_native"), ("store", "fs"), ("store", "kvstore"),
    ]  # fmt: skip
    assert {rounds[n][0] for n in range(3)} == {"store"}
    assert {rounds[n][0] for n in range(3, 6)} == {"load"}
    assert sum(each["do"] == "fresh" for each in asked) == sum(each["do"] == "forget" for each in asked) == 4
    assert asked[-1]["do"] == "close"
    assert set(BARS) >= {name for name, (_, bar) in figures.items() if bar is not None}


@pytest.mark.parametrize(
    "trouble",
    [
        'if do == "once" and asked["side"] == "kvstore": answer["verified"] = False',
        'if do == "once" and asked["side"] == "fs": answer["failed"] = 3',
        'if do == "once" and asked["op"] == "load": answer.update(seconds=None, verified=False, failed=1)',
    ],
)
def test_what_came_back_wrong_has_no_ratio(tmp_path: Path, trouble: str, capsys: pytest.CaptureFixture[str]) -> None:
    python, _ = fake(tmp_path, trouble)
    found = tmp_path / "out.json"
    status = cli.main([
        "compare", "lmcache", "--sizes", "4MiB", "--repeats", "1", "--python", python, "--json", str(found)
    ])  # fmt: skip
    assert status == 1
    report = json.loads(found.read_text())
    assert not report["ok"]
    assert not [name for name in report["figures"] if ".vs_" in name]
    assert any("came back wrong" in note for note in report["notes"])
    capsys.readouterr()


def test_a_process_that_dies_is_said_to_have_died(tmp_path: Path) -> None:
    python, _ = fake(tmp_path, 'if do == "memcpy": sys.stderr.write("out of luck"); sys.exit(3)')
    with pytest.raises(PermanentError, match=r"its process died: out of luck"):
        run_compare_lmcache(sizes=[4 * MIB], repeats=1, python=python)


def test_what_the_process_refuses_is_said(tmp_path: Path) -> None:
    python, _ = fake(tmp_path, 'if do == "open": answer = {"error": "ModuleNotFoundError: No module named lmcache"}')
    with pytest.raises(ConfigError, match=r"(?s)No module named lmcache.*make engines-venv"):
        run_compare_lmcache(sizes=[4 * MIB], repeats=1, python=python)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--ops", "get"], "--ops means nothing with lmcache"),
        (["--transport", "shm"], "--transport means nothing with lmcache"),
        (["--batch", "4"], "--batch means nothing with lmcache"),
        (["--sizes", "1000"], "multiples of 4 KiB"),
        (["--sizes", "1GiB"], "multiples of 4 KiB"),
        (["--repeats", "0"], "--repeats must be at least 1"),
        (["--python", "/nowhere/python"], "No such file"),
    ],
)
def test_what_makes_no_sense_is_refused(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["compare", "lmcache", *options]) == 2
    assert message in capsys.readouterr().err


def test_the_engines_environment_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENGINES_DIR", str(tmp_path))
    assert default_python() == sys.executable
    os.makedirs(tmp_path / "lmcache")
    (tmp_path / "lmcache" / ".complete").touch()
    assert default_python() == str(tmp_path / "lmcache" / "bin" / "python")
