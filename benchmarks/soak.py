"""Does a long run grow? Memory, open files, threads and speed of a run and of all its processes.

python benchmarks/soak.py                                # 500 000 steps of CartPole
python benchmarks/soak.py --reward-devices ray:2
"""

import contextlib
import re
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import psutil
import tyro

ROOT = Path(__file__).resolve().parent.parent
RUN = """--target-prompt upright --clip-model local-dir:tiny_clip --render-size 64 --num-envs 8
    --episode-length 100 --gradient-steps 20 --learning-starts 10000 --buffer-size 100000
    --checkpoint-freq 20000 --video-freq 100000"""
COLUMNS = "steps/s MB files threads others'_MB others'_files others'_threads".split()


def look(processes):
    """Sum up memory of their own [MB], open files and threads -> [3]."""
    sums = np.zeros(3)
    for one in processes:
        with contextlib.suppress(psutil.Error):  # it has just ended
            sums += one.memory_full_info().uss / 1e6, one.num_fds(), one.num_threads()
    return sums


def main(
    steps: int = 500_000, reward_devices: tuple[str, ...] = ("cpu", "cpu"), every: float = 5.0
) -> None:
    """Print a row at each look, and at the end the medians of the second and of the last tenth.

    Args:
        steps: environment steps
        reward_devices: as the script's
        every: seconds between two looks
    """
    rows, before = [], 0
    print(f"{'step':>9}", *(f"{name:>15}" for name in COLUMNS))
    with tempfile.TemporaryDirectory() as folder, open(f"{folder}/console.txt", "w") as console:
        flags = f"{RUN} --total-timesteps {steps} --runs-dir {folder}/runs --reward-devices"
        command = [sys.executable, ROOT / "dqn_clip_classic.py", *flags.split(), *reward_devices]
        process = psutil.Popen(command, stdout=console)
        while process.poll() is None:
            time.sleep(every)
            found = re.findall(r"^step ([\d,]+)", Path(console.name).read_text(), re.M)
            if found and process.poll() is None:
                step = int(found[-1].replace(",", ""))
                usage = [*look([process]), *look(process.children(recursive=True))]
                rows.append([(step - before) / every, *usage])
                before = step
                print(f"{step:>9}", *(f"{value:>15.1f}" for value in rows[-1]), flush=True)
    if process.returncode:
        sys.exit(process.returncode)
    tenth = max(1, len(rows) // 10)
    for title, part in ("2nd tenth", rows[tenth : 2 * tenth]), ("last one", rows[-tenth:]):
        print(f"{title:>9}", *(f"{value:>15.1f}" for value in np.median(part, axis=0)))


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
