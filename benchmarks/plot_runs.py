r"""Draw one scalar of several runs against environment steps, and print how each ended.

    python benchmarks/plot_runs.py runs/HalfCheetah* --scalar charts/episodic_return \
        --last 10 --out docs/halfcheetah.png

Runs that differ in nothing but their seed are a group: a thick line is a group's mean, the band
around it the 95 % interval over seeds by scipy's bootstrap (of three seeds that is their range),
thin lines are its runs. What differs between groups (a prompt, an alpha, any flag) is their name.
"""

import json
import sys
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import tyro
from matplotlib.figure import Figure
from scipy import stats

from training.flags import RESUME_MAY_CHANGE
from training.page import events_of

# where, how fast and until when, but not what is learned
ELSEWHERE = RESUME_MAY_CHANGE | {"seed", "exp_name", "wandb_project_name", "wandb_entity"}
STATISTICS = {  # over seeds; the second is rliable's interquartile mean
    "mean": lambda x, axis: np.mean(x, axis=axis),
    "iqm": lambda x, axis: stats.trim_mean(x, 0.25, axis=axis),
}


def read(run, scalar):
    """steps [K] and values [K] of one scalar of one run folder."""
    events = events_of(run).Reload()
    if scalar not in events.Tags()["scalars"]:
        has = ", ".join(events.Tags()["scalars"]) or "no scalars"
        sys.exit(f"error: {run} has no {scalar}; it has {has}")
    return np.array([(e.step, e.value) for e in events.Scalars(scalar)]).T


def groups_of(runs):
    """{name: runs} of those that differ in nothing but their seed; the name says what differs."""
    flags = {}
    for run in runs:
        path = run / "args.json"
        saved = json.loads(path.read_text()) if path.exists() else {"task": run.name.split("__")[0]}
        if "script" in saved:  # a changed copy is another experiment
            saved["script"] = Path(saved["script"]).name
        flags[run] = {x: y for x, y in saved.items() if x not in ELSEWHERE}
        if "exploration_fraction" in saved:  # DQN's schedules are as long as the run
            flags[run]["total_timesteps"] = saved["total_timesteps"]
    in_all = set.intersection(*(set(saved) for saved in flags.values()))
    values = {name: {json.dumps(saved[name]) for saved in flags.values()} for name in in_all}
    differ = sorted(name for name in in_all if len(values[name]) > 1)
    groups = {}
    for run in runs:
        parts = [f"{name} {show(flags[run].get(name))}" for name in differ]
        groups.setdefault(", ".join(parts) or "all", []).append(run)
    return groups


def show(value):
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def interval(values, statistic):
    """Of values [seeds, K]: the statistic [K] and its 95 % interval, low [K] and high [K]."""
    middle = statistic(values, 0)
    if len(values) < 2:
        return middle, middle, middle
    options = {"method": "percentile", "vectorized": True, "axis": 0, "rng": 1}
    band = stats.bootstrap((values,), statistic, n_resamples=2000, **options).confidence_interval
    return middle, band.low, band.high


def main(
    runs: tyro.conf.Positional[tuple[Path, ...]],
    scalar: str = "charts/clip_reward",
    last: int = 10,
    statistic: Literal["mean", "iqm"] = "mean",
    title: str = "",
    out: Path | None = None,
) -> None:
    """Print, and draw if asked to.

    Args:
        runs: run folders
        scalar: which scalar
        last: how many values at the end to average
        statistic: over the seeds of a group; iqm: mean of the middle half
        title: written above the picture
        out: PNG to write
    """
    curves = {run: read(run, scalar) for run in runs}
    for run, (steps, values) in curves.items():
        end = f"mean of the last {last}: {values[-last:].mean():.4g}"
        print(f"{run.name}: {steps[-1]:,.0f} steps, {end}, largest {values.max():.4g}")
    groups = groups_of(runs)
    for name, members in groups.items():
        ends = np.array([[curves[run][1][-last:].mean()] for run in members])
        middle, low, high = (float(x[0]) for x in interval(ends, STATISTICS[statistic]))
        band = f"{low:.4g} to {high:.4g}" if len(members) > 1 else "none"
        print(f"{name}: {len(members)} runs, {statistic} {middle:.4g}, 95 % interval {band}")
    if out is None:
        return
    figure = Figure((6.5, 4), layout="constrained")
    axes = figure.subplots()
    for number, (name, members) in enumerate(groups.items()):
        color = f"C{number}"
        begin = max(curves[run][0][0] for run in members)
        grid = np.linspace(begin, min(curves[run][0][-1] for run in members), 300)
        values = np.stack([np.interp(grid, *curves[run]) for run in members])
        for run in members:
            axes.plot(*curves[run], lw=0.6, alpha=0.4, color=color)
        middle, low, high = interval(values, STATISTICS[statistic])
        axes.fill_between(grid, low, high, color=color, alpha=0.2, lw=0)
        axes.plot(grid, middle, lw=2, color=color, label=f"{name} ({len(members)} runs)")
    axes.set(xlabel="environment steps", ylabel=scalar, title=title)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(frameon=False, fontsize=8, loc="outside lower center")
    figure.savefig(out, dpi=130)


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
