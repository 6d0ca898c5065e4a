"""What went wrong: anything that a client raises, mapped once.

| seen | becomes |
|---|---|
| deadline, DNS, connect, silence, reset, short body | `TransientError` that names it |
| 429, 503, SlowDown and its relatives | `Throttled`, a `TransientError`: the wrappers back off and ask less at once |
| 408, 409, 5xx but 501; an upload that a sweep aborted | `TransientError` |
| 403 with a wrong clock | `PermanentError` that names the clock |
| 403 | `PermanentError` with what to check |
| expired or unknown token, after one renewal | `PermanentError` |
| 301, 307, wrong region | `PermanentError` that names the right region |
| no such bucket, no credentials, a certificate that is not trusted, everything else | `PermanentError` |

404 and 412 are no errors. The text of a foreign exception is shown only where it holds no secret: an error code, or
the message of the service for a code that is not about signatures.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, NamedTuple

from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectionClosedError,
    ConnectTimeoutError,
    CredentialRetrievalError,
    EndpointConnectionError,
    HTTPClientError,
    NoCredentialsError,
    PartialCredentialsError,
    ReadTimeoutError,
    SSLError,
)

from kvstore.backend import Outcome
from kvstore.errors import KVStoreError, PermanentError, TransientError, from_os_error

from .client import BodyBroken
from .http import LinkError

__all__ = ["EXPIRED", "THROTTLED", "Fault", "Faults", "Throttled", "fault_of"]

THROTTLED = frozenset({
    "SlowDown", "Throttling", "ThrottlingException", "ThrottledException", "RequestThrottled", "TooManyRequests",
    "TooManyRequestsException", "RequestLimitExceeded", "RequestThrottledException", "BandwidthLimitExceeded",
    "ServiceUnavailable", "XMinioServerNotInitialized",
})  # fmt: skip
EXPIRED = frozenset({
    "ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "InvalidToken", "RequestExpired",
})  # fmt: skip
_SKEWED = frozenset({"RequestTimeTooSkewed", "RequestInTheFuture"})
_DENIED = frozenset({
    "AccessDenied", "AllAccessDisabled", "AccountProblem", "InvalidAccessKeyId", "SignatureDoesNotMatch",
    "InvalidSecurity", "NotSignedUp", "UnauthorizedAccess", "Forbidden", "InvalidPayer",
})  # fmt: skip
_ELSEWHERE = frozenset({
    "PermanentRedirect", "TemporaryRedirect", "Redirect", "AuthorizationHeaderMalformed",
    "IllegalLocationConstraintException", "IncorrectEndpoint",
})  # fmt: skip
_TRANSIENT = frozenset({
    "InternalError", "RequestTimeout", "RequestTimeoutException", "OperationAborted", "ConditionalRequestConflict",
    "BadDigest", "IncompleteBody", "NoSuchUpload",
})  # fmt: skip
_QUIET = frozenset({"SignatureDoesNotMatch", "InvalidAccessKeyId", "ExpiredToken", "InvalidToken", "AccessDenied"})


class Throttled(TransientError):
    """The service asked for fewer requests (429, 503 SlowDown), or a bucket of S3 Express wakes up."""


class Fault(NamedTuple):
    """What a service said.

    Attributes:
        status: HTTP status, 0 if there was none.
        code: S3's error code, or the status as text where there was no body (HEAD).
    """

    status: int
    code: str
    message: str = ""
    region: str = ""


def fault_of(error: BaseException) -> Fault | None:
    """The service's answer in an exception; None: it did not answer."""
    if not isinstance(error, ClientError):
        return None
    response: dict[str, Any] = error.response
    said = response.get("Error", {})
    meta = response.get("ResponseMetadata", {})
    headers = meta.get("HTTPHeaders", {})
    region = said.get("Region") or headers.get("x-amz-bucket-region") or ""
    return Fault(int(meta.get("HTTPStatusCode", 0)), str(said.get("Code", "")), str(said.get("Message", "")), region)


class Faults:
    """Maps exceptions to errors of ours.

    Args:
        backend: its name.
        bucket: for messages.
    """

    def __init__(self, backend: str, bucket: str) -> None:
        self._backend = backend
        self._bucket = bucket

    def late(self, operation: str, key: bytes | None = None) -> Outcome:
        error = TransientError("the deadline passed", backend=self._backend, operation=operation, key=key)
        return Outcome.failed(error)

    def outcome(self, error: BaseException, operation: str, key: bytes | None = None) -> Outcome:
        return Outcome.failed(self.of(error, operation, key))

    def of(self, error: BaseException, operation: str, key: bytes | None = None) -> KVStoreError:
        """The error of ours for `error`, which becomes its cause."""
        if isinstance(error, KVStoreError):
            return error
        where: dict[str, Any] = {"backend": self._backend, "operation": operation, "key": key, "cause": error}
        if isinstance(error, BodyBroken):
            inner = self.of(error.cause, operation, key)
            text = f"the body was cut after {error.nbytes} bytes: {inner.message}"
            return TransientError(text, **where)
        if isinstance(error, LinkError):
            return (PermanentError if error.kind == "tls" else TransientError)(str(error), **where)
        fault = fault_of(error)
        if fault is not None:
            kind, text = self._said(fault)
            return kind(text, **where)
        return self._unanswered(error, where)

    def refused(self, said: Mapping[str, Any], operation: str, key: bytes) -> KVStoreError:
        """The error for one entry of `Errors` in an answer of DeleteObjects, which itself was a success."""
        code = str(said.get("Code", ""))
        status = {"AccessDenied": 403, "InternalError": 500, "SlowDown": 503}.get(code, 200)
        kind, text = self._said(Fault(status, code, str(said.get("Message", ""))))
        return kind(text, backend=self._backend, operation=operation, key=key)

    def _said(self, fault: Fault) -> tuple[type[KVStoreError], str]:
        status, code = fault.status, fault.code
        shown = code if code and not code.isdigit() else "no error code"
        answer = f"the service answered {status} ({shown})"
        if code in THROTTLED or code.endswith("ThrottlingException") or status in (429, 503):  # KMS has its own
            return Throttled, f"{answer}: it asks for fewer requests"
        if code in _SKEWED:
            return PermanentError, f"{answer}: this machine's clock is wrong; set it right (NTP)"
        if code in EXPIRED:
            return PermanentError, f"{answer}: the credentials have expired and their source has no newer ones"
        if code in _ELSEWHERE or status in (301, 307, 308):
            hint = (
                f"the bucket is in {fault.region}; set region={fault.region}" if fault.region else "set option region"
            )
            return PermanentError, f"{answer}: bucket {self._bucket} is not in the region that was asked; {hint}"
        if code == "NoSuchBucket":
            return PermanentError, f"{answer}: there is no bucket {self._bucket} (at this endpoint, in this region)"
        if code in _DENIED or status in (401, 403):
            return PermanentError, f"{answer}: access denied; {self._what_to_check(code)}"
        if status == 404 and code in ("", "404"):
            return PermanentError, f"{answer} to a GET, as no S3 service does: check endpoint_url"
        said = f": {fault.message[:200]}" if fault.message and code not in _QUIET else ""
        if code in _TRANSIENT or status in (408, 409) or (status >= 500 and status != 501):
            return TransientError, answer + said
        return PermanentError, answer + said

    def _what_to_check(self, code: str) -> str:
        if code == "InvalidAccessKeyId":
            return "the access key does not exist: check the credentials and the endpoint"
        if code == "SignatureDoesNotMatch":
            return "the secret key does not fit the access key, or a proxy changes requests"
        allow = (
            "s3express:CreateSession"
            if self._bucket.endswith("--x-s3")
            else "s3:GetObject, s3:PutObject, s3:DeleteObject"
        )
        return (
            f"check that the policy allows {allow} and s3:ListBucket on {self._bucket} (without it a missing "
            "object is a 403), and bucket policy, VPC endpoint policy, KMS key and clock"
        )

    def _unanswered(self, error: BaseException, where: dict[str, Any]) -> KVStoreError:
        name = type(error).__name__
        if isinstance(error, NoCredentialsError | PartialCredentialsError):
            text = "no credentials were found: set them up in the standard AWS chain, or as secret options"
            return PermanentError(text, **where)
        if isinstance(error, CredentialRetrievalError):
            return TransientError("the credentials could not be fetched or refreshed from their source", **where)
        if isinstance(error, SSLError):
            return PermanentError("TLS failed; see option ca_bundle", **where)
        if isinstance(error, ConnectTimeoutError):
            return TransientError("no connection in time", **where)
        if isinstance(error, ReadTimeoutError):
            return TransientError("the server fell silent", **where)
        if isinstance(error, EndpointConnectionError):
            return TransientError("no connection to the endpoint", **where)
        if isinstance(error, ConnectionClosedError):
            return TransientError("the connection broke", **where)
        if isinstance(error, HTTPClientError):
            return TransientError(f"the connection failed: {name}", **where)
        if isinstance(error, TimeoutError | asyncio.TimeoutError):
            return TransientError("the deadline passed", **where)
        if isinstance(error, OSError):
            where.pop("cause")
            return from_os_error(error, what="connection", **where)
        if isinstance(error, BotoCoreError):
            return PermanentError(f"botocore refused the call: {name}", **where)
        if _is_aiohttp(error):
            return TransientError(f"the connection failed: {name}", **where)
        return PermanentError(f"the client raised {name}", **where)


def _is_aiohttp(error: BaseException) -> bool:
    return type(error).__module__.partition(".")[0] == "aiohttp"
