"""`NodeServer` over real sockets of loopback: what only the whole of node and transport can show."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest

from kvstore.backend import EXISTS, MISS, OK, Outcome, Read, Status, Write
from kvstore.buffers import BufferPool
from kvstore.errors import ClosedError, ConfigError
from kvstore_backends._node_space import Counts
from kvstore_backends.node.client import NodeClient
from kvstore_backends.node.protocol import Code, Op, pack_data, pack_get, pack_put, unpack_outcomes, unpack_ticket
from kvstore_backends.node.protocol import Status as Reply
from kvstore_backends.node_server import Namespace, NodeServer
from kvstore_transport import (
    Channel,
    ConnectionLost,
    Credentials,
    Limits,
    PeerRefused,
    TransportError,
    TransportUnavailable,
    connect,
)
from kvstore_transport.channel import SocketChannel
from kvstore_transport.frames import Header, Kind
from kvstore_transport.server import ServerStats
from tests.servers.certificate import make_certificate

from .node_server_support import KiB, MiB, key, keys, payload, soon

NO_TOKEN = Credentials()


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Callable[..., NodeServer]]:
    """Opens nodes on loopback, with a Unix socket, that are closed at the end; then nothing is held any more."""
    nodes: list[NodeServer] = []

    def make(**options: Any) -> NodeServer:
        options = {"memory_bytes": 32 * MiB, "unix_path": tmp_path / "socket", "transports": "tcp,shm", **options}
        nodes.append(NodeServer("127.0.0.1:0", **options))
        return nodes[-1]

    yield make
    for node in nodes:
        node.close()
        for space in node.spaces.values():
            assert space.gate.used == 0
            assert space.store.pool.stats().in_use == 0
            assert not space.store.pending


def dial(
    node: NodeServer, transport: str = "tcp", *, credentials: Credentials = NO_TOKEN, tls: ssl.SSLContext | None = None
) -> Channel:
    place = node.unix_path if transport == "shm" else node.address
    return connect(place, deadline=soon(), credentials=credentials, transport=transport, tls=tls)


def client_of(node: NodeServer, transport: str = "tcp", credentials: Credentials = NO_TOKEN) -> NodeClient:
    return NodeClient(lambda deadline: dial(node, transport, credentials=credentials), name="node", lanes=4)


def until(condition: Callable[[], object]) -> None:
    """Wait for something that another thread does; fails after a minute."""
    end = soon()
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def held(node: NodeServer) -> int:
    return sum(space.gate.used for space in node.spaces.values())


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_records_go_there_and_back(opened: Callable[..., NodeServer], transport: str) -> None:
    node = opened()
    client = client_of(node, transport)
    with BufferPool(16 * MiB, shared=True) as pool, pool.acquire(5 * MiB) as out, pool.acquire(5 * MiB) as back:
        for slab in pool.slabs:
            client.register(slab)
        out.view[:] = payload("data", 5 * MiB)
        names, sizes = keys(6), [0, 1, 5000, MiB, 100_000, 2 * MiB]
        ends = [sum(sizes[: i + 1]) for i in range(6)]
        places = [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]
        writes = [Write(name, [out.view[place]]) for name, place in zip(names, places, strict=True)]
        assert client.put(writes, deadline=soon()) == [Outcome(Status.OK, size) for size in sizes]
        assert client.put(writes, deadline=soon()) == [EXISTS] * 6
        reads = [Read(name, back.view[place]) for name, place in zip(names, places, strict=True)]
        assert client.get_into(reads, deadline=soon()) == [Outcome(Status.OK, size) for size in sizes]
        assert back.view[: ends[-1]] == out.view[: ends[-1]]
        listed = {info.key: info.nbytes for page in client.list(deadline=soon()) for info in page}
        assert listed == dict(zip(names, sizes, strict=True))
        assert client.delete([names[0], key("none")], deadline=soon()) == [OK, MISS]
        stats = node.stats()
        assert stats["requests"][transport] > 0
        assert stats["namespaces"][""]["puts"] == 6
        assert stats["namespaces"][""]["bytes_in"] == sum(sizes)
        client.close()


def test_a_client_on_this_host_reads_in_place(opened: Callable[..., NodeServer]) -> None:
    node = opened()
    client = client_of(node, "shm")
    (a,) = keys(1)
    data = payload("a", MiB)
    client.put([Write(a, [memoryview(data)])], deadline=soon())
    (lease,) = client.lease([a], deadline=soon())
    assert lease is not None
    assert lease.view == data
    assert held(node) == MiB
    client.delete([a], deadline=soon())
    for name in keys(64, "other"):  # nothing gets at its memory
        client.put([Write(name, [memoryview(payload(name, MiB))])], deadline=soon())
    assert lease.view == data
    lease.release()
    until(lambda: held(node) == 0)
    client.close()


# What breaks leaves nothing.


def broken_off(channel: Channel, op: Op, meta: bytes, nbytes: int, sent: int) -> None:
    """Announce a body of `nbytes`, send `sent` of them, and cut the connection."""
    assert isinstance(channel, SocketChannel)
    header = Header(Kind.REQUEST, op, number=77, body_nbytes=nbytes)
    channel._control.send_frame(header, meta, [memoryview(bytes(sent))], deadline=soon())
    channel.abort()
    channel.close()


@pytest.mark.parametrize("sent", [None, 0, 1, MiB // 2])
def test_the_connection_dies_after_the_question(opened: Callable[..., NodeServer], sent: int | None) -> None:
    node = opened()
    (a,) = keys(1)
    channel = dial(node)
    reply = channel.call(Op.PUT, pack_put([a], [MiB], [None]), deadline=soon())
    ticket, rest = unpack_ticket(reply.meta)
    assert unpack_outcomes(rest)[0] == [Code.WANTED]
    assert held(node) == MiB
    if sent is None:
        channel.close()
    else:
        broken_off(channel, Op.DATA, pack_data(ticket), MiB, sent)
    until(lambda: held(node) == 0)
    other = client_of(node)
    assert other.stat([a], deadline=soon()) == [MISS]
    assert other.put([Write(a, [memoryview(b"whole")])], deadline=soon()) == [Outcome(Status.OK, 5)]
    assert node.stats()["namespaces"][""]["abandoned"] == 1
    other.close()


def test_a_reader_who_stops_loses_his_connection_and_holds_up_nobody(opened: Callable[..., NodeServer]) -> None:
    node = opened(limits=Limits(stall_s=2.0), memory_bytes=64 * MiB)
    other = client_of(node)
    names = keys(8)
    data = {name: payload(name, MiB) for name in names}
    other.put([Write(name, [memoryview(data[name])]) for name in names], deadline=soon())
    channel = dial(node)
    assert isinstance(channel, SocketChannel)
    meta = pack_get(names, [0] * 8, [MiB] * 8)
    channel._control.send_frame(Header(Kind.REQUEST, Op.GET, number=1), meta, deadline=soon())  # and does not read
    until(lambda: held(node) == 8 * MiB)
    fresh = {name: payload(name, MiB) for name in keys(40, "fresh")}
    for name, each in fresh.items():
        write = Write(name, [memoryview(each)])
        until(lambda write=write: other.put([write], deadline=soon())[0].stored)  # type: ignore[misc]
    until(lambda: held(node) == 0)  # by the stall limit, and no other cause
    channel.close()
    other.close()


def test_a_handful_of_slow_readers_keep_small_records_from_nobody(opened: Callable[..., NodeServer]) -> None:
    """Each asks for all that he can get and reads nothing; meanwhile a client of small records is served as ever. In
    the end they have lost their connections, and what their answers held."""
    node = opened(limits=Limits(stall_s=2.0), memory_bytes=64 * MiB)
    other = client_of(node)
    names, small = keys(30), key("small")
    for name in names:
        assert other.put([Write(name, [memoryview(bytes(MiB))])], deadline=soon())[0].stored
    assert other.put([Write(small, [memoryview(b"small")])], deadline=soon())[0].stored
    readers = [dial(node) for _ in range(5)]
    meta = pack_get(names, [0] * 30, [MiB] * 30)
    for reader in readers:
        assert isinstance(reader, SocketChannel)
        reader._control.send_frame(Header(Kind.REQUEST, Op.GET, number=1), meta, deadline=soon())
    until(lambda: held(node) >= 24 * MiB)
    assert held(node) <= 28 * MiB
    dst = bytearray(5)
    for _ in range(20):
        assert other.get_into([Read(small, memoryview(dst))], deadline=soon())[0].ok
        assert dst == b"small"
    assert other.put([Write(key("another"), [memoryview(b"small")])], deadline=soon())[0].stored
    until(lambda: held(node) == 0)
    for reader in readers:
        reader.close()
    other.close()


def test_many_connections_at_a_time(opened: Callable[..., NodeServer]) -> None:
    node = opened()
    (a,) = keys(1)
    data = payload("a", 10_000)
    channels = [dial(node) for _ in range(60)]
    wrong: list[object] = []

    def work(channel: Channel) -> None:
        channel.call(Op.PUT, pack_put([a], [10_000], [None]), [memoryview(data)], deadline=soon())
        dst = bytearray(10_000)
        reply = channel.call(Op.GET, pack_get([a], [0], [10_000]), plan=lambda *_: [memoryview(dst)], deadline=soon())
        if reply.status or dst != data:
            wrong.append(reply)

    threads = [threading.Thread(target=work, args=(channel,)) for channel in channels]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong
    assert node.stats()["connections"] == 60
    for channel in channels:
        channel.close()
    assert node.stats()["namespaces"][""]["puts"] == 1


def test_it_counts_what_it_says_it_counts(opened: Callable[..., NodeServer], tmp_path: Path) -> None:
    node = opened(disk=f"file://{tmp_path}/kv")
    dial(node).close()
    stats = node.stats()
    space = stats.pop("namespaces")[""]
    assert stats.keys() == {*ServerStats._fields, "sessions", "listings"}
    said = " ".join((NodeServer.stats.__doc__ or "").split())
    own = space.keys() - {*Counts.__slots__}
    assert {*Counts.__slots__} < space.keys()
    assert [name for name in sorted(own) if f"`{name}`" not in said] == []
    assert not [name for name, value in space.items() if not isinstance(value, int)]


# Who may come in.


def test_tokens(opened: Callable[..., NodeServer]) -> None:
    node = opened(
        token=b"of the default one",
        namespaces=[Namespace("a", b"of a"), Namespace("b", b"of b")],
    )
    with dial(node, credentials=Credentials("a", b"of a")) as channel:
        facts = channel.call(Op.INFO, b"", plan=None, deadline=soon())
        assert facts.status == Reply.OK
    with dial(node, credentials=Credentials("", b"of the default one")):
        pass
    for credentials in (
        Credentials(), Credentials("", b"of a"), Credentials("a"), Credentials("a", b"of b"), Credentials("a", b"of A"),
        Credentials("c", b"of a"), Credentials("c"),
    ):  # fmt: skip
        with pytest.raises(PeerRefused):
            dial(node, credentials=credentials)
    until(lambda: node.stats()["refused"] == 4)  # three had no token to show, and gave up by themselves
    assert "of a" not in repr(node)


def test_namespaces_isolate_over_the_wire(opened: Callable[..., NodeServer]) -> None:
    node = opened(namespaces=[Namespace("a", b"of a", memory_bytes=MiB)], memory_bytes=3 * MiB)
    of_a, of_nobody = client_of(node, credentials=Credentials("a", b"of a")), client_of(node)
    (name,) = keys(1)
    of_a.put([Write(name, [memoryview(b"of a")])], deadline=soon())
    assert of_nobody.stat([name], deadline=soon()) == [MISS]
    assert of_nobody.delete([name], deadline=soon()) == [MISS]
    assert list(of_nobody.list(deadline=soon())) == []
    assert of_nobody.put([Write(name, [memoryview(b"other")])], deadline=soon())[0].ok
    for each in keys(30, "flood"):
        of_nobody.put([Write(each, [memoryview(bytes(200 * KiB))])], deadline=soon())
    dst = bytearray(4)
    assert of_a.get_into([Read(name, memoryview(dst))], deadline=soon())[0].ok
    assert dst == b"of a"
    assert of_a.info(deadline=soon())["stats"]["records"] == 1
    of_a.close()
    of_nobody.close()


def test_no_default_namespace(opened: Callable[..., NodeServer]) -> None:
    node = opened(namespaces=[Namespace("a", b"t")], default_namespace=False)
    assert list(node.namespaces) == ["a"]
    with pytest.raises(PeerRefused, match="namespace"):
        dial(node)


def test_tls(opened: Callable[..., NodeServer], tmp_path: Path) -> None:
    pem = str(make_certificate(tmp_path / "server.pem"))
    node = opened(tls_cert=pem, tls_key=pem, token=b"secret", unix_path="", transports="auto")
    assert node.secure
    trusting = ssl.create_default_context(cafile=pem)
    with dial(node, credentials=Credentials("", b"secret"), tls=trusting) as channel:
        data = payload("tls", 300_000)
        meta = pack_put(keys(1), [300_000], [None])
        assert channel.call(Op.PUT, meta, [memoryview(data)], deadline=soon()).status == Reply.OK
        dst = bytearray(300_000)
        channel.call(
            Op.GET, pack_get(keys(1), [0], [300_000]), plan=lambda *_: [memoryview(dst)], deadline=soon()
        )  # fmt: skip
        assert dst == data
    with pytest.raises(PeerRefused):
        dial(node, credentials=Credentials("", b"secret"))
    with pytest.raises(TransportError):
        dial(node, credentials=Credentials("", b"secret"), tls=ssl.create_default_context())


def test_tls_with_certificates_of_clients(opened: Callable[..., NodeServer], tmp_path: Path) -> None:
    pem = str(make_certificate(tmp_path / "server.pem"))
    node = opened(tls_cert=pem, tls_key=pem, tls_client_ca=pem, unix_path="", transports="tcp")
    without = ssl.create_default_context(cafile=pem)

    def ask() -> None:
        dial(node, tls=without).call(Op.INFO, b"", deadline=soon())  # with TLS 1.3 he hears of it when he reads

    with pytest.raises(TransportError):
        ask()
    known = ssl.create_default_context(cafile=pem)
    known.load_cert_chain(pem)
    with dial(node, tls=known) as channel:
        assert msgpack.unpackb(channel.call(Op.INFO, b"", deadline=soon()).meta)["version"]


# Opening and closing.


def test_an_open_node_listens_on_loopback_only(tmp_path: Path) -> None:
    for listen in ("0.0.0.0:0", ":0", "[::]:0"):
        with pytest.raises(ConfigError, match="no token, so whoever reaches"):
            NodeServer(listen, memory_bytes=MiB)
        with pytest.raises(ConfigError, match="namespace 'a' has no token"):
            NodeServer(listen, memory_bytes=MiB, token=b"t", namespaces=[Namespace("a")])
    with NodeServer("0.0.0.0:0", memory_bytes=MiB, insecure=True, transports="tcp") as node, dial(node):
        pass
    with NodeServer("0.0.0.0:0", memory_bytes=MiB, token=b"t", transports="tcp") as node:
        assert node.address.startswith("127.0.0.1:")
    with NodeServer("localhost:0", memory_bytes=MiB, transports="tcp") as node, dial(node):
        pass
    with NodeServer("", unix_path=tmp_path / "s", memory_bytes=MiB) as node:
        assert node.address == ""
        dial(node, "shm").close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"listen": ""}, "an address to listen on"),
        ({"listen": "nowhere"}, "host:port"),
        ({"listen": "/tmp/x"}, "as 'unix'"),
        ({"listen": "no-such-host.invalid:1"}, "no address of this host"),
        ({"share": 1.0}, "between 0 and 1"),
        ({"transports": "pigeon"}, "unknown transport 'pigeon'"),
        ({"transports": "shm"}, "--unix PATH"),
        ({"policy": "lfu"}, "lru, fifo, none"),
        ({"tls_cert": "x.pem"}, "both tls_cert and tls_key"),
        ({"tls_cert": "/none.pem", "tls_key": "/none.pem"}, "cannot be used"),
        ({"namespaces": [Namespace("a", b"t"), Namespace("a", b"t")]}, "given twice"),
        ({"namespaces": [Namespace("", b"t")]}, "given twice"),
        ({"default_namespace": False}, "without any namespace"),
        ({"memory_bytes": 1 << 60}, "cannot map"),
        ({"memory_bytes": 100, "namespaces": [Namespace("a", b"t", memory_bytes=90)]}, "too little"),
        ({"disk": "memory://"}, "a folder"),
    ],
)
def test_what_makes_no_sense_is_refused_and_leaves_nothing(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        NodeServer(**{"memory_bytes": MiB, **options})


def test_a_port_that_is_taken(opened: Callable[..., NodeServer], tmp_path: Path) -> None:
    node = opened()
    with pytest.raises(ConfigError, match="cannot listen"):
        NodeServer(node.address, memory_bytes=MiB, disk=f"file://{tmp_path}/kv")


def test_two_namespaces_cannot_have_one_folder(tmp_path: Path) -> None:
    namespaces = [
        Namespace("a", b"t", disk=f"file://{tmp_path}/kv"),
        Namespace("b", b"t", disk=f"file://{tmp_path}/kv"),
    ]
    with pytest.raises(ConfigError, match="has the folder of namespace 'a'"):
        NodeServer(memory_bytes=MiB, namespaces=namespaces)


def test_a_restart_on_the_same_port_finds_the_disk(opened: Callable[..., NodeServer], tmp_path: Path) -> None:
    disk = f"file://{tmp_path}/kv?bytes=10MiB"
    first = opened(disk=disk)
    client = client_of(first)
    records = {name: payload(name, 100_000) for name in keys(5)}
    client.put([Write(name, [memoryview(data)]) for name, data in records.items()], deadline=soon())
    client.close()
    first.close(drain_s=60)
    with NodeServer(first.address, memory_bytes=MiB, disk=disk, transports="tcp") as second:
        client = client_of(second)
        for name, data in records.items():
            dst = bytearray(100_000)
            assert client.get_into([Read(name, memoryview(dst))], deadline=soon())[0].ok
            assert dst == data
        assert client.info(deadline=soon())["durable"]
        client.close()


def test_close_lets_a_request_under_way_end_and_takes_no_more(opened: Callable[..., NodeServer]) -> None:
    node = opened()
    (a,) = keys(1)
    channel = dial(node)
    idle = dial(node)
    assert isinstance(channel, SocketChannel)
    header = Header(Kind.REQUEST, Op.PUT, number=1, body_nbytes=MiB)
    half = payload("a", MiB)
    channel._control.send_frame(header, pack_put([a], [MiB], [None]), [memoryview(half)[: MiB // 2]], deadline=soon())
    until(lambda: held(node) == MiB)
    closing = threading.Thread(target=node.close, args=(60.0,))
    closing.start()
    until(lambda: not idle.alive())  # who asks for nothing is cut off at once
    assert closing.is_alive()
    with pytest.raises((ConnectionLost, TransportUnavailable)):
        connect(node.address, deadline=soon(), transport="tcp")
    channel._control.send([memoryview(half)[MiB // 2 :]], deadline=soon())
    reply, meta = channel._control.receive_frame(limits=Limits(), deadline=soon())
    assert reply.code == Reply.OK
    assert unpack_outcomes(meta)[0] == [Code.OK]
    closing.join(60)
    assert not closing.is_alive()
    node.close()
    with pytest.raises(ClosedError):
        node.stats()
    assert "closed" in repr(node)
    channel.close()
    idle.close()


def test_close_does_not_wait_for_ever(opened: Callable[..., NodeServer]) -> None:
    node = opened()
    channel = dial(node)
    channel.call(Op.PUT, pack_put(keys(1), [MiB], [None]), deadline=soon())
    stopped = dial(node)
    assert isinstance(stopped, SocketChannel)
    header = Header(Kind.REQUEST, Op.PUT, number=1, body_nbytes=MiB)
    stopped._control.send_frame(header, pack_put(keys(1, "x"), [MiB], [None]), deadline=soon())
    until(lambda: held(node) == 2 * MiB)
    began = time.monotonic()
    node.close(0.2)
    assert time.monotonic() - began < 30
    channel.close()
    stopped.close()


def test_the_sweep_runs(opened: Callable[..., NodeServer]) -> None:
    node = opened(ttl=0.5)
    client = client_of(node)
    client.put([Write(keys(1)[0], [memoryview(b"x")])], deadline=soon())
    until(lambda: node.stats()["namespaces"][""]["in_use"] == 0)
    assert node.stats()["namespaces"][""]["expired"] == 1
    client.close()


def test_a_stranger_is_no_trouble(opened: Callable[..., NodeServer]) -> None:
    node = opened()
    host, _, port = node.address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=30) as sock:
        sock.sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(100))
        with contextlib.suppress(ConnectionResetError):  # what it sent was not read to its end
            assert sock.recv(1000)[:4] in (b"", b"KVT1")
    with dial(node) as channel:
        assert channel.call(Op.INFO, b"", deadline=soon()).status == Reply.OK
