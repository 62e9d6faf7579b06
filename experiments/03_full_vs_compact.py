"""Which rows a round runs, and who waits for whom: latency, schedules, executions, gamma, window, refill (paper: Tables 2, 3, 8; Figs. 2, 3).

To extend the sweep, edit the constants below and run again: only the new rows are measured.
"""
from __future__ import annotations

from dataclasses import replace
from itertools import chain

import pandas as pd
import torch
from tqdm import tqdm

from hbsjd import bench, data
from hbsjd.api import resolve
from hbsjd.calibration import IMAGES, committed_means, whole_keys
from hbsjd.decoding.execution import Hybrid
from hbsjd.decoding.methods import METHODS
from hbsjd.decoding.types import Method, Policy, Rollout
from hbsjd.decoding.windows import Adaptive, Fixed
from hbsjd.models import checkpoints
from hbsjd.models.guidance import Guided
from hbsjd.results import Run

STEM = "03_full_vs_compact"
EXECUTIONS = ["hbsjd_full", "hbsjd_compact", "hbsjd", "hbsjd_packed"]     # Table 3; at the largest batch in more repeats than the others
WAITING = ["ar_greedy", "sjd_lockstep", "sjd_synchronous"]                # Table 2
ADAPTIVE = ["hbsjd_greedy_adaptive", "hbsjd_adaptive"]                    # beyond the paper, with their baselines `ar_greedy` and `ar`
WIDE, NARROW = 16, 8                                                      # Hybrid at W = 8 is what the paper leaves out
NARROWED = ["hbsjd_full", "hbsjd", "hbsjd_packed"]
GAMMAS = [30 / 64, 38 / 64, 46 / 64]                                      # Table 8, as fractions of the batch, at the largest one
LATENCY = ["hbsjd_full", "hbsjd_compact", "hbsjd_packed"]                 # Fig. 3, at the largest batch
TRACED = ["sjd_lockstep", "sjd_synchronous", "hbsjd"]                     # Fig. 2, at the smallest batch
SERVED = [("batches", "hbsjd_full"), ("refill", "hbsjd_full"), ("refill", "hbsjd_packed")]  # many images through few slots
# Prefix ratio of repeat 0, 1, ...: the paper draws it anew for every step. The first three, and all five, are spread evenly over its range
RATIOS = [0.5, 0.25, 0.75, 0.375, 0.625]
GUIDANCE, HALF = 2.0, 0.5
SERVED_RATIO, SPREAD = 0.8, 0.15  # parts batches and refill: each image has a prefix of its own length, within this around the mean
SWEEP = {
    "smoke": dict(batches=[4, 8], repeats=2, execution_repeats=3, latency_repeats=2, served=16, slots=4, minutes=0.3),
    "small": dict(batches=[16, 64], repeats=2, execution_repeats=3, latency_repeats=3, served=256, slots=32, minutes=8),
}
KEYS = ("part", "method", "B", "slots", "W", "gamma", "active", "prefix_ratio", "repeat")


def cells(sweep: dict, gamma: dict[int, dict[int, int]]) -> list[dict]:
    """Everything to measure. `gamma` {batch: {W: images}} is where Compact begins to pay."""
    least, most = min(sweep["batches"]), max(sweep["batches"])
    listed = [("trace", *setting(method, least, gamma), HALF, 0) for method in TRACED]
    listed += [("latency", method, most, most, W, None, n, HALF, repeat) for repeat in range(sweep["latency_repeats"]) for W in (WIDE, NARROW)
               for method in LATENCY for n in grid(most) if (n == most) == (method == "hbsjd_full")]
    for B in sweep["batches"]:
        times = {("rollout", *setting(method, B, gamma)): sweep["repeats"] for method in [*WAITING, "ar", *ADAPTIVE]}
        times |= {("rollout", *setting(method, B, gamma, NARROW)): sweep["repeats"] for method in NARROWED}
        times |= {("gamma", "hbsjd", B, B, WIDE, round(share * B), None): sweep["repeats"] for share in GAMMAS if B == most}
        times |= {("rollout", *setting(method, B, gamma)): sweep["execution_repeats" if B == most else "repeats"] for method in EXECUTIONS}
        listed += [(*cell, ratio, repeat) for repeat, ratio in enumerate(RATIOS) for cell, repeats in times.items() if repeat < repeats]
    listed += [(part, method, sweep["served"], sweep["slots"], WIDE, None, None, SERVED_RATIO, 0) for part, method in SERVED]
    return [dict(zip(KEYS, cell)) for cell in listed]


def setting(method: str, B: int, gamma: dict, W: int | None = None) -> tuple:
    """(method, B, slots, W, gamma, active) of a rollout: the method's own window, and the calibrated gamma where it has one."""
    W = METHODS[method].window.W if W is None else W
    return method, B, B, W, gamma[B][W] if isinstance(METHODS[method].execution, Hybrid) else None, None


def grid(B: int) -> list[int]:
    """Numbers of active images at which a forward is timed."""
    return sorted({1, max(1, B - 1), *(max(1, B * eighth // 8) for eighth in range(1, 9))})


def calibrated(run: Run, scene: data.Scene, batches: list[int], device) -> tuple[dict, dict, dict]:
    """{batch: {W: gamma in images}} (Eq. 6), and the adaptive windows' costs {batch: {W: {rows: seconds}}} and prior {method: {W: mean}}.

    Measured once, the prior on the last images, and kept with the results, so that a resumed run decides alike.
    """
    model, last = Guided(scene.model, GUIDANCE), slice(-IMAGES, None)
    halves = scene.condition[last], scene.codes[last, : int(HALF * scene.codes.shape[1])]
    costs, gathered, prior = (whole_keys(run.facts.get(name, {})) for name in ("costs", "gathered", "prior"))
    adaptive = {method: resolve(method, model.config) for method in ADAPTIVE}
    widths = {WIDE, NARROW}.union(*(method.window.widths for method in adaptive.values()))
    for B in batches:
        if new := (widths - set(costs.get(B, {}))) | ({WIDE, NARROW} - set(gathered.get(B, {}))):
            found = bench.calibrate(model, grid(B), sorted(new), device, 3, gathered=tuple(new & {WIDE, NARROW}))
            costs[B], gathered[B] = costs.get(B, {}) | found["costs"], gathered.get(B, {}) | found["gathered"]
    for name, method in adaptive.items():
        if name not in prior:
            prior[name] = committed_means(model, method, Policy(method.rule.mode, GUIDANCE), method.window.widths, *halves)
    both = {B: dict(costs=costs[B], gathered=gathered[B]) for B in batches}
    gamma = {B: {W: round(bench.gamma(both[B], 2 * B, W) * 2 * B) // 2 for W in (WIDE, NARROW)} for B in batches}
    run.note(costs=costs, gathered=gathered, prior=prior, gamma=gamma)
    return gamma, costs, prior


def as_method(cell: dict, config, costs: dict, prior: dict) -> Method:
    """The cell's method with its window, its gamma, and what its adaptive window was calibrated to."""
    method = resolve(cell["method"], config)
    if isinstance(method.window, Adaptive):
        return replace(method, window=replace(method.window, costs=costs[cell["B"]], prior=prior[cell["method"]]))
    if cell["gamma"] is not None:
        method = replace(method, execution=Hybrid(cell["gamma"] / cell["B"]))
    return replace(method, window=Fixed(cell["W"]))


def given(cell: dict, scene: data.Scene) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Condition and real prefix of each image. The images of a repeat are the same for every method."""
    B, T = cell["B"], scene.model.config.block_size
    images = (torch.arange(B) + cell["repeat"] * B) % len(scene.codes)
    ratios = torch.full((B,), cell["prefix_ratio"], dtype=torch.double)
    if cell["part"] in ("batches", "refill"):
        ratios += SPREAD * (torch.arange(B) * 0.618034 % 1 * 2 - 1)  # evenly over the range, and over every batch
    return scene.condition[images], [codes[:length] for codes, length in zip(scene.codes[images], (ratios * T).int().tolist())]


def measure(cell: dict, scene: data.Scene, method: Method, seed: int, length: int | None = None) -> tuple[list[Rollout], dict]:
    """One timed rollout; of part `batches` one for every batch of `slots` images, and their sums."""
    (condition, prefix), ids = given(cell, scene), torch.arange(cell["B"], device=scene.condition.device)
    size = cell["slots"] if cell["part"] == "batches" else cell["B"]
    outs, columns = [], []
    for batch in (slice(start, start + size) for start in range(0, cell["B"], size)):
        keyed = dict(images=ids[batch], seed=seed, length=length, guidance=GUIDANCE, slots=cell["slots"])
        out, figures = bench.timed_rollout(scene.model, condition[batch], prefix[batch], method, **keyed)
        outs.append(out)
        columns.append(figures | out.counts())
    peak = columns[-1].pop("peak_mb")
    return outs, {name: sum(column[name] for column in columns) for name in columns[-1]} | dict(peak_mb=peak)


def forwards(todo: list[dict], model: Guided, device):
    """Rows of part `latency`: single forwards at half an image."""
    for repeat in dict.fromkeys(cell["repeat"] for cell in todo):
        chosen = [cell for cell in todo if cell["repeat"] == repeat]
        widths = sorted({cell["W"] for cell in chosen})
        found = bench.calibrate(model, grid(chosen[0]["B"]), widths, device, repeats=1, gathered=tuple(widths))
        for cell in chosen:
            n, kind = cell["active"], "gathered" if cell["method"] == "hbsjd_compact" else "costs"
            seconds = found[kind][cell["W"]][2 * n]
            counts = dict(nfe=1, prefills=None, rounds=1, physical_rows=2 * n, row_rounds=n, committed=None, accepted=None, proposed=None)
            yield cell | dict(seconds=seconds, forward_seconds=seconds, prefill_seconds=None, peak_mb=None) | counts


def progress(outs: list[Rollout]) -> pd.DataFrame:
    """Where each image stood after each round (0: before the first), and how many images the round ran, finished ones included."""
    (out,) = outs
    cursor = torch.cat([out.start[None], out.rounds["advance"]]).cumsum(0).cpu()
    round_, image = torch.cartesian_prod(*map(torch.arange, cursor.shape)).unbind(1)
    ran = torch.cat([torch.zeros(1, dtype=torch.long), out.rounds["physical_rows"] // 2])  # a guided image is two rows
    return pd.DataFrame(dict(round=round_, image=image, cursor=cursor.flatten(), ran=ran[round_]))


def occupancy(outs: list[Rollout]) -> pd.DataFrame:
    """How many images each round ran, and how many of them were unfinished."""
    active, physical = (torch.cat([out.rounds[name] for out in outs]) for name in ("active", "physical_rows"))
    return pd.DataFrame(dict(round=range(1, len(active) + 1), active=active, ran=physical // 2))


KEPT = {"trace": progress, "batches": occupancy, "refill": occupancy}  # what is kept of the rounds, in a file beside the rows


def rollouts(todo: list[dict], run: Run, scene: data.Scene, costs: dict, prior: dict, seed: int):
    """Rows of every other part, each after the file it may have beside it."""
    warm, T = set(), scene.model.config.block_size
    for cell in todo:
        part, name = cell["part"], cell["method"]
        method = as_method(cell, scene.model.config, costs, prior)
        if part == "rollout" and (name, cell["B"]) not in warm:  # a short one that is not kept
            measure(cell | dict(prefix_ratio=0.1), scene, method, seed, length=T // 10 + 8)
            warm.add((name, cell["B"]))
        outs, columns = measure(cell, scene, method, seed + cell["repeat"])
        if part in KEPT:
            KEPT[part](outs).to_csv(run.file(f"{part}-{name}-{cell['B']}-{cell['slots']}.csv"), index=False, lineterminator="\n")
        yield cell | columns


def main(args) -> None:
    sweep, scene = SWEEP[args.scale], data.scene(args.scale, args.device)
    threads = torch.get_num_threads()
    config = dict(scale=args.scale, model=scene.name, weights=checkpoints.fingerprint(scene.model), seed=args.seed, threads=threads, guidance=GUIDANCE)
    run = Run(STEM, args.scale, config, bench.device_name(args.device), KEYS, args.fresh)
    run.note(seed=args.seed, checkpoint_sha256=scene.sha256, driver=bench.driver(args.device))
    print(f"{STEM}: at most {sweep['minutes']} minutes on {args.device}")
    gamma, costs, prior = calibrated(run, scene, sweep["batches"], args.device)

    every = cells(sweep, gamma)
    todo = run.missing(every)
    print(f"{len(todo)} of {len(every)} rows to measure")
    single, timed = ([cell for cell in todo if (cell["part"] == "latency") == alone] for alone in (True, False))
    rows = chain(forwards(single, Guided(scene.model, GUIDANCE), args.device), rollouts(timed, run, scene, costs, prior, args.seed))
    fixed = dict(guidance=GUIDANCE, temperature=1.0, top_k=0, top_p=1.0, T=scene.model.config.block_size, compile=False, threads=threads)
    dtype = str(scene.model.output.weight.dtype).removeprefix("torch.")
    for row in tqdm(rows, desc=STEM, total=len(todo), mininterval=1):
        method = resolve(row["method"], scene.model.config)
        named = dict(scale=args.scale, model=scene.name) | bench.axes(method) | dict(H=method.draft.H, dtype=dtype, seed=args.seed + row["repeat"])
        run.add(named | fixed | row)
    run.finish()


if __name__ == "__main__":
    bench.run_experiment(main, bench.experiment(__doc__))
