"""Invariants 1 and 4: Greedy and Gumbel are autoregressive decoding, token for token, and noise belongs to the image."""
from itertools import product

import pytest
import torch
from equality import assert_same

import hbsjd
from hbsjd.decoding import reference
from hbsjd.decoding.drafts import History, RepeatLeft, Uniform
from hbsjd.decoding.execution import Compact, Full, Hybrid
from hbsjd.decoding.rules import Greedy, Gumbel, Maximal, Probabilistic
from hbsjd.decoding.schedules import Independent, Lockstep, Synchronous
from hbsjd.decoding.types import Method, Policy
from hbsjd.decoding.windows import Fixed
from hbsjd.models.guidance import Guided
from hbsjd.models.llamagen import random_model

SCHEDULES, EXECUTIONS, WINDOWS = (Independent(), Synchronous(), Lockstep()), (Full(), Compact(), Hybrid(0.6)), (1, 4, 16)
DRAFTS = (History(1), History(5), RepeatLeft(), Uniform())
CONDITION = torch.tensor([0, 3, 1, 4, 2])
PREFIX = [torch.arange(n) % 16 for n in (0, 6, 13, 1, 25)]


def tiny(dtype=torch.float64, seed=0):
    return random_model("tiny", seed=seed, dim=32, vocab_size=16, block_size=25, num_classes=4).to(dtype)


@pytest.fixture(scope="module")
def autoregressive():
    model = tiny()
    return {
        (rule, guidance): hbsjd.rollout(model, CONDITION, PREFIX, rule, guidance=guidance, seed=7)
        for rule, guidance in product(("ar", "ar_greedy"), (1.0, 2.0))
    }


@pytest.mark.parametrize("rule", [Greedy(), Gumbel()], ids=("greedy", "gumbel"))
@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: type(s).__name__)
@pytest.mark.parametrize("execution", EXECUTIONS, ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("draft", DRAFTS, ids=str)
def test_every_method_is_autoregressive_decoding(autoregressive, rule, schedule, execution, draft):
    model = tiny()
    for W, guidance in zip(WINDOWS, (1.0, 2.0, 2.0)):
        want = autoregressive["ar" if rule == Gumbel() else "ar_greedy", guidance]
        got = hbsjd.rollout(model, CONDITION, PREFIX, Method(rule, draft, schedule, execution, Fixed(W)), guidance=guidance, seed=7)
        assert torch.equal(got.tokens, want.tokens), (W, guidance)
        assert got.nfe <= want.nfe


@pytest.mark.parametrize("method", ["hbsjd", "hbsjd_gumbel", "sjd_lockstep", "sjd_synchronous_gumbel"])
def test_float32_differs_only_at_near_ties(method):
    model = tiny(torch.float32, seed=1)
    want = hbsjd.rollout(model, CONDITION, PREFIX, "ar" if "gumbel" in method else "ar_greedy", guidance=2.0, seed=7)
    got = hbsjd.rollout(model, CONDITION, PREFIX, method, guidance=2.0, seed=7)
    assert_same(Guided(model, 2.0), CONDITION, got, want, seed=7)


@pytest.mark.parametrize("method", ["hbsjd", "hbsjd_gumbel", "hbsjd_probabilistic", "hbsjd_maximal", "ar"])
def test_an_image_does_not_depend_on_its_batch(method):
    """A batch equals its images one by one; a permutation of the batch permutes the output; image ids may be anything."""
    model, images = tiny(), torch.tensor([5, 2**40, 0, -3, 11])
    want = hbsjd.rollout(model, CONDITION, PREFIX, method, seed=2**63 + 1, images=images)
    order = torch.tensor([3, 0, 4, 2, 1])
    shuffled = hbsjd.rollout(model, CONDITION[order], [PREFIX[i] for i in order], method, seed=2**63 + 1, images=images[order])
    assert torch.equal(shuffled.tokens, want.tokens[order])
    for row in range(len(CONDITION)):
        alone = hbsjd.rollout(model, CONDITION[[row]], [PREFIX[row]], method, seed=2**63 + 1, images=images[[row]])
        assert torch.equal(alone.tokens[0], want.tokens[row])


@pytest.mark.parametrize("execution", EXECUTIONS, ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("rule", [Probabilistic(), Maximal()], ids=lambda r: type(r).__name__)
def test_tokens_of_the_other_rules_do_not_depend_on_the_execution(rule, execution):
    methods = [Method(rule, History(5), Independent(), e, Fixed(4)) for e in (Full(), execution)]
    full, other = (hbsjd.rollout(tiny(), CONDITION, PREFIX, m, guidance=2.0, seed=1) for m in methods)
    assert torch.equal(full.tokens, other.tokens)


@pytest.mark.parametrize("rule", [Greedy(), Gumbel(), Probabilistic(), Maximal()], ids=lambda r: type(r).__name__)
@pytest.mark.parametrize("W, H", [(0, 5), (1, 1), (5, 5), (8, 3)])
def test_the_loop_follows_the_reference(rule, W, H):
    model, policy = tiny(), Policy(rule.mode) if rule == Greedy() else Policy("sample", temperature=0.8, top_k=9)
    out = hbsjd.rollout(
        model, CONDITION, PREFIX, Method(rule, History(H), Independent(), Compact(), Fixed(W)), seed=5, temperature=policy.temperature, top_k=policy.top_k
    )
    for row in range(len(CONDITION)):
        want = reference.decode(model, int(CONDITION[row]), PREFIX[row].tolist(), type(rule).__name__, W, H, 25, 5, row, policy)
        assert out.tokens[row].tolist() == want


def test_different_seeds_and_images_give_different_tokens():
    model = tiny()
    runs = [hbsjd.rollout(model, torch.zeros(3).long(), seed=seed, images=torch.tensor(ids)).tokens for seed, ids in ((0, [0, 1, 1]), (1, [0, 1, 2]))]
    assert torch.equal(runs[0][1], runs[0][2]) and not torch.equal(runs[0][0], runs[0][1]) and not torch.equal(runs[0][0], runs[1][0])
