"""`HttpServer`: one of our HTTP applications, in a thread of its own with a loop of its own."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from kvstore.errors import ConfigError

from .settings import ControlSettings

if TYPE_CHECKING:
    from fastapi import FastAPI

__all__ = ["HttpServer", "listen"]

logger = logging.getLogger("kvstore.control")

_HEADER_S = 10.0  # for the headers of a request
_IDLE_S = 75.0  # between two requests of a connection
_READING_S = 30.0  # for a client to read his answer
_SPARE = 16  # connections that are being pushed out
_START_S = 30.0
_MOST_HEADERS = 64 << 10
_BACKLOG = 512


class HttpServer:
    """Serves until `close`. The address is taken when it is made, so that port 0 is known at once.

    Args:
        app: see `kvstore.control.app`.
        settings: those that the app was made with.
        listener: as `listen(settings)` gave it, for whoever must know the port before there is an app; it belongs to
            the server now. None: listens by itself.

    Attributes:
        address: "host:port" it listens on.
        url: "http://host:port" or "https://…".

    Raises:
        ConfigError: it cannot listen there, a TLS file cannot be used, or uvicorn is not installed.
    """

    def __init__(
        self, app: FastAPI, settings: ControlSettings, *, listener: socket.socket | None = None
    ) -> None:  # fmt: skip
        try:
            import uvicorn
        except ImportError as error:  # pragma: no cover - the tests have it
            raise ConfigError("the control API needs uvicorn: pip install 'kvstore[control]'", cause=error) from error
        self._socket = listen(settings) if listener is None else listener
        try:
            tls = settings.tls()
        except ConfigError:
            self._socket.close()
            raise
        host, port = self._socket.getsockname()[:2]
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self.url = f"{'https' if tls else 'http'}://{self.address}"
        config = uvicorn.Config(
            app,
            http=_protocol(settings),
            ws="none",
            loop="asyncio",
            lifespan="on",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            limit_concurrency=settings.connections + _SPARE,
            timeout_keep_alive=int(_IDLE_S),
            h11_max_incomplete_event_size=_MOST_HEADERS,
        )
        config.load()
        config.ssl = tls
        self._server = uvicorn.Server(config)
        self._server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
        self._pid = os.getpid()
        self._ended = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="kvstore-http", daemon=True)
        self._thread.start()
        waited = 0.0
        while not self._server.started and not self._ended.wait(0.005) and waited < _START_S:
            waited += 0.005
        if not self._server.started:
            self.close(0.0)
            raise ConfigError(f"the HTTP server at {self.address} did not start: {self._failure or 'it ended'}")

    def _run(self) -> None:
        try:
            asyncio.run(self._server.serve(sockets=[self._socket]))
        except BaseException as error:  # noqa: BLE001 - the thread ends, and says why
            self._failure = error
            logger.error("the HTTP server at %s ended: %s", self.address, error)
        finally:
            self._ended.set()

    def close(self, drain_s: float = 5.0) -> None:
        """Accept nobody any more, let requests under way end within `drain_s` seconds, and stop. May be called twice,
        and in the child of a fork, where it does nothing but let go of the address."""
        if self._pid != os.getpid():
            self._socket.close()
            return
        self._server.config.timeout_graceful_shutdown = max(0, round(drain_s))
        self._server.should_exit = True
        if not self._ended.wait(drain_s + 2.0):
            self._server.force_exit = True
            self._ended.wait(2.0)
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<HttpServer at {self.url}>"


def listen(settings: ControlSettings) -> socket.socket:
    """A socket that listens on `settings.listen`. Raises `ConfigError`: it cannot."""
    host, port = settings.place()
    family = socket.AF_INET6 if ":" in host or not host else socket.AF_INET
    if not host and not socket.has_dualstack_ipv6():
        family, host = socket.AF_INET, "0.0.0.0"
    try:
        listener = socket.create_server(
            (host, port), family=family, backlog=_BACKLOG, dualstack_ipv6=family == socket.AF_INET6 and not host,
        )  # fmt: skip
    except OSError as error:
        raise ConfigError(
            f"the HTTP server cannot listen on {settings.listen}: {error.strerror or error}", cause=error
        ) from error
    # Accepted connections inherit it. Without it, an answer's body waits 40 ms for the acknowledgement of its headers.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def _protocol(settings: ControlSettings) -> Any:
    """uvicorn's, with limits: who sends headers byte by byte, or reads his answer so, loses his connection; and when
    there are too many, newcomers push out the one that has been idle for longest, so that probes get through."""
    from uvicorn.protocols.http.h11_impl import H11Protocol

    idle: dict[Any, None] = {}  # connections without a request, the longest idle first
    most = settings.connections
    request_s = 2 * settings.max_seconds + _READING_S  # to come, to be answered, to be read

    class Bounded(H11Protocol):
        _timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            if len(self.connections) > most and idle:
                next(iter(idle))._hang_up()
            idle[self] = None
            self._arm(_HEADER_S)

        def data_received(self, data: bytes) -> None:
            before = self.cycle
            super().data_received(data)
            self._look(before)

        def on_response_complete(self) -> None:
            before = self.cycle
            self._disarm()
            super().on_response_complete()  # may begin with the next request, if it has come already
            self._look(before)

        def connection_lost(self, exc: Exception | None) -> None:
            self._disarm()
            idle.pop(self, None)
            super().connection_lost(exc)

        def _look(self, before: Any) -> None:
            """What this connection does now, and how long it may."""
            if self.cycle is None or self.cycle.response_complete:
                idle.setdefault(self, None)
                if self._timer is None and self.timeout_keep_alive_task is None:
                    self._arm(_HEADER_S)  # some of the headers are there
            elif self.cycle is not before:
                idle.pop(self, None)
                self._disarm()
                self._arm(request_s)

        def _arm(self, seconds: float) -> None:
            self._timer = self.loop.call_later(seconds, self._hang_up)

        def _disarm(self) -> None:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

        def _hang_up(self) -> None:
            self._timer = None
            idle.pop(self, None)
            self.transport.abort()

    return Bounded
