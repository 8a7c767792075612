"""Draws docs/scene.png: the task's own look beside the realistic one, as CLIP sees them.

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


if __name__ == "__main__":
    main()
