"""Commands that run until somebody asks for their end."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
from collections.abc import Iterator

__all__ = ["Stop", "stop_on_signals"]

_ASKED = (signal.SIGTERM, signal.SIGINT)


class Stop:
    """Whether a signal has asked for the end. Made by `stop_on_signals`."""

    def __init__(self, woken: int) -> None:
        self._woken = woken
        self.asked = False

    def wait(self, timeout: float | None = None) -> bool:
        """Until one has, or for `timeout` seconds; whether one has. In the main thread."""
        while not self.asked:
            ready, _, _ = select.select([self._woken], [], [], timeout)
            if not ready:
                break
            os.read(self._woken, 64)
        return self.asked


@contextlib.contextmanager
def stop_on_signals() -> Iterator[Stop]:
    """The first SIGTERM or SIGINT asks for the end; a second one, of either kind, ends the process at once. In the end
    the handlers of before are back. Outside the main thread no signal is heard.

    A thread that has just started another one may take a signal from the main thread before that runs again. Python's
    handler then waits for the main thread, which hears nothing of it in a lock: it has to wait for the descriptor to
    which Python writes at each signal, whichever thread has it."""
    woken, wake = os.pipe()
    stop = Stop(woken)

    def ask(number: int, _: object) -> None:
        for each in _ASKED:
            signal.signal(each, signal.SIG_DFL)
        stop.asked = True

    with contextlib.ExitStack() as undo:
        undo.callback(os.close, woken)
        undo.callback(os.close, wake)
        if threading.current_thread() is threading.main_thread():
            os.set_blocking(wake, False)
            undo.callback(signal.set_wakeup_fd, signal.set_wakeup_fd(wake, warn_on_full_buffer=False))
            for number in _ASKED:
                undo.callback(signal.signal, number, signal.signal(number, ask))
        yield stop
