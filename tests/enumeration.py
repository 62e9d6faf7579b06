"""Drives the real `loop.round` through every outcome of its noise, on tabular models, to get the exact law of what it decodes.

One image is many rows: each row of a batched round is one state of the image together with one script of outcomes (which coins fall, which
tokens are drawn). A script has a probability; rows whose states have become equal are merged.
"""
from __future__ import annotations

from collections import defaultdict
from itertools import count, product

import torch
import torch.nn.functional as F

from hbsjd.decoding import loop
from hbsjd.decoding.state import State
from hbsjd.decoding.types import Policy


class ForkingNoise:
    """Answers rules and drafts from one script per row, and keeps the probability of having been answered so.

    What cannot be seen (past the end of the image, in a finished row, beyond a narrow window) always has outcome 0.
    """

    def __init__(self, coins_BW, draws_BL, picks_BW):
        self.coins, self.draws, self.picks = coins_BW, draws_BL, picks_BW
        self.probability = torch.ones(len(coins_BW), dtype=torch.float64)

    def coin(self, heads_RW, window):
        return self.answer(self.coins, window, seen(window)[:, :-1], lambda fallen: torch.where(fallen, heads_RW, 1 - heads_RW))

    def draw(self, scores_RLV, window):
        p_RLV = scores_RLV.softmax(-1)
        return self.answer(self.draws, window, seen(window), lambda drawn: p_RLV.gather(-1, drawn[..., None])[..., 0])

    def pick(self, count, window):
        if self.picks is None:  # the draft always has something to copy
            return torch.zeros_like(window.drafts_RW)
        tail_RW = torch.arange(window.drafts_RW.shape[1]) >= window.recycled_R[:, None]
        return self.answer(self.picks, window, seen(window)[:, :-1] & tail_RW, lambda picked: torch.full(picked.shape, 1 / count, dtype=torch.float64))

    def answer(self, script, window, seen, probability_of):
        script = script[window.index_R]
        outcome, beyond = script[:, : seen.shape[1]], script[:, seen.shape[1] :]
        p = torch.where(seen, probability_of(outcome).double(), (outcome == 0).double())
        self.probability[window.index_R] *= p.prod(1) * (beyond == 0).all(1)
        return outcome


def seen(window):
    """[R, L]: predictions that stand inside the image."""
    return window.positions_RL < (window.cursor_R + window.remaining_R)[:, None]


def exact_law(model, method, prefix=(), policy=None, condition=0, finished=lambda round_, leaves: 0) -> dict[tuple[int, ...], float]:
    """Law of one whole image under `method`, every random outcome enumerated. `finished` adds that many finished rows to a round, so
    that a hybrid execution can be made to switch."""
    V, T, W = model.config.vocab_size, model.config.block_size, method.window.W
    policy = policy or Policy(method.rule.mode)
    state = one_row(model, method, prefix, policy, condition)
    weights, law = torch.ones(1, dtype=torch.float64), defaultdict(float)
    asks = asks_for_uniform(method.draft, len(prefix))
    script = list(product(product((False, True), repeat=W), product(range(V), repeat=W + 1), product(range(V if asks else 1), repeat=W)))
    coins, draws, picks = (torch.tensor(part) for part in zip(*script))
    for round_ in count():
        leaves = len(weights) * len(script)
        extra = finished(round_, leaves)
        parents = torch.cat([torch.arange(len(weights)).repeat_interleave(len(script)), torch.zeros(extra, dtype=torch.long)])
        select(state, parents)
        state.cursor[leaves:] = T
        state.read(torch.ones((), dtype=torch.bool))
        scripts = [F.pad(part.repeat(len(weights), 1), (0, 0, 0, extra)) for part in (coins, draws, picks)]
        noise = ForkingNoise(*scripts[:2], scripts[2] if asks else None)
        loop.round(state, noise)
        weights = weights[parents] * noise.probability
        weights[leaves:] = 0
        for row in (state.cursor == T).nonzero()[:, 0].tolist():
            law[tuple(state.tokens[row, :T].tolist())] += weights[row].item()
        keep, weights = merge(state, weights)
        if not len(keep):
            return law
        select(state, keep)


def asks_for_uniform(draft, prefix: int) -> bool:
    """Whether a draft can have nothing to copy; where it cannot, its uniform tokens are never used and need no enumeration."""
    return prefix < {"History": lambda: draft.H, "RepeatLeft": lambda: 1, "Uniform": lambda: 1 << 30}[type(draft).__name__]()


def one_row(model, method, prefix, policy, condition) -> State:
    prefix_BP, start_B = torch.tensor([list(prefix)], dtype=torch.long), torch.tensor([len(prefix)])
    cache = model.prefill(torch.tensor([condition]), prefix_BP, start_B, model.config.block_size + method.window.W + 1)
    return State(model, cache, method, policy, prefix_BP, start_B, torch.zeros(1, dtype=torch.long), model.config.block_size)


def select(state: State, rows: torch.Tensor) -> None:
    """Keep (and repeat) rows of a rollout."""
    for name in ("tokens", "start", "cursor", "image", "round", "drafts", "recycled"):
        setattr(state, name, getattr(state, name)[rows])
    state.q = None if state.q is None else state.q[rows]
    state.cache.select(rows)
    state.trace.clear()


def merge(state: State, weights) -> tuple[torch.Tensor, torch.Tensor]:
    """One row for each distinct unfinished state, with the sum of the weights."""
    alive = ((weights > 0) & (state.cursor < state.length)).nonzero()[:, 0]
    W = state.drafts.shape[1]
    live = torch.arange(W) < state.recycled[alive, None]
    parts = [state.cursor[alive, None].double(), state.tokens[alive, :-1].double(), torch.where(live, state.drafts[alive], -1).double()]
    if state.q is not None:
        parts.append((state.q[alive] * live[..., None]).flatten(1).mul(1e12).round())
    rows, inverse = torch.unique(torch.cat(parts, dim=1), dim=0, return_inverse=True)
    total = torch.zeros(len(rows), dtype=torch.float64).index_add_(0, inverse, weights[alive])
    first = torch.full((len(total),), len(alive)).scatter_reduce_(0, inverse, torch.arange(len(alive)), "amin")
    return alive[first], total


def total_variation(law: dict, target: dict) -> float:
    return 0.5 * sum(abs(law.get(image, 0.0) - target.get(image, 0.0)) for image in law.keys() | target.keys())
