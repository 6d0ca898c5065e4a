"""`kvstore serve`: a node of its own process. See `kvstore_backends.node_server`.

When it is ready it prints one line to standard output, which names the addresses (with `--json` an object with
`address`, `unix`, `http`, `namespaces`, `memory_bytes` and `pid`). At SIGTERM or SIGINT it is not ready any more
(/readyz, and for its controller), takes no more connections, lets requests under way end, writes what waits for the
disk and what is remote, and ends with status 0. A second signal ends it at once.
"""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import os
import pwd
import sys
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from kvstore.errors import ConfigError
from kvstore.options import Option, show_value
from kvstore.telemetry import configure_logs
from kvstore_backends.node_server import NodeServer
from kvstore_transport import Limits

from .serve_options import NAMESPACE_OPTIONS, SERVER_OPTIONS, Settings, load_settings
from .signals import stop_on_signals

if TYPE_CHECKING:
    from .serve_http import Web

__all__ = ["serve"]

logger = logging.getLogger("kvstore.node")

_LINGER_S = 1.0
_META = "kvstore_cli.order"
_METAVARS = {
    "listen": "HOST:PORT", "http": "HOST:PORT", "disk": "URL", "remote": "URL", "controller": "URL",
    "advertise": "HOST", "name": "NAME",
}  # fmt: skip


class _Serve(click.Command):
    """Keeps the order of the options: what follows `--namespace` belongs to it."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        _, _, order = self.make_parser(ctx).parse_args(args=list(args))
        ctx.meta[_META] = [parameter.name for parameter in order]
        return super().parse_args(ctx, args)


def _flag(option: Option) -> click.Option:
    """Values stay text: `kvstore.options` reads them, with the messages of all other sources."""
    name = option.name.replace("_", "-")
    default = "" if option.default in (None, "", False) else f" Default: {show_value(option, option.default)}."
    if option.kind == "bool":
        declaration = f"--{name}/--no-{name}" if option.default else f"--{name}"
        return click.Option([option.name, declaration], is_flag=True, default=None, help=option.doc + default)
    metavar = _METAVARS.get(option.name, option.kind.upper())
    if option.name.endswith(("_file", "_cert", "_key", "_ca")) or option.name == "unix":
        metavar = "FILE"
    return click.Option(
        [option.name, f"--{name}"], multiple=True, metavar="|".join(option.choices) or metavar,
        help=option.doc + default,
    )  # fmt: skip


_NAMESPACE = click.Option(
    ["namespace", "--namespace"], multiple=True, metavar="NAME",
    help="A further namespace. What follows of --token-file, --memory, --policy, --disk, --remote, --ttl and "
    "--ttl-from, up to the next --namespace, belongs to it.",
)  # fmt: skip


_CONTEXT = click.Option(
    ["context", "--context"], multiple=True, metavar="NAME=FILE",
    help="A key context by name, for requests of the control API that give tokens (docs/control.md).",
)  # fmt: skip


def _in_order(ctx: click.Context) -> list[tuple[str, object]]:
    """(option, value) as they stand on the command line."""
    left = {name: list(value) if isinstance(value, tuple) else [value] for name, value in ctx.params.items()}
    return [(name, left[name].pop(0)) for name in ctx.meta[_META] if name not in ("config", "as_json") and left[name]]


def _serve(config: str, as_json: bool, **_: object) -> int:
    """Offer memory and disk of this host to other processes and hosts, until SIGTERM.

    Sizes and durations carry units: 16GiB, 200ms, 1d. Options also come from a YAML file (--config, or
    KVSTORE_SERVE_CONFIG) and from KVSTORE_SERVE_<OPTION>; flags win over the environment, that over the file.
    """
    settings = load_settings(_in_order(click.get_current_context()), config_file=config)
    server = settings.server
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(levelname)s %(name)s: %(message)s")
    configure_logs(server["log_format"], level=server["log_level"])
    before = threading.enumerate()
    with stop_on_signals() as stop, contextlib.ExitStack() as undo:
        web: Web | None = None
        if server["http"]:
            from .serve_http import Web, control_settings

            control_settings(settings)  # before anything is opened
        node = undo.enter_context(open_node(settings))
        if server["http"]:
            web = Web(node, settings)
            undo.callback(web.close)
        gc.freeze()  # modules and the like stay for ever: a full collection need not look at them, a tenth of the CPU
        _announce(node, settings, "" if web is None else web.url, as_json=as_json)
        stop.wait()
        node.draining = True
        if web is not None:
            web.leave()
        node.close(server["drain_timeout"])
    _leave_behind(before)
    return 0


def _leave_behind(before: Sequence[threading.Thread]) -> None:
    """Python waits at its end for threads that hang in a backend, such as those of HTTP requests, however long that
    takes: all that counts is done by now, so the process ends without them."""
    own = [thread for thread in threading.enumerate() if thread not in before and not thread.daemon]
    end = time.monotonic() + _LINGER_S
    for thread in own:
        thread.join(max(0.0, end - time.monotonic()))
    if any(thread.is_alive() for thread in own):
        logger.warning("requests that hang below were left behind")
        logging.shutdown()
        os._exit(0)


def open_node(settings: Settings) -> NodeServer:
    """The node that `settings` describe. Raises `ConfigError`."""
    server = settings.server
    named = [namespace for namespace in settings.namespaces if namespace.name]
    default: dict[str, Any] = {"default_namespace": False}
    for namespace in settings.namespaces:
        if not namespace.name:
            default = {
                "policy": namespace.policy, "disk": namespace.disk, "ttl": namespace.ttl,
                "ttl_from": namespace.ttl_from, "token": namespace.token, "remote": namespace.remote,
            }  # fmt: skip
    return NodeServer(
        server["listen"],
        unix_path=server["unix"],
        memory_bytes=server["memory"],
        namespaces=named,
        insecure=server["insecure"],
        tls_cert=server["tls_cert"],
        tls_key=server["tls_key"],
        tls_client_ca=server["tls_client_ca"],
        transports=server["transport"],
        client_bytes=server["client_memory"],
        share=server["memory_share"],
        limits=Limits(
            max_body=server["max_request"],
            connections=server["connections"],
            stall_s=server["stall_timeout"],
            uids=_uids(server["unix_users"], server["unix"]),
        ),
        **default,
    )


def _uids(users: str, path: str) -> frozenset[int]:
    """The numbers of users, who are given by name or number. Raises `ConfigError`."""
    if users and not path:
        raise ConfigError(
            "option 'unix_users' says who may use the Unix socket, but there is none: give 'unix' as well"
        )
    found = set()
    for user in filter(None, map(str.strip, users.split(","))):
        if user.isascii() and user.isdigit() and int(user) < 1 << 32:
            found.add(int(user))
            continue
        try:
            found.add(pwd.getpwnam(user).pw_uid)
        except (KeyError, ValueError) as error:
            raise ConfigError(f"option 'unix_users': there is no user {user[:80]!r} here") from error
    return frozenset(found)


def _announce(node: NodeServer, settings: Settings, http: str, *, as_json: bool) -> None:
    memory = settings.server["memory"]
    names = [*node.namespaces]
    if as_json:
        line = json.dumps({
            "address": node.address, "unix": node.unix_path, "http": http, "namespaces": names,
            "memory_bytes": memory, "tls": node.secure, "pid": os.getpid(),
        })  # fmt: skip
    else:
        size = next(option for option in NAMESPACE_OPTIONS if option.name == "memory")
        where = " and ".join(filter(None, (node.address, node.unix_path, http)))
        shown = ", ".join(name or "default" for name in names)
        line = f"kvstore serve: listening on {where}; {show_value(size, memory)} of memory; namespaces: {shown}"
    try:
        print(line, flush=True)
    except BrokenPipeError:  # whoever started it does not listen
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _parameters() -> Sequence[click.Parameter]:
    return [
        *map(_flag, SERVER_OPTIONS),
        *map(_flag, NAMESPACE_OPTIONS),
        _NAMESPACE,
        _CONTEXT,
        click.Option(["config", "--config"], default="", metavar="FILE", help="YAML with the same options."),
        click.Option(["as_json", "--json"], is_flag=True, help="Print the line as JSON."),
    ]


serve = _Serve("serve", callback=_serve, params=list(_parameters()), help=_serve.__doc__)
