"""How good images are: Frechet distance, KID, Inception Score, precision, recall, density, coverage, and an image-text score, each with its interval.

    python -m hbsjd.evaluation SAMPLES --reference REF       SAMPLES and REF: folders of PNG or JPEG images, or .npz files with arr_0

Only with Inception's features are the distances named FID and KID; with others the name says with which. Parts: hbsjd.features (images and
networks), hbsjd.scores (formulas, intervals, differences), hbsjd.image_text, hbsjd.sample (images of a model).
"""
from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from hbsjd import scores
from hbsjd.features import Features, Statistics, features, npz, read_images, require, statistics
from hbsjd.features import extractor as extractor
from hbsjd.image_text import IMAGE_TEXT_HELP, clip_scorer, image_text_scores
from hbsjd.models.checkpoints import default_device
from hbsjd.results import write_json
from hbsjd.sample import labels as labels
from hbsjd.sample import sample_images as sample_images
from hbsjd.scores import Score, enough, halves
from hbsjd.scores import difference as difference
from hbsjd.scores import seed_difference as seed_difference

LABELS = {"efficientnet-lite0": "EfficientNet-Lite0"}


def evaluate(
    samples: Features, reference: Features | None, *, moments_of: Statistics | None = None, resamples: int = 100, seed: int = 0,
    clean_fid: bool = True, device=None,
) -> dict[str, Score]:
    """All scores of generated images against reference images, by short name: fd, kid, precision, recall, density, coverage, is.

    `moments_of`: mean and covariance to take the Frechet distance to instead; without reference images only that and the Inception Score are given.
    The Frechet distance and KID are clean-fid's (about 10 s a set; where its matrix root fails, and with clean_fid=False, those of hbsjd.scores,
    equal to 1e-5); intervals come from `resamples` random halves of the images. Raises ValueError where the two sets do not belong together.
    """
    enough("an evaluation", len(samples), 4)
    for other in filter(None, (reference, moments_of)):
        check_match(samples, other)
    if clean_fid:
        require("cleanfid")
    samples, reference = (of and of.to(device or default_device()) for of in (samples, reference))
    make, counts, found = partial(score, samples, reference), whole_and_halves(len(samples), resamples, seed), {}
    x, p = samples.values, samples.probabilities
    if reference or moments_of:
        mu, sigma = (moments_of.mu, moments_of.sigma) if moments_of else scores.moments(reference.values)
        of_clean_fid = scores.clean_fid_frechet(x, mu, sigma) if clean_fid else None
        found["fd"] = deficient(make("fd", scores.frechet(x, mu, sigma, counts), of_clean_fid), samples, None if moments_of else reference)
    if reference:
        y, of_reference = reference.values, whole_and_halves(len(reference), resamples, seed + 1)
        found["kid"] = make("kid", scores.kernel_distance(x, y, counts, of_reference), scores.clean_fid_kid(x, y, seed) if clean_fid else None)
        for name, values in scores.manifold(x, y).items():
            found[name] = make(name, scores.mean_of(values, of_reference if name in ("recall", "coverage") else counts))
    found["is"] = make("is", scores.inception_score(p, counts), scores.inception_score(p).item())
    return found


def whole_and_halves(n: int, resamples: int, seed: int) -> torch.Tensor:
    """Counts [1 + R, n]: of all images, then of the resamples."""
    return torch.cat([torch.ones(1, n, dtype=torch.float64), halves(n, resamples, seed)])


def score(samples: Features, reference: Features | None, name: str, computed: torch.Tensor, value: float | None = None) -> Score:
    """`computed`: of the images as they are, then of the resamples; `value` takes the first one's place."""
    n_reference = len(reference) if reference and name != "is" else None
    value = computed[0].item() if value is None else value
    return Score(title(name, samples.extractor), value, computed[1:], len(samples), n_reference, samples.extractor, samples.checksum)


def title(name: str, extractor_name: str) -> str:
    """FID, KID and IS are said of Inception's features only."""
    if extractor_name in LABELS:
        return f"{dict(fd='FD', kid='KID').get(name, 'IS' if name == 'is' else name)} ({LABELS[extractor_name]})"
    return dict(fd="FID", kid="KID").get(name, "IS" if name == "is" else name)


def deficient(fd: Score, samples: Features, reference: Features | None) -> Score:
    """Says where a covariance is of fewer images than features."""
    d, few = samples.values.shape[1], min(len(samples), len(reference) if reference else len(samples))
    if few >= d:
        return fd
    note = f"{few} images for {d} features: a singular covariance and a large bias; compare at equal N only, and let KID decide"
    return replace(fd, rank_deficient=True, note=note)


def check_match(samples: Features, reference: Features | Statistics) -> None:
    if reference.extractor != samples.extractor:
        raise ValueError(f"the reference was made with the extractor {reference.extractor}, the samples with {samples.extractor}; use one for both")
    if isinstance(reference, Features):
        if reference.checksum != samples.checksum:
            raise ValueError(f"reference and samples were made with different weights of {samples.extractor}; compute one of them again")
        if reference.size != samples.size:
            sizes = ["{1} x {0}".format(*x.size) for x in (reference, samples)]
            raise ValueError(f"the reference's images are {sizes[0]} pixels, the samples {sizes[1]}; resize neither silently: make them one size first")


def floor(first: Features, second: Features, n: int, *, seed: int = 0, **how) -> dict[str, Score]:
    """What n real images score against other real ones: n drawn from `first` against all of `second`, which share no name. No model can ask for better."""
    if len(first) < n:
        raise ValueError(f"a floor at {n} images needs that many real ones; there are {len(first)}")
    rows = torch.randperm(len(first), generator=torch.Generator().manual_seed(seed))[:n]
    return evaluate(first.take(rows), second, seed=seed, **how)


def table(found: dict[str, Score]) -> str:
    """One line per score, then each note once."""
    rows = [score.row() for score in found.values()]
    width = max(len(row["score"]) for row in rows)
    lines = [f"{'score':{width}} {'value':>10} {'95 % interval':>23} {'N':>7} {'N reference':>12}  model"]
    for row in rows:
        interval = f"{row['low']:.4g} to {row['high']:.4g}"
        against = "" if row["n_reference"] is None else row["n_reference"]
        lines.append(f"{row['score']:{width}} {row['value']:>10.4g} {interval:>23} {row['n']:>7} {against:>12}  {row['model']} {row['checksum'][:10]}")
    return "\n".join([*lines, *dict.fromkeys(row["note"] for row in rows if row["note"])])


def compare(samples: torch.Tensor, path: Path, of: partial, **how) -> dict[str, Score]:
    """`evaluate` against a folder or .npz; an .npz with mu and sigma gives the Frechet distance, with arr_0 beside them the other scores too."""
    adm = statistics(path)
    images = None if adm and not has_images(path) else read_images(path)
    return evaluate(of(samples), None if images is None else of(images), moments_of=adm, **how)


def has_images(path: Path) -> bool:
    with npz(path) as arrays:
        return "arr_0" in arrays.files


def captions_of(path: Path, n: int) -> tuple[torch.Tensor, list[list[str]]]:
    """A text file with one caption per image, in the order of the images' names -> for each image the number of its caption, and the different captions."""
    if not path.is_file():
        raise ValueError(f"--captions {path}: no such file; it holds one caption per line, in the order of the images' names")
    lines = path.read_text(encoding="utf-8").splitlines()
    if len(lines) != n:
        raise ValueError(f"{path} holds {len(lines)} captions for {n} images; one line each")
    texts = list(dict.fromkeys(lines))
    return torch.tensor([texts.index(line) for line in lines]), [[text] for text in texts]


def run(args) -> dict[str, Score]:
    if not (args.reference or args.captions):
        raise ValueError("nothing to score against: give --reference, --captions or both")
    samples, found = read_images(args.samples), {}
    if args.reference:
        of = partial(features, extractor=extractor(args.extractor, args.device))
        found |= compare(samples, args.reference, of, resamples=args.resamples, seed=args.seed, device=args.device)
    if args.captions:
        chosen, prompts = captions_of(args.captions, len(samples))
        scorer = clip_scorer(args.scorer, args.pretrained, args.device)
        found |= image_text_scores(scorer, samples, chosen, prompts, resamples=args.resamples, seed=args.seed)
    return found


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m hbsjd.evaluation", description="Scores of images against reference images, captions or both.")
    parser.add_argument("samples", type=Path, help="a folder of PNG or JPEG images, or an .npz with arr_0")
    parser.add_argument("--reference", type=Path, help="the same, or ADM's reference .npz (with --extractor inception-tensorflow)")
    parser.add_argument("--extractor", default="efficientnet-lite0", help="efficientnet-lite0, inception or inception-tensorflow (default: %(default)s)")
    parser.add_argument("--captions", type=Path, help="one caption per line, in the order of the images' names")
    parser.add_argument("--scorer", default="small", help=IMAGE_TEXT_HELP)
    parser.add_argument("--pretrained", help="for an open_clip model: a tag such as openai, or the path of its weights")
    parser.add_argument("--resamples", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0, help="of the resamples")
    parser.add_argument("--device", default=default_device())
    parser.add_argument("--json", type=Path, help="write the rows there too")
    args = parser.parse_args(argv)
    try:
        found = run(args)
    except ValueError as error:
        sys.exit(f"{parser.prog}: {error}")
    print(table(found))
    if args.json:
        write_json(args.json, {name: score.row() for name, score in found.items()})


if __name__ == "__main__":
    main()
