"""Images as codes: an ImageNet-style folder, encoded once into shards and read back a batch at a time. LlamaGen's own files are read as they are.

    FOLDER/index.json          what was encoded and with what, and the sha256 of every finished shard
    FOLDER/files.txt           the images in order: the path below the source folder, a tab, bytes
    FOLDER/00000.safetensors   the first `shard_images` images: codes [n, A, T] and labels [n]; 00001.safetensors the next ones, and so on

A class's id is the rank of its folder's name, which for all 1000 WordNet folders of ImageNet is the usual numbering.

Shapes: N images in all, n of a shard or a batch, A augmentations of an image (one crop here, ten in LlamaGen's files), T codes of an image.
"""
from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save
from tqdm import tqdm

from hbsjd.data import to_unit
from hbsjd.features import IMAGE_ENDINGS
from hbsjd.models.checkpoints import fingerprint, sha256
from hbsjd.results import write_json

FORMAT = "hbsjd codes 1"
INDEX, FILES = "index.json", "files.txt"
SHARD_IMAGES = 4096  # 5 MB at 576 codes
OFFICIAL = dict(vocab_size=16384, num_classes=1000)  # of LlamaGen's files, which do not say it themselves


# ---- reading -----------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Codes:
    """N images as codes, read from the disk as they are asked for, and checked then."""

    source: Shards | Files
    images: int
    augmentations: int
    tokens: int
    vocab_size: int
    num_classes: int
    together: int  # images of a file

    def __len__(self) -> int:
        return self.images

    def batch(self, generator: torch.Generator, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """`count` images drawn with replacement: class ids [count] and tokens [count, T]. What `distillation.trainer.Trainer` takes as its `data`."""
        return self.take(torch.randint(len(self), (count,), generator=generator), generator)

    def take(self, rows, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        """Class ids [n] and tokens [n, T] of the given images, int64 on the CPU; of each, one augmentation that the generator draws.

        ValueError for rows that are not there, and for a file that is missing, damaged or of another vocabulary.
        """
        rows = torch.as_tensor(rows)
        if rows.ndim != 1 or rows.is_floating_point() or ((rows < 0) | (rows >= len(self))).any():
            raise ValueError(f"rows must be a 1-D tensor of image numbers in 0..{len(self) - 1}")
        choice = torch.randint(self.augmentations, rows.shape, generator=generator)
        labels, tokens = torch.empty(len(rows), dtype=torch.long), torch.empty(len(rows), self.tokens, dtype=torch.long)
        number = rows // self.together
        for part in number.unique().tolist():
            mine = (number == part).nonzero()[:, 0]
            labels[mine], tokens[mine] = self.source.read(part, rows[mine] % self.together, choice[mine])
            for what, values, limit in (("codes", tokens[mine], self.vocab_size), ("class ids", labels[mine], self.num_classes)):
                if ((values < 0) | (values >= limit)).any():
                    raise ValueError(f"{self.source.file(part)} holds {what} outside 0..{limit - 1}: it is damaged, or of other data")
        return labels, tokens


@dataclass(frozen=True)
class Shards:
    """What `encode_folder` wrote. A shard's checksum is compared when it is first read."""

    folder: Path
    index: dict
    checked: set[int] = field(default_factory=set)

    def file(self, part: int) -> Path:
        return self.folder / shard_name(part)

    def read(self, part: int, rows: torch.Tensor, choice: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Labels and codes of some rows of a shard; nothing else of it is read."""
        if part not in self.checked:
            self.check(part)
            self.checked.add(part)
        with safe_open(self.file(part), "pt") as f:
            codes, labels = f.get_slice("codes"), f.get_slice("labels")
            tokens = [codes[i : i + 1, a : a + 1].flatten() for i, a in zip(rows.tolist(), choice.tolist())]
            return torch.cat([labels[i : i + 1] for i in rows.tolist()]).long(), torch.stack(tokens).long()

    def check(self, part: int) -> None:
        path, index = self.file(part), self.index
        if not path.exists():
            raise ValueError(f"{path} is missing; the command that made these codes makes it again")
        if sha256(path) != index["shards"][path.name]:
            raise ValueError(f"{path} does not match its checksum, so it is altered; delete it, and the command that made it makes it again")
        n = len(rows_of(part, index["shard_images"], index["images"]))
        wanted = [n, index["augmentations"], index["tokens"]], [n]
        with safe_open(path, "pt") as f:
            shapes = tuple(list(f.get_slice(name).get_shape()) for name in ("codes", "labels"))
        if shapes != wanted:
            raise ValueError(f"{path} holds codes and labels of shapes {shapes}, {INDEX} says {wanted}; delete the folder and make the codes again")


@dataclass(frozen=True)
class Files:
    """LlamaGen's: imagenet<size>_codes/<i>.npy of shape (1, A, T) and imagenet<size>_labels/<i>.npy of shape (1,), for every image i."""

    codes: Path
    labels: Path
    shape: tuple[int, ...]

    def file(self, part: int) -> Path:
        return self.codes / f"{part}.npy"

    def read(self, part: int, rows: torch.Tensor, choice: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        codes, label = integers(self.file(part)), integers(self.labels / f"{part}.npy")
        if (codes.shape, label.shape) != (self.shape, (1,)):
            raise ValueError(f"{self.file(part)} and its label have shapes {codes.shape} and {label.shape}, the first ones {self.shape} and (1,)")
        return torch.full((len(rows),), int(label[0])), torch.from_numpy(codes[0, choice.numpy()].astype(np.int64))


def open(path: str | Path) -> Codes:
    """The codes in a folder: shards of `encode_folder`, or LlamaGen's files, whose folder or whose `imagenet<size>_codes` below it may be given.

    Raises ValueError for a folder of neither, and for one that is not complete.
    """
    path = Path(path)
    if (path / INDEX).exists():
        return open_shards(path)
    found = [path] if re.fullmatch(r"imagenet\d+_codes", path.name) else sorted(path.glob("imagenet*_codes"))
    if len(found) > 1:
        raise ValueError(f"{path} holds codes of several sizes ({', '.join(folder.name for folder in found)}); give the path of one of these")
    if not found or not found[0].is_dir():
        raise ValueError(f"{path} holds no codes: neither {INDEX} (of experiments.00_prepare --scale paper) nor LlamaGen's imagenet<size>_codes")
    return open_files(found[0])


def open_shards(folder: Path) -> Codes:
    index = read_index(folder)
    n, shards = index["images"], count(index["images"], index["shard_images"])
    if len(index["shards"]) < shards:
        raise ValueError(f"{folder} holds {len(index['shards'])} of {shards} shards, so encoding did not finish; the same command goes on with it")
    limits = dict(vocab_size=index["vocab_size"], num_classes=len(index["classes"]))
    return Codes(Shards(folder, index), n, index["augmentations"], index["tokens"], together=index["shard_images"], **limits)


def open_files(folder: Path) -> Codes:
    labels = folder.with_name(folder.name.replace("_codes", "_labels"))
    n = numbered(folder)
    if numbered(labels) != n:
        raise ValueError(f"{labels} holds {numbered(labels)} labels for {n} images; one each")
    shape = integers(folder / "0.npy").shape
    if len(shape) != 3 or shape[0] != 1:
        raise ValueError(f"{folder / '0.npy'} is of shape {shape}; LlamaGen's code files are (1, augmentations, tokens)")
    return Codes(Files(folder, labels, shape), n, *shape[1:], together=1, **OFFICIAL)


def numbered(folder: Path) -> int:
    """How many files 0.npy, 1.npy, ... there are, of which none may be missing."""
    names = os.listdir(folder) if folder.is_dir() else []
    numbers = {int(name.removesuffix(".npy")) for name in names if re.fullmatch(r"\d+\.npy", name)}
    if missing := set(range(max(len(numbers), 1))) - numbers:
        raise ValueError(f"{folder} misses {min(missing)}.npy; it must hold 0.npy, 1.npy and so on, one for every image")
    return len(numbers)


def integers(path: Path) -> np.ndarray:
    try:
        array = np.load(path, mmap_mode="r")
    except (OSError, EOFError, ValueError):
        raise ValueError(f"{path} is missing or no readable .npy file; copy it again") from None
    if array.dtype.kind not in "iu":
        raise ValueError(f"{path} holds {array.dtype}; codes and labels are integers")
    return array


# ---- writing -----------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Listing:
    """The images of a folder of class folders, sorted by class and name: paths below it, class ids and bytes."""

    classes: list[str]
    names: list[str]
    labels: list[int]
    sizes: list[int]

    def lines(self) -> list[str]:
        return [f"{name}\t{size}" for name, size in zip(self.names, self.sizes)]


def encode_folder(source: str | Path, folder: str | Path, tokenizer, size: int, *, shard_images: int = SHARD_IMAGES, batch: int = 32) -> Codes:
    """Encode the centre crops of `source`, a folder with one folder of images per class, into shards in `folder`, and open them.

    `size` in pixels; `batch` images are encoded at a time, while the next ones are read. Killed, the same call goes on with the first shard that is
    not finished, and gives the same files. Raises ValueError for an image that cannot be read, and where `folder` holds codes of anything else.
    """
    source, folder, d = Path(source), Path(folder), tokenizer.config.downsample
    if size < 1 or size % d:
        raise ValueError(f"size = {size} must be a multiple of {d}, the tokenizer's pixels per code")
    if batch < 1 or shard_images < 1:
        raise ValueError(f"batch = {batch} and shard_images = {shard_images} must be at least 1")
    listing, device = listed(source), next(tokenizer.parameters()).device
    n, made_of = len(listing.names), dict(tokenizer=fingerprint(tokenizer), vocab_size=tokenizer.config.codebook_size, size=size)
    index = opened(folder, source, made_of | dict(tokens=(size // d) ** 2, augmentations=1, shard_images=shard_images), listing)
    todo = [part for part in range(count(n, shard_images)) if not (shard_name(part) in index["shards"] and (folder / shard_name(part)).exists())]
    left = sum(len(rows_of(part, shard_images, n)) for part in todo)
    with tqdm(total=n, initial=n - left, desc=folder.name, unit="image", mininterval=1) as bar:
        for part in todo:
            rows, codes = rows_of(part, shard_images, n), []
            for crops_B3HW in read_ahead([source / name for name in listing.names[rows.start : rows.stop]], size, batch):
                codes.append(tokenizer.encode(to_unit(crops_B3HW.to(device))).cpu())
                bar.update(len(crops_B3HW))
            labels = torch.tensor(listing.labels[rows.start : rows.stop])
            index["shards"][shard_name(part)] = write_shard(folder / shard_name(part), torch.cat(codes)[:, None], labels, index)
            write_json(folder / INDEX, index)
    return open(folder)


def write_shard(path: Path, codes_nAT: torch.Tensor, labels_n: torch.Tensor, index: dict) -> str:
    """Codes and labels, as int16 where every id fits; the file's sha256."""
    partial = path.with_name(f".{path.name}.partial")
    shard = dict(codes=narrow(codes_nAT, index["vocab_size"]), labels=narrow(labels_n, len(index["classes"])))
    partial.write_bytes(save(shard))  # save_file would keep other users from reading it
    os.replace(partial, path)
    return sha256(path)


def listed(source: Path) -> Listing:
    if not source.is_dir():
        raise ValueError(f"{source} is no folder; give the one that holds a folder of images for each class, such as ImageNet's train")
    classes = sorted(entry.name for entry in os.scandir(source) if entry.is_dir() and not entry.name.startswith("."))
    if not classes:
        raise ValueError(f"{source} holds no folders; it must hold a folder of images for each class")
    listing = Listing(classes, [], [], [])
    for label, name in enumerate(classes):
        entries = sorted((entry for entry in os.scandir(source / name) if not entry.name.startswith(".")), key=lambda entry: entry.name)
        stray = [entry.name for entry in entries if not entry.is_file() or Path(entry.name).suffix.lower() not in IMAGE_ENDINGS]
        if stray:
            raise ValueError(f"{source / name / stray[0]} is no PNG or JPEG image; {source} must hold a folder of images for each class")
        if not entries:
            raise ValueError(f"{source / name} holds no images; put some there, or move the folder away (class ids are ranks of folders)")
        listing.names.extend(f"{name}/{entry.name}" for entry in entries)
        listing.labels.extend([label] * len(entries))
        listing.sizes.extend(entry.stat().st_size for entry in entries)
    return listing


def opened(folder: Path, source: Path, made_of: dict, listing: Listing) -> dict:
    """The index so far: a new one in an empty folder, that of before where it is of the same images, made in the same way."""
    lines = listing.lines()
    text = "\n".join(lines) + "\n"
    facts = dict(format=FORMAT) | made_of | dict(classes=listing.classes, images=len(lines), files_sha256=hashlib.sha256(text.encode()).hexdigest())
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / INDEX).exists():
            if any(folder.iterdir()):
                raise ValueError(f"{folder} holds files, and no {INDEX} that says what they are; choose an empty folder")
            write_json(folder / INDEX, facts | dict(shards={}))
        index = read_index(folder)
        if other := [name for name in made_of if index[name] != made_of[name]]:
            raise ValueError(f"{folder} holds codes of another {', '.join(other)}; choose another folder, or delete this one")
        if index["files_sha256"] != facts["files_sha256"]:
            raise ValueError(f"{source} has changed since {folder} was begun ({changed(folder, lines)}); restore it, or choose another folder")
        if not (folder / FILES).exists():
            partial = folder / f".{FILES}.partial"
            partial.write_text(text, encoding="utf-8")
            os.replace(partial, folder / FILES)
    except OSError as error:
        raise ValueError(f"{folder} cannot be written ({error.strerror}); choose another folder") from None
    return index


def changed(folder: Path, lines: list[str]) -> str:
    """The first image that is new, gone or of another size, and how many there are."""
    before = set((folder / FILES).read_text(encoding="utf-8").splitlines()) if (folder / FILES).exists() else set()
    names = sorted({line.partition("\t")[0] for line in before.symmetric_difference(lines)})
    return f"{names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''}"


def read_index(folder: Path) -> dict:
    try:
        index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
        if index["format"] == FORMAT:
            return index
    except (ValueError, KeyError, TypeError):
        pass
    raise ValueError(f"{folder / INDEX} is damaged or of another format; restore it, or delete the folder and make the codes again")


def file_names(folder: str | Path) -> list[str]:
    """The images that were encoded, in order, as paths below the source folder."""
    return [line.partition("\t")[0] for line in (Path(folder) / FILES).read_text(encoding="utf-8").splitlines()]


def shard_name(part: int) -> str:
    return f"{part:05d}.safetensors"


def count(images: int, shard_images: int) -> int:
    return -(-images // shard_images)


def rows_of(part: int, shard_images: int, images: int) -> range:
    return range(part * shard_images, min((part + 1) * shard_images, images))


def narrow(values: torch.Tensor, limit: int) -> torch.Tensor:
    """int16 where every value below `limit` fits, else int32."""
    return values.to(torch.int16 if limit <= 2**15 else torch.int32).contiguous()


# ---- images ------------------------------------------------------------------------------------------------------------------------------


def read_ahead(files: list[Path], size: int, batch: int) -> Iterator[torch.Tensor]:
    """Crops [b, 3, size, size] uint8, a batch at a time; threads read the next batch while this one is used."""
    with ThreadPoolExecutor() as pool:
        waiting = []
        for start in range(0, len(files), batch):
            ahead = [pool.submit(read_crop, file, size) for file in files[start : start + batch]]
            if waiting:
                yield torch.stack([future.result() for future in waiting])
            waiting = ahead
        yield torch.stack([future.result() for future in waiting])


def read_crop(file: Path, size: int) -> torch.Tensor:
    """The centre crop of an image, [3, size, size] uint8; ValueError that names it where it cannot be read."""
    from PIL import Image

    try:
        with Image.open(file) as image:
            crop = centre_crop(on_white(image), size)
    except (OSError, SyntaxError, ValueError, EOFError, Image.DecompressionBombError):
        raise ValueError(f"{file} is no readable image; is it cut off? Replace it, or move it away and encode into a new folder") from None
    return torch.from_numpy(np.array(crop).transpose(2, 0, 1))


def on_white(image):
    """RGB: grey values repeated, palettes looked up, and what is transparent laid on white."""
    from PIL import Image

    if not image.has_transparency_data:
        return image.convert("RGB")
    return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("RGBA")).convert("RGB")


def centre_crop(image, size: int):
    """As ADM and LlamaGen do it: halved by averaging while the short side is at least twice `size`, then bicubic, then the square in the middle."""
    from PIL import Image

    while min(image.size) >= 2 * size:
        image = image.resize(tuple(side // 2 for side in image.size), Image.Resampling.BOX)
    scale = size / min(image.size)
    image = image.resize(tuple(round(side * scale) for side in image.size), Image.Resampling.BICUBIC)
    left, top = ((side - size) // 2 for side in image.size)
    return image.crop((left, top, left + size, top + size))
