"""CLIP as a reward function of imitation: (state, action, next_state, done) -> rewards.

imitation 1.0.1 needs Gymnasium 0.29, and the scripts here need 1.4 or newer. The reward itself
needs neither, so this example runs in a virtual environment of its own:

    python3 -m venv ~/imitation && . ~/imitation/bin/activate
    pip install imitation==1.0.1 torch torchvision open_clip_torch pydantic
    python examples/imitation_reward.py            # PPO on CartPole with tiny_clip: two minutes
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from clip_reward import CLIPReward, load_clip

# isort: split
import gymnasium as gym
import numpy as np
from imitation.rewards.reward_wrapper import RewardVecEnvWrapper
from stable_baselines3 import PPO
from stable_baselines3.common.vec_env import DummyVecEnv

from environments.classic import CartPoleTask, ClassicRenderer


class CLIPRewardFn:
    """imitation's `RewardFn`: a transition's reward is CLIP's score of the next state's picture.

    Args:
        reward: maps pictures [B, H, W, 3] uint8 to rewards [B], as CLIPReward does.
        renderer: draws states [B, S], as ClassicRenderer and MujocoRenderer do.
        to_states: maps observations [B, ...] to states [B, S]. imitation passes observations, which
            must contain everything that a picture shows. CartPole's do, but the humanoid's leave
            out its position.
    """

    def __init__(self, reward, renderer, to_states=np.asarray):
        self.reward, self.renderer, self.to_states = reward, renderer, to_states

    def __call__(self, state, action, next_state, done):
        frames = self.renderer.render(self.to_states(next_state))
        return self.reward(frames).cpu().numpy()  # [B] float32


def make_env():
    """Make a CartPole that continues when the pole falls: imitation needs equally long episodes."""
    return gym.wrappers.TimeLimit(CartPoleTask(gym.make("CartPole-v1").unwrapped), 200)


def main(steps):
    clip = load_clip("local-dir:tiny_clip")
    reward = CLIPReward(clip, ["pole vertically upright on top of the cart"])
    function = CLIPRewardFn(reward, ClassicRenderer("CartPole-v1", 64))
    envs = RewardVecEnvWrapper(DummyVecEnv([make_env] * 8), function)
    settings = {"n_steps": 32, "batch_size": 256, "gae_lambda": 0.8, "gamma": 0.98, "n_epochs": 20}
    model = PPO("MlpPolicy", envs, learning_rate=1e-3, seed=1, **settings)
    returns = []
    for _ in range(max(1, steps // 3200)):
        model.learn(3200, envs.make_log_callback(), reset_num_timesteps=False)
        returns.append(np.mean(envs.episode_rewards))
        print(f"step {model.num_timesteps}: CLIP reward per episode {returns[-1]:.1f}", flush=True)
    print(f"from {returns[0]:.1f} to {returns[-1]:.1f}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if sys.argv[1:] else 40_000)
