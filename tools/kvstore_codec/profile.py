"""`kvstore-codec profile`: run a model over texts and write what a codec learns of its KV."""

from __future__ import annotations

import importlib
import json
import os
from typing import Any, Final

import click

from kvstore.errors import ConfigError

from .models import contexts_of, load, ticker
from .show import describe, print_description

__all__ = ["profile"]

BUILDERS: Final = {"kvt": "kvstore.codec.kvt_profiling", "cachegen": "kvstore.codec.profiling_cachegen"}
"""Codec → module whose `build_profile(model, tokenizer, token_lists, **options)` makes its profile."""


@click.command()
@click.option("--model", required=True, metavar="FOLDER|NAME", help="What transformers loads.")
@click.option("--texts", multiple=True, metavar="PATH", help="Files and folders of texts; .jsonl: one on each line.")
@click.argument("more", nargs=-1, metavar="[PATH]...")
@click.option("--out", required=True, metavar="FILE", help="Where to write the profile.")
@click.option("--codec", type=click.Choice(list(BUILDERS)), default="kvt", show_default=True)
@click.option("--field", metavar="NAME", help="Member of each line of .jsonl that holds the text. Default: text.")
@click.option("--tokens", type=click.IntRange(min=16), default=1128, show_default=True, help="Tokens per context.")
@click.option("--contexts", type=click.IntRange(min=1), default=11, show_default=True, help="How many contexts.")
@click.option("--name", metavar="NAME", help="Of the model, as in keys. Default: what the integrations call it.")
@click.option("--revision", metavar="TEXT", help="Of the weights.")
@click.option(
    "--levels", metavar="LIST",
    help="cachegen: scales of the steps, coarse to fine (1,0.6,0.4,0.25), or bits of the deltas per third of the "
    "layers (8/6/4). kvt: how many.",
)  # fmt: skip
@click.option("--level", type=click.IntRange(min=0), help="cachegen: which of the levels is encoded.")
@click.option("--embedded", is_flag=True, help="cachegen: all levels in one record; scales fall by a factor of 3.")
@click.option("--rope", type=click.Choice(["applied", "none"]), help="cachegen: how K will be stored.")
@click.option("--json", "as_json", is_flag=True, help="Print what was made as JSON.")
def profile(
    model: str, texts: tuple[str, ...], more: tuple[str, ...], out: str, codec: str, field: str | None, tokens: int,
    contexts: int, as_json: bool, **given: Any,
) -> int:  # fmt: skip
    """Make a profile: run a model over texts (PATHs, also those of --texts) and write what a codec learns of its KV.

    A few thousand tokens of the kind of text that will be cached suffice; of another kind costs some percent.
    """
    paths = (*texts, *more)
    if not paths:
        raise ConfigError("no texts: give --texts PATH")
    options = _options(codec, given)
    folder = os.path.dirname(os.path.abspath(out))
    if not os.path.isdir(folder) or os.path.isdir(out):
        raise ConfigError(f"--out {out}: it is a folder, or its folder does not exist")
    with ticker() as tell:
        loaded, tokenizer = load(model)
        lists = contexts_of(tokenizer, paths, field, tokens, contexts)
        build = importlib.import_module(BUILDERS[codec]).build_profile
        made = build(loaded, tokenizer, lists, progress=tell, **options)
    made.save(out)
    if as_json:
        click.echo(json.dumps({"file": out, **describe(made, out)}))
    else:
        print_description(describe(made, out), out)
    return 0


def _options(codec: str, given: dict[str, Any]) -> dict[str, Any]:
    """Arguments of `build_profile` from the flags that were given."""
    options = {name: value for name, value in given.items() if value is not None and value is not False}
    if codec != "cachegen":
        for name in ("level", "embedded", "rope"):
            if name in options:
                raise ConfigError(f"--{name} is an option of codec cachegen, not of {codec}")
    if "levels" in options:
        read = _read_levels if codec == "cachegen" else int
        try:
            options["levels"] = read(options["levels"])
        except ValueError as error:
            wanted = "like 1,0.6,0.4 or 8/6/4,8/5/3" if codec == "cachegen" else "a number"
            raise ConfigError(f"--levels {options['levels']}: it must be {wanted}", cause=error) from error
    return options


def _read_levels(text: str) -> list[float | tuple[int, ...]]:
    return [tuple(map(int, each.split("/"))) if "/" in each else float(each) for each in text.split(",")]
