"""`NodeBackend`: the memory and disks of many nodes as one pool. See the package."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from kvstore.backend import EXISTS, MISS, OK, Backend, Capability, KeyInfo, Limits, Outcome, Read, Status, Write
from kvstore.buffers import Buffer, Slab
from kvstore.errors import KVStoreError, TransientError
from kvstore.keys import Key
from kvstore.metrics import Metrics
from kvstore.registry import BackendURL
from kvstore.wrappers.base import LocalWait

from .announcing import Announcer
from .background import run_all
from .dial import DialMember, dialler
from .errors import NodeDown, NodeSilent, error_of, for_another
from .margin import Margin
from .members import DnsSource, FileSource, FixedSource, Resolve, Source
from .node import Node
from .options import OPTIONS, Settings, settings_from_url
from .pool import Pool
from .repair import Repairer
from .snapshot import Snapshot

__all__ = ["NodeBackend"]

_CLOSE_S = 1.0

Ask = Callable[[Backend, Sequence[int], float], list[Outcome]]
"""One call of a node (or of what reads through it) about the items of these indices, which ends at that time."""


class NodeBackend(Backend):
    """See the package.

    Args:
        settings: which nodes, and how they are used.
        dial: how to connect to one; None: as the settings say.
        resolve: for `discover=dns`; None: the system's resolver.

    Raises:
        ConfigError: the nodes cannot be told, or all that answer refuse us (a wrong token, another version, …).
    """

    options = OPTIONS

    def __init__(self, settings: Settings, *, dial: DialMember | None = None, resolve: Resolve | None = None) -> None:
        source: Source
        if settings.discover == "file":
            source = FileSource(settings.path)
        elif settings.discover == "dns":
            source = DnsSource(settings.members[0].address, resolve)
        else:
            source = FixedSource(settings.members)
        self.name = settings.name
        self.settings = settings
        self.identity = ("node", settings.path, settings.namespace, frozenset(m.address for m in settings.members))
        self.pool = Pool(settings, source, dial or dialler(settings))
        self.metrics: Metrics = self.pool.metrics
        self._margin = Margin()
        self._announcer = Announcer(self.pool)
        self.repairer = Repairer(
            self.name, rate=settings.repair_rate, memory=settings.repair_memory, metrics=self.metrics
        )

    @classmethod
    def from_url(cls, url: BackendURL, options: Mapping[str, Any]) -> NodeBackend:
        """See `settings_from_url`. Connects to the nodes, within twice `connect_timeout`; those that do not answer are
        no error."""
        return cls(settings_from_url(url, options))

    @property
    def capabilities(self) -> Capability:  # type: ignore[override]
        """What every node can, and LEASE if any has memory in common with us."""
        return self.pool.now.capabilities

    @property
    def limits(self) -> Limits:  # type: ignore[override]
        """The tightest of the nodes' bounds; lanes of all of them together."""
        return self.pool.now.limits

    # Asking nodes.

    def _late(self, operation: str, count: int) -> list[Outcome]:
        error = TransientError("the deadline passed before it was asked", backend=self.name, operation=operation)
        return [Outcome.failed(error)] * count

    def _nobody(self, operation: str, count: int) -> list[Outcome]:
        error = TransientError("no node is known", backend=self.name, operation=operation)
        return [Outcome.failed(error)] * count

    def _fan(self, groups: Sequence[tuple[Backend, Sequence[int]]], ask: Ask, until: float) -> list[list[Outcome]]:
        """Ask each about its items, all at once; the first in this thread."""
        return run_all(self.pool.workers, [functools.partial(ask, backend, items, until) for backend, items in groups])

    def _ask_all(
        self, owners: Mapping[int, Sequence[Node]], ask: Ask, until: float
    ) -> list[tuple[Node, Sequence[int], list[Outcome]]]:
        """Ask every owner of each item: (node, items, outcomes) of each call."""
        groups: dict[int, tuple[Node, list[int]]] = {}
        for item, nodes in owners.items():
            for node in nodes:
                groups.setdefault(id(node), (node, []))[1].append(item)
        asked = sorted(groups.values(), key=lambda group: group[0].stuck())  # see `Snapshot.choose`
        answers = self._fan([(node, items) for node, items in asked], ask, until) if asked else []
        return [(node, items, outcomes) for (node, items), outcomes in zip(asked, answers, strict=True)]

    def _excused(
        self, snapshot: Snapshot, operation: str, outcomes: list[Outcome], until: float, *, reads: bool
    ) -> list[Outcome]:
        """Make of the trouble of one node of several what it is for the pool: of a read whose nodes are all down a
        miss, of anything else an error that does not count against the pool. If no node is up, it is the pool's."""
        self._margin.note(until)
        if not any(map(error_of, outcomes)):
            return outcomes
        outcomes = [*outcomes]
        some_up = len(snapshot.nodes) > 1 and any(node.up if reads else node.writable for node in snapshot.nodes)
        late = time.monotonic() >= until
        unreachable = 0
        for at, outcome in enumerate(outcomes):
            error = outcome.error
            if not isinstance(error, TransientError):
                continue
            if isinstance(error, NodeDown) and not some_up:
                plain = TransientError(error.message, backend=error.backend, operation=operation, cause=error)
                outcomes[at] = Outcome.failed(plain)
            elif isinstance(error, NodeDown) and reads:
                outcomes[at] = MISS
                unreachable += 1
            elif some_up and (late or not isinstance(error, LocalWait)):
                kind = NodeSilent if late else NodeDown
                down = kind(error.message, backend=error.backend, operation=operation, key=error.key, cause=error)
                outcomes[at] = Outcome.failed(down)
        if unreachable:
            self.metrics.add("kvstore_node_unreachable_reads_total", self.name, amount=unreachable)
        return outcomes

    # Reading.

    def stat(self, keys: Sequence[Key], *, deadline: float) -> list[Outcome]:
        def ask(backend: Backend, items: Sequence[int], until: float) -> list[Outcome]:
            some = keys if len(items) == len(keys) else [keys[at] for at in items]
            return backend.stat(some, deadline=until)

        return self._read("stat", keys, [1] * len(keys), ask, deadline)

    def get_into(self, reads: Sequence[Read], *, deadline: float) -> list[Outcome]:
        def ask(backend: Backend, items: Sequence[int], until: float) -> list[Outcome]:
            some = reads if len(items) == len(reads) else [reads[at] for at in items]
            return backend.get_into(some, deadline=until)

        return self._read("get", [read[0] for read in reads], [len(read[1]) for read in reads], ask, deadline)

    def _read(
        self, operation: str, keys: Sequence[Key], sizes: Sequence[int], ask: Ask, deadline: float
    ) -> list[Outcome]:
        with self.pool.use(operation) as snapshot:
            if not keys:
                return []
            if time.monotonic() >= deadline:
                return self._late(operation, len(keys))
            if len(snapshot.nodes) == 1 and snapshot.former is None:
                outcomes = ask(snapshot.readers[0], range(len(keys)), deadline)
                return self._excused(snapshot, operation, outcomes, deadline, reads=True)
            groups = snapshot.choose(keys, sizes)
            if not groups:
                return self._nobody(operation, len(keys))
            until = self._margin.before(deadline)
            answers = self._fan([(snapshot.readers[index], items) for index, items in groups.items()], ask, until)
            if len(groups) == 1:
                outcomes = [*answers[0]]
            else:
                outcomes = [MISS] * len(keys)
                for items, some in zip(groups.values(), answers, strict=True):
                    for at, outcome in zip(items, some, strict=True):
                        outcomes[at] = outcome
            if snapshot.replicas > 2:
                self._ask_further(snapshot, groups, keys, outcomes, ask, until)
            if snapshot.former is not None:
                self._ask_former(snapshot, keys, outcomes, ask, until)
            if snapshot.replicas > 1 and self.settings.read_repair:
                self._repair(snapshot, keys, outcomes)
            return self._excused(snapshot, operation, outcomes, until, reads=True)

    def _ask_further(
        self, snapshot: Snapshot, groups: Mapping[int, Sequence[int]], keys: Sequence[Key], outcomes: list[Outcome],
        ask: Ask, until: float,
    ) -> None:  # fmt: skip
        """The third replica and those behind it: two were asked."""
        chosen = {at: index for index, items in groups.items() for at in items}
        rings: dict[int, list[Node]] = {}
        for at, outcome in enumerate(outcomes):
            if not outcome.ok:
                owners = snapshot.owners(keys[at])
                first = owners.index(snapshot.nodes[chosen[at]])
                rings[at] = [owners[(first + step) % len(owners)] for step in range(2, len(owners))]
        self._ask_in_turn(rings, outcomes, ask, until)

    def _ask_in_turn(
        self, rings: Mapping[int, Sequence[Node]], outcomes: list[Outcome], ask: Ask, until: float
    ) -> list[int]:
        """Of each item its nodes, one after the other, until one has it. Returns the items that were found."""
        found: list[int] = []
        turn = 0
        while rings:
            rings = {at: nodes for at, nodes in rings.items() if len(nodes) > turn and not outcomes[at].ok}
            for _, items, some in self._ask_all(
                {at: nodes[turn : turn + 1] for at, nodes in rings.items()}, ask, until
            ):
                for at, outcome in zip(items, some, strict=True):
                    if outcome.ok:
                        outcomes[at] = outcome
                        found.append(at)
            turn += 1
        return found

    def _ask_former(
        self, snapshot: Snapshot, keys: Sequence[Key], outcomes: list[Outcome], ask: Ask, until: float
    ) -> None:
        """The nodes that held the keys before nodes came or went, about what is not found; what they have is given to
        those that hold it now."""
        former = snapshot.former
        if former is None or all(outcome.ok for outcome in outcomes) or time.monotonic() >= former.until:
            return
        rings: dict[int, list[Node]] = {}
        for at, outcome in enumerate(outcomes):
            if outcome.status is Status.MISS or isinstance(outcome.error, TransientError):
                now = snapshot.owners(keys[at])
                rings[at] = [node for node in former.owners(keys[at]) if node not in now and node.up]
        found = self._ask_in_turn(rings, outcomes, ask, until)
        if not found:
            return
        self.metrics.add("kvstore_node_former_hits_total", self.name, amount=len(found))
        if self.settings.read_repair:
            for key in {keys[at] for at in found}:
                for node in snapshot.owners(key):
                    self.repairer.offer([key], node, [n for n in former.owners(key) if n is not node])

    def _repair(self, snapshot: Snapshot, keys: Sequence[Key], outcomes: Sequence[Outcome]) -> None:
        """What a replica missed and another one had is given to it."""
        short = [node for node in snapshot.nodes if node.missed]
        if not short:
            return
        hits = {key for key, outcome in zip(keys, outcomes, strict=True) if outcome.ok}
        for node in short:
            for key in node.missed.intersection(hits):
                owners = snapshot.owners(key)
                if node in owners:
                    self.repairer.offer([key], node, [owner for owner in owners if owner is not node])
            node.missed.difference_update(keys)

    def lease(self, keys: Sequence[Key], *, deadline: float) -> list[Buffer | None]:
        """Of the nodes that have memory in common with us."""
        with self.pool.use("lease") as snapshot:
            leases: list[Buffer | None] = [None] * len(keys)
            groups = snapshot.choose(keys, [1] * len(keys))
            until = self._margin.before(deadline) if len(groups) > 1 else deadline
            calls = [
                functools.partial(snapshot.nodes[index].lease, [keys[at] for at in items], deadline=until)
                for index, items in groups.items()
            ]
            for items, some in zip(groups.values(), run_all(self.pool.workers, calls), strict=True):
                for at, lease in zip(items, some, strict=True):
                    leases[at] = lease
            return leases

    # Writing.

    def put(self, writes: Sequence[Write], *, deadline: float) -> list[Outcome]:
        """The first of a key's nodes that answers decides whether the record is new: only then do the others get it,
        all at once. So two writers with different bytes leave the same ones everywhere."""

        def ask(backend: Backend, items: Sequence[int], until: float) -> list[Outcome]:
            some = writes if len(items) == len(writes) else [writes[at] for at in items]
            return backend.put(some, deadline=until)

        with self.pool.use("put") as snapshot:
            if not writes:
                return []
            if time.monotonic() >= deadline:
                return self._late("put", len(writes))
            if snapshot.placement is None:
                return self._nobody("put", len(writes))
            if len(snapshot.nodes) == 1 and snapshot.former is None:  # it knows what to do about equal keys
                outcomes = ask(snapshot.nodes[0], range(len(writes)), deadline)
                return self._excused(snapshot, "put", outcomes, deadline, reads=False)
            outcomes = [MISS] * len(writes)  # each is replaced
            first: dict[Key, int] = {}
            for at, write in enumerate(writes):
                first.setdefault(write[0], at)
            owners = {at: snapshot.owners(key) for key, at in first.items()}
            until = self._margin.before(deadline) if len(snapshot.nodes) > 1 else deadline
            stored, failed = self._put_first(owners, outcomes, ask, until)
            if snapshot.replicas > 1:
                self._put_others(writes, owners, stored, failed, outcomes, ask, until)
            if len(first) != len(writes):
                for at, write in enumerate(writes):
                    if (before := first[write[0]]) != at:  # the first of equal keys wins; if it failed, so does this
                        outcomes[at] = EXISTS if outcomes[before].stored else outcomes[before]
            return self._excused(snapshot, "put", outcomes, until, reads=False)

    def _put_first(
        self, owners: Mapping[int, Sequence[Node]], outcomes: list[Outcome], ask: Ask, until: float
    ) -> tuple[dict[int, Node], dict[int, list[Node]]]:
        """Store each item at the first of its nodes that takes it. While others could still be asked a node gets half
        of the time that is left, so that one that hangs leaves the other half to the next.

        Returns:
            Where items were stored that were new; and for each item the nodes that failed.
        """
        stored: dict[int, Node] = {}
        failed: dict[int, list[Node]] = {}
        left: Mapping[int, Sequence[Node]] = owners
        while left:
            again: dict[int, Sequence[Node]] = {}
            now = time.monotonic()
            half = now + (until - now) / 2 if now < until and any(len(nodes) > 1 for nodes in left.values()) else until
            for node, items, some in self._ask_all({at: nodes[:1] for at, nodes in left.items()}, ask, half):
                for at, outcome in zip(items, some, strict=True):
                    error = outcome.error
                    if outcomes[at].error is None or error is None or not isinstance(error, NodeDown):
                        outcomes[at] = outcome  # of several errors the last that says more than "down"
                    if outcome.ok:
                        stored[at] = node
                    elif error is not None and for_another(error):
                        failed.setdefault(at, []).append(node)
                        if len(left[at]) > 1:
                            again[at] = left[at][1:]
            left = again
        return stored, failed

    def _put_others(
        self, writes: Sequence[Write], owners: Mapping[int, Sequence[Node]], stored: Mapping[int, Node],
        failed: Mapping[int, Sequence[Node]], outcomes: list[Outcome], ask: Ask, until: float,
    ) -> None:  # fmt: skip
        """The other replicas of what is new. Those that failed already are not asked again: one that hangs would cost
        the rest of the time."""
        others = {
            at: [node for node in owners[at] if node is not where and node not in failed.get(at, ())]
            for at, where in stored.items()
        }
        copies = dict.fromkeys(stored, 1)
        short: list[tuple[int, Node]] = [(at, node) for at in stored for node in failed.get(at, ())]
        for node, items, some in self._ask_all(others, ask, until):
            for at, outcome in zip(items, some, strict=True):
                if outcome.stored:
                    copies[at] += 1
                else:
                    short.append((at, node))
        if not short:
            return
        self.metrics.add("kvstore_node_underreplicated_puts_total", self.name, amount=len(short))
        if self.settings.read_repair:
            for at, node in short:
                if node.writable:
                    self.repairer.offer([writes[at][0]], node, [stored[at]])
        for at, count in copies.items():
            if count < self.settings.write_quorum:
                text = f"stored on {count} of {len(owners[at])} nodes, write_quorum is {self.settings.write_quorum}"
                error = TransientError(text, backend=self.name, operation="put", key=writes[at][0])
                outcomes[at] = Outcome.failed(error)

    # Removing.

    def _owners_ever(self, snapshot: Snapshot, keys: Sequence[Key]) -> dict[int, list[Node]]:
        """All nodes that may hold each key."""
        former = snapshot.former
        owners = {}
        for at, key in enumerate(keys):
            nodes = snapshot.owners(key)
            if former is not None:
                nodes += [node for node in former.owners(key) if node not in nodes]
            owners[at] = nodes
        return owners

    def delete(self, keys: Sequence[Key], *, deadline: float) -> list[Outcome]:
        """From all nodes that may hold each. OK if one had it and the others that answer have it no more; a node that
        is down keeps what it has."""
        return self._remove("delete", keys, deadline)

    def quarantine(self, keys: Sequence[Key], *, deadline: float) -> list[Outcome]:
        """At all nodes that may hold each. Where it was not read its bytes are not known to be corrupt, and a node
        says MISS; if another one has put it aside, the record is deleted there, or the name would not be free."""
        return self._remove("quarantine", keys, deadline)

    def _remove(self, operation: str, keys: Sequence[Key], deadline: float) -> list[Outcome]:
        with self.pool.use(operation) as snapshot:
            if not keys:
                return []
            if time.monotonic() >= deadline:
                return self._late(operation, len(keys))
            if snapshot.placement is None:
                return self._nobody(operation, len(keys))

            def ask(backend: Backend, items: Sequence[int], until: float) -> list[Outcome]:
                call = backend.delete if operation == "delete" else backend.quarantine
                return call([keys[at] for at in items], deadline=until)

            def remove(backend: Backend, items: Sequence[int], until: float) -> list[Outcome]:
                return backend.delete([keys[at] for at in items], deadline=until)

            owners = self._owners_ever(snapshot, keys)
            until = self._margin.before(deadline) if len(snapshot.nodes) > 1 else deadline
            outcomes: list[Outcome] = [MISS] * len(keys)
            had: dict[int, list[Node]] = {}
            for node, items, some in self._ask_all(owners, ask, until):
                for at, outcome in zip(items, some, strict=True):
                    if outcome.ok:
                        outcomes[at] = OK
                        had.setdefault(at, []).append(node)
                    elif outcomes[at] is MISS:
                        outcomes[at] = outcome
            if operation == "quarantine":
                rest = {at: [node for node in owners[at] if node not in nodes] for at, nodes in had.items()}
                self._ask_all(rest, remove, until)
            return self._excused(snapshot, operation, outcomes, until, reads=False)

    # The rest.

    def list(self, *, deadline: float) -> Iterator[Sequence[KeyInfo]]:
        """One node after the other. A record that several nodes hold is told of once: of 32 bytes and some, each, that
        is remembered for the time.

        Raises:
            TransientError: also if a node could not be listed, when all others have been.
        """
        self.pool.check("list")
        return self._pages(deadline)

    def _pages(self, deadline: float) -> Iterator[Sequence[KeyInfo]]:
        with self.pool.use("list") as snapshot:
            former = snapshot.former
            nodes = [*snapshot.nodes]
            if former is not None:
                nodes += [node for node in former.nodes if node not in nodes]
            seen: set[Key] | None = set() if snapshot.replicas > 1 or former is not None else None
            trouble: KVStoreError | None = None
            for node in nodes:
                try:
                    for page in node.list(deadline=deadline):
                        self.pool.check("list")
                        found = [info for info in page if self._holds(snapshot, node, info.key)]
                        if seen is not None:
                            found = [info for info in found if info.key not in seen]
                            seen.update(info.key for info in found)
                        if found:
                            yield found
                except TransientError as error:
                    trouble = error
                    if time.monotonic() >= deadline:
                        break
            if trouble is not None:
                text = f"not all nodes could be listed: {trouble.message}"
                raise TransientError(text, backend=self.name, operation="list", cause=trouble)

    @staticmethod
    def _holds(snapshot: Snapshot, node: Node, key: Key) -> bool:
        """Whether `key` is looked for at `node`: what is left there from before nodes came or went is not."""
        if len(snapshot.nodes) == 1 and snapshot.former is None:
            return True
        if node in snapshot.owners(key):
            return True
        return snapshot.former is not None and node in snapshot.former.owners(key)

    def announce(self, waiting: Sequence[Sequence[Key]]) -> None:
        """The scheduler's waiting queue, first to run first: the keys of each job. Nodes bring them into memory from
        below. Replaces the last one; an empty one ends it. Returns at once; trouble is no error. Raises `ClosedError`.
        """
        self._announcer.announce(waiting)

    def register(self, slab: Slab) -> None:
        self.pool.register(slab)

    def stats(self) -> dict[str, Any]:
        """The nodes with their state and transport, and what was counted (`metrics`)."""
        nodes = {
            node.member.name: {
                "address": node.member.address, "weight": node.member.weight, "state": node.state.name.lower(),
                "transport": node.client.transport, "note": node.client.note, "outstanding": node.outstanding,
            }
            for node in self.pool.now.nodes
        }  # fmt: skip
        return {"nodes": nodes, "metrics": self.metrics.snapshot()}

    def close(self) -> None:
        if self.pool.forked:
            return
        self._announcer.close()
        self.repairer.close()
        self.pool.close()
        self.repairer.join(_CLOSE_S)

    def __repr__(self) -> str:
        return f"<NodeBackend {self.name!r}{', closed' * self.pool.closed}>"
