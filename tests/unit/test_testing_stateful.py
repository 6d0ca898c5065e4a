"""The state machine finds what it is there to find, and nothing in a backend that is right."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from kvstore.backend import Capability, Outcome, Read, Status, Write
from kvstore.keys import Key
from kvstore.testing import BackendStateMachine, DictBackend, backend_state_machine
from kvstore.testing import stateful as stateful_module

SEARCH = settings(
    max_examples=1500,  # ends with the first fault; which examples come depends on the modules that are loaded
    stateful_step_count=20,
    deadline=None,
    phases=[Phase.generate],
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)


class LosesTheLastByteOfAPage(DictBackend):
    def get_into(self, reads: Sequence[Read], *, deadline: float) -> list[Outcome]:
        outcomes = super().get_into(reads, deadline=deadline)
        for read, outcome in zip(reads, outcomes, strict=True):
            if outcome.nbytes >= 4096:
                read.dst[4095] = 0xFF
        return outcomes


class ForgetsQuarantine(DictBackend):
    def quarantine(self, keys: Sequence[Key], *, deadline: float) -> list[Outcome]:
        before = dict(self.records)
        outcomes = super().quarantine(keys, deadline=deadline)
        if len(keys) > 1:
            self.records = before
        return outcomes


class StoresLate(DictBackend):
    def put(self, writes: Sequence[Write], *, deadline: float) -> list[Outcome]:
        outcomes = super().put(writes, deadline=deadline)
        if any(outcome.status is Status.ERROR for outcome in outcomes):
            self.records.setdefault(writes[-1].key, b"late")
        return outcomes


class LosesAnEmptyRecordOnReopening(DictBackend):
    def __init__(self, path: Path) -> None:
        super().__init__()
        self.capabilities |= Capability.DURABLE
        self.path = path
        for file in path.iterdir():
            if data := file.read_bytes():
                self.records[Key.from_hex(file.name)] = data

    def close(self) -> None:
        super().close()
        for file in self.path.iterdir():
            file.unlink()
        for key, data in self.records.items():
            (self.path / key.hex()).write_bytes(data)


@pytest.mark.parametrize(
    "kind", [LosesTheLastByteOfAPage, ForgetsQuarantine, StoresLate, LosesAnEmptyRecordOnReopening]
)
def test_a_fault_is_found(kind: Any) -> None:
    takes_path = kind is LosesAnEmptyRecordOnReopening
    machine = backend_state_machine(lambda path: kind(path) if takes_path else kind())
    with pytest.raises(AssertionError):
        run_state_machine_as_test(machine, settings=SEARCH)


def test_records_of_0_bytes_can_be_left_out() -> None:
    machine = backend_state_machine(LosesAnEmptyRecordOnReopening, empty_records=False)
    run_state_machine_as_test(machine, settings=settings(SEARCH, max_examples=30))


def test_the_oracle_is_independent() -> None:
    """The expectations come from code that slices nothing and imports no backend."""
    assert issubclass(backend_state_machine(lambda path: DictBackend()), BackendStateMachine)
    source = inspect.getsource(stateful_module._expected)
    assert "range(" in source
    assert "DictBackend" not in inspect.getsource(stateful_module)
    record = stateful_module._content(10, 3)
    for offset in range(12):
        for length in range(12):
            assert bytes(stateful_module._expected(record, offset, length)) == bytes(record)[offset : offset + length]
