"""The price file of `kvstore plan`: read, checked, and reduced to one region and one way to pay.

`prices.yaml` beside this module is the packaged one; `--prices FILE` overrides it entry by entry.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from kvstore.config import read_yaml
from kvstore.errors import ConfigError

from .plan_core import GB, Link, Machine

__all__ = ["PACKAGED", "Prices", "load_prices"]

PACKAGED = Path(__file__).with_name("prices.yaml")

_NUMBERS: dict[str, tuple[str, ...]] = {
    "modes": ("factor",),
    "nodes": ("usable_gb",),
    "gpus": ("memory_gb", "tflops", "memory_gb_s"),
    "instances": ("gpus", "vcpus", "memory_gb", "nvme_gb", "nvme_gb_s", "network_gbps"),
    "links": ("latency_ms", "gb_s"),
    "prices": (),
}
_TEXTS = {"prices": ("per",), "instances": ("gpu",)}
_BY_REGION = ("prices", "nodes", "instances")
_KINDS = {
    "modes": "way to pay",
    "prices": "price",
    "nodes": "node",
    "gpus": "GPU",
    "instances": "instance",
    "links": "link",
}
_MOST = 1e12


@dataclass(frozen=True, slots=True)
class Prices:
    """What things cost in one region, paid for in one way.

    Attributes:
        usd: unit price by name (`s3.storage`); the unit is in `per`.
        per: unit by name ("GB-month"); GB is 2^30 bytes.
        nodes: on-demand price per hour and usable bytes, by name.
        machines: GPU instances by name, at the price of `mode`.
        links: by tier.
        factor: of `mode`, on on-demand prices of instances.
        date: of the file.
        files: which files they came from.
        origins: the texts of `sources` that were used, and where entries came from.
        overridden: entries that came from the second file ("prices.s3.storage").
    """

    region: str
    mode: str
    factor: float
    usd: Mapping[str, float]
    per: Mapping[str, str]
    nodes: Mapping[str, tuple[float, float]]
    machines: Mapping[str, Machine]
    links: Mapping[str, Link]
    date: str
    files: tuple[str, ...]
    origins: tuple[str, ...]
    overridden: tuple[str, ...]

    def hourly(self, name: str) -> float:
        """USD per hour of a node or an instance; modes apply to instances only (a cache node is on demand)."""
        return self.machines[name].usd_per_hour if name in self.machines else self.nodes[name][0]


def load_prices(region: str, mode: str, path: str = "") -> Prices:
    """The prices of one region and mode; `path` names a file that overrides the packaged one.

    Raises:
        ConfigError: a file that is not of this form, an unknown entry (the nearest one is named), a price that is
            negative or no number, or a region or mode that the files do not have.
    """
    book = _checked(_packaged(), str(PACKAGED), known=None)
    files, overridden = [PACKAGED.name], list[str]()
    date = str(book.pop("date"))
    sources: dict[str, str] = book.pop("sources")
    if path:
        own = _checked(read_yaml(path), path, known=book)
        date = str(own.pop("date", date))
        sources = sources | own.pop("sources", {})
        for section, entries in own.items():
            for name, entry in entries.items():
                merged = {**book[section].get(name, {}), "source": f"no source given in {path}", **entry}
                book[section][name] = merged
                overridden.append(f"{section}.{name}")
        files.append(path)
    if mode not in book["modes"]:
        raise ConfigError(f"option 'pricing': {mode!r} is not one of {', '.join(book['modes'])}")
    regions = set.intersection(*(set(_regions(entry)) for each in _BY_REGION for entry in book[each].values()))
    if region not in regions:
        raise ConfigError(
            f"option 'region': {region[:40]!r} has no complete set of prices; there are {', '.join(sorted(regions))}; "
            "a file given with --prices can add one, to every entry"
        )
    factor = float(book["modes"][mode]["factor"])
    used = dict.fromkeys(entry["source"] for section in _KINDS for entry in book[section].values())
    return Prices(
        region=region,
        mode=mode,
        factor=factor,
        usd={name: float(entry[region]) for name, entry in book["prices"].items()},
        per={name: entry["per"] for name, entry in book["prices"].items()},
        nodes={name: (float(entry[region]), entry["usable_gb"] * GB) for name, entry in book["nodes"].items()},
        machines={
            name: _machine(name, entry, book["gpus"], region, factor) for name, entry in book["instances"].items()
        },
        links={name: Link(entry["latency_ms"] / 1e3, entry["gb_s"] * 1e9) for name, entry in book["links"].items()},
        date=date,
        files=tuple(files),
        origins=tuple(sources.get(name, name) for name in used),
        overridden=tuple(overridden),
    )


@functools.cache
def _packaged() -> Mapping[str, Any]:
    """The packaged file as it stands; parsing it takes 0.1 s."""
    return read_yaml(PACKAGED)


def _machine(name: str, entry: Mapping[str, Any], gpus: Mapping[str, Any], region: str, factor: float) -> Machine:
    if entry["gpu"] not in gpus:
        raise ConfigError(f"prices: instance {name} has a GPU {entry['gpu']!r} that is not among gpus")
    gpu, count = gpus[entry["gpu"]], int(entry["gpus"])
    return Machine(
        name=name,
        gpu=entry["gpu"],
        gpus=count,
        vcpus=int(entry["vcpus"]),
        flops=count * gpu["tflops"] * 1e12,
        gpu_bytes=count * gpu["memory_gb"] * GB,
        gpu_bytes_per_s=count * gpu["memory_gb_s"] * 1e9,
        memory_bytes=entry["memory_gb"] * GB,
        nvme_bytes=entry["nvme_gb"] * GB,
        nvme_bytes_per_s=entry["nvme_gb_s"] * 1e9,
        network_bytes_per_s=entry["network_gbps"] * 1e9 / 8,
        efa=bool(entry.get("efa", False)),
        usd_per_hour=float(entry[region]) * factor,
    )


def _regions(entry: Mapping[str, Any]) -> list[str]:
    return [name for name, value in entry.items() if "-" in name and isinstance(value, int | float)]


def _checked(raw: Mapping[str, Any], path: str, *, known: Mapping[str, Any] | None) -> dict[str, Any]:
    """The file, every entry checked. `known`: what it may override; None: it must be complete."""
    found: dict[str, Any] = {}
    for section, entries in raw.items():
        if section in ("date", "currency"):
            continue
        if section not in (*_KINDS, "sources"):
            raise ConfigError(
                f"prices: {_unknown('section', section, [*_KINDS, 'sources', 'date', 'currency'])} ({path})"
            )
        if not isinstance(entries, Mapping) or not all(isinstance(name, str) for name in entries):
            raise ConfigError(f"prices: {section} must map names to entries ({path})")
        if section == "sources":
            found[section] = {name: str(text) for name, text in entries.items()}
            continue
        # Instances, nodes and ways to pay can be added; a tier's price or link is of use only if the code knows it.
        fixed = None if known is None or section in ("instances", "nodes", "modes", "gpus") else known[section]
        found[section] = {name: _entry(section, name, entry, path, known, fixed) for name, entry in entries.items()}
    if raw.get("currency", "USD") != "USD":
        raise ConfigError(f"prices: currency must be USD ({path})")
    if "date" in raw:
        found["date"] = raw["date"]
    missing = [] if known is not None else [each for each in (*_KINDS, "sources", "date") if each not in found]
    if missing:
        raise ConfigError(f"prices: {', '.join(missing)} missing ({path})")
    return found


def _entry(
    section: str, name: str, entry: Any, path: str, known: Mapping[str, Any] | None, fixed: Mapping[str, Any] | None
) -> dict[str, Any]:
    kind = _KINDS[section]
    if fixed is not None and name not in fixed:
        raise ConfigError(f"prices: {_unknown(kind, name, fixed)} ({path})")
    if not isinstance(entry, Mapping) or not all(isinstance(each, str) for each in entry):
        raise ConfigError(f"prices: {kind} {name} must be a map ({path})")
    numbers, texts = _NUMBERS[section], (*_TEXTS.get(section, ()), "source")
    for field, value in entry.items():
        where = f"prices: {kind} {name}: {field}"
        if field in texts:
            if not isinstance(value, str) or not value.strip():
                raise ConfigError(f"{where} must be text ({path})")
        elif field == "efa":
            if not isinstance(value, bool):
                raise ConfigError(f"{where} must be true or false ({path})")
        elif field in numbers or (section in _BY_REGION and "-" in field):
            good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
            if not good or not 0 <= value <= _MOST:
                raise ConfigError(f"{where} is {value!r}; it must be a number from 0 on ({path})")
            if field in numbers and value == 0 and field not in ("latency_ms", "nvme_gb", "nvme_gb_s", "factor"):
                raise ConfigError(f"{where} must be more than 0 ({path})")
        else:
            raise ConfigError(f"{where}: {_unknown('field', field, (*numbers, *texts, 'REGION'))} ({path})")
    new = known is None or name not in known[section]
    if new and (
        missing := [each for each in (*numbers, *texts) if each not in entry and (known is None or each != "source")]
    ):
        raise ConfigError(f"prices: {kind} {name} lacks {', '.join(missing)} ({path})")
    return dict(entry)


def _unknown(kind: str, name: object, known: Any) -> str:
    near = get_close_matches(str(name), list(known), n=1)
    return f"unknown {kind} {str(name)[:60]!r}" + (
        f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(known)}"
    )
