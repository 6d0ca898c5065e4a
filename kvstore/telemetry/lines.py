"""A handler of log lines that never holds up whoever logs: a line is written at once if it is taken, waits if it is not
(a pipe whose reader is slow or stopped), and is dropped and counted beyond that."""

from __future__ import annotations

import logging
import os
import select
import threading
import time
from collections import deque
from typing import IO

from kvstore.metrics import renew_after_fork

__all__ = ["LineHandler"]

_MOST_WAITING = 1 << 20  # bytes
_PIECE = select.PIPE_BUF  # a pipe takes so much at once whenever poll() says that it takes anything
_PATIENCE_S = 0.2
_END_S = 1.0


class LineHandler(logging.Handler):
    """Writes records, a line each, to a stream. How many were lost (nobody reads, or the disk is full) is told in a
    line of its own as soon as one can be written again.

    Args:
        stream: text; one that has a file descriptor is not written to itself, but what it stands for.
    """

    def __init__(self, stream: IO[str]) -> None:
        super().__init__()
        self.stream = stream
        try:
            stream.fileno()
            self._direct = True
        except (OSError, ValueError, AttributeError):  # in memory
            self._direct = False
        self._waiting: deque[bytes] = deque()
        self._size = 0
        self._lost = 0  # lines, from the beginning
        self._told = 0  # how many of them the last notice told of
        self._torn = False  # a line was begun that never will be ended
        self._inside = False  # the last byte that was written is not the end of a line
        self._thread: threading.Thread | None = None
        renew_after_fork(self)

    def _after_fork(self) -> None:
        """The lines that wait are the parent's, and so is the thread. `logging` renews the lock."""
        self._waiting.clear()
        self._size = 0
        self._thread = None

    def emit(self, record: logging.LogRecord) -> None:
        """Write the record's line, or keep it for later, or count it as lost. Never waits, never fails."""
        try:
            line = f"{self.format(record)}\n"
            if self._size + len(line) > _MOST_WAITING:
                self._lost += 1
                return
            if self._lost != self._told:
                line = f"{self.format(self._notice())}\n{line}"
            if self._direct:
                self._keep(line)
                self._told = self._lost
                self._write()
            else:
                self.stream.write(line)
                self.stream.flush()
                self._told = self._lost
        except Exception:  # noqa: BLE001 - there is no place left to tell of it
            self._lost += 1
        if self._waiting and self._thread is None:
            self._thread = threading.Thread(target=self._catch_up, name="kvstore-lines", daemon=True)
            try:
                self._thread.start()
            except RuntimeError:  # the interpreter is about to end
                self._thread = None

    def _notice(self) -> logging.LogRecord:
        text = f"{self._lost} lines of this log were lost so far: nobody read them, or there was no room"
        return logging.LogRecord("kvstore.telemetry", logging.WARNING, "", 0, text, (), None)

    def _keep(self, text: str) -> None:
        line = ("\n" if self._torn else "").encode() + text.encode("utf-8", "backslashreplace")
        self._torn = False
        self._waiting.extend(line[begin : begin + _PIECE] for begin in range(0, len(line), _PIECE))
        self._size += len(line)

    def _write(self) -> None:
        """Write what is taken without waiting. Called with the lock held."""
        try:
            fd = self.stream.fileno()
            while self._waiting and _takes(fd, 0.0):
                piece = self._waiting.popleft()
                done = os.write(fd, piece)
                self._size -= done
                self._inside = not piece[:done].endswith(b"\n")
                if done < len(piece):
                    self._waiting.appendleft(piece[done:])
        except (OSError, ValueError):  # no room, nobody there, closed: waiting does not help
            self._lost += 1 + sum(each.endswith(b"\n") for each in self._waiting)
            self._torn = self._inside
            self._waiting.clear()
            self._size = 0

    def _catch_up(self) -> None:
        """Write what waits as it is taken, then end."""
        while True:
            try:
                _takes(self.stream.fileno(), _PATIENCE_S)
            except (OSError, ValueError):
                pass  # `_write` finds out
            self.acquire()
            try:
                if self._thread is not threading.current_thread():  # in the child of a fork another one may be at it
                    return
                self._write()
                if not self._waiting:
                    self._thread = None
                    return
            finally:
                self.release()

    def flush(self) -> None:
        """Write what waits, for a second at most."""
        end = time.monotonic() + _END_S
        self.acquire()
        try:
            while self._waiting and (left := end - time.monotonic()) > 0:
                _takes(self.stream.fileno(), left)
                self._write()
        except (OSError, ValueError):
            pass  # closed: nothing can be written any more
        finally:
            self.release()

    def close(self) -> None:
        """`flush`, and be forgotten by `logging`. The stream stays open."""
        self.flush()
        super().close()


def _takes(fd: int, seconds: float) -> bool:
    """Whether something can be written to `fd`, or that fails, within so many seconds."""
    poll = select.poll()
    poll.register(fd, select.POLLOUT)
    return bool(poll.poll(1e3 * seconds))
