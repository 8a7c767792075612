"""HumanoidVectorEnv against Gymnasium's environments, stepped one by one."""

import sys

import gymnasium as gym
import numpy as np
import pytest
import torch

import sac_clip_humanoid as sac
from clip_reward import RunError, UsageError
from environments import tasks
from environments.humanoid import HumanoidVectorEnv


def equal(ours, theirs):
    theirs = np.stack(theirs)
    return ours.dtype == theirs.dtype and ours.tobytes() == theirs.tobytes()


FEW = {"include_cinert_in_observation": False, "include_cvel_in_observation": False}


@pytest.mark.parametrize("num_envs, gain, less", [(5, 1.0, {}), (1, 0.2, {}), (3, 1.0, FEW)])
def test_humanoids_are_gymnasiums_to_the_bit(num_envs, gain, less):
    options = {"terminate_when_unhealthy": False, "max_episode_steps": -1} | less
    singles = [gym.make("Humanoid-v5", **options) for _ in range(num_envs)]
    data = [env.unwrapped.data for env in singles]
    envs = HumanoidVectorEnv(num_envs, **less)
    rng = np.random.default_rng(num_envs)
    space = envs.single_action_space
    contacts, lowest, forces = 0, 2.0, 0.0
    for steps in (120, 40):  # the second after a reset from lying on the ground
        seeds = rng.integers(2**31, size=num_envs).tolist()
        observations, _ = envs.reset(seed=seeds)
        firsts = [env.reset(seed=seed)[0] for env, seed in zip(singles, seeds)]
        assert equal(observations, firsts)
        for _ in range(steps):
            actions = rng.uniform(space.low, space.high, (num_envs, *space.shape)) * gain
            actions = actions.astype(np.float32)
            observations, rewards, terminations, truncations, infos = envs.step(actions)
            results = [env.step(action) for env, action in zip(singles, actions)]
            assert equal(observations, [result[0] for result in results])
            assert equal(rewards, [result[1] for result in results])
            assert equal(infos["states"], [np.concatenate([d.qpos, d.qvel]) for d in data])
            assert not terminations.any() and not truncations.any()
            contacts = max(contacts, *(d.ncon for d in data), 0)
            lowest = min(lowest, infos["states"][:, 2].min())
            forces = max(forces, np.abs(observations[:, -78:]).max())
    assert contacts >= 4 and lowest < 0.5 and forces > 100  # they fell, and that was compared
    envs.close()


def test_sac_observes_all_of_gymnasiums_numbers_but_the_forces():
    args = sac.Args(num_envs=2)
    envs, one = sac.make_vector_env(args), sac.make_env(args)()
    assert envs.single_observation_space == one.observation_space
    observations, _ = envs.reset(seed=[3, 4])
    assert observations.shape == (2, 253)
    np.testing.assert_array_equal(observations[0], one.reset(seed=3)[0])
    *_, info = one.step(np.zeros(17, np.float32))
    observations, *_, infos = envs.step(np.zeros((2, 17), np.float32))
    np.testing.assert_array_equal(observations[0, :45], info["states"][2:])
    envs.close()


@pytest.mark.parametrize("options", [{}, sac.NO_FORCES])
def test_a_mirrored_humanoid_sees_and_does_the_same_on_the_other_side(options):
    rng, envs = np.random.default_rng(0), HumanoidVectorEnv(6, **options)
    (columns, signs), (action_columns, action_signs) = envs.mirror()
    envs.reset(seed=range(6))
    envs.qpos[:3, 2] += [0, 1, 2]  # one stands, two are in the air
    envs.qpos[:3, 7:] += rng.normal(size=(3, 17)) / 5
    envs.qvel[:3] = rng.normal(size=(3, 23))
    envs.batch.forward()
    seen = envs._observe()[:3].copy()
    envs.qpos[3:, 2:] = (seen[:, columns] * signs)[:, :22]
    envs.qvel[3:] = (seen[:, columns] * signs)[:, 22:45]
    envs.batch.forward()
    parts = slice(0, 253)  # the forces are of the next step
    twins = envs._observe()[3:]
    np.testing.assert_allclose(twins[:, parts], (seen[:, columns] * signs)[:, parts], atol=1e-12)
    actions = rng.uniform(-0.4, 0.4, (3, 17)).astype(np.float32)
    mirrored = actions[:, action_columns] * action_signs
    after = envs.step(np.concatenate([actions, mirrored]))[0]
    expected = after[:3, columns] * signs
    moved = np.abs(expected[:, :45] - after[:3, :45]).max()
    np.testing.assert_allclose(after[3:, :45], expected[:, :45], atol=0.02 * moved)
    if not options:
        np.testing.assert_allclose(after[3:, 253:270], expected[:, 253:270], atol=1e-4)  # torques
        touched = np.abs(expected[:, 270:]).max()
        np.testing.assert_allclose(after[3:, 270:], expected[:, 270:], atol=0.05 * touched)
    twice = after[:, columns][:, columns] * signs[columns] * signs
    assert np.array_equal(twice, after)


def test_half_of_a_batch_is_mirrored():
    batch = [torch.arange(12.0).reshape(4, 3), torch.ones(4, 3), torch.ones(4, 2), torch.ones(4)]
    states = torch.tensor([2, 1, 0]), torch.tensor([1.0, -1, 1])
    actions = torch.tensor([1, 0]), torch.tensor([-1.0, 1])
    sac.mirror_half(batch, (states, states, actions))
    assert batch[0].tolist() == [[2, -1, 0], [5, -4, 3], [6, 7, 8], [9, 10, 11]]
    assert batch[1].tolist() == [[1, -1, 1]] * 2 + [[1, 1, 1]] * 2
    assert batch[2].tolist() == [[-1, 1]] * 2 + [[1, 1]] * 2
    assert batch[3].tolist() == [1] * 4


def test_a_simulation_that_mujoco_resets_ends_the_run():
    """It would go on from the standing pose, which CLIP may like."""
    message = "^MuJoCo reset an unstable simulation"
    envs = HumanoidVectorEnv(3)
    envs.reset(seed=[1, 2, 3])
    for _ in range(30):
        envs.step(np.full((3, 17), 0.4, np.float32))
    envs.qvel[1, 7] = 1e20
    with pytest.raises(RunError, match=message):
        envs.step(np.zeros((3, 17), np.float32))
    env = sac.make_env(sac.Args(env_id="HalfCheetah-v5", target_prompt=("words",)))()
    env.reset(seed=1, options={"film": False})
    for _ in range(30):
        env.step(np.full(6, 0.4, np.float32))
    env.unwrapped.data.qvel[3] = 1e20
    with pytest.raises(RunError, match=message):
        env.step(np.zeros(6, np.float32))


class Narrow(gym.Env):
    """Observes fewer numbers than it says from some step on."""

    action_space = gym.spaces.Box(-1, 1, (2,))
    observation_space = gym.spaces.Box(-1, 1, (3,))

    def __init__(self, good_steps):
        self.left = good_steps

    def reset(self, **_):
        return np.zeros(3 if self.left else 1, np.float32), {}

    def step(self, action):
        self.left -= 1
        return np.zeros(3 if self.left > 0 else 1, np.float32), 0.0, False, False, {}


def test_a_task_that_exits_is_named():
    task, args = Narrow(2), sac.Args(reward="ground-truth", video_freq=0)
    task.step = lambda action: sys.exit(3)
    env = tasks.EndlessEpisodes(task, args, by_state=False, filmed=False)
    env.reset()
    with pytest.raises(RunError, match="the environment failed: SystemExit: 3$"):
        env.step(env.action_space.sample())
    with pytest.raises(UsageError, match=r"SystemExit: 3 \(test_environments.py, line \d+\)$"):
        tasks.describe_env("Own-v0", lambda: sys.exit(3))


@pytest.mark.parametrize("good_steps", [0, 1, 2])
def test_an_observation_of_another_shape_is_refused_and_not_broadcast(good_steps):
    """Gymnasium's processes would write the one number three times."""
    args = sac.Args(reward="ground-truth", video_freq=0)
    env = tasks.EndlessEpisodes(Narrow(good_steps), args, by_state=False, filmed=False)
    with pytest.raises(RunError, match=r"^its observation has the shape \(1,\), not \(3,\)$"):
        env.reset()
        for _ in range(good_steps):
            env.step(env.action_space.sample())
