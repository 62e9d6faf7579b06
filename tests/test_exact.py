"""Probabilistic and Maximal decoding have exactly the autoregressive law: every random outcome enumerated, through the real loop."""
from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from enumeration import exact_law, target_law, total_variation

from hbsjd.decoding import rules
from hbsjd.decoding.drafts import History, RepeatLeft, Uniform
from hbsjd.decoding.execution import Compact, Full, Hybrid
from hbsjd.decoding.rules import Maximal, Probabilistic
from hbsjd.decoding.sampling import scores
from hbsjd.decoding.schedules import Independent, Lockstep, Synchronous
from hbsjd.decoding.state import State
from hbsjd.decoding.types import Method, Policy
from hbsjd.decoding.windows import Fixed
from hbsjd.models.toy import Tabular

MODEL = Tabular(vocab_size=3, length=4, seed=1)


@dataclass(frozen=True)
class Held:
    """As if another image held this one back to one token a round."""

    def advance(self, able_R, window):
        return able_R.clamp(max=1)


RULES = pytest.mark.parametrize("rule", [Probabilistic(), Maximal()], ids=lambda rule: type(rule).__name__)


def method(rule, draft=History(2), execution=Full(), W=2, bonus=True):
    return Method(rule, draft, Independent(), execution, Fixed(W), bonus)


@RULES
@pytest.mark.parametrize("prefix", [(), (1,), (2, 0)])
@pytest.mark.parametrize("draft", [History(1), History(2), RepeatLeft(), Uniform()])
@pytest.mark.parametrize("W", [1, 2])
def test_the_law_is_autoregressive(rule, W, draft, prefix):
    law = exact_law(MODEL, method(rule, draft, W=W), prefix)
    assert total_variation(law, target_law(MODEL, prefix)) < 1e-12


@RULES
def test_a_window_of_three(rule):
    law = exact_law(MODEL, method(rule, W=3), (1, 1))
    assert total_variation(law, target_law(MODEL, (1, 1))) < 1e-12


@RULES
@pytest.mark.parametrize("execution", [Compact(), Hybrid(0.6)])
def test_switching_between_full_and_compact(rule, execution):
    """Even rounds carry one finished row (Hybrid runs Full), odd ones twice as many as unfinished (Hybrid runs Compact)."""
    law = exact_law(MODEL, method(rule, execution=execution), (0,), finished=lambda round_, leaves: 2 * leaves if round_ % 2 else 1)
    assert total_variation(law, target_law(MODEL, (0,))) < 1e-12


@RULES
@pytest.mark.parametrize("policy", [Policy("sample", temperature=0.7), Policy("sample", top_k=2), Policy("sample", 1.0, 1.3, 0, 0.8)])
def test_temperature_and_filters(rule, policy):
    law = exact_law(MODEL, method(rule), (2,), policy=policy)
    assert total_variation(law, target_law(MODEL, (2,), scores=lambda logits: scores(logits, policy))) < 1e-12


@RULES
def test_an_image_that_is_held_back(rule):
    law = exact_law(MODEL, Method(rule, History(2), Held(), Full(), Fixed(2)), (0,))
    assert total_variation(law, target_law(MODEL, (0,))) < 1e-12


@RULES
def test_without_the_bonus_token(rule):
    law = exact_law(MODEL, method(rule, bonus=False), (0,))
    assert total_variation(law, target_law(MODEL, (0,))) < 1e-12


TWO = Tabular(vocab_size=2, length=3, num_classes=2, seed=1)
HALFWAY = dict(finished=lambda round_, leaves: leaves if round_ % 2 else 0)  # Hybrid(0.6) runs Full, then Compact, ...


@RULES
@pytest.mark.parametrize("schedule, execution, W, prefixes, switches", [
    (Lockstep(), Full(), 1, ((), (1,)), {}),
    (Lockstep(), Compact(), 2, ((0,), (1,)), {}),
    (Lockstep(), Hybrid(0.6), 1, ((), (0, 1)), HALFWAY),
    (Synchronous(), Compact(), 1, ((), (1,)), {}),
    (Synchronous(), Full(), 2, ((1,), (0, 1)), {}),
    (Synchronous(), Hybrid(0.6), 2, ((1,), (1,)), HALFWAY),
    (Independent(), Hybrid(0.6), 1, ((), (1,)), HALFWAY),
])
def test_two_images_that_wait_for_each_other(rule, schedule, execution, W, prefixes, switches):
    law = exact_law(TWO, Method(rule, History(1), schedule, execution, Fixed(W)), *prefixes, **switches)
    assert total_variation(law, target_law(TWO, *prefixes)) < 1e-12


# --- planted bugs: each must be noticed, by about the total variation that was seen in a trial on such toys ---


def residual_from_p(monkeypatch):
    """A rejected draft is redrawn from p."""
    monkeypatch.setattr(rules, "with_residual", lambda scores_RLV, *_: scores_RLV)


def copied_drafts_taken_as_uniform(monkeypatch):
    exact = rules.proposal
    monkeypatch.setattr(rules, "proposal", lambda window, p: exact(replace(window, copied_RW=torch.zeros_like(window.copied_RW)), p))


def old_q_for_kept_drafts(monkeypatch):
    """What is recycled keeps the q it was drawn from, where the coin kept it (the published mistake)."""
    exact, judged = rules.examine, {}

    def examine(scores_RLV, window, noise):
        p, q, kept = exact(scores_RLV, window, noise)
        judged.update(p=p, q=q, kept=kept)
        return p, q, kept

    def slide(state, window, verdict, advance_R):
        kept_RW = judged["kept"] if isinstance(state.method.rule, Maximal) else torch.arange(window.drafts_RW.shape[1]) < verdict.accepted_R[:, None]
        kept_RL1 = F.pad(kept_RW, (0, 1))[..., None]
        q_RLV = F.pad(judged["q"], (0, 0, 0, 1))
        exact_slide(state, window, replace(verdict, p_RLV=torch.where(kept_RL1, q_RLV, judged["p"])), advance_R)

    exact_slide = State.slide
    monkeypatch.setattr(rules, "examine", examine)
    monkeypatch.setattr(State, "slide", slide)


def window_dropped_where_the_next_draft_was_kept(monkeypatch):
    """A choice that looks at drafts that are not committed."""
    exact = State.slide

    def slide(state, window, verdict, advance_R):
        exact(state, window, verdict, advance_R)
        kept_RL = F.pad(window.drafts_RW == verdict.tokens_RL[:, :-1], (0, 2))
        next_R = kept_RL.gather(1, advance_R.clamp(max=kept_RL.shape[1] - 1)[:, None])[:, 0]
        state.recycled[window.index_R] = state.recycled[window.index_R].where(~next_R, 0)

    monkeypatch.setattr(State, "slide", slide)


def clipped_on_its_own_accepted_length(monkeypatch):
    """An image whose drafts all stand commits one token and drops its window."""
    exact_advance, exact_slide = State.advance, State.slide
    monkeypatch.setattr(State, "advance", lambda state, verdict, window: exact_advance(state, verdict, window).where(~whole(verdict, window), 1))

    def slide(state, window, verdict, advance_R):
        exact_slide(state, window, verdict, advance_R)
        state.recycled[window.index_R] = state.recycled[window.index_R].where(~whole(verdict, window), 0)

    monkeypatch.setattr(State, "slide", slide)


def whole(verdict, window):
    return (verdict.accepted_R == window.drafts_RW.shape[1]) & (window.remaining_R > 0)


def threshold_reuse(monkeypatch):
    """After the first rejection a draft is kept iff p / q > 0.8 (as third parties describe SJD++)."""
    exact = rules.redraw

    def redraw(scores_RLV, standing_RW, window, noise):
        p_RWV = scores_RLV[:, :-1].softmax(-1)
        q_RWV = rules.proposal(window, p_RWV)
        drafts = window.drafts_RW[..., None]
        likely = (p_RWV.gather(-1, drafts) > 0.8 * q_RWV.gather(-1, drafts))[..., 0]
        after = torch.arange(standing_RW.shape[1]) > standing_RW.long().cumprod(1).sum(1, keepdim=True)
        return exact(scores_RLV, standing_RW | (likely & after), window, noise)

    monkeypatch.setattr(rules, "redraw", redraw)


def one_too_many_committed(monkeypatch):
    exact = State.advance
    monkeypatch.setattr(State, "advance", lambda state, verdict, window: torch.minimum(exact(state, verdict, window) + 1, window.remaining_R))


ONE_IMAGE, HELD_BACK, TWO_IMAGES = (MODEL, Independent(), ((0,),)), (MODEL, Held(), ((0,),)), (TWO, Lockstep(), ((0,), (1,)))
BUGS = [  # bug, rule, where, total variation at least
    (residual_from_p, Probabilistic(), ONE_IMAGE, 0.1),
    (residual_from_p, Maximal(), ONE_IMAGE, 0.1),
    (copied_drafts_taken_as_uniform, Probabilistic(), ONE_IMAGE, 0.01),
    (old_q_for_kept_drafts, Maximal(), ONE_IMAGE, 0.01),
    (old_q_for_kept_drafts, Probabilistic(), HELD_BACK, 0.01),
    (old_q_for_kept_drafts, Probabilistic(), TWO_IMAGES, 0.001),
    (window_dropped_where_the_next_draft_was_kept, Maximal(), ONE_IMAGE, 0.01),
    (clipped_on_its_own_accepted_length, Maximal(), ONE_IMAGE, 0.01),
    (threshold_reuse, Probabilistic(), ONE_IMAGE, 0.005),
    (one_too_many_committed, Probabilistic(), ONE_IMAGE, 0.01),
]


@pytest.mark.parametrize("bug, rule, where, at_least", BUGS, ids=lambda value: getattr(value, "__name__", None))
def test_planted_bugs_are_noticed(monkeypatch, bug, rule, where, at_least):
    model, schedule, prefixes = where
    bug(monkeypatch)
    law = exact_law(model, Method(rule, History(1), schedule, Full(), Fixed(2)), *prefixes)
    distance = total_variation(law, target_law(model, *prefixes))
    print(f"total variation {bug.__name__}, {type(rule).__name__}: {distance:.3f}")
    assert distance > at_least


def test_old_q_under_probabilistic_alone_is_harmless(monkeypatch):
    """With the Independent schedule a kept draft is committed at once, so its q is never used again: why this mistake went unnoticed."""
    old_q_for_kept_drafts(monkeypatch)
    assert total_variation(exact_law(MODEL, method(Probabilistic()), (0,)), target_law(MODEL, (0,))) < 1e-12
