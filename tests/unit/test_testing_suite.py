"""The suite's tests can fail: for each way of breaking the contract, the test that is there to find it does.

Each mutant is a `DictBackend` with one fault. A mutant that the suite lets through fails here.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from threading import Event
from typing import Any, ClassVar

import pytest

from kvstore.backend import EXISTS, MISS, OK, Backend, Capability, KeyInfo, Limits, Outcome, Read, Status, Write
from kvstore.buffers import Buffer, BufferPool
from kvstore.errors import ClosedError, PermanentError
from kvstore.keys import Key
from kvstore.testing import BackendSuite, DictBackend


class Overwrites(DictBackend):
    def put(self, writes: Sequence[Write], *, deadline: float) -> list[Outcome]:
        outcomes = super().put(writes, deadline=deadline)
        for write, outcome in zip(writes, outcomes, strict=True):
            if outcome.status is Status.EXISTS:
                self.records[write.key] = b"".join(write.src)
        return outcomes


class CallsExistsOk(DictBackend):
    def put(self, writes: Sequence[Write], *, deadline: float) -> list[Outcome]:
        outcomes = super().put(writes, deadline=deadline)
        return [
            Outcome(Status.OK, w.nbytes) if o.status is Status.EXISTS else o
            for w, o in zip(writes, outcomes, strict=True)
        ]


class LastOfEqualKeysWins(DictBackend):
    def put(self, writes: Sequence[Write], *, deadline: float) -> list[Outcome]:
        return super().put(writes[::-1], deadline=deadline)[::-1]


class AnswersInKeyOrder(DictBackend):
    def stat(self, keys: Sequence[Key], *, deadline: float) -> list[Outcome]:
        return super().stat(sorted(keys), deadline=deadline)


class LeavesOutMisses(DictBackend):
    def get_into(self, reads: Sequence[Read], *, deadline: float) -> list[Outcome]:
        return [outcome for outcome in super().get_into(reads, deadline=deadline) if outcome is not MISS]


class ReadsFromTheStart(DictBackend):
    def get_into(self, reads: Sequence[Read], *, deadline: float) -> list[Outcome]:
        return super().get_into([Read(read.key, read.dst) for read in reads], deadline=deadline)


class FailsBehindTheEnd(DictBackend):
    def get_into(self, reads: Sequence[Read], *, deadline: float) -> list[Outcome]:
        outcomes = super().get_into(reads, deadline=deadline)
        error = Outcome.failed(PermanentError("range not satisfiable"))
        return [error if o.ok and r.dst and not o.nbytes else o for r, o in zip(reads, outcomes, strict=True)]


class ZeroesTheRest(DictBackend):
    def get_into(self, reads: Sequence[Read], *, deadline: float) -> list[Outcome]:
        outcomes = super().get_into(reads, deadline=deadline)
        for read, outcome in zip(reads, outcomes, strict=True):
            if outcome.ok:
                read.dst[outcome.nbytes :] = bytes(len(read.dst) - outcome.nbytes)
        return outcomes


class ReportsAll(DictBackend):
    def get_into(self, reads: Sequence[Read], *, deadline: float) -> list[Outcome]:
        outcomes = super().get_into(reads, deadline=deadline)
        return [Outcome(Status.OK, len(r.dst)) if o.ok else o for r, o in zip(reads, outcomes, strict=True)]


class WritesLate(DictBackend):
    """Writes the destinations of each read once more at the next call."""

    last: Sequence[Read] = ()

    def stat(self, keys: Sequence[Key], *, deadline: float) -> list[Outcome]:
        super().get_into(self.last, deadline=deadline)
        return super().stat(keys, deadline=deadline)

    def get_into(self, reads: Sequence[Read], *, deadline: float) -> list[Outcome]:
        self.last = reads
        return super().get_into(reads, deadline=deadline)


class KeepsTheSource(DictBackend):
    def put(self, writes: Sequence[Write], *, deadline: float) -> list[Outcome]:
        outcomes = super().put(writes, deadline=deadline)
        for write, outcome in zip(writes, outcomes, strict=True):
            if outcome.ok:
                self.records[write.key] = write.src[0]  # type: ignore[assignment]
        return outcomes


class StoresTheFirstViews(DictBackend):
    def put(self, writes: Sequence[Write], *, deadline: float) -> list[Outcome]:
        outcomes = super().put([write._replace(src=write.src[:1024]) for write in writes], deadline=deadline)
        return [Outcome(Status.OK, w.nbytes) if o.ok else o for w, o in zip(writes, outcomes, strict=True)]


class TakesEmptyForMissing(DictBackend):
    def stat(self, keys: Sequence[Key], *, deadline: float) -> list[Outcome]:
        return [outcome if outcome.nbytes else MISS for outcome in super().stat(keys, deadline=deadline)]


class HasNoDeadline(DictBackend):
    def _late(self, operation: str, keys: Sequence[Key], deadline: float) -> list[Outcome] | None:
        return super()._late(operation, keys, float("inf"))


class PutsBeforeTheDeadlineIsLooked(DictBackend):
    def put(self, writes: Sequence[Write], *, deadline: float) -> list[Outcome]:
        super().put(writes, deadline=float("inf"))
        return super().put(writes, deadline=deadline)


class NeedsAFiniteDeadline(DictBackend):
    def _late(self, operation: str, keys: Sequence[Key], deadline: float) -> list[Outcome] | None:
        int(deadline - time.monotonic())
        return super()._late(operation, keys, deadline)


class RaisesForAnItem(DictBackend):
    def _put_one(self, write: Write) -> Outcome:
        outcome = super()._put_one(write)
        if outcome.error is not None:
            raise outcome.error
        return outcome


class StoresWhatItRefuses(DictBackend):
    def _put_one(self, write: Write) -> Outcome:
        outcome = super()._put_one(write)
        if outcome.error is not None:
            self.records[write.key] = b"part"
        return outcome


class ShowsHalfARecord(DictBackend):
    """Waits, with half of a record visible, until somebody has looked at it."""

    looked = Event()

    def get_into(self, reads: Sequence[Read], *, deadline: float) -> list[Outcome]:
        outcomes = super().get_into(reads, deadline=deadline)
        if any(outcome.ok for outcome in outcomes):
            self.looked.set()
        return outcomes

    def _put_one(self, write: Write) -> Outcome:
        outcome = super()._put_one(write)
        whole = self.records[write.key]
        self.records[write.key] = whole[: len(whole) // 2]
        self.looked.wait(10)
        self.records[write.key] = whole
        return outcome


class LetsTwoWritersWin(DictBackend):
    def _put_one(self, write: Write) -> Outcome:
        super()._put_one(write)
        return Outcome(Status.OK, write.nbytes)


class DeletesNothing(DictBackend):
    def delete(self, keys: Sequence[Key], *, deadline: float) -> list[Outcome]:
        return [OK if outcome.ok else MISS for outcome in self.stat(keys, deadline=deadline)]


class NeverMissesOnDelete(DictBackend):
    def delete(self, keys: Sequence[Key], *, deadline: float) -> list[Outcome]:
        return [OK if outcome is MISS else outcome for outcome in super().delete(keys, deadline=deadline)]


class BlocksAfterQuarantine(DictBackend):
    def _put_one(self, write: Write) -> Outcome:
        return EXISTS if any(key == write.key for key, _ in self.quarantined) else super()._put_one(write)


class QuarantinesWhatWasReplaced(DictBackend):
    def quarantine(self, keys: Sequence[Key], *, deadline: float) -> list[Outcome]:
        self._seen.clear()
        return super().quarantine(keys, deadline=deadline)


class QuarantinesOnce(DictBackend):
    def quarantine(self, keys: Sequence[Key], *, deadline: float) -> list[Outcome]:
        return super().quarantine([k for k in keys if k not in dict(self.quarantined)], deadline=deadline)


class ListsTwice(DictBackend):
    def list(self, *, deadline: float) -> Iterator[Sequence[KeyInfo]]:
        for page in super().list(deadline=deadline):
            yield page
            yield page[:1]


class ListsWrongSizes(DictBackend):
    def list(self, *, deadline: float) -> Iterator[Sequence[KeyInfo]]:
        for page in super().list(deadline=deadline):
            yield [info._replace(nbytes=512) for info in page]


class ListsPlainBytes(DictBackend):
    def list(self, *, deadline: float) -> Iterator[Sequence[KeyInfo]]:
        for page in super().list(deadline=deadline):
            yield [info._replace(key=bytes(info.key)) for info in page]  # type: ignore[arg-type]


class ClaimsToList(DictBackend):
    def list(self, *, deadline: float) -> Iterator[Sequence[KeyInfo]]:
        return Backend.list(self, deadline=deadline)


class HidesThatItLists(DictBackend):
    def __init__(self) -> None:
        super().__init__()
        self.capabilities = Capability.NONE


class Leases(DictBackend):
    """Right, as it is: leases are copies."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BufferPool(1 << 20)
        self.capabilities |= Capability.LEASE

    def lease(self, keys: Sequence[Key], *, deadline: float) -> list[Buffer | None]:
        late = self._late("lease", keys, deadline)
        return [None if late or key not in self.records else self.lend(self.records[key]) for key in keys]

    def lend(self, data: bytes) -> Buffer:
        with self.pool.acquire(len(data)) as buffer:
            buffer.view[:] = data
            return buffer.readonly()

    def close(self) -> None:
        super().close()
        self.pool.close()


class LeasesNothing(Leases):
    def lease(self, keys: Sequence[Key], *, deadline: float) -> list[Buffer | None]:
        self._late("lease", keys, deadline)
        return [None] * len(keys)


class LeasesWritable(Leases):
    def lend(self, data: bytes) -> Buffer:
        buffer = self.pool.acquire(len(data))
        buffer.view[:] = data
        return buffer


class LeasesOfTheDeadChange(Leases):
    def __init__(self) -> None:
        super().__init__()
        self.lent: list[memoryview] = []

    def lend(self, data: bytes) -> Buffer:
        with self.pool.acquire(len(data)) as buffer:
            buffer.view[:] = data
            self.lent.append(buffer.view)
            return buffer.readonly()

    def delete(self, keys: Sequence[Key], *, deadline: float) -> list[Outcome]:
        for view in self.lent:
            view[:1] = b"!"
        self.lent.clear()
        return super().delete(keys, deadline=deadline)


class WorksAfterClose(DictBackend):
    def close(self) -> None:
        return


class ClosesOnce(DictBackend):
    def close(self) -> None:
        if self._closed:
            raise ClosedError("closed before")
        super().close()


class HangsInClose(DictBackend):
    """Like one that joins a thread that waits for work which never comes."""

    let_go: ClassVar[Event] = Event()

    def close(self) -> None:
        if not self._closed:
            super().close()
            self.let_go.wait(30)


class HangsAfterFork(DictBackend):
    def _late(self, operation: str, keys: Sequence[Key], deadline: float) -> list[Outcome] | None:
        try:
            return super()._late(operation, keys, deadline)
        except ClosedError:
            if not self._closed:
                Event().wait()
            raise


class BlamesNobodyAfterFork(DictBackend):
    def _late(self, operation: str, keys: Sequence[Key], deadline: float) -> list[Outcome] | None:
        try:
            return super()._late(operation, keys, deadline)
        except ClosedError:
            raise ClosedError("the connection is gone") from None


class ForgetsWhenReopened(DictBackend):
    def __init__(self) -> None:
        super().__init__()
        self.capabilities |= Capability.DURABLE


class IsNotShared(DictBackend):
    def __init__(self) -> None:
        super().__init__()
        self.capabilities |= Capability.SHARED


class Capped(DictBackend):
    """Right, as it is: the oldest goes."""

    capacity = 1 << 40

    def __init__(self) -> None:
        super().__init__()
        self.capabilities |= Capability.CAPACITY

    def _put_one(self, write: Write) -> Outcome:
        if write.nbytes > self.capacity:
            return Outcome.failed(PermanentError("too large", backend=self.name, operation="put"))
        outcome = super()._put_one(write)
        while sum(map(len, self.records.values())) > self.capacity:
            del self.records[next(iter(self.records))]
        return outcome


class NeverEvicts(Capped):
    def _put_one(self, write: Write) -> Outcome:
        return DictBackend._put_one(self, write)


class EvictsForNothing(Capped):
    def _put_one(self, write: Write) -> Outcome:
        outcome = super()._put_one(write)
        if outcome.error is not None:
            self.records.clear()
        return outcome


class StatIsUse(Capped):
    def stat(self, keys: Sequence[Key], *, deadline: float) -> list[Outcome]:
        for key in keys:
            if key in self.records:
                self.records[key] = self.records.pop(key)
        return super().stat(keys, deadline=deadline)


class TellsItsSecret(DictBackend):
    def __repr__(self) -> str:
        return "<client of s3 with hunter2>"


class HasOddLimits(DictBackend):
    def __init__(self) -> None:
        super().__init__()
        self.limits = Limits(lanes=0)


class HasNoName(DictBackend):
    def __init__(self) -> None:
        super().__init__(name="")


class ReportsErrorsWithoutOne(DictBackend):
    def stat(self, keys: Sequence[Key], *, deadline: float) -> list[Outcome]:
        return [
            Outcome(Status.ERROR) if outcome is MISS else outcome for outcome in super().stat(keys, deadline=deadline)
        ]


MUTANTS: list[tuple[type[DictBackend], str, tuple[Any, ...]]] = [
    (Overwrites, "test_the_first_bytes_survive", (False,)),
    (CallsExistsOk, "test_the_first_bytes_survive", (True,)),
    (LastOfEqualKeysWins, "test_the_first_of_equal_keys_in_a_batch_wins", ()),
    (AnswersInKeyOrder, "test_outcomes_align_in_mixed_batches", (64,)),
    (LeavesOutMisses, "test_outcomes_align_in_mixed_batches", (64,)),
    (ReadsFromTheStart, "test_a_range_is_read", ("odd",)),
    (ReadsFromTheStart, "test_many_ranges_of_many_records_in_one_batch", ()),
    (ReadsFromTheStart, "test_neighbouring_ranges_land_in_one_memory", ()),
    (FailsBehindTheEnd, "test_a_range_is_read", ("at the end",)),
    (FailsBehindTheEnd, "test_a_range_is_read", ("far behind the end",)),
    (ZeroesTheRest, "test_a_range_is_read", ("across the end",)),
    (ReportsAll, "test_a_range_is_read", ("destination longer than the record",)),
    (WritesLate, "test_nothing_is_written_to_dst_after_the_return", ()),
    (KeepsTheSource, "test_the_source_is_neither_changed_nor_kept", ()),
    (StoresTheFirstViews, "test_views_are_gathered", ()),
    (TakesEmptyForMissing, "test_an_empty_record_is_no_miss", ()),
    (HasNoDeadline, "test_a_deadline_that_has_passed", ("get",)),
    (HasNoDeadline, "test_a_deadline_that_has_passed", ("quarantine",)),
    (HasNoDeadline, "test_list_with_a_deadline_that_has_passed", ()),
    (PutsBeforeTheDeadlineIsLooked, "test_a_deadline_that_has_passed", ("put",)),
    (NeedsAFiniteDeadline, "test_no_deadline_at_all", ()),
    (RaisesForAnItem, "test_a_record_that_is_too_large_is_refused", ()),
    (StoresWhatItRefuses, "test_a_record_that_is_too_large_is_refused", ()),
    (ShowsHalfARecord, "test_a_reader_sees_nothing_or_everything", ()),
    (LetsTwoWritersWin, "test_of_several_writers_one_wins", ()),
    (DeletesNothing, "test_a_deleted_record_is_gone_and_its_key_free", ()),
    (NeverMissesOnDelete, "test_what_is_not_there_is_a_miss", ()),
    (BlocksAfterQuarantine, "test_a_quarantined_record_is_out_of_reach_and_heals", ()),
    (QuarantinesWhatWasReplaced, "test_quarantine_spares_a_record_that_was_replaced", ()),
    (QuarantinesOnce, "test_the_same_record_can_be_quarantined_again_and_again", ()),
    (ListsTwice, "test_list_is_what_is_there", ()),
    (ListsWrongSizes, "test_list_is_what_is_there", ()),
    (ListsPlainBytes, "test_list_is_what_is_there", ()),
    (ClaimsToList, "test_list_is_what_is_there", ()),
    (HidesThatItLists, "test_list_is_what_is_there", ()),
    (LeasesNothing, "test_leases_are_the_records", ()),
    (LeasesWritable, "test_leases_are_the_records", ()),
    (LeasesOfTheDeadChange, "test_leases_are_the_records", ()),
    (WorksAfterClose, "test_after_close_everything_says_so", ()),
    (ClosesOnce, "test_after_close_everything_says_so", ()),
    (HangsAfterFork, "test_after_fork", ()),
    (HangsAfterFork, "test_fork_while_other_threads_work", ()),
    (BlamesNobodyAfterFork, "test_after_fork", ()),
    (ForgetsWhenReopened, "test_records_survive_reopening", ()),
    (IsNotShared, "test_a_second_instance_sees_the_same_records", ()),
    (NeverEvicts, "test_the_capacity_is_enforced", ()),
    (EvictsForNothing, "test_what_never_fits_evicts_nothing", ()),
    (StatIsUse, "test_stat_does_not_change_recency", ()),
    (TellsItsSecret, "test_nothing_secret_is_shown", ()),
    (HasOddLimits, "test_names_limits_and_capabilities_make_sense", ()),
    (HasNoName, "test_names_limits_and_capabilities_make_sense", ()),
    (ReportsErrorsWithoutOne, "test_what_is_not_there_is_a_miss", ()),
]
WITHOUT_BACKEND = {
    "test_a_record_that_is_too_large_is_refused", "test_the_capacity_is_enforced",
    "test_what_never_fits_evicts_nothing", "test_stat_does_not_change_recency",
}  # fmt: skip


class Suite(BackendSuite):
    """The suite over one kind of backend, run by hand."""

    fork_limit_s = 0.5
    forbidden_text = ("hunter2",)
    kind: type[DictBackend]

    def open(self) -> Backend:
        self.inner = self.kind()
        return self.inner

    def open_limited(self, max_value_bytes: int) -> Backend:
        backend = self.kind()
        backend.limits = Limits(max_value_bytes=max_value_bytes)
        return backend

    def open_capacity(self, capacity_bytes: int) -> Backend | None:
        backend = self.kind()
        if not isinstance(backend, Capped):
            return None
        backend.capacity = capacity_bytes
        return backend

    def seed(self, backend: Backend, key: Key, data: bytes) -> None:
        self.inner.records[key] = data

    def inspect(self, backend: Backend, key: Key) -> bytes | None:
        data = self.inner.records.get(key)
        return None if data is None else bytes(data)

    @classmethod
    def run_one(cls, kind: type[DictBackend], test: str, arguments: tuple[Any, ...], path: Path) -> None:
        suite = cls()
        suite.kind = kind
        suite.begin(path)
        try:
            given = () if test in WITHOUT_BACKEND else (suite.opened(suite.open()),)
            getattr(suite, test)(*given, *arguments)
        finally:
            try:
                suite.end()
            except ClosedError:  # the fault of one of the mutants
                pass


@pytest.mark.parametrize(("kind", "test", "arguments"), MUTANTS, ids=lambda value: getattr(value, "__name__", None))
def test_the_suite_finds(kind: type[DictBackend], test: str, arguments: tuple[Any, ...], tmp_path: Path) -> None:
    with pytest.raises((Exception, pytest.fail.Exception)):  # a skip is neither
        Suite.run_one(kind, test, arguments, tmp_path)


class PatientSuite(Suite):
    """For backends without a fault: a busy machine is none."""

    fork_limit_s = 20.0


@pytest.mark.parametrize("kind", [DictBackend, Leases, Capped], ids=lambda kind: kind.__name__)
def test_the_same_tests_pass_without_a_fault(kind: type[DictBackend], tmp_path: Path) -> None:
    for test, arguments in sorted({(test, arguments) for _, test, arguments in MUTANTS}, key=str):
        try:
            PatientSuite.run_one(kind, test, arguments, tmp_path)
        except pytest.skip.Exception:
            continue


def test_a_close_that_hangs_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvstore.testing import suite_life

    threads = suite_life.run_threads
    monkeypatch.setattr(suite_life, "run_threads", lambda works, **_: threads(works, limit_s=0.2))
    try:
        with pytest.raises(AssertionError, match="still busy"):
            Suite.run_one(HangsInClose, "test_close_returns_while_work_is_under_way", (), tmp_path)
    finally:
        HangsInClose.let_go.set()
