"""Memory of a GPU as the source or destination of a body: what has `__cuda_array_interface__` (CUDA array interface,
version 3, numba.readthedocs.io/en/stable/cuda/cuda_array_interface.html).

Such a view must be one-dimensional, contiguous, and of bytes. UCX moves it without a copy in host memory where it can
(cuda_ipc, GPUDirect RDMA), through its own staging (cuda_copy) where it cannot. UCX is not ordered with CUDA streams,
so the stream that the interface names is waited for first. Written by the specification, and tested with a stand-in: no
machine with a GPU was at hand.
"""

from __future__ import annotations

import importlib
from typing import Any

from .errors import TransportUnavailable

__all__ = ["DeviceView", "copy_to_device", "is_device", "wait_for_stream"]


def is_device(view: object) -> bool:
    """Whether `view` is memory of a device."""
    return not isinstance(view, memoryview) and hasattr(view, "__cuda_array_interface__")


class DeviceView:
    """A slice of device memory that any library understands.

    Args:
        source: what the memory belongs to, kept alive; has `__cuda_array_interface__`.

    Attributes:
        pointer: its address on the device.
        stream: what to wait for before it is used; None: nothing.

    Raises:
        ValueError: not one-dimensional, contiguous and of bytes.
    """

    ndim = 1
    itemsize = 1

    def __init__(self, source: Any, offset: int = 0, nbytes: int | None = None) -> None:
        interface = source.__cuda_array_interface__
        shape, strides = tuple(interface["shape"]), interface.get("strides")
        if len(shape) != 1 or interface["typestr"][1:] not in ("u1", "i1", "b1") or strides not in (None, (1,)):
            raise ValueError("device memory must be a contiguous one-dimensional array of bytes")
        pointer, read_only = interface["data"]
        self._source = source
        self._nbytes = shape[0] - offset if nbytes is None else nbytes
        self.stream: int | None = interface.get("stream")
        self.pointer: int = pointer + offset
        self.__cuda_array_interface__: dict[str, object] = {
            "shape": (self._nbytes,),
            "typestr": "|u1",
            "data": (pointer + offset, read_only),
            "strides": None,
            "version": 3,
            "stream": None,
        }

    def __len__(self) -> int:
        return self._nbytes

    def __getitem__(self, part: slice) -> DeviceView:
        start, stop, step = part.indices(self._nbytes)
        if step != 1:
            raise ValueError("device memory is sliced without a step")
        view = DeviceView(self, start, max(0, stop - start))
        view.stream = self.stream
        return view


def wait_for_stream(view: DeviceView) -> None:
    """Return when the work that the interface's stream holds is done. None: there is nothing to wait for.

    Raises:
        TransportUnavailable: the interface names a stream, and `cuda.bindings` is not installed.
    """
    if view.stream is not None:
        _check(_driver().cuStreamSynchronize(view.stream))


def copy_to_device(view: DeviceView, host: memoryview) -> None:
    """Copy a small body that came over the control connection into device memory. Blocks.

    Raises:
        TransportUnavailable: `cuda.bindings` is not installed.
    """
    import numpy as np

    source = np.frombuffer(host, dtype=np.uint8)
    _check(_driver().cuMemcpyHtoD(view.pointer, source.ctypes.data, len(view)))


def _driver() -> Any:
    try:
        driver = importlib.import_module("cuda.bindings.driver")
    except ImportError as error:
        raise TransportUnavailable(
            f"device memory needs CUDA's Python bindings: pip install cuda-bindings ({error})"
        ) from error
    return driver


def _check(result: tuple[Any, ...]) -> None:
    """CUDA driver functions return (code, …); 0 is CUDA_SUCCESS."""
    if int(result[0]):
        raise TransportUnavailable(f"CUDA failed: {result[0]!r}")
