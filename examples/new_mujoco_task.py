"""A robot of your own. lamp.xml is its MuJoCo model; its environment, camera and goal are here.

    python examples/new_mujoco_task.py                        # offline, two minutes on two cores
    python examples/new_mujoco_task.py --target-prompt "a desk lamp to read by" \\
        --clip-model ViT-bigG-14/laion2b_s39b_b160k --render-size 480      # by a sentence, on a GPU

No copy of sac_clip_humanoid.py is needed: the script takes any task that Gymnasium knows, draws a
MuJoCo task from its states, and imports the module in --env-id from its own folder or PYTHONPATH.

tiny_clip was trained on humanoids, carts and cars and knows no sentence about lamps. Offline the
goal is therefore a picture, drawn here from the desired pose. The reward of a state is the cosine
similarity of its picture and the picture of the goal (--target-image).
"""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
XML = str(ROOT / "examples/lamp.xml")

import egl_render

if __name__ == "__main__":
    egl_render.setup_gl()  # before mujoco is imported

# isort: split
import gymnasium as gym
import numpy as np
from gymnasium.envs.mujoco import MujocoEnv
from PIL import Image

from warp_render import WarpRenderer


class Lamp(MujocoEnv):
    """Three hinges under position control; every episode begins with the lamp upright."""

    # MujocoEnv requires these
    modes = ["human", "rgb_array", "depth_array", "rgbd_tuple"]
    metadata = {"render_modes": modes, "render_fps": 20}

    def __init__(self, **kwargs):
        space = gym.spaces.Box(-np.inf, np.inf, (6,), np.float64)
        view = {"distance": 2.6, "azimuth": 90.0, "elevation": -8.0, "lookat": (0.0, 0.0, 0.5)}
        super().__init__(XML, 5, space, default_camera_config=view, **kwargs)

    def reset_model(self):
        self.set_state(self.np_random.uniform(-0.1, 0.1, 3), np.zeros(3))
        return self.state_vector()

    def step(self, action):
        self.do_simulation(action, self.frame_skip)
        return self.state_vector(), 0.0, False, False, {}  # it has no reward of its own


gym.register("Lamp-v0", Lamp)


FLAGS = """--clip-model tiny_clip --num-envs 4 --episode-length 50
    --total-timesteps 12000 --learning-starts 1000 --gradient-steps 100 --batch-size 128
    --checkpoint-freq 4000 --video-freq 4000"""
GOAL = np.array([[-0.5, 2.0, 0.6, 0, 0, 0]])  # qpos and qvel of a lamp to read by


def bent(states):
    """The lower arm leans to one side, and the upper arm is bent to the other side and level."""
    base, elbow = states[:, 0], states[:, 1]
    return (base < -0.2) & (np.abs(base + elbow - np.pi / 2) < 0.5)


def main():
    env, goal = Lamp(), ROOT / "runs/lamp_goal.png"
    model, camera = egl_render.textured_model(env.fullpath), egl_render.env_camera(env)
    renderer = WarpRenderer(model, 224, camera)
    goal.parent.mkdir(exist_ok=True)
    Image.fromarray(renderer.render(GOAL)[0]).save(goal)
    words = [*FLAGS.split(), *sys.argv[1:], "--env-id", "examples.new_mujoco_task:Lamp-v0"]
    words += ["--judge", f"{Path(__file__).resolve()}:bent"]
    if not any(word.startswith(("--target-prompt", "--target-image")) for word in sys.argv):
        words += ["--target-image", str(goal)]
    os.execv(sys.executable, [sys.executable, str(ROOT / "sac_clip_humanoid.py"), *words])


if __name__ == "__main__":
    main()
