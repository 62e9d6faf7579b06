"""The adaptive window: what it chooses, what it learns from, and the calibration that it starts from."""
import json
from dataclasses import replace

import pytest
import torch

import hbsjd
from hbsjd import calibration
from hbsjd.decoding.methods import METHODS
from hbsjd.decoding.noise import KeyedNoise
from hbsjd.decoding.windows import EXPLORE, PRIOR, Adaptive, drawn, interpolated
from hbsjd.models.llamagen import random_model

COSTS = {0: {1: 1.0, 64: 8.0}, 4: {1: 1.1, 64: 30.0}, 16: {1: 1.5, 64: 90.0}}
WINDOW = Adaptive((0, 4, 16), 4, COSTS, {0: 1.0, 4: 2.5, 16: 3.2})


class Lots:
    """A noise that draws the same lot every time."""

    def __init__(self, lot):
        self.value = lot

    def lot(self, number):
        return self.value


NEVER = Lots(1.0)


@pytest.mark.parametrize("rows, seconds", [(1, 1.0), (2, 1.0 + 7 / 63), (64, 8.0), (128, 16.0), (0, 1.0)])
def test_costs_between_and_beyond_the_measured_rows(rows, seconds):
    assert interpolated({1: 1.0, 64: 8.0}, rows) == pytest.approx(seconds)


@pytest.mark.parametrize("rows, width", [(1, 4), (64, 0)])
def test_it_takes_what_commits_most_per_second(rows, width):
    assert WINDOW.plan(WINDOW.begin(), rows, NEVER).width == width


def test_it_widens_for_the_last_stragglers():
    costs = {0: {1: 1.0, 64: 8.0}, 16: {1: 1.5, 64: 90.0}}
    chosen = [replace(WINDOW, widths=(0, 16), costs=costs).plan(WINDOW.begin(), rows, NEVER).width for rows in (64, 32, 8, 1)]
    assert chosen == sorted(chosen) and chosen[0] == 0 and chosen[-1] == 16


def test_a_width_is_held():
    pace, widths = WINDOW.begin(), []
    for rows in [1, 64, 64, 64, 64, 1, 1]:
        pace = WINDOW.plan(pace, rows, NEVER)
        widths.append(pace.width)
    assert widths == [4, 4, 4, 4, 0, 0, 0]


def test_it_learns_from_advances_that_nothing_clipped():
    pace = replace(WINDOW.begin(), width=4)
    pace = WINDOW.observe(pace, [(0, 5), (10, 12), (96, 100)], 100)  # the last row had only 4 tokens left
    assert pace.seen == {4: (2, 7)}
    assert WINDOW.mean(pace, 4) == (PRIOR * 2.5 + 7) / (PRIOR + 2)
    assert WINDOW.observe(pace, [(97, 100)], 100) == pace


def test_what_it_learns_changes_its_mind():
    pace = replace(WINDOW.begin(), width=4)
    for _ in range(500):
        pace = WINDOW.observe(pace, [(0, 1)], 100)
    assert WINDOW.plan(pace, 1, NEVER).width == 16


def test_every_width_is_tried_now_and_then_and_dear_ones_seldom():
    tried = [drawn(lot / 1000, {0: 1.0, 4: 2.0, 16: 4.0}) for lot in range(1000)]
    assert [tried.count(width) for width in (0, 4, 16)] == pytest.approx([571, 286, 143], abs=2)
    lots = [KeyedNoise(5).lot(number) for number in range(4000)]
    assert 0.5 * EXPLORE < sum(lot < EXPLORE for lot in lots) / 4000 < 1.5 * EXPLORE and len(set(lots)) == 4000
    assert WINDOW.plan(WINDOW.begin(), 64, Lots(EXPLORE * 0.9999)).width == 16


def test_a_decision_does_not_look_at_drafts():
    """Only cursors, physical rows and the number of decisions go in."""
    assert Adaptive.plan.__code__.co_varnames[:4] == ("self", "pace", "rows", "noise") and Adaptive.observe.__code__.co_argcount == 4


# the calibration behind hbsjd.rollout(..., method="hbsjd_adaptive")


@pytest.fixture
def model():
    return random_model("tiny", dim=32, vocab_size=16, block_size=64, num_classes=4)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HBSJD_CACHE", str(tmp_path))
    calibration.known.clear()
    return tmp_path


def test_by_name_it_is_measured_once(model, cache, capfd):
    condition = torch.tensor([0, 3, 1])
    want = hbsjd.rollout(model, condition, method="ar", guidance=2.0)
    for fresh_process, lines in ((False, 1), (False, 0), (True, 0)):
        if fresh_process:
            calibration.known.clear()
        assert torch.equal(hbsjd.rollout(model, condition, method="hbsjd_adaptive", guidance=2.0).tokens, want.tokens)
        assert len(capfd.readouterr().err.splitlines()) == lines
    (kept,) = cache.glob("calibration-*.json")
    kept = json.loads(kept.read_text())
    assert set(kept["costs"]) == {"0", "2", "4", "8", "16", "32"} and set(kept["costs"]["0"]) == {"2", "6"}  # a guided image is two physical rows
    assert kept["prior"]["0"] == 1 and all(1 <= mean <= int(width) + 1 for width, mean in kept["prior"].items())


def test_another_setting_is_measured_apart(model, cache):
    for method, arguments in (("hbsjd_adaptive", {}), ("hbsjd_greedy_adaptive", {}), ("hbsjd_adaptive", dict(slots=1)), ("hbsjd_adaptive", dict(guidance=2.0))):
        hbsjd.rollout(model, torch.tensor([0, 3]), method=method, length=8, **arguments)
    hbsjd.rollout(model.double(), torch.tensor([0, 3]), method="hbsjd_adaptive", length=8)
    assert len(list(cache.glob("calibration-*.json"))) == 4, "weights that train on keep their calibration within a process"
    calibration.known.clear()
    hbsjd.rollout(model, torch.tensor([0, 3]), method="hbsjd_adaptive", length=8)
    assert len(list(cache.glob("calibration-*.json"))) == 5


@pytest.mark.parametrize("change, phrase", [
    (lambda kept: kept["identity"].update(device="Another CPU"), "another device"),
    (lambda kept: kept.pop("costs"), "damaged"),
])
def test_a_calibration_of_another_machine_is_refused(model, cache, change, phrase):
    hbsjd.rollout(model, torch.tensor([0]), method="hbsjd_adaptive", length=8)
    (path,) = cache.glob("calibration-*.json")
    kept = json.loads(path.read_text())
    change(kept)
    path.write_text(json.dumps(kept))
    calibration.known.clear()
    with pytest.raises(ValueError, match=phrase) as error:
        hbsjd.rollout(model, torch.tensor([0]), method="hbsjd_adaptive", length=8)
    assert "delete it" in str(error.value) and "\n" not in str(error.value)


def test_given_costs_need_no_calibration(model, cache):
    method = replace(METHODS["hbsjd_adaptive"], window=WINDOW)
    hbsjd.rollout(model, torch.tensor([0]), method=method, length=8)
    assert not list(cache.iterdir())
