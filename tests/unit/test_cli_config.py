"""`kvstore config check` and `kvstore options`."""

from __future__ import annotations

import json
import re
import socket
from pathlib import Path
from typing import Any

import pytest

from kvstore.codec.profile import Profile
from kvstore.config import OPTIONS
from kvstore.layout import KVLayout
from kvstore.manual import manual
from kvstore.registry import SCHEMES, backend_class
from kvstore_cli.config import check_config
from kvstore_cli.doctor import diagnose
from kvstore_cli.main import COMMANDS, main
from kvstore_cli.options import scheme_facts


def checked(tmp_path: Path, text: str, **options: Any) -> tuple[int, dict[str, Any]]:
    path = tmp_path / "kv.yaml"
    path.write_text(text, encoding="utf-8")
    return check_config(str(path), **options)


def values(report: dict[str, Any]) -> dict[str, tuple[str, str]]:
    return {row["name"]: (row["value"], row["from"]) for row in report["options"]}


def test_each_option_with_its_source(tmp_path: Path) -> None:
    text = "remote_url: file:///mnt/kv?lanes=8\nchunk_size: 512\nbackend_options: {file: {fsync: data}}\n"
    status, report = checked(tmp_path, text)
    assert status == 0
    found = values(report)
    assert found.keys() == {option.name for option in OPTIONS if option.kind != "map"}
    assert found["chunk_size"] == ("512", f"in {tmp_path}/kv.yaml")
    assert found["namespace"] == ("default", "default")
    (place,) = report["places"]
    rows = {row["name"]: (row["value"], row["from"]) for row in place["options"]}
    assert rows == {"lanes": ("8", "in the URL"), "fsync": ("data", f"in {tmp_path}/kv.yaml")}


def test_the_environment_counts_only_when_asked(tmp_path: Path) -> None:
    env = {"KVSTORE_CHUNK_SIZE": "1024", "KVSTORE_NONSENSE": "1"}
    assert checked(tmp_path, "remote_url: memory://", env=env)[0] == 0
    status, report = checked(tmp_path, "remote_url: memory://", env=env, environment=True)
    assert status == 2
    assert "nonsense" in report["errors"][0]
    del env["KVSTORE_NONSENSE"]
    status, report = checked(tmp_path, "remote_url: memory://", env=env, environment=True)
    assert values(report)["chunk_size"] == ("1024", "from environment variable KVSTORE_CHUNK_SIZE")


def test_lmcaches_file_is_read(tmp_path: Path) -> None:
    text = (
        "chunk_size: 128\nlocal_cpu: true\nmax_local_cpu_size: 2\nremote_url: redis://cache:6379\n"
        "remote_serde: naive\nnuma_mode: auto\n"
    )
    status, report = checked(tmp_path, text)
    assert status == 0, report
    assert [place["url"] for place in report["places"]] == ["memory://", "valkey://cache:6379"]
    assert values(report)["remote_serde"][0] == "raw"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("remote_url: memory://\nchunk_sze: 3", "did you mean 'chunk_size'"),
        ("remote_url: memory://\nchunk_size: many", "'chunk_size'"),
        ("remote_url: file:///mnt/kv?lane=3", "did you mean 'lanes'"),
        ("remote_url: s3://b/kv", "not the name of a bucket"),
        ("remote_url: file://mnt/kv", "three slashes: file:///mnt/kv"),
        ("remote_url: node://host", "port"),
        ("remote_url: valkey://host:0", "ports 1 to 65535"),
        ("remote_url: s4://bucket", "unknown scheme s4"),
        ("remote_url: lm://host:65432", "lm://"),
        ("chunk_size: 256", "no remote_url"),
        ("tiers: [{url: 'memory://', polcy: lru}]", "did you mean 'policy'"),
        ("[1]", "must hold a map"),
        ("a: [", "not valid YAML"),
        ("remote_url: memory://\nremote_url: memory://", "given twice"),
        ("remote_url: s3://bucket?secret_access_key=hunter2", "must not stand in a URL"),
    ],
)
def test_what_does_not_make_sense(tmp_path: Path, text: str, message: str) -> None:
    status, report = checked(tmp_path, text)
    assert status == 2
    assert re.search(message, " ".join(report["errors"])), report["errors"]
    assert "hunter2" not in json.dumps(report)


def test_a_file_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "check", str(tmp_path / "x.yaml")]) == 2
    out = capsys.readouterr().out
    assert "cannot be read" in out
    assert "does not make sense" in out


def test_an_extra_that_is_missing_here_is_no_fault_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvstore import registry

    def gone(name: str) -> Any:
        raise ModuleNotFoundError("No module named 'boto3'", name="boto3")

    monkeypatch.setattr(registry.importlib, "import_module", gone)
    status, report = checked(tmp_path, "remote_url: s3://bucket/kv")
    assert status == 1
    assert "'.[s3]'" in report["missing"][0]


def test_secrets_are_not_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "kv.yaml"
    path.write_text(
        "remote_url: s3://bucket/kv?region=eu-west-1\n"
        "backend_options: {s3: {access_key_id: hunter2, secret_access_key: hunter2}}\n", encoding="utf-8",
    )  # fmt: skip
    assert main(["config", "check", str(path)]) == 0
    assert main(["config", "check", str(path), "--json", "-"]) == 0
    out = capsys.readouterr().out
    assert "secret_access_key" in out
    assert "hunter2" not in out


def test_nothing_is_connected_to_and_nothing_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> Any:
        raise AssertionError("no connection, no name server")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    text = (
        f"tiers: ['memory://?bytes=1GiB', 'file://{tmp_path}/not/there', 'node://a:1,b:2', 'valkeys://c:3', "
        "'s3://bucket/kv']\n"
    )
    status, report = checked(tmp_path, text)
    assert status == 0, report
    assert len(report["places"]) == 5
    assert not (tmp_path / "not").exists()


def test_json_and_text_agree(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "kv.yaml"
    path.write_text("remote_url: file:///mnt/kv\nnamespace: team-a\n", encoding="utf-8")
    assert main(["config", "check", str(path), "--json", str(tmp_path / "out.json")]) == 0
    text = capsys.readouterr().out
    report = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    assert report["ok"]
    for row in report["options"]:
        assert re.search(rf"^{row['name']} +{re.escape(row['value'])} +{re.escape(row['from'])}$", text, re.MULTILINE)


# options


@pytest.mark.parametrize("scheme", sorted(SCHEMES))
def test_the_manual_of_a_scheme_has_all_its_options(scheme: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["options", scheme]) == 0
    out = capsys.readouterr().out
    assert SCHEMES[scheme].example in out
    for option in backend_class(scheme).options:
        assert f"  {option.name} (" in out
        assert option.doc in out
    assert "weight (float" in out
    assert out == (main(["options", f"{scheme}://"]), capsys.readouterr().out)[1]


def test_the_store_and_the_tiers_have_manuals_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["options", "store"]) == 0
    assert "chunk_size (int, default 256)" in capsys.readouterr().out
    assert main(["options", "tiers"]) == 0
    assert "promote (always|second_use|never, default always)" in capsys.readouterr().out


def test_everything_is_listed_and_is_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["options"]) == 0
    out = capsys.readouterr().out
    assert all(scheme in out for scheme in SCHEMES)
    assert main(["options", "--json", "-"]) == 0
    facts = json.loads(capsys.readouterr().out)["schemes"]
    assert facts.keys() >= {*SCHEMES, "store", "tiers"}
    secret = next(row for row in facts["s3"]["options"] if row["name"] == "secret_access_key")
    assert secret["secret"]
    assert secret["default"] is None


def test_the_whole_manual(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["options", "--markdown"]) == 0
    assert capsys.readouterr().out == manual()
    assert main(["options", "s3", "--markdown"]) == 2


@pytest.mark.parametrize(("scheme", "message"), [("s4", "known: store, tiers"), ("weka", "file:///mnt/weka")])
def test_an_unknown_scheme(scheme: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["options", scheme]) == 2
    assert message in capsys.readouterr().err


def test_a_scheme_whose_extra_is_missing_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvstore import registry

    def gone(name: str) -> Any:
        raise ModuleNotFoundError("No module named 'boto3'", name="boto3")

    monkeypatch.setattr(registry.importlib, "import_module", gone)
    facts = scheme_facts("s3")
    assert "not installed" in facts["missing"]
    assert facts["options"] == []


# All commands.


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_explains_itself(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"]) == 0
    assert "Usage: kvstore" in capsys.readouterr().out


def test_a_command_that_is_nearly_one(capsys: pytest.CaptureFixture[str]) -> None:
    for word, said in (("server", " Did you mean 'serve'?"), ("vrify", " Did you mean 'verify'?"), ("xyzzy", "")):
        assert main([word, "--listen", "127.0.0.1:0"]) == 2
        assert capsys.readouterr().err == f"kvstore: No such command {word!r}.{said}\n"


def test_codec_profiles_are_read(tmp_path: Path) -> None:
    path = tmp_path / "a.kvprofile"
    text = f"remote_url: memory://\nremote_serde: kvt\ncodec_profile: {path}\n"
    said = []
    for content in (None, b"x" * 99, "cachegen", "cut", "kvt"):
        if content in ("cachegen", "kvt"):
            Profile(codec=str(content), model="m", layout=KVLayout(1, 1, 8)).save(path)
        elif content == "cut":
            path.write_bytes(path.read_bytes()[:-1])
        elif isinstance(content, bytes):
            path.write_bytes(content)
        status, report = checked(tmp_path, text)
        assert status == (0 if content == "kvt" else 2)
        if status:
            (error,) = report["errors"]
            said.append(error)
            assert values(report)["codec_profile"][0] == str(path)
            status, report = diagnose((), config_file=str(tmp_path / "kv.yaml"))
            assert (status, report["error"]) == (2, error)
    shown = re.escape(str(path))
    for error, expected in zip(
        said,
        (
            "profile PATH: No such file",
            "PATH is not a codec profile: it begins",
            "kvt' cannot use PATH: profile .* for codec 'cachegen'",
            "profile PATH is damaged: it has",
        ),
        strict=True,
    ):
        assert re.search(expected.replace("PATH", shown), error), error
        assert error.startswith("option 'codec_profile': ")
        assert error.endswith(f"(in {tmp_path}/kv.yaml)")


def test_an_error_names_its_place_once(tmp_path: Path) -> None:
    errors = checked(tmp_path, "remote_url: s3://x/kv")[1]["errors"]
    assert errors == ["s3://x: 'x' is not the name of a bucket (3 to 63 letters, digits, . and -)"]
    errors = checked(tmp_path, "remote_url: file:///mnt/kv?lane=3")[1]["errors"]
    assert errors[0].startswith("file:///mnt/kv: unknown option")
