"""What is different in S3 Express One Zone (directory buckets).

After the S3 user guide, "Differences for directory buckets" and "Optimizing performance":

* The name says it: `BASE--ZONEID--x-s3`. botocore finds the zonal endpoint and signs with a session
  (CreateSession, five minutes, one per bucket, renewed before it ends by one thread for all) by that name.
* ETags are random, so they are compared with each other only, never with an MD5.
* ListObjectsV2 has no order and no StartAfter, and a prefix must end in "/". So must ours, always.
* No tags, versions or ACLs. CRC instead of Content-MD5.
* Multipart part numbers are consecutive. Ours always are.
* A bucket that was idle for three months answers 503 while it wakes up: a `Throttled` error like any other 503.
"""

from __future__ import annotations

import re

from kvstore.errors import ConfigError

__all__ = ["SUFFIX", "is_express", "zone_of"]

SUFFIX = "--x-s3"
_NAME = re.compile(r"[a-z0-9](?:[a-z0-9-]*[a-z0-9])?--(?P<zone>[a-z0-9]+(?:-[a-z0-9]+)?-az[0-9]+)--x-s3", re.ASCII)


def is_express(bucket: str) -> bool:
    """Whether this is the name of a directory bucket."""
    return bucket.endswith(SUFFIX)


def zone_of(bucket: str) -> str:
    """The id of the availability zone ("usw2-az1") or local zone ("usw2-lax1-az1"), which is part of the name.

    Raises:
        ConfigError: the name has none: it needs a zone id (usw2-az1), not a zone name (us-west-2a).
    """
    match = _NAME.fullmatch(bucket)
    if match is None:
        raise ConfigError(
            f"s3://{bucket}: a directory bucket is named BASE--ZONEID{SUFFIX}, with the id of its zone (usw2-az1), "
            "not the zone's name (us-west-2a)"
        )
    return match["zone"]
