"""The valkey backend and what an operator sets up: TLS, ACL users, Sentinels, expiry, policies; and a store over it."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import kvstore
from kvstore.backend import Capability, Outcome, Read, Status, Write
from kvstore.errors import ConfigError, PermanentError
from kvstore.keys import Key, opaque_key
from kvstore.registry import open_backend
from kvstore_backends.valkey import ValkeyBackend
from tests.servers.certificate import make_certificate
from tests.servers.valkey import PASSWORD, USER, Cluster, Server, needs_server, until

SECRETS = {"username": USER, "password": PASSWORD}


def key(name: object) -> Key:
    return opaque_key(f"integration {name}")


def soon(seconds: float = 20.0) -> float:
    return time.monotonic() + seconds


@contextmanager
def opened(url: str, **options: Any) -> Iterator[ValkeyBackend]:
    backend = open_backend(url, **{"connect_timeout": 10.0, **options})
    assert isinstance(backend, ValkeyBackend)
    try:
        yield backend
    finally:
        backend.close()


def put(backend: ValkeyBackend, name: object, data: bytes) -> Outcome:
    return backend.put([Write(key(name), [memoryview(data)])], deadline=soon())[0]


def get(backend: ValkeyBackend, name: object, nbytes: int) -> tuple[Outcome, bytes]:
    dst = bytearray(nbytes)
    (outcome,) = backend.get_into([Read(key(name), memoryview(dst))], deadline=soon())
    return outcome, bytes(dst[: outcome.nbytes])


# TLS and users.


def test_over_tls_large_values_are_exact(valkey_tls: Server) -> None:
    data = os.urandom(20 << 20)
    url = f"valkeys://{valkey_tls.address}/kv"
    with opened(url, tls_ca=str(valkey_tls.certificate), **SECRETS) as backend:
        assert put(backend, "tls", data).ok
        assert get(backend, "tls", len(data)) == (Outcome(Status.OK, len(data)), data)
        reads = [Read(key("tls"), memoryview(bytearray(1 << 20)), at) for at in range(0, 20 << 20, 1 << 20)]
        assert all(outcome.ok for outcome in backend.get_into(reads, deadline=soon()))
        assert b"".join(bytes(read.dst) for read in reads) == data
        assert backend.delete([key("tls")], deadline=soon())[0].ok


def test_a_user_who_may_do_no_more_than_the_manual_says_may_do_everything(valkey_tls: Server) -> None:
    with opened(f"valkeys://{valkey_tls.address}/kv", tls_ca=str(valkey_tls.certificate), **SECRETS) as backend:
        assert put(backend, "a", b"x" * (1 << 20)).ok
        assert get(backend, "a", 10)[0].ok
        assert backend.stat([key("a")], deadline=soon())[0].nbytes == 1 << 20
        assert key("a") in {info.key for page in backend.list(deadline=soon()) for info in page}
        assert backend.quarantine([key("a")], deadline=soon())[0].ok
        assert put(backend, "a", b"y").ok
        assert backend.delete([key("a")], deadline=soon())[0].ok
        assert backend.facts.policies == {valkey_tls.address: "allkeys-lru"}


def test_outside_the_users_keys_the_error_names_the_acl(valkey_tls: Server) -> None:
    url = f"valkeys://{valkey_tls.address}/elsewhere"
    with opened(url, tls_ca=str(valkey_tls.certificate), **SECRETS) as backend:
        for outcome in (put(backend, "a", b"x"), get(backend, "a", 1)[0], backend.stat([key("a")], deadline=soon())[0]):
            assert isinstance(outcome.error, PermanentError)
            assert "ACL SETUSER" in str(outcome.error)
            assert PASSWORD not in str(outcome.error)


@pytest.mark.parametrize(
    ("secrets", "said"),
    [
        ({"username": USER, "password": "wrong"}, "username or password"),
        ({"username": "nobody", "password": PASSWORD}, "username or password"),
        ({"password": PASSWORD}, "username or password"),
        ({}, "username and password"),
    ],
)
def test_wrong_credentials_are_named_at_open(valkey_tls: Server, secrets: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        open_backend(f"valkeys://{valkey_tls.address}/kv", tls_ca=str(valkey_tls.certificate), **secrets)
    for secret in (PASSWORD, "wrong", "nobody", USER):
        assert secret not in str(caught.value) + repr(caught.value)


def test_a_certificate_that_is_not_trusted_is_named_at_open(valkey_tls: Server) -> None:
    with pytest.raises(ConfigError, match="tls_ca"):
        open_backend(f"valkeys://{valkey_tls.address}/kv", **SECRETS)
    ca = str(valkey_tls.certificate)
    with pytest.raises(ConfigError, match="tls_server_name"):
        open_backend(f"valkeys://{valkey_tls.address}/kv", tls_ca=ca, tls_server_name="elsewhere.example", **SECRETS)
    url = f"valkeys://{valkey_tls.address}/kv"
    with opened(url, tls_ca=str(valkey_tls.certificate), tls_server_name="localhost", **SECRETS) as backend:
        assert backend.facts.mode == "single"


def test_tls_to_a_plain_port_and_plain_to_a_tls_port(
    valkey_tls: Server, valkey_server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither hangs. A plain port takes a handshake for the beginning of a command, and waits for more of it."""
    for url in (f"valkeys://{valkey_server.address}/kv", f"valkey://{valkey_tls.address}/kv"):
        with opened(url, connect_timeout=0.2) as backend:
            error = get(backend, "k", 1)[0].error
            assert error is not None
            assert error.retryable
    assert caplog.text.count("is tried again when it is used") == 2


def test_a_server_that_asks_for_certificates(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Mutual TLS, Redis' default for TLS ports."""
    needs_server()
    certificate = make_certificate(tmp_path / "both.pem")
    words = ("--tls-auth-clients", "yes", "--maxmemory", "10mb", "--maxmemory-policy", "allkeys-lru")
    with Server(tmp_path / "mutual", *words, certificate=certificate) as server:
        url, ca = f"valkeys://{server.address}/kv", str(certificate)
        with opened(url, tls_ca=ca, tls_cert=ca) as backend:
            assert put(backend, "k", b"x").ok
        try:
            with opened(url, tls_ca=ca):
                said = caplog.text
        except ConfigError as error:  # the server's alert came before it hung up
            said = str(error)
        assert "does it want a tls_cert?" in said


# Sentinels, replicas.


@pytest.mark.slow
def test_sentinels_name_the_primary_and_the_one_after_it(tmp_path: Path) -> None:
    """The primary dies, the Sentinel promotes the replica, and the same backend goes on there."""
    needs_server()
    cache = ("--maxmemory", "50mb", "--maxmemory-policy", "allkeys-lru")
    with Server(tmp_path / "primary", *cache) as primary:
        to_primary = ("--replicaof", "127.0.0.1", str(primary.port))
        with Server(tmp_path / "replica", *cache, *to_primary) as replica:
            assert until(lambda: replica.info("INFO", "replication").get("master_link_status") == "up")
            with sentinel(tmp_path / "sentinel", primary) as watcher:
                url = f"valkey://{watcher.address}/kv?sentinel=main"
                with opened(url, connect_timeout=1.0, read_timeout=1.0) as backend:
                    assert until(lambda: put(backend, "k", b"data").stored)
                    assert backend.facts.primaries == (primary.address,)
                    assert until(lambda: replica.call("DBSIZE") == 1)
                    assert until(lambda: watcher.info("INFO", "sentinel").get("master0", "").find("slaves=1") > 0)
                    primary.stop()
                    assert until(lambda: put(backend, "after", b"x").stored, limit_s=60.0)
                    assert get(backend, "k", 4) == (Outcome(Status.OK, 4), b"data")
                    assert replica.call("DBSIZE") == 2
        with pytest.raises(ConfigError, match="sentinel"):
            open_backend("valkey://127.0.0.1:1/kv?sentinel=main&cluster=on")


@contextmanager
def sentinel(folder: Path, primary: Server) -> Iterator[Server]:
    folder.mkdir()
    config = folder / "sentinel.conf"
    config.write_text(
        f"sentinel monitor main 127.0.0.1 {primary.port} 1\nsentinel down-after-milliseconds main 500\n"
        "sentinel failover-timeout main 5000\n"
    )
    with Server(folder, "--sentinel", config=config) as server:
        yield server


def test_a_replica_given_alone_is_no_primary(tmp_path: Path) -> None:
    needs_server()
    with Server(tmp_path / "primary") as primary, Server(tmp_path / "replica") as replica:
        replica.call("REPLICAOF", "127.0.0.1", primary.port)
        with opened(f"valkey://{replica.address}/kv") as backend:
            error = put(backend, "k", b"x").error
            assert error is not None
            assert "none of the servers is a primary" in str(error)
        with opened(f"valkey://{replica.address},{primary.address}/kv") as both:
            assert put(both, "k", b"x").ok
            assert both.facts.primaries == (primary.address,)


def test_a_primary_that_becomes_a_replica_is_left(tmp_path: Path) -> None:
    """READONLY: its connections are dropped and the other one is found."""
    needs_server()
    with Server(tmp_path / "one") as one, Server(tmp_path / "two") as two:
        two.call("REPLICAOF", "127.0.0.1", one.port)
        with opened(f"valkey://{one.address},{two.address}/kv") as backend:
            assert put(backend, "k", b"data").ok
            assert until(lambda: two.call("DBSIZE") == 1)
            two.call("REPLICAOF", "NO", "ONE")
            one.call("REPLICAOF", "127.0.0.1", two.port)
            assert until(lambda: put(backend, "new", b"x").stored)
            assert get(backend, "k", 4)[1] == b"data"
            assert two.call("DBSIZE") == 2


# Expiry.


def test_records_expire_as_asked(valkey_server: Server) -> None:
    with opened(f"valkey://{valkey_server.address}/ttl?ttl=1s") as backend:
        assert Capability.TTL in backend.capabilities
        assert put(backend, "k", b"data").ok
        with valkey_server.client() as client:
            left = client.pttl(f"ttl/{key('k').hex()}")
            assert 0 < left <= 1010
        assert until(lambda: backend.stat([key("k")], deadline=soon())[0].status is Status.MISS)
        assert get(backend, "k", 4)[0].status is Status.MISS
        assert put(backend, "k", b"again").ok


def test_corrupt_records_are_kept_aside_for_a_while_or_not_at_all(valkey_server: Server) -> None:
    url = f"valkey://{valkey_server.address}/aside"
    with valkey_server.client() as client:
        with opened(url, quarantine=50.0) as backend:
            put(backend, "k", b"corrupt")
            assert get(backend, "k", 9)[1] == b"corrupt"
            assert backend.quarantine([key("k")], deadline=soon())[0].ok
            (name,) = client.keys("aside/*")
            assert name.startswith(b"aside/quarantine/{aside/")
            assert client.get(name) == b"corrupt"
            assert 0 < client.ttl(name) <= 50
            client.unlink(name)
        with opened(url, quarantine=0.0) as backend:
            put(backend, "k", b"corrupt")
            get(backend, "k", 9)
            assert backend.quarantine([key("k")], deadline=soon())[0].ok
            assert client.keys("aside/*") == []


def test_a_record_replaced_since_it_was_read_is_not_quarantined(valkey_server: Server) -> None:
    """Also if it was replaced by the same bytes, by kvstore itself, in the same second."""
    url = f"valkey://{valkey_server.address}/healed"
    with opened(url) as backend, opened(url) as other:
        for _ in range(20):
            put(backend, "k", b"bytes")
            assert get(backend, "k", 9)[0].ok
            assert other.delete([key("k")], deadline=soon())[0].ok
            assert put(other, "k", b"bytes").ok
            assert backend.quarantine([key("k")], deadline=soon())[0].status is Status.MISS
            assert get(backend, "k", 9)[1] == b"bytes"
            assert backend.delete([key("k")], deadline=soon())[0].ok


# Policies.


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--maxmemory", "50mb", "--maxmemory-policy", "allkeys-lru"), ""),
        (("--maxmemory", "50mb", "--maxmemory-policy", "volatile-lru"), ""),
        (("--maxmemory", "50mb", "--maxmemory-policy", "noeviction"), "nothing more is stored"),
        (("--maxmemory", "50mb", "--maxmemory-policy", "volatile-ttl"), "at random"),
        (("--maxmemory-policy", "allkeys-lru"), "maxmemory is not set"),
    ],
)
def test_what_a_full_server_will_do_is_said_once_at_open(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, words: tuple[str, ...], said: str
) -> None:
    needs_server()
    caplog.set_level(logging.WARNING, logger="kvstore.backends.valkey")
    with Server(tmp_path / "own", *words) as server, opened(f"valkey://{server.address}/kv") as backend:
        put(backend, "k", b"x")
        assert len(backend.facts.advice) == len(caplog.records) == bool(said)
        assert said in caplog.text


@pytest.mark.parametrize("policy", ["allkeys-lru", "volatile-lru"])
def test_a_server_that_evicts_takes_more_than_it_holds(tmp_path: Path, policy: str) -> None:
    """Every record has an expiry, so the volatile policies evict, too."""
    needs_server()
    data = os.urandom(1 << 20)
    words = ("--maxmemory", "20mb", "--maxmemory-policy", policy)
    with Server(tmp_path / "own", *words) as server, opened(f"valkey://{server.address}/kv") as backend:
        for number in range(40):
            assert put(backend, number, data).ok
            assert get(backend, number, 1 << 20) == (Outcome(Status.OK, 1 << 20), data)
        there = backend.stat([key(number) for number in range(40)], deadline=soon())
        assert 5 < sum(outcome.ok for outcome in there) < 25
        assert int(server.info("INFO", "stats")["evicted_keys"]) >= 15


# Others.


def test_a_database_of_its_own(valkey_server: Server) -> None:
    with opened(f"valkey://{valkey_server.address}/db?database=3") as backend:
        assert backend.name.endswith("?database=3")
        assert put(backend, "k", b"x").ok
        with valkey_server.client(db=3) as client:
            assert client.delete(f"db/{key('k').hex()}") == 1
    with pytest.raises(ConfigError, match="database"):
        open_backend(f"valkey://{valkey_server.address}/db?database=99")


def test_a_database_of_a_cluster_is_refused(valkey_cluster: Cluster) -> None:
    with pytest.raises(ConfigError, match="database 0 only"):
        open_backend(f"valkey://{valkey_cluster.shards[0].address}/db?database=1")


def test_something_else_under_our_name_is_an_error_and_says_so(valkey_server: Server) -> None:
    with opened(f"valkey://{valkey_server.address}/other") as backend, valkey_server.client() as client:
        name = f"other/{key('k').hex()}"
        client.rpush(name, "a list")
        for outcome in (get(backend, "k", 3)[0], backend.stat([key("k")], deadline=soon())[0]):
            assert isinstance(outcome.error, PermanentError)
            assert "prefix" in str(outcome.error)
        assert put(backend, "k", b"x").status is Status.EXISTS
        assert list(backend.list(deadline=soon())) == []
        client.delete(name)


@pytest.mark.parametrize("where", ["single", "cluster"])
def test_a_store_over_it(valkey_server: Server, valkey_cluster: Cluster, where: str) -> None:
    """Records of the store, verified as they land; damage is found, quarantined, and healed by the next put."""
    server = {"single": valkey_server, "cluster": valkey_cluster.shards[0]}[where]
    with kvstore.open_store(f"valkey://{server.address}/store", buffer_pool_bytes=32 << 20) as store:
        names = [f"{where} {number}" for number in range(12)]
        data = {name: os.urandom(300_000) for name in names}
        assert all(outcome.ok for outcome in store.put_many(data))
        assert store.hit_prefix([*names, "missing"]) == 12
        assert store.get_many(names) == [bytearray(data[name]) for name in names]
        client = valkey_server.client() if where == "single" else valkey_cluster.client()
        try:
            name = f"store/{opaque_key(names[3]).hex()}"
            stored = bytearray(client.get(name))
            stored[len(stored) // 2] ^= 1
            client.set(name, bytes(stored))
            found = store.get_many(names)
            assert found[3] is None
            assert found[4] == data[names[4]]
            assert client.exists(name) == 0
            assert store.put_many({names[3]: data[names[3]]})[0].ok
            assert store.get_many(names) == [bytearray(data[name]) for name in names]
            assert len(list(client.scan_iter(match="store/quarantine/*"))) == 1
        finally:
            store.delete_many(names)
            for left in list(client.scan_iter(match="store/*")):
                client.unlink(left)
            client.close()
