"""Windows: how many drafts a round verifies. A `Pace` is what a window remembers between rounds; `plan` and `observe` give the next one.

`plan(pace, rows, noise)` before a round, with the physical rows it will run; `observe(pace, cursors, length)` after it, with (before, after) of every row.
A choice may look at committed advances and measured costs only, never at drafts that are not committed: that would bias what is decoded.
"""
from __future__ import annotations

from dataclasses import dataclass, field, replace

PRIOR = 64      # rounds of an image that the calibration's means count for
EXPLORE = 0.02  # of all decisions


@dataclass(frozen=True)
class Pace:
    width: int
    held: int = 0                                                   # rounds since the last decision
    decisions: int = 0
    seen: dict[int, tuple[int, int]] = field(default_factory=dict)  # of each width: rounds of an image, and the tokens they committed


@dataclass(frozen=True)
class Fixed:
    """W drafts; 0 is autoregressive decoding."""

    W: int

    @property
    def widths(self) -> tuple[int]:
        return (self.W,)

    def begin(self) -> Pace:
        return Pace(self.W)

    def plan(self, pace: Pace, rows: int, noise) -> Pace:
        return pace

    def observe(self, pace: Pace, cursors, length: int) -> Pace:
        return pace


@dataclass(frozen=True)
class Adaptive:
    """The width that commits most per second: its mean committed tokens per round, over what a round of that width costs at these rows.

    `costs` {width: {physical rows: seconds}} and `prior` {width: mean committed tokens per round} are measured beforehand; None: by `hbsjd.rollout`.
    A decision is held for `hold` rounds; now and then a width is tried by lot, a cheap one more often than a dear one.
    """

    widths: tuple[int, ...] = (0, 2, 4, 8, 16, 32)
    hold: int = 4
    costs: dict[int, dict[int, float]] | None = None
    prior: dict[int, float] | None = None

    @property
    def W(self) -> int:
        return max(self.widths)

    def begin(self) -> Pace:
        return Pace(self.W)

    def plan(self, pace: Pace, rows: int, noise) -> Pace:
        if 0 < pace.held < self.hold:
            return replace(pace, held=pace.held + 1)
        cost = {width: interpolated(self.costs[width], rows) for width in self.widths}
        lot = noise.lot(pace.decisions) / EXPLORE
        width = drawn(lot, cost) if lot < 1 else max(self.widths, key=lambda width: self.mean(pace, width) / cost[width])
        return replace(pace, width=width, held=1, decisions=pace.decisions + 1)

    def observe(self, pace: Pace, cursors, length: int) -> Pace:
        """Counts rows that the end of the image could not clip."""
        advances = [after - before for before, after in cursors if length - before > pace.width]
        if not advances or pace.width == 0:
            return pace
        rounds, committed = pace.seen.get(pace.width, (0, 0))
        return replace(pace, seen=pace.seen | {pace.width: (rounds + len(advances), committed + sum(advances))})

    def mean(self, pace: Pace, width: int) -> float:
        rounds, committed = pace.seen.get(width, (0, 0))
        return (PRIOR * self.prior[width] + committed) / (PRIOR + rounds)


def interpolated(seconds: dict[int, float], rows: int) -> float:
    """Seconds at `rows`, by straight lines between the measured ones; beyond the most, in proportion."""
    measured = sorted(seconds)
    above = next((r for r in measured if r >= rows), None)
    if above is None:
        return seconds[measured[-1]] * rows / measured[-1]
    below = max((r for r in measured if r <= rows), default=above)
    share = (rows - below) / (above - below) if above > below else 0.0
    return seconds[below] + share * (seconds[above] - seconds[below])


def drawn(lot: float, cost: dict[int, float]) -> int:
    """A width by lot, each with a chance in inverse proportion to its cost."""
    total = sum(1 / seconds for seconds in cost.values())
    for width, seconds in cost.items():
        lot -= 1 / seconds / total
        if lot < 0:
            return width
    return width
