"""Humanoid-v5 rewarded for a pose by geometry, without pictures, as by a perfect CLIP.
States of such runs are in hacked.npz. If they succeed and runs with CLIP fail, CLIP is the limit.

    python sac_clip_humanoid.py --env-id tiny_clip.teacher:HumanoidLotus-v0 --reward ground-truth \\
        --action-repeat 2 --total-timesteps 64000
"""

import gymnasium as gym
from gymnasium.envs.mujoco.humanoid_v5 import HumanoidEnv

from tiny_clip import data, poses


class HumanoidPose(HumanoidEnv):
    """Humanoid-v5 whose reward is the pose's degree, 0 to 1, from `data.degrees`."""

    def __init__(self, pose, **kwargs):
        super().__init__(**kwargs)
        self.pose = pose

    def step(self, action):
        observation, _, terminated, truncated, info = super().step(action)
        degree = data.degrees(poses.describe(self.data.qpos[None]))[self.pose]
        return observation, float(degree[0]), terminated, truncated, info


for pose in poses.TASKS:
    name = pose.replace("_", " ").title().replace(" ", "")
    gym.register(f"Humanoid{name}-v0", HumanoidPose, kwargs={"pose": pose})
