"""The benchmarks run and print what they promise; nothing here is about speed."""

import json
import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import plot_runs

ROOT = Path(plot_runs.__file__).resolve().parent.parent


def run(*command, code=0, **environment):
    command, environment = list(map(str, command)), os.environ | environment
    run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert run.returncode == code, run.stdout + run.stderr
    return run


@pytest.mark.slow
def test_what_is_for_a_gpu_runs_in_its_form_for_a_cpu(tmp_path):
    """gpu.sh: a piece of each kind ends with numbers above 0, in one table and one JSON."""
    names = "run_warp memory draw_warp_by_2"
    environment = {"DEVICE": "cpu", "PYTHON": sys.executable}
    environment["ONLY"] = ",".join(["imports", "learn", "judged", *names.split()])
    printed = run("benchmarks/gpu.sh", tmp_path, **environment).stdout
    assert (tmp_path / "table.txt").read_text() in printed and "INCOMPLETE" not in printed
    assert printed.startswith("no GPU: ")
    results = json.loads((tmp_path / "results.json").read_text())
    assert results.keys() == set(names.split())
    assert "of 100 episodes" in (tmp_path / "judged.txt").read_text()
    assert len((tmp_path / "summary.txt").read_text().splitlines()) == 3 + len(names.split())
    with tarfile.open(tmp_path / "results.tar.gz") as tar:
        files = [Path(name).name for name in tar.getnames()]
    assert {"table.txt", "results.json", "picture.png", "judged.txt", "best.pt"} <= set(files)
    assert not any(re.fullmatch(r"step_\d+\.pt", name) for name in files), "large"
    stages = results["run_warp"]["stages"]
    assert set(stages) == {"physics", "render", "clip", "update", "end to end"}
    assert min(unit for stage in stages.values() for unit in stage.values()) > 0
    assert results["run_warp"]["end_to_end_of_alone"] > 0
    assert results["draw_warp_by_2"]["draw_alone_frames_per_s"] > 0
    assert 0 < results["memory"]["peak_gb"]["loading"] <= results["memory"]["peak_gb"]["scoring"]


def test_a_piece_that_fails_is_named_and_makes_the_exit_code_1(tmp_path):
    (tmp_path / "requirements.txt").write_text("somebody's")
    printed = run("benchmarks/gpu.sh", tmp_path, code=1, DEVICE="cpu", PYTHON="false").stdout
    assert "INCOMPLETE: updates, exit code 1" in printed and "== draw_warp" in printed
    assert (tmp_path / "requirements.txt").read_text() == "somebody's"


def test_what_is_for_a_gpu_comes_in_portions_of_at_most_560_s(tmp_path):
    """Imports, CLIP, a run and learning come first; a portion is a part of the whole."""
    gpu = {"DEVICE": "cuda:0", "PYTHON": "false", "DRY": "1"}
    lines = run("benchmarks/gpu.sh", tmp_path / "out", **gpu).stdout.splitlines()
    pieces = [(int(portion), name, int(limit)) for portion, name, limit in map(str.split, lines)]
    portions = {portion for portion, _, _ in pieces}
    assert portions == set(range(1, len(portions) + 1)) and len(portions) > 3
    for k in portions:
        assert 0 < sum(limit for portion, _, limit in pieces if portion == k) <= 560
    names = [name for _, name, _ in pieces]
    first = ["imports", "random_clip", "clip", "run_warp", "tests", "learn", "judged"]
    assert names[:7] == first and names[-1] == "devices" and len(set(names)) == len(names) <= 40
    second = run("benchmarks/gpu.sh", PORTION="2", **gpu).stdout.splitlines()
    assert second == [line for line in lines if line.startswith("2 ")]
    rest = run("benchmarks/gpu.sh", FROM="updates", **gpu).stdout.splitlines()
    assert rest == lines[names.index("updates") :]
    chosen = run("benchmarks/gpu.sh", ONLY="clip,ray", **gpu).stdout.splitlines()
    assert [line.split()[1] for line in chosen] == ["clip", "ray"]
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_pipeline_runs_the_classic_tasks_by_dqn(tmp_path):
    small = ["--num-envs", 2, "--episode-length", 10, "--gradient-steps", 2, "--rollouts", 1]
    small += ["--env-id", "CartPole-v1", "--reward-devices", "cpu"]
    small += ["--json", tmp_path / "pipeline.json"]
    run(sys.executable, "benchmarks/pipeline.py", *small)
    result = json.loads((tmp_path / "pipeline.json").read_text())
    assert result["args"]["batch_size"] == 64 and result["stages"]["update"]["updates/s"] > 0


def write_run(folder, slope, flags):
    """Write a run folder whose reward grows by slope per 100 steps."""
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(folder)) as writer:
        for step in range(20):
            writer.add_scalar("charts/clip_reward", slope * step, 100 * step)
    (folder / "args.json").write_text(json.dumps(flags))


def test_plot_runs_groups_seeds_and_draws(tmp_path):
    runs = []
    for alpha, seed, slope in (0.0, 1, 1), (0.0, 2, 2), (0.0, 3, 3), (0.5, 1, 10):
        runs.append(folder := tmp_path / f"Task__script__{seed}__{alpha}")
        flags = {"seed": seed, "reward_alpha": alpha, "gamma": 0.9, "runs_dir": str(seed)}
        write_run(folder, slope, flags)
    script = (sys.executable, "benchmarks/plot_runs.py")
    lines = run(*script, *runs, "--last", 4, "--out", tmp_path / "a.png").stdout.splitlines()
    assert "mean of the last 4: 17.5," in lines[0] and "mean of the last 4: 35," in lines[1]
    assert lines[4] == "reward_alpha 0.0: 3 runs, mean 35, 95 % interval 17.5 to 52.5"
    assert lines[5] == "reward_alpha 0.5: 1 runs, mean 175, 95 % interval none"
    assert (tmp_path / "a.png").stat().st_size > 5000
    steps, values = plot_runs.read(runs[1], "charts/clip_reward")
    assert steps[-1] == 1900 and values[-1] == pytest.approx(38)
    assert "has no nothing" in run(*script, runs[0], "--scalar", "nothing", code=1).stderr


def test_plot_runs_draws_a_panel_for_each_prompt(tmp_path):
    runs = []
    for prompt, pink, slope in ("kneeling", True, 1), ("kneeling", False, 2), ("splits", True, 3):
        runs.append(folder := tmp_path / f"{prompt}_{pink}")
        flags = {"seed": 1, "target_prompt": [prompt], "pink_noise": pink}
        write_run(folder, slope, flags)
    script = (sys.executable, "benchmarks/plot_runs.py", *runs, "--last", 4, "--by-prompt")
    lines = run(*script, "--out", tmp_path / "a.png").stdout.splitlines()
    assert lines[3:] == [
        "kneeling",
        "pink_noise True: 1 runs, mean 17.5, 95 % interval none",
        "pink_noise False: 1 runs, mean 35, 95 % interval none",
        "splits",
        "pink_noise True: 1 runs, mean 52.5, 95 % interval none",
    ]
    assert (tmp_path / "a.png").stat().st_size > 10_000


def test_plot_runs_groups_seeds_whose_labels_differ(tmp_path):
    for run, head in ("1", "1/two"), ("2", "2/two"), ("3", "1/one"), ("4", ""):
        (tmp_path / run).mkdir()
        flags = {"seed": int(run), "reward_head": head and f"/data/{head}.safetensors#{run * 64}"}
        (tmp_path / run / "args.json").write_text(json.dumps(flags))
    groups = plot_runs.groups_of(sorted(tmp_path.iterdir()))
    assert {name: [run.name for run in runs] for name, runs in groups.items()} == {
        "reward_head two.safetensors": ["1", "2"],
        "reward_head one.safetensors": ["3"],
        "reward_head ": ["4"],
    }


def test_intervals_over_seeds_are_those_of_the_bootstrap():
    values = np.random.default_rng(1).normal(size=(8, 5)) + np.arange(5)
    mean, low, high = plot_runs.interval(values)
    np.testing.assert_allclose(mean, values.mean(0))
    drawn = np.random.default_rng(2).integers(8, size=(20_000, 8))
    means = values[drawn].mean(1)  # [resamples, 5]
    np.testing.assert_allclose([low, high], np.percentile(means, [2.5, 97.5], axis=0), atol=0.08)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["ViT-B-32", "RN50"])
def test_a_random_model_is_loaded_like_any_other(arch, tmp_path):
    """Half precision on the disk; the architecture's own preprocessing; the same for one seed."""
    import open_clip
    from safetensors.torch import load_file

    from clip_reward import CLIPReward, load_clip

    command = (sys.executable, "benchmarks/random_clip.py", arch)
    said = run(*command, tmp_path).stderr
    assert f"{arch} in {tmp_path} has RANDOM weights" in said
    weights = load_file(tmp_path / "open_clip_model.safetensors")
    floats = {value.dtype for value in weights.values() if value.is_floating_point()}
    assert floats == {torch.float16}
    clip = load_clip(f"local-dir:{tmp_path}")
    tag = open_clip.list_pretrained_tags_by_model(arch)[0]
    config = open_clip.get_pretrained_cfg(arch, tag)
    mean, std = torch.tensor(config["mean"]), torch.tensor(config["std"])
    torch.testing.assert_close(clip.preprocess.scale[:, 0, 0], 1 / (255 * std))
    torch.testing.assert_close(clip.preprocess.shift[:, 0, 0], -mean / std)
    activations = {type(module).__name__ for module in clip.model.transformer.modules()}
    assert "QuickGELU" in activations, "the first weights are OpenAI's"
    frames = torch.randint(256, (2, 64, 64, 3), dtype=torch.uint8)
    assert CLIPReward(clip, ["a dog"])(frames).isfinite().all()
    if arch == "RN50":
        run(*command, tmp_path / "again")
        again = load_file(tmp_path / "again/open_clip_model.safetensors")
        assert all(torch.equal(again[name], value) for name, value in weights.items())


@pytest.mark.slow
def test_an_unknown_architecture_is_one_line(tmp_path):
    said = run(sys.executable, "benchmarks/random_clip.py", "ViT-X", tmp_path, code=1).stderr
    assert said == "error: ViT-X is not in open_clip.list_models()\n"
