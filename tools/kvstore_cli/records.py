"""What `kvstore ls`, `stat`, `verify` and `rm` have in common: places opened, keys read, records looked at whole."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import click

from kvstore.backend import Backend, Capability, KeyInfo, Read, Status
from kvstore.config import load_config
from kvstore.errors import ConfigError, CorruptRecord, KVStoreError
from kvstore.keys import Key
from kvstore.options import parse_duration
from kvstore.record import HEADER_BYTES, KIND_KV, Header, NeedMore, checksum, parse_header
from kvstore.registry import open_backend

__all__ = [
    "JSON", "TIMEOUT", "URLS", "facts", "keys_of", "listed", "open_places", "read_header", "seconds_of", "shown",
    "verify_record",
]  # fmt: skip

_HEAD_GUESS = 64 << 10
_PIECE = 8 << 20  # bytes of a record in memory at a time

URLS = click.Argument(["url"], metavar="URL")
JSON = click.Option(["as_json", "--json"], default="", metavar="FILE", help="Write it as JSON; -: to standard output.")
TIMEOUT = click.Option(
    ["timeout", "--timeout"], default="60s", metavar="DURATION", show_default=True, help="For each call of the backend."
)


def seconds_of(timeout: str) -> float:
    """Seconds of `--timeout`. Raises `ConfigError`."""
    seconds = parse_duration(timeout, name="timeout")
    if not 0 < seconds <= 86400:
        raise ConfigError(f"option 'timeout': {timeout!r} is out of range; it must be above 0 and at most 1 d")
    return seconds


@contextlib.contextmanager
def open_places(text: str) -> Iterator[list[Backend]]:
    """The backends that a URL (or several, with commas) names, with the options of the environment, closed afterwards.

    Raises:
        ConfigError: the URL, its scheme or an option is wrong, or a folder is not there (opening it would make it, and
            a path that is spelt wrong would look like an empty place).
    """
    config = load_config(text)
    for url in config.urls:
        if url.scheme == "file" and not os.path.isdir(url.path):
            raise ConfigError(f"there is no folder {url.path}; check its spelling, and that its file system is mounted")
    with contextlib.ExitStack() as stack:
        backends = []
        for url in config.urls:
            backend = open_backend(url, **config.backend_overrides(url))
            stack.callback(backend.close)
            backends.append(backend)
        yield backends


def keys_of(words: Sequence[str]) -> list[Key]:
    """Keys as 64 hex digits; `-` stands for those at the beginning of the lines of standard input.

    Raises:
        ConfigError: something that is no key.
    """
    found = []
    for word in words:
        texts = [line.split()[0] for line in sys.stdin if line.strip()] if word == "-" else [word]
        found += [Key.from_hex(text) for text in texts]
    return list(dict.fromkeys(found))


def listed(backend: Backend, seconds: float) -> Iterator[KeyInfo]:
    """All records of a backend. `seconds`: for all of it.

    Raises:
        ConfigError: it cannot list.
        BackendError: listing failed.
    """
    if Capability.LIST not in backend.capabilities:
        raise ConfigError(f"{backend.name} cannot list its records; name the keys")
    for page in backend.list(deadline=time.monotonic() + seconds):
        yield from page


def read_header(backend: Backend, key: Key, nbytes: int, seconds: float) -> Header:
    """The verified header of a record of `nbytes` bytes.

    Raises:
        CorruptRecord: it is damaged, or gone.
        BackendError: it cannot be read.
    """
    need = min(nbytes, _HEAD_GUESS)
    while True:
        data = bytearray(need)
        _read(backend, key, memoryview(data), 0, seconds)
        try:
            return parse_header(memoryview(data), key=key, nbytes=nbytes)
        except NeedMore as more:
            if more.need <= need or more.need > nbytes:
                raise CorruptRecord("the header is longer than the record", key=key) from None
            need = more.need


def verify_record(backend: Backend, key: Key, nbytes: int, seconds: float) -> Header:
    """Read a record whole, a segment at a time, and compare all checksums; returns its header.

    Raises:
        CorruptRecord: what is stored is not what was put.
        BackendError: it cannot be read.
    """
    if nbytes < HEADER_BYTES:
        raise CorruptRecord(f"a record of {nbytes} bytes has no room for its header", key=key)
    header = read_header(backend, key, nbytes, seconds)
    for number, segment in enumerate(header.segments):
        data = bytearray(segment.length)
        view = memoryview(data)
        for begin in range(0, segment.length, _PIECE):
            _read(backend, key, view[begin : begin + _PIECE], segment.offset + begin, seconds)
        if checksum(view) != segment.checksum:
            raise CorruptRecord(f"segment {number} of {len(header.segments)} fails its checksum", key=key)
    header.meta()
    return header


def _read(backend: Backend, key: Key, dst: memoryview, offset: int, seconds: float) -> None:
    (outcome,) = backend.get_into([Read(key, dst, offset)], deadline=time.monotonic() + seconds)
    if outcome.error is not None:
        raise outcome.error
    if outcome.status is Status.MISS:
        raise CorruptRecord("the record has gone", key=key)
    if outcome.nbytes != len(dst):
        raise CorruptRecord(f"the record ends {len(dst) - outcome.nbytes} bytes early", key=key)


def facts(header: Header) -> dict[str, Any]:
    """What a header says, for people and JSON."""
    meta = {name: value.hex() if isinstance(value, bytes) else value for name, value in header.meta().items()}
    return {
        "key": header.key.hex(), "kind": "kv" if header.kind == KIND_KV else "opaque", "nbytes": header.nbytes,
        "raw_bytes": header.raw_bytes, "layers": header.layers, "segments": len(header.segments),
        "levels": header.levels, "meta": meta,
    }  # fmt: skip


def shown(error: KVStoreError) -> str:
    """An error without the key, which is printed beside it."""
    return error.message
