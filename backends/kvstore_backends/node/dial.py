"""How a client of ours connects to a node."""

from __future__ import annotations

import os
import ssl
from collections.abc import Callable
from typing import Any

from kvstore.errors import ConfigError
from kvstore_transport import Channel, ConnectionLost, Credentials, PeerRefused, TransportUnavailable, connect
from kvstore_transport.bodies import auto
from kvstore_transport.errors import TransportError

from .members import Member
from .options import Settings

__all__ = ["DialMember", "check_rdma", "dialler", "tls_context", "uses_ucx"]

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


def _explained(error: ConnectionLost, member: Member, settings: Settings) -> TransportError:
    """What a connection that ended in its handshake says about our certificate. With TLS 1.3 a client has made its side
    of the handshake before a server misses the certificate, or does not trust it; its alert says so (RFC 8446, 4.4.2.4
    and 6.2), and another try is in vain."""
    cause = error.__cause__
    if not isinstance(cause, ssl.SSLError):
        return error
    alert = cause.reason if cause.reason and "ALERT" in cause.reason else ""
    if alert and settings.tls_cert is not None:
        return PeerRefused(f"{member.address} does not take the certificate {settings.tls_cert} ({alert})")
    if alert:
        return PeerRefused(f"{member.address} wants a certificate of its clients: give tls_cert and tls_key ({alert})")
    if settings.tls_cert is None:
        text = f"{error}; does the node want a certificate of its clients? Then give tls_cert and tls_key"
        return ConnectionLost(text)
    return error


def uses_ucx(settings: Settings) -> bool:
    """Whether connections are asked for that go over UCX."""
    if settings.tls:
        return False
    return settings.require_rdma or settings.transport == "ucx" or (settings.transport == "auto" and "ucx" in auto())


def _start_ucx() -> None:
    """Outside of any connection's time: it takes half a second in each process, once. What is wrong with it, a
    connection says."""
    try:
        from kvstore_transport.ucx import UcxEngine

        UcxEngine.get().host()
    except (ImportError, TransportUnavailable):
        return


def dialler(settings: Settings) -> DialMember:
    """Connections as the settings want them; all of them bear one client id.

    Raises:
        ConfigError: the certificates cannot be read, or there is no RDMA, and `require_rdma` is set.
    """
    if settings.require_rdma:
        check_rdma()
    if uses_ucx(settings):
        _start_ucx()
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
            raise _explained(error, member, settings) from error

    return dial
