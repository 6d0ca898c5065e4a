"""`StreamBodies`: the body follows the meta on the control connection, over TCP, TLS or a Unix-domain socket.

Gathered by sendmsg(2) together with the frame, scattered by recvmsg(2) into its destinations: no copy in user space
(over TLS the cipher makes one at each side).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from .bodies import Facts, Way
from .control import Control
from .errors import ProtocolError
from .frames import Header
from .seam import Bodies, Limits

__all__ = ["StreamBodies", "StreamWay"]


class StreamBodies(Bodies):
    """Bodies on the control connection itself; has no state of its own."""

    name = "tcp"
    inline = True

    def __init__(self, control: Control) -> None:
        self._control = control
        self.copies = 2 if control.encrypted else 0

    def send(self, views: Sequence[memoryview], nbytes: int, *, number: int, deadline: float) -> None:
        self._control.send([view for view in views if len(view)], deadline=deadline)

    def receive(self, views: Sequence[memoryview], nbytes: int, *, number: int, deadline: float) -> None:
        self._control.receive_into(views, deadline=deadline)

    def skip(self, nbytes: int, *, number: int, deadline: float) -> None:
        self._control.skip(nbytes, deadline=deadline)

    def heard(self, header: Header, meta: bytes, *, deadline: float = math.inf) -> None:
        peer = self._control.peer
        raise self._control.fail(ProtocolError(f"{peer}: {header.kind.name} {header.number} out of turn"))

    def abort(self) -> None:
        self._control.abort()

    def close(self) -> None:
        return


class StreamWay(Way):
    """Needs nothing: always there."""

    name = "tcp"
    private = True

    def facts(self, *, server: bool) -> Facts:
        return {}

    def agree(self, mine: Facts, theirs: Facts) -> str:
        return ""

    def open(
        self, control: Control, *, server: bool, mine: Facts, theirs: Facts, limits: Limits, deadline: float
    ) -> StreamBodies:
        return StreamBodies(control)
