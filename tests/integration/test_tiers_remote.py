"""Memory and a disk above what is really far away: S3, and a node."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import pytest

import kvstore
from tests.node_support import servers
from tests.s3_support import ACCESS_KEY, BUCKET, SECRET_KEY, moto_server, unique_prefix

RECORDS = {f"record {number}": bytes([number]) * (40_000 + number) for number in range(12)}


def check(last: str, folder: Path, **options: Any) -> None:
    """Records go through to the last tier; a second process, without the first one's memory and disk, finds them, and
    has them near afterwards."""

    def tiers(name: str) -> list[Any]:
        return [
            {"url": "memory://?bytes=256KiB", "promote": "second_use"},
            {"url": f"file://{folder}/{name}?bytes=4MiB&name=disk"},
            last,
        ]

    common = {"buffer_pool_bytes": "8MiB", **options}
    with kvstore.open_store(tiers=tiers("first"), **common) as store:
        assert all(outcome.ok for outcome in store.put_many(RECORDS))
        assert store.hit_prefix(list(RECORDS)) == len(RECORDS)
        assert store.get_many(list(RECORDS)) == list(RECORDS.values())
        assert store.tiers is not None
        assert store.tiers.wait_quiet(30)
        assert store.tiers.usage()["memory://"] <= 256 << 10
        assert store.stats()["tiers"][0]["released"] > 0, "memory was too small, and all of it lay below already"
    with kvstore.open_store(tiers=tiers("second"), **common) as store:
        assert store.tiers is not None
        names = list(RECORDS)
        assert store.get_many(names) == list(RECORDS.values())
        assert store.tiers.wait_quiet(30)
        counts = store.stats()["tiers"]
        assert counts[2]["hits"] > 0
        assert counts[1]["promotions"] == len(RECORDS)
        assert store.get_many(names) == list(RECORDS.values())
        assert store.stats()["tiers"][2]["hits"] == counts[2]["hits"], "nothing is fetched from afar twice"
        assert all(outcome.ok for outcome in store.delete_many(names[:3]))
        assert store.hit_prefix(names[:1]) == 0
        assert store.hit_prefix(names[3:]) == len(names) - 3
    with kvstore.open_store(last, **common) as store:
        assert store.get_many(names) == [None] * 3 + list(RECORDS.values())[3:]


@pytest.mark.leaves("boto3 and moto keep connections and threads of their own")
def test_s3_is_the_last_tier(tmp_path: Path) -> None:
    with moto_server() as endpoint:
        url = f"s3://{BUCKET}/{unique_prefix()}?endpoint_url={endpoint}&region=us-east-1&addressing=path"
        secrets = {"s3": {"access_key_id": ACCESS_KEY, "secret_access_key": SECRET_KEY}}
        check(url, tmp_path, backend_options=secrets)


def test_a_node_is_the_last_tier(tmp_path: Path) -> None:
    with servers(1) as (node,), contextlib.ExitStack():
        check(f"node://{node.address}?transport=tcp", tmp_path)


def test_a_node_that_dies_leaves_what_is_near(tmp_path: Path) -> None:
    """The tier fails; what memory and disk have is served, and a new record is kept by the disk."""
    tiers: list[Any] = ["memory://?bytes=1MiB", f"file://{tmp_path}/kv?bytes=4MiB"]
    with servers(1) as (node,):
        tiers.append(f"node://{node.address}?transport=tcp")
        with kvstore.open_store(tiers=tiers, buffer_pool_bytes="8MiB", put_timeout="4s", lookup_timeout="2s") as store:
            assert all(outcome.ok for outcome in store.put_many(RECORDS))
            node.close()
            assert store.get_many(list(RECORDS)) == list(RECORDS.values())
            assert store.put_many({"new": b"bytes"})[0].ok
            assert store.get_many(["new"]) == [b"bytes"]
            store.close(timeout=0.2)
    assert os.listdir(tmp_path / "kv")
