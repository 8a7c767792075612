"""What people's models and tasks show reaches CLIP: nothing vanishes, moves or changes colour."""

import importlib
import os
import re

import gymnasium as gym
import numpy as np
import pytest
from helpers import ROOT, TINY, only_run, run, scalars
from PIL import Image

import dqn_clip_classic as dqn
import egl_render
import sac_clip_humanoid as sac
from clip_reward import CLIPReward, RunError, UsageError, load_clip
from egl_render import Camera, MujocoRenderer, RenderArgs, textured_model
from environments import own_render, tasks
from warp_render import WarpRenderer

SIZE = 120
egl_render.quiet_mujoco()


@pytest.fixture(scope="module", autouse=True)
def peoples(tmp_path_factory):
    """The module peoples_tasks, whose files are in a folder of their own."""
    os.environ["TASK_FOLDER"] = str(tmp_path_factory.mktemp("models"))
    yield importlib.import_module("peoples_tasks")
    del os.environ["TASK_FOLDER"]


def args_for(task, **flags):
    flags = {"render_size": SIZE, "score_every": 1} | flags
    task = task if "-v" in task else f"peoples_tasks:{task}-v0"
    return sac.Args(env_id=task, target_prompt=("words",), clip_model=TINY, **flags)


# ------------------------------------------------------------------------------ models

MODELS = {
    "a goal pad, a wall, a ramp and a mirror on a large floor": """
      <asset><material name="mirror" reflectance=".8" rgba="1 1 0 1"/></asset><worldbody>
      <light pos="0 0 4"/><geom name="floor" type="plane" size="40 40 .1" rgba=".5 .5 .5 1"/>
      <geom type="plane" pos=".8 0 .002" size=".3 .3 .1" rgba="0 1 0 1"/>
      <geom type="plane" pos="0 2 .5" size="1 .5 .1" euler="90 0 0" rgba="1 0 0 1"/>
      <geom type="plane" pos="-1 0 .3" size=".5 .5 .1" euler="0 30 0" rgba="0 0 1 1"/>
      <geom type="plane" pos="0 -1 .1" size=".5 .5 .1" material="mirror"/>
      <body pos="0 0 .2"><freejoint/><geom size=".2" rgba="0 0 1 1"/></body></worldbody>""",
    "a table, and below it an endless floor": """
      <worldbody><light pos="0 0 3"/><geom type="plane" size="0 0 .1" rgba="1 0 1 1"/>
      <geom type="plane" pos="0 0 .4" size=".5 .5 .1" rgba=".6 .3 .1 1"/>
      <body pos="0 0 .5"><joint type="slide" axis="1 0 0"/><geom size=".1" rgba="1 0 0 1"/></body>
      </worldbody>""",
    "humanoid_soccer": """
      <worldbody><light pos="0 0 4"/><geom name="floor" type="plane" size="5 5 .1"/>
      <body pos="0 0 1"><freejoint/><geom name="head" size=".07" rgba="0 1 0 1"/>
      <geom name="collision" size=".3" rgba="1 0 0 0"/></body>
      <body pos=".8 0 .2"><freejoint/><geom name="ball" size=".2" rgba="1 0 0 1"/></body>
      </worldbody>""",
    "names that are taken, and a material with the sky's texture": """
      <asset><texture name="clip_sky" type="skybox" builtin="gradient" rgb1="1 0 0" rgb2="0 1 0"
      width="32" height="32"/><texture name="clip_stone" type="2d" builtin="checker" width="32"
      height="32" rgb1="0 0 1" rgb2="1 1 0"/><material name="clip_stone" texture="clip_stone"/>
      <material name="shiny" texture="clip_sky"/></asset>
      <worldbody><light name="clip_sun" pos="0 0 4"/><geom type="plane" size="5 5 .1"
      material="clip_stone"/><body pos="0 0 1"><freejoint/><geom size=".4" material="shiny"/></body>
      </worldbody>""",
}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_that_does_not_come_with_gymnasium_keeps_its_look(name, tmp_path, renderer):
    import mujoco

    path = tmp_path / "model.xml"
    path.write_text(f'<mujoco model="{name}">{MODELS[name]}</mujoco>')
    camera, pictures = Camera(5, 90, -35), []
    for model in mujoco.MjModel.from_xml_path(str(path)), textured_model(path):
        drawn, data = MujocoRenderer(model, SIZE, camera), mujoco.MjData(model)
        pictures.append(drawn.render(egl_render.state_of(data)[None])[0])
        drawn.close()
    np.testing.assert_array_equal(*pictures)


def test_only_a_large_plane_of_gymnasiums_models_becomes_stone():
    for env_id, floor, stone in (("Ant-v5", "floor", True), ("Pusher-v5", "table", False)):
        model = textured_model(gym.make(env_id).unwrapped.fullpath)
        material = model.geom(floor).matid[0]
        assert (material >= 0 and model.mat(material).name == "clip_stone") == stone


def test_more_than_a_thousand_geoms_are_all_drawn(renderer):
    import mujoco

    balls = "".join(f'<geom size=".01" pos="0 0 -{i / 1000}"/>' for i in range(1500))
    last = '<geom size=".5" rgba="0 1 0 1"/>'
    model = mujoco.MjModel.from_xml_string(
        f'<mujoco><worldbody>{balls}<body><joint type="hinge"/>{last}</body></worldbody></mujoco>'
    )
    (picture,) = MujocoRenderer(model, SIZE, Camera(3, 90, -20)).render(np.zeros((1, 2)))
    assert (picture[..., 1] > picture[..., 0] + 60).sum() > 500


# ------------------------------------------------------------------------------ states

BY_STATE = ["Slider", "Painted", "Dimmed", "Heavy", "Alias", "Window", "Renderless"]
BY_ITSELF = {
    "MovedSite": r"its model changes \(site_pos\)",
    "MovedBody": r"its model changes \(body_pos\)",
    "Coloured": r"its model changes \(geom_rgba\)",
    "Growing": r"its model changes \(geom_size",
    "TurnsGreen": r"its model changes \(geom_rgba\)",
    "Trail": "shows more than its state",
    "ByChance": r"its model changes \(geom_rgba\)",
    "Words": "shows more than its state",
    "Turned": "sets the camera",
    "Follower": "moves the camera",
    "TwoWorlds": "does not draw with",
    "Shown": "moves sites in its data",
    "Wide": "not square",
    "Framed": "shows more than its state",
    "Flat": "not a MujocoEnv",
    "Raw": "not a MujocoEnv",
}


def test_gymnasiums_own_tasks_are_drawn_from_states_when_they_are_tried_as_well():
    for env_id in "Humanoid-v5", "Ant-v5", "Hopper-v5", "InvertedDoublePendulum-v5", "Pusher-v5":
        wrapped = gym.spec(env_id)

        def make(wrapped=wrapped, **options):
            env = gym.make(wrapped, **options)
            env.spec.entry_point = "somewhere:else"  # is tried
            return env

        assert own_render.why_own_render(make) == ""


@pytest.mark.parametrize("task", BY_STATE)
def test_a_task_whose_pictures_follow_from_states_is_drawn_from_them(task):
    args = args_for(task)
    _, first, _ = tasks.describe_env(args.env_id, sac.make_env(args))
    env = sac.make_env(args)()
    env.reset(seed=0)
    _, _, _, _, info = env.step(env.action_space.sample())
    assert info["states"].shape == first.shape and "frames" not in info
    assert len(first) == (8 if task == "Alias" else 2 + 7)


@pytest.mark.parametrize("task", BY_ITSELF)
def test_a_task_whose_pictures_show_more_than_states_draws_itself(task):
    args = args_for(task)
    assert tasks.describe_env(args.env_id, sac.make_env(args))[1] is None
    assert re.search(BY_ITSELF[task], tasks.why_own_render(args.env_id))
    env = sac.make_env(args)()
    pictures = set()
    for seed in range(6):
        env.reset(seed=seed, options={})
        _, _, _, _, info = env.step(np.float32([0.1]))
        assert "states" not in info
        pictures.add(info["frames"].tobytes())
    if task in ("MovedSite", "MovedBody", "Coloured", "TwoWorlds", "Words"):
        assert len(pictures) == 2, "two goals"
    env.close()


def test_dqn_steps_any_discrete_task_by_actions_from_0():
    args = dqn.Args(env_id="peoples_tasks:Steps-v0", target_prompt=("words",), clip_model=TINY)
    assert dqn.check_args(args).shape == (2 + 7,)
    env = dqn.make_env(args)()
    assert env.action_space == gym.spaces.Discrete(3)
    for action, sign in enumerate((-1, 0, 1)):
        env.reset(seed=0)
        _, _, _, _, info = env.step(action)
        assert np.sign(info["states"][0]) == sign
    args.env_id = "peoples_tasks:Slider-v0"
    with pytest.raises(UsageError, match="DQN needs discrete actions.*; use sac_clip_humanoid.py"):
        dqn.check_args(args)
    args = dqn.Args(env_id="Acrobot-v1", target_prompt=("words",), clip_model=TINY)
    assert dqn.check_args(args) is None, "it draws itself"
    args.camera_distance = 3.0
    with pytest.raises(UsageError, match="--camera-distance: Acrobot-v1 has no camera"):
        dqn.check_args(args)


@pytest.mark.slow
def test_dqn_trains_a_mujoco_task_of_ones_own_and_it_is_judged(tmp_path):
    (tmp_path / "judge.py").write_text("def right(states):\n    return states[:, 0] > 0\n")
    done = train("Steps", tmp_path, script=dqn)
    assert "peoples_tasks:Steps-v0 is drawn from its states" in done.stdout
    folder = only_run(tmp_path / "runs")
    values, _ = scalars(folder)
    rewards = [event.value for event in values["charts/clip_reward"]]
    assert len(rewards) == 2 and np.std(rewards) > 0 and len([*folder.glob("videos/*.mp4")])
    command = "success", "--run", folder, "--env-id", "peoples_tasks:Steps-v0", "--episodes", 4
    command += "--judge", f"{tmp_path}/judge.py:right"
    models = {"PYTHONPATH": os.path.dirname(__file__), "TASK_FOLDER": str(tmp_path / "models")}
    assert "of 4 episodes" in run(ROOT / "eval_epic.py", *command, **models).stdout


def test_a_model_that_is_changed_in_python_is_drawn_as_it_is():
    for task in "Painted", "Dimmed":
        env = gym.make(f"peoples_tasks:{task}-v0")
        assert egl_render.drawn_model(env) is env.unwrapped.model


@pytest.mark.parametrize("task", ["Slider", "Painted"])
def test_goals_and_sites_are_where_and_what_the_task_shows(task, renderer):
    """The task's own picture: a goal left or right, a green site behind, which Warp draws too."""
    args = args_for(task, renderer=renderer)
    env = gym.make(args.env_id, render_mode="rgb_array").unwrapped
    drawn = sac.make_renderer(args, size=100)
    without = renderer == "warp" and task == "Painted"  # its file does not say how it looks
    assert drawn.look == renderer and ("without sites" in drawn.description) == without
    for seed in range(4):
        env.reset(seed=seed)
        env.step(np.zeros(1))
        own = env.render().astype(int)
        ours = drawn.render(egl_render.state_of(env.data)[None])[0].astype(int)
        for channel in 0, 1:  # a red goal (or one of red and blue), a green site
            masks = [
                picture[..., channel] > picture[..., 1 - channel] + 60 for picture in (own, ours)
            ]
            assert masks[0].sum() > 20
            assert (masks[0] != masks[1]).mean() < 0.01 or without and channel == 1
    env.close()


def test_what_warp_leaves_out_is_said_and_drawn_by_opengl_if_there_is(monkeypatch):
    import mujoco

    model = mujoco.MjModel.from_xml_string(
        '<mujoco><worldbody><geom size=".5" rgba="0 1 0 .5"/><site/></worldbody></mujoco>'
    )
    assert egl_render.left_out_by_warp(model) == "sites, transparency"
    assert WarpRenderer(model, 16).description.endswith(", without sites, transparency")
    monkeypatch.setattr(egl_render, "gl_renderer", lambda: "llvmpipe")
    assert not egl_render.draws_by_warp(RenderArgs(), model)
    assert egl_render.draws_by_warp(RenderArgs(renderer="warp"), model)


CAMERAS = {  # more of a model -> the body that the camera tracks
    "": 2,
    '<body pos="0 1 0"><freejoint/><geom size=".1"/></body>': 3,  # a ball before the robot
    '<body><geom size=".1"/><body><joint type="slide"/><geom size=".1"/></body></body>': 4,
}


@pytest.mark.parametrize("more", CAMERAS)
def test_the_camera_tracks_the_robot_unless_the_task_says_where_it_looks(more, peoples, tmp_path):
    xml = peoples.XML.format(mocap="true").replace("<body pos=", more + "<body pos=")
    (tmp_path / "model.xml").write_text(xml)

    class Task(peoples.Slider):
        xml = tmp_path / "model.xml"

    task = Task()
    assert egl_render.choose_camera(RenderArgs(), task).track_body == -1
    task.mujoco_renderer.default_cam_config = {"distance": 4.0}
    assert egl_render.choose_camera(RenderArgs(), task).track_body == CAMERAS[more]
    task.mujoco_renderer.default_cam_config = {"lookat": np.zeros(3), "trackbodyid": 1}
    assert egl_render.choose_camera(RenderArgs(), task).track_body == CAMERAS[more]


FAR_AWAY = """
<mujoco><worldbody><light pos="0 0 4"/><geom type="plane" size="0 0 .1" material="tiles"/>
<geom pos="-6 0 1" size=".8" rgba="1 0 0 1"/><camera name="low" pos="4 0 .5" xyaxes="0 1 0 0 0 1"/>
<body pos="0 0 .1"><joint type="slide" range="-1 1"/><geom size=".1"/></body></worldbody>
<asset><texture name="tiles" type="2d" builtin="checker" width="64" height="64" rgb1="1 1 1"/>
<material name="tiles" texture="tiles" texrepeat="3 3" texuniform="true"/></asset></mujoco>"""


@pytest.mark.parametrize("camera", [Camera(3, 180, -8), Camera(3, 180, -8, fixed_id=0)])
def test_only_floors_fade_where_they_are_far_away(camera, renderer):
    import mujoco

    model = mujoco.MjModel.from_xml_string(FAR_AWAY)
    (picture,) = MujocoRenderer(model, 64, camera).render(np.zeros((1, 2))).astype(int)
    red = picture[..., 0] > picture[..., 1] + 100
    assert 40 < red.sum() < 400 and picture[red].std(0)[0] < 60
    near = picture[48:].mean(-1)  # the tiles in front have two colours
    assert near.std() > 15


# ------------------------------------------------------------------------------ frames


def test_all_of_a_frame_that_is_not_square_is_seen(tmp_path):
    args = args_for("Flat")
    env, clip = sac.make_env(args)(), load_clip(TINY)
    env.reset(seed=0, options={})
    places = -0.95, -0.8, 0.0, 0.8, 0.95
    frames = [env.step(np.float32([place]))[-1]["frames"] for place in places]
    assert frames[0].shape == (80, 120, 3)
    frames.append(np.full_like(frames[0], 255))
    reward = CLIPReward(clip, "words")
    wide = reward.embed_images(np.stack(frames))
    assert ((wide[:-1] - wide[-1]).norm(dim=1) > 0.05).all()
    # black bars, and the same for pictures of goals
    square = np.zeros((len(frames), 120, 120, 3), np.uint8)
    square[:, 20:100] = frames
    np.testing.assert_array_equal(wide, reward.embed_images(square))
    tall = reward.embed_images(np.stack(frames).swapaxes(1, 2))
    np.testing.assert_array_equal(tall, reward.embed_images(square.swapaxes(1, 2)))
    Image.fromarray(frames[0]).save(tmp_path / "goal.png")
    goal = CLIPReward(clip, target_images=str(tmp_path / "goal.png")).g
    np.testing.assert_allclose(goal, wide[0], atol=1e-6)


def test_pictures_are_as_large_as_the_first_and_success_is_a_share():
    env = sac.make_env(args_for("Grey"))()
    env.reset(seed=0, options={})
    frames = [env.step(np.float32([place]))[-1]["frames"] for place in (-0.5, 0.0, 0.9)]
    assert {frame.shape for frame in frames} == {(87, 120, 3)}
    env = sac.make_env(args_for("Unconnected"))()
    env.reset(seed=0, options={})
    assert env.step(np.float32([0]))[-1]["success"] == 0.5
    env = sac.make_env(args_for("Boast"))()
    env.reset(seed=0, options={})
    with pytest.raises(RunError, match="the success in its info is not a number: 'yes'"):
        env.step(np.float32([0]))


# ------------------------------------------------------------------------------ errors

BROKEN = {
    "NeedsMap": "TypeError: .*map_name",
    "NoFile": r"FileNotFoundError: .*robot.stl.* \(peoples_tasks.py, line \d+\)",
    "NoKey": "KeyError: 'robot'",
    "NoWords": "assert seed is None",
    "NoXml": "moved.xml does not exist",
    "WrongRate": "Expected value: ",
    "NoPicture": r"must return \[H, W, 3\] uint8, not NoneType",
    "Floats": "must return .* float64",
    "Lost": "peoples_tasks.ContextLost: the GL context is lost",
    "Missing": "doesn't exist",
    "Varied": "observations vary in size",
}


@pytest.mark.parametrize("task", BROKEN)
def test_a_task_that_cannot_be_made_or_drawn_is_one_line_before_clip_is_loaded(task):
    with pytest.raises(UsageError, match=BROKEN[task]) as caught:
        sac.check_args(args_for(task))
    assert "\n" not in str(caught.value) and f"{task}-v0: " in str(caught.value)


def test_ground_truth_without_videos_needs_no_picture():
    sac.check_args(args_for("Lost", reward="ground-truth", video_freq=0))


SMALL = "--num-envs 2 --episode-length 10 --total-timesteps 40 --learning-starts 0 --batch-size 4"
SMALL = f"{SMALL} --gradient-steps 1 --reward-devices cpu --clip-model tiny_clip".split()


def train(task, folder, script=sac, **options):
    environment = {"PYTHONPATH": os.path.dirname(__file__)}
    long = folder / ("scratch_of_a_job_with_a_long_name_" * 3)
    long.mkdir()
    words = ["--env-id", f"peoples_tasks:{task}-v0", "--target-prompt", "a dot", *SMALL]
    words += ["--runs-dir", folder / "runs"]
    folder.joinpath("models").mkdir()
    environment |= {"TMPDIR": str(long), "TASK_FOLDER": str(folder / "models")}
    return run(script.__file__, *words, **environment, **options)


def test_a_task_that_draws_itself_trains_with_its_goal_and_its_own_success(tmp_path):
    """Also where temporary files have long names."""
    done = train("MovedSite", tmp_path)
    assert (
        "peoples_tasks:MovedSite-v0 is drawn by its own render(): its model changes" in done.stdout
    )
    values, _ = scalars(only_run(tmp_path / "runs"))
    assert [event.value for event in values["charts/success_rate"]] == [1.0, 1.0]


LOST = "peoples_tasks.ContextLost: the GL context is lost"


@pytest.mark.parametrize(
    "task, message",
    [
        pytest.param("LostLater", f"the environment failed: {LOST}", marks=pytest.mark.slow),
        pytest.param("OneLicence", f"the environment failed: {LOST}", marks=pytest.mark.slow),
        ("Quits", "an environment's process died while starting"),
    ],
)
def test_a_task_that_fails_in_its_own_process_ends_the_run_in_one_line(task, message, tmp_path):
    """At its second picture, or while it is made."""
    done = train(task, tmp_path, code=1)
    assert done.stderr.splitlines()[-1].startswith(f"error: {message}")
