"""Host names within a deadline, for backends that open their own connections."""

from __future__ import annotations

import ipaddress
import random
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["Address", "ResolveError", "Resolver"]

_FRESH_S = 30.0  # how long an answer is used before the name is looked up again

Address = tuple[int, Any]
"""(address family, socket address), as socket(7) wants them."""


class ResolveError(Exception):
    """A name has no address, or none in time.

    Attributes:
        kind: "dns" or "deadline".
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class Resolver:
    """getaddrinfo(3) with a deadline: it runs in a thread of its own, one per name, and its answer is kept for 30 s,
    or until `forget`. An older answer is used while a new one is being looked up. Numeric addresses need no thread."""

    def __init__(self, lookup: Callable[..., Sequence[tuple[Any, ...]]] = socket.getaddrinfo) -> None:
        self._lookup = lookup
        self._wake = threading.Condition()
        self._known: dict[tuple[str, int], tuple[float, list[Address]]] = {}
        self._failed: dict[tuple[str, int], OSError] = {}
        self._busy: set[tuple[str, int]] = set()

    def addresses(self, host: str, port: int, until: float) -> list[Address]:
        """In random order.

        Args:
            until: monotonic seconds.

        Raises:
            ResolveError: "dns", or "deadline".
        """
        if not 0 < port < 65536:
            raise ResolveError("dns", f"{host} has no port {port}")
        numeric = _numeric(host, port)
        if numeric is not None:
            return [numeric]
        name = (host, port)
        with self._wake:
            known = self._known.get(name)
            if known is None or time.monotonic() - known[0] > _FRESH_S:
                if name not in self._busy:
                    self._begin(name)
                while known is None and name in self._busy:
                    left = until - time.monotonic()
                    if left <= 0:
                        raise ResolveError("deadline", f"the name {host} was not resolved in time")
                    self._wake.wait(min(left, threading.TIMEOUT_MAX))
                    known = self._known.get(name)
            if known is None:
                error = self._failed.get(name)
                raise ResolveError("dns", f"the name {host} cannot be resolved: {error}") from error
        found = list(known[1])
        random.shuffle(found)
        return found

    def forget(self, host: str, port: int) -> None:
        """The server is not where it was: ask again next time. After a failover a name leads somewhere else."""
        with self._wake:
            self._known.pop((host, port), None)

    def after_fork(self) -> None:
        """In the child, where no thread of ours is."""
        self._wake = threading.Condition()
        self._busy = set()

    def _begin(self, name: tuple[str, int]) -> None:
        thread = threading.Thread(target=self._resolve, args=name, name=f"kvstore-dns-{name[0]}", daemon=True)
        self._failed.pop(name, None)
        try:
            thread.start()
        except RuntimeError as error:  # no more threads
            raise ResolveError("dns", f"the name {name[0]} cannot be looked up now: {error}") from error
        self._busy.add(name)

    def _resolve(self, host: str, port: int) -> None:
        found: list[Address] = []
        failure: OSError | None = None
        try:
            for family, _, _, _, address in self._lookup(host, port, 0, socket.SOCK_STREAM):
                found.append((family, address))
        except OSError as error:
            failure = error
        except (ValueError, OverflowError):  # an empty or too long label, a zero byte
            failure = OSError("not a host name")
        with self._wake:
            self._busy.discard((host, port))
            if found:
                self._known[host, port] = (time.monotonic(), found)
            else:
                self._failed[host, port] = failure or OSError("no addresses")
            self._wake.notify_all()


def _numeric(host: str, port: int) -> Address | None:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return None
    if address.version == 4:
        return socket.AF_INET, (host, port)
    if "%" in host:  # a zone, which getaddrinfo turns into a number
        return None
    return socket.AF_INET6, (host, port, 0, 0)
