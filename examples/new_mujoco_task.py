"""A robot of one's own: its MuJoCo model, its environment, its camera, its goal, all in this file.

    python examples/new_mujoco_task.py                        # offline, two minutes on two cores
    python examples/new_mujoco_task.py --target-prompt "a desk lamp to read by" \\
        --clip-model ViT-bigG-14/laion2b_s39b_b160k --render-size 480      # by a sentence, on a GPU

There is no copy of sac_clip_humanoid.py to make: it takes any task that Gymnasium knows, draws a
MuJoCo task from its state, and imports the module in --env-id from its folder or PYTHONPATH.

tiny_clip has seen humanoids, carts and cars but no lamp, and knows no sentence about it. Offline
the goal is therefore a picture, drawn here from the pose that is wanted: the reward of a state is
how near its picture is to the goal's, as tiny_clip embeds both (--target-image).
"""

import os
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import egl_render

if __name__ == "__main__":
    egl_render.setup_gl()  # before mujoco is imported

# isort: split
import gymnasium as gym
import numpy as np
from gymnasium.envs.mujoco import MujocoEnv
from PIL import Image

XML = """
<mujoco model="lamp">
  <option timestep="0.01"> <flag contact="disable"/> </option>
  <default>
    <joint type="hinge" axis="0 1 0" damping="1.5" armature="0.02" limited="true"/>
    <geom type="capsule" size="0.03" density="100" rgba="0.85 0.3 0.1 1"/>
    <position kp="40" ctrllimited="true"/>
  </default>
  <worldbody>
    <geom name="floor" type="plane" size="5 5 0.1" rgba="0.6 0.6 0.6 1"/>
    <geom name="foot" type="cylinder" size="0.25 0.03" pos="0 0 0.03" rgba="0.15 0.15 0.17 1"/>
    <body name="lower" pos="0 0 0.08">
      <joint name="base" range="-92 92"/>
      <geom fromto="0 0 0 0 0 0.5"/>
      <body name="upper" pos="0 0 0.5">
        <joint name="elbow" range="-8 138"/>
        <geom fromto="0 0 0 0 0 0.45"/>
        <body name="head" pos="0 0 0.45">
          <joint name="neck" range="-92 92"/>
          <geom type="ellipsoid" size="0.14 0.14 0.09" rgba="0.95 0.9 0.7 1"/>
        </body>
      </body>
    </body>
  </worldbody>
  <actuator>
    <position joint="base" ctrlrange="-1.6 1.6"/>
    <position joint="elbow" ctrlrange="0 2.4"/>
    <position joint="neck" ctrlrange="-1.6 1.6"/>
  </actuator>
</mujoco>
"""


class Lamp(MujocoEnv):
    """Three hinges that are told their angles; every episode begins with the lamp upright."""

    # MujocoEnv wants just these
    modes = ["human", "rgb_array", "depth_array", "rgbd_tuple"]
    metadata = {"render_modes": modes, "render_fps": 20}

    def __init__(self, **kwargs):
        self.xml = tempfile.NamedTemporaryFile("w", suffix=".xml")  # there while this object is
        self.xml.write(XML)
        self.xml.flush()
        space = gym.spaces.Box(-np.inf, np.inf, (6,))
        view = {"distance": 2.6, "azimuth": 90.0, "elevation": -8.0, "lookat": (0.0, 0.0, 0.5)}
        super().__init__(self.xml.name, 5, space, default_camera_config=view, **kwargs)

    def reset_model(self):
        self.set_state(self.np_random.uniform(-0.1, 0.1, 3), np.zeros(3))
        return self.state_vector()

    def step(self, action):
        self.do_simulation(action, self.frame_skip)
        return self.state_vector(), 0.0, False, False, {}  # it has no reward of its own


gym.register("Lamp-v0", Lamp)


GOAL = np.array([[-0.5, 2.0, 0.6, 0, 0, 0]])  # qpos and qvel of a lamp that one can read by


def bent(states):
    """The lower arm leans to the one side, the upper one is bent level to the other."""
    base, elbow = states[:, 0], states[:, 1]
    return (base < -0.2) & (np.abs(base + elbow - np.pi / 2) < 0.5)


def main():
    env, goal = Lamp(), ROOT / "runs/lamp_goal.png"
    model, camera = egl_render.textured_model(env.fullpath), egl_render.env_camera(env)
    renderer = egl_render.MujocoRenderer(model, 224, camera)
    goal.parent.mkdir(exist_ok=True)
    Image.fromarray(renderer.render(GOAL)[0]).save(goal)
    flags = "--clip-model local-dir:tiny_clip --render-size 64 --num-envs 4 --episode-length 50"
    flags += " --total-timesteps 12000 --learning-starts 1000 --gradient-steps 100"
    flags += " --batch-size 128 --entropy-coef 0.05 --checkpoint-freq 4000 --video-freq 4000"
    words = [*flags.split(), *sys.argv[1:], "--env-id", "examples.new_mujoco_task:Lamp-v0"]
    words += ["--judge", f"{Path(__file__).resolve()}:bent"]
    if not any(word.startswith(("--target-prompt", "--target-image")) for word in sys.argv):
        words += ["--target-image", str(goal)]
    os.execv(sys.executable, [sys.executable, str(ROOT / "sac_clip_humanoid.py"), *words])


if __name__ == "__main__":
    main()
