"""aioboto3 as it is, behind the same seam: for services that have it anyway. Needs
`pip install -c constraints.txt '.[s3-async]'` in this project's checkout.

It runs on a loop of its own, in a thread of its own. Every call is under its deadline, and `Expect: 100-continue` is
stripped: with it a PUT to a silent server hangs for ever (aio-libs/aiobotocore#1001).
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import math
import threading
import time
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any

from botocore import xform_name

from kvstore.errors import ConfigError
from kvstore.registry import install_hint

from .answers import Coming, finished
from .client import BodyBroken, Got
from .http import LinkError
from .library import LibraryClient, coming_from
from .options import Settings
from .session import client_arguments, make_session, named, on_delete_objects, refuse_mock, strip_expect

__all__ = ["AioClient"]

_OPEN_S = 30.0
_KEPT = 3  # clients that are kept open after renewals
_GRACE_S = 0.05  # for the loop to end a call at its deadline by itself


class _Target:
    """Where a body goes, until it is revoked."""

    def __init__(self, views: Sequence[memoryview]) -> None:
        self._views = views
        self._lock = threading.Lock()
        self._revoked = False
        self._view = self._at = 0
        self.done = 0
        self.left = sum(map(len, views))
        self.coming: Coming | None = None  # once there are headers

    def write(self, data: memoryview) -> None:
        with self._lock:
            while len(data) and self.left and not self._revoked:
                view = self._views[self._view]
                count = min(len(view) - self._at, len(data))
                view[self._at : self._at + count] = data[:count]
                data = data[count:]
                self._at += count
                self.done += count
                self.left -= count
                if self._at == len(view):
                    self._view += 1
                    self._at = 0

    def revoke(self) -> None:
        with self._lock:
            self._revoked = True


class AioClient(LibraryClient):
    """See the module's docstring.

    Raises:
        ConfigError: aioboto3 is not installed.
    """

    name = "aioboto3"

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        try:
            import aioboto3
            import aiobotocore.config
        except ImportError as error:
            raise ConfigError(
                "client=aioboto3 needs aioboto3, which is not installed: in this project's checkout run "
                f"{install_hint('s3-async')}"
            ) from error
        self._aioboto3, self._config = aioboto3, aiobotocore.config.AioConfig
        self._settings = settings
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="kvstore-s3-aioboto3", daemon=True)
        self._thread.start()
        self._contexts: list[Any] = []
        self._boto: Any = None
        try:
            self.reopen()
        except BaseException:
            self.close()
            raise

    def reopen(self) -> None:
        self._run(self._enter(), time.monotonic() + _OPEN_S)

    async def _enter(self) -> None:
        settings = self._settings
        arguments = client_arguments(settings, make_session(settings))
        secrets = {} if settings.access_key_id is None else {
            "aws_access_key_id": settings.access_key_id,
            "aws_secret_access_key": settings.secret_access_key,
            "aws_session_token": settings.session_token,
        }  # fmt: skip
        with named(settings):
            arguments["config"] = self._config(**arguments["config"])
            session = self._aioboto3.Session(
                profile_name=settings.profile, region_name=arguments["region_name"], **secrets
            )
            context = session.client("s3", **arguments)
            boto = await context.__aenter__()
        self._contexts.append(context)
        self.endpoint = boto.meta.endpoint_url
        refuse_mock(settings, self.endpoint)
        boto.meta.events.register_first("before-sign.s3", strip_expect)
        boto.meta.events.register_first("before-call.s3.DeleteObjects", on_delete_objects(settings, boto))
        self._boto = boto
        while len(self._contexts) > _KEPT:  # calls may still be under way in the last ones
            await self._contexts.pop(0).__aexit__(None, None, None)

    def _run(self, work: Coroutine[Any, Any, Any], deadline: float) -> Any:
        """Run a coroutine on the loop; it is cancelled at the deadline."""

        async def bounded() -> Any:
            async with asyncio.timeout_at(None if deadline == math.inf else deadline):
                return await work

        left = deadline - time.monotonic()
        if left <= 0 or not self._thread.is_alive():
            work.close()
            raise LinkError("deadline", "the deadline passed")
        future = asyncio.run_coroutine_threadsafe(bounded(), self._loop)
        try:
            return future.result(min(left + _GRACE_S, threading.TIMEOUT_MAX))
        except (TimeoutError, concurrent.futures.CancelledError) as error:
            future.cancel()
            raise LinkError("deadline", "the deadline passed") from error

    def _call(self, operation: str, params: Mapping[str, Any]) -> Coroutine[Any, Any, dict[str, Any]]:
        call: Coroutine[Any, Any, dict[str, Any]] = getattr(self._boto, xform_name(operation))(
            Bucket=self._settings.bucket, **params
        )
        return call

    def _fetch(self, params: Mapping[str, Any], start: int, views: Sequence[memoryview], deadline: float) -> Got:
        target = _Target(views)
        try:
            got: Got = self._run(self._receive(params, start, views, target), deadline)
            return got
        except BodyBroken:
            raise
        except Exception as error:
            target.revoke()
            if target.coming is not None:
                raise BodyBroken(target.done, target.coming.etag, error) from error
            raise
        finally:
            target.revoke()

    async def _receive(
        self, params: Mapping[str, Any], start: int, views: Sequence[memoryview], target: _Target
    ) -> Got:
        begin = time.monotonic()
        answer = await self._call("GetObject", params)
        seconds = time.monotonic() - begin
        async with answer["Body"] as body:
            target.coming = what = coming_from(answer, start, views)
            skip = what.skip
            while target.left and (chunk := await body.content.readany()):
                data = memoryview(chunk)
                if skip:
                    passed = min(skip, len(data))
                    skip -= passed
                    data = data[passed:]
                target.write(data)
        return finished(what, target.done, seconds)

    def invoke(self, operation: str, params: Mapping[str, Any], *, deadline: float) -> dict[str, Any]:
        answer: dict[str, Any] = self._run(self._call(operation, params), deadline)
        return answer

    async def _leave(self) -> None:
        while self._contexts:
            await self._contexts.pop().__aexit__(None, None, None)

    def close(self) -> None:
        if self._loop.is_closed() or not self._thread.is_alive():
            return
        try:
            asyncio.run_coroutine_threadsafe(self._leave(), self._loop).result(1.0)
        except Exception:  # noqa: BLE001 - close always returns
            pass
        self._stop()

    def _stop(self) -> None:
        async def rest() -> None:
            others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)
            await self._loop.shutdown_default_executor()

        try:
            asyncio.run_coroutine_threadsafe(rest(), self._loop).result(1.0)
        except Exception:  # noqa: BLE001 - close always returns
            pass
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(1.0)
        if not self._thread.is_alive():
            self._loop.close()
