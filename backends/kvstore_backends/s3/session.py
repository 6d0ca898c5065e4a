"""botocore sessions and clients as we want them: no payload hashing, no checksums by default, no retries of its own."""

from __future__ import annotations

import base64
import contextlib
import functools
import hashlib
import os
import re
import ssl
import sys
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import boto3
import botocore.session
from botocore.config import Config
from botocore.exceptions import BotoCoreError, CredentialRetrievalError
from botocore.httpsession import get_cert_path
from botocore.loaders import create_loader

from kvstore.errors import ConfigError

from .options import Settings

__all__ = [
    "client_arguments",
    "is_aws",
    "make_client",
    "make_session",
    "named",
    "on_delete_objects",
    "refuse_mock",
    "strip_expect",
    "tls_context",
]

_AWS = re.compile(r"(.*\.)?amazonaws\.com(\.cn)?", re.ASCII)


@functools.cache
def _loader(data_path: str | None) -> Any:
    """One loader for all sessions: it keeps the service models, which take 0.1 s to read."""
    return create_loader(data_path)


@contextlib.contextmanager
def named(settings: Settings) -> Iterator[None]:
    """What a library refuses while a client is being made, as `ConfigError`: a profile that is not there, a file that
    cannot be parsed, half a pair of keys, a source of credentials that fails."""
    try:
        yield
    except CredentialRetrievalError as error:  # its text may hold what a credential_process said
        source = error.kwargs.get("provider", "their source")
        raise ConfigError(f"s3://{settings.bucket}: the credentials could not be fetched from {source}") from error
    except (BotoCoreError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"s3://{settings.bucket}: {error}") from error


def make_session(settings: Settings) -> Any:
    """A botocore session with the options' profile and credentials; without them the standard chain is asked.

    $AWS_REGION, if it is set, is its region: botocore itself reads AWS_DEFAULT_REGION and the profile only.

    Raises:
        ConfigError: there is no such profile, or the AWS configuration cannot be read.
    """
    with named(settings):
        session = botocore.session.Session(profile=settings.profile)
        session.register_component("data_loader", _loader(session.get_config_variable("data_path")))
    if region := os.environ.get("AWS_REGION"):
        session.set_config_variable("region", region)
    if settings.access_key_id is not None:
        session.set_credentials(settings.access_key_id, settings.secret_access_key, settings.session_token)
    return session


def region_of(settings: Settings, session: Any) -> str:
    """The region: the option's, that of AWS_REGION, of AWS_DEFAULT_REGION, or the profile's. Behind an endpoint of
    one's own any will do.

    Args:
        session: of `make_session`.

    Raises:
        ConfigError: none is known.
    """
    found = settings.region or session.get_config_variable("region")
    if found:
        return str(found)
    if settings.endpoint_url is not None:
        return "us-east-1"
    raise ConfigError(
        f"s3://{settings.bucket}: which region? Give the option region=…, or set AWS_REGION, "
        "AWS_DEFAULT_REGION or the profile's region"
    )


def tls_context(settings: Settings, session: Any) -> ssl.SSLContext:
    """What is trusted: the option's certificates, those that AWS_CA_BUNDLE or the profile names, or botocore's.

    Raises:
        ConfigError: the file cannot be read, or holds no certificate.
    """
    cafile = settings.ca_bundle or session.get_config_variable("ca_bundle") or get_cert_path(True)
    try:
        return ssl.create_default_context(cafile=cafile)
    except OSError as error:  # ssl.SSLError too
        what = error.strerror or type(error).__name__
        raise ConfigError(
            f"s3://{settings.bucket}: the certificates in {cafile} cannot be used: {what}; "
            "see option ca_bundle and AWS_CA_BUNDLE"
        ) from error


def is_aws(endpoint: str) -> bool:
    """Whether an endpoint is Amazon's own, a VPC endpoint included."""
    return _AWS.fullmatch(urlsplit(endpoint).hostname or "") is not None


def refuse_mock(settings: Settings, endpoint: str) -> None:
    """Raise `ConfigError` under moto's `mock_aws`, which catches what boto3 sends and nothing of any other client: that
    would reach Amazon."""
    stubber = getattr(sys.modules.get("moto.core.models"), "botocore_stubber", None)
    if getattr(stubber, "enabled", False) and is_aws(endpoint):
        raise ConfigError(
            f"s3://{settings.bucket}: moto's mock_aws is active, under which only client=boto3 works; "
            "moto's ThreadedMotoServer, with endpoint_url, works with every client"
        )


def client_arguments(settings: Settings, session: Any) -> dict[str, Any]:
    """Arguments for `Session.client("s3", …)`, the same for all client libraries.

    Retries are off: `kvstore.wrappers.RetryingBackend` does them, once, inside the deadline. Two layers would multiply.
    """
    config = {
        "s3": {"payload_signing_enabled": False, "addressing_style": settings.addressing},
        "request_checksum_calculation": "when_required",
        "response_checksum_validation": "when_required",
        "retries": {"mode": "standard", "total_max_attempts": 1},
        "connect_timeout": settings.connect_timeout,
        "read_timeout": settings.read_timeout,
        "max_pool_connections": settings.lanes + settings.meta_lanes,
        "user_agent_extra": "kvstore",
    }
    if settings.ca_bundle is not None:
        tls_context(settings, session)  # refused now, not at the first request
    arguments: dict[str, Any] = {"region_name": region_of(settings, session), "config": config}
    if settings.endpoint_url is not None:
        arguments["endpoint_url"] = settings.endpoint_url
    if settings.ca_bundle is not None:
        arguments["verify"] = settings.ca_bundle
    return arguments


def make_client(settings: Settings, session: Any) -> Any:
    """A boto3 client. Raises `ConfigError` for what botocore refuses."""
    arguments = client_arguments(settings, session)
    with named(settings):
        arguments["config"] = Config(**arguments["config"])
        client = boto3.Session(botocore_session=session).client("s3", **arguments)
    client.meta.events.register_first("before-call.s3.DeleteObjects", on_delete_objects(settings, client))
    return client


def strip_expect(request: Any, **_: Any) -> None:
    """Strip `Expect: 100-continue`: stock clients wait a second, or for ever, for servers that do not know it."""
    if "Expect" in request.headers:
        del request.headers["Expect"]


def on_delete_objects(settings: Settings, client: Any) -> Any:
    """Adds Content-MD5, which servers of before 2025 insist on. S3 itself takes the CRC32 that botocore sends; S3
    Express refuses an MD5."""
    wanted = not settings.express and not is_aws(client.meta.endpoint_url)

    def handler(params: dict[str, Any], **_: Any) -> None:
        body = params.get("body")
        if wanted and isinstance(body, bytes):
            digest = hashlib.md5(body, usedforsecurity=False).digest()
            params["headers"].setdefault("Content-MD5", base64.b64encode(digest).decode("ascii"))

    return handler
