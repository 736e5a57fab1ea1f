"""Which tensors compiled kernels can read, and the arguments of kernels."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from fewkeys.core.derivatives import in_backward
from fewkeys.native.build import missing

DTYPES = (torch.float32, torch.bfloat16)


def suits(*tensors: Tensor | None) -> bool:
    """Whether kernels can read these tensors, and no gradients are needed."""
    return readable(*tensors) and not wants_gradient(*tensors)


def readable(*tensors: Tensor | None) -> bool:
    """Whether kernels can read these tensors, inside an `autograd.Function` if gradients are needed."""
    present = [tensor for tensor in tensors if tensor is not None]
    return placed(*present) and missing() is None


def placed(*tensors: Tensor) -> bool:
    """Whether kernels, if there are any, could read these tensors."""
    for x in tensors:
        if type(x) not in (Tensor, torch.nn.Parameter) or x.device.type != "cpu" or x.layout != torch.strided:
            return False
        if x.is_floating_point() and x.dtype not in DTYPES:
            return False
    # Transforms and forward derivatives see only torch's operations, not kernels.
    return not torch._C._are_functorch_transforms_active() and forward_ad._current_level < 0


def wants_gradient(*tensors: Tensor | None) -> bool:
    """Whether gradients may be needed."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def is_trained(*tensors: Tensor) -> bool:
    """Whether gradients may be needed, so that the choice of a call counts the time of the backward pass.

    `torch.utils.checkpoint(use_reentrant=True)` runs a call without gradients, and again with them in the backward
    pass. The second run must choose like the first. Other checkpoints run both times with gradients, and the second
    time under hooks.
    """
    if not wants_gradient(*tensors):
        return False
    return not in_backward() or torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


class Rows(ctypes.Structure):
    """A tensor (B, H, N, ...) in any layout whose last dimensions are dense: its address, strides and heads."""

    _fields_ = (("data", ctypes.c_void_p), *((name, ctypes.c_int64) for name in ("batch", "head", "row", "heads")))

    @staticmethod
    def of(tensor: Tensor) -> Rows:
        return Rows(tensor.data_ptr(), *tensor.stride()[:3], tensor.shape[1])


class KernelArgs(ctypes.Structure):
    """Arguments of a kernel: a struct of `problems.h`. Fields that are left out or None are zero.

    Tensors have the dtype that the struct declares, and live as long as the arguments. `Rows` may lie in any layout
    whose last dimension is dense; other tensors are made contiguous if the kernel reads them, and must be contiguous if
    it writes them, since it would write to a copy.
    """

    kinds: dict[str, str]
    written: set[str]

    def __init__(self, **values: Any) -> None:
        if odd := values.keys() - self.kinds.keys():
            raise TypeError(f"{type(self).__name__}: expected fields of the struct, got {', '.join(sorted(odd))}")
        super().__init__()
        self.alive = []
        for name, x in values.items():
            if isinstance(x, Tensor):
                tensor = dense(x) if self.kinds[name] == "Rows" else self._readable(name, x)
                self.alive.append(tensor)
                setattr(self, name, Rows.of(tensor) if self.kinds[name] == "Rows" else tensor.data_ptr())
            elif x is not None:
                setattr(self, name, x)
                self.alive.append(x)

    def _readable(self, name: str, tensor: Tensor) -> Tensor:
        # Read as another dtype, it would give numbers that look like any others.
        expected = _POINTED.get(self.kinds[name])
        if expected is not None and tensor.dtype not in expected:
            raise TypeError(f"{type(self).__name__}.{name}: expected {expected[0]}, got {tensor.dtype}")
        if tensor.is_contiguous():
            return tensor
        if name in self.written:
            raise ValueError(f"{type(self).__name__}.{name}: expected a contiguous tensor to write to")
        return tensor.contiguous()


_KINDS = {"int64_t": ctypes.c_int64, "float": ctypes.c_float, "Rows": Rows}
_POINTED = {
    "float": (torch.float32,),
    "double": (torch.float64,),
    "int64_t": (torch.int64,),
    "int32_t": (torch.int32,),
    "int16_t": (torch.int16,),
    "uint8_t": (torch.uint8, torch.bool, torch.int8),
}
"""Dtypes of tensors, by the type of the pointer."""


def _declared() -> dict[str, type[KernelArgs]]:
    """The structs of `problems.h` by name. A struct stands below those that it holds."""
    text = re.sub("//.*", "", (Path(__file__).parent / "problems.h").read_text())
    structs: dict[str, type[KernelArgs]] = {}
    for name, body in re.findall(r"^struct (?!Rows )(\w+) \{(.*?)^\};", text, re.DOTALL | re.MULTILINE):
        fields: list[tuple[str, Any]] = []
        kinds, written = {}, set()
        for const, kind, declared in re.findall(r"(const )?(\w+) ([^;]+);", body):
            for field in declared.split(","):
                pointer, field_name = field.strip().startswith("*"), field.strip(" *\n")
                kinds[field_name] = kind
                if pointer and not const:
                    written.add(field_name)
                fields.append((field_name, ctypes.c_void_p if pointer else _KINDS.get(kind) or structs[kind]))
        structs[name] = type(name, (KernelArgs,), {"_fields_": fields, "kinds": kinds, "written": written})
    return structs


STRUCTS = _declared()
"""Read once: threads that read it at once would have classes of their own."""


def sized(key: Tensor, value: Tensor | None = None) -> dict[str, Any]:
    """Keys (B, H, N, D), values (B, H, N, Dv) and their sizes, by their names in the structs."""
    fields = {"key": key, "heads": key.shape[0] * key.shape[1], "keys": key.shape[2], "dim": key.shape[3]}
    return fields if value is None else {**fields, "value": value, "value_dim": value.shape[3]}


def dense(tensor: Tensor) -> Tensor:
    """The tensor in a layout that `Rows` can describe."""
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] == 1 else tensor.contiguous()
