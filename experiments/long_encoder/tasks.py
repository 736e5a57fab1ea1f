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


SENTENCES = (
    ("{who} likes to eat {what} on Sundays.", "What does {who} like to eat on Sundays?"),
    ("The cat of {who} is called {what}.", "What is the cat of {who} called?"),
    ("{who} was born in {what}.", "Where was {who} born?"),
    ("{who} plays the {what} every evening.", "What does {who} play every evening?"),
    ("{who} works as a {what} in the city.", "What is the work of {who} in the city?"),
    ("For the birthday {who} got a {what}.", "What did {who} get for the birthday?"),
    ("{who} lost the {what} on the train.", "What did {who} lose on the train?"),
    ("The brother of {who} sells {what}.", "What does the brother of {who} sell?"),
    ("{who} is afraid of {what}.", "What is {who} afraid of?"),
    ("The favourite colour of {who} is {what}.", "What is the favourite colour of {who}?"),
    ("{who} paid the doctor with {what}.", "What did {who} pay the doctor with?"),
    ("Every winter {who} travels to {what}.", "Where does {who} travel every winter?"),
    ("{who} wrote a letter about {what}.", "What did {who} write a letter about?"),
    ("The house of {who} is made of {what}.", "What is the house of {who} made of?"),
    ("{who} keeps {what} under the bed.", "What does {who} keep under the bed?"),
    ("In the race {who} was beaten by {what}.", "Who beat {who} in the race?"),
    ("{who} collects {what} since childhood.", "What does {who} collect since childhood?"),
    ("The neighbour of {who} repairs {what}.", "What does the neighbour of {who} repair?"),
    ("{who} dreamed of {what} last night.", "What did {who} dream of last night?"),
    ("{who} borrowed a {what} from the library.", "What did {who} borrow from the library?"),
)
"""Of training: a statement and its question, with {who} and {what}."""
LEAST_LETTERS, PEOPLE = 4, 20_000

Kind = Callable[[Words, torch.Generator], tuple[str, str]]
"""A kind of sentence: what makes one, and its question."""

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


def training_words(tokenizer: Any) -> Words:
    """Words of training: any words of the tokenizer's vocabulary, of which two are a name, but no words of judging."""
    judged = {word.lower() for name in JUDGING.people for word in name.split()}
    judged |= {thing.lower() for _, _, things in JUDGING.facts for thing in things}
    vocabulary = (word for word in sorted(tokenizer.get_vocab()) if word.isascii() and word.isalpha())
    words = tuple(word for word in vocabulary if len(word) >= LEAST_LETTERS and word not in judged)
    names = torch.randint(len(words), (PEOPLE, 2), generator=torch.Generator().manual_seed(0)).tolist()
    people = tuple(f"{words[first].title()} {words[last].title()}" for first, last in names)
    return Words(people, tuple((statement, question, words) for statement, question in SENTENCES))


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
