"""Drives the real `loop.round` through every outcome of its noise, on tabular models, to get the exact law of what it decodes.

The unit is a group of images that are decoded together (one or two). Each group of rows of a batched round is one state of these images
together with one script of outcomes (which coins fall, which tokens are drawn). A script has a probability; states that have become equal
are merged. A schedule sees one group at a time, as it would if the group were the whole batch.
"""
from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from itertools import count, product
from math import prod
from types import SimpleNamespace
from typing import Any

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

    def close(self, ran_R) -> torch.Tensor:
        """The probabilities [B]; a row that did not run was asked nothing, so only its script of zeros counts."""
        idle = torch.ones(len(self.probability), dtype=torch.bool).index_fill_(0, ran_R, False)
        scripts = [script for script in (self.coins, self.draws, self.picks) if script is not None]
        zeros = torch.stack([(script == 0).all(1) for script in scripts]).all(0)
        return torch.where(idle, zeros.double(), self.probability)


def seen(window):
    """[R, L]: predictions that stand inside the image."""
    return window.positions_RL < (window.cursor_R + window.remaining_R)[:, None]


@dataclass(frozen=True)
class Grouped:
    """A schedule applied to each group of rows by itself. Groups in the same situation are asked about once."""

    schedule: Any
    size: int

    def advance(self, able_R, window):
        rows = int(window.index_R.max()) // self.size * self.size + self.size
        full = torch.zeros(4, rows, dtype=torch.long)
        full[:, window.index_R] = torch.stack([able_R, window.cursor_R, window.start_R, window.remaining_R])
        situations, group = torch.unique(full.view(4, -1, self.size).permute(1, 0, 2), dim=0, return_inverse=True)
        advance = torch.stack([self.one(situation, window.block) for situation in situations])
        return advance[group].flatten()[window.index_R]

    def one(self, situation, block):
        able, cursor, start, remaining = situation
        return self.schedule.advance(able, SimpleNamespace(cursor_R=cursor, start_R=start, remaining_R=remaining, block=block))


def exact_law(model, method, *prefixes: tuple[int, ...], policy=None, finished=lambda round_, leaves: 0) -> dict[tuple, float]:
    """Law of the images (one per prefix, image i of condition i) decoded together under `method`: {(image, ...): probability}.

    `finished` adds that many finished rows to a round, so that a hybrid execution can be made to switch.
    """
    G, V, T, W = len(prefixes), model.config.vocab_size, model.config.block_size, method.window.W
    asks = any(asks_for_uniform(method.draft, len(prefix)) for prefix in prefixes)
    one_image = list(product(product((False, True), repeat=W), product(range(V), repeat=W + 1), product(range(V if asks else 1), repeat=W)))
    scripts = list(product(one_image, repeat=G))
    coins, draws, picks = (torch.tensor([[image[kind] for image in script] for script in scripts]) for kind in range(3))
    state = start(model, replace(method, schedule=Grouped(method.schedule, G)), prefixes, policy or Policy(method.rule.mode))
    weights, law = torch.ones(1, dtype=torch.float64), defaultdict(float)
    for round_ in count():
        leaves = len(weights) * len(scripts) * G
        extra = finished(round_, leaves) * G
        parents = torch.arange(len(weights)).repeat_interleave(len(scripts))
        select(state, torch.cat([(parents[:, None] * G + torch.arange(G)).flatten(), torch.zeros(extra, dtype=torch.long)]))
        state.cursor[leaves:] = T
        state.read(torch.zeros(1))
        told = [F.pad(part.repeat(len(weights), 1, 1).flatten(0, 1), (0, 0, 0, extra)) for part in (coins, draws, picks)]
        noise = ForkingNoise(*told[:2], told[2] if asks else None)
        ran = torch.arange(len(state.cursors))[method.execution.rows(state.active, len(state.cursors))]
        loop.round(state, noise)
        weights = weights[parents] * noise.close(ran)[:leaves].view(-1, G).prod(1)
        done = (state.cursor[:leaves] == T).view(-1, G).all(1)
        for group in (done & (weights > 0)).nonzero()[:, 0].tolist():
            law[tuple(map(tuple, state.tokens[group * G : group * G + G, :T].tolist()))] += weights[group].item()
        groups, weights = merge(state, weights, done, G)
        if not len(groups):
            return law
        select(state, (groups[:, None] * G + torch.arange(G)).flatten())


def asks_for_uniform(draft, prefix: int) -> bool:
    """Whether a draft can have nothing to copy; where it cannot, its uniform tokens are never used and need no enumeration."""
    return prefix < {"History": lambda: draft.H, "RepeatLeft": lambda: 1, "Uniform": lambda: 1 << 30}[type(draft).__name__]()


def start(model, method, prefixes, policy) -> State:
    start_B, condition = torch.tensor([len(prefix) for prefix in prefixes]), torch.arange(len(prefixes))
    prefix_BP = torch.nn.utils.rnn.pad_sequence([torch.tensor(prefix, dtype=torch.long) for prefix in prefixes], batch_first=True)
    cache = model.prefill(condition, prefix_BP, start_B, model.config.block_size + method.window.W + 1)
    return State(model, cache, method, policy, prefix_BP, start_B, condition, model.config.block_size)


def select(state: State, rows: torch.Tensor) -> None:
    """Keep (and repeat) rows of a rollout."""
    for name in ("tokens", "start", "cursor", "image", "round", "drafts", "recycled"):
        setattr(state, name, getattr(state, name)[rows])
    state.q = None if state.q is None else state.q[rows]
    state.cache.select(rows)
    state.rows = torch.arange(len(rows))
    state.trace.clear()


def merge(state: State, weights, done, G: int) -> tuple[torch.Tensor, torch.Tensor]:
    """One group for each distinct unfinished state, with the sum of the weights."""
    alive = ((weights > 0) & ~done).nonzero()[:, 0]
    rows = (alive[:, None] * G + torch.arange(G)).flatten()
    live = torch.arange(state.drafts.shape[1]) < state.recycled[rows, None]
    committed = torch.arange(state.length) < state.cursor[rows, None]
    parts = [state.cursor[rows, None], state.tokens[rows, :-1] * committed, torch.where(live, state.drafts[rows], -1)]
    if state.q is not None:
        parts.append((state.q[rows] * live[..., None]).flatten(1).mul(1e12).round())
    key = torch.cat([part.double() for part in parts], dim=1)
    states, inverse = torch.unique(key.view(len(alive), G * key.shape[1]), dim=0, return_inverse=True)
    total = torch.zeros(len(states), dtype=torch.float64).index_add_(0, inverse, weights[alive])
    first = torch.full((len(states),), len(alive)).scatter_reduce_(0, inverse, torch.arange(len(alive)), "amin")
    return alive[first], total


def target_law(model, *prefixes, scores=lambda logits: logits) -> dict[tuple, float]:
    """The autoregressive joint of the same images: it factorises."""
    joints = [model.joint(i, prefix, scores) for i, prefix in enumerate(prefixes)]
    return {images: prod(joint[image] for joint, image in zip(joints, images)) for images in product(*joints)}


def total_variation(law: dict, target: dict) -> float:
    return 0.5 * sum(abs(law.get(image, 0.0) - target.get(image, 0.0)) for image in law.keys() | target.keys())
