"""Seconds, of a device that works asynchronously too."""
from __future__ import annotations

import time

import torch


def clock(device) -> float:
    """Seconds now, after all that was asked of the device is done."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


class Laps:
    """How long the named parts of a piece of work took: `lap` gives a part the time since the one before ended."""

    def __init__(self, device):
        self.device, self.seconds = device, {}
        self.before = clock(device)

    def lap(self, name: str) -> None:
        now = clock(self.device)
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self.before
        self.before = now
