"""One picture a run: what its best policy does in the middle of an episode, under its sentence.

    python benchmarks/gallery.py runs/RUN runs/RUN --out docs/tasks.png        # eight of them

Nothing is picked by hand: of 20 episodes the one whose share of good steps is the median, and of it
the middle one of its good steps (of all steps where none is). A green border: the judge accepts it.
"""

import sys
import textwrap
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import eval_epic  # noqa: I001 - before torch: it bounds how long threads spin
import numpy as np
import tyro
from PIL import Image

from evaluation import figures
from training.flags import flags_of


def cell(run: Path, checkpoint: str, distance: float, azimuth: float, size: int) -> np.ndarray:
    """The picture of a run with its border and prompt [H, W, 3] uint8."""
    args = eval_epic.load_run(run)
    task = eval_epic.task_of(None, flags_of(args))
    paths = eval_epic.checkpoint_paths(run, [checkpoint])
    look = dict(camera_distance=distance, camera_azimuth=(azimuth,), camera_lookat=(0, 0, 0.8))
    args.render = replace(args.render, **look, render_quality="full")
    data = eval_epic.dataset_of_run(args, paths, episodes=20, seed=(0, 4))
    good = task.judge(data.states).reshape(20, -1)
    episode = np.argsort(good.sum(1), kind="stable")[10]
    steps = np.flatnonzero(good[episode]) if good[episode].any() else np.arange(good.shape[1])
    step = steps[len(steps) // 2]
    state = data.states[episode * good.shape[1] + step]
    with eval_epic.pictures(data) as pool:
        picture = pool.render(state[None], size)[0]
    words = textwrap.wrap(" ".join(args.reward.target_prompt), size // 7)
    return figures.framed(picture, "\n".join((words + [""] * 3)[:3]), good[episode, step])


def main(
    runs: tyro.conf.Positional[list[Path]],
    out: Path = Path("tasks.png"),
    checkpoint: str = "best",
    distance: float = 2.8,
    azimuth: float = 150.0,
    size: int = 240,
) -> None:
    """Write the picture.

    Args:
        runs: folders of humanoid runs, in the order in which to show them, four in a row
        out: where to
        checkpoint: best, or a number of steps that all runs have
        distance: of the camera in metres; CLIP's is 3.5
        azimuth: of the camera in degrees
        size: of a picture in pixels
    """
    cells = [cell(run, checkpoint, distance, azimuth, size) for run in runs]
    Image.fromarray(figures.grid(cells, 4)).save(out)
    print(f"wrote {out}")


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
