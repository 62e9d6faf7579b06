"""Text-conditional LlamaGen: the official computation behind left padded captions, and the same rollouts as behind class ids."""
import math
import sys
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from test_bad_input import refused
from test_models import V, check, decode, generator, padded, plain_norm, plain_rotary, small_llamagen, turn

import hbsjd
from hbsjd import calibration
from hbsjd.bench import timed_rollout
from hbsjd.decoding.drafts import History
from hbsjd.decoding.execution import Compact, Full, Hybrid, Packed
from hbsjd.decoding.rules import Greedy, Gumbel
from hbsjd.decoding.schedules import Independent
from hbsjd.decoding.types import Method
from hbsjd.decoding.windows import Fixed
from hbsjd.models import cache, captions, huggingface
from hbsjd.models.captions import Captions
from hbsjd.models.guidance import Guided
from hbsjd.models.llamagen import LlamaGen, random_model
from hbsjd.models.vq import VQConfig, VQModel
from hbsjd.sample import sample_images

T, SLOTS, SIZE = 16, 6, 5
LENGTHS = (1, SLOTS, 3, 2, 5)
PREFIX = [torch.arange(n) % V for n in (0, 6, 13, 1, T)]


def t2i(dtype=torch.float64, **overrides) -> LlamaGen:
    return small_llamagen(dtype, **dict(block_size=T, model_type="t2i", cls_token_num=SLOTS, caption_dim=SIZE) | overrides)


def features(lengths=LENGTHS, seed: int = 0) -> list[torch.Tensor]:
    rng = generator(seed)
    return [torch.randn(n, SIZE, generator=rng, dtype=torch.float64) for n in lengths]


def prompts(lengths=LENGTHS, seed: int = 0) -> Captions:
    return captions.pad(features(lengths, seed), SLOTS)


def replaced(condition: Captions, rows, new: Captions) -> Captions:
    old = condition.features_BLC.clone(), condition.mask_BL.clone()
    for part, its in zip(old, (new.features_BLC, new.mask_BL)):
        part[rows] = its
    return Captions(*old)


# ---- the official computation, recomputed one image and head at a time with an explicit mask matrix ----------------------------------------


def plain_logits(model: LlamaGen, features_LC: torch.Tensor, mask_L: list[bool], tokens: list[int], null: bool = False) -> torch.Tensor:
    """[T, V] in float64 from the state dict alone; `null`: of the unconditional half."""
    w, c = {k: x.double() for k, x in model.state_dict().items()}, model.config
    n, D = c.cls_token_num, c.dim // c.n_head
    h = (w["cls_embedding.uncond_embedding"] if null else features_LC.double()) @ w["cls_embedding.cap_proj.fc1.weight"].T
    h = 0.5 * h * (1 + torch.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h**3)))
    x = torch.cat([h @ w["cls_embedding.cap_proj.fc2.weight"].T, w["tok_embeddings.weight"][tokens[:-1]]])
    table, hidden = plain_rotary(c)[: len(x)].double(), torch.zeros(len(x), len(x), dtype=torch.double)
    for query in range(len(x)):
        for key in range(len(x)):
            causal = key <= query
            if key < n:
                causal = causal and mask_L[key]
            if not causal and key != query:
                hidden[query, key] = -math.inf
    for i in range(c.n_layer):
        layer = {k.removeprefix(f"layers.{i}.").removesuffix(".weight"): v for k, v in w.items() if k.startswith(f"layers.{i}.")}
        q, k, v = (plain_norm(x, layer["attention_norm"]) @ layer["attention.wqkv"].T).split(c.dim, dim=-1)
        heads = []
        for head in (slice(h * D, h * D + D) for h in range(c.n_head)):
            scores = turn(q[:, head], table) @ turn(k[:, head], table).T / D**0.5 + hidden
            heads.append(scores.softmax(-1) @ v[:, head])
        x = x + torch.cat(heads, dim=-1) @ layer["attention.wo"].T
        y = plain_norm(x, layer["ffn_norm"])
        gate = y @ layer["feed_forward.w1"].T
        x = x + (gate * gate.sigmoid() * (y @ layer["feed_forward.w3"].T)) @ layer["feed_forward.w2"].T
    return (plain_norm(x, w["norm.weight"]) @ w["output.weight"].T)[n - 1 :]


def compare_with_plain(model, tolerance: float, scale: float = 3.0) -> None:
    condition, tokens = prompts(), torch.randint(V, (len(LENGTHS), T), generator=generator(0))
    logits, guided = model(condition, tokens), Guided(model, scale)(condition, tokens)
    for b in range(len(LENGTHS)):
        row = condition.features_BLC[b], condition.mask_BL[b].tolist(), tokens[b].tolist()
        given, null = plain_logits(model, *row), plain_logits(model, *row, null=True)
        assert (given - null).abs().max() > 0.1
        torch.testing.assert_close(logits[b].double(), given, atol=tolerance, rtol=0)
        torch.testing.assert_close(guided[b].double(), null + scale * (given - null), atol=3 * tolerance, rtol=0)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-4)])
def test_it_is_the_official_computation(dtype, tolerance):
    compare_with_plain(t2i(dtype), tolerance)


def without_padding(model: LlamaGen, n: int) -> LlamaGen:
    """The same model for captions of n tokens: a condition token's rotation is zero wherever it stands, so only the slots of padding are gone."""
    state = model.state_dict()
    state["cls_embedding.uncond_embedding"] = state["cls_embedding.uncond_embedding"][-n:]
    smaller = LlamaGen(replace(model.config, cls_token_num=n)).to(state["output.weight"].dtype)
    smaller.load_state_dict(state)
    return smaller.eval()


def compare_with_unpadded(model, tolerance: float, scale: float) -> None:
    tokens = torch.randint(V, (len(LENGTHS), T), generator=generator(0))
    logits = Guided(model, scale)(prompts(), tokens)
    for b, caption in enumerate(features()):
        alone = Guided(without_padding(model, len(caption)), scale)
        torch.testing.assert_close(logits[[b]], alone(captions.pad([caption], len(caption)), tokens[[b]]), atol=tolerance, rtol=0)


@pytest.mark.parametrize("scale", [1.0, 2.0])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-4)])
def test_logits_of_a_batch_are_those_of_unpadded_captions(dtype, tolerance, scale):
    compare_with_unpadded(t2i(dtype), tolerance, scale)


@pytest.mark.parametrize("guidance", [1.0, 2.0])
@pytest.mark.parametrize("method", ["ar_greedy", "ar", "hbsjd", "hbsjd_gumbel"])
def test_rollouts_of_a_batch_are_those_of_unpadded_captions(method, guidance):
    model = t2i()
    together = hbsjd.rollout(model, prompts(), PREFIX, method, guidance=guidance, seed=7)
    for b, caption in enumerate(features()):
        n = len(caption)
        alone = hbsjd.rollout(without_padding(model, n), captions.pad([caption], n), [PREFIX[b]], method, guidance=guidance, seed=7, images=[b])
        assert torch.equal(together.tokens[b], alone.tokens[0])


def test_what_stands_under_the_mask_does_not_matter():
    model, condition, tokens = t2i(), prompts(), torch.randint(V, (len(LENGTHS), T), generator=generator(0))
    dirty = 100 * torch.randn(condition.features_BLC.shape, generator=generator(1), dtype=torch.float64)
    other = replace(condition, features_BLC=condition.features_BLC.where(condition.mask_BL[..., None], dirty))
    assert torch.equal(model(condition, tokens), model(other, tokens))
    a, b = (hbsjd.rollout(model, some, PREFIX, guidance=2.0, logprobs=True) for some in (condition, other))
    assert torch.equal(a.tokens, b.tokens) and torch.equal(a.logprobs, b.logprobs)
    unlike = model(condition, tokens) != model(prompts(seed=1), tokens)
    assert unlike.any(-1).all(), "what stands above it does"


# ---- cached decoding against teacher forcing -----------------------------------------------------------------------------------------------

CASES = {
    "fp32": (lambda: t2i(torch.float32), 1e-4),
    "fp64": (lambda: t2i(torch.float64), 1e-9),
    "guided-fp32": (lambda: Guided(t2i(torch.float32), 2.0), 1e-4),
    "guided-fp64": (lambda: Guided(t2i(torch.float64), 2.0), 1e-9),
}


def scene(name: str) -> SimpleNamespace:
    """A model, its tolerance, and five images: captions of every length, tokens, ragged starts from none to full."""
    build, tolerance = CASES[name]
    return SimpleNamespace(
        model=build(), tolerance=tolerance, rng=generator(3), length=T, condition=prompts(), start=torch.tensor([0, 1, T // 2, T - 1, T]),
        tokens=torch.randint(V, (len(LENGTHS), T), generator=generator(4)),
    )  # fmt: skip


@pytest.fixture(params=CASES)
def case(request):
    return scene(request.param)


def compare_cached(case, width: int, rows: str = "all", start=None) -> None:
    start = case.start if start is None else start
    filled = case.model.prefill(case.condition, padded(case.tokens, start), start, T + width + 1)
    check(case, decode(case, filled, case.tokens, start, width, rows), case.condition, case.tokens, start)


@pytest.mark.parametrize("rows", ["all", "index"])
@pytest.mark.parametrize("width", [0, 3, 20])
def test_cached_logits_are_the_teacher_forced_ones(case, width, rows):
    compare_cached(case, width, rows)


def test_no_prefix_at_all(case):
    compare_cached(case, 3, start=torch.zeros_like(case.start))


@pytest.mark.parametrize("rows", [slice(1, 3), torch.tensor([3, 0])], ids=["slice", "index"])
def test_second_prefill_into_rows_of_a_live_cache(case, rows):
    """New captions take over finished rows; the others keep theirs."""
    filled = case.model.prefill(case.condition, padded(case.tokens, case.start), case.start, T + 4)
    decode(case, filled, case.tokens, case.start, 3)
    new = prompts((4, 1), seed=9)
    tokens, start, condition = case.tokens.clone(), torch.full_like(case.start, T // 2), replaced(case.condition, rows, new)
    tokens[rows] = torch.randint(V, tokens[rows].shape, generator=case.rng)
    start[rows] = torch.tensor([0, T - 1])
    case.model.prefill(new, padded(tokens[rows], start[rows]), start[rows], T + 4, filled, rows)
    check(case, decode(case, filled, tokens, start, 3, "index"), condition, tokens, start)


def compare_moved(case, to, of) -> None:
    filled = case.model.prefill(case.condition, padded(case.tokens, case.start), case.start, T + 4)
    decode(case, filled, case.tokens, case.start, 3)
    filled.move(to, of, 3)
    tokens, condition = case.tokens.clone(), replaced(case.condition, to, case.condition[of])
    tokens[to] = case.tokens[of]
    start = torch.full_like(case.start, 3)
    check(case, decode(case, filled, tokens, start, 3), condition, tokens, start)


@pytest.mark.parametrize(("to", "of"), [(torch.tensor([0, 1]), torch.tensor([3, 0])), (slice(0, 3), slice(1, 4))], ids=["index", "overlapping-slices"])
def test_moved_rows_take_their_captions_along(case, to, of):
    compare_moved(case, to, of)


def test_expanded_rows_share_a_caption_and_go_their_own_ways(case):
    rows, group = torch.tensor([1, 0, 2]), torch.arange(3).repeat_interleave(3)
    start = case.start[rows]
    filled = case.model.prefill(case.condition[rows], padded(case.tokens[rows], start), start, T + 4)
    filled.expand(3)
    tokens, starts = case.tokens[rows][group], start[group]
    tokens = tokens.where(torch.arange(T) < starts[:, None], torch.randint(V, tokens.shape, generator=case.rng))
    check(case, decode(case, filled, tokens, starts, 3, "index"), case.condition[rows][group], tokens, starts)


def test_bf16_gives_finite_logits_from_float32_captions():
    model, condition = t2i(torch.bfloat16), prompts()
    condition = replace(condition, features_BLC=condition.features_BLC.float())
    out = hbsjd.rollout(model, condition, PREFIX, guidance=2.0, logprobs=True)
    assert out.logprobs.isfinite().all() and model(condition, out.tokens).dtype == torch.bfloat16


# ---- mistakes, made on purpose: the comparisons above must notice ---------------------------------------------------------------------------


def mask_nowhere(put):
    exact = cache.visible
    put(cache, "visible", lambda slots_RL, live, caption_mask_RC: exact(slots_RL, live, None))


def no_mask_in_cached_rounds(put):
    exact = cache.Cache.open

    def open_unmasked(self, rows, positions_RL):
        kept, self.caption_mask = self.caption_mask, None
        round_ = exact(self, rows, positions_RL)
        self.caption_mask = kept
        return round_

    put(cache.Cache, "open", open_unmasked)


def no_mask_in_prefill(put):
    exact = cache.Cache.fill
    put(cache.Cache, "fill", lambda self, rows: replace(exact(self, rows), caption_mask_RC=None))


def masks_left_behind(put):
    exact = cache.Cache.move

    def move(self, dst_rows, src_rows, upto):
        kept = self.caption_mask.clone()
        exact(self, dst_rows, src_rows, upto)
        self.caption_mask = kept

    put(cache.Cache, "move", move)


def null_half_sees_everything(put):
    exact = Captions.with_null

    def with_null(self):
        twice = exact(self)
        return replace(twice, mask_BL=twice.mask_BL | twice.null_B[:, None])

    put(Captions, "with_null", with_null)


@pytest.mark.parametrize(
    ("bug", "comparison"),
    [
        (mask_nowhere, lambda: compare_with_plain(t2i(), 1e-9)),
        (mask_nowhere, lambda: compare_with_unpadded(t2i(), 1e-9, 1.0)),
        (no_mask_in_cached_rounds, lambda: compare_cached(scene("fp64"), 3)),
        (no_mask_in_prefill, lambda: compare_cached(scene("fp64"), 3)),
        (masks_left_behind, lambda: compare_moved(scene("fp64"), torch.tensor([0, 1]), torch.tensor([3, 0]))),
        (null_half_sees_everything, lambda: compare_with_plain(t2i(), 1e-9)),
    ],
    ids=lambda part: getattr(part, "__name__", "").strip("<>"),
)
def test_planted_mistakes_are_noticed(monkeypatch, bug, comparison):
    comparison()
    bug(monkeypatch.setattr)
    with pytest.raises(AssertionError):
        comparison()


# ---- rollouts -------------------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def autoregressive():
    model = t2i()
    return {
        (rule, guidance): hbsjd.rollout(model, prompts(), PREFIX, rule, guidance=guidance, seed=7, logprobs=True)
        for rule in ("ar", "ar_greedy") for guidance in (1.0, 2.0)
    }  # fmt: skip


@pytest.mark.parametrize("slots", [5, 2, 1])
@pytest.mark.parametrize("execution", [Full(), Compact(), Hybrid(0.6), Packed()], ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("rule", [Greedy(), Gumbel()], ids=lambda r: type(r).__name__)
def test_every_method_is_autoregressive_decoding(autoregressive, rule, execution, slots):
    model = t2i()
    for W, guidance in ((1, 2.0), (4, 1.0), (16, 2.0)):
        method = Method(rule, History(4), Independent(), execution, Fixed(W))
        got = hbsjd.rollout(model, prompts(), PREFIX, method, guidance=guidance, seed=7, slots=slots, logprobs=True)
        want = autoregressive["ar" if rule == Gumbel() else "ar_greedy", guidance]
        assert torch.equal(got.tokens, want.tokens), (W, guidance)
        torch.testing.assert_close(got.logprobs, want.logprobs, atol=1e-9, rtol=0)
        assert got.prefills > 1 or slots == 5


def test_captions_make_the_image(autoregressive):
    other = hbsjd.rollout(t2i(), prompts(seed=1), PREFIX, "ar", guidance=2.0, seed=7)
    differ = (other.tokens != autoregressive["ar", 2.0].tokens).any(1)
    assert differ[: len(LENGTHS) - 1].all(), "the last one is all prefix"


@pytest.mark.parametrize("guidance", [1.0, 2.0])
def test_logprobs_are_the_teacher_forced_ones(autoregressive, guidance):
    out, model = autoregressive["ar", guidance], Guided(t2i(), guidance)
    expected = model(prompts(), out.tokens).log_softmax(-1).gather(-1, out.tokens[..., None])[..., 0]
    expected = expected.where(torch.arange(T) >= out.start[:, None], 0.0)
    torch.testing.assert_close(out.logprobs, expected, atol=1e-9, rtol=0)


@pytest.mark.parametrize("method", ["hbsjd_gumbel", "hbsjd_probabilistic", "hbsjd_maximal"])
def test_an_image_does_not_depend_on_its_batch(method):
    model, images, order = t2i(), torch.tensor([5, 2**40, 0, -3, 11]), torch.tensor([3, 0, 4, 2, 1])
    want = hbsjd.rollout(model, prompts(), PREFIX, method, images=images)
    got = hbsjd.rollout(model, prompts()[order], [PREFIX[i] for i in order], method, images=images[order], slots=3)
    assert torch.equal(got.tokens, want.tokens[order])


def test_a_null_caption_is_the_unconditional_half():
    """As the null class is for class ids: whatever its features, and guidance changes nothing."""
    null = replace(prompts(), null_B=torch.ones(len(LENGTHS), dtype=torch.bool))
    want = hbsjd.rollout(t2i(), null, method="ar")
    got = hbsjd.rollout(t2i(), replace(null, features_BLC=torch.ones_like(null.features_BLC)), guidance=3.0)
    assert torch.equal(got.tokens, want.tokens)


@pytest.mark.parametrize("guidance", [1.0, 2.0])
def test_the_adaptive_window_is_measured_with_captions_of_noise(guidance, tmp_path, monkeypatch):
    monkeypatch.setenv("HBSJD_CACHE", str(tmp_path))
    calibration.known.clear()
    model = t2i()
    want = hbsjd.rollout(model, prompts(), PREFIX, "ar", guidance=guidance)
    got = hbsjd.rollout(model, prompts(), PREFIX, "hbsjd_adaptive", guidance=guidance, slots=3)
    assert torch.equal(got.tokens, want.tokens) and len(list(tmp_path.glob("calibration-*.json"))) == 1


def test_a_timed_model_takes_captions():
    """A wrapper that has no more than prefill, step and config works under guidance."""
    out, figures = timed_rollout(t2i(), prompts(), PREFIX, "hbsjd_gumbel", guidance=2.0)
    assert torch.equal(out.tokens, hbsjd.rollout(t2i(), prompts(), PREFIX, guidance=2.0).tokens) and figures["seconds"] > 0


def test_images_of_captions_are_kept_and_gone_on_with(tmp_path):
    model, tokenizer = t2i(torch.float32), VQModel(VQConfig(ch=32, ch_mult=(1, 1), num_res_blocks=1, z_channels=32, codebook_size=V)).eval()
    made = [sample_images(model, tokenizer, prompts(), tmp_path / "a", "hbsjd", batch=n) for n in (2, 5)]
    assert made[0] == made[1] and made[0].images == len(LENGTHS)
    refused(lambda: sample_images(model, tokenizer, prompts(seed=1), tmp_path / "a", "hbsjd"), "another captions")


# ---- the model's size -------------------------------------------------------------------------------------------------------------------------


def test_a_new_model_has_the_official_start():
    model = random_model("tiny", model_type="t2i", cls_token_num=120)
    learned = model.cls_embedding.uncond_embedding
    assert abs(learned.std() * 2048**0.5 - 1) < 0.01 and not learned.requires_grad
    assert all(0.019 < fc.weight.std() < 0.021 for fc in (model.cls_embedding.cap_proj.fc1, model.cls_embedding.cap_proj.fc2))


def test_gradients_flow_to_the_projection():
    model = t2i()
    model(prompts(), torch.zeros(len(LENGTHS), T, dtype=torch.long)).log_softmax(-1)[..., 0].sum().backward()
    assert all(p.grad.isfinite().all() and p.grad.any() for p in model.cls_embedding.parameters())


# ---- captions -----------------------------------------------------------------------------------------------------------------------------


def test_captions_behave_like_a_batch():
    condition = prompts()
    assert len(condition) == 5 and condition.device.type == "cpu" and condition.to("cpu").mask_BL.sum(1).tolist() == list(LENGTHS)
    assert condition[1:3].mask_BL.sum(1).tolist() == [SLOTS, 3] and condition[torch.tensor([4, 0])].mask_BL.sum(1).tolist() == [5, 1]
    assert condition.features_BLC[~condition.mask_BL].eq(0).all() and torch.equal(condition.features_BLC[2, -3:], features()[2])
    twice = condition[1:3].with_null()
    assert twice.mask_BL.sum(1).tolist() == [SLOTS, SLOTS, 3, 3] and twice.null_B.tolist() == [False, True, False, True]
    assert captions.pad([np.ones((2, 3), dtype=np.float32)]).features_BLC.shape == (1, 120, 3)


def test_captions_are_read_as_they_were_written(tmp_path):
    np.savez(tmp_path / "some.npz", features=prompts().features_BLC, mask=prompts().mask_BL)
    np.savez(tmp_path / "numbers.npz", features=prompts().features_BLC, mask=prompts().mask_BL.long())
    for name in ("some.npz", "numbers.npz"):
        got = captions.read(tmp_path / name)
        assert torch.equal(got.features_BLC, prompts().features_BLC) and torch.equal(got.mask_BL, prompts().mask_BL)


def test_files_that_are_no_captions(tmp_path):
    refused(lambda: captions.read(tmp_path / "none.npz"), "none.npz", "features", "mask")
    np.savez(tmp_path / "other.npz", codes=np.zeros(3))
    np.save(tmp_path / "array.npy", np.zeros((1, 2, 3)))
    np.savez(tmp_path / "pickle.npz", features=np.array([{}], dtype=object), mask=np.zeros(1))
    (tmp_path / "empty.npz").write_bytes(b"")
    np.savez(tmp_path / "cut.npz", features=np.zeros((1, 2, 3)), mask=np.ones((1, 2)))
    (tmp_path / "cut.npz").write_bytes((tmp_path / "cut.npz").read_bytes()[:-40])
    for path in sorted(tmp_path.iterdir()):
        refused(partial(captions.read, path), path.name, "features", "mask")


NAN, INFINITE = prompts().features_BLC.clone(), prompts().features_BLC.clone()
NAN[2, -1, 0], INFINITE[0, 0, 0] = torch.nan, torch.inf
CONDITIONS = {  # condition, phrases of the message
    "class ids": (torch.tensor([0, 1]), "captions", "t5_features"),
    "None": (None, "captions", "t5_features"),
    "too few slots": (captions.pad(features((1, 2)), SLOTS - 1), f"{SLOTS} slots x {SIZE}", f"{SLOTS - 1} x {SIZE}"),
    "too many slots": (captions.pad(features((1, 2)), SLOTS + 1), f"{SLOTS} slots x {SIZE}", f"{SLOTS + 1} x {SIZE}"),
    "another feature size": (captions.pad([torch.zeros(2, SIZE + 1)], SLOTS), f"{SLOTS} slots x {SIZE}", f"{SLOTS} x {SIZE + 1}"),
    "NaN": (Captions(NAN, prompts().mask_BL), "caption 2", "NaN or infinite"),
    "infinite under the mask": (Captions(INFINITE, prompts().mask_BL), "caption 0", "NaN or infinite"),
    "empty": (prompts()[:0], "at least one caption"),
    "no token": (Captions(prompts().features_BLC, prompts().mask_BL & (torch.arange(5) != 3)[:, None]), "caption 3", "no token"),
    "right padded": (Captions(prompts().features_BLC, prompts().mask_BL.flip(1)), "caption 0", "left padded", "pad"),
    "a hole": (Captions(torch.zeros(1, SLOTS, SIZE), torch.arange(SLOTS)[None] % 2 == 1), "caption 0", "left padded"),
}


@pytest.mark.parametrize("name", CONDITIONS)
def test_conditions_refused_with_one_clear_line(name):
    condition, *phrases = CONDITIONS[name]
    refused(lambda: hbsjd.rollout(t2i(), condition), *phrases)


def test_a_class_conditional_model_takes_no_captions():
    refused(lambda: hbsjd.rollout(small_llamagen(), prompts()), "class ids", "captions", "t2i")


def test_other_arguments_are_checked_as_ever():
    refused(lambda: hbsjd.rollout(t2i(), prompts(), images=[0, 1]), "images", "5 integer ids")
    refused(lambda: hbsjd.rollout(t2i(), prompts(), [[0]]), "prefix holds 1 rows", "5 conditions")


@pytest.mark.parametrize(("make", "phrases"), [
    (lambda: captions.pad([torch.zeros(3, 4), torch.zeros(121, 4)]), ("caption 1", "121 tokens", "120", "shorten")),
    (lambda: captions.pad([torch.zeros(0, 4)]), ("caption 0", "no token")),
    (lambda: captions.pad([torch.zeros(4)]), ("caption 0", "[tokens, features")),
    (lambda: captions.pad([]), ("at least one caption",)),
    (lambda: captions.pad([torch.zeros(3, 4), torch.zeros(3, 5)]), ("one feature size", "[4, 5]")),
    (lambda: Captions(torch.zeros(2, 3), torch.ones(2, dtype=torch.bool)), ("features", "float tensor", "[2, 3]")),
    (lambda: Captions(torch.zeros(2, 3, 4).long(), torch.ones(2, 3).bool()), ("features", "float tensor", "int64")),
    (lambda: Captions(np.zeros((2, 3, 4)), torch.ones(2, 3).bool()), ("features", "float tensor", "ndarray")),
    (lambda: Captions(torch.zeros(2, 3, 4), torch.ones(2, 3)), ("mask", "bool tensor [2, 3]", "float32")),
    (lambda: Captions(torch.zeros(2, 3, 4), torch.ones(3, 2).bool()), ("mask", "bool tensor [2, 3]", "[3, 2]")),
])  # fmt: skip
def test_captions_that_cannot_be(make, phrases):
    refused(make, *phrases)


# ---- T5 -------------------------------------------------------------------------------------------------------------------------------------

WORDS = ("red", "cat", "on", "a", "mat")
TEXTS = ["a red cat on a mat", "cat", ""]


@pytest.fixture(scope="module")
def t5(tmp_path_factory):
    """The folder of a T5 with random weights that knows five words."""
    from transformers import T5Config, T5EncoderModel, T5Tokenizer

    folder = tmp_path_factory.mktemp("t5")
    vocab = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), *((f"▁{word}", -1.0) for word in WORDS)]
    T5Tokenizer(vocab=vocab, extra_ids=0).save_pretrained(folder)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        T5EncoderModel(T5Config(vocab_size=len(vocab), d_model=16, d_kv=4, d_ff=32, num_layers=2, num_heads=4)).save_pretrained(folder)
    return folder


def test_features_of_a_text_are_those_of_the_encoder(t5):
    from transformers import T5EncoderModel

    got = huggingface.t5_features(TEXTS, str(t5), device="cpu")
    assert got.features_BLC.shape == (3, 120, 16) and got.features_BLC.dtype == torch.float32 and got.mask_BL.sum(1).tolist() == [7, 2, 1]
    assert got.features_BLC[~got.mask_BL].eq(0).all() and not got.features_BLC.requires_grad
    ids = [[WORDS.index(word) + 3 for word in text.split()] + [1] for text in TEXTS]
    encoder = T5EncoderModel.from_pretrained(t5).eval()
    for b, sequence in enumerate(ids):
        expected = encoder(input_ids=torch.tensor([sequence])).last_hidden_state[0]
        torch.testing.assert_close(got.features_BLC[b, -len(sequence) :], expected, atol=1e-5, rtol=0)
    out = hbsjd.rollout(random_model("tiny", vocab_size=V, block_size=T, model_type="t2i", cls_token_num=120, caption_dim=16), got, guidance=2.0)
    assert out.tokens.shape == (3, T)


def test_many_texts_are_encoded_some_at_a_time(t5, monkeypatch):
    at_once = huggingface.t5_features(TEXTS, str(t5), device="cpu")
    monkeypatch.setattr(huggingface, "AT_ONCE", 2)
    got = huggingface.t5_features(TEXTS, str(t5), device="cpu")
    torch.testing.assert_close(got.features_BLC, at_once.features_BLC, atol=1e-5, rtol=0)


def test_texts_that_cannot_be_encoded(t5):
    refused(lambda: huggingface.t5_features(["cat", "a cat " * 60], str(t5), device="cpu"), "caption 1", "121 tokens", "120", "a cat a cat")
    refused(lambda: huggingface.t5_features(["a cat"], str(t5), length=2, device="cpu"), "caption 0", "3 tokens", "takes 2")
    refused(lambda: huggingface.t5_features("a cat", str(t5), device="cpu"), "list of captions", "['a cat']")
    refused(lambda: huggingface.t5_features([], str(t5), device="cpu"), "at least one caption")


def test_a_t5_that_cannot_be_had(tmp_path, monkeypatch):
    import transformers

    def unreachable(name, **_):
        raise OSError("We couldn't connect to the hub\nand more lines")

    refused(lambda: huggingface.t5_features(["a cat"], str(tmp_path)), "no T5", tmp_path.name)
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", unreachable)
    refused(lambda: huggingface.t5_features(["a cat"]), "no T5", "google/flan-t5-xl", "HF_HOME", "HF_HUB_OFFLINE", "captions.read")


def test_without_transformers(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    refused(lambda: huggingface.t5_features(["a cat"]), "package transformers", "captions.read")
