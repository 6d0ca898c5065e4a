"""`ControlSettings`: where a control API listens, who may do what there, and how much.

Off by default on anything but loopback: without an admin token, or with a namespace that has no token, only loopback
addresses are accepted.
"""

from __future__ import annotations

import ipaddress
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field

from kvstore.errors import ConfigError
from kvstore.keys import KeyContext

__all__ = ["ControlSettings"]


@dataclass(frozen=True)
class ControlSettings:
    """What an HTTP server of ours is told. Tokens are never shown.

    Attributes:
        listen: "host:port"; port 0 takes any that is free, ":port" all addresses.
        admin_token: may do everything in every namespace, read metrics and the page; b"": there is none.
        tokens: of each namespace, by name; b"": open to whoever reaches the server. A namespace that is not here is
            the admin's alone.
        report_token: of a controller: nodes may report with it (with the admin token as well); b"": none of its own.
        tls_cert, tls_key, tls_client_ca: PEM files, as those of a node.
        insecure: listen on any address although something is open.
        open_metrics: GET /metrics needs no token.
        contexts: what tokens are turned into keys with, by a name of your own ("llama-8b"): requests may give the name.
        max_body: longest body of a request, bytes.
        max_seconds: longest time that a request may ask for, or take to arrive.
        connections: at a time; one more is told to come again (503).
        threads: requests that are worked on at a time.

    Raises:
        ConfigError: an address makes no sense, or would open to others what has no token.
    """

    listen: str = "127.0.0.1:0"
    admin_token: bytes = field(default=b"", repr=False)
    tokens: Mapping[str, bytes] = field(default_factory=lambda: {"": b""}, repr=False)
    report_token: bytes = field(default=b"", repr=False)
    tls_cert: str = ""
    tls_key: str = ""
    tls_client_ca: str = ""
    insecure: bool = False
    open_metrics: bool = False
    contexts: Mapping[str, KeyContext] = field(default_factory=dict)
    max_body: int = 12 << 20
    max_seconds: float = 60.0
    connections: int = 1024
    threads: int = 32

    def __post_init__(self) -> None:
        host, _ = self.place()
        for name, low in (("max_body", 1024), ("max_seconds", 0.1), ("connections", 1), ("threads", 1)):
            if getattr(self, name) < low:
                raise ConfigError(f"{name}={getattr(self, name)} of a control API must be at least {low}")
        for token in (self.admin_token, self.report_token, *self.tokens.values()):
            if not all(33 <= byte <= 126 for byte in token):
                raise ConfigError("a token for HTTP is printable ASCII without blanks, for it travels in a header")
        if bool(self.tls_cert) != bool(self.tls_key) or (self.tls_client_ca and not self.tls_cert):
            raise ConfigError("tls_cert and tls_key go together, and tls_client_ca needs both")
        if self.insecure or _is_loopback(host):
            return
        if not self.admin_token:
            raise ConfigError(
                f"the HTTP address {self.listen} can be reached by others, and there is no admin token: give one "
                "(http_admin_token_file), listen on loopback (127.0.0.1:PORT), or say insecure"
            )
        if bare := sorted(name for name, token in self.tokens.items() if not token):
            shown = ", ".join(f"namespace {name[:80]!r}" if name else "the default namespace" for name in bare)
            raise ConfigError(
                f"the HTTP address {self.listen} can be reached by others, and {shown} has no token: give one "
                "(token_file), listen on loopback (127.0.0.1:PORT), or say insecure"
            )

    def place(self) -> tuple[str, int]:
        """Host ("" for all addresses) and port of `listen`. Raises `ConfigError`."""
        host, colon, port = self.listen.rpartition(":")
        host = host.removeprefix("[").removesuffix("]")
        if not colon or not (port.isascii() and port.isdigit()) or int(port) > 65535 or "/" in host:
            raise ConfigError(f"HTTP address {self.listen!r} is not HOST:PORT, such as 127.0.0.1:9090")
        return host, int(port)

    @property
    def loopback(self) -> bool:
        """Whether only this host reaches it."""
        return _is_loopback(self.place()[0])

    @property
    def all_open(self) -> bool:
        """There is no token at all: whoever reaches the server may do everything."""
        return not self.admin_token and not any(self.tokens.values())

    @property
    def any_open(self) -> bool:
        """There is something that needs no token."""
        return not self.admin_token or not all(self.tokens.values())

    def tls(self) -> ssl.SSLContext | None:
        """For the server; None: plain HTTP. Raises `ConfigError`: a file cannot be used."""
        if not self.tls_cert:
            return None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            context.load_cert_chain(self.tls_cert, self.tls_key)
            if self.tls_client_ca:
                context.load_verify_locations(self.tls_client_ca)
                context.verify_mode = ssl.CERT_REQUIRED
        except (OSError, ssl.SSLError) as error:
            files = ", ".join(filter(None, (self.tls_cert, self.tls_key, self.tls_client_ca)))
            text = f"the TLS files of the control API ({files}) cannot be used: {error}"
            raise ConfigError(text, cause=error) from error
        return context


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
