"""The valkey backend against servers that answer anything: each call ends with outcomes of the contract, no secret is
told, no connection is left behind, and the next call works."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import random
import socket
import subprocess
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore.backend import Outcome, Read, Status, Write
from kvstore.errors import BackendError, ClosedError, ConfigError, PermanentError, TransientError
from kvstore.keys import Key, opaque_key
from kvstore.registry import open_backend
from kvstore_backends.valkey import ValkeyBackend
from kvstore_backends.valkey.errors import LinkError
from kvstore_backends.valkey.link import Link
from kvstore_backends.valkey.names import slot_of
from kvstore_backends.valkey.options import Node
from kvstore_backends.valkey.resp import parse
from tests.servers.valkey_doubles import Scripted, Words, array, bulk, hello

DATA = b"0123456789"
SECRETS = {"username": "alice-user", "password": "hunter2-secret"}


def key(name: object) -> Key:
    return opaque_key(f"hostile {name}")


def soon(seconds: float = 20.0) -> float:
    return time.monotonic() + seconds


@contextlib.contextmanager
def opened(server: Scripted, **options: Any) -> Iterator[ValkeyBackend]:
    backend = open_backend(f"valkey://{server.address}/kv", **{"connect_timeout": 5.0, **options})
    assert isinstance(backend, ValkeyBackend)
    try:
        yield backend
    finally:
        backend.close()


def honest(words: Words) -> bytes | None:
    """A server with one record, `DATA`, under every name."""
    name, *rest = words
    if name == b"GETRANGE":
        return bulk(DATA[int(rest[1]) : int(rest[2]) + 1])
    if name == b"SCAN":
        return array(bulk(b"0"), array(bulk(b"kv/" + key("k").hex().encode())))
    if name == b"EXEC":
        return array(b"+OK\r\n", b":1\r\n")
    plain = {
        b"INFO": bulk(b"maxmemory:1000\r\nmaxmemory_policy:allkeys-lru\r\n"), b"PEXPIRETIME": b":1700000000000\r\n",
        b"STRLEN": b":10\r\n", b"EXISTS": b":1\r\n", b"UNLINK": b":1\r\n", b"OBJECT": b":5\r\n", b"SET": b"+OK\r\n",
        b"WATCH": b"+OK\r\n", b"UNWATCH": b"+OK\r\n", b"MULTI": b"+OK\r\n", b"RENAME": b"+QUEUED\r\n",
        b"PEXPIRE": b"+QUEUED\r\n",
        b"ASKING": b"+OK\r\n",
    }  # fmt: skip
    return plain.get(name)


def read_one(backend: ValkeyBackend, seconds: float) -> Outcome:
    return backend.get_into([Read(key("k"), memoryview(bytearray(10)))], deadline=soon(seconds))[0]


def listed(backend: ValkeyBackend, seconds: float) -> Outcome:
    try:
        list(backend.list(deadline=soon(seconds)))
    except BackendError as error:
        return Outcome.failed(error)
    return Outcome(Status.OK)


OPERATIONS: dict[str, Callable[[ValkeyBackend, float], Outcome]] = {
    "stat": lambda backend, s: backend.stat([key("k")], deadline=soon(s))[0],
    "get": read_one,
    "put": lambda backend, s: backend.put([Write(key("new"), [memoryview(DATA)])], deadline=soon(s))[0],
    "delete": lambda backend, s: backend.delete([key("k")], deadline=soon(s))[0],
    "quarantine": lambda backend, s: backend.quarantine([key("k")], deadline=soon(s))[0],
    "list": listed,
}


def makes_sense(operation: str, outcome: Outcome) -> None:
    """An outcome of the contract, whatever the server said."""
    assert (outcome.error is not None) == (outcome.status is Status.ERROR)
    assert isinstance(outcome.nbytes, int)
    assert outcome.nbytes >= 0
    if operation == "get" and outcome.ok:
        assert outcome.nbytes <= 10
    if outcome.error is not None:
        assert isinstance(outcome.error, BackendError)


# Answers.

RUBBISH = [
    b">2\r\n$7\r\nmessage\r\n$1\r\nx\r\n", b"_\r\n", b"#t\r\n", b",1.5\r\n", b"(12345678901234567890\r\n",
    b"%1\r\n:1\r\n:2\r\n", b"~1\r\n:1\r\n", b"!3\r\nERR\r\n", b"=7\r\ntxt:abc\r\n", b"|1\r\n:1\r\n:2\r\n",
    b"$-2\r\n", b"$-99999\r\n", b"*-2\r\n", b"$999999999999\r\n", b"*999999999\r\n", b":\r\n", b"$\r\n", b"\r\n",
    b"\x00\xff\xfe\r\n", b"+\r\n", b"+QUEUED\r\n", b":-1\r\n", b":-7\r\n", b":99999999999999999999\r\n", b"$-1\r\n",
    b"*-1\r\n", b"*0\r\n", b"$0\r\n\r\n", b"*1\r\n*1\r\n*1\r\n:1\r\n", b"-\r\n", b"-MOVED\r\n", b"-MOVED 1 h:99999\r\n",
    b"-MOVED 1 h:0\r\n", b"-MOVED 99999 127.0.0.1:1\r\n", b"-ASK 1 :99999\r\n", b"-MOVED 1 \xff\xfe:1\r\n",
    b"-MOVED 1 a\x00b:1\r\n", b"-MOVED 1 " + b"a" * 70 + b":1\r\n", b"-ERR \xff\xfe\r\n", b"*2\r\n:1\r\n:2\r\n",
    b"*2\r\n$1\r\n0\r\n*2\r\n:5\r\n$-1\r\n", b"*2\r\n*0\r\n*0\r\n", b"*2\r\n$-1\r\n*0\r\n",
]  # fmt: skip


@pytest.mark.parametrize("operation", OPERATIONS)
def test_rubbish_in_answer_to_any_command_is_an_outcome_and_the_next_call_works(operation: str) -> None:
    """Each kind of rubbish in the place of each answer that the operation has."""
    asked: list[bytes] = []
    lie: tuple[int, bytes] | None = None  # in the place of which answer, and what

    def reply(words: Words) -> bytes | None:
        if words[0] not in (b"HELLO", b"CLUSTER", b"INFO"):
            asked.append(words[0])
            if lie is not None and len(asked) == lie[0] + 1:
                return lie[1]
        return honest(words)

    with Scripted(reply) as server, opened(server, read_timeout=5.0) as backend:
        makes_sense(operation, OPERATIONS[operation](backend, 10.0))
        places = len(asked)
        assert places >= 1
        for place in range(places):
            for rubbish in RUBBISH:
                asked.clear()
                lie = (place, rubbish)
                makes_sense(operation, OPERATIONS[operation](backend, 0.15))
                lie = None
                assert backend.stat([key("k")], deadline=soon()) == [Outcome(Status.OK, 10)], (place, rubbish)


@pytest.mark.parametrize("place", ["HELLO", "CLUSTER", "INFO", "SENTINEL"])
def test_rubbish_when_it_is_opened(place: str) -> None:
    many = b"9" * 5000  # more digits than int() takes
    texts = [
        *RUBBISH, hello(version=many + b".1"), hello(version=b"\xc2\xb2.1"), bulk(b"maxmemory:" + many),
        bulk(b"maxmemory:\xc2\xb2"), array(bulk(b"\xff"), bulk(b"1")), array(bulk(b"h"), bulk(many)),
        array(bulk(b"h"), bulk(b"99999")), array(bulk(b"h"), b":1\r\n"),
        array(array(b":0\r\n", b":9\r\n", array(bulk(b"\xff"), b":1\r\n"))),
        array(array(b":0\r\n", b":9\r\n", array(bulk(b"h"), b":99999\r\n"))),
        array(array(b"$-1\r\n", b":9\r\n", array(bulk(b"h"), b":9\r\n"))), array(b":1\r\n" * 1),
    ]  # fmt: skip
    lie = b""

    def reply(words: Words) -> bytes | None:
        return lie if words[0].decode() == place else honest(words)

    options: dict[str, Any] = {"connect_timeout": 0.15, "read_timeout": 0.15}
    if place == "SENTINEL":
        options["sentinel"] = "main"
    with Scripted(reply) as server:
        for text in texts:
            lie = text
            with contextlib.suppress(ConfigError), opened(server, **options) as backend:
                makes_sense("get", read_one(backend, 0.15))


def test_an_answer_cut_at_each_byte_or_followed_by_more_is_never_a_hit() -> None:
    whole = b":1700000000000\r\n" + bulk(DATA) + b":1700000000000\r\n"
    said = whole
    close = False

    def reply(words: Words) -> bytes | None:
        if words[0] == b"GETRANGE":
            return said
        if words[0] == b"PEXPIRETIME":
            if close and said is not whole:
                server.hang_up()
            return b""
        return honest(words)

    with Scripted(reply) as server, opened(server) as backend:
        assert read_one(backend, 20.0) == Outcome(Status.OK, 10)
        end = whole.index(DATA) + len(DATA) + 2
        close = True
        for at in range(len(whole)):
            said = whole[:at]
            outcome = read_one(backend, 20.0)
            if at < end:  # from there on the record itself is there, whole and of one version
                assert outcome.status is Status.ERROR, at
            makes_sense("get", outcome)


def test_random_bytes_are_answered_with_outcomes() -> None:
    rng = random.Random(5)
    noise = b""

    def reply(words: Words) -> bytes | None:
        return noise if noise and words[0] not in (b"HELLO", b"CLUSTER", b"INFO") else honest(words)

    with Scripted(reply) as server, opened(server) as backend:
        for _ in range(10):
            noise = bytes(rng.choice(b"+-:$*0123456789\r\n\r\nabMOVED ") for _ in range(rng.randrange(1, 60)))
            for operation, do in OPERATIONS.items():
                makes_sense(operation, do(backend, 0.02))
        noise = b""
        assert read_one(backend, 20.0) == Outcome(Status.OK, 10)


def test_a_set_that_is_not_acknowledged_is_not_stored() -> None:
    for said in (b"+QUEUED\r\n", b"+\r\n", b":1\r\n", b"$1\r\n1\r\n"):

        def reply(words: Words, said: bytes = said) -> bytes | None:
            return said if words[0] == b"SET" else honest(words)

        with Scripted(reply) as server, opened(server) as backend:
            outcome = OPERATIONS["put"](backend, 20.0)
            assert isinstance(outcome.error, TransientError), (said, outcome)


def test_an_array_is_bounded_whatever_is_nested_in_it() -> None:
    """Items of all depths together: eight arrays of a million are eight million objects otherwise."""
    inner = b"*262144\r\n" + b"*0\r\n" * 262_144
    text = bytearray(b"*3\r\n" + inner * 3)
    with pytest.raises(LinkError, match="array"):
        parse(text, 0, len(text))
    text = bytearray(b"*1\r\n" + b"*100000\r\n" + b":1\r\n" * 100_000)
    found = parse(text, 0, len(text))
    assert found is not None
    assert len(found[0][0]) == 100_000


@pytest.mark.parametrize("text", [b"$-2\r\n", b"$-2147483648\r\n", b"*2\r\n:1\r\n$-3\r\n"])
def test_a_negative_length_is_refused_at_once(text: bytes) -> None:
    """And not taken for a beginning of something longer, which would cost the whole silence."""
    with pytest.raises(LinkError):
        parse(bytearray(text), 0, len(text))


# Redirections.


def test_redirections_to_where_nobody_can_be_are_errors_of_their_jobs() -> None:
    for place in ("127.0.0.1:99999", "127.0.0.1:0", "a..b:7", "h:99999"):

        def reply(words: Words, place: str = place) -> bytes | None:
            if words[0] == b"UNLINK" and words[1].endswith(key(1).hex().encode()):
                return f"-MOVED 5 {place}\r\n".encode()
            return honest(words)

        with Scripted(reply) as server, opened(server) as backend:
            outcomes = backend.delete([key(n) for n in range(3)], deadline=soon())
            assert [outcome.status for outcome in outcomes] == [Status.OK, Status.ERROR, Status.OK], place
            assert isinstance(outcomes[1].error, TransientError)


@pytest.mark.parametrize("host", ["", "?"])
@pytest.mark.parametrize("code", ["MOVED", "ASK"])
def test_a_node_without_a_name_is_at_the_host_that_was_asked(code: str, host: str) -> None:
    """`?`: cluster-preferred-endpoint-type is hostname, and the node has none."""
    with Scripted(honest) as target:

        def reply(words: Words) -> bytes | None:
            if words[:2] == [b"CLUSTER", b"SLOTS"]:
                owner = target if code == "MOVED" and server.count(b"UNLINK") else server
                return array(array(b":0\r\n", b":16383\r\n", array(bulk(b""), b":%d\r\n" % owner.port)))
            if words[0] == b"UNLINK":
                return f"-{code} {slot_of(words[1])} {host}:{target.port}\r\n".encode()
            return honest(words)

        with Scripted(reply, greeting=hello(mode=b"cluster")) as server, opened(server) as backend:
            assert backend.delete([key(1)], deadline=soon()) == [Outcome(Status.OK)]
            assert (server.count(b"UNLINK"), target.count(b"UNLINK")) == (1, 1)
            assert backend._pool._resolver._failed == {}, "nobody is called by such a name"
            assert target.count(b"ASKING") == (code == "ASK")


def test_transactions_at_a_slot_that_is_coming_in_ask_once() -> None:
    """ASKING holds from MULTI to EXEC; within it, it would be one more item of the reply."""

    def target_reply(words: Words) -> bytes | None:
        if words[0] == b"ASKING":
            return b"+OK\r\n"
        if words[0] == b"EXEC":
            return array(b":7\r\n", b":1\r\n")
        if words[0] == b"STRLEN":
            return b":0\r\n"
        return honest(words)

    with Scripted(target_reply) as target:

        def reply(words: Words) -> bytes | None:
            if words[0] in (b"STRLEN", b"EXISTS", b"WATCH", b"PEXPIRETIME", b"MULTI", b"EXEC"):
                return b"-ASK 5 127.0.0.1:%d\r\n" % target.port
            return honest(words)

        with Scripted(reply) as server, opened(server) as backend:
            assert backend.stat([key(1)], deadline=soon()) == [Outcome(Status.OK, 7)]
            verbs = [words[0] for words in target.heard]
            at = verbs.index(b"MULTI")
            assert verbs[at - 1 : at + 4] == [b"ASKING", b"MULTI", b"STRLEN", b"EXISTS", b"EXEC"]
            target.heard.clear()
            assert backend.quarantine([key(1)], deadline=soon()) == [Outcome(Status.OK)]
            verbs = [words[0] for words in target.heard]
            at = verbs.index(b"MULTI")
            assert verbs[at - 1 : at + 4] == [b"ASKING", b"MULTI", b"RENAME", b"PEXPIRE", b"EXEC"]


# Secrets.


@pytest.mark.parametrize(
    "said",
    [
        "ERR unknown command `HELLO`, with args beginning with: `2`, `AUTH`, `alice-user`, `hunter2-secret`, ",
        "ERR unknown command `HELLO`, with args beginning with: `2`, `AUTH`, `alice-user`, `hunter2-sec",
        "ERR what is alice-user hunter2-secret",
        "WRONGPASS invalid username-password pair for alice-user",
        "NOPERM User alice-user has no permissions to run the 'hello' command",
        "LOADING not now, alice-user:hunter2-secret",
    ],
)
def test_a_server_that_repeats_our_secrets_does_not_make_us_tell_them(
    said: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Redis before 6, and proxies, quote the command that they do not know; Valkey names the user."""
    caplog.set_level(logging.DEBUG)
    told: list[str] = []
    telling = True

    def reply(words: Words) -> bytes | None:
        return f"-{said}\r\n".encode() if telling and words[0] != b"CLUSTER" else honest(words)

    with Scripted(reply) as server:
        try:
            with opened(server, **SECRETS) as backend:
                told.append(repr(backend))
        except ConfigError as refused:
            told += traceback.format_exception(refused)
        telling = False
        with opened(server, **SECRETS) as backend:
            told += [repr(backend), repr(backend.settings), str(backend.facts)]
            telling = True
            for do in OPERATIONS.values():
                error = do(backend, 20.0).error
                if error is not None:
                    told += [repr(error), repr(error.cause), *traceback.format_exception(error)]
    for text in (*told, caplog.text):
        for secret in ("alice-user", "hunter2", "hunter2-secret"):
            assert secret not in text


def test_characters_that_are_none_are_named_without_the_secret() -> None:
    bad = SECRETS["password"] + "\ud800"
    with pytest.raises(ConfigError, match="option password") as caught:
        open_backend("valkey://127.0.0.1:1/kv", password=bad)
    assert "hunter2" not in "".join(traceback.format_exception(caught.value))
    with pytest.raises(ConfigError, match="tls_server_name"):
        open_backend("valkeys://127.0.0.1:1/kv", tls_server_name=".example")
    for text in ("[::::]", "[1:2]:6379", "::1:6379", "h:1:2"):
        with pytest.raises(ConfigError):
            open_backend(f"valkey://{text}/kv")


def test_bytes_of_the_environment_reach_the_server_as_they_are() -> None:
    with Scripted(honest) as server, opened(server, password=os.fsdecode(b"p\xff\xfe")):
        assert server.heard[0][4] == b"p\xff\xfe"


def test_a_key_with_a_password_is_an_error_and_no_question_on_the_terminal(tmp_path: Path) -> None:
    pem = tmp_path / "locked.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-passout", "pass:hunter2", "-subj", "/CN=x",
         "-keyout", str(pem), "-out", str(tmp_path / "cert.pem")],
        check=True, capture_output=True,
    )  # fmt: skip
    with pytest.raises(ConfigError, match="encrypted"):
        open_backend("valkeys://127.0.0.1:1/kv", tls_cert=str(tmp_path / "cert.pem"), tls_key=str(pem))


# Connections.


def no_more(*_: Any, **__: Any) -> socket.socket:
    raise OSError(errno.EMFILE, "Too many open files")


def test_no_descriptor_left_is_an_outcome_of_its_items(monkeypatch: pytest.MonkeyPatch) -> None:
    with Scripted(honest) as server, opened(server) as backend:
        assert read_one(backend, 20.0).ok
        backend._pool.forget(next(iter(backend._pool._idle)))
        with monkeypatch.context() as patch:
            patch.setattr("kvstore_backends.valkey.link.socket.socket", no_more)
            for operation, do in OPERATIONS.items():
                error = do(backend, 20.0).error
                assert isinstance(error, TransientError), operation
                assert "Too many open files" in str(error)
        assert read_one(backend, 20.0).ok


def test_connections_that_were_begun_are_not_left_behind_when_it_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call needs two servers; the backend is closed between the two connections."""
    with Scripted(honest) as one, Scripted(honest) as two:

        def cluster(words: Words) -> bytes | None:
            if words[:2] == [b"CLUSTER", b"SLOTS"]:
                halves = [(b":0\r\n", b":8191\r\n", one), (b":8192\r\n", b":16383\r\n", two)]
                return array(*(array(a, b, array(bulk(b""), b":%d\r\n" % s.port)) for a, b, s in halves))
            return honest(words)

        with Scripted(cluster, greeting=hello(mode=b"cluster")) as seed, opened(seed) as backend:
            pool, real = backend._pool, backend._pool._connect
            made: list[Link] = []

            def connect(node: Node, deadline: float) -> Link:
                if made:
                    backend.close()
                made.append(real(node, deadline))
                return made[-1]

            for node in list(pool._idle):
                pool.forget(node)
            monkeypatch.setattr(pool, "_connect", connect)
            with pytest.raises(ClosedError):
                backend.delete([key(n) for n in range(40)], deadline=soon())
            assert len(made) == 1
            assert pool._links == set()


def test_many_idle_connections_that_all_ended_cost_one_try() -> None:
    """A firewall forgot them: nothing shows until something is sent. One such is enough to distrust the others."""
    lanes = 12
    meet = threading.Barrier(lanes)
    forgotten = False

    def reply(words: Words) -> bytes | None:
        if words[0] == b"UNLINK" and not forgotten:
            with contextlib.suppress(threading.BrokenBarrierError):
                meet.wait(20)
        return honest(words)

    with Scripted(reply) as server, opened(server, lanes=lanes) as backend:
        threads = [threading.Thread(target=OPERATIONS["delete"], args=(backend, 60.0)) for _ in range(lanes)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        (idle,) = backend._pool._idle.values()
        assert len(idle) == lanes
        forgotten = True
        for link in idle:
            link.stale = lambda: False  # type: ignore[method-assign]
        server.hang_up()
        assert read_one(backend, 20.0) == Outcome(Status.OK, 10)


def test_a_large_answer_does_not_keep_its_memory() -> None:
    big = bulk(bytes(3 << 20))

    def reply(words: Words) -> bytes | None:
        return array(bulk(b"0"), array(big)) if words[0] == b"SCAN" else honest(words)

    with Scripted(reply) as server, opened(server) as backend:
        assert list(backend.list(deadline=soon())) == []
        assert read_one(backend, 20.0).ok
        for idle in backend._pool._idle.values():
            assert all(len(link._buffer) <= 1 << 20 for link in idle)


def test_users_that_are_shut_out_while_it_runs_are_told_and_let_in_again() -> None:
    """ACL SETUSER … off: the server ends their connections and refuses new ones, until it does not."""
    out = False

    def reply(words: Words) -> bytes | None:
        if words[0] == b"HELLO" and out:
            return b"-WRONGPASS invalid username-password pair or user is disabled.\r\n"
        return honest(words)

    with Scripted(reply) as server, opened(server, **SECRETS) as backend:
        assert read_one(backend, 20.0).ok
        out = True
        server.hang_up()
        error = read_one(backend, 20.0).error
        assert isinstance(error, PermanentError)
        assert "username or password" in str(error)
        out = False
        assert read_one(backend, 20.0).ok
