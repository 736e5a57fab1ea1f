"""Perplexity of a stretch of text, and the distance of predictions with replaced attention from exact ones."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import torch
from experiments.decoders.methods import EXACT, replaced
from torch import Tensor

from fewkeys.integrations.loading import quiet


def compared(exact: Tensor, other: Tensor, tokens: Tensor) -> dict[str, float]:
    """The perplexity of `tokens` (N,) by `other`, its ratio to that by `exact`, and KL(exact || other), a mean.

    Both are log-probabilities (N, V).
    """
    loss, least = (-rows.gather(1, tokens[:, None]).mean() for rows in (other, exact))
    parts = zip(exact.split(256), other.split(256), strict=True)
    kl = sum(float((p.exp() * (p - q)).sum()) for p, q in parts) / len(exact)
    return {"perplexity": loss.exp().item(), "ratio": (loss - least).exp().item(), "kl": kl}


class Stretch:
    """`length` tokens that begin at the share `place` of a text; the second half is judged."""

    def __init__(self, model: Any, tokenizer: Any, text: str, place: Fraction, length: int) -> None:
        begin = int(len(text) * place)
        with quiet():
            self.tokens = tokenizer(text[begin : begin + 8 * length], return_tensors="pt").input_ids[:, :length]
        if self.tokens.shape[1] < length:
            raise ValueError(
                f"--text: expected {length} tokens after {place} of it, got {self.tokens.shape[1]}; "
                "give a longer text, or shorter --lengths"
            )
        self.model, self.first = model, length // 2
        self._exact: Tensor | None = None

    def judge(self, method: str, slots: int) -> dict[str, float]:
        """What `compared` says of the method, and the slots that its queries pay."""
        length = self.tokens.shape[1]
        if self._exact is None:
            self._exact = self.predict()
        exact, predicted, paid = self._exact, self._exact, (self.first + length + 1) / 2
        if method != EXACT:
            with replaced(self.model, method, slots, length, self.first) as paid_so_far:
                predicted = self.predict()
                paid = paid_so_far()
        return {**compared(exact, predicted, self.tokens[0, self.first + 1 :]), "paid": paid}

    @torch.no_grad()
    def predict(self, cache: Any = None) -> Tensor:
        """Log-probabilities of the token after each judged token; with a cache, the model reads through it."""
        options = {"use_cache": False} if cache is None else {"past_key_values": cache}
        keep = self.tokens.shape[1] - self.first
        return self.model(self.tokens, logits_to_keep=keep, **options).logits[0, :-1].float().log_softmax(-1)
