"""The `kvstore-bench` command. A subcommand is one module with `add_arguments(parser)` and `run(args) -> int`.

Exit status: 0 all verified · 1 something failed or came back wrong · 2 the command line, a URL or the environment
makes no sense (one sentence on standard error) · 130 interrupted (Ctrl-C) · 143 ended by SIGTERM.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import signal
import sys
from collections.abc import Sequence

from kvstore import __version__
from kvstore.errors import KVStoreError

__all__ = ["SUBCOMMANDS", "main"]

SUBCOMMANDS: dict[str, tuple[str, str]] = {
    "io": ("kvstore_bench.io", "put and get of records of many sizes, next to memcpy and raw files"),
    "layers": ("kvstore_bench.layers", "layer by layer loading against the formula and against sequential loading"),
    "tiers": ("kvstore_bench.tiers", "hit rates and seconds saved of tier policies on a trace"),
    "codec": ("kvstore_bench.codec", "size, speed and quality of the codecs"),
    "stream": ("kvstore_bench.stream", "streaming against an SLO on changing links"),
    "blend": ("kvstore_bench.blend", "quality and cost of reusing chunks out of place"),
    "compare": ("kvstore_bench.compare", "the same work through a peer"),
    "transports": ("kvstore_bench.transports", "the transports between nodes"),
}
"""Subcommand → module and one line of help. One whose module is not there is not offered."""


def _available() -> dict[str, tuple[str, str]]:
    return {name: entry for name, entry in SUBCOMMANDS.items() if importlib.util.find_spec(entry[0]) is not None}


def _parser(chosen: str | None) -> argparse.ArgumentParser:
    """The parser; only the module of the chosen subcommand is imported."""
    parser = argparse.ArgumentParser(
        prog="kvstore-bench",
        description="Measures kvstore against the ceiling of the same machine, in the same run.",
        epilog="'kvstore-bench SUBCOMMAND --help' shows the options of one.",
    )
    parser.add_argument("--version", action="version", version=f"kvstore-bench {__version__}")
    commands = parser.add_subparsers(dest="subcommand", metavar="SUBCOMMAND", required=True)
    for name, (module, line) in _available().items():
        sub = commands.add_parser(name, help=line, description=line[0].upper() + line[1:] + ".")
        if name == chosen:
            importlib.import_module(module).add_arguments(sub)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    chosen = next((word for word in words if not word.startswith("-")), None)
    parser = _parser(chosen)
    try:
        args = parser.parse_args(words)
    except SystemExit as stop:  # argparse has printed its sentence, or the help
        return int(stop.code or 0)
    previous = signal.signal(signal.SIGTERM, _terminated)
    try:
        status: int = importlib.import_module(SUBCOMMANDS[args.subcommand][0]).run(args)
        sys.stdout.flush()
        return status
    except KVStoreError as error:
        return _complain(str(error))
    except BrokenPipeError:  # the reader of standard output has gone (`| head`)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        return _complain(f"{error.filename + ': ' if error.filename else ''}{error.strerror or error}")
    except KeyboardInterrupt as stop:
        ended = isinstance(stop, _Terminated)
        print(
            f"kvstore-bench: {'terminated' if ended else 'interrupted'}; what it had put is deleted again",
            file=sys.stderr,
        )
        return 128 + (signal.SIGTERM if ended else signal.SIGINT)
    finally:
        signal.signal(signal.SIGTERM, previous)


class _Terminated(KeyboardInterrupt):
    """SIGTERM: everything is cleaned up as after Ctrl-C."""


def _terminated(*_: object) -> None:
    raise _Terminated


def _complain(message: str) -> int:
    print(f"kvstore-bench: {message}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
