"""Log lines: JSON, the request they are about, the event log, and what is reported of a request."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import math
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvstore
from kvstore.errors import ConfigError, TransientError
from kvstore.metrics import Metrics
from kvstore.telemetry import (
    RequestReport,
    configure_logs,
    current_request_id,
    exposition,
    report_request,
    request_scope,
)
from kvstore.telemetry.logs import EVENTS, log_event


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    found = io.StringIO()
    handler = configure_logs(stream=found)
    yield found
    root = logging.getLogger("kvstore")
    root.removeHandler(handler)
    root.setLevel(logging.NOTSET)
    root.propagate = True


def lines(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_a_line_is_one_object(stream: io.StringIO) -> None:
    logging.getLogger("kvstore.store").warning("two\nlines of %s", "text")
    (line,) = lines(stream)
    assert (line["level"], line["logger"], line["message"]) == ("WARNING", "kvstore.store", "two\nlines of text")
    assert line["time"].endswith("Z")
    assert len(line["time"]) == len("2026-11-30T15:39:05.676Z")
    assert "request_id" not in line


def test_a_traceback_stays_in_the_line(stream: io.StringIO) -> None:
    try:
        raise TransientError("gone")
    except TransientError:
        logging.getLogger("kvstore.store").exception("failed")
    (line,) = lines(stream)
    assert "TransientError: gone" in line["exception"]
    assert "\n" in line["exception"]


def test_a_request_is_named_in_its_thread_and_task_only(stream: io.StringIO) -> None:
    def other() -> None:
        logging.getLogger("kvstore.store").warning("elsewhere")

    async def tasks() -> None:
        async def one(name: str, gate: asyncio.Event) -> None:
            with request_scope(name):
                await gate.wait()
                assert current_request_id() == name

        gate = asyncio.Event()
        both = [asyncio.create_task(one(name, gate)) for name in ("a", "b")]
        await asyncio.sleep(0)
        gate.set()
        await asyncio.gather(*both)

    with request_scope("r-1"):
        logging.getLogger("kvstore.store").warning("here")
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        with request_scope("r-2", model="m"):
            assert current_request_id() == "r-2"
        assert current_request_id() == "r-1"
    assert current_request_id() == ""
    asyncio.run(tasks())
    here, elsewhere = lines(stream)
    assert here["request_id"] == "r-1"
    assert "request_id" not in elsewhere


@given(
    st.dictionaries(
        st.text(min_size=1, max_size=10),
        st.none() | st.text() | st.integers() | st.floats() | st.binary() | st.builds(object) | st.booleans(),
        max_size=6,
    )
)
def test_a_line_never_fails(fields: dict[str, Any]) -> None:
    out = io.StringIO()
    handler = configure_logs(stream=out, logger=EVENTS.name)
    try:
        log_event("marker", fields)
    finally:
        EVENTS.removeHandler(handler)
        EVENTS.setLevel(logging.NOTSET)
        EVENTS.propagate = True
    (text,) = out.getvalue().splitlines()
    line = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert line["message"] == "marker", "a field cannot take the place of what every line has"
    for name, value in fields.items():
        if name not in ("time", "level", "logger", "message") and isinstance(value, str | bool | int):
            assert line[name] == value


def test_text_for_people() -> None:
    out = io.StringIO()
    handler = configure_logs("text", stream=out, logger=EVENTS.name)
    with request_scope("r-1", model="m"):
        log_event("kv_cache_hit", {"hit_chunks": 3})
    EVENTS.removeHandler(handler)
    EVENTS.setLevel(logging.NOTSET)
    EVENTS.propagate = True
    assert out.getvalue() == "INFO kvstore.events: kv_cache_hit hit_chunks=3 model_name=m request_id=r-1\n"


def test_a_second_configuration_replaces_the_first(stream: io.StringIO) -> None:
    again = io.StringIO()
    handler = configure_logs(stream=again, level="error")
    logging.getLogger("kvstore.store").warning("too quiet")
    logging.getLogger("kvstore.store").error("once")
    logging.getLogger("kvstore").removeHandler(handler)
    assert lines(stream) == []
    assert [line["message"] for line in lines(again)] == ["once"]


@pytest.mark.parametrize("bad", [{"form": "xml"}, {"level": "loud"}])
def test_what_is_not_known_is_named(bad: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=next(iter(bad.values()))):
        configure_logs(**bad)  # type: ignore[arg-type]


@pytest.mark.parametrize("bad", [17, b"id", None])
def test_an_id_is_text(bad: Any) -> None:
    with pytest.raises(ConfigError, match="text"), request_scope(bad):
        pass


def test_ids_have_a_bound() -> None:
    with request_scope("x" * 10_000):
        assert len(current_request_id()) == 256


# What stores tell.


def test_what_a_store_tells_of_a_batch(stream: io.StringIO) -> None:
    with kvstore.open_store("memory://?bytes=4MiB") as store, request_scope("r-9", model="llama"):
        store.put_many({"a": bytes(5000)})
        store.get_many(["a", "b"], into=[bytearray(5000), bytearray(1)])
    stored, hit = [line for line in lines(stream) if line["logger"] == "kvstore.events"]
    assert stored["message"] == "kv_cache_store"
    assert stored["encoded_size_bytes"] > stored["cache_size_bytes"] == 5000, "there is a header"
    assert "compression_ratio" not in stored, "nothing was compressed"
    assert hit["message"] == "kv_cache_hit"
    assert (hit["hit_chunks"], hit["tokens_saved"], hit["cache_size_bytes"]) == (1, 0, 5000)
    for line in (stored, hit):
        assert (line["request_id"], line["model_name"]) == ("r-9", "llama")
        assert line["seconds"] > 0


def test_a_hit_is_one_line_though_its_header_was_asked_for_first(stream: io.StringIO) -> None:
    with kvstore.open_store("memory://?bytes=4MiB") as store:
        store.put_many({"a": bytes(5000)})
        assert store.get_many(["a", "b"]) == [bytearray(5000), None]  # how long it is says its header
        store.submit_heads([kvstore.opaque_key("a")]).result()
    hits = [line for line in lines(stream) if line["message"] == "kv_cache_hit"]
    assert [(line["hit_chunks"], line["cache_size_bytes"]) for line in hits] == [(1, 5000)]


def test_the_event_log_of_an_engine_that_configures_no_logging() -> None:
    program = (
        "import kvstore, sys\n"
        "with kvstore.open_store('memory://?bytes=4MiB', event_log=sys.argv[1]) as store:\n"
        "    store.put_many({'a': b'x'})\n"
        "with kvstore.open_store('memory://?bytes=4MiB', event_log=sys.argv[1]) as store:\n"
        "    store.put_many({'a': b'x'})\n"
    )
    for where in ("stdout", "stderr", "off"):
        done = subprocess.run(
            [sys.executable, "-c", program, where], capture_output=True, text=True, check=True, timeout=60
        )
        told = {"stdout": done.stdout, "stderr": done.stderr}
        written = told.pop(where, "")
        assert [json.loads(line)["message"] for line in written.splitlines()] == ["kv_cache_store"] * (
            0 if where == "off" else 2
        )
        assert not any(told.values())


# Reports of requests.


def test_a_report_is_counted_and_told(stream: io.StringIO) -> None:
    metrics = Metrics()
    report = RequestReport(
        "r-1", "llama", input_tokens=1000, output_tokens=50, tokens_saved=768, ttft_s=0.25, itl_s=0.02, doc_count=4,
        doc_hits=3, hit_chunks=3, cache_size_bytes=4000, encoded_size_bytes=1000,
    )  # fmt: skip
    report_request(report, metrics=metrics)
    (line,) = lines(stream)
    told = {name: line[name] for name in line if name not in ("time", "level", "logger")}
    assert told == {
        "message": "token_usage", "request_id": "r-1", "model_name": "llama", "input_tokens": 1000,
        "output_tokens": 50, "tokens_saved": 768, "ttft_ms": 250.0, "itl_ms": 20.0, "recompute_ratio": 0.232,
        "compression_ratio": 4.0, "cache_size_bytes": 4000, "encoded_size_bytes": 1000, "hit_chunks": 3,
        "doc_count": 4,
    }  # fmt: skip
    assert metrics.value("kvstore_requests_total") == 1
    assert metrics.value("kvstore_request_tokens_total", "saved") == 768
    assert metrics.value("kvstore_request_ttft_seconds") == 1
    assert metrics.value("kvstore_request_documents_total", "miss") == 1
    assert metrics.value("kvstore_blend_tokens_total", "computed") == 232
    report_request(report, metrics=metrics)
    assert metrics.value("kvstore_requests_total") == 2
    assert b"kvstore_request_ttft_seconds_sum 0.5" in exposition(metrics)


def test_what_is_not_known_is_left_out(stream: io.StringIO) -> None:
    metrics = Metrics()
    with request_scope("r-2", model="m"):
        report_request(RequestReport(input_tokens=0), metrics=metrics)
    (line,) = lines(stream)
    assert (line["request_id"], line["model_name"]) == ("r-2", "m")
    assert not {"ttft_ms", "itl_ms", "recompute_ratio", "compression_ratio", "doc_count"} & set(line)
    assert "kvstore_request_ttft_seconds" not in metrics.snapshot()
    assert "kvstore_blend_tokens_total" not in metrics.snapshot()


def test_what_was_saved_may_be_unknown(stream: io.StringIO) -> None:
    metrics = Metrics()
    report_request(RequestReport(input_tokens=9, output_tokens=2, tokens_saved=None, doc_count=2), metrics=metrics)
    (line,) = lines(stream)
    assert (line["input_tokens"], line["output_tokens"]) == (9, 2)
    assert not {"tokens_saved", "recompute_ratio"} & set(line)
    told = {tuple(each["labels"].values()) for each in metrics.snapshot()["kvstore_request_tokens_total"]["series"]}
    assert told == {("input",), ("output",)}
    assert "kvstore_blend_tokens_total" not in metrics.snapshot()


@pytest.mark.parametrize(
    "bad",
    [
        {"input_tokens": 5, "tokens_saved": 6},
        {"input_tokens": 5, "tokens_saved": -1},
        {"output_tokens": -1},
        {"ttft_s": -0.1},
        {"ttft_s": math.nan},
        {"itl_s": math.inf},
        {"doc_count": 2, "doc_hits": 3},
        {"doc_count": -1},
    ],
)
def test_a_report_that_makes_no_sense_is_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        RequestReport(**bad)
