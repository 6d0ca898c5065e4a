"""A process that is killed with records on their way down: what was acknowledged by a tier that lasts is there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kvstore.backend import Read, Status
from kvstore_backends.file import FileBackend

from .tiers_model import KEYS, record_of, soon

_CHILD = """
import sys, time
from kvstore.backend import Write
from kvstore.tiers import Tier, TieredBackend
from kvstore_backends.file import FileBackend
from kvstore_backends.memory import MemoryBackend
from tests.faults.tiers_model import KEYS, record_of

folder, write = sys.argv[1:]
memory = Tier(MemoryBackend(1 << 20, policy="none"), 1 << 20, write=write)
disk = Tier(FileBackend(folder + "/disk", nbytes=64 << 10, policy="none", name="disk"), 64 << 10)
far = Tier(FileBackend(folder + "/far", name="far"))
backend = TieredBackend([memory, disk, far])
for index, key in enumerate(KEYS):
    data = memoryview(record_of(key, index))
    (outcome,) = backend.put([Write(key, [data])], deadline=time.monotonic() + 30)
    print(index, outcome.status.name, flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("write", ["through", "back"])
@pytest.mark.parametrize("after", [5, 20, 40])
def test_kill_with_records_on_their_way_down(tmp_path: Path, write: str, after: int) -> None:
    """With `through` nothing acknowledged is lost. With `back` it may be, but what is there is whole."""
    child = subprocess.Popen(
        [sys.executable, "-c", _CHILD, str(tmp_path), write], stdout=subprocess.PIPE, text=True,
        cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert child.stdout is not None
    with child.stdout as lines:
        acknowledged = [index for index, line in zip(range(after), lines, strict=False) if "OK" in line]
        child.kill()
        rest = lines.read().splitlines()  # acknowledged before the signal took effect
    child.wait()
    acknowledged += [int(line.split()[0]) for line in rest if line.endswith("OK")]
    assert len(acknowledged) >= after
    far = FileBackend(tmp_path / "far")
    try:
        memory = memoryview(bytearray(16_384))
        found = set()
        for index, key in enumerate(KEYS):
            (outcome,) = far.get_into([Read(key, memory)], deadline=soon())
            if outcome.status is Status.OK:
                assert memory[: outcome.nbytes] == record_of(key, index)
                found.add(index)
        if write == "through":
            assert set(acknowledged) <= found
    finally:
        far.close()
