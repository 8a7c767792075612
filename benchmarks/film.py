"""Film learned policies side by side, each above its sentence, as one animated picture.

    python benchmarks/film.py runs/KNEELING runs/CARTPOLE --out docs/learned.webp

Of each run best.pt is played, without exploration, for one episode from a start that training never
had: the first one, whatever comes of it. All episodes take the same time in the film.
"""

import sys
import textwrap
from pathlib import Path
from typing import Annotated

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import tyro
from PIL import Image

import egl_render
from clip_reward import UsageError
from evaluation.datasets import play
from evaluation.figures import framed, grid
from evaluation.runs import checkpoint_paths, load_run, make_scorer
from training.run import run_folder, say

egl_render.setup_gl()  # before an environment imports mujoco


def film(folder, moments, size):
    """Return one episode of a run, with its sentence below: [moments, H, W, 3] uint8."""
    folder = run_folder(folder)
    args = load_run(folder)
    data = play(args, checkpoint_paths(folder, ["best"]), 1, (args.seed, 3))
    scorer = make_scorer(args, cameras=1)
    shown = np.linspace(0, len(data) - 1, moments).astype(int)
    frames = scorer.render(data.states[shown], size)
    scorer.close()
    lines = textwrap.wrap(args.target_prompt[0], size // 6 + 1)
    sentence = "\n".join((lines + ["", "", ""])[:3])
    return [framed(frame, sentence) for frame in frames]


def main(
    runs: Annotated[tuple[Path, ...], tyro.conf.Positional],
    out: Path,
    columns: int = 3,
    moments: int = 50,
    size: int = 180,
    milliseconds: int = 80,
):
    """Film learned policies.

    Args:
        runs: folders of runs.
        out: .webp, .gif or .png to write.
        columns: policies in a row.
        moments: pictures of an episode.
        size: pixels of a picture.
        milliseconds: of a picture.
    """
    films = [film(folder, moments, size) for folder in runs]
    pictures = [Image.fromarray(grid(list(cells), columns)) for cells in zip(*films)]
    options = {"save_all": True, "append_images": pictures[1:], "duration": milliseconds, "loop": 0}
    pictures[0].save(out, quality=60, method=6, **options)
    say(f"{out}: {out.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    try:
        tyro.cli(main, description=__doc__)
    except UsageError as error:
        sys.exit(f"error: {error}")
