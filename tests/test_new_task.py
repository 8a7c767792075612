"""What people copy: the examples and the diffs of docs/new_task.md, each run in a short form."""

import importlib
import re
import shlex
import sys

import gymnasium as gym
import numpy as np
import pytest
import torch
from helpers import ROOT, TINY, only_run, run, scalars
from PIL import Image

import sac_clip_humanoid as sac

sys.path.insert(0, str(ROOT / "examples"))  # as for who starts them
SMALL = "--num-envs 2 --episode-length 12 --total-timesteps 72 --learning-starts 24 --batch-size 8"
SMALL = f"{SMALL} --gradient-steps 2 --render-size 64 --reward-devices cpu"
SMALL = SMALL.split()
PAGE = (ROOT / "docs/new_task.md").read_text()
DIFFS = re.findall(r"```diff\n(.*?)```", PAGE, re.S)
COMMANDS = re.findall(r"^    python (sac_(?!clip).*|dqn_.*)$", PAGE, re.M)  # of the copies


def apply(diff):
    """A diff -> the name of the new file, and what stands in it."""
    head, *hunks = diff.split("@@\n")
    old, new = re.findall(r"^(?:---|\+\+\+) (\S+)$", head, re.M)
    text = (ROOT / old).read_text()
    for hunk in hunks:
        lines = [line or " " for line in hunk.splitlines()]
        before = "".join(line[1:] + "\n" for line in lines if line[0] != "+")
        after = "".join(line[1:] + "\n" for line in lines if line[0] != "-")
        assert text.count(before) == 1, before
        text = text.replace(before, after)
    return new, text


@pytest.fixture(scope="module", params=[pytest.param(0, marks=pytest.mark.slow), 1])
def trained(request, tmp_path_factory):
    """A copy of the document, trained for a few rollouts -> (number, script, run folder)."""
    number, folder = request.param, tmp_path_factory.mktemp("copy")
    name, text = apply(DIFFS[number])
    (folder / name).write_text(text)
    Image.fromarray(np.full((64, 64, 3), 90, np.uint8)).save(folder / "goal.png")
    script, *flags = shlex.split(COMMANDS[number].replace("goal.png", str(folder / "goal.png")))
    assert script == name
    model = ["--clip-model", TINY] if number != 1 else []  # another reward needs no CLIP
    run(folder / name, *flags, *model, *SMALL, "--runs-dir", folder / "runs")
    return number, folder / name, only_run(folder / "runs")


def test_a_copy_changed_as_the_document_says_trains(trained):
    number, _, folder = trained
    values, _ = scalars(folder)
    rewards = [event.value for event in values["charts/clip_reward"]]
    assert len(rewards) == 3 and np.std(rewards) > 0
    assert len([*folder.glob("videos/*.mp4")]) == 1
    assert ("charts/success_rate" in values) == (number != 1)
    if number == 1:  # named after its reward; no picture is farther than white from black
        assert all(0.5 < reward < 1 for reward in rewards)
        assert "__goal-distance__" in folder.name


def test_a_trained_copy_is_judged_if_it_is_named(trained, tmp_path):
    number, script, folder = trained
    done = "def done(states):\n    'Done.'\n    return states[:, 0] < 9\n"
    (tmp_path / "done.py").write_text(done)
    judged = "success", "--run", folder, "--judge", f"{tmp_path}/done.py:done", "--episodes", 2
    said = run(ROOT / "eval_epic.py", *judged, "--script", script).stdout
    assert "100 % (2 of 2 episodes)" in said
    assert number != 1 or "(goal-distance, best)" in said
    said = run(ROOT / "eval_epic.py", *judged, code=2).stderr
    assert re.fullmatch(rf"error: .*--script \S*{script.name}.*\n", said), said


@pytest.mark.slow
def test_a_robot_of_ones_own_is_nearest_to_the_picture_of_its_goal(tmp_path):
    import new_mujoco_task as lamp

    import egl_render
    from clip_reward import CLIPReward, load_clip

    script = ROOT / "examples/new_mujoco_task.py"
    assert "WARN" not in run(script, *SMALL, "--runs-dir", tmp_path).stderr
    folder = only_run(tmp_path)
    values, _ = scalars(folder)
    more = "--resume", folder, "--total-timesteps", 96, "--judge", f"{script}:bent"
    more += "--env-id", "examples.new_mujoco_task:Lamp-v0"
    run(ROOT / "sac_clip_humanoid.py", *more)  # code is run only if it is named
    assert [event.value for event in values["charts/success_rate"]]
    env = gym.make("Lamp-v0").unwrapped
    model, camera = egl_render.textured_model(env.fullpath), egl_render.env_camera(env)
    renderer = egl_render.MujocoRenderer(model, 64, camera)
    reward = CLIPReward(load_clip(TINY), target_images=[str(ROOT / "runs/lamp_goal.png")])
    upright, half = np.zeros((1, 6)), lamp.GOAL / 2
    scores = reward(renderer.render(np.concatenate([upright, half, lamp.GOAL]))).tolist()
    assert scores == sorted(scores) and scores[-1] > 0.95 > scores[0] + 0.2
    assert lamp.bent(np.concatenate([upright, lamp.GOAL])).tolist() == [False, True]
    env.reset(seed=1)
    for _ in range(40):
        state, *_ = env.step(lamp.GOAL[0, :3])
    assert lamp.bent(state[None])[0], "it can get there"


def test_another_reward_is_computed_by_a_scorer():
    lines = run(ROOT / "examples/new_reward.py").stdout.splitlines()
    assert len(lines) == 2
    for line in lines:
        means = {name: float(mean) for name, mean in re.findall(r"(\w+) (-?\d\.\d{3})", line)}
        assert len(means) == 4 and max(means, key=means.get) == "kneeling"
    from new_reward import GoalDistance

    rng = np.random.default_rng(1)
    goal, frames = rng.integers(256, size=(32, 32, 3)), rng.integers(256, size=(3, 32, 32, 3))
    small = (np.append(frames, goal[None], 0) / 255).reshape(4, 16, 2, 16, 2, 3).mean((2, 4))
    expected = 1 - np.abs(small[:3] - small[3]).mean((1, 2, 3))
    reward = GoalDistance("cpu", goal.astype(np.uint8))
    np.testing.assert_allclose(reward(frames.astype(np.uint8)), expected, atol=1e-6)


@pytest.mark.slow
def test_stable_baselines_learns_from_the_rewards_of_its_own_transitions():
    import sb3_clip_reward as example

    from clip_reward import CLIPReward, load_clip
    from environments.classic import ClassicRenderer

    model, share = example.train(seed=1, steps=800, num_envs=2)
    assert 0 <= share <= 1 and model.num_timesteps == 800
    buffer = model.replay_buffer
    assert buffer.pos == 400 and not buffer.dones[: example.EPISODE - 1].any()
    ends = np.flatnonzero(buffer.dones[:400, 0])
    assert ends.tolist() == [199, 399] and buffer.timeouts[ends].all()
    states = buffer.next_observations[:400].reshape(-1, 4).astype(np.float64)
    torch.set_num_threads(1)
    reward = CLIPReward(load_clip(TINY), [example.PROMPT])
    scores = reward(ClassicRenderer("CartPole-v1", 64).render(states)).reshape(400, 2)
    rewards = buffer.rewards[:400]
    apart = np.abs(rewards - scores.numpy())  # a state rounded to float32 may move a pixel
    assert np.mean(apart < 1e-5) > 0.9 and apart.max() < 0.05 < rewards.std()


def random_play(env, episodes=100, steps=100):
    """-> states [N, T, S] and the last success [N] of uniformly random actions."""
    env.action_space.seed(0)
    states, successes = [], []
    for seed in range(episodes):
        env.reset(seed=seed, options={"film": False})
        infos = [env.step(env.action_space.sample())[-1] for _ in range(steps)]
        states.append([info["states"] for info in infos])
        successes.append(infos[-1].get("success"))
    return np.array(states), np.array(successes)


def test_no_judge_of_the_documents_and_examples_accepts_random_play(tmp_path, monkeypatch):
    import new_mujoco_task as lamp

    from environments import judges

    page = (ROOT / "README.md").read_text()
    code, after = re.search(r"```python\n(.*?)```(.*)", page, re.S).groups()
    (tmp_path / "judge.py").write_text(code)
    env_id = re.search(r"--env-id (\S+) --judge my_task.py:done", after)[1]
    env = sac.make_env(sac.Args(env_id=env_id, reward="ground-truth", video_freq=0))()
    states, _ = random_play(env)
    judge = judges.episode_judge(f"{tmp_path}/judge.py:done", env_id, (), None)
    assert judge(states.swapaxes(0, 1)).mean() <= 0.02
    env = sac.make_env(sac.Args(env_id="Lamp-v0", reward="ground-truth", video_freq=0))()
    states, _ = random_play(env)
    assert np.mean([lamp.bent(episode).mean() >= 0.5 for episode in states]) <= 0.02
    monkeypatch.syspath_prepend(tmp_path)
    name, text = apply(DIFFS[0])  # a copy with a success of its own
    (tmp_path / name).write_text(text)
    copy = importlib.import_module(name[:-3])
    _, successes = random_play(copy.make_env(copy.Args())())
    assert np.mean(successes.astype(float)) <= 0.02


def test_every_example_is_tested():
    tested = "".join(path.read_text() for path in (ROOT / "tests").glob("test_*.py"))
    tested += (ROOT / "benchmarks/own_environments.sh").read_text()
    for path in (ROOT / "examples").glob("*.py"):
        assert path.name in tested or f"import {path.stem}" in tested, path
        assert path.read_text().startswith(('"""', 'r"""'))
        assert len(path.read_text().splitlines()) <= 135, path
