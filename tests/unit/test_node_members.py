"""Membership: what is read from URLs, DNS and files; and how few keys move when it changes."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import ConfigError
from kvstore.keys import Key
from kvstore.placement import Placement
from kvstore.registry import parse_url, split_options
from kvstore_backends.node import NodeBackend, dial
from kvstore_backends.node.members import DnsSource, FileSource, Member, parse_authority, parse_file
from kvstore_backends.node.options import Settings, settings_from_url
from kvstore_transport import ConnectionLost, TransportUnavailable


def of_url(text: str, **overrides: Any) -> Settings:
    url = parse_url(text)
    return settings_from_url(url, split_options(url, NodeBackend, overrides).own)


def test_a_url_names_its_nodes() -> None:
    found = of_url("node://a:1,[::1]:2,c.example:3?replicas=2&transport=tcp")
    assert [member.address for member in found.members] == ["a:1", "[::1]:2", "c.example:3"]
    assert [member.name for member in found.members] == ["a:1", "[::1]:2", "c.example:3"]
    assert (found.replicas, found.transport, found.name) == (2, "tcp", "node://a:1,[::1]:2,c.example:3")


def test_a_unix_socket_and_a_file_are_paths() -> None:
    assert of_url("node:///run/kv.sock").members == (Member("/run/kv.sock", "/run/kv.sock"),)
    found = of_url("node:///etc/kv/nodes?discover=file")
    assert (found.members, found.path) == ((), "/etc/kv/nodes")


def test_ucx_has_a_scheme() -> None:
    assert of_url("kvstore+ucx://a:1").transport == "ucx"
    with pytest.raises(ConfigError, match="write node://"):
        of_url("kvstore+ucx://a:1?transport=tcp")


@pytest.mark.parametrize(
    ("url", "what"),
    [
        ("node://", "names no node"),
        ("node://a", "host:port"),
        ("node://a:0", "port is 1 to 65535"),
        ("node://a:99999", "host:port"),
        ("node://a:1,a:1", "more than once"),
        ("node://[zz]:1", "no address of a node: .*zz"),
        ("node://[1.2.3.4]:1", "no address of a node"),
        ("node://a:1/path", "takes no path"),
        ("node://a:1?replicas=2", "names 1 nodes"),
        ("node://a:1,b:2?write_quorum=2", "cannot be reached"),
        ("node://a:1?tls_ca=/x", "without tls"),
        ("node://a:1?tls=true&tls_cert=/x", "together"),
        ("node://a:1?discover=file", "discover=file takes"),
        ("node://?discover=file", "takes the path"),
        ("node://a:1,b:2?discover=dns", "takes one host:port"),
        ("node:///x.sock?discover=dns", "takes one host:port"),
        ("node://a:1?transport=tcp&require_rdma=true", "transport=ucx"),
        ("node://a:1?token=hunter2", "must not stand in a URL"),
        ("node://a:1?transport=carrier-pigeon", "one of auto, tcp"),
    ],
)
def test_what_makes_no_sense_is_refused(url: str, what: str) -> None:
    with pytest.raises(ConfigError, match=what) as caught:
        of_url(url)
    assert "hunter2" not in str(caught.value)


def test_a_token_is_never_shown() -> None:
    found = of_url("node://a:1", token="hunter2")
    assert found.token == "hunter2"
    assert "hunter2" not in repr(found)
    assert "hunter2" not in found.name


GOOD = """
# the rack
10.0.0.1:7070
10.0.0.2:7070   weight=2    # twice
10.0.0.3:7070 name=n3 weight=0.5
/run/kv.sock
"""


def test_a_file_names_nodes() -> None:
    assert parse_file(GOOD, "nodes") == (
        Member("10.0.0.1:7070", "10.0.0.1:7070"),
        Member("10.0.0.2:7070", "10.0.0.2:7070", 2.0),
        Member("n3", "10.0.0.3:7070", 0.5),
        Member("/run/kv.sock", "/run/kv.sock"),
    )


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "names no node"),
        ("# none\n", "names no node"),
        ("a:1\nb\n", "line 2: 'b' is no address"),
        ("::1:7070", "line 1: .* put an IPv6 address in brackets"),
        ("run/kv.sock", "line 1: .* begins with a '/'"),
        ("a:1 weight=x", "line 1: weight=x"),
        ("a:1 weight=-1", "weight=-1"),
        ("a:1 weight=nan", "weight=nan"),
        ("a:1 weight=inf", "weight=inf"),
        ("a:1 wieght=2", "'wieght=2' is not understood"),
        ("a:1 name=", "'name=' is not understood"),
        ("a:1 name=x name=y", "'name=y' is not understood"),
        ("a:1 name=x\nb:1 name=x", "the name x stands there more than once"),
        ("a:1 name=x\na:1 name=y", "the address a:1 stands there more than once"),
        ("a:1 weight=0", "no node has a weight"),
    ],
)
def test_a_broken_file_says_where(text: str, what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        parse_file(text, "nodes")


def replace(path: Path, text: str) -> None:
    """As `kubectl` and careful people do it."""
    new = path.with_suffix(".new")
    new.write_text(text)
    os.replace(new, path)


def test_a_file_is_read_again_when_it_changes(tmp_path: Path) -> None:
    path = tmp_path / "nodes"
    path.write_text("a:1\n")
    source = FileSource(str(path))
    assert source.read() == (Member("a:1", "a:1"),)
    assert source.read() is None
    replace(path, "a:1 # the same\n")
    assert source.read() is None
    replace(path, "a:1\nb:1\n")
    assert [member.name for member in source.read() or ()] == ["a:1", "b:1"]


def test_a_broken_file_is_complained_about_until_it_is_mended(tmp_path: Path) -> None:
    path = tmp_path / "nodes"
    path.write_text("a:1\n")
    source = FileSource(str(path))
    assert source.read() is not None
    replace(path, "what?\n")
    for _ in range(2):
        with pytest.raises(ConfigError, match="line 1"):
            source.read()
    path.unlink()
    with pytest.raises(FileNotFoundError):
        source.read()
    path.write_bytes(b"\xff\xff")
    with pytest.raises(ConfigError, match="UTF-8"):
        source.read()
    replace(path, "a:1\n")
    assert source.read() is None  # as the last good one
    replace(path, "b:1\n")
    assert source.read() == (Member("b:1", "b:1"),)


def test_dns_gives_all_addresses_in_one_order() -> None:
    answers: list[Any] = [["10.0.0.2", "10.0.0.1", "10.0.0.1"], ["10.0.0.1", "10.0.0.2"], [], OSError("no"), ["::1"]]
    asked = []

    def resolve(host: str, port: int) -> list[str]:
        asked.append((host, port))
        answer = answers.pop(0)
        if isinstance(answer, OSError):
            raise answer
        return list(answer)

    source = DnsSource("kv.default.svc:7070", resolve)
    assert [member.address for member in source.read() or ()] == ["10.0.0.1:7070", "10.0.0.2:7070"]
    assert source.read() is None
    for _ in range(2):
        with pytest.raises(OSError, match=r"no"):
            source.read()
    assert [member.address for member in source.read() or ()] == ["[::1]:7070"]
    assert asked == [("kv.default.svc", 7070)] * 5


def test_the_systems_resolver_knows_localhost() -> None:
    found = DnsSource("localhost:7070").read()
    assert found is not None
    assert {member.address for member in found} <= {"127.0.0.1:7070", "[::1]:7070"}


KEYS = [Key(hashlib.sha256(b"%d" % number).digest()) for number in range(4000)]


@given(count=st.integers(1, 12), seed=st.integers(0, 1 << 30))
def test_a_new_node_takes_its_share_and_no_other_key_moves(count: int, seed: int) -> None:
    names = [f"10.{seed % 250}.{seed // 250 % 250}.{number}:7070" for number in range(count + 1)]
    before, after = Placement(names[:-1]), Placement(names)
    moved = 0
    for key in KEYS:
        (old,), (new,) = before.order(key), after.order(key)
        if old != new:
            assert new == count  # only to the new one
            moved += 1
    # The bar is 1.1 / (n + 1); on 4,000 keys four standard deviations of sampling come on top.
    share = 1 / (count + 1)
    assert moved <= 1.1 * share * len(KEYS) + 4 * (len(KEYS) * share * (1 - share)) ** 0.5


def test_a_new_node_takes_no_more_than_its_share_of_many_keys() -> None:
    """The same on so many keys that the bar holds as it stands."""
    keys = [Key(hashlib.sha256(b"many %d" % number).digest()) for number in range(60_000)]
    names = [f"10.0.0.{number}:7070" for number in range(9)]
    for count in (1, 3, 8):
        before, after = Placement(names[:count]), Placement(names[: count + 1])
        moved = sum(names[before.order(key)[0]] != names[after.order(key)[0]] for key in keys)
        assert 0.9 / (count + 1) <= moved / len(keys) <= 1.1 / (count + 1)


def test_the_authority_may_hold_spaces() -> None:
    assert [member.address for member in parse_authority("a:1, b:2")] == ["a:1", "b:2"]


def test_without_rdma_what_requires_it_fails_at_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """And says what to install. With RDMA, UCX alone is asked for, and started outside of any connection's time."""
    ucx = pytest.importorskip("kvstore_transport.ucx")
    found = of_url("node://a:1?require_rdma=true")
    done: list[object] = []

    def unavailable() -> None:
        raise TransportUnavailable("no rc, dc or ud transport: install host UCX")

    def connecting(address: str, *, transport: str, **options: object) -> None:
        done.append((address, transport))
        raise ConnectionLost("nobody there")

    monkeypatch.setattr(ucx, "require_rdma", unavailable)
    with pytest.raises(ConfigError, match="install host UCX"):
        NodeBackend(found)
    monkeypatch.setattr(ucx, "require_rdma", lambda: done.append("rdma"))
    monkeypatch.setattr(dial, "_start_ucx", lambda: done.append("started"))
    monkeypatch.setattr(dial, "connect", connecting)
    NodeBackend(found).close()
    assert done == ["rdma", "started", ("a:1", "ucx")]


_OPEN = """
import sys
from kvstore import open_store
from kvstore.errors import ConfigError
try:
    open_store("node://127.0.0.1:1?require_rdma=true")
except ConfigError as error:
    print(error)
    sys.exit(3)
"""


@pytest.mark.skipif(Path("/sys/class/infiniband").exists(), reason="this machine has RDMA")
def test_a_store_that_requires_rdma_does_not_open_here() -> None:
    done = subprocess.run([sys.executable, "-c", _OPEN], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 3, done.stderr
    assert "option 'require_rdma'" in done.stdout
    assert "RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY" in done.stdout or "pip install" in done.stdout


@pytest.mark.parametrize(
    ("options", "auto", "wanted"),
    [
        ("transport=ucx", (), True),
        ("transport=auto", ("ucx", "tcp"), True),
        ("transport=auto", ("shm", "tcp"), False),
        ("transport=tcp", ("ucx", "tcp"), False),
        ("transport=auto&tls=true", ("ucx", "tcp"), False),
    ],
)
def test_ucx_is_started_where_it_is_wanted(
    options: str, auto: tuple[str, ...], wanted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dial, "auto", lambda: auto)
    assert dial.uses_ucx(of_url(f"node://a:1?{options}")) is wanted


def test_a_certificate_that_cannot_be_read_is_an_error_at_open(tmp_path: Path) -> None:
    (tmp_path / "bad.pem").write_text("no certificate")
    for name in ("missing.pem", "bad.pem"):
        with pytest.raises(ConfigError, match="tls_ca"):
            dial.dialler(of_url("node://a:1?tls=true", tls_ca=str(tmp_path / name)))
