"""Exactness: enumerated laws and planted bugs, statistics on the trained student, and what rounding does to token-for-token equality (beyond the paper).

To extend it, edit the constants below and run again: only the new rows are measured.
"""
from __future__ import annotations

import copy
from contextlib import nullcontext
from dataclasses import replace
from itertools import product
from statistics import median

import torch
from tqdm import tqdm

import hbsjd
from hbsjd import bench, data
from hbsjd.agreement import first_difference
from hbsjd.api import resolve
from hbsjd.decoding import loop
from hbsjd.decoding.drafts import History, Uniform
from hbsjd.decoding.execution import Full, Hybrid
from hbsjd.decoding.methods import METHODS
from hbsjd.decoding.noise import SHARED, KeyedNoise, perturbed_argmax, row_keys
from hbsjd.decoding.rules import Gumbel, Maximal, Probabilistic
from hbsjd.decoding.schedules import Independent, Lockstep, Synchronous
from hbsjd.decoding.state import State
from hbsjd.decoding.types import Images, Method, Policy
from hbsjd.decoding.windows import Fixed
from hbsjd.enumeration import exact_law, target_law, total_variation
from hbsjd.models import checkpoints
from hbsjd.models.guidance import Guided
from hbsjd.planted_bugs import ONE_IMAGE, PLANTED, TWO_IMAGES, Held, planted, residual_from_p
from hbsjd.results import Run

STEM = "06_exactness"
GUIDANCE = 2.0
LAW_RULES = [Probabilistic(), Maximal(), Gumbel()]
LAW_ONE = list(product([Independent(), Synchronous()], [History(1), Uniform()], [1, 2]))       # schedule, draft, W; one image of 4 tokens, 3 codes
LAW_TWO = list(product([Independent(), Synchronous(), Lockstep()], [History(1)], [1, 2]))      # two images of 3 tokens, 2 codes
SAMPLED = ["hbsjd_gumbel", "hbsjd_probabilistic", "hbsjd_maximal"]
CONTROL = "biased control"                                                                     # rejected drafts redrawn from p: has to be detected
AHEAD, W_SHORT = 4, 4                                                                          # tokens drawn after a prefix, and the window
ONE_BY_ONE, WIDE = "ar, B = 1", "ar, 17 tokens a forward"  # controls: other batch, and other width of the forward, but one token a round
COMPARED = {ONE_BY_ONE: "ar", WIDE: "ar", "hbsjd_gumbel": "ar", "hbsjd": "ar_greedy", "sjd_synchronous_gumbel": "ar"}  # with what, in a batch of N
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
SIZES = {
    "smoke": dict(prefixes=2, samples=200, images=4, identical=8, batch=4, repeats=2, minutes=0.4),
    "small": dict(prefixes=20, samples=1000, images=16, identical=256, batch=64, repeats=9, minutes=6),
}
KEYS = ("part", "method", "setting", "item")


def cells(size: dict) -> list[dict]:
    """Everything to measure, in the order of the parts."""
    listed = [("law", type(rule).__name__, law_name(*setting), images) for rule in LAW_RULES for images, settings in ((1, LAW_ONE), (2, LAW_TWO))
              for setting in settings]
    listed += [("planted", *planted_names(*case)) for case in PLANTED]
    tests = [("marginal", position) for position in range(AHEAD)] + [("pair", position) for position in range(AHEAD - 1)]
    listed += [(part, method, f"prefix {k}", position) for k in range(size["prefixes"]) for method in [*SAMPLED, CONTROL] for part, position in tests]
    listed += [("divergence", method, dtype, i) for dtype in DTYPES for method in COMPARED for i in range(size["images"])]
    listed += [("identical", "hbsjd_gumbel", "float64", i) for i in range(0, size["identical"], size["batch"])]
    listed += [("noise", "hbsjd_gumbel", "B = 16, W = 16", i) for i in range(size["repeats"])]
    return [dict(zip(KEYS, cell)) for cell in listed]


def law_name(schedule, draft, W: int) -> str:
    return f"{type(schedule).__name__}, {type(draft).__name__}, W = {W}"


def planted_names(bug, rule, model, schedule, prefixes) -> tuple[str, str, str]:
    return type(rule).__name__, bug.__name__, f"{len(prefixes)}, {type(schedule).__name__}"


# (a) the law: every outcome of the noise through the real loop; `value` is the total variation distance to the autoregressive law


def measure_law(cell: dict) -> dict:
    rule = next(rule for rule in LAW_RULES if type(rule).__name__ == cell["method"])
    model, settings, prefixes = ((ONE_IMAGE, LAW_ONE, ((1,),)), (TWO_IMAGES, LAW_TWO, ((0,), (0, 1))))[cell["item"] - 1]
    schedule, draft, W = next(setting for setting in settings if law_name(*setting) == cell["setting"])
    law = exact_law(model, Method(rule, draft, schedule, Hybrid(0.6), Fixed(W)), *prefixes, finished=lambda round_, leaves: leaves * (round_ % 2))
    return dict(value=total_variation(law, target_law(model, *prefixes)), count=len(law))


def measure_planted(cell: dict) -> dict:
    bug, rule, model, schedule, prefixes = next(case for case in PLANTED if planted_names(*case) == (cell["method"], cell["setting"], cell["item"]))
    with planted(bug):
        law = exact_law(model, Method(rule, History(1), schedule, Full(), Fixed(2)), *prefixes)
    return dict(value=total_variation(law, target_law(model, *prefixes)), count=len(law))


# (b) the trained student: tests of samples against autoregressive samples; `value` is a p-value, `count` the categories


def samples(model, condition, prefix, method: str, seed: int, N: int) -> torch.Tensor:
    """AHEAD tokens after one prefix, N times [N, AHEAD]: one prefill, expanded."""
    length = len(prefix) + AHEAD
    exact = resolve({CONTROL: "hbsjd_probabilistic"}.get(method, method), model.config)
    exact = replace(exact, window=Fixed(min(W_SHORT, exact.window.W)))
    cache = model.prefill(condition[None], prefix[None], torch.tensor([len(prefix)], device=prefix.device), length + W_SHORT + 1)
    cache.expand(N)
    ids = torch.arange(N, device=prefix.device)
    images = Images(condition.expand(N), prefix.expand(N, -1), torch.full_like(ids, len(prefix)), ids)
    state = State(model, cache, exact, Policy("sample", GUIDANCE), images, length, slots=N)
    with planted(residual_from_p) if method == CONTROL else nullcontext():
        return loop.rollout(state, KeyedNoise(seed)).result().tokens[:, -AHEAD:]


def two_sample(a: torch.Tensor, b: torch.Tensor) -> tuple[float, int]:
    """p-value of the chi-square test that two samples of equal size have one law, and its number of categories (rare ones together)."""
    values, place = torch.cat([a, b]).unique(return_inverse=True)
    counts = torch.stack([place[: len(a)].bincount(minlength=len(values)), place[len(a) :].bincount(minlength=len(values))]).double()
    rare = counts.sum(0) < 10
    counts = torch.cat([counts[:, ~rare], counts[:, rare].sum(1, keepdim=True)], dim=1)
    counts = counts[:, counts.sum(0) > 0]
    chi_square, freedom = ((counts[0] - counts[1]) ** 2 / counts.sum(0)).sum(), counts.shape[1] - 1
    return torch.special.gammaincc(torch.tensor(freedom / 2).double(), chi_square / 2).item() if freedom else 1.0, counts.shape[1]


def measure_samples(todo: list[dict], scene: data.Scene, size: dict, seed: int):
    """Rows of parts marginal and pair, prefix by prefix."""
    model, V = Guided(scene.model, GUIDANCE), scene.model.config.vocab_size
    for setting in dict.fromkeys(cell["setting"] for cell in todo):
        k = int(setting.split()[1])
        inputs = scene.condition[k], scene.codes[k, : scene.codes.shape[1] // 16 + 4 * k]
        reference = samples(model, *inputs, "ar", seed, size["samples"])
        for method in dict.fromkeys(cell["method"] for cell in todo if cell["setting"] == setting):
            drawn = samples(model, *inputs, method, seed + 1, size["samples"])
            for cell in todo:
                if (cell["setting"], cell["method"]) == (setting, method):
                    t, width = cell["item"], 1 + (cell["part"] == "pair")
                    number = V ** torch.arange(width, device=drawn.device)
                    value, count = two_sample(*((part[:, t : t + width] * number).sum(1) for part in (drawn, reference)))
                    yield cell | dict(value=value, count=count)


# (c) rounding: how far two runs of one seed agree; `value` counts the agreeing tokens, `count` the compared ones, `gap` is how near a tie the first
# difference is (the distance of the two best candidates, noise included)


def measure_divergence(todo: list[dict], scene: data.Scene, size: dict, seed: int):
    half, rows = scene.codes.shape[1] // 2, slice(0, size["images"])
    condition, prefix, arguments = scene.condition[rows], scene.codes[rows, :half], dict(guidance=GUIDANCE, seed=seed)
    for dtype, method in dict.fromkeys((cell["setting"], cell["method"]) for cell in todo):
        model = copy.deepcopy(scene.model).to(DTYPES[dtype])
        want = hbsjd.rollout(model, condition, prefix, COMPARED[method], **arguments).tokens
        if method == ONE_BY_ONE:
            alone = [hbsjd.rollout(model, condition[[i]], prefix[[i]], "ar", images=torch.tensor([i]).to(condition), **arguments) for i in range(len(want))]
            got = torch.cat([out.tokens for out in alone])
        else:
            wide = replace(METHODS["hbsjd_gumbel"], schedule=Held())
            got = hbsjd.rollout(model, condition, prefix, wide if method == WIDE else method, **arguments).tokens
        for cell in [cell for cell in todo if (cell["setting"], cell["method"]) == (dtype, method)]:
            i, mode = cell["item"], METHODS[COMPARED[method]].rule.mode
            position, gap = first_difference(Guided(model, GUIDANCE), condition[i], got[i], want[i], i, seed, mode)
            compared = len(want[i]) - half
            yield cell | dict(value=compared if position is None else position - half, count=compared, gap=gap)


def measure_identical(todo: list[dict], scene: data.Scene, size: dict, seed: int):
    """hbsjd_gumbel against AR in float64, half of each image given."""
    model, half = copy.deepcopy(scene.model).double(), scene.codes.shape[1] // 2
    for cell in todo:
        images = torch.arange(cell["item"], cell["item"] + size["batch"], device=scene.condition.device)
        inputs = scene.condition[images % len(scene.codes)], scene.codes[images % len(scene.codes), :half]
        want, got = (hbsjd.rollout(model, *inputs, method, guidance=GUIDANCE, seed=seed, images=images).tokens for method in ("ar", cell["method"]))
        yield cell | dict(value=(got == want)[:, half:].sum().item(), count=want[:, half:].numel())


# what the noise of a round costs; `value` is seconds of noise / seconds of the forward


@torch.no_grad()
def measure_noise(todo: list[dict], scene: data.Scene, size: dict, seed: int):
    B, W, half = 16, 16, scene.codes.shape[1] // 2
    rows, model = torch.arange(B) % len(scene.codes), Guided(scene.model, GUIDANCE)
    condition, codes = scene.condition[rows], scene.codes[rows]
    cache = model.prefill(condition, codes[:, :half], torch.full((B,), half, device=codes.device), half + W + 1)
    positions = torch.arange(half - 1, half + W, device=codes.device).expand(B, -1)
    logits = model.step(codes[:, half - 1 : half + W], positions, cache, slice(0, B))
    calls = {
        "noise": lambda: perturbed_argmax(logits, row_keys(seed, SHARED, torch.arange(B, device=codes.device)[:, None], positions + 1)),
        "forward": lambda: model.step(codes[:, half - 1 : half + W], positions, cache, slice(0, B)),
    }
    for cell in todo:
        seconds = {name: median(times) for name, times in bench.interleaved(calls, 3, codes.device).items()}
        yield cell | dict(value=seconds["noise"] / seconds["forward"], count=3)


def main(args) -> None:
    size, scene = SIZES[args.scale], data.scene(args.scale, args.device)
    config = dict(scale=args.scale, model=scene.name, weights=checkpoints.fingerprint(scene.model), seed=args.seed, guidance=GUIDANCE, samples=size["samples"])
    run = Run(STEM, args.scale, config, bench.device_name(args.device), KEYS, args.fresh)
    run.note(seed=args.seed, checkpoint_sha256=scene.sha256, driver=bench.driver(args.device))
    todo, every = run.missing(cells(size)), cells(size)
    print(f"{STEM}: {len(todo)} of {len(every)} rows to measure on {args.device}, at most {size['minutes']} minutes")
    by_part = {part: [cell for cell in todo if cell["part"] == part] for part in ("law", "planted", "divergence", "identical", "noise")}
    parts = [
        (cell | measure_law(cell) for cell in by_part["law"]),
        (cell | measure_planted(cell) for cell in by_part["planted"]),
        measure_samples([cell for cell in todo if cell["part"] in ("marginal", "pair")], scene, size, args.seed),
        measure_divergence(by_part["divergence"], scene, size, args.seed),
        measure_identical(by_part["identical"], scene, size, args.seed),
        measure_noise(by_part["noise"], scene, size, args.seed),
    ]
    progress = tqdm(total=len(todo), desc=STEM, mininterval=1)
    for part in parts:
        for row in part:
            run.add(dict(scale=args.scale, model=scene.name) | row | dict(gap=row.get("gap")))
            progress.update()
    run.finish()


if __name__ == "__main__":
    bench.run_experiment(main, bench.experiment(__doc__))
