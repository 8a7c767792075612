"""SAC from a sentence: the reward of a step is how well CLIP finds its picture to fit the words.
(VLM-RM, arXiv 2310.12921; SAC, arXiv 1812.05905.) The whole experiment is in this file.

One GPU, the paper's setting (ViT-bigG-14, 10 million steps):

    python sac_clip_humanoid.py --target-prompt "a humanoid robot kneeling"

Several GPUs (one process each, which draws and scores its share of every rollout):

    python sac_clip_humanoid.py --target-prompt "a humanoid robot kneeling" \
        --reward-devices cuda:0 cuda:1 cuda:2 cuda:3

Offline on a laptop, with the small CLIP that comes with the project:

    python sac_clip_humanoid.py --target-prompt "a humanoid robot kneeling" \
        --clip-model local-dir:tiny_clip --render-size 64 --camera-azimuth 145 --num-envs 8 \
        --total-timesteps 48000 --learning-starts 4800 --gradient-steps 600 --batch-size 128 \
        --entropy-coef 0.05 --normalize-observations --layer-norm

Another task (any of Gymnasium's with continuous actions), a car in a mountain landscape:

    python sac_clip_humanoid.py --env-id MountainCarContinuous-v0 --episode-length 200 \
        --target-prompt "a car at the peak of the mountain, next to the yellow flag" \
        --clip-model local-dir:tiny_clip --render-size 64 --num-envs 8 --hidden-size 64 \
        --total-timesteps 32000 --learning-starts 3200 --random-repeat 25 --gradient-steps 600 \
        --batch-size 256 --policy-lr 1e-3 --q-lr 1e-3 --gamma 0.99 --tau 0.05 --no-autotune \
        --entropy-coef 0.1

The environment's own reward instead, as a baseline (nothing is drawn):

    python sac_clip_humanoid.py --reward ground-truth --video-freq 0
"""

from __future__ import annotations

import atexit
import copy
import dataclasses
import difflib
import functools
import json
import math
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

# Before torch: threads that spin for long while they wait are quickest on an idle machine, but with
# another process on the same cores (the workers of this very run) updates fall from 65 to 1 a
# second; with this bound to 36 (2 cores, batch 256; docs/results.md).
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
import tyro
from tqdm import tqdm

import clip_reward
import egl_render
from clip_reward import UsageError


@dataclass
class Args:
    exp_name: str = Path(__file__).stem
    """the name of this experiment"""
    seed: int = 1
    """seed of everything: networks, environments, exploration, replay"""
    torch_deterministic: bool = True
    """use deterministic algorithms on the GPU as well"""
    cuda: bool = True
    """learn on the GPU if there is one"""
    compile: bool = False
    """updates by torch.compile, and on the GPU as one CUDA graph (no faster on a CPU)"""
    track: bool = False
    """log to Weights & Biases as well (WANDB_MODE=offline needs no account)"""
    wandb_project_name: str = "clip-reward"
    """the wandb project"""
    wandb_entity: str | None = None
    """the wandb team, default: your own account"""

    # What to do, and how it is scored
    target_prompt: tuple[str, ...] = ()
    """what to do, in words; several prompts are averaged"""
    baseline_prompt: tuple[str, ...] = ()
    """what the scene is anyway, several prompts are averaged; default: "a humanoid robot" for the
    humanoid, none for other tasks (only --reward-alpha needs it)"""
    reward_alpha: float = 0.0
    """strength of goal-baseline regularisation, 0 (plain cosine) to 1 (only target - baseline)"""
    reward: Literal["clip", "ground-truth"] = "clip"
    """ground-truth is the environment's own reward, as a baseline"""
    clip_model: str = "ViT-bigG-14/laion2b_s39b_b160k"
    """ARCH/TAG of open_clip, hf-hub:ORG/NAME or local-dir:PATH; offline: local-dir:tiny_clip"""
    clip_batch_size: int | None = None
    """frames per forward pass of CLIP, at most: memory and speed, no result but for rounding;
    default: on a GPU what fits, up to 512, on the CPU 256"""
    clip_precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """number format of CLIP's weights"""
    clip_cache_dir: str | None = None
    """where downloaded weights are kept, default: open_clip's own cache"""
    reward_devices: tuple[str, ...] = ()
    """where frames are drawn and scored, one process each; default: every CUDA device, else
    one per core of the CPU, at most four"""
    allow_slow: bool = False
    """start even if this machine would need days for the model"""

    # What CLIP sees (MuJoCo and MountainCar; other tasks' render() shows it, at most render_size)
    render_size: int = 480
    """height and width of the frames in pixels"""
    render_quality: Literal["auto", "full", "light"] = "auto"
    """light: no shadows, no antialiasing; auto: full on a GPU, light in software"""
    textured: bool = True
    """realistic sky, stone floor and metal body, or the mountain as a landscape of rock, snow and
    clouds; or else Gymnasium's own look"""
    camera: Literal["paper", "default"] = "paper"
    """the paper's camera, which follows the humanoid, or the task's own (always for other tasks)"""
    camera_distance: float | None = None
    """metres from the point looked at, instead of the chosen camera's"""
    camera_azimuth: float | None = None
    """degrees around the vertical axis, instead of the chosen camera's"""
    camera_elevation: float | None = None
    """degrees, negative looks down, instead of the chosen camera's"""
    camera_lookat: tuple[float, float, float] | None = None
    """point looked at in metres (x and y follow a tracked body), instead of the chosen camera's"""

    # The algorithm
    env_id: str = "Humanoid-v5"
    """any Gymnasium task with continuous actions"""
    total_timesteps: int = 10_000_000
    """environment steps in all, rounded up to whole rollouts"""
    num_envs: int = 32
    """environments stepped in parallel, one process each (MountainCarContinuous: in this one)"""
    episode_length: int = 100
    """steps of every episode; no episode ends earlier, and a rollout is one episode of each"""
    buffer_size: int = 1_000_000
    """transitions in the replay buffer, rounded down to whole rollouts"""
    gamma: float = 0.95
    """discount factor"""
    tau: float = 0.005
    """share of the critics that moves into the target critics at each update"""
    batch_size: int = 512
    """transitions per update"""
    learning_starts: int = 50_000
    """steps of random actions before the first update"""
    random_repeat: int = 1
    """steps for which each random action is held: with a new one every step a car never leaves its
    valley, with one for 25 steps every fifth episode gets to the top (not in the paper)"""
    gradient_steps: int = 100
    """updates after each rollout (num_envs * episode_length steps)"""
    async_rewards: bool = False
    """play the next rollout and learn while the workers score this one: the policy that plays is
    one rollout older (not in the paper)"""
    policy_lr: float = 6e-4
    """learning rate of the actor"""
    q_lr: float = 6e-4
    """learning rate of the critics and of the entropy coefficient"""
    hidden_size: int = 256
    """width of the two hidden layers of actor and critics"""
    layer_norm: bool = False
    """normalise the critics' hidden layers, as DroQ and SimBa do: their values stay sane when there
    are many updates per step (not in the paper)"""
    normalize_observations: bool = False
    """bring every observation to mean 0 and standard deviation 1 over all so far, as SimBa does:
    Humanoid-v5's contact forces reach 5000 where its joint angles reach 3 (not in the paper)"""
    autotune: bool = True
    """tune the entropy coefficient to a policy entropy of -dim(actions)"""
    entropy_coef: float = 1.0
    """the entropy coefficient, with --autotune only where it starts"""

    # What is kept
    runs_dir: str = "runs"
    """the folder that gets a folder for this run"""
    checkpoint_freq: int = 128_000
    """steps between checkpoints; the end of the run always has one"""
    video_freq: int = 128_000
    """steps between videos, and one at the end; 0: none"""
    eval_episodes: int | None = None
    """episodes without exploration that checkpoints/best.pt is judged by in the end, 0: none;
    default: 100 where the task has a success rate (MountainCarContinuous), or else none"""
    resume: str | None = None
    """folder of the run to go on with, as it was started; flags beside it that do not change the
    experiment are accepted, such as a larger --total-timesteps"""


# What flags beside --resume may change: how long, where and how often, but not what is learned.
RESUME_MAY_CHANGE = (
    "total_timesteps checkpoint_freq video_freq reward_devices clip_batch_size clip_cache_dir "
    "allow_slow cuda compile track eval_episodes resume"
).split()
POSITIVE = (
    "total_timesteps num_envs episode_length buffer_size batch_size gradient_steps policy_lr q_lr "
    "hidden_size render_size random_repeat"
).split()
NOT_NEGATIVE = "seed learning_starts entropy_coef checkpoint_freq video_freq".split()

# A goal that absorbs, pictures by egl_render.ClassicRenderer, and steps of microseconds
MOUNTAIN_CAR = "MountainCarContinuous-v0"


def parse_args() -> Args:
    """The command line; with --resume on top of the flags that the run was started with.

    Raises:
        UsageError: --resume names no run, or would change what the run is about.
    """
    args = tyro.cli(Args, description=__doc__)
    if args.resume is None:
        if not args.baseline_prompt and args.env_id.startswith("Humanoid"):
            args.baseline_prompt = ("a humanoid robot",)
        return args
    run_dir = Path(args.resume)
    if not (run_dir / "args.json").is_file():
        raise UsageError(f"--resume {run_dir}: not the folder of a run, it has no args.json")
    if not list(run_dir.glob("checkpoints/step_*.pt")):  # replay_buffer.pt is written before it
        raise UsageError(f"--resume {run_dir}: no checkpoint there (checkpoints/step_*.pt)")
    try:
        saved = json.loads((run_dir / "args.json").read_text())
        foreign = ", ".join(sorted(saved.keys() - vars(args).keys()))
    except (ValueError, AttributeError) as error:
        raise UsageError(f"--resume {run_dir}: its args.json is damaged") from error
    if foreign:
        name = saved.get("exp_name")
        raise UsageError(
            f"--resume {run_dir}: another script, {name}, or version; it had {foreign}"
        )
    if not (run_dir / "checkpoints/replay_buffer.pt").is_file():
        raise UsageError(f"--resume {run_dir}: it has no checkpoints/replay_buffer.pt")
    saved = Args(**{k: tuple(v) if isinstance(v, list) else v for k, v in saved.items()})
    args = tyro.cli(Args, default=saved)
    args.runs_dir = saved.runs_dir = str(run_dir.resolve().parent)
    for name, was in vars(saved).items():
        if getattr(args, name) != was and name not in RESUME_MAY_CHANGE:
            raise UsageError(
                f"--{name.replace('_', '-')} was {was!r} in the run to resume; drop it"
            )
    return args


def check_args(args: Args) -> None:
    """Find, in well under a second, every mistake that needs no environment and no model.

    Raises:
        UsageError: one line: what is wrong, with the value, and what to type instead.
    """

    def require(condition, name, problem):
        if not condition:
            raise UsageError(f"--{name.replace('_', '-')} {getattr(args, name)} {problem}")

    for name in POSITIVE:
        require(0 < getattr(args, name) < math.inf, name, "is not positive")
    size = args.clip_batch_size
    require(size is None or size > 0, "clip_batch_size", "is not positive")
    for name in NOT_NEGATIVE:
        require(0 <= getattr(args, name) < math.inf, name, "is negative")
    require((args.eval_episodes or 0) >= 0, "eval_episodes", "is negative")
    compiler = os.environ.get("CXX", "g++")
    require(not args.compile or shutil.which(compiler), "compile", f"needs a compiler, {compiler}")
    require(0 <= args.gamma < 1, "gamma", "is outside [0, 1)")
    require(0 < args.tau <= 1, "tau", "is outside (0, 1]")
    require(0 <= args.reward_alpha <= 1, "reward_alpha", "is outside [0, 1]")
    require(
        args.camera_distance is None or args.camera_distance > 0, "camera_distance", "is not > 0"
    )
    require(args.entropy_coef > 0 or not args.autotune, "entropy_coef", "needs --no-autotune")
    rollout = args.num_envs * args.episode_length
    require(
        args.buffer_size >= rollout, "buffer_size", f"is less than one rollout, {rollout} steps"
    )
    if args.reward == "clip":
        if not args.target_prompt or not all(map(str.strip, args.target_prompt)):
            raise UsageError('say what to do: --target-prompt "a humanoid robot kneeling"')
        has_baseline = args.baseline_prompt and all(map(str.strip, args.baseline_prompt))
        require(args.reward_alpha == 0 or has_baseline, "reward_alpha", "needs a --baseline-prompt")
        same = sorted(args.target_prompt) == sorted(args.baseline_prompt)
        require(args.reward_alpha == 0 or not same, "baseline_prompt", "is the target prompt too")
    here = ["cpu"] + [f"cuda:{i}" for i in range(torch.cuda.device_count())]
    for name in args.reward_devices:
        if name not in here:
            raise UsageError(f"--reward-devices {name} does not exist; here: {' '.join(here)}")
    try:
        os.makedirs(args.runs_dir, exist_ok=True)
        tempfile.TemporaryFile(dir=args.runs_dir).close()
    except OSError as error:
        require(False, "runs_dir", f"cannot be written: {error.strerror}")


def check_env(env_id: str) -> Literal["states", "frames"]:
    """What pictures of a task are made of: its state (MuJoCo, MountainCar), or else its `render()`.

    Raises:
        UsageError: no such task, or not one that this script can learn.
    """
    try:
        env = gym.make(env_id)
    except (gym.error.UnregisteredEnv, gym.error.NamespaceNotFound) as error:
        near = ", ".join(difflib.get_close_matches(env_id, gym.registry, n=3, cutoff=0.3))
        raise UsageError(f"--env-id {env_id}: no such environment; near it: {near}") from error
    except (gym.error.Error, ImportError) as error:
        reason = next(iter(str(error).splitlines()), repr(error))
        raise UsageError(f"--env-id {env_id}: {reason}") from error
    actions = env.action_space
    if isinstance(actions, gym.spaces.Discrete):
        raise UsageError(
            f"--env-id {env_id} has discrete actions and SAC needs continuous ones; for CartPole "
            "and MountainCar-v0 use dqn_clip_classic.py"
        )
    if not isinstance(actions, gym.spaces.Box) or not actions.is_bounded():
        raise UsageError(f"--env-id {env_id}: not a box of bounded continuous actions: {actions}")
    if not isinstance(env.observation_space, gym.spaces.Box):
        raise UsageError(f"--env-id {env_id}: not a box of observations: {env.observation_space}")
    env.close()
    model = getattr(env.unwrapped, "model", None)
    # mocap bodies and activations are state beside qpos and qvel
    has_state = hasattr(model, "nq") and hasattr(env.unwrapped, "data")
    has_state = has_state and not model.nmocap and not model.na
    return "states" if has_state or env_id == MOUNTAIN_CAR else "frames"


# ------------------------------------------------------------------------------ environment


class AbsorbingGoal(gym.Wrapper):
    """The car stays where it reaches the goal, and is paid nothing more; `info` has "success"."""

    def reset(self, **kwargs):
        self.arrived = None  # the observation there
        return self.env.reset(**kwargs)

    def step(self, action):
        observation, reward = self.arrived, 0.0
        if observation is None:
            observation, reward, reached, _, _ = self.env.step(action)
            self.arrived = observation if reached else None
        return observation, reward, False, False, {"success": self.arrived is not None}


class SceneInInfo(gym.Wrapper):
    """Episodes that never end by themselves, and an `info` that holds only what a picture needs
    (and "success", where the task has one).

    An early end would tell the agent about the task (section 4.1 of the paper). `info` is pickled
    through a pipe at every step: the humanoid's state makes that 533 bytes a step.
    """

    def __init__(self, env, scene, frame_size):
        super().__init__(env)
        self.scene, self.frame_size = scene, frame_size

    def step(self, action):
        observation, reward, _, _, info = self.env.step(action)
        info = {key: info[key] for key in info if key == "success"}
        if self.scene == "states":
            data = getattr(self.unwrapped, "data", None)  # MuJoCo's
            state = [data.qpos, data.qvel] if data else [self.unwrapped.state]
            info["states"] = np.concatenate(state, dtype=np.float64)  # [nq + nv] or (x, velocity)
        elif self.scene == "frames":
            from PIL import Image

            image = Image.fromarray(self.env.render())
            image.thumbnail((self.frame_size, self.frame_size))  # never enlarges
            info["frames"] = np.asarray(image)  # [H, W, 3] uint8
        return observation, float(reward), False, False, info


def make_env(
    env_id: str,
    scene: Literal["states", "frames"] | None = None,
    frame_size: int = 480,
):
    """A function that makes one environment whose step's `info` has `scene`, see `check_env`."""

    def thunk():
        if multiprocessing.parent_process() is not None:
            for number in (signal.SIGINT, signal.SIGTERM):  # sent to the whole group, as by Ctrl-C:
                signal.signal(number, signal.SIG_IGN)  # how to end is for the parent to decide
            gym.logger.min_level = gym.logger.ERROR  # the parent has printed the same warnings
        kwargs = {"max_episode_steps": -1}  # no time limit
        if scene == "frames":
            kwargs["render_mode"] = "rgb_array"
        try:  # with True, v4 tasks pay for health whatever the robot does
            env = gym.make(env_id, terminate_when_unhealthy=False, **kwargs)
        except TypeError:  # a task without health
            env = gym.make(env_id, **kwargs)
        if env_id == MOUNTAIN_CAR:
            env = AbsorbingGoal(env)
        if len(env.observation_space.shape) != 1:
            env = gym.wrappers.FlattenObservation(env)
        return SceneInInfo(env, scene, frame_size)

    return thunk


def make_renderer(args: Args, size: int | None, quality: str):
    """What draws states; called in every reward worker, after it was bound to its GPU."""
    if args.env_id == MOUNTAIN_CAR:
        return egl_render.ClassicRenderer(args.env_id, size, args.textured)
    env = gym.make(args.env_id)
    paper = args.camera == "paper" and args.env_id.startswith("Humanoid")
    camera = egl_render.PAPER_CAMERA if paper else egl_render.env_camera(env)
    for name in ("distance", "azimuth", "elevation", "lookat"):
        value = getattr(args, f"camera_{name}")
        if value is not None:
            camera = dataclasses.replace(camera, **{name: value})
    model = env.unwrapped.model
    if args.textured:
        model = egl_render.textured_model(env.unwrapped.fullpath)
    return egl_render.MujocoRenderer(model, size, camera, quality)


# ------------------------------------------------------------------------------ networks


class RunningNorm(nn.Module):
    """Observations [B, O], each with mean 0 and standard deviation 1 over all that were learned
    from, within +-10. RSNorm in SimBa (Lee et al. 2024); added up as in Chan et al. (1979)."""

    def __init__(self, observation_dim):
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        self.register_buffer("mean", torch.zeros(observation_dim))
        self.register_buffer("var", torch.ones(observation_dim))

    @torch.no_grad()
    def add(self, observations):
        """Count in some more, [..., O]. In place: a captured CUDA graph reads the same tensors."""
        x = observations.flatten(0, -2)
        self.count += len(x)
        share, ahead = len(x) / self.count, x.mean(0) - self.mean
        self.mean += share * ahead
        self.var.lerp_(x.var(0, correction=0) + (1 - share) * ahead.square(), share.float())

    def forward(self, x):
        return ((x - self.mean) * (self.var + 1e-4).rsqrt()).clamp(-10, 10)


def mlp(inputs: int, hidden: int, outputs: int, layer_norm: bool = False) -> nn.Sequential:
    layers = []
    for width in (inputs, hidden):
        layers += [nn.Linear(width, hidden), *([nn.LayerNorm(hidden)] * layer_norm), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(hidden, outputs))


class TwinCritic(nn.Module):
    """Q1 and Q2: observations [B, O], actions [B, A] -> values [2, B]. normalize: the actor's."""

    def __init__(self, observation_dim, action_dim, hidden, layer_norm=False, normalize=None):
        super().__init__()
        self.normalize = normalize or nn.Identity()
        # One batched product over [2, in, out] weights was measured no faster on CPU (2 cores:
        # 52 against 55 updates/s), so these are two plain networks.
        self.widths = [observation_dim, action_dim]
        self.qf1 = mlp(observation_dim + action_dim, hidden, 1, layer_norm)
        self.qf2 = mlp(observation_dim + action_dim, hidden, 1, layer_norm)

    def forward(self, observations, actions):
        values = []
        observations = self.normalize(observations)
        for first, *rest in (self.qf1, self.qf2):
            # The first layer in two products: the actor's step needs the gradient of the actions
            # alone, a twentieth of that of all inputs, and an update takes 6 % less time.
            of_observations, of_actions = first.weight.split(self.widths, 1)
            x = F.linear(observations, of_observations, first.bias)
            x = torch.addmm(x, actions, of_actions.T)
            for layer in rest:
                x = layer(x)
            values.append(x)
        return torch.cat(values, 1).T


LOG_STD_MIN, LOG_STD_MAX = -5, 2


class Actor(nn.Module):
    """Squashed Gaussian policy. Actions are in [-1, 1] everywhere but in `envs.step`: `to_env`."""

    def __init__(self, observation_dim, action_space, hidden, normalize=False):
        super().__init__()
        self.normalize = RunningNorm(observation_dim) if normalize else nn.Identity()
        self.net = mlp(observation_dim, hidden, 2 * math.prod(action_space.shape))
        bounds = np.stack([action_space.low, action_space.high]).astype(np.float32)
        low, high = torch.from_numpy(bounds).flatten(1)
        self.register_buffer("action_scale", (high - low) / 2)
        self.register_buffer("action_bias", (high + low) / 2)

    def forward(self, observations):
        """[B, O] -> mean [B, A] and log standard deviation [B, A] before squashing."""
        mean, log_std = self.net(self.normalize(observations)).chunk(2, dim=1)
        # tanh keeps log_std inside its range smoothly: clamping would stop the gradient there
        log_std = LOG_STD_MIN + 0.5 * (LOG_STD_MAX - LOG_STD_MIN) * (torch.tanh(log_std) + 1)
        return mean, log_std

    def sample(self, observations):
        """[B, O] -> actions [B, A] in [-1, 1] (reparameterised), log densities [B]."""
        mean, log_std = self(observations)
        noise = torch.randn_like(mean)
        x = mean + log_std.exp() * noise
        log_density = -0.5 * noise.square() - log_std - 0.5 * math.log(2 * math.pi)
        # minus log d tanh(x)/dx = log(1 - tanh(x)^2), in the form that does not overflow
        log_density = log_density - 2 * (math.log(2) - x - F.softplus(-2 * x))
        return torch.tanh(x), log_density.sum(1)

    def to_env(self, actions):
        """Actions in [-1, 1] -> in the environment's units."""
        return actions * self.action_scale + self.action_bias


# ------------------------------------------------------------------------------ replay and updates


class ReplayBuffer:
    """A ring of whole rollouts, float32. Fixed-length episodes have no reset inside, so the next
    observation is the following row: T + 1 rows for T steps, half the memory of storing both."""

    def __init__(self, rollouts, T, N, observation_dim, action_dim, device):
        self.rollout_size, self.num_envs, self.count = T * N, N, 0  # count: rollouts ever added
        self.observations = torch.empty(rollouts, T + 1, N, observation_dim, device=device)
        self.actions = torch.empty(rollouts, T, N, action_dim, device=device)
        self.rewards = torch.empty(rollouts, T, N, device=device)
        self.rings = (self.observations, self.actions, self.rewards)

    def add(self, observations, actions, rewards):
        """One rollout: observations [T+1, N, O], actions [T, N, A], rewards [T, N]."""
        slot = self.count % len(self.rewards)
        for ring, rollout in zip(self.rings, (observations, actions, rewards), strict=True):
            ring[slot] = torch.as_tensor(rollout)
        self.count += 1

    def sample(self, batch_size):
        """-> observations [B, O], next observations [B, O], actions [B, A], rewards [B]."""
        filled = min(self.count, len(self.rewards)) * self.rollout_size
        index = torch.randint(filled, (batch_size,), device=self.rewards.device)
        row = index + index // self.rollout_size * self.num_envs  # one row more in every rollout
        observations = self.observations.flatten(0, 2)
        now, later = observations[row], observations[row + self.num_envs]
        return now, later, self.actions.flatten(0, 2)[index], self.rewards.flatten()[index]

    def state_dict(self):
        filled = [ring[: self.count] for ring in self.rings]
        # torch.save writes all that lies behind a slice, hence the copy of a ring that is not full
        full = self.count >= len(self.rewards)
        return {"count": self.count, "rings": filled if full else [x.clone() for x in filled]}

    def load_state_dict(self, state):
        self.count = state["count"]
        for ring, filled in zip(self.rings, state["rings"], strict=True):
            ring[: len(filled)] = filled


def update_critic(batch, actor, critic, target_critic, optimizer, alpha, gamma):
    """One step on the soft Bellman error -> losses [2], mean values [2]."""
    observations, next_observations, actions, rewards = batch
    with torch.no_grad():
        next_actions, next_log_density = actor.sample(next_observations)
        next_values = target_critic(next_observations, next_actions).amin(0)
        # No (1 - done): nothing terminates here. The end of an episode is a time limit, that is a
        # truncation, and the value of the last state is bootstrapped like any other.
        targets = rewards + gamma * (next_values - alpha * next_log_density)
    values = critic(observations, actions)
    losses = (values - targets).square().mean(1)
    optimizer.zero_grad()
    losses.sum().backward()
    optimizer.step()
    return losses.detach(), values.detach().mean(1)


def update_actor(observations, actor, critic, optimizer, alpha):
    """One step up the soft value of the policy's own actions -> loss [], log densities [B]."""
    actions, log_density = actor.sample(observations)
    loss = (alpha * log_density - critic(observations, actions).amin(0)).mean()
    optimizer.zero_grad()
    loss.backward(inputs=list(actor.parameters()))  # spares the gradients of the critics' weights
    optimizer.step()
    return loss.detach(), log_density.detach()


LOSSES = "qf1_loss qf2_loss qf1_values qf2_values actor_loss alpha_loss alpha entropy".split()


def make_learner(args: Args, observation_dim, action_space, device):
    """Networks and optimisers by name, and the logarithm of the entropy coefficient []."""
    hidden = args.hidden_size
    actor = Actor(observation_dim, action_space, hidden, args.normalize_observations).to(device)
    shape = (observation_dim, math.prod(action_space.shape), hidden, args.layer_norm)
    critic, target_critic = (TwinCritic(*shape, actor.normalize).to(device) for _ in range(2))
    target_critic.load_state_dict(critic.state_dict())
    target_critic.requires_grad_(False)
    log_alpha = torch.tensor(args.entropy_coef, device=device).log()
    log_alpha.requires_grad_(args.autotune)
    # capturable: by a CUDA graph
    adam = functools.partial(
        torch.optim.Adam, fused=True, capturable=args.compile and device.type == "cuda"
    )
    learner = {
        "actor": actor,
        "critic": critic,
        "target_critic": target_critic,
        "actor_optimizer": adam(actor.parameters(), lr=args.policy_lr),
        "critic_optimizer": adam(critic.parameters(), lr=args.q_lr),
        "alpha_optimizer": adam([log_alpha], lr=args.q_lr),
    }
    return learner, log_alpha


def update(batch, learner, log_alpha, args: Args):
    """One step of critics, actor, entropy coefficient and target critics -> [8], see LOSSES."""
    actor, critic, target_critic, actor_optimizer, critic_optimizer, alpha_optimizer = (
        learner.values()
    )
    alpha = log_alpha.detach().exp()
    qf_losses, qf_values = update_critic(
        batch, actor, critic, target_critic, critic_optimizer, alpha, args.gamma
    )
    actor_loss, log_density = update_actor(batch[0], actor, critic, actor_optimizer, alpha)
    entropy, target_entropy = -log_density.mean(), -batch[2].shape[1]
    alpha_loss = alpha * (entropy - target_entropy)
    if args.autotune:
        log_alpha.grad = alpha_loss  # alpha = exp(log_alpha) is its own derivative
        alpha_optimizer.step()
    with torch.no_grad():
        params, target_params = list(critic.parameters()), list(target_critic.parameters())
        torch._foreach_lerp_(target_params, params, args.tau)
    scalars = torch.stack([actor_loss, alpha_loss, alpha, entropy])
    return torch.cat([qf_losses, qf_values, scalars])


def compile_update(update, device):
    """`update(batch)` by torch.compile and, on CUDA, as one CUDA graph: no Python and no gaps
    between its kernels. All batches must have the shapes of the first."""
    update = torch.compile(update, dynamic=False)
    if device.type != "cuda":
        return update
    graph, calls, inputs, output = torch.cuda.CUDAGraph(), 0, None, None

    def captured_update(batch):
        nonlocal calls, inputs, output
        batch = list(batch)  # one type for all: another would be compiled anew, while capturing
        calls += 1
        if calls <= 3:  # these compile, choose kernels and allocate what the optimisers keep
            stream = torch.cuda.Stream()  # capturing wants that to happen on another one
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                result = update(batch)
            torch.cuda.current_stream().wait_stream(stream)
            return result
        if calls == 4:
            inputs = [x.clone() for x in batch]
            with torch.cuda.graph(graph):
                output = update(inputs)  # runs nothing yet
        torch._foreach_copy_(inputs, batch)
        graph.replay()
        return output.clone()

    return captured_update


def save_files(files: dict) -> None:
    """torch.save {path: content}, then rename all at once: a kill leaves no half-written file."""
    for path, content in files.items():
        torch.save(content, f"{path}.tmp")
    for path in files:
        os.replace(f"{path}.tmp", path)


def evaluate(args: Args, actor: Actor, episodes: int, device) -> dict[str, float]:
    """Episodes of the policy without exploration: its mean action, on starts that training never
    had. -> "episodes", "episodic_return" and, where the task has one, "success_rate"."""
    N = args.num_envs
    envs = gym.vector.SyncVectorEnv([make_env(args.env_id)] * N)
    rounds = math.ceil(episodes / N)
    all_seeds = np.random.SeedSequence((args.seed, 0, 1)).generate_state(rounds * N)
    returns, successes = [], []
    for seeds in all_seeds.reshape(rounds, N).tolist():
        observations, _ = envs.reset(seed=seeds)
        totals = np.zeros(N)
        for _ in range(args.episode_length):
            with torch.no_grad():
                mean, _ = actor(torch.as_tensor(observations, dtype=torch.float32, device=device))
                action = actor.to_env(torch.tanh(mean)).cpu().numpy()
            observations, rewards, _, _, infos = envs.step(action.reshape(envs.action_space.shape))
            totals += rewards
        returns.extend(totals)
        successes.extend(infos.get("success", ()))
    envs.close()
    result = {"episodes": episodes, "episodic_return": float(np.mean(returns[:episodes]))}
    if successes:
        result["success_rate"] = float(np.mean(successes[:episodes]))
    return result


@dataclass
class Rollout:
    """One episode of every environment, whose rewards may still be on their way."""

    observations: np.ndarray  # [T + 1, N, O] float32
    actions: np.ndarray  # [T, N, A] float32 in [-1, 1]
    env_rewards: np.ndarray  # [T, N] float64, the environment's own
    scenes: np.ndarray | None  # of s' of every step: states [T, N, S] or frames [T, N, H, W, 3]
    successes: np.ndarray | None  # [N] bool
    policy: dict | None  # the actor's parameters; None: random actions
    physics_s: float
    future: clip_reward.RewardFuture | None = None  # of the rewards [T * N]

    def state_dict(self):
        def tensor(x):
            return torch.from_numpy(x) if isinstance(x, np.ndarray) else x

        return {name: tensor(x) for name, x in vars(self).items() if name != "future"}

    @classmethod
    def from_state_dict(cls, state):
        """The same but for its future."""
        return cls(**{k: v.numpy() if torch.is_tensor(v) else v for k, v in state.items()})


def crossed(every: int, before: int, after: int) -> bool:
    """Whether a multiple of `every` lies in (before, after]; 0 is never."""
    return every > 0 and before // every != after // every


if __name__ == "__main__":
    try:
        args = parse_args()
        check_args(args)
        scene, classic = check_env(args.env_id), args.env_id == MOUNTAIN_CAR
        use_clip = args.reward == "clip"
        cuda = torch.cuda.is_available() and args.cuda
        gpus = [f"cuda:{i}" for i in range(torch.cuda.device_count())]
        # without a GPU a worker per core: on two cores 264 steps/s instead of 156 with one
        cpus = ["cpu"] * min(4, os.cpu_count() or 1)
        reward_devices = list(args.reward_devices) or gpus or cpus
        if not use_clip and args.video_freq == 0:
            scene = None  # nothing is drawn
        quality = args.render_quality
        if scene == "states" and not classic:
            _, gl = egl_render.choose_gl(reward_devices[0])  # raises if nothing can draw
            if quality == "auto":
                quality = "light" if egl_render.is_software(gl) else "full"
        if use_clip:
            model, cache_dir = args.clip_model, args.clip_cache_dir
            frames = args.total_timesteps
            clip_reward.check_cost(model, reward_devices, frames, args.allow_slow, cache_dir)
            clip_reward.check_model(model, cache_dir)  # downloads once, before there are workers
    except (UsageError, egl_render.GLError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    sys.stdout.reconfigure(line_buffering=True)  # a line per rollout in log files as well

    run_name = f"{args.env_id}__{args.exp_name}__{args.seed}__{int(time.time())}".replace("/", "_")
    run_dir = Path(args.resume or f"{args.runs_dir}/{run_name}")
    (run_dir / "checkpoints").mkdir(parents=True, exist_ok=True)
    (run_dir / "args.json").write_text(json.dumps(vars(args), indent=2))
    checkpoint = None
    if args.resume:
        newest = max(run_dir.glob("checkpoints/step_*.pt"), key=lambda p: int(p.stem[5:]))
        checkpoint = torch.load(newest, map_location="cpu", weights_only=True)
    if args.track:
        import wandb

        wandb.init(
            project=args.wandb_project_name,
            entity=args.wandb_entity,
            sync_tensorboard=True,
            config=vars(args),
            name=run_dir.name,
            dir=run_dir,
        )
    from torch.utils.tensorboard import SummaryWriter  # slow to import: not before --help

    writer = SummaryWriter(
        run_dir, purge_step=checkpoint["global_step"] + 1 if checkpoint else None
    )
    rows = "\n".join(f"|{name}|{value}|" for name, value in vars(args).items())
    writer.add_text("hyperparameters", f"|parameter|value|\n|-|-|\n{rows}")

    torch.manual_seed(args.seed)  # of the networks; the loop seeds again for every rollout
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # determinism wants it
    torch.use_deterministic_algorithms(args.torch_deterministic)
    torch.utils.deterministic.fill_uninitialized_memory = False  # it would touch the whole buffer
    device = torch.device("cuda" if cuda else "cpu")

    # The reward workers start in the background, and load CLIP while the environments are made.
    pool = None
    if use_clip or scene == "states":
        draw = functools.partial(make_renderer, args, quality=quality)
        score = functools.partial(
            clip_reward.make_clip_reward,
            clip_model=args.clip_model,
            target_prompts=args.target_prompt,
            baseline_prompts=args.baseline_prompt,
            alpha=args.reward_alpha,
            precision=args.clip_precision,
            cache_dir=args.clip_cache_dir,
        )
        pool = clip_reward.RewardPool(
            functools.partial(draw, size=args.render_size) if scene == "states" else None,
            score if use_clip else None,
            devices=reward_devices if use_clip else reward_devices[:1],
            batch_size=args.clip_batch_size,
            make_video_renderer=functools.partial(
                draw, size=None if classic else max(args.render_size, 240)
            ),
            needs_gl=not classic,
        )

    # Environments. Without autoreset the last observation and picture are those of the episode.
    thunks = [make_env(args.env_id, scene, args.render_size)] * args.num_envs
    options = {"copy": False, "autoreset_mode": gym.vector.AutoresetMode.DISABLED}
    if args.num_envs == 1 or classic:
        envs = gym.vector.SyncVectorEnv(thunks, **options)
    else:
        # forkserver: processes share what is imported once, and inherit neither CUDA nor each
        # other's pipes, so that they end when this process does, however it does.
        multiprocessing.set_forkserver_preload(["torch", "tyro", "tqdm", "gymnasium.envs.mujoco"])
        atexit.register(lambda: [p.kill() for p in multiprocessing.active_children()])
        envs = gym.vector.AsyncVectorEnv(thunks, context="forkserver", **options)
    T, N = args.episode_length, args.num_envs
    observation_dim = envs.single_observation_space.shape[0]
    action_shape = envs.single_action_space.shape
    action_dim = math.prod(action_shape)

    # Networks and optimisers. The entropy is that of actions in [-1, 1], whatever their units are.
    learner, log_alpha = make_learner(args, observation_dim, envs.single_action_space, device)
    actor = learner["actor"]
    learn = functools.partial(update, learner=learner, log_alpha=log_alpha, args=args)
    if args.compile:
        learn = compile_update(learn, device)

    # Replay buffer: on the GPU if that leaves half of what is free there once CLIP is loaded.
    if pool:
        pool.wait_ready()
        print(*(f"reward worker: {line}" for line in pool.description), sep="\n")
    planned = max(args.total_timesteps, checkpoint["global_step"] if checkpoint else 0)
    rollouts = min(args.buffer_size // (T * N), math.ceil(planned / (T * N)))
    buffer_bytes = 4 * rollouts * N * ((T + 1) * observation_dim + T * (action_dim + 1))
    fits = cuda and buffer_bytes < torch.cuda.mem_get_info()[0] / 2
    buffer_device = device if fits else torch.device("cpu")
    buffer = ReplayBuffer(rollouts, T, N, observation_dim, action_dim, buffer_device)

    global_step, rollout, best_reward, history = 0, 0, -math.inf, []
    ahead = deque()  # rollouts played and not yet learned from: one more with --async-rewards
    if checkpoint:
        for name, part in learner.items():
            state = checkpoint[name]
            if "param_groups" in state:  # but for the settings, which are this run's and device's
                state = state | {"param_groups": part.state_dict()["param_groups"]}
            part.load_state_dict(state)
        log_alpha.data.copy_(checkpoint["log_alpha"])
        global_step, rollout = checkpoint["global_step"], checkpoint["rollout"]
        best_reward, history = checkpoint["best_reward"], checkpoint["history"]
        replay = torch.load(run_dir / "checkpoints/replay_buffer.pt", map_location="cpu", mmap=True)
        if replay["count"] != rollout:
            print("WARNING: the replay buffer is newer than the checkpoint", file=sys.stderr)
        buffer.load_state_dict(replay)
        ahead.extend(Rollout.from_state_dict(state) for state in replay.get("ahead", ()))
        del replay  # mapped, it would keep the file's space until the end

    print(
        f"{args.env_id}: {N} environments, observations [{observation_dim}], actions [{action_dim}]"
    )
    print(f"learner on {device}, replay buffer {buffer_bytes / 1e9:.2f} GB on {buffer_device}")
    print(f"run folder {run_dir}\ncurves: tensorboard --logdir {args.runs_dir}")

    # Ctrl-C or SIGTERM: finish this rollout, save a checkpoint, end. A second one: end now.
    signals = []

    def stop(number, _):
        if signals:
            sys.exit(128 + number)
        signals.append(number)
        os.write(2, b"\nstopping after this rollout; once more to stop now\n")

    signal.signal(signal.SIGINT, stop)
    signal.signal(signal.SIGTERM, stop)

    def request_rewards(played: Rollout):
        batch = played.scenes.reshape(T * N, *played.scenes.shape[2:])
        return pool.submit(**{scene: batch})

    for played in ahead if use_clip else ():
        played.future = request_rewards(played)
    first_step, first_time = global_step, time.perf_counter()
    bar = tqdm(
        total=args.total_timesteps, initial=global_step, unit="step", smoothing=0.1, disable=None
    )
    done = global_step >= args.total_timesteps
    while not done:
        # 1. One episode of every environment: physics only. With --async-rewards the workers score
        # one rollout while the next is played and the one before is learned from.
        while len(ahead) <= args.async_rewards:
            number = rollout + len(ahead)  # of the rollout to play
            # All randomness follows from (seed, number of the rollout): a resumed run goes on as
            # the uninterrupted one would have, without any generator's state being saved.
            *env_seeds, torch_seed = np.random.SeedSequence((args.seed, number)).generate_state(
                N + 1
            )
            torch.manual_seed(int(torch_seed))
            if number * T * N >= args.total_timesteps:
                break
            learned_from = max(0, number - args.async_rewards)  # rollouts, when this one is played
            random_actions = learned_from * T * N < args.learning_starts
            t0 = time.perf_counter()
            observations = np.empty((T + 1, N, observation_dim), np.float32)
            actions = np.empty((T, N, action_dim), np.float32)
            env_rewards, scenes = np.empty((T, N)), None
            observations[0], _ = envs.reset(seed=[int(seed) for seed in env_seeds])
            for t in range(T):
                with torch.no_grad():
                    if random_actions and t % args.random_repeat == 0:
                        action = torch.rand(N, action_dim, device=device) * 2 - 1
                    elif not random_actions:
                        action, _ = actor.sample(torch.as_tensor(observations[t], device=device))
                    env_action = actor.to_env(action).reshape(N, *action_shape).cpu().numpy()
                observations[t + 1], env_rewards[t], _, _, infos = envs.step(env_action)
                actions[t] = action.cpu().numpy()
                if scene:
                    if scenes is None:
                        scenes = np.empty((T, *infos[scene].shape), infos[scene].dtype)
                    scenes[t] = infos[scene]
            policy = None if random_actions else copy.deepcopy(actor.state_dict())
            played = Rollout(
                *(observations, actions, env_rewards, scenes, infos.get("success"), policy),
                physics_s=time.perf_counter() - t0,
            )
            if use_clip:
                played.future = request_rewards(played)
            ahead.append(played)

        # 2. Their rewards, all at once: that of (s, a, s') is that of the picture of s'
        t1 = time.perf_counter()
        played = ahead.popleft()
        rewards = played.future.result().reshape(T, N) if use_clip else played.env_rewards
        buffer.add(played.observations, played.actions, rewards)
        if args.normalize_observations:
            actor.normalize.add(torch.as_tensor(played.observations, device=device))
        rollout, previous_step, global_step = rollout + 1, global_step, global_step + T * N
        history.append(float(rewards.mean()))
        if played.policy and history[-1] > best_reward:
            best_reward = history[-1]
            best = {"actor": played.policy, "global_step": global_step, "reward": best_reward}
            save_files({run_dir / "checkpoints/best.pt": best})

        # 3. Learn
        t2 = time.perf_counter()
        losses = []
        for _ in range(args.gradient_steps if global_step >= args.learning_starts else 0):
            losses.append(learn([x.to(device) for x in buffer.sample(args.batch_size)]))
        if losses:
            losses = torch.stack(losses).mean(0).tolist()  # the only wait for the GPU

        # 4. Log
        t3 = time.perf_counter()
        logs = {f"losses/{name}": x for name, x in zip(LOSSES, losses, strict=False)}
        timings = pool.timings if use_clip else {"render_s": 0.0, "clip_s": 0.0}
        logs |= {f"time/{name}": seconds for name, seconds in timings.items()}
        logs |= {"time/physics_s": played.physics_s, "time/update_s": t3 - t2}
        logs["charts/episodic_return"] = played.env_rewards.sum(0).mean()
        if played.successes is not None:
            logs["charts/success_rate"] = played.successes.mean()
        logs["charts/SPS"] = (global_step - first_step) / (t3 - first_time)
        line = f"step {global_step:,}  return {logs['charts/episodic_return']:.1f}"
        if played.successes is not None:
            line += f"  success {played.successes.mean():.2f}"
        if use_clip:
            logs["charts/clip_reward"] = rewards.mean()
            logs["charts/episodic_clip_return"] = rewards.sum(0).mean()
            line += f"  clip_reward {rewards.mean():.4f}"
        for name, value in logs.items():
            writer.add_scalar(name, value, global_step)
        bar.update(T * N)
        line += f"  {logs['charts/SPS']:.0f} steps/s  physics {played.physics_s:.1f} s"
        line += f", reward {t2 - t1:.1f} s, update {t3 - t2:.1f} s"
        bar.write(line + "  (random actions)" * (played.policy is None))

        # 5. Keep
        done = global_step >= args.total_timesteps or bool(signals)
        due = done and not signals or crossed(args.video_freq, previous_step, global_step)
        if args.video_freq and due and played.scenes is not None:  # the first environment's episode
            frames = played.scenes[:, 0]
            frames = pool.render(frames) if scene == "states" else frames
            fps = envs.metadata.get("render_fps", 30)
            egl_render.write_video(run_dir / f"videos/step_{global_step}.mp4", frames, fps)
            thin = math.ceil(max(frames.shape[1:3]) / 200)  # TensorBoard takes GIFs: small ones
            thumbnails = frames[:, ::thin, ::thin]
            egl_render.add_video(writer, "videos/rollout", thumbnails, global_step, fps)
        if done or crossed(args.checkpoint_freq, previous_step, global_step):
            state = {name: part.state_dict() for name, part in learner.items()}
            state |= {"log_alpha": log_alpha.detach(), "global_step": global_step}
            state |= {"rollout": rollout, "best_reward": best_reward, "history": history}
            replay = buffer.state_dict() | {"ahead": [x.state_dict() for x in ahead]}
            folder = run_dir / "checkpoints"
            save_files(
                {
                    folder / "replay_buffer.pt": replay,
                    folder / f"step_{global_step}.pt": state,
                }
            )
            del replay  # a copy of what is filled: it would be kept until the next checkpoint

    envs.close()
    bar.close()
    tenth = max(1, len(history) // 10)
    first, last = np.mean(history[:tenth]), np.mean(history[-tenth:])
    speed = (global_step - first_step) / (time.perf_counter() - first_time)
    print(f"{global_step:,} steps, {speed:.0f} steps/s")
    print(f"{args.reward} reward per step: {first:.4f} in the first tenth, {last:.4f} in the last")
    if best_reward > -math.inf:
        print(f"best rollout of the learned policy: {best_reward:.4f} (checkpoints/best.pt)")
    episodes = args.eval_episodes if args.eval_episodes is not None else 100 * classic
    if episodes and best_reward > -math.inf and global_step >= args.total_timesteps:
        # The paper, too, judges the policy that had the highest reward in training
        best = torch.load(run_dir / "checkpoints/best.pt", map_location=device, weights_only=True)
        actor.load_state_dict(best["actor"])
        result = evaluate(args, actor, episodes, device)
        result["checkpoint_step"] = best["global_step"]
        (run_dir / "evaluation.json").write_text(json.dumps(result, indent=2))
        for name in ("success_rate", "episodic_return"):
            if name in result:
                writer.add_scalar(f"eval/{name}", result[name], global_step)
        line = f"evaluation of checkpoints/best.pt: {episodes} episodes"
        if "success_rate" in result:
            line += f", success {100 * result['success_rate']:.0f} %"
        print(line + f", return {result['episodic_return']:.1f}")
    writer.close()
    print(f"videos and checkpoints are in {run_dir}\ncurves: tensorboard --logdir {args.runs_dir}")
    if signals and global_step < args.total_timesteps:
        print(f"stopped before the end; go on with: python {sys.argv[0]} --resume {run_dir}")
        sys.exit(128 + signals[0])
