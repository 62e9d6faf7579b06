"""Speedup over autoregressive decoding against batch size and suffix length (paper: Tables 2, 4, 5; Fig. 1b left).

To extend the sweep, edit the constants below and run again: only the new rows are measured.
"""
from __future__ import annotations

import copy

import torch
from tqdm import tqdm

from hbsjd import bench, data
from hbsjd.decoding.execution import Hybrid
from hbsjd.models import checkpoints
from hbsjd.models.guidance import Guided
from hbsjd.results import Run

STEM = "01_speedup_vs_batch"
METHODS = ["ar_greedy", "ar", "sjd_lockstep", "sjd_synchronous", "hbsjd_full", "hbsjd", "hbsjd_probabilistic", "hbsjd_gumbel", "hbsjd_adaptive",
           "hbsjd_greedy_adaptive"]
LARGE = ["ar_greedy", "ar", "hbsjd", "hbsjd_probabilistic", "hbsjd_gumbel", "hbsjd_adaptive", "hbsjd_greedy_adaptive"]  # at the largest batch
SHORT = ["ar_greedy", "ar", "hbsjd", "hbsjd_probabilistic", "hbsjd_gumbel", "hbsjd_adaptive"]  # at prefix ratios other than HALF
GUIDANCE, HALF = 2.0, 0.5
BARE, BARE_TOKENS = 0.1, 48  # prefix ratio of the bare loop and its partner, and how many tokens they generate
SWEEP = {
    "smoke": dict(batches=[1, 4], ratios=[0.6], ratio_batch=4, dtype_batch=4, repeats=2, few=1, bare_batches=[4], bare_pairs=3, minutes=0.5),
    "small": dict(batches=[1, 4, 16, 64], ratios=[0.2, 0.4, 0.6, 0.75], ratio_batch=16, dtype_batch=4, repeats=5, few=2,
                  bare_batches=[16, 64], bare_pairs=21, minutes=8),
}
KEYS = ("method", "B", "prefix_ratio", "dtype", "repeat")


def cells(sweep: dict, fastest: dict[int, str]) -> list[dict]:
    """Every rollout to time, fewest at the largest batch, where the schedules are left to 03. At a batch size both sides use the dtype in which
    AR is faster; AR is timed in the other dtype too, and at one batch size so are the others. The bare loop is paired with AR on a few tokens."""
    few, most = sweep["few"], max(sweep["batches"])
    methods = dict.fromkeys(METHODS, sweep["repeats"])
    settings = [(B, HALF, fastest[B], methods if B < most else dict.fromkeys(LARGE, few)) for B in sweep["batches"]]
    B = sweep["ratio_batch"]
    settings += [(B, ratio, fastest[B], dict.fromkeys(SHORT, few)) for ratio in sweep["ratios"]]
    settings += [(B, BARE, fastest[B], dict.fromkeys(["ar", "bare_ar"], sweep["bare_pairs"])) for B in sweep["bare_batches"]]
    for B in sweep["batches"]:
        methods = SHORT if B == sweep["dtype_batch"] else ["ar"]
        settings += [(B, HALF, dtype, dict.fromkeys(methods, few)) for dtype in bench.DTYPES if dtype != fastest[B]]
    listed = {
        (method, B, ratio, dtype, repeat): None
        for B, ratio, dtype, repeats in settings for repeat in range(max(repeats.values())) for method, times in repeats.items() if repeat < times
    }
    return [dict(zip(KEYS, key)) for key in listed]


def measure(cell: dict, scene: data.Scene, model, seed: int, found: dict, length: int | None = None) -> dict:
    """One timed rollout. Every method of a repeat gets the same images, prefixes and noise."""
    B, T, name = cell["B"], model.config.block_size, cell["method"]
    given = int(cell["prefix_ratio"] * T)
    if cell["prefix_ratio"] == BARE:
        length = min(T, given + BARE_TOKENS)
    images = (torch.arange(B) + cell["repeat"] * B) % len(scene.codes)
    inputs = (scene.condition[images], scene.codes[images, :given])
    method = bench.fitted("ar" if name == "bare_ar" else name, found, model.config)
    hybrid_above = int(found["gamma"] * B) if isinstance(method.execution, Hybrid) else None
    if name == "bare_ar":
        counts, figures = bench.timed_bare_ar(Guided(model, GUIDANCE), *inputs, seed + cell["repeat"], length)
    else:
        out, figures = bench.timed_rollout(model, *inputs, method, seed=seed + cell["repeat"], length=length, guidance=GUIDANCE)
        counts = out.counts()
    return dict(
        model=scene.name, **cell, **bench.axes(method), W=method.window.W, H=method.draft.H, gamma=hybrid_above, guidance=GUIDANCE,
        temperature=1.0, top_k=0, top_p=1.0, T=T, seed=seed + cell["repeat"], compile=False, threads=torch.get_num_threads(), **figures, **counts,
    )


def main(args) -> None:
    sweep = SWEEP[args.scale]
    scene = data.scene(args.scale, args.device)
    weights, threads = checkpoints.fingerprint(scene.model), torch.get_num_threads()
    config = dict(scale=args.scale, model=scene.name, weights=weights, seed=args.seed, threads=threads, guidance=GUIDANCE)
    run = Run(STEM, args.scale, config, bench.device_name(args.device), KEYS, args.fresh)
    run.note(seed=args.seed, checkpoint_sha256=scene.sha256, driver=bench.driver(args.device))
    models = {name: copy.deepcopy(scene.model).to(dtype) for name, dtype in bench.DTYPES.items()}
    given = scene.codes[:, : int(HALF * scene.codes.shape[1])]
    fastest, calibrations = bench.calibrations(run, models, sorted({*sweep["batches"], sweep["ratio_batch"]}), scene.condition, given, GUIDANCE)

    todo = run.missing(cells(sweep, fastest))
    print(f"{STEM}: {len(todo)} rollouts to time on {args.device}, about {sweep['minutes'] * len(todo) / len(cells(sweep, fastest)):.1f} minutes")
    warm = set()
    for cell in tqdm(todo, desc=STEM, mininterval=1):
        inputs = (scene, models[cell["dtype"]], args.seed, calibrations[cell["B"]])
        kind = (cell["method"], cell["B"], cell["dtype"])
        if kind not in warm and cell["method"] != "bare_ar":  # a short one that is not kept
            measure(cell, *inputs, length=min(scene.codes.shape[1], int(cell["prefix_ratio"] * scene.codes.shape[1]) + 20))
            warm.add(kind)
        run.add(dict(scale=args.scale) | measure(cell, *inputs))
    run.finish()


if __name__ == "__main__":
    bench.run_experiment(main, bench.experiment(__doc__))
