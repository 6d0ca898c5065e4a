"""What can go wrong between two processes. Bytes and addresses only: the backends map these at their edge."""

from __future__ import annotations

__all__ = [
    "ConnectionLost",
    "DeadlinePassed",
    "PeerBusy",
    "PeerRefused",
    "ProtocolError",
    "TransportClosed",
    "TransportError",
    "TransportUnavailable",
]


class TransportError(Exception):
    """Base of all errors here. The message names the peer and what was being done, and never holds a secret."""


class DeadlinePassed(TransportError):
    """The deadline of the call passed. The channel is aborted: nothing is written into the caller's memory any more."""


class ConnectionLost(TransportError):
    """The peer refused the connection, reset it, went away in the middle, or was silent for too long."""


class ProtocolError(TransportError):
    """The peer sent something that is not our protocol: wrong magic, a length beyond its limit, a wrong checksum."""


class PeerBusy(TransportError):
    """The peer has no room for one more connection. Another try may help."""


class PeerRefused(TransportError):
    """The peer will not talk to us: another protocol version, a wrong token, TLS or none. Another try is in vain."""


class TransportUnavailable(TransportError):
    """This transport cannot be used here: a library is missing or has another version. Says what to install or set."""


class TransportClosed(TransportError):
    """The channel or server was closed by its owner, or belongs to the process before `os.fork()`."""
