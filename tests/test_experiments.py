"""The real scripts, run at `smoke`: what they write, and that a second run or an edited list measures only what is missing."""
import os
import subprocess
import sys

import pandas as pd
import pytest

from hbsjd.results import ROOT


def run(stem: str, folder, *arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-m", f"experiments.{stem}", "--scale", "smoke", *arguments],
        cwd=ROOT, env=os.environ | {"HBSJD_RESULTS": str(folder)}, capture_output=True, text=True,
    )


def rows(folder, stem: str) -> pd.DataFrame:
    (path,) = (folder / stem / "smoke").glob("*.csv")
    return pd.read_csv(path)


@pytest.mark.parametrize("stem", ["00_prepare", "01_speedup_vs_batch"])
def test_smoke_and_again(stem, tmp_path):
    first = run(stem, tmp_path)
    assert first.returncode == 0, first.stderr[-2000:]
    before = {path: path.read_bytes() for path in (tmp_path / stem).rglob("*.*")}
    assert run(stem, tmp_path).returncode == 0
    assert {path: path.read_bytes() for path in (tmp_path / stem).rglob("*.*")} == before, "a finished stage changes nothing"

    # what a kill in the middle leaves behind, an unfinished last line included, is completed without a loss or a duplicate
    (path,) = (tmp_path / stem / "smoke").glob("*.csv")
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:-3]) + lines[-3][:7])
    assert run(stem, tmp_path).returncode == 0
    again = path.read_bytes().splitlines(keepends=True)
    assert again[: len(lines) - 3] == lines[:-3] and len(again) == len(lines)


def test_timing_rows_say_what_was_measured(tmp_path):
    assert run("01_speedup_vs_batch", tmp_path).returncode == 0
    table = rows(tmp_path, "01_speedup_vs_batch")
    assert not table.duplicated(["method", "B", "prefix_ratio", "dtype", "repeat"]).any()
    decoded = table[table.method != "bare_ar"]
    assert (decoded.committed == decoded.B * ((1 - decoded.prefix_ratio) * decoded["T"])).all()
    assert (decoded.forward_seconds < decoded.seconds).all()
    ar = table[table.method == "ar"]
    assert (ar.nfe == (1 - ar.prefix_ratio) * ar["T"]).all() and (ar.physical_rows == 2 * ar.B * ar.nfe).all()
    hbsjd = table[table.method == "hbsjd"].groupby(["B", "prefix_ratio"]).nfe.max()
    assert (hbsjd <= table[table.method == "ar_greedy"].groupby(["B", "prefix_ratio"]).nfe.max()).all()


def test_a_results_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "taken").write_text("a file where the folder should be")
    failed = run("01_speedup_vs_batch", tmp_path / "taken")
    assert failed.returncode == 1 and len(failed.stderr.strip().splitlines()) == 1 and "HBSJD_RESULTS" in failed.stderr
