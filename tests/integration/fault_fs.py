"""A FUSE folder that passes everything through to another folder and fails as told. Started by `FaultFolder`.

Run as a program: fault_fs.py BACKING MOUNT RULES.json. The rules are read again whenever the file changes; the first
one that fits an operation applies:
    {"op": "write", "path": "regular expression", "errno": "ENOSPC", "after": 1, "times": 2, "short": 4096}
op: open create read write flush fsync link rename unlink getattr truncate; `after`: let so many pass first; `times`:
then fit so often (default: always); `short`: transfer at most so many bytes. `flush` is what close() reports.
"linked" is asked after a link() was made: an error that is reported although it happened.
"""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any


class FaultFolder:
    """Context manager: a mounted fault folder.

    Attributes:
        path: where it is mounted.
        backing: the folder below, for looking behind its back.
    """

    def __init__(self, work: Path) -> None:
        self.backing, self.path, self._rules = work / "backing", work / "mount", work / "rules.json"
        self._process: subprocess.Popen[str] | None = None
        self._version = 0

    @staticmethod
    def missing() -> str:
        """Why it cannot run here; empty if it can."""
        return "" if os.path.exists("/dev/fuse") else "no /dev/fuse"

    def __enter__(self) -> FaultFolder:
        self.backing.mkdir()
        self.path.mkdir()
        self.rules()
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(self.backing), str(self.path), str(self._rules)],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        assert self._process.stdout is not None
        said = []
        for line in self._process.stdout:  # libfuse may have something to say first
            if line.strip() == "mounted":
                return self
            said.append(line)
        self._process.wait()
        raise RuntimeError(f"the fault file system did not start: {''.join(said)}")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        subprocess.run(["fusermount3", "-u", "-z", str(self.path)], check=False, capture_output=True)
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def rules(self, *rules: dict[str, Any]) -> None:
        """Replace the rules. They hold for every operation that starts after this returns."""
        fresh = self._rules.with_suffix(".new")
        fresh.write_text(json.dumps(rules))
        self._version += 1
        os.utime(fresh, (self._version, self._version))  # that is how the other side sees it
        fresh.replace(self._rules)


def _serve(backing: str, mount: str, rules_file: str) -> None:
    import mfusepy as fuse  # type: ignore[import-untyped]

    stat_names = ("st_mode", "st_nlink", "st_size", "st_uid", "st_gid", "st_ino", "st_dev", "st_blocks")

    class FaultFs(fuse.Operations):  # type: ignore[misc]
        use_ns = True

        def __init__(self) -> None:
            self.version = 0.0
            self.active: list[dict[str, Any]] = []
            self.mutex = threading.Lock()

        def init(self, path: str) -> None:
            print("mounted", flush=True)

        def fault(self, op: str, path: str) -> int | None:
            """Raise what the first fitting rule says, or return its `short`."""
            with self.mutex:
                version = os.stat(rules_file).st_mtime
                if version != self.version:
                    with open(rules_file, encoding="utf-8") as source:
                        self.active, self.version = json.load(source), version
                for rule in self.active:
                    if rule["op"] != op or not re.search(rule.get("path", ""), path):
                        continue
                    if rule.get("after", 0) > 0:
                        rule["after"] -= 1
                        continue
                    if rule.get("times", 1) <= 0:
                        continue
                    if "times" in rule:
                        rule["times"] -= 1
                    break
                else:
                    return None
            if "errno" in rule:
                raise fuse.FuseOSError(getattr(errno, rule["errno"]))
            short: int | None = rule.get("short")
            return short

        def real(self, path: str) -> str:
            return backing + path

        def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
            self.fault("getattr", path)
            found = os.fstat(fh) if fh else os.lstat(self.real(path))
            times = {"st_atime": found.st_atime_ns, "st_mtime": found.st_mtime_ns, "st_ctime": found.st_ctime_ns}
            return {name: getattr(found, name) for name in stat_names} | times

        def readdir(self, path: str, fh: int) -> list[str]:
            return [".", "..", *os.listdir(self.real(path))]

        def open(self, path: str, flags: int) -> int:
            self.fault("open", path)
            return os.open(self.real(path), flags & ~os.O_DIRECT)

        def create(self, path: str, mode: int, fi: object = None) -> int:
            self.fault("create", path)
            return os.open(self.real(path), os.O_RDWR | os.O_CREAT | os.O_EXCL, mode)

        def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
            return os.pread(fh, min(size, self.fault("read", path) or size), offset)

        def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
            short = self.fault("write", path)
            return os.pwrite(fh, data[:short] if short else data, offset)

        def flush(self, path: str, fh: int) -> None:
            self.fault("flush", path)

        def fsync(self, path: str, datasync: int, fh: int) -> None:
            self.fault("fsync", path)

        def release(self, path: str, fh: int) -> None:
            os.close(fh)

        def rename(self, old: str, new: str, *flags: int) -> None:
            self.fault("rename", old)
            os.rename(self.real(old), self.real(new))

        def link(self, target: str, source: str) -> None:
            self.fault("link", target)
            os.link(self.real(source), self.real(target))
            self.fault("linked", target)  # it happened, and an error is reported all the same

        def unlink(self, path: str) -> None:
            self.fault("unlink", path)
            os.unlink(self.real(path))

        def truncate(self, path: str, length: int, fh: int | None = None) -> None:
            self.fault("truncate", path)
            os.truncate(self.real(path), length)

        def mkdir(self, path: str, mode: int) -> None:
            os.mkdir(self.real(path), mode)

        def rmdir(self, path: str) -> None:
            os.rmdir(self.real(path))

        def symlink(self, target: str, source: str) -> None:
            os.symlink(source, self.real(target))

        def readlink(self, path: str) -> str:
            return os.readlink(self.real(path))

        def utimens(self, path: str, times: tuple[int, int] | None = None) -> None:
            os.utime(self.real(path), ns=times or (time.time_ns(), time.time_ns()))

        def chmod(self, path: str, mode: int) -> None:
            os.chmod(self.real(path), mode)

    fuse.FUSE(
        FaultFs(),
        mount,
        foreground=True,
        direct_io=True,
        attr_timeout=0,
        entry_timeout=0,
        negative_timeout=0,
        hard_remove=True,
    )


if __name__ == "__main__":
    _serve(*sys.argv[1:4])
