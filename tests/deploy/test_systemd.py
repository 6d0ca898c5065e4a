"""The systemd unit: what systemd says of it, and what it starts, started."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from kvstore_cli.main import main
from kvstore_cli.serve_options import load_settings
from tests.unit.cloudwatch_support import NONE, VLLM, Place

from .support import DEPLOY, ask, free_port, running, until

UNIT = DEPLOY / "systemd" / "kvstore.service"
CLOUDWATCH = DEPLOY / "systemd" / "kvstore-cloudwatch.service"
COSTS = DEPLOY / "systemd" / "kvstore-costs.service"
TIMER = DEPLOY / "systemd" / "kvstore-costs.timer"
CONFIG = DEPLOY / "systemd" / "node.yaml"
_WORST_EXPOSURE = 4.0  # of 10, as systemd counts


def settings_of(unit: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, value in re.findall(r"^(\w+)=(.*)$", unit, re.M):
        found.setdefault(name, []).append(value)
    return found


def analyze(*words: str) -> subprocess.CompletedProcess[str]:
    program = shutil.which("systemd-analyze")
    if program is None:
        pytest.skip("no systemd-analyze here")
    return subprocess.run([program, *words], capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("source", [UNIT, CLOUDWATCH, COSTS], ids=lambda path: path.stem)
def test_systemd_understands_every_line(tmp_path: Path, source: Path) -> None:
    program = tmp_path / "kvstore"  # the real one is not installed in /opt here
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    unit = tmp_path / source.name
    (tmp_path / TIMER.name).write_text(TIMER.read_text())
    unit.write_text(source.read_text().replace("/opt/kvstore/bin/kvstore", str(program)))
    done = analyze("verify", "--man=no", str(unit), *([str(tmp_path / TIMER.name)] if source == COSTS else []))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    unit.write_text(unit.read_text().replace("LockPersonality", "LockPersonalty"))
    assert "LockPersonalty" in analyze("verify", "--man=no", str(unit)).stderr, "it does look"


@pytest.mark.parametrize("source", [UNIT, CLOUDWATCH, COSTS], ids=lambda path: path.stem)
def test_it_is_shut_in(source: Path) -> None:
    done = analyze("security", "--offline=true", "--no-pager", str(source))
    if "Unknown option" in done.stderr or "unrecognized option" in done.stderr:
        pytest.skip("this systemd-analyze is older than 250")
    found = re.search(rf"Overall exposure level for {source.name}: ([\d.]+)", done.stdout)
    assert found is not None, done.stdout + done.stderr
    assert float(found[1]) <= _WORST_EXPOSURE


def test_it_waits_longer_than_the_node_needs_to_drain() -> None:
    unit = settings_of(UNIT.read_text())
    config = yaml.safe_load(CONFIG.read_text())
    settings = load_settings([(name, value) for name, value in config.items() if name != "http"], env={})
    assert float(unit["TimeoutStopSec"][0]) > 2 * settings.server["drain_timeout"]
    assert unit["User"] == ["kvstore"]
    for folder, variable in (
        ("/run/", "RuntimeDirectory"),
        ("/var/lib/", "StateDirectory"),
        ("/etc/", "ConfigurationDirectory"),
    ):
        assert f"{folder}{unit[variable][0]}/" in CONFIG.read_text() + UNIT.read_text()
    assert config["unix"].startswith("/run/kvstore/")


def test_what_it_starts_starts(tmp_path: Path) -> None:
    unit = settings_of(UNIT.read_text())
    credentials = dict(each.split(":", 1) for each in unit["LoadCredential"])
    assert set(credentials.values()) == {"/etc/kvstore/node.token", "/etc/kvstore/admin.token"}
    for name in credentials:
        (tmp_path / name).write_text(f"secret-{name}\n")
    env = dict(word.split("=", 1) for line in unit["Environment"] for word in line.replace("%d", str(tmp_path)).split())
    http = free_port()
    config = CONFIG.read_text().replace("7070", "0").replace("7080", str(http)).replace("64GiB", "16MiB")
    config = re.sub(r"/(run|var/lib)/kvstore", str(tmp_path), config).replace("400GiB", "64MiB")
    (tmp_path / "node.yaml").write_text(config)
    (command,) = unit["ExecStart"]
    program, *words = command.replace("/etc/kvstore", str(tmp_path)).split()
    assert os.path.basename(program) == "kvstore"
    with running(words, env):
        until(f"http://127.0.0.1:{http}/readyz")
        assert ask(f"http://127.0.0.1:{http}/page/data")[0] == 401
        assert ask(f"http://127.0.0.1:{http}/page/data", "secret-admin.token")[0] == 200
        assert (tmp_path / "node.sock").is_socket()


def test_what_publishes_finds_node_and_engine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command of the unit, against a node as `node.yaml` has it and an engine's metrics."""
    unit = settings_of(CLOUDWATCH.read_text())
    assert unit["LoadCredential"] == ["admin.token:/etc/kvstore/admin.token"]
    assert "http: 127.0.0.1:7080" in CONFIG.read_text()
    (tmp_path / "admin.token").write_text("secret-admin\n")
    engine = Place()
    engine.text = VLLM.format(**NONE)
    http = free_port()
    (command,) = unit["ExecStart"]
    command = command.replace("%d", str(tmp_path)).replace("7080", str(http)).replace("127.0.0.1:8000", engine.url[7:])
    program, *words = command.replace("9464", "9").split()
    assert os.path.basename(program) == "kvstore"
    node = ["serve", "--listen", "127.0.0.1:0", "--http", f"127.0.0.1:{http}", "--memory", "16MiB"]
    env = {"KVSTORE_SERVE_HTTP_ADMIN_TOKEN": "secret-admin"}
    try:
        with running(node, env):
            until(f"http://127.0.0.1:{http}/readyz")
            assert main([*words, "--dry-run", "--interval", "1s", "--gpu", "off", "--json", "-"]) == 0
    finally:
        engine.close()
    said = capsys.readouterr()
    assert {"TokensSaved"} <= {row["name"] for row in json.loads(said.out)}
    assert [headers.get("authorization") for headers in engine.headers] == [None, None], "the token is the node's"


def test_the_daily_report_is_a_command_of_ours(capsys: pytest.CaptureFixture[str]) -> None:
    text = COSTS.read_text()
    found = re.search(r"^# COSTS=(.*)$", text, re.M)
    assert found is not None
    (command,) = settings_of(text)["ExecStart"]
    words = command.replace("$COSTS", found[1]).split()[1:]
    assert main([*words, "--date", "no day"]) == 2
    assert "--date" in capsys.readouterr().err, "all the rest makes sense"
    assert TIMER.stem == COSTS.stem
