"""Checks at the public edge: each message names the argument, what was expected, what came, and the fix."""

import math
from collections.abc import Callable
from contextlib import suppress
from typing import TypedDict

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from fewkeys.core.derivatives import in_backward
from fewkeys.core.distances import DistanceBias
from fewkeys.core.extent import needs_rescaling
from fewkeys.core.impl import COMPILED, Impl, check_impl
from fewkeys.core.inputs import Inputs
from fewkeys.core.precision import lowered, working_dtype

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def check_count(name: str, value: object, *, least: int = 1) -> int:
    """`value` as an integer; no `bool`, no float."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}: expected an integer, got {type(value).__name__} {value!r}")
    if value < least:
        raise ValueError(f"{name}: expected at least {least}, got {value}")
    return value


def check_flag(name: str, value: object) -> bool:
    """`value` as a bool; a text such as "False" would count as true."""
    if not isinstance(value, bool):
        raise TypeError(f"{name}: expected True or False, got {type(value).__name__} {value!r}")
    return value


def check_generator(generator: object) -> None:
    """Refuse what is neither a generator nor None."""
    if generator is not None and not isinstance(generator, torch.Generator):
        raise TypeError(f"generator: expected a torch.Generator or None, got {type(generator).__name__}")


def check_drawn_once(generator: torch.Generator | None) -> None:
    """Refuse a generator of the caller where a checkpoint would repeat a draw with other numbers."""
    if generator is not None and in_backward():
        raise ValueError(
            "generator: expected None under gradient checkpointing, which computes layers again, got one, which would "
            "then draw other numbers"
        )


def check_cohorts(name: str, count: int) -> int:
    """`count` as a power of two."""
    check_count(f"{name} cohorts", count)
    if count & (count - 1):
        raise ValueError(f"{name} cohorts: expected a power of two, got {count}; queries are split into halves")
    return count


def check_real(name: str, value: object, *, above: float = -math.inf, below: float = math.inf) -> float:
    """`value` as a finite float strictly between `above` and `below`."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name}: expected a number, got {type(value).__name__} {value!r}")
    if not (math.isfinite(value) and above < value < below):
        raise ValueError(f"{name}: expected a finite number in ({above}, {below}), got {value}")
    return float(value)


def check_tensor(name: str, tensor: object) -> Tensor:
    """`tensor` as a floating tensor of four dimensions, none of them empty."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, got {type(tensor).__name__}")
    if tensor.ndim != 4:
        raise ValueError(
            f"{name}: expected shape (batch, heads, tokens, dim), got {tuple(tensor.shape)}; "
            "add the missing dimensions with unsqueeze"
        )
    if tensor.dtype not in FLOATS:
        raise TypeError(f"{name}: expected float64, float32, bfloat16 or float16, got {tensor.dtype}; cast it first")
    check_no_graph(name, tensor)
    is_batched = torch._C._functorch.is_batchedtensor(tensor)
    if is_batched or tensor.is_meta or tensor.layout != torch.strided:
        got = "inside torch.vmap" if is_batched else f"of layout {tensor.layout} on {tensor.device}"
        raise ValueError(f"{name}: expected a tensor whose numbers can be read, got one {got}")
    if 0 in tensor.shape:
        raise ValueError(f"{name}: expected no empty dimension, got shape {tuple(tensor.shape)}")
    return tensor.resolve_neg()  # kernels would read the memory of a view with lazily negated signs


def check_no_graph(name: str, tensor: Tensor) -> None:
    """Refuse a tensor that stands in a graph for others, which keep other keys."""
    if torch._C._is_tracing() or isinstance(tensor, FakeTensor):
        raise ValueError(
            f"{name}: expected a tensor whose numbers choose the keys, got one that torch.jit.trace, torch.export or a "
            "FakeTensorMode records; compile by torch.compile, or record exact attention"
        )


Rows = tuple[Tensor, Tensor, Tensor]
"""Queries, keys and values."""


def largest_entries(*tensors: Tensor) -> list[float]:
    """The largest magnitude of each tensor; NaN or infinity if an entry is."""
    rows = [tensor.detach() if tensor.numel() else tensor.new_zeros(1) for tensor in tensors]
    ends = torch.stack([end for tensor in rows for end in tensor.aminmax()])
    largest: list[float] = ends.abs().view(-1, 2).amax(1).tolist()  # together: a GPU is waited for once
    return largest


def as_they_are(query: Tensor, key: Tensor, value: Tensor) -> tuple[list[float], Rows]:
    """`largest_entries` of the rows, and the rows, of which other functions of this kind may return copies."""
    return largest_entries(query, key, value), (query, key, value)


def check_finite(**tensors: Tensor) -> None:
    """Refuse NaN and infinity."""
    for name, tensor in tensors.items():
        # A finite sum proves that all numbers are finite; that of finite numbers may overflow.
        if not math.isfinite(tensor.detach().sum().item()) and (bad := int((~torch.isfinite(tensor)).sum())):
            raise ValueError(f"{name}: expected finite numbers, got {bad} NaN or infinite entries; repair or mask them")


class Options(TypedDict, total=False):
    """The options of an attention call, as `fewkeys.attention` documents them."""

    is_causal: bool
    scale: float | None
    lengths: Tensor | None
    key_mask: Tensor | None
    query_offset: int
    generator: torch.Generator | None
    impl: Impl
    distance_bias: Tensor | None


def unknown_option(name: str) -> TypeError:
    """The error for an argument such as torch's `attn_mask`, or one that goes to `fewkeys.attention` alone."""
    if name in ("keep", "rest", "weights", "max_error"):
        return TypeError(f"{name}: expected a call of attention(), which alone has it; other calls take a plan")
    fix = "use key_mask (bool, True for real keys) for padding and is_causal=True for causal attention"
    return TypeError(f"{name}: attention() has no such argument" + (f"; {fix}" if "mask" in name else ""))


def check_inputs(
    query: object,
    key: object,
    value: object,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    lengths: Tensor | None = None,
    key_mask: Tensor | None = None,
    query_offset: int = 0,
    generator: torch.Generator | None = None,
    impl: Impl = "auto",
    distance_bias: Tensor | None = None,
    look: Callable[[Tensor, Tensor, Tensor], tuple[list[float], Rows]] = as_they_are,
    clear: bool = True,
) -> Inputs:
    """The canonical `Inputs`.

    look: replaces `as_they_are` if `impl` lets compiled kernels run. clear: set keys and values of padding to zero now.
    """
    q, k, v = (lowered(check_tensor(name, x)) for name, x in (("query", query), ("key", key), ("value", value)))
    for name, tensor in (("key", k), ("value", v)):
        if tensor.dtype != q.dtype or tensor.device != q.device:
            raise ValueError(
                f"{name}: expected {q.dtype} on {q.device} like query, got {tensor.dtype} on {tensor.device}; "
                f"use {name}.to(query)"
            )
        if tensor.shape[0] != q.shape[0]:
            raise ValueError(f"{name}: expected batch {q.shape[0]} like query, got {tensor.shape[0]}")
    if k.shape[-1] != q.shape[-1]:
        raise ValueError(f"key: expected head dimension {q.shape[-1]} like query, got {k.shape[-1]}")
    if v.shape[1:3] != k.shape[1:3]:
        raise ValueError(f"value: expected {tuple(k.shape[1:3])} (heads, tokens) like key, got {tuple(v.shape[1:3])}")
    if q.shape[1] % k.shape[1]:
        raise ValueError(
            f"query: expected a number of heads that is a multiple of key's {k.shape[1]}, got {q.shape[1]}"
        )
    check_flag("is_causal", is_causal)
    check_count("query_offset", query_offset, least=0)
    check_generator(generator)
    check_impl(impl)
    factor = q.shape[-1] ** -0.5 if scale is None else check_real("scale", scale)
    valid = check_valid(lengths, key_mask, k)
    look, shape = look if impl in COMPILED else as_they_are, (factor, q.shape[-1], working_dtype(q.dtype))
    sizes, (q, k, v) = look(q, k, v)
    is_large, cleared = needs_rescaling(sizes, *shape), valid is None
    if is_large and valid is not None:
        # The large entries may be in padding, which must not decide. Infinity times zero is NaN, hence masked_fill.
        k, v = (rows.masked_fill(~valid[:, None, :, None], 0.0) for rows in (k, v))
        sizes, (q, k, v) = look(q, k, v)
        is_large, cleared = needs_rescaling(sizes, *shape), True
    if not all(map(math.isfinite, sizes)):
        check_finite(query=q, key=k, value=v)
    bias, at = _check_bias(distance_bias, q), (q, k, v, factor, is_causal, query_offset, valid, generator)
    inputs = Inputs(*at, impl=impl, needs_rescaling=is_large, bias=bias, cleared=cleared)
    return inputs.clear() if clear else inputs


def _check_bias(table: object, query: Tensor) -> DistanceBias | None:
    if table is None:
        return None
    heads, shape = query.shape[1], table.shape if isinstance(table, Tensor) and table.is_floating_point() else ()
    if not isinstance(table, Tensor) or len(shape) != 2 or shape[0] != heads or shape[1] % 2 == 0:
        raise ValueError(f"distance_bias: expected a floating tensor ({heads}, 2 R + 1), got {describe(table)}")
    if not bool(table.isfinite().all()):
        raise ValueError("distance_bias: expected finite numbers, got some that are not; hide keys by key_mask")
    return DistanceBias(table.to(device=query.device, dtype=working_dtype(query.dtype)))


def check_valid(lengths: object, key_mask: object, key: Tensor) -> Tensor | None:
    """(B, Nk): which keys are real; None: all are."""
    batch, keys = key.shape[0], key.shape[2]
    if lengths is not None and key_mask is not None:
        raise ValueError("lengths, key_mask: expected at most one of the two; key_mask can say what lengths says")
    if key_mask is not None:
        if not isinstance(key_mask, Tensor) or key_mask.dtype != torch.bool or key_mask.shape != (batch, keys):
            raise ValueError(f"key_mask: expected a bool tensor of shape {(batch, keys)}, got {describe(key_mask)}")
        return None if bool(key_mask.all()) else key_mask.to(key.device)
    if lengths is None:
        return None
    with suppress(TypeError, ValueError, RuntimeError):
        lengths = torch.as_tensor(lengths, device=key.device)
    is_whole = isinstance(lengths, Tensor) and not lengths.is_floating_point() and lengths.dtype != torch.bool
    if not isinstance(lengths, Tensor) or not is_whole or lengths.shape != (batch,):
        raise ValueError(f"lengths: expected {batch} integers, one per sequence, got {describe(lengths)}")
    least, most = map(int, lengths.aminmax())
    if least < 0 or most > keys:
        raise ValueError(f"lengths: expected values from 0 to {keys} (the number of keys), got {lengths.tolist()}")
    if least == keys:
        return None
    return torch.arange(keys, device=key.device) < lengths[:, None]


def describe(value: object) -> str:
    """The dtype and shape of a tensor, or the type of anything else."""
    return f"{value.dtype} of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
