"""Typed options: one definition each, next to the code that uses it; the manual is printed from them.

A value may come as text (URL, environment) or as a typed value (YAML, keyword). Sizes and durations carry
units. Anything unknown or ill-typed is a `ConfigError` that names the option and the choices.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from .errors import ConfigError

__all__ = ["Option", "format_manual", "parse_duration", "parse_options", "parse_size", "show_value", "unknown_option"]

_SIZE_UNITS = {
    "": 1, "b": 1,
    "k": 1000, "kb": 1000, "m": 1000**2, "mb": 1000**2, "g": 1000**3, "gb": 1000**3, "t": 1000**4, "tb": 1000**4,
    "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40,
}  # fmt: skip
_DURATION_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_QUANTITY = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?|\.[0-9]+)\s*([a-zA-Z]*)\s*", re.ASCII)
_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})


def parse_size(value: object, *, name: str = "size") -> int:
    """Bytes from `"16MiB"`, `"1.5 GB"`, `4096` or `"4096"`. KB, MB, GB are decimal, KiB, MiB, GiB binary.

    Raises:
        ConfigError: negative, not a size, or an unknown unit; names `name`.
    """
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    if isinstance(value, str) and (match := _QUANTITY.fullmatch(value)):
        factor = _SIZE_UNITS.get(match[2].lower())
        if factor is None:
            raise ConfigError(
                f"option {name!r}: unknown unit {match[2]!r} in {_short(value)}; "
                "use B, KiB, MiB, GiB, TiB, KB, MB, GB or TB"
            )
        number = float(match[1])
        if match[1].isdigit() and math.isfinite(number * factor):
            return int(match[1]) * factor
        if math.isfinite(number * factor) and (factor > 1 or number.is_integer()):
            return round(number * factor)
    raise ConfigError(f"option {name!r}: {_short(value)} is not a size; write for instance 4096, 64KiB or 1.5GiB")


def parse_duration(value: object, *, name: str = "duration") -> float:
    """Seconds from `"200ms"`, `"5s"`, `"2 min"`, or a number (already seconds).

    Raises:
        ConfigError: negative, not a duration, or an unknown unit; names `name`.
    """
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= sys.float_info.max:
        return float(value)
    if isinstance(value, str) and (match := _QUANTITY.fullmatch(value)):
        factor = _DURATION_UNITS.get(match[2].lower() or "s")
        if factor is None:
            raise ConfigError(
                f"option {name!r}: unknown unit {match[2]!r} in {_short(value)}; use us, ms, s, min, h or d"
            )
        if math.isfinite(seconds := float(match[1]) * factor):
            return seconds
    raise ConfigError(f"option {name!r}: {_short(value)} is not a duration; write for instance 200ms, 5s or 2min")


@dataclass(frozen=True, slots=True)
class Option:
    """The definition of one option.

    Attributes:
        kind: "int", "float", "bool", "str", "size" (bytes), "duration" (seconds) or "choice".
        default: typed value, or None for "not set".
        doc: one sentence.
        choices: allowed values of a "choice".
        minimum, maximum: inclusive bounds of numbers (bytes, seconds).
        secret: never taken from a URL and never shown; comes from a file, the environment or a keyword.
    """

    name: str
    kind: str
    default: Any
    doc: str
    choices: tuple[str, ...] = ()
    minimum: float | None = None
    maximum: float | None = None
    secret: bool = False

    def __post_init__(self) -> None:
        if not hasattr(self, f"_parse_{self.kind}"):
            raise TypeError(f"option {self.name!r} is defined with an unknown kind, {self.kind!r}")
        if self.secret and self.kind != "str":
            raise TypeError(f"option {self.name!r}: a secret is text; messages about other kinds show the value")

    def parse(self, value: object) -> Any:
        """The typed value of `value`; None stands for the default.

        Raises:
            ConfigError: names the option, the value (unless secret) and what is allowed.
        """
        if value is None:
            return self.default
        parsed = getattr(self, f"_parse_{self.kind}")(value)
        for bound, wrong, word in ((self.minimum, "below", "at least"), (self.maximum, "above", "at most")):
            if bound is not None and (parsed < bound if wrong == "below" else parsed > bound):
                limit = show_value(self, bound if self.kind == "float" or bound % 1 else int(bound))
                raise ConfigError(
                    f"option {self.name!r}: {self._shown(value)} is out of range; it must be {word} {limit}"
                )
        return parsed

    def _bad(self, value: object, wanted: str) -> ConfigError:
        return ConfigError(f"option {self.name!r}: {self._shown(value)} is not {wanted}")

    def _shown(self, value: object) -> str:
        return "the value" if self.secret else _short(value)

    def _parse_int(self, value: object) -> int:
        if isinstance(value, int) and not isinstance(value, bool):
            return value
        if isinstance(value, str) and re.fullmatch(r"\s*[+-]?[0-9]{1,18}\s*", value, re.ASCII):
            return int(value)
        raise self._bad(value, "an integer")

    def _parse_float(self, value: object) -> float:
        number = math.nan
        plain = not isinstance(value, str) or (value.isascii() and "_" not in value)  # not 1_000, which "int" refuses
        if isinstance(value, int | float | str) and not isinstance(value, bool) and plain:
            try:
                number = float(value)
            except (ValueError, OverflowError):
                pass
        if not math.isfinite(number):
            raise self._bad(value, "a finite number")
        return number

    def _parse_bool(self, value: object) -> bool:
        if isinstance(value, bool):
            return value
        text = str(value).strip().lower() if isinstance(value, str | int) else ""
        if text in _TRUE:
            return True
        if text in _FALSE:
            return False
        raise self._bad(value, "true or false")

    def _parse_str(self, value: object) -> str:
        if isinstance(value, str):
            return value
        raise self._bad(value, "text")

    def _parse_size(self, value: object) -> int:
        return parse_size(value, name=self.name)

    def _parse_duration(self, value: object) -> float:
        return parse_duration(value, name=self.name)

    def _parse_choice(self, value: object) -> str:
        if value is True or value is False:  # YAML reads a bare `on` or `off` as a bool
            value = next((c for c in self.choices if c in (_TRUE if value else _FALSE)), value)
        if isinstance(value, str) and value in self.choices:
            return value
        raise self._bad(value, f"one of {', '.join(self.choices)}")


def parse_options(options: Sequence[Option], given: Mapping[str, object], *, where: str) -> dict[str, Any]:
    """All options with their values, defaults filled in.

    Args:
        where: what the options belong to, for messages ("file://", "the store").

    Raises:
        ConfigError: an unknown name (with the nearest known ones), or a bad value.
    """
    known = {option.name: option for option in options}
    for name in given:
        if name not in known:
            raise ConfigError(unknown_option(name, known, where=where))
    values = {}
    for name, option in known.items():
        value = option.parse(given[name]) if name in given else option.default
        values[name] = value
    return values


def unknown_option(name: object, known: Iterable[str], *, where: str) -> str:
    """The sentence for an unknown option name (which YAML may have read as something other than text)."""
    known = sorted(known)
    near = get_close_matches(str(name), known, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return f"unknown option {name!r} for {where}; {hint}known options: {', '.join(known) or 'none'}"


def format_manual(options: Sequence[Option]) -> str:
    """The options as a Markdown table: name, type, default, meaning."""
    lines = ["| option | type | default | meaning |", "|---|---|---|---|"]
    for option in options:
        kind = " \\| ".join(option.choices) if option.kind == "choice" else option.kind
        default = "—" if option.default is None or option.secret else show_value(option, option.default)
        doc = (option.doc + " (secret)" * option.secret).replace("|", "\\|")
        lines.append(f"| `{option.name}` | {kind} | {default} | {doc} |")
    return "\n".join(lines)


def show_value(option: Option, value: Any) -> str:
    """A typed value of an option for people, with its unit."""
    if value is None:
        return "—"
    if option.secret:
        return "…"
    if option.kind == "size":
        return _show_size(value)
    if option.kind == "duration":
        return f"{value * 1000:g} ms" if 0 < value < 1 else f"{value:g} s"
    if option.kind == "bool":
        return "true" if value else "false"
    if option.kind in ("paths", "integers", "shares"):
        return ", ".join(map(str, value)) or "—"
    bare = isinstance(value, str) and value == value.strip() != ""
    return f"{value}" if bare or not isinstance(value, str) else f'"{value}"'


_BINARY = (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))
_DECIMAL = (("TB", 10**12), ("GB", 10**9), ("MB", 10**6))


def _show_size(nbytes: int) -> str:
    """In the unit in which it is the smallest whole number (1 GiB, 16 GB, 1500 MiB); where that is still a long one, in
    bytes and, rounded, in the unit that fits best."""
    whole = [(nbytes // factor, unit) for unit, factor in (*_BINARY, *_DECIMAL) if nbytes and nbytes % factor == 0]
    number, unit = min(whole, key=lambda pair: pair[0], default=(nbytes, "B"))
    if number < 100_000:
        return f"{number} {unit}"
    best, factor = next(pair for pair in _BINARY if nbytes >= pair[1])
    return f"{nbytes} B ({nbytes / factor:.4g} {best})"


def _short(value: object) -> str:
    """A value for a message, cut so that it stays one."""
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]}…"
