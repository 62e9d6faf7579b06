"""scores(): the distribution that every method samples from, checked against filters written with sorted Python lists."""
import math
from itertools import product

import pytest
import torch

from hbsjd.decoding.sampling import scores
from hbsjd.decoding.types import Policy


def policy(**settings) -> Policy:
    return Policy("sample", **settings)


def kept(x: torch.Tensor) -> list[list[int]]:
    return [row.isfinite().nonzero().flatten().tolist() for row in x.reshape(-1, x.shape[-1])]


def logits(*p: float, dtype=torch.float32) -> torch.Tensor:
    return torch.tensor([math.log(x) for x in p], dtype=torch.float64).to(dtype)


def plain_probabilities(row: list[float], temperature: float, top_k: int, top_p: float) -> list[float]:
    """Temperature, then the k most probable and all that tie with the last of them, then the fewest that reach top_p of what is left."""
    row = [x / temperature for x in row]
    floor = sorted(row)[-top_k] if top_k else -math.inf
    weight = [math.exp(x) if x >= floor else 0.0 for x in row]
    p = [w / sum(weight) for w in weight]
    reached, nucleus = 0.0, set()
    for token in sorted(range(len(p)), key=lambda token: -p[token]):
        if reached >= top_p:
            break
        nucleus.add(token)
        reached += p[token]
    p = [x if token in nucleus else 0.0 for token, x in enumerate(p)]
    return [x / sum(p) for x in p]


@pytest.mark.parametrize(("temperature", "top_k", "top_p"), list(product([0.5, 1.0, 1.7], [0, 1, 4, 12], [0.05, 0.6, 0.95, 1.0])))
def test_against_plain_python(temperature, top_k, top_p):
    x = 2 * torch.randn(2, 3, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    ours = scores(x, policy(temperature=temperature, top_k=top_k, top_p=top_p)).softmax(-1)
    expected = [[plain_probabilities(row, temperature, top_k, top_p) for row in rows] for rows in x.tolist()]
    torch.testing.assert_close(ours, torch.tensor(expected, dtype=torch.float64), atol=1e-12, rtol=0)


def test_no_filter_changes_nothing():
    x = torch.randn(4, 9, generator=torch.Generator().manual_seed(1))
    assert torch.equal(scores(x, policy()), x)


def test_temperature_divides():
    x = logits(0.1, 0.2, 0.7)
    torch.testing.assert_close(scores(x, policy(temperature=0.5)).softmax(-1), torch.tensor([0.01, 0.04, 0.49]) / 0.54)


@pytest.mark.parametrize(("top_k", "tokens"), [(1, [0, 2]), (2, [0, 2]), (3, [0, 1, 2, 3]), (4, [0, 1, 2, 3]), (5, [0, 1, 2, 3, 4])])
def test_top_k_keeps_ties(top_k, tokens):
    assert kept(scores(torch.tensor([3.0, 1.0, 3.0, 1.0, 0.0]), policy(top_k=top_k))) == [tokens]


@pytest.mark.parametrize(
    ("top_p", "tokens"), [(1e-9, [1]), (0.49, [1]), (0.51, [1, 2]), (0.74, [1, 2]), (0.76, [1, 2, 3]), (0.99, [0, 1, 2, 3]), (1.0, [0, 1, 2, 3])]
)
def test_top_p_keeps_the_first_token_that_reaches_it(top_p, tokens):
    assert kept(scores(logits(0.05, 0.5, 0.25, 0.2), policy(top_p=top_p))) == [tokens]


def test_top_p_reached_exactly_is_enough():
    assert len(kept(scores(torch.zeros(4), policy(top_p=0.5)))[0]) == 2


def test_top_p_counts_what_top_k_left():
    """0.4, 0.3 | 0.2, 0.1: of the two that top-k leaves, the first holds 0.57 and is enough."""
    x = logits(0.4, 0.3, 0.2, 0.1)
    assert kept(scores(x, policy(top_p=0.55))) == [[0, 1]]
    assert kept(scores(x, policy(top_k=2, top_p=0.55))) == [[0]]
    assert kept(scores(x, policy(top_k=2, top_p=0.58))) == [[0, 1]]


def test_temperature_comes_before_the_filters():
    """At temperature 2 the probabilities 0.64, 0.2, 0.16 become 0.49, 0.27, 0.24."""
    x = logits(0.64, 0.2, 0.16)
    assert kept(scores(x, policy(top_p=0.6))) == [[0]]
    assert kept(scores(x, policy(top_p=0.6, temperature=2.0))) == [[0, 1]]


def test_each_row_has_its_own_filter():
    x = torch.stack([logits(0.9, 0.06, 0.04), logits(0.2, 0.35, 0.45)])
    assert kept(scores(x, policy(top_p=0.65))) == [[0], [1, 2]] and kept(scores(x, policy(top_k=1))) == [[0], [2]]


FILTERS = [dict(), dict(temperature=0.7), dict(top_k=3), dict(top_p=0.8), dict(temperature=0.7, top_k=3, top_p=0.8)]


@pytest.mark.parametrize("settings", FILTERS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_at_least_float32_and_the_input_is_untouched(dtype, settings):
    x = torch.randn(3, 2, 8, generator=torch.Generator().manual_seed(2)).to(dtype)
    before = x.clone()
    ours = scores(x, policy(**settings))
    assert torch.equal(x, before) and ours.shape == x.shape
    assert ours.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert torch.equal(ours, scores(x.float() if dtype != torch.float64 else x, policy(**settings))), "widened first, then filtered"
    assert (ours.isfinite().sum(-1) >= 1).all() and (ours.softmax(-1).sum(-1) - 1).abs().max() < 1e-6


def test_filters_hold_at_the_size_of_a_real_vocabulary():
    x = torch.randn(2, 16384, generator=torch.Generator().manual_seed(3))
    assert [len(row) for row in kept(scores(x, policy(top_k=2000)))] == [2000, 2000]
    p = scores(x, policy(top_p=0.9)).isfinite() * x.double().softmax(-1)
    smallest = p.where(p > 0, 1.0).amin(-1)
    assert (p.sum(-1) > 0.9 - 1e-4).all() and (p.sum(-1) - smallest < 0.9 + 1e-4).all()


@pytest.mark.parametrize("settings", FILTERS[2:], ids=str)
def test_ties_are_cut_the_same_way_in_any_batch(settings):
    """bf16 logits tie often: which of the equals stay may not depend on the rows beside them."""
    x = torch.randn(6, 4000, generator=torch.Generator().manual_seed(4)).bfloat16()
    together = scores(x, policy(**settings))
    assert all(torch.equal(together[row], scores(x[row : row + 1], policy(**settings))[0]) for row in range(len(x)))
