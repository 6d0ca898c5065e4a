"""The `file` backend past the page cache (faults.md 25): every alignment, every refusal."""

from __future__ import annotations

import errno
import mmap
from pathlib import Path

import pytest

from kvstore.backend import Outcome, Read, Status, Write
from tests.faults.file_support import (
    POISON,
    Opened,
    Script,
    file_of,
    key,
    payload,
    put,
    soon,
)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "kv"


def _aligned(nbytes: int) -> memoryview:
    return memoryview(mmap.mmap(-1, nbytes))


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("nbytes", [4096, 4097, 1 << 20, (1 << 20) + 1, 4095])
def test_direct_is_exact_for_every_alignment(root: Path, shift: int, nbytes: int) -> None:
    source, target = _aligned(2 << 20), _aligned(2 << 20)
    source[shift : shift + nbytes] = payload("d", nbytes)
    with Opened(root, direct="on") as opened:
        direct = opened._direct.enabled  # tmpfs, for one, has none
        assert opened.put([Write(key("d"), [source[shift : shift + nbytes]])], deadline=soon())[0].ok
        assert file_of(root, "d").read_bytes() == payload("d", nbytes)
        outcome = opened.get_into([Read(key("d"), target[shift : shift + nbytes])], deadline=soon())[0]
        assert outcome == Outcome(Status.OK, nbytes)
        assert target[shift : shift + nbytes] == payload("d", nbytes)
        assert target[shift + nbytes : shift + nbytes + 100] == bytes(100)
        if direct:
            assert (opened.counters.get("direct_ios", 0) > 0) == (nbytes >= 4096 and shift == 0)


def test_direct_gathers_a_header_and_segments(root: Path) -> None:
    """The shape of a record: an unaligned header of 4 KiB, aligned segments, an odd rest."""
    segments = _aligned(3 << 20)
    segments[:] = payload("s", 1 << 20) * 3
    header, rest = memoryview(payload("h", 4096)), memoryview(payload("rest", 77))
    with Opened(root, direct="auto") as opened:
        assert opened.put([Write(key("d"), [header, segments[: 1 << 20], segments[1 << 20 :], rest])], deadline=soon())[
            0
        ].ok
        assert file_of(root, "d").read_bytes() == bytes(header) + bytes(segments) + bytes(rest)
        back = _aligned(4 << 20)
        back[:] = bytes([POISON]) * len(back)
        outcome = opened.get_into([Read(key("d"), back)], deadline=soon())[0]
        assert outcome.nbytes == 4096 + (3 << 20) + 77
        assert back[4096 : 4096 + (3 << 20)] == segments
        assert set(back[outcome.nbytes :]) == {POISON}  # nothing is written behind the end of the record
        if opened._direct.enabled:
            assert opened.counters["direct_ios"] == 2


def test_a_file_system_without_direct_io(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    calls = Script()
    calls.fail("set_direct", errno.EINVAL, times=None)
    source = _aligned(1 << 20)
    with Opened(tmp_path / "kv", direct="on", calls=calls) as opened:
        for name in range(3):
            assert opened.put([Write(key(name), [source])], deadline=soon())[0].ok
        assert opened.counters["direct_refused"] == 1  # the probe found it out
    assert [record.levelname for record in caplog.records if "O_DIRECT" in record.message] == ["WARNING"]


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EOPNOTSUPP])
def test_a_direct_operation_that_is_refused_goes_buffered(
    root: Path, number: int, caplog: pytest.LogCaptureFixture
) -> None:
    calls = Script()
    block = memoryview(mmap.mmap(-1, 1 << 20))
    block[:] = payload(1, 1 << 20)
    with Opened(root, direct="on", calls=calls) as opened:
        if not opened._direct.enabled:
            pytest.skip("the file system of the temporary folder has no O_DIRECT")
        calls.fail("pwritev", number)
        calls.fail("preadv", number)
        assert opened.put([Write(key(1), [block])], deadline=soon())[0].ok
        assert file_of(root, 1).read_bytes() == block
        target = memoryview(mmap.mmap(-1, 1 << 20))
        assert opened.get_into([Read(key(1), target)], deadline=soon()) == [Outcome(Status.OK, 1 << 20)]
        assert target == block
        assert opened.counters["direct_refused"] == 2
        assert put(opened, 2)[0].ok
        assert opened.put([Write(key(3), [block])], deadline=soon())[0].ok
        assert opened.counters["direct_ios"] >= 1  # only that operation
    assert len([record for record in caplog.records if "O_DIRECT" in record.message]) == 1


def test_a_direct_transfer_that_stops_at_an_odd_byte(root: Path) -> None:
    """The rest goes buffered: direct I/O cannot go on from there."""
    calls = Script()
    block = memoryview(mmap.mmap(-1, 1 << 20))
    block[:] = payload(1, 1 << 20)
    with Opened(root, direct="on", calls=calls) as opened:
        calls.fail("pwritev", short=4096)
        calls.fail("pwritev", short=8192 + 512)
        calls.fail("preadv", short=8192)
        assert opened.put([Write(key(1), [block])], deadline=soon())[0].ok
        assert file_of(root, 1).read_bytes() == block
        target = memoryview(mmap.mmap(-1, 1 << 20))
        assert opened.get_into([Read(key(1), target)], deadline=soon()) == [Outcome(Status.OK, 1 << 20)]
        assert target == block
