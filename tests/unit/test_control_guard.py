"""`Guard`, where the server ends while a request is under way."""

from __future__ import annotations

import http.client
import json
import logging
import threading
from typing import Any

import pytest

from kvstore.control import ControlSettings
from kvstore.metrics import Metrics

pytest.importorskip("uvicorn")

from kvstore.control.guard import Guard
from kvstore.control.server import HttpServer


class _Endless:
    """An application whose requests never end; some have begun to answer."""

    def __init__(self) -> None:
        self.began = threading.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        import asyncio

        if scope["type"] != "http":
            return
        if scope["path"] == "/begun":
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"9")]})
            await send({"type": "http.response.body", "body": b"some", "more_body": True})
        self.began.set()
        await asyncio.Event().wait()


def _ask_and_end(path: str) -> tuple[http.client.HTTPResponse, bytes, Metrics]:
    app, metrics, settings = _Endless(), Metrics(), ControlSettings()
    guarded: Any = Guard(app, settings, metrics)
    server = HttpServer(guarded, settings)
    host, _, port = server.url.removeprefix("http://").rpartition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=30)
    try:
        connection.request("GET", path)
        assert app.began.wait(30)
        server.close(0.05)
        response = connection.getresponse()
        return response, response.read(), metrics
    finally:
        connection.close()
        server.close(0.0)


def test_a_request_that_is_cut_off_at_shutdown_is_told_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        response, body, metrics = _ask_and_end("/never")
    assert (response.status, response.headers["connection"]) == (503, "close")
    assert json.loads(body)["error"] == {"type": "ClosedError", "message": "the server is shutting down"}
    (counted,) = metrics.snapshot()["kvstore_control_requests_total"]["series"]
    assert counted == {"labels": {"route": "none", "status": "5xx"}, "value": 1}
    assert not [record for record in caplog.records if record.exc_info]


def test_an_answer_that_has_begun_ends_early() -> None:
    with pytest.raises(http.client.IncompleteRead) as cut:
        _ask_and_end("/begun")
    assert cut.value.partial == b"some"
