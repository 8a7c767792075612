"""Does a task have to draw itself, by its own render(), or can it be drawn from its states?"""

import contextlib
import copy
from typing import Any

import numpy as np

import egl_render


def moved_in_data(model: Any, data: Any) -> str:
    """Return which parts in `data` are not at their place in their body: "geoms", "sites" or ""."""
    for kind in "geom", "site":
        body, place_in_it = getattr(model, f"{kind}_bodyid"), getattr(model, f"{kind}_pos")
        axes = data.xmat[body].reshape(-1, 3, 3)
        places = data.xpos[body] + np.einsum("nij,nj->ni", axes, place_in_it)
        if not np.allclose(places, getattr(data, f"{kind}_xpos"), atol=1e-6):
            return f"{kind}s"
    return ""


def why_own_render(make: Any) -> str:
    """Return why a task has to be drawn by its own render(), or "" if pictures can be drawn from
    its states, that is, if nothing else differs between two pictures.

    This is tested after a reset, after one step and after fifty steps: the model must look like a
    new environment's, and the environment's own render() must give the picture of the state, pixel
    for pixel (only where there is OpenGL). Gymnasium's own MuJoCo tasks are not tested here.

    Args:
        make: called with no argument or with render_mode="rgb_array"; makes an environment.
    """
    import mujoco
    from gymnasium.envs.mujoco import MujocoEnv

    env = make()
    task, spec = env.unwrapped, env.spec
    if not isinstance(task, MujocoEnv):
        return "it is not a MujocoEnv of Gymnasium"
    as_it_is = not spec.additional_wrappers and {*spec.kwargs} <= {"render_mode"}
    if egl_render.is_gymnasiums(spec) and as_it_is:
        return ""
    renderer = getattr(task, "mujoco_renderer", None)
    if not renderer:
        return "it does not draw with Gymnasium's MujocoRenderer"
    size = renderer.height, renderer.width
    if size[0] != size[1]:
        return "its pictures are not square"
    new = copy.copy(task.model)
    with contextlib.suppress(Exception):  # no OpenGL, or a task that cannot draw itself
        egl_render.gl_renderer()
        if "rgb_array" in env.metadata["render_modes"]:
            env.close()
            env = make(render_mode="rgb_array")
    task, seen = env.unwrapped, []
    env.action_space.seed(0)
    for seed, steps in enumerate((0, 1, 50)):
        env.reset(seed=seed)
        for _ in range(steps):
            env.step(env.action_space.sample())
        model, data = task.model, task.data
        if changed := egl_render.looks_that_differ(model, new):
            return f"its model changes ({changed})"
        if moved := moved_in_data(model, data):
            return f"it moves {moved} in its data"
        mujoco.mj_forward(model, data)  # a step leaves the places from before the step
        if env.render_mode:
            env.render()  # the centre of MuJoCo's endless planes depends on the last picture
            picture, viewer = env.render(), task.mujoco_renderer.viewer
            if viewer is None:
                return "it does not draw with Gymnasium's MujocoRenderer"
            if picture.shape != (*size, 3):
                return "its render() returns a picture of another size"
            seen.append((egl_render.state_of(data), picture, copy.copy(viewer.cam)))
            limit = viewer.scn.maxgeom
    env.close()
    if not seen:
        return ""
    own = egl_render.env_camera(env)
    angles = own.distance, own.azimuth, own.elevation
    first_lookat = seen[0][-1].lookat
    for *_, camera in seen:
        if camera.type == mujoco.mjtCamera.mjCAMERA_FIXED:
            as_configured = camera.fixedcamid == own.fixed_id
        else:
            shown = camera.distance, camera.azimuth, camera.elevation
            as_configured = own.fixed_id < 0 and shown == angles
        if not as_configured:
            return "its render() sets the camera"
        if (camera.lookat != first_lookat).any():
            return "its render() moves the camera"
    data = mujoco.MjData(model)
    with mujoco.Renderer(model, *size, max_geom=limit) as renderer:
        for state, picture, camera in seen:
            parts = egl_render.parts_of(state[None], model)
            egl_render.place(model, data, [part[0] for part in parts])
            for _ in range(2):  # as above
                renderer.update_scene(data, camera)
            if not np.array_equal(renderer.render(), picture):
                return "its render() shows more than its state"
    return ""
