"""Updates per second of SAC and DQN: the scripts' own functions, with sampling from their replay.

    python benchmarks/updates.py                          # plain, compiled and, on CUDA, captured
    python benchmarks/updates.py --rows plain --sb3       # pip install stable-baselines3
    python benchmarks/updates.py --device cuda --json updates.json

SAC with Humanoid's observations and actions and 512 transitions an update, DQN with CartPole's and
64, both with the scripts' networks. Everything is measured in turn, round after round in the same
process, so that what else the machine does hits all alike; the numbers are medians over rounds, the
ratios to stable-baselines3 medians of each round's ratio.
"""

import dataclasses
import functools
import json
import os
import platform
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

# isort: off
import clip_reward  # before torch: it bounds how long threads spin
import dqn_clip_classic as dqn
import sac_clip_humanoid as sac
import gymnasium as gym
import numpy as np
import torch
import tyro
# isort: on


@dataclass
class Args:
    rows: tuple[Literal["plain", "compiled", "captured"], ...] = ()
    """plain: as by default; compiled: as with --compile on the CPU; captured: as with --compile on
    CUDA, one CUDA graph; default: all that the device has"""
    sb3: bool = False
    """also measure stable-baselines3's train()"""
    device: str = "cuda" if torch.cuda.is_available() else "cpu"
    """where the networks and the replay buffer are"""
    rounds: int = 15
    """rounds of all rows in turn"""
    json: Path | None = None
    """also write the results to this file"""


REPLAY = 25_600  # transitions in every buffer
SPACES = {  # observations, actions, transitions per update
    "SAC": (348, gym.spaces.Box(-1, 1, (17,)), 512),
    "DQN": (4, gym.spaces.Discrete(2), 64),
}


def make_sac(args, width, space, device):
    """-> update function of a batch, and a full buffer, as in sac_clip_humanoid.py"""
    learner, log_alpha = sac.make_learner(args, width, space, device)
    T, N = 100, 32
    buffer = sac.ReplayBuffer(REPLAY // (T * N), T, N, width, *space.shape, device)
    rng = np.random.default_rng(0)
    for _ in range(REPLAY // (T * N)):
        actions = rng.uniform(-1, 1, (T, N, *space.shape))
        buffer.add(rng.normal(size=(T + 1, N, width)), actions, rng.normal(size=(T, N)))
    return functools.partial(sac.update, learner=learner, log_alpha=log_alpha, args=args), buffer


def make_dqn(args, width, space, device):
    """-> update function of a batch, and a full buffer, as in dqn_clip_classic.py"""
    learner = dqn.make_learner(args, width, space, device)
    buffer = dqn.ReplayBuffer(REPLAY, width, device)
    rng = np.random.default_rng(0)
    observations = rng.normal(size=(2, REPLAY, width))
    actions, rewards = rng.integers(space.n, size=REPLAY), rng.normal(size=REPLAY)
    buffer.add(*observations, actions, rewards, np.zeros(REPLAY))
    return functools.partial(dqn.update, args=args, **learner), buffer


def make_train(algorithm, device, row):
    """-> train(updates)"""
    script, make = {"SAC": (sac, make_sac), "DQN": (dqn, make_dqn)}[algorithm]
    width, space, batch_size = SPACES[algorithm]
    update, buffer = make(script.Args(compile=row != "plain"), width, space, torch.device(device))
    if row == "compiled":
        update = torch.compile(update, dynamic=False)
    if row == "captured":
        update = clip_reward.compile_update(update, torch.device(device))

    def train(updates):
        for _ in range(updates):
            result = update(buffer.sample(batch_size))
        result.sum().item()  # waits for the GPU, once

    return train


def make_sb3(algorithm, device):
    """-> train(updates) of stable-baselines3 with a full replay buffer"""
    import stable_baselines3
    from stable_baselines3.common.logger import Logger

    width, space, batch_size = SPACES[algorithm]
    env = gym.Env()
    env.observation_space = gym.spaces.Box(-np.inf, np.inf, (width,), np.float32)
    env.action_space = space
    options = {"buffer_size": REPLAY, "device": device, "policy_kwargs": {"net_arch": [256, 256]}}
    model = getattr(stable_baselines3, algorithm)("MlpPolicy", env, **options)
    model.set_logger(Logger(None, []))
    buffer, rng = model.replay_buffer, np.random.default_rng(0)
    for ring in (buffer.observations, buffer.next_observations, buffer.rewards):
        ring[:] = rng.normal(size=ring.shape)
    high = 2 if algorithm == "DQN" else 1
    buffer.actions[:] = rng.uniform(high - 2, high, buffer.actions.shape)  # DQN's become 0 or 1
    buffer.dones[:], buffer.timeouts[:], buffer.full = 0, 0, True
    return functools.partial(model.train, batch_size=batch_size)


def measure(args, algorithm, rows):
    """-> {row: updates/s of every round [rounds], with the number of threads that suits it best}"""
    trains = {row: make_train(algorithm, args.device, row) for row in rows}
    if args.sb3:
        trains["sb3"] = make_sb3(algorithm, args.device)
    updates = 200 if args.device != "cpu" else 6 if algorithm == "SAC" else 60
    rates = {row: {count: [] for count in {1, os.cpu_count()}} for row in trains}
    for _ in range(1 + args.rounds):
        for row, by_count in rates.items():
            for count, speeds in by_count.items():
                torch.set_num_threads(count)
                start = time.perf_counter()
                trains[row](updates)
                speeds.append(updates / (time.perf_counter() - start))
    # the first round compiles, captures and warms up
    rounds = {row: [speeds[1:] for speeds in by_count.values()] for row, by_count in rates.items()}
    return {row: max(speeds, key=np.median) for row, speeds in rounds.items()}


def main():
    args = tyro.cli(Args, description=__doc__)
    on_cuda = torch.device(args.device).type == "cuda"
    rows = args.rows or ("plain", "compiled", "captured")[: 3 if on_cuda else 2]
    if "captured" in rows and not on_cuda:
        sys.exit(f"error: --rows captured is for CUDA graphs, not for --device {args.device}")
    device = torch.cuda.get_device_name(args.device) if on_cuda else "cpu"
    machine = f"{device}, {os.cpu_count()} cores ({platform.machine()}), torch {torch.__version__}"
    result = {"machine": machine, "args": dataclasses.asdict(args), "updates_per_second": {}}
    print(f"{machine}; medians of {args.rounds} rounds")
    for algorithm in SPACES:
        rates = measure(args, algorithm, rows)
        table = result["updates_per_second"][algorithm] = {}
        for row, values in rates.items():
            table[row] = float(np.median(values))
            line = f"{algorithm} {row:>10} {table[row]:>8.1f} updates/s"
            if args.sb3 and row != "sb3":
                table[f"{row} / sb3"] = ratio = float(np.median(np.divide(values, rates["sb3"])))
                line += f"   {ratio:.2f} times stable-baselines3"
            print(line, flush=True)
        if args.json:  # a time limit during the other algorithm takes away no more than that
            args.json.write_text(json.dumps(result, indent=2, default=str))


if __name__ == "__main__":
    main()
