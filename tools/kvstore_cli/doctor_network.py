"""The way to a place, looked at step by step without kvstore's own connections: name, TCP, TLS, and for S3 what can be
asked without signing: the service's clock and the bucket's region."""

from __future__ import annotations

import contextlib
import http.client
import socket
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import quote, urlsplit

from kvstore.errors import ConfigError
from kvstore.registry import BackendURL

from .doctor_checks import Late, Place, within

__all__ = ["Target", "check_s3_service", "check_way", "targets_of"]

_MOST_SKEW_S, _NOTABLE_SKEW_S = 900.0, 60.0  # S3 refuses signatures that are a quarter of an hour off
_SOON_EXPIRED_S = 14 * 86400


@dataclass(frozen=True, slots=True)
class Target:
    """One end to reach.

    Attributes:
        host, port: "" and 0 for a Unix socket.
        path: of the Unix socket, else "".
        tls: makes the context to connect with; None: no TLS.
        server_name: whose certificate is wanted.
    """

    host: str = ""
    port: int = 0
    path: str = ""
    tls: Callable[[], ssl.SSLContext] | None = None
    server_name: str = ""

    @property
    def shown(self) -> str:
        return self.path or (f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}")


def targets_of(url: BackendURL, options: Mapping[str, Any]) -> list[Target]:
    """Where a URL leads to; empty for what is on this host, or unknown (a scheme of others).

    Raises:
        ConfigError: the URL makes no sense to its backend.
    """
    if url.scheme in ("node", "kvstore+ucx"):
        return _nodes(url, options)
    if url.scheme in ("valkey", "valkeys"):
        return _valkey(url, options)
    if url.scheme == "s3":
        return _s3(url, options)
    if url.scheme == "file" and url.authority:
        raise ConfigError(f"file:// takes no host; for a folder write three slashes: file:///{url.authority}{url.path}")
    if url.scheme == "file" and url.path in ("", "/"):
        raise ConfigError("file:// needs the absolute path of a folder, for instance file:///mnt/kv")
    if url.scheme == "mooncake":
        return [_host_port(url.authority)] if url.authority else []
    return []


def _host_port(text: str) -> Target:
    host, _, port = text.rpartition(":")
    return Target(host.strip("[]"), int(port)) if port.isdigit() and host else Target(text.strip("[]"), 50051)


def _nodes(url: BackendURL, options: Mapping[str, Any]) -> list[Target]:
    from kvstore_backends.node.dial import tls_context
    from kvstore_backends.node.options import settings_from_url
    from kvstore_transport.addresses import parse_address

    settings = settings_from_url(url, options)
    found = []
    for member in settings.members:
        if member.is_path:
            found.append(Target(path=member.address))
            continue
        address = parse_address(member.address)
        tls = (lambda: tls_context(settings)) if settings.tls else None
        found.append(Target(address.host, address.port, "", tls, settings.tls_server_name or address.host))
    return found


def _valkey(url: BackendURL, options: Mapping[str, Any]) -> list[Target]:
    from kvstore_backends.valkey.options import settings_from_url

    settings = settings_from_url(url, options)

    def context() -> ssl.SSLContext:
        made = ssl.create_default_context(cafile=settings.tls_ca)
        if settings.tls_cert is not None:
            made.load_cert_chain(settings.tls_cert, settings.tls_key)
        return made

    tls = context if settings.tls else None
    return [Target(seed.host, seed.port, "", tls, settings.tls_server_name or seed.host) for seed in settings.seeds]


def s3_endpoint(url: BackendURL, options: Mapping[str, Any]) -> str:
    """The URL of the service, with the bucket in the host name where S3 Express has it there.

    Raises:
        ConfigError: no region is known.
    """
    from kvstore_backends.s3.express import zone_of
    from kvstore_backends.s3.options import settings_from_url
    from kvstore_backends.s3.session import make_session, region_of

    settings = settings_from_url(url, options)
    if settings.endpoint_url is not None:
        return settings.endpoint_url
    region = region_of(settings, make_session(settings))
    dot = "amazonaws.com.cn" if region.startswith("cn-") else "amazonaws.com"
    if settings.express:
        return f"https://{settings.bucket}.s3express-{zone_of(settings.bucket)}.{region}.{dot}"
    return f"https://s3.{region}.{dot}"


def _s3(url: BackendURL, options: Mapping[str, Any]) -> list[Target]:
    from kvstore_backends.s3.options import settings_from_url
    from kvstore_backends.s3.session import make_session, tls_context

    settings = settings_from_url(url, options)
    parts = urlsplit(s3_endpoint(url, options))
    secure = parts.scheme == "https"
    host = parts.hostname or ""
    tls = (lambda: tls_context(settings, make_session(settings))) if secure else None
    return [Target(host, parts.port or (443 if secure else 80), "", tls, host)]


def check_way(place: Place, target: Target) -> bool:
    """Name, TCP and TLS of one target; whether all of it works. Ends by the place's deadline."""
    if target.path:
        return _check_unix(place, target)
    addresses = _check_dns(place, target)
    if not addresses:
        return False
    sock = _check_tcp(place, target, addresses)
    if sock is None:
        return False
    with contextlib.closing(sock):
        return target.tls is None or _check_tls(place, target, sock)


def _check_unix(place: Place, target: Target) -> bool:
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as sock:
        sock.settimeout(max(0.01, place.left / 2))
        try:
            sock.connect(target.path)
        except OSError as error:
            place.add(
                "socket",
                "fail",
                f"{target.path}: {error.strerror or error}",
                "is `kvstore serve --unix` running on this host, and may this user use its socket (--unix-users)?",
            )
            return False
    place.add("socket", "ok", f"{target.path} accepts connections")
    return True


def _check_dns(place: Place, target: Target) -> list[tuple[Any, ...]]:
    began = time.monotonic()
    try:
        found = within(
            lambda: socket.getaddrinfo(target.host, target.port, type=socket.SOCK_STREAM), place.soon(place.left / 2)
        )
    except Late:
        place.add(
            "dns",
            "fail",
            f"the name server did not answer for {target.host} in time",
            "check the resolver of this host (/etc/resolv.conf, the VPC's DNS settings)",
        )
        return []
    except (OSError, UnicodeError) as error:
        text = getattr(error, "strerror", None) or str(error)
        place.add(
            "dns",
            "fail",
            f"{target.host} has no address: {text}",
            "check the spelling of the host, the region, and that this host's resolver knows private names",
        )
        return []
    addresses = list(dict.fromkeys(str(entry[4][0]) for entry in found))
    took = (time.monotonic() - began) * 1e3
    more = f" and {len(addresses) - 3} more" if len(addresses) > 3 else ""
    place.add(
        "dns",
        "ok",
        f"{target.host} is {', '.join(addresses[:3])}{more} ({took:.1f} ms)",
        addresses=addresses[:16],
        ms=took,
    )
    return found[:4]


def _check_tcp(place: Place, target: Target, addresses: list[tuple[Any, ...]]) -> socket.socket | None:
    """An open connection; the first address that takes one."""
    said = "no time was left"
    timed_out = False
    share = place.left / 2 / len(addresses)
    for family, kind, protocol, _, address in addresses:
        sock = socket.socket(family, kind, protocol)
        sock.settimeout(max(0.01, min(share, place.left)))
        began = time.monotonic()
        try:
            sock.connect(address)
        except OSError as error:
            sock.close()
            timed_out = isinstance(error, TimeoutError)
            said = "no answer to a connection" if timed_out else error.strerror or str(error)
            continue
        took = (time.monotonic() - began) * 1e3
        place.add("tcp", "ok", f"{target.shown} takes connections ({took:.2f} ms)", ms=took)
        return sock
    advice = "nothing listens there: check host and port, and that the service runs"
    if timed_out:
        advice = "packets are dropped on the way: check security groups, network ACLs, routes and VPC endpoints"
    place.add("tcp", "fail", f"{target.shown}: {said}", advice)
    return None


def _check_tls(place: Place, target: Target, sock: socket.socket) -> bool:
    assert target.tls is not None
    began = time.monotonic()
    try:
        context = target.tls()
    except (ConfigError, OSError) as error:
        place.add(
            "tls", "fail", f"the certificates cannot be used: {error}", "check the options that name files of TLS"
        )
        return False
    try:
        sock.settimeout(max(0.01, place.left / 2))
        with context.wrap_socket(sock, server_hostname=target.server_name) as secured:
            version, certificate = secured.version(), secured.getpeercert() or {}
    except ssl.SSLCertVerificationError as error:
        place.add(
            "tls",
            "fail",
            f"the certificate of {target.shown} is not trusted: {error.verify_message}",
            "give the file of its authority (s3: ca_bundle, others: tls_ca), or the name it bears (tls_server_name)",
        )
        return False
    except (OSError, ValueError) as error:
        said = "no answer" if isinstance(error, TimeoutError) else getattr(error, "reason", None) or str(error)
        place.add(
            "tls",
            "fail",
            f"{target.shown} does not speak TLS as expected: {said}",
            "check that the port is one of TLS: https:// or http://, valkeys:// or valkey://, tls=true or not",
        )
        return False
    took = (time.monotonic() - began) * 1e3
    left = ssl.cert_time_to_seconds(str(certificate["notAfter"])) - time.time() if "notAfter" in certificate else None
    if left is not None and left < _SOON_EXPIRED_S:
        place.add(
            "tls",
            "warn",
            f"{version}; the certificate of {target.shown} expires in {left / 86400:.1f} days",
            "renew it",
            version=version,
            days_left=left / 86400,
            ms=took,
        )
    else:
        days = None if left is None else left / 86400
        place.add("tls", "ok", f"{version} ({took:.1f} ms)", version=version, days_left=days, ms=took)
    return True


def check_s3_service(place: Place, url: BackendURL, options: Mapping[str, Any]) -> bool:
    """The service's clock and the bucket's region, by one unsigned HEAD. False: what comes next cannot work."""
    from kvstore_backends.s3.options import settings_from_url
    from kvstore_backends.s3.session import make_session, region_of

    settings = settings_from_url(url, options)
    target = _s3(url, options)[0]
    timeout = max(0.01, place.left / 3)
    connection: http.client.HTTPConnection
    if target.tls is None:
        connection = http.client.HTTPConnection(target.host, target.port, timeout=timeout)
    else:
        connection = http.client.HTTPSConnection(target.host, target.port, timeout=timeout, context=target.tls())
    before = time.time()
    try:
        with contextlib.closing(connection):
            connection.request("HEAD", "/" if settings.express else f"/{quote(settings.bucket)}")
            answer = connection.getresponse()
            headers = {name.lower(): value for name, value in answer.getheaders()}
    except TimeoutError:
        place.add(
            "http",
            "fail",
            f"{target.shown} takes connections, but did not answer a request",
            "check that endpoint_url is an S3 service, and any proxy in between",
        )
        return False
    except (OSError, http.client.HTTPException) as error:
        place.add(
            "http",
            "fail",
            f"{target.shown} does not speak HTTP: {type(error).__name__}",
            "check scheme and port of endpoint_url",
        )
        return False
    good = _clock(place, headers.get("date"), before, time.time())
    actual = headers.get("x-amz-bucket-region")
    wanted = region_of(settings, make_session(settings))
    if actual is None:
        place.add(
            "region",
            "skip",
            f"the service does not say where the bucket is; {wanted} is used to sign",
            signing_region=wanted,
        )
    elif actual != wanted:
        place.add(
            "region",
            "fail",
            f"the bucket is in {actual}, and {wanted} is asked",
            f"set region={actual}",
            bucket_region=actual,
            signing_region=wanted,
        )
        good = False
    else:
        place.add("region", "ok", f"the bucket is in {actual}", bucket_region=actual, signing_region=wanted)
    return good


def _clock(place: Place, date: str | None, before: float, after: float) -> bool:
    try:
        there = parsedate_to_datetime(date or "").timestamp()
    except (ValueError, TypeError, OverflowError):
        place.add("clock", "skip", "the service does not say what time it has")
        return True
    # A date has whole seconds, cut off: half a second more on average.
    skew = (before + after) / 2 - there - 0.5
    shown = f"this host's clock is {abs(skew):.0f} s {'ahead of' if skew > 0 else 'behind'} the service's"
    if abs(skew) >= _MOST_SKEW_S:
        place.add(
            "clock",
            "fail",
            shown,
            "signatures are refused from 15 minutes on: set the clock by NTP (chrony)",
            skew_s=skew,
        )
        return False
    if abs(skew) >= _NOTABLE_SKEW_S:
        place.add("clock", "warn", shown, "set the clock by NTP (chrony) before it gets worse", skew_s=skew)
    else:
        place.add("clock", "ok", "this host's clock agrees with the service's", skew_s=skew)
    return True


def check_s3_credentials(place: Place, url: BackendURL, options: Mapping[str, Any]) -> bool:
    """Whether the standard chain finds credentials; says from where, never which."""
    from kvstore_backends.s3.options import settings_from_url
    from kvstore_backends.s3.session import make_session

    settings = settings_from_url(url, options)

    def find() -> Any:
        found = make_session(settings).get_credentials()
        if found is not None:
            found.get_frozen_credentials()  # temporary ones are fetched here
        return found

    try:
        found = within(find, place.soon(place.left / 2))
    except Late:
        place.add(
            "credentials",
            "fail",
            "their source did not answer in time",
            "on EC2: is IMDSv2 reachable (hop limit 2 in containers, or Pod Identity)? elsewhere: set "
            "AWS_EC2_METADATA_DISABLED=true and give keys or a profile",
        )
        return False
    except ConfigError as error:
        place.add("credentials", "fail", error.message, "check AWS_PROFILE, ~/.aws/config and option profile")
        return False
    except Exception as error:  # noqa: BLE001 - whatever a source raises; its text may hold a secret
        place.add(
            "credentials",
            "fail",
            f"their source failed ({type(error).__name__})",
            "check the role, the token file or the credential_process that AWS_* variables or the profile name",
        )
        return False
    if found is None:
        place.add(
            "credentials",
            "fail",
            "none were found",
            "give the instance or pod a role, set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or name a profile",
        )
        return False
    method = "the options" if settings.access_key_id is not None else str(getattr(found, "method", None) or "the chain")
    place.add("credentials", "ok", f"found, from {method}", method=method)
    return True
