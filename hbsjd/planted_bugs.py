"""Mistakes, made on purpose, that bias what is decoded: published ones and near ones. `enumeration.exact_law` has to notice each of them.

`with planted(bug): ...` runs the real loop with the mistake in it.
"""
from __future__ import annotations

from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from unittest import mock

import torch
import torch.nn.functional as F

from hbsjd.decoding import rules
from hbsjd.decoding.rules import Gumbel, Maximal, Probabilistic
from hbsjd.decoding.schedules import Independent, Lockstep
from hbsjd.decoding.state import State
from hbsjd.models.toy import Tabular

ONE_IMAGE, TWO_IMAGES = Tabular(vocab_size=3, length=4, seed=1), Tabular(vocab_size=2, length=3, num_classes=2, seed=1)


@contextmanager
def planted(bug):
    with ExitStack() as stack:
        bug(lambda owner, name, new: stack.enter_context(mock.patch.object(owner, name, new)))
        yield


def residual_from_p(put):
    """A rejected draft is redrawn from p instead of the residual."""
    put(rules, "with_residual", lambda scores_RLV, *_: scores_RLV)


def copied_drafts_taken_as_uniform(put):
    """The q of a copied draft is 1 / V instead of one-hot."""
    exact = rules.proposal
    put(rules, "proposal", lambda window, p: exact(replace(window, copied_RW=torch.zeros_like(window.copied_RW)), p))


def old_q_for_kept_drafts(put):
    """What is recycled keeps the q it was drawn from, where the coin kept it."""
    exact_examine, exact_slide, judged = rules.examine, State.slide, {}

    def examine(scores_RLV, window, noise):
        p, q, kept = exact_examine(scores_RLV, window, noise)
        judged.update(p=p, q=q, kept=kept)
        return p, q, kept

    def slide(state, window, verdict, advance_R):
        if isinstance(state.method.rule, Maximal):
            kept_RW = judged["kept"]
        else:
            kept_RW = torch.arange(window.drafts_RW.shape[1]) < verdict.accepted_R[:, None]
        q_RLV = F.pad(judged["q"], (0, 0, 0, 1))
        exact_slide(state, window, replace(verdict, p_RLV=q_RLV.where(F.pad(kept_RW, (0, 1))[..., None], judged["p"])), advance_R)

    put(rules, "examine", examine)
    put(State, "slide", slide)


def window_dropped_where_the_next_draft_was_kept(put):
    """Which drafts go is decided by a look at drafts that are not committed."""
    exact = State.slide

    def slide(state, window, verdict, advance_R):
        exact(state, window, verdict, advance_R)
        kept_RL = F.pad(window.drafts_RW == verdict.tokens_RL[:, :-1], (0, 2))
        next_R = kept_RL.gather(1, advance_R.clamp(max=kept_RL.shape[1] - 1)[:, None])[:, 0]
        state.recycled[window.index_R] = state.recycled[window.index_R].where(~next_R, 0)

    put(State, "slide", slide)


def clipped_on_its_own_accepted_length(put):
    """An image whose drafts all stand commits one token and drops its window."""
    exact_advance, exact_slide = State.advance, State.slide

    def whole(verdict, window):
        return (verdict.accepted_R == window.drafts_RW.shape[1]) & (window.remaining_R > 0)

    def slide(state, window, verdict, advance_R):
        exact_slide(state, window, verdict, advance_R)
        state.recycled[window.index_R] = state.recycled[window.index_R].where(~whole(verdict, window), 0)

    put(State, "advance", lambda state, verdict, window: exact_advance(state, verdict, window).where(~whole(verdict, window), 1))
    put(State, "slide", slide)


def threshold_reuse(put):
    """After the first rejection a draft is kept iff p / q > 0.8."""
    exact = rules.redraw

    def redraw(scores_RLV, standing_RW, window, noise):
        p_RWV = scores_RLV[:, :-1].softmax(-1)
        q_RWV = rules.proposal(window, p_RWV)
        drafts_RW1 = window.drafts_RW[..., None]
        likely_RW = (p_RWV.gather(-1, drafts_RW1) > 0.8 * q_RWV.gather(-1, drafts_RW1))[..., 0]
        after_RW = torch.arange(standing_RW.shape[1]) > rules.leading(standing_RW)[:, None]
        return exact(scores_RLV, standing_RW | (likely_RW & after_RW), window, noise)

    put(rules, "redraw", redraw)


def one_too_many_committed(put):
    """Off by one in the commit."""
    exact = State.advance
    put(State, "advance", lambda state, verdict, window: torch.minimum(exact(state, verdict, window) + 1, window.remaining_R))


def stale_keys_visible(put):
    """The replacement's key is not written, so that the rejected draft's, still there, is attended to."""
    exact = Tabular.step

    def step(model, tokens_RL, positions_RL, cache, rows):
        first_R = positions_RL[:, 0].clamp(min=0)
        stale_R = cache.tokens[torch.arange(cache.rows)[rows], first_R]
        return exact(model, torch.cat([stale_R[:, None], tokens_RL[:, 1:]], dim=1), positions_RL, cache, rows)

    put(Tabular, "step", step)


@dataclass(frozen=True)
class Held:
    """A schedule: as if another image held this one back to one token a round."""

    def advance(self, able_R, window):
        return able_R.clamp(max=1)


# bug, rule, model, schedule, prefixes: where each one shows
PLANTED = [
    (residual_from_p, Probabilistic(), ONE_IMAGE, Independent(), ((0,),)),
    (residual_from_p, Maximal(), ONE_IMAGE, Independent(), ((0,),)),
    (copied_drafts_taken_as_uniform, Probabilistic(), ONE_IMAGE, Independent(), ((0,),)),
    (old_q_for_kept_drafts, Maximal(), ONE_IMAGE, Independent(), ((0,),)),
    (old_q_for_kept_drafts, Probabilistic(), ONE_IMAGE, Held(), ((0,),)),
    (old_q_for_kept_drafts, Probabilistic(), TWO_IMAGES, Lockstep(), ((0,), (1,))),
    (window_dropped_where_the_next_draft_was_kept, Maximal(), ONE_IMAGE, Independent(), ((0,),)),
    (clipped_on_its_own_accepted_length, Maximal(), ONE_IMAGE, Independent(), ((0,),)),
    (threshold_reuse, Probabilistic(), ONE_IMAGE, Independent(), ((0,),)),
    (one_too_many_committed, Probabilistic(), ONE_IMAGE, Independent(), ((0,),)),
    (stale_keys_visible, Probabilistic(), ONE_IMAGE, Independent(), ((0,),)),
    (stale_keys_visible, Gumbel(), ONE_IMAGE, Independent(), ((0,),)),
]
