"""How much a model's predictions change with an error in the output of an attention head, for `fewkeys.tune`.

Let s be a random number made of the model's output on the tokens that count,

    a model that predicts tokens    s = sum_t log p_t(y_t)            y_t drawn from p_t, the softmax of its logits
    any other                       s = sum_t (r_t . h_t) / |h_t|     r_t random signs, h_t its last hidden states

and g = ds / do the gradient by the output o of a head at a query. An error e in that output then changes the
predictions, to second order and on average over the random numbers, by

    E (g . e)^2  =  2 sum_t KL(p_t || p_t changed)      or      sum_t |change of h_t|^2 / |h_t|^2

The first is the Fisher information of the predictions along e; both are the Gauss-Newton form of their distance,
estimated as by Hutchinson (1989), with one draw.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fewkeys.core.validation import describe
from fewkeys.integrations.interface import has_two_parts

IGNORED = -100
"""The label of a token that does not count, as in torch's losses."""


class Sensitivity:
    """Collects the gradients of one batch after another: `follow` every attention output, then call `gradients`.

    seed: of y and r. Cost: one backward pass, and the memory of training on the batch without an optimiser.
    """

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self._leaves: list[Tensor] = []

    def follow(self, output: Tensor) -> Tensor:
        """The same output, for which `gradients` returns a gradient."""
        self._leaves.append(torch.zeros_like(output, requires_grad=True))
        return output + self._leaves[-1]

    @torch.enable_grad()
    def gradients(self, result: Any, counts: Tensor) -> list[Tensor]:
        """The gradient ds / do of every output that was followed since the last call.

        result: what the model returned; counts: bool (B, N), the tokens that count.
        """
        score = self._score(result, counts)
        leaves, self._leaves = self._leaves, []
        return list(torch.autograd.grad(score, leaves))

    def _score(self, result: Any, counts: Tensor) -> Tensor:
        """The random number s whose gradients are taken."""
        logits: Tensor | None = result.get("logits")
        if logits is not None:
            log_p = logits[counts].float().log_softmax(-1)
            drawn = torch.multinomial(log_p.detach().exp().cpu(), 1, generator=self._generator)
            return log_p.gather(1, drawn.to(log_p.device)).sum()
        hidden: Tensor = result["last_hidden_state"][counts].float()
        signs = torch.randint(0, 2, hidden.shape, generator=self._generator).to(hidden) * 2 - 1
        size = torch.linalg.vector_norm(hidden.detach(), dim=-1).clamp_min(1e-30)
        turned: Tensor = ((hidden * signs).sum(-1) / size).sum()
        return turned


def counted(model: Any, batch: Mapping[str, Any], result: Any, part: str | None, is_causal: bool) -> Tensor:
    """Which tokens (B, N) count: real ones, and where the batch has `labels`, those that predict one.

    A label is predicted by the token before it in decoders, by its own token in encoders and encoder-decoders.
    """
    output = result.get("logits", result.get("last_hidden_state"))
    if output is None:
        raise ValueError(f"gradients: expected a model that returns logits or last hidden states, got {sorted(result)}")
    shape = tuple(output.shape[:2])
    has_decoder = has_two_parts(model) and part != "encoder"
    mask = batch.get("decoder_attention_mask" if has_decoder else "attention_mask")
    real = torch.ones(shape, dtype=torch.bool) if mask is None or mask.shape != shape else mask.bool().cpu()
    labels = batch.get("labels")
    if labels is None:
        return real
    if not isinstance(labels, Tensor) or tuple(labels.shape) != shape or labels.is_floating_point():
        raise ValueError(f"labels: expected integers of shape {shape}, one for each token, got {describe(labels)}")
    labelled = labels.cpu() != IGNORED
    if not has_decoder and is_causal:
        labelled = torch.cat([labelled[:, 1:], torch.zeros_like(labelled[:, :1])], 1)
    if not bool((real & labelled).any()):
        raise ValueError(f"labels: expected some that are not {IGNORED}, got none; label what counts")
    return real & labelled
