r"""How good is the reward, how good is the policy? Look before you train, and after.

    python eval_epic.py landscape --clip-model RN50/openai ViT-bigG-14/laion2b_s39b_b160k
    python eval_epic.py prompts --task kneeling --clip-model ViT-L-14/openai

States as one file: of a run's checkpoints, of a classic task's state space, of the pose library:

    python eval_epic.py collect --source run --run runs/RUN --episodes 5 --out data/kneeling.npz
    python eval_epic.py collect --source uniform --env-id CartPole-v1 --out data/cartpole.npz
    python eval_epic.py collect --source poses --render-size 96 --out data/poses.npz

EPIC distance (arXiv 2006.13900) of reward models to labels, pictures of what a judge accepts and
rejects, and a page on which a person labels by key presses; results go to data/kneeling/:

    python eval_epic.py epic --dataset data/kneeling.npz --judge kneeling \
        --clip-model RN50/openai ViT-L-14/openai ViT-bigG-14/laion2b_s39b_b160k
    python eval_epic.py sheet --dataset data/poses.npz
    python eval_epic.py label data/kneeling.npz
    python eval_epic.py epic --dataset data/kneeling.npz --labels data/kneeling/labels.csv

Success rate of a policy by a task's judge, by your own, or by a person; a run's index.html:

    python eval_epic.py success --run runs/RUN --compare runs/GROUND_TRUTH_RUN
    python eval_epic.py success --run runs/RUN --judge my_task.py:somersault
    python eval_epic.py success --dataset data/kneeling.npz --human data/kneeling/labels.csv
    python eval_epic.py page --run runs/RUN
"""

from __future__ import annotations

import functools
import os
import signal
import sys
from dataclasses import field
from pathlib import Path
from typing import Annotated, Literal

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C while the next lines import: no traceback

import clip_reward  # before torch: it bounds how long threads spin

# isort: split
import numpy as np
import tyro
from annotated_types import Interval
from pydantic import NonNegativeInt, PositiveInt
from pydantic.dataclasses import dataclass

import dqn_clip_classic as dqn
import egl_render
import sac_clip_humanoid as sac
from clip_reward import UsageError
from environments import classic, judges
from evaluation import compare, datasets, figures, judging, label_page, runs
from evaluation.page import write_page
from evaluation.rewards import Alpha, Model, Rewards

Few = Annotated[int, Interval(ge=1, le=100_000)]  # episodes are played side by side
Many = Annotated[int, Interval(ge=1, le=10_000_000)]

egl_render.setup_gl()  # before an environment or a judge imports mujoco


@dataclass
class Look(egl_render.RenderArgs):
    """How its pictures are drawn; what is not given is as the run had it, or as for training."""

    render_size: Annotated[int | None, Interval(ge=16, le=8192)] = None
    render_quality: Literal["auto", "full", "light"] | None = None
    textured: bool | None = None

    def over(self, render):
        """Return those RenderArgs with what is given here."""
        given = {name: value for name, value in vars(self).items() if value not in (None, ())}
        return egl_render.RenderArgs(**vars(render) | given)


@dataclass
class Collect:
    """Write states, and what is known of them, as a dataset: one .npz file."""

    source: Literal["run", "uniform", "poses"]
    """rollouts of a run's checkpoints; a classic task's state space; the pose library"""
    out: Path
    """the file, such as data/kneeling.npz; results on it will go to the folder data/kneeling"""
    render: Look = field(default_factory=Look)
    run: Path | None = None
    """--source run: the run's folder"""
    script: Path | None = None
    """--source run: the changed copy of a script that made the run"""
    checkpoints: tuple[str, ...] = ("all",)
    """--source run: "all", or some of "best" and numbers of steps"""
    episodes: Few = 5
    """--source run: episodes of each checkpoint"""
    every: PositiveInt = 1
    """--source run: keep every `every`-th step"""
    explore: bool = False
    """--source run: sample SAC's actions as in training, instead of the mean action"""
    env_id: Literal["CartPole-v1", "MountainCar-v0", "MountainCarContinuous-v0"] = "CartPole-v1"
    """--source uniform: the task"""
    states: Many = 1000
    """--source uniform: how many states"""
    per_pose: Few = 40
    """--source poses: samples of each pose"""
    seed: NonNegativeInt = 0
    """seed of all that is random"""

    def __call__(self):
        made = {name: x for name, x in vars(self).items() if name not in ("out", "render")}
        if self.out.suffix != ".npz" or self.out.exists():
            raise UsageError(f"--out {self.out} exists already or is no .npz; choose another name")
        if self.source == "run":
            if self.run is None:
                raise UsageError("--source run needs --run RUN_DIR")
            args = runs.load_run(self.run, self.script)
            if self.every > args.episode_length:
                raise UsageError(f"--every {self.every}: episodes have {args.episode_length} steps")
            args.render = self.render.over(args.render)
            how = self.episodes, self.seed, 2, self.explore, self.every, made
            paths = runs.checkpoint_paths(self.run, self.checkpoints)
            dataset = runs.dataset_of_run(args, paths, *how)
        else:
            if self.source == "poses":
                from tiny_clip.data import pose_columns

                env_id, columns = "Humanoid-v5", pose_columns(self.per_pose, self.seed)
            else:
                env_id = self.env_id
                columns = datasets.uniform_columns(env_id, self.states, self.seed)
            args = args_of(env_id)
            args.render = self.render.over(args.render)
            dataset = runs.make_dataset(args, columns, made)
        datasets.save_dataset(dataset, self.out)
        print(f"{self.out}: {len(dataset)} states")
        print(f"python eval_epic.py sheet --dataset {self.out}")


def args_of(env_id):
    """Return the Args of the script that has this task."""
    return (dqn if env_id in dqn.TASKS else sac).Args(env_id=env_id)


@dataclass
class OfDataset:
    """What the commands on a dataset have in common."""

    dataset: Path
    """a file made by collect"""
    judge: str | None = None
    """a task's name or FILE.py:FUNCTION (states [B, S] -> [B] bool); default: what the dataset is
    about"""
    script: Path | None = None
    """the changed copy of a script that the dataset was made with"""

    def load(self):
        """Return the dataset and its judges.Task."""
        data = datasets.load_dataset(self.dataset)
        return data, runs.task_of(self.judge, data.flags, data.path)


@dataclass
class Epic(OfDataset):
    """EPIC distance of reward models to labels: table, CSV and figures in a new folder
    epic_LABELS beside the dataset."""

    reward: Rewards = field(default_factory=Rewards)
    labels: str = "judge"
    """what a good reward would be: judge (1 where the task is done, else 0), env (the environment's
    own reward), or a CSV file of a person's labels"""

    def __call__(self):
        if self.labels == "env":  # nobody has to judge
            data = datasets.load_dataset(self.dataset)
            task = judges.task_for(data.flags["env_id"], data.flags["target_prompt"])
        else:
            data, task = self.load()
        compare.epic(data, task, self.labels, self.reward, runs.renderer_of(data, self.script))


@dataclass
class Prompts:
    """Which prompt, which alpha, which camera? AUC and EPIC distance of every combination on
    labelled states: table, figure, contact sheet, and the command to train with the best."""

    model: Model = field(default_factory=Model)
    render: Look = field(default_factory=Look)
    task: Literal[tuple(judges.TASKS)] | None = None
    """one of the paper's tasks"""
    prompts: tuple[str, ...] = ()
    """what to compare; default: the paper's and some paraphrases, or a dataset's"""
    alphas: tuple[Alpha, ...] = (0.0, 0.5, 1.0)
    """strengths of goal-baseline regularisation. Cameras are compared, too: each --camera-azimuth
    alone, every two, and all together (default: 180 120 240 for the humanoid, or a dataset's)"""
    dataset: Path | None = None
    """states, by collect, of any task; default: the pose library and states in which policies were
    paid for half of a pose (a classic task: its state space)"""
    judge: str | None = None
    """of a dataset: FILE.py:FUNCTION (states [B, S] -> [B] bool)"""
    labels: str = "judge"
    """which states are good: judge, or a CSV file of a person's labels"""
    per_pose: Few = 40
    """samples of each pose"""
    script: Path | None = None
    """the changed copy of a script that the dataset was made with"""
    out: Path = Path("runs/prompts")
    """the results go to a new folder, OUT_TASK"""

    def __call__(self):
        azimuths = self.render.camera_azimuth
        if self.dataset:
            data = datasets.load_dataset(self.dataset)
            if self.render != Look(camera_azimuth=azimuths):
                raise UsageError(f"--dataset {self.dataset} is drawn as it was collected")
            task = runs.task_of(self.judge or self.task, data.flags, data.path)
        elif self.task and not self.judge:
            task = judges.TASKS[self.task]
            args = args_of(task.env_ids[0])
            if task.name in judges.HUMANOID:
                from tiny_clip.data import facing_columns

                columns, azimuths = facing_columns(self.per_pose), azimuths or (180.0, 120.0, 240.0)
            else:
                columns = datasets.uniform_columns(args.env_id, 15 * self.per_pose, seed=0)
            args.render = self.render.over(args.render)
            data = runs.make_dataset(args, columns, {"source": "prompts"})
        else:
            raise UsageError("say which --task of the paper, or a --dataset with its --judge")
        if data.flags["env_id"] in classic.CLASSIC_STATE_SIZES and azimuths:
            raise UsageError(f"--camera-azimuth: {data.flags['env_id']} has no camera")
        data.flags["camera_azimuth"] = azimuths or data.flags["camera_azimuth"]
        asked = self.prompts, self.alphas, self.labels
        compare.prompts(data, task, *asked, self.model, self.out, self.script)


@dataclass
class Sheet(OfDataset):
    """Pictures of a dataset, and of states that judges accept (green frames) and reject (red), in a
    new folder sheets beside it. Default: all tasks of its environment."""

    count: NonNegativeInt = 20
    """accepted states, and as many rejected ones"""

    def __call__(self):
        data, rng = datasets.load_dataset(self.dataset), np.random.default_rng(0)
        env_id = data.flags["env_id"]
        tasks = [self.load()[1]] if self.judge else judges.tasks_of(env_id)
        rows = np.linspace(0, len(data) - 1, min(len(data), 100)).astype(int)
        sheets = {"states": (rows, [None] * len(data))}
        for task in tasks:
            verdict = task.judge(data.states)
            both = [rng.permutation(np.flatnonzero(verdict == which)) for which in (True, False)]
            sheets[task.name] = np.concatenate([rows[: self.count] for rows in both]), verdict
            print(f"{task.name}: {verdict.sum()} of {len(verdict)} accepted. {task.criterion}")
        out, scorer = (
            datasets.results_folder(data.folder / "sheets"),
            runs.pictures(data, self.script),
        )
        for name, (rows, verdict) in sheets.items():
            words = [f"{row} {data.pose[row] or data.step[row]}"[:16] for row in rows]
            frames = scorer.render(data.states[rows], 120)
            cells = map(figures.framed, frames, words, (verdict[row] for row in rows))
            figures.write_sheet(out / f"{name}.png", list(cells))
        scorer.close()
        print(f"wrote {out}")


@dataclass
class Success:
    """Success rate of a policy by judge or by a person's labels, with a video of the verdicts, in a
    new folder success_.. in the run or beside the dataset."""

    run: Path | None = None
    """folder of the run to judge"""
    checkpoint: str = "best"
    """best (highest training reward, as in the paper), or a number of steps"""
    compare: Path | None = None
    """folder of another run, such as one with --reward ground-truth, for side by side"""
    episodes: Few = 100
    """episodes, without exploration, from starts that training never had"""
    judge: str | None = None
    """a task's name or FILE.py:FUNCTION (states [B, S] -> [B] bool); default: the run's own, or the
    task of its prompt or environment"""
    script: Path | None = None
    """the changed copy of a script that made the run or dataset"""
    dataset: Path | None = None
    """judge the episodes of this dataset instead of new ones"""
    human: Path | None = None
    """with --dataset: a CSV file of a person's labels in place of the judge"""
    videos: NonNegativeInt = 16
    """episodes in the video, seen by the run's first camera; the first ten are in the contact
    sheet. 0: neither"""

    def __call__(self):
        if (self.run is None) == (self.dataset is None):
            raise UsageError("success needs either --run RUN_DIR or --dataset FILE.npz")
        if (self.human and not self.dataset) or (self.compare and not self.run):
            raise UsageError("--human goes with --dataset, and --compare with --run")
        if self.run:
            task, out, played = judging.play(self)
        else:
            data = datasets.load_dataset(self.dataset)
            task = runs.task_of(self.judge, data.flags, data.path)
            played = {data.path.stem: data}
            out = datasets.results_folder(
                data.folder / f"success_{Path(self.human or 'judge').stem}"
            )
        labels, videos = str(self.human or "judge"), self.videos * bool(self.run)
        judging.success(task, out, played, labels, videos, self.script)
        if self.run:
            write_page(self.run)


@dataclass
class Page:
    """Write a run's index.html: curves, newest videos, flags, and what to type next."""

    run: Path
    """folder of the run"""

    def __call__(self):
        write_page(self.run)
        print(f"wrote {self.run}/index.html")


@dataclass
class Landscape:
    """Reward against pole angle and car position, plain and textured, one line per alpha."""

    reward: Rewards = field(default_factory=Rewards)
    points: Many = 361
    """states on each line"""
    render_size: Annotated[int, Interval(ge=16, le=8192)] = 480
    """height and width of the frames in pixels"""
    out: Path = Path("runs/landscape.png")
    """the picture; a table of all values is written beside it as CSV"""

    def __call__(self):
        compare.landscape(self.reward, self.points, self.render_size, self.out)


@dataclass
class Label:
    """Label a dataset by hand on a local web page, until Ctrl-C."""

    dataset: tyro.conf.Positional[Path]
    """a file made by collect"""
    judge: str | None = None
    """the task to label, by name or FILE.py:FUNCTION; default: what the dataset is about"""
    script: Path | None = None
    """the changed copy of a script that the dataset was made with"""
    unit: Literal["frame", "episode"] = "frame"
    """what one answer is about: a picture, or a whole episode as a clip"""
    labels: Path | None = None
    """the file of answers; default: labels.csv in the folder beside the dataset"""
    count: PositiveInt | None = None
    """how many to label, in random order: a fair sample at any time; default: all"""
    port: Annotated[int | None, Interval(ge=1, lt=2**16)] = None
    """port on 127.0.0.1; default: a free one"""

    def __call__(self):
        data = datasets.load_dataset(self.dataset)
        task = runs.task_of(self.judge, data.flags, data.path)
        path = self.labels or data.folder / "labels.csv"
        path.parent.mkdir(parents=True, exist_ok=True)
        session = label_page.Session(data, task, self.unit, path, self.count)
        done = f"{len(session.answers)} of {len(session.order)} are done"
        print(f"labelling {self.unit}s of {self.dataset} for {task.name}: {done}", flush=True)
        label_page.serve(session, functools.partial(runs.pictures, data, self.script), self.port)


COMMANDS = Landscape, Prompts, Collect, Epic, Sheet, Success, Label, Page


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        command = tyro.extras.subcommand_cli_from_dict(
            {command.__name__.lower(): command for command in COMMANDS},
            description=__doc__,
            config=(tyro.conf.OmitArgPrefixes,),
        )
        command()
        sys.stdout and sys.stdout.flush()
    except BrokenPipeError:  # nobody reads any more: `| head -1`
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.exit(141)
    except (UsageError, OSError) as error:  # of a file: its name and what is wrong with it
        print(f"error: {error}", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.exit(2)
    except clip_reward.RunError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        sys.exit(130)
