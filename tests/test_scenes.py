"""The pictures in scenes/ and what paints them, textured models, CartPole and MountainCar."""

import functools

import gymnasium as gym
import numpy as np
import pytest

import egl_render
from egl_render import MujocoRenderer, RenderArgs, choose_camera, textured_model
from environments.classic import ClassicRenderer

egl_render.setup_gl("cpu")
egl_render.quiet_mujoco()
from scenes import paint

SIZE = 240


def draw(env, states, model, camera=None, size=SIZE):
    """Frames [B, size, size, 3] int by EGL."""
    camera = camera or choose_camera(RenderArgs(), env)
    renderer = MujocoRenderer(model, size, camera)
    frames = renderer.render(states).astype(int)
    renderer.close()
    return frames


def initial_state(env, count=1):
    env.reset(seed=3)
    data = env.unwrapped.data
    return np.tile(np.concatenate([data.qpos, data.qvel]), (count, 1))


@functools.cache
def varied_look():
    return paint.paint_look(np.random.default_rng(1))


@functools.cache
def humanoid_scene():
    return textured_model(gym.make("Humanoid-v5").unwrapped.fullpath)


@pytest.mark.slow
def test_the_committed_pictures_are_painted_again():
    look = paint.paint_look()
    painted = {name: getattr(look, name) for name in ("sky", "stone", "metal")}
    painted["car"] = paint.car_sprite()
    painted["mountain_0.45"] = paint.mountain_scene(goal=0.45)
    assert {path.stem for path in paint.HERE.glob("*.png")} == painted.keys() | {"mountain_0.5"}
    for name, picture in painted.items():
        committed = egl_render.load_picture(name)
        assert committed.shape == picture.shape
        # another machine's FFT may round otherwise
        difference = np.abs(committed.astype(int) - picture)
        assert difference.max() <= 2 and (difference > 0).mean() < 1e-3
    # the other mountain is the same but for the flag
    other = egl_render.load_picture("mountain_0.5").astype(int)
    rows, columns = np.nonzero(np.abs(other - painted["mountain_0.45"]).max(-1) > 2)
    assert rows.max() < 300 and columns.min() > 540
    for name in ("tile", "haze", "dark", "sun_azimuth", "sun_height", "sun", "ambient"):
        assert np.array_equal(getattr(look, name), getattr(egl_render.Scene(), name)), name


# ------------------------------------------------------------------------------ MuJoCo


@pytest.mark.parametrize("env_id", ["Humanoid-v5", "HalfCheetah-v5", "Pusher-v5"])
@pytest.mark.parametrize("varied", [False, True])
def test_the_scene_leaves_physics_alone_bit_for_bit(env_id, varied):
    import mujoco

    env = gym.make(env_id, max_episode_steps=-1)
    env.reset(seed=5)
    env.action_space.seed(5)
    env = env.unwrapped
    look = varied_look() if varied else None
    model = textured_model(env.fullpath, look)
    data = mujoco.MjData(model)
    data.qpos[:], data.qvel[:] = env.data.qpos, env.data.qvel
    mujoco.mj_forward(model, data)
    for _ in range(50):
        data.ctrl[:] = env.action_space.sample()
        env.step(data.ctrl)
        mujoco.mj_step(model, data, nstep=env.frame_skip)
        assert (data.qpos == env.data.qpos).all() and (data.qvel == env.data.qvel).all()


def test_the_scene_is_outdoors_and_the_humanoid_a_pale_robot(renderer):
    env = gym.make("Humanoid-v5")
    states, path = initial_state(env), env.unwrapped.fullpath
    picture = draw(env, states, textured_model(path))[0]
    np.testing.assert_array_equal(picture, draw(env, states, textured_model(path))[0])
    red, green, blue = picture[: SIZE // 8].mean((0, 1))
    assert blue > red + 8 and blue > 150, "sky above"
    red, green, blue = picture[-SIZE // 8 :].mean((0, 1))
    assert red > blue and 60 < red < 190, "warm stone below"
    gone = states - 50 * (np.arange(47) == 2)  # below the floor
    body = np.abs(picture - draw(env, gone, textured_model(path))[0]).sum(-1) > 30
    pale = (picture.min(-1) > 150) & (np.ptp(picture, -1) < 25) & body
    assert pale.sum() > 0.3 * body.sum(), "the rest is dark joints and shade"
    varied = draw(env, states, textured_model(path, varied_look()))[0]
    assert np.abs(varied - picture).mean() > 3


def hue_of(frame, color, tolerance=0.12):
    """Rows and columns of the pixels that have `color`'s proportions of red, green and blue."""
    color = np.array(color) / np.sum(color)
    total = frame.sum(-1)
    near = np.abs(frame / np.maximum(total, 1)[..., None] - color).max(-1) < tolerance
    return np.nonzero(near & (total > 60))


def test_coloured_bodies_of_other_tasks_keep_their_colours(renderer):
    reacher, pusher = gym.make("Reacher-v5"), gym.make("Pusher-v5")
    state = initial_state(reacher, 2)
    state[1, 2] -= 0.2  # the target, to the left
    frames = draw(reacher, state, textured_model(reacher.unwrapped.fullpath), size=480)
    columns = [hue_of(frame, (0.9, 0.2, 0.2))[1] for frame in frames]
    assert min(map(len, columns)) > 15 and columns[0].mean() - columns[1].mean() > 40
    assert len(hue_of(frames[0], (0.0, 0.4, 0.6))[0]) > 200, "the blue arm"
    assert len(hue_of(frames[0], (0.9, 0.4, 0.6), 0.06)[0]) > 2000, "the pink fence"
    model = textured_model(pusher.unwrapped.fullpath)
    frame = draw(pusher, initial_state(pusher), model)[0]
    assert len(hue_of(frame, (1.0, 0.0, 0.0))[0]) > 20, "the red goal"


def test_the_floor_never_ends(renderer):
    env = gym.make("Humanoid-v5")
    states = initial_state(env, 4)
    far_away = 1600 if renderer == "egl" else 160  # whole repeats of the flagstones
    states[2:, 0] += far_away
    near, near_again, far, far_again = draw(env, states, textured_model(env.unwrapped.fullpath))
    assert np.abs(near - far).mean() < 0.5
    np.testing.assert_array_equal(near, near_again)
    np.testing.assert_array_equal(far, far_again)  # whatever was drawn before


@pytest.mark.parametrize("elevation", [30, 45])
@pytest.mark.parametrize("azimuth", range(0, 360, 45))
def test_the_sky_has_no_seams(azimuth, elevation, renderer):
    """Faces of the sky meet at azimuths 45, 135, ... and, above 0, 90, ..., at elevation 45."""
    model = humanoid_scene()
    camera = egl_render.Camera(1.0, azimuth, elevation, (0.0, 0.0, 60.0))  # nothing but sky
    frame = draw(None, np.zeros((1, 47)), model, camera, 120)[0].astype(float)
    for axis in (0, 1):
        steps = np.abs(np.diff(frame, axis=axis)).mean((1 - axis, 2))  # between neighbouring lines
        assert steps.max() < 2.5 * np.quantile(steps, 0.9), steps.argmax()


def test_noise_and_stone_tile():
    noise = paint.fractal_noise(np.random.default_rng(0), 128)
    assert 0 <= noise.min() < 0.1 and 0.9 < noise.max() <= 1
    for picture in (noise[..., None], egl_render.load_picture("stone").astype(int)):
        inside = np.abs(np.diff(picture, axis=1)).mean()
        assert np.abs(picture[:, 0] - picture[:, -1]).mean() < 3 * inside


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
    frames = ClassicRenderer(env_id).render(states)
    assert frames.shape == (60, 400, 600, 3) and frames.dtype == np.uint8
    for state, frame in zip(states, frames, strict=True):
        env.state = state
        assert np.array_equal(env.render(), frame)
    env.close()


@pytest.mark.parametrize("env_id, textured", [("CartPole-v1", False), ("MountainCar-v0", True)])
def test_square_classic_frames_show_the_whole_native_picture(env_id, textured):
    state = np.array([CLASSIC_BOUNDS[env_id][1]]) * 0.7
    native = ClassicRenderer(env_id, None, textured).render(state)[0]
    out = np.zeros((1, 150, 150, 3), np.uint8)  # a quarter: every pixel is the mean of 4 x 4
    assert ClassicRenderer(env_id, 150, textured).render(state, out) is out
    mean = native.reshape(100, 4, 150, 4, 3).mean((1, 3))
    assert np.abs(out[0, 25:125].astype(float) - mean).max() <= 2
    if not textured:  # above and below is nothing but white
        assert (out[0, :25] == 255).all() and (out[0, 125:] == 255).all()


def test_classic_renderer_refuses_what_it_cannot_draw():
    with pytest.raises(ValueError, match="Pendulum-v1 is not one of CartPole-v1"):
        ClassicRenderer("Pendulum-v1")
    with pytest.raises(ValueError, match="no textured scene"):
        ClassicRenderer("CartPole-v1", textured=True)
    with pytest.raises(ValueError, match=r"states must be \[B, 2\]"):
        ClassicRenderer("MountainCar-v0").render(np.zeros((3, 4)))


def red(frame):
    """Rows and columns of the pixels of the car's paint."""
    r, g, b = frame.astype(int).transpose(2, 0, 1)
    return np.nonzero((r > 110) & (g < 40) & (b < 40))


@pytest.mark.parametrize("x", [-1.1, -0.8, -0.5, -0.2, 0.1, 0.4, 0.5])
def test_the_car_stands_on_the_slope_and_follows_it(x):
    renderer = ClassicRenderer("MountainCar-v0", None, textured=True)
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


def test_the_mountain_has_sky_snow_rock_grass_and_a_flag():
    frame = ClassicRenderer("MountainCar-v0", 600, True).render(np.array([[-0.5, 0]]))[0]
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


def test_the_flag_stands_at_the_goal():
    frames, feet = [], []
    for env_id, goal in (("MountainCar-v0", 0.5), ("MountainCarContinuous-v0", 0.45)):
        frames.append(ClassicRenderer(env_id, 600, True).render(np.array([[-0.5, 0.0]]))[0])
        # column and row of the ground there
        feet.append(
            ((goal + 1.2) * 600 / 1.8, int(500 - (np.sin(3 * goal) * 0.45 + 0.55) * 1000 / 3))
        )
    difference = np.abs(frames[0].astype(int) - frames[1]).sum(-1)
    for column, row in feet:
        near = difference[row - 25 : row - 5, int(column) - 8 : int(column) + 8].mean(0)
        pole = np.flatnonzero(near > 8) + int(column) - 8
        assert 3 <= len(pole) <= 4
        assert pole.mean() + 0.5 == pytest.approx(column, abs=0.6)


def test_varied_landscapes_differ():
    scene = paint.mountain_scene(np.random.default_rng(1))
    assert np.abs(scene.astype(int) - egl_render.load_picture("mountain_0.5")).mean() > 10
    renderer = ClassicRenderer("MountainCar-v0", 600, True, scene)
    assert np.array_equal(renderer.render(np.zeros((1, 2)))[0, :150], scene[:150])
