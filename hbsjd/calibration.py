"""What a verifier forward costs and what a window commits, measured once per model, setting and machine: for gamma (Eq. 6) and the adaptive window."""
from __future__ import annotations

import json
import sys
from dataclasses import replace
from statistics import median
from typing import Any
from weakref import WeakKeyDictionary

import torch

from hbsjd.clock import clock
from hbsjd.decoding import loop
from hbsjd.decoding.noise import KeyedNoise
from hbsjd.decoding.rules import Gumbel
from hbsjd.decoding.state import State
from hbsjd.decoding.types import Images, Method, Policy
from hbsjd.decoding.windows import Adaptive, Fixed
from hbsjd.models import captions
from hbsjd.models.checkpoints import fingerprint
from hbsjd.models.guidance import Guided
from hbsjd.results import cache_dir, config_hash, cpu_name, write_json

IMAGES, AHEAD = 8, 48  # a short run for each width: how many images, and tokens from their middle on
known: WeakKeyDictionary = WeakKeyDictionary()  # model -> {setting: (costs, prior)}, of this process


def device_name(device) -> str:
    """The processor's model, or the GPU's name."""
    return torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else cpu_name()


def interleaved(calls: dict[Any, Any], repeats: int, device, warmup: int = 1, twice: bool = False) -> dict[Any, list[float]]:
    """Seconds of each call, every repeat running all of them in turn, after warm-up rounds that are not kept.

    `twice`: each call is made once more just before, so that it finds the processor's caches as a loop of such calls leaves them.
    """
    seconds = {name: [] for name in calls}
    for repeat in range(-warmup, repeats):
        for name, call in calls.items():
            if twice:
                call()
            start = clock(device)
            call()
            if repeat >= 0:
                seconds[name].append(clock(device) - start)
    return seconds


@torch.no_grad()
def calibrate(model, rows: list[int], widths: list[int], device, repeats: int = 5, gathered: tuple[int, ...] = ()) -> dict:
    """Median seconds of a verifier forward three quarters into an image (the middle of what follows a prefix of half), on a grid, each right after
    another one like it, as rounds are; data do not matter.

    `rows` counts rows of the model given (images, if it is guided). Returns {"costs": {width: {physical rows: seconds}}, "gathered": the same
    for the widths `gathered`, with the rows' cache gathered through an index as Compact does}; a guided image is two physical rows.
    """
    T, most, per = model.config.block_size, max(rows), 2 if isinstance(model, Guided) else 1
    given = 3 * T // 4
    classes, start = torch.zeros(most, dtype=torch.long, device=device), torch.full((most,), given, device=device)
    condition = captions.noise(most, model.config, device) if captions.takes_captions(model.config) else classes
    cache = model.prefill(condition, torch.zeros(most, given, dtype=torch.long, device=device), start, given + max(widths) + 1)
    tokens = torch.zeros(most, max(widths) + 1, dtype=torch.long, device=device)
    positions = (start - 1)[:, None] + torch.arange(max(widths) + 1, device=device)
    grid = [("costs", width, R, slice(0, R)) for width in widths for R in rows]
    grid += [("gathered", width, R, torch.arange(R, device=device)) for width in gathered for R in rows]
    calls = {
        (kind, width, R * per): lambda w=width, R=R, index=index: model.step(tokens[:R, : w + 1], positions[:R, : w + 1], cache, index)
        for kind, width, R, index in grid
    }
    found = {"costs": {width: {} for width in widths}, "gathered": {width: {} for width in gathered}}
    for (kind, width, physical), times in interleaved(calls, repeats, device, twice=True).items():
        found[kind][width][physical] = median(times)
    return found


def gamma(calibration: dict, batch: int, width: int) -> float:
    """Eq. 6: the largest fraction of `batch` (physical rows) at which Compact costs less than Full."""
    return crossing(calibration["gathered"][width], calibration["costs"][width][batch], batch) / batch


def crossing(compact: dict[int, float], full: float, batch: int) -> int:
    """The most rows at which Compact costs less than Full, between measured points by a straight line."""
    best, before = 0, (0, 0.0)
    for rows, cost in [*sorted((rows, cost) for rows, cost in compact.items() if rows < batch), (batch, float("inf"))]:
        if cost >= full:
            share = 1.0 if cost == float("inf") else (full - before[1]) / (cost - before[1])
            return max(best, min(batch - 1, int(before[0] + share * (rows - before[0]))))
        best, before = rows, (rows, cost)
    return best


@torch.no_grad()
def committed_means(model, method: Method, policy: Policy, widths, condition, prefix_BP: torch.Tensor, seed: int = 0) -> dict[int, float]:
    """Mean committed tokens per round of an image at each width, over the next tokens after given prefixes."""
    means = {0: 1.0}
    for width in sorted(set(widths) - {0}):
        window = Adaptive((width,), 1, {width: {1: 1.0}}, {width: 1.0})
        length = min(model.config.block_size, prefix_BP.shape[1] + AHEAD + width)
        state = continued(model, replace(method, window=window), policy, condition, prefix_BP, length, seed)
        rounds, committed = state.pace.seen.get(width, (1, max(means.values())))  # too wide for this image: as good as the next narrower one
        means[width] = committed / rounds
    return means


@torch.no_grad()
def sampled_prefixes(model, method: Method, policy: Policy, device, seed: int = 0) -> tuple[torch.Tensor | captions.Captions, torch.Tensor]:
    """Classes spread over all there are, or captions of noise, and the first half of an image sampled of each: they stand in for real ones."""
    classes, B = model.config.num_classes or 1, IMAGES
    spread = torch.arange(B, device=device) * max(classes, B) // B % classes
    condition = captions.noise(B, model.config, device) if captions.takes_captions(model.config) else spread
    nothing = torch.zeros(B, 0, dtype=torch.long, device=device)
    method = replace(method, rule=Gumbel(), window=Fixed(8))
    return condition, continued(model, method, replace(policy, mode="sample"), condition, nothing, model.config.block_size // 2, seed).out


def continued(model, method: Method, policy: Policy, condition, prefix_BP, length: int, seed: int) -> State:
    start = torch.full((len(condition),), prefix_BP.shape[1], device=prefix_BP.device)
    ids = torch.arange(len(condition), device=start.device) if captions.takes_captions(model.config) else condition
    cache = model.prefill(condition, prefix_BP, start, length + method.window.W + 1)
    return loop.rollout(State(model, cache, method, policy, Images(condition, prefix_BP, start, ids), length, len(condition)), KeyedNoise(seed))


def adapted(method: Method, model, policy: Policy, slots: int, device) -> Method:
    """The method with its adaptive window's costs and prior filled in: known to this process, kept in $HBSJD_CACHE, or measured now (and kept)."""
    bare, widths = model.model if isinstance(model, Guided) else model, method.window.widths
    setting = dict(
        rule=repr(method.rule), draft=repr(method.draft), execution=repr(method.execution), policy=repr(policy), widths=list(widths), slots=slots,
        config=repr(bare.config), type=type(bare).__name__, device=device_name(device), threads=torch.get_num_threads(),
    )
    key = config_hash(setting)
    if key not in known.setdefault(bare, {}):
        weights = fingerprint(bare) if isinstance(bare, torch.nn.Module) else None
        dtype = str(next(bare.parameters()).dtype) if weights else None
        identity = setting | dict(weights=weights, dtype=dtype)
        path = cache_dir() / f"calibration-{config_hash(identity)}.json"
        if not path.exists():
            print(f"hbsjd: measuring what a round costs here and what it commits, once for this setting; kept in {path}", file=sys.stderr)
            rows = sorted({min(slots, 4**i) for i in range(12)})
            found = calibrate(model, rows, list(widths), device, repeats=3)["costs"]
            prior = committed_means(model, method, policy, widths, *sampled_prefixes(model, method, policy, device))
            write_json(path, dict(identity=identity, costs=found, prior=prior))
        known[bare][key] = read(path, identity)
    costs, prior = known[bare][key]
    return replace(method, window=replace(method.window, costs=costs, prior=prior))


def read(path, identity: dict) -> tuple[dict, dict]:
    """Costs and prior of a kept calibration; one of another machine, model or setting is refused."""
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        costs, prior, measured_on = whole_keys(kept["costs"]), whole_keys(kept["prior"]), kept["identity"]
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{path} is damaged; delete it, and it is measured again") from None
    if measured_on != identity:
        other = ", ".join(sorted(name for name in identity if measured_on.get(name) != identity[name]))
        raise ValueError(f"{path} was measured for another {other}; delete it, and it is measured again here")
    return costs, prior


def whole_keys(table):
    """Numbers as keys again, which JSON turns into text."""
    return {int(key) if str(key).isdigit() else key: whole_keys(value) for key, value in table.items()} if isinstance(table, dict) else table
