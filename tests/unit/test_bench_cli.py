"""The command line of `kvstore-bench`: what it offers, refuses, and exits with."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvstore import __version__
from kvstore_bench import cli, io
from kvstore_bench.report import Ceiling, Report, Row

ROW = Row("memory://", "memory", "get", 65536, 4, 1, 0.001, 0.26, Ceiling("memcpy", 0.3), 0.87, 0.2, 0.4, 0.1, True, 0)


def python(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("words", [["--help"], ["io", "--help"]])
def test_help_imports_nothing_heavy(words: list[str]) -> None:
    program = (
        "import sys; from kvstore_bench.cli import main; status = main(sys.argv[1:]);"
        "heavy = {'numpy', 'torch', 'rich', 'asyncio', 'kvstore.store', 'xxhash'} & set(sys.modules);"
        "print('HEAVY', sorted(heavy), status)"
    )
    done = python("-c", program, *words)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("HEAVY [] 0\n")
    assert "usage: kvstore-bench" in done.stdout


def test_help_of_io_names_every_fixed_option() -> None:
    text = python("-m", "kvstore_bench", "io", "--help").stdout
    for option in ("--sizes", "--batch", "--lanes", "--ops", "--quick", "--repeats", "--json", "--html", "[URL ...]"):
        assert option in text


def test_only_subcommands_that_exist_are_offered(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(cli.SUBCOMMANDS, "later", ("kvstore_bench.not_there_yet", "a thing to come"))
    assert cli.main(["--help"]) == 0
    said = capsys.readouterr().out
    assert "memcpy" in said  # the line of io
    assert "later" not in said
    assert cli.main(["later"]) == 2


def test_every_subcommand_that_exists_is_one_module_of_the_agreed_shape() -> None:
    import argparse
    import importlib

    offered = cli._available()
    assert "io" in offered
    for module, line in offered.values():
        found = importlib.import_module(module)
        found.add_arguments(argparse.ArgumentParser())
        assert callable(found.run)
        assert line


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"kvstore-bench {__version__}\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["io", "--sizes", "16XiB"], "unknown unit 'XiB'"),
        (["io", "--sizes", "0"], "every size must be at least 1 byte"),
        (["io", "--sizes", ","], "every size must be at least 1 byte"),
        (["io", "--ops", "copy"], "'copy' is not known; known operations: put, get"),
        (["io", "--memory", "lots"], "'lots' is not a size"),
        (["io", "--sizes", "2GiB"], "raise --memory or leave the size out"),
        (["io", "--lanes", "0"], "--lanes must be at least 1"),
        (["io", "nowhere"], "scheme://"),
        (["io", "ftp://host/kv", "--sizes", "4KiB"], "ftp"),
        (["io", "memory://?colour=blue", "--sizes", "4KiB"], "colour"),
        (["io", "file://", "--sizes", "4KiB"], "file"),
        (["io", "s3://key:geheim@bucket/kv"], "credentials"),
        (["io", "--json", "/dev/null/x.json"], "folder is missing and cannot be made: "),
        (["io", "--html", "/"], "cannot write to '/': it is a folder"),
        (["io", "--json", "-", "--html", "-"], "cannot both go to standard output"),
    ],
)
def test_nonsense_is_refused_in_one_sentence(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err
    assert err.startswith("kvstore-bench: ")
    assert err.count("\n") == 1
    assert "geheim" not in err


@pytest.mark.parametrize("words", [[], ["frobnicate"], ["io", "--batch", "many"], ["io", "--nonsense"]])
def test_a_malformed_command_line_is_status_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(words) == 2
    err = capsys.readouterr().err
    assert "usage: kvstore-bench" in err
    assert "Traceback" not in err


def report(*, verified: bool = True) -> Report:
    row = Row(**{**{name: getattr(ROW, name) for name in Row.__slots__}, "verified": verified})
    return Report("io", rows=[row], version="1")


@pytest.mark.parametrize(("verified", "status"), [(True, 0), (False, 1)])
def test_status_says_whether_all_was_verified(
    monkeypatch: pytest.MonkeyPatch, verified: bool, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(io, "run_io", lambda *_, **__: report(verified=verified))
    assert cli.main(["io"]) == status
    assert ("NO" in capsys.readouterr().out) is not verified


def test_json_on_standard_output_is_alone_there(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(io, "run_io", lambda *_, **__: report())
    assert cli.main(["io", "--json", "-"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["rows"][0]["scheme"] == "memory"
    assert "memcpy" in err  # the table has moved


def test_html_on_standard_output_is_alone_there(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(io, "run_io", lambda *_, **__: report())
    assert cli.main(["io", "--html", "-"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("<!doctype html>")
    assert out.endswith("</html>\n")
    assert "memcpy" in err  # the table has moved
    assert "wrote" not in err
    assert not list(tmp_path.iterdir())


def test_folders_of_the_outputs_are_made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(io, "run_io", lambda *_, **__: report())
    json_file, html_file = tmp_path / "out" / "a" / "io.json", tmp_path / "b" / "io.html"
    assert cli.main(["io", "--json", str(json_file), "--html", str(html_file)]) == 0
    assert json_file.is_file()
    assert html_file.is_file()


def test_a_denied_output_is_said_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import os

    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write anywhere
    monkeypatch.setattr(io, "run_io", lambda *_, **__: pytest.fail("measured"))
    assert cli.main(["io", "--json", str(tmp_path / "x.json")]) == 2
    assert capsys.readouterr().err.endswith("x.json': access is denied\n")


def test_the_help_says_what_a_killed_run_leaves() -> None:
    text = " ".join(python("-m", "kvstore_bench", "io", "--help").stdout.split())
    assert "kill -9" in text
    assert "kvstore-bench-run-*.json" in text


def test_options_reach_the_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: dict[str, Any] = {}

    def run_io(urls: list[str], **options: Any) -> Report:
        seen.update(options, urls=urls)
        return report()

    monkeypatch.setattr(io, "run_io", run_io)
    page = tmp_path / "page.html"
    words = "io memory:// --sizes 64KiB,1MiB --batch 3 --lanes 2 --ops get --quick --repeats 4 --memory 2GiB --store"
    words += " --compare-clients"
    assert cli.main([*words.split(), "--html", str(page)]) == 0
    assert seen.pop("progress") is None  # standard error is no terminal here
    assert seen == {
        "urls": ["memory://"], "sizes": [65536, 1 << 20], "batch": 3, "lanes": 2, "ops": ["get"], "quick": True,
        "repeats": 4, "memory_bytes": 2 << 30, "store": True, "compare_clients": True, "transport": None,
        "command": f"kvstore-bench io memory:// --sizes 64KiB,1MiB --batch 3 --lanes 2 --repeats 4 --html {page}"
        " --ops get --memory 2GiB --quick --compare-clients --store",
    }  # fmt: skip
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")


def test_defaults_leave_the_choice_to_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}
    monkeypatch.setattr(io, "run_io", lambda urls, **options: seen.update(options) or report())
    assert cli.main(["io"]) == 0
    assert (seen["sizes"], seen["batch"], seen["lanes"], seen["repeats"], seen["store"]) == (None,) * 5
    assert seen["command"] == "kvstore-bench io"


def test_the_package_offers_its_entry_without_loading_it() -> None:
    done = python(
        "-c",
        "import sys, kvstore_bench; assert 'kvstore_bench.io' not in sys.modules;"
        "print(kvstore_bench.run_io.__name__, kvstore_bench.Report.__name__)",
    )
    assert (done.returncode, done.stdout) == (0, "run_io Report\n")
    import kvstore_bench

    with pytest.raises(AttributeError, match="nothing"):
        kvstore_bench.nothing  # noqa: B018
