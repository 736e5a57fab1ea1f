"""`heavy_entries`: `A_ij = |<q_i, k_j>|^p / Z_i >= eps` with `Z_i = sum_l |<q_i, k_l>|^p`.

For even p normalisers come from a small matrix (gram.py), and only keys whose sensitivity bound reaches eps are
compared. Where rounding may have changed a normaliser by more than `TRUST`, or by enough to decide whether an entry
reaches eps, the query is answered directly, from its scores with all keys in float64.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from fewkeys.core.inputs import Inputs
from fewkeys.core.precision import full_precision, working_dtype
from fewkeys.core.validation import check_inputs, check_real
from fewkeys.papers.levattention.gram import candidates, exact_form
from fewkeys.papers.levattention.keys import BLOCK, ScaledKeys
from fewkeys.papers.levattention.tensor_power import MAX_WIDTH, even_degree, width
from fewkeys.sketch.gram import power_of_two

Entries = tuple[Tensor, Tensor, Tensor]
"""Rows, columns and values of some entries of one head."""
SCORES = 1 << 19
"""Scores in memory at once, which fit a core's cache."""
HIGHEST = 1000
"""The largest power under which 1/2 stays a normal number of float64."""


@dataclass(frozen=True, eq=False)
class HeavyEntries:
    """The entries >= eps of attention: `indices` (4, M), int64, as (batch, query head, query, key), sorted, each once;
    `values` (M,). `shape` is (B, Hq, Nq, Nk).
    """

    indices: Tensor
    values: Tensor
    shape: tuple[int, int, int, int]

    def __len__(self) -> int:
        return self.values.numel()

    def to_coo(self) -> Tensor:
        """The entries as a coalesced sparse tensor (B, Hq, Nq, Nk)."""
        return torch.sparse_coo_tensor(self.indices, self.values, self.shape, check_invariants=True, is_coalesced=True)


@full_precision()
@torch.no_grad()
def heavy_entries(
    query: Tensor,
    key: Tensor,
    eps: float,
    power: float = 2.0,
    *,
    lengths: Tensor | None = None,
) -> HeavyEntries:
    """All `(i, j)` with `|<q_i, k_j>|^p / sum_l |<q_i, k_l>|^p >= eps`, and these values, as evaluated in float64.

    At most `1 / eps` per query; none where all scores are zero up to the rounding of a dot product in float64. A scale
    of the scores would cancel.

    Args:
        query: (B, Hq, Nq, D), any floating dtype.
        key: (B, Hkv, Nk, D); query head h reads key head `h // (Hq / Hkv)`.
        eps: the smallest entry wanted, in (0, 1).
        power: p > 0.
        lengths: (B,) real keys per sequence. All queries are answered.

    Returns:
        `HeavyEntries`, values in float64 for float64 input and float32 otherwise. No gradient.

        Cost for even p <= 60 with m <= 2500 monomials: `O(n m^2 + n_q (m^2 + |U| d))` per head, with
        `|U| <= d^(p/2) / (0.9 eps)` candidates; O(n d) for each query that is answered directly. Other p, and too few
        queries for a Gram matrix: `O(n n_q d)`. Memory: blocks of fixed size and the answer; for p > 2 also O(n d) for
        one head in float64.

    Raises:
        TypeError, ValueError: malformed tensors, `eps` outside (0, 1), `power` not positive.

    Source: LevAttention (arXiv 2410.05462), section 2 and the authors' discussion; the control of rounding is ours.
    """
    check_real("eps", eps, above=0.0, below=1.0)
    power = check_real("power", power, above=0.0)
    x = check_inputs(query, key, key, lengths=lengths)
    return by_head(x, power, lambda rows, keys: _entries(rows, keys, eps, power))


def by_head(x: Inputs, power: float, entries_of: Callable[[Tensor, ScaledKeys], Iterator[Entries]]) -> HeavyEntries:
    """The entries of all heads, given those of the queries (M, D), float64, of one key head."""
    grouped = x.grouped_query()
    places, values = [x.query.new_zeros(0, dtype=torch.int64)], [x.query.new_zeros(0, dtype=torch.float64)]
    for batch in range(x.batch):
        real = x.keys if x.valid is None else int(x.valid[batch].sum())
        for head in range(x.kv_heads if real else 0):
            keys = ScaledKeys(x.key[batch, head, :real], power)
            rows = keys.queries(grouped[batch, head].flatten(0, 1))
            first = (batch * x.kv_heads + head) * len(rows)
            for row, column, value in entries_of(rows, keys):
                places.append((first + row) * x.keys + column)
                values.append(value)
    shape = (x.batch, x.query_heads, x.queries, x.keys)
    place, order = torch.cat(places).sort()
    value = torch.cat(values)[order].to(working_dtype(x.query.dtype))
    return HeavyEntries(torch.stack(torch.unravel_index(place, shape)), value, shape)


def _entries(query: Tensor, keys: ScaledKeys, eps: float, power: float) -> Iterator[Entries]:
    """The entries of queries (M, D), float64, in no order; all directly, where this costs less."""
    degree, size = even_degree(power), keys.dim
    columns = width(size, degree) if degree else 0
    if not 0 < columns <= MAX_WIDTH or 2 * len(query) * size <= columns**2 + size**2:
        yield from directly(query, keys, eps, power)
        return
    form = exact_form(keys, degree)
    chosen = candidates(keys, form, eps, power)
    key_rows, start, direct = keys.rows(chosen), 0, (query != 0).any(-1)
    for part in query.split(max(1, SCORES // max(form.size.numel(), chosen.numel()))):
        norm, doubt, trusted = form.trusted(part, eps, power)
        weight = raised(part @ key_rows.mT, power)
        least = torch.where(trusted, eps * (1 - 4 * doubt) * norm, torch.inf)
        row, column = (weight >= least.unsqueeze(-1)).nonzero(as_tuple=True)
        value = weight[row, column] / norm[row]
        trusted[row[(value / eps - 1).abs() <= 4 * doubt[row]]] = False
        direct[start : start + len(part)] &= ~trusted
        kept = trusted[row] & (value >= eps)
        yield row[kept] + start, chosen[column[kept]], value[kept]
        start += len(part)
    yield from directly_of(query, direct, keys, eps, power)


def directly_of(query: Tensor, marked: Tensor, keys: ScaledKeys, eps: float, power: float) -> Iterator[Entries]:
    """The entries of the `marked` (M,) queries."""
    rows = marked.nonzero().squeeze(-1)
    if len(rows):
        for row, column, value in directly(query[rows], keys, eps, power):
            yield rows[row], column, value


def directly(query: Tensor, keys: ScaledKeys, eps: float, power: float) -> Iterator[Entries]:
    """The entries of queries (M, D), float64, from every score twice: for the normaliser, then to compare."""
    start = 0
    for part in query.split(SCORES // BLOCK):
        top = total = part.new_zeros(len(part))
        for block in keys.blocks(BLOCK):
            scores = (part @ block.mT).abs()
            # Scores are divided by a power of two near the largest so far, above `HIGHEST` by the largest: high powers
            # must not underflow.
            largest = scores.amax(-1)
            higher = torch.maximum(top, power_of_two(largest) * (largest > 0) if power <= HIGHEST else largest)
            total = total * (top / higher).nan_to_num() ** power
            top = higher
            total = total + raised(scores / torch.where(top > 0, top, 1.0).unsqueeze(-1), power).sum(-1)
        # Scores below the rounding of their dot product are zero: the query is orthogonal to all keys.
        real = top > part.shape[-1] * torch.finfo(torch.float64).eps * (part.abs() @ keys.largest)
        total, top = torch.where(real, total, torch.inf), torch.where(real, top, 1.0)
        for number, block in enumerate(keys.blocks(BLOCK)):
            value = raised((part @ block.mT) / top.unsqueeze(-1), power) / total.unsqueeze(-1)
            row, column = (value >= eps).nonzero(as_tuple=True)
            yield row + start, column + number * BLOCK, value[row, column]
        start += len(part)


def raised(scores: Tensor, power: float) -> Tensor:
    """`|s|^p`, in place. Squares are cheaper than powers, and more accurate."""
    if power % 2:
        return scores.abs_().pow_(power)
    return scores.square_() if power == 2 else scores.square_().pow_(power / 2)
