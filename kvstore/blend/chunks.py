"""Prompts made of parts: tokenised part by part, cut at separators, searched for what is stored. No tensors, no I/O.

A prompt is a fixed prefix, parts (documents), and the question, which is its last part. Text is tokenised part by part
and joined as ids; joined text is never tokenised again, since the ids of a part would depend on its neighbours.

What is stored is found in three ways: by the parts of an explicit list, by parts between separators, or by a rolling
hash over windows at any offset (`WindowIndex`). The last only says where to look: tokens are compared, and the record
is named by a key over all of them.
"""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from kvstore.errors import ConfigError
from kvstore.keys import Key

__all__ = ["Ids", "Match", "Part", "Placed", "Prompt", "Texts", "WindowIndex", "join", "split_ids", "token_array"]

Ids = np.ndarray[Any, np.dtype[np.int64]]
"""Token ids, `[tokens]`."""

Part = str | Sequence[int] | np.ndarray[Any, Any] | Any
"""A part of a prompt: text, or ids as a sequence, an array or a tensor, `[tokens]` or `[1, tokens]`."""

_MAX_TOKEN = (1 << 32) - 1
_BASE = 0x9E3779B97F4A7C15  # odd, so that it has an inverse modulo 2^64
_INVERSE = pow(_BASE, -1, 1 << 64)
_MIX = 0xBF58476D1CE4E5B9
_ALIKE = 4  # documents with the same window that are tried
_FIRST_STEP = 256  # tokens compared at once, doubled each time


class Placed(NamedTuple):
    """Tokens of a prompt that are stored.

    Attributes:
        begin, end: positions in the prompt.
        key: of the record.
        tokens: how many the record has.
        first: the one of them that stands at `begin`.
        stored_at: position of the record's first token when its KV was computed.
    """

    begin: int
    end: int
    key: Key
    tokens: int
    first: int
    stored_at: int

    @property
    def length(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True)
class Prompt:
    """A prompt as ids, and where its parts are.

    Attributes:
        ids: all of it.
        prefix: so many tokens at the beginning are the fixed prefix.
        parts: begin and end of each part, in order, without prefix, separators and question.
        question: where the question begins; it goes to the end. Of a prompt in one piece nobody knows: it is the last
            token, until it is known what is stored before it (`ask_behind`).
    """

    ids: Ids
    prefix: int
    parts: tuple[tuple[int, int], ...]
    question: int

    def ask_behind(self, placed: Sequence[Placed]) -> Prompt:
        """The same; of a prompt in one piece the question is all behind the last of these."""
        if self.parts:
            return self
        return replace(self, question=max((each.end for each in placed), default=self.prefix))

    def gaps(self, placed: Sequence[Placed]) -> list[tuple[int, int]]:
        """Begin and end of what lies between prefix and question and is in none of these."""
        edges = [self.prefix]
        for each in sorted(placed):
            if each.begin >= self.prefix:
                edges += [each.begin, each.end]
        edges.append(self.question)
        return [(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if a < b]


def token_array(ids: object, what: str = "token ids") -> Ids:
    """Ids given as list, numpy array or tensor, `[tokens]` or `[1, tokens]`. Raises `ConfigError` if they are none."""
    given: Any = ids
    if hasattr(given, "detach"):
        given = given.detach().cpu().numpy()
    try:
        array = np.asarray(given)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{what} must be integers [tokens], not {reprlib.repr(ids)}", cause=error) from error
    if array.ndim == 2 and len(array) == 1:
        array = array[0]
    if array.size == 0 and array.ndim == 1:
        return np.zeros(0, np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ConfigError(f"{what} must be integers [tokens], not {array.dtype} {list(array.shape)}")
    if not 0 <= int(array.min()) <= int(array.max()) <= _MAX_TOKEN:
        raise ConfigError(f"{what} lie between 0 and 2^32-1, not at {array.min()} to {array.max()}")
    return array.astype(np.int64)


class Texts:
    """Text to ids and nothing else: no special tokens, whatever the tokenizer would add.

    Args:
        tokenizer: of transformers, or anything that is called alike: `tokenizer(text, add_special_tokens=False)` gives
            `input_ids`. None: only ids can be given.
        separator: text between parts; "": there is none.

    Attributes:
        separator: as ids.
        leading: special tokens that the tokenizer puts before a text (a BOS). They begin a prompt once, and no part.
    """

    def __init__(self, tokenizer: Any, separator: str) -> None:
        if tokenizer is not None and not callable(tokenizer):
            raise ConfigError(f"a tokenizer is called with a text; a {type(tokenizer).__name__} is none")
        self._tokenizer = tokenizer
        self.text = separator
        self.separator = self.ids(separator) if tokenizer is not None and separator else np.zeros(0, np.int64)
        self.leading = self._leading() if tokenizer is not None else np.zeros(0, np.int64)

    def ids(self, text: str) -> Ids:
        """The ids of a text. Raises `ConfigError` without a tokenizer."""
        if not text:
            return np.zeros(0, np.int64)
        if self._tokenizer is None:
            raise ConfigError("text needs a tokenizer; give Blender one, or token ids instead of text")
        return token_array(self._tokenizer(text, add_special_tokens=False)["input_ids"], "ids of a tokenizer")

    def parts(self, given: str | object) -> list[Ids]:
        """A text or ids cut at separators: part, separator, part, …; parts may be empty."""
        if not isinstance(given, str):
            ids = token_array(given, "token ids of a part")
            return split_ids(ids, self.separator)
        pieces = given.split(self.text) if self.text else [given]
        found = [self.ids(pieces[0])]
        for piece in pieces[1:]:
            found += [self.separator, self.ids(piece)]
        return found

    def _leading(self) -> Ids:
        probe = "a"
        plain = self.ids(probe)
        whole = token_array(self._tokenizer(probe, add_special_tokens=True)["input_ids"], "ids of a tokenizer")
        for begin in range(len(whole) - len(plain) + 1):
            if np.array_equal(whole[begin : begin + len(plain)], plain):
                return whole[:begin]
        raise ConfigError("the tokenizer changes a text when it adds special tokens; give token ids instead of text")


def split_ids(ids: Ids, separator: Ids) -> list[Ids]:
    """Ids cut at a separator: part, separator, part, …; parts may be empty. Without a separator all is one part."""
    width = len(separator)
    if not width or len(ids) < width:
        return [ids]
    same = ids[: len(ids) - width + 1] == separator[0]
    for offset in range(1, width):
        same &= ids[offset : len(ids) - width + 1 + offset] == separator[offset]
    found, end = [], 0
    for begin in np.flatnonzero(same).tolist():
        if begin >= end:
            found += [ids[end:begin], separator]
            end = begin + width
    return [*found, ids[end:]]


def join(given: Sequence[object], texts: Texts, prefix: Ids) -> Prompt:
    """A prompt from its parts.

    Args:
        given: texts or ids. Each may hold separators; the last piece of the last one is the question, unless it is the
            only one.
        texts: how to tokenise them.
        prefix: ids that every prompt begins with. They are put first, unless the parts begin with them.

    Raises:
        ConfigError: no parts, no question, or something that is neither text nor ids.
    """
    pieces: list[tuple[Ids, bool]] = []  # ids, and whether it is a separator
    for each in given:
        cut = texts.parts(each)
        pieces += [(ids, number % 2 == 1) for number, ids in enumerate(cut)]
    while pieces and not len(pieces[-1][0]):
        pieces.pop()
    if not pieces or pieces[-1][1]:
        raise ConfigError("a prompt needs a last part that is not empty: the question, which is always computed")
    body = np.concatenate([ids for ids, _ in pieces])
    if len(prefix) and len(body) > len(prefix) and np.array_equal(body[: len(prefix)], prefix):
        skip, ids = len(prefix), body
    else:
        skip, ids = 0, np.concatenate([prefix, body])
    begin, parts = len(ids) - len(body), []
    for piece, separator in pieces:
        end = begin + len(piece)
        if not separator and len(piece) and end > len(prefix):
            parts.append((max(begin, len(prefix) if skip else 0), end))
        begin = end
    question = parts.pop()[0]
    if not parts:
        question = len(ids) - 1
    return Prompt(ids, len(prefix), tuple(parts), question)


class Match(NamedTuple):
    """A run of tokens that a known document has, too.

    Attributes:
        begin, end: in what was searched.
        document: number of the document, as `add` gave it.
        first: the document's token that stands at `begin`.
    """

    begin: int
    end: int
    document: int
    first: int


class WindowIndex:
    """Finds runs of known documents at any offset, in time linear in what is searched.

    Of each document the hash of every w-th window of w tokens is kept, w being half of the shortest run that counts, so
    every such run holds one of them. Hashes are polynomials modulo 2^64, those of all windows made from one running sum
    (Karp and Rabin 1987). They prove nothing: the tokens are compared.

    Args:
        least: tokens of the shortest run that is found, ≥ 1.
    """

    def __init__(self, least: int) -> None:
        self._least = least
        self._window = (least + 1) // 2
        self._documents: list[Ids] = []
        self._fresh: list[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]] = []  # hashes, (document, offset)
        self._hashes = np.zeros(0, np.uint64)
        self._places = np.zeros((0, 2), np.int64)

    def __len__(self) -> int:
        return len(self._documents)

    def document(self, number: int) -> Ids:
        """The tokens of a document."""
        return self._documents[number]

    def add(self, ids: Ids) -> int:
        """One more document; its number."""
        number = len(self._documents)
        self._documents.append(ids)
        hashes = _window_hashes(ids, self._window)[:: self._window]
        offsets = np.arange(len(hashes), dtype=np.int64) * self._window
        self._fresh.append((hashes, np.stack([np.full(len(hashes), number, np.int64), offsets], 1)))
        return number

    def find(self, ids: Ids) -> list[Match]:
        """Runs of at least `least` tokens that documents have, from the front, each as long as it goes, none
        overlapping."""
        self._sort()
        hashes = _window_hashes(ids, self._window)
        if not len(hashes) or not len(self._hashes):
            return []
        places = np.searchsorted(self._hashes, hashes)
        known = np.minimum(places, len(self._hashes) - 1)
        candidates = np.flatnonzero(self._hashes[known] == hashes)
        found: list[Match] = []
        end = 0
        for at in candidates.tolist():
            if at < end:
                continue
            match = self._longest(ids, at, int(places[at]), end)
            if match is not None:
                found.append(match)
                end = match.end
        return found

    def _longest(self, ids: Ids, at: int, place: int, least: int) -> Match | None:
        """The longest run through the window at `at` that does not begin before `least`."""
        best: Match | None = None
        value = self._hashes[place]
        for number, offset in self._places[place : place + _ALIKE].tolist():
            if self._hashes[place] != value:
                break
            place += 1
            document = self._documents[number]
            ahead = _alike(ids[at:], document[offset:])
            if ahead < self._window:
                continue  # equal hashes of other tokens
            behind = _alike(ids[least:at][::-1], document[:offset][::-1])
            match = Match(at - behind, at + ahead, number, offset - behind)
            if match.end - match.begin >= self._least and (
                best is None or match.end - match.begin > best.end - best.begin
            ):
                best = match
        return best

    def _sort(self) -> None:
        if not self._fresh:
            return
        hashes = np.concatenate([self._hashes, *(each for each, _ in self._fresh)])
        places = np.concatenate([self._places, *(each for _, each in self._fresh)])
        order = np.argsort(hashes, kind="stable")
        self._hashes, self._places = hashes[order], places[order]
        self._fresh.clear()


def _window_hashes(ids: Ids, window: int) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """Of the windows at all offsets: Σ mix(token_i) · base^(i - offset) modulo 2^64."""
    count = len(ids) - window + 1
    if count < 1:
        return np.zeros(0, np.uint64)
    with np.errstate(over="ignore"):
        mixed = (ids.astype(np.uint64) + np.uint64(1)) * np.uint64(_MIX)
        mixed ^= mixed >> np.uint64(29)
        sums = np.zeros(len(ids) + 1, np.uint64)
        np.cumsum(mixed * _powers(_BASE, len(ids)), out=sums[1:])
        return (sums[window:] - sums[:count]) * _powers(_INVERSE, count)


def _powers(base: int, count: int) -> np.ndarray[Any, np.dtype[np.uint64]]:
    powers = np.full(count, base, np.uint64)
    powers[:1] = 1
    return np.cumprod(powers, dtype=np.uint64)


def _alike(one: Ids, other: Ids) -> int:
    """How many leading elements are equal. Compares in growing steps: what follows costs nothing."""
    limit, done, step = min(len(one), len(other)), 0, _FIRST_STEP
    while done < limit:
        differ = np.flatnonzero(one[done : min(limit, done + step)] != other[done : min(limit, done + step)])
        if len(differ):
            return done + int(differ[0])
        done += step
        step *= 2
    return limit
