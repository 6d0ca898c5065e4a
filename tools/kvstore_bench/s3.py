"""What `kvstore-bench io s3://…` needs besides the backend: where its ceiling puts objects, and the other clients.

`--compare-clients` measures the same records through the backend with each of its clients (native, boto3, aioboto3),
and through obstore and awscrt if they are installed, in one run against one ceiling. The peers are set up as well as
their manuals allow: no payload signing, no checksums, connections kept, the caller's threads. What they bring is copied
into the caller's memory where they cannot write there themselves.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import re
import time
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from kvstore.backend import Outcome, Status, Write
from kvstore.errors import ConfigError, TransientError
from kvstore.keys import opaque_key
from kvstore.registry import open_backend

from .targets import BackendTarget, Call, Target

if TYPE_CHECKING:
    from kvstore.keys import Key
    from kvstore.registry import BackendURL
    from kvstore_backends.s3.options import Settings

    from .ceilings_http import HttpPlace

__all__ = ["CLIENTS", "AwscrtTarget", "ObstoreTarget", "check_place", "other_clients", "place_of", "settings_of"]

CLIENTS = ("native", "boto3", "aioboto3", "obstore", "awscrt")
_DELETE_MOST = 1000
_CHECK_S = 20.0
_PART = 8 << 20


def settings_of(url: BackendURL) -> Settings:
    """The typed settings of an `s3://` URL."""
    from kvstore.registry import backend_class, split_options
    from kvstore_backends.s3.options import settings_from_url

    return settings_from_url(url, split_options(url, backend_class("s3")).own)


def check_place(url: BackendURL, run_id: str) -> None:
    """Put a tiny record and delete it again, so that what is wrong with bucket, keys or endpoint is said in our words
    before anything is measured.

    Raises:
        KVStoreError: what is wrong.
    """
    with contextlib.closing(open_backend(url)) as backend:
        key, deadline = opaque_key(f"kvstore-bench {run_id}"), time.monotonic() + _CHECK_S
        for (outcome,) in (
            backend.put([Write(key, [memoryview(b"kvstore-bench")])], deadline=deadline),
            backend.delete([key], deadline=deadline),
        ):
            if outcome.error is not None:
                raise outcome.error


def place_of(url: BackendURL, run_id: str) -> HttpPlace:
    """Where the raw ceiling of this URL keeps its objects: beside the records, under a name of this run."""
    return _place(settings_of(url), f"kvstore-bench-raw/{run_id}")


def _place(settings: Settings, folder: str) -> HttpPlace:
    from botocore.config import Config

    from kvstore_backends.s3.session import client_arguments, make_session

    from .ceilings_http import HttpPlace

    arguments = dict(client_arguments(settings, make_session(settings)))
    config = arguments["config"]
    arguments["config"] = Config(**(config if isinstance(config, dict) else {}), signature_version="s3v4")
    session: dict[str, Any] = {}
    if settings.profile is not None:
        session["profile_name"] = settings.profile
    if settings.access_key_id is not None:
        session |= {
            "aws_access_key_id": settings.access_key_id, "aws_secret_access_key": settings.secret_access_key,
            "aws_session_token": settings.session_token,
        }  # fmt: skip
    if settings.express:
        del arguments["config"]  # S3 Express signs with a scheme of its own
    return HttpPlace(settings.bucket, f"{settings.prefix}{folder}", arguments, session)


def other_clients(
    url: BackendURL, *, lanes: int | None, only: Sequence[str] = CLIENTS
) -> Iterator[tuple[str, Target | None]]:
    """Each other client of this URL and its target; None for one that is not installed.

    The backend's own choice is left out: it is what the row without a suffix shows.
    """
    settings = settings_of(url)
    for name in (name for name in only if name != settings.client):
        if importlib.util.find_spec(name if name != "native" else "boto3") is None:
            yield name, None
            continue
        if name in ("obstore", "awscrt"):
            made: Target = (ObstoreTarget if name == "obstore" else AwscrtTarget)(url, settings, lanes=lanes)
        else:
            made = BackendTarget(replace(url, options={**url.options, "client": name}), lanes=lanes)
            made.scheme = f"s3_{name}"
        yield name, made


@dataclass(frozen=True)
class _Credentials:
    access_key: str
    secret_key: str
    token: str | None


class _PeerTarget(Target):
    """A client library without our backend around it: one object per record, whole objects."""

    def __init__(self, url: BackendURL, settings: Settings, *, name: str, lanes: int | None) -> None:
        if settings.express:
            raise ConfigError(f"{name} cannot be pointed at an S3 Express bucket behind an endpoint of one's own")
        self.url, self.scheme = str(url), f"s3_{name}"
        self.lanes = lanes or settings.lanes
        self._place = _place(settings, f"kvstore-bench-{name}")
        self._settings = settings
        self._client = self._place.open()

    def _credentials(self) -> _Credentials:
        from kvstore_backends.s3.session import make_session

        found = make_session(self._settings).get_credentials()
        if found is None:
            raise ConfigError("no AWS credentials were found")
        frozen = found.get_frozen_credentials()
        return _Credentials(frozen.access_key, frozen.secret_key, frozen.token)

    def _name(self, key: Key) -> str:
        return f"{self._place.prefix}/{key.hex()}"

    @abstractmethod
    def _get(self, names: Sequence[str], destinations: Sequence[memoryview]) -> list[int]:
        """Fill the destinations; the bytes that each got."""

    @abstractmethod
    def _put(self, names: Sequence[str], sources: Sequence[memoryview]) -> None:
        """Store the sources."""

    def reader(self, keys: Sequence[Key], destinations: Sequence[memoryview]) -> Call:
        names = [self._name(key) for key in keys]

        def call(_: float) -> list[Outcome]:
            try:
                return [Outcome(Status.OK, nbytes) for nbytes in self._get(names, destinations)]
            except Exception as error:  # noqa: BLE001 - each library has errors of its own; the report shows them
                return [self._failed(error)] * len(names)

        return call

    def writer(self, keys: Sequence[Key], sources: Sequence[memoryview]) -> Call:
        names = [self._name(key) for key in keys]

        def call(_: float) -> list[Outcome]:
            try:
                self._put(names, sources)
            except Exception as error:  # noqa: BLE001 - as above
                return [self._failed(error)] * len(names)
            return [Outcome(Status.OK, len(source)) for source in sources]

        return call

    def _failed(self, error: Exception) -> Outcome:
        return Outcome.failed(
            TransientError(f"{type(error).__name__}: {error}"[:300], backend=self.scheme, cause=error)
        )

    def delete(self, keys: Sequence[Key], deadline: float) -> Sequence[Outcome]:
        names = [self._name(key) for key in keys]
        for at in range(0, len(names), _DELETE_MOST):
            objects = [{"Key": name} for name in names[at : at + _DELETE_MOST]]
            self._client.delete_objects(Bucket=self._settings.bucket, Delete={"Objects": objects, "Quiet": True})
        return [Outcome(Status.OK)] * len(keys)

    def close(self) -> None:
        self._client.close()


class ObstoreTarget(_PeerTarget):
    """obstore (Rust `object_store`): a whole object per request; GET is copied once out of its own buffer."""

    def __init__(self, url: BackendURL, settings: Settings, *, lanes: int | None = None) -> None:
        super().__init__(url, settings, name="obstore", lanes=lanes)
        from obstore.store import S3Store

        credentials = self._credentials()
        config: dict[str, Any] = {
            "region": self._place.client["region_name"], "access_key_id": credentials.access_key,
            "secret_access_key": credentials.secret_key, "unsigned_payload": True,
            "virtual_hosted_style_request": settings.endpoint_url is None,
        }  # fmt: skip
        if credentials.token:
            config["token"] = credentials.token
        if settings.endpoint_url:
            config["endpoint"] = settings.endpoint_url
        options: Any = {"allow_http": True, "timeout": "60s"}
        if settings.ca_bundle:
            options["allow_invalid_certificates"] = True  # it takes no file of its own
        self._store = S3Store(settings.bucket, client_options=options, **config)

    def _get(self, names: Sequence[str], destinations: Sequence[memoryview]) -> list[int]:
        import obstore

        done = []
        for name, dst in zip(names, destinations, strict=True):
            found = memoryview(obstore.get(self._store, name).bytes())
            dst[: len(found)] = found
            done.append(len(found))
        return done

    def _put(self, names: Sequence[str], sources: Sequence[memoryview]) -> None:
        import obstore

        for name, source in zip(names, sources, strict=True):
            obstore.put(self._store, name, source, use_multipart=False)


class AwscrtTarget(_PeerTarget):
    """awscrt, the AWS Common Runtime: `on_body` copies each piece to its place; a lane's requests run side by side."""

    def __init__(self, url: BackendURL, settings: Settings, *, lanes: int | None = None) -> None:
        super().__init__(url, settings, name="awscrt", lanes=lanes)
        from awscrt import auth, s3
        from awscrt import io as crt_io

        credentials = self._credentials()
        region = self._place.client["region_name"]
        provider = auth.AwsCredentialsProvider.new_static(
            credentials.access_key, credentials.secret_key, credentials.token
        )
        signing = s3.create_default_s3_signing_config(region=region, credential_provider=provider)
        signing = signing.replace(signed_body_value=auth.AwsSignedBodyValue.UNSIGNED_PAYLOAD)
        endpoint = settings.endpoint_url or f"https://{settings.bucket}.s3.{region}.amazonaws.com"
        parts = urlsplit(endpoint)
        self._host = parts.netloc
        self._path = f"/{settings.bucket}/" if settings.endpoint_url else "/"
        tls: dict[str, Any] = {"tls_mode": s3.S3RequestTlsMode.DISABLED}
        if parts.scheme == "https":
            trust = crt_io.TlsContextOptions()
            if settings.ca_bundle:
                trust.override_default_trust_store(_certificates(settings.ca_bundle))
            connection = crt_io.ClientTlsContext(trust).new_connection_options()
            tls = {"tls_mode": s3.S3RequestTlsMode.ENABLED, "tls_connection_options": connection}
        group = crt_io.EventLoopGroup(0)
        bootstrap = crt_io.ClientBootstrap(group, crt_io.DefaultHostResolver(group))
        self._crt = s3.S3Client(
            bootstrap=bootstrap,
            region=region,
            signing_config=signing,
            part_size=_PART,
            throughput_target_gbps=25.0,
            **tls,
        )

    def _start(self, kind: Any, method: str, name: str, headers: Mapping[str, str], body: Any, **more: Any) -> Any:
        from awscrt import http

        fields = http.HttpHeaders([("host", self._host), *headers.items()])
        request = http.HttpRequest(method, self._path + name, fields, body)
        return self._crt.make_request(type=kind, request=request, **more)

    def _get(self, names: Sequence[str], destinations: Sequence[memoryview]) -> list[int]:
        from awscrt import s3

        done = [0] * len(names)
        started = []
        for index, (name, dst) in enumerate(zip(names, destinations, strict=True)):

            def on_body(chunk: bytes, offset: int, index: int = index, dst: memoryview = dst, **_: Any) -> None:
                dst[offset : offset + len(chunk)] = chunk
                done[index] += len(chunk)

            started.append(self._start(s3.S3RequestType.GET_OBJECT, "GET", name, {}, None, on_body=on_body))
        for request in started:
            request.finished_future.result(60)
        return done

    def _put(self, names: Sequence[str], sources: Sequence[memoryview]) -> None:
        from awscrt import s3

        started = [
            self._start(s3.S3RequestType.PUT_OBJECT, "PUT", name, {"content-length": str(len(source))}, _Stream(source))
            for name, source in zip(names, sources, strict=True)
        ]
        for request in started:
            request.finished_future.result(60)

    def close(self) -> None:
        stopped = self._crt.shutdown_event
        del self._crt
        stopped.wait(10)
        super().close()


def _certificates(path: str) -> bytes:
    """The certificates of a PEM file, without a private key that may stand beside them."""
    text = Path(path).read_text(encoding="ascii", errors="replace")
    found = re.findall("-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----", text, re.DOTALL)
    return "\n".join(found).encode("ascii") + b"\n"


class _Stream(io.RawIOBase):
    """A memoryview as the file that awscrt reads a body from."""

    def __init__(self, view: memoryview) -> None:
        self._view, self._at = view, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = {0: 0, 1: self._at, 2: len(self._view)}[whence] + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        into = memoryview(buffer).cast("B")
        count = min(len(into), len(self._view) - self._at)
        into[:count] = self._view[self._at : self._at + count]
        self._at += count
        return count
