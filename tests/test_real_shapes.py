"""The shapes of the official models with random weights: size B, T = 576 tokens of 16384 codes, guidance 2; VQ-16 at 384 pixels."""
from dataclasses import replace

import pytest
import torch
from equality import assert_same

import hbsjd
from hbsjd.agreement import first_difference
from hbsjd.bench import peak_mb
from hbsjd.models import captions, vq
from hbsjd.models.guidance import Guided
from hbsjd.models.llamagen import LlamaGen, random_model

T, V, SLOTS = 576, 16384, 120
LENGTHS = (7, 83)  # of the two captions
TYPES = {"c2i": {}, "t2i": dict(model_type="t2i", cls_token_num=SLOTS)}
PRECISION = {"fp32": (torch.float32, 1e-4, {}), "fp64": (torch.float64, 1e-9, dict(n_layer=2))}  # fewer layers in float64

START = (280, 559)  # the prefixes of two rows
ROUNDS = [(17, (0, 100)), (1, (280, 559)), (17, (280, 559)), (1, (297, 575)), (1, (296, 0))]  # inputs, and where each row's first prediction stands


def build(kind: str, precision: str) -> Guided:
    dtype, _, depth = PRECISION[precision]
    model = random_model("b", **TYPES[kind], **depth).to(dtype)
    model.output.weight.data *= 0.3  # so that guided logits have a standard deviation of 3 to 6
    assert (model.config.dim, model.config.n_head, model.config.vocab_size, model.config.block_size) == (768, 12, V, T)
    return Guided(model, 2.0)


def features() -> list[torch.Tensor]:
    return [torch.randn(n, 2048, generator=torch.Generator().manual_seed(n)) for n in LENGTHS]


def conditions(kind: str):
    return torch.tensor([207, 360]) if kind == "c2i" else captions.pad(features(), SLOTS)


def random_tokens() -> torch.Tensor:
    return torch.randint(V, (2, T), generator=torch.Generator().manual_seed(0))


def compared() -> list[tuple[int, int, int, int]]:
    """(round, row, place in it, position) of the first and the last prediction of every round."""
    return [
        (i, row, place, cursor + place) for i, (L, cursors) in enumerate(ROUNDS) for row, cursor in enumerate(cursors) for place in {0, L - 1}
    ]  # fmt: skip


def whole(model: Guided, condition, tokens_BT) -> torch.Tensor:
    """Teacher-forced logits [B, T, V], NaN but for the positions that are compared: the output head runs at those only."""
    positions = sorted({position for *_, position in compared()})
    hook = model.model.output.register_forward_pre_hook(lambda head, inputs: inputs[0][:, positions])
    logits = model(condition, tokens_BT)
    hook.remove()
    return logits.new_full((len(tokens_BT), T, V), torch.nan).index_copy_(1, torch.tensor(positions), logits)


def cached(model: Guided, condition, tokens_BT) -> list[torch.Tensor]:
    """Logits [2, L, V] of every round, from a cache with two prefixes of different lengths; what stands behind the shorter one is stale."""
    start = torch.tensor(START)
    prefix = tokens_BT[:, : max(START)] * (torch.arange(max(START)) < start[:, None])
    filled = model.prefill(condition, prefix, start, T + 17)
    inputs = torch.cat([torch.zeros(2, 1, dtype=torch.long), tokens_BT], dim=1)  # column p + 1 holds position p
    columns = [torch.tensor(cursors)[:, None] + torch.arange(L) for L, cursors in ROUNDS]
    return [model.step(inputs.gather(1, some), some - 1, filled, slice(0, 2)) for some in columns]


def without_padding(model: Guided, n: int) -> Guided:
    """The same model for captions of n tokens: rotations of condition tokens are zero, so only the slots of padding are gone."""
    bare = model.model
    state = bare.state_dict()
    state["cls_embedding.uncond_embedding"] = state["cls_embedding.uncond_embedding"][-n:]
    with torch.device("meta"):
        smaller = LlamaGen(replace(bare.config, cls_token_num=n))
    smaller.load_state_dict(state, assign=True)
    smaller.rotary = bare.rotary[SLOTS - n :]
    return Guided(smaller.eval(), model.scale)


@torch.no_grad()
@pytest.mark.parametrize("precision", PRECISION)
@pytest.mark.parametrize("kind", TYPES)
def test_cached_ragged_logits_are_the_teacher_forced_ones(kind, precision):
    """For t2i, each caption's are also those of its own unpadded batch of one."""
    model, tolerance = build(kind, precision), PRECISION[precision][1]
    tokens = random_tokens()
    rounds, expected = cached(model, conditions(kind), tokens), [whole(model, conditions(kind), tokens)]
    if kind == "t2i":
        alone = [whole(without_padding(model, n), captions.pad([caption], n), tokens[[row]]) for row, (n, caption) in enumerate(zip(LENGTHS, features()))]
        expected.append(torch.cat(alone))
    for i, row, place, position in compared():
        for logits in expected:
            assert logits[row, position].std() > 1, "a head of zeros would agree with anything"
            torch.testing.assert_close(rounds[i][row, place], logits[row, position], atol=tolerance, rtol=0)


@pytest.fixture(scope="module")
def model():
    return random_model("b")


@pytest.mark.slow
@pytest.mark.parametrize(("method", "baseline"), [("hbsjd", "ar_greedy"), ("hbsjd_gumbel", "ar")])
def test_a_full_rollout_is_autoregressive_decoding(model, method, baseline, capsys):
    condition = torch.tensor([207, 360])
    want, got = (hbsjd.rollout(model, condition, method=name, guidance=2.0, seed=7) for name in (baseline, method))
    assert got.tokens.shape == (2, T) and want.nfe == T
    assert_same(Guided(model, 2.0), condition, got, want, seed=7)
    near = [first_difference(Guided(model, 2.0), condition[b], got.tokens[b], want.tokens[b], b, 7, want.policy.mode) for b in range(2)]
    with capsys.disabled():
        print(f"\n{method} against {baseline}: {got.nfe} forwards, first difference and its distance from a tie {near}, peak {peak_mb('cpu')} MB so far")


@pytest.mark.slow
@torch.no_grad()
def test_vq16_decodes_random_codes(capsys):
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        tokenizer = vq.VQModel(vq.CONFIGS["vq-16"]).eval()
    images = tokenizer.decode(random_tokens())
    assert images.shape == (2, 3, 384, 384) and images.isfinite().all() and images.std() > 0
    with capsys.disabled():
        print(f"\nVQ-16, 2 x {T} codes to {tuple(images.shape)}: peak {peak_mb('cpu')} MB so far")
