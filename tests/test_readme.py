"""README's example is a program that runs, and what README names exists."""
import re
import subprocess
import sys

import pandas as pd
import pytest

from hbsjd.results import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")


DECODE, DISTIL = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.mark.parametrize("example, leaves", [(DECODE, "samples.png"), (DISTIL, "checkpoints/mine/model.safetensors")], ids=["decode", "distil"])
def test_the_examples_run(example, leaves, tmp_path):
    assert len(example.splitlines()) <= 30
    done = subprocess.run([sys.executable, "-c", example], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / leaves).exists()


@pytest.mark.parametrize("link", sorted(set(re.findall(r"\]\(((?!https?:|#)[^)]+)\)", README))))
def test_local_links_lead_somewhere(link):
    assert (ROOT / link.split("#")[0]).exists()


def test_every_stage_is_in_the_map():
    for script in (ROOT / "experiments").glob("[0-9]*.py"):
        assert script.stem in README


def test_its_results_are_those_of_the_figures():
    """Every row of the table of results: the printed number and ours, as figures/00_*.csv have them."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in README.splitlines() if re.match(r'\| \[(Table|Figure)', line)]
    assert len(rows) >= 12
    for item, quantity, printed, ours, command, _ in rows:
        table = pd.read_csv(ROOT / f"{re.search(r'(figures/00_[a-z0-9]+)[.]md', item)[1]}.csv", dtype=str).set_index("quantity")
        assert (printed, ours) == tuple(table.loc[quantity, ["paper", "ours"]]) and command.startswith("`bash reproduce.sh --only 0")
    verdicts = pd.read_csv(ROOT / "figures/00_claims.csv").verdict
    hold, noise, fail = ((verdicts == verdict).sum() for verdict in ("holds", "within noise", "does not hold"))
    assert f"Of {len(verdicts)} claims that the printed numbers make, {hold} hold here, {noise} are within noise, {fail} do not hold." in README


def test_every_method_is_explained():
    from hbsjd import METHODS

    for name in METHODS:
        stem = name.removesuffix("_gumbel").removesuffix("_maximal").removesuffix("_probabilistic")
        assert f"`{stem}`" in README, name
