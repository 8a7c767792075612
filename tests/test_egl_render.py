"""Pictures and physics against Gymnasium's own, files that can be read back."""

import dataclasses
import math
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest

import egl_render
from egl_render import (
    PAPER_CAMERA,
    MujocoRenderer,
    RenderArgs,
    choose_camera,
    env_camera,
    textured_model,
)

egl_render.setup_gl("cpu")
egl_render.quiet_mujoco()
SIZE = 240
ROOT = Path(egl_render.__file__).resolve().parent


def rollout(env_id, steps, **kwargs):
    """States [steps, S] of a seeded random rollout and the environment itself."""
    env = gym.make(env_id, max_episode_steps=-1, **kwargs)
    env.reset(seed=3)
    env.action_space.seed(3)
    states = []
    for _ in range(steps):
        env.step(env.action_space.sample())
        states.append(np.concatenate([env.unwrapped.data.qpos, env.unwrapped.data.qvel]))
    return env, np.stack(states)


def draw(env, states, size=64, textured=False, camera=None):
    """Frames [B, size, size, 3] int, so that they can be subtracted."""
    model = env.unwrapped.model
    if textured:
        model = textured_model(env.unwrapped.fullpath)
    renderer = MujocoRenderer(model, size, camera or choose_camera(RenderArgs(), env))
    frames = renderer.render(states).astype(int)
    renderer.close()
    return frames


# ------------------------------------------------------------------------------ GL


def run_python(script, expect=0, **variables):
    """Run a script in a new process that knows of no GL backend; returns (stdout, stderr)."""
    variables = {"PYTHONPATH": str(ROOT)} | variables
    ours = ("MUJOCO_GL", "MUJOCO_EGL_DEVICE_ID", "PYOPENGL_PLATFORM")
    inherited = {name: value for name, value in os.environ.items() if name not in ours}
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        env=inherited | variables,
        capture_output=True,
        text=True,
    )
    assert run.returncode == expect, run.stderr
    return run.stdout.strip(), run.stderr.strip()


SETUP = """
    import os, egl_render
    egl_render.setup_gl({device!r})
    shown = [os.environ.get(n) for n in ("MUJOCO_GL", "MUJOCO_EGL_DEVICE_ID")]
    print(*shown, egl_render.gl_renderer(), sep="|")
"""


def test_the_context_says_what_draws_on_a_cpu():
    out, err = run_python(SETUP.format(device="cpu"))
    backend, device, name = out.split("|")
    assert backend in ("egl", "osmesa") and device == "None" and not err
    assert egl_render.is_software(name) == ("llvmpipe" in name)
    assert not egl_render.is_software("NVIDIA H200/PCIe/SSE2")
    # what somebody has set stays
    out, err = run_python(SETUP.format(device="cpu"), MUJOCO_EGL_DEVICE_ID="0")
    assert out.split("|")[1] == "0" and not err


def test_without_a_gpu_that_draws_auto_is_warp_and_egl_can_be_asked_for():
    """The first GPU is found at Mesa's place. An inherited id is another GPU's."""
    script = (
        SETUP
        + """
    import gymnasium
    model = gymnasium.make("Humanoid-v5").unwrapped.model
    for choice in "auto", "egl", "warp":
        print(egl_render.draws_by_warp(egl_render.RenderArgs(renderer=choice), model))
    print(egl_render.MujocoRenderer(model, 32).description)
    """
    )
    out, err = run_python(script.format(device="cuda:0"), MUJOCO_EGL_DEVICE_ID="3")
    first, *chosen, described = out.splitlines()
    _, number, name = first.split("|")
    if not egl_render.is_software(name):
        pytest.skip("there is a GPU that draws")
    assert not err and chosen == ["True", "False", "True"]
    assert (number, described) == ("0", name)


def test_a_gpu_that_egl_does_not_know_is_drawn_on_by_warp():
    script = """
        import egl_render
        egl_render.setup_gl("cuda:7")
        for choice in "auto", "warp":
            assert egl_render.draws_by_warp(egl_render.RenderArgs(renderer=choice), None)
        egl_render.gl_renderer()
    """
    _, err = run_python(script, expect=1)
    assert "UsageError: there is no OpenGL to draw with (RuntimeError: " in err and "[warp]" in err


def test_a_cuda_worker_whose_opengl_is_set_but_missing_draws_by_warp():
    """As in images that set MUJOCO_GL and have libEGL without a libGL."""
    script = """
        import ctypes
        load = ctypes.CDLL.__init__
        def missing(self, name, *rest, **more):
            if any(part in str(name) for part in ("libGL.", "libEGL", "libOpenGL", "OSMesa")):
                raise OSError(f"{name} is missing")
            load(self, name, *rest, **more)
        ctypes.CDLL.__init__ = missing
        import egl_render
        import sac_clip_humanoid as sac
        renderer = sac.tasks.make_renderer(sac.Args(env_id="InvertedPendulum-v5"), "cpu", 16)
        print(renderer.look, egl_render.draws_by_warp(egl_render.RenderArgs(renderer="egl"), None))
        egl_render.gl_renderer()
    """
    out, err = run_python(script, 1, MUJOCO_GL="egl")
    assert out == "warp False"
    assert err.startswith("no OpenGL: mujoco cannot be imported (") and "MUJOCO_GL is egl" in err
    assert "UsageError: there is no OpenGL to draw with" in err.splitlines()[-1]


def test_what_draws_decides_what_auto_means(monkeypatch):
    model = gym.make("Humanoid-v5").unwrapped.model
    quality = model.vis.quality.shadowsize, model.vis.quality.offsamples
    name = "NVIDIA H200/PCIe"
    monkeypatch.setattr(egl_render, "gl_renderer", lambda: name)
    assert not egl_render.draws_by_warp(RenderArgs(), model)
    renderer = MujocoRenderer(model, 16)
    assert renderer.look == "egl" and renderer.description == name
    assert (model.vis.quality.shadowsize, model.vis.quality.offsamples) == quality
    renderer.close()
    monkeypatch.setattr(egl_render, "gl_renderer", lambda: "llvmpipe (LLVM 15.0.6, 256 bits)")
    assert egl_render.draws_by_warp(RenderArgs(), model)
    assert not egl_render.draws_by_warp(RenderArgs(renderer="egl"), model)


def test_a_gl_backend_that_does_not_exist_is_one_line(tmp_path):
    words = ["--target-prompt", "words", "--clip-model", "local-dir:tiny_clip"]
    process = subprocess.run(
        [sys.executable, ROOT / "sac_clip_humanoid.py", *words, "--reward-devices", "cpu"],
        env=os.environ | {"MUJOCO_GL": "nonsense"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert process.returncode == 2, process.stderr
    (line,) = process.stderr.splitlines()
    assert line.startswith("error: ") and "nonsense" in line and not [*tmp_path.iterdir()]


def test_mujoco_numbers_its_devices_as_cuda_does():
    """Asks MuJoCo's own selection, with words in place of EGL's handles."""
    from mujoco.egl import _ordered_egl_devices, _select_egl_device

    handles, numbers = ["mesa", "second", "first"], {0: "first", 1: "second"}
    for visible, expected in ((None, ["first", "second"]), ([1, 0], ["second", "first"])):
        ordered = _ordered_egl_devices(handles, numbers, visible)
        picked = [_select_egl_device(ordered, numbers, visible, i) for i in range(2)]
        assert picked == expected and ordered[2] == "mesa"


def test_no_gl_library_is_one_line_that_says_what_to_type():
    out, _ = run_python("""
        import ctypes, ctypes.util
        import egl_render

        def load(self, name, *args, load=ctypes.CDLL.__init__):
            if any(part in str(name) for part in ("EGL", "OSMesa", "libGL")):
                raise OSError("cannot open shared object file")
            load(self, name, *args)

        ctypes.CDLL.__init__ = load
        ctypes.util.find_library = lambda name: None
        egl_render.setup_gl("cuda:0")
        import gymnasium, mujoco
        env = gymnasium.make("Humanoid-v5").unwrapped  # physics need no GL
        try:
            egl_render.MujocoRenderer(env.model, 32)
        except egl_render.UsageError as error:
            print(error)
    """)
    assert out.startswith("there is no OpenGL") and "\n" not in out
    assert "; type: apt-get update && apt-get install -y libegl1" in out
    assert 'without OpenGL: pip install ".[warp]"' in out


def test_triton_can_be_imported_after_mesa():
    out, _ = run_python("""
        import contextlib
        import egl_render
        egl_render.setup_gl("cpu")
        import gymnasium, numpy as np
        model = gymnasium.make("Humanoid-v5").unwrapped.model
        renderer = egl_render.MujocoRenderer(model, 32)
        with contextlib.suppress(ImportError):
            import triton._C.libtriton  # all that torchvision's import needs to crash
        print(renderer.render(np.zeros((1, 47))).shape)
    """)
    assert out == "(1, 32, 32, 3)"


@pytest.mark.slow
def test_gymnasiums_files_and_pygame_are_quiet_and_an_unstable_simulation_is_not(tmp_path):
    script = """
        import os, egl_render, environments.classic
        os.chdir({folder!r})
        egl_render.setup_gl("cpu")
        egl_render.quiet_mujoco()
        import gymnasium, mujoco
        env = gymnasium.make("HalfCheetah-v5").unwrapped  # its file has a deprecated attribute
        egl_render.textured_model(env.fullpath)
        classic = gymnasium.make("CartPole-v1", render_mode="rgb_array")
        classic.reset()
        classic.render()
        env.data.qvel[:] = {velocity}
        mujoco.mj_step(env.model, env.data)
    """
    calm = run_python(script.format(folder=str(tmp_path), velocity=0), XDG_RUNTIME_DIR="")
    assert calm == ("", "") and not list(tmp_path.iterdir())
    _, err = run_python(script.format(folder=str(tmp_path), velocity=1e30), XDG_RUNTIME_DIR="")
    assert err.startswith("MuJoCo: Nan, Inf or huge value") and not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_window_that_pygame_closes_leaves_mujoco_its_egl():
    out, _ = run_python("""
        import egl_render, environments.classic
        egl_render.setup_gl("cpu")
        import gymnasium, numpy as np, pygame
        model = gymnasium.make("Humanoid-v5").unwrapped.model
        egl_render.MujocoRenderer(model, 32).close()
        pygame.display.init()
        pygame.display.set_mode((32, 32))
        pygame.display.quit()
        print(egl_render.MujocoRenderer(model, 32).render(np.zeros((1, 47))).shape)
    """)
    assert out == "(1, 32, 32, 3)"


def test_classic_renderer_needs_neither_display_nor_mujoco_and_can_be_terminated():
    out, _ = run_python(
        """
        import os, signal, sys, time, numpy as np
        from environments.classic import ClassicRenderer
        ClassicRenderer("CartPole-v1", 64).render(np.zeros((1, 4)))
        print([name for name in ("mujoco", "OpenGL") if name in sys.modules], flush=True)
        os.kill(os.getpid(), signal.SIGTERM)  # which SDL's event loop would swallow
        time.sleep(5)
    """,
        expect=-signal.SIGTERM,
    )
    assert out == "[]"


# ------------------------------------------------------------------------------ pictures


@pytest.mark.parametrize("env_id", ["Humanoid-v5", "Ant-v5", "Walker2d-v5"])
def test_a_state_looks_as_env_render_shows_it(env_id, renderer):
    import mujoco

    env = gym.make(env_id, render_mode="rgb_array", width=SIZE, height=SIZE)
    env.reset(seed=0)
    other, states = rollout(env_id, 40)
    states = states[[10, 39]]
    data, shown = env.unwrapped.data, []
    # Gymnasium looks at the median geom of what it shows first; ours is of the initial position
    env.unwrapped.set_state(env.unwrapped.init_qpos, env.unwrapped.init_qvel)
    env.render()
    for state in states:
        env.unwrapped.set_state(state[: data.qpos.size], state[data.qpos.size :])
        mujoco.mj_forward(env.unwrapped.model, data)
        shown.append(env.render())
    drawn = draw(other, states, SIZE, camera=env_camera(other))
    if renderer == "egl":
        np.testing.assert_array_equal(drawn, np.stack(shown))
    else:  # other edges, no reflections in the floor
        assert np.abs(drawn - np.stack(shown)).mean() < 20
    assert drawn.std(axis=0).max() > 0, "the body moved"
    env.close()


def body_mask(env, states, camera, size=SIZE):
    """[B, H, W] bool: pixels that show the robot, from MuJoCo's segmentation."""
    import mujoco

    model = env.unwrapped.model
    renderer = mujoco.Renderer(model, size, size)
    renderer.enable_segmentation_rendering()
    data, view = mujoco.MjData(model), mujoco.MjvCamera()
    view.distance, view.azimuth, view.elevation = camera.distance, camera.azimuth, camera.elevation
    view.lookat[:] = camera.lookat
    masks = []
    for state in states:
        data.qpos[:] = state[: model.nq]
        mujoco.mj_forward(model, data)
        if camera.track_body >= 0:
            view.lookat[:2] = data.body(camera.track_body).xpos[:2]
        renderer.update_scene(data, view)
        ids, kinds = np.moveaxis(renderer.render(), -1, 0)
        masks.append((kinds == mujoco.mjtObj.mjOBJ_GEOM) & (model.geom_bodyid[ids] > 0))
    renderer.close()
    return np.stack(masks)


@pytest.mark.parametrize("env_id", ["Humanoid-v5", "Ant-v5", "HalfCheetah-v5", "Swimmer-v5"])
def test_a_moving_robot_stays_in_the_picture(env_id, renderer):
    env, states = rollout(env_id, 40)
    env.close()
    states = states[::4]
    states[:, 0] += np.linspace(0, 30, len(states))  # even if it ran away
    camera = choose_camera(RenderArgs(), env)
    masks = body_mask(env, states, camera)
    assert (masks.sum((1, 2)) > 0.003 * SIZE**2).all()
    border = masks[:, [0, -1], :].any((1, 2)) | masks[:, :, [0, -1]].any((1, 2))
    assert not border.any()
    static = dataclasses.replace(camera, track_body=-1)
    assert not body_mask(env, states[-1:], static).any()
    # and that is where MujocoRenderer looks: the robot's pixels differ from an empty scene's
    gone = states.copy()
    if env_id == "Humanoid-v5":
        gone[:, 2] -= 50  # below the floor
        change = np.abs(draw(env, states, SIZE) - draw(env, gone, SIZE)).sum(-1) > 30
        assert ((change & masks).sum((1, 2)) > 0.8 * masks.sum((1, 2))).all()


@pytest.mark.parametrize("env_id", ["Reacher-v5", "Pusher-v5", "InvertedPendulum-v5"])
def test_a_task_that_stays_in_its_place_is_not_tracked(env_id):
    env = gym.make(env_id)
    assert choose_camera(RenderArgs(), env) == env_camera(env)


def test_single_values_override_a_camera_and_every_one_of_them_matters(renderer):
    env, states = rollout("Humanoid-v5", 3)
    assert choose_camera(RenderArgs(), env) == PAPER_CAMERA
    values = dict(distance=5.0, azimuth=(90.0,), elevation=-40.0, lookat=(0, 0, 0.2))
    variants = [{}, *({f"camera_{name}": value} for name, value in values.items())]
    cameras = [choose_camera(RenderArgs(**variant), env) for variant in variants]
    pictures = [draw(env, states + 1, camera=camera) for camera in cameras]
    for i, first in enumerate(pictures):
        assert all((first != second).any() for second in pictures[i + 1 :])


def test_flags_change_a_camera_of_ones_own():
    env, own = gym.make("Swimmer-v5"), egl_render.Camera(4.0, 90.0, -90.0, track_body=1)
    assert choose_camera(RenderArgs(), env, own) == own
    far = choose_camera(RenderArgs(camera_distance=9.0), env, own)
    assert far == dataclasses.replace(own, distance=9.0)


def test_several_cameras_draw_what_each_of_them_draws_alone(renderer):
    env, states = rollout("Humanoid-v5", 3)
    cameras = choose_camera(RenderArgs(camera_azimuth=(150.0, 210.0, 90.0)), env)
    assert [camera.azimuth for camera in cameras] == [150, 210, 90]
    pictures = draw(env, states, camera=cameras)
    assert pictures.shape[:2] == (3, 3)
    for view, camera in enumerate(cameras):
        np.testing.assert_array_equal(pictures[:, view], draw(env, states, camera=camera))
    assert RenderArgs(camera_azimuth=(1.0, 2.0)).views == 2 and RenderArgs().views == 1


@pytest.mark.parametrize(
    "name, value",
    [
        ("render_size", 0),
        ("renderer", "best"),
        ("camera_distance", -1.0),
        ("camera_elevation", math.nan),
        ("camera_azimuth", (0.0, 361.0)),
        ("camera_lookat", (0.0, 0.0, math.inf)),
    ],
)
def test_flags_that_cannot_be_drawn_with_are_named(name, value):
    with pytest.raises(ValueError, match=name):
        RenderArgs(**{name: value})


def test_render_fills_the_callers_buffer_and_checks_shapes(renderer):
    env, states = rollout("Humanoid-v5", 3)
    drawing = MujocoRenderer(env.unwrapped.model, 64)
    out = np.zeros((3, 64, 64, 3), np.uint8)
    assert drawing.render(states, out) is out and out.any()
    np.testing.assert_array_equal(drawing.render(states), out)
    with pytest.raises(ValueError, match="47"):
        drawing.render(states[:, :10])
    np.testing.assert_array_equal(draw(rollout("Humanoid-v5", 1)[0], states), out)
    drawing.close()


# ------------------------------------------------------------------------------ videos


def moving_square(count=12, size=64):
    frames = np.zeros((count, size, size, 3), np.uint8)
    for t, frame in enumerate(frames):
        frame[16:48, 2 * t : 2 * t + 32] = (250, 40, 40)
    return frames


def test_videos_can_be_read_back(tmp_path):
    import imageio.v2 as imageio

    frames = moving_square()
    path = tmp_path / "deep" / "video.mp4"
    egl_render.write_video(path, frames, fps=10)
    read = np.stack(imageio.mimread(path))
    assert read.shape == frames.shape
    assert np.abs(read.astype(int) - frames).mean() < 12
    assert [p.name for p in path.parent.iterdir()] == ["video.mp4"]
    egl_render.write_video(path, frames[:, :63, :61], fps=10)
    assert np.stack(imageio.mimread(path)).shape[1:3] == (62, 60)


def test_tensorboard_really_gets_the_video(tmp_path):
    import io

    from PIL import Image
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    frames = moving_square()
    with SummaryWriter(str(tmp_path)) as writer:
        egl_render.add_video(writer, "videos/rollout", frames, step=7, fps=10)
    events = EventAccumulator(str(tmp_path), size_guidance={"images": 0}).Reload()
    (event,) = events.Images("videos/rollout")
    assert event.step == 7 and event.width == 64
    picture = Image.open(io.BytesIO(event.encoded_image_string))
    assert picture.n_frames == len(frames) and picture.info["duration"] == 100
    picture.seek(5)
    assert np.abs(np.asarray(picture.convert("RGB")).astype(int) - frames[5]).mean() < 20
