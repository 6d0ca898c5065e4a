"""Where reports of subcommands go: `--json FILE`, `--html FILE`, a table on standard output."""

from __future__ import annotations

import json
import logging
import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvstore.errors import ConfigError

_WIDEST = 60

__all__ = ["check_targets", "print_table", "quiet", "write_html", "write_json"]


def check_targets(as_json: str, html: str = "") -> None:
    """Before anything is done: files can be written where they are asked for.

    Raises:
        ConfigError: both are standard output, one is a folder, or its folder is not there.
    """
    if as_json == html == "-":
        raise ConfigError("--json - and --html - cannot both go to standard output; name a file for one of them")
    for flag, path in (("json", as_json), ("html", html)):
        if not path or path == "-":
            continue
        if os.path.isdir(path):
            raise ConfigError(f"option {flag!r}: {path} is a folder; name a file")
        if not os.path.isdir(os.path.dirname(path) or "."):
            raise ConfigError(f"option {flag!r}: there is no folder {os.path.dirname(path)}")


@contextmanager
def quiet() -> Iterator[None]:
    """Warnings of the library do not go to standard error: what they say is in the report. Handlers that somebody has
    set up get them all the same."""
    logger, handler = logging.getLogger("kvstore"), logging.NullHandler()
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


def write_json(value: Any, path: str) -> None:
    """One JSON document. Infinity, which JSON does not have, is null. Raises `OSError`."""
    _write(json.dumps(_finite(value), indent=1, ensure_ascii=False, allow_nan=False) + "\n", path)


def write_html(text: str, path: str) -> None:
    """A page. Raises `OSError`."""
    _write(text, path)


def _write(text: str, path: str) -> None:
    if path == "-":
        sys.stdout.write(text)
        sys.stdout.flush()
    else:
        Path(path).write_text(text, encoding="utf-8")


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(name): _finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return value


def print_table(headings: Sequence[str], rows: Sequence[Sequence[str]], *, text: Sequence[int] = (0,)) -> None:
    """Aligned columns, two spaces between them: those in `text` left, the others right."""
    lengths = [[len(line[index]) for line in (headings, *rows)] for index in range(len(headings))]
    # What is longer than most stands out of its column: one long URL does not push all others to the right.
    widths = [max((n for n in column if n <= _WIDEST), default=_WIDEST) for column in lengths]
    for line in (headings, *rows):
        cells = [
            cell.ljust(width) if index in text else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        print("  ".join(cells).rstrip())
