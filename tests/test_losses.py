"""Divergences: values worked out by hand, the direction of each, gradients against finite differences, and a sum that no chunk or micro-batch changes."""
import math
from functools import partial

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hbsjd.distillation.losses import DIVERGENCES, bidirectional_kl, divergence_sum, forward_kl, group_logp, jsd, reverse_kl, varkd_weights

ALL = DIVERGENCES | {f"jsd_{beta}": partial(jsd, beta=beta) for beta in (0, 0.1, 1)}
GROUPS = torch.tensor([2, 0, 2, 1, 1, 0, 2])
each_divergence = pytest.mark.parametrize("divergence", ALL.values(), ids=ALL)


def logp(*p: float) -> torch.Tensor:
    return torch.tensor([p], dtype=torch.float64).log()


def batch(seed: int, b: int = 5, t: int = 6, v: int = 7):
    """Student logits, teacher logits and the mask of suffixes of unequal length, all in float64."""
    generator = torch.Generator().manual_seed(seed)
    student, teacher = 2 * torch.randn(2, b, t, v, generator=generator, dtype=torch.float64)
    return student.requires_grad_(), teacher, torch.arange(t) >= torch.tensor([1, 4, 0, 3, 5])[:b, None]


def value_and_gradient(divergence, student, *args, **settings):
    total, count = divergence_sum(divergence, student, *args, **settings)
    return total, count, torch.autograd.grad(total, student)[0]


def close(ours, expected):
    torch.testing.assert_close(ours, torch.as_tensor(expected, dtype=ours.dtype), atol=1e-12, rtol=1e-12)


ln = math.log
TWO = (0.5, 0.5), (0.25, 0.75)  # S, T; M = (3/8, 5/8) at beta 1/2 and (7/16, 9/16) at beta 1/4
THREE = (0.5, 0.25, 0.25), (0.125, 0.125, 0.75)
WIDER = (0.5, 0.5, 0.0), (0.25, 0.25, 0.5)  # T has a code that S lacks; M = (3/8, 3/8, 1/4)
HAND = [
    (forward_kl, TWO, ln(1 / 2) / 4 + 3 * ln(3 / 2) / 4),
    (forward_kl, THREE, 3 * ln(3) / 4 - 3 * ln(2) / 8),
    (forward_kl, WIDER, math.inf),
    (reverse_kl, TWO, ln(2) / 2 + ln(2 / 3) / 2),
    (reverse_kl, THREE, 5 * ln(2) / 4 - ln(3) / 4),
    (reverse_kl, WIDER, ln(2)),
    (bidirectional_kl, TWO, ln(3) / 8),
    (bidirectional_kl, THREE, 7 * ln(2) / 16 + ln(3) / 4),
    (bidirectional_kl, WIDER, math.inf),
    (jsd, TWO, (ln(2 / 3) / 4 + 3 * ln(6 / 5) / 4 + ln(4 / 3) / 2 + ln(4 / 5) / 2) / 2),
    (jsd, WIDER, (ln(2 / 3) / 2 + ln(2) / 2 + ln(4 / 3)) / 2),
    (partial(jsd, beta=0.25), TWO, (ln(4 / 7) / 4 + 3 * ln(4 / 3) / 4) / 4 + 3 * (ln(8 / 7) / 2 + ln(8 / 9) / 2) / 4),
]


@pytest.mark.parametrize(("divergence", "pair", "expected"), HAND)
def test_by_hand(divergence, pair, expected):
    close(divergence(*(logp(*p) for p in pair)), [expected])


@each_divergence
def test_teacher_equal_to_student_gives_zero_and_no_gradient(divergence):
    student, _, mask = batch(0)
    total, count, gradient = value_and_gradient(divergence, student, student, mask)
    close(total, 0.0)
    close(gradient, torch.zeros_like(student))
    assert count == mask.sum() == 17


def test_beta_is_gkds():
    """Forward KL at 0 and reverse KL at 1, which are also what JSD / beta and JSD / (1 - beta) tend to; 1/2 is symmetric."""
    student, teacher = (x.log_softmax(-1).flatten(0, 1).detach() for x in batch(1)[:2])
    forward, reverse = forward_kl(student, teacher), reverse_kl(student, teacher)
    assert torch.equal(jsd(student, teacher, 0), forward) and torch.equal(jsd(student, teacher, 1), reverse) and (forward - reverse).abs().min() > 1e-3
    torch.testing.assert_close(jsd(student, teacher, 1e-6) / 1e-6, forward, atol=0, rtol=1e-3)
    torch.testing.assert_close(jsd(student, teacher, 1 - 1e-6) / 1e-6, reverse, atol=0, rtol=1e-3)
    close(jsd(student, teacher), jsd(teacher, student))
    close(jsd(student, teacher, 0.2), jsd(teacher, student, 0.8))
    assert (jsd(student, teacher) < math.log(2)).all()


@each_divergence
@pytest.mark.parametrize("groups", [None, GROUPS], ids=["codes", "groups"])
def test_gradient_against_finite_differences(divergence, groups):
    student, teacher, mask = batch(2, b=3, t=2)
    weights = torch.rand(mask.shape, generator=torch.Generator().manual_seed(2))
    assert torch.autograd.gradcheck(lambda x: divergence_sum(divergence, x, teacher, mask, weights, 1.3, groups, chunk=3)[0], student)


@each_divergence
def test_neither_chunk_nor_microbatch_changes_the_loss(divergence):
    student, teacher, mask = batch(3)
    weights, settings = varkd_weights(teacher, mask, tau=0.3), dict(temperature=0.7, groups_V=GROUPS)
    whole, count, gradient = value_and_gradient(divergence, student, teacher, mask, weights, **settings)
    for chunk in (4, 29):
        total, _, ours = value_and_gradient(divergence, student, teacher, mask, weights, **settings, chunk=chunk)
        close(total, whole)
        close(ours, gradient)
    parts = [value_and_gradient(divergence, *(x[rows] for x in (student, teacher, mask, weights)), **settings) for rows in (slice(2), slice(2, 5))]
    tokens = sum(part[1] for part in parts)
    assert tokens == count and parts[0][1] != parts[1][1]
    close(sum(part[0] / tokens for part in parts), whole / count)
    close(torch.cat([part[2] for part in parts]) / tokens, gradient / count)


def test_only_the_masked_in_tokens_count():
    """Logits before the suffix may be anything, and their gradient is 0; so may those of a token of weight 0, which still counts."""
    student, teacher, mask = batch(4)
    expected = sum(forward_kl(*(x[b, t][None].log_softmax(-1) for x in (student, teacher)))[0] for b, t in mask.nonzero().tolist())
    spoilt = student.detach().masked_fill(~mask[..., None], torch.nan).requires_grad_()
    total, count, gradient = value_and_gradient(forward_kl, spoilt, teacher.masked_fill(~mask[..., None], torch.nan), mask)
    close(total, expected)
    assert count == 17 and torch.equal(gradient.abs().sum(-1) > 0, mask)
    weights = torch.ones(5, 6).index_fill(0, torch.tensor([2]), 0.0)
    total, count, _ = value_and_gradient(forward_kl, student, teacher.index_fill(0, torch.tensor([2]), torch.nan), mask, weights)
    close(total, divergence_sum(forward_kl, student, teacher, mask & (weights > 0))[0])
    assert count == 17 and divergence_sum(forward_kl, student, teacher, mask & False)[0] == 0


def test_temperature_divides_both():
    student, teacher, mask = batch(5)
    close(divergence_sum(reverse_kl, student, teacher, mask, temperature=2.0)[0], divergence_sum(reverse_kl, student / 2, teacher / 2, mask)[0])


@each_divergence
@pytest.mark.parametrize("groups", [None, torch.tensor([*GROUPS, 3])], ids=["codes", "groups"])
def test_a_code_that_neither_has_changes_nothing(divergence, groups):
    student, teacher, mask = batch(6)
    total, _, gradient = value_and_gradient(divergence, student, teacher, mask, groups_V=None if groups is None else GROUPS)
    wider, teacher = (torch.nn.functional.pad(x.detach(), (0, 1), value=-torch.inf) for x in (student, teacher))
    ours, _, wider_gradient = value_and_gradient(divergence, wider.requires_grad_(), teacher, mask, groups_V=groups)
    close(ours, total)
    close(wider_gradient, torch.nn.functional.pad(gradient, (0, 1)))


def test_bf16_logits_are_widened_before_the_softmax():
    student, teacher, mask = batch(7, v=500)
    student, teacher = student.detach().bfloat16().requires_grad_(), teacher.bfloat16().requires_grad_()
    total, _ = divergence_sum(bidirectional_kl, student, teacher, mask)
    total.backward()
    assert total.dtype == torch.float32 and student.grad.dtype == torch.bfloat16 and teacher.grad is None
    torch.testing.assert_close(total.double(), divergence_sum(bidirectional_kl, student.double(), teacher.double(), mask)[0], atol=0, rtol=1e-5)


def test_varkd_weights():
    """alpha is 1 for a sure teacher, 0 for a uniform one, 1/2 for one that hesitates between 2 codes of 4.

    The paper sets alpha_t = 0 for all t > t', t' the first position with alpha < tau, so t' keeps its own; what follows stays 0 if alpha rises again.
    """
    sure, half, uniform = [0.0, -math.inf, -math.inf, -math.inf], [0.0, 0.0, -math.inf, -math.inf], [0.0] * 4
    teacher = torch.tensor([[uniform, half, sure, half], [half, uniform, sure, half], [half, sure, half, sure]]).bfloat16()
    mask = torch.tensor([[False, True, True, True], [True, True, True, True], [False, False, True, True]])
    torch.testing.assert_close(varkd_weights(teacher, mask), torch.tensor([[0, 0.5, 1, 0.5], [0.5, 0, 0, 0], [0, 0, 0.5, 1]]))
    for chunk in (1, 5, 100):
        torch.testing.assert_close(varkd_weights(teacher, mask, 0.6, chunk), torch.tensor([[0, 0.5, 0, 0], [0.5, 0, 0, 0], [0, 0, 0.5, 0]]))


def test_varkd_by_hand():
    """Groups {0, 1} and {2}: S = (3/4, 1/4) and T = (1/4, 3/4), whose reverse KL is ln(3) / 2, weighted by alpha of the ungrouped teacher."""
    student, teacher, mask = logp(0.5, 0.25, 0.25)[None], logp(0.125, 0.125, 0.75)[None], torch.ones(1, 1, dtype=torch.bool)
    alpha = 1 - (0.25 * ln(8) + 0.75 * ln(4 / 3)) / ln(3)
    total, count = divergence_sum(reverse_kl, student, teacher, mask, varkd_weights(teacher, mask), groups_V=torch.tensor([0, 0, 1]))
    close(total / count, alpha * ln(3) / 2)


def test_groups_sum_probabilities():
    x = batch(9)[1][0].log_softmax(-1)
    close(group_logp(x, GROUPS).exp(), torch.stack([x.exp()[:, GROUPS == g].sum(-1) for g in range(3)], dim=-1))
    assert torch.equal(group_logp(x, torch.arange(7)), x), "one code a group"
    small = torch.tensor([[0.0, -500.0, -501.0, -math.inf]])  # exp(-500) is 0 in float32, and yet the group is not empty
    expected = torch.tensor([[0.0, -500 + math.log1p(math.exp(-1)), -math.inf]])
    torch.testing.assert_close(group_logp(small, torch.tensor([0, 1, 1, 2])), expected)


class PeakFloat32(TorchDispatchMode):
    """The most bytes of float32 storage that lived at once, views counted once."""

    def __init__(self):
        super().__init__()
        self.live, self.peak = {}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor) and x.dtype == torch.float32:
                self.live[x.untyped_storage().data_ptr()] = StorageWeakRef(x.untyped_storage()), x.untyped_storage().nbytes()
        self.live = {key: value for key, value in self.live.items() if not value[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self.live.values()))
        return out


@each_divergence
def test_memory_holds_float32_copies_of_one_chunk_only(divergence):
    student, teacher = torch.randn(2, 8, 32, 256, generator=torch.Generator().manual_seed(10)).bfloat16()
    student.requires_grad_()
    peaks = []
    for chunk in (8, 256):
        with PeakFloat32() as memory:
            divergence_sum(divergence, student, teacher, torch.ones(8, 32, dtype=torch.bool), chunk=chunk)[0].backward()
        peaks.append(memory.peak / (4 * 256))
    assert peaks[0] < 20 * 8 < 3 * 256 < peaks[1]
