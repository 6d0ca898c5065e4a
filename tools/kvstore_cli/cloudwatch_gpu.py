"""What `nvidia-smi` says of this host's GPUs. Where there is none there is nothing to say."""

from __future__ import annotations

import shutil
import subprocess
from typing import NamedTuple

from kvstore.errors import ConfigError

__all__ = ["SOURCES", "Gpu", "read_gpus"]

SOURCES = ("auto", "nvidia-smi", "off")

_TIMEOUT_S = 10.0
_QUERY = ("--query-gpu=utilization.gpu,memory.used,memory.total", "--format=csv,noheader,nounits")


class Gpu(NamedTuple):
    """One GPU now.

    Attributes:
        percent: of the last second in which it computed; None: it does not say (MIG).
        memory_percent: of its memory in use; None: it does not say.
    """

    percent: float | None
    memory_percent: float | None


def read_gpus(source: str) -> list[Gpu]:
    """The GPUs of this host.

    Args:
        source: "nvidia-smi"; "auto": the same, if it is there; "off": none are looked for.

    Raises:
        ConfigError: "nvidia-smi" is asked for, and is not there or fails.
    """
    if source == "off":
        return []
    program = shutil.which("nvidia-smi")
    if program is None:
        if source == "auto":
            return []
        raise ConfigError("--gpu nvidia-smi: there is no nvidia-smi on this host's PATH")
    try:
        done = subprocess.run(
            [program, *_QUERY], capture_output=True, text=True, timeout=_TIMEOUT_S, check=True, encoding="utf-8"
        )
    except (OSError, subprocess.SubprocessError) as error:
        if source == "auto":
            return []
        said = getattr(error, "stderr", "") or str(error)
        raise ConfigError(f"--gpu nvidia-smi: it failed: {said.strip()[:200]}", cause=error) from error
    return [gpu for line in done.stdout.splitlines() if (gpu := _parse(line)) is not None]


def _parse(line: str) -> Gpu | None:
    parts = [_number(part) for part in line.split(",")]
    if len(parts) != 3:
        return None
    busy, used, total = parts
    return Gpu(busy, 100.0 * used / total if used is not None and total else None)


def _number(text: str) -> float | None:
    """None for "[N/A]" and "[Not Supported]"."""
    try:
        return float(text)
    except ValueError:
        return None
