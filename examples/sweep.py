r"""Many runs on one Ray cluster: tasks x prompts x seeds, each with a GPU, or a share, of its own.

Which sentence teaches CartPole, which MountainCar? 18 runs, offline, 15 minutes on two cores:

    pip install ".[ray]"
    python examples/sweep.py

Sentences of your own; flags that are not the sweep's go to every run:

    python examples/sweep.py --tasks CartPole --prompts "a cart balancing a pole" "pole upright" \
        --seeds 1 2 3 4 5 --out runs/balancing --total-timesteps 10000

The paper's tasks, two runs per GPU, on all machines of a Ray cluster (the README says how to make
one); they have this code in the same place and share the folder of --out:

    python examples/sweep.py --tasks kneeling lotus splits --seeds 1 2 3 4 --gpus-per-run 0.5 \
        --out /shared/sweep

Tasks of your own: change TASKS. The folder --out gets results.csv, curves.png, and TASK/PROMPT/SEED
with the run and what it printed. Ctrl-C ends every run with a checkpoint; the same command goes on
from there and repeats what failed. If a machine is lost, its runs go on elsewhere by themselves.
"""

import collections
import csv
import itertools
import os
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import tyro
from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import clip_reward
from evaluation import judges

DQN = """dqn_clip_classic.py --clip-model local-dir:tiny_clip --render-size 64 --num-envs 4
    --learning-starts 1000 --learning-rate 5e-4 --anneal-lr --tau 0.01
    --target-network-frequency 1 --checkpoint-freq 8000 """
UPRIGHT = "pole vertically upright on top of the cart"
PEAK = "a car at the peak of the mountain, next to the yellow flag"
# Name: a training command but for its prompt and seed, and the prompts to compare.
TASKS = {
    "CartPole": (DQN + "--total-timesteps 20000", (UPRIGHT, "a leaning pole", "pole and cart")),
    "MountainCar": (
        DQN + "--total-timesteps 30000 --env-id MountainCar-v0",
        (PEAK, "a car climbing towards the flag", "a car in the mountain"),
    ),
}
for task in judges.tasks_of("Humanoid-v5"):
    TASKS[task.name] = (f"sac_clip_humanoid.py --judge {task.name}", (task.target_prompt,))


@dataclass
class Args:
    tasks: tuple[Literal[*TASKS], ...] = ("CartPole", "MountainCar")
    """which of TASKS"""
    prompts: tuple[str, ...] = ()
    """what to learn from, default: the task's prompts in TASKS"""
    seeds: tuple[int, ...] = (1, 2, 3)
    """a run each, of every prompt"""
    gpus_per_run: float = 1
    """0.25: four runs share a GPU; means nothing on a cluster without GPUs"""
    cpus_per_run: int = 1
    """cores and threads of a run, and without GPUs as many reward workers"""
    out: Path = Path("runs/sweep")
    """the folder of the sweep"""


def trial(command, folder):
    """A run, as a Ray task -> (what went wrong or "", {scalar: its steps and values [2, K]})."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    os.makedirs(folder, exist_ok=True)
    # Ray starts a lost run again in the same folder, so no run may outlive the process it is in
    command = ["setpriv", "--pdeathsig", "KILL", sys.executable, *command]
    with open(f"{folder}/console.txt", "a") as console:
        process = subprocess.Popen(command, stdout=console, stderr=console)
    node = os.getppid()
    try:
        while process.poll() is None:  # process.wait() would not hear ray.cancel
            time.sleep(0.2)
            if os.getppid() != node:  # without which a busy process of Ray's would go on
                os._exit(1)
    except KeyboardInterrupt:
        process.terminate()  # it ends its rollout and writes a checkpoint
        process.wait()
    if process.returncode:
        return f"exit code {process.returncode}", {}
    run = max(Path(folder).glob("*/args.json"), key=os.path.getmtime).parent
    events = EventAccumulator(str(run), size_guidance={"scalars": 0}).Reload()
    scalars = {tag: events.Scalars(tag) for tag in events.Tags()["scalars"]}
    return "", {tag: np.array([(e.step, e.value) for e in scalars[tag]]).T for tag in scalars}


def smooth(curve):
    """[2, K] -> [2, K]: each value becomes the mean of the tenth of the run that ends with it."""
    steps, values = curve
    n = max(1, len(values) // 10)
    return np.stack([steps, [values[max(0, k - n) : k].mean() for k in range(1, len(values) + 1)]])


def report(results, share, out):
    """{(task, prompt, seed): scalars} -> results.csv, which is printed as well, and curves.png. All
    is a mean over the last tenth of a run but best_clip_reward, which is a rollout's; hours are of
    rollouts and updates."""
    header = "task seed clip_reward best_clip_reward success_rate episodic_return steps hours share"
    table = [[*header.split(), "prompt"]]
    panels = collections.defaultdict(lambda: collections.defaultdict(list))
    for (task, prompt, seed), scalars in sorted(results.items()):
        scalars = collections.defaultdict(lambda: np.full((2, 1), np.nan), scalars)
        names = ("clip_reward", "success_rate", "episodic_return")
        clip, success, returns = (smooth(scalars[f"charts/{name}"]) for name in names)
        best = scalars["charts/clip_reward"][1].max()
        seconds = sum(scalars[f"time/{part}_s"][1].sum() for part in ("physics", "wait", "update"))
        means = [f"{x:.4g}" for x in (clip[1, -1], best, success[1, -1], returns[1, -1])]
        cost = [int(returns[0, -1]), f"{seconds / 3600:.2g}", share]
        table.append([task, seed, *means, *cost, prompt])
        panels[task, "clip reward"][prompt].append(clip)
        panels[task, "success rate"][prompt].append(success)
    with open(out / "results.csv", "w", newline="") as file:
        csv.writer(file).writerows(table)
    widths = [max(len(str(cell)) for cell in column) for column in zip(*table)]
    for cells in table:
        print("  ".join(f"{cell:<{width}}" for cell, width in zip(cells, widths)).rstrip())

    figure = Figure((12, 2.4 * len(panels)), layout="constrained")
    axes = figure.subplots(len(panels) // 2, 2).flat  # a row per task
    for ax, ((task, name), prompts) in zip(axes, panels.items()):
        for color, (prompt, curves) in enumerate(prompts.items()):
            for curve in curves:
                ax.plot(*curve, color=f"C{color}", lw=0.7)
            grid = min((steps for steps, _ in curves), key=len)
            mean = np.mean([np.interp(grid, *curve) for curve in curves], axis=0)
            style = "-" if color % 2 == 0 else "--"  # two that are equal are both seen
            ax.plot(grid, mean, style, color=f"C{color}", lw=2.5, label=prompt)
        ax.set(title=task, xlabel="environment steps", ylabel=f"{name}, mean of a tenth of the run")
        ax.spines[["top", "right"]].set_visible(False)
        if name == "clip reward":
            ax.legend(loc="upper left", bbox_to_anchor=(0, -0.15), frameon=False)
        else:
            ax.set_ylim(-0.03, 1.03)
    figure.savefig(out / "curves.png", dpi=120)


if __name__ == "__main__":
    args, more = tyro.cli(Args, description=__doc__, return_unknown_args=True)
    try:
        ray, kind = clip_reward.ray_cluster()
    except clip_reward.UsageError as error:
        sys.exit(f"error: {error}")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C
    share = f"{args.gpus_per_run if kind == 'GPU' else args.cpus_per_run:g} {kind}"
    options = {"num_cpus": args.cpus_per_run, "max_retries": 10}  # Ray sets OMP_NUM_THREADS by it
    if kind == "GPU":
        options |= {"num_gpus": args.gpus_per_run}
    else:
        more = ["--reward-devices", *["cpu"] * args.cpus_per_run, *more]
    start, out = ray.remote(**options)(trial).remote, args.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    running, results, failures = {}, {}, 0
    for seed, task in itertools.product(args.seeds, args.tasks):
        script, *flags = shlex.split(TASKS[task][0])
        for prompt in args.prompts or TASKS[task][1]:
            folder = str(out / task / prompt.replace("/", "_")[:200] / str(seed))
            command = [str(ROOT / script), *flags, "--target-prompt", prompt, "--seed", str(seed)]
            command += ["--runs-dir", folder, "--resume", "latest", *more]
            running[start(command, folder)] = (task, prompt, seed), folder
    has = ray.cluster_resources()[kind]
    print(f"{len(running)} runs, {share} each; the cluster has {has:g}", flush=True)
    try:
        while running:
            (done,), _ = ray.wait([*running])
            try:
                problem, scalars = ray.get(done)
            except ray.exceptions.RayError as error:  # lost eleven times, or a full disk
                problem = str(error).splitlines()[-1]
            (task, prompt, seed), folder = running.pop(done)
            name = f"{task}, seed {seed}, {prompt}"
            if problem:
                failures += 1
                print(f"FAILED, {problem}: {name}; see {folder}/console.txt", flush=True)
            else:
                results[task, prompt, seed] = scalars
                print(f"done, {len(running)} to go: {name}", flush=True)
    except KeyboardInterrupt:
        print("every run ends its rollout now; the same command will go on from there", flush=True)
        for ref in running:
            ray.cancel(ref)
        ray.wait([*running], num_returns=len(running))
    if results:
        report(results, share, out)
    sys.exit(130 if running else int(failures > 0))
