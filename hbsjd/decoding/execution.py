"""Execution: which rows a round runs physically. `rows(active, batch)` gets the unfinished images, in order, and the batch size."""
from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Full:
    """Every row, finished or not: the cache is a slice, never copied."""

    def rows(self, active: list[int], batch: int) -> slice | list[int]:
        return slice(0, batch)


@dataclass(frozen=True)
class Compact:
    """The unfinished rows only, whose cache is gathered through an index; nothing to gather while all are unfinished."""

    def rows(self, active: list[int], batch: int) -> slice | list[int]:
        return slice(0, batch) if len(active) == batch else active


@dataclass(frozen=True)
class Hybrid:
    """Eq. 6: Full while more than `gamma` of the batch (a fraction) is unfinished, then Compact."""

    gamma: float

    def rows(self, active: list[int], batch: int) -> slice | list[int]:
        return (Full() if len(active) > self.gamma * batch else Compact()).rows(active, batch)
