"""`kvstore config check FILE`: what a configuration file means, without opening anything.

Exit status: 0 it makes sense · 1 it makes sense, but with what is installed here a backend cannot be opened · 2 it does
not make sense.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import click

from kvstore.codec import load_profiles
from kvstore.config import OPTIONS, Config, load_config
from kvstore.errors import ConfigError
from kvstore.options import show_value
from kvstore.registry import PLACEMENT_OPTIONS, BackendURL, Given, backend_class, split_options, wrapper_options

from .output import check_targets, print_table, quiet, write_json

__all__ = ["check_config", "config"]


def _check(file: str, environment: bool, as_json: str) -> int:
    """Print what FILE (kvstore's YAML, or LMCache's) means: each option, its value and where it came from.

    Unknown options, bad values and unknown URLs are named, with what was probably meant. Nothing is connected to;
    files that codec_profile names are read.
    """
    check_targets(as_json)
    with quiet():
        status, report = check_config(file, environment=environment)
    if as_json:
        write_json(report, as_json)
    if as_json != "-":
        _print(report)
    return status


def check_config(
    file: str, *, environment: bool = False, env: Mapping[str, str] | None = None
) -> tuple[int, dict[str, Any]]:
    """(exit status, report). `environment`: count KVSTORE_* and LMCACHE_* variables in, which override the file."""
    variables = (os.environ if env is None else env) if environment else {}
    try:
        found = load_config(config_file=file, env=variables)
    except ConfigError as error:
        return 2, _report(file, 2, errors=[str(error)])
    rows = [_store_row(found, option) for option in OPTIONS if option.kind != "map"]
    places: list[dict[str, Any]] = []
    errors: list[str] = []
    missing: list[str] = []
    for url in found.urls:
        try:
            places.append({"url": url.base, "options": _place_rows(found, url)})
        except ConfigError as error:
            # What is not installed may be on the host that the file is for.
            (missing if "not installed" in str(error) else errors).append(url.about(error))
    try:
        load_profiles(found.remote_serde, found.codec_profile)
    except ConfigError as error:
        errors.append(f"option 'codec_profile': {error} ({found.sources.get('codec_profile', 'default')})")
    status = 2 if errors else 1 if missing else 0
    return status, _report(
        file, status, options=rows, places=places, errors=errors, missing=missing, notes=list(found.notes)
    )


def _report(file: str, status: int, **parts: list[Any]) -> dict[str, Any]:
    empty: dict[str, list[Any]] = {"options": [], "places": [], "errors": [], "missing": [], "notes": []}
    return {"tool": "kvstore config check", "file": file, "status": status, "ok": status == 0, **empty, **parts}


def _store_row(found: Config, option: Any) -> dict[str, str]:
    value = getattr(found, option.name)
    if option.kind in ("urls", "tiers"):
        shown = ", ".join(each.shown for each in value) or "—"
    else:
        shown = show_value(option, value)
    return {"name": option.name, "value": shown, "from": found.sources.get(option.name, "default")}


def _place_rows(found: Config, url: BackendURL) -> list[dict[str, str]]:
    """The options of one place that were given. Its URL is taken apart by the backend's own code as far as that opens
    nothing. Raises `ConfigError`."""
    from .doctor_network import targets_of

    overrides = found.backend_overrides(url)
    backend = backend_class(url.scheme)
    split = split_options(url, backend, overrides)
    if url.scheme != "s3":
        targets_of(url, split.own)
    else:
        from kvstore_backends.s3.options import settings_from_url

        settings_from_url(url, split.own)  # the region may come from the environment of another host
    values = {name: value for part in split for name, value in part.items()}
    rows = []
    for option in (*backend.options, *wrapper_options(), *PLACEMENT_OPTIONS):
        given = overrides.get(option.name)
        if given is not None or option.name in url.options:
            source = given.source if isinstance(given, Given) else "in the URL" if given is None else "given"
            rows.append({"name": option.name, "value": show_value(option, values[option.name]), "from": source})
    return rows


def _print(report: dict[str, Any]) -> None:
    if report["options"]:
        rows = [(row["name"], row["value"], row["from"]) for row in report["options"]]
        for place in report["places"]:
            rows += [(f"{place['url']} {row['name']}", row["value"], row["from"]) for row in place["options"]]
        print_table(("option", "value", "from"), rows, text=(0, 1, 2))
    for kind, texts in (("note", report["notes"]), ("missing here", report["missing"]), ("error", report["errors"])):
        for text in texts:
            print(f"{kind}: {text}")
    print("the configuration makes sense" if report["status"] < 2 else f"{report['file']} does not make sense")


config = click.Group("config", help="Look at configuration files.")
config.add_command(
    click.Command(
        "check",
        callback=_check,
        help=_check.__doc__,
        params=[
            click.Argument(["file"], metavar="FILE"),
            click.Option(
                ["environment", "--environment"],
                is_flag=True,
                help="Count this process's KVSTORE_* and LMCACHE_* variables in.",
            ),
            click.Option(
                ["as_json", "--json"], default="", metavar="FILE", help="Write it as JSON; -: to standard output."
            ),
        ],
    )
)
