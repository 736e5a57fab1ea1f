"""Hugging Face transformers: run a plan inside a model (`apply`), and store the inputs of its attention (`capture`).

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

from fewkeys.call import attention
from fewkeys.captures.capture import AttentionInputs, Capture
from fewkeys.captures.writer import CaptureWriter
from fewkeys.core.impl import Impl, check_impl
from fewkeys.core.weights import Softcap, Weights
from fewkeys.guard.fallback import Fallbacks, Guard
from fewkeys.integrations.by_plan import ByPlan, LayerPlan
from fewkeys.integrations.interface import attach, attention_modules, by_token, exact, unwrapped
from fewkeys.integrations.loading import load_model
from fewkeys.integrations.patterns import layer_window
from fewkeys.integrations.projections import ProjectionFinder
from fewkeys.integrations.same_weights import check_same_weights, weights_of
from fewkeys.integrations.sensitivity import Sensitivity, counted, model_with_head
from fewkeys.model_plan import ModelPlan
from fewkeys.plan import Plan

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["Applied", "apply", "capture", "load_model"]

Plans = Plan | Mapping[int, LayerPlan] | Sequence[LayerPlan]
Batch = Tensor | Mapping[str, Any]
Part = Literal["encoder", "decoder", "cross"]


def apply(
    model: nn.Module,
    plan: Plans,
    *,
    impl: Impl = "auto",
    generator: torch.Generator | None = None,
    max_error: float | Guard | None = None,
) -> Applied:
    """Replace attention in every layer of `model` by `plan`, at once, until `restore` or the end of a `with`.

        with fk.apply(model, fk.budget(64)):
            approximate = model(**inputs)
        exact = model(**inputs)                     # bit for bit as before

    model: a transformers model, or a module around one: a SentenceTransformer, a model of peft, a compiled or a
    distributed one. plan: one plan, or one per attention layer as a sequence or a mapping from layer index; in place of
    a layer's plan there may be one for each of its key heads, as in the `ModelPlan` of `fewkeys.tune`. impl, generator:
    as in `fewkeys.attention`: with `impl="auto"`, a call that exact attention is expected to answer faster goes to the
    model's own SDPA, for plans with `exact_if_faster`; `plan.never_exact()` always runs. Encoders and decoder-only
    models, parts of a model (`model.encoder`), grouped queries, left and right padding (2-D attention_mask), prefill,
    and decoding with `DynamicCache` (query i of Lq stands at key Lk - Lq + i). The plan sees the keys of one call: a
    causal plan that selects among them selects anew at each decoded token.

    Layers whose own attention is a sliding window keep exactly that window, whatever the plan and the length; a
    sequence of plans may leave them out. Soft caps of scores (Gemma 2) and learned sinks (gpt-oss) are part of the
    answer: the first as weights `Softcap(cap)`, the second as one more key that every query keeps. So are biases of the
    distance: ALiBi (BLOOM, MPT, Falcon) under every plan, as one more dimension; T5's and MPNet's as `distance_bias` of
    `fewkeys.attention`, under its plans.

    For whom: entered by `with`, for the present context alone (`contextvars`: this thread, this task of asyncio); other
    threads go on with what they have, exact attention if they have nothing. Without `with`, for every thread, and for
    copies of the model, also in other processes. docs/serving.md has examples.

    max_error: as in `fewkeys.attention`: heads where the plan's estimated error is above it are answered exactly, and
    `fallbacks` of the result counts them. Decoded tokens are then answered exactly. Of a `Guard` its limit and number
    of queries are taken: every layer counts by itself.

    Nested calls: the innermost still active answers. Calls made on `model` raise `ValueError` for what is not
    honoured: attention dropout, chunks of the model's own, packed causal sequences, prepared 4-D masks, static caches,
    `output_attentions`; and for a plan that refuses causal attention in a causal model. docs/families.md lists model
    families.

    Raises `TypeError` for a `model` or `plan` of another kind, `ValueError` for a model whose attention does not go
    through transformers' interface and for plans that do not match its layers.
    """
    model = unwrapped(model)
    modules = attention_modules(model)
    plans = tuple(plans_per_layer(plan, modules))
    if isinstance(plan, ModelPlan):
        planned = [module for module, layer_plan in zip(modules, plans, strict=True) if layer_plan is not None]
        check_same_weights(plan, planned)
    limit = max_error if isinstance(max_error, Guard | None) else Guard(max_error)
    guards = None if limit is None else tuple(Guard(limit.max_error, queries=limit.queries) for _ in plans)
    check_impl(impl)
    if generator is not None and not isinstance(generator, torch.Generator):
        raise TypeError(f"generator: expected a torch.Generator or None, got {type(generator).__name__}")
    return Applied(model, ByPlan(plans, impl, generator, guards or ()))


class Applied:
    """A plan in force in `model`. `restore()` ends it, as does leaving the `with` block; a second time does nothing.

    Dropping this object changes nothing: the plan stays in force for as long as the model lives.
    """

    def __init__(self, model: PreTrainedModel, answer: ByPlan) -> None:
        self.model = model
        self._guards = answer.guards
        self._attachment = attach(model, answer)

    def restore(self) -> None:
        """Give the model back the attention it had, unless another `apply` is still in force on it."""
        self._attachment.detach()

    @property
    def fallbacks(self) -> tuple[Fallbacks, ...]:
        """For each layer, how often `max_error` made it answer exactly, so far. Empty without `max_error`."""
        return tuple(guard.fallbacks for guard in self._guards)

    def __enter__(self) -> Self:
        self._attachment.enter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.restore()


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
    """Run `model` on `batches` and keep query, key and value of every attention layer on disk, and the weights of the
    output projections.

    batches: input_ids of shape (B, N), or mappings as a tokenizer returns them (`input_ids`, `attention_mask`,
    ...); padding by the 2-D attention_mask is kept as `key_mask`, a bias of distances (T5, MPNet) as its table.
    Models of images or sound: pixel_values of shape (B, C, H, W), input_features of shape (B, features, frames), or
    mappings with them. directory: a new or empty folder; None: a temporary one that goes with the returned object.
    The model runs its base part once per batch without gradients, with its exact attention (SDPA), even inside
    `apply`; afterwards it is as it was. Memory: the model's own on one batch. Disk: layers x tokens x (Hq D + Hkv D
    + Hkv Dv) numbers. Layers whose own attention is a window are left out: every plan leaves them as they are.

    weights: what the model's own attention is made of, where it was trained with another kernel than softmax:
    `Entmax(1.5)`. Its layers then answer by exact attention of that kernel.

    part: of an encoder-decoder: "encoder", which runs alone, "decoder" (the self-attention of its decoder) or "cross",
    for which batches also hold `decoder_input_ids`; what is captured has the layers of this part alone. Padding by
    `decoder_attention_mask` marks the queries of cross-attention.

    gradients: keep the gradients of the model's predictions by every attention output, so that `fewkeys.tune` can judge
    heads by what their errors do to them (`fewkeys.integrations.sensitivity` has the equation).
    One backward pass a batch, and the memory of one; disk: layers x tokens x Hq Dv more numbers. The whole model runs,
    with its head where that predicts tokens. `labels` of a batch, as for training, mark the tokens that count by
    other numbers than -100. seed: of the random numbers of gradients.

    Raises `ValueError` as `apply` does for what the model asks of its attention, for an encoder-decoder without `part`,
    for no batches and for a `directory` that holds something else. Nothing is left behind after an error.
    """
    model = unwrapped(model)
    check_readable(model, part)
    if isinstance(batches, Tensor | Mapping):
        raise TypeError(f"batches: expected an iterable of batches, got one {type(batches).__name__}; put it in a list")
    sensitivity = Sensitivity(seed) if gradients else None
    writer = CaptureWriter(directory, model.config.name_or_path or type(model).__name__)
    projections = ProjectionFinder(model)
    captured: list[int] = []
    modules = attention_modules(model)
    encoder = () if part is None else tuple(model.get_encoder().modules())
    targets: Tensor | None = None

    def noted() -> Iterator[Batch]:
        nonlocal targets
        for batch in batches:
            mask = batch.get("decoder_attention_mask") if isinstance(batch, Mapping) else None
            targets = mask.bool() if isinstance(mask, Tensor) and not bool(mask.all()) else None
            yield batch

    def on_attention(layer: int, inputs: AttentionInputs, output: Tensor) -> Tensor:
        if inputs.window is not None:
            return output
        if part is not None:
            inside = any(modules[layer] is module for module in encoder)
            if part != ("encoder" if inside else "decoder" if inputs.is_causal else "cross"):
                return output
        if part == "cross":
            inputs = replace(inputs, query_mask=targets)
        if layer not in captured:
            captured.append(layer)
        writer.write(inputs)
        if sensitivity is not None:
            output = sensitivity.follow(output)
        projections.attended(captured.index(layer), output)
        return output

    try:
        with projections:
            for arguments, result in exact_passes(model, noted(), on_attention, weights, part, gradients):
                if not captured:
                    raise ValueError(
                        f"model: every layer of {type(model).__name__} has a sliding window, which every plan keeps, "
                        "so there is nothing to capture; use a model with layers that see every key"
                    )
                if sensitivity is not None:
                    writer.write_gradients(sensitivity.gradients(result, counted(model, arguments, result, part)))
                writer.end_batch()
        writer.write_projections(projections.matrices)
        return writer.finish(weights_of([modules[layer] for layer in captured]))
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
    on_attention: Callable[[int, AttentionInputs, Tensor], Tensor],
    weights: Weights | None = None,
    part: Part | None = None,
    gradients: bool = False,
) -> Iterator[tuple[Mapping[str, Any], Any]]:
    """Run the base model on each batch, with exact attention; after each, yield the batch and what the model returned.

    `on_attention(layer, inputs, output)` is called at every attention call, and returns the output that the model goes
    on with. `weights`: the model's own kernel, where it is not softmax. `part`: "encoder" runs the encoder alone.
    `gradients`: enable them, and run the head of a model that predicts tokens. Afterwards the model is as it was.
    """
    runs = model.get_encoder() if part == "encoder" else model_with_head(model) if gradients else model.base_model

    def answer(layer: int, module: nn.Module, inputs: AttentionInputs) -> Tensor:
        if inputs.sink is not None or (inputs.softcap is not None and weights != Softcap(inputs.softcap)):
            raise ValueError(
                f"model: {type(module).__name__} has "
                + ("a learned sink" if inputs.softcap is None else f"scores capped at {inputs.softcap}")
                + ", which captures do not support"
                + ("" if inputs.softcap is None else f", unless weights=fewkeys.weights.Softcap({inputs.softcap})")
                + "; fewkeys.apply supports it: compare the outputs of the model"
            )
        output = exact(module, inputs) if weights is None else _exact_by(weights, inputs)
        return on_attention(layer, inputs, output)

    for index, batch in enumerate(batches):
        arguments = _arguments(model, part, batch, index)
        if "use_cache" in inspect.signature(runs.forward).parameters:
            arguments["use_cache"] = False
        attachment = attach(model, answer)
        attachment.enter()
        try:
            with torch.set_grad_enabled(gradients):
                result = runs(**{name: item for name, item in arguments.items() if name != "labels"})
        finally:
            attachment.detach()
        yield arguments, result


def plans_per_layer(plan: object, modules: Sequence[nn.Module]) -> list[LayerPlan | None]:
    """The plan of each layer, or `TypeError`/`ValueError` where there is not one for each.

    One for each layer without a window of its own does too: the others have None then.
    """
    layers = len(modules)
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
    for layer, item in enumerate(plans):
        for one in (item,) if isinstance(item, Plan) or not isinstance(item, Sequence) else item:
            if not isinstance(one, Plan):
                raise TypeError(f"plan: expected a Plan for layer {layer}, got {type(one).__name__}")
    whole = [layer for layer, module in enumerate(modules) if layer_window(module) is None]
    if len(plans) not in (layers, len(whole)):
        also = "" if len(whole) == layers else f", or of the {len(whole)} that see every key"
        raise ValueError(f"plan: expected one plan for each of {layers} attention layers{also}, got {len(plans)}")
    if len(plans) == layers:
        return plans
    plan_of = dict(zip(whole, plans, strict=True))
    return [plan_of.get(layer) for layer in range(layers)]


def _arguments(model: PreTrainedModel, part: Part | None, batch: object, index: int) -> dict[str, Any]:
    """The arguments of a batch for the part of the model that runs, on the model's device."""
    name = model.main_input_name
    if isinstance(batch, Tensor):
        batch = {name: batch}
    if not isinstance(batch, Mapping):
        raise TypeError(
            f"batches: expected {name} or a mapping with {name} in batch {index}, got {type(batch).__name__}"
        )
    if name == "input_ids":
        _check_ids(model, batch.get(name), index)
    else:
        _check_numbers(name, batch.get(name), index)
    arguments = {name: item.to(model.device) if isinstance(item, Tensor) else item for name, item in batch.items()}
    if part == "encoder":
        arguments = {name: item for name, item in arguments.items() if not name.startswith("decoder_")}
    return arguments


_SHAPES = {
    "pixel_values": "images, channels, height, width",
    "input_features": "sounds, features, frames",
    "input_values": "sounds, samples",
}


def _check_numbers(name: str, values: object, index: int) -> None:
    """Check images and sounds."""
    axes = _SHAPES.get(name, "any number of dimensions")
    ranks = (axes.count(",") + 1,) if name in _SHAPES else range(1, 9)
    is_array = isinstance(values, Tensor) and values.ndim in ranks and values.is_floating_point()
    if not isinstance(values, Tensor) or not is_array or not values.numel():
        raise ValueError(f"batches: expected floating {name} of shape ({axes}) in batch {index}, got {_came(values)}")


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


def _came(item: object) -> str:
    return f"{item.dtype} of shape {tuple(item.shape)}" if isinstance(item, Tensor) else type(item).__name__


def _exact_by(weights: Weights, inputs: AttentionInputs) -> Tensor:
    """The call by exact attention of another kernel than softmax."""
    return by_token(attention(inputs.query, inputs.key, inputs.value, weights=weights, **inputs.options()))
