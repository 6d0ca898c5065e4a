"""What a killed run left behind, and its removal by the next run.

`kill -9` and power cuts skip every clean-up. So a run writes down, in a small file `kvstore-bench-run-ID.json` in the
temporary folder ($TMPDIR), which records it holds in which URL and which folders it made. It keeps a lock (`flock`) on
the file, which the kernel drops with the process: a file that can be locked belongs to a run that is gone. The next run
with the same temporary folder removes the folders, and the records in the URLs that it measures itself; for the others
it says where they are. A record is never in two places of this file: one batch at a time lies in a store.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvstore.backend import Status
from kvstore.errors import KVStoreError

from .targets import BackendTarget, StoreTarget

if TYPE_CHECKING:
    from .io import Place
    from .targets import Target

__all__ = ["FOLDER_PREFIXES", "Journal", "sweep"]

FOLDER_PREFIXES = ("kvstore-bench-", ".kvstore-bench-raw-")
"""How the folders begin that a run makes; nothing else is ever removed."""

_NAME = "kvstore-bench-run-"
_TIMEOUT_S = 60.0
_YOUNG_S = 60.0


def _kind(target: Target) -> str:
    """Targets of one kind name the same record of one URL alike."""
    return "backend" if isinstance(target, BackendTarget | StoreTarget) else type(target).__name__


class Journal:
    """The file of one run. Without a writable temporary folder it does nothing and `path` is "".

    Args:
        run_id: unique per run.
    """

    def __init__(self, run_id: str) -> None:
        self._facts: dict[str, Any] = {"run": run_id, "folders": [], "live": {}}
        self._size = 0
        self.path, self._fd = "", -1
        with contextlib.suppress(OSError):
            path = os.path.join(tempfile.gettempdir(), f"{_NAME}{run_id}.json")
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            self.path = path
            fcntl.flock(self._fd, fcntl.LOCK_EX)
        self._write()

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        if self.path:
            with contextlib.suppress(OSError):
                os.unlink(self.path)
            os.close(self._fd)
            self.path = ""

    def folder(self, path: str) -> None:
        """A folder that this run has made, with everything in it."""
        self._facts["folders"].append(path)
        self._write()

    @contextlib.contextmanager
    def row(self, target: Target, count: int) -> Iterator[Journal]:
        """While the row of this target is measured, `batch` names what it holds; after it, nothing is left."""
        self._facts["live"] = {"url": target.url, "kind": _kind(target), "count": count, "prefix": ""}
        try:
            yield self
        finally:
            self._facts["live"] = {}
            self._write()

    def batch(self, prefix: str) -> None:
        """Records `prefix/0` … are about to be put; those of the batch before are deleted."""
        self._facts["live"]["prefix"] = prefix
        self._write()

    def _write(self) -> None:
        """In one call, over what was there: the text is padded, so that it never becomes shorter."""
        if not self.path:
            return
        text = json.dumps(self._facts)
        self._size = max(self._size, len(text))
        with contextlib.suppress(OSError):  # a full disk must not end a run
            os.pwrite(self._fd, text.ljust(self._size).encode("ascii"), 0)


def sweep(targets: Sequence[tuple[Target, Place]]) -> list[str]:
    """Remove what runs that are gone have left. Returns sentences about what was removed and what could not be.

    Only files of this user count, whatever lies in a temporary folder that others can write to.
    """
    notes: list[str] = []
    try:
        found = sorted(Path(tempfile.gettempdir()).glob(f"{_NAME}*.json"))
    except OSError:
        return notes
    for path in found:
        with contextlib.suppress(OSError):  # gone meanwhile, or not ours
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                _sweep_one(path, fd, targets, notes)
            finally:
                os.close(fd)
    return notes


def _sweep_one(path: Path, fd: int, targets: Sequence[tuple[Target, Any]], notes: list[str]) -> None:
    facts = os.fstat(fd)
    if not stat.S_ISREG(facts.st_mode) or facts.st_uid != os.geteuid():
        return
    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # BlockingIOError: that run is alive
    try:
        said = json.loads(os.pread(fd, 1 << 20, 0))
        folders, live, run_id = list(map(str, said["folders"])), dict(said["live"]), str(said["run"])
    except (ValueError, KeyError, TypeError):
        if time.time() - facts.st_mtime > _YOUNG_S:  # a younger one may not be written yet
            path.unlink()
        return
    for folder in folders:
        if os.path.basename(folder).startswith(FOLDER_PREFIXES) and os.path.isdir(folder):
            shutil.rmtree(folder, ignore_errors=True)
            notes.append(f"removed the folder {folder} that a killed run had left")
    if _records(live, run_id, targets, notes):
        path.unlink()


def _records(live: Mapping[str, Any], run_id: str, targets: Sequence[tuple[Target, Any]], notes: list[str]) -> bool:
    """Remove the records of one file. True if none can be left."""
    url = str(live.get("url", ""))
    if not live.get("prefix") or url.startswith("memory:"):  # memory went with its process
        return True
    if url.startswith("file://") and not os.path.isdir(url.removeprefix("file://").partition("?")[0]):
        return True
    match = [pair for pair in targets if pair[0].url == url and _kind(pair[0]) == live.get("kind")]
    if not match:
        notes.append(f"a killed run has left records in {url}: measure that URL again to remove them")
        return False
    target, place = match[0]
    keys = [target.key(f"{live['prefix']}/{index}") for index in range(int(live["count"]))]
    try:
        outcomes = target.delete(keys, time.monotonic() + _TIMEOUT_S)
        if place is not None and not isinstance(place, Path):
            _raw_objects(url, run_id)
    except (KVStoreError, OSError) as error:
        notes.append(f"the records that a killed run has left in {url} could not be removed: {error}")
        return False
    wrong = [outcome for outcome in outcomes if outcome.status is Status.ERROR]
    if wrong:
        notes.append(f"{len(wrong)} records that a killed run has left in {url} are still there: {wrong[0].error}")
    gone = sum(outcome.ok for outcome in outcomes)
    if gone:
        notes.append(f"removed {gone} records that a killed run had left in {url}")
    return not wrong


def _raw_objects(url: str, run_id: str) -> None:
    """Objects of the raw HTTP ceiling of that run. Raises `OSError`."""
    from botocore.exceptions import BotoCoreError, ClientError

    from kvstore.registry import parse_url

    from .s3 import place_of

    place = place_of(parse_url(url), run_id)
    client = place.open()
    try:
        for page in client.get_paginator("list_objects_v2").paginate(Bucket=place.bucket, Prefix=f"{place.prefix}/"):
            objects = [{"Key": each["Key"]} for each in page.get("Contents", ())]
            if objects:
                client.delete_objects(Bucket=place.bucket, Delete={"Objects": objects, "Quiet": True})
    except (BotoCoreError, ClientError) as error:
        raise OSError(f"objects of the raw HTTP ceiling: {error}") from error
    finally:
        client.close()
