"""Two ranks (gloo, on CPU, in float64) train as one process does on the same images: the same tokens, losses and weights, with a sharded teacher too."""
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import two_ranks

pytestmark = pytest.mark.xdist_group("two_ranks")  # one worker, and so one launch


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What each of the two ranks saw of every run."""
    folder = tmp_path_factory.mktemp("ranks")
    command = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", two_ranks.__file__, folder]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    return torch.load(folder / "ranks.pt")


@pytest.fixture(scope="module", params=two_ranks.RUNS)
def run(request, ranks):
    """One process, and each rank."""
    return two_ranks.train(request.param), [rank[request.param] for rank in ranks]


def test_rollouts_are_the_same(run):
    one, ranks = run
    assert 2 <= len(one["tokens"]) == len(ranks[0]["tokens"]) == len(ranks[1]["tokens"]) <= 4
    for whole, *parts in zip(one["tokens"], *(rank["tokens"] for rank in ranks)):
        assert torch.equal(whole, torch.cat(parts)) and {len(part) for part in parts} == {3}


def test_logs_are_the_same(run):
    """Losses, gradient's norms and counts, on both ranks; but a rank needs no rounds for the images of the other."""
    one, ranks = run
    nfe = [sum(pair) / 2 for pair in zip(*(rank["nfe"] for rank in ranks))]
    for log, *others in zip(one["logs"], *(rank["logs"] for rank in ranks), strict=True):
        assert others[0] == others[1]
        for name, value in log.items():
            ours = others[0][name]
            if name == "rollout/nfe" and value is not None:
                assert ours == nfe.pop(0) <= value
            else:
                assert ours == (value if value is None else pytest.approx(value, rel=1e-9, abs=0)), name
    assert not nfe


def test_weights_are_the_same(run):
    one, ranks = run
    for name, expected in one["weights"].items():
        assert torch.equal(ranks[0]["weights"][name], ranks[1]["weights"][name])
        torch.testing.assert_close(ranks[0]["weights"][name], expected, atol=1e-9, rtol=0)
    assert max((expected - start).abs().max() for expected, start in zip(one["weights"].values(), two_ranks.tiny(0).state_dict().values())) > 1e-3


def test_a_sharded_teacher_is_held_in_parts(ranks):
    whole = sum(p.numel() for p in two_ranks.tiny(1).parameters())
    assert [rank["ar"]["teacher"] for rank in ranks] == [whole] * 2
    assert sum(rank["sharded"]["teacher"] for rank in ranks) == whole and max(rank["sharded"]["teacher"] for rank in ranks) < 0.6 * whole


def test_a_killed_run_goes_on_on_both_ranks(ranks):
    for rank in ranks:
        assert [log["step"] for log in rank["resumed"]["logs"]] == [3, 4] and rank["resumed"]["logs"] == rank["ar"]["logs"][2:]
        assert all(torch.equal(value, rank["ar"]["weights"][name]) for name, value in rank["resumed"]["weights"].items())


def test_a_batch_that_cannot_be_shared_is_refused(ranks):
    assert {rank["refused"] for rank in ranks} == {"batch = 5 must be a multiple of the 2 ranks"}
