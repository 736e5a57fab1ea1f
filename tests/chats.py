"""A text from which all tasks of experiments/decoders can be made, and a chat tokenizer trained on it."""

from functools import cache

from experiments.decoders.tasks import NAMES, PLACES
from experiments.value_aware.models import train_tokenizer

TEMPLATE = "{% for message in messages %}{{ '<' + message.role + '>' + message.content + '\n' }}{% endfor %}"


@cache
def chat_text():
    words = [*NAMES, *PLACES]
    lines = [f"The {words[i % 80]} of {words[i * 7 % 80]} was number {i} of the list. It is so." for i in range(600)]
    names = [a + b + c + d for a in "bdfgklmn" for b in "aeiou" for c in "rstvz" for d in "ao"]
    return "\n".join([*lines, *(f"It is {name}, and {name} it is and so on it goes." for name in names)])


@cache
def chat_tokenizer():
    tokenizer = train_tokenizer(chat_text())
    tokenizer.chat_template = TEMPLATE
    return tokenizer
