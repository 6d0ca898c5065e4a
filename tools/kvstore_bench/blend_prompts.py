"""Self-made prompts for `kvstore-bench blend`: documents with one planted fact each, and a question about one of them.

Everything is drawn from a seed, from the words below. Documents are made once and appear in many prompts, in any order
and any company, as retrieved passages do. No tensors, no model.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvstore.errors import ConfigError

__all__ = ["PREFIX", "Document", "Fact", "Prompt", "make_documents", "make_prompts"]

PREFIX = (
    "You are a careful assistant. Below are several passages from a collection of notes. Read all of them, then answer "
    "the question at the end in a few words, using only what the passages say.\n"
)

_NAMES = (
    "Alice Bruno Chen Dora Emil Farah Goran Hilda Ivan Jana Karim Lena Marco Nadia Oscar Petra Quentin Rosa Stefan "
    "Tara Ulrich Vera Walter Xenia Yusuf Zora Anton Bella Carlos Diana Edgar Fiona Gustav Helen Igor Julia Kevin "
    "Laura Martin Nora Omar Paula Robert Simon Teresa Victor Wanda Zelda"
)

# What is said, what is asked, how the answer begins, and the answers; {n} is the person, {a} the answer.
_RELATIONS = (
    (
        "{n} lives in the city {a}.", "In which city does {n} live?", "{n} lives in the city",
        "Paris Lima Cairo Oslo Delhi Quito Turin Kyoto Accra Perth Sofia Hanoi",
    ),
    (
        "{n} works as a {a}.", "What does {n} work as?", "{n} works as a",
        "baker teacher lawyer painter driver nurse farmer writer dentist pilot tailor miner",
    ),
    (
        "{n} plays the {a}.", "Which instrument does {n} play?", "{n} plays the",
        "piano violin guitar flute trumpet cello harp drums organ clarinet banjo tuba",
    ),
    (
        "The favourite colour of {n} is {a}.", "What is the favourite colour of {n}?", "The favourite colour of {n} is",
        "red blue green yellow purple orange black white brown grey pink gold",
    ),
)  # fmt: skip

_SENTENCES = (
    "The train from the {place} was late again and the {shop} had already closed.",
    "A letter with a {colour} stamp arrived on {day} and nobody knew who had sent it.",
    "Rain is expected in the north until {day}, with strong wind near the {place}.",
    "The {building} opens at nine and closes before dark, except on {day}.",
    "They painted the fence {colour}, then changed their minds and took it down.",
    "The recipe asks for two eggs, a pinch of salt and {number} spoons of {food}.",
    "Nobody could say who had moved the old {thing} out of the {building}.",
    "The market near the {place} sells {food}, figs and very small plums.",
    "In the {season} the lake is so low that the walls of the old {building} can be seen.",
    "The council spent {number} hours on the question whether the {place} needs another bench.",
    "A box of {food} was left in front of the {shop} and stood there for {number} days.",
    "The {thing} in the hall was made in the last century and has never been repaired.",
    "On {day} the children built a small boat of paper and lost it under the bridge.",
    "The new timetable has {number} mistakes, and the worst of them concerns the {place}.",
    "Every {season} somebody writes to the newspaper about the noise behind the {shop}.",
    "The {building} was sold twice in one year, both times for less than it had cost.",
    "A {colour} bird sat on the {thing} all morning and would not be moved.",
    "The price of {food} has risen for the third time since the {season}.",
)
_WORDS = {
    "place": ("station", "harbour", "old bridge", "market square", "river mill", "north gate", "airport", "town park"),
    "shop": ("cafe", "bakery", "bookshop", "pharmacy", "bicycle shop", "flower shop", "tea house", "hardware store"),
    "building": ("museum", "library", "town hall", "school", "theatre", "castle", "post office", "city archive"),
    "colour": ("green", "blue", "red", "yellow", "purple", "grey", "brown", "white"),
    "day": ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"),
    "season": ("spring", "summer", "autumn", "winter"),
    "number": ("two", "three", "four", "five", "six", "seven", "eight", "nine", "eleven"),
    "food": ("pears", "honey", "barley", "butter", "olives", "walnuts", "cheese", "smoked fish"),
    "thing": ("piano", "clock", "cupboard", "mirror", "lamp", "wooden table", "iron stove", "globe"),
}  # fmt: skip


@dataclass(frozen=True)
class Fact:
    """What a document says, and how it is asked for.

    Attributes:
        said: the sentence in the document.
        asked: the question.
        begun: how the answer begins.
        answer: what comes behind that, one word.
    """

    said: str
    asked: str
    begun: str
    answer: str


@dataclass(frozen=True)
class Document:
    """A passage with one fact among other sentences."""

    text: str
    fact: Fact


@dataclass(frozen=True)
class Prompt:
    """Documents (their numbers, in order), and a question about one of them.

    Attributes:
        asked: which of `documents`, from 0.
        question: text of the last part of the prompt; the answer comes behind it.
        answer: with the blank before it.
    """

    documents: tuple[int, ...]
    asked: int
    question: str
    answer: str


def make_documents(
    count: int, length: Callable[[str], int], *, tokens: int = 150, seed: int = 0
) -> tuple[Document, ...]:
    """Documents of at most `tokens` tokens, and less than a sentence shorter. Each is about another person.

    Args:
        length: tokens of a text.

    Raises:
        ConfigError: more documents than there are names, or documents without room for a sentence.
    """
    names = _NAMES.split()
    if not 1 <= count <= len(names):
        raise ConfigError(f"{count} documents: between 1 and {len(names)} can be made, one for each name")
    rng = random.Random(f"documents {seed}")
    return tuple(_document(rng, name, length, tokens) for name in rng.sample(names, count))


def _document(rng: random.Random, name: str, length: Callable[[str], int], tokens: int) -> Document:
    said, asked, begun, answers = rng.choice(_RELATIONS)
    answer = rng.choice(answers.split())
    fact = Fact(said.format(n=name, a=answer), asked.format(n=name), begun.format(n=name), answer)
    sentences = [fact.said]
    if length(_passage(sentences)) > tokens:
        raise ConfigError(f"documents of {tokens} tokens have no room for a sentence")
    templates: list[str] = []
    while True:
        if not templates:
            templates = rng.sample(_SENTENCES, len(_SENTENCES))
        sentence = templates.pop().format(**{kind: rng.choice(words) for kind, words in _WORDS.items()})
        longer = [*sentences, sentence]
        if length(_passage(longer)) > tokens:
            break
        sentences = longer
    at = rng.randrange(len(sentences))  # the fact may stand anywhere
    sentences.insert(at, sentences.pop(0))
    return Document(_passage(sentences), fact)


def _passage(sentences: Sequence[str]) -> str:
    return f"Passage: {' '.join(sentences)}\n"


def make_prompts(documents: Sequence[Document], count: int, *, each: int = 6, seed: int = 0) -> tuple[Prompt, ...]:
    """Prompts of `each` documents in any order, each about any one of them. The same seed gives the same ones, however
    many there are.

    Raises:
        ConfigError: fewer documents than a prompt has.
    """
    if not 1 <= each <= len(documents):
        raise ConfigError(f"prompts of {each} documents cannot be made of {len(documents)}")
    prompts = []
    for number in range(count):
        rng = random.Random(f"prompt {seed} {number}")
        chosen = tuple(rng.sample(range(len(documents)), each))
        asked = rng.randrange(each)
        fact = documents[chosen[asked]].fact
        question = f"\nQuestion: {fact.asked}\nAnswer: {fact.begun}"
        prompts.append(Prompt(chosen, asked, question, f" {fact.answer}"))
    return tuple(prompts)
