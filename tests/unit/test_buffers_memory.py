"""The memory under the buffer pool: mapped once, shared through its descriptor, watched by canaries, closed late."""

from __future__ import annotations

import errno
import os
import random
import subprocess
import sys
import time
import types
from typing import Any

import numpy as np
import pytest

from kvstore.buffers import CANARY, BufferPool, Slab
from kvstore.errors import ClosedError, ConfigError, PoolExhausted

PAGE = 4096


INODES: dict[int, set[str]] = {}


def mappings(pool: BufferPool) -> list[str]:
    """The lines of /proc/self/maps that belong to the pool's shared slabs. Ask before it is closed, too."""
    inodes = INODES.setdefault(id(pool), {str(os.fstat(slab.fd).st_ino) for slab in pool.slabs if slab.fd is not None})
    with open("/proc/self/maps", encoding="utf-8") as maps:
        return [line for line in maps if "/memfd:kvstore-slab" in line and line.split()[4] in inodes]


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


# --- canaries --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", [0, 1, PAGE - 1, PAGE, 2 * PAGE - 1])
def test_a_late_write_into_free_memory_is_found(where: int) -> None:
    with BufferPool(4 * PAGE, canary=True) as pool:
        buffer = pool.acquire(2 * PAGE - 100)
        slab, start = buffer.slab, buffer.offset
        buffer.release()
        slab.view[start + where] ^= 1  # somebody kept the address
        with pytest.raises(RuntimeError, match=f"written to: slab 0, offset {start}"):
            pool.acquire(2 * PAGE)
        assert pool.stats()[1:] == (0, 0, 0, 0, 0)
        pool.acquire(4 * PAGE).release()  # found once, and clean again


def test_free_memory_is_canaries_and_the_environment_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSTORE_POOL_CANARY", "1")
    with BufferPool(PAGE) as pool:
        for _ in range(2):
            with pool.acquire(1000) as buffer:
                assert bytes(buffer.view) == bytes([CANARY]) * 1000
                buffer.view[:] = bytes(1000)
    monkeypatch.setenv("KVSTORE_POOL_CANARY", "0")
    with BufferPool(PAGE) as pool:
        pool.acquire(1).release()
        pool.slabs[0].view[0] = 1
        pool.acquire(1).release()


def test_quarantined_memory_is_no_canary_yet() -> None:
    with BufferPool(PAGE, canary=True) as pool:
        buffer = pool.acquire(PAGE).pin()
        buffer.view[:] = b"\x01" * PAGE
        slab = buffer.slab
        buffer.release()
        assert bytes(slab.view) == b"\x01" * PAGE
        buffer.unpin()
        assert bytes(slab.view) == bytes([CANARY]) * PAGE


# --- mapping ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("alignment", [1, 64, 4096, 1 << 16])
def test_alignment(alignment: int) -> None:
    with BufferPool(10 * max(alignment, 100), alignment=alignment) as pool:
        buffers = [pool.acquire(n) for n in (1, 33, 100)]
        address = np.frombuffer(pool.slabs[0].view, dtype=np.uint8).ctypes.data
        assert address % PAGE == 0
        assert all(buffer.offset % alignment == 0 for buffer in buffers)
        assert pool.stats().in_use == sum(-(-n // alignment) * alignment for n in (1, 33, 100))
        for buffer in buffers:
            buffer.release()


def test_sizes_are_rounded_to_the_alignment_and_cut_into_slabs() -> None:
    with BufferPool(PAGE * 5 + 1, slab_bytes=PAGE + 1) as pool:
        assert pool.nbytes == 6 * PAGE
        assert [slab.nbytes for slab in pool.slabs] == [2 * PAGE] * 3
    with BufferPool(5 * PAGE, slab_bytes=2 * PAGE) as pool:
        assert [slab.nbytes for slab in pool.slabs] == [2 * PAGE, 2 * PAGE, PAGE]
    with BufferPool(PAGE, slab_bytes=100 * PAGE) as pool:
        assert pool.largest == PAGE
    wrong: list[dict[str, Any]] = [{"nbytes": 0}, {"nbytes": -1}, {"nbytes": 1, "slab_bytes": 0},
                                   {"nbytes": 1, "alignment": 3000}, {"nbytes": 1, "alignment": 0}]  # fmt: skip
    for bad in wrong:
        with pytest.raises(ConfigError):
            BufferPool(**bad)


def test_memory_is_mapped_once() -> None:
    INODES.clear()
    with BufferPool(64 * PAGE, slab_bytes=32 * PAGE, shared=True, canary=False) as pool:
        before = mappings(pool)
        assert len(before) == 2
        opened = descriptors()
        address = np.frombuffer(pool.slabs[0].view, dtype=np.uint8).ctypes.data
        for _ in range(20):
            buffers = pool.acquire_many([8 * PAGE] * 8)
            first = [b.view for b in buffers if b.slab is pool.slabs[0]]
            starts = sorted(np.frombuffer(view, dtype=np.uint8).ctypes.data for view in first)
            assert starts == [address + i * 8 * PAGE for i in range(4)]  # the very memory of the slab
            for buffer in buffers:
                buffer.release()
        assert mappings(pool) == before
        assert descriptors() == opened


def test_shared_memory_is_read_through_its_descriptor_in_another_process_and_not_written() -> None:
    child = (
        "import mmap, os, sys; fd, size, at = map(int, sys.argv[1:])\n"
        "m = mmap.mmap(fd, size, prot=mmap.PROT_READ); assert m[at:at + 5] == b'hello', m[at:at + 5]\n"
        "def refused(what):\n"
        "    try: what()\n"
        "    except PermissionError: return True\n"
        "attacks = [lambda: mmap.mmap(fd, size), lambda: os.pwrite(fd, b'x', at), lambda: os.ftruncate(fd, 4096),\n"
        "           lambda: os.ftruncate(fd, 2 * size), lambda: os.posix_fallocate(fd, 0, 2 * size)]\n"
        "print(m[0:1].hex(), *map(refused, attacks))"
    )
    with BufferPool(4 * PAGE, shared=True, canary=True) as pool, pool.acquire(2 * PAGE), pool.acquire(PAGE) as buffer:
        buffer.view[:5] = b"hello"
        fd = buffer.slab.fd
        assert fd is not None
        assert buffer.slab.unshared == ""
        assert os.fstat(fd).st_size == 4 * PAGE
        assert not os.get_inheritable(fd)
        arguments = [str(fd), str(4 * PAGE), str(buffer.offset)]
        done = subprocess.run(
            [sys.executable, "-c", child, *arguments], pass_fds=[fd], capture_output=True, text=True, check=True
        )
        assert done.stdout.split() == [f"{CANARY:02x}", *["True"] * 5]
        buffer.view[:5] = b"again"  # we still can
        assert bytes(buffer.view[:5]) == b"again"
    with BufferPool(PAGE) as private:
        assert private.slabs[0].fd is None
        assert private.slabs[0].unshared == ""


@pytest.mark.parametrize("lacking", ["memfd", "seals"])
def test_a_system_without_seals_has_private_memory_and_says_so(monkeypatch: pytest.MonkeyPatch, lacking: str) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.EINVAL, "no such thing here")

    monkeypatch.setattr(*(("os.memfd_create", refuse) if lacking == "memfd" else ("fcntl.fcntl", refuse)))
    before = descriptors()
    with BufferPool(4 * PAGE, shared=True) as pool:
        slab = pool.slabs[0]
        assert slab.fd is None
        assert "no such thing here" in slab.unshared
        with pool.acquire(PAGE) as buffer:
            buffer.view[:] = bytes(PAGE)
        assert descriptors() == before
    assert descriptors() == before


@pytest.mark.parametrize("shared", [False, True])
def test_more_memory_than_there_can_be_is_a_config_error(shared: bool) -> None:
    before = descriptors()
    for nbytes in (1 << 50, 1 << 62, 1 << 70):
        with pytest.raises(ConfigError, match=f"cannot map a slab of {nbytes} bytes"):
            BufferPool(nbytes, shared=shared, canary=False)
    assert descriptors() == before


def test_a_kernel_without_huge_pages_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    import mmap

    advice: list[int] = []

    class Refusing(mmap.mmap):
        def madvise(self, option: int, *_: int) -> None:
            advice.append(option)
            raise OSError(errno.EINVAL, "no huge pages")

    monkeypatch.setattr("kvstore.buffers.mmap.mmap", Refusing)
    with BufferPool(PAGE) as pool, pool.acquire(PAGE) as buffer:
        buffer.view[0] = 1
    assert advice == [mmap.MADV_HUGEPAGE]


class FakeCuda:
    """Stands in for torch with a device: records what is page-locked."""

    def __init__(self, answer: int) -> None:
        self.answer, self.locked, self.calls = answer, {}, 0  # type: ignore[var-annotated]

    def is_available(self) -> bool:
        return True

    def cudart(self) -> FakeCuda:
        return self

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        self.calls += 1
        assert flags == 0
        if self.answer == 0:
            self.locked[address] = nbytes
        return self.answer

    def cudaHostUnregister(self, address: int) -> int:
        del self.locked[address]
        return 0


@pytest.mark.parametrize(("page_lock", "answer", "locked"), [(None, 0, 2), (True, 0, 2), (False, 0, 0), (None, 2, 0)])
def test_slabs_are_page_locked_when_cuda_is_there(
    monkeypatch: pytest.MonkeyPatch, page_lock: bool | None, answer: int, locked: int
) -> None:
    cuda = FakeCuda(answer)
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(cuda=cuda))
    pool = BufferPool(4 * PAGE, slab_bytes=2 * PAGE, page_lock=page_lock)
    assert list(cuda.locked.values()) == [2 * PAGE] * locked
    assert [slab.page_locked for slab in pool.slabs] == [bool(locked)] * 2
    with pool.acquire(PAGE):
        pool.close()
        assert len(cuda.locked) == locked  # still in use
    assert cuda.locked == {}


def test_the_pool_does_not_import_torch() -> None:
    code = "import sys; from kvstore.buffers import BufferPool; BufferPool(4096).close(); print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


# --- closing ---------------------------------------------------------------------------------------------------------


def test_close_with_buffers_out() -> None:
    """They stay valid, and the memory goes with the last of them."""
    INODES.clear()
    pool = BufferPool(4 * PAGE, shared=True)
    assert len(mappings(pool)) == 1
    first, second = pool.acquire(PAGE), pool.acquire(PAGE)
    child = second.readonly()
    pool.close()
    pool.close()
    first.view[:] = b"\x01" * PAGE
    second.view[:] = b"\x02" * PAGE
    with first.retain():
        pass
    for nbytes in (1, 4 * PAGE):
        with pytest.raises(ClosedError):
            pool.acquire(nbytes)
    first.release()
    second.pin()
    second.release()
    child.release()
    assert len(mappings(pool)) == 1  # late I/O may still come
    second.unpin()
    assert mappings(pool) == []
    assert pool.stats()[1:] == (0, 0, 0, 0, 0)
    assert pool.slabs[0].fd is None


def test_close_unmaps_at_once_when_nothing_is_out() -> None:
    before = descriptors()
    for _ in range(30):
        INODES.clear()
        with BufferPool(4 * PAGE, slab_bytes=PAGE, shared=True) as pool:
            assert mappings(pool)
            for _ in range(3):
                with pool.acquire(100) as buffer:
                    buffer.view[0] = 1
            with pytest.raises(PoolExhausted):
                pool.acquire(5 * PAGE)
        assert mappings(pool) == []
    assert descriptors() == before


def test_closing_wakes_those_who_wait() -> None:
    from threading import Event, Thread

    pool = BufferPool(PAGE)
    buffer = pool.acquire(1)
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            pool.acquire(1, timeout=None)
        except ClosedError as error:
            errors.append(error)

    threads = [Thread(target=wait, daemon=True) for _ in range(3)]
    for thread in threads:
        thread.start()
    pause = Event()
    for _ in range(10_000):
        if pool.stats().waiting == 3:
            break
        pause.wait(0.001)
    pool.close()
    for thread in threads:
        thread.join(10)
    assert len(errors) == 3
    assert pool.stats().waiting == 0
    buffer.release()


def test_a_slab_of_its_own() -> None:
    slab = Slab(2 * PAGE, shared=True)
    slab.view[:] = bytes(range(256)) * 32
    array = np.frombuffer(slab.view, dtype=np.uint8)  # as a transport that registered it
    slab.close()
    slab.close()
    assert int(array[255]) == 255
    assert slab.fd is None


# --- fragmentation ---------------------------------------------------------------------------------------------------


def test_a_hundred_thousand_random_leases(record_property: Any) -> None:
    """Free runs are joined again, and the time per operation does not grow with what happened before."""
    rng = random.Random(5)
    with BufferPool(4096 * PAGE, canary=False) as pool:
        held: list[Any] = []
        laps: list[float] = []
        for _ in range(10):
            begin = time.perf_counter()
            for _ in range(10_000):
                if held and (len(held) > 600 or rng.random() < 0.4):
                    index = rng.randrange(len(held))
                    held[index], held[-1] = held[-1], held[index]
                    held.pop().release()
                else:
                    try:
                        held.append(pool.acquire(rng.randint(1, 12 * PAGE)))
                    except PoolExhausted:
                        held.pop().release()
            laps.append((time.perf_counter() - begin) / 10_000 * 1e6)
        record_property("us_per_operation", sorted(laps)[5])
        assert pool.stats().in_use > pool.nbytes // 2
        for buffer in held:
            buffer.release()
        assert pool._free[0].by_size == [(pool.nbytes, 0)]
        pool.acquire(pool.nbytes).release()
        print(f"{sorted(laps)[5]:.2f} µs per acquire or release (median of {[round(lap, 1) for lap in laps]})")
