"""MuJoCo Warp's pictures: the same in any chunks, close to OpenGL's, drawn where there is none."""

import dataclasses
import functools
import sys

import numpy as np
import pytest
import torch

import egl_render

egl_render.setup_gl("cpu")  # before mujoco is imported

# isort: split
import clip_reward
import sac_clip_humanoid as sac
import warp_render
from clip_reward import UsageError
from egl_render import PAPER_CAMERA, MujocoRenderer, textured_model
from environments import judges
from evaluation import metrics
from tiny_clip import poses
from training.workers import Pool
from warp_render import WarpRenderer

egl_render.quiet_mujoco()


@functools.cache
def library():
    """States [315, 47] of the pose library and their names [315]."""
    rng = np.random.default_rng(0)
    names = np.repeat(poses.POSE_NAMES, 21)
    qpos = np.concatenate([poses.sample(name, rng, 21) for name in poses.POSE_NAMES])
    return np.pad(qpos, ((0, 0), (0, 23))), names


def draw(states, kind=WarpRenderer, size=64, camera=PAPER_CAMERA):
    return kind(textured_model(poses.HUMANOID_XML), size, camera).render(states)


def test_pictures_are_the_same_in_any_chunks_and_order():
    states, _ = library()
    cameras = [dataclasses.replace(PAPER_CAMERA, azimuth=azimuth) for azimuth in (120, 240)]
    renderer = WarpRenderer(textured_model(poses.HUMANOID_XML), 32, cameras)
    assert renderer.frame_shape == (2, 32, 32, 3)
    whole = renderer.draw(states[:100])
    parts = [renderer.draw(states[a:b]) for a, b in ((0, 1), (1, 70), (70, 100))]
    assert torch.equal(whole, torch.cat(parts))
    assert torch.equal(whole.flip(0), renderer.draw(states[99::-1]))
    assert not renderer.draw(states[:0]).numel()
    large = WarpRenderer(textured_model(poses.HUMANOID_XML), 2100)
    assert large.worlds == 1, "one picture at a time"
    assert large.render(states[:2]).shape == (2, 2100, 2100, 3)


def test_rewards_are_those_of_opengl_s_pictures_for_all_eight_prompts():
    states, names = (column[::3] for column in library())  # OpenGL takes 0.1 s a picture
    clip = clip_reward.load_clip("local-dir:tiny_clip")
    goals = [clip_reward.CLIPReward(clip, judges.TASKS[task].target_prompt) for task in poses.TASKS]

    def rewards(kind):
        embeddings = goals[0].embed_images(draw(states, kind))
        return [goal.reward(embeddings).numpy() for goal in goals]

    both = rewards(WarpRenderer), rewards(MujocoRenderer)
    for task, ours, theirs in zip(poses.TASKS, *both):
        assert metrics.epic_distance(ours, theirs) < 0.12, task
        truth = names == task
        assert metrics.auc(ours, truth) > metrics.auc(theirs, truth) - 0.01, task


def test_a_far_floor_does_not_flicker(monkeypatch):
    """The camera moves a centimetre a frame: far away a pixel changes by less than half a level,
    and by several if nothing fades."""
    states = np.repeat(library()[0][:1], 30, 0)
    states[:, 0] += np.linspace(0, 0.3, 30)
    rows = slice(20, 30)  # below the horizon

    def flicker():
        return np.abs(np.diff(draw(states)[:, rows].astype(float), axis=0)).mean()

    assert flicker() < 0.5
    monkeypatch.setattr(warp_render, "NEAR", 1e6)
    monkeypatch.setattr(warp_render, "FAR", 2e6)
    assert flicker() > 3


@pytest.mark.parametrize("camera_name", ["track", "fixed", None])
def test_cameras_look_where_opengl_s_look(camera_name):
    """A model's own tracking and fixed camera with its own angle of view, and a free one."""
    import mujoco

    spec = mujoco.MjSpec.from_file(poses.HUMANOID_XML)
    axes = [0.8, 0.6, 0, 0, 0, 1]
    spec.worldbody.add_camera(name="fixed", pos=[2, -3, 1.5], xyaxes=axes, fovy=60)
    camera = egl_render.Camera(4.0, 30.0, -25.0, (0.1, 0.2, 0.9))
    if camera_name:
        model = spec.compile()
        fixed_id = mujoco.mj_name2id(model, mujoco.mjtObj.mjOBJ_CAMERA, camera_name)
        camera = dataclasses.replace(camera, fixed_id=fixed_id)
    states = library()[0][:4]

    def edges(kind, size=96):  # where colours change, without the floor, whose edges differ
        model = spec.compile()
        model.geom_rgba[0] = 0
        frames = kind(model, size, camera).render(states).astype(int)
        return np.abs(np.diff(frames, axis=2)).sum(-1) > 60

    theirs, ours = edges(MujocoRenderer), edges(WarpRenderer)
    assert ours.sum() > 200 and (theirs & ours).sum() > 0.6 * theirs.sum()
    moved = np.roll(ours, 3, 2)
    assert (theirs & moved).sum() < 0.5 * theirs.sum()


def test_auto_is_warp_unless_a_gpu_draws_by_opengl(monkeypatch):
    def look(**flags):
        args = sac.Args(env_id="InvertedPendulum-v5", render_size=32, **flags)  # has no camera
        renderer = sac.make_renderer(args)
        assert renderer.render(np.zeros((1, 4))).std() > 0
        return renderer.look

    software = egl_render.is_software(egl_render.gl_renderer())
    assert look() == ("warp" if software else "egl")
    assert look(renderer="warp") == "warp" and look(renderer="egl") == "egl"
    monkeypatch.setattr(egl_render, "gl_renderer", lambda: "NVIDIA H100/PCIe")
    assert look() == "egl"

    def no_gl():
        raise UsageError("no OpenGL to draw with")

    monkeypatch.setattr(egl_render, "gl_renderer", no_gl)
    assert look() == "warp"
    with pytest.raises(UsageError, match="no OpenGL"):
        look(renderer="egl")
    monkeypatch.setitem(sys.modules, "mujoco_warp", None)
    with pytest.raises(UsageError, match=r'needs MuJoCo Warp: pip install ".\[warp\]"'):
        look(renderer="warp")
    monkeypatch.setattr(egl_render.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match="no OpenGL"):
        look()


def test_what_warp_misses_is_one_line_and_stderr_stays(monkeypatch, tmp_path, capfd):
    """A driver older than Warp, no folder for its kernels, or one that may not be written."""
    import sys as system

    import warp

    def message(device="cpu"):
        with pytest.raises(UsageError) as error:
            WarpRenderer(textured_model(poses.HUMANOID_XML), 16, device=device)
        print("still there", file=system.__stderr__, flush=True)
        assert capfd.readouterr().err == "still there\n"
        assert "\n" not in str(error.value)
        return str(error.value)

    def old(version):
        return lambda: version

    monkeypatch.setattr(warp, "is_cuda_available", old(False))
    monkeypatch.setattr(warp, "get_cuda_toolkit_version", old((13, 0)))
    for driver, said in ((12, 4), "12.4"), (None, "none"):
        monkeypatch.setattr(warp, "get_cuda_driver_version", old(driver))
        line = f"needs CUDA 13.0, but the driver has {said}; update the driver, or draw with "
        assert line + "--renderer egl" in message("cuda:0")
    monkeypatch.setattr(warp_render.os, "access", lambda path, mode: False)
    assert "is read-only); set WARP_CACHE_PATH to a writable folder" in message()

    def init():
        raise PermissionError(13, "Permission denied", "/nowhere/.cache")

    monkeypatch.setattr(warp, "init", init)
    assert "Permission denied: '/nowhere/.cache'); set WARP_CACHE_PATH" in message()


@pytest.mark.slow
def test_workers_and_chunks_do_not_change_a_reward():
    args = sac.Args(
        target_prompt=("words",),
        clip_model="local-dir:tiny_clip",
        render_size=64,
        renderer="warp",
        camera_azimuth=(120.0, 240.0),
    )
    setup = (
        functools.partial(sac.make_renderer, args),
        functools.partial(clip_reward.make_clip_reward, args),
    )
    states, rewards = library()[0][:60], []
    for devices, chunk in ((["cpu"], 64), (["cpu", "cpu"], 16)):
        pool = Pool(*setup, devices, chunk)
        (line, *_) = pool.wait_ready()
        assert line == "reward worker on cpu: pictures by MuJoCo Warp on cpu"
        rewards.append(pool.score(states))
        video = pool.render(states[:2], size=128)
        pool.close()
    np.testing.assert_array_equal(*rewards)
    assert video.shape == (2, 128, 256, 3) and pool.look == "warp"
