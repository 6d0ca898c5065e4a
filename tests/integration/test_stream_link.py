"""Streaming real bytes over a throttled link: the link decides what comes, and what comes is right."""

from __future__ import annotations

import time

import pytest

from kvstore.layout import KVLayout
from kvstore.record import kv_spec
from kvstore.store import Item
from kvstore.stream import Chunk, LinkShare, Policy, PrefillModel, Streamer, TextPart
from kvstore_bench.layers_link import LinkBackend, TokenBucket
from tests.faults.support import chain, payload, store_over
from tests.unit.level_codec import level_codec, masked

SPEC = kv_spec(KVLayout(num_layers=6, num_kv_heads=2, head_dim=32), "bfloat16", 64)
COUNT = 12
PREFILL = PrefillModel(2e-3)  # 1.5 s for all


def holds(view: memoryview, whole: bytes, level: int) -> bool:
    """Each layer is there at this level, or finer: a refinement may have been given up in the middle."""
    layers = zip(*(SPEC.split(memoryview(masked(whole, each))) for each in range(level, 3)), strict=True)
    return all(layer in known for layer, known in zip(SPEC.split(view), layers, strict=True))


@pytest.mark.parametrize("drop", [False, True])
def test_a_slow_link_brings_coarse_levels_and_a_dead_one_text(drop: bool) -> None:
    keys = chain(COUNT)
    truth = {key: payload(key, SPEC.raw_bytes) for key in keys}
    link = LinkBackend(latency_s=1e-3)
    with level_codec(), store_over(link, remote_serde="kvt", codec_profile="unused", buffer_pool_bytes=16 << 20) as s:
        items = [Item(key, SPEC.split(memoryview(truth[key])), SPEC, {}) for key in keys]
        assert all(outcome.ok for outcome in s.submit_put(items).result())
        stored = sum(map(len, link.records.values()))
        streamer = Streamer(s, link=LinkShare(latency_s=1e-3), prefill=PREFILL, group_chunks=2)
        computed: list[int] = []

        def compute(part: TextPart) -> None:
            time.sleep(PREFILL.seconds(part.begin, part.end - part.begin))
            computed.append(part.group)

        with streamer.stream([Chunk(key, SPEC) for key in keys], timeout=60) as stream:  # it learns the sizes
            stream.close()
        # All levels would take twice the SLO; a third of the time in, the link nearly dies.
        slo = 2.0
        link.bucket = TokenBucket(stored / (2 * slo), then=[(slo / 3, 3e4)] if drop else (), buffer=64 << 10)
        link.bucket.start()
        carried = link.carried
        policy = Policy(text="time" if drop else "never")
        with streamer.stream(
            [Chunk(key, SPEC) for key in keys], recompute=compute, slo_s=slo, timeout=60, policy=policy
        ) as stream:
            for group in stream:
                if group.level is not None:
                    for number, view in zip(group.chunks, group.views, strict=True):
                        assert holds(view, truth[keys[number]], group.level)
            assert stream.missing == []
            report = stream.report
        assert link.carried - carried < stored * 0.9
        assert min(report.levels) < 2
        assert bool(computed) == drop
        assert sorted(computed) == sorted(n for n, level in enumerate(report.levels) if level == -2)
