"""Host names within a deadline."""

from __future__ import annotations

import ipaddress
import random
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from .errors import LinkError
from .options import Node

__all__ = ["Address", "Resolver"]

_FRESH_S = 30.0  # how long an answer is used before the name is looked up again

Address = tuple[int, Any]
"""(address family, socket address), as socket(7) wants them."""


class Resolver:
    """getaddrinfo(3) with a deadline: it runs in a thread of its own, one per name, and its answer is kept for 30 s,
    or until `forget`. An older answer is used while a new one is being looked up. Numeric addresses need no thread."""

    def __init__(self, lookup: Callable[..., Sequence[tuple[Any, ...]]] = socket.getaddrinfo) -> None:
        self._lookup = lookup
        self._wake = threading.Condition()
        self._known: dict[Node, tuple[float, list[Address]]] = {}
        self._failed: dict[Node, OSError] = {}
        self._busy: set[Node] = set()

    def addresses(self, node: Node, until: float) -> list[Address]:
        """In random order. Raises `LinkError` "dns" or "deadline"."""
        numeric = _numeric(node)
        if numeric is not None:
            return [numeric]
        with self._wake:
            known = self._known.get(node)
            if known is None or time.monotonic() - known[0] > _FRESH_S:
                if node not in self._busy:
                    self._busy.add(node)
                    self._failed.pop(node, None)
                    name = f"kvstore-valkey-dns-{node.host}"
                    threading.Thread(target=self._resolve, args=(node,), name=name, daemon=True).start()
                while known is None and node in self._busy:
                    left = until - time.monotonic()
                    if left <= 0:
                        raise LinkError("deadline", f"the name {node.host} was not resolved in time")
                    self._wake.wait(min(left, threading.TIMEOUT_MAX))
                    known = self._known.get(node)
            if known is None:
                error = self._failed.get(node)
                raise LinkError("dns", f"the name {node.host} cannot be resolved: {error}") from error
        found = list(known[1])
        random.shuffle(found)
        return found

    def forget(self, node: Node) -> None:
        """The server is not where it was: ask again next time. After a failover a name leads somewhere else."""
        with self._wake:
            self._known.pop(node, None)

    def after_fork(self) -> None:
        """In the child, where no thread of ours is."""
        self._wake = threading.Condition()
        self._busy = set()

    def _resolve(self, node: Node) -> None:
        found: list[Address] = []
        failure: OSError | None = None
        try:
            for family, _, _, _, address in self._lookup(node.host, node.port, 0, socket.SOCK_STREAM):
                found.append((family, address))
        except OSError as error:
            failure = error
        except UnicodeError:  # a label that is empty or too long
            failure = OSError("not a host name")
        with self._wake:
            self._busy.discard(node)
            if found:
                self._known[node] = (time.monotonic(), found)
            else:
                self._failed[node] = failure or OSError("no addresses")
            self._wake.notify_all()


def _numeric(node: Node) -> Address | None:
    try:
        address = ipaddress.ip_address(node.host)
    except ValueError:
        return None
    if address.version == 4:
        return socket.AF_INET, (node.host, node.port)
    if "%" in node.host:  # a zone, which getaddrinfo turns into a number
        return None
    return socket.AF_INET6, (node.host, node.port, 0, 0)
