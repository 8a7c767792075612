r"""How good is the reward, how good is the policy? Look before you train, and after.

Reward against pole angle and car position, one line per alpha (figure 2 of arXiv 2310.12921):

    python eval_epic.py landscape --clip-model RN50/openai ViT-bigG-14/laion2b_s39b_b160k

States as one file: of a run's checkpoints, of a classic task's state space, of the pose library:

    python eval_epic.py collect --source run --run runs/RUN --episodes 5 --out data/kneeling.npz
    python eval_epic.py collect --source uniform --env-id CartPole-v1 --out data/cartpole.npz
    python eval_epic.py collect --source poses --render-size 96 --out data/poses.npz

EPIC distance (arXiv 2006.13900) of reward models to labels, and pictures of what a judge accepts
and rejects; results go to the folder data/kneeling/:

    python eval_epic.py epic --dataset data/kneeling.npz --judge kneeling \
        --clip-model RN50/openai ViT-L-14/openai ViT-bigG-14/laion2b_s39b_b160k
    python eval_epic.py sheet --dataset data/poses.npz

A page on which a person labels a dataset by key presses (pip install .[label]):

    python eval_epic.py label data/kneeling.npz
    python eval_epic.py epic --dataset data/kneeling.npz --labels data/kneeling/labels.csv

Success rate of a policy, by a task's judge, one's own, or a person:

    python eval_epic.py success --run runs/RUN --compare runs/GROUND_TRUTH_RUN
    python eval_epic.py success --run runs/RUN --judge my_task.py:somersault
    python eval_epic.py success --dataset data/kneeling.npz --human data/kneeling/labels.csv
"""

from __future__ import annotations

import functools
import importlib
import itertools
import json
import shlex
import signal
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C while the next lines import: no traceback

import clip_reward  # before torch: it bounds how long threads spin

# isort: split
import numpy as np
import torch
import tyro
from annotated_types import Interval
from tqdm import tqdm

import dqn_clip_classic as dqn
import egl_render
import sac_clip_humanoid as sac
from egl_render import Count, Positive, Size, UsageError
from environments import vector
from evaluation import datasets, figures, judges, label_page
from evaluation.datasets import Dataset, load_dataset
from evaluation.metrics import auc, epic_distance, epic_interval, interval, pearson
from evaluation.rewards import Model, Rewards, Variants, check_distinct, rewards_of, scored
from training.flags import (
    checkpoints,
    errors_in_one_line,
    flags_of,
    from_flags,
    load_args,
    saved_flags,
    typed,
)
from training.page import make_page
from training.run import load_checkpoint, write

Few = Annotated[int, Interval(ge=1, le=100_000)]  # episodes are played side by side
Many = Annotated[int, Interval(ge=1, le=10_000_000)]

egl_render.setup_gl()  # before an environment or a judge imports mujoco

# ------------------------------------------------------------------------------ runs and rollouts


def load_run(folder):
    """The Args of a run, of whichever script. Raises UsageError for what is no run's folder."""
    flags = saved_flags(folder)
    older = sac if "policy_lr" in flags else dqn  # than the script's name in there
    args = load_args(folder, script_named(flags.get("script", older.__file__)).Args)
    if hasattr(args, "terminate"):
        args.terminate = False  # whatever it learned by, it is judged on whole episodes
    return args


def script_named(name):
    """The script that a run or a dataset is of: one of the two, or a changed copy, by its path.
    Raises UsageError if the copy is not there."""
    path = Path(name)
    if path.stem not in sys.modules:
        sys.path.append(str(path.resolve().parent))  # where workers look for it, too
        try:
            importlib.import_module(path.stem)
        except ImportError as error:
            raise UsageError(f"the script of this run cannot be imported: {error}") from error
    return sys.modules[path.stem]


def script_of(args):
    """The script whose Args these are."""
    return sys.modules[type(args).__module__]


def is_dqn(script):
    return hasattr(script, "QNetwork")


def checkpoint_paths(run, names) -> list[Path]:
    """Files of checkpoints: "best", a number of steps, or "all" of these. Raises UsageError."""
    folder = Path(run) / "checkpoints"
    steps = sorted(checkpoints(run))
    names = steps if list(names) == ["all"] else names
    paths = [folder / ("best.pt" if name == "best" else f"step_{name}.pt") for name in names]
    for path in paths or [folder]:
        if not path.is_file():
            there = ", ".join(map(str, steps)) or "none"
            raise UsageError(f"{run}: no {path.name}; best or one of these steps: {there}")
    return paths


def load_policy(path, args, observation_space, action_space):
    """(network, the step at which the checkpoint was made). Raises UsageError if it is damaged or
    not of this run's script."""
    script = script_of(args)
    kind, key = (script.QNetwork, "q_network") if is_dqn(script) else (script.Actor, "actor")
    try:
        saved = load_checkpoint(path)
        network = kind(observation_space.shape[0], action_space, args)
        network.load_state_dict(saved[key])
        return network, int(saved["global_step"])
    except (KeyError, RuntimeError) as error:  # other tensors
        raise UsageError(f"{path} is not a checkpoint of this run: {error!r:.120}") from error


@torch.no_grad()
def rollout(args, path, seeds, explore=False):
    """Play whole episodes of the run with these `args` side by side, one per seed, by the best
    actions of the checkpoint at `path`, or with `explore` (SAC) by samples -> columns of a Dataset,
    episode after episode. Raises UsageError for a damaged checkpoint or a task without states."""
    seeds = [int(seed) for seed in seeds]
    envs = vector.in_this_process(script_of(args).make_env(args), len(seeds))
    spaces = envs.single_observation_space, envs.single_action_space
    network, checkpoint_step = load_policy(path, args, *spaces)
    observations, _ = envs.reset(seed=seeds)
    torch.manual_seed(seeds[0])
    steps = []
    for _ in tqdm(range(args.episode_length), f"{len(seeds)} episodes", disable=None):
        if explore:
            sample, _ = network.sample(torch.as_tensor(observations, dtype=torch.float32))
            actions = network.to_env(sample)
        else:
            actions = network.best_actions(observations)
        observations, rewards, _, _, infos = envs.step(actions)
        if "states" not in infos:
            raise UsageError(f"{args.env_id} has no states to draw pictures from")
        steps.append((infos["states"].astype(np.float64), rewards))
    envs.close()
    states, env_reward = (np.concatenate(np.stack(column, 1)) for column in zip(*steps))
    episode, step = (index.ravel() for index in np.indices((len(seeds), len(steps))))
    success = infos.get("success", np.full(len(seeds), -1)).astype(int)[episode]
    columns = {"states": states, "env_reward": env_reward, "episode": episode, "step": step}
    return columns | {"success": success, "checkpoint_step": np.full(len(step), checkpoint_step)}


def dataset_of_run(args, paths, episodes, seed, explore=False, every=1, made=()):
    """Dataset of so many episodes of each checkpoint in `paths`, of them every so manyth step;
    `made` is what else to say of where it is from."""
    parts = []
    for k, path in enumerate(paths):
        seeds = np.random.SeedSequence((*seed, k)).generate_state(episodes)
        parts.append(rollout(args, path, seeds, explore))
        parts[k]["episode"] += k * episodes
    kept = parts[0]["step"] % every == every - 1
    columns = {name: np.concatenate([part[name][kept] for part in parts]) for name in parts[0]}
    return make_dataset(args, columns, {"source": "run"} | dict(made))


def make_dataset(args, columns, made):
    """Dataset of states that are drawn as with the Args of a script."""
    script = script_of(args)
    name = script.__name__ if script in (sac, dqn) else script.__file__
    made = made | {"script": name, "flags": flags_of(args)}
    return Dataset(json.loads(json.dumps(made, default=str)), **columns)


def renderer_of(dataset, cameras=None):
    """make_renderer of the run that a dataset is from, or of the arguments it was made with; of
    several cameras the first ones, or all."""
    script = script_named(dataset.arguments["script"])
    args = from_flags(script.Args, dataset.flags)
    args.render.camera_azimuth = args.render.camera_azimuth[:cameras]
    return functools.partial(script.make_renderer, args)


def pictures(dataset, cameras=None):
    """A pool of which only `render` is used: it draws in a thread of its own, for any thread."""
    return clip_reward.RewardPool(renderer_of(dataset, cameras), None, devices=[])


def task_of(spec, flags):
    """judges.Task by name or FILE.py:FUNCTION, or else what flags of a run are about."""
    return judges.find_task(spec or flags["judge"], flags["env_id"], flags["target_prompt"])


def task_of_dataset(spec, data):
    """As `task_of`, but no code that only the dataset names is run: it may be from anywhere."""
    own = data.flags["judge"]
    if not spec and own and ":" in own:
        raise UsageError(f"{data.path}: its judge is code, {own}; to run it say --judge {own}")
    return task_of(spec, data.flags)


def results_folder(path):
    """A new folder: `path`, or where that exists already `path`_2, _3, .."""
    folder, number = path, 1
    while folder.exists():
        number += 1
        folder = path.with_name(f"{path.name}_{number}")
    folder.mkdir(parents=True)
    return folder


@dataclass
class Look(egl_render.RenderArgs):
    """How its pictures are drawn. What is not given is as the run had it (or as for training)."""

    render_size: Annotated[int | None, Interval(ge=16, le=8192)] = None
    render_quality: Literal["auto", "full", "light"] | None = None
    textured: bool | None = None
    camera: Literal["paper", "default"] | None = None
    camera_track: bool | None = None

    def over(self, render):
        """Those RenderArgs with what is given here."""
        given = {name: value for name, value in vars(self).items() if value not in (None, ())}
        return replace(render, **given)


def collect(
    source: Literal["run", "uniform", "poses"],
    out: Path,
    render: Look,
    run: Path | None = None,
    checkpoints: tuple[str, ...] = ("all",),
    episodes: Few = 5,
    every: Positive = 1,
    explore: bool = False,
    env_id: Literal["CartPole-v1", "MountainCar-v0", "MountainCarContinuous-v0"] = "CartPole-v1",
    states: Many = 1000,
    per_pose: Few = 40,
    seed: Count = 0,
) -> None:
    """States, and what is known of them, as a dataset: one .npz file.

    Args:
        source: rollouts of a run's checkpoints; a classic task's state space; the pose library
        out: the file, as in data/kneeling.npz; results on it will go to the folder data/kneeling
        render: how its pictures are drawn
        run: --source run: the run's folder
        checkpoints: --source run: "all", or some of "best" and numbers of steps
        episodes: --source run: episodes of each checkpoint
        every: --source run: keep every so manyth step of an episode
        explore: --source run: sample SAC's actions as in training, instead of the mean action
        env_id: --source uniform: the task
        states: --source uniform: how many states
        per_pose: --source poses: samples of each pose
        seed: seed of all that is random
    """
    made = {name: value for name, value in locals().items() if name not in ("out", "render")}
    if out.suffix != ".npz" or out.exists():
        raise UsageError(f"--out {out} exists already or is no .npz; choose another name")
    if source == "run" and run is None:
        raise UsageError("--source run needs --run RUN_DIR")
    if source == "run":
        args = load_run(run)
    elif source == "uniform" and env_id != sac.MOUNTAIN_CAR:
        args = dqn.Args(env_id=env_id)
    else:
        args = sac.Args(env_id="Humanoid-v5" if source == "poses" else env_id)
    if explore and is_dqn(script_of(args)):
        raise UsageError("--explore: a run of DQN has no random policy to sample from")
    args.render = render.over(args.render)
    if source == "run":
        if every > args.episode_length:
            raise UsageError(f"--every {every}: an episode has {args.episode_length} steps")
        paths = checkpoint_paths(run, checkpoints)
        dataset = dataset_of_run(args, paths, episodes, (seed, 2), explore, every, made)
    elif source == "uniform":
        dataset = make_dataset(args, datasets.uniform_columns(env_id, states, seed), made)
    else:
        dataset = make_dataset(args, datasets.pose_columns(per_pose, seed), made)
    datasets.save_dataset(dataset, out)
    print(f"{out}: {len(dataset)} states; {typed(sys.argv[0])} sheet --dataset {out}")


# ------------------------------------------------------------------------------ judging


def labels_of(source, dataset, task):
    """What `source` ("judge", "env", or a CSV file of a person's labels, which may be on whole
    episodes) knows of each state: ([N] float64, nan where nothing; {episode: bool})."""
    if source == "judge":
        return task.judge(dataset.states).astype(np.float64), {}
    if source == "env":
        return dataset.env_reward, {}
    answers = datasets.read_labels(source, dataset, task.name)
    labels = np.full(len(dataset), np.nan)
    labels[list(answers["frame"])] = list(answers["frame"].values())
    return labels, answers["episode"]


def epic(dataset: Path, reward: Rewards, labels: str = "judge", judge: str | None = None) -> None:
    """EPIC distance of reward models to labels: table, CSV and figures in a new folder
    epic_LABELS, beside the dataset.

    Args:
        dataset: a file made by collect
        reward: the models
        labels: what a good reward would be: judge (1 where the task is done, else 0), env (the
            environment's own reward), or a CSV file of a person's labels
        judge: a task's name or FILE.py:FUNCTION (states [B, S] -> [B] bool); default: the task that
            the dataset is about
    """
    data = load_dataset(dataset)
    flags, name = data.flags, Path(labels).stem
    if labels == "env":  # nobody has to judge
        task = judges.task_for(flags["env_id"], flags["target_prompt"])
    else:
        task = task_of_dataset(judge, data)
    values, _ = labels_of(labels, data, task)
    rows = np.flatnonzero(np.isfinite(values))
    truth, states, episodes = values[rows], data.states[rows], data.episode[rows]
    if len(np.unique(truth)) < 2:
        raise UsageError(
            f"--labels {labels}: all {len(rows)} labels on states of {dataset} are the same, and "
            "EPIC is undefined with a single class; it needs states of both kinds"
        )
    prompts = task.prompts if task and task.target_prompt else flags
    models = reward.each(len(rows), prompts, data.flags)
    out = results_folder(data.folder / f"epic_{name}")
    good = truth > truth.mean()
    count = f"{len(rows)} states of {len(np.unique(episodes))} episodes"
    goal = ", ".join(models[0].target_prompt + models[0].target_image)
    print(f'"{goal}", {count}', end="")
    print(f", labels: {labels}, above their mean: {100 * good.mean():.1f} %")
    print(f"{'model':40} {'parameters':>12} {'alpha':>5}  EPIC distance (95 % interval)")
    table, first = [], {}
    for model in models:
        rewards = rewards_of(model, reward.reward_alpha, renderer_of(data), states)
        blank = clip_reward.model_without_weights(model.clip_model)
        parameters = sum(weights.numel() for weights in blank.parameters())
        first[model.clip_model] = rewards[reward.reward_alpha[0]]
        for alpha, values in rewards.items():
            interval = epic_interval(values, truth, episodes)
            row = {"dataset": data.path.stem, "labels": labels, "task": task and task.name}
            row |= {"model": model.clip_model, "parameters": parameters, "reward_alpha": alpha}
            row |= dict(zip(("epic", "low", "high"), interval))
            table.append(row | {"states": len(rows)})
            print(f"{model.clip_model:40} {parameters:12,} {alpha:5.2f}  ", end="")
            print("{:.4f} ({:.4f} to {:.4f})".format(*interval))
    datasets.write_csv(out / "epic.csv", table[0], table)
    figures.draw_epic(out, f"{data.path.stem}, labels: {name}", table, first, good)
    print(f"wrote {out}/epic.csv, epic_alpha.png, epic_scaling.png, histograms.png")


def task_dataset(task, look, per_pose):
    """Dataset of labelled states of a task of the paper: the pose library, facing as an episode
    begins, and states in which policies were paid for less; of a classic task its whole space."""
    env_id = task.env_ids[0]
    if task.name in judges.HUMANOID:
        args, columns = sac.Args(), datasets.facing_columns(per_pose)
        look = replace(look, camera_azimuth=(180.0, 120.0, 240.0))
    else:
        args = sac.Args(env_id=env_id) if env_id == sac.MOUNTAIN_CAR else dqn.Args(env_id=env_id)
        columns = datasets.uniform_columns(env_id, 15 * per_pose, seed=0)
    args.render = look.over(args.render)
    return make_dataset(args, columns, {"source": "prompts"})


def prompts(
    model: Model,
    render: Look,
    task: Literal[tuple(judges.TASKS)] | None = None,
    prompts: tuple[str, ...] = (),
    alphas: Annotated[tuple[float, ...], Interval(ge=0, le=1)] = (0.0, 0.5, 1.0),
    azimuths: Annotated[tuple[float, ...], Interval(ge=-360, le=360)] = (),
    dataset: Path | None = None,
    judge: str | None = None,
    labels: str = "judge",
    per_pose: Few = 40,
    out: Path = Path("prompts"),
) -> None:
    """Which prompt, which alpha, which camera? AUC and EPIC distance of every combination, on
    states of which it is known whether they are the task's: table, figure, contact sheet, and the
    command to train with the best, in a new folder.

    Args:
        model: the model
        render: how its pictures are drawn
        task: one of the paper's tasks
        prompts: what to compare; default: the paper's and some paraphrases, or a dataset's
        alphas: strengths of goal-baseline regularisation
        azimuths: cameras, in degrees: each alone, every two, and all together; default: 180 120 240
            for the humanoid, or a dataset's
        dataset: states, by collect, of any task; default: the pose library and states in which
            policies were paid for half of a pose (a classic task: its state space)
        judge: of a dataset: FILE.py:FUNCTION (states [B, S] -> [B] bool)
        labels: which states are good: judge, or a CSV file of a person's labels
        per_pose: samples of each pose
        out: the results go to a new folder, OUT_TASK
    """
    if render.camera_azimuth:
        raise UsageError("--camera-azimuth: the cameras to compare are --azimuths")
    if dataset:
        data = load_dataset(dataset)
        if render != Look():
            raise UsageError(f"--dataset {dataset} is drawn as collected, without other flags")
        about = task_of_dataset(judge or task, data)
    elif task and not judge:
        about = judges.TASKS[task]
        data = task_dataset(about, render, per_pose)
    else:
        raise UsageError("say which --task of the paper, or a --dataset with its --judge")
    flags = data.flags
    if flags["env_id"] in egl_render.CLASSIC_STATE_SIZES and azimuths:
        raise UsageError(f"--azimuths: {flags['env_id']} has no camera")
    azimuths = azimuths or from_flags(egl_render.RenderArgs, flags).camera_azimuth
    flags["camera_azimuth"], views = azimuths, max(1, len(azimuths))
    said = about.prompts if about.target_prompt else flags
    prompts = prompts or (*said["target_prompt"], *about.paraphrases)
    check_distinct(prompts=prompts, alphas=alphas, azimuths=azimuths or ("its own",))
    values, _ = labels_of(labels, data, about)
    rows = np.flatnonzero(np.isfinite(values))
    good, states, episodes = values[rows] > 0, data.states[rows], data.episode[rows]
    if len(set(good.tolist())) < 2:
        raise UsageError(f"--labels {labels}: all {len(rows)} states are labelled the same")
    if not model.baseline_prompt + model.baseline_image:
        model = replace(model, baseline_prompt=tuple(said["baseline_prompt"]))
    model = replace(model, target_prompt=prompts)
    model.reward_alpha = max(alphas)
    for prompt in prompts:
        baselines = model.baseline_prompt + model.baseline_image
        clip_reward.check_prompts([prompt], baselines, model.reward_alpha)
    model.check(len(rows) * views)
    model.clip_batch_size = max(1, model.clip_batch_size // views)  # states, for the workers
    out = results_folder(out.parent / "_".join(filter(None, (out.name, about.name))))
    make = functools.partial(Variants, args=model, prompts=prompts, alphas=alphas)
    rewards = scored(model, make, renderer_of(data), states)  # [N, V, prompts, alphas]
    sets = [itertools.combinations(range(views), k) for k in sorted({1, min(views, 2), views})]
    combined = {x: rewards[:, x].mean(1) for x in itertools.chain(*sets)}
    table = []
    for chosen, by_prompt in combined.items():
        seen = " ".join(f"{azimuths[v]:g}" for v in chosen) if azimuths else ""
        for (p, prompt), (a, alpha) in itertools.product(enumerate(prompts), enumerate(alphas)):
            row = {"prompt": prompt, "reward_alpha": alpha, "camera_azimuth": seen}
            for name, statistic in ("auc", auc), ("epic", epic_distance):
                found = interval(statistic, by_prompt[:, p, a], good, episodes, resamples=300)
                row |= dict(zip((name, f"{name}_low", f"{name}_high"), found))
            table.append(row | {"rewards": by_prompt[:, p, a]})
    figures.draw_prompts(
        out / "prompts.png", f"{about.name}, {figures.short(model.clip_model)}", table
    )
    table.sort(key=lambda row: (-round(row["auc"], 3), row["epic"]))
    best = table[0]
    print(f"{about.name}: {len(rows)} states, {good.sum()} of them good ({labels})")
    print(f"{'AUC (95 % interval)':24} {'EPIC (95 % interval)':24} alpha  {'azimuth':11}  prompt")
    for row in table[:20]:
        auc_words = "{auc:.3f} ({auc_low:.3f} to {auc_high:.3f})".format(**row)
        epic_words = "{epic:.3f} ({epic_low:.3f} to {epic_high:.3f})".format(**row)
        print(f"{auc_words:24} {epic_words:24} {row['reward_alpha']:5.2f}  ", end="")
        print(f"{row['camera_azimuth']:11}  {row['prompt']}")
    columns = [name for name in best if name != "rewards"]
    datasets.write_csv(out / "prompts.csv", columns, table)
    flags["camera_azimuth"] = tuple(map(float, best["camera_azimuth"].split()))
    with pictures(data) as pool:
        cells = extremes(pool, states, good, best["rewards"])
    figures.write_sheet(out / "states.png", cells)
    print(f"wrote {out}/prompts.csv ({len(table)} rows), prompts.png, states.png (by the best, ten")
    print("states each: highest rewards, highest of those not good, lowest of those that are)")
    print(f"train with the best:\n    {training_command(data, model, best)}")


def extremes(pool, states, good, rewards):
    """Cells of a contact sheet: ten states each that a reward likes best, that it likes best though
    they are not good, and that it likes least though they are."""
    order = np.argsort(-rewards, kind="stable")
    chosen = [order, order[~good[order]], order[good[order]][::-1]]
    rows = np.concatenate([np.resize(part[:10], 10) for part in chosen])
    frames = pool.render(states[rows], 120)
    words = (f"{rewards[row]:.3f}" for row in rows)
    return list(map(figures.framed, frames, words, good[rows]))


def training_command(data, model, row):
    """The command line that trains on one of the combinations, drawn as `data` is."""
    script = script_named(data.arguments["script"])
    args = from_flags(script.Args, data.flags)
    scene = {"baseline_prompt": (), "baseline_image": ()}
    if row["reward_alpha"]:
        scene = {name: getattr(model, name) for name in scene}
    wanted = {"target_prompt": (row["prompt"],), "reward_alpha": row["reward_alpha"]} | scene
    wanted |= {x: getattr(model, x) for x in ("clip_model", "clip_precision")} | vars(args.render)
    default = flags_of(script.Args(env_id=args.env_id))
    words = ["--env-id", args.env_id]
    for name, value in wanted.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words += [f"--{'no-' * (not value)}{flag}"] * (value != default[name])
        elif value not in ((), default[name]):
            values = np.atleast_1d(value).tolist()
            words += [f"--{flag}", *(f"{x:g}" if isinstance(x, float) else str(x) for x in values)]
    return f"{typed(script.__file__)} {shlex.join(words)}"


def sheet(dataset: Path, judge: str | None = None, count: Few = 20) -> None:
    """Pictures of a dataset, and of states that judges accept (green frames) and reject (red), to
    check at a glance, in a new folder sheets beside it.

    Args:
        dataset: a file made by collect
        judge: a task's name or FILE.py:FUNCTION; default: all tasks of the dataset's environment
        count: accepted states, and as many rejected ones
    """
    data = load_dataset(dataset)
    env_id, rng = data.flags["env_id"], np.random.default_rng(0)
    tasks = [judges.find_task(judge, env_id)] if judge else judges.tasks_of(env_id)
    rows = np.linspace(0, len(data) - 1, min(len(data), 100)).astype(int)
    sheets = {"states": (rows, [None] * len(data))}
    for task in tasks:
        verdict = task.judge(data.states)
        both = [rng.permutation(np.flatnonzero(verdict == which)) for which in (True, False)]
        sheets[task.name] = np.concatenate([rows[:count] for rows in both]), verdict
        print(f"{task.name}: {verdict.sum()} of {len(verdict)} accepted. {task.criterion}")
    out = results_folder(data.folder / "sheets")
    with pictures(data) as pool:
        for name, (rows, verdict) in sheets.items():
            words = [f"{row} {data.pose[row] or data.step[row]}"[:16] for row in rows]
            frames = pool.render(data.states[rows], 120)
            cells = map(figures.framed, frames, words, (verdict[row] for row in rows))
            figures.write_sheet(out / f"{name}.png", list(cells))
    print(f"wrote {out}")


def play(run, checkpoint, compare, episodes, judge):
    """What --run and --compare did: (task, folder for the results, {name: Dataset}). Raises
    UsageError before anything slow."""
    chosen = [(run, checkpoint)] + [(compare, "best")] * bool(compare)
    runs = [load_run(folder) for folder, _ in chosen]
    task = task_of(judge, flags_of(runs[0]))
    if task.env_ids and runs[-1].env_id not in task.env_ids:
        raise UsageError(f"--compare {compare}: {runs[-1].env_id} has no {task.name}")
    paths = [checkpoint_paths(folder, [name]) for folder, name in chosen]
    out, played = results_folder(run / f"success_{checkpoint}"), {}
    for (folder, name), args, path in zip(chosen, runs, paths):
        kind = "ground truth" if args.reward.reward == "ground-truth" else args.reward.clip_model
        dataset = dataset_of_run(args, path, episodes, seed=(0, 3))
        played[f"{folder.resolve().name} ({kind}, {name})"] = dataset
    return task, out, played


def success(
    run: Path | None = None,
    checkpoint: str = "best",
    compare: Path | None = None,
    episodes: Few = 100,
    judge: str | None = None,
    dataset: Path | None = None,
    human: Path | None = None,
    videos: Count = 16,
) -> None:
    """Success rate of a policy by judge or by a person's labels, with a video of the verdicts, in a
    new folder success_.. in the run or beside the dataset.

    Args:
        run: folder of the run to judge
        checkpoint: best (highest training reward, as in the paper), or a number of steps
        compare: folder of another run, such as one with --reward ground-truth, for side by side
        episodes: episodes, without exploration, on starts that training never had
        judge: a task's name or FILE.py:FUNCTION (states [B, S] -> [B] bool); default: the run's
            own, or the task of its prompt or environment
        dataset: judge the episodes of this dataset instead of new ones
        human: with --dataset: a CSV file of a person's labels in place of the judge
        videos: episodes in the video, seen by the run's first camera; the first ten are in the
            contact sheet. 0: neither
    """
    from scipy.stats import binomtest  # takes a second

    if (run is None) == (dataset is None):
        raise UsageError("success needs either --run RUN_DIR or --dataset FILE.npz")
    if (human and not dataset) or (compare and not run):
        raise UsageError("--human goes with --dataset, and --compare with --run")
    labels = human or "judge"
    if run:
        task, out, played = play(run, checkpoint, compare, episodes, judge)
    else:
        data = load_dataset(dataset)
        task, played = task_of_dataset(judge, data), {data.path.stem: data}
        out = results_folder(data.folder / f"success_{Path(labels).stem}")
    print(f"{task.name}: {task.criterion}")
    own_rule = bool(task.env_ids) and not human  # not where somebody else's judge is asked
    table, films = [], []
    for source, data in played.items():
        verdicts, answers = labels_of(labels, data, task)
        judged = judge_episodes(source, data, verdicts, answers, own_rule)
        table += judged
        if run and videos:
            with pictures(data, cameras=1) as pool:
                for row in judged[:videos]:
                    now = data.rows(row["episode"])
                    frames = pool.render(data.states[now], 160)
                    films.append((frames, verdicts[now], row["success"]))
    datasets.write_csv(out / "episodes.csv", table[0], table)
    summary, shares = [], {}
    for name in dict.fromkeys(row["name"] for row in table):
        rows = [row for row in table if row["name"] == name]
        share = [row["good_steps"] / row["steps"] for row in rows if row["steps"]]
        won, count = sum(row["success"] for row in rows), len(rows)
        low, high = binomtest(won, count).proportion_ci(method="wilson")
        print(f"{name}: success {100 * won / count:.0f} % ({won} of {count} episodes), ", end="")
        print(f"95 % interval {100 * low:.0f} to {100 * high:.0f} %; ", end="")
        print(f"successful steps {100 * np.mean(share or [0]):.0f} %")
        rate = {"episodes": count, "success_rate": won / count, "low": low, "high": high}
        summary.append({"name": name} | rate)
        shares[f"{name}: {100 * won / count:.0f} %"] = share
    (out / "success.json").write_text(json.dumps(summary, indent=2) + "\n")
    title = f"{task.name}, {dataset.stem if dataset else data.flags['env_id']}"
    figures.draw_success(out / "histogram.png", title, shares)
    print(f"wrote {out}/success.json, episodes.csv, histogram.png")
    if films:
        moments = np.linspace(0, len(films[0][0]) - 1, 10).astype(int)
        cells = [figures.moment(film, t) for film in films[:10] for t in moments]
        figures.write_sheet(out / "contact_sheet.png", cells)
        egl_render.write_video(out / "episodes.mp4", figures.judged_video(films), 30)
        print(f"contact sheet: {out}/contact_sheet.png\njudged video: {out}/episodes.mp4")
        if run:
            write(run / "index.html", make_page(run).encode())


def judge_episodes(source, dataset, verdicts, answers, own_rule):
    """A row {name, episode, good_steps, steps, success} for each episode that anything is known of:
    verdicts [N] on states, nan where there is none, answers {episode: bool} on whole episodes, and,
    with own_rule, what the environment itself calls a success."""
    table = []
    for k in np.unique(dataset.episode).tolist():
        now = dataset.rows(k)
        name = f"{source}, step {dataset.checkpoint_step[now[0]]}"
        row = {"name": name, "episode": k, "good_steps": int(np.nansum(verdicts[now]))}
        row["steps"] = int(np.isfinite(verdicts[now]).sum())
        row["success"] = int(answers.get(k, dataset.episode_success(k, verdicts, own_rule)))
        table += [row] if row["steps"] or k in answers else []
    return table


SWEEPS = (  # one coordinate from end to end, all others are zero
    # environment, textured, its name and unit, from, to, index in the state
    ("CartPole-v1", False, "pole angle (rad)", -np.pi, np.pi, 2),
    ("MountainCar-v0", False, "position", -1.2, 0.6, 0),
    ("MountainCar-v0", True, "position", -1.2, 0.6, 0),
)


def landscape(
    reward: Rewards, points: Many = 361, render_size: Size = 480, out: Path = Path("landscape.png")
) -> None:
    """Reward against pole angle and car position, plain and textured, one line per alpha.

    Args:
        reward: the models
        points: states on each line
        render_size: height and width of the frames in pixels
        out: the picture; a table of all values is written beside it as CSV
    """
    picture, file = out.with_suffix(".png"), out.with_suffix(".csv")
    picture.parent.mkdir(parents=True, exist_ok=True)
    panels, rows = {name: [] for name in reward.clip_model}, []
    for env_id, textured, label, low, high, index in SWEEPS:
        task, look = judges.task_for(env_id), "textured" if textured else "plain"
        goal = egl_render.MOUNTAIN_GOALS.get(env_id, 0.0)  # or a pole that stands upright
        values = np.linspace(low, high, points)
        states = np.zeros((points, egl_render.CLASSIC_STATE_SIZES[env_id]))
        states[:, index] = values
        good = task.judge(states)
        draw = functools.partial(egl_render.ClassicRenderer, env_id, render_size, textured)
        for model in reward.each(len(SWEEPS) * points, task.prompts, {}):
            title = f"{figures.short(model.clip_model)}: {env_id}, {look}"
            rewards = rewards_of(model, reward.reward_alpha, draw, states)
            panels[model.clip_model].append((title, label, values, goal, rewards))
            for alpha, along in rewards.items():
                best, correlation = values[along.argmax()], pearson(along, good)
                print(f"{title}, alpha {alpha:.2f}: largest at {best:+.3f}, ", end="")
                print(f"goal at {goal:+.3f}; Pearson correlation with goal {correlation:+.3f}")
                row = {"model": model.clip_model, "env_id": env_id, "look": look}
                for value, number, is_goal in zip(values, along, good.astype(int)):
                    scored = {"value": value, "reward": number, "is_goal": is_goal}
                    rows.append(row | {"reward_alpha": alpha} | scored)
    figures.draw_landscape(picture, list(panels.values()))
    datasets.write_csv(file, rows[0], rows)
    print(f"wrote {picture} and {file}")


def label(
    dataset: tyro.conf.Positional[Path],
    judge: str | None = None,
    unit: Literal["frame", "episode"] = "frame",
    labels: Path | None = None,
    count: Annotated[int | None, Interval(ge=1)] = None,
    port: Annotated[int | None, Interval(ge=1, lt=2**16)] = None,
) -> None:
    """Label a dataset by hand on a local web page, until Ctrl-C.

    Args:
        dataset: a file made by collect
        judge: the task to label, by name or FILE.py:FUNCTION; default: what the dataset is about
        unit: what one answer is about: a picture, or a whole episode as a clip
        labels: the file of answers; default: labels.csv in the folder beside the dataset
        count: how many to label, in random order: a fair sample at any time; default: all
        port: port on 127.0.0.1; default: a free one
    """
    data = load_dataset(dataset)
    task = task_of_dataset(judge, data)
    path = labels or data.folder / "labels.csv"
    path.parent.mkdir(parents=True, exist_ok=True)
    session = label_page.Session(data, task, unit, path, count)
    done = f"{len(session.answers)} of {len(session.order)} are done"
    print(f"labelling {unit}s of {dataset} for {task.name}: {done}; starting", flush=True)
    with pictures(data) as pool:
        large = functools.partial(pool.render, size=480)  # for a person, whatever CLIP was shown
        label_page.serve(session, large, port)


def parsed(command):
    """The command with the flags of a command line, within their bounds, ready to be called."""

    @functools.wraps(command)
    def parse(**values):
        egl_render.check_bounds(command, values)
        return functools.partial(command, **values)

    return parse


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    commands = (landscape, prompts, collect, epic, sheet, success, label)
    try:
        with errors_in_one_line():
            command = tyro.extras.subcommand_cli_from_dict(
                {command.__name__: parsed(command) for command in commands},
                description=__doc__,
                config=(tyro.conf.OmitArgPrefixes,),
            )
        command()
    except (UsageError, OSError) as error:  # of a file: its name and what is wrong with it
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except clip_reward.RunError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        sys.exit(130)
