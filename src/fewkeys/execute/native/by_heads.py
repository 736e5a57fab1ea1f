"""Plans of cohorts for a few heads at a time, whose rows the processor's cache holds.

The kernels of such a plan read the rows of a head many times. From main memory this takes up to twice as long.
"""

from collections.abc import Iterator
from dataclasses import replace

from torch import Tensor

from fewkeys.core.impl import COMPILED
from fewkeys.core.inputs import Inputs
from fewkeys.execute.native import recorded
from fewkeys.native import kernels, tensors
from fewkeys.plan import Plan

CACHE = 2**24
"""The most bytes of queries, keys, values and outputs of a part, unless one head has more."""
FEW = 2**26
"""Up to so many bytes, all heads are one part: more parts start the threads more often, which takes as long as they
save, and longer beside other programs.
"""


def attend(inputs: Inputs, plan: Plan) -> Tensor:
    """The output (B, Hq, Nq, Dv) of a plan."""
    x, rows = inputs, (inputs.query, inputs.key, inputs.value)
    # Random numbers are drawn for all heads together, and gradients of parts would each fill a tensor of all heads.
    together = plan.keep is None or plan.keep.cohort_lists == 1 or x.generator is not None
    if together or x.impl not in COMPILED or are_few(*rows) or not tensors.suits(*rows):
        return recorded.attend(x, plan)
    output = x.value.new_empty((*x.query.shape[:3], x.value_dim))
    by_key_head = output.unflatten(1, (x.kv_heads, x.gqa_ratio))
    for batch, heads in _parts(*rows):
        out = by_key_head[batch, heads].flatten(1, 2)
        part = x.heads(heads, batch)
        _, (query, key, value) = kernels.largest_and_rows(part.query, part.key, part.value, by_head=True)
        part = replace(part, query=query, key=key, value=value)
        out.copy_(recorded.attend(part, plan, out))
        del part, query, key, value  # the next part takes their memory
    return output


def are_few(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether all heads of queries (B, Hq, Nq, D), keys and values are one part."""
    return len(list(_parts(query, key, value))) == 1


def _parts(query: Tensor, key: Tensor, value: Tensor) -> Iterator[tuple[slice, slice]]:
    """The sequences and key heads of each part: whole sequences, or some heads of one."""
    (batch, heads), dims = key.shape[:2], key.shape[3] + value.shape[3]
    of_one_head = (query.shape[1] // heads * query.shape[2] + key.shape[2]) * dims * key.element_size()
    most = max(1, CACHE // of_one_head) if batch * heads * of_one_head > FEW else batch * heads
    step, sequences = _even(heads, most), _even(batch, max(1, most // heads))
    for first in range(0, batch, sequences):
        for head in range(0, heads, step):
            yield slice(first, first + sequences), slice(head, head + step)


def _even(count: int, most: int) -> int:
    """The size of the fewest equal parts of `count` that have at most `most`."""
    return -(-count // -(-count // most))
