"""The parts of the valkey backend that need no server: names, the protocol, options, errors, advice."""

from __future__ import annotations

import random
from typing import Any

import pytest

from kvstore.backend import Read
from kvstore.errors import ConfigError, PermanentError, TransientError
from kvstore.keys import opaque_key
from kvstore.registry import parse_url, parse_urls, split_options
from kvstore_backends.valkey import ValkeyBackend
from kvstore_backends.valkey.errors import REPLIES, Faults, LinkError, ReplyError
from kvstore_backends.valkey.facts import advice_on
from kvstore_backends.valkey.names import aside_name, key_of, record_name, scan_pattern, slot_of
from kvstore_backends.valkey.options import OPTIONS, Settings, settings_from_url
from kvstore_backends.valkey.reads import _spans
from kvstore_backends.valkey.resp import about, command, get_range, parse

KEY = opaque_key("k")


def settings(url: str, **options: Any) -> Settings:
    parsed = parse_url(url)
    return settings_from_url(parsed, split_options(parsed, ValkeyBackend, options).own)


# Names.


@pytest.mark.parametrize(
    ("name", "slot"),
    [
        (b"foo", 12182), (b"bar", 5061), (b"hello", 866), (b"", 0), (b"123456789", 0x31C3),
        (b"{user1000}.following", 3443), (b"{user1000}.followers", 3443), (b"foo{{bar}}zap", 4015),
        (b"foo{bar}{zap}", 5061), (b"foo{}{bar}", 8363),
    ],
)  # fmt: skip
def test_slots_are_those_of_the_cluster_specification(name: bytes, slot: int) -> None:
    """Computed with `CLUSTER KEYSLOT` of a real server, and the specification's own example (0x31C3)."""
    assert slot_of(name) == slot


def test_a_record_and_its_quarantined_twin_share_a_slot() -> None:
    for number in range(50):
        name = record_name(b"a/b/", opaque_key(f"{number}"))
        assert slot_of(aside_name(b"a/b/", name, random.getrandbits(64))) == slot_of(name)
        assert key_of(b"a/b/", aside_name(b"a/b/", name, 1)) is None


def test_names_are_read_back_and_others_are_not() -> None:
    name = record_name(b"kv/", KEY)
    assert key_of(b"kv/", name) == KEY
    for other in (name + b"0", name[:-1], name.upper(), b"x" + name, name[3:], b"kv/" + b"g" * 64, b""):
        assert key_of(b"kv/", other) is None


def test_the_pattern_takes_a_prefix_by_the_letter() -> None:
    assert scan_pattern(b"a*[b]?\\^/") == b"a\\*\\[b\\]\\?\\\\\\^/" + b"?" * 64


# The protocol.


def test_commands_are_arrays_of_bulk_strings() -> None:
    assert command(b"SET", b"k\r\n", 12) == b"*3\r\n$3\r\nSET\r\n$3\r\nk\r\n\r\n$2\r\n12\r\n"
    assert about(b"STRLEN", b"name") == command(b"STRLEN", b"name")
    assert get_range(b"name", 5, 1 << 40) == command(b"GETRANGE", b"name", 5, 1 << 40)


REPLY_TEXTS: list[tuple[bytes, Any]] = [
    (b":-2\r\n", -2),
    (b"+OK\r\n", b"OK"),
    (b"$-1\r\n", None),
    (b"*-1\r\n", None),
    (b"$0\r\n\r\n", b""),
    (b"$4\r\na\r\nb\r\n", b"a\r\nb"),
    (b"*0\r\n", []),
    (b"*3\r\n:1\r\n*2\r\n$1\r\nx\r\n$-1\r\n+y\r\n", [1, [b"x", None], b"y"]),
]


@pytest.mark.parametrize(("text", "value"), REPLY_TEXTS)
def test_replies_are_read_when_all_of_them_is_there(text: bytes, value: Any) -> None:
    buffer = bytearray(b"junk" + text + b"+next\r\n")
    assert parse(buffer, 4, len(buffer)) == (value, 4 + len(text))
    for end in range(4, 4 + len(text)):
        assert parse(buffer, 4, end) is None


def test_an_error_reply_is_a_value() -> None:
    found = parse(bytearray(b"-MOVED 1 h:1\r\n"), 0, 14)
    assert found is not None
    assert isinstance(found[0], ReplyError)
    assert (found[0].code, found[0].text) == ("MOVED", "MOVED 1 h:1")
    assert ReplyError("something in lower case").code == "ERR"


@pytest.mark.parametrize(
    "text",
    [
        b"HTTP/1.1 400\r\n", b":1_0\r\n", b":\r\n", b":--1\r\n", b"$9999999999999\r\n", b"$1x\r\n", b"*99999999\r\n",
        b"*-5\r\n", b"$3\r\nabcd\r\n", b"*1\r\n" * 20, b"\x00" * (70 << 10), b":" + b"1" * 30 + b"\r\n",
        b"*2\r\n:1\r\n$99999999999\r\n",
    ],
)  # fmt: skip
def test_what_is_no_reply_is_refused(text: bytes) -> None:
    """Before anything is allocated for it."""
    with pytest.raises(LinkError) as caught:
        parse(bytearray(text), 0, len(text))
    assert caught.value.kind == "protocol"


def test_any_bytes_are_a_reply_incomplete_or_refused() -> None:
    rng = random.Random(7)
    for _ in range(3000):
        text = bytearray(rng.choice(b"+-:$*0123456789\r\nab") for _ in range(rng.randrange(40)))
        if rng.random() < 0.5:
            text += b"\r\n"
        try:
            found = parse(text, 0, len(text))
        except LinkError:
            continue
        assert found is None or 0 < found[1] <= len(text)


# Planning.


def test_what_is_asked_for_is_what_is_wanted_in_few_pieces() -> None:
    """Random reads: every byte of each goes to its place, spans are at most `part` long, neighbours share one."""
    rng = random.Random(3)
    record = bytes(rng.randbytes(5000))
    for _ in range(300):
        part = rng.choice([64, 100, 1000])
        reads = []
        at = 0
        for _ in range(rng.randrange(1, 12)):
            size = rng.choice([0, 1, 50, 64, 130])
            at = rng.randrange(4000) if rng.random() < 0.4 else at
            reads.append(Read(KEY, memoryview(bytearray(size)), at))
            at += size
        spans = _spans(range(len(reads)), reads, part)
        for first, pieces in spans:
            assert 0 < sum(len(piece.view) for piece in pieces) <= part
            for piece in pieces:
                piece.view[:] = record[first : first + len(piece.view)]
                first += len(piece.view)  # noqa: PLW2901
        for read in reads:
            assert read.dst == record[read.offset : read.offset + len(read.dst)]


def test_neighbours_share_a_span() -> None:
    views = [memoryview(bytearray(10)) for _ in range(4)]
    reads = [Read(KEY, view, offset) for view, offset in zip(views, (0, 10, 20, 31), strict=True)]
    assert [(first, len(pieces)) for first, pieces in _spans(range(4), reads, 1 << 20)] == [(0, 3), (31, 1)]


# Options.


@pytest.mark.parametrize(
    ("url", "seeds", "prefix"),
    [
        ("valkey://h", [("h", 6379)], ""),
        ("valkey://h:1/", [("h", 1)], ""),
        ("valkey://h:1/a/b/", [("h", 1)], "a/b/"),
        ("valkey://h:1, i ,[::1]:7/kv", [("h", 1), ("i", 6379), ("::1", 7)], "kv/"),
        ("valkeys://h,h:6379/kv", [("h", 6379)], "kv/"),
        ("valkey://s?sentinel=m", [("s", 26379)], ""),
    ],
)
def test_urls(url: str, seeds: list[tuple[str, int]], prefix: str) -> None:
    found = settings(url)
    assert [tuple(node) for node in found.seeds] == seeds
    assert found.prefix == prefix
    assert found.tls is url.startswith("valkeys")


@pytest.mark.parametrize(
    ("url", "options", "said"),
    [
        ("valkey:///kv", {}, "needs servers"),
        ("valkey://h:0/kv", {}, "needs servers"),
        ("valkey://h:99999", {}, "needs servers"),
        ("valkey://h,", {}, "needs servers"),
        ("valkey://h/a{b}", {}, "braces"),
        ("valkey://h/a//b", {}, "prefix"),
        ("valkey://h/../b", {}, "prefix"),
        ("valkey://h?cluster=on&database=1", {}, "database 0 only"),
        ("valkey://h?cluster=on&sentinel=m", {}, "exclude"),
        ("valkey://h?cluster=maybe", {}, "cluster"),
        ("valkey://h?tls_ca=/x", {}, "valkeys"),
        ("valkeys://h?tls_key=/x", {}, "tls_cert"),
        ("valkeys://h?tls_ca=/no/such/file", {}, "PEM"),
        ("valkey://h?password=x", {}, "must not stand in a URL"),
        ("valkey://h?username=x", {}, "must not stand in a URL"),
        ("valkey://u:p@h", {}, "credentials"),
        ("valkey://h", {"username": "u"}, "password"),
        ("valkey://h?lanes=0", {}, "lanes"),
        ("valkey://h?ttl=1ms", {}, "ttl"),
    ],
)
def test_bad_options_are_named(url: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        ValkeyBackend(settings(url, **options))


def test_secrets_do_not_show() -> None:
    found = settings("valkey://h/kv", username="alice-user", password="hunter2", sentinel_password="hunter3")
    for text in (repr(found), str(found), found.name):
        assert "hunter" not in text
        assert "alice" not in text
    assert {option.name for option in OPTIONS if option.secret} == {"username", "password", "sentinel_password"}


@pytest.mark.parametrize(
    ("url", "ours"),
    [
        ("redis://h:6379", "valkey://h:6379"),
        ("redis://h:6379/2", "valkey://h:6379?database=2"),
        ("rediss://h:6380/0", "valkeys://h:6380"),
        ("redis-cluster://h:1,i:2", "valkey://h:1,i:2?cluster=on"),
        ("redis-sentinel://h:1,i:2", "valkey://h:1,i:2?sentinel=redismaster"),
        ("resp://h:6379", "valkey://h:6379"),
        ("valkey://h:6379", "valkey://h:6379"),
    ],
)
def test_lmcaches_urls_mean_the_same(url: str, ours: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("REDIS_SERVICE_NAME", raising=False)
    assert [str(found) for found in parse_urls(url)] == [ours]


def test_lmcaches_name_of_the_primary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDIS_SERVICE_NAME", "main")
    assert [str(found) for found in parse_urls("redis-sentinel://h:1")] == ["valkey://h:1?sentinel=main"]
    assert [str(found) for found in parse_urls("redis-sentinel://h:1?sentinel=x")] == ["valkey://h:1?sentinel=x"]


def test_what_lmcache_has_and_we_have_not_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"valkey://127\.0\.0\.1:6379"):
        parse_urls("unix:///run/redis.sock")


# Errors.

TRANSIENT = {
    "READONLY", "MASTERDOWN", "LOADING", "BUSY", "CLUSTERDOWN", "MOVED", "ASK", "TRYAGAIN", "NOREPLICAS",
}  # fmt: skip


@pytest.mark.parametrize("code", REPLIES)
def test_each_error_says_whether_to_try_again_and_where_to_look(code: str) -> None:
    error = Faults("valkey://h").of(ReplyError(f"{code} some words"), "put", KEY)
    assert type(error) is (TransientError if code in TRANSIENT else PermanentError)
    assert len(error.message) > 30
    assert code in error.message
    assert error.backend == "valkey://h"
    assert error.operation == "put"


@pytest.mark.parametrize(
    ("text", "kind", "said"),
    [
        ("ERR max number of clients reached", TransientError, "maxclients"),
        ("ERR Protocol error: invalid bulk length", PermanentError, "proto-max-bulk-len"),
        ("ERR string exceeds maximum allowed size (proto-max-bulk-len)", PermanentError, "too large"),
        ("ERR unknown command 'PEXPIRETIME', with args", PermanentError, "too old"),
        ("ERR invalid password", PermanentError, "password"),
        ("ERR something new", PermanentError, "something new"),
        ("WRONGPASS invalid username-password pair for alice", PermanentError, "WRONGPASS"),
    ],
)
def test_errors_without_a_code_of_their_own(text: str, kind: type[Exception], said: str) -> None:
    error = Faults("b").of(ReplyError(text), "get")
    assert type(error) is kind
    assert said in error.message
    assert "alice" not in error.message


@pytest.mark.parametrize("kind", ["deadline", "dns", "connect", "silence", "closed", "protocol", "topology"])
def test_a_broken_link_may_be_tried_again(kind: str) -> None:
    assert type(Faults("b").of(LinkError(kind, "why"), "get")) is TransientError
    assert type(Faults("b").of(LinkError("tls", "why"), "get")) is PermanentError


# Advice.


@pytest.mark.parametrize(
    ("policy", "said"),
    [
        ("allkeys-lru", ""), ("allkeys-lfu", ""), ("volatile-lru", ""), ("volatile-lfu", ""),
        ("noeviction", "nothing more is stored"), ("allkeys-random", "at random"), ("volatile-ttl", "at random"),
        ("a-new-one", "not known"),
    ],
)  # fmt: skip
def test_a_policy_that_is_not_for_a_cache_is_named(policy: str, said: str) -> None:
    advice = advice_on({"h:1": "allkeys-lru", "h:2": policy}, {"h:1": 1000, "h:2": 1000})
    assert len(advice) == bool(said)
    if said:
        assert said in advice[0]
        assert "h:2" in advice[0]
        assert "h:1" not in advice[0]
        assert "allkeys-lru" in advice[0]


def test_a_server_without_a_limit_is_named() -> None:
    nodes = {f"h:{n}": 0 for n in range(5)}
    (advice,) = advice_on({}, nodes)
    assert "and 2 more" in advice
    assert advice_on({}, {}) == ()
