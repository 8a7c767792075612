"""What limits a run as its reward workers grow? End to end against Ray actors that only sleep for
every frame, with the share of the learner's time that goes into feeding them.

    python benchmarks/scaling.py --out scaling                # scaling.csv and scaling.png

Every row is a run of sac_clip_humanoid.py with one update a rollout, after all actors are there.
1.6 ms a frame is ViT-bigG-14 on one H200; sleeping actors need no GPU and hardly a core. Linear is
so many times what one that sleeps does alone, without a run.
"""

import csv
import functools
import json
import os
import pickle
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

# isort: off
import clip_reward  # before torch: it bounds how long threads spin
import numpy as np
import tyro
from matplotlib.figure import Figure
from benchmarks.pipeline import ROOT, Blank, Sleeper, pool_alone, run_with
# isort: on

TICKS = os.sysconf("SC_CLK_TCK")


@dataclass
class Args:
    out: Path = Path("scaling")
    """results go to OUT.csv and OUT.png"""
    actors: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    """how many sleep"""
    num_envs: tuple[int, ...] = (32, 128, 512)
    """environments; the episodes are as long as makes `steps` in all"""
    steps: int = 16_384
    """steps per rollout: 256 chunks"""
    rollouts: int = 3
    """measured, after one that is not"""
    scorer_ms: float = 1.6
    """milliseconds per frame"""


def feeding_seconds(pool):
    """CPU time so far of the threads that feed workers, and of Ray's own in this process."""
    feeders = {thread.native_id for thread in pool._threads}
    total = 0
    for task in Path("/proc/self/task").iterdir():
        fields = (task / "stat").read_text().rpartition(")")[2].split()
        ours = (task / "comm").read_text().startswith("python")  # and not Ray's
        if not ours or int(task.name) in feeders:
            total += sum(map(int, fields[11:13])) / TICKS  # user and system
    return total


def run_asleep(ms, actors, path):
    """Run the script that is named on the command line with actors that sleep; writes the time and
    `feeding_seconds` at the end of every rollout to `path`."""
    import ray

    class Asleep:
        """In the place of `_Remote`. Ray sends a class that has no module as it is: 64 processes
        that import no torch."""

        def __init__(self, _, __, ms):
            self.ms, self.one_chunk = ms, threading.Lock()

        def wait_ready(self):
            return f"{self.ms} ms of sleep a frame"

        def score(self, job):
            _, states = pickle.loads(job)
            with self.one_chunk:
                time.sleep(1e-3 * self.ms * len(states))
            return pickle.dumps((np.zeros(len(states), np.float32), 0, 0))

    clip_reward._Remote = Asleep
    # Ray counts CPUs: as many as there are actors, whatever the machine has
    options = {"include_dashboard": False, "log_to_driver": False}
    ray.init(address="local", num_cpus=actors, **options)
    marks = []

    class Pool(clip_reward.RewardPool):
        def __init__(self, _, __, devices, *sizes):
            super().__init__(None, ms, devices, *sizes)

        def wait_ready(self):
            super().wait_ready()
            self._results(self._ready)  # all of them
            return self

        def take(self):
            rewards = super().take()
            marks.append((time.perf_counter(), feeding_seconds(self)))
            return rewards

    run_with(Pool)
    Path(path).write_text(json.dumps(marks))


def measure(args, actors, num_envs):
    """-> steps/s end to end, steps/s of physics, share of feeding in the learner's time."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with tempfile.TemporaryDirectory() as folder:
        marks = Path(folder) / "marks.json"
        how = f"{args.scorer_ms}, {actors}, {str(marks)!r}"
        start = f"from benchmarks import scaling; scaling.run_asleep({how})"
        flags = f"--target-prompt x --clip-model local-dir:tiny_clip --num-envs {num_envs} "
        flags += f"--episode-length {args.steps // num_envs} --learning-starts 1 --video-freq 0 "
        flags += f"--total-timesteps {args.steps * (args.rollouts + 1)} --gradient-steps 1 "
        flags += f"--reward-devices ray:{actors} --runs-dir {folder}/runs"
        command = [sys.executable, "-c", start, ROOT / "sac_clip_humanoid.py", *flags.split()]
        subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, check=True)
        times, feeding = np.array(json.loads(marks.read_text())).T
        events = EventAccumulator(str(next(Path(folder, "runs").iterdir()))).Reload()
    physics_s = [event.value for event in events.Scalars("time/physics_s")][1:]
    share = (feeding[-1] - feeding[0]) / (times[-1] - times[0])
    return args.steps / np.median(np.diff(times)), args.steps / np.median(physics_s), share


def plot(rows, alone, args):
    figure = Figure((6, 4), layout="constrained")
    ax = figure.subplots()
    for num_envs in args.num_envs:
        mine = [row for row in rows if row["environments"] == num_envs]
        speeds = [row["steps_per_s"] for row in mine]
        ax.plot([row["actors"] for row in mine], speeds, "o-", label=f"{num_envs} environments")
    linear = [alone * count for count in args.actors]
    ax.plot(args.actors, linear, "k--", lw=1, label=f"linear: {alone:.0f} frames/s each")
    ax.set(xscale="log", yscale="log", xticks=args.actors, xticklabels=args.actors)
    ax.set(xlabel="Ray actors", ylabel="end to end, steps/s")
    ax.set(ylim=(None, 2 * max(row["physics_steps_per_s"] for row in rows)))
    ax.minorticks_off()
    ax.legend()
    figure.savefig(args.out.with_suffix(".png"), dpi=120)


def main(args: Args):
    rows, sleep = [], functools.partial(Sleeper, ms=args.scorer_ms)
    alone = pool_alone(Blank, sleep, ["cpu"], 64, np.zeros((6400, 47)))
    for num_envs in args.num_envs:
        for actors in args.actors:
            speed, physics, share = measure(args, actors, num_envs)
            row = {"environments": num_envs, "actors": actors, "steps_per_s": round(speed)}
            row["of_linear"] = round(float(speed / alone / actors), 3)
            row |= {"physics_steps_per_s": round(physics), "feeding_share": round(float(share), 3)}
            print(row, flush=True)
            rows.append(row)
            with args.out.with_suffix(".csv").open("w", newline="") as file:
                writer = csv.DictWriter(file, row)
                writer.writeheader()
                writer.writerows(rows)
    plot(rows, alone, args)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
