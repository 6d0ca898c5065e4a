"""`TlsControl`: the control connection over TLS. Both directions, frames and bodies, are encrypted.

Python's own timeouts are used, since OpenSSL does not come back from a blocking read when SO_RCVTIMEO passed. A TLS
record is at most 16 KiB (RFC 8446, 5.1), and OpenSSL makes one per call: small pieces are joined before.
"""

from __future__ import annotations

import math
import ssl
import time
from collections.abc import Iterable, Iterator

from .control import Control, Part

__all__ = ["TlsControl"]

_JOIN_BYTES = 64 << 10


class TlsControl(Control):
    """As `Control`, and for one thread at a time but for `abort` and `peer_gone`: OpenSSL's objects are not for two."""

    encrypted = True
    _sock: ssl.SSLSocket

    def __init__(self, sock: ssl.SSLSocket, peer: str, *, stall_s: float = 30.0) -> None:
        super().__init__(sock, peer, stall_s=stall_s)
        self._timeout = math.inf

    def _arm_both(self, wait: float) -> None:
        if not wait / 2 <= self._timeout <= wait:
            self._timeout = wait if wait == math.inf else min(wait * 0.75 if wait > 0.1 else wait, 1e6)
            self._sock.settimeout(None if wait == math.inf else self._timeout)

    def _send(self, parts: list[Part], deadline: float) -> None:
        since = time.monotonic()
        for joined in _joined(parts):
            piece = memoryview(joined)
            while piece:
                self._arm_both(self._patience(deadline, since, "sending"))
                try:
                    piece = piece[self._sock.send(piece) :]
                    since = time.monotonic()
                except (TimeoutError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                    continue
                except OSError as error:
                    why = self._alert() or error
                    raise self._lost("sending", why) from why

    def _alert(self) -> ssl.SSLError | None:
        """After a send failed: the alert that the peer sent before it hung up, which says why; None: it said nothing.
        With TLS 1.3 that is how a client learns that a server wants a certificate, or does not trust the one it got."""
        try:
            self._sock.settimeout(0.0)
            self._sock.recv(1)
        except ssl.SSLError as error:
            return error if "ALERT" in (error.reason or "") else None
        except OSError:
            pass
        return None

    def _receive(self, view: memoryview, deadline: float, *, least: int = -1, stall: bool = True) -> int:
        total, missing = len(view), len(view) if least < 0 else least
        since = time.monotonic() if stall else None
        while True:
            self._arm_both(self._patience(deadline, since, "receiving"))
            try:
                got = self._sock.recv_into(view)
            except (TimeoutError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                continue
            except OSError as error:
                raise self._lost("receiving", error) from error
            if not got:
                raise self._lost("receiving", None)
            view, missing, since = view[got:], missing - got, time.monotonic()
            if missing <= 0:
                return total - len(view)

    def _scatter(self, views: list[memoryview], deadline: float) -> None:
        for view in views:
            self._receive(view, deadline)

    def _receive_bytes(self, nbytes: int, deadline: float) -> bytes:
        return self._rest(self._taken(nbytes), nbytes, deadline)


def _joined(parts: Iterable[Part]) -> Iterator[Part | bytearray]:
    """Small parts joined up to 64 KiB, larger ones as they are."""
    small = bytearray()
    for part in parts:
        if len(small) + len(part) > _JOIN_BYTES and small:
            yield small
            small = bytearray()
        if len(part) >= _JOIN_BYTES:
            yield part
        else:
            small += part
    if small:
        yield small
