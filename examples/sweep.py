r"""Many runs on one Ray cluster: tasks x prompts x seeds, each with a GPU, or a share, of its own.

Which sentence teaches CartPole, which MountainCar? 18 runs, offline, 15 minutes on two cores:

    pip install ".[ray]"
    python examples/sweep.py

The paper's tasks, two runs per GPU, on all machines of a Ray cluster that have this code in the
same place and share the folder of --out. Flags that are not the sweep's go to every run:

    python examples/sweep.py --tasks kneeling lotus splits --seeds 1 2 3 4 --gpus-per-run 0.5 \
        --out /shared/sweep --clip-precision bf16

The folder --out gets results.csv, curves.png, and TASK/PROMPT/SEED with the run and console.txt.
Ctrl-C ends every run with a checkpoint; the same command continues them and repeats those that
failed. If a machine is lost, its runs continue elsewhere.
"""

import itertools
import logging
import os
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

os.environ["TUNE_DISABLE_AUTO_CALLBACK_LOGGERS"] = "1"  # the runs write event files themselves
import matplotlib.pyplot as plt
import pandas as pd
import ray
import tyro
from ray import tune
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from environments import judges

DQN = """dqn_clip_classic.py --clip-model local-dir:tiny_clip --render-size 64 --num-envs 4
    --learning-starts 1000 --learning-rate 5e-4 --anneal-lr --tau 0.01
    --target-network-frequency 1 --checkpoint-freq 8000 """
UPRIGHT = "pole vertically upright on top of the cart"
PEAK = "a car at the peak of the mountain, next to the yellow flag"
CAR = (PEAK, "a car climbing towards the flag", "a car in the mountain")
# Name: a training command without its prompt and seed, and the prompts to compare.
TASKS = {
    "CartPole": (DQN + "--total-timesteps 20000", (UPRIGHT, "a leaning pole", "pole and cart")),
    "MountainCar": (DQN + "--total-timesteps 30000 --env-id MountainCar-v0", CAR),
}
for task in judges.tasks_of("Humanoid-v5"):
    TASKS[task.name] = (f"sac_clip_humanoid.py --judge {task.name}", (task.target_prompt,))

CHARTS = ("clip_reward", "success_rate", "episodic_return")


@dataclass
class Args:
    tasks: tuple[Literal[*TASKS], ...] = ("CartPole", "MountainCar")
    """which of TASKS"""
    prompts: tuple[str, ...] = ()
    """what to learn from (default: the task's prompts in TASKS)"""
    seeds: tuple[int, ...] = (1, 2, 3)
    """one run of every prompt for each"""
    gpus_per_run: float = 1
    """0.25: four runs share a GPU; ignored on a cluster without GPUs"""
    out: Path = Path("runs/sweep")
    """the folder of the sweep"""


class Training(tune.Trainable):
    """One run, as a process that prints to console.txt in its folder."""

    def setup(self, config, runs):
        run = runs[config["run"]]
        run["folder"].mkdir(parents=True, exist_ok=True)
        with open(run["folder"] / "console.txt", "a") as console:
            self.process = subprocess.Popen(run["command"], stdout=console, stderr=console)

    def step(self):
        try:
            return {"done": True, "exit_code": self.process.wait(timeout=5)}
        except subprocess.TimeoutExpired:
            return {"done": False}

    def cleanup(self):
        self.process.terminate()  # it writes a checkpoint
        self.process.wait()


def read_run(folder):
    """Read the scalars of the newest run in a folder -> DataFrame [steps, tags]."""
    run = max(folder.glob("*/args.json"), key=os.path.getmtime).parent
    events = EventAccumulator(str(run), size_guidance={"scalars": 0}).Reload()
    tags = events.Tags()["scalars"]
    return pd.DataFrame({tag: {e.step: e.value for e in events.Scalars(tag)} for tag in tags})


def report(runs, out):
    """Print and write results.csv, means over the last tenth of each run; draw curves.png."""
    rows, curves = [], []
    for run in runs:
        frame, row = read_run(run["folder"]), {name: run[name] for name in ("task", "seed")}
        smooth = frame.rolling(max(1, len(frame) // 10), min_periods=1).mean()
        row |= {name: smooth[f"charts/{name}"].iloc[-1] for name in CHARTS}
        row |= {"best_clip_reward": frame["charts/clip_reward"].max(), "steps": frame.index[-1]}
        row["hours"] = frame.filter(regex="time/(physics|wait|update)_s").sum().sum() / 3600
        rows.append(row | {"prompt": run["prompt"]})
        curves.append(smooth.assign(task=run["task"], prompt=run["prompt"], seed=run["seed"]))
    table = pd.DataFrame(rows)
    table.to_csv(out / "results.csv", index=False)
    print(table.to_string(index=False, float_format="{:.4g}".format))

    dashes = plt.cycler(linestyle=["-", "--"] * 5)  # so that equal curves are both seen
    plt.rc("axes", prop_cycle=plt.rcParams["axes.prop_cycle"] + dashes)
    panels = dict.fromkeys(table["task"])
    figure, axes = plt.subplots(len(panels), 2, figsize=(12, 4 * len(panels)), squeeze=False)
    panels = dict(zip(panels, axes))
    for (task, prompt), group in pd.concat(curves).groupby(["task", "prompt"], sort=False):
        for ax, name in zip(panels[task], CHARTS):
            seeds = group.pivot(columns="seed", values=f"charts/{name}")  # [steps, seeds]
            (mean,) = ax.plot(seeds.mean(axis=1), lw=2.5, label=prompt)
            ax.plot(seeds, lw=0.7, ls="-", color=mean.get_color())
            ax.set(title=task, xlabel="environment steps", ylabel=f"{name}, mean of a tenth")
        panels[task][0].legend(frameon=False)
    figure.savefig(out / "curves.png", dpi=120)


def main(args, flags):
    ray.init(log_to_driver=False)
    logging.getLogger("ray.tune").setLevel("ERROR")
    gpus = args.gpus_per_run if ray.cluster_resources().get("GPU") else 0
    flags = flags if gpus else ["--reward-devices", "cpu", *flags]
    out, runs = args.out.resolve(), {}
    for seed, task in itertools.product(args.seeds, args.tasks):
        script, *options = shlex.split(TASKS[task][0])
        for prompt in args.prompts or TASKS[task][1]:
            folder = out / task / prompt.replace("/", "_")[:200] / str(seed)
            command = [sys.executable, ROOT / script, *options, "--target-prompt", prompt]
            command += ["--seed", str(seed), "--runs-dir", folder, "--resume", "latest", *flags]
            run = {"task": task, "seed": seed, "prompt": prompt, "folder": folder}
            runs[f"{task}, {seed}, {prompt}"] = run | {"command": command}
    training = tune.with_parameters(Training, runs=runs)
    results = tune.Tuner(
        tune.with_resources(training, {"cpu": 1, "gpu": gpus}),
        param_space={"run": tune.grid_search(list(runs))},
        run_config=tune.RunConfig(
            name="tune",
            storage_path=str(out),
            failure_config=tune.FailureConfig(max_failures=10),  # machines that are lost
            checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=False),
        ),
    ).fit()
    codes = [(result.metrics or {}).get("exit_code") for result in results]
    for run, code in zip(runs.values(), codes):
        if code != 0:
            how = "stopped" if code is None else f"FAILED, exit code {code}"
            print(f"{how}: see {run['folder']}/console.txt")
    if 0 in codes:
        report([run for run, code in zip(runs.values(), codes) if code == 0], out)
    sys.exit(130 if None in codes else any(codes))


if __name__ == "__main__":
    main(*tyro.cli(Args, description=__doc__, return_unknown_args=True))
