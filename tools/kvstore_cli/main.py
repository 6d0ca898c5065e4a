"""The `kvstore` command. A subcommand is one module with a click command of its name.

Exit status: 0 it did what was asked · 1 something failed · 2 the command line, the configuration or the environment
makes no sense (one sentence on standard error) · 130 interrupted (Ctrl-C).
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from difflib import get_close_matches

import click

from kvstore import __version__
from kvstore.errors import KVStoreError

__all__ = ["COMMANDS", "main"]

COMMANDS: dict[str, str] = {
    "serve": "offer memory and disk of this host to other processes and hosts",
    "plan": "what a KV cache takes, what storing it costs and saves, and which size of terraform/ fits",
    "doctor": "what is wrong with a URL, and what to change",
    "config": "check a configuration file",
    "options": "the manual of the options of a scheme",
    "ls": "list the records of a URL",
    "stat": "what a URL holds, or what records are",
    "verify": "read records again and compare their checksums",
    "rm": "remove records",
    "ctl": "look at and control nodes: lookup, pin, clear, move, route, …; run a controller",
    "cloudwatch": "metrics for CloudWatch, queries of Logs Insights, the daily cost report",
}
"""Subcommand → one line of help. Its module, `kvstore_cli.NAME`, is imported when it is used."""


class _Commands(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        found: click.Command = getattr(importlib.import_module(f"{__package__}.{cmd_name}"), cmd_name)
        return found

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:  # fmt: skip
        if args[0] not in COMMANDS and (near := get_close_matches(args[0], COMMANDS, n=1)):
            ctx.fail(f"No such command {args[0]!r}. Did you mean {near[0]!r}?")
        return super().resolve_command(ctx, args)


@click.command(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, message="kvstore %(version)s")
def kvstore() -> None:
    """KV caches of large language models in storage that many nodes share."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        status = kvstore.main(words, prog_name="kvstore", standalone_mode=False)
        return status if isinstance(status, int) else 0
    except click.ClickException as error:
        return _complain(error.format_message().replace("\n", " "))
    except KVStoreError as error:
        return _complain(str(error))
    except click.Abort:
        return 130
    except OSError as error:
        print(f"kvstore: {error.filename + ': ' if error.filename else ''}{error.strerror or error}", file=sys.stderr)
        return 1


def _complain(message: str) -> int:
    print(f"kvstore: {message}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
