"""Bad input, as a person types it: told with its flag or file, exit code 2, nothing made. In a
process that has imported everything, and forks for every row of the table."""

import io
import json
import multiprocessing
import os
import re
import runpy
import shutil
import sys

import pytest
import torch
from helpers import ROOT, TINY, run

import dqn_clip_classic
import eval_epic
import sac_clip_humanoid

SAC, DQN, EVAL = sac_clip_humanoid.__file__, dqn_clip_classic.__file__, eval_epic.__file__
GOOD = {
    SAC: f"--target-prompt kneeling --clip-model {TINY} --reward-devices cpu",
    DQN: f"--target-prompt upright --clip-model {TINY} --reward-devices cpu",
    EVAL: "",
}

# flags after GOOD's (the last one counts), and what has to be said
BOTH = """
--target-prompt                             | --target-prompt
--target-prompt=                            | --target-prompt
--target-prompt kneeling %20                | --target-prompt
--no-such-flag                              | --no-such-flag
--seed -1                                   | seed
--seed 1180591620717411303424               | seed
--seed x                                    | --seed
--total-timesteps 0                         | total_timesteps
--total-timesteps 1e6                       | --total-timesteps
--num-envs 0                                | num_envs
--num-envs 100000000 --buffer-size 1000     | --buffer-size 1000 is below a rollout of
--episode-length 0                          | episode_length
--buffer-size 10                            | --buffer-size 10 is below a rollout of
--batch-size 0                              | batch_size
--score-every 0                             | score_every
--gradient-steps 0                          | gradient_steps
--learning-starts -1                        | learning_starts
--learning-starts 20000 --total-timesteps 10000 | is beyond --total-timesteps
--gamma 1.0                                 | gamma
--gamma -0.1                                | gamma
--gamma nan                                 | gamma
--tau 0                                     | tau
--tau 1.5                                   | tau
--checkpoint-freq -1                        | checkpoint_freq
--video-freq -1                             | video_freq
--resume /nowhere                           | /nowhere
--resume {folder}                           | neither a run's folder
--resume {readme}                           | README.md is neither a run's folder
--judge flying                              | --judge flying
--judge nowhere.py:f                        | nowhere.py
--judge {judges}:number                     | number is not a function
--judge {judges}:floats                     | returned [2] float64 for 2 states, not [B] bool
--reward fake                               | --reward
--reward-alpha 1.01                         | reward_alpha
--reward-alpha -0.5                         | reward_alpha
--reward-alpha nan                          | reward_alpha
--reward-alpha 0.5 --baseline-prompt=       | --baseline-prompt
--target-image /nowhere.png                 | /nowhere.png
--target-image {readme}                     | cannot be read as a picture
--clip-model=                               | --clip-model
--clip-model ViT-B-32                       | nearest
--clip-model ViT-B-32/laion2b               | nearest
--clip-model local-dir:/nowhere             | open_clip_config.json
--clip-model local-dir:{folder}             | open_clip_config.json
--reward-head /nowhere.safetensors          | /nowhere.safetensors does not exist
--reward-head {readme}                      | not made by eval_epic.py fit
--clip-batch-size 0                         | clip_batch_size
--reward-devices cuda:99                    | cuda:99
--reward-devices gpu                        | gpu
--reward-devices ray cpu                    | --reward-devices ray
--reward-devices ray:0                      | ray:0
--reward-devices ray:2:0.5                  | ray:2:0.5
--render-size 1                             | render_size
--render-size 100000                        | render_size
--renderer best                             | --renderer
--camera-azimuth nan                        | camera_azimuth
--camera-elevation inf                      | camera_elevation
--camera-distance 0                         | camera_distance
--camera-lookat 0 nan 0                     | camera_lookat
"""
ROWS = {
    SAC: """
--reward-alpha 0.5 --target-prompt thing --baseline-prompt Thing%20 | the same
--clip-model local-dir:{broken}             | broken
--clip-model local-dir:{dangling}           | dangling
--judge {judges}:nothing                    | nothing
--judge {judges}:one                        | returned [] bool for 2 states, not [B] bool
--env-id Humanoid-v55                       | Humanoid
--env-id Nonsense                           | Nonsense
--env-id=                                   | --env-id
--env-id nowhere:Nonsense-v0                | nowhere
--env-id a:b:c                              | a:b:c
--env-id CartPole-v1                        | use dqn_clip_classic.py
--env-id MountainCar-v0                     | use dqn_clip_classic.py
--env-id Ant-v5 --judge kneeling            | --judge kneeling
--env-id Pendulum-v1 --judge kneeling       | --judge
--env-id MountainCarContinuous-v0 --reward-alpha 0.5 | --baseline-prompt
--entropy-coef -1                           | entropy_coef
--entropy-coef nan                          | entropy_coef
--target-prompt a%20LEFT%20arm%20raised      | --target-prompt says 'LEFT': add --no-mirror
--n-step 0                                  | n_step
--n-step 51                                 | --n-step 51
--action-repeat 0                           | action_repeat
--action-repeat 3                           | --episode-length 100, --action-repeat 3
--learning-rate nan                         | learning_rate
--learning-rate 0                           | learning_rate
--learning-rate 1e30                        | learning_rate
--learning-rate inf                         | learning_rate
--env-id Pendulum-v1 --camera-azimuth 90 180 | --camera-azimuth
--env-id MountainCarContinuous-v0 --camera-azimuth 90 | no camera
""",
    DQN: """
--reward-alpha 0.5                          | --baseline-prompt
--env-id CartPole-v11                       | It provides versioned environments
--env-id Pendulum-v1                        | sac_clip_humanoid.py
--env-id=                                   | --env-id
--terminate                                 | --terminate
--target-network-frequency 0                | target_network_frequency
--exploration-fraction 1.5                  | exploration_fraction
--end-e -0.1                                | end_e
--start-e nan                               | start_e
--learning-rate nan                         | learning_rate
--learning-rate 1e30                        | learning_rate
--max-grad-norm 0                           | max_grad_norm
--max-grad-norm nan                         | max_grad_norm
--camera-azimuth 90 180                     | no camera
""",
    EVAL: """
                                            | landscape
nonsense                                    | nonsense
collect                                     | --source
collect --source run --out {folder}/a.npz   | --source run needs --run
collect --source run --out {folder}/a.npz --run /nowhere | /nowhere
collect --source uniform --out {folder}/a.txt | --out
collect --source uniform --out {folder}/../taken.npz | --out
collect --source uniform --out {folder}/a.npz --seed -1 | seed
collect --source uniform --out {folder}/a.npz --states 0 | states
collect --source uniform --out {folder}/a.npz --states 1000000000000 | states
collect --source uniform --out {folder}/a.npz --env-id Pendulum-v1 | Pendulum-v1
collect --source uniform --out {folder}/a.npz --render-size 0 | render_size
collect --source poses --out {folder}/a.npz --per-pose 0 | per_pose
collect --source run --run {run} --out {folder}/a.npz --episodes 0 | episodes
collect --source run --run {run} --out {folder}/a.npz --episodes {huge} | episodes
collect --source run --run {run} --out {folder}/a.npz --every 0 | every
collect --source run --run {run} --out {folder}/a.npz --every 1000 | --every 1000
collect --source run --run {run} --out {folder}/a.npz --checkpoints 7 | step_7.pt
prompts                                     | --task
prompts --task flying                       | --task
prompts --task kneeling --clip-model local-dir:tiny_clip --dataset /nowhere.npz | /nowhere.npz
prompts --task kneeling --clip-model local-dir:tiny_clip --dataset {data} | kneeling
prompts --task kneeling --clip-model nonsense | nearest
epic                                        | --dataset
epic --dataset /nowhere.npz                 | /nowhere.npz
epic --dataset {readme}                     | README.md
epic --dataset {data} --clip-model=         | --clip-model
epic --dataset {data} --clip-model local-dir:tiny_clip --reward-alpha 2 | reward_alpha
epic --dataset {data} --clip-model local-dir:tiny_clip --labels /nowhere.csv | /nowhere.csv
epic --dataset {data} --clip-model local-dir:tiny_clip --judge flying | flying
epic --dataset {data} --clip-model local-dir:tiny_clip --clip-batch-size 0 | clip_batch_size
sheet --dataset {data} --judge flying       | flying
success                                     | --run
success --run /nowhere                      | /nowhere
success --run {run} --dataset {data}        | either
success --run {run} --labels labels.csv     | --labels
success --run {run} --checkpoint 7          | step_7.pt
success --run {run} --episodes 0            | episodes
success --run {run} --episodes {huge}       | episodes
success --run {run} --videos -1             | videos
page --run /nowhere                         | /nowhere
landscape --clip-model local-dir:tiny_clip --render-size 100000 | render_size
landscape --clip-model local-dir:/nowhere   | /nowhere
label /nowhere.npz                          | /nowhere.npz
label {data} --unit word                    | --unit
label {data} --count 0                      | count
""",
}
JUDGES = """
import numpy as np
number = 7
one = lambda states: True
floats = lambda states: states[:, 0]
"""


def rows():
    for script in GOOD:
        for line in (BOTH * (script != EVAL) + ROWS[script]).strip("\n").splitlines():
            if not line:
                continue
            words, _, message = (part.strip() for part in line.rpartition("|"))
            name = f"{script[len(str(ROOT)) + 1 :][:3]} {words}"
            yield pytest.param(script, words, message, id=name)


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """What the table's {names} stand for."""
    top = tmp_path_factory.mktemp("bad")
    broken, dangling, folder, run_dir = (
        top / name for name in ("broken", "dangling", "folder", "run")
    )
    folder.mkdir()
    for copy in (broken, dangling):
        shutil.copytree(ROOT / "tiny_clip", copy, ignore=shutil.ignore_patterns("*.py", "__*"))
    (broken / "open_clip_config.json").write_text('{"model_cfg": ')
    (dangling / "open_clip_model.safetensors").unlink()
    (dangling / "open_clip_model.safetensors").symlink_to("/nowhere")
    (top / "taken.npz").touch()
    (top / "judges.py").write_text(JUDGES)
    (run_dir / "checkpoints").mkdir(parents=True)
    args = dqn_clip_classic.Args(episode_length=20)
    (run_dir / "args.json").write_text(json.dumps({"script": DQN} | vars(args)))
    columns = eval_epic.datasets.uniform_columns("CartPole-v1", 50, 0)
    data = eval_epic.datasets.Dataset(dqn_clip_classic.Args(), {"source": "uniform"}, **columns)
    eval_epic.datasets.save_dataset(data, top / "data.npz")
    return {
        **{"broken": broken, "dangling": dangling, "folder": folder, "run": run_dir},
        **{"huge": 10**12, "judges": top / "judges.py"},
        **{"data": top / "data.npz", "readme": ROOT / "README.md"},
    }


def child(script, words, stdout, stderr):
    """Run a script as `python script words` would, in this process; ends it with its exit code."""
    os.dup2(stdout.fileno(), 1)
    os.dup2(stderr.fileno(), 2)
    sys.stdout, sys.stderr = io.TextIOWrapper(open(1, "wb", 0)), io.TextIOWrapper(open(2, "wb", 0))
    sys.argv = [script, *words]
    sys.excepthook = sys.__excepthook__
    code = 0
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        code = end.code
    except BaseException:
        try:
            sys.excepthook(*sys.exc_info())
        except SystemExit as end:
            code = end.code
    sys.stdout.flush()
    sys.stderr.flush()
    for process in multiprocessing.active_children():  # exit handlers are not run
        process.kill()
    os._exit(code if isinstance(code, int) else 1)


def unboxed(printed):
    """Without tyro's box, on one line."""
    return " ".join(re.sub("[│─╭╮╰╯]", " ", printed).split())


@pytest.mark.parametrize("script, words, message", rows())
def test_bad_input_is_named_and_exit_code_2(script, words, message, places, tmp_path):
    message = message.format(**places)
    words = f"{GOOD[script]} {words}".split()
    words = [word.replace("%20", " ").format(**places) for word in words]
    if script != EVAL and not {"--runs-dir", "--resume"} & set(words):
        words += ["--runs-dir", str(tmp_path / "runs")]
    with open(tmp_path / "out", "w+") as stdout, open(tmp_path / "err", "w+") as stderr:
        forked = multiprocessing.get_context("fork")
        process = forked.Process(target=child, args=(script, words, stdout, stderr))
        process.start()
        process.join(90)
        process.kill()
        printed = (tmp_path / "err").read_text()
    assert process.exitcode == 2, printed
    assert "Traceback" not in printed and message in unboxed(printed), printed
    if "helptext" not in printed:  # ours
        (line,) = (line for line in printed.splitlines() if line.strip())
        assert line.startswith("error: "), printed
    made = [*(tmp_path / "runs").glob("*"), *places["folder"].iterdir()]
    assert not made, "nothing was started"


@pytest.mark.parametrize(
    "script, words, message, changes",
    [
        (SAC, f"{GOOD[SAC]} --camera-azimuth nan", "camera_azimuth", {}),
        (DQN, f"{GOOD[DQN]} --num-envs 0", "num_envs", {}),
        (EVAL, "label /nowhere.npz", "/nowhere.npz", {}),
        (SAC, "--target-prompt x", "days", {}),  # the default ViT-bigG-14 without a GPU
        (SAC, GOOD[SAC], "MUJOCO_GL", {"MUJOCO_GL": "nonsense"}),
    ],
    ids=["tyro", "tyro-dqn", "eval", "slow", "gl"],
)
def test_bad_input_in_a_process_of_its_own(script, words, message, changes, tmp_path):
    if torch.cuda.is_available() and message == "days":
        pytest.skip("this machine has a GPU")
    words = words.split() + ["--runs-dir", tmp_path / "runs"] * (script != EVAL)
    printed = run(script, *words, code=2, **changes).stderr
    assert message in unboxed(printed) and "Traceback" not in printed
    assert "helptext" in printed or printed.startswith("error: ")
    assert not (tmp_path / "runs").exists()
