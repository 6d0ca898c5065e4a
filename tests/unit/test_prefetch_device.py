"""Layers onto a device: here a CPU, with every line but the calls of CUDA streams."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

from kvstore.buffers import Slab
from kvstore.errors import ClosedError, ConfigError
from kvstore.prefetch import Chunk, LayerPlan
from tests.faults.store_support import until
from tests.faults.support import chain, soon, store_over
from tests.unit.prefetch_support import CHUNKS, LAYERS, SEGMENT, SPEC, expected, fill, filled, gone, plan, single

torch = pytest.importorskip("torch")

from kvstore.prefetch import device as module  # noqa: E402
from kvstore.prefetch.device import DeviceStage  # noqa: E402

pytestmark = pytest.mark.leaves("torch keeps threads of its own")


def raw(tensor: Any) -> bytes:
    return bytes(tensor.numpy().tobytes())


@pytest.mark.parametrize("page_locked", [False, True])
@pytest.mark.parametrize("ring", [1, 3])
def test_layers_come_to_the_device(page_locked: bool, ring: int, monkeypatch: pytest.MonkeyPatch) -> None:
    backend, keys = filled()
    other = chain(2, start=10_000)
    fill(backend.inner, other)
    with store_over(backend) as store:
        if page_locked:
            monkeypatch.setattr(store.pool.slabs[0], "page_locked", True)
            monkeypatch.setattr("kvstore.buffers._cuda_host_unregister", lambda view: None)
        prefetcher = single(store)
        prefixes = [[Chunk(key, SPEC) for key in some] for some in (keys, other)]
        with prefetcher.start(LayerPlan(prefixes, soon())) as stream:
            size = DeviceStage.slot_bytes_for(stream)
            assert size == (CHUNKS + 2) * SEGMENT
            with DeviceStage("cpu", size, ring_slots=ring) as stage:
                before = None
                for number, layer in enumerate(stage.layers(stream)):
                    assert layer.layer == number
                    assert [raw(t) for t in layer.segments()] == [expected(key, number) for key in keys]
                    assert [raw(t) for t in layer.segments(1)] == [expected(key, number) for key in other]
                    if before is not None:
                        with pytest.raises(ClosedError):
                            before.segments()
                    before = layer
                assert number == LAYERS - 1
                assert stage.device_bytes == 2 * size  # two layers, whatever the model
                assert stage.ring_bytes == (0 if page_locked else ring * size)
            assert stage.device_bytes == stage.ring_bytes == 0
        until(lambda: gone(prefetcher))


def test_the_next_layer_is_copied_while_this_one_is_used() -> None:
    backend, keys = filled()
    with store_over(backend) as store:
        prefetcher = single(store)
        with prefetcher.start(plan(keys)) as stream:
            stage = DeviceStage("cpu", DeviceStage.slot_bytes_for(stream))
            until(lambda: all(map(stream.ready, range(LAYERS))))
            for layer in stage.layers(stream):
                if layer.layer + 1 < LAYERS:
                    following = stage._slots[(layer.layer + 1) % 2][:SEGMENT]
                    assert raw(following) == expected(keys[0], layer.layer + 1)
            stage.close()


def test_a_miss_and_an_early_end() -> None:
    backend, keys = filled()
    backend.inner.records.pop(keys[3])
    with store_over(backend) as store:
        prefetcher = single(store)
        with prefetcher.start(plan(keys)) as stream, DeviceStage("cpu", CHUNKS * SEGMENT) as stage:
            for layer in stage.layers(stream):
                assert [raw(t) for t in layer.segments()] == [expected(key, layer.layer) for key in keys[:3]]
                if layer.layer == 4:
                    break
            assert stream.hit_prefix == 3
        until(lambda: gone(prefetcher))
        with prefetcher.start(plan(keys[3:])) as stream, DeviceStage("cpu", CHUNKS * SEGMENT) as stage:
            assert all(layer.segments() == [] for layer in stage.layers(stream))


def test_page_locked_memory_is_kept_until_the_device_has_read_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a device whose copies end when the test says so."""
    backend, keys = filled()
    pending: list[Any] = []

    class Event:
        def __init__(self) -> None:
            self.happened = False
            pending.append(self)

        def query(self) -> bool:
            return self.happened

        def synchronize(self) -> None:
            self.happened = True

    class Queue(module._Queue):
        def mark(self) -> Any:
            return Event()

    monkeypatch.setattr(module, "_Queue", Queue)
    monkeypatch.setattr("kvstore.buffers._cuda_host_unregister", lambda view: None)
    with store_over(backend) as store:
        slab: Slab = store.pool.slabs[0]
        monkeypatch.setattr(slab, "page_locked", True)
        prefetcher = single(store)
        with prefetcher.start(plan(keys)) as stream, DeviceStage("cpu", CHUNKS * SEGMENT) as stage:
            until(lambda: all(map(stream.ready, range(LAYERS))))
            layers = stage.layers(stream)
            next(layers)
            next(layers)
            assert len(stage._fetching) == 3  # layers 0 and 1 and the one behind them
            stream.cancel()
            held = prefetcher.stats()["used_bytes"]
            assert held == 3 * CHUNKS * SEGMENT  # it goes on reading
            pending[0].happened = True
            stage._let_go(wait=False)
            assert prefetcher.stats()["used_bytes"] == held - CHUNKS * SEGMENT
            layers.close()
        assert all(event.happened for event in pending)
        until(lambda: gone(prefetcher))


def test_a_slot_that_is_too_small_is_named() -> None:
    backend, keys = filled()
    with store_over(backend) as store:
        prefetcher = single(store)
        with (
            prefetcher.start(plan(keys)) as stream,
            DeviceStage("cpu", SEGMENT) as stage,
            pytest.raises(ConfigError, match="layer 0 has 49152 bytes, a slot of the stage 8192"),
        ):
            next(iter(stage.layers(stream)))
        until(lambda: gone(prefetcher))
    for options in ({"slot_bytes": 0}, {"slot_bytes": 1, "ring_slots": 0}):
        with pytest.raises(ConfigError, match="at least 1"):
            DeviceStage("cpu", **options)


class _Stream:
    """As strict as `torch.cuda.Stream`: what it waits for is an event that a stream recorded."""

    def record_event(self) -> _Mark:
        return _Mark()

    def wait_event(self, event: Any) -> None:
        event.wait(self)


class _Mark:
    def wait(self, stream: _Stream) -> None:
        assert type(stream) is _Stream

    def synchronize(self) -> None:
        return

    def query(self) -> bool:
        return True


class _Cuda:
    caller = _Stream()

    @staticmethod
    def stream(stream: _Stream) -> contextlib.AbstractContextManager[None]:
        assert type(stream) is _Stream
        return contextlib.nullcontext()

    def current_stream(self, device: Any) -> _Stream:
        return self.caller


class _Queue(module._Queue):
    def __init__(self, device: Any) -> None:
        super().__init__(device)
        self._cuda, self._stream = _Cuda(), _Stream()


@pytest.mark.parametrize("page_locked", [False, True])
def test_a_device_waits_only_for_events_of_its_streams(page_locked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The calls of streams and events, which no test here can make, are at least given what they take."""
    monkeypatch.setattr(module, "_Queue", _Queue)
    backend, keys = filled()
    with store_over(backend) as store:
        if page_locked:
            monkeypatch.setattr(store.pool.slabs[0], "page_locked", True)
            monkeypatch.setattr("kvstore.buffers._cuda_host_unregister", lambda view: None)
        prefetcher = single(store)
        stage = DeviceStage("cpu", CHUNKS * SEGMENT)
        for _ in range(2):
            with prefetcher.start(plan(keys)) as stream:
                for layer in stage.layers(stream):
                    assert [raw(t) for t in layer.segments()] == [expected(key, layer.layer) for key in keys]
        stage.close()
        with prefetcher.start(plan(keys)) as stream, pytest.raises(ClosedError, match="stage is closed"):
            next(iter(stage.layers(stream)))
        until(lambda: gone(prefetcher))
