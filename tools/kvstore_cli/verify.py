"""`kvstore verify URL [KEY …]`: read records again and compare their checksums."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import click

from kvstore.backend import Backend, Status
from kvstore.errors import CorruptRecord, KVStoreError
from kvstore.keys import Key

from .output import check_targets, write_json
from .plan_show import bytes_text
from .records import JSON, TIMEOUT, URLS, keys_of, listed, open_places, seconds_of, shown, verify_record

__all__ = ["verify"]


def _verify(url: str, keys: Sequence[str], quarantine: bool, timeout: str, as_json: str) -> int:
    """Read all records of URL, or those of the KEYs (64 hex digits, or - for standard input), and compare checksums.

    Exit status 1: a record is damaged, missing or cannot be read. --quarantine takes damaged ones out of the way.
    """
    check_targets(as_json)
    seconds = seconds_of(timeout)
    wanted = keys_of(keys) if keys else None  # `-` with nothing on standard input is no key, not all of them
    good = total = 0
    bad: list[dict[str, Any]] = []
    with open_places(url) as backends:
        for backend, key, nbytes in _records(backends, wanted, seconds, bad):
            try:
                verify_record(backend, key, nbytes, seconds)
            except KVStoreError as error:
                bad.append(_trouble(backend, key, error, quarantine, seconds))
            else:
                good, total = good + 1, total + nbytes
    report = {"tool": "kvstore verify", "url": url, "ok": not bad, "verified": good, "nbytes": total, "bad": bad}
    if as_json:
        write_json(report, as_json)
    if as_json != "-":
        for each in bad:
            aside = " (put aside)" if each["quarantined"] else ""
            print(f"{each['key']}  {each['kind']}: {each['error']}{aside}")
    print(f"{good:,} records verified, {bytes_text(total)}; {len(bad):,} bad", file=sys.stderr)
    return int(bool(bad))


def _records(
    backends: Sequence[Backend], wanted: Sequence[Key] | None, seconds: float, bad: list[dict[str, Any]]
) -> Iterator[tuple[Backend, Key, int]]:
    """Which records to read, and their sizes (None wanted: all); a wanted one that no place has goes to `bad`."""
    if wanted is None:
        for backend in backends:
            for info in listed(backend, 86400.0):
                yield backend, info.key, info.nbytes
        return
    for key in wanted:
        found = False
        for backend in backends:
            (outcome,) = backend.stat([key], deadline=time.monotonic() + seconds)
            if outcome.error is not None:
                bad.append(_entry(key, "unreadable", shown(outcome.error)))
                found = True
            elif outcome.status is Status.OK:
                found = True
                yield backend, key, outcome.nbytes
        if not found:
            bad.append(_entry(key, "missing", "no place has it"))


def _trouble(backend: Backend, key: Key, error: KVStoreError, quarantine: bool, seconds: float) -> dict[str, Any]:
    corrupt = isinstance(error, CorruptRecord)
    entry = _entry(key, "corrupt" if corrupt else "unreadable", shown(error))
    if corrupt and quarantine:
        (outcome,) = backend.quarantine([key], deadline=time.monotonic() + seconds)
        entry["quarantined"] = outcome.ok
    return entry


def _entry(key: Key, kind: str, error: str) -> dict[str, Any]:
    return {"key": key.hex(), "kind": kind, "error": error, "quarantined": False}


verify = click.Command(
    "verify",
    callback=_verify,
    help=_verify.__doc__,
    params=[
        URLS,
        click.Argument(["keys"], nargs=-1, metavar="[KEY]..."),
        click.Option(["quarantine", "--quarantine"], is_flag=True, help="Free the names of damaged records."),
        TIMEOUT,
        JSON,
    ],
)
