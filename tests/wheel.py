"""The wheel in an empty virtual environment, as somebody has it who does not clone: what it
installs, a picture scored, the commands, the types. By hand, for it installs PyTorch anew:

    python tests/wheel.py                       # five minutes
    python tests/wheel.py --python python3.13
"""

import argparse
import csv
import re
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
TINY = "--clip-model local-dir:tiny_clip --render-size 64 --num-envs 2 --episode-length 10"
TINY = f"{TINY} --total-timesteps 60 --learning-starts 20 --gradient-steps 3 --reward-devices cpu"


def main(python, folder):
    def run(*words, code=0):
        command = list(map(str, words))
        process = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        assert process.returncode == code, process.stdout + process.stderr
        return process.stdout + process.stderr

    run("git", "-C", ROOT, "worktree", "add", "--detach", folder / "clone")  # nothing untracked
    try:
        run(python, "-m", "pip", "wheel", "-q", "--no-deps", "-w", folder, folder / "clone")
    finally:
        run("git", "-C", ROOT, "worktree", "remove", "--force", folder / "clone")
    (wheel,) = folder.glob("*.whl")
    pins = re.sub(r"\[.*?\]", "", (ROOT / "requirements.txt").read_text())
    (folder / "pins.txt").write_text(pins)
    run(python, "-m", "venv", folder / "venv")
    bin = folder / "venv/bin"

    def install(extra=""):
        wanted = f"clip-reward{extra} @ {wheel.as_uri()}"
        run(bin / "pip", "install", "-q", "-c", folder / "pins.txt", wanted)
        print(f"installed {wanted}", flush=True)

    install()
    (record,) = folder.glob("venv/lib/*/site-packages/clip_reward-*/RECORD")
    names = {row[0].partition("/")[0] for row in csv.reader(record.open())} - {record.parent.name}
    assert names == {"clip_reward", "egl_render", "clip_reward_launch.py", "..", "__pycache__"}
    there = run(bin / "pip", "list").lower()
    for name in "wandb matplotlib tensorboard tyro ray gradio scipy".split():
        assert not re.search(rf"^{name} ", there, re.M), f"{name} is installed to score a picture"
    standing, lying = map(float, run(bin / "python", "-c", SCORE).split()[-2:])
    assert -1.0 <= lying < standing - 0.2 and standing <= 1.0, (standing, lying)
    for command in "clip-reward-sac", "clip-reward-dqn":
        assert 'pip install "clip-reward[train]"' in run(bin / command, code=2)
    assert 'pip install "clip-reward[eval]"' in run(bin / "clip-reward-eval", code=2)
    for alpha, code in (0.5, 0), ("'half'", 1):
        (folder / "typed.py").write_text(TYPED.format(alpha=alpha))
        run(ROOT / ".venv/bin/mypy", "--python-executable", bin / "python", "typed.py", code=code)

    install("[train]")
    prompt = "--target-prompt", "a humanoid robot kneeling", *TINY.split()
    for name in "sac", "dqn":
        run(bin / f"clip-reward-{name}", *prompt, "--runs-dir", name)
        (page,) = folder.glob(f"{name}/*/index.html")
        for words in f"clip-reward-{name} --resume", "clip-reward-eval success --run":
            assert f"{words} {page.parent.relative_to(folder)}" in page.read_text()
    assert "clip-reward[track]" in run(bin / "clip-reward-sac", *prompt, "--track", code=2)
    install("[eval]")
    for name in "sac", "dqn":
        (saved,) = (folder / name).glob("*")
        assert [*saved.glob("checkpoints/best.pt")] and [*saved.glob("videos/*.mp4")]
    said = run(bin / "clip-reward-eval", "success", "--run", saved, "--episodes", 2)
    assert "of 2 episodes" in said, said
    print("all is well")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", default="python3", help="the Python to install it for")
    with tempfile.TemporaryDirectory() as folder:
        main(parser.parse_args().python, Path(folder))
