"""THE loop: batched speculative Jacobi decoding with independent progress (HB-SJD, arXiv 2608.18183, Sec. 4)."""
from __future__ import annotations

from hbsjd.decoding.drafts import refill
from hbsjd.decoding.sampling import scores
from hbsjd.decoding.state import State


def rollout(state: State, noise) -> State:
    """Decode every image of `state` to its end."""
    while state.active:
        round(state, noise)
        state.settle()
    return state


def round(state: State, noise) -> None:
    """One verifier forward for all images, although each stands at its own position."""
    # The rows that run (Eq. 6); each image's window: predictions of its last round, then committed tokens H back
    window = state.open(noise)
    window = refill(state.method.draft, window, state.tokens[window.rows], state.model.config.vocab_size, noise)

    # One forward over [last committed token, drafts]: prediction j stands where draft j stands
    logits_RLV = state.model.step(window.inputs(), window.positions_RL - 1, state.cache, window.rows)
    scores_RLV = scores(logits_RLV, state.policy)

    # Which drafts stand, and how far each image may go
    verdict = state.method.rule.judge(scores_RLV, window, noise)
    advance_R = state.advance(verdict, window)

    # Commit; what lies past the commit is drafted again. Stale keys need no repair: they are overwritten before they are seen
    state.commit(window, verdict, advance_R, scores_RLV)
    state.slide(window, verdict, advance_R)
    state.record(window, verdict, advance_R)
    state.read(logits_RLV)
