"""Who may come in, and how bodies travel then: HELLO, WELCOME and REFUSE."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
import pytest

from kvstore_transport import (
    ConnectionLost,
    Credentials,
    Limits,
    PeerBusy,
    PeerRefused,
    TransportUnavailable,
    bodies,
    connect,
    handshake,
)
from kvstore_transport.bodies import Way
from kvstore_transport.control import Control
from kvstore_transport.frames import Header, Kind
from kvstore_transport.stream import StreamBodies, StreamWay
from tests.servers.certificate import make_certificate
from tests.transport_support import soon, tls_contexts, wait_until
from tests.unit.handshake_support import (
    HELLO_LIMITS,
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


@pytest.fixture(autouse=True)
def without_ucx(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its context would stay in this process."""
    monkeypatch.setattr("kvstore_transport.channel.auto", lambda: ("shm", "tcp"))


# Tokens.


def test_the_token_never_travels() -> None:
    seen = bytearray()

    def listen_in(control: Control, said: dict[str, Any], meta: bytes) -> None:
        say(control, Kind.WELCOME, nonce=bytes(16))
        _, second = control.receive_frame(limits=HELLO_LIMITS, deadline=soon())
        seen.extend(meta + second)

    with scripted_server(listen_in) as address, pytest.raises(ConnectionLost):
        connect(address, credentials=Credentials("team", b"the secret"), deadline=soon())
    assert b"team" in seen
    assert b"the secret" not in seen


def test_a_proof_holds_for_its_own_handshake_only() -> None:
    """What one handshake showed is of no use in the next, nor is the server's proof as a client's."""
    with serving(identify=identify) as server:
        proofs: list[Callable[[bytes, bytes], bytes]] = [
            lambda first, challenge: handshake._proof(b"the secret", b"client", b"another", challenge),
            lambda first, challenge: handshake._proof(b"the secret", b"client", first, b"another"),
            lambda first, challenge: handshake._proof(b"the secret", b"server", first, challenge),
            lambda first, challenge: handshake._proof(b"a guess", b"client", first, challenge),
            lambda first, challenge: b"",
        ]
        for proof in proofs:
            with raw_client(server) as control:
                first = msgpack.packb(hello(namespace="team"))
                control.send_frame(Header(Kind.HELLO), first, deadline=soon())
                header, challenge = control.receive_frame(limits=HELLO_LIMITS, deadline=soon())
                assert header.kind == Kind.WELCOME
                assert "transport" not in msgpack.unpackb(challenge)
                say(control, Kind.HELLO, proof=proof(first, challenge))
                kind, said = heard(control)
                assert (kind, said["reason"]) == (Kind.REFUSE, "token")
        wait_until(lambda: server.stats().refused == 5)
        assert server.stats().accepted == 0


@pytest.mark.parametrize("proof", [b"", bytes(32)])
def test_a_server_must_know_the_token_too(proof: bytes) -> None:
    def pretend(control: Control, said: dict[str, Any], meta: bytes) -> None:
        say(control, Kind.WELCOME, nonce=bytes(16))
        control.receive_frame(limits=HELLO_LIMITS, deadline=soon())
        say(control, Kind.WELCOME, **welcome(proof=proof))

    with scripted_server(pretend) as address, pytest.raises(PeerRefused, match="does not know the token"):
        connect(address, credentials=Credentials("team", b"the secret"), deadline=soon())


def test_a_server_that_asks_for_no_token_is_no_server_for_a_client_with_one() -> None:
    with (
        scripted_server(lambda control, *_: say(control, Kind.WELCOME, **welcome())) as address,
        pytest.raises(PeerRefused, match="wants no token"),
    ):
        connect(address, credentials=Credentials("team", b"the secret"), deadline=soon())


def test_refusals_say_what_to_change() -> None:
    with serving(identify=identify) as server:
        for credentials, words in (
            (Credentials("team", b"guess"), "wrong token for namespace 'team'"),
            (Credentials("team"), "wants a token for namespace 'team', or has no such namespace"),
            (Credentials("nobody", b"x"), "wrong token for namespace 'nobody', or no such namespace"),
            (Credentials("nobody"), "wants a token for namespace 'nobody', or has no such namespace"),
            (Credentials("", b"x"), "wants no token for the default namespace"),
        ):
            with pytest.raises(PeerRefused, match=words) as refused:
                connect(server.address, credentials=credentials, deadline=soon())
            assert server.address in str(refused.value)
    assert "secret" not in repr(Credentials("team", b"the secret"))


def test_a_stranger_learns_no_names() -> None:
    """A namespace that does not exist and one whose token he does not know answer alike, message by message."""
    seen: dict[str, list[tuple[Kind, dict[str, Any]]]] = {}
    with serving(identify=identify) as server:
        for namespace in ("team", "nobody"):
            with raw_client(server) as control:
                first = msgpack.packb(hello(namespace=namespace))
                control.send_frame(Header(Kind.HELLO), first, deadline=soon())
                header, challenge = control.receive_frame(limits=HELLO_LIMITS, deadline=soon())
                said = msgpack.unpackb(challenge)
                assert len(said.pop("nonce")) == 16
                say(control, Kind.HELLO, proof=handshake._proof(b"a guess", b"client", first, challenge))
                kind, refusal = heard(control)
                refusal["message"] = refusal["message"].replace(namespace, "…")
                seen[namespace] = [(header.kind, said), (kind, refusal)]
        wait_until(lambda: server.stats().refused == 2)
    assert seen["team"] == seen["nobody"]
    assert seen["team"][1][0] == Kind.REFUSE


@pytest.mark.parametrize("protocol", [0, 2, 1 << 40])
def test_another_version_is_refused_by_either_side(protocol: int) -> None:
    with serving() as server, raw_client(server) as control:
        say(control, Kind.HELLO, **hello(protocol=protocol, version="9.9"))
        kind, said = heard(control)
        assert (kind, said["reason"]) == (Kind.REFUSE, "version")
        assert "9.9" in said["message"]
    with (
        scripted_server(lambda control, *_: say(control, Kind.WELCOME, **welcome(protocol=protocol))) as address,
        pytest.raises(PeerRefused, match=f"protocol {protocol}"),
    ):
        connect(address, deadline=soon())


@pytest.mark.parametrize(
    ("reason", "error"),
    [
        ("version", PeerRefused),
        ("token", PeerRefused),
        ("tls", PeerRefused),
        ("busy", PeerBusy),
        ("transport", TransportUnavailable),
        ("something new", PeerRefused),
    ],
)
def test_reasons_are_errors(reason: str, error: type[Exception]) -> None:
    with (
        scripted_server(lambda control, *_: say(control, Kind.REFUSE, reason=reason, message="do this")) as address,
        pytest.raises(error, match="do this"),
    ):
        connect(address, deadline=soon())


# TLS at one side only.


def test_a_client_without_tls_at_a_server_with_it_is_told() -> None:
    with (
        serving(tls=tls_contexts()[0]) as server,
        pytest.raises(PeerRefused, match="wants TLS"),
    ):
        connect(server.address, deadline=soon())


def test_a_client_with_tls_at_a_server_without_it_is_told() -> None:
    with serving() as server, pytest.raises(PeerRefused, match="does not speak TLS"):
        connect(server.address, tls=tls_contexts()[1], deadline=soon())


def test_a_certificate_that_is_not_trusted(tmp_path: Path) -> None:
    stranger = ssl.create_default_context(cafile=make_certificate(tmp_path / "other.pem"))
    with serving(tls=tls_contexts()[0]) as server, pytest.raises(PeerRefused, match="not trusted"):
        connect(server.address, tls=stranger, deadline=soon())


def test_bodies_that_would_not_be_encrypted_are_not_used_with_tls() -> None:
    with serving(tls=tls_contexts()[0], transports=("shm", "tcp")) as server:
        assert transport_of(server, tls=tls_contexts()[1]) == "tcp"
        with pytest.raises(TransportUnavailable, match="not be encrypted"):
            connect(server.address, tls=tls_contexts()[1], transport="shm", deadline=soon())


def test_the_unix_socket_of_a_server_with_tls_is_plain(tmp_path: Path) -> None:
    with (
        serving(tls=tls_contexts()[0], path=str(tmp_path / "s")) as server,
        connect(server.path, tls=tls_contexts()[1], deadline=soon()) as channel,
    ):
        assert channel.call(0, b"", deadline=soon()).meta == b"tcp"


# How bodies travel.


class FussyWay(StreamWay):
    """A way under another name, which can be told what to say."""

    name = "fussy"
    missing = ""
    disagree = ""
    broken = ""

    def facts(self, *, server: bool) -> dict[str, object]:
        if self.missing in ("both", "server" if server else "client"):
            raise TransportUnavailable("install fussy")
        return {"version": "1.21", "server": server}

    def agree(self, mine: dict[str, object], theirs: dict[str, object]) -> str:
        assert (mine["server"], theirs["server"]) == (True, False)
        return self.disagree

    def open(
        self,
        control: Control,
        *,
        server: bool,
        mine: dict[str, object],
        theirs: dict[str, object],
        limits: Limits,
        deadline: float,
    ) -> StreamBodies:
        if self.broken == ("server" if server else "client"):
            raise ConnectionLost("fussy fell over")
        opened = FussyBodies(control)
        if not server:
            control.await_frame(Kind.GRANT, 0, limits=HELLO_LIMITS, deadline=deadline)
        else:
            control.send_frame(Header(Kind.GRANT), deadline=deadline)
        return opened


class FussyBodies(StreamBodies):
    name = "fussy"


@pytest.fixture
def fussy(monkeypatch: pytest.MonkeyPatch) -> type[FussyWay]:
    class Mine(FussyWay):
        pass

    monkeypatch.setitem(bodies.TRANSPORTS, "fussy", "fussy:FussyWay")

    def way(name: str) -> Way:
        return Mine() if name == "fussy" else original(name)

    original = bodies.way
    monkeypatch.setattr(handshake, "way", way)
    return Mine


BOTH = ("fussy", "tcp")


def test_the_first_wish_that_both_sides_can_is_taken(fussy: type[FussyWay]) -> None:
    with serving(transports=BOTH) as server:
        assert transport_of(server, transport="fussy,tcp") == "fussy"
        assert transport_of(server, transport=["tcp", "fussy"]) == "tcp"
        assert transport_of(server, transport="fussy") == "fussy"


@pytest.mark.parametrize("trouble", ["no offer", "missing server", "missing client", "disagree", "open client"])
def test_a_wish_that_does_not_come_true_falls_back_and_says_so(fussy: type[FussyWay], trouble: str) -> None:
    what, _, side = trouble.partition(" ")
    fussy.missing = side if what == "missing" else ""
    fussy.disagree = "1.21 here, 1.20 there" if what == "disagree" else ""
    fussy.broken = side if what == "open" else ""
    words = {
        "no": "not offered",
        "missing": "install fussy",
        "disagree": "1.21 here, 1.20 there",
        "open": "fell over",
    }[what]
    with serving(transports=("tcp",) if what == "no" else BOTH) as server:
        with connect(server.address, transport="fussy,tcp", deadline=soon()) as channel:
            assert channel.peer.transport == "tcp"
            assert "fussy" in channel.peer.note
            assert words in channel.peer.note
        error = ConnectionLost if what == "open" else TransportUnavailable
        with pytest.raises(error, match=words):
            connect(server.address, transport="fussy", deadline=soon())


def test_a_way_that_the_server_cannot_open_is_left_out(fussy: type[FussyWay]) -> None:
    fussy.broken = "server"
    with serving(transports=BOTH) as server:
        with connect(server.address, transport="fussy,tcp", deadline=soon()) as channel:
            assert channel.peer.transport == "tcp"
            assert "fussy" in channel.peer.note
        with pytest.raises(ConnectionLost):
            connect(server.address, transport="fussy", deadline=soon())


def test_shared_memory_is_found_over_tcp(tmp_path: Path) -> None:
    with serving(path=str(tmp_path / "s"), transports=("shm", "tcp")) as server:
        assert transport_of(server, transport="shm,tcp") == "shm"
        assert transport_of(server, transport="shm") == "shm"
        assert transport_of(server, transport="tcp,shm") == "tcp"
        assert transport_of(server, transport="tcp") == "tcp"
    with serving(transports=("shm", "tcp")) as server:
        with connect(server.address, transport="shm,tcp", deadline=soon()) as channel:
            assert channel.peer.transport == "tcp"
            assert "no Unix socket" in channel.peer.note
        with pytest.raises(TransportUnavailable, match="no Unix socket"):
            connect(server.address, transport="shm", deadline=soon())


def test_a_server_elsewhere_has_no_socket_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore_transport.channel.host_id", lambda: "another host")
    with (
        serving(path=str(tmp_path / "s"), transports=("shm", "tcp")) as server,
        connect(server.address, transport="shm,tcp", deadline=soon()) as channel,
    ):
        assert channel.peer.transport == "tcp"
        assert "not on the same host" in channel.peer.note


def test_a_name_that_nobody_knows() -> None:
    with serving() as server:
        with pytest.raises(TransportUnavailable, match=r"unknown transport 'carrier pigeon'.*tcp"):
            connect(server.address, transport="carrier pigeon", deadline=soon())
        with pytest.raises(TransportUnavailable):
            connect(server.address, transport=[], deadline=soon())
