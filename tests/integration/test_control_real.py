"""The control API over real nodes (`NodeServer`, `NodeInstance`), with records that a store put there."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

import kvstore
from kvstore.control import Client, ControlSettings
from kvstore.control.app import build_app
from kvstore.control.server import HttpServer, listen
from kvstore.errors import ConfigError
from kvstore.metrics import Metrics
from kvstore_backends.node_control import NodeInstance
from kvstore_backends.node_server import NodeServer
from tests.control_support import controller, eventually, keys_of, reporting


def test_records_are_found_pinned_moved_encoded_and_cleared(tmp_path: Path) -> None:
    keys = keys_of(1, 6)
    values = {key: bytes([number]) * 30_000 for number, key in enumerate(keys)}
    with contextlib.ExitStack() as stack:
        _, url = stack.enter_context(controller())
        nodes = []
        for name in ("n0", "n1"):
            node = stack.enter_context(NodeServer(memory_bytes=64 << 20, disk=f"file://{tmp_path}/{name}?bytes=100MiB"))
            settings = ControlSettings()
            listener = listen(settings)
            http = f"http://127.0.0.1:{listener.getsockname()[1]}"
            instance = NodeInstance(node, name=name, http=http)
            stack.callback(instance.close)
            app = build_app(instance, settings=settings, metrics=Metrics())
            stack.enter_context(HttpServer(app, settings, listener=listener))
            stack.enter_context(reporting(instance, url))
            nodes.append(node)
        client = stack.enter_context(Client(url, timeout=30))
        store = stack.enter_context(kvstore.open_store(f"node://{nodes[0].address}"))
        other = stack.enter_context(kvstore.open_store(f"node://{nodes[1].address}"))
        assert all(outcome.ok for outcome in store.put_many(values))
        assert nodes[0].settle(30)

        def hits() -> dict[str, dict[str, int]]:
            return {place.instance: dict(place.tiers) for place in client.lookup(keys=keys, chunk_size=8).places}

        eventually(lambda: hits() == {"n0": {"memory": 48}})

        # What is pinned does not move, and the event says so; the rest is on disk only, and reads as before.
        assert client.pin(keys=keys[:2]).instances == {"n0": 2}
        moved = client.wait(client.move(keys=keys, src="memory", dst="disk"))
        assert (moved.ok, moved.jobs["n0"].failed) == (False, 2)
        assert "pinned" in moved.jobs["n0"].error
        eventually(lambda: hits() == {"n0": {"memory": 16, "disk": 32}})
        assert client.unpin(keys=keys).count == 2
        assert store.get_many(keys) == [*values.values()]

        # Encoded anew, in place: smaller, and the same to a reader; lossy codecs are refused.
        found = client.wait(client.compress("lz4", keys=keys))
        assert found.ok
        assert found.jobs["n0"].nbytes > 100_000
        assert store.get_many(keys) == [*values.values()]
        assert client.wait(client.decompress(keys=keys)).ok
        assert store.get_many(keys) == [*values.values()]
        (failure,) = client.compress("cachegen", keys=keys).failures
        assert "cachegen" in failure.error

        # To the other node, and back out of everything.
        assert client.wait(client.move(keys=keys[:3], src="memory", dst="n1", to_instance=True)).ok
        eventually(lambda: hits().get("n1") == {"memory": 24})
        assert other.get_many(keys[:3]) == [*values.values()][:3]
        assert client.wait(client.clear(model="of nobody")).jobs["n0"].done == 0
        assert client.wait(client.clear(keys=keys[:1], instances=["n1"])).jobs["n1"].done == 1
        eventually(lambda: "n1" not in hits())
        assert other.get_many(keys[:3]) == [None, *[*values.values()][1:3]]
        assert client.wait(client.clear(everything=True)).ok
        eventually(lambda: [worker.chunks for worker in client.workers()] == [0, 0])
        assert store.get_many(keys) == [None] * 6
        with pytest.raises(ConfigError, match="nowhere"):
            client.move(keys=keys, src="memory", dst="nowhere", to_instance=True)
