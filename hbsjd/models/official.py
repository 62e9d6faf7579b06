"""Official LlamaGen files (arXiv 2406.06525, MIT licence) -> safetensors, converted once, from the hub by name or from a path.

Their sha256 are not published, so each is recorded when the file is first used and checked from then on. Kept in $HBSJD_CACHE:

    official/<sha256 of the original, 16 digits>/NAME.safetensors   the weights in the original's dtype
    official/<sha256 of the original, 16 digits>/NAME.json          config, checksums of both files, what was left out, where the original was seen

A later load checks the converted file's sha256. The original is not read again while its size and time of change are those recorded; one from the
hub may also be gone. Another file at the same path is converted anew; another file of the same name on the hub is refused.
"""
from __future__ import annotations

import argparse
import hashlib
import json
import os
import pickle
import re
import sys
import zipfile
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

C2I, T2I = "FoundationVision/LlamaGen", "peizesun/llamagen_t2i"
OFFICIAL = {  # name -> repository, file, size, block_size, model_type: all that was published
    "llamagen-b-256": (C2I, "c2i_B_256.pt", "b", 256, "c2i"),
    "llamagen-l-256": (C2I, "c2i_L_256.pt", "l", 256, "c2i"),
    "llamagen-b-384": (C2I, "c2i_B_384.pt", "b", 576, "c2i"),
    "llamagen-l-384": (C2I, "c2i_L_384.pt", "l", 576, "c2i"),
    "llamagen-xl-384": (C2I, "c2i_XL_384.pt", "xl", 576, "c2i"),
    "llamagen-xxl-384": (C2I, "c2i_XXL_384.pt", "xxl", 576, "c2i"),
    "llamagen-3b-384": (C2I, "c2i_3B_384.pt", "3b", 576, "c2i"),
    "llamagen-t2i-xl-256": (T2I, "t2i_XL_stage1_256.pt", "xl", 256, "t2i"),
    "llamagen-t2i-xl-512": (T2I, "t2i_XL_stage2_512.pt", "xl", 1024, "t2i"),
}
TOKENIZERS = {"vq-16": (C2I, "vq_ds16_c2i.pt"), "vq-16-t2i": (T2I, "vq_ds16_t2i.pt")}
SUFFIXES = (".pt", ".pth", ".bin", ".safetensors")
WRAPPERS = ("model", "module", "state_dict")  # DDP, DeepSpeed, other trainers; a file of FSDP is the state dict itself
NO_WEIGHTS = ("freqs_cis", "kv_cache", "causal_mask")  # tables and caches that a file may hold beside its weights
NO_CODE = "save its state dict alone (torch.save(model.state_dict(), ...)) and load that"


def converted(name: str | Path, hub: dict[str, tuple], kind: type, infer: Callable, wrappers: tuple[str, ...] = WRAPPERS) -> tuple[Path, object]:
    """The safetensors made of an official file (now, where there is none yet) and the model's config.

    name: one of `hub` (name -> repository, file, ...), or the path of a file that exists. infer(file name, shapes by key) gives the config of
    `kind` or raises ValueError. wrappers: where the weights may be inside the file, the first that is there counts; else the file is the weights.
    Raises ValueError, and keeps nothing, for a file that is out of reach, not whole, not such weights, or not the one recorded.
    """
    source = "/".join(hub[name][:2]) if name in hub else str(Path(name).resolve())
    path, facts = find(lambda facts: source in facts["seen"] and (name in hub or untouched(facts["seen"][source])))
    seen = facts["seen"][source] if facts else None
    if seen and untouched(seen):
        check_whole(path, facts)
        return path, infer(path.name, shapes_of(path))
    original = Path(seen["path"]) if seen else download(*hub[name][:2]) if name in hub else Path(name)
    digest = sha256(original)
    if name in hub:
        check_recorded(original, digest, facts)
    path, facts = find(lambda facts: facts["original"]["sha256"] == digest)
    if path:
        check_whole(path, facts)
        config = infer(path.name, shapes_of(path))
    else:
        path, facts, config = convert(original, digest, kind, infer, wrappers)
    facts["seen"][source] = stamp(original)
    write_facts(path.with_suffix(".json"), facts)
    return path, config


def official_dir() -> Path:
    """In the folder of hbsjd.results.cache_dir, which models do not import."""
    return Path(os.environ.get("HBSJD_CACHE", "~/.cache/hbsjd")).expanduser() / "official"


def write_facts(path: Path, facts: dict) -> None:
    """The JSON beside weights, replaced whole."""
    partial = path.with_suffix(f".{os.getpid()}.partial")
    partial.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    os.replace(partial, path)


def find(wanted: Callable[[dict], bool]) -> tuple[Path, dict] | tuple[None, None]:
    """A converted file with the facts that are wanted, and them. A record that cannot be read is as good as none."""
    for record in sorted(official_dir().glob("*/*.json")):
        path = record.with_suffix(".safetensors")
        with suppress(ValueError, KeyError, TypeError):
            facts = json.loads(record.read_text(encoding="utf-8"))
            if wanted(facts) and path.exists():
                return path, facts
    return None, None


def stamp(path: Path) -> dict:
    """What tells a file from another one at the same path without reading it."""
    facts = path.stat()
    return dict(path=str(path.absolute()), size=facts.st_size, mtime_ns=facts.st_mtime_ns)


def untouched(seen: dict) -> bool:
    """The original is as it was when it was read, or gone (the hub's cache may be emptied)."""
    path = Path(seen["path"])
    return not path.exists() or stamp(path) == seen


def check_whole(path: Path, facts: dict) -> None:
    if sha256(path) != facts["sha256"]:
        raise ValueError(f"{path} does not match its checksum, so it is truncated or altered; delete its folder, and it is made again")


def check_recorded(original: Path, digest: str, facts: dict | None) -> None:
    """The file from the hub is the one it was on first use; on first use, the one that the hub promised, where its cache tells."""
    expected = facts["original"]["sha256"] if facts else promised(original)
    if expected not in (None, digest):
        whose = f"recorded on first use (a new release? delete official/{expected[:16]} in $HBSJD_CACHE too)" if facts else "promised by the hub"
        raise ValueError(
            f"{original.resolve()} is truncated or altered: delete it and load again; its sha256 is {digest[:16]}..., not {expected[:16]}..., {whose}"
        )


def promised(original: Path) -> str | None:
    """The sha256 that the hub gave: in its cache a file is a link to a blob, and a large blob's name is its sha256."""
    blob = Path(os.readlink(original)) if original.is_symlink() else Path()
    return blob.name if blob.parent.name == "blobs" and re.fullmatch("[0-9a-f]{64}", blob.name) else None


def download(repository: str, file: str) -> Path:
    """The file in the hub's cache ($HF_HOME), downloaded where it is not there; $HF_HUB_OFFLINE=1 forbids that."""
    from huggingface_hub import constants, hf_hub_download

    try:
        return Path(hf_hub_download(repository, file))
    except Exception as error:  # the hub's, the HTTP client's, the file system's: each says that there is no file
        raise ValueError(
            f"{file} of {repository} is not in {constants.HF_HUB_CACHE} and cannot be downloaded ({type(error).__name__}: {said(error, 60)}): "
            f"go online without HF_HUB_OFFLINE, set HF_HOME to where it was downloaded, or give the path of the file"
        ) from error


def convert(original: Path, digest: str, kind: type, infer: Callable, wrappers: tuple[str, ...]) -> tuple[Path, dict, object]:
    """Write the weights of an official file as safetensors, if they are exactly those of the model that their sizes promise."""
    state, wrapper = weights(original, wrappers)
    dropped = sorted(key for key in state if any(word in key for word in NO_WEIGHTS))
    state = {key: x.detach().contiguous() for key, x in state.items() if key not in dropped}
    shapes = {key: tuple(x.shape) for key, x in state.items()}
    config = infer(original.name, shapes)
    check_state(original.name, empty(kind, config), shapes)
    path = official_dir() / digest[:16] / f"{original.stem}.safetensors"
    under, without = f" under {wrapper!r}" if wrapper else "", f", without {listed(dropped)} (tables and caches, no weights)" if dropped else ""
    print(f"{original.name}: its weights{under} are converted once, to {path}{without}", file=sys.stderr)
    partial = path.with_suffix(f".{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(state, partial)
        checksum = sha256(partial)
        os.replace(partial, path)
    except (OSError, SafetensorError) as error:
        with suppress(OSError):
            partial.unlink()
        raise ValueError(f"{path} cannot be written ({said(error, 100)}): make room, or set HBSJD_CACHE to another folder") from None
    file = dict(name=original.name, size=original.stat().st_size, sha256=digest)
    return path, dict(config=vars(config), original=file, weights_under=wrapper, dropped=dropped, sha256=checksum, seen={}), config


def weights(path: Path, wrappers: tuple[str, ...]) -> tuple[dict[str, torch.Tensor], str | None]:
    """The state dict of an official file, and the key that it was under: None for the file itself."""
    content = read(path)
    if not isinstance(content, dict):
        raise ValueError(f"{path.name} holds a {type(content).__name__}, not weights by name; {NO_CODE}")
    wrapper = next((key for key in wrappers if isinstance(content.get(key), dict)), None)
    state = content[wrapper] if wrapper else content
    others = [str(key) for key, x in state.items() if not isinstance(x, torch.Tensor)]
    if others:
        raise ValueError(f"{path.name} holds {listed(others)} where weights should be, alone or under {', '.join(wrappers)}; {NO_CODE}")
    return state, wrapper


def read(path: Path):
    """The content of a file. No code in it runs: besides tensors and plain containers only argparse.Namespace, which trainers add, is made."""
    broken = f"{path} is no checkpoint that can be read: truncated, something else, or saved before torch 1.6; download it again"
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        if not zipfile.is_zipfile(path):  # its table of contents comes last
            raise ValueError(broken)
        with torch.serialization.safe_globals([argparse.Namespace]):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        found = re.search(r"GLOBAL (\S+)", str(error))
        what = found[1] if found else "of a kind that weights need not"
        raise ValueError(f"{path.name} holds code or objects ({what}), not weights alone; nothing of it was run; {NO_CODE}") from None
    except (RuntimeError, EOFError, SafetensorError) as error:
        raise ValueError(f"{broken} ({said(error, 100)})") from None


def empty(kind: type, config) -> torch.nn.Module:
    """The model without memory for its weights."""
    with torch.device("meta"):
        return kind(config)


def check_state(file: str, model: torch.nn.Module, shapes: dict[str, tuple[int, ...]]) -> None:
    """Refuses weights whose keys and shapes are not exactly the model's."""
    ours = {key: tuple(x.shape) for key, x in model.state_dict().items()}
    faults = {
        "missing": ours.keys() - shapes.keys(),
        "unknown": shapes.keys() - ours.keys(),
        "of another shape": {key for key in ours.keys() & shapes.keys() if ours[key] != shapes[key]},
    }
    named = [f"{what}: {listed(keys)}" for what, keys in faults.items() if keys]
    if named:
        raise ValueError(f"{file} does not hold the weights of this {type(model).__name__} ({'; '.join(named)}); take the whole official file")


def shapes_of(path: Path) -> dict[str, tuple[int, ...]]:
    with safe_open(path, framework="pt") as file:
        return {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}


def numbered(keys: Iterable[str], prefix: str) -> int:
    """How many modules a list has: one more than the largest number after `prefix` in a key."""
    return 1 + max((int(found[1]) for key in keys if (found := re.match(rf"{re.escape(prefix)}(\d+)\.", key))), default=-1)


def listed(keys: Iterable[str], most: int = 3) -> str:
    keys = sorted(keys)
    return ", ".join(keys[:most]) + (f" and {len(keys) - most} more" if len(keys) > most else "")


def said(error: Exception, most: int) -> str:
    return (str(error).splitlines() or ["no reason given"])[0][:most]


def sha256(path: Path) -> str:
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()
