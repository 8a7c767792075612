"""The benchmarks run and print what they promise; nothing here is about speed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import plot_runs

ROOT = Path(plot_runs.__file__).resolve().parent.parent


def python(*arguments, code=0):
    run = subprocess.run(
        [sys.executable, *map(str, arguments)], capture_output=True, text=True, cwd=ROOT
    )
    assert run.returncode == code, run.stdout + run.stderr
    return run


@pytest.mark.parametrize("env_id", ["Humanoid-v5", "MountainCarContinuous-v0", "CartPole-v1"])
def test_pipeline_prints_every_stage(tmp_path, env_id):
    small = ["--num-envs", 2, "--episode-length", 10, "--gradient-steps", 2, "--rollouts", 2]
    result = tmp_path / "pipeline.json"
    if env_id != "Humanoid-v5":
        small.append("--no-clip-alone")
    script = "benchmarks/pipeline.py"
    printed = python(script, "--env-id", env_id, *small, "--json", result).stdout
    stages = ("physics", "render", "CLIP", "render + CLIP", "update", "end to end")
    assert all(f"{stage} " in printed for stage in stages) and "bytes a step" in printed
    result = json.loads(result.read_text())
    assert set(result["stages"]) == set(stages)
    rates = [unit for stage in result["stages"].values() for unit in stage.values()]
    assert all(rate > 0 for rate in rates)
    together, render = (result["stages"][name]["frames/s"] for name in ("render + CLIP", "render"))
    assert together <= render
    assert result["crossing_bytes_per_step"] <= 1024
    batch_size = result["args"]["batch_size"]
    assert batch_size == (64 if env_id == "CartPole-v1" else 512), "the paper's, by algorithm"


def test_everything_for_a_gpu_runs_in_its_form_for_a_cpu(tmp_path):
    """gpu.sh: every piece's result is in one JSON and one table."""
    environment = os.environ | {"DEVICE": "cpu", "PYTHON": sys.executable}
    command = ["bash", str(ROOT / "benchmarks/gpu.sh"), str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stdout + run.stderr
    everything = json.loads((tmp_path / "all.json").read_text())
    assert everything["incomplete"] == {} and len(everything["results"]) == 7
    for words in ("RN50", "end to end: Humanoid-v5", "efficiency", "drawing", "bf16", "updates"):
        assert words in run.stdout, words
    assert (tmp_path / "table.txt").read_text() in run.stdout


def test_a_piece_that_fails_is_named_and_makes_the_exit_code_1(tmp_path):
    (tmp_path / "20_updates.status").write_text("3 7\n")
    run = python("benchmarks/clip_speed.py", "table", tmp_path, code=1)
    assert "INCOMPLETE 20_updates: exit code 3" in run.stdout


def test_rendering_compares_settings_of_light_quality(tmp_path):
    result = tmp_path / "rendering.json"
    small = ["--per-pose", 2, "--rounds", 1, "--timed", 2, "--json", result]
    printed = python("benchmarks/rendering.py", *small).stdout
    settings = json.loads(result.read_text())["settings"]
    assert {"full", "light", "MuJoCo's floor"} <= settings.keys()
    assert all(name in printed for name in settings)
    assert settings["full"]["epic_full"] == 0 < settings["light"]["epic_full"] < 0.5
    python("benchmarks/rendering.py", "--task", "cartpole", code=2)


def test_plot_runs_averages_the_end_and_draws(tmp_path):
    from torch.utils.tensorboard import SummaryWriter

    runs = [tmp_path / f"Task__script__{seed}__0" for seed in (1, 2)]
    for slope, run in enumerate(runs, 1):
        with SummaryWriter(str(run)) as writer:
            for step in range(20):
                writer.add_scalar("charts/clip_reward", slope * step, 100 * step)
    picture = tmp_path / "curve.png"
    script = "benchmarks/plot_runs.py"
    lines = python(script, *runs, "--last", 4, "--out", picture).stdout.splitlines()
    assert "mean of the last 4: 17.5," in lines[0] and "mean of the last 4: 35," in lines[1]
    assert picture.stat().st_size > 5000
    steps, values = plot_runs.read(runs[1], "charts/clip_reward")
    assert steps[-1] == 1900 and values[-1] == pytest.approx(38)
    assert "has no nothing" in python(script, runs[0], "--scalar", "nothing", code=1).stderr
