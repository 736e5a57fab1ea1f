"""The output projections of a model: the linear map that reads each layer's attention output.

No convention says what models call it. So it is found as the model runs: it is the linear layer whose input is the
very memory that the attention call returned.
"""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class ProjectionFinder:
    """Finds the output projections of `model` while it runs inside this context.

    `attended(layer, output)` announces the output (B, Hq, N, Dv) of an attention call; `matrices` maps layers to
    weights (out, Hq Dv). A layer whose output goes through something else first, or through no plain linear layer, is
    not found.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        from transformers.pytorch_utils import Conv1D

        self.matrices: dict[int, Tensor] = {}
        self._turned = Conv1D
        self._linear = [module for module in model.modules() if isinstance(module, nn.Linear | Conv1D)]
        self._hooks: list[Any] = []
        self._last: tuple[int, Tensor] | None = None

    def attended(self, layer: int, output: Tensor) -> None:
        """`output` is the answer of layer `layer`; it is held until the next call, so that its memory is not reused."""
        self._last = None if layer in self.matrices else (layer, output)

    def __enter__(self) -> Self:
        self._hooks = [module.register_forward_pre_hook(self._look) for module in self._linear]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._last = None
        for hook in self._hooks:
            hook.remove()

    def _look(self, module: nn.Module, arguments: tuple[Any, ...]) -> None:
        if self._last is None or not arguments or not isinstance(arguments[0], Tensor):
            return
        layer, output = self._last
        projected, weight = arguments[0], module.weight
        same_memory = projected.data_ptr() == output.data_ptr() and projected.numel() == output.numel()
        if not same_memory or not isinstance(weight, Tensor):
            return
        matrix = weight.detach().mT if isinstance(module, self._turned) else weight.detach()
        if matrix.ndim == 2 and matrix.shape[1] == output.shape[1] * output.shape[3]:
            self.matrices[layer] = matrix
