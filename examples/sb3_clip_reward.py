"""stable-baselines3's off-policy algorithms learn from CLIP's reward, here DQN on CartPole.

    pip install stable-baselines3
    python examples/sb3_clip_reward.py --seed 1        # with tiny_clip: four minutes on two cores

`CLIPVecEnv` hands every state to the pool of workers and returns reward 0. The workers draw and
score while the episode is still being played. `CLIPRewards` takes all rewards at the end of the
rollout and writes them over the zeros in the replay buffer, before the first update. If `step_wait`
computed the rewards, every step would wait for a picture and for CLIP, which is fast only with
batches of dozens of pictures. Algorithms that learn from the rollout itself (PPO, A2C) compute
their advantages before a callback is called, so they need the slow way (gym_wrapper.py).
"""

import argparse
import functools
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the clone

import clip_reward

# isort: split
import gymnasium as gym
import numpy as np
import stable_baselines3 as sb3
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnvWrapper

from environments.classic import CartPoleTask, ClassicRenderer
from training.workers import make_pool

EPISODE = 200
PROMPT = "pole vertically upright on top of the cart"


class CLIPVecEnv(VecEnvWrapper):
    """Send the "states" in the infos of the environments to the pool; the reward is 0 for now."""

    def __init__(self, venv, pool):
        super().__init__(venv)
        self.pool = pool

    def reset(self):
        return self.venv.reset()

    def step_wait(self):
        observations, rewards, dones, infos = self.venv.step_wait()
        self.pool.put(np.stack([info["states"] for info in infos]))
        return observations, np.zeros_like(rewards), dones, infos


class CLIPRewards(BaseCallback):
    """Write the rewards of a rollout into the replay buffer when the rollout is over."""

    def __init__(self, pool):
        super().__init__()
        self.pool = pool

    def _on_step(self):
        return True

    def _on_rollout_end(self):
        rewards = self.pool.take().reshape(-1, self.training_env.num_envs)  # [T, N]
        buffer = self.model.replay_buffer
        rows = np.arange(buffer.pos - len(rewards), buffer.pos) % buffer.buffer_size
        buffer.rewards[rows] = rewards
        self.logger.record("rollout/clip_reward", rewards.mean())
        print(f"step {self.num_timesteps}  clip_reward {rewards.mean():.4f}", flush=True)


def make_env():
    env = CartPoleTask(gym.make("CartPole-v1", max_episode_steps=-1, disable_env_checker=True))
    return gym.wrappers.TimeLimit(env, EPISODE)  # a truncation: stable-baselines3 bootstraps it


def make_renderer(device, size=64):
    return ClassicRenderer("CartPole-v1", size)


def train(seed, steps, num_envs=4):
    """Return a model, and the share of 100 episodes in which the pole never fell."""
    args = clip_reward.RewardArgs(target_prompt=(PROMPT,), clip_model="local-dir:tiny_clip")
    make_reward = functools.partial(clip_reward.make_clip_reward, args)
    pool = make_pool(make_renderer, make_reward, args.devices())
    envs = CLIPVecEnv(DummyVecEnv([make_env] * num_envs), pool)
    model = sb3.DQN(
        *("MlpPolicy", envs),
        train_freq=EPISODE,  # a rollout is one episode of each environment
        gradient_steps=EPISODE,
        learning_starts=1000,
        learning_rate=lambda left: 5e-4 * left,
        tau=0.01,
        target_update_interval=1,  # environment steps, not updates as elsewhere
        exploration_final_eps=0.04,
        policy_kwargs={"net_arch": [256, 256]},
        seed=seed,
    )
    model.learn(steps, CLIPRewards(pool))
    pool.close()
    # the return counts the steps at which the pole stands; on new starts, without exploration
    alone = DummyVecEnv([make_env] * 20)
    alone.seed(10_000 + seed)
    returns, _ = evaluate_policy(model, alone, 100, return_episode_rewards=True, warn=False)
    return model, float(np.mean(np.array(returns) == EPISODE))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--total-timesteps", type=int, default=60_000)
    args = parser.parse_args()
    model, share = train(args.seed, args.total_timesteps)
    print(f"seed {args.seed}: the pole stands in {share:.0%} of 100 episodes")
