"""`kvstore ctl serve`: the controller that several nodes report to. See `kvstore.control.controller`.

When it is ready it prints one line to standard output (with `--json` an object with `url` and `pid`). At SIGTERM or
SIGINT it lets requests under way end, and ends with status 0. Nothing is kept: the nodes tell it all again.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import click

from kvstore.config import read_yaml
from kvstore.errors import ConfigError
from kvstore.metrics import Metrics
from kvstore.options import Option, show_value, unknown_option
from kvstore.registry import Given

from .serve_options import _token_of

__all__ = ["CONTROLLER_OPTIONS", "load_controller", "serve"]

_PREFIX = "KVSTORE_CTL_SERVE_"

CONTROLLER_OPTIONS = (
    Option("http", "str", "127.0.0.1:9090", "HOST:PORT to listen on; port 0 takes any that is free."),
    Option("admin_token_file", "str", "", "File with the token that opens every namespace; a must beyond loopback."),
    Option("report_token_file", "str", "", "File with the token that nodes report with; not set: the admin's."),
    Option("tls_cert", "str", "", "PEM file with the certificate chain; switches TLS on."),
    Option("tls_key", "str", "", "PEM file with its key."),
    Option("tls_client_ca", "str", "", "PEM file; clients must show a certificate that it signed."),
    Option("insecure", "bool", False, "Listen on any address although something needs no token."),
    Option("open_metrics", "bool", False, "GET /metrics needs no token."),
    Option("node_ca", "str", "", "PEM file with the authorities of the nodes' certificates; not set: the system's."),
    Option("capacity", "int", 16 << 20, "Records that are remembered, about 120 bytes each.", minimum=1),
    Option("lost_timeout", "duration", 10.0, "A node that has not reported for so long is not used.", minimum=1.0),
    Option("forget_timeout", "duration", 600.0, "And after so long it is forgotten.", minimum=1.0),
    Option("load_weight", "float", 1.0, "What a waiting token counts when prompts are routed.", minimum=0.0),
    Option("connections", "int", 1024, "HTTP connections at a time.", minimum=1),
    Option("drain_timeout", "duration", 5.0, "At SIGTERM, for requests under way."),
)  # fmt: skip
"""Options of the controller. `namespaces` (a map from names to `token_file`), `tier_worth` (a map from tiers to 0..1)
and `contexts` (a map from names to files) stand in the file, or come from repeated flags."""

_BY_NAME = {option.name: option for option in CONTROLLER_OPTIONS}
_MAPS = ("namespaces", "tier_worth", "contexts")


def load_controller(
    flags: Mapping[str, object], maps: Mapping[str, Sequence[str]], *, config_file: str, env: Mapping[str, str]
) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Gather the options: defaults < file < environment (KVSTORE_CTL_SERVE_<OPTION>) < flags.

    Args:
        flags: option → text, those that are given.
        maps: of `_MAPS`: "NAME=VALUE" each.

    Returns:
        the options, typed, and the maps.

    Raises:
        ConfigError: names the option and where it comes from.
    """
    given: dict[str, Given] = {}
    found: dict[str, dict[str, Any]] = {name: {} for name in _MAPS}
    if config_file:
        source = f"in {config_file}"
        for name, value in read_yaml(config_file).items():
            if name in _MAPS:
                if not isinstance(value, dict) or not all(isinstance(each, str) for each in value):
                    raise ConfigError(f"option {name!r} must be a map ({source})")
                found[name] = dict(value)
            elif name not in _BY_NAME:
                raise ConfigError(f"{unknown_option(name, [*_BY_NAME, *_MAPS], where='ctl serve')} ({source})")
            else:
                given[name] = Given(value, source)
    for variable in sorted(env):
        name = variable.removeprefix(_PREFIX).lower()
        if variable.startswith(_PREFIX) and name != "config":
            if name not in _BY_NAME:
                raise ConfigError(f"{unknown_option(name, _BY_NAME, where='ctl serve')} (environment {variable})")
            given[name] = Given(env[variable], f"from environment variable {variable}")
    for name, value in flags.items():
        if value is not None:
            given[name] = Given(value, f"from --{name.replace('_', '-')}")
    for name, words in maps.items():
        for word in words:
            key, equals, value = word.partition("=")
            if not key or (not equals and name != "namespaces"):
                raise ConfigError(f"--{name.removesuffix('s').replace('_', '-')} {word!r}: write NAME=VALUE")
            found[name][key] = {"token_file": value} if name == "namespaces" else value
    options = {
        name: given[name].parse(option) if name in given else option.default for name, option in _BY_NAME.items()
    }
    return options, found


def _tokens(namespaces: Mapping[str, Any]) -> dict[str, bytes]:
    tokens: dict[str, bytes] = {}
    for name, options in namespaces.items():
        path = (options or {}).get("token_file", "") if isinstance(options, dict | None) else None
        if not isinstance(path, str) or (options and set(options) - {"token_file"}):
            raise ConfigError(f"namespace {name[:80]!r} of the controller has one option, token_file")
        tokens["" if name == "default" else name] = _token_of(path) if path else b""
    return tokens


def _worth(given: Mapping[str, Any]) -> dict[str, float]:
    from kvstore.control.routing import RoutePolicy

    option = Option("tier_worth", "float", None, "", minimum=0.0, maximum=1.0)
    return {**RoutePolicy().worth, **{tier: option.parse(value) for tier, value in given.items()}}


def _serve(config: str, as_json: bool, namespaces: Sequence[str], tier_worth: Sequence[str], contexts: Sequence[str],
           **flags: object) -> int:  # fmt: skip
    """Run a controller, which nodes report to (`kvstore serve --controller URL`), until SIGTERM.

    It listens on loopback unless there is an admin token. Options also come from a YAML file (--config) and from
    KVSTORE_CTL_SERVE_<OPTION>; flags win over the environment, that over the file. In the file, `namespaces` maps names
    to `token_file` ("default" is the default one), `tier_worth` tiers to 0..1, `contexts` names to files.
    """
    from kvstore.control.app import build_controller_app
    from kvstore.control.controller import Controller
    from kvstore.control.page import routes
    from kvstore.control.routing import RoutePolicy
    from kvstore.control.server import HttpServer
    from kvstore.control.settings import ControlSettings
    from kvstore.telemetry import History

    from .ctl import context_of
    from .signals import stop_on_signals

    options, maps = load_controller(
        flags, {"namespaces": namespaces, "tier_worth": tier_worth, "contexts": contexts},
        config_file=config or os.environ.get(f"{_PREFIX}CONFIG", ""), env=os.environ,
    )  # fmt: skip
    admin = _token_of(options["admin_token_file"]) if options["admin_token_file"] else b""
    try:
        settings = ControlSettings(
            listen=options["http"],
            admin_token=admin,
            report_token=_token_of(options["report_token_file"]) if options["report_token_file"] else b"",
            # With an admin token and no namespaces, all is the admin's.
            tokens=_tokens(maps["namespaces"]) or ({} if admin else {"": b""}),
            tls_cert=options["tls_cert"],
            tls_key=options["tls_key"],
            tls_client_ca=options["tls_client_ca"],
            insecure=options["insecure"],
            open_metrics=options["open_metrics"],
            contexts={name: context_of(str(path)) for name, path in maps["contexts"].items()},
            connections=options["connections"],
        )
    except ConfigError as error:
        # It speaks as to a node; these are our flags.
        text = error.message.replace("http_admin_token_file", "--admin-token-file")
        raise ConfigError(
            text.replace("(token_file)", "--namespace NAME=FILE").replace("say insecure", "say --insecure")
        ) from None
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(levelname)s %(name)s: %(message)s")
    metrics = Metrics()
    controller = Controller(
        policy=RoutePolicy(worth=_worth(maps["tier_worth"]), load_weight=options["load_weight"]),
        capacity=options["capacity"], lost_s=options["lost_timeout"], forget_s=options["forget_timeout"],
        ca=options["node_ca"], metrics=metrics,
    )  # fmt: skip
    page = routes(None, metrics, History(metrics), service=controller)
    app = build_controller_app(controller, settings=settings, metrics=metrics, page=page)
    with stop_on_signals() as stop, HttpServer(app, settings) as server:
        gc.freeze()
        line = json.dumps({"url": server.url, "pid": os.getpid()}) if as_json else f"listening on {server.url}"
        try:
            print(line if as_json else f"kvstore ctl serve: {line}", flush=True)
        except BrokenPipeError:  # whoever started it does not listen
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        stop.wait()
        server.close(options["drain_timeout"])
    return 0


def _flag(option: Option) -> click.Option:
    name = option.name.replace("_", "-")
    default = "" if option.default in (None, "", False) else f" Default: {show_value(option, option.default)}."
    if option.kind == "bool":
        return click.Option([option.name, f"--{name}"], is_flag=True, default=None, help=option.doc)
    metavar = "FILE" if option.name.endswith(("_file", "_cert", "_key", "_ca")) else option.kind.upper()
    metavar = "HOST:PORT" if option.name == "http" else metavar
    return click.Option([option.name, f"--{name}"], default=None, metavar=metavar, help=option.doc + default)


serve = click.Command(
    "serve",
    callback=_serve,
    help=_serve.__doc__,
    params=[
        *map(_flag, CONTROLLER_OPTIONS),
        click.Option(["namespaces", "--namespace"], multiple=True, metavar="NAME[=TOKEN_FILE]",
                     help="A namespace and its token; repeat. default: the default one."),
        click.Option(["tier_worth", "--tier-worth"], multiple=True, metavar="TIER=0..1",
                     help="Part of the prefill that a hit in this tier saves; repeat."),
        click.Option(["contexts", "--context"], multiple=True, metavar="NAME=FILE",
                     help="What a model's tokens are turned into keys with, for requests that give the name; repeat."),
        click.Option(["config", "--config"], default="", metavar="FILE", help="YAML with the same options."),
        click.Option(["as_json", "--json"], is_flag=True, help="Print the line as JSON."),
    ],
)  # fmt: skip
