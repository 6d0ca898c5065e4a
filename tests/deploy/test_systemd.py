"""The systemd unit: what systemd says of it, and what it starts, started."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from kvstore_cli.serve_options import load_settings

from .support import DEPLOY, ask, free_port, running, until

UNIT = DEPLOY / "systemd" / "kvstore.service"
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


def test_systemd_understands_every_line(tmp_path: Path) -> None:
    program = tmp_path / "kvstore"  # the real one is not installed in /opt here
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    unit = tmp_path / UNIT.name
    unit.write_text(UNIT.read_text().replace("/opt/kvstore/bin/kvstore", str(program)))
    done = analyze("verify", "--man=no", str(unit))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    unit.write_text(unit.read_text().replace("NoNewPrivileges", "NoNewPrivilege"))
    assert "NoNewPrivilege" in analyze("verify", "--man=no", str(unit)).stderr, "it does look"


def test_it_is_shut_in() -> None:
    done = analyze("security", "--offline=true", "--no-pager", str(UNIT))
    if "Unknown option" in done.stderr or "unrecognized option" in done.stderr:
        pytest.skip("this systemd-analyze is older than 250")
    found = re.search(r"Overall exposure level for kvstore\.service: ([\d.]+)", done.stdout)
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
