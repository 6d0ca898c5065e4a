"""Which nodes there are, and where that is known from: the URL, DNS, or a file.

A node's name decides which keys it holds (`kvstore.placement`), so it must be the same for every client: its address as
written, unless a file gives it another. Give names where addresses change, or all its keys move with the address.

A file of nodes, read again when it changes (its time, size or inode: replace it by `rename`):

    # comments and empty lines
    10.0.0.1:7070
    10.0.0.2:7070  weight=2          # twice the keys
    10.0.0.3:7070  name=rack3-a
    /run/kvstore/node.sock           # a node of this host
"""

from __future__ import annotations

import ipaddress
import math
import os
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvstore.errors import ConfigError
from kvstore_transport.addresses import Address, parse_address

__all__ = ["DnsSource", "FileSource", "FixedSource", "Member", "Resolve", "Source", "parse_authority", "parse_file"]

_MAX_FILE_BYTES = 1 << 20
_MAX_MEMBERS = 4096

Resolve = Callable[[str, int], Sequence[str]]
"""`resolve(host, port)` → all IP addresses of a host. May block; raises `OSError` when it cannot tell."""


class Member(NamedTuple):
    """One node.

    Attributes:
        name: what `Placement` knows it by.
        address: `host:port`, `[v6]:port`, or the absolute path of a Unix socket.
        weight: share of the keys, relative to the others.
    """

    name: str
    address: str
    weight: float = 1.0

    @property
    def is_path(self) -> bool:
        return self.address.startswith("/")


def _address(text: str) -> Address:
    """The address of a node. Raises `ConfigError`."""
    try:
        found = parse_address(text)
        if ":" in found.host or text.startswith("["):
            ipaddress.IPv6Address(found.host.partition("%")[0])
    except ValueError as error:  # of `ipaddress` too
        raise ConfigError(f"{text!r} is no address of a node: {error}") from None
    if found.path and not found.path.startswith("/"):
        raise ConfigError(f"{text!r} is no address of a node: the path of its socket begins with a '/'")
    if not found.path and not found.port:
        raise ConfigError(f"{text!r} is no address of a node: its port is 1 to 65535")
    return found


def parse_authority(text: str) -> tuple[Member, ...]:
    """`host:port,host:port`, or paths separated by commas. Raises `ConfigError`."""
    parts = [part.strip() for part in text.split(",")] if text else []
    for part in parts:
        _address(part)
    return check_members([Member(part, part) for part in parts], "the URL")


def parse_file(text: str, where: str) -> tuple[Member, ...]:
    """The nodes of a file. Raises `ConfigError` that names the line; a file without a node is an error too."""
    members = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        try:
            members.append(_member(words))
        except ConfigError as error:
            raise ConfigError(f"{where}, line {number}: {error.message}") from None
    if not members:
        raise ConfigError(f"{where} names no node")
    return check_members(members, where)


def _member(words: Sequence[str]) -> Member:
    address = words[0]
    _address(address)
    given: dict[str, str] = {}
    for word in words[1:]:
        name, equals, value = word.partition("=")
        if not equals or not value or name not in {"weight", "name"} or name in given:
            raise ConfigError(f"{word!r} is not understood; after the address come weight=NUMBER and name=NAME, once")
        given[name] = value
    try:
        weight = float(given.get("weight", "1"))
    except ValueError:
        weight = -1.0
    if not 0 <= weight < math.inf:
        raise ConfigError(f"weight={given['weight']} is no number ≥ 0")
    return Member(given.get("name", address), address, weight)


def check_members(members: Sequence[Member], where: str) -> tuple[Member, ...]:
    """The members, if their names and addresses are distinct and one has a weight. Raises `ConfigError`."""
    for what, values in (("name", [m.name for m in members]), ("address", [m.address for m in members])):
        twice = sorted({value for value in values if values.count(value) > 1}) if len(set(values)) < len(values) else []
        if twice:
            raise ConfigError(f"{where}: the {what} {', '.join(twice)} stands there more than once")
    if len(members) > _MAX_MEMBERS:
        raise ConfigError(f"{where}: {len(members)} nodes; at most {_MAX_MEMBERS}")
    if members and not any(member.weight for member in members):
        raise ConfigError(f"{where}: no node has a weight above 0")
    return tuple(members)


class Source(ABC):
    """Where membership comes from.

    Attributes:
        watched: whether it may change.
    """

    watched = True

    @abstractmethod
    def read(self) -> tuple[Member, ...] | None:
        """The nodes now; None: as before. May block.

        Raises:
            ConfigError, OSError: it cannot be told; the last answer stays valid.
        """


class FixedSource(Source):
    """Those that the URL names."""

    watched = False

    def __init__(self, members: Sequence[Member]) -> None:
        self._members = tuple(members)

    def read(self) -> tuple[Member, ...] | None:
        return self._members


class DnsSource(Source):
    """All addresses of one host, such as a Kubernetes headless service: `node://kv.default.svc:7070?discover=dns`.

    Args:
        address: `host:port`.
        resolve: None: the system's resolver.
    """

    def __init__(self, address: str, resolve: Resolve | None = None) -> None:
        self._host, self._port, _ = _address(address)
        self._resolve = resolve or _resolve
        self._last: tuple[Member, ...] = ()

    def read(self) -> tuple[Member, ...] | None:
        found = sorted({str(ipaddress.ip_address(text)) for text in self._resolve(self._host, self._port)})
        if not found:
            raise OSError(f"{self._host} has no address")
        addresses = [str(Address(ip, self._port)) for ip in found]
        members = check_members([Member(address, address) for address in addresses], self._host)
        changed, self._last = members != self._last, members
        return members if changed else None


def _resolve(host: str, port: int) -> Sequence[str]:
    return [str(entry[4][0]) for entry in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]


class FileSource(Source):
    """A file of nodes; see the module's docstring."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._stamp: tuple[int, ...] = ()
        self._last: tuple[Member, ...] = ()

    def read(self) -> tuple[Member, ...] | None:
        with open(self._path, encoding="utf-8") as file:
            found = os.fstat(file.fileno())
            stamp = (found.st_mtime_ns, found.st_ino, found.st_size)
            if stamp == self._stamp:
                return None
            try:
                text = file.read(_MAX_FILE_BYTES + 1)
            except UnicodeDecodeError:
                raise ConfigError(f"{self._path} is not UTF-8") from None
        if len(text) > _MAX_FILE_BYTES:
            raise ConfigError(f"{self._path} is longer than {_MAX_FILE_BYTES >> 20} MiB")
        members = parse_file(text, self._path)
        self._stamp = stamp  # only of a good one: a broken file is complained about until it is mended
        changed, self._last = members != self._last, members
        return members if changed else None
