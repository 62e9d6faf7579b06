"""Distances and scores of images from their features, their spread over images by resampling, and whether a difference is more than noise.

Shapes: N generated and M reference images, D features, C classes, R resamples. `counts` [R, N] says how often a resample holds each image.
A resample is a random half of the images, and an interval is value -+ 1.96 times the standard deviation over such halves (the delete-half
jackknife, whose spread is that of the whole set's score). A bootstrap with replacement holds fewer different images, to which the Frechet
distance is so sensitive that its spread comes out 3 to 6 times too large where N is about D, that of halves at most 1.5 times (against
independent sets of Gaussian features). The reference is held fixed, but for KID, where the halves are of both sets.
"""
from __future__ import annotations

import warnings
from dataclasses import dataclass

import numpy as np
import torch

K = 3  # nearest neighbours of precision, recall (arXiv 1904.06991), density, coverage (arXiv 2002.09797)
IS_SPLIT = 5000  # images, as in ADM's evaluator
CHUNK = 2000  # rows of a matrix of all pairs that are held at once
WITHIN = 1.96


@dataclass(frozen=True, eq=False)
class Score:
    """A value and the same on each resample [R]. `n_reference` is None without reference images; `rank_deficient`: fewer images than features."""

    name: str
    value: float
    resampled: torch.Tensor
    n: int
    n_reference: int | None
    model: str  # the extractor or scorer
    checksum: str
    rank_deficient: bool = False
    note: str = ""

    @property
    def sd(self) -> float:
        return self.resampled.std().item()

    def row(self) -> dict:
        interval = dict(low=self.value - WITHIN * self.sd, high=self.value + WITHIN * self.sd, sd=self.sd)
        counts = dict(n=self.n, n_reference=self.n_reference)
        return dict(score=self.name, value=self.value) | interval | counts | dict(
            model=self.model, checksum=self.checksum, rank_deficient=self.rank_deficient, note=self.note
        )


def halves(n: int, resamples: int, seed: int = 0) -> torch.Tensor:
    """Counts [R, n] of random halves of n images; the same ones for the same n and seed, so that sets of images are compared in pairs."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.rand(resamples, n, generator=generator).argsort(1)
    return (order < (n + 1) // 2).double()


def enough(what: str, n: int, least: int) -> None:
    if n < least:
        raise ValueError(f"{what} needs at least {least} images; there are {n}")


def moments(features_ND: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean [D] and unbiased covariance [D, D], float64."""
    enough("a covariance", len(features_ND), 2)
    x = features_ND.double()
    return x.mean(0), torch.cov(x.T).reshape(x.shape[1], x.shape[1])


def frechet(features_ND: torch.Tensor, mu_D: torch.Tensor, sigma_DD: torch.Tensor, counts_RN: torch.Tensor | None = None) -> torch.Tensor:
    """|mu1 - mu2|^2 + tr(S1 + S2 - 2 (S1 S2)^1/2) per resample [R], of the images as they are (R = 1) without `counts`.

    With S2 = B B' and the centred features A (S1 = A' A), tr (S1 S2)^1/2 is the sum of the singular values of A B: no matrix root of a product.
    """
    enough("a Frechet distance", len(features_ND), 2)
    x = features_ND.double()
    counts_RN = torch.ones(1, len(x), dtype=torch.float64, device=x.device) if counts_RN is None else counts_RN.to(x.device)
    values, vectors = torch.linalg.eigh(sigma_DD.double().to(x.device))
    y = x @ (vectors * values.clamp(min=0).sqrt())
    return torch.stack([one_frechet(x, y, mu_D.to(x.device), sigma_DD.trace().to(x.device), counts) for counts in counts_RN]).cpu()


def one_frechet(x, y, mu, trace, counts):
    n, held = counts.sum(), counts > 0
    x, y, weight = x[held], y[held], counts[held, None]
    mean = (weight * x).sum(0) / n
    own_trace = (weight * (x - mean) ** 2).sum() / (n - 1)
    a = (y - (weight * y).sum(0) / n) * (weight / (n - 1)).sqrt()
    gram = a @ a.T if len(a) <= a.shape[1] else a.T @ a
    root_trace = torch.linalg.eigvalsh(gram).clamp(min=0).sqrt().sum()
    return ((mean - mu) ** 2).sum() + own_trace + trace - 2 * root_trace


def clean_fid_frechet(features_ND: torch.Tensor, mu_D: torch.Tensor, sigma_DD: torch.Tensor) -> float | None:
    """clean-fid's own Frechet distance (scipy's root of S1 S2), None where that root has an imaginary part, as it may with fewer images than features."""
    from cleanfid.fid import frechet_distance

    mean, covariance = moments(features_ND)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "Matrix is singular", which it is with fewer images than features
        try:
            value = float(frechet_distance(*(x.cpu().numpy() for x in (mean, covariance, mu_D.double(), sigma_DD.double()))))
        except ValueError:
            return None
    return value if np.isfinite(value) else None


def kernel_distance(
    features_ND: torch.Tensor, reference_MD: torch.Tensor, counts_RN: torch.Tensor | None = None, reference_counts_RM: torch.Tensor | None = None
) -> torch.Tensor:
    """KID per resample [R]: the unbiased squared MMD with kernel (x . y / D + 1)^3 over all pairs of different images (arXiv 1801.01401)."""
    enough("KID", min(len(features_ND), len(reference_MD)), 2)
    x, y = features_ND.double(), reference_MD.double().to(features_ND.device)
    w_NR, v_MR = (
        (torch.ones(1, len(of)) if counts is None else counts).T.double().to(x.device) for of, counts in ((x, counts_RN), (y, reference_counts_RM))
    )
    own, reference = (pair_sums(of, of, w, w, different=True) / (w.sum(0) ** 2 - (w**2).sum(0)) for of, w in ((x, w_NR), (y, v_MR)))
    across = pair_sums(x, y, w_NR, v_MR, different=False) / (w_NR.sum(0) * v_MR.sum(0))
    return (own + reference - 2 * across).cpu()


def pair_sums(x, y, w_NR, v_MR, different: bool) -> torch.Tensor:
    """sum_ij w_i k(x_i, y_j) v_j per column [R]; `different` leaves out i = j."""
    total = 0
    for start in range(0, len(x), CHUNK):
        kernel = (x[start : start + CHUNK] @ y.T / x.shape[1] + 1) ** 3
        if different:
            rows = torch.arange(len(kernel))
            kernel[rows, start + rows] = 0
        total = total + (w_NR[start : start + CHUNK] * (kernel @ v_MR)).sum(0)
    return total


def clean_fid_kid(features_ND: torch.Tensor, reference_MD: torch.Tensor, seed: int = 0) -> float:
    """clean-fid's KID: the same mean over 100 random subsets of at most 1000 images. It draws from numpy's global state, which is put back."""
    from cleanfid.fid import kernel_distance as of_clean_fid

    state = np.random.get_state()
    np.random.seed(seed)
    try:
        return of_clean_fid(reference_MD.cpu().numpy(), features_ND.cpu().numpy())
    finally:
        np.random.set_state(state)


def inception_score(probabilities_NC: torch.Tensor, counts_RN: torch.Tensor | None = None) -> torch.Tensor:
    """exp(mean KL(p(y|x) || p(y))): the mean over consecutive splits of 5000 images [1], or of all images of each resample [R]."""
    p = probabilities_NC.double()
    enough("an Inception Score", len(p), 2)
    own = torch.special.xlogy(p, p).sum(1)
    if counts_RN is None:
        return torch.stack([score_of(part, own_part, torch.ones(1, len(part))) for part, own_part in zip(p.split(IS_SPLIT), own.split(IS_SPLIT))]).mean(0)
    return score_of(p, own, counts_RN)


def score_of(p, own, counts_RN):
    share = (counts_RN / counts_RN.sum(1, keepdim=True)).to(p)
    marginal = share @ p
    return (share @ own - torch.special.xlogy(marginal, marginal).sum(1)).exp().cpu()


def manifold(features_ND: torch.Tensor, reference_MD: torch.Tensor, k: int = K) -> dict[str, torch.Tensor]:
    """Precision and density per generated image [N], recall and coverage per reference image [M]; the scores are their means.

    An image's ball reaches to its k-th nearest neighbour within its own set. Precision: is it in a reference image's ball (density: in how
    many, over k)? Recall: is the reference image in a generated one's ball? Coverage: is a generated image in its ball?
    """
    x, y = features_ND.double(), reference_MD.double().to(features_ND.device)
    enough(f"precision and recall (k = {k})", min(len(x), len(y)), k + 1)
    radius_N, radius_M = radii(x, k), radii(y, k)
    density, recall, coverage = [], torch.zeros(len(y), dtype=torch.bool, device=x.device), torch.zeros(len(y), dtype=torch.bool, device=x.device)
    for rows, reach in zip(x.split(CHUNK), radius_N.split(CHUNK)):
        distance = torch.cdist(rows, y)
        inside = distance <= radius_M
        density.append(inside.sum(1) / k)
        recall |= (distance <= reach[:, None]).any(0)
        coverage |= inside.any(0)
    density = torch.cat(density)
    found = dict(precision=density > 0, recall=recall, density=density, coverage=coverage)
    return {name: value.double().cpu() for name, value in found.items()}


def radii(x: torch.Tensor, k: int) -> torch.Tensor:
    """Distance to the k-th nearest other image; the nearest of all is the image itself."""
    return torch.cat([torch.cdist(rows, x).kthvalue(k + 1, dim=1).values for rows in x.split(CHUNK)])


def mean_of(values_N: torch.Tensor, counts_RN: torch.Tensor) -> torch.Tensor:
    """Mean per resample [R] of a value per image."""
    return counts_RN @ values_N / counts_RN.sum(1)


def difference(first: Score, second: Score) -> dict:
    """first - second, paired: both on the same resamples, image i of one with image i of the other (equal labels and noise). Is it within noise?"""
    if (first.name, first.checksum, first.n_reference, len(first.resampled)) != (second.name, second.checksum, second.n_reference, len(second.resampled)):
        raise ValueError(f"{first.name} and {second.name} are not the same score: the extractor, the reference or the number of resamples differs")
    if first.n != second.n:
        raise ValueError(f"{first.name} of {first.n} and of {second.n} images do not compare: its bias depends on their number; use equally many")
    return verdict(first.value - second.value, WITHIN * (first.resampled - second.resampled).std().item())


def seed_difference(first: list[float], second: list[float]) -> dict:
    """Mean of first - second over seeds, paired, with Student's 95 % interval. Is it within noise?"""
    from scipy.stats import t

    if len(first) != len(second) or len(first) < 2:
        raise ValueError(f"a paired test needs the same two or more seeds on both sides; there are {len(first)} and {len(second)}")
    d = np.subtract(first, second)
    return verdict(d.mean().item(), (t.ppf(0.975, len(d) - 1) * d.std(ddof=1) / len(d) ** 0.5).item())


def verdict(value: float, half: float) -> dict:
    return dict(difference=value, low=value - half, high=value + half, verdict="within noise" if abs(value) <= half else "higher" if value > 0 else "lower")
