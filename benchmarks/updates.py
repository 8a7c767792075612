"""Updates per second of SAC and DQN: the scripts' own functions, with sampling from their replay.

    python benchmarks/updates.py                          # plain, and as with --compile
    python benchmarks/updates.py --rows plain --sb3       # pip install stable-baselines3
    python benchmarks/updates.py --device cuda --json updates.json

SAC with Humanoid's observations and actions and 512 transitions an update, DQN with CartPole's and
64, both with the scripts' networks. All are measured in turn, round after round in one process, so
that what else the machine does hits all alike; numbers are medians over rounds, ratios to
stable-baselines3 medians of each round's ratio.
"""

import functools
import os
import platform
import sys
import time
from json import dumps
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

# isort: off
import dqn_clip_classic as dqn  # before torch: it bounds how long threads spin
import sac_clip_humanoid as sac
from training.run import compile_update
import gymnasium as gym
import numpy as np
import torch
import tyro
# isort: on


REPLAY = 25_600  # transitions in every buffer
SPACES = {  # observations, actions, transitions per update
    "SAC": (348, gym.spaces.Box(-1, 1, (17,)), 512),
    "DQN": (4, gym.spaces.Discrete(2), 64),
}


def make_sac(args, width, space, device):
    """-> update function of a batch, and a full buffer, as in sac_clip_humanoid.py"""
    learner = sac.make_learner(args, width, space, device)
    T, N = 100, 32
    buffer = sac.ReplayBuffer(REPLAY // (T * N), T, N, width, *space.shape, device)
    rng = np.random.default_rng(0)
    for _ in range(REPLAY // (T * N)):
        actions = rng.uniform(-1, 1, (T, N, *space.shape))
        buffer.add(rng.normal(size=(T + 1, N, width)), actions, rng.normal(size=(T, N)))
    return functools.partial(sac.update, learner=learner, args=args), buffer


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
        update = compile_update(update, torch.device(device))

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


def measure(algorithm, rows, device, rounds):
    """-> {row: updates/s of every round [rounds], with the number of threads that suits it best}"""
    trains = {
        row: make_sb3(algorithm, device) if row == "sb3" else make_train(algorithm, device, row)
        for row in rows
    }
    updates = 200 if device != "cpu" else 6 if algorithm == "SAC" else 60
    rates = {row: {count: [] for count in {1, os.cpu_count()}} for row in trains}
    for _ in range(1 + rounds):
        for row, by_count in rates.items():
            for count, speeds in by_count.items():
                torch.set_num_threads(count)
                start = time.perf_counter()
                trains[row](updates)
                speeds.append(updates / (time.perf_counter() - start))
    # the first round compiles and warms up
    rates = {row: [speeds[1:] for speeds in by_count.values()] for row, by_count in rates.items()}
    return {row: max(speeds, key=np.median) for row, speeds in rates.items()}


def main(
    rows: tuple[Literal["plain", "compiled"], ...] = ("plain", "compiled"),
    sb3: bool = False,
    device: str = "cuda" if torch.cuda.is_available() else "cpu",
    rounds: int = 15,
    json: Path | None = None,
) -> None:
    """Measure, print, write.

    Args:
        rows: plain: as by default; compiled: as with --compile, on CUDA one CUDA graph
        sb3: also measure stable-baselines3's train()
        device: where the networks and the replay buffer are
        rounds: rounds of all rows in turn
        json: also write the results to this file
    """
    name = torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else "cpu"
    machine = f"{name}, {os.cpu_count()} cores ({platform.machine()}), torch {torch.__version__}"
    result = {"machine": machine, "updates_per_second": {}}
    print(f"{machine}; medians of {rounds} rounds")
    for algorithm in SPACES:
        rates = measure(algorithm, (*rows, *["sb3"] * sb3), device, rounds)
        table = result["updates_per_second"][algorithm] = {}
        for row, values in rates.items():
            table[row] = float(np.median(values))
            line = f"{algorithm} {row:>10} {table[row]:>8.1f} updates/s"
            if sb3 and row != "sb3":
                table[f"{row} / sb3"] = ratio = float(np.median(np.divide(values, rates["sb3"])))
                line += f"   {ratio:.2f} times stable-baselines3"
            print(line, flush=True)
        if json:  # a time limit during the other algorithm takes away no more than that
            json.write_text(dumps(result, indent=2))


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
