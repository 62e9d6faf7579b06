"""Invariants 5 and 6: a rollout's log-probabilities are the teacher-forced ones, of the distribution that its policy names."""
import re
from functools import cache
from itertools import compress, product

import pytest
import torch

import hbsjd
from hbsjd.decoding import loop, rules
from hbsjd.decoding.drafts import History, RepeatLeft, Uniform
from hbsjd.decoding.execution import Compact, Full, Hybrid
from hbsjd.decoding.rules import Greedy, Gumbel, Maximal, Probabilistic
from hbsjd.decoding.sampling import scores
from hbsjd.decoding.schedules import Independent, Lockstep, Synchronous
from hbsjd.decoding.state import State
from hbsjd.decoding.types import Method, Policy
from hbsjd.decoding.windows import Fixed
from hbsjd.models.guidance import Guided
from hbsjd.models.llamagen import random_model

RULES, SCHEDULES, EXECUTIONS = (Greedy(), Gumbel(), Probabilistic(), Maximal()), (Independent(), Synchronous(), Lockstep()), (Full(), Compact(), Hybrid(0.6))
WINDOWS = ((0, History(5)), (1, Uniform()), (4, History(5)), (7, RepeatLeft()), (16, History(5)))  # 0 is autoregressive
USED = dict(guidance=2.0, temperature=0.7, top_k=5, top_p=0.8)
PAIRWISE = ((), ("guidance", "temperature"), ("guidance", "top_k"), ("temperature", "top_k", "top_p"), ("guidance", "top_p"))
CASES = [(*case, WINDOWS[n % 5], PAIRWISE[(n + n // 5) % 5]) for n, case in enumerate(product(RULES, SCHEDULES, EXECUTIONS))]  # every pair of values meets
NAMED = ("ar", "ar_greedy", "hbsjd", "hbsjd_gumbel", "hbsjd_probabilistic", "hbsjd_maximal")
CONDITION = torch.tensor([0, 3, 1, 4, 2])
PREFIX = [torch.arange(n) % 16 for n in (0, 6, 13, 1, 25)]


@cache
def tiny(dtype=torch.float64):
    return random_model("tiny", dim=32, vocab_size=16, block_size=25, num_classes=4).to(dtype)


def settings(names, mode="sample"):
    """The named ones of USED, as arguments of `rollout`; a greedy method takes guidance only."""
    return {name: USED[name] for name in names if mode == "sample" or name == "guidance"}


@torch.no_grad()
def teacher_forced(model, tokens_BT, policy):
    """The log-probability of every code at every position [B, T, V], by one forward over whole images, without a cache."""
    model = Guided(model, policy.guidance) if policy.guidance > 1 else model
    return scores(model(CONDITION, tokens_BT), policy).log_softmax(-1)


def check(out, model, **used):
    """The policy is what was asked for; the log-probabilities are teacher-forced ones under it, in their precision, and 0 on the prefix."""
    policy, generated = Policy(out.policy.mode, **used), torch.arange(out.tokens.shape[1]) >= out.start[:, None]
    want = teacher_forced(model, out.tokens, policy).gather(-1, out.tokens[..., None])[..., 0].where(generated, 0)
    assert out.policy == policy
    torch.testing.assert_close(out.logprobs, want, rtol=0, atol=1e-9 if want.dtype == torch.float64 else 1e-4)


@pytest.mark.parametrize("rule, schedule, execution, window, names", CASES, ids=str)
def test_logprobs_are_teacher_forced(rule, schedule, execution, window, names):
    (W, draft), used, model = window, settings(names, rule.mode), tiny()
    out = hbsjd.rollout(model, CONDITION, PREFIX, Method(rule, draft, schedule, execution, Fixed(W), bonus=W != 7), seed=7, logprobs=True, **used)
    check(out, model, **used)


@pytest.mark.parametrize("dtype, wide", [(torch.float64, torch.float64), (torch.float32, torch.float32), (torch.bfloat16, torch.float32)], ids=str)
@pytest.mark.parametrize("method, names", list(zip(NAMED, PAIRWISE[1:] + PAIRWISE[1:])))
def test_logprobs_are_float32_or_wider(method, names, dtype, wide):
    model, used = tiny(dtype), settings(names, hbsjd.METHODS[method].rule.mode)
    out = hbsjd.rollout(model, CONDITION, None, method, seed=3, logprobs=True, **used)
    assert out.logprobs.dtype == wide
    if dtype == torch.bfloat16:  # a forward of another width rounds its logits differently; the log-probabilities are not rounded again
        assert not torch.equal(out.logprobs, out.logprobs.bfloat16().float())
    else:
        check(out, model, **used)


@pytest.mark.parametrize("method", NAMED)
def test_asking_for_logprobs_changes_nothing_else(method):
    asks = ({}, dict(logprobs=None), dict(logprobs=True))
    without, none, asked = (hbsjd.rollout(tiny(), CONDITION, PREFIX, method, seed=1, guidance=2.0, **ask) for ask in asks)
    assert without.logprobs is None and none.logprobs is None and asked.logprobs.shape == asked.tokens.shape
    assert torch.equal(without.tokens, asked.tokens) and without.nfe == asked.nfe


@pytest.mark.parametrize("method", ["ar", "hbsjd_gumbel", "hbsjd_probabilistic", "hbsjd_maximal"])
@pytest.mark.parametrize("seed", range(2))
def test_a_filtered_token_is_never_sampled(method, seed):
    assert hbsjd.rollout(tiny(), CONDITION, PREFIX, method, seed=seed, top_k=2, logprobs=True).logprobs.isfinite().all()


@pytest.mark.parametrize("names", PAIRWISE, ids=str)
def test_the_distribution_sums_to_one(names):
    p = teacher_forced(tiny(), torch.arange(125).reshape(5, 25) % 16, Policy("sample", **settings(names))).exp()
    torch.testing.assert_close(p.sum(-1), torch.ones(5, 25, dtype=p.dtype))
    assert ((p > 0).sum(-1) <= (5 if "top_k" in names else 16)).all()


BUGS = {  # what log-probabilities are wrongly taken from, and the setting in which that shows; `calls` holds the last call's arguments and result
    "unguided": (("guidance",), lambda calls, scores_RLV: calls["fuse"][0][1][::2]),
    "unfiltered": (("top_k",), lambda calls, scores_RLV: calls["scores"][0][0]),
    "untempered": (("temperature",), lambda calls, scores_RLV: calls["scores"][0][0]),
    "the residual": ((), lambda calls, scores_RLV: calls["with_residual"][1]),
    "the position before": ((), lambda calls, scores_RLV: scores_RLV.roll(1, 1)),
    "rounded scores": ((), lambda calls, scores_RLV: scores_RLV.float()),
}


@pytest.mark.parametrize("names, bug", BUGS.values(), ids=BUGS)
def test_a_planted_bug_fails_the_check(monkeypatch, names, bug):
    def spy(home, name):
        original = getattr(home, name)
        monkeypatch.setattr(home, name, lambda *args: calls.update({name: (args, original(*args))}) or calls[name][1])

    calls, commit, roll = {}, State.commit, lambda: hbsjd.rollout(tiny(), CONDITION, PREFIX, "hbsjd_probabilistic", logprobs=True, **settings(names))
    for home, name in ((Guided, "fuse"), (loop, "scores"), (rules, "with_residual")):
        spy(home, name)
    right = roll()
    check(right, tiny(), **settings(names))
    monkeypatch.setattr(State, "commit", lambda *args: commit(*args[:-1], bug(calls, args[-1])))
    wrong = roll()
    assert torch.equal(wrong.tokens, right.tokens)
    with pytest.raises(AssertionError, match="not close|dtype"):
        check(wrong, tiny(), **settings(names))


@pytest.mark.parametrize("method", hbsjd.METHODS)
def test_a_greedy_rollout_is_no_sample(method):
    policy = hbsjd.rollout(tiny(), CONDITION[:1], method=method, length=2).policy
    if hbsjd.METHODS[method].rule == Greedy():
        with pytest.raises(ValueError, match="use a sampling method"):
            policy.require_sample()
    else:
        assert policy.require_sample() is None


@pytest.mark.parametrize("method", ["hbsjd", "hbsjd_gumbel"])
def test_the_distribution_names_what_is_used(method):
    words = dict(guidance="guided at 2", temperature="temperature 0.7", top_k="top-k 5", top_p="top-p 0.8")
    for chosen in product((False, True), repeat=4):
        used = settings(compress(USED, chosen), hbsjd.METHODS[method].rule.mode)
        named = hbsjd.rollout(tiny(), CONDITION[:1], method=method, length=2, **used).policy.distribution
        assert re.split(", | (?=guided)", named) == ["the model", *(words[name] for name in used)]


@pytest.mark.parametrize("method", ["hbsjd", "hbsjd_gumbel"])
def test_a_guided_model_brings_its_guidance(method):
    model = tiny()
    out = hbsjd.rollout(Guided(model, 2.0), CONDITION, PREFIX, method, seed=7, logprobs=True)
    assert out.policy.guidance == 2.0 and out.policy.distribution == "the model guided at 2"
    assert torch.equal(out.tokens, hbsjd.rollout(model, CONDITION, PREFIX, method, seed=7, guidance=2.0).tokens)
    check(out, model, guidance=2.0)
