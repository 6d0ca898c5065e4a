"""Connections and lanes of the valkey backend, by themselves."""

from __future__ import annotations

import errno
import socket
import threading
import time
from typing import Any

import pytest

from kvstore.errors import ClosedError
from kvstore_backends.valkey.errors import LinkError
from kvstore_backends.valkey.link import Link
from kvstore_backends.valkey.options import Node, Settings
from kvstore_backends.valkey.pool import Pool
from tests.servers.valkey import until
from tests.servers.valkey_doubles import Scripted


def soon(seconds: float = 20.0) -> float:
    return time.monotonic() + seconds


# Connections.


def test_a_connection_that_is_being_made_when_it_is_closed_is_given_up() -> None:
    link = Link(Node("h", 1), [(socket.AF_INET, ("127.0.0.1", 1))] * 2, tls=None, server_name="h", until=soon())
    link.hang_up()
    with pytest.raises(LinkError, match="closed"):
        link.advance()
    link.close()


def test_what_openssl_still_holds_makes_a_connection_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes that nobody asked for, which poll(2) does not show."""
    link = Link(Node("h", 1), [], tls=None, server_name="h", until=soon())
    here, there = socket.socketpair()
    with here, there:
        link._sock = here
        assert not link.stale()
        monkeypatch.setattr(Link, "unread", property(lambda self: True))
        assert link.stale()


def test_a_kernel_without_one_family_goes_on_to_the_next_address(monkeypatch: pytest.MonkeyPatch) -> None:
    real = socket.socket

    def no_ipv6(family: int = -1, *rest: Any, **more: Any) -> socket.socket:
        if family == socket.AF_INET6:
            raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")
        return real(family, *rest, **more)

    with Scripted(lambda words: None) as server:
        monkeypatch.setattr("kvstore_backends.valkey.link.socket.socket", no_ipv6)
        places = [(socket.AF_INET6, ("::1", server.port, 0, 0)), (socket.AF_INET, ("127.0.0.1", server.port))]
        link = Link(Node("h", server.port), places, tls=None, server_name="h", until=soon())
        while link.advance():
            time.sleep(0.001)
        assert link.connected
        link.close()


# Lanes.


def one_lane() -> Pool:
    return Pool(Settings(seeds=(Node("127.0.0.1", 1),), lanes=1))


def test_lanes_are_had_in_the_order_of_asking() -> None:
    """Who gives one back and asks at once for another has it after all who waited before. Under load of more threads
    than lanes some waited for their whole deadline else."""
    pool, order = one_lane(), list[str]()

    def take(name: str) -> None:
        with pool.lane(soon(60.0)):
            order.append(name)

    threads = [threading.Thread(target=take, args=(name,)) for name in "abc"]
    with pool.lane(soon()):
        for number, thread in enumerate(threads):
            thread.start()
            assert until(lambda number=number: len(pool._waiting) == number + 1)  # type: ignore[misc]
    take("again")
    for thread in threads:
        thread.join()
    assert order == ["a", "b", "c", "again"]
    assert (pool._busy, len(pool._waiting)) == (0, 0)
    pool.close()


def test_a_lane_that_comes_too_late_is_handed_on() -> None:
    """Who waited leaves, by its deadline or by Ctrl-C, before or after the lane was given to it."""
    pool = one_lane()
    with pool.lane(soon()):
        with pytest.raises(LinkError, match="all lanes"), pool.lane(time.monotonic() + 0.01):
            pass
        assert (pool._busy, len(pool._waiting)) == (1, 0)

    class Interrupted(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            raise KeyboardInterrupt

    for given in (False, True):
        turn = Interrupted()
        with pool.lane(soon()):
            if not given:
                pool._waiting.append(turn)
                with pytest.raises(KeyboardInterrupt):
                    pool._wait(turn, soon())
                assert (pool._busy, len(pool._waiting)) == (1, 0)
        if given:
            pool._busy = 1  # handed over
            with pytest.raises(KeyboardInterrupt):
                pool._wait(turn, soon())
        assert pool._busy == 0
    pool.close()


def test_close_wakes_all_who_wait_for_a_lane() -> None:
    pool = one_lane()
    said: list[str] = []

    def take() -> None:
        try:
            with pool.lane(float("inf")):
                said.append("had one")
        except ClosedError:
            said.append("closed")

    threads = [threading.Thread(target=take) for _ in range(5)]
    with pool.lane(soon()):
        for thread in threads:
            thread.start()
        assert until(lambda: len(pool._waiting) == 5)
        pool.close()
        for thread in threads:
            thread.join(20)
    assert said == ["closed"] * 5
    assert (pool._busy, len(pool._waiting)) == (0, 0)
