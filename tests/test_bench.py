"""The bare loop is the control for `ar`, so it must decode the same; gamma is where Compact's cost crosses Full's."""
import pytest
import torch

import hbsjd
from hbsjd import bench, calibration
from hbsjd.models.guidance import Guided
from hbsjd.models.llamagen import random_model
from hbsjd.results import Run


@pytest.fixture(scope="module")
def model():
    return random_model("tiny", dim=32, vocab_size=16, block_size=25, num_classes=4).double()


def test_the_bare_loop_gives_the_tokens_of_ar(model):
    condition, prefix = torch.tensor([0, 3, 1]), torch.arange(30).view(3, 10) % 16
    ar = hbsjd.rollout(model, condition, prefix, "ar", guidance=2.0, seed=7)
    assert torch.equal(bench.bare_ar(Guided(model, 2.0), condition, prefix, 7), ar.tokens)
    counts, _ = bench.timed_bare_ar(Guided(model, 2.0), condition, prefix, 7)
    assert counts == ar.counts()


def test_a_timed_rollout_is_the_rollout(model):
    condition = torch.tensor([0, 3, 1])
    out, figures = bench.timed_rollout(model, condition, None, "hbsjd", guidance=2.0)
    assert torch.equal(out.tokens, hbsjd.rollout(model, condition, None, "hbsjd", guidance=2.0).tokens)
    assert 0 < figures["forward_seconds"] < figures["seconds"]


@pytest.mark.parametrize("compact, full, batch, rows", [
    ({2: 1.0, 4: 3.0}, 2.0, 8, 3),      # between the points, by a straight line
    ({2: 1.0, 4: 1.5}, 2.0, 8, 7),      # always cheaper, until all rows are active and there is nothing to gather
    ({2: 5.0, 4: 6.0}, 2.0, 8, 0),      # cheaper only at the origin
    ({1: 1.0}, 2.0, 2, 1),
    ({}, 2.0, 1, 0),
])
def test_gamma_is_where_the_costs_cross(compact, full, batch, rows):
    assert calibration.crossing(compact, full, batch) == rows


def test_calibration_counts_physical_rows(model):
    found = bench.calibrate(Guided(model, 2.0), [1, 4, 8], [0, 4], "cpu", repeats=2, gathered=(4,))
    assert all(set(found["costs"][width]) == set(found["gathered"][4]) == {2, 8, 16} for width in (0, 4))
    assert min(found["costs"][0].values()) > 0 and 0 <= bench.gamma(found, 16, 4) < 1


def test_a_resumed_run_finds_its_calibrations(model, tmp_path, monkeypatch):
    inputs = dict.fromkeys(bench.DTYPES, model), [1, 4], torch.arange(8) % 4, torch.arange(80).view(8, 10) % 16, 2.0
    found = [bench.calibrations(Run("stem", "smoke", {}, "device", ("B",), root=tmp_path), *inputs)]
    monkeypatch.setattr(bench, "calibrated", None)
    found.append(bench.calibrations(Run("stem", "smoke", {}, "device", ("B",), root=tmp_path), *inputs))
    assert found[0] == found[1] and all(set(part) == {1, 4} for part in found[0])
    four = found[0][1][4]
    assert set(four["costs"][32]) == {2, 8} and bench.fitted("hbsjd", four, model.config).execution.gamma == four["gamma"]
    for name, mode in ("hbsjd_adaptive", "sample"), ("hbsjd_greedy_adaptive", "greedy"):
        window = bench.fitted(name, four, model.config).window
        assert (window.costs, window.prior) == (four["costs"], four["prior"][mode])


def test_interleaved_runs_everything_in_turn():
    order = []
    seconds = bench.interleaved({name: lambda name=name: order.append(name) for name in "ab"}, repeats=3, device="cpu", warmup=1)
    assert order == list("ab") * 4 and all(len(times) == 3 for times in seconds.values())
