"""What `kvstore-bench blend` found: a table of schemes, one of links, JSON, and a page with plots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, TextIO

from .report import Figure, Report, plain_table

if TYPE_CHECKING:
    from .blend_control import Choice

__all__ = [
    "LINK_HEADINGS", "SCHEME_HEADINGS", "BlendBenchReport", "CurvePoint", "LinkRow", "SchemeRow", "link_cells",
    "scheme_cells",
]  # fmt: skip

SCHEME_HEADINGS = (
    "scheme", "stored", "r", "prompts", "KL", "±", "of full reuse", "KL last", "answer NLL", "±", "exact",
    "token-layers", "CPU",
)  # fmt: skip
LINK_HEADINGS = ("MB/s", "load/compute", "load s", "compute s", "TTFT s", "formula s", "TTFT/formula", "prefill s",
                 "verified")  # fmt: skip
LEGEND = (
    "KL: of the question's tokens to the full prefill, nats, mean over prompts; ±: standard error of the mean before "
    "it; KL last: of\nthe token before the answer; CPU: seconds over the full prefill's, median; stored: alone, or "
    "behind the shared prefix\n"
)


@dataclass(frozen=True, slots=True)
class SchemeRow:
    """One scheme over all prompts; means unless said otherwise.

    Attributes:
        form: how documents were stored; "": nothing was.
        ratio: r.
        kl, kl_se: of the question's tokens to the full prefill, nats; standard error.
        kl_last: of the token before the answer.
        kl_vs_reuse: mean KL over that of plain reuse of documents stored alone, same prompts; None: not measured.
        nll, nll_se: of the answer's tokens.
        exact: share of prompts whose answer is the most likely one, token by token.
        token_layers: share of a prefill's tokens × layers that was computed.
        cpu_ratio: CPU seconds of the process, everything included, over those of the prefill; median of the ratios.
    """

    scheme: str
    form: str
    ratio: float
    prompts: int
    kl: float
    kl_se: float
    kl_last: float
    kl_vs_reuse: float | None
    nll: float
    nll_se: float
    exact: float
    token_layers: float
    cpu_ratio: float


@dataclass(frozen=True, slots=True)
class LinkRow:
    """One rate of the link. Seconds are medians over the repeats.

    Attributes:
        share: what loading was to take over computing.
        load_s, compute_s: all layers, each alone.
        ttft_s: the whole of `Blender.blend`.
        formula_s, layer_s: Σ max(load, recompute), and one layer of it.
        prefill_s: the model's own prefill, the better of one before and one after.
        ttft_vs_formula: (TTFT - one layer) / formula, median, and each.
        verified: everything that is stored was used.
    """

    share: float
    rate_bytes_per_s: float
    latency_s: float
    ratio: float
    repeats: int
    load_s: float
    compute_s: float
    ttft_s: float
    formula_s: float
    layer_s: float
    prefill_s: float
    ttft_vs_formula: float
    ttft_vs_formula_each: Sequence[float]
    verified: bool


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """TTFT at one rate and one r."""

    rate_bytes_per_s: float
    ratio: float
    ttft_s: float


def scheme_cells(row: SchemeRow) -> list[str]:
    """A row as text, one cell per heading."""
    return [
        row.scheme, row.form.replace("_", " ") or "-", f"{row.ratio:g}", str(row.prompts), f"{row.kl:.4f}",
        f"{row.kl_se:.4f}", "-" if row.kl_vs_reuse is None else f"{row.kl_vs_reuse:.3f}", f"{row.kl_last:.3f}",
        f"{row.nll:.3f}", f"{row.nll_se:.3f}", f"{row.exact:.2f}", f"{row.token_layers:.3f}", f"{row.cpu_ratio:.3f}",
    ]  # fmt: skip


def link_cells(row: LinkRow) -> list[str]:
    """A row as text, one cell per heading."""
    seconds = (row.load_s, row.compute_s, row.ttft_s, row.formula_s)
    return [
        f"{row.rate_bytes_per_s / 1e6:.1f}", f"{row.share:g}", *(f"{each:.3f}" for each in seconds),
        f"{row.ttft_vs_formula:.3f}", f"{row.prefill_s:.3f}", "yes" if row.verified else "NO",
    ]  # fmt: skip


@dataclass
class BlendBenchReport(Report):
    """The report of `kvstore-bench blend`.

    Attributes:
        schemes, links, curve, choices: in the order measured.
        setting: model, prompts: what a reader must know to repeat it.
        unjudged: names of figures without a bar because prompts are too few to judge.
        wrong: blended prompts that were not what was asked for, and caches at r = 0 that were not plain reuse.
    """

    schemes: list[SchemeRow] = field(default_factory=list)
    links: list[LinkRow] = field(default_factory=list)
    curve: list[CurvePoint] = field(default_factory=list)
    choices: list[Choice] = field(default_factory=list)
    setting: dict[str, str] = field(default_factory=dict)
    unjudged: list[str] = field(default_factory=list)
    wrong: int = 0

    @property
    def ok(self) -> bool:
        """True if something was measured, and all that was blended came from the store, as stored."""
        return bool(self.schemes) and not self.wrong and all(row.verified for row in self.links)

    @property
    def without_bar(self) -> list[str]:
        return []

    def to_dict(self) -> dict[str, Any]:
        rows: list[dict[str, Any]] = [{"kind": "scheme", **asdict(row)} for row in self.schemes]
        rows += [{"kind": "link", **asdict(row)} for row in self.links]
        rows += [{"kind": "ttft", **asdict(row)} for row in self.curve]
        rows += [{"kind": "controller", **asdict(row)} for row in self.choices]
        return {**super().to_dict(), "setting": self.setting, "rows": rows, "wrong": self.wrong}

    def bar_text(self, name: str, figure: Figure) -> str:
        """ "bar ≤ 0.5: met", or ""."""
        return "too few prompts to judge" if name in self.unjudged else super().bar_text(name, figure)

    def print_table(self, out: TextIO) -> None:
        """The tables, plain on every kind of output: they are as wide as a page."""
        for name, value in self.setting.items():
            out.write(f"{name}: {value}\n")
        cells = [scheme_cells(row) for row in self.schemes]
        out.write("\n" + plain_table(SCHEME_HEADINGS, cells, text=(0, 1)) + LEGEND)
        if self.links:
            out.write("\n" + plain_table(LINK_HEADINGS, [link_cells(row) for row in self.links], text=()))
            out.write("formula: max(load, recompute) per layer, summed; TTFT/formula: after one layer is taken off\n")
        out.write("\n")
        self.write_figures(out)

    def _page(self) -> str:
        from .blend_page import page

        return page(self)
