"""How bytes move between processes: `Server` and `connect`, over TCP, TLS, Unix sockets, UCX and shared memory.

It knows bytes and addresses, nothing of keys or records, and imports nothing of kvstore. `seam` says what holds for all
transports, `frames` what a frame looks like, `bodies` which transports there are.
"""

from __future__ import annotations

from .channel import connect
from .errors import (
    ConnectionLost,
    DeadlinePassed,
    PeerBusy,
    PeerRefused,
    ProtocolError,
    TransportClosed,
    TransportError,
    TransportUnavailable,
)
from .seam import Answer, Channel, Credentials, Handler, Incoming, Leased, Limits, Peer, Plan, Reply
from .server import Server, ServerStats

__all__ = [
    "Answer",
    "Channel",
    "ConnectionLost",
    "Credentials",
    "DeadlinePassed",
    "Handler",
    "Incoming",
    "Leased",
    "Limits",
    "Peer",
    "PeerBusy",
    "PeerRefused",
    "Plan",
    "ProtocolError",
    "Reply",
    "Server",
    "ServerStats",
    "TransportClosed",
    "TransportError",
    "TransportUnavailable",
    "connect",
]
