"""The VQ image tokenizer of LlamaGen (arXiv 2406.06525): VQ-16 and its small sibling, with the official state-dict names.

An image in [-1, 1] becomes a grid of codes, one per `downsample x downsample` patch, and back. Encoder features and codebook rows are
l2-normalised when they are compared (the raw codebook row is stored), so the nearest code is the one of largest cosine.

Shapes: B images, H x W pixels, h x w codes, T = h * w, C channels, K codes, D code dimension.
"""
from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from math import isqrt
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F

from hbsjd.models.checkpoints import WEIGHTS, assemble, read_config, verified, weights_path
from hbsjd.models.official import TOKENIZERS, WRAPPERS, converted, numbered

PIXELS_AT_ONCE = 8 * 384 * 384  # in one forward: VQ-16 takes about 0.4 GB for an image of 384 x 384 in float32


@dataclass(frozen=True)
class VQConfig:
    ch: int = 128
    ch_mult: tuple[int, ...] = (1, 1, 2, 2, 4)
    num_res_blocks: int = 2
    z_channels: int = 256
    codebook_size: int = 16384
    codebook_dim: int = 8

    @property
    def downsample(self) -> int:
        return 2 ** (len(self.ch_mult) - 1)


CONFIGS = {
    "small": VQConfig(ch=32, ch_mult=(2, 2), num_res_blocks=1, z_channels=64, codebook_size=512),  # 1.0 M parameters, 32 px -> 16 x 16 codes
    "vq-16": VQConfig(),                                                                          # 71,883,403 parameters, 384 px -> 24 x 24 codes
}


class VQModel(nn.Module):
    def __init__(self, config: VQConfig):
        super().__init__()
        self.config = config
        self.encoder = Encoder(config)
        self.decoder = Decoder(config)
        self.quantize = VectorQuantizer(config.codebook_size, config.codebook_dim)
        self.quant_conv = nn.Conv2d(config.z_channels, config.codebook_dim, 1)
        self.post_quant_conv = nn.Conv2d(config.codebook_dim, config.z_channels, 1)

    def features(self, images_B3HW: torch.Tensor) -> torch.Tensor:
        """Unit vectors [B, T, D] that the codebook is compared with."""
        features_BDhw = self.quant_conv(self.encoder(images_B3HW))
        return F.normalize(features_BDhw.flatten(2).transpose(1, 2), dim=-1)

    def render(self, vectors_BTD: torch.Tensor) -> torch.Tensor:
        """Unit vectors [B, T, D] of a square grid -> images [B, 3, H, W], about [-1, 1], not clamped."""
        B, T, D = vectors_BTD.shape
        side = round(T**0.5)
        return self.decoder(self.post_quant_conv(vectors_BTD.transpose(1, 2).reshape(B, D, side, side)))

    @torch.no_grad()
    def encode(self, images_B3HW: torch.Tensor) -> torch.Tensor:
        """Images in [-1, 1] -> codes [B, T] int64, row by row."""
        shape, d = tuple(images_B3HW.shape), self.config.downsample
        if len(shape) != 4 or shape[1] != 3 or shape[2] % d or shape[3] % d:
            raise ValueError(f"images must be [B, 3, H, W] with H and W multiples of {d}; got {shape}")
        some = images_B3HW.split(at_once(shape[2] * shape[3]))
        return torch.cat([self.quantize.nearest(self.features(images)) for images in some])

    @torch.no_grad()
    def decode(self, codes_BT: torch.Tensor, clamp: bool = True) -> torch.Tensor:
        """Codes [B, T] -> images [B, 3, H, W] clamped to [-1, 1]; `clamp=False` for what is resized before it is clamped."""
        codes_BT, K = codes_BT.long(), self.config.codebook_size
        if codes_BT.ndim != 2 or isqrt(codes_BT.shape[1]) ** 2 != codes_BT.shape[1]:
            raise ValueError(f"codes must be [B, T] with T a square number; got {tuple(codes_BT.shape)}")
        if codes_BT.numel() and (codes_BT.min() < 0 or codes_BT.max() >= K):
            raise ValueError(f"codes must lie in 0..{K - 1}; got {codes_BT.min()}..{codes_BT.max()}")
        codebook, some = self.quantize.codebook(), codes_BT.split(at_once(codes_BT.shape[1] * self.config.downsample**2))
        images = torch.cat([self.render(codebook[codes]) for codes in some])
        return images.clamp(-1, 1) if clamp else images


def load(name: str | Path, *, dtype: torch.dtype = torch.float32, device: str | torch.device | None = None) -> VQModel:
    """A tokenizer in eval mode: the bundled "small", an official one by name ("vq-16", "vq-16-t2i"), or by path.

    A path is a `.safetensors` file with our `.json` beside it, or an official file, whose sizes are read off its shapes and whose averaged weights
    ("ema") are taken where it has them. The rest is as in hbsjd.load_model.
    """
    path = WEIGHTS / "small-tokenizer.safetensors" if name == "small" else weights_path(name, ("small",), TOKENIZERS)
    if path:
        config = read_config(VQConfig, path, verified(path))
    else:
        path, config = converted(name, TOKENIZERS, VQModel, partial(official_config, name), ("ema", *WRAPPERS))
    return assemble(VQModel, config, path, dtype, device)


def official_config(name: str | Path, file: str, shapes: dict[str, tuple[int, ...]]) -> VQConfig:
    """Sizes of an official tokenizer from the shapes of its weights; by name they must be those of VQ-16."""
    try:
        ch = shapes["encoder.conv_in.weight"][0]
        levels, blocks = numbered(shapes, "encoder.conv_blocks."), numbered(shapes, "encoder.conv_blocks.0.res.")
        ch_mult = tuple(shapes[f"encoder.conv_blocks.{i}.res.0.conv1.weight"][0] // ch for i in range(levels))
        config = VQConfig(ch, ch_mult, blocks, shapes["encoder.conv_out.weight"][0], *shapes["quantize.embedding.weight"])
    except KeyError as missing:
        raise ValueError(f"{file} holds no VQ tokenizer, or not all of it: {missing.args[0]} is missing; take the whole official file") from None
    if name in TOKENIZERS and config != CONFIGS["vq-16"]:
        raise ValueError(f"{file} holds another tokenizer than {name} ({config}); get the file of that name, or load this one by its path")
    return config


def at_once(pixels: int) -> int:
    """How many images of so many pixels go through the networks in one forward."""
    return max(1, PIXELS_AT_ONCE // max(1, pixels))


class VectorQuantizer(nn.Module):
    def __init__(self, codebook_size: int, codebook_dim: int):
        super().__init__()
        self.embedding = nn.Embedding(codebook_size, codebook_dim)
        self.register_buffer("codebook_used", torch.zeros(65536))  # unused; official checkpoints hold it

    def codebook(self) -> torch.Tensor:
        """Unit rows [K, D]."""
        return F.normalize(self.embedding.weight, dim=-1)

    def nearest(self, vectors_BTD: torch.Tensor) -> torch.Tensor:
        return (vectors_BTD @ self.codebook().T).argmax(-1)


class Encoder(nn.Module):
    def __init__(self, config: VQConfig):
        super().__init__()
        widths = [config.ch * m for m in config.ch_mult]
        self.conv_in = conv3(3, config.ch)
        self.conv_blocks = nn.ModuleList()
        before = config.ch
        for level, width in enumerate(widths):
            last = level == len(widths) - 1
            self.conv_blocks.append(Stage(before, width, config.num_res_blocks, attention=last, downsample=not last))
            before = width
        self.mid = middle(before)
        self.norm_out = norm(before)
        self.conv_out = conv3(before, config.z_channels)

    def forward(self, x):
        x = self.conv_in(x)
        for module in [*self.conv_blocks, *self.mid]:
            x = module(x)
        return self.conv_out(F.silu(self.norm_out(x)))


class Decoder(nn.Module):
    def __init__(self, config: VQConfig):
        super().__init__()
        widths = [config.ch * m for m in config.ch_mult][::-1]
        before = widths[0]
        self.conv_in = conv3(config.z_channels, before)
        self.mid = middle(before)
        self.conv_blocks = nn.ModuleList()
        for level, width in enumerate(widths):
            last = level == len(widths) - 1
            self.conv_blocks.append(Stage(before, width, config.num_res_blocks + 1, attention=level == 0, upsample=not last))
            before = width
        self.norm_out = norm(before)
        self.conv_out = conv3(before, 3)

    def forward(self, x):
        x = self.conv_in(x)
        for module in [*self.mid, *self.conv_blocks]:
            x = module(x)
        return self.conv_out(F.silu(self.norm_out(x)))


class Stage(nn.Module):
    """One resolution: residual blocks, at the lowest resolution each followed by attention, then a change of resolution."""

    def __init__(self, before: int, width: int, blocks: int, attention: bool, downsample: bool = False, upsample: bool = False):
        super().__init__()
        self.res = nn.ModuleList(ResnetBlock(before if i == 0 else width, width) for i in range(blocks))
        self.attn = nn.ModuleList(AttnBlock(width) if attention else nn.Identity() for _ in range(blocks))
        self.downsample = Downsample(width) if downsample else nn.Identity()
        self.upsample = Upsample(width) if upsample else nn.Identity()

    def forward(self, x):
        for res, attn in zip(self.res, self.attn):
            x = attn(res(x))
        return self.upsample(self.downsample(x))


def middle(width: int) -> nn.ModuleList:
    return nn.ModuleList([ResnetBlock(width, width), AttnBlock(width), ResnetBlock(width, width)])


def norm(width: int) -> nn.GroupNorm:
    return nn.GroupNorm(32, width, eps=1e-6)


def conv3(before: int, width: int) -> nn.Conv2d:
    return nn.Conv2d(before, width, 3, padding=1)


class ResnetBlock(nn.Module):
    def __init__(self, before: int, width: int):
        super().__init__()
        self.norm1, self.conv1 = norm(before), conv3(before, width)
        self.norm2, self.conv2 = norm(width), conv3(width, width)
        self.nin_shortcut = nn.Conv2d(before, width, 1) if before != width else nn.Identity()

    def forward(self, x):
        y = self.conv1(F.silu(self.norm1(x)))
        y = self.conv2(F.silu(self.norm2(y)))
        return self.nin_shortcut(x) + y


class AttnBlock(nn.Module):
    """Single-head attention over all positions of the grid."""

    def __init__(self, width: int):
        super().__init__()
        self.norm = norm(width)
        self.q, self.k, self.v, self.proj_out = (nn.Conv2d(width, width, 1) for _ in range(4))

    def forward(self, x):
        y = self.norm(x)
        q, k, v = (layer(y).flatten(2).transpose(1, 2) for layer in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v)
        return x + self.proj_out(y.transpose(1, 2).reshape(x.shape))


class Downsample(nn.Module):
    """Halves the grid; the padding is on the right and below only, as in the official code."""

    def __init__(self, width: int):
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, stride=2)

    def forward(self, x):
        return self.conv(F.pad(x, (0, 1, 0, 1)))


class Upsample(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.conv = conv3(width, width)

    def forward(self, x):
        return self.conv(F.interpolate(x, scale_factor=2.0, mode="nearest"))
