"""Frames of the handshake that make no sense, or that lie."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore_transport import (
    ConnectionLost,
    ProtocolError,
    connect,
    handshake,
)
from kvstore_transport.frames import Header, Kind
from kvstore_transport.stream import StreamWay
from tests.transport_support import soon, wait_until
from tests.unit.handshake_support import (
    heard,
    hello,
    identify,
    raw_client,
    say,
    scripted_server,
    serving,
    transport_of,
    welcome,
)


@pytest.mark.parametrize(
    "changes",
    [
        {"transport": "ucx"},
        {"transport": 5},
        {"transport": "tcp", "max_body": -1},
        {"max_meta": True},
        {"facts": []},
        {"way": None},
        {"note": b""},
        {"protocol": "1"},
    ],
)
def test_a_welcome_that_makes_no_sense(changes: dict[str, Any]) -> None:
    with (
        scripted_server(lambda control, *_: say(control, Kind.WELCOME, **welcome(**changes))) as address,
        pytest.raises(ProtocolError),
    ):
        connect(address, deadline=soon(), transport="tcp")


@pytest.mark.parametrize(
    "changes",
    [
        {"protocol": "1"},
        {"namespace": 5},
        {"nonce": b"short"},
        {"client": b""},
        {"wishes": "tcp"},
        {"wishes": [["tcp"]]},
        {"wishes": ["tcp"], "ways": {}},
        {"wishes": ["tcp"], "ways": {"tcp": 5}},
        {"max_body": -1},
        {"max_meta": 1.5},
        {"sums": 1},
        {"facts": None},
    ],
)
def test_a_hello_that_makes_no_sense_ends_its_connection_only(changes: dict[str, Any]) -> None:
    with serving() as server:
        with raw_client(server) as control:
            say(control, Kind.HELLO, **hello(**changes))
            with pytest.raises(ConnectionLost):
                heard(control)
        assert transport_of(server) == "tcp"


@pytest.mark.parametrize("meta", [b"", b"\xc1", b"\x93\x01", b"\x01", b"\x81\xa1", b"\xdd\xff\xff\xff\xff", b"[" * 999])
def test_a_hello_that_is_no_map(meta: bytes) -> None:
    with serving() as server:
        with raw_client(server) as control:
            control.send_frame(Header(Kind.HELLO), meta, deadline=soon())
            with pytest.raises(ConnectionLost):
                heard(control)
        assert transport_of(server) == "tcp"


def test_a_hello_is_bounded() -> None:
    with serving() as server, raw_client(server) as control:
        control.send_frame(Header(Kind.HELLO, body_nbytes=1), msgpack.packb(hello()), deadline=soon())
        with pytest.raises(ConnectionLost):
            heard(control)
    with serving() as server, raw_client(server) as control:
        say(control, Kind.HELLO, **hello(facts={"long": bytes(70_000)}))
        with pytest.raises(ConnectionLost):
            heard(control)


@pytest.mark.parametrize("max_meta", [0, 1, 1000, (64 << 10) - 1])
def test_a_client_that_takes_hardly_anything_is_refused(max_meta: int, caplog: pytest.LogCaptureFixture) -> None:
    with serving() as server:
        with raw_client(server) as control:
            say(control, Kind.HELLO, **hello(max_meta=max_meta))
            kind, said = heard(control)
        assert (kind, said["reason"]) == (Kind.REFUSE, "limits")
        assert f"takes {max_meta} bytes of meta; it must take 65536" in said["message"]
        with raw_client(server) as control:
            say(control, Kind.HELLO, **hello(max_meta=64 << 10, max_body=0))
            assert heard(control)[0] == Kind.WELCOME
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


_PLAIN = (
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.text(max_size=5) | st.binary(max_size=5)
)
_SOME = st.recursive(_PLAIN, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner))


def test_no_hello_is_an_error_of_the_server(caplog: pytest.LogCaptureFixture) -> None:
    with serving(identify=identify) as server:

        @settings(max_examples=100, deadline=None)
        @given(changes=st.dictionaries(st.sampled_from([*hello()]), _SOME, min_size=1, max_size=3))
        def ask(changes: dict[str, Any]) -> None:
            with raw_client(server) as control:
                say(control, Kind.HELLO, **hello(**changes))
                try:
                    assert heard(control)[0] in (Kind.WELCOME, Kind.REFUSE)
                except ConnectionLost:
                    pass

        ask()
        wait_until(lambda: server.stats().connections == 0)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


class PrintingWay(StreamWay):
    name = "printing"

    def agree(self, mine: Any, theirs: Any) -> str:
        return str(_depth(theirs))


def _depth(fact: Any) -> int:
    """By a call for each level, as code that prints or compares facts does."""
    inner = fact.values() if isinstance(fact, dict) else fact if isinstance(fact, list) else ()
    return 1 + max(map(_depth, inner), default=0)


def test_facts_that_are_nested_deeply_are_no_error_of_the_server(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(handshake, "way", lambda name: PrintingWay())
    deep = b"\x91" * 1000 + b"\x90"
    with serving(transports=("printing",)) as server:
        with raw_client(server) as control:
            said = msgpack.packb(hello(wishes=["printing"], ways={"printing": {"x": "HERE"}}))
            control.send_frame(Header(Kind.HELLO), said.replace(b"\xa4HERE", deep), deadline=soon())
            with pytest.raises(ConnectionLost):
                heard(control)
        wait_until(lambda: server.stats().failed == 1)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
