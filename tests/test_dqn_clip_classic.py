"""DQN's tasks as a user meets them, and its parts against independent computations."""

import math

import gymnasium as gym
import numpy as np
import pytest
import torch
from helpers import TINY, only_run, rings, run, scalars

import clip_reward
import dqn_clip_classic as dqn
from environments.classic import ClassicRenderer

SMALL = [
    *("--num-envs", 2, "--render-size", 64, "--batch-size", 16),
    *("--gradient-steps", 6, "--target-network-frequency", 4, "--reward-devices", "cpu"),
]

# ------------------------------------------------------------------------------ tasks


@pytest.mark.slow
def test_mountain_car_with_textures(tmp_path):
    """Scores the stored states itself, as pictures of the landscape."""
    target, baseline = "a car at the peak of the mountain", "a car in the mountain"
    prompts = ["--target-prompt", target, "--baseline-prompt", baseline, "--reward-alpha", 0.5]
    base = [dqn.__file__, *SMALL, *prompts, "--clip-model", TINY, "--env-id", "MountainCar-v0"]
    base += ["--video-freq", 48, "--episode-length", 12, "--learning-starts", 24]
    base += ["--score-every", 1]
    run(*base, "--total-timesteps", 48, "--runs-dir", tmp_path)
    folder = only_run(tmp_path)
    _, states, _, rewards, _ = rings(folder)
    reward = clip_reward.CLIPReward(clip_reward.load_clip(TINY), [target], [baseline], 0.5)
    renderer = ClassicRenderer("MountainCar-v0", 64, textured=True)
    expected = reward(renderer.render(states.double().numpy()))
    torch.testing.assert_close(rewards, expected, atol=2e-3, rtol=0)
    assert rewards.std() > 0 and list((folder / "videos").glob("*.mp4"))


def test_gymnasium_s_own_ends_with_terminate(tmp_path):
    """Random actions let the pole fall after some 20 steps; no step after that is stored."""
    base = [dqn.__file__, *SMALL, "--reward", "ground-truth", "--video-freq", 0, "--terminate"]
    base += ["--episode-length", 100, "--learning-starts", 400, "--total-timesteps", 400]
    run(*base, "--runs-dir", tmp_path)
    folder = only_run(tmp_path)
    observations, next_observations, _, rewards, terminations = rings(folder)
    assert len(rewards) >= 400 and (rewards == 1).all()
    failed = (next_observations[:, 2].abs() > 12 * math.pi / 180) | (
        next_observations[:, 0].abs() > 2.4
    )
    assert torch.equal(failed, terminations.bool()) and failed.sum() > 8
    assert observations[:, 2].abs().max() <= 12 * math.pi / 180
    values, _ = scalars(folder)
    assert values["charts/episodic_return"][-1].step == len(rewards)
    total = sum(2 * event.value for event in values["charts/episodic_return"])
    assert total == pytest.approx(len(rewards)), "no step is counted twice"
    assert not (folder / "checkpoints/best.pt").exists(), "nothing was learned"


def make_env(env_id):
    return dqn.make_env(dqn.Args(env_id=env_id))()


def test_cartpole_goes_on_clamped_and_wrapped():
    env = make_env("CartPole-v1")
    env.reset(seed=0)
    angles, positions, rewards, successes = [], [], [], []
    for _ in range(600):  # pushes to the right until the cart stands at the end of the track
        observation, reward, terminated, truncated, info = env.step(1)
        assert not terminated and not truncated
        np.testing.assert_array_equal(observation, np.float32(info["states"]))
        assert env.observation_space.contains(observation)
        good = abs(observation[2]) <= env.unwrapped.theta_threshold_radians
        if abs(observation[0]) < 2.4:
            assert reward == float(good)
        angles.append(observation[2])
        positions.append(observation[0])
        rewards.append(reward)
        successes.append(info["success"])
    assert positions[-1] == np.float32(2.4) and max(positions) <= np.float32(2.4)
    assert max(angles) > 2 and min(angles) < -2 and np.abs(angles).max() <= math.pi + 1e-6
    assert 0 < sum(rewards) < 600
    assert successes == [all(rewards[: t + 1]) for t in range(600)]
    env.reset(seed=0)
    assert env.step(1)[4]["success"], "a new episode starts anew"


def test_cartpole_before_a_failure_is_gymnasium_s_own():
    ours, theirs = make_env("CartPole-v1"), gym.make("CartPole-v1")
    ours.reset(seed=4)
    theirs.reset(seed=4)
    for action in (0, 1) * 8:
        one, two = ours.step(action), theirs.step(action)
        np.testing.assert_allclose(one[0], two[0], atol=1e-6)
        assert one[1] == two[1] == 1.0 and one[4]["success"]
    ours.unwrapped.state = np.array([0.0, 0.0, 3.1, 8.0])
    observation, *_, info = ours.step(0)  # 3.1 + 0.02 * 8 = 3.26, one turn back
    assert observation[2] == pytest.approx(3.26 - 2 * math.pi, abs=1e-5) and not info["success"]
    ours.unwrapped.state = np.array([-2.39, -3.0, 0.0, 0.0])
    observation, *_ = ours.step(0)
    assert observation[0] == np.float32(-2.4) and observation[1] == 0


def test_mountain_car_s_goal_is_absorbing():
    env = make_env("MountainCar-v0")
    env.reset(seed=0)
    env.unwrapped.state = np.array([0.48, 0.05])
    observation, reward, terminated, _, info = env.step(2)
    assert observation[0] > 0.5 and reward == -1 and not terminated and info["success"]
    for action in (0, 1, 2) * 5:
        later, reward, terminated, truncated, info = env.step(action)
        np.testing.assert_array_equal(later, observation)
        np.testing.assert_array_equal(later, np.float32(info["states"]))
        assert reward == 0 and not terminated and not truncated and info["success"]
    env.reset(seed=0)
    for _ in range(250):  # beyond Gymnasium's own limit
        _, reward, terminated, truncated, info = env.step(1)
        assert reward == -1 and not terminated and not truncated and not info["success"]


# ------------------------------------------------------------------------------ parts


def test_greedy_actions_are_those_of_the_highest_value():
    torch.manual_seed(0)
    q_network = dqn.QNetwork(4, gym.spaces.Discrete(3), dqn.Args())
    x = observations = np.random.default_rng(0).normal(0, 5, (50, 4)).astype(np.float32)
    weights = [tensor.numpy() for tensor in q_network.state_dict().values()]
    for i in (0, 2):
        x = np.maximum(x @ weights[i].T + weights[i + 1], 0)
    best = np.argmax(x @ weights[4].T + weights[5], axis=1)
    assert len(set(best)) > 1
    np.testing.assert_array_equal(q_network.best_actions(observations), best)


def test_replay_keeps_transitions_together_across_the_ring():
    buffer = dqn.ReplayBuffer(10, 1, "cpu")
    for start in (0, 4, 8, 12):  # 16 transitions: the first 6 are replaced
        code = np.arange(start, start + 4)
        columns = (code[:, None], code[:, None] + 0.5, code % 3, code + 0.25, code % 2 == 0)
        buffer.add(*columns)
    here, after, actions, rewards, terminations = buffer.sample(4000)
    code = here[:, 0]
    assert set(code.tolist()) == set(range(6, 16))
    torch.testing.assert_close(after[:, 0], code + 0.5)
    torch.testing.assert_close(rewards, code + 0.25)
    assert torch.equal(actions, code.long() % 3) and torch.equal(terminations, 1 - code % 2)
    copy = dqn.ReplayBuffer(10, 1, "cpu")
    copy.load_state_dict(buffer.state_dict())
    torch.manual_seed(3)
    one = buffer.sample(50)
    torch.manual_seed(3)
    assert copy.count == 16
    assert all(torch.equal(a, b) for a, b in zip(one, copy.sample(50)))


def test_epsilon_falls_and_stays():
    values = [dqn.linear_schedule(1.0, 0.1, 100, step) for step in (0, 50, 100, 10**6)]
    assert values == pytest.approx([1.0, 0.55, 0.1, 0.1])
    assert dqn.linear_schedule(1.0, 0.1, 0, 1) == pytest.approx(0.1)
