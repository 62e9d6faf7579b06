"""Every notebook: the rules of its source, and a run from top to bottom on made-up results, without torch, twice with the same figures."""
import ast
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections import Counter
from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from hbsjd import results

NOTEBOOKS = sorted((results.ROOT / "notebooks").glob("*.ipynb"), key=lambda path: (path.stem == "00_paper", path.stem))  # that collects the tables of all
EACH = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
TEXT = {".md", ".csv", *([".svg"] if (sys.platform, platform.machine()) == ("linux", "x86_64") else [])}
IMPORTS = {"matplotlib", "numpy", "pandas", "seaborn", "hbsjd", "IPython"}


def cells(path, kind):
    return ["".join(cell["source"]) for cell in json.loads(path.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == kind]


def nodes(path):
    return [node for code in cells(path, "code") for node in ast.walk(ast.parse(code))]


# The source


@EACH
def test_it_is_a_stripped_python_notebook(path):
    notebook = json.loads(path.read_text(encoding="utf-8"))
    assert notebook["metadata"]["kernelspec"]["name"] == "python3" and notebook["metadata"]["language_info"]["name"] == "python"
    assert notebook["nbformat"] == 4 and len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])
    for cell in notebook["cells"]:
        assert cell["cell_type"] == "markdown" or (cell["outputs"] == [] and cell["execution_count"] is None)


@EACH
def test_it_is_thin(path):
    assert max(len(code.splitlines()) for code in cells(path, "code")) <= 25
    assert not [node for node in nodes(path) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)]


@EACH
def test_it_imports_only_results_and_report(path):
    imported = [(node.module, [name.name for name in node.names]) for node in nodes(path) if isinstance(node, ast.ImportFrom)]
    imported += [(name.name, []) for node in nodes(path) if isinstance(node, ast.Import) for name in node.names]
    assert {module.split(".")[0] for module, _ in imported} <= IMPORTS
    assert all(module == "hbsjd" and set(names) <= {"results", "report"} for module, names in imported if module.startswith("hbsjd"))


@EACH
def test_it_reads_and_writes_through_results_and_report(path):
    called = {node.attr for node in nodes(path) if isinstance(node, ast.Attribute)} | {node.id for node in nodes(path) if isinstance(node, ast.Name)}
    assert not called & {"open", "exec", "eval", "read_csv", "to_csv", "read_text", "write_text", "savefig", "urlopen", "environ", "system"}


@EACH
def test_it_holds_no_measured_number(path):
    """A number of three digits or more that is printed in the paper or measured here comes from a results file."""
    files = [file for file in results.RESULTS.glob("*/**/*.csv") if file.stat().st_size]
    known = {number for file in files for number in pd.read_csv(file).select_dtypes("float").to_numpy().flat}
    typed = {node.value for node in nodes(path) if isinstance(node, ast.Constant) and isinstance(node.value, int | float)}
    assert not {number for number in typed if digits(number) >= 3 and float(number) in known}


def digits(number):
    return len(re.sub(r"^0+|\D", "", f"{number:g}".replace(".", "")))


@EACH
def test_each_figure_is_embedded_above_its_cell(path):
    notebook = json.loads(path.read_text(encoding="utf-8"))["cells"]
    for above, cell in zip(notebook, notebook[1:], strict=False):
        for name in re.findall(r'report\.save\(\w+, "(\w+)"', "".join(cell["source"])):
            assert f"](../figures/{name}.svg)" in "".join(above["source"]) and name.startswith(path.stem[:3])


@EACH
def test_its_stem_is_an_experiment(path):
    assert path.stem == "00_paper" or (results.ROOT / "experiments" / f"{path.stem}.py").exists()


@pytest.mark.parametrize("stem", ["00_paper", "00_prepare", "05_quality"])
def test_openmoji_is_credited_where_its_pictures_are_shown(stem):
    text = "".join(cells(results.ROOT / "notebooks" / f"{stem}.ipynb", "markdown"))
    assert "OpenMoji" in text and "CC BY-SA 4.0" in text


# A run


def prepared(root):
    """Made-up results of 00_prepare."""
    run = results.Run("00_prepare", "small", {"seed": 0}, "Test CPU", ("model", "split", "metric", "step"), root=root)
    for split in ("validation", "test"):
        for model, metric, value in (("tokenizer", "psnr", 25.1), ("tokenizer", "codes_used", 0.97), ("student", "cross_entropy", 1.9),
                                     ("teacher", "cross_entropy", 1.7)):
            run.add(dict(model=f"small-{model}", split=split, metric=metric, value=value, step=None))
    for step in range(100, 1600, 100):
        for model, metric, value in (("tokenizer", "curve_psnr", 25 - 900 / step), ("student", "curve_heldout_loss", 1.9 + 150 / step),
                                     ("teacher", "curve_heldout_loss", 1.7 + 150 / step)):
            run.add(dict(model=f"small-{model}", split="validation", metric=metric, value=value, step=step))
    columns = ["Smileys & Emotion: face-smiling", "Animals & Nature: animal-mammal", "Food & Drink: food-fruit"]
    rows = ["real", "reconstruction", "teacher, guidance 1", "teacher, guidance 2", "student, guidance 1", "student, guidance 2"]
    mosaic(run.file("grid.png"), len(rows), len(columns))
    mosaic(run.file("sample.png"), 2, 4)
    run.finish(grid=dict(rows=rows, columns=columns), sample="python -m hbsjd.sample --model small-student --classes 1,2 --out samples.png")


def mosaic(path, rows, columns):
    import matplotlib.image

    matplotlib.image.imsave(path, np.random.default_rng(0).random((32 * rows, 32 * columns, 3)))


def timed(root, scale="small", device="Test CPU", batches=(1, 4, 16, 64), repeats=5):
    """Made-up results of 01_speedup_vs_batch: one dtype more at the middle batch size, lockstep and synchronous with fewer repeats."""
    rng = np.random.default_rng(len(device))
    committed = {"ar": 1, "ar_greedy": 1, "bare_ar": 1, "sjd_lockstep": 1.6, "sjd_synchronous": 2.2, "hbsjd_probabilistic": 2.1, "hbsjd_gumbel": 3.0,
                 "hbsjd_adaptive": 2.4}
    run = results.Run("01_speedup_vs_batch", scale, {"scale": scale, "seed": 0}, device, ("method", "B", "prefix_ratio", "dtype", "repeat"), root=root)
    middle = batches[len(batches) // 2]
    run.note(fastest_dtype={str(B): "bfloat16" if B >= middle else "float32" for B in batches})
    costs = {width: {"2": 1 + width / 9, "128": 9.0 + 2 * width} for width in (0, 4, 16)}
    run.note(calibrations={B: dict(costs=costs, prior=dict.fromkeys(("greedy", "sample"), {0: 1, 4: 2, 16: 3.1})) for B in batches})
    settings = [(B, 0.5, "bfloat16" if B >= middle else "float32") for B in batches] + [(middle, 0.5, "float32")]
    settings += [(middle, ratio, "bfloat16") for ratio in (0.2, 0.4, 0.6, 0.75)]
    for B, ratio, dtype in settings:
        methods = ["ar_greedy", "ar", "hbsjd", "hbsjd_probabilistic", "hbsjd_gumbel"]
        methods += ["bare_ar", "sjd_lockstep", "sjd_synchronous", "hbsjd_full", "hbsjd_adaptive", "hbsjd_greedy_adaptive"] if ratio == 0.5 else []
        for method in methods:
            for repeat in range(3 if B == batches[-1] and method.startswith("sjd") else repeats):
                suffix, mean = 256 - int(ratio * 256), committed.get(method, 4.0)
                nfe = suffix if mean == 1 else round(suffix / mean * (1 + 0.1 * np.log2(B)))
                slow = 1.3 if dtype == "float32" and B >= middle else 1
                seconds = nfe * (0.004 + 0.0006 * B) * slow * (1 if mean == 1 else 1.4 + 0.1 * np.log2(B)) * rng.lognormal(0, 0.03)
                run.add(dict(scale=scale, model=f"{scale}-student", method=method, B=B, T=256, prefix_ratio=ratio, repeat=repeat, dtype=dtype,
                             compile=False, seconds=seconds, nfe=nfe, rounds=nfe, committed=suffix * B, row_rounds=round(suffix * B / mean)))
    run.finish()


def accepted(root, scale="small", device="Test CPU", windows=(4, 8, 16, 32)):
    """Made-up results of 02_acceptance: a draft stands with a chance that depends on the rule and on what is varied, in windows without an end."""
    keys = ("part", "rule", "draft", "W", "H", "guidance", "temperature", "top_k", "prefix_ratio", "repeat", "item")
    run = results.Run("02_acceptance", scale, {"scale": scale, "seed": 0}, device, keys, root=root)
    chance = {"Greedy": 0.68, "Probabilistic": 0.58, "Maximal": 0.72, "Gumbel": 0.7}
    default = dict(draft="History", W=16, H=16, guidance=2.0, temperature=1.0, top_k=0, prefix_ratio=0.5, item=None)
    parts = {
        "window": [(dict(W=W), 1 - 1 / W) for W in windows],
        "offset": [(dict(H=H), 1) for H in (11, 13, 16, 19, 21)] + [(dict(draft=draft, H=None), 0.9) for draft in ("RepeatLeft", "Uniform")],
        "guidance": [(dict(guidance=guidance), 0.9 + guidance / 20) for guidance in (1.0, 2.0, 4.0)],
        "temperature": [(dict(temperature=temperature), 1.1 - temperature / 10) for temperature in (0.5, 1.0, 1.5)],
        "top_k": [(dict(top_k=top_k), 1 + 0.1 * (top_k > 0)) for top_k in (16, 0)],
        "histogram": [(dict(item=advance), 1) for advance in range(1, 18)],
        "entropy": [(dict(item=h / 2), 1.3 - h / 10) for h in range(10)],
        "grid": [(dict(prefix_ratio=0.0, item=position), 0.8 + position / 1000) for position in range(256)],
    }
    without = dict(Greedy=("temperature", "top_k"), Probabilistic=("grid",), Maximal=("grid",), Gumbel=())
    for part, rule, repeat in [(part, rule, repeat) for part in parts for rule in chance for repeat in range(2) if part not in without[rule]]:
        for changed, factor in parts[part]:
            cell = default | changed
            stands, n = chance[rule] * factor + 0.01 * repeat, cell["item"]
            committed = n * round(900 * stands ** (n - 1) * (1 - stands)) if part == "histogram" else 2048 if n is None else 100
            rounds = committed // n if part == "histogram" else round(committed * (1 - stands))
            counts = dict(nfe=60, row_rounds=rounds, committed=committed, accepted=committed - rounds, proposed=cell["W"] * rounds, examined=committed)
            run.add(dict(scale=scale, model=f"{scale}-student", part=part, rule=rule, B=16, T=256, repeat=repeat) | cell | counts)
    run.finish()


EXECUTIONS = ["hbsjd_full", "hbsjd_compact", "hbsjd", "hbsjd_packed"]


def executions(root, scale="small", device="Test CPU", batches=(16, 64)):
    """Made-up results of 03_full_vs_compact: a gathered row costs a third more, Hybrid takes 0.8 and Packed 0.7 of Full's time, W = 8 two thirds of W = 16."""
    rng, (least, most) = np.random.default_rng(3), batches
    keys = ("part", "method", "B", "slots", "W", "gamma", "active", "prefix_ratio", "repeat")
    run = results.Run("03_full_vs_compact", scale, {"scale": scale, "seed": 0}, device, keys, root=root)

    def add(part, method, B, slots, W, gamma, active, ratio, repeat, ms, rounds, row_rounds, committed=None):
        cell = dict(zip(keys, (part, method, B, slots, W, gamma, active, ratio, repeat)))
        seconds = ms / 1000 * rng.lognormal(0, 0.02)
        times = dict(seconds=seconds, forward_seconds=0.8 * seconds, prefill_seconds=0.1 * seconds)
        run.add(dict(scale=scale, model=f"{scale}-student") | cell | times | dict(rounds=rounds, row_rounds=row_rounds, committed=committed))

    for repeat, W, n in product(range(3), (16, 8), (1, 16, 32, 48, 63)):
        add("latency", "hbsjd_compact", most, most, W, None, n, 0.5, repeat, 10 + n * W / 6, 1, n)
        add("latency", "hbsjd_packed", most, most, W, None, n, 0.5, repeat, 10 + n * W / 8, 1, n)
    for repeat, W in product(range(3), (16, 8)):
        add("latency", "hbsjd_full", most, most, W, None, most, 0.5, repeat, 10 + most * W / 8, 1, most)
    share = {"ar_greedy": 0.7, "ar": 0.7, "sjd_lockstep": 1.3, "sjd_synchronous": 1.2, "hbsjd_full": 1.0, "hbsjd_compact": 0.9, "hbsjd": 0.8,
             "hbsjd_packed": 0.7, "hbsjd_greedy_adaptive": 0.6, "hbsjd_adaptive": 0.6}
    width = dict(ar_greedy=0, ar=0, hbsjd_greedy_adaptive=32, hbsjd_adaptive=32)
    for B, (repeat, ratio) in product(batches, enumerate((0.5, 0.25, 0.75, 0.375, 0.625))):
        left = round(256 * (1 - ratio))
        timed = [("rollout", name, width.get(name, 16), 51 * B // 64 if name == "hbsjd" else None) for name in share if repeat < 3 or name in EXECUTIONS]
        if repeat < 3:
            timed += [("rollout", name, 8, 48 * B // 64 if name == "hbsjd" else None) for name in ("hbsjd_full", "hbsjd", "hbsjd_packed")]
            timed += [("gamma", "hbsjd", 16, gamma) for gamma in (30, 38, 46) if B == most]
        for part, name, W, gamma in timed:
            rounds = left if W == 0 else round(0.6 * left) if name.startswith("sjd") else round(0.45 * left)
            ms = left * B * share[name] * (2 / 3 if W == 8 else 1)
            add(part, name, B, B, W, gamma, None, ratio, repeat, ms, rounds, B * left if W == 0 else round(0.33 * B * left), B * left)
    for name, ends in ("sjd_lockstep", [50] * least), ("sjd_synchronous", [50] * least), ("hbsjd", [30 + image for image in range(least)]):
        add("trace", name, least, least, 16, 12 if name == "hbsjd" else None, None, 0.5, 0, 2000, max(ends), sum(ends), 128 * least)
        stood = [(round_, image, 128 + min(128, 128 * round_ // end), least) for round_ in range(max(ends) + 1) for image, end in enumerate(ends)]
        pd.DataFrame(stood, columns=["round", "image", "cursor", "ran"]).to_csv(run.file(f"trace-{name}-{least}-{least}.csv"), index=False)
    for part, name, active in ("batches", "hbsjd_full", ([32] * 12 + [20, 4]) * 8), ("refill", "hbsjd_full", [32] * 95), ("refill", "hbsjd_packed", [32] * 95):
        add(part, name, 256, 32, 16, None, None, 0.8, 0, 80 * len(active), len(active), sum(active), 10000)
        pd.DataFrame(dict(round=range(1, len(active) + 1), active=active, ran=32)).to_csv(run.file(f"{part}-{name}-256-32.csv"), index=False)
    run.finish()


def adaptive(root, scale="small", device="Test CPU", repeats=5):
    """Made-up results of 09_adaptive_window: alone W = 8 is the fastest fixed window, in a batch W = 0; the adaptive one is as fast, within noise."""
    rng = np.random.default_rng(9)
    run = results.Run("09_adaptive_window", scale, {"scale": scale, "seed": 0}, device, ("method", "B", "W", "repeat"), root=root)
    costs = {W: {"2": 1 + W / 16, "32": 1 + W} for W in (0, 2, 4, 8, 16, 32)}
    alone = {W: {"2": row["2"]} for W, row in costs.items()}
    prior = dict.fromkeys(("greedy", "sample"), {0: 1, 2: 1.5, 4: 1.9, 8: 2.4, 16: 2.8, 32: 3})
    run.note(calibrations={1: dict(costs=alone, prior=prior), 16: dict(costs=costs, prior=prior)})
    gains = {1: {0: 1, 2: 1.2, 4: 1.4, 8: 1.6, 16: 1.3}, 16: {0: 1, 2: 0.9, 4: 0.8, 8: 0.7, 16: 0.5}}
    rules = ("Gumbel", "ar", "hbsjd_gumbel", "hbsjd_adaptive"), ("Greedy", "ar_greedy", "hbsjd_packed", "hbsjd_greedy_adaptive")
    for (B, gain), repeat in product(gains.items(), range(repeats)):
        timed = [("Probabilistic", "hbsjd_probabilistic", 16, gain[16] / 1.1)]
        for rule, ar, fixed, method in rules:
            timed += [(rule, fixed if W else ar, W, gain[W]) for W in gain] + [(rule, method, 32, max(gain.values()))]
        for rule, method, W, faster in timed:
            seconds = B * (1 + 0.2 * repeat) / faster * rng.lognormal(0, 0.01)
            run.add(dict(scale=scale, model=f"{scale}-student", method=method, rule=rule, B=B, W=W, repeat=repeat, prefix_ratio=0.5, dtype="float32",
                         compile=False, seconds=seconds, widths="0:64" if B > 1 else "3:1 8:30 32:2"))
    run.finish()


def distilled(root, scale="small", device="Test CPU", steps=16, repeats=3):
    """Made-up results of 04_distill: a step on AR is 1 s of rollout and 1 s of the rest. In float32 one exact run meets a near-tie at its step 7."""
    rng = np.random.default_rng(4)
    config = dict(scale=scale, steps=steps, common=dict(batch=8, rollout_guidance=2.0, loss_guidance=1.0))
    run = results.Run("04_distill", scale, config, device, ("part", "arm", "backend", "dtype", "seed", "step", "repeat"), root=root)
    faster = dict(ar_greedy=1, hbsjd=1.6, hbsjd_greedy_adaptive=2, ar=1, hbsjd_probabilistic=0.8, hbsjd_gumbel=1.25, hbsjd_adaptive=2)
    rest = {"timing/teacher_s": 0.25, "timing/student_s": 0.5, "timing/optimizer_s": 0.2, "timing/data_s": 0.05}
    columns = [*rest, "timing/rollout_s", "timing/step_s", "train/loss", "rollout/nfe", "rollout/committed", "rollout/row_rounds", "score/forward_kl",
               "score/reverse_kl", "score/data_forward_kl", "score/data_reverse_kl", "weights", "tokens", "differs_at", "tie_gap"]

    def add(part, arm, backend, seed, step, repeat=0, dtype="float32", **values):
        run.add(dict.fromkeys(columns) | dict(part=part, arm=arm, backend=backend, dtype=dtype, seed=seed, step=step, repeat=repeat) | values)

    def took(backend):
        seconds = rng.uniform(0.9, 1.1) / faster[backend]
        return rest | {"timing/rollout_s": seconds, "timing/step_s": seconds + sum(rest.values())}

    def scored(kl):
        return {"score/forward_kl": kl, "score/reverse_kl": 0.8 * kl, "score/data_forward_kl": 1.1 * kl, "score/data_reverse_kl": 0.9 * kl}

    add("score", "student", None, 0, 0, **scored(0.5))
    arms = dict(kd=0.42, seqkd=0.41) | {"gkd-ar": 0.35, "gkd-hbsjd": 0.36, "gkd-hbsjd_probabilistic": 0.35, "varkd-ar": 0.45, "varkd-hbsjd": 0.46}
    for (arm, reached), seed in product((arms | {"gkd-ar-horizon": 0.4, "gkd-mine": 0.39}).items(), range(3)):  # gkd-mine: added since, without a label
        backend = arm.split("-")[1] if arm.split("-")[-1] in faster else "ar"
        spread, per_round = rng.normal(0, 0.004), 1 if backend == "ar" else 2.5
        for step in range(1, steps + 1) if seed == 0 or arm in ("gkd-ar", "gkd-hbsjd") else ():
            kl = reached + (0.5 - reached) * np.exp(-4 * step / steps) + spread
            counts = {} if arm == "kd" else {"rollout/nfe": 128 / per_round, "rollout/committed": 1024, "rollout/row_rounds": 1024 / per_round}
            add("train", arm, backend, seed, step, **took(backend), **counts, **{"train/loss": kl * rng.lognormal(0, 0.1)})
            if step in (steps // 2, steps):
                add("score", arm, backend, seed, step, **scored(kl))
    for step, repeat in product((0, steps // 2, steps), range(repeats)):
        for backend, seconds in ((backend, took(backend)) for backend in faster):
            add("timed", "gkd-ar", backend, 0, step, repeat, **seconds)
    for dtype, backend, step in product(("float64", "float32"), ("ar", "hbsjd_gumbel", "hbsjd_adaptive"), range(1, 11)):
        tie = (dtype, backend, step) == ("float32", "hbsjd_adaptive", 7)
        apart = (dtype, backend) == ("float32", "hbsjd_adaptive") and step >= 7
        same = dict(tokens=f"t{step}{apart}", weights=f"w{step}{apart}", differs_at=100 if tie else 0 if apart else None, tie_gap=2e-7 if tie else None)
        add("dropin", "gkd", backend, 0, step, dtype=dtype, **same, **{"train/loss": 0.5 - step / 100 + apart / 1000, "rollout/nfe": 128})
    run.finish()


def judged(root, scale="small", device="Test CPU"):
    """Made-up results of 05_quality: in all scores an arm is where its KID is. HB-SJD is within noise of AR, KD is worse; SeqKD was not judged."""
    config = dict(scale=scale, images=256, guidance=2.0, method="hbsjd_adaptive")
    run = results.Run("05_quality", scale, config, device, ("part", "model", "seed", "against", "score"), root=root)
    networks = dict.fromkeys(("cosine", "cosine_100", "zero_shot"), "LiT: EfficientNet-Lite0 + MiniLM")
    names = dict(fd="FD", kid="KID", cosine="mean cosine", cosine_100="100 x cosine", zero_shot="zero-shot accuracy") | {"is": "IS"}
    note = dict(fd="256 images for 1280 features: a singular covariance; let KID decide", cosine_100="77 prompts, the first one 'an emoji of a dog'")

    def scores(kid):
        good = 1 / (1 + 20 * abs(kid))
        found = dict(fd=60 + 4000 * kid, kid=kid, precision=good, recall=0.8 * good, density=1.1 * good, coverage=good, cosine=0.3 * good)
        return found | {"is": 20 * good, "cosine_100": 30 * good, "zero_shot": 0.5 * good}

    def add(part, model, seed, kid, against=None, **values):
        of_images = part not in ("difference", "seeds")
        for name, value in scores(kid).items():
            value, sd = (value, 0.04 * abs(value)) if of_images else (value - scores(values["base"])[name], 0.03 * scores(values["base"])[name])
            verdict = None if of_images else "within noise" if abs(value) < 1.96 * sd else "higher" if value > 0 else "lower"
            facts = dict(sd=sd, n=256, n_reference=1200, checksum="c0ffee", rank_deficient=name == "fd", note=note.get(name), scored_by="lite0",
                         title=f"{names.get(name, name)} ({networks.get(name, 'EfficientNet-Lite0')})")
            row = dict(part=part, model=model, seed=seed, against=against, score=name, value=value, low=value - 1.96 * sd, high=value + 1.96 * sd)
            cost = dict.fromkeys(("seconds", "nfe", "timed_images")) if part != "model" else dict(seconds=20.0, nfe=900, timed_images=128)
            run.add(row | (facts if of_images else dict.fromkeys(facts)) | dict(verdict=verdict) | cost)

    models = {("student", 0): 0.030, ("teacher", 0): 0.012, ("kd", 0): 0.034, ("gkd-hbsjd_probabilistic", 0): 0.0205, ("varkd-ar", 0): 0.018}
    models |= {("varkd-hbsjd", 0): 0.0183, ("gkd-ar-horizon", 0): 0.025, ("gkd-mine", 0): 0.022}
    models |= {(arm, seed): kid + 0.001 * seed for arm, kid in (("gkd-ar", 0.020), ("gkd-hbsjd", 0.0203)) for seed in range(3)}
    for (model, seed), kid in models.items():
        add("model", model, seed, kid)
        for other in ("student", "gkd-ar"):
            if model not in (other, "student", "teacher"):
                add("difference", model, seed, kid, other, base=models[other, 0])
    add("greedy", "student", 0, 0.045)
    for name, kid in dict(real=-0.0002, reconstruction=0.004, blurred=0.05, noise=0.6).items():
        add("control", name, 0, kid)
    add("seeds", "gkd-hbsjd", 0, 0.0213, "gkd-ar", base=0.021)
    first = [model for model, seed in models if seed == 0]
    mosaic(run.file("grid.png"), len(first), 10)
    mosaic(run.file("neighbours.png"), 6, 4)
    run.finish(grid=dict(rows=first), neighbours=dict(of="gkd-ar", distances=[[10 + image, 11.0 + image, 12.5 + image] for image in range(6)]))


def exactness(root, scale="small", device="Test CPU"):
    """Made-up results of 06_exactness: exact laws, a control that is biased, one float32 difference in 8 images and many in bfloat16."""
    rng = np.random.default_rng(6)
    run = results.Run("06_exactness", scale, {"scale": scale, "samples": 500}, device, ("part", "method", "setting", "item"), root=root)
    lines = [("law", rule, f"Independent, History, W = {W}", 1, 2e-16 * W - 2e-16, 27, None) for rule in ("Probabilistic", "Maximal", "Gumbel") for W in (1, 2)]
    lines += [("planted", rule, "residual_from_p", "1, Independent", 0.25, 27, None) for rule in ("Probabilistic", "Maximal")]
    lines += [("planted", "Probabilistic", "old_q_for_kept_drafts", "2, Lockstep", 0.1, 16, None)]
    for method in ("hbsjd_gumbel", "hbsjd_probabilistic", "hbsjd_maximal", "biased control"):
        p = rng.uniform(0.01, 1, 40) ** (8 if method == "biased control" else 1)
        lines += [(("marginal", "pair")[i % 2], method, f"prefix {i // 8}", i % 8 // 2, p[i], 9, None) for i in range(len(p))]
    for dtype, often in (("float32", 0), ("bfloat16", 0.05)):
        for method in ("ar, B = 1", "ar, 17 tokens a forward", "hbsjd_gumbel", "hbsjd", "sjd_synchronous_gumbel"):
            agree = np.minimum(rng.geometric(often, 8) - 1, 128) if often else [128] * 7 + [99 if method == "hbsjd" else 128]
            lines += [("divergence", method, dtype, i, n, 128, 1e-6 + often / 10 if n < 128 else None) for i, n in enumerate(agree)]
    lines += [("identical", "hbsjd_gumbel", "float64", i, 1024, 1024, None) for i in (0, 8)]
    lines += [("noise", "hbsjd_gumbel", "B = 16, W = 16", i, 0.06 + 0.01 * i, 3, None) for i in range(3)]
    for line in lines:
        run.add(dict(scale=scale, model=f"{scale}-student") | dict(zip(("part", "method", "setting", "item", "value", "count", "gap"), line)))
    run.finish()


MADE_UP = {"00_paper": lambda root: None, "00_prepare": prepared, "01_speedup_vs_batch": timed, "02_acceptance": accepted, "03_full_vs_compact": executions,
           "04_distill": distilled, "05_quality": judged, "06_exactness": exactness, "09_adaptive_window": adaptive}

EXECUTE = """
import json, os, sys
import matplotlib
matplotlib.use("Agg")
for path in sys.argv[1:]:
    os.chdir(os.path.dirname(path))
    space = {"__name__": "__main__"}
    for cell in json.load(open(path, encoding="utf-8"))["cells"]:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), path, "exec"), space)
    matplotlib.pyplot.close("all")
assert "torch" not in sys.modules
"""


def environment(root, results_root, scale="small"):
    """No torch, results from `results_root`, figures into `root`."""
    stubs = root / "stubs"
    stubs.mkdir(parents=True, exist_ok=True)
    (stubs / "torch.py").write_text("raise ImportError('notebooks run without torch')\n")
    path = os.pathsep.join([str(stubs), str(results.ROOT)])
    return os.environ | {"PYTHONPATH": path, "HBSJD_RESULTS": str(results_root), "HBSJD_FIGURES": str(root / "figures"), "HBSJD_SCALE": scale}


def execute(root, results_root, scale="small", paths=NOTEBOOKS):
    command = [sys.executable, "-W", "error::FutureWarning", "-c", EXECUTE, *map(str, paths)]
    done = subprocess.run(command, env=environment(root, results_root, scale), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return root / "figures"


def contents(folder):
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def made_up(tmp_path_factory):
    root = tmp_path_factory.mktemp("results")
    for path in NOTEBOOKS:
        assert path.stem in MADE_UP, f"tests/test_notebooks.py has no made-up results for {path.stem}: add them to MADE_UP"
        MADE_UP[path.stem](root)
    return root


@pytest.fixture(scope="module")
def drawn(made_up, tmp_path_factory):
    return execute(tmp_path_factory.mktemp("drawn"), made_up)


def test_every_notebook_runs_without_torch_and_draws_the_same_twice(made_up, drawn, tmp_path):
    before, repository = contents(made_up), contents(results.ROOT / "notebooks")
    again = contents(execute(tmp_path, made_up))
    assert contents(drawn) == again and Counter(Path(name).suffix for name in again)[".svg"] >= len(NOTEBOOKS)
    assert contents(made_up) == before and contents(results.ROOT / "notebooks") == repository


@EACH
def test_it_writes_what_it_embeds(path, drawn):
    names = re.findall(r"\]\(\.\./figures/(\w+)\.svg\)", "".join(cells(path, "markdown")))
    names += re.findall(r'report\.write_table\(\w+, "(\w+)"', "".join(cells(path, "code")))
    assert names and not [name for name in names if not list(drawn.glob(f"{name}.*"))]


def test_figures_hold_no_date(drawn):
    assert not [path.name for path in drawn.glob("*.svg") if "dc:date" in path.read_text(encoding="utf-8")]


def test_speedups_are_of_the_faster_dtype_and_beside_the_paper(drawn):
    text = (drawn / "01_speedup_vs_batch.md").read_text(encoding="utf-8")
    assert "float32 at B = 1, 4; bfloat16 at B = 16, 64" in text and "AR / bare loop: B = 1, 50% given" in text
    table = pd.read_csv(drawn / "01_speedup_vs_batch.csv")
    both = table[(table["paper item"] == "Table 5") & (table.B == 16)].iloc[0]
    assert both["paper, speedup"] == "1.298" and 1 < float(both["ours, speedup"]) < 4
    assert set(table[table.B == 8]["ours, speedup"]) == set(table[table.B == 1]["paper, speedup"]) == {"not measured"}
    assert not table[table["ours, speedup"] != "not measured"].duplicated(["method", "B", "prefix ratio", "paper item"]).any()


def test_counts_are_pooled_and_beside_the_paper(drawn):
    windows, rules = pd.read_csv(drawn / "02_window.csv").set_index("W"), pd.read_csv(drawn / "02_rules.csv").set_index("rule")
    assert windows["paper, Greedy"][16] == "2.641" and windows["paper, Greedy"][32] == windows.Gumbel[12] == "not measured"
    low, high = (1 / (1 - chance * 15 / 16) for chance in (0.68, 0.68 + 0.01 * 16 / 15))
    assert windows.Greedy[16] == f"{2 / (1 / low + 1 / high):.2f} ({low:.2f} to {high:.2f})"
    assert rules["paper, rejected (%)"]["Greedy"] == "37.4" and rules["paper, rejected (%)"]["Gumbel"] == "not measured"
    assert rules["ours, rejected (%)"].tolist() == pytest.approx(100 / rules["ours, committed per round"], abs=0.06)  # no window stands whole here
    offsets = pd.read_csv(drawn / "02_offset.csv")
    assert offsets["paper, H"][:5].tolist() == [16, 20, 24, 28, 32] and offsets.draft[5:].tolist() == ["RepeatLeft", "Uniform"]


def test_executions_are_compared_with_full_and_beside_the_paper(drawn):
    table = pd.read_csv(drawn / "03_execution.csv").set_index(["B", "method"])
    assert table.loc[(64, "HB-SJD (hybrid)"), ["paper, mean ms", "paper, P95 ms", "paper, speedup"]].astype(float).tolist() == [2784, 3969, 1.182]
    assert table["ours, speedup"].astype(float).tolist() == pytest.approx(2 * [1, 1 / 0.9, 1 / 0.8, 1 / 0.7], rel=0.05)
    assert table.repeats.tolist() == [5] * 8 and table.loc[(64, "HB-SJD, packed"), "paper, mean ms"] == "not measured"
    gamma, windows = (pd.read_csv(drawn / f"03_{name}.csv") for name in ("gamma", "windows"))
    assert gamma.method.tolist()[-3:] == [f"HB-SJD (hybrid), gamma = {gamma}" for gamma in (30, 38, 46)] and set(gamma.repeats) == {3}
    assert len(windows[(windows.B == 64) & (windows.method == "HB-SJD (hybrid), W = 8")]) == 1


def test_training_steps_are_compared_with_ar_and_beside_the_paper(drawn):
    table = pd.read_csv(drawn / "04_end_to_end.csv").set_index("backend")
    assert table["compared with"].tolist() == ["AR, greedy"] * 2 + ["AR, sampled"] * 3 and set(table.pairs) == {9}
    for column, gain in (("ours, rollout speedup", lambda rate: rate), ("ours, speedup", lambda rate: 2 / (1 + 1 / rate))):
        ratios = table[column].str.split(" ").str[0].astype(float).tolist()
        assert ratios == pytest.approx([gain(rate) for rate in (1.6, 2, 0.8, 1.25, 2)], rel=0.08)
    ours = table.loc["HB-SJD (hybrid)"]
    assert ours["paper, rollout's share on AR (implied)"] == "47%" and ours["paper, training time"] == "5:17:21 to 4:28:49"
    assert (ours["paper, rollout speedup"], ours["paper, speedup"], table["paper, speedup"]["HB-SJD, Gumbel"]) == ("1.48", "1.18", "not measured")
    points = pd.read_csv(drawn / "04_checkpoints.csv")
    assert points["ours, step"].tolist() == [0, 8, 16] * 5 and set(points.pairs) == {3}
    assert points["paper, step"][:3].tolist() == ["2000", "12000", "22000"] and points["paper, speedup"][:3].tolist() == ["1.530", "1.500", "1.483"]
    assert set(points["paper, speedup"][3:]) == {"not measured"}


def test_arms_and_the_drop_in_proof_are_told_as_they_are(drawn):
    arms = pd.read_csv(drawn / "04_arms.csv").set_index("arm")
    assert arms.index[0] == "student, undistilled" and arms.index[-1] == "gkd-mine" and len(arms) == 10
    assert arms.seeds.tolist() == ["none", *"113311111"] and arms["forward KL, own completions"].str.contains(" to ").sum() == 2
    assert arms["tokens per round"].tolist() == ["none", "no rollouts", "1.00", "1.00", "2.50", "2.50", "1.00", "1.00", "2.50", "1.00"]
    assert arms["training (s)"]["student, undistilled"] == "none" and 31 < float(arms["training (s)"]["KD"]) < 33
    proof = pd.read_csv(drawn / "04_dropin.csv").set_index(["dtype", "backend"])
    assert set(proof.loc[[(dtype, "AR, sampled") for dtype in ("float64", "float32")], "all the same"]) == {"the reference"}
    assert proof.loc[("float64", "HB-SJD, adaptive, Gumbel"), ["all the same", "first step that differs"]].tolist() == ["10", "none"]
    columns = ["same tokens", "same loss", "same weights", "first step that differs", "at position", "near-tie gap there"]
    assert proof.loc[("float32", "HB-SJD, adaptive, Gumbel"), columns].tolist() == ["6", "6", "6", "7", "100", "2.0e-07"]


def test_quality_is_beside_the_paper_and_what_was_not_judged_is_said(drawn):
    table = pd.read_csv(drawn / "05_quality.csv").set_index("model")
    assert table.index[:4].tolist() == ["real images (floor)", "teacher", "student, undistilled", "student, undistilled, greedy"]
    assert table.index[-4:].tolist() == ["gkd-mine", "real images, reconstructed", "real images, blurred", "noise"]
    kid = table["KID (EfficientNet-Lite0) x 1000"]
    assert kid["GKD, AR"] == "21.0 [20.0 to 22.0]" and kid["student, undistilled"] == "30.0 (27.6 to 32.4)"
    assert (table["N (and reference)"]["GKD, AR"], table["N (and reference)"]["KD"]) == ("3 x 256 (1200)", "256 (1200)")
    assert set(table.loc["SeqKD"].iloc[:11]) == {"not measured"} and table["sampling (s)"]["KD"] == "40.0" and table["sampling (s)"]["noise"] == "none"
    assert table.loc["GKD, HB-SJD", ["paper, FID", "paper, rollout speedup"]].tolist() == ["4.95 / 3.00", "1.48 / 1.56"]
    assert table["paper, FID"]["VarKD, HB-SJD probabilistic"] == "4.76 / 2.87"
    assert table["paper, rollout (s)"]["KD"] == table["paper, IS"]["teacher"] == "not printed"
    rates = table["rollout speedup"]
    assert [float(rates[f"{method}, HB-SJD"].split(" ")[0]) for method in ("GKD", "VarKD")] == pytest.approx([1.6] * 2, rel=0.08)
    assert (rates["VarKD, AR"], rates["KD"], rates["noise"]) == ("the baseline", "no rollouts", "none")
    text = (drawn / "05_quality.md").read_text(encoding="utf-8")
    assert "1280 features" in text and "an emoji of a dog" in text and "FID (" not in text and "CLIP" not in text


def test_differences_have_a_verdict_and_the_controls_an_order(drawn):
    table = pd.read_csv(drawn / "05_differences.csv").set_index(["model", "minus", "seed"])
    kid = table["KID (EfficientNet-Lite0) x 1000, lower is better"]
    assert kid["GKD, HB-SJD", "GKD, AR", "0"] == "+0.3 (-0.9 to +1.5), within noise" and kid["KD", "student, undistilled", "0"].endswith("higher")
    assert kid["SeqKD", "GKD, AR", "not measured"] == "not measured" and kid.index[-1] == ("GKD, HB-SJD", "GKD, AR", "all, paired")
    assert not table.index.duplicated().any() and len(table) == 26
    text = (drawn / "05_differences.md").read_text(encoding="utf-8")
    assert "Paper: at most 0.03 FID, 0.9 IS" in text and "within noise in 9 of 9 scores" in text
    order = pd.read_csv(drawn / "05_sanity.csv")
    assert len(order) == 10 and set(order.order) == {"holds"}


def test_the_adaptive_window_is_compared_with_the_best_fixed_one(drawn):
    table = pd.read_csv(drawn / "09_adaptive_window.csv")
    assert table.B.tolist() == [1, 16] * 2 and table["best fixed W"].tolist() == table["its width"].tolist() == [8, 0] * 2
    assert table["calibrated ceiling"].tolist() == [1.6, 1] * 2 and table["best fixed W over AR"][1] == "1.00 (1.00 to 1.00)"
    ratios = {"over AR": [1.6, 1], "best fixed W over AR": [1.6, 1], "over best fixed W": [1, 1], "over HB-SJD, probabilistic, W = 16": [1.6 / 1.3 * 1.1, 2.2]}
    for column, values in ratios.items():
        assert table[column].str.split(" ").str[0].astype(float).tolist() == pytest.approx(values * 2, rel=0.05)


def test_only_the_biased_control_is_detected_and_only_mistakes_are_noticed(drawn):
    tests = pd.read_csv(drawn / "06_sampling_tests.csv").set_index("method")
    assert (tests["difference detected"] == tests["has to be detected"]).all()
    assert tests.index[tests["difference detected"] == "yes"].tolist() == ["biased control"]
    assert tests.tests.tolist() == [40] * 4 and (tests["smallest p, adjusted"] <= 1).all()
    laws, bugs = pd.read_csv(drawn / "06_laws.csv"), pd.read_csv(drawn / "06_planted_bugs.csv")
    assert laws.exact.tolist() == ["yes"] * 3 and laws["worst total variation"].tolist() == [2e-16] * 3 and bugs.noticed.tolist() == ["yes"] * 3


def test_first_differences_are_counted_per_compared_token(drawn):
    table = pd.read_csv(drawn / "06_divergence.csv").set_index(["dtype", "compared with AR in one batch"])
    one = table.loc["float32", "HB-SJD (hybrid)"]
    assert (one["images that differ"], one["tokens compared"], one["first differences per 1000 tokens"]) == (1, 7 * 128 + 100, 1.00)
    assert (table.loc["bfloat16"]["images that differ"] > 4).all()
    identical = pd.read_csv(drawn / "06_identical.csv").iloc[0]
    assert (identical.images, identical["tokens compared"], identical["tokens that differ"]) == (16, 2048, 0)


def test_every_item_of_the_paper_has_its_number_ours_and_a_verdict(drawn):
    text = "".join(cells(results.ROOT / "notebooks" / "00_paper.ipynb", "markdown"))
    assert not [item for item in [f"## Table {n}:" for n in range(1, 11)] + [f"## Figure {n}:" for n in range(1, 5)] if item not in text]
    items = {name: pd.read_csv(drawn / f"00_{name}.csv").set_index("quantity") for name in (*(f"table{n:02}" for n in range(1, 11)), "figure01", "figure03")}
    assert items["table02"].paper["seconds of a rollout, SJD, batch-synchronous"] == "4.239" and items["table09"].paper.tolist() == [1.53, 1.5, 1.483]
    assert items["table03"].ours["speedup over Full, HB-SJD (hybrid)"].startswith("1.2") and items["figure01"].ours.notna().all()
    assert items["table05"].ours["speedup over AR, B = 32"] == items["table10"].paper["committed tokens per round, Maximal"] == "not measured"
    assert {"4.96", "1.48"} <= set(items["table01"].paper) and items["table06"].paper["committed tokens per round, W = 24"] == "2.951"
    claims = pd.read_csv(drawn / "00_claims.csv").set_index("claim")
    assert set(claims["item"]) == {f"Table {n}" for n in range(1, 11)} | {"Figure 1", "Figure 3"}
    assert claims.verdict["Hybrid is faster than Full"] == "holds" and claims.paper["Hybrid is faster than Full"] == "1.182, 1"
    assert claims.verdict["one grid row commits more than 20/24 of one"] == "within noise"
    assert "Holds:" in (drawn / "00_table03.md").read_text(encoding="utf-8")
    report = (drawn / "REPORT.md").read_text(encoding="utf-8")
    assert not [path.name for path in drawn.glob("0*.md") if path.read_text(encoding="utf-8").strip() not in report]


def test_smoke_results_of_two_devices_draw_into_a_folder_of_their_own(tmp_path):
    timed(tmp_path / "results", "smoke", "Test CPU", (1, 4), repeats=2)
    timed(tmp_path / "results", "smoke", "Test GPU", (1, 4), repeats=2)
    notebook = results.ROOT / "notebooks" / "01_speedup_vs_batch.ipynb"
    figures = execute(tmp_path, tmp_path / "results", "smoke", [notebook])
    assert {path.parent.name for path in figures.rglob("*.*")} == {"smoke"}
    drawn = pd.read_csv(figures / "smoke" / "01_speedup_vs_batch.csv")
    assert set(drawn.device) == {"Test CPU", "Test GPU", "not measured"}


@EACH
def test_committed_figures_are_those_of_the_committed_results(path, tmp_path):
    """Tables everywhere, drawings where the committed ones were drawn; REPORT.md collects the tables of all notebooks, which are there beforehand."""
    committed, drawn = {file.name: file for file in results.FIGURES.iterdir() if file.suffix in TEXT}, tmp_path / "figures"
    drawn.mkdir()
    for file in committed.values():
        shutil.copy(file, drawn)
    execute(tmp_path, results.RESULTS, results.default_scale(path.stem.replace("00_paper", "05_quality")), [path])
    found = {file.name: file for file in drawn.iterdir() if file.suffix in TEXT}
    assert found.keys() == committed.keys()
    assert not [name for name, file in found.items() if file.read_text(encoding="utf-8") != committed[name].read_text(encoding="utf-8")]


@pytest.mark.slow
@EACH
def test_it_runs_in_a_real_kernel(path, made_up, tmp_path):
    command = [sys.executable, "-m", "nbconvert", "--to", "notebook", "--execute", "--stdout", str(path)]
    done = subprocess.run(command, env=environment(tmp_path, made_up), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# What the notebooks share


def test_speedups_are_paired_by_repeat():
    from hbsjd import report

    rows = pd.DataFrame(dict(method=["ar"] * 3 + ["hbsjd"] * 3, repeat=[0, 1, 2] * 2, seconds=[2.0, 4.0, 6.0, 1.0, 2.0, 2.0], B=4))
    one = report.paired_speedup(rows, {"hbsjd": "ar"}, cell=["B"]).iloc[0]
    assert (one.speedup, one.low, one.high, one.pairs) == (2, 2, 3, 3)
    assert len(report.paired_speedup(rows.assign(repeat=range(6)), {"hbsjd": "ar"}, cell=["B"])) == 0


def test_an_exact_backend_has_the_training_of_ar_with_faster_rollouts():
    from hbsjd import report

    train = pd.DataFrame({"backend": "ar", "seed": 0, "step": [2, 1], "timing/rollout_s": [4.0, 2.0], "timing/step_s": [5.0, 3.0]})
    faster = pd.DataFrame(dict(method=["hbsjd_gumbel"], speedup=[2.0])).assign(device="a", config_hash="b")
    rows = report.training_clock(train.assign(device="a", config_hash="b"), faster)
    assert rows.groupby("backend").clock.agg(list).to_dict() == {"ar": [3.0, 8.0], "hbsjd_gumbel": [2.0, 5.0]}
    assert len(report.training_clock(train.assign(device="a", config_hash="c"), faster)) == 2


def test_several_seeds_are_a_mean_and_a_range():
    from hbsjd import report

    assert report.over_seeds([1, 2, 6, None], "{:.1f}") == "3.0 (1.0 to 6.0)" and report.over_seeds([1]) == "1.000"
    assert report.over_seeds([None]) == "not measured"


def test_scores_of_several_seeds_show_their_range_and_of_one_its_interval():
    from hbsjd import report

    rows = pd.DataFrame(dict(model=["a", "a", "b"], value=[1.0, 3.0, 5.0], low=[0.0, 2.0, 4.0], high=[2.0, 4.0, 6.5])).assign(device="a", config_hash="b")
    table = report.pooled_scores(rows, ["model"])
    assert [report.ranged("{:.1f}", row) for row in table.itertuples()] == ["2.0 [1.0 to 3.0]", "5.0 (4.0 to 6.5)"]


def test_printed_numbers_and_ours_stand_side_by_side():
    from hbsjd import report

    paper = pd.DataFrame(dict(B=[8, 16], ms=[5.0, 6.0], speedup=[1.4, 1.3]))
    ours = pd.DataFrame(dict(B=[16, 64], speedup=[0.9, 1.1], low=[0.8, 1.0], high=[1.0, 1.2], device="a", config_hash="b"))
    table = report.quantities(ours, paper, "B", {"ms": "ms, B = {}", "speedup": "speedup, B = {}"})
    assert table.quantity.tolist() == ["ms, B = 8", "ms, B = 16", "speedup, B = 8", "speedup, B = 16", "speedup, B = 64"]
    shown = report.shown(report.compared(table))
    assert shown.ours.tolist() == ["not measured"] * 3 + ["0.9 (0.8 to 1)", "1.1 (1 to 1.2)"] and shown.paper.tolist()[3:] == ["1.3", "not measured"]
    nothing = report.quantities(ours.iloc[:0], paper, "B", {"speedup": "speedup, B = {}"})
    assert report.check(nothing, "Table 5", {"it is faster": ("speedup, B = 16", 1)}).verdict.tolist() == ["not measured"]


def test_a_claim_is_the_papers_and_holds_beyond_the_intervals_only():
    from hbsjd import report

    values = dict(quantity=["a", "b", "c"], paper=[3.0, 2.0, 1.0], ours=[3.0, 2.5, 4.0], low=[2.5, 2.0, None], high=[3.5, 3.0, None])
    table = pd.DataFrame(values).assign(device="a", config_hash="b")
    claims = {"a over b": ("a", "b"), "a over c": ("a", "c"), "b over 1": ("b", 1)}
    checked = report.check(table, "Table 2", claims)
    assert checked.verdict.tolist() == ["within noise", "does not hold", "holds"] and checked.paper[1] == "3, 1"
    assert report.verdicts(checked) == "Within noise: a over b. Does not hold: a over c. Holds: b over 1."
    with pytest.raises(AssertionError, match="Table 2 does not say"):
        report.check(table, "Table 2", {"c over a": ("c", "a")})
    with pytest.raises(KeyError):
        report.check(table, "Table 2", {"a misspelt quantity": ("A", "b")})


def test_what_builds_on_another_experiment_takes_its_last_configuration_or_nothing(tmp_path, monkeypatch):
    from hbsjd import report

    monkeypatch.setattr(report, "RESULTS", tmp_path)
    monkeypatch.setattr(report, "load", lambda stem, scale: results.load(stem, scale, tmp_path))
    monkeypatch.setattr(report, "provenance", lambda stem, scale: results.provenance(stem, scale, tmp_path))
    assert report.latest("04_distill", "small", ["value"]).columns.tolist() == ["device", "config_hash", "value"]
    for start, value in ("2026-01-02", 1), ("2026-01-01", 2):
        run = results.Run("04_distill", "small", dict(value=value), "Test CPU", ("value",), root=tmp_path)
        run.add(dict(value=value))
        run.note(start=start)
    assert report.latest("04_distill", "small", ["value"]).value.tolist() == [1]


def test_the_interval_is_the_same_every_time_and_holds_the_median():
    from hbsjd import report

    values = np.random.default_rng(0).lognormal(size=9)
    low, high = report.interval(values)
    assert low <= np.median(values) <= high and (low, high) == report.interval(values)
    assert report.interval([3.0]) == (3.0, 3.0)


def test_the_interval_of_a_rate_is_garwoods():
    from hbsjd import report

    rows = pd.DataFrame(dict(value=[999, 1000, 998], count=[1000, 1000, 1000]))
    assert report.divergence_rate(rows[1:2]) == pytest.approx((0, 0, 3.689), rel=0.02)
    assert report.divergence_rate(rows) == pytest.approx((2 / 2.999, 0.242 / 2.999, 7.225 / 2.999), rel=0.02)


def test_a_missing_value_shows_as_not_measured():
    from hbsjd import report

    table = pd.DataFrame(dict(name=["a", "b"], value=[1.5, None]))
    assert report.to_markdown(table) == "| name | value |\n| --- | --- |\n| a | 1.5 |\n| b | not measured |\n"
