"""The options of `kvstore serve`, and where they come from: defaults < file < environment < flags.

    listen: 0.0.0.0:7100
    memory: 64GiB
    token_file: /run/secrets/kvstore
    disk: file:///nvme/kv?bytes=400GiB
    remote: s3://bucket/kv?region=us-west-2
    http: 127.0.0.1:7080
    namespaces:
      team-a: {token_file: /run/secrets/team-a, memory: 16GiB, disk: "file:///nvme/team-a?bytes=100GiB"}

The environment has `KVSTORE_SERVE_<OPTION>`, and tokens in `KVSTORE_SERVE_TOKEN` and `KVSTORE_SERVE_TOKEN_<NAMESPACE>`
(other characters than letters and digits as underscores), `KVSTORE_SERVE_HTTP_ADMIN_TOKEN` and
`KVSTORE_SERVE_CONTROLLER_TOKEN`. On the command line, what follows `--namespace NAME` belongs to that namespace. A
token never stands in the file or on the command line.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvstore.config import read_yaml
from kvstore.errors import ConfigError
from kvstore.eviction import POLICIES
from kvstore.options import Option, unknown_option
from kvstore.registry import Given, backend_class, parse_url
from kvstore_backends.node_server import Namespace

__all__ = ["NAMESPACE_OPTIONS", "SERVER_OPTIONS", "Settings", "load_settings"]

_PREFIX = "KVSTORE_SERVE_"
_TOKEN = "TOKEN"
_SECRETS = ("http_admin_token", "controller_token")  # also as files: options of these names and `_file`
_CONFIG = "CONFIG"
_NAMESPACES, _CONTEXTS = "namespaces", "contexts"
_PLACES = ("disk", "remote")  # options that are URLs
_MOST_TOKEN_BYTES = 4096
# Kubernetes sets these in every pod of a namespace that has a service called "kvstore-serve" or "kvstore-serve-…".
_SERVICE_VARIABLES = re.compile(r"(.*_)?(SERVICE_HOST|SERVICE_PORT(_.*)?|PORT(_[0-9]+_.*)?)")

NAMESPACE_OPTIONS = (
    Option(
        "token_file", "str", "",
        "File with the secret that clients must prove to know; without one the namespace is open to whoever connects.",
    ),
    Option(
        "memory", "size", 1 << 30, "Memory for records; of the node all of it, of a namespace its own part.",
        minimum=4096,
    ),
    Option(
        "policy", "choice", "lru", "What goes when the memory is full; none: new records are refused.",
        choices=tuple(POLICIES),
    ),
    Option("disk", "str", "", "Folder below the memory, file:///nvme/kv?bytes=400GiB; each namespace has its own."),
    Option(
        "remote", "str", "",
        "What lies below memory and disk, any URL of a store: s3://bucket/kv, node://other:7070, file:///mnt/nfs/kv. "
        "Other nodes may share it, but each namespace has its own. Secrets: KVSTORE_<SCHEME>_<OPTION>.",
    ),
    Option("ttl", "duration", None, "Age at which records go; not set: never.", minimum=1e-3),
    Option("ttl_from", "choice", "use", "The age counts from the last use or from the put.", choices=("use", "put")),
)  # fmt: skip
"""Options that the default namespace and each further one have. `policy`, `ttl` and `ttl_from` of a namespace are
those of the node, unless it has its own."""

SERVER_OPTIONS = (
    Option("listen", "str", "", "HOST:PORT for TCP; port 0 takes any that is free, :PORT all addresses."),
    Option("unix", "str", "", "Path of a Unix socket, for clients on this host: they read records in place."),
    Option(
        "unix_users", "str", "",
        "Further users, names or numbers with commas between, who may connect to the Unix socket and share memory, "
        "besides root and the node's own; whoever is let in can read all of its namespace.",
    ),
    Option("transport", "str", "auto", "How bodies may travel: auto, or tcp, shm, ucx with commas between."),
    Option("tls_cert", "str", "", "PEM file with the certificate chain; switches TLS on, for TCP."),
    Option("tls_key", "str", "", "PEM file with its key."),
    Option("tls_client_ca", "str", "", "PEM file; clients must show a certificate that it signed."),
    Option("insecure", "bool", False, "Listen on any address although a namespace has no token."),
    Option("default_namespace", "bool", True, "Whether there is a default namespace besides the named ones."),
    Option(
        "client_memory", "size", 128 << 20,
        "What one client may hold of a namespace's memory at a time; at most a quarter of what all may.",
        minimum=64 << 10,
    ),
    Option(
        "memory_share", "float", 0.5, "Part of a namespace's memory that its clients may hold together at a time.",
        minimum=0.01, maximum=0.9,
    ),
    Option(
        "max_request", "size", 256 << 20,
        "Longest body of a request or reply, so also of a record; no client takes more than 256 MiB.",
        minimum=4096, maximum=256 << 20,
    ),
    Option(
        "connections", "int", 4096,
        "Connections at a time, of clients that have proven who they are; one more is told to come again.", minimum=1,
    ),
    Option(
        "stall_timeout", "duration", 30.0,
        "A client that makes no progress for so long, or needs longer for a body than this and a second per MiB, loses "
        "its connection.", minimum=0.1,
    ),
    Option("drain_timeout", "duration", 10.0, "At SIGTERM, for requests under way, and again for the disk."),
    Option(
        "http", "str", "",
        "HOST:PORT for HTTP: control API, /healthz, /readyz, /metrics, and a page at /. Same TLS as `listen`.",
    ),
    Option(
        "http_admin_token_file", "str", "",
        "File with the token that may do everything there; a must on other addresses than loopback. The tokens of the "
        "namespaces open what is theirs.",
    ),
    Option(
        "prefill_per_record", "duration", 0.0,
        "Prefill that one record spares an engine: the page and the metrics count hits times this as seconds saved. A "
        "node knows neither models nor tokens; 0: not counted.",
    ),
    Option("open_metrics", "bool", False, "GET /metrics needs no token."),
    Option("name", "str", "", "Name of this node for controllers; not set: the host's and the port."),
    Option("advertise", "str", "", "Host under which others reach this node, if it is not the address it listens on."),
    Option("controller", "str", "", "URL of a controller that is told what is here (docs/control.md); wants `http`."),
    Option(
        "controller_token_file", "str", "", "File with the token for reports to it; not set: the admin's of this node."
    ),
    Option("controller_ca", "str", "", "PEM file with what signed its certificate; not set: what the system trusts."),
    Option("log_format", "choice", "text", "Of the log on standard error.", choices=("text", "json")),
    Option("log_level", "choice", "warning", "From which level on.", choices=("debug", "info", "warning", "error")),
)  # fmt: skip
"""Options of the node as a whole."""

_BY_NAME = {option.name: option for option in (*SERVER_OPTIONS, *NAMESPACE_OPTIONS)}
_OF_NAMESPACE = {option.name: option for option in NAMESPACE_OPTIONS}


@dataclass(frozen=True, slots=True)
class Settings:
    """What to serve.

    Attributes:
        server: typed values of `SERVER_OPTIONS`, and `memory`: of the node.
        namespaces: the default one first, if there is one.
        admin_token, controller_token: of the HTTP API, and for reports; b"": none.
        contexts: files of key contexts by the name that requests give, as those of `kvstore ctl`.
    """

    server: Mapping[str, Any]
    namespaces: Sequence[Namespace]
    admin_token: bytes = field(default=b"", repr=False)
    controller_token: bytes = field(default=b"", repr=False)
    contexts: Mapping[str, str] = field(default_factory=dict)


class _Layers:
    """Options as they are gathered, one source after the other; a later one wins."""

    def __init__(self) -> None:
        self.node: dict[str, Any] = {}
        self.spaces: dict[str, dict[str, Any]] = {}
        self.contexts: dict[str, str] = {}
        self.secrets: dict[str, Given] = {}
        self.tokens: dict[str, Given] = {}  # by the end of the variable's name; "" for the default namespace

    def add(self, name: str, given: Given) -> None:
        if name not in _BY_NAME:
            raise ConfigError(
                f"{unknown_option(name, [*_BY_NAME, _NAMESPACES, _CONTEXTS], where='serve')} ({given.source})"
            )
        self.node[name] = _value(_BY_NAME[name], given)

    def add_to_space(self, space: str, name: str, given: Given) -> None:
        options = self.open_space(space, given.source)
        if name not in _OF_NAMESPACE:
            raise ConfigError(
                f"{unknown_option(name, _OF_NAMESPACE, where=f'namespace {space[:80]!r}')} ({given.source})"
            )
        options[name] = _value(_OF_NAMESPACE[name], given)

    def open_space(self, space: str, source: str) -> dict[str, Any]:
        if not space:
            raise ConfigError(f"a namespace without a name ({source}); the default one has the options of the node")
        return self.spaces.setdefault(space, {})

    def add_file(self, path: str) -> None:
        source = f"in {path}"
        for name, value in read_yaml(path).items():
            if name in ("token", _TOKEN, *_SECRETS):
                raise ConfigError(f"a token must not stand in the configuration file ({source}); name a 'token_file'")
            if name == _CONTEXTS:
                if not isinstance(value, dict) or not all(isinstance(each, str) for each in (*value, *value.values())):
                    raise ConfigError(f"option {_CONTEXTS!r} must map names to files ({source})")
                self.contexts |= value
                continue
            if name != _NAMESPACES:
                self.add(name, Given(value, source))
                continue
            if not isinstance(value, dict) or not all(isinstance(space, str) for space in value):
                raise ConfigError(f"option {_NAMESPACES!r} must map names to options ({source})")
            for space, options in value.items():
                self.open_space(space, source)
                if options is None:
                    continue
                if not isinstance(options, dict):
                    raise ConfigError(f"namespace {space[:80]!r} must have a map of options ({source})")
                if "token" in options:
                    raise ConfigError(f"a token must not stand in the configuration file ({source})")
                for option, given in options.items():
                    self.add_to_space(space, str(option), Given(given, source))

    def add_environment(self, env: Mapping[str, str]) -> None:
        for variable in sorted(name for name in env if name.startswith(_PREFIX)):
            name = variable.removeprefix(_PREFIX)
            given = Given(env[variable], f"from environment variable {variable}")
            if name.lower() in _SECRETS:
                self.secrets[name.lower()] = given
            elif name == _TOKEN or (name.startswith(f"{_TOKEN}_") and name != "TOKEN_FILE"):
                self.tokens[name.removeprefix(_TOKEN).removeprefix("_")] = given
            elif name != _CONFIG and not (name.lower() not in _BY_NAME and _SERVICE_VARIABLES.fullmatch(name)):
                self.add(name.lower(), given)

    def add_flags(self, flags: Sequence[tuple[str, object]]) -> None:
        space = ""
        seen: set[tuple[str, str]] = set()
        for name, value in flags:
            source = f"from --{name.replace('_', '-')}"
            if name == "context":
                context, equals, path = str(value).partition("=")
                if not (context and equals and path):
                    raise ConfigError(f"--context {str(value)[:80]!r}: write NAME=FILE")
                self.contexts[context] = path
                continue
            if name == "namespace":
                space = str(value)
                self.open_space(space, source)
            if (space, name) in seen:
                raise ConfigError(
                    f"--{name.replace('_', '-')} is given twice{f' for namespace {space[:80]!r}' if space else ''}"
                )
            seen.add((space, name))
            if name == "namespace":
                continue
            if space and name in _OF_NAMESPACE:
                self.add_to_space(space, name, Given(value, source))
            else:
                self.add(name, Given(value, source))

    def settings(self) -> Settings:
        node = {name: self.node.get(name, option.default) for name, option in _BY_NAME.items()}
        for name in ("http_admin_token_file", "controller", "advertise"):
            if node[name] and not node["http"]:
                raise ConfigError(f"option {name!r} is of use with option 'http' only; give that as well")
        default: list[tuple[str, dict[str, Any]]] = [("", {**node, "memory": 0})] if node["default_namespace"] else []
        inherited = {name: node[name] for name in ("policy", "ttl", "ttl_from")}
        own = {option.name: option.default for option in NAMESPACE_OPTIONS} | {"memory": 0} | inherited
        spaces = [*default, *((name, own | options) for name, options in self.spaces.items())]
        variables: dict[str, str] = {}
        for name, _ in spaces:
            if variables.setdefault(_variable(name), name) != name:
                raise ConfigError(
                    f"namespaces {variables[_variable(name)]!r} and {name!r} have the same environment variable, "
                    f"{_PREFIX}{_TOKEN}_{_variable(name)}; rename one"
                )
        if strangers := sorted(self.tokens.keys() - variables.keys()):
            where = self.tokens[strangers[0]].source.removeprefix("from ")
            raise ConfigError(f"{where} is set, but there is no namespace of that name")
        admin, controller = (self._secret(name, node[f"{name}_file"]) for name in _SECRETS)
        return Settings(
            node,
            [_namespace(name, options, self.tokens.get(_variable(name))) for name, options in spaces],
            admin,
            controller,
            self.contexts,
        )

    def _secret(self, name: str, path: str) -> bytes:
        return _token(f"option '{name}_file'", path, self.secrets.get(name))


def _value(option: Option, given: Given) -> Any:
    """The typed value; of a place below the memory it must be a URL of a scheme that can be opened here."""
    value = given.parse(option)
    if value and option.name in _PLACES:
        try:
            backend_class(parse_url(value).scheme)
        except ConfigError as error:
            raise ConfigError(f"option {option.name!r}: {error.message} ({given.source})", cause=error) from error
    return value


def _variable(namespace: str) -> str:
    """What the environment variable for the token of a namespace ends with."""
    return re.sub(r"[^A-Za-z0-9]", "_", namespace).upper()


def _namespace(name: str, options: Mapping[str, Any], given: Given | None) -> Namespace:
    shown = f"namespace {name[:80]!r}" if name else "the default namespace"
    return Namespace(
        name,
        _token(shown, options["token_file"], given),
        options["memory"],
        options["policy"],
        options["disk"],
        math.inf if options["ttl"] is None else options["ttl"],
        options["ttl_from"],
        options["remote"],
    )


def _token(shown: str, path: str, given: Given | None) -> bytes:
    """A token from its file or its variable; b"": there is none."""
    if path and given is not None:
        raise ConfigError(f"{shown} has a token_file, and a token {given.source}; give one of them")
    if path:
        return _token_of(path)
    if given is None:
        return b""
    token = str(given.value).strip().encode()
    if not token:
        raise ConfigError(f"the token of {shown} is empty ({given.source}); unset the variable, or give a token")
    return token


def _token_of(path: str) -> bytes:
    """The token in a file, without white space around it."""
    try:
        with open(path, "rb") as file:
            data = file.read(_MOST_TOKEN_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"the token file {path} cannot be read: {error.strerror or error}") from error
    token = data.strip()
    if not token or len(data) > _MOST_TOKEN_BYTES:
        raise ConfigError(f"the token file {path} is empty, or longer than {_MOST_TOKEN_BYTES} bytes")
    return token


def load_settings(
    flags: Sequence[tuple[str, object]], *, config_file: str = "", env: Mapping[str, str] | None = None
) -> Settings:
    """Gather the options of `kvstore serve`.

    Args:
        flags: (option, value) as on the command line, in that order; `namespace` begins one.
        config_file: YAML; "": the one that `KVSTORE_SERVE_CONFIG` names, if any.
        env: the environment; None means this process's.

    Raises:
        ConfigError: an unknown option, or a bad, empty or missing value; names the option and its source.
    """
    env = os.environ if env is None else env
    layers = _Layers()
    path = config_file or env.get(_PREFIX + _CONFIG, "")
    if path:
        layers.add_file(path)
    layers.add_environment(env)
    layers.add_flags(flags)
    return layers.settings()
