"""`kvstore-bench codec`: size, quality and speed of the codecs, on real text through a real model.

    kvstore-bench codec --lmcache-python /opt/lmcache/bin/python --html codec.html
    kvstore-bench codec --quick

In one run: contexts of 1000 tokens that no profile has seen are prefilled; their KV, in bfloat16, is encoded in chunks
of 256 tokens into records, as a store would keep them, decoded from those bytes, and the model continues on it with the
next 128 tokens. KL, ΔNLL and top-1 agreement are against the same model on the uncompressed bfloat16 cache. The same
for other text (prose profile, code text), and with records of 1,536 tokens. Speeds are of one core, taken in turn.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvstore import __version__
from kvstore.errors import ConfigError

from .codec_report import CodecReport
from .machine import machine_facts
from .models import model_folder
from .outputs import prepare_outputs, write_outputs
from .progress import Progress, Steps, progress_bar, telling
from .texts import JUDGED_WINDOW, JUDGED_WINDOWS, PROFILE_LISTS, PROFILE_TOKENS

if TYPE_CHECKING:
    from .codec_lmcache import LMCacheProcess
    from .codec_measure import Scheme
    from .codec_report import QualityRow
    from .quality import Judge, Reference
    from .texts import Corpus

__all__ = ["Plan", "add_arguments", "run", "run_codec"]

CODECS = ("int8", "fp8", "shuffle-zstd", "cachegen", "kvt")


@dataclass(frozen=True)
class Plan:
    """How much is measured.

    Attributes:
        contexts: of prose (or the user's texts), and of code, and of those in long records.
        context_tokens, continuation: tokens in the cache, and tokens fed after them.
        chunk, group: tokens per record; `group` is also the length of the contexts that go into long records.
        judge_groups: whether the model continues on long records too.
        speed_chunks: records of `chunk` tokens that are timed.
        repeats: timed ones.
        profile_windows, profile_tokens: token lists that profiles are made of, and their tokens.
    """

    contexts: int = 20
    code_contexts: int = 10
    group_contexts: int = 4
    context_tokens: int = 1000
    continuation: int = 128
    chunk: int = 256
    group: int = 1536
    judge_groups: bool = True
    speed_chunks: int = 4
    repeats: int = 9
    profile_windows: int = PROFILE_LISTS
    profile_tokens: int = PROFILE_TOKENS

    @classmethod
    def of(cls, contexts: int | None, *, quick: bool) -> Plan:
        """The usual plan, or the one for a minute, with another number of contexts."""
        if quick:
            count = 2 if contexts is None else contexts
            return cls(count, 1, 1, continuation=64, judge_groups=False, speed_chunks=2, repeats=3)
        count = 20 if contexts is None else contexts
        return cls(count, -(-count // 2), max(1, count // 5))

    @property
    def window(self) -> int:
        """Tokens of a held-out window: enough for every use."""
        return max(self.context_tokens, self.group) + self.continuation + 1


def run_codec(
    judge: Judge,
    schemes: Callable[[Sequence[Sequence[int]]], list[Scheme]],
    corpora: Sequence[Corpus],
    plan: Plan,
    *,
    lmcache: Callable[[], LMCacheProcess] | None = None,
    core: int | None = None,
    progress: Progress | None = None,
    command: str = "",
) -> CodecReport:
    """Measure.

    Args:
        schemes: makes the codecs, given the token lists that profiles may be made of.
        corpora: the first is what bars are judged on; one called "code" is the cross-domain check.
        lmcache: starts LMCache's own codec.
        core: the CPU for everything timed.
    """
    from .codec_figures import figures_of, shown_level, unjudged
    from .codec_measure import LMCACHE, Pass, measure
    from .codec_records import chunks_of
    from .codec_speed import MEMCPY, a_core, measure_speed, one_core

    started, began = time.strftime("%Y-%m-%dT%H:%M:%S%z"), time.monotonic()
    report = CodecReport("codec", version=__version__, command=command, machine=machine_facts(), started=started)
    main = corpora[0]
    told = Steps(progress, _steps(plan, corpora))
    told("profiles")
    judged = plan.context_tokens + plan.continuation + 1
    made = schemes([ids[: plan.profile_tokens] for ids in main.profile])
    passes = [
        Pass(main.kind, [ids[:judged] for ids in main.held_out[: plan.contexts]], plan.context_tokens, plan.chunk)
    ]
    for other in corpora[1:]:
        windows = [ids[:judged] for ids in other.held_out[: plan.code_contexts]]
        passes.append(Pass(other.kind, windows, plan.context_tokens, plan.chunk))
    passes.append(
        Pass(main.kind, [ids[: plan.window] for ids in main.held_out[: plan.group_contexts]], plan.group, plan.group,
             judged=plan.judge_groups)
    )  # fmt: skip
    references: list[Reference] = []
    with contextlib.ExitStack() as stack:
        peer = None if lmcache is None else stack.enter_context(lmcache())
        for each in passes:
            rows, kept = measure(judge, made, each, lmcache=peer, told=told)
            report.quality += rows
            references += kept
        timed = [each for name in dict.fromkeys(each.name for each in made)
                 for each in _to_time(name, made, shown_level(report.quality, name, main.kind))]  # fmt: skip
        long = references[-1]
        tokens = min(plan.group, plan.speed_chunks * plan.chunk)
        chunks = chunks_of(long.segments, long.tokens, plan.chunk)[: tokens // plan.chunk]
        whole = chunks_of(long.segments, long.tokens, plan.group)
        with one_core(a_core() if core is None else core):
            report.speeds += measure_speed(timed, chunks, judge.layout, repeats=plan.repeats, lmcache=peer, told=told)
            report.speeds += measure_speed(timed, whole, judge.layout, repeats=max(3, plan.repeats // 3))
        if peer is not None:
            report.setting["LMCache"] = f"{peer.version}, its own CacheGen on the CPU (CreateSerde('cachegen')); " + (
                "; ".join(f"{name}: bins {bins}" for name, bins in peer.bins.items())
            )
    report.machine["ceiling_spread"] = max((each.spread for each in report.speeds if each.codec == MEMCPY), default=0.0)
    prefill = statistics.median(each.tokens / each.prefill_s for each in references)
    values = judge.layout.elements_per_token * judge.layout.num_layers
    report.figures = figures_of(
        report.quality, report.speeds, text=main.kind, prefill_tokens_s=prefill, values_per_token=values,
        notes=report.notes,
    )  # fmt: skip
    report.unjudged = unjudged(report.quality, report.figures, main.kind)
    report.setting |= {
        "reference": "the model in fp32 on its own uncompressed KV cache in bfloat16, K after the rotary embedding",
        "prefill": f"{prefill:.0f} tokens/s, one thread, fp32",
        **{f"profile of {each.name}": str(each.codec.profile) for each in made if each.codec.profile is not None},
    }
    for row in report.quality:
        if row.raw_segments and row.codec not in (LMCACHE, "raw"):
            report.notes.append(f"{row.codec} {row.level}, {row.text}: {row.raw_segments} segments were stored raw")
    report.seconds = time.monotonic() - began
    return report


def _to_time(name: str, made: Sequence[Scheme], best: QualityRow | None) -> list[tuple[Scheme, int]]:
    """Of a codec what its speed is measured at: the level that its figures are of."""
    some = [each for each in made if each.name == name]
    if best is None:
        return [(some[-1], some[-1].codec.levels - 1)]
    return [(each, 0 if each.variant is not None else int(best.level)) for each in some
            if each.variant is None or str(each.variant) == best.level]  # fmt: skip


def _steps(plan: Plan, corpora: Sequence[Corpus]) -> int:
    contexts = plan.contexts + plan.code_contexts * (len(corpora) - 1) + plan.group_contexts
    return 1 + contexts * (2 + len(CODECS)) + plan.repeats


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `kvstore-bench codec`."""
    parser.add_argument(
        "--quick", action="store_true", help="2 contexts, 64 tokens after each, fewer repeats, with the profiles that "
        "come for SmolLM2: about a minute; for another --model, or --texts, they are made once, which takes minutes"
    )  # fmt: skip
    parser.add_argument("--model", metavar="FOLDER", help="a folder that transformers loads (default: SmolLM2-135M)")
    parser.add_argument(
        "--profile", nargs="+", default=[], metavar="FILE", help="profiles, instead of making them here"
    )
    parser.add_argument("--codecs", default=",".join(CODECS), metavar="LIST", help="which (default: %(default)s)")
    parser.add_argument("--contexts", type=int, metavar="N", help="held-out contexts of 1000 tokens (default 20)")
    parser.add_argument(
        "--texts", nargs="+", metavar="FILE", help="judge on these texts instead of Python's documentation"
    )
    parser.add_argument("--lmcache-python", metavar="PATH", help="a Python with lmcache, to measure its CacheGen too")
    parser.add_argument("--json", metavar="FILE", help="write rows and figures as JSON; - is standard output")
    parser.add_argument("--html", metavar="FILE", help="write one self-contained page with plots; - is standard output")


def run(args: argparse.Namespace) -> int:
    """Do it. 0: everything was verified; 1: not so."""
    prepare_outputs(args)
    names = _names(args.codecs)
    if args.contexts is not None and not 1 <= args.contexts <= 1000:
        raise ConfigError(f"--contexts {args.contexts}: between 1 and 1000")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    plan = Plan.of(args.contexts, quick=args.quick)
    from kvstore.codec import PROFILED

    from .codec_profiles import digest_of_folder, load_profiles, profile_for, schemes_of
    from .quality import Judge

    profiles = load_profiles(args.profile)
    folder = model_folder(args.model)
    judge = Judge(folder)
    tokenizer = _tokenizer(folder)
    corpora = _corpora(args, plan, tokenizer)
    origins: list[str] = []
    # With texts of the user's, profiles are of those.
    unseen = [ids for each in corpora for ids in each.held_out] if args.quick and not args.texts else None

    def schemes(token_lists: Sequence[Sequence[int]]) -> list[Scheme]:
        made = []
        for name in names:
            profile = profiles.get(name)
            if name in PROFILED and profile is None:
                digest = digest_of_folder(folder)
                profile, origin = profile_for(
                    name, judge.model, tokenizer, token_lists, model_digest=digest, unseen=unseen,
                    tell=telling(progress, f"profile of {name}"),
                )  # fmt: skip
                origins.append(origin)
            made += schemes_of(name, profile)
        return made

    with progress_bar() as progress, judge.one_thread():
        from .codec_lmcache import LMCacheProcess
        from .codec_speed import a_core

        core = a_core()

        def lmcache() -> LMCacheProcess:
            return LMCacheProcess(args.lmcache_python, folder, judge.layout, chunk=plan.group, core=core)

        report = run_codec(
            judge, schemes, corpora, plan, lmcache=lmcache if args.lmcache_python else None, core=core,
            progress=progress, command=_command(args),
        )  # fmt: skip
    report.notes[:0] = origins
    return write_outputs(report, args)


def _names(text: str) -> list[str]:
    from kvstore.codec import CODEC_NAMES

    names = list(dict.fromkeys(filter(None, (each.strip() for each in text.split(",")))))
    for name in names:
        if name not in CODEC_NAMES:
            raise ConfigError(f"--codecs: unknown codec {name!r}; known: {', '.join(CODEC_NAMES)}")
    if not names:
        raise ConfigError("--codecs: no codec")
    if "int8" not in names:  # what sizes are compared with
        names.insert(0, "int8")
    return names


def _tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{str(folder)!r} has no tokenizer that can be loaded: {error}", cause=error) from error


def _corpora(args: argparse.Namespace, plan: Plan, tokenizer: Any) -> list[Corpus]:
    from .texts import code_passages, file_passages, load_corpus, prose_passages

    def tokenise(text: str) -> Sequence[int]:
        ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
        return ids

    kind, passages = ("texts", file_passages([Path(each) for each in args.texts])) if args.texts else (
        "prose", prose_passages()
    )  # fmt: skip
    most, window = max(plan.contexts, plan.group_contexts), plan.window
    if not args.texts:  # a quick run keeps the same windows back, so that profiles are of the same texts
        most, window = max(most, JUDGED_WINDOWS), max(window, JUDGED_WINDOW)
    first = load_corpus(
        kind, passages, tokenise, window=window, held_out=most, profile=0 if args.profile else plan.profile_windows
    )
    code = load_corpus("code", code_passages(), tokenise, window=plan.window, held_out=plan.code_contexts, profile=0)
    return [first, code]


def _command(args: argparse.Namespace) -> str:
    words = ["kvstore-bench", "codec"]
    for name in ("model", "contexts", "lmcache_python"):
        if (value := getattr(args, name)) is not None:
            words += [f"--{name.replace('_', '-')}", str(value)]
    if args.codecs != ",".join(CODECS):
        words += ["--codecs", args.codecs]
    for name in ("profile", "texts"):
        if value := getattr(args, name):
            words += [f"--{name}", *value]
    return " ".join([*words, *(["--quick"] if args.quick else [])])
