"""Builds and runs `null_server.c`: an S3 server that costs next to nothing."""

from __future__ import annotations

import hashlib
import json
import os
import select
import shutil
import subprocess
import tempfile
import urllib.request
from pathlib import Path

__all__ = ["NullServer", "build"]

SOURCE = Path(__file__).with_name("null_server.c")
_START_S = 20.0


def build(folder: Path | None = None) -> Path:
    """The compiled server; compiled again only when the source has changed.

    Raises:
        RuntimeError: there is no C compiler, or it refuses the source (its message is in the error).
    """
    compiler = shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc")
    if compiler is None:
        raise RuntimeError("the null server needs a C compiler: apt-get install gcc libc6-dev")
    folder = Path(tempfile.gettempdir()) / f"kvstore-servers-{os.getuid()}" if folder is None else folder
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    binary = folder / f"null_server-{hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]}"
    if not binary.exists():
        with tempfile.TemporaryDirectory(dir=folder) as work:
            made = Path(work) / "null_server"
            command = [compiler, "-O2", "-pthread", "-o", str(made), str(SOURCE), "-ldl"]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise RuntimeError(f"{' '.join(command)} failed: {done.stderr.strip()[-2000:]}")
            made.rename(binary)  # atomic: several test processes may build at once
    return binary


class NullServer:
    """A running null server; a context manager. It ends with this process, whatever happens to it.

    Args:
        drop: throw the bodies of PUTs away and serve fixed bytes: the client's ceiling, not its correctness.
        certificate: PEM file with key and certificate: serve TLS.
        arena_mib: memory for objects, without `drop`.

    Attributes:
        endpoint: "http://127.0.0.1:PORT", or https.
        pid: of the server process.
    """

    def __init__(self, *, drop: bool = False, certificate: Path | None = None, arena_mib: int = 1024) -> None:
        command = [str(build()), "--arena-mib", str(arena_mib), *(["--drop"] if drop else [])]
        if certificate is not None:
            command += ["--cert", str(certificate)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], _START_S)
        line = self._process.stdout.readline() if ready else ""
        if not line.strip().isdigit():
            self._process.kill()
            _, complaint = self._process.communicate()
            raise RuntimeError(f"the null server did not start: {complaint.strip() or 'no answer'}")
        self.port = int(line)
        self.pid = self._process.pid
        self.certificate = certificate
        self.endpoint = f"{'https' if certificate else 'http'}://127.0.0.1:{self.port}"

    def set(self, **values: float) -> dict[str, int]:
        """Change `latency_ms`, `mb_per_s`, `slowdown_percent` or `hang`, and return the counters."""
        query = "&".join(f"{name}={value}" for name, value in values.items())
        return self._call(f"/_set?{query}", b"")

    def stats(self) -> dict[str, int]:
        """Requests so far, by method, and bytes."""
        return self._call("/_stats", None)

    def _call(self, path: str, data: bytes | None) -> dict[str, int]:
        context = None
        if self.certificate is not None:
            import ssl

            context = ssl.create_default_context(cafile=str(self.certificate))
        opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({}),
            *([urllib.request.HTTPSHandler(context=context)] if context else []),
        )
        with opener.open(urllib.request.Request(self.endpoint + path, data=data), timeout=10) as answer:
            result: dict[str, int] = json.load(answer)
            return result

    def cpu_seconds(self) -> float:
        """User and system time the server has used."""
        with open(f"/proc/{self.pid}/stat", encoding="ascii") as file:
            fields = file.read().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def stop(self) -> None:
        self._process.kill()
        self._process.communicate()

    def __enter__(self) -> NullServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
