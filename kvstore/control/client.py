"""`Client`: the control API of a node or a controller, typed. Standard library only.

    with Client("http://127.0.0.1:9090", token=token) as control:
        found = control.lookup(tokens=prompt, context=context)
        control.pin(tokens=system_prompt, context=context, ttl_s=3600)
        control.wait(control.clear(model="meta-llama/Llama-3.1-8B"), timeout=60)

Tokens are turned into keys here, so that a prompt of 32,000 tokens is 125 keys on the wire; only who does not know
their context leaves that to the server.
"""

from __future__ import annotations

import json
import math
import operator
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar
from urllib.parse import quote

from kvstore import errors
from kvstore.errors import ConfigError, KVStoreError, PermanentError, TransientError
from kvstore.keys import DEFAULT_CHUNK_SIZE, Key, KeyContext, chunk_keys

from ._http import Answer, Connections, parse
from .access import DeniedError
from .instance import UnknownError
from .messages import (
    Acted,
    Address,
    Finished,
    InstanceHealth,
    Lookup,
    ReportReply,
    Route,
    Started,
    Worker,
    decode,
)

__all__ = ["Client"]

T = TypeVar("T")

_WAIT_S = 0.05
_WAIT_MOST_S = 1.0


class Client:
    """Speaks to the control API at `url`. Safe from any thread.

    Every call ends within `timeout` seconds, the resolving of a name and all addresses of it counted.

    Args:
        url: of a node or a controller, "http://127.0.0.1:9090".
        token: of the namespace, or the admin's; "": none.
        timeout: seconds for each call, if it gives none.
        ca, cert, key: PEM files, for https.

    Raises:
        ConfigError: an argument makes no sense. Calls raise `ConfigError` (also `UnknownError`: no such instance, tier
            or event), `DeniedError` (the token), `TransientError` (nobody answers, busy, late), `PermanentError`.
    """

    def __init__(
        self, url: str, *, token: str = "", timeout: float = 5.0, ca: str = "", cert: str = "", key: str = ""
    ) -> None:
        if not 0 < timeout <= 600:
            raise ConfigError(f"timeout={timeout:g} of a control client must be more than 0 and at most 600 s")
        if not all(33 <= ord(letter) <= 126 for letter in token):
            raise ConfigError("a token for HTTP is printable ASCII without blanks")
        self._connections = Connections(url, ca=ca, cert=cert, key=key)
        self._token = token
        self._timeout = timeout
        self.url = self._connections.url

    def with_token(self, token: str) -> Client:
        """The same connections, with another token."""
        twin = Client.__new__(Client)
        twin.__dict__.update(self.__dict__)
        twin._token = token
        return twin

    # What there is.

    def lookup(
        self, *, keys: Sequence[Key] | None = None, tokens: Any = None, context: KeyContext | str | None = None,
        namespace: str = "", instances: Sequence[str] | None = None, chunk_size: int = DEFAULT_CHUNK_SIZE,
        timeout: float | None = None,
    ) -> Lookup:  # fmt: skip
        """Who has how much of a prompt.

        Args:
            keys: of its chunks, in order; or
            tokens, context: as `kvstore.keys.chunk_keys` takes them. A prompt shorter than a chunk is found nowhere.
                `context` may be the name of one that the server has (`--context NAME=FILE`), or None: the only one it
                has; then the server makes the keys.
            namespace: of the node.
            instances: only these.
            chunk_size: tokens of a chunk.
        """
        chunks = _chunks(keys, tokens, context, chunk_size)
        if chunks is None:
            return Lookup(0, 0, "", "", 0, 0, ())
        body = {"namespace": namespace, "chunks": chunks, "instances": _list(instances)}
        return self._post("lookup", body, Lookup, timeout)

    def query_ip(self, instances: Sequence[str] = (), *, timeout: float | None = None) -> Sequence[Address]:
        """Where instances are; all of them, if none is named."""
        query = "".join(f"&instance={quote(name, safe='')}" for name in instances)
        return self._get("query_ip", query, list[Address], timeout)

    def workers(self, *, timeout: float | None = None) -> Sequence[Worker]:
        """All instances."""
        return self._get("workers", "", list[Worker], timeout)

    def health(self, *, timeout: float | None = None) -> Sequence[InstanceHealth]:
        """How all instances are."""
        return self._get("health", "", list[InstanceHealth], timeout)

    def route(
        self, *, keys: Sequence[Key] | None = None, tokens: Any = None, context: KeyContext | str | None = None,
        candidates: Mapping[str, float | None] | Sequence[str] | None = None, namespace: str = "",
        chunk_size: int = DEFAULT_CHUNK_SIZE, timeout: float | None = None,
    ) -> Route:  # fmt: skip
        """Where a prompt should go.

        Args:
            keys, tokens, context, chunk_size: as in `lookup`; here the prompt must have a whole chunk.
            candidates: names of instances, with the tokens that wait to be prefilled there (None: not known); None: all
                that are ready.
        """
        chunks = _chunks(keys, tokens, context, chunk_size)
        if chunks is None:
            raise ConfigError(f"a prompt of less than {chunk_size} tokens has no chunk to route by; send it anywhere")
        named: list[dict[str, Any]] | None = None
        if candidates is not None:
            waiting = candidates if isinstance(candidates, Mapping) else dict.fromkeys(candidates)
            named = [{"instance": name, "queued_tokens": queued} for name, queued in waiting.items()]
        body = {"namespace": namespace, "chunks": chunks, "candidates": named}
        return self._post("route", body, Route, timeout)

    # What is done.

    def pin(
        self, *, keys: Sequence[Key] | None = None, tokens: Any = None, context: KeyContext | str | None = None,
        ttl_s: float = 3600.0, namespace: str = "", instances: Sequence[str] | None = None,
        chunk_size: int = DEFAULT_CHUNK_SIZE, timeout: float | None = None,
    ) -> Acted:  # fmt: skip
        """Keep records for `ttl_s` seconds. Args: as `lookup`."""
        body = self._selection(keys, tokens, context, chunk_size, namespace, instances) | {"ttl_s": ttl_s}
        return self._post("pin", body, Acted, timeout)

    def unpin(
        self, *, keys: Sequence[Key] | None = None, tokens: Any = None, context: KeyContext | str | None = None,
        namespace: str = "", instances: Sequence[str] | None = None, chunk_size: int = DEFAULT_CHUNK_SIZE,
        timeout: float | None = None,
    ) -> Acted:  # fmt: skip
        """Let pinned records go as others do. Args: as `lookup`."""
        return self._post("unpin", self._selection(keys, tokens, context, chunk_size, namespace, instances), Acted,
                          timeout)  # fmt: skip

    def clear(
        self, *, namespace: str = "", everything: bool = False, model: str | None = None,
        keys: Sequence[Key] | None = None, tokens: Any = None, context: KeyContext | str | None = None,
        below: bool = False, instances: Sequence[str] | None = None, chunk_size: int = DEFAULT_CHUNK_SIZE,
        timeout: float | None = None,
    ) -> Started:  # fmt: skip
        """Remove records: `everything` of a namespace, those of a `model`, or those of a prompt (`keys`, or `tokens`
        and `context`), and with `below` what hangs on them as well. Exactly one of these."""
        by_chunks = keys is not None or tokens is not None
        if everything + (model is not None) + by_chunks != 1:
            raise ConfigError("clear: give one of everything=True, model, keys or tokens")
        what: dict[str, Any]
        if everything:
            what = {"all": True}
        elif model is not None:
            what = {"model": model}
        else:
            what = {"prefix" if below else "chunks": _some(keys, tokens, context, chunk_size)}
        body = {"namespace": namespace, "what": what, "instances": _list(instances)}
        return self._post("clear", body, Started, timeout, again=False)

    def move(
        self, *, src: str, dst: str, to_instance: bool = False, src_instance: str | None = None,
        keys: Sequence[Key] | None = None, tokens: Any = None, context: KeyContext | str | None = None,
        namespace: str = "", chunk_size: int = DEFAULT_CHUNK_SIZE, timeout: float | None = None,
    ) -> Started:  # fmt: skip
        """Move records out of tier `src`.

        Args:
            dst: another tier; or with `to_instance` an instance, by its name at a controller and by host:port at a
                node (admin).
            src_instance: whose records; None: of all that have them.
            keys, tokens, context, chunk_size: as in `lookup`.
        """
        body = {
            "namespace": namespace,
            "chunks": _some(keys, tokens, context, chunk_size),
            "src": {"tier": src, "instance": src_instance},
            "dst": {"instance" if to_instance else "tier": dst},
        }
        return self._post("move", body, Started, timeout, again=False)

    def compress(
        self, codec: str, level: int | None = None, *, keys: Sequence[Key] | None = None, tokens: Any = None,
        context: KeyContext | str | None = None, namespace: str = "", instances: Sequence[str] | None = None,
        chunk_size: int = DEFAULT_CHUNK_SIZE, timeout: float | None = None,
    ) -> Started:  # fmt: skip
        """Encode stored records anew, with a codec that loses nothing. Args: as `lookup`."""
        body = self._selection(keys, tokens, context, chunk_size, namespace, instances)
        return self._post("compress", body | {"codec": codec, "level": level}, Started, timeout, again=False)

    def decompress(
        self, *, keys: Sequence[Key] | None = None, tokens: Any = None, context: KeyContext | str | None = None,
        namespace: str = "", instances: Sequence[str] | None = None, chunk_size: int = DEFAULT_CHUNK_SIZE,
        timeout: float | None = None,
    ) -> Started:  # fmt: skip
        """Store records raw again. Args: as `lookup`."""
        body = self._selection(keys, tokens, context, chunk_size, namespace, instances)
        return self._post("decompress", body, Started, timeout, again=False)

    def check_finish(self, event: str | Started, *, timeout: float | None = None) -> Finished:
        """How something that was started goes on."""
        name = event.event if isinstance(event, Started) else event
        if not name:
            return Finished("", True, not (isinstance(event, Started) and event.failures), {})
        return self._post("check_finish", {"event": name}, Finished, timeout)

    def wait(self, event: str | Started, *, timeout: float = math.inf) -> Finished:
        """Ask until it has finished. Raises `TransientError` if it has not after `timeout` seconds."""
        until = time.monotonic() + timeout
        pause = _WAIT_S
        while True:
            found = self.check_finish(event)
            if found.finished:
                return found
            if time.monotonic() + pause > until:
                raise TransientError(f"event {found.event[:80]} has not finished in {timeout:g} s", operation="wait")
            time.sleep(pause)
            pause = min(_WAIT_MOST_S, pause * 1.5)

    def report(self, body: Mapping[str, Any], *, timeout: float | None = None) -> ReportReply:
        """For nodes: tell a controller what they have (`kvstore.control.Reporter`)."""
        return self._post("report", dict(body), ReportReply, timeout)

    # How.

    def _selection(
        self, keys: Sequence[Key] | None, tokens: Any, context: KeyContext | str | None, chunk_size: int,
        namespace: str, instances: Sequence[str] | None,
    ) -> dict[str, Any]:  # fmt: skip
        chunks = _some(keys, tokens, context, chunk_size)
        return {"namespace": namespace, "chunks": chunks, "instances": _list(instances)}

    def _post(
        self, name: str, body: dict[str, Any], kind: type[T], timeout: float | None, *, again: bool = True
    ) -> T:  # fmt: skip
        data = json.dumps(body, separators=(",", ":"), allow_nan=False).encode()
        return self._call("POST", name, "", data, kind, timeout, again=again)

    def _get(self, name: str, query: str, kind: type[T], timeout: float | None) -> T:
        return self._call("GET", name, query, None, kind, timeout, again=True)

    def _call(
        self, method: str, name: str, query: str, data: bytes | None, kind: type[T], timeout: float | None, *,
        again: bool,
    ) -> T:  # fmt: skip
        seconds = self._timeout if timeout is None else timeout
        if not 0 < seconds <= 600:
            raise ConfigError(f"timeout={seconds:g} must be more than 0 and at most 600 s")
        headers = {"accept": "application/json"}
        if data is not None:
            headers["content-type"] = "application/json"
        if self._token:
            headers["authorization"] = f"Bearer {self._token}"
        answer = self._connections.request(
            method, f"/v1/{name}?timeout_s={seconds:.6f}{query}", body=data, headers=headers,
            deadline=time.monotonic() + seconds, again=again,
        )  # fmt: skip
        if answer.status != 200:
            raise _error(answer, self.url, name)
        return decode(kind, parse(answer, self.url))

    def close(self) -> None:
        """Close the connections that are kept; calls make new ones."""
        self._connections.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Client({self.url!r})"


def _chunks(
    keys: Sequence[Key] | None, tokens: Any, context: KeyContext | str | None, chunk_size: int
) -> dict[str, Any] | None:  # fmt: skip
    """A prompt in the body of a request; None: it has not one whole chunk."""
    if (keys is None) == (tokens is None):
        raise ConfigError("give the keys of a prompt, or its tokens and their context")
    if keys is None and not isinstance(context, KeyContext):
        ids = [operator.index(token) for token in tokens]
        return None if len(ids) < chunk_size else {"tokens": ids, "context": context, "chunk_size": chunk_size}
    if keys is None:
        assert isinstance(context, KeyContext)
        keys = chunk_keys(tokens, context=context, chunk_size=chunk_size)
    return {"keys": [key.hex() for key in keys], "chunk_size": chunk_size} if keys else None


def _some(
    keys: Sequence[Key] | None, tokens: Any, context: KeyContext | str | None, chunk_size: int
) -> dict[str, Any]:  # fmt: skip
    chunks = _chunks(keys, tokens, context, chunk_size)
    if chunks is None:
        raise ConfigError(f"no keys: a prompt has them from {chunk_size} tokens on")
    return chunks


def _list(names: Sequence[str] | None) -> list[str] | None:
    return None if names is None else list(names)


_KINDS: Mapping[str, type[KVStoreError]] = {
    "DeniedError": DeniedError,
    "UnknownError": UnknownError,
    **{name: getattr(errors, name) for name in errors.__all__ if isinstance(getattr(errors, name), type)},
}


def _error(answer: Answer, url: str, name: str) -> KVStoreError:
    """What a server's error is here."""
    found = parse(answer, url)
    error = found.get("error") if isinstance(found, dict) else None
    if not isinstance(error, dict):
        kind: type[KVStoreError] = TransientError if answer.status >= 500 else PermanentError
        return kind(f"{url} answers {answer.status} to {name}", operation=name)
    kind = _KINDS.get(str(error.get("type")), TransientError if answer.status >= 500 else PermanentError)
    return kind(f"{url}: {error.get('message')}")
