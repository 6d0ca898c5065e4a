"""Remove what nobody removes by itself: expired records, old corrupt ones, uploads that were never finished.

    python -m kvstore_backends.s3.sweep 's3://bucket/prefix?region=…&ttl=6h'       once, for instance from cron
    python -m kvstore_backends.s3.sweep --lifecycle 's3://bucket/prefix?ttl=7d'    print rules that do it for whole days

Any number of sweeps may run at once. Only objects with names of ours are touched.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from kvstore.errors import ConfigError, KVStoreError, TransientError
from kvstore.options import parse_duration
from kvstore.registry import open_backend

from .backend import S3Backend
from .calls import Calls
from .expiry import lifecycle_configuration
from .meta import answered_at, list_pages
from .names import key_of, probe_name, quarantine_prefix

__all__ = ["Swept", "main", "sweep"]

_DAY_S = 86400.0
_GRACE_S = 60.0
_AT_ONCE = 1000


class Swept(NamedTuple):
    """What a sweep did.

    Attributes:
        expired: records removed because they were older than the ttl.
        quarantined: old corrupt records removed, and left-over probes.
        uploads: unfinished uploads aborted.
        nbytes: bytes of the objects removed.
        failed: objects and uploads that could not be removed.
    """

    expired: int
    quarantined: int
    uploads: int
    nbytes: int
    failed: int


def sweep(
    backend: S3Backend,
    *,
    ttl: float | None = None,
    quarantine_age: float = 7 * _DAY_S,
    upload_age: float = _DAY_S,
    dry_run: bool = False,
    deadline: float = math.inf,
) -> Swept:
    """Remove records older than the ttl (and a minute), corrupt ones older than `quarantine_age`, and uploads begun
    more than `upload_age` ago. Ages are seconds, by the service's clock.

    Args:
        ttl: default: that of the backend; None there too: no record expires.
        dry_run: count only.
        deadline: absolute monotonic seconds.

    Raises:
        TransientError, PermanentError: a listing failed, or the deadline passed. What was removed by then is removed.
    """
    calls = backend._calls
    prefix = backend.settings.prefix
    lifetime = ttl if ttl is not None else backend.settings.ttl
    expired = quarantined = nbytes = failed = 0
    for answer in list_pages(calls, prefix, lambda: backend._check("list"), deadline):
        now = answered_at(answer)
        doomed: list[tuple[str, int]] = []
        for entry in answer.get("Contents", ()):
            name, age = entry["Key"], now - entry["LastModified"].timestamp()
            record = key_of(prefix, name) is not None
            aside = name.startswith((quarantine_prefix(prefix), probe_name(prefix, "")))
            if record and lifetime is not None and age >= lifetime + _GRACE_S:
                expired += 1
            elif aside and age >= quarantine_age:
                quarantined += 1
            else:
                continue
            doomed.append((name, entry["Size"]))
        nbytes += sum(size for _, size in doomed)
        if doomed and not dry_run:
            failed += _remove(calls, [name for name, _ in doomed], deadline)
    uploads = 0
    for upload in _old_uploads(calls, prefix, upload_age, deadline):
        uploads += 1
        if not dry_run:
            failed += _attempt(calls, "AbortMultipartUpload", upload, deadline) is None
    return Swept(expired, quarantined, uploads, nbytes, failed)


def _attempt(calls: Calls, operation: str, params: dict[str, Any], deadline: float) -> dict[str, Any] | None:
    """One call; None if it failed other than by the deadline."""
    if time.monotonic() >= deadline:
        raise TransientError("the deadline passed", backend=calls.name, operation="sweep")
    try:
        return calls.invoke(operation, params, deadline)
    except Exception as error:  # noqa: BLE001 - mapped once, here
        calls.failed(error, "sweep")
        return None


def _remove(calls: Calls, names: Sequence[str], deadline: float) -> int:
    """Delete objects; how many could not be."""
    failed = 0
    for begin in range(0, len(names), _AT_ONCE):
        some = names[begin : begin + _AT_ONCE]
        batch = {"Objects": [{"Key": name} for name in some], "Quiet": True}
        answer = _attempt(calls, "DeleteObjects", {"Delete": batch}, deadline)
        failed += len(some) if answer is None else len(answer.get("Errors", ()))
    return failed


def _old_uploads(calls: Calls, prefix: str, age: float, deadline: float) -> Iterator[dict[str, Any]]:
    params: dict[str, Any] = {"Prefix": prefix} if prefix else {}
    while True:
        if time.monotonic() >= deadline:
            raise TransientError("the deadline passed", backend=calls.name, operation="sweep")
        try:
            answer = calls.invoke("ListMultipartUploads", params, deadline)
        except Exception as error:  # noqa: BLE001 - mapped once, here
            mapped = calls.failed(error, "sweep")
            raise mapped from mapped.cause
        now = answered_at(answer)
        for upload in answer.get("Uploads", ()):
            name = upload["Key"]
            if key_of(prefix, name) is not None and now - upload["Initiated"].timestamp() >= age:
                yield {"Key": name, "UploadId": upload["UploadId"]}
        if not answer.get("IsTruncated"):
            return
        params = {
            **params,
            "KeyMarker": answer.get("NextKeyMarker", ""),
            "UploadIdMarker": answer.get("NextUploadIdMarker", ""),
        }


def _seconds(text: str) -> float:
    try:
        return parse_duration(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(error.message) from error


def main(argv: Sequence[str] | None = None, *, out: Callable[[str], object] = print) -> int:
    """The command. Exit status: 0, 1 if something could not be removed, 2 for wrong arguments or an error."""
    parser = argparse.ArgumentParser(prog="python -m kvstore_backends.s3.sweep", description=__doc__.partition("\n")[0])
    parser.add_argument("url", help="s3://bucket/prefix?region=…&ttl=…")
    parser.add_argument("--ttl", type=_seconds, help="records older than this go, whatever the URL says (6h, 2d)")
    parser.add_argument(
        "--quarantine", type=_seconds, default=7 * _DAY_S, help="corrupt ones older than this (default 7d)"
    )
    parser.add_argument(
        "--uploads", type=_seconds, default=_DAY_S, help="unfinished uploads older than this (default 1d)"
    )
    parser.add_argument("--dry-run", action="store_true", help="count only")
    parser.add_argument("--lifecycle", action="store_true", help="print a lifecycle configuration instead")
    args = parser.parse_args(argv)
    try:
        backend = open_backend(args.url)
        if not isinstance(backend, S3Backend):
            backend.close()
            raise ConfigError("this sweeps s3:// only")
        with_ttl = args.ttl if args.ttl is not None else backend.settings.ttl
        try:
            if args.lifecycle:
                days = max(1, math.ceil(args.quarantine / _DAY_S))
                rules = lifecycle_configuration(backend.settings.prefix, with_ttl, quarantine_days=days)
                out(json.dumps(rules, indent=2))
                return 0
            swept = sweep(
                backend, ttl=args.ttl, quarantine_age=args.quarantine, upload_age=args.uploads, dry_run=args.dry_run
            )
        finally:
            backend.close()
    except KVStoreError as error:
        print(f"sweep: {error}", file=sys.stderr)
        return 2
    out(
        f"{'would remove' if args.dry_run else 'removed'} {swept.expired} expired records, {swept.quarantined} corrupt "
        f"ones and {swept.uploads} unfinished uploads, {swept.nbytes} bytes; {swept.failed} failed"
    )
    return 1 if swept.failed else 0


if __name__ == "__main__":
    sys.exit(main())
