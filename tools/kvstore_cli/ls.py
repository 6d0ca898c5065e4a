"""`kvstore ls URL`: the records of a place."""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from itertools import islice

import click

from .output import check_targets, write_json
from .plan_show import bytes_text
from .records import JSON, TIMEOUT, URLS, listed, open_places, seconds_of

__all__ = ["ls"]


def _ls(url: str, limit: int | None, timeout: str, as_json: str) -> int:
    """List the records of URL: key, bytes, time of the last use or put (UTC), in no order.

    A record with several replicas appears once for each. How many there are goes to standard error.
    """
    check_targets(as_json)
    seconds = seconds_of(timeout)
    count = total = 0
    rows = []
    with open_places(url) as backends:
        for info in islice((info for backend in backends for info in listed(backend, seconds)), limit):
            count, total = count + 1, total + info.nbytes
            if as_json:
                rows.append({"key": info.key.hex(), "nbytes": info.nbytes, "last_used": info.last_used or None})
            if as_json != "-":
                used = (
                    datetime.fromtimestamp(info.last_used, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
                    if info.last_used
                    else "-"
                )
                print(f"{info.key.hex()}  {info.nbytes:>14}  {used}")
    if as_json:
        write_json({"tool": "kvstore ls", "url": url, "records": rows, "nbytes": total}, as_json)
    print(f"{count:,} records, {bytes_text(total)}", file=sys.stderr)
    return 0


ls = click.Command(
    "ls",
    callback=_ls,
    help=_ls.__doc__,
    params=[
        URLS,
        click.Option(["limit", "--limit"], type=click.IntRange(min=0), metavar="N", help="No more than so many."),
        TIMEOUT,
        JSON,
    ],
)
