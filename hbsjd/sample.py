"""Images of a model for evaluation: decoded with any method, written once as PNG files and as the field's .npz, and gone on with after a kill."""
from __future__ import annotations

import json
import os
import zipfile
from dataclasses import dataclass
from math import ceil
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tqdm import tqdm

from hbsjd.api import check_condition, check_policy, check_slots, resolve, rollout
from hbsjd.calibration import adapted
from hbsjd.clock import clock
from hbsjd.data import to_uint8
from hbsjd.decoding.types import Method, Policy
from hbsjd.decoding.windows import Adaptive
from hbsjd.features import read_image
from hbsjd.models.checkpoints import fingerprint
from hbsjd.models.guidance import Guided
from hbsjd.results import write_json


@dataclass(frozen=True)
class Samples:
    """The folder, its .npz, how many images it holds, and what decoding cost: `seconds` in rollouts and forwards `nfe` for `timed_images`.

    `timed_images` is below `images` only where a run was killed between writing a batch and noting its time.
    """

    folder: Path
    npz: Path
    images: int
    seconds: float
    nfe: int
    timed_images: int


def labels(n: int, num_classes: int, how: str = "iid", *, frequency: torch.Tensor | None = None, seed: int = 0) -> torch.Tensor:
    """n class ids: "iid" draws, by `frequency` [num_classes] where given (else uniform), or "balanced": every class in turn, each turn in a new order."""
    generator = torch.Generator().manual_seed(seed)
    if n < 1:
        raise ValueError(f"n = {n} labels; there must be at least 1")
    if how == "balanced" and frequency is None:
        return torch.cat([torch.randperm(num_classes, generator=generator) for _ in range(ceil(n / num_classes))])[:n]
    if how != "iid":
        raise ValueError(f"labels are drawn 'iid', or 'balanced' (which takes no frequency); got {how!r}")
    weights = torch.ones(num_classes) if frequency is None else torch.as_tensor(frequency).float()
    return torch.multinomial(weights, n, replacement=True, generator=generator)


@torch.no_grad()
def sample_images(
    model, tokenizer, condition_N: torch.Tensor, folder: str | Path, method: str | Method = "hbsjd_adaptive", *, guidance: float = 1.0,
    temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, seed: int = 0, slots: int = 32, batch: int = 128, resize: int | None = None,
) -> Samples:
    """One image per class id of `condition_N`, as 000000.png ... in `folder`, then all of them as samples.npz (`arr_0`, uint8 [N, H, W, 3]).

    Ids 0..N-1 key the noise: greedy and Gumbel methods give the same images in any `batch` (images per rollout) and `slots` (decoded at a time).
    `resize`: bicubic, in pixels, before values are clamped, as LlamaGen does from 384 to 256. The same call goes on after a kill, which loses at
    most a batch; samples.json keeps what was asked for, and a folder of another model or setting raises ValueError.
    """
    if isinstance(model, Guided):
        raise ValueError("pass the bare model, and guidance= to sample_images")
    if batch < 1:
        raise ValueError(f"batch = {batch} must be at least 1: it is how many images a rollout makes")
    folder, condition_N = Path(folder), check_condition(condition_N, model.config)
    slots = check_slots(slots, len(condition_N))
    policy = Policy(resolve(method, model.config).rule.mode, guidance, temperature, top_k, top_p)
    check_policy(policy, model.config)
    settings = dict(
        model=fingerprint(model), dtype=str(next(model.parameters()).dtype), tokenizer=fingerprint(tokenizer), method=str(method), guidance=guidance,
        temperature=temperature, top_k=top_k, top_p=top_p, seed=seed, resize=resize, labels=condition_N.tolist(),
    )
    facts = opened(folder, settings)
    todo = [i for i in range(len(condition_N)) if not image_file(folder, i).exists()]
    method = ready(method, model, policy, slots, condition_N.device) if todo else method
    how = dict(guidance=guidance, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed, slots=slots)
    for ids in tqdm(torch.tensor(todo).split(batch) if todo else [], desc=folder.name, mininterval=1, delay=2):
        start = clock(condition_N.device)
        out = rollout(model, condition_N[ids], method=method, images=ids, **how)
        seconds = clock(condition_N.device) - start
        for i, image in zip(ids.tolist(), pixels(tokenizer, out.tokens, resize, slots)):
            write_png(image_file(folder, i), image)
        facts = facts | dict(seconds=facts["seconds"] + seconds, nfe=facts["nfe"] + out.nfe, timed_images=facts["timed_images"] + len(ids))
        write_json(folder / "samples.json", facts)
    if todo or not (folder / "samples.npz").exists():
        write_npz(folder, len(condition_N))
    return Samples(folder, folder / "samples.npz", len(condition_N), facts["seconds"], facts["nfe"], facts["timed_images"])


def opened(folder: Path, settings: dict) -> dict:
    """The facts in samples.json: new ones in a new folder, those of before where the settings are the same."""
    path = folder / "samples.json"
    if path.exists():
        facts = json.loads(path.read_text())
        other = [name for name, value in settings.items() if facts.get(name) != value]
        if other:
            raise ValueError(f"{folder} holds images of another {', '.join(other)}; choose another folder, or delete this one")
        return facts
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"{folder} holds files, and no samples.json that says what they are; choose an empty folder")
    facts = settings | dict(seconds=0.0, nfe=0, timed_images=0)
    write_json(path, facts)
    return facts


def ready(method: str | Method, model, policy: Policy, slots: int, device) -> Method:
    """The method resolved, an adaptive window measured: once, before the clock starts, and for all batches alike."""
    method = resolve(method, model.config)
    if isinstance(method.window, Adaptive) and method.window.costs is None:
        return adapted(method, Guided(model, policy.guidance) if policy.guidance > 1 else model, policy, slots, device)
    return method


def pixels(tokenizer, tokens_BT: torch.Tensor, resize: int | None, at_once: int) -> np.ndarray:
    """[B, H, W, 3] uint8 by LlamaGen's convention."""
    device, parts = next(tokenizer.parameters()).device, []
    for some in tokens_BT.to(device).split(at_once):
        images = tokenizer.decode(some, clamp=False)
        if resize:
            images = F.interpolate(images, (resize, resize), mode="bicubic")
        parts.append(to_uint8(images).permute(0, 2, 3, 1).cpu())
    return torch.cat(parts).numpy()


def image_file(folder: Path, i: int) -> Path:
    return folder / f"{i:06d}.png"


def write_png(path: Path, image: np.ndarray) -> None:
    from PIL import Image

    partial = path.with_name(f".{path.name}.partial")
    Image.fromarray(image).save(partial, "PNG")
    os.replace(partial, path)


def write_npz(folder: Path, n: int) -> None:
    """All images as `arr_0`, one at a time, so that 50,000 of them need no memory."""
    shape, partial = read_image(image_file(folder, 0)).shape, folder / ".samples.npz.partial"
    with zipfile.ZipFile(partial, "w") as archive, archive.open("arr_0.npy", "w", force_zip64=True) as f:
        np.lib.format.write_array_header_1_0(f, dict(descr="|u1", fortran_order=False, shape=(n, *shape)))
        for i in range(n):
            f.write(read_image(image_file(folder, i)).tobytes())
    os.replace(partial, folder / "samples.npz")
