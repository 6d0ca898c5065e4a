"""What a scheduler announces to a store reaches what can bring it nearer: tiers, and nodes."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

import kvstore
from kvstore.errors import ClosedError
from kvstore_backends.node_server import NodeServer


@pytest.mark.parametrize("tiered", [False, True])
def test_a_node_brings_up_what_a_store_announces(tmp_path: Path, tiered: bool) -> None:
    with NodeServer(memory_bytes=1 << 20, disk=f"file://{tmp_path}/kv") as node:
        url = f"node://{node.address}"
        places = {"tiers": ["memory://?bytes=4MiB", url]} if tiered else {"remote_url": url}
        with kvstore.open_store(**places) as store:
            names = [f"record {index}" for index in range(8)]
            assert all(outcome.ok for outcome in store.put_many({name: name.encode() * 100 for name in names}))
            assert node.settle(60)
            space = node.spaces[""]
            with space.store.lock:
                keys = [*space.store.records]
                for key in keys:
                    space.store.remove_locked(key)
            store.announce([keys])
            end = time.monotonic() + 30
            while space.ahead.counts()["prefetched"] < 8:
                assert time.monotonic() < end
                time.sleep(0.002)
            assert {*space.store.records} == {*keys}
        with pytest.raises(ClosedError):
            store.announce([])
