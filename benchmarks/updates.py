"""Measure updates per second of SAC and DQN: the scripts' functions, replay sampling included.

    python benchmarks/updates.py                          # plain, and with --compile
    python benchmarks/updates.py --rows plain sb3         # pip install stable-baselines3
    python benchmarks/updates.py --device cuda --json updates.json

stable-baselines3 gets networks of the same size. All rows are measured in turn, round after
round in one process, so that other work on the machine affects them alike; numbers are medians over
rounds, and ratios to stable-baselines3 are medians of each round's ratio.
"""

import functools
import os
import sys
import time
from json import dumps
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

# isort: off
import dqn_clip_classic as dqn  # before torch: it bounds how long threads spin
import sac_clip_humanoid as sac
import gymnasium as gym
import numpy as np
import torch
import tyro
from benchmarks.pipeline import machine
# isort: on

SPACES = {  # Humanoid's and CartPole's: observations, actions, transitions per update
    "SAC": (348, gym.spaces.Box(-1, 1, (17,)), 512),
    "DQN": (4, gym.spaces.Discrete(2), 64),
}
T, N, ROLLOUTS = 100, 32, 8  # in every replay buffer
REPLAY = T * N * ROLLOUTS


def make_sac(args, width, space, device):
    """Return the update function and a full buffer, as in sac_clip_humanoid.py."""
    learner = sac.make_learner(args, width, space, device)
    buffer = sac.ReplayBuffer(ROLLOUTS, T, N, width, *space.shape, device)
    rng = np.random.default_rng(0)
    for _ in range(ROLLOUTS):
        actions = rng.uniform(-1, 1, (T, N, *space.shape))
        buffer.add(rng.normal(size=(T + 1, N, width)), actions, rng.normal(size=(T, N)))
    return functools.partial(sac.update, learner=learner, args=args), buffer


def make_dqn(args, width, space, device):
    """Return the update function and a full buffer, as in dqn_clip_classic.py."""
    learner, rng = dqn.make_learner(args, width, space, device), np.random.default_rng(0)
    buffer = dqn.ReplayBuffer(REPLAY, width, device)
    actions, rewards = rng.integers(space.n, size=REPLAY), rng.normal(size=REPLAY)
    buffer.add(*rng.normal(size=(2, REPLAY, width)), actions, rewards, np.zeros(REPLAY))
    return functools.partial(dqn.update, args=args, **learner), buffer


def make_sb3(algorithm, width, space, batch_size, device):
    """Return train(updates) of stable-baselines3 with a full replay buffer."""
    import stable_baselines3
    from stable_baselines3.common.logger import Logger

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


def make_train(algorithm, device, row):
    """Return train(updates) of a row of the table."""
    width, space, batch_size = SPACES[algorithm]
    if row == "sb3":
        return make_sb3(algorithm, width, space, batch_size, device)
    script, make = {"SAC": (sac, make_sac), "DQN": (dqn, make_dqn)}[algorithm]
    args = script.Args(compile=row == "compiled")
    update, buffer = make(args, width, space, torch.device(device))
    if row == "compiled":  # as in the scripts
        update = torch.compile(update, dynamic=False)
        if device.startswith("cuda"):
            from tensordict.nn import CudaGraphModule

            update = CudaGraphModule(update, warmup=5)

    def train(updates):
        for _ in range(updates):
            result = update(buffer.sample(batch_size))
        sum(result.values()).item()  # waits for the GPU, once

    return train


def measure(algorithm, rows, device, rounds):
    """Return {row: updates/s of every round}, each row with its best number of threads."""
    trains = {row: make_train(algorithm, device, row) for row in rows}
    updates = 200 if device != "cpu" else 6 if algorithm == "SAC" else 60
    rates = {row: {count: [] for count in {1, os.cpu_count()}} for row in rows}
    for _ in range(1 + rounds):  # the first round compiles and warms up
        for row, by_count in rates.items():
            for count, speeds in by_count.items():
                torch.set_num_threads(count)
                start = time.perf_counter()
                trains[row](updates)
                speeds.append(updates / (time.perf_counter() - start))
    return {row: max((x[1:] for x in rates[row].values()), key=np.median) for row in rows}


def main(
    rows: tuple[Literal["plain", "compiled", "sb3"], ...] = ("plain", "compiled"),
    device: str = "cuda" if torch.cuda.is_available() else "cpu",
    rounds: int = 15,
    json: Path | None = None,
) -> None:
    """Measure, print and write.

    Args:
        rows: plain: the default; compiled: with --compile, on CUDA as a CUDA graph;
            sb3: stable-baselines3's train()
        device: where the networks and the replay buffer are
        rounds: rounds of all rows in turn
        json: also write the results to this file
    """
    result = {"machine": machine(device), "updates_per_second": {}}
    print(f"{result['machine']}; medians of {rounds} rounds")
    for algorithm in SPACES:
        rates = measure(algorithm, rows, device, rounds)
        table = result["updates_per_second"][algorithm] = {}
        for row, values in rates.items():
            table[row] = float(np.median(values))
            line = f"{algorithm} {row:>10} {table[row]:>8.1f} updates/s"
            if "sb3" in rates and row != "sb3":
                table[f"{row} / sb3"] = ratio = float(np.median(np.divide(values, rates["sb3"])))
                line += f"   {ratio:.2f} times stable-baselines3"
            print(line, flush=True)
        if json:  # after each algorithm, so that a time limit loses only the other
            json.write_text(dumps(result, indent=2))


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
