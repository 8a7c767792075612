"""The examples do what they say, started as a user would."""

import os
import signal
import subprocess
import sys

import gymnasium as gym
import helpers
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from helpers import ROOT, gone, only_run, wait_until

import clip_reward

GOOD = ("a leaning pole", "pole vertically upright on top of the cart")
BAD = "pole and cart"  # the baseline as well, which is an error of this prompt's runs only
SWEEP = [
    *("examples/sweep.py", "--tasks", "CartPole", "--prompts", *GOOD, BAD, "--seeds", 1),
    *("--reward-alpha", 0.5, "--baseline-prompt", BAD, "--video-freq", 0),
    *("--num-envs", 2, "--episode-length", 12, "--gradient-steps", 6, "--learning-starts", 24),
]


def start(out, steps):
    """The sweep as a process with a group of its own and, whatever runs here, a Ray of its own."""
    command = [sys.executable, *SWEEP, "--out", out, "--total-timesteps", steps]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    options = {"env": helpers.environment(RAY_ADDRESS="local"), "start_new_session": True}
    return subprocess.Popen([*map(str, command)], cwd=ROOT, **pipes, **options)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """(folder, exit code, printed, processes it had) of a sweep in which somebody pressed Ctrl-C
    when both good prompts were being learned."""
    pytest.importorskip("ray.tune", reason="Ray Tune is not installed: pip install '.[ray]'")
    out = tmp_path_factory.mktemp("sweep") / "out"
    process = start(out, 10**6)
    consoles = [out / "CartPole" / prompt / "1/console.txt" for prompt in GOOD]
    try:
        learning = wait_until(
            lambda: all(file.exists() and "\nstep 96/" in file.read_text() for file in consoles),
            300,
        )
        assert learning, process.poll() is None or process.stdout.read()
        processes = helpers.descendants(process.pid)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does it
        printed, _ = process.communicate(timeout=300)
    finally:
        process.kill()
    return out, process.returncode, printed, processes


@pytest.fixture(scope="module")
def finished(stopped):
    """(folder, printed) of the same sweep, started again."""
    out, *_ = stopped
    process = start(out, 48)
    try:
        printed, _ = process.communicate(timeout=300)
    finally:
        process.kill()
    assert process.returncode == 1, printed
    return out, printed


@pytest.mark.slow
def test_ctrl_c_leaves_checkpoints_and_no_process(stopped):
    out, code, printed, processes = stopped
    assert code == 130 and "Traceback" not in printed, printed
    assert len(processes) > 6 and wait_until(lambda: gone(processes), 20)
    for prompt in GOOD:
        folder = only_run(out / "CartPole" / prompt / "1")
        assert helpers.checkpoint(folder)["global_step"] >= 96


@pytest.mark.slow
def test_what_it_prints_is_what_the_event_files_say(finished):
    out, printed = finished
    for scalar in ("clip_reward", "success_rate"):
        printed = printed.partition(f"CartPole, {scalar}\n")[2]
        for prompt in GOOD:
            folder = only_run(out / "CartPole" / prompt / "1")  # it went on in its own
            events, _ = helpers.scalars(folder)
            end = np.mean([event.value for event in events[f"charts/{scalar}"]][-10:])
            (line,) = [x for x in printed.splitlines()[:4] if x.startswith(folder.name)]
            assert f"mean of the last 10: {end:.4g}," in line
        assert all(f"{prompt}']: 1 runs" in printed for prompt in GOOD)
        assert (out / f"CartPole_{scalar}.png").stat().st_size > 5000


@pytest.mark.slow
def test_a_failed_run_is_one_line_and_the_others_finish(finished):
    out, printed = finished
    failed = [line for line in printed.splitlines() if "FAILED" in line]
    console = out / "CartPole" / BAD / "1/console.txt"
    assert failed == [f"FAILED, exit code 2: see {console}"] and "Traceback" not in printed
    assert "target and baseline prompts are the same" in console.read_text()


# ------------------------------------------------------------------------------ gym_wrapper.py


@pytest.fixture
def wrappers(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "examples")
    import gym_wrapper

    return gym_wrapper


def test_a_wrapped_environment_passes_gymnasiums_checks_and_pays_for_its_pictures(wrappers):
    reward = clip_reward.CLIPReward(clip_reward.load_clip(helpers.TINY), ["a pole on a cart"])
    make = {"id": "CartPole-v1", "render_mode": "rgb_array"}
    check_env(wrappers.CLIPRewardWrapper(gym.make(**make).unwrapped, reward))
    env = wrappers.CLIPRewardWrapper(gym.make(**make), reward)
    plain = gym.make(**make)
    env.reset(seed=1), plain.reset(seed=1)
    for _ in range(30):  # through the end of the episode and into the next
        *_, terminated, _, _ = plain.step(0)
        _, paid, ended, _, info = env.step(0)
        assert paid == pytest.approx(reward(plain.render()).item()) and ended == terminated
        assert info["env_reward"] == 1
        if terminated:
            break
    assert terminated


def test_any_environment_that_draws_itself_can_be_wrapped_and_shares_the_one_reward(wrappers):
    seen = []

    def reward(frames):
        seen.append(frames.shape)
        return clip(frames)

    clip = clip_reward.CLIPReward(clip_reward.load_clip(helpers.TINY), ["an arm"])
    make = {"id": "Reacher-v5", "render_mode": "rgb_array", "width": 64, "height": 64}
    env = wrappers.CLIPRewardWrapper(gym.make(**make), reward)  # its pictures are views, mirrored
    assert env.spec.additional_wrappers[-1].kwargs["reward"] is reward
    envs = gym.make_vec(num_envs=2, vectorization_mode="sync", **make)
    envs = wrappers.CLIPRewardVectorWrapper(envs, reward)
    env.reset(seed=1), envs.reset(seed=1)
    _, paid, *_ = env.step(np.zeros(2))
    _, both, *_ = envs.step(np.zeros((2, 2)))
    assert seen == [(1, 64, 64, 3), (2, 64, 64, 3)] and both[0] == pytest.approx(paid, abs=1e-5)
    blind = wrappers.CLIPRewardWrapper(gym.make("Reacher-v5"), reward)
    both = wrappers.CLIPRewardVectorWrapper(gym.make_vec("Reacher-v5", num_envs=2), reward)
    for env in (blind, both):
        env.reset(seed=1)
        with pytest.raises(ValueError, match="rgb_array"):
            env.step(env.action_space.sample())


def test_wrapped_vectors_pay_for_the_last_picture_and_not_for_the_reset(wrappers):
    reward = clip_reward.CLIPReward(clip_reward.load_clip(helpers.TINY), ["a pole on a cart"])
    make = {"id": "CartPole-v1", "render_mode": "rgb_array"}
    envs = wrappers.CLIPRewardVectorWrapper(
        gym.make_vec(num_envs=2, vectorization_mode="sync", **make), reward
    )
    one = gym.make(**make)
    envs.reset(seed=3), one.reset(seed=3)
    over = False
    for _ in range(40):
        _, rewards, terminations, _, _ = envs.step(np.zeros(2, int))
        if over:
            assert rewards[0] == 0, "the step that resets"
            break
        *_, over, _, _ = one.step(0)
        assert rewards[0] == pytest.approx(reward(one.render()).item(), abs=1e-6)
        assert terminations[0] == over
    assert over
    same = {"autoreset_mode": gym.vector.AutoresetMode.SAME_STEP}
    with pytest.raises(ValueError, match="last picture"):
        envs = gym.make_vec(num_envs=2, vectorization_mode="sync", vector_kwargs=same, **make)
        wrappers.CLIPRewardVectorWrapper(envs, reward)
