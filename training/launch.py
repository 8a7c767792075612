"""What `pip install clip-reward` puts on the PATH: clip-reward-sac, -dqn and -eval, which are the
scripts with another name."""

import importlib.util
import os
import sys
from pathlib import Path


def start(script, extra, *wanted):
    """Become `python script` with these arguments, or end with the line that installs what it
    wants."""
    if missing := [name for name in wanted if not importlib.util.find_spec(name)]:
        print(
            f'error: {missing[0]} is missing: pip install "clip-reward[{extra}]"', file=sys.stderr
        )
        sys.exit(2)
    (folder,) = importlib.util.find_spec("clip_reward").submodule_search_locations
    # as beside a script of one's own: --env-id MODULE:NAME finds a module in this folder
    os.environ["PYTHONPATH"] = os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")])
    os.execv(sys.executable, [sys.executable, str(Path(folder) / script), *sys.argv[1:]])


def sac():
    start("sac_clip_humanoid.py", "train", "tyro", "tensorboard", "matplotlib")


def dqn():
    start("dqn_clip_classic.py", "train", "tyro", "tensorboard", "matplotlib")


def evaluate():
    start("eval_epic.py", "eval", "tyro", "tensorboard", "matplotlib", "scipy")
