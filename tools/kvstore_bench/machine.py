"""What the figures were measured on."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

__all__ = ["file_system", "machine_facts"]


def _first_line(path: str, prefix: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as lines:
            for line in lines:
                if line.startswith(prefix):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return ""


def file_system(path: str) -> str:
    """Type of the file system of `path` ("ext4", "nfs4", …), from /proc/self/mountinfo; "unknown" if not there."""
    try:
        lines = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return "unknown"
    real, best, kind = os.path.realpath(path), -1, "unknown"
    for line in lines:
        left, _, right = line.partition(" - ")
        fields = left.split()
        if len(fields) < 5 or not right:
            continue
        point = fields[4].replace("\\040", " ")
        inside = real == point or real.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= best:  # the later of equal mounts lies on top
            best, kind = len(point), right.split()[0]
    return kind


def machine_facts() -> dict[str, Any]:
    """CPU, cores this process may use, memory in bytes, kernel, Python, and the load while nothing was measured yet."""
    memory = _first_line("/proc/meminfo", "MemTotal")
    return {
        "cpu": _first_line("/proc/cpuinfo", "model name") or platform.processor() or platform.machine(),
        "architecture": platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": int(memory.split()[0]) * 1024 if memory else None,
        "kernel": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "load_1min": round(os.getloadavg()[0], 2),
    }
