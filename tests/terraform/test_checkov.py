"""checkov over everything, with the exceptions that terraform/checkov.yaml lists and explains."""

from __future__ import annotations

import json
import os
import re
import subprocess
from typing import Any

import pytest
import yaml

from tests.terraform.support import TERRAFORM, environment

pytestmark = pytest.mark.slow  # an environment of 0.4 GB, and ten seconds

_CONFIG = TERRAFORM / "checkov.yaml"


def _checkov() -> dict[str, Any]:
    """Its report, without our exceptions (those in the files themselves count as skipped)."""
    python = environment("requirements-checkov.txt", given=os.environ.get("TERRAFORM_CHECKOV_VENV"))
    command = [
        str(python.with_name("checkov")), "-d", str(TERRAFORM), "--framework", "terraform", "--skip-download",
        "--compact", "--quiet", "-o", "json",
    ]  # fmt: skip
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=300)
    assert done.stdout.lstrip().startswith(("{", "[")), done.stdout + done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def test_findings_are_exactly_the_explained_ones() -> None:
    report = _checkov()
    failed: dict[str, set[str]] = {}
    for finding in report["results"]["failed_checks"]:
        failed.setdefault(finding["check_id"], set()).add(f"{finding['file_path']} {finding['resource']}")
    excepted = set(yaml.safe_load(_CONFIG.read_text())["skip-check"])
    assert {check: where for check, where in failed.items() if check not in excepted} == {}
    assert excepted - set(failed) == set(), "exceptions that nothing needs any more"
    assert report["summary"]["passed"] > 300
    assert report["summary"]["parsing_errors"] == 0


def test_every_exception_has_a_reason() -> None:
    lines = [line for line in _CONFIG.read_text().splitlines() if line.lstrip().startswith("- CKV")]
    assert lines
    for line in lines:
        assert re.search(r"# \w+.{10,}", line), f"no reason: {line}"
    for path in TERRAFORM.glob("**/*.tf"):
        for line in path.read_text().splitlines():
            assert "checkov:skip" not in line or re.search(r"checkov:skip=\w+: ?\w.{10,}", line), f"{path}: {line}"
