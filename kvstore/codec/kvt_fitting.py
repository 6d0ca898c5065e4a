"""From statistics to the arrays of a kvt profile: bases, levels, distributions. Pure numpy."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .kvt_reference import ABSENT, LARGEST, Float32, Int8, UInt8
from .rans import Distributions

__all__ = ["Basis", "Histogram", "basis_of", "cluster", "fit_arrays", "plan_shifts"]

Doubles = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]

ALPHABET = 64  # an escape, and the values from -31 to 31
DIRECT, TERNARY, BINARY = 32, 24, 8  # classes of distributions; more gained less than 0.3 % on a real model
_RARE = 0.02  # a channel that is zero but for this share waits for a finer level: it would take bits for little
_ENOUGH = 16  # samples for a centre of a channel's own
_STIFFEST = 1e-9  # smallest eigenvalue of a metric, of its largest


class Basis(NamedTuple):
    """Of K or V: x = steps @ basis + mean, steps = (x - mean) @ inverse; `[layers, heads, width, width]`, and
    `[layers, heads, width]`."""

    basis: Doubles
    inverse: Doubles
    mean: Doubles


def basis_of(mean: Doubles, covariance: Doubles, metric: Doubles, ridge: float) -> Basis:
    """The basis in which errors of one length cost alike, and the values are uncorrelated, largest variance first.

    Args:
        ridge: added to the metric's diagonal, times the mean of its diagonal: what it does not know, it minds too.
    """
    width = metric.shape[-1]
    level = np.einsum("lhdd->lh", metric)[..., None, None] / width
    stiff = metric + (ridge * level + 1e-30) * np.eye(width)
    values, vectors = np.linalg.eigh(stiff)
    values = np.maximum(values, values[..., -1:] * _STIFFEST)
    root = (vectors * np.sqrt(values)[..., None, :]) @ vectors.swapaxes(-1, -2)
    back = (vectors / np.sqrt(values)[..., None, :]) @ vectors.swapaxes(-1, -2)
    _, axes = np.linalg.eigh(root @ covariance @ root)
    axes = axes[..., ::-1]
    return Basis(axes.swapaxes(-1, -2) @ back, root @ axes, mean)


class Histogram:
    """What indices at shift 0 a model's channels have, and what stands behind them.

    Attributes:
        counts: `[layers, channels, 255]`, of the indices -127 to 127.
        sums, squares: `[layers, channels, 128]`: of |z| and z² (in steps), per magnitude.
        tokens: how many were seen.
    """

    def __init__(self, layers: int, channels: int) -> None:
        self.counts: Counts = np.zeros((layers, channels, 2 * LARGEST + 1), np.int64)
        self.sums: Doubles = np.zeros((layers, channels, LARGEST + 1))
        self.squares: Doubles = np.zeros((layers, channels, LARGEST + 1))
        self.tokens = 0

    def add(self, layer: int, indices: Int8, z: Float32) -> None:
        """Indices and values of one layer, `[tokens, channels]`."""
        channels = indices.shape[1]
        wide = indices.astype(np.int64)
        place = np.arange(channels) * (2 * LARGEST + 1) + LARGEST + wide
        self.counts[layer] += np.bincount(place.ravel(), minlength=self.counts[layer].size).reshape(channels, -1)
        place = (np.arange(channels) * (LARGEST + 1) + np.abs(wide)).ravel()
        for into, weights in ((self.sums, np.abs(z)), (self.squares, np.square(z))):
            into[layer] += np.bincount(place, weights.ravel(), into[layer].size).reshape(channels, -1)

    def at(self, shift: int) -> Counts:
        """Counts of the values at a shift: `[layers, channels, 2 · (127 >> shift) + 1]`."""
        most = LARGEST >> shift
        index = np.arange(-LARGEST, LARGEST + 1)
        value = np.sign(index) * (np.abs(index) >> shift) + most
        out = np.zeros((*self.counts.shape[:2], 2 * most + 1), np.int64)
        for place in range(out.shape[2]):
            out[..., place] = self.counts[..., value == place].sum(-1)
        return out

    def cells(self, shift: int) -> tuple[Doubles, Doubles, Doubles]:
        """Per magnitude at a shift: how many, their sum of |z|, and of z²; `[layers, channels, 128 >> shift]`."""
        both = self.counts[..., LARGEST:].astype(np.float64)
        both[..., 1:] += self.counts[..., LARGEST - 1 :: -1]
        shape = (*both.shape[:2], -1, 1 << shift)
        number, total, square = (each.reshape(shape).sum(-1) for each in (both, self.sums, self.squares))
        return number, total, square

    def entropy(self, shift: int) -> Doubles:
        """Bits per value at a shift, `[layers, channels]`."""
        counts = self.at(shift)
        total = np.maximum(counts.sum(-1, keepdims=True), 1)
        share = counts / total
        bits: Doubles = -(share * np.log2(np.where(share > 0, share, 1))).sum(-1)
        return bits

    def distortion(self, shift: int) -> Doubles:
        """Mean square error at a shift, in steps, if every cell has its own centre (0 for the middle one)."""
        number, total, square = self.cells(shift)
        saved = np.where(number > 0, total**2 / np.maximum(number, 1), 0)
        saved[..., 0] = 0
        error: Doubles = (square - saved).sum(-1) / max(self.tokens, 1)
        return error


def plan_shifts(histogram: Histogram, levels: int) -> UInt8:
    """How precisely each channel is known after each level, uint8 `[levels, layers, channels]`.

    A level is half a bit finer than the one before it: from a whole shift to the next, half of the bits are spent on
    the channels where they remove the most error each. A channel that is hardly ever anything but zero waits.
    """
    planned = []
    for half in range(levels - 1, -1, -1):
        coarse, fine = (half + 1) // 2, half // 2
        shifts = np.full(histogram.counts.shape[:2], fine, np.uint8)
        if coarse != fine:
            gained = histogram.distortion(coarse) - histogram.distortion(fine)
            spent = histogram.entropy(fine) - histogram.entropy(coarse)
            order = np.argsort(-(gained / np.maximum(spent, 1e-9)).ravel(), kind="stable")
            paid = np.cumsum(spent.ravel()[order])
            later = order[paid > paid[-1] / 2]
            shifts.ravel()[later] = coarse
        for shift in (coarse, fine):
            if shift:
                zero = histogram.at(shift)[..., LARGEST >> shift] / max(histogram.tokens, 1)
                shifts[(shifts == shift) & (zero > 1 - _RARE)] = ABSENT
        planned.append(shifts)
    return np.stack(planned)


def fit_arrays(histogram: Histogram, shifts: UInt8) -> dict[str, npt.NDArray[np.generic]]:
    """The arrays "shifts", "classes", "centres" and "frequencies" of a profile."""
    levels, layers, channels = shifts.shape
    centres = np.zeros((levels, layers, channels, 3), np.float32)
    rows: list[list[Counts]] = [[], [], []]  # direct, ternary, binary
    places: list[list[npt.NDArray[np.int64]]] = [[], [], []]
    flat = np.arange(levels * layers * channels * 3).reshape(levels, layers, channels, 3)
    before = np.full((layers, channels), ABSENT, np.uint8)
    for level, after in enumerate(shifts):
        live = after != before
        for shift in np.unique(after):
            if shift == ABSENT:
                continue
            here = after == shift
            centres[level][here] = _centres(histogram, int(shift))[here]
            fresh, grown = here & live & (before == ABSENT), here & live & (before != ABSENT)
            rows[0].append(_direct(histogram.at(int(shift))[fresh]))
            places[0].append(flat[level][fresh][:, 0])
            if grown.any():
                for kind, counts in enumerate(_refined(histogram, int(shift), grown)):
                    rows[1 + (kind > 0)].append(counts)
                    places[1 + (kind > 0)].append(flat[level][grown][:, kind])
        before = after
    classes = np.zeros(flat.size, np.uint16)
    tables: list[npt.NDArray[np.int64]] = []
    made = 0
    for kind, most in enumerate((DIRECT, TERNARY, BINARY)):
        if not rows[kind]:
            continue
        labels, pooled = cluster(np.concatenate(rows[kind]), most)
        classes[np.concatenate(places[kind])] = made + labels
        made += len(pooled)
        for row in pooled:
            tables.append(_integers(row, escape=True) if not kind else np.pad(_integers(row), (0, ALPHABET - len(row))))
    return {
        "shifts": shifts,
        "classes": classes.reshape(flat.shape),
        "centres": centres,
        "frequencies": np.stack(tables).astype(np.uint16),
    }


def _centres(histogram: Histogram, shift: int) -> Float32:
    """What the magnitudes 1, 2, 3 stand for at a shift, `[layers, channels, 3]`, in steps."""
    number, total, _ = histogram.cells(shift)
    size = 1 << shift
    most = number.shape[2]
    # From 3 on magnitudes share a centre, less `size` for each beyond 3.
    beyond = np.arange(most) - 3
    far = slice(3, most)
    number3 = number[..., far].sum(-1)
    total3 = (total[..., far] - size * beyond[far] * number[..., far]).sum(-1)
    counts = np.stack([number[..., 1], number[..., 2], number3], -1)
    sums = np.stack([total[..., 1], total[..., 2], total3], -1)
    pooled = sums.sum((0, 1)) / np.maximum(counts.sum((0, 1)), 1)
    plain = np.arange(1, 4) * size + (size - 1) / 2
    pooled = np.where(counts.sum((0, 1)) >= _ENOUGH, pooled, plain)
    own: Float32 = ((sums + _ENOUGH * pooled) / (counts + _ENOUGH)).astype(np.float32)
    return own


def _direct(counts: Counts) -> Counts:
    """Counts of symbols: of an escape, and of the values that have a symbol."""
    most = counts.shape[1] // 2
    reach = ALPHABET // 2 - 1
    out = np.zeros((len(counts), ALPHABET), np.int64)
    near = min(most, reach)
    out[:, 1 + reach - near : 2 + reach + near] = counts[:, most - near : most + near + 1]
    out[:, 0] = counts.sum(1) - out.sum(1)
    return out


def _refined(histogram: Histogram, shift: int, which: npt.NDArray[np.bool_]) -> list[Counts]:
    """Counts of the symbols of a refinement to `shift`, where 0, 1, or more was known: `[which, 3]`, `[which, 2]`."""
    fine = histogram.at(shift)[which]
    zero = LARGEST >> shift
    ternary = fine[:, [zero, zero + 1, zero - 1]]
    both = fine[:, zero:].copy()
    both[:, 1:] += fine[:, zero - 1 :: -1]
    one = both[:, 2:4]
    more = np.stack([both[:, 4::2].sum(1), both[:, 5::2].sum(1)], 1)
    return [ternary, one, more]


def cluster(counts: Counts, most: int, rounds: int = 12) -> tuple[npt.NDArray[np.int64], Doubles]:
    """Group rows of counts so that coding each by its group's distribution costs few bits more: k-means in KL.

    Returns:
        labels `[rows]`, and pooled counts `[groups, symbols]` of the groups that have rows.
    """
    weights = counts.astype(np.float64)
    share = (weights + 1e-3) / (weights + 1e-3).sum(1, keepdims=True)
    order = np.argsort(-(share * np.log2(share)).sum(1), kind="stable")
    labels = np.empty(len(counts), np.int64)
    labels[order] = np.arange(len(counts)) * most // max(len(counts), 1)
    for _ in range(rounds):
        pooled = np.zeros((most, counts.shape[1]))
        np.add.at(pooled, labels, weights)
        smooth = pooled + 0.05
        bits = -np.log2(smooth / smooth.sum(1, keepdims=True))
        closest = (weights @ bits.T).argmin(1)
        if (closest == labels).all():
            break
        labels = closest
    used, labels = np.unique(labels, return_inverse=True)
    pooled = np.zeros((len(used), counts.shape[1]))
    np.add.at(pooled, labels, weights)
    return labels, pooled


def _integers(counts: Doubles, *, escape: bool = False) -> npt.NDArray[np.int64]:
    """Frequencies that sum to 2^12. With an escape (symbol 0), only values up to the largest seen have symbols."""
    out = np.zeros(len(counts), np.int64)
    symbols = np.arange(len(counts))
    if escape:
        middle = len(counts) // 2
        seen = np.flatnonzero(counts[1:]) + 1
        reach = int(np.abs(seen - middle).max()) if len(seen) else 0
        symbols = np.concatenate(([0], np.arange(middle - reach, middle + reach + 1)))
    own = counts[symbols] + (0.25 if escape else 0.5)
    out[symbols] = Distributions.from_counts(own[None]).frequencies[0]
    return out
