"""The public call: checks its arguments, wraps the model in guidance, resolves what depends on the model, and decodes."""
from __future__ import annotations

from dataclasses import replace
from difflib import get_close_matches
from math import inf, isqrt
from operator import index

import torch

from hbsjd.calibration import adapted
from hbsjd.decoding import loop
from hbsjd.decoding.drafts import History
from hbsjd.decoding.methods import METHODS
from hbsjd.decoding.noise import KeyedNoise
from hbsjd.decoding.schedules import Independent
from hbsjd.decoding.state import State
from hbsjd.decoding.types import Images, Method, Policy, Rollout
from hbsjd.decoding.windows import Adaptive
from hbsjd.models.captions import Captions, takes_captions
from hbsjd.models.guidance import Guided


@torch.no_grad()
def rollout(
    model,
    condition: torch.Tensor | Captions,
    prefix: torch.Tensor | list[torch.Tensor] | None = None,
    method: str | Method = "hbsjd_gumbel",
    *,
    length: int | None = None,
    images: torch.Tensor | None = None,
    seed: int = 0,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    guidance: float = 1.0,
    logprobs: bool = False,
    slots: int | None = None,
    group: int = 1,
    stop: int | None = None,
) -> Rollout:
    """Decode B images with a batched speculative Jacobi method (arXiv 2608.18183), or autoregressively with method "ar".

    condition [B] class ids (the null class is `num_classes`), or for a text-conditional (t2i) model B captions of any lengths, a
    `hbsjd.models.captions.Captions`; prefix [B, P] token ids, or a list of B 1-D tensors of any lengths; method a name of `METHODS` or a
    `Method`; length the tokens of a whole image, prefix included (default: the model's grid); images [B] ids that key each image's noise
    together with `seed` (default 0..B-1). Runs without gradients on condition's device.
    Returns a `Rollout`. "ar" and "hbsjd_gumbel" give the same tokens for the same seed. Raises ValueError on bad input.
    """
    if isinstance(model, str):
        raise ValueError(f"model must be a model, not a name; pass hbsjd.load_model({model!r})")
    for name, value, default in (("group", group, 1), ("stop", stop, None)):
        if value != default:
            raise ValueError(f"{name}= is not built yet; leave it at {default}")
    config = model.config
    method = resolve(method, config)
    policy = Policy(method.rule.mode, number("guidance", guidance), number("temperature", temperature), whole("top_k", top_k), number("top_p", top_p))
    noise = KeyedNoise(whole("seed", seed))
    check_policy(policy, config)
    condition = check_condition(condition, config)
    length = check_length(length, config)
    prefix_BP, start_B = check_prefix(prefix, len(condition), length, config, condition.device)
    images = check_images(images, condition)
    slots = check_slots(slots, len(condition))
    if policy.guidance > 1:
        model = Guided(model, policy.guidance)
    elif isinstance(model, Guided):
        policy = replace(policy, guidance=model.scale)
    if isinstance(method.window, Adaptive) and method.window.costs is None:
        method = adapted(method, model, policy, slots, condition.device)
    cache = model.prefill(condition[:slots], prefix_BP[:slots], start_B[:slots], length + method.window.W + 1)
    images = Images(condition, prefix_BP, start_B, images)
    state = State(model, cache, method, policy, images, length, slots, logprobs, rows_per_image=2 if isinstance(model, Guided) else 1)
    return loop.rollout(state, noise).result()


def resolve(method: str | Method, config) -> Method:
    """A `Method` with nothing symbolic left: H = None becomes the width of the model's grid."""
    if isinstance(method, str) and method in METHODS:
        method = METHODS[method]
    if not isinstance(method, Method):
        near = get_close_matches(str(method), METHODS) or ["ar", "ar_greedy", "hbsjd", "hbsjd_gumbel"]
        raise ValueError(f"unknown method {method!r}; did you mean {', '.join(near)}? hbsjd.METHODS holds them all")
    for width in method.window.widths:
        if whole("window W", width) < 0:
            raise ValueError(f"window W = {width} is negative; use 0 (autoregressive) or more")
    if isinstance(method.window, Adaptive) and not (method.window.widths and isinstance(method.schedule, Independent)):
        raise ValueError("an adaptive window needs widths to choose from and the Independent schedule")
    if isinstance(method.draft, History):
        if method.draft.H is None:
            method = replace(method, draft=History(isqrt(config.block_size)))
        if whole("history offset H", method.draft.H) < 1:
            raise ValueError(f"history offset H = {method.draft.H} must be at least 1")
    return method


def check_policy(policy: Policy, config) -> None:
    if not 1 <= policy.guidance < inf:
        raise ValueError(f"guidance = {policy.guidance} must be 1 (none) or a finite number above it")
    if not policy.temperature >= 1e-5:
        raise ValueError(f"temperature = {policy.temperature} must be at least 1e-5; for temperature 0 use a greedy method such as 'hbsjd' or 'ar_greedy'")
    if not 0 <= policy.top_k <= config.vocab_size:
        raise ValueError(f"top_k = {policy.top_k} must lie in 0..{config.vocab_size}, the size of the vocabulary (0 keeps all)")
    if not 0 < policy.top_p <= 1:
        raise ValueError(f"top_p = {policy.top_p} must lie in (0, 1]; 1 keeps all")
    if policy.mode == "greedy" and (policy.temperature, policy.top_k, policy.top_p) != (1, 0, 1):
        raise ValueError("a greedy method takes no temperature, top_k or top_p; use a sampling method such as 'hbsjd_gumbel' or 'ar'")


def check_condition(condition, config) -> torch.Tensor | Captions:
    if takes_captions(config):
        return check_captions(condition, config)
    if isinstance(condition, Captions):
        raise ValueError("this model takes class ids, and condition holds captions; pass [B] class ids, or a text-conditional (t2i) model")
    what = "condition must be a non-empty 1-D tensor of class ids"
    condition = integers(what, condition)
    if condition.ndim != 1 or len(condition) == 0:
        raise ValueError(f"{what}; got shape {tuple(condition.shape)}")
    if config.num_classes is not None and (condition.min() < 0 or condition.max() > config.num_classes):
        raise ValueError(f"class ids must lie in 0..{config.num_classes} (the last is the null class); got {condition.min()}..{condition.max()}")
    return condition


def check_captions(condition, config) -> Captions:
    slots, size = config.cls_token_num, config.caption_dim
    if not isinstance(condition, Captions):
        raise ValueError("a text-conditional (t2i) model takes captions; make condition with hbsjd.models.captions (pad, read) or huggingface.t5_features")
    shape, mask_BL = tuple(condition.features_BLC.shape), condition.mask_BL
    if shape[1:] != (slots, size):
        given = f"{shape[1]} x {shape[2]}; captions.pad(..., {slots}) makes the slots"
        raise ValueError(f"captions for this model have {slots} slots x {size} features; condition has {given}")
    if len(condition) == 0:
        raise ValueError("condition must hold at least one caption; it is empty")
    faults = {
        "holds NaN or infinite features; compute them again, or in float32": ~condition.features_BLC.isfinite().flatten(1).all(1),
        "has no token; leave it out, or give it one": ~mask_BL.any(1),
        "is not left padded: its tokens must fill the last slots; use captions.pad": (mask_BL[:, :-1] & ~mask_BL[:, 1:]).any(1),
    }
    for fault, faulty_B in faults.items():
        if faulty_B.any():
            raise ValueError(f"caption {int(faulty_B.nonzero()[0])} of condition {fault}")
    return condition


def check_length(length: int | None, config) -> int:
    length = config.block_size if length is None else whole("length", length)
    if not 1 <= length <= config.block_size:
        raise ValueError(f"length = {length} must lie in 1..{config.block_size}, the tokens of the model's grid")
    return length


def check_prefix(prefix, batch: int, length: int, config, device) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids padded with 0 [B, P], and each row's length [B]."""
    what = "prefix must be [B, P] token ids, or a list of 1-D tensors of token ids"
    rows = [[]] * batch if prefix is None else prefix
    rows = [integers(what, row, device) for row in (rows if isinstance(rows, (list, tuple)) else torch.atleast_1d(integers(what, rows, device)))]
    if any(row.ndim != 1 for row in rows):
        raise ValueError(f"{what}; got rows of shape {tuple(rows[0].shape)}")
    if len(rows) != batch:
        raise ValueError(f"prefix holds {len(rows)} rows for {batch} conditions; give one per condition")
    start_B = torch.tensor([len(row) for row in rows], device=device)
    if start_B.max() > length:
        raise ValueError(f"a prefix of {start_B.max()} tokens is longer than the image's {length}; shorten it")
    prefix_BP = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    if prefix_BP.numel() and (prefix_BP.min() < 0 or prefix_BP.max() >= config.vocab_size):
        raise ValueError(f"prefix ids must lie in 0..{config.vocab_size - 1}; got {prefix_BP.min()}..{prefix_BP.max()}")
    return prefix_BP, start_B


def check_slots(slots: int | None, images: int) -> int:
    slots = images if slots is None else whole("slots", slots)
    if slots < 1:
        raise ValueError(f"slots = {slots} must be at least 1: it is how many images are decoded at a time")
    return min(slots, images)


def check_images(images, condition: torch.Tensor | Captions) -> torch.Tensor:
    if images is None:
        return torch.arange(len(condition), device=condition.device)
    what = f"images must be {len(condition)} integer ids, one per condition"
    images = integers(what, images, condition.device)
    if images.shape != (len(condition),):
        raise ValueError(f"{what}; got shape {tuple(images.shape)}")
    return images


def integers(what: str, value, device=None) -> torch.Tensor:
    """`value` as int64, or refused with `what` it must be. A tensor without elements may be of any dtype: torch.tensor([]) is float."""
    try:
        tensor = torch.as_tensor(value, device=device)
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(f"{what}; got {type(value).__name__}") from None
    if tensor.numel() and (tensor.is_floating_point() or tensor.is_complex()):
        raise ValueError(f"{what}; got {tensor.dtype}")
    return tensor.long()


def whole(name: str, value) -> int:
    try:
        return index(value)
    except TypeError:
        raise ValueError(f"{name} = {value!r} must be an integer") from None


def number(name: str, value) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(f"{name} = {value!r} must be a number") from None
