"""`BackendStateMachine`: hypothesis drives a backend with any sequence of calls, and compares it with an oracle.

The oracle is a plain dict with byte-range arithmetic of its own; it shares no code with what is tested.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvstore.backend import Backend, Capability, Outcome, Read, Status, Write
from kvstore.buffers import Buffer
from kvstore.errors import TransientError
from kvstore.keys import Key

__all__ = ["BackendStateMachine", "backend_state_machine"]

_KEYS = [Key(bytes([index]) * 31 + bytes([255 - index])) for index in range(5)]
_CANARY = 0xA5
_PATIENCE_S = 60.0

# Small key sets, so that calls meet records; sizes at the edges of pages and headers, and large ones as often as small.
_keys = st.sampled_from(_KEYS)
_few_keys = st.lists(_keys, unique=True, min_size=1, max_size=2)
_key_sets = st.lists(_keys, unique=True, max_size=len(_KEYS))
_places = [0, 0, 1, 63, 64, 65, 511, 512, 1000, 3333, 4095, 4096, 4097, 8191, 8192, 9000]
_sizes = st.one_of(st.sampled_from(_places[1:]), st.integers(4096, 9000))
_offsets = st.one_of(st.sampled_from([*_places, 1 << 33]), st.integers(0, 9000), st.just(0))
_lengths = st.one_of(st.sampled_from([*_places, 20_000]), st.integers(0, 9000), st.just(10_000))
_writes = st.lists(st.tuples(_keys, _sizes, st.integers(0, 250), st.integers(1, 4)), min_size=1, max_size=5)
_reads = st.lists(st.tuples(_keys, _offsets, _lengths), min_size=1, max_size=8)


def _content(nbytes: int, salt: int) -> list[int]:
    """Bytes that differ by place and salt, with a period that no block size divides."""
    return [(place * 7 + place // 251 + salt) % 251 for place in range(nbytes)]


def _expected(record: list[int], offset: int, length: int) -> list[int]:
    return [record[place] for place in range(offset, min(offset + length, len(record)))] if offset < len(record) else []


class BackendStateMachine(RuleBasedStateMachine):
    """Any sequence of put, get, stat, delete, quarantine, list, lease, expired calls and reopening.

    Made by `backend_state_machine`; a subclass sets `open_backend`.
    """

    open_backend: ClassVar[Callable[[Path], Backend]]
    empty_records: ClassVar[bool] = True

    def __init__(self) -> None:
        super().__init__()
        self.oracle: dict[Key, list[int]] = {}
        self.leases: list[tuple[Buffer, bytes]] = []
        self.place = tempfile.TemporaryDirectory(prefix="kvstore-stateful-")
        self.backend = type(self).open_backend(Path(self.place.name))

    def teardown(self) -> None:
        try:
            self._end_leases()
        finally:
            self.backend.close()
            self.place.cleanup()

    def _soon(self) -> float:
        return time.monotonic() + _PATIENCE_S

    def _end_leases(self) -> None:
        leases, self.leases = self.leases, []
        changed = [buffer for buffer, wanted in leases if buffer.view != wanted]
        for buffer, _ in leases:
            buffer.release()
        assert not changed, "a leased record changed"

    @initialize()
    def starts_empty(self) -> None:
        assert self.backend.stat(_KEYS, deadline=self._soon()) == [Outcome(Status.MISS)] * len(_KEYS)

    @rule(writes=_writes)
    def put(self, writes: list[tuple[Key, int, int, int]]) -> None:
        batch, wanted = [], []
        for key, size, salt, parts in writes:
            nbytes = size if self.empty_records else max(size, 1)
            content = _content(nbytes, salt)
            data = bytes(content)
            step = max(1, nbytes // parts)
            batch.append(Write(key, [memoryview(data[at : at + step]) for at in range(0, nbytes, step)]))
            if key in self.oracle:
                wanted.append(Outcome(Status.EXISTS))
            else:
                wanted.append(Outcome(Status.OK, nbytes))
                self.oracle[key] = content
        assert self.backend.put(batch, deadline=self._soon()) == wanted

    @rule(reads=_reads)
    def get(self, reads: list[tuple[Key, int, int]]) -> None:
        memories = [bytearray([_CANARY]) * length for _, _, length in reads]
        batch = [
            Read(key, memoryview(memory), offset) for (key, offset, _), memory in zip(reads, memories, strict=True)
        ]
        outcomes = self.backend.get_into(batch, deadline=self._soon())
        assert len(outcomes) == len(reads)
        for (key, offset, length), memory, outcome in zip(reads, memories, outcomes, strict=True):
            record = self.oracle.get(key)
            if record is None:
                assert outcome == Outcome(Status.MISS)
                continue
            wanted = _expected(record, offset, length)
            assert outcome == Outcome(Status.OK, len(wanted))
            assert list(memory) == wanted + [_CANARY] * (length - len(wanted))

    @rule(keys=_few_keys)
    def delete(self, keys: list[Key]) -> None:
        wanted = [Outcome(Status.OK if self.oracle.pop(key, None) is not None else Status.MISS) for key in keys]
        assert self.backend.delete(keys, deadline=self._soon()) == wanted

    @rule(keys=_few_keys)
    def quarantine_after_reading(self, keys: list[Key]) -> None:
        self.get([(key, 0, 1) for key in keys])
        wanted = [Outcome(Status.OK if self.oracle.pop(key, None) is not None else Status.MISS) for key in keys]
        assert self.backend.quarantine(keys, deadline=self._soon()) == wanted

    @precondition(lambda self: Capability.LIST in self.backend.capabilities)
    @rule()
    def list_all(self) -> None:
        found = [(info.key, info.nbytes) for page in self.backend.list(deadline=self._soon()) for info in page]
        assert sorted(found) == sorted((key, len(record)) for key, record in self.oracle.items())

    # Whether a record can be leased just now may depend on what moves in the background: so that hypothesis draws the
    # same each time, no precondition looks at it.
    @rule(keys=_key_sets)
    def lease(self, keys: list[Key]) -> None:
        if len(self.leases) >= 20:
            self._end_leases()
        leases = self.backend.lease(keys, deadline=self._soon())
        assert len(leases) == len(keys)
        for key, buffer in zip(keys, leases, strict=True):
            if buffer is not None:
                self.leases.append((buffer, bytes(self.oracle.get(key, ()))))
                assert key in self.oracle, "a lease on a record that is not there"
                assert buffer.view.readonly

    @rule()
    def end_leases(self) -> None:
        self._end_leases()

    @rule(keys=_key_sets, operation=st.sampled_from(["stat", "get_into", "put", "delete", "quarantine"]))
    def too_late(self, keys: list[Key], operation: str) -> None:
        items: Sequence[Any] = keys
        if operation == "get_into":
            items = [Read(key, memoryview(bytearray(4))) for key in keys]
        elif operation == "put":
            items = [Write(key, [memoryview(b"late")]) for key in keys]
        outcomes = getattr(self.backend, operation)(items, deadline=time.monotonic() - 1)
        assert len(outcomes) == len(keys)
        for outcome in outcomes:
            assert outcome.status is Status.ERROR
            assert isinstance(outcome.error, TransientError)

    @precondition(lambda self: Capability.DURABLE in self.backend.capabilities)
    @rule()
    def reopen(self) -> None:
        self._end_leases()
        self.backend.close()
        self.backend = type(self).open_backend(Path(self.place.name))

    @invariant()
    def sizes_are_those_of_the_oracle(self) -> None:
        wanted = [
            Outcome(Status.OK, len(self.oracle[key])) if key in self.oracle else Outcome(Status.MISS) for key in _KEYS
        ]
        assert self.backend.stat(_KEYS, deadline=self._soon()) == wanted


def backend_state_machine(
    open_backend: Callable[[Path], Backend],
    *,
    empty_records: bool = True,
    max_examples: int = 40,
    steps: int = 25,
) -> type[BackendStateMachine]:
    """A state machine for one backend; its attribute `TestCase` is what pytest collects.

    Args:
        open_backend: opens the backend; it gets a folder that is new for every example and the same on reopening,
            which is done if the backend is DURABLE. A place that is not a folder must be empty for every example.
        empty_records: False for a backend that refuses records of 0 bytes.
        max_examples, steps: how many sequences are tried, of how many calls at most.
    """
    machine: type[BackendStateMachine] = type(
        "BackendMachine",
        (BackendStateMachine,),
        {"open_backend": staticmethod(open_backend), "empty_records": empty_records},
    )
    machine.TestCase.settings = settings(
        max_examples=max_examples,
        stateful_step_count=steps,
        deadline=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
    )
    return machine
