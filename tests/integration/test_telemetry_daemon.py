"""A daemon, a store that uses it, and the publisher: what one does is what the other tells."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvstore.store import open_store
from kvstore_cli.cloudwatch_publish import Publisher
from kvstore_cli.cloudwatch_scrape import Endpoint


@pytest.fixture
def daemon() -> Iterator[dict[str, Any]]:
    """The line that `kvstore serve --json` prints."""
    command = [sys.executable, "-m", "kvstore_cli", "serve", "--listen", "127.0.0.1:0", "--http", "127.0.0.1:0",
               "--memory", "16MiB", "--prefill-per-record", "250ms", "--json"]  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield json.loads(process.stdout.readline())
            process.terminate()
            assert process.wait(60) == 0
        finally:
            process.kill()


def test_what_is_done_is_published(daemon: dict[str, Any]) -> None:
    names = [f"n{number}" for number in range(10)]
    options: dict[str, Any] = {"metrics_listen": "127.0.0.1:0", "buffer_pool_bytes": "4MiB"}
    with open_store(f"node://{daemon['address']}", **options) as store:
        endpoint = store._machinery.endpoint
        assert endpoint is not None
        places = [Endpoint(daemon["http"]), Endpoint(f"http://{endpoint.address}/metrics")]
        alone, both = Publisher([Endpoint(daemon["http"])], None, gpu="off"), Publisher(places, None, gpu="off")
        assert alone.step() == both.step() == [], "nothing is known of what was before"
        store.put_many({name: bytes(1000) for name in names[:8]})
        assert store.hit_prefix(names) == 8
        got = store.get_many(names[:8], into=[bytearray(1000) for _ in range(8)])
        assert got == [1000] * 8
        told = {(datum.namespace, datum.name): datum.values[0] for datum in both.step()}
        from_node = {(datum.namespace, datum.name): datum.values[0] for datum in alone.step()}
    assert both.answering == 2
    # 8 of 10, whoever is asked: nothing that the store had from the node counts twice.
    assert from_node["CachedAttention/Tiers", "CPUCacheHitRate"] == 80.0
    assert told["CachedAttention/Tiers", "CPUCacheHitRate"] == 80.0
    assert told["LMCache", "CacheHitRate"] == told["CachedAttention/Tiers", "CPUCacheHitRate"]
    assert told["LMCache", "TokensSaved"] == 0, "opaque records have no tokens"
    with urllib.request.urlopen(f"{daemon['http']}/metrics", timeout=20) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        families = {family.name: family for family in text_string_to_metric_families(answer.read().decode())}
    puts = [each.value for each in families["kvstore_node_records"].samples if each.labels["event"] == "puts"]
    assert puts == [8]
    assert families["kvstore_node_tier_records"].samples[0].value == 8
    hits = sum(each.value for each in families["kvstore_node_tier_hits"].samples)
    assert families["kvstore_node_prefill_saved_seconds"].samples[0].value == hits / 4 >= 2.0
    with urllib.request.urlopen(f"{daemon['http']}/page/data", timeout=20) as answer:
        hour = json.load(answer)["hour"]
    assert sum(filter(None, hour["saved_s"])) == hits / 4, "what the page shows"
    (out,) = [each.value for each in families["kvstore_node_bytes"].samples if each.labels["way"] == "out"]
    assert sum(filter(None, hour["bytes"])) == out > 8000
