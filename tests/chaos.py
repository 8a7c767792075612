"""A run that is ended again and again at random moments, and resumed each time, against the same
run left alone: the last checkpoints must be equal to the bit, and nothing may be left over.

    python tests/chaos.py --script dqn sac --seeds 1 2 3 --deaths 20          # 12 minutes, 2 cores
"""

import contextlib
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1])]

import helpers
import tyro

from training.run import checkpoints

COMMON = f"""--num-envs 2 --episode-length 12 --render-size 64 --batch-size 16
    --gradient-steps 6 --learning-starts 24 --checkpoint-freq 48 --video-freq 96
    --clip-batch-size 8 --clip-model {helpers.TINY} --reward-devices cpu cpu""".split()
SCRIPTS = {  # HalfCheetah's environments are processes
    "sac": ["sac_clip_humanoid.py", "--env-id", "HalfCheetah-v5", "--target-prompt", "a robot"],
    "dqn": ["dqn_clip_classic.py", "--target-prompt", "pole upright"],
}
# ends itself at the N-th rename, before it or after it
AT_A_RENAME = """
import os, pathlib, runpy, signal, sys
number, rename, renamed = int(sys.argv.pop(1)), pathlib.Path.replace, []
def replace(*paths):
    renamed.append(paths)
    if len(renamed) == (number + 1) // 2 and number % 2: os.kill(os.getpid(), signal.SIGKILL)
    rename(*paths)
    if len(renamed) == number // 2 and not number % 2: os.kill(os.getpid(), signal.SIGKILL)
pathlib.Path.replace = replace
del sys.argv[0]
runpy.run_path(sys.argv[0], None, "__main__")
"""


KINDS = "kill term int hup start rename full cut worker environment".split()
SIGNALS = {"term": signal.SIGTERM, "int": signal.SIGINT, "hup": signal.SIGHUP}


@dataclass
class Args:
    script: tuple[Literal["sac", "dqn"], ...] = ("dqn", "sac")
    seeds: tuple[int, ...] = (1,)
    deaths: int = 20


class Chaos:
    """A script, a seed, and the ways in which its run will end: some of KINDS."""

    def __init__(self, script, seed, kinds, folder):
        self.random, self.folder, self.kinds = random.Random(seed), folder, kinds
        name, *flags = SCRIPTS[script]
        self.name, self.steps = script, 24 * (6 * len(kinds) + 4)
        self.command = [str(helpers.ROOT / name), *flags, *COMMON, "--seed", str(seed)]
        self.command += ["--total-timesteps", str(self.steps)]
        self.left_over = folder / "chaos"

    def start(self, *before, runs_dir=None):
        """The run, resumed if it has a checkpoint -> process, lines as they come, their reader."""
        command = [sys.executable, *before, *self.command, "--resume", "latest", "--runs-dir"]
        process = subprocess.Popen(
            [*helpers.HANGS_UP, *command, str(runs_dir or self.left_over)],
            **{"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True},
            **{"env": helpers.environment(), "start_new_session": True},
        )
        lines = []

        def read():
            lines.extend(iter(process.stdout.readline, ""))

        reader = threading.Thread(target=read)
        reader.start()
        return process, lines, reader

    def rollouts(self, process, lines, count):
        """Wait until it has reported so many, and a bit."""

        def there():
            reported = sum(line.startswith("step ") for line in lines)
            return reported >= count or process.poll() is not None

        helpers.wait_until(there)
        time.sleep(self.random.random() * 0.3)

    def resumed(self):
        """{step: path} of the run that goes on: one that was killed before its first checkpoint
        leaves its folder, and is begun anew."""
        found = [checkpoints(path) for path in self.left_over.glob("*")]
        return next(filter(None, found), {})

    def die(self, kind):
        """Start it and end it in one way -> what it printed."""
        at_rename = ("-c", AT_A_RENAME, str(self.random.randint(1, 9))) * (kind == "rename")
        process, lines, reader = self.start(*at_rename)
        if kind == "start":
            time.sleep(self.random.uniform(0, 6))
            process.send_signal(self.random.choice([signal.SIGKILL, *SIGNALS.values()]))
        elif kind != "rename":
            self.rollouts(process, lines, self.random.randint(1, 4))
        children = {pid: self._words(pid) for pid in helpers.descendants(process.pid)}
        workers = [pid for pid, words in children.items() if b"spawn_main" in words]
        environments = [pid for pid, words in children.items() if words == self._forked(children)]
        with contextlib.suppress(ProcessLookupError):
            if kind in ("kill", "cut"):
                process.kill()
            elif kind in SIGNALS:  # to all, as a terminal does it
                os.killpg(process.pid, SIGNALS[kind])
            elif kind == "full":
                resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (9000, 9000))
            elif kind == "worker":  # its loss ends the run
                os.kill(self.random.choice(workers), signal.SIGKILL)
            elif kind == "environment" and environments:
                os.kill(environments[-1], signal.SIGKILL)
            elif kind == "environment":  # DQN's are in the script's process
                process.kill()
        helpers.wait_until(lambda: process.poll() is not None, 60)
        assert process.poll() is not None, f"{kind}: it still runs\n{''.join(lines)}"
        reader.join()
        assert helpers.wait_until(lambda: helpers.gone(children), 3), f"{kind}: processes are left"
        printed = "".join(lines)
        assert kind == "environment" or "Traceback" not in printed, f"{kind}: {printed}"
        return process.returncode, printed

    @staticmethod
    def _words(pid):
        with contextlib.suppress(OSError):
            return Path(f"/proc/{pid}/cmdline").read_bytes()
        return b""

    @staticmethod
    def _forked(children):
        """The command line of the forkserver, which its children share."""
        return next((words for words in children.values() if b"forkserver" in words), None)

    def run(self):
        """-> a line on what happened. Raises AssertionError."""
        process, lines, reader = self.start(runs_dir=self.folder / "whole")
        assert process.wait() == 0, "".join(lines)
        reader.join()
        happened = []
        for kind in self.kinds:
            code, printed = self.die(kind)
            happened.append(f"{kind} {code}")
            print(
                f"{self.name}: {kind}, exit code {code}, step {max(self.resumed(), default=0)}",
                flush=True,
            )
            if code == 0:
                raise AssertionError(f"the run was over after {happened}")
            if kind == "cut" and len(self.resumed()) > 1:
                newest = next(iter(self.resumed().values()))
                os.truncate(newest, self.random.randrange(newest.stat().st_size))
        process, lines, reader = self.start()
        assert process.wait() == 0, "".join(lines)
        reader.join()
        one, two = helpers.only_run(self.folder / "whole"), self.resumed()[self.steps].parents[1]
        for name in (None, "best"):
            same = helpers.equal(helpers.checkpoint(one, name), helpers.checkpoint(two, name))
            assert same, f"{name or 'the last'} differs after {happened}"
        assert not [*two.rglob(".*")], "temporary files are left"
        values = [helpers.scalars(folder)[0]["charts/clip_reward"] for folder in (one, two)]
        whole, resumed = ([(event.step, event.value) for event in curve] for curve in values)
        assert dict(resumed) == dict(whole), "the curves differ"
        return f"{self.name}: {len(happened)} deaths, equal to the bit ({', '.join(happened)})"


def main(args: Args):
    for seed in args.seeds:
        for script in args.script:
            folder = Path(tempfile.mkdtemp())
            kinds = random.Random(seed).choices(KINDS, k=args.deaths)
            print(Chaos(script, seed, kinds, folder).run(), f"seed {seed}", flush=True)
            shutil.rmtree(folder)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
