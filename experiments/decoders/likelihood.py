"""Perplexity of a stretch of text, and how far a replaced model's predictions are from its own."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import torch
from experiments.decoders.methods import EXACT, replaced
from torch import Tensor

from fewkeys.integrations.loading import quiet


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
        """Perplexity, and its ratio to exact attention's, with KL(exact || method) as the mean over tokens."""
        length = self.tokens.shape[1]
        if self._exact is None:
            self._exact = self._predict()
        exact, few, paid = self._exact, self._exact, (self.first + length + 1) / 2
        if method != EXACT:
            with replaced(self.model, method, slots, length, self.first) as spent:
                few = self._predict()
                paid = spent()
        told = self.tokens[0, self.first + 1 :, None]
        loss, own = -few.gather(1, told).mean(), -exact.gather(1, told).mean()
        parts = zip(exact.split(256), few.split(256), strict=True)
        apart = sum(float((p.exp() * (p - q)).sum()) for p, q in parts) / len(exact)
        return {"perplexity": loss.exp().item(), "ratio": (loss - own).exp().item(), "kl": apart, "paid": paid}

    @torch.no_grad()
    def _predict(self) -> Tensor:
        """Log-probabilities of what follows each judged token."""
        keep = self.tokens.shape[1] - self.first
        return self.model(self.tokens, use_cache=False, logits_to_keep=keep).logits[0, :-1].float().log_softmax(-1)
