"""Real Valkey or Redis servers on loopback: one, one with TLS and an ACL user, a primary with a replica, a cluster.

The program is Debian's package `redis-server` (7.0), or `valkey-server` where there is one. What had to be known:

* A cluster node also takes the port + 10000 for its bus.
* Without `--save ''` a server that has had writes writes a snapshot when it ends.
* A replica's first copy waits for others for five seconds, unless `repl-diskless-sync-delay` is 0.
* `cluster-node-timeout` decides when a dead primary is noticed; a replica waits for half a second and more before it
  asks for votes, and needs a majority of the primaries.
* Cluster nodes know each other only after a gossip round; a cluster is ready when all say `cluster_state:ok`.
* A server ends at SIGKILL by its process id; nothing of it is worth keeping.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

__all__ = [
    "MISSING",
    "PASSWORD",
    "USER",
    "Cluster",
    "Server",
    "valkey_binary",
    "valkey_cluster",
    "valkey_full",
    "valkey_server",
    "valkey_tls",
]

MISSING = "no Valkey or Redis server: apt-get install redis-server brings one (or set KVSTORE_VALKEY_SERVER)"
_START_S = 30.0

USER, PASSWORD = "kvstore-user", "correct-horse-battery"
ACL = (
    f"user {USER} on >{PASSWORD} ~kv/* resetchannels -@all +set +getrange +strlen +exists +pexpiretime +pexpire "
    "+unlink +rename +watch +unwatch +multi +exec +scan +object|idletime +info +select +hello +cluster|slots"
)
"""The rule that docs/valkey.md recommends, for the prefix kv/ and a server before 7.2."""


def valkey_binary() -> str | None:
    """The server program: `$KVSTORE_VALKEY_SERVER`, else of PATH; None if there is none."""
    named = os.environ.get("KVSTORE_VALKEY_SERVER")
    return named or shutil.which("valkey-server") or shutil.which("redis-server")


def _free_port(*, cluster: bool) -> int:
    for _ in range(200):
        port = random.randrange(20000, 30000)
        with contextlib.ExitStack() as stack:
            try:
                for number in (port, port + 10000) if cluster else (port,):
                    stack.enter_context(socket.socket()).bind(("127.0.0.1", number))
            except OSError:
                continue
            return port
    raise RuntimeError("no free port for a Valkey server between 20000 and 39999")


class Server:
    """A running server; a context manager.

    Args:
        folder: where it keeps everything; made if missing, never removed here.
        words: further words of its command line.
        certificate: PEM file with key and certificate: TLS only.
        cluster: it can join a cluster.
        config: its configuration file, which comes before the words.

    Attributes:
        port, pid: of the server.

    Raises:
        RuntimeError: it is not installed, died, or was not ready in time; with the end of its log.
    """

    def __init__(
        self,
        folder: Path,
        *words: str,
        certificate: Path | None = None,
        cluster: bool = False,
        config: Path | None = None,
    ) -> None:
        binary = valkey_binary()
        if binary is None:
            raise RuntimeError(MISSING)
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.certificate = folder, certificate
        self._binary, self._cluster, self._words, self._config = binary, cluster, words, config
        self._process: subprocess.Popen[bytes] | None = None
        for attempt in range(5):
            self.port = _free_port(cluster=cluster)
            try:
                self.start()
                return
            except RuntimeError:
                if attempt == 4:
                    raise

    def start(self) -> None:
        """Start it (again), on its port; returns when it answers."""
        words = [self._binary, *([str(self._config)] if self._config else [])]
        words += ["--bind", "127.0.0.1", "--dir", str(self.folder), "--daemonize", "no", "--loglevel", "notice"]
        if self._config is None:
            words += ["--save", "", "--appendonly", "no", "--repl-diskless-sync-delay", "0"]
        if self.certificate is not None:
            path = str(self.certificate)
            words += ["--port", "0", "--tls-port", str(self.port), "--tls-cert-file", path, "--tls-key-file", path]
            words += ["--tls-ca-cert-file", path, "--tls-auth-clients", "no"]
        else:
            words += ["--port", str(self.port)]
        if self._cluster:
            words += [
                "--cluster-enabled",
                "yes",
                "--cluster-node-timeout",
                "1000",
                "--cluster-config-file",
                "nodes.conf",
            ]
            words += ["--cluster-require-full-coverage", "no"]
        words += self._words
        if shutil.which("setpriv") and threading.current_thread() is threading.main_thread():
            words = ["setpriv", "--pdeathsig", "KILL", *words]  # it must not outlive a killed test run
        self._log = self.folder / "server.log"
        with open(self._log, "ab") as log:
            self._process = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        self.pid = self._process.pid
        if not until(self._answers, limit_s=_START_S):
            tail = self._log.read_bytes()[-2000:].decode(errors="replace")
            self.stop()
            raise RuntimeError(f"the Valkey server did not start; the end of {self._log}:\n{tail}")

    def _answers(self) -> bool:
        if self._process is None or self._process.poll() is not None:
            raise RuntimeError(f"the Valkey server died: {self._log.read_bytes()[-2000:].decode(errors='replace')}")
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=2):
                return True
        except OSError:
            return False

    def client(self, **options: Any) -> Any:
        """A redis-py client of it, which is another implementation than ours; the caller closes it."""
        import redis
        from redis.backoff import NoBackoff
        from redis.retry import Retry

        tls = {"ssl": True, "ssl_ca_certs": str(self.certificate)} if self.certificate else {}
        fields = {"socket_timeout": 20, "retry": Retry(NoBackoff(), 0), **tls, **options}
        return redis.Redis(host="127.0.0.1", port=self.port, **fields)

    def call(self, *words: Any, **options: Any) -> Any:
        """One command by a client of its own."""
        client = self.client(**options)
        try:
            return client.execute_command(*words)
        finally:
            client.close()

    def info(self, *words: Any) -> dict[str, str]:
        """The fields of a reply that is text with a `name:value` on each line."""
        client = self.client()
        try:
            client.response_callbacks.clear()  # of all versions of redis-py, some read it and some do not
            text = _text(client.execute_command(*words))
        finally:
            client.close()
        return {name: value for name, colon, value in (line.partition(":") for line in text.splitlines()) if colon}

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def stop(self) -> None:
        """End it now, by its process id; returns when it is gone. `start` starts it again."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


class Cluster:
    """Shards with equal shares of the slots, and replicas of some of them; a context manager.

    Args:
        replicas: how many of the shards have a replica, the first ones.

    Attributes:
        shards, replicas: the servers, as they began.
    """

    def __init__(self, folder: Path, *words: str, shards: int = 3, replicas: int = 0) -> None:
        self._stack = contextlib.ExitStack()
        with self._stack:
            names = [f"shard{n}" for n in range(shards)] + [f"replica{n}" for n in range(replicas)]
            nodes = [self._stack.enter_context(Server(folder / name, *words, cluster=True)) for name in names]
            self.shards, self.replicas = nodes[:shards], nodes[shards:]
            bounds = [16384 * n // shards for n in range(shards + 1)]
            for server, first, after in zip(self.shards, bounds, bounds[1:], strict=False):
                server.call("CLUSTER", "ADDSLOTSRANGE", first, after - 1)
            for number, server in enumerate(nodes):
                server.call("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
                server.call("CLUSTER", "MEET", "127.0.0.1", nodes[0].port)
            self._await(lambda: all(self._known(server) == len(nodes) for server in nodes), "did not meet")
            for replica, primary in zip(self.replicas, self.shards, strict=False):
                replica.call("CLUSTER", "REPLICATE", primary.call("CLUSTER", "MYID"))
            self._await(lambda: all(self.state(server) == "ok" for server in nodes), "did not become ok")
            self._await(lambda: all(self._in_step(server) for server in self.replicas), "did not replicate")
            self._await(lambda: all(len(self.slots(server)) == shards for server in nodes), "did not agree on slots")
            self._keep = self._stack.pop_all()

    @staticmethod
    def _await(ready: Callable[[], bool], what: str) -> None:
        if not until(ready, limit_s=_START_S):
            raise RuntimeError(f"the nodes of the cluster {what}")

    @staticmethod
    def _known(server: Server) -> int:
        return int(server.info("CLUSTER", "INFO")["cluster_known_nodes"])

    @staticmethod
    def state(server: Server) -> str:
        return server.info("CLUSTER", "INFO")["cluster_state"]

    @staticmethod
    def slots(server: Server) -> Any:
        return server.call("CLUSTER", "SLOTS")

    @staticmethod
    def _in_step(server: Server) -> bool:
        return server.info("INFO", "replication").get("master_link_status") == "up"

    @property
    def seeds(self) -> str:
        return ",".join(server.address for server in self.shards)

    def client(self) -> Any:
        """A redis-py client of the cluster; the caller closes it."""
        import redis

        return redis.RedisCluster(host="127.0.0.1", port=self.shards[0].port, socket_timeout=20)

    def of(self, slot: int) -> Server:
        """The shard that owned a slot at the beginning."""
        return self.shards[next(n for n in range(len(self.shards)) if slot < 16384 * (n + 1) // len(self.shards))]

    def move_slot(self, slot: int, source: Server, target: Server) -> None:
        """Hand a slot over, with what is in it (CLUSTER SETSLOT, "Cluster live reconfiguration")."""
        ids = {server: _text(server.call("CLUSTER", "MYID")) for server in (source, target)}
        target.call("CLUSTER", "SETSLOT", slot, "IMPORTING", ids[source])
        source.call("CLUSTER", "SETSLOT", slot, "MIGRATING", ids[target])
        self.move_names(slot, source, target)
        for server in (target, source, *(s for s in self.shards if s not in (source, target))):
            server.call("CLUSTER", "SETSLOT", slot, "NODE", ids[target])

    @staticmethod
    def move_names(slot: int, source: Server, target: Server) -> None:
        names = source.call("CLUSTER", "GETKEYSINSLOT", slot, 1000)
        for name in names:
            source.call("MIGRATE", "127.0.0.1", target.port, name, 0, 5000)

    def stop(self) -> None:
        self._keep.close()

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def until(ready: Callable[[], bool], *, limit_s: float = 20.0, pause_s: float = 0.02) -> bool:
    """Ask until the answer is yes; False if it was not within `limit_s` seconds."""
    end = time.monotonic() + limit_s
    while not ready():
        if time.monotonic() >= end:
            return False
        time.sleep(pause_s)
    return True


# Fixtures: one server of a kind for the whole session, emptied by whoever wants it empty. To be imported by name.


def needs_server() -> None:
    """Skip a test where no server program is installed. In CI that is a failure: there it is installed."""
    if valkey_binary() is None:
        if os.environ.get("CI"):
            pytest.fail(MISSING)
        pytest.skip(MISSING)


@pytest.fixture(scope="session")
def valkey_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A single server that evicts as it should."""
    needs_server()
    with Server(tmp_path_factory.mktemp("valkey"), *_cache("512mb", "allkeys-lru")) as server:
        yield server


@pytest.fixture(scope="session")
def valkey_tls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A single server over TLS, which knows nobody but `USER`."""
    from tests.servers.certificate import make_certificate

    needs_server()
    folder = tmp_path_factory.mktemp("valkey-tls")
    certificate = make_certificate(folder / "server.pem")
    users = (ACL, f"user tests on >{PASSWORD} ~* &* +@all", "user default off")
    words = [word for rule in users for word in f"--{rule}".split()]
    words += _cache("256mb", "allkeys-lru")
    with Server(folder, *words, certificate=certificate) as server:
        yield server


@pytest.fixture(scope="session")
def valkey_full(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A single server with 20 MB that refuses what does not fit."""
    needs_server()
    with Server(tmp_path_factory.mktemp("valkey-full"), *_cache("20mb", "noeviction")) as server:
        yield server


@pytest.fixture(scope="session")
def valkey_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Three shards without replicas."""
    needs_server()
    with Cluster(tmp_path_factory.mktemp("valkey-cluster"), *_cache("256mb", "allkeys-lru")) as cluster:
        yield cluster


def _cache(maxmemory: str, policy: str) -> Sequence[str]:
    return ("--maxmemory", maxmemory, "--maxmemory-policy", policy)
