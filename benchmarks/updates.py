"""Updates per second of SAC and DQN: the scripts' own functions, with sampling from their replay.

    python benchmarks/updates.py                          # plain, compiled and, on CUDA, captured
    python benchmarks/updates.py --rows plain --against sb3     # pip install stable-baselines3
    python benchmarks/updates.py --device cuda --json updates.json

Sizes by default: SAC with Humanoid's observations and actions and 512 transitions an update, DQN
with CartPole's and 64; networks of two hidden layers of 256, float32. Everything is measured in
turn, round after round in the same process, so that what else the machine does hits all alike; the
numbers are medians over rounds, the ratios to stable-baselines3 medians of each round's ratio.
"""

import functools
import json
import os
import platform
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # as the scripts do, before torch

import gymnasium as gym  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
import tyro  # noqa: E402

import dqn_clip_classic as dqn  # noqa: E402
import sac_clip_humanoid as sac  # noqa: E402


@dataclass
class Args:
    algorithms: tuple[Literal["SAC", "DQN"], ...] = ("SAC", "DQN")
    """which to measure"""
    rows: tuple[Literal["plain", "compiled", "captured"], ...] = ()
    """plain: as by default; compiled: as with --compile; captured: that on CUDA, where it is a CUDA
    graph as well, while compiled is without one; default: all that the device has"""
    against: Literal["sb3"] | None = None
    """also measure stable-baselines3's train()"""
    device: str = "cuda" if torch.cuda.is_available() else "cpu"
    """where the networks and the replay buffer are"""
    threads: tuple[int, ...] = ()
    """thread counts of PyTorch to try, the best counts for each row; default: SAC all cores, DQN 1
    as in the scripts; with --against 1 and all cores for either"""
    rounds: int = 15
    """rounds of all rows in turn"""
    updates: int = 0
    """updates of a row in a round, default: SAC 4, DQN 60, on CUDA 200"""
    hidden_size: int = 256
    """width of the two hidden layers"""
    sac_batch_size: int = 512
    """transitions per update of SAC"""
    sac_observations: int = 348
    """numbers in an observation of SAC's task"""
    sac_actions: int = 17
    """numbers in an action of SAC's task"""
    dqn_batch_size: int = 64
    """transitions per update of DQN"""
    dqn_observations: int = 4
    """numbers in an observation of DQN's task"""
    dqn_actions: int = 2
    """actions of DQN's task"""
    double: bool = True
    """double DQN, as the script does by default; stable-baselines3 has only --no-double"""
    json: str = ""
    """also write the results to this file"""


REPLAY = 25_600  # transitions in every buffer


class Nothing(gym.Env):
    """The spaces of a task, for stable-baselines3's constructors."""

    def __init__(self, observations, action_space):
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, (observations,), np.float32)
        self.action_space = action_space


def spaces(args, algorithm):
    """-> size of the observations, action space, batch size."""
    if algorithm == "DQN":
        space = gym.spaces.Discrete(args.dqn_actions)
        return args.dqn_observations, space, args.dqn_batch_size
    bounds = np.ones(args.sac_actions, np.float32)
    return args.sac_observations, gym.spaces.Box(-bounds, bounds), args.sac_batch_size


def make_sac(args, row):
    """-> train(updates), as in sac_clip_humanoid.py"""
    device = torch.device(args.device)
    width, space, batch_size = spaces(args, "SAC")
    script = sac.Args(hidden_size=args.hidden_size, compile=row != "plain")
    learner, log_alpha = sac.make_learner(script, width, space, device)
    update = functools.partial(sac.update, learner=learner, log_alpha=log_alpha, args=script)
    T, N = 100, 32
    buffer = sac.ReplayBuffer(REPLAY // (T * N), T, N, width, args.sac_actions, device)
    rng = np.random.default_rng(0)
    for _ in range(REPLAY // (T * N)):
        actions = rng.uniform(-1, 1, (T, N, args.sac_actions))
        buffer.add(rng.normal(size=(T + 1, N, width)), actions, rng.normal(size=(T, N)))
    return make_train(args, row, update, functools.partial(buffer.sample, batch_size), sac)


def make_dqn(args, row):
    """-> train(updates), as in dqn_clip_classic.py"""
    device = torch.device(args.device)
    width, space, batch_size = spaces(args, "DQN")
    script = dqn.Args(hidden_size=args.hidden_size, compile=row != "plain")
    learner = dqn.make_learner(script, width, int(space.n), device)
    settings = {"gamma": script.gamma, "max_grad_norm": script.max_grad_norm}
    update = functools.partial(dqn.update, **learner, **settings, double=args.double)
    buffer = dqn.ReplayBuffer(REPLAY, width, device)
    rng = np.random.default_rng(0)
    observations = rng.normal(size=(2, REPLAY, width))
    actions, rewards = rng.integers(space.n, size=REPLAY), rng.normal(size=REPLAY)
    buffer.add(*observations, actions, rewards, np.zeros(REPLAY))
    return make_train(args, row, update, functools.partial(buffer.sample, batch_size), dqn)


def make_train(args, row, update, sample, script):
    if row == "compiled":
        update = torch.compile(update, dynamic=False)
    elif row == "captured":
        update = script.compile_update(update, torch.device(args.device))

    def train(updates):
        for _ in range(updates):
            result = update(sample())
        result.sum().item()  # waits for the GPU, once

    return train


def make_sb3(args, algorithm):
    """-> train(updates) of stable-baselines3 with a full replay buffer"""
    import stable_baselines3
    from stable_baselines3.common.logger import Logger

    width, space, batch_size = spaces(args, algorithm)
    model = getattr(stable_baselines3, algorithm)(
        "MlpPolicy",
        Nothing(width, space),
        buffer_size=REPLAY,
        device=args.device,
        policy_kwargs={"net_arch": [args.hidden_size] * 2},
    )
    model.set_logger(Logger(None, []))
    buffer, rng = model.replay_buffer, np.random.default_rng(0)
    for ring in (buffer.observations, buffer.next_observations, buffer.rewards):
        ring[:] = rng.normal(size=ring.shape)
    discrete = algorithm == "DQN"
    shape = buffer.actions.shape
    buffer.actions[:] = rng.integers(space.n, size=shape) if discrete else rng.uniform(-1, 1, shape)
    buffer.dones[:], buffer.timeouts[:], buffer.full = 0, 0, True
    return functools.partial(model.train, batch_size=batch_size)


def measure(args, algorithm, rows):
    """-> {row: {threads: updates/s of every round [rounds]}}"""
    make = {"SAC": make_sac, "DQN": make_dqn}[algorithm]
    trains = {row: make(args, row) for row in rows}
    if args.against:
        trains["sb3"] = make_sb3(args, algorithm)
    cores = os.cpu_count() or 1
    threads = args.threads
    if not threads:
        own = cores if algorithm == "SAC" else 1
        threads = sorted({1, cores}) if args.against else [own]
    updates = args.updates or (200 if args.device != "cpu" else 4 if algorithm == "SAC" else 60)
    rates = {row: {count: [] for count in threads} for row in trains}
    for round_ in range(-1, args.rounds):
        for count in threads:
            torch.set_num_threads(count)
            for row, train in trains.items():
                if round_ < 0:  # compiles, captures and warms up
                    train(max(updates, 5))
                    continue
                start = time.perf_counter()
                train(updates)
                rates[row][count].append(updates / (time.perf_counter() - start))
    return rates


def main():
    args = tyro.cli(Args, description=__doc__)
    on_cuda = torch.device(args.device).type == "cuda"
    problem = None
    if on_cuda and not torch.cuda.is_available():
        problem = f"--device {args.device}: PyTorch sees no CUDA device here; use --device cpu"
    elif "captured" in args.rows and not on_cuda:
        problem = f"--rows captured is for CUDA graphs, not for --device {args.device}"
    elif min(args.rounds, args.hidden_size, args.updates + 1, *args.threads, 1) < 1:
        problem = "--rounds, --hidden-size, --updates and --threads must be positive"
    if problem is None and args.against == "sb3":
        try:
            import stable_baselines3  # noqa: F401
        except ImportError:
            problem = "--against sb3 needs another package: pip install stable-baselines3"
    if problem:
        print(f"error: {problem}", file=sys.stderr)
        sys.exit(2)

    rows = args.rows or ("plain", "compiled", "captured")[: 3 if on_cuda else 2]
    device = "cpu"
    if on_cuda:
        index = torch.device(args.device).index or 0
        torch.cuda.set_device(index)  # graphs are captured and replayed on the current one
        device = torch.cuda.get_device_name(args.device)
    cores = os.cpu_count()
    machine = {"device": device, "cores": cores, "cpu": platform.machine()}
    machine["torch"] = torch.__version__
    result = {"args": asdict(args), "machine": machine, "updates_per_second": {}}
    print(f"{device}, {cores} cores ({machine['cpu']}), torch {torch.__version__}", end="")
    print(f", {time.strftime('%Y-%m-%d')}; medians of {args.rounds} rounds")
    for algorithm in args.algorithms:
        width, _, batch_size = spaces(args, algorithm)
        print(f"{algorithm}: batch {batch_size}, observations {width}, MLP {args.hidden_size} x 2")
        rates = measure(args, algorithm, rows)
        best = {  # the thread count of a row by its median
            row: max(by_count, key=lambda count: np.median(by_count[count]))
            for row, by_count in rates.items()
        }
        table = result["updates_per_second"][algorithm] = {}
        for row, by_count in rates.items():
            count = best[row]
            table[row] = float(np.median(by_count[count]))
            line = f"{row:>10} {table[row]:>8.1f} updates/s   threads {count}"
            if args.against and row != "sb3":
                ratio = np.median(np.divide(by_count[count], rates["sb3"][best["sb3"]]))
                table[f"{row} / sb3"] = float(ratio)
                line += f"   {ratio:.2f} times stable-baselines3"
            print(line, flush=True)
        if args.json:  # a time limit during the other algorithm takes away no more than that
            Path(args.json).write_text(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
