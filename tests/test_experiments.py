"""The real scripts, run at `smoke`: what they write, and that a second run or an edited list measures only what is missing."""
import gc
import os
import shutil
import subprocess
import sys
from argparse import Namespace
from functools import cache, partial
from importlib import import_module

import pandas as pd
import pytest

from hbsjd.results import ROOT, newest

STEMS = ["00_prepare", "01_speedup_vs_batch", "02_acceptance", "03_full_vs_compact", "04_distill", "05_quality", "06_exactness", "09_adaptive_window"]


def run(stem: str, folder, start=None) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-W", "ignore", *(start or ["-m", f"experiments.{stem}"]), "--scale", "smoke"],
        cwd=ROOT, env=os.environ | {"HBSJD_RESULTS": str(folder), "HBSJD_CHECKPOINTS": str(folder / "checkpoints")}, capture_output=True, text=True,
    )


def rows(folder, stem: str) -> pd.DataFrame:
    (path,) = newest(folder / stem / "smoke")
    return pd.read_csv(path)


@pytest.fixture(scope="session")
def first(tmp_path_factory):
    """`first(stem)`: the folder that the first run of an experiment left, to be read only."""
    @cache
    def ran(stem):
        folder = tmp_path_factory.mktemp(stem)
        done = run(stem, folder)
        assert done.returncode == 0, done.stderr[-2000:]
        return folder
    return ran


# In one process, because loading torch takes longer than they do: a run with nothing to do, whose folder is kept as `again`, and a run after a kill.
AGAIN = """
import runpy, shutil, sys
from hbsjd.results import RESULTS, newest

stem = sys.argv.pop(1)
runpy.run_module(f"experiments.{stem}", run_name="__main__")
shutil.copytree(RESULTS / stem, RESULTS / "again")
(path,) = newest(RESULTS / stem / "smoke")
lines = path.read_bytes().splitlines(keepends=True)
path.write_bytes(b"".join(lines[:-3]) + lines[-3][:7])
runpy.run_module(f"experiments.{stem}", run_name="__main__")
"""


@pytest.mark.parametrize("stem", STEMS)
def test_smoke_and_again(stem, first, tmp_path):
    folder = shutil.copytree(first(stem), tmp_path / "results")
    before = files(folder / stem)
    done = run(stem, folder, start=["-c", AGAIN, stem])
    assert done.returncode == 0, done.stderr[-2000:]
    assert files(folder / "again") == before, "a finished stage changes nothing"

    # what a kill in the middle leaves behind, an unfinished last line included, is completed without a loss or a duplicate
    (path,) = newest(folder / stem / "smoke")
    lines = before[path.relative_to(folder / stem)].splitlines(keepends=True)
    again = path.read_bytes().splitlines(keepends=True)
    assert again[: len(lines) - 3] == lines[:-3] and len(again) == len(lines)


def files(folder) -> dict:
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*.*")}


def test_timing_rows_say_what_was_measured(first):
    table = rows(first("01_speedup_vs_batch"), "01_speedup_vs_batch")
    assert not table.duplicated(["method", "B", "prefix_ratio", "dtype", "repeat"]).any()
    decoded = table[table.method != "bare_ar"]
    given = (decoded.prefix_ratio * decoded["T"]).astype(int)
    assert (decoded.committed == decoded.B * (decoded["T"] - given)).all()
    assert (decoded.forward_seconds < decoded.seconds).all()
    ar = table[table.method == "ar"]
    assert (ar.nfe * ar.B == ar.committed).all() and (ar.physical_rows == 2 * ar.B * ar.nfe).all()
    hbsjd = table[table.method == "hbsjd"].groupby(["B", "prefix_ratio"]).nfe.max()
    assert (hbsjd <= table[table.method == "ar_greedy"].groupby(["B", "prefix_ratio"]).nfe.max()).all()


def test_executions_differ_only_in_the_rows_that_they_run(first):
    table = rows(first("03_full_vs_compact"), "03_full_vs_compact")
    greedy = table[table.part.isin(["rollout", "gamma"]) & (table.rule == "Greedy") & (table.schedule == "Independent") & (table.W == 16)]
    assert (greedy.groupby(["B", "repeat"])[["nfe", "row_rounds", "committed"]].nunique() == 1).all(axis=None)
    full, least = 2 * greedy.B * greedy.nfe, 2 * greedy.row_rounds
    assert greedy.physical_rows.between(least, full).all() and set(greedy.execution) == {"Full", "Compact", "Hybrid", "Packed"}
    assert (greedy.physical_rows == full)[greedy.execution == "Full"].all()
    assert (greedy.physical_rows == least)[greedy.execution.isin(["Compact", "Packed"])].all()

    latency, served = table[table.part == "latency"], table[table.part.isin(["batches", "refill"])].set_index(["part", "method"])
    assert (latency.physical_rows == 2 * latency.active).all() and ((latency.active == latency.B) == (latency.execution == "Full")).all()
    assert served.committed.nunique() == served.row_rounds.nunique() == 1
    assert served.rounds["refill", "hbsjd_full"] == served.rounds["refill", "hbsjd_packed"] < served.rounds["batches", "hbsjd_full"]
    for part, method in served.index:
        (path,) = (first("03_full_vs_compact") / "03_full_vs_compact" / "smoke").glob(f"*-{part}-{method}-*.csv")
        rounds = pd.read_csv(path)
        assert (rounds.active.sum(), 2 * rounds.ran.sum()) == tuple(served.loc[(part, method), ["row_rounds", "physical_rows"]])
    waiting = rounds[rounds.active < served.slots.iloc[0]].index.min()  # no row is idle while images wait: then nothing is ever added
    assert rounds.active[waiting:].is_monotonic_decreasing and (rounds.active == rounds.ran).all()


def test_counts_by_item_add_up_to_the_rollout(first):
    table = rows(first("02_acceptance"), "02_acceptance").set_index(["rule", "repeat"]).sort_index()
    of = dict(list(table.groupby("part")))
    whole = of["window"][of["window"].W == 16]
    for part, counts in ("histogram", ["row_rounds", "committed", "accepted", "proposed", "examined"]), ("entropy", ["committed", "accepted", "examined"]):
        assert of[part].groupby(["rule", "repeat"])[counts].sum().eq(whole[counts]).all(axis=None)
    assert (of["histogram"].committed == of["histogram"]["item"] * of["histogram"].row_rounds).all()
    assert (of["grid"].committed == 16).all() and (of["grid"].accepted <= of["grid"].examined).all() and (of["grid"].examined <= 16).all()
    assert (whole.committed == 16 * 18).all() and (whole.nfe == whole.rounds).all()
    # each round ends with a rejection, with the token after a window that stood whole, or with the image
    rejected, ended = whole.examined - whole.accepted, whole.committed - whole.examined
    assert (rejected + ended <= whole.row_rounds).all() and (whole.row_rounds <= rejected + ended + 16).all()
    same = of["guidance"][of["guidance"].guidance == 2].drop(columns="part")
    assert same.equals(whole.drop(columns="part").loc[same.index]), "parts that share a setting count the same rollout"


def test_an_edited_list_adds_rows_to_the_same_file(tmp_path, monkeypatch):
    """In process, with less to measure: first two methods at one batch size, then another batch size and a method more."""
    script = import_module("experiments.01_speedup_vs_batch")
    monkeypatch.setattr("hbsjd.results.cpu_name", lambda: "processor")
    monkeypatch.setattr(script, "Run", partial(script.Run, root=tmp_path))
    arguments = Namespace(scale="smoke", seed=0, device="cpu", fresh=False)
    sizes = []
    for methods, batches in (["ar", "hbsjd_gumbel"], [1]), (["ar", "hbsjd_gumbel"], [1]), (["ar", "hbsjd_gumbel", "ar_greedy", "hbsjd"], [1, 3]):
        monkeypatch.setattr(script, "METHODS", methods)
        monkeypatch.setitem(script.SWEEP, "smoke", script.SWEEP["smoke"] | dict(batches=batches, ratios=[], ratio_batch=1, dtype_batch=0, bare_batches=[]))
        script.main(arguments)
        gc.collect()  # closes the file, and with it the lock
        (path,) = (tmp_path / "01_speedup_vs_batch" / "smoke").glob("*.csv")
        sizes.append(path.read_bytes())
    assert sizes[1] == sizes[0] and sizes[2].startswith(sizes[0]) and len(sizes[2]) > len(sizes[0])


def test_a_results_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "taken").write_text("a file where the folder should be")
    failed = run("01_speedup_vs_batch", tmp_path / "taken")
    assert failed.returncode == 1 and len(failed.stderr.strip().splitlines()) == 1 and "HBSJD_RESULTS" in failed.stderr
