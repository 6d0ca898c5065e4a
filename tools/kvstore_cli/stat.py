"""`kvstore stat URL [KEY …]`: what a place holds, or what records are."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import click

from kvstore.backend import Backend, Status
from kvstore.errors import KVStoreError

from .output import check_targets, print_table, write_json
from .plan_show import bytes_text, seconds_text
from .records import JSON, TIMEOUT, URLS, facts, keys_of, listed, open_places, read_header, seconds_of, shown

__all__ = ["stat"]


def _stat(url: str, keys: Sequence[str], timeout: str, as_json: str) -> int:
    """What is stored at URL as a whole; with KEYs (64 hex digits, or - for standard input) what each record is.

    Exit status 1: a record is missing or damaged.
    """
    check_targets(as_json)
    seconds = seconds_of(timeout)
    with open_places(url) as backends:
        if not keys:
            places = [_summary(backend, seconds) for backend in backends]
            report: dict[str, Any] = {"tool": "kvstore stat", "url": url, "places": places}
            status = 0
        else:
            records = [_record(backends, key, seconds) for key in keys_of(keys)]
            report = {"tool": "kvstore stat", "url": url, "records": records}
            status = int(any(record["status"] != "ok" for record in records))
    if as_json:
        write_json(report, as_json)
    if as_json != "-":
        _print(report)
    return status


def _summary(backend: Backend, seconds: float) -> dict[str, Any]:
    sizes: Counter[int] = Counter()
    oldest = newest = 0.0
    for info in listed(backend, seconds):
        sizes[info.nbytes] += 1
        if info.last_used:
            oldest = min(oldest or info.last_used, info.last_used)
            newest = max(newest, info.last_used)
    count, total = sum(sizes.values()), sum(nbytes * times for nbytes, times in sizes.items())
    return {
        "name": backend.name, "records": count, "nbytes": total,
        "sizes": dict(sizes.most_common(8)), "oldest": oldest or None, "newest": newest or None,
    }  # fmt: skip


def _record(backends: Sequence[Backend], key: Any, seconds: float) -> dict[str, Any]:
    """The record in the first place that has it."""
    for backend in backends:
        try:
            (found,) = backend.stat([key], deadline=time.monotonic() + seconds)
            if found.error is not None:
                raise found.error
            if found.status is Status.OK:
                return {
                    "status": "ok",
                    "place": backend.name,
                    **facts(read_header(backend, key, found.nbytes, seconds)),
                }
        except KVStoreError as error:
            return {"status": "error", "key": key.hex(), "place": backend.name, "error": shown(error)}
    return {"status": "missing", "key": key.hex()}


def _print(report: dict[str, Any]) -> None:
    now = time.time()
    for place in report.get("places", ()):
        print(f"{place['name']}: {place['records']:,} records, {bytes_text(place['nbytes'])}")
        if place["oldest"] is not None:
            print(f"  used {seconds_text(max(0.0, now - place['newest']))} to "
                  f"{seconds_text(max(0.0, now - place['oldest']))} ago")  # fmt: skip
        if place["sizes"]:
            print_table(("bytes", "records"), [(f"{size:,}", f"{n:,}") for size, n in place["sizes"].items()], text=())
    for record in report.get("records", ()):
        print(f"{record['key']}  {record['status']}  {record.get('place', '')}".rstrip())
        for name in ("error", "kind", "nbytes", "raw_bytes", "layers", "segments", "levels"):
            if name in record:
                print(f"  {name}: {record[name]}")
        for name, value in record.get("meta", {}).items():
            print(f"  meta {name}: {value}")


stat = click.Command(
    "stat",
    callback=_stat,
    help=_stat.__doc__,
    params=[URLS, click.Argument(["keys"], nargs=-1, metavar="[KEY]..."), TIMEOUT, JSON],
)
