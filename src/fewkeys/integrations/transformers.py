"""Hugging Face transformers: run a plan inside a model (`apply`), and keep what its attention is given (`capture`).

Both work through transformers' own attention and mask interfaces (`fewkeys.integrations.interface`) and leave the
model's code, weights and class alone.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, get_args

import torch
from torch import Tensor, nn

from fewkeys.attention import attention
from fewkeys.captures.capture import AttentionInputs, Capture, CaptureWriter
from fewkeys.core.impl import Impl, check_impl
from fewkeys.core.weights import Weights
from fewkeys.flow import always
from fewkeys.guard.fallback import Fallbacks, Guard
from fewkeys.integrations.interface import attach, attention_modules
from fewkeys.integrations.loading import load_model
from fewkeys.integrations.projections import ProjectionFinder
from fewkeys.plan import Plan

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["Applied", "apply", "capture", "load_model"]

LayerPlan = Plan | Sequence[Plan]
Plans = Plan | Mapping[int, LayerPlan] | Sequence[LayerPlan]
Batch = Tensor | Mapping[str, Any]
Part = Literal["encoder", "decoder", "cross"]


def apply(
    model: PreTrainedModel,
    plan: Plans,
    *,
    impl: Impl = "auto",
    generator: torch.Generator | None = None,
    max_error: float | None = None,
) -> Applied:
    """Replace attention in every layer of `model` by `plan`, at once, until `restore` or the end of a `with`.

        with fk.apply(model, fk.budget(64)):
            approximate = model(**inputs)
        exact = model(**inputs)                     # bit for bit as before

    plan: one plan, or one per attention layer as a sequence or a mapping from layer index; in place of a layer's plan
    there may be one for each of its key heads, as in the `ModelPlan` of `fewkeys.tune`. impl, generator: as in
    `fewkeys.attention`, but that `impl="auto"`, too, always runs the plan. Encoders and decoder-only models, grouped
    queries, left and right padding (2-D attention_mask), prefill and decoding with `DynamicCache` (query i of Lq stands
    at key Lk - Lq + i). The plan sees the keys of one call: a causal plan that selects among them selects anew at each
    decoded token.

    max_error: as in `fewkeys.attention`: heads where the plan's estimated error is above it are answered exactly, and
    `fallbacks` of what is returned says how often that happened. Decoded tokens are then answered exactly.

    Nested calls: the innermost still active answers. Calls made on `model` raise `ValueError` for what is not
    honoured: attention dropout, sliding windows shorter than the sequence, softcap, attention sinks, position bias,
    packed sequences, prepared 4-D masks, static caches, `output_attentions`; and for a plan that refuses causal
    attention in a causal model.

    Raises `TypeError` for a `model` or `plan` of another kind, `ValueError` for a model whose attention does not go
    through transformers' interface and for plans that do not match its layers.
    """
    modules = len(attention_modules(model))
    plans = [always(own) for own in plans_per_layer(plan, modules)]
    guards = None if max_error is None else tuple(Guard(max_error) for _ in plans)
    check_impl(impl)
    if generator is not None and not isinstance(generator, torch.Generator):
        raise TypeError(f"generator: expected a torch.Generator or None, got {type(generator).__name__}")

    def answer(layer: int, module: nn.Module, inputs: AttentionInputs) -> Tensor:
        guard, rows = None if guards is None else guards[layer], (inputs.query, inputs.key, inputs.value)
        return attention(*rows, plan=plans[layer], max_error=guard, **inputs.options(generator, impl))

    return Applied(model, answer, guards or ())


class Applied:
    """A plan in force in `model`. `restore()` ends it, as does leaving the `with` block; a second time does nothing.

    Dropping this object changes nothing: the plan stays in force for as long as the model lives.
    """

    def __init__(self, model: PreTrainedModel, answer: Any, guards: tuple[Guard, ...] = ()) -> None:
        self.model = model
        self._guards = guards
        self._detach = attach(model, answer)

    def restore(self) -> None:
        """Give the model back the attention it had, unless another `apply` is still in force on it."""
        self._detach()

    @property
    def fallbacks(self) -> tuple[Fallbacks, ...]:
        """For each layer, how often `max_error` made it answer exactly, so far. Empty without `max_error`."""
        return tuple(guard.fallbacks for guard in self._guards)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.restore()


def capture(
    model: PreTrainedModel,
    batches: Iterable[Batch],
    directory: str | os.PathLike[str] | None = None,
    *,
    weights: Weights | None = None,
    part: Part | None = None,
) -> Capture:
    """Run `model` on `batches` and keep query, key and value of every attention layer on disk, and the weights of the
    output projections.

    batches: input_ids of shape (B, N), or mappings as a tokenizer returns them (`input_ids`, `attention_mask`, ...);
    padding by the 2-D attention_mask is kept as `key_mask`. Models that see: pixel_values of shape (B, C, H, W), or
    mappings with them. directory: a new or empty folder; None: a temporary one
    that goes with the returned object. The model runs its base part once per batch without gradients, with its exact
    attention (SDPA), even inside `apply`; afterwards it is as it was. Memory: the model's own on one batch. Disk:
    layers x tokens x (Hq D + Hkv D + Hkv Dv) numbers.

    weights: what the model's own attention is made of, where it was trained with another kernel than softmax:
    `Entmax(1.5)`. Its layers then answer by exact attention of that kernel.

    part: of an encoder-decoder, whose batches also hold `decoder_input_ids`: "encoder", "decoder" (the self-attention
    of its decoder) or "cross"; what is captured has the layers of this part alone. Padding by `decoder_attention_mask`
    marks the queries of cross-attention.

    Raises `ValueError` as `apply` does for what the model asks of its attention, for an encoder-decoder without `part`,
    for no batches and for a `directory` that holds something else. Nothing is left behind after an error.
    """
    check_readable(model, part)
    if isinstance(batches, Tensor | Mapping):
        raise TypeError(f"batches: expected an iterable of batches, got one {type(batches).__name__}; put it in a list")
    writer = CaptureWriter(directory, model.config.name_or_path or type(model).__name__)
    projections = ProjectionFinder(model)
    own: list[int] = []
    modules = attention_modules(model)
    encoder = () if part is None else tuple(model.get_encoder().modules())
    targets: Tensor | None = None

    def noted() -> Iterator[Batch]:
        nonlocal targets
        for batch in batches:
            given = batch.get("decoder_attention_mask") if isinstance(batch, Mapping) else None
            targets = given.bool() if isinstance(given, Tensor) and not bool(given.all()) else None
            yield batch

    def hear(layer: int, inputs: AttentionInputs, output: Tensor) -> None:
        if part is not None:
            inside = any(modules[layer] is module for module in encoder)
            if part != ("encoder" if inside else "decoder" if inputs.is_causal else "cross"):
                return
        if part == "cross":
            inputs = replace(inputs, query_mask=targets)
        if layer not in own:
            own.append(layer)
        writer.write(inputs)
        projections.attended(own.index(layer), output)

    try:
        with projections:
            for _ in exact_passes(model, noted(), hear, weights):
                writer.end_batch()
        writer.write_projections(projections.found)
        return writer.finish()
    except BaseException:
        writer.abort()
        raise


def check_readable(model: PreTrainedModel, part: Part | None = None) -> None:
    """Raise for a model that `exact_passes` cannot run."""
    attention_modules(model)
    if part is not None and (part not in get_args(Part) or not model.config.is_encoder_decoder):
        raise ValueError(
            "part: expected 'encoder', 'decoder' or 'cross' for an encoder-decoder and None for other models, got "
            f"{part!r} for a {type(model).__name__}"
        )
    if model.config.is_encoder_decoder and part is None:
        raise ValueError(
            f"model: {type(model).__name__} is an encoder-decoder, which cannot be captured whole; say which part="
            "'encoder', 'decoder' or 'cross', or pass its encoder"
        )
    if model.training:
        raise ValueError("model: expected a model in eval mode, got one in training mode; call model.eval()")


def exact_passes(
    model: PreTrainedModel,
    batches: Iterable[Batch],
    hear: Callable[[int, AttentionInputs, Tensor], None],
    weights: Weights | None = None,
) -> Iterator[None]:
    """Run the base model on each batch, with exact attention and without gradients; yield after each.

    `hear(layer, inputs, output)` is told of every attention call. `weights`: the model's own kernel, where it is not
    softmax. Afterwards the model is as it was.
    """

    def answer(layer: int, module: nn.Module, inputs: AttentionInputs) -> Tensor:
        output = _exact(module, inputs) if weights is None else _exact_by(weights, inputs)
        hear(layer, inputs, output)
        return output

    for index, batch in enumerate(batches):
        detach = attach(model, answer)
        try:
            with torch.no_grad():
                model.base_model(**_arguments(model, batch, index))
        finally:
            detach()
        yield


def plans_per_layer(plan: object, layers: int) -> list[LayerPlan]:
    """The plan of each layer, or `TypeError`/`ValueError` where there is not one for each."""
    if isinstance(plan, Plan):
        return [plan] * layers
    if isinstance(plan, Mapping):
        if set(plan) != set(range(layers)):
            raise ValueError(f"plan: expected one plan for each layer 0 to {layers - 1}, got layers {sorted(plan)}")
        plans = [plan[layer] for layer in range(layers)]
    elif isinstance(plan, Sequence):
        plans = list(plan)
    else:
        raise TypeError(f"plan: expected a Plan, or one per layer, got {type(plan).__name__}")
    if len(plans) != layers:
        raise ValueError(f"plan: expected one plan for each of {layers} attention layers, got {len(plans)}")
    for layer, item in enumerate(plans):
        for one in (item,) if isinstance(item, Plan) or not isinstance(item, Sequence) else item:
            if not isinstance(one, Plan):
                raise TypeError(f"plan: expected a Plan for layer {layer}, got {type(one).__name__}")
    return plans


def _arguments(model: PreTrainedModel, batch: object, index: int) -> dict[str, Any]:
    """The keyword arguments of the base model for one batch, on the model's device."""
    name = model.main_input_name
    if isinstance(batch, Tensor):
        batch = {name: batch}
    if not isinstance(batch, Mapping):
        raise TypeError(
            f"batches: expected {name} or a mapping with {name} in batch {index}, got {type(batch).__name__}"
        )
    if name == "pixel_values":
        _check_pixels(batch.get(name), index)
    else:
        _check_ids(model, batch.get("input_ids"), index)
    given = {name: item.to(model.device) if isinstance(item, Tensor) else item for name, item in batch.items()}
    given.pop("labels", None)
    if "use_cache" in inspect.signature(model.base_model.forward).parameters:
        given["use_cache"] = False
    return given


def _check_pixels(pixels: object, index: int) -> None:
    if not isinstance(pixels, Tensor) or pixels.ndim != 4 or not pixels.is_floating_point() or not pixels.numel():
        raise ValueError(
            "batches: expected floating pixel_values of shape (images, channels, height, width) in batch "
            f"{index}, got {_came(pixels)}"
        )


def _check_ids(model: PreTrainedModel, ids: object, index: int) -> None:
    if not isinstance(ids, Tensor) or ids.ndim != 2 or ids.is_floating_point() or not ids.numel():
        raise ValueError(f"batches: expected input_ids of shape (sequences, tokens) in batch {index}, got {_came(ids)}")
    vocabulary = model.config.get_text_config().vocab_size
    if int(ids.min()) < 0 or int(ids.max()) >= vocabulary:
        raise ValueError(
            f"batches: expected input_ids from 0 to {vocabulary - 1} in batch {index}, got {int(ids.min())} to "
            f"{int(ids.max())}; use the tokenizer of this model"
        )
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if isinstance(longest, int) and ids.shape[1] > longest > 0:
        raise ValueError(
            f"batches: expected at most {longest} tokens (the positions of this model) in batch {index}, got "
            f"{ids.shape[1]}; cut the text into shorter sequences"
        )


def _came(given: object) -> str:
    return f"{given.dtype} of shape {tuple(given.shape)}" if isinstance(given, Tensor) else type(given).__name__


def _exact_by(weights: Weights, inputs: AttentionInputs) -> Tensor:
    """The call by exact attention of another kernel than softmax."""
    output = attention(inputs.query, inputs.key, inputs.value, weights=weights, **inputs.options())
    # The layout in which it goes on, so that this very memory can be found again at the output projection.
    return output.transpose(1, 2).contiguous().transpose(1, 2)


def _exact(module: nn.Module, inputs: AttentionInputs) -> Tensor:
    """The call as the model's own SDPA implementation answers it: the same function, mask and bits."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    mask = None
    queries, keys = inputs.query.shape[2], inputs.key.shape[2]
    if inputs.key_mask is not None or (inputs.is_causal and queries != keys):
        mask = torch.ones(queries, keys, dtype=torch.bool, device=inputs.key.device)
        if inputs.is_causal:
            mask = mask.tril(inputs.query_offset)
        mask = mask.expand(inputs.query.shape[0], 1, queries, keys)
        if inputs.key_mask is not None:
            mask = mask & inputs.key_mask[:, None, None, :]
    out, _ = sdpa_attention_forward(
        module, inputs.query, inputs.key, inputs.value, mask, scaling=inputs.scale, is_causal=inputs.is_causal
    )
    return out.transpose(1, 2)
