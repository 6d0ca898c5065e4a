"""Opening a pool: who is greeted, what is refused, and what is an error there and then."""

from __future__ import annotations

import contextlib
import ssl
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvstore.backend import Status
from kvstore.errors import ConfigError, PermanentError, TransientError
from kvstore_backends.node import NodeBackend, dial
from kvstore_backends.node.members import Member
from kvstore_backends.node.options import Settings
from kvstore_backends.node_server import NodeServer
from kvstore_transport import Channel, ConnectionLost, DeadlinePassed, connect, handshake
from tests.node_support import key, keys, pool, put, servers, settings, soon, statuses
from tests.servers.certificate import make_certificate


def addresses_of(nodes: Sequence[NodeServer]) -> list[str]:
    return [node.address for node in nodes]


def test_if_every_node_refuses_us_opening_fails() -> None:
    with servers(2, token=b"right") as nodes, pytest.raises(ConfigError, match="token"):
        pool(addresses_of(nodes), token="wrong-secret")
    with (
        servers(1, token=b"right") as nodes,
        servers(1, token=b"wrong-secret") as more,  # one of them will have us
        contextlib.closing(pool(addresses_of([*nodes, *more]), token="wrong-secret")) as backend,
    ):
        outcomes = backend.stat(keys(30), deadline=soon())
        assert {outcome.status for outcome in outcomes} == {Status.MISS, Status.ERROR}
        assert not any("wrong-secret" in str(outcome.error) for outcome in outcomes)


def test_certificates_of_both_sides_are_checked(tmp_path: Path) -> None:
    pem = str(make_certificate(tmp_path / "both.pem", ("kv.internal",)))
    ours = {"tls": True, "tls_ca": pem, "tls_cert": pem, "tls_key": pem}
    with servers(1, tls_cert=pem, tls_key=pem, tls_client_ca=pem) as nodes:
        with contextlib.closing(pool(addresses_of(nodes), **ours, tls_server_name="kv.internal")) as backend:
            assert backend.stat([key("k")], deadline=soon())[0].status is Status.MISS
        with pytest.raises(ConfigError, match="Hostname mismatch"):
            pool(addresses_of(nodes), **ours, tls_server_name="other.internal")
        with pytest.raises(ConfigError, match="switch tls on"):
            pool(addresses_of(nodes))


def test_a_certificate_that_is_missing_is_an_error_at_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where TLS says so within the handshake, as it does before 1.3."""
    pem = str(make_certificate(tmp_path / "both.pem", ("127.0.0.1",)))
    other = str(make_certificate(tmp_path / "other.pem", ("127.0.0.1",)))
    real = dial.tls_context

    def older(found: Settings) -> ssl.SSLContext:
        context = real(found)
        context.maximum_version = ssl.TLSVersion.TLSv1_2
        return context

    monkeypatch.setattr(dial, "tls_context", older)
    with servers(1, tls_cert=pem, tls_key=pem, tls_client_ca=pem) as nodes:
        with pytest.raises(ConfigError, match="refused the TLS handshake"):
            pool(addresses_of(nodes), tls=True, tls_ca=pem)
        with pytest.raises(ConfigError, match="UNKNOWN_CA"):
            pool(addresses_of(nodes), tls=True, tls_ca=pem, tls_cert=other, tls_key=other)


@pytest.mark.parametrize(
    ("reason", "ours", "kind", "text"),
    [
        ("TLSV13_ALERT_CERTIFICATE_REQUIRED", None, PermanentError, "a:1 wants a certificate of its clients"),
        ("TLSV1_ALERT_UNKNOWN_CA", "/c.pem", PermanentError, "a:1 does not take the certificate /c.pem"),
        ("UNEXPECTED_EOF_WHILE_READING", None, TransientError, "does the node want a certificate"),
        ("UNEXPECTED_EOF_WHILE_READING", "/c.pem", TransientError, "lost"),
    ],
)
def test_a_server_that_misses_a_certificate_says_so_after_the_handshake(
    reason: str, ours: str | None, kind: type[Exception], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TLS 1.3: a client has made its side of the handshake by then."""

    def lost(*args: object, **options: object) -> None:
        cause = ssl.SSLError(1, reason)
        cause.reason = reason
        raise ConnectionLost("a:1: lost while receiving") from cause

    monkeypatch.setattr(dial, "connect", lost)
    monkeypatch.setattr(dial, "tls_context", lambda found: ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))
    found = settings(["a:1"], tls=True, tls_cert=ours, tls_key=ours)
    if kind is PermanentError:
        with pytest.raises(ConfigError, match=text):
            NodeBackend(found)
        return
    with contextlib.closing(NodeBackend(found)) as backend:
        (outcome,) = backend.stat([key("k")], deadline=soon())
        assert isinstance(outcome.error, TransientError)
        assert text in str(outcome.error)


@pytest.mark.parametrize("turn", range(5))
def test_with_tls_1_3_a_certificate_that_is_missing_is_an_error_at_open(turn: int, tmp_path: Path) -> None:
    """Whether the node hung up before or after we sent something is luck; what it said is not."""
    pem = str(make_certificate(tmp_path / "both.pem", ("127.0.0.1",)))
    other = str(make_certificate(tmp_path / "other.pem", ("127.0.0.1",)))
    with servers(1, tls_cert=pem, tls_key=pem, tls_client_ca=pem) as nodes:
        with pytest.raises(ConfigError, match="wants a certificate of its clients: give tls_cert and tls_key"):
            pool(addresses_of(nodes), tls=True, tls_ca=pem)
        with pytest.raises(ConfigError, match="does not take the certificate"):
            pool(addresses_of(nodes), tls=True, tls_ca=pem, tls_cert=other, tls_key=other)


def test_if_all_that_answer_refuse_us_opening_fails() -> None:
    """What is said once is as good as said by all: else an engine sees misses for ever."""
    with servers(1) as (node,):
        gone = node.address
    with servers(1, token=b"right") as (node,), pytest.raises(ConfigError, match="wrong token"):
        pool([gone, node.address], token="wrong-secret")
    with servers(1) as (node,), pytest.raises(ConfigError, match="namespace 'nobodys'"):
        pool([gone, node.address], namespace="nobodys")


def test_another_version_is_an_error_at_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the client's or the node's; either message names both."""
    real = handshake._pack

    def older(value: dict[str, object]) -> bytes:
        return real({**value, "protocol": 1} if "wishes" in value else value)

    monkeypatch.setattr(handshake, "_pack", older)
    monkeypatch.setattr(handshake, "PROTOCOL_VERSION", 2)
    with servers(1) as nodes, pytest.raises(ConfigError, match=r"speaks protocol 2 .* the client protocol 1"):
        pool(addresses_of(nodes))


def test_a_node_that_starts_ucx_for_the_first_client_is_greeted_again(caplog: pytest.LogCaptureFixture) -> None:
    """That takes it longer than a connection may take; the next one it has at once."""
    tries: list[str] = []

    def dialling(each: Member, deadline: float) -> Channel:
        tries.append(each.address)
        if len(tries) == 1:
            raise DeadlinePassed("it starts UCX")
        return connect(each.address, deadline=deadline, transport="tcp")

    with servers(1) as (node,):
        found = settings([node.address], transport="ucx")
        with contextlib.closing(NodeBackend(found, dial=dialling)) as backend:
            assert backend.pool.now.nodes[0].client.facts
    assert len(tries) == 2
    assert not caplog.records


def test_unreachable_nodes_do_not_keep_a_pool_from_opening() -> None:
    with servers(1) as (node,):
        gone = node.address
    with servers(1) as (node,), contextlib.closing(pool([node.address, gone])) as backend:
        assert Status.OK in statuses(put(backend, dict.fromkeys(keys(20), b"x")))
