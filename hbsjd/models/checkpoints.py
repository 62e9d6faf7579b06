"""Weights on disk -> models: our safetensors with their provenance beside them, or official files; keys, shapes and checksums verified."""
from __future__ import annotations

import hashlib
import json
import os
import re
import sys
from contextlib import suppress
from dataclasses import replace
from difflib import get_close_matches
from functools import partial
from math import isqrt, prod
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from hbsjd.models.llamagen import SIZES, Config, LlamaGen, rotary_table
from hbsjd.models.official import OFFICIAL, SUFFIXES, check_state, converted, empty, numbered, sha256, shapes_of, write_facts

WEIGHTS = Path(__file__).resolve().parent.parent / "weights"
DISTILLED = ("small-kd", "small-gkd-ar", "small-gkd-hbsjd", "small-varkd-hbsjd")  # students that 04_distill made of small-student
BUNDLED = ("small-student", "small-teacher", *DISTILLED)


def load_model(
    name: str | Path, *, dtype: torch.dtype = torch.float32, device: str | torch.device | None = None, block_size: int | None = None
) -> LlamaGen:
    """A LlamaGen in eval mode: a bundled or an official one by name, or by path.

    name: one of `BUNDLED` or `OFFICIAL`, a `.safetensors` file with our `.json` beside it, or an official `.pt`, `.pth`, `.bin` or `.safetensors`
    file, whose sizes are read off its shapes. Official files are converted once (hbsjd.models.official says where to and what is checked).
    block_size: tokens of a whole image, for official files by path; else _256, _384 or _512 in the file's name says it, else it is 576 (c2i) or
    1024 (t2i). On CUDA where there is one, unless `device` says otherwise; each weight is converted to `dtype` on its own, so that there is never
    a second copy of the model. Raises ValueError for an unknown name, altered or other weights, and too little memory.
    """
    path = weights_path(name, BUNDLED, OFFICIAL)
    if path:
        config = read_config(Config, path, verified(path))
        check_block_size(name, block_size, config.block_size)
    else:
        path, config = converted(name, OFFICIAL, LlamaGen, partial(llamagen_config, name, block_size))
    model = assemble(LlamaGen, config, path, dtype, device)
    model.rotary = rotary_table(config)  # a table that no file holds
    return model


def assemble(kind: type, config, path: Path, dtype: torch.dtype, device: str | torch.device | None) -> torch.nn.Module:
    """`kind(config)` in eval mode with the weights of a safetensors file, which go to the device one by one."""
    device, model, shapes = torch.device(device or default_device()), empty(kind, config), shapes_of(path)
    check_state(path.name, model, shapes)
    check_memory(path.name, sum(map(prod, shapes.values())), dtype, device)
    with safe_open(path, framework="pt") as file:
        state = {key: file.get_tensor(key).to(device, dtype, copy=True) for key in shapes}  # a copy: the file may be replaced later
    model.load_state_dict(state, assign=True)
    return model.eval()


def check_memory(file: str, numbers: int, dtype: torch.dtype, device: torch.device) -> None:
    free = free_memory(device)
    if numbers * dtype.itemsize <= free:
        return
    sizes = {size: Config(**SIZES[size]) for _, _, size, *_ in OFFICIAL.values()}
    fitting = [size for size, config in sizes.items() if sum(p.numel() for p in empty(LlamaGen, config).parameters()) * dtype.itemsize <= free]
    half = f" dtype=torch.bfloat16 needs {numbers * 2 / 1e9:.1f} GB;" if dtype.itemsize > 2 else ""
    raise ValueError(
        f"{file} needs {numbers * dtype.itemsize / 1e9:.1f} GB as {dtype}, and {free / 1e9:.1f} GB are free on {device}:{half} "
        f"of the official sizes {', '.join(fitting) or 'none'} fit in this dtype; or free memory, or choose another device="
    )


def free_memory(device: torch.device) -> int:
    """Bytes that weights may take: what CUDA has left, or what the system calls available; where it does not say, all that there is."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    meminfo = Path("/proc/meminfo")
    available = re.search(r"MemAvailable:\s+(\d+)", meminfo.read_text()) if meminfo.exists() else None
    if available:
        return 1024 * int(available[1])
    with suppress(AttributeError, ValueError):  # there is no sysconf on Windows
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return sys.maxsize


def llamagen_config(name: str | Path, block_size: int | None, file: str, shapes: dict[str, tuple[int, ...]]) -> Config:
    """Sizes of an official LlamaGen from the shapes of its weights and the table of sizes, which must be those of `name` where that is official.

    A c2i class table has one row more than classes, for the null class. block_size cannot be seen in the weights.
    """
    try:
        (vocab_size, dim), n_layer = shapes["tok_embeddings.weight"], numbered(shapes, "layers.")
        if "cls_embedding.uncond_embedding" in shapes:
            tokens, caption_dim = shapes["cls_embedding.uncond_embedding"]
            kind = dict(model_type="t2i", cls_token_num=tokens, caption_dim=caption_dim, block_size=1024)
        else:
            kind = dict(num_classes=shapes["cls_embedding.embedding_table.weight"][0] - 1, block_size=576)
    except KeyError as missing:
        raise ValueError(f"{file} holds no LlamaGen, or not all of it: {missing.args[0]} is missing; take the whole official file") from None
    sizes = {(size["dim"], size["n_layer"]): key for key, size in SIZES.items()}
    if (dim, n_layer) not in sizes:
        table = ", ".join(f"{key} {pair}" for pair, key in sizes.items())
        raise ValueError(f"{file} has (dim, layers) = {dim, n_layer}, which is no size of LlamaGen, so its number of heads is unknown: {table}")
    size = sizes[dim, n_layer]
    config = Config(**SIZES[size], vocab_size=vocab_size, **kind)
    if name in OFFICIAL and (size, config.model_type) != (OFFICIAL[name][2], OFFICIAL[name][4]):
        raise ValueError(f"{file} holds a {config.model_type} model of size {size}, not {name}; get the right file, or load this one by its path")
    return replace(config, block_size=official_block_size(name, config, block_size))


def official_block_size(name: str | Path, config: Config, given: int | None) -> int:
    if name in OFFICIAL:
        check_block_size(name, given, OFFICIAL[name][3])
        return OFFICIAL[name][3]
    pixels = re.search(r"_(256|384|512)(?!\d)", Path(name).stem)
    if given is not None:
        chosen, why = given, "as asked"
    elif pixels:
        chosen, why = (int(pixels[1]) // 16) ** 2, f"for the {pixels[1]} pixels in its name"
    else:
        chosen, why = config.block_size, f"the default for {config.model_type}; block_size= says otherwise"
    if chosen < 1 or isqrt(chosen) ** 2 != chosen:
        raise ValueError(f"block_size = {chosen} must be a square number: 256, 576 or 1024 for 256, 384 or 512 pixels")
    print(f"{Path(name).name}: {config.model_type}, dim {config.dim}, {config.n_layer} layers, block_size {chosen} ({why})", file=sys.stderr)
    return chosen


def check_block_size(name: str | Path, given: int | None, its: int) -> None:
    if given not in (None, its):
        raise ValueError(f"{name} has block_size {its}, not {given}; leave block_size= out, it is for official files by path")


def read_config(kind: type, path: Path, provenance: dict):
    try:
        return kind(**provenance["config"])
    except (KeyError, TypeError):
        raise ValueError(f"{path.name} holds no {kind.__module__.split('.')[-1]} model: its .json has another kind of config, or none") from None


def weights_path(name: str | Path, bundled: tuple[str, ...], official: dict[str, tuple]) -> Path | None:
    """The safetensors that have our JSON beside them, or None for a name or a file to be read as official."""
    if name in bundled:
        return WEIGHTS / f"{name}.safetensors"
    path = Path(name)
    if path.suffix == ".safetensors" and path.is_file() and facts_path(path).exists():
        return path
    if name in official or path.suffix in SUFFIXES and path.is_file():
        return None
    names = [*bundled, *official]
    near = ", ".join(get_close_matches(str(name), names) or [*bundled[:2], *official])
    raise ValueError(f"no model named {str(name)!r} and no such {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]} file; did you mean {near}?")


def default_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def read_weights(path: Path) -> tuple[dict[str, torch.Tensor], dict]:
    """State dict and provenance of `NAME.safetensors`, whose sha256 must be the one its JSON records."""
    provenance = verified(path)
    return load_file(path), provenance


def verified(path: Path) -> dict:
    """Provenance of `NAME.safetensors`, whose sha256 must be the one its JSON records."""
    facts, remedy = facts_path(path), "take it from git, or make it, again"
    for file in (path, facts):
        if not file.exists():
            raise ValueError(f"{file.name} is missing from {file.parent.name}/; {remedy}")
    try:
        provenance = json.loads(facts.read_text())
        recorded = provenance["sha256"]
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{facts.name} is damaged; {remedy}") from None
    if sha256(path) != recorded:
        raise ValueError(f"{path.name} does not match its checksum, so it is truncated or altered; {remedy}")
    return provenance


def facts_path(path: Path) -> Path:
    """The JSON beside weights: `NAME.json`, and `state.json` beside a training run's `model.safetensors`."""
    return path.with_name("state.json") if path.name == "model.safetensors" else path.with_suffix(".json")


def write_weights(path: Path, state: dict[str, torch.Tensor], provenance: dict) -> None:
    """bf16 safetensors and the provenance JSON, both replaced whole; the JSON gains the file's sha256."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    save_file({key: value.to(torch.bfloat16).contiguous() for key, value in state.items()}, partial)
    provenance = {**provenance, "sha256": sha256(partial)}
    os.replace(partial, path)
    write_facts(facts_path(path), provenance)


def fingerprint(model: torch.nn.Module) -> str:
    """A checksum of a model's weights as they are in memory, whatever file they came from."""
    digest = hashlib.sha256()
    for key, value in model.state_dict().items():
        digest.update(key.encode() + value.detach().float().cpu().numpy().tobytes())
    return digest.hexdigest()[:16]
