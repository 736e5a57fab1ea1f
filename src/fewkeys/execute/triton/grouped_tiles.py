"""Tables of tiles: which tokens of which group a program takes, and which of the other side it walks.

No table needs to be read by the host: there are as many tiles as the worst groups could need, and some stay empty.
"""

from __future__ import annotations

import torch
from torch import Tensor


class Order:
    """The tokens of H heads by group, and by place within a group; tokens of no group last, as group `count`.

    `group` (H, N), -1 for none; `order` (H, N). Codes `group x N + token` are ascending in this order.
    """

    def __init__(self, group: Tensor, order: Tensor, count: int) -> None:
        self.count, self.tokens = count, group.shape[1]
        order = order.long()
        self.code = group.long().masked_fill(group < 0, count).gather(1, order) * self.tokens + order

    def before(self, group: Tensor, token: Tensor | int) -> Tensor:
        """How many tokens (H, T) stand before token `token`, 0 .. N, of group `group` (H, T)."""
        return torch.searchsorted(self.code, group * self.tokens + token)

    def token(self, at: Tensor) -> Tensor:
        """The tokens at places of the order, (H, T); the nearest where there is no such place."""
        return self.code.gather(1, at.clamp(0, self.tokens - 1)) % self.tokens

    def tiles(self, block: int) -> tuple[Tensor, Tensor, Tensor]:
        """Group, first token in the order and the one after the last, (H, T) each, of tiles of at most `block` tokens.

        Every token is in one tile. Empty tiles come last: they begin where they end, or later.
        """
        heads, device = self.code.shape[0], self.code.device
        group = torch.arange(self.count + 2, device=device).expand(heads, -1)
        start = self.before(group, 0)
        pieces = (start.diff() + block - 1) // block
        ends = pieces.cumsum(1)
        tile = torch.arange(self.tokens // block + min(self.count + 1, self.tokens), device=device)
        tile = tile.repeat(heads, 1)
        group = torch.searchsorted(ends, tile, right=True).clamp_max_(self.count)
        first = start.gather(1, group) + (tile - (ends - pieces).gather(1, group)) * block
        return group, first, torch.minimum(first + block, start.gather(1, group + 1))


def query_tiles(queries: Order, keys: Order, block: int, offset: int, is_causal: bool) -> Tensor:
    """(H, T, 5), int32: group, first and end of the queries, first and end of the keys that one of them may see."""
    group, first, last = queries.tiles(block)
    limit: Tensor | int = keys.tokens
    if is_causal:
        limit = (queries.token(last - 1) + offset + 1).clamp_max(keys.tokens)
    return _table(group, first, last, keys.before(group, 0), keys.before(group, limit), queries.count)


def key_tiles(queries: Order, keys: Order, block: int, offset: int, is_causal: bool) -> Tensor:
    """(H, T, 5), int32: group, first and end of the keys, first and end of the queries that may see one of them."""
    group, first, last = keys.tiles(block)
    least: Tensor | int = 0
    if is_causal:
        least = (keys.token(first) - offset).clamp(0, queries.tokens)
    return _table(group, first, last, queries.before(group, least), queries.before(group, queries.tokens), keys.count)


def _table(group: Tensor, first: Tensor, last: Tensor, begin: Tensor, end: Tensor, count: int) -> Tensor:
    """Tokens of no group meet nobody."""
    end = torch.where(group < count, end, begin)
    return torch.stack([group, first, last, begin, end], -1).to(torch.int32)
