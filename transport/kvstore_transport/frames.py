"""The one frame format, of all transports: a header of 48 bytes, meta bytes, and perhaps a body.

    offset size  field
         0    4  magic "KVT1"
         4    1  kind: HELLO, WELCOME, REFUSE, REQUEST, REPLY, RELEASE, GRANT
         5    1  op (REQUEST) or status (REPLY); 0 otherwise. Their meaning is the caller's
         6    2  flags
         8    4  request number; a REPLY has that of its REQUEST
        12    4  length of meta in bytes
        16    8  length of the body in bytes
        24    8  REQUEST: microseconds until the caller's deadline, 0 = none. Clocks of two hosts are never compared
        32    8  XXH3-64 of the body if flag BODY_SUM is set, else 0
        40    8  XXH3-64 of bytes 0..39 and meta

Little-endian. Header and meta always travel over the control connection (a TCP or Unix socket of our own). How the
body travels is the transport's matter: behind the meta on the same connection (tcp), as tagged messages (ucx), as
places in shared memory (shm). Every length is checked against the receiver's limits before anything is allocated.
"""

from __future__ import annotations

import enum
import struct
from typing import NamedTuple

from xxhash import xxh3_64, xxh3_64_intdigest

from .errors import ProtocolError

__all__ = [
    "BODY_SUM",
    "HEADER_BYTES",
    "LEASE",
    "PROTOCOL_VERSION",
    "Flags",
    "Header",
    "Kind",
    "check_meta",
    "pack_header",
    "unpack_header",
]

PROTOCOL_VERSION = 1
"""Exchanged in HELLO; both sides must have the same."""

MAGIC = b"KVT1"
_FIXED = struct.Struct("<4sBBHIIQQQ")
_SUM = struct.Struct("<Q")
HEADER_BYTES = _FIXED.size + _SUM.size
_JOINED = 4096


class Kind(enum.IntEnum):
    """What a frame is."""

    HELLO = 1  # client → server: msgpack map, see kvstore_transport.handshake
    WELCOME = 2  # server → client: msgpack map
    REFUSE = 3  # server → client instead of WELCOME: msgpack map with "reason" and "message"; the connection ends
    REQUEST = 4
    REPLY = 5
    GRANT = 6  # receiver → sender of a body: go on (ucx: receives are posted; shm: see there)
    RELEASE = 7  # receiver → sender of a body in shared memory: it is no longer read


class Flags(enum.IntFlag):
    """Flags of a frame. Unknown ones are a `ProtocolError`."""

    NONE = 0
    BODY_SUM = 1  # the header holds a checksum of the body
    LEASE = 2  # REQUEST: leave the body of the reply in shared memory until RELEASE


BODY_SUM, LEASE = int(Flags.BODY_SUM), int(Flags.LEASE)
"""As plain numbers: `&` of a number and an `IntFlag` takes 1 µs, several times per request."""

_KNOWN = BODY_SUM | LEASE
_KINDS = {int(kind): kind for kind in Kind}


class Header(NamedTuple):
    """A frame's header.

    Attributes:
        code: op of a REQUEST, status of a REPLY.
        budget_us: REQUEST: microseconds until the caller's deadline; 0: none.
        body_sum: XXH3-64 of the body, if `Flags.BODY_SUM`.
    """

    kind: Kind
    code: int = 0
    flags: int = 0
    number: int = 0
    meta_nbytes: int = 0
    body_nbytes: int = 0
    budget_us: int = 0
    body_sum: int = 0


def pack_header(header: Header, meta: bytes) -> bytes:
    """The 48 bytes of `header` in front of `meta`, whose length is filled in."""
    kind, code, flags, number, _, body_nbytes, budget_us, body_sum = header
    fixed = _FIXED.pack(MAGIC, kind, code, flags, number, len(meta), body_nbytes, budget_us, body_sum)
    return fixed + _SUM.pack(_digest(fixed, meta))


def unpack_header(data: bytes | memoryview, *, max_meta: int, max_body: int) -> tuple[Header, int]:
    """(header, checksum to give to `check_meta` once the meta bytes are there).

    Args:
        data: 48 bytes.
        max_meta: longest meta accepted, in bytes.
        max_body: longest body accepted, in bytes.

    Raises:
        ProtocolError: not a frame of ours, an unknown kind or flag, or a length beyond the limit.
    """
    if len(data) != HEADER_BYTES:
        raise ProtocolError(f"a frame header of {len(data)} bytes instead of {HEADER_BYTES}")
    magic, kind, code, flags, number, meta_nbytes, body_nbytes, budget_us, body_sum = _FIXED.unpack_from(data)
    if magic != MAGIC:
        raise ProtocolError(f"no frame of ours: it begins with {bytes(magic)!r}")
    if kind not in _KINDS or flags & ~_KNOWN:
        raise ProtocolError(f"a frame of unknown kind {kind} or with unknown flags {flags:#x}")
    if meta_nbytes > max_meta or body_nbytes > max_body:
        raise ProtocolError(
            f"a frame with {meta_nbytes} bytes of meta and {body_nbytes} of body; at most {max_meta} and {max_body}"
        )
    (digest,) = _SUM.unpack_from(data, _FIXED.size)
    return Header(_KINDS[kind], code, flags, number, meta_nbytes, body_nbytes, budget_us, body_sum), digest


def check_meta(head: bytes | memoryview, meta: bytes | memoryview, digest: int) -> None:
    """Raises `ProtocolError` unless `digest` is that of the header bytes `head` and `meta`."""
    if _digest(memoryview(head)[: _FIXED.size], meta) != digest:
        raise ProtocolError("a frame whose checksum is wrong")


def _digest(fixed: bytes | memoryview, meta: bytes | memoryview) -> int:
    if len(meta) <= _JOINED:  # cheaper than a state for two
        return xxh3_64_intdigest(b"".join((fixed, meta)))
    state = xxh3_64(fixed)
    state.update(meta)
    return state.intdigest()
