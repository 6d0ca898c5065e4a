"""What the kvt codec needs of a profile, checked and laid out for encoding and decoding.

A profile of kvt has these arrays, for L layers, H KV heads, n levels, and C = H · (head_dim + v_head_dim) channels, K
of all heads before V:

    k_basis      float32 [L, H, head_dim, head_dim]      a value of K is steps @ basis + mean, per head
    k_mean       float32 [L, H, head_dim]
    v_basis, v_mean                                      the same of V
    shifts       uint8   [n, L, C]     how many low bits of a channel's index are not known after a level; 255: all
    classes      uint16  [n, L, C, 3]  rows of `frequencies` for a level's symbols, by what is known before: 0, 1, more
    centres      float32 [n, L, C, 3]  what the magnitudes 1, 2 and 3 stand for after a level, in steps
    frequencies  uint16  [classes, alphabet]             distributions of the entropy coder

and these parameters: "sinks" (tokens at positions below it are stored raw), "raw_last" (so many last tokens of each
segment as well), "rounding" (an index is ⌊|value| + rounding⌋).
"""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

import numpy as np

from kvstore.errors import ConfigError
from kvstore.rope import RotarySpec

from .kvt_reference import ABSENT, LARGEST, Float32, UInt8, UInt16, UInt32, split
from .profile import Profile
from .rans import Distributions

__all__ = ["Layer", "Level", "Side", "Tables", "tables_of"]

MAX_LEVELS = 8
_HUGE = 1e30  # of elements of an inverse: beyond it fp32 does not hold what is computed
NAME = "kvt"


NEAR = 16
"""Indices from -16 to 15 are looked up by the encoder."""

NONE = 0xFFFFFFFF


class Level(NamedTuple):
    """A level of a layer. Names and shapes as in `kvt_reference`; the last three are for the loops of `kvt_native`.

    Attributes:
        codes: uint32 `[n * 32]`: where in `Distributions.reciprocals` the symbol is that an index from -16 to 15 gets
            in its class; `NONE` if it is an escape.
        kinds: uint32 `[n]`: the class of a new channel, `NONE` for the others.
        bounds: uint32 `[n * 4]`, of refined channels by what is known (0, 1, more): where the symbols 1 (bits 0-15) and
            2 (16-31) begin.
    """

    live: UInt16
    before: UInt8
    after: UInt8
    classes: UInt16
    centres: Float32
    scale: Float32
    codes: UInt32
    kinds: UInt32
    bounds: UInt32

    @classmethod
    def of(
        cls, live: UInt16, before: UInt8, after: UInt8, classes: UInt16, centres: Float32, scale: Float32,
        distributions: Distributions,
    ) -> Level:  # fmt: skip
        """With what follows from the rest."""
        fresh = before == ABSENT
        codable = (distributions.frequencies > 0).astype(np.uint8)
        some = np.broadcast_to(np.arange(-NEAR, NEAR, dtype=np.int8)[:, None], (2 * NEAR, len(live)))
        symbols, kinds = np.empty(some.shape, np.uint8), np.empty(some.shape, np.uint16)
        split(some, np.arange(len(live), dtype=np.uint16), before, after, classes, codable, kinds, symbols)
        codes = (kinds.astype(np.uint32) * np.uint32(distributions.symbols) + symbols) * np.uint32(2)
        codes[(symbols == 0) & fresh] = NONE
        bounds = np.zeros((len(live), 4), np.uint32)
        ends = np.cumsum(distributions.frequencies[:, :2], axis=1, dtype=np.uint32)[classes]
        bounds[:, :3] = ends[..., 0] | ends[..., 1] << np.uint32(16)
        own = np.where(fresh, classes[:, 0].astype(np.uint32), np.uint32(NONE))
        return cls(
            live, before, after, classes, centres, scale, np.ascontiguousarray(codes.T).reshape(-1), own,
            bounds.reshape(-1),
        )  # fmt: skip


class Side(NamedTuple):
    """K or V of a layer.

    Attributes:
        basis: float32 `[heads, width, width]`, from steps to values.
        inverse: float32 `[heads, width, width]`, from values to steps.
        reach: no decoded value is larger, rotated or not.
    """

    basis: Float32
    inverse: Float32
    reach: float


class Layer(NamedTuple):
    """A layer: K, V, their means in steps, float32 `[channels]`, and the levels."""

    k: Side
    v: Side
    offset: Float32
    levels: tuple[Level, ...]


class Tables:
    """A profile of kvt, checked. Immutable, but for layers that are laid out when they are first asked for.

    Raises:
        ConfigError: the profile is not one of kvt; says why.
    """

    def __init__(self, profile: Profile) -> None:
        if profile.codec != NAME:
            raise ConfigError(f"{profile} is not for codec {NAME!r}")
        layout = self.layout = profile.layout
        if layout.kind != "kv":
            raise ConfigError(f"codec 'kvt' codes K and V per head, not the {layout.kind!r} layout of {profile}")
        self.profile = profile
        self.rotary = None if profile.rotary is None else RotarySpec.from_text(profile.rotary)
        if self.rotary is not None and self.rotary.head_dim != layout.head_dim:
            raise ConfigError(f"{profile} rotates {self.rotary.head_dim} elements of heads of {layout.head_dim}")
        self.sinks = self._count("sinks")
        self.raw_last = self._count("raw_last")
        rounding = profile.parameters.get("rounding")
        if not isinstance(rounding, float) or not 0 < rounding <= 1:
            raise ConfigError(f"parameter 'rounding' of {profile} is a number above 0 and up to 1, not {rounding!r}")
        self.rounding = rounding
        layers, heads = layout.num_layers, layout.num_kv_heads
        self.widths = layout.head_dim, layout.v_head_dim or 0
        self.key_channels = heads * self.widths[0]
        self.channels = layout.elements_per_token
        if not self.widths[1] or self.channels > 1 << 16:
            raise ConfigError(
                f"codec 'kvt' codes K and V of up to 65536 values per token, not {self.channels} of {profile}"
            )
        for name, width in zip("kv", self.widths, strict=True):
            profile.array(f"{name}_basis", "<f4", (layers, heads, width, width))
            profile.array(f"{name}_mean", "<f4", (layers, heads, width))
        self._shifts = profile.array("shifts", "u1", (None, layers, self.channels))
        self.levels = len(self._shifts)
        if not 1 <= self.levels <= MAX_LEVELS:
            raise ConfigError(f"{profile} has {self.levels} levels; 1 to {MAX_LEVELS} are possible")
        self._classes = profile.array("classes", "<u2", (self.levels, layers, self.channels, 3))
        self._centres = profile.array("centres", "<f4", (self.levels, layers, self.channels, 3))
        self.distributions = Distributions(profile.array("frequencies", "<u2", (None, None)))
        self.codable: UInt8 = (self.distributions.frequencies > 0).astype(np.uint8)
        self._check()
        self._layers: dict[int, Layer] = {}

    def _count(self, name: str) -> int:
        value = self.profile.parameters.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= 1 << 20:
            raise ConfigError(f"parameter {name!r} of {self.profile} is a number of tokens, not {value!r}")
        return value

    def _check(self) -> None:
        """Whatever an entropy-coded stream may say by these tables, is an index that a channel may have."""

        def refuse(what: str) -> None:
            raise ConfigError(f"{self.profile} is inconsistent: {what}")

        alphabet = self.distributions.symbols
        if alphabet % 2 or alphabet < 4:
            refuse(f"{alphabet} symbols, where an even number from 4 on is needed")
        middle = alphabet // 2
        # Per class: the largest value of a new channel, and the number of symbols of a known one.
        distance = np.where(self.codable[:, 1:], np.abs(np.arange(1, alphabet) - middle), 0).max(1)
        length = np.where(self.codable, np.arange(1, alphabet + 1), 0).max(1)
        before = np.full_like(self._shifts[0], ABSENT)
        for after, classes in zip(self._shifts, self._classes, strict=True):
            live = after != before
            fresh, grown = live & (before == ABSENT), live & (before != ABSENT)
            if (after[fresh] > 7).any() or (after[grown] != before[grown] - 1).any():
                refuse("a level refines a channel by more than a bit, or by less than none")
            if live.any() and int(classes[live].max()) >= self.distributions.classes:
                refuse("a channel has a class that there is not")
            own = classes[fresh][:, 0]
            if (distance[own] > LARGEST >> after[fresh]).any() or not self.codable[own, 0].all():
                refuse("a new channel's class has values that are too large, or no escape")
            if (length[classes[grown]] > (3, 2, 2)).any():
                refuse("a refined channel's class has too many symbols")
            if not self.codable[classes[grown], :2].all() or not self.codable[classes[grown][:, 0], 2].all():
                refuse("a refined channel's class lacks a symbol")
            before = after
        if before.any():
            refuse("the last level does not end at shift 0 everywhere")
        if (self._centres < 0).any():
            refuse("a centre is negative")

    def layer(self, number: int) -> Layer:
        """Layer `number`. Raises `ConfigError` if there is none."""
        found = self._layers.get(number)
        if found is None:
            if not 0 <= number < self.layout.num_layers:
                raise ConfigError(f"{self.profile} has {self.layout.num_layers} layers, not a layer {number}")
            found = self._layers.setdefault(number, self._lay_out(number))
        return found

    def _lay_out(self, number: int) -> Layer:
        levels = []
        before = np.full(self.channels, ABSENT, np.uint8)
        for after, classes, given in zip(self._shifts, self._classes, self._centres, strict=True):
            now = after[number]
            live = np.flatnonzero(now != before).astype(np.uint16)
            centres = np.ascontiguousarray(given[number].T, np.float32)
            scale = np.where(now == ABSENT, 0, 1 << np.minimum(now, 7).astype(np.int64)).astype(np.float32)
            before_live, now_live, own = before[live], now[live], np.ascontiguousarray(classes[number, live])
            levels.append(Level.of(live, before_live, now_live, own, centres, scale, self.distributions))
            before = now
        (k, offset_k), (v, offset_v) = self._side("k", number), self._side("v", number)
        return Layer(k, v, np.concatenate((offset_k, offset_v)), tuple(levels))

    def _side(self, name: str, number: int) -> tuple[Side, Float32]:
        """K or V, and its mean in steps."""
        arrays = self.profile.arrays
        basis = np.ascontiguousarray(arrays[f"{name}_basis"][number], np.float32)
        mean = arrays[f"{name}_mean"][number].astype(np.float64)
        try:
            inverse = np.linalg.inv(basis.astype(np.float64))
        except np.linalg.LinAlgError as error:
            raise ConfigError(f"array {name + '_basis'!r} of {self.profile} has no inverse", cause=error) from error
        offset = np.einsum("hd,hde->he", mean, inverse)
        largest = float(self._centres.max(initial=0)) + LARGEST + 1  # in steps
        reach = largest * np.abs(basis).astype(np.float64).sum(1).max() + np.abs(mean).max()
        if self.rotary is not None:
            reach *= 1.5 * max(1.0, self.rotary.magnitude)  # a pair of elements may become one of √2 times the size
        if not (np.abs(inverse).max() < _HUGE and np.abs(offset).max() < _HUGE):  # nor nan
            raise ConfigError(f"array {name + '_basis'!r} of {self.profile} has no inverse")
        side = Side(basis, inverse.astype(np.float32), float(reach))
        return side, offset.astype(np.float32).reshape(-1)


_lock = threading.Lock()
_known: dict[str, Tables] = {}


def tables_of(profile: Profile) -> Tables:
    """The tables of a profile: made once, kept for ever, as registered profiles are."""
    found: Any = _known.get(profile.id)
    if found is None or found.profile != profile:
        made = Tables(profile)
        with _lock:
            found = _known.setdefault(profile.id, made)
        if found.profile != profile:
            raise ConfigError(f"two profiles have the id {profile.id}: {found.profile.model} and {profile.model}")
    tables: Tables = found
    return tables
