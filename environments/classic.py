"""CartPole and MountainCar as in the paper: tasks whose episodes do not end by themselves (`info`
has the state to draw and "success"), and their pictures."""

import math
import os
from typing import Any

# No window is ever opened here. By default, pygame would look for a display and print a complaint
# in every process. With "dummy" in place of "offscreen", highway-env's tasks give black pictures.
# When an accelerated window is closed, EGL ends for MuJoCo in this process, too.
os.environ.setdefault("SDL_VIDEODRIVER", "offscreen")
os.environ.setdefault("SDL_FRAMEBUFFER_ACCELERATION", "0")
os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "hide")

import gymnasium as gym
import numpy as np

from egl_render import SCENES, load_picture

CLASSIC_STATE_SIZES = {"CartPole-v1": 4, "MountainCar-v0": 2, "MountainCarContinuous-v0": 2}
MOUNTAIN_GOALS = {"MountainCar-v0": 0.5, "MountainCarContinuous-v0": 0.45}  # x of the flag
SCALE = 600 / (0.6 + 1.2)  # pixels per unit of x in Gymnasium's MountainCar
CAR_HEIGHT = 30  # pixels of a native frame, with the wheels
CAR_SUPERSAMPLING = 4  # scenes/car.png is this many times as large


class CartPoleTask(gym.Wrapper):
    """CartPole that continues after the pole has fallen, since an early end would leak
    information about the task (section 4.1 of the paper): the cart stops at the track's ends, and
    the angle is wrapped to [-pi, pi]. The reward is 1 for every step that is not a failure by
    Gymnasium's rule (12 degrees, or off the track); an episode without failures is a success."""

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
        task.steps_beyond_terminated = None  # else it warns at every later step
        info = {"states": task.state, "success": self.success}
        return task.state.astype(np.float32), float(not failed), False, False, info


class MountainCarTask(gym.Wrapper):
    """MountainCar, with discrete or continuous actions, whose goal is absorbing: the car stays at
    the goal and gets no reward from then on. An episode that reaches the goal is a success."""

    def reset(self, **kwargs):
        self.success = False
        return self.env.reset(**kwargs)

    def step(self, action):
        reward = 0.0
        if not self.success:
            _, reward, self.success, _, _ = self.env.step(action)
        state = np.array(self.unwrapped.state, np.float64)
        info = {"states": state, "success": self.success}
        return state.astype(np.float32), float(reward), False, False, info


class OriginalTask(gym.Wrapper):
    """Keep Gymnasium's rules. After an episode's end, steps only set `info["over"]`."""

    def reset(self, *, seed=None, options=None):
        self.over = False
        return self.env.reset(seed=seed)

    def step(self, action):
        info, reward, terminated = {"over": self.over}, 0.0, False
        if not self.over:
            self.observation, reward, terminated, _, _ = self.env.step(action)
            self.over = terminated
        info |= {"states": np.array(self.unwrapped.state, np.float64), "terminated": terminated}
        return self.observation, reward, False, False, info


TASKS = {
    "CartPole-v1": CartPoleTask,
    "MountainCar-v0": MountainCarTask,
    "MountainCarContinuous-v0": MountainCarTask,
}
DISCRETE = "CartPole-v1", "MountainCar-v0"  # the tasks that DQN learns


def hill(x: Any) -> Any:
    """Return the height of MountainCar's hill at x, by Gymnasium's formula."""
    return np.sin(3 * x) * 0.45 + 0.55


class ClassicRenderer:
    """Draw CartPole and MountainCar states without stepping, without a display and without OpenGL.

    Plain frames of the native size equal those of Gymnasium's own `env.render()`, pixel for pixel.
    Gymnasium repaints everything and copies it twice, in 1.8 to 2.8 ms a frame. This class paints
    the parts that never move only once.

    Args:
        env_id: one of CLASSIC_STATE_SIZES.
        size: None for Gymnasium's 400 x 600 pixels; else height and width of the frames: the native
            picture centred in a square (CLIP's own crop would cut off the goal) and scaled.
        textured: draw the mountain as a landscape instead of a line (MountainCar only).
        scene: a landscape instead of the canonical one: [600, 600, 3] uint8, see scenes/paint.py.
    Raises ValueError: unknown env_id, or a texture for CartPole.
    """

    def __init__(
        self,
        env_id: str,
        size: int | None = None,
        textured: bool = False,
        scene: np.ndarray | None = None,
    ) -> None:
        import pygame
        import pygame.gfxdraw

        if env_id not in CLASSIC_STATE_SIZES:
            raise ValueError(f"{env_id} is not one of {', '.join(CLASSIC_STATE_SIZES)}")
        if textured and env_id == "CartPole-v1":
            raise ValueError("CartPole-v1 has no textured scene")
        self._pygame, self._state_size = pygame, CLASSIC_STATE_SIZES[env_id]
        self._size, self._goal = size, MOUNTAIN_GOALS.get(env_id)
        self.frame_shape = (400, 600, 3) if size is None else (size, size, 3)
        # Gymnasium draws with y upwards and flips the picture at the end; so do plain frames here
        self._flip = not textured
        self._canvas = pygame.Surface((600, 600), depth=32)
        self._native = self._canvas.subsurface((0, 100, 600, 400))
        self._canvas.fill((255, 255, 255))
        if textured:
            scene = load_picture(f"mountain_{self._goal}") if scene is None else scene
            self._canvas.blit(pygame.image.frombytes(scene.tobytes(), (600, 600), "RGB"), (0, 0))
            self._sprite = pygame.image.load(SCENES / "car.png")
            self._draw = self._draw_textured_car
        elif env_id == "CartPole-v1":
            self._draw = self._draw_cart
        else:
            x = np.linspace(-1.2, 0.6, 100)
            points = list(zip((x + 1.2) * SCALE, hill(x) * SCALE))
            pygame.draw.aalines(self._native, (0, 0, 0), False, points)
            self._draw = self._draw_plain_car
        self._background = self._canvas.copy()

    def render(self, states: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
        """Draw as `MujocoRenderer.render` does; states [B, S] are CartPole's (x, velocity, angle,
        angular velocity) or MountainCar's (x, velocity)."""
        states = np.asarray(states, np.float64)
        if states.ndim != 2 or states.shape[1] != self._state_size:
            raise ValueError(f"states must be [B, {self._state_size}], not {states.shape}")
        out = np.empty((len(states), *self.frame_shape), np.uint8) if out is None else out
        transform, drawn = self._pygame.transform, self._native
        for state, frame in zip(states, out, strict=True):
            self._canvas.blit(self._background, (0, 0))
            self._draw(state)
            if self._size is not None:
                drawn = transform.smoothscale(self._canvas, (self._size, self._size))
            pixels = self._pygame.image.tobytes(drawn, "RGB", self._flip)
            frame[:] = np.frombuffer(pixels, np.uint8).reshape(self.frame_shape)
        return out

    def close(self) -> None:
        """Do nothing: there is only memory to free."""

    def _turned(self, points, angle, x, y):
        """Turn points by `angle` (rad) about the origin, and then move them to (x, y)."""
        turned = [self._pygame.math.Vector2(point).rotate_rad(angle) for point in points]
        return [(point[0] + x, point[1] + y) for point in turned]

    def _polygon(self, points, color):
        self._pygame.gfxdraw.aapolygon(self._native, points, color)
        self._pygame.gfxdraw.filled_polygon(self._native, points, color)

    def _circle(self, x, y, radius, color):
        self._pygame.gfxdraw.aacircle(self._native, int(x), int(y), radius, color)
        self._pygame.gfxdraw.filled_circle(self._native, int(x), int(y), radius, color)

    def _draw_cart(self, state):
        x, angle = state[0] * 600 / 4.8 + 300, state[2]
        pole = (-5, -5), (-5, 120), (5, 120), (5, -5)
        self._polygon([(x - 25, 85), (x - 25, 115), (x + 25, 115), (x + 25, 85)], (0, 0, 0))
        self._polygon(self._turned(pole, -angle, x, 107.5), (202, 152, 101))
        self._circle(x, 107.5, 5, (129, 132, 203))
        # the track runs in front of the cart
        self._pygame.gfxdraw.hline(self._native, 0, 600, 100, (0, 0, 0))

    def _draw_plain_car(self, state):
        x, y = (state[0] + 1.2) * SCALE, 10 + hill(state[0]) * SCALE
        angle = math.cos(3 * state[0])
        body = (-20, 0), (-20, 20), (20, 20), (20, 0)
        self._polygon(self._turned(body, angle, x, y), (0, 0, 0))
        for wheel in self._turned(((10, 0), (-10, 0)), angle, x, y):
            self._circle(*wheel, 8, (128, 128, 128))
        # the flag stands in front of the car
        x, y = int((self._goal + 1.2) * SCALE), int(hill(self._goal) * SCALE)
        self._pygame.gfxdraw.vline(self._native, x, y, y + 50, (0, 0, 0))
        self._polygon([(x, y + 50), (x, y + 40), (x + 25, y + 45)], (204, 204, 0))

    def _draw_textured_car(self, state):
        slope = math.atan(1.35 * math.cos(3 * state[0]))  # of hill()
        zoom, angle = 1 / CAR_SUPERSAMPLING, math.degrees(slope)
        sprite = self._pygame.transform.rotozoom(self._sprite, angle, zoom)
        # the sprite's centre is CAR_HEIGHT / 2 above the ground, at right angles to the slope
        x = (state[0] + 1.2) * SCALE - math.sin(slope) * CAR_HEIGHT / 2
        y = 400 - hill(state[0]) * SCALE - math.cos(slope) * CAR_HEIGHT / 2
        self._native.blit(sprite, sprite.get_rect(center=(round(x), round(y))))
