"""`NodeServer`: offers memory of this host, a disk and something remote below it, to other processes and hosts.
`kvstore serve` is one.

    with NodeServer("127.0.0.1:0", memory_bytes=16 << 30, disk="file:///nvme/kv?bytes=400GiB") as node:
        print(node.address)

Clients come by `node://host:port`. A record that is put is received straight into the memory it stays in, and is sent
from there, or read in place by clients on the same host: no copy in between but the transport's own. A put asks before
it sends, so what is there is not sent again, and memory is reserved before the first byte comes. What breaks in the
middle leaves nothing.

* **Namespaces.** Each has its own token, memory, folder and limits; nothing crosses, and none can evict another's
  records. The default namespace "" may be open; without a token the node listens on loopback only, unless `insecure`.
* **Admission.** What answers on their way and writes under way hold of a namespace's memory is bounded: for all to
  `share` of it, for each client to `client_bytes` and a quarter of that share, and an eighth of the share is kept for
  small requests, so that they get through however many large ones stick. Who does not get leave by its deadline is told
  that the node is busy; who asks for more records than he may hold gets the first ones. A client that stops reading
  loses its connection after `stall_s` without progress, one that reads slowly when it took longer than `stall_s` and a
  second per MiB, or at its own deadline; then what its answers held is free again.
* **Strangers.** A connection takes one of `limits.connections` places when its client has proven that it knows the
  token; before, it waits in a lobby of bounded size, where newcomers push out the oldest. A namespace that does not
  exist looks like one with another token.
* **Disk.** Records are written behind, by one thread, and looked up below when memory has them no more; they come back
  into memory then. What does not fit into the backlog, or cannot be written, is counted, and stays in memory only. A
  restart finds them again. What is deleted or quarantined goes below first, and nothing on its way up arrives after
  that. No read waits for a writer.
* **Remote.** Any URL of kvstore, below the disk or without one; other nodes may share it. With a disk, that takes what
  comes from memory at once, and brings it down in the background. What lies below has a little less time than the
  client: what memory has of a batch gets there although the rest hangs.
* **Ahead.** Engines may announce what their waiting requests will need; it is brought up before they ask.
* **TTL.** Counted from the last use, or from the put. Records that are too old are gone for every reader at once; their
  memory and files are given back by a sweep.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import math
import os
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Any, Self

from kvstore.control.journal import Journal
from kvstore.errors import ConfigError
from kvstore.registry import parse_url
from kvstore_transport import Limits, Server, TransportUnavailable
from kvstore_transport.addresses import Address, parse_address
from kvstore_transport.bodies import AUTO, TRANSPORTS

from ._node_service import Service
from ._node_space import Namespace, Space, share_memory
from ._node_tiers import DISK

__all__ = ["Namespace", "NodeServer"]

logger = logging.getLogger("kvstore.node")

_SWEEP_S = 1.0
_JOIN_S = 2.0
_CLOSE_S = 4.0  # for threads that are in a backend, and for closing those


class NodeServer:
    """A node, from its construction until `close`. See the module's docstring.

    Args:
        listen: "host:port" for TCP; port 0 for any, host "" for all addresses. "": not on TCP.
        unix_path: of a Unix socket, for clients on this host, which then read records in place. "": none.
        memory_bytes: for the records of all namespaces, in bytes; mapped now, backed by pages when used.
        policy, disk, remote, ttl, ttl_from, token: of the default namespace; see `Namespace`.
        namespaces: further ones, each with a name and a token.
        default_namespace: whether there is a default namespace.
        insecure: listen on any address although a namespace is open.
        tls_cert, tls_key: PEM files; TLS for TCP, control and data.
        tls_client_ca: PEM file; clients must show a certificate that it signed.
        transports: how bodies may travel: "auto", or names of `kvstore_transport.bodies.TRANSPORTS`.
        client_bytes: what one client may hold of a namespace's memory at a time, in bytes (credits); at most a quarter
            of what all may hold counts.
        share: part of a namespace's memory that all its clients may hold together.
        limits: of lengths, connections and time; see `kvstore_transport.seam.Limits`.
        clock: for ttl, seconds since the epoch.

    Attributes:
        address: "host:port" it listens on, "" without TCP.
        unix_path: as given, absolute.
        journal: what comes into memory and disks and what leaves them, for the control API.
        spaces: the namespaces at work, by name.

    Raises:
        ConfigError: an argument makes no sense, or it cannot listen there.
    """

    def __init__(
        self,
        listen: str = "127.0.0.1:0",
        *,
        unix_path: str | os.PathLike[str] = "",
        memory_bytes: int = 1 << 30,
        policy: str = "lru",
        disk: str = "",
        remote: str = "",
        ttl: float = math.inf,
        ttl_from: str = "use",
        token: bytes = b"",
        namespaces: Sequence[Namespace] = (),
        default_namespace: bool = True,
        insecure: bool = False,
        tls_cert: str = "",
        tls_key: str = "",
        tls_client_ca: str = "",
        transports: str | Sequence[str] = "auto",
        client_bytes: int = 128 << 20,
        share: float = 0.5,
        limits: Limits = Limits(),  # noqa: B008 - immutable
        clock: Callable[[], float] = time.time,
    ) -> None:
        path = os.fspath(unix_path)
        place = _place(listen)
        if place is None and not path:
            raise ConfigError("a node needs an address to listen on, or the path of a Unix socket")
        if not 0 < share < 1 or client_bytes < 1:
            raise ConfigError(f"share={share:g} must lie between 0 and 1, and client_bytes={client_bytes} above 0")
        default = Namespace("", token, 0, policy, disk, ttl, ttl_from, remote)
        spaces = [*([default] if default_namespace else []), *namespaces]
        _check_names(spaces)
        if place is not None and not insecure:
            _check_open(place, spaces)
        offered = _transports(transports, local=bool(path))
        tls = _tls(tls_cert, tls_key, tls_client_ca)
        _check_remote(place, spaces)
        self._closed = False
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._sweepers: list[Callable[[], None]] = []
        self.journal = Journal()
        self.draining = False
        self.spaces: dict[str, Space] = {}
        with contextlib.ExitStack() as undo:
            for namespace, nbytes in zip(spaces, share_memory(spaces, memory_bytes), strict=True):
                space = Space(
                    namespace, nbytes, shared=bool(path), share=share, credits_bytes=client_bytes, clock=clock,
                    journal=self.journal,
                )  # fmt: skip
                undo.callback(space.close, 0.0)
                self.spaces[namespace.name] = space
            _check_folders(self.spaces.values())
            for space in self.spaces.values():
                if space.below is not None:
                    space.below.claim()
            self._service = Service(self.spaces, max_body=limits.max_body, stall_s=limits.stall_s)
            try:
                self._server = Server(
                    self._service,
                    listen=None if place is None else (place.host, place.port),
                    path=path,
                    identify=self._identify,
                    tls=tls,
                    limits=limits,
                    transports=offered,
                    facts={"kind": "kvstore node"},
                )
            except (TransportUnavailable, OSError) as error:
                raise ConfigError(f"the node cannot listen: {error}", cause=error) from error
            undo.callback(self._server.close)
            for space in self.spaces.values():
                for slab in space.store.pool.slabs:
                    self._server.register(slab.view, slab.fd)
            self._sweeper = threading.Thread(target=self._sweep, name="kvstore-node-sweep", daemon=True)
            self._sweeper.start()
            undo.pop_all()
        self.address = self._server.address
        self.unix_path = self._server.path
        self.secure = tls is not None

    def _identify(self, namespace: str) -> bytes | None:
        space = self.spaces.get(namespace)
        return None if space is None else space.namespace.token

    def _sweep(self) -> None:
        while not self._stop.wait(_SWEEP_S):
            for sweep in (self._service.sweep, *self._sweepers):
                try:
                    sweep()
                except Exception:
                    logger.exception("the sweep failed; it goes on")

    def on_sweep(self, sweep: Callable[[], None]) -> None:
        """Have `sweep` called about once a second, in a thread of the node's."""
        self._sweepers.append(sweep)

    @property
    def namespaces(self) -> Sequence[str]:
        """Names of the namespaces; "" is the default one."""
        return [*self.spaces]

    def stats(self) -> dict[str, Any]:
        """Counts for metrics: those of `kvstore_transport.server.ServerStats`; `sessions` (connections that asked for
        something) and `listings` (half read); and of each namespace under `namespaces`, by name.

        Of a namespace: those of `Counts` (kvstore_backends._node_space); `records`, `nbytes`, `capacity` and `in_use`
        now; `evicted`, `expired`; `held` and `waiting` (bytes that clients hold, requests that wait for leave);
        `announced` (announcements), `waiting_jobs` (of which they tell) and `prefetched` (records brought up by them);
        with something below, disk or remote, those of `BacklogCounts` (kvstore_backends._node_backlog) as
        `disk_written`, `disk_dropped`, `disk_failed`, `disk_errors`, `disk_backlog` (bytes), and `disk_loaded`,
        `disk_expired`.

        Raises:
            ClosedError: the node is closed.
        """
        transport = self._server.stats()._asdict()
        spaces = {name: space.stats() for name, space in self.spaces.items()}
        return {**transport, **self._service.stats(), "namespaces": spaces}

    def settle(self, timeout: float) -> bool:
        """Wait until nothing waits to be written to a disk or to what is remote; False if something does after
        `timeout` seconds."""
        end = time.monotonic() + timeout
        disks = [space.below for space in self.spaces.values() if space.below is not None]
        return all(disk.settle(max(0.0, end - time.monotonic())) for disk in disks)

    def close(self, drain_s: float = 5.0) -> None:
        """Accept nobody any more, let requests under way end, write what waits for disks and what is remote, give
        everything back. Each of the two may take `drain_s` seconds; what is not done then is cut off. May be called
        twice."""
        self.draining = True
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._service.stop()
        self._server.close(drain_s)
        self._stop.set()
        self._sweeper.join(_JOIN_S)  # it may be in a folder that hangs
        self._service.close()
        # Side by side: one whose remote place hangs takes no time from the others.
        closing = [
            threading.Thread(target=space.close, args=(drain_s,), name="kvstore-node-close", daemon=True)
            for space in self.spaces.values()
        ]
        for thread in closing:
            thread.start()
        end = time.monotonic() + drain_s + _CLOSE_S
        for thread in closing:
            thread.join(max(0.0, end - time.monotonic()))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        where = ", ".join(filter(None, (self.address, self.unix_path)))
        return f"<NodeServer at {where}{', closed' * self._closed}>"


def _place(listen: str) -> Address | None:
    """Where to listen on TCP; None: nowhere."""
    if not listen:
        return None
    if listen.startswith(":"):
        port = listen[1:]
        if port.isascii() and port.isdigit() and int(port) <= 65535:
            return Address("", int(port))
    try:
        place = parse_address(listen)
    except ValueError as error:
        raise ConfigError(f"option 'listen': {error}") from None
    if place.path:
        raise ConfigError(f"option 'listen': {listen!r} is a path; give that of a Unix socket as 'unix'")
    return place


def _check_names(namespaces: Sequence[Namespace]) -> None:
    names = [namespace.name for namespace in namespaces]
    if not names:
        raise ConfigError("a node without any namespace")
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"namespace {', '.join(map(repr, twice))} is given twice")


def _check_open(place: Address, namespaces: Sequence[Namespace]) -> None:
    """Who can reach an open namespace can read, replace nothing, but fill and empty the whole cache."""
    open_ones = [namespace.shown for namespace in namespaces if not namespace.token]
    if open_ones and not _is_loopback(place.host):
        raise ConfigError(
            f"{' and '.join(open_ones)} {'have' if len(open_ones) > 1 else 'has'} no token, so whoever reaches "
            f"{place} could read and delete its records. Give it a token file, listen on 127.0.0.1, or say 'insecure' "
            "if the network keeps strangers out"
        )


def _is_loopback(host: str) -> bool:
    if not host:
        return False
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(f"option 'listen': {host!r} is no address of this host: {error}") from error
    return all(ipaddress.ip_address(str(entry[4][0]).partition("%")[0]).is_loopback for entry in found)


def _check_folders(spaces: Iterable[Space]) -> None:
    """Keys say nothing of a node's namespaces, so two of them in one place would see each other's records."""
    seen: dict[object, str] = {}
    for space in spaces:
        for place in space.below.lower.places if space.below is not None else ():
            identity = place.backend.identity
            if identity is None:
                continue
            if identity in seen:
                what = "folder" if place.name == DISK else "remote place"
                raise ConfigError(f"{space.namespace.shown} has the {what} of {seen[identity]}; each needs its own")
            seen[identity] = space.namespace.shown


def _check_remote(place: Address | None, spaces: Iterable[Namespace]) -> None:
    """A node below itself would ask itself for ever."""
    for space in spaces:
        url = parse_url(space.remote) if space.remote else None
        if url is not None and place is not None and place.port and str(place) in url.authority.split(","):
            raise ConfigError(f"{space.shown}: 'remote' is this node itself, {place}; name what lies below it")


def _transports(names: str | Sequence[str], *, local: bool) -> tuple[str, ...]:
    """What the node offers. Raises `ConfigError` for an unknown name, and for shared memory without a Unix socket."""
    asked = [part.strip() for part in names.split(",")] if isinstance(names, str) else [*names]
    offered = [each for name in asked for each in (AUTO if name == "auto" else (name,))]
    for name in offered:
        if name not in TRANSPORTS:
            raise ConfigError(f"unknown transport {name!r}; choices: auto, {', '.join(TRANSPORTS)}")
    if "shm" in asked and not local:
        raise ConfigError("transport shm needs a Unix socket: give its path (kvstore serve --unix PATH)")
    return tuple(dict.fromkeys(offered))


def _tls(cert: str, key: str, client_ca: str) -> ssl.SSLContext | None:
    if not (cert or key or client_ca):
        return None
    if not (cert and key):
        raise ConfigError("TLS needs both tls_cert and tls_key")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(cert, key)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"tls_cert {cert} and tls_key {key} cannot be used: {error}", cause=error) from error
    try:
        if client_ca:
            context.load_verify_locations(client_ca)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"tls_client_ca {client_ca} cannot be used: {error}", cause=error) from error
    if client_ca:
        context.verify_mode = ssl.CERT_REQUIRED
    return context
