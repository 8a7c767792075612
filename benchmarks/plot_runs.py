r"""Draw one scalar of several runs against environment steps, and print how each ended.

    python benchmarks/plot_runs.py runs/HalfCheetah* --scalar charts/episodic_return \
        --last 10 --out docs/halfcheetah.png

Runs that differ only in their seed form a group. The thick line is its mean, the band is its 95 %
bootstrap interval over seeds (with three seeds: their range), and thin lines are its runs. A group
is named by the flags that differ between groups (a prompt, an alpha). Of --reward-head only the
file's name counts, because each seed may have labels of its own, in a folder of its own.
--by-prompt draws the runs of each prompt in a panel of their own.
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import tyro
from matplotlib.figure import Figure
from scipy import stats

from reward_head import without_hash
from training.run import CURVES, RESUME_MAY_CHANGE

# these flags say where, how fast and until when, but not what is learned
ELSEWHERE = RESUME_MAY_CHANGE | {"seed"}


def read(run, scalar):
    """Return steps [K] and values [K] of one scalar of a run folder."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run), size_guidance={"scalars": 0}).Reload()
    if scalar not in (tags := events.Tags()["scalars"]):
        sys.exit(f"error: {run} has no {scalar}; it has {', '.join(tags) or 'no scalars'}")
    return np.array([(e.step, e.value) for e in events.Scalars(scalar)]).T


def groups_of(runs, by_prompt=False):
    """Group runs that differ only in their seed, and by_prompt in their target prompt -> {flags
    that differ between groups: runs}."""
    flags = {run: json.loads((run / "args.json").read_text()) for run in runs}
    for args in flags.values():
        args["reward_head"] = Path(without_hash(args.get("reward_head", ""))).name
    ignored = ELSEWHERE | ({"target_prompt"} if by_prompt else set())
    shared = set.intersection(*map(set, flags.values())) - ignored
    differ = [x for x in sorted(shared) if len({json.dumps(f[x]) for f in flags.values()}) > 1]
    groups = {}
    for run in runs:
        name = ", ".join(f"{name} {flags[run][name]}" for name in differ)
        groups.setdefault(name or "all", []).append(run)
    return groups


def interval(values):
    """Average values [seeds, K] -> mean [K] and its 95 % interval, low [K] and high [K]."""
    mean = values.mean(0)
    if len(values) < 2:
        return mean, mean, mean
    options = {"method": "percentile", "n_resamples": 2000, "rng": 1}
    band = stats.bootstrap((values,), np.mean, **options).confidence_interval
    return mean, band.low, band.high


def draw(axes, name, runs, curves, last, number):
    """Print how a group of runs ended, draw its interval, its runs and its mean -> the mean's
    line."""
    ends = np.array([[curves[run][1][-last:].mean()] for run in runs])
    mean, low, high = (float(x[0]) for x in interval(ends))
    band = f"{low:.4g} to {high:.4g}" if len(runs) > 1 else "none"
    print(f"{name}: {len(runs)} runs, mean {mean:.4g}, 95 % interval {band}")
    begin = max(curves[run][0][0] for run in runs)
    grid = np.linspace(begin, min(curves[run][0][-1] for run in runs), 300)
    mean, low, high = interval(np.stack([np.interp(grid, *curves[run]) for run in runs]))
    color = f"C{number}"
    for run in runs:
        axes.plot(*curves[run], lw=0.6, alpha=0.4, color=color)
    axes.fill_between(grid, low, high, color=color, alpha=0.2, lw=0)
    label = f"{name}: mean of {len(runs)} runs"
    return axes.plot(grid, mean, lw=2, color=color, label=label)[0]


def main(
    runs: tyro.conf.Positional[tuple[Path, ...]],
    scalar: str = "charts/clip_reward",
    last: int = 10,
    title: str = "",
    names: tuple[str, ...] = (),
    by_prompt: bool = False,
    out: Path | None = None,
) -> None:
    """Print how the runs ended, and draw them if --out is given.

    Args:
        runs: run folders
        scalar: which scalar
        last: how many values at the end to average
        title: written above the picture
        names: names of the groups, in the order of their first runs
        by_prompt: draw one panel for each target prompt
        out: PNG to write
    """
    curves = {run: read(run, scalar) for run in runs}
    for run, (steps, values) in curves.items():
        end = f"mean of the last {last}: {values[-last:].mean():.4g}"
        print(f"{run.name}: {steps[-1]:,.0f} steps, {end}, largest {values.max():.4g}")
    panels = {title: set(runs)}
    if by_prompt:
        panels = {}
        for run in runs:
            prompts = json.loads((run / "args.json").read_text())["target_prompt"]
            panels.setdefault(", ".join(prompts), set()).add(run)
    rows, columns = (len(panels) + 1) // 2, min(2, len(panels))
    figure = Figure((6.5 if columns == 1 else 9, 1 + 3 * rows), layout="constrained")
    words = {tags[0]: words for words, tags in CURVES.items()}
    groups = groups_of(runs, by_prompt)
    lines = {}  # in the legend
    for number, (panel, shown) in enumerate(panels.items(), 1):
        axes = figure.add_subplot(rows, columns, number)
        axes.set(xlabel="environment steps", ylabel=words.get(scalar, scalar))
        axes.set_title(panel, fontsize="medium", wrap=True)
        if by_prompt:
            print(panel)
        for group, (name, members) in enumerate(groups.items()):
            if members := [run for run in members if run in shown]:
                line = draw(axes, names[group] if names else name, members, curves, last, group)
                lines.setdefault(line.get_label(), line)
    figure.legend(handles=lines.values(), frameon=False, fontsize=8, loc="outside lower center")
    if out:
        figure.savefig(out, dpi=130)


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
