"""The control API of a node over HTTP: what it answers, to whom, and what it refuses."""

from __future__ import annotations

import concurrent.futures
import contextlib
import http.client
import json
import math
import os
import select
import socket
import threading
import time
import urllib.error
import urllib.request
from typing import Any

import pytest

from kvstore.control import Client, DeniedError, Health, UnknownError
from kvstore.control.messages import Place
from kvstore.errors import ConfigError, PermanentError, TransientError
from kvstore.keys import Key
from tests.control_support import CONTEXT, PlainInstance, keys_of, plain_node, served
from tests.servers.certificate import make_certificate

TOKENS = {"admin_token": b"the-admin", "tokens": {"": b"default-secret", "team-a": b"secret-a"}}


def _raw(url: str, path: str, body: bytes | None = None, **headers: str) -> tuple[int, Any, dict[str, str]]:
    request = urllib.request.Request(url + path, data=body, headers={"content-type": "application/json", **headers})
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            data, status, found = response.read(), response.status, dict(response.headers)
    except urllib.error.HTTPError as error:
        data, status, found = error.read(), error.code, dict(error.headers)
    return status, json.loads(data) if found.get("content-type") == "application/json" else data, found


def test_lookup_says_what_is_where_and_only_the_leading_chunks_count() -> None:
    keys = keys_of(1, 6)
    with plain_node("n0") as (instance, url), Client(url) as client:
        instance.put("", "memory", keys[:2])
        instance.put("", "disk", [keys[1], keys[2], keys[4]])
        found = client.lookup(keys=keys, chunk_size=8)
        assert (found.chunks, found.tokens, found.hit_chunks, found.hit_tokens) == (6, 48, 3, 24)
        assert (found.instance, found.tier) == ("n0", "disk")
        assert found.places == [Place("n0", 3, 24, "disk", {"memory": 16, "disk": 8})]
        assert client.lookup(keys=keys[::-1], chunk_size=8).places == []
        tokens = [2, 0] * 24
        assert client.lookup(tokens=tokens, context=CONTEXT, chunk_size=8) == found
        assert client.lookup(tokens=[2, 0], context=CONTEXT, chunk_size=8).chunks == 0
        assert client.lookup(keys=keys, namespace="team-a").places == []


def test_tokens_are_turned_into_keys_by_the_server_as_by_the_client() -> None:
    layout = {"num_layers": 2, "num_kv_heads": 2, "head_dim": 64}
    context = {"model": "org/model", "dtype": "bfloat16", "layout": layout}
    with plain_node("n0", contexts={"mine": CONTEXT}) as (instance, url):
        instance.put("", "memory", keys_of(1, 6)[:5])
        for given in (context, "mine", None):
            chunks = {"tokens": [2, 0] * 24, "context": given, "chunk_size": 8}
            status, found, _ = _raw(url, "/v1/lookup", json.dumps({"chunks": chunks}).encode())
            assert (status, found["hit_tokens"]) == (200, 40)
        with Client(url) as client:
            for name in ("mine", None):
                assert client.lookup(tokens=[2, 0] * 24, context=name, chunk_size=8).hit_tokens == 40
                assert client.pin(tokens=[2, 0] * 24, context=name, chunk_size=8).count == 5
                assert client.lookup(tokens=[2, 0] * 3, context=name, chunk_size=8).chunks == 0
            with pytest.raises(ConfigError, match="no keys"):
                client.pin(tokens=[2, 0] * 3, chunk_size=8)
        chunks = {"tokens": [2, 0] * 24, "context": "other"}
        status, found, _ = _raw(url, "/v1/lookup", json.dumps({"chunks": chunks}).encode())
        assert status == 400
        assert "known: mine" in found["error"]["message"]
        bad = {"chunks": {"tokens": [1] * 512, "context": {**context, "tp_rank": 4, "tp_size": 2}}}
        status, found, _ = _raw(url, "/v1/lookup", json.dumps(bad).encode())
        assert status == 400
        assert "tp_rank=4" in found["error"]["message"]
    with plain_node("n0") as (_, url), Client(url) as client, pytest.raises(ConfigError, match=r"context.*none"):
        client.lookup(tokens=[2, 0] * 24, chunk_size=8)


def test_what_is_started_can_be_followed() -> None:
    keys = keys_of(1, 6)
    with plain_node("n0") as (instance, url), Client(url) as client:
        instance.put("", "memory", keys)
        instance.put("", "memory", keys_of(2, 3), model="org/other")
        assert client.pin(keys=[*keys[:2], *keys_of(9, 1)], ttl_s=60).count == 2
        assert ("pin", 60.0) in instance.calls
        assert client.unpin(keys=keys).count == 2
        moved = client.wait(client.move(keys=keys[:2], src="memory", dst="disk"))
        assert (moved.ok, moved.jobs["n0"].done) == (True, 2)
        assert client.lookup(keys=keys).tier == "disk"
        assert client.wait(client.compress("lz4", 3, keys=keys)).ok
        assert client.wait(client.decompress(keys=keys)).ok
        assert [call for call in instance.calls if call[0] == "transcode"] == [
            ("transcode", ("lz4", 3)), ("transcode", ("raw", None)),
        ]  # fmt: skip
        assert client.wait(client.clear(model="org/other")).jobs["n0"].done == 3
        assert client.wait(client.clear(keys=keys[:1])).jobs["n0"].done == 1
        assert client.wait(client.clear(keys=keys[1:3], below=True)).jobs["n0"].done == 2
        assert client.wait(client.clear(everything=True)).jobs["n0"].done == 3
        assert client.lookup(keys=keys).places == []


def test_what_cannot_be_is_refused_by_name() -> None:
    keys = keys_of(1, 2)
    with plain_node("n0") as (_, url), Client(url) as client:
        with pytest.raises(UnknownError, match="'other'"):
            client.lookup(keys=keys, instances=["other"])
        with pytest.raises(UnknownError, match="tier"):
            client.move(keys=keys, src="tape", dst="disk")
        with pytest.raises(ConfigError, match="host:port"):
            client.move(keys=keys, src="memory", dst="other", to_instance=True)
        with pytest.raises(ConfigError, match="'cachegen'"):
            client.compress("cachegen", keys=keys)
        with pytest.raises(UnknownError, match="nonsense"):
            client.check_finish("nonsense")
        with pytest.raises(UnknownError, match="j99"):
            client.check_finish("j99@n0")
        with pytest.raises(ConfigError, match="one of everything"):
            client.clear()
        with pytest.raises(ConfigError, match="keys of a prompt, or its tokens"):
            client.lookup()
        with pytest.raises(ConfigError, match="no keys"):
            client.pin(keys=[])
        with pytest.raises(UnknownError, match="namespace"):
            client.lookup(keys=keys, namespace="no-such")  # without tokens everybody is the admin


NOT_AS_DESCRIBED = [
    ("/v1/lookup", b"{", 422, "JSON"),
    ("/v1/lookup", b"{}", 422, "chunks"),
    ("/v1/lookup", b'{"chunks": {"keys": []}}', 422, "keys"),
    ("/v1/lookup", b'{"chunks": {"keys": ["%s"]}}' % (b"AB" * 32), 422, "pattern"),
    ("/v1/lookup", b'{"chunks": {"tokens": [1], "keys": []}}', 422, "chunks"),
    ("/v1/lookup", b'{"chunks": {"tokens": [true], "context": "x"}}', 422, "tokens"),
    ("/v1/lookup", b'{"chunks": {"keys": ["%s"]}, "nmespace": "a"}' % (b"ab" * 32), 422, "nmespace"),
    ("/v1/lookup", b'{"namespace": "\\ud800", "chunks": {"keys": ["%s"]}}' % (b"ab" * 32), 422, "namespace"),
    ("/v1/lookup?timeout=3", b'{"chunks": {"keys": ["%s"]}}' % (b"ab" * 32), 400, "timeout"),
    ("/v1/lookup?timeout_s=nan", b'{"chunks": {"keys": ["%s"]}}' % (b"ab" * 32), 422, "timeout_s"),
    ("/v1/clear", b'{"what": {}}', 422, "what"),
    ("/v1/clear", b'{"what": {"all": false}}', 422, "what"),
    ("/v1/clear", b"[" * 100_000, 400, "parsing the body"),
    ("/v1/pin", b'{"chunks": {"keys": ["%s"]}, "ttl_s": true}' % (b"ab" * 32), 422, "ttl_s"),
    ("/v1/pin", b'{"chunks": {"keys": ["%s"]}, "ttl_s": NaN}' % (b"ab" * 32), 422, "ttl_s"),
    ("/v1/pin", b'{"chunks": {"keys": ["%s"]}, "ttl_s": 1e999}' % (b"ab" * 32), 422, "ttl_s"),
    ("/v1/pin", b'{"chunks": {"keys": ["%s"]}, "ttl_s": %s}' % (b"ab" * 32, b"9" * 5000), 400, "parsing the body"),
    ("/v1/route", b'{"chunks": {"keys": ["%s"]}, "candidates": []}' % (b"ab" * 32), 422, "candidates"),
    ("/v1/route", b'{"chunks": {"keys": ["%s"]}, "candidates": [{"instance": "n0", "queued_tokens": NaN}]}'
     % (b"ab" * 32), 422, "queued_tokens"),
    ("/v1/lookup", b'{"chunks": {"keys": [%s]}}' % b",".join([b'"%s"' % (b"ab" * 32)] * 8193), 422, "8192"),
    ("/v1/nothing", b"{}", 404, "Not Found"),
    ("/v1/report", b"{}", 404, "Not Found"),
]  # fmt: skip


def test_bodies_that_are_not_as_described() -> None:
    with plain_node("n0") as (_, url):
        for path, body, status, words in NOT_AS_DESCRIBED:
            found, answer, headers = _raw(url, path, body, **{"x-request-id": "req-17"})
            assert found == status, (path, body[:80], answer)
            assert words in answer["error"]["message"]
            assert headers["x-request-id"] == "req-17"


def test_a_body_that_does_not_say_that_it_is_json_is_not_taken_so_a_web_page_cannot_send_one() -> None:
    """Pages may send these to any address without asking it first, and a Blob without a type sends none at all."""
    body = json.dumps({"what": {"all": True}}).encode()
    with plain_node("n0") as (instance, url):
        instance.put("", "memory", keys_of(1, 2))
        for kind in (None, "", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
            host = url.removeprefix("http://")
            with contextlib.closing(http.client.HTTPConnection(host, timeout=30)) as connection:
                connection.putrequest("POST", "/v1/clear")
                connection.putheader("content-length", str(len(body)))
                if kind is not None:
                    connection.putheader("content-type", kind)
                connection.endheaders(body)
                with connection.getresponse() as response:
                    assert response.status == 422
                    assert b"application/json" in response.read()
        assert instance.jobs == {}
        assert _raw(url, "/v1/clear", body, **{"content-type": "Application/JSON; charset=utf-8"})[0] == 200


def test_what_is_open_is_answered_under_addresses_only_so_a_name_cannot_be_rebound() -> None:
    partly = {"admin_token": b"the-admin", "tokens": {"": b"", "team-a": b"secret-a"}}
    for settings in ({}, partly):
        with plain_node("n0", **settings) as (_, url):
            assert _raw(url, "/v1/workers", None, host="evil.example")[0] == 421
            assert _raw(url, "/v1/workers", None, host="evil.example:80")[0] == 421
            assert _raw(url, "/v1/workers", None, host="localhost:1")[0] == 200
            assert _raw(url, "/v1/workers", None, host="[::1]:1")[0] == 200
            assert b" 200 " in _send(url, b"GET /healthz HTTP/1.0\r\n\r\n")  # a probe of old; browsers give a name
    with plain_node("n0", **TOKENS) as (_, url):
        assert _raw(url, "/healthz", None, host="kv.example")[0] == 200


def _send(url: str, data: bytes) -> bytes:
    """What comes back until the server hangs up."""
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        connection.sendall(data)
        return b"".join(iter(lambda: connection.recv(65536), b""))


def test_odd_requests_are_answered_or_refused_and_the_next_one_is_served() -> None:
    with plain_node("n0", **TOKENS) as (_, url):
        assert b" 200 " in _send(url, b"GET /healthz HTTP/1.0\r\n\r\n")
        for method in (b"HEAD", b"OPTIONS", b"PUT", b"TRACE", b"NONSENSE"):
            answer = _send(url, method + b" /v1/workers HTTP/1.1\r\nHost: a\r\nconnection: close\r\n\r\n")
            assert b" 405 " in answer.partition(b"\r\n")[0]
            assert b"access-control" not in answer.lower()
        for path in (b"/../../etc/passwd", b"/page/../v1/workers", b"//v1/workers", b"/v1/..%2f..%2fetc/passwd"):
            answer = _send(url, b"GET " + path + b" HTTP/1.1\r\nHost: a\r\nconnection: close\r\n\r\n")
            assert b" 404 " in answer.partition(b"\r\n")[0]
        # What the Host header says is no part of the path that is protected.
        for host in (b"x/healthz?", b"x/metrics#", b"x/y?"):
            answer = _send(url, b"GET /metrics HTTP/1.1\r\nHost: " + host + b"\r\nconnection: close\r\n\r\n")
            assert b" 401 " in answer.partition(b"\r\n")[0]
        get = b"GET /healthz HTTP/1.1\r\nHost: a\r\n"
        assert _send(url, (get + b"\r\n") * 50 + get + b"connection: close\r\n\r\n").count(b" 200 OK") == 51
        assert b" 400 " in _send(url, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n")  # TLS to plain HTTP
        with contextlib.suppress(ConnectionError):  # not all of it is read
            assert b" 400 " in _send(url, b"GET / HTTP/1.1\r\nHost: a\r\nx: " + b"y" * 200_000 + b"\r\n\r\n")
        assert _raw(url, "/healthz")[0] == 200


def test_bodies_of_strangers_take_no_room_and_long_ones_keep_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.control.guard._MOST_HELD", 890_100)  # one of them, and hardly more
    head = b"POST /v1/lookup HTTP/1.1\r\nHost: a\r\ncontent-type: application/json\r\ncontent-length: 900000\r\n"
    keys = keys_of(1, 4)
    with plain_node("n0", **TOKENS) as (_, url), contextlib.ExitStack() as stack:
        host, port = url.removeprefix("http://").split(":")

        def begin(token: bytes) -> socket.socket:
            found = stack.enter_context(socket.create_connection((host, int(port)), timeout=30))
            found.sendall(head + b"authorization: Bearer " + token + b"\r\n\r\n" + b"x" * 890_000)
            return found

        for token in (b"wrong", b"wrong"):
            assert b" 401 " in begin(token).recv(1000).partition(b"\r\n")[0]
        answer = _send(url, head + b"connection: close\r\n\r\n{")
        assert b" 401 " in answer.partition(b"\r\n")[0]
        both = [begin(b"secret-a"), begin(b"secret-a")]  # and do not go on
        refused, _, _ = select.select(both, [], [], 30)
        assert b" 503 " in refused[0].recv(1000).partition(b"\r\n")[0]
        assert len(refused) == 1
        with Client(url, token="secret-a") as client:
            assert client.lookup(keys=keys, namespace="team-a").hit_chunks == 0
        assert _raw(url, "/healthz")[0] == 200


def test_metrics_and_page_name_all_namespaces_so_nobody_sees_them_where_one_has_a_token_and_there_is_no_admin() -> None:
    with plain_node("n0", tokens={"": b"", "team-a": b"secret-a"}) as (_, url):
        for token in ({}, {"authorization": "Bearer secret-a"}):
            status, found, _ = _raw(url, "/metrics", None, **token)
            assert status == 401
            assert "started without one" in found["error"]["message"]
        assert _raw(url, "/v1/workers")[1][0]["namespaces"] == [""]
    with plain_node("n0", tokens={"": b"", "team-a": b"secret-a"}, open_metrics=True) as (_, url):
        assert _raw(url, "/metrics")[0] == 200


def test_namespaces_do_not_see_each_other() -> None:
    keys = keys_of(1, 4)
    with plain_node("n0", **TOKENS) as (instance, url):
        instance.put("", "memory", keys)
        instance.put("team-a", "memory", keys[:1])
        with Client(url, token="secret-a") as mine, Client(url, token="the-admin") as admin, Client(url) as nobody:
            assert mine.lookup(keys=keys, namespace="team-a").hit_chunks == 1
            for namespace in ("", "no-such"):
                with pytest.raises(DeniedError, match="no such namespace"):
                    mine.lookup(keys=keys, namespace=namespace)
                for act in (mine.pin, mine.unpin, mine.clear, mine.decompress, mine.route):
                    with pytest.raises(DeniedError):
                        act(keys=keys, namespace=namespace)  # type: ignore[operator]
            (worker,) = mine.workers()
            assert worker.namespaces == ["team-a"]
            assert {tier.namespace for tier in worker.usage} == {"team-a"}
            assert worker.chunks == 1
            (worker,) = admin.workers()
            assert worker.chunks == 5
            event = admin.clear(keys=keys[:1])
            assert admin.wait(event).ok
            with pytest.raises(UnknownError) as theirs:
                mine.check_finish(event)
            with pytest.raises(UnknownError) as none:
                mine.check_finish("j99@n0")
            assert theirs.type is none.type
            with pytest.raises(DeniedError, match="admin token"):
                mine.move(keys=keys, namespace="team-a", src="memory", dst="127.0.0.1:1", to_instance=True)
            for ask in (nobody.workers, nobody.health, nobody.query_ip):
                with pytest.raises(DeniedError, match="needs a token"):
                    ask()
            with pytest.raises(DeniedError, match="opens nothing"):
                mine.with_token("wrong").workers()
            assert instance.lookup("", keys, deadline=math.inf) == [None, *["memory"] * 3]


def test_probes_are_open_and_what_shows_all_is_the_admins() -> None:
    with plain_node("n0", **TOKENS) as (instance, url):
        assert _raw(url, "/healthz")[:2] == (200, {"ok": True})
        assert _raw(url, "/readyz")[:2] == (200, {"ready": True, "problems": []})
        instance.healthy = Health(True, False, 0.0, ["team-a: its disk is gone"])
        time.sleep(0.3)  # what a probe says may be a quarter of a second old
        assert _raw(url, "/readyz")[:2] == (503, {"ready": False, "problems": []})
        admin = {"authorization": "Bearer the-admin"}
        assert _raw(url, "/readyz", None, **admin)[1]["problems"] == ["team-a: its disk is gone"]
        assert _raw(url, "/healthz")[0] == 200
        assert _raw(url, "/metrics")[0] == 401
        assert _raw(url, "/metrics", None, authorization="Bearer secret-a")[0] == 401
        status, text, headers = _raw(url, "/metrics", None, **admin)
        assert status == 200
        assert headers["content-type"].startswith("text/plain")
        assert b'kvstore_control_requests_total{route="/healthz",status="2xx"} 2.0' in text
        assert b'route="/metrics",status="4xx"' in text
    with plain_node("n0", **TOKENS, open_metrics=True) as (_, url):
        assert _raw(url, "/metrics")[0] == 200
        assert _raw(url, "/v1/workers")[0] == 401


def test_labels_of_metrics_are_routes_and_nothing_that_comes_from_outside() -> None:
    with plain_node("n0") as (_, url):
        for number in range(20):
            _raw(url, f"/v1/made-up-{number}")
        text = _raw(url, "/metrics")[1]
        assert b'route="none",status="4xx"} 20.0' in text
        assert b"made-up" not in text


def test_a_long_body_is_refused_before_and_while_it_comes() -> None:
    with plain_node("n0", max_body=4096) as (_, url):
        host = url.removeprefix("http://")
        with contextlib.closing(http.client.HTTPConnection(host, timeout=30)) as connection:
            connection.putrequest("POST", "/v1/lookup")
            connection.putheader("content-length", str(1 << 40))
            connection.putheader("content-type", "application/json")
            connection.endheaders()
            with connection.getresponse() as response:
                assert response.status == 413
                assert b"4096 bytes" in response.read()
        # Whoever reads only when he has sent all gets his answer, too.
        with contextlib.closing(http.client.HTTPConnection(host, timeout=30)) as connection:
            connection.request(
                "POST", "/v1/lookup", body=iter([b"x" * 1000] * 100), headers={"content-type": "application/json"},
                encode_chunked=True,
            )  # fmt: skip
            with connection.getresponse() as response:
                assert response.status == 413
                response.read()


def test_a_body_that_does_not_come_and_headers_that_do_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.control.server._HEADER_S", 0.5)
    with plain_node("n0", max_seconds=0.3) as (_, url):
        host, port = url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=30) as slow:
            head = b"POST /v1/lookup HTTP/1.1\r\nHost: 127.0.0.1\r\ncontent-type: application/json\r\n"
            slow.sendall(head + b"content-length: 100\r\n\r\n{")
            assert b" 408 " in slow.recv(100)
        with socket.create_connection((host, int(port)), timeout=60) as slow:
            slow.sendall(b"GET /healthz HTTP/1.1\r\nHost: 127.0")
            assert slow.recv(100) == b""  # hung up on
        assert _raw(url, "/healthz")[0] == 200


def test_connections_that_do_nothing_make_way_for_others() -> None:
    """Half of them have never asked anything, the others once: neither keeps a probe out."""
    with plain_node("n0", connections=8) as (_, url), contextlib.ExitStack() as stack:
        host, port = url.removeprefix("http://").split(":")
        for number in range(40):
            idle = stack.enter_context(socket.create_connection((host, int(port)), timeout=30))
            if number % 2:
                idle.sendall(b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
                assert b" 200 " in idle.recv(1000)
        for _ in range(3):
            assert _raw(url, "/healthz")[0] == 200


class _Stuck(PlainInstance):
    """Its lookup never ends by itself, deadline or not."""

    def __init__(self) -> None:
        super().__init__("stuck")
        self.release = threading.Event()

    def lookup(self, namespace: str, keys: Any, *, deadline: float) -> list[str | None]:
        self.release.wait(60)
        return [None] * len(keys)


def test_every_request_ends_by_its_deadline_whatever_the_instance_does() -> None:
    instance = _Stuck()
    with served(instance, threads=2) as url, Client(url, timeout=30) as client:
        try:
            begun = time.monotonic()
            with concurrent.futures.ThreadPoolExecutor(6) as pool:
                waiting = [
                    pool.submit(_raw, url, "/v1/lookup?timeout_s=0.3", b'{"chunks": {"keys": ["%s"]}}' % (b"ab" * 32))
                    for _ in range(6)
                ]
                answers = [each.result()[:2] for each in waiting]
            assert [status for status, _ in answers] == [504] * 6
            assert "deadline" in answers[0][1]["error"]["message"]
            assert time.monotonic() - begun < 15
            assert _raw(url, "/healthz")[0] == 200
        finally:
            instance.release.set()
        assert client.lookup(keys=[Key(b"a" * 32)]).places == []


class _Broken(PlainInstance):
    def lookup(self, namespace: str, keys: Any, *, deadline: float) -> list[str | None]:
        raise RuntimeError("a secret of the inside")


def test_a_fault_of_ours_is_500_with_an_id_and_without_its_text(caplog: pytest.LogCaptureFixture) -> None:
    with served(_Broken("n0")) as url, Client(url) as client:
        with pytest.raises((TransientError, PermanentError), match="in the log"):
            client.lookup(keys=[Key(b"a" * 32)])
        assert "secret of the inside" in caplog.text
        status, answer, headers = _raw(url, "/v1/lookup", b'{"chunks": {"keys": ["%s"]}}' % (b"ab" * 32))
        assert status == 500
        assert "secret" not in answer["error"]["message"]
        assert headers["x-request-id"] in answer["error"]["message"]


def test_the_client_keeps_its_connections_and_finds_out_when_one_was_closed() -> None:
    keys = keys_of(1, 2)
    with plain_node("n0") as (_, url):
        client = Client(url)
        for _ in range(5):
            client.lookup(keys=keys)
        assert len(client._connections._kept) == 1
        port = int(url.rpartition(":")[2])
    with pytest.raises(TransientError, match=r"refused|no answer"):
        client.lookup(keys=keys)
    with served(PlainInstance("n1"), listen=f"127.0.0.1:{port}"):
        assert client.workers()[0].instance == "n1"
    client.close()


def test_a_client_gives_up_on_who_answers_byte_by_byte_or_never() -> None:
    stop = threading.Event()

    def trickle(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(65536)
            for byte in b"HTTP/1.1 200 OK\r\ncontent-length: 100000\r\n\r\n" + b"x" * 100_000:
                try:
                    connection.sendall(bytes([byte]))
                except OSError:
                    return
                if stop.wait(0.02):
                    return

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=trickle, args=(listener,))
        thread.start()
        with Client(f"http://127.0.0.1:{listener.getsockname()[1]}", timeout=0.5) as client:
            begun = time.monotonic()
            with pytest.raises(TransientError, match="no answer by the deadline"):
                client.workers()
            assert time.monotonic() - begun < 15
        stop.set()
        thread.join()


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("127.0.0.1:80", "http://HOST:PORT"),
        ("ftp://127.0.0.1", "http://HOST:PORT"),
        ("http://user:secret@127.0.0.1", "no secret stands in a URL"),
        ("http://127.0.0.1:80?x=1", "http://HOST:PORT"),
        ("http://127.0.0.1:xx", "makes no sense"),
    ],
)
def test_a_client_refuses_what_is_no_url_of_an_api(url: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as error:
        Client(url)
    assert "secret@" not in str(error.value)


def test_something_that_is_no_control_api_is_said_to_be_none(tmp_path: Any) -> None:
    import http.server

    class Other(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"<html>hello")

        def log_message(self, *_: Any) -> None:
            return

    with http.server.HTTPServer(("127.0.0.1", 0), Other) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        with (
            Client(f"http://127.0.0.1:{server.server_port}") as client,
            pytest.raises(TransientError, match="is it a control API"),
        ):
            client.workers()
        thread.join()


def test_tls_and_who_is_not_trusted(tmp_path: Any) -> None:
    cert = key = str(make_certificate(tmp_path / "both.pem"))
    (tmp_path / "none.pem").write_text("no certificate")
    keys = keys_of(1, 2)
    with plain_node("n0", **TOKENS, tls_cert=cert, tls_key=key) as (instance, url):
        instance.put("", "memory", keys)
        assert url.startswith("https://")
        with Client(url, token="the-admin", ca=cert) as client:
            assert client.lookup(keys=keys).hit_chunks == 2
            assert client.lookup(keys=keys).hit_chunks == 2
        with Client(url, token="the-admin") as client, pytest.raises(TransientError, match="certificate"):
            client.workers()
        with Client(url.replace("https", "http")) as client, pytest.raises(TransientError):
            client.workers()
    # Who shows no certificate is not let in where one is asked for.
    with plain_node("n0", tls_cert=cert, tls_key=key, tls_client_ca=cert) as (_, url):
        with Client(url, ca=cert, cert=cert, key=key) as client:
            assert client.workers()[0].instance == "n0"
        with Client(url, ca=cert) as client, pytest.raises(TransientError):
            client.workers()
    with (
        pytest.raises(ConfigError, match="TLS files"),
        served(PlainInstance(), tls_cert=str(tmp_path / "none.pem"), tls_key=key),
    ):
        pass
    with pytest.raises(ConfigError, match="write https"):
        Client("http://127.0.0.1:1", ca=cert)


def test_many_clients_at_once_and_nothing_stays_behind() -> None:
    """The short form of the 200 clients over 5 minutes below."""
    _crowd(clients=20, seconds=1.5)


@pytest.mark.slow
def test_200_clients_for_5_minutes() -> None:
    _crowd(clients=200, seconds=300.0)


def _crowd(clients: int, seconds: float) -> None:
    keys = keys_of(1, 32)
    with plain_node("n0") as (instance, url):
        instance.put("", "memory", keys[:20])
        until = time.monotonic() + seconds
        counts = [0] * clients

        def work(number: int) -> None:
            with Client(url, timeout=60) as client:
                while time.monotonic() < until:
                    assert client.lookup(keys=keys).hit_chunks == 20
                    assert client.pin(keys=keys[number % 20 : number % 20 + 1]).count == 1
                    if number % 10 == 0:
                        assert client.wait(client.compress("lz4", keys=keys)).ok
                    counts[number] += 1

        with concurrent.futures.ThreadPoolExecutor(clients) as pool:
            crowd = [pool.submit(work, number) for number in range(clients)]
            middle = time.monotonic() + seconds / 2
            time.sleep(max(0.0, middle - time.monotonic()))
            files, memory = _files(), _memory()
            time.sleep(max(0.0, until - time.monotonic() - seconds / 10))
            assert _files() <= files + 8
            assert _memory() - memory < 64 << 20
            for each in crowd:
                each.result()
        assert all(counts)


def _files() -> int:
    return len(os.listdir("/proc/self/fd"))


def _memory() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
