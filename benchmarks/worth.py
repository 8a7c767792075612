"""Do numbers from before training predict success? Fill in AUC, EPIC distance and gap on the states
of `eval_epic.py prompts` in each row of evaluation/worth.csv, beside the success of a policy after
64 000 frames with the row's task, prompt, cameras and tiny_clip's weights (a commit of this clone).

    python benchmarks/worth.py --out docs/worth.png
"""

import csv
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import eval_epic

# isort: split
import numpy as np
import tyro
from matplotlib.figure import Figure

from clip_reward import RewardArgs
from environments import judges
from evaluation import compare, datasets
from tiny_clip.data import facing_columns

NUMBERS = {"auc": "AUC", "epic": "EPIC distance", "gap": "gap to hacked states"}


def weights_of(commit, folder):
    """Write tiny_clip as it was at a commit to a folder -> its name for --clip-model."""
    folder.mkdir(exist_ok=True)
    for name in "open_clip_config.json", "open_clip_model.safetensors":
        command = ["git", "-C", ROOT, "show", f"{commit}:tiny_clip/{name}"]
        (folder / name).write_bytes(subprocess.run(command, check=True, capture_output=True).stdout)
    return f"local-dir:{folder}"


def draw(rows, out):
    """Draw the success of the policies against AUC, EPIC distance and gap."""
    figure = Figure((11, 3.4), layout="constrained")
    axes = figure.subplots(1, 3, sharey=True)
    for ax, (name, words) in zip(axes, NUMBERS.items()):
        for task in judges.HUMANOID:
            points = [(float(r[name]), float(r["success"])) for r in rows if r["task"] == task]
            ax.plot(*zip(*points), "o", alpha=0.7, label=task.replace("_", " "))
        ax.set(xlabel=f"{words}, before training")
    axes[0].set(ylabel="success after training, %")
    figure.legend(*ax.get_legend_handles_labels(), frameon=False, loc="outside right")
    figure.savefig(out, dpi=90)


def main(out: Annotated[Path, tyro.conf.arg(help="the figure")]):
    with compare.WORTH.open(newline="") as file:
        rows = list(csv.DictReader(file))
    args = eval_epic.args_of("Humanoid-v5")
    args.render_size = 64
    data = datasets.Dataset(args, {"source": "prompts"}, **facing_columns(40))
    with tempfile.TemporaryDirectory() as folder:
        for row in rows:
            args.camera_azimuth = tuple(map(float, row["camera_azimuth"].split()))
            truth = judges.TASKS[row["task"]].judge(data.states).astype(float)
            name = weights_of(row["weights"], Path(folder) / row["weights"])
            model, goal = RewardArgs(clip_model=name), (row["prompt"],)
            cameras, every = [tuple(range(len(args.camera_azimuth)))], np.arange(len(data))
            (found,) = compare.compare(data, every, truth, [model], [goal], [0.0], cameras, 2)
            row |= {name: f"{found[name]:.4f}" for name in NUMBERS}
            print(row["task"], row["weights"], row["success"], row["auc"], row["epic"], row["gap"])
    datasets.write_csv(compare.WORTH, list(rows[0]), rows)
    draw(rows, out)
    compare.say_worth()


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
