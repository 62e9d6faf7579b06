"""Divergences between the student's and the teacher's next token, over the whole vocabulary, and their sum over the tokens of a suffix.

S is the student's distribution, T the teacher's, and KL(P || Q) = sum_v P(v) (ln P(v) - ln Q(v)), where P(v) = 0 counts 0 and Q(v) = 0 < P(v)
counts infinity. Gradients reach the student's logits alone: not the teacher, and not the tokens that the student sampled.

Shapes: B sequences, T positions, N tokens of a chunk, V codes, G groups of codes. Logits [:, t] predict token t, as `LlamaGen.forward` returns them.
"""
from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from hbsjd.decoding.types import wide


def kl(p_logp_NV: torch.Tensor, q_logp_NV: torch.Tensor) -> torch.Tensor:
    """KL(P || Q) [N]. The ratio is masked before it is multiplied: 0 (ln 0 - ln 0) would be NaN, and so would its gradient."""
    ratio = (p_logp_NV - q_logp_NV).masked_fill(p_logp_NV == -torch.inf, 0.0)
    return (p_logp_NV.exp() * ratio).sum(-1)


def forward_kl(student_logp_NV: torch.Tensor, teacher_logp_NV: torch.Tensor) -> torch.Tensor:
    """KL(T || S) [N]: mass-covering; the loss of KD and SeqKD."""
    return kl(teacher_logp_NV, student_logp_NV)


def reverse_kl(student_logp_NV: torch.Tensor, teacher_logp_NV: torch.Tensor) -> torch.Tensor:
    """KL(S || T) [N]: mode-seeking; the loss of VarKD (arXiv 2606.06078, Eq. 7)."""
    return kl(student_logp_NV, teacher_logp_NV)


def bidirectional_kl(student_logp_NV: torch.Tensor, teacher_logp_NV: torch.Tensor) -> torch.Tensor:
    """KL(S || T) / 2 + KL(T || S) / 2 [N] (arXiv 2608.18183, Eq. 3)."""
    return (kl(student_logp_NV, teacher_logp_NV) + kl(teacher_logp_NV, student_logp_NV)) / 2


def jsd(student_logp_NV: torch.Tensor, teacher_logp_NV: torch.Tensor, beta: float = 0.5) -> torch.Tensor:
    """beta KL(T || M) + (1 - beta) KL(S || M) [N], M = beta T + (1 - beta) S (GKD, arXiv 2306.13649; the same beta as TRL's).

    It vanishes at both ends, so there it is by convention what it tends to after division by beta or 1 - beta: forward KL at 0, reverse KL at 1.
    """
    if beta == 0:
        return forward_kl(student_logp_NV, teacher_logp_NV)
    if beta == 1:
        return reverse_kl(student_logp_NV, teacher_logp_NV)
    parts = torch.stack([teacher_logp_NV + math.log(beta), student_logp_NV + math.log1p(-beta)])
    mixture_logp_NV = parts.clamp(min=torch.finfo(parts.dtype).min).logsumexp(0)  # of -inf alone its gradient would be NaN
    return beta * kl(teacher_logp_NV, mixture_logp_NV) + (1 - beta) * kl(student_logp_NV, mixture_logp_NV)


DIVERGENCES = {
    "forward_kl": forward_kl,              # KL(T || S)
    "reverse_kl": reverse_kl,              # KL(S || T)
    "bidirectional_kl": bidirectional_kl,  # KL(S || T) / 2 + KL(T || S) / 2
    "jsd": jsd,                            # beta KL(T || M) + (1 - beta) KL(S || M); `partial(jsd, beta=0.1)` sets beta
}


@torch.no_grad()
def varkd_weights(teacher_logits_BTV: torch.Tensor, mask_BT: torch.Tensor, tau: float = 0.1, chunk: int = 1024) -> torch.Tensor:
    """alpha_t = 1 - H(T_t) / ln V [B, T], and 0 outside the mask and after the first masked-in position with alpha_t < tau (which keeps its own).

    arXiv 2606.06078, Eqs. 8 to 10: VarKD is reverse KL with these weights and, for its codebook relaxation, with groups (Eq. 12).
    """
    chunks = teacher_logits_BTV.flatten(0, 1).split(chunk)
    entropy_BT = torch.cat([torch.special.entr(wide(logits_NV).softmax(-1)).sum(-1) for logits_NV in chunks]).view(mask_BT.shape)
    alpha_BT = 1 - entropy_BT / math.log(teacher_logits_BTV.shape[-1])
    below_BT = (mask_BT & (alpha_BT < tau)).long()
    after_BT = below_BT.cumsum(1) > below_BT
    return alpha_BT.masked_fill(~mask_BT | after_BT, 0.0)


def group_logp(logp_NV: torch.Tensor, groups_V: torch.Tensor) -> torch.Tensor:
    """ln sum_{v in g} P(v) [N, G], code v being in group groups_V[v] of 0..G-1 (arXiv 2606.06078, Eq. 11); -inf for a group without probability."""
    index_NV, shape_NG = groups_V.expand_as(logp_NV), (len(logp_NV), int(groups_V.max()) + 1)
    top_NG = logp_NV.new_full(shape_NG, -torch.inf).scatter_reduce(1, index_NV, logp_NV.detach(), "amax")
    top_NG = top_NG.masked_fill(top_NG == -torch.inf, 0.0)
    sum_NG = logp_NV.new_zeros(shape_NG).scatter_add(1, index_NV, (logp_NV - top_NG.gather(1, index_NV)).exp())
    empty_NG = sum_NG == 0
    return (sum_NG.masked_fill(empty_NG, 1.0).log() + top_NG).masked_fill(empty_NG, -torch.inf)


@torch.no_grad()
def codebook_groups(codebook_VD: torch.Tensor, groups: int, rounds: int = 50) -> torch.Tensor:
    """The group [V] of each code, 0..G - 1, G <= groups: k-means of the codebook (arXiv 2606.06078), started from codes far from each other."""
    codes_VD = codebook_VD.double()
    far = [0]
    distance_V = (codes_VD - codes_VD[0]).square().sum(-1)
    while len(far) < groups:
        far.append(int(distance_V.argmax()))
        distance_V = torch.minimum(distance_V, (codes_VD - codes_VD[far[-1]]).square().sum(-1))
    centres_GD = codes_VD[far]
    for _ in range(rounds):
        groups_V = torch.cdist(codes_VD, centres_GD).argmin(1)
        count_G1 = torch.bincount(groups_V, minlength=groups)[:, None]
        means_GD = torch.zeros_like(centres_GD).index_add_(0, groups_V, codes_VD) / count_G1.clamp(min=1)
        centres_GD = means_GD.where(count_G1 > 0, centres_GD)
    return groups_V.unique(return_inverse=True)[1]


def divergence_sum(
    divergence,
    student_logits_BTV: torch.Tensor,
    teacher_logits_BTV: torch.Tensor,
    mask_BT: torch.Tensor,
    weights_BT: torch.Tensor | None = None,
    temperature: float = 1.0,
    groups_V: torch.Tensor | None = None,
    chunk: int = 1024,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(sum over masked-in tokens of weight x divergence, number of masked-in tokens), both scalars on the logits' device.

    The loss is the sum over the count of the whole batch, every micro-batch and rank included, so that how a batch is split changes nothing; a
    token of weight 0 counts too. Both distributions are softmax(logits / temperature), without Hinton's factor temperature^2. At least float32 inside
    for logits of any dtype, but only of `chunk` tokens at a time: a chunk keeps views of the logits and is computed again for its gradient.
    """
    assert student_logits_BTV.shape == teacher_logits_BTV.shape and student_logits_BTV.shape[:2] == mask_BT.shape and mask_BT.dtype == torch.bool
    weights_BT = mask_BT.float() if weights_BT is None else weights_BT.detach().masked_fill(~mask_BT, 0.0)

    def chunk_sum(student_NV, teacher_NV, weights_N):
        used = weights_N != 0
        logp = [F.log_softmax(wide(logits[used]) / temperature, dim=-1) for logits in (student_NV, teacher_NV)]
        if groups_V is not None:
            logp = [group_logp(x, groups_V) for x in logp]
        return (weights_N[used] * divergence(*logp)).sum()

    chunks = zip(*(x.flatten(0, 1).split(chunk) for x in (student_logits_BTV, teacher_logits_BTV.detach(), weights_BT)))
    sums = [checkpoint(chunk_sum, *parts, use_reentrant=False, preserve_rng_state=False) for parts in chunks]
    return torch.stack(sums).sum(), mask_BT.sum()
