"""LMCache's MP mode, surface `native_plugin`: six methods by duck typing, the same from 0.4.7 to 0.5.7.

lmcache server … --l2-adapter '{"type": "native_plugin", "module_path": "kvstore.integrations.lmcache",
    "class_name": "KVStoreL2", "adapter_params": {"remote_url": "s3://bucket/prefix"}}'
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

from kvstore.backend import Outcome, Status
from kvstore.completion import Completion
from kvstore.errors import ClosedError, ConfigError, KVStoreError
from kvstore.integrations._opaque import Grumbler, outcomes_of, what_failed

from ._client import SIZES, logger, open_client

__all__ = ["KVStoreL2"]

Answer = tuple[int, bool, str, list[bool] | None]
"""(number of the call, all went well, what did not, what is true of each key)."""


class KVStoreL2:
    """A store as LMCache's native connector.

    Reads land in LMCache's own memory and writes leave from it: no copy is made on either way. What LMCache asks for
    is answered when its memory is free again, so a backend that hangs cannot spoil memory that was given on.

    Args:
        remote_url: as in `kvstore.open_store`, or None if the file says it.
        config_file: YAML of kvstore's options.
        sizes: "exact": a record fills its view, or is no hit. "at_most": it may be shorter, which is what LMCache's
            `serde` needs; its length is then looked up first.
        options: further options of `kvstore.config`, such as `namespace` or `blocking_timeout`.

    Raises:
        ConfigError: as `kvstore.open_store`; another word for `sizes`; secrets, which LMCache would log.
    """

    def __init__(
        self, remote_url: Any = None, config_file: str | None = None, sizes: str = "exact", **options: Any
    ) -> None:
        if sizes not in SIZES:
            raise ConfigError(f"option sizes must be one of {', '.join(SIZES)}, not {sizes!r}")
        self._client = open_client("mp", remote_url, config_file, options)
        self._get = self._client.get if sizes == "exact" else self._client.get_at_most
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._grumbler = Grumbler(logger)
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._answers: list[Answer] = []
        self._calls = 0
        self._closed = False

    def event_fd(self) -> int:
        """Descriptor that is readable while there is something to drain. Raises `ClosedError` after `close`."""
        if self._closed:  # the number may already name another file
            raise ClosedError("this connection to the store is closed")
        return self._event

    def submit_batch_get(self, keys: Sequence[str], views: Sequence[memoryview]) -> int:
        """Read each record into its view; returns the number of the call.

        Each key's answer is true if its view now holds exactly what was stored, checksums verified.
        """
        return self._submit("load", len(keys), lambda: self._get(keys, views), _found)

    def submit_batch_set(self, keys: Sequence[str], views: Sequence[memoryview]) -> int:
        """Store each view under its key. The call went well if all of them are stored."""
        return self._submit("store", len(keys), lambda: self._client.put(keys, views), _stored)

    def submit_batch_exists(self, keys: Sequence[str]) -> int:
        """Ask which keys are stored. An answer that trouble prevents is false."""
        return self._submit("lookup", len(keys), lambda: self._client.exists(keys), _found)

    def submit_batch_delete(self, keys: Sequence[str]) -> int:
        """Remove records. Each key's answer is true if it was there."""
        return self._submit("delete", len(keys), lambda: self._client.delete(keys), _found)

    def drain_completions(self) -> list[Answer]:
        """What has been answered since the last call."""
        with self._lock:
            answers, self._answers = self._answers, []
            if not self._closed:
                try:
                    os.eventfd_read(self._event)
                except BlockingIOError:
                    pass
        return answers

    def close(self) -> None:
        """Finish what is being written (within `close_timeout`), and end. May be called twice. Calls that had no answer
        yet get none: their memory is not said to be free."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._client.close()
        os.close(self._event)

    def _submit(
        self,
        what: str,
        count: int,
        start: Callable[[], Completion[Sequence[Outcome]]],
        judge: Callable[[Sequence[Outcome]], tuple[bool, str, list[bool] | None]],
    ) -> int:
        if os.getpid() != self._pid:
            raise ClosedError("this connection was opened before fork(); open another one in the child")
        with self._lock:
            if self._closed:
                raise ClosedError("this connection to the store is closed")
            self._calls += 1
            call = self._calls

        def answer(outcomes: Sequence[Outcome]) -> None:
            ok, trouble, each = judge(outcomes)
            # LMCache looks at the reason of a store that failed at most.
            self._grumbler.warn(f"a {what} of LMCache's is in trouble", trouble)
            self._answer((call, ok, trouble, each))

        try:
            completion = start()
        except KVStoreError as error:
            self._grumbler.warn(f"a {what} of LMCache's cannot be asked for", str(error))
            self._answer((call, False, str(error), [False] * count))
            return call
        self._client.settler.when_settled(completion, lambda: answer(outcomes_of(completion, count)))
        return call

    def _answer(self, answer: Answer) -> None:
        with self._lock:
            if self._closed:
                return
            self._answers.append(answer)
            os.eventfd_write(self._event, 1)


def _found(outcomes: Sequence[Outcome]) -> tuple[bool, str, list[bool]]:
    """A miss is data, and so is trouble: LMCache computes what it does not get."""
    return True, what_failed(outcomes), [each.status is Status.OK for each in outcomes]


def _stored(outcomes: Sequence[Outcome]) -> tuple[bool, str, None]:
    trouble = what_failed(outcomes, stored=True)
    return not trouble, trouble, None
