"""A peer in a process of its own, and one side of a measurement made of it."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from io import BufferedRWPair
from pathlib import Path
from typing import Any

from kvstore.errors import BackendError, ConfigError, PermanentError
from kvstore_bench.ceilings import Job, Lanes, split
from kvstore_bench.measure import Failures
from kvstore_bench.processes import cpu_of

__all__ = ["PEERS", "PeerProcess", "PeerSide"]

PEERS = {
    "mooncake": "Mooncake Store: its master, a process with the memory, its own client, over TCP",
    "nixl": "NIXL's transfer engine between two processes, UCX over TCP; it has no store",
}
"""Peer → what of it is run."""

_START_S = 120.0
_ANSWER_S = 120.0
_STOP_S = 5.0


class PeerProcess:
    """`peers/child.py` in an interpreter that has the peer's wheel; a context manager.

    Args:
        peer: a name of `PEERS`.
        python: the interpreter; "" is ours.

    Attributes:
        name: peer and version, as it says itself.
        forms: for "get" and "put", the peer's calls that do it.
        lanes: threads that may call at once.
        pids: the processes whose CPU belongs to the peer.

    Raises:
        ConfigError: the interpreter does not start, or the peer is not installed; says what to install.
    """

    def __init__(self, peer: str, python: str = "") -> None:
        self._stack = contextlib.ExitStack()
        with contextlib.ExitStack() as undo:
            undo.callback(self._stack.close)
            folder = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="kvstore-bench-peer-"))
            self._log = self._stack.enter_context(tempfile.TemporaryFile())
            listener = undo.enter_context(socket.socket(socket.AF_UNIX))
            listener.bind(os.path.join(folder, "peer"))
            listener.listen(16)
            listener.settimeout(0.1)
            child = Path(__file__).with_name("child.py")
            try:
                self._process = subprocess.Popen(
                    [python or sys.executable, str(child), peer, os.path.join(folder, "peer")],
                    stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log, start_new_session=True,
                )  # fmt: skip
            except OSError as error:
                raise ConfigError(f"--python {python}: {error.strerror or error}", cause=error) from error
            self._stack.callback(self._end)
            self._streams: list[BufferedRWPair] = []
            self._accept(listener)
            hello = self._answer(self._streams[0], _START_S)
            if "error" in hello:
                raise ConfigError(f"{peer} cannot be compared with here: {hello['error']}")
            self.name: str = hello["name"]
            self.forms: dict[str, list[str]] = hello["forms"]
            self.lanes: int = hello["lanes"]
            self.pids: list[int] = hello["pids"]
            for _ in range(self.lanes - 1):
                self._accept(listener)
            undo.pop_all()
            listener.close()

    def _accept(self, listener: socket.socket) -> None:
        end = time.monotonic() + _START_S
        while True:
            try:
                connection, _ = listener.accept()
                break
            except TimeoutError:
                if self._ended() or time.monotonic() > end:
                    raise ConfigError(f"the peer's process did not start: {self._tail()}") from None
        connection.settimeout(_ANSWER_S)
        self._streams.append(self._stack.enter_context(connection.makefile("rwb")))
        connection.close()

    def _tail(self) -> str:
        self._log.seek(0)
        return self._log.read()[-1000:].decode(errors="replace").strip() or "it said nothing"

    def _answer(self, stream: BufferedRWPair, limit_s: float = _ANSWER_S) -> dict[str, Any]:
        try:
            line = stream.readline()
        except OSError as error:
            raise PermanentError(f"the peer does not answer: {error}", operation="compare") from error
        if not line:
            raise PermanentError(f"the peer's process died: {self._tail()}", operation="compare")
        found: dict[str, Any] = json.loads(line)
        return found

    def ask(self, do: str, *, lane: int = 0, **what: Any) -> dict[str, Any]:
        """One command of `child`; from one thread per lane.

        Raises:
            PermanentError: it failed, or the process died.
        """
        stream = self._streams[lane]
        stream.write(json.dumps({"do": do, **what}).encode() + b"\n")
        stream.flush()
        answer = self._answer(stream)
        if "error" in answer:
            raise PermanentError(f"the peer: {answer['error']}", operation="compare")
        if "pids" in answer:
            self.pids = answer["pids"]
        return answer

    def cpu_s(self) -> float:
        """CPU seconds of all its processes so far."""
        return sum(map(cpu_of, self.pids))

    def _ended(self) -> bool:
        """Whether it has; it is not waited for yet."""
        return os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None

    def _end(self) -> None:
        """It, and what it started and could not end, which is in its process group. Until it is waited for, its id and
        its group's are nobody else's."""
        end = time.monotonic() + _STOP_S
        while not self._ended() and time.monotonic() < end:
            time.sleep(0.01)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def close(self) -> None:
        """End it: it goes when its connections are closed."""
        for stream in self._streams:
            with contextlib.suppress(OSError):
                stream.close()
        self._stack.close()

    def __enter__(self) -> PeerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class PeerSide:
    """The same work through the peer: a `Side` for `measure`. Its memory is in the peer's process, registered.

    Args:
        op: "get" or "put".
        count, nbytes: of the batch.

    Attributes:
        form: which of the peer's calls is used; `choose` takes the fastest.
    """

    def __init__(self, peer: PeerProcess, op: str, *, count: int, nbytes: int) -> None:
        self._peer, self._op, self._count, self._nbytes = peer, op, count, nbytes
        self.repeatable = op == "get"
        self.failures = Failures()
        self._moved: list[int] = []
        peer.ask("load", size=nbytes, count=count)
        self.form = peer.forms[op][0]
        if op == "get":
            peer.ask("fill")

    @property
    def name(self) -> str:
        return f"{self._peer.name.partition(' ')[0]} {self.form}"

    def choose(self, pool: Lanes, rounds: int = 3) -> None:
        """Take the fastest of the peer's calls: the best of `rounds` passes of each, in turn, with one lane."""
        best = dict.fromkeys(self._peer.forms[self._op], math.inf)
        for _ in range(rounds):
            for self.form in best:
                one = pool.run(self.jobs(1))
                if self.settle(1) == self._count * self._nbytes:
                    best[self.form] = min(best[self.form], one.seconds)
        self.form = min(best, key=lambda form: best[form])

    def verify(self) -> bool:
        """Whether all records come back byte for byte, by each of the peer's calls."""
        wrong: int = self._peer.ask("verify", op=self._op)["wrong"]
        if wrong:
            self.failures.messages.setdefault("verify", f"the peer brought {wrong} of {self._count} records wrong")
        return not wrong

    def cpu_s(self) -> float:
        return self._peer.cpu_s()

    def jobs(self, lanes: int) -> list[Job]:
        return [self._job(lane, part) for lane, part in enumerate(split(self._count, min(lanes, self._peer.lanes)))]

    def _job(self, lane: int, part: range) -> Job:
        def job() -> None:
            try:
                self._peer.ask("run", lane=lane, op=self._op, form=self.form, first=part.start, count=len(part))
            except BackendError as error:
                self.failures.add(self._op, error.message)
            else:
                self._moved.append(len(part) * self._nbytes)

        return job

    def settle(self, rounds: int) -> int:
        moved, self._moved = sum(self._moved), []
        if not self.repeatable:
            self._peer.ask("settle")
        return moved

    def close(self) -> None:
        with contextlib.suppress(BackendError):  # a peer that died holds nothing any more
            self._peer.ask("drop")
