"""A bar on the terminal while it measures."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

__all__ = ["Progress", "Steps", "progress_bar", "telling"]

Progress = Callable[[str, int, int], None]
"""Called with what is measured now, how many rows are done, and how many there are."""


@contextlib.contextmanager
def progress_bar() -> Iterator[Progress | None]:
    """A bar on standard error if that is a terminal, else nothing."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description:<32}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    # Drawn between rows only: a thread that redraws would disturb what is measured.
    with Bar(*columns, console=Console(stderr=True), transient=True, auto_refresh=False) as bar:
        task = bar.add_task("preparing", total=None)

        def show(what: str, done: int, total: int) -> None:
            bar.update(task, completed=done, total=total, description=what or None, refresh=True)

        yield show


def telling(progress: Progress | None, what: str, done: int = 0, total: int = 1) -> Callable[[str], None]:
    """For what takes minutes: says on the bar what is being done, or without a bar in a line on standard error.

    Args:
        what: goes before each sentence.
        done, total: where the bar stands.
    """

    def tell(now: str) -> None:
        if progress is not None:
            progress(f"{what}: {now}", done, total)
        else:
            print(f"kvstore-bench: {what}: {now}", file=sys.stderr, flush=True)

    return tell


class Steps:
    """Counts what is done for the bar, `total` steps in all. Called when a step begins, with what it is."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self.progress, self.total, self.done = progress, total, 0

    def __call__(self, what: str) -> None:
        if self.progress is not None:
            self.progress(what, min(self.done, self.total), self.total)
        self.done += 1
