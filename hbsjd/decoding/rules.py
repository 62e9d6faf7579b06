"""Verification rules: which drafts stand, what replaces the first that does not, and what is drafted next from this round's predictions.

`judge(scores_RLV, window, noise)` -> Verdict. p = softmax(scores) is the target; draft j is judged by prediction j.
"""
from __future__ import annotations

from dataclasses import dataclass

import torch

from hbsjd.decoding.types import Verdict, Window


@dataclass(frozen=True)
class Greedy:
    """Eq. 4: a draft stands iff it is the argmax. Equal to greedy autoregressive decoding, token for token."""

    mode = "greedy"

    def judge(self, scores_RLV, window: Window, noise) -> Verdict:
        tokens_RL = scores_RLV.argmax(-1)
        return Verdict(tokens_RL, leading(tokens_RL[:, :-1] == window.drafts_RW), None)


@dataclass(frozen=True)
class Gumbel:
    """Greedy on scores + Gumbel noise that belongs to (image, position): equal to autoregressive sampling with that noise, token for token.

    A position's successive draws are coupled by their common noise (Gumbel sharing, arXiv 2510.24211), so most drafts outlive a change of context.
    """

    mode = "sample"

    def judge(self, scores_RLV, window: Window, noise) -> Verdict:
        tokens_RL = noise.shared(scores_RLV, window)
        return Verdict(tokens_RL, leading(tokens_RL[:, :-1] == window.drafts_RW), None)


@dataclass(frozen=True)
class Probabilistic:
    """Eq. 5, speculative Jacobi decoding (arXiv 2410.01699): keep a draft with probability min(1, p / q); replace the first that is not kept
    from the residual norm([p - q]+); redraw all later ones from p. Every prediction's next q is this round's p, kept or not."""

    mode = "sample"

    def judge(self, scores_RLV, window: Window, noise) -> Verdict:
        p_RLV, q_RWV, kept_RW = examine(scores_RLV, window, noise)
        accepted_R, W = leading(kept_RW), kept_RW.shape[1]
        standing_RW = torch.arange(W, device=kept_RW.device) < accepted_R[:, None]
        first_R1 = accepted_R[:, None].clamp(max=W - 1)[:, :W]  # the first that is not kept (no column for a window without drafts)
        scores_RLV = with_residual(scores_RLV, p_RLV, q_RWV, first_R1, ~kept_RW.gather(1, first_R1))
        return Verdict(redraw(scores_RLV, standing_RW, window, noise), accepted_R, p_RLV)


@dataclass(frozen=True)
class Maximal:
    """Maximal coupling (arXiv 2510.24211; "adaptive continuation" in arXiv 2603.18599): the test of Eq. 5 at every position of the window,
    those after the first rejection included, so that a draft outlives a round with the highest possible probability, 1 - TV(p, q)."""

    mode = "sample"

    def judge(self, scores_RLV, window: Window, noise) -> Verdict:
        p_RLV, q_RWV, kept_RW = examine(scores_RLV, window, noise)
        every_RW = torch.arange(kept_RW.shape[1], device=kept_RW.device).expand_as(kept_RW)
        scores_RLV = with_residual(scores_RLV, p_RLV, q_RWV, every_RW, ~kept_RW)
        return Verdict(redraw(scores_RLV, kept_RW, window, noise), leading(kept_RW), p_RLV)


def examine(scores_RLV, window: Window, noise):
    """p, q, and which drafts a coin of probability min(1, p / q) keeps."""
    p_RLV = scores_RLV.softmax(-1)
    q_RWV = proposal(window, p_RLV[:, :-1])
    drafts_RW1 = window.drafts_RW[..., None]
    ratio_RW = (p_RLV[:, :-1].gather(-1, drafts_RW1) / q_RWV.gather(-1, drafts_RW1))[..., 0]
    return p_RLV, q_RWV, noise.coin(ratio_RW.clamp(max=1), window)


def with_residual(scores_RLV, p_RLV, q_RWV, place_RK, rejected_RK):
    """The scores, but log [p - q]+ at those of the given places whose draft was rejected."""
    row_R1 = torch.arange(len(place_RK), device=place_RK.device)[:, None]
    residual_RKV = (p_RLV[row_R1, place_RK] - q_RWV[row_R1, place_RK]).clamp(min=0)
    # p and q that differ by rounding alone leave no residual: p is then what it would have been
    usable_RK1 = (rejected_RK & (residual_RKV.sum(-1) > 0))[..., None]
    return scores_RLV.index_put((row_R1, place_RK), residual_RKV.log().where(usable_RK1, scores_RLV[row_R1, place_RK]))


def redraw(scores_RLV, standing_RW, window: Window, noise) -> torch.Tensor:
    """The drafts that stand, and fresh draws everywhere else."""
    fresh_RL = noise.draw(scores_RLV, window)
    return torch.cat([window.drafts_RW.where(standing_RW, fresh_RL[:, :-1]), fresh_RL[:, -1:]], dim=1)


def proposal(window: Window, p_RWV: torch.Tensor) -> torch.Tensor:
    """q [R, W, V], in the precision of p: last round's p for recycled drafts, one-hot for copied ones, uniform for the rest."""
    one_hot_RWV = torch.zeros_like(p_RWV).scatter_(-1, window.drafts_RW[..., None], 1.0)
    tail_RWV = one_hot_RWV.where(window.copied_RW[..., None], 1 / p_RWV.shape[-1])
    if window.q_RWV is None:
        return tail_RWV
    recycled_RW = torch.arange(p_RWV.shape[1], device=p_RWV.device) < window.recycled_R[:, None]
    return window.q_RWV.where(recycled_RW[..., None], tail_RWV)


def leading(kept_RW: torch.Tensor) -> torch.Tensor:
    """How many drafts stand before the first that does not."""
    return kept_RW.long().cumprod(1).sum(1)
