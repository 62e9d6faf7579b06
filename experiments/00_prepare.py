"""Prepare the models of a scale: check the bundled ones and show what they make, or train them again from nothing (--retrain)."""
from __future__ import annotations

import argparse
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from tqdm import tqdm

from hbsjd import data
from hbsjd.models import llamagen, vq
from hbsjd.models.checkpoints import write_weights

TOKENIZER = dict(steps=800, batch=32, lr=1e-3, revive_every=25, revive_until=500)
STUDENT = dict(steps=900, batch=16, lr=0.02, lr_other=2e-3, weight_decay=0.05, class_dropout=0.1, shift=1, shift_until=0.7)
TEACHER = dict(steps=380, batch=32, lr=0.02, lr_other=2e-3, weight_decay=0.05, class_dropout=0.1, shift=1, shift_until=0.7)


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
    began = time.time()
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
                curve.append(dict(step=step + 1, train_loss=loss.item(), seconds=time.time() - began, **validate()))
            bar.write(f"{folder.name} {curve[-1]}")
            folder.mkdir(parents=True, exist_ok=True)
            parts = [part.state_dict() for part in optimizers + schedules]
            torch.save(dict(model=model.state_dict(), optimizers=parts, step=step + 1, curve=curve), path.with_suffix(".partial"))
            path.with_suffix(".partial").rename(path)
    return curve


def warm_then_linear(step: int, steps: int, warmup: int = 50) -> float:
    return min((step + 1) / warmup, (steps - step) / (steps - warmup))


def step_generator(seed: int, step: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed * 1_000_003 + step)


def train_tokenizer(table, pixels, folder: Path, seed: int, steps, batch, lr, revive_every, revive_until):
    torch.manual_seed(seed)
    model = vq.VQModel(vq.CONFIGS["small"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0)
    used = torch.zeros(model.config.codebook_size)
    held_out = data.to_unit(pixels[torch.from_numpy((table.split == "validation").to_numpy())])
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
    """PSNR in dB over all pixels of uint8-range images in [-1, 1] (peak 2), and the share of codes that occur."""
    codes = torch.cat([model.encode(chunk) for chunk in images.split(64)])
    out = torch.cat([model.decode(chunk) for chunk in codes.split(64)])
    per_image = 10 * torch.log10(4 / (out - images).square().mean((1, 2, 3)))
    return dict(psnr=per_image.mean().item(), codes_used=codes.unique().numel() / model.config.codebook_size)


def train_model(size, tokenizer, table, pixels, folder: Path, seed: int, steps, batch, lr, lr_other, weight_decay, class_dropout, shift, shift_until):
    torch.manual_seed(seed)
    classes = torch.from_numpy(table.class_id.to_numpy())
    null = table.class_id.nunique()
    config = llamagen.Config(**llamagen.SIZES[size], vocab_size=tokenizer.config.codebook_size, block_size=256, num_classes=null)
    model = llamagen.LlamaGen(config)
    matrices = [p for p in model.layers.parameters() if p.ndim == 2]
    others = [p for name, p in model.named_parameters() if not (name.startswith("layers.") and p.ndim == 2)]
    optimizers = [torch.optim.Muon(matrices, lr=lr, weight_decay=weight_decay, momentum=0.95), torch.optim.AdamW(others, lr=lr_other, betas=(0.9, 0.95), weight_decay=0)]
    condition, codes = held_out_codes(tokenizer, table, pixels, "validation")

    def loss_at(step):
        generator = step_generator(seed, step)
        rows = data.balanced(table, "train", generator, batch)
        moved = data.augment(pixels[rows], generator, shift if step < shift_until * steps else 0)
        tokens = tokenizer.encode(data.to_unit(moved))
        dropped = torch.rand(batch, generator=generator) < class_dropout
        logits = model(classes[rows].where(~dropped, torch.tensor(null)), tokens)
        return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())

    return model, train(model, optimizers, loss_at, lambda: dict(heldout_loss=cross_entropy(model, condition, codes)), steps, folder)


def held_out_codes(tokenizer, table, pixels, split):
    """One image per held-out name (the first of its skin tones): class ids [N] and codes [N, T]."""
    rows = torch.from_numpy(table[table.split == split].drop_duplicates("name").index.to_numpy(copy=True))
    classes = torch.from_numpy(table.class_id.to_numpy())[rows]
    return classes, torch.cat([tokenizer.encode(data.to_unit(chunk)) for chunk in pixels[rows].split(64)])


@torch.no_grad()
def cross_entropy(model, condition, codes) -> float:
    """Nats per token."""
    losses = [F.cross_entropy(model(c, t).flatten(0, 1).float(), t.flatten(), reduction="sum") for c, t in zip(condition.split(64), codes.split(64))]
    return torch.stack(losses).sum().item() / codes.numel()
