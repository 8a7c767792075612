"""Draw README's pictures: learned policies in motion, and the pictures that CLIP sees.

    python benchmarks/pictures.py film runs/KNEELING runs/CARTPOLE --out docs/learned.webp
    python benchmarks/pictures.py moments runs/SEED_1 runs/SEED_2 runs/SEED_3 --out docs/heels.webp
    python benchmarks/pictures.py looks --out docs/looks.png

No command needs a GPU or a display.
"""

import sys
import textwrap
from contextlib import closing
from pathlib import Path
from typing import Annotated

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import tyro
from PIL import Image

import dqn_clip_classic as dqn
import egl_render
import sac_clip_humanoid as sac
from clip_reward import UsageError
from environments import tasks
from evaluation.datasets import play
from evaluation.figures import framed, grid
from evaluation.runs import checkpoint_paths, load_run, make_scorer
from training.run import run_folder, say

egl_render.setup_gl()  # before an environment imports mujoco


def draw_best(folder, args, choose, size):
    """Let a run's best.pt play an episode and draw the rows that `choose` picks of its T states ->
    the rows [M], and frames [M, H, W, 3] uint8 by the run's first camera."""
    data = play(args, checkpoint_paths(folder, ["best"]), 1, (args.seed, 3))
    rows = choose(len(data))
    with closing(make_scorer(args, cameras=1)) as scorer:
        return rows, scorer.render(data.states[rows], size)


def episode(folder, moments, size):
    """Return one episode of a run, with its sentence below: [moments, H, W, 3] uint8."""
    folder = run_folder(folder)
    args = load_run(folder)
    _, frames = draw_best(folder, args, lambda T: np.linspace(0, T - 1, moments).astype(int), size)
    lines = [*textwrap.wrap(args.target_prompt[0], size // 6 + 1), "", "", ""]
    return [framed(frame, "\n".join(lines[:3])) for frame in frames]


def film(runs: Annotated[tuple[Path, ...], tyro.conf.Positional], out: Path):
    """Film learned policies side by side, each above its sentence, as one animated picture. Each
    run's best.pt plays one episode, without exploration, from a start that training never saw. It
    is the first episode, even if it fails. All episodes take the same time in the film.

    Args:
        runs: folders of runs.
        out: .webp, .gif or .png to write.
    """
    films = [episode(folder, moments=50, size=160) for folder in runs]
    pictures = [Image.fromarray(grid(list(cells), min(5, len(cells)))) for cells in zip(*films)]
    options = {"save_all": True, "append_images": pictures[1:], "duration": 80, "loop": 0}  # ms
    pictures[0].save(out, quality=60, method=6, **options)
    say(f"{out}: {out.stat().st_size / 1e6:.1f} MB")


def moments(runs: Annotated[tuple[Path, ...], tyro.conf.Positional], out: Path):
    """Draw an episode of each run's best.pt in a row: its middle, three quarters and end.

    Args:
        runs: folders of runs.
        out: .webp or .png to write.
    """
    cells = []
    for folder in map(run_folder, runs):
        args = load_run(folder)
        args.camera_distance = 2.5
        rows, frames = draw_best(folder, args, lambda T: T * np.arange(2, 5) // 4 - 1, 180)
        cells += [framed(x, f"seed {args.seed}, step {t}") for x, t in zip(frames, rows + 1)]
    Image.fromarray(grid(cells, 3)).save(out, quality=80)


def looks(out: Path):
    """Draw a state of two tasks with --no-textured and with --textured.

    Args:
        out: .png to write.
    """
    cells = []
    for script, env_id in ((sac, "Humanoid-v5"), (dqn, "MountainCar-v0")):
        for textured, look in ((False, "with --no-textured"), (True, "as CLIP sees it")):
            args = script.Args(env_id=env_id, render_size=240, textured=textured)
            _, state, _ = tasks.describe_env(env_id, script.make_env(args))
            frame = script.make_renderer(args).render(state[None])[0]
            cells.append(framed(frame, f"{env_id} {look}"))
    Image.fromarray(grid(cells, 4)).save(out, optimize=True)


if __name__ == "__main__":
    try:
        commands = {"film": film, "moments": moments, "looks": looks}
        tyro.extras.subcommand_cli_from_dict(commands, description=__doc__)
    except UsageError as error:
        sys.exit(f"error: {error}")
