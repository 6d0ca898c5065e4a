"""Learning when records are used again: a hazard curve over the age, and a factor per class. And who was here before.

Proportional hazards: a record of class c that has lain for a seconds since its last use is used again at the rate
h(a)·w_c. Both are learned while running, from a sample of the keys (spatial sampling as in SHARDS: Waldspurger et al.,
FAST'15), which also follows records that were evicted: they count as used again when they come back.

Source of the idea: "KVCache in the Wild" (arXiv 2506.02634) finds reuse times that depend on class and age.
"""

from __future__ import annotations

import math
from array import array
from collections import OrderedDict

from kvstore.keys import Key

__all__ = ["Ghosts", "ReuseModel", "mix"]

_LATE = 0.01  # share of uses that is next to nothing
_STEPS = 8  # entries of the table of scores per doubling of the age


def mix(key: Key) -> int:
    """64 bits of a key, the same in every process; evenly spread, as keys are digests."""
    return int.from_bytes(key[24:], "big")


class Ghosts:
    """How often records had been used that are not here any more. A direct-mapped table of 8 bytes an entry, which
    forgets by overwriting; it holds about four times as many as there were records."""

    def __init__(self) -> None:
        self._slots = self._old = array("Q", bytes(8 * 1024))

    def remember(self, mixed: int, uses: int, residents: int) -> None:
        """Args: the key's `mix`; uses (254 at most are told apart); how many records there are."""
        slots = self._slots
        if 4 * residents > len(slots):  # nothing is moved: what is in the old one is looked up there
            self._old, self._slots = slots, array("Q", bytes(16 * len(slots)))
            slots = self._slots
        slots[(mixed >> 8) & (len(slots) - 1)] = (mixed & ~0xFF) | min(uses + 1, 255)

    def recall(self, mixed: int) -> int:
        """Uses; 0 if it is not known."""
        for slots in (self._slots, self._old):
            entry = slots[(mixed >> 8) & (len(slots) - 1)]
            if entry and not (entry ^ mixed) >> 8:
                return (entry & 0xFF) - 1
        return 0


class ReuseModel:
    """Scores of records by class and age: the higher, the sooner and the surer is the next use.

    The score is the Gittins index of the hazard curve, max over t of P(used within t) / E[min(time to use, t)]; a
    plain hazard would throw out what has just come, because people need time to read before they ask again. It is
    made to fall with age everywhere, so that the oldest of a class is always its lowest.

    Args:
        classes: number of classes.
        trust: exponent of a class's factor, 0 (all classes alike) to 1 (as estimated). Below 1 because the classes of
            records of one session are not independent evidence.
        first, growth, buckets: ages are counted in buckets [0, first), [first, first·growth), ...; seconds.
        sample: keys to follow at most.
    """

    def __init__(
        self,
        classes: int,
        *,
        trust: float = 0.7,
        first: float = 1.0,
        growth: float = 1.55,
        buckets: int = 20,
        sample: int = 16384,
    ) -> None:
        self._trust = trust
        self._edges = [0.0] + [first * growth**step for step in range(buckets - 1)]
        self._scale = 1.0 / math.log(growth)
        self._first, self._last = first, buckets - 1
        self._classes = classes
        self._most = sample
        self._rate = 0  # keys are followed whose mix ends in so many zero bits
        self.select = 0  # a key is followed if its mix has none of these bits
        self._samples: OrderedDict[int, tuple[float, int]] = OrderedDict()  # mix -> (last use, class), oldest first
        self._used = [[0.0] * buckets for _ in range(classes)]  # uses again by age
        self._ages = [[0.0] * buckets for _ in range(classes)]  # … and the sum of those ages
        self._due = 256
        self._curve: list[float] | None = None  # score by 8·log2(1 + age), before the factor; None: nothing learned
        self.weights = [1.0] * classes
        self.horizon = math.inf  # seconds; next to nothing is used again after lying for longer

    def score(self, label: int, age: float) -> float:
        """The lower, the earlier it should go. Before anything is learned: by age alone."""
        curve = self._curve
        if curve is None:
            return 1.0 / (1.0 + age)
        place = int(_STEPS * math.log2(1.0 + age)) if age > 0 else 0
        if place >= len(curve):
            return curve[-1] * self.weights[label] * self._edges[-1] / age
        return curve[place] * self.weights[label]

    def used(self, mixed: int, now: float, label: int, residents: int) -> None:
        """A record that is followed was used at `now` (or came for the first time) and has this class from now on.

        Args:
            mixed: `mix` of its key, with no bit of `select`.
            residents: how many records there are.
        """
        samples = self._samples
        before = samples.pop(mixed, None)
        if before is not None:
            last, was = before
            age = now - last
            place = self._bucket(age)
            self._used[was][place] += 1.0
            self._ages[was][place] += age
        samples[mixed] = (now, label)
        if len(samples) > self._most:
            horizon = now - 2 * self._edges[-1]
            while samples and next(iter(samples.values()))[0] < horizon:
                samples.popitem(last=False)
            if len(samples) > self._most:
                self._rate += 1
                self.select = (1 << self._rate) - 1
                for key in [key for key in samples if key & self.select]:
                    del samples[key]
                for table in (*self._used, *self._ages):
                    table[:] = [value / 2 for value in table]
        self._due -= 1
        if self._due <= 0:
            self._learn(now, residents)

    def _bucket(self, age: float) -> int:
        if age < self._first:
            return 0
        return min(self._last, 1 + int(math.log(age / self._first) * self._scale))

    def _learn(self, now: float, residents: int) -> None:
        """Estimate the curve and the factors anew. Costs a walk over the sample, every so many uses."""
        edges, last = self._edges, self._last
        buckets = last + 1
        # Those that have not been used again yet lay unused for as long as they do.
        count = [row.copy() for row in self._used]
        ages = [row.copy() for row in self._ages]
        place = last
        low = now - edges[place]
        for used, label in self._samples.values():  # oldest first: the bucket only goes down
            while used > low and place:
                place -= 1
                low = now - edges[place]
            count[label][place] += 1.0
            ages[label][place] += max(0.0, now - used)
        exposure = []
        for label in range(self._classes):
            row, beyond = [0.0] * buckets, 0.0
            for place in range(last, -1, -1):
                width = edges[place + 1] - edges[place] if place < last else 0.0
                row[place] = max(0.0, ages[label][place] - edges[place] * count[label][place]) + beyond * width
                beyond += count[label][place]
            exposure.append(row)
        events = [sum(row[place] for row in self._used) for place in range(buckets)]
        lain = [sum(row[place] for row in exposure) for place in range(buckets)]
        total = sum(events)
        if total >= 32:
            hazard = [(events[place] + 1e-6) / (lain[place] + 1.0) for place in range(buckets)]
            self._curve = self._table(self._gittins(hazard))
            self.horizon, late = math.inf, 0.0
            for place in range(last, 0, -1):
                late += events[place]
                if late > _LATE * total:
                    break
                self.horizon = edges[place]
            prior = 20.0
            for label in range(self._classes):
                expected = sum(exposure[label][place] * hazard[place] for place in range(buckets))
                factor = (sum(self._used[label]) + prior) / (expected + prior)
                self.weights[label] = factor**self._trust
        self._due = max(256, len(self._samples) // 8)
        # What was learned fades, the more slowly the more there is to remember.
        half_life = max(16384.0, 4.0 * residents) / (1 << self._rate)
        fade = 0.5 ** (self._due / half_life)
        for row in (*self._used, *self._ages):
            row[:] = [value * fade for value in row]

    def _gittins(self, hazard: list[float]) -> list[float]:
        edges, last = self._edges, self._last
        index = []
        for start in range(last + 1):
            alive, waited, best = 1.0, 0.0, 0.0
            for place in range(start, last + 1):
                width = edges[place + 1] - edges[place] if place < last else edges[place]
                after = alive * math.exp(-hazard[place] * width)
                waited += (alive - after) / hazard[place]
                alive = after
                best = max(best, (1.0 - alive) / waited)
            index.append(best)
        peak = index.index(max(index))
        for place in range(peak - 1, -1, -1):
            index[place] = index[place + 1] * 1.001
        for place in range(peak + 1, last + 1):
            index[place] = min(index[place], index[place - 1] * 0.999)
        return index

    def _table(self, index: list[float]) -> list[float]:
        """The index at 8 ages per doubling, interpolated between the middles of the buckets."""
        edges, last = self._edges, self._last
        middles = [(edges[place] + edges[place + 1]) / 2 for place in range(last)] + [1.5 * edges[last]]
        table = []
        place = 0
        for step in range(int(_STEPS * math.log2(1.0 + middles[-1])) + 1):
            age = 2.0 ** (step / _STEPS) - 1.0
            while place < last and middles[place + 1] <= age:
                place += 1
            if age <= middles[0] or place == last:
                table.append(index[place])
                continue
            share = (age - middles[place]) / (middles[place + 1] - middles[place])
            table.append(index[place] * (1.0 - share) + index[place + 1] * share)
        return table
