"""Scores against independent computations, samples that survive a kill, and one clear line for bad input; clean-fid, EfficientNet and open_clip really run."""
import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before huggingface_hub is imported: nothing here needs a network

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from test_bad_input import refused

from hbsjd import evaluation, features, image_text, sample, scores
from hbsjd.data import openmoji_table, render
from hbsjd.decoding.methods import METHODS
from hbsjd.models import vq
from hbsjd.models.guidance import Guided
from hbsjd.models.llamagen import random_model

pytestmark = [
    pytest.mark.xdist_group("evaluation"),  # one worker imports clean-fid, timm and open_clip
    pytest.mark.filterwarnings("ignore:`torch.jit:FutureWarning"),  # Inception is a TorchScript file
]


@pytest.fixture(autouse=True, scope="module")
def cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("cache")
        patch.setenv("HBSJD_CACHE", str(folder))
        yield folder


@pytest.fixture(scope="module")
def emoji():
    """64 names, one image each: captions and pixels [64, 3, 32, 32]."""
    table = openmoji_table().drop_duplicates("name").iloc[::27].head(64)
    return table.caption.tolist(), torch.from_numpy(np.stack([render(file, 32) for file in table.file]))


@pytest.fixture(scope="module")
def lite0():
    return features.extractor("efficientnet-lite0", "cpu")


@pytest.fixture(scope="module")
def scorer():
    return image_text.clip_scorer("small", device="cpu")


def drawn(n, d, seed=0, shift=0.0):
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * torch.linspace(0.5, 2, d) + shift


# --- formulas ---

@pytest.mark.parametrize("n, m, d", [(200, 300, 16), (30, 40, 64), (30, 300, 64)])
def test_frechet_agrees_with_clean_fid(n, m, d):
    x, (mu, sigma) = drawn(n, d), scores.moments(drawn(m, d, 1, 0.3))
    assert scores.frechet(x, mu, sigma).item() == pytest.approx(scores.clean_fid_frechet(x, mu, sigma), rel=1e-3)


def test_frechet_of_gaussians_with_known_moments():
    x = drawn(50, 6)
    white = torch.linalg.qr(x - x.mean(0)).Q * 49**0.5  # covariance exactly 1
    a, b = torch.linspace(0.5, 3, 6).double(), torch.linspace(2, 1, 6).double()
    got = scores.frechet(white * a + 2, torch.zeros(6).double(), torch.diag(b**2))
    assert got.item() == pytest.approx(6 * 2**2 + ((a - b) ** 2).sum().item(), rel=1e-9)


def test_frechet_of_a_set_and_itself_is_zero():
    for x in (drawn(100, 16), drawn(10, 16)):
        mu, sigma = scores.moments(x)
        assert abs(scores.frechet(x, mu, sigma).item()) < 1e-5 * sigma.trace().item()


def test_counts_repeat_images():
    x, y, counts = drawn(20, 8), drawn(40, 8, 1), torch.tensor([[2, 0, 3] + [1] * 15 + [0, 0]]).double()
    repeated = x.repeat_interleave(counts[0].long(), dim=0)
    mu, sigma = scores.moments(y)
    assert scores.frechet(x, mu, sigma, counts).item() == pytest.approx(scores.frechet(repeated, mu, sigma).item(), rel=1e-9)
    p = x.softmax(1)
    assert scores.inception_score(p, counts).item() == pytest.approx(scores.inception_score(p.repeat_interleave(counts[0].long(), dim=0)).item())
    assert scores.mean_of(x[:, 0], counts).item() == pytest.approx(repeated[:, 0].mean().item())


def kernel(a, b):
    return (float(a @ b) / len(a) + 1) ** 3


def test_kid_is_its_definition():
    x, y = drawn(7, 5), drawn(9, 5, 1, 0.5)
    own = np.mean([kernel(x[i], x[j]) for i in range(7) for j in range(7) if i != j])
    reference = np.mean([kernel(y[i], y[j]) for i in range(9) for j in range(9) if i != j])
    across = np.mean([kernel(a, b) for a in x for b in y])
    assert scores.kernel_distance(x, y).item() == pytest.approx(own + reference - 2 * across, rel=1e-9)
    counts = torch.tensor([[3.0, 2, 1, 1, 0, 0, 0]])  # pairs of an image with its own copy do not count
    ids = [0, 0, 0, 1, 1, 2, 3]
    own = np.mean([kernel(x[i], x[j]) for i in ids for j in ids if i != j])
    across = np.mean([kernel(x[i], b) for i in ids for b in y])
    assert scores.kernel_distance(x, y, counts).item() == pytest.approx(own + reference - 2 * across, rel=1e-9)


def test_kid_agrees_with_clean_fid_and_leaves_its_random_state(monkeypatch):
    x, y, before = drawn(60, 8), drawn(60, 8, 1, 0.2), np.random.get_state()[1].copy()
    assert scores.kernel_distance(x, y).item() == pytest.approx(scores.clean_fid_kid(x, y), rel=1e-6)
    assert (np.random.get_state()[1] == before).all()
    monkeypatch.setattr(scores, "CHUNK", 7)
    assert scores.kernel_distance(x, y).item() == pytest.approx(scores.clean_fid_kid(x, y), rel=1e-6)


def test_kid_of_two_halves_is_zero_on_average():
    values = torch.cat([scores.kernel_distance(*drawn(80, 8, seed).split(40)) for seed in range(60)])
    assert abs(values.mean()) < 3 * values.std() / 60**0.5


@pytest.mark.parametrize("n, d", [(40, 8), (40, 30), (30, 60)])
def test_the_spread_over_halves_is_about_that_over_independent_sets(n, d):
    mu, sigma = scores.moments(drawn(400, d, 1000))
    halves = scores.halves(n, 100)

    def check(distance, distance_of_halves):
        true = torch.cat([distance(seed) for seed in range(60)]).std()
        estimated = torch.stack([distance_of_halves(seed).std() for seed in range(5)]).mean()
        assert 0.7 < estimated / true < 2.2, (estimated, true)

    check(lambda seed: scores.frechet(drawn(n, d, seed), mu, sigma), lambda seed: scores.frechet(drawn(n, d, seed), mu, sigma, halves))
    sets = [(drawn(n, d, seed), drawn(n, d, 1000 + seed)) for seed in range(60)]
    check(lambda seed: scores.kernel_distance(*sets[seed]), lambda seed: scores.kernel_distance(*sets[seed], halves, scores.halves(n, 100, 1)))


def test_halves():
    counts = scores.halves(7, 200)
    assert (counts.sum(1) == 4).all() and (counts == scores.halves(7, 200)).all() and (counts.mean(0) - 4 / 7).abs().max() < 0.15


def test_inception_score():
    assert scores.inception_score(torch.full((10, 4), 0.25)).item() == pytest.approx(1)
    assert scores.inception_score(torch.eye(4).repeat(5, 1)).item() == pytest.approx(4)
    p = drawn(5003, 4).softmax(1)
    halves = [torch.special.xlogy(q, q / q.mean(0)).sum(1).mean().exp() for q in (p[:5000], p[5000:])]
    assert scores.inception_score(p).item() == pytest.approx(torch.stack(halves).mean().item())


def test_manifold_on_a_line():
    reference = torch.tensor([[0.0], [1], [2], [3], [100], [101], [102], [103]])
    generated = torch.tensor([[0.5], [1.5], [2.5], [3.5], [50], [1.0]])
    found = scores.manifold(generated, reference)
    # Radii of the reference: 3, 2, 2, 3 in both groups. Radii of the generated: 2, 1, 1.5, 2.5, 48.5, 1.5, since the third neighbour counts.
    inside = (generated - reference.T).abs() <= torch.tensor([3.0, 2, 2, 3] * 2)
    assert found["precision"].tolist() == [1, 1, 1, 1, 0, 1] and found["density"].tolist() == (inside.sum(1) / 3).double().tolist()
    assert found["coverage"].tolist() == [1, 1, 1, 1, 0, 0, 0, 0]
    assert found["recall"].tolist() == [1, 1, 1, 1, 0, 0, 0, 0]  # the ball of 50 reaches 98.5
    same = scores.manifold(reference, reference)
    assert all(same[name].mean() == 1 for name in ("precision", "recall", "coverage"))


# --- sets of features ---

def made(n, d=8, seed=0, shift=0.0, **other):
    values = drawn(n, d, seed, shift)
    return replace(features.Features(values, values.softmax(1), "efficientnet-lite0", "0" * 64, (32, 32)), **other)


def test_evaluate_gives_every_score_with_its_interval():
    found = evaluation.evaluate(made(60), made(90, seed=1), resamples=30)
    assert list(found) == ["fd", "kid", "precision", "recall", "density", "coverage", "is"]
    assert found["fd"].name == "FD (EfficientNet-Lite0)" and found["kid"].name == "KID (EfficientNet-Lite0)" and found["is"].name == "IS (EfficientNet-Lite0)"
    for name, score in found.items():
        row = score.row()
        assert row["low"] < row["value"] < row["high"] and row["n"] == 60 and row["n_reference"] == (None if name == "is" else 90)
    quick = evaluation.evaluate(made(60), made(90, seed=1), resamples=30, clean_fid=False)
    assert quick["fd"].value == pytest.approx(found["fd"].value, rel=1e-6)
    assert quick["kid"].value == pytest.approx(found["kid"].value, abs=0.2 * found["kid"].sd)  # clean-fid takes random subsets of the larger set
    assert not found["fd"].rank_deficient
    few = evaluation.evaluate(made(6), made(90, seed=1), resamples=3)["fd"]
    assert few.rank_deficient and "6 images for 8 features" in few.note
    assert "6 images for 8 features" in evaluation.table(dict(fd=few))


def test_differences_are_paired():
    reference, first = made(300, seed=1), made(200)
    near, far = made(200, shift=0.001), made(200, shift=0.5)
    of = {name: evaluation.evaluate(x, reference, clean_fid=False) for name, x in (("first", first), ("near", near), ("far", far))}
    higher = scores.difference(of["far"]["fd"], of["first"]["fd"])
    assert higher["verdict"] == "higher" and higher["low"] > 0 and scores.difference(of["first"]["fd"], of["far"]["fd"])["verdict"] == "lower"
    paired = scores.difference(of["near"]["fd"], of["first"]["fd"])
    assert paired["high"] - paired["low"] < 0.1 * 4 * of["first"]["fd"].sd  # far narrower than two independent intervals
    other = evaluation.evaluate(made(200, seed=7), reference, clean_fid=False)
    assert scores.difference(other["kid"], of["first"]["kid"])["verdict"] == "within noise"


def test_differences_over_seeds():
    assert scores.seed_difference([1.0, 1.1, 0.9], [1.02, 1.05, 0.95])["verdict"] == "within noise"
    found = scores.seed_difference([2.0, 2.1, 1.9], [1.0, 1.05, 0.95])
    assert found["verdict"] == "higher" and found["difference"] == pytest.approx(1)
    half = 4.302653 * np.std([1.0, 1.05, 0.95], ddof=1) / 3**0.5
    assert found["high"] - found["low"] == pytest.approx(2 * half)


def test_floor_draws_n_of_the_first_half():
    first, second = made(100), made(80, seed=1)
    score = evaluation.floor(first, second, 50, clean_fid=False)["fd"]
    assert (score.n, score.n_reference) == (50, 80)
    refused(lambda: evaluation.floor(first, second, 101), "101", "there are 100")


# --- real networks ---

def test_real_then_blurred_then_noise(emoji, lite0, cache):
    _, images = emoji
    first, second = images[::2], images[1::2]
    blurred = F.avg_pool2d(F.pad(first.float(), (2,) * 4, mode="replicate"), 5, 1).round().byte()
    noise = torch.randint(256, first.shape, generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    reference = features.features(second, lite0)
    found = [evaluation.evaluate(features.features(x, lite0), reference, resamples=20, clean_fid=False) for x in (first, blurred, noise)]
    for name in ("fd", "kid"):
        values = [scores_of[name].value for scores_of in found]
        assert values[0] < values[1] < values[2], (name, values)
    assert found[0]["precision"].value > found[2]["precision"].value and found[0]["fd"].rank_deficient
    kept = list(cache.glob("features-*-efficientnet-lite0-5793442*.npz"))
    assert len(kept) == 4 and not list(cache.glob("*.partial"))


def test_features_come_from_the_cache(emoji, lite0):
    images = emoji[1][:5]
    first = features.features(images, lite0)
    again = features.features(images, replace(lite0, call=None))
    assert first.values.shape == (5, 1280) and first.probabilities.shape == (5, 1000) and (again.values == first.values).all()
    assert torch.allclose(first.probabilities.sum(1), torch.ones(5), atol=1e-5)
    by_batch = torch.cat([features.extracted(some, lite0.call, ("values", "probabilities"))["values"] for some in images.split(2)])
    assert torch.allclose(by_batch, first.values, atol=1e-4)


class FakeInception(torch.nn.Module):
    """The interface of NVIDIA's TorchScript Inception, over averages of colours."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(3, 2048))

    def forward(self, img, return_features: bool = False, use_fp16: bool = False, no_output_bias: bool = False):
        found = self.layers((torch.nn.functional.interpolate(img, size=(299, 299)) - 128) / 128)
        return found if return_features else found[:, :1008].softmax(1)


@pytest.fixture
def fake_inception(tmp_path, monkeypatch):
    path = tmp_path / features.INCEPTION
    torch.jit.script(FakeInception()).save(str(path))
    monkeypatch.setitem(features.SHA256, features.INCEPTION, features.sha256(path))
    return path


def test_only_inception_gives_fid(fake_inception, emoji, tmp_path):
    images = emoji[1][:6]
    for kind in ("inception", "inception-tensorflow"):
        of = features.features(images, features.extractor(kind, "cpu", weights=fake_inception))
        assert of.values.shape == (6, 2048) and of.probabilities.shape == (6, 1008)
        names = [evaluation.title(name, kind) for name in ("fd", "kid", "is", "precision")]
        assert names == ["FID", "KID", "IS", "precision"]
    np.savez(tmp_path / "adm.npz", mu=np.zeros(2048), sigma=np.eye(2048))
    adm = features.statistics(tmp_path / "adm.npz")
    found = evaluation.evaluate(of, None, moments_of=adm, resamples=2, clean_fid=False)
    assert [score.name for score in found.values()] == ["FID", "IS"] and found["fd"].n_reference is None
    refused(lambda: evaluation.evaluate(made(6), None, moments_of=adm), "inception-tensorflow", "efficientnet-lite0")


def test_images_fit_their_captions(emoji, scorer):
    captions, images = emoji
    cosine = scorer.images(images) @ scorer.texts(captions).T
    assert (cosine > cosine.diagonal()[:, None]).sum(1).float().median() <= 3  # of 63 others; most of these names are training names
    prompts = [[caption] for caption in captions]
    found = image_text.image_text_scores(scorer, images, torch.arange(64), prompts, resamples=20)
    assert found["cosine"].name == "mean cosine (LiT: EfficientNet-Lite0 + MiniLM)" and found["cosine_100"].value == pytest.approx(100 * found["cosine"].value)
    assert found["cosine"].value == pytest.approx(cosine.diagonal().mean().item(), abs=1e-6) and found["zero_shot"].value > 0.3
    wrong = image_text.image_text_scores(scorer, images, torch.arange(64).roll(1), prompts, resamples=20)
    assert wrong["cosine"].value < found["cosine"].value - 0.1 and scores.difference(found["cosine"], wrong["cosine"])["verdict"] == "higher"
    twice = image_text.image_text_scores(scorer, images[:4], torch.tensor([0, 0, 1, 1]), [["an emoji of a cat"], ["an emoji of a cat"]], resamples=2)
    assert twice["zero_shot"].value == 1  # equal prompts are one class
    refused(lambda: image_text.image_text_scores(scorer, images[:4], torch.tensor([0, 0, 1, 2]), prompts[:2]), "0..1")


def test_the_bundled_scorer_says_what_it_reached():
    facts = json.loads(image_text.PROJECTION.with_suffix(".json").read_text())
    every = facts["held_out"]["validation + test"]
    assert every["names"] == 290 and every["R@1"] >= 0.20 and every["R@5"] >= 0.40 and every["chance R@1"] == 0.0034
    assert image_text.PROJECTION.stat().st_size < 2_000_000


def test_prompts():
    prompts = image_text.openmoji_prompts(openmoji_table())
    assert len(prompts) == 70 and all(prompts) and prompts[0][0].startswith("an emoji of ")
    prompts = image_text.imagenet_prompts()
    assert len(prompts) == 1000 and prompts[207] == ["a photo of a Golden Retriever."]


# --- sampling ---

@pytest.fixture(scope="module")
def models():
    torch.manual_seed(0)
    tokenizer = vq.VQModel(vq.VQConfig(ch=32, ch_mult=(1, 1), num_res_blocks=1, z_channels=32, codebook_size=64)).eval()
    return random_model("tiny", vocab_size=64, block_size=16, num_classes=5), tokenizer


def sampled(models, folder, n=7, **how):
    return sample.sample_images(*models, torch.arange(n) % 5, folder, **(dict(method="hbsjd_gumbel", seed=1, slots=2, batch=3) | how))


def test_samples_are_the_decoded_rollout(models, tmp_path):
    out = sampled(models, tmp_path / "a", guidance=2.0)
    read = features.read_images(out.folder)
    assert read.shape == (7, 3, 8, 8) and (features.read_images(out.npz) == read).all() and np.load(out.npz)["arr_0"].shape == (7, 8, 8, 3)
    assert out.images == out.timed_images == 7 and out.seconds > 0 and out.nfe >= 3 * 2
    other = sampled(models, tmp_path / "b", guidance=2.0, slots=5, batch=7, method="ar")
    assert (features.read_images(other.folder) == read).all()


def test_adaptive_is_measured_before_the_clock_starts(models, tmp_path, cache, capsys):
    out = sampled(models, tmp_path / "a", method="hbsjd_adaptive")
    assert (features.read_images(out.folder) == features.read_images(sampled(models, tmp_path / "b").folder)).all()
    assert capsys.readouterr().err.count("measuring what a round costs") == 1  # not once more for the smaller last batch


def test_resize_comes_before_the_clamp(models, tmp_path):
    model, tokenizer = models
    tokens = sample.rollout(model, torch.arange(2), method="ar", seed=1).tokens
    images = F.interpolate(3 * tokenizer.decode(tokens, clamp=False), (5, 5), mode="bicubic")
    louder = vq.VQModel(tokenizer.config).eval()
    louder.load_state_dict(tokenizer.state_dict())
    for parameter in louder.decoder.conv_out.parameters():
        parameter.data *= 3
    got = sample.pixels(louder, tokens, 5, 1)
    expected = (127.5 * images + 128).clamp(0, 255).byte().permute(0, 2, 3, 1)
    assert np.abs(got.astype(int) - expected.numpy().astype(int)).max() <= 1 and images.abs().max() > 1


def test_a_killed_run_loses_at_most_a_batch(models, tmp_path, monkeypatch):
    whole, write, written, calls = sampled(models, tmp_path / "whole"), sample.write_png, [], []

    def killed(path, image):
        if len(written) == 4:  # in the middle of the second batch
            raise KeyboardInterrupt
        written.append(path.name)
        write(path, image)

    with monkeypatch.context() as patch:
        patch.setattr(sample, "write_png", killed)
        with pytest.raises(KeyboardInterrupt):
            sampled(models, tmp_path / "killed")
    refused(lambda: features.read_images(tmp_path / "killed"), "4 of 7", "did not finish")
    monkeypatch.setattr(sample, "rollout", lambda *args, rollout=sample.rollout, **how: calls.append(how["images"].tolist()) or rollout(*args, **how))
    again = sampled(models, tmp_path / "killed")
    assert calls == [[4, 5, 6]] and again.timed_images == 6
    assert again.npz.read_bytes() == whole.npz.read_bytes()
    sampled(models, tmp_path / "killed")
    assert len(calls) == 1


def test_samples_of_another_setting_are_refused(models, tmp_path):
    sampled(models, tmp_path / "a")
    refused(lambda: sampled(models, tmp_path / "a", seed=2), "another seed")
    refused(lambda: sampled(models, tmp_path / "a", method="ar", guidance=1.5), "method, guidance")
    refused(lambda: sampled(models, tmp_path / "a", n=8), "another labels")
    refused(lambda: sampled((random_model("tiny", 3, vocab_size=64, block_size=16, num_classes=5), models[1]), tmp_path / "a"), "another model")
    (tmp_path / "b").mkdir()
    (tmp_path / "b/notes.txt").write_text("mine")
    refused(lambda: sampled(models, tmp_path / "b"), "empty folder")
    refused(lambda: sampled((Guided(models[0], 2.0), models[1]), tmp_path / "c"), "guidance=")
    refused(lambda: sampled(models, tmp_path / "c", guidance=0.5), "guidance = 0.5")
    refused(lambda: sampled(models, tmp_path / "c", slots=0), "slots = 0")
    refused(lambda: sampled(models, tmp_path / "c", batch=0), "batch = 0")
    refused(lambda: sample.sample_images(*models, torch.tensor([9]), tmp_path / "c"), "class ids")
    assert not (tmp_path / "c").exists()


def test_a_method_object_is_kept_by_its_fields(models, tmp_path):
    assert sampled(models, tmp_path / "a", n=2, method=METHODS["hbsjd"]).images == 2
    assert "Greedy" in json.loads((tmp_path / "a/samples.json").read_text())["method"]


def test_labels():
    assert torch.bincount(sample.labels(10, 4, "balanced")).tolist() in ([2, 2, 3, 3], [2, 3, 2, 3], [2, 3, 3, 2], [3, 2, 2, 3], [3, 2, 3, 2], [3, 3, 2, 2])
    iid = sample.labels(4000, 4, frequency=torch.tensor([1, 1, 2, 0]))
    assert torch.allclose(torch.bincount(iid, minlength=4) / 4000, torch.tensor([0.25, 0.25, 0.5, 0]), atol=0.03)
    assert (sample.labels(9, 4) == sample.labels(9, 4)).all() and (sample.labels(99, 4, seed=1) != sample.labels(99, 4)).any()
    refused(lambda: sample.labels(3, 4, "even"), "iid", "balanced")
    refused(lambda: sample.labels(0, 4), "at least 1")


# --- bad input, and the command line ---

def folder_of(path, *images, mode="RGB", ending="png"):
    path.mkdir()
    for i, image in enumerate(images):
        Image.fromarray(image.permute(1, 2, 0).numpy()).convert(mode).save(path / f"{i:03d}.{ending}")
    return path


def test_bad_folders(emoji, tmp_path):
    images = emoji[1]
    good = folder_of(tmp_path / "good", *images[:3])
    assert (features.read_images(good) == images[:3]).all()
    assert features.read_images(folder_of(tmp_path / "jpeg", *images[:3], ending="jpg")).shape == (3, 3, 32, 32)
    for mode, word in (("L", "grey"), ("RGBA", "alpha"), ("P", "palette")):
        refused(lambda mode=mode: features.read_images(folder_of(tmp_path / mode, images[0], mode=mode)), "000.png", word, "RGB")
    Image.fromarray(np.zeros((16, 24, 3), np.uint8)).save(good / "010.png")
    refused(lambda: features.read_images(good), "different sizes", "000.png 32 x 32", "010.png 24 x 16")
    (good / "010.png").write_bytes((good / "000.png").read_bytes()[:200])
    refused(lambda: features.read_images(good), "010.png", "cut off")
    (good / "notes.txt").write_text("stray")
    refused(lambda: features.read_images(good), "notes.txt")
    (tmp_path / "empty").mkdir()
    refused(lambda: features.read_images(tmp_path / "empty"), "no PNG or JPEG")
    refused(lambda: features.read_images(tmp_path / "nowhere"), "neither a folder")
    np.savez(tmp_path / "bad.npz", arr_0=np.zeros((3, 8, 8, 4), np.uint8))
    refused(lambda: features.read_images(tmp_path / "bad.npz"), "arr_0", "[3, 8, 8, 4]")
    np.savez(tmp_path / "bad.npz", other=np.zeros(3))
    refused(lambda: features.read_images(tmp_path / "bad.npz"), "arr_0")
    whole = (tmp_path / "bad.npz").read_bytes()
    for damaged in (b"", b"PK", whole[:60], whole[:-9]):
        (tmp_path / "bad.npz").write_bytes(damaged)
        refused(lambda: features.read_images(tmp_path / "bad.npz"), "bad.npz", "cut off")
    with open(tmp_path / "bad.npz", "wb") as f:
        np.save(f, np.zeros(3))
    refused(lambda: features.read_images(tmp_path / "bad.npz"), "no readable .npz")
    np.savez(tmp_path / "bad.npz", mu=np.zeros(64), sigma=np.eye(64))
    refused(lambda: features.statistics(tmp_path / "bad.npz"), "2048", "(64,)")


def test_bad_sets():
    refused(lambda: evaluation.evaluate(made(9), made(9, size=(64, 64))), "64 x 64", "32 x 32")
    refused(lambda: evaluation.evaluate(made(9), made(9, extractor="inception")), "inception", "efficientnet-lite0")
    refused(lambda: evaluation.evaluate(made(9), made(9, checksum="1" * 64)), "different weights")
    refused(lambda: evaluation.evaluate(made(9), made(3)), "k = 3", "at least 4", "there are 3")
    refused(lambda: evaluation.evaluate(made(3), None), "at least 4", "there are 3")
    first, second = (evaluation.evaluate(made(n), made(9), clean_fid=False)["fd"] for n in (8, 9))
    refused(lambda: scores.difference(first, second), "8 and of 9")
    refused(lambda: scores.difference(first, evaluation.evaluate(made(8), made(7), clean_fid=False)["fd"]), "not the same score")
    refused(lambda: scores.seed_difference([1.0], [2.0]), "two or more seeds")


def test_missing_and_altered_weights(tmp_path, monkeypatch, fake_inception):
    refused(lambda: features.extractor("resnet"), "resnet", "efficientnet-lite0", "inception")
    absent = tmp_path / "elsewhere" / features.INCEPTION
    refused(lambda: features.extractor("inception", weights=absent), str(absent), "https://", "copy it there")
    refused(lambda: features.extractor("inception", weights=tmp_path / "other.pt"), features.INCEPTION)
    fake_inception.write_bytes(b"altered")
    refused(lambda: features.extractor("inception", weights=fake_inception), "sha256")
    refused(lambda: image_text.clip_scorer("ViT-B-32", "openai"), "ViT-B-32 (openai)", "looked for in", "pretrained")
    refused(lambda: image_text.clip_scorer("ViT-B-32"), "pretrained = None", "openai")
    refused(lambda: image_text.clip_scorer("ViT-B-33", "openai"), "no model 'ViT-B-33'")
    refused(lambda: image_text.clip_scorer(f"local-dir:{tmp_path}"), str(tmp_path))
    monkeypatch.setattr(features, "find_spec", lambda name: None)
    refused(lambda: features.extractor("efficientnet-lite0"), "timm", "pip install")


def test_an_open_clip_model_of_local_weights(emoji, tmp_path):
    import open_clip

    vision, text = dict(image_size=32, layers=1, width=64, patch_size=16), dict(context_length=77, width=64, heads=2, layers=1)
    config = dict(embed_dim=16, vision_cfg=vision, text_cfg=text)
    (tmp_path / "open_clip_config.json").write_text(json.dumps(dict(model_cfg=config)))
    torch.save(open_clip.CLIP(**config).state_dict(), tmp_path / "open_clip_pytorch_model.bin")
    scorer = image_text.clip_scorer(f"local-dir:{tmp_path}", device="cpu")
    found = image_text.image_text_scores(scorer, emoji[1][:4], torch.arange(4), image_text.imagenet_prompts()[:4], resamples=5)
    assert found["cosine"].name.startswith("mean cosine (CLIP local-dir:") and -1 <= found["cosine"].value <= 1 and "a photo of a" in found["cosine"].note


def test_command_line(emoji, tmp_path, capsys):
    captions, images = emoji
    samples, reference = folder_of(tmp_path / "samples", *images[::2]), folder_of(tmp_path / "reference", *images[1::2])
    texts, out = tmp_path / "captions.txt", tmp_path / "out.json"
    texts.write_text("\n".join(captions[::2]) + "\n")
    options = ["--reference", str(reference), "--captions", str(texts), "--device", "cpu", "--json", str(out)]
    evaluation.main([str(samples), *options])
    printed, rows = capsys.readouterr().out, json.loads(out.read_text())
    assert {"fd", "kid", "is", "precision", "recall", "density", "coverage", "cosine", "cosine_100", "zero_shot"} == rows.keys()
    assert all(row["score"] in printed for row in rows.values()) and "32 images for 1280 features" in printed
    assert rows["fd"]["low"] < rows["fd"]["value"] < rows["fd"]["high"]
    texts.write_text("one\n")
    for argv, phrase in (
        ([str(samples), "--captions", str(texts)], "1 captions for 32 images"),
        ([str(samples), "--captions", str(tmp_path / "nothing.txt")], "no such file"),
        ([str(samples)], "give --reference"),
        ([str(tmp_path / "nowhere"), *options], "nowhere"),
    ):
        with pytest.raises(SystemExit) as stopped:
            evaluation.main(argv)
        assert phrase in str(stopped.value) and "\n" not in str(stopped.value)
