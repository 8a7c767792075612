r"""Many runs on one Ray cluster: tasks x prompts x seeds, each on a GPU or on a fraction of one.

This compares sentences for CartPole and MountainCar: 18 runs, offline, 15 minutes on two cores:

    pip install ".[ray]"
    python examples/sweep.py

This trains on the paper's tasks, with two runs per GPU, on all machines of a Ray cluster. These
machines need this code in the same place, and share the folder of --out. Flags that are not the
sweep's go to every run:

    python examples/sweep.py --tasks kneeling lotus splits --seeds 1 2 3 4 --gpus-per-run 0.5 \
        --out /shared/sweep --compile

The folder of --out gets a folder TASK/PROMPT/SEED for each run, with its console.txt, and for each
task the curves of its prompts (benchmarks/plot_runs.py). Ctrl-C ends every run with a checkpoint;
the same command resumes these runs and repeats those that failed. If a machine is lost, its runs
continue elsewhere.
"""

import itertools
import logging
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

os.environ["TUNE_DISABLE_AUTO_CALLBACK_LOGGERS"] = "1"  # the runs write event files themselves
import ray
import tyro
from ray import tune

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from benchmarks import plot_runs
from environments import judges

DQN = "dqn_clip_classic.py --clip-model tiny_clip --checkpoint-freq 8000 "
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


@dataclass
class Args:
    tasks: tuple[Literal[*TASKS], ...] = ("CartPole", "MountainCar")
    """tasks to train on, from TASKS"""
    prompts: tuple[str, ...] = ()
    """prompts to learn from (default: the task's prompts in TASKS)"""
    seeds: tuple[int, ...] = (1, 2, 3)
    """one run of every prompt per seed"""
    gpus_per_run: float = 1
    """with 0.25, four runs share a GPU; ignored on a cluster without GPUs"""
    out: Path = Path("runs/sweep")
    """the folder of the sweep"""


def folder_of(out, task, prompt, seed):
    return out / task / prompt.replace("/", "_")[:200] / str(seed)


class Training(tune.Trainable):
    """One run, as a process that writes to console.txt in the run's folder."""

    def setup(self, config, out, flags):
        task, prompt, seed = config["run"]
        folder = folder_of(out, *config["run"])
        folder.mkdir(parents=True, exist_ok=True)
        script, *options = TASKS[task][0].split()
        command = [sys.executable, ROOT / script, *options, "--target-prompt", prompt]
        command += ["--seed", str(seed), "--runs-dir", folder, "--resume", "latest", *flags]
        with open(folder / "console.txt", "a") as console:
            self.process = subprocess.Popen(command, stdout=console, stderr=console)

    def step(self):
        try:
            return {"done": True, "exit_code": self.process.wait(timeout=5)}
        except subprocess.TimeoutExpired:
            return {"done": False}

    def cleanup(self):
        self.process.terminate()  # the run then writes a checkpoint
        self.process.wait()


def main(args, flags):
    ray.init(log_to_driver=False)
    logging.getLogger("ray.tune").setLevel("ERROR")
    gpus = args.gpus_per_run if ray.cluster_resources().get("GPU") else 0
    flags = flags if gpus else ["--reward-devices", "cpu", *flags]
    out = args.out.resolve()
    pairs = [(task, prompt) for task in args.tasks for prompt in args.prompts or TASKS[task][1]]
    runs = [(task, prompt, seed) for seed in args.seeds for task, prompt in pairs]
    training = tune.with_parameters(Training, out=out, flags=flags)
    results = tune.Tuner(
        tune.with_resources(training, {"cpu": 1, "gpu": gpus}),
        param_space={"run": tune.grid_search(runs)},
        run_config=tune.RunConfig(
            name="tune",
            storage_path=str(out),
            failure_config=tune.FailureConfig(max_failures=10),  # lost machines
            checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=False),
        ),
    ).fit()
    codes, done = [(result.metrics or {}).get("exit_code") for result in results], {}
    for run, code in zip(runs, codes):
        folder = folder_of(out, *run)
        if code == 0:
            newest = max(folder.glob("*/args.json"), key=os.path.getmtime).parent
            done.setdefault(run[0], []).append(newest)
        else:
            how = "stopped" if code is None else f"FAILED, exit code {code}"
            print(f"{how}: see {folder}/console.txt")
    for task, scalar in itertools.product(done, ("clip_reward", "success_rate")):
        print(f"\n{task}, {scalar}")
        picture = out / f"{task}_{scalar}.png"
        plot_runs.main(done[task], f"charts/{scalar}", title=task, out=picture)
    sys.exit(130 if None in codes else any(codes))


if __name__ == "__main__":
    main(*tyro.cli(Args, description=__doc__, return_unknown_args=True))
