"""From logits to the distribution that is sampled: one place for every method. Guidance has been applied by then, by the model wrapper."""
from __future__ import annotations

import torch

from hbsjd.decoding.types import Policy, wide


def scores(logits: torch.Tensor, policy: Policy) -> torch.Tensor:
    """Log-probabilities up to a constant [..., V], float32 or wider, after temperature, top-k (ties kept) and top-p; -inf where filtered."""
    x = wide(logits)
    if policy.temperature != 1:
        x = x / policy.temperature
    if policy.top_k:
        x = x.masked_fill(x < x.topk(policy.top_k).values[..., -1:], -torch.inf)
    if policy.top_p < 1:
        x = x.masked_fill(outside_nucleus(x, policy.top_p), -torch.inf)
    return x


def outside_nucleus(x: torch.Tensor, top_p: float) -> torch.Tensor:
    """True where a token is not among the fewest most probable ones whose probability reaches top_p."""
    ranked, order = x.sort(dim=-1, descending=True, stable=True)
    p = ranked.softmax(-1)
    return torch.zeros_like(x, dtype=torch.bool).scatter(-1, order, p.cumsum(-1) - p >= top_p)
