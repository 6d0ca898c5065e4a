"""A real Mooncake Store on loopback, from the wheel `mooncake-transfer-engine-non-cuda`: `mooncake_master`, and one
`mooncake_client` process that offers the memory.

What had to be known to run it well:

* It needs libibverbs1, libnuma1 and libcurl4, and no device.
* The master listens at once, but a put works only after the client has mounted its segment, a good half second later:
  ready means that a put works.
* A client that is silent for 10 s (`-client_ttl`) is taken for dead, and its records are gone: stopped processes must
  go on before that, or the master is started with a longer one.
* Both ports of the master (RPC and HTTP) are ours to choose; the segment's process takes a port for its service, and
  its transfer engine takes two more by itself.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

__all__ = ["MISSING", "Mooncake", "mooncake_folder"]

MISSING = (
    "Mooncake is not installed: pip install mooncake-transfer-engine-non-cuda, apt-get install libibverbs1 libnuma1 "
    "libcurl4"
)
_START_S = 60.0


def mooncake_folder() -> Path | None:
    """Where the wheel has its programs; None if it is not installed or its client cannot be loaded."""
    spec = importlib.util.find_spec("mooncake")
    if spec is None or not spec.submodule_search_locations:
        return None
    folder = Path(spec.submodule_search_locations[0])
    try:
        from kvstore_backends._mooncake_client import load

        load("127.0.0.1")
    except ValueError:  # ConfigError: a system library is missing
        return None
    return folder if (folder / "mooncake_master").exists() else None


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Mooncake:
    """A running store; a context manager.

    Args:
        folder: for logs.
        segment: memory offered, in bytes.
        lease_ms: the master's default_kv_lease_ttl.
        client_ttl_s: seconds after which a silent client is taken for dead.

    Attributes:
        address: "127.0.0.1:PORT" of the master.
        master, node: the two processes.

    Raises:
        RuntimeError: it is not installed, died, or was not ready within a minute; with the end of its log.
    """

    def __init__(
        self, folder: Path, *, segment: int = 1 << 30, lease_ms: int = 10_000, client_ttl_s: int = 120
    ) -> None:
        programs = mooncake_folder()
        if programs is None:
            raise RuntimeError(MISSING)
        self._programs, self._folder = programs, folder
        self._segment, self._lease_ms, self._client_ttl_s = segment, lease_ms, client_ttl_s
        self.port = _free_port()
        self.address = f"127.0.0.1:{self.port}"
        self.node: subprocess.Popen[bytes] | None = None
        self.start_master()
        self.start_node()

    def start_master(self) -> None:
        """Start the master, after a kill on the same port."""
        self.master = self._run(
            "mooncake_master", f"-rpc_port={self.port}", "-rpc_address=127.0.0.1", "-enable_metric_reporting=false",
            f"-metrics_port={_free_port()}", "-metrics_host=127.0.0.1", f"-default_kv_lease_ttl={self._lease_ms}",
            f"-client_ttl={self._client_ttl_s}",
        )  # fmt: skip
        end = time.monotonic() + _START_S
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), 1).close()
                return
            except OSError:
                self._alive(end)
                time.sleep(0.02)

    def start_node(self) -> None:
        """Start the process that offers memory, and wait until records can be stored in it."""
        self.node = self._run(
            "mooncake_client", "-host=127.0.0.1", f"-port={_free_port()}", f"-master_server_address={self.address}",
            "-metadata_server=P2PHANDSHAKE", f"-global_segment_size={self._segment >> 20} MB",
        )  # fmt: skip
        client = self.client()
        try:
            end = time.monotonic() + _START_S
            while client.put("ready", b"ready"):
                self._alive(end)
                time.sleep(0.02)
            client.remove("ready", True)
        finally:
            client.close()

    def _alive(self, end: float) -> None:
        for process in (self.master, self.node):
            if time.monotonic() > end or (process is not None and process.poll() is not None):
                self.stop()
                log = "\n".join(path.read_bytes()[-2000:].decode(errors="replace") for path in self._logs())
                raise RuntimeError(f"Mooncake did not start; the end of its logs:\n{log}")

    def _logs(self) -> list[Path]:
        return sorted(self._folder.glob("mooncake_*.log"))

    def _run(self, program: str, *words: str) -> subprocess.Popen[bytes]:
        command = [str(self._programs / program), *words]
        if shutil.which("setpriv") and threading.current_thread() is threading.main_thread():
            command = ["setpriv", "--pdeathsig", "KILL", *command]  # it must not outlive a killed test run
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("MC_", "GLOG_"))}
        with open(self._folder / f"{program}.log", "ab") as log:
            return subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                env={**clean, "MC_LOG_LEVEL": "ERROR", "MC_TCP_BIND_ADDRESS": "127.0.0.1"},
            )  # fmt: skip

    def client(self) -> Any:
        """Mooncake's own client, a member of the store; the caller closes it."""
        from kvstore_backends._mooncake_client import load

        store = load("127.0.0.1").MooncakeDistributedStore()
        if store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", self.address):
            raise RuntimeError("a client could not join Mooncake")
        return store

    def kill_node(self) -> None:
        """SIGKILL the process that offers memory."""
        if self.node is not None:
            self.node.kill()
            self.node.wait()
            self.node = None

    def kill_master(self) -> None:
        """SIGKILL the master."""
        self.master.kill()
        self.master.wait()

    def stop(self) -> None:
        """End both now, by their process ids; returns when they are gone."""
        for process in (self.node, self.master):
            if process is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)
                process.wait()

    def __enter__(self) -> Mooncake:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
