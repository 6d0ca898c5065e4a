"""`kvstore ls`, `stat`, `verify` and `rm`, over folders and a node."""

from __future__ import annotations

import io
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

import kvstore
from kvstore.keys import Key, opaque_key
from kvstore.layout import KVLayout
from kvstore_backends.node_server import NodeServer
from kvstore_cli.main import main

NAMES = ("a", "b", "c")


@pytest.fixture
def url(tmp_path: Path) -> str:
    """A folder with three records."""
    place = f"file://{tmp_path}/kv"
    with kvstore.open_store(place, buffer_pool_bytes="16MiB") as store:
        assert all(outcome.stored for outcome in store.put_many({name: name.encode() * 5000 for name in NAMES}))
    return place


def key(name: str) -> Key:
    return opaque_key(name)


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, Any]:
    status = main([*words, "--json", "-"])
    return status, json.loads(capsys.readouterr().out)


def record_file(tmp_path: Path, name: str) -> Path:
    (found,) = (path for path in (tmp_path / "kv").rglob(f"*{key(name).hex()[-32:]}*") if path.is_file())
    return found


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0xFF
    path.chmod(0o600)
    path.write_bytes(data)


def test_ls(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, report = run(capsys, "ls", url)
    assert status == 0
    assert {record["key"] for record in report["records"]} == {key(name).hex() for name in NAMES}
    assert report["nbytes"] == sum(record["nbytes"] for record in report["records"]) > 15000
    assert main(["ls", url, "--limit", "2"]) == 0
    said = capsys.readouterr()
    assert len(said.out.splitlines()) == 2
    assert all(len(line.split()[0]) == 64 for line in said.out.splitlines())
    assert "2 records" in said.err


def test_stat_of_a_place(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, report = run(capsys, "stat", url)
    assert status == 0
    (place,) = report["places"]
    assert place["records"] == 3
    assert sum(place["sizes"].values()) == 3
    assert abs(place["newest"] - time.time()) < 3600
    assert main(["stat", url]) == 0
    assert "3 records" in capsys.readouterr().out


def test_stat_of_records(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, report = run(capsys, "stat", url, key("a").hex())
    assert status == 0
    (record,) = report["records"]
    assert (record["status"], record["kind"], record["raw_bytes"]) == ("ok", "opaque", 5000)
    status, report = run(capsys, "stat", url, key("a").hex(), key("nobody").hex())
    assert status == 1
    assert [record["status"] for record in report["records"]] == ["ok", "missing"]


def test_stat_of_a_record_with_layers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from kvstore.backend import Write
    from kvstore.record import build_record, kv_spec
    from kvstore.registry import open_backend

    place = f"file://{tmp_path}/layers"
    spec = kv_spec(KVLayout(4, 2, 64), "bfloat16", 16)
    name = key("layers")
    segments = [memoryview(os.urandom(size)) for size in spec.sizes]
    backend = open_backend(place)
    try:
        views = build_record(name, spec, segments, meta={"model": "m"})
        (outcome,) = backend.put([Write(name, views)], deadline=time.monotonic() + 30)
        assert outcome.ok
    finally:
        backend.close()
    status, report = run(capsys, "stat", place, name.hex())
    assert status == 0
    assert (report["records"][0]["kind"], report["records"][0]["layers"]) == ("kv", 4)
    assert report["records"][0]["meta"]["model"] == "m"
    assert run(capsys, "verify", place)[1]["verified"] == 1


def test_verify_finds_what_is_damaged(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "verify", url) == (
        0, {"tool": "kvstore verify", "url": url, "ok": True, "verified": 3,
            "nbytes": sum(record_file(tmp_path, name).stat().st_size for name in NAMES), "bad": []},
    )  # fmt: skip
    flip(record_file(tmp_path, "a"), -1)
    flip(record_file(tmp_path, "b"), 40)
    status, report = run(capsys, "verify", url)
    assert status == 1
    assert report["verified"] == 1
    assert {each["key"]: each["kind"] for each in report["bad"]} == {
        key("a").hex(): "corrupt", key("b").hex(): "corrupt",
    }  # fmt: skip
    status, report = run(capsys, "verify", url, key("c").hex())
    assert (status, report["verified"]) == (0, 1)
    status, report = run(capsys, "verify", url, key("nobody").hex())
    assert (status, report["bad"][0]["kind"]) == (1, "missing")


def test_verify_puts_damaged_records_aside(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flip(record_file(tmp_path, "a"), -1)
    status, report = run(capsys, "verify", url, "--quarantine")
    assert status == 1
    assert report["bad"][0]["quarantined"]
    status, report = run(capsys, "verify", url)
    assert (status, report["verified"]) == (0, 2)
    with kvstore.open_store(url, buffer_pool_bytes="16MiB") as store:  # the name is free again
        assert store.put_many({"a": b"new"})[0].ok


def test_no_key_on_standard_input_is_not_every_key(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    flip(record_file(tmp_path, "a"), -1)
    for command in (("verify", url, "-", "--quarantine"), ("rm", url, "-")):
        monkeypatch.setattr("sys.stdin", io.StringIO("\n"))
        assert run(capsys, *command)[0] == 0
    assert len(run(capsys, "ls", url)[1]["records"]) == 3


@pytest.mark.parametrize(
    "command", [("ls",), ("stat",), ("verify",), ("rm", "--all", "--yes"), ("doctor", "--read-only")]
)
def test_looking_at_a_misspelt_folder_does_not_make_it(
    command: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = tmp_path / "knv"
    assert main([command[0], f"file://{wrong}", *command[1:]]) == (1 if command[0] == "doctor" else 2)
    said = capsys.readouterr()
    assert f"there is no folder {wrong}" in said.out + said.err
    assert not wrong.exists()


def test_a_record_that_was_cut(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = record_file(tmp_path, "a")
    path.chmod(0o600)
    path.write_bytes(path.read_bytes()[:-10])
    status, report = run(capsys, "verify", url)
    assert (status, [each["kind"] for each in report["bad"]]) == (1, ["corrupt"])


def test_rm(url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    status, report = run(capsys, "rm", url, key("a").hex(), key("nobody").hex())
    assert status == 1
    assert (report["removed"], report["missing"], report["failed"]) == (1, 1, 0)
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{key('b').hex()}  5000  2026\n\n"))
    status, report = run(capsys, "rm", url, "-")
    assert (status, report["removed"]) == (0, 1)
    assert [record["key"] for record in run(capsys, "ls", url)[1]["records"]] == [key("c").hex()]


def test_rm_of_many_wants_to_be_sure(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rm", url, "--older-than", "0s", "--yes"]) == 2
    assert "say --all" in capsys.readouterr().err
    assert main(["rm", url, "--all"]) == 2
    assert "--yes" in capsys.readouterr().err
    status, report = run(capsys, "rm", url, "--older-than", "1h", "--yes")
    assert (status, report["removed"]) == (0, 0)
    status, report = run(capsys, "rm", url, "--all", "--yes")
    assert (status, report["removed"]) == (0, 3)
    assert run(capsys, "ls", url)[1]["records"] == []


def test_rm_of_old_ones(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = time.time() - 7200
    os.utime(record_file(tmp_path, "a"), (old, old))
    status, report = run(capsys, "rm", url, "--older-than", "1h", "--yes")
    assert (status, report["removed"]) == (0, 1)
    assert {record["key"] for record in run(capsys, "ls", url)[1]["records"]} == {key("b").hex(), key("c").hex()}


def test_over_a_node(capsys: pytest.CaptureFixture[str]) -> None:
    with NodeServer("127.0.0.1:0", memory_bytes=16 << 20) as node:
        place = f"node://{node.address}"
        with kvstore.open_store(place, buffer_pool_bytes="16MiB") as store:
            assert store.put_many({"a": b"x" * 100})[0].ok
        assert run(capsys, "verify", place)[1]["verified"] == 1
        assert run(capsys, "rm", place, key("a").hex())[0] == 0
        assert run(capsys, "ls", place)[1]["records"] == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("ls", "s4://x"), "unknown scheme"),
        (("stat", "{url}", "abc"), "is not a key"),
        (("rm", "{url}"), "name KEYs"),
        (("rm", "{url}", "--all", "--older-than", "1h", "--yes"), "one of the three"),
        (("verify", "{url}", "--timeout", "0"), "'timeout'"),
        (("ls", "{url}", "--limit", "-1"), "limit"),
    ],
)
def test_what_makes_no_sense(
    words: tuple[str, ...], message: str, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([word.format(url=url) for word in words]) == 2
    assert message in capsys.readouterr().err
