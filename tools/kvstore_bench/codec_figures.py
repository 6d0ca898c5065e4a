"""From rows to named figures with their bars."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from .codec_measure import LMCACHE
from .codec_report import QualityRow, SpeedRow
from .report import Figure

__all__ = ["DNLL_BAR", "JUDGED_FROM", "KL_BAR", "best_level", "figures_of", "meets", "shown_level", "unjudged"]

KL_BAR, DNLL_BAR = 0.04, 0.03
"""Nats. A level that stays under both is good enough to be called lossy in name only."""

JUDGED_FROM = 8
"""Contexts. From fewer, KL and ΔNLL are mostly chance: no bar is judged on them."""

_CHUNK, _GROUP = 256, 1536
_BY_QUALITY = ("kl", "dnll", "bytes_vs_int8", "bytes_vs_int8_dnll", "bytes_vs_lmcache")

_BARS: dict[str, float] = {
    "cachegen.bytes_vs_int8": 2.2,
    "cachegen.bytes_vs_int8_dnll": 2.2,
    "cachegen.dnll": DNLL_BAR,
    "kvt.bytes_vs_int8": 3.5,
    "kvt.kl": KL_BAR,
    "kvt.dnll": DNLL_BAR,
    "kvt.bytes_vs_lmcache": 0.6,
    "kvt.bytes_vs_lmcache.1536": 0.6,
    **{f"{codec}.entropy_ratio.256": 1.10 for codec in ("cachegen", "kvt")},
    **{f"{codec}.entropy_ratio.1536": 1.03 for codec in ("cachegen", "kvt")},
    **{f"{codec}.{way}_msym_s": 100.0 for codec in ("cachegen", "kvt") for way in ("encode", "decode")},
    **{f"{codec}.decode_vs_prefill": 5.0 for codec in ("cachegen", "kvt")},
    **{f"{codec}.speed_vs_lmcache": 5.0 for codec in ("cachegen", "kvt")},
}
_LOWER = ("kl", "dnll", "bytes_vs_lmcache", "entropy_ratio", "kl_code", "dnll_code", "bits_per_value", "stored_bits")


def meets(row: QualityRow, *, kl: bool = True) -> bool:
    """Whether a level is good enough: ΔNLL, and unless told otherwise KL too."""
    if row.kl is None or row.dnll is None:
        return False
    return row.dnll <= DNLL_BAR and (row.kl <= KL_BAR or not kl)


def best_level(rows: Sequence[QualityRow], codec: str, text: str, *, kl: bool = True) -> QualityRow | None:
    """The smallest level of a codec that is good enough, on chunks; None if none is."""
    good = [row for row in _of(rows, codec, text, _CHUNK) if meets(row, kl=kl)]
    return min(good, key=lambda row: row.nbytes, default=None)


def _too_few(rows: Sequence[QualityRow], text: str) -> int:
    """Contexts of the text that bars are judged on if they are too few for that, else 0."""
    contexts = max((row.contexts for row in rows if (row.text, row.record_tokens) == (text, _CHUNK)), default=0)
    return contexts if contexts < JUDGED_FROM else 0


def shown_level(rows: Sequence[QualityRow], codec: str, text: str) -> QualityRow | None:
    """The level that a codec's figures are of: the smallest that is good enough; where none is, the largest; where
    contexts are too few to judge, the one with the least KL."""
    levels = _of(rows, codec, text, _CHUNK)
    if not levels:
        return None
    if _too_few(rows, text):
        return min(levels, key=lambda row: (math.inf if row.kl is None else row.kl, row.nbytes))
    return best_level(rows, codec, text) or max(levels, key=lambda row: row.nbytes)


def unjudged(rows: Sequence[QualityRow], figures: Mapping[str, Figure], text: str) -> list[str]:
    """Names of figures that would have a bar, had there been contexts enough."""
    return [name for name in figures if _without_bar(name.removeprefix("codec."))] if _too_few(rows, text) else []


def _without_bar(name: str) -> bool:
    return name in _BARS and name.split(".")[1] in _BY_QUALITY


def _of(rows: Sequence[QualityRow], codec: str, text: str, record: int) -> list[QualityRow]:
    return [row for row in rows if (row.codec, row.text, row.record_tokens) == (codec, text, record)]


def figures_of(
    quality: Sequence[QualityRow],
    speeds: Sequence[SpeedRow],
    *,
    text: str,
    prefill_tokens_s: float,
    values_per_token: int,
    notes: list[str],
) -> dict[str, Figure]:
    """The figures, `codec.<codec>.<what>`.

    Args:
        text: the kind of text that bars are judged on.
        prefill_tokens_s: what the model does, in the same run.
        values_per_token: elements of K and V of a token, over all layers.
        notes: sentences are added: which level a codec's figures are of, and where none is good enough.
    """
    found: dict[str, float] = {}
    few, levels_shown = _too_few(quality, text), list[str]()
    for codec in dict.fromkeys(row.codec for row in quality):
        if codec == LMCACHE:
            continue
        levels = _of(quality, codec, text, _CHUNK)
        shown = shown_level(quality, codec, text)
        if shown is None:
            continue
        best = shown if few else best_level(quality, codec, text)
        if few:
            if len(levels) > 1:
                levels_shown.append(f"{codec} {shown.level}")
        elif best is None:
            notes.append(f"{codec}: no level reaches KL ≤ {KL_BAR:g} and ΔNLL ≤ {DNLL_BAR:g}; its sizes count as 0")
        elif len(levels) > 1:
            notes.append(f"{codec}: the figures are of level {shown.level}, the smallest of {len(levels)} good enough")
        found |= _quality(quality, codec, shown, best, text)
        found |= _speed(speeds, codec, shown.level, prefill_tokens_s, values_per_token)
        for record in (_CHUNK, _GROUP):
            found |= _against_lmcache(quality, codec, text, record, notes)
    if few:
        found = {name: value for name, value in found.items() if not name.endswith(".bytes_vs_int8_dnll")}
        notes.append(
            f"too few contexts to judge: {few} of {text}, at least {JUDGED_FROM} are needed; KL, ΔNLL and sizes have "
            f"no bar here, and are of the level with the least KL ({', '.join(levels_shown) or 'the only one'})"
        )
    return {f"codec.{name}": _figure(name, value, judged=not few) for name, value in found.items()}


def _quality(
    quality: Sequence[QualityRow], codec: str, shown: QualityRow, best: QualityRow | None, text: str
) -> dict[str, float]:
    found: dict[str, float] = {}

    def add(what: str, value: float | None) -> None:
        if value is not None:
            found[f"{codec}.{what}"] = value

    if shown.bytes_vs_int8 is not None:
        add("bytes_vs_int8", shown.bytes_vs_int8 if best is not None else 0.0)
        add("stored_vs_int8", shown.bytes_vs_int8 * shown.nbytes / shown.stored_nbytes if best is not None else 0.0)
        loose = best_level(quality, codec, text, kl=False)
        if codec == "cachegen":
            add("bytes_vs_int8_dnll", loose.bytes_vs_int8 if loose is not None else 0.0)
    add("bits_per_value", shown.bits_per_value)
    add("kl", shown.kl)
    add("dnll", shown.dnll)
    add("top1", shown.top1)
    add("entropy_ratio.256", shown.entropy_ratio)
    for row in _of(quality, codec, text, _GROUP):
        if row.level == shown.level:
            add("entropy_ratio.1536", row.entropy_ratio)
            add("bytes_vs_int8.1536", row.bytes_vs_int8)
            add("kl.1536", row.kl)
            add("dnll.1536", row.dnll)
    for row in _of(quality, codec, "code", _CHUNK):
        if text != "code" and row.level == shown.level:
            add("kl_code", row.kl)
            add("dnll_code", row.dnll)
            add("bytes_vs_int8_code", row.bytes_vs_int8)
    return found


def _speed(
    speeds: Sequence[SpeedRow], codec: str, level: str, prefill_tokens_s: float, values_per_token: int
) -> dict[str, float]:
    found: dict[str, float] = {}
    for row in speeds:
        if (row.codec, row.level) != (codec, level):
            continue
        tail = "" if row.record_tokens == _CHUNK else f".{row.record_tokens}"
        found[f"{codec}.encode_msym_s{tail}"] = row.encode_msym_s
        found[f"{codec}.decode_msym_s{tail}"] = row.decode_msym_s
        found[f"{codec}.encode_cpu_msym_s{tail}"] = row.encode_cpu_msym_s
        found[f"{codec}.decode_cpu_msym_s{tail}"] = row.decode_cpu_msym_s
        if tail:
            continue
        found[f"{codec}.decode_vs_prefill"] = row.decode_msym_s * 1e6 / values_per_token / prefill_tokens_s
        theirs = next((each for each in speeds if each.codec == LMCACHE and each.tokens == row.tokens), None)
        if theirs is not None:
            found[f"{codec}.encode_vs_lmcache"] = row.encode_msym_s / theirs.encode_msym_s
            found[f"{codec}.decode_vs_lmcache"] = row.decode_msym_s / theirs.decode_msym_s
            found[f"{codec}.speed_vs_lmcache"] = min(
                found[f"{codec}.encode_vs_lmcache"], found[f"{codec}.decode_vs_lmcache"]
            )
    return found


def _against_lmcache(
    quality: Sequence[QualityRow], codec: str, text: str, record: int, notes: list[str]
) -> dict[str, float]:
    """Our smallest level that is at least as good (KL) as LMCache's, by its size, both with records of one length; of
    what LMCache picks by itself, and of its coder with 32 bins."""
    found: dict[str, float] = {}
    for theirs in _of(quality, LMCACHE, text, record):
        if theirs.kl is None:
            continue
        tail = "" if theirs.level == "default" else f"_{theirs.level.replace(' ', '_')}"
        tail += "" if record == _CHUNK else f".{record}"
        good = [row for row in _of(quality, codec, text, record) if row.kl is not None and row.kl <= theirs.kl]
        if not good:
            notes.append(f"{codec}: no level has the KL of LMCache's CacheGen, {theirs.level}, records of {record}")
            continue
        ours = min(good, key=lambda row: row.nbytes)
        found[f"{codec}.bytes_vs_lmcache{tail}"] = ours.nbytes / theirs.nbytes
        notes.append(
            f"{codec}: against LMCache's CacheGen ({theirs.level}, records of {record}, KL {theirs.kl:.4f}) stands "
            f"level {ours.level} (KL {ours.kl:.4f})"
        )
    return found


def _figure(name: str, value: float, *, judged: bool = True) -> Figure:
    what = name.partition(".")[2]
    stem = what.partition(".")[0]
    unit = "Msym/s" if stem.endswith("msym_s") else "nats" if stem.startswith(("kl", "dnll")) else "ratio"
    if stem == "bits_per_value":
        unit = "bits"
    lower = stem in _LOWER or stem.startswith("bytes_vs_lmcache")
    bar = _BARS.get(name) if judged or not _without_bar(name) else None
    return Figure(value, unit, "lower" if lower else "higher", bar)
