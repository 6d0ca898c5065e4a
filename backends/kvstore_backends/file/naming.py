"""Names in the folder, and whose temporary files may be swept.

    ROOT/ab/<64 hex digits>.kv             a record; ab is the first byte of its key
    ROOT/ab/.kv-HOST-PID-RANDOM.tmp        a record being written (only where O_TMPFILE is not used)
    ROOT/.kvstore/format                   "kvstore file 2"
    ROOT/.kvstore/usage                    bytes in use, shared between processes (with `bytes=`)
    ROOT/.kvstore/writers/HOST-PID-RANDOM  a process that makes named temporary files
    ROOT/.kvstore/quarantine/TIME-RANDOM-<64 hex digits>.kv

Everything else is foreign: never listed, counted or removed.

One level of 256 folders: 10 million records are 40,000 in each, which file systems with hashed directories bear. With a
second level nearly every early record pays two `mkdir`s (125 µs each, measured), until 65,536 folders are there.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import socket
from typing import NamedTuple

from kvstore.keys import Key

__all__ = [
    "FORMAT_FILE", "FORMAT_TEXT", "OWN", "QUARANTINE", "USAGE_FILE", "WRITERS", "Owner", "file_name", "host_token",
    "is_folder", "leaf_path", "new_temp_name", "new_writer_name", "parse_record", "parse_temp", "parse_writer",
    "quarantine_name", "quarantined", "record_path",
]  # fmt: skip

OWN = ".kvstore"
FORMAT_FILE = f"{OWN}/format"
FORMAT_TEXT = b"kvstore file 2\n"
USAGE_FILE = f"{OWN}/usage"
QUARANTINE = f"{OWN}/quarantine"
WRITERS = f"{OWN}/writers"

FOREIGN_AGE = 3600.0
"""Seconds after which a temporary file of another host counts as abandoned."""
PID_REUSE_AGE = 86400.0
"""Seconds after which even one whose process id is alive does: the id was given to another process."""

_FOLDER = re.compile(r"[0-9a-f]{2}", re.ASCII)
_RECORD = re.compile(r"([0-9a-f]{64})\.kv", re.ASCII)
_TEMP = re.compile(r"\.kv-([0-9a-f]{16})-([0-9]{1,10})-[0-9a-f]{16}\.tmp", re.ASCII)
_WRITER = re.compile(r"([0-9a-f]{16})-([0-9]{1,10})-[0-9a-f]{16}", re.ASCII)
_QUARANTINED = re.compile(r"[0-9]{20}-[0-9a-f]{8}-[0-9a-f]{64}\.kv", re.ASCII)


class Owner(NamedTuple):
    """Who made a temporary file.

    Attributes:
        host: `host_token` of its host.
        pid: process id there.
    """

    host: str
    pid: int

    def is_stale(self, age: float) -> bool:
        """Whether a file of this owner, last written `age` seconds ago, was left behind.

        A process of this host (and pid namespace) that is gone left it; of other hosts only the age tells.
        """
        if self.host != host_token():
            return age > FOREIGN_AGE
        return age > PID_REUSE_AGE or not _is_alive(self.pid)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return True


@functools.cache
def host_token() -> str:
    """16 hex digits for this host, its boot and this pid namespace: within it a process id means one process."""
    parts = [socket.gethostname()]
    for path in ("/proc/sys/kernel/random/boot_id", "/etc/machine-id"):
        try:
            with open(path, encoding="ascii") as source:
                parts.append(source.read().strip())
        except (OSError, UnicodeDecodeError):
            parts.append("")
    try:
        parts.append(os.readlink("/proc/self/ns/pid"))
    except OSError:
        parts.append("")
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def record_path(key: bytes) -> str:
    """Path of a record below the root."""
    text = key.hex()
    return f"{text[:2]}/{text}.kv"


def leaf_path(key: bytes) -> str:
    """The folder of a record, in the root."""
    return key[:1].hex()


def file_name(key: bytes) -> str:
    """Name of a record in its folder."""
    return f"{key.hex()}.kv"


def is_folder(name: str) -> bool:
    """Whether this is the name of one of the 256 leaf folders."""
    return _FOLDER.fullmatch(name) is not None


def parse_record(name: str, folder: str) -> Key | None:
    """The key of a file in the leaf `folder`, or None if it is not one of ours there."""
    match = _RECORD.fullmatch(name)
    if match is None or not name.startswith(folder):
        return None
    return Key(bytes.fromhex(match[1]))


def new_temp_name() -> str:
    """A name nobody else uses, on any host; computed with the current pid, so right after a fork too."""
    return f".kv-{new_writer_name()}.tmp"


def parse_temp(name: str) -> Owner | None:
    """Who made the temporary file of this name, or None if it is not one."""
    match = _TEMP.fullmatch(name)
    return Owner(match[1], int(match[2])) if match else None


def new_writer_name() -> str:
    return f"{host_token()}-{os.getpid()}-{os.urandom(8).hex()}"


def parse_writer(name: str) -> Owner | None:
    match = _WRITER.fullmatch(name)
    return Owner(match[1], int(match[2])) if match else None


def quarantine_name(key: bytes, now_ns: int) -> str:
    """A name in the quarantine; names sort by time."""
    return f"{now_ns:020d}-{os.urandom(4).hex()}-{key.hex()}.kv"


def quarantined(name: str) -> bool:
    return _QUARANTINED.fullmatch(name) is not None
