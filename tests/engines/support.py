"""Interpreters of the engines' own environments (tests/engines/venvs.sh), and running things in them."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

__all__ = ["environment", "interpreter", "run", "run_child"]


def interpreter(engine: str) -> Path:
    """The Python of an engine's environment. Without it the test is skipped, and says how to make it; with
    ENGINES_REQUIRED=1, as `make test-engines` sets it, it fails."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    base = Path(os.environ.get("ENGINES_DIR") or f"{cache}/kvstore/engines")
    python = base / engine / "bin" / "python"
    if (base / engine / ".complete").exists():
        return python
    message = f"no environment of {engine} under {base}: `make engines-venv ENGINES={engine}`"
    if os.environ.get("ENGINES_REQUIRED"):
        pytest.fail(message)
    pytest.skip(message)


def environment(more: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's environment without settings of kvstore's and LMCache's, and with telemetry and hubs off."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("KVSTORE_", "LMCACHE_"))}
    quiet = {
        "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1", "LMCACHE_TRACK_USAGE": "false", "LMCACHE_LOG_LEVEL": "WARNING",
        "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0", "VLLM_NO_USAGE_STATS": "1",
    }  # fmt: skip
    return {**kept, **quiet, **(more or {})}


def run(command: Sequence[object], env: Mapping[str, str] | None = None, timeout: float = 180) -> str:
    """Run a command to its end and return what it printed; fails the test, with the output, if it failed."""
    done = subprocess.run(
        [str(part) for part in command], env=environment(env), timeout=timeout, text=True, check=False,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert done.returncode == 0, f"{command} ended with {done.returncode}:\n{done.stdout[-6000:]}"
    return done.stdout


def run_child(python: Path, script: str, *arguments: object, timeout: float = 180, **env: str) -> Any:
    """Run a script of this folder and return the JSON on the last line it printed."""
    output = run([python, Path(__file__).with_name(script), *arguments], env, timeout)
    return json.loads(output.strip().splitlines()[-1])
