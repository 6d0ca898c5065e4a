"""Bodies in device memory, with a stand-in: host memory that calls itself a device's."""

from __future__ import annotations

import ctypes
import importlib
from typing import Any

import pytest

from kvstore_transport import _ucx_device
from kvstore_transport.errors import TransportUnavailable
from tests.unit.ucx_support import (
    MIB,
    RANDOM,
    Ends,
    contexts,
    ends,
    no_lane_left_behind,
    room,
    slices,
)

__all__ = ["contexts", "ends", "no_lane_left_behind"]  # fixtures


class FakeArray:
    """As a CuPy array or a torch tensor on a device: no buffer protocol."""

    ndim = 1
    itemsize = 1

    def __init__(self, memory: bytearray, stream: int | None = None) -> None:
        self.memory = memory
        self._pin = (ctypes.c_char * len(memory)).from_buffer(memory)
        self.__cuda_array_interface__ = {
            "shape": (len(memory),),
            "typestr": "|u1",
            "data": (ctypes.addressof(self._pin), False),
            "version": 3,
            "stream": stream,
        }

    def __len__(self) -> int:
        return len(self.memory)


class FakeDriver:
    """The two functions of `cuda.bindings.driver` that are used."""

    def __init__(self) -> None:
        self.waited: list[int] = []
        self.code = 0

    def cuStreamSynchronize(self, stream: int) -> tuple[int]:
        self.waited.append(stream)
        return (self.code,)

    def cuMemcpyHtoD(self, to: int, of: int, nbytes: int) -> tuple[int]:
        ctypes.memmove(to, of, nbytes)
        return (0,)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    fake = FakeDriver()
    monkeypatch.setattr(_ucx_device, "_driver", lambda: fake)
    return fake


@pytest.mark.parametrize("nbytes", [1000, 20 * MIB])
def test_device_memory_goes_straight_through(ends: Ends, driver: FakeDriver, nbytes: int) -> None:
    source, into = FakeArray(bytearray(RANDOM[:nbytes]), stream=7), FakeArray(bytearray(nbytes), stream=9)
    ends.move([source], [into])
    assert into.memory == RANDOM[:nbytes]
    assert {7, 9} == set(driver.waited), "streams were waited for"


def test_device_and_host_memory_mix(ends: Ends, driver: FakeDriver) -> None:
    memory, places = room(MIB, 1000)
    device = FakeArray(bytearray(MIB))
    small = FakeArray(bytearray(RANDOM[2 * MIB : 2 * MIB + 10]))
    tail = bytearray(10)
    ends.move([*slices(MIB, 1000), *slices(MIB, MIB, at=MIB), small], [*places, device, memoryview(tail)])
    assert memory == RANDOM[:MIB]
    assert device.memory == RANDOM[MIB : 2 * MIB]
    assert tail == RANDOM[2 * MIB : 2 * MIB + 10]


def test_a_small_body_is_copied_to_the_device(ends: Ends, driver: FakeDriver) -> None:
    device, tail = FakeArray(bytearray(100), stream=3), bytearray(20)
    ends.move(slices(120, 50), [device, memoryview(tail)])
    assert device.memory + tail == RANDOM[:120]
    assert driver.waited == [3]


@pytest.mark.parametrize("change", [{"shape": (5, 2)}, {"typestr": "<f4"}, {"strides": (2,)}, {"shape": ()}], ids=str)
def test_device_memory_of_another_shape_is_refused(change: dict[str, Any]) -> None:
    array = FakeArray(bytearray(10))
    array.__cuda_array_interface__.update(change)
    with pytest.raises(ValueError, match="one-dimensional array of bytes"):
        _ucx_device.DeviceView(array)


def test_device_memory_without_cuda_bindings_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(TransportUnavailable, match="pip install cuda-bindings"):
        _ucx_device.wait_for_stream(_ucx_device.DeviceView(FakeArray(bytearray(1), stream=1)))


def test_an_error_of_cuda_is_told(driver: FakeDriver) -> None:
    driver.code = 700
    with pytest.raises(TransportUnavailable, match="700"):
        _ucx_device.wait_for_stream(_ucx_device.DeviceView(FakeArray(bytearray(1), stream=1)))
