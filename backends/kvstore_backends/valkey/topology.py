"""Who serves which slot: a single server, the primary among several, the one that Sentinels name, or a cluster.

It is learnt when it is first needed, and again when a server says MOVED or READONLY, or a connection fails; by one
thread for all, the others wait for it (within their deadlines). Until then the old answer is used.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from .errors import LinkError, ReplyError
from .exchange import Run, exchange
from .names import SLOTS
from .options import Node, Settings
from .pool import Pool
from .resp import Ask, command, count_of

__all__ = ["Topology", "View", "node_at", "version_of"]

logger = logging.getLogger("kvstore.backends.valkey")

_ASKED_AT_ONCE = 4  # servers that are asked for the map
_PAUSE_S = 0.1  # between two attempts to learn it
_CLUSTER_SLOTS = command(b"CLUSTER", b"SLOTS")
_OLDEST = (7, 0)


class View(NamedTuple):
    """What is known at one time.

    Attributes:
        cluster: whether slots have owners.
        slots: the owner of each slot, or None; a single server owns them all.
        primaries: all servers that own slots.
        others: their replicas, which may be asked for the map.
        version: (major, minor) of the server that was asked.
        number: counts how often the map was learnt; MOVED only patches it.
    """

    cluster: bool
    slots: Sequence[Node | None]
    primaries: tuple[Node, ...]
    others: tuple[Node, ...]
    version: tuple[int, int]
    number: int


class Topology:
    """The map, shared by all lanes.

    Attributes:
        counters: how often it was learnt ("refreshes"), and by MOVED ("moved").
    """

    def __init__(self, settings: Settings, pool: Pool) -> None:
        self._settings = settings
        self._pool = pool
        self._lock = threading.Lock()
        self._wake = threading.Condition()
        self._learning = False
        self._tried_at = 0.0
        self._view: View | None = None
        self.counters = {"refreshes": 0, "moved": 0}

    def after_fork(self) -> None:
        self._lock = threading.Lock()
        self._wake = threading.Condition()
        self._learning = False

    @property
    def known(self) -> View | None:
        return self._view

    def view(self, deadline: float) -> View:
        """The map; learnt now if there is none. Raises `LinkError` or `ReplyError`."""
        view = self._view
        return view if view is not None else self.learn(None, deadline)

    def moved(self, slot: int, node: Node) -> None:
        """A server says that `node` owns the slot."""
        with self._lock:
            view = self._view
            if view is None or not view.cluster or not 0 <= slot < SLOTS or view.slots[slot] == node:
                return
            slots = list(view.slots)
            slots[slot] = node
            primaries = view.primaries if node in view.primaries else (*view.primaries, node)
            self._view = view._replace(slots=slots, primaries=primaries)
            self.counters["moved"] += 1

    def learn(self, seen: View | None, deadline: float) -> View:
        """A newer map than `seen`. If another thread is at it, wait for that.

        Raises:
            LinkError, ReplyError: nobody could be asked, or what they said made no sense.
        """
        with self._wake:
            while self._learning:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise LinkError("deadline", "the deadline passed while the servers were being asked for their map")
                self._wake.wait(min(left, threading.TIMEOUT_MAX))
            view = self._view
            if view is not None and (seen is None or view.number > seen.number):
                return view
            if view is not None and time.monotonic() - self._tried_at < _PAUSE_S:
                return view  # somebody has just tried
            self._learning = True
        try:
            found = self._ask(deadline)
            with self._lock:
                number = 0 if self._view is None else self._view.number + 1
                self._view = found = found._replace(number=number)
                self.counters["refreshes"] += 1
        finally:
            self._tried_at = time.monotonic()
            with self._wake:
                self._learning = False
                self._wake.notify_all()
        return found

    # Asking.

    def _ask(self, deadline: float) -> View:
        if self._settings.sentinel is not None:
            return self._single([self._named_by_sentinel(deadline)], deadline)
        view = self._view
        if view is not None and view.cluster:
            nodes = [*view.primaries, *view.others]
            random.shuffle(nodes)
            nodes = list(dict.fromkeys([*nodes[: _ASKED_AT_ONCE - 1], *self._settings.seeds]))
            return self._cluster_of(self._asked(nodes, deadline, enough=_has_map))
        if self._settings.cluster == "off":
            return self._single(self._settings.seeds, deadline)
        runs = self._asked(self._settings.seeds, deadline, enough=_has_map)
        if any(_has_map(run) for run in runs):
            return self._cluster_of(runs)
        if self._settings.cluster == "on" and any(run.over and run.error is None for run in runs):
            raise LinkError("topology", "cluster=on, but the server is in no cluster that works; see CLUSTER INFO")
        return self._primary_of(runs)

    def _asked(self, nodes: Sequence[Node], deadline: float, **options: Any) -> list[Run]:
        """Ask all of `nodes` at once for the map of their cluster."""
        pairs = [(node, Ask([_CLUSTER_SLOTS])) for node in nodes]
        return self._visit(pairs, deadline, **options)

    def _visit(
        self, pairs: Sequence[tuple[Node, Ask | None]], deadline: float, *, sentinel: bool = False, **options: Any
    ) -> list[Run]:
        """One run for each server. Raises `LinkError` if not even a name was resolved."""
        failure: Exception | None = None
        with self._pool.runs(keep=not sentinel) as runs:
            for node, ask in pairs:
                asks = [ask] if ask else []
                try:
                    runs.append(self._pool.run(node, asks, deadline=deadline, sentinel=sentinel, fresh=True))
                except LinkError as error:
                    failure = error
                    continue
                runs[-1].mine = ask
            if not runs and failure is not None:
                raise failure
            exchange(runs, deadline=deadline, silence=self._settings.read_timeout, **options)
        return runs

    def _single(self, seeds: Sequence[Node], deadline: float) -> View:
        return self._primary_of(self._visit([(node, None) for node in seeds], deadline))

    def _primary_of(self, runs: Sequence[Run]) -> View:
        """The first server that says it is a primary."""
        answered = [run for run in runs if run.link.greeted]
        for run in answered:
            if run.link.facts.get("role") == b"master":
                return View(False, [run.node] * SLOTS, (run.node,), (), checked_version(run), 0)
        if answered:
            raise LinkError("topology", "none of the servers is a primary: a failover is under way, or one is missing")
        raise _why(runs)

    def _named_by_sentinel(self, deadline: float) -> Node:
        name = (self._settings.sentinel or "").encode()
        pairs = [(node, Ask([command(b"SENTINEL", b"GET-MASTER-ADDR-BY-NAME", name)])) for node in self._settings.seeds]
        runs = self._visit(pairs, deadline, sentinel=True, enough=lambda run: _address(run) is not None)
        for run in runs:
            node = _address(run)
            if node is not None:
                return node
        if any(run.over and run.error is None for run in runs):
            raise LinkError("topology", f"no Sentinel watches a primary of the name {self._settings.sentinel!r}")
        raise _why(runs)

    def _cluster_of(self, runs: Sequence[Run]) -> View:
        for run in runs:
            if _has_map(run):
                return _read_map(run)
        answered = [run.mine.reply for run in runs if run.mine is not None and isinstance(run.mine.reply, ReplyError)]
        if answered:
            raise answered[0]
        raise _why(runs)


def _has_map(run: Run) -> bool:
    return run.mine is not None and isinstance(run.mine.reply, list) and bool(run.mine.reply)


def _why(runs: Sequence[Run]) -> Exception:
    """Why none of them was of use: what a server said rather than that a connection failed."""
    failures: list[Exception] = [run.error for run in runs if run.error is not None]
    said = [failure for failure in failures if isinstance(failure, ReplyError)]
    return (said or failures or [LinkError("topology", "there is no server to ask")])[0]


def _address(run: Run) -> Node | None:
    reply = run.mine.reply if run.mine is not None else None
    if not (isinstance(reply, list) and len(reply) == 2 and all(isinstance(word, bytes) for word in reply)):
        return None
    port = count_of(reply[1])
    return None if port is None else node_at(reply[0].decode("utf-8", "replace"), port, run.node)


def version_of(facts: dict[str, Any]) -> tuple[int, int]:
    """(major, minor) as told by HELLO; (0, 0) if it says nothing."""
    text = facts.get("version", b"")
    parts = text.split(b".", 2)[:2] if isinstance(text, bytes) else []
    numbers = [number for number in map(count_of, parts) if number is not None]
    return (numbers[0], numbers[1]) if len(numbers) == 2 else (0, 0)


def checked_version(run: Run) -> tuple[int, int]:
    version = version_of(run.link.facts)
    if version < _OLDEST:
        said = f"{version[0]}.{version[1]}" if version[0] else "an unknown version"
        raise ReplyError(f"ERR unknown command PEXPIRETIME: {run.node} is {said}")
    return version


def _read_map(run: Run) -> View:
    """The reply to CLUSTER SLOTS: [first, last, [host, port, …], replicas …] for each range of slots.

    A host may be nil.
    """
    version = checked_version(run)
    slots: list[Node | None] = [None] * SLOTS
    primaries: dict[Node, None] = {}
    others: dict[Node, None] = {}
    for entry in run.mine.reply if run.mine is not None else ():
        try:
            first, last, *servers = entry
            nodes = [_node_of(server, run.node) for server in servers]
            if not 0 <= first <= last < SLOTS or not nodes:
                raise ValueError
        except (TypeError, ValueError) as error:
            raise LinkError("protocol", f"{run.node} describes its cluster in a way that makes no sense") from error
        slots[first : last + 1] = [nodes[0]] * (last - first + 1)
        primaries[nodes[0]] = None
        others.update(dict.fromkeys(nodes[1:]))
    return View(True, slots, tuple(primaries), tuple(others), version, 0)


def _node_of(server: Any, asked: Node) -> Node:
    host, port, *_ = server
    if not isinstance(port, int):
        raise TypeError
    node = node_at(host.decode() if isinstance(host, bytes) else "", port, asked)
    if node is None:
        raise ValueError
    return node


def node_at(host: str, port: int, asked: Node) -> Node | None:
    """Where a server says that another one is. A host that is empty or unknown is that of the server that was asked
    (its `cluster-preferred-endpoint-type` is unknown-endpoint, or hostname and it has none).
    None: there is no such port.
    """
    return Node(asked.host if host in ("", "?") else host, port) if 0 < port < 65536 else None
