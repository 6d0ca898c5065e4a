"""`kvstore cloudwatch publish` as a process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.unit.cloudwatch_support import NONE, VLLM, Place


@pytest.fixture
def place() -> Iterator[Place]:
    found = Place()
    yield found
    found.close()


def test_a_process_publishes_until_it_is_told_to_end(place: Place) -> None:
    place.text = VLLM.format(**NONE)
    command = [sys.executable, "-m", "kvstore_cli", "cloudwatch", "publish", "--scrape", place.url, "--interval", "30s",
               "--emf", "--gpu", "off"]  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": ""}) as process:
        try:
            while not place.answered:
                assert process.poll() is None
                time.sleep(0.01)
            place.text = VLLM.format(**{**NONE, "external_queries": 4, "external_hits": 1})
            wait_for(lambda: ready(process.pid), "its handler of SIGTERM")
            process.send_signal(signal.SIGTERM)
            out, _ = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 0
    last = json.loads(out.splitlines()[-1])
    assert last["CacheHitRate"] == 25.0, "what happened since the last time is not lost"


def ready(pid: int) -> bool:
    """Whether a process catches SIGTERM by now."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("SigCgt:"):
            return bool(int(line.split()[1], 16) >> (signal.SIGTERM - 1) & 1)
    return False


def wait_for(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.01)
