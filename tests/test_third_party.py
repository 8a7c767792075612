"""Other people's tasks, from packages. Their goals are in the pictures; the first of each package
trains, and its own success is logged and judged by."""

import importlib.util

import numpy as np
import pytest
from helpers import ROOT, TINY, only_run, run, scalars

import dqn_clip_classic as dqn
import sac_clip_humanoid as sac

# package: {task: whether its goal differs between starts}
TASKS = {
    "gymnasium_robotics": {
        "PointMaze_UMaze-v3": True,
        "AntMaze_UMaze-v5": False,  # its camera does not show the goal in every start
        "AdroitHandDoor-v1": True,
    },
    "panda_gym": {"PandaReach-v3": True, "PandaPush-v3": True},
    "highway_env": {"parking-v0": True},
    "Box2D": {"BipedalWalker-v3": False, "LunarLanderContinuous-v3": False, "CarRacing-v3": True},
}
CASES = [(package, task, goals) for package in TASKS for task, goals in TASKS[package].items()]
SMALL = "--num-envs 2 --episode-length 20 --total-timesteps 80 --learning-starts 0 --batch-size 8"
SMALL = f"{SMALL} --gradient-steps 2 --reward-devices cpu --clip-model {TINY} --render-size 64"


def env_id_of(package, task):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} cannot be installed here")
    return task if package == "Box2D" else f"{package}:{task}"


@pytest.mark.slow
@pytest.mark.parametrize("package, task, goals", CASES)
def test_two_goals_give_two_pictures(package, task, goals):
    env_id = env_id_of(package, task)
    flags = {"clip_model": TINY, "render_size": 128, "buffer_size": 1000}  # of pixels, in one case
    args = sac.Args(env_id=env_id, target_prompt=("words",), **flags)
    sac.check_args(args)
    env, pictures = sac.make_env(args)(), []
    for seed in range(3):
        env.reset(seed=seed, options={})
        _, _, _, _, info = env.step(np.zeros(env.action_space.shape, np.float32))
        pictures.append(info["frames"].astype(int))
        assert pictures[-1].std() > 10, "it is not black"
    for one, other in zip(pictures, pictures[1:]):
        assert (np.abs(one - other).max(-1) > 40).sum() > 4 or not goals
    env.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    "package, task", [(package, next(iter(TASKS[package]))) for package in TASKS]
)
def test_it_trains_and_is_judged_by_its_own_success(package, task, tmp_path):
    env_id = env_id_of(package, task)
    words = ["--env-id", env_id, "--target-prompt", "the goal", "--runs-dir", tmp_path]
    done = run(sac.__file__, *words, *SMALL.split())
    assert f"{env_id} is drawn by its own render(): " in done.stdout
    values, _ = scalars(only_run(tmp_path))
    rewards = [event.value for event in values["charts/clip_reward"]]
    assert len(rewards) == 2 and np.isfinite(rewards).all()
    own = package != "Box2D"
    assert ("charts/success_rate" in values) == own
    if own:
        command = "success", "--run", only_run(tmp_path), "--env-id", env_id, "--episodes", 4
        judged = run(ROOT / "eval_epic.py", *command)
        assert "success: The environment says so" in judged.stdout


FLAT_GRID = """
import gymnasium as gym, minigrid
from minigrid.wrappers import FlatObsWrapper

def make(**options):
    return FlatObsWrapper(gym.make("MiniGrid-Empty-5x5-v0", **options))

gym.register("FlatGrid-v0", make)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "package, env_id", [("minigrid", "flat_grid:FlatGrid-v0"), ("Box2D", "LunarLander-v3")]
)
def test_dqn_trains_on_tasks_with_discrete_actions(package, env_id, tmp_path):
    env_id_of(package, env_id)
    (tmp_path / "flat_grid.py").write_text(FLAT_GRID)
    words = ["--env-id", env_id, "--target-prompt", "the goal", "--runs-dir", tmp_path / "runs"]
    done = run(dqn.__file__, *words, *SMALL.split(), PYTHONPATH=str(tmp_path))
    assert f"{env_id} is drawn by its own render(): " in done.stdout
    folder = only_run(tmp_path / "runs")
    values, _ = scalars(folder)
    rewards = [event.value for event in values["charts/clip_reward"]]
    assert len(rewards) == 2 and np.isfinite(rewards).all() and np.std(rewards) > 0
    assert len([*folder.glob("videos/*.mp4")]) == 1


def test_observations_of_words_are_refused_in_one_line():
    env_id = env_id_of("minigrid", "MiniGrid-Empty-5x5-v0")
    args = dqn.Args(env_id=env_id, target_prompt=("words",), clip_model=TINY)
    with pytest.raises(
        sac.UsageError, match="^--env-id .*: its observations vary in size or are no"
    ):
        dqn.check_args(args)


def test_a_package_that_does_not_fit_this_mujoco_is_one_line():
    env_id = env_id_of("gymnasium_robotics", "HandReach-v3")
    args = sac.Args(env_id=env_id, target_prompt=("words",), clip_model=TINY)
    try:
        sac.check_args(args)
    except sac.UsageError as error:
        assert str(error).startswith(f"--env-id {env_id}: ") and "\n" not in str(error)
        assert "mujoco_utils.py, line " in str(error)
