"""The saved queries of Logs Insights, on lines that the product wrote."""

from __future__ import annotations

import io
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from kvstore.layout import KVLayout
from kvstore.record import kv_spec
from kvstore.store import Item, Want, open_store
from kvstore.telemetry import RequestReport, configure_logs, report_request, request_scope
from kvstore.telemetry.logs import EVENTS
from kvstore_cli.cloudwatch import FIELDS, find_queries, prefixed
from tests.unit.insights import run

HOUR = 1_800_000_000 // 3600 * 3600
QUERIES = {name: path.read_text(encoding="utf-8") for name, path in find_queries().items()}
SPEC = kv_spec(KVLayout(2, 2, 16), "float16", 64)


class Log:
    """What `kvstore.events` wrote, at times that a test sets."""

    def __init__(self, stream: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
        self._stream = stream
        self._now = float(HOUR)
        real = logging.LogRecord.__init__

        def stamped(record: logging.LogRecord, *arguments: object, **more: object) -> None:
            real(record, *arguments, **more)  # type: ignore[arg-type]
            record.created = self._now

        monkeypatch.setattr(logging.LogRecord, "__init__", stamped)

    def at(self, seconds: float) -> None:
        """From here on lines are so many seconds after the beginning."""
        self._now = HOUR + seconds

    @property
    def lines(self) -> list[str]:
        return self._stream.getvalue().splitlines()


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Iterator[Log]:
    stream = io.StringIO()
    handler = configure_logs(stream=stream, logger=EVENTS.name)
    yield Log(stream, monkeypatch)
    EVENTS.removeHandler(handler)
    EVENTS.setLevel(logging.NOTSET)
    EVENTS.propagate = True


def use_a_store(codec: str, chunks: int, *, missing: int = 0) -> None:
    """Put `chunks` KV records and get them again, and some that are not there."""
    with open_store("memory://?bytes=16MiB", remote_serde=codec, buffer_pool_bytes="4MiB") as store:
        context = store.key_context(model="tiny", layout=KVLayout(2, 2, 16), dtype="float16")
        from kvstore.keys import chunk_keys

        keys = chunk_keys(list(range(64 * (chunks + missing))), context=context, chunk_size=64)
        rng = np.random.default_rng(0)
        raw = [memoryview(rng.standard_normal(SPEC.raw_bytes // 2).astype(np.float16)).cast("B") for _ in keys]
        items = [Item(key, SPEC.split(data), SPEC) for key, data in zip(keys[:chunks], raw, strict=False)]
        assert all(outcome.ok for outcome in store.submit_put(items).result())
        with request_scope("r-1", model="tiny"):
            wants = [Want(key, memoryview(bytearray(SPEC.raw_bytes)), SPEC) for key in keys]
            got = store.submit_get(wants).result()
        assert [outcome.ok for outcome in got] == [True] * chunks + [False] * missing


def test_hits_and_tokens_saved_per_hour(log: Log) -> None:
    use_a_store("raw", 3, missing=1)
    use_a_store("raw", 2)
    log.at(3700)
    use_a_store("raw", 1)
    use_a_store("raw", 0, missing=2)  # no hit, so no line
    rows = run(QUERIES["hits_and_tokens_saved"], log.lines)
    assert rows == [
        {"hour": HOUR + 3600, "hits": 1, "saved": 64},
        {"hour": HOUR, "hits": 2, "saved": 5 * 64},
    ]


def test_mean_compression_ratio_per_hour(log: Log) -> None:
    use_a_store("raw", 3)  # nothing is compressed: it does not count
    use_a_store("int8", 4)
    log.at(3600)
    use_a_store("int8", 2)
    use_a_store("fp8", 2)
    rows = run(QUERIES["compression_per_hour"], log.lines)
    assert [row["hour"] for row in rows] == [HOUR + 3600, HOUR]
    for row, chunks in zip(rows, (4, 4), strict=True):
        assert row["raw_bytes"] == chunks * SPEC.raw_bytes
        assert 1 < row["ratio"] < 3
    assert rows[1]["ratio"] == pytest.approx(rows[1]["raw_bytes"] / rows[1]["stored_bytes"], abs=1e-3)


def usage(model: str, given: int, made: int, saved: int = 0, ttft: float | None = None, **more: float) -> None:
    report_request(
        RequestReport(model=model, input_tokens=given, output_tokens=made, tokens_saved=saved, ttft_s=ttft, **more)  # type: ignore[arg-type]
    )


def test_token_use_per_hour_and_model(log: Log) -> None:
    usage("a", 1000, 10, 800)
    usage("a", 500, 20)
    usage("b", 100, 1)
    log.at(7200)
    usage("a", 7, 8, 7)
    rows = run(QUERIES["token_use_per_hour"], log.lines)
    assert rows[0] == {"hour": HOUR + 7200, "model_name": "a", "input": 7, "output": 8, "saved": 7}
    assert {row["model_name"]: (row["input"], row["output"], row["saved"]) for row in rows[1:]} == {
        "a": (1500, 30, 800), "b": (100, 1, 0),
    }  # fmt: skip


def test_an_hour_of_unusual_use_stands_out(log: Log) -> None:
    for hour in range(48):
        log.at(3600 * hour)
        usage("a", 1000 + hour % 5, 100)
    (quiet,) = run(QUERIES["token_use_anomaly"], log.lines)
    assert quiet["most"] < quiet["bound"]
    log.at(3600 * 48)
    usage("a", 50_000, 100)
    (row,) = run(QUERIES["token_use_anomaly"], log.lines)
    assert row["most"] == 50_100 > row["bound"] == pytest.approx(row["mean"] + 3 * row["deviation"])


def test_ttft_percentiles_and_recompute_ratio_per_five_minutes(log: Log) -> None:
    for number in range(1, 101):
        usage("a", 1000, 1, 750, ttft=number / 100, itl_s=0.02)
    log.at(300)
    usage("a", 1000, 1, 0, ttft=3.0)
    rows = run(QUERIES["ttft_and_recompute"], log.lines)
    late, first = rows
    assert (first["time"], first["ttft_p95"], first["ttft_p99"]) == (HOUR, 950.0, 990.0)
    assert first["recompute"] == pytest.approx(0.25)
    assert first["itl"] == pytest.approx(20)
    assert (late["time"], late["ttft_p95"], late["recompute"], late["itl"]) == (HOUR + 300, 3000.0, 1.0, None)


def test_models_with_a_slow_first_token(log: Log) -> None:
    for _ in range(20):
        usage("fast", 10, 1, ttft=0.1)
        usage("slow", 10, 1, ttft=2.5)
        usage("at the edge", 10, 1, ttft=2.0)
    usage("fast", 10, 1, ttft=9.0)  # one of 21: not its 95th percentile
    usage("unknown", 10, 1)
    rows = run(QUERIES["slow_ttft_by_model"], log.lines)
    assert rows == [{"model_name": "slow", "ttft_p95": 2500.0, "requests": 20}]


def test_every_query_is_tested_here() -> None:
    source = Path(__file__).read_text(encoding="utf-8")
    assert all(f'QUERIES["{name}"]' in source for name in QUERIES)
    assert len(QUERIES) == 6


@pytest.mark.parametrize(
    "query",
    [
        "stats sum(a) as x by b | stats max(x) as y | stats max(y) as z",
        "stats sum(a) as x by b | sort x desc | stats max(x) as y",
        "stats sum(a) as x by b | stats max(a) as y",
        "stats sum(a) as x by bin(1h) as hour | sort day desc",
        "stats sum(a) as x by b | filter a > 3",
        "stats sum(a) as x, avg(a) as x",
        "stats sum(a) as by",
        "stats median(a) as x",
        "stats pct(a) as x",
        "stats sum(a as x",
        "filter a >> 3",
        "filter @message like kv_cache_hit",
        "fields a",
        "limit ten",
    ],
)
def test_what_the_service_refuses_is_refused_here(query: str) -> None:
    with pytest.raises((ValueError, IndexError)):
        run(query, ['{"time":"2026-11-30T00:00:00.000Z","a":1,"b":"x","message":"m"}'])


def test_lines_of_pods_have_a_prefix() -> None:
    for text in QUERIES.values():
        with_prefix = prefixed(text, "log_processed.")
        assert with_prefix.replace("log_processed.", "") == text
        for field in FIELDS:
            assert with_prefix.count(f"log_processed.{field}") >= text.count(f"({field}")
    assert prefixed("stats sum(tokens_saved)", "x.") == "stats sum(x.tokens_saved)"


def test_what_is_told_costs_nothing_where_nobody_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Callable[[], None]] = []
    monkeypatch.setattr(logging.Logger, "makeRecord", lambda *_, **__: made.append(time.time))  # type: ignore[arg-type]
    assert not EVENTS.isEnabledFor(logging.INFO)
    usage("a", 10, 1)
    use_a_store("raw", 1)
    assert not made
