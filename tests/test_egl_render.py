"""Pictures and physics against Gymnasium's own, files that can be read back."""

import dataclasses
import os
import subprocess
import sys
import textwrap

import gymnasium as gym
import helpers
import numpy as np
import pytest

import egl_render
from egl_render import PAPER_CAMERA, MujocoRenderer, env_camera, textured_model

egl_render.setup_gl("cpu")
SIZE = 240


def state_of(env):
    data = env.unwrapped.data
    return np.concatenate([data.qpos, data.qvel])


def rollout(env_id, steps, **kwargs):
    """States [steps, S] of a seeded random rollout and the environment itself."""
    env = gym.make(env_id, max_episode_steps=-1, **kwargs)
    env.reset(seed=3)
    env.action_space.seed(3)
    states = []
    for _ in range(steps):
        env.step(env.action_space.sample())
        states.append(state_of(env))
    return env, np.stack(states)


# ------------------------------------------------------------------------------ backend


def test_setup_chooses_software_egl_here_and_may_be_called_again():
    description = egl_render.setup_gl("cpu")
    assert os.environ["MUJOCO_GL"] in ("egl", "osmesa")
    assert egl_render.setup_gl("cpu") == description
    assert egl_render.is_software("EGL in software (Mesa)")
    assert not egl_render.is_software("EGL on the GPU (cuda:1)")


def fake_devices(monkeypatch, devices):
    """devices in EGL's order: (CUDA index or None, software)."""
    monkeypatch.setattr(egl_render, "_egl_devices", lambda: devices)


def test_cuda_and_egl_number_their_devices_differently(monkeypatch):
    # EGL lists Mesa first, then CUDA's device 1, then 0, then a GPU that is not CUDA's
    fake_devices(monkeypatch, [(None, True), (1, False), (0, False), (None, False)])
    environment, description = egl_render.choose_gl("cuda:1")
    assert environment["MUJOCO_EGL_DEVICE_ID"] == "1" and "cuda:1" in description
    assert egl_render.choose_gl("cuda:0")[0]["MUJOCO_EGL_DEVICE_ID"] == "0"
    environment, description = egl_render.choose_gl("cpu")
    assert egl_render.is_software(description)
    # MuJoCo's order is CUDA's devices by number, then the others as EGL has them
    assert environment["MUJOCO_EGL_DEVICE_ID"] == "2"


def test_the_same_numbers_mean_the_same_devices_to_mujoco():
    """Asks MuJoCo's own selection, with objects in place of EGL's handles."""
    from mujoco.egl import _ordered_egl_devices, _select_egl_device

    mesa, first, second = "mesa", "cuda 0", "cuda 1"
    handles, numbers = [mesa, second, first], {0: first, 1: second}
    ordered = _ordered_egl_devices(handles, numbers, None)
    picked = [_select_egl_device(ordered, numbers, None, i) for i in range(3)]
    assert picked == [first, second, mesa]


def test_a_gpu_that_draws_in_software_is_warned_about(monkeypatch):
    fake_devices(monkeypatch, [(None, True)])
    assert "WARNING" in egl_render.choose_gl("cuda:0")[1]
    assert "WARNING" not in egl_render.choose_gl("cpu")[1]
    fake_devices(monkeypatch, [(None, None), (0, False)])  # the first does not initialise
    assert egl_render.choose_gl("cpu") == (egl_render._egl(0), "EGL on the GPU")
    with pytest.raises(egl_render.GLError):
        fake_devices(monkeypatch, [(0, None)])
        monkeypatch.setattr(egl_render.ctypes.util, "find_library", lambda name: None)
        egl_render.choose_gl("cuda:0")


def test_no_gl_library_says_what_to_type(monkeypatch):
    fake_devices(monkeypatch, [])
    monkeypatch.setattr(egl_render.ctypes.util, "find_library", lambda name: None)
    with pytest.raises(egl_render.GLError, match="apt-get install -y libegl1"):
        egl_render.choose_gl()
    monkeypatch.setattr(egl_render.ctypes.util, "find_library", lambda name: f"lib{name}.so")
    assert egl_render.choose_gl("cpu")[0]["MUJOCO_GL"] == "osmesa"


def run_python(script):
    """Run a script in a new process that has not chosen a GL backend; returns what it printed."""
    inherited = helpers.importable_environment()
    kept = {k: v for k, v in inherited.items() if k not in ("MUJOCO_GL", "PYOPENGL_PLATFORM")}
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], env=kept, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_the_backend_may_be_chosen_after_mujoco_was_imported():
    printed = run_python("""
        import egl_render, helpers
        states = helpers.humanoid_states(2)  # imports mujoco
        egl_render.setup_gl("cpu")
        print(helpers.make_humanoid_renderer(32).render(states).std() > 10)
    """)
    assert printed.split() == ["True"]


def test_torchvision_can_be_imported_after_mesa():
    printed = run_python("""
        import egl_render, helpers
        egl_render.setup_gl("cpu")
        renderer = helpers.make_humanoid_renderer(32)
        import torchvision, open_clip
        print(renderer.render(helpers.humanoid_states(1)).shape)
    """)
    assert "(1, 32, 32, 3)" in printed


@pytest.mark.parametrize("wanted, started", [(None, 0), ("2", 2)])
def test_software_draws_in_the_calling_thread_unless_told_otherwise(monkeypatch, wanted, started):
    monkeypatch.delenv("LP_NUM_THREADS", raising=False)  # this process has set it
    if wanted:
        monkeypatch.setenv("LP_NUM_THREADS", wanted)
    printed = run_python("""
        import egl_render, helpers, pathlib
        if "EGL in software" in egl_render.setup_gl("cpu"):
            helpers.make_humanoid_renderer(32).render(helpers.humanoid_states(1))
            names = [p.read_text() for p in pathlib.Path("/proc/self/task").glob("*/comm")]
            print(sum("llvmpipe" in name for name in names))
    """)
    assert printed.split() in ([], [str(started)])


# ------------------------------------------------------------------------------ pictures


@pytest.mark.parametrize("env_id", ["Humanoid-v5", "Humanoid-v4", "Ant-v5", "Walker2d-v5"])
def test_a_state_looks_as_env_render_shows_it(env_id):
    import mujoco

    env = gym.make(env_id, render_mode="rgb_array", width=SIZE, height=SIZE)
    env.reset(seed=0)
    other, states = rollout(env_id, 40)
    renderer = MujocoRenderer(other.unwrapped.model, SIZE, env_camera(other))
    data, shown = env.unwrapped.data, []
    # Gymnasium looks at the median geom of what it shows first; ours is of the initial position
    env.unwrapped.set_state(env.unwrapped.init_qpos, env.unwrapped.init_qvel)
    env.render()
    for state in states[::10]:
        env.unwrapped.set_state(state[: data.qpos.size], state[data.qpos.size :])
        mujoco.mj_forward(env.unwrapped.model, data)
        shown.append(env.render())
    drawn = renderer.render(states[::10])
    np.testing.assert_array_equal(drawn, np.stack(shown))
    assert drawn.std(axis=0).max() > 0, "the body moved"
    renderer.close()
    env.close()


def body_mask(model, states, camera, size=SIZE):
    """[B, H, W] bool: pixels that show the robot, from MuJoCo's segmentation."""
    import mujoco

    renderer = mujoco.Renderer(model, size, size)
    renderer.enable_segmentation_rendering()
    data, view = mujoco.MjData(model), mujoco.MjvCamera()
    view.distance, view.azimuth, view.elevation = camera.distance, camera.azimuth, camera.elevation
    view.lookat[:] = camera.lookat
    floor = model.geom("floor").id
    masks = []
    for state in states:
        data.qpos[:] = state[: model.nq]
        mujoco.mj_forward(model, data)
        view.lookat[:2] = data.qpos[:2]  # the free joint is the torso's
        renderer.update_scene(data, view)
        ids, kinds = np.moveaxis(renderer.render(), -1, 0)
        masks.append((kinds == mujoco.mjtObj.mjOBJ_GEOM) & (ids != floor))
    renderer.close()
    return np.stack(masks)


def test_the_papers_camera_keeps_the_robot_in_frame():
    env, states = rollout("Humanoid-v5", 100, terminate_when_unhealthy=False)
    states[:, 0] += np.linspace(0, 30, 100)  # even if it ran away
    masks = body_mask(env.unwrapped.model, states, PAPER_CAMERA)
    assert (masks.sum((1, 2)) > 0.008 * SIZE**2).all()
    border = masks[:, [0, -1], :].any((1, 2)) | masks[:, :, [0, -1]].any((1, 2))
    assert not border.any()
    # and that is where MujocoRenderer looks: the robot's pixels differ from an empty scene's
    model = env.unwrapped.model
    drawn = MujocoRenderer(model, SIZE, PAPER_CAMERA).render(states[::25])
    gone = states[::25].copy()
    gone[:, 2] -= 50  # below the floor
    empty = MujocoRenderer(model, SIZE, PAPER_CAMERA).render(gone)
    changed = np.abs(drawn.astype(int) - empty).sum(-1) > 30
    for mask, change in zip(masks[::25], changed):
        assert (change & mask).sum() > 0.8 * mask.sum()


def test_single_values_override_a_camera_and_every_one_of_them_matters():
    env, states = rollout("Humanoid-v5", 3)
    pictures = []
    for change in (
        {},
        {"distance": 5.0},
        {"azimuth": 90.0},
        {"elevation": -40.0},
        {"lookat": (0.0, 0.0, 0.2)},
    ):
        camera = dataclasses.replace(PAPER_CAMERA, **change)
        pictures.append(MujocoRenderer(env.unwrapped.model, 64, camera, "light").render(states))
    for i, first in enumerate(pictures):
        assert all((first != second).any() for second in pictures[i + 1 :])


def test_render_fills_the_callers_buffer_and_checks_shapes():
    renderer = helpers.make_humanoid_renderer(64)
    states = helpers.humanoid_states(3)
    out = np.zeros((3, 64, 64, 3), np.uint8)
    assert renderer.render(states, out) is out and out.any()
    np.testing.assert_array_equal(renderer.render(states), out)
    with pytest.raises(ValueError, match="47"):
        renderer.render(states[:, :10])
    with pytest.raises(ValueError, match="quality"):
        MujocoRenderer(renderer.model, 64, quality="best")
    renderer.close()


@pytest.mark.parametrize("textured", [False, True])
def test_light_quality_draws_a_coarser_floor_that_looks_the_same(textured, monkeypatch):
    coarse = helpers.make_humanoid_renderer(64, textured=textured)
    monkeypatch.setattr(
        egl_render, "LIGHT", dataclasses.replace(egl_render.LIGHT, floor_cells=None)
    )
    fine = helpers.make_humanoid_renderer(64, textured=textured)
    np.testing.assert_array_equal(coarse.model.geom_size, fine.model.geom_size)
    states = helpers.humanoid_states(6)
    states[:, :2] += np.linspace(-9, 9, 6)[:, None]
    difference = np.abs(coarse.render(states).astype(int) - fine.render(states))
    if textured:  # MuJoCo's haze at the horizon comes with infinite planes only
        horizon = difference.mean((0, 2, 3)).argmax()
        assert 16 < horizon < 28
        difference = np.delete(difference, [horizon - 1, horizon, horizon + 1], 1)
    assert difference.mean() < 0.5
    coarse.close()
    fine.close()


def test_the_textured_floor_never_ends():
    renderer = helpers.make_humanoid_renderer(64, textured=True)
    states = np.repeat(helpers.humanoid_states(1), 4, 0)
    states[:, 0] += [0, 0, 1600, 1600]  # whole repeats of the flagstones
    near, near_again, far, far_again = renderer.render(states)
    assert np.abs(near.astype(int) - far).mean() < 0.5
    np.testing.assert_array_equal(near, near_again)
    np.testing.assert_array_equal(far, far_again)  # whatever was drawn before
    renderer.close()


# ------------------------------------------------------------------------------ the scene


@pytest.mark.parametrize("env_id", ["Humanoid-v5", "HalfCheetah-v5"])
@pytest.mark.parametrize("varied", [False, True])
def test_the_scene_leaves_physics_alone_bit_for_bit(env_id, varied):
    import mujoco

    env = gym.make(env_id, max_episode_steps=-1)
    if env_id.startswith("Humanoid"):
        env = gym.make(env_id, max_episode_steps=-1, terminate_when_unhealthy=False)
    env.reset(seed=5)
    env.action_space.seed(5)
    unwrapped = env.unwrapped
    model = textured_model(unwrapped.fullpath, np.random.default_rng(1) if varied else None)
    data = mujoco.MjData(model)
    data.qpos[:], data.qvel[:] = unwrapped.data.qpos, unwrapped.data.qvel
    mujoco.mj_forward(model, data)
    for _ in range(100):
        action = env.action_space.sample()
        env.step(action)
        data.ctrl[:] = action
        mujoco.mj_step(model, data, nstep=unwrapped.frame_skip)
        assert (data.qpos == unwrapped.data.qpos).all() and (data.qvel == unwrapped.data.qvel).all()


def test_the_scene_is_outdoors_and_the_same_for_everybody():
    env, states = rollout("Humanoid-v5", 1)
    path = env.unwrapped.fullpath
    picture = MujocoRenderer(textured_model(path), SIZE).render(states)[0].astype(int)
    again = MujocoRenderer(textured_model(path), SIZE).render(states)[0]
    np.testing.assert_array_equal(picture, again)
    red, green, blue = picture[: SIZE // 8].mean((0, 1))
    assert blue > red + 8 and blue > 150, "sky above"
    red, green, blue = picture[-SIZE // 8 :].mean((0, 1))
    assert red > blue and 60 < red < 190, "warm stone below"
    robot = body_mask(env.unwrapped.model, states, PAPER_CAMERA)[0]
    pale = (picture.min(-1) > 150) & robot  # the rest is dark joints and shade
    assert pale.sum() > 0.35 * robot.sum(), "a pale body"
    varied = MujocoRenderer(textured_model(path, np.random.default_rng(0)), SIZE).render(states)[0]
    assert np.abs(varied.astype(int) - picture).mean() > 3


def test_noise_is_periodic_and_in_range():
    noise = egl_render.fractal_noise(np.random.default_rng(0), 128)
    assert 0 <= noise.min() < 0.1 and 0.9 < noise.max() <= 1
    inside = np.abs(np.diff(noise, axis=0)).mean()
    assert np.abs(noise[0] - noise[-1]).mean() < 3 * inside


def test_stone_tiles_and_sky_faces_have_no_seams():
    stone = egl_render.stone_texture(np.random.default_rng(0), 256).astype(int)
    inside = np.abs(np.diff(stone, axis=1)).mean()
    assert np.abs(stone[:, 0] - stone[:, -1]).mean() < 3 * inside
    size = 64
    sky = (
        egl_render.sky_texture(np.random.default_rng(0), size).reshape(6, size, size, 3).astype(int)
    )
    right, left, up, down, front, back = sky
    for one, other in ((right, back), (back, left), (left, front), (front, right)):
        seams = [np.abs(one[:, i] - other[:, j]).mean() for i, j in ((-1, 0), (0, -1))]
        assert min(seams) < 8, "neighbouring faces meet"
    assert up.mean((0, 1))[2] > down.mean((0, 1))[0]


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
    assert picture.n_frames == len(frames)
    picture.seek(5)
    assert np.abs(np.asarray(picture.convert("RGB")).astype(int) - frames[5]).mean() < 20


@pytest.mark.parametrize("elevation", [30, 45])
@pytest.mark.parametrize("azimuth", range(0, 360, 45))
def test_the_sky_has_no_seams(azimuth, elevation):
    """Faces of the sky meet at azimuths 45, 135, ... and, above 0, 90, ..., at elevation 45."""
    model = textured_model(gym.make("Humanoid-v5").unwrapped.fullpath)
    camera = egl_render.Camera(1.0, azimuth, elevation, (0.0, 0.0, 60.0))  # nothing but sky
    renderer = MujocoRenderer(model, 120, camera, "light")
    frame = renderer.render(np.zeros((1, model.nq + model.nv)))[0].astype(float)
    renderer.close()
    for axis in (0, 1):
        others = 1 - axis, 2
        steps = np.abs(np.diff(frame, axis=axis)).mean(others)  # between neighbouring lines
        assert steps.max() < 2.5 * np.quantile(steps, 0.9), steps.argmax()


# ------------------------------------------------------------------------------ classic control

CLASSIC_BOUNDS = {
    "CartPole-v1": ([-2.4, -1, -np.pi, -1], [2.4, 1, np.pi, 1]),
    "MountainCar-v0": ([-1.2, -0.07], [0.6, 0.07]),
    "MountainCarContinuous-v0": ([-1.2, -0.07], [0.6, 0.07]),
}


@pytest.mark.parametrize("env_id", CLASSIC_BOUNDS)
def test_plain_classic_frames_are_gymnasiums_pixel_for_pixel(env_id):
    low, high = np.array(CLASSIC_BOUNDS[env_id])
    states = np.random.default_rng(0).uniform(low, high, (60, len(low)))
    states[0], states[1], states[2] = low, high, 0
    env = gym.make(env_id, render_mode="rgb_array").unwrapped
    env.reset(seed=0)
    frames = egl_render.ClassicRenderer(env_id).render(states)
    assert frames.shape == (60, 400, 600, 3) and frames.dtype == np.uint8
    for state, frame in zip(states, frames, strict=True):
        env.state = state
        assert np.array_equal(env.render(), frame)
    env.close()


@pytest.mark.parametrize("env_id, textured", [("CartPole-v1", False), ("MountainCar-v0", True)])
def test_square_classic_frames_show_the_whole_native_picture(env_id, textured):
    state = np.array([CLASSIC_BOUNDS[env_id][1]]) * 0.7
    native = egl_render.ClassicRenderer(env_id, None, textured).render(state)[0]
    out = np.zeros((1, 150, 150, 3), np.uint8)  # a quarter: every pixel is the mean of 4 x 4
    assert egl_render.ClassicRenderer(env_id, 150, textured).render(state, out) is out
    mean = native.reshape(100, 4, 150, 4, 3).mean((1, 3))
    assert np.abs(out[0, 25:125].astype(float) - mean).max() <= 2
    if not textured:  # above and below is nothing but white
        assert (out[0, :25] == 255).all() and (out[0, 125:] == 255).all()


def red(frame):
    """Rows and columns of the pixels of the car's paint."""
    r, g, b = frame.astype(int).transpose(2, 0, 1)
    return np.nonzero((r > 110) & (g < 40) & (b < 40))


@pytest.mark.parametrize("x", [-1.1, -0.8, -0.5, -0.2, 0.1, 0.4, 0.5])
def test_textured_car_stands_on_the_slope_and_follows_it(x):
    renderer = egl_render.ClassicRenderer("MountainCar-v0", None, textured=True)
    rows, columns = red(renderer.render(np.array([[x, 0.0]]))[0])
    assert len(rows) > 300
    center = np.array([columns.mean(), 400 - rows.mean()])  # y upwards
    scale, slope = 600 / 1.8, np.arctan(0.45 * 3 * np.cos(3 * x))
    ground = np.array([(x + 1.2) * scale, (np.sin(3 * x) * 0.45 + 0.55) * scale])
    above = center - ground
    normal = np.array([-np.sin(slope), np.cos(slope)])
    if x > -1.1:  # there half of it is outside
        assert 8 < above @ normal < 22 and abs(above @ [normal[1], -normal[0]]) < 6
    long_axis = np.linalg.eigh(np.cov(columns, -rows))[1][:, 1]
    tilt = np.arctan(long_axis[1] / long_axis[0])
    if -1.1 < x < 0.45:
        assert abs(tilt - slope) < np.radians(8)


def test_textured_mountain_has_sky_snow_rock_grass_and_a_flag():
    frame = egl_render.ClassicRenderer("MountainCar-v0", 600, True).render(np.array([[-0.5, 0]]))[0]
    r, g, b = frame.astype(int).transpose(2, 0, 1)
    blue, green = (b > r + 40) & (b > g), (g > r) & (g > b + 25)
    white, yellow = np.minimum(np.minimum(r, g), b) > 200, (r > 180) & (g > 140) & (b < 60)
    assert blue[:250].mean() > 0.3 and blue[480:].mean() < 0.01
    assert green[480:].mean() > 0.5 and green[:250].mean() < 0.01
    assert white[165:260, 470:].mean() > 0.2  # the snow cap
    rows, columns = np.nonzero(yellow)
    assert len(rows) > 300 and abs(columns.mean() - 583) < 6 and rows.max() < 160
    relief = np.abs(np.diff(frame[300:400, 480:].mean(-1), axis=0)).mean()
    assert relief > 4  # rock, not a flat colour


@pytest.mark.parametrize(
    "env_id, goal", [("MountainCar-v0", 0.5), ("MountainCarContinuous-v0", 0.45)]
)
def test_the_flag_stands_at_the_goal(env_id, goal):
    frame = egl_render.ClassicRenderer(env_id, 600, True).render(np.array([[-0.5, 0.0]]))[0]
    foot = 500 - (np.sin(3 * goal) * 0.45 + 0.55) * 600 / 1.8  # row of the ground below it
    sky = egl_render.mountain_scene(goal=9.0)  # no flag
    added = np.abs(
        frame[int(foot) - 30 : int(foot) - 5].astype(int) - sky[int(foot) - 30 : int(foot) - 5]
    )
    columns = np.flatnonzero(added.sum(-1).mean(0) > 8)  # of the pole alone
    assert 3 <= len(columns) <= 4
    assert columns.mean() + 0.5 == pytest.approx((goal + 1.2) * 600 / 1.8, abs=0.6)


def test_varied_landscapes_differ_and_the_canonical_one_does_not():
    scenes = [egl_render.mountain_scene(np.random.default_rng(seed)) for seed in (1, 2)]
    assert np.abs(scenes[0].astype(int) - scenes[1]).mean() > 10
    state = np.array([[0.0, 0.0]])
    shown = egl_render.ClassicRenderer("MountainCar-v0", 600, True, scenes[0]).render(state)[0]
    assert np.array_equal(shown[:150], scenes[0][:150])
    twice = [egl_render.ClassicRenderer("MountainCar-v0", 96, True).render(state) for _ in "12"]
    assert np.array_equal(*twice)


def test_classic_renderer_refuses_what_it_cannot_draw():
    with pytest.raises(ValueError, match="Pendulum-v1 is not one of CartPole-v1"):
        egl_render.ClassicRenderer("Pendulum-v1")
    with pytest.raises(ValueError, match="no textured scene"):
        egl_render.ClassicRenderer("CartPole-v1", textured=True)
    with pytest.raises(ValueError, match=r"states must be \[B, 2\]"):
        egl_render.ClassicRenderer("MountainCar-v0").render(np.zeros((3, 4)))


def test_classic_renderer_needs_neither_display_nor_gl():
    code = (
        "import sys, numpy as np, egl_render; "
        "egl_render.ClassicRenderer('CartPole-v1', 64).render(np.zeros((1, 4))); "
        "print([m for m in ('mujoco', 'OpenGL', 'torch') if m in sys.modules])"
    )
    environment = {k: v for k, v in helpers.importable_environment().items() if k != "DISPLAY"}
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment
    )
    assert run.stdout.strip() == "[]", run.stderr
