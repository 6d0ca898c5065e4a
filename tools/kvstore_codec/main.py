"""The `kvstore-codec` command: profiles of the lossy codecs.

    kvstore-codec profile --model FOLDER --texts corpus/ --out model.kvprofile     make one
    kvstore-codec show model.kvprofile                                             what is in it
    kvstore-codec report model.kvprofile --texts held-out/                         what it costs, and what it saves

Exit status: 0 it did what was asked · 1 something failed · 2 the command line makes no sense, or a file or a text is
not what it should be (one sentence on standard error) · 130 interrupted (Ctrl-C).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import click

from kvstore import __version__
from kvstore.errors import KVStoreError

from .profile import profile
from .report import report
from .show import show

__all__ = ["main"]


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, message="kvstore-codec %(version)s")
def kvstore_codec() -> None:
    """Profiles of the lossy codecs: made once per model, from texts; records name them by id."""


for _command in (profile, show, report):
    kvstore_codec.add_command(_command)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        status = kvstore_codec.main(words, prog_name="kvstore-codec", standalone_mode=False)
        return status if isinstance(status, int) else 0
    except click.ClickException as error:
        return _complain(error.format_message().replace("\n", " "))
    except KVStoreError as error:
        return _complain(str(error))
    except (click.Abort, KeyboardInterrupt):
        return 130
    except OSError as error:
        named = f"{error.filename}: " if error.filename else ""
        print(f"kvstore-codec: {named}{error.strerror or error}", file=sys.stderr)
        return 1


def _complain(message: str) -> int:
    print(f"kvstore-codec: {message}", file=sys.stderr)
    return 2
