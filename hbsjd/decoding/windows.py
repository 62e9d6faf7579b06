"""Windows: how many drafts a round verifies."""
from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fixed:
    """W drafts; 0 is autoregressive decoding."""

    W: int
