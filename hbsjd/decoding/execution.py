"""Execution: which rows a round runs physically. `rows(active, batch)` gets the unfinished rows, in order, and how many rows there are.

`moves(active)` lists the (to, from) rows whose content changes place when images have finished.
"""
from __future__ import annotations

from dataclasses import dataclass


class Still:
    """Rows stay where they are."""

    def moves(self, active: list[int]) -> list[tuple[int, int]]:
        return []


@dataclass(frozen=True)
class Full(Still):
    """Every row, finished or not: the cache is a slice, never copied."""

    def rows(self, active: list[int], batch: int) -> slice | list[int]:
        return slice(0, batch)


@dataclass(frozen=True)
class Compact(Still):
    """The unfinished rows only, whose cache is gathered through an index in every round; nothing to gather while all are unfinished."""

    def rows(self, active: list[int], batch: int) -> slice | list[int]:
        return slice(0, batch) if len(active) == batch else active


@dataclass(frozen=True)
class Hybrid(Still):
    """Eq. 6: Full while more than `gamma` of the batch (a fraction) is unfinished, then Compact."""

    gamma: float

    def rows(self, active: list[int], batch: int) -> slice | list[int]:
        return (Full() if len(active) > self.gamma * batch else Compact()).rows(active, batch)


@dataclass(frozen=True)
class Packed:
    """The unfinished rows, always the first ones: when an image finishes, the last unfinished row moves into its place, once. A slice, never a gather."""

    def rows(self, active: list[int], batch: int) -> slice:
        assert active == list(range(len(active)))
        return slice(0, len(active))

    def moves(self, active: list[int]) -> list[tuple[int, int]]:
        holes = sorted(set(range(len(active))) - set(active))
        return list(zip(holes, reversed(active)))
