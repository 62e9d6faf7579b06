"""Official LlamaGen files: sizes and keys, every wrapper, conversion, and what can be wrong with one. No hub and no real weights are needed."""
import argparse
import json
import os
import pickle
import weakref
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors.torch import load_file, save_file
from test_bad_input import refused

import hbsjd
from hbsjd.models import checkpoints, official, vq
from hbsjd.models.checkpoints import BUNDLED, OFFICIAL, WEIGHTS, fingerprint, llamagen_config, load_model, read_weights
from hbsjd.models.llamagen import SIZES, Config, LlamaGen, random_model

NAME = "c2i_tiny_256.pt"
ARGS = argparse.Namespace(gpt_model="GPT-B", lr=1e-4, betas=[0.9, 0.95], ema=False, results_dir="results")
TRAINED = dict(optimizer=dict(state={0: dict(exp_avg=torch.zeros(3))}, param_groups=[dict(lr=1e-4, params=[0])]), steps=7, args=ARGS)
WRAPPED = {
    "model": lambda state: dict(model=state) | TRAINED,
    "module": lambda state: dict(module=state, global_steps=7, ds_version="0.14"),
    "state_dict": lambda state: dict(state_dict=state, epoch=3),
    "flat": lambda state: state,
}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """Where converted files go."""
    monkeypatch.setenv("HBSJD_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache/official"


@pytest.fixture(scope="module")
def state():
    """The weights of the smallest size, mostly bfloat16."""
    state = random_model("tiny", vocab_size=32, num_classes=5, block_size=16).state_dict()
    return {key: x.clone() if "norm" in key else x.bfloat16() for key, x in state.items()}


@pytest.fixture
def saved(tmp_path, state):
    """The path of an official file."""
    torch.save(WRAPPED["model"](state), tmp_path / NAME)
    return tmp_path / NAME


def files(folder) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


def touch(path, second: int = 1) -> None:
    """Another time of change, whatever the clock's grain."""
    os.utime(path, ns=(0, second * 10**9))


def assert_holds(model, state, dtype=torch.float32) -> None:
    assert list(model.state_dict()) == list(state)
    assert all(torch.equal(x, state[key].to(dtype)) and x.dtype == dtype for key, x in model.state_dict().items())


# ---- sizes and keys ----------------------------------------------------------------------------------------------------------------------

COUNTS = {
    "b": 110_888_448, "l": 342_910_976, "xl": 774_699_520, "xxl": 1_410_972_672, "xxxl": 3_893_027_840, "1b": 1_199_616_000, "3b": 3_096_659_200,
}  # fmt: skip
HIDDEN = {"b": 2048, "l": 2816, "xl": 3584, "xxl": 4096, "xxxl": 6912, "1b": 5632, "3b": 8704, "7b": 11008}
T2I = dict(model_type="t2i", cls_token_num=120)


def shapes_of(model) -> dict[str, tuple[int, ...]]:
    return {key: tuple(x.shape) for key, x in model.state_dict().items()}


def meta(size: str, **overrides) -> LlamaGen:
    with torch.device("meta"):
        return LlamaGen(Config(**SIZES[size], **overrides))


def official_shapes(size: str, condition: dict) -> dict[str, tuple[int, ...]]:
    dim, hidden = SIZES[size]["dim"], HIDDEN[size]
    shapes = {"tok_embeddings.weight": (16384, dim), "norm.weight": (dim,), "output.weight": (16384, dim)}
    for i in range(SIZES[size]["n_layer"]):
        layer = {
            "attention.wqkv": (3 * dim, dim), "attention.wo": (dim, dim), "feed_forward.w1": (hidden, dim), "feed_forward.w2": (dim, hidden),
            "feed_forward.w3": (hidden, dim), "attention_norm": (dim,), "ffn_norm": (dim,),
        }  # fmt: skip
        shapes |= {f"layers.{i}.{name}.weight": shape for name, shape in layer.items()}
    return shapes | {f"cls_embedding.{name}": shape for name, shape in condition.items()}


@pytest.mark.parametrize("size", HIDDEN)
def test_class_conditional_sizes(size):
    model = meta(size, block_size=256)
    count = sum(p.numel() for p in model.parameters())
    assert count == COUNTS[size] if size in COUNTS else round(count / 1e8) == 66
    assert shapes_of(model) == official_shapes(size, {"embedding_table.weight": (1001, SIZES[size]["dim"])})


def test_text_conditional_size():
    model, dim = meta("xl", block_size=256, **T2I), 1280
    assert sum(p.numel() for p in model.parameters()) == 777_678_080
    condition = {"cap_proj.fc1.weight": (dim, 2048), "cap_proj.fc2.weight": (dim, dim), "uncond_embedding": (120, 2048)}
    assert shapes_of(model) == official_shapes("xl", condition)
    assert "cls_embedding.uncond_embedding" in dict(model.named_buffers())


@pytest.mark.parametrize("size", SIZES)
def test_sizes_are_read_off_the_shapes(size):
    assert llamagen_config("a.pt", None, "a.pt", shapes_of(meta(size))) == Config(**SIZES[size], block_size=576)
    small = meta(size, vocab_size=512, num_classes=7)
    assert llamagen_config("a.pt", None, "a.pt", shapes_of(small)) == Config(**SIZES[size], vocab_size=512, num_classes=7, block_size=576)


def test_sizes_of_a_text_conditional_model_are_read_off_the_shapes():
    assert llamagen_config("a.pt", None, "a.pt", shapes_of(meta("xl", **T2I))) == Config(**SIZES["xl"], **T2I, block_size=1024)
    assert llamagen_config("llamagen-t2i-xl-512", None, "a.pt", shapes_of(meta("xl", **T2I))).model_type == "t2i"


@pytest.mark.parametrize("name", OFFICIAL)
def test_official_names_say_what_their_files_say(name):
    repository, file, size, block_size, model_type = OFFICIAL[name]
    assert size in HIDDEN and name.split("-")[-2] == size and file.startswith(model_type) and f"_{size.upper()}_" in file
    assert block_size == (int(name.split("-")[-1]) // 16) ** 2 and name.split("-")[-1] in file
    assert repository == ("peizesun/llamagen_t2i" if model_type == "t2i" else "FoundationVision/LlamaGen")


def test_heads_of_100_dimensions_decode():
    """As 3B's: not a multiple of 8."""
    model = random_model(dim=200, n_head=2, vocab_size=11, block_size=9, num_classes=3)
    condition = torch.tensor([0, 2])
    tokens = hbsjd.rollout(model, condition, method="hbsjd").tokens
    logits = model(condition, tokens)
    assert (logits.gather(2, tokens[..., None])[..., 0] >= logits.amax(2) - 1e-4).all() and len(tokens.unique()) > 1


# ---- files -------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrapper", WRAPPED)
def test_each_wrapper_loads_bit_for_bit(tmp_path, cache, state, wrapper):
    torch.save(WRAPPED[wrapper](state), tmp_path / NAME)
    model = load_model(tmp_path / NAME, device="cpu")
    assert_holds(model, state)
    assert model.config == Config(**SIZES["tiny"], vocab_size=32, num_classes=5, block_size=256) and not model.training
    assert all(p.requires_grad for p in model.parameters())
    assert not [x for module in model.modules() for x in vars(module).values() if isinstance(x, torch.Tensor) and x.is_meta]
    plain = LlamaGen(model.config).eval()
    plain.load_state_dict(state)
    ids = torch.arange(256)[None] % 32
    assert torch.equal(model(torch.tensor([1]), ids), plain(torch.tensor([1]), ids))
    (made,) = cache.glob("*/c2i_tiny_256.safetensors")
    kept = load_file(made)
    assert kept.keys() == state.keys() and all(torch.equal(kept[key], x) and kept[key].dtype == x.dtype for key, x in state.items())


@pytest.mark.parametrize("suffix", [".pt", ".pth", ".bin", ".safetensors"])
def test_each_kind_of_file_loads(tmp_path, state, suffix):
    path = tmp_path / f"model{suffix}"
    save_file(state, path) if suffix == ".safetensors" else torch.save(state, path)
    assert_holds(load_model(path, device="cpu"), state)
    assert_holds(load_model(str(path), device="cpu"), state)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_dtype_is_respected(saved, state, dtype):
    assert_holds(load_model(saved, device="cpu", dtype=dtype), state, dtype)


def test_a_text_conditional_file_loads(tmp_path):
    reference = random_model("tiny", vocab_size=32, block_size=16, model_type="t2i", cls_token_num=6, caption_dim=10)
    torch.save(reference.state_dict(), tmp_path / "t2i_tiny.pt")
    model = load_model(tmp_path / "t2i_tiny.pt", device="cpu")
    assert_holds(model, reference.state_dict())
    assert model.config == Config(**SIZES["tiny"], vocab_size=32, block_size=1024, model_type="t2i", cls_token_num=6, caption_dim=10)


SIZED = {  # file name, block_size= -> block_size, what is said of it
    "256 in the name": ("c2i_B_256.pt", None, 256, "256 pixels"),
    "384 in the name": ("c2i_B_384.pt", None, 576, "384 pixels"),
    "512 in the name": ("t2i_XL_stage2_512.pt", None, 1024, "512 pixels"),
    "asked for": ("mine.pt", 256, 256, "as asked"),
    "asked for, against the name": ("c2i_B_384.pt", 256, 256, "as asked"),
    "neither": ("mine.pt", None, 576, "default for c2i"),
    "another number in the name": ("step_2560.pt", None, 576, "default for c2i"),
}


@pytest.mark.parametrize("case", SIZED)
def test_block_size_and_where_it_came_from(tmp_path, state, capsys, case):
    name, given, block_size, why = SIZED[case]
    torch.save(state, tmp_path / name)
    for _ in range(2):
        model = load_model(tmp_path / name, device="cpu", block_size=given)
        (line,) = [line for line in capsys.readouterr().err.splitlines() if "layers, block_size" in line]
        assert model.config.block_size == block_size == len(model.rotary) - 1
        assert name in line and f"block_size {block_size}" in line and why in line


@pytest.mark.parametrize("block_size", [0, -4, 500])
def test_block_size_that_is_no_grid(saved, block_size):
    refused(lambda: load_model(saved, block_size=block_size), f"block_size = {block_size}", "square", "576")


def test_block_size_of_a_model_with_a_name_is_given(hub, state):
    hub("c2i_tiny_256.pt", state)
    assert load_model("llamagen-tiny-256", device="cpu").config.block_size == 256
    assert load_model("llamagen-tiny-256", device="cpu", block_size=256).config.block_size == 256
    refused(lambda: load_model("llamagen-tiny-256", block_size=576), "llamagen-tiny-256 has block_size 256", "576")
    refused(lambda: load_model("small-student", block_size=576), "small-student has block_size 256", "576")


def test_tables_and_caches_are_dropped_by_name(tmp_path, cache, state, capsys):
    extra = {"freqs_cis": torch.zeros(17, 16, 2), "causal_mask": torch.ones(1, 8, 8, dtype=torch.bool)}
    extra |= {f"layers.{i}.attention.kv_cache.{half}_cache": torch.zeros(1, 2, 8, 32) for i in range(2) for half in "kv"}
    torch.save(dict(model=state | extra), tmp_path / NAME)
    assert_holds(load_model(tmp_path / NAME, device="cpu"), state)
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "converted" in line]
    assert all(text in line for text in (NAME, "'model'", "causal_mask", "freqs_cis", "kv_cache", "and 3 more"))
    (record,) = cache.glob("*/*.json")
    assert json.loads(record.read_text())["dropped"] == sorted(extra)


# ---- what is refused ---------------------------------------------------------------------------------------------------------------------


def test_each_missing_key_is_named(tmp_path, cache, state):
    for key in state:
        torch.save({other: x for other, x in state.items() if other != key}, tmp_path / NAME)
        refused(lambda key=key: load_model(tmp_path / NAME), NAME, f"{key}", "missing")
    assert not cache.exists()


EXTRA = ["layers.1.attention.wqkv.bias", "layers.0.attention.q_norm.weight", "ema_decay", "cls_embedding.cap_proj.fc1.weight"]


@pytest.mark.parametrize("key", EXTRA)
def test_an_extra_key_is_named(tmp_path, cache, state, key):
    torch.save(dict(model=state | {key: torch.zeros(2)}), tmp_path / NAME)
    refused(lambda: load_model(tmp_path / NAME), NAME, f"unknown: {key})")
    assert not cache.exists()


def test_many_wrong_keys_are_counted(tmp_path, state):
    torch.save(state | {f"extra.{i}": torch.zeros(1) for i in range(7)}, tmp_path / NAME)
    refused(lambda: load_model(tmp_path / NAME), "extra.0, extra.1, extra.2 and 4 more")


def test_a_weight_of_another_shape_is_named(tmp_path, state):
    torch.save(state | {"layers.1.feed_forward.w1.weight": torch.zeros(64, 64)}, tmp_path / NAME)
    refused(lambda: load_model(tmp_path / NAME), NAME, "of another shape: layers.1.feed_forward.w1.weight")


def test_a_size_that_is_not_in_the_table_is_refused_with_the_table(tmp_path):
    torch.save(LlamaGen(Config(dim=32, n_layer=3, n_head=2, vocab_size=8)).state_dict(), tmp_path / NAME)
    refused(lambda: load_model(tmp_path / NAME), NAME, "(32, 3)", "b (768, 12)", "3b (3200, 24)")


@pytest.mark.parametrize(("of", "into"), [("b", "llamagen-l-384"), ("l", "llamagen-b-256"), ("xl", "llamagen-t2i-xl-256")])
def test_another_size_than_named_is_refused(of, into):
    refused(lambda: llamagen_config(into, None, OFFICIAL[into][1], shapes_of(meta(of))), OFFICIAL[into][1], f"c2i model of size {of}", into)


def test_another_size_than_named_is_refused_before_it_is_kept(hub, cache, state):
    hub("c2i_L_384.pt", state)
    refused(lambda: load_model("llamagen-l-384"), "c2i_L_384.pt", "of size tiny", "llamagen-l-384")
    assert not cache.exists()


OTHERS = {
    "a list": ([1, 2], "a list"),
    "an optimizer alone": (dict(optimizer={}, steps=1), "optimizer, steps"),
    "a counter among the weights": (dict(model={"norm.weight": torch.ones(2), "steps": 7}), "steps"),
    "nothing": ({}, "tok_embeddings.weight is missing"),
}


@pytest.mark.parametrize("case", OTHERS)
def test_what_holds_no_weights_is_refused(tmp_path, case):
    content, phrase = OTHERS[case]
    torch.save(content, tmp_path / NAME)
    refused(lambda: load_model(tmp_path / NAME), NAME, phrase)


class Harmful:
    """Makes a folder when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


HIDDEN_IN = {
    "beside the weights": lambda state, bad: dict(model=state, args=bad),
    "among the weights": lambda state, bad: state | {"extra": bad},
    "in a namespace": lambda state, bad: dict(model=state, args=argparse.Namespace(hook=bad)),
    "instead of weights": lambda state, bad: bad,
}


@pytest.mark.parametrize("load", [load_model, vq.load], ids=["model", "tokenizer"])
@pytest.mark.parametrize("case", HIDDEN_IN)
def test_code_in_a_file_is_refused_and_not_run(tmp_path, cache, state, load, case):
    made = tmp_path / "made"
    torch.save(HIDDEN_IN[case](state, Harmful(made)), tmp_path / NAME)
    refused(lambda: load(tmp_path / NAME), NAME, "mkdir", "nothing of it was run", "state_dict")
    assert not made.exists() and not cache.exists()
    torch.load(tmp_path / NAME, weights_only=False)
    assert made.exists(), "it does harm where it is let"


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_a_bare_pickle_is_not_even_opened(tmp_path, protocol, suffix):
    path = tmp_path / f"model{suffix}"
    path.write_bytes(pickle.dumps(Harmful(tmp_path / "made"), protocol=protocol))
    refused(lambda: load_model(path), str(path))
    assert not (tmp_path / "made").exists()


def test_only_a_namespace_is_let_in_and_only_for_the_time_of_reading(tmp_path, saved):
    allowed = torch.serialization.get_safe_globals()
    load_model(saved, device="cpu")
    assert torch.serialization.get_safe_globals() == allowed and argparse.Namespace not in allowed
    torch.save(dict(args=SimpleNamespace(a=1)), tmp_path / "other.pt")
    refused(lambda: load_model(tmp_path / "other.pt"), "other.pt", "SimpleNamespace")


CUT = {
    "the end": lambda data: data[:-100],
    "half": lambda data: data[: len(data) // 2],
    "all": lambda data: b"",
    "a page": lambda data: b"<html></html>",
}


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
@pytest.mark.parametrize("case", CUT)
def test_a_truncated_file_is_refused(tmp_path, cache, state, case, suffix):
    path = tmp_path / f"model{suffix}"
    save_file(state, path) if suffix == ".safetensors" else torch.save(dict(model=state), path)
    path.write_bytes(CUT[case](path.read_bytes()))
    refused(lambda: load_model(path), path.name, "truncated", "download")
    assert not cache.exists()


def test_unknown_names_are_answered_with_official_ones():
    refused(lambda: load_model("llamagen-xl-256"), "'llamagen-xl-256'", "llamagen-l-256")
    refused(lambda: load_model("nothing like it"), *BUNDLED[:2], *OFFICIAL)
    refused(lambda: vq.load("vq16"), "'vq16'", "vq-16", "vq-16-t2i")


def test_a_missing_path_is_named(tmp_path):
    refused(lambda: load_model(tmp_path / "c2i_B_256.pt"), "c2i_B_256.pt", ".pt")
    refused(lambda: load_model(tmp_path), str(tmp_path), ".pt")


def test_a_model_is_no_tokenizer_nor_the_other_way_round(tmp_path, saved, tokenizer):
    torch.save(dict(model=tokenizer.state_dict()), tmp_path / "vq.pt")
    for _ in range(2):  # the second time there are converted files of both
        refused(lambda: load_model(tmp_path / "vq.pt"), "holds no LlamaGen", "tok_embeddings.weight")
        refused(lambda: vq.load(saved), "holds no VQ tokenizer", "encoder.conv_in.weight")
        load_model(saved, device="cpu"), vq.load(tmp_path / "vq.pt", device="cpu")


# ---- conversion --------------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def hashed(monkeypatch):
    """The files whose checksum is taken."""
    seen, sha256 = [], official.sha256
    monkeypatch.setattr(official, "sha256", lambda path: seen.append(path.name) or sha256(path))
    return seen


def forbidden(*_):
    raise AssertionError("the original was read")


def test_a_second_load_reads_the_converted_file_only(saved, cache, hashed, monkeypatch):
    first = fingerprint(load_model(saved, device="cpu"))
    assert hashed == [NAME, f"c2i_tiny_256.{os.getpid()}.partial"], "each file once"
    monkeypatch.setattr(official, "read", forbidden)
    hashed.clear()
    assert fingerprint(load_model(saved, device="cpu")) == first and hashed == ["c2i_tiny_256.safetensors"]
    assert files(cache) == ["c2i_tiny_256.json", "c2i_tiny_256.safetensors"]


def test_a_touched_file_is_known_by_its_checksum(saved, hashed, monkeypatch):
    first = fingerprint(load_model(saved, device="cpu"))
    monkeypatch.setattr(official, "read", forbidden)
    touch(saved)
    hashed.clear()
    assert fingerprint(load_model(saved, device="cpu")) == first and hashed == [NAME, "c2i_tiny_256.safetensors"]
    hashed.clear()
    load_model(saved, device="cpu")
    assert hashed == ["c2i_tiny_256.safetensors"]


def test_another_file_at_the_same_path_is_converted_anew(saved, cache, state):
    load_model(saved, device="cpu")
    other = {key: 2 * x for key, x in state.items()}
    for second, content in enumerate((other, state, other)):
        torch.save(WRAPPED["model"](content), saved)
        touch(saved, second)
        assert_holds(load_model(saved, device="cpu"), content)
        assert_holds(load_model(saved, device="cpu"), content)
    assert len(list(cache.iterdir())) == 2


def test_a_copy_under_another_name_shares_the_converted_file(saved, cache):
    first = load_model(saved, device="cpu")
    copy = saved.with_name("copy_384.pt")
    copy.write_bytes(saved.read_bytes())
    second = load_model(copy, device="cpu")
    assert fingerprint(first) == fingerprint(second) and (first.config.block_size, second.config.block_size) == (256, 576)
    assert files(cache) == ["c2i_tiny_256.json", "c2i_tiny_256.safetensors"]


def test_a_converted_file_loads_by_its_own_path(saved, cache):
    first = fingerprint(load_model(saved, device="cpu"))
    (made,) = cache.glob("*/*.safetensors")
    again = load_model(made, device="cpu")
    assert fingerprint(again) == first and again.config.block_size == 256 and len(files(cache)) == 2


def test_an_altered_converted_file_is_refused_and_made_again(saved, cache):
    first = fingerprint(load_model(saved, device="cpu"))
    (made,) = cache.glob("*/*.safetensors")
    data = bytearray(made.read_bytes())
    data[-1] ^= 1
    made.write_bytes(data)
    refused(lambda: load_model(saved), str(made), "checksum", "delete its folder")
    for path in made.parent.iterdir():
        path.unlink()
    assert fingerprint(load_model(saved, device="cpu")) == first


@pytest.mark.parametrize("text", ["", "{", "[]", "{}"])
def test_a_damaged_record_is_written_anew(saved, cache, text):
    first = fingerprint(load_model(saved, device="cpu"))
    (record,) = cache.glob("*/*.json")
    before = record.read_text()
    record.write_text(text)
    assert fingerprint(load_model(saved, device="cpu")) == first and record.read_text() == before


def test_a_full_disk_leaves_nothing_behind(saved, cache, monkeypatch):
    def dying(state, file):
        file.write_bytes(b"half a file")
        raise OSError("no space left on device")

    monkeypatch.setattr(official, "save_file", dying)
    refused(lambda: load_model(saved), "no space left", "make room", "HBSJD_CACHE")
    assert files(cache) == []


# ---- the hub -----------------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """hub(file, state) puts a file where the hub's cache would have it, a link to a blob named by its sha256, or by `promise`."""
    monkeypatch.setitem(OFFICIAL, "llamagen-tiny-256", ("FoundationVision/LlamaGen", "c2i_tiny_256.pt", "tiny", 256, "c2i"))
    blobs, snapshot = tmp_path / "hub/blobs", tmp_path / "hub/snapshots/main"
    blobs.mkdir(parents=True), snapshot.mkdir(parents=True)

    def download(repository, file):
        if not (snapshot / file).exists():
            raise LocalEntryNotFoundError(f"no {file} here")
        return str(snapshot / file)

    def place(file, state, promise=None):
        torch.save(dict(model=state), blobs / "new")
        blob = blobs / (promise or official.sha256(blobs / "new"))
        (blobs / "new").rename(blob)
        (snapshot / file).unlink(missing_ok=True)
        (snapshot / file).symlink_to(f"../../blobs/{blob.name}")
        return snapshot / file

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    return place


def test_an_official_name_is_downloaded_once(hub, cache, state, monkeypatch):
    link = hub(NAME, state)
    first = load_model("llamagen-tiny-256", device="cpu")
    assert_holds(first, state)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", forbidden)
    assert_holds(load_model("llamagen-tiny-256", device="cpu"), state)
    link.resolve().unlink()
    assert_holds(load_model("llamagen-tiny-256", device="cpu"), state)
    assert len(files(cache)) == 2


def test_a_name_and_its_path_share_the_converted_file(hub, cache, state):
    link = hub(NAME, state)
    for name in (link, "llamagen-tiny-256", link, "llamagen-tiny-256"):
        assert_holds(load_model(name, device="cpu"), state)
    assert len(files(cache)) == 2


def test_a_changed_file_of_the_hub_is_refused(hub, state):
    """Its checksum is recorded on first use."""
    blob = hub(NAME, state).resolve()
    load_model("llamagen-tiny-256", device="cpu")
    data = bytearray(blob.read_bytes())
    data[-1000] ^= 1
    blob.write_bytes(data)
    touch(blob)
    refused(lambda: load_model("llamagen-tiny-256"), blob.name, "truncated or altered", "recorded on first use", "delete it")
    blob.unlink()
    assert_holds(load_model("llamagen-tiny-256", device="cpu"), state)


def test_a_download_that_is_not_what_the_hub_promised_is_refused(hub, cache, state):
    blob = hub(NAME, state, promise="0" * 64).resolve()
    refused(lambda: load_model("llamagen-tiny-256"), str(blob), "truncated or altered", "promised by the hub", "delete it")
    assert not cache.exists()
    hub(NAME, state, promise="an-etag-that-is-no-sha256")
    assert_holds(load_model("llamagen-tiny-256", device="cpu"), state)


FAILURES = [
    LocalEntryNotFoundError("Cannot find the requested files in the disk cache"), ConnectionError("Network is unreachable\nline 2"), TimeoutError(),
    OSError("Consistency check failed: file should be of size 10 but has size 5"), RuntimeError("of the transfer library"),
]  # fmt: skip


@pytest.mark.parametrize("failure", FAILURES, ids=lambda failure: type(failure).__name__)
def test_a_failed_download_says_what_to_do(monkeypatch, failure):
    def fail(*_):
        raise failure

    monkeypatch.setattr("huggingface_hub.hf_hub_download", fail)
    phrases = ("c2i_3B_384.pt", "FoundationVision/LlamaGen", type(failure).__name__, str(failure)[:20], "HF_HUB_OFFLINE", "HF_HOME", "path")
    refused(lambda: load_model("llamagen-3b-384"), *phrases)
    refused(lambda: vq.load("vq-16-t2i"), "vq_ds16_t2i.pt", "peizesun/llamagen_t2i")


def test_the_hub_itself_offline(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    phrases = ("t2i_XL_stage2_512.pt", "peizesun/llamagen_t2i", str(tmp_path / "hub"), "HF_HUB_OFFLINE", "HF_HOME")
    refused(lambda: load_model("llamagen-t2i-xl-512"), *phrases)
    refused(lambda: vq.load("vq-16"), "vq_ds16_c2i.pt", "FoundationVision/LlamaGen")


# ---- memory ------------------------------------------------------------------------------------------------------------------------------


def test_weights_are_read_one_by_one(saved, monkeypatch):
    """Whatever was read is let go of before the next is: there is never a second copy of the model."""
    load_model(saved, device="cpu")
    real, given = checkpoints.safe_open, []

    class Watched:
        def __init__(self, *arguments, **options):
            self.opened = real(*arguments, **options)

        def __enter__(self):
            self.file = self.opened.__enter__()
            return self

        def __exit__(self, *error):
            self.opened.__exit__(*error)

        def get_tensor(self, key):
            assert all(reference() is None for reference in given)
            tensor = self.file.get_tensor(key)
            given.append(weakref.ref(tensor))
            return tensor

    monkeypatch.setattr(checkpoints, "safe_open", Watched)
    for dtype in (torch.float32, torch.bfloat16):
        given.clear()
        load_model(saved, device="cpu", dtype=dtype)
        assert len(given) == 18


def test_too_little_memory_is_refused_with_what_fits(saved, monkeypatch):
    monkeypatch.setattr(checkpoints, "free_memory", lambda device: 8 * 10**9)
    cpu = torch.device("cpu")
    phrases = ("c2i_3B_384", "12.4 GB", "8.0 GB", "cpu", "dtype=torch.bfloat16 needs 6.2 GB", "b, l, xl, xxl fit")
    refused(lambda: checkpoints.check_memory("c2i_3B_384.safetensors", COUNTS["3b"], torch.float32, cpu), *phrases)
    checkpoints.check_memory("c2i_3B_384.safetensors", COUNTS["3b"], torch.bfloat16, cpu)
    monkeypatch.setattr(checkpoints, "free_memory", lambda device: 100_000)
    refused(lambda: load_model(saved, device="cpu"), "c2i_tiny_256", "none fit", "bfloat16")
    refused(lambda: load_model("small-student", device="cpu"), "small-student", "none fit")
    refused(lambda: vq.load("small", device="cpu"), "small-tokenizer", "none fit")


def test_free_memory_is_a_plausible_number():
    assert 10**7 < checkpoints.free_memory(torch.device("cpu")) < 10**15


# ---- bundled weights load as before ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_bundled_weights_are_the_same_bits_as_ever(dtype):
    random = torch.random.get_rng_state()
    model = load_model("small-student", device="cpu", dtype=dtype)
    assert torch.equal(torch.random.get_rng_state(), random)
    state, provenance = read_weights(WEIGHTS / "small-student.safetensors")
    plain = LlamaGen(Config(**provenance["config"]))
    plain.load_state_dict(state)
    plain = plain.to("cpu", dtype).eval()
    assert model.config == plain.config and torch.equal(model.rotary, plain.rotary) and not model.training
    assert_holds(model, plain.state_dict(), dtype)
    assert fingerprint(model) == fingerprint(plain)
    ids = torch.arange(model.config.block_size)[None]
    assert torch.equal(model(torch.tensor([3]), ids), plain(torch.tensor([3]), ids))


def test_the_bundled_tokenizer_is_the_same_bits_as_ever():
    model = vq.load("small", device="cpu")
    state, provenance = read_weights(WEIGHTS / "small-tokenizer.safetensors")
    plain = vq.VQModel(vq.VQConfig(**provenance["config"])).eval()
    plain.load_state_dict(state)
    codes = torch.arange(256)[None]
    assert_holds(model, plain.state_dict())
    assert torch.equal(model.decode(codes), plain.decode(codes)) and not model.training


# ---- the tokenizer -----------------------------------------------------------------------------------------------------------------------


def conv(name: str, out: int, into: int, side: int) -> dict:
    return {f"{name}.weight": (out, into, side, side), f"{name}.bias": (out,)}


def norm(name: str, width: int) -> dict:
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}


def residual(name: str, into: int, out: int) -> dict:
    shortcut = conv(f"{name}.nin_shortcut", out, into, 1) if into != out else {}
    block = norm(f"{name}.norm1", into) | conv(f"{name}.conv1", out, into, 3) | norm(f"{name}.norm2", out) | conv(f"{name}.conv2", out, out, 3)
    return block | shortcut


def attention(name: str, width: int) -> dict:
    projections = [conv(f"{name}.{part}", width, width, 1) for part in ("q", "k", "v", "proj_out")]
    return norm(f"{name}.norm", width) | {key: shape for part in projections for key, shape in part.items()}


def official_vq_shapes() -> dict[str, tuple[int, ...]]:
    """VQ-16's, as the official code names them: widths 128, 128, 256, 256, 512, two residual blocks on the way down and three on the way up."""
    widths = [128, 128, 256, 256, 512]
    shapes = conv("encoder.conv_in", 128, 3, 3) | conv("decoder.conv_in", 512, 256, 3)
    for half in ("encoder", "decoder"):
        shapes |= residual(f"{half}.mid.0", 512, 512) | attention(f"{half}.mid.1", 512) | residual(f"{half}.mid.2", 512, 512)
    shapes |= norm("encoder.norm_out", 512) | conv("encoder.conv_out", 256, 512, 3)
    shapes |= norm("decoder.norm_out", 128) | conv("decoder.conv_out", 3, 128, 3)
    into = 128
    for level, width in enumerate(widths):
        for block in range(2):
            shapes |= residual(f"encoder.conv_blocks.{level}.res.{block}", into, width)
            shapes |= attention(f"encoder.conv_blocks.{level}.attn.{block}", width) if level == 4 else {}
            into = width
        shapes |= conv(f"encoder.conv_blocks.{level}.downsample.conv", width, width, 3) if level < 4 else {}
    for level, width in enumerate(widths[::-1]):
        for block in range(3):
            shapes |= residual(f"decoder.conv_blocks.{level}.res.{block}", into, width)
            shapes |= attention(f"decoder.conv_blocks.{level}.attn.{block}", width) if level == 0 else {}
            into = width
        shapes |= conv(f"decoder.conv_blocks.{level}.upsample.conv", width, width, 3) if level < 4 else {}
    shapes |= conv("quant_conv", 8, 256, 1) | conv("post_quant_conv", 256, 8, 1)
    return shapes | {"quantize.embedding.weight": (16384, 8), "quantize.codebook_used": (65536,)}


def test_vq16_is_the_official_one():
    with torch.device("meta"):
        model = vq.VQModel(vq.CONFIGS["vq-16"])
    assert sum(p.numel() for p in model.parameters()) == 71_883_403
    assert sum(p.numel() for p in model.decoder.parameters()) == 42_449_795
    assert shapes_of(model) == official_vq_shapes() and len(official_vq_shapes()) == 344
    assert "quantize.codebook_used" in dict(model.named_buffers())
    assert all(vq.official_config(name, "a.pt", official_vq_shapes()) == vq.VQConfig() for name in ("vq.pt", *official.TOKENIZERS))


SMALL = vq.VQConfig(ch=32, ch_mult=(1, 2), num_res_blocks=1, z_channels=32, codebook_size=50, codebook_dim=4)


@pytest.fixture(scope="module")
def tokenizer():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = vq.VQModel(SMALL).eval()
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.data += 0.5 * torch.randn(weight.shape)
        model.quantize.embedding.weight.data *= torch.rand(50, 1) * 3 + 0.1  # of any length: only directions count
    return model


def pictures(batch: int, size: int = 8) -> torch.Tensor:
    return torch.rand(batch, 3, size, size, generator=torch.Generator().manual_seed(0)) * 2 - 1


@pytest.mark.parametrize("wrapper", WRAPPED)
def test_a_tokenizer_loads_from_each_wrapper(tmp_path, tokenizer, wrapper):
    torch.save(WRAPPED[wrapper](tokenizer.state_dict()), tmp_path / "vq.pt")
    model = vq.load(tmp_path / "vq.pt", device="cpu")
    assert_holds(model, tokenizer.state_dict())
    assert model.config == SMALL and not model.training
    assert vq.load(tmp_path / "vq.pt", device="cpu", dtype=torch.bfloat16).post_quant_conv.weight.dtype == torch.bfloat16


def test_averaged_weights_of_a_tokenizer_are_preferred(tmp_path, tokenizer, capsys):
    average = {key: x + 1 for key, x in tokenizer.state_dict().items()}
    content = dict(model=tokenizer.state_dict(), ema=average, discriminator={"main.0.weight": torch.zeros(3)}) | TRAINED
    torch.save(content, tmp_path / "vq.pt")
    assert_holds(vq.load(tmp_path / "vq.pt", device="cpu"), average)
    assert "under 'ema'" in capsys.readouterr().err


def test_each_missing_key_of_a_tokenizer_is_named(tmp_path, cache, tokenizer):
    state = tokenizer.state_dict()
    for key in state:
        torch.save({other: x for other, x in state.items() if other != key}, tmp_path / "vq.pt")
        refused(lambda key=key: vq.load(tmp_path / "vq.pt"), "vq.pt", key, "missing")
    torch.save(state | {"quantize.more": torch.zeros(1)}, tmp_path / "vq.pt")
    refused(lambda: vq.load(tmp_path / "vq.pt"), "vq.pt", "unknown: quantize.more")
    assert not cache.exists()


def test_another_tokenizer_than_named_is_refused(hub, cache, tokenizer):
    hub("vq_ds16_c2i.pt", tokenizer.state_dict())
    refused(lambda: vq.load("vq-16"), "vq_ds16_c2i.pt", "vq-16", "codebook_size=50")
    assert not cache.exists()


def by_hand(w: dict[str, torch.Tensor], config: vq.VQConfig) -> SimpleNamespace:
    """The tokenizer written out from its state dict, float64, a step at a time."""

    def convolve(name, x, padding=1, stride=1):
        return F.conv2d(x, w[f"{name}.weight"], w[f"{name}.bias"], stride=stride, padding=padding)

    def normalise(name, x):
        groups = x.unflatten(1, (32, -1))
        mean = groups.mean((2, 3, 4), keepdim=True)
        variance = (groups - mean).pow(2).mean((2, 3, 4), keepdim=True)
        x = ((groups - mean) / (variance + 1e-6).sqrt()).flatten(1, 2)
        return x * w[f"{name}.weight"][:, None, None] + w[f"{name}.bias"][:, None, None]

    def swish(x):
        return x / (1 + (-x).exp())

    def residual(name, x):
        y = convolve(f"{name}.conv1", swish(normalise(f"{name}.norm1", x)))
        y = convolve(f"{name}.conv2", swish(normalise(f"{name}.norm2", y)))
        return y + (convolve(f"{name}.nin_shortcut", x, padding=0) if f"{name}.nin_shortcut.weight" in w else x)

    def attend(name, x):
        q, k, v = (convolve(f"{name}.{part}", normalise(f"{name}.norm", x), padding=0).flatten(2) for part in "qkv")
        score = torch.einsum("bci,bcj->bij", q, k) * q.shape[1] ** -0.5
        mixed = torch.einsum("bij,bcj->bci", score.exp() / score.exp().sum(2, keepdim=True), v)
        return x + convolve(f"{name}.proj_out", mixed.reshape(x.shape), padding=0)

    def blocks(half, x, count):
        for level in range(len(config.ch_mult)):
            name = f"{half}.conv_blocks.{level}"
            for i in range(count):
                x = residual(f"{name}.res.{i}", x)
                x = attend(f"{name}.attn.{i}", x) if f"{name}.attn.{i}.q.weight" in w else x
            if f"{name}.downsample.conv.weight" in w:  # a row of zeros below, a column on the right
                x = torch.cat([x, torch.zeros_like(x[:, :, :1])], 2)
                x = torch.cat([x, torch.zeros_like(x[:, :, :, :1])], 3)
                x = convolve(f"{name}.downsample.conv", x, padding=0, stride=2)
            if f"{name}.upsample.conv.weight" in w:
                x = convolve(f"{name}.upsample.conv", x.repeat_interleave(2, 2).repeat_interleave(2, 3))
        return x

    def middle(half, x):
        return residual(f"{half}.mid.2", attend(f"{half}.mid.1", residual(f"{half}.mid.0", x)))

    def end(half, x):
        return convolve(f"{half}.conv_out", swish(normalise(f"{half}.norm_out", x)))

    def encode(images):
        x = middle("encoder", blocks("encoder", convolve("encoder.conv_in", images), config.num_res_blocks))
        x = convolve("quant_conv", end("encoder", x), padding=0).flatten(2).transpose(1, 2)
        rows = w["quantize.embedding.weight"]
        cosine = torch.einsum("btd,kd->btk", x, rows) / x.norm(dim=2)[..., None] / rows.norm(dim=1)
        return cosine.argmax(2)

    def decode(codes):
        rows = w["quantize.embedding.weight"]
        vectors = (rows / rows.norm(dim=1, keepdim=True))[codes]
        side = round(codes.shape[1] ** 0.5)
        x = convolve("post_quant_conv", vectors.transpose(1, 2).unflatten(2, (side, side)), padding=0)
        x = middle("decoder", convolve("decoder.conv_in", x))
        return end("decoder", blocks("decoder", x, config.num_res_blocks + 1))

    return SimpleNamespace(encode=encode, decode=decode)


def test_encode_and_decode_are_the_official_computation(tokenizer):
    model = vq.VQModel(SMALL).double().eval()
    model.load_state_dict(tokenizer.state_dict())
    plain, images = by_hand(model.state_dict(), SMALL), pictures(3).double()
    codes = model.encode(images)
    assert torch.equal(codes, plain.encode(images)) and len(codes.unique()) > 3
    with torch.no_grad():
        torch.testing.assert_close(model.decode(codes, clamp=False), plain.decode(codes), atol=1e-10, rtol=0)


@pytest.mark.parametrize("pixels", [1, 64, 3 * 64 + 5, 7 * 64])
def test_images_go_through_the_networks_some_at_a_time(tokenizer, monkeypatch, pixels):
    images, batches = pictures(7), []
    codes, decoded = tokenizer.encode(images), tokenizer.decode(torch.arange(7 * 16).reshape(7, 16) % 50)
    monkeypatch.setattr(vq, "PIXELS_AT_ONCE", pixels)
    hooks = [half.register_forward_pre_hook(lambda module, inputs: batches.append(len(inputs[0]))) for half in (tokenizer.encoder, tokenizer.decoder)]
    assert torch.equal(tokenizer.encode(images), codes)
    torch.testing.assert_close(tokenizer.decode(torch.arange(7 * 16).reshape(7, 16) % 50), decoded, atol=1e-5, rtol=0)
    for hook in hooks:
        hook.remove()
    most = max(1, pixels // 64)
    one_way = [most] * (7 // most) + ([7 % most] if 7 % most else [])
    assert batches == one_way * 2


def test_nothing_in_gives_nothing_out(tokenizer):
    assert tokenizer.encode(pictures(0)).shape == (0, 16) and tokenizer.decode(torch.zeros(0, 16, dtype=torch.long)).shape == (0, 3, 8, 8)


def test_64_images_of_384_pixels_are_decoded_a_few_at_a_time():
    assert vq.at_once(384 * 384) == 8 and vq.at_once(256 * 256) == 18 and vq.at_once(10**9) == 1


@pytest.mark.slow
def test_vq16_decodes_random_codes_to_finite_images():
    import resource  # not on Windows

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model, codes = vq.VQModel(vq.CONFIGS["vq-16"]).eval(), torch.randint(16384, (2, 576))
    images = model.decode(codes)
    assert images.shape == (2, 3, 384, 384) and images.isfinite().all() and images.std() > 0
    assert model.encode(images).shape == (2, 576)
    print(f"VQ-16, 2 images of 384 x 384: peak memory of the process {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6:.2f} GB")
