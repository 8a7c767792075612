"""HumanoidVectorEnv against Gymnasium's environments, stepped one by one."""

import gymnasium as gym
import numpy as np
import pytest

from environments.humanoid import HumanoidVectorEnv


def equal(ours, theirs):
    theirs = np.stack(theirs)
    return ours.dtype == theirs.dtype and ours.tobytes() == theirs.tobytes()


@pytest.mark.parametrize("num_envs, gain", [(5, 1.0), (1, 0.2)])
def test_humanoids_are_gymnasiums_to_the_bit(num_envs, gain):
    options = {"terminate_when_unhealthy": False, "max_episode_steps": -1}
    singles = [gym.make("Humanoid-v5", **options) for _ in range(num_envs)]
    data = [env.unwrapped.data for env in singles]
    envs = HumanoidVectorEnv(num_envs)
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
