"""A rollout between two rounds: what has been committed, what is drafted, and the host's copy of the cursors."""
from __future__ import annotations

import torch

from hbsjd.decoding.types import Method, Policy, Rollout, Verdict, Window


class State:
    """Tensors of B images. `tokens` has one column more than an image: it takes what a round predicts but does not commit."""

    def __init__(
        self, model, cache, method: Method, policy: Policy, prefix_BP, start_B, image_B, length: int, logprobs: bool = False, rows_per_image: int = 1
    ):
        B, device = len(start_B), start_B.device
        self.model, self.cache, self.method, self.policy, self.length = model, cache, method, policy, length
        self.rows_per_image = rows_per_image  # a guided image costs two physical rows
        self.start, self.cursor, self.image = start_B, start_B.clone(), image_B
        self.round = torch.zeros_like(start_B)
        self.tokens = torch.zeros(B, length + 1, dtype=torch.long, device=device)
        self.tokens[:, : prefix_BP.shape[1]] = prefix_BP
        self.drafts = torch.zeros(B, method.window.W, dtype=torch.long, device=device)
        self.recycled = torch.zeros_like(start_B)  # how many of an image's drafts are predictions of its last round
        self.q = None                              # [B, W, V] once a rule has named its p
        self.logprobs = torch.zeros(B, length + 1, device=device) if logprobs else None  # widened to the precision of p
        self.rows, self.ahead = torch.arange(B, device=device), torch.arange(method.window.W + 1, device=device)
        self.trace = []
        self.read(torch.zeros(1, device=device))

    def read(self, logits: torch.Tensor) -> None:
        """The round's one host read: the cursors, and whether the logits were finite (their sum in float32 is not, if one of them is not)."""
        finite = logits.sum(dtype=torch.float32).isfinite()
        *self.cursors, finite = torch.cat([self.cursor, finite.long()[None]]).tolist()
        if not finite:
            raise ValueError(f"the model's logits are NaN or infinite in round {len(self.trace)}: check its weights and dtype")
        self.active = [row for row, cursor in enumerate(self.cursors) if cursor < self.length]

    def open(self) -> Window:
        """The next round's rows and their recycled drafts, no wider than what the image farthest from its end has left."""
        rows = self.method.execution.rows(self.active, len(self.cursors))
        longest = self.length - min(self.cursors[row] for row in self.active)
        width = min(self.method.window.W, longest)
        if isinstance(rows, list):
            rows = torch.tensor(rows, device=self.cursor.device)
        index_R, cursor_R = self.rows[rows], self.cursor[rows]
        return Window(
            rows=rows,
            index_R=index_R,
            image_R=self.image[rows],
            round_R=self.round[rows],
            start_R=self.start[rows],
            cursor_R=cursor_R,
            remaining_R=self.length - cursor_R,
            positions_RL=cursor_R[:, None] + self.ahead[: width + 1],
            last_R1=self.tokens[index_R, (cursor_R - 1).clamp(min=0)][:, None],
            drafts_RW=self.drafts[rows, :width],
            recycled_R=self.recycled[rows],
            copied_RW=None,
            q_RWV=None if self.q is None else self.q[rows, :width],
            block=self.method.window.W,
        )

    def advance(self, verdict: Verdict, window: Window) -> torch.Tensor:
        """How far each row goes [R]: its leading accepted drafts and the prediction after them, as the schedule allows."""
        most = window.drafts_RW.shape[1] + self.method.bonus
        able_R = torch.minimum((verdict.accepted_R + 1).clamp(max=max(most, 1)), window.remaining_R)
        return self.method.schedule.advance(able_R, window)

    def commit(self, window: Window, verdict: Verdict, advance_R, scores_RLV) -> None:
        """Write the predictions that are committed, and their log-probabilities where asked for."""
        cursor_R = window.cursor_R + advance_R
        where_RL = window.positions_RL.where(window.positions_RL < cursor_R[:, None], self.length)
        self.tokens[window.index_R[:, None], where_RL] = verdict.tokens_RL
        if self.logprobs is not None:
            self.logprobs = self.logprobs.to(scores_RLV.dtype)
            logprobs_RL1 = scores_RLV.log_softmax(-1).gather(-1, verdict.tokens_RL[..., None])
            self.logprobs[window.index_R[:, None], where_RL] = logprobs_RL1[..., 0]
        self.cursor[window.rows] = cursor_R
        self.round[window.rows] = window.round_R + 1

    def slide(self, window: Window, verdict: Verdict, advance_R) -> None:
        """The predictions past the new cursor become the next drafts; their q is this round's p, for kept and redrawn ones alike."""
        width = window.drafts_RW.shape[1]
        if width == 0:
            return
        source_RW = (advance_R[:, None] + self.ahead[:width]).clamp(max=width)
        self.drafts[window.rows, :width] = verdict.tokens_RL.gather(1, source_RW)
        self.recycled[window.rows] = (width + 1 - advance_R).clamp(max=width)
        if verdict.p_RLV is not None:
            if self.q is None:
                self.q = verdict.p_RLV.new_zeros(*self.drafts.shape, verdict.p_RLV.shape[-1])
            self.q[window.rows, :width] = verdict.p_RLV[self.rows[: len(advance_R), None], source_RW]

    def record(self, window: Window, verdict: Verdict, advance_R) -> None:
        R, L = window.positions_RL.shape
        self.trace.append((len(self.active), R * self.rows_per_image, L - 1, (window.index_R, advance_R, verdict.accepted_R, window.remaining_R)))

    def result(self, prefills: int) -> Rollout:
        active, physical, window = (torch.tensor([round_[i] for round_ in self.trace], dtype=torch.long) for i in range(3))
        counts = self.start.new_zeros(3, len(self.trace), len(self.cursors))
        if self.trace:
            index_N, *counts_N = (torch.cat(parts) for parts in zip(*(parts for *_, parts in self.trace)))
            round_N = torch.arange(len(self.trace)).repeat_interleave(physical // self.rows_per_image).to(index_N.device)
            counts[:, round_N, index_N] = torch.stack(counts_N)
        advance, accepted, remaining = counts
        return Rollout(
            tokens=self.tokens[:, :-1].contiguous(),
            start=self.start,
            length=torch.full_like(self.start, self.length),
            logprobs=None if self.logprobs is None else self.logprobs[:, :-1].contiguous(),
            rounds=dict(active=active, physical_rows=physical, window=window, advance=advance, accepted=torch.minimum(accepted, advance),
                        proposed=torch.minimum(remaining, window[:, None].to(remaining.device))),
            nfe=len(self.trace),
            prefills=prefills,
            policy=self.policy,
        )
