"""A node whose host loses its network in the middle of a get: in a network namespace of its own, over a veth pair.

Needs root, and a kernel that lets it make namespaces (a container mostly may not). Nobody tells the client anything: no
reset comes, as none does when a cable is pulled.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Iterator

import pytest

from kvstore.backend import Outcome, Read, Status
from kvstore.errors import TransientError
from kvstore.keys import Key
from kvstore.placement import Placement
from tests.node_support import NodeProcess, data, get, keys, pool, put, statuses, wait_until

SLACK_S = 1.5
CANARY = 0xA5
HERE, THERE = (f"198.18.{os.getpid() % 250}.{last}" for last in (1, 2))  # RFC 2544: never routed
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1  # netdevice(7)


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=30)


class Namespace:
    """Another host, and the link to it."""

    def __init__(self) -> None:
        self.name = f"kvstore-{os.getpid()}"
        self._device = f"kv{os.getpid()}"  # at most 15 characters

    def open(self) -> None:
        ip("netns", "add", self.name)
        peer = f"{self._device}p"
        ip("link", "add", self._device, "type", "veth", "peer", "name", peer, "netns", self.name)
        ip("addr", "add", f"{HERE}/30", "dev", self._device)
        ip("link", "set", self._device, "up")
        for words in (
            ("addr", "add", f"{THERE}/30", "dev", peer),
            ("link", "set", peer, "up"),
            ("link", "set", "lo", "up"),
        ):
            ip("-n", self.name, *words)

    def link(self, up: bool) -> None:
        """At once: a process of its own takes longer than a get."""
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            name = self._device.encode()
            found = fcntl.ioctl(sock, _SIOCGIFFLAGS, struct.pack("16sH14x", name, 0))
            (flags,) = struct.unpack_from("H", found, 16)
            flags = flags | _IFF_UP if up else flags & ~_IFF_UP
            fcntl.ioctl(sock, _SIOCSIFFLAGS, struct.pack("16sH14x", name, flags))

    def close(self) -> None:
        for words in (("link", "del", self._device), ("netns", "del", self.name)):
            with contextlib.suppress(subprocess.CalledProcessError):  # it was not made
                ip(*words)


@pytest.fixture
def elsewhere() -> Iterator[Namespace]:
    if os.geteuid() != 0:
        pytest.skip("only root may make network namespaces")
    if shutil.which("ip") is None:
        pytest.skip("ip (iproute2) is not installed")
    found = Namespace()
    try:
        try:
            found.open()
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces are not allowed here: {error.stderr.strip()}")
        yield found
    finally:
        found.close()


SIZE = 8 << 20
TOKEN = "not on loopback, so with a token"


def test_a_link_that_is_lost_in_the_middle_of_a_get(elsewhere: Namespace) -> None:
    """The call ends by its deadline, what the other node holds is there, and nothing lands later; once the link is back
    the node is used again by itself."""
    command = ("ip", "netns", "exec", elsewhere.name)
    memory = 256 << 20
    with (
        NodeProcess(memory=memory, token=TOKEN) as near,
        NodeProcess(memory=memory, token=TOKEN, host=THERE, command=command) as far,
    ):
        addresses = [near.address, far.address]
        placement = Placement(addresses)
        everything = keys(40, "link")
        mine = {at: [each for each in everything if placement.order(each)[0] == at][:6] for at in (0, 1)}
        records = {each: data(SIZE, each) for each in (*mine[0], *mine[1])}
        with contextlib.closing(pool(addresses, token=TOKEN)) as backend:
            for each, value in records.items():
                assert statuses(put(backend, {each: value})) == [Status.OK]
            for _ in range(20):  # until the link went in the middle of it
                if lost_in_the_middle(elsewhere, backend, records, mine):
                    break
            else:
                raise AssertionError("every get was over before the link was lost")


def lost_in_the_middle(
    elsewhere: Namespace, backend: object, records: dict[Key, bytes], mine: dict[int, list[Key]]
) -> bool:
    memory = {each: bytearray([CANARY]) * SIZE for each in records}
    found: dict[Key, Outcome] = {}
    times: list[float] = []

    def read() -> None:
        begin = time.monotonic()
        reads = [Read(each, memoryview(dst)) for each, dst in memory.items()]
        outcomes = backend.get_into(reads, deadline=begin + 2.0)  # type: ignore[attr-defined]
        times.append(time.monotonic() - begin)
        found.update(zip(memory, outcomes, strict=True))

    first = memory[mine[1][0]]
    thread = threading.Thread(target=read)
    thread.start()
    while first[0] == CANARY and thread.is_alive():
        pass
    elsewhere.link(up=False)
    try:
        thread.join()
        assert times[0] < 2.0 + SLACK_S
        for each, outcome in found.items():
            if outcome.ok:
                assert memory[each] == records[each]
            else:
                assert each in mine[1]
                assert isinstance(outcome.error, TransientError)
        assert all(found[each].ok for each in mine[0])
        lost = [each for each in mine[1] if not found[each].ok]
        for each in lost:
            memory[each][:] = bytes([CANARY]) * SIZE
    finally:
        elsewhere.link(up=True)
    wait_until(
        lambda: all(outcome.ok for outcome, _ in get(backend, [*records], 1, seconds=5.0)),
        "the node is used again by itself",
    )
    assert all(memory[each] == bytes([CANARY]) * SIZE for each in lost)
    return bool(lost)
