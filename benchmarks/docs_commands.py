"""Every command that README, docs and the scripts' own help tell to type, run in a short form: the
same flags, after them some that make it small, so that one which is out of date fails. 99 minutes
on two cores that train two policies meanwhile; benchmarks/docs_commands.sh runs it and what wants
an environment of its own.

    python benchmarks/docs_commands.py                  # all
    python benchmarks/docs_commands.py eval_epic        # those with these letters in them
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
SMALL = "--total-timesteps 96 --num-envs 2 --episode-length 12 --learning-starts 24"
SMALL += " --hidden-size 16 --gradient-steps 2 --batch-size 8 --buffer-size 10000"
SMALL += " --render-size 64 --video-freq 96 --checkpoint-freq 96"
SMALL += " --clip-model local-dir:tiny_clip --reward-devices cpu"
SHORT = {  # flags after those of the document, by the words of a command
    "sac_clip_humanoid.py": SMALL,
    "dqn_clip_classic.py": SMALL,
    "sac_swimmer.py": SMALL,
    "sac_goal_distance.py": SMALL,
    "dqn_acrobot.py": SMALL,
    "eval_epic.py landscape": "--clip-model local-dir:tiny_clip --render-size 64 --out data",
    "eval_epic.py prompts --dataset": "--clip-model local-dir:tiny_clip --out data/prompts",
    "eval_epic.py prompts --task kneeling --dataset": "--out data/prompts",
    "eval_epic.py prompts": "--clip-model local-dir:tiny_clip --render-size 64 --per-pose 4",
    "eval_epic.py collect": "--out data/{n}.npz",
    "eval_epic.py epic": "--clip-model local-dir:tiny_clip",
    "eval_epic.py success": "--episodes 4",
    "eval_epic.py sheet": "",
    "pipeline.py": "--num-envs 2 --episode-length 10 --gradient-steps 2 --rollouts 1"
    " --clip-model local-dir:tiny_clip --render-size 64 --reward-devices cpu",
    "scaling.py": "--rollouts 1 --num-envs 16 --actors 1 2 --scorer-ms 0.1 --steps 512",
    "updates.py": "--rounds 1 --device cpu",
    "soak.py": "--steps 11000 --every 1",
    "plot_runs.py": "",
    "screenshots.py": "--out data --wait 4",
    "gallery.py": "--out data/tasks.png",
    "paid.py": "--step 3 --out data/paid.png",
    "chaos.py": "--deaths 2 --script dqn --seeds 1",
    "sweep.py": "--seeds 1 --total-timesteps 200 --num-envs 2 --episode-length 10 --tasks CartPole"
    " --learning-starts 40 --gradient-steps 2"
    " --gpus-per-run 1 --out runs/sweep_{n}",
    "gym_wrapper.py": "",
    "torch.cuda.is_available": "",
    "new_mujoco_task.py": SMALL,
    "new_reward.py": "",
    "sb3_clip_reward.py": "--total-timesteps 800",
}
ELSEWHERE = {  # run by something else, or by nothing
    "imitation_reward.py": "docs_commands.sh",
    "eval_epic.py label": "it waits for a person; tests/test_label_page.py",
    "docs_commands.py": "this",
    "--reward-devices ray": "tests/test_ray.py, which has a cluster",
    "wheel.py": "docs_commands.sh",
    "train.py": "make tiny_clip, hours; tests/test_tiny_clip.py",
    "evaluate.py": "minutes; tests/test_tiny_clip.py",
    "hacked.py": "it wants runs that are gone",
    "paint.py": "it writes into scenes/; tests/test_scenes.py",
}
TASK = """
import gymnasium as gym
gym.register("MyTask-v0", "gymnasium.envs.mujoco.reacher_v5:ReacherEnv")
"""


def commands(text):
    """Lines of a document that begin with python, with what follows a backslash, and with the
    variables that the document sets; and what stands in backquotes and begins with python."""
    for name, value in re.findall(r'\b([A-Z]+)="(.*?)"$', text, re.M | re.S):
        text = text.replace(f'"${name}"', f'"{value}"').replace(f"${name} ", f"{value} ")
    for found in re.findall(r"^ {4}[^#\n`]*?\bpython ((?:.*\\\n)*.*)$", text, re.M):
        line = re.sub(r"\\+\n\s*", "", found).partition("; done")[0]
        yield re.sub(r"\s{2,}#.*|\s# .*", "", line).strip()
    for found in re.findall(r"`python ([^`]+)`", text):
        yield " ".join(found.split())


def prepare(folder):
    """A copy of the code with what the commands talk of: runs, data, modules, pictures."""
    import test_new_task

    from evaluation import datasets
    from tiny_clip import poses

    ignored = shutil.ignore_patterns(".venv", ".git", "runs", "data", "__pycache__")
    shutil.copytree(ROOT, folder, ignore=ignored, dirs_exist_ok=True)
    (folder / "my_module.py").write_text(TASK)
    judge = (
        "def stacked(states):\n    'Above.'\n    return states[:, 2] > 1.35\n"
        "somersault = done = stacked\n"
    )
    (folder / "my_task.py").write_text(judge)
    for diff in test_new_task.DIFFS:
        name, text = test_new_task.apply(diff)
        (folder / name).write_text(text)
    shutil.copy(folder / "docs/kneeling_frames.png", folder / "goal.png")
    runs = {"RUN": "", "GROUND_TRUTH_RUN": "--reward ground-truth"}
    for name, more in runs.items():
        words = f"sac_clip_humanoid.py --target-prompt 'a humanoid robot kneeling' {SMALL} {more}"
        make(folder, f"{words} --runs-dir made/{name}")
        (made,) = (folder / "made" / name).iterdir()
        (folder / "runs").mkdir(exist_ok=True)
        made.rename(folder / "runs" / name)
    for number, name in enumerate(("kneeling_1", "cartpole", "ground_truth")):
        shutil.copytree(folder / "runs/RUN", folder / f"runs/{name}/Humanoid-v5__a__{number}__1")
    shutil.copytree(folder / "runs/RUN", folder / "runs/HalfCheetah__a__1__1")
    make(folder, "eval_epic.py collect --source run --run runs/RUN --out data/RUN.npz --episodes 2")
    shutil.copy(folder / "data/RUN.npz", folder / "data/mine.npz")
    make(folder, "eval_epic.py collect --source poses --out data/poses.npz --per-pose 4")
    data = datasets.load_dataset(folder / "data/RUN.npz")
    data.states[::2] = 0  # every second one kneels, at rest
    data.states[::2, :24] = poses.sample("kneeling", np.random.default_rng(0), len(data) // 2)
    datasets.save_dataset(data, folder / "data/kneeling.npz")
    labels = [f"kneeling,frame,{n},kneeling,{n % 2}" for n in range(12)]
    labels += [f"kneeling,episode,{n},kneeling,{n % 2}" for n in range(2)]
    (folder / "data/kneeling").mkdir(exist_ok=True)
    lines = ["dataset,unit,index,task,label", *labels]
    (folder / "data/kneeling/labels.csv").write_text("\n".join(lines) + "\n")


def call(folder, line):
    command = f"{shlex.quote(sys.executable)} {line}"
    variables = {"PROMPT": "kneeling", "task": "lotus", "seed": "1"}  # of the documents' loops
    options = {"shell": True, "cwd": folder, "capture_output": True, "text": True}
    process = subprocess.run(command, env=os.environ | variables, **options)
    return process.returncode, process.stdout + process.stderr


def make(folder, line):
    code, said = call(folder, line)
    assert code == 0, said


def main(letters):
    documents = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    documents += [ROOT / "CONTRIBUTING.md", ROOT / "tiny_clip/README.md"]
    scripts = [*ROOT.glob("*.py"), *(ROOT / "examples").glob("*.py")]
    scripts += (ROOT / "benchmarks").glob("*.py")
    found = {}
    for path in [*documents, *scripts]:
        text = path.read_text()
        if path.suffix == ".py":
            text = text.split('"""')[1].replace("\\\\\n", "\\\n")
        for command in commands(text):
            found.setdefault(command, path.relative_to(ROOT))
    found = {x: path for x, path in found.items() if letters in x}
    found = {x: y for x, y in found.items() if not any(name in x for name in ELSEWHERE)}
    if not found:
        sys.exit(f"no command has {letters!r}")
    folder, failed = Path(tempfile.mkdtemp()) / "code", 0
    prepare(folder)
    for n, (command, path) in enumerate(found.items()):
        kind = next((name for name in SHORT if name in command), None)
        if kind is None:
            failed += 1
            print(f"FAILED, nobody knows how to make it short: {path}: {command}", flush=True)
            continue
        began = time.perf_counter()
        code, said = call(folder, f"{command} {SHORT[kind].format(n=n)}")
        failed += code != 0
        verdict = f"{time.perf_counter() - began:5.1f} s" if code == 0 else "FAILED"
        print(f"{verdict}  {path}: {command}", flush=True)
        if code:
            print(textwrap.indent(said[-1500:], "    "), flush=True)
    shutil.rmtree(folder.parent)
    sys.exit(f"{failed} commands failed" if failed else 0)


if __name__ == "__main__":
    main(" ".join(sys.argv[1:]))
