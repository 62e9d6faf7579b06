"""Timing: a stopwatch around a model's forwards, a timed rollout, a bare autoregressive loop to compare with, and what is calibrated for a batch size."""
from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

import torch

from hbsjd.api import resolve, rollout
from hbsjd.calibration import IMAGES, committed_means, whole_keys
from hbsjd.calibration import calibrate as calibrate
from hbsjd.calibration import device_name as device_name
from hbsjd.calibration import gamma as gamma
from hbsjd.calibration import interleaved as interleaved
from hbsjd.clock import clock
from hbsjd.decoding.execution import Hybrid
from hbsjd.decoding.noise import SHARED, perturbed_argmax, row_keys
from hbsjd.decoding.types import Method, Policy, Rollout, wide
from hbsjd.decoding.windows import Adaptive
from hbsjd.models.guidance import Guided
from hbsjd.results import Run

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def experiment(description: str, scales: tuple[str, ...] = ("smoke", "small")) -> argparse.ArgumentParser:
    """The arguments that every experiment takes."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", choices=scales, default="small", help="smoke: random tiny models; small: the bundled ones")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--fresh", action="store_true", help="measure everything again, into a new results file")
    return parser


def run_experiment(main, parser: argparse.ArgumentParser) -> None:
    """A user's mistake ends as one line on stderr and exit code 1."""
    args = parser.parse_args()
    if args.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error(f"--device {args.device}: torch finds no CUDA device here; leave --device out to use the CPU")
    try:
        main(args)
    except ValueError as error:
        sys.exit(f"{parser.prog}: {error}")


def driver(device) -> str | None:
    """The CUDA that torch was built with, and the GPU's compute capability; None on a CPU."""
    if torch.device(device).type != "cuda":
        return None
    return f"CUDA {torch.version.cuda}, compute capability {'.'.join(map(str, torch.cuda.get_device_capability(device)))}"


@dataclass
class Timed:
    """A model that notes when its forwards begin and end: CUDA events where there is CUDA, so that nothing waits for them."""

    model: Any
    device: torch.device
    marks: dict[str, list] = field(default_factory=lambda: dict(prefill=[], step=[]))

    def __post_init__(self):
        self.config = self.model.config

    def prefill(self, *args, **kwargs):
        return self.between("prefill", lambda: self.model.prefill(*args, **kwargs))

    def step(self, *args):
        return self.between("step", lambda: self.model.step(*args))

    def between(self, kind: str, forward):
        before, result, after = self.mark(), forward(), self.mark()
        self.marks[kind].append((before, after))
        return result

    def mark(self):
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, kind: str) -> float:
        if self.device.type == "cuda":
            return sum(before.elapsed_time(after) for before, after in self.marks[kind]) / 1000
        return sum(after - before for before, after in self.marks[kind])


def axes(method: Method) -> dict[str, str]:
    """The columns that say what a method is on each axis."""
    return {axis: type(getattr(method, axis)).__name__ for axis in ("rule", "schedule", "draft", "execution")}


def timed_rollout(model, condition, prefix, method: str | Method, **kwargs) -> tuple[Rollout, dict]:
    """A rollout with its `seconds`, of them `forward_seconds` in verifier forwards and `prefill_seconds`, and `peak_mb` (on a CPU, of the process so far).

    `model` is the bare one: guidance is an argument, as it is of `rollout`.
    """
    timed = Timed(model, condition.device)
    if condition.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(condition.device)
    start = clock(condition.device)
    out = rollout(timed, condition, prefix, method, **kwargs)
    seconds = clock(condition.device) - start
    forwards = dict(forward_seconds=timed.seconds("step"), prefill_seconds=timed.seconds("prefill"))
    return out, dict(seconds=seconds) | forwards | dict(peak_mb=peak_mb(condition.device))


def peak_mb(device) -> int | None:
    """Peak memory: of the GPU since its statistics were last reset, on a CPU of the process so far."""
    if torch.device(device).type == "cuda":
        return torch.cuda.max_memory_allocated(device) // 2**20
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak // (2**20 if sys.platform == "darwin" else 2**10)


@torch.no_grad()
def bare_ar(model, condition, prefix_BP, seed: int, length: int | None = None) -> torch.Tensor:
    """Autoregressive decoding as one writes it by hand, with nothing of our loop: the same sampler, prefill and cache. Tokens [B, T]."""
    (B, P), T = prefix_BP.shape, length or model.config.block_size
    device = condition.device
    cache = model.prefill(condition, prefix_BP, torch.full((B,), P, device=device), T + 1)
    tokens = torch.zeros(B, T, dtype=torch.long, device=device)
    tokens[:, :P] = prefix_BP
    images, positions = torch.arange(B, device=device)[:, None], torch.arange(-1, T, device=device)
    last = prefix_BP[:, -1:]
    for t in range(P, T):
        logits = model.step(last, positions[t].expand(B, 1), cache, slice(0, B))
        last = perturbed_argmax(wide(logits), row_keys(seed, SHARED, images, positions[t + 1].expand(B, 1)))
        tokens[:, t] = last[:, 0]
    return tokens


def timed_bare_ar(model, condition, prefix_BP, seed: int, length: int | None = None) -> tuple[dict, dict]:
    """The counts of `bare_ar` as a rollout would give them, and its seconds."""
    start = clock(condition.device)
    tokens = bare_ar(model, condition, prefix_BP, seed, length)
    seconds = clock(condition.device) - start
    suffix = tokens.shape[1] - prefix_BP.shape[1]
    committed, rows_per_image = len(tokens) * suffix, 2 if isinstance(model, Guided) else 1
    counts = dict(nfe=suffix, prefills=1, rounds=suffix, physical_rows=rows_per_image * committed, row_rounds=committed)
    return counts | dict(committed=committed, accepted=0, proposed=0), dict(seconds=seconds, forward_seconds=None, prefill_seconds=None, peak_mb=None)


def faster_dtype(models: dict, condition, guidance: float) -> str:
    """The dtype of `models` in which one guided autoregressive step is faster, three quarters into an image."""
    device, B, calls = condition.device, len(condition), {}
    for name, model in models.items():
        guided, P = Guided(model, guidance), 3 * model.config.block_size // 4
        given = torch.zeros(B, P, dtype=torch.long, device=device)
        cache = guided.prefill(condition, given, torch.full((B,), P, device=device), P + 2)
        positions = torch.full((B, 1), P - 1, device=device)
        calls[name] = lambda step=guided.step, cache=cache, positions=positions: step(torch.zeros_like(positions), positions, cache, slice(0, B))
    seconds = interleaved(calls, repeats=41, device=device, warmup=3, twice=True)
    return "bfloat16" if median(b / f for b, f in zip(seconds["bfloat16"], seconds["float32"])) < 1 else "float32"


def calibrated(model: Guided, B: int, condition, prefix_BP) -> dict:
    """Costs of a round at B images and fewer, gamma, and what a round commits at each width, greedily and sampled, after the last of the prefixes."""
    widths, eighths, prior = Adaptive().widths, sorted({max(1, B * eighth // 8) for eighth in range(1, 9)}), {}
    found = calibrate(model, eighths, [16], condition.device, gathered=(16,))
    costs = calibrate(model, sorted({1, max(1, B // 4), B}), list(widths), condition.device)["costs"]
    for name in "hbsjd_greedy_adaptive", "hbsjd_adaptive":
        method = resolve(name, model.config)
        policy = Policy(method.rule.mode, model.scale)
        prior[policy.mode] = committed_means(model, method, policy, widths, condition[-IMAGES:], prefix_BP[-IMAGES:])
    return dict(found, gamma=gamma(found, 2 * B, 16), costs=costs, prior=prior)


def calibrations(run: Run, models: dict, batches: list[int], condition, prefix_BP, guidance: float) -> tuple[dict[int, str], dict[int, dict]]:
    """By batch size, the dtype of `models` in which AR is faster, and what is `calibrated` in it: measured once and kept in the provenance of `run`."""
    fastest, found = dict(run.facts.get("fastest_dtype", {})), dict(run.facts.get("calibrations", {}))
    for B in batches:
        if str(B) not in found:
            fastest[str(B)] = faster_dtype(models, condition[:1].expand(B), guidance)
            found[str(B)] = calibrated(Guided(models[fastest[str(B)]], guidance), B, condition, prefix_BP)
            run.note(fastest_dtype=fastest, calibrations=found)
    return whole_keys(fastest), whole_keys(found)


def fitted(method: str | Method, found: dict, config) -> Method:
    """The method with what was `calibrated` for its batch size: gamma, and the costs and the prior of an adaptive window."""
    method = resolve(method, config)
    if isinstance(method.execution, Hybrid):
        method = replace(method, execution=Hybrid(found["gamma"]))
    if isinstance(method.window, Adaptive):
        method = replace(method, window=replace(method.window, costs=found["costs"], prior=found["prior"][method.rule.mode]))
    return method


def main() -> None:
    from hbsjd import device_check  # which imports this module

    parser = argparse.ArgumentParser(prog="python -m hbsjd.bench", description="What this machine makes of it: exactness, speed, costs of a round.")
    parser.add_argument("--device-check", action="store_true", required=True, help="measure everything once, then repeat until the minutes are over")
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--fresh", action="store_true", help="into a new results file")
    args = parser.parse_args()
    print(device_check.tables(device_check.run_check(args.device, args.minutes, args.fresh)))


if __name__ == "__main__":
    main()
