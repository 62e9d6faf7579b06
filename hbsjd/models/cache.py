"""Keys and values at [row, absolute position]: no padding, no realignment, no rollback, no zeroing.

A key is visible to a query iff its slot is not after the query's, so an entry that was written for a rejected draft is simply
overwritten before anything may attend to it. Of a caption's slots the padding is invisible as well.
"""
from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F


class Cache:
    """`keys` and `values`: [layer, row, slot, head, head_dim]; `condition`: [row, dim], what stands at position -1.

    `caption_mask` [row, cls_token_num]: which condition slots of a t2i model hold a token; None for class ids.
    """

    def __init__(self, config, rows: int, capacity: int, like: torch.Tensor):
        self.first = config.cls_token_num  # slot of position 0
        shape = (config.n_layer, rows, self.first + capacity, config.n_head, config.dim // config.n_head)
        self.keys, self.values = like.new_zeros(2, *shape)
        self.condition = like.new_zeros(rows, config.dim)
        self.caption_mask = like.new_zeros(rows, self.first, dtype=torch.bool) if config.model_type == "t2i" else None
        self.bound = 0  # no slot from here on has been written: an upper bound, kept on the host

    @property
    def rows(self) -> int:
        return len(self.condition)

    def admit(self, rows, condition_RD, caption_mask_RC) -> None:
        """What `rows` are conditioned on from now on."""
        self.condition[rows] = condition_RD
        if self.caption_mask is not None:
            self.caption_mask[rows] = caption_mask_RC

    def captions(self, rows) -> torch.Tensor | None:
        """A copy of the mask of `rows`."""
        return None if self.caption_mask is None else self.caption_mask[rows].clone()

    def fill(self, rows) -> Filling:
        """For a forward that writes the first slots of `rows`."""
        return Filling(self, rows, self.captions(rows))

    def open(self, rows, positions_RL) -> Round:
        """For a forward over `rows` at given positions: slots, visible part, mask, the same at every layer."""
        slots_RL = positions_RL + self.first
        live = self.live(slots_RL)
        visible_RLS = visible(slots_RL, live, self.captions(rows))
        mask = torch.zeros(visible_RLS.shape, dtype=self.keys.dtype, device=slots_RL.device).masked_fill_(~visible_RLS, -torch.inf)
        index = torch.arange(self.rows, device=slots_RL.device)[rows] if isinstance(rows, slice) else rows
        return Round(self, rows, index[:, None], slots_RL, live, mask[:, None])

    def live(self, slots_RL) -> int:
        """How many slots to attend to: exact on a CPU, where looking is free; elsewhere a loose upper bound (every
        input counted as a step forward) that needs no synchronisation."""
        if slots_RL.device.type == "cpu":
            return int(slots_RL.numpy().max()) + 1
        self.bound = min(self.bound + slots_RL.shape[1], self.keys.shape[2])
        return self.bound

    def move(self, dst_rows, src_rows, upto: int) -> None:
        """Copy the first `upto` positions of rows `src_rows` over those of `dst_rows`."""
        upto += self.first
        for store in (self.keys, self.values):
            store[:, dst_rows, :upto] = store[:, src_rows, :upto].clone()  # slices may overlap
        self.admit(dst_rows, self.condition[src_rows].clone(), self.captions(src_rows))

    def expand(self, group: int) -> None:
        """Repeat every row `group` times: row r becomes rows r * group .. r * group + group - 1."""
        self.select(torch.arange(self.rows).repeat_interleave(group))

    def select(self, rows: torch.Tensor) -> None:
        """Keep the given rows, in the given order, repeated where repeated."""
        rows = rows.to(self.condition.device)
        self.keys, self.values, self.condition, self.caption_mask = self.keys[:, rows], self.values[:, rows], self.condition[rows], self.captions(rows)


@dataclass(frozen=True)
class Filling:
    """A forward of whole prefixes into some rows of a cache."""

    cache: Cache
    rows: slice | torch.Tensor
    caption_mask_RC: torch.Tensor | None

    def attend(self, layer: int, q_RLND, k_RLND, v_RLND):
        L = k_RLND.shape[1]
        self.cache.bound = max(self.cache.bound, L)
        self.cache.keys[layer, self.rows, :L] = k_RLND
        self.cache.values[layer, self.rows, :L] = v_RLND
        return attend_causally(q_RLND, k_RLND, v_RLND, self.caption_mask_RC)


@dataclass(frozen=True)
class Round:
    """A forward at the ends of some rows of a cache."""

    cache: Cache
    rows: slice | torch.Tensor
    index_R1: torch.Tensor
    slots_RL: torch.Tensor
    live: int
    mask_R1LS: torch.Tensor

    def attend(self, layer: int, q_RLND, k_RLND, v_RLND):
        """Store this round's keys and values, then attend to everything visible. A slice is a view; an index gathers."""
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        keys[self.index_R1, self.slots_RL] = k_RLND
        values[self.index_R1, self.slots_RL] = v_RLND
        q, k, v = (x.transpose(1, 2) for x in (q_RLND, keys[self.rows, : self.live], values[self.rows, : self.live]))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask_R1LS).transpose(1, 2)


def attend_causally(q, k, v, caption_mask_BC=None):
    """Attention of whole sequences, [B, L, N, D] each; behind captions, with their mask."""
    B, L = q.shape[:2]
    how = dict(is_causal=True)
    if caption_mask_BC is not None:
        slots_BL = torch.arange(L, device=q.device).expand(B, L)
        how = dict(attn_mask=visible(slots_BL, L, caption_mask_BC)[:, None])
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, **how).transpose(1, 2)


def visible(slots_RL, live: int, caption_mask_RC) -> torch.Tensor:
    """Which of the first `live` slots a query at each slot attends to [R, L, live]: none after its own, and of a caption's slots those of tokens.

    Every query sees its own slot, so that one on the padding sees something: the official mask, which the null half shares.
    """
    slots_S = torch.arange(live, device=slots_RL.device)
    visible_RLS = slots_S <= slots_RL[..., None]
    if caption_mask_RC is not None:
        condition_C = slots_S[: caption_mask_RC.shape[1]]
        visible_RLS[..., : len(condition_C)] &= caption_mask_RC[:, None] | (condition_C == slots_RL[..., None])
    return visible_RLS
