"""Who asks, and what he may see: bearer tokens, one for each namespace and one for all.

An unknown namespace and one with another token look alike, so that nobody learns the names of others.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterable, Sequence

from kvstore.errors import KVStoreError

from .settings import ControlSettings

__all__ = ["Access", "DeniedError", "Principal"]


class DeniedError(KVStoreError):
    """No token, or not one that may do this."""


class Principal:
    """Who sent a request.

    Attributes:
        token: as he gave it, to be passed on to nodes; "" without one. Never shown.
        admin: may see every namespace, and act in it.
        operator: may read the metrics and the page.
        reporter: may report what a node holds.
    """

    __slots__ = ("_namespaces", "admin", "operator", "reporter", "token")

    def __init__(
        self, token: str, namespaces: Iterable[str], *, admin: bool, operator: bool, reporter: bool
    ) -> None:  # fmt: skip
        self.token = token
        self.admin = admin
        self.operator = operator
        self.reporter = reporter
        self._namespaces = frozenset(namespaces)

    @property
    def known(self) -> bool:
        """Whether there is anything that he may see."""
        return self.admin or bool(self._namespaces)

    def sees(self, namespace: str) -> bool:
        """Whether he may know that it is there."""
        return self.admin or namespace in self._namespaces

    def check(self, namespace: str) -> None:
        """Raises `DeniedError` unless he sees it."""
        if not self.sees(namespace):
            raise DeniedError("this token opens no such namespace" if self.token else "this namespace needs a token")

    def only(self, namespaces: Sequence[str]) -> list[str]:
        """Those of `namespaces` that he sees."""
        return [name for name in namespaces if self.sees(name)]

    def require_admin(self, what: str) -> None:
        """Raises `DeniedError`, which says that `what` is the admin's."""
        if not self.admin:
            raise DeniedError(f"{what} needs the admin token")


class Access:
    """Recognises tokens, in time that does not depend on what they have in common with the right ones."""

    def __init__(self, settings: ControlSettings) -> None:
        self._settings = settings
        self._open = [name for name, token in settings.tokens.items() if not token]

    def recognise(self, authorization: str | None) -> Principal:
        """The sender of a request.

        Args:
            authorization: the header, "Bearer TOKEN"; None: there is none.

        Raises:
            DeniedError: a token that nobody has, or another scheme.
        """
        s = self._settings
        if authorization is None:
            return Principal(
                "", self._open, admin=s.all_open, operator=s.all_open, reporter=s.all_open and not s.report_token
            )
        scheme, _, token = authorization.partition(" ")
        given = token.strip().encode("utf-8", "surrogateescape")
        if scheme.lower() != "bearer" or not given:
            raise DeniedError("authorise with 'Authorization: Bearer TOKEN'")
        admin = bool(s.admin_token) & hmac.compare_digest(given, s.admin_token)
        reporter = bool(s.report_token) & hmac.compare_digest(given, s.report_token)
        found = [name for name, known in s.tokens.items() if known and hmac.compare_digest(given, known)]
        if not (admin or reporter or found or s.all_open):
            raise DeniedError("this token opens nothing here")
        return Principal(
            token.strip(),
            [*self._open, *found],
            admin=admin or s.all_open,
            operator=admin or s.all_open,  # metrics and page name all namespaces
            reporter=admin or reporter or (s.all_open and not s.report_token),
        )
