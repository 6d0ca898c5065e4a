"""The handshake: who are you, what do you speak, how shall bodies travel.

    client                                        server
    HELLO   protocol, version, namespace, nonce,
            client, wishes, ways, limits, …   →
                                              ←   REFUSE  reason, message       (and the connection ends)
                                              ←   WELCOME nonce                 (only if the namespace has a token)
    HELLO   proof                             →
                                              ←   WELCOME protocol, version, transport, note, way, limits, proof, …

Each is a frame without a body whose meta is a msgpack map of at most 64 KiB; all together are limited in time. A proof
is HMAC-SHA256 (RFC 2104) under the token, over a label for its side and the SHA-256 of the first HELLO and of the first
WELCOME, each with a nonce of 16 random bytes: it holds for these two messages only, so neither side's proof can be
replayed or reflected. The client proves first. Without TLS this keeps strangers out; it does not protect the bytes that
follow from somebody who can change them on the way.

A namespace that does not exist is answered as one whose token the client does not know, so nobody learns names that he
has no token for. A client counts against the server's connections only from the moment that it has proven who it is.

Frames of the handshake look like this in every version of the protocol, so that two versions can tell each other so.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import importlib.metadata
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, NoReturn, TypeVar

import msgpack

from .bodies import LOCAL, Facts, Way, way
from .control import Control
from .errors import PeerBusy, PeerRefused, ProtocolError, TransportError, TransportUnavailable
from .frames import PROTOCOL_VERSION, Header, Kind
from .seam import Credentials, Limits, Peer

__all__ = ["LOCAL_FACT", "Agreed", "Identify", "Wishes", "greet_client", "greet_server", "our_wishes", "refuse"]

_LIMITS = Limits(max_meta=64 << 10, max_body=0)
_NONCE_BYTES = 16
_MOST_TEXT = 1024
_MOST_NAME = 80
_LEAST_META = 64 << 10  # bytes: replies have some length that no limit of the client's can make away with
_NOBODY = os.urandom(32)  # the token of namespaces that do not exist
_REFUSALS: dict[str, type[TransportError]] = {
    "version": PeerRefused,
    "token": PeerRefused,
    "limits": PeerRefused,
    "tls": PeerRefused,
    "busy": PeerBusy,
    "transport": TransportUnavailable,
}

LOCAL_FACT = "local"
"""In the server's facts: [host id, path] of its Unix socket, for clients on the same host that came over TCP."""

Identify = Callable[[str], bytes | None]
"""namespace → its token, b"" if it is open, None if there is no such namespace. Called in the connection's thread."""

T = TypeVar("T")


class Wishes(NamedTuple):
    """How a client wants bodies to travel.

    Attributes:
        names: in order of preference.
        facts: by name, of those that can be used in this process.
        exact: whether the user asked for the one name only: no falling back then.
        notes: why others were left out.
    """

    names: tuple[str, ...]
    facts: dict[str, Facts]
    exact: bool
    notes: tuple[str, ...] = ()


class Agreed(NamedTuple):
    """What came out of a handshake.

    Attributes:
        way: how bodies travel.
        mine, theirs: the facts of both sides for it.
        limits: as this side's, with the smaller of both sides' `max_meta` and `max_body`.
        sums: whether bodies carry checksums.
    """

    peer: Peer
    way: Way
    mine: Facts
    theirs: Facts
    limits: Limits
    sums: bool


@functools.cache
def _version() -> str:
    try:
        return importlib.metadata.version("kvstore")
    except importlib.metadata.PackageNotFoundError:  # run from a source tree
        return "unknown"


def our_wishes(names: Sequence[str], *, encrypted: bool, exact: bool) -> Wishes:
    """`names`, less those that cannot be used in this process or, on an encrypted connection, are not private.

    Raises:
        TransportUnavailable: none is left. Says why.
    """
    facts: dict[str, Facts] = {}
    notes = []
    for name in names:
        try:
            found = way(name)
            if encrypted and not found.private:
                raise TransportUnavailable("its bodies would not be encrypted, but TLS is on")
            facts[name] = found.facts(server=False)
        except TransportUnavailable as error:
            notes.append(f"{name}: {error}")
    if not facts:
        raise TransportUnavailable("; ".join(notes) or "no transport was asked for")
    return Wishes(tuple(facts), facts, exact, tuple(notes))


# The client's side.


def greet_server(
    control: Control,
    wishes: Wishes,
    *,
    credentials: Credentials,
    limits: Limits,
    client: bytes,
    facts: Mapping[str, object],
    sums: bool,
    deadline: float,
) -> Agreed:
    """The client's side of the handshake, on a fresh connection.

    Args:
        client: 16 bytes, the same for all channels of one client object.
        facts: further ones for the server's `Peer.facts`, of plain types.
        sums: let bodies carry checksums, in both directions.

    Raises:
        PeerRefused, PeerBusy, TransportUnavailable: the server's answer; the message says what to change.
        ProtocolError, ConnectionLost, DeadlinePassed, TransportClosed: the connection is aborted.
    """
    hello = _pack(
        {
            "protocol": PROTOCOL_VERSION,
            "version": _version(),
            "namespace": credentials.namespace,
            "nonce": os.urandom(_NONCE_BYTES),
            "client": client,
            "wishes": list(wishes.names),
            "ways": wishes.facts,
            "max_meta": limits.max_meta,
            "max_body": limits.max_body,
            "sums": sums,
            "facts": dict(facts),
        }
    )
    control.send_frame(Header(Kind.HELLO), hello, deadline=deadline)
    welcome, meta = _answer(control, deadline)
    proven = False
    if "transport" not in welcome:  # a challenge
        if not credentials.token:
            text = f"{control.peer} wants a token for {_shown(credentials.namespace)}, or has no such namespace"
            raise control.fail(PeerRefused(text))
        _field(control, welcome, "nonce", bytes)
        proof = _proof(credentials.token, b"client", hello, meta)
        control.send_frame(Header(Kind.HELLO), _pack({"proof": proof}), deadline=deadline)
        welcome, _ = _answer(control, deadline)
        expected = _proof(credentials.token, b"server", hello, meta)
        proven = hmac.compare_digest(_field(control, welcome, "proof", bytes), expected)
        if not proven:
            raise control.fail(PeerRefused(f"{control.peer} does not know the token: is it the right server?"))
    if credentials.token and not proven:
        raise control.fail(
            PeerRefused(
                f"{control.peer} wants no token for {_shown(credentials.namespace)}, so it cannot prove who it is: "
                "give the server the token, or the client none"
            )
        )
    return _welcomed(control, welcome, wishes, credentials, limits, sums)


def _answer(control: Control, deadline: float) -> tuple[dict[str, object], bytes]:
    header, meta = control.receive_frame(limits=_LIMITS, deadline=deadline)
    answer = _unpack(control, meta)
    if header.kind == Kind.REFUSE:
        reason = _field(control, answer, "reason", str)
        message = _field(control, answer, "message", str)[:_MOST_TEXT]
        raise control.fail(_REFUSALS.get(reason, PeerRefused)(f"{control.peer}: {message}"))
    if header.kind != Kind.WELCOME:
        raise control.fail(ProtocolError(f"{control.peer}: {header.kind.name} instead of WELCOME"))
    return answer, meta


def _welcomed(
    control: Control,
    welcome: dict[str, object],
    wishes: Wishes,
    credentials: Credentials,
    limits: Limits,
    sums: bool,
) -> Agreed:
    if (protocol := _field(control, welcome, "protocol", int)) != PROTOCOL_VERSION:
        raise control.fail(PeerRefused(f"{control.peer} speaks protocol {protocol}, this side {PROTOCOL_VERSION}"))
    name = _field(control, welcome, "transport", str)
    if name not in wishes.facts:
        raise control.fail(ProtocolError(f"{control.peer} chose the transport {name!r}, which was not offered"))
    notes = [*wishes.notes, *filter(None, [_field(control, welcome, "note", str)[:_MOST_TEXT]])]
    agreed = _smaller(control, limits, welcome)
    peer = Peer(
        address=control.peer,
        transport=name,
        version=_field(control, welcome, "version", str),
        namespace=credentials.namespace,
        client=b"",
        max_meta=agreed.max_meta,
        max_body=agreed.max_body,
        facts=_field(control, welcome, "facts", dict),
        note="; ".join(notes),
    )
    return Agreed(peer, way(name), wishes.facts[name], _field(control, welcome, "way", dict), agreed, sums)


# The server's side.


class _Refusal(Exception):
    """Raised inside `greet_client` only."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def greet_client(
    control: Control,
    *,
    identify: Identify,
    transports: Sequence[str],
    limits: Limits,
    facts: Mapping[str, object],
    admit: Callable[[], bool] = lambda: True,
    deadline: float,
) -> Agreed:
    """The server's side of the handshake, on a fresh connection.

    Args:
        transports: those that this server offers.
        facts: further ones for the client's `Peer.facts`, of plain types.
        admit: asked once the client has proven who it is; False: tell it to come again.

    Raises:
        PeerRefused: the client was refused, and told why.
        ProtocolError, ConnectionLost, DeadlinePassed, TransportClosed: the connection is aborted.
    """
    try:
        return _greet_client(control, identify, transports, limits, facts, admit, deadline)
    except _Refusal as refusal:
        refuse(control, refusal.reason, str(refusal), deadline=deadline)
        raise PeerRefused(f"{control.peer} was refused: {refusal}") from None


def refuse(control: Control, reason: str, message: str, *, deadline: float) -> None:
    """Send REFUSE, in whatever state the handshake is, and end the connection."""
    control.send_frame(Header(Kind.REFUSE), _pack({"reason": reason, "message": message}), deadline=deadline)
    control.finish(deadline=deadline)


def _greet_client(
    control: Control,
    identify: Identify,
    transports: Sequence[str],
    limits: Limits,
    facts: Mapping[str, object],
    admit: Callable[[], bool],
    deadline: float,
) -> Agreed:
    hello, meta = _hello(control, deadline)
    if (protocol := _field(control, hello, "protocol", int)) != PROTOCOL_VERSION:
        raise _Refusal(
            "version",
            f"this server speaks protocol {PROTOCOL_VERSION} (kvstore {_version()}), the client protocol {protocol} "
            f"(kvstore {_field(control, hello, 'version', str)[:40]!r}): install the same version at both sides",
        )
    namespace = _field(control, hello, "namespace", str)[:_MOST_TEXT]
    client = _field(control, hello, "client", bytes)
    if len(client) != 16 or len(_field(control, hello, "nonce", bytes)) != _NONCE_BYTES:
        raise control.fail(ProtocolError(f"{control.peer}: a client id or nonce of the wrong length"))
    proof = _check_token(control, identify, namespace, meta, deadline)
    name, mine, theirs, note = _choose(control, hello, transports)
    agreed = _smaller(control, limits, hello)
    if _field(control, hello, "max_meta", int) < _LEAST_META:
        text = f"this client takes {hello['max_meta']} bytes of meta; it must take {_LEAST_META} at least"
        raise _Refusal("limits", text)
    welcome: dict[str, object] = {
        "protocol": PROTOCOL_VERSION,
        "version": _version(),
        "transport": name,
        "note": note,
        "way": mine,
        "max_meta": limits.max_meta,
        "max_body": limits.max_body,
        "facts": dict(facts),
        "proof": proof,
    }
    peer = Peer(
        address=control.peer,
        transport=name,
        version=_field(control, hello, "version", str),
        namespace=namespace,
        client=client,
        max_meta=agreed.max_meta,
        max_body=agreed.max_body,
        facts=_field(control, hello, "facts", dict),
        note=note,
    )
    sums = _field(control, hello, "sums", bool)
    if not admit():
        raise _Refusal("busy", f"this server has its {limits.connections} connections already; come again")
    control.send_frame(Header(Kind.WELCOME), _pack(welcome), deadline=deadline)
    return Agreed(peer, way(name), mine, theirs, agreed, sums)


def _hello(control: Control, deadline: float) -> tuple[dict[str, object], bytes]:
    header, meta = control.receive_frame(limits=_LIMITS, deadline=deadline)
    if header.kind != Kind.HELLO:
        raise control.fail(ProtocolError(f"{control.peer}: {header.kind.name} instead of HELLO"))
    return _unpack(control, meta), meta


def _check_token(control: Control, identify: Identify, namespace: str, hello: bytes, deadline: float) -> bytes:
    """The server's own proof; b"" if the namespace is open. One that does not exist is as one with a token that nobody
    knows: a stranger sees no difference, nor does it take another time."""
    token = identify(namespace)
    if token is None:
        token = _NOBODY
    if not token:
        return b""
    challenge = _pack({"nonce": os.urandom(_NONCE_BYTES)})
    control.send_frame(Header(Kind.WELCOME), challenge, deadline=deadline)
    answer, _ = _hello(control, deadline)
    expected = _proof(token, b"client", hello, challenge)
    if not hmac.compare_digest(_field(control, answer, "proof", bytes), expected):
        raise _Refusal("token", f"wrong token for {_shown(namespace)}, or no such namespace")
    return _proof(token, b"server", hello, challenge)


def _shown(namespace: str) -> str:
    """For messages."""
    return f"namespace {namespace[:_MOST_NAME]!r}" if namespace else "the default namespace"


def _choose(control: Control, hello: dict[str, object], transports: Sequence[str]) -> tuple[str, Facts, Facts, str]:
    """(name, our facts, the client's facts, why not an earlier wish)."""
    ways = _field(control, hello, "ways", dict)
    notes: list[str] = []
    for name in _field(control, hello, "wishes", list)[:16]:
        theirs = ways.get(name) if isinstance(name, str) else None
        if not isinstance(theirs, dict):
            raise control.fail(ProtocolError(f"{control.peer}: a wish without facts"))
        why = "not offered by this server"
        if name in transports:
            try:
                found = way(name)
                mine = found.facts(server=True)
                why = found.agree(mine, theirs)
            except TransportUnavailable as error:
                why = f"not usable at this server: {error}"
            except RecursionError:
                raise control.fail(ProtocolError(f"{control.peer}: facts that are nested too deeply")) from None
            if not why and control.encrypted and not found.private:
                why = "its bodies would not be encrypted, but TLS is on"
            if not why and name in LOCAL and not control.local:
                why = "needs the server's Unix socket (kvstore serve --unix PATH)"
            if not why:
                return name, mine, theirs, "; ".join(notes)
        notes.append(f"{name[:20]}: {why}")
    raise _Refusal("transport", f"no common transport ({'; '.join(notes)}): ask for transport=tcp, or auto")


# Both sides.


def _proof(token: bytes, side: bytes, hello: bytes, challenge: bytes) -> bytes:
    said = hashlib.sha256(hello).digest() + hashlib.sha256(challenge).digest()
    return hmac.digest(token, b"kvstore " + side + b"\0" + said, "sha256")


def _smaller(control: Control, limits: Limits, theirs: dict[str, object]) -> Limits:
    max_meta, max_body = _field(control, theirs, "max_meta", int), _field(control, theirs, "max_body", int)
    if max_meta < 0 or max_body < 0:
        raise control.fail(ProtocolError(f"{control.peer}: a limit below 0"))
    return replace(limits, max_meta=min(limits.max_meta, max_meta), max_body=min(limits.max_body, max_body))


def _pack(value: dict[str, object]) -> bytes:
    packed: bytes = msgpack.packb(value)
    return packed


def _unpack(control: Control, meta: bytes) -> dict[str, object]:
    try:
        value = msgpack.unpackb(meta)
    except (ValueError, msgpack.UnpackException) as error:
        raise control.fail(ProtocolError(f"{control.peer}: a handshake that is no msgpack: {error}")) from None
    if not isinstance(value, dict):
        _malformed(control, "a handshake that is no map")
    return value


def _field(control: Control, value: dict[str, object], name: str, kind: type[T]) -> T:
    found = value.get(name)
    if not isinstance(found, kind) or (kind is int and isinstance(found, bool)):
        _malformed(control, f"a handshake without {name}, or with one of another type")
    return found


def _malformed(control: Control, what: str) -> NoReturn:
    raise control.fail(ProtocolError(f"{control.peer}: {what}"))
