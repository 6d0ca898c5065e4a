"""Which client: ours against plain sockets, redis-py, valkey-py and valkey-glide, on a real server of this machine.

    python tests/bench/bench_valkey.py [--quick] [--tls] [--only NAME,…] [--json FILE]

Clients take turns, pass by pass, so that whatever else the machine does meets all of them; medians are reported. CPU
seconds per GiB are those of this process, user and system, the server being another one; its own are printed behind.
Whatever a client gives, the bytes end in the caller's memory: a library that makes an object pays for the copy out of
it. Libraries that are not installed are left out: `pip install redis hiredis valkey libvalkey valkey-glide-sync`.

Also: many small records in one call, lookups, and how long a call takes whose server answers a byte now and then.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from kvstore.backend import Backend, Read, Status, Write  # noqa: E402
from kvstore.keys import Key, opaque_key  # noqa: E402
from kvstore.registry import open_backend  # noqa: E402
from tests.servers.certificate import make_certificate  # noqa: E402
from tests.servers.valkey import Server  # noqa: E402

MIB, GIB = 1 << 20, 1 << 30
Figures = dict[str, dict[str, Any]]
Put = Callable[[Sequence[tuple[Key, memoryview]]], None]
Get = Callable[[Sequence[tuple[Key, memoryview]]], None]


class Client:
    """One way to move values: `get` fills the views, `put` overwrites nothing (or does: the libraries' plain SET)."""

    def __init__(self, get: Get, put: Put, close: Callable[[], None]) -> None:
        self.get, self.put, self.close = get, put, close


def name_of(key: Key) -> bytes:
    return b"bench/" + key.hex().encode()


# The clients.


def ours(server: Server, tls: dict[str, Any]) -> Client:
    scheme = "valkeys" if tls else "valkey"
    backend = open_backend(f"{scheme}://{server.address}/bench?max_value_bytes=512MiB", **tls)

    def get(items: Sequence[tuple[Key, memoryview]]) -> None:
        outcomes = backend.get_into([Read(key, view) for key, view in items], deadline=time.monotonic() + 60)
        check(all(o.status is Status.OK and o.nbytes == len(v) for o, (_, v) in zip(outcomes, items, strict=True)))

    def put(items: Sequence[tuple[Key, memoryview]]) -> None:
        outcomes = backend.put([Write(key, [view]) for key, view in items], deadline=time.monotonic() + 60)
        check(all(o.status is Status.OK for o in outcomes))

    return Client(get, put, backend.close)


def sockets(server: Server, tls: dict[str, Any]) -> Client:
    """The ceiling: blocking sockets, whole values, one after the other; nothing of kvstore's."""
    sock: socket.socket = socket.create_connection(("127.0.0.1", server.port))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if tls:
        import ssl

        sock = ssl.create_default_context(cafile=tls["tls_ca"]).wrap_socket(sock, server_hostname="127.0.0.1")
    flags = 0 if tls else socket.MSG_WAITALL

    def fill(view: memoryview) -> None:
        while view:
            view = view[sock.recv_into(view, 0, flags) :]

    def get(items: Sequence[tuple[Key, memoryview]]) -> None:
        sock.sendall(b"".join(b"*2\r\n$3\r\nGET\r\n$70\r\n%s\r\n" % name_of(key) for key, _ in items))
        for _, view in items:
            head = memoryview(bytearray(len(b"$%d\r\n" % len(view))))
            fill(head)
            fill(view)
            fill(head[:2])

    def put(items: Sequence[tuple[Key, memoryview]]) -> None:
        for key, view in items:
            sock.sendall(b"*3\r\n$3\r\nSET\r\n$70\r\n%s\r\n$%d\r\n" % (name_of(key), len(view)))
            sock.sendall(view)
            sock.sendall(b"\r\n")
        fill(memoryview(bytearray(5 * len(items))))

    return Client(get, put, sock.close)


def _like_redis(client: Any) -> Client:
    def get(items: Sequence[tuple[Key, memoryview]]) -> None:
        if len(items) == 1:
            found = [client.get(name_of(items[0][0]))]
        else:
            found = client.mget([name_of(key) for key, _ in items])
        for (_, view), value in zip(items, found, strict=True):
            view[:] = value

    def put(items: Sequence[tuple[Key, memoryview]]) -> None:
        if len(items) == 1:
            client.set(name_of(items[0][0]), items[0][1])
            return
        pipeline = client.pipeline(transaction=False)
        for key, view in items:
            pipeline.set(name_of(key), view)
        pipeline.execute()

    return Client(get, put, client.close)


def redis_py(server: Server, tls: dict[str, Any]) -> Client:
    import redis

    return _like_redis(redis.Redis(port=server.port, **_tls_of_redis(tls)))


def redis_py_pure(server: Server, tls: dict[str, Any]) -> Client:
    import redis
    from redis._parsers import _RESP2Parser

    kind = redis.SSLConnection if tls else redis.Connection
    pool = redis.ConnectionPool(
        kind, port=server.port, parser_class=_RESP2Parser, protocol=2,
        **{name: value for name, value in _tls_of_redis(tls).items() if name != "ssl"},
    )  # fmt: skip
    return _like_redis(redis.Redis(connection_pool=pool))


def valkey_py(server: Server, tls: dict[str, Any]) -> Client:
    import valkey

    return _like_redis(valkey.Valkey(port=server.port, **_tls_of_redis(tls)))


def _tls_of_redis(tls: dict[str, Any]) -> dict[str, Any]:
    return {"ssl": True, "ssl_ca_certs": tls["tls_ca"]} if tls else {}


def glide(server: Server, tls: dict[str, Any]) -> Client:
    """Its sync client; GET copies into a buffer of ours."""
    import glide_sync as gl

    if tls:
        raise ImportError("its TLS does not take a certificate that is its own authority, as that of our tests is")
    fields = {
        "request_timeout": 60_000, "advanced_config": gl.AdvancedGlideClientConfiguration(connection_timeout=20_000)
    }  # fmt: skip
    client = gl.GlideClient.create(gl.GlideClientConfiguration([gl.NodeAddress("127.0.0.1", server.port)], **fields))

    def get(items: Sequence[tuple[Key, memoryview]]) -> None:
        if len(items) == 1:
            client.get(name_of(items[0][0]), buffer=items[0][1])
        else:
            client.mget([name_of(key) for key, _ in items], buffers=[view for _, view in items])

    def put(items: Sequence[tuple[Key, memoryview]]) -> None:
        if len(items) == 1:
            client.set(name_of(items[0][0]), items[0][1])
            return
        batch = gl.Batch(is_atomic=False)
        for key, view in items:
            batch.set(name_of(key), bytes(view))
        client.exec(batch, raise_on_error=True)

    return Client(get, put, client.close)


CLIENTS: dict[str, Callable[[Server, dict[str, Any]], Client]] = {
    "ours": ours, "sockets": sockets, "redis-py": redis_py, "redis-py-pure": redis_py_pure, "valkey-py": valkey_py,
    "glide": glide,
}  # fmt: skip


# Measuring.


def check(good: bool) -> None:
    if not good:
        raise SystemExit("a transfer failed")


def cpu_of(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(
    server: Server, clients: dict[str, Client], size: int, batch: int, repeats: int, turns: int, figures: Figures,
    tag: str,
) -> None:  # fmt: skip
    """get and put of `batch` records of `size` bytes by each client, in turn."""
    data = memoryview(os.urandom(size))
    arena = memoryview(bytearray(size * batch))
    views = [arena[at : at + size] for at in range(0, size * batch, size)]
    there = [opaque_key(f"there {number}") for number in range(batch)]
    plain = server.client()
    for key in there:
        plain.set(name_of(key), data)
    for op in ("get", "put"):
        rows: dict[str, list[tuple[float, float, float]]] = {name: [] for name in clients}
        for repeat in range(repeats + 1):
            order = list(clients) if repeat % 2 else list(reversed(clients))
            for name in order:
                client = clients[name]
                keys = [[opaque_key(f"{name} {repeat} {turn} {n}") for n in range(batch)] for turn in range(turns)]
                wall, cpu, theirs = time.perf_counter(), time.process_time(), cpu_of(server.pid)
                for turn in range(turns):
                    if op == "get":
                        client.get(list(zip(there, views, strict=True)))
                    else:
                        client.put([(key, data) for key in keys[turn]])
                wall, cpu, theirs = time.perf_counter() - wall, time.process_time() - cpu, cpu_of(server.pid) - theirs
                if op == "put":
                    plain.unlink(*(name_of(key) for some in keys for key in some))
                else:
                    check(all(view[:64] == data[:64] and view[-64:] == data[-64:] for view in views))
                moved = size * batch * turns
                if repeat:
                    rows[name].append((moved / wall / 1e9, cpu / moved * GIB, theirs / moved * GIB))
        shown = f"{size >> 20} MiB" if size >= MIB else f"{size >> 10} KiB"
        print(f"\n{op.upper()} {shown} x {batch}{tag}: GB/s, CPU s/GiB, the server's CPU s/GiB")
        for name, measured in rows.items():
            speed, cost, theirs = (statistics.median(column) for column in zip(*measured, strict=True))
            print(f"  {name:14} {speed:6.2f} {cost:7.3f} {theirs:7.3f}", flush=True)
            label = f"valkey.{op}{tag.replace(' ', '_')}.{shown.replace(' ', '')}x{batch}.{name}"
            figures[f"{label}.gbytes_per_s"] = {
                "value": round(speed, 3),
                "unit": "GB/s",
                "better": "higher",
                "bar": None,
            }
            figures[f"{label}.cpu"] = {"value": round(cost, 4), "unit": "s/GiB", "better": "lower", "bar": None}
    plain.unlink(*map(name_of, there))
    plain.close()


def lookups(backend: Backend, figures: Figures, repeats: int) -> None:
    """stat of 512 keys, half of them there; and one small get."""
    keys = [opaque_key(f"lookup {number}") for number in range(512)]
    small = memoryview(os.urandom(1024))
    backend.put([Write(key, [small]) for key in keys[::2]], deadline=time.monotonic() + 10)
    dst = memoryview(bytearray(1024))
    times: dict[str, list[float]] = {"stat of 512": [], "get of 1 KiB": []}
    for _ in range(repeats * 20):
        start = time.perf_counter()
        backend.stat(keys, deadline=time.monotonic() + 10)
        between = time.perf_counter()
        backend.get_into([Read(keys[0], dst)], deadline=time.monotonic() + 10)
        times["stat of 512"].append(between - start)
        times["get of 1 KiB"].append(time.perf_counter() - between)
    backend.delete(keys, deadline=time.monotonic() + 10)
    print()
    for what, took in times.items():
        value = statistics.median(took) * 1e6
        print(f"  {what:14} {value:8.0f} µs p50")
        figures[f"valkey.{what.replace(' ', '_')}.us"] = {
            "value": round(value, 1),
            "unit": "µs",
            "better": "lower",
            "bar": None,
        }


@contextmanager
def dribbling() -> Iterator[int]:
    """A port where a server answers one byte every 50 ms."""
    listener = socket.create_server(("127.0.0.1", 0))
    stopped = threading.Event()

    def serve() -> None:
        while not stopped.is_set():
            try:
                sock = listener.accept()[0]
            except OSError:
                return
            with sock:
                sock.recv(65536)
                try:
                    sock.sendall(b"$")
                    while not stopped.wait(0.05):
                        sock.sendall(b"1")
                except OSError:
                    continue

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        stopped.set()
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(5)


def patience(figures: Figures) -> None:
    """How long a get takes that may take 0.3 s, of a server that sends a byte now and then. Given up after 3 s."""
    print("\na get that may take 0.3 s, of a server that sends a byte every 50 ms")
    with dribbling() as port:
        took = _timed(lambda: _ours_once(port))
        print(f"  ours           {took:6.2f} s")
        figures["valkey.dribble.ours"] = {"value": round(took, 2), "unit": "s", "better": "lower", "bar": 0.5}
        try:
            import redis
        except ImportError:
            return
        done = threading.Event()

        def theirs() -> None:
            client = redis.Redis(port=port, socket_timeout=0.3, socket_connect_timeout=0.3)
            try:
                client.get("k")
            except redis.RedisError:
                pass
            done.set()

        start = time.perf_counter()
        threading.Thread(target=theirs, daemon=True).start()
        done.wait(3)
        took = time.perf_counter() - start
        print(f"  redis-py       {took:6.2f} s{'' if done.is_set() else ' and still waiting'}")
        figures["valkey.dribble.redis-py"] = {"value": round(took, 2), "unit": "s", "better": "lower", "bar": None}


def _ours_once(port: int) -> None:
    backend = open_backend(f"valkey://127.0.0.1:{port}/kv?connect_timeout=150ms")
    try:
        backend.get_into([Read(opaque_key("k"), memoryview(bytearray(8)))], deadline=time.monotonic() + 0.3)
    finally:
        backend.close()


def _timed(do: Callable[[], None]) -> float:
    start = time.perf_counter()
    do()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer repeats")
    parser.add_argument("--tls", action="store_true", help="over TLS, too")
    parser.add_argument("--only", default="", help=f"clients, of {', '.join(CLIENTS)}")
    parser.add_argument("--json", type=Path, help="write the figures there")
    given = parser.parse_args()
    wanted = given.only.split(",") if given.only else list(CLIENTS)
    repeats = 3 if given.quick else 9
    figures: Figures = {}
    with tempfile.TemporaryDirectory(prefix="bench-valkey-") as folder:
        certificate = make_certificate(Path(folder) / "server.pem")
        words = ("--maxmemory", "3gb", "--maxmemory-policy", "allkeys-lru")
        for tls in (False, True) if given.tls else (False,):
            options = {"tls_ca": str(certificate)} if tls else {}
            with Server(Path(folder) / f"tls{tls}", *words, certificate=certificate if tls else None) as server:
                clients: dict[str, Client] = {}
                for name in wanted:
                    try:
                        clients[name] = CLIENTS[name](server, options)
                    except ImportError as error:
                        print(f"{name} is left out: {error}")
                for size, batch, turns in ((16 * MIB, 1, 8), (16 * MIB, 4, 2), (MIB, 32, 4), (64 << 10, 256, 4)):
                    measure(server, clients, size, batch, repeats, turns, figures, " TLS" if tls else "")
                if not tls:
                    with closing(open_backend(f"valkey://{server.address}/bench")) as backend:
                        lookups(backend, figures, repeats)
                for client in clients.values():
                    client.close()
    patience(figures)
    if given.json is not None:
        given.json.parent.mkdir(parents=True, exist_ok=True)
        given.json.write_text(json.dumps({"figures": figures}, indent=1))


if __name__ == "__main__":
    main()
