"""What the tests of the daemon share: `kvstore serve` as a process, and engines that can be killed."""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kvstore.keys import Key
from kvstore.registry import open_backend
from kvstore_backends.node import NodeBackend

__all__ = ["Daemon", "Engines", "connected", "content", "facts_of", "name_of", "until"]

_ROOT = Path(__file__).parents[2]
_PATH = os.pathsep.join(str(_ROOT / part) for part in (".", "backends", "transport", "tools"))


def environment(**more: str) -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("KVSTORE_")}
    return {**clean, "PYTHONPATH": _PATH, "OMP_NUM_THREADS": "1", **more}


def until(condition: Callable[[], object], what: str, seconds: float = 60.0) -> None:
    """Wait until it is true."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.005)


def name_of(engine: int, index: int) -> Key:
    """The key of a record of an engine."""
    return Key(hashlib.sha256(f"{engine}/{index}".encode()).digest())


def content(name: Key) -> bytes:
    """What belongs under a key: of a length and with bytes that follow from it."""
    nbytes = 16_000 + int.from_bytes(name[:3], "little") % 300_000
    return (name * (nbytes // 32 + 1))[:nbytes]


def connected(url: str) -> NodeBackend:
    backend = open_backend(url)
    assert isinstance(backend, NodeBackend)
    return backend


def facts_of(backend: NodeBackend) -> dict[str, Any]:
    """What the one node of a pool counts."""
    with backend.pool.use("info") as snapshot:
        stats: dict[str, Any] = snapshot.nodes[0].client.info(deadline=time.monotonic() + 30)["stats"]
    return stats


class Daemon:
    """`kvstore serve`, up when this is made."""

    def __init__(self, *words: str, errors: Path | None = None, **more: str) -> None:
        self._errors = open(errors, "ab") if errors is not None else subprocess.DEVNULL  # noqa: SIM115 - see `close`
        self.process = subprocess.Popen(
            [sys.executable, "-m", "kvstore_cli", "serve", *words, "--json"],
            stdout=subprocess.PIPE, stderr=self._errors, text=True, env=environment(**more),
        )  # fmt: skip
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the daemon ended with {self.process.wait(60)}"
        self.facts: dict[str, Any] = json.loads(line)

    @property
    def url(self) -> str:
        """For clients on this host."""
        return f"node://{self.facts['unix']}?transport=shm"

    def ask(self, path: str, token: str = "") -> tuple[int, bytes]:
        """GET over HTTP: (status, body)."""
        connection = http.client.HTTPConnection(self.facts["http"].removeprefix("http://"), timeout=30)
        try:
            connection.request("GET", path, headers={"authorization": f"Bearer {token}"} if token else {})
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def kill(self) -> None:
        """As `kill -9` does."""
        self.process.kill()
        self.process.wait(60)

    def end(self) -> int:
        """SIGTERM; its status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()
        if not isinstance(self._errors, int):
            self._errors.close()


_ENGINE = """
import os, sys, time
from tests.integration.daemon_support import connected, content, name_of
from kvstore.backend import Write

def engine(url, number):
    backend = connected(url)
    deadline = time.monotonic() + 120
    names = [name_of(number, index) for index in range(100)]
    leases = []
    for index, name in enumerate(names):
        data = content(name)
        half = len(data) // 2  # gathered, as an engine's layers are
        write = Write(name, [memoryview(data)[:half], memoryview(data)[half:]])
        if not backend.put([write], deadline=deadline)[0].stored:
            os.write(1, b"failed\\n")
            os._exit(3)
        if index % 10 == 0:
            leases += backend.lease([name], deadline=deadline)
        os.write(1, b"put\\n")
    os.write(1, b"done %d\\n" % sum(lease is not None for lease in leases))
    time.sleep(600)  # it is killed with its leases

for line in sys.stdin:
    url, number = line.split()
    pid = os.fork()
    if not pid:
        try:
            engine(url, int(number))
        finally:
            os._exit(4)
    os.write(1, b"pid %d\\n" % pid)
    os.waitpid(pid, 0)
    os.write(1, b"gone\\n")
"""


class Engines:
    """Engines one after the other, each a process of its own that puts 100 records and leases some of them. They are
    forked by one that has imported what they need, so that fifty of them take seconds."""

    def __init__(self) -> None:
        path = os.pathsep.join([str(_ROOT), _PATH])
        self.process = subprocess.Popen(
            [sys.executable, "-c", _ENGINE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=_ROOT,
            env={**environment(), "PYTHONPATH": path},
        )  # fmt: skip
        self._pid = 0

    def _line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the engines have gone"
        return line.strip()

    def start(self, url: str, number: int) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{url} {number}\n")
        self.process.stdin.flush()

    def wait_puts(self, count: int) -> int:
        """Until it has put so many records, or all; returns how many leases it holds if it is done, else -1."""
        puts, leases = 0, -1
        while not self._pid or puts < count:
            word, _, rest = self._line().partition(" ")
            if word == "pid":
                self._pid = int(rest)
            elif word == "put":
                puts += 1
            else:
                assert word == "done", word
                leases = int(rest)
                puts = count
        return leases

    def kill(self) -> None:
        """Kill the one that runs, and wait until it has gone."""
        os.kill(self._pid, signal.SIGKILL)
        self._pid = 0
        while self._line() != "gone":
            pass

    def close(self) -> None:
        if self._pid:
            self.kill()
        self.process.kill()
        self.process.communicate()


def chosen(numbers: Sequence[int]) -> list[Key]:
    """The records of these engines."""
    return [name_of(number, index) for number in numbers for index in range(100)]
