"""On-policy distillation: GKD (arXiv 2306.13649) and VarKD (arXiv 2606.06078), with KD and SeqKD as baselines, on any rollout backend.

A step draws images and real prefixes of k tokens; with probability `lmbda` the student completes them, in eval mode and without gradient, and then
learns the teacher's next-token distribution on the suffix. Other steps learn on real images, or, with `seq_kd`, on the teacher's completions.

The rollout is a callable `(model, condition_B, prefix_BP, seed, images_B) -> Rollout`: how it decodes is not known here, and swapping one that is
exact for another changes nothing but the time. Everything random is a function of (seed, step): a run that was killed goes on as if it had not been,
and a batch is the same for any number of ranks and micro-batches.

Shapes: B images of the global batch, of which a rank has its share; T positions; P given tokens; V codes.
"""
from __future__ import annotations

import copy
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from math import isfinite
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from hbsjd.clock import Laps
from hbsjd.decoding.noise import STEP, row_keys
from hbsjd.distillation.losses import DIVERGENCES, divergence_sum, jsd, varkd_weights
from hbsjd.distillation.resume import Checkpoints
from hbsjd.models.guidance import Guided

METHODS = {
    "kd": dict(lmbda=0.0, divergence="forward_kl"),
    "seqkd": dict(lmbda=0.0, divergence="forward_kl", seq_kd=True),
    "gkd": dict(divergence="bidirectional_kl"),
    "varkd": dict(divergence="reverse_kl", entropy_weights=True),
}


@dataclass(frozen=True)
class Config:
    """A run, field for field as it is logged. Names are TRL's where it has them; `recipe` fills in what a method sets."""

    method: str = "gkd"
    steps: int = 100
    batch: int = 8                         # images of a step, over all ranks
    micro_batch: int = 8                   # images of a forward and backward pass
    seed: int = 0

    lmbda: float = 1.0                     # probability that a step is on-policy
    seq_kd: bool = False                   # the other steps learn on the teacher's completions instead of real images
    prefix: tuple[float, float] = (0.25, 0.75)  # k ~ U[0.25 T, 0.75 T]
    prefix_per_image: bool = False         # a k for every image instead of one for the batch
    horizon: float = 1.0                   # the fraction of the suffix that is generated and learned on
    rollout_guidance: float = 2.0
    temperature: float = 1.0               # of the rollout, not of the divergence

    divergence: str = "bidirectional_kl"   # a name of losses.DIVERGENCES
    beta: float = 0.5                      # of "jsd": 0 is forward, 1 reverse KL
    entropy_weights: bool = False          # VarKD's weights, cut after the first below `tau`
    tau: float = 0.1
    teacher_guidance: float = 1.0          # of the distribution that is learned
    loss_guidance: float = 1.0             # of the student's in the loss
    class_dropout: float = 0.1             # share of images on which both learn without their class, so that guidance goes on working

    learning_rate: float = 5e-5            # constant after a linear warm-up
    warmup_steps: int = 0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.95
    weight_decay: float = 0.05             # of matrices only
    max_grad_norm: float = 1.0
    ema_decay: float = 0.0                 # 0: no moving average of the weights
    bf16: bool = False                     # autocast, and rollouts from a bfloat16 copy
    disable_dropout: bool = True

    save_steps: int = 10
    save_total_limit: int = 2              # checkpoints kept

    def __post_init__(self):
        unit = dict(lmbda=self.lmbda, beta=self.beta, class_dropout=self.class_dropout, ema_decay=self.ema_decay)
        for name, value in unit.items():
            if not 0 <= value <= 1:
                raise ValueError(f"{name} = {value} must lie in [0, 1]")
        if not 0 <= self.prefix[0] <= self.prefix[1] < 1:
            raise ValueError(f"prefix = {self.prefix} must be two fractions of the image, 0 <= low <= high < 1, or the suffix is empty")
        if not 0 < self.horizon <= 1:
            raise ValueError(f"horizon = {self.horizon} must lie in (0, 1], or the suffix is empty")
        if self.horizon < 1 and self.prefix_per_image:
            raise ValueError("a horizon below 1 needs one prefix length for the batch; set prefix_per_image=False")
        if self.divergence not in DIVERGENCES:
            raise ValueError(f"unknown divergence {self.divergence!r}; use one of {', '.join(DIVERGENCES)}")
        for name in ("steps", "batch", "micro_batch", "save_steps", "save_total_limit"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)} must be at least 1")


def recipe(method: str, **fields) -> Config:
    """The configuration of a method of METHODS, with other fields as given."""
    if method not in METHODS:
        raise ValueError(f"unknown distillation method {method!r}; use one of {', '.join(METHODS)}")
    return Config(method=method, **METHODS[method] | fields)


@dataclass(frozen=True)
class Batch:
    """A rank's share of a step: what is given, and what the images are. `own`: whether the student completes them."""

    seed: int
    own: bool
    images_B: torch.Tensor
    condition_B: torch.Tensor
    learned_B: torch.Tensor  # the condition under which the loss is taken: the null class where it was dropped
    tokens_BT: torch.Tensor
    given_B: torch.Tensor


class Trainer:
    """Distils `teacher` into `student`, which it changes in place.

    `data(generator, count)` draws (condition [count], tokens [count, T]), a function of the generator alone; `rollout` is the backend; `folder` takes
    the checkpoints, and where it has some, training goes on from the last; `facts` is what else names the run there (its models, data and backend).
    `groups_V` are VarKD's groups of codes (Eq. 12), if any.
    With torch.distributed initialised, every rank makes a Trainer and runs it. Raises ValueError for models that do not fit each other.
    """

    def __init__(self, student, teacher, data, rollout, config: Config, folder: Path | None = None, groups_V: torch.Tensor | None = None, facts=None):
        check_pair(student.config, teacher.config)
        self.rank, self.world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        if config.batch % self.world:
            raise ValueError(f"batch = {config.batch} must be a multiple of the {self.world} ranks")
        self.student, self.data, self.rollout, self.config, self.groups_V = student, data, rollout, config, groups_V
        self.teacher = teacher.requires_grad_(False).eval()
        self.device = next(student.parameters()).device
        self.learner = student
        if self.world > 1:
            self.learner = DistributedDataParallel(student)  # the same student; its forward also sums the ranks' gradients
            self.learner.config = student.config
        self.actor = copy.deepcopy(student).bfloat16() if config.bf16 else student  # who rolls out
        self.average = AveragedModel(student, multi_avg_fn=get_ema_multi_avg_fn(config.ema_decay)) if config.ema_decay else None
        matrices, others = ([p for p in student.parameters() if (p.ndim >= 2) == wanted] for wanted in (True, False))
        groups = [dict(params=matrices, weight_decay=config.weight_decay), dict(params=others, weight_decay=0.0)]
        self.optimizer = torch.optim.AdamW(groups, lr=config.learning_rate, betas=(config.adam_beta1, config.adam_beta2))
        self.checkpoints = Checkpoints(folder, settings(config) | (facts or {}), config.save_total_limit) if folder else None
        self.done = self.checkpoints.load(self) if self.checkpoints else 0  # steps

    @property
    def result(self) -> torch.nn.Module:
        """What has been trained: the average of the weights where there is one."""
        return self.average.module if self.average else self.student

    def run(self):
        """Train to the end, and yield the log of each step. A checkpoint is written when the next step is asked for."""
        while self.done < self.config.steps:
            log = self.step(self.done)
            self.done += 1
            yield log
            if self.checkpoints and self.rank == 0 and (self.done % self.config.save_steps == 0 or self.done == self.config.steps):
                self.checkpoints.save(self)
        if self.checkpoints and self.rank == 0:
            self.checkpoints.finish(self)

    def step(self, number: int) -> dict:
        """One update of the student; its log."""
        laps, batch = Laps(self.device), self.draw(number)
        laps.lap("data")
        tokens_BT, mask_BT, counts = self.complete(batch)
        laps.lap("rollout")
        total = self.summed(mask_BT.sum())
        losses = self.backward(batch.learned_B, tokens_BT, mask_BT, self.world / total.double(), laps)
        loss = self.summed(torch.stack(losses).sum()).item() / total.item()
        norm = torch.nn.utils.clip_grad_norm_(self.student.parameters(), self.config.max_grad_norm).item()
        self.check_finite(number, loss, norm, losses, batch)
        rate = self.config.learning_rate * min(1.0, (number + 1) / max(1, self.config.warmup_steps))
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.average:
            self.average.update_parameters(self.student)
        laps.lap("optimizer")
        prefix = self.summed(batch.given_B.sum()).item() / self.config.batch
        given = {"train/prefix": prefix, "train/on_policy": batch.own, "train/tokens": int(total), "optim/lr": rate}
        times = {f"timing/{name}_s": laps.seconds.get(name, 0.0) for name in ("data", "rollout", "teacher", "student", "optimizer")}
        return {"step": number + 1, "train/loss": loss, "train/grad_norm": norm} | given | times | {"timing/step_s": sum(times.values())} | counts

    def draw(self, number: int) -> Batch:
        """This rank's share of the step's images, which are the same for any number of ranks."""
        config, seed = self.config, step_seed(self.config.seed, number)
        torch.manual_seed(seed + self.rank)  # of a student's dropout, where it is left on
        generator = torch.Generator().manual_seed(seed)
        condition_B, tokens_BT = self.data(generator, config.batch)
        own, T = torch.rand((), generator=generator).item() < config.lmbda, tokens_BT.shape[1]
        low, high = config.prefix
        share_B = low + (high - low) * torch.rand(config.batch if config.prefix_per_image else 1, generator=generator).expand(config.batch)
        given_B = (share_B * T).long() if own or config.seq_kd else torch.zeros(config.batch, dtype=torch.long)
        dropped_B = torch.rand(config.batch, generator=generator) < config.class_dropout
        learned_B = condition_B.masked_fill(dropped_B.to(condition_B.device), self.student.config.num_classes) if config.class_dropout else condition_B
        mine = torch.arange(config.batch).chunk(self.world)[self.rank]
        return Batch(seed, own, *(x[mine.to(x.device)].to(self.device) for x in (torch.arange(config.batch), condition_B, learned_B, tokens_BT, given_B)))

    def complete(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor, dict]:
        """Tokens, where the loss is taken, and what the rollout cost: the student's or the teacher's completion, or the real images."""
        if not batch.own and not self.config.seq_kd:
            return batch.tokens_BT, torch.ones_like(batch.tokens_BT, dtype=torch.bool), self.rollout_log(None)
        prefix = [tokens[:k] for tokens, k in zip(batch.tokens_BT, batch.given_B.tolist())]
        with torch.no_grad():
            if batch.own:
                self.actor.eval()
                if self.actor is not self.student:
                    torch._foreach_copy_(list(self.actor.parameters()), list(self.student.parameters()))
            out = self.rollout(self.actor if batch.own else self.teacher, batch.condition_B, prefix, batch.seed, batch.images_B)
        asked, policy = (self.config.rollout_guidance, self.config.temperature), out.policy
        if asked != (policy.guidance, policy.temperature if policy.mode == "sample" else asked[1]):
            raise ValueError(f"the rollout was from {policy.distribution}; the configuration has rollout_guidance {asked[0]:g}, temperature {asked[1]:g}")
        t = torch.arange(out.tokens.shape[1], device=self.device)
        mask_BT = (t >= out.start[:, None]) & (t < out.length[:, None])
        if not mask_BT.any():
            raise ValueError("the suffix is empty: every prefix is a whole image; leave some tokens to generate")
        return out.tokens, mask_BT, self.rollout_log(out)

    def rollout_log(self, out) -> dict:
        """Counts over all ranks; `nfe` is the mean of the ranks'."""
        names = ("nfe", "row_rounds", "committed", "accepted", "proposed")
        if out is None:
            return dict.fromkeys([f"rollout/{name}" for name in (*names, "committed_per_round", "acceptance_rate")])
        counts = out.counts()
        nfe, row_rounds, committed, accepted, proposed = self.summed(torch.tensor([counts[name] for name in names], device=self.device)).tolist()
        rates = {"rollout/committed_per_round": committed / row_rounds, "rollout/acceptance_rate": accepted / proposed if proposed else None}
        return dict(zip((f"rollout/{name}" for name in names), (nfe / self.world, row_rounds, committed, accepted, proposed))) | rates

    def backward(self, condition_B, tokens_BT, mask_BT, scale, laps: Laps) -> list[torch.Tensor]:
        """Gradients of scale x the summed divergence, micro-batch by micro-batch; the sums. DistributedDataParallel averages, so `scale` has the world."""
        config, sums = self.config, []
        student, teacher = guided(self.learner, config.loss_guidance), guided(self.teacher, config.teacher_guidance)
        divergence = partial(jsd, beta=config.beta) if config.divergence == "jsd" else DIVERGENCES[config.divergence]
        micro_batches = list(zip(*(x.split(config.micro_batch) for x in (condition_B, tokens_BT, mask_BT))))
        self.student.train(not config.disable_dropout)
        for i, (condition, tokens, mask) in enumerate(micro_batches):
            last = i + 1 == len(micro_batches)
            with torch.autocast(self.device.type, torch.bfloat16, enabled=config.bf16), nullcontext() if last or self.world == 1 else self.learner.no_sync():
                with torch.no_grad():
                    target = teacher(condition, tokens)
                    weights = varkd_weights(target, mask, config.tau) if config.entropy_weights else None
                laps.lap("teacher")
                loss, _ = divergence_sum(divergence, student(condition, tokens), target, mask, weights, groups_V=self.groups_V)
                (loss * scale).backward()
                laps.lap("student")
            sums.append(loss.detach())
        return sums

    def summed(self, x: torch.Tensor) -> torch.Tensor:
        """Over all ranks."""
        if self.world > 1:
            dist.all_reduce(x)
        return x

    def check_finite(self, number: int, loss: float, norm: float, losses, batch: Batch) -> None:
        if isfinite(loss) and isfinite(norm):
            return
        self.optimizer.zero_grad(set_to_none=True)
        bad = range(len(losses)) if isfinite(loss) else [i for i, part in enumerate(losses) if not part.isfinite()]
        images = batch.images_B.split(self.config.micro_batch)
        where = ", ".join(str(images[i].tolist()) for i in bad) or "of another rank"
        kept = f"; {self.checkpoints.last()} is kept" if self.checkpoints else ""
        raise ValueError(f"step {number + 1}: the loss is {loss}, its gradient's norm {norm}, in the batch's images {where}; lower learning_rate{kept}")


def step_seed(seed: int, step: int) -> int:
    """What a step's data, prefixes and rollout noise are drawn from."""
    return int(row_keys(seed, STEP, torch.tensor(step), torch.tensor(0)))


def guided(model, scale: float):
    return model if scale == 1 else Guided(model, scale)


def shard(teacher) -> None:
    """Spread a teacher that does not fit over the ranks; its layers are gathered one at a time. It can score but not roll out."""
    for layer in teacher.layers:
        fully_shard(layer)
    fully_shard(teacher)


@torch.no_grad()
def teacher_kl(student, teacher, condition_B, tokens_BT, mask_BT, chunk: int = 16) -> dict[str, float]:
    """Mean KL of the masked tokens, forward KL(T || S) and reverse KL(S || T), in nats per token."""
    sums = dict.fromkeys(("forward_kl", "reverse_kl"), 0.0)
    for condition, tokens, mask in zip(*(x.split(chunk) for x in (condition_B, tokens_BT, mask_BT))):
        logits = student(condition, tokens), teacher(condition, tokens)
        for name in sums:
            sums[name] += divergence_sum(DIVERGENCES[name], *logits, mask)[0].item()
    return {name: value / mask_BT.sum().item() for name, value in sums.items()}


def check_pair(student, teacher) -> None:
    """A divergence between two models needs the same tokens in the same places under the same conditions."""
    for name, what in (("vocab_size", "vocabularies"), ("block_size", "grids"), ("model_type", "condition types"), ("num_classes", "numbers of classes")):
        ours, theirs = getattr(student, name, None), getattr(teacher, name, None)  # a foreign model need not have all
        if ours != theirs:
            raise ValueError(f"student and teacher have different {what}: {name} = {ours} and {theirs}; use two models of one family and resolution")


def settings(config: Config) -> dict:
    """The configuration as JSON gives it back, without what may differ between two sittings of a run."""
    kept = asdict(config) | dict(prefix=list(config.prefix))
    return {name: value for name, value in kept.items() if name not in ("steps", "micro_batch", "save_steps", "save_total_limit")}
