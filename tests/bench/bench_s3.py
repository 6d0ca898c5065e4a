"""The figures of S3, each a ratio to its ceiling or its peer in the same run.

    python tests/bench/bench_s3.py [--quick] [--tls] [--only NAME,…] [--json FILE]

Everything runs on loopback: the null server of `tests/servers`, and the fault proxy in front of it (black hole). The
ceiling is `kvstore_bench.ceilings_http`, plain sockets and presigned URLs. Clients take turns, pass by pass, so that
whatever else the machine does meets all of them; medians are reported. CPU seconds per GiB are those of this process,
user and system, the server being another process.

LMCache's connector is compared by `bench_s3_lmcache.py`, which needs an environment with LMCache.

The storm is measured twice: as users run it, with a breaker that soon refuses most calls, and without it, where
only retries and pace hold requests back. A ratio is requests at the server over reads that were asked for.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from kvstore.backend import Read, Status, Write  # noqa: E402
from kvstore.keys import opaque_key  # noqa: E402
from kvstore.registry import BackendURL, open_backend, parse_url  # noqa: E402
from kvstore_bench.ceilings import Lanes  # noqa: E402
from kvstore_bench.ceilings_http import HttpGet, HttpPut  # noqa: E402
from kvstore_bench.measure import GetSide, PutSide, Side  # noqa: E402
from kvstore_bench.s3 import other_clients, place_of  # noqa: E402
from kvstore_bench.targets import BackendTarget, Target  # noqa: E402
from kvstore_bench.workload import Region, Workload  # noqa: E402
from tests.servers.fault_proxy import FaultProxy  # noqa: E402
from tests.servers.null_server import NullServer  # noqa: E402

MIB, GIB = 1 << 20, 1 << 30
LANES = 8
Figures = dict[str, dict[str, Any]]


class Timing(NamedTuple):
    """Medians of one client."""

    gbytes_per_s: float
    cpu_s_per_gib: float


def figure(
    figures: Figures, name: str, value: float, unit: str, better: str, bar: float | None, note: str = ""
) -> None:
    figures[name] = {"value": round(value, 4), "unit": unit, "better": better, "bar": bar}
    verdict = ""
    if bar is not None:
        good = value >= bar if better == "higher" else value <= bar
        verdict = f"bar {bar:g}: {'met' if good else 'NOT MET'}"
    print(f"  {name:36} {value:10.4g} {unit:10} {verdict} {note}", flush=True)


def url_of(endpoint: str, certificate: Path | None, **options: object) -> BackendURL:
    more = "".join(f"&{name}={value}" for name, value in options.items())
    trust = f"&ca_bundle={certificate}" if certificate else ""
    return parse_url(
        f"s3://bench/kv?endpoint_url={endpoint}&region=us-east-1&addressing=path&conditional_writes=on{trust}{more}"
    )


# Bytes.


def interleaved(pool: Lanes, sides: dict[str, Side], lanes: int, repeats: int) -> dict[str, Timing]:
    """Time the sides in turn. A side that moved nothing is left out."""
    speeds: dict[str, list[float]] = {name: [] for name in sides}
    cpu: dict[str, list[float]] = {name: [] for name in sides}
    for repeat in range(repeats + 1):
        order = list(sides.items())
        for name, side in order if repeat % 2 else reversed(order):
            one = pool.run(side.jobs(lanes))
            moved = side.settle(1)
            if repeat and moved:  # the first is for warming up
                speeds[name].append(moved / one.seconds / 1e9)
                cpu[name].append(one.cpu_s / moved * GIB)
    return {
        name: Timing(statistics.median(speeds[name]), statistics.median(cpu[name])) for name in sides if speeds[name]
    }


def move_bytes(figures: Figures, certificate: Path | None, repeats: int) -> None:
    """GET and PUT of 16 MiB × 8 lanes through each client, next to the raw sockets."""
    size, count = 16 * MIB, LANES
    tls = "_tls" if certificate else ""
    regions = Region(Workload.room(count, size)), Region(Workload.room(count, size))
    with NullServer(drop=True, certificate=certificate) as server, Lanes(LANES) as pool:
        url = url_of(server.endpoint, certificate)
        targets: dict[str, Target] = {"native": BackendTarget(url, lanes=LANES)}
        for name, target in other_clients(url, lanes=LANES):
            if target is None:
                print(f"  {name} is not installed and was left out")
            else:
                targets[name] = target
        try:
            for op in ("get", "put"):
                timings = _one_direction(pool, op, targets, url, regions, count, size, repeats)
                print(f"\n{op.upper()} 16 MiB x {LANES} lanes{' over TLS' if tls else ''}: GB/s, CPU s/GiB")
                for name, timing in timings.items():
                    print(f"  {name:12} {timing.gbytes_per_s:6.2f} {timing.cpu_s_per_gib:6.3f}")
                _bytes_figures(figures, op, tls, timings)
        finally:
            for target in targets.values():
                target.close()


def _one_direction(
    pool: Lanes, op: str, targets: dict[str, Target], url: BackendURL, regions: tuple[Region, Region], count: int,
    size: int, repeats: int,
) -> dict[str, Timing]:  # fmt: skip
    works = {
        name: Workload(*regions, count=count, nbytes=size, make_key=target.key, run_id=f"{name}{op}")
        for name, target in targets.items()
    }
    first = works["native"]
    place = place_of(url, f"bench-{op}")
    sides: dict[str, Side] = {
        "raw sockets": HttpGet(place, first.sources, first.destinations)
        if op == "get"
        else HttpPut(place, first.sources)
    }
    try:
        for name, target in targets.items():
            if op == "put":
                sides[name] = PutSide(target, works[name], timeout=60)
                continue
            reading = sides[name] = GetSide(target, works[name], timeout=60)
            if not reading.fill(pool, LANES):
                raise SystemExit(f"{name}: filling failed: {reading.failures.messages}")
        return interleaved(pool, sides, LANES, repeats)
    finally:
        for side in sides.values():
            side.close()


def _bytes_figures(figures: Figures, op: str, tls: str, timings: dict[str, Timing]) -> None:
    ours, raw = timings["native"], timings["raw sockets"]
    bar = 0.75 if not tls else None
    figure(figures, f"io.s3{tls}.{op}.16MiB.ratio", ours.gbytes_per_s / raw.gbytes_per_s, "ratio", "higher", bar)
    limit = None if tls else 0.50 if op == "get" else 0.40
    figure(figures, f"s3{tls}.{op}.cpu_s_per_gib", ours.cpu_s_per_gib, "s/GiB", "lower", limit,
           f"raw sockets {raw.cpu_s_per_gib:.2f}")  # fmt: skip
    for peer, bars in (("obstore", 1.3), ("awscrt", 1.8), ("boto3", None), ("aioboto3", None)):
        if peer in timings:
            fewer = timings[peer].cpu_s_per_gib / ours.cpu_s_per_gib
            bar = bars if op == "get" and not tls else None
            figure(figures, f"s3{tls}.{op}.cpu_vs_{peer}", fewer, "ratio", "higher", bar)


# Lookups.


def lookup(figures: Figures, repeats: int) -> None:
    """512 keys, 20 ms for each request, holes at random: seconds, and the prefix is exact."""
    import random

    import kvstore

    print("\nlookup of 512 keys, 20 ms per request")
    rng = random.Random(1)
    with NullServer() as server:
        url = url_of(server.endpoint, None, miss_memory="0s")
        with kvstore.open_store(str(url)) as store:
            times = []
            for turn in range(repeats):
                keys = [opaque_key(f"lookup {turn} {number}") for number in range(512)]
                holes = {rng.randrange(512) for _ in range(rng.randrange(6))}
                backend = open_backend(url)
                there = [key for number, key in enumerate(keys) if number not in holes]
                for outcome in backend.put([Write(key, [memoryview(b"x")]) for key in there], deadline=_soon(60)):
                    if outcome.status is not Status.OK:
                        raise SystemExit(f"filling failed: {outcome}")
                backend.close()
                server.set(latency_ms=20)
                start = time.perf_counter()
                found = store.submit_lookup(keys, deadline=_soon(5)).result()
                times.append(time.perf_counter() - start)
                server.set(latency_ms=0)
                if found != min(holes, default=512):
                    raise SystemExit(f"the hit prefix is {min(holes, default=512)}, but {found} was found")
    figure(figures, "s3.lookup_512.seconds", statistics.median(times), "s", "lower", 0.5, f"worst {max(times):.3f}")


def _soon(seconds: float) -> float:
    return time.monotonic() + seconds


# Layer groups.

LAYERS, GROUP = 32, 2
RATE, LATENCY = 200e6, 0.020
CHUNK = 32 * MIB


def layer_groups(figures: Figures, repeats: int) -> None:
    """64 chunks of 32 MiB over 200 MB/s and 20 ms, read by a plain layer-ordered reader: when the first group is there.

    A group is 2 of 32 layers of every chunk, read in one call; groups come one after the other. Once through the bare
    backend, and once through the whole store, which reads each record's header with each group and verifies all bytes.
    """
    chunks = 64 if repeats >= 3 else 16
    print(f"\nfirst layer group of {chunks} chunks x 32 MiB, 200 MB/s, 20 ms")
    region = Region(chunks * GROUP * CHUNK // LAYERS)
    slots = region.slots(chunks, GROUP * CHUNK // LAYERS)
    with NullServer(drop=True) as server:
        _in_order(figures, "s3.", server, chunks, *_bare_reader(server, slots))
    with NullServer(arena_mib=chunks * (CHUNK // MIB + 1)) as server:
        _in_order(figures, "s3.store_", server, chunks, *_store_reader(server, slots))


def _in_order(
    figures: Figures, name: str, server: NullServer, chunks: int, read: Callable[[int], None],
    close: Callable[[], None],
) -> None:  # fmt: skip
    """Time `read(group)` of all groups, one after the other."""
    try:
        server.set(latency_ms=LATENCY * 1e3, mb_per_s=RATE / 1e6)
        start = time.perf_counter()
        read(0)
        first = time.perf_counter() - start
        for index in range(1, LAYERS // GROUP):
            read(index)
        whole = time.perf_counter() - start
    finally:
        server.set(latency_ms=0, mb_per_s=0)
        close()
    ideal_first = LATENCY + chunks * GROUP * CHUNK / LAYERS / RATE
    ideal = chunks * CHUNK / RATE
    figure(figures, f"{name}first_group.ratio", first / ideal_first, "ratio", "lower", 2.5, f"{first:.3f} s")
    bar = 1.10 if chunks == 64 else None  # fewer chunks, and the latency of each group weighs more
    figure(figures, f"{name}all_groups.ratio", whole / ideal, "ratio", "lower", bar, f"{whole:.2f} s")


def _bare_reader(server: NullServer, slots: list[memoryview]) -> tuple[Callable[[int], None], Callable[[], None]]:
    backend = open_backend(url_of(server.endpoint, None, lanes=16))
    keys = [opaque_key(f"chunk {number}") for number in range(len(slots))]
    body = bytes(CHUNK)
    for key in keys:
        backend.put([Write(key, [memoryview(body)])], deadline=_soon(60))

    def read(group: int) -> None:
        offset = group * GROUP * CHUNK // LAYERS
        reads = [Read(key, slot, offset) for key, slot in zip(keys, slots, strict=True)]
        for outcome, slot in zip(backend.get_into(reads, deadline=_soon(120)), slots, strict=True):
            if outcome.nbytes != len(slot):
                raise SystemExit(f"a layer group did not come: {outcome}")

    return read, backend.close


def _store_reader(server: NullServer, slots: list[memoryview]) -> tuple[Callable[[int], None], Callable[[], None]]:
    import kvstore
    from kvstore import Item, KVLayout, Want, chunk_keys, kv_spec

    store = kvstore.open_store(str(url_of(server.endpoint, None, lanes=16)), write_queue_bytes=4 * GIB)
    layout = KVLayout(num_layers=LAYERS, num_kv_heads=8, head_dim=128)
    context = store.key_context(model="bench", layout=layout, dtype="bfloat16")
    keys = chunk_keys(range(256 * len(slots)), context=context)
    spec = kv_spec(layout, "bfloat16", tokens=256)
    body = memoryview(bytes(range(251)) * (CHUNK // 251 + 1))[:CHUNK]
    items = [Item(key, spec.split(body), spec) for key in keys]
    for outcome in store.submit_put(items, deadline=_soon(120)).result():
        if not outcome.stored:
            raise SystemExit(f"filling failed: {outcome}")

    def read(group: int) -> None:
        wants = [
            Want(key, slot, spec, first=group * GROUP, num_segments=GROUP)
            for key, slot in zip(keys, slots, strict=True)
        ]
        for outcome in store.submit_get(wants, deadline=_soon(120)).result():
            if not outcome.ok:
                raise SystemExit(f"a layer group did not come: {outcome}")

    return read, store.close


# Trouble.


def storm(figures: Figures, seconds: float, breaker: int | None) -> None:
    """200 threads read through the whole store while 90 % of all requests get 503 SlowDown."""
    import kvstore

    print(f"\n90 % of requests get 503 for {seconds:g} s, 200 threads{'' if breaker is None else ', no breaker'}")
    more = {} if breaker is None else {"breaker_failures": breaker}
    with NullServer() as server, kvstore.open_store(str(url_of(server.endpoint, None, **more))) as store:
        names = [f"storm {number}" for number in range(1024)]
        store.put_many(dict.fromkeys(names, bytes(4096)))
        late, answered, hits = [0.0], [0], [0]
        stop, lock = threading.Event(), threading.Lock()

        def work(number: int) -> None:
            turn, into = number, bytearray(4096)
            while not stop.is_set():
                start = time.perf_counter()
                found = store.get_many([names[turn % len(names)]], into=[into], timeout=1.0)[0] is not None
                took = time.perf_counter() - start
                with lock:
                    answered[0] += 1
                    hits[0] += found
                    late[0] = max(late[0], took - 1.0)
                turn += 7

        threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(200)]
        before = server.stats()["requests"]
        server.set(slowdown_percent=90)
        for thread in threads:
            thread.start()
        time.sleep(seconds)
        stop.set()
        for thread in threads:
            thread.join(20)
        hung = sum(thread.is_alive() for thread in threads)
        requests = server.stats()["requests"] - before
        server.set(slowdown_percent=0)
        start = time.perf_counter()
        while store.get_many(names[:1], into=[bytearray(4096)], timeout=1.0)[0] is None:
            if time.perf_counter() - start > 30:
                break
            time.sleep(0.01)
        recovery = time.perf_counter() - start
    note = f"{requests} requests, {answered[0]} reads, {hits[0]} hits"
    name = "s3.storm" if breaker is None else "s3.storm_no_breaker"
    figure(figures, f"{name}.requests_ratio", requests / max(1, answered[0]), "ratio", "lower", 3.0, note)
    figure(figures, f"{name}.hung_threads", hung, "threads", "lower", 0)
    figure(figures, f"{name}.late_ms", max(0.0, late[0]) * 1e3, "ms", "lower", None, "after the deadline, at worst")
    figure(figures, f"{name}.recovery_s", recovery, "s", "lower", 5.0)


def storms(figures: Figures, seconds: float) -> None:
    for breaker in (None, 0):
        storm(figures, seconds, breaker)


def black_hole(figures: Figures) -> None:
    """The endpoint vanishes without a word: calls end at their deadline, then at once, and the store comes back."""
    import kvstore

    print("\nblack-holed endpoint")
    with NullServer() as server, FaultProxy(server.port) as proxy:
        url = str(url_of(proxy.endpoint, None))
        with contextlib.closing(kvstore.open_store(url)) as store:
            store.put_many({"here": bytes(1000)})
            proxy.black_hole()
            late, refused = [0.0], []
            for _ in range(60):
                start = time.perf_counter()
                store.get_many(["here"], into=[bytearray(1000)], timeout=0.25)
                took = time.perf_counter() - start
                late.append(took - 0.25)
                if took < 0.2:
                    refused.append(took)
            proxy.recover()
            start = time.perf_counter()
            while store.get_many(["here"], into=[bytearray(1000)], timeout=1.0)[0] is None:
                if time.perf_counter() - start > 30:
                    break
                time.sleep(0.01)
            recovery = time.perf_counter() - start
    figure(figures, "s3.blackhole.late_ms", max(late) * 1e3, "ms", "lower", 100)
    figure(figures, "s3.blackhole.breaker_ms", statistics.median(refused or [1.0]) * 1e3, "ms", "lower", 5,
           f"worst {max(refused or [1.0]) * 1e3:.2f}, {len(refused)} of 60 calls")  # fmt: skip
    figure(figures, "s3.blackhole.recovery_s", recovery, "s", "lower", 5.0)


@contextmanager
def _certificate(wanted: bool) -> Iterator[Path | None]:
    import tempfile

    if not wanted:
        yield None
        return
    from tests.servers.certificate import make_certificate

    with tempfile.TemporaryDirectory() as folder:
        yield make_certificate(Path(folder) / "server.pem")


def main() -> int:
    import os

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer repeats and a shorter storm")
    parser.add_argument("--tls", action="store_true", help="bytes also over TLS")
    parser.add_argument("--only", default="", help="bytes, lookup, layers, storm, blackhole; default all")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    os.environ.update(AWS_ACCESS_KEY_ID="bench", AWS_SECRET_ACCESS_KEY="bench", AWS_EC2_METADATA_DISABLED="true")
    only = set(filter(None, args.only.split(",")))
    repeats = 5 if args.quick else 15
    figures: Figures = {}
    parts: dict[str, Callable[[], None]] = {
        "bytes": lambda: _bytes(figures, args.tls, repeats),
        "lookup": lambda: lookup(figures, 3 if args.quick else 7),
        "layers": lambda: layer_groups(figures, 1 if args.quick else 3),
        "storm": lambda: storms(figures, 3.0 if args.quick else 10.0),
        "blackhole": lambda: black_hole(figures),
    }
    for name, part in parts.items():
        if not only or name in only:
            part()
    if args.json:
        Path(args.json).write_text(json.dumps({"figures": figures}, indent=1) + "\n", encoding="utf-8")
    return 0


def _bytes(figures: Figures, tls: bool, repeats: int) -> None:
    for wanted in (False, True) if tls else (False,):
        with _certificate(wanted) as certificate:
            move_bytes(figures, certificate, repeats)


if __name__ == "__main__":
    sys.exit(main())
