"""DQN from a sentence: the reward of a step is how well CLIP finds its picture to fit the words.
(VLM-RM, arXiv 2310.12921; double DQN, arXiv 1509.06461.) The whole experiment is in this file.

CartPole, the paper's setting (ViT-bigG-14, 3 million steps):

    python dqn_clip_classic.py --target-prompt "pole vertically upright on top of the cart"

Offline on a laptop, with the small CLIP that comes with the project:

    python dqn_clip_classic.py --target-prompt "pole vertically upright on top of the cart" \
        --clip-model local-dir:tiny_clip --render-size 64 --num-envs 4 --learning-starts 1000 \
        --total-timesteps 40000 --learning-rate 5e-4 --anneal-lr --tau 0.01 \
        --target-network-frequency 1 --best-window 5

MountainCar in the same way:

    python dqn_clip_classic.py --env-id MountainCar-v0 \
        --target-prompt "a car at the peak of the mountain, next to the yellow flag" \
        --clip-model local-dir:tiny_clip --render-size 64 --num-envs 4 --learning-starts 1000 \
        --total-timesteps 60000 --learning-rate 5e-4 --anneal-lr --tau 0.01 \
        --target-network-frequency 1 --best-window 5

DQN itself, on Gymnasium's own CartPole (475 is its mark for solved):

    python dqn_clip_classic.py --reward ground-truth --terminate --episode-length 500 \
        --total-timesteps 100000 --learning-starts 1000 --gradient-steps 250 \
        --learning-rate 3e-4 --anneal-lr --tau 0.02 --target-network-frequency 1 --layer-norm \
        --end-e 0.01 --best-window 10 --video-freq 0
"""

from __future__ import annotations

import copy
import functools
import json
import math
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

# Before torch, as in sac_clip_humanoid.py: threads that wait must not take the workers' cores.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
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
    """seed of everything: network, environments, exploration, replay"""
    torch_deterministic: bool = True
    """use deterministic algorithms on the GPU as well"""
    cuda: bool = True
    """learn on the GPU if there is one"""
    compile: bool = False
    """updates by torch.compile, and on the GPU as one CUDA graph: faster once that is compiled"""
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
    """what the scene is anyway ("pole and cart"); several are averaged; --reward-alpha needs it"""
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

    # What CLIP sees
    render_size: int = 480
    """height and width of the frames in pixels"""
    textured: bool = True
    """MountainCar as a landscape with rock, snow and sky; CartPole is always plain"""

    # The algorithm
    env_id: str = "CartPole-v1"
    """CartPole-v1 or MountainCar-v0"""
    total_timesteps: int = 3_000_000
    """environment steps in all, rounded up to whole rollouts"""
    num_envs: int = 1
    """environments stepped in turn by this process"""
    episode_length: int = 200
    """steps of every episode; a rollout is one episode of each environment"""
    terminate: bool = False
    """end episodes where Gymnasium ends them, to check DQN itself (only --reward ground-truth)"""
    buffer_size: int = 100_000
    """transitions in the replay buffer"""
    gamma: float = 0.99
    """discount factor"""
    batch_size: int = 64
    """transitions per update"""
    learning_starts: int = 75_000
    """steps of random actions before the first update"""
    gradient_steps: int = 200
    """updates after each rollout (num_envs * episode_length steps; fewer after a shorter one)"""
    target_network_frequency: int = 200
    """updates between those of the target network"""
    tau: float = 1.0
    """share of the network that moves into the target network then; 1: a copy"""
    double: bool = True
    """double DQN: the network chooses the next action, the target network judges it; without, the
    target network does both"""
    async_rewards: bool = False
    """play the next rollout and learn while the workers score this one: the policy that plays is
    one rollout older (not in the paper)"""
    learning_rate: float = 2.3e-3
    """learning rate of the network"""
    anneal_lr: bool = False
    """let the learning rate fall linearly to 0 over total_timesteps (not in the paper)"""
    max_grad_norm: float = 10.0
    """longer gradients are cut to this length"""
    hidden_size: int = 256
    """width of the two hidden layers"""
    layer_norm: bool = False
    """normalise the hidden layers, against values that run away (not in the paper)"""
    start_e: float = 1.0
    """share of random actions at first (of a rollout's actions: it changes between rollouts)"""
    end_e: float = 0.04
    """share of random actions in the end"""
    exploration_fraction: float = 0.16
    """part of total_timesteps over which the share falls from start_e to end_e"""

    # What is kept
    runs_dir: str = "runs"
    """the folder that gets a folder for this run"""
    checkpoint_freq: int = 64_000
    """steps between checkpoints; the end of the run always has one"""
    video_freq: int = 64_000
    """steps between videos, and one at the end; 0: none"""
    best_window: int = 1
    """rollouts in a row whose mean reward is compared to choose checkpoints/best.pt"""
    eval_episodes: int = 100
    """episodes without exploration that checkpoints/best.pt plays when training ends; 0: none"""
    resume: str | None = None
    """folder of the run to go on with, as it was started; flags beside it that do not change the
    experiment are accepted, such as a larger --total-timesteps (which stretches the schedules)"""


# What flags beside --resume may change: how long, where and how often, but not what is learned.
RESUME_MAY_CHANGE = (
    "total_timesteps checkpoint_freq video_freq reward_devices clip_batch_size clip_cache_dir "
    "allow_slow cuda compile track eval_episodes resume"
).split()
POSITIVE = (
    "total_timesteps num_envs episode_length buffer_size batch_size gradient_steps learning_rate "
    "target_network_frequency max_grad_norm hidden_size best_window render_size"
).split()
NOT_NEGATIVE = "seed learning_starts checkpoint_freq video_freq eval_episodes".split()
SHARES = "reward_alpha start_e end_e exploration_fraction".split()


def parse_args() -> Args:
    """The command line; with --resume on top of the flags that the run was started with.

    Raises:
        UsageError: --resume names no run, or would change what the run is about.
    """
    args = tyro.cli(Args, description=__doc__)
    if args.resume is None:
        return args
    run_dir = Path(args.resume)
    if not (run_dir / "args.json").is_file():
        raise UsageError(f"--resume {run_dir}: not the folder of a run, it has no args.json")
    if not list(run_dir.glob("checkpoints/step_*.pt")):
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
    """Find, in well under a second, every mistake that needs no model.

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
    for name in SHARES:
        require(0 <= getattr(args, name) <= 1, name, "is outside [0, 1]")
    compiler = os.environ.get("CXX", "g++")
    require(not args.compile or shutil.which(compiler), "compile", f"needs a compiler, {compiler}")
    require(0 <= args.gamma < 1, "gamma", "is outside [0, 1)")
    require(0 < args.tau <= 1, "tau", "is outside (0, 1]")
    rollout = args.num_envs * args.episode_length
    require(
        args.buffer_size >= rollout, "buffer_size", f"is less than one rollout, {rollout} steps"
    )
    check_env(args.env_id)
    if args.reward == "clip":
        if not args.target_prompt or not all(map(str.strip, args.target_prompt)):
            example = "pole vertically upright on top of the cart"
            raise UsageError(f'say what to do: --target-prompt "{example}"')
        has_baseline = args.baseline_prompt and all(map(str.strip, args.baseline_prompt))
        require(args.reward_alpha == 0 or has_baseline, "reward_alpha", "needs a --baseline-prompt")
        same = sorted(args.target_prompt) == sorted(args.baseline_prompt)
        require(args.reward_alpha == 0 or not same, "baseline_prompt", "is the target prompt too")
        if args.terminate:
            raise UsageError("--terminate tells about the task: only with --reward ground-truth")
    here = ["cpu"] + [f"cuda:{i}" for i in range(torch.cuda.device_count())]
    for name in args.reward_devices:
        if name not in here:
            raise UsageError(f"--reward-devices {name} does not exist; here: {' '.join(here)}")
    try:
        os.makedirs(args.runs_dir, exist_ok=True)
        tempfile.TemporaryFile(dir=args.runs_dir).close()
    except OSError as error:
        require(False, "runs_dir", f"cannot be written: {error.strerror}")


def check_env(env_id: str) -> None:
    """Raises UsageError if this script has no version of the task without early ends."""
    if env_id in TASKS:
        return
    problem = f"this script has {' and '.join(TASKS)}"
    try:
        if isinstance(gym.make(env_id).action_space, gym.spaces.Box):
            problem = "has continuous actions; use sac_clip_humanoid.py"
    except (gym.error.Error, ImportError, ValueError):
        pass  # no such task, or not installed
    raise UsageError(f"--env-id {env_id}: {problem}")


# ------------------------------------------------------------------------------ environments


class CartPoleTask(gym.Wrapper):
    """CartPole that goes on after the pole has fallen: the cart stops at the ends of the track, the
    angle is kept in [-pi, pi]. The reward is 1 for every step that is not a failure by Gymnasium's
    rule (12 degrees, or off the track); an episode without any is a success.

    An early end would tell the agent about the task (section 4.1 of the paper), so nothing ends
    unless `terminate` says that Gymnasium's rules are to be left as they are.
    """

    def __init__(self, env, terminate):
        super().__init__(env)
        self.terminate, self.track = terminate, self.unwrapped.x_threshold
        if not terminate:  # all angles can be seen
            high = np.array([self.track, np.inf, math.pi, np.inf], np.float32)
            self.observation_space = gym.spaces.Box(-high, high)

    def reset(self, **kwargs):
        self.success = True  # of the episode so far
        return self.env.reset(**kwargs)

    def step(self, action):
        observation, reward, failed, _, info = self.env.step(action)
        self.success = self.success and not failed
        if self.terminate:
            return observation, reward, failed, False, info
        x, velocity, angle, spin = self.unwrapped.state
        if abs(x) > self.track:
            x, velocity = math.copysign(self.track, x), 0.0
        angle = (angle + math.pi) % (2 * math.pi) - math.pi
        self.unwrapped.state = np.array([x, velocity, angle, spin])
        self.unwrapped.steps_beyond_terminated = None  # else it warns at every further step
        return self.unwrapped.state.astype(np.float32), float(not failed), False, False, info


class MountainCarTask(gym.Wrapper):
    """MountainCar whose goal is absorbing: the car stays where it reached it, and the reward, -1 a
    step before, is 0 from then on. An episode that reaches the goal is a success."""

    def __init__(self, env, terminate):
        super().__init__(env)
        self.terminate = terminate

    def reset(self, **kwargs):
        self.success = False
        return self.env.reset(**kwargs)

    def step(self, action):
        if self.success:
            return np.array(self.unwrapped.state, np.float32), 0.0, False, False, {}
        observation, reward, self.success, _, info = self.env.step(action)
        return observation, reward, self.terminate and self.success, False, info


TASKS = {"CartPole-v1": CartPoleTask, "MountainCar-v0": MountainCarTask}


def make_env(env_id: str, terminate: bool = False) -> gym.Env:
    # max_episode_steps=-1: no time limit. The checker would complain of angles beyond 24 degrees.
    env = gym.make(env_id, max_episode_steps=-1, disable_env_checker=True)
    return TASKS[env_id](env, terminate)


def play(envs, seeds, length, policy):
    """One episode of each of N environments, of `length` steps or up to a termination.

    policy(t, observations [N, O]) -> actions [N].
    -> dict of observations [T, N, O] and next_observations float32, states [T, N, S] float64 (of
    s'), actions [T, N] int64, rewards and terminations [T, N], and valid [T, N] bool: which of all
    these came to pass (the others are 0).
    """
    first = np.stack([env.reset(seed=int(seed))[0] for env, seed in zip(envs, seeds, strict=True)])
    T, N = length, len(envs)
    episode = {
        "observations": np.zeros((T, *first.shape), np.float32),
        "next_observations": np.zeros((T, *first.shape), np.float32),
        "actions": np.zeros((T, N), np.int64),
        "rewards": np.zeros((T, N)),
        "terminations": np.zeros((T, N)),
        "states": np.zeros((T, N, len(envs[0].unwrapped.state))),
        "valid": np.zeros((T, N), bool),
    }
    observations, later, actions, rewards, terminations, states, valid = episode.values()
    running = list(range(N))
    for t in range(T):
        observations[t] = later[t - 1] if t else first
        actions[t] = policy(t, observations[t])
        for n in running:
            step = envs[n].step(int(actions[t, n]))
            later[t, n], rewards[t, n], terminations[t, n], _, _ = step
            states[t, n], valid[t, n] = envs[n].unwrapped.state, True
        if terminations[t].any():
            running = [n for n in running if not terminations[t, n]]
            if not running:
                break
    return episode


def make_renderer(env_id: str, size: int | None, textured: bool):
    """What draws states; called in every reward worker."""
    return egl_render.ClassicRenderer(env_id, size, textured and env_id != "CartPole-v1")


# ------------------------------------------------------------------------------ network


class QNetwork(nn.Module):
    """Observations [B, O] -> values of all actions [B, A]."""

    def __init__(self, observation_dim, actions, hidden, layer_norm=False):
        super().__init__()
        layers = []
        for inputs in (observation_dim, hidden):
            layers += [nn.Linear(inputs, hidden), *([nn.LayerNorm(hidden)] * layer_norm)]
            layers.append(nn.ReLU(inplace=True))
        self.net = nn.Sequential(*layers, nn.Linear(hidden, actions))

    def forward(self, observations):
        return self.net(observations)

    def outputs(self, observations):
        """[B, O] -> the observations and what every layer makes of them, the values [B, A] last.
        (ReLU works in place: its input is lost, but positive where its output is.)"""
        outputs = [observations]
        for layer in self.net:
            outputs.append(layer(outputs[-1]))
        return outputs

    def gradients(self, outputs, gradient):
        """`outputs` and the loss's gradient with respect to the values [B, A] -> its gradients with
        respect to all parameters, in their order."""
        gradients = []
        layers = list(zip(self.net, outputs))
        for i, (layer, x) in reversed(list(enumerate(layers))):
            if isinstance(layer, nn.Linear):
                gradients += [gradient.sum(0), gradient.T @ x]
                gradient = gradient @ layer.weight if i else None
            elif isinstance(layer, nn.ReLU):
                gradient = torch.ops.aten.threshold_backward(gradient, x, 0)
            else:  # layer norm: weight * normal + bias
                variance, mean = torch.var_mean(x, 1, correction=0, keepdim=True)
                scale = (variance + layer.eps).rsqrt()
                normal = (x - mean) * scale
                gradients += [gradient.sum(0), (gradient * normal).sum(0)]
                gradient = gradient * layer.weight
                along = normal * (gradient * normal).mean(1, keepdim=True)
                gradient = scale * (gradient - gradient.mean(1, keepdim=True) - along)
        return gradients[::-1]

    def best_actions(self, observations):
        """Array [B, O] -> array [B] int64."""
        device = next(self.parameters()).device
        with torch.no_grad():
            return self(torch.as_tensor(observations, device=device)).argmax(1).cpu().numpy()


# ------------------------------------------------------------------------------ replay and updates


class ReplayBuffer:
    """A ring of transitions."""

    def __init__(self, size, observation_dim, device):
        self.size, self.count = size, 0  # count: transitions ever added
        self.rings = (
            torch.empty(size, observation_dim, device=device),
            torch.empty(size, observation_dim, device=device),
            torch.empty(size, dtype=torch.int64, device=device),
            torch.empty(size, device=device),
            torch.empty(size, device=device),
        )

    def add(self, *transitions):
        """observations [K, O], next observations [K, O], actions [K], rewards [K], terminations
        [K]; K <= size."""
        slots = (self.count + torch.arange(len(transitions[0]))) % self.size
        for ring, column in zip(self.rings, transitions, strict=True):
            ring[slots] = torch.as_tensor(column).to(ring)
        self.count += len(slots)

    def sample(self, batch_size):
        """-> observations [B, O], next observations [B, O], actions [B], rewards [B],
        terminations [B] (1 where s' is the end and worth nothing)."""
        filled = min(self.count, self.size)
        index = torch.randint(filled, (batch_size,), device=self.rings[0].device)
        return [ring.index_select(0, index) for ring in self.rings]

    def state_dict(self):
        # torch.save writes all that lies behind a slice, hence the copy
        return {"count": self.count, "rings": [ring[: self.count].clone() for ring in self.rings]}

    def load_state_dict(self, state):
        self.count = state["count"]
        for ring, filled in zip(self.rings, state["rings"], strict=True):
            ring[: len(filled)] = filled


@torch.inference_mode()  # there is no autograd here: 7 % faster than under no_grad
def update(batch, q_network, target_network, optimizer, gamma, max_grad_norm, double=True):
    """One step on the Bellman error (Huber's) -> loss [], mean value []."""
    observations, next_observations, actions, rewards, terminations = batch
    B = len(rewards)
    inputs = torch.cat([observations, next_observations]) if double else observations
    outputs = q_network.outputs(inputs)
    next_values = target_network(next_observations)
    # The maximum of one network's own errors is too high (values of 150 on CartPole, where no
    # policy gets above 100). Double DQN: one network chooses, the other judges.
    choosing = outputs[-1][B:] if double else next_values
    next_values = next_values.gather(1, choosing.argmax(1, keepdim=True))[:, 0]
    # The end of an episode is a time limit, that is a truncation: the value of its last state
    # is bootstrapped like any other. Only --terminate makes terminations.
    targets = rewards + gamma * (1 - terminations) * next_values
    outputs = [x[:B] for x in outputs]  # of the observations
    values = outputs[-1].gather(1, actions[:, None])[:, 0]
    # The gradient by hand: with products this small autograd's bookkeeping takes as long as they do
    # (docs/results.md, updates).
    errors = values - targets
    slopes = errors.clamp(-1, 1)  # of Huber's loss
    taken = actions[:, None] == torch.arange(outputs[-1].shape[1], device=actions.device)
    gradients = q_network.gradients(outputs, taken * (slopes / B)[:, None])
    norm = torch.stack(torch._foreach_norm(gradients)).norm()
    torch._foreach_mul_(gradients, (max_grad_norm / (norm + 1e-6)).clamp(max=1.0))
    for parameter, gradient in zip(q_network.parameters(), gradients, strict=True):
        parameter.grad = gradient
    optimizer.step()
    loss = (slopes * (errors - slopes / 2)).mean()
    return torch.stack([loss, values.mean()])


def make_learner(args: Args, observation_dim, action_count, device):
    """The two networks and the optimiser by name."""
    shape = (observation_dim, action_count, args.hidden_size, args.layer_norm)
    q_network, target_network = QNetwork(*shape).to(device), QNetwork(*shape).to(device)
    target_network.load_state_dict(q_network.state_dict())
    target_network.requires_grad_(False)
    optimizer = torch.optim.Adam(
        q_network.parameters(),
        lr=torch.tensor(args.learning_rate, device=device),  # compiling makes numbers constants
        fused=True,
        capturable=args.compile and device.type == "cuda",  # by a CUDA graph
    )
    return {"q_network": q_network, "target_network": target_network, "optimizer": optimizer}


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


def linear_schedule(start: float, end: float, duration: float, step: int) -> float:
    """From `start` at step 0 to `end` at step `duration`, and `end` from there on."""
    return start + (end - start) * min(1.0, step / max(1, duration))


def save_files(files: dict) -> None:
    """torch.save {path: content}, then rename all at once: a kill leaves no half-written file."""
    for path, content in files.items():
        torch.save(content, f"{path}.tmp")
    for path in files:
        os.replace(f"{path}.tmp", path)


def crossed(every: int, before: int, after: int) -> bool:
    """Whether a multiple of `every` lies in (before, after]; 0 is never."""
    return every > 0 and before // every != after // every


if __name__ == "__main__":
    try:
        args = parse_args()
        check_args(args)
        use_clip = args.reward == "clip"
        cuda = torch.cuda.is_available() and args.cuda
        gpus = [f"cuda:{i}" for i in range(torch.cuda.device_count())]
        cpus = ["cpu"] * min(4, os.cpu_count() or 1)
        reward_devices = list(args.reward_devices) or gpus or cpus
        if use_clip:
            model, cache_dir = args.clip_model, args.clip_cache_dir
            frames = args.total_timesteps
            clip_reward.check_cost(model, reward_devices, frames, args.allow_slow, cache_dir)
            clip_reward.check_model(model, cache_dir)  # downloads once, before there are workers
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    sys.stdout.reconfigure(line_buffering=True)  # a line per rollout in log files as well

    run_name = f"{args.env_id}__{args.exp_name}__{args.seed}__{int(time.time())}".replace("/", "_")
    run_dir = Path(args.resume or f"{args.runs_dir}/{run_name}")
    folder = run_dir / "checkpoints"
    folder.mkdir(parents=True, exist_ok=True)
    (run_dir / "args.json").write_text(json.dumps(vars(args), indent=2))
    checkpoint = None
    if args.resume:
        newest = max(folder.glob("step_*.pt"), key=lambda p: int(p.stem[5:]))
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

    purge_step = checkpoint["global_step"] + 1 if checkpoint else None
    writer = SummaryWriter(run_dir, purge_step=purge_step)
    rows = "\n".join(f"|{name}|{value}|" for name, value in vars(args).items())
    writer.add_text("hyperparameters", f"|parameter|value|\n|-|-|\n{rows}")

    torch.manual_seed(args.seed)  # of the network; the loop seeds again for every rollout
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # determinism wants it
    torch.use_deterministic_algorithms(args.torch_deterministic)
    torch.utils.deterministic.fill_uninitialized_memory = False  # it would touch the whole buffer
    device = torch.device("cuda" if cuda else "cpu")
    torch.set_num_threads(1)  # such small products: 596 updates/s, with two threads 370 (2 cores)

    # The reward workers start in the background, and load CLIP meanwhile.
    draw = functools.partial(make_renderer, args.env_id, textured=args.textured)
    if use_clip:
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
            functools.partial(draw, size=args.render_size),
            score,
            devices=reward_devices,
            batch_size=args.clip_batch_size,
            needs_gl=False,
        )

    # Environments: a step takes microseconds, which is less than a message to another process
    T, N = args.episode_length, args.num_envs
    envs = [make_env(args.env_id, args.terminate) for _ in range(N)]
    observation_dim, action_count = envs[0].observation_space.shape[0], envs[0].action_space.n

    # Networks, optimiser, replay buffer
    learner = make_learner(args, observation_dim, action_count, device)
    q_network, target_network, optimizer = learner.values()
    params, target_params = list(q_network.parameters()), list(target_network.parameters())
    settings = {name: getattr(args, name) for name in ("gamma", "max_grad_norm", "double")}
    learn = functools.partial(update, **learner, **settings)
    if args.compile:
        learn = compile_update(learn, device)
    buffer = ReplayBuffer(args.buffer_size, observation_dim, device)

    global_step, rollout, updates, best_reward, history = 0, 0, 0, -math.inf, []
    ahead = deque()  # rollouts played and not yet learned from: one more with --async-rewards
    scores = deque(maxlen=args.best_window)  # mean rewards of the learned policy's last rollouts
    if checkpoint:
        for name, part in learner.items():
            state = checkpoint[name]
            if "param_groups" in state:  # but for the settings, which are this run's and device's
                state = state | {"param_groups": part.state_dict()["param_groups"]}
            part.load_state_dict(state)
        global_step, rollout = checkpoint["global_step"], checkpoint["rollout"]
        updates, best_reward = checkpoint["updates"], checkpoint["best_reward"]
        history = checkpoint["history"]
        scores.extend(checkpoint["scores"])
        replay = torch.load(folder / "replay_buffer.pt", map_location="cpu", weights_only=True)
        buffer.load_state_dict(replay)
        ahead.extend(
            {k: v.numpy() if torch.is_tensor(v) else v for k, v in episode.items()}
            for episode in replay.get("ahead", ())
        )
        if buffer.count != global_step:
            print("WARNING: the replay buffer is newer than the checkpoint", file=sys.stderr)
        del replay

    if use_clip:
        pool.wait_ready()
        print(*(f"reward worker: {line}" for line in pool.description), sep="\n")
    print(f"{args.env_id}: {N} environments, observations [{observation_dim}], ", end="")
    print(f"{action_count} actions; learner on {device}")
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

    def request_rewards(episode):
        return pool.submit(episode["states"].reshape(T * N, -1)) if use_clip else None

    # The rewards on their way, a future for each rollout in `ahead`
    futures = deque(request_rewards(episode) for episode in ahead)
    first_step, first_time = global_step, time.perf_counter()
    bar = tqdm(
        total=args.total_timesteps, initial=global_step, unit="step", smoothing=0.1, disable=None
    )
    done = global_step >= args.total_timesteps
    while not done:
        # 1. One episode of every environment. With --async-rewards the workers score one rollout
        # while the next is played and the one before is learned from.
        while len(ahead) <= args.async_rewards:
            # All randomness follows from (seed, number of the rollout): a resumed run goes on as
            # the uninterrupted one would have, without any generator's state being saved.
            sequence = np.random.SeedSequence((args.seed, rollout + len(ahead)))
            *env_seeds, torch_seed = sequence.generate_state(N + 1)
            torch.manual_seed(int(torch_seed))
            rng = np.random.default_rng(sequence)
            steps = global_step + sum(int(episode["valid"].sum()) for episode in ahead)
            if steps >= args.total_timesteps:
                break
            t0 = time.perf_counter()
            learned = updates > 0
            exploration_steps = args.exploration_fraction * args.total_timesteps
            epsilon = linear_schedule(args.start_e, args.end_e, exploration_steps, steps)
            epsilon = epsilon if learned else 1.0
            explore = rng.random((T, N)) < epsilon
            any_action = rng.integers(action_count, size=(T, N))

            def policy(t, observations):
                best_actions = q_network.best_actions(observations)
                return np.where(explore[t], any_action[t], best_actions)  # noqa: B023

            episode = play(envs, env_seeds, T, policy)
            episode["successes"] = np.array([env.success for env in envs])
            episode["epsilon"] = epsilon
            episode["q_network"] = copy.deepcopy(q_network.state_dict()) if learned else None
            episode["physics_s"] = time.perf_counter() - t0
            ahead.append(episode)
            futures.append(request_rewards(episode))

        # 2. Their rewards, all at once: that of (s, a, s') is that of the picture of s'
        t1 = time.perf_counter()
        episode, future = ahead.popleft(), futures.popleft()
        valid, env_rewards = episode["valid"], episode["rewards"]
        rewards = future.result().reshape(T, N) if use_clip else env_rewards
        learned = episode["q_network"] is not None
        buffer.add(
            episode["observations"][valid],
            episode["next_observations"][valid],
            episode["actions"][valid],
            rewards[valid],
            episode["terminations"][valid],
        )
        steps = int(valid.sum())
        rollout, previous_step, global_step = rollout + 1, global_step, global_step + steps
        history.append(float(rewards.mean()))
        if learned:
            scores.append(history[-1])
        if len(scores) == args.best_window and np.mean(scores) >= best_reward:
            best_reward = float(np.mean(scores))
            best = {"q_network": episode["q_network"], "global_step": global_step}
            save_files({folder / "best.pt": best | {"reward": best_reward}})

        # 3. Learn
        t2 = time.perf_counter()
        if args.anneal_lr:
            lr = linear_schedule(args.learning_rate, 0.0, args.total_timesteps, global_step)
            optimizer.param_groups[0]["lr"].fill_(lr)
        losses = []
        learning = global_step >= args.learning_starts
        for _ in range(math.ceil(args.gradient_steps * steps / (T * N)) if learning else 0):
            losses.append(learn(buffer.sample(args.batch_size)))
            updates += 1
            if updates % args.target_network_frequency == 0:
                with torch.no_grad():
                    torch._foreach_lerp_(target_params, params, args.tau)
        losses = torch.stack(losses).mean(0).tolist() if losses else []

        # 4. Log
        t3 = time.perf_counter()
        names = ("td_loss", "q_values")
        logs = {f"losses/{name}": x for name, x in zip(names, losses, strict=False)}
        timings = pool.timings if use_clip else {"render_s": 0.0, "clip_s": 0.0}
        logs |= {f"time/{name}": seconds for name, seconds in timings.items()}
        logs |= {"time/physics_s": episode["physics_s"], "time/update_s": t3 - t2}
        logs["charts/episodic_return"] = env_rewards.sum(0).mean()
        logs["charts/success_rate"] = episode["successes"].mean()
        logs["charts/epsilon"] = episode["epsilon"]
        logs["charts/SPS"] = (global_step - first_step) / (t3 - first_time)
        line = f"step {global_step:,}  return {logs['charts/episodic_return']:.1f}"
        line += f"  success {logs['charts/success_rate']:.2f}"
        if use_clip:
            logs["charts/clip_reward"] = rewards.mean()
            logs["charts/episodic_clip_return"] = rewards.sum(0).mean()
            line += f"  clip_reward {rewards.mean():.4f}"
        for name, value in logs.items():
            writer.add_scalar(name, value, global_step)
        bar.update(steps)
        line += f"  {logs['charts/SPS']:.0f} steps/s  physics {episode['physics_s']:.2f} s"
        line += f", reward {t2 - t1:.2f} s, update {t3 - t2:.2f} s"
        bar.write(line + "  (random actions)" * (not learned))

        # 5. Keep
        done = global_step >= args.total_timesteps or bool(signals)
        due = done and not signals or crossed(args.video_freq, previous_step, global_step)
        if args.video_freq and due:  # the first environment's episode
            frames = draw(size=None).render(episode["states"][valid[:, 0], 0])
            fps = envs[0].metadata["render_fps"]
            egl_render.write_video(run_dir / f"videos/step_{global_step}.mp4", frames, fps)
            # TensorBoard takes GIFs: small ones
            egl_render.add_video(writer, "videos/rollout", frames[:, ::3, ::3], global_step, fps)
        if done or crossed(args.checkpoint_freq, previous_step, global_step):
            state = {name: part.state_dict() for name, part in learner.items()}
            state |= {"global_step": global_step, "rollout": rollout, "updates": updates}
            state |= {"best_reward": best_reward, "history": history, "scores": list(scores)}
            replay = buffer.state_dict()
            replay["ahead"] = [
                {k: torch.from_numpy(v) if isinstance(v, np.ndarray) else v for k, v in x.items()}
                for x in ahead
            ]
            save_files(
                {
                    folder / "replay_buffer.pt": replay,
                    folder / f"step_{global_step}.pt": state,
                }
            )
            del replay  # a copy of what is filled: it would be kept until the next checkpoint

    bar.close()
    tenth = max(1, len(history) // 10)
    first, last = np.mean(history[:tenth]), np.mean(history[-tenth:])
    speed = (global_step - first_step) / (time.perf_counter() - first_time)
    print(f"{global_step:,} steps, {updates:,} updates, {speed:.0f} steps/s")
    print(f"{args.reward} reward per step: {first:.4f} in the first tenth, {last:.4f} in the last")
    if best_reward == -math.inf:
        print(
            f"no checkpoints/best.pt: less than {args.best_window} rollouts with a learned policy"
        )
    else:
        print(f"best policy in training: {best_reward:.4f} (checkpoints/best.pt)")
    if args.eval_episodes and best_reward > -math.inf and global_step >= args.total_timesteps:
        # The paper, too, judges the policy that had the highest reward in training
        best = torch.load(folder / "best.pt", map_location=device, weights_only=True)
        q_network.load_state_dict(best["q_network"])
        envs = [make_env(args.env_id, args.terminate) for _ in range(args.eval_episodes)]
        seeds = np.random.SeedSequence((args.seed, 0, 1)).generate_state(len(envs))  # new ones
        episode = play(envs, seeds, T, lambda t, observations: q_network.best_actions(observations))
        result = {
            "episodes": args.eval_episodes,
            "success_rate": float(np.mean([env.success for env in envs])),
            "episodic_return": float(episode["rewards"].sum(0).mean()),
            "checkpoint_step": best["global_step"],
        }
        (run_dir / "evaluation.json").write_text(json.dumps(result, indent=2))
        for name in ("success_rate", "episodic_return"):
            writer.add_scalar(f"eval/{name}", result[name], global_step)
        print(f"evaluation of checkpoints/best.pt: {args.eval_episodes} episodes, ", end="")
        print(
            f"success {100 * result['success_rate']:.0f} %, return {result['episodic_return']:.1f}"
        )
    writer.close()
    print(f"videos and checkpoints are in {run_dir}\ncurves: tensorboard --logdir {args.runs_dir}")
    if signals and global_step < args.total_timesteps:
        print(f"stopped before the end; go on with: python {sys.argv[0]} --resume {run_dir}")
        sys.exit(128 + signals[0])
