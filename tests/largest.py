"""What a computation by operations of torch takes: its largest tensor, what it multiplies, the elements it touches."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

PICKING = ("gather", "index", "index_select", "take", "embedding", "select_scatter")
"""Operations that read as much as they return, whatever the size of their input."""
PLACING = ("scatter", "scatter_", "scatter_add", "scatter_add_", "scatter_reduce", "scatter_reduce_")
PLACING += ("index_put", "index_put_", "_index_put_impl_", "index_add", "index_add_", "index_copy", "index_copy_")
"""Operations that write as much as they get, whatever the size of their output."""


def tensors(tree):
    """The tensors in nested arguments."""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, list | tuple):
        for part in tree:
            yield from tensors(part)
    elif isinstance(tree, dict):
        yield from tensors(list(tree.values()))


class Largest(TorchDispatchMode):
    """Remembers the largest tensor that any operation returns; counts operations, and the elements that all touch.

    An operation touches the larger of what it reads and what it returns, copies of views included: sorting, comparing
    and adding up n x n numbers are seen even where the n x n numbers are a view of few. Making a view is free.
    """

    def __init__(self):
        super().__init__()
        self.numel = self.touched = self.operations = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        for x in tensors(result):
            # Views that repeat memory (expand, overlapping windows) are judged by the memory behind them.
            self.numel = max(self.numel, x.untyped_storage().nbytes() // x.element_size())
        packet = func.overloadpacket
        if not func.is_view:
            self.touched += self.work(packet.__name__, args, kwargs, result)
        if packet in flop_registry:
            self.operations += flop_registry[packet](*args, **kwargs, out_val=result)
        return result

    @staticmethod
    def work(name, args, kwargs, result):
        sizes = [x.numel() for x in tensors([args, kwargs])]
        returned = [x.numel() for x in tensors(result)]
        if name in PICKING:
            return sum(returned)
        if name in PLACING:
            return max(sizes[1:], default=0)  # all but what is written into
        return max([*sizes, *returned], default=0)
