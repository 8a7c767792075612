"""CLIP's reward instead of an environment's own, for code that trains on Gymnasium environments.

    python examples/gym_wrapper.py           # CartPole with tiny_clip: one, then a vector of four

The environment draws itself (`render_mode="rgb_array"`), and every step is scored immediately.
This is simple but slow, because pictures are drawn and scored one by one. If rewards may arrive at
the end of an episode, hand the states to training.workers.Pool instead, as the scripts do.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # unless it is pip-installed

from clip_reward import CLIPReward, load_clip

# isort: split
import gymnasium as gym
import numpy as np


def check_drawn(env):
    """Raise ValueError for an environment without pictures. `step` calls this, because Gymnasium's
    checker makes environments that draw no pictures."""
    if env.render_mode != "rgb_array":
        raise ValueError('pictures are needed: gym.make(..., render_mode="rgb_array")')


class CLIPRewardWrapper(gym.Wrapper, gym.utils.RecordConstructorArgs):
    """Replace a step's reward with CLIP's score of the picture after the step. The environment's
    own reward is in info["env_reward"].

    Args:
        env: an environment with render_mode="rgb_array".
        reward: maps pictures [B, H, W, 3] uint8 to rewards [B], as CLIPReward does.
    """

    def __init__(self, env, reward):
        # for gym.make(env.spec); a deep copy would load one more CLIP for every environment
        gym.utils.RecordConstructorArgs.__init__(self, reward=reward, _disable_deepcopy=True)
        gym.Wrapper.__init__(self, env)
        self.reward = reward

    def step(self, action):
        check_drawn(self.env)
        observation, own, terminated, truncated, info = self.env.step(action)
        reward = self.reward(self.env.render()[None]).item()
        return observation, reward, terminated, truncated, info | {"env_reward": own}


class CLIPRewardVectorWrapper(gym.vector.VectorWrapper):
    """Do the same for a vector environment. All pictures of a step are scored in one batch.

    An environment that resets itself within the step that ends an episode would show the next
    episode's first picture, so its autoreset mode must be "next step" (the default) or off. The
    reward of a step that only resets is 0, as everywhere in Gymnasium.
    """

    def __init__(self, envs, reward):
        super().__init__(envs)
        mode = envs.metadata.get("autoreset_mode")
        if mode == gym.vector.AutoresetMode.SAME_STEP:
            raise ValueError("autoreset in the same step loses an episode's last picture")
        self.reward, self.resets = reward, mode == gym.vector.AutoresetMode.NEXT_STEP

    def reset(self, **kwargs):
        self.over = np.zeros(self.num_envs, bool)
        return self.env.reset(**kwargs)

    def step(self, actions):
        check_drawn(self.env)
        observations, own, terminations, truncations, infos = self.env.step(actions)
        rewards = self.reward(np.stack(self.env.render())).cpu().numpy().astype(np.float64)
        rewards[self.over & self.resets] = 0
        self.over = terminations | truncations
        return observations, rewards, terminations, truncations, infos | {"env_reward": own}


def main():
    clip = load_clip("local-dir:tiny_clip")
    reward = CLIPReward(clip, ["pole vertically upright on top of the cart"])
    env = CLIPRewardWrapper(gym.make("CartPole-v1", render_mode="rgb_array"), reward)
    env.reset(seed=1)
    print("one:", [round(env.step(0)[1], 2) for _ in range(8)])  # pole and reward fall
    envs = gym.make_vec("CartPole-v1", num_envs=4, render_mode="rgb_array")
    envs = CLIPRewardVectorWrapper(envs, reward)
    envs.reset(seed=1)
    for _ in range(3):
        _, rewards, *_ = envs.step(envs.action_space.sample())
        print("four:", rewards.round(2))


if __name__ == "__main__":
    main()
