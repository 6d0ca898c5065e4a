"""Everything about records but their bytes: stat, delete, quarantine, list.

What only looks must not count as a use, or lookups would decide what is evicted. EXISTS, PEXPIRETIME and OBJECT
IDLETIME do not; STRLEN does, unless CLIENT NO-TOUCH (Redis 7.2, Valkey) says otherwise. With Redis 7.0 a lookup is a
use.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from kvstore.backend import MISS, OK, KeyInfo, Outcome, Status
from kvstore.errors import TransientError
from kvstore.keys import Key

from .dispatch import ASKING, Dispatch, Job
from .errors import Faults, LinkError, ReplyError
from .names import aside_name, key_of, record_name, scan_pattern, slot_of
from .options import Node, Settings
from .reads import GONE
from .resp import MULTI, PENDING, Ask, about, command
from .topology import Topology

__all__ = ["Meta"]

_PAGE = 1000
_NO_TOUCH_SINCE = (7, 2)


class Meta:
    """The small requests; those of one batch travel together, one pipeline for each server."""

    def __init__(
        self,
        settings: Settings,
        dispatch: Dispatch,
        topology: Topology,
        faults: Faults,
        seen: Callable[[Key], int | None],
    ) -> None:
        self._settings = settings
        self._prefix = settings.prefix.encode()
        self._dispatch = dispatch
        self._topology = topology
        self._faults = faults
        self._seen = seen

    def _jobs(self, keys: Sequence[Key], *verbs: bytes) -> list[Job]:
        jobs = []
        for key in keys:
            name = record_name(self._prefix, key)
            jobs.append(Job(slot_of(name), [Ask([about(verb, name)], accepts=int) for verb in verbs]))
        return jobs

    # stat and delete

    def stat(self, keys: Sequence[Key], deadline: float) -> list[Outcome]:
        """STRLEN and EXISTS for each key: a length of 0 alone does not tell an empty record from none."""
        jobs = self._jobs(keys, b"STRLEN", b"EXISTS")
        self._dispatch.run(jobs, deadline, quietly=self._quietly())
        unsure = [job for job in jobs if job.trouble is None and job.asks[0].reply == 0 and job.asks[1].reply]
        for job in unsure:  # empty, or stored between the two questions: a transaction knows
            job.asks[0].reply, job.asks[1].reply = self._at_once(job, deadline)
        outcomes: list[Outcome] = []
        for key, job in zip(keys, jobs, strict=True):
            if job.trouble is not None:
                outcomes.append(self._faults.outcome(job.trouble, "stat", key))
            elif job.asks[0].reply < 0:
                outcomes.append(self._faults.outcome(LinkError("protocol", "STRLEN is negative"), "stat", key))
            else:
                size = job.asks[0].reply
                outcomes.append(Outcome(Status.OK, size) if size or job.asks[1].reply else MISS)
        return outcomes

    def _at_once(self, job: Job, deadline: float) -> tuple[Any, Any]:
        """The replies of a job's asks, taken in one moment."""
        parts = [MULTI, *(part for ask in job.asks for part in ask.parts), command(b"EXEC")]
        whole = Job(job.slot, [Ask([part]) for part in parts])
        self._dispatch.run([whole], deadline)
        reply = whole.trouble or whole.asks[-1].reply
        if isinstance(reply, list) and len(reply) == 2 and all(isinstance(one, int) for one in reply):
            return reply[0], reply[1]
        job.error = reply if isinstance(reply, Exception) else LinkError("protocol", "EXEC gave no two replies")
        return PENDING, PENDING

    def _quietly(self) -> bool:
        """Whether the server knows CLIENT NO-TOUCH."""
        view = self._topology.known
        return view is not None and view.version >= _NO_TOUCH_SINCE

    def delete(self, keys: Sequence[Key], deadline: float) -> list[Outcome]:
        """UNLINK, which frees the memory in the background."""
        jobs = self._jobs(keys, b"UNLINK")
        self._dispatch.run(jobs, deadline)
        return [
            self._faults.outcome(job.trouble, "delete", key)
            if job.trouble is not None
            else OK if job.asks[0].reply else MISS
            for key, job in zip(keys, jobs, strict=True)
        ]  # fmt: skip

    # quarantine

    def quarantine(self, keys: Sequence[Key], deadline: float) -> list[Outcome]:
        """Rename each aside, in its slot, with an expiry; only if it still is the version last read.

        WATCH makes that one step: EXEC does nothing if the name was touched after PEXPIRETIME told its version. No
        script: some services have none. One name at a time: what is watched must lie in one slot.
        """
        outcomes: list[Outcome] = []
        for key in keys:
            name = record_name(self._prefix, key)
            watch, version = Ask([about(b"WATCH", name)]), Ask([about(b"PEXPIRETIME", name)], accepts=int)
            job = Job(slot_of(name), [watch, version])
            job.asks[1].follow = self._decide(job, name, self._seen(key))
            self._dispatch.run([job], deadline)
            outcomes.append(self._set_aside(job, key))
        return outcomes

    def _decide(self, job: Job, name: bytes, version: int | None) -> Callable[[Any], Sequence[Ask]]:
        def follow(reply: Any) -> Sequence[Ask]:
            if not isinstance(reply, int) or reply == GONE or (version is not None and reply != version):
                more = [Ask([command(b"UNWATCH")])]
            else:
                more = [Ask([part]) for part in self._away(name)]
            job.asks += more
            return [Ask([ASKING]), *more] if job.asking is not None else more

        return follow

    def _away(self, name: bytes) -> list[bytes]:
        keep = round(self._settings.quarantine * 1000)
        if not keep:
            return [MULTI, about(b"UNLINK", name), command(b"EXEC")]
        aside = aside_name(self._prefix, name, random.getrandbits(64))
        return [
            MULTI, command(b"RENAME", name, aside), command(b"PEXPIRE", aside, keep), command(b"EXEC")
        ]  # fmt: skip

    def _set_aside(self, job: Job, key: Key) -> Outcome:
        trouble = job.trouble
        if trouble is not None:
            return self._faults.outcome(trouble, "quarantine", key)
        reply = job.asks[-1].reply
        if not isinstance(reply, list):  # UNWATCH, or nil: somebody replaced or removed it meanwhile
            return MISS
        first = reply[0] if reply else None
        if isinstance(first, ReplyError):
            if "no such key" in first.text:
                return MISS
            return self._faults.outcome(first, "quarantine", key)
        return OK if first else MISS

    # list

    def pages(self, check: Callable[[], None], deadline: float) -> Iterator[Sequence[KeyInfo]]:
        """Pages of SCAN, of one primary after the other. A name may come twice from SCAN; here it does not, for which
        eight bytes of each are remembered until the end."""
        found: set[bytes] = set()
        for node in self._asked(lambda: self._topology.view(deadline)).primaries:
            cursor = b"0"
            while True:
                check()
                if time.monotonic() >= deadline:
                    raise TransientError("the deadline passed", backend=self._settings.name, operation="list")
                cursor, names = self._scan(node, cursor, deadline)
                keys = []
                for name in names:
                    key = key_of(self._prefix, name)
                    if key is not None and key[:8] not in found:
                        found.add(key[:8])
                        keys.append(key)
                page = self._sizes(node, keys, deadline) if keys else []
                if page:
                    yield page
                if cursor == b"0":
                    break

    def _scan(self, node: Node, cursor: bytes, deadline: float) -> tuple[bytes, list[bytes]]:
        ask = Ask([command(b"SCAN", cursor, b"MATCH", scan_pattern(self._prefix), b"COUNT", _PAGE)], accepts=list)
        self._asked(lambda: self._dispatch.on(node, [ask], deadline))
        reply = ask.reply
        if isinstance(reply, ReplyError):
            raise self._faults.of(reply, "list")
        if len(reply) == 2 and isinstance(reply[0], bytes) and isinstance(reply[1], list):
            return reply[0], [name for name in reply[1] if isinstance(name, bytes)]
        raise TransientError("SCAN gave no page", backend=self._settings.name, operation="list")

    def _sizes(self, node: Node, keys: Sequence[Key], deadline: float) -> list[KeyInfo]:
        """Size and time of last use, without using them."""
        asks: list[Ask] = []
        for key in keys:
            name = record_name(self._prefix, key)
            asks += (Ask([command(b"OBJECT", b"IDLETIME", name)]), Ask([about(b"STRLEN", name)]))
        self._asked(lambda: self._dispatch.on(node, asks, deadline, quietly=self._quietly()))
        now = time.time()
        page: list[KeyInfo] = []
        for index, key in enumerate(keys):
            idle, size = asks[2 * index].reply, asks[2 * index + 1].reply
            if not isinstance(size, int) or size < 0 or (idle is None and not size):
                continue  # it has gone meanwhile, or is nothing of ours, or its slot has moved
            page.append(KeyInfo(key, size, now - idle if isinstance(idle, int) else 0.0))
        return page

    def _asked(self, do: Callable[[], Any]) -> Any:
        """`do()`; what it raises, as an error of ours."""
        try:
            return do()
        except (LinkError, ReplyError) as error:
            mapped = self._faults.of(error, "list")
            raise mapped from mapped.cause
