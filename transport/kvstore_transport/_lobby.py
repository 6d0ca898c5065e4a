"""`Lobby`: connections whose client has not proven yet who it is. They take no place from those that have.

There may be so many at a time in all, and a little less from one address. When there are too many, the oldest makes
way: the oldest of the address that has the most. So strangers who say nothing are pushed out by newcomers, while an
honest handshake, which takes milliseconds, is over long before its turn.
"""

from __future__ import annotations

import ipaddress
import socket
from typing import Generic, TypeVar

__all__ = ["Lobby", "origin"]

T = TypeVar("T")

_LEAST = 64
_PART = 4  # of the connections that a server takes
_OTHERS = 8  # that part of the places is kept for other addresses


class Lobby(Generic[T]):
    """Not safe for several threads at a time.

    Args:
        connections: that the server takes; the lobby has a quarter of them, 64 at least.

    Attributes:
        most: how many there may be, in all.
        most_of_one: and from one address.
    """

    def __init__(self, connections: int) -> None:
        self.most = max(_LEAST, connections // _PART)
        self.most_of_one = self.most - self.most // _OTHERS
        self._origins: dict[T, str] = {}
        self._guests: dict[str, dict[T, None]] = {}  # by origin, the oldest first

    def __len__(self) -> int:
        return len(self._origins)

    def enter(self, guest: T, where: str) -> T | None:
        """`guest` from `where` comes in; who must leave, and has left, for it, if anybody."""
        self._origins[guest] = where
        mine = self._guests.setdefault(where, {})
        mine[guest] = None
        if len(mine) <= self.most_of_one:
            if len(self._origins) <= self.most:
                return None
            mine = max(self._guests.values(), key=len)
        oldest = next(iter(mine))
        self.leave(oldest)
        return oldest

    def leave(self, guest: T) -> bool:
        """Whether it was here."""
        where = self._origins.pop(guest, None)
        if where is None:
            return False
        mine = self._guests[where]
        del mine[guest]
        if not mine:
            del self._guests[where]
        return True


def origin(sock: socket.socket) -> str:
    """Where a connection comes from, as far as somebody can be told from others by it: an IPv4 address, the /64 of an
    IPv6 one, which is what one host has, or "" for a Unix socket."""
    try:
        name = sock.getpeername()
        address = ipaddress.ip_address(str(name[0]).partition("%")[0])
    except (OSError, ValueError, IndexError):
        return ""
    if address.version == 4:
        return str(address)
    mapped = address.ipv4_mapped
    return str(mapped) if mapped is not None else f"{int(address) >> 64:x}::/64"
