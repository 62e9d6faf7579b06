#!/usr/bin/env bash
# From nothing to the figures. The same command resumes: what is installed and what is measured is kept.
set -euo pipefail
cd "$(dirname "$0")"

# One line per stage: the stem of experiments/STEM.py and notebooks/STEM.ipynb, minutes at smoke, minutes at small.
stages="
00_prepare           1  1
01_speedup_vs_batch  1  8
02_acceptance        1  6
03_full_vs_compact   1  8
04_distill           1  38
05_quality           1  24
06_exactness         1  6
09_adaptive_window   1  12
"

usage() {
  cat <<'END'
usage: bash reproduce.sh [smoke|small|paper|figures|test] [--only 01,03] [--fresh]

  smoke          every stage on tiny random models, under a minute each
  small          the trained models of this repository on real images (default)
  paper          the paper's models and data (not built yet)
  figures        no experiment and no torch: draw the figures from the committed results
  test           the tests; what follows goes to pytest, as in: test -k gumbel

  --only 01,03   these stages only
  --fresh        measure everything again, into new results files
END
}

die() { echo "reproduce.sh: $1" >&2; exit 1; }

mode='' only='' fresh=''
while [ $# -gt 0 ]; do
  case $1 in
    smoke|small|paper|figures) [ -z "$mode" ] || die "two modes at once: $mode and $1"; mode=$1 ;;
    test) mode='test'; shift; break ;;
    --only) only=${2:-}; [ -n "$only" ] || die "--only needs stage numbers, as in: --only 01,03"; shift ;;
    --fresh) fresh=--fresh ;;
    -h|--help) usage; exit ;;
    *) die "unknown argument '$1' (see: bash reproduce.sh --help)" ;;
  esac
  shift
done
case $mode in test|figures) [ -z "$only$fresh" ] || die "$mode takes neither --only nor --fresh" ;; esac
[ "$mode" != paper ] || die "the paper's scale is not built yet; run: bash reproduce.sh small"
[ -n "$mode" ] || { mode=small; echo "scale: small (the default until the paper's scale is built)"; }
numbers=$(echo "$stages" | sed -n 's/_.*//p' | tr '\n' ' ')
for number in ${only//,/ }; do
  case " $numbers" in *" $number "*) ;; *) die "--only: there is no stage '$number'; the stages are: $numbers" ;; esac
done

mkdir -p logs
log=logs/$(date +%Y%m%d-%H%M%S)-$mode.log
export PYTHONUNBUFFERED=1 PYTHONNOUSERSITE=1 PIP_DISABLE_PIP_VERSION_CHECK=1
say() { echo "$1" | tee -a "$log"; }
run() { "$@" 2>&1 </dev/null | tee -a "$log"; } # pipefail: its exit code is the command's

# --- the environment: .venv, or an active conda environment other than base ---
venv=.venv need_gb=8 cost="4 minutes, 6 GB" conda=''
if [ "$mode" = figures ]; then
  venv=.venv-figures need_gb=2 cost="1 minute, 1 GB"
elif [ "${CONDA_DEFAULT_ENV:-base}" != base ] && [ -n "${CONDA_PREFIX:-}" ]; then
  venv=$CONDA_PREFIX conda=yes
  say "using the active conda environment $CONDA_DEFAULT_ENV"
elif [ -n "${CONDA_PREFIX:-}" ]; then
  say "conda's base environment is left as it is: using $venv"
fi
py=$venv/bin/python

new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }
find_python() {
  for candidate in "$@" python3 python3.13 python3.12 python3.11; do
    if new_enough "$candidate"; then echo "$candidate"; return; fi
  done
  die "python 3.11 or newer is needed, and there is none on the PATH"
}
pip_install() { "$py" -m pip install -c constraints.txt "$@" 2>>"$log" </dev/null | tee -a "$log"; }

install() {
  # The state says "unfinished" from before the first file to after the last: a killed install is never taken for a ready one.
  local state=$venv/hbsjd-state stamp found python free_gb list
  stamp="$PWD $(cat pyproject.toml constraints.txt | cksum)"
  found=$(cat "$state" 2>/dev/null || true)
  if [ "$found" = "$stamp" ] && [ -x "$py" ]; then return; fi
  if [ "$found" = unfinished ]; then
    [ -z "$conda" ] || die "an install into $venv was interrupted: remove that conda environment and make it again"
    rm -rf "$venv"
    found=''
  fi
  if [ -z "$found" ]; then
    need_gb=${HBSJD_MIN_DISK_GB:-$need_gb}
    free_gb=$(df -Pk "$(dirname "$venv")" | awk 'NR == 2 { print int($4 / 1048576) }')
    [ "$free_gb" -ge "$need_gb" ] || die "too little disk: installing needs $need_gb GB, $free_gb GB are free"
  fi
  if [ ! -x "$py" ]; then
    python=$(find_python)
    rm -rf "$venv"
    mkdir "$venv"
    echo unfinished > "$state"
    run "$python" -m venv "$venv" || die "$python could not make $venv (on Debian and Ubuntu: apt install python3-venv)"
  fi
  new_enough "$py" || die "$py is not python 3.11 or newer: make that environment again"

  say "installing into $venv ($cost)"
  echo unfinished > "$state"
  if [ "$mode" = figures ]; then
    list=$("$py" -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["figures"])')
    # shellcheck disable=SC2086 # one word per requirement
    pip_install $list && pip_install --no-deps -e .
  else
    pip_install -e '.[all]' # one command, so that torch and torchvision are chosen together
  fi || { rm "$state"; die "installing failed: is there a network? What pip said is in $log; the same command tries again"; }
  echo "$stamp" > "$state"
}

# A stage may outlive its killed reproduce.sh, and then still holds this lock: two runs never install or measure at the same time.
python=$(find_python "$py")
exec 9> "logs/$(basename "$venv").lock"
"$python" - 2>/dev/null <<'END' || say "this file system has no locks: start no second run in this folder"
import fcntl
try:
    fcntl.flock(9, fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    print("an earlier run is still at work in this folder: waiting for it to end")
    fcntl.flock(9, fcntl.LOCK_EX)
END
install
[ "$mode" != test ] || { run "$py" -m pytest "$@"; exit; }

# --- the stages ---
[ "$mode" = figures ] || export HBSJD_SCALE=$mode # for the notebooks, which otherwise take the largest committed scale
plan=$(echo "$stages" | awk -v mode="$mode" -v only=",$only," '
  NF && (only == ",," || index(only, "," substr($1, 1, 2) ",")) { print $1, (mode == "small" ? $3 : $2) }')
[ -n "$only" ] || plan="$plan
00_paper 0" # the page that sets all of them beside the paper
commands() { # of a stage: its experiment, then its notebook, whichever there are
  [ "$mode" = figures ] || [ ! -f "experiments/$1.py" ] || echo "-m experiments.$1 --scale $mode${fresh:+ $fresh}"
  [ ! -f "notebooks/$1.ipynb" ] || echo "-m nbconvert --to notebook --execute --log-level WARN --output-dir logs/notebooks notebooks/$1.ipynb"
}

say "plan: about $(echo "$plan" | awk '{ sum += $2 } END { print sum }') minutes (log: $log)"
while read -r stem minutes; do
  say "  $stem, about $minutes min"
  say "$(commands "$stem" | sed 's/^/    python /')"
done <<< "$plan"

# Everything that a notebook reads and draws, as one checksum. The results and the figures are those whose names it says.
state_of() {
  local stem=$1 results=${HBSJD_RESULTS:-results} figures=${HBSJD_FIGURES:-figures} name
  [ "$mode" != smoke ] || figures=$figures/smoke
  set -- "notebooks/$stem.ipynb" hbsjd/report.py hbsjd/results.py results/paper "$venv/hbsjd-state"
  for name in "$stem" $(grep -oE '[0-9][0-9]_[a-z0-9_]+' "notebooks/$stem.ipynb" | sort -u); do
    set -- "$@" "$results/$name/$mode" "$figures/$name".*
  done
  { find "$@" -type f -exec cksum {} + 2>/dev/null || true; } | sort | cksum
}

# A notebook is executed where something of that has changed since it was, with --fresh, and always for `figures`.
notebook() {
  local stem=$1 state=logs/notebooks/$1-$mode.state
  shift
  if [ "$mode" != figures ] && [ -z "$fresh" ] && [ "$(cat "$state" 2>/dev/null)" = "$(state_of "$stem")" ]; then
    say "notebooks/$stem.ipynb is up to date"
  else
    run "$py" "$@" && state_of "$stem" > "$state"
  fi
}

trap '[ $? = 0 ] || echo "reproduce.sh: stopped in stage $stem; the same command${fresh:+ without --fresh} resumes (log: $log)" >&2' EXIT
mkdir -p logs/notebooks
while read -r stem minutes; do
  say "== $stem, $((SECONDS / 60)) min $((SECONDS % 60)) s after the start"
  # shellcheck disable=SC2086 # one word per argument
  commands "$stem" | while read -r arguments; do
    case $arguments in
      *nbconvert*) notebook "$stem" $arguments ;;
      *) run "$py" $arguments ;;
    esac || exit $?
  done || exit $? # bash 3.2 needs both said
done <<< "$plan"
say "done in $((SECONDS / 60)) min: results/ and figures/ (executed notebooks: logs/notebooks/)"
