"""What a cachegen profile says, checked: steps and distributions. docs/codec-format.md lists its arrays."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.errors import ConfigError

from .cachegen_reference import ANCHOR_LIMIT
from .profile import Profile
from .rans import Distributions

__all__ = ["FORMAT", "MAGNITUDES", "NAME", "ROPES", "SPLIT", "Level", "Tables", "tables_for", "third_of"]

NAME = "cachegen"
FORMAT = 1
ROPES = ("applied", "none")
SPLIT = 3  # a refinement cuts each step into so many
MAGNITUDES = 4  # contexts of a refinement: the coarse delta is 0, ±1, ±2, or larger
MAX_GROUP = 256
MAX_LEVELS = 16
MAX_LIMIT = 127
_SMALLEST_STEP, _LARGEST_STEP = 2.0**-60, 2.0**60

Classes = npt.NDArray[np.uint16]


def third_of(layer: int, layers: int) -> int:
    """0, 1 or 2: in which third of the layers a layer lies. Part of the format."""
    return 3 * layer // layers


@dataclass(frozen=True)
class Level:
    """One way to quantise the deltas.

    Attributes:
        steps: fp32 `[2, layers]`, of K and V; zeros where each delta vector has a step of its own.
        classes: uint16 `[layers, channels]`: which distribution of its third each channel has.
        distributions: of the three thirds. Of a refinement each class has `MAGNITUDES` of them, over `SPLIT` symbols.
    """

    steps: npt.NDArray[np.float32]
    classes: Classes
    distributions: tuple[Distributions, ...]

    def limit(self, third: int) -> int:
        """Deltas in -limit … limit have a symbol."""
        return int(self.distributions[third].symbols - 2) // 2


@dataclass(frozen=True)
class Tables:
    """A profile, ready to code with.

    Attributes:
        profile: where it is from.
        group: tokens per group.
        rope: how K is stored where it fits: "applied" or "none".
        level: which of the levels is encoded; 0 if they are embedded.
        embedded: each level refines the one before it, and all of them are in one record.
        anchor_classes: uint16 `[layers, channels]`.
        anchors: distributions of anchors.
        levels: coarse to fine.
    """

    profile: Profile
    group: int
    rope: str
    level: int
    embedded: bool
    anchor_classes: Classes
    anchors: Distributions
    levels: tuple[Level, ...]


@functools.lru_cache(maxsize=32)
def tables_for(profile: Profile) -> Tables:
    """Read and check a profile of this codec.

    Raises:
        ConfigError: it is another codec's, or something in it cannot be; names it.
    """
    if profile.codec != NAME:
        raise ConfigError(f"{profile} is not a profile of codec {NAME}")
    asked = profile.parameters
    version = asked.get("format")
    if version != FORMAT:
        raise ConfigError(f"{profile} has format {version!r} of {NAME}; this release has format {FORMAT}")
    rope, embedded = asked.get("rope"), asked.get("embedded")
    if rope not in ROPES or not isinstance(embedded, bool):
        raise ConfigError(f"{profile} does not say whether K is rotated and levels are embedded")
    listed = asked.get("levels")
    if not isinstance(listed, list) or not 1 <= len(listed) <= MAX_LEVELS:
        raise ConfigError(f"{profile} has no list of 1 to {MAX_LEVELS} levels")
    anchors = _distributions(profile, "anchor.frequencies", 2 * ANCHOR_LIMIT + 1)
    return Tables(
        profile,
        group=_integer(profile, "group", 2, MAX_GROUP),
        rope=rope,
        level=0 if embedded else _integer(profile, "level", 0, len(listed) - 1),
        embedded=embedded,
        anchor_classes=_classes(profile, "anchor.classes", (anchors,) * 3, 1),
        anchors=anchors,
        levels=tuple(
            _level(profile, number, own_steps="bits" in _map(profile, each), refines=embedded and number > 0)
            for number, each in enumerate(listed)
        ),
    )


def _map(profile: Profile, level: Any) -> dict[str, Any]:
    if not isinstance(level, dict):
        raise ConfigError(f"a level of {profile} is no map")
    return level


def _integer(profile: Profile, name: str, least: int, most: int) -> int:
    value = profile.parameters.get(name)
    if type(value) is not int or not least <= value <= most:
        raise ConfigError(f"{name} of {profile} must be an integer between {least} and {most}, not {value!r}")
    return value


def _level(profile: Profile, number: int, *, own_steps: bool, refines: bool) -> Level:
    if own_steps and (refines or profile.parameters["embedded"]):
        raise ConfigError(f"levels of {profile} cannot be embedded and have bits")
    name = f"level.{number}"
    symbols = SPLIT if refines else None
    thirds = tuple(_distributions(profile, f"{name}.frequencies.{third}", symbols) for third in range(3))
    steps = profile.array(f"{name}.steps", np.float32, (2, profile.layout.num_layers))
    good = not steps.any() if own_steps else ((steps >= _SMALLEST_STEP) & (steps <= _LARGEST_STEP)).all()
    if not good:
        raise ConfigError(f"level {number} of {profile} has an impossible step")
    return Level(steps, _classes(profile, f"{name}.classes", thirds, MAGNITUDES if refines else 1), thirds)


def _distributions(profile: Profile, name: str, symbols: int | None) -> Distributions:
    found = profile.array(name, np.uint16, (None, symbols))
    if not found.size or not found.all():
        raise ConfigError(f"{name} of {profile} has a symbol that cannot be coded")
    made = Distributions(found)
    if symbols is None and not (made.symbols % 2 == 0 and 4 <= made.symbols <= 2 * MAX_LIMIT + 2):
        raise ConfigError(f"{name} of {profile} has {made.symbols} symbols; an even number of 4 to 256 is possible")
    return made


def _classes(profile: Profile, name: str, thirds: tuple[Distributions, ...], each: int) -> Classes:
    layers = profile.layout.num_layers
    found: Classes = profile.array(name, np.uint16, (layers, profile.layout.elements_per_token))
    for layer in range(layers):
        if (int(found[layer].max()) + 1) * each > thirds[third_of(layer, layers)].classes:
            raise ConfigError(f"{name} of {profile} names a distribution that is not there")
    return found
