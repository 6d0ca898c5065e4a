"""What the two clients that use a library as it is share: all but how a call runs and how a body is read."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from botocore.exceptions import ClientError

from .answers import Coming, behind, coming, found_of, missing, unsatisfiable
from .client import Client, Found, Got, Source

__all__ = ["LibraryClient", "coming_from"]


class LibraryClient(Client):
    """HEAD, GET and PUT on top of `invoke` and `_fetch`."""

    def head(self, key: str, *, deadline: float) -> Found | None:
        try:
            answer = self.invoke("HeadObject", {"Key": key}, deadline=deadline)
        except ClientError as error:
            if missing(error):
                return None
            raise
        meta = answer["ResponseMetadata"]
        return found_of(meta["HTTPStatusCode"], meta["HTTPHeaders"])

    def get(
        self, key: str, start: int, views: Sequence[memoryview], *, etag: str | None, deadline: float
    ) -> Got | None:
        params: dict[str, Any] = {"Key": key, "Range": f"bytes={start}-{start + sum(map(len, views)) - 1}"}
        if etag is not None:
            params["IfMatch"] = etag
        try:
            return self._fetch(params, start, views, deadline)
        except ClientError as error:
            if missing(error):
                return None
            if unsatisfiable(error):
                return behind(error.response["ResponseMetadata"].get("HTTPHeaders", {}), start)
            raise

    @abstractmethod
    def _fetch(self, params: Mapping[str, Any], start: int, views: Sequence[memoryview], deadline: float) -> Got:
        """GetObject, and its body into `views`. Raises what the library raises, or `BodyBroken`."""

    def put(self, operation: str, params: Mapping[str, Any], source: Source, *, deadline: float) -> dict[str, Any]:
        mine = Source(source.views, source.nbytes)
        try:
            return self.invoke(operation, {**params, "Body": mine if mine.nbytes else b""}, deadline=deadline)
        finally:
            mine.revoke()


def coming_from(answer: Mapping[str, Any], start: int, views: Sequence[memoryview]) -> Coming:
    """What the body of a library's answer to GetObject brings. Raises `LinkError` if it cannot be believed."""
    meta = answer["ResponseMetadata"]
    return coming(meta["HTTPStatusCode"], meta["HTTPHeaders"], start, sum(map(len, views)))
