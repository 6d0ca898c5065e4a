"""Host names within a deadline."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest

from kvstore_backends._resolver import ResolveError, Resolver

ANSWER = [(2, 1, 6, "", ("127.0.0.1", 7))]


def soon() -> float:
    return time.monotonic() + 20


class Lookup:
    """A scripted getaddrinfo(3): it answers when `gate` is open.

    Attributes:
        asked: names, in order.
        answer: what is found; an exception is raised.
    """

    def __init__(self, answer: Sequence[tuple[Any, ...]] | Exception = ANSWER) -> None:
        self.answer = answer
        self.asked: list[str] = []
        self.gate = threading.Event()
        self.gate.set()

    def __call__(self, host: str, port: int, *_: Any) -> Sequence[tuple[Any, ...]]:
        self.asked.append(host)
        self.gate.wait(20)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def kind_of(resolver: Resolver, host: str, port: int, until: float) -> str:
    with pytest.raises(ResolveError) as caught:
        resolver.addresses(host, port, until)
    return caught.value.kind


def test_a_name_that_is_not_resolved_in_time_costs_the_deadline_and_no_more() -> None:
    lookup = Lookup()
    lookup.gate.clear()
    resolver = Resolver(lookup)
    start = time.monotonic()
    assert kind_of(resolver, "somewhere", 7, time.monotonic() + 0.05) == "deadline"
    assert time.monotonic() - start < 5
    lookup.gate.set()
    assert resolver.addresses("somewhere", 7, soon()) == [(2, ("127.0.0.1", 7))]
    assert lookup.asked == ["somewhere"], "the second caller waited for the first one's answer"


def test_a_name_is_looked_up_once_until_it_is_forgotten() -> None:
    lookup = Lookup()
    resolver = Resolver(lookup)
    for _ in range(3):
        resolver.addresses("h", 7, soon())
    assert lookup.asked == ["h"]
    resolver.forget("h", 7)
    lookup.answer = [(2, 1, 6, "", ("127.0.0.2", 7))]
    assert resolver.addresses("h", 7, soon()) == [(2, ("127.0.0.2", 7))]
    assert lookup.asked == ["h", "h"]


def test_an_old_address_is_used_while_a_new_one_is_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    lookup = Lookup()
    resolver = Resolver(lookup)
    resolver.addresses("h", 7, soon())
    monkeypatch.setattr("kvstore_backends._resolver._FRESH_S", -1.0)
    lookup.gate.clear()
    for _ in range(3):
        assert resolver.addresses("h", 7, time.monotonic() - 1) == [(2, ("127.0.0.1", 7))]
    lookup.gate.set()
    assert len(lookup.asked) <= 2, "one lookup at a time"


@pytest.mark.parametrize(
    ("failure", "said"),
    [
        (socket.gaierror(-2, "Name or service not known"), "Name or service not known"),
        (UnicodeError("label too long"), "not a host name"),
        (ValueError("embedded null byte"), "not a host name"),
        (OverflowError("what"), "not a host name"),
    ],
)
def test_what_is_no_name_is_said_and_asked_again_next_time(failure: Exception, said: str) -> None:
    lookup = Lookup(failure)
    resolver = Resolver(lookup)
    with pytest.raises(ResolveError, match=f"nowhere cannot be resolved.*{said}"):
        resolver.addresses("nowhere", 1, soon())
    lookup.answer = ANSWER
    assert resolver.addresses("nowhere", 1, soon()) == [(2, ("127.0.0.1", 7))]


@pytest.mark.parametrize("host", ["a" * 70, "a..b", "a\x00b", ":::::"])
def test_names_that_are_none_for_the_real_getaddrinfo(host: str) -> None:
    assert kind_of(Resolver(), host, 1, soon()) == "dns"


def test_numbers_need_no_lookup() -> None:
    resolver = Resolver(Lookup(OSError("asked")))
    assert resolver.addresses("10.0.0.1", 5, 0.0) == [(socket.AF_INET, ("10.0.0.1", 5))]
    assert resolver.addresses("::1", 5, 0.0) == [(socket.AF_INET6, ("::1", 5, 0, 0))]


@pytest.mark.parametrize("port", [-1, 0, 65536, 99999, 1 << 70])
def test_ports_that_are_none(port: int) -> None:
    """As a server might name them: the kernel would be asked with what it does not take."""
    for host in ("10.0.0.1", "h"):
        assert kind_of(Resolver(Lookup()), host, port, soon()) == "dns"


def test_no_more_threads_is_an_error_of_this_lookup_only(monkeypatch: pytest.MonkeyPatch) -> None:
    resolver = Resolver(Lookup())

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(ResolveError, match="can't start new thread"):
            resolver.addresses("h", 7, soon())
    assert resolver.addresses("h", 7, soon()) == [(2, ("127.0.0.1", 7))]


def test_a_child_forked_during_a_lookup_looks_up_by_itself() -> None:
    lookup = Lookup()
    lookup.gate.clear()
    resolver = Resolver(lookup)
    assert kind_of(resolver, "h", 7, time.monotonic() + 0.01) == "deadline"
    child = os.fork()
    if not child:
        code = 1
        try:
            lookup.gate = threading.Event()
            lookup.gate.set()
            resolver.after_fork()
            code = 0 if resolver.addresses("h", 7, soon()) == [(2, ("127.0.0.1", 7))] else 2
        finally:
            os._exit(code)
    lookup.gate.set()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert resolver.addresses("h", 7, soon())
