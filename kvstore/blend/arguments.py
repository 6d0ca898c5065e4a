"""What `Blender` was given, checked: options, the parts of a prompt, documents, numbers."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from kvstore.config import OPTIONS, Config
from kvstore.errors import ConfigError
from kvstore.options import unknown_option

from .chunks import Part

__all__ = ["as_documents", "as_parts", "blend_config", "number"]

_OPTIONS = tuple(option.name for option in OPTIONS if option.name.startswith(("blend_", "enable_blending")))


def blend_config(own: Config, given: Config | Mapping[str, object] | None) -> Config:
    """The options that apply. Raises `ConfigError` if blending is off, or an option is none of blending's."""
    if given is None:
        config = own
    elif isinstance(given, Config):
        config = given
    elif isinstance(given, Mapping):
        for name in given:
            if name not in _OPTIONS:
                raise ConfigError(unknown_option(name, _OPTIONS, where="blending"))
        config = replace(own, **{str(name): value for name, value in given.items()})  # type: ignore[arg-type]
    else:
        raise ConfigError(f"config must be a Config or a map of options, not {type(given).__name__}")
    if not config.enable_blending:
        raise ConfigError(
            "blending is off, since what is computed over blended chunks is not equal to a full prefill; switch it on "
            "with the option enable_blending"
        )
    return config


def as_parts(given: Any) -> Sequence[object]:
    """The parts of a prompt given as a list, or as one text or one row of ids."""
    if isinstance(given, str) or hasattr(given, "detach") or isinstance(given, np.ndarray):
        return [given]
    if not isinstance(given, Sequence) or isinstance(given, bytes):
        raise ConfigError(f"a prompt is a list of parts, a text or token ids, not a {type(given).__name__}")
    if given and all(isinstance(each, int | np.integer) for each in given):
        return [given]
    return given


def as_documents(given: Any) -> Iterable[Part]:
    """Documents given as a list. Raises `ConfigError` for one text, or what is no list."""
    if isinstance(given, str):
        raise ConfigError("precompute takes a list of documents, not one text")
    if not isinstance(given, Iterable) or isinstance(given, Mapping):
        raise ConfigError(f"precompute takes a list of documents, not a {type(given).__name__}")
    return given


def number(name: str, value: Any, *, above: float = -math.inf) -> float:
    """A number above something, as a float; nan is none. Raises `ConfigError`, which names it."""
    kinds = int | float | np.integer | np.floating
    if isinstance(value, bool) or not isinstance(value, kinds) or math.isnan(value):
        raise ConfigError(f"{name}={reprlib.repr(value)} is not a number")
    if not value > above:
        raise ConfigError(f"{name}={value} must be above {above:g}")
    return float(value)
