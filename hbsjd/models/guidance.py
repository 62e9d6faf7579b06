"""Classifier-free guidance as a wrapper of the model protocol: 2 B rows inside, B outside.

Image b owns the physical rows 2 b (conditional) and 2 b + 1 (null: the null class, or a caption's unconditional
embedding), so a slice of images is a slice of rows.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from hbsjd.decoding.types import wide
from hbsjd.models.captions import Captions


class Guided:
    """logits = null + scale (conditional - null), in float32 or wider, before temperature and filters."""

    def __init__(self, model, scale: float):
        if isinstance(model, Guided):
            raise ValueError(f"the model is already guided at {model.scale}; pass the bare model, or leave guidance at 1")
        if model.config.num_classes is None:
            raise ValueError("guidance needs a null class and this model has none; use guidance=1")
        self.model, self.scale, self.config = model, scale, model.config

    def __call__(self, condition, tokens_BT):
        return self.fuse(self.model(self.with_null(condition), tokens_BT.repeat_interleave(2, dim=0)))

    def prefill(self, condition, prefix_BP, prefix_len_B, capacity: int, cache=None, rows=None):
        double = (x.repeat_interleave(2, dim=0) for x in (prefix_BP, prefix_len_B))
        if cache is None:
            return PairedCache(self.model.prefill(self.with_null(condition), *double, capacity))
        self.model.prefill(self.with_null(condition), *double, capacity, cache.inner, pairs(rows))
        return cache

    def step(self, tokens_RL, positions_RL, cache, rows):
        double = (x.repeat_interleave(2, dim=0) for x in (tokens_RL, positions_RL))
        return self.fuse(self.model.step(*double, cache.inner, pairs(rows)))

    def with_null(self, condition):
        """[2 B]: every class id or caption, and after it its null one."""
        if isinstance(condition, Captions):
            return condition.with_null()
        return torch.stack([condition, torch.full_like(condition, self.config.num_classes)], dim=1).flatten()

    def fuse(self, logits):
        conditional, null = wide(logits).unflatten(0, (-1, 2)).unbind(1)
        return torch.lerp(null, conditional, self.scale)


@dataclass(frozen=True)
class PairedCache:
    """The cache of a guided model, addressed by image."""

    inner: Any

    def move(self, dst_rows, src_rows, upto: int) -> None:
        self.inner.move(pairs(dst_rows), pairs(src_rows), upto)

    def expand(self, group: int) -> None:
        self.inner.select(pairs(torch.arange(self.inner.rows // 2).repeat_interleave(group)))


def pairs(rows):
    """The physical rows of images: a slice of a slice, an index of an index."""
    if isinstance(rows, slice):
        return slice(rows.start and 2 * rows.start, rows.stop and 2 * rows.stop)
    return torch.stack([2 * rows, 2 * rows + 1], dim=1).flatten()
