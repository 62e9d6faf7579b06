"""Which drafts stand: by rule, window, draft, guidance and sampling; by place in the image and by entropy (paper: Tables 6, 7, 10).

Rollouts are counted, not timed. To extend a sweep, edit the constants below and run again: only the new rows are measured.
"""
from __future__ import annotations

from math import isqrt, log

import torch
from tqdm import tqdm

import hbsjd
from hbsjd import bench, data
from hbsjd.decoding.drafts import History, RepeatLeft, Uniform
from hbsjd.decoding.execution import Packed
from hbsjd.decoding.rules import Greedy, Gumbel, Maximal, Probabilistic
from hbsjd.decoding.schedules import Independent
from hbsjd.decoding.types import Method, Rollout, wide
from hbsjd.decoding.windows import Fixed
from hbsjd.models import checkpoints
from hbsjd.models.guidance import Guided
from hbsjd.results import Run

STEM = "02_acceptance"
B, W, GUIDANCE, HALF = 16, 16, 2.0, 0.5            # of every row that its part does not change; H is the grid's width
OFFSETS = [2 / 3, 5 / 6, 1, 7 / 6, 4 / 3]          # H in grid widths: 16, 20, 24, 28, 32 of 24 in the paper
GUIDANCES = [1.0, 1.5, 2.0, 4.0]
TEMPERATURES = [0.5, 1.0, 1.5]
TOP_KS = [16, 64, 0]
BIN = 0.5                                          # of entropy, in nats
SIZES = {
    "smoke": dict(windows=[2, 4, 16], repeats=1, window_repeats=2, minutes=0.2),
    "small": dict(windows=[2, 4, 8, 12, 16, 24, 32], repeats=2, window_repeats=3, minutes=6),
}
RULES = {"Greedy": Greedy(), "Probabilistic": Probabilistic(), "Maximal": Maximal(), "Gumbel": Gumbel()}
SAMPLED = ["Probabilistic", "Maximal", "Gumbel"]   # a greedy rollout takes no temperature and no top-k
SETTING = ("rule", "draft", "W", "H", "guidance", "temperature", "top_k", "prefix_ratio", "repeat")  # names a rollout
KEYS = ("part", *SETTING, "item")


def cells(size: dict, width: int, vocab_size: int) -> list[dict]:
    """Every row: for each rule and repeat, what its part changes of the default setting. Parts may count the same rollout."""
    default = dict(draft="History", W=W, H=width, guidance=GUIDANCE, temperature=1.0, top_k=0, prefix_ratio=HALF, item=None)
    parts = {
        "window": [dict(W=drafts) for drafts in size["windows"]],
        "offset": [dict(H=round(width * offset)) for offset in OFFSETS] + [dict(draft=name, H=None) for name in ("RepeatLeft", "Uniform")],
        "guidance": [dict(guidance=guidance) for guidance in GUIDANCES],
        "temperature": [dict(temperature=temperature) for temperature in TEMPERATURES],
        "top_k": [dict(top_k=top_k) for top_k in TOP_KS],
        "histogram": [dict(item=advance) for advance in range(1, W + 2)],
        "entropy": [dict(item=BIN * k) for k in range(int(log(vocab_size) / BIN) + 1)],
        "grid": [dict(prefix_ratio=0.0, item=position) for position in range(width**2)],
    }
    rules = dict.fromkeys(parts, list(RULES)) | dict(temperature=SAMPLED, top_k=SAMPLED, grid=["Greedy", "Gumbel"])
    repeats = dict.fromkeys(parts, size["repeats"]) | dict.fromkeys(["window", "histogram", "entropy", "grid"], size["window_repeats"])
    return [
        dict(part=part, rule=rule, repeat=repeat) | default | changed
        for part, changes in parts.items() for repeat in range(repeats[part]) for changed in changes for rule in rules[part]
    ]


def by_rollout(cells: list[dict]) -> list[list[dict]]:
    groups = {}
    for cell in cells:
        groups.setdefault(tuple(cell[name] for name in SETTING), []).append(cell)
    return list(groups.values())


def decode(cell: dict, scene: data.Scene, seed: int) -> tuple[Rollout, torch.Tensor]:
    """The rollout of a setting, and its classes. Every setting of a repeat gets the same images, prefixes and noise."""
    draft = History(cell["H"]) if cell["draft"] == "History" else {"RepeatLeft": RepeatLeft(), "Uniform": Uniform()}[cell["draft"]]
    method = Method(RULES[cell["rule"]], draft, Independent(), Packed(), Fixed(cell["W"]))
    images = (torch.arange(B) + cell["repeat"] * B) % len(scene.codes)
    condition, prefix = scene.condition[images], scene.codes[images, : int(cell["prefix_ratio"] * scene.codes.shape[1])]
    sampling = {name: cell[name] for name in ("guidance", "temperature", "top_k")}
    return hbsjd.rollout(scene.model, condition, prefix, method, seed=seed + cell["repeat"], **sampling), condition


def by_round(out: Rollout) -> dict[str, torch.Tensor]:
    """Counts of each image in each round. Examined are the drafts that stand and the first that does not: later ones cannot be committed."""
    advance, accepted, proposed = (out.rounds[name] for name in ("advance", "accepted", "proposed"))
    return dict(row_rounds=advance > 0, committed=advance, accepted=accepted, proposed=proposed, examined=accepted + (accepted < proposed).long())


def by_token(out: Rollout) -> dict[str, torch.Tensor]:
    """Counts of each token [B, T], 0 or 1: generated; a draft that stood; that, or what replaced a draft."""
    rounds, position = by_round(out), torch.arange(out.tokens.shape[1], device=out.tokens.device)
    cursor = out.start + rounds["committed"].cumsum(0) - rounds["committed"]
    ahead = position - cursor[..., None]
    reached = {name: ((ahead >= 0) & (ahead < rounds[name][..., None])).any(0) for name in ("accepted", "examined")}
    return dict(committed=position >= out.start[:, None]) | reached


@torch.no_grad()
def entropy(model, condition, tokens) -> torch.Tensor:
    """Nats of p at each token [B, T], teacher-forced."""
    return torch.special.entr(wide(model(condition, tokens)).softmax(-1)).sum(-1)


def itemized(cell: dict, out: Rollout, condition, model) -> tuple[dict, torch.Tensor]:
    """What the cell's part counts, and the item that each of these counts belongs to."""
    if cell["part"] == "histogram":
        counts = by_round(out)
        return counts, counts["committed"]
    if cell["part"] == "grid":
        return by_token(out), torch.arange(out.tokens.shape[1], device=out.tokens.device).expand_as(out.tokens)
    return by_token(out), entropy(Guided(model, cell["guidance"]), condition, out.tokens) // BIN * BIN


def measure(wanted: list[dict], scene: data.Scene, seed: int):
    """The wanted rows of one rollout: all its counts, or those that belong to the row's item."""
    out, condition = decode(wanted[0], scene, seed)
    whole = out.counts() | dict(examined=int(by_round(out)["examined"].sum()))
    for part in dict.fromkeys(cell["part"] for cell in wanted):
        of_part = [cell for cell in wanted if cell["part"] == part]
        if of_part[0]["item"] is None:
            yield of_part[0] | whole
            continue
        counts, item = itemized(of_part[0], out, condition, scene.model)
        for cell in of_part:
            yield cell | dict.fromkeys(whole) | {name: int(values[item == cell["item"]].sum()) for name, values in counts.items()}


def main(args) -> None:
    size, scene = SIZES[args.scale], data.scene(args.scale, args.device)
    config = dict(scale=args.scale, model=scene.name, weights=checkpoints.fingerprint(scene.model), seed=args.seed, B=B, bin=BIN)
    run = Run(STEM, args.scale, config, bench.device_name(args.device), KEYS, args.fresh)
    run.note(seed=args.seed, checkpoint_sha256=scene.sha256, driver=bench.driver(args.device))
    T, dtype, threads = scene.codes.shape[1], str(scene.model.output.weight.dtype).removeprefix("torch."), torch.get_num_threads()
    every = cells(size, isqrt(T), scene.model.config.vocab_size)
    todo, rollouts = by_rollout(run.missing(every)), len(by_rollout(every))
    print(f"{STEM}: {len(todo)} of {rollouts} rollouts to count on {args.device}, about {size['minutes'] * len(todo) / rollouts:.1f} minutes")
    fixed = dict(scale=args.scale, model=scene.name, schedule="Independent", execution="Packed", top_p=1.0, B=B, T=T, dtype=dtype, threads=threads)
    for wanted in tqdm(todo, desc=STEM, mininterval=1):
        for row in measure(wanted, scene, args.seed):
            run.add(fixed | row | dict(seed=args.seed + row["repeat"]))
    run.finish()


if __name__ == "__main__":
    bench.run_experiment(main, bench.experiment(__doc__))
