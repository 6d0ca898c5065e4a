"""Rotary position embeddings: the only code that rotates, un-rotates or moves K.

    spec = RotarySpec.from_config(model.config)
    plain = spec.undo(k, positions)             # K as it was before the embedding
    k = spec.apply(plain, positions)            # and after it
    k = spec.move(k, positions, others)         # one rotation by the difference

K is `[..., tokens, heads, head_dim]`, a numpy array or a torch tensor on any device (torch is not imported here). A
pair of elements is turned by the angle position · frequency: elements i and i + rotary_dim/2 of a head in the layout
"neox" (half-split: Llama, Qwen2, Mistral), 2i and 2i + 1 in "interleaved" (GLM, Cohere, GPT-J). Elements from
`rotary_dim` on are left alone.

Frequencies, with d = rotary_dim, i = 0, 1, …, d/2 − 1, and f_i = theta^(−2i/d):

    default   f_i
    linear    f_i / factor
    llama3    by wavelength w = 2π / f_i and N = original_max_position_embeddings: f_i below N / high_freq_factor,
              f_i / factor above N / low_freq_factor, between them mixed in proportion to N / w
    yarn      mixed from f_i / factor and f_i by a ramp over i, between the numbers of turns beta_slow and beta_fast
              within N tokens; and K is longer by attention_factor (undo divides by it, move leaves it)

"dynamic" and "longrope" depend on the length of the prompt, so that K stored by one prompt is not the K of another:
they are refused, and so is whatever is not in this list.

Arithmetic is fp32: an angle is rounded to fp32, as models do it, so that what a model embedded is undone to rounding
errors at any position. fp16 and bf16 are rounded once, when they are written: |error| ≤ u · ‖pair‖ for one call, and
≤ 2 · u · ‖pair‖ for undo, storing and apply, where u = 2^-8 (bf16) or 2^-11 (fp16) and ‖pair‖ is the length of the
pair (and for both 2^-22 · ‖pair‖ for the fp32 arithmetic, and the smallest subnormal).
"""

from __future__ import annotations

import functools
import json
import math
import reprlib
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

import numpy as np

from ._rotation import Floats, Rotation
from .errors import ConfigError

__all__ = ["LAYOUTS", "SCALINGS", "RotarySpec", "Rotation"]

LAYOUTS = ("neox", "interleaved")
SCALINGS = ("default", "linear", "llama3", "yarn")
_LENGTH_DEPENDENT = ("dynamic", "longrope", "su")  # "su": the old name of longrope

MAX_POSITION = 1 << 24
"""Positions from here on are not exact in fp32, in which models compute angles."""

_MAX_INTEGER = {"head_dim": 1 << 16, "rotary_dim": 1 << 16, "original_max_position_embeddings": 1 << 30}
_SMALLEST, _LARGEST = 1e-30, 1e30  # of other numbers: fp32 holds what is computed of them

_MAX_TEXT = 4096
_FREQUENCY_TOLERANCE = 1e-6  # relative: pow() in fp32 differs between libraries by a few units in the last place

WANTED: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
}
YARN_DEFAULTS: dict[str, Any] = {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": True}
_SCALING_FIELDS = (
    "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings", "attention_factor",
    "beta_fast", "beta_slow", "truncate",
)  # fmt: skip

Array = TypeVar("Array")


@dataclass(frozen=True)
class RotarySpec:
    """The rotary parameters of a model. Equal specs rotate alike.

    Attributes:
        head_dim: elements of K per head.
        theta: base of the frequencies.
        rotary_dim: leading elements of a head that are rotated, an even number; None means all.
        layout: "neox" or "interleaved", see above.
        scaling: one of `SCALINGS`.
        factor: of linear, llama3 and yarn; ≥ 1.
        low_freq_factor, high_freq_factor: of llama3.
        original_max_position_embeddings: of llama3 and yarn, in tokens.
        attention_factor: of yarn, > 0; None means 0.1 · ln(factor) + 1, as in its paper (arXiv 2309.00071).
        beta_fast, beta_slow, truncate: of yarn; None means 32, 1, True.

    Raises:
        ConfigError: a number is missing, impossible, or not one of this scaling; an unknown layout or scaling.
    """

    head_dim: int
    theta: float = 10_000.0
    rotary_dim: int | None = None
    layout: str = "neox"
    scaling: str = "default"
    factor: float | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    original_max_position_embeddings: int | None = None
    attention_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    truncate: bool | None = None
    _table: bytes | None = field(default=None, repr=False, compare=False, kw_only=True)

    def __post_init__(self) -> None:
        if self.scaling in _LENGTH_DEPENDENT:
            raise ConfigError(
                f"{self.scaling} rotary embeddings cannot be moved: their frequencies depend on the prompt's length"
            )
        if self.scaling not in SCALINGS:
            raise ConfigError(
                f"rotary scaling {reprlib.repr(self.scaling)} is not supported; use {', '.join(SCALINGS)}"
            )
        if self.layout not in LAYOUTS:
            raise ConfigError(f"rotary layout {reprlib.repr(self.layout)} is not known; use {' or '.join(LAYOUTS)}")
        if self.rotary_dim is None:
            object.__setattr__(self, "rotary_dim", self.head_dim)
        for name in _MAX_INTEGER:
            self._check_integer(name)
        if self.width % 2 or self.width > self.head_dim:
            raise ConfigError(f"rotary_dim={self.width} must be even and at most head_dim={self.head_dim}")
        if self.theta is None:
            raise ConfigError("rotary theta=None must be a number")
        self._check_number("theta", above=1.0)
        wanted = WANTED[self.scaling]
        if self.scaling == "yarn":
            for name, default in YARN_DEFAULTS.items():
                if getattr(self, name) is None:
                    object.__setattr__(self, name, default)
            if self.attention_factor is None and self.factor is not None:
                self._check_number("factor", least=1.0)
                object.__setattr__(self, "attention_factor", yarn_magnitude(self.factor))
            wanted = (*wanted, *YARN_DEFAULTS, "attention_factor")
        for name in _SCALING_FIELDS:
            value = getattr(self, name)
            if value is None and name in wanted:
                raise ConfigError(f"rotary scaling {self.scaling} needs {name}")
            if value is not None and name not in wanted:
                raise ConfigError(f"rotary scaling {self.scaling} has no {name}")
        self._check_number("factor", least=1.0)
        for name in ("low_freq_factor", "high_freq_factor", "attention_factor", "beta_fast", "beta_slow"):
            self._check_number(name, above=0.0)
        if self.truncate is not None and not isinstance(self.truncate, bool):
            raise ConfigError(f"rotary truncate={self.truncate!r} must be true or false")
        if self.scaling == "llama3" and _number(self.high_freq_factor) <= _number(self.low_freq_factor):
            raise ConfigError(
                f"rotary high_freq_factor={self.high_freq_factor} must exceed low_freq_factor={self.low_freq_factor}"
            )
        if self.scaling == "yarn" and _number(self.beta_fast) < _number(self.beta_slow):
            raise ConfigError(f"rotary beta_fast={self.beta_fast} is below beta_slow={self.beta_slow}")

    def _check_integer(self, name: str) -> None:
        value = getattr(self, name)
        if value is None and name != "head_dim":
            return
        most = _MAX_INTEGER[name]
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
            raise ConfigError(f"rotary {name}={reprlib.repr(value)} must be an integer between 1 and {most}")

    def _check_number(self, name: str, *, least: float = -math.inf, above: float = -math.inf) -> None:
        """Make it a float: 1e5 and 100000 describe the same spec."""
        value = getattr(self, name)
        if value is None:
            return
        shown = reprlib.repr(value)
        if not isinstance(value, int | float) or isinstance(value, bool) or not -_LARGEST <= value <= _LARGEST:
            raise ConfigError(f"rotary {name}={shown} must be a finite number of at most {_LARGEST:g}")
        if value < least or value <= above:
            raise ConfigError(f"rotary {name}={shown} must be {f'≥ {least:g}' if value < least else f'> {above:g}'}")
        if value < _SMALLEST:
            raise ConfigError(f"rotary {name}={shown} must be at least {_SMALLEST:g}")
        object.__setattr__(self, name, float(value))

    @property
    def width(self) -> int:
        """Elements per head that are rotated."""
        return self.head_dim if self.rotary_dim is None else self.rotary_dim

    @property
    def magnitude(self) -> float:
        """By what the embedding makes K longer: yarn's attention factor, else 1."""
        return 1.0 if self.attention_factor is None else self.attention_factor

    # Where a spec comes from.

    @classmethod
    def from_config(cls, config: Any, *, layout: str | None = None) -> RotarySpec:
        """The spec of a transformers model.

        Args:
            config: its configuration, as an object (of any version: `rope_parameters`, or `rope_theta` and
                `rope_scaling`) or as the mapping in a config.json. Of a model of several parts, its text part is taken.
            layout: how pairs lie, for models that this package does not know.

        Raises:
            ConfigError: the model's embedding is none of `SCALINGS`, differs between layers, or is not known.
        """
        from ._rope_config import rotary_fields

        return cls(**rotary_fields(config, layout))

    @classmethod
    def from_text(cls, text: str) -> RotarySpec:
        """The spec that `text` describes. Raises `ConfigError` if it is no description."""
        names = {f.name for f in fields(cls) if not f.name.startswith("_")}
        try:
            if not isinstance(text, str):
                raise TypeError(f"it is a {type(text).__name__}")
            if len(text) > _MAX_TEXT:
                raise ValueError("it is too long")
            values = json.loads(text)
            if not isinstance(values, dict) or not values.keys() <= names or "head_dim" not in values:
                raise ValueError("it is no map of rotary parameters")
        except (TypeError, ValueError, RecursionError) as error:
            shown = repr(text[:60]) if isinstance(text, str) else reprlib.repr(text)
            raise ConfigError(f"{shown} does not describe a rotary embedding: {error}", cause=error) from error
        return cls(**values)

    @functools.cached_property
    def text(self) -> str:
        """The canonical description, for key contexts and meta blocks: JSON, the same for equal specs everywhere."""
        values = {f.name: getattr(self, f.name) for f in fields(self) if not f.name.startswith("_")}
        return json.dumps(
            {name: value for name, value in values.items() if value is not None}, sort_keys=True, separators=(",", ":")
        )

    def require(self, text: str | None, what: str) -> None:
        """Raises `ConfigError` if `what` was made with other rotary parameters than these, or does not say."""
        if text != self.text:
            raise ConfigError(f"{what} was made with the rotary parameters {text}, not {self.text}")

    # Frequencies.

    @functools.cached_property
    def frequencies(self) -> Floats:
        """Radians per token of each pair, fp32 `[rotary_dim / 2]`, read-only."""
        table: Floats = _frequencies(self) if self._table is None else np.frombuffer(self._table, np.float32)
        table.flags.writeable = False
        return table

    def with_frequencies(self, table: Any) -> RotarySpec:
        """The same spec with a model's own table (its `inv_freq`), which differs from ours in the last digits.

        Raises:
            ConfigError: they differ by more than rounding, so the spec is not this model's.
        """
        own = np.ascontiguousarray(_numpy(table), dtype=np.float32)
        ours = _frequencies(self)
        if own.shape != ours.shape or not np.allclose(own, ours, rtol=_FREQUENCY_TOLERANCE, atol=0):
            raise ConfigError(f"the model's rotary frequencies are not those of {self.text}")
        return replace(self, _table=own.tobytes())

    # Rotations.

    def applying(self, positions: Any) -> Rotation:
        """What embeds K at these positions: integers, `[tokens]` or `[..., tokens]` to go with leading axes of K."""
        return Rotation._of(self, self._angles(positions), self.magnitude)

    def undoing(self, positions: Any) -> Rotation:
        """What takes the embedding at these positions away."""
        return Rotation._of(self, -self._angles(positions), 1 / self.magnitude)

    def moving(self, old: Any, new: Any) -> Rotation:
        """What moves K from its old positions to new ones."""
        before, after = self._angles(old), self._angles(new)
        if before.shape != after.shape:
            raise ConfigError(f"old positions have shape {before.shape[:-1]}, new ones {after.shape[:-1]}")
        return Rotation._of(self, after - before, 1.0)

    def apply(self, k: Array, positions: Any, *, out: Array | None = None) -> Array:
        """K after the rotary embedding.

        Args:
            k: K before it, `[..., tokens, heads, head_dim]`, fp32, fp16 or (torch) bf16. Any strides.
            positions: integers `[tokens]`, or `[..., tokens]` that broadcast with the leading axes of `k`.
            out: where to write, of the shape of `k` and any supported dtype; `k` itself works in place. It must not
                overlap `k` otherwise. None: a new array of the dtype of `k`.

        Returns:
            `out`, or the new array.

        Raises:
            ConfigError: a shape, a dtype or a position does not fit.
        """
        return self.applying(positions)(k, out=out)

    def undo(self, k: Array, positions: Any, *, out: Array | None = None) -> Array:
        """K before the rotary embedding; arguments as in `apply`."""
        return self.undoing(positions)(k, out=out)

    def move(self, k: Array, old: Any, new: Any, *, out: Array | None = None) -> Array:
        """Embedded K moved from its old positions to new ones in one rotation; arguments as in `apply`."""
        return self.moving(old, new)(k, out=out)

    def _angles(self, positions: Any) -> np.ndarray[Any, np.dtype[np.float64]]:
        """`[..., tokens, rotary_dim / 2]`. Rounded to fp32 as the models' own are."""
        where = _positions(positions)
        return (where[..., None].astype(np.float32) * self.frequencies).astype(np.float64)


def _frequencies(spec: RotarySpec) -> Floats:
    # The exponents are rounded to fp32, as models have them, the powers taken in fp64: the same on every machine.
    exponents = (np.arange(0, spec.width, 2, dtype=np.float32) / np.float32(spec.width)).astype(np.float64)
    plain = np.float32(1) / np.power(spec.theta, exponents).astype(np.float32)
    scaled: Floats = np.asarray(_scaled(spec, plain), dtype=np.float32)
    return scaled


def _scaled(spec: RotarySpec, plain: Any) -> Any:
    if spec.scaling == "default":
        return plain
    factor = np.float32(_number(spec.factor))
    if spec.scaling == "linear":
        return plain / factor
    length = _number(spec.original_max_position_embeddings)
    if spec.scaling == "llama3":
        low, high = _number(spec.low_freq_factor), _number(spec.high_freq_factor)
        turns = length * plain.astype(np.float64) / (2 * math.pi)  # within the original length: N / w
        share = np.clip((turns - low) / (high - low), 0, 1)
        return (1 - share) * (plain / factor) + share * plain
    edges = []
    for beta in (_number(spec.beta_fast), _number(spec.beta_slow)):
        edges.append(spec.width * math.log(length / (beta * 2 * math.pi)) / (2 * math.log(spec.theta)))
    low, high = (math.floor(edges[0]), math.ceil(edges[1])) if spec.truncate else edges
    low, high = max(low, 0), min(high, spec.width - 1)
    if low == high:
        high += 0.001
    # In fp32, as models have it: a steep ramp shows every digit.
    ramp = np.clip((np.arange(spec.width // 2, dtype=np.float32) - np.float32(low)) / np.float32(high - low), 0, 1)
    return (plain / factor) * ramp + plain * (1 - ramp)


def yarn_magnitude(factor: float, scale: float = 1.0) -> float:
    """How much longer yarn makes K: 0.1 · scale · ln(factor) + 1."""
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def _number(value: float | None) -> float:
    assert value is not None  # `RotarySpec.__post_init__` saw to it
    return float(value)


def _positions(positions: Any) -> np.ndarray[Any, np.dtype[np.int64]]:
    if isinstance(positions, range):
        if positions and not 0 <= min(positions[0], positions[-1]) <= max(positions[0], positions[-1]) < MAX_POSITION:
            raise _out_of_range(positions[0], positions[-1])
        where = np.arange(positions.start, positions.stop, positions.step)
    elif hasattr(positions, "detach"):
        where = positions.detach().cpu().numpy()
    else:
        try:
            where = np.asarray(positions)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"positions must be integers [..., tokens]: {error}", cause=error) from error
    if where.ndim == 0 or (where.dtype.kind not in "iu" and where.size):
        raise ConfigError(f"positions must be integers [..., tokens], not {where.dtype} {list(where.shape)}")
    if where.size and not 0 <= int(where.min()) <= int(where.max()) < MAX_POSITION:
        raise _out_of_range(where.min(), where.max())
    return where.astype(np.int64)


def _out_of_range(low: Any, high: Any) -> ConfigError:
    return ConfigError(f"positions lie between 0 and 2^24, not at {low} to {high}")


def _numpy(table: Any) -> Any:
    return table.detach().cpu().float().numpy() if hasattr(table, "detach") else np.asarray(table)
