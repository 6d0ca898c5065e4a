"""Credentials in time: refreshed by one thread for all lanes, and never at the price of a deadline.

botocore refreshes temporary credentials 15 minutes before they expire if it can, and 10 minutes before it must. The
refresh (STS, SSO, the instance's metadata service) is a request of its own, with timeouts of its own, in whichever
lane comes first. Here it is made in a thread; a lane waits for it only if there is nothing valid to sign with, and
then only until its deadline.
"""

from __future__ import annotations

import threading
import time
from typing import Any

from .http import LinkError

__all__ = ["CredentialGate"]

_AGAIN_S = 1.0  # after a failed refresh


class CredentialGate:
    """Call `ready` before each request.

    Args:
        credentials: what a botocore session found; None: nothing.
    """

    def __init__(self, credentials: Any) -> None:
        self._credentials = credentials
        self._needed = getattr(credentials, "refresh_needed", None)  # only temporary ones have it
        self._wake = threading.Condition()
        self._busy = False
        self._failed_at = -_AGAIN_S
        self.refreshes = 0

    def ready(self, deadline: float) -> None:
        """Return when there are credentials to sign with (or none that could be refreshed).

        Raises:
            LinkError: "deadline": they were not there in time.
        """
        if self._needed is None or not self._needed():
            return
        must = self._needed(refresh_in=0)
        with self._wake:
            if not self._busy and self._needed() and (must or time.monotonic() - self._failed_at >= _AGAIN_S):
                self._busy = True
                self.refreshes += 1
                threading.Thread(target=self._refresh, name="kvstore-s3-credentials", daemon=True).start()
            while must and self._busy:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise LinkError("deadline", "the deadline passed while the credentials were being refreshed")
                self._wake.wait(min(left, threading.TIMEOUT_MAX))

    def _refresh(self) -> None:
        failed = True
        try:
            self._credentials.get_frozen_credentials()
            failed = False
        except Exception:  # noqa: BLE001 - whoever needs them meets the same error, and reports it
            pass
        finally:
            with self._wake:
                self._busy = False
                if failed:
                    self._failed_at = time.monotonic()
                self._wake.notify_all()
