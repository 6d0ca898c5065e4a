"""Addresses, and connecting to them within a deadline."""

from __future__ import annotations

import errno
import math
import os
import select
import socket
import ssl
import threading
import time
from collections.abc import Sequence
from typing import NamedTuple

from .control import Control
from .errors import ConnectionLost, DeadlinePassed, PeerRefused, TransportError

__all__ = ["Address", "connect_control", "parse_address"]

_ATTEMPT_S = 10.0  # for one of several IP addresses of a name; Linux itself would try for two minutes


class Address(NamedTuple):
    """Attributes:
    path: of a Unix-domain socket; "" for TCP.
    """

    host: str
    port: int
    path: str = ""

    def __str__(self) -> str:
        if self.path:
            return self.path
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(text: str) -> Address:
    """ "host:port", "[v6]:port", or the path of a Unix socket, which contains a "/".

    Raises:
        ValueError: none of these.
    """
    if "/" in text:
        return Address("", 0, text)
    host, colon, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ValueError(f"address {text!r}: put an IPv6 address in brackets: [::1]:port")
    if not colon or not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"address {text!r} is neither host:port nor the path of a Unix socket")
    return Address(host, int(port))


def connect_control(address: Address, *, tls: ssl.SSLContext | None, stall_s: float, deadline: float) -> Control:
    """Connect, and make the TLS handshake if `tls`. All addresses of a name are tried, one after another.

    Raises:
        ConnectionLost, DeadlinePassed: nobody there, or not in time.
        PeerRefused: the other side does not speak TLS, or its certificate is not trusted.
    """
    if address.path:
        sock = _connect(socket.AF_UNIX, address.path, str(address), deadline)
    else:
        sock = _connect_any(address, _resolve(address, deadline), deadline)
    try:
        if tls is None:
            return Control(sock, str(address), stall_s=stall_s)
        from .tls import TlsControl

        secured = _secure(sock, tls, address, deadline)
        sock = secured
        return TlsControl(secured, str(address), stall_s=stall_s)
    except BaseException:
        sock.close()
        raise


def _resolve(address: Address, deadline: float) -> Sequence[tuple[int, tuple[object, ...]]]:
    """(family, socket address) of each of a name's addresses. getaddrinfo(3) knows no timeout: a name is looked up in
    a thread of its own, which is left behind if it takes too long."""
    try:
        return _look_up(address, socket.AI_NUMERICHOST)
    except socket.gaierror:
        pass
    found: list[Sequence[tuple[int, tuple[object, ...]]] | OSError] = []
    done = threading.Event()

    def look_up() -> None:
        try:
            found.append(_look_up(address, 0))
        except OSError as error:
            found.append(error)
        done.set()

    threading.Thread(target=look_up, name=f"kvstore-dns-{address.host}", daemon=True).start()
    if not done.wait(None if deadline == math.inf else max(0.0, deadline - time.monotonic())):
        raise DeadlinePassed(f"{address}: the name was not resolved in time")
    if isinstance(found[0], OSError):
        raise ConnectionLost(f"{address}: {found[0].strerror or found[0]}")
    return found[0]


def _look_up(address: Address, flags: int) -> Sequence[tuple[int, tuple[object, ...]]]:
    found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM, flags=flags)
    return [(family, sockaddr) for family, _, _, _, sockaddr in found]


def _connect_any(address: Address, places: Sequence[tuple[int, tuple[object, ...]]], deadline: float) -> socket.socket:
    for index, (family, place) in enumerate(places):
        last = index == len(places) - 1
        until = deadline if last else min(deadline, time.monotonic() + _ATTEMPT_S / len(places))
        try:
            return _connect(family, place, str(address), until)
        except TransportError:
            if last or time.monotonic() >= deadline:
                raise
    raise ConnectionLost(f"{address}: the name has no address")


def _connect(family: int, place: object, name: str, deadline: float) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        while (code := sock.connect_ex(place)) == errno.EAGAIN:  # type: ignore[arg-type]  # Unix: its backlog is full
            if time.monotonic() >= deadline:
                raise DeadlinePassed(f"{name}: not connected in time")
            time.sleep(0.002)  # there is nothing to wait for: connect(2) of a Unix socket does not poll
        if code == errno.EINPROGRESS:
            poll = select.poll()
            poll.register(sock, select.POLLOUT)
            left = deadline - time.monotonic()
            if not poll.poll(None if left == math.inf else max(0, math.ceil(left * 1000))):
                raise DeadlinePassed(f"{name}: not connected in time")
            code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            raise ConnectionLost(f"{name}: not connected: {os.strerror(code)}")
        if _connected_to_itself(sock):
            raise ConnectionLost(f"{name}: not connected: nobody listens")
    except OSError as error:  # the path is too long, the port is out of range
        sock.close()
        raise ConnectionLost(f"{name}: not connected: {error.strerror or error}") from error
    except BaseException:
        sock.close()
        raise
    return sock


def _connected_to_itself(sock: socket.socket) -> bool:
    """TCP's simultaneous open: a client that tries a local port of the ephemeral range may meet itself."""
    return sock.family != socket.AF_UNIX and sock.getsockname() == sock.getpeername()


def _secure(sock: socket.socket, tls: ssl.SSLContext, address: Address, deadline: float) -> ssl.SSLSocket:
    name = address.host if not address.path else "localhost"
    left = deadline - time.monotonic()
    if left <= 0:
        raise DeadlinePassed(f"{address}: the deadline passed before the TLS handshake")
    secured = tls.wrap_socket(sock, server_hostname=name, do_handshake_on_connect=False)
    try:
        secured.settimeout(None if left == math.inf else left)
        secured.do_handshake()
    except TimeoutError:
        secured.close()
        raise DeadlinePassed(f"{address}: no TLS handshake in time") from None
    except ssl.SSLCertVerificationError as error:
        secured.close()
        raise PeerRefused(f"{address}: its certificate is not trusted: {error.verify_message}") from error
    except ssl.SSLError as error:
        secured.close()
        if error.reason in ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "UNKNOWN_PROTOCOL", "PACKET_LENGTH_TOO_LONG"):
            raise PeerRefused(f"{address} does not speak TLS: leave tls out, or switch it on at the server") from error
        if error.reason and "ALERT" in error.reason:
            raise PeerRefused(f"{address} refused the TLS handshake: {error.reason}") from error
        raise ConnectionLost(f"{address}: the TLS handshake failed: {error.reason or error}") from error
    except OSError as error:
        secured.close()
        raise ConnectionLost(f"{address}: the TLS handshake failed: {error.strerror or error}") from error
    except BaseException:
        secured.close()
        raise
    return secured
