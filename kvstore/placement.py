"""Who stores a key: weighted rendezvous hashing, a pure function of the key and the list of backends.

Thaler and Ravishankar, "Using name-based mappings to increase hit rates" (1998); weights after Schindelhauer and
Schomaker, "Weighted distributed hash tables" (2005): the score of a backend is -weight / ln(u), with u uniform in
(0, 1) from a hash of (backend name, key). Adding or removing one of n backends moves 1/n of the keys. Every process
with the same names and weights agrees on which backends hold a key, whatever order it lists them in; each reads the
nearest of them first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from xxhash import xxh3_64_intdigest

from .errors import ConfigError
from .keys import Key

__all__ = ["Placement"]


class Placement:
    """Maps a key to the backends that hold it, in the order in which they are read.

    Args:
        names: stable, unique names of the backends; they must be the same in every process that shares them.
        weights: share of the keys each gets, relative to the others; 0 takes no new keys.
        replicas: how many backends hold each key; at most as many as there are.
        distances: of the backends from here (`Backend.distance`). They may differ between processes: they say which
            replica is read first, never which backends hold a key.

    Raises:
        ConfigError: names repeat, a weight is negative, or there are fewer backends than replicas.
    """

    def __init__(
        self,
        names: Sequence[str],
        weights: Sequence[float] | None = None,
        replicas: int = 1,
        distances: Sequence[int] | None = None,
    ) -> None:
        weights = [1.0] * len(names) if weights is None else list(weights)
        if not names or len(weights) != len(names):
            raise ConfigError(f"{len(names)} backends and {len(weights)} weights given; one or more of each are needed")
        if len(set(names)) != len(names):
            raise ConfigError(f"backend names must be unique (option 'name'): {', '.join(sorted(names))}")
        if not all(0 <= weight < math.inf for weight in weights) or not any(weights):
            raise ConfigError(f"weights must be finite and ≥ 0, one of them positive, not {weights}")
        usable = sum(1 for weight in weights if weight)
        if not 1 <= replicas <= usable:
            raise ConfigError(f"replicas={replicas} must be between 1 and the number of backends with weight, {usable}")
        self.replicas = replicas
        self._distances = distances if distances and len(set(distances)) > 1 else None
        self._single = (0,) if len(names) == 1 else None
        # A name is hashed once into a seed; mixing it with a uniform key is one XXH3 per backend and key.
        self._backends = [
            (xxh3_64_intdigest(name.encode()), weight, index)
            for index, (name, weight) in enumerate(zip(names, weights, strict=True))
            if weight
        ]

    def order(self, key: Key) -> tuple[int, ...]:
        """Indices of the `replicas` backends that hold `key`: the nearest first, those as far as each other by their
        scores. About 0.3 µs per backend."""
        if self._single is not None:
            return self._single
        scores = []
        for seed, weight, index in self._backends:
            # 53 bits, shifted by a half so that u is never 0 or 1.
            u = ((xxh3_64_intdigest(key, seed) >> 11) + 0.5) * 2.0**-53
            scores.append((math.log(u) / weight, index))  # the score's negative reciprocal: larger is better
        scores.sort(reverse=True)
        chosen = tuple(index for _, index in scores[: self.replicas])
        return chosen if self._distances is None else tuple(sorted(chosen, key=self._distances.__getitem__))
