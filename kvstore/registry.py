"""Backends by URL scheme."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["BackendURL"]


@dataclass(frozen=True, slots=True)
class BackendURL:
    """A parsed `scheme://authority/path?option=value`.

    Attributes:
        scheme: lower case.
        authority: host and port as written, percent-decoded; "" if none.
        path: percent-decoded, with its leading slash; "" if none.
        options: the query, percent-decoded; each option at most once.
    """

    scheme: str
    authority: str = ""
    path: str = ""
    options: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        query = "&".join(f"{name}={value}" for name, value in self.options.items())
        return f"{self.scheme}://{self.authority}{self.path}{'?' + query if query else ''}"
