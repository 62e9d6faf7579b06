"""Results on disk: a row is written whole or not at all, nothing is measured twice, and nothing of another configuration is read."""
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time

import pytest

from hbsjd import results

CONFIG = dict(scale="smoke", seed=0, threads=1)
KEYS = ("method", "B", "prefix_ratio", "repeat")
CELLS = [dict(method=method, B=B, prefix_ratio=0.5, repeat=repeat) for method in ("ar", "hbsjd") for B in (1, 4) for repeat in range(2)]


def opened(root, config=CONFIG, device="cpu", keys=KEYS, **options):
    return results.Run("01_speedup_vs_batch", "smoke", config, device, keys, root=root, **options)


def measured(root, cells=CELLS, **options):
    run = opened(root, **options)
    for cell in run.missing(cells):
        run.add(cell | dict(seconds=0.1 + cell["repeat"] / 3))
    run.finish()
    return run


def loaded(root):
    return results.load("01_speedup_vs_batch", root=root)


def test_rows_come_back_as_they_were_added(tmp_path):
    run = measured(tmp_path)
    table = loaded(tmp_path)
    assert table[[*KEYS, "seconds"]].to_dict("records") == [cell | dict(seconds=0.1 + cell["repeat"] / 3) for cell in CELLS]
    assert set(table.config_hash) == {results.config_hash(CONFIG)} and set(table.device) == {results.cpu_name()}
    assert re.fullmatch(r"[0-9a-f]{10}-[a-z0-9_]+\.csv", run.csv.name)


def test_only_what_is_missing_is_asked_for(tmp_path):
    measured(tmp_path, CELLS[:3])
    run = opened(tmp_path)
    assert run.missing(CELLS) == CELLS[3:]
    with pytest.raises(ValueError, match="already has a row for ar 1 0.5 0"):
        run.add(CELLS[0] | dict(seconds=1.0))


def test_an_edited_list_adds_rows_to_the_same_file(tmp_path):
    first = measured(tmp_path)
    before = first.csv.read_bytes()
    second = measured(tmp_path, CELLS + [cell | dict(B=16) for cell in CELLS[:2]])
    assert second.csv == first.csv and second.added == 2
    assert second.csv.read_bytes().startswith(before) and len(loaded(tmp_path)) == len(CELLS) + 2
    assert second.facts["resumed"][0]["rows_before"] == len(CELLS)


def test_a_run_with_nothing_to_do_changes_no_file(tmp_path):
    run = measured(tmp_path)
    before = run.csv.read_bytes(), run.json.read_bytes()
    measured(tmp_path)
    assert (run.csv.read_bytes(), run.json.read_bytes()) == before


@pytest.mark.parametrize("cut", [1, 2, 9, -1])
def test_an_unfinished_last_line_is_dropped(tmp_path, cut):
    run = measured(tmp_path)
    lines = run.csv.read_bytes().splitlines(keepends=True)
    run.csv.write_bytes(b"".join(lines[:-1]) + lines[-1][:cut])
    assert len(loaded(tmp_path)) == len(CELLS) - 1  # a reader does not see it either
    measured(tmp_path)
    assert run.csv.read_bytes() == b"".join(lines)


def test_a_run_killed_while_writing_its_first_row_starts_again(tmp_path):
    run = measured(tmp_path)
    whole = run.csv.read_bytes()
    run.csv.write_bytes(whole[:5])
    with pytest.raises(ValueError, match="no results"):
        loaded(tmp_path)
    measured(tmp_path)
    assert run.csv.read_bytes() == whole


WRITER = """
import sys
from hbsjd import results
run = results.Run("killed", "smoke", {}, "cpu", ("repeat",), root=sys.argv[1])
print("open", flush=True)
for cell in run.missing([dict(repeat=repeat) for repeat in range(int(sys.argv[2]))]):
    run.add(cell | dict(text="x" * 5000))
run.finish()
"""


def writer(root, rows):
    environment = os.environ | {"PYTHONPATH": str(results.ROOT)}
    return subprocess.Popen([sys.executable, "-c", WRITER, str(root), str(rows)], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def test_kill_9_loses_no_row_and_makes_no_duplicate(tmp_path):
    process = writer(tmp_path, 100_000)
    process.stdout.readline()
    with pytest.raises(ValueError, match="being written by another process"):
        results.Run("killed", "smoke", {}, "cpu", ("repeat",), root=tmp_path)
    while not results.newest(tmp_path / "killed" / "smoke"):
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    survived = len(results.load("killed", "smoke", root=tmp_path))
    resumed = writer(tmp_path, survived + 3)
    assert resumed.wait() == 0, resumed.communicate()
    assert results.load("killed", "smoke", root=tmp_path)["repeat"].tolist() == list(range(survived + 3))


def test_fresh_starts_a_new_file_and_keeps_the_old_one(tmp_path):
    first = measured(tmp_path)
    before = first.csv.read_bytes(), first.json.read_bytes()
    second = opened(tmp_path, fresh=True)
    assert second.missing(CELLS) == CELLS and second.csv.name == f"{first.csv.stem}-2.csv"
    assert len(loaded(tmp_path)) == len(CELLS)  # until the new file has rows
    second.add(CELLS[0] | dict(seconds=9.0))
    assert loaded(tmp_path).seconds.tolist() == [9.0]
    assert opened(tmp_path).csv == second.csv  # the same command without --fresh goes on where it stopped
    assert (first.csv.read_bytes(), first.json.read_bytes()) == before
    assert opened(tmp_path, fresh=True).csv.name == f"{first.csv.stem}-3.csv"


def test_configurations_and_devices_have_files_of_their_own(tmp_path):
    runs = [measured(tmp_path), measured(tmp_path, config=CONFIG | dict(seed=1)), measured(tmp_path, device="NVIDIA H200")]
    runs[2].file("grid.png").write_bytes(b"")
    assert runs[2].file("grid.png").name == f"{results.config_hash(CONFIG)}-nvidia_h200-grid.png"
    assert len({run.csv for run in runs}) == 3
    assert loaded(tmp_path).groupby(["config_hash", "device"]).size().tolist() == [len(CELLS)] * 3
    assert {facts["csv"] for facts in results.provenance("01_speedup_vs_batch", "smoke", tmp_path)} == {run.csv for run in runs}


def test_the_hash_does_not_depend_on_the_order_of_the_configuration():
    assert results.config_hash(CONFIG) == results.config_hash(dict(reversed(CONFIG.items()))) != results.config_hash(CONFIG | dict(seed=1))


def refused(tmp_path, match, **options):
    with pytest.raises(ValueError, match=match) as error:
        opened(tmp_path, **options)
    assert "\n" not in str(error.value)


def test_a_json_of_another_configuration_is_refused(tmp_path):
    run = measured(tmp_path)
    text = run.json.read_text()
    run.json.write_text(text.replace('"seed": 0', '"seed": 7'))
    refused(tmp_path, f"{run.json.name} describes another configuration.*--fresh")
    run.json.write_text(text[:-9])
    refused(tmp_path, f"{run.json.name} is damaged: restore it")


def test_rows_without_provenance_are_refused(tmp_path):
    run = measured(tmp_path)
    run.json.unlink()
    refused(tmp_path, f"{run.csv.name} has rows but no .json")
    with pytest.raises(ValueError, match="has rows but no .json"):
        loaded(tmp_path)


def test_other_columns_are_refused_by_name(tmp_path):
    run = measured(tmp_path, CELLS[:1])
    with pytest.raises(ValueError, match="differ in columns nfe, seconds: use --fresh"):
        run.add(CELLS[1] | dict(nfe=3))
    refused(tmp_path, "no column dtype", keys=(*KEYS, "dtype"))


def test_a_folder_that_cannot_be_written_is_refused_before_anything_is_measured(tmp_path):
    (tmp_path / "file").write_text("")
    refused(tmp_path / "file", "results cannot be written to .*HBSJD_RESULTS")


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_folder_is_refused(tmp_path):
    tmp_path.chmod(0o500)
    refused(tmp_path, "Permission denied")


def test_provenance_says_what_was_run_and_nothing_private(tmp_path, monkeypatch):
    words = [str(results.ROOT / "experiments" / "01.py"), "--scale", "smoke", f"--weights={tmp_path / 'mine.pt'}", str(tmp_path / "a.pt")]
    monkeypatch.setattr(sys, "argv", words)
    run = measured(tmp_path)
    facts = json.loads(run.json.read_text())
    assert facts["command"] == ["experiments/01.py", "--scale", "smoke", "--weights=mine.pt", "a.pt"]
    assert facts["source"] == "measured" and facts["config"] == CONFIG and facts["start"] <= facts["end"]
    assert set(facts["packages"]) == {"python", "torch", "numpy", "pandas"} and facts["device"] == results.cpu_name()
    words = re.findall(r'"([^"]*)"', run.json.read_text())
    assert not [word for word in words if word.startswith(("/", "~")) or re.match(r"[A-Z]:\\", word) or word == socket.gethostname()]


def test_notes_are_written_at_once_and_survive(tmp_path):
    run = opened(tmp_path)
    run.note(gamma=0.6)
    assert opened(tmp_path).facts["gamma"] == 0.6
    run.finish(driver="550")
    assert json.loads(run.json.read_text())["driver"] == "550"


def git(root, *words):
    subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *words], cwd=root, check=True, capture_output=True)


def test_the_commit_and_whether_code_differs_from_it(tmp_path):
    assert results.git_state(tmp_path) == (None, None)  # no repository
    git(tmp_path, "init")
    assert results.git_state(tmp_path) == (None, None)  # no commit
    (tmp_path / "code.py").write_text("1")
    git(tmp_path, "add", "."), git(tmp_path, "commit", "-m", "one")
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "new.csv").write_text("")
    commit, dirty = results.git_state(tmp_path)
    assert re.fullmatch("[0-9a-f]{40}", commit) and dirty is False
    (tmp_path / "code.py").write_text("2")
    assert results.git_state(tmp_path) == (commit, True)


def test_the_default_scale_is_the_largest_that_has_results(tmp_path, monkeypatch):
    monkeypatch.delenv("HBSJD_SCALE", raising=False)
    with pytest.raises(ValueError, match="no results of 05_quality: run `python experiments/05_quality.py --scale small`"):
        results.load("05_quality", root=tmp_path)
    for scale in ("smoke", "small"):
        results.Run("05_quality", scale, {}, "cpu", ("repeat",), root=tmp_path).add(dict(repeat=0))
        assert results.default_scale("05_quality", tmp_path) == scale
    monkeypatch.setenv("HBSJD_SCALE", "paper")
    with pytest.raises(ValueError, match="no results of 05_quality at scale paper"):
        results.load("05_quality", root=tmp_path)


def test_every_printed_table_is_there():
    names = sorted(path.stem for path in results.PAPER.glob("*.csv"))
    assert [name[:7] for name in names] == ["fig01b_", "fig03_l"] + [f"table{n:02}" for n in range(1, 11)]
    batch = results.paper("table05_batch_size").set_index("B")
    assert ((batch.ar_ms / batch.hbsjd_ms - batch.speedup).abs() < 2e-3).all()
