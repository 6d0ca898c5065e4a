"""A rotation by a table: the loops over arrays and tensors behind `kvstore.rope`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from .errors import ConfigError

if TYPE_CHECKING:
    from .rope import RotarySpec

__all__ = ["Floats", "Rotation"]

_BLOCK_BYTES = 1 << 18  # of an array, rotated at a time: the temporaries stay in the cache

Array = TypeVar("Array")
Floats = np.ndarray[Any, np.dtype[np.float32]]


class Rotation:
    """A rotation by a table: made once for some positions, used for all layers. Thread-safe.

    Attributes:
        spec: whose.
        cos, sin: fp32 `[..., tokens, rotary_dim / 2]`.
        plain: it changes nothing.
    """

    __slots__ = ("_begin", "_tensors", "cos", "plain", "sin", "spec")

    def __init__(self, spec: RotarySpec, cos: Floats, sin: Floats, *, plain: bool = False) -> None:
        self.spec = spec
        self.cos = cos
        self.sin = sin
        self.plain = plain
        self._begin = 0  # in the rotation that it is a part of
        self._tensors = _Tensors(cos, sin)

    @classmethod
    def _of(cls, spec: RotarySpec, angles: np.ndarray[Any, np.dtype[np.float64]], magnitude: float) -> Rotation:
        # sin and cos in fp64, of angles in fp32: exact to the last bit of fp32, at any angle.
        cos, sin = np.cos(angles), np.sin(angles)
        if magnitude != 1:
            cos *= magnitude
            sin *= magnitude
        plain = magnitude == 1 and not angles.any()
        return cls(spec, cos.astype(np.float32), sin.astype(np.float32), plain=plain)

    @property
    def tokens(self) -> int:
        return int(self.cos.shape[-2])

    def part(self, begin: int, end: int) -> Rotation:
        """The rotation of tokens `begin` to `end - 1`, without a copy."""
        if not 0 <= begin <= end <= self.tokens:
            raise ConfigError(f"the rotation has {self.tokens} tokens; {begin} to {end} are not among them")
        part = Rotation(self.spec, self.cos[..., begin:end, :], self.sin[..., begin:end, :], plain=self.plain)
        part._begin, part._tensors = self._begin + begin, self._tensors
        return part

    def __call__(self, k: Array, *, out: Array | None = None) -> Array:
        """Rotate `k`; arguments and errors as in `RotarySpec.apply`. Reads `k` once and writes `out` once."""
        tensor = hasattr(k, "detach")
        array: Any = k
        target: Any = out
        if not tensor and not isinstance(array, np.ndarray):
            raise ConfigError(f"K must be a numpy array or a torch tensor, not {type(k).__name__}")
        self._check(array, "K")
        if target is None:
            target = array.new_empty(array.shape) if tensor else np.empty(array.shape, array.dtype)
        elif type(target) is not type(array) and (tensor is not hasattr(target, "detach")):
            raise ConfigError(f"K is a {type(k).__name__}, but the output a {type(out).__name__}")
        elif tuple(target.shape) != tuple(array.shape):
            raise ConfigError(f"the output has shape {tuple(target.shape)}, K {tuple(array.shape)}")
        else:
            self._check(target, "the output")
            if not tensor and not target.flags.writeable:
                raise ConfigError("the output is read-only")
        if self.plain:
            if target is not array:
                _copy(array, target)
        elif not tensor:
            self._rotate_blocks(array, target, self.cos[..., None, :], self.sin[..., None, :], self._rotate)
        elif array.device.type == "cpu":
            self._rotate_blocks(array, target, *self._on(array.device), self._rotate_tensor)
        else:  # a kernel over everything
            self._rotate_tensor(array, target, *self._on(array.device))
        done: Array = target
        return done

    def _check(self, k: Any, what: str) -> None:
        head_dim, tokens = self.spec.head_dim, self.tokens
        if k.ndim < 3 or k.shape[-1] != head_dim or k.shape[-3] != tokens:
            raise ConfigError(f"{what} has shape {tuple(k.shape)} instead of [..., {tokens} tokens, heads, {head_dim}]")
        if str(k.dtype).removeprefix("torch.") not in ("float32", "float16", "bfloat16"):
            raise ConfigError(f"{what} is {k.dtype}; float32, float16 and (torch) bfloat16 can be rotated")
        leading, given = self.cos.shape[:-2], tuple(k.shape[:-3])
        if leading:
            try:
                fits = np.broadcast_shapes(leading, given) == given
            except ValueError:
                fits = False
            if not fits:
                raise ConfigError(f"positions {(*leading, tokens)} do not fit {what} of shape {tuple(k.shape)}")

    def _halves(self, k: Any) -> tuple[Any, Any]:
        """Views of the first and of the second elements of all pairs."""
        width = self.spec.width
        if self.spec.layout == "neox":
            return k[..., : width // 2], k[..., width // 2 : width]
        return k[..., 0:width:2], k[..., 1:width:2]

    def _rotate_blocks(self, k: Any, out: Any, cos: Any, sin: Any, rotate: Callable[..., None]) -> None:
        """In blocks along the leading axes (layers, rows, tokens), so that temporaries stay in the cache."""
        step = max(1, _BLOCK_BYTES * len(k) // max(1, k.nbytes))
        own = cos.ndim == k.ndim and cos.shape[0] > 1  # the table has this axis too
        deeper = step == 1 and k.ndim > 3
        for begin in range(0, len(k), step):
            block: Any = begin if deeper else slice(begin, begin + step)
            if own:
                table = cos[block], sin[block]
            else:
                table = (_row(cos, k.ndim), _row(sin, k.ndim)) if deeper else (cos, sin)
            if deeper:
                self._rotate_blocks(k[block], out[block], *table, rotate)
            else:
                rotate(k[block], out[block], *table)

    def _rotate(self, k: Any, out: Any, cos: Any, sin: Any) -> None:
        first, second = (half.astype(np.float32, copy=False) for half in self._halves(k))
        # Both results are made before either is written: `out` may be `k`.
        new_first, new_second = first * cos, second * cos
        new_first -= second * sin
        new_second += first * sin
        a, b = self._halves(out)
        a[...], b[...] = new_first, new_second
        self._copy_rest(k, out)

    def _rotate_tensor(self, k: Any, out: Any, cos: Any, sin: Any) -> None:
        torch: Any = sys.modules["torch"]  # whoever made the tensor has imported it
        with torch.no_grad():
            first, second = (half.float() for half in self._halves(k))
            new_first = torch.mul(first, cos).addcmul_(second, sin, value=-1)
            new_second = torch.mul(second, cos).addcmul_(first, sin)
            a, b = self._halves(out)
            a.copy_(new_first)
            b.copy_(new_second)
            self._copy_rest(k, out)

    def _copy_rest(self, k: Any, out: Any) -> None:
        if self.spec.width < self.spec.head_dim:
            out[..., self.spec.width :] = k[..., self.spec.width :]

    def _on(self, device: Any) -> tuple[Any, Any]:
        """The table on a device, `[..., tokens, 1, rotary_dim / 2]`."""
        tokens = slice(self._begin, self._begin + self.tokens)
        cos, sin = self._tensors.on(device)
        return cos[..., tokens, :, :], sin[..., tokens, :, :]


class _Tensors:
    """A table on devices: of a whole rotation, for it and all its parts, copied to each device once."""

    __slots__ = ("_found", "_tables")

    def __init__(self, cos: Floats, sin: Floats) -> None:
        self._tables = cos, sin
        self._found: dict[Any, tuple[Any, Any]] = {}

    def on(self, device: Any) -> tuple[Any, Any]:
        found = self._found.get(device)
        if found is None:
            torch: Any = sys.modules["torch"]
            cos, sin = (torch.from_numpy(table[..., None, :]).to(device) for table in self._tables)
            found = self._found[device] = (cos, sin)
        return found


def _copy(source: Any, target: Any) -> None:
    if not hasattr(source, "detach"):
        target[...] = source
        return
    torch: Any = sys.modules["torch"]
    with torch.no_grad():
        target.copy_(source)


def _row(table: Any, ndim: int) -> Any:
    """A table for one element of the first axis, which it has not, or has with length 1."""
    return table[0] if table.ndim == ndim else table
