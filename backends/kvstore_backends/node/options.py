"""Options of `node://`, and the settings they make together with the URL."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvstore.errors import ConfigError
from kvstore.options import Option
from kvstore.registry import BackendURL

from .members import Member, parse_authority

__all__ = ["OPTIONS", "Settings", "settings_from_url"]

MIB = 1 << 20

OPTIONS: tuple[Option, ...] = (
    Option("replicas", "int", 1, "How many nodes hold each record.", minimum=1, maximum=8),
    Option("write_quorum", "int", 1, "How many of them must acknowledge a put before it is OK; the others get the "
           "record in the background.", minimum=1, maximum=8),
    Option("transport", "choice", "auto", "How bytes travel: tcp, ucx (RDMA, shared memory, TCP), shm (a node of this "
           "host); auto: the best that both sides have.", choices=("auto", "tcp", "ucx", "shm")),
    Option("require_rdma", "bool", False, "Fail at open unless bytes travel by RDMA."),
    Option("namespace", "str", "", "Tenant on the nodes; unset: the default one."),
    Option("token", "str", None, "Secret of the namespace.", secret=True),
    Option("lanes", "int", 4, "Connections to each node at most.", minimum=1, maximum=64),
    Option("tls", "bool", False, "TLS on the TCP connections."),
    Option("tls_ca", "str", None, "File of the certificates to trust; unset: those of the system."),
    Option("tls_server_name", "str", None, "Name that the nodes' certificates must bear; unset: the host of each."),
    Option("tls_cert", "str", None, "File of our own certificate (PEM), for nodes that want one."),
    Option("tls_key", "str", None, "File of the key of tls_cert."),
    Option("checksum", "choice", "none", "Checksum over each transfer, besides TCP's and our own in the record.",
           choices=("none", "xxh3")),
    Option("connect_timeout", "duration", 1.0, "Longest wait for a connection and its handshake; never past the "
           "deadline.", minimum=0.01, maximum=60.0),
    Option("discover", "choice", "none", "Where the nodes come from: none (the URL), dns (all addresses of the URL's "
           "host:port), file (the URL's path, a file of lines host:port [weight=2] [name=n1]).",
           choices=("none", "dns", "file")),
    Option("refresh", "duration", 5.0, "How often DNS is asked, or the file looked at, again.", minimum=0.05,
           maximum=3600.0),
    Option("rebalance_grace", "duration", 300.0, "After nodes came or went: how long a miss is looked for at the nodes "
           "that had the key before.", maximum=86400.0),
    Option("read_repair", "bool", True, "A node that lacks a record which another one has is given it, in the "
           "background."),
    Option("repair_rate", "size", 256 * MIB, "Bytes per second that repairs move at most.", minimum=1),
    Option("repair_memory", "size", 64 * MIB, "Memory of repairs; a larger record is not repaired.", minimum=4096),
    Option("hedge_reads", "bool", True, "With replicas: ask the next one too when a read takes longer than 95 % of "
           "them do; at most 5 % more reads."),
    Option("hedge_scratch", "size", 64 * MIB, "Memory that such reads land in before they are copied to their "
           "destination.", minimum=4096),
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Which nodes, and how they are used. The token does not show in its repr.

    Attributes:
        members: the nodes that the URL names; empty if they come from `path`.
        path: of the file of nodes (`discover=file`).
        others: see `OPTIONS`.
    """

    members: tuple[Member, ...] = ()
    path: str = ""
    replicas: int = 1
    write_quorum: int = 1
    transport: str = "auto"
    require_rdma: bool = False
    namespace: str = ""
    token: str | None = field(default=None, repr=False)
    lanes: int = 4
    tls: bool = False
    tls_ca: str | None = None
    tls_server_name: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None
    checksum: str = "none"
    connect_timeout: float = 1.0
    discover: str = "none"
    refresh: float = 5.0
    rebalance_grace: float = 300.0
    read_repair: bool = True
    repair_rate: int = 256 * MIB
    repair_memory: int = 64 * MIB
    hedge_reads: bool = True
    hedge_scratch: int = 64 * MIB

    def __post_init__(self) -> None:
        for option in OPTIONS:
            option.parse(getattr(self, option.name))
        if self.discover == "file":
            if self.members or not self.path:
                raise ConfigError("discover=file takes the path of the file: node:///etc/kvstore/nodes?discover=file")
        elif not self.members:
            raise ConfigError("node:// names no node; write node://host:port,host:port, or use discover")
        if self.discover == "dns" and (len(self.members) != 1 or self.members[0].is_path):
            raise ConfigError("discover=dns takes one host:port, whose addresses are the nodes")
        if self.discover == "none" and self.replicas > len(self.members):
            raise ConfigError(f"replicas={self.replicas}, but the URL names {len(self.members)} nodes")
        if self.write_quorum > self.replicas:
            raise ConfigError(f"write_quorum={self.write_quorum} cannot be reached with replicas={self.replicas}")
        if len(self.namespace.encode()) > 256 or not self.namespace.isprintable():
            raise ConfigError("a namespace is at most 256 bytes of printable text")
        if (self.tls_ca or self.tls_server_name or self.tls_cert or self.tls_key) and not self.tls:
            raise ConfigError("tls_ca, tls_server_name, tls_cert and tls_key mean nothing without tls=true")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ConfigError("tls_cert and tls_key come together, or not at all")
        if self.require_rdma and self.transport not in {"auto", "ucx"}:
            raise ConfigError(f"require_rdma needs transport=ucx, not {self.transport}")

    @property
    def name(self) -> str:
        """For errors and metrics."""
        where = self.path if self.discover == "file" else ",".join(member.address for member in self.members)
        return f"node://{where}" + (f" ({self.namespace})" if self.namespace else "")


def settings_from_url(url: BackendURL, options: Mapping[str, Any]) -> Settings:
    """`node://host:port,host:port?…`; `node:///run/kv.sock` for a node of this host by its Unix socket;
    `node:///etc/kvstore/nodes?discover=file`. `kvstore+ucx://` is `node://` with `transport=ucx`.

    Raises:
        ConfigError: no node, a bad address, or an option makes no sense.
    """
    given = dict(options)
    if url.scheme == "kvstore+ucx":
        if given.get("transport", "auto") not in {"auto", "ucx"}:
            raise ConfigError(f"kvstore+ucx:// with transport={given['transport']}; write node:// instead")
        given["transport"] = "ucx"
    path = url.path if url.path != "/" else ""
    if given.get("discover") == "file":
        if url.authority:
            raise ConfigError(f"discover=file takes a path of this host: {url.scheme}:///etc/kvstore/nodes")
        return Settings(path=path, **given)
    if url.authority and path:
        raise ConfigError(f"{url.scheme}://host:port takes no path, but {path!r} was given")
    return Settings(members=parse_authority(url.authority or path), **given)
