"""What tiny_clip learns about CartPole and MountainCar: captions, how true each is of a state, and
pictures. This is the counterpart of poses.py and of data.py's humanoid half.

    states = sample_states("cartpole", np.random.default_rng(0), 600)       # [600, 4] float64
    truth = truth_of("cartpole", states)                                    # dict of [600]
    frames = draw("cartpole", states, 96, np.random.default_rng(0))         # [600, 96, 96, 3] uint8
"""

import tomllib
from pathlib import Path

import numpy as np

from environments import classic
from scenes import paint

WORDS = tomllib.loads(Path(__file__).with_name("captions.toml").read_text())
CAPTIONS = WORDS["classic"]

# Scene -> environment and whether it is the landscape
SCENES = {
    "cartpole": ("CartPole-v1", False),
    "mountain": ("MountainCar-v0", True),
    "mountain_varied": ("MountainCar-v0", True),
    "mountain_plain": ("MountainCar-v0", False),
    "mountain_continuous": ("MountainCarContinuous-v0", True),
    "mountain_continuous_plain": ("MountainCarContinuous-v0", False),
}


def sample_states(scene, rng, count):
    """Sample states [count, 4 or 2] float64 at rest, everywhere, but more of them near the goal."""
    near = rng.random(count) < 0.4
    if scene == "cartpole":
        x = np.clip(rng.uniform(-2.6, 2.6, count), -2.4, 2.4)  # some at the ends of the track
        angle = np.where(near, rng.normal(0, 0.25, count), rng.uniform(-np.pi, np.pi, count))
        return np.stack([x, 0 * x, angle, 0 * x], 1)
    x = np.where(near, rng.uniform(0.2, 0.6, count), rng.uniform(-1.2, 0.6, count))
    return np.stack([x, 0 * x], 1)


def _bump(x, center, width):
    return np.exp(-(((x - center) / width) ** 2))


def truth_of(scene, states):
    """Return how true each concept of CAPTIONS is of states of a scene: dict of [B] in [0, 1].

    The truth is smooth, with one maximum at the goal and a slope that reaches far, as for the
    humanoid: an agent needs to be told which of two bad states is nearer.
    """
    states = np.asarray(states, np.float64)
    zero = np.zeros(len(states))
    truth = dict.fromkeys(CAPTIONS, zero)
    if scene == "cartpole":
        angle = np.abs((states[:, 2] + np.pi) % (2 * np.pi) - np.pi)
        return truth | {
            "cart": zero + 1,
            "upright": 0.6 * _bump(angle, 0, 0.25) + 0.4 * (0.5 + 0.5 * np.cos(angle)),
            "tilted": np.clip((angle - 0.1) / 0.3, 0, 1) * np.clip((1.6 - angle) / 0.6, 0, 1),
            "horizontal": _bump(angle, np.pi / 2, 0.4),
            "hanging": _bump(angle, np.pi, 0.6),
        }
    x, goal = states[:, 0], classic.MOUNTAIN_GOALS[SCENES[scene][0]]
    height = np.clip((classic.hill(x) - 0.1) / 0.9, 0, 1)
    return truth | {
        "mountain": zero + 1,
        "peak": 0.8 * _bump(x, goal, 0.22) + 0.2 * height,
        "climbing": np.clip((x + 0.35) / 0.25, 0, 1) * np.clip((goal - 0.05 - x) / 0.25, 0, 1),
        "valley": _bump(x, -0.52, 0.3),
        "far_slope": np.clip((-0.6 - x) / 0.3, 0, 1),
    }


def draw(scene, states, size, rng):
    """Draw frames [B, size, size, 3] uint8; "mountain_varied" draws another landscape from rng."""
    env_id, textured = SCENES[scene]
    landscape = paint.mountain_scene(rng) if scene == "mountain_varied" else None
    return classic.ClassicRenderer(env_id, size, textured, landscape).render(states)
