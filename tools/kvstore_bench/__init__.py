"""kvstore-bench: measures a store or a backend against the ceiling of the same machine in the same run.

`run_io` is the library entry of `kvstore-bench io`; it is imported when first asked for, so that the command line
starts without numpy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .io import run_io
    from .report import Report

__all__ = ["Report", "run_io"]


def __getattr__(name: str) -> Any:
    if name == "run_io":
        from .io import run_io

        return run_io
    if name == "Report":
        from .report import Report

        return Report
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
