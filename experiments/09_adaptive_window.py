"""Does the adaptive window find the best fixed one at every batch size, and does it never lose to AR? (beyond the paper)

To extend the sweep, edit the constants below and run again: only the new rows are measured.
"""
from __future__ import annotations

import copy
from collections import Counter
from dataclasses import replace

import torch
from tqdm import tqdm

from hbsjd import bench, data
from hbsjd.decoding.execution import Hybrid, Packed
from hbsjd.decoding.methods import METHODS
from hbsjd.decoding.types import Method
from hbsjd.decoding.windows import Fixed
from hbsjd.models import checkpoints
from hbsjd.results import Run

STEM = "09_adaptive_window"
# Of each rule: W = 0, the adaptive window, and the method of the fixed ones, which get the adaptive one's execution: Packed
RULES = [("ar", "hbsjd_adaptive", "hbsjd_gumbel"), ("ar_greedy", "hbsjd_greedy_adaptive", "hbsjd_packed")]
WIDTHS = [2, 4, 8, 16]
PAPER = "hbsjd_probabilistic"  # as the paper has it: W = 16, Hybrid
WIDE = 16                      # from here on a fixed window is slowest by far where the batch is large: fewer repeats, as of the paper's
GUIDANCE, HALF = 2.0, 0.5
SWEEP = {  # by batch size: repeats of AR and the adaptive window, of fixed ones, and the fewer ones
    "smoke": dict(repeats={1: (3, 3, 3), 4: (2, 2, 1)}, minutes=0.3),
    "small": dict(repeats={1: (9, 9, 9), 4: (9, 9, 9), 16: (9, 9, 3), 64: (9, 3, 1)}, minutes=12),
}
KEYS = ("method", "B", "W", "repeat")


def cells(sweep: dict) -> list[dict]:
    """Every rollout to time. A repeat runs all methods in turn, the adaptive window beside AR; every other repeat runs them backwards."""
    listed = []
    for B, (paired, often, few) in sweep["repeats"].items():
        times = {(PAPER, METHODS[PAPER].window.W): few}
        for ar, adaptive, fixed in RULES:
            times |= {(ar, 0): paired, (adaptive, METHODS[adaptive].window.W): paired} | {(fixed, W): few if W >= WIDE else often for W in WIDTHS}
        for repeat in range(paired):
            listed += [(method, B, W, repeat) for (method, W), most in list(times.items())[:: -1 if repeat % 2 else 1] if repeat < most]
    return [dict(zip(KEYS, cell)) for cell in listed]


def as_method(cell: dict, found: dict, config) -> Method:
    """The cell's method as it was calibrated; a fixed window runs packed."""
    method = bench.fitted(cell["method"], found, config)
    if cell["method"] in [fixed for *_, fixed in RULES]:
        return replace(method, execution=Packed(), window=Fixed(cell["W"]))
    return method


def tally(window: torch.Tensor) -> str:
    """How many rounds had each width: "0:12 2:30". The last ones are no wider than what is left of the image."""
    return " ".join(f"{width}:{rounds}" for width, rounds in sorted(Counter(window.tolist()).items()))


def measure(cell: dict, scene: data.Scene, model, seed: int, found: dict, length: int | None = None) -> dict:
    """One timed rollout. Every method of a repeat gets the same images, prefixes and noise."""
    B, T, seed = cell["B"], model.config.block_size, seed + cell["repeat"]
    images = (torch.arange(B) + cell["repeat"] * B) % len(scene.codes)
    inputs = (scene.condition[images], scene.codes[images, : int(HALF * T)])
    method = as_method(cell, found, model.config)
    out, figures = bench.timed_rollout(model, *inputs, method, seed=seed, length=length, guidance=GUIDANCE)
    return dict(
        model=scene.name, **cell, prefix_ratio=HALF, dtype=str(model.output.weight.dtype).removeprefix("torch."), **bench.axes(method), H=method.draft.H,
        gamma=int(found["gamma"] * B) if isinstance(method.execution, Hybrid) else None, guidance=GUIDANCE, temperature=1.0, top_k=0, top_p=1.0, T=T,
        seed=seed, compile=False, threads=torch.get_num_threads(), **figures, **out.counts(), widths=tally(out.rounds["window"]),
    )


def main(args) -> None:
    sweep, scene = SWEEP[args.scale], data.scene(args.scale, args.device)
    weights, threads, half = checkpoints.fingerprint(scene.model), torch.get_num_threads(), int(HALF * scene.codes.shape[1])
    config = dict(scale=args.scale, model=scene.name, weights=weights, seed=args.seed, threads=threads, guidance=GUIDANCE)
    run = Run(STEM, args.scale, config, bench.device_name(args.device), KEYS, args.fresh)
    run.note(seed=args.seed, checkpoint_sha256=scene.sha256, driver=bench.driver(args.device))
    models = {name: copy.deepcopy(scene.model).to(dtype) for name, dtype in bench.DTYPES.items()}

    todo, every = run.missing(cells(sweep)), len(cells(sweep))
    print(f"{STEM}: {len(todo)} of {every} rollouts to time on {args.device}, about {sweep['minutes'] * len(todo) / every:.1f} minutes")
    fastest, calibrations = bench.calibrations(run, models, list(sweep["repeats"]), scene.condition, scene.codes[:, :half], GUIDANCE)
    warm = set()
    for cell in tqdm(todo, desc=STEM, mininterval=1):
        B, kind = cell["B"], (cell["method"], cell["B"], cell["W"])
        inputs = (scene, models[fastest[B]], args.seed, calibrations[B])
        if kind not in warm:  # a short one that is not kept
            measure(cell, *inputs, length=half + 8)
            warm.add(kind)
        run.add(dict(scale=args.scale) | measure(cell, *inputs))
    run.finish()


if __name__ == "__main__":
    bench.run_experiment(main, bench.experiment(__doc__))
