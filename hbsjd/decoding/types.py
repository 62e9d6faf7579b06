"""What the decoding core passes around: the model it drives, a round's window, the verdict on it, and what comes out.

Shapes: B or N images, S slots (rows of the cache), R rows of a round, W drafts, L = W + 1 predictions, V codes, T positions of an image (prefix included).
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch


class DecodeModel(Protocol):
    """All that decoding asks of a model, besides `config` (vocab_size, block_size, num_classes).

    Of conditions, class ids or captions, decoding takes rows, `condition[rows]`, which it hands to `prefill`.
    """

    config: Any

    def prefill(self, condition, prefix_BP, prefix_len_B, capacity: int, cache=None, rows=None) -> Any:
        """Write the condition and every prefix token but each row's last into a cache for `capacity` positions, and return it."""

    def step(self, tokens_RL, positions_RL, cache, rows: slice | torch.Tensor) -> torch.Tensor:
        """Logits [R, L, V]: the prediction of the token after each input. Position -1 is the condition; its token is ignored."""


@dataclass(frozen=True)
class Method:
    """A point on the axes of decoding. Without `bonus` the prediction after a fully accepted window is not committed (Fig. 1)."""

    rule: Any
    draft: Any
    schedule: Any
    execution: Any
    window: Any
    bonus: bool = True


@dataclass(frozen=True)
class Policy:
    """What a rollout was sampled from: `mode` is "sample" or "greedy"."""

    mode: str
    guidance: float = 1.0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    @property
    def distribution(self) -> str:
        """In words, what `Rollout.logprobs` are log-probabilities under. Of a greedy rollout: the model, from which its tokens are not samples."""
        guidance, temperature = f" guided at {self.guidance:g}" * (self.guidance != 1), f", temperature {self.temperature:g}" * (self.temperature != 1)
        filters = f", top-k {self.top_k}" * (self.top_k > 0) + f", top-p {self.top_p:g}" * (self.top_p < 1)
        return f"the model{guidance}{temperature}{filters}"

    def require_sample(self) -> None:
        """Raise ValueError unless the tokens are samples of `distribution`: a policy gradient or an importance weight needs that."""
        if self.mode != "sample":
            raise ValueError(f"a greedy rollout is not a sample of {self.distribution}; use a sampling method such as 'hbsjd_gumbel' or 'ar'")


@dataclass(frozen=True)
class Images:
    """What is to be decoded: N conditions (class ids [N], or captions), prefixes padded with 0, their lengths, and the ids that key the noise."""

    condition_N: Any
    prefix_NP: torch.Tensor
    start_N: torch.Tensor
    id_N: torch.Tensor


@dataclass(frozen=True)
class Window:
    """The rows of one round. Draft j stands at position cursor + j, and so does prediction j; prediction W stands after the last draft."""

    rows: slice | torch.Tensor  # what the model is asked to run
    index_R: torch.Tensor       # the same rows as an index
    image_R: torch.Tensor       # image ids, which key the noise
    round_R: torch.Tensor       # rounds since the image was admitted
    start_R: torch.Tensor
    cursor_R: torch.Tensor      # committed tokens, prefix included
    remaining_R: torch.Tensor   # 0 for a finished image that a Full round still carries
    positions_RL: torch.Tensor  # where the predictions stand; the inputs stand one before
    last_R1: torch.Tensor       # the last committed token, the first input
    drafts_RW: torch.Tensor
    recycled_R: torch.Tensor    # how many leading drafts are predictions of the last round; the others are
    copied_RW: torch.Tensor     # copies of a token (one-hot q), or uniform (q = 1 / V)
    q_RWV: torch.Tensor | None  # what the recycled drafts were drawn from; None where there is none or the rule needs none
    block: int                  # the method's width W; a round near the end may be narrower

    def inputs(self) -> torch.Tensor:
        """[R, L]: the last committed token, then the drafts."""
        return torch.cat([self.last_R1, self.drafts_RW], dim=1)


@dataclass(frozen=True)
class Verdict:
    """Prediction j is draft j where it stands, the replacement of the first draft that does not, and after that the next round's drafts."""

    tokens_RL: torch.Tensor
    accepted_R: torch.Tensor    # leading drafts that stand, 0..W
    p_RLV: torch.Tensor | None  # this round's distribution: the q of every prediction that is not committed


@dataclass(frozen=True)
class Rollout:
    """The result of decoding; the same type for every method.

    tokens [B, T] int64, prefix included; start [B] the first generated position and length [B] one past the last;
    logprobs [B, T] of each committed token under `policy.distribution` (0 on the prefix), or None;
    rounds: active, physical_rows, window [rounds] and advance, accepted, proposed [rounds, B] (drafts); nfe verifier forwards, prefills apart.
    """

    tokens: torch.Tensor
    start: torch.Tensor
    length: torch.Tensor
    logprobs: torch.Tensor | None
    rounds: dict[str, torch.Tensor]
    nfe: int
    prefills: int
    policy: Policy

    def counts(self) -> dict[str, int]:
        """Totals over the rollout; proposed counts every draft inside an unfinished image, accepted those that were committed."""
        return dict(
            nfe=self.nfe,
            prefills=self.prefills,
            rounds=len(self.rounds["active"]),
            physical_rows=int(self.rounds["physical_rows"].sum()),
            row_rounds=int(self.rounds["active"].sum()),
            committed=int((self.length - self.start).sum()),
            accepted=int(self.rounds["accepted"].sum()),
            proposed=int(self.rounds["proposed"].sum()),
        )


def wide(x: torch.Tensor) -> torch.Tensor:
    """float32, or float64 where x already is: the precision of every probability, residual and log-probability."""
    return x if x.dtype == torch.float64 else x.float()
