"""What a controller's lookup costs, and its index, at a million known chunks.

    python tests/bench/bench_control.py [--chunks N] [--requests N] [--instances N] [--json FILE]

A controller runs in a process of its own; instances tell it by reports what they have (each chunk is in the memory of
one of them and on the disk of another). Then one client asks for 32 keys at a time, over one connection on loopback:
prompts of which some instance has the first 0 to 32 chunks. Once with nothing else to do, and once while an instance
reports 8,192 keys every half second. `handler` is the time from a request's headers to the end of its answer inside the
server, `handler_cpu` the CPU time of its thread in between (what others do on a busy machine is not in it), `loopback`
what the client waits. `bytes_per_chunk` is what the process has grown by (resident set) over the chunks. The ceiling of
`loopback` is the same server's /healthz, HTTP alone, asked in between.

Figures: `control.bytes_per_chunk` (bar 200), `control.lookup.handler_p99_ms` (bar 2), `.handler_cpu_p99_ms`,
`.loopback_p50_ms` (bar 5), the same as `control.lookup_reporting.…`, `control.healthz.loopback_p50_ms`.
"""

from __future__ import annotations

import argparse
import base64
import gc
import json
import random
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kvstore.control import Client, ControlSettings, Health, InstanceInfo
from kvstore.keys import Key
from kvstore.metrics import Metrics

BARS = {"bytes_per_chunk": 200.0, "handler_p99_ms": 2.0, "loopback_p50_ms": 5.0}
KEYS = 32
REPORT = 8192


class Times:
    """ASGI: keeps what each request for a lookup took, wall clock and CPU of the server's thread, in seconds."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self.wall: list[float] = []
        self.cpu: list[float] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        began, worked = time.perf_counter(), time.thread_time()
        await self._app(scope, receive, send)
        if scope["type"] == "http" and scope["path"] == "/v1/lookup":
            self.wall.append(time.perf_counter() - began)
            self.cpu.append(time.thread_time() - worked)


def serve() -> None:
    """The controller: prints its URL; then for every line it reads one with its memory and the times since the last."""
    from kvstore.control.app import build_controller_app
    from kvstore.control.controller import Controller
    from kvstore.control.server import HttpServer

    settings = ControlSettings()
    times = Times(build_controller_app(Controller(), settings=settings, metrics=Metrics()))
    with HttpServer(times, settings) as server:  # type: ignore[arg-type]
        gc.freeze()
        print(server.url, flush=True)
        for _ in sys.stdin:
            with open("/proc/self/statm", encoding="ascii") as file:
                resident = int(file.read().split()[1]) * 4096
            print(json.dumps({"resident": resident, "wall": times.wall, "cpu": times.cpu}), flush=True)
            times.wall, times.cpu = [], []


class Controlled:
    """The process of `serve`."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--serve"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        self.url = self._process.stdout.readline().strip()

    def ask(self) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        found: dict[str, Any] = json.loads(self._process.stdout.readline())
        return found

    def close(self) -> None:
        self._process.communicate()


class Reporting:
    """What instances say, without instances."""

    def __init__(self, client: Client, name: str) -> None:
        self._client = client
        info = InstanceInfo(name, "127.0.0.1:1", "", "", "0", ("",), ("memory", "disk"), 1.0)
        self._base = {"instance": asdict(info), "epoch": name, "health": asdict(Health(True, True, 0.0))}
        self._seq = 0
        snapshot = {"id": "s", "page": 0, "last": True, "at": 0, "pages": []}
        client.report({**self._base, "since": 0, "next": 0, "events": [], "snapshot": snapshot})

    def tell(self, tier: str, keys: bytes) -> None:
        event = {"namespace": "", "tier": tier, "op": "admit", "keys": base64.b64encode(keys).decode()}
        self._seq += 1
        reply = self._client.report({**self._base, "since": self._seq - 1, "next": self._seq, "events": [event]})
        assert not reply.snapshot


def ask(client: Client, prompts: list[list[Key]], url: str) -> tuple[list[float], list[float]]:
    """Milliseconds of each lookup, and of as many requests for /healthz in between."""
    lookups, probes = [], []
    hits = 0
    import http.client

    probe = http.client.HTTPConnection(url.removeprefix("http://"))
    for keys in prompts:
        began = time.perf_counter()
        found = client.lookup(keys=keys)
        lookups.append((time.perf_counter() - began) * 1e3)
        assert found.chunks == KEYS
        hits += bool(found.places)
        began = time.perf_counter()
        probe.request("GET", "/healthz")
        probe.getresponse().read()
        probes.append((time.perf_counter() - began) * 1e3)
    probe.close()
    assert hits > len(prompts) * 0.9  # of 33 lengths, one is none
    return lookups, probes


def quantile(values: list[float], part: float) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * part))]


def measure(chunks: int, requests: int, instances: int) -> list[dict[str, Any]]:
    source = random.Random(1)
    head = Controlled()
    client = Client(head.url, timeout=60)
    nodes = [Reporting(client, f"n{number}") for number in range(instances)]
    for number in range(8):  # what the first reports load and compile is not the index's
        nodes[number % instances].tell("memory", source.randbytes(32 * 64))
    urllib.request.urlopen(f"{head.url}/metrics").read()
    empty = head.ask()["resident"]
    batches = []
    told = 0
    while told < chunks:
        keys = source.randbytes(32 * min(REPORT, chunks - told))
        nodes[len(batches) % instances].tell("memory", keys)
        nodes[(len(batches) + 1) % instances].tell("disk", keys)
        batches.append(keys)
        told += len(keys) // 32
    full = head.ask()["resident"]
    rows: list[dict[str, Any]] = [
        {"name": "index", "chunks": chunks, "instances": instances, "bytes_per_chunk": (full - empty) / chunks}
    ]

    def prompt() -> list[Key]:
        batch = source.choice(batches)
        known = source.randrange(KEYS + 1)
        start = source.randrange(len(batch) // 32 - KEYS) * 32
        some = [Key(batch[at : at + 32]) for at in range(start, start + known * 32, 32)]
        return some + [Key(source.randbytes(32)) for _ in range(KEYS - known)]

    done = threading.Event()
    alive = threading.Thread(target=_stay, args=(nodes, done))
    alive.start()
    for name in ("lookup", "lookup_reporting"):
        prompts = [prompt() for _ in range(requests)]
        ask(client, prompts[:200], head.url)
        head.ask()
        stop = threading.Event()
        reporting = threading.Thread(target=_report, args=(head.url, stop))
        if name == "lookup_reporting":
            reporting.start()
        lookups, probes = ask(client, prompts, head.url)
        stop.set()
        if reporting.ident is not None:
            reporting.join()
        took = head.ask()
        handler, cpu = ([seconds * 1e3 for seconds in took[clock]] for clock in ("wall", "cpu"))
        assert len(handler) == requests
        rows.append({
            "name": name, "requests": requests, "keys": KEYS,
            "handler_p50_ms": statistics.median(handler), "handler_p99_ms": quantile(handler, 0.99),
            "handler_cpu_p50_ms": statistics.median(cpu), "handler_cpu_p99_ms": quantile(cpu, 0.99),
            "loopback_p50_ms": statistics.median(lookups), "loopback_p99_ms": quantile(lookups, 0.99),
            "healthz_p50_ms": statistics.median(probes),
        })  # fmt: skip
    done.set()
    alive.join()
    client.close()
    head.close()
    return rows


def _stay(nodes: list[Reporting], done: threading.Event) -> None:
    """Instances say that they are there."""
    while not done.wait(1.0):
        for node in nodes:
            node.tell("memory", b"")


def _report(url: str, stop: threading.Event) -> None:
    """An instance that stores much."""
    with Client(url, timeout=60) as client:
        node = Reporting(client, "busy")
        source = random.Random(2)
        while not stop.wait(0.5):
            node.tell("memory", source.randbytes(32 * REPORT))


def figures(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    found = {"control.bytes_per_chunk": (rows[0]["bytes_per_chunk"], "bytes", BARS["bytes_per_chunk"])}
    for row in rows[1:]:
        for name in ("handler_p99_ms", "handler_cpu_p99_ms", "loopback_p50_ms"):
            found[f"control.{row['name']}.{name}"] = (row[name], "ms", BARS.get(name))
    found["control.healthz.loopback_p50_ms"] = (rows[1]["healthz_p50_ms"], "ms", None)
    return {
        name: {"value": round(value, 3), "unit": unit, "better": "lower", "bar": bar}
        for name, (value, unit, bar) in found.items()
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write rows and figures")
    parser.add_argument("--chunks", type=int, default=1_000_000)
    parser.add_argument("--requests", type=int, default=3000)
    parser.add_argument("--instances", type=int, default=8)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        serve()
        return 0
    rows = measure(given.chunks, given.requests, given.instances)
    found = figures(rows)
    for name, figure in found.items():
        bar = f"   bar {figure['bar']:g}" if figure["bar"] else ""
        print(f"{name:>42} {figure['value']:9.3f} {figure['unit']}{bar}")
    if given.json:
        given.json.write_text(json.dumps({"rows": rows, "figures": found}, indent=1) + "\n")
    missed = [name for name, figure in found.items() if figure["bar"] and figure["value"] > figure["bar"]]
    if missed:
        print(f"not reached: {', '.join(missed)}", file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
