"""Says at the end what of terraform/ was not checked in this run: no check vanishes silently."""

from __future__ import annotations

import os

import pytest

_NEVER = "never applied to AWS: the provider's own code, permissions, quotas and capacity were not part of this"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    ran = [r for key in ("passed", "failed") for r in terminalreporter.stats.get(key, ()) if "terraform/" in r.nodeid]
    skipped = [r for r in terminalreporter.stats.get("skipped", ()) if "terraform/" in r.nodeid]
    if not ran and not skipped:
        return
    terminalreporter.write_sep("-", "terraform/")
    for report in skipped:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        terminalreporter.write_line(f"not checked: {report.nodeid}: {reason.removeprefix('Skipped: ')}")
    slow = [r for r in terminalreporter.stats.get("deselected", ()) if "terraform/" in r.nodeid]
    for item in slow:
        terminalreporter.write_line(f"not checked (slow; make test-slow): {item.nodeid}")
    if not os.environ.get("TERRAFORM_CHECKS_REAL"):
        terminalreporter.write_line(
            "not checked: with the real provider (TERRAFORM_CHECKS_REAL=1 does, and downloads it)"
        )
    terminalreporter.write_line(_NEVER)
