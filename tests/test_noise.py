"""Keyed noise: uniform, independent in every part of its key, the same for any batch, and never infinite."""
import math
import shutil
from itertools import product
from types import SimpleNamespace

import pytest
import torch

from hbsjd.decoding import noise
from hbsjd.decoding.noise import COIN, DRAW, PICK, SHARED, KeyedNoise, gumbel, integers, row_keys, uniform

PURPOSES = (COIN, DRAW, SHARED, PICK)
SEEDS = [0, 1, -1, 2, 12345, -(2**63), 2**63 - 1, 2**63 + 5, 12345678901234567890]
N = 1 << 16


def key(seed=0, purpose=DRAW, image=0, position=0, own_round=0) -> torch.Tensor:
    return row_keys(seed, purpose, *map(torch.as_tensor, (image, position, own_round)))


def along(part: str, count: int) -> torch.Tensor:
    """v [count] with one part of the key running over 0..count - 1 and a single candidate each; or the candidates of one key."""
    return uniform(key(), count) if part == "candidate" else uniform(key(**{part: torch.arange(count)}), 1)[:, 0]


def window(images=(0, 1), cursors=(0, 0), width=3, rounds=(0, 0)) -> SimpleNamespace:
    """The parts of a window that noise reads."""
    return SimpleNamespace(
        image_R=torch.tensor(images), round_R=torch.tensor(rounds), positions_RL=torch.tensor(cursors)[:, None] + torch.arange(width + 1)
    )


# ---- uniform -----------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("byte", range(4))
@pytest.mark.parametrize("part", ["candidate", "image", "position", "own_round"])
def test_bytes_are_uniform(part, byte):
    """Chi-square with 255 degrees of freedom: mean 255, deviation 22.6."""
    k = (along(part, N) * 2**32 - 0.5).long()
    assert 0 <= k.min() and k.max() < 2**32
    counts = torch.bincount(k >> 8 * byte & 255, minlength=256)
    chi2 = float(((counts - N / 256) ** 2 / (N / 256)).sum())
    assert abs(chi2 - 255) < 5 * 22.6


def test_seeds_give_uniform_noise_too():
    v = torch.stack([uniform(key(seed=seed), 4)[0] for seed in range(2000)])
    assert abs(v.mean() - 0.5) < 5 * 12**-0.5 / 2000**0.5 and abs(v.var() - 1 / 12) < 0.01


# ---- independent -------------------------------------------------------------------------------------------------------------------------


def correlation(x: torch.Tensor, y: torch.Tensor) -> float:
    return float(torch.corrcoef(torch.stack([x, y]))[0, 1])


ANOTHER = [dict(seed=1), dict(seed=-1), dict(image=1), dict(image=2**40), dict(position=1), dict(own_round=1), dict(purpose=SHARED), dict(image=3, position=2)]


@pytest.mark.parametrize("other", ANOTHER, ids=str)
def test_streams_of_two_keys_are_uncorrelated(other):
    """Candidates are compared as they are and shifted by one: neither the same stream nor one that overlaps it."""
    x, y = gumbel(key(), N), gumbel(key(**other), N)
    for a, b in ((x, y), (x[1:], y[:-1]), (x[:-1], y[1:])):
        assert abs(correlation(a, b)) < 5 / N**0.5


@pytest.mark.parametrize("part", ["candidate", "image", "position", "own_round"])
@pytest.mark.parametrize("lag", [1, 2, 16])
def test_neighbours_are_uncorrelated(part, lag):
    v = along(part, N)
    assert abs(correlation(v[lag:], v[:-lag])) < 5 / N**0.5


def test_all_bits_of_neighbouring_keys_are_uncorrelated():
    bits = (integers(key(image=torch.arange(4096)), 1) >> torch.arange(32) & 1).double()
    assert (torch.corrcoef(torch.cat([bits[1:], bits[:-1]], dim=1).T).fill_diagonal_(0)).abs().max() < 6 / 4096**0.5


@pytest.mark.parametrize("seed", [0, 1, -1, 12345])
def test_no_two_keys_of_a_rollout_are_equal(seed):
    """Image, position, round and purpose taken together: one image's coins are not another one's draws."""
    keys = [key(seed, purpose, torch.arange(16)[:, None, None], torch.arange(32)[:, None], torch.arange(16)).flatten() for purpose in PURPOSES]
    assert len(torch.cat(keys).unique()) == 4 * 16 * 32 * 16


def test_no_two_keys_of_two_rollouts_are_equal():
    """Image 1 under seed 0 is not image 0 under seed 1."""
    keys = [key(seed, purpose, torch.arange(64)[:, None], torch.arange(16)).flatten() for seed in range(-16, 16) for purpose in PURPOSES]
    assert len(torch.cat(keys).unique()) == 32 * 4 * 64 * 16


@pytest.mark.parametrize("seed", [0, 1, 12345])
def test_no_image_shares_numbers_with_another(seed):
    """The numbers themselves: a row that is another one shifted would repeat them. Among n numbers of 32 bits about n^2 / 2^33 are equal by chance."""
    numbers = torch.cat([integers(key(seed, purpose, torch.arange(16)[:, None], torch.arange(32)), 64).flatten() for purpose in PURPOSES])
    assert len(numbers) - len(numbers.unique()) <= 20, f"{len(numbers) ** 2 / 2**33:.0f} are expected"


# ---- seeds -------------------------------------------------------------------------------------------------------------------------------


def test_seeds_of_any_sign_and_64_bits_are_distinct():
    streams = {tuple(integers(key(seed=seed), 4).tolist()) for seed in SEEDS}
    assert len(streams) == len(SEEDS)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_low_64_bits_of_a_seed_count(seed):
    assert torch.equal(integers(key(seed=seed), 4), integers(key(seed=seed + 2**64), 4))


def test_image_ids_of_any_sign_and_64_bits_are_distinct():
    images = torch.tensor([0, 1, -1, 2**40, 2**62, -(2**63), 2**63 - 1])
    assert len(integers(key(image=images), 1).unique()) == len(images)


# ---- integer arithmetic ------------------------------------------------------------------------------------------------------------------


def plain_mix(x: int) -> int:
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
    return x ^ x >> 31


def test_mix_is_splitmix64_in_unsigned_arithmetic():
    assert plain_mix(0x9E3779B97F4A7C15) == 0xE220A8397B1DCDAF, "the first output of splitmix64 from state 0"
    values = [0, 1, 2**63, 2**64 - 1, 0x9E3779B97F4A7C15] + [plain_mix(i) for i in range(50)]
    ours = noise.mix(torch.tensor([noise.signed(x) for x in values]))
    assert [x % 2**64 for x in ours.tolist()] == [plain_mix(x) for x in values]


def test_integers_are_the_upper_half_of_a_counter_stream():
    keys = torch.tensor([5, -7])
    expected = [[plain_mix((k + c * 0x9E3779B97F4A7C15) % 2**64) >> 32 for c in (1, 2, 3)] for k in keys.tolist()]
    assert integers(keys, 3).tolist() == expected


# ---- Gumbel ------------------------------------------------------------------------------------------------------------------------------


def test_gumbel_mean_variance_and_tail():
    g = gumbel(key(image=torch.arange(16)), N).flatten()
    deviation = math.pi / 6**0.5
    assert abs(g.mean() - 0.5772157) < 5 * deviation / len(g) ** 0.5
    assert abs(g.var() - deviation**2) < 5 * 2.1 * deviation**2 / len(g) ** 0.5
    for level in (-1, 0, 1, 3, 6):
        p = 1 - math.exp(-math.exp(-level))
        assert abs((g > level).double().mean() - p) < 5 * (p * (1 - p) / len(g)) ** 0.5 + 1e-7


def test_extreme_integers_are_finite(monkeypatch):
    monkeypatch.setattr(noise, "integers", lambda keys, count: torch.tensor([0, 1, 2**31, 2**32 - 2, 2**32 - 1]))
    v, g = uniform(key(), 5), gumbel(key(), 5)
    assert v.dtype == torch.float64 and 0 < v.min() and v.max() < 1
    assert v.tolist() == [(k + 0.5) / 2**32 for k in (0, 1, 2**31, 2**32 - 2, 2**32 - 1)]
    torch.testing.assert_close(g, torch.tensor([-math.log(-math.log1p(-x)) for x in v.tolist()], dtype=torch.float64), atol=0, rtol=1e-14)
    assert g.isfinite().all() and g.float().isfinite().all() and len(g.float().unique()) == 5
    for dtype in (torch.float32, torch.float64):
        assert noise.perturbed_argmax(torch.full((5,), -torch.inf, dtype=dtype).index_fill(0, torch.tensor(4), 0.0), key()) == 4, "filtered tokens stay out"


# ---- the same for any batch --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [1, 2])
def test_same_integers_for_any_layout_and_thread_count(threads):
    images, positions, rounds = torch.tensor([7, 0, 300]), torch.tensor([[0, 1, 2, 3], [9, 10, 11, 12], [255, 256, 257, 258]]), torch.tensor([0, 5, 2])
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        together = integers(key(3, DRAW, images[:, None], positions, rounds[:, None]), 16384)
        for row, column in product(range(3), range(4)):
            alone = integers(key(3, DRAW, images[row], positions[row, column], rounds[row]), 16384)
            assert torch.equal(together[row, column], alone)
    finally:
        torch.set_num_threads(before)
    fewer = integers(key(3, DRAW, images[:, None], positions, rounds[:, None]), 10)
    assert torch.equal(together[..., :10], fewer), "a candidate's number does not depend on how many there are"


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=[
    pytest.mark.slow, pytest.mark.skipif(not shutil.which("g++"), reason="needs a C++ compiler")])])
def test_same_integers_compiled(backend):
    keys = key(3, DRAW, torch.arange(3)[:, None], torch.arange(5))
    assert torch.equal(torch.compile(integers, backend=backend, fullgraph=True)(keys, 64), integers(keys, 64))
    compiled, eager = torch.compile(gumbel, backend=backend, fullgraph=True)(keys, 64), gumbel(keys, 64)
    assert ((compiled - eager).abs() <= 2 * torch.finfo(torch.double).eps * eager.abs().clamp(min=1)).all()


@pytest.mark.parametrize("left", [1, 3, 100, 1000])
def test_noise_of_the_surviving_candidates_alone_decides_alike(left):
    """A filter leaves few candidates: the CPU makes noise for those only, and the draw is what all the noise would give."""
    scores = torch.randn(4, 3, 1000, generator=torch.Generator().manual_seed(left))
    scores = scores.masked_fill(scores < scores.topk(left).values[..., -1:], -torch.inf)
    keys = key(3, SHARED, torch.arange(4)[:, None], torch.arange(3))
    assert torch.equal(noise.perturbed_argmax(scores, keys), (scores + gumbel(keys, 1000).float()).argmax(-1))


# ---- decisions ---------------------------------------------------------------------------------------------------------------------------


def decisions(seed: int, w) -> dict[str, torch.Tensor]:
    keyed, L = KeyedNoise(seed), w.positions_RL.shape[1]
    flat = torch.zeros(len(w.image_R), L, 50)
    return dict(coin=keyed.coin(torch.full((len(w.image_R), L - 1), 0.5), w), draw=keyed.draw(flat, w), shared=keyed.shared(flat, w), pick=keyed.pick(50, w))


def test_only_shared_noise_outlives_a_round():
    first, second = decisions(0, window(width=200)), decisions(0, window(width=200, rounds=(1, 4)))
    assert torch.equal(first["shared"], second["shared"])
    for name in ("coin", "draw", "pick"):
        same = (first[name] == second[name]).double().mean()
        assert same < (0.65 if name == "coin" else 0.1), name


def test_noise_belongs_to_image_and_position():
    """Row by row, and in windows that start elsewhere: what an image gets at a position is the same."""
    both = decisions(4, window(images=(7, 9), cursors=(2, 30), rounds=(1, 6)))
    for row, (image, cursor, own_round) in enumerate([(7, 2, 1), (9, 30, 6)]):
        alone, later = (decisions(4, window((image,), (c,), width, (own_round,))) for c, width in ((cursor, 3), (cursor + 2, 1)))
        for name, expected in both.items():
            assert torch.equal(alone[name][0], expected[row]), name
            assert torch.equal(later[name][0], expected[row, 2:]), name


def test_seed_image_and_position_each_matter():
    """A decision of 50 that ignored a part of its key would repeat along it."""
    w = window(images=range(40), cursors=[0] * 40, width=40, rounds=[0] * 40)
    for name in ("draw", "shared", "pick"):
        a, b = decisions(0, w)[name][:, :40], decisions(1, w)[name][:, :40]
        for x, y in ((a, b), (a[1:], a[:-1]), (a[:, 1:], a[:, :-1]), (a, a.T)):
            assert (x == y).double().mean() < 0.08, name


def test_decisions_of_different_purposes_differ():
    d = decisions(0, window(images=range(40), cursors=[0] * 40, width=40, rounds=[0] * 40))
    for x, y in ((d["draw"], d["shared"]), (d["draw"][:, :-1], d["pick"]), (d["shared"][:, :-1], d["pick"])):
        assert (x == y).double().mean() < 0.08


def test_coins_say_nothing_about_what_is_drawn():
    w, keyed = window(images=range(100), cursors=[0] * 100, width=100, rounds=[0] * 100), KeyedNoise(0)
    heads, even = keyed.coin(torch.full((100, 100), 0.5), w), torch.zeros(100, 101, 2)
    for tokens in (keyed.draw(even, w), keyed.shared(even, w), keyed.pick(2, w)):
        assert abs((heads == tokens[:, :100]).double().mean() - 0.5) < 5 * 0.5 / 100


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ["draw", "shared"])
def test_draws_follow_softmax(name, dtype):
    p = torch.tensor([0.5, 0.3, 0.15, 0.05, 0.0], dtype=dtype)
    w = window(images=range(100), cursors=[0] * 100, width=199, rounds=[0] * 100)
    tokens = getattr(KeyedNoise(1), name)(p.log().expand(100, 200, 5), w)
    share = torch.bincount(tokens.flatten(), minlength=5) / tokens.numel()
    assert tokens.shape == (100, 200) and tokens.dtype == torch.int64
    assert ((share - p).abs() <= 5 * (p * (1 - p) / tokens.numel()) ** 0.5).all()


@pytest.mark.parametrize("p", [0.0, 1e-12, 0.02, 0.5, 1 - 1e-12, 1.0])
def test_coins_land_as_often_as_they_should(p):
    w = window(images=range(100), cursors=[0] * 100, width=200, rounds=[0] * 100)
    heads = KeyedNoise(1).coin(torch.full((100, 200), p, dtype=torch.float64), w)
    assert heads.dtype == torch.bool and heads.shape == (100, 200)
    assert abs(heads.double().mean() - p) <= 5 * (p * (1 - p) / heads.numel()) ** 0.5 + 1e-12


@pytest.mark.parametrize("count", [1, 2, 7, 16384])
def test_picks_are_uniform_and_in_range(count):
    w = window(images=range(100), cursors=[0] * 100, width=200, rounds=[0] * 100)
    picks = KeyedNoise(2).pick(count, w)
    assert picks.shape == (100, 200) and 0 <= picks.min() and picks.max() < count
    assert abs(picks.double().mean() - (count - 1) / 2) <= 5 * ((count**2 - 1) / 12 / picks.numel()) ** 0.5
