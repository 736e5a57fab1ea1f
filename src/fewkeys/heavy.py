"""All entries `A_ij >= eps` of attention with weights `|s|^p`, without the n x n matrix.

`A_ij = |<q_i, k_j>|^p / Z_i` with `Z_i = sum_l |<q_i, k_l>|^p`. A common factor of the scores cancels, so there is no
scale. For even p, `Z_i = phi(q_i)^T G phi(q_i)` with `G = sum_l phi(k_l) phi(k_l)^T` over the m monomials of degree
p/2 (m = D for p = 2), and only keys whose sensitivity bound reaches eps can hold an entry (sketch/lewis.py).

**Exactness.** The arithmetic is float64. `Z_i` from G has a relative error of at most
`gamma (sum_a |phi_a(q_i)| g_a)^2 / Z_i`, `g_a = sqrt(G_aa)`, where gamma u^-1 counts the additions, because
`sum_l |phi_a(k_l) phi_b(k_l)| <= g_a g_b`. A query for which this error is not small (it points where there are
hardly any keys) or could decide whether an entry reaches eps (a tie) is answered directly, from its scores with all
keys. So every answer is the one of the defining formula in float64, and G only saves time.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from fewkeys.inputs import Inputs
from fewkeys.sketch.gram import BLOCK, gram, power_of_two
from fewkeys.sketch.lewis import sensitivity_bounds
from fewkeys.sketch.tensor_power import MAX_WIDTH, even_degree, tensor_features, width
from fewkeys.validation import check_inputs, check_real

CHUNK = 1 << 22
"""Scores, or features, held at once."""
TRUST = 1e-8
"""Normalisers whose relative error may exceed this are summed directly."""
MARGIN = 0.9
"""Keys are candidates from `MARGIN * eps` on. The bounds may miss, by rounding, only what directions below 1e-7 of the
strongest add to a score, and trusted queries have next to nothing there."""


@dataclass(frozen=True, eq=False)
class HeavyEntries:
    """The entries >= eps of attention: `indices` (4, M), int64, as (batch, query head, query, key); `values` (M,).

    Sorted by batch, head, query, key, each once. `shape` is (B, Hq, Nq, Nk).
    """

    indices: Tensor
    values: Tensor
    shape: tuple[int, int, int, int]

    def __len__(self) -> int:
        return self.values.numel()

    def to_coo(self) -> Tensor:
        """The entries as a coalesced sparse tensor (B, Hq, Nq, Nk)."""
        return torch.sparse_coo_tensor(self.indices, self.values, self.shape, check_invariants=True, is_coalesced=True)

    def to_csr(self, batch: int, head: int) -> Tensor:
        """The entries of one query head as a sparse CSR matrix (Nq, Nk).

        Raises `ValueError` for a batch entry or a head that is not there.
        """
        for name, value, size in (("batch", batch, self.shape[0]), ("head", head, self.shape[1])):
            if value not in range(size):
                raise ValueError(f"{name}: expected an integer from 0 to {size - 1}, got {value!r}")
        own = (self.indices[0] == batch) & (self.indices[1] == head)
        query, key = self.indices[2, own], self.indices[3, own]
        starts = torch.zeros(self.shape[2] + 1, dtype=torch.int64, device=query.device)
        starts[1:] = torch.bincount(query, minlength=self.shape[2]).cumsum(0)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta")
            return torch.sparse_csr_tensor(starts, key, self.values[own], self.shape[2:], check_invariants=True)


def heavy_entries(
    query: Tensor, key: Tensor, eps: float, power: float = 2.0, *, lengths: Tensor | None = None
) -> HeavyEntries:
    """All `(i, j)` with `|<q_i, k_j>|^p / sum_l |<q_i, k_l>|^p >= eps`, and these values.

    Exact up to the rounding of float64: indices and values are those of the formula evaluated in float64 on the given
    numbers (the module's header says why). There are at most `1 / eps` entries per query. A query whose scores are all
    zero, up to the rounding of a dot product in float64, has none.

    Args:
        query: (B, Hq, Nq, D), any floating dtype.
        key: (B, Hkv, Nk, D), Hq a multiple of Hkv; query head h reads key head `h // (Hq / Hkv)`.
        eps: the smallest entry wanted, in (0, 1).
        power: p > 0.
        lengths: (B,) real keys per sequence; the others take part in nothing. All queries are answered.

    Returns:
        `HeavyEntries`, values in float64 for float64 input and float32 otherwise. No gradient.

        Cost for even p with m <= 2500 monomials: `O(n m^2 + n_q (m^2 + |U| d))` per head, linear in n, with
        `|U| <= d^(p/2) / (0.9 eps)` candidates; queries that are ties or point where hardly any keys are cost O(n d)
        each. Other p, and fewer queries than pay for the Gram matrix: `O(n n_q d)`, every score, by blocks. Memory:
        O(n d) for one head in float64, blocks of fixed size, and the answer.

    Raises:
        TypeError, ValueError: malformed tensors, `eps` outside (0, 1), `power` not positive.

    Source: LevAttention (arXiv 2410.05462), section 2 and the authors' discussion; the control of rounding is ours.
    """
    check_real("eps", eps, above=0.0, below=1.0)
    power = check_real("power", power, above=0.0)
    inputs = check_inputs(query, key, key, lengths=lengths)
    with torch.no_grad():
        return _collect(inputs, eps, power)


def _collect(inputs: Inputs, eps: float, power: float) -> HeavyEntries:
    grouped = inputs.grouped_query()
    found, values = [], []
    for batch in range(inputs.batch):
        real = inputs.keys if inputs.valid is None else int(inputs.valid[batch].sum())
        for head in range(inputs.kv_heads if real else 0):
            rows = grouped[batch, head].flatten(0, 1).double()
            for row, column, value in _head(rows, inputs.key[batch, head, :real].double(), eps, power):
                line = (batch * inputs.kv_heads + head) * inputs.groups * inputs.queries + row
                found.append(line * inputs.keys + column)
                values.append(value)
    shape = (inputs.batch, inputs.query_heads, inputs.queries, inputs.keys)
    dtype = torch.float64 if inputs.query.dtype == torch.float64 else torch.float32
    flat = torch.cat([inputs.query.new_zeros(0, dtype=torch.int64), *found])
    flat, order = flat.sort()
    value = torch.cat([inputs.query.new_zeros(0, dtype=torch.float64), *values])[order].to(dtype)
    line, column = flat // inputs.keys, flat % inputs.keys
    place, row = line // inputs.queries, line % inputs.queries
    indices = torch.stack([place // inputs.query_heads, place % inputs.query_heads, row, column])
    return HeavyEntries(indices, value, shape)


Entries = tuple[Tensor, Tensor, Tensor]
"""Rows, columns and values of some entries."""


def _head(query: Tensor, key: Tensor, eps: float, power: float) -> Iterator[Entries]:
    """The entries of queries (M, D) and keys (N, D) of one head, in float64, in no order."""
    # Powers of two bring columns and queries to sizes near one: nothing is rounded, nothing overflows later.
    scale = power_of_two(key.abs().amax(0))
    key, query = key / scale, query / power_of_two(query.abs().amax(-1, keepdim=True))
    query = query * scale
    query = query / power_of_two(query.abs().amax(-1, keepdim=True))
    direct = torch.ones(query.shape[0], dtype=torch.bool, device=query.device)
    degree, size = even_degree(power), query.shape[-1]
    columns = width(size, degree) if degree else 0
    if 0 < columns <= MAX_WIDTH and 2 * query.shape[0] * size > columns**2 + size**2:
        yield from _by_gram(query, key, eps, power, direct)
    rows = direct.nonzero().squeeze(-1)
    for row, column, value in _directly(query[rows], key, eps, power):
        yield rows[row], column, value


def _by_gram(query: Tensor, key: Tensor, eps: float, power: float, direct: Tensor) -> Iterator[Entries]:
    """The entries of all queries that G answers for certain; `direct` (M,) is set to False at these."""
    degree, unit = even_degree(power), torch.finfo(torch.float64).eps
    columns = width(query.shape[-1], degree)
    block = min(BLOCK, max(1, CHUNK // columns))
    parts = key.split(block)
    matrix = sum((gram(tensor_features(part, degree)) for part in parts[1:]), gram(tensor_features(parts[0], degree)))
    gamma = (block + len(parts) + 4 * columns) * unit
    size = matrix.diagonal().sqrt()
    chosen = (sensitivity_bounds(key[None, None], power)[0, 0] >= MARGIN * eps).nonzero().squeeze(-1)
    candidates = key[chosen]
    start = 0
    for part in query.split(max(1, CHUNK // max(columns, chosen.numel()))):
        features = tensor_features(part, degree)
        norm = ((features @ matrix) * features).sum(-1)
        ratio = (features.abs() @ size).square() / norm
        # The second term is the rounding of the score itself, `D u sum_a |q_a k_ja|`, next to an entry of eps.
        doubt = gamma * ratio + 2 * power * query.shape[-1] * unit * (ratio / eps) ** (1 / power)
        sure = (norm > 0) & (doubt <= TRUST)
        value = (part @ candidates.mT).abs() ** power / torch.where(sure, norm, 1.0).unsqueeze(-1)
        near = ((value / eps - 1).abs() <= 4 * doubt.unsqueeze(-1)).any(-1)
        sure = sure & ~near
        direct[start : start + part.shape[0]] = ~sure
        row, column = ((value >= eps) & sure.unsqueeze(-1)).nonzero(as_tuple=True)
        yield row + start, chosen[column], value[row, column]
        start += part.shape[0]


def _directly(query: Tensor, key: Tensor, eps: float, power: float) -> Iterator[Entries]:
    """The entries by definition: every score twice, in blocks, once for the normaliser and once to compare."""
    parts, start = key.split(BLOCK), 0
    # A score below the rounding of its own dot product is zero: the query is orthogonal to all keys.
    noise = query.shape[-1] * torch.finfo(torch.float64).eps * (query.abs() @ key.abs().amax(0))
    for part, floor in zip(query.split(CHUNK // BLOCK), noise.split(CHUNK // BLOCK), strict=True):
        top = part.new_zeros(part.shape[0])
        total = part.new_zeros(part.shape[0])
        for keys in parts:
            scores = (part @ keys.mT).abs()
            # Scores are divided by a power of two near the largest so far, lest high powers vanish.
            higher = torch.maximum(top, power_of_two(scores.amax(-1)) * (scores.amax(-1) > 0))
            total = total * torch.where(top > 0, top / higher, 0.0).nan_to_num() ** power
            top = higher
            total = total + ((scores / torch.where(top > 0, top, 1.0).unsqueeze(-1)) ** power).sum(-1)
        real = top > floor
        total, top = torch.where(real, total, torch.inf), torch.where(real, top, 1.0)
        for number, keys in enumerate(parts):
            value = ((part @ keys.mT).abs() / top.unsqueeze(-1)) ** power / total.unsqueeze(-1)
            row, column = (value >= eps).nonzero(as_tuple=True)
            yield row + start, column + number * BLOCK, value[row, column]
        start += part.shape[0]
