"""Drives the real `loop.round` through every outcome of its noise, on tabular models, to get the exact law of what it decodes.

The unit is a group of images that are decoded together (one or two). Each group of rows of a batched round is one state of these images
together with one script of outcomes (which coins fall, which tokens are drawn). A script has a probability; states that have become equal
are merged. A schedule sees one group at a time, as it would if the group were the whole batch.
"""
from __future__ import annotations

from collections import defaultdict
from copy import copy
from dataclasses import dataclass, replace
from itertools import count, product
from math import prod
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F

from hbsjd.decoding import loop
from hbsjd.decoding.rules import Greedy, Gumbel
from hbsjd.decoding.state import ROW, State
from hbsjd.decoding.types import Images, Policy


class ForkingNoise:
    """Answers rules and drafts from one script per row, and keeps the probability of having been answered so.

    What cannot be seen (past the end of the image, in a finished row, beyond a narrow window) and what is not asked for has outcome 0.
    `coupling_BTVV` is what is known of the noise that stays with a position: see `region`.
    """

    def __init__(self, scripts: dict[str, torch.Tensor], coupling_BTVV):
        self.scripts, self.coupling = scripts, coupling_BTVV
        self.probability = torch.ones(len(coupling_BTVV), dtype=torch.float64)
        self.asked = {kind: torch.zeros(len(coupling_BTVV), dtype=torch.bool) for kind in scripts}

    def coin(self, heads_RW, window):
        return self.answer("coin", window, seen(window)[:, :-1], lambda fallen: torch.where(fallen.bool(), heads_RW, 1 - heads_RW)).bool()

    def draw(self, scores_RLV, window):
        p_RLV = scores_RLV.softmax(-1)
        return self.answer("draw", window, seen(window), lambda drawn: p_RLV.gather(-1, drawn[..., None])[..., 0])

    def shared(self, scores_RLV, window):
        """A position's draws have the joint law that common Gumbel noise gives them."""
        at = window.index_R[:, None], window.positions_RL.clamp(max=self.coupling.shape[1] - 1)
        before = self.coupling[at]

        def conditional(drawn_RL):
            self.after = torch.minimum(before, wins(drawn_RL, scores_RLV.double()))
            return region(self.after) / region(before)

        drawn_RL = self.answer("draw", window, seen(window), conditional)
        self.coupling[at] = self.after.where(seen(window)[..., None, None], before)
        return drawn_RL

    def pick(self, count, window):
        if "pick" not in self.scripts:  # the draft always has something to copy
            return torch.zeros_like(window.drafts_RW)
        tail_RW = torch.arange(window.drafts_RW.shape[1]) >= window.recycled_R[:, None]
        return self.answer("pick", window, seen(window)[:, :-1] & tail_RW, lambda picked: torch.full(picked.shape, 1 / count, dtype=torch.float64))

    def lot(self, number):
        return 1.0  # nothing is tried by lot

    def answer(self, kind, window, seen, probability_of):
        script = self.scripts[kind][window.index_R]
        outcome, beyond = script[:, : seen.shape[1]], script[:, seen.shape[1] :]
        p = torch.where(seen, probability_of(outcome).double(), (outcome == 0).double())
        self.probability[window.index_R] *= p.prod(1) * (beyond == 0).all(1)
        self.asked[kind][window.index_R] = True
        return outcome

    def close(self) -> torch.Tensor:
        """The probabilities [B]; of what a row was not asked for, only the script of zeros counts."""
        for kind, script in self.scripts.items():
            self.probability *= self.asked[kind] | (script == 0).all(1)
        return self.probability


def wins(drawn_RL, scores_RLV):
    """What drawing token a by argmax(scores + noise) says of the noise: bounds [R, L, V, V] whose row a is new.

    With noise -log E (E standard exponential), a wins iff log E_a - log E_v <= scores_a - scores_v for every v.
    """
    won_RL1 = scores_RLV.gather(-1, drawn_RL[..., None])
    bounds_RLV = (won_RL1 - scores_RLV).where(won_RL1 > -torch.inf, -torch.inf)
    return bounds_RLV[..., None, :].where(F.one_hot(drawn_RL, scores_RLV.shape[-1]).bool()[..., None], torch.inf)


def region(bounds):
    """The probability [...] that V = 2 or 3 exponentials satisfy log E_a - log E_v <= bounds[..., a, v] for all a, v.

    E / sum(E) is uniform on the triangle of three numbers that sum to 1, so this is the share of its area that the bounds leave. In the
    plane of the logarithms they leave a hexagon: once no bound is looser than two others together, its corners can be written down.
    """
    V = bounds.shape[-1]
    d = F.pad(bounds, (0, 3 - V, 0, 3 - V), value=torch.inf).clamp(-60, 60)  # e^-60 of the triangle is nothing
    for k in range(3):
        d = torch.minimum(d, d[..., :, k, None] + d[..., None, k, :])
    (_, d01, d02), (d10, _, d12), (d20, d21, _) = (row.unbind(-1) for row in d.unbind(-2))
    corners = [(d02, d12), (d12 - d10, d12), (-d20, d10 - d20), (-d20, -d21), (d01 - d21, -d21), (d02, d02 - d01)]  # log E_0/E_2, log E_1/E_2; counterclockwise
    E_0, E_1 = (torch.stack(logs).exp_() for logs in zip(*corners))
    E_0, E_1 = E_0 / (E_0 + E_1 + 1), E_1 / (E_0 + E_1 + 1)
    share = (E_0 * E_1.roll(-1, 0) - E_1 * E_0.roll(-1, 0)).sum(0)
    return share.where((share > 1e-15) & (d.diagonal(dim1=-2, dim2=-1) >= 0).all(-1), 0)


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
    scripts = joint_scripts(method, V, W, prefixes)
    state = start(model, replace(method, schedule=Grouped(method.schedule, G)), prefixes, policy or Policy(method.rule.mode))
    coupling = torch.full((G, T, V, V), torch.inf, dtype=torch.float64)
    weights, law = torch.ones(1, dtype=torch.float64), defaultdict(float)
    for round_ in count():
        parents, chosen = possible(scripts, T - state.cursor.view(-1, G), state.recycled.view(-1, G)).nonzero(as_tuple=True)
        leaves = len(parents) * G
        extra = finished(round_, leaves) * G
        rows = torch.cat([(parents[:, None] * G + torch.arange(G)).flatten(), torch.zeros(extra, dtype=torch.long)])
        select(state, rows)
        state.cursor[leaves:] = T
        state.cursors = state.cursor.tolist()
        state.busy = list(range(len(rows)))
        told = {kind: F.pad(script[chosen].flatten(0, 1), (0, 0, 0, extra)) for kind, script in scripts.items()}
        noise = ForkingNoise(told, coupling[rows])
        loop.round(state, noise)
        weights = weights[parents] * noise.close()[:leaves].view(-1, G).prod(1)
        done = (state.cursor[:leaves] == T).view(-1, G).all(1)
        for group in (done & (weights > 0)).nonzero()[:, 0].tolist():
            law[tuple(map(tuple, state.tokens[group * G : group * G + G, :T].tolist()))] += weights[group].item()
        groups, weights = merge(state, noise.coupling, weights, done, G)
        if not len(groups):
            return law
        rows = (groups[:, None] * G + torch.arange(G)).flatten()
        select(state, rows)
        coupling = noise.coupling[rows]


def joint_scripts(method, V: int, W: int, prefixes) -> dict[str, torch.Tensor]:
    """Every outcome of a round's noise: {kind: [scripts, images, W or W + 1]}. What a known rule or draft cannot ask for is left out."""
    outcomes = {
        "coin": product(range(1 if isinstance(method.rule, Greedy | Gumbel) else 2), repeat=W),
        "draw": product(range(1 if isinstance(method.rule, Greedy) else V), repeat=W + 1),
    }
    if any(asks_for_uniform(method.draft, len(prefix)) for prefix in prefixes):
        outcomes["pick"] = product(range(V), repeat=W)
    together = list(product(product(*outcomes.values()), repeat=len(prefixes)))
    return {kind: torch.tensor([[image[i] for image in script] for script in together]) for i, kind in enumerate(outcomes)}


def possible(scripts, left_NG, recycled_NG):
    """[N, S]: which scripts may happen in which states: past the end of an image, and where a draft is recycled, only outcome 0 does."""
    may_NS = torch.ones(len(left_NG), len(scripts["draw"]), dtype=torch.bool)
    for kind, script_SGW in scripts.items():
        ahead = torch.arange(script_SGW.shape[-1])
        drawn_NGW = ahead < left_NG[..., None]
        if kind == "pick":
            drawn_NGW &= ahead >= recycled_NG[..., None]
        may_NS &= (drawn_NGW[:, None] | (script_SGW == 0)).all(-1).all(-1)
    return may_NS


def exact_law_through_slots(model, method, *prefixes: tuple[int, ...], slots: int, policy=None) -> dict[tuple, float]:
    """The same law of Probabilistic and Maximal one state at a time, so that rows may be refilled and moved and the window may change its mind."""
    V, T, W = model.config.vocab_size, model.config.block_size, method.window.W
    scripts = joint_scripts(method, V, W, [min(prefixes, key=len)])
    level, law = {None: (start(model, method, prefixes, policy or Policy(method.rule.mode), slots), 1.0)}, defaultdict(float)
    while level:
        before, level = level.values(), {}
        for (parent, weight), chosen in ((leaf, chosen) for leaf in before for chosen in product(*possible_by_row(scripts, leaf[0]))):
            told = {kind: script.new_zeros(slots, script.shape[-1]) for kind, script in scripts.items()}
            for kind, script in scripts.items():
                told[kind][parent.active] = script[list(chosen), 0]
            state, noise = clone(parent), ForkingNoise(told, torch.full((slots, T, V, V), torch.inf, dtype=torch.float64))
            loop.round(state, noise)
            p = weight * noise.close().prod().item()
            if p > 0:
                state.settle()
                if state.active:
                    twin, already = level.get(key := identity(state), (state, 0.0))
                    level[key] = twin, already + p
                else:
                    law[tuple(map(tuple, state.out.tolist()))] += p
    return law


def possible_by_row(scripts, state: State) -> list[list[int]]:
    left_R, recycled_R = state.length - state.cursor[state.active], state.recycled[state.active]
    return [row.nonzero()[:, 0].tolist() for row in possible(scripts, left_R[:, None], recycled_R[:, None])]


def clone(state: State) -> State:
    twin = copy(state)
    for name in (*ROW, "out"):
        part = getattr(state, name)
        setattr(twin, name, part if part is None else part.clone())
    twin.cache = type(state.cache)(state.cache.tokens.clone(), state.cache.condition.clone())
    twin.cursors, twin.busy, twin.trace = list(state.cursors), list(state.busy), []
    return twin


def identity(state: State) -> tuple:
    """Equal for states that go on in the same way."""
    rows = []
    for row in state.active:
        live, cursor = int(state.recycled[row]), state.cursors[row]
        q = () if state.q is None else tuple(state.q[row, :live].mul(1e12).round().flatten().tolist())
        rows.append((row, int(state.owner[row]), tuple(state.tokens[row, :cursor].tolist()), tuple(state.drafts[row, :live].tolist()), q))
    return tuple(rows), state.waiting, state.out.numpy().tobytes(), repr(state.pace)


def asks_for_uniform(draft, prefix: int) -> bool:
    """Whether a draft can have nothing to copy; where it cannot, its uniform tokens are never used and need no enumeration."""
    return prefix < {"History": lambda: draft.H, "RepeatLeft": lambda: 1, "Uniform": lambda: 1 << 30}[type(draft).__name__]()


def start(model, method, prefixes, policy, slots: int | None = None) -> State:
    slots, start_N, condition_N = slots or len(prefixes), torch.tensor([len(prefix) for prefix in prefixes]), torch.arange(len(prefixes))
    prefix_NP = torch.nn.utils.rnn.pad_sequence([torch.tensor(prefix, dtype=torch.long) for prefix in prefixes], batch_first=True)
    cache = model.prefill(condition_N[:slots], prefix_NP[:slots], start_N[:slots], model.config.block_size + method.window.W + 1)
    return State(model, cache, method, policy, Images(condition_N, prefix_NP, start_N, condition_N), model.config.block_size, slots)


def select(state: State, rows: torch.Tensor) -> None:
    """Keep (and repeat) rows of a rollout."""
    for name in ROW:
        part = getattr(state, name)
        setattr(state, name, part if part is None else part[rows])
    state.rows = torch.arange(len(rows))
    state.cache.select(rows)
    state.trace.clear()


def merge(state: State, coupling, weights, done, G: int) -> tuple[torch.Tensor, torch.Tensor]:
    """One group for each distinct unfinished state, with the sum of the weights."""
    alive = ((weights > 0) & ~done).nonzero()[:, 0]
    rows = (alive[:, None] * G + torch.arange(G)).flatten()
    live = torch.arange(state.drafts.shape[1]) < state.recycled[rows, None]
    committed = torch.arange(state.length) < state.cursor[rows, None]
    known = coupling[rows].where(~committed[..., None, None], 0).flatten(1).mul(1e12).round()
    parts = [state.cursor[rows, None], state.tokens[rows, :-1] * committed, torch.where(live, state.drafts[rows], -1), known]
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
