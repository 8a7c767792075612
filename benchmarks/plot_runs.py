r"""Draw one scalar of several runs against environment steps, and print how each ended.

    python benchmarks/plot_runs.py runs/HalfCheetah* --scalar charts/episodic_return \
        --last 10 --out docs/halfcheetah.png

Thin lines are runs, the thick one is their mean where all have a value.
"""

import sys
from pathlib import Path

import numpy as np
import tyro
from matplotlib.figure import Figure


def read(run, scalar):
    """steps [K] and values [K] of one scalar of one run folder."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run), size_guidance={"scalars": 0}).Reload()
    if scalar not in events.Tags()["scalars"]:
        has = ", ".join(events.Tags()["scalars"]) or "no scalars"
        sys.exit(f"error: {run} has no {scalar}; it has {has}")
    return np.array([(e.step, e.value) for e in events.Scalars(scalar)]).T


def main(
    runs: tyro.conf.Positional[tuple[Path, ...]],
    scalar: str = "charts/clip_reward",
    last: int = 10,
    title: str = "",
    out: Path | None = None,
) -> None:
    """Print, and draw if asked to.

    Args:
        runs: run folders
        scalar: which scalar
        last: how many values at the end to average
        title: written above the picture
        out: PNG to write
    """
    curves = {run.name: read(run, scalar) for run in runs}
    for name, (steps, values) in curves.items():
        end = f"mean of the last {last}: {values[-last:].mean():.4g}"
        print(f"{name}: {steps[-1]:,.0f} steps, {end}, largest {values.max():.4g}")
    if out is None:
        return
    figure = Figure((6, 3.6), layout="constrained")
    axes = figure.subplots()
    for name, curve in curves.items():
        axes.plot(*curve, lw=0.8, alpha=0.6, label=name.split("__")[2])
    begin = max(steps[0] for steps, _ in curves.values())
    grid = np.linspace(begin, min(steps[-1] for steps, _ in curves.values()), 300)
    mean = np.mean([np.interp(grid, *curve) for curve in curves.values()], axis=0)
    axes.plot(grid, mean, lw=2, color="black", label="mean")
    axes.set(xlabel="environment steps", ylabel=scalar, title=title)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(title="seed", frameon=False, loc="outside right upper")  # beside the curves
    figure.savefig(out, dpi=130)


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
