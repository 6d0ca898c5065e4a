"""What `kvstore-bench codec` found: a table of quality and one of speed, JSON, and a page with a plot."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, TextIO

from .report import Figure, Report, plain_table

__all__ = [
    "QUALITY_HEADINGS", "SPEED_HEADINGS", "TEXT_COLUMNS", "CodecReport", "QualityRow", "SpeedRow", "quality_cells",
    "speed_cells",
]  # fmt: skip

QUALITY_HEADINGS = (
    "codec", "level", "text", "contexts", "tokens", "record", "bits/value", "int8/this", "KL", "±", "ΔNLL", "±",
    "top-1", "bytes/entropy", "verified",
)  # fmt: skip
SPEED_HEADINGS = (
    "codec", "level", "record", "tokens", "encode Msym/s", "decode Msym/s", "by CPU time", "by CPU time",
    "encode/memcpy", "decode/memcpy", "spread",
)  # fmt: skip
TEXT_COLUMNS = (0, 1, 2)
LEGEND = (
    "int8/this: bytes of int8 over these, larger is smaller; ±: standard error of the mean before it; bytes/entropy: "
    "bytes over\nwhat the codec's own model says that they must be; verified: exact if lossless, and the same whether "
    "refined or read at once\n"
)


@dataclass(frozen=True, slots=True)
class QualityRow:
    """One codec at one level, over all contexts of one kind.

    Attributes:
        text: kind of text, of the contexts.
        tokens: tokens per context.
        record_tokens: tokens per record, at most.
        nbytes: what a reader of this level fetches, over all contexts: header, table and everything up to it.
        stored_nbytes: the whole records, with the finer levels.
        bits_per_value: `nbytes` per element of K and V.
        bytes_vs_int8: bytes of int8 on the same contexts and records, divided by these; None if int8 did not run.
        kl, dnll, top1: see `quality.Score`; means over the contexts, `_se` the standard errors; None if not judged.
        entropy_ratio: `nbytes` over what the codec's model says that they must be; None if it has no such model.
        raw_segments: segments that were stored as they are.
        lossless: the codec promises the exact bytes.
        verified: what came back is what it must be: exact if lossless, and the same whether refined level by level or
            decoded at once.
    """

    codec: str
    level: str
    text: str
    contexts: int
    tokens: int
    record_tokens: int
    nbytes: int
    stored_nbytes: int
    bits_per_value: float
    bytes_vs_int8: float | None
    kl: float | None
    kl_se: float | None
    dnll: float | None
    dnll_se: float | None
    top1: float | None
    entropy_ratio: float | None
    raw_segments: int
    lossless: bool
    verified: bool


@dataclass(frozen=True, slots=True)
class SpeedRow:
    """One codec on one core; `level` is the one that is decoded, all of them are encoded. 1e6 elements of K and V per
    second, medians of the repeats.

    Attributes:
        encode_msym_s, decode_msym_s: by wall time.
        encode_cpu_msym_s, decode_cpu_msym_s: by CPU time, which other processes take nothing of.
        spread: of the wall times, between the quartiles, as a share of the median.
    """

    codec: str
    level: str
    record_tokens: int
    tokens: int
    repeats: int
    encode_msym_s: float
    decode_msym_s: float
    encode_cpu_msym_s: float
    decode_cpu_msym_s: float
    spread: float


def quality_cells(row: QualityRow) -> list[str]:
    """A row as text, one cell per heading."""

    def number(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    return [
        row.codec, row.level, row.text, str(row.contexts), str(row.tokens), str(row.record_tokens),
        f"{row.bits_per_value:.3f}", number(row.bytes_vs_int8, ".3f"), number(row.kl, ".4f"), number(row.kl_se, ".4f"),
        number(row.dnll, "+.4f"), number(row.dnll_se, ".4f"), number(row.top1, ".3f"),
        number(row.entropy_ratio, ".3f"), "yes" if row.verified else "NO",
    ]  # fmt: skip


def speed_cells(row: SpeedRow, memcpy: SpeedRow | None) -> list[str]:
    """A row as text, one cell per heading."""
    ratios = ["-", "-"]
    if memcpy is not None:
        ratios = [f"{row.encode_msym_s / memcpy.encode_msym_s:.3f}", f"{row.decode_msym_s / memcpy.decode_msym_s:.3f}"]
    values = (row.encode_msym_s, row.decode_msym_s, row.encode_cpu_msym_s, row.decode_cpu_msym_s)
    rates = [f"{value:.1f}" for value in values]
    return [row.codec, row.level, str(row.record_tokens), str(row.tokens), *rates, *ratios, f"{row.spread:.0%}"]


@dataclass
class CodecReport(Report):
    """The report of `kvstore-bench codec`: rows of its own kinds.

    Attributes:
        quality, speeds: in the order measured.
        unjudged: names of figures that have no bar because contexts are too few to judge.
        setting: model, reference, profiles, versions: what a reader must know to repeat it.
    """

    quality: list[QualityRow] = field(default_factory=list)
    speeds: list[SpeedRow] = field(default_factory=list)
    setting: dict[str, str] = field(default_factory=dict)
    unjudged: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """True if something was measured and everything that came back was verified."""
        return bool(self.quality) and all(row.verified for row in self.quality)

    @property
    def without_bar(self) -> list[str]:
        return []

    def to_dict(self) -> dict[str, Any]:
        rows: list[dict[str, Any]] = [{"kind": "quality", **asdict(row)} for row in self.quality]
        rows += [{"kind": "speed", **asdict(row)} for row in self.speeds]
        return {**super().to_dict(), "setting": self.setting, "rows": rows}

    def memcpy(self, row: SpeedRow) -> SpeedRow | None:
        """The ceiling of the same turns."""
        return next((each for each in self.speeds if each.codec == "memcpy" and each.tokens == row.tokens
                     and each.record_tokens == row.record_tokens), None)  # fmt: skip

    @property
    def bars_missed(self) -> str:
        """Which bars are not met, which the exit status says nothing about; else ""."""
        missed = [name for name, figure in self.figures.items() if figure.met is False]
        return f"bars not met: {', '.join(missed)}; the exit status does not depend on it" if missed else ""

    def bar_text(self, name: str, figure: Figure) -> str:
        """ "bar ≥ 3.5: met", or "". Only of speeds a noisy machine is an excuse."""
        if name in self.unjudged:
            return "too few contexts to judge"
        timed = "msym_s" in name or "vs_prefill" in name or "speed_vs" in name
        if figure.bar is None or timed or figure.met:
            return super().bar_text(name, figure)
        return f"bar {'≥' if figure.better == 'higher' else '≤'} {figure.bar:g}: NOT met"

    def print_table(self, out: TextIO) -> None:
        """The tables, plain on every kind of output: they are as wide as a page."""
        for name, value in self.setting.items():
            out.write(f"{name}: {value}\n")
        out.write("\n" + plain_table(QUALITY_HEADINGS, [quality_cells(row) for row in self.quality], text=TEXT_COLUMNS))
        out.write(LEGEND)
        if self.speeds:
            cells = [speed_cells(row, self.memcpy(row)) for row in self.speeds]
            out.write("\n" + plain_table(SPEED_HEADINGS, cells, text=(0, 1)))
        out.write("\n")
        self.write_figures(out)

    def _page(self) -> str:
        from .codec_page import page

        return page(self)
