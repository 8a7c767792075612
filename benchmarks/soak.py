"""Does a long run grow? Memory, open files, threads and speed of a run and all its processes, every
few seconds, as a table and a plot.

    python benchmarks/soak.py --out soak_local                   # 500 000 steps of CartPole
    python benchmarks/soak.py --out soak_ray --reward-devices ray:2
"""

import csv
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import tyro
from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parent.parent
RUN = """--target-prompt upright --clip-model local-dir:tiny_clip --render-size 64 --num-envs 8
    --episode-length 100 --gradient-steps 20 --learning-starts 10000 --buffer-size 100000
    --checkpoint-freq 20000 --video-freq 100000"""


@dataclass
class Args:
    out: Path = Path("soak")
    """results go to OUT.csv and OUT.png"""
    steps: int = 500_000
    """environment steps"""
    reward_devices: tuple[str, ...] = ("cpu", "cpu")
    """as the script's"""
    every: float = 5.0
    """seconds between two looks"""


def look(process):
    """Memory [MB], open files and threads of a process, and of all below it."""
    row = {}
    for name, processes in (("run", [process]), ("others", process.children(recursive=True))):
        sums = np.zeros(3)
        for one in processes:
            try:
                memory = one.memory_full_info().uss  # its own, not what it shares
                sums += memory / 1e6, one.num_fds(), one.num_threads()
            except psutil.Error:  # it has just ended
                continue
        row |= dict(zip((f"{name}_{what}" for what in ("MB", "files", "threads")), sums))
    return row


def main(args: Args):
    rows, began = [], time.time()
    with tempfile.TemporaryDirectory() as runs:
        flags = f"{RUN} --total-timesteps {args.steps} --runs-dir {runs} --reward-devices"
        command = [sys.executable, ROOT / "dqn_clip_classic.py", *flags.split()]
        console = open(f"{args.out}.log", "w+")
        script = subprocess.Popen([*command, *args.reward_devices], stdout=console)
        process = psutil.Process(script.pid)
        while script.poll() is None:
            time.sleep(args.every)
            lines = Path(console.name).read_text().splitlines()
            steps = [line.split()[1] for line in lines if line.startswith("step ")]
            if steps and script.poll() is None:
                row = {"seconds": time.time() - began, "steps": int(steps[-1].replace(",", ""))}
                rows.append(row | look(process))
        assert script.returncode == 0, Path(console.name).read_text()[-2000:]
    with open(f"{args.out}.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    table = {name: np.array([row[name] for row in rows]) for name in rows[0]}
    table["steps/s"] = np.gradient(table["steps"], table["seconds"])
    tenth = max(2, len(rows) // 10)
    for name, values in table.items():
        first, last = np.median(values[tenth : 2 * tenth]), np.median(values[-tenth:])
        print(f"{name:15} {first:10.1f} in the second tenth, {last:10.1f} in the last")
    figure = Figure((8, 5), layout="constrained")
    panels = {"MB": "MB of their own", "files": "open files", "threads": "threads", "steps/s": ""}
    for ax, (what, words) in zip(figure.subplots(2, 2).flat, panels.items()):
        for name in (name for name in table if name.endswith(what)):
            ax.plot(table["steps"] / 1000, table[name], label=name.partition("_")[0])
        ax.set(xlabel="thousand steps", ylabel=words or what, ylim=(0, None))
        ax.legend()
    figure.savefig(f"{args.out}.png", dpi=100)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
