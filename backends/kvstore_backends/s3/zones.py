"""Which availability zone this machine is in, so that of several S3 Express buckets the near one is read first.

Zones go by id (`usw2-az1`): the name `us-west-2a` is another zone in each account.
"""

from __future__ import annotations

import http.client
import logging
import os
import re
import threading
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from kvstore.errors import ConfigError

__all__ = ["AUTO", "check_zone", "own_zone"]

logger = logging.getLogger("kvstore.backends.s3")

AUTO = "auto"
_VARIABLE = "AWS_AVAILABILITY_ZONE_ID"
_ID = re.compile(r"[a-z0-9]+(?:-[a-z0-9]+)?-az[0-9]+", re.ASCII)
# "Use the Instance Metadata Service" and "Instance metadata categories", EC2 user guide. Version 2: with a token.
_ENDPOINTS = {"ipv4": "http://169.254.169.254/", "ipv6": "http://[fd00:ec2::254]/"}
_TOKEN = "latest/api/token"
_ZONE = "latest/meta-data/placement/availability-zone-id"
_LONGEST_ANSWER = 4096

_lock = threading.Lock()
_known: dict[str, str] = {}  # endpoint → zone; a machine stays where it is


def check_zone(zone: str, source: str = "option 'zone'") -> str:
    """`zone` if it is "auto" or the id of a zone.

    Raises:
        ConfigError: it is not; names `source`.
    """
    if zone != AUTO and not _ID.fullmatch(zone):
        raise ConfigError(f"{source}: {zone!r} is not the id of a zone (usw2-az1; not its name, us-west-2a)")
    return zone


def own_zone(zone: str, session: Any) -> str | None:
    """The id of this machine's zone; None if that cannot be told. May ask the instance's metadata service, for up to
    three times botocore's `metadata_service_timeout` (1 s).

    Args:
        zone: the option: an id, or "auto".
        session: botocore's, for where the metadata service is.
    """
    found = os.environ.get(_VARIABLE, "").strip() if zone == AUTO else zone
    if found:
        return check_zone(found, f"environment variable {_VARIABLE}")
    if os.environ.get("AWS_EC2_METADATA_DISABLED", "").strip().lower() == "true":
        return None
    mode = str(session.get_config_variable("ec2_metadata_service_endpoint_mode") or "ipv4").lower()
    endpoint = session.get_config_variable("ec2_metadata_service_endpoint") or _ENDPOINTS.get(mode, _ENDPOINTS["ipv4"])
    with _lock:
        if endpoint not in _known:
            try:
                _known[endpoint] = _asked(endpoint, float(session.get_config_variable("metadata_service_timeout") or 1))
            except (OSError, http.client.HTTPException, ValueError) as error:
                logger.info("the zone of this machine is not known (%s); see option zone", type(error).__name__)
                return None
        return _known[endpoint]


def _asked(endpoint: str, timeout: float) -> str:
    """What the metadata service says. Raises `OSError`, `HTTPException` or `ValueError`."""
    parts = urlsplit(endpoint)
    if parts.scheme != "http" or not parts.hostname:
        raise ValueError(endpoint)
    connection = http.client.HTTPConnection(parts.hostname, parts.port or 80, timeout=timeout)
    path = parts.path.rstrip("/") + "/"
    try:
        token = _exchange(connection, "PUT", path + _TOKEN, {"X-aws-ec2-metadata-token-ttl-seconds": "60"})
        zone = _exchange(connection, "GET", path + _ZONE, {"X-aws-ec2-metadata-token": token})
    finally:
        connection.close()
    if not _ID.fullmatch(zone):
        raise ValueError("no zone id")
    return zone


def _exchange(connection: http.client.HTTPConnection, method: str, path: str, headers: Mapping[str, str]) -> str:
    connection.request(method, path, headers=dict(headers))
    answer = connection.getresponse()
    data = answer.read(_LONGEST_ANSWER)
    if answer.status != http.HTTPStatus.OK:
        raise http.client.HTTPException(str(answer.status))
    return data.decode("ascii").strip()
