"""Checksums that the service verifies on the way in ("Checking object integrity", S3 user guide). Off by default: each
record carries its own, which is verified on every read.

A checksum of ours goes into a header, computed from the caller's views before the request. botocore's own way (a
trailer) would copy the body and read it in Python.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Callable, Sequence
from typing import Any

from kvstore.errors import ConfigError

__all__ = ["Checksum"]

_PARAMETER = {"crc32": "ChecksumCRC32", "crc32c": "ChecksumCRC32C", "crc64nvme": "ChecksumCRC64NVME"}


class Checksum:
    """One algorithm.

    Args:
        name: "none", "crc32", "crc32c" or "crc64nvme".

    Raises:
        ConfigError: it needs awscrt, which is not installed.
    """

    def __init__(self, name: str) -> None:
        self._parameter = _PARAMETER.get(name, "")
        self._algorithm = name.upper()
        self._width = 8 if name == "crc64nvme" else 4
        self._update: Callable[[Any, int], int] = zlib.crc32
        if name in ("crc32c", "crc64nvme"):
            try:
                from awscrt import checksums
            except ImportError as error:
                raise ConfigError(
                    f"checksum={name} needs awscrt, which is not installed: pip install awscrt"
                ) from error
            self._update = checksums.crc32c if name == "crc32c" else checksums.crc64nvme

    def of(self, views: Sequence[memoryview]) -> dict[str, str]:
        """The parameter of PutObject or UploadPart for these bytes; empty if there is none."""
        if not self._parameter:
            return {}
        value = 0
        for view in views:
            value = self._update(view, value)
        return {self._parameter: base64.b64encode(value.to_bytes(self._width, "big")).decode("ascii")}

    def announce(self) -> dict[str, str]:
        """The parameters of CreateMultipartUpload."""
        if not self._parameter:
            return {}
        kind = "FULL_OBJECT" if self._width == 8 else "COMPOSITE"
        return {"ChecksumAlgorithm": self._algorithm, "ChecksumType": kind}
