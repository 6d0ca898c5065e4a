"""Where a subcommand's report goes: its table, and `--json` and `--html`."""

from __future__ import annotations

import argparse
import os
import sys
from typing import TextIO

from kvstore.errors import ConfigError

from .report import Report

__all__ = ["prepare_outputs", "table_stream", "write_files", "write_outputs"]


def prepare_outputs(args: argparse.Namespace) -> None:
    """Before minutes of measuring, not after: the folders of `--json` and `--html` are there and can be written to.

    Raises:
        ConfigError: they are not, or both are standard output.
    """
    if args.json == args.html == "-":
        raise ConfigError("--json - and --html - cannot both go to standard output; name a file for one of them")
    for path in (args.json, args.html):
        if not path or path == "-":
            continue
        if os.path.isdir(path):
            raise ConfigError(f"cannot write to {path!r}: it is a folder; name a file")
        folder = os.path.dirname(path) or "."
        try:
            os.makedirs(folder, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"cannot write to {path!r}: its folder is missing and cannot be made: {error.strerror}"
            ) from error
        if not os.access(path if os.path.exists(path) else folder, os.W_OK):
            raise ConfigError(f"cannot write to {path!r}: access is denied")


def table_stream(args: argparse.Namespace) -> TextIO:
    """Where tables are printed: standard output, unless a file was asked for there."""
    return sys.stderr if "-" in (args.json, args.html) else sys.stdout


def write_files(report: Report, args: argparse.Namespace) -> None:
    """`--json` and `--html`, as far as they are given."""
    if args.json:
        report.write_json(args.json)
    if args.html:
        report.write_html(args.html)


def write_outputs(report: Report, args: argparse.Namespace) -> int:
    """The table and the files. Returns the exit status: 0 if the report is `ok`, else 1."""
    report.print_table(table_stream(args))
    write_files(report, args)
    return 0 if report.ok else 1
