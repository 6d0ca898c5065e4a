"""Options of `valkey://` and `valkeys://`, and the settings they make together with the URL."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kvstore.errors import ConfigError
from kvstore.options import Option
from kvstore.registry import BackendURL

__all__ = ["DEFAULT_PORT", "OPTIONS", "Node", "Settings", "as_bytes", "settings_from_url"]

MIB = 1 << 20
DEFAULT_PORT = 6379
_SENTINEL_PORT = 26379

OPTIONS: tuple[Option, ...] = (
    Option("cluster", "choice", "auto", "Whether the servers are a cluster; auto: they are asked.",
           choices=("auto", "on", "off")),
    Option("sentinel", "str", None, "The URL names Sentinels, and this is the name of the primary that they watch."),
    Option("database", "int", 0, "Number of the database; a cluster has only 0.", minimum=0, maximum=65535),
    Option("username", "str", None, "ACL user; unset: the default one.", secret=True),
    Option("password", "str", None, "Its password.", secret=True),
    Option("sentinel_password", "str", None, "Password of the Sentinels; unset: they have none.", secret=True),
    Option("tls_ca", "str", None, "valkeys: file of the certificates to trust; unset: the system's."),
    Option("tls_cert", "str", None, "valkeys: file with the certificate to show, for servers that ask for one."),
    Option("tls_key", "str", None, "valkeys: file with its key; unset: it is in tls_cert."),
    Option("tls_server_name", "str", None, "valkeys: name that must stand in servers' certificates; unset: that of "
           "each host."),
    Option("lanes", "int", 8, "Calls at once, and so connections to each server; more calls wait.", minimum=1,
           maximum=1024),
    Option("window", "size", 32 * MIB, "Bytes of values that are asked for ahead on one connection; the server holds "
           "them in memory.", minimum=64 << 10, maximum=1 << 30),
    Option("part_size", "size", 64 * MIB, "A longer run of a record's bytes is asked for in parts of this size.",
           minimum=64 << 10, maximum=512 * MIB),
    Option("max_value_bytes", "size", 512 * MIB, "Largest record; the server's limit is proto-max-bulk-len.", minimum=1,
           maximum=1 << 40),
    Option("ask_from", "size", 256 << 10, "Before a record of this size or more is sent, the server is asked whether "
           "it has it."),
    Option("ttl", "duration", None, "Records expire so long after they were stored (up to 1 % later); unset: after "
           "ten years, which stands for never.", minimum=1.0, maximum=3e8),
    Option("quarantine", "duration", 86400.0, "How long corrupt records are kept aside under PREFIX/quarantine/; 0: "
           "they are deleted.", maximum=3e8),
    Option("connect_timeout", "duration", 1.0, "Longest wait for a connection, TLS and authentication included; never "
           "past the deadline.", minimum=0.01, maximum=60.0),
    Option("read_timeout", "duration", 5.0, "Longest silence of a server before its connection is given up; never past "
           "the deadline.", minimum=0.01, maximum=600.0),
)  # fmt: skip

_HOST = re.compile(r"\[(?P<v6>[0-9A-Fa-f:.%]+)\]|(?P<name>[^\[\]:/?#@\s]+)")
_BAD_IN_PREFIX = re.compile(r"[{}]|(^|/)\.{1,2}(/|$)|//")


class Node(NamedTuple):
    """Where a server listens."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Where records go, and how. Secrets do not show in its repr.

    Attributes:
        seeds: servers to begin with (or Sentinels), at least one.
        tls: whether connections are encrypted.
        prefix: of all names; "" or ends in "/".
        others: see `OPTIONS`.
    """

    seeds: tuple[Node, ...]
    tls: bool = False
    prefix: str = ""
    cluster: str = "auto"
    sentinel: str | None = None
    database: int = 0
    username: str | None = field(default=None, repr=False)
    password: str | None = field(default=None, repr=False)
    sentinel_password: str | None = field(default=None, repr=False)
    tls_ca: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None
    tls_server_name: str | None = None
    lanes: int = 8
    window: int = 32 * MIB
    part_size: int = 64 * MIB
    max_value_bytes: int = 512 * MIB
    ask_from: int = 256 << 10
    ttl: float | None = None
    quarantine: float = 86400.0
    connect_timeout: float = 1.0
    read_timeout: float = 5.0

    def __post_init__(self) -> None:
        for option in OPTIONS:
            value = getattr(self, option.name)
            option.parse(value)
            if isinstance(value, str):
                _check_text(value, f"{self.scheme}: option {option.name}")
        where = self.name
        if not self.seeds:
            raise ConfigError(f"{where} names no server")
        if self.tls_server_name is not None and not _is_server_name(self.tls_server_name):
            raise ConfigError(f"{where}: tls_server_name must be a host name")
        if _BAD_IN_PREFIX.search(self.prefix) or self.prefix.startswith("/") or len(self.prefix.encode()) > 800:
            raise ConfigError(f"{where}: a prefix has no braces, no empty, '.' or '..' parts and at most 800 bytes")
        if self.prefix and not self.prefix.endswith("/"):
            raise ConfigError(f"{where}: a prefix ends in '/'")
        if self.username is not None and self.password is None:
            raise ConfigError(f"{where}: a username needs a password")
        if self.cluster == "on" and self.database:
            raise ConfigError(f"{where}: a cluster has database 0 only; leave option database out")
        if self.sentinel is not None and self.cluster == "on":
            raise ConfigError(f"{where}: Sentinels watch single servers; cluster=on and sentinel exclude each other")
        if self.tls_key is not None and self.tls_cert is None:
            raise ConfigError(f"{where}: tls_key needs tls_cert")
        if not self.tls:
            for name in ("tls_ca", "tls_cert", "tls_server_name"):
                if getattr(self, name) is not None:
                    raise ConfigError(f"{where}: option {name} is for TLS; write valkeys://")

    @property
    def scheme(self) -> str:
        return "valkeys" if self.tls else "valkey"

    @property
    def name(self) -> str:
        """For errors and metrics."""
        database = f"?database={self.database}" if self.database else ""
        return f"{self.scheme}://{','.join(map(str, self.seeds))}/{self.prefix}".rstrip("/") + database


def settings_from_url(url: BackendURL, options: Mapping[str, Any]) -> Settings:
    """`valkey://host:port[,host:port]/prefix?…`; `valkeys://` is the same over TLS. The port is 6379 (26379 for
    Sentinels) unless it is given.

    Raises:
        ConfigError: no host, or an option makes no sense.
    """
    default = _SENTINEL_PORT if options.get("sentinel") else DEFAULT_PORT
    seeds = tuple(dict.fromkeys(_node(part.strip(), default, url.scheme) for part in url.authority.split(",")))
    prefix = url.path.strip("/")
    return Settings(seeds=seeds, tls=url.scheme == "valkeys", prefix=f"{prefix}/" if prefix else "", **options)


def _node(text: str, default: int, scheme: str) -> Node:
    match = _HOST.match(text)
    rest = text[match.end() :] if match else ""
    port = rest[1:] if rest.startswith(":") else ""
    wrong = match is not None and match["v6"] is not None and not _is_ipv6(match["v6"])
    if match is None or wrong or (rest and not (port.isascii() and port.isdigit() and 0 < int(port) < 65536)):
        raise ConfigError(f"{scheme}:// needs servers: {scheme}://host:port[,host:port]/prefix, with ports 1 to 65535")
    return Node(match["v6"] or match["name"], int(port) if port else default)


def _is_ipv6(text: str) -> bool:
    try:
        return ipaddress.ip_address(text).version == 6
    except ValueError:
        return False


def _is_server_name(text: str) -> bool:
    try:
        return not text.startswith(".") and bool(text.encode("idna"))
    except UnicodeError:
        return False


def as_bytes(text: str) -> bytes:
    """As the server gets it. Bytes of the environment that are no UTF-8 are what they were (PEP 383)."""
    return text.encode("utf-8", "surrogateescape")


def _check_text(text: str, what: str) -> None:
    try:
        as_bytes(text)
    except UnicodeEncodeError:  # its repr would show all of a secret
        raise ConfigError(f"{what} has characters that are none") from None
