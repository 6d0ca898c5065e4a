"""A child process that takes commands, and gives answers, as lines of JSON: code that needs another interpreter."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from kvstore.errors import ConfigError, PermanentError

__all__ = ["JsonChild"]

_STOP_S = 10.0


class JsonChild:
    """`python -I script`, until `close`. (Isolated: its own folder holds modules named like the standard library's.)

    Args:
        option: how the user named the interpreter; for messages.
        operation: of the errors.
        env: variables on top of ours.

    Raises:
        ConfigError: the interpreter does not start.
    """

    def __init__(
        self, python: str, script: Path, *, option: str, operation: str, env: Mapping[str, str] | None = None
    ) -> None:
        self._operation = operation
        with contextlib.ExitStack() as stack:
            self._log: IO[bytes] = stack.enter_context(tempfile.TemporaryFile())
            try:
                self._process = subprocess.Popen(
                    [python, "-I", str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log,
                    env={**os.environ, **(env or {})}, start_new_session=True,
                )  # fmt: skip
            except OSError as error:
                raise ConfigError(f"{option} {python}: {error.strerror or error}", cause=error) from error
            self._stack = stack.pop_all()
            self._stack.callback(self._end)

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, do: str, *, limit_s: float | None = None, **what: Any) -> dict[str, Any]:
        """One command. Raises `PermanentError` if it failed, died, or gave no answer in time (None: however long)."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        line = b""
        try:
            stdin.write(json.dumps({"do": do, **what}).encode() + b"\n")
            stdin.flush()
            if limit_s is not None and not select.select([stdout], [], [], limit_s)[0]:
                raise PermanentError(f"no answer within {limit_s:.0f} s", operation=self._operation)
            line = stdout.readline()
        except OSError:
            pass
        if not line:
            self._log.seek(0)
            said = self._log.read()[-1000:].decode(errors="replace").strip()
            raise PermanentError(f"its process died: {said or 'it said nothing'}", operation=self._operation)
        found: dict[str, Any] = json.loads(line)
        if "error" in found:
            raise PermanentError(str(found["error"]), operation=self._operation)
        return found

    def _end(self) -> None:
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            with contextlib.suppress(OSError):
                stream.close()
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def close(self) -> None:
        """End it: its input ends; if it goes on for ten seconds, it is killed."""
        self._stack.close()
