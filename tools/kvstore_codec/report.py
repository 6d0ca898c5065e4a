"""`kvstore-codec report`: what a profile costs in quality and takes in bytes, on texts that it never saw."""

from __future__ import annotations

import json
import os
from typing import Any

import click

from kvstore.codec import codec_by_name
from kvstore.codec.base import Codec
from kvstore.codec.profile import Profile, register
from kvstore.errors import ConfigError

from .models import contexts_of, load, ticker

__all__ = ["report"]


@click.command()
@click.argument("file")
@click.option("--texts", multiple=True, metavar="PATH", help="Texts that the profile was not made of.")
@click.argument("more", nargs=-1, metavar="[PATH]...")
@click.option("--model", metavar="FOLDER|NAME", help="What transformers loads. Default: the profile's model.")
@click.option("--field", metavar="NAME", help="Member of each line of .jsonl that holds the text. Default: text.")
@click.option(
    "--tokens", type=click.IntRange(min=16), default=1000, show_default=True, help="Tokens of KV per context."
)
@click.option("--next", "following", type=click.IntRange(min=2), default=128, show_default=True,
              help="Tokens behind them, on which the model is judged.")  # fmt: skip
@click.option("--contexts", type=click.IntRange(min=1), default=8, show_default=True, help="How many contexts.")
@click.option(
    "--chunk", type=click.IntRange(min=8, max=2048), default=256, show_default=True, help="Tokens per record."
)
@click.option("--json", "as_json", is_flag=True, help="Print it as JSON.")
def report(
    file: str, texts: tuple[str, ...], more: tuple[str, ...], model: str | None, field: str | None, tokens: int,
    following: int, contexts: int, chunk: int, as_json: bool,
) -> int:  # fmt: skip
    """The quality of a profile FILE: per level KL, change of NLL, top-1 agreement, and bytes with everything counted.

    The model continues texts on its KV cache after a round trip through records, and on the uncompressed one.
    """
    profile = Profile.load(file)
    paths = (*texts, *more)
    if not paths:
        raise ConfigError("no texts: give --texts PATH")
    from kvstore_bench.quality import DTYPE, Judge

    register(profile)
    with ticker() as tell:
        loaded, tokenizer = load(model or profile.model)
        lists = contexts_of(tokenizer, paths, field, tokens + following + 1, contexts)
        judge = Judge(loaded)
        profile.check_layout(judge.layout, DTYPE)
        rows = _measure(judge, profile, lists, tokens, chunk, tell)
    whole: dict[str, Any] = {
        "profile": profile.id, "codec": profile.codec, "model": profile.model, "contexts": len(lists), "tokens": tokens,
        "next": following, "chunk": chunk, "profile_bytes": os.path.getsize(file), "rows": rows,
    }  # fmt: skip
    if as_json:
        click.echo(json.dumps(whole))
    else:
        _print(whole)
    return 0


def _measure(judge: Any, profile: Profile, lists: Any, tokens: int, chunk: int, tell: Any) -> list[dict[str, Any]]:
    """One row per way to encode and level that can be read."""
    from kvstore_bench.codec_records import store
    from kvstore_bench.quality import summarise

    codecs: list[tuple[str, Codec]] = [("int8", codec_by_name("int8")), *_codecs(profile)]
    scores: dict[tuple[str, int], list[Any]] = {}
    sizes: dict[tuple[str, int], list[float]] = {}
    for number, ids in enumerate(lists):
        tell(f"context {number + 1} of {len(lists)}")
        reference = judge.refer(ids, tokens)
        for name, codec in codecs:
            stored = store(codec, reference.segments, judge.layout, tokens, chunk, model=profile.model)
            for level in range(stored.levels):
                scores.setdefault((name, level), []).append(judge.score(reference, stored.read(level)))
                bits = 8 * (stored.fetched(level) if stored.levels > 1 else stored.nbytes) / stored.values
                sizes.setdefault((name, level), []).append(bits)
    means = {key: sum(bits) / len(bits) for key, bits in sizes.items()}
    rows = []
    for (name, level), found in scores.items():
        summary = summarise(found)
        rows.append({
            "codec": name, "level": level, "bits_per_value": means[name, level],
            "smaller_than_int8": means["int8", 0] / means[name, level], "kl": summary.kl, "kl_se": summary.kl_se,
            "dnll": summary.dnll, "dnll_se": summary.dnll_se, "top1": summary.top1,
        })  # fmt: skip
    return rows


def _codecs(profile: Profile) -> list[tuple[str, Codec]]:
    """The profile's codec; once per level where a record holds one of several."""
    if profile.codec == "cachegen":
        from kvstore.codec.cachegen import CachegenCodec
        from kvstore.codec.cachegen_tables import tables_for

        tables = tables_for(profile)
        if not tables.embedded:
            return [(f"cachegen {n}", CachegenCodec(profile, level=n)) for n in range(len(tables.levels))]
    return [(profile.codec, codec_by_name(profile.codec, profile))]


def _print(whole: dict[str, Any]) -> None:
    click.echo(
        f"profile {whole['profile']} ({whole['codec']} of {whole['model']}), {whole['contexts']} contexts of "
        f"{whole['tokens']} tokens in records of {whole['chunk']}, judged on the {whole['next']} tokens behind them"
    )
    click.echo(f"{'codec':<14}{'level':>6}{'bits/value':>12}{'vs int8':>9}{'KL':>9}{'dNLL':>18}{'top-1':>8}")
    for row in whole["rows"]:
        dnll = f"{row['dnll']:+.4f} ± {row['dnll_se']:.4f}"
        click.echo(
            f"{row['codec']:<14}{row['level']:>6}{row['bits_per_value']:>12.3f}{row['smaller_than_int8']:>8.2f}x"
            f"{row['kl']:>9.4f}{dnll:>18}{row['top1']:>8.3f}"
        )
