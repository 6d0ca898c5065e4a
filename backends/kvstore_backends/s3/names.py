"""What objects are called.

    PREFIX ab/ abcdef…(64 hex digits)         a record
    PREFIX quarantine/ abcdef….N              a corrupt record, kept aside (N: milliseconds since the epoch, in hex)
    PREFIX probe/ …                           tried once to learn what the service can do; removed at once

Keys are SHA-256, so the two digits after the prefix spread names, and with them S3's partitions, evenly over 256
prefixes. Nothing else lies under PREFIX as far as we are concerned: other names are neither listed nor touched.
"""

from __future__ import annotations

import re

from kvstore.keys import KEY_BYTES, Key

__all__ = ["key_of", "probe_name", "quarantine_name", "quarantine_prefix", "record_name"]

_RECORD = re.compile(rf"([0-9a-f]{{2}})/(\1[0-9a-f]{{{2 * KEY_BYTES - 2}}})", re.ASCII)


def record_name(prefix: str, key: Key) -> str:
    name = key.hex()
    return f"{prefix}{name[:2]}/{name}"


def key_of(prefix: str, name: str) -> Key | None:
    """The key whose record has this name; None if it is not one of ours."""
    match = _RECORD.fullmatch(name, len(prefix)) if name.startswith(prefix) else None
    return None if match is None else Key.from_hex(match[2])


def quarantine_prefix(prefix: str) -> str:
    return f"{prefix}quarantine/"


def quarantine_name(prefix: str, key: Key, milliseconds: int) -> str:
    return f"{quarantine_prefix(prefix)}{key.hex()}.{milliseconds:x}"


def probe_name(prefix: str, nonce: str) -> str:
    return f"{prefix}probe/{nonce}"
