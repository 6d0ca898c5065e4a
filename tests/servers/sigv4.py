"""Checks AWS Signature Version 4 of a request, the server's side, from its description alone.

Source: AWS General Reference, "Create a signed AWS API request". S3 does not normalise the path and encodes it once.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Mapping
from typing import NamedTuple
from urllib.parse import parse_qsl, quote

__all__ = ["Credential", "canonical_request", "parse_authorization", "signature"]

_AUTHORIZATION = re.compile(
    r"AWS4-HMAC-SHA256 Credential=([^/]+)/(\d{8})/([^/]+)/([^/]+)/aws4_request, ?"
    r"SignedHeaders=([^,]+), ?Signature=([0-9a-f]{64})"
)


class Credential(NamedTuple):
    """What an Authorization header says."""

    access_key: str
    date: str
    region: str
    service: str
    signed_headers: tuple[str, ...]
    signature: str


def parse_authorization(value: str) -> Credential | None:
    """None if it is not SigV4."""
    match = _AUTHORIZATION.fullmatch(value)
    if match is None:
        return None
    access_key, date, region, service, headers, signed = match.groups()
    return Credential(access_key, date, region, service, tuple(headers.split(";")), signed)


def canonical_request(method: str, path: str, query: str, headers: Mapping[str, str], signed: tuple[str, ...]) -> str:
    """`path` as it came, `headers` by lower-case name. The payload's hash is taken from its header."""
    pairs = sorted(
        f"{quote(name, safe='-_.~')}={quote(value, safe='-_.~')}"
        for name, value in parse_qsl(query, keep_blank_values=True)
    )
    lines = [f"{name}:{' '.join(headers.get(name, '').split())}" for name in signed]
    payload = headers.get("x-amz-content-sha256", "UNSIGNED-PAYLOAD")
    return "\n".join([method, path, "&".join(pairs), *lines, "", ";".join(signed), payload])


def signature(secret_key: str, amz_date: str, credential: Credential, canonical: str) -> str:
    """The signature that the request should carry."""
    scope = f"{credential.date}/{credential.region}/{credential.service}/aws4_request"
    key = f"AWS4{secret_key}".encode()
    for part in (credential.date, credential.region, credential.service, "aws4_request"):
        key = hmac.digest(key, part.encode(), "sha256")
    text = "\n".join(["AWS4-HMAC-SHA256", amz_date, scope, hashlib.sha256(canonical.encode()).hexdigest()])
    return hmac.new(key, text.encode(), hashlib.sha256).hexdigest()
