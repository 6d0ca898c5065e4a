"""A small simulator of IAM: what identity policies, and the resource's own, allow.

An explicit Deny wins; without an Allow nothing is allowed. Only what our documents use is known; anything else is an
error, so that no statement is passed over.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping
from typing import Any

__all__ = ["allowed"]


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _matches(patterns: Any, text: str, *, fold: bool = False) -> bool:
    return any(fnmatch.fnmatchcase(text.lower() if fold else text, p.lower() if fold else p) for p in _list(patterns))


def _holds(conditions: Mapping[str, Mapping[str, Any]], context: Mapping[str, str]) -> bool:
    for operator, keys in conditions.items():
        for key, wanted in keys.items():
            have = context.get(key)
            if operator in ("StringEquals", "Bool"):
                met = have in _list(wanted)
            elif operator == "ArnEquals":
                met = have is not None and _matches(wanted, have)
            else:
                raise NotImplementedError(f"condition operator {operator}")
            if not met:
                return False
    return True


def _applies(statement: Mapping[str, Any], action: str, resource: str, context: Mapping[str, str]) -> bool:
    unknown = set(statement) - {"Sid", "Effect", "Principal", "Action", "Resource", "Condition"}
    if unknown:
        raise NotImplementedError(f"statement with {sorted(unknown)}")
    return (
        _matches(statement["Action"], action, fold=True)
        and _matches(statement["Resource"], resource)
        and _holds(statement.get("Condition", {}), context)
    )


def allowed(
    documents: Iterable[Mapping[str, Any]], action: str, resource: str, context: Mapping[str, str] | None = None
) -> bool:
    """Whether policies allow an action.

    Args:
        documents: policies of the role, and of the resource as far as they deny.
        action: such as "s3:GetObject".
        resource: ARN of what is acted on.
        context: condition keys of the request. A key that is missing equals nothing.
    """
    effects = {
        statement["Effect"]
        for document in documents
        for statement in _list(document["Statement"])
        if _applies(statement, action, resource, context or {})
    }
    return effects == {"Allow"}
