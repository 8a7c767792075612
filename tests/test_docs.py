"""The commands that README, docs and docstrings tell users to type: their flags exist."""

import importlib
import os
import re
import shlex
import subprocess
import sys

import numpy as np
import pytest
import tyro
from helpers import ROOT

from clip_reward import CLIPEmbedder, load_clip, load_image

DOCUMENTS = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), ROOT / "tiny_clip/README.md"]
DOCUMENTS.append(ROOT / "kube/README.md")
for folder in (".", "examples", "benchmarks"):
    DOCUMENTS += sorted((ROOT / folder).glob("*.py"))
DOCUMENTS = [path for path in DOCUMENTS if path.name != "CHANGELOG.md"]
COPIES = {  # docs/new_task.md: {name of a copy: the script}
    new: old
    for old, new in re.findall(
        r"^--- (\w+)\.py\n\+\+\+ (\w+)\.py$", (ROOT / "docs/new_task.md").read_text(), re.M
    )
}
PLAIN = "new_reward gym_wrapper imitation_reward sb3_clip_reward wheel chaos paint".split()


def commands(path):
    """What begins with python in a document: indented lines, with those that a backslash continues
    and the variables that the document sets, and text in backquotes."""
    text = path.read_text()
    if path.suffix == ".py":
        text = text.split('"""')[1].replace("\\\\\n", "\\\n")
    for name, value in re.findall(r'\b([A-Z]+)="(.*?)"$', text, re.M | re.S):
        text = text.replace(f'"${name}"', f'"{value}"').replace(f"${name} ", f"{value} ")
    for found in re.findall(r"^ {4}[^#\n`]*?\bpython ((?:.*\\\n)*.*)$", text, re.M):
        line = re.sub(r"\\+\n\s*", "", found).partition("; do")[0]
        yield re.sub(r"\s{2,}#.*|\s# .*", "", line).strip()
    for found in re.findall(r"`python ([^`]+)`", text):
        yield " ".join(found.split())


def parser(script, words):
    """Return what parses the words, as the script does -> parser, words."""
    name = COPIES.get(script.stem) or ".".join(script.relative_to(ROOT).with_suffix("").parts)
    module = importlib.import_module(name)
    kind = getattr(module, "Args", None) or getattr(module, "main", None)
    if name == "eval_epic":
        kind, words = getattr(module, words[0].capitalize()), words[1:]
    if script.stem == "pictures":
        kind, words = getattr(module, words[0]), words[1:]
    if script.stem in ("pipeline", "sweep", "gpu_pieces"):  # hand on what they do not know
        _, words = tyro.cli(kind, args=words, return_unknown_args=True)
    if script.stem in ("pipeline", "sweep", "gpu_pieces", "new_mujoco_task"):
        kind = importlib.import_module("sac_clip_humanoid").Args
    return tyro.extras.get_parser(kind, config=(tyro.conf.OmitArgPrefixes,)), words


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_flags_of_every_command_exist(path):
    for command in commands(path):
        name, *words = shlex.split(command.partition(" > ")[0])
        script = ROOT / name
        if name == "-c" or script.stem in PLAIN:
            continue
        assert script.exists() or script.stem in COPIES, command
        try:
            parse, words = parser(script, words)
            parse.parse_args(words)
        except SystemExit:
            pytest.fail(f"{path.name}: {command}")


@pytest.mark.slow
def test_the_library_snippet_runs_as_pasted():
    code = re.search(r"```python\n(.*?)```", (ROOT / "docs/faq.md").read_text(), re.S)[1]
    bare = {name: value for name, value in os.environ.items() if "DISPLAY" not in name}
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**bare, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    clip = load_clip("tiny_clip")
    embed = CLIPEmbedder(clip).embed_images
    s = embed(load_image(ROOT / "docs/goal_kneeling.png")[None])[0].numpy()
    # R = 1 - 1/2 |alpha proj_L(s) + (1 - alpha) s - g|^2, by numpy
    tokens = clip.tokenizer(["a humanoid robot kneeling", "a humanoid robot"])
    g, b = clip.model.encode_text(tokens).detach().numpy()
    g, b = g / np.linalg.norm(g), b / np.linalg.norm(b)
    line = (g - b) / np.linalg.norm(g - b)
    mixed = 0.5 * (b + (s - b) @ line * line) + 0.5 * s
    expected = 1 - 0.5 * np.sum((mixed - g) ** 2)
    printed = float(re.search(r"\[([-.\d]+)\]", result.stdout)[1])
    assert printed == pytest.approx(expected, abs=1e-3)


def test_the_labels_of_a_pose_name_its_judge_in_every_command():
    """Without --judge a command would ask about another task than the one of the page."""
    found = [command for command in commands(ROOT / "docs/labels.md") if "knees" not in command]
    assert [command.split()[:2] for command in found] == [["eval_epic.py", "collect"]]
