"""Names and places of chunks: content keys, prompts joined and cut, runs found at any offset."""

from __future__ import annotations

import dataclasses
import hashlib
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import ConfigError
from kvstore.keys import KeyContext, chunk_keys, content_key
from kvstore.layout import KVLayout

pytest.importorskip("torch")
pytest.importorskip("transformers")

from kvstore.blend import chunks
from kvstore.blend.chunks import Placed, Texts, WindowIndex, join, split_ids, token_array

CONTEXT = KeyContext(model="org/model", layout=KVLayout(2, 2, 16), dtype="float32")
SEPARATOR = [35, 35]


class Words:
    """A tokenizer: a token per character, perhaps with a BOS, and a merge that joined text would show ("ab" → 7)."""

    def __init__(self, bos: bool = False) -> None:
        self.bos = bos

    def __call__(self, text: str, *, add_special_tokens: bool) -> dict[str, list[int]]:
        ids = []
        for word in text.replace("ab", "\x07"):
            ids.append(ord(word))
        return {"input_ids": [1, *ids] if self.bos and add_special_tokens else ids}


def ids(text: str) -> list[int]:
    return [ord(letter) for letter in text]


# Keys.


def test_a_content_key_is_what_the_description_says() -> None:
    def u32(tokens: list[int]) -> bytes:
        return b"".join(token.to_bytes(4, "little") for token in tokens)

    seed = hashlib.sha256(b"l2:s15:kvstore contenti1:1").digest()
    counts = (2).to_bytes(8, "little") + (3).to_bytes(8, "little")
    inner = hashlib.sha256(seed + counts + u32([7, 8]) + u32([1, 2, 3])).digest()
    assert content_key([1, 2, 3], context=CONTEXT, prefix=[7, 8]) == hashlib.sha256(CONTEXT.digest + inner).digest()


@pytest.mark.parametrize("kind", [list, tuple, np.array, lambda x: np.array(x, np.uint32)])
def test_all_kinds_of_ids_give_one_key(kind: Any) -> None:
    tokens = list(range(20_000))
    assert content_key(kind(tokens), context=CONTEXT) == content_key(tokens, context=CONTEXT)


@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=6), st.lists(st.integers(0, 5), max_size=6),
    st.lists(st.integers(0, 5), min_size=1, max_size=6), st.lists(st.integers(0, 5), max_size=6),
)  # fmt: skip
def test_equal_keys_mean_equal_content_and_prefix(a: list[int], p: list[int], b: list[int], q: list[int]) -> None:
    same = content_key(a, context=CONTEXT, prefix=p) == content_key(b, context=CONTEXT, prefix=q)
    assert same == ((a, p) == (b, q))  # also where a token moves from the prefix into the chunk


@pytest.mark.parametrize(
    "change",
    [{"model": "org/other"}, {"revision": "2"}, {"namespace": "b"}, {"lora": "x"}, {"cache_salt": "s"},
     {"dtype": "bfloat16"}, {"codec": "int8"}, {"extra": (("rotary", "…"),)}, {"layout": KVLayout(3, 2, 16)}],
)  # fmt: skip
def test_whatever_changes_the_bytes_changes_the_key(change: dict[str, Any]) -> None:
    other = dataclasses.replace(CONTEXT, **change)
    assert content_key([1, 2], context=CONTEXT) != content_key([1, 2], context=other)


def test_a_content_key_is_no_chunk_key() -> None:
    tokens = list(range(16))
    assert content_key(tokens, context=CONTEXT) not in chunk_keys(tokens, context=CONTEXT, chunk_size=16)


@pytest.mark.parametrize("bad", [[], [-1], [1 << 32], [1.5], "text", [[1]], [True]])
def test_bad_ids_have_no_content_key(bad: Any) -> None:
    with pytest.raises(ConfigError):
        content_key(bad, context=CONTEXT)


def test_without_torch_it_says_what_to_install() -> None:
    code = "import sys; sys.modules['torch'] = None\ntry: import kvstore.blend\nexcept Exception as e: print(repr(e))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "ConfigError" in done.stdout
    assert "pip install 'kvstore[transformers]'" in done.stdout


# Prompts.


def test_texts_are_tokenised_part_by_part() -> None:
    prompt = join(["xa", "bx", "q"], Texts(Words(), ""), token_array([]))
    assert prompt.ids.tolist() == ids("xabxq"), "the merge of 'ab' over the seam would show as 7"
    assert prompt.parts == ((0, 2), (2, 4))
    assert prompt.question == 4


def test_separators_cut_text_and_ids_alike() -> None:
    texts = Texts(Words(), "##")
    expected = ids("one##two##q")
    for given_parts in (["one##two##q"], [ids("one##two##q")], ["one##two", "##q"], ["one", SEPARATOR, ids("two##q")]):
        prompt = join(given_parts, texts, token_array([9, 9]))
        assert prompt.ids.tolist() == [9, 9, *expected]
        assert [prompt.ids[a:b].tolist() for a, b in prompt.parts] == [ids("one"), ids("two")]
        assert prompt.ids[prompt.question :].tolist() == ids("q")


def test_a_bos_comes_once_and_first() -> None:
    texts = Texts(Words(bos=True), "##")
    assert texts.leading.tolist() == [1]
    assert texts.ids("xy").tolist() == ids("xy")
    assert texts.separator.tolist() == SEPARATOR
    prompt = join(["doc", "q"], texts, texts.leading)
    assert prompt.ids.tolist() == [1, *ids("docq")]
    again = join([prompt.ids], texts, texts.leading)
    assert again.ids.tolist() == prompt.ids.tolist(), "ids that have it already do not get another"


def test_a_prefix_that_is_there_is_not_put_twice() -> None:
    prefix = token_array(ids("sys"))
    inside = join([ids("sys"), ids("doc"), ids("q")], Texts(None, ""), prefix)
    before = join([ids("doc"), ids("q")], Texts(None, ""), prefix)
    assert inside.ids.tolist() == before.ids.tolist() == ids("sysdocq")
    assert inside.parts == before.parts == ((3, 6),)
    joined = join([ids("sysdoc"), ids("q")], Texts(None, ""), prefix)
    assert joined.parts == ((3, 6),)


def test_of_a_prompt_in_one_part_the_question_is_what_is_left() -> None:
    prompt = join([list(range(10))], Texts(None, ""), token_array([]))
    assert (prompt.parts, prompt.question) == ((), 9)
    placed = [Placed(1, 4, content_key([1], context=CONTEXT), 3, 0, 0)]
    assert prompt.gaps(placed) == [(0, 1), (4, 9)]
    assert prompt.ask_behind(placed).question == 4
    assert prompt.ask_behind([]).question == 0


@pytest.mark.parametrize("bad", [[], [""], ["doc##"], [[]], ["doc", [1.5]], [object()]])
def test_what_is_no_prompt_is_refused(bad: list[Any]) -> None:
    with pytest.raises(ConfigError):
        join(bad, Texts(Words(), "##"), token_array([]))


def test_text_without_a_tokenizer_is_refused() -> None:
    with pytest.raises(ConfigError, match="tokenizer"):
        join(["text", [1]], Texts(None, " # # "), token_array([]))


@given(st.lists(st.integers(0, 2), max_size=30), st.lists(st.integers(0, 2), max_size=3))
def test_cutting_loses_nothing(tokens: list[int], separator: list[int]) -> None:
    parts = split_ids(token_array(tokens), token_array(separator))
    assert np.concatenate(parts).tolist() == tokens
    assert all(part.tolist() == separator for part in parts[1::2])
    text, mark = "".join(map(str, tokens)), "".join(map(str, separator))
    if mark:
        assert ["".join(map(str, part.tolist())) for part in parts[::2]] == text.split(mark)


# Runs at any offset.


@given(
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=40), min_size=1, max_size=4),
    st.lists(st.integers(0, 2), min_size=1, max_size=60),
    st.integers(1, 9),
)
def test_runs_are_real_and_none_is_overlooked(documents: list[list[int]], tokens: list[int], least: int) -> None:
    index = WindowIndex(least)
    for document in documents:
        index.add(token_array(document))
    end = 0
    covered = set()
    for match in index.find(token_array(tokens)):
        assert match.begin >= end
        assert match.end - match.begin >= least
        length = match.end - match.begin
        assert tokens[match.begin : match.end] == documents[match.document][match.first : match.first + length]
        end = match.end
        covered |= set(range(match.begin, match.end))
    if len(documents) == 1:  # with several, windows that many share are tried only so often
        document = documents[0]
        window = (least + 1) // 2
        distinct = len({tuple(document[i : i + window]) for i in range(0, len(document) - window + 1, window)})
        if distinct == len(range(0, len(document) - window + 1, window)):
            for begin in range(len(tokens) - least + 1):
                run = tokens[begin : begin + least]
                if any(run == document[i : i + least] for i in range(len(document) - least + 1)):
                    assert covered & set(range(begin, begin + least)), "a run that a document has was overlooked"


def test_a_quoted_document_is_found_whole_at_any_offset() -> None:
    rng = np.random.default_rng(0)
    index = WindowIndex(256)
    documents = [rng.integers(0, 50_000, size) for size in (700, 256, 1500)]
    for document in documents:
        index.add(token_array(document))
    for shift in (0, 1, 137, 255):
        noise = rng.integers(50_000, 60_000, shift)
        tokens = np.concatenate([noise, documents[2], noise, documents[1], documents[0][100:600]])
        found = [(m.document, m.first, m.end - m.begin) for m in index.find(token_array(tokens))]
        assert found == [(2, 0, 1500), (1, 0, 256), (0, 100, 500)]


def test_equal_hashes_prove_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def all_alike(tokens: chunks.Ids, window: int) -> np.ndarray[Any, Any]:
        return np.zeros(max(0, len(tokens) - window + 1), np.uint64)

    monkeypatch.setattr(chunks, "_window_hashes", all_alike)
    index = WindowIndex(4)
    index.add(token_array(range(20)))
    assert index.find(token_array(range(100, 130))) == []
    assert [m[:2] for m in index.find(token_array([99, 0, 1, 2, 3, 4, 98]))] == [(1, 6)]


def test_rolling_hashes_equal_those_of_each_window() -> None:
    tokens = np.random.default_rng(1).integers(0, 1 << 32, 300)
    whole = chunks._window_hashes(token_array(tokens), 17)
    each = [chunks._window_hashes(token_array(tokens[i : i + 17]), 17)[0] for i in range(284)]
    assert whole.tolist() == [int(value) for value in each]


def test_a_prompt_of_one_repeated_token_is_searched_in_linear_time() -> None:
    index = WindowIndex(256)
    index.add(token_array([5] * 20_000))
    found = index.find(token_array([5] * 50_000))
    assert [m.end - m.begin for m in found] == [20_000, 20_000, 10_000]


@pytest.mark.parametrize("bad", [[[1, 2], [3, 4]], [0.5], ["a"], [-1], [1 << 32], None])
def test_what_are_no_ids(bad: Any) -> None:
    with pytest.raises(ConfigError):
        token_array(bad)
