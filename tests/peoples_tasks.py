"""Tasks as people register them, for test_peoples_tasks.py: in a goal there is always a choice
between left and right, made by reset()."""

import multiprocessing
import os
import sys
import threading
from pathlib import Path

import gymnasium as gym
import mujoco
import numpy as np
from gymnasium.envs.mujoco import MujocoEnv
from gymnasium.spaces import Box, Discrete, Sequence

ANY = Box(-np.inf, np.inf, (1,), np.float64)
XML = """
<mujoco>
  <worldbody>
    <light pos="0 0 3"/>
    <geom type="plane" size="4 4 .1"/>
    <body name="goal" mocap="{mocap}" pos=".2 0 .3"><geom name="goal" size=".2" rgba="1 0 0 1"
      contype="0" conaffinity="0"/></body>
    <site name="mark" pos="0 .8 .3" size=".2" rgba="0 1 0 1"/>
    <body pos="0 0 .1"><joint name="slide" type="slide" axis="1 0 0"/>
      <geom type="box" size=".1 .1 .1" rgba="0 0 1 1"/></body>
  </worldbody>
  <actuator><motor joint="slide" ctrlrange="-1 1"/></actuator>
</mujoco>
"""
PATHS = {}
for kind in "true", "false":
    PATHS[kind] = Path(os.environ["TASK_FOLDER"]) / f"mocap_{kind}.xml"
    PATHS[kind].write_text(XML.format(mocap=kind))


class Slider(MujocoEnv):
    """Its goal is a mocap body."""

    metadata = {"render_modes": ["human", "rgb_array", "depth_array", "rgbd_tuple"]}
    xml, size = PATHS["true"], (100, 100)

    def __init__(self, render_mode=None):
        view = {"distance": 3.0, "azimuth": 90.0, "elevation": -30.0, "lookat": (0.0, 0.0, 0.3)}
        size = self.size
        super().__init__(str(self.xml), 5, ANY, render_mode, *size, default_camera_config=view)

    def move_goal(self, x):
        self.data.mocap_pos[0, 0] = x

    def reset_model(self):
        self.set_state(np.zeros(1), np.zeros(1))
        self.move_goal(self.np_random.choice([-1.0, 1.0]))
        return np.zeros(1)

    def step(self, action):
        self.do_simulation(action, self.frame_skip)
        return self.data.qpos.copy(), 0.0, False, False, {"is_success": True}


class MovedSite(Slider):
    def move_goal(self, x):
        self.model.site_pos[0, 0] = x


class MovedBody(Slider):
    xml = PATHS["false"]

    def move_goal(self, x):
        self.model.body_pos[1, 0] = x


class Coloured(Slider):
    def move_goal(self, x):
        self.model.geom_rgba[1] = [0, x > 0, 1, 1]


class Growing(Slider):
    def step(self, action):
        self.model.geom_size[1, 0] += 0.01
        return super().step(action)


class ByChance(Slider):
    def __init__(self, render_mode=None):
        super().__init__(render_mode)
        self.model.geom_rgba[1, :3] = np.random.default_rng().random(3)


class Painted(Slider):
    """All of these look the same, but not as the file says."""

    def __init__(self, render_mode=None):
        super().__init__(render_mode)
        self.model.geom_rgba[1] = [1, 0, 1, 1]


class Dimmed(Slider):
    """Another light than the file's."""

    def __init__(self, render_mode=None):
        super().__init__(render_mode)
        self.model.vis.headlight.ambient[:] = 0.9


class TurnsGreen(Slider):
    """After twenty steps."""

    def step(self, action):
        self.model.geom_rgba[1, 1] = self.data.time > 0.2
        return super().step(action)


class Trail(Slider):
    """Its render() also shows how far the slider has been."""

    def render(self):
        picture = np.array(super().render())
        if picture.ndim:
            picture[:4, : int(40 * self.data.time)] = 255, 255, 0
        return picture


class Turned(Slider):
    """Its render() looks from the other side."""

    def render(self):
        self.mujoco_renderer._get_viewer("rgb_array").cam.azimuth = 270.0
        return super().render()


class Follower(Slider):
    """Its render() follows the slider."""

    def render(self):
        self.mujoco_renderer._get_viewer("rgb_array").cam.lookat[0] = self.data.qpos[0]
        return super().render()


class Window(Slider):
    """It opens a window unless it is told not to."""

    def __init__(self, render_mode="human"):
        super().__init__(render_mode)


class Renderless(Slider):
    """It has no render modes."""

    metadata = {"render_modes": []}


class Heavy(Slider):
    """No picture shows what changes."""

    def move_goal(self, x):
        super().move_goal(x)
        self.model.body_mass[:] *= 1 + x / 10
        self.model.geom_friction[:] *= 1 + x / 10


class Shown(Slider):
    """A site is moved in the data, where it is drawn."""

    def reset_model(self):
        super().reset_model()
        self.data.site_xpos[0, 0] = self.data.mocap_pos[0, 0]
        return np.zeros(1)


class Wide(Slider):
    size = 200, 100


class Words(Slider):
    """Its render() shows more."""

    def render(self):
        picture = np.array(super().render())
        if picture.ndim:
            picture[:8, :40] = 255, 255, 0
        return picture


class TwoWorlds(Slider):
    """It shows a simulation of its own."""

    def __init__(self, render_mode=None):
        super().__init__(render_mode)
        self.shown, self.renderer = mujoco.MjData(self.model), None

    def render(self):
        self.renderer = self.renderer or mujoco.Renderer(self.model, 100, 200)
        self.shown.mocap_pos[:] = self.data.mocap_pos
        mujoco.mj_forward(self.model, self.shown)
        self.renderer.update_scene(self.shown)
        return self.renderer.render()


class Frame(gym.Wrapper):
    def render(self):
        picture = np.array(self.env.render())
        picture[[0, -1]] = 0, 255, 0
        return picture


class Steps(Slider):
    """To the left, nowhere, or to the right."""

    def __init__(self, render_mode=None):
        super().__init__(render_mode)
        self.action_space = Discrete(3, start=-1)

    def step(self, action):
        assert self.action_space.contains(action), action
        self.do_simulation([action], self.frame_skip)
        return self.data.qpos.copy(), 0.0, False, False, {}


class Flat(gym.Env):
    """A red box at the place of the last action in a wide white picture. It has `data`, too."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": None}
    observation_space, action_space, data = ANY, Box(-1, 1, (1,), np.float32), {"time": "noon"}

    def __init__(self, render_mode=None):
        self.render_mode = render_mode

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.place = 0.0
        return np.zeros(1), {}

    def step(self, action):
        self.place = float(action[0])
        return np.zeros(1), 0.0, False, False, {}

    def render(self):
        picture, column = np.full((400, 600, 3), 255, np.uint8), int(300 + 300 * self.place)
        picture[180:220, max(0, column - 15) : column + 15] = 255, 0, 0
        return picture


class Raw(Flat):
    """It holds MuJoCo's model and data, but is no MujocoEnv."""

    def __init__(self, render_mode=None):
        super().__init__(render_mode)
        self.model = mujoco.MjModel.from_xml_path(str(PATHS["true"]))
        self.data = mujoco.MjData(self.model)


class Grey(Flat):
    """Grey pictures [H, W, 1], of another width at every step."""

    def render(self):
        return super().render()[:, int(100 * self.place) + 100 :, :1]


class Unconnected(Flat):
    """It has a property called data that cannot be read, and a success that is an array."""

    @property
    def data(self):
        raise RuntimeError("not connected")

    def step(self, action):
        return *super().step(action)[:4], {"success": np.array([True, False])}


class Boast(Flat):
    """Its success is no number."""

    def step(self, action):
        return *super().step(action)[:4], {"success": "yes"}


class Varied(Flat):
    observation_space = Sequence(ANY)


class NeedsMap(Flat):
    def __init__(self, map_name, render_mode=None):
        super().__init__(render_mode)


class NoFile(Flat):
    def __init__(self, render_mode=None):
        open("robot.stl")


class NoKey(Flat):
    def __init__(self, render_mode=None):
        {}["robot"]


class NoWords(Flat):
    def reset(self, seed=None, options=None):
        assert seed is None


class NoXml(Slider):
    xml = "/moved.xml"


class WrongRate(Slider):
    metadata = Slider.metadata | {"render_fps": 60}


class NoPicture(Flat):
    def render(self):
        return None


class Floats(Flat):
    def render(self):
        return super().render() / 255


class ContextLost(Exception):
    def __init__(self):
        super().__init__("the GL context is lost")
        self.lock = threading.Lock()  # cannot be pickled


class Lost(Flat):
    def render(self):
        raise ContextLost


class LostLater(Lost):
    """Its first picture, the one that is tried, can be drawn."""

    drawn = False

    def render(self):
        if self.drawn:
            raise ContextLost
        self.drawn = True
        return Flat.render(self)


class OneLicence(Flat):
    """It can be made in the script's own process only."""

    def __init__(self, render_mode=None):
        super().__init__(render_mode)
        if multiprocessing.parent_process() is not None:
            raise ContextLost


class Quits(OneLicence):
    def __init__(self, render_mode=None):
        if multiprocessing.parent_process() is not None:
            os._exit(7)
        super().__init__(render_mode)


for name, value in [*vars(sys.modules[__name__]).items()]:
    if isinstance(value, type) and issubclass(value, gym.Env) and value.__module__ == __name__:
        if value is not Frame:
            gym.register(f"{name}-v0", value)
gym.register("Framed-v0", lambda **options: Frame(Slider(**options)))
gym.register("Alias-v0", lambda **options: gym.make("Reacher-v5", **options))
