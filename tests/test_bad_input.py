"""Bad input, as a person types it: one line that names what is wrong, exit code 2, nothing made. In
a process that has imported everything, and forks for every row of the table."""

import io
import json
import multiprocessing
import os
import runpy
import shutil
import sys

import pytest
import torch
from helpers import ROOT, TINY, run

import dqn_clip_classic
import eval_epic
import sac_clip_humanoid
from training.flags import flags_of

SAC, DQN, EVAL = sac_clip_humanoid.__file__, dqn_clip_classic.__file__, eval_epic.__file__
GOOD = {
    SAC: f"--target-prompt kneeling --clip-model {TINY}",
    DQN: f"--target-prompt upright --clip-model {TINY} --reward-devices cpu",
    EVAL: "",
}
LONG = "word " * 100

# flags after GOOD's (the last one counts) and what the line has to say
BOTH = """
--target-prompt                             | --target-prompt
--target-prompt=                            | --target-prompt
--target-prompt kneeling %20                | --target-prompt
--no-such-flag                              | --no-such-flag
--seed -1                                   | --seed -1
--seed 1180591620717411303424               | --seed 1180591620717411303424
--seed x                                    | --seed
--exp-name=                                 | --exp-name
--exp-name {long_name}                      | --exp-name
--total-timesteps 0                         | --total-timesteps 0
--total-timesteps 1e6                       | --total-timesteps
--num-envs 0                                | --num-envs 0
--num-envs -3                               | --num-envs -3
--num-envs 100000000                        | less than a rollout
--episode-length 0                          | --episode-length 0
--episode-length 20 --total-timesteps 10    | --episode-length 20
--episode-length 100000000000               | --episode-length 100000000000
--buffer-size 10                            | --buffer-size 10
--buffer-size 1000000000000 --total-timesteps 1000000000000 | --buffer-size 1000000000000
--batch-size 0                              | --batch-size 0
--batch-size 1000000000000                  | --batch-size 1000000000000
--hidden-size 0                             | --hidden-size 0
--hidden-size 10000000                      | --hidden-size 10000000
--gradient-steps 0                          | --gradient-steps 0
--learning-starts -1                        | --learning-starts -1
--learning-starts 20000 --total-timesteps 10000 | nothing would be learned
--gamma 1.0                                 | --gamma 1.0
--gamma -0.1                                | --gamma -0.1
--gamma nan                                 | --gamma nan
--tau 0                                     | --tau 0.0
--tau 1.5                                   | --tau 1.5
--checkpoint-freq -1                        | --checkpoint-freq -1
--keep-checkpoints -1                       | --keep-checkpoints -1
--video-freq -1                             | --video-freq -1
--runs-dir {readme}/runs                    | --runs-dir
--resume /nowhere                           | /nowhere
--resume {folder}                           | not the folder of a run
--judge flying                              | --judge flying
--judge nowhere.py:f                        | nowhere.py
--reward fake                               | --reward
--reward-alpha 1.01                         | --reward-alpha 1.01
--reward-alpha -0.5                         | --reward-alpha -0.5
--reward-alpha nan                          | --reward-alpha nan
--reward-alpha 0.5 --baseline-prompt=       | --baseline-prompt
--reward-alpha 0.5 --target-prompt thing --baseline-prompt Thing%20 | the same
--target-prompt {long}                      | too long
--target-image /nowhere.png                 | /nowhere.png
--target-image {readme}                     | no picture
--baseline-image {folder}                   | no picture
--view-reduction max                        | --view-reduction
--clip-model=                               | --clip-model
--clip-model ViT-B-32                       | nearest
--clip-model ViT-B-32/laion2b               | nearest
--clip-model local-dir:/nowhere             | open_clip_config.json
--clip-model local-dir:{folder}             | open_clip_config.json
--clip-model local-dir:{cut}                | damaged
--clip-model local-dir:{broken}             | damaged
--clip-model hf-hub:no/such                 | hf-hub:no/such
--clip-precision fp8                        | --clip-precision
--clip-batch-size 0                         | --clip-batch-size 0
--clip-batch-size 100000000000              | GB
--reward-devices cuda:99                    | cuda:99
--reward-devices gpu                        | gpu
--reward-devices ray cpu                    | ray cpu
--reward-devices ray:0                      | ray:0
--reward-devices ray:2:0.0                  | ray:2:0.0
--worker-timeout 0                          | --worker-timeout 0
--worker-timeout 10000000000                | --worker-timeout
--render-size -4                            | --render-size -4
--render-size 1                             | --render-size 1
--render-size 100000                        | --render-size 100000
--render-quality best                       | --render-quality
--camera-azimuth nan                        | --camera-azimuth nan
--camera-elevation inf                      | --camera-elevation inf
--camera-distance 0                         | --camera-distance 0
--camera-lookat 0 nan 0                     | --camera-lookat nan
"""
ROWS = {
    SAC: """
--env-id Humanoid-v55                       | Humanoid
--env-id Nonsense                           | Nonsense
--env-id=                                   | --env-id
--env-id nowhere:Nonsense-v0                | nowhere
--env-id a:b:c                              | a:b:c
--env-id CartPole-v1                        | use dqn_clip_classic.py
--env-id MountainCar-v0                     | use dqn_clip_classic.py
--env-id Ant-v5 --judge kneeling            | --judge kneeling
--env-id Pendulum-v1 --judge kneeling       | --judge kneeling
--env-id MountainCarContinuous-v0 --reward-alpha 0.5 | --baseline-prompt
--entropy-coef 0                            | --entropy-coef 0
--entropy-coef -1 --no-autotune             | --entropy-coef -1
--entropy-coef nan                          | --entropy-coef nan
--n-step 0                                  | --n-step 0
--n-step 101                                | --n-step 101
--random-repeat 0                           | --random-repeat 0
--policy-lr nan                             | --policy-lr nan
--policy-lr 0                               | --policy-lr 0
--policy-lr 1e30                            | --policy-lr 1e+30
--q-lr inf                                  | --q-lr inf
--env-id Pendulum-v1 --camera-azimuth 90 180 | --camera-azimuth
--camera-azimuth 0 90 360                   | one camera is named twice
--view-reduction min                        | there is one camera
--env-id MountainCarContinuous-v0 --camera-azimuth 90 | no camera
""",
    DQN: """
--reward-alpha 0.5                          | --baseline-prompt
--env-id CartPole-v11                       | CartPole-v1 and MountainCar-v0
--env-id Pendulum-v1                        | sac_clip_humanoid.py
--env-id a:b:c                              | a:b:c
--env-id=                                   | --env-id
--best-window 0                             | --best-window 0
--terminate                                 | --terminate
--target-network-frequency 0                | --target-network-frequency 0
--exploration-fraction 1.5                  | --exploration-fraction 1.5
--end-e -0.1                                | --end-e -0.1
--start-e nan                               | --start-e nan
--learning-rate nan                         | --learning-rate nan
--learning-rate 1e30                        | --learning-rate 1e+30
--max-grad-norm 0                           | --max-grad-norm 0
--max-grad-norm nan                         | --max-grad-norm nan
--camera-azimuth 90 180                     | no camera
""",
    EVAL: """
                                            | subcommand
nonsense                                    | nonsense
collect                                     | --source
collect --source run --out {folder}/a.npz   | --source run needs --run
collect --source run --out {folder}/a.npz --run /nowhere | /nowhere
collect --source uniform --out {folder}/a.txt | --out
collect --source uniform --out {cut}/../taken.npz | --out
collect --source uniform --out {folder}/a.npz --seed -1 | --seed -1
collect --source uniform --out {folder}/a.npz --states 0 | --states 0
collect --source uniform --out {folder}/a.npz --states 1000000000000 | --states 1000000000000
collect --source uniform --out {folder}/a.npz --env-id Pendulum-v1 | --env-id
collect --source uniform --out {folder}/a.npz --render-size 0 | --render-size 0
collect --source poses --out {folder}/a.npz --per-pose 0 | --per-pose 0
collect --source run --run {folder} --out {folder}/a.npz --episodes 0 | --episodes 0
collect --source run --run {run} --out {folder}/a.npz --episodes {huge} | --episodes 1000000000000
collect --source run --run {run} --out {folder}/a.npz --every 0 | --every 0
collect --source run --run {run} --out {folder}/a.npz --every 1000 | --every 1000
collect --source run --run {run} --out {folder}/a.npz --checkpoints 7 | step_7.pt
prompts                                     | --task
prompts --task flying                       | --task
prompts --task kneeling --clip-model local-dir:tiny_clip --alphas 2 | --alphas 2
prompts --task kneeling --clip-model local-dir:tiny_clip --alphas | --alphas
prompts --task kneeling --clip-model local-dir:tiny_clip --prompts a a | --prompts a a
prompts --task kneeling --clip-model local-dir:tiny_clip --azimuths 1000 | --azimuths 1000
prompts --task kneeling --clip-model local-dir:tiny_clip --dataset /nowhere.npz | /nowhere.npz
prompts --task kneeling --clip-model local-dir:tiny_clip --dataset {data} | CartPole-v1 has cartpole
prompts --task cartpole --clip-model local-dir:tiny_clip --dataset {data} --camera paper | collected
prompts --task kneeling --clip-model nonsense | nearest
epic --dataset /nowhere.npz                 | /nowhere.npz
epic --dataset {readme}                     | README.md
epic --dataset {data} --clip-model=         | --clip-model
epic --dataset {data} --clip-model          | --clip-model
epic --dataset {data} --clip-model local-dir:tiny_clip local-dir:tiny_clip | twice
epic --dataset {data} --clip-model local-dir:tiny_clip --reward-alpha 2 | --reward-alpha 2
epic --dataset {data} --clip-model local-dir:tiny_clip --reward-alpha | --reward-alpha
epic --dataset {data} --clip-model local-dir:tiny_clip --reward-devices meta | meta
epic --dataset {data} --clip-model local-dir:tiny_clip --labels /nowhere.csv | /nowhere.csv
epic --dataset {data} --clip-model local-dir:tiny_clip --judge flying | flying
epic --dataset {data} --clip-model local-dir:tiny_clip --clip-batch-size 0 | --clip-batch-size 0
sheet --dataset {data} --judge flying       | flying
sheet --dataset {data} --count 0            | --count 0
success                                     | --run
success --run /nowhere                      | /nowhere
success --run {run} --dataset {data}        | either
success --run {run} --human labels.csv      | --human
success --run {run} --checkpoint 7          | step_7.pt
success --run {run} --episodes 0            | --episodes 0
success --run {run} --episodes {huge} | --episodes 1000000000000
success --run {run} --videos -1             | --videos -1
landscape --points 0                        | --points 0
landscape --clip-model local-dir:tiny_clip --render-size 100000 | --render-size 100000
landscape --clip-model local-dir:/nowhere   | /nowhere
label /nowhere.npz                          | /nowhere.npz
label {data} --unit word                    | --unit
label {data} --port -1                      | --port -1
label {data} --port 70000                   | --port 70000
label {data} --count 0                      | --count 0
""",
}


def rows():
    for script in GOOD:
        for line in (BOTH * (script != EVAL) + ROWS[script]).strip("\n").splitlines():
            if not line:
                continue
            words, _, message = (part.strip() for part in line.rpartition("|"))
            yield pytest.param(
                script, words, message, id=f"{script[len(str(ROOT)) + 1 :][:3]} {words}"
            )


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """What the table's {names} stand for."""
    top = tmp_path_factory.mktemp("bad")
    cut, broken, folder, run_dir = (top / name for name in ("cut", "broken", "folder", "run"))
    folder.mkdir()
    for copy in (cut, broken):
        shutil.copytree(ROOT / "tiny_clip", copy, ignore=shutil.ignore_patterns("*.py", "__*"))
    weights = (cut / "open_clip_model.safetensors").read_bytes()
    (cut / "open_clip_model.safetensors").write_bytes(weights[: len(weights) // 2])
    (broken / "open_clip_config.json").write_text('{"model_cfg": ')
    (top / "taken.npz").touch()
    (run_dir / "checkpoints").mkdir(parents=True)
    args = dqn_clip_classic.Args(episode_length=20)
    (run_dir / "args.json").write_text(json.dumps(flags_of(args)))
    columns = eval_epic.datasets.uniform_columns("CartPole-v1", 50, 0)
    data = eval_epic.make_dataset(dqn_clip_classic.Args(), columns, {"source": "uniform"})
    eval_epic.datasets.save_dataset(data, top / "data.npz")
    return {
        **{"cut": cut, "broken": broken, "folder": folder, "run": run_dir},
        **{"long_name": "n" * 300, "huge": 10**12},
        **{"data": top / "data.npz", "readme": ROOT / "README.md", "long": LONG},
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
    os._exit(code if isinstance(code, int) else 1)


@pytest.mark.parametrize("script, words, message", rows())
def test_bad_input_is_one_line_and_exit_code_2(script, words, message, places, tmp_path):
    words = [
        word.replace("%20", " ").format(**places) for word in f"{GOOD[script]} {words}".split()
    ]
    if script != EVAL and not {"--runs-dir", "--resume"} & set(words):
        words += ["--runs-dir", str(tmp_path / "runs")]
    with open(tmp_path / "out", "w+") as stdout, open(tmp_path / "err", "w+") as stderr:
        forked = multiprocessing.get_context("fork")
        process = forked.Process(target=child, args=(script, words, stdout, stderr))
        process.start()
        process.join(60)
        process.kill()
        printed = (tmp_path / "err").read_text()
    lines = [line for line in printed.splitlines() if line.strip()]
    assert process.exitcode == 2, printed
    assert len(lines) == 1 and lines[0].startswith("error: ") and message in lines[0], printed
    made = [path for path in (tmp_path / "runs").glob("*")] + list(places["folder"].iterdir())
    assert not made, "nothing was started"


@pytest.mark.parametrize(
    "script, words, message",
    [
        (SAC, f"{GOOD[SAC]} --camera-azimuth nan", "--camera-azimuth nan"),
        (DQN, f"{GOOD[DQN]} --num-envs 0", "--num-envs 0"),
        (EVAL, "label /nowhere.npz", "/nowhere.npz"),
        (SAC, "--target-prompt x", "days"),  # the default ViT-bigG-14 without a GPU
    ],
)
def test_bad_input_in_a_process_of_its_own(script, words, message):
    if torch.cuda.is_available() and message == "days":
        pytest.skip("this machine has a GPU")
    process = run(script, *words.split(), code=2)
    (line,) = process.stderr.splitlines()
    assert line.startswith("error: ") and message in line
