"""What a device makes of it, in a few minutes: exactness, AR against drafts, costs of a round, gamma, memory. Run by `python -m hbsjd.bench --device-check`."""
from __future__ import annotations

import copy
import time
from dataclasses import replace
from itertools import count

import pandas as pd
import torch
from tqdm import tqdm

from hbsjd import bench, calibration, data
from hbsjd.agreement import first_difference
from hbsjd.api import resolve
from hbsjd.decoding.execution import Hybrid
from hbsjd.decoding.methods import METHODS as METHOD_LINES
from hbsjd.decoding.types import Policy
from hbsjd.decoding.windows import Adaptive, interpolated
from hbsjd.models.checkpoints import fingerprint
from hbsjd.models.guidance import Guided
from hbsjd.models.llamagen import random_model
from hbsjd.results import Run

STEM, GUIDANCE = "device_check", 2.0
METHODS = ["ar", "ar_greedy", "hbsjd", "hbsjd_probabilistic", "hbsjd_gumbel", "hbsjd_adaptive", "hbsjd_greedy_adaptive"]
SIZES = {
    "full": dict(batches=[8, 16, 32, 64], widths=(0, 2, 4, 8, 16, 32), given=0.5, tokens=None, control=8, size="b", shape={}),
    "reduced": dict(batches=[2], widths=(0, 2, 4), given=0.9, tokens=8, control=2, size="tiny", shape=dict(block_size=576)),
}
KEYS = ("part", "model", "method", "dtype", "B", "W", "rows", "repeat")
EMPTY = dict(method=None, B=None, W=None, rows=None, repeat=0, seconds=None, forward_seconds=None, prefill_seconds=None, peak_mb=None, nfe=None,
             committed=None, row_rounds=None, value=None)


class Check:
    """One model in one dtype, with what is measured of it. `scene` gives real images, or (random weights) only a shape."""

    def __init__(self, name: str, model, scene: data.Scene, size: dict, dtype: str, device: str):
        self.name, self.size, self.dtype, self.device = name, size, dtype, device
        self.model = copy.deepcopy(model).to(device, bench.DTYPES[dtype])
        self.guided, self.scene, self.calibrations, self.priors = Guided(self.model, GUIDANCE), scene, {}, {}

    def inputs(self, B: int):
        images = torch.arange(B, device=self.device) % len(self.scene.codes)
        given = int(self.size["given"] * self.scene.codes.shape[1])
        return dict(condition=self.scene.condition[images], prefix=self.scene.codes[images, :given], length=given + (self.size["tokens"] or 10**9))

    def row(self, part: str, **values) -> dict:
        return EMPTY | dict(part=part, model=self.name, dtype=self.dtype) | values

    def decode(self, method, B: int, seed: int = 0, **changes):
        inputs = self.inputs(B) | changes
        inputs["length"] = min(inputs["length"], self.model.config.block_size)
        return bench.timed_rollout(self.model, method=method, guidance=GUIDANCE, seed=seed, **inputs)

    def exactness(self, B: int):
        """Images of a batch that differ from AR: under hbsjd_gumbel, and (the control) in AR one image at a time; `value` is the nearest tie's distance."""
        want, half = self.decode("ar", B)[0], self.size["control"]
        inputs = self.inputs(half)
        alone = [self.decode("ar", 1, condition=inputs["condition"][[i]], prefix=inputs["prefix"][[i]], images=torch.tensor([i]).to(self.device))[0]
                 for i in range(half)]
        for method, tokens in (("hbsjd_gumbel", self.decode("hbsjd_gumbel", B)[0].tokens), ("ar, B = 1", torch.cat([out.tokens for out in alone]))):
            found = [first_difference(self.guided, self.inputs(B)["condition"][i], tokens[i], want.tokens[i], i, 0, "sample") for i in range(len(tokens))]
            gaps = [gap for position, gap in found if position is not None]
            yield self.row("exactness", method=method, B=B, committed=len(gaps), row_rounds=len(tokens), value=max(gaps, default=None))

    def calibrate(self, B: int):
        """Costs of a guided round, and gamma of Eq. 6 in images."""
        rows, widths = sorted({max(1, B * part // 4) for part in (0, 1, 2, 3, 4)}), self.size["widths"]
        found = bench.calibrate(self.guided, rows, list(widths), self.device, repeats=3, gathered=(max(widths[:-1]),))
        self.calibrations[B] = found | dict(gamma=bench.gamma(found, 2 * B, max(widths[:-1])))
        for kind, name in (("costs", "slice"), ("gathered", "gather")):
            for W, row in found[kind].items():
                yield from (self.row("latency", method=name, B=B, W=W, rows=physical, seconds=seconds) for physical, seconds in row.items())
        yield self.row("gamma", B=B, value=self.calibrations[B]["gamma"] * B)

    def prior(self, method) -> dict[int, float]:
        """What a round commits at each width, measured once for each kind of rule."""
        mode = method.rule.mode
        if mode not in self.priors:
            inputs, ahead = self.inputs(calibration.IMAGES), calibration.AHEAD + max(self.size["widths"])
            given = inputs["condition"], inputs["prefix"][:, : self.model.config.block_size - ahead]
            self.priors[mode] = calibration.committed_means(self.guided, method, Policy(mode, GUIDANCE), self.size["widths"], *given)
        return self.priors[mode]

    def method(self, name: str, B: int):
        """A named method with what was calibrated at B."""
        method, found = resolve(name, self.model.config), self.calibrations[B]
        if isinstance(method.window, Adaptive):
            method = replace(method, window=Adaptive(self.size["widths"], costs=found["costs"], prior=self.prior(method)))
        if isinstance(method.execution, Hybrid):
            method = replace(method, execution=Hybrid(found["gamma"]))
        return method

    def rollouts(self, B: int, repeat: int):
        for name in METHODS:
            method = self.method(name, B)
            out, figures = self.decode(method, B, seed=repeat)
            counts = {key: value for key, value in out.counts().items() if key in EMPTY}
            yield self.row("rollout", method=name, B=B, W=method.window.W, repeat=repeat, **figures, **counts), out


def projected(large: Check, B: int, repeat: int, method: str, out) -> dict:
    """Seconds of the same rounds (rows and widths, as the student went through them) at the cost of the large model's forwards, for its longer suffix."""
    costs, rounds = large.calibrations[B]["costs"], out.rounds
    widths = {width: min((w for w in costs if w >= width), default=max(costs)) for width in rounds["window"].unique().tolist()}
    seconds = sum(interpolated(costs[widths[W]], rows) for W, rows in zip(rounds["window"].tolist(), rounds["physical_rows"].tolist()))
    longer = (large.model.config.block_size - large.inputs(B)["prefix"].shape[1]) * len(out.start) / out.counts()["committed"]
    return large.row("projected", method=method, B=B, repeat=repeat, seconds=seconds * longer)


def run_check(device: str, minutes: float, fresh: bool = False) -> pd.DataFrame:
    """All rows, which are also appended to results/device_check. On a CPU, sizes are reduced. Repeats go on until the minutes are over."""
    size, end = SIZES["full" if device.startswith("cuda") else "reduced"], time.monotonic() + 60 * minutes
    scene = data.scene("small", device)
    shape = random_model(size["size"], **size["shape"])
    blank = torch.zeros(1, shape.config.block_size, dtype=torch.long, device=device)
    random_scene = data.Scene("random", None, shape, torch.zeros(1, dtype=torch.long, device=device), blank)
    config = dict(weights=fingerprint(scene.model), size=size, guidance=GUIDANCE, threads=torch.get_num_threads())
    run = Run(STEM, "small", config, bench.device_name(device), KEYS, fresh)
    run.note(checkpoint_sha256=scene.sha256, driver=bench.driver(device))
    rows = []

    def keep(row: dict) -> None:
        rows.append(row)
        for cell in run.missing([row]):
            run.add(cell)

    for dtype in tqdm(bench.DTYPES, desc=STEM):
        student = Check("small-student", scene.model, scene, size, dtype, device)
        large = Check(f"random llamagen-{size['size']}", shape, random_scene, size, dtype, device)
        for B in size["batches"]:
            for check in (student, large):
                for row in check.calibrate(B):
                    keep(row)
            for row in student.exactness(B):
                keep(row)
        for repeat in count():
            for B in size["batches"]:
                for row, out in student.rollouts(B, repeat):
                    keep(row)
                    keep(projected(large, B, repeat, row["method"], out))
            if time.monotonic() > end - 60 * minutes * (1 - (list(bench.DTYPES).index(dtype) + 1) / len(bench.DTYPES)):
                break
    run.finish()
    return pd.DataFrame(rows)


def tables(rows: pd.DataFrame) -> str:
    """What is printed: exactness, speedups over AR (medians of paired ratios), gamma."""
    timed = rows[rows.part.isin(["rollout", "projected"])].copy()
    timed["baseline"] = timed.method.map(lambda name: "ar_greedy" if METHOD_LINES[name].rule.mode == "greedy" else "ar")
    keys = ["part", "model", "dtype", "B", "repeat"]
    ar = timed[timed.method == timed.baseline][[*keys, "method", "seconds"]].rename(columns={"method": "baseline", "seconds": "ar_seconds"})
    pairs = timed.merge(ar, on=[*keys, "baseline"])
    pairs["speedup"] = pairs.ar_seconds / pairs.seconds
    speedups = pairs.pivot_table(index=["part", "model", "dtype", "method"], columns="B", values="speedup", aggfunc="median", sort=False).round(2)
    exact = rows[rows.part == "exactness"].rename(columns={"committed": "images that differ", "row_rounds": "of", "value": "nearest tie"})
    exact = exact[["dtype", "method", "B", "images that differ", "of", "nearest tie"]]
    gamma = rows[rows.part == "gamma"][["model", "dtype", "B", "value"]].rename(columns={"value": "gamma, images"})
    return f"speedup over AR, median of paired ratios\n{speedups}\n\nexactness\n{exact.to_string(index=False)}\n\n{gamma.to_string(index=False)}"
