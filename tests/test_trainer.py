"""The trainer: what it learns, written out a second time in plain steps; backends that may be swapped; runs that may be killed; input that is refused.

In float64 unless said otherwise. A course is what a run went through: loss and weights after each step.
"""
import copy
import json
import math
import os
import shutil
from dataclasses import replace
from importlib import import_module
from itertools import islice
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_bad_input import refused

import hbsjd
from hbsjd.decoding.methods import METHODS
from hbsjd.decoding.windows import Adaptive
from hbsjd.distillation import resume
from hbsjd.distillation.losses import codebook_groups
from hbsjd.distillation.trainer import Config, Trainer, recipe
from hbsjd.models import checkpoints
from hbsjd.models.llamagen import random_model

T, V, CLASSES = 16, 11, 4
GROUPS = torch.arange(V) // 3


def tiny(seed=0, dtype=torch.float64, **overrides):
    return random_model("tiny", seed=seed, **dict(dim=32, n_layer=1, vocab_size=V, block_size=T, num_classes=CLASSES) | overrides).to(dtype)


def data(generator, count):
    return torch.randint(CLASSES, (count,), generator=generator), torch.randint(V, (count, T), generator=generator)


def backend(method="ar", shift=0, horizon=1.0, **arguments):
    def call(model, condition, prefix, seed, images):
        length = T if horizon == 1 else len(prefix[0]) + math.ceil(horizon * (T - len(prefix[0])))
        return hbsjd.rollout(model, condition, prefix, method, seed=seed + shift, images=images, length=length, **dict(guidance=2.0) | arguments)

    return call


class Recorded:
    """A backend that keeps what it was given and what it returned."""

    def __init__(self, call):
        self.call, self.given, self.out = call, [], []

    def __call__(self, *inputs):
        self.given.append(inputs)
        self.out.append(self.call(*inputs))
        return self.out[-1]


def config(method="gkd", **fields) -> Config:
    return recipe(method, **dict(steps=6, batch=4, micro_batch=4, learning_rate=1e-3) | fields)


def trainer(settings=None, rollout=None, *, student=None, teacher=None, images=data, **others) -> Trainer:
    return Trainer(student or tiny(0), teacher or tiny(1), images, rollout or backend(), settings or config(), **others)


def course(run: Trainer, steps=None) -> list:
    """All the way, or some steps of it, after which the run is as if it had been killed."""
    return [(log["train/loss"], [p.detach().clone() for p in run.student.parameters()]) for log in islice(run.run(), steps)]


def assert_same(ours, theirs, within=0.0):
    assert len(ours) == len(theirs) > 0
    for (loss, weights), (other_loss, other_weights) in zip(ours, theirs):
        torch.testing.assert_close(loss, other_loss, atol=within, rtol=0)
        for x, y in zip(weights, other_weights, strict=True):
            torch.testing.assert_close(x, y, atol=within, rtol=0)


# ---- which backend decodes changes nothing -----------------------------------------------------------------------------------------------

COSTS = {width: {1: 1 + width / 4, 10: 2 + width} for width in (0, 1, 3, 8)}
ADAPTIVE = replace(METHODS["hbsjd_adaptive"], window=Adaptive((0, 1, 3, 8), 2, COSTS, {0: 1.0, 1: 1.6, 3: 2.5, 8: 3.0}))


@pytest.fixture(scope="module")
def with_ar():
    return course(trainer(config(steps=10, prefix_per_image=True)))


@pytest.mark.parametrize("method", ["hbsjd_gumbel", ADAPTIVE], ids=["hbsjd_gumbel", "hbsjd_adaptive"])
def test_an_exact_backend_is_a_drop_in(with_ar, method):
    rollout = Recorded(backend(method))
    assert_same(course(trainer(config(steps=10, prefix_per_image=True), rollout)), with_ar)
    assert sum(out.nfe for out in rollout.out) < 0.9 * sum(int((out.length - out.start).max()) for out in rollout.out)


@pytest.mark.parametrize("wrong", [backend(shift=1), backend("hbsjd_probabilistic")], ids=["seed", "rule"])
def test_another_backend_is_not(with_ar, wrong):
    with pytest.raises(AssertionError):
        assert_same(course(trainer(config(steps=1, prefix_per_image=True), wrong)), with_ar[:1])


# ---- a step, written out in plain ---------------------------------------------------------------------------------------------------------

PLAIN = {
    "forward_kl": lambda s, t: (t.exp() * (t - s)).sum(-1),
    "reverse_kl": lambda s, t: (s.exp() * (s - t)).sum(-1),
    "bidirectional_kl": lambda s, t: ((s.exp() - t.exp()) * (s - t)).sum(-1) / 2,
    "jsd": lambda s, t: to_mixture(0.3, t, s, t) + to_mixture(0.7, s, s, t),  # beta = 0.3
}


def to_mixture(share, p, s, t):
    return share * (p.exp() * (p - (0.3 * t.exp() + 0.7 * s.exp()).log())).sum(-1)


def plain_logits(model, scale, condition, tokens):
    conditional, null = model(condition, tokens), model(torch.full_like(condition, CLASSES), tokens)
    return null + scale * (conditional - null)


def plain_loss(settings, student, teacher, condition, tokens, mask, groups=None):
    s, t = plain_logits(student, settings.loss_guidance, condition, tokens), plain_logits(teacher, settings.teacher_guidance, condition, tokens).detach()
    s, t = s.log_softmax(-1), t.log_softmax(-1)
    weights = torch.ones_like(mask, dtype=torch.float64)
    if settings.entropy_weights:
        weights = 1 + (t.exp() * t).sum(-1) / math.log(V)
        for alpha, inside in zip(weights, mask.tolist()):
            cut = next((i for i, (a, learned) in enumerate(zip(alpha.tolist(), inside)) if learned and a < settings.tau), T)
            alpha[cut + 1 :] = 0
    if groups is not None:
        s, t = (torch.stack([x[..., groups == g].exp().sum(-1) for g in range(int(groups.max()) + 1)], dim=-1).log() for x in (s, t))
    return (weights * PLAIN[settings.divergence](s, t))[mask].sum() / mask.sum()


STEPS = {  # name -> method, groups, fields
    "gkd": ("gkd", None, dict()),
    "a prefix for each image": ("gkd", None, dict(prefix_per_image=True, weight_decay=0.3)),
    "guided teacher": ("gkd", None, dict(teacher_guidance=1.7)),
    "guided student": ("gkd", None, dict(loss_guidance=1.5, rollout_guidance=1.0)),
    "all guided, classes dropped": ("gkd", None, dict(loss_guidance=2.0, teacher_guidance=2.0, class_dropout=0.5)),
    "hotter rollout": ("gkd", None, dict(temperature=1.5)),
    "short horizon": ("gkd", None, dict(horizon=0.25)),
    "half on-policy": ("gkd", None, dict(lmbda=0.5)),
    "half on-policy, else the teacher's": ("gkd", None, dict(lmbda=0.5, seq_kd=True, prefix_per_image=True)),
    "forward, clipped": ("gkd", None, dict(divergence="forward_kl", max_grad_norm=0.1)),
    "jsd, short prefixes": ("gkd", None, dict(divergence="jsd", beta=0.3, prefix=(0.1, 0.3))),
    "kd": ("kd", None, dict(adam_beta1=0.5, adam_beta2=0.7)),
    "seqkd": ("seqkd", None, dict()),
    "varkd": ("varkd", None, dict()),
    "varkd, groups": ("varkd", GROUPS, dict(tau=0.2, prefix_per_image=True, learning_rate=3e-3)),
}


@pytest.mark.parametrize("name", STEPS)
def test_steps_are_the_plain_computation(name):
    """Loss, gradient and AdamW of whole steps; tokens and mask from the rollout's own start and length."""
    method, groups, fields = STEPS[name]
    settings = config(method, **fields)
    rollout = Recorded(backend(guidance=settings.rollout_guidance, temperature=settings.temperature, horizon=settings.horizon))
    run, teacher, student, kinds = trainer(settings, rollout, groups_V=groups), tiny(1), tiny(0), set()
    matrices, others = ([p for p in student.parameters() if (p.ndim > 1) == wanted] for wanted in (True, False))
    decayed = [dict(params=matrices, weight_decay=settings.weight_decay), dict(params=others, weight_decay=0)]
    optimizer = torch.optim.AdamW(decayed, lr=settings.learning_rate, betas=(settings.adam_beta1, settings.adam_beta2))
    for number, log in enumerate(islice(run.run(), 3)):
        batch = run.draw(number)
        tokens, mask = batch.tokens_BT, torch.ones(4, T, dtype=torch.bool)
        if batch.own or settings.seq_kd:
            (model, condition, prefix, _, images), out = rollout.given.pop(), rollout.out.pop()
            tokens, spans = out.tokens, zip(out.start.tolist(), out.length.tolist())
            mask = torch.tensor([[start <= t < end for t in range(tokens.shape[1])] for start, end in spans])
            assert model is (run.student if batch.own else run.teacher) and torch.equal(condition, batch.condition_B) and images.tolist() == [0, 1, 2, 3]
            assert all(torch.equal(given, real[:k]) for given, real, k in zip(prefix, batch.tokens_BT, batch.given_B.tolist()))
        kinds.add((batch.own, mask.all().item()))
        loss = plain_loss(settings, student, teacher, batch.learned_B, tokens, mask, groups)
        optimizer.zero_grad()
        loss.backward()
        norm = math.sqrt(sum(float(p.grad.square().sum()) for p in student.parameters()))
        for p in student.parameters():
            p.grad *= min(1.0, settings.max_grad_norm / (norm + 1e-6))
        optimizer.step()
        assert log["train/loss"] == pytest.approx(loss.item(), abs=1e-12) and log["train/grad_norm"] == pytest.approx(norm, rel=1e-12)
        assert log["train/tokens"] == mask.sum() and log["train/on_policy"] is batch.own
        for ours, plain in zip(run.student.parameters(), student.parameters()):
            torch.testing.assert_close(ours, plain, atol=1e-12, rtol=0)
    assert not rollout.out, "nothing was decoded in vain"
    assert kinds == {(own, not own and not settings.seq_kd) for own in ({True, False} if settings.lmbda == 0.5 else {settings.lmbda == 1})}


def test_teacher_equal_to_student_teaches_nothing():
    for method in ("kd", "seqkd", "gkd", "varkd"):
        log = trainer(config(method), teacher=tiny(0)).step(0)
        assert abs(log["train/loss"]) < 1e-12 and log["train/grad_norm"] < 1e-12


@pytest.mark.parametrize("method", ["kd", "gkd", "varkd"])
def test_micro_batches_change_nothing(method):
    """Suffixes of unequal length: a mean of the micro-batches' means would be another loss."""
    courses = [course(trainer(config(method, steps=3, batch=8, micro_batch=n, prefix_per_image=True))) for n in (8, 3, 1)]
    assert_same(courses[1], courses[0], within=1e-12)
    assert_same(courses[2], courses[0], within=1e-12)


# ---- what a step learns on ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["gkd", "varkd", "seqkd"])
def test_only_the_suffix_is_learned(method):
    """The teacher's logits before each image's prefix length may be anything; the first one after it may not."""
    found = []
    for offset in (None, 0, 1):
        rollout, teacher = Recorded(backend()), tiny(1)

        def spoil(model, inputs, logits, offset=offset, rollout=rollout):
            if offset is not None:
                return logits.masked_fill((torch.arange(T) < rollout.out[-1].start[:, None] + offset)[..., None], 7.0 if offset else torch.nan)

        teacher.register_forward_hook(spoil)
        found.append(course(trainer(config(method, prefix_per_image=True, steps=3), rollout, teacher=teacher)))
    assert_same(found[1], found[0])
    assert all(abs(spoilt[0] - good[0]) > 1e-3 for spoilt, good in zip(found[2], found[0]))


def drawn(steps=200, **fields):
    run = trainer(config(**fields))
    return [run.draw(number) for number in range(steps)]


def test_prefix_lengths():
    """From a quarter to three quarters of the image, all of them, one for the batch or one for each image; none for real images."""
    lengths = torch.stack([batch.given_B for batch in drawn(100)])
    assert (lengths == lengths[:, :1]).all() and set(lengths.flatten().tolist()) == set(range(T // 4, 3 * T // 4))
    lengths = torch.stack([batch.given_B for batch in drawn(100, prefix_per_image=True)])
    assert set(lengths.flatten().tolist()) == set(range(T // 4, 3 * T // 4)) and (lengths != lengths[:, :1]).any(1).float().mean() > 0.9
    assert {k for batch in drawn(100, prefix=(0.0, 0.99), prefix_per_image=True) for k in batch.given_B.tolist()} == set(range(T))
    assert {k for batch in drawn(20, prefix=(0.5, 0.5)) for k in batch.given_B.tolist()} == {T // 2}
    assert not any(batch.given_B.any() for batch in drawn(20, lmbda=0.0))


def test_the_share_of_on_policy_steps_is_lmbda():
    own = [batch.own for batch in drawn(lmbda=0.5)]
    assert 0.4 < sum(own) / 200 < 0.6 and 0.1 < sum(batch.own for batch in drawn(lmbda=0.2)) / 200 < 0.3
    assert [batch.own for batch in drawn(20, lmbda=0.5)] == own[:20] != [batch.own for batch in drawn(20, lmbda=0.5, seed=1)]
    assert not any(batch.own for batch in drawn(20, lmbda=0.0)) and all(batch.own for batch in drawn(20, lmbda=1.0))


def test_every_step_has_its_own_images_and_noise():
    batches = drawn(50)
    assert len({batch.seed for batch in batches}) == 50 == len({tuple(batch.tokens_BT.flatten().tolist()) for batch in batches})
    assert {batch.seed for batch in batches}.isdisjoint(batch.seed for batch in drawn(50, seed=1))


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_dropped_classes_reach_both_models_but_not_the_rollout(share):
    rollout, student, teacher, seen = Recorded(backend()), tiny(0), tiny(1), {"student": [], "teacher": []}
    for name, model in (("student", student), ("teacher", teacher)):
        model.register_forward_hook(lambda model, inputs, logits, name=name: seen[name].append(inputs[0]))
    course(trainer(config(class_dropout=share, batch=16, micro_batch=16, steps=8, prefix=(0.75, 0.75)), rollout, student=student, teacher=teacher))
    learned, true = torch.stack(seen["student"]), torch.stack([given[1] for given in rollout.given])
    assert torch.equal(learned, torch.stack(seen["teacher"])) and true.max() < CLASSES
    dropped = learned == CLASSES
    assert torch.equal(learned.where(~dropped, true), true) and abs(dropped.float().mean() - share) <= (0.1 if share == 0.3 else 0)


@pytest.mark.parametrize("lmbda", [1.0, 0.0])
@pytest.mark.parametrize("other", [dict(guidance=1.0), dict(guidance=2.5), dict(temperature=0.5), dict(method="hbsjd", guidance=1.0)], ids=str)
def test_a_rollout_from_another_distribution_is_refused(other, lmbda):
    refused(lambda: trainer(config(lmbda=lmbda, seq_kd=True), backend(**other)).step(0), "the rollout was from the model", "rollout_guidance 2, temperature 1")


def test_a_greedy_rollout_has_no_temperature():
    course(trainer(config(temperature=0.5), backend("hbsjd")), 1)
    refused(lambda: trainer(config(temperature=0.5), backend("hbsjd_gumbel")).step(0), "the rollout was from the model", "temperature 0.5")


def test_the_experiments_backend_follows_the_configuration():
    settings = config(horizon=0.3, rollout_guidance=1.5)
    rollout = Recorded(import_module("experiments.04_distill").backend("ar", settings, {}))
    for log in trainer(settings, rollout).run():
        out = rollout.out[-1]
        k = int(out.start[0])
        assert out.policy.guidance == 1.5 and out.length.tolist() == [k + math.ceil(0.3 * (T - k))] * 4
        assert log["train/tokens"] == 4 * math.ceil(0.3 * (T - k)) and log["train/prefix"] == k


# ---- how it is learned -------------------------------------------------------------------------------------------------------------------


def test_the_bf16_actor_follows_the_student():
    followed = []

    def rollout(model, *inputs):
        pairs = zip(model.parameters(), run.student.parameters())
        followed.append(model is run.actor and all(ours.dtype == torch.bfloat16 and torch.equal(ours, p.bfloat16()) for ours, p in pairs))
        return backend()(model, *inputs)

    run = trainer(config(bf16=True), rollout, student=tiny(0, torch.float32), teacher=tiny(1, torch.float32))
    losses = [loss for loss, _ in course(run)]
    assert followed == [True] * 6 and losses[-1] < losses[0] and {p.dtype for p in run.student.parameters()} == {torch.float32}


@pytest.mark.parametrize("disabled", [True, False])
@pytest.mark.parametrize("bf16", [True, False])
def test_dropout(disabled, bf16):
    """Never in a rollout, and in learning only where it is asked for; there it is a function of the seed."""
    courses, modes = [], {"rollout": set(), "student": set()}
    for dropout in (0.5, 0.5, 0.0):
        student = tiny(0, torch.float32).train()
        student.norm = torch.nn.Sequential(student.norm, torch.nn.Dropout(dropout))
        student.register_forward_hook(lambda model, inputs, logits: modes["student"].add(model.training))

        def rollout(model, *inputs):
            modes["rollout"].add(model.training)
            return backend()(model, *inputs)

        courses.append(course(trainer(config(disable_dropout=disabled, bf16=bf16, steps=2), rollout, student=student, teacher=tiny(1, torch.float32))))
    assert modes == {"rollout": {False}, "student": {not disabled}}
    assert_same(courses[0], courses[1])
    assert (courses[0][0][0] == courses[2][0][0]) is disabled


def test_the_result_is_the_average():
    run = trainer(config(ema_decay=0.9))
    weights = [weights for _, weights in course(run)]
    for i, ours in enumerate(run.result.parameters()):
        average = weights[0][i]
        for later in weights[1:]:
            average = 0.9 * average + 0.1 * later[i]
        torch.testing.assert_close(ours, average, atol=1e-12, rtol=0)
    plain = trainer()
    assert plain.result is plain.student


def test_warm_up():
    """The first step of AdamW moves a weight by the learning rate, or less."""
    rates = [log["optim/lr"] for log in trainer(config(warmup_steps=4)).run()]
    assert rates == [0.00025, 0.0005, 0.00075, 0.001, 0.001, 0.001]
    for warmup, rate in ((0, 1e-3), (4, 0.25e-3)):
        run, before = trainer(config(warmup_steps=warmup, weight_decay=0.0)), list(tiny(0).parameters())
        ((_, after),) = course(run, 1)
        assert max((x - y).abs().max().item() for x, y in zip(after, before)) == pytest.approx(rate, rel=1e-6)


def test_the_teacher_never_changes():
    teacher = tiny(1).train()
    before = copy.deepcopy(teacher.state_dict())
    course(trainer(config(teacher_guidance=2.0, lmbda=0.5, seq_kd=True), teacher=teacher))
    assert all(torch.equal(x, before[name]) for name, x in teacher.state_dict().items())
    assert not teacher.training and all(p.grad is None and not p.requires_grad for p in teacher.parameters())


# ---- a run that is killed ----------------------------------------------------------------------------------------------------------------

SAVED = dict(save_steps=2, save_total_limit=2)


def saved(folder, settings=None, **others) -> Trainer:
    others = dict(student=tiny(0, torch.float32), teacher=tiny(1, torch.float32)) | others
    return trainer(settings or config(**SAVED), folder=folder, **others)


def names(folder) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("steps", [2, 3, 6])
@pytest.mark.parametrize("fields", [{}, dict(ema_decay=0.8, warmup_steps=5, lmbda=0.5), dict(bf16=True)], ids=str)
def test_killed_and_resumed_is_uninterrupted(tmp_path, steps, fields):
    """Bit for bit, in float32. After its n-th step a run is killed before that step is saved."""
    settings, folder = config(**SAVED, **fields), tmp_path / "killed"
    whole, killed = course(saved(tmp_path / "whole", settings)), course(saved(folder, settings), steps)
    resumed = saved(folder, settings)
    assert resumed.done == (steps - 1) // 2 * 2
    assert_same(killed[: resumed.done] + course(resumed), whole)
    assert names(folder) == ["model.safetensors", "state.json", "step-000004", "step-000006"]
    for path in filter(Path.is_file, folder.rglob("*")):
        assert path.read_bytes() == (tmp_path / "whole" / path.relative_to(folder)).read_bytes()


def test_a_run_that_ended_has_nothing_to_do_and_may_go_on(tmp_path):
    whole = course(saved(tmp_path / "whole", config(steps=9, **SAVED)))
    course(saved(tmp_path / "run"))
    assert list(saved(tmp_path / "run").run()) == []
    assert_same(course(saved(tmp_path / "run", config(steps=9, micro_batch=4, save_steps=3, save_total_limit=1))), whole[6:])
    assert names(tmp_path / "run") == ["model.safetensors", "state.json", "step-000009"]


@pytest.mark.parametrize("ema", [0.0, 0.8])
def test_the_result_loads_as_a_model(tmp_path, ema):
    run = saved(tmp_path, config(ema_decay=ema), facts=dict(backend="ar"))
    course(run)
    model = hbsjd.load_model(tmp_path / "model.safetensors", device="cpu")
    assert model.config == run.student.config
    assert all(torch.equal(x, y.bfloat16().float()) for x, y in zip(model.state_dict().values(), run.result.state_dict().values(), strict=True))
    state = json.loads((tmp_path / "state.json").read_text())
    assert state["step"] == 6 and state["distillation"]["method"] == "gkd" and state["distillation"]["backend"] == "ar"


def test_what_a_killed_save_left_is_ignored_and_goes(tmp_path):
    whole = course(saved(tmp_path / "whole"))
    course(saved(tmp_path / "run"), 3)
    left = tmp_path / "run/step-000004.partial"
    left.mkdir()
    (left / "model.safetensors").write_bytes(b"half")
    resumed = saved(tmp_path / "run")
    assert resumed.done == 2
    assert_same(course(resumed), whole[2:])
    assert not left.exists() and not list((tmp_path / "run").glob("**/*.partial"))


def rewritten(path, change):
    state = json.loads(path.read_text())
    change(state)
    path.write_text(json.dumps(state))


def alter(path):
    tensors = load_file(path)
    next(iter(tensors.values())).view(-1)[0] += 1
    save_file(tensors, path)


DAMAGE = {
    "weights cut": lambda folder: os.truncate(folder / "model.safetensors", 999),
    "weights altered": lambda folder: alter(folder / "model.safetensors"),
    "optimizer cut": lambda folder: (folder / "optimizer.safetensors").write_bytes(b""),
    "optimizer altered": lambda folder: alter(folder / "optimizer.safetensors"),
    "optimizer missing": lambda folder: (folder / "optimizer.safetensors").unlink(),
    "state missing": lambda folder: (folder / "state.json").unlink(),
    "state cut": lambda folder: os.truncate(folder / "state.json", 99),
    "state no text": lambda folder: (folder / "state.json").write_bytes(b"\xff\xfe"),
    "state a list": lambda folder: (folder / "state.json").write_text("[1]"),
    "checksum edited": lambda folder: rewritten(folder / "state.json", lambda state: state["sha256"].update({"model.safetensors": "0"})),
    "checksum missing": lambda folder: rewritten(folder / "state.json", lambda state: state["sha256"].clear()),
    "step edited": lambda folder: rewritten(folder / "state.json", lambda state: state.update(step=3)),
    "step a name": lambda folder: rewritten(folder / "state.json", lambda state: state.update(step="4")),
    "identity gone": lambda folder: rewritten(folder / "state.json", lambda state: state.update(identity=None)),
}


@pytest.fixture(scope="module")
def checkpointed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    whole = course(saved(folder / "whole"))
    course(saved(folder / "run"), 5)
    return folder / "run", whole


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_refused(checkpointed, tmp_path, damage):
    """And where it is deleted, as the line says, the one before it is used."""
    folder = shutil.copytree(checkpointed[0], tmp_path / "run")
    DAMAGE[damage](folder / "step-000004")
    refused(lambda: saved(folder), "step-000004 is damaged", "delete it")
    shutil.rmtree(folder / "step-000004")
    resumed = saved(folder)
    assert resumed.done == 2
    assert_same(course(resumed, 1), checkpointed[1][2:3])


OTHERS = {  # the field that is named -> the other run
    "learning_rate": dict(settings=config(**SAVED, learning_rate=2e-3)),
    "method": dict(settings=config("varkd", **SAVED)),
    "prefix": dict(settings=config(**SAVED, prefix=(0.25, 0.5))),
    "ema_decay": dict(settings=config(**SAVED, ema_decay=0.5)),
    "backend": dict(facts=dict(backend="ar")),
    "teacher": dict(facts=dict(teacher="another")),
    "n_layer": dict(student=tiny(0, torch.float32, n_layer=2)),
    "dim": dict(student=tiny(0, torch.float32, dim=64)),
}


@pytest.mark.parametrize("field", OTHERS)
def test_a_checkpoint_of_another_run_is_refused(checkpointed, field):
    refused(lambda: saved(checkpointed[0], **OTHERS[field]), "step-000004 belongs to a run with another", field)


def full_disk(after: int):
    """A `save_file` that works some times, and then writes half a file."""
    calls = []

    def save(tensors, path):
        calls.append(path)
        if len(calls) > after:
            path.write_bytes(b"half")
            raise OSError(28, "No space left on device")
        save_file(tensors, path)

    return save


@pytest.mark.parametrize("files", [2, 3])
def test_a_full_disk_keeps_the_last_checkpoint(checkpointed, tmp_path, monkeypatch, files):
    with monkeypatch.context() as patch:
        patch.setattr(resume, "save_file", full_disk(files))
        refused(lambda: course(saved(tmp_path)), "step-000004 cannot be written", "No space left on device", "checkpoint step-000002 is kept")
    assert names(tmp_path) == ["step-000002"]
    assert_same(course(saved(tmp_path)), checkpointed[1][2:])


def test_a_full_disk_at_the_first_save_and_at_the_end(checkpointed, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(resume, "save_file", full_disk(0))
        refused(lambda: course(saved(tmp_path / "first")), "step-000002 cannot be written", "no checkpoint yet")
    assert names(tmp_path / "first") == []
    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "save_file", full_disk(0))
        refused(lambda: course(saved(tmp_path / "end")), "model.safetensors cannot be written", "No space left on device", "checkpoint step-000006 is kept")
    assert names(tmp_path / "end") == ["step-000004", "step-000006"]
    assert list(saved(tmp_path / "end").run()) == []
    assert names(tmp_path / "end") == ["model.safetensors", "state.json", "step-000004", "step-000006"]


# ---- bad input ---------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name, theirs", [("vocab_size", 12), ("block_size", 25), ("num_classes", 5), ("model_type", "t2i")])
def test_models_that_do_not_fit_each_other(name, theirs):
    ours = getattr(tiny().config, name)
    refused(lambda: trainer(teacher=tiny(1, **{name: theirs})), "student and teacher have different", f"{name} = {ours} and {theirs}", "one family")


CONFIGS = {
    "lmbda above 1": (dict(lmbda=1.5), "lmbda = 1.5", "[0, 1]"),
    "lmbda negative": (dict(lmbda=-0.1), "lmbda = -0.1", "[0, 1]"),
    "lmbda NaN": (dict(lmbda=math.nan), "lmbda = nan", "[0, 1]"),
    "beta above 1": (dict(beta=2.0), "beta = 2.0", "[0, 1]"),
    "class_dropout above 1": (dict(class_dropout=1.1), "class_dropout = 1.1", "[0, 1]"),
    "ema_decay negative": (dict(ema_decay=-1.0), "ema_decay = -1.0", "[0, 1]"),
    "no suffix": (dict(prefix=(0.25, 1.0)), "prefix = (0.25, 1.0)", "suffix is empty"),
    "prefix the wrong way round": (dict(prefix=(0.75, 0.25)), "prefix = (0.75, 0.25)", "low <= high"),
    "prefix negative": (dict(prefix=(-0.1, 0.5)), "prefix = (-0.1, 0.5)", "0 <= low"),
    "horizon 0": (dict(horizon=0.0), "horizon = 0.0", "suffix is empty"),
    "horizon above 1": (dict(horizon=1.5), "horizon = 1.5", "(0, 1]"),
    "horizon with a prefix for each image": (dict(horizon=0.5, prefix_per_image=True), "horizon", "prefix_per_image=False"),
    "divergence": (dict(divergence="kl"), "unknown divergence 'kl'", "forward_kl, reverse_kl"),
    "batch 0": (dict(batch=0), "batch = 0", "at least 1"),
    "micro_batch 0": (dict(micro_batch=0), "micro_batch = 0", "at least 1"),
    "save_steps 0": (dict(save_steps=0), "save_steps = 0", "at least 1"),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_configuration_that_cannot_be(name):
    fields, *phrases = CONFIGS[name]
    refused(lambda: config(**fields), *phrases)


def test_an_unknown_method():
    refused(lambda: recipe("gdk"), "unknown distillation method 'gdk'", "kd, seqkd, gkd, varkd")


def test_a_rollout_of_nothing():
    whole = Recorded(lambda model, condition, prefix, seed, images: backend()(model, condition, torch.zeros(4, T, dtype=torch.long), seed, images))
    refused(lambda: trainer(rollout=whole).step(0), "the suffix is empty")


def test_a_loss_that_is_not_finite_ends_the_run(tmp_path):
    """It names the step and the images, and neither weights nor checkpoints have seen it: with a sound teacher the run goes on as if nothing had been."""
    settings = config(save_steps=1, micro_batch=1, class_dropout=0.0)
    whole, teacher = course(saved(tmp_path / "whole", settings)), tiny(1, torch.float32)
    run = saved(tmp_path / "run", settings, teacher=teacher)
    going = run.run()
    assert [next(going)["step"] for _ in range(3)] == [1, 2, 3]
    condition = run.draw(3).condition_B.tolist()
    with torch.no_grad():
        teacher.cls_embedding.embedding_table.weight[condition[1]] = torch.nan
    before = copy.deepcopy(run.student.state_dict())
    named = ", ".join(str([i]) for i, c in enumerate(condition) if c == condition[1])
    assert 0 < named.count("[") < 4
    refused(lambda: next(going), "step 4: the loss is nan", f"images {named};", "checkpoint step-000003 is kept")
    assert all(torch.equal(x, before[name]) for name, x in run.student.state_dict().items()) and names(tmp_path / "run") == ["step-000002", "step-000003"]
    resumed = saved(tmp_path / "run", settings)
    assert resumed.done == 3
    assert_same(course(resumed), whole[3:])


@pytest.mark.parametrize("method", ["gkd", "kd"])
def test_a_learning_rate_that_blows_up(method):
    student = tiny(0, torch.float32)
    run = trainer(config(method, learning_rate=1e30), student=student, teacher=tiny(1, torch.float32))
    refused(lambda: course(run), "step 2:", "images [0, 1, 2, 3]", "lower learning_rate")
    assert run.done == 1 and all(p.isfinite().all() for p in student.parameters())


# ---- groups of codes ---------------------------------------------------------------------------------------------------------------------


def test_codebook_groups_of_tight_clusters():
    generator = torch.Generator().manual_seed(0)
    cluster = torch.randint(9, (200,), generator=generator)
    codebook = 5 * torch.randn(9, 6, generator=generator)[cluster] + 0.01 * torch.randn(200, 6, generator=generator)
    groups = codebook_groups(codebook, 9)
    assert torch.equal(groups[:, None] == groups, cluster[:, None] == cluster)
    assert torch.equal(groups, codebook_groups(codebook.clone(), 9))


@pytest.mark.parametrize("count", [1, 2, 25, 100])
def test_codebook_groups_are_numbered_without_gaps(count):
    codebook = torch.randn(100, 8, generator=torch.Generator().manual_seed(1)).bfloat16()
    groups = codebook_groups(codebook, count)
    assert groups.shape == (100,) and groups.dtype == torch.int64 and groups.unique().tolist() == list(range(int(groups.max()) + 1))
    assert int(groups.max()) + 1 == count, "distinct codes fill every group here"
    twice = codebook_groups(torch.cat([codebook[:10]] * 2), 20)
    assert torch.equal(twice[:10], twice[10:]) and twice.unique().tolist() == list(range(10)), "no more groups than distinct codes"
