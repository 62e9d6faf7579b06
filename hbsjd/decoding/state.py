"""A rollout between two rounds: which image each row decodes, what has been committed and drafted, and the host's copy of the cursors."""
from __future__ import annotations

import torch

from hbsjd.decoding.types import Images, Method, Policy, Rollout, Verdict, Window

ROW = ("owner", "image", "start", "cursor", "round", "recycled", "tokens", "drafts", "q", "logprobs")  # what belongs to a row


class State:
    """S rows, each decoding one of N images; the images after the first S wait for a row. `cache` holds the first S, prefilled.

    `tokens` has one column more than an image: it takes what a round predicts but does not commit. `out` holds the finished images.
    """

    def __init__(self, model, cache, method: Method, policy: Policy, images: Images, length: int, slots: int, logprobs: bool = False, rows_per_image: int = 1):
        N, W, device = len(images.start_N), method.window.W, images.start_N.device
        self.model, self.cache, self.method, self.policy, self.images, self.length = model, cache, method, policy, images, length
        self.rows_per_image = rows_per_image  # a guided image costs two physical rows
        self.rows, self.ahead = torch.arange(slots, device=device), torch.arange(W + 1, device=device)
        self.owner, self.image, self.start, self.cursor, self.round, self.recycled = self.rows.new_zeros(6, slots)
        self.tokens, self.drafts = self.rows.new_zeros(slots, length + 1), self.rows.new_zeros(slots, W)
        self.q = None  # [S, W, V] once a rule has named its p
        self.logprobs, self.out_logprobs = (torch.zeros(n, length + 1, dtype=torch.double, device=device) if logprobs else None for n in (slots, N))
        self.out, self.precision = self.rows.new_zeros(N, length), torch.float32  # of the log-probabilities: that of p
        self.starts, self.cursors = images.start_N.tolist(), [length] * slots
        self.busy, self.waiting, self.trace, self.prefills, self.pace = [], 0, [], 1, method.window.begin()
        self.seat(list(range(slots)))
        self.settle()

    @property
    def active(self) -> list[int]:
        return [row for row in self.busy if self.cursors[row] < self.length]

    def seat(self, rows: list[int]) -> torch.Tensor:
        """The next waiting images take these rows; returns their numbers."""
        taken = self.tensor(range(self.waiting, self.waiting + len(rows)))
        index = self.tensor(rows)
        self.owner = self.owner.index_copy(0, index, taken)  # a new tensor: the trace keeps the old one
        self.image[index], self.start[index], self.cursor[index] = self.images.id_N[taken], self.images.start_N[taken], self.images.start_N[taken]
        self.round[index], self.recycled[index] = 0, 0
        self.tokens[index, : self.images.prefix_NP.shape[1]] = self.images.prefix_NP[taken]
        if self.logprobs is not None:
            self.logprobs[index] = 0
        for row in rows:
            self.cursors[row] = self.starts[self.waiting]
            self.waiting += 1
        self.busy = sorted({*self.busy, *rows})
        return taken

    def settle(self) -> None:
        """Finished images leave their rows: to the next waiting images, prefilled together, or to the last rows where the execution packs them."""
        while len(self.active) < len(self.busy):
            freed = [row for row in self.busy if self.cursors[row] == self.length]
            self.keep(self.tensor(freed))
            self.busy = self.active
            if refilled := freed[: len(self.starts) - self.waiting]:
                taken, longest = self.seat(refilled), max(self.cursors[row] for row in refilled)
                inputs = self.images.condition_N[taken], self.images.prefix_NP[taken, :longest], self.images.start_N[taken]
                self.model.prefill(*inputs, self.length + self.method.window.W + 1, self.cache, self.tensor(refilled))
                self.prefills += 1
        if moves := self.method.execution.moves(self.busy):
            self.move(*zip(*moves))

    def keep(self, rows) -> None:
        self.out[self.owner[rows]] = self.tokens[rows, :-1]
        if self.logprobs is not None:
            self.out_logprobs[self.owner[rows]] = self.logprobs[rows]

    def move(self, dst: list[int], src: list[int]) -> None:
        """Rows `src` go on as rows `dst`: their keys and values up to the cursor, once, and all that is known of them."""
        self.cache.move(self.tensor(dst), self.tensor(src), max(self.cursors[row] for row in src))
        self.owner = self.owner.clone()
        for part in filter(lambda part: part is not None, (getattr(self, name) for name in ROW)):
            part[self.tensor(dst)] = part[self.tensor(src)]
        for new, old in zip(dst, src):
            self.cursors[new] = self.cursors[old]
        self.busy = sorted({*self.busy, *dst} - {*src})

    def tensor(self, numbers) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.long).to(self.rows.device, non_blocking=True)

    def read(self, logits: torch.Tensor) -> None:
        """The round's one host read: the cursors, and whether the logits were finite (their sum in float32 is not, if one of them is not)."""
        finite = logits.sum(dtype=torch.float32).isfinite()
        *cursors, finite = torch.cat([self.cursor, finite.long()[None]]).tolist()
        if not finite:
            raise ValueError(f"the model's logits are NaN or infinite in round {len(self.trace)}: check its weights and dtype")
        self.pace = self.method.window.observe(self.pace, [(self.cursors[row], cursors[row]) for row in self.busy], self.length)
        self.cursors = cursors

    def open(self, noise) -> Window:
        """The next round's rows and their recycled drafts, no wider than what the image farthest from its end has left."""
        rows = self.method.execution.rows(self.active, len(self.cursors))
        physical = (len(rows) if isinstance(rows, list) else rows.stop) * self.rows_per_image
        self.pace = self.method.window.plan(self.pace, physical, noise)
        width = min(self.pace.width, self.length - min(self.cursors[row] for row in self.active))
        if isinstance(rows, list):
            rows = self.tensor(rows)
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
            self.precision = scores_RLV.dtype
            logprobs_RL1 = scores_RLV.log_softmax(-1).gather(-1, verdict.tokens_RL[..., None])
            self.logprobs[window.index_R[:, None], where_RL] = logprobs_RL1[..., 0].double()
        self.cursor[window.rows] = cursor_R
        self.round[window.rows] = window.round_R + 1

    def slide(self, window: Window, verdict: Verdict, advance_R) -> None:
        """The predictions past the new cursor become the next drafts; their q is this round's p, for kept and redrawn ones alike."""
        width = window.drafts_RW.shape[1]
        self.recycled[window.rows] = (width + 1 - advance_R).clamp(max=width)
        if width == 0:
            return
        source_RW = (advance_R[:, None] + self.ahead[:width]).clamp(max=width)
        self.drafts[window.rows, :width] = verdict.tokens_RL.gather(1, source_RW)
        if verdict.p_RLV is not None:
            if self.q is None:
                self.q = verdict.p_RLV.new_zeros(*self.drafts.shape, verdict.p_RLV.shape[-1])
            self.q[window.rows, :width] = verdict.p_RLV[self.rows[: len(advance_R), None], source_RW]

    def record(self, window: Window, verdict: Verdict, advance_R) -> None:
        R, L = window.positions_RL.shape
        counts = self.owner[window.rows], advance_R, verdict.accepted_R, window.remaining_R
        self.trace.append((len(self.active), R * self.rows_per_image, L - 1, counts))

    def result(self) -> Rollout:
        active, physical, window = (torch.tensor([round_[i] for round_ in self.trace], dtype=torch.long) for i in range(3))
        advance, accepted, remaining = counts = self.start.new_zeros(3, len(self.trace), len(self.starts))
        if self.trace:
            owner_M, *counts_M = (torch.cat(parts) for parts in zip(*(parts for *_, parts in self.trace)))
            round_M = torch.arange(len(self.trace)).repeat_interleave(physical // self.rows_per_image).to(owner_M.device)
            counts[:, round_M, owner_M] = torch.stack(counts_M)
        return Rollout(
            tokens=self.out,
            start=self.images.start_N,
            length=torch.full_like(self.images.start_N, self.length),
            logprobs=None if self.out_logprobs is None else self.out_logprobs[:, :-1].to(self.precision),
            rounds=dict(
                active=active, physical_rows=physical, window=window, advance=advance, accepted=torch.minimum(accepted, advance),
                proposed=torch.minimum(remaining, window[:, None].to(remaining.device)),
            ),
            nfe=len(self.trace),
            prefills=self.prefills,
            policy=self.policy,
        )
