r"""Measure how good a reward is before training, and how good a policy is after it.

    python eval_epic.py landscape --clip-model RN50/openai ViT-bigG-14/laion2b_s39b_b160k
    python eval_epic.py prompts --task kneeling --clip-model ViT-L-14/openai

Collect states from a run's checkpoints, a classic task's state space, or the pose library:

    python eval_epic.py collect --source run --run runs/RUN --episodes 5 --out data/kneeling.npz
    python eval_epic.py collect --source uniform --env-id CartPole-v1 --out data/cartpole.npz
    python eval_epic.py collect --source poses --render-size 96 --out data/poses.npz

Compute the EPIC distance (arXiv 2006.13900) of reward models to labels, draw the states that a
judge accepts and rejects, and label by key press. The results go to data/kneeling/:

    python eval_epic.py epic --dataset data/kneeling.npz --judge kneeling \
        --clip-model RN50/openai ViT-L-14/openai ViT-bigG-14/laion2b_s39b_b160k
    python eval_epic.py sheet --dataset data/poses.npz
    python eval_epic.py label data/kneeling.npz
    python eval_epic.py label data/kneeling.npz --by Qwen/Qwen3-VL-8B-Instruct --url http://localhost:8000/v1
    python eval_epic.py epic --dataset data/kneeling.npz --labels data/kneeling/labels.csv

Fit a reward to these labels, for training with --reward-head, and find out what to label next:

    python eval_epic.py fit --dataset data/kneeling.npz --out data/head.safetensors
    python eval_epic.py label data/more.npz --uncertain data/head.safetensors

Compute a success rate with a task's judge, with your own, or with labels; write a run's index.html:

    python eval_epic.py success --run runs/RUN --compare runs/GROUND_TRUTH_RUN
    python eval_epic.py success --run runs/RUN --judge my_task.py:somersault
    python eval_epic.py success --dataset data/kneeling.npz --labels data/kneeling/labels.csv
    python eval_epic.py page --run runs/RUN
"""

import shlex
import signal
import sys
from dataclasses import field, replace
from pathlib import Path
from typing import Annotated, Literal

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C during the imports prints no traceback

import clip_reward  # before torch: it bounds how long threads spin

# isort: split
import tyro
from annotated_types import Interval
from pydantic import AfterValidator, NonNegativeInt, PositiveInt, StringConstraints
from pydantic.dataclasses import dataclass

import dqn_clip_classic as dqn
import egl_render
import sac_clip_humanoid as sac
from clip_reward import UsageError
from environments import classic, judges
from evaluation import compare, datasets, fit, judging, label_page, vlm
from evaluation.page import write_page
from evaluation.rewards import HeadModel, Rewards
from evaluation.rewards import Prompts as PromptRewards
from evaluation.runs import Own, checkpoint_paths, load_run, task_of
from training.run import cut, run_folder, say

RunFolder = Annotated[Path, AfterValidator(run_folder)]
Few = Annotated[int, Interval(ge=1, le=100_000)]  # episodes are played side by side
Many = Annotated[int, Interval(ge=1, le=10_000_000)]

egl_render.setup_gl()  # before an environment or a judge imports mujoco


@dataclass
class Pictures(egl_render.RenderArgs):
    """How states are drawn. The defaults are the run's flags, or else the script's."""

    textured: bool | None = None

    def apply(self, args):
        """Copy the flags that are given here to a script's Args."""
        vars(args).update({k: v for k, v in vars(self).items() if v not in (None, ())})


def args_of(env_id):
    """Return the Args of the script that learns this task."""
    return (dqn if env_id in classic.DISCRETE else sac).Args(env_id=env_id)


@dataclass(kw_only=True)
class Collect(Own):
    """Write a dataset (states and the facts known about them) to one .npz file."""

    source: Literal["run", "uniform", "poses"]
    """where states come from: rollouts of a run's checkpoints; a classic task's state space; the
    pose library"""
    out: Path
    """the file, such as data/kneeling.npz; results on it will go to the folder data/kneeling"""
    render: Pictures = field(default_factory=Pictures)
    run: RunFolder | None = None
    """--source run: the run's folder, a folder with one run in it, or latest"""
    checkpoints: tuple[str, ...] = ("all",)
    """--source run: any of "all" (steps), "best" and step numbers"""
    episodes: Few = 5
    """--source run: episodes per checkpoint"""
    every: PositiveInt = 1
    """--source run: keep every `every`-th step"""
    explore: bool = False
    """--source run: SAC's actions with the noise of training, instead of the mean action"""
    env_id: str | None = None
    """--source uniform: the task (default: CartPole-v1); --source run: MODULE:NAME, if the run's
    task is in a module of yours"""
    states: Many = 1000
    """--source uniform: how many states"""
    per_pose: Few = 40
    """--source poses: samples of each pose"""
    seed: NonNegativeInt = 0
    """seed of all random numbers"""

    def __call__(self):
        made = {name: x for name, x in vars(self).items() if name not in ("out", "render")}
        if self.out.suffix != ".npz" or self.out.exists():
            raise UsageError(f"--out {self.out} exists already or is not .npz; choose another name")
        if self.source == "run":
            if self.run is None:
                raise UsageError("--source run needs --run RUN_DIR")
            args = load_run(self.run, self)
            if self.every > args.episode_length:
                raise UsageError(f"--every {self.every}: episodes have {args.episode_length} steps")
            paths, how = checkpoint_paths(self.run, self.checkpoints), (self.explore, self.every)
            data = datasets.play(args, paths, self.episodes, (self.seed, 2), *how, made)
        elif self.source == "uniform":
            args = args_of(self.env_id or "CartPole-v1")
            columns = datasets.uniform_columns(args.env_id, self.states, self.seed)
            data = datasets.Dataset(args, made, **columns)
        else:
            from tiny_clip.data import pose_columns

            columns = pose_columns(self.per_pose, self.seed)
            data = datasets.Dataset(args_of("Humanoid-v5"), made, **columns)
        self.render.apply(data.args)
        datasets.save_dataset(data, self.out)
        say(f"{self.out}: {len(data)} states", "look at them, or label them:")
        say(f"    python eval_epic.py sheet --dataset {self.out}")
        say(f"    python eval_epic.py label {self.out}")


@dataclass(kw_only=True)
class OnDataset(Own):
    """Flags that all commands on a dataset share."""

    dataset: Path
    """a file made by collect"""
    judge: str | None = None
    """a task's name or FILE.py:FUNCTION (states [B, S] -> [B] bool); default: the task of the
    dataset or run"""
    labels: str = "judge"
    """what decides which states are good: judge, or a CSV file of labels"""

    def load(self, judged=True):
        """Return the dataset and its judges.Task (may be None if nothing is judged)."""
        data = datasets.load_dataset(self.dataset, self)
        if judged:
            return data, task_of(self.judge, data.args, data.path)
        return data, judges.task_for(data.args.env_id, data.args.target_prompt)


@dataclass
class Epic(OnDataset):
    """Compute the EPIC distance of reward models to labels (--labels env: to the environment's own
    reward). A table, a CSV file and figures are written to a new folder, epic_LABELS, beside the
    dataset."""

    reward: Rewards = field(default_factory=Rewards)

    def __call__(self):
        compare.epic(*self.load(self.labels != "env"), self.labels, self.reward)


@dataclass
class Prompts(OnDataset):
    """Find the best prompt, alpha and cameras: print the AUC and the EPIC distance of every
    combination on labelled states, and the command that trains with the best one. The values of
    --camera-azimuth are tried alone, in pairs, and all together (default: 180 120 240 for the
    humanoid, or the dataset's)."""

    dataset: Path | None = None
    """a file made by collect"""
    task: Literal[tuple(judges.TASKS)] | None = None
    """one of the paper's tasks. Without --dataset the prompts are tried on ready-made states:
    sampled poses and states of policies that learned half of a pose, or the state space of a
    classic task"""
    per_pose: Few = 40
    """samples of each pose, without --dataset"""
    reward: PromptRewards = field(default_factory=PromptRewards)
    render: Pictures = field(default_factory=Pictures)
    out: Path = Path("runs/prompts")
    """the results are written to a new folder, OUT_TASK"""

    def __call__(self):
        if self.dataset:
            self.judge = self.judge or self.task
            data, task = self.load()
        elif self.task and not self.judge:
            task = judges.TASKS[self.task]
            args = args_of(task.env_ids[0])
            if task.name in judges.HUMANOID:
                from tiny_clip.data import facing_columns

                columns = facing_columns(self.per_pose)
            else:
                columns = datasets.uniform_columns(args.env_id, 15 * self.per_pose, seed=0)
            data = datasets.Dataset(args, {"source": "prompts"}, **columns)
        else:
            raise UsageError("name a --task of the paper, or a --dataset with its --judge")
        self.render.apply(data.args)
        if data.args.env_id in classic.CLASSIC_STATE_SIZES and data.args.camera_azimuth:
            raise UsageError(f"--camera-azimuth: {data.args.env_id} has no camera")
        compare.prompts(data, task, self.labels, self.reward, self.out, self.judge)


@dataclass
class Sheet(OnDataset):
    """Draw a dataset's states into a new folder, sheets, beside it. For every task of the
    environment, or for --judge or --labels, a further sheet shows good states (green frames) and
    others (red frames)."""

    def __call__(self):
        one = self.judge is not None or self.labels != "judge"
        data, task = self.load(one)
        tasks = [task] if one else judges.tasks_of(data.args.env_id)
        judging.sheets(data, tasks, self.labels)


@dataclass
class Success(OnDataset):
    """Compute the success rate of a policy with a judge, or of a dataset's episodes with a judge or
    labels. The result is written to a new folder, success_.., in the run (with a video of the
    verdicts) or beside the dataset. Without a judge, info["success"] of the last step decides."""

    dataset: Path | None = None
    """a file made by collect"""
    run: RunFolder | None = None
    """folder of the run to judge, a folder with one run in it, or latest"""
    checkpoint: str = "best"
    """best (highest training reward, as in the paper), or a number of steps"""
    compare: RunFolder | None = None
    """folder of another run to compare with, such as one with --reward ground-truth"""
    episodes: Few = 100
    """episodes to play, without exploration, from starts that training never saw"""
    videos: NonNegativeInt = 16
    """episodes in the video, seen by the run's first camera; the first ten are in the contact
    sheet (0: no video and no contact sheet)"""

    def __call__(self):
        if (self.run is None) == (self.dataset is None):
            raise UsageError("success needs either --run RUN_DIR or --dataset FILE.npz")
        if self.dataset and self.compare or self.run and self.labels != "judge":
            raise UsageError("--labels goes with --dataset, and --compare with --run")
        if self.dataset:
            data, task = self.load()
            out = data.folder / f"success_{Path(self.labels).stem}"
            judging.success(task, out, {data.path.stem: data}, self.labels, videos=0)
        else:
            chosen = [(self.run, self.checkpoint)]
            if self.compare:
                chosen.append((self.compare, "best"))
            task, out, played = judging.play_runs(chosen, self.episodes, self.judge, self)
            judging.success(task, out, played, "judge", self.videos)
            say(f"all of the run on one page: {write_page(self.run)}")


@dataclass
class Page:
    """Write a run's index.html, with the curves, newest videos, flags, and what to type next."""

    run: RunFolder
    """folder of the run, a folder with one run in it, or latest"""

    def __call__(self):
        say(f"wrote {write_page(self.run)}")


@dataclass
class Landscape:
    """Draw the reward against the pole's angle and the car's position, plain and textured, with one
    line per alpha (figure 2 of arXiv 2310.12921)."""

    reward: Rewards = field(default_factory=Rewards)
    render_size: Annotated[int | None, Interval(ge=16, le=8192)] = None
    """height and width of the frames in pixels (default: 480, for tiny_clip 64)"""
    out: Path = Path("runs/landscape.png")
    """the picture"""

    def __call__(self):
        compare.landscape(self.reward, self.render_size, self.out)


@dataclass
class Label(OnDataset):
    """Label a dataset by hand on a local web page, until Ctrl-C, or let a model do it (--by)."""

    dataset: tyro.conf.Positional[Path]
    """a file made by collect"""
    labels: str | None = None
    """the file of answers; default: labels.csv in the folder beside the dataset"""
    unit: Literal["frame", "episode"] = "frame"
    """what one answer is about: a picture, or a whole episode as a clip"""
    count: PositiveInt | None = None
    """how many to label (default: all). Their order is random, so you can stop at any time and
    still have an unbiased sample"""
    uncertain: Path | None = None
    """a head written by `fit`: ask first about the frames that it is least sure of"""
    likely: str | None = None
    """a model, such as tiny_clip: ask first about the frames that it scores highest with the task's
    prompt, because the pose is rare in the dataset"""
    seed: NonNegativeInt = 0
    """seed of the random order"""
    port: Annotated[int, Interval(ge=0, le=65535)] = 0
    """port of the page on 127.0.0.1; 0: a free one"""
    by: str | None = None
    """the name of a vision-language model that answers instead of you. If its server needs a key,
    the key is read from OPENAI_API_KEY"""
    url: Annotated[str, StringConstraints(pattern="^https?://[^/]")] | None = None
    """the server of --by, such as http://localhost:8000/v1; default: OpenAI's"""
    question: str | None = None
    """what to ask instead of the judge's criterion"""
    check: PositiveInt | None = None
    """save no labels: let --by answer about this many frames, and compare its answers with a
    person's labels in the file, or else with the judge's"""

    def session(self):
        """Return the label_page.Session."""
        if (self.uncertain or self.likely) and self.unit == "episode":
            raise UsageError("--uncertain and --likely need --unit frame")
        if self.by and self.unit == "episode":
            raise UsageError("--by is about frames; leave out --unit episode")
        if not self.by and (self.url or self.check):
            raise UsageError("--url and --check need --by MODEL")
        data, task = self.load()
        task = replace(task, criterion=self.question or task.criterion)
        order = None
        if self.uncertain:
            order = fit.least_sure(self.uncertain, data)
        elif self.likely:
            order = fit.most_likely(self.likely, data, task)
        path = Path(self.labels or data.folder / "labels.csv")
        session = label_page.Session(data, task, self.unit, path, self.count, order, self.seed)
        session.by = self.by or ""
        return session

    def __call__(self):
        session = self.session()
        if self.check:
            vlm.check(session, self.by, self.url, self.check)
        elif self.by:
            vlm.ask(session, session.todo(), self.by, self.url, session.answer)
            say(f"{len(session.order) - len(session.todo())} labels are in {session.path}")
        else:
            label_page.serve(session, self.port)
        if not self.check:
            flags = {"--dataset": self.dataset, "--judge": self.judge, "--labels": self.labels}
            flags |= {"--out": self.dataset.with_suffix(".safetensors")}
            words = [str(word) for flag in flags.items() if flag[1] for word in flag]
            say(f"learn a reward from these labels: python eval_epic.py fit {shlex.join(words)}")


@dataclass(kw_only=True)
class Fit(Own):
    """Fit a reward head to labels, for --reward-head: logistic regression on the embeddings of a
    frozen model."""

    dataset: tuple[Path, ...]
    """files made by collect, of one task and with the same cameras"""
    out: Path
    """the head's file, such as data/head.safetensors; the worst errors are drawn beside it"""
    labels: str | None = None
    """what decides which states are good: judge, or a CSV file of labels; default: labels.csv
    in the folder beside each dataset"""
    judge: str | None = None
    """a task's name or FILE.py:FUNCTION (states [B, S] -> [B] bool), which the labels are about;
    default: the task of the dataset or run"""
    reward: HeadModel = field(default_factory=HeadModel)
    render: Pictures = field(default_factory=Pictures)

    def __call__(self):
        parts = []
        for path in self.dataset:
            data = datasets.load_dataset(path, self)
            task = task_of(self.judge, data.args, path)
            self.render.apply(data.args)
            parts.append((data, task, self.labels or str(data.folder / "labels.csv")))
        self.reward.clip_model = self.reward.clip_model or parts[0][0].args.clip_model
        fit.fit(parts, self.reward, self.out, self.judge)


COMMANDS = Landscape, Prompts, Collect, Epic, Sheet, Success, Label, Fit, Page


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        command = tyro.extras.subcommand_cli_from_dict(
            {command.__name__.lower(): command for command in COMMANDS},
            description=__doc__,
            config=(tyro.conf.OmitArgPrefixes,),
        )
        command()
    except BrokenPipeError:  # the reader of the help has gone: `| head -1`
        pass
    except (UsageError, OSError) as error:  # an OSError names the file and its problem
        print(f"error: {cut(error)}", file=sys.stderr)
        sys.exit(2)
    except clip_reward.RunError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        say(end="")  # flushes, without an error if stdout is closed
