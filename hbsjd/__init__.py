"""HB-SJD: batched speculative Jacobi decoding of autoregressive image models (arXiv 2608.18183), as a rollout backend."""
from importlib import import_module

__all__ = ["METHODS", "Rollout", "load_model", "rollout"]
_HOMES = {"METHODS": "decoding.methods", "Rollout": "decoding.types", "load_model": "models.checkpoints", "rollout": "api"}


def __getattr__(name: str):
    """Resolved lazily, so that `hbsjd.results` and `hbsjd.report` import without torch."""
    if name in _HOMES:
        return getattr(import_module(f"hbsjd.{_HOMES[name]}"), name)
    if name == "models":
        return import_module("hbsjd.models")
    raise AttributeError(f"module 'hbsjd' has no attribute {name!r}")
