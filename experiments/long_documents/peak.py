"""The peak memory of the tensors that live while code runs: the same on every machine and device."""

import weakref
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class PeakMemory(TorchDispatchMode):
    """Counts the bytes of the live storages that operations inside this context have made; `peak` is the most so far.

    What a kernel uses and frees within one operation does not count. Code runs slower inside.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = self._now = 0
        self._live: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        result = func(*args, **(kwargs or {}))
        for storage in (x.untyped_storage() for x in tree_leaves(result) if isinstance(x, Tensor)):
            key, size = storage._cdata, storage.nbytes()
            if not (key in self._live or key in before):
                self._live.add(key)
                self._now += size
                self.peak = max(self.peak, self._now)
                weakref.finalize(storage, self._forget, key, size)
        return result

    def _forget(self, key: int, size: int) -> None:
        self._live.discard(key)
        self._now -= size
