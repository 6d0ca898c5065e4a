"""What keys of the server are called, and which slot of a cluster they lie in.

    PREFIX abcdef…(64 hex digits)                        a record, the whole of it
    PREFIX quarantine/{PREFIX abcdef…}/N                 a corrupt record, kept aside for a while (N: random, in hex)

A name's slot is CRC16 of the name, or of what stands between its first `{` and the next `}` ("hash tag", Redis cluster
specification, "Key distribution model"). So a record and its quarantined twin lie in one slot, where RENAME works,
and records spread evenly. Prefixes have no braces. Other names are neither listed nor touched.
"""

from __future__ import annotations

import binascii
import re

from kvstore.keys import KEY_BYTES, Key

__all__ = ["SLOTS", "aside_name", "key_of", "record_name", "scan_pattern", "slot_of"]

SLOTS = 16384

_DIGITS = re.compile(rb"[0-9a-f]{%d}" % (2 * KEY_BYTES))
_SPECIAL = re.compile(rb"([*?\[\]\\^])")  # of the server's glob patterns


def record_name(prefix: bytes, key: Key) -> bytes:
    return prefix + key.hex().encode()


def key_of(prefix: bytes, name: bytes) -> Key | None:
    """The key whose record has this name; None if it is not one of ours."""
    if not name.startswith(prefix) or not _DIGITS.fullmatch(name, len(prefix)):
        return None
    return Key.from_hex(name[len(prefix) :].decode())


def aside_name(prefix: bytes, name: bytes, nonce: int) -> bytes:
    """Where a corrupt record goes; in the slot of `name`."""
    return b"%squarantine/{%s}/%x" % (prefix, name, nonce)


def scan_pattern(prefix: bytes) -> bytes:
    """For SCAN … MATCH: all records, and hardly anything else."""
    return _SPECIAL.sub(rb"\\\1", prefix) + b"?" * (2 * KEY_BYTES)


def slot_of(name: bytes) -> int:
    """Slot 0..16383. CRC-16/XMODEM, which is what `binascii.crc_hqx` computes."""
    begin = name.find(b"{")
    if begin >= 0:
        end = name.find(b"}", begin + 1)
        if end > begin + 1:
            name = name[begin + 1 : end]
    return binascii.crc_hqx(name, 0) % SLOTS
