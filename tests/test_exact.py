"""Probabilistic decoding has exactly the autoregressive law: every random outcome enumerated, through the real loop."""
import pytest
import torch
from enumeration import exact_law, total_variation

from hbsjd.decoding import rules
from hbsjd.decoding.drafts import History, RepeatLeft, Uniform
from hbsjd.decoding.execution import Compact, Full, Hybrid
from hbsjd.decoding.rules import Probabilistic
from hbsjd.decoding.sampling import scores
from hbsjd.decoding.schedules import Independent
from hbsjd.decoding.types import Method, Policy
from hbsjd.decoding.windows import Fixed
from hbsjd.models.toy import Tabular

MODEL = Tabular(vocab_size=3, length=4, seed=1)


def probabilistic(draft=History(2), execution=Full(), W=2, bonus=True):
    return Method(Probabilistic(), draft, Independent(), execution, Fixed(W), bonus)


@pytest.mark.parametrize("prefix", [(), (1,), (2, 0)])
@pytest.mark.parametrize("draft", [History(1), History(2), RepeatLeft(), Uniform()])
@pytest.mark.parametrize("W", [1, 2])
def test_the_law_is_autoregressive(W, draft, prefix):
    law = exact_law(MODEL, probabilistic(draft, W=W), prefix)
    assert total_variation(law, MODEL.joint(0, prefix)) < 1e-12


def test_a_window_of_three():
    law = exact_law(MODEL, probabilistic(W=3), (1, 1))
    assert total_variation(law, MODEL.joint(0, (1, 1))) < 1e-12


@pytest.mark.parametrize("execution", [Compact(), Hybrid(0.6)])
def test_switching_between_full_and_compact(execution):
    """Even rounds carry one finished row (Hybrid runs Full), odd ones twice as many as unfinished (Hybrid runs Compact)."""
    law = exact_law(MODEL, probabilistic(execution=execution), (0,), finished=lambda round_, leaves: 2 * leaves if round_ % 2 else 1)
    assert total_variation(law, MODEL.joint(0, (0,))) < 1e-12


@pytest.mark.parametrize("policy", [Policy("sample", temperature=0.7), Policy("sample", top_k=2), Policy("sample", 1.0, 1.3, 0, 0.8)])
def test_temperature_and_filters(policy):
    law = exact_law(MODEL, probabilistic(), (2,), policy)
    assert total_variation(law, MODEL.joint(0, (2,), lambda logits: scores(logits, policy))) < 1e-12


def test_without_the_bonus_token():
    law = exact_law(MODEL, probabilistic(bonus=False), (0,))
    assert total_variation(law, MODEL.joint(0, (0,))) < 1e-12


def residual_from_p(scores_RLV, p_RLV, q_RWV, accepted_R):
    """Planted: a rejected draft is redrawn from p."""
    return scores_RLV


def proposal_uniform(window, p_RWV):
    """Planted: a copied draft is taken as uniform."""
    q = torch.full_like(p_RWV, 1 / p_RWV.shape[-1])
    return q if window.q_RWV is None else window.q_RWV.where((torch.arange(q.shape[1]) < window.recycled_R[:, None])[..., None], q)


@pytest.mark.parametrize("name, planted, at_least", [("with_residual", residual_from_p, 0.1), ("proposal", proposal_uniform, 0.01)])
def test_planted_bugs_are_noticed(monkeypatch, name, planted, at_least):
    monkeypatch.setattr(rules, name, planted)
    law = exact_law(MODEL, probabilistic(), (0,))
    assert total_variation(law, MODEL.joint(0, (0,))) > at_least
