"""Retrieval tasks after RULER (Hsieh et al., 2024), made from a text, with several questions to a prompt.

Questions are asked one after the other, as turns of a chat, each with its right answer before the next. So one forward
judges them all, by the logits with which every judged token is predicted: among all tokens, or among those that the
prompt offers in its place. An answer is right if all its judged tokens are the likeliest.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise, permutations
from typing import Any, Literal

import torch
from torch import Tensor

from fewkeys.integrations.loading import quiet

PLACES = """Paris London Madrid Berlin Vienna Dublin Lisbon Athens Cairo Tokyo Delhi Moscow Seoul Sydney Toronto Chicago
Boston Denver Dallas Miami Oslo Warsaw Prague Rome Milan Naples Geneva Zurich Munich Hamburg Havana Lima Nairobi Lagos
Manila Jakarta Bangkok Shanghai Mumbai Istanbul""".split()  # noqa: SIM905
NAMES = """Alpha Delta Echo Golf Hotel India Mike Oscar Romeo Sierra Victor Zero Apple Lemon Cherry Olive Maple Cedar
Rose Daisy Lily Tiger Lion Eagle Falcon Wolf Bear Horse Silver Gold Copper Iron Ruby Pearl Coral Storm River Ocean
Stone Cloud""".split()  # noqa: SIM905


NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
Haystack = Literal["text", "noise", "needles"]


@dataclass(frozen=True)
class Word:
    """A part of an answer that is judged: among others, by its first token, or, without others, among all tokens."""

    text: str
    others: Sequence[str] = ()


@dataclass(frozen=True)
class Turn:
    """A question and its answer: plain text and judged words, in order."""

    question: str
    answer: Sequence[str | Word]


@dataclass(frozen=True)
class Judged:
    """Token `place` belongs to an answer, and is judged among tokens `among`, or among all where there are none."""

    place: int
    token: int
    among: tuple[int, ...]
    answer: int


@dataclass(frozen=True, eq=False)
class Prompt:
    """Tokens (1, N), what is judged of them, and how many stand before the first question."""

    tokens: Tensor
    judged: tuple[Judged, ...]
    context: int

    @property
    def first(self) -> int:
        """The first token that predicts a judged one."""
        return self.judged[0].place - 1


def score(logits: Tensor, prompt: Prompt) -> dict[str, float]:
    """`logits` (N - first, V) of the tokens from `prompt.first` on.

    right, answers: how many answers are right, of how many; likelihood: the mean, over judged tokens, of the log of
    their probability among the others; rank: their mean rank, from 1.
    """
    wrong, likelihood, ranks = set(), 0.0, 0.0
    for one in prompt.judged:
        row = logits[one.place - 1 - prompt.first].double()
        among = row[list(one.among)] if one.among else row
        above = int((among > row[one.token]).sum())
        if above:
            wrong.add(one.answer)
        ranks += above + 1
        likelihood += float(row[one.token] - among.logsumexp(0))
    answers, count = len({one.answer for one in prompt.judged}), len(prompt.judged)
    return {
        "right": answers - len(wrong),
        "answers": answers,
        "likelihood": likelihood / count,
        "rank": ranks / count,
    }


class Maker:
    """Makes prompts for a tokenizer from the sentences of a text."""

    def __init__(self, tokenizer: Any, text: str) -> None:
        self.tokenizer = tokenizer
        self._known: dict[str, int] = {}
        found = (" ".join(part.split()) for part in re.split(r"(?<=[.!?])\s+|\n\s*\n", text))
        self.sentences = [part for part in found if 30 < len(part) < 300]
        self.words = self._apart(list(dict.fromkeys(re.findall(r"\b[a-z]{4,9}\b", text))))
        self.names, self.places = self._apart(NAMES), self._apart(PLACES)

    def needles(
        self, length: int, seed: int, keys: int, *, values: int = 1, digits: int = 5, haystack: Haystack = "text"
    ) -> Prompt:
        """`keys` places have `values` magic numbers each, hidden in the haystack; those of at most eight are asked.

        The haystack is the text, one sentence again and again ("noise"), or the numbers of other names ("needles").
        """
        rng = random.Random(seed)
        numbers = {place: [_number(rng, digits) for _ in range(values)] for place in rng.sample(self.places, keys)}
        depth = {(place, number): rng.random() for place, its in numbers.items() for number in its}
        turns = []
        for place in rng.sample(list(numbers), min(keys, 8)):
            which = f"magic number of {place} is" if values == 1 else f"magic numbers of {place} are"
            answer: list[str | Word] = [f"The {which} "]
            # In the order of the text: any other order is as right, and would be judged wrong.
            for number in sorted(numbers[place], key=lambda number, place=place: depth[place, number]):
                answer += [Word(number), ", "]
            *subject, verb = which.split()
            turns.append(Turn(f"What {verb} the {' '.join(subject)}?", (*answer[:-1], ".")))
        hidden = [(at, _needle(*of)) for of, at in depth.items()]
        task = "Some magic numbers are hidden in the following text. Memorize them."
        return self._hide(task, hidden, turns, length, rng, haystack)

    def tracking(self, length: int, seed: int, chains: int = 4, hops: int = 2) -> Prompt:
        """Variables are set to numbers, or to one another; every chain is asked back to its number.

        Every assignment of a chain counts as an answer: names among all names, numbers among all tokens.
        """
        rng = random.Random(seed)
        names = rng.sample(self.names, chains * (hops + 1))
        hidden, turns = [], []
        for chain in range(chains):
            own, number = names[chain::chains], _number(rng)
            lines = [f"VAR {own[0]} = {number}."] + [f"VAR {b} = VAR {a}." for a, b in pairwise(own)]
            hidden += zip(sorted(rng.random() for _ in lines), lines, strict=True)
            answer: list[str | Word] = [f"VAR {own[-1]} ="]
            for name in own[-2::-1]:
                answer += [" VAR ", Word(name, names), f". VAR {name} ="]
            turns.append(Turn(f"Trace VAR {own[-1]} back to its value.", (*answer, " ", Word(number), ".")))
        rng.shuffle(turns)
        task = "Chains of variable assignments are hidden in the following text. Memorize and track them."
        return self._hide(task, hidden, turns, length, rng)

    def frequent(self, length: int, seed: int, count: int = 3) -> Prompt:
        """A list of words of which the k-th comes in proportion to 1 / k^2: which are the `count` most frequent?

        Each answer is judged against three words of ranks 4 to 10, drawn by lot.
        """
        words = random.Random(seed).sample(self.words, len(self.words))
        task = "Memorize which words come most often in the following list."

        def build(often: int) -> Prompt:
            ranks = range(1, min(len(words), max(10, int((2 * often) ** 0.5))) + 1)
            listed = [word for word, rank in zip(words, ranks, strict=False) for _ in range(max(1, often // rank**2))]
            random.Random(seed).shuffle(listed)
            return self._ask_words(task, listed, words[:count], words[count:10], random.Random(seed))

        return _largest(build, length, length)

    def common(self, length: int, seed: int, count: int = 8, often: int = 30, seldom: int = 3) -> Prompt:
        """A list of words, `count` of which come `often`, all others `seldom`: which are the common ones?

        Each answer is judged against three seldom words, drawn by lot.
        """
        rng = random.Random(seed)
        words = rng.sample(self.words, len(self.words))
        common, others = words[:count], words[count:]
        task = "Memorize which words come most often in the following list."

        def build(rare: int) -> Prompt:
            listed = common * often + others[:rare] * seldom
            random.Random(seed).shuffle(listed)
            return self._ask_words(task, listed, common, others[:rare], random.Random(seed))

        return _largest(build, length, len(others))

    def _ask_words(
        self, task: str, listed: Sequence[str], asked: Sequence[str], others: Sequence[str], rng: random.Random
    ) -> Prompt:
        """Which words of the list are the most common? Each of `asked` is judged against three of the others."""
        answer: list[str | Word] = ["The most common words are:"]
        for place, word in enumerate(asked):
            against = rng.sample(others, min(3, len(others)))
            answer += [" ", Word(word, against), "," if place < len(asked) - 1 else "."]
        question = f"What are the {len(asked)} most common words of the list?"
        return self._prompt(f"{task}\n{' '.join(listed)}", [Turn(question, answer)])

    def _hide(
        self,
        task: str,
        hidden: Sequence[tuple[float, str]],
        turns: Sequence[Turn],
        length: int,
        rng: random.Random,
        haystack: Haystack = "text",
    ) -> Prompt:
        """As many sentences of the haystack as go into `length` tokens, and what is hidden between them.

        Those of the text follow one another from a random place on.
        """
        start = rng.randrange(len(self.sentences))
        around = self.sentences[start:] + self.sentences[:start]
        if haystack == "noise":
            around = [NOISE] * length
        elif haystack == "needles":
            around = [_needle(f"{a}{b.lower()}", _number(rng, 5)) for a, b in permutations(self.names, 2)]
            rng.shuffle(around)

        def build(count: int) -> Prompt:
            lines = [((place + 0.5) / count, line) for place, line in enumerate(around[:count])]
            return self._prompt(f"{task}\n{' '.join(line for _, line in sorted([*lines, *hidden]))}", turns)

        return _largest(build, length, len(around))

    def _prompt(self, context: str, turns: Sequence[Turn]) -> Prompt:
        messages = []
        for place, turn in enumerate(turns):
            question = turn.question if place else f"{context}\n{turn.question}"
            told = "".join(part if isinstance(part, str) else part.text for part in turn.answer)
            messages += [{"role": "user", "content": question}, {"role": "assistant", "content": told}]
        text = self.tokenizer.apply_chat_template(messages, tokenize=False)
        with quiet():
            found = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        ids, ends = found["input_ids"], [end for _, end in found["offset_mapping"]]
        asked = text.index(messages[0]["content"]) + len(context) + 1
        before = next(i for i, end in enumerate(ends) if end > asked)
        judged, at, answer = [], 0, -1
        for place, message in enumerate(messages):
            at = text.index(message["content"], at)
            if message["role"] == "user":
                at += len(message["content"])
                continue
            for part in turns[place // 2].answer:
                told = part if isinstance(part, str) else part.text
                if isinstance(part, Word):
                    answer += 1
                    first = next(i for i, end in enumerate(ends) if end > at)
                    last = next(i for i, end in enumerate(ends) if end >= at + len(told))
                    if part.others:
                        among = {self._first(word) for word in (told, *part.others)}
                        judged.append(Judged(first, ids[first], tuple(sorted(among)), answer))
                    else:
                        judged += [Judged(i, ids[i], (), answer) for i in range(first, last + 1)]
                at += len(told)
        return Prompt(torch.tensor([ids]), tuple(judged), before)

    def _first(self, word: str) -> int:
        """The first token of a word after a space."""
        if word not in self._known:
            self._known[word] = int(self.tokenizer(f" {word}", add_special_tokens=False)["input_ids"][0])
        return self._known[word]

    def _apart(self, words: Sequence[str]) -> list[str]:
        """Words that differ in their first token."""
        return list({self._first(word): word for word in reversed(words)}.values())


def _number(rng: random.Random, digits: int = 5) -> str:
    return "".join(rng.choice("123456789") for _ in range(digits))


def _needle(name: str, number: str) -> str:
    return f"The magic number of {name} is {number}."


def _largest(build: Callable[[int], Prompt], length: int, most: int) -> Prompt:
    """The prompt of the largest count that has at most `length` tokens."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if build(middle).tokens.shape[1] <= length else (low, middle - 1)
    if not low:
        raise ValueError(f"--lengths: expected room for the questions and some text, got {length} tokens")
    return build(low)


TASKS: dict[str, Callable[[Maker, int, int], Prompt]] = {
    "few needles": lambda maker, length, seed: maker.needles(length, seed, 8),
    "many needles": lambda maker, length, seed: maker.needles(length, seed, 32),
    "needles in noise": lambda maker, length, seed: maker.needles(length, seed, 8, haystack="noise"),
    "needles among needles": lambda maker, length, seed: maker.needles(length, seed, 8, haystack="needles"),
    "long numbers": lambda maker, length, seed: maker.needles(length, seed, 8, digits=12),
    "several numbers": lambda maker, length, seed: maker.needles(length, seed, 4, values=3),
    "variable tracking": lambda maker, length, seed: maker.tracking(length, seed),
    "common words": lambda maker, length, seed: maker.common(length, seed),
    "frequent words": lambda maker, length, seed: maker.frequent(length, seed),
}
