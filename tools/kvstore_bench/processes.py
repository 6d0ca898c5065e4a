"""Other processes of a measurement: their CPU time, and a node of its own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from types import TracebackType
from typing import Self

from kvstore.errors import ConfigError

__all__ = ["NodeProcess", "cpu_of"]

_STOP_S = 10.0


def cpu_of(pid: int) -> float:
    """CPU seconds of a process so far, user and system, all its threads; 0.0 if it is gone.

    The clock of another process, as clock_getcpuclockid(3) names it: (~pid << 3) | CPUCLOCK_SCHED.
    """
    try:
        return time.clock_gettime((~pid << 3) | 2)
    except OSError:
        return 0.0


def _environment() -> dict[str, str]:
    """Without what is meant for nodes of the user's own; with the token that clients here are configured to have."""
    from kvstore.registry import Given, parse_url

    from .targets import configured

    found = {name: value for name, value in os.environ.items() if not name.startswith("KVSTORE_SERVE_")}
    token = configured(parse_url("node://local")).get("token")
    value = token.value if isinstance(token, Given) else token
    return found if value is None else {**found, "KVSTORE_SERVE_TOKEN": str(value)}


class NodeProcess:
    """`kvstore serve` in a process of its own, on loopback; a context manager. It takes the token of `node://` that the
    configuration file or the environment gives, so that both sides agree.

    Args:
        memory_bytes: for records.
        words: further words of its command line.

    Attributes:
        address: "127.0.0.1:PORT".
        pid: of the process.

    Raises:
        ConfigError: it does not start; says why.
    """

    def __init__(self, *, memory_bytes: int, words: tuple[str, ...] = ()) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the process
        guard = ["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else []  # not to outlive a killed run
        command = [
            *guard, sys.executable, "-m", "kvstore_cli", "serve", "--json", "--listen", "127.0.0.1:0",
            "--memory", f"{memory_bytes}B", *words,
        ]  # fmt: skip
        # A session of its own: Ctrl-C is ours to handle.
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=self._log, text=True,
            start_new_session=True, env=_environment(),
        )  # fmt: skip
        pipe = self._process.stdout
        line = pipe.readline() if pipe is not None else ""
        if not line:
            self._process.wait()
            self._log.seek(0)
            text = self._log.read()[-1000:].decode(errors="replace").strip()
            self._close_files()
            raise ConfigError(f"a node of its own did not start: {text}")
        self.address = str(json.loads(line)["address"])
        self.pid = self._process.pid

    def _close_files(self) -> None:
        self._log.close()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def close(self) -> None:
        """Ask it to end, and make it if it does not."""
        self._process.terminate()
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._close_files()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
