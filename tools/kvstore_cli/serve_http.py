"""The HTTP side of `kvstore serve`: control API, probes, metrics and the page, and the reports to a controller.

It is imported only with the option `http`: the node itself needs none of what this needs (`pip install
'kvstore[control]'`).
"""

from __future__ import annotations

import contextlib
import socket
import threading

from kvstore.control.app import build_app
from kvstore.control.client import Client
from kvstore.control.page import routes
from kvstore.control.reporter import Reporter
from kvstore.control.server import HttpServer, listen
from kvstore.control.settings import ControlSettings
from kvstore.metrics import Metrics
from kvstore.telemetry import History, Source, node_source
from kvstore.telemetry.prometheus import merged
from kvstore_backends.node_control import NodeInstance
from kvstore_backends.node_server import NodeServer

from .ctl import context_of
from .serve_options import Settings

__all__ = ["Web", "control_settings"]

_STOP_S = 2.0


def control_settings(settings: Settings) -> ControlSettings:
    """What the HTTP server is told. Raises `ConfigError`: it would open to others what has no token."""
    server = settings.server
    return ControlSettings(
        listen=server["http"],
        admin_token=settings.admin_token,
        tokens={namespace.name: namespace.token for namespace in settings.namespaces},
        tls_cert=server["tls_cert"],
        tls_key=server["tls_key"],
        tls_client_ca=server["tls_client_ca"],
        insecure=server["insecure"],
        open_metrics=server["open_metrics"],
        contexts={name: context_of(path) for name, path in settings.contexts.items()},
    )


class Web:
    """Serves the control API of `node` until `close`.

    Attributes:
        url: where it listens.

    Raises:
        ConfigError: the settings make no sense, it cannot listen there, or something is not installed.
    """

    def __init__(self, node: NodeServer, settings: Settings) -> None:
        server = settings.server
        control = control_settings(settings)
        scheme = "https" if control.tls_cert else "http"
        host = reachable(server["advertise"], control.listen)
        metrics = Metrics()
        lower = [space.below.metrics for space in node.spaces.values() if space.below is not None]
        with contextlib.ExitStack() as undo:
            listener = listen(control)  # the node must say where it is before it serves
            undo.callback(listener.close)
            port = listener.getsockname()[1]
            address = ""
            if node.address:
                listened = server["listen"].rpartition(":")[0]
                address = f"{reachable(server['advertise'], f'{listened}:0')}:{node.address.rpartition(':')[2]}"
            instance = NodeInstance(
                node, name=server["name"], address=address, http=f"{scheme}://{host}:{port}"
            )  # fmt: skip
            undo.callback(instance.close)
            own = node_source(node.stats, instance.usage, prefill_per_record=server["prefill_per_record"])
            sources: list[Source] = [own, *lower]
            history = History(*sources)
            node.on_sweep(history.tick)
            page = routes(instance, lambda: merged(metrics, *sources), history)
            app = build_app(instance, settings=control, metrics=metrics, sources=sources, page=page)
            http = HttpServer(app, control, listener=listener)
            undo.callback(http.close, _STOP_S)
            self.url = http.url
            self._reporter: Reporter | None = None
            if server["controller"]:
                self._reporter = Reporter(instance, _controller(settings))
            undo.pop_all()
        self._http, self._instance = http, instance
        self._leaving: threading.Thread | None = None

    def leave(self) -> None:
        """When the node begins to drain: tell the controller, and begin no more jobs. Probes go on."""
        if self._reporter is not None and self._leaving is None:
            self._leaving = threading.Thread(target=self._reporter.close, name="kvstore-leave", daemon=True)
            self._leaving.start()  # a controller that hangs must not take the time of the drain
        self._instance.close()

    def close(self) -> None:
        """Let requests under way end, and stop. May be called twice."""
        self.leave()
        self._http.close(_STOP_S)
        if self._leaving is not None:
            self._leaving.join(_STOP_S)


def _controller(settings: Settings) -> Client:
    server = settings.server
    token = settings.controller_token or settings.admin_token
    ours = {"cert": server["tls_cert"], "key": server["tls_key"]} if server["tls_client_ca"] else {}
    return Client(server["controller"], token=token.decode(), ca=server["controller_ca"], **ours)


def reachable(advertise: str, listen: str) -> str:
    """The host under which others reach us: as told, or the address we listen on; of all addresses the one by which
    this host talks to others."""
    host = advertise or listen.rpartition(":")[0].removeprefix("[").removesuffix("]")
    if host in ("", "0.0.0.0", "::"):
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect(("192.0.2.1", 9))  # sends nothing
                host = probe.getsockname()[0]
            except OSError:
                host = socket.gethostname()
    return f"[{host}]" if ":" in host else host
