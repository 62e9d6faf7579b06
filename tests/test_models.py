"""The models compute what the official code computes, and cached decoding sees what a teacher-forced pass sees."""
import json
from itertools import product
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from test_bad_input import refused

import hbsjd.models.checkpoints as checkpoints
from hbsjd.models import vq
from hbsjd.models.cache import Cache
from hbsjd.models.checkpoints import load_model, read_weights, write_weights
from hbsjd.models.guidance import Guided
from hbsjd.models.llamagen import SIZES, Config, LlamaGen, RMSNorm, random_model, rotary_table, rotate
from hbsjd.models.toy import Tabular

T, V, CLASSES = 16, 11, 3


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def small_llamagen(dtype=torch.float64, **overrides) -> LlamaGen:
    """Weights so large that attention is far from uniform and every norm weight matters: an error anywhere moves the logits."""
    model = random_model(**dict(dim=40, n_head=2, vocab_size=V, block_size=T, num_classes=CLASSES) | overrides).to(dtype)
    rng = generator(1)
    for name, weight in model.named_parameters():
        spread = weight.shape[-1] ** -0.5 * (2 if "wqkv" in name else 1)
        weight.data = (1 + 0.3 * torch.randn(weight.shape, generator=rng) if weight.ndim == 1 else spread * torch.randn(weight.shape, generator=rng)).to(dtype)
    return model


# ---- LlamaGen, recomputed one image, head and query at a time ----------------------------------------------------------------------------


def plain_rotary(config) -> torch.Tensor:
    """(cos, sin) of every slot and pair, float32: nothing for the condition; then angle = row / base^.. for one half of the pairs, column for the other."""
    side, pairs = int(config.block_size**0.5), config.dim // config.n_head // 2
    powers = torch.arange(0, pairs, 2).float() / pairs
    per_axis = 1.0 / config.rope_base**powers
    table = [torch.zeros(pairs, 2)] * config.cls_token_num
    for row, column in product(range(side), repeat=2):
        angles = torch.cat([row * per_axis, column * per_axis])
        table.append(torch.stack([torch.cos(angles), torch.sin(angles)], dim=-1))
    return torch.stack(table)


def turn(x_LD: torch.Tensor, table_LP2: torch.Tensor) -> torch.Tensor:
    """Rotate the pairs (x0, x1), (x2, x3), ... of each row."""
    cos, sin = table_LP2.unbind(-1)
    even, odd = x_LD[:, 0::2], x_LD[:, 1::2]
    out = torch.empty_like(x_LD)
    out[:, 0::2], out[:, 1::2] = even * cos - odd * sin, even * sin + odd * cos
    return out


def plain_norm(x, weight, eps=1e-5):
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def plain_logits(model: LlamaGen, class_id: int, tokens: list[int]) -> torch.Tensor:
    """[T, V] in float64 from the state dict alone."""
    w, c = {k: x.double() for k, x in model.state_dict().items()}, model.config
    x = torch.stack([w["cls_embedding.embedding_table.weight"][class_id], *(w["tok_embeddings.weight"][t] for t in tokens[:-1])])
    table, D = plain_rotary(c)[: len(x)].double(), c.dim // c.n_head
    for i in range(c.n_layer):
        layer = {k.removeprefix(f"layers.{i}.").removesuffix(".weight"): v for k, v in w.items() if k.startswith(f"layers.{i}.")}
        q, k, v = (plain_norm(x, layer["attention_norm"]) @ layer["attention.wqkv"].T).split(c.dim, dim=-1)
        heads = []
        for head in (slice(h * D, h * D + D) for h in range(c.n_head)):
            qs, ks = turn(q[:, head], table), turn(k[:, head], table)
            heads.append(torch.stack([(ks[: t + 1] @ qs[t] / D**0.5).softmax(0) @ v[: t + 1, head] for t in range(len(x))]))
        x = x + torch.cat(heads, dim=-1) @ layer["attention.wo"].T
        y = plain_norm(x, layer["ffn_norm"])
        gate = y @ layer["feed_forward.w1"].T
        x = x + (gate * gate.sigmoid() * (y @ layer["feed_forward.w3"].T)) @ layer["feed_forward.w2"].T
    return plain_norm(x, w["norm.weight"]) @ w["output.weight"].T


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-4)])
@pytest.mark.parametrize("shape", [dict(), dict(dim=48, n_head=1, n_layer=1), dict(dim=96, n_head=3, rope_base=100.0)], ids=str)
def test_llamagen_is_the_official_computation(dtype, tolerance, shape):
    model = small_llamagen(dtype, **shape)
    tokens = torch.randint(V, (2, T), generator=generator(0))
    logits = model(torch.tensor([1, CLASSES]), tokens)
    for b, class_id in enumerate([1, CLASSES]):
        torch.testing.assert_close(logits[b].double(), plain_logits(model, class_id, tokens[b].tolist()), atol=tolerance, rtol=0)


@pytest.mark.parametrize("block_size", [256, 576])
@pytest.mark.parametrize("size", ["b", "3b"])
def test_rotary_table_is_the_official_one_bit_for_bit(size, block_size):
    config = Config(**SIZES[size], block_size=block_size)
    assert torch.equal(torch.view_as_real(rotary_table(config)), plain_rotary(config))


def test_rotation_and_norm_round_once_from_float32():
    x = torch.randn(1, 3, 2, 8, generator=generator(0)).bfloat16()
    table = torch.polar(torch.ones(3, 1, 4), torch.randn(3, 1, 4, generator=generator(1)))
    expected = torch.stack([turn(x[0, :, n].float(), torch.view_as_real(table)[:, 0]) for n in range(2)], dim=1)
    assert torch.equal(rotate(x, table)[0], expected.bfloat16())
    norm = RMSNorm(8, 1e-5).bfloat16()
    norm.weight.data = torch.randn(8, generator=generator(2)).bfloat16()
    assert torch.equal(norm(x), plain_norm(x.float(), 1).bfloat16() * norm.weight), "rounded, then scaled: the official order"


def test_rotary_stays_float32_when_the_weights_do_not():
    model = small_llamagen(torch.bfloat16)
    assert model.rotary.dtype == torch.complex64 and not list(model.buffers())


def test_condition_token_is_attended_with_logit_zero():
    table = rotary_table(Config(**SIZES["tiny"], cls_token_num=3))
    assert table.shape[0] == 3 + 576 and not table[:3].abs().any() and table[3:].abs().sub(1).abs().max() < 1e-6


def test_new_model_has_a_zero_head_and_untied_embeddings():
    model = LlamaGen(Config(**SIZES["tiny"], vocab_size=V))
    assert not model.output.weight.any() and 0.01 < model.tok_embeddings.weight.std() < 0.03
    assert model.output.weight.data_ptr() != model.tok_embeddings.weight.data_ptr()


def test_teacher_forcing_is_causal_and_gradients_flow():
    model, tokens = small_llamagen(), torch.randint(V, (1, T), generator=generator(0))
    changed = tokens.clone()
    changed[0, 9] = (changed[0, 9] + 1) % V
    before, after = model(torch.tensor([0]), tokens), model(torch.tensor([0]), changed)
    assert torch.equal(before[:, :10], after[:, :10]) and (before[:, 10:] - after[:, 10:]).abs().amax(-1).min() > 1e-6
    before.log_softmax(-1).sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() and p.grad.any() for p in model.parameters())


def test_random_model_is_a_function_of_its_seed_and_leaves_the_global_one_alone():
    state = torch.random.get_rng_state()
    a, b, other = (random_model(seed=seed, vocab_size=V, block_size=T).state_dict() for seed in (0, 0, 1))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(torch.equal(a[key], b[key]) for key in a) and not torch.equal(a["output.weight"], other["output.weight"])
    model = random_model("tiny", vocab_size=V, block_size=T)
    logits = model(torch.tensor([0]), torch.arange(T)[None] % V)
    assert not model.training and model.config.dim == SIZES["tiny"]["dim"] and logits.std() > 0.5


# ---- cached decoding against teacher forcing ---------------------------------------------------------------------------------------------

MODELS = {
    "fp32": (lambda: small_llamagen(torch.float32), 1e-4),
    "fp64": (lambda: small_llamagen(torch.float64), 1e-9),
    "guided-fp32": (lambda: Guided(small_llamagen(torch.float32), 2.0), 1e-4),
    "guided-fp64": (lambda: Guided(small_llamagen(torch.float64), 2.0), 1e-9),
    "tabular": (lambda: Tabular(V, 4, CLASSES), 1e-12),
    "guided-tabular": (lambda: Guided(Tabular(V, 4, CLASSES), 2.0), 1e-12),
}
ROWS = {  # which rows a forward runs, B of them
    "all": lambda B, rng: slice(0, B),
    "slice": lambda B, rng: slice(*sorted(torch.randperm(B + 1, generator=rng)[:2].tolist())),
    "index": lambda B, rng: torch.randperm(B, generator=rng)[: int(torch.randint(1, B + 1, (), generator=rng))],
}


@pytest.fixture(params=MODELS)
def case(request):
    """A model, its tolerance, and five images: conditions (the null class among them), tokens, ragged starts from none to full."""
    build, tolerance = MODELS[request.param]
    model, rng = build(), generator(3)
    length = model.config.block_size
    tokens = torch.randint(V, (5, length), generator=rng)
    return SimpleNamespace(
        model=model, tolerance=tolerance, rng=rng, length=length, tokens=tokens, condition=torch.tensor([2, 0, 1, CLASSES, 0]),
        start=torch.tensor([0, 1, length // 2, length - 1, length]),
    )  # fmt: skip


def padded(tokens: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
    return tokens[:, : start.max()] * (torch.arange(int(start.max())) < start[:, None])


def decode(case, cache, tokens, start, width: int, rows="all") -> torch.Tensor:
    """Logits [B, T, V] from each row's start on (NaN before), got as decoding gets them: at every visit a window of `width` random drafts is
    run and rejected, then one of 0..width true tokens, of which 1 or more are taken. What the first leaves behind is stale."""
    B, length = tokens.shape
    junk = torch.randint(V, (B, length + width + 2), generator=case.rng)
    truth = junk.clone()
    truth[:, 1 : length + 1] = tokens  # column p + 1 holds position p; the token at -1 is ignored, past the end anything goes
    seen = torch.full((B, length + width + 2, V), torch.nan, dtype=torch.float64)
    cursor = start.clone()
    while (cursor < length).any():
        visited = ROWS[rows](B, case.rng)
        row = torch.arange(B)[visited][:, None]
        columns = cursor[row] + torch.arange(width + 1)
        drafts = torch.where(columns == cursor[row], truth[row, columns], junk[row, columns])
        case.model.step(drafts, columns - 1, cache, visited)
        narrow = int(torch.randint(width + 1, (), generator=case.rng))
        columns = columns[:, : narrow + 1]
        seen[row, columns] = case.model.step(truth[row, columns], columns - 1, cache, visited).double()
        taken = torch.randint(1, narrow + 2, row.shape, generator=case.rng)
        cursor[row] = (cursor[row] + taken).clamp(max=length)
    return seen[:, :length]


def check(case, seen, condition, tokens, start):
    expected = case.model(condition, tokens).double()
    for b in range(len(tokens)):
        torch.testing.assert_close(seen[b, start[b] :], expected[b, start[b] :], atol=case.tolerance, rtol=0, msg=lambda m, b=b: f"row {b}: {m}")


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("width", [0, 1, 3, 20])
def test_cached_logits_are_the_teacher_forced_ones(case, width, rows):
    cache = case.model.prefill(case.condition, padded(case.tokens, case.start), case.start, case.length + width + 1)
    check(case, decode(case, cache, case.tokens, case.start, width, rows), case.condition, case.tokens, case.start)


def test_no_prefix_at_all(case):
    start = torch.zeros_like(case.start)
    cache = case.model.prefill(case.condition, case.tokens[:, :0], start, case.length + 4)
    check(case, decode(case, cache, case.tokens, start, 3), case.condition, case.tokens, start)


@pytest.mark.parametrize("rows", [slice(1, 3), torch.tensor([3, 0])], ids=["slice", "index"])
def test_second_prefill_into_rows_of_a_live_cache(case, rows):
    """New images take over finished rows; the others go on from where they stand."""
    cache = case.model.prefill(case.condition, padded(case.tokens, case.start), case.start, case.length + 4)
    decode(case, cache, case.tokens, case.start, 3)
    tokens, condition, start = case.tokens.clone(), case.condition.clone(), torch.full_like(case.start, case.length // 2)
    tokens[rows] = torch.randint(V, tokens[rows].shape, generator=case.rng)
    condition[rows] = torch.tensor([1, 2])
    start[rows] = torch.tensor([0, case.length - 1])
    again = case.model.prefill(condition[rows], padded(tokens[rows], start[rows]), start[rows], case.length + 4, cache, rows)
    assert again is cache
    check(case, decode(case, cache, tokens, start, 3, "index"), condition, tokens, start)


@pytest.mark.parametrize("upto", [0, 1, 3])
@pytest.mark.parametrize(("to", "of"), [(torch.tensor([0, 1]), torch.tensor([3, 0])), (slice(0, 3), slice(1, 4))], ids=["index", "overlapping-slices"])
def test_moved_rows_go_on_as_the_ones_they_were_copied_from(case, to, of, upto):
    cache = case.model.prefill(case.condition, padded(case.tokens, case.start), case.start, case.length + 4)
    decode(case, cache, case.tokens, case.start, 3)
    cache.move(to, of, upto)
    tokens, condition = case.tokens.clone(), case.condition.clone()
    condition[to], tokens[to] = case.condition[of], case.tokens[of]
    tokens[:, upto:] = torch.randint(V, tokens[:, upto:].shape, generator=case.rng)
    start = upto + torch.arange(5) % 2  # the first input stands at upto - 1, which it writes again, or at upto
    check(case, decode(case, cache, tokens, start, 3), condition, tokens, start)


def test_expanded_rows_share_a_prefix_and_go_their_own_ways(case):
    tokens, condition, start = (x[[1, 0, 2]] for x in (case.tokens, case.condition, case.start))
    cache = case.model.prefill(condition, padded(tokens, start), start, case.length + 4)
    cache.expand(3)
    tokens, condition, starts = (x.repeat_interleave(3, dim=0) for x in (tokens, condition, start))
    tokens = tokens.where(torch.arange(case.length) < starts[:, None], torch.randint(V, tokens.shape, generator=case.rng))
    check(case, decode(case, cache, tokens, starts, 3, "index"), condition, tokens, starts)


def test_bound_of_a_cache_off_the_cpu_covers_every_slot():
    """Where looking at positions would cost a synchronisation, the attended part is an upper bound kept on the host."""
    cache = Cache(Config(**SIZES["tiny"]), rows=2, capacity=T + 4, like=torch.zeros(1))
    cache.fill(slice(0, 2)).attend(0, *torch.zeros(3, 2, 5, 2, 32))
    for cursor in range(4, T, 4):  # four inputs, all of them taken
        slots = cursor + 1 + torch.arange(4)
        live = cache.live(SimpleNamespace(shape=(2, 4), device=SimpleNamespace(type="cuda")))
        assert slots.max() < live <= cache.keys.shape[2]


# ---- guidance, dtypes --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [0.3, 1.5, 4.0])
def test_guidance_extrapolates_from_the_null_class(scale):
    model, tokens = small_llamagen(), torch.randint(V, (2, T), generator=generator(0))
    given, null = model(torch.tensor([0, 2]), tokens), model(torch.tensor([CLASSES, CLASSES]), tokens)
    torch.testing.assert_close(Guided(model, scale)(torch.tensor([0, 2]), tokens), null + scale * (given - null), atol=1e-9, rtol=0)


def test_guided_rows_interleave():
    seen = []
    model = Guided(Tabular(V, 4, CLASSES), 2.0)
    model.model.step = lambda tokens, positions, cache, rows: seen.append(rows) or torch.zeros(len(tokens), 1, V)
    cache = model.prefill(torch.tensor([2, 0, 1]), torch.zeros(3, 0, dtype=torch.long), torch.zeros(3, dtype=torch.long), 5)
    assert cache.inner.condition.tolist() == [2, CLASSES, 0, CLASSES, 1, CLASSES]
    ids = torch.zeros(2, 1, dtype=torch.long)
    model.step(ids, ids, cache, slice(1, 3))
    model.step(ids, ids, cache, torch.tensor([2, 0]))
    assert seen[0] == slice(2, 6) and seen[1].tolist() == [4, 5, 0, 1]


def test_guided_refuses_what_it_cannot_guide():
    model = small_llamagen()
    with pytest.raises(ValueError, match="already guided"):
        Guided(Guided(model, 2.0), 2.0)
    model.config = SimpleNamespace(num_classes=None)
    with pytest.raises(ValueError, match="null class"):
        Guided(model, 2.0)


def test_bf16_model_gives_finite_logits_and_guidance_widens_them():
    model, condition, tokens = small_llamagen(torch.bfloat16), torch.tensor([0, CLASSES]), torch.randint(V, (2, T), generator=generator(0))
    logits, guided = model(condition, tokens), Guided(model, 2.0)
    assert logits.shape == (2, T, V) and logits.isfinite().all()
    start = torch.tensor([0, 5])
    cache = guided.prefill(condition, padded(tokens, start), start, T + 4)
    assert cache.inner.keys.dtype == torch.bfloat16
    step = guided.step(tokens[:, :3], start[:, None] - 1 + torch.arange(3), cache, slice(0, 2))
    for x in (guided(condition, tokens), step):
        assert x.dtype == torch.float32 and x.isfinite().all()
    assert (guided(condition, tokens) - Guided(model.float(), 2.0)(condition, tokens)).abs().max() < 0.3


# ---- tabular toy models ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", [(), (1,), (2, 0, 1)])
def test_joint_law_of_a_tabular_model(prefix):
    model = Tabular(3, 3, num_classes=2, seed=5)
    joint = model.joint(1, prefix)
    assert len(joint) == 3 ** (3 - len(prefix)) and abs(sum(joint.values()) - 1) < 1e-12
    for image, p in joint.items():
        log_p = model(torch.tensor([1]), torch.tensor([image])).log_softmax(-1)[0]
        assert image[: len(prefix)] == prefix and p == pytest.approx(log_p[range(3), image][len(prefix) :].sum().exp().item(), abs=1e-12)


def test_contexts_of_a_tabular_model_are_its_own():
    """Every (class, tokens before) has its own row of logits."""
    model = Tabular(3, 3, num_classes=1)
    rows = {}
    for class_id, image, t in product((0, 1), product(range(3), repeat=3), range(3)):
        rows[class_id, image[:t]] = tuple(model(torch.tensor([class_id]), torch.tensor([image]))[0, t].tolist())
    assert len(rows) == len(set(rows.values())) == 2 * (1 + 3 + 9)
    sharp = model.joint(0, scores=lambda logits: 1000 * logits)
    assert max(sharp.values()) > 0.99


# ---- the tokenizer -----------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["small", "vq-16"])
def tokenizer(request):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = vq.VQModel(vq.CONFIGS[request.param]).eval()
    model.quantize.embedding.weight.data *= 1 + torch.arange(model.config.codebook_size)[:, None] % 7  # rows of many lengths: only directions count
    return model


def pictures(size: int, batch: int = 2) -> torch.Tensor:
    return torch.rand(batch, 3, size, size, generator=generator(0)) * 2 - 1


def test_images_to_codes_and_back(tokenizer):
    d = tokenizer.config.downsample
    images = pictures(32, batch=1 if d == 16 else 2)
    codes = tokenizer.encode(images)
    assert codes.shape == (len(images), (32 // d) ** 2) and codes.dtype == torch.int64
    decoded = tokenizer.decode(codes)
    assert decoded.shape == images.shape and decoded.isfinite().all() and decoded.std() > 0
    vectors = F.normalize(tokenizer.quantize.embedding.weight, dim=-1)[codes]
    assert torch.equal(tokenizer.render(vectors).clamp(-1, 1), decoded)
    assert not decoded.requires_grad and tokenizer.features(images).requires_grad


def test_codes_are_nearest_by_cosine(tokenizer):
    images = pictures(32, batch=1)
    cosine = F.cosine_similarity(tokenizer.features(images)[0, :4, None], tokenizer.quantize.embedding.weight[None], dim=-1)
    codes = tokenizer.encode(images)[0, :4]
    assert (cosine.gather(1, codes[:, None])[:, 0] >= cosine.amax(1) - 1e-6).all() and len(codes.unique()) > 1


@pytest.fixture
def bare_tokenizer():
    """Identity in place of the networks: what is left is the layout of codes and the lookup."""
    model = vq.VQModel(vq.VQConfig(ch=32, ch_mult=(1,), num_res_blocks=1, z_channels=32, codebook_size=9, codebook_dim=3))
    model.encoder = model.decoder = model.quant_conv = model.post_quant_conv = torch.nn.Identity()
    return model.eval()


def test_codes_run_row_by_row(bare_tokenizer):
    codes = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7, 8]])
    image = bare_tokenizer.render(bare_tokenizer.quantize.codebook()[codes])
    for row, column in product(range(3), repeat=2):
        torch.testing.assert_close(image[0, :, row, column], F.normalize(bare_tokenizer.quantize.embedding.weight[3 * row + column], dim=0))
    assert torch.equal(bare_tokenizer.encode(5 * image), codes), "encoded codebook entries are their own codes, whatever their length"


def test_decode_clamps_and_render_does_not(tokenizer):
    if tokenizer.config.downsample == 16:
        pytest.skip("one configuration is enough")
    codes, weight = torch.arange(16)[None], tokenizer.decoder.conv_out.weight
    before, weight.data = weight.data, weight.data * 100
    rendered, decoded = tokenizer.render(tokenizer.quantize.codebook()[codes]), tokenizer.decode(codes)
    weight.data = before
    assert rendered.abs().max() > 1 and torch.equal(decoded, rendered.clamp(-1, 1)) and decoded.max() == 1


def test_downsample_pads_on_the_right_and_below_and_upsample_repeats():
    down, up = vq.Downsample(1), vq.Upsample(1)
    down.conv.weight.data.fill_(1), down.conv.bias.data.zero_()
    assert down(torch.ones(1, 1, 4, 4))[0, 0].tolist() == [[9, 6], [6, 4]]
    up.conv.weight.data.zero_(), up.conv.bias.data.zero_()
    up.conv.weight.data[0, 0, 1, 1] = 1
    assert up(torch.tensor([[[[1.0, 2.0], [3.0, 4.0]]]]))[0, 0].tolist() == [[1, 1, 2, 2], [1, 1, 2, 2], [3, 3, 4, 4], [3, 3, 4, 4]]


def test_tokenizer_attention_is_single_head_over_the_grid():
    block, x = vq.AttnBlock(32).double(), torch.randn(1, 32, 2, 3, dtype=torch.float64, generator=generator(0))
    flat = F.group_norm(x, 32, eps=1e-6)[0].flatten(1)  # [C, hw]
    q, k, v = (conv.weight[:, :, 0, 0] @ flat + conv.bias[:, None] for conv in (block.q, block.k, block.v))
    mixed = v @ (q.T @ k / 32**0.5).softmax(1).T
    expected = x[0].flatten(1) + block.proj_out.weight[:, :, 0, 0] @ mixed + block.proj_out.bias[:, None]
    torch.testing.assert_close(block(x)[0].flatten(1), expected, atol=1e-9, rtol=0)


# ---- weights on disk ---------------------------------------------------------------------------------------------------------------------

TINY = dict(dim=16, n_layer=1, n_head=2, vocab_size=V, block_size=4, num_classes=CLASSES)


@pytest.fixture
def saved(tmp_path):
    """The path of a saved model, and the model."""
    model = random_model(**TINY)
    write_weights(tmp_path / "tiny.safetensors", model.state_dict(), dict(config=TINY, command="test"))
    return tmp_path / "tiny.safetensors", model


def test_weights_come_back_as_bf16_and_the_model_with_them(saved):
    path, model = saved
    state, provenance = read_weights(path)
    assert provenance["command"] == "test" and provenance["sha256"] == checkpoints.sha256(path)
    assert state.keys() == model.state_dict().keys()
    assert all(torch.equal(state[key], x.bfloat16()) for key, x in model.state_dict().items())
    loaded = load_model(path, device="cpu")
    assert not loaded.training and loaded.config == model.config and loaded.output.weight.dtype == torch.float32
    ids = torch.tensor([[1, 2, 3, 4]])
    torch.testing.assert_close(loaded(torch.tensor([0]), ids), model.bfloat16().float()(torch.tensor([0]), ids), atol=1e-6, rtol=0)
    assert load_model(str(path), dtype=torch.float64, device="cpu").output.weight.dtype == torch.float64
    assert sorted(p.name for p in path.parent.iterdir()) == ["tiny.json", "tiny.safetensors"]


def truncate(path):
    path.write_bytes(path.read_bytes()[:-100])


def alter(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("damage", [truncate, alter])
def test_damaged_weights_are_refused(saved, damage):
    damage(saved[0])
    refused(lambda: load_model(saved[0]), "tiny.safetensors", "truncated or altered", "git")


@pytest.mark.parametrize("suffix", [".json", ".safetensors"])
def test_missing_file_is_named(saved, suffix):
    file = saved[0].with_suffix(suffix)
    file.unlink()
    refused(lambda: read_weights(saved[0]), file.name, "missing")


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", json.dumps(dict(config=TINY))], ids=["empty", "cut", "a-list", "no-keys", "no-checksum"])
def test_damaged_provenance_is_refused(saved, text):
    saved[0].with_suffix(".json").write_text(text)
    refused(lambda: load_model(saved[0]), "tiny.json")


@pytest.mark.parametrize("load", [load_model, vq.load], ids=["model", "tokenizer"])
def test_unknown_name_is_refused_naming_the_near_ones(load):
    bundled = "small-student" if load is load_model else "small"
    for name in (bundled[:-1] + "x", "qqqq", "no/such/file.safetensors", "folder/"):
        refused(lambda name=name: load(name), name.rstrip("/"), bundled)


def test_weights_are_replaced_whole(saved, monkeypatch):
    """A write that dies leaves the old file, which still loads."""
    path, model = saved
    before = {key: x.clone() for key, x in model.state_dict().items()}

    def dying(state, file):
        file.write_bytes(b"half a file")
        raise OSError("no space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(checkpoints, "save_file", dying)
        with pytest.raises(OSError, match="no space"):
            write_weights(path, {key: x + 1 for key, x in before.items()}, dict(config=TINY))
    assert torch.equal(read_weights(path)[0]["output.weight"], before["output.weight"].bfloat16())
    write_weights(path, {key: x + 1 for key, x in before.items()}, dict(config=TINY))
    assert torch.equal(read_weights(path)[0]["output.weight"], (before["output.weight"] + 1).bfloat16())
    assert sorted(p.name for p in path.parent.iterdir()) == ["tiny.json", "tiny.safetensors"]
