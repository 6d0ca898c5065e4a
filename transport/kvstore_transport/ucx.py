"""`UcxBodies`: bodies travel as UCX tag messages, over RDMA, shared memory, CUDA or TCP, whatever UCX finds; frames
stay on the control connection.

    sender                                   receiver
    REQUEST or REPLY                    →
    GRANT "O", its runs                 →    posts its receives                      (see `_ucx_pieces`)
                                        ←    GRANT "P", how many, lengths of all pieces
    pieces, as UCX messages             →
                                        ←    GRANT "M", how many now                 (if there was no room for all)
    GRANT "C"                           →    believes that the body is whole
                                        ←    RELEASE

So every receive is posted before its message is sent, which UCX would put into memory of its own otherwise, and a get
is a push of the server: over TCP, UCX emulates a read at a tenth of the speed of a write. "C" says that the sender's
memory was as it should be until the last byte had gone: where the receiver reads the sender's memory (RDMA,
process_vm_readv(2)), nothing else would tell. A receiver that does not want the body says GRANT "S". A body of less
than 256 KiB follows as bytes behind GRANT "I" instead: a UCX round trip costs more than the copies.

When anything fails, both the control connection and the endpoint are cut before an error is raised, since a cancelled
receive goes on being written to (measured: 247 of 256 MiB arrived after the cancel). A message that came short leaves a
mark at the end of its place, 8 random bytes, which UCX would not tell of; `body_sums` covers the rest.

`_ucx_engine` has the settings of UCX and why they are so; what the user sets by `UCX_…` variables is left alone. RDMA
needs a UCX with verbs, which no wheel has: see `require_rdma`. UCX knows no authentication, and believes the worker
addresses that a peer sends: this transport is for hosts that trust each other, and never used together with TLS.

Bodies may lie in device memory (`_ucx_device`): any one-dimensional array of bytes with `__cuda_array_interface__` in
place of a memoryview, at either side. `body_sums` cannot be used then.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence

from ._ucx_device import DeviceView, copy_to_device, is_device, wait_for_stream
from ._ucx_engine import HOST, NET, NO_RDMA, UcxEngine
from ._ucx_library import HINT, Lane, libucp_path, translate
from ._ucx_messages import Messages, Receiving, Sending
from ._ucx_pieces import MOST_PIECES, Piece, cut, pack_offer, pack_table, unpack_offer, unpack_table
from .bodies import Facts, Way
from .control import Control, EarlyReply
from .errors import ProtocolError, TransportUnavailable
from .frames import Header, Kind, pack_header
from .seam import Bodies, Limits

__all__ = ["HINT", "UcxBodies", "UcxEngine", "UcxNetworkWay", "UcxWay", "describe", "require_rdma"]

_INLINE_BYTES = 256 << 10
_MOST_ADDRESS = 16 << 10
_GREETING = 64 << 10  # bytes: by the protocol that bodies take, not the one of small messages


class UcxBodies(Bodies):
    """One side of a connection. See the module.

    Args:
        messages: this object's own.
    """

    name = "ucx"
    copies = 0

    def __init__(self, control: Control, messages: Messages) -> None:
        self._control = control
        self._messages = messages
        self._driver = messages.driver
        self._pid = os.getpid()
        self._driving = threading.RLock()  # whoever moves messages along, or ends them

    # Sending.

    def send(self, views: Sequence[memoryview], nbytes: int, *, number: int, deadline: float) -> None:
        """No copy of what lies in pieces of 256 KiB or more, one of smaller ones.

        Raises:
            EarlyReply: the server does not want the body.
            DeadlinePassed, ConnectionLost, ProtocolError, TransportClosed: everything is cut.
        """
        if not nbytes:
            return
        with self._driving:
            try:
                self._send(views, nbytes, number, deadline)
            except EarlyReply:  # nothing was sent yet
                raise
            except BaseException:
                self._cut()
                raise

    def _send(self, views: Sequence[memoryview], nbytes: int, number: int, deadline: float) -> None:
        control, messages = self._control, self._messages
        if nbytes < _INLINE_BYTES and not any(is_device(view) for view in views):
            head = pack_header(Header(Kind.GRANT, number=number), b"I")
            control.send([head, b"I", *[view for view in views if len(view)]], deadline=deadline)
            return
        runs = messages.runs(views)
        messages.grant(number, b"O" + pack_offer(runs), deadline)
        _, meta = self._driver.quiet_frame(Kind.GRANT, number, deadline=deadline)
        if meta == b"S":
            return
        if meta[:1] != b"P":
            raise self._driver.wrong("neither places nor a refusal in answer to an offer")
        try:
            pieces = messages.walk(runs, unpack_table(meta[5:], nbytes))
        except ProtocolError as error:
            raise self._driver.wrong(error) from None
        moving = Sending(messages, pieces, number, deadline)
        moving.granted(meta)
        moving.run()
        messages.grant(number, b"C", deadline)
        messages.expect(Kind.RELEASE, number, b"", deadline)

    # Receiving.

    def receive(self, views: Sequence[memoryview], nbytes: int, *, number: int, deadline: float) -> None:
        """No copy of what goes to places of 256 KiB or more, one of smaller ones."""
        if not nbytes:
            return
        with self._driving:
            try:
                self._receive(views, nbytes, number, deadline)
            except EarlyReply as error:
                self._cut()
                raise ProtocolError(f"{self._control.peer}: {error}") from None
            except BaseException:
                self._cut()
                raise

    def _receive(self, views: Sequence[memoryview], nbytes: int, number: int, deadline: float) -> None:
        offer = self._offer(number, deadline)
        if offer is None:
            self._receive_inline(views, nbytes, deadline)
            return
        messages = self._messages
        runs = messages.runs(views)
        try:
            table = cut(unpack_offer(offer, nbytes), runs)
        except ProtocolError as error:
            raise self._driver.wrong(error) from None
        if len(table) > MOST_PIECES:
            raise self._driver.wrong(f"a body in {len(table)} pieces; at most {MOST_PIECES}")
        Receiving(messages, messages.walk(runs, table), number, deadline).run(pack_table(table))
        messages.expect(Kind.GRANT, number, b"C", deadline)
        self._control.send_frame(Header(Kind.RELEASE, number=number), deadline=deadline)

    def skip(self, nbytes: int, *, number: int, deadline: float) -> None:
        """Costs nothing from 256 KiB on: it is not sent."""
        if not nbytes:
            return
        with self._driving:
            try:
                if self._offer(number, deadline) is None:
                    self._control.skip(nbytes, deadline=deadline)
                else:
                    self._messages.grant(number, b"S", deadline)
            except BaseException:
                self._cut()
                raise

    def _offer(self, number: int, deadline: float) -> bytes | None:
        """The sender's; None: the body follows on the control connection."""
        _, meta = self._driver.quiet_frame(Kind.GRANT, number, deadline=deadline)
        if meta == b"I":
            return None
        if meta[:1] != b"O":
            raise self._driver.wrong("a body without an offer")
        return meta[1:]

    def _receive_inline(self, views: Sequence[memoryview], nbytes: int, deadline: float) -> None:
        if not any(is_device(view) for view in views):
            self._control.receive_into(views, deadline=deadline)
            return
        whole = memoryview(bytearray(nbytes))
        self._control.receive_into([whole], deadline=deadline)
        for view in views:
            part, whole = whole[: len(view)], whole[len(view) :]
            if is_device(view):
                device = DeviceView(view)
                wait_for_stream(device)
                copy_to_device(device, part)
            else:
                view[:] = part

    # Life.

    def abort(self) -> None:
        self._control.abort()
        if self._pid != os.getpid():
            return
        with self._driving:  # who drives it sees the control connection end, and lets go
            self._cut()

    def close(self) -> None:
        if self._pid == os.getpid():
            with self._driving:
                self._messages.end()

    def _cut(self) -> None:
        self._control.abort()  # first: the peer must not believe what we stop guarding
        self._messages.end()


# The way.


class UcxWay(Way):
    """Needs ucxx (or ucx-py) at both sides, with the same version of UCX."""

    name = "ucx"

    def facts(self, *, server: bool) -> Facts:
        """UCX's version, where this process can share memory, and whether there is RDMA ("" if nobody needs to know).

        Raises:
            TransportUnavailable: neither binding is installed; or RDMA is required and not there; or the process was
                forked after UCX was started.
        """
        engine = UcxEngine.get()
        devices = engine.rdma_devices() if server or _Required.rdma else []
        if _Required.rdma and not devices:
            raise TransportUnavailable(NO_RDMA)
        return {"version": engine.version, "host": self._host(engine), "rdma": bool(devices)}

    def _host(self, engine: UcxEngine) -> str:
        return engine.host()

    def agree(self, mine: Facts, theirs: Facts) -> str:
        if mine.get("version") != theirs.get("version"):
            return f"UCX {mine.get('version')} here, {str(theirs.get('version'))[:20]} there; they must be the same"
        if _Required.rdma and not theirs.get("rdma"):
            return "RDMA is required, and the other side has none"
        return ""

    def open(
        self, control: Control, *, server: bool, mine: Facts, theirs: Facts, limits: Limits, deadline: float
    ) -> UcxBodies:
        """Exchange worker addresses, and one message in each direction, so that what cannot work shows here.

        Raises:
            TransportUnavailable: too many connections use UCX, or the other side cannot be reached.
        """
        if why := self.agree(mine, theirs):
            raise control.fail(TransportUnavailable(f"{control.peer}: {why}"))
        engine = UcxEngine.get()
        kind = HOST if mine.get("host") and mine.get("host") == theirs.get("host") else NET
        lane = engine.lane(kind)
        try:
            return _open(control, engine, lane, server=server, limits=limits, deadline=deadline)
        except BaseException:
            control.abort()
            engine.release(lane)
            raise


class UcxNetworkWay(UcxWay):
    """As if the two sides were on two hosts, for tests and measurements on one."""

    def _host(self, engine: UcxEngine) -> str:
        return ""


def _open(
    control: Control, engine: UcxEngine, lane: Lane, *, server: bool, limits: Limits, deadline: float
) -> UcxBodies:
    connection = os.urandom(2)
    control.send_frame(Header(Kind.GRANT), b"A" + connection + lane.address, deadline=deadline)
    _, meta = control.await_frame(Kind.GRANT, 0, limits=limits, deadline=deadline)
    if meta[:1] != b"A" or not 3 < len(meta) <= _MOST_ADDRESS:
        raise control.fail(ProtocolError(f"{control.peer}: no UCX worker address"))
    shared = int.from_bytes(connection if server else meta[1:3], "little")
    messages = Messages(control, engine, lane, connection=shared, limits=limits)
    try:
        lane.connect(meta[3:])
    except engine.library.errors as error:
        raise control.fail(translate(error, control.peer)) from error
    out = Piece(_GREETING, [memoryview(bytes(_GREETING))], False)
    into = Piece(_GREETING, [memoryview(bytearray(_GREETING))], False)
    coming = messages.post(into, 0, 0, None, sending=False)
    going = messages.post(out, 0, 0, None, sending=True)
    messages.complete(coming, deadline, sending=False)
    messages.complete(going, deadline, sending=True)
    messages.grant(0, b"K", deadline)
    messages.expect(Kind.GRANT, 0, b"K", deadline)
    return UcxBodies(control, messages)


# For the operator.


class _Required:
    """What this process insists upon."""

    rdma = False


def require_rdma(required: bool = True) -> list[str]:
    """Let this process use UCX only with RDMA, or say why it cannot.

    Returns:
        The RDMA transports and devices: "rc_mlx5/mlx5_0:1".

    Raises:
        TransportUnavailable: there are none, or there is no UCX. Says what to install and to set.
    """
    devices = UcxEngine.get().rdma_devices() if required else []
    if required and not devices:
        raise TransportUnavailable(NO_RDMA)
    _Required.rdma = required
    return devices


def describe() -> dict[str, object]:
    """What UCX is in use here, for `kvstore-bench transports` and `kvstore doctor`, of plain types.

    Returns:
        binding, binding_version, ucx_version; libucp (path); transports (between hosts) and host_transports, each
        "transport/device"; rdma (whether), rdma_devices, rdma_hint; connections, most_connections; settings (ours, per
        context) and environment (the user's and the binding's `UCX_…`).

    Raises:
        TransportUnavailable: there is no UCX. Says what to install.
    """
    engine = UcxEngine.get()
    devices = engine.rdma_devices()
    return {
        "binding": engine.library.name,
        "binding_version": engine.library.version,
        "ucx_version": engine.version,
        "libucp": libucp_path(),
        "transports": engine.devices(NET),
        "host_transports": engine.devices(HOST),
        "rdma": bool(devices),
        "rdma_devices": devices,
        "rdma_hint": "" if devices else NO_RDMA,
        "connections": engine.lanes(),
        "most_connections": engine.most_lanes,
        "settings": {
            kind: {f"UCX_{name}": value for name, value in engine.settings[kind].items()} for kind in engine.settings
        },
        "environment": {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(("UCX_", "UCXPY_")) or name == "RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY"
        },
    }
