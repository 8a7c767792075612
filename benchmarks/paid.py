"""What a policy that fails is paid instead: late in an episode, beside the whole pose.

    python benchmarks/paid.py runs/RUN runs/RUN --out docs/paid.png

A row a run, as its cameras see it: of 20 episodes the one that is paid the median, and of 20
samples of the pose library the same. Below: the mean of all 20, of the reward and of how much of
the pose there is by geometry (`data.degrees` of tiny_clip). A green border: the judge accepts the
state.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import eval_epic  # noqa: I001 - before torch: it bounds how long threads spin
import numpy as np
import tyro
from PIL import Image

from evaluation import figures
from evaluation.rewards import rewards_of
from tiny_clip import data, poses
from training.flags import flags_of

COUNT = 20


def row(run: Path, checkpoint: str, step: int, size: int) -> list[np.ndarray]:
    """Two framed pictures [H, W, 3] uint8 of a humanoid's run: its policy's, and the pose's."""
    args = eval_epic.load_run(run)
    task = eval_epic.task_of(None, flags_of(args))
    paths = eval_epic.checkpoint_paths(run, [checkpoint])
    played = eval_epic.dataset_of_run(args, paths, COUNT, seed=(0, 4))
    rng = np.random.default_rng(0)
    library = np.pad(poses.sample(task.name, rng, COUNT), ((0, 0), (0, 23)))
    for state in library:  # as every episode begins
        poses.turn_to(state[:24], rng.uniform(-np.pi, np.pi) / 6)
    cells, alpha = [], args.reward.reward_alpha
    whose = f"{task.name.replace('_', ' ')}, seed {args.seed}, step {step}", "the pose library"
    both = zip(whose, (played.states[played.step == step - 1], library), strict=True)
    with eval_epic.pictures(played) as pool:
        for who, states in both:
            paid = rewards_of(args.reward, [alpha], eval_epic.renderer_of(played), states)[alpha]
            share = data.degrees(poses.describe(states[:, :24]))[task.name].mean()
            state = states[[np.argsort(paid)[len(paid) // 2]]]
            words = f"{who}\n{share:.2f} of it, paid {paid.mean():.3f}"
            print(words.replace("\n", ": "))
            picture = pool.render(state, size)[0]
            cells.append(figures.framed(picture, words, task.judge(state)[0]))
    return cells


def main(
    runs: tyro.conf.Positional[list[Path]],
    out: Path = Path("paid.png"),
    checkpoint: str = "best",
    step: int = 95,
    size: int = 160,
) -> None:
    """Write the picture and print its figures.

    Args:
        runs: folders of humanoid runs about tasks of the paper, with equally many cameras
        out: where to
        checkpoint: best, or a number of steps that all runs have
        step: of the episode, from 1
        size: of a picture in pixels
    """
    cells = [cell for run in runs for cell in row(run, checkpoint, step, size)]
    Image.fromarray(figures.grid(cells, 2)).save(out)
    print(f"wrote {out}")


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
