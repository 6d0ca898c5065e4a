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
from botocore.exceptions import ClientError

from kvstore.errors import ConfigError
from kvstore.registry import install_hint

from .client import BodyBroken, Client, Found, Got, Source, age_of
from .http import LinkError
from .options import Settings
from .session import client_arguments, make_session, on_delete_objects, strip_expect
from .stock import found_of, missing, unsatisfiable

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
        self.etag = ""
        self.begun = False

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


class AioClient(Client):
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
            self._stop()
            raise

    def reopen(self) -> None:
        self._run(self._enter(), time.monotonic() + _OPEN_S)

    async def _enter(self) -> None:
        settings = self._settings
        arguments = client_arguments(settings, make_session(settings))
        arguments["config"] = self._config(**arguments["config"])
        secrets = {} if settings.access_key_id is None else {
            "aws_access_key_id": settings.access_key_id,
            "aws_secret_access_key": settings.secret_access_key,
            "aws_session_token": settings.session_token,
        }  # fmt: skip
        session = self._aioboto3.Session(profile_name=settings.profile, **secrets)
        context = session.client("s3", **arguments)
        try:
            boto = await context.__aenter__()
        except ValueError as error:
            raise ConfigError(f"s3://{settings.bucket}: {error}") from error
        boto.meta.events.register_first("before-sign.s3", strip_expect)
        boto.meta.events.register_first("before-call.s3.DeleteObjects", on_delete_objects(settings))
        self._boto = boto
        self._contexts.append(context)
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

    def head(self, key: str, *, deadline: float) -> Found | None:
        try:
            return found_of(self._run(self._call("HeadObject", {"Key": key}), deadline))
        except ClientError as error:
            if missing(error):
                return None
            raise

    def get(
        self, key: str, start: int, views: Sequence[memoryview], *, etag: str | None, deadline: float
    ) -> Got | None:
        target = _Target(views)
        try:
            got: Got | None = self._run(self._get(key, start, target, etag), deadline)
            return got
        except ClientError as error:
            if missing(error):
                return None
            if unsatisfiable(error):
                return Got(0, "", 0.0)
            raise
        except Exception as error:
            target.revoke()
            if target.begun:
                raise BodyBroken(target.done, target.etag, error) from error
            raise
        finally:
            target.revoke()

    async def _get(self, key: str, start: int, target: _Target, etag: str | None) -> Got:
        params: dict[str, Any] = {"Key": key, "Range": f"bytes={start}-{start + target.left - 1}"}
        if etag is not None:
            params["IfMatch"] = etag
        begin = time.monotonic()
        answer = await self._call("GetObject", params)
        seconds = time.monotonic() - begin
        target.etag, age = answer.get("ETag", ""), age_of(answer["ResponseMetadata"]["HTTPHeaders"])
        target.begun = True
        skip = start if "ContentRange" not in answer else 0  # the server ignores Range
        async with answer["Body"] as body:
            while target.left and (chunk := await body.content.readany()):
                data = memoryview(chunk)
                if skip:
                    passed = min(skip, len(data))
                    skip -= passed
                    data = data[passed:]
                target.write(data)
        return Got(target.done, target.etag, age, seconds)

    def put(self, operation: str, params: Mapping[str, Any], source: Source, *, deadline: float) -> dict[str, Any]:
        mine = Source(source.views, source.nbytes)
        try:
            call = self._call(operation, {**params, "Body": mine if mine.nbytes else b""})
            answer: dict[str, Any] = self._run(call, deadline)
            return answer
        finally:
            mine.revoke()

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
