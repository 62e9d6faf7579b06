"""LlamaGen (arXiv 2406.06525): a decoder over a square grid of image tokens, behind a class (c2i) or a caption (t2i), computed as the official code does.

Quirks that official weights rely on: rotary positions are 2-D (first half of the pairs the row, second half the column), pairs are
interleaved, and condition tokens have cos = sin = 0, so every attention logit to them is exactly 0 while their values still flow.
A caption takes the last of its slots; those before it are invisible, except to themselves.

Shapes: B sequences (R physical rows in `step`), T image tokens, L inputs, S slots, N heads, D head dimension, V codes.
A condition is class ids [B], or `Captions` of B.
The cache holds keys and values at [row, slot], slot = cls_token_num + position; position -1 is the last condition token.
"""
from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from math import isqrt

import torch
import torch.nn as nn
import torch.nn.functional as F

from hbsjd.decoding.types import wide
from hbsjd.models.cache import Cache, attend_causally

PREFILL_TOKENS = 2048  # in one forward: more only moves activations out of the processor's caches


@dataclass(frozen=True)
class Config:
    dim: int
    n_layer: int
    n_head: int
    vocab_size: int = 16384
    block_size: int = 576
    num_classes: int = 1000
    cls_token_num: int = 1
    model_type: str = "c2i"
    caption_dim: int = 2048  # of a t2i model's caption features
    rope_base: float = 10000.0
    norm_eps: float = 1e-5

    def __post_init__(self):
        assert self.dim % self.n_head == 0 and isqrt(self.block_size) ** 2 == self.block_size

    @property
    def hidden(self) -> int:
        """SwiGLU width: two thirds of 4 dim, rounded up to a multiple of 256."""
        return -(-int(2 * 4 * self.dim / 3) // 256) * 256


SIZES = {  # dim, layers, heads; parameters with 16384 codes and 1000 classes (the small ones: 512 codes, the classes of OpenMoji)
    "b": dict(dim=768, n_layer=12, n_head=12),       # 110,888,448
    "l": dict(dim=1024, n_layer=24, n_head=16),      # 342,910,976
    "xl": dict(dim=1280, n_layer=36, n_head=20),     # 774,699,520
    "xxl": dict(dim=1536, n_layer=48, n_head=24),    # 1,410,972,672
    "xxxl": dict(dim=2560, n_layer=48, n_head=40),   # 3,893,027,840
    "1b": dict(dim=2048, n_layer=22, n_head=32),     # 1,199,616,000
    "3b": dict(dim=3200, n_layer=24, n_head=32),     # 3,096,659,200, head dimension 100
    "7b": dict(dim=4096, n_layer=32, n_head=32),     # about 6.6 B
    "small-student": dict(dim=256, n_layer=6, n_head=4),   # 5.4 M
    "small-teacher": dict(dim=256, n_layer=18, n_head=4),  # 15.6 M
    "tiny": dict(dim=64, n_layer=2, n_head=2),       # random weights, for tests and `smoke`
}


class LlamaGen(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        self.cls_embedding = CaptionEmbedding(config) if config.model_type == "t2i" else ClassEmbedding(config)
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.norm = RMSNorm(config.dim, config.norm_eps)
        self.output = nn.Linear(config.dim, config.vocab_size, bias=False)
        self.rotary = rotary_table(config)  # not a buffer: it stays float32 when the weights do not
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)
        nn.init.zeros_(self.output.weight)

    def forward(self, condition, tokens_BT: torch.Tensor) -> torch.Tensor:
        """Teacher-forced logits [B, T, V]; [:, t] is the prediction of token t. No cache is touched and gradients flow."""
        embedded_BCD, caption_mask_BC = self.embed_condition(condition)
        x_BTD = torch.cat([embedded_BCD, self.tok_embeddings(tokens_BT[:, :-1])], dim=1)
        rotary_T = self.rotate_by(torch.arange(x_BTD.shape[1], device=x_BTD.device))
        attend = partial(attend_causally, caption_mask_BC=caption_mask_BC)
        for layer in self.layers:
            x_BTD = layer(x_BTD, rotary_T, attend)
        return self.output(self.norm(x_BTD[:, self.config.cls_token_num - 1 :]))

    @torch.no_grad()
    def prefill(self, condition, prefix_BP, prefix_len_B, capacity: int, cache: Cache | None = None, rows=None) -> Cache:
        """Write the condition and every prefix token but each row's last into `cache` (a new one, or `rows` of a live one).

        `capacity` counts image positions. A row shorter than P leaves stale entries behind it, which `step` overwrites before they are seen.
        """
        embedded, caption_mask_BC = self.embed_condition(condition)
        if cache is None:
            cache, rows = Cache(self.config, len(condition), capacity, embedded), slice(None)
        cache.admit(rows, embedded[:, -1], caption_mask_BC)
        index_B = torch.arange(cache.rows, device=embedded.device)[rows]
        rotary_L = self.rotate_by(torch.arange(embedded.shape[1] + max(prefix_BP.shape[1] - 1, 0), device=embedded.device))
        rows_at_once = max(1, PREFILL_TOKENS // len(rotary_L))
        for some, tokens_BP, start_BLD in zip(*(x.split(rows_at_once) for x in (index_B, prefix_BP[:, :-1], embedded))):
            x_BLD, filling = torch.cat([start_BLD, self.tok_embeddings(tokens_BP)], dim=1), cache.fill(some)
            for i, layer in enumerate(self.layers):
                x_BLD = layer(x_BLD, rotary_L, partial(filling.attend, i))
        return cache

    @torch.no_grad()
    def step(self, tokens_RL, positions_RL, cache: Cache, rows) -> torch.Tensor:
        """Logits [R, L, V]: the prediction of the token after each input, `tokens` standing at `positions` (-1: the condition)."""
        x_RLD = self.tok_embeddings(tokens_RL)
        x_RLD = torch.where((positions_RL < 0)[..., None], cache.condition[rows][:, None], x_RLD)
        round_ = cache.open(rows, positions_RL)
        rotary_RL = self.rotate_by(round_.slots_RL)
        for i, layer in enumerate(self.layers):
            x_RLD = layer(x_RLD, rotary_RL, partial(round_.attend, i))
        return self.output(self.norm(x_RLD))

    def embed_condition(self, condition):
        """Embeddings [B, cls_token_num, dim] of class ids or captions, and which of these slots hold a caption's token (None: class ids)."""
        return self.cls_embedding(condition), condition.mask_BL if self.config.model_type == "t2i" else None

    def rotate_by(self, slots):
        """Rotations of the given slots; a slot past the last token takes the last one's (it is never attended by a live query)."""
        self.rotary = self.rotary.to(slots.device)
        return self.rotary[slots.clamp(max=len(self.rotary) - 1)][..., None, :]


def random_model(size: str = "tiny", seed: int = 0, **overrides) -> LlamaGen:
    """A LlamaGen of random weights with an output head that is not zero, in eval mode; the global random state is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model = LlamaGen(Config(**SIZES[size] | overrides))
        nn.init.normal_(model.output.weight, std=0.3)
    return model.eval()


class ClassEmbedding(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.embedding_table = nn.Embedding(config.num_classes + 1, config.dim)  # the last row is the null class

    def forward(self, classes_B):
        return self.embedding_table(classes_B)[:, None]


class CaptionEmbedding(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.cap_proj = Projection(config)
        learned = torch.randn(config.cls_token_num, config.caption_dim) * config.caption_dim**-0.5
        self.register_buffer("uncond_embedding", learned)  # learned, although official models hold it as a buffer

    def forward(self, captions):
        features_BLC = captions.features_BLC.to(self.uncond_embedding.dtype)
        return self.cap_proj(torch.where(captions.null_B[:, None, None], self.uncond_embedding, features_BLC))


class Projection(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.fc1 = nn.Linear(config.caption_dim, config.dim, bias=False)
        self.fc2 = nn.Linear(config.dim, config.dim, bias=False)

    def forward(self, x):
        return self.fc2(F.gelu(self.fc1(x), approximate="tanh"))


class Block(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.attention = Attention(config)
        self.feed_forward = FeedForward(config)
        self.attention_norm = RMSNorm(config.dim, config.norm_eps)
        self.ffn_norm = RMSNorm(config.dim, config.norm_eps)

    def forward(self, x, rotary, attend):
        x = x + self.attention(self.attention_norm(x), rotary, attend)
        return x + self.feed_forward(self.ffn_norm(x))


class Attention(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.n_head = config.n_head
        self.wqkv = nn.Linear(config.dim, 3 * config.dim, bias=False)
        self.wo = nn.Linear(config.dim, config.dim, bias=False)

    def forward(self, x_RLD, rotary, attend):
        q_k, v = self.wqkv(x_RLD).unflatten(-1, (3 * self.n_head, -1)).tensor_split([2 * self.n_head], dim=2)
        q, k = rotate(q_k, rotary).chunk(2, dim=2)
        return self.wo(attend(q, k, v).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.w1 = nn.Linear(config.dim, config.hidden, bias=False)
        self.w3 = nn.Linear(config.dim, config.hidden, bias=False)
        self.w2 = nn.Linear(config.hidden, config.dim, bias=False)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class RMSNorm(nn.Module):
    """Normalised in float32 (float64 for a float64 model), rounded, then scaled: the official order."""

    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x):
        return F.rms_norm(wide(x), self.weight.shape, eps=self.eps).to(x.dtype) * self.weight


def rotate(x_RLND, rotary):
    """Rotate interleaved pairs, in float32 or wider, then round to x's dtype."""
    pairs = torch.view_as_complex(wide(x_RLND).unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * rotary).flatten(-2).to(x_RLND.dtype)


def rotary_table(config: Config) -> torch.Tensor:
    """cos + i sin per slot and pair, complex64 [cls_token_num + block_size, D / 2]; condition slots are 0."""
    side, half = isqrt(config.block_size), config.dim // config.n_head // 2
    frequency = 1 / config.rope_base ** (torch.arange(0, half, 2)[: half // 2].float() / half)
    angle = torch.outer(torch.arange(side).float(), frequency)
    grid = torch.cat([angle[:, None].expand(-1, side, -1), angle[None].expand(side, -1, -1)], dim=-1).flatten(0, 1)
    return torch.cat([torch.zeros(config.cls_token_num, grid.shape[1]) + 0j, torch.complex(grid.cos(), grid.sin())])
