"""`kvstore-bench layers`: does loading hide behind computing? Layer by layer over a throttled link, real bytes, a real
model.

In one run, in turn, for each rate of the link:

* t: each layer loaded alone, and c: each layer computed alone with its KV there (the copy into the cache included);
* T: the `Prefetcher` loads while the layers are computed, with memory for two layers;
* S: everything loaded, then everything computed; and R: the whole prompt computed anew.

T is held against t₁ + Σ max(c_l, t_{l+1}) + c_L, with t and c measured before and after it in the same repeat. Every
cache that was loaded is compared, bit by bit, with the one that was computed.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvstore.errors import ConfigError
from kvstore.options import parse_duration, parse_size

from .layers_report import LayerRow, LayersReport
from .models import model_folder
from .outputs import prepare_outputs, write_outputs
from .progress import progress_bar
from .report import Figure

if TYPE_CHECKING:
    from kvstore.keys import Key
    from kvstore.prefetch import LayerPlan, Prefetcher
    from kvstore.record import RecordSpec
    from kvstore.store import Store

    from .layers_link import LinkBackend
    from .layers_model import LayeredModel
    from .progress import Progress

__all__ = ["add_arguments", "run", "run_layers"]

_SHARES = (0.5, 1.0, 2.0)  # t : c, if the rates are chosen here
_TIMEOUT_S = 120.0
_POOL_BYTES = 1 << 30


@dataclass
class _Times:
    """Seconds of one repeat."""

    load: list[float]
    compute: list[float]
    pipelined: float
    sequential: float

    @property
    def formula(self) -> float:
        from kvstore.prefetch import pipeline_seconds

        return pipeline_seconds(self.load, self.compute)


class _Bench:
    """A model, a store behind a link with the KV of its history in it, and the ways to use them."""

    def __init__(self, folder: Path, *, history: int, new: int, chunk: int, latency_s: float, lanes: int) -> None:
        _check_torch()
        from kvstore.config import Config
        from kvstore.integrations.transformers import KVCacheStore
        from kvstore.keys import chunk_keys
        from kvstore.prefetch import Prefetcher
        from kvstore.record import kv_spec
        from kvstore.store import Store

        from .layers_link import LinkBackend
        from .layers_model import LayeredModel

        self.link: LinkBackend = LinkBackend(latency_s=latency_s, lanes=lanes)
        config = Config(remote_url=("memory://link",), chunk_size=chunk, buffer_pool_bytes=_POOL_BYTES)  # type: ignore[arg-type]
        self.store: Store = Store(config, backends=[self.link])
        self._threads: Callable[[], None] = lambda: None
        try:
            self.model: LayeredModel = LayeredModel(folder, history=history, new=new)
            self._threads = self.model.one_thread()
            kv = KVCacheStore(self.store, self.model.model, revision="bench")
            self.truth = self.model.empty_cache()
            self.model.recompute(self.truth)
            saved = kv.save(self.model.ids[:, :history], _History(self.truth, history), timeout=_TIMEOUT_S)
            if saved.stored != history // chunk:
                raise ConfigError(f"only {saved.stored} of {history // chunk} chunks were stored: {saved.error}")
            self.keys: Sequence[Key] = chunk_keys(self.model.ids[0, :history], context=kv.context, chunk_size=chunk)
            self.spec: RecordSpec = kv_spec(kv.layout, "float32", chunk)
            self.layer_bytes = self.spec.sizes[0] * len(self.keys)
            self.prefetcher: Prefetcher = Prefetcher(
                self.store, budget_bytes=2 * self.layer_bytes, max_group_bytes=self.layer_bytes, first_group_bytes=1
            )
            self.whole = self.load_alone(timed=False)  # of all layers, for computing alone
        except BaseException:
            self.close()
            raise
        self.peak = 0
        self.wrong = 0

    def close(self) -> None:
        self._threads()
        self.store.close()

    def plan(self) -> LayerPlan:
        from kvstore.prefetch import LayerPlan

        return LayerPlan.of(self.keys, self.spec, deadline=time.monotonic() + _TIMEOUT_S)

    def _layer_into(self, layer: int, views: Sequence[memoryview]) -> None:
        """Load one layer of all chunks and wait."""
        from kvstore.targets import Want

        wants = [Want(key, view, self.spec, layer, 1) for key, view in zip(self.keys, views, strict=True)]
        outcomes = self.store.submit_get(wants, deadline=time.monotonic() + _TIMEOUT_S).result()
        for outcome in outcomes:
            if not outcome.ok:
                raise outcome.error or ConfigError("a record that was just stored is not there")

    def load_alone(self, *, timed: bool = True) -> Any:
        """t: one layer after the other, each waited for. Seconds per layer; or, not timed, the bytes."""
        size = self.spec.sizes[0]
        seconds, kept = [], []
        views = [memoryview(bytearray(size)) for _ in self.keys]
        for layer in range(len(self.spec.sizes)):
            if not timed:
                views = [memoryview(bytearray(size)) for _ in self.keys]
                kept.append(views)
            begin = time.perf_counter()
            self._layer_into(layer, views)
            seconds.append(time.perf_counter() - begin)
        return seconds if timed else kept

    def compute_alone(self) -> list[float]:
        """c: each layer with its KV at hand. Seconds per layer."""
        model, cache = self.model, self.model.empty_cache()
        hidden, seconds = model.begin(), []
        for layer in range(model.num_layers):
            begin = time.perf_counter()
            model.fill(cache, layer, self.whole[layer])
            hidden = model.step(cache, layer, hidden)
            seconds.append(time.perf_counter() - begin)
        self._check(cache, hidden)
        return seconds

    def pipelined(self) -> float:
        """T: loaded by the prefetcher while it computes."""
        model, cache = self.model, self.model.empty_cache()
        pool = self.store.pool
        begin = time.perf_counter()
        hidden = model.begin()
        with self.prefetcher.start(self.plan()) as stream:
            for layer in range(model.num_layers):
                with stream.wait(layer) as loaded:
                    model.fill(cache, layer, loaded.views())
                    self.peak = max(self.peak, pool.stats().in_use)
                hidden = model.step(cache, layer, hidden)
            seconds = time.perf_counter() - begin
            self.wrong += stream.hit_prefix != len(self.keys)
        self.peak = max(self.peak, self.prefetcher.stats()["peak_bytes"])
        self._check(cache, hidden)
        return seconds

    def sequential(self) -> float:
        """S: all layers of all chunks in one batch, then computed."""
        from kvstore.targets import Want

        model, cache = self.model, self.model.empty_cache()
        rooms = [memoryview(bytearray(self.spec.raw_bytes)) for _ in self.keys]
        begin = time.perf_counter()
        wants = [Want(key, room, self.spec) for key, room in zip(self.keys, rooms, strict=True)]
        outcomes = self.store.submit_get(wants, deadline=time.monotonic() + _TIMEOUT_S).result()
        self.wrong += sum(not outcome.ok for outcome in outcomes)
        hidden, size = model.begin(), self.spec.sizes[0]
        for layer in range(model.num_layers):
            model.fill(cache, layer, [room[layer * size : (layer + 1) * size] for room in rooms])
            hidden = model.step(cache, layer, hidden)
        seconds = time.perf_counter() - begin
        self._check(cache, hidden)
        return seconds

    def recompute(self) -> float:
        """R: history and new tokens, without a store."""
        cache = self.model.empty_cache()
        begin = time.perf_counter()
        self.model.recompute(cache)
        return time.perf_counter() - begin

    def _check(self, cache: Any, hidden: Any) -> None:
        """What was loaded is what was computed, bit by bit; and what came out is a number."""
        good = self.model.same_history(cache, self.truth) and bool(self.model.torch.isfinite(hidden).all())
        self.wrong += not good


class _History:
    """The first tokens of a cache, as `KVCacheStore.save` looks at one."""

    def __init__(self, cache: Any, tokens: int) -> None:
        self.layers = [_HistoryLayer(layer.keys[:, :, :tokens], layer.values[:, :, :tokens]) for layer in cache.layers]


@dataclass
class _HistoryLayer:
    keys: Any
    values: Any

    def get_seq_length(self) -> int:
        return int(self.keys.shape[2])


def run_layers(
    folder: Path,
    *,
    history: int = 1024,
    new: int = 128,
    chunk: int = 256,
    rates: Sequence[float] = (),
    latency_s: float = 1e-3,
    repeats: int = 7,
    lanes: int = 4,
    progress: Progress | None = None,
    command: str = "",
) -> LayersReport:
    """Measure.

    Args:
        folder: of the model.
        history: tokens whose KV is loaded; a multiple of `chunk`.
        new: tokens computed on top.
        rates: of the link, bytes per second; none: so that loading a layer takes half as long, as long, and twice as
            long as computing it.
        latency_s: seconds per request.
        repeats: of each measurement; medians are reported.

    Raises:
        ConfigError: sizes that make no sense, or a rate that the latency alone exceeds.
    """
    from kvstore import __version__

    from .layers_link import TokenBucket
    from .machine import machine_facts

    if chunk < 1 or history < chunk or history % chunk or new < 1 or repeats < 1:
        raise ConfigError(
            f"{history} tokens of history in chunks of {chunk}, {new} new ones, {repeats} repeats make no sense"
        )
    report = LayersReport("layers", version=__version__, command=command)
    report.started = datetime.now().astimezone().isoformat(timespec="seconds")
    report.machine = machine_facts()
    started = time.monotonic()
    bench = _Bench(folder, history=history, new=new, chunk=chunk, latency_s=latency_s, lanes=lanes)
    try:
        bench.compute_alone()  # the first time torch does things that it does once
        compute_s = statistics.median(statistics.median(bench.compute_alone()) for _ in range(3))
        chosen = list(rates) or [_rate_for(bench.layer_bytes, share * compute_s, latency_s) for share in _SHARES]
        report.machine |= {
            "model": folder.name, "history_tokens": history, "new_tokens": new, "layers": bench.model.num_layers,
            "layer_bytes": bench.layer_bytes, "latency_ms": latency_s * 1e3,
        }  # fmt: skip
        recomputed = [bench.recompute()]
        total = len(chosen) * repeats
        rows: list[tuple[float, list[_Times], int, int]] = []
        for number, rate in enumerate(chosen):
            bench.link.bucket = TokenBucket(rate)
            bench.wrong = bench.peak = 0
            measured = []
            alone = _alone(bench)
            for repeat in range(repeats):
                if progress is not None:
                    progress(f"{rate / 1e6:.0f} MB/s", number * repeats + repeat, total)
                times, alone = _one(bench, alone, turned=bool(repeat % 2))
                measured.append(times)
            rows.append((rate, measured, bench.peak, bench.wrong))
        recomputed.append(bench.recompute())
        recompute_s = statistics.mean(recomputed)
        for rate, measured, peak, wrong in rows:
            extra = peak / bench.layer_bytes
            report.layer_rows.append(_row(rate, latency_s, measured, recompute_s, extra, wrong))
        _add_figures(report)
    finally:
        bench.close()
    report.seconds = time.monotonic() - started
    return report


def _check_torch() -> None:
    """Raises `ConfigError` if there are no tensors to compute with."""
    import importlib.util

    missing = [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"{' and '.join(missing)} must be installed; install kvstore[transformers]")


def _rate_for(nbytes: int, seconds: float, latency_s: float) -> float:
    if seconds <= latency_s:
        raise ConfigError(
            f"a layer is computed in about {seconds * 1e3:.2f} ms, and one request waits {latency_s * 1e3:.2f} ms; "
            "give a lower --latency, more --new tokens, or a --rate"
        )
    return nbytes / (seconds - latency_s)


def _alone(bench: _Bench) -> tuple[list[float], list[float]]:
    """t and c of each layer."""
    return bench.load_alone(), bench.compute_alone()


def _one(
    bench: _Bench, before: tuple[list[float], list[float]], *, turned: bool
) -> tuple[_Times, tuple[list[float], list[float]]]:
    """One repeat, and t and c after it. What is compared lies next to each other, in turned order every other time,
    and what it is held against is measured before and after, so that drift of the machine meets both alike."""
    steps: list[tuple[str, Callable[[], float]]] = [("pipelined", bench.pipelined), ("sequential", bench.sequential)]
    found = {name: step() for name, step in (reversed(steps) if turned else steps)}
    after = _alone(bench)
    load, compute = (
        [statistics.mean(pair) for pair in zip(*both, strict=True)] for both in zip(before, after, strict=True)
    )
    return _Times(load, compute, **found), after


def _row(
    rate: float, latency_s: float, measured: Sequence[_Times], recompute_s: float, extra: float, wrong: int
) -> LayerRow:
    median = statistics.median
    return LayerRow(
        rate_bytes_per_s=rate,
        latency_s=latency_s,
        repeats=len(measured),
        load_s=[median(each) for each in zip(*(times.load for times in measured), strict=True)],
        compute_s=[median(each) for each in zip(*(times.compute for times in measured), strict=True)],
        pipelined_s=median(times.pipelined for times in measured),
        formula_s=median(times.formula for times in measured),
        sequential_s=median(times.sequential for times in measured),
        recompute_s=recompute_s,
        t_vs_formula=median(times.pipelined / times.formula for times in measured),
        t_vs_formula_each=[times.pipelined / times.formula for times in measured],
        t_vs_sequential=median(times.pipelined / times.sequential for times in measured),
        extra_layers=extra,
        verified=not wrong,
        failed=wrong,
    )


def _add_figures(report: LayersReport) -> None:
    """The figures of the worst row each."""
    rows = report.layer_rows
    formula = max(row.t_vs_formula for row in rows)
    sequential = max(row.t_vs_sequential for row in rows)
    recompute = max(row.pipelined_s / row.recompute_s for row in rows)
    extra = max(row.extra_layers for row in rows)
    report.figures |= {
        "layers.t_vs_formula": Figure(round(formula, 4), "ratio", "lower", 1.10),
        "layers.t_vs_sequential": Figure(round(sequential, 4), "ratio", "lower"),
        "layers.t_vs_recompute": Figure(round(recompute, 4), "ratio", "lower"),
        "layers.extra_memory_layers": Figure(round(extra, 4), "layers", "lower", 2.0),
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `kvstore-bench layers`."""
    parser.add_argument("--quick", action="store_true", help="a shorter prompt and fewer repeats; under a minute")
    parser.add_argument(
        "--rate", metavar="LIST", help="rates of the link per second, such as 50MiB,200MiB; default: chosen so that "
        "loading a layer takes 0.5, 1 and 2 times as long as computing it"
    )  # fmt: skip
    parser.add_argument("--latency", metavar="TIME", default="1ms", help="what each request waits (default 1ms)")
    parser.add_argument("--history", type=int, metavar="N", help="tokens that are loaded (default 1024)")
    parser.add_argument("--new", type=int, metavar="N", help="tokens that are computed (default 128)")
    parser.add_argument("--chunk", type=int, metavar="N", default=256, help="tokens per record (default 256)")
    parser.add_argument("--lanes", type=int, metavar="N", default=4, help="lanes of the link (default 4)")
    parser.add_argument("--repeats", type=int, metavar="N", help="of each measurement (default 7; quick: 3)")
    parser.add_argument(
        "--model", metavar="FOLDER", help="a model shaped like Llama; default: SmolLM2, made if missing"
    )
    parser.add_argument("--json", metavar="FILE", help="write rows and figures as JSON; - is standard output")
    parser.add_argument("--html", metavar="FILE", help="write one self-contained page; - is standard output")


def run(args: argparse.Namespace) -> int:
    """Do it. 0: every cache that was loaded is the one that was computed; 1: not so."""
    prepare_outputs(args)
    rates = [float(parse_size(part.strip(), name="--rate")) for part in (args.rate or "").split(",") if part.strip()]
    if args.rate is not None and (not rates or min(rates) <= 0):
        raise ConfigError(f"--rate {args.rate!r}: every rate must be at least 1 byte per second")
    latency_s = parse_duration(args.latency, name="--latency")
    if args.lanes < 1:
        raise ConfigError(f"--lanes {args.lanes}: there must be at least one")
    folder = model_folder(args.model)
    default_history, default_new, default_repeats = (512, 64, 3) if args.quick else (1024, 128, 7)
    with progress_bar() as progress:
        report = run_layers(
            folder,
            history=args.history or default_history,
            new=args.new or default_new,
            chunk=args.chunk,
            rates=rates,
            latency_s=latency_s,
            repeats=args.repeats or default_repeats,
            lanes=args.lanes,
            progress=progress,
            command=_command(args),
        )
    return write_outputs(report, args)


def _command(args: argparse.Namespace) -> str:
    words = ["kvstore-bench", "layers", *(["--quick"] if args.quick else [])]
    for name, default in (
        ("rate", None), ("latency", "1ms"), ("history", None), ("new", None), ("chunk", 256), ("lanes", 4),
        ("repeats", None), ("model", None),
    ):  # fmt: skip
        value = getattr(args, name)
        if value != default:
            words += [f"--{name}", str(value)]
    return " ".join(words)
