"""Runs and what their policies do: scripts, checkpoints, rollouts, and the states of both."""

from __future__ import annotations

import functools
import importlib
import json
import sys
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch
from tqdm import tqdm

import dqn_clip_classic as dqn
import sac_clip_humanoid as sac
from clip_reward import Scorer, UsageError
from environments import judges
from evaluation.datasets import Dataset
from training.run import checkpoints, flags_of, from_flags, load_args, load_checkpoint, saved_flags

SCRIPTS = {"sac_clip_humanoid": sac, "dqn_clip_classic": dqn}


def load_script(name, given=None):
    """Return the module of the script `name` that a run or dataset was made by: one of the two, or
    the changed copy of --script. No code that only a file names is run. Raises UsageError."""
    if given is None:
        if Path(name).stem not in SCRIPTS:
            raise UsageError(f"this was made by other code; to run it, type --script {name}")
        return SCRIPTS[Path(name).stem]
    if not given.is_file():
        raise UsageError(f"--script {given} is not a file")
    sys.path.append(str(given.resolve().parent))  # workers look for it there, too
    return importlib.import_module(given.stem)


def load_run(folder, script=None):
    """Return the Args of a run, of whichever script. Raises UsageError."""
    module = load_script(saved_flags(folder).get("script", "sac_clip_humanoid"), script)
    args = load_args(folder, module.Args)
    if hasattr(args, "terminate"):
        args.terminate = False  # whatever it learned by, it is judged on whole episodes
    return args


def script_of(args):
    """Return the module whose Args these are."""
    return sys.modules[type(args).__module__]


def checkpoint_paths(run, names) -> list[Path]:
    """Return files of checkpoints: "best", numbers of steps, or "all" steps. Raises UsageError."""
    folder = Path(run) / "checkpoints"
    steps = sorted(checkpoints(run))
    names = steps if list(names) == ["all"] else names
    paths = [folder / ("best.pt" if name == "best" else f"step_{name}.pt") for name in names]
    for path in paths or [folder]:
        if not path.is_file():
            there = ", ".join(map(str, steps)) or "none"
            raise UsageError(f"{run}: no {path.name}; best or one of these steps: {there}")
    return paths


def load_policy(path, args, envs):
    """Return (network, the step of its checkpoint). Raises UsageError for a damaged file."""
    script, saved = script_of(args), load_checkpoint(path)
    kind, key = (script.QNetwork, "q_network") if "q_network" in saved else (script.Actor, "actor")
    try:
        network = kind(envs.single_observation_space.shape[0], envs.single_action_space, args)
        network.load_state_dict(saved[key])
        return network, int(saved["global_step"])
    except (KeyError, RuntimeError) as error:  # other tensors
        raise UsageError(f"{path} is not a checkpoint of this run: {error!r:.120}") from error


@torch.no_grad()
def rollout(args, path, seeds, explore=False):
    """Play one episode per seed by the best actions of a checkpoint, or with `explore` (SAC) by
    samples -> columns of a Dataset, episode after episode. Raises UsageError."""
    seeds = [int(seed) for seed in seeds]
    disabled = gym.vector.AutoresetMode.DISABLED
    make_env = script_of(args).make_env(args)
    envs = gym.vector.SyncVectorEnv([make_env] * len(seeds), autoreset_mode=disabled)
    network, checkpoint_step = load_policy(path, args, envs)
    if explore and not hasattr(network, "sample"):
        raise UsageError("--explore: a run of DQN has no random policy to sample from")
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
        steps.append((np.stack(infos["states"]).astype(np.float64), rewards))
    envs.close()
    states, env_reward = (np.concatenate(np.stack(column, 1)) for column in zip(*steps))
    episode, step = (index.ravel() for index in np.indices((len(seeds), len(steps))))
    success = infos.get("success", np.full(len(seeds), -1)).astype(int)[episode]
    columns = {"states": states, "env_reward": env_reward, "episode": episode, "step": step}
    return columns | {"success": success, "checkpoint_step": np.full(len(step), checkpoint_step)}


def dataset_of_run(args, paths, episodes, seed, key, explore=False, every=1, made=()):
    """Return a Dataset of every `every`-th step of so many episodes of each checkpoint. (seed, key)
    give the episodes' seeds; `made` is what else to record."""
    parts = []
    for k, path in enumerate(paths):
        # spawn_key: training's sequences (seed, rollout) are others, whatever the seed
        seeds = np.random.SeedSequence(seed, spawn_key=(key, k)).generate_state(episodes)
        parts.append(rollout(args, path, seeds, explore))
        parts[k]["episode"] += k * episodes
    kept = parts[0]["step"] % every == every - 1
    columns = {name: np.concatenate([part[name][kept] for part in parts]) for name in parts[0]}
    return make_dataset(args, columns, {"source": "run"} | dict(made))


def make_dataset(args, columns, made):
    """Return a Dataset of states that are drawn as with the Args of a script."""
    script = script_of(args)
    name = script.__name__ if script in SCRIPTS.values() else script.__file__
    made = made | {"script": name, "flags": flags_of(args)}
    return Dataset(json.loads(json.dumps(made, default=str)), **columns)


def renderer_of(dataset, script=None, cameras=None):
    """Return make_renderer as the run of a dataset had it; of several cameras the first ones."""
    module = load_script(dataset.arguments["script"], script)
    args = from_flags(module.Args, dataset.flags)
    args.render.camera_azimuth = args.render.camera_azimuth[:cameras]
    return functools.partial(module.make_renderer, args)


def pictures(dataset, script=None, cameras=None):
    """Return a Scorer that only draws."""
    return Scorer(renderer_of(dataset, script, cameras), None)


def task_of(spec, flags, where):
    """Return judges.Task by name or FILE.py:FUNCTION, or else what the flags of a run or dataset
    (`where`) are about. A judge that only they name is code from anywhere: it is not run."""
    own = flags.get("judge")
    if not spec and own and ":" in own:
        raise UsageError(f"{where} was judged by code; to run it, type --judge {own}")
    return judges.find_task(spec or own, flags["env_id"], flags["target_prompt"])
