"""Speedup over autoregressive decoding against batch size and suffix length (paper: Tables 2, 4, 5; Fig. 1b left).

To extend the sweep, edit the constants below and run again: only the new rows are measured.
"""
from __future__ import annotations

import copy
from dataclasses import replace
from statistics import median

import torch
from tqdm import tqdm

from hbsjd import bench, calibration, data
from hbsjd.api import resolve
from hbsjd.decoding.execution import Hybrid
from hbsjd.decoding.types import Policy
from hbsjd.decoding.windows import Adaptive
from hbsjd.models import checkpoints
from hbsjd.models.guidance import Guided
from hbsjd.results import Run

STEM = "01_speedup_vs_batch"
METHODS = ["ar_greedy", "ar", "sjd_lockstep", "sjd_synchronous", "hbsjd_full", "hbsjd", "hbsjd_probabilistic", "hbsjd_gumbel", "hbsjd_adaptive",
           "hbsjd_greedy_adaptive"]
OFTEN = ["ar_greedy", "ar", "hbsjd_probabilistic", "hbsjd_adaptive", "hbsjd_greedy_adaptive"]  # the comparison in more repeats than the others
LARGE = ["ar_greedy", "ar", "hbsjd", "hbsjd_probabilistic", "hbsjd_gumbel", "hbsjd_adaptive", "hbsjd_greedy_adaptive"]  # at the largest batch
SHORT = ["ar_greedy", "ar", "hbsjd", "hbsjd_probabilistic", "hbsjd_gumbel", "hbsjd_adaptive"]  # at prefix ratios other than HALF
GUIDANCE, HALF = 2.0, 0.5
BARE, BARE_TOKENS = 0.1, 48  # prefix ratio of the bare loop and its partner, and how many tokens they generate
SWEEP = {
    "smoke": dict(batches=[1, 4], ratios=[0.6], ratio_batch=4, dtype_batch=4, often=2, few=1, bare_batches=[4], bare_pairs=3, minutes=0.5),
    "small": dict(batches=[1, 4, 16, 64], ratios=[0.2, 0.4, 0.6, 0.75], ratio_batch=16, dtype_batch=4, often=9, few=2,
                  bare_batches=[16, 64], bare_pairs=21, minutes=11),
}
KEYS = ("method", "B", "prefix_ratio", "dtype", "repeat")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def cells(sweep: dict, fastest: dict[str, str]) -> list[dict]:
    """Every rollout to time, fewest at the largest batch, where the schedules are left to 03. At a batch size both sides use the dtype in which
    AR is faster; AR is timed in the other dtype too, and at one batch size so are the others. The bare loop is paired with AR on a few tokens."""
    few, most = sweep["few"], max(sweep["batches"])
    often = {name: sweep["often"] if name in OFTEN else few for name in METHODS}
    settings = [(B, HALF, fastest[str(B)], often if B < most else dict.fromkeys(LARGE, few)) for B in sweep["batches"]]
    B = sweep["ratio_batch"]
    settings += [(B, ratio, fastest[str(B)], dict.fromkeys(SHORT, few)) for ratio in sweep["ratios"]]
    settings += [(B, BARE, fastest[str(B)], dict.fromkeys(["ar", "bare_ar"], sweep["bare_pairs"])) for B in sweep["bare_batches"]]
    for B in sweep["batches"]:
        methods = SHORT if B == sweep["dtype_batch"] else ["ar"]
        settings += [(B, HALF, dtype, dict.fromkeys(methods, few)) for dtype in DTYPES if dtype != fastest[str(B)]]
    listed = {
        (method, B, ratio, dtype, repeat): None
        for B, ratio, dtype, repeats in settings for repeat in range(max(repeats.values())) for method, times in repeats.items() if repeat < times
    }
    return [dict(zip(KEYS, key)) for key in listed]


def faster_dtype(models: dict, condition) -> str:
    """The dtype in which one guided autoregressive step is faster, three quarters into an image."""
    device, B, calls = condition.device, len(condition), {}
    for name, model in models.items():
        guided, P = Guided(model, GUIDANCE), 3 * model.config.block_size // 4
        given = torch.zeros(B, P, dtype=torch.long, device=device)
        cache = guided.prefill(condition, given, torch.full((B,), P, device=device), P + 2)
        positions = torch.full((B, 1), P - 1, device=device)
        calls[name] = lambda step=guided.step, cache=cache, positions=positions: step(torch.zeros_like(positions), positions, cache, slice(0, B))
    seconds = bench.interleaved(calls, repeats=41, device=device, warmup=3, twice=True)
    return "bfloat16" if median(b / f for b, f in zip(seconds["bfloat16"], seconds["float32"])) < 1 else "float32"


def calibrate(model, scene: data.Scene, B: int, device) -> dict:
    """Costs of a guided round at B images and fewer, gamma, and what a round commits at each width, greedily and sampled (of the last images)."""
    guided, widths, eighths = Guided(model, GUIDANCE), Adaptive().widths, sorted({max(1, B * eighth // 8) for eighth in range(1, 9)})
    found = bench.calibrate(guided, eighths, [16], device, gathered=(16,))
    costs = bench.calibrate(guided, sorted({1, max(1, B // 4), B}), list(widths), device)["costs"]
    policies = {mode: Policy(mode, GUIDANCE) for mode in ("greedy", "sample")}
    adaptive = {"greedy": "hbsjd_greedy_adaptive", "sample": "hbsjd_adaptive"}
    given = scene.condition[-calibration.IMAGES :], scene.codes[-calibration.IMAGES :, : int(HALF * scene.codes.shape[1])]
    prior = {mode: calibration.committed_means(guided, resolve(adaptive[mode], model.config), policy, widths, *given) for mode, policy in policies.items()}
    return dict(found, gamma=bench.gamma(found, 2 * B, 16), costs=costs, prior=prior)


def measure(cell: dict, scene: data.Scene, model, seed: int, found: dict, length: int | None = None) -> dict:
    """One timed rollout. Every method of a repeat gets the same images, prefixes and noise."""
    B, T, name = cell["B"], model.config.block_size, cell["method"]
    given = int(cell["prefix_ratio"] * T)
    if cell["prefix_ratio"] == BARE:
        length = min(T, given + BARE_TOKENS)
    images = (torch.arange(B) + cell["repeat"] * B) % len(scene.codes)
    inputs = (scene.condition[images], scene.codes[images, :given])
    method, hybrid_above = resolve("ar" if name == "bare_ar" else name, model.config), None
    if isinstance(method.execution, Hybrid):
        hybrid_above = int(found["gamma"] * B)
        method = replace(method, execution=Hybrid(found["gamma"]))
    if isinstance(method.window, Adaptive):
        method = replace(method, window=replace(method.window, costs=found["costs"], prior=found["prior"][method.rule.mode]))
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
    models = {name: copy.deepcopy(scene.model).to(dtype) for name, dtype in DTYPES.items()}

    # Which dtype; when Compact pays (Eq. 6); what a round costs and commits: measured once per batch size and kept with the results
    fastest, calibrations = dict(run.facts.get("fastest_dtype", {})), dict(run.facts.get("calibrations", {}))
    for B in sorted({*sweep["batches"], sweep["ratio_batch"]}):
        if str(B) not in calibrations:
            fastest[str(B)] = faster_dtype(models, scene.condition[:1].expand(B))
            calibrations[str(B)] = calibrate(models[fastest[str(B)]], scene, B, args.device)
            run.note(fastest_dtype=fastest, calibrations=calibrations)
    calibrations = calibration.whole_keys(calibrations)

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
