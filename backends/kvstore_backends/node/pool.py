"""The nodes of a pool over time: they come and go under load, are found to be down and to be back."""

from __future__ import annotations

import functools
import logging
import math
import threading
import time
from collections.abc import Sequence

from kvstore.buffers import BufferPool, Slab
from kvstore.errors import ClosedError, ConfigError, KVStoreError, PermanentError
from kvstore.metrics import Metrics
from kvstore.wrappers.hedging import Workers
from kvstore_transport import DeadlinePassed
from kvstore_transport.process import process_id

from .background import Background, run_all
from .client import NodeClient
from .dial import DialMember, uses_ucx
from .members import Member, Source
from .metrics import NODE_METRICS
from .node import Node
from .options import Settings
from .snapshot import Former, Snapshot

__all__ = ["Pool"]

logger = logging.getLogger("kvstore.node")

_MOST_WORKERS = 64
_PROBE_EVERY_S = 0.1  # while a node is down; the breaker decides when it is really asked
_JOIN_S = 1.0


class _Use:
    """See `Pool.use`."""

    __slots__ = ("_pool", "_snapshot")

    def __init__(self, pool: Pool, snapshot: Snapshot) -> None:
        self._pool = pool
        self._snapshot = snapshot

    def __enter__(self) -> Snapshot:
        return self._snapshot

    def __exit__(self, *_: object) -> None:
        self._pool._leave(self._snapshot)


class Pool:
    """The nodes. Whoever calls one of them does so within `use`, which keeps it open.

    Args:
        settings: see there.
        source: where the nodes come from.
        dial: how to connect to one.

    Raises:
        ConfigError: the nodes cannot be told, or none of those that answer will have us.
    """

    def __init__(self, settings: Settings, source: Source, dial: DialMember) -> None:
        self.settings = settings
        self.name = settings.name
        self.metrics = Metrics(NODE_METRICS)
        self._source = source
        self._dial = dial
        self._pid = process_id()
        self._lock = threading.Lock()
        self._updating = threading.Lock()
        self._closed = False
        self._slabs: list[Slab] = []
        self._complaint = ""
        self._retired: list[Snapshot] = []
        self.workers = Workers(_MOST_WORKERS, "nodes")
        self._keeper = Background(self._keep, "kvstore-node-keeper")
        self._discovery = Background(self._discover, "kvstore-node-discovery")
        hedging = settings.hedge_reads and settings.replicas > 1
        self._scratch = BufferPool(settings.hedge_scratch) if hedging else None
        self._snapshot = Snapshot((), settings.replicas)
        try:
            self._begin()
        except BaseException:
            self.close()
            raise

    def _begin(self) -> None:
        try:
            members = self._source.read() or ()
        except OSError as error:
            if self.settings.discover != "dns":
                raise ConfigError(f"{self.name}: {error}", cause=error) from error
            members = ()  # the name may come to be known after us, when a cluster starts
            self._complain(error)
        nodes = [self._node(member) for member in members]
        self._snapshot = self._snap(nodes)  # so that `close` closes them
        self._greet(nodes)
        if self._source.watched:
            self._discovery.wake()

    # Use.

    def check(self, operation: str) -> None:
        """Raises `ClosedError`."""
        if self.forked:
            text = "this pool of nodes was opened before fork(); open another one in the child"
            raise ClosedError(text, backend=self.name, operation=operation)
        if self._closed:
            raise ClosedError("the pool of nodes is closed", backend=self.name, operation=operation)

    def use(self, operation: str) -> _Use:
        """The nodes as they are now, as a context manager: they stay open within the block. Raises `ClosedError`."""
        self.check(operation)
        with self._lock:
            snapshot = self._snapshot
            snapshot.users += 1
        return _Use(self, snapshot)

    def _leave(self, snapshot: Snapshot) -> None:
        with self._lock:
            snapshot.users -= 1
            idle = snapshot.retired and not snapshot.users
        if idle:
            self._keeper.wake()

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def forked(self) -> bool:
        """True in a process that was forked off."""
        return process_id() != self._pid

    @property
    def now(self) -> Snapshot:
        """The nodes as they are now, to look at."""
        return self._snapshot

    def register(self, slab: Slab) -> None:
        with self._lock:
            self.check("register")
            self._slabs.append(slab)
            nodes = self._all_nodes()
        for node in nodes:
            node.register(slab)

    # Membership.

    def _node(self, member: Member) -> Node:
        client = NodeClient(
            functools.partial(self._dial, member),
            name=f"node {member.name}",  # the pool of one node alone is called node://…, and counts apart
            lanes=self.settings.lanes,
            connect_timeout=self.settings.connect_timeout,
        )
        node = Node(member, client, on_down=self._keeper.wake, metrics=self.metrics)
        for slab in self._slabs:
            node.register(slab)
        return node

    def _snap(self, nodes: Sequence[Node], former: Former | None = None) -> Snapshot:
        self.metrics.set("kvstore_node_members", self.name, value=len(nodes))
        if nodes and len(nodes) < self.settings.replicas:
            logger.warning("%s: %d nodes, but replicas=%d", self.name, len(nodes), self.settings.replicas)
        return Snapshot(
            nodes, self.settings.replicas, former=former, scratch=self._scratch, metrics=self.metrics
        )  # fmt: skip

    def _greet(self, nodes: Sequence[Node]) -> None:
        """Ask each node about itself, all at once. A node that does not answer is no error here; if none of those that
        answer will have us, that is one.

        Raises:
            ConfigError: every node that answered refused us.
        """
        if not nodes:
            return
        deadline = time.monotonic() + 2 * self.settings.connect_timeout
        # A node starts UCX when it is first asked for it, which may take longer than a connection may; then it has it.
        tries = 2 if uses_ucx(self.settings) else 1
        errors = run_all(self.workers, [functools.partial(_greeted, node, deadline, tries) for node in nodes])
        for node, error in zip(nodes, errors, strict=True):
            if error is not None:
                logger.warning("%s: node %s: %s", self.name, node.member.name, error.message)
            elif node.client.note:
                transport, note = node.client.transport, node.client.note
                logger.info("%s: node %s over %s: %s", self.name, node.member.name, transport, note)
        refusals = [error for error in errors if isinstance(error, PermanentError)]
        if refusals and all(errors):
            raise ConfigError(refusals[0].message, backend=self.name, operation="open", cause=refusals[0])

    def update(self, members: Sequence[Member]) -> None:
        """Let these be the nodes from now on. Those that stay keep their connections; those that go serve the calls
        that are under way, and as former owners for `rebalance_grace`."""
        with self._updating:
            old = self._snapshot
            known = {node.member: node for node in old.nodes}
            if old.former is not None:
                known = {**{node.member: node for node in old.former.nodes}, **known}
            if [node.member for node in old.nodes] == list(members):
                return
            fresh = [member for member in members if member not in known]
            made = {member: self._node(member) for member in fresh}
            nodes = [known.get(member) or made[member] for member in members]
            try:
                self._greet([made[member] for member in fresh])
            except ConfigError as error:  # the others go on
                logger.warning("%s: %s", self.name, error)
            former = None
            if old.placement is not None and self.settings.rebalance_grace:
                until = time.monotonic() + self.settings.rebalance_grace
                former = Former(old.nodes, old.placement, until)
            self._swap(self._snap(nodes, former), [*made.values()])
        self.metrics.add("kvstore_node_membership_changes_total", self.name)
        logger.info("%s: nodes are now %s", self.name, ", ".join(member.name for member in members) or "none")

    def _swap(self, new: Snapshot, made: Sequence[Node] = ()) -> None:
        with self._lock:
            if not self._closed:
                old, self._snapshot = self._snapshot, new
                old.retired = True
                self._retired.append(old)
                for node in made:  # slabs may have come meanwhile; the second time does no harm
                    for slab in self._slabs:
                        node.register(slab)
                made = ()
        for node in made:  # closed meanwhile
            node.close()
        if made:
            new.close()
        self._keeper.wake()

    def _complain(self, error: Exception) -> None:
        self.metrics.add("kvstore_node_membership_errors_total", self.name)
        text = str(error)
        if text != self._complaint:  # not every few seconds
            logger.error("%s: the nodes cannot be told; they stay as they were: %s", self.name, text)
        self._complaint = text

    def _discover(self) -> float:
        try:
            members = self._source.read()
        except (ConfigError, OSError, ValueError) as error:
            self._complain(error)
        else:
            self._complaint = ""
            if members is not None:
                self.update(members)
        return self.settings.refresh

    def refresh(self) -> None:
        """Have membership looked at again now, in the background."""
        self._discovery.wake()

    # Keeping.

    def _all_nodes(self) -> list[Node]:
        """Those of the present, former ones, and those that calls still use. Called with the lock held."""
        found: dict[int, Node] = {}
        for snapshot in (self._snapshot, *self._retired):
            for node in (*snapshot.nodes, *(snapshot.former.nodes if snapshot.former is not None else ())):
                found[id(node)] = node
        return [*found.values()]

    def _keep(self) -> float:
        """Close what nobody uses any more, end the grace of former owners, and ask nodes that are down."""
        self._let_go()
        wait = self._end_grace()
        with self._lock:
            down = [node for node in self._all_nodes() if not (node.up and node.writable)]
        deadline = time.monotonic() + _JOIN_S
        back = run_all(self.workers, [functools.partial(node.ping, deadline) for node in down]) if down else []
        left = back.count(False)
        self.metrics.set("kvstore_node_down", self.name, value=left)
        return min(wait, _PROBE_EVERY_S) if left else wait

    def _let_go(self) -> None:
        with self._lock:
            before = self._all_nodes()
            unused = [snapshot for snapshot in self._retired if not snapshot.users]
            self._retired = [snapshot for snapshot in self._retired if snapshot.users]
            kept = {id(node) for node in self._all_nodes()}
        for snapshot in unused:
            snapshot.close()
        for node in before:
            if id(node) not in kept:
                node.close()

    def _end_grace(self) -> float:
        """Seconds until it ends."""
        former = self._snapshot.former
        if former is None:
            return math.inf
        left = former.until - time.monotonic()
        if left > 0:
            return left
        with self._updating:
            snapshot = self._snapshot
            if snapshot.former is former:
                self._swap(self._snap(snapshot.nodes))
        return 0.0

    # The end.

    def close(self) -> None:
        """Calls under way end soon. Waits up to a second for threads."""
        with self._lock:
            first, self._closed = not self._closed, True
            if not first:
                return
            nodes, snapshots = self._all_nodes(), [self._snapshot, *self._retired]
            self._retired = []
        self._discovery.close()
        self._keeper.close()
        self.workers.stop()
        for node in nodes:
            node.close()
        for snapshot in snapshots:
            snapshot.close()
        end = time.monotonic() + _JOIN_S
        for thread in (self._discovery, self._keeper):
            thread.join(max(0.0, end - time.monotonic()))
        self.workers.join(max(0.0, end - time.monotonic()))
        if self._scratch is not None:
            self._scratch.close()


def _greeted(node: Node, deadline: float, tries: int) -> KVStoreError | None:
    error: KVStoreError | None = None
    for _ in range(tries):
        try:
            node.client.info(deadline=deadline)
        except KVStoreError as raised:
            error = raised
            if not isinstance(raised.cause, DeadlinePassed):
                break
        else:
            return None
    return error
