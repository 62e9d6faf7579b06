"""Results on disk: one CSV of rows and one JSON of provenance per (configuration, device), written as measured and never altered.

    results/<stem>/<scale>/<config-hash>-<device>.csv     one row per measurement; columns in results/README.md
    results/<stem>/<scale>/<config-hash>-<device>.json    what was run: configuration, command, commit, versions, device, times

The hash covers `config`: what changes the meaning of a row (scale, weights, seed, threads), never the lists that are swept. An edited
list therefore adds rows to the same file. A second pair of the same name (`--fresh`) ends in `-2`, the next in `-3`: the older ones
stay, and only the newest that has rows is read. $HBSJD_RESULTS, $HBSJD_FIGURES, $HBSJD_CHECKPOINTS and $HBSJD_SCALE override the folders and the scale.
"""
from __future__ import annotations

import csv
import hashlib
import io
import json
import os
import platform
import re
import subprocess
import sys
from datetime import UTC, datetime
from functools import partial
from importlib import metadata
from pathlib import Path

import pandas as pd

try:
    import fcntl
except ImportError:  # Windows: two processes on one file are not kept apart
    fcntl = None

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path(os.environ.get("HBSJD_RESULTS", ROOT / "results"))
FIGURES = Path(os.environ.get("HBSJD_FIGURES", ROOT / "figures"))
CHECKPOINTS = Path(os.environ.get("HBSJD_CHECKPOINTS", ROOT / "checkpoints"))
PAPER = ROOT / "results" / "paper"
SCALES = ("paper", "small", "smoke")  # the largest first
SCHEMA_VERSION = 1


class Run:
    """The rows of one configuration on one device, opened to add what is missing.

    `device`: "cpu" becomes the processor's model; for a GPU give its name (`torch.cuda.get_device_name()`).
    `keys`: the columns that name a measurement; no two rows share their values. `fresh` starts a new file, without it the newest goes on.
    `run.facts` is the provenance so far; `run.file("grid.png")` is the path of a companion file.
    """

    def __init__(self, stem: str, scale: str, config: dict, device: str, keys: tuple[str, ...], fresh: bool = False, root: Path = RESULTS):
        config = json.loads(json.dumps(config))
        device = cpu_name() if device == "cpu" else device
        identity = dict(schema_version=SCHEMA_VERSION, stem=stem, scale=scale, config=config, config_hash=config_hash(config), device=device)
        self.keys, self.csv = keys, pair(Path(root) / stem / scale, f"{identity['config_hash']}-{slug(device)}", fresh)
        self.json = self.csv.with_suffix(".json")
        try:
            self.csv.parent.mkdir(parents=True, exist_ok=True)
            self.handle = open(self.csv, "a+b")
            if not self.json.exists() and not self.csv.stat().st_size:
                self._save(identity | dict(source="measured") | session() | dict(end=None))
        except OSError as error:
            problem = f"results cannot be written to {self.csv.parent} ({error.strerror})"
            raise ValueError(f"{problem}: make it writable, or set HBSJD_RESULTS to another folder") from None
        self.facts = read_facts(self.csv)
        if {name: self.facts.get(name) for name in identity} != identity:
            raise ValueError(f"{self.json} describes another configuration than this run: move it and its .csv away, or use --fresh")
        self._lock()
        self._read()

    def missing(self, cells: list[dict]) -> list[dict]:
        """The cells that have no row yet."""
        return [cell for cell in cells if self._key(cell) not in self.done]

    def add(self, row: dict) -> None:
        """Append one row, on the disk before this returns. The first row fixes the columns."""
        if self._key(row) in self.done:
            raise ValueError(f"{self.csv} already has a row for {' '.join(self._key(row))}: measure what `missing` returns")
        if self.columns and set(row) != set(self.columns):
            raise ValueError(f"{self.csv} and this row differ in columns {', '.join(sorted(set(row) ^ set(self.columns)))}: use --fresh")
        if not self.added and self.done:
            self.note(resumed=[*self.facts.get("resumed", []), session() | dict(rows_before=len(self.done))])
        lines = [] if self.columns else [list(row)]
        self.columns = self.columns or list(row)
        self.handle.write(csv_text([*lines, [row[column] for column in self.columns]]))
        self.handle.flush()
        os.fsync(self.handle.fileno())
        self.done.add(self._key(row))
        self.added += 1

    def note(self, **facts) -> None:
        """Merge facts into the provenance at once."""
        self._save(self.facts | facts)

    def finish(self, **facts) -> None:
        """Note the facts and, where rows were added, the time. A run that had nothing to do leaves its files as they were."""
        self.note(**facts, **(dict(end=now()) if self.added else {}))

    def file(self, ending: str) -> Path:
        """A companion file of this run: `<config-hash>-<device>-<ending>`."""
        return self.csv.with_name(f"{self.csv.stem}-{ending}")

    def _lock(self):
        """Held until this process ends, however it ends. The lock is lost where this process closes the file elsewhere: read through `handle`."""
        try:
            if fcntl:
                fcntl.lockf(self.handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ValueError(f"{self.csv} is being written by another process: wait until it has ended, or stop it") from None

    def _read(self):
        self.handle.seek(0)
        data = whole_lines(self.handle.read())
        self.handle.truncate(len(data))  # drops the unfinished last line of a run that was killed
        rows = list(csv.DictReader(io.StringIO(data.decode())))
        self.columns, self.added = next(csv.reader(io.StringIO(data.decode())), []), 0
        if self.columns and not set(self.keys) <= set(self.columns):
            absent = ", ".join(sorted(set(self.keys) - set(self.columns)))
            raise ValueError(f"{self.csv} has no column {absent}: move it and its .json away, or use --fresh")
        self.done = {self._key(row) for row in rows}

    def _key(self, row: dict) -> tuple[str, ...]:
        return tuple("" if row[key] is None else str(row[key]) for key in self.keys)  # as the CSV writes it

    def _save(self, facts: dict):
        self.facts = facts
        write_json(self.json, facts)


def load(stem: str, scale: str | None = None, root: Path = RESULTS) -> pd.DataFrame:
    """Every row of the scale, with columns `config_hash` and `device`: group by both, so that nothing is pooled that was not measured together."""
    scale = scale or default_scale(stem, root)
    frames = []
    for facts in provenance(stem, scale, root):
        rows = pd.read_csv(io.BytesIO(whole_lines(facts["csv"].read_bytes())))
        frames.append(rows.assign(config_hash=facts["config_hash"], device=facts["device"]))
    return pd.concat(frames, ignore_index=True)


def provenance(stem: str, scale: str | None = None, root: Path = RESULTS) -> list[dict]:
    """The JSON of every file that `load` reads, in its order, each with `csv`, the path of its rows."""
    scale = scale or default_scale(stem, root)
    paths = newest(Path(root) / stem / scale)
    if not paths:
        raise ValueError(f"no results of {stem} at scale {scale}: run `python experiments/{stem}.py --scale {scale}`")
    return [read_facts(path) | dict(csv=path) for path in paths]


def default_scale(stem: str, root: Path = RESULTS) -> str:
    """$HBSJD_SCALE where it is set, otherwise the largest scale that has results."""
    having = [scale for scale in SCALES if newest(Path(root) / stem / scale)]
    chosen = [os.environ.get("HBSJD_SCALE"), *having]
    if not any(chosen):
        raise ValueError(f"no results of {stem}: run `python experiments/{stem}.py --scale small`")
    return next(filter(None, chosen))


def paper(name: str) -> pd.DataFrame:
    """The paper's printed numbers: results/paper/<name>.csv."""
    return pd.read_csv(PAPER / f"{name}.csv")


def cache_dir() -> Path:
    """Where rendered images, calibrations, converted official weights and codes are kept: $HBSJD_CACHE, by default ~/.cache/hbsjd."""
    return Path(os.environ.get("HBSJD_CACHE", "~/.cache/hbsjd")).expanduser()


def figure_dir(scale: str) -> Path:
    folder = FIGURES / "smoke" if scale == "smoke" else FIGURES
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def pair(folder: Path, name: str, fresh: bool) -> Path:
    """The newest CSV of that name, or the one after it where `fresh` asks for a new one."""
    last = max((number for other, number, _ in numbered(folder) if other == name), default=0)
    number = max(1, last + fresh)
    return folder / (f"{name}.csv" if number == 1 else f"{name}-{number}.csv")


def newest(folder: Path) -> list[Path]:
    """Of every configuration and device, the newest CSV that has rows."""
    return list({name: path for name, number, path in numbered(folder) if whole_lines(path.read_bytes())}.values())


def numbered(folder: Path) -> list[tuple[str, int, Path]]:
    """(name, number, path) of every CSV, in order: `<config-hash>-<device>` is number 1, `<config-hash>-<device>-N` is number N."""
    found = [(re.fullmatch(r"([0-9a-f]{10}-[a-z0-9_]+)(?:-(\d+))?", path.stem), path) for path in folder.glob("*.csv")]
    return sorted((match[1], int(match[2] or 1), path) for match, path in found if match)


def write_json(path: Path, facts: dict) -> None:
    """The file is replaced whole, and left alone where it says the same already."""
    text = json.dumps(facts, indent=2) + "\n"
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_suffix(f".{os.getpid()}.partial")
        new.write_text(text, encoding="utf-8")
        os.replace(new, path)


def read_facts(path: Path) -> dict:
    try:
        return json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path} has rows but no .json beside it that says what they are: restore that, or move the .csv away") from None
    except json.JSONDecodeError:
        raise ValueError(f"{path.with_suffix('.json')} is damaged: restore it, or move it and its .csv away") from None


def whole_lines(data: bytes) -> bytes:
    return data[: data.rfind(b"\n") + 1]


def csv_text(rows: list[list]) -> bytes:
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(rows)
    return out.getvalue().encode()


def config_hash(config: dict) -> str:
    return hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()[:10]


def slug(device: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", device.lower()).strip("_")


def session() -> dict:
    """What runs now, with repository-relative paths and no host name."""
    commit, dirty = git_state(ROOT)
    versions = {"python": platform.python_version()} | {name: version(name) for name in ("torch", "numpy", "pandas")}
    return dict(command=[portable(word) for word in sys.argv], git_commit=commit, git_dirty=dirty, packages=versions, start=now())


def git_state(root: Path) -> tuple[str | None, bool | None]:
    """The commit, and whether anything but results and figures differs from it; (None, None) without a repository."""
    git = partial(subprocess.run, cwd=root, capture_output=True, text=True, check=True)
    if not (root / ".git").exists():
        return None, None
    try:
        commit = git(["git", "rev-parse", "HEAD"]).stdout.strip()
        return commit, bool(git(["git", "status", "--porcelain", "--", ".", ":!results", ":!figures"]).stdout)
    except (OSError, subprocess.CalledProcessError):  # no git, or no commit yet
        return None, None


def portable(word: str) -> str:
    """An absolute path, alone or after `--option=`, becomes relative to the repository; outside of it only the name stays."""
    option, equals, path = word.rpartition("=")
    path = Path(path)
    if path.is_absolute():
        path = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path.name
        return f"{option}{equals}{path}"
    return word


def version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def cpu_name() -> str:
    if platform.system() == "Darwin":
        return subprocess.run(["sysctl", "-n", "machdep.cpu.brand_string"], capture_output=True, text=True).stdout.strip()
    info = Path("/proc/cpuinfo")
    models = re.findall(r"^model name\s*:\s*(.+)$", info.read_text(), re.MULTILINE) if info.exists() else []
    return re.sub(r"\((R|TM)\)", "", models[0]) if models else platform.processor() or platform.machine()


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
