"""Draws docs/scene.png and docs/mountain.png: a task's own look beside the realistic one.

python docs/scene.py
"""

import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import egl_render  # noqa: E402

egl_render.setup_gl("cpu")

import gymnasium as gym  # noqa: E402
from PIL import Image  # noqa: E402

from tiny_clip import poses  # noqa: E402

SIZE = 320


def mountain():
    """The car at three places, [400, 600] each, the landscape above and Gymnasium's look below."""
    states = np.array([[-0.5, 0.0], [0.2, 0.0], [0.5, 0.0]])
    rows = [
        egl_render.ClassicRenderer("MountainCar-v0", None, textured).render(states)
        for textured in (True, False)
    ]
    picture = np.concatenate([np.concatenate(list(row), axis=1) for row in rows])
    return picture.reshape(400, 2, 900, 2, 3).mean((1, 3)).astype(np.uint8)


def main():
    rng = np.random.default_rng(2)
    env = gym.make("Humanoid-v5").unwrapped
    env.reset(seed=0)
    names = ("standing", "kneeling", "lotus", "splits", "arms_raised")
    qpos = np.concatenate([env.init_qpos[None], *(poses.sample(name, rng) for name in names[1:])])
    for q in qpos[1:]:  # face the camera, nearly, as episodes begin
        poses.turn_to(q, 0.4)[:2] = 0
    states = np.concatenate([qpos, np.zeros((len(qpos), env.model.nv))], 1)
    plain = egl_render.MujocoRenderer(env.model, SIZE, egl_render.env_camera(env))
    rows = [plain.render(states)]
    model = egl_render.textured_model(env.fullpath)
    rows.append(egl_render.MujocoRenderer(model, SIZE, egl_render.PAPER_CAMERA).render(states))
    picture = np.concatenate([np.concatenate(list(row), axis=1) for row in rows])
    Image.fromarray(picture).quantize(256).save(ROOT / "docs" / "scene.png", optimize=True)
    # 256 colours would be too few for the car's red
    Image.fromarray(mountain()).save(ROOT / "docs" / "mountain.png", optimize=True)


if __name__ == "__main__":
    main()
