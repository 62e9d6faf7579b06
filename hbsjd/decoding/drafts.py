"""Drafts: what enters the part of a window that the last round's predictions do not reach.

`propose(window, tokens_RT, vocab_size, noise)` -> tokens [R, W] and a mask of those that are copies. A copy has a one-hot q; the rest are uniform, q = 1 / V.
"""
from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from hbsjd.decoding.types import Window


@dataclass(frozen=True)
class History:
    """The committed token at the same place H, 2 H, ... positions earlier: the nearest that exists. H = grid width copies the token above.

    H = None means the grid's width and is filled in by `hbsjd.rollout`. (Drawing from the distribution one row up with the position's own Gumbel noise
    instead was tried: 1 % more committed tokens at W = 16, 2 % at W = 32, for T V floats an image. Not worth its memory.)
    """

    H: int | None

    def propose(self, window: Window, tokens_RT, vocab_size: int, noise):
        positions_RW = window.positions_RL[:, :-1]
        ahead_RW = positions_RW - window.cursor_R[:, None]
        source_RW = positions_RW - (ahead_RW // self.H + 1) * self.H
        copied_RW = source_RW >= 0
        tokens_RW = tokens_RT.gather(1, source_RW.clamp(min=0))
        return tokens_RW.where(copied_RW, noise.pick(vocab_size, window)), copied_RW


@dataclass(frozen=True)
class RepeatLeft:
    """The left neighbour, which may itself be a draft: the last recycled draft, or the last committed token; uniform where there is neither."""

    def propose(self, window: Window, tokens_RT, vocab_size: int, noise):
        left_RL = torch.cat([window.last_R1, window.drafts_RW], dim=1)
        left_R1 = left_RL.gather(1, window.recycled_R.clamp(max=window.drafts_RW.shape[1])[:, None])
        copied_RW = ((window.cursor_R + window.recycled_R) > 0)[:, None].expand_as(window.drafts_RW)
        return left_R1.where(copied_RW, noise.pick(vocab_size, window)), copied_RW


@dataclass(frozen=True)
class Uniform:
    """A uniform token."""

    def propose(self, window: Window, tokens_RT, vocab_size: int, noise):
        return noise.pick(vocab_size, window), torch.zeros_like(window.drafts_RW, dtype=torch.bool)


def refill(draft, window: Window, tokens_RT, vocab_size: int, noise) -> Window:
    """The window with its recycled drafts kept and its tail drafted. Autoregressive decoding has nothing to draft."""
    if window.drafts_RW.shape[1] == 0:
        return replace(window, copied_RW=window.drafts_RW.bool())
    tokens_RW, copied_RW = draft.propose(window, tokens_RT, vocab_size, noise)
    recycled_RW = torch.arange(tokens_RW.shape[1], device=tokens_RW.device) < window.recycled_R[:, None]
    return replace(window, drafts_RW=window.drafts_RW.where(recycled_RW, tokens_RW), copied_RW=copied_RW)
