"""Bad input gets one clear line that names the fix; what is meant well works; nothing that was passed in is touched."""
from dataclasses import replace

import numpy as np
import pytest
import torch

import hbsjd
from hbsjd.decoding.drafts import History
from hbsjd.decoding.methods import METHODS
from hbsjd.decoding.types import Method
from hbsjd.decoding.windows import Adaptive, Fixed
from hbsjd.models import vq
from hbsjd.models.guidance import Guided
from hbsjd.models.toy import Tabular

V, T, CLASSES = 5, 4, 2
GUMBEL = METHODS["hbsjd_gumbel"]
NAN, INF = float("nan"), float("inf")


def ids(*rows, dtype=torch.long) -> torch.Tensor:
    return torch.tensor(rows, dtype=dtype)


def toy(num_classes=CLASSES) -> Tabular:
    model = Tabular(V, T, CLASSES)
    model.config.num_classes = num_classes
    return model


def roll(model=None, condition=(0, 1), **arguments):
    return hbsjd.rollout(model or toy(), torch.tensor(condition) if isinstance(condition, tuple) else condition, **arguments)


def refused(call, *phrases: str) -> None:
    with pytest.raises(ValueError) as error:
        call()
    message = str(error.value)
    assert "\n" not in message and len(message) < 400, message
    assert all(phrase in message for phrase in phrases), message


# name -> arguments, phrases of the message
REFUSED = {
    "class negative": (dict(condition=ids(-1, 0)), "class ids", "0..2", "null class"),
    "class past the null class": (dict(condition=ids(0, 3)), "class ids", "0..2"),
    "classes not whole": (dict(condition=torch.tensor([0.0, 1.0])), "condition", "class ids"),
    "classes complex": (dict(condition=torch.tensor([0j, 1j])), "condition", "class ids"),
    "classes in a column": (dict(condition=ids([0], [1])), "condition", "1-D"),
    "classes a number": (dict(condition=1), "condition", "1-D"),
    "classes None": (dict(condition=None), "condition", "class ids"),
    "classes names": (dict(condition=["cat", "dog"]), "condition", "class ids"),
    "classes ragged": (dict(condition=[[0], [1, 2]]), "condition", "class ids"),
    "empty batch": (dict(condition=ids()), "condition", "non-empty"),
    "empty list": (dict(condition=[]), "condition", "non-empty"),
    "prefix longer than the image": (dict(prefix=torch.zeros(2, T + 1, dtype=torch.long)), "prefix", "longer", str(T)),
    "one row's prefix longer than the image": (dict(prefix=[ids(0), torch.zeros(9, dtype=torch.long)]), "prefix of 9", "longer"),
    "prefix longer than the length": (dict(prefix=ids([0, 1, 2], [0, 1, 2]), length=2), "prefix of 3", "longer", "2"),
    "prefix id negative": (dict(prefix=ids([0, -1], [0, 0])), "prefix ids", "0..4", "-1"),
    "prefix id past the vocabulary": (dict(prefix=ids([0, 0], [V, 0])), "prefix ids", "0..4", "5"),
    "prefix id past the vocabulary in a list": (dict(prefix=[ids(1), ids(0, V)]), "prefix ids", "0..4"),
    "prefix not whole": (dict(prefix=torch.zeros(2, 1)), "prefix", "token ids"),
    "prefix complex": (dict(prefix=torch.zeros(2, 1, dtype=torch.complex64)), "prefix", "token ids"),
    "prefix rows too many": (dict(prefix=torch.zeros(3, 1, dtype=torch.long)), "prefix holds 3 rows", "2 conditions"),
    "prefix rows too few": (dict(prefix=torch.zeros(1, 1, dtype=torch.long)), "prefix holds 1 rows", "2 conditions"),
    "prefix list empty": (dict(prefix=[]), "prefix holds 0 rows"),
    "prefix flat": (dict(prefix=ids(0, 1)), "prefix", "[B, P]"),
    "prefix a number": (dict(prefix=3), "prefix", "[B, P]"),
    "prefix a 0-d tensor": (dict(prefix=torch.tensor(3)), "prefix", "[B, P]"),
    "prefix of 3 dimensions": (dict(prefix=torch.zeros(2, 2, 1, dtype=torch.long)), "prefix", "[B, P]"),
    "prefix with None for a row": (dict(prefix=[None, ids(1)]), "prefix", "[B, P]"),
    "prefix of names": (dict(prefix=["a", "b"]), "prefix", "[B, P]"),
    "method misspelt": (dict(method="hbsjd_gumble"), "unknown method 'hbsjd_gumble'", "hbsjd_gumbel"),
    "method like nothing": (dict(method="zzz"), "unknown method 'zzz'", "hbsjd_gumbel", "ar_greedy"),
    "method empty": (dict(method=""), "unknown method ''", "hbsjd_gumbel"),
    "method None": (dict(method=None), "method", "hbsjd_gumbel"),
    "method a number": (dict(method=3), "method", "hbsjd_gumbel"),
    "method a class": (dict(method=Method), "method", "hbsjd_gumbel"),
    "method a rule": (dict(method=GUMBEL.rule), "method", "hbsjd_gumbel"),
    "window negative": (dict(method=replace(GUMBEL, window=Fixed(-1))), "window W = -1", "0"),
    "window not whole": (dict(method=replace(GUMBEL, window=Fixed(2.5))), "W = 2.5", "integer"),
    "window None": (dict(method=replace(GUMBEL, window=Fixed(None))), "W = None", "integer"),
    "history offset 0": (dict(method=replace(GUMBEL, draft=History(0))), "H = 0", "at least 1"),
    "history offset negative": (dict(method=replace(GUMBEL, draft=History(-3))), "H = -3", "at least 1"),
    "history offset not whole": (dict(method=replace(GUMBEL, draft=History(1.5))), "H = 1.5", "integer"),
    "length 0": (dict(length=0), "length = 0", "1..4"),
    "length negative": (dict(length=-1), "length = -1", "1..4"),
    "length past the grid": (dict(length=T + 1), "length = 5", "1..4"),
    "length not whole": (dict(length=2.5), "length = 2.5", "integer"),
    "length a string": (dict(length="4"), "length = '4'", "integer"),
    "images too few": (dict(images=ids(0)), "images", "2 integer ids", "(1,)"),
    "images in a row": (dict(images=ids([0, 1])), "images", "2 integer ids", "(1, 2)"),
    "images not whole": (dict(images=torch.tensor([0.0, 1.0])), "images", "integer ids"),
    "images a number": (dict(images=5), "images", "2 integer ids"),
    "images names": (dict(images="ab"), "images", "integer ids"),
    "images with None": (dict(images=[None, 1]), "images", "integer ids"),
    "seed not whole": (dict(seed=1.5), "seed = 1.5", "integer"),
    "seed None": (dict(seed=None), "seed = None", "integer"),
    "seed a string": (dict(seed="7"), "seed = '7'", "integer"),
    "guidance NaN": (dict(guidance=NAN), "guidance = nan"),
    "guidance infinite": (dict(guidance=INF), "guidance = inf"),
    "guidance negative": (dict(guidance=-1.0), "guidance = -1"),
    "guidance below 1 would do nothing": (dict(guidance=0.5), "guidance = 0.5", "1"),
    "guidance None": (dict(guidance=None), "guidance = None", "number"),
    "temperature 0": (dict(temperature=0), "temperature = 0", "greedy"),
    "temperature 0.0": (dict(temperature=0.0), "temperature = 0", "hbsjd"),
    "temperature negative": (dict(temperature=-0.5), "temperature = -0.5", "1e-5"),
    "temperature NaN": (dict(temperature=NAN), "temperature = nan", "1e-5"),
    "temperature None": (dict(temperature=None), "temperature = None", "number"),
    "top_k negative": (dict(top_k=-1), "top_k = -1", "0..5"),
    "top_k past the vocabulary": (dict(top_k=V + 1), "top_k = 6", "0..5"),
    "top_k not whole": (dict(top_k=2.5), "top_k = 2.5", "integer"),
    "top_k None": (dict(top_k=None), "top_k = None", "integer"),
    "top_p 0": (dict(top_p=0.0), "top_p = 0", "(0, 1]"),
    "top_p negative": (dict(top_p=-0.1), "top_p = -0.1", "(0, 1]"),
    "top_p above 1": (dict(top_p=1.1), "top_p = 1.1", "(0, 1]"),
    "top_p NaN": (dict(top_p=NAN), "top_p = nan", "(0, 1]"),
    "top_p None": (dict(top_p=None), "top_p = None", "number"),
    "slots 0": (dict(slots=0), "slots = 0", "at least 1"),
    "slots negative": (dict(slots=-2), "slots = -2", "at least 1"),
    "slots not whole": (dict(slots=1.5), "slots = 1.5", "integer"),
    "adaptive window negative": (dict(method=replace(GUMBEL, window=Adaptive((0, -2)))), "W = -2", "0"),
    "adaptive window of nothing": (dict(method=replace(GUMBEL, window=Adaptive(()))), "widths"),
    "adaptive window in lockstep": (dict(method=replace(METHODS["sjd_lockstep_gumbel"], window=Adaptive())), "Independent"),
    "group": (dict(group=2), "group=", "not built"),
    "stop": (dict(stop=0), "stop=", "not built"),
    "guidance with no null class": (dict(model=toy(None), guidance=2.0), "null class", "guidance=1"),
    "guidance on a guided model": (dict(model=Guided(toy(), 2.0), guidance=2.0), "already guided at 2.0", "guidance at 1"),
    "guided model with no null class": (dict(model=toy(None), guidance=1.5, method="hbsjd"), "null class"),
    "model a name": (dict(model="small-student"), "model", "load_model"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_one_clear_line(name):
    arguments, *phrases = REFUSED[name]
    refused(lambda: roll(**arguments), *phrases)


@pytest.mark.parametrize("filters", [dict(temperature=0.5), dict(temperature=2), dict(top_k=2), dict(top_p=0.9)], ids=str)
@pytest.mark.parametrize("method", [name for name, method in METHODS.items() if method.rule.mode == "greedy"])
def test_a_greedy_method_takes_no_temperature_or_filters(method, filters):
    refused(lambda: roll(method=method, **filters), "greedy", "hbsjd_gumbel")
    assert roll(method=method, temperature=1, top_k=0, top_p=1).policy.mode == "greedy"


# name -> arguments, the plain arguments that must give the same tokens
WORKS = {
    "classes a list": (dict(condition=[0, 1]), dict()),
    "classes a range": (dict(condition=range(2)), dict()),
    "classes numpy": (dict(condition=np.array([0, 1])), dict()),
    "classes numpy int32": (dict(condition=np.array([0, 1], dtype=np.int32)), dict()),
    "classes uint8": (dict(condition=ids(0, 1, dtype=torch.uint8)), dict()),
    "classes uint16": (dict(condition=np.array([0, 1], dtype=np.uint16)), dict()),
    "classes a list of tensors": (dict(condition=[torch.tensor(0), torch.tensor(1)]), dict()),
    "prefix none": (dict(prefix=torch.zeros(2, 0, dtype=torch.long)), dict()),
    "prefix none of a float tensor": (dict(prefix=torch.zeros(2, 0)), dict()),
    "prefix int32": (dict(prefix=ids([1, 2], [3, 4], dtype=torch.int32)), dict(prefix=ids([1, 2], [3, 4]))),
    "prefix uint8": (dict(prefix=ids([1, 2], [3, 4], dtype=torch.uint8)), dict(prefix=ids([1, 2], [3, 4]))),
    "prefix numpy uint16": (dict(prefix=np.array([[1, 2], [3, 4]], dtype=np.uint16)), dict(prefix=ids([1, 2], [3, 4]))),
    "prefix lists": (dict(prefix=[[1, 2], [3]]), dict(prefix=[ids(1, 2), ids(3)])),
    "prefix of mixed dtypes": (dict(prefix=[ids(1, 2, dtype=torch.int32), ids(3)]), dict(prefix=[ids(1, 2), ids(3)])),
    "prefix list with an empty list": (dict(prefix=[[1, 2], []]), dict(prefix=[ids(1, 2), ids()])),
    "prefix list with an empty float tensor": (dict(prefix=[torch.tensor([]), ids(1)]), dict(prefix=[ids(), ids(1)])),
    "method a Method": (dict(method=GUMBEL), dict(method="hbsjd_gumbel")),
    "window wider than the image": (dict(method=replace(GUMBEL, window=Fixed(1000))), dict()),
    "history offset past the image": (dict(method=replace(GUMBEL, draft=History(1000))), dict()),
    "length numpy": (dict(length=np.int64(3)), dict(length=3)),
    "images a list": (dict(images=[3, 4]), dict(images=ids(3, 4))),
    "images negative": (dict(images=[-1, 2**62]), dict(images=ids(-1, 2**62))),
    "seed True": (dict(seed=True), dict(seed=1)),
    "seed numpy": (dict(seed=np.int64(-7)), dict(seed=-7)),
    "seed numpy uint32": (dict(seed=np.uint32(7)), dict(seed=7)),
    "seed a tensor": (dict(seed=torch.tensor(7)), dict(seed=7)),
    "seed of more than 64 bits": (dict(seed=7 + 2**64), dict(seed=7)),
    "guidance a whole number": (dict(guidance=2), dict(guidance=2.0)),
    "guidance numpy": (dict(guidance=np.float32(2)), dict(guidance=2.0)),
    "temperature a whole number": (dict(temperature=1), dict()),
    "temperature a tensor": (dict(temperature=torch.tensor(0.5)), dict(temperature=0.5)),
    "top_k the vocabulary": (dict(top_k=V), dict()),
    "top_k numpy": (dict(top_k=np.int64(2)), dict(top_k=2)),
    "top_p 1": (dict(top_p=1), dict()),
    "no null class and no guidance": (dict(model=toy(None)), dict()),
    "a null class as condition": (dict(condition=(CLASSES, CLASSES)), dict(condition=(CLASSES, CLASSES), guidance=3.0)),
    "a guided model": (dict(model=Guided(toy(), 2.0)), dict(guidance=2.0)),
}


@pytest.mark.parametrize("name", WORKS)
def test_works_as_meant(name):
    arguments, plain = WORKS[name]
    ours, expected = roll(**arguments), roll(**plain)
    assert torch.equal(ours.tokens, expected.tokens) and torch.equal(ours.start, expected.start)
    assert ours.tokens.dtype == torch.int64 and ours.tokens.shape == (2, expected.tokens.shape[1])


@pytest.mark.parametrize("method", METHODS)
def test_full_length_prefixes_come_back_as_they_are(method):
    whole = ids([1, 2, 3, 4], [4, 3, 2, 1])
    out = roll(prefix=whole, method=method, logprobs=True)
    assert torch.equal(out.tokens, whole) and out.nfe == 0 and not out.logprobs.any() and out.start.tolist() == [T, T]
    mixed = roll(prefix=[whole[0], ids(4)], method=method, logprobs=True)
    assert torch.equal(mixed.tokens[0], whole[0]) and mixed.start.tolist() == [T, 1] and mixed.nfe > 0
    assert not mixed.logprobs[0].any() and (mixed.logprobs[1, 1:] < 0).all()


def test_policy_says_what_was_sampled_from():
    policy = roll(guidance=2.0, temperature=0.5, top_k=3, top_p=0.9).policy
    assert (policy.mode, policy.guidance, policy.temperature, policy.top_k, policy.top_p) == ("sample", 2.0, 0.5, 3, 0.9)
    assert roll(model=Guided(toy(), 3.0)).policy.guidance == 3.0


# ---- logits ------------------------------------------------------------------------------------------------------------------------------


class Altered:
    """A model whose logits pass through `alter(logits, call)`, the calls of `step` counted from 1."""

    def __init__(self, alter, model=None):
        self.model, self.alter, self.calls = model or toy(), alter, 0
        self.config, self.prefill = self.model.config, self.model.prefill

    def step(self, *arguments):
        self.calls += 1
        return self.alter(self.model.step(*arguments), self.calls)


def spoil(value, at: int):
    def alter(logits, call):
        if call == at:
            logits[-1, -1, 2] = value
        return logits

    return alter


@pytest.mark.parametrize("method", ["ar", "ar_greedy", "hbsjd", "hbsjd_gumbel", "hbsjd_probabilistic", "sjd_lockstep", "sjd_synchronous_probabilistic"])
@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("at", [1, 2])
def test_nan_or_infinite_logits_are_named_with_their_round(method, value, at):
    refused(lambda: roll(Altered(spoil(value, at)), condition=torch.zeros(8, dtype=torch.long), method=method), "NaN or infinite", f"round {at}")


def test_nan_logits_under_guidance_and_filters():
    refused(lambda: roll(Altered(spoil(NAN, 1)), guidance=2.0), "NaN or infinite", "round 1")
    refused(lambda: roll(Altered(spoil(NAN, 1)), top_k=2, top_p=0.5), "NaN or infinite", "round 1")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_large_finite_logits_of_a_narrow_dtype_are_fine(dtype):
    out = roll(Altered(lambda logits, call: (logits + 500).to(dtype)), condition=torch.zeros(64, dtype=torch.long))
    assert out.tokens.shape == (64, T)


# ---- nothing is lost ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["ar", "hbsjd_gumbel", "hbsjd_probabilistic"])
def test_nothing_passed_in_is_touched(method):
    given = dict(condition=ids(0, 1), prefix=ids([1, 2], [3, 4]), images=ids(5, 6))
    before = {name: x.clone() for name, x in given.items()}
    state, grad = torch.random.get_rng_state(), torch.is_grad_enabled()
    first = roll(**given, method=method)
    refused(lambda: roll(Altered(spoil(NAN, 1)), **given, method=method), "NaN")
    assert all(torch.equal(given[name], x) for name, x in before.items())
    assert torch.equal(torch.random.get_rng_state(), state) and torch.is_grad_enabled() is grad
    first.tokens.zero_()
    assert torch.equal(roll(**given, method=method).tokens[:, :2], before["prefix"]) and torch.equal(given["prefix"], before["prefix"])


@pytest.mark.parametrize(("name", "near"), [("small-studnt", "small-student"), ("x", "small-teacher"), ("x", "small-student")])
def test_unknown_model_name(name, near):
    refused(lambda: hbsjd.load_model(name), repr(name), near)


@pytest.fixture(scope="module")
def tokenizer():
    return vq.VQModel(vq.VQConfig(ch=32, ch_mult=(1, 1), num_res_blocks=1, z_channels=32, codebook_size=300)).eval()


@pytest.mark.parametrize("shape", [(3, 8, 8), (2, 1, 8, 8), (2, 3, 9, 8), (2, 3, 8, 7), (2, 8, 8, 3)], ids=str)
def test_pictures_of_a_wrong_shape(tokenizer, shape):
    refused(lambda: tokenizer.encode(torch.zeros(shape)), "images must be [B, 3, H, W]", str(shape))


@pytest.mark.parametrize("codes", [[[0, 1, 2, 300]], [[0, -1, 2, 3]], [[0, 1, 2]], [0, 1, 2, 3], [[[0, 1], [2, 3]]]], ids=str)
def test_codes_that_are_no_image(tokenizer, codes):
    refused(lambda: tokenizer.decode(torch.tensor(codes)), "codes must")


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32])
def test_codes_of_any_integer_dtype(tokenizer, dtype):
    codes = ids([7, 0, 255, 3])
    assert torch.equal(tokenizer.decode(codes.to(dtype)), tokenizer.decode(codes))
