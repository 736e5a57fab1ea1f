"""`heavy_entries`: `A_ij = |<q_i, k_j>|^p / Z_i >= eps` with `Z_i = sum_l |<q_i, k_l>|^p`.

For even p normalisers come from a small matrix (gram.py), and only keys whose sensitivity bound reaches eps are
compared. Where rounding may have changed a normaliser by more than `TRUST`, or by enough to decide whether an entry
reaches eps, the query is answered directly, from its scores with all keys in float64.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from fewkeys.core.precision import full_precision, working_dtype
from fewkeys.core.validation import check_inputs, check_real
from fewkeys.papers.levattention.gram import TRUST, candidates, exact_form
from fewkeys.papers.levattention.keys import BLOCK, ScaledKeys
from fewkeys.papers.levattention.sketched import Parts, Sketched, sketched_parts
from fewkeys.sketch.gram import power_of_two
from fewkeys.sketch.tensor_power import MAX_WIDTH, even_degree, width

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
    sketch: Sketched | None = None,
    generator: torch.Generator | None = None,
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
        sketch: parts to estimate, within the errors that `Sketched` states. None: exact.
        generator: the source of a sketch's randomness; default: seed 0 at every call.

    Returns:
        `HeavyEntries`, values in float64 for float64 input and float32 otherwise. No gradient.

        Cost for even p with m <= 2500 monomials: `O(n m^2 + n_q (m^2 + |U| d))` per head, with
        `|U| <= d^(p/2) / (0.9 eps)` candidates; O(n d) for each query that is answered directly. Other p, and too few
        queries for a Gram matrix: `O(n n_q d)`. Memory: blocks of fixed size and the answer; for p > 2 also O(n d) for
        one head in float64.

    Raises:
        TypeError, ValueError: malformed tensors, `eps` outside (0, 1), `power` not positive, `sketch` unfit for it.

    Source: LevAttention (arXiv 2410.05462), section 2 and the authors' discussion; the control of rounding is ours.
    """
    check_real("eps", eps, above=0.0, below=1.0)
    power = check_real("power", power, above=0.0)
    x = check_inputs(query, key, key, lengths=lengths, generator=generator)
    if sketch is not None:
        if not isinstance(sketch, Sketched):
            raise TypeError(f"sketch: expected a Sketched or None, got {type(sketch).__name__}")
        sketch.check(power, x.head_dim)
    generator = generator or torch.Generator("cpu").manual_seed(0)
    grouped = x.grouped_query()
    places, values = [x.query.new_zeros(0, dtype=torch.int64)], [x.query.new_zeros(0, dtype=torch.float64)]
    for batch in range(x.batch):
        real = x.keys if x.valid is None else int(x.valid[batch].sum())
        for head in range(x.kv_heads if real else 0):
            keys = ScaledKeys(x.key[batch, head, :real], power)
            rows = keys.queries(grouped[batch, head].flatten(0, 1))
            if sketch is None:
                parts = _exact_parts(len(rows), keys, eps, power)
            else:
                parts = sketched_parts(sketch, len(rows), x.batch * x.kv_heads, keys, eps, power, generator)
            first = (batch * x.kv_heads + head) * len(rows)
            for row, column, value in _entries(rows, keys, eps, power, parts):
                places.append((first + row) * x.keys + column)
                values.append(value)
    shape = (x.batch, x.query_heads, x.queries, x.keys)
    place, order = torch.cat(places).sort()
    value = torch.cat(values)[order].to(working_dtype(x.query.dtype))
    return HeavyEntries(torch.stack(torch.unravel_index(place, shape)), value, shape)


def _exact_parts(queries: int, keys: ScaledKeys, eps: float, power: float) -> Parts | None:
    """The parts by exact numerators; None where these would cost more than all scores."""
    degree, size = even_degree(power), keys.dim
    columns = width(size, degree) if degree else 0
    if not 0 < columns <= MAX_WIDTH or 2 * queries * size <= columns**2 + size**2:
        return None
    form = exact_form(keys, degree)
    return form, candidates(keys, form, eps, power), None


def _entries(query: Tensor, keys: ScaledKeys, eps: float, power: float, parts: Parts | None) -> Iterator[Entries]:
    """The entries of queries (M, D), float64, in no order: of trusted queries from `parts`, of the others directly, and
    where nothing is estimated also of those with a tie.
    """
    if parts is None:
        yield from directly(query, keys, eps, power)
        return
    form, chosen, numerators = parts
    unit, start = torch.finfo(torch.float64).eps, 0
    key_rows = keys.rows(chosen) if numerators is None else numerators.key
    direct = (query != 0).any(-1)
    for part in query.split(max(1, SCORES // max(form.size.numel(), chosen.numel()))):
        norm, ratio = form(part)
        # The second term is the rounding of the score, `D u sum_a |q_a k_ja|`, next to an entry of eps.
        doubt = form.gamma * ratio + 2 * power * keys.dim * unit * (ratio / eps) ** (1 / power)
        trusted = (norm > 0) & (doubt <= TRUST)
        query_rows = part if numerators is None else part @ numerators.query
        weight = raised(query_rows @ key_rows.mT, power)
        least = torch.where(trusted, eps * (1 - 4 * doubt) * norm, torch.inf)
        row, column = (weight >= least.unsqueeze(-1)).nonzero(as_tuple=True)
        value = weight[row, column] / norm[row]
        if form.exact and numerators is None:
            trusted[row[(value / eps - 1).abs() <= 4 * doubt[row]]] = False
        direct[start : start + len(part)] &= ~trusted
        kept = trusted[row] & (value >= eps)
        yield row[kept] + start, chosen[column[kept]], value[kept]
        start += len(part)
    rows = direct.nonzero().squeeze(-1)
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
            # Scores are divided by a power of two near the largest so far: high powers must not underflow. Under the
            # highest even 1/2 does: there by the largest itself.
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
