"""How a client of ours connects to a node."""

from __future__ import annotations

import os
import ssl
from collections.abc import Callable
from typing import Any

from kvstore.errors import ConfigError
from kvstore_transport import Channel, ConnectionLost, Credentials, TransportUnavailable, connect

from .members import Member
from .options import Settings

__all__ = ["DialMember", "dialler"]

DialMember = Callable[[Member, float], Channel]
"""Opens a connection to a node by a deadline (absolute `time.monotonic()` seconds)."""


class _NamedContext(ssl.SSLContext):
    """A context that wants one certain name in the certificate, whatever the address is."""

    name = ""

    def wrap_socket(self, *args: Any, **options: Any) -> ssl.SSLSocket:
        return super().wrap_socket(*args, **{**options, "server_hostname": self.name})


def tls_context(settings: Settings) -> ssl.SSLContext:
    """Certificates are verified, and the server's name too. Raises `ConfigError`: a file cannot be used."""
    context: ssl.SSLContext
    if settings.tls_server_name is None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    else:
        context = _NamedContext(ssl.PROTOCOL_TLS_CLIENT)
        context.name = settings.tls_server_name
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    ca, cert = settings.tls_ca, settings.tls_cert
    try:
        if ca is None:
            context.load_default_certs()
        else:
            context.load_verify_locations(ca)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"option 'tls_ca': {ca} cannot be used: {error}", cause=error) from error
    try:
        if cert is not None:
            context.load_cert_chain(cert, settings.tls_key)
    except (OSError, ssl.SSLError) as error:
        text = f"options 'tls_cert' and 'tls_key': {cert} and {settings.tls_key} cannot be used: {error}"
        raise ConfigError(text, cause=error) from error
    return context


def check_rdma() -> None:
    """Raises `ConfigError`, with what to install, unless this process can move bytes by RDMA; from then on it uses UCX
    with RDMA only."""
    try:
        from kvstore_transport.ucx import require_rdma

        require_rdma()
    except (ImportError, TransportUnavailable) as error:
        raise ConfigError(f"option 'require_rdma': {error}", cause=error) from error


def dialler(settings: Settings) -> DialMember:
    """Connections as the settings want them; all of them bear one client id.

    Raises:
        ConfigError: the certificates cannot be read, or there is no RDMA, and `require_rdma` is set.
    """
    if settings.require_rdma:
        check_rdma()
    transport = "ucx" if settings.require_rdma else settings.transport
    tls = tls_context(settings) if settings.tls else None
    credentials = Credentials(settings.namespace, (settings.token or "").encode())
    client_id = os.urandom(16)
    sums = settings.checksum != "none"

    def dial(member: Member, deadline: float) -> Channel:
        try:
            return connect(
                member.address,
                deadline=deadline,
                credentials=credentials,
                transport=transport,
                tls=tls,
                client_id=client_id,
                body_sums=sums,
            )
        except ConnectionLost as error:
            # With TLS 1.3 a server that misses a certificate of ours hangs up only after our side of the handshake.
            if tls is not None and settings.tls_cert is None and isinstance(error.__cause__, ssl.SSLError):
                text = f"{error}; does the node want a certificate of its clients? Then give tls_cert and tls_key"
                raise ConnectionLost(text) from error
            raise

    return dial
