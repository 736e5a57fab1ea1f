"""Documents with something to find: pass keys, facts and passages. The words of training and of judging differ.

A document is a stretch of tokens. Short sentences are hidden in it, or a short passage is cut out of it; the question
asks for the document that holds the sentence, or that the passage was cut from (the inverse cloze task, Lee et al.
2019). Pass keys and facts follow LongEmbed (Zhu et al. 2024): all documents of a length share one text and differ in
what is hidden. Then only the hidden sentences tell them apart.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

PASSAGE = 32
"""Tokens of a passage that is cut out."""


@dataclass(frozen=True)
class Words:
    """What sentences are made of."""

    people: tuple[str, ...]
    facts: tuple[tuple[str, str, tuple[str, ...]], ...]
    """A statement and a question with {who} and {what}, and what may stand for {what}."""


Kind = Callable[[Words, torch.Generator], tuple[str, str]]
"""A kind of sentence: what makes one, and its question."""

TRAINING = Words(
    people=("Alice", "Robert", "Maria", "Daniel", "Susan", "Kevin", "Laura", "Peter", "Nancy", "Brian", "Helen",
            "Oscar", "Diana", "Frank", "Irene", "Walter", "Julia", "Simon", "Karen", "Victor", "Emma", "Harold",
            "Sophie", "Martin"),
    facts=(
        ("{who} likes to eat {what} on Sundays.", "What does {who} like to eat on Sundays?",
         ("apples", "pancakes", "soup", "cheese", "salmon", "rice", "noodles", "mushrooms")),
        ("The cat of {who} is called {what}.", "What is the cat of {who} called?",
         ("Shadow", "Ginger", "Felix", "Luna", "Tiger", "Smokey", "Daisy", "Milo")),
        ("{who} was born in {what}.", "Where was {who} born?",
         ("Paris", "Chicago", "Madrid", "Tokyo", "Cairo", "Sydney", "Toronto", "Berlin")),
        ("{who} plays the {what} every evening.", "What does {who} play every evening?",
         ("piano", "violin", "guitar", "flute", "trumpet", "cello", "drums", "harp")),
        ("{who} works as a {what} in the city.", "What is the work of {who} in the city?",
         ("teacher", "baker", "nurse", "lawyer", "plumber", "pilot", "painter", "farmer")),
    ),
)  # fmt: skip
JUDGING = Words(
    people=tuple(f"{first} {last}"
                 for first in ("Catherine", "Thomas", "Rebecca", "George", "Olivia", "Leonard", "Margaret", "Edward",
                               "Patricia", "Samuel", "Beatrice", "Arthur")
                 for last in ("Hill", "Moore", "Carter", "Bennett", "Foster", "Wright", "Turner", "Parker", "Collins",
                              "Murphy", "Cooper", "Reed")),
    facts=(
        ("{who} drove to the wedding in a {what}.", "What did {who} drive to the wedding?",
         ("tractor", "limousine", "bus", "taxi", "truck", "convertible", "van", "motorcycle")),
        ("In the attic {who} found an old {what}.", "What did {who} find in the attic?",
         ("telescope", "sword", "diary", "clock", "map", "camera", "statue", "coin")),
        ("{who} studied {what} at the university.", "What did {who} study at the university?",
         ("chemistry", "law", "music", "history", "geology", "economics", "medicine", "philosophy")),
        ("The garden of {who} is full of {what}.", "What is the garden of {who} full of?",
         ("roses", "tulips", "weeds", "tomatoes", "birds", "snails", "pumpkins", "bees")),
    ),
)  # fmt: skip


def pass_key(words: Words, generator: torch.Generator) -> tuple[str, str]:
    """A sentence with a pass key and its question, which names the person and not the key."""
    who = _one(words.people, generator)
    digits = "".join(str(int(torch.randint(10, (), generator=generator))) for _ in range(5))
    sentence = f"{who}'s pass key is {digits}. Remember it. {digits} is the pass key for {who}."
    return sentence, f"What is the pass key for {who}?"


def fact(words: Words, generator: torch.Generator) -> tuple[str, str]:
    """A sentence and the question that it answers."""
    statement, question, things = words.facts[int(torch.randint(len(words.facts), (), generator=generator))]
    who = _one(words.people, generator)
    return statement.format(who=who, what=_one(things, generator)), question.format(who=who)


KINDS = {"pass key": pass_key, "fact": fact}


def sentences(
    count: int, kinds: Sequence[Kind], words: Words, used: set[str], generator: torch.Generator
) -> list[tuple[str, str]]:
    """`count` sentences with their questions, none of which is in `used` yet; they are added to it."""
    made: list[tuple[str, str]] = []
    while len(made) < count:
        kind = kinds[int(torch.randint(len(kinds), (), generator=generator))]
        sentence, question = kind(words, generator)
        if question not in used:
            used.add(question)
            made.append((sentence, question))
    return made


def _one(choices: tuple[str, ...], generator: torch.Generator) -> str:
    return choices[int(torch.randint(len(choices), (), generator=generator))]


def tokens_of(text: str, tokenizer: Any) -> Tensor:
    return torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"])


def hidden_in(row: Tensor, sentences: list[Tensor], generator: torch.Generator) -> Tensor:
    """The row (n,) with the sentences at random places, cut to n tokens before they are put in."""
    rest = row[: len(row) - sum(len(sentence) for sentence in sentences)]
    places = torch.randint(len(rest) + 1, (len(sentences),), generator=generator).sort().values.tolist()
    parts, start = [], 0
    for place, sentence in zip(places, sentences, strict=True):
        parts += [rest[start:place], sentence]
        start = place
    return torch.cat([*parts, rest[start:]])


def passage_cut(row: Tensor, count: int, generator: torch.Generator) -> tuple[Tensor, list[Tensor]]:
    """`count` passages from as many equal parts of the row, and the row without them."""
    part = len(row) // count
    starts = [i * part + int(torch.randint(part - PASSAGE, (), generator=generator)) for i in range(count)]
    keep = torch.ones(len(row), dtype=torch.bool)
    for start in starts:
        keep[start : start + PASSAGE] = False
    return row[keep], [row[start : start + PASSAGE] for start in starts]
