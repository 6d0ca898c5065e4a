"""Looking before sleeping: for what comes at once, never for long, and one thread at a time."""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Iterator

import pytest

from kvstore_transport import _glance
from kvstore_transport._glance import Glance


class Clock:
    """Time that passes when it is looked at, and counts how often."""

    def __init__(self) -> None:
        self.now = 100.0
        self.asked = 0

    def __call__(self) -> float:
        self.asked += 1
        self.now += 1e-6
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(_glance, "perf_counter", clock)
    return clock


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def test_only_who_was_answered_at_once_looks(pair: tuple[socket.socket, socket.socket], clock: Clock) -> None:
    ours, theirs = pair
    glance = Glance(ours.fileno())
    theirs.send(b"x")
    assert not glance.look(), "the first time it sleeps"
    glance.found()
    assert glance.look()
    ours.recv(1)
    glance.found()
    before = clock.now
    assert not glance.look()
    assert 140e-6 < clock.now - before < 170e-6, "it gives up"
    clock.now += 1.0
    glance.found()
    before = clock.asked
    theirs.send(b"x")
    assert not glance.look()
    assert clock.asked == before + 1, "an idle connection sleeps at once"


def test_one_thread_of_a_process_looks(pair: tuple[socket.socket, socket.socket], clock: Clock) -> None:
    ours, theirs = pair
    glances = [Glance(ours.fileno()) for _ in range(2)]
    theirs.send(b"x")
    for glance in glances:
        glance.look()
        glance.found()
    with _glance._looking:
        assert not glances[0].look()
    seen: list[bool] = []

    class Poll:
        def poll(self, timeout: int) -> list[int]:
            thread = threading.Thread(target=lambda: seen.append(glances[1].look()))
            thread.start()
            thread.join()
            return [1]

    glances[0].found()
    glances[0]._poll = Poll()  # type: ignore[assignment]
    assert glances[0].look()
    assert seen == [False]
    assert glances[1].look()


def test_a_closed_connection_ends_the_look(pair: tuple[socket.socket, socket.socket], clock: Clock) -> None:
    ours, theirs = pair
    glance = Glance(ours.fileno())
    glance.look()
    glance.found()
    theirs.close()
    assert glance.look()
    assert select.select([ours], [], [], 0)[0]
