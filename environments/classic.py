"""The classic tasks as the paper has them: episodes do not end by themselves, and `info` has the
state to be drawn and "success"."""

import math

import gymnasium as gym
import numpy as np


class CartPoleTask(gym.Wrapper):
    """CartPole that goes on after the pole has fallen, since an early end would tell about the task
    (section 4.1 of the paper): the cart stops at the ends of the track, the angle is kept in [-pi,
    pi]. The reward is 1 for every step that is not a failure by Gymnasium's rule (12 degrees, or
    off the track); an episode without any is a success."""

    def __init__(self, env):
        super().__init__(env)
        high = np.array([env.unwrapped.x_threshold, np.inf, math.pi, np.inf], np.float32)
        self.observation_space = gym.spaces.Box(-high, high)  # all angles can be seen

    def reset(self, **kwargs):
        self.success = True  # of the episode so far
        return self.env.reset(**kwargs)

    def step(self, action):
        _, _, failed, _, _ = self.env.step(action)
        self.success = self.success and not failed
        task = self.unwrapped
        x, velocity, angle, spin = task.state
        if abs(x) > task.x_threshold:
            x, velocity = math.copysign(task.x_threshold, x), 0.0
        angle = (angle + math.pi) % (2 * math.pi) - math.pi
        task.state = np.array([x, velocity, angle, spin])
        task.steps_beyond_terminated = None  # else it warns at every further step
        info = {"states": task.state, "success": self.success}
        return task.state.astype(np.float32), float(not failed), False, False, info


class MountainCarTask(gym.Wrapper):
    """MountainCar whose goal is absorbing: the car stays where it reached it, and the reward, -1 a
    step before, is 0 from then on. An episode that reaches the goal is a success."""

    def reset(self, **kwargs):
        self.success = False
        return self.env.reset(**kwargs)

    def step(self, action):
        reward = 0.0
        if not self.success:
            _, reward, self.success, _, _ = self.env.step(action)
        state = np.array(self.unwrapped.state, np.float64)
        info = {"states": state, "success": self.success}
        return state.astype(np.float32), reward, False, False, info


class OriginalTask(gym.Wrapper):
    """Gymnasium's own rules. After an early end nothing happens any more: `info` says "over"."""

    def reset(self, **kwargs):
        self.over = False
        return self.env.reset(**kwargs)

    def step(self, action):
        info, reward, terminated = {"over": self.over}, 0.0, False
        if not self.over:
            self.observation, reward, terminated, _, _ = self.env.step(action)
            self.over = terminated
        info |= {"states": np.array(self.unwrapped.state, np.float64), "terminated": terminated}
        return self.observation, reward, False, False, info


class AbsorbingGoal(gym.Wrapper):
    """The car stays where it reaches the goal, and is paid nothing more; `info` has "success"."""

    def reset(self, **kwargs):
        self.arrived = None  # the observation there
        return self.env.reset(**kwargs)

    def step(self, action):
        observation, reward = self.arrived, 0.0
        if observation is None:
            observation, reward, reached, _, _ = self.env.step(action)
            self.arrived = observation if reached else None
        return observation, reward, False, False, {"success": self.arrived is not None}
