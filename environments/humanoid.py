"""Many Humanoid-v5 environments in one process, stepped by MuJoCo's threads; nothing is pickled.

On two cores this is twice as fast as a process per environment (docs/speed.md)."""

import os
import re

import gymnasium as gym
import mujoco
import mujoco.batch
import numpy as np
from gymnasium.vector.utils import batch_space

from clip_reward import RunError
from egl_render import UNSTABLE


class HumanoidVectorEnv(gym.vector.VectorEnv):
    """N times gym.make("Humanoid-v5", terminate_when_unhealthy=False, max_episode_steps=-1), with
    the same observations, rewards, resets and states, bit for bit. See Gymnasium's humanoid_v5.py.

    Nothing terminates, is truncated or resets itself; `infos` has "states" [N, 47] float64, qpos
    and qvel. The observations [N, O] float64 are the same array at every call: O is 348, or less
    with `options`, Gymnasium's include_.._in_observation."""

    def __init__(self, num_envs, **options):
        self.num_envs, self.task = num_envs, gym.make("Humanoid-v5", **options).unwrapped
        parts = ("cinert", "cvel", "qfrc_actuator", "cfrc_ext")
        self.included = [options.get(f"include_{part}_in_observation", True) for part in parts]
        self.metadata = self.task.metadata | {"autoreset_mode": gym.vector.AutoresetMode.DISABLED}
        self.single_observation_space = self.task.observation_space
        self.single_action_space = self.task.action_space
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.observations = np.zeros(self.observation_space.shape)
        self.model = self.task.model
        threads = min(num_envs, len(os.sched_getaffinity(0)))
        self.batch = mujoco.batch.Batch(self.model, num_envs, threads, persistent=True)
        for name in "qpos qvel xipos cinert cvel qfrc_actuator".split():
            setattr(self, name, self.batch.bind(name))  # [N, ...], new after every call
        self.data = mujoco.MjData(self.model)
        self.cfrc_ext = np.zeros((num_envs, *self.data.cfrc_ext.shape))

    def reset(self, *, seed, options=None):
        """Reset with a `seed` for each environment -> observations [N, O], {}."""
        model, scale = self.model, self.task._reset_noise_scale
        noise = np.empty((self.num_envs, model.nq + model.nv))
        for row, env_seed in zip(noise, seed, strict=True):
            random, _ = gym.utils.seeding.np_random(env_seed)
            row[:] = random.uniform(-scale, scale, len(row))
        self.batch.reset(stage=mujoco.mjtStage.mjSTAGE_NONE)
        self.qpos[:] = self.task.init_qpos + noise[:, : model.nq]
        self.qvel[:] = self.task.init_qvel + noise[:, model.nq :]
        self.batch.forward()
        self.cfrc_ext[:] = 0
        self.steps = 0
        return self._observe(), {}

    def step(self, actions):
        """Step with actions [N, 17] -> observations [N, O], rewards [N], False [N] twice, infos.
        Raises RunError if MuJoCo has reset an unstable simulation."""
        task, before = self.task, self.centre
        self.batch.ctrl = actions
        self.batch.step(nstep=task.frame_skip)
        self.steps += 1
        for i, forces in enumerate(self.cfrc_ext):  # of contacts, which a batch leaves out
            self.batch.get_data(i, self.data)
            if self.data.time < (self.steps - 0.5) * task.dt:
                raise RunError(UNSTABLE)
            mujoco.mj_rnePostConstraint(self.model, self.data)
            forces[:] = self.data.cfrc_ext
        observations = self._observe()
        low, high = task._healthy_z_range
        healthy = (low < self.qpos[:, 2]) & (self.qpos[:, 2] < high)
        speed = (self.centre[:, 0] - before[:, 0]) / task.dt
        gain = task._forward_reward_weight * speed + healthy * task._healthy_reward
        effort = task._ctrl_cost_weight * np.square(actions.astype(np.float64)).sum(1)
        contact = np.square(self.cfrc_ext).reshape(self.num_envs, -1).sum(1)
        contact = (task._contact_cost_weight * contact).clip(*task._contact_cost_range)
        ends = np.zeros(self.num_envs, bool)
        states = np.concatenate([self.qpos, self.qvel], axis=1)
        return observations, gain - (effort + contact), ends, ends, {"states": states}

    def _observe(self):
        """Return observations [N, O], and keep the centres of mass [N, 3] for the next reward."""
        mass = self.model.body_mass
        self.centre = np.einsum("b,nbj->nj", mass, self.xipos) / mass.sum()
        bodies = (self.cinert, self.cvel, self.cfrc_ext)
        cinert, cvel, cfrc_ext = (x[:, 1:].reshape(self.num_envs, -1) for x in bodies)
        parts = (cinert, cvel, self.qfrc_actuator[:, 6:], cfrc_ext)
        parts = [part for part, included in zip(parts, self.included) if included]
        return np.concatenate([self.qpos[:, 2:], self.qvel, *parts], 1, out=self.observations)

    def mirror(self):
        """Return (columns [O], signs [O]) of the observations, and those [17] of the actions:
        x[:, columns] * signs exchanges left and right. The robot is symmetric, apart from the
        armature of a hip joint (8 and 10 g m^2) and the stiffness of a knee (0 and 1 N m/rad)."""
        model, other = self.model, {"left": "right", "right": "left"}

        def twins(kind, first, end):
            names = [kind(i).name for i in range(first, end)]
            swapped = (re.sub("left|right", lambda side: other[side[0]], name) for name in names)
            return np.array([names.index(name) for name in swapped])

        joints, bodies = twins(model.joint, 1, model.njnt), twins(model.body, 1, model.nbody)
        vector, axis = [1, -1, 1], [-1, 1, -1]  # a rotation about y stays, others are reversed
        axes = model.jnt_axis[1:]
        turns = np.rint((axes * axis * axes[joints]).sum(1)).astype(np.float32)
        inertia, spatial = [1, 1, 1, -1, 1, -1, *vector, 1], axis + vector
        parts = [(np.arange(5), [1, 1, *axis]), (joints, turns)]  # qpos, then qvel
        parts += [(np.arange(6), vector + axis), (joints, turns)]
        cinert, cvel = (
            ((bodies[:, None] * len(signs) + np.arange(len(signs))).ravel(), signs * len(bodies))
            for signs in (inertia, spatial)
        )
        optional = cinert, cvel, (joints, turns), cvel  # as in _observe
        parts += [part for part, included in zip(optional, self.included) if included]
        starts = np.cumsum([0] + [len(columns) for columns, _ in parts])
        columns = np.concatenate([start + part[0] for start, part in zip(starts, parts)])
        signs = np.concatenate([signs for _, signs in parts], dtype=np.float32)
        driven = model.actuator_trnid[:, 0] - 1  # the joint of each action
        return (columns, signs), (twins(model.actuator, 0, model.nu), turns[driven])
