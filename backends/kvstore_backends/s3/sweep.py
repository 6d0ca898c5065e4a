"""Remove what nobody removes by itself: expired records, old corrupt ones, uploads that were never finished.

    python -m kvstore_backends.s3.sweep 's3://bucket/prefix?region=…&ttl=6h'       once, for instance from cron
    python -m kvstore_backends.s3.sweep --lifecycle 's3://bucket/prefix?ttl=7d'    print rules that do it for whole days

Any number of sweeps may run at once. Only objects with names of ours are touched. A record that is stored anew or
renewed between the listing of its page and the deletion that follows at once may go with the old one, which costs a
recomputation; not on S3 Express, where random ETags tell them apart.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from kvstore.errors import ConfigError, KVStoreError, TransientError
from kvstore.options import parse_duration
from kvstore.registry import open_backend

from .answers import answered_at
from .backend import S3Backend
from .calls import Calls
from .errors import fault_of
from .expiry import lifecycle_configuration
from .meta import list_pages
from .names import key_of, probe_name, quarantine_prefix

__all__ = ["Swept", "main", "sweep"]

logger = logging.getLogger("kvstore.backends.s3")

_DAY_S = 86400.0
_GRACE_S = 60.0
_AT_ONCE = 1000


class Swept(NamedTuple):
    """What a sweep did.

    Attributes:
        expired: records removed because they were older than the ttl; with `dry_run` what would be, as the others.
        quarantined: old corrupt records removed, and left-over probes.
        uploads: unfinished uploads aborted.
        nbytes: bytes of the objects removed.
        failed: objects and uploads that could not be removed; they count in none of the others.
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
    expired = quarantined = nbytes = uploads = failed = 0
    for answer in list_pages(calls, prefix, lambda: backend._check("list"), deadline):
        now = answered_at(answer)
        doomed: list[_Doomed] = []
        for entry in answer.get("Contents", ()):
            name, age = entry["Key"], now - entry["LastModified"].timestamp()
            record = key_of(prefix, name) is not None
            aside = name.startswith((quarantine_prefix(prefix), probe_name(prefix, "")))
            old = record and lifetime is not None and age >= lifetime + _GRACE_S
            if old or (aside and age >= quarantine_age):
                doomed.append(_Doomed(name, entry["Size"], entry.get("ETag", ""), record))
        left: dict[str, bool] = {} if dry_run or not doomed else _remove(calls, doomed, deadline)
        failed += sum(left.values())
        for each in doomed:
            if each.name not in left:
                expired += each.record
                quarantined += not each.record
                nbytes += each.nbytes
    for upload in _old_uploads(calls, prefix, upload_age, deadline):
        aborted = dry_run or _abort(calls, upload, deadline)
        uploads += aborted
        failed += not aborted
    return Swept(expired, quarantined, uploads, nbytes, failed)


def _abort(calls: Calls, upload: dict[str, Any], deadline: float) -> bool:
    return _attempt(calls, "AbortMultipartUpload", upload, deadline, gone="NoSuchUpload") is not None


class _Doomed(NamedTuple):
    name: str
    nbytes: int
    etag: str
    record: bool  # else something that was kept aside


def _attempt(
    calls: Calls, operation: str, params: dict[str, Any], deadline: float, *, gone: str = ""
) -> dict[str, Any] | None:
    """One call; None if it failed other than by the deadline, or with the code `gone`."""
    if time.monotonic() >= deadline:
        raise TransientError("the deadline passed", backend=calls.name, operation="sweep")
    try:
        return calls.invoke(operation, params, deadline)
    except Exception as error:  # noqa: BLE001 - mapped once, here
        fault = fault_of(error)
        if gone and fault is not None and fault.code == gone:
            return {}
        logger.info("%s: %s", calls.name, calls.failed(error, "sweep"))
        return None


def _remove(calls: Calls, doomed: Sequence[_Doomed], deadline: float) -> dict[str, bool]:
    """Delete objects. Those that are still there, or again; True: it should have gone."""
    left: dict[str, bool] = {}
    for begin in range(0, len(doomed), _AT_ONCE):
        some = doomed[begin : begin + _AT_ONCE]
        if calls.settings.express:  # the ETag of a copy or of equal bytes is another one there
            objects = [{"Key": each.name, "ETag": each.etag} for each in some]
        else:
            objects = [{"Key": each.name} for each in some]
        answer = _attempt(calls, "DeleteObjects", {"Delete": {"Objects": objects, "Quiet": True}}, deadline)
        if answer is None:
            left.update(dict.fromkeys((each.name for each in some), True))
            continue
        for said in answer.get("Errors", ()):
            if said.get("Code") != "NoSuchKey":
                left[said.get("Key", "")] = said.get("Code") != "PreconditionFailed"
    return left


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
        before = params
        for name in ("KeyMarker", "UploadIdMarker"):
            if answer.get(f"Next{name}"):
                params = {**params, name: answer[f"Next{name}"]}
        if not answer.get("IsTruncated") or params == before:
            return


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
    logger.addHandler(logging.NullHandler())  # what goes wrong is printed once, below
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
                if not backend.settings.prefix:
                    print(
                        "sweep: there is no prefix, so these rules are for every object of the bucket", file=sys.stderr
                    )
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
