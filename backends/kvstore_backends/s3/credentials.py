"""Credentials in time: refreshed by one thread for all lanes, and never at the price of a deadline.

botocore refreshes temporary credentials in whichever lane signs next, by a request (STS, SSO, the instance's metadata,
CreateSession of S3 Express) with timeouts of its own, and has the other lanes wait on a lock. Here what signs gets a
`Gate`: it hands out what is valid at once, has a thread of its own fetch what comes after it, and lets a lane wait only
if there is nothing valid to sign with, and then only until its deadline.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from botocore.credentials import Credentials

from .answers import answered_at
from .http import LinkError

__all__ = ["Gate", "Identities", "Session", "gated"]

_AGAIN_S = 1.0  # between refreshes that nobody waits for


class _Attempt:
    """One refresh. `error` is for those who waited for it."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self.error: Exception | None = None


class Gate(Credentials):  # type: ignore[misc]
    """Stands in for temporary credentials wherever botocore signs.

    Args:
        source: botocore's own `RefreshableCredentials`, or anything with its two methods.
        until: the deadline of the call that this thread is in, absolute monotonic seconds.
        early: seconds before their end from which they are refreshed; None: as the source has it (15 minutes).

    Attributes:
        refreshes: how often the source was asked.
    """

    def __init__(self, source: Any, until: Callable[[], float], *, early: float | None = None) -> None:
        super().__init__("", "", method=getattr(source, "method", None))
        self._source = source
        self._until = until
        self._early = early
        # What there is. botocore's method would refresh it first, here, and fail with that though it is still valid.
        self._frozen: Any = getattr(source, "_frozen_credentials", None)
        self._lock = threading.Lock()
        self._attempt: _Attempt | None = None
        self._tried_at = -_AGAIN_S
        self.refreshes = 0

    def get_frozen_credentials(self) -> Any:
        """What to sign with.

        Raises:
            LinkError: "deadline": it was not there in time.
            Exception: what the source raised, if nothing valid is left.
        """
        if self._over() or self._source.refresh_needed(self._early):
            attempt = self._begin()
            if attempt is not None:
                if not attempt.done.wait(min(max(0.0, self._until() - time.monotonic()), threading.TIMEOUT_MAX)):
                    raise LinkError("deadline", "the deadline passed while the credentials were being refreshed")
                if attempt.error is not None:
                    raise attempt.error.with_traceback(None)
        return self._frozen

    def _over(self) -> bool:
        """Whether there is nothing valid to sign with."""
        return self._frozen is None or bool(self._source.refresh_needed(0))

    def _begin(self) -> _Attempt | None:
        """Begin a refresh if none is under way. The one to wait for, or None: there is time."""
        with self._lock:
            must = self._over()  # not asked before: another lane's refresh may have ended meanwhile
            if self._attempt is None and (must or time.monotonic() - self._tried_at >= _AGAIN_S):
                attempt = _Attempt()
                self.refreshes += 1
                threading.Thread(
                    target=self._refresh, args=(attempt,), name="kvstore-s3-credentials", daemon=True
                ).start()
                self._attempt = attempt
            return self._attempt if must else None

    def _refresh(self, attempt: _Attempt) -> None:
        try:
            self._frozen = self._source.get_frozen_credentials()
        except Exception as error:  # noqa: BLE001 - it belongs to those who wait
            attempt.error = error
        finally:
            with self._lock:
                self._attempt = None
                self._tried_at = time.monotonic()
            attempt.done.set()


class Session:
    """A session of S3 Express as the source of a `Gate`. How long it lives is told by the service's own clock.

    Args:
        create: CreateSession.
    """

    method = "s3express"

    def __init__(self, create: Callable[[], dict[str, Any]]) -> None:
        self._create = create
        self._ends = 0.0

    def refresh_needed(self, refresh_in: float) -> bool:
        return time.monotonic() >= self._ends - refresh_in

    def get_frozen_credentials(self) -> Any:
        """A new session. Raises what `create` raises."""
        begin = time.monotonic()
        answer = self._create()
        new = answer["Credentials"]
        self._ends = begin + new["Expiration"].timestamp() - answered_at(answer)
        keys = Credentials(new["AccessKeyId"], new["SecretAccessKey"], new["SessionToken"], self.method)
        return keys.get_frozen_credentials()


class Identities:
    """Stands in for botocore's cache of S3 Express sessions, of one bucket: see `Gate`."""

    def __init__(self, session: Gate) -> None:
        self._session = session

    def get_credentials(self, bucket: str) -> Gate:
        return self._session


class _Chain:
    """A provider chain that was asked already."""

    def __init__(self, found: Any) -> None:
        self._found = found

    def load_credentials(self) -> Any:
        return self._found


def gated(session: Any, until: Callable[[], float]) -> None:
    """Ask the credential chain of a botocore session, and put a `Gate` in front of what it finds, if that expires.

    Raises:
        BotoCoreError: what the chain raises.
    """
    found = session.get_component("credential_provider").load_credentials()
    if hasattr(found, "refresh_needed"):  # only temporary credentials have it
        found = Gate(found, until)
    session.register_component("credential_provider", _Chain(found))
