"""Run a model exactly and store what its attention receives: `fewkeys.capture`."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor, nn

from fewkeys.captures.capture import AttentionInputs, Capture
from fewkeys.captures.writer import CaptureWriter
from fewkeys.core.validation import describe
from fewkeys.core.weights import Softcap, Weights
from fewkeys.integrations.interface import attach, attention_modules, by_token, exact, has_two_parts, unwrapped
from fewkeys.integrations.sensitivity import Sensitivity, counted
from fewkeys.integrations.terms import attend
from fewkeys.integrations.text import positions
from fewkeys.plan import Plan

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Batch = Tensor | Mapping[str, Any]
Part = Literal["encoder", "decoder", "cross"]
SAMPLE = 4096
"""Numbers read of a weight, to identify a model."""
OF_ENCODERS = ("modality", "prompt_length")
"""What `SentenceTransformer.preprocess` adds for its own modules."""


def capture(
    model: nn.Module,
    batches: Iterable[Batch],
    directory: str | os.PathLike[str] | None = None,
    *,
    weights: Weights | None = None,
    part: Part | None = None,
    gradients: bool = False,
    seed: int = 0,
) -> Capture:
    """Run `model` on `batches` and keep query, key, value and output projection of every attention layer on disk.

    Args:
        batches: input_ids (B, N), or what the model reads instead, such as pixel_values or input_features; or mappings
            with them, as a tokenizer or `SentenceTransformer.preprocess` returns.
        directory: a new or empty folder; None: a temporary one, which is removed with the returned object.
        weights: the kernel of the model's own attention if that is not softmax, such as `Entmax(1.5)`. Comparisons and
            tuning judge by softmax even so.
        part: of an encoder-decoder: "encoder", which runs alone, "decoder" (its self-attention) or "cross", for which
            batches also hold `decoder_input_ids`. Padding by `decoder_attention_mask` marks the queries of
            cross-attention.
        gradients: also keep the gradients of the model's predictions by every attention output, by which
            `fewkeys.tune` weighs errors (equation: `fewkeys.integrations.sensitivity`). The whole model runs, with its
            head where that predicts tokens. `labels` of a batch are -100 for tokens that do not count.
        seed: of the random numbers of gradients.

    The base model runs once for each batch without gradients, by exact attention (SDPA), even inside `apply`. Layers
    with a sliding window are left out, since plans do not change them.

    Memory: the model's own on one batch. Disk: layers x tokens x (Hq D + Hkv D + Hkv Dv) numbers. With gradients, a
    backward pass for each batch and its memory, and layers x tokens x Hq Dv more numbers.

    `ValueError` as of `apply` for what the model asks of its attention, for an encoder-decoder without `part`, for no
    batches and for a `directory` that holds something else. An error leaves nothing behind.
    """
    model = unwrapped(model)
    check_readable(model, part)
    if isinstance(batches, Tensor | Mapping):
        raise TypeError(f"batches: expected an iterable of batches, got one {type(batches).__name__}; put it in a list")
    sensitivity = Sensitivity(seed) if gradients else None
    writer = CaptureWriter(directory, model.config.name_or_path or type(model).__name__)
    projections = ProjectionFinder(model)
    modules, captured, parts = attention_modules(model), dict[int, int](), set[str]()
    encoder = set() if part is None else set(model.get_encoder().modules())

    def on_attention(layer: int, inputs: AttentionInputs, output: Tensor) -> Tensor:
        part_of_layer = "encoder" if modules[layer] in encoder else "decoder" if inputs.is_causal else "cross"
        parts.add(part_of_layer)
        if inputs.window is not None or part not in (None, part_of_layer):
            return output
        writer.write(inputs)
        if sensitivity is not None:
            output = sensitivity.follow(output)
        projections.attended(captured.setdefault(layer, len(captured)), output)
        return output

    try:
        with closing(projections):
            for arguments, result in exact_passes(model, batches, on_attention, weights, part, gradients):
                if not captured or (part in ("decoder", "cross") and "decoder" not in parts):
                    wanted = f"layers without a sliding window{' and a causal decoder' if part else ''}"
                    raise ValueError(f"model: expected {wanted}, got {type(model).__name__}")
                if sensitivity is not None:
                    counts = counted(model, arguments, result, part, "decoder" in parts)
                    writer.write_gradients(sensitivity.gradients(result, counts))
                writer.end_batch()
        return writer.finish(weights_of([modules[layer] for layer in captured]), projections.matrices)
    except BaseException:
        writer.abort()
        raise


def check_readable(model: PreTrainedModel, part: Part | None = None) -> None:
    """Raise for a model that `exact_passes` cannot run."""
    attention_modules(model)
    alone = (None, "encoder") if model.config.is_encoder_decoder else (None,)
    if part not in (get_args(Part) if has_two_parts(model) else alone):
        kinds = "'encoder', 'decoder' or 'cross' for an encoder-decoder and None for other models"
        raise ValueError(f"part: expected {kinds}, got {part!r} for a {type(model).__name__}")
    name = model.main_input_name
    if part == "encoder" and name not in inspect.signature(model.get_encoder().forward).parameters:
        raise ValueError(f"part: expected an encoder that reads {name}, got that of a {type(model).__name__}")
    check_eval(model)


def check_eval(model: nn.Module) -> None:
    """Raise for a model in training mode, whose dropout draws anew in each call."""
    if model.training:
        raise ValueError("model: expected a model in eval mode, got one in training mode; call model.eval()")


def exact_passes(
    model: PreTrainedModel,
    batches: Iterable[Batch],
    on_attention: Callable[[int, AttentionInputs, Tensor], Tensor],
    weights: Weights | None = None,
    part: Part | None = None,
    gradients: bool = False,
) -> Iterator[tuple[Mapping[str, Any], Any]]:
    """Run the base model on each batch, with exact attention; after each, yield the batch and what the model returned.

    `on_attention(layer, inputs, output)` returns the output with which the model goes on. Otherwise as `capture`.
    """
    runs = model.get_encoder() if part == "encoder" else base_of(model)
    if gradients and part != "encoder" and model.get_output_embeddings() is not None:
        runs = model

    def answer(layer: int, module: nn.Module, inputs: AttentionInputs) -> Tensor:
        cap = inputs.softcap
        if inputs.sink is not None or (cap is not None and weights != Softcap(cap)):
            feature = f"scores capped at {cap}, without weights=fewkeys.weights.Softcap({cap})"
            feature = "a learned sink" if inputs.sink is not None else feature
            raise ValueError(f"model: {type(module).__name__} has {feature}, which captures do not support")
        if part == "cross":
            every = torch.ones_like(inputs.query[:, 0, :, 0], dtype=torch.bool)
            inputs = replace(inputs, query_mask=every if query_mask is None else query_mask)
        if weights is None or cap is not None:
            return on_attention(layer, inputs, exact(module, inputs))
        return on_attention(layer, inputs, by_token(attend(inputs, Plan(weights=weights))))

    for index, batch in enumerate(batches):
        arguments = batch_arguments(model, batch, index)
        if part == "encoder":
            arguments = {name: item for name, item in arguments.items() if not name.startswith("decoder_")}
        mask = arguments.get("decoder_attention_mask")
        query_mask = mask.bool() if isinstance(mask, Tensor) and not bool(mask.all()) else None
        with attach(model, answer), torch.set_grad_enabled(gradients):
            result = run_without_cache(runs, arguments)
        yield arguments, result


def base_of(model: PreTrainedModel) -> nn.Module:
    """The model without its head: `base_model`, unless that takes states instead of the model's inputs (DINOv3)."""
    base: nn.Module = model.base_model
    return base if model.main_input_name in inspect.signature(base.forward).parameters else model


def run_without_cache(model: nn.Module, arguments: Mapping[str, Any]) -> Any:
    """What a model returns, without keeping keys and without computing a loss."""
    options = {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}
    return model(**{name: item for name, item in arguments.items() if name != "labels"} | options)


def batch_arguments(model: PreTrainedModel, batch: object, index: int) -> dict[str, Any]:
    """The checked arguments of batch `index`, on the model's device."""
    name = model.main_input_name
    batch = {name: batch} if isinstance(batch, Tensor) else batch
    if not isinstance(batch, Mapping):
        raise TypeError(f"batches: expected {name}, or a mapping with it, in batch {index}, got {type(batch).__name__}")
    inputs: Any = batch.get(name)
    is_text = name == "input_ids"
    is_right_kind = isinstance(inputs, Tensor) and inputs.numel() and inputs.is_floating_point() != is_text
    if not is_right_kind or (is_text and inputs.ndim != 2):
        kind = "input_ids of integers (sequences, tokens)" if is_text else f"floating {name}"
        raise ValueError(f"batches: expected {kind} in batch {index}, got {describe(inputs)}")
    if is_text:
        _check_ids(model, inputs, index)
    return {
        name: item.to(model.device) if isinstance(item, Tensor) else item
        for name, item in batch.items()
        if name not in OF_ENCODERS
    }


def _check_ids(model: PreTrainedModel, ids: Tensor, index: int) -> None:
    words, tokens = model.config.get_text_config().vocab_size, ids.shape[1]
    least, largest, longest = int(ids.min()), int(ids.max()), positions(model) or tokens
    if least < 0 or largest >= words or tokens > longest:
        raise ValueError(
            f"batches: expected at most {longest} tokens (the positions of this model) from 0 to {words - 1} in batch "
            f"{index}, got {tokens} from {least} to {largest}; use the tokenizer of this model, and shorter sequences"
        )


def weights_of(modules: Sequence[nn.Module]) -> list[float]:
    """The norm of a sample of each attention module's largest weight; none where weights are not plain numbers."""
    samples = []
    for module in modules:
        largest = max((part.detach() for part in module.parameters()), key=Tensor.numel, default=torch.empty(0))
        if not largest.is_floating_point() or largest.is_meta or not largest.numel():
            return []
        samples.append(float(largest.flatten()[:: max(1, largest.numel() // SAMPLE)].float().norm()))
    return samples


class ProjectionFinder:
    """Finds output projections as the model runs, since models have no common name for them: the linear layers whose
    input is the memory that an attention call returned. `matrices` maps layers to weights (out, Hq Dv).
    """

    def __init__(self, model: PreTrainedModel) -> None:
        from transformers.pytorch_utils import Conv1D

        self.matrices: dict[int, Tensor] = {}
        self._last: tuple[int, Tensor] | None = None
        linear = [module for module in model.modules() if isinstance(module, nn.Linear | Conv1D)]
        self._hooks = [module.register_forward_pre_hook(self._look) for module in linear]

    def attended(self, layer: int, output: Tensor) -> None:
        """Keep the output (B, Hq, N, Dv) of a layer until the next call, so that its memory is not reused."""
        self._last = None if layer in self.matrices else (layer, output)

    def close(self) -> None:
        self._last = None
        for hook in self._hooks:
            hook.remove()

    def _look(self, module: nn.Module, arguments: tuple[Any, ...]) -> None:
        if self._last is None or not arguments or not isinstance(arguments[0], Tensor):
            return
        (layer, output), hidden, weight = self._last, arguments[0], module.weight
        if hidden.data_ptr() == output.data_ptr() and hidden.numel() == output.numel() and isinstance(weight, Tensor):
            matrix = weight.detach() if isinstance(module, nn.Linear) else weight.detach().mT  # Conv1D
            if matrix.ndim == 2 and matrix.shape[1] == output.shape[1] * output.shape[3]:
                self.matrices[layer] = matrix
