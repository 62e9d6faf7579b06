"""How far two rollouts of one seed agree, and how near a tie their first difference is: rounding, or a mistake?"""
from __future__ import annotations

import torch

from hbsjd.decoding.noise import SHARED, gumbel, row_keys


@torch.no_grad()
def first_difference(model, condition, got_T, want_T, image: int, seed: int, mode: str) -> tuple[int | None, float | None]:
    """The first position where an image decoded by an exact method differs from `want_T`, and the distance of the two best candidates there.

    `model` is guided as the rollouts were; `mode` is the rollouts' `policy.mode`: "sample" (no filters) adds the noise that belongs to image and
    position. The distance is measured by the teacher-forced model in its own precision. (None, None) where the two agree.
    """
    differs = (got_T != want_T).nonzero()
    if not len(differs):
        return None, None
    position = int(differs[0, 0])
    scores_V = model(condition[None], want_T[None])[0, position].double()
    if mode == "sample":
        scores_V = scores_V + gumbel(row_keys(seed, SHARED, torch.tensor(image), torch.tensor(position)), len(scores_V)).to(scores_V)
    best, second = scores_V.topk(2).values
    return position, float(best - second)
