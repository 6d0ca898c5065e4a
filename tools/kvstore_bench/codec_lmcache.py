"""LMCache's own CacheGen next to ours: its package in another interpreter, the same KV, the same run."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from types import TracebackType

import numpy as np
import numpy.typing as npt

from kvstore.errors import ConfigError, PermanentError
from kvstore.layout import KVLayout

from .json_child import JsonChild

__all__ = ["VARIANTS", "LMCacheProcess"]

VARIANTS: dict[str, int | None] = {"default": None, "32 bins": 32}
"""Levels to run it at: what it picks for the model by itself (the only one it has), and its coder with 32 bins in all
layers, so that it can be seen at a quality near the bar."""

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
        self.version = ""
        self.bins: dict[str, str] = {}
        try:
            self._child = JsonChild(
                python, Path(__file__).with_name("codec_lmcache_child.py"), option="--lmcache-python",
                operation="codec", env={"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
            )  # fmt: skip
            self._stack.callback(self._child.close)
            if core is not None:  # before it has threads, which inherit it
                os.sched_setaffinity(self._child.pid, {core})
            for name, bins in VARIANTS.items():
                found = self._child.ask(
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
        nbytes = int(self._child.ask("through", name=variant, path=path, out=out)["nbytes"])
        back = np.fromfile(out, np.uint8).reshape(len(segments), -1)
        return nbytes, list(back)

    def load(self, variant: str, chunks: Sequence[Sequence[Bytes]]) -> None:
        """Chunks for `once`."""
        paths = [self._write(segments, f"load{index}") for index, segments in enumerate(chunks)]
        self._child.ask("load", name=variant, paths=paths)
        self._loaded = variant

    def once(self) -> tuple[float, float, float, float]:
        """The loaded chunks encoded and decoded once: seconds of each, by wall time and then by CPU time."""
        found = self._child.ask("once", name=self._loaded)
        return found["encode_s"], found["decode_s"], found["encode_cpu_s"], found["decode_cpu_s"]

    def _write(self, segments: Sequence[Bytes], name: str) -> str:
        path = os.path.join(self._folder, name)
        with open(path, "wb") as file:
            for segment in segments:
                file.write(segment.data)
        return path

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
