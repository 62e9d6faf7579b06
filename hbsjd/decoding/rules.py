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
        p_RLV = scores_RLV.softmax(-1)
        q_RWV = proposal(window, p_RLV[:, :-1])
        drafts_RW1 = window.drafts_RW[..., None]
        ratio_RW = (p_RLV[:, :-1].gather(-1, drafts_RW1) / q_RWV.gather(-1, drafts_RW1))[..., 0]
        accepted_R = leading(noise.coin(ratio_RW.clamp(max=1), window))
        fresh_RL = noise.draw(with_residual(scores_RLV, p_RLV, q_RWV, accepted_R), window)
        kept_RW = torch.arange(window.drafts_RW.shape[1], device=accepted_R.device) < accepted_R[:, None]
        tokens_RL = torch.cat([window.drafts_RW.where(kept_RW, fresh_RL[:, :-1]), fresh_RL[:, -1:]], dim=1)
        return Verdict(tokens_RL, accepted_R, p_RLV)


def proposal(window: Window, p_RWV: torch.Tensor) -> torch.Tensor:
    """q [R, W, V], in the precision of p: last round's p for recycled drafts, one-hot for copied ones, uniform for the rest."""
    one_hot_RWV = torch.zeros_like(p_RWV).scatter_(-1, window.drafts_RW[..., None], 1.0)
    tail_RWV = one_hot_RWV.where(window.copied_RW[..., None], 1 / p_RWV.shape[-1])
    if window.q_RWV is None:
        return tail_RWV
    recycled_RW = torch.arange(p_RWV.shape[1], device=p_RWV.device) < window.recycled_R[:, None]
    return window.q_RWV.where(recycled_RW[..., None], tail_RWV)


def with_residual(scores_RLV, p_RLV, q_RWV, accepted_R):
    """The scores, with log [p - q]+ at the first draft that was not kept (none where all were)."""
    if q_RWV.shape[1] == 0:
        return scores_RLV
    row_R = torch.arange(len(accepted_R), device=accepted_R.device)
    first_R = accepted_R.clamp(max=q_RWV.shape[1] - 1)
    residual_RV = (p_RLV[row_R, first_R] - q_RWV[row_R, first_R]).clamp(min=0)
    # p and q that differ by rounding alone leave no residual: p is then what it would have been
    usable_R1 = (accepted_R < q_RWV.shape[1])[:, None] & (residual_RV.sum(-1, keepdim=True) > 0)
    return scores_RLV.index_put((row_R, first_R), residual_RV.log().where(usable_R1, scores_RLV[row_R, first_R]))


def leading(kept_RW: torch.Tensor) -> torch.Tensor:
    """How many drafts stand before the first that does not."""
    return kept_RW.long().cumprod(1).sum(1)
