"""Runs: the script, flags and checkpoints of each, and rollouts of its policy."""

import functools
import importlib
import math
import sys
from dataclasses import replace
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch
from pydantic.dataclasses import dataclass
from tqdm import tqdm

import dqn_clip_classic as dqn
import sac_clip_humanoid as sac
from clip_reward import RunError, Scorer, UsageError, message_of
from environments import judges, tasks
from training.run import check_weights, checkpoints, load_checkpoint, make_args, saved_flags

SCRIPTS = {script.__name__: script for script in (sac, dqn)}


@dataclass(kw_only=True)
class Own:
    """Code of your own. It is not run merely because a run or a dataset names it."""

    script: Path | None = None
    """your changed copy of a script, if the run or dataset was made with it"""
    env_id: str | None = None
    """MODULE:NAME, if the task is in a module of yours"""


def find_script(name, own, where):
    """Return the script of a run: ours by its file's name, or the copy that `own` names. Raises
    UsageError; `where` is the run or dataset that has `name`."""
    stem, path = Path(name).stem, own.script
    if stem in SCRIPTS and (path is None or path.stem != stem):
        return SCRIPTS[stem]
    if path is None:
        how = f"to run that script, type --script {name or 'FILE.py'}"
        raise UsageError(f"{where} was made by another script; {how}")
    sys.path.append(str(path.resolve().parent))  # where reward workers look for it, too
    try:
        script = importlib.import_module(path.stem)
        if not path.samefile(script.__file__):
            raise ImportError(f"{script.__file__} has the same name; rename the copy")
    except Exception as error:  # a user's file may raise anything
        raise UsageError(f"--script {path}: {message_of(error)}") from error
    return script


def script_of(args):
    """Return the script that defines the class of these Args."""
    return sys.modules[type(args).__module__]


def args_of(saved, where, own):
    """Return a script's Args from saved flags, {name: value} with "script". Raises UsageError for
    unknown flags, and for code that `own` does not name."""
    script = find_script(str(saved.get("script", "")), own, where)
    args = make_args(saved, script.Args, where)
    if ":" in args.env_id and args.env_id != own.env_id:
        raise UsageError(f"{where}: its task is a module; to run it, type --env-id {args.env_id}")
    return args


@functools.cache  # making an environment takes time
def first_state(script, env_id):
    """Return a state [S] of a script's task, None if the task draws itself. Raises UsageError for
    an unknown task."""
    args = script.Args(env_id=env_id, reward="ground-truth", video_freq=0)
    return tasks.describe_env(env_id, lambda: script.make_env(args)())[1]


def state_size(args, where):
    """Return how many numbers a state of the task has, 0 if the task draws itself. Raises
    UsageError for an unknown task."""
    try:
        state = first_state(script_of(args), args.env_id)
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from error
    return 0 if state is None else len(state)


def load_run(folder, own=None, stateless=False):
    """Return the Args of a run. Raises UsageError as `args_of` does, and for a task without states
    unless `stateless` allows that."""
    args = args_of(saved_flags(folder), folder, own or Own())
    if state_size(args, folder) == 0 and not stateless:
        raise UsageError(f"{folder}: {args.env_id} has no states to draw pictures from")
    if hasattr(args, "terminate"):
        args.terminate = False  # however it was trained, it is judged on whole episodes
    return args


def task_of(spec, args, where):
    """Return the judges.Task by name or FILE.py:FUNCTION, or else the one that `args` train on.
    Raises UsageError for code that only `where` names."""
    if not spec and ":" in (args.judge or ""):
        raise UsageError(f"{where}: its judge is a file; to run it, type --judge {args.judge}")
    return judges.find_task(spec or args.judge, args.env_id, args.target_prompt)


def make_scorer(args, cameras=None):
    """Make a Scorer that draws states as a script does with `args`, seen by the first `cameras`
    cameras or by all."""
    args = replace(args, camera_azimuth=args.camera_azimuth[:cameras])
    make_renderer = functools.partial(script_of(args).make_renderer, args)
    return Scorer(make_renderer, None)


def checkpoint_paths(run, names) -> list[Path]:
    """Return the files of checkpoints by their names: "best", a number of steps, or "all" numbers.
    Raises UsageError."""
    folder, steps = Path(run) / "checkpoints", sorted(checkpoints(run))
    names = [each for name in names for each in (steps if name == "all" else [name])]
    paths = [folder / ("best.pt" if name == "best" else f"step_{name}.pt") for name in names]
    for path in paths or [folder]:
        if not path.is_file():
            there = ", ".join(map(str, steps)) or "none"
            raise UsageError(f"{run} has no {path.name}; choose best or a step: {there}")
    return paths


def load_policy(path, args, observation_space, action_space):
    """Return (network, the step at which the checkpoint was made). Raises UsageError if it is
    damaged or has other networks, or for a NaN or infinity among its weights."""
    script, saved = script_of(args), load_checkpoint(path)
    try:
        if "q_network" in saved:
            kind, key = script.QNetwork, "q_network"
        else:
            kind, key = script.Actor, "averaged_actor" if "averaged_actor" in saved else "actor"
        network = kind(observation_space.shape[0], action_space, args)
        network.load_state_dict(saved[key])
        check_weights(network, path)
        return network, int(saved["global_step"])
    except (AttributeError, KeyError, TypeError, RuntimeError) as error:
        raise UsageError(f"{path} is not a checkpoint of this run: {message_of(error)}") from error


@torch.no_grad()
def rollout(args, path, seeds, explore=False):
    """Play whole episodes of a run side by side, one per seed, with the best actions of the
    checkpoint at `path`, or with `explore` (SAC) those with the noise of training -> columns of a
    Dataset, episode after episode. Raises as `load_policy` does, and RunError for a NaN or an
    infinity."""
    seeds = [int(seed) for seed in seeds]
    modes = {"autoreset_mode": gym.vector.AutoresetMode.DISABLED}
    script, repeat = script_of(args), getattr(args, "action_repeat", 1)
    envs = gym.vector.SyncVectorEnv([script.make_env(args)] * len(seeds), **modes)
    spaces = envs.single_observation_space, envs.single_action_space
    network, checkpoint_step = load_policy(path, args, *spaces)
    if explore:
        if not hasattr(script, "exploration_noise"):
            raise UsageError("--explore: only SAC's script has an exploration_noise; DQN has none")
        torch.manual_seed(seeds[0])
        shape = args.episode_length // repeat, len(seeds), math.prod(spaces[1].shape)
        noise = script.exploration_noise(*shape, args.pink_noise, args.pink_noise)
    observations, _ = envs.reset(seed=seeds)
    steps = []
    for step in tqdm(range(args.episode_length), f"{len(seeds)} episodes", disable=None):
        if step % repeat:
            pass  # SAC holds its action
        elif explore:
            seen = torch.as_tensor(observations, dtype=torch.float32)
            sample, _ = network.sample(seen, noise[step // repeat])
            actions = network.to_env(sample)
        else:
            actions = network.best_actions(observations)
        observations, rewards, _, _, infos = envs.step(actions)
        states = np.array([*infos.get("states", [()] * len(seeds))], np.float64)
        found = {"action": actions, "observation": observations, "reward": rewards}
        for name, values in (found | {"state": states}).items():
            if not np.isfinite(values).all():
                raise RunError(f"{path}: there is a NaN or infinity in the {name} of step {step}")
        steps.append((states, rewards))
    envs.close()
    states, env_reward = (np.concatenate(np.stack(column, 1)) for column in zip(*steps))
    episode, step = (index.ravel() for index in np.indices((len(seeds), len(steps))))
    success = np.asarray(infos.get("success", np.full(len(seeds), -1))).astype(int)[episode]
    columns = {"states": states, "env_reward": env_reward, "episode": episode, "step": step}
    return columns | {"success": success, "checkpoint_step": np.full(len(step), checkpoint_step)}
