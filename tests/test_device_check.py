"""`python -m hbsjd.bench --device-check`, at reduced size on a CPU; and that a round waits for the device once."""
import sys
from collections import Counter
from pathlib import Path

import pandas as pd
import pytest
import torch

import hbsjd
from hbsjd import bench, device_check
from hbsjd.decoding.methods import METHODS
from hbsjd.models.llamagen import random_model
from hbsjd.results import Run


def test_on_a_cpu_at_reduced_size(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(device_check, "Run", lambda *args: Run(*args, root=tmp_path))
    monkeypatch.setattr(sys, "argv", ["bench", "--device-check", "--minutes", "0", "--device", "cpu"])
    bench.main()
    printed = capsys.readouterr().out
    assert "speedup over AR" in printed and all(method in printed for method in device_check.METHODS)
    (path,) = (tmp_path / "device_check").rglob("*.csv")
    rows = pd.read_csv(path)
    assert set(rows.part) == {"latency", "gamma", "exactness", "rollout", "projected"} and set(rows.dtype) == {"float32", "bfloat16"}
    exact = rows[(rows.part == "exactness") & (rows.dtype == "float32")]
    assert (exact.committed == 0).all() or (exact.value < 1e-4).all()
    assert (rows[rows.part.isin(["rollout", "projected", "latency"])].seconds > 0).all()
    assert set(rows[rows.part == "projected"].model) == {"random llamagen-tiny"} and set(rows[rows.part == "rollout"].model) == {"small-student"}


@pytest.mark.parametrize("name", [name for name, method in METHODS.items() if method.window.W in (0, 16)])
def test_a_round_reads_from_the_device_once(name, monkeypatch):
    """Counted on a CPU by what would make a GPU wait. (Noise looks for filtered candidates on a CPU only.)"""
    found, decoding = Counter(), Path(hbsjd.__file__).parent / "decoding"

    def counted(method):
        def call(*args, **kwargs):
            caller = sys._getframe(1).f_code
            if Path(caller.co_filename).parent == decoding:
                found[Path(caller.co_filename).stem, caller.co_name] += 1
            return method(*args, **kwargs)
        return call

    for method in ("item", "tolist", "numpy", "cpu", "nonzero", "__bool__", "__int__", "__float__", "__index__", "unique"):
        monkeypatch.setattr(torch.Tensor, method, counted(getattr(torch.Tensor, method)))
    model = random_model("tiny", dim=32, vocab_size=16, block_size=25, num_classes=4)
    out = hbsjd.rollout(model, torch.tensor([0, 3, 1, 2, 2]), [torch.arange(n) % 16 for n in (0, 6, 13, 1, 25)], name, slots=2, guidance=2.0, logprobs=True)
    per_rollout = {("state", "__init__"): 1}
    assert found.pop(("noise", "perturbed_argmax"), 0) <= out.nfe
    assert found == per_rollout | {("state", "read"): out.nfe}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", ["ar", "hbsjd", "hbsjd_probabilistic", "hbsjd_gumbel", "hbsjd_packed"])
def test_a_round_synchronises_once(name, monkeypatch):
    from hbsjd.decoding.state import State

    read = State.read

    def allowed(state, logits):
        torch.cuda.set_sync_debug_mode("default")
        read(state, logits)
        torch.cuda.set_sync_debug_mode("error")

    monkeypatch.setattr(State, "read", allowed)
    model = random_model("tiny").cuda()
    condition = torch.zeros(4, dtype=torch.long, device="cuda")
    hbsjd.rollout(model, condition, method=name, length=40)  # what is set up once
    try:
        hbsjd.rollout(model, condition, method=name, length=40)
    finally:
        torch.cuda.set_sync_debug_mode("default")
