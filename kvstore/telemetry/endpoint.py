"""GET /metrics for a store inside another process (an engine's worker), which has no HTTP server of ours; with
?lmcache=1 LMCache's names besides ours. A daemon answers on its own (`kvstore serve --http`)."""

from __future__ import annotations

import contextlib
import errno
import logging
import socket
import socketserver
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from kvstore.errors import ConfigError
from kvstore.metrics import Metrics, renew_after_fork

from .prometheus import CONTENT_TYPE, exposition

__all__ = ["MetricsEndpoint", "serve_metrics"]

logger = logging.getLogger("kvstore.telemetry")

_PORTS = 16  # workers of one engine on one host
_STALL_S = 5.0
_AT_ONCE = 8


class MetricsEndpoint:
    """Answers GET /metrics on a thread of its own.

    Args:
        host, port: where to listen; 0: any free port. If `port` is taken, by another worker of the same engine most
            likely, the next 15 are tried.

    Attributes:
        address: "host:port" it listens on.

    Raises:
        OSError: it cannot listen on any of them.
    """

    def __init__(self, host: str, port: int, metrics: Metrics) -> None:
        handler = type("_Handler", (_Answer,), {"metrics": metrics, "timeout": _STALL_S})
        kind = _Server6 if ":" in host else _Server
        for candidate in range(port, min(port + (_PORTS if port else 1), 65536)):
            try:
                self._server = kind((host, candidate), handler)
                break
            except OSError as error:
                if error.errno != errno.EADDRINUSE or candidate == min(port + _PORTS - 1, 65535) or not port:
                    raise
        self.address = f"{f'[{host}]' if ':' in host else host}:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, name="kvstore-metrics", daemon=True)
        self._thread.start()
        renew_after_fork(self)

    def _after_fork(self) -> None:
        """A child answers nobody; so it must not keep the address from whoever wants it when its parent has ended."""
        self._server.socket.close()

    def close(self) -> None:
        """Listen no more."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(ThreadingHTTPServer):
    """Answers a few at a time; one more is sent away."""

    daemon_threads = True
    allow_reuse_address = True
    block_on_close = False

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self._places = threading.BoundedSemaphore(_AT_ONCE)
        super().__init__(address, handler)

    def server_bind(self) -> None:
        """Without HTTPServer's look-up of the host's name, which may take as long as DNS does."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = "", self.server_address[1]

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._places.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        # Each byte in time is not enough: eight who send one every few seconds would fill all places for ever.
        end = threading.Timer(_STALL_S, _cut_off, (request,))
        end.daemon = True
        try:
            end.start()
            super().process_request_thread(request, client_address)
        finally:
            end.cancel()
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Whoever asked has gone, mostly."""
        logger.debug("answering %s failed", client_address, exc_info=True)


class _Server6(_Server):
    address_family = socket.AF_INET6


def _cut_off(request: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it has ended
        request.shutdown(socket.SHUT_RDWR)


class _Answer(BaseHTTPRequestHandler):
    metrics: Metrics

    def do_GET(self) -> None:
        path, _, query = self.path.partition("?")
        if path != "/metrics":
            self.send_error(404, "only /metrics is here")
            return
        body = exposition(self.metrics, lmcache_names=query == "lmcache=1")
        self.send_response(200)
        self.send_header("Content-Type", CONTENT_TYPE)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """A scrape is no news."""


def serve_metrics(listen: str, metrics: Metrics) -> MetricsEndpoint | None:
    """Option `metrics_listen` of a store. A place that is taken is a warning: an engine must not fail for want of it.

    Args:
        listen: "host:port".

    Raises:
        ConfigError: it is no host and port, or `prometheus_client` is not installed.
    """
    host, colon, port = listen.rpartition(":")
    if not colon or not (port.isascii() and port.isdigit() and int(port) < 65536):
        raise ConfigError(f"option 'metrics_listen': {listen!r:.80} is no HOST:PORT, such as 127.0.0.1:9464")
    exposition(metrics)  # says what is missing, if anything is
    try:
        endpoint = MetricsEndpoint(host.strip("[]"), int(port), metrics)
    except OSError as error:
        logger.warning("metrics_listen: cannot listen on %s: %s", listen, error.strerror or error)
        return None
    logger.info("metrics on http://%s/metrics", endpoint.address)
    return endpoint
