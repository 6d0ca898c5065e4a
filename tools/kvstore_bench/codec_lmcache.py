"""LMCache's own CacheGen next to ours: its package in another interpreter, the same KV, the same run."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import tempfile
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from kvstore.errors import ConfigError, PermanentError
from kvstore.layout import KVLayout

__all__ = ["VARIANTS", "LMCacheProcess"]

VARIANTS: dict[str, int | None] = {"default": None, "32 bins": 32}
"""Levels to run it at: what it picks for the model by itself (the only one it has), and its coder with 32 bins in all
layers, so that it can be seen at a quality near the bar."""

_STOP_S = 10.0

Bytes = npt.NDArray[np.uint8]


class LMCacheProcess:
    """`codec_lmcache_child` in an interpreter with LMCache, kept to one core. A context manager.

    Args:
        python: that interpreter.
        model: folder of the model, from whose configuration LMCache derives its bins.
        layout: of the KV.
        chunk: tokens per chunk, at most.
        core: the CPU to stay on; None: any.

    Attributes:
        version: of LMCache.
        bins: of each variant, in words.

    Raises:
        ConfigError: it does not start, or LMCache is not there or not usable on this CPU.
    """

    def __init__(self, python: str, model: Path, layout: KVLayout, *, chunk: int, core: int | None = None) -> None:
        self._stack = contextlib.ExitStack()
        self._folder = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="kvstore-bench-lmcache-"))
        self._log: IO[bytes] = self._stack.enter_context(tempfile.TemporaryFile())  # noqa: SIM115 - it is one
        self.version = ""
        self.bins: dict[str, str] = {}
        child = Path(__file__).with_name("codec_lmcache_child.py")
        try:
            try:
                self._process = subprocess.Popen(
                    [python, "-I", str(child)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log,
                    env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}, start_new_session=True,
                )  # fmt: skip
            except OSError as error:
                raise ConfigError(f"--lmcache-python {python}: {error.strerror or error}", cause=error) from error
            self._stack.callback(self._end)
            if core is not None:  # before it has threads, which inherit it
                os.sched_setaffinity(self._process.pid, {core})
            for name, bins in VARIANTS.items():
                found = self._ask(
                    "open", name=name, model=str(model.resolve()), bins=bins, layers=layout.num_layers,
                    heads=layout.num_kv_heads, width=layout.head_dim, chunk=chunk,
                )  # fmt: skip
                self.version = found["version"]
                self.bins[name] = f"K {_runs(found['k_bins'])}, V {_runs(found['v_bins'])}"
        except PermanentError as error:
            self._stack.close()
            raise ConfigError(f"LMCache's CacheGen does not run with {python}: {error.message}", cause=error) from error
        except BaseException:
            self._stack.close()
            raise

    def through(self, variant: str, segments: Sequence[Bytes]) -> tuple[int, list[Bytes]]:
        """One chunk there and back: bytes of its object, and the segments that came back."""
        path, out = self._write(segments, "chunk"), os.path.join(self._folder, "back")
        nbytes = int(self._ask("through", name=variant, path=path, out=out)["nbytes"])
        back = np.fromfile(out, np.uint8).reshape(len(segments), -1)
        return nbytes, list(back)

    def load(self, variant: str, chunks: Sequence[Sequence[Bytes]]) -> None:
        """Chunks for `once`."""
        paths = [self._write(segments, f"load{index}") for index, segments in enumerate(chunks)]
        self._ask("load", name=variant, paths=paths)
        self._loaded = variant

    def once(self) -> tuple[float, float, float, float]:
        """The loaded chunks encoded and decoded once: seconds of each, by wall time and then by CPU time."""
        found = self._ask("once", name=self._loaded)
        return found["encode_s"], found["decode_s"], found["encode_cpu_s"], found["decode_cpu_s"]

    def _write(self, segments: Sequence[Bytes], name: str) -> str:
        path = os.path.join(self._folder, name)
        with open(path, "wb") as file:
            for segment in segments:
                file.write(segment.data)
        return path

    def _ask(self, do: str, **what: Any) -> dict[str, Any]:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        try:
            stdin.write(json.dumps({"do": do, **what}).encode() + b"\n")
            stdin.flush()
            line = stdout.readline()
        except OSError:
            line = b""
        if not line:
            self._log.seek(0)
            said = self._log.read()[-1000:].decode(errors="replace").strip()
            raise PermanentError(f"its process died: {said or 'it said nothing'}", operation="codec")
        found: dict[str, Any] = json.loads(line)
        if "error" in found:
            raise PermanentError(str(found["error"]), operation="codec")
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
        self._stack.close()

    def __enter__(self) -> LMCacheProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _runs(bins: Sequence[int]) -> str:
    """[32, 32, 16] → "2x32 1x16": how many layers of how many bins."""
    return " ".join(f"{len(list(same))}x{value}" for value, same in groupby(bins))
