"""Images of a model. For evaluation: decoded with any method, written once as PNG files and as the field's .npz, and gone on with after a kill.

To look at: `python -m hbsjd.sample --model small-student --classes cat-face,14 --out samples.png` writes one picture that says how it was made.
"""
from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from math import ceil
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tqdm import tqdm

from hbsjd.api import check_condition, check_policy, check_slots, resolve, rollout
from hbsjd.calibration import adapted, device_name
from hbsjd.clock import clock
from hbsjd.data import openmoji_classes, to_uint8
from hbsjd.decoding.types import Method, Policy, Rollout
from hbsjd.decoding.windows import Adaptive
from hbsjd.features import read_image
from hbsjd.models import captions, vq
from hbsjd.models.checkpoints import default_device, fingerprint, load_model, sha256
from hbsjd.models.guidance import Guided
from hbsjd.results import portable, version, write_json

VIEW = 128  # pixels: smaller images are enlarged in a picture, by a whole factor


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
    model, tokenizer, condition_N: torch.Tensor | captions.Captions, folder: str | Path, method: str | Method = "hbsjd_adaptive", *, guidance: float = 1.0,
    temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, seed: int = 0, slots: int = 32, batch: int = 128, resize: int | None = None,
) -> Samples:
    """One image per class id or caption of `condition_N`, as 000000.png ... in `folder`, then all of them as samples.npz (`arr_0`, uint8 [N, H, W, 3]).

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
        temperature=temperature, top_k=top_k, top_p=top_p, seed=seed, resize=resize,
    ) | (dict(captions=condition_N.checksum) if isinstance(condition_N, captions.Captions) else dict(labels=condition_N.tolist()))
    facts = opened(folder, settings)
    todo = [i for i in range(len(condition_N)) if not image_file(folder, i).exists()]
    how = dict(seed=seed, slots=slots, batch=batch, resize=resize, title=folder.name)
    for ids, images, seconds, out in decoded(model, tokenizer, condition_N, todo, method, policy, **how):
        for i, image in zip(ids, images):
            write_png(image_file(folder, i), image)
        facts = facts | dict(seconds=facts["seconds"] + seconds, nfe=facts["nfe"] + out.nfe, timed_images=facts["timed_images"] + len(ids))
        write_json(folder / "samples.json", facts)
    if todo or not (folder / "samples.npz").exists():
        write_npz(folder, len(condition_N))
    return Samples(folder, folder / "samples.npz", len(condition_N), facts["seconds"], facts["nfe"], facts["timed_images"])


def decoded(
    model, tokenizer, condition_N, todo: list[int], method: str | Method, policy: Policy, *, seed: int, slots: int, batch: int, title: str,
    resize: int | None = None,
) -> Iterator[tuple[list[int], np.ndarray, float, Rollout]]:
    """Batch by batch: ids, images [b, H, W, 3] uint8, seconds of the rollout, and the rollout. The ids `todo` choose conditions and key the noise."""
    if not todo:
        return
    device = condition_N.device
    method = ready(method, model, policy, slots, device)
    how = dict(guidance=policy.guidance, temperature=policy.temperature, top_k=policy.top_k, top_p=policy.top_p, seed=seed, slots=slots)
    for ids in tqdm(torch.tensor(todo).split(batch), desc=title, mininterval=1, delay=2):
        start = clock(device)
        out = rollout(model, condition_N[ids], method=method, images=ids, **how)
        seconds = clock(device) - start
        yield ids.tolist(), pixels(tokenizer, out.tokens, resize, slots), seconds, out


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


def write_png(path: Path, image: np.ndarray, **texts: str) -> None:
    """Replaced whole; `texts` are kept in the file as tEXt chunks."""
    from PIL import Image, PngImagePlugin

    partial, info = path.with_name(f".{path.name}.partial"), PngImagePlugin.PngInfo()
    for key, text in texts.items():
        info.add_text(key, text)
    Image.fromarray(image).save(partial, "PNG", pnginfo=info)
    os.replace(partial, path)


def write_mosaic(path: Path, rows: Iterable[Iterable[torch.Tensor]]) -> None:
    """One picture of rows of images [3, H, W] uint8, all rows equally long."""
    mosaic_3HW = torch.cat([torch.cat(list(row), dim=-1) for row in rows], dim=-2)
    write_png(path, mosaic_3HW.permute(1, 2, 0).numpy())


def write_npz(folder: Path, n: int) -> None:
    """All images as `arr_0`, one at a time, so that 50,000 of them need no memory."""
    shape, partial = read_image(image_file(folder, 0)).shape, folder / ".samples.npz.partial"
    with zipfile.ZipFile(partial, "w") as archive, archive.open("arr_0.npy", "w", force_zip64=True) as f:
        np.lib.format.write_array_header_1_0(f, dict(descr="|u1", fortran_order=False, shape=(n, *shape)))
        for i in range(n):
            f.write(read_image(image_file(folder, i)).tobytes())
    os.replace(partial, folder / "samples.npz")


# ---- python -m hbsjd.sample --------------------------------------------------------------------------------------------------------------


def draw(args) -> list[str]:
    """Decode what the arguments ask for and write the picture; the lines to print. Raises ValueError before anything is decoded."""
    check_arguments(args)
    model = load_model(args.model, dtype=getattr(torch, args.dtype), device=args.device)
    condition, asked = conditions(args, model.config)
    tokenizer, asked["tokenizer"] = matching_tokenizer(args, model.config)
    condition = condition[torch.arange(len(condition) * args.per_class) // args.per_class]
    method, slots = resolve(args.method, model.config), check_slots(args.slots, len(condition))
    policy = Policy(method.rule.mode, args.guidance, args.temperature, args.top_k, args.top_p)
    check_policy(policy, model.config)
    how = dict(seed=args.seed, slots=slots, batch=slots, title=f"{len(condition)} images")
    try:
        _, images, seconds, outs = zip(*decoded(model, tokenizer, condition, list(range(len(condition))), method, policy, **how))
    except torch.OutOfMemoryError:
        raise ValueError(f"--slots {slots}: as many images at a time do not fit; {memory_of(model, policy, method)}. Give fewer") from None
    made = parameters(args, model, tokenizer) | asked
    write_png(args.out, grid(np.concatenate(images), args.per_class), hbsjd=json.dumps(made))
    counts = {key: sum(out.counts()[key] for out in outs) for key in ("nfe", "committed", "row_rounds")}
    return [
        f"model      {args.model}: {sum(p.numel() for p in model.parameters()):,} parameters, {args.dtype}, {made['device']}",
        f"method     {args.method}: {'samples' if policy.mode == 'sample' else 'greedy decoding'} of {policy.distribution}",
        f"seconds    {sum(seconds):.2f} for {len(condition)} images, without loading and without the tokenizer",
        f"images/s   {len(condition) / sum(seconds):.2f}",
        f"NFE        {counts['nfe']}",
        f"committed  {counts['committed'] / counts['row_rounds']:.2f} tokens per round",
        f"picture    {args.out}",
    ]


def parameters(args, model, tokenizer) -> dict:
    """What a picture keeps: enough to make it again."""
    options = ("per_class", "method", "guidance", "temperature", "top_k", "top_p", "seed", "slots", "dtype")
    made_by = dict(hbsjd=version("hbsjd"), torch=torch.__version__, device=device_name(args.device), model=portable(args.model))
    return made_by | dict(weights=fingerprint(model), tokenizer_weights=fingerprint(tokenizer)) | {name: getattr(args, name) for name in options}


def check_arguments(args) -> None:
    if (args.classes is None) == (args.captions_file is None):
        raise ValueError("give either --classes, for a class-conditional model, or --captions-file, for a text-conditional one")
    if args.per_class < 1:
        raise ValueError(f"--per-class {args.per_class} must be at least 1: it is how many images of each class or caption there will be")
    if args.device.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"--device {args.device}: torch finds no CUDA device here; leave --device out to use the CPU")
    if args.out.suffix.lower() != ".png" or args.out.is_dir():
        raise ValueError(f"--out {args.out} must be a file that ends in .png")
    try:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=args.out.parent).close()
    except OSError as error:
        raise ValueError(f"--out {args.out} cannot be written ({error.strerror}); choose another folder") from None


def conditions(args, config):
    """What is to be drawn, one each, and how the picture says so: class ids, or captions."""
    if config.model_type == "t2i":
        if args.captions_file is None:
            raise ValueError(f"{args.model} draws from texts: give --captions-file instead of --classes")
        found = captions.read(args.captions_file).to(args.device)
        return check_condition(found, config), dict(captions_file=args.captions_file.name, captions_sha256=sha256(args.captions_file))
    if args.classes is None:
        raise ValueError(f"{args.model} draws from classes: give --classes instead of --captions-file")
    ids = [class_id(word.strip(), config) for word in args.classes.split(",")]
    return check_condition(torch.tensor(ids, device=args.device), config), dict(classes=ids)


def class_id(word: str, config) -> int:
    """An id, or a name: whole or the part after the colon, in any case."""
    if re.fullmatch(r"-?\d+", word):
        return int(word)
    names = openmoji_classes() if config.vocab_size == vq.CONFIGS["small"].codebook_size else ()
    if len(names) != config.num_classes:
        raise ValueError(f"--classes {word}: names are known for the bundled models only; give ids, 0..{config.num_classes - 1}")
    known = {part.lower(): i for i, name in enumerate(names) for part in (name, name.partition(": ")[2])}
    if word.lower() not in known:
        near = get_close_matches(word.lower(), known, cutoff=0.4) or list(known)[1:6:2]
        near = ", ".join(near)
        raise ValueError(f"--classes: no class is named {word!r}; did you mean {near}? hbsjd.data.openmoji_classes() lists all {len(names)}")
    return known[word.lower()]


def matching_tokenizer(args, config):
    """The tokenizer asked for, by default the one that belongs to the model, and what a picture calls it."""
    small = config.vocab_size == vq.CONFIGS["small"].codebook_size
    name = args.tokenizer or ("vq-16-t2i" if config.model_type == "t2i" else "small" if small else "vq-16")
    tokenizer = vq.load(name, device=args.device)
    if tokenizer.config.codebook_size != config.vocab_size:
        sizes = tokenizer.config.codebook_size, config.vocab_size
        raise ValueError(f"the tokenizer {name} has {sizes[0]} codes, {args.model} {sizes[1]}; give its own with --tokenizer")
    return tokenizer, portable(name)


def memory_of(model, policy: Policy, method: Method) -> str:
    """What an image in a slot costs: keys and values of every position, twice where guided."""
    config, weight = model.config, next(model.parameters())
    slots = config.cls_token_num + config.block_size + method.window.W + 1
    cost = (2 if policy.guidance > 1 else 1) * 2 * config.n_layer * config.dim * slots * weight.element_size()
    return f"the keys and values of each take {cost / 2**20:.0f} MB"


def grid(images_NHWC: np.ndarray, columns: int) -> np.ndarray:
    """One picture [rows * H, columns * W, 3], row by row; images below `VIEW` pixels are enlarged."""
    enlarged = max(1, VIEW // images_NHWC.shape[1])
    images_NHWC = images_NHWC.repeat(enlarged, axis=1).repeat(enlarged, axis=2)
    N, H, W, C = images_NHWC.shape
    return images_NHWC.reshape(N // columns, columns, H, W, C).swapaxes(1, 2).reshape(N // columns * H, columns * W, C)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m hbsjd.sample", description="Draw images of a model into one picture, a row for each class or caption.",
        epilog="The picture keeps how it was made: python -c \"from PIL import Image; print(Image.open('samples.png').text['hbsjd'])\"",
    )
    parser.add_argument("--model", default="small-student", help="a name of hbsjd.load_model or the path of a checkpoint (default: %(default)s)")
    parser.add_argument("--classes", help="ids or names, as in 3,cat-face (names for the bundled models only)")
    parser.add_argument("--captions-file", type=Path, metavar="FILE.npz", help="for a text-conditional model: caption `features` and their `mask`")
    parser.add_argument("--per-class", type=int, default=4, metavar="N", help="images of each class or caption (default: %(default)s)")
    parser.add_argument("--method", default="hbsjd_gumbel", help="a name of hbsjd.METHODS (default: %(default)s)")
    parser.add_argument("--guidance", type=float, default=2.0, help="1 is none (default: %(default)s)")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--top-k", type=int, default=0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--slots", type=int, default=32, help="images decoded at a time (default: %(default)s)")
    parser.add_argument("--tokenizer", help="a name of vq.load or a path (default: the one that belongs to the model)")
    parser.add_argument("--device", default=default_device())
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--out", type=Path, default=Path("samples.png"))
    try:
        lines = draw(parser.parse_args(argv))
    except ValueError as error:
        sys.exit(f"{parser.prog}: {error}")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
