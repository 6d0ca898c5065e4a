"""Records that expire, and hot ones that do not.

A record's age is the time between Last-Modified and Date, both by the service's clock, so no clock of ours matters; it
is exact to a second. A record older than the option `ttl` is a miss, whether or not it is still there. What removes it:

* for whole days, the service itself, by a lifecycle rule (`lifecycle_configuration`), rounded up;
* otherwise, and on services without lifecycle rules, `kvstore_backends.s3.sweep`.

A put that finds its record in the last third of its life copies it onto itself, on the server, which makes it new: a
record that is computed again and again does not expire.
"""

from __future__ import annotations

import logging
import math
from typing import Any

from .calls import Calls
from .client import Found
from .errors import Fault, fault_of
from .names import quarantine_prefix

__all__ = ["MAX_COPY_BYTES", "Expiry", "lifecycle_configuration", "refuses_condition"]

logger = logging.getLogger("kvstore.backends.s3")

_RENEW_AFTER = 2 / 3  # of the ttl
_DAY_S = 86400.0
MAX_COPY_BYTES = 5 << 30
"""The largest object that CopyObject copies; larger records are neither renewed nor kept aside."""
_UNKNOWN_CONDITION = frozenset({"NotImplemented", "InvalidArgument", "InvalidRequest", "UnsupportedArgument"})


class Expiry:
    """What a put does with a record that is there."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    def there(self, name: str, deadline: float) -> bool:
        """Whether a record is there and alive. Renews it if it soon were not; removes it if it is not."""
        found = self._calls.head(name, deadline)
        if found is None:
            return False
        ttl = self._calls.settings.ttl
        if ttl is None or found.age < ttl * _RENEW_AFTER or (found.age < ttl and found.nbytes > MAX_COPY_BYTES):
            return True
        if found.age < ttl:
            try:
                return self.renew(name, found, deadline)
            except Exception as error:  # noqa: BLE001 - mapped; the record is there all the same
                mapped = self._calls.failed(error, "put")
                logger.info("%s: a record could not be renewed: %s", self._calls.name, mapped)
                return True
        self.remove(name, found.etag, deadline)
        return False

    def renew(self, name: str, found: Found, deadline: float) -> bool:
        """Copy a record onto itself, on the server. False: it went away in the meantime."""
        source = {"Bucket": self._calls.settings.bucket, "Key": name}
        params: dict[str, Any] = {
            "Key": name, "CopySource": source, "CopySourceIfMatch": found.etag, "MetadataDirective": "REPLACE",
            "Metadata": {**found.metadata, "kvstore-renewed": "1"},
        }  # fmt: skip
        try:
            self._calls.invoke("CopyObject", params, deadline)
        except Exception as error:
            fault = fault_of(error)
            if fault is not None and fault.status in (404, 412):
                return self._calls.head(name, deadline) is not None
            raise
        self._calls.count("renewals")
        return True

    def remove(self, name: str, etag: str, deadline: float) -> bool:
        """Delete an object if it is still this version. False: it is not, or has gone. Some services ignore the
        condition, and those that refuse it are asked without it."""
        for condition in ({"IfMatch": etag}, {}):
            try:
                self._calls.invoke("DeleteObject", {"Key": name, **condition}, deadline)
                return True
            except Exception as error:
                fault = fault_of(error)
                if fault is None:
                    raise
                if fault.status in (404, 409, 412):
                    return False
                if not condition or not refuses_condition(fault):
                    raise
        return False


def refuses_condition(fault: Fault) -> bool:
    """Whether a service says that it does not know a condition of the request."""
    return fault.code in _UNKNOWN_CONDITION or fault.status == 501


def lifecycle_configuration(prefix: str, ttl: float | None, *, quarantine_days: int = 7) -> dict[str, Any]:
    """A lifecycle configuration (for PutBucketLifecycleConfiguration, or Terraform) that fits a prefix.

    Args:
        prefix: of the records, as in the URL: "" or ending in "/".
        ttl: seconds, as the option; rounded up to whole days, which is all that S3 knows. None: records stay.
        quarantine_days: when corrupt records that were kept aside go.

    Unfinished uploads go after a day in any case.
    """
    rules: list[dict[str, Any]] = [
        {"ID": "kvstore-uploads", "Status": "Enabled", "Filter": {"Prefix": prefix},
         "AbortIncompleteMultipartUpload": {"DaysAfterInitiation": 1}},
        {"ID": "kvstore-quarantine", "Status": "Enabled", "Filter": {"Prefix": quarantine_prefix(prefix)},
         "Expiration": {"Days": quarantine_days}},
    ]  # fmt: skip
    if ttl is not None:
        days = max(1, math.ceil(ttl / _DAY_S))
        rules.append(
            {"ID": "kvstore-ttl", "Status": "Enabled", "Filter": {"Prefix": prefix}, "Expiration": {"Days": days}}
        )
    return {"Rules": rules}
