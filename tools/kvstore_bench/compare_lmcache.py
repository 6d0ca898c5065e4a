"""`kvstore-bench compare lmcache`: LMCache's `fs` and `fs_native` adapters and ours, through LMCache's own benchmark.

All three are in one process of LMCache's (`peers/lmcache_child.py`): its MP mode's adapters, on folders side by side,
each with four threads, writing into the page cache and syncing nothing. A round stores fresh keys and loads them again,
on one side after the other, in an order that turns from round to round; a ratio is the median of those within a round.
What a load brings is compared byte for byte after each round, outside the timing. Our loads verify checksums, LMCache's
have none.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from kvstore.errors import ConfigError, PermanentError

from .io import GIB, MIB
from .json_child import JsonChild
from .measure import percentile
from .progress import Progress
from .report import Ceiling, Figure, Report, Row
from .workload import size_name

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["BARS", "SIDES", "SIZES", "LMCacheProcess", "default_python", "run_compare_lmcache"]

SIZES = (4 * MIB, 32 * MIB)
SIDES = ("kvstore", "fs_native", "fs")
OPS = {"store": "put", "load": "get"}
BARS = {
    f"compare.lmcache.{op}.{size}.vs_{peer}": bar
    for size in ("4MiB", "32MiB")
    for op, peer, bar in (("load", "fs_native", 0.9), ("store", "fs_native", 1.0), ("store", "fs", 1.5))
}

_TASKS = 2  # under way at once, as in LMCache's own example
_ROUND_BYTES = 128 * MIB
_START_S, _ANSWER_S, _STOP_S = 180.0, 300.0, 10.0
_TIMEOUT_S = 120.0  # what a round took that LMCache's benchmark gave up on


def default_python() -> str:
    """The interpreter of `make engines-venv`, if it is there; else ours, which may have LMCache too."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    base = Path(os.environ.get("ENGINES_DIR") or f"{cache}/kvstore/engines") / "lmcache"
    return str(base / "bin" / "python") if (base / ".complete").exists() else sys.executable


class LMCacheProcess:
    """`peers/lmcache_child.py`; a context manager.

    Args:
        python: an interpreter with LMCache and kvstore.
        folder: where the adapters keep their files; removed at the end.

    Attributes:
        versions: of lmcache and kvstore there.

    Raises:
        ConfigError: it does not start, or one of them is not there.
    """

    def __init__(self, python: str, folder: str) -> None:
        child = Path(__file__).with_name("peers") / "lmcache_child.py"
        self._child = JsonChild(python, child, option="--python", operation="compare")
        try:
            self.versions: dict[str, str] = self.ask("open", limit_s=_START_S, folder=folder)["versions"]
        except BaseException as error:
            self._close()
            if not isinstance(error, PermanentError):
                raise
            raise ConfigError(
                f"LMCache cannot be compared with by {python}: {error.message}; "
                "`make engines-venv ENGINES=lmcache` makes an environment that can",
                cause=error,
            ) from error

    def ask(self, do: str, *, limit_s: float = _ANSWER_S, **what: Any) -> dict[str, Any]:
        """One command of the child. Raises `PermanentError` if it failed, died, or gave no answer in time."""
        return self._child.ask(do, limit_s=limit_s, **what)

    def _close(self) -> None:
        with contextlib.suppress(PermanentError):
            self.ask("close", limit_s=_STOP_S)
        self._child.close()

    def __enter__(self) -> LMCacheProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()


@dataclass
class _Series:
    """One side, one operation, one size."""

    seconds: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    failed: int = 0
    verified: bool = True

    def add(self, found: dict[str, Any]) -> None:
        self.failed += found["failed"]
        self.verified = self.verified and found["verified"]
        self.cpu.append(found["cpu"])
        self.seconds.append(found["seconds"] or _TIMEOUT_S)


class LMCacheReport(Report):
    """A report whose figures are named by the peer, and whose rows are ours."""

    @property
    def without_bar(self) -> list[str]:
        return []


def run_compare_lmcache(
    *,
    sizes: Sequence[int] | None = None,
    repeats: int | None = None,
    quick: bool = False,
    python: str = "",
    progress: Progress | None = None,
    command: str = "",
) -> Report:
    """Measure and return the report; the process that was started is ended, and its files are removed.

    Args:
        sizes: bytes of an object; default 4 and 32 MiB.
        repeats: rounds per size; default 15, quick 5. One more goes before them and does not count.
        python: interpreter that has LMCache and kvstore; "" is `default_python()`.

    Raises:
        ConfigError: LMCache or kvstore is not there, or a size or number makes no sense.
        PermanentError: the process died.
    """
    from kvstore import __version__

    from .machine import file_system, machine_facts

    rounds = repeats if repeats is not None else (5 if quick else 15)
    if rounds < 1:
        raise ConfigError(f"--repeats must be at least 1, not {rounds}")
    chosen = list(sizes or SIZES)
    if any(size < 4096 or size % 4096 or size > _ROUND_BYTES for size in chosen):
        raise ConfigError(f"--sizes: objects of LMCache's are multiples of 4 KiB, up to {size_name(_ROUND_BYTES)}")
    tell = progress or (lambda what, done, total: None)
    report = LMCacheReport("compare", version=__version__, command=command)
    report.started = datetime.now().astimezone().isoformat(timespec="seconds")
    report.machine = machine_facts()
    begin = time.monotonic()
    spreads: list[float] = []
    with (
        tempfile.TemporaryDirectory(prefix="kvstore-bench-lmcache-") as folder,
        LMCacheProcess(python or default_python(), os.path.join(folder, "kv")) as child,
    ):
        total, done = len(chosen) * (rounds + 1), 0
        for size in chosen:
            keys = max(1, min(16, _ROUND_BYTES // _TASKS // size))
            nbytes = child.ask("size", nbytes=size, tasks=_TASKS, keys=keys)["nbytes"]
            series, copies = {(op, side): _Series() for op in OPS for side in SIDES}, []
            for number in range(rounds + 1):
                tell(f"lmcache {size_name(size)}", done, total)
                done += 1
                for op, side, found in _round(child, number):
                    if number:
                        series[op, side].add(found)
                    elif found["failed"] or not found["verified"]:
                        series[op, side].failed += found["failed"]
                        series[op, side].verified = False
                if number:
                    copies.append(child.ask("memcpy")["seconds"])
                child.ask("forget")
            _rows(report, size, nbytes, series, copies)
            spreads += [_spread(each.seconds) for (_, side), each in series.items() if side != "kvstore"]
        report.notes.insert(
            0, f"the peer is LMCache {child.versions['lmcache']}, by its own `bench l2`; ours is {_OURS}"
        )
        report.notes.append(
            f"files on {file_system(folder)}, through the page cache; nobody syncs; each side has four threads (fs: as "
            "many as asyncio's pool); ours verifies checksums in the timing, LMCache's adapters have none"
        )
    report.machine["ceiling_spread"] = round(statistics.median(spreads), 3) if spreads else 0.0
    report.seconds = time.monotonic() - begin
    return report


_OURS = "KVStoreL2 as native_plugin over file://"


def _round(child: LMCacheProcess, number: int) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Fresh keys, stored and loaded by each side; the order turns."""
    child.ask("fresh")
    turn = number % len(SIDES)
    order = (*SIDES[turn:], *SIDES[:turn])
    for op in OPS:
        for side in order:
            yield op, side, child.ask("once", op=op, side=side)


def _spread(values: Sequence[float]) -> float:
    """Interquartile range over the median."""
    middle = statistics.median(values)
    return (percentile(values, 0.75) - percentile(values, 0.25)) / middle if middle else 0.0


def _rows(
    report: Report, size: int, nbytes: int, series: dict[tuple[str, str], _Series], copies: Sequence[float]
) -> None:
    """What the rounds of one size came to."""
    name, bar = size_name(size), BARS.get
    copied = nbytes / statistics.median(copies) / 1e9
    good = all(each.verified and not each.failed for each in series.values())
    for (op, side), each in series.items():
        speed = nbytes / statistics.median(each.seconds) / 1e9
        if good:
            report.figures[f"compare.lmcache.{op}.{name}.{side}.gbytes_per_s"] = Figure(
                round(speed, 4), "GB/s", "higher"
            )
        if not each.verified or each.failed:
            report.notes.append(f"{op} {name}: {side}: {each.failed} objects failed, or came back wrong")
    for op, kind in OPS.items():
        ours = series[op, "kvstore"]
        for peer in SIDES[1:]:
            theirs = series[op, peer]
            ratio = statistics.median(b / a for a, b in zip(ours.seconds, theirs.seconds, strict=True))
            figure = f"compare.lmcache.{op}.{name}.vs_{peer}"
            if good:
                report.figures[figure] = Figure(round(ratio, 4), "ratio", "higher", bar(figure))
            report.rows.append(
                Row(
                    url="file", scheme="KVStoreL2", op=kind, size_bytes=size, batch=nbytes // size, lanes=4,
                    seconds=statistics.median(ours.seconds),
                    gbytes_per_s=nbytes / statistics.median(ours.seconds) / 1e9,
                    ceiling=Ceiling(f"LMCache {peer}", nbytes / statistics.median(theirs.seconds) / 1e9),
                    ratio=ratio, p50_ms=percentile(ours.seconds, 0.5) * 1e3,
                    p99_ms=percentile(ours.seconds, 0.99) * 1e3,
                    cpu_s_per_gib=statistics.median(ours.cpu) / nbytes * GIB,
                    verified=ours.verified and theirs.verified, failed=ours.failed + theirs.failed,
                )
            )  # fmt: skip
    report.figures[f"compare.lmcache.memcpy.{name}.gbytes_per_s"] = Figure(round(copied, 4), "GB/s", "higher")
    cpu = ", ".join(
        f"{op} {side} {statistics.median(each.cpu) / nbytes * GIB:.2f}" for (op, side), each in series.items()
    )
    report.notes.append(f"{name}: one thread copies {copied:.1f} GB/s from memory to memory; CPU s/GiB: {cpu}")
