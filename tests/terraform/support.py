"""What tests of terraform/ share: environments apart from the project's own, and the checker.

checker/          real Terraform core, real provider schemas, simulated providers (README.md there)
requirements.txt  its environment, made once in $TERRAFORM_CHECKS_VENV or ~/.cache/kvstore/terraform-…
vars/             variables that the modules are checked with: MODULE.json or MODULE.CASE.json
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
TERRAFORM = HERE.parents[1] / "terraform"
MODULES = TERRAFORM / "modules"
VARIABLES = HERE / "vars"
STEPS = ("fmt", "init", "versions", "validate", "test", "plan", "apply", "replan", "destroy", "values", "policies")
STATIC = STEPS[:5]

_REQUIRED = "TERRAFORM_CHECKS"  # =required: an environment that cannot be made is a failure, not a skip
_INSTALL_S = 600.0
_CHECK_S = 280.0


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvstore"


@functools.cache
def environment(requirements: str, *, given: str | None = None) -> Path:
    """The Python of an environment with these requirements, made if it is not there.

    Args:
        requirements: name of a file in this folder.
        given: folder to make it in (another run may have made it); default: one in the cache, named after its contents.

    Skips the test, or fails it with $TERRAFORM_CHECKS=required, where packages cannot be had.
    """
    text = (HERE / requirements).read_text()
    digest = hashlib.sha256(f"{text}{sys.version_info[:2]}".encode()).hexdigest()[:12]
    folder = (
        Path(given) if given else _cache() / f"{Path(requirements).stem.replace('requirements', 'terraform')}-{digest}"
    )
    python, made = folder / "bin" / "python", folder / f".made-{digest}"
    if made.exists():
        return python
    if sys.platform != "linux" or platform.machine() != "x86_64":
        pytest.skip(f"terraform/ is not checked here: {requirements} is for Linux on x86-64")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.with_name(folder.name + ".lock"), "w") as lock:  # several processes run tests
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            pip = [
                str(python),
                "-m",
                "pip",
                "install",
                "-q",
                "--disable-pip-version-check",
                "-r",
                str(HERE / requirements),
            ]
            for command in ([sys.executable, "-m", "venv", "--clear", str(folder)], pip):
                done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=_INSTALL_S)
                if done.returncode:
                    shutil.rmtree(folder, ignore_errors=True)
                    why = done.stderr.strip()[-300:]
                    said = f"terraform/ is not checked here: {requirements} cannot be installed: {why}"
                    if os.environ.get(_REQUIRED) == "required":
                        pytest.fail(said)
                    pytest.skip(said)
            made.touch()
    return python


@dataclass(frozen=True)
class Checked:
    """What the checker said.

    Attributes:
        code: 0 all well, 1 a fault in the module, 2 the checker could not run.
        said: everything it printed.
        passed: steps that passed.
        failed: the step that failed, or None.
    """

    code: int
    said: str
    passed: tuple[str, ...]
    failed: str | None


def check(folder: Path, *options: str, steps: tuple[str, ...] = STEPS) -> Checked:
    """Run the checker over one root module (or a module as a root), with `steps` only."""
    python = environment("requirements.txt", given=os.environ.get("TERRAFORM_CHECKS_VENV"))
    skips = [f"--skip={step}" for step in STEPS if step not in steps]
    command = [str(python), "-B", str(HERE / "checker" / "check.py"), str(folder), *skips, *options]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=_CHECK_S)
    passed = tuple(re.findall(r"^PASS (\w+)", done.stdout, re.M))
    failed = re.search(r"^FAIL (\w+)", done.stdout, re.M)
    return Checked(done.returncode, done.stdout + done.stderr, passed, failed and failed.group(1))


def variables(module: str, case: str | None = None) -> Path:
    """The file of variables a module is checked with."""
    return VARIABLES / (f"{module}.{case}.json" if case else f"{module}.json")


def assert_sound(checked: Checked, steps: tuple[str, ...] = STEPS) -> None:
    """Every step ran and passed, tests among them."""
    assert checked.code == 0, checked.said
    assert checked.passed == steps, checked.said
    assert "no tests found" not in checked.said, checked.said


def outputs(state: dict[str, Any]) -> dict[str, Any]:
    """Output values of a saved state.json."""
    return {name: output["value"] for name, output in state["values"]["outputs"].items()}


def load(path: Path) -> Any:
    return json.loads(path.read_text())
