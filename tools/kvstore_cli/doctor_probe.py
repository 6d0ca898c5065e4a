"""A place, tried: opened, and a record of a reserved name stored, read, listed and removed again, against the clock."""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from kvstore.backend import Backend, Capability, KeyInfo, Outcome, Read, Status, Write
from kvstore.errors import ConfigError, KVStoreError, PermanentError, TransientError
from kvstore.keys import Key, opaque_key
from kvstore.registry import BackendURL, open_backend

from .doctor_checks import Late, Place, within
from .plan_show import bytes_text

__all__ = ["NAMESPACE", "check_folder", "try_place"]

NAMESPACE = "kvstore-doctor"
"""Of the probe's key: no record of anybody else has it."""

_STATS, _GETS = 5, 3
_SLOW_MS = 100.0


def check_folder(place: Place, url: BackendURL, *, read_only: bool) -> bool:
    """For file://: whether the folder is there, on what, and how full that is. `read_only`: it is not to be made."""
    path = url.path

    def look() -> tuple[bool, bool, str]:
        folder = path
        while not os.path.isdir(folder) and folder != "/":
            folder = os.path.dirname(folder)
        return os.path.isdir(path), os.access(folder, os.W_OK | os.X_OK), folder

    try:
        there, writable, nearest = within(look, place.soon(place.left / 2))
        usage = within(lambda: shutil.disk_usage(nearest), place.soon(place.left / 2))
        kind = within(lambda: _file_system(nearest), place.soon(place.left / 2))
    except Late:
        place.add(
            "folder", "fail", f"the file system of {path} does not answer", "a hung mount: check the server, remount"
        )
        return False
    except OSError as error:
        place.add("folder", "fail", f"{path}: {error.strerror or error}", "check path and mount")
        return False
    data: dict[str, Any] = {"file_system": kind, "free_bytes": usage.free, "total_bytes": usage.total}
    shown = f"on {kind}, {bytes_text(usage.free)} of {bytes_text(usage.total)} free"
    if not there and read_only:
        place.add(
            "folder", "fail", f"there is no folder {path} ({nearest} is {shown})", "is the path spelt right?", **data
        )
        return False
    if not writable:
        place.add(
            "folder",
            "fail",
            f"{nearest} cannot be written to by this user ({shown})",
            "chown or chmod it, or mount it writable",
            **data,
        )
        return False
    if not there and os.path.dirname(path) != nearest:
        place.add(
            "folder",
            "fail",
            f"there is no folder {os.path.dirname(path)} ({nearest} is {shown})",
            "mount the file system first, or make the folder",
            **data,
        )
        return False
    if not there:
        place.add(
            "folder", "warn", f"{path} was not there: it is made now ({shown})", "is the path spelt right?", **data
        )
    elif usage.free < usage.total * 0.05:
        place.add("folder", "warn", f"{path} is {shown}", "make room, or give the URL a cap: ?bytes=…", **data)
    else:
        place.add("folder", "ok", f"{path} is {shown}", **data)
    return True


def _file_system(path: str) -> str:
    """Its type, as the longest mount point above `path` says."""
    found = ("", "an unknown file system")
    real = os.path.realpath(path)
    with open("/proc/self/mounts", encoding="utf-8", errors="replace") as file:
        for line in file:
            words = line.split()
            mount = words[1].encode().decode("unicode_escape") if len(words) > 2 else ""
            inside = mount in ("/", real) or real.startswith(f"{mount}/")
            if mount and inside and len(mount) >= len(found[0]):
                found = (mount, words[2])
    return found[1]


def try_place(place: Place, url: BackendURL, overrides: dict[str, object], *, nbytes: int, read_only: bool) -> None:
    """Open it and try everything that a store does; what was stored is removed again."""
    try:
        backend = within(lambda: open_backend(url, **overrides), place.soon(place.left))
    except Late:
        place.add("open", "fail", "it could not be opened in time", "the service accepts connections and says nothing")
        return
    except KVStoreError as error:
        place.add("open", "fail", str(error), _advice(error, place))
        return
    except OSError as error:
        place.add("open", "fail", f"{error.strerror or error}", "check the path and its permissions")
        return
    try:
        _capabilities(place, backend)
        _Trial(place, backend, nbytes).run(read_only=read_only)
    finally:
        try:
            within(backend.close, time.monotonic() + 2)
        except Late:
            place.add("close", "warn", "it could not be closed in time")


def _capabilities(place: Place, backend: Backend) -> None:
    has, limits = backend.capabilities, backend.limits
    names = [str(flag.name).lower() for flag in Capability if flag in has]
    data: dict[str, Any] = {
        "capabilities": names,
        "lanes": limits.lanes,
        "max_value_bytes": limits.max_value_bytes,
        "preferred_io_bytes": limits.preferred_io_bytes,
    }
    shown = f"{', '.join(names) or 'none'}; {limits.lanes} lanes, records up to {bytes_text(limits.max_value_bytes)}"
    if Capability.SHARED not in has:
        place.add(
            "capabilities",
            "warn",
            f"{shown}. Records are seen by this process only",
            "as a tier above something shared this is right; as the only place it helps no other node",
            **data,
        )
    elif Capability.DURABLE not in has:
        place.add("capabilities", "ok", f"{shown}. Records do not survive a restart of the service", **data)
    else:
        place.add("capabilities", "ok", shown, **data)


class _Trial:
    """One record, through all operations."""

    def __init__(self, place: Place, backend: Backend, nbytes: int) -> None:
        self._place, self._backend = place, backend
        nonce = secrets.token_hex(16)
        # Two: the first put pays for connections and fresh memory.
        self._keys = [opaque_key(f"probe {nonce} {each}", namespace=NAMESPACE) for each in range(2)]
        self._stored: list[Key] = []
        room = min(nbytes, backend.limits.max_value_bytes)
        self._data = hashlib.shake_256(self._keys[0]).digest(room)

    def run(self, *, read_only: bool) -> None:
        if not self._ask():
            return
        if Capability.LIST in self._backend.capabilities:
            self._list()
        else:
            self._place.add("list", "skip", "this backend cannot list")
        if read_only:
            for name in ("put", "get", "delete"):
                self._place.add(name, "skip", "not tried: --read-only")
            return
        try:
            if self._put():
                self._get()
        finally:
            self._remove()

    def _call(self, operation: str, call: Callable[[float], Sequence[Outcome]]) -> tuple[Outcome, float] | None:
        """One outcome and the seconds it took; None: it failed, which is noted."""
        deadline = self._place.deadline
        began = time.monotonic()
        try:
            # A second more: a backend keeps its deadline by itself, and its own words say more.
            outcome = within(lambda: call(deadline), deadline + 1)[0]
        except Late:
            self._place.add(operation, "fail", "it did not end by its deadline", "a hung file system or service")
            return None
        except KVStoreError as error:
            self._place.add(operation, "fail", str(error), _advice(error, self._place))
            return None
        if outcome.error is not None:
            reader = operation == "put" and isinstance(outcome.error, PermanentError)
            advice = _advice(outcome.error, self._place)
            if reader:
                advice = "a host that only reads needs no more: --read-only"
            self._place.add(operation, "fail", str(outcome.error), advice)
            return None
        return outcome, time.monotonic() - began

    def _ask(self) -> bool:
        """A record that is not there must be a miss; a few times, for the latency."""
        times = []
        for _ in range(_STATS):
            found = self._call("lookup", lambda until: self._backend.stat(self._keys[:1], deadline=until))
            if found is None:
                return False
            outcome, seconds = found
            if outcome.status is not Status.MISS:
                self._place.add(
                    "lookup",
                    "fail",
                    f"a record that nobody stored is said to be there ({outcome.status.value})",
                    "something answers in the service's place",
                )
                return False
            times.append(seconds * 1e3)
        median = statistics.median(times[1:])  # the first one connects
        slow = median > _SLOW_MS
        self._place.add(
            "lookup",
            "warn" if slow else "ok",
            f"a lookup takes {median:.2f} ms (the first one, with its connection, {times[0]:.1f} ms)",
            "another region or zone? use a place nearer to this host" if slow else "",
            median_ms=median,
            first_ms=times[0],
        )
        return True

    def _list(self) -> None:
        def first(until: float) -> Sequence[KeyInfo]:
            return next(iter(self._backend.list(deadline=until)), ())

        deadline = self._place.deadline
        try:
            page = within(lambda: first(deadline), deadline + 1)
        except Late:
            self._place.add("list", "fail", "it did not end by its deadline", "a hung file system or service")
        except KVStoreError as error:
            self._place.add("list", "fail", str(error), _advice(error, self._place))
        else:
            self._place.add("list", "ok", f"a first page of {len(page)} records", records=len(page))

    def _put(self) -> bool:
        data, best = memoryview(self._data), float("inf")
        for key in self._keys:
            found = self._call("put", partial(self._store, Write(key, [data])))
            if found is None:
                return False
            outcome, seconds = found
            if not outcome.ok:
                self._place.add("put", "fail", f"the probe was not stored: {outcome.status.value}")
                return False
            self._stored.append(key)
            best = min(best, seconds)
        self._speed("put", best)
        return True

    def _store(self, write: Write, until: float) -> Sequence[Outcome]:
        return self._backend.put([write], deadline=until)

    def _get(self) -> None:
        memory = bytearray(len(self._data))
        best = float("inf")
        for _ in range(_GETS):
            found = self._call(
                "get", lambda until: self._backend.get_into([Read(self._keys[0], memoryview(memory))], deadline=until)
            )
            if found is None:
                return
            outcome, seconds = found
            if not outcome.ok or outcome.nbytes != len(self._data) or memory != self._data:
                said = outcome.status.value if not outcome.ok else "other bytes came back than were stored"
                self._place.add(
                    "get",
                    "fail",
                    f"the probe cannot be read back: {said}",
                    "something between here and the service changes or caches answers",
                )
                return
            best = min(best, seconds)
        self._speed("get", best)

    def _speed(self, name: str, seconds: float) -> None:
        speed = len(self._data) / max(seconds, 1e-9)
        self._place.add(
            name,
            "ok",
            f"{bytes_text(len(self._data))} in {seconds * 1e3:.2f} ms: {speed / 1e6:,.0f} MB/s on one lane",
            seconds=seconds,
            bytes=len(self._data),
            bytes_per_s=speed,
        )

    def _remove(self) -> None:
        """Also where a put is said to have failed: it may have been done."""
        place, stored = self._place, len(self._stored)
        if stored:
            place.deadline = max(place.deadline, time.monotonic() + 1)  # nothing is to be left behind
        elif place.left == 0:
            place.add("delete", "skip", "no time was left")
            return
        try:
            outcomes = within(lambda: self._backend.delete(self._keys, deadline=place.deadline), place.deadline + 1)
        except Late:
            outcomes = []
        except KVStoreError as error:
            outcomes = [Outcome.failed(error)]
        errors = [outcome.error for outcome in outcomes if outcome.error is not None]
        if not stored:
            place.add("delete", "skip", "nothing was stored")
        elif errors or not outcomes:
            left = " and ".join(key.hex() for key in self._stored)
            said = str(errors[0]) if errors else "it did not end by its deadline"
            place.add("delete", "fail", said, f"the probe is left: remove the records {left} (kvstore rm)")
        elif any(outcome.ok for outcome in outcomes):
            place.add("delete", "ok", "the probe is removed again")
        else:
            place.add(
                "delete",
                "fail",
                "the probe was stored and is not there to be removed",
                "does something remove records at once (a ttl, a lifecycle rule, an eviction)?",
            )


def _advice(error: KVStoreError, place: Place) -> str:
    """For errors whose own text names no way out."""
    if isinstance(error, ConfigError):
        return f"see `kvstore options {place.url.partition('://')[0]}`"
    text = error.message.lower()
    if "deadline" in text or "in time" in text or "silent" in text:
        return (
            "raise --timeout if the link is known to be slow; else check security groups, routes and the service's load"
        )
    if isinstance(error, TransientError):
        return "try again; if it stays, look at the service's own log"
    return ""
