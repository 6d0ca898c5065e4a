"""The Dockerfile. No image can be built here: hadolint reads it, each of its steps is one of steps.sh, and these are
run, in a copy of what the build would get to see: wheel, environment, node, probes, SIGTERM."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.terraform.support import environment

from .support import DEPLOY, ROOT, python

DOCKER = DEPLOY / "docker"
STEPS = DOCKER / "steps.sh"
_INSTALL_S = 600


def steps(*words: str, path: str | None = None, status: int = 0) -> str:
    """Run a step; what it said, on both streams."""
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    if path is not None:
        env["PATH"] = path
    done = subprocess.run(
        [str(STEPS), *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=_INSTALL_S,
        env=env, check=False,
    )  # fmt: skip
    assert done.returncode == status, done.stdout
    return done.stdout


def context(to: Path) -> Path:
    """What the build gets to see: this checkout through Dockerfile.dockerignore (everything out, some of it in)."""
    lines = [
        line for line in (DOCKER / "Dockerfile.dockerignore").read_text().splitlines() if line[:1] not in ("", "#")
    ]
    assert lines[0] == "*"
    out = shutil.ignore_patterns(*(line.removeprefix("**/") for line in lines if line.startswith("**/")))
    for name in (line[1:] for line in lines if line.startswith("!")):
        target = to / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, target, ignore=out)
        else:
            shutil.copy(ROOT / name, target)
    return to


def runs() -> list[str]:
    """The commands of RUN lines."""
    text = (DOCKER / "Dockerfile").read_text().replace("\\\n", " ")
    return [part.strip() for line in re.findall(r"^RUN (.*)$", text, re.M) for part in line.split("&&")]


def test_hadolint_has_nothing_to_say() -> None:
    done = subprocess.run(
        [str(python().with_name("hadolint")), str(DOCKER / "Dockerfile")], capture_output=True, text=True, check=False
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "")


def test_shellcheck_has_nothing_to_say() -> None:
    shellcheck = environment("requirements-shellcheck.txt").with_name("shellcheck")
    done = subprocess.run([str(shellcheck), str(STEPS)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_each_step_of_the_image_is_one_of_the_script() -> None:
    called = [re.search(r"steps\.sh (\w+)", command) for command in runs()]
    assert [found[1] for found in called if found] == ["build", "engine", "python", "install", "check"]
    others = [command.split()[0] for command, found in zip(runs(), called, strict=True) if not found]
    assert set(others) == {"rm", "useradd", "install"}


def test_the_wheel_has_all_that_is_needed_at_run_time(tmp_path: Path) -> None:
    source = context(tmp_path / "src")
    assert not list(source.rglob("__pycache__"))
    wheel = steps("build", str(source), str(tmp_path / "wheels")).splitlines()[-1]
    listed = subprocess.run(
        ["python3", "-m", "zipfile", "-l", wheel], capture_output=True, text=True, check=True
    ).stdout
    for name in ("page.html", "page.css", "page.js", "draw.js"):
        assert f"kvstore/control/page/{name}" in listed
    for name in ("kvstore_backends/node_server.py", "kvstore_transport/", "kvstore_cli/serve.py"):
        assert name in listed
    assert "tests/" not in listed


@pytest.mark.slow  # half a minute, and packages from the index
def test_the_steps_of_the_image_end_in_a_node_that_serves(tmp_path: Path) -> None:
    source = context(tmp_path / "src")
    wheels, prefix = tmp_path / "wheels", tmp_path / "opt" / "kvstore"
    assert Path(steps("python").strip()).exists()
    steps("build", str(source), str(wheels))
    assert "kvstore" in steps("install", str(wheels), str(source), str(prefix), "control,s3,tracing")
    said = steps("check", str(prefix))
    assert [line.split()[1] for line in said.splitlines() if line.startswith("ok ")] == [
        "/healthz", "/readyz", "/metrics", "/", "/openapi.json", "SIGTERM",
    ]  # fmt: skip


def test_an_engine_gets_what_s3_needs_and_keeps_its_versions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    (engine,) = [command for command in runs() if "steps.sh engine" in command]
    text = (DOCKER / "Dockerfile").read_text()
    stage = text[text.index(" AS engine") : text.index(" AS node")]
    (extras,) = re.findall(r"^ARG EXTRAS=(\S+)$", stage, re.M)
    assert "s3" in extras.split(",")
    assert engine.endswith('steps.sh engine /wheels "${EXTRAS}"')
    (tmp_path / "kvstore-0.1.0-py3-none-any.whl").touch()
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\n')
    python.chmod(0o755)
    monkeypatch.setenv("PYTHON", str(python))
    steps("engine", str(tmp_path), extras)
    installed, shown = (tmp_path / "asked").read_text().splitlines()
    assert installed.endswith(f"kvstore[{extras}] @ file://{tmp_path}/kvstore-0.1.0-py3-none-any.whl")
    assert "constraint" not in installed, "the versions are the engine's"
    assert "import kvstore" in shown


def test_a_step_that_cannot_be_done_says_why(tmp_path: Path) -> None:
    assert "SOURCE is the root of the checkout" in steps("build", str(tmp_path), str(tmp_path / "w"), status=1)
    assert "run the step 'build' first" in steps(
        "install", str(tmp_path), str(ROOT), str(tmp_path / "v"), "s3", status=1
    )
    for name in ("kvstore-0.1.0-py3-none-any.whl", "kvstore-0.2.0-py3-none-any.whl"):
        (tmp_path / name).touch()
    assert "more than one wheel" in steps("engine", str(tmp_path), "s3", status=1)
    for words in ((), ("build",), ("unknown",), ("check", "a", "b"), ("engine", "a")):
        assert "steps.sh build SOURCE WHEELS" in steps(*words, status=2)


def test_a_node_that_does_not_start_fails_the_build(tmp_path: Path) -> None:
    bin_ = tmp_path / "bin"
    bin_.mkdir()
    (bin_ / "python").symlink_to(shutil.which("python3") or "")
    (bin_ / "kvstore").write_text("#!/bin/sh\nexit 3\n")
    (bin_ / "kvstore").chmod(0o755)
    assert "ended with status 3 before it was ready" in steps("check", str(tmp_path), status=1)


def test_a_base_without_python_gets_one_or_says_so(tmp_path: Path) -> None:
    """With nothing but the tools that the step itself needs, and no apt-get."""
    for name in ("sh", "dirname", "basename", "sed"):
        (tmp_path / name).symlink_to(shutil.which(name) or "")
    assert "take another base" in steps("python", path=str(tmp_path), status=1)
