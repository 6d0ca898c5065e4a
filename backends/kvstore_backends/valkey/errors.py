"""What went wrong: error replies and broken links, mapped once.

An error reply begins with a code: `-OOM command not allowed …`. `REPLIES` says for each code whether trying again may
help, and what to look at. MOVED and ASK are followed by `dispatch` and get here only when that led nowhere.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from kvstore.backend import Outcome
from kvstore.errors import KVStoreError, PermanentError, TransientError

__all__ = ["HALTING", "REPLIES", "Faults", "LinkError", "Meaning", "ReplyError"]


class LinkError(Exception):
    """The connection, not the server's answer, failed.

    Attributes:
        kind: "deadline", "dns", "connect", "tls", "silence", "closed", "protocol", "fork", or "topology" (nobody to
            ask).
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class ReplyError(Exception):
    """An error reply. A value more often than it is raised.

    Attributes:
        code: its first word; "ERR" if that is none.
        text: all of it.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text)
        code = text.partition(" ")[0]
        self.code = code if code.isascii() and code.isupper() else "ERR"
        self.text = text


class Meaning(NamedTuple):
    """What an error reply means for us.

    Attributes:
        transient: another try may help.
        check: what is the matter, and where to look.
        quiet: the reply's own text is not shown.
    """

    transient: bool
    check: str
    quiet: bool = False


REPLIES: dict[str, Meaning] = {
    "OOM": Meaning(False, "not stored: the server is full (maxmemory) and may not evict; set maxmemory-policy "
                          "allkeys-lru, or give it more memory"),
    "READONLY": Meaning(True, "this server is a replica: a failover is under way, or the URL names replicas only"),
    "MASTERDOWN": Meaning(True, "a replica without its primary: a failover is under way"),
    "LOADING": Meaning(True, "the server is starting and loads its data"),
    "BUSY": Meaning(True, "somebody's script blocks the server"),
    "CLUSTERDOWN": Meaning(True, "the cluster does not serve all slots: a failover is under way, or shards are lost; "
                                 "see CLUSTER INFO, and cluster-require-full-coverage no"),
    "MOVED": Meaning(True, "the cluster's nodes do not agree on who serves this slot"),
    "ASK": Meaning(True, "this slot is being moved to another node"),
    "TRYAGAIN": Meaning(True, "this slot is being moved to another node"),
    "CROSSSLOT": Meaning(False, "names of two slots in one command; this is a mistake in kvstore"),
    "NOREPLICAS": Meaning(True, "not stored: fewer replicas are connected than min-replicas-to-write asks for"),
    "MISCONF": Meaning(False, "not stored: the server cannot write its snapshot and refuses writes; free its disk, or "
                              "run a cache without persistence (save \"\")"),
    "NOAUTH": Meaning(False, "the server wants a password: set the options username and password"),
    "WRONGPASS": Meaning(False, "the server does not accept the username or password: check both, and that the user is "
                                "enabled (ACL GETUSER)", quiet=True),
    "NOPERM": Meaning(False, "the user may not do this: docs/valkey.md has the ACL SETUSER command, with the commands "
                             "and the key pattern that are needed"),
    "DENIED": Meaning(False, "the server is in protected mode: it wants a password, or bind and protected-mode no"),
    "WRONGTYPE": Meaning(False, "something else has this name: give kvstore a prefix or a database of its own"),
    "NOPROTO": Meaning(False, "the server does not speak RESP2"),
}  # fmt: skip
"""By code. Everything else is permanent, but for what `_ERR` finds in the text."""

_ERR: tuple[tuple[str, Meaning], ...] = (
    ("max number of clients", Meaning(True, "the server has no free connection: raise maxclients, or lower lanes")),
    ("invalid bulk length", Meaning(False, "too large for the server (proto-max-bulk-len); set max_value_bytes")),
    ("exceeds maximum allowed size", Meaning(False, "too large for the server (proto-max-bulk-len)")),
    ("unknown command", Meaning(False, "the server is too old, or restricts commands: Valkey, or Redis 7.0 and later")),
    ("unknown subcommand", Meaning(False, "the server is too old, or restricts commands")),
    ("invalid password", Meaning(False, "the server does not accept the password", quiet=True)),
    ("DB index is out of range", Meaning(False, "the server has no such database: see option database")),
    ("SELECT is not allowed", Meaning(False, "a cluster has database 0 only: leave option database out")),
)  # fmt: skip
"""By a piece of the text, for errors that have no code of their own."""

HALTING = frozenset({"OOM", "MISCONF", "NOREPLICAS", "READONLY", "LOADING", "NOAUTH", "NOPERM", "MASTERDOWN"})
"""What the next command of the pipeline would be told, too: what was not sent yet is not sent."""

_ECHO = ", with args"  # "unknown command `HELLO`, with args beginning with: `2`, `AUTH`, …"
_MOST_SAID = 200

_OURS = frozenset({"tls", "fork"})  # kinds of `LinkError` where another try is in vain


class Faults:
    """Maps what went wrong to errors of ours.

    What a server says is shown, but no secret in it: some repeat the command that they do not know, HELLO with its
    password, and some name the user.

    Args:
        backend: its name.
        secrets: words that are not to be shown.
    """

    def __init__(self, backend: str, secrets: Sequence[str | None] = ()) -> None:
        self._backend = backend
        words = sorted((re.escape(secret) for secret in secrets if secret), key=len, reverse=True)
        self._secrets = re.compile(rf"(?<!\w)(?:{'|'.join(words)})(?!\w)") if words else None

    def shown(self, text: str) -> str:
        """What may be shown of a server's words."""
        text = text.partition(_ECHO)[0]
        if self._secrets is not None:
            text = self._secrets.sub("***", text)
        return text[:_MOST_SAID]

    def late(self, operation: str, key: bytes | None = None) -> Outcome:
        error = TransientError("the deadline passed", backend=self._backend, operation=operation, key=key)
        return Outcome.failed(error)

    def refused(self, text: str, operation: str, key: bytes) -> Outcome:
        """Not even tried."""
        return Outcome.failed(PermanentError(text, backend=self._backend, operation=operation, key=key))

    def outcome(self, error: Exception, operation: str, key: bytes | None = None) -> Outcome:
        return Outcome.failed(self.of(error, operation, key))

    def of(self, error: Exception, operation: str, key: bytes | None = None) -> KVStoreError:
        """The error of ours for `error`, which becomes its cause, but for secrets in it."""
        if isinstance(error, KVStoreError):
            return error
        where: dict[str, Any] = {"backend": self._backend, "operation": operation, "key": key, "cause": error}
        if isinstance(error, LinkError):
            return (PermanentError if error.kind in _OURS else TransientError)(str(error), **where)
        if isinstance(error, ReplyError):
            meaning = meaning_of(error)
            said = error.code if meaning.quiet else self.shown(error.text)
            where["cause"] = ReplyError(said)
            text = f"{meaning.check} (the server said: {said})" if meaning.check else f"the server said: {said}"
            return (TransientError if meaning.transient else PermanentError)(text, **where)
        raise error


def meaning_of(error: ReplyError) -> Meaning:
    found = REPLIES.get(error.code)
    if found is None:
        found = next((meaning for piece, meaning in _ERR if piece in error.text), Meaning(False, ""))
    return found
