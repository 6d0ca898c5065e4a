"""`kvstore rm URL KEY …`: remove records."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import click

from kvstore.backend import Backend, Status
from kvstore.errors import ConfigError
from kvstore.keys import Key
from kvstore.options import parse_duration

from .output import check_targets, write_json
from .records import JSON, TIMEOUT, URLS, keys_of, listed, open_places, seconds_of, shown

__all__ = ["rm"]

_AT_ONCE = 1000


def _rm(url: str, keys: Sequence[str], everything: bool, older_than: str, yes: bool, timeout: str, as_json: str) -> int:
    """Remove the records of the KEYs (64 hex digits, or - for standard input) from URL, or --all, or --older-than.

    Exit status 1: one was not there, or could not be removed.
    """
    check_targets(as_json)
    seconds = seconds_of(timeout)
    if sum(map(bool, (keys, everything, older_than))) != 1:
        raise ConfigError("name KEYs, or --all, or --older-than DURATION: one of the three")
    age = parse_duration(older_than, name="older-than") if older_than else 0.0
    if older_than and age <= 0:
        raise ConfigError(f"option 'older-than': {older_than!r} would be every record; say --all if that is meant")
    if not keys and not yes:
        raise ConfigError("this removes many records, which cannot be had back: say --yes")
    counts = {"removed": 0, "missing": 0, "failed": 0}
    errors: list[str] = []
    with open_places(url) as backends:
        if keys:
            wanted = keys_of(keys)
            for begin in range(0, len(wanted), _AT_ONCE):
                _remove(backends, wanted[begin : begin + _AT_ONCE], seconds, counts, errors)
        else:
            for backend in backends:
                _remove_listed(backend, time.time() - age if older_than else None, seconds, counts, errors)
            counts["missing"] = 0  # gone meanwhile: as it should be
    status = int(bool(counts["failed"] or counts["missing"]))
    report: dict[str, Any] = {"tool": "kvstore rm", "url": url, "ok": not status, **counts, "errors": errors[:20]}
    if as_json:
        write_json(report, as_json)
    if as_json != "-":
        print(f"{counts['removed']:,} removed, {counts['missing']:,} were not there, {counts['failed']:,} failed")
        for text in dict.fromkeys(errors[:20]):
            print(f"  {text}")
    return status


def _remove(
    backends: Sequence[Backend], keys: Sequence[Key], seconds: float, counts: dict[str, int], errors: list[str]
) -> None:
    """Each key from every place; it is removed if any had it, and failed if any failed."""
    removed, failed = set(), set()
    for backend in backends:
        for key, outcome in zip(keys, backend.delete(keys, deadline=time.monotonic() + seconds), strict=True):
            if outcome.error is not None:
                failed.add(key)
                errors.append(shown(outcome.error))
            elif outcome.status is Status.OK:
                removed.add(key)
    counts["failed"] += len(failed)
    counts["removed"] += len(removed - failed)
    counts["missing"] += len(keys) - len(removed | failed)


def _remove_listed(
    backend: Backend, before: float | None, seconds: float, counts: dict[str, int], errors: list[str]
) -> None:
    """All records, or those last used before a time; what has none (0.0) is younger than anything."""

    def old() -> Iterator[Key]:
        for info in listed(backend, 86400.0):
            if before is None or 0 < info.last_used < before:
                yield info.key

    keys = old()
    while batch := list(islice(keys, _AT_ONCE)):
        _remove([backend], batch, seconds, counts, errors)


rm = click.Command(
    "rm",
    callback=_rm,
    help=_rm.__doc__,
    params=[
        URLS,
        click.Argument(["keys"], nargs=-1, metavar="[KEY]..."),
        click.Option(["everything", "--all"], is_flag=True, help="All records."),
        click.Option(["older_than", "--older-than"], default="", metavar="DURATION",
                     help="Records that were not used, or stored, for so long."),
        click.Option(["yes", "--yes"], is_flag=True, help="Really."),
        TIMEOUT,
        JSON,
    ],
)  # fmt: skip
