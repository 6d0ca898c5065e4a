"""`kvstore options [SCHEME]`: the manual of options, from their definitions."""

from __future__ import annotations

from typing import Any

import click

from kvstore.config import OPTIONS
from kvstore.errors import ConfigError
from kvstore.manual import manual
from kvstore.options import Option, show_value
from kvstore.registry import (
    ELSEWHERE,
    PLACEMENT_OPTIONS,
    SCHEMES,
    backend_class,
    install_hint,
    known_schemes,
    wrapper_options,
)
from kvstore.tiers.options import TIER_OPTIONS

from .output import check_targets, write_json

__all__ = ["options", "scheme_facts"]

_GROUPS = {"store": OPTIONS, "tiers": TIER_OPTIONS}


def _options(scheme: str | None, as_json: str, markdown: bool) -> int:
    """Print the options of SCHEME (s3, file, node, ...), of the store (`store`) or of a tier (`tiers`).

    Without SCHEME: everything that can be named. --markdown prints the whole manual, docs/options.md.
    """
    check_targets(as_json)
    if markdown:
        if scheme or as_json:
            raise ConfigError("--markdown prints the whole manual: leave SCHEME and --json out")
        print(manual(), end="")
        return 0
    scheme = scheme.removesuffix("://").lower() if scheme else None
    names = [scheme] if scheme else [*_GROUPS, *known_schemes()]
    facts = {name: scheme_facts(name) for name in names}
    if as_json:
        write_json({"tool": "kvstore options", "schemes": facts}, as_json)
    if as_json == "-":
        return 0
    if scheme:
        _print(scheme, facts[scheme])
    else:
        width = max(map(len, facts))
        for name, fact in facts.items():
            print(f"{name:<{width}}  {fact['doc']}")
        print("\nkvstore options SCHEME prints the options of one")
    return 0


def scheme_facts(name: str) -> dict[str, Any]:
    """What can be said of a scheme, `store` or `tiers`: doc, example, what it needs, and its options.

    Raises:
        ConfigError: no such scheme; the known ones are named, or what to use instead.
    """
    if name in _GROUPS:
        what = "Options of the store itself: a keyword, in the file, or KVSTORE_<OPTION>."
        doc = what if name == "store" else "Options of one tier, in a map beside its url."
        return {"doc": doc, "example": "", "needs": "", "missing": "", "options": _rows(_GROUPS[name]), "common": []}
    entry = SCHEMES.get(name)
    if entry is None and name not in known_schemes():
        if name in ELSEWHERE:
            raise ConfigError(f"{name}:// is not a scheme of kvstore's: {ELSEWHERE[name]}")
        raise ConfigError(f"unknown scheme {name[:60]!r}; known: {', '.join([*_GROUPS, *known_schemes()])}")
    missing = ""
    own: list[dict[str, Any]] = []
    try:
        own = _rows(backend_class(name).options)
    except ConfigError as error:  # an extra is not installed
        missing = error.message
    return {
        "doc": entry.doc if entry is not None else "A backend of another distribution.",
        "example": entry.example if entry is not None else f"{name}://",
        "needs": install_hint(entry.extra) if entry is not None and entry.extra else "",
        "missing": missing,
        "options": own,
        "common": _rows([*wrapper_options(), *PLACEMENT_OPTIONS]),
    }


def _rows(some: Any) -> list[dict[str, Any]]:
    return [_row(option) for option in some]


def _row(option: Option) -> dict[str, Any]:
    default = option.default if option.default not in ((), {}) else None
    return {
        "name": option.name,
        "type": option.kind,
        "choices": list(option.choices),
        "secret": option.secret,
        "default": None if default is None or option.secret else show_value(option, default),
        "minimum": option.minimum,
        "maximum": option.maximum,
        "doc": option.doc,
    }


def _print(name: str, fact: dict[str, Any]) -> None:
    print(f"{name}: {fact['doc']}")
    for label, text in (("example", fact["example"]), ("needs", fact["needs"]), ("missing", fact["missing"])):
        if text:
            print(f"{label}: {text}")
    for title, rows in (("", fact["options"]), ("of every scheme:", fact["common"])):
        if rows:
            print(f"\n{title}" if title else "")
        for row in rows:
            kind = "|".join(row["choices"]) or row["type"]
            default = "" if row["default"] is None else f", default {row['default']}"
            print(f"  {row['name']} ({kind}{default}{', secret' if row['secret'] else ''})")
            print(f"      {row['doc']}")


options = click.Command(
    "options",
    callback=_options,
    help=_options.__doc__,
    params=[
        click.Argument(["scheme"], required=False, metavar="[SCHEME]"),
        click.Option(
            ["as_json", "--json"], default="", metavar="FILE", help="Write it as JSON; -: to standard output."
        ),
        click.Option(["markdown", "--markdown"], is_flag=True, help="Print the whole manual as Markdown."),
    ],
)
