"""Checkpoints of a distillation run: what it needs to go on exactly, in safetensors and JSON, each written whole or not at all.

    FOLDER/step-000050/{model.safetensors, optimizer.safetensors, state.json}     the last few
    FOLDER/{model.safetensors, state.json}                                        the result in bfloat16, once the run has ended
"""
from __future__ import annotations

import json
import os
import shutil
from collections import defaultdict
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from hbsjd.models.checkpoints import sha256, write_weights

FILES = ("model.safetensors", "optimizer.safetensors")


class Checkpoints:
    """Of one run, which `identity` names: a checkpoint of another run is refused."""

    def __init__(self, folder: Path, identity: dict, limit: int):
        self.folder, self.identity, self.limit = Path(folder), json.loads(json.dumps(identity)), limit

    def kept(self) -> list[Path]:
        return sorted(path for path in self.folder.glob("step-*") if path.suffix != ".partial")

    def last(self) -> str:
        """In words."""
        return f"checkpoint {self.kept()[-1].name}" if self.kept() else "no checkpoint yet"

    def save(self, trainer) -> None:
        path = self.folder / f"step-{trainer.done:06d}"
        partial = path.with_suffix(".partial")
        try:
            shutil.rmtree(partial, ignore_errors=True)  # what a killed run left
            partial.mkdir(parents=True)
            for name, tensors in zip(FILES, (trainer.student.state_dict(), memory(trainer))):
                save_file(tensors, partial / name)
            digests = {name: sha256(partial / name) for name in FILES}
            state = dict(step=trainer.done, identity=self.identity, config=vars(trainer.student.config), sha256=digests)
            (partial / "state.json").write_text(json.dumps(state, indent=1) + "\n")
            os.replace(partial, path)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(partial, ignore_errors=True)
            raise self.no_room(path, error) from None
        for old in self.kept()[: -self.limit]:
            shutil.rmtree(old)

    def load(self, trainer) -> int:
        """Put the trainer where the last checkpoint left it; how many steps that is."""
        if not self.kept():
            return 0
        path = self.kept()[-1]
        try:
            state = json.loads((path / "state.json").read_text())
            step, theirs = state["step"], state["identity"] | state["config"]
            whole = path.name == f"step-{step:06d}" and all(sha256(path / name) == state["sha256"][name] for name in FILES)
        except (OSError, ValueError, KeyError, TypeError):
            whole = False
        if not whole:
            raise ValueError(f"{path} is damaged: delete it, and training goes on from the checkpoint before it")
        ours = self.identity | json.loads(json.dumps(vars(trainer.student.config)))
        if theirs != ours:
            names = sorted(name for name in {*theirs, *ours} if theirs.get(name) != ours.get(name))
            raise ValueError(f"{path} belongs to a run with another {', '.join(names)}: delete the folder, or train into another one")
        trainer.student.load_state_dict(load_file(path / FILES[0]))
        remember(trainer, load_file(path / FILES[1]))
        return step

    def finish(self, trainer) -> None:
        facts = dict(config=vars(trainer.student.config), step=trainer.done, distillation=self.identity)
        path = self.folder / FILES[0]
        try:
            write_weights(path, trainer.result.state_dict(), facts)
        except (OSError, SafetensorError) as error:
            path.with_suffix(".partial").unlink(missing_ok=True)
            raise self.no_room(path, error) from None

    def no_room(self, path: Path, error) -> ValueError:
        return ValueError(f"{path} cannot be written ({error}): make room and run the same command again; {self.last()} is kept")


def memory(trainer) -> dict:
    """What is kept from step to step beside the weights, as tensors by name."""
    slots = trainer.optimizer.state_dict()["state"]
    average = trainer.average.state_dict() if trainer.average else {}
    return {f"{i}.{name}": value for i, slot in slots.items() for name, value in slot.items()} | {f"average.{name}": value for name, value in average.items()}


def remember(trainer, tensors: dict) -> None:
    slots = defaultdict(dict)
    for key, value in tensors.items():
        of, _, name = key.partition(".")
        slots[of][name] = value
    if trainer.average:
        trainer.average.load_state_dict(slots.pop("average"))
    groups = trainer.optimizer.state_dict()["param_groups"]
    trainer.optimizer.load_state_dict(dict(state={int(i): slot for i, slot in slots.items()}, param_groups=groups))
