"""Invariants 1 and 4: Greedy and Gumbel are autoregressive decoding, token for token, and noise belongs to the image."""
from dataclasses import replace
from itertools import product

import pytest
import torch
from equality import assert_same

import hbsjd
from hbsjd.decoding import reference
from hbsjd.decoding.drafts import History, RepeatLeft, Uniform
from hbsjd.decoding.execution import Compact, Full, Hybrid, Packed
from hbsjd.decoding.rules import Greedy, Gumbel, Maximal, Probabilistic
from hbsjd.decoding.schedules import Independent, Lockstep, Synchronous
from hbsjd.decoding.types import Method, Policy
from hbsjd.decoding.windows import Adaptive, Fixed
from hbsjd.models.guidance import Guided
from hbsjd.models.llamagen import random_model

SCHEDULES, EXECUTIONS, WINDOWS = (Independent(), Synchronous(), Lockstep()), (Full(), Compact(), Hybrid(0.6), Packed()), (1, 4, 16)
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


# A window that changes at almost every round, as its costs cross at some number of rows and its means are off
RESTLESS = Adaptive((0, 1, 3, 8), 2, {width: {1: 1 + width / 4, 10: 2 + width} for width in (0, 1, 3, 8)}, {0: 1.0, 1: 1.6, 3: 2.5, 8: 3.0})


@pytest.mark.parametrize("slots", [1, 2, 4, 5, 9])
@pytest.mark.parametrize("execution", EXECUTIONS, ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("rule, window", [(Greedy(), Fixed(4)), (Gumbel(), Fixed(4)), (Probabilistic(), Fixed(4)), (Maximal(), Fixed(4)),
                                          (Greedy(), RESTLESS), (Gumbel(), RESTLESS)], ids=lambda part: type(part).__name__)
def test_tokens_do_not_depend_on_slots(autoregressive, rule, window, execution, slots):
    method = Method(rule, History(5), Independent(), execution, window)
    got = hbsjd.rollout(tiny(), CONDITION, PREFIX, method, guidance=2.0, seed=7, slots=slots, logprobs=True)
    if rule in (Greedy(), Gumbel()):
        assert torch.equal(got.tokens, autoregressive["ar" if rule == Gumbel() else "ar_greedy", 2.0].tokens)
    else:
        at_once = hbsjd.rollout(tiny(), CONDITION, PREFIX, replace(method, execution=Full()), guidance=2.0, seed=7, logprobs=True)
        assert torch.equal(got.tokens, at_once.tokens) and torch.allclose(got.logprobs, at_once.logprobs, atol=1e-9)
    assert got.start.tolist() == [len(row) for row in PREFIX] and (got.logprobs[torch.arange(25) < got.start[:, None]] == 0).all()
    advance = got.rounds["advance"]
    assert torch.equal(advance.sum(0), got.length - got.start) and (got.rounds["active"] <= slots).all()
    assert (got.rounds["physical_rows"] <= 2 * slots).all() and got.prefills <= len(PREFIX)


def test_the_restless_window_changes():
    method = Method(Gumbel(), History(5), Independent(), Packed(), RESTLESS)
    assert len(hbsjd.rollout(tiny(), CONDITION, PREFIX, method, seed=7).rounds["window"].unique()) > 1


def test_packed_runs_no_idle_row_while_images_wait():
    prefix = [torch.arange(n) % 16 for n in (0, 6, 13, 1, 20, 3, 9, 24, 2, 17)]
    condition = torch.arange(10) % 4
    out = hbsjd.rollout(tiny(), condition, prefix, Method(Gumbel(), History(5), Independent(), Packed(), Fixed(4)), slots=3)
    assert torch.equal(out.rounds["physical_rows"], out.rounds["active"])
    last_admitted = int((out.rounds["proposed"] > 0).int().argmax(0).max())
    assert last_admitted > 10 and (out.rounds["active"][: last_admitted + 1] == 3).all()


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
