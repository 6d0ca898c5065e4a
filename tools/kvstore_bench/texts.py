"""Texts that are on every machine, as token lists: prose (Python's own documentation) and code (its standard library).

What a profile is made of and what a codec is judged by never overlap: passages are deduplicated first (Python's
documentation repeats whole sections), then shuffled by a fixed seed and split, and windows are cut from either part.
"""

from __future__ import annotations

import random
import re
import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvstore.errors import ConfigError

__all__ = [
    "JUDGED_WINDOW", "JUDGED_WINDOWS", "KINDS", "PROFILE_LISTS", "PROFILE_TOKENS", "Corpus", "code_passages",
    "file_passages", "load_corpus", "profile_lists", "prose_passages", "shared_runs",
]  # fmt: skip

KINDS = ("prose", "code")

JUDGED_WINDOWS, JUDGED_WINDOW = 20, 1665
"""Windows of prose, and their tokens, that are kept back for judging before anything goes to profiles."""
PROFILE_LISTS, PROFILE_TOKENS = 12, 1128
"""Token lists of prose that profiles are made of, unless told otherwise, and their tokens."""

_SEED = 20_240_807
_LONG = 60  # characters; shorter passages (headings, "...") may repeat
_SPLIT = re.compile(r"\n[ \t]*\n")
_CODE_BYTES = 6 << 20

Tokenise = Callable[[str], Sequence[int]]


@dataclass(frozen=True)
class Corpus:
    """One kind of text, split in two.

    Attributes:
        kind: "prose", "code", or the name of a user's texts.
        profile: token lists that profiles may be made of, each of the length asked for.
        held_out: token lists that no profile has seen.
    """

    kind: str
    profile: tuple[tuple[int, ...], ...]
    held_out: tuple[tuple[int, ...], ...]


def prose_passages() -> list[list[str]]:
    """Python's documentation, `pydoc_data.topics`: a list of passages per topic."""
    from pydoc_data.topics import topics

    return [_SPLIT.split(topics[name]) for name in sorted(topics)]


def code_passages() -> list[list[str]]:
    """Sources of the standard library's modules: a list of passages per module, in the order of their names."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    found, total = [], 0
    for path in sorted(folder.glob("*.py")) + sorted(folder.glob("asyncio/*.py")) + sorted(folder.glob("email/*.py")):
        text = path.read_text(encoding="utf-8", errors="replace")
        found.append(_SPLIT.split(text))
        total += len(text)
        if total > _CODE_BYTES:
            break
    return found


def file_passages(paths: Sequence[Path]) -> list[list[str]]:
    """A user's texts: a list of passages per file.

    Raises:
        ConfigError: a file cannot be read, or is not UTF-8.
    """
    found = []
    for path in paths:
        try:
            found.append(_SPLIT.split(path.read_text(encoding="utf-8")))
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"text {str(path)!r} cannot be read as UTF-8: {error}", cause=error) from error
    return found


def load_corpus(
    kind: str,
    documents: Sequence[Sequence[str]],
    tokenise: Tokenise,
    *,
    window: int,
    held_out: int,
    profile: int,
    seed: int = _SEED,
) -> Corpus:
    """Windows of `window` tokens: `held_out` of them to judge by, up to `profile` to make profiles of.

    Documents are shuffled and dealt out whole, the first of them to the held-out part until it has enough tokens, so
    that no window of one part shares a passage with the other. The same input and seed give the same windows.

    Args:
        documents: passages of each document.
        tokenise: text → token ids, without special tokens.

    Raises:
        ConfigError: there is not enough text.
    """
    order = list(range(len(documents)))
    random.Random(seed).shuffle(order)
    seen: set[str] = set()
    parts: list[list[int]] = [[], []]
    for number in order:
        text = "\n\n".join(_unseen(documents[number], seen))
        if not text.strip():
            continue
        full = [len(part) >= wanted * window for part, wanted in zip(parts, (held_out, profile), strict=True)]
        if all(full):
            break
        parts[full[0]].extend(tokenise(text + "\n\n"))
    judged, made = (_windows(part, window) for part in parts)
    if len(judged) < held_out or (profile and not made):
        raise ConfigError(
            f"the {kind} text is too short: {held_out} held-out windows of {window} tokens and at least one for the "
            f"profile are wanted, {len(judged)} and {len(made)} are there"
        )
    return Corpus(kind, tuple(made[:profile]), tuple(judged[:held_out]))


def profile_lists(tokenise: Tokenise) -> list[list[int]]:
    """What profiles are made of unless a user says otherwise: prose, without what any benchmark judges by."""
    corpus = load_corpus(
        "prose", prose_passages(), tokenise, window=JUDGED_WINDOW, held_out=JUDGED_WINDOWS, profile=PROFILE_LISTS
    )
    return [list(ids[:PROFILE_TOKENS]) for ids in corpus.profile]


def shared_runs(one: Sequence[Sequence[int]], other: Sequence[Sequence[int]], *, run: int = 40) -> int:
    """How many runs of `run` tokens are in lists of both."""

    def runs(lists: Sequence[Sequence[int]]) -> set[tuple[int, ...]]:
        return {tuple(ids[at : at + run]) for ids in lists for at in range(len(ids) - run + 1)}

    return len(runs(one) & runs(other))


def _unseen(passages: Sequence[str], seen: set[str]) -> list[str]:
    """The passages that no earlier document had, which `seen` then has."""
    kept = []
    for passage in passages:
        plain = " ".join(passage.split())
        if len(plain) > _LONG:
            if plain in seen:
                continue
            seen.add(plain)
        kept.append(passage)
    return kept


def _windows(tokens: Sequence[int], window: int) -> list[tuple[int, ...]]:
    return [tuple(tokens[at : at + window]) for at in range(0, len(tokens) - window + 1, window)]
