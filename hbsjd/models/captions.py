"""Captions as a text-conditional (t2i) LlamaGen takes them: T5 features of their tokens, left padded with zeros, and which slots hold a token.

`hbsjd.models.huggingface.t5_features` makes them of texts.

Shapes: B captions, L condition slots, C features of a token.
"""
from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
import torch
import torch.nn.functional as F

SLOTS = 120  # condition slots of the official t2i models


@dataclass(frozen=True, eq=False)
class Captions:
    """A batch of captions. `len(captions)`, `captions[rows]` (a slice or an index) and `captions.device` are what they are for a tensor of class ids.

    features_BLC float, left padded; mask_BL bool, True where there is a token; null_B bool, True for a row that takes the model's unconditional
    embedding in place of its features, as class id `num_classes` does (default: no row). Raises ValueError where types or shapes do not fit.
    """

    features_BLC: torch.Tensor
    mask_BL: torch.Tensor
    null_B: torch.Tensor | None = None

    def __post_init__(self):
        features, mask = self.features_BLC, self.mask_BL
        if not (isinstance(features, torch.Tensor) and features.is_floating_point() and features.ndim == 3):
            raise ValueError(f"features of captions must be a float tensor [captions, slots, features of a token]; got {described(features)}")
        if not (isinstance(mask, torch.Tensor) and mask.dtype == torch.bool and mask.shape == features.shape[:2]):
            raise ValueError(f"the mask of these captions must be a bool tensor {list(features.shape[:2])}; got {described(mask)}")
        if self.null_B is None:
            object.__setattr__(self, "null_B", mask.new_zeros(len(mask)))

    def __len__(self) -> int:
        return len(self.mask_BL)

    def __getitem__(self, rows) -> Captions:
        return Captions(self.features_BLC[rows], self.mask_BL[rows], self.null_B[rows])

    @property
    def device(self) -> torch.device:
        return self.mask_BL.device

    def to(self, device) -> Captions:
        return Captions(self.features_BLC.to(device), self.mask_BL.to(device), self.null_B.to(device))

    @property
    def checksum(self) -> str:
        """Of features and mask, to tell one batch of captions from another."""
        return hashlib.sha256(b"".join(x.float().cpu().numpy().tobytes() for x in (self.features_BLC, self.mask_BL, self.null_B))).hexdigest()[:16]

    def with_null(self) -> Captions:
        """[2 B]: every caption, and after it the unconditional embedding under the same mask."""
        twice = self[torch.arange(len(self), device=self.device).repeat_interleave(2)]
        second_B = torch.arange(len(twice), device=self.device) % 2 == 1
        return replace(twice, null_B=twice.null_B | second_B)


def takes_captions(config) -> bool:
    """Whether a model's condition is `Captions`. A foreign model whose config does not say takes class ids."""
    return getattr(config, "model_type", "c2i") == "t2i"


def pad(features: Sequence[torch.Tensor | np.ndarray], length: int = SLOTS) -> Captions:
    """Captions of features [n, C], one for each, left padded with zeros. ValueError names the one of no token, or of more than `length`."""
    features = [torch.as_tensor(caption_nC) for caption_nC in features]
    for number, caption_nC in enumerate(features):
        if caption_nC.ndim != 2:
            raise ValueError(f"caption {number} must be [tokens, features of a token]; got {described(caption_nC)}")
        if len(caption_nC) == 0:
            raise ValueError(f"caption {number} has no token; leave it out, or give it at least one")
        if len(caption_nC) > length:
            raise ValueError(f"caption {number} has {len(caption_nC)} tokens and the model takes {length}; shorten it")
    sizes = sorted({caption_nC.shape[1] for caption_nC in features})
    if len(sizes) != 1:
        raise ValueError(f"give at least one caption, and all of one feature size; got {len(features)} captions of sizes {sizes}")
    features_BLC = torch.stack([F.pad(caption_nC, (0, 0, length - len(caption_nC), 0)) for caption_nC in features])
    lengths_B = torch.tensor([len(caption_nC) for caption_nC in features], device=features_BLC.device)
    return Captions(features_BLC, torch.arange(length, device=features_BLC.device) >= length - lengths_B[:, None])


def read(path: str | Path) -> Captions:
    """Captions kept by `np.savez(path, features=captions.features_BLC, mask=captions.mask_BL)`. ValueError for any other file."""
    path, contents = Path(path), f"features [captions, {SLOTS}, 2048] and mask [captions, {SLOTS}]"
    if not path.exists():
        raise ValueError(f"there is no captions file {path}; it is an .npz with {contents}")
    try:
        with np.load(path) as file:
            features, mask = torch.from_numpy(file["features"]), torch.from_numpy(file["mask"]) != 0
    except (OSError, ValueError, KeyError, TypeError, EOFError, BadZipFile):
        raise ValueError(f"{path} is not a captions file, or is damaged; it must be an .npz with {contents}") from None
    return Captions(features, mask)


def noise(count: int, config, device=None) -> Captions:
    """`count` captions of normal features, the first as long as the model takes, the others ever shorter: to measure with where there are none."""
    L, generator = config.cls_token_num, torch.Generator().manual_seed(0)
    lengths = [L - i * (L - 1) // count for i in range(count)]
    return pad([torch.randn(n, config.caption_dim, generator=generator) for n in lengths], L).to(device)


def described(value) -> str:
    return f"{list(value.shape)} {value.dtype}" if isinstance(value, torch.Tensor) else type(value).__name__
