"""The quality side of `kvstore-bench codec`: every codec at every level over the same contexts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvstore.codec.base import Codec

from .codec_entropy import modelled_bits
from .codec_records import chunks_of, refines_alike, store
from .codec_report import QualityRow
from .quality import Judge, Reference, Score, Segments, summarise

if TYPE_CHECKING:
    from .codec_lmcache import LMCacheProcess

__all__ = ["BASE", "LMCACHE", "Pass", "Scheme", "measure"]

BASE = "int8"
"""What sizes are compared with: 8 bits per value and a scale per (token, head)."""

LMCACHE = "lmcache"

_MODELLED = 4  # contexts that the model's entropy is taken of: it costs a second encoding

_EXACT = Score(0.0, 0.0, 1.0)


class Scheme(NamedTuple):
    """A codec to measure.

    Attributes:
        name: as in figures.
        codec: with its profile, if it has one.
        variant: which of the profile's levels it encodes, for a codec whose levels are records of their own; None: the
            levels of one record.
    """

    name: str
    codec: Codec
    variant: int | None = None

    def label(self, level: int) -> str:
        """What level `level` of its records is called."""
        return str(level if self.variant is None else self.variant)


@dataclass(frozen=True)
class Pass:
    """What to measure on.

    Attributes:
        text: kind of text.
        windows: token ids of each context: the context, its continuation, and one more.
        tokens: tokens per context.
        record: tokens per record, at most.
        judged: whether the model continues; else only sizes are measured.
    """

    text: str
    windows: Sequence[Sequence[int]]
    tokens: int
    record: int
    judged: bool = True


@dataclass
class _Tally:
    """What was found of one codec at one level, context by context."""

    fetched: list[int] = field(default_factory=list)
    stored: list[int] = field(default_factory=list)
    scores: list[Score] = field(default_factory=list)
    modelled: list[float] = field(default_factory=list)
    raw_segments: int = 0
    verified: bool = True
    lossless: bool = False


Told = Callable[[str], None]


def measure(
    judge: Judge,
    schemes: Sequence[Scheme],
    asked: Pass,
    *,
    lmcache: LMCacheProcess | None = None,
    told: Told = lambda _: None,
) -> tuple[list[QualityRow], list[Reference]]:
    """Every scheme at every level over all contexts of a pass.

    Args:
        schemes: one of them should be `BASE`, or there is nothing to compare sizes with.
        lmcache: LMCache's own codec, as further rows.
        told: called with what comes next, once per context and scheme.

    Returns:
        The rows, in the order of the schemes and their levels; and the references, without their log probabilities.
    """
    tallies: dict[tuple[str, str], _Tally] = {}
    kept: list[Reference] = []
    for number, ids in enumerate(asked.windows):
        told(f"{asked.text} {number + 1}: prefill")
        reference = judge.refer(ids, asked.tokens) if asked.judged else judge.bare(ids, asked.tokens)
        for scheme in schemes:
            told(f"{asked.text} {number + 1}: {scheme.name}")
            _one(judge, scheme, reference, asked, tallies, number)
        for variant in lmcache.bins if lmcache is not None else ():
            assert lmcache is not None
            told(f"{asked.text} {number + 1}: {LMCACHE} {variant}")
            nbytes, back = _through(lmcache, variant, reference.segments, asked)
            tally = tallies.setdefault((LMCACHE, variant), _Tally())
            tally.fetched.append(nbytes)
            tally.stored.append(nbytes)
            if asked.judged:
                tally.scores.append(judge.score(reference, back))
        kept.append(reference.without_log_probs())
    return _rows(judge, asked, tallies), kept


def _one(
    judge: Judge,
    scheme: Scheme,
    reference: Reference,
    asked: Pass,
    tallies: dict[tuple[str, str], _Tally],
    number: int,
) -> None:
    """One scheme on one context, at all levels."""
    first = number == 0
    stored = store(scheme.codec, reference.segments, judge.layout, asked.tokens, asked.record)
    alike = not first or refines_alike(stored)
    for level in range(stored.levels):
        tally = tallies.setdefault((scheme.name, scheme.label(level)), _Tally(lossless=scheme.codec.lossless))
        tally.fetched.append(stored.fetched(level))
        tally.stored.append(stored.nbytes)
        tally.raw_segments += stored.raw_segments
        tally.verified &= alike
        segments = stored.read(level)
        exact = all(np.array_equal(one, other) for one, other in zip(segments, reference.segments, strict=True))
        if scheme.codec.lossless:
            tally.verified &= exact
        if asked.judged:  # equal bytes give equal answers: seen once, then taken for granted
            score = _EXACT if exact and not first else judge.score(reference, segments)
            tally.scores.append(score)
            tally.verified &= not exact or score == _EXACT
    if number < _MODELLED:
        bits = modelled_bits(scheme.codec, reference.segments, judge.layout, asked.tokens, asked.record)
        for level, modelled in enumerate(bits or ()):
            tallies[scheme.name, scheme.label(level)].modelled.append(modelled)


def _through(lmcache: LMCacheProcess, variant: str, segments: Segments, asked: Pass) -> tuple[int, Segments]:
    total, back = 0, [np.empty_like(each) for each in segments]
    for begin, tokens, some in chunks_of(segments, asked.tokens, asked.record):
        nbytes, came = lmcache.through(variant, some)
        total += nbytes
        for whole, part in zip(back, came, strict=True):
            whole.reshape(2, asked.tokens, -1)[:, begin : begin + tokens] = part.reshape(2, tokens, -1)
    return total, back


def _rows(judge: Judge, asked: Pass, tallies: dict[tuple[str, str], _Tally]) -> list[QualityRow]:
    values = asked.tokens * judge.layout.elements_per_token * judge.layout.num_layers * len(asked.windows)
    base = next((sum(each.fetched) for (name, _), each in tallies.items() if name == BASE), None)
    rows = []
    for (name, label), tally in tallies.items():
        fetched = sum(tally.fetched)
        found = summarise(tally.scores) if tally.scores else None
        modelled = sum(tally.modelled)
        of_modelled = sum(tally.fetched[: len(tally.modelled)])
        rows.append(
            QualityRow(
                codec=name,
                level=label,
                text=asked.text,
                contexts=len(asked.windows),
                tokens=asked.tokens,
                record_tokens=asked.record,
                nbytes=fetched,
                stored_nbytes=sum(tally.stored),
                bits_per_value=8 * fetched / values,
                bytes_vs_int8=base / fetched if base is not None else None,
                kl=found.kl if found else None,
                kl_se=found.kl_se if found else None,
                dnll=found.dnll if found else None,
                dnll_se=found.dnll_se if found else None,
                top1=found.top1 if found else None,
                entropy_ratio=8 * of_modelled / modelled if modelled else None,
                raw_segments=tally.raw_segments,
                lossless=tally.lossless,
                verified=tally.verified,
            )
        )
    return rows
