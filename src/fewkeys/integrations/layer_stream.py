"""The stream of one layer, between transformers' cache, which brings new keys, and its attention, which asks."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from fewkeys.captures.capture import AttentionInputs
from fewkeys.core.validation import check_inputs
from fewkeys.core.weights import Softmax
from fewkeys.execute import exact
from fewkeys.integrations import interface, streams
from fewkeys.plan import Plan
from fewkeys.streaming import Stream

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class LayerStream:
    """The stream of one layer, made when its first tokens come."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.stream: Stream | None = None
        self.expected: tuple[Tensor, Tensor] | None = None

    @property
    def length(self) -> int:
        return 0 if self.stream is None else self.stream.length

    def expect(self, key: Tensor, value: Tensor) -> None:
        """Wait for the attention call of these new keys."""
        if self.expected is not None:
            raise ValueError(
                "past_key_values: the attention of this model did not ask fewkeys for the last tokens; use the cache "
                "with the model it was made for, and make another after changing the attention implementation"
            )
        self.expected = (key, value)
        streams.wait(key, self)

    def attend(self, inputs: AttentionInputs) -> Tensor:
        """Take in the expected tokens and answer their queries."""
        self.expected = None
        if self.stream is None:
            self.stream = Stream(self.plan, scale=inputs.scale)
        self.stream.append(inputs.key, inputs.value, inputs.key_mask)
        return self.stream.attend(inputs.query)

    def select(self, index: Tensor) -> None:
        """Keep the sequences `index` of the batch."""
        if self.stream is not None:
            self.stream.select(index)

    def crop(self, length: int) -> None:
        """Forget the tokens from `length` on."""
        if self.stream is not None:
            self.stream.crop(length)


def attach(model: PreTrainedModel, owner: object) -> weakref.finalize[Any, Any]:
    """Let streams answer the model's attention calls that they wait for, as long as `owner` lives."""
    return weakref.finalize(owner, interface.attach(model, _answer))


def _answer(layer: int, module: nn.Module, inputs: AttentionInputs) -> Tensor:
    waiting = streams.take(inputs.key)
    if waiting is not None:
        return waiting.attend(inputs)
    problem = check_inputs(
        inputs.query,
        inputs.key,
        inputs.value,
        is_causal=inputs.is_causal,
        scale=inputs.scale,
        key_mask=inputs.key_mask,
        query_offset=inputs.query_offset,
    )
    return exact.attend(problem, Softmax())
