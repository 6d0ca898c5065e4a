"""The valkey backend against a scripted server: what it sends, and what it makes of every kind of answer."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from kvstore.backend import Outcome, Read, Status, Write
from kvstore.errors import ConfigError, KVStoreError, PermanentError, TransientError
from kvstore.keys import Key, opaque_key
from kvstore.registry import open_backend
from kvstore_backends.valkey import ValkeyBackend
from tests.servers.valkey_doubles import Scripted, Words, array, bulk, hello

SOON_S = 20.0
VERSION = b":1700000000000\r\n"
MISSING = b":-2\r\n"


def key(name: object) -> Key:
    return opaque_key(str(name))


def soon(seconds: float = SOON_S) -> float:
    return time.monotonic() + seconds


@contextmanager
def opened(server: Scripted, **options: Any) -> Iterator[ValkeyBackend]:
    backend = open_backend(f"valkey://{server.address}/kv", **{"connect_timeout": 5.0, **options})
    assert isinstance(backend, ValkeyBackend)
    try:
        yield backend
    finally:
        backend.close()


def get(backend: ValkeyBackend, name: object, nbytes: int, offset: int = 0, **how: Any) -> tuple[Outcome, bytes]:
    dst = bytearray(b"\xa5" * nbytes)
    (outcome,) = backend.get_into([Read(key(name), memoryview(dst), offset)], deadline=soon(**how))
    return outcome, bytes(dst[: outcome.nbytes])


def error_of(outcome: Outcome, kind: type[KVStoreError], *said: str) -> KVStoreError:
    assert outcome.status is Status.ERROR, outcome
    assert type(outcome.error) is kind, outcome.error
    for word in said:
        assert word in str(outcome.error)
    return outcome.error


class Store:
    """Enough of a server to be written to and read from, with one record that is always there."""

    def __init__(self, data: bytes = b"") -> None:
        self.data = data
        self.version = VERSION

    def __call__(self, words: Words) -> bytes | Sequence[bytes] | None:
        verb = words[0]
        if verb == b"INFO":
            return bulk(b"maxmemory:1000\r\nmaxmemory_policy:allkeys-lru\r\n")
        if verb == b"PEXPIRETIME":
            return self.version
        if verb == b"GETRANGE":
            return bulk(self.data[int(words[2]) : int(words[3]) + 1])
        if verb in (b"SET", b"CLIENT"):
            return b"+OK\r\n"
        if verb == b"EXISTS":
            return b":0\r\n"
        return None


# Reading.


@pytest.mark.parametrize("size", [1, 100, 70_000, 300_000])
def test_a_value_that_comes_byte_by_byte_or_in_any_pieces_is_the_same(size: int) -> None:
    data = os.urandom(size)
    store = Store(data)

    def reply(words: Words) -> bytes | Sequence[bytes] | None:
        said = store(words)
        if words[0] != b"GETRANGE" or not isinstance(said, bytes):
            return said
        step = 1 if size <= 100 else 9_999
        return [said[at : at + step] for at in range(0, len(said), step)]

    with Scripted(reply) as server, opened(server) as backend:
        assert get(backend, "k", size + 7) == (Outcome(Status.OK, size), data)
        assert get(backend, "k", size) == (Outcome(Status.OK, size), data)


def test_neighbours_share_a_request_and_land_one_by_one() -> None:
    """Each read is told of as soon as its bytes are there, in order; the last one when the reply has ended well."""
    data = os.urandom(400_000)
    landed: list[int] = []
    seen = threading.Semaphore(0)
    store = Store(data)

    def reply(words: Words) -> bytes | Iterator[bytes] | None:
        said = store(words)
        return pieces(said) if words[0] == b"GETRANGE" and isinstance(said, bytes) else said  # type: ignore[return-value]

    def pieces(said: bytes) -> Iterator[bytes]:
        yield said[:250_000]
        for _ in range(2):
            assert seen.acquire(timeout=20), "two of four are told of before the rest was sent"
        yield said[250_000:]

    memory = [bytearray(100_000) for _ in range(4)]

    def told(index: int) -> Any:
        def tell() -> None:
            assert memory[index] == data[index * 100_000 : (index + 1) * 100_000]
            landed.append(index)
            seen.release()

        return tell

    reads = [Read(key("k"), memoryview(dst), index * 100_000, told(index)) for index, dst in enumerate(memory)]
    with Scripted(reply) as server, opened(server) as backend:  # type: ignore[arg-type]
        assert backend.get_into(reads, deadline=soon()) == [Outcome(Status.OK, 100_000)] * 4
        assert server.count(b"GETRANGE") == 1
    assert landed == [0, 1, 2, 3]


def test_what_landed_before_the_link_broke_is_kept_and_the_rest_is_an_error() -> None:
    data = os.urandom(400_000)
    store = Store(data)

    def reply(words: Words) -> bytes | Iterator[bytes] | None:
        said = store(words)
        return cut(said) if words[0] == b"GETRANGE" and isinstance(said, bytes) else said  # type: ignore[return-value]

    def cut(said: bytes) -> Iterator[bytes]:
        yield said[:250_000]
        server.hang_up()

    memory = [bytearray(b"\xa5" * 100_000) for _ in range(4)]
    reads = [Read(key("k"), memoryview(dst), index * 100_000) for index, dst in enumerate(memory)]
    with Scripted(reply) as server, opened(server) as backend:  # type: ignore[arg-type]
        outcomes = backend.get_into(reads, deadline=soon())
        assert [outcome.status for outcome in outcomes] == [Status.OK] * 2 + [Status.ERROR] * 2
        assert b"".join(memory[:2]) == data[:200_000]
        error_of(outcomes[3], TransientError, "connection")


def test_a_record_replaced_between_two_parts_is_a_miss() -> None:
    """Fault 27. The version asked for before and after differs."""
    store = Store(os.urandom(200_000))

    def reply(words: Words) -> bytes | Sequence[bytes] | None:
        said = store(words)
        if words[0] == b"GETRANGE":
            store.version = b":1700000000001\r\n"
        return said

    with Scripted(reply) as server, opened(server, part_size=64 << 10) as backend:
        assert get(backend, "k", 200_000)[0] == Outcome(Status.MISS)
        assert server.count(b"GETRANGE") == 4
        assert get(backend, "k", 200_000)[0].ok, "the new one"


def test_a_reply_of_nothing_is_a_miss_unless_the_record_was_there_all_the_time() -> None:
    versions: list[bytes] = []
    store = Store(b"")

    def reply(words: Words) -> bytes | Sequence[bytes] | None:
        return versions.pop(0) if words[0] == b"PEXPIRETIME" else store(words)

    with Scripted(reply) as server, opened(server) as backend:
        for before, after, status in [
            (MISSING, MISSING, Status.MISS), (MISSING, VERSION, Status.MISS), (VERSION, MISSING, Status.MISS),
            (VERSION, b":9\r\n", Status.MISS), (VERSION, VERSION, Status.OK), (b":-1\r\n", b":-1\r\n", Status.OK),
        ]:  # fmt: skip
            versions[:] = [before, after]
            assert get(backend, "k", 10) == (Outcome(status), b""), (before, after)


@pytest.mark.parametrize(
    "lie",
    [
        b"$11\r\n" + bytes(11) + b"\r\n", b"$99999999999\r\n", b"$5\r\nabcdefg\r\n", b"$-7\r\n\r\n",
        b"$5x\r\nabcde\r\n", b"$-1\r\n",
        b"?\r\n", b"HTTP/1.1 200 OK\r\n\r\n", b"$" + b"1" * 40, b"$10\r\n" + bytes(10) + b"XY",
        b":1\r\n:2\r\n:3\r\n:4\r\n:5\r\n",
    ],
)  # fmt: skip
def test_a_server_that_lies_about_lengths_harms_nobody(lie: bytes) -> None:
    """Fault 26: the call fails, nothing around the destination is written, and the next call has a new connection."""
    store = Store(bytes(10))
    honest = False

    def reply(words: Words) -> bytes | Sequence[bytes] | None:
        return lie if words[0] == b"GETRANGE" and not honest else store(words)

    with Scripted(reply) as server, opened(server) as backend:
        memory = bytearray(b"\xa5" * 30)
        (outcome,) = backend.get_into([Read(key("k"), memoryview(memory)[10:20])], deadline=soon())
        error_of(outcome, TransientError)
        assert memory[:10] + memory[20:] == b"\xa5" * 20
        honest = True
        before = server.accepted
        assert get(backend, "k", 10) == (Outcome(Status.OK, 10), bytes(10))
        assert server.accepted == before + 1


def test_what_is_asked_for_ahead_is_bounded() -> None:
    """Fault 30: bytes in flight. With a window of 64 KiB and values of 40 KiB the server hears of one at a time, though
    eight are wanted."""
    store = Store(bytes(40_000))
    ahead: list[int] = []
    answered = 0

    def reply(words: Words) -> bytes | Sequence[bytes] | None:
        nonlocal answered
        if words[0] == b"GETRANGE":
            ahead.append(server.count(b"GETRANGE") - answered)
            answered += 1
        return store(words)

    with Scripted(reply) as server, opened(server, window=64 << 10) as backend:
        memory = [memoryview(bytearray(40_000)) for _ in range(8)]
        reads = [Read(key(n), dst) for n, dst in enumerate(memory)]
        assert all(outcome.ok for outcome in backend.get_into(reads, deadline=soon()))
    assert ahead == [1] * 8


# Writing.


def test_value_condition_and_expiry_are_one_command() -> None:
    store = Store()
    with Scripted(store) as server, opened(server, ttl=100.0, ask_from=1 << 20) as backend:
        pieces = [memoryview(b"ab"), memoryview(b""), memoryview(b"cde")]
        assert backend.put([Write(key("k"), pieces)], deadline=soon()) == [Outcome(Status.OK, 5)]
        (words,) = [words for words in server.heard if words[0] == b"SET"]
        assert words[1:5] == [b"kv/" + key("k").hex().encode(), b"abcde", b"NX", b"PX"]
        assert 100_000 <= int(words[5]) <= 101_000
        assert not server.count(b"EXISTS")


def test_without_a_ttl_a_record_lives_for_ten_years() -> None:
    with Scripted(Store()) as server, opened(server) as backend:
        backend.put([Write(key(n), [memoryview(b"x")]) for n in range(20)], deadline=soon())
        lives = [int(words[5]) for words in server.heard if words[0] == b"SET"]
        years = 365 * 86_400_000
        assert all(10 * years <= life <= 10.1 * years for life in lives)
        assert len(set(lives)) == 20, "no two are alike: the expiry is what tells versions apart"


def test_a_large_record_that_is_there_is_not_sent() -> None:
    def reply(words: Words) -> bytes | Sequence[bytes] | None:
        return b":1\r\n" if words[0] == b"EXISTS" else Store()(words)

    with Scripted(reply) as server, opened(server, ask_from=1000) as backend:
        writes = [Write(key(n), [memoryview(bytes(n * 500))]) for n in range(5)]
        statuses = [outcome.status for outcome in backend.put(writes, deadline=soon())]
        assert statuses == [Status.OK, Status.OK, Status.EXISTS, Status.EXISTS, Status.EXISTS]
        assert server.count(b"SET") == 2


def test_too_large_is_refused_before_anything_is_sent() -> None:
    with Scripted(Store()) as server, opened(server, max_value_bytes=1000) as backend:
        before = len(server.heard)
        (outcome,) = backend.put([Write(key("k"), [memoryview(bytes(1001))])], deadline=soon())
        error_of(outcome, PermanentError, "too large", "max_value_bytes")
        assert len(server.heard) == before
        assert backend.limits.max_value_bytes == 1000


def test_a_full_server_is_not_sent_the_rest_of_the_batch() -> None:
    """OOM is the answer to each; of 64 records of 1 MiB those that were not begun are not sent."""
    refused = b"-OOM command not allowed when used memory > 'maxmemory'.\r\n"

    def reply(words: Words) -> bytes | Sequence[bytes] | None:
        return refused if words[0] == b"SET" else Store()(words)

    data = memoryview(bytes(1 << 20))
    sent: list[int] = []
    while len(sent) < 10 and min(sent, default=64) >= 40:  # on a busy machine all may be on their way before the answer
        with Scripted(reply) as server, opened(server) as backend:
            outcomes = backend.put([Write(key(n), [data]) for n in range(64)], deadline=soon())
            for outcome in outcomes:
                error_of(outcome, PermanentError, "not stored", "allkeys-lru")
            sent.append(server.count(b"SET"))
    assert min(sent) < 40


def test_the_second_of_equal_keys_is_tried_when_the_first_was_refused() -> None:
    with Scripted(Store()) as server, opened(server, max_value_bytes=10) as backend:
        batch = [Write(key("k"), [memoryview(bytes(size))]) for size in (11, 5, 6)]
        outcomes = backend.put(batch, deadline=soon())
        assert [outcome.status for outcome in outcomes] == [Status.ERROR, Status.OK, Status.EXISTS]
        assert server.count(b"SET") == 1


# Every error reply, for every operation.


OPERATIONS = {
    "stat": lambda backend: backend.stat([key("k")], deadline=soon()),
    "get": lambda backend: backend.get_into([Read(key("k"), memoryview(bytearray(9)))], deadline=soon()),
    "put": lambda backend: backend.put([Write(key("k"), [memoryview(b"x")])], deadline=soon()),
    "delete": lambda backend: backend.delete([key("k")], deadline=soon()),
    "quarantine": lambda backend: backend.quarantine([key("k")], deadline=soon()),
}


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize(
    ("said", "kind", "shown"),
    [
        ("LOADING Redis is loading the dataset in memory", TransientError, "starting"),
        ("CLUSTERDOWN Hash slot not served", TransientError, "cluster"),
        ("READONLY You can't write against a read only replica.", TransientError, "replica"),
        ("NOPERM this user has no permissions", PermanentError, "ACL"),
        ("WRONGTYPE Operation against a key", PermanentError, "prefix"),
        ("ERR unknown command 'X'", PermanentError, "too old"),
        ("ERR max number of clients reached", TransientError, "maxclients"),
    ],
)
def test_error_replies(operation: str, said: str, kind: type[KVStoreError], shown: str) -> None:
    def reply(words: Words) -> bytes | Sequence[bytes] | None:
        if words[0] in (b"HELLO", b"CLUSTER", b"INFO"):
            return Store()(words)
        return f"-{said}\r\n".encode()

    with Scripted(reply) as server, opened(server) as backend:
        (outcome,) = OPERATIONS[operation](backend)
        error = error_of(outcome, kind, shown)
        assert error.operation == operation


def test_an_error_costs_its_item_only() -> None:
    bad = b"kv/" + key(2).hex().encode()
    store = Store(b"data")

    def reply(words: Words) -> bytes | Sequence[bytes] | None:
        return b"-WRONGTYPE it is a list\r\n" if bad in words and words[0] == b"GETRANGE" else store(words)

    with Scripted(reply) as server, opened(server) as backend:
        reads = [Read(key(n), memoryview(bytearray(4))) for n in range(5)]
        statuses = [outcome.status for outcome in backend.get_into(reads, deadline=soon())]
        assert statuses == [Status.OK, Status.OK, Status.ERROR, Status.OK, Status.OK]


# Meeting.


@pytest.mark.parametrize(
    ("greeting", "said"),
    [
        (b"-WRONGPASS invalid username-password pair or user is disabled.\r\n", "password"),
        (b"-NOAUTH HELLO must be called with the client already authenticated\r\n", "username and password"),
        (b"-DENIED Redis is running in protected mode\r\n", "protected mode"),
        (b"-ERR unknown command `HELLO`\r\n", "too old"),
        (hello(version=b"6.2.14"), "6.2"),
    ],
)
def test_who_will_never_be_let_in_is_told_so_at_open(greeting: bytes, said: str) -> None:
    with Scripted(lambda words: None, greeting=greeting) as server:
        with pytest.raises(ConfigError, match=said):
            open_backend(f"valkey://{server.address}/kv", username="alice-user", password="hunter2")
        sent = next(words for words in server.heard if words[0] == b"HELLO")
        assert sent == [b"HELLO", b"2", b"AUTH", b"alice-user", b"hunter2", b"SETNAME", b"kvstore"]


def test_a_server_that_is_not_ready_at_open_is_met_later(caplog: pytest.LogCaptureFixture) -> None:
    store = Store(b"data")
    ready = False

    def reply(words: Words) -> bytes | Sequence[bytes] | None:
        if words[0] == b"HELLO" and not ready:
            return b"-LOADING Redis is loading the dataset in memory\r\n"
        return store(words)

    with Scripted(reply) as server, opened(server) as backend:
        assert "is tried again when it is used" in caplog.text
        error_of(get(backend, "k", 4)[0], TransientError, "loads its data")
        ready = True
        assert get(backend, "k", 4) == (Outcome(Status.OK, 4), b"data")


def test_of_several_servers_the_primary_is_used() -> None:
    store = Store(b"data")
    with (
        Scripted(store, greeting=hello(role=b"replica")) as replica,
        Scripted(store) as primary,
    ):
        backend = open_backend(f"valkey://{replica.address},{primary.address}/kv")
        assert isinstance(backend, ValkeyBackend)
        try:
            assert get(backend, "k", 4)[0].ok
            assert not replica.count(b"GETRANGE")
            assert primary.count(b"GETRANGE") == 1
            assert backend.facts.primaries == (primary.address,)
        finally:
            backend.close()


def test_a_cluster_without_a_map_is_said_to_be_broken() -> None:
    def reply(words: Words) -> bytes | Sequence[bytes] | None:
        return array() if words[:2] == [b"CLUSTER", b"SLOTS"] else Store()(words)

    with Scripted(reply, greeting=hello(mode=b"cluster")) as server, opened(server, cluster="on") as backend:
        error_of(get(backend, "k", 4)[0], TransientError, "CLUSTER INFO")


@pytest.mark.parametrize(
    "described",
    [
        array(array(b":0\r\n", b":16384\r\n", array(bulk(b"h"), b":1\r\n"))),
        array(array(b":0\r\n", b":5\r\n")),
        array(array(b":0\r\n", b":5\r\n", array(bulk(b"h"), bulk(b"x")))),
        array(b":7\r\n"),
        array(array(b":9\r\n", b":5\r\n", array(bulk(b"h"), b":1\r\n"))),
    ],
)
def test_a_map_that_makes_no_sense_is_refused(described: bytes) -> None:
    def reply(words: Words) -> bytes | Sequence[bytes] | None:
        return described if words[:2] == [b"CLUSTER", b"SLOTS"] else Store()(words)

    with Scripted(reply, greeting=hello(mode=b"cluster")) as server, opened(server) as backend:
        error_of(get(backend, "k", 4)[0], TransientError, "makes no sense")


# Lookups.


def test_lookups_do_not_count_as_uses_where_the_server_can_tell() -> None:
    def reply(words: Words) -> bytes | Sequence[bytes] | None:
        return b":5\r\n" if words[0] == b"STRLEN" else Store()(words)

    for version, said in ((b"7.0.15", []), (b"7.2.4", [b"ON", b"OFF"]), (b"9.0.1", [b"ON", b"OFF"])):
        with Scripted(reply, greeting=hello(version=version)) as server, opened(server) as backend:
            assert backend.stat([key("k")], deadline=soon()) == [Outcome(Status.OK, 5)]
            assert [words[2] for words in server.heard if words[:2] == [b"CLIENT", b"NO-TOUCH"]] == said


def test_a_user_who_may_not_say_no_touch_looks_up_all_the_same() -> None:
    def reply(words: Words) -> bytes | Sequence[bytes] | None:
        if words[0] == b"CLIENT":
            return b"-NOPERM this user has no permissions to run the 'client|no-touch' command\r\n"
        return b":5\r\n" if words[0] == b"STRLEN" else Store()(words)

    with Scripted(reply, greeting=hello(version=b"8.1.0")) as server, opened(server) as backend:
        assert backend.stat([key(n) for n in range(3)], deadline=soon()) == [Outcome(Status.OK, 5)] * 3


def test_a_length_of_zero_that_might_be_a_race_is_asked_again_in_a_transaction() -> None:
    """STRLEN found nothing, EXISTS did: an empty record, or one that was stored in between."""
    transaction = False

    def reply(words: Words) -> bytes | Sequence[bytes] | None:
        nonlocal transaction
        if words[0] == b"MULTI":
            transaction = True
            return b"+OK\r\n"
        if words[0] == b"EXEC":
            return array(b":7\r\n", b":1\r\n")
        if words[0] in (b"STRLEN", b"EXISTS"):
            return b"+QUEUED\r\n" if transaction else {b"STRLEN": b":0\r\n", b"EXISTS": b":1\r\n"}[words[0]]
        return Store()(words)

    with Scripted(reply) as server, opened(server) as backend:
        assert backend.stat([key("k")], deadline=soon()) == [Outcome(Status.OK, 7)]
