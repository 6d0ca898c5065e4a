"""`Instance`: what a daemon lets be seen and done. The control API is an HTTP face of this class, and nothing more.

The node implements it (`kvstore_backends.node_control.NodeInstance`); nothing here knows nodes, tiers or HTTP. All
calls are batched and may come from several threads. Namespaces are those of the node, by name; "" is the default one.
Who may see which is decided above (`kvstore.control.access`): an instance does what it is told.

A namespace, tier or job that does not exist is `UnknownError`; what cannot be done as asked is a `ConfigError` that
names the input; trouble on the way (late, busy) is a `TransientError`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvstore.errors import ConfigError
from kvstore.keys import Key

from .journal import Events, Journal

__all__ = [
    "DONE",
    "FAILED",
    "RUNNING",
    "Health",
    "Instance",
    "InstanceInfo",
    "Job",
    "SnapshotPage",
    "TierUsage",
    "UnknownError",
]

RUNNING, DONE, FAILED = "running", "done", "failed"


class UnknownError(ConfigError):
    """There is no such namespace, tier, instance or job here."""


@dataclass(frozen=True, slots=True)
class InstanceInfo:
    """Who an instance is. Does not change while it runs.

    Attributes:
        name: unique among the instances that report to one controller; printable, at most 128 bytes, none of `/ , @`.
        address: "host:port" for clients by `node://`, "" without TCP.
        unix: path of its Unix socket, "" without one.
        http: URL of its control API, as others reach it, "" without one.
        version: of kvstore.
        namespaces: names; "" is the default one.
        tiers: names of the tiers, the fastest first.
        started: seconds since the epoch.
    """

    name: str
    address: str
    unix: str
    http: str
    version: str
    namespaces: Sequence[str]
    tiers: Sequence[str]
    started: float


@dataclass(frozen=True, slots=True)
class TierUsage:
    """A tier of a namespace now.

    Attributes:
        namespace: "" is the default one.
        name: of the tier; "memory", "disk", "remote".
        url: where it is, without secrets; "" for memory.
        used: bytes of its records.
        capacity: bytes; 0: unbounded, or unknown.
        records: number of them; -1: unknown.
        pinned: records that are pinned.
        hits: records read from it since the start.
        evicted: records that left it for want of room since the start.
    """

    namespace: str
    name: str
    url: str
    used: int
    capacity: int
    records: int
    pinned: int = 0
    hits: int = 0
    evicted: int = 0


@dataclass(frozen=True, slots=True)
class Health:
    """How an instance is.

    Attributes:
        ok: it serves.
        ready: it takes new clients (not draining, tiers usable).
        load: 0: idle, 1: as busy as it may be; the part of the memory for requests under way that is held, or more if
            requests wait.
        problems: sentences for the person on call, without secrets.
    """

    ok: bool
    ready: bool
    load: float
    problems: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Job:
    """Something that goes on behind a call.

    Attributes:
        id: as `clear`, `move` and `transcode` returned it.
        namespace: it works in.
        kind: "clear", "move", "transcode".
        state: `RUNNING`, `DONE` or `FAILED`.
        done: records it has dealt with.
        total: records it will deal with; -1: not known yet.
        failed: records of `done` that it could not do.
        nbytes: bytes moved, freed or saved.
        error: why it failed, or the first failure of a record; "".
    """

    id: str
    namespace: str
    kind: str
    state: str
    done: int = 0
    total: int = -1
    failed: int = 0
    nbytes: int = 0
    error: str = ""
    started: float = field(default=0.0, compare=False)  # seconds since the epoch


class SnapshotPage(NamedTuple):
    """Some of the records that an instance holds.

    Attributes:
        namespace, tier: where they are.
        keys: the digests, joined: 32 bytes each (`journal.split_keys`).
    """

    namespace: str
    tier: str
    keys: bytes


class Instance(ABC):
    """One daemon, as its control API sees it. See the module's docstring for what every call has in common.

    `deadline` is absolute, seconds of `time.monotonic()`: a call ends by then, with a `TransientError` if need be. Jobs
    have none: they go on in the background, a bounded number at a time, until they are done or the instance closes.

    Attributes:
        journal: where its tiers note what comes and goes.
    """

    journal: Journal

    @abstractmethod
    def info(self) -> InstanceInfo:
        """Who it is."""

    @abstractmethod
    def lookup(self, namespace: str, keys: Sequence[Key], *, deadline: float) -> list[str | None]:
        """The fastest tier that has each record; None: it is not here. Changes no recency and reads no record."""

    @abstractmethod
    def pin(self, namespace: str, keys: Sequence[Key], *, ttl_s: float, deadline: float) -> list[bool]:
        """Keep records in the fastest tier that has them until `unpin`, or for `ttl_s` seconds from now. Pinning again
        sets the time anew; pins are not counted. False: the record is not here, or may not be pinned because too
        much is."""

    @abstractmethod
    def unpin(self, namespace: str, keys: Sequence[Key], *, deadline: float) -> list[bool]:
        """Let pinned records go as others do. False: it was not pinned."""

    @abstractmethod
    def clear(
        self, namespace: str, *, model: str | None = None, keys: Sequence[Key] | None = None,
        prefix: Sequence[Key] | None = None,
    ) -> str:  # fmt: skip
        """Remove records from all tiers that this instance owns; what is shared with other instances (a remote tier)
        as well. At most one of the three is given; none of them: all of the namespace.

        Args:
            model: those whose record names this model.
            keys: these.
            prefix: the chunks of a prompt, head first: these, and what is known to hang on the last of them.

        Returns:
            the id of a job; its `done` counts records removed.
        """

    @abstractmethod
    def move(self, namespace: str, keys: Sequence[Key], *, src: str, dst: str) -> str:
        """Move records from tier `src` to `dst`: a tier of this instance, or "host:port" of another instance, whose
        namespace of the same name gets them. A record leaves `src` only once `dst` has acknowledged it. Pinned ones
        stay and count as failed.

        Returns:
            the id of a job.
        """

    @abstractmethod
    def transcode(self, namespace: str, keys: Sequence[Key], *, codec: str, level: int | None) -> str:
        """Encode stored records anew; "raw" decodes them. Their names stay, so only codecs that lose nothing can be
        used: others are refused with a `ConfigError`.

        Returns:
            the id of a job; its `nbytes` counts bytes saved (negative: they take more now).
        """

    @abstractmethod
    def job(self, job_id: str) -> Job:
        """A job, under way or among the last that ended. Raises `UnknownError`."""

    @abstractmethod
    def usage(self) -> Sequence[TierUsage]:
        """All tiers of all namespaces, namespace by namespace, the fastest tier first. Cheap: nothing is listed."""

    @abstractmethod
    def health(self, *, deadline: float) -> Health:
        """How it is. Cheap: nothing is read or written."""

    @abstractmethod
    def snapshot(self, *, deadline: float) -> Iterator[SnapshotPage]:
        """Pages of what all tiers hold, in any order; records that come or go meanwhile may be in or out. Tiers that
        are shared by many instances (a remote one) are left out. Raises `TransientError` at the deadline."""

    def events(self, since: int, *, limit: int = 1 << 16, timeout: float = 0.0) -> Events:
        """What came and went behind event `since`; see `Journal.read`. A gap: take a snapshot."""
        return self.journal.read(since, limit=limit, timeout=timeout)
