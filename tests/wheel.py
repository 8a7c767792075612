"""The wheel in an empty virtual environment, as somebody has it who does not clone: what it
installs, a picture scored, the types. By hand, for it installs PyTorch anew:

    python tests/wheel.py                       # five minutes
    python tests/wheel.py --python python3.13
"""

import argparse
import csv
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SCORE = """
import gymnasium, numpy as np
from clip_reward import CLIPReward, load_clip
import egl_render

egl_render.setup_gl()
env = gymnasium.make("Humanoid-v5").unwrapped
env.reset(seed=1)
model = egl_render.textured_model(env.fullpath)
renderer = egl_render.MujocoRenderer(model, size=64)
states = np.tile(np.concatenate([env.data.qpos, env.data.qvel]), (2, 1))
states[1, 2:7] = 0.2, 0.7, 0.0, 0.7, 0.0  # lies
reward = CLIPReward(load_clip("local-dir:tiny_clip"), ["a humanoid robot standing up"])
print(*reward(renderer.render(states)).tolist())
"""
TYPED = """
from clip_reward import CLIPReward, load_clip
from egl_render import Camera

reward = CLIPReward(load_clip("local-dir:tiny_clip"), ["words"], alpha={alpha})
camera: Camera = Camera(3.5, 180.0, -10.0)
"""


def main(python, folder):
    def run(*words, code=0):
        command = list(map(str, words))
        process = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        assert process.returncode == code, process.stdout + process.stderr
        return process.stdout + process.stderr

    for name in run("git", "-C", ROOT, "ls-files").splitlines():  # nothing untracked
        if (ROOT / name).is_file():
            (folder / "clone" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / "clone" / name)
    run(python, "-m", "pip", "wheel", "-q", "--no-deps", "-w", folder, folder / "clone")
    (wheel,) = folder.glob("*.whl")
    pins = re.sub(r"\[.*?\]", "", (ROOT / "requirements.txt").read_text())
    (folder / "pins.txt").write_text(pins)
    run(python, "-m", "venv", folder / "venv")
    bin = folder / "venv/bin"

    wanted = f"clip-reward @ {wheel.as_uri()}"
    run(bin / "pip", "install", "-q", "-c", folder / "pins.txt", wanted)
    (record,) = folder.glob("venv/lib/*/site-packages/clip_reward-*/RECORD")
    files = [row[0] for row in csv.reader(record.open())]
    tops = {name.partition("/")[0] for name in files} - {record.parent.name}
    wanted = {"clip_reward", "egl_render", "reward_head.py", "warp_render.py"}
    assert tops - {"__pycache__"} == wanted, "no commands, and no name that others may use"
    code = [name for name in files if name.endswith(".py")]
    modules = ["clip_reward/__init__.py", "egl_render/__init__.py", "reward_head.py"]
    assert code == [*modules, "warp_render.py"]
    there = run(bin / "pip", "list").lower()
    for name in "wandb matplotlib tensorboard tyro ray scipy".split():
        assert not re.search(rf"^{name} ", there, re.M), f"{name} is installed to score a picture"
    standing, lying = map(float, run(bin / "python", "-c", SCORE).split()[-2:])
    assert -1.0 <= lying < standing - 0.2 and standing <= 1.0, (standing, lying)
    for alpha, code in (0.5, 0), ("'half'", 1):
        (folder / "typed.py").write_text(TYPED.format(alpha=alpha))
        run(ROOT / ".venv/bin/mypy", "--python-executable", bin / "python", "typed.py", code=code)
    print("all is well")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", default="python3", help="the Python to install it for")
    with tempfile.TemporaryDirectory() as folder:
        main(parser.parse_args().python, Path(folder))
