"""Weights on disk -> models: safetensors with their provenance beside them, keys and checksums verified."""
from __future__ import annotations

import hashlib
import json
import os
from difflib import get_close_matches
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from hbsjd.models.llamagen import Config, LlamaGen

WEIGHTS = Path(__file__).resolve().parent.parent / "weights"
DISTILLED = ("small-kd", "small-gkd-ar", "small-gkd-hbsjd", "small-varkd-hbsjd")  # students that 04_distill made of small-student
BUNDLED = ("small-student", "small-teacher", *DISTILLED)


def load_model(name: str | Path, *, dtype: torch.dtype = torch.float32, device: str | torch.device | None = None) -> LlamaGen:
    """A LlamaGen in eval mode: a bundled one by name, or the path of a `.safetensors` file with its `.json` beside it.

    On CUDA where there is one, unless `device` says otherwise. Raises ValueError for an unknown name and for altered weights.
    """
    path = weights_path(name, BUNDLED)
    state, provenance = read_weights(path)
    model = LlamaGen(read_config(Config, path, provenance))
    model.load_state_dict(state)
    return model.to(device or default_device(), dtype).eval()


def read_config(kind: type, path: Path, provenance: dict):
    try:
        return kind(**provenance["config"])
    except (KeyError, TypeError):
        raise ValueError(f"{path.name} holds no {kind.__module__.split('.')[-1]} model: its .json has another kind of config, or none") from None


def weights_path(name: str | Path, bundled: tuple[str, ...]) -> Path:
    if name in bundled:
        return WEIGHTS / f"{name}.safetensors"
    path = Path(name)
    if path.suffix == ".safetensors" and path.exists():
        return path
    near = get_close_matches(str(name), bundled) or bundled
    raise ValueError(f"no model named {str(name)!r} and no such .safetensors file; did you mean {', '.join(near)}?")


def default_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def read_weights(path: Path) -> tuple[dict[str, torch.Tensor], dict]:
    """State dict and provenance of `NAME.safetensors`, whose sha256 must be the one its JSON records."""
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
    return load_file(path), provenance


def facts_path(path: Path) -> Path:
    """The JSON beside weights: `NAME.json`, and `state.json` beside a training run's `model.safetensors`."""
    return path.with_name("state.json") if path.name == "model.safetensors" else path.with_suffix(".json")


def write_weights(path: Path, state: dict[str, torch.Tensor], provenance: dict) -> None:
    """bf16 safetensors and the provenance JSON, both replaced whole; the JSON gains the file's sha256."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    save_file({key: value.to(torch.bfloat16).contiguous() for key, value in state.items()}, partial)
    provenance = {**provenance, "sha256": sha256(partial)}
    partial_json = path.with_suffix(".json.partial")
    partial_json.write_text(json.dumps(provenance, indent=1) + "\n")
    os.replace(partial, path)
    os.replace(partial_json, facts_path(path))


def fingerprint(model: torch.nn.Module) -> str:
    """A checksum of a model's weights as they are in memory, whatever file they came from."""
    digest = hashlib.sha256()
    for key, value in model.state_dict().items():
        digest.update(key.encode() + value.detach().float().cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


def sha256(path: Path) -> str:
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()
