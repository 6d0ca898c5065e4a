"""What the tests of the `file` backend share: scripted system calls, short forms of batches, looking at the disk."""

from __future__ import annotations

import errno
import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from kvstore.backend import NO_DEADLINE, Outcome, Read, Status, Write
from kvstore.keys import Key
from kvstore_backends.file import FileBackend
from kvstore_backends.file.oscalls import OsCalls

POISON = 0xA5


class Script(OsCalls):
    """System calls that fail, or are cut short, as told.

    `fail("preadv", errno.EIO, times=1)`: the next call raises; `times=None`: every one. `only(path)` restricts a rule
    of calls that take a path. `log` holds the name of every call and its first argument.
    """

    names = (
        "open", "close", "stat", "fstat", "preadv", "pwritev", "fsync", "fdatasync", "link", "rename", "unlink",
        "mkdir", "rmdir",
        "utime", "open_beneath", "rename_noreplace", "fallocate", "link_anonymous", "set_direct", "try_lock",
    )  # fmt: skip

    def __init__(self, *, anonymous: bool = True, openat2: bool = True) -> None:
        super().__init__(openat2=openat2)
        self.log: list[tuple[str, Any]] = []
        self.rules: dict[str, list[dict[str, Any]]] = {}
        self._anonymous = anonymous
        for name in self.names:
            setattr(self, name, self._wrap(name, getattr(self, name)))

    def file_system(self, fd: int) -> int:  # type: ignore[override]
        """A network file system, if named temporary files are wanted."""
        return OsCalls.file_system(fd) if self._anonymous else 0x6969

    def _wrap(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.log.append((name, args[1] if name == "open_beneath" else args[0] if args else None))
            for rule in self.rules.get(name, ()):
                if rule["times"] == 0 or not rule["when"](*args):
                    continue
                if rule["after"] > 0:
                    rule["after"] -= 1
                    continue
                if rule["times"] is not None:
                    rule["times"] -= 1
                if rule["short"] is not None:
                    fd, views, offset = args
                    return real(fd, [views[0][: rule["short"]]], offset)
                if rule["happens"]:
                    real(*args, **kwargs)
                raise OSError(rule["errno"], os.strerror(rule["errno"]))
            return real(*args, **kwargs)

        return call

    def fail(
        self, name: str, number: int = 0, *, times: int | None = 1, after: int = 0, short: int | None = None,
        happens: bool = False, when: Callable[..., bool] = lambda *_: True,
    ) -> None:  # fmt: skip
        """Add a rule; `short`: transfer so few bytes instead of failing; `happens`: do it, then fail all the same."""
        rule = {"errno": number, "times": times, "after": after, "short": short, "happens": happens, "when": when}
        self.rules.setdefault(name, []).append(rule)

    def replace(self, name: str, function: Callable[..., Any]) -> None:
        """Let `function` be the call of this name."""
        setattr(self, name, function)

    def count(self, name: str) -> int:
        return sum(1 for called, _ in self.log if called == name)


class Opened:
    """`with` for a backend."""

    def __init__(self, root: Path, **arguments: Any) -> None:
        self.backend = FileBackend(root, **arguments)

    def __enter__(self) -> FileBackend:
        return self.backend

    def __exit__(self, *_: object) -> None:
        self.backend.close()


def key(name: object) -> Key:
    return Key(hashlib.sha256(str(name).encode()).digest())


def payload(name: object, nbytes: int) -> bytes:
    """Bytes that belong to a name and to no other."""
    return hashlib.shake_256(str(name).encode()).digest(nbytes)


def put(backend: FileBackend, *names: object, nbytes: int = 1000, parents: Sequence[object] = ()) -> list[Outcome]:
    """Store records in one batch."""
    chain: list[Key | None] = [key(parent) for parent in parents] or [None] * len(names)
    writes = [
        Write(key(name), [memoryview(payload(name, nbytes))], parent) for name, parent in zip(names, chain, strict=True)
    ]
    return backend.put(writes, deadline=soon())


def get(backend: FileBackend, name: object, nbytes: int = 1000, offset: int = 0) -> tuple[Outcome, bytes]:
    memory = bytearray([POISON]) * nbytes
    (outcome,) = backend.get_into([Read(key(name), memoryview(memory), offset)], deadline=soon())
    return outcome, bytes(memory)


def is_intact(backend: FileBackend, name: object, nbytes: int = 1000) -> bool:
    outcome, data = get(backend, name, nbytes)
    return outcome == Outcome(Status.OK, nbytes) and data == payload(name, nbytes)


def present(backend: FileBackend, names: Iterable[object]) -> list[Any]:
    names = list(names)
    outcomes = backend.stat([key(name) for name in names], deadline=NO_DEADLINE)
    return [name for name, outcome in zip(names, outcomes, strict=True) if outcome.ok]


def file_of(root: Path, name: object) -> Path:
    text = key(name).hex()
    return root / text[:2] / f"{text}.kv"


def files_in(root: Path) -> list[Path]:
    """Every regular file but the backend's own notes."""
    return sorted(
        path for path in root.rglob("*") if path.is_file() and path.parent.name not in (".kvstore", "writers")
    )


def disk_usage(root: Path) -> int:
    """Bytes of all records, temporary files and quarantined records. Names that vanish meanwhile count as gone."""
    total = 0
    for folder, _, names in os.walk(root):
        if not folder.endswith(".kvstore"):
            for name in names:
                try:
                    total += os.lstat(os.path.join(folder, name)).st_size
                except FileNotFoundError:
                    continue
    return total


def soon(seconds: float = 30.0) -> float:
    return time.monotonic() + seconds


def start(script: str, *args: object, **options: Any) -> subprocess.Popen[str]:
    """A Python process that runs `script` with everything of this module imported."""
    root = Path(__file__).parents[2]
    code = f"import sys; sys.path.insert(0, {str(root)!r})\nfrom tests.faults.file_support import *\n{script}"
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, args)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=root, **options,
    )  # fmt: skip


def finish(process: subprocess.Popen[str], text: str = "") -> str:
    """Wait for a process; its output. Raises if it failed."""
    out, _ = process.communicate(text, timeout=120)
    if process.returncode != 0:
        raise AssertionError(f"a child process failed with {process.returncode}: {out}")
    return out


def line_of(process: subprocess.Popen[str]) -> str:
    """The next line that a process prints."""
    if process.stdout is None:
        raise AssertionError("no pipe")
    return process.stdout.readline().strip()


def reap(process: subprocess.Popen[str]) -> None:
    """Kill -9 a process, and leave nothing of it."""
    process.kill()
    process.communicate()


HALF_WRITER = """
class Stuck(Script):
    def pwritev_half(self, fd, views, offset):
        os.pwritev(fd, [views[0][: len(views[0]) // 2]], offset)
        print("half", flush=True)
        sys.stdin.read()      # until it is killed
        raise SystemExit(1)
calls = Stuck(anonymous=sys.argv[2] == "anonymous")
calls.pwritev = calls.pwritev_half
options = {"nbytes": int(sys.argv[4])} if len(sys.argv) > 4 else {}
backend = FileBackend(sys.argv[1], calls=calls, **options)
put(backend, sys.argv[3], nbytes=100_000)
"""
"""Writes half of a record, says so, and waits to be killed. Arguments: root, anonymous|named, name, [cap]."""

__all__ = [
    "HALF_WRITER", "POISON", "FileBackend", "Opened", "Path", "Script", "Status", "disk_usage", "errno", "file_of",
    "files_in", "finish", "get", "is_intact", "key", "line_of", "os", "payload", "present", "put", "reap", "soon",
    "start", "sys", "time",
]  # fmt: skip
