"""How good the images are after distillation, and does the rollout backend change that? (paper: Table 1, Fig. 4)

Judges the bundled student and teacher and the students of 04_distill: those in checkpoints/04_distill/<scale>/, where there is none the bundled
one. At `small` the scores are of EfficientNet-Lite0 and of a scorer of our own: they are neither FID nor CLIP scores, and not called so.
Sampled images are kept in checkpoints/05_quality/<scale>/. Killed, it resumes with the same command.
"""
from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from tqdm import tqdm

from hbsjd import bench, data, results
from hbsjd.evaluation import difference, evaluate, extractor, features, labels, sample_images, seed_difference
from hbsjd.features import Features, read_images
from hbsjd.image_text import clip_scorer, image_text_scores, openmoji_prompts
from hbsjd.models import checkpoints, vq
from hbsjd.models.llamagen import random_model
from hbsjd.sample import write_mosaic

STEM, DISTILLED = "05_quality", "04_distill"
ARMS = {"kd": 1, "seqkd": 1, "gkd-ar": 3, "gkd-hbsjd": 3, "gkd-hbsjd_probabilistic": 1, "varkd-ar": 1, "varkd-hbsjd": 1, "gkd-ar-horizon": 1}  # seeds
BASELINES = ["student", "gkd-ar"]          # what every arm is compared with, image by image; and with its own method on AR
SEEDS = ("gkd-ar", "gkd-hbsjd")            # these two, seed by seed
GUIDANCE, METHOD, SLOTS = 2.0, "hbsjd_adaptive", 64
GREEDY = "hbsjd_greedy_adaptive"           # the student's greedy images beside its sampled ones
GRID, NEIGHBOURS = 10, 6                   # images in the two pictures
SCALES = {"smoke": dict(images=8, resamples=10, minutes=0.5), "small": dict(images=512, resamples=100, minutes=24)}
KEYS = ("part", "model", "seed", "against", "score")


@dataclass(frozen=True)
class Scene:
    """Models by (name, seed); real images of one per name, of which some (`floor`) stand beside the models and the `rest` are the reference of all."""

    models: dict
    tokenizer: torch.nn.Module
    real: torch.Tensor
    real_labels: torch.Tensor
    floor: torch.Tensor
    rest: torch.Tensor
    reference: Features
    prompts: list[list[str]]  # of every class
    labels: torch.Tensor      # classes of the images to make


def scene(scale: str, device, seed: int, images: int, extract) -> Scene:
    tokenizer = vq.load("small", device=device)
    if scale == "smoke":
        config = dict(vocab_size=64, block_size=36, num_classes=4)
        models = {("student", seed): random_model("tiny", **config).to(device), ("teacher", seed): random_model("tiny", seed=1, **config).to(device)}
        real = data.to_uint8(tokenizer.decode(torch.randint(512, (24, 36), generator=torch.Generator().manual_seed(0)).to(device))).cpu()
        real_labels, prompts = torch.arange(24) % 4, [[f"an emoji of thing {i}"] for i in range(4)]
    else:
        table, pixels = data.openmoji()
        one_per_name = table.drop_duplicates("name")
        rows = torch.from_numpy(one_per_name.index.to_numpy(copy=True))
        real, real_labels, prompts = pixels[rows], torch.from_numpy(one_per_name.class_id.to_numpy(copy=True)), openmoji_prompts(table)
        models = {(name, seed): checkpoints.load_model(f"small-{name}", device=device) for name in ("student", "teacher")}
        models |= {(arm, k): checkpoints.load_model(path, device=device) for (arm, k), path in distilled(scale, seed).items()}
    wanted = labels(images, len(prompts), frequency=torch.bincount(real_labels, minlength=len(prompts)), seed=seed)
    order = torch.randperm(len(real), generator=torch.Generator().manual_seed(seed))
    floor, rest = order.tensor_split([min(images, len(order) // 2)])
    return Scene(models, tokenizer, real, real_labels, floor, rest, features(real[rest], extract), prompts, wanted.to(device))


def distilled(scale: str, first: int) -> dict[tuple[str, int], Path]:
    """Of each arm and seed the result of 04_distill, of its first seed the bundled one where there is none; an arm without either is left out by name."""
    found = {}
    for arm, seed in ((arm, seed) for arm, seeds in ARMS.items() for seed in range(first, first + seeds)):
        trained, bundled = results.CHECKPOINTS / DISTILLED / scale / f"{arm}-seed{seed}/model.safetensors", checkpoints.WEIGHTS / f"small-{arm}.safetensors"
        if trained.exists():
            found[arm, seed] = trained
        elif seed == 0 and bundled.exists():
            found[arm, seed] = bundled
        else:
            print(f"{arm}, seed {seed}: not there, so not judged; python -m experiments.{DISTILLED} makes it")
    return found


@dataclass(frozen=True)
class Set:
    """Images to judge: [N, 3, H, W] uint8, the class of each, and what they cost."""

    part: str
    model: str
    seed: int
    images: torch.Tensor
    labels: torch.Tensor
    cost: dict


NO_COST = dict(seconds=None, nfe=None, timed_images=None)


def sampled(scene: Scene, key: tuple[str, int], method: str, folder: Path) -> Set:
    """Every model gets the same classes and the same noise."""
    made = sample_images(scene.models[key], scene.tokenizer, scene.labels, folder, method, guidance=GUIDANCE, slots=SLOTS, batch=len(scene.labels))
    cost = dict(seconds=made.seconds, nfe=made.nfe, timed_images=made.timed_images)
    return Set("greedy" if method == GREEDY else "model", *key, read_images(made.npz), scene.labels.cpu(), cost)


def controls(scene: Scene, seed: int):
    """Real images against other ones, which no model can beat; the same blurred, and through the tokenizer; and noise, which every model should."""
    real = scene.real[scene.floor]
    blurred = F.interpolate(F.avg_pool2d(real.float(), 2), scale_factor=2, mode="bilinear").clamp(0, 255).to(torch.uint8)
    device = next(scene.tokenizer.parameters()).device
    codes = torch.cat([scene.tokenizer.encode(data.to_unit(some.to(device))) for some in real.split(64)])
    rebuilt = torch.cat([data.to_uint8(scene.tokenizer.decode(some)).cpu() for some in codes.split(64)])
    noise = torch.randint(256, real.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    for name, pictures in dict(real=real, reconstruction=rebuilt, blurred=blurred, noise=noise).items():
        yield Set("control", name, seed, pictures, scene.real_labels[scene.floor], NO_COST)


def judge(some: Set, scene: Scene, extract, scorer, resamples: int) -> dict:
    """Every score of a set, by short name."""
    scores = evaluate(features(some.images, extract), scene.reference, resamples=resamples)
    return scores | image_text_scores(scorer, some.images, some.labels, scene.prompts, resamples=resamples)


def score_rows(some: Set, found: dict) -> list[dict]:
    rows = []
    for name, score in found.items():
        row = score.row()
        row["scored_by"], row["title"] = row.pop("model"), row.pop("score")
        rows.append(dict(part=some.part, model=some.model, seed=some.seed, against=None, score=name) | row | dict(verdict=None) | some.cost)
    return rows


def difference_rows(scores: dict, first: int) -> list[dict]:
    """Every model against the baselines, paired by image; and two arms paired by seed."""
    rows, columns = [], dict.fromkeys(["sd", "n", "n_reference", "checksum", "rank_deficient", "note", "scored_by", "title", *NO_COST])
    for (model, seed), found in scores.items():
        for other in dict.fromkeys([*BASELINES, f"{model.partition('-')[0]}-ar"]):
            if model not in (other, "student") and (other, first) in scores:
                for name, score in found.items():
                    verdict = difference(score, scores[other, first][name])
                    verdict["value"] = verdict.pop("difference")
                    rows.append(dict(part="difference", model=model, seed=seed, against=other, score=name) | columns | verdict)
    ours, theirs = ([found for (model, _), found in sorted(scores.items()) if model == name] for name in reversed(SEEDS))
    if len(ours) == len(theirs) > 1:
        for name in ours[0]:
            verdict = seed_difference(*([found[name].value for found in arm] for arm in (ours, theirs)))
            verdict["value"] = verdict.pop("difference")
            rows.append(dict(part="seeds", model=SEEDS[1], seed=first, against=SEEDS[0], score=name) | columns | verdict)
    return rows


def draw_grid(run: results.Run, sets: dict) -> None:
    """Fig. 4: the same classes and the same noise, one row a model."""
    names = [key for key in sets if key[1] == min(seed for _, seed in sets)]
    run.note(grid=dict(rows=[name for name, _ in names]))
    write_mosaic(run.file("grid.png"), [list(sets[key].images[:GRID]) for key in names])


def draw_neighbours(run: results.Run, some: Set, scene: Scene, extract) -> None:
    """A few generated images and, beside each, the three real ones whose features are nearest: are they copies?"""
    found = features(some.images, extract).values[:NEIGHBOURS]
    reference = scene.reference.values
    nearest = torch.cdist(found, reference).topk(3, largest=False)
    usual = torch.cdist(reference, reference).topk(2, largest=False).values[:, 1].median().item()
    run.note(neighbours=dict(of=some.model, distances=nearest.values.tolist(), real_to_nearest_real=usual))
    write_mosaic(run.file("neighbours.png"), [[image, *scene.real[scene.rest[rows]]] for image, rows in zip(some.images, nearest.indices)])


def main(args) -> None:
    scale = SCALES[args.scale]
    extract, scorer = extractor("efficientnet-lite0", args.device), clip_scorer("small", device=args.device)
    its = scene(args.scale, args.device, args.seed, scale["images"], extract)
    weights = {f"{name}-{seed}": checkpoints.fingerprint(model) for (name, seed), model in its.models.items()}
    config = dict(scale=args.scale, seed=args.seed, images=scale["images"], guidance=GUIDANCE, method=METHOD, threads=torch.get_num_threads(),
                  extractor=extract.checksum, scorer=scorer.checksum, resamples=scale["resamples"], student=weights[f"student-{args.seed}"])
    run = results.Run(STEM, args.scale, config, bench.device_name(args.device), KEYS, args.fresh)
    run.note(seed=args.seed, driver=bench.driver(args.device))
    judged = run.facts.get("weights", {})
    if other := [name for name in weights if judged.get(name, weights[name]) != weights[name]]:
        raise ValueError(f"{', '.join(other)}: judged before with other weights; use --fresh")
    if weights.keys() <= judged.keys() and len(run.done) == run.facts.get("rows"):
        print(f"{STEM}: every set has been judged")
        return
    run.note(weights=judged | weights)
    print(f"{STEM}: {len(its.models) + 5} sets of {scale['images']} images, about {scale['minutes']} minutes on two cores")

    sets, scores = {}, {}
    jobs = [(key, METHOD) for key in its.models] + [(("student", args.seed), GREEDY)]
    bar = tqdm(jobs, desc=STEM)
    for key, method in bar:
        name = f"{key[0]}-seed{key[1]}" + "-greedy" * (method == GREEDY)
        bar.set_postfix_str(name)
        some = sampled(its, key, method, results.CHECKPOINTS / STEM / args.scale / run.facts["config_hash"] / name)
        found = judge(some, its, extract, scorer, scale["resamples"])
        if method == METHOD:
            sets[key], scores[key] = some, found
        add(run, score_rows(some, found))
    for some in controls(its, args.seed):
        add(run, score_rows(some, judge(some, its, extract, scorer, scale["resamples"])))
    add(run, difference_rows(scores, args.seed))
    draw_grid(run, sets)
    draw_neighbours(run, sets.get(("gkd-ar", args.seed), sets["student", args.seed]), its, extract)
    run.finish(rows=len(run.done))


def add(run: results.Run, rows: list[dict]) -> None:
    for row in run.missing(rows):
        run.add(row)


if __name__ == "__main__":
    bench.run_experiment(main, bench.experiment(__doc__))
