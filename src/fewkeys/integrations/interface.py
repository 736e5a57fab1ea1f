"""The attention function and the mask function that transformers finds by our name in its registries.

With an attention function alone, a model would silently ignore its padding. Without an active plan or a cache of ours,
the model's own functions answer. No global object keeps a model alive.
"""

from __future__ import annotations

import copyreg
import inspect
import re
import sys
from collections.abc import Callable
from functools import cache, partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn

from fewkeys.captures.capture import AttentionInputs
from fewkeys.core.precision import autocast_is_on, lowered
from fewkeys.core.validation import check_no_graph
from fewkeys.integrations import answers, mpnet, operator, switch
from fewkeys.integrations.answers import Answer, LayerAnswer, Length, PlanStack, Scope, in_force, plan_stack, streams
from fewkeys.integrations.masks import KeyMask, Keys, key_mask, read_mask
from fewkeys.integrations.switch import NAME
from fewkeys.integrations.terms import attend, by_sequence, check_honoured, distance_bias, plain
from fewkeys.native.tensors import is_trained

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def need(package: str, extra: str) -> None:
    """Raise `ModuleNotFoundError` with the extra to install where a package is missing."""
    if find_spec(package) is None:
        raise ModuleNotFoundError(f"{package} is needed for this and is not installed; pip install 'fewkeys[{extra}]'")


def unwrapped(model: object) -> PreTrainedModel:
    """The transformers model: `model` itself, or the one inside it. `TypeError` for others."""
    need("transformers", "hf")
    from transformers import PreTrainedModel

    if isinstance(model, PreTrainedModel):
        return model
    modules = model.modules() if isinstance(model, nn.Module) else ()
    inside = [module for module in modules if isinstance(module, PreTrainedModel)]  # the outermost is first
    if not inside or not set(inside).issubset(inside[0].modules()):
        got = f"{type(model).__name__} with {len(inside)} inside"
        raise TypeError(f"model: expected a transformers PreTrainedModel, or a module around one, got {got}")
    return inside[0]


def has_two_parts(model: PreTrainedModel) -> bool:
    """Whether it has an encoder and a decoder; the configuration of either alone says so, too."""
    return bool(model.config.is_encoder_decoder) and model.get_encoder() is not model


def attention_modules(model: object) -> list[nn.Module]:
    """The modules of `model` that use the attention interface, in the order of its layers."""
    model = unwrapped(model)
    asking = set(filter(_asks_interface, {type(module) for module in model.modules()}))
    modules = [module for module in model.modules() if mpnet.is_mpnet(module) or type(module) in asking]
    if not modules or model.config.model_type == "informer":  # some of its layers compute with the mask
        fix = "use an architecture that does (BERT, RoBERTa, ModernBERT, Llama, Qwen, GPT-2, ...)"
        raise ValueError(f"model: {type(model).__name__} does not use transformers' attention interface; {fix}")
    return modules


_CROSS = re.compile("cross_?att|encoder_att|encdec|encoder_decoder_att", re.IGNORECASE)
"""What models call their cross-attention."""


def cross_attention(model: PreTrainedModel) -> frozenset[int]:
    """The layers, by their places in `attention_modules`, whose queries are other tokens than their keys."""
    paths = {module: path for path, module in model.named_modules()}
    return frozenset(i for i, module in enumerate(attention_modules(model)) if _CROSS.search(paths[module]))


def is_causal(module: nn.Module) -> bool:
    """Whether an attention module is causal."""
    return bool(getattr(module, "is_causal", True)) and not mpnet.is_mpnet(module)


def _asks_interface(kind: type) -> bool:
    """Whether a `forward` of this class, its own or inherited, looks its attention up in the interface."""
    forwards = (inspect.unwrap(vars(base)["forward"]) for base in kind.__mro__ if "forward" in vars(base))
    return any("ALL_ATTENTION_FUNCTIONS" in f.__code__.co_names for f in forwards if inspect.isfunction(f))


class attach:  # noqa: N801  # used like a function and like `torch.no_grad`
    """Give every attention call of `model` to `answer` until `detach`; None: those of a cache to its streams.

    A `with` limits the answers to the current context, and detaches at its end. `ValueError` for a model whose
    attention cannot be replaced, which stays as it was.
    """

    def __init__(self, model: PreTrainedModel, answer: Answer | None) -> None:
        self._modules, self._configs = attention_modules(model), switch.configs_of(model)
        self._scope, self._is_active = Scope(), True
        self._holder = None if answer is None else self._scope
        with answers.LOCK:
            mpnet.restate(self._modules)
            register()
            switch.hold(self._configs, self._holder)
            self._hook = model.register_forward_pre_hook(_refuse_output_attentions, with_kwargs=True)
            if answer is not None:
                for layer, module in enumerate(self._modules):
                    answers.push(module, self._scope, partial(answer, layer))

    def detach(self) -> None:
        """Restore the model's attention, unless another plan is active. A second call does nothing."""
        self._scope.leave()
        with answers.LOCK:
            if not self._is_active:
                return
            self._is_active = False
            for module in self._modules:
                answers.remove(module, self._scope)
                if not plan_stack(module).answers:
                    mpnet.give_back(module)
            self._hook.remove()
            switch.release(self._configs, self._holder)

    def __enter__(self) -> Self:
        if not self._is_active:
            raise ValueError("model: expected an active plan, got one that was restored; call fewkeys.apply again")
        self._scope.enter()
        return self

    def __exit__(self, *error: object) -> None:
        self.detach()


def register() -> None:
    """Register our functions."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    with answers.LOCK:
        AttentionInterface.register(NAME, _attention_forward)
        AttentionMaskInterface.register(NAME, _mask)
        operator.register(_from_graph)


def _copied_stack(innermost: LayerAnswer | None) -> PlanStack:
    register()  # the copy may be in another process
    return PlanStack({} if innermost is None else {Scope(): innermost})


copyreg.pickle(PlanStack, lambda stack: (_copied_stack, (stack.innermost(),)))


def exact(module: nn.Module, inputs: AttentionInputs) -> Tensor:
    """The call as the model's own SDPA implementation answers it, to the bit."""
    if not plain(inputs):  # SDPA has no caps, sinks and biases of distances
        return by_token(attend(inputs, None))
    mask, (batch, _, queries, _), keys = None, inputs.query.shape, inputs.key.shape[2]
    if inputs.key_mask is not None or inputs.window is not None or (inputs.is_causal and 1 < queries != keys):
        content = Keys(inputs.key_mask, inputs.is_causal, inputs.window)
        mask = content.seen(queries, inputs.key).expand(batch, 1, queries, keys)
    options = {"scaling": inputs.scale, "is_causal": inputs.is_causal}
    return _sdpa()(module, inputs.query, inputs.key, inputs.value, mask, **options)[0].transpose(1, 2)


def by_token(output: Tensor) -> Tensor:
    """The output (B, Hq, Nq, Dv) in the memory layout of the output projection's input (`capture.ProjectionFinder`)."""
    return output.transpose(1, 2).contiguous().transpose(1, 2)


@cache
def _sdpa() -> Callable[..., tuple[Tensor, None]]:
    """SDPA as transformers calls it. Cached, as an `import` in each layer of each call would add up."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    return sdpa_attention_forward


def _refuse_output_attentions(module: nn.Module, args: Any, kwargs: dict[str, Any] | None = None) -> None:
    if kwargs is None:  # another thread called the model while torch registered the hook
        return
    config: Any = module.config
    wanted = kwargs.get("output_attentions")
    if wanted is None:
        wanted = getattr(config, "output_attentions", False)
    if wanted and config._attn_implementation == NAME:  # a user may have set another one since
        raise ValueError("output_attentions: expected False, or model.set_attn_implementation('eager')")


_OWN = "_fewkeys_own"
"""Marks masks of the model's own mask function. Its own attention reads them, even if a plan has come since."""


def _mask(**kwargs: Any) -> Tensor | None:
    if torch.compiler.is_dynamo_compiling():
        from fewkeys.uncompiled import outside

        of_keys = operator.mask_of_keys(**kwargs)
        return outside(_mask, **kwargs) if of_keys is None else of_keys
    config, is_of_stream = kwargs.get("config"), isinstance(kwargs["kv_length"], Length)
    implementation = switch.own_implementation(config)
    if implementation is None or is_of_stream or in_force(switch.holders(config)):
        check_no_graph("attention_mask", torch.empty(0))  # fake, too, under a FakeTensorMode
        return key_mask(**kwargs)
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    masks: Any = ALL_MASK_ATTENTION_FUNCTIONS
    mask: Tensor | None = masks[implementation](**kwargs) if implementation in masks else None
    if isinstance(mask, Tensor):
        vars(mask)[_OWN] = True
    return mask


def _attention_forward(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> operator.Output:
    """The attention function: (B, Hq, Nq, D) in, (B, Nq, Hq, Dv) and no weights out."""
    if torch.compiler.is_dynamo_compiling():
        if operator.suits(module, attention_mask, options):
            scale = options.get("scaling")
            return torch.ops.fewkeys.attention(query, key, value, attention_mask, scale, id(module)), None
        from fewkeys.uncompiled import outside

        result: operator.Output = outside(_from_graph, module, query, key, value, attention_mask, **options)
        return result
    stack = plan_stack(module)
    stream: Callable[[AttentionInputs], Tensor] | None = streams.get(key) if streams.data else None
    answer = stack.innermost()
    is_own = answer is None and stream is None and not isinstance(attention_mask, KeyMask)
    if is_own or getattr(attention_mask, _OWN, False):
        return _own_attention(module)(module, query, key, value, attention_mask, **options)
    check_no_graph("query", query)
    check_honoured(module, options, stream is not None)
    (batch, _, queries, dim), keys = query.shape, key.shape[2]
    real, causal, window = _keys(module, attention_mask, (batch, queries, keys), options.get("is_causal"))
    if causal and keys < queries:
        raise ValueError(f"key: expected at least {queries} keys in a causal call, got {keys}")
    offset = keys - queries if causal else 0
    scale = dim**-0.5 if options.get("scaling") is None else float(options["scaling"])
    starts = options.get("cu_seq_lens_q")
    terms: dict[str, Any] = {
        "key_mask": real,
        "window": window,
        "softcap": options.get("softcap"),
        "sink": options.get("s_aux"),
        "distance_bias": distance_bias(options.get("position_bias"), offset),
    }
    is_plain = all(term is None for term in (*terms.values(), stream, starts))
    facts = None
    if is_plain and not (offset or autocast_is_on()):
        shapes, threads = (query.shape, key.shape, value.shape), torch.get_num_threads()
        facts = (answer, causal, scale, *shapes, query.dtype, query.device, threads, is_trained(query, key, value))
        if facts == stack.own_call:
            return _sdpa()(module, query, key, value, None, scaling=scale, is_causal=causal)
    query, key, value = map(lowered, (query, key, value))
    inputs = AttentionInputs(query, key, value, scale, causal, query_offset=offset, **terms)

    def by_plan(inputs: AttentionInputs) -> Tensor:
        if answer is not None:
            if (output := answer(module, inputs)) is not None:
                return output
            stack.own_call = facts
        return exact(module, inputs)

    output = by_sequence(inputs, starts, by_plan) if stream is None else stream(inputs)
    return output.transpose(1, 2).contiguous(), None


def _from_graph(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any
) -> operator.Output:
    """A call of compiled code, by the operator or after a break."""
    return _attention_forward(module, query, key, value, operator.watched(mask), **options)


def _own_attention(module: nn.Module) -> operator.Attend:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    implementation = switch.own_implementation(getattr(module, "config", None))
    if implementation == "eager":
        return getattr(sys.modules[type(module).__module__], "eager_attention_forward", _sdpa())
    attend: operator.Attend = ALL_ATTENTION_FUNCTIONS.get(implementation, _sdpa())
    return attend


def _keys(module: nn.Module, mask: Tensor | None, shape: tuple[int, int, int], argument: bool | None) -> Keys:
    """The real keys of a call of `shape` (B, Nq, Nk), whether it is causal, and its window.

    The mask decides if there is padding or a window, and under "eager". The other implementations drop any other mask
    and follow the argument `is_causal`, or without one the module's flag, even where that is wrong (AIMv2). An argument
    that differs from the flag may only mean that there is a mask (Moonshine).
    """
    batch, queries, keys = shape
    real, by_mask, window = (None, None, None) if mask is None else read_mask(module, mask, (batch, keys))
    is_masked = real is not None or window is not None or (by_mask and queries != keys)
    if is_masked or switch.own_implementation(getattr(module, "config", None)) == "eager":
        return Keys(real, bool(by_mask), window)
    causal = bool(getattr(module, "is_causal", True))
    if argument not in (None, causal):
        causal = bool(argument if by_mask is None else by_mask)
    return Keys(None, causal, None)
