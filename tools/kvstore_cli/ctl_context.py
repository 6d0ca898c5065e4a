"""`kvstore ctl context URL KEY`: the key context of an engine's records, read from one of them.

A record's header says which model, revision, dtype and shape it is of, but not all that its key is made of: what it
leaves out is named in a comment, and `--tokens` shows whether the context makes that key.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import click
import yaml

from kvstore.backend import Backend, Status
from kvstore.codec import codec_by_number
from kvstore.errors import ConfigError, CorruptRecord
from kvstore.keys import Key, KeyContext, chunk_keys
from kvstore.layout import KVLayout, dtype_itemsize
from kvstore.record import Header

from .output import check_targets, write_json
from .records import JSON, TIMEOUT, URLS, keys_of, open_places, read_header, seconds_of

__all__ = ["context", "context_fields"]

_NEEDED = ("model", "dtype", "tokens", "layers", "kv_heads", "head_dim")
_UNSAID = "tp_rank, tp_size, pp_rank, pp_size, lora, cache_salt, codec_profile, extra"
_NOTE = f"""\
# Not in the record, so here as if they were not set: {_UNSAID}.
# Of an engine on several ranks write tp_size and pp_size (and the rank, 0, whose records you ask for).
"""


def context_fields(header: Header) -> dict[str, Any]:
    """The fields of the `KeyContext` of a record, as far as its header says them, as `--context FILE` has them.

    Raises:
        ConfigError: it does not say what it is of; names what is missing.
        CorruptRecord: its meta block cannot be read.
    """
    meta = header.meta()
    missing = [name for name in _NEEDED if name not in meta]
    if missing:
        raise ConfigError(
            f"the record does not say of what it is: its meta has no {', '.join(missing)}. Those of the vLLM "
            "connector and of KVCacheStore (transformers) do; those of LMCache, of SGLang and of put_many have names "
            "of their own"
        )
    try:
        begin, end = meta["tokens"]
        heads, width = int(meta["kv_heads"]), int(meta["head_dim"])
        layout: dict[str, Any] = {"num_layers": int(meta["layers"]), "num_kv_heads": heads, "head_dim": width}
        if "positions" not in meta:  # else the record holds fewer tokens than its range
            each, rest = divmod(header.segments[0].raw_length, (end - begin) * heads * dtype_itemsize(meta["dtype"]))
            if rest or each < width:
                raise ConfigError(f"segments of {header.segments[0].raw_length} bytes are not of this shape")
            if each == width:
                layout.update(v_head_dim=0, kind="mla")
            elif each != 2 * width:
                layout["v_head_dim"] = each - width
        fields: dict[str, Any] = {"model": meta["model"], "dtype": meta["dtype"], "layout": layout}
        fields |= {name: meta[name] for name in ("revision", "namespace") if name in meta}
        if meta.get("rope") == "none" and "rotary" in meta:
            fields["extra"] = {"rope": "pre", "rotary": meta["rotary"]}
        codecs = sorted({segment.codec for segment in header.segments if segment.codec})
        if len(codecs) == 1:
            fields["codec"] = codec_by_number(codecs[0]).name
        _key_context(fields)  # say now what makes no sense
    except (ValueError, TypeError, ZeroDivisionError) as error:  # ConfigError is one of these
        raise ConfigError(f"what the record says of itself makes no sense: {error}") from None
    return fields


def _key_context(fields: dict[str, Any]) -> KeyContext:
    rest = {name: value for name, value in fields.items() if name not in ("layout", "extra")}
    return KeyContext(layout=KVLayout(**fields["layout"]), extra=tuple(fields.get("extra", {}).items()), **rest)


def _header(backends: list[Backend], key: Key, seconds: float) -> Header | None:
    """Of the record in the first place that has it."""
    for backend in backends:
        (found,) = backend.stat([key], deadline=time.monotonic() + seconds)
        if found.error is not None:
            raise found.error
        if found.status is Status.OK:
            return read_header(backend, key, found.nbytes, seconds)
    return None


def _context(url: str, key: str, tokens: str, timeout: str, as_json: str) -> int:
    """Write the key context of a stored record (64 hex digits, as `kvstore ls` prints them) as YAML, for --context.

    URL is the place that the engine stores in, such as node://127.0.0.1:7070. With --tokens, the ids of the prompt that
    the record is a chunk of, it is tried whether the context makes this key.

    Exit status 1: there is no such record, or the context does not make its key.
    """
    from .ctl import tokens_of

    check_targets(as_json)
    (name,) = keys_of([key])
    with open_places(url) as backends:
        try:
            header = _header(backends, name, seconds_of(timeout))
        except CorruptRecord as error:
            print(f"kvstore: {error}", file=sys.stderr)
            return 1
    if header is None:
        print(f"kvstore: there is no record {key[:64]} at {url}", file=sys.stderr)
        return 1
    fields = context_fields(header)
    if as_json:
        write_json(fields, as_json)
    if as_json != "-":
        print(_NOTE + yaml.safe_dump(fields, sort_keys=False, allow_unicode=True), end="")
    if not tokens:
        return 0
    begin, end = header.meta()["tokens"]
    made = chunk_keys(tokens_of(tokens)[:end], context=_key_context(fields), chunk_size=end - begin)
    if begin % (end - begin) == 0 and made[begin // (end - begin) :] == [name]:
        print("kvstore: this context makes the record's key of these tokens", file=sys.stderr)
        return 0
    print(
        f"kvstore: this context does not make the record's key of these tokens: they are another prompt's, or one of "
        f"{_UNSAID} is set, or the record was compressed since (codec: as the engine has it)",
        file=sys.stderr,
    )
    return 1


context = click.Command(
    "context",
    callback=_context,
    help=_context.__doc__,
    params=[
        URLS, click.Argument(["key"], metavar="KEY"),
        click.Option(["tokens", "--tokens"], default="", metavar="FILE",
                     help="Token ids of the prompt, to try the context with; -: standard input."),
        TIMEOUT, JSON,
    ],
)  # fmt: skip
