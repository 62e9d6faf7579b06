"""What the notebooks share: one plot style, paired speedups with intervals, figures and tables that come out the same byte for byte."""
from __future__ import annotations

from itertools import product

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

from hbsjd.results import RESULTS, figure_dir, load, newest, provenance

# Okabe and Ito's palette, which colour-blind readers can tell apart. A method and a model keep their colour in every figure.
COLORS = {
    "ar_greedy": "#000000",
    "ar": "#7f7f7f",
    "sjd_lockstep": "#CC79A7",
    "sjd_synchronous": "#E69F00",
    "hbsjd_full": "#56B4E9",
    "hbsjd_compact": "#009E73",
    "hbsjd": "#0072B2",
    "hbsjd_packed": "#882255",
    "hbsjd_greedy_adaptive": "#117733",
    "hbsjd_adaptive": "#332288",
    "hbsjd_probabilistic": "#D55E00",
    "hbsjd_gumbel": "#B8A600",
    "hbsjd_maximal": "#6A3D9A",
    "sjd_synchronous_gumbel": "#8C510A",
    "ar, B = 1": "#7f7f7f",
    "ar, 17 tokens a forward": "#CC79A7",
    "biased control": "#444444",
    "tokenizer": "#009E73",
    "student": "#0072B2",
    "teacher": "#D55E00",
    "kd": "#CC79A7",  # arms of a distillation: those on GKD have the colour of their backend
    "seqkd": "#E69F00",
    "gkd-ar": "#7f7f7f",
    "gkd-hbsjd": "#0072B2",
    "gkd-hbsjd_probabilistic": "#D55E00",
    "gkd-ar-horizon": "#882255",
    "varkd-ar": "#56B4E9",
    "varkd-hbsjd": "#009E73",
    "varkd-hbsjd_probabilistic": "#6A3D9A",
    "rollout": "#56B4E9",  # parts of a training step, beside "teacher" and "student"
    "optimizer": "#009E73",
    "data": "#bbbbbb",
}
LABELS = {
    "ar_greedy": "AR, greedy",
    "ar": "AR, sampled",
    "sjd_lockstep": "SJD, lockstep",
    "sjd_synchronous": "SJD, batch-synchronous",
    "hbsjd_full": "HB-SJD, full",
    "hbsjd_compact": "HB-SJD, compact",
    "hbsjd": "HB-SJD (hybrid)",
    "hbsjd_packed": "HB-SJD, packed",
    "hbsjd_greedy_adaptive": "HB-SJD, adaptive, greedy",
    "hbsjd_adaptive": "HB-SJD, adaptive, Gumbel",
    "hbsjd_probabilistic": "HB-SJD, probabilistic",
    "hbsjd_gumbel": "HB-SJD, Gumbel",
    "hbsjd_maximal": "HB-SJD, maximal",
    "sjd_synchronous_gumbel": "SJD, batch-synchronous, Gumbel",
    "ar, B = 1": "AR, each image alone (control)",
    "ar, 17 tokens a forward": "AR, forwards of 17 tokens (control)",
    "biased control": "biased control",
    "student": "student, undistilled",
    "kd": "KD",
    "seqkd": "SeqKD",
    "gkd-ar": "GKD, AR",
    "gkd-hbsjd": "GKD, HB-SJD",
    "gkd-hbsjd_probabilistic": "GKD, HB-SJD probabilistic",
    "gkd-ar-horizon": "GKD, AR, horizon 1/4",
    "varkd-ar": "VarKD, AR",
    "varkd-hbsjd": "VarKD, HB-SJD",
    "varkd-hbsjd_probabilistic": "VarKD, HB-SJD probabilistic",
    "student, greedy": "student, undistilled, greedy",
    "real": "real images (floor)",
    "reconstruction": "real images, reconstructed",
    "blurred": "real images, blurred",
}
GREEDY = ["sjd_lockstep", "sjd_synchronous", "hbsjd_full", "hbsjd_compact", "hbsjd", "hbsjd_packed", "hbsjd_greedy_adaptive"]
SAMPLED = ["hbsjd_probabilistic", "hbsjd_gumbel", "hbsjd_adaptive"]
BASELINE = dict.fromkeys(GREEDY, "ar_greedy") | dict.fromkeys(SAMPLED, "ar")  # each method is compared with what it is exact to
RULES = {"Greedy": "hbsjd", "Probabilistic": "hbsjd_probabilistic", "Maximal": "hbsjd_maximal", "Gumbel": "hbsjd_gumbel"}  # whose colour a rule has
SETTING = ["device", "config_hash"]  # rows that differ here are never pooled
CELL = [*SETTING, "B", "prefix_ratio", "dtype", "compile"]
NOT_MEASURED = "not measured"
BESIDE = {  # the columns of a table of `beside`: heading, and how a value is written
    "B": ("B", "{}"), "paper_mean": ("paper, mean ms", "{:g}"), "mean": ("ours, mean ms", "{:.0f}"),
    "paper_p95": ("paper, P95 ms", "{:g}"), "p95": ("ours, P95 ms", "{:.0f}"), "paper_rounds": ("paper, rounds", "{:g}"), "rounds": ("ours, rounds", "{:.0f}"),
    "tokens": ("ours, tokens per round", "{:.2f}"), "paper_speedup": ("paper, speedup", "{:g}"), "speedup": ("ours, speedup", "{:.2f}"),
    "interval": ("95 % interval", "{}"), "repeats": ("repeats", "{:.0f}"), "device": ("device", "{}"), "config_hash": ("configuration", "{}"),
}


def style() -> None:
    """The look of every figure."""
    plt.rcdefaults()
    plt.rcParams.update({
        "figure.dpi": 110, "savefig.dpi": 180, "savefig.bbox": "tight", "svg.hashsalt": "hbsjd", "figure.constrained_layout.use": True,
        "font.size": 10, "axes.titlesize": 10.5, "axes.titleweight": "bold", "axes.titlelocation": "left", "figure.titlesize": 11,
        "axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": "#666666", "axes.grid": True, "axes.axisbelow": True,
        "grid.color": "#e6e6e6", "grid.linewidth": 0.8, "lines.linewidth": 1.8, "lines.markersize": 5.5, "legend.frameon": False,
    })


def save(fig: mpl.figure.Figure, name: str, scale: str) -> None:
    """figures/<name>.svg and .png (figures/smoke/ at that scale), without dates or versions."""
    folder = figure_dir(scale)
    fig.savefig(folder / f"{name}.svg", metadata={"Date": None, "Creator": None})
    fig.savefig(folder / f"{name}.png", metadata={"Software": None})


def interval(values) -> tuple[float, float]:
    """Bootstrap 95 % interval of the median, from a fixed seed."""
    values = np.asarray(values, float)
    draws = np.random.default_rng(0).choice(values, (2000, len(values)))
    low, high = np.percentile(np.median(draws, axis=1), [2.5, 97.5])
    return float(low), float(high)


def paired_speedup(rows: pd.DataFrame, baseline: dict[str, str] = BASELINE, cell: list[str] = CELL) -> pd.DataFrame:
    """One row per cell and method: the median over repeats of seconds(baseline) / seconds(method), paired by `repeat`, and its interval."""
    timed = rows[[*cell, "repeat", "method", "seconds"]]
    ours = timed[timed.method.isin(list(baseline))].assign(baseline=lambda table: table.method.map(baseline))
    theirs = timed.rename(columns={"method": "baseline", "seconds": "baseline_seconds"})
    pairs = ours.merge(theirs, on=[*cell, "repeat", "baseline"])
    ratios = pairs.assign(ratio=pairs.baseline_seconds / pairs.seconds).groupby([*cell, "method"], dropna=False).ratio
    return ratios.agg(speedup="median", low=lambda r: interval(r)[0], high=lambda r: interval(r)[1], pairs="size").reset_index()


def against(rows: pd.DataFrame, baseline: str) -> pd.DataFrame:
    """One row per batch size and method, over the repeats that all of them have: mean and 95th percentile of the milliseconds, mean `rounds`,
    committed `tokens` per round, how many `repeats`; and the `paired_speedup` over `baseline`, which is one of the methods."""
    cell = [*SETTING, "B"]
    timed = rows.groupby([*cell, "repeat"]).method.transform("nunique")
    rows = rows[timed == rows.groupby(cell).method.transform("nunique")]
    groups = rows.assign(ms=1000 * rows.seconds).groupby([*cell, "method"])
    table = groups.agg(mean=("ms", "mean"), p95=("ms", lambda ms: ms.quantile(0.95)), rounds=("rounds", "mean"), repeats=("repeat", "size"))
    table["tokens"] = groups.committed.sum() / groups.row_rounds.sum()
    return table.reset_index().merge(paired_speedup(rows, dict.fromkeys(rows.method, baseline), cell), on=[*cell, "method"])


def beside(ours: pd.DataFrame, paper: pd.DataFrame) -> pd.DataFrame:
    """A table of `against` beside the paper's numbers, written out: `paper` has method, B, and some of the columns of BESIDE that begin with paper_."""
    ours = ours.assign(interval=[f"{low:.2f} to {high:.2f}" for low, high in zip(ours.low, ours.high)])
    table = ours.merge(paper, on=["method", "B"], how="outer")
    columns = {name: how for name, how in BESIDE.items() if name in table}
    table["place"] = table.method.str.partition(", ")[0].map({method: place for place, method in enumerate(LABELS)})
    table = table.sort_values([*SETTING, "B", "place", "method"])
    for name, (_, form) in columns.items():
        table[name] = table[name].map(form.format, na_action="ignore")
    table = table.assign(method=table.method.map(label))[["method", *columns]]
    return table.rename(columns={name: heading for name, (heading, _) in columns.items()})


def quantities(ours: pd.DataFrame, paper: pd.DataFrame, by: str, names: dict[str, str]) -> pd.DataFrame:
    """The paper's numbers and ours, one row per setting, value of `by` and column of `names`, which says what it is called: "speedup, B = {}".

    Both tables have the columns of `names` that were printed or measured. `low` and `high` of ours, where there are, belong to the last of them.
    """
    printed, found = {row[by]: row for row in paper.to_dict("records")}, {}
    for row in ours.to_dict("records"):
        found.setdefault(tuple(row[column] for column in SETTING), {})[row[by]] = row
    lines = []
    for setting, rows in (found or {(None, None): {}}).items():
        for (column, name), key in product(names.items(), {**printed, **rows}):
            row, last = rows.get(key, {}), column == list(names)[-1]
            ends = dict(low=row.get("low"), high=row.get("high")) if last else {}
            said = name.format(label(key) if isinstance(key, str) else key)
            lines.append(dict(zip(SETTING, setting)) | dict(quantity=said, paper=printed.get(key, {}).get(column), ours=row.get(column)) | ends)
    numbers = ["paper", "ours", "low", "high"]
    table = pd.DataFrame(lines, columns=[*SETTING, "quantity", *numbers]).astype(dict.fromkeys(numbers, float))
    return table.dropna(subset=["paper", "ours"], how="all").reset_index(drop=True)


def compared(table: pd.DataFrame) -> pd.DataFrame:
    """A table of `quantities`, written out."""
    ends = [f" ({row.low:.4g} to {row.high:.4g})" if pd.notna(row.low) else "" for row in table.itertuples()]
    ours = table.ours.map("{:.4g}".format, na_action="ignore") + ends
    written = dict(quantity=table.quantity, paper=table.paper.map("{:.4g}".format, na_action="ignore"), ours=ours)
    return pd.DataFrame(written | dict(device=table.device, configuration=table.config_hash))


def check(table: pd.DataFrame, item: str, claims: dict[str, tuple]) -> pd.DataFrame:
    """Whether what the paper's printed numbers say holds here, by setting. A claim names two quantities of the table, or numbers: the first is the larger.

    `verdict`: "holds" and "does not hold" beyond the intervals of both, "within noise" where these overlap, "not measured".
    """
    table, lines = table.assign(low=table.low.fillna(table.ours), high=table.high.fillna(table.ours)), []
    for setting, rows in table.groupby(SETTING, dropna=False):
        values = rows.set_index("quantity")[["paper", "ours", "low", "high"]]
        for claim, sides in claims.items():
            more, less = (values.loc[side] if isinstance(side, str) else pd.Series(float(side), values.columns) for side in sides)
            assert not more.paper <= less.paper, f"{item} does not say that {claim}"
            verdict = "holds" if more.low > less.high else "does not hold" if more.high < less.low else "within noise"
            pairs = {name: f"{more[name]:.4g}, {less[name]:.4g}" for name in ("paper", "ours")}
            lines.append(dict(item=item, claim=claim) | pairs | dict(verdict=verdict) | dict(zip(SETTING, setting)))
            if pd.isna(more.ours) or pd.isna(less.ours):
                lines[-1] |= dict(ours=None, verdict=NOT_MEASURED)
    return pd.DataFrame(lines)


def verdicts(checked: pd.DataFrame) -> str:
    """One sentence per device and verdict of a table of `check`."""
    groups, several = checked.groupby(["device", "verdict"], sort=False, dropna=False), checked.device.nunique() > 1
    return " ".join(f"{verdict.capitalize()}{f' on {device}' * several}: {'; '.join(rows.claim)}." for (device, verdict), rows in groups)


def write_report(scale: str) -> None:
    """figures/REPORT.md: every table of that folder, with the text above it, in the order of their names."""
    folder = figure_dir(scale)
    lines = [f"# All tables, {scale} scale"]
    lines += ["Written by `notebooks/00_paper.ipynb` from the files beside it. What the columns mean: [results/README.md](../results/README.md)."]
    for path in sorted(folder.glob("[0-9][0-9]_*.md")):
        lines += [f"## {path.stem}", path.read_text(encoding="utf-8").strip()]
    (folder / "REPORT.md").write_text("\n\n".join(lines) + "\n", encoding="utf-8")


def label(method: str) -> str:
    """A method's label; what follows a comma in its name ("hbsjd, W = 8") stays as it is."""
    name, comma, rest = method.partition(", ")
    return LABELS.get(method, LABELS.get(name, name) + comma + rest)


def color(name: str) -> str:
    """A method's or an arm's colour; dark grey for one that was added since."""
    return COLORS.get(name, "#444444")


def companion(facts: dict, ending: str) -> pd.DataFrame:
    """The table beside a results file: `facts` is its provenance, `ending` what the experiment gave to `Run.file`."""
    return pd.read_csv(facts["csv"].with_name(f"{facts['csv'].stem}-{ending}"))


def divergence_rate(rows: pd.DataFrame) -> tuple[float, float, float]:
    """First differences per 1000 compared tokens, and the 95 % interval of a Poisson count, by draws from a fixed seed.

    A row is an image of which `value` of `count` tokens agree before the first difference; where there is one, one token more was compared.
    """
    differ = (rows.value < rows["count"]).sum()
    rng = np.random.default_rng(0)
    ends = np.percentile(rng.gamma(differ, size=100_000), 2.5), np.percentile(rng.gamma(differ + 1, size=100_000), 97.5)
    return tuple(float(1000 * number / (rows.value.sum() + differ)) for number in (differ, *ends))


def pooled_ratio(rows: pd.DataFrame, over: str, under: str, by: list[str]) -> pd.DataFrame:
    """One row per group: `mean`, sum(over) / sum(under) of its rows; `low` and `high`, the ratios of the rows at the ends; and the number of `rows`."""
    groups = rows.assign(each=rows[over] / rows[under]).groupby([*SETTING, *by], dropna=False)
    totals = groups[[over, under]].sum()
    return groups.each.agg(low="min", high="max", rows="size").assign(mean=totals[over] / totals[under]).reset_index()


def mean_and_range(table: pd.DataFrame) -> list[str]:
    """The values of a `pooled_ratio` table, written out."""
    return [f"{mean:.2f} ({low:.2f} to {high:.2f})" for mean, low, high in zip(table["mean"], table.low, table.high)]


def over_seeds(values, form: str = "{:.3f}") -> str:
    """Mean of the values and, where there are several, their range, written out; empty ones are left out."""
    values = pd.Series(values).dropna()
    ends = f" ({form} to {form})".format(values.min(), values.max()) if len(values) > 1 else ""
    return form.format(values.mean()) + ends if len(values) else NOT_MEASURED


def latest(stem: str, scale: str, columns: list[str]) -> pd.DataFrame:
    """These columns of an experiment that another one builds on: of each device the configuration begun last. No rows where nothing was measured."""
    wanted = [*SETTING, *columns]
    if not newest(RESULTS / stem / scale):
        return pd.DataFrame(columns=wanted)
    last = {facts["device"]: facts["config_hash"] for facts in sorted(provenance(stem, scale), key=lambda facts: facts["start"])}
    rows = load(stem, scale)
    return rows.loc[rows.config_hash == rows.device.map(last), wanted].copy()


def pooled_scores(rows: pd.DataFrame, by: list[str]) -> pd.DataFrame:
    """One row per group of scores: `value`, the mean over its `seeds`; `low` and `high`, the range of the seeds, and of a single one its interval."""
    groups = rows.groupby([*SETTING, *by])
    table = groups.agg(value=("value", "mean"), low=("low", "first"), high=("high", "first"), seeds=("value", "size"))
    table["low"] = table.low.where(table.seeds == 1, groups.value.min())
    table["high"] = table.high.where(table.seeds == 1, groups.value.max())
    return table.reset_index()


def ranged(form: str, row) -> str:
    """A row of `pooled_scores`, written out: an interval stands in round brackets, a range over seeds in square ones."""
    left, right = "[]" if row.seeds > 1 else "()"
    return f"{form} {left}{form} to {form}{right}".format(row.value, row.low, row.high)


def training_clock(train: pd.DataFrame, faster: pd.DataFrame) -> pd.DataFrame:
    """The rows of training runs with `clock`, the seconds of their steps so far; one run per backend and seed.

    The methods of `faster`, a `paired_speedup` of rollouts, have no run of their own: they are exact to a backend that has one, so that each would
    have trained on the same tokens. Each gets that run's rows, with rollouts that many times faster.
    """
    runs = [train]
    for method, rate in faster.groupby("method"):
        run = train[train.backend == BASELINE[method]].merge(rate[[*SETTING, "speedup"]], on=SETTING)
        saved = run["timing/rollout_s"] * (1 - 1 / run.speedup)
        runs.append(run.assign(backend=method, **{"timing/step_s": run["timing/step_s"] - saved}))
    rows = pd.concat(runs).sort_values([*SETTING, "backend", "seed", "step"], ignore_index=True)
    return rows.assign(clock=rows.groupby([*SETTING, "backend", "seed"])["timing/step_s"].cumsum())


def settings(rows: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    """The rows of each device and configuration, under the device's name (and the configuration's hash where a device has several)."""
    parts = list(rows.groupby(SETTING))
    devices = [device for (device, _), _ in parts]
    return [(device if devices.count(device) == 1 else f"{device}, {config}", part) for (device, config), part in parts]


def fastest_dtype(rows: pd.DataFrame, provenance: list[dict]) -> pd.DataFrame:
    """The rows in the dtype in which the experiment found AR to be faster at their batch size."""
    chosen = {(facts["device"], facts["config_hash"], int(B), dtype) for facts in provenance for B, dtype in facts["fastest_dtype"].items()}
    return rows[[key in chosen for key in zip(rows.device, rows.config_hash, rows.B, rows.dtype)]].copy()


def ceilings(provenance: list[dict]) -> pd.DataFrame:
    """The most that a window can gain: over widths, what a round commits / what it costs compared with a round of AR, both as calibrated."""
    lines = []
    for facts in provenance:
        for B, found in facts["calibrations"].items():
            cost = {width: list(row.values())[-1] for width, row in found["costs"].items()}  # at the whole batch
            for method, mode in (("hbsjd_adaptive", "sample"), ("hbsjd_greedy_adaptive", "greedy")):
                gain = {int(width): mean * cost["0"] / cost[width] for width, mean in found["prior"][mode].items()}
                width = max(gain, key=gain.get)
                lines.append(dict(device=facts["device"], config_hash=facts["config_hash"], B=int(B), method=method, ceiling=gain[width], best_width=width))
    return pd.DataFrame(lines)


def speedup_line(ax: plt.Axes, table: pd.DataFrame, x: str, method: str) -> None:
    """One method of a `paired_speedup` table against column `x`, with its intervals."""
    table = table.sort_values(x)
    ax.plot(table[x], table.speedup, "o-", color=COLORS[method], label=LABELS[method])
    ax.vlines(table[x], table.low, table.high, color=COLORS[method], alpha=0.5)


def rule_line(ax: plt.Axes, x, table: pd.DataFrame, rule: str, line: str = "o-") -> None:
    """One rule of a `pooled_ratio` table at places `x`, each with its range."""
    ax.plot(x, table["mean"], line, color=COLORS[RULES[rule]], label=rule)
    ax.vlines(x, table.low, table.high, color=COLORS[RULES[rule]], alpha=0.5)


def seed_line(ax: plt.Axes, rows: pd.DataFrame, x: str, y: str, name: str, line: str = "o-") -> None:
    """Column `y` at each step against column `x`, both as means over the seeds; the bars are the range of `y` over the seeds."""
    groups = rows.groupby("step")
    ax.plot(groups[x].mean(), groups[y].mean(), line, color=color(name), label=label(name))
    ax.vlines(groups[x].mean(), groups[y].min(), groups[y].max(), color=color(name), alpha=0.5)


def speedup_axes(axes: np.ndarray, xlabel: str) -> None:
    """Finish panels of speedups: the line where a method is as fast as AR, and each method's name at its line."""
    for ax in axes.flat:
        ax.axhline(1, color="#666666", linewidth=1)
        ax.set(xlabel=xlabel, ylim=(0, None))
    for ax in axes.flat:
        label_ends(ax)


def broken_axis(near: plt.Axes, far: plt.Axes) -> None:
    """Two panels side by side become one x axis with a break."""
    far.spines["left"].set_visible(False)
    far.tick_params(left=False)
    mark = dict(marker=[(-0.5, -1), (0.5, 1)], markersize=9, linestyle="none", color="#666666", clip_on=False, label="_")
    near.plot([1], [0], transform=near.transAxes, **mark)
    far.plot([0], [0], transform=far.transAxes, **mark)


def label_ends(ax: plt.Axes, gap: float = 0.06) -> None:
    """Write each line's label at its right end, in its colour, pushed apart where two would touch."""
    ax.autoscale_view()
    lines = [line for line in ax.get_lines() if len(line.get_xdata()) and not line.get_label().startswith("_")]
    ends = [(line, ax.transAxes.inverted().transform(ax.transData.transform(line.get_xydata()[-1]))) for line in lines]
    ends = sorted(ends, key=lambda end: end[1][1])
    heights = np.array([y for _, (_, y) in ends])
    for _ in range(100):
        push = (gap - np.diff(heights)).clip(min=0) / 2
        heights[:-1] -= push
        heights[1:] += push
    for (line, (x, _)), y in zip(ends, heights):
        ax.annotate(line.get_label(), (x, y), (7, 0), "axes fraction", "offset points", color=line.get_color(), va="center", fontsize=9)


def to_markdown(table: pd.DataFrame) -> str:
    lines = [table.columns, ["---"] * table.shape[1], *shown(table).itertuples(index=False)]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines) + "\n"


def write_table(table: pd.DataFrame, name: str, scale: str, text: str = "") -> pd.DataFrame:
    """figures/<name>.md, with `text` above the table, and figures/<name>.csv; returns the table as it is shown there."""
    folder = figure_dir(scale)
    (folder / f"{name}.md").write_text(f"{text}\n\n{to_markdown(table)}".lstrip(), encoding="utf-8")
    shown(table).to_csv(folder / f"{name}.csv", index=False, lineterminator="\n")
    return shown(table)


def shown(table: pd.DataFrame) -> pd.DataFrame:
    return table.astype(object).where(table.notna(), NOT_MEASURED)
