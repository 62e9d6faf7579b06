"""python -m hbsjd.sample: the picture is the rollout's, says how it was made, and is made again from that; one clear line for bad input."""
import json
from contextlib import redirect_stdout
from dataclasses import asdict
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from hbsjd import load_model, rollout, sample
from hbsjd.data import openmoji_classes, to_uint8
from hbsjd.models import vq
from hbsjd.models.checkpoints import fingerprint, write_weights
from hbsjd.models.llamagen import random_model
from hbsjd.results import version

CAT_FACE = openmoji_classes().index("Smileys & Emotion: cat-face")
OPTIONS = ("model", "classes", "per_class", "method", "guidance", "temperature", "top_k", "top_p", "seed", "slots", "dtype", "tokenizer")


def run(*argv) -> str:
    """What the command prints."""
    out = StringIO()
    with redirect_stdout(out):
        sample.main([str(word) for word in argv])
    return out.getvalue()


def refused(*argv, phrases: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit) as stop:
        run(*argv)
    message = stop.value.code
    assert message.startswith("python -m hbsjd.sample: ") and "\n" not in message and len(message) < 400
    assert all(phrase in message for phrase in phrases), message


def read(path) -> tuple[np.ndarray, dict]:
    with Image.open(path) as image:
        return np.asarray(image), json.loads(image.text["hbsjd"])


def again(made: dict, **other) -> list[str]:
    """The command line that a picture's parameters stand for."""
    words = []
    for name in OPTIONS:
        value = (made | other)[name]
        words += [f"--{name.replace('_', '-')}", ",".join(map(str, value)) if isinstance(value, list) else str(value)]
    return words


@pytest.fixture(scope="module")
def bundled(tmp_path_factory):
    """A picture of the bundled student, and what was printed."""
    path = tmp_path_factory.mktemp("pictures") / "new" / "samples.png"
    said = run("--model", "small-student", "--classes", "14,Cat-Face", "--per-class", 2, "--seed", 1, "--device", "cpu", "--out", path)
    return path, said


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A random model of 16 tokens and the small tokenizer's vocabulary, as a file."""
    path = tmp_path_factory.mktemp("models") / "tiny.safetensors"
    model = random_model("tiny", vocab_size=512, block_size=16, num_classes=5)
    write_weights(path, model.state_dict(), dict(config=asdict(model.config)))
    return path


# ---- the picture -------------------------------------------------------------------------------------------------------------------------


def test_the_picture_is_the_rollout(bundled):
    picture, made = read(bundled[0])
    model, tokenizer = load_model("small-student", device="cpu"), vq.load("small", device="cpu")
    classes = torch.tensor([14, 14, CAT_FACE, CAT_FACE])
    images = to_uint8(tokenizer.decode(rollout(model, classes, guidance=2.0, seed=1).tokens, clamp=False)).permute(0, 2, 3, 1)
    assert picture.shape == (2 * 128, 2 * 128, 3)
    for i, image in enumerate(images.numpy()):
        row, column = divmod(i, 2)
        assert np.array_equal(picture[128 * row : 128 * row + 128, 128 * column : 128 * column + 128], np.kron(image, np.ones((4, 4, 1), np.uint8)))
    assert made["weights"] == fingerprint(model) and made["tokenizer_weights"] == fingerprint(tokenizer)


def test_the_picture_says_how_it_was_made(bundled):
    _, made = read(bundled[0])
    known = dict(
        model="small-student", tokenizer="small", classes=[14, CAT_FACE], per_class=2, method="hbsjd_gumbel", guidance=2.0, temperature=1.0, top_k=0,
        top_p=1.0, seed=1, slots=32, dtype="float32", hbsjd=version("hbsjd"), torch=torch.__version__,
    )
    assert {name: made[name] for name in known} == known and made["device"]


def test_what_is_printed(bundled):
    path, said = bundled
    lines = dict(line.split(maxsplit=1) for line in said.splitlines())
    assert list(lines) == ["model", "method", "seconds", "images/s", "NFE", "committed", "picture"]
    assert lines["model"].startswith("small-student: 5,395,456 parameters, float32") and lines["picture"] == str(path)
    assert lines["method"] == "hbsjd_gumbel: samples of the model guided at 2"
    seconds, rate = float(lines["seconds"].split()[0]), float(lines["images/s"])
    assert seconds * rate == pytest.approx(4, rel=0.05)
    committed = float(lines["committed"].split()[0])
    assert 256 / 17 <= int(lines["NFE"]) < 256 and 1 < committed <= 17 and int(lines["NFE"]) * committed >= 250


def test_a_picture_is_made_again_from_what_it_says(bundled, tmp_path):
    picture, made = read(bundled[0])
    run(*again(made), "--device", "cpu", "--out", tmp_path / "again.png")
    same, said = read(tmp_path / "again.png")
    assert np.array_equal(same, picture) and said == made


def test_options_reach_the_rollout_and_batches_do_not_change_images(tiny, tmp_path, monkeypatch):
    asked = dict(temperature=0.8, top_k=100, top_p=0.95, seed=7, guidance=1.5)
    options = [word for name, value in asked.items() for word in (f"--{name.replace('_', '-')}", value)]
    calls, decode = [], sample.rollout
    monkeypatch.setattr(sample, "rollout", lambda *args, **how: calls.append(how) or decode(*args, **how))
    argv = "--model", tiny, "--classes", "4,0,2", "--per-class", 3, *options, "--device", "cpu"
    said = [run(*argv, "--slots", slots, "--out", tmp_path / f"{slots}.png") for slots in (9, 4)]
    assert all(asked.items() <= how.items() for how in calls)
    assert [how["images"].tolist() for how in calls] == [list(range(9)), [0, 1, 2, 3], [4, 5, 6, 7], [8]]
    first, second = (read(tmp_path / f"{slots}.png") for slots in (9, 4))
    assert first[0].shape == (3 * 128, 3 * 128, 3)
    assert np.abs(first[0].astype(int) - second[0]).max() <= 1  # the tokens are the same, the tokenizer rounds by batch
    assert asked.items() <= first[1].items() and first[1]["model"] == "tiny.safetensors", "no path of a machine"
    forwards = [int(text.partition("NFE")[2].split()[0]) for text in said]
    assert 1 <= forwards[0] <= forwards[1] <= 3 * 16


def test_large_images_are_not_enlarged():
    images = np.random.default_rng(0).integers(256, size=(6, 130, 130, 3), dtype=np.uint8)
    picture = sample.grid(images, 3)
    assert picture.shape == (2 * 130, 3 * 130, 3) and np.array_equal(picture[130:, 130:260], images[4])
    assert sample.grid(images[:1, :128, :128], 1).shape == (128, 128, 3) and sample.grid(images[:1, :65, :65], 1).shape == (65, 65, 3)


@pytest.mark.parametrize("method", ["ar_greedy", "hbsjd_adaptive"])
def test_other_methods(method, tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("HBSJD_CACHE", str(tmp_path / "cache"))
    argv = "--model", tiny, "--classes", 1, "--per-class", 2, "--method", method, "--dtype", "bfloat16", "--device", "cpu"
    said = run(*argv, "--out", tmp_path / "a.PNG")
    assert f"{method}: {'greedy decoding' if method == 'ar_greedy' else 'samples'} of the model guided at 2" in said
    assert read(tmp_path / "a.PNG")[1]["dtype"] == "bfloat16"


# ---- names of classes --------------------------------------------------------------------------------------------------------------------


def test_names_of_classes():
    config = load_model("small-student", device="cpu").config
    names = openmoji_classes()
    assert len(names) == 70 == config.num_classes
    for i, name in enumerate(names):
        assert sample.class_id(name, config) == sample.class_id(name.upper(), config) == sample.class_id(name.partition(": ")[2], config) == i
    assert sample.class_id("3", config) == 3


# ---- bad input ---------------------------------------------------------------------------------------------------------------------------


REFUSED = {
    "neither classes nor captions": ([], "either --classes", "--captions-file"),
    "both": (["--classes", "1", "--captions-file", "a.npz"], "either --classes", "--captions-file"),
    "class past the last": (["--classes", "71"], "class ids", "0..70"),
    "class negative": (["--classes=-1"], "class ids", "0..70"),
    "name misspelt": (["--classes", "3,cat-fase"], "'cat-fase'", "cat-face"),
    "name like nothing": (["--classes", "zzzzzz"], "'zzzzzz'", "openmoji_classes"),
    "name empty": (["--classes", "3,,4"], "no class is named ''"),
    "captions for a class-conditional model": (["--captions-file", "a.npz"], "--classes", "small-student"),
    "model misspelt": (["--classes", "1", "--model", "small-studnt"], "small-student"),
    "method misspelt": (["--classes", "1", "--method", "hbsjd_gumble"], "hbsjd_gumbel"),
    "tokenizer misspelt": (["--classes", "1", "--tokenizer", "smal"], "small"),
    "no image of a class": (["--classes", "1", "--per-class", "0"], "--per-class 0", "at least 1"),
    "no slots": (["--classes", "1", "--slots", "0"], "slots = 0"),
    "guidance below 1": (["--classes", "1", "--guidance", "0.5"], "guidance = 0.5"),
    "top_k past the vocabulary": (["--classes", "1", "--top-k", "513"], "top_k = 513"),
    "greedy with a filter": (["--classes", "1", "--method", "hbsjd", "--top-p", "0.9"], "greedy"),
    "no picture": (["--classes", "1", "--out", "samples.jpg"], "samples.jpg", ".png"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_one_clear_line(name, tmp_path, monkeypatch):
    argv, *phrases = REFUSED[name]
    monkeypatch.chdir(tmp_path)
    Path("samples.png").write_bytes(b"kept")
    refused(*argv, "--device", "cpu", phrases=phrases)
    assert Path("samples.png").read_bytes() == b"kept" and len(list(tmp_path.iterdir())) == 1


def test_places_where_no_picture_can_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "folder.png").mkdir()
    refused("--classes", 1, "--out", tmp_path / "file" / "a.png", phrases=("cannot be written", "another folder"))
    refused("--classes", 1, "--out", tmp_path / "folder.png", phrases=("must be a file", ".png"))


def test_names_of_a_model_whose_classes_are_not_known(tiny, tmp_path):
    refused("--model", tiny, "--classes", "cat-face", "--device", "cpu", "--out", tmp_path / "a.png", phrases=("bundled models only", "0..4"))


def test_a_tokenizer_of_another_vocabulary(tmp_path):
    model = random_model("tiny", vocab_size=64, block_size=16, num_classes=5)
    write_weights(tmp_path / "tiny.safetensors", model.state_dict(), dict(config=asdict(model.config)))
    argv = "--model", tmp_path / "tiny.safetensors", "--classes", 1, "--tokenizer", "small", "--device", "cpu", "--out", tmp_path / "a.png"
    refused(*argv, phrases=("small has 512 codes", "64", "--tokenizer"))


def test_a_device_that_is_not_there(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    refused("--classes", 1, "--device", "cuda", "--out", tmp_path / "a.png", phrases=("--device cuda", "no CUDA device"))


def test_what_does_not_fit_is_said_with_what_an_image_needs(tiny, tmp_path, monkeypatch):
    def full(*args, **how):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(sample, "rollout", full)
    (tmp_path / "a.png").write_bytes(b"kept")
    refused("--model", tiny, "--classes", 1, "--device", "cpu", "--out", tmp_path / "a.png", phrases=("--slots 4", "MB", "Give fewer"))
    assert (tmp_path / "a.png").read_bytes() == b"kept"


# ---- text-conditional models -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def texts(tmp_path):
    """A random text-conditional model, and two captions of 5 and 120 tokens."""
    model = random_model("tiny", vocab_size=512, block_size=16, model_type="t2i", cls_token_num=120, caption_dim=24)
    write_weights(tmp_path / "t2i.safetensors", model.state_dict(), dict(config=asdict(model.config)))
    mask = np.arange(120) >= np.array([[115], [0]])
    features = np.random.default_rng(0).standard_normal((2, 120, 24)).astype(np.float32) * mask[..., None]
    np.savez(tmp_path / "captions.npz", features=features, mask=mask)
    return tmp_path


def test_a_picture_of_captions(texts):
    files = "--model", texts / "t2i.safetensors", "--captions-file", texts / "captions.npz"
    argv = *files, "--tokenizer", "small", "--per-class", 2, "--device", "cpu"
    run(*argv, "--out", texts / "a.png")
    picture, made = read(texts / "a.png")
    assert picture.shape == (256, 256, 3) and made["captions_file"] == "captions.npz" and len(made["captions_sha256"]) == 64 and "classes" not in made
    run(*argv, "--slots", 3, "--out", texts / "b.png")
    assert np.abs(picture.astype(int) - read(texts / "b.png")[0]).max() <= 1
    run(*argv, "--seed", 1, "--out", texts / "c.png")
    assert not np.array_equal(picture, read(texts / "c.png")[0])


def test_classes_for_a_text_conditional_model(texts):
    argv = "--model", texts / "t2i.safetensors", "--device", "cpu", "--out", texts / "a.png"
    refused(*argv, "--classes", 1, phrases=("--captions-file", "instead of --classes"))
    refused(*argv, "--captions-file", texts / "none.npz", phrases=("none.npz",))
