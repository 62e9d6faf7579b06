"""Tabular models: one row of logits per context, so that the joint distribution of an image can be written down and enumerated."""
from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from types import SimpleNamespace

import torch


@dataclass
class Tokens:
    """The cache of a tabular model: the token written at [row, position]. As in a real cache, stale entries stay until overwritten."""

    tokens: torch.Tensor
    condition: torch.Tensor

    def move(self, dst_rows, src_rows, upto: int) -> None:
        self.tokens[dst_rows, :upto] = self.tokens[src_rows, :upto].clone()  # slices may overlap
        self.condition[dst_rows] = self.condition[src_rows].clone()

    def select(self, rows) -> None:
        self.tokens, self.condition = self.tokens[rows], self.condition[rows]

    def expand(self, group: int) -> None:
        self.select(torch.arange(len(self.condition)).repeat_interleave(group))

    @property
    def rows(self) -> int:
        return len(self.condition)


class Tabular:
    """Random logits [num_classes + 1, contexts, V]; a context is the tokens before a position, numbered as a node of a V-ary tree."""

    def __init__(self, vocab_size: int, length: int, num_classes: int = 1, seed: int = 0, spread: float = 1.5, dtype=torch.float64):
        self.config = SimpleNamespace(vocab_size=vocab_size, block_size=length, num_classes=num_classes)
        contexts = sum(vocab_size**t for t in range(length))
        generator = torch.Generator().manual_seed(seed)
        self.table = spread * torch.randn(num_classes + 1, contexts, vocab_size, generator=generator, dtype=torch.float64).to(dtype)

    def __call__(self, condition_B, tokens_BT):
        positions_BT = torch.arange(-1, tokens_BT.shape[1] - 1).expand(len(tokens_BT), -1)
        return self.lookup(condition_B, tokens_BT, positions_BT)

    def prefill(self, condition_B, prefix_BP, prefix_len_B, capacity, cache=None, rows=None):
        if cache is None:
            cache, rows = Tokens(torch.zeros(len(condition_B), capacity, dtype=torch.long), torch.zeros_like(condition_B)), slice(0, len(condition_B))
        cache.tokens[rows, : prefix_BP.shape[1]] = prefix_BP
        cache.condition[rows] = condition_B
        return cache

    def step(self, tokens_RL, positions_RL, cache, rows):
        row_R1 = torch.arange(cache.rows)[rows][:, None]
        written = positions_RL >= 0
        cache.tokens[row_R1.expand_as(positions_RL)[written], positions_RL[written]] = tokens_RL[written]
        return self.lookup(cache.condition[rows], cache.tokens[rows], positions_RL)

    def lookup(self, condition_R, tokens_RS, positions_RL):
        """Logits after the tokens up to each position (past the last one: those of the last)."""
        V, length = self.config.vocab_size, self.config.block_size
        node_RL = torch.zeros_like(positions_RL)
        for t in range(length - 1):
            node_RL = torch.where(positions_RL >= t, node_RL * V + tokens_RS[:, t, None] + 1, node_RL)
        return self.table[condition_R[:, None], node_RL]

    def joint(self, condition: int, prefix: tuple[int, ...] = (), scores=lambda logits: logits) -> dict[tuple[int, ...], float]:
        """The exact law of whole images after a prefix, `scores` standing between logits and log-probabilities."""
        V, length = self.config.vocab_size, self.config.block_size
        images = torch.tensor([prefix + rest for rest in product(range(V), repeat=length - len(prefix))])
        log_p = scores(self(torch.full((len(images),), condition), images)).log_softmax(-1)
        picked = log_p.gather(-1, images[..., None])[:, len(prefix) :, 0].sum(1).exp()
        return dict(zip(map(tuple, images.tolist()), picked.tolist()))
