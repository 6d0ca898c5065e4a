"""LMCache's own s3 connector and our native client read the same objects from one SeaweedFS, in turn.

    python tests/bench/bench_s3_lmcache.py --lmcache-python PATH [--mib 4 32] [--total-mib 256] [--json FILE]

PATH is the interpreter of an environment with LMCache 0.5.6 (docs.lmcache.ai; without a GPU: `pip install --no-deps
lmcache==0.5.6`, torch, awscrt, and what its import then asks for). This script runs itself there with `--drive`.

LMCache stores a batch of chunks through its `RemoteBackend` (what `remote_url` means), with the connector's own
settings but for plain HTTP and the number of threads. Our backend reads these very objects: for the time of the run
its names of objects are looked up in a table. Both read the whole batch with one call, ours and theirs in turn; the
first pass of each warms up, and after every pass the bytes are compared, untimed. A figure is our median GB/s over
theirs. The server runs on the same cores and needs most of their time, which hides part of a difference; so
`s3.cpu_vs_lmcache.*` compares the CPU seconds of the two client processes per byte, and the server's are printed.

The connector knows virtual hosts only: its process gets a mount namespace with an /etc/hosts of its own (`unshare`).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

MIB, GIB = 1 << 20, 1 << 30
BUCKET, DOMAIN = "kv-bench", "s3.local"
BAR = 2.0
LAYERS = {4: 4, 8: 8, 16: 16, 32: 32}  # MiB of a chunk of 256 tokens → layers of 2 x 8 heads x 128, bf16
_WAIT_S = 120


class Pass(NamedTuple):
    """One read of the whole batch. CPU in seconds per GiB, of the client's process and of the server's."""

    gbytes_per_s: float
    cpu: float
    server_cpu: float


class Peer:
    """The process of LMCache: takes a line, answers with a line of JSON."""

    def __init__(self, python: str, folder: Path, port: int, keys: tuple[str, str], io_threads: int) -> None:
        hosts = folder / "hosts"
        hosts.write_text(Path("/etc/hosts").read_text() + f"127.0.0.1 {BUCKET}.{DOMAIN}\n")
        words = ["unshare", *(["-r"] if os.geteuid() else []), "-m", "--propagation", "private", "sh", "-c"]
        words += [f"mount --bind '{hosts}' /etc/hosts && exec \"$@\"", "sh", python, __file__, "--drive"]
        words += [f"s3://{BUCKET}.{DOMAIN}:{port}", "--io-threads", str(io_threads)]
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("LMCACHE_", "PYTHONPATH"))}
        environment = {
            **clean, "AWS_ACCESS_KEY_ID": keys[0], "AWS_SECRET_ACCESS_KEY": keys[1], "PYTHONHASHSEED": "0",
            "LMCACHE_TRACK_USAGE": "false", "DO_NOT_TRACK": "1", "LMCACHE_LOG_LEVEL": "ERROR", "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        self._log = folder / "lmcache.log"
        with open(self._log, "wb") as log:
            self._process = subprocess.Popen(
                words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=environment, text=True
            )
        self.version = str(self._answer()["version"])

    def ask(self, **request: Any) -> dict[str, Any]:
        if self._process.stdin is None:
            raise RuntimeError("the process has no stdin")
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        line = self._process.stdout.readline() if self._process.stdout else ""
        if not line:
            raise SystemExit(f"LMCache ended; the end of its log:\n{self._log.read_text(errors='replace')[-3000:]}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        self._process.kill()  # its own close() never returns
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()


def compare(server: Any, direct: Any, peer: Peer, mib: int, total_mib: int, repeats: int) -> tuple[Pass, Pass]:
    """Medians of ours and of theirs."""
    from kvstore.backend import Read
    from kvstore.keys import opaque_key
    from kvstore.registry import open_backend, parse_url
    from kvstore_bench.workload import Region, same_bytes

    count, nbytes = total_mib // mib, mib * MIB
    before = {name for name, _ in _objects(direct)}
    peer.ask(do="put", mib=mib, count=count)
    theirs = [name for name, size in _objects(direct) if name not in before and size == nbytes]
    if len(theirs) != count:
        raise SystemExit(f"LMCache stored {len(theirs)} objects of {nbytes} bytes, not {count}")
    source = Region(count * nbytes).slots(count, nbytes)
    memory = Region(count * nbytes)
    into = memory.slots(count, nbytes)
    names = {opaque_key(f"{mib}/{name}"): name for name in theirs}
    url = f"s3://{BUCKET}/kv?endpoint_url={server.endpoint}&region={server.region}&addressing=path"
    secrets = {"access_key_id": server.access_key, "secret_access_key": server.secret_key}
    with (
        mock.patch("kvstore_backends.s3.reads.record_name", lambda _, key: names[key]),
        contextlib.closing(open_backend(parse_url(url), **secrets)) as backend,
    ):
        for view, name in zip(source, theirs, strict=True):
            view[:] = direct.get_object(Bucket=BUCKET, Key=name)["Body"].read()
        reads = [Read(key, view) for key, view in zip(names, into, strict=True)]

        def ours() -> tuple[float, float]:
            memory.poison(count, nbytes)
            begin, cpu = time.perf_counter(), time.process_time()
            outcomes = backend.get_into(reads, deadline=time.monotonic() + _WAIT_S)
            seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu
            if any(outcome.nbytes != nbytes for outcome in outcomes) or not all(map(same_bytes, source, into)):
                raise SystemExit(f"our read failed: {outcomes}")
            return seconds, cpu

        def theirs_too() -> tuple[float, float]:
            answer = peer.ask(do="get")
            return answer["seconds"], answer["cpu"]

        sides: dict[str, Callable[[], tuple[float, float]]] = {"ours": ours, "theirs": theirs_too}
        passes: dict[str, list[Pass]] = {who: [] for who in sides}
        for repeat in range(repeats + 1):
            for who in ("ours", "theirs") if repeat % 2 else ("theirs", "ours"):
                serving = _cpu_of(server.pid)
                seconds, cpu = sides[who]()
                serving = _cpu_of(server.pid) - serving
                per_gib = GIB / (count * nbytes)
                if repeat:
                    passes[who].append(Pass(count * nbytes / 1e9 / seconds, cpu * per_gib, serving * per_gib))
    peer.ask(do="end")
    found = {who: Pass(*map(statistics.median, zip(*each, strict=True))) for who, each in passes.items()}
    for who, each in found.items():
        speeds = [one.gbytes_per_s for one in passes[who]]
        print(
            f"  {who:6} {each.gbytes_per_s:6.3f} GB/s ({min(speeds):.3f} to {max(speeds):.3f}), CPU s/GiB: client "
            f"{each.cpu:.3f}, server {each.server_cpu:.3f}",
            flush=True,
        )
    return found["ours"], found["theirs"]


def _cpu_of(pid: int) -> float:
    """CPU seconds of a process so far, user and system."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _objects(direct: Any) -> list[tuple[str, int]]:
    pages = direct.get_paginator("list_objects_v2").paginate(Bucket=BUCKET)
    return [(entry["Key"], entry["Size"]) for page in pages for entry in page.get("Contents", ())]


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    """In memory if there is room: the disk is not what is compared."""
    shm = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shm if os.access(shm, os.W_OK) else None, prefix="lmcache-") as name:
        yield Path(name)


def main() -> int:
    from tests.servers.seaweedfs import SeaweedFS

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lmcache-python", metavar="PATH", required=True)
    parser.add_argument("--mib", type=int, nargs="+", default=[4, 32], choices=sorted(LAYERS))
    parser.add_argument("--total-mib", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--io-threads", type=int, default=4, help="s3_num_io_threads of LMCache's connector")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    figures: dict[str, dict[str, Any]] = {}
    with _folder() as folder, SeaweedFS(folder / "weed", domain=DOMAIN) as server:
        secrets = server.access_key, server.secret_key
        with (
            contextlib.closing(server.client()) as direct,
            contextlib.closing(Peer(args.lmcache_python, folder, server.port, secrets, args.io_threads)) as peer,
        ):
            direct.create_bucket(Bucket=BUCKET)
            for mib in args.mib:
                print(f"GET of {args.total_mib} MiB in objects of {mib} MiB; LMCache {peer.version}", flush=True)
                ours, theirs = compare(server, direct, peer, mib, args.total_mib, args.repeats)
                faster, cheaper = ours.gbytes_per_s / theirs.gbytes_per_s, theirs.cpu / ours.cpu
                for name, value, bar in ("get", faster, BAR), ("cpu", cheaper, None):
                    row = {"value": round(value, 4), "unit": "ratio", "better": "higher", "bar": bar}
                    figures[f"s3.{name}_vs_lmcache.{mib}MiB"] = row
                    verdict = "" if bar is None else f"bar {bar:g}: {'met' if value >= bar else 'NOT MET'}"
                    print(f"  s3.{name}_vs_lmcache.{mib}MiB".ljust(38), f"{value:10.4g} ratio      {verdict}")
    if args.json:
        Path(args.json).write_text(json.dumps({"figures": figures}, indent=1) + "\n", encoding="utf-8")
    return 0


# In LMCache's environment. Nothing of ours is imported.


class _Drive:
    """LMCache 0.5.6 without an engine: RemoteBackend → InstrumentedRemoteConnector → S3Connector."""

    def __init__(self, url: str, io_threads: int) -> None:
        self._url = url
        self._extra = {
            "s3_region": "us-east-1", "s3_num_io_threads": io_threads, "s3_prefer_http2": False, "disable_tls": True,
            "save_chunk_meta": False, "aws_access_key_id": os.environ["AWS_ACCESS_KEY_ID"],
            "aws_secret_access_key": os.environ["AWS_SECRET_ACCESS_KEY"],
        }  # fmt: skip
        self._kept: list[Any] = []

    def put(self, mib: int, count: int) -> dict[str, Any]:
        import asyncio
        import importlib
        import threading

        import torch

        def part(module: str, name: str) -> Any:
            return getattr(importlib.import_module(f"lmcache.{module}"), name)

        config = part("v1.config", "LMCacheEngineConfig").from_defaults(
            chunk_size=256, local_cpu=False, max_local_cpu_size=1.5, remote_serde="naive", remote_url=self._url,
            extra_config=self._extra, save_unfull_chunk=False, blocking_timeout_secs=_WAIT_S,
        )  # fmt: skip
        metadata = part("v1.metadata", "LMCacheMetadata")(
            model_name="bench/model", world_size=1, local_world_size=1, worker_id=0, local_worker_id=0,
            kv_dtype=torch.bfloat16, kv_shape=(LAYERS[mib], 2, 256, 8, 128), chunk_size=256, role="worker",
        )  # fmt: skip
        loop = asyncio.new_event_loop()
        threading.Thread(target=loop.run_forever, daemon=True).start()
        pool = part("v1.storage_backend.local_cpu_backend", "LocalCPUBackend")(config, metadata, "cpu")
        backend = part("v1.storage_backend.remote_backend", "RemoteBackend")(config, metadata, loop, pool, "cpu")
        if backend.connection is None:
            raise RuntimeError("the connector did not start")
        random = torch.Generator().manual_seed(mib)
        key_of = part("utils", "CacheEngineKey")
        self._keys = [key_of("bench/model", 1, 0, (mib << 32) + number, torch.bfloat16) for number in range(count)]
        self._sources = []
        for _ in self._keys:
            chunk = pool.allocate(metadata.get_shapes(), metadata.get_dtypes())
            if chunk is None or chunk.get_size() != mib * MIB:
                raise RuntimeError(f"a chunk of {mib} MiB was not to be had: {chunk and chunk.get_size()}")
            chunk.tensor.view(torch.uint8).flatten().random_(0, 256, generator=random)
            self._sources.append(chunk)
        done = threading.Semaphore(0)
        backend.batched_submit_put_task(self._keys, self._sources, on_complete_callback=lambda *_: done.release())
        for _ in self._keys:
            if not done.acquire(timeout=_WAIT_S):
                raise RuntimeError("LMCache's put did not end")
        self._backend = backend
        self._kept.append(loop)
        return {"there": backend.batched_contains(self._keys)}

    def get(self) -> dict[str, Any]:
        import torch

        begin, cpu = time.perf_counter(), time.process_time()
        found = self._backend.batched_get_blocking(self._keys)
        seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu
        for source, chunk in zip(self._sources, found, strict=True):
            if chunk is None or not torch.equal(source.tensor.view(torch.uint8), chunk.tensor.view(torch.uint8)):
                raise RuntimeError("LMCache read other bytes, or none")
            chunk.ref_count_down()
        return {"seconds": seconds, "cpu": cpu}

    def end(self) -> dict[str, Any]:
        self._kept.append(self._backend)  # its close() never returns
        for chunk in self._sources:
            chunk.ref_count_down()
        return {}


def drive() -> None:
    from importlib.metadata import version

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever LMCache prints goes to the log
    work = _Drive(sys.argv[2], int(sys.argv[4]))
    answers.write(json.dumps({"version": version("lmcache")}) + "\n")
    answers.flush()
    for line in sys.stdin:
        request = json.loads(line)
        answers.write(json.dumps(getattr(work, request.pop("do"))(**request)) + "\n")
        answers.flush()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--drive"]:
        drive()
    else:
        sys.exit(main())
