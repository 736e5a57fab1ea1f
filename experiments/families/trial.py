"""What works in a type of model: an exact plan is the model itself, generation, `cache`, training; else the reason."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import torch
from experiments.families.build import CannotBuildError, Kind, forms
from experiments.families.inputs import Inputs, candidates
from torch import Tensor, nn
from torch.nn.functional import pad

import fewkeys as fk
from fewkeys.captures.capture import AttentionInputs
from fewkeys.integrations.interface import attach, exact

YES, FLAG, FORM = "yes", "wrong flag", "form"
WINDOWS = "yes: every layer keeps its window"
UNTRIED = "untried"
REFUSED, FAILED, ITSELF = "no", "FAILED", "not even by itself"
COLUMNS = ("apply", "generate", "cache", "train")
PLAIN, CHANGED = "as it is", "its last token changed"
EXACT = fk.Plan()
FEW = (
    fk.budget(8, is_causal=True, memory="constant").never_exact(),
    fk.budget(8).never_exact(),
    fk.Plan(fk.Window(3)),
)
EVERY = fk.Plan(fk.select.RecentBlocks(32, 2), fk.rest.RunningMeans(1))
PACKAGE = str(Path(fk.__file__).parent)


class ImpossibleError(Exception):
    """The model itself does not do this, whatever its attention."""


Row = dict[str, str | None]


def trial(kind: Kind) -> Row:
    """By column, "yes", "no: " and the reason, "FAILED: " and how, or None where the question makes no sense.

    Where no small model can be built or run, the one entry `UNTRIED` says why.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            model, inputs, form = runnable(kind)
        except CannotBuildError as error:
            return {UNTRIED: str(error)}
        writes = type(model).__name__.endswith(("ForCausalLM", "LMHeadModel", "ForConditionalGeneration", "Seq2SeqLM"))
        writes = writes and model.can_generate() and "input_ids" in inputs
        decodes = writes and not model.config.is_encoder_decoder
        return ({FORM: form} if form else {}) | {
            FLAG: _flag(model, inputs),
            "apply": tried(lambda: _applied(model, inputs)),
            "generate": tried(lambda: _generated(model, inputs)) if writes else None,
            "cache": tried(lambda: _cached(model, inputs)) if decodes else None,
            "train": tried(lambda: _trained(model, inputs)),
        }


def runnable(kind: Kind) -> tuple[nn.Module, Inputs, str]:
    """The first form of a type that runs by itself, by inputs that we know."""
    reasons = []
    try:
        for form, model in forms(kind):
            try:
                return model, understood(model), form
            except CannotBuildError as error:
                reasons.append(error)
    except CannotBuildError as error:
        reasons.append(error)
    raise reasons[0]


def tried(work: Callable[[], str]) -> str:
    """What `work` says, or what stopped it: a `ValueError` or `TypeError` that this package raises is a refusal."""
    try:
        return work()
    except ImpossibleError as error:
        return f"{ITSELF}: {error}"
    except Exception as error:
        said = " ".join(str(error).split())
        trace = error.__traceback__
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        ours = trace is not None and trace.tb_frame.f_code.co_filename.startswith(PACKAGE)
        if ours and isinstance(error, ValueError | TypeError) and re.match(r"[\w, ]+: ", said):
            return f"{REFUSED}: {said.partition('; ')[0]}"
        return f"{FAILED}: {type(error).__name__}: {said[:200]}"


def understood(model: nn.Module) -> Inputs:
    """The first inputs that the model itself runs on."""
    first = "unknown inputs"
    for inputs in candidates(model):
        try:
            outputs = run(model, inputs)
        except Exception as error:
            if first.startswith("no inputs"):
                first = f"fails without fewkeys: {type(error).__name__}: {' '.join(str(error).split())[:150]}"
            continue
        if outputs and all(bool(part.isfinite().all()) for part in outputs):
            return inputs
        first = "its own output is not finite" if outputs else "its own output has no numbers"
    raise CannotBuildError(first)


@torch.no_grad()
def run(model: nn.Module, inputs: Inputs) -> list[Tensor]:
    """The outputs that are numbers; zero at padding, whose outputs mean nothing.

    Where a model puts a token of its own before or after the others, padding is where either leaves it.
    """
    torch.manual_seed(0)
    outputs = model(**inputs)
    real = inputs.get("attention_mask")
    parts = []
    for part in outputs.values() if hasattr(outputs, "values") else outputs:
        if isinstance(part, Tensor) and part.is_floating_point() and part.numel() and part.ndim:
            if real is not None and part.ndim > 1 and part.shape[:2] in (real.shape, (len(real), real.shape[1] + 1)):
                more = part.shape[1] - real.shape[1]
                seen = pad(real, (0, more), value=1) * pad(real, (more, 0), value=1)
                part = part.masked_fill(seen.view(*seen.shape, *[1] * (part.ndim - 2)) == 0, 0.0)
            parts.append(part.float())
    return parts


def difference(parts: list[Tensor], others: list[Tensor]) -> float:
    """The largest relative difference of any output."""
    pairs = zip(parts, others, strict=True)
    return max(float((one - other).norm() / other.norm().clamp(min=1e-9)) for one, other in pairs)


def cases(inputs: Inputs) -> Iterator[tuple[str, Inputs]]:
    """The inputs themselves, shorter than every window, padded on either side, and with the last token changed."""
    yield PLAIN, inputs
    ids = inputs.get("input_ids")
    if ids is not None:
        yield "short", {name: rows[:, :3] if rows.shape[:2] == ids.shape else rows for name, rows in inputs.items()}
        if "attention_mask" in inputs:
            real = torch.ones_like(ids)
            real[0, :5] = 0
            yield "padded left", inputs | {"attention_mask": real}
            yield "padded right", inputs | {"attention_mask": real.flip(1)}
            yield "without a mask", {name: rows for name, rows in inputs.items() if name != "attention_mask"}
    last = _last(inputs)
    if last is not None:
        changed = inputs[last].clone()
        changed[:, -1] = torch.where(changed[:, -1] == 3, 4, 3)
        yield CHANGED, inputs | {last: changed}


def _last(inputs: Inputs) -> str | None:
    """The argument whose tokens the outputs belong to."""
    return next((name for name in ("decoder_input_ids", "input_ids") if name in inputs), None)


def _applied(model: nn.Module, inputs: Inputs) -> str:
    own: dict[str, list[Tensor]] = {}
    for case, given in cases(inputs):
        try:
            own[case] = run(model, given)
        except Exception:
            continue  # the model itself does not take these
    given = {case: given for case, given in cases(inputs) if case in own}
    with fk.apply(model, EXACT):
        ours = {case: run(model, these) for case, these in given.items()}
    for case in given:
        if not (off := difference(ours[case], own[case])) < 1e-4:
            return f"{FAILED}: {case}: an exact plan differs by {off:.2g}"
    part, plan, few = _few(model, inputs)
    if not all(bool(rows.isfinite().all()) for rows in few):
        return f"{FAILED}: under {plan} its output is not finite"
    if CHANGED in given and _moved(own, inputs) < 1e-5:
        with fk.apply(part, plan):
            later = {PLAIN: few, CHANGED: run(model, given[CHANGED])}
        for outputs in (ours, later):
            if not (off := _moved(outputs, inputs)) < 1e-5:
                return f"{FAILED}: a change of the last token moves earlier outputs by {off:.2g}"
    if difference(run(model, inputs), own[PLAIN]):
        return f"{FAILED}: the model is not what it was"
    return WINDOWS if difference(few, own[PLAIN]) < 1e-4 else YES


def _flag(model: Any, inputs: Inputs) -> str | None:
    """Whether `is_causal` of an attention module is not what its calls are; None: it is, or nobody asks."""
    wrong: set[str] = set()

    def answer(layer: int, module: nn.Module, call: AttentionInputs) -> Tensor:
        if call.query.shape[2] > 1 and call.is_causal != getattr(module, "is_causal", True):
            wrong.add(type(module).__name__)
        return exact(module, call)

    try:
        attachment = attach(model, answer)
    except ValueError:
        return None
    try:
        run(model, inputs)
    except Exception:
        return None  # which `apply` tells
    finally:
        attachment.detach()
    return ", ".join(sorted(wrong)) or None


def _moved(outputs: dict[str, list[Tensor]], inputs: Inputs) -> float:
    """How far outputs before the last token are from those of other last tokens; infinite where none is by token."""
    shape = inputs[_last(inputs) or ""].shape
    pairs = [pair for pair in zip(outputs[PLAIN], outputs[CHANGED], strict=True) if pair[0].shape[:2] == shape]
    return max((float((one - other)[:, :-1].abs().max()) for one, other in pairs), default=torch.inf)


def _few(model: Any, inputs: Inputs) -> tuple[nn.Module, fk.Plan, list[Tensor]]:
    """A part of the model, of an encoder-decoder first its encoder, a plan of few slots that it takes, and what the
    model then says.
    """
    parts = [model.get_encoder(), model] if model.config.is_encoder_decoder else [model]
    for part, plan in product(parts, FEW):
        try:
            with fk.apply(part, plan):
                return part, plan, run(model, inputs)
        except (ValueError, TypeError) as error:
            refusal = error
    raise refusal


def _written(model: Any, inputs: Inputs, **more: Any) -> Tensor:
    given = {name: rows for name, rows in inputs.items() if name != "decoder_input_ids"}
    if "attention_mask" in given:
        given["attention_mask"] = torch.ones_like(given["attention_mask"])
        given["attention_mask"][0, :5] = 0
    how = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "eos_token_id": 2}
    written: Tensor = model.generate(**given, **how, **more)
    return written


def _generated(model: nn.Module, inputs: Inputs) -> str:
    before = _own(lambda: _written(model, inputs))
    with fk.apply(model, EXACT):
        if not torch.equal(_written(model, inputs), before):
            return f"{FAILED}: an exact plan writes something else"
    return YES


def _cached(model: nn.Module, inputs: Inputs) -> str:
    before = _own(lambda: _written(model, inputs, use_cache=False))
    cache = fk.cache(model, EVERY)
    try:
        if torch.equal(_written(model, inputs, past_key_values=cache), before):
            return YES
    finally:
        cache.close()
    return f"{FAILED}: a cache of every key writes something else"


def _own(work: Callable[[], Tensor]) -> Tensor:
    """What the model itself does."""
    try:
        return work()
    except Exception as error:
        raise ImpossibleError(f"{type(error).__name__}: {' '.join(str(error).split())[:150]}") from error


def _trained(model: nn.Module, inputs: Inputs) -> str:
    model = copy.deepcopy(model)
    part, plan, _ = _few(model.eval(), inputs)
    model.train()
    with fk.apply(part, plan):
        parts = [part for part in model(**inputs).values() if isinstance(part, Tensor) and part.requires_grad]
        sum(part.float().square().mean() for part in parts).backward()
    grads = [weight.grad for weight in model.parameters() if weight.grad is not None]
    sound = grads and all(bool(grad.isfinite().all()) for grad in grads)
    return YES if sound else f"{FAILED}: gradients are not finite"
