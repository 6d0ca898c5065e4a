"""`mooncake://MASTER:PORT/prefix`: records in Mooncake Store, an existing distributed engine, through its own client.

    mooncake://10.0.0.5:50051?protocol=rdma&device=mlx5_0&copies=2

`mooncake_master` keeps the names, other processes offer the memory (`mooncake_client`, or clients with a `segment`).
This client offers none unless `segment` says so. It needs the wheel `mooncake-transfer-engine` (CUDA) or
`mooncake-transfer-engine-non-cuda`, and of the system libibverbs1, libnuma1, libcurl4.

**Copies.** Writing: none from memory that is registered (`register`: a store registers its pools), else one, into
registered staging memory; nothing is joined (`_mooncake_writes` says how). Reading: one, from staging memory into
`dst`. With `direct_reads` none, for `dst` in registered memory; then a call that Mooncake holds up returns only when
Mooncake lets go of `dst`, perhaps after its deadline. Under a store that is harmless, for the store answers at the
deadline by itself and keeps the memory pinned; it pays with RDMA.

**Deadlines.** Mooncake's calls block without one, so they run in `lanes` + 4 threads. A call of ours returns by its
deadline; Mooncake's goes on in its thread, in staging memory that is held until it ends. Two things freeze the whole
process, since Mooncake keeps Python's GIL there: joining (at the first call) and leaving (`close`). A master that
refuses connections is found out before that; one that hangs costs 2 s (`MC_RPC_TIMEOUT_MS`).

**Leases.** Every lookup and read gives an object a lease (the master's `-default_kv_lease_ttl`, 10 s). Within it the
master does not evict the object. So `stat` changes recency, which cannot be helped. `delete` waits until the lease has
ended, as long as its deadline allows, unless `force_delete` is set, which may hand a reader under way the bytes of
another record (the store's checksums notice). `quarantine` does not wait: its bytes are corrupt anyway. A read that
takes longer than the lease fails with LEASE_EXPIRED, a `TransientError`: on slow links, raise the lease time.

**Objects** are named `prefix` + key in hexadecimal, and hold 32 bytes (magic "KVMC", version, length, 16 random bytes)
and the record. Mooncake's client cannot list; `list` is not offered. `quarantine` keeps nothing aside.

After `os.fork()` a backend that was opened before raises `ClosedError` in the child. A child must end with `os._exit`,
as those of `multiprocessing` do: Mooncake's own exit handlers crash in a child.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvstore.backend import MISS, OK, Backend, Capability, Limits, Outcome, Read, Status, Write
from kvstore.buffers import BufferPool, Slab, copy_bytes
from kvstore.errors import ClosedError, ConfigError, KVStoreError, PermanentError
from kvstore.keys import Key
from kvstore.options import Option
from kvstore.registry import BackendURL

from ._mooncake_calls import Call, Calls, Late
from ._mooncake_client import BUSY, DEFAULT_PORT, LEASED, MISSING, NOT_READY, Client, Settings, error_of, load
from ._mooncake_reads import HEADER_BYTES, Landed, Reader, Seen, names_of
from ._mooncake_writes import Job, Writer

__all__ = ["MooncakeBackend", "Settings"]

MIB = 1 << 20
_WRONG_VIEW = (TypeError, ValueError, BufferError, NotImplementedError)
_LEASE_POLL_S = (0.02, 0.5)

Work = Callable[[Call, list[Outcome | None]], None]


class MooncakeBackend(Backend):
    """Records in Mooncake Store. See the module's docstring.

    Raises:
        ConfigError: Mooncake's client is not installed, or cannot be loaded.
    """

    options = (
        Option("metadata", "str", "P2PHANDSHAKE", "Metadata server of the transfer engine: `P2PHANDSHAKE` (none), or "
               "http://…, etcd://…, redis://…, the same for all clients."),
        Option("protocol", "choice", "tcp", "How bytes move; `rdma` needs the host's verbs.", choices=("tcp", "rdma")),
        Option("device", "str", None, "RDMA devices, e.g. mlx5_0,mlx5_1; unset: Mooncake chooses."),
        Option("local_host", "str", None, "Address under which others reach this client; unset: the one that the "
               "master is reached from."),
        Option("tenant", "str", "default", "Tenant within the Mooncake Store."),
        Option("segment", "size", 0, "Memory that this process offers to the store; 0: none, a pure client."),
        Option("local_buffer", "size", 0, "Mooncake's own buffer, for other users of its client in this process."),
        Option("staging", "size", 64 * MIB, "Registered memory for what does not lie in registered memory.",
               minimum=MIB),
        Option("lanes", "int", 4, "Calls at a time; four more may be under way past their deadline.", minimum=1,
               maximum=64),
        Option("copies", "int", 1, "Copies of each record that Mooncake keeps, on different segments.", minimum=1,
               maximum=64),
        Option("max_value", "size", 1 << 30, "Largest record accepted.", minimum=1),
        Option("direct_reads", "bool", False, "Read into registered memory without a copy; a call that Mooncake holds "
               "up then returns after its deadline."),
        Option("force_delete", "bool", False, "Delete records that are leased to readers."),
    )  # fmt: skip

    def __init__(self, settings: Settings) -> None:
        load(settings.local_host)
        self.settings = settings
        self.name = settings.name
        self.identity = ("mooncake", settings.master, settings.tenant, settings.prefix)
        self.capabilities = (
            Capability.RANGED_READ | Capability.NATIVE_BATCH | Capability.REGISTERED_MEMORY | Capability.SHARED
        )
        if not settings.segment:  # else the records that lie here go with this process
            self.capabilities |= Capability.DURABLE
        self.limits = Limits(settings.max_value, 1, settings.lanes, 4 * MIB)
        self._pool = BufferPool(settings.staging)
        piece = max(64 << 10, self._pool.largest // (2 * settings.lanes))
        self._client = Client(settings, self._pool.slabs[0].view[:])
        self._seen = Seen()
        self._reader = Reader(self._client, self._pool, self._seen, piece)
        self._writer = Writer(self._client, self._pool, piece)
        self._calls = Calls(self.name, settings.lanes, self._leave)

    @classmethod
    def from_url(cls, url: BackendURL, options: Mapping[str, Any]) -> MooncakeBackend:
        """Joins at the first call; a master that is not there is a `TransientError` of that call.

        Raises:
            ConfigError: the URL names no master, or Mooncake's client is not installed.
        """
        host, bracket, rest = url.authority.rpartition("]")  # [IPv6]:port
        name, _, port = (rest if bracket else url.authority).partition(":")
        host = host.removeprefix("[") if bracket else name
        number = int(port or DEFAULT_PORT) if "," not in port else 0  # digits: `parse_url` has seen to it
        if not host or "," in url.authority or any(map(str.isspace, host)) or not 0 < number < 65536:
            raise ConfigError(
                f"mooncake:// names the one master it joins, mooncake://host:{DEFAULT_PORT}/prefix, "
                f"not {url.authority!r}"
            )
        prefix = url.path.strip("/")
        return cls(Settings(master=(host, number), prefix=f"{prefix}/" if prefix else "", **options))

    # What all calls share.

    def _call(
        self, operation: str, count: int, deadline: float, work: Work, landed: Callable[[Landed], None] | None = None
    ) -> list[Outcome]:
        """Have `work` set the outcomes of `count` items; what it has not set by the deadline is late."""
        self._calls.check(operation)
        outcomes: list[Outcome | None] = [None] * count
        if not count:
            return []
        call = Call(operation, deadline)
        missing: Outcome | None = None
        try:
            if time.monotonic() >= deadline:
                raise Late
            self._calls.start(call, lambda call: work(call, outcomes))
            for piece in call.pieces():
                try:
                    if landed is not None and isinstance(piece, Landed):
                        landed(piece)
                finally:
                    piece.release()
        except Late:
            missing = self._calls.late(operation)
        except ClosedError:
            raise
        except KVStoreError as error:
            missing = Outcome.failed(error)
        finally:
            call.leave()
        given, late = list(outcomes), missing or self._calls.late(operation)
        return [late if outcome is None else outcome for outcome in given]

    def _failed(self, code: int, operation: str, key: Key) -> Outcome:
        if code in (MISSING, NOT_READY):
            return MISS
        return Outcome.failed(error_of(code, backend=self.name, operation=operation, key=key))

    # The contract.

    def stat(self, keys: Sequence[Key], *, deadline: float) -> list[Outcome]:
        names = names_of(self.settings.prefix, keys)

        def work(call: Call, outcomes: list[Outcome | None]) -> None:
            store = self._client.joined("stat")
            there = []
            for index, code in enumerate(store.batch_is_exist(names)):
                if code == 1:
                    there.append(index)
                else:
                    outcomes[index] = MISS if code == 0 else self._failed(code, "stat", keys[index])
            # Only of those that exist: Mooncake writes a line to its log for each that does not.
            found = store.batch_get_replica_desc([names[index] for index in there]) if there else {}
            for index in there:
                size = _size_of(found.get(names[index], ()))
                if size is None:
                    size = store.get_size(names[index])
                outcomes[index] = (
                    Outcome(Status.OK, max(0, size - HEADER_BYTES))
                    if size >= 0
                    else self._failed(size, "stat", keys[index])
                )

        return self._call("stat", len(keys), deadline, work)

    def get_into(self, reads: Sequence[Read], *, deadline: float) -> list[Outcome]:
        self._calls.check("get")
        pieces = self._reader.plan(reads, names_of(self.settings.prefix, [read.key for read in reads]))
        got = [0] * len(reads)
        missing = [0] * len(reads)  # parts that have not ended
        for part in (part for piece in pieces for part in piece.parts):
            missing[part.item] += 1
        ended: list[Outcome | None] = [None] * len(reads)

        def landed(piece: Landed) -> None:
            for index, start, at, outcome in piece.parts:
                missing[index] -= 1
                if not outcome.ok:
                    ended[index] = outcome
                    continue
                try:
                    if at >= 0 and outcome.nbytes:
                        copy_bytes(
                            reads[index].dst[start : start + outcome.nbytes],
                            piece.buffer.view[at : at + outcome.nbytes],
                        )
                except _WRONG_VIEW as error:
                    ended[index] = self._wrong(reads[index].key, error)
                    continue
                got[index] += outcome.nbytes

        def work(call: Call, _: list[Outcome | None]) -> None:
            self._reader.read(call, pieces)

        late = self._call("get", len(reads), deadline, work, landed)
        for index, read in enumerate(reads):
            if read.offset < 0:
                ended[index] = self._wrong(read.key, ValueError("negative offset"))
            elif ended[index] is None and not missing[index]:
                ended[index] = Outcome(Status.OK, got[index])
        return [late[index] if outcome is None else outcome for index, outcome in enumerate(ended)]

    def _wrong(self, key: Key, error: Exception) -> Outcome:
        text = f"the destination is not a writable flat view of bytes, or the offset is wrong: {error}"
        return Outcome.failed(PermanentError(text, backend=self.name, operation="get", key=key, cause=error))

    def put(self, writes: Sequence[Write], *, deadline: float) -> list[Outcome]:
        self._calls.check("put")
        jobs = []
        refused: dict[int, Outcome] = {}
        names = names_of(self.settings.prefix, [write.key for write in writes])
        for index, (write, name) in enumerate(zip(writes, names, strict=True)):
            nbytes = write.nbytes
            if nbytes > self.limits.max_value_bytes:
                text = (
                    f"a record of {nbytes} bytes; this backend takes {self.limits.max_value_bytes} (option max_value)"
                )
                error = PermanentError(text, backend=self.name, operation="put", key=write.key)
                refused[index] = Outcome.failed(error)
            else:
                jobs.append(Job(index, write.key, name, nbytes, write.src))

        def work(call: Call, outcomes: list[Outcome | None]) -> None:
            self._writer.put(call, jobs, outcomes)

        outcomes = self._call("put", len(writes), deadline, work)
        return [refused.get(index, outcome) for index, outcome in enumerate(outcomes)]

    def delete(self, keys: Sequence[Key], *, deadline: float) -> list[Outcome]:
        names = names_of(self.settings.prefix, keys)
        force = self.settings.force_delete

        def work(call: Call, outcomes: list[Outcome | None]) -> None:
            self._remove(call, keys, names, range(len(keys)), outcomes, force=force)

        return self._call("delete", len(keys), deadline, work)

    def _remove(
        self, call: Call, keys: Sequence[Key], names: Sequence[str], indices: Sequence[int],
        outcomes: list[Outcome | None], *, force: bool,
    ) -> None:  # fmt: skip
        """Remove objects, and again those that are leased, until they are not or the caller has left."""
        store, pause = self._client.joined(call.operation), _LEASE_POLL_S[0]
        todo = [*dict.fromkeys(indices)]
        while todo and not call.left.is_set():
            codes = store.batch_remove([names[index] for index in todo], force)
            leased = []
            for index, code in zip(todo, codes, strict=True):
                outcomes[index] = OK if code == 0 else self._failed(code, call.operation, keys[index])
                if code in (LEASED, BUSY):
                    leased.append(index)
            todo = leased
            if todo:
                call.left.wait(pause)
                pause = min(2 * pause, _LEASE_POLL_S[1])

    def quarantine(self, keys: Sequence[Key], *, deadline: float) -> list[Outcome]:
        names = names_of(self.settings.prefix, keys)

        def work(call: Call, outcomes: list[Outcome | None]) -> None:
            doomed: dict[str, int] = {}
            known = self._seen.get(names)
            for index, (now, before) in enumerate(zip(self._reader.headers(call, names), known, strict=True)):
                if isinstance(now, Outcome):
                    outcomes[index] = now
                elif now != before or names[index] in doomed:
                    outcomes[index] = MISS  # replaced since it was read here, or never read here
                else:
                    doomed[names[index]] = index
            if doomed:
                self._remove(call, keys, names, [*doomed.values()], outcomes, force=True)

        return self._call("quarantine", len(keys), deadline, work)

    def register(self, slab: Slab) -> None:
        """Register a slab with Mooncake, which keeps it mapped until `close`, also after its pool was closed."""
        self._calls.check("register")
        self._client.register(slab.view[:])

    def close(self) -> None:
        self._calls.close()

    def _leave(self) -> None:
        """Called once, when no call is under way any more."""
        self._client.close()
        self._pool.close()


def _size_of(replicas: Sequence[Any]) -> int | None:
    """The size of an object, from what the master knows of its copies; None if none of them tells."""
    for replica in replicas:
        if replica.is_memory_replica():
            return int(replica.get_memory_descriptor().buffer_descriptor.size)
        if replica.is_disk_replica():
            return int(replica.get_disk_descriptor().object_size)
    return None
