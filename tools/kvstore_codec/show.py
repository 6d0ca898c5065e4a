"""`kvstore-codec show`: what is in a profile."""

from __future__ import annotations

import json
import os
from typing import Any

import click

from kvstore.codec.profile import Profile

__all__ = ["describe", "print_description", "show"]


@click.command()
@click.argument("file")
@click.option("--json", "as_json", is_flag=True, help="Print it as JSON.")
def show(file: str, as_json: bool) -> int:
    """What is in a profile FILE: id, model, layout, levels, modelled bits."""
    described = describe(Profile.load(file), file)
    if as_json:
        click.echo(json.dumps(described))
    else:
        print_description(described, file)
    return 0


def describe(profile: Profile, file: str) -> dict[str, Any]:
    """A profile in plain types."""
    layout = profile.layout
    return {
        "id": profile.id,
        "codec": profile.codec,
        "model": profile.model,
        "revision": profile.revision,
        "layout": {
            "layers": layout.num_layers, "kv_heads": layout.num_kv_heads, "head_dim": layout.head_dim,
            "v_head_dim": layout.v_head_dim, "kind": layout.kind,
        },
        "dtypes": list(profile.dtypes),
        "rotary": profile.rotary,
        "parameters": dict(profile.parameters),
        "arrays": {name: f"{array.dtype} {list(array.shape)}" for name, array in profile.arrays.items()},
        "file_bytes": os.path.getsize(file),
    }  # fmt: skip


def print_description(described: dict[str, Any], file: str) -> None:
    """For people: one line each, and a line per level where the profile lists them."""
    layout = described["layout"]
    v = "" if layout["v_head_dim"] == layout["head_dim"] else f" (V {layout['v_head_dim']})"
    rows = {
        "profile": described["id"],
        "codec": described["codec"],
        "model": described["model"] + (f" @ {described['revision']}" if described["revision"] else ""),
        "layout": f"{layout['layers']} layers x {layout['kv_heads']} KV heads x {layout['head_dim']}{v}",
        "dtypes": ", ".join(described["dtypes"]),
        "file": f"{file}, {described['file_bytes']:,} bytes",
    }
    parameters = dict(described["parameters"])
    levels, quality = parameters.pop("levels", None), parameters.pop("quality", None)
    rows |= {name: json.dumps(value) for name, value in parameters.items() if not isinstance(value, list | dict)}
    for name, value in rows.items():
        click.echo(f"{name:<12} {value}")
    if isinstance(levels, list):
        for number, level in enumerate(levels):
            text = ", ".join(f"{name} {value}" for name, value in level.items()) if isinstance(level, dict) else level
            click.echo(f"{f'level {number}':<12} {text}")
    elif levels is not None:
        click.echo(f"{'levels':<12} {levels}")
    if isinstance(quality, list):
        _print_quality(quality)


_QUALITY = {"bits": ("bits/value", ".3f"), "kl": ("KL", ".4f"), "dnll": ("dNLL", "+.4f"), "top1": ("top-1", ".3f")}
"""Member of a level's quality → heading and format."""


def _print_quality(quality: list[Any]) -> None:
    """What each level takes and costs, as its builder found on texts kept back."""
    click.echo("levels, on the contexts kept back when it was made:")
    click.echo(f"{'level':>5}" + "".join(f"{heading:>12}" for heading, _ in _QUALITY.values()))
    for number, level in enumerate(quality):
        found = level if isinstance(level, dict) else {}
        cells = (
            format(found[name], form) if isinstance(found.get(name), int | float) else "-"
            for name, (_, form) in _QUALITY.items()
        )  # fmt: skip
        click.echo(f"{number:>5}" + "".join(f"{cell:>12}" for cell in cells))
