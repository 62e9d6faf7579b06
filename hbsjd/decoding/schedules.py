"""Schedules: how far each image may advance this round. `advance(able_R, window)`: `able` is how far its own verdict lets it, 0 once finished."""
from __future__ import annotations

from dataclasses import dataclass

import torch

from hbsjd.decoding.types import Window

FAR = 1 << 40  # farther than any image: stands in for finished images in a minimum


@dataclass(frozen=True)
class Independent:
    """Every image by its own verdict (Sec. 4)."""

    def advance(self, able_R: torch.Tensor, window: Window) -> torch.Tensor:
        return able_R


@dataclass(frozen=True)
class Synchronous:
    """The paper's Batch-Synchronous: a block of W positions, counted from each image's start, is finished by all before any goes on."""

    def advance(self, able_R: torch.Tensor, window: Window) -> torch.Tensor:
        block = max(window.block, 1)
        done_R = (window.cursor_R - window.start_R) // block
        slowest = done_R.where(window.remaining_R > 0, FAR).min()
        barrier_R = window.start_R + (slowest + 1) * block
        return torch.minimum(able_R, (barrier_R - window.cursor_R).clamp(min=0))


@dataclass(frozen=True)
class Lockstep:
    """Every image by the minimum over the unfinished ones (the released SJD code's batch behaviour)."""

    def advance(self, able_R: torch.Tensor, window: Window) -> torch.Tensor:
        return torch.minimum(able_R, able_R.where(window.remaining_R > 0, FAR).min())
