"""Engines that compute prompts and engines that wait for them, each a process, and a node that they share."""

from __future__ import annotations

import contextlib
import json
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Self

from .support import environment

__all__ = ["Role", "served"]

_PATIENCE_S = 240.0


@contextlib.contextmanager
def served(folder: Path, memory: str = "512MiB", cores: Sequence[int] | None = None) -> Iterator[dict[str, str]]:
    """`kvstore serve` on this host: its URL for each transport."""
    command = [sys.executable, "-m", "kvstore_cli", "serve", "--listen", "127.0.0.1:0", "--memory", memory, "--json",
               "--unix", str(folder / "kv.sock")]  # fmt: skip
    if cores is not None:
        command = ["taskset", "-c", ",".join(map(str, cores)), *command]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment())
    try:
        assert process.stdout is not None
        address = json.loads(process.stdout.readline())["address"]
        yield {"tcp": f"node://{address}?transport=tcp", "shm": f"node://{folder}/kv.sock?transport=shm"}
    finally:
        process.terminate()
        process.wait(60)
        assert process.stdout is not None
        process.stdout.close()


class Role:
    """`vllm_role_child.py`, and what it says, in order."""

    def __init__(self, python: Path, log: Path, given: dict[str, Any]) -> None:
        command = [python, Path(__file__).with_name("vllm_role_child.py"), json.dumps(given)]
        self._log = log
        with log.open("wb") as errors:
            self.process = subprocess.Popen(
                [str(part) for part in command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
                text=True, env=environment(), bufsize=1, start_new_session=True,
            )  # fmt: skip
        self._said: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        threading.Thread(target=self._listen, daemon=True).start()
        self.heard: list[dict[str, Any]] = []

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith('{"event"'):
                self._said.put(json.loads(line))
        self._said.put(None)

    def order(self, do: str, **more: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do, **more}) + "\n")

    def next(self) -> dict[str, Any]:
        """The next event."""
        said = self._said.get(timeout=_PATIENCE_S)
        assert said is not None, f"it ended:\n{self._log.read_text()[-4000:]}"
        self.heard.append(said)
        return said

    def until(self, event: str, **like: Any) -> dict[str, Any]:
        """The next event that is like this one."""
        while True:
            said = self.next()
            if said["event"] == event and all(said[name] == value for name, value in like.items()):
                return said

    def ask(self, name: str, prompt: Any, tokens: int = 16, **more: Any) -> None:
        self.order("ask", name=name, prompt=prompt, tokens=tokens, **more)

    def answer(self, name: str, prompt: Any, tokens: int = 16, **more: Any) -> dict[str, Any]:
        self.ask(name, prompt, tokens, **more)
        return self.until("done", name=name)

    def counters(self) -> dict[str, float]:
        self.order("state")
        counters: dict[str, float] = self.until("state")["counters"]
        return counters

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            with contextlib.suppress(OSError):
                self.order("end")
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.kill()
        for pipe in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(OSError):
                assert pipe is not None
                pipe.close()
