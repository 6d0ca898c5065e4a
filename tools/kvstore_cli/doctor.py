"""`kvstore doctor URL …`: what is wrong with a place, and what to change.

Each place is looked at in the order in which a connection comes about: options, name, TCP, TLS, the service's clock and
the bucket's region, credentials; then a record of a reserved name is stored, read, listed and removed again. What comes
after a failure that it depends on is left out. Everything ends within --timeout.

Exit status: 0 all works (warnings included) · 1 something failed · 2 the URL or the configuration makes no sense.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from kvstore.codec import load_profiles
from kvstore.config import Config, load_config
from kvstore.errors import ConfigError
from kvstore.options import parse_duration, parse_size
from kvstore.registry import BackendURL, Given, backend_class, split_options

from .doctor_checks import Place
from .doctor_network import check_s3_credentials, check_s3_service, check_way, targets_of
from .doctor_probe import check_folder, try_place
from .output import check_targets, quiet, write_json

__all__ = ["diagnose", "doctor"]

_MARKS = {"ok": "✓", "warn": "!", "fail": "✗", "skip": "·"}
_MOST_PROBE_BYTES = 256 << 20


def _doctor(urls: Sequence[str], config_file: str, timeout: str, size: str, read_only: bool, as_json: str) -> int:
    """Explain what is wrong with URLS, or with the places of --config FILE, and what to change.

    Stores a small record under a name of its own, reads it, and removes it again (--read-only: does not).
    """
    check_targets(as_json)
    seconds = parse_duration(timeout, name="timeout")
    nbytes = parse_size(size, name="bytes")
    if not 0.1 <= seconds <= 3600:
        raise ConfigError(f"option 'timeout': {timeout!r} is out of range; it must be 100 ms to 1 h")
    if not 1 <= nbytes <= _MOST_PROBE_BYTES:
        raise ConfigError(f"option 'bytes': {size!r} is out of range; it must be 1 B to 256 MiB")
    if not urls and not config_file:
        raise ConfigError("name a URL, for instance kvstore doctor s3://bucket/kv?region=us-west-2, or --config FILE")
    if config_file and not Path(config_file).is_file():
        raise ConfigError(f"option 'config': there is no file {config_file}")
    with quiet():
        status, report = diagnose(urls, config_file=config_file, timeout=seconds, nbytes=nbytes, read_only=read_only)
    if as_json:
        write_json(report, as_json)
    if as_json != "-":
        _print(report)
    return status


def diagnose(
    urls: Sequence[str], *, config_file: str = "", timeout: float = 10.0, nbytes: int = 4 << 20, read_only: bool = False
) -> tuple[int, dict[str, Any]]:
    """(exit status, report). `timeout`: seconds for each place; `nbytes`: of the probe."""
    try:
        config = load_config(list(urls) or None, config_file=config_file or None)
    except ConfigError as error:
        return 2, _report([], 2, str(error), ())
    try:
        load_profiles(config.remote_serde, config.codec_profile)
    except ConfigError as error:
        text = f"option 'codec_profile': {error} ({config.sources.get('codec_profile', 'given')})"
        return 2, _report([], 2, text, config.notes)
    senseless = False
    places = []
    for url in config.urls:
        place = Place(url.base, time.monotonic() + timeout)
        senseless |= not _look(place, config, url, nbytes=nbytes, read_only=read_only)
        places.append(place)
    status = 2 if senseless else 1 if any(place.failed for place in places) else 0
    return status, _report(places, status, "", config.notes)


def _report(places: Sequence[Place], status: int, error: str, notes: Sequence[str]) -> dict[str, Any]:
    return {
        "tool": "kvstore doctor",
        "status": status,
        "ok": status == 0,
        "error": error,
        "notes": list(notes),
        "places": [place.to_dict() for place in places],
    }


def _look(place: Place, config: Config, url: BackendURL, *, nbytes: int, read_only: bool) -> bool:
    """All checks of one place. False: its URL or options make no sense."""
    overrides = config.backend_overrides(url)
    try:
        split = split_options(url, backend_class(url.scheme), overrides)
        targets = targets_of(url, split.own)
    except ConfigError as error:
        place.add("options", "fail", str(error), f"see `kvstore options {url.scheme}`")
        return False
    given = {name: value.source if isinstance(value, Given) else "given" for name, value in overrides.items()}
    given |= dict.fromkeys(url.options.keys() - given.keys(), "in the URL")
    shown = ", ".join(f"{name} ({source})" for name, source in sorted(given.items())) or "all at their defaults"
    place.add("options", "ok", shown, options=sorted(given))
    if url.scheme == "file" and not check_folder(place, url, read_only=read_only):
        return True
    if url.scheme == "s3":
        if not _s3_way(place, url, split.own, targets):
            return True
    elif targets:
        reached = [check_way(place, target) for target in targets]
        if not any(reached):
            return True
    if place.left <= 0:
        place.add("open", "skip", "no time was left", "give more --timeout")
        return True
    try_place(place, url, overrides, nbytes=nbytes, read_only=read_only)
    return True


def _s3_way(place: Place, url: BackendURL, options: dict[str, Any], targets: Sequence[Any]) -> bool:
    from kvstore_backends.s3.native import uses_proxy
    from kvstore_backends.s3.options import settings_from_url

    from .doctor_network import s3_endpoint

    if uses_proxy(settings_from_url(url, options), s3_endpoint(url, options)):
        place.add("tcp", "skip", "the environment names a proxy for this endpoint: the way to it is not looked at")
    elif not all(check_way(place, target) for target in targets) or not check_s3_service(place, url, options):
        return False
    return check_s3_credentials(place, url, options)


def _print(report: dict[str, Any]) -> None:
    if report["error"]:
        print(f"✗ configuration: {report['error']}")
    for note in report["notes"]:
        print(f"note: {note}")
    for place in report["places"]:
        print(place["url"])
        for check in place["checks"]:
            print(f"  {_MARKS[check['status']]} {check['name']}: {check['detail']}")
            if check["advice"]:
                print(f"      → {check['advice']}")
    failed = sum(check["status"] == "fail" for place in report["places"] for check in place["checks"])
    warned = sum(check["status"] == "warn" for place in report["places"] for check in place["checks"])
    failed += bool(report["error"])
    print("nothing is wrong" if report["ok"] and not warned else f"{failed} failed, {warned} to look at")


doctor = click.Command(
    "doctor",
    callback=_doctor,
    help=_doctor.__doc__,
    params=[
        click.Argument(["urls"], nargs=-1, metavar="[URL]..."),
        click.Option(["config_file", "--config"], default="", metavar="FILE", help="YAML of a store: all its places."),
        click.Option(
            ["timeout", "--timeout"], default="10s", metavar="DURATION", show_default=True, help="For each place."
        ),
        click.Option(
            ["size", "--bytes"], default="4MiB", metavar="SIZE", show_default=True, help="Of the probe record."
        ),
        click.Option(["read_only", "--read-only"], is_flag=True, help="Store nothing."),
        click.Option(
            ["as_json", "--json"], default="", metavar="FILE", help="Write it as JSON; -: to standard output."
        ),
    ],
)
