"""Keyed noise: every random number is a function of (seed, image, position, own round where the rule needs it, purpose), nothing else.

So an image's noise does not depend on the batch it is in, on which rows a round runs, or on the order of anything. A 64-bit row key is
hashed with the candidate's number in integer arithmetic (the finaliser of splitmix64); its upper 32 bits k give v = (k + 1/2) 2^-32, so that
-log(-log1p(-v)) is always finite.
"""
from __future__ import annotations

from dataclasses import dataclass

import torch

from hbsjd.decoding.types import Window

GOLDEN = 0x9E3779B97F4A7C15
COIN, DRAW, SHARED, PICK, LOT, STEP = range(1, 7)  # purposes: independent streams


@dataclass(frozen=True)
class KeyedNoise:
    """`seed` is any integer; its low 64 bits count. Rules and drafts ask for decisions, not for numbers, so that a test can enumerate them."""

    seed: int

    def coin(self, heads_RW: torch.Tensor, window: Window) -> torch.Tensor:
        """True with the given probability, independent for each draft and round."""
        return uniform(self.per_round(COIN, window)[:, :-1], 1)[..., 0] < heads_RW

    def draw(self, scores_RLV: torch.Tensor, window: Window) -> torch.Tensor:
        """Tokens [R, L] from softmax(scores), independent for each prediction and round."""
        return perturbed_argmax(scores_RLV, self.per_round(DRAW, window))

    def shared(self, scores_RLV: torch.Tensor, window: Window) -> torch.Tensor:
        """Tokens [R, L] from softmax(scores), with noise that stays with the image and position from round to round."""
        return perturbed_argmax(scores_RLV, row_keys(self.seed, SHARED, window.image_R[:, None], window.positions_RL))

    def pick(self, count: int, window: Window) -> torch.Tensor:
        """For each draft a token [R, W], uniform on 0..count - 1, independent for each round."""
        return integers(self.per_round(PICK, window)[:, :-1], 1)[..., 0] * count >> 32

    def lot(self, number: int) -> float:
        """The number-th lot of the rollout, uniform in (0, 1), drawn on the host: it belongs to no image."""
        return uniform(row_keys(self.seed, LOT, torch.tensor(0), torch.tensor(number)), 1).item()

    def per_round(self, purpose: int, window: Window) -> torch.Tensor:
        return row_keys(self.seed, purpose, window.image_R[:, None], window.positions_RL, window.round_R[:, None])


def row_keys(seed: int, purpose: int, image, position, own_round=0) -> torch.Tensor:
    """The 64-bit key (int64, all bits in use) of a row of noise, for integer tensors that broadcast against each other."""
    key = mix(mix(image ^ signed(seed * GOLDEN)) ^ (own_round * 8 + purpose))
    return mix(key + position * signed(GOLDEN))


def perturbed_argmax(scores_RLV: torch.Tensor, keys_RL: torch.Tensor) -> torch.Tensor:
    """argmax(scores + Gumbel noise) is a draw from softmax(scores).

    On a CPU, where looking is free, noise is made only for the candidates that a filter or a residual leaves.
    """
    V = scores_RLV.shape[-1]
    if scores_RLV.device.type == "cpu":
        possible = (scores_RLV > -torch.inf).flatten()
        if 4 * possible.count_nonzero() < len(possible):
            place = possible.nonzero()[:, 0]
            noise = to_gumbel(hashed(keys_RL.flatten()[place // V], place % V)).to(scores_RLV.dtype)
            return scores_RLV.flatten().index_add(0, place, noise).view_as(scores_RLV).argmax(-1)
    return gumbel(keys_RL, V).to(scores_RLV.dtype).add_(scores_RLV).argmax(-1)


def gumbel(keys: torch.Tensor, count: int) -> torch.Tensor:
    """Standard Gumbel noise [..., count], float64."""
    return to_gumbel(integers(keys, count))


def to_gumbel(k: torch.Tensor) -> torch.Tensor:
    return to_uniform(k).neg_().log1p_().neg_().log_().neg_()


def uniform(keys: torch.Tensor, count: int) -> torch.Tensor:
    """v [..., count] in (0, 1), float64."""
    return to_uniform(integers(keys, count))


def to_uniform(k: torch.Tensor) -> torch.Tensor:
    return k.double().add_(0.5).mul_(2.0**-32)


def integers(keys: torch.Tensor, count: int) -> torch.Tensor:
    """k [..., count] in 0..2^32 - 1."""
    return hashed(keys[..., None], torch.arange(count, device=keys.device))


def hashed(keys: torch.Tensor, candidates: torch.Tensor) -> torch.Tensor:
    """k of the given candidates of the given keys, which broadcast against each other."""
    return shift(mix(keys + (candidates + 1) * signed(GOLDEN)), 32)


def mix(x: torch.Tensor) -> torch.Tensor:
    """The finaliser of splitmix64: a bijection of 64-bit integers in which every input bit moves every output bit."""
    x = shift(x, 30).bitwise_xor_(x).mul_(signed(0xBF58476D1CE4E5B9))
    x = shift(x, 27).bitwise_xor_(x).mul_(signed(0x94D049BB133111EB))
    return shift(x, 31).bitwise_xor_(x)


def shift(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical right shift of int64."""
    return (x >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def signed(x: int) -> int:
    """The int64 with the low 64 bits of x."""
    return (x + 2**63) % 2**64 - 2**63
