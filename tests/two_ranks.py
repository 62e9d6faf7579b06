"""A few steps of distillation for test_distributed.py: in its process, and by `python -m torch.distributed.run`, where rank 0 saves what every rank saw."""
import sys
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist

import hbsjd
from hbsjd.distillation.trainer import Trainer, recipe, shard
from hbsjd.models.llamagen import random_model

T, V, CLASSES = 16, 11, 4
RUNS = {  # method of distillation, backend, fields; a rank has 3 of the 6 images of a step, in micro-batches of 2 and 1, or of 1
    "ar": ("gkd", "ar", dict(micro_batch=2, prefix_per_image=True, ema_decay=0.9, save_steps=2)),
    "hbsjd": ("gkd", "hbsjd", dict(micro_batch=2, prefix_per_image=True, lmbda=0.5, loss_guidance=1.5)),
    "sharded": ("varkd", "hbsjd_gumbel", dict(micro_batch=1, prefix_per_image=True, teacher_guidance=1.5)),
}


def tiny(seed: int):
    return random_model("tiny", seed=seed, dim=32, vocab_size=V, block_size=T, num_classes=CLASSES).double()


def data(generator, count):
    return torch.randint(CLASSES, (count,), generator=generator), torch.randint(V, (count, T), generator=generator)


def train(name: str, folder: Path | None = None, steps: int | None = None, batch: int = 6) -> dict:
    """A run, or its first steps; with ranks and by the name of "sharded" each rank holds a part of the teacher."""
    method, backend, fields = RUNS[name]
    config, outs, teacher = recipe(method, steps=4, batch=batch, learning_rate=1e-3, **fields), [], tiny(1)
    if name == "sharded" and dist.is_initialized():
        shard(teacher)
    held = sum(getattr(p, "to_local", lambda p=p: p)().numel() for p in teacher.parameters())

    def rollout(model, condition, prefix, seed, images):
        outs.append(hbsjd.rollout(model, condition, prefix, backend, seed=seed, images=images, guidance=config.rollout_guidance))
        return outs[-1]

    trainer = Trainer(tiny(0), teacher, data, rollout, config, folder, groups_V=torch.arange(V) // 2 if method == "varkd" else None)
    logs = [{key: value for key, value in log.items() if not key.startswith("timing/")} for log in islice(trainer.run(), steps)]
    return dict(logs=logs, tokens=[out.tokens for out in outs], nfe=[out.nfe for out in outs], weights=trainer.result.state_dict(), teacher=held)


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    found = {name: train(name) for name in RUNS}
    train("ar", folder / "run", steps=3)  # killed there
    found["resumed"] = train("ar", folder / "run")
    try:
        train("ar", batch=5)
    except ValueError as error:
        found["refused"] = str(error)
    ranks = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, found)
    if dist.get_rank() == 0:
        torch.save(ranks, folder / "ranks.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
