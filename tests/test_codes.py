"""An ImageNet-style folder as codes: what is encoded, killed runs that go on, LlamaGen's own files, and one clear line for bad input."""
import json
import re
from argparse import Namespace
from importlib import import_module

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from test_bad_input import refused

from hbsjd import codes
from hbsjd.data import to_unit
from hbsjd.distillation.trainer import Trainer, recipe
from hbsjd.models import vq
from hbsjd.models.checkpoints import sha256
from hbsjd.models.llamagen import random_model

CLASSES = ["n01440764", "n01443537", "n02099601"]


def noise(height: int, width: int, channels: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(256, size=(height, width, channels), dtype=np.uint8).squeeze()


@pytest.fixture(scope="module")
def tokenizer():
    return vq.load("small", device="cpu")


@pytest.fixture
def source(tmp_path):
    """Three classes, nine images: JPEG and PNG, wide and high, smaller and larger than 32 px, grey, with a palette and with alpha."""
    folder, seed = tmp_path / "train", iter(range(99))
    for name in reversed(CLASSES):
        (folder / name).mkdir(parents=True)
    for name, height, width in ("b.JPEG", 40, 33), ("a.JPEG", 90, 70), ("c.jpg", 20, 25), ("d.png", 32, 150):
        Image.fromarray(noise(height, width, 3, next(seed))).save(folder / CLASSES[0] / name)
    Image.fromarray(noise(48, 48, 1, next(seed))).save(folder / CLASSES[1] / "grey.png")
    Image.fromarray(noise(32, 32, 1, next(seed))).save(folder / CLASSES[1] / "grey.JPEG")
    Image.fromarray(noise(64, 64, 4, next(seed))).save(folder / CLASSES[2] / "alpha.png")
    Image.fromarray(noise(50, 40, 3, next(seed))).quantize(16).save(folder / CLASSES[2] / "palette.png")
    Image.fromarray(noise(33, 32, 3, next(seed))).save(folder / CLASSES[2] / "z.png")
    (folder / ".DS_Store").write_bytes(b"")
    (folder / "LOC_synset_mapping.txt").write_text("beside the folders, and none of them")
    return folder


NAMES = ["n01440764/a.JPEG", "n01440764/b.JPEG", "n01440764/c.jpg", "n01440764/d.png", "n01443537/grey.JPEG", "n01443537/grey.png",
         "n02099601/alpha.png", "n02099601/palette.png", "n02099601/z.png"]
LABELS = [0, 0, 0, 0, 1, 1, 2, 2, 2]
HOW = dict(shard_images=4, batch=3)


def files(folder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# ---- crops -------------------------------------------------------------------------------------------------------------------------------


def written(path, pixels, mode=None, **options):
    image = Image.fromarray(pixels)
    (image if mode is None else image.convert(mode)).save(path, **options)
    return path


def test_an_image_of_the_right_size_is_left_alone(tmp_path):
    pixels = noise(32, 32, 3, 0)
    crop = codes.read_crop(written(tmp_path / "a.png", pixels), 32)
    assert crop.dtype == torch.uint8 and np.array_equal(crop.permute(1, 2, 0), pixels)


def test_a_wide_and_a_high_image_are_cropped_in_the_middle(tmp_path):
    pixels = noise(32, 75, 3, 1)
    assert np.array_equal(codes.read_crop(written(tmp_path / "a.png", pixels), 32).permute(1, 2, 0), pixels[:, 21:53])
    assert np.array_equal(codes.read_crop(written(tmp_path / "b.png", pixels.swapaxes(0, 1)), 32).permute(1, 2, 0), pixels.swapaxes(0, 1)[21:53])


def test_a_large_image_is_halved_by_averages(tmp_path):
    pixels = noise(128, 140, 3, 2)
    means = pixels.reshape(64, 2, 70, 2, 3).astype(float).mean((1, 3)).round().reshape(32, 2, 35, 2, 3).mean((1, 3))
    crop = codes.read_crop(written(tmp_path / "a.png", pixels), 32).permute(1, 2, 0).numpy()
    assert np.abs(crop - means[:, 1:33]).max() <= 2  # roundings


def test_what_is_between_is_resized_bicubically(tmp_path):
    pixels = noise(50, 70, 3, 3)
    expected = np.asarray(Image.fromarray(pixels).resize((45, 32), Image.Resampling.BICUBIC))[:, 6:38]
    assert np.array_equal(codes.read_crop(written(tmp_path / "a.png", pixels), 32).permute(1, 2, 0), expected)


def test_every_kind_of_image_becomes_rgb_on_white(tmp_path):
    grey, rgba = noise(32, 32, 1, 4), noise(32, 32, 4, 5)
    rgba[:16, :, 3], rgba[16:, :, 3] = 0, 255
    assert (codes.read_crop(written(tmp_path / "grey.png", grey), 32) == torch.from_numpy(grey)).all()
    crop = codes.read_crop(written(tmp_path / "rgba.png", rgba), 32).permute(1, 2, 0).numpy()
    assert (crop[:16] == 255).all() and np.array_equal(crop[16:], rgba[16:, :, :3])
    half = np.full((32, 32, 4), [0, 100, 200, 51], np.uint8)  # a fifth of the colour on white
    assert np.abs(codes.read_crop(written(tmp_path / "half.png", half), 32)[:, 0, 0].numpy().astype(int) - [204, 224, 244]).max() <= 1
    see_through = codes.read_crop(written(tmp_path / "p.png", np.zeros((32, 32), np.uint8), "P", transparency=0), 32)
    assert (see_through == 255).all()
    assert codes.read_crop(written(tmp_path / "cmyk.jpg", noise(32, 32, 3, 6), "CMYK"), 32).shape == (3, 32, 32)


# ---- an ImageNet-style folder ------------------------------------------------------------------------------------------------------------


def test_codes_are_those_of_the_crops(source, tokenizer, tmp_path):
    made = codes.encode_folder(source, tmp_path / "codes", tokenizer, 32, **HOW)
    assert (len(made), made.augmentations, made.tokens, made.vocab_size, made.num_classes) == (9, 1, 256, 512, 3)
    assert codes.file_names(tmp_path / "codes") == NAMES
    labels, tokens = made.take(range(9), generator())
    crops = torch.stack([codes.read_crop(source / name, 32) for name in NAMES])
    expected = torch.cat([tokenizer.encode(to_unit(some)) for some in (crops[0:3], crops[3:4], crops[4:7], crops[7:8], crops[8:9])])
    assert labels.tolist() == LABELS and torch.equal(tokens, expected) and tokens.dtype == labels.dtype == torch.int64
    rows = torch.tensor([8, 0, 5, 5])
    assert torch.equal(made.take(rows, generator())[1], expected[rows]) and made.take(rows, generator())[0].tolist() == [2, 0, 1, 1]


def test_shards_and_index_say_what_they_are(source, tokenizer, tmp_path):
    folder = tmp_path / "deep" / "codes"
    codes.encode_folder(source, folder, tokenizer, 32, **HOW)
    assert list(files(folder)) == ["00000.safetensors", "00001.safetensors", "00002.safetensors", "files.txt", "index.json"]
    shard, index = load_file(folder / "00001.safetensors"), json.loads((folder / "index.json").read_text())
    assert shard["codes"].shape == (4, 1, 256) and shard["codes"].dtype == shard["labels"].dtype == torch.int16
    assert shard["labels"].tolist() == LABELS[4:8]
    assert load_file(folder / "00002.safetensors")["codes"].shape == (1, 1, 256)
    assert (index["classes"], index["images"], index["size"], index["shard_images"]) == (CLASSES, 9, 32, 4)
    assert index["shards"] == {name: sha256(folder / name) for name in ("00000.safetensors", "00001.safetensors", "00002.safetensors")}
    assert index["files_sha256"] == sha256(folder / "files.txt")


def test_ids_that_need_more_than_16_bits():
    values = torch.tensor([0, 32767, 32768])
    assert codes.narrow(values[:2], 2**15).dtype == torch.int16 and torch.equal(codes.narrow(values, 2**15 + 1).long(), values)


def test_a_killed_run_goes_on_and_gives_the_same_files(source, tokenizer, tmp_path, monkeypatch):
    codes.encode_folder(source, tmp_path / "whole", tokenizer, 32, **HOW)
    encode, encoded = tokenizer.encode, []

    def killed(images):
        if len(encoded) == 3:  # in the second shard
            raise KeyboardInterrupt
        encoded.append(len(images))
        return encode(images)

    with monkeypatch.context() as patch:
        patch.setattr(tokenizer, "encode", killed)
        with pytest.raises(KeyboardInterrupt):
            codes.encode_folder(source, tmp_path / "killed", tokenizer, 32, **HOW)
    assert encoded == [3, 1, 3] and "00001.safetensors" not in files(tmp_path / "killed")
    refused(lambda: codes.open(tmp_path / "killed"), "1 of 3 shards", "same command")

    encoded.clear()
    with monkeypatch.context() as patch:
        patch.setattr(tokenizer, "encode", lambda images: encoded.append(len(images)) or encode(images))
        codes.encode_folder(source, tmp_path / "killed", tokenizer, 32, **HOW)
        assert encoded == [3, 1, 1] and files(tmp_path / "killed") == files(tmp_path / "whole")
        codes.encode_folder(source, tmp_path / "killed", tokenizer, 32, **HOW)
        assert len(encoded) == 3, "nothing is made again"
        (tmp_path / "killed/00001.safetensors").unlink()
        codes.encode_folder(source, tmp_path / "killed", tokenizer, 32, **HOW)
        assert encoded == [3, 1, 1, 3, 1] and files(tmp_path / "killed") == files(tmp_path / "whole"), "but what someone deleted is"


def test_the_trainer_takes_batches(source, tokenizer, tmp_path):
    made = codes.encode_folder(source, tmp_path / "codes", tokenizer, 32, **HOW)
    labels, tokens = made.batch(generator(3), 64)
    again = made.batch(generator(3), 64)
    assert torch.equal(labels, again[0]) and torch.equal(tokens, again[1]) and labels.shape == (64,) and tokens.shape == (64, 256)
    known = {tuple(row.tolist()): label for label, row in zip(*(x.unbind() for x in made.take(range(9), generator())))}
    assert all(known[tuple(row.tolist())] == label for label, row in zip(labels, tokens)) and len(tokens.unique(dim=0)) > 5
    student, teacher = (random_model("tiny", seed, vocab_size=512, block_size=256, num_classes=3) for seed in (0, 1))
    trainer = Trainer(student, teacher, made.batch, None, recipe("kd", steps=1, batch=4, micro_batch=4))
    (log,) = trainer.run()
    assert log["train/tokens"] == 4 * 256 and 0 < log["train/loss"] < 100


# ---- LlamaGen's files --------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def ten_crop(tmp_path):
    """Five images, ten crops of 16 codes each, in LlamaGen's layout."""
    kept = np.random.default_rng(0).integers(16384, size=(5, 10, 16))
    for part in ("codes", "labels"):
        (tmp_path / f"imagenet384_{part}").mkdir()
    for i, (crops, label) in enumerate(zip(kept, (7, 0, 999, 7, 3))):
        np.save(tmp_path / f"imagenet384_codes/{i}.npy", crops[None])
        np.save(tmp_path / f"imagenet384_labels/{i}.npy", np.array([label]))
    return tmp_path, torch.from_numpy(kept)


def test_ten_crop_files_are_read_as_they_are(ten_crop):
    folder, kept = ten_crop
    read = codes.open(folder)
    assert (len(read), read.augmentations, read.tokens, read.vocab_size, read.num_classes) == (5, 10, 16, 16384, 1000)
    rows = torch.tensor([4, 2, 2, 0, 1, 3])
    labels, tokens = read.take(rows, generator(5))
    choice = torch.randint(10, (6,), generator=generator(5))
    assert labels.tolist() == [3, 999, 999, 7, 0, 7] and torch.equal(tokens, kept[rows, choice]) and tokens.dtype == torch.int64
    drawn = read.take(torch.zeros(300, dtype=torch.long), generator())[1]
    assert torch.equal(drawn.unique(dim=0), kept[0].unique(dim=0)), "every crop is drawn"
    assert torch.equal(codes.open(folder / "imagenet384_codes").batch(generator(1), 7)[1], read.batch(generator(1), 7)[1])


def test_ten_crop_files_that_are_refused(ten_crop):
    folder, kept = ten_crop
    kind, labels = folder / "imagenet384_codes", folder / "imagenet384_labels"

    def altered(path, array):
        before = path.read_bytes()
        np.save(path, array)
        refused(lambda: codes.open(folder).take([0], generator()), path.parent.name, path.name)
        path.write_bytes(before)

    altered(kind / "0.npy", np.full((1, 10, 16), 16384))
    altered(kind / "0.npy", np.full((1, 10, 16), -1))
    altered(kind / "0.npy", np.zeros((1, 10, 16)))
    altered(kind / "0.npy", np.zeros((10, 16), int))
    altered(labels / "0.npy", np.zeros(1))
    np.save(labels / "1.npy", np.array([1000]))
    refused(lambda: codes.open(folder).take([1], generator()), "class ids", "0..999")
    np.save(kind / "2.npy", np.zeros((1, 2, 16), int))
    refused(lambda: codes.open(folder).take([2], generator()), "2.npy", "(1, 2, 16)", "(1, 10, 16)")
    (kind / "3.npy").write_bytes(b"")
    refused(lambda: codes.open(folder).take([0, 3], generator()), "3.npy", "no readable")
    (labels / "4.npy").unlink()
    refused(lambda: codes.open(folder), "imagenet384_labels", "4 labels for 5")
    (kind / "0.npy").unlink()
    refused(lambda: codes.open(folder), "imagenet384_codes", "misses 0.npy")
    (folder / "imagenet256_codes").mkdir()
    refused(lambda: codes.open(folder), "several sizes", "imagenet256_codes, imagenet384_codes")
    refused(lambda: codes.open(folder / "imagenet256_codes"), "misses 0.npy")
    refused(lambda: codes.open(folder / "elsewhere"), "no codes", "00_prepare", "imagenet<size>_codes")


# ---- bad input ---------------------------------------------------------------------------------------------------------------------------


def test_another_folder_tokenizer_or_size_is_refused(source, tokenizer, tmp_path):
    def encode(size=32, of=tokenizer, **how):
        return codes.encode_folder(source, tmp_path / "codes", of, size, **HOW | how)

    encode()
    before = files(tmp_path / "codes")
    refused(lambda: encode(size=64), "another size")
    other = vq.VQModel(tokenizer.config).eval()
    refused(lambda: encode(of=other), "another tokenizer")
    refused(lambda: encode(shard_images=5), "another shard_images")
    Image.fromarray(noise(33, 33, 3, 50)).save(source / CLASSES[1] / "new.png")
    refused(lambda: encode(), "changed", "n01443537/new.png)")
    (source / CLASSES[1] / "grey.png").unlink()
    refused(lambda: encode(), "changed", "n01443537/grey.png and 1 more")
    (source / CLASSES[1] / "new.png").rename(source / CLASSES[1] / "grey.png")
    refused(lambda: encode(), "changed", "n01443537/grey.png)")  # of another size
    assert files(tmp_path / "codes") == before
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/notes.txt").write_text("mine")
    refused(lambda: codes.encode_folder(source, tmp_path / "mine", tokenizer, 32), "empty folder")
    refused(lambda: codes.encode_folder(source, source / "LOC_synset_mapping.txt", tokenizer, 32), "cannot be written")
    for size in (0, 33):
        refused(lambda size=size: codes.encode_folder(source, tmp_path / "new", tokenizer, size), f"size = {size}", "multiple of 2")
    refused(lambda: encode(batch=0), "batch = 0")
    assert not (tmp_path / "new").exists()


def test_a_folder_that_cannot_be_read_is_named(source, tokenizer, tmp_path):
    def encode(of, name="new"):
        return lambda: codes.encode_folder(of, tmp_path / "out" / name, tokenizer, 32, **HOW)

    refused(encode(source.parent), "train/LOC_synset_mapping.txt is no PNG or JPEG image", "a folder of images for each class")
    refused(encode(source / CLASSES[0]), "holds no folders")
    refused(encode(source / "no"), "is no folder")
    path = source / CLASSES[2] / "z.png"
    whole = path.read_bytes()
    for name, damaged in ("cut off", whole[: len(whole) // 2]), ("empty", b""), ("text", b"not an image"):
        path.write_bytes(damaged)
        refused(encode(source, name), "n02099601/z.png", "no readable image")
    path.rename(path.with_name("z.txt"))
    refused(encode(source), "z.txt is no PNG or JPEG image")
    path.with_name("z.txt").unlink()
    (source / "n03000000").mkdir()
    refused(encode(source), "n03000000 holds no images")
    assert not (tmp_path / "out/new").exists()


def test_damaged_shards_are_refused(source, tokenizer, tmp_path):
    folder = tmp_path / "codes"
    codes.encode_folder(source, folder, tokenizer, 32, **HOW)
    index, path, shard = json.loads((folder / "index.json").read_text()), folder / "00001.safetensors", load_file(folder / "00001.safetensors")

    def replaced(codes_nAT, labels):
        """As if a shard had been made so."""
        save_file(dict(codes=codes_nAT, labels=labels), path)
        (folder / "index.json").write_text(json.dumps(index | dict(shards=index["shards"] | {path.name: sha256(path)})))
        return lambda: codes.open(folder).take([5], generator())

    refused(replaced(torch.full_like(shard["codes"], 512), shard["labels"]), path.name, "codes outside 0..511")
    refused(replaced(torch.full_like(shard["codes"], -1), shard["labels"]), path.name, "codes outside 0..511")
    refused(replaced(shard["codes"], torch.full_like(shard["labels"], 3)), path.name, "class ids outside 0..2")
    refused(replaced(shard["codes"][:2], shard["labels"]), path.name, "shapes", "[4, 1, 256]")
    replaced(shard["codes"], shard["labels"])
    read = codes.open(folder)
    read.take([0, 8], generator())  # of the other shards
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    refused(lambda: read.take([0, 5], generator()), path.name, "checksum", "delete it")
    path.unlink()
    refused(lambda: read.take([5], generator()), path.name, "is missing")
    for rows in ([-1], [9], [[0]], [0.0]):
        refused(lambda rows=rows: read.take(rows, generator()), "rows", "0..8")
    (folder / "index.json").write_text("{")
    refused(lambda: codes.open(folder), "index.json", "damaged")


# ---- the script --------------------------------------------------------------------------------------------------------------------------


def script(**arguments):
    settings = dict(scale="paper", imagenet=None, tokenizer="small", size=32, batch=4, out=None, device="cpu", seed=0, fresh=False, retrain=False)
    import_module("experiments.00_prepare").main(Namespace(**settings | arguments))


def test_the_script_encodes_a_folder_and_draws_what_it_made(source, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HBSJD_CACHE", str(tmp_path / "cache"))
    script(imagenet=source)
    folder = tmp_path / "cache/imagenet-codes-small-32"
    said = capsys.readouterr().out
    assert "9 images of 3 classes, 256 codes each" in said and "need all 1000 folders" in said and str(folder) in said
    assert float(re.search(r"mean PSNR of the 8 images in .*: (\d+\.\d+) dB", said)[1]) > 5
    picture = np.asarray(Image.open(folder / "checked.png"))
    rows = [0, 1, 2, 3, 4, 5, 6, 8]
    assert picture.shape == (64, 8 * 32, 3)
    for column, row in enumerate(rows):
        crop = codes.read_crop(source / NAMES[row], 32).permute(1, 2, 0)
        assert np.array_equal(picture[:32, 32 * column : 32 * column + 32], crop)
    before = files(folder)
    script(imagenet=source, out=folder)
    assert files(folder) == before


def test_the_script_says_what_it_needs(source, tmp_path):
    refused(lambda: script(), "--imagenet DIR", "--scale small")
    refused(lambda: script(imagenet=source, out=tmp_path / "codes", retrain=True), "--retrain")
    refused(lambda: script(imagenet=source, out=tmp_path / "codes", fresh=True), "--fresh")
    refused(lambda: script(imagenet=source, scale="small"), "--scale paper")
    assert not (tmp_path / "codes").exists()


def test_the_script_says_when_a_batch_does_not_fit(source, tmp_path, monkeypatch):
    def full(*args, **how):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(import_module("experiments.00_prepare"), "encode_folder", full)
    refused(lambda: script(imagenet=source, out=tmp_path), "--batch 4")
