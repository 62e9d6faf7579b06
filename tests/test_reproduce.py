"""reproduce.sh as a user meets it, in a copy of the repository where `python` is a stub: it notes how it was called and installs nothing."""
import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

STUB = f"""#!/bin/sh
case "$1" in -c | -) [ -z "$OLD" ] && exec '{sys.executable}' "$@"; exit 1 ;; esac
echo "$*" >> "$CALLS"
case "$*" in
  $KILL) kill -9 0 ;;
  $FAIL) echo "words of the command"; exit 7 ;;
  "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
esac
"""


class Checkout:
    def __init__(self, root: Path):
        self.root, self.calls_file = root, root / "calls.txt"
        for name in ("reproduce.sh", "pyproject.toml", "constraints.txt"):
            shutil.copy(ROOT / name, root)
        for name in ("experiments/00_prepare.py", "experiments/01_speedup_vs_batch.py", "notebooks/01_speedup_vs_batch.ipynb"):
            (root / name).parent.mkdir(exist_ok=True)
            (root / name).touch()
        for name in ("python3", "python3.11", "python3.12", "python3.13"):
            self.stub(root / "bin" / name)

    def stub(self, path: Path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(STUB)
        path.chmod(0o755)

    def start(self, *arguments, **env):
        """In a process group of its own, which a stub can kill as a whole; nothing of the caller's environment gets in."""
        self.calls_file.write_text("")
        env = {"PATH": f"{self.root}/bin:/usr/bin:/bin", "HOME": str(self.root), "HBSJD_MIN_DISK_GB": "0", "KILL": "-", "FAIL": "-"} | env
        env["CALLS"] = str(self.calls_file)
        command = [shutil.which("bash"), self.root / "reproduce.sh", *arguments]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, env=env, cwd="/", text=True, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, start_new_session=True)

    def run(self, *arguments, **env):
        process = self.start(*arguments, **env)
        out, err = process.communicate()
        return process.returncode, out, err

    def calls(self):
        return self.calls_file.read_text().splitlines()


@pytest.fixture
def checkout(tmp_path):
    return Checkout(tmp_path)


def assert_one_clear_line(result, *words):
    code, _, err = result
    assert code not in (0, None) and err.count("\n") == 1, err
    for word in words:
        assert word in err


STAGES_SMOKE = [
    "-m experiments.00_prepare --scale smoke",
    "-m experiments.01_speedup_vs_batch --scale smoke",
    "-m nbconvert --to notebook --execute --log-level WARN --output-dir logs/notebooks notebooks/01_speedup_vs_batch.ipynb",
]
*STAGES_AGAIN, NOTEBOOK = STAGES_SMOKE  # a second run finds the notebook up to date
INSTALL = "-m pip install -c constraints.txt -e .[all]"


def test_help(checkout):
    code, out, err = checkout.run("--help")
    assert code == 0 and err == "" and "smoke|small|paper|figures|test" in out


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["larger"], ["larger", "--help"]),
        (["smoke", "--quick"], ["--quick", "--help"]),
        (["paper"], ["not built yet", "bash reproduce.sh small"]),
        (["--only", "99"], ["99", "00 01"]),
        (["smoke", "--only", "01,7"], ["'7'", "00 01"]),
        (["--only"], ["--only 01,03"]),
    ],
)
def test_a_wrong_call_is_one_line_and_touches_nothing(checkout, arguments, words):
    assert_one_clear_line(checkout.run(*arguments), *words)
    assert checkout.calls() == [] and not (checkout.root / ".venv").exists() and not (checkout.root / "logs").exists()


def test_too_little_disk(checkout):
    assert_one_clear_line(checkout.run("smoke", HBSJD_MIN_DISK_GB="1000000"), "disk", "1000000 GB")
    assert checkout.calls() == []


def test_python_too_old(checkout):
    assert_one_clear_line(checkout.run("smoke", OLD="yes"), "3.11")
    (checkout.root / ".venv").mkdir()
    checkout.stub(checkout.root / ".venv/bin/python")
    assert_one_clear_line(checkout.run("smoke", OLD="yes"), "3.11")


def test_installs_once_then_runs_the_stages(checkout):
    code, out, err = checkout.run("smoke")
    assert (code, err) == (0, "")
    assert checkout.calls() == ["-m venv .venv", INSTALL, *STAGES_SMOKE]
    for call in STAGES_SMOKE:
        assert f"python {call}" in out  # the plan
    (log,) = (checkout.root / "logs").glob("*-smoke.log")
    assert log.read_text() == out

    checkout.run("smoke")
    assert checkout.calls() == STAGES_AGAIN

    with (checkout.root / "constraints.txt").open("a") as f:
        f.write("# another set\n")
    checkout.run("smoke")
    assert checkout.calls() == [INSTALL, *STAGES_SMOKE]


def test_default_scale_only_and_fresh(checkout):
    code, out, _ = checkout.run("--only", "00", "--fresh")
    assert code == 0 and "scale: small" in out
    assert checkout.calls()[2:] == ["-m experiments.00_prepare --scale small --fresh"]


def executes(checkout, *arguments, **env):
    """Whether this call executes the notebook; where it does not, it says so."""
    code, out, err = checkout.run(*arguments, "--only", "01", **env)
    executed = NOTEBOOK in checkout.calls()
    assert (code, err) == (0, "") and executed != ("01_speedup_vs_batch.ipynb is up to date" in out)
    return executed


def test_a_notebook_is_executed_again_only_when_something_changed(checkout):
    def write(name, text):
        path = checkout.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    results, figure = write("results/01_speedup_vs_batch/smoke/0123456789-cpu.csv", "a,b\n"), write("figures/smoke/01_lines.svg", "<svg/>")
    read = [results, write("results/paper/table02.csv", ""), write("results/02_acceptance/smoke/0123456789-cpu.json", ""),
            write("hbsjd/report.py", ""), write("hbsjd/results.py", ""), figure,
            write("notebooks/01_speedup_vs_batch.ipynb", 'results.load(\\"02_acceptance\\")\\nreport.save(fig, \\"01_lines\\", scale)')]
    assert executes(checkout, "smoke") and not executes(checkout, "smoke")
    for path in read:
        path.write_text(path.read_text() + "more")
        assert executes(checkout, "smoke"), path
    write("results/01_speedup_vs_batch/smoke/0123456789-gpu.csv", "a,b\n")
    assert executes(checkout, "smoke") and not executes(checkout, "smoke")
    figure.unlink()
    assert executes(checkout, "smoke")

    for name in "results/01_speedup_vs_batch/small/0123456789-cpu.csv", "results/03_full_vs_compact/smoke/0123456789-cpu.csv", "figures/smoke/02_grid.svg":
        write(name, "which it does not read")
    assert not executes(checkout, "smoke")
    assert executes(checkout, "small") and not executes(checkout, "small") and not executes(checkout, "smoke")
    assert executes(checkout, "smoke", "--fresh") and not executes(checkout, "smoke")
    for _ in range(2):
        checkout.run("figures")
        assert NOTEBOOK in checkout.calls()


def test_a_notebook_that_failed_is_executed_again(checkout):
    assert checkout.run("smoke", FAIL="-m nbconvert*")[0] == 7
    assert executes(checkout, "smoke") and not executes(checkout, "smoke")


def test_a_notebook_follows_the_folders_in_the_environment(checkout):
    folders = {"HBSJD_RESULTS": str(checkout.root / "my results"), "HBSJD_FIGURES": str(checkout.root / "my figures")}
    read = [checkout.root / "my results/01_speedup_vs_batch/smoke/0123456789-cpu.csv", checkout.root / "my figures/smoke/01_speedup_vs_batch.md"]
    assert executes(checkout, "smoke", **folders)
    for path in read:
        path.parent.mkdir(parents=True)
        path.touch()
        assert executes(checkout, "smoke", **folders) and not executes(checkout, "smoke", **folders)


def test_a_failing_stage_stops_the_run_with_its_exit_code(checkout):
    code, out, err = checkout.run("smoke", FAIL="-m experiments.00*")
    assert code == 7 and "words of the command" in out
    assert err.count("\n") == 1 and "00_prepare" in err and "resumes" in err
    assert checkout.calls()[-1] == STAGES_SMOKE[0]
    assert checkout.run("smoke")[0] == 0


def test_a_failed_install_is_one_line_and_is_tried_again(checkout):
    assert_one_clear_line(checkout.run("smoke", FAIL="-m pip*"), "network", "logs/")
    assert checkout.run("smoke")[0] == 0
    assert checkout.calls() == [INSTALL, *STAGES_SMOKE]


@pytest.mark.parametrize("moment", ["-m venv*", "-m pip*"])
def test_a_killed_install_starts_over(checkout, moment):
    assert checkout.run("smoke", KILL=moment)[0] == -9
    assert checkout.run("smoke")[0] == 0
    assert checkout.calls() == ["-m venv .venv", INSTALL, *STAGES_SMOKE]


def test_a_killed_update_starts_over(checkout):
    checkout.run("smoke")
    pyproject = checkout.root / "pyproject.toml"
    before = pyproject.read_text()
    pyproject.write_text(before + "# more\n")
    checkout.run("smoke", KILL="-m pip*")
    pyproject.write_text(before)
    checkout.run("smoke")
    assert checkout.calls() == ["-m venv .venv", INSTALL, *STAGES_AGAIN]


def test_a_venv_made_by_hand_is_kept(checkout):
    checkout.stub(checkout.root / ".venv/bin/python")
    assert checkout.run("smoke")[0] == 0
    assert checkout.calls() == [INSTALL, *STAGES_SMOKE]


def test_conda_base_is_left_alone_and_another_environment_is_used(checkout):
    prefix = checkout.root / "conda"
    checkout.stub(prefix / "bin/python")
    _, out, _ = checkout.run("smoke", CONDA_PREFIX=str(prefix), CONDA_DEFAULT_ENV="base")
    assert "base" in out and checkout.calls()[0] == "-m venv .venv"
    shutil.rmtree(checkout.root / ".venv")
    _, out, _ = checkout.run("smoke", CONDA_PREFIX=str(prefix), CONDA_DEFAULT_ENV="vision")
    assert "vision" in out and checkout.calls() == [INSTALL, *STAGES_SMOKE]
    assert not (checkout.root / ".venv").exists()


def test_a_killed_install_into_conda_names_the_fix(checkout):
    conda = {"CONDA_PREFIX": str(checkout.root / "conda"), "CONDA_DEFAULT_ENV": "vision"}
    checkout.stub(checkout.root / "conda/bin/python")
    checkout.run("smoke", KILL="-m pip*", **conda)
    assert_one_clear_line(checkout.run("smoke", **conda), "remove that conda environment")
    assert checkout.calls() == []


def test_figures_installs_no_torch_and_runs_no_experiment(checkout):
    code, _, err = checkout.run("figures")
    assert (code, err) == (0, "")
    venv, packages, package, notebook = checkout.calls()
    assert venv == "-m venv .venv-figures" and package == "-m pip install -c constraints.txt --no-deps -e ." and notebook == NOTEBOOK
    assert set(packages.removeprefix("-m pip install -c constraints.txt ").split()) == {"numpy", "pandas", "matplotlib", "seaborn", "jupyter"}


def test_the_rest_of_test_goes_to_pytest(checkout):
    code, _, _ = checkout.run("test", "-k", "two words", FAIL="-m pytest*")
    assert code == 7 and checkout.calls()[-1] == "-m pytest -k two words"


def test_a_second_run_waits_for_what_the_first_left_running(checkout):
    checkout.run("smoke")
    with (checkout.root / "logs/.venv.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        process = checkout.start("smoke")
        assert "waiting" in process.stdout.readline()
        assert checkout.calls() == []
        fcntl.flock(lock, fcntl.LOCK_UN)
        process.communicate()
    assert process.returncode == 0 and checkout.calls() == STAGES_AGAIN


def test_without_network_the_real_pip_ends_in_one_line(checkout):
    for stub in (checkout.root / "bin").iterdir():
        stub.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    result = checkout.run("smoke", PIP_NO_INDEX="1", PIP_FIND_LINKS=str(checkout.root / "nothing"), PIP_CONFIG_FILE=os.devnull)
    assert_one_clear_line(result, "network", "logs/")
    (log,) = (checkout.root / "logs").glob("*.log")
    assert "No matching distribution" in log.read_text()


def test_every_stage_is_a_file():
    table = (ROOT / "reproduce.sh").read_text().split('stages="\n')[1].split('"')[0]
    for stem in (line.split()[0] for line in table.splitlines()):
        assert (ROOT / f"experiments/{stem}.py").exists() or (ROOT / f"notebooks/{stem}.ipynb").exists(), stem
