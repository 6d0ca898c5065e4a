"""`kvstore ctl …`: the control API of a node or a controller on the command line, and `kvstore ctl serve`, the
controller.

`--url` and `--token-file` (or KVSTORE_CTL_URL, KVSTORE_CTL_TOKEN) say whom to ask. A prompt is given by its keys (64
hex digits; `-`: the first words of the lines of standard input), or by `--tokens FILE --context FILE`. Without the
file the server makes the keys, by a context that it was started with.

Exit status: 0 done · 1 nothing was found, or an instance failed · 2 it makes no sense, or nobody answers.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, asdict, fields
from typing import Any

import click

from kvstore.config import read_yaml
from kvstore.control import Client
from kvstore.control.messages import Acted, Failure, Finished, Started
from kvstore.errors import ConfigError, TransientError
from kvstore.keys import DEFAULT_CHUNK_SIZE, KeyContext
from kvstore.layout import KVLayout

from .ctl_context import context
from .ctl_serve import serve
from .output import check_targets, print_table, write_json
from .plan_show import bytes_text, seconds_text
from .records import JSON, keys_of, seconds_of
from .serve_options import _token_of

__all__ = ["context_of", "ctl", "tokens_of"]

_DEFAULT_URL = "http://127.0.0.1:9090"
_MOST_TOKENS_BYTES = 64 << 20

_CONNECTION = [
    click.Option(["url", "--url"], envvar="KVSTORE_CTL_URL", default=_DEFAULT_URL, metavar="URL", show_default=True,
                 help="Of a node's --http, or of a controller (or KVSTORE_CTL_URL)."),
    click.Option(["token_file", "--token-file"], default="", metavar="FILE",
                 help="File with the token of the namespace, or the admin's (or KVSTORE_CTL_TOKEN itself)."),
    click.Option(["ca", "--ca"], default="", metavar="FILE", help="PEM file with the authorities to trust, for https."),
    click.Option(["timeout", "--timeout"], default="5s", metavar="DURATION", show_default=True, help="For each call."),
    JSON,
]  # fmt: skip
_NAMESPACE = click.Option(["namespace", "--namespace"], default="", metavar="NAME", help="Of the node.")
_INSTANCES = click.Option(["instances", "--instance"], multiple=True, metavar="NAME", help="Only this one; repeat.")
_PROMPT = [
    click.Argument(["keys"], nargs=-1, metavar="[KEY]..."),
    click.Option(["tokens", "--tokens"], default="", metavar="FILE",
                 help="Token ids of a prompt, as JSON or with blanks between; -: standard input."),
    click.Option(["context", "--context"], default="", metavar="FILE",
                 help="YAML with the fields of KeyContext: model, layout, dtype, …"),
    click.Option(["context_name", "--context-name"], default="", metavar="NAME",
                 help="Instead, one that the server was started with; neither: the only one it has."),
    click.Option(["chunk_size", "--chunk-size"], default=DEFAULT_CHUNK_SIZE, show_default=True, metavar="TOKENS",
                 help="Tokens of a chunk."),
]  # fmt: skip
_WAIT = click.Option(["wait", "--wait"], default="", metavar="DURATION", help="Wait so long for it to finish.")


def context_of(path: str) -> KeyContext:
    """The `KeyContext` that a YAML file describes. Raises `ConfigError`, which names the file."""
    given = dict(read_yaml(path))
    layout = given.pop("layout", None)
    if not isinstance(layout, dict):
        raise ConfigError(f"{path}: 'layout' must be a map with num_layers, num_kv_heads and head_dim")
    for kind, named, where in ((KVLayout, layout, "layout"), (KeyContext, {**given, "layout": layout}, "key context")):
        known = [field.name for field in fields(kind) if field.init]
        if unknown := [name for name in named if name not in known]:
            raise ConfigError(f"{path}: {where} has no field {str(unknown[0])[:80]!r}; its fields: {', '.join(known)}")
        needed = [field.name for field in fields(kind) if field.init and field.default is MISSING]
        if missing := [name for name in needed if name not in named]:
            raise ConfigError(f"{path}: {where} needs {', '.join(missing)}; its fields: {', '.join(known)}")
    try:
        extra = given.pop("extra", None) or ()
        if isinstance(extra, dict):
            extra = tuple(extra.items())
        return KeyContext(layout=KVLayout(**layout), extra=extra, **given)  # type: ignore[arg-type]
    except (TypeError, ConfigError) as error:
        raise ConfigError(f"{path} is no key context: {error}") from None


def tokens_of(path: str) -> list[int]:
    """Token ids in a file, as a JSON list or with white space between; "-": standard input. Raises `ConfigError`."""
    if path == "-":
        text = sys.stdin.read(_MOST_TOKENS_BYTES + 1)
    else:
        try:
            with open(path, encoding="utf-8") as file:
                text = file.read(_MOST_TOKENS_BYTES + 1)
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"option 'tokens': {path} cannot be read: {error}") from error
    if len(text) > _MOST_TOKENS_BYTES:
        raise ConfigError(f"option 'tokens': {path} is longer than {_MOST_TOKENS_BYTES >> 20} MiB")
    try:
        found = json.loads(text) if text.lstrip().startswith("[") else [int(word) for word in text.split()]
    except ValueError as error:
        raise ConfigError(f"option 'tokens': {path} holds no token ids: {error}") from None
    if not found:
        raise ConfigError(f"option 'tokens': {path} is empty")
    return list(found)


def _client(url: str, token_file: str, ca: str, timeout: str) -> Client:
    token = os.environ.get("KVSTORE_CTL_TOKEN", "").strip()
    if token_file:
        if token:
            raise ConfigError("a token is given by --token-file and by KVSTORE_CTL_TOKEN; give one of them")
        token = _token_of(token_file).decode("latin-1")
    return Client(url, token=token, timeout=seconds_of(timeout), ca=ca)


def _selected(
    keys: Sequence[str], tokens: str, context: str, context_name: str, chunk_size: int
) -> dict[str, Any]:  # fmt: skip
    """A prompt, as the methods of `Client` take it."""
    if bool(keys) == bool(tokens):
        raise ConfigError("name the KEYs of a prompt (- reads them from standard input), or --tokens and --context")
    if (context or context_name) and (keys or (context and context_name)):
        raise ConfigError("--context FILE or --context-name NAME goes with --tokens, one of them")
    if keys:
        return {"keys": keys_of(keys), "chunk_size": chunk_size}
    ids = tokens_of(tokens)
    if len(ids) < chunk_size:
        raise ConfigError(f"{tokens} has fewer tokens than a chunk ({chunk_size}); nothing is stored of it")
    return {"tokens": ids, "context": context_of(context) if context else context_name or None,
            "chunk_size": chunk_size}  # fmt: skip


def _command(
    name: str, work: Callable[..., tuple[int, Any]], show: Callable[[Any], None],
    params: Sequence[click.Parameter] = (),
) -> click.Command:  # fmt: skip
    """A subcommand: `work(client, **its own options)` gives the exit status and what to print or write as JSON."""

    def run(url: str, token_file: str, ca: str, timeout: str, as_json: str, **given: Any) -> int:
        check_targets(as_json)
        with _client(url, token_file, ca, timeout) as client:
            try:
                status, found = work(client, **given)
            except TransientError as error:
                if error.cause is None or error.operation != "control":
                    raise
                hint = "is this the --http of a node, or a controller? Say which by --url, or KVSTORE_CTL_URL"
                raise TransientError(f"{error.message}; {hint}", operation=error.operation) from error
        if as_json:
            write_json(_plain(found), as_json)
        if as_json != "-":
            text = io.StringIO()
            with contextlib.redirect_stdout(text):
                show(found)
            sys.stdout.write(_printable(text.getvalue()))
        return status

    return click.Command(name, callback=run, help=work.__doc__, params=[*params, *_CONNECTION])


def _plain(found: Any) -> Any:
    return [asdict(each) for each in found] if isinstance(found, list | tuple) else asdict(found)


def _failed(failures: Sequence[Failure]) -> None:
    for failure in failures:
        print(_printable(f"{failure.instance}: {failure.error}"), file=sys.stderr)


def _printable(text: str) -> str:
    """What nodes say of themselves must not steer a terminal."""
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


# Looking.


def _lookup(client: Client, namespace: str, instances: Sequence[str], chunk_size: int, **given: Any) -> tuple[int, Any]:
    """Who has how much of a prompt, and in which tiers. Exit status 1: nobody has its first chunk."""
    prompt = _selected(chunk_size=chunk_size, **given)
    found = client.lookup(**prompt, namespace=namespace, instances=instances or None)
    return int(not found.places), found


def _show_lookup(found: Any) -> None:
    if not found.places:
        print(f"nobody has any of the {found.chunks} chunks. If you expected some: does the context name the engine's "
              "revision and shard? `kvstore ctl context URL KEY` reads it from a record")  # fmt: skip
        return
    rows = [
        (place.instance, f"{place.hit_chunks} of {found.chunks}", f"{place.hit_tokens:,}",
         ", ".join(f"{tier} {tokens:,}" for tier, tokens in place.tiers.items()))
        for place in found.places
    ]  # fmt: skip
    print_table(("instance", "chunks", "tokens", "in"), rows, text=(0, 3))


def _route(
    client: Client, namespace: str, candidates: Sequence[str], chunk_size: int, **given: Any
) -> tuple[int, Any]:  # fmt: skip
    """Where a prompt should go: the longest hit, weighed against what waits there."""
    prompt = _selected(chunk_size=chunk_size, **given)
    waiting: dict[str, float | None] = {}
    for text in candidates:
        name, equals, queued = text.partition("=")
        try:
            waiting[name] = float(queued) if equals else None
        except ValueError:
            raise ConfigError(f"--candidate {text!r}: write NAME or NAME=WAITING_TOKENS") from None
    return 0, client.route(**prompt, namespace=namespace, candidates=waiting or None)


def _show_route(found: Any) -> None:
    rows = [
        (s.instance, f"{s.hit_tokens:,}", f"{s.queued_tokens:,.0f}", f"{s.cost:,.0f}",
         "" if s.reports else "not reporting here")
        for s in found.scores
    ]  # fmt: skip
    print_table(("instance", "hit tokens", "waiting tokens", "cost", ""), rows, text=(0, 4))


def _workers(client: Client) -> tuple[int, Any]:
    """All instances, what they have, and how full their tiers are."""
    return 0, client.workers()


def _show_workers(found: Any) -> None:
    for worker in found:
        where = " ".join(filter(None, (worker.address, worker.unix, worker.http)))
        print(f"{worker.instance}  {worker.state}  load {worker.load:.2f}  {worker.chunks:,} records  {where}")
        rows = [
            (tier.namespace or "default", tier.name, bytes_text(tier.used),
             bytes_text(tier.capacity) if tier.capacity else "-", f"{tier.records:,}" if tier.records >= 0 else "-",
             f"{tier.pinned:,}", tier.url)
            for tier in worker.usage
        ]  # fmt: skip
        if rows:
            print_table(("  namespace", "tier", "used", "of", "records", "pinned", "at"),
                        [(f"  {row[0]}", *row[1:]) for row in rows], text=(0, 1, 6))  # fmt: skip


def _query_ip(client: Client, names: Sequence[str]) -> tuple[int, Any]:
    """Where instances are."""
    return 0, client.query_ip(names)


def _show_addresses(found: Any) -> None:
    rows = [(each.instance, each.ip, each.address, each.unix, each.http) for each in found]
    print_table(("instance", "ip", "address", "unix", "http"), rows, text=(0, 1, 2, 3, 4))


def _health(client: Client) -> tuple[int, Any]:
    """How all instances are. Exit status 1: one is not ready."""
    found = client.health()
    return int(any(each.state != "ready" for each in found)), found


def _show_health(found: Any) -> None:
    for each in found:
        print(f"{each.instance}  {each.state}  load {each.health.load:.2f}  {seconds_text(each.age_s)} ago")
        for problem in each.health.problems:
            print(f"  {problem}")


# Doing.


def _pin(
    client: Client, namespace: str, instances: Sequence[str], ttl: str, chunk_size: int, **given: Any
) -> tuple[int, Any]:  # fmt: skip
    """Keep records where they are for a while. Exit status 1: nothing was pinned, or an instance failed."""
    prompt = _selected(chunk_size=chunk_size, **given)
    done = client.pin(**prompt, namespace=namespace, instances=instances or None, ttl_s=_duration(ttl, "ttl"))
    return int(bool(done.failures) or not done.count), done


def _unpin(
    client: Client, namespace: str, instances: Sequence[str], chunk_size: int, **given: Any
) -> tuple[int, Any]:  # fmt: skip
    """Let pinned records go as others do. Exit status 1: nothing was pinned, or an instance failed."""
    prompt = _selected(chunk_size=chunk_size, **given)
    done = client.unpin(**prompt, namespace=namespace, instances=instances or None)
    return int(bool(done.failures) or not done.count), done


def _show_acted(found: Acted) -> None:
    print(f"{found.count:,} records" + "".join(f"; {name} {count:,}" for name, count in found.instances.items()))
    _failed(found.failures)


def _clear(
    client: Client, namespace: str, instances: Sequence[str], everything: bool, yes: bool, model: str, below: bool,
    wait: str, keys: Sequence[str], tokens: str, context: str, context_name: str, chunk_size: int,
) -> tuple[int, Any]:  # fmt: skip
    """Remove records: those of a prompt (with --below what hangs on them, too), --model NAME, or --all of the
    namespace.

    --all and --model want --yes. Exit status 1: an instance failed, or (--wait) no record names the model.
    """
    prompt = _selected(keys, tokens, context, context_name, chunk_size) if keys or tokens else {}
    if everything + bool(model) + bool(prompt) != 1:
        raise ConfigError("say what to remove: --all, --model NAME, KEYs, or --tokens and --context")
    if (everything or model) and not yes:
        whose = f"of model {model}" if model else "all of them"
        where = f"namespace {namespace!r}" if namespace else "the default namespace"
        raise ConfigError(f"this removes records of {where}, {whose}, from every tier; say --yes as well")
    started = client.clear(
        namespace=namespace, everything=everything, model=model or None, below=below, instances=instances or None,
        **prompt,
    )  # fmt: skip
    status, found = _started(client, started, wait)
    if model and isinstance(found, Finished) and found.ok and not any(job.done for job in found.jobs.values()):
        print(f"no record names the model {_printable(model)!r}; records of LMCache, of SGLang and of put_many name "
              "none", file=sys.stderr)  # fmt: skip
        return 1, found
    return status, found


def _move(
    client: Client, namespace: str, src: str, dst: str, to_instance: str, src_instance: str, wait: str,
    chunk_size: int, **given: Any,
) -> tuple[int, Any]:  # fmt: skip
    """Move records out of a tier, into another one or to another instance. Exit status 1: an instance failed."""
    if bool(dst) == bool(to_instance):
        raise ConfigError("say where to: --to TIER, or --to-instance NAME (at a controller) or HOST:PORT (at a node)")
    prompt = _selected(chunk_size=chunk_size, **given)
    started = client.move(
        src=src, dst=dst or to_instance, to_instance=bool(to_instance), src_instance=src_instance or None,
        namespace=namespace, **prompt,
    )  # fmt: skip
    return _on_prompt(client, started, wait, prompt)


def _compress(
    client: Client, codec: str, level: int | None, namespace: str, instances: Sequence[str], wait: str,
    chunk_size: int, **given: Any,
) -> tuple[int, Any]:  # fmt: skip
    """Encode stored records anew, with a codec that loses nothing. Exit status 1: an instance failed."""
    prompt = _selected(chunk_size=chunk_size, **given)
    started = client.compress(codec, level, **prompt, namespace=namespace, instances=instances or None)
    return _on_prompt(client, started, wait, prompt)


def _decompress(
    client: Client, namespace: str, instances: Sequence[str], wait: str, chunk_size: int, **given: Any
) -> tuple[int, Any]:  # fmt: skip
    """Store records raw again. Exit status 1: an instance failed."""
    prompt = _selected(chunk_size=chunk_size, **given)
    started = client.decompress(**prompt, namespace=namespace, instances=instances or None)
    return _on_prompt(client, started, wait, prompt)


def _check_finish(client: Client, event: str, wait: str) -> tuple[int, Any]:
    """How something that was started goes on. Exit status 1: it has failed, or has not finished."""
    found = client.wait(event, timeout=_duration(wait, "wait")) if wait else client.check_finish(event)
    return int(not found.ok), found


def _started(client: Client, started: Started, wait: str) -> tuple[int, Any]:
    if not wait:
        return int(bool(started.failures)), started
    _failed(started.failures)
    found = client.wait(started, timeout=_duration(wait, "wait"))
    return int(bool(started.failures) or not found.ok), found


def _on_prompt(client: Client, started: Started, wait: str, prompt: Mapping[str, Any]) -> tuple[int, Any]:
    """As `_started`, for what is done to a prompt's records: it is a failure if there are none."""
    if started.event or started.failures:
        return _started(client, started, wait)
    chunks = len(prompt["keys"]) if "keys" in prompt else len(prompt["tokens"]) // prompt["chunk_size"]
    print(f"nobody has any of the {chunks} chunks", file=sys.stderr)
    return 1, started


def _show_started(found: Started | Finished) -> None:
    if isinstance(found, Started):
        print(f"event {found.event}" if found.event else "there is nothing to do")
        _failed(found.failures)
        return
    rows = [
        (name, job.kind, job.state, f"{job.done:,}", f"{job.total:,}" if job.total >= 0 else "-", f"{job.failed:,}",
         f"{job.nbytes:,}", job.error)
        for name, job in found.jobs.items()
    ]  # fmt: skip
    print_table(("instance", "what", "state", "done", "of", "failed", "bytes", "error"), rows, text=(0, 1, 2, 7))
    _failed(found.failures)


def _duration(text: str, name: str) -> float:
    from kvstore.options import parse_duration

    seconds = parse_duration(text, name=name)
    if not seconds:
        raise ConfigError(f"option {name!r}: {text!r} must be more than 0")
    return seconds


def _commands() -> Mapping[str, click.Command]:
    on_some = [*_PROMPT, _NAMESPACE, _INSTANCES]
    name = click.Option(["src_instance", "--from-instance"], default="", metavar="NAME", help="Only its records.")
    made = [
        _command("lookup", _lookup, _show_lookup, on_some),
        _command("route", _route, _show_route, [*_PROMPT, _NAMESPACE, click.Option(
            ["candidates", "--candidate"], multiple=True, metavar="NAME[=TOKENS]",
            help="An instance, and the tokens that wait to be prefilled there; repeat. All that are ready, if none.",
        )]),
        _command("workers", _workers, _show_workers),
        _command("query-ip", _query_ip, _show_addresses, [click.Argument(["names"], nargs=-1,
        metavar="[INSTANCE]...")]), _command("health", _health, _show_health),
        _command("pin", _pin, _show_acted, [*on_some, click.Option(
            ["ttl", "--ttl"], default="1h", show_default=True, metavar="DURATION", help="How long, at most 30 d.")]),
        _command("unpin", _unpin, _show_acted, on_some),
        _command("clear", _clear, _show_started, [
            *on_some, _WAIT,
            click.Option(["everything", "--all"], is_flag=True, help="All records of the namespace."),
            click.Option(["model", "--model"], default="", metavar="NAME", help="Records that name this model."),
            click.Option(["below", "--below"], is_flag=True, help="Also what hangs on the last of these chunks."),
            click.Option(["yes", "--yes"], is_flag=True, help="Yes, many records."),
        ]),
        _command("move", _move, _show_started, [
            *_PROMPT, _NAMESPACE, _WAIT, name,
            click.Option(["src", "--from"], required=True, metavar="TIER", help="memory, disk, …"),
            click.Option(["dst", "--to"], default="", metavar="TIER", help="Another tier of the same instance."),
            click.Option(["to_instance", "--to-instance"], default="", metavar="NAME",
                         help="Another instance (admin)."),
        ]),
        _command("compress", _compress, _show_started, [
            *on_some, _WAIT,
            click.Option(["codec", "--codec"], required=True, metavar="NAME", help="lz4, shuffle-zstd, …"),
            click.Option(["level", "--level"], type=int, default=None, metavar="N", help="As the codec has them."),
        ]),
        _command("decompress", _decompress, _show_started, [*on_some, _WAIT]),
        _command("check-finish", _check_finish, _show_started, [click.Argument(["event"], metavar="EVENT"), _WAIT]),
    ]  # fmt: skip
    return {command.name or "": command for command in made}


class _Group(click.Group):
    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            name = error.option_name
            if not any(name in option.opts for option in _CONNECTION):
                raise
            raise click.UsageError(f"{name} stands behind the subcommand: kvstore ctl health {name} …") from None


ctl = _Group(
    "ctl", commands={**_commands(), "context": context, "serve": serve},
    help="Look at and control nodes; run a controller.",
)  # fmt: skip
