"""SAC's tasks as a user meets them, and its parts against independent computations."""

import copy
import dataclasses
import math
from pathlib import Path

import gymnasium as gym
import imageio.v2 as imageio
import numpy as np
import pytest
import torch
from helpers import KNEELING, TINY, checkpoint, only_run, rings, run, scalars
from PIL import Image

import clip_reward
import dqn_clip_classic as dqn
import sac_clip_humanoid as sac
from clip_reward import UsageError
from environments import classic, judges, tasks
from training.run import free_memory, load_args

MOUNTAIN_CAR = "MountainCarContinuous-v0"

SMALL = [
    *("--num-envs", 2, "--episode-length", 12, "--render-size", 64),
    *("--batch-size", 16, "--gradient-steps", 3, "--learning-starts", 24),
    *("--target-prompt", KNEELING, "--clip-model", TINY),
]


SCORED = [0, 4, 8, 11]  # steps of these episodes: every 4th and the last


def learn(tmp_path, *arguments, **environment):
    """Run the script -> its folder."""
    run(sac.__file__, *SMALL, *arguments, "--runs-dir", tmp_path, **environment)
    return only_run(tmp_path)


# ------------------------------------------------------------------------------ tasks


@pytest.mark.slow
def test_any_continuous_task_through_frames(tmp_path):
    folder = learn(tmp_path, "--env-id", "Pendulum-v1", "--total-timesteps", 48)
    values, _ = scalars(folder)
    assert rings(folder)[2].std() > 0 and len(values["charts/clip_reward"]) == 2
    assert list((folder / "videos").glob("*.mp4"))


def test_observations_of_several_parts_are_flattened():
    class Parts(gym.ObservationWrapper):
        def __init__(self):
            super().__init__(gym.make("Pendulum-v1"))
            box = self.env.observation_space
            self.observation_space = gym.spaces.Dict({"now": box, "again": box})

        def observation(self, observation):
            return {"now": observation, "again": observation}

    gym.register("Parts-v0", lambda **_: Parts())
    args = sac.Args(env_id="Parts-v0", reward="ground-truth", video_freq=0)
    assert tasks.why_own_render("Parts-v0"), "only its own render() can draw it"
    env = sac.make_env(args)()
    observation, _ = env.reset(seed=1)
    assert observation.shape == env.observation_space.shape == (6,)
    np.testing.assert_array_equal(observation[:3], observation[3:])


def test_an_own_task_of_a_module_with_a_judge_and_another_look(tmp_path):
    """A MuJoCo task that only its own module registers; scored again here, seen as it was asked."""
    (tmp_path / "my_tasks.py").write_text(
        "import gymnasium as gym\n"
        "place = 'gymnasium.envs.mujoco.reacher_v5:ReacherEnv'\n"
        "gym.register('Reach-v0', place, max_episode_steps=50)\n"
        "def right(states):\n"
        "    return states[:, 0] > states[:, 0].mean()\n"
    )
    looks = ["--no-textured", "--camera-distance", 1.5, "--camera-azimuth", 30]
    judge = ["--judge", f"{tmp_path / 'my_tasks.py'}:right", "--video-freq", 0]
    task = ["--env-id", "my_tasks:Reach-v0", "--total-timesteps", 24]
    # pytest's pythonpath is this process's sys.path, and so the script's PYTHONPATH
    path = pytest.MonkeyPatch()
    path.syspath_prepend(tmp_path)
    folder = learn(tmp_path / "runs", *task, *looks, *judge)
    assert folder.name.startswith("my_tasks_Reach-v0__")
    observations, actions, rewards = (ring[0].numpy() for ring in rings(folder))
    values, _ = scalars(folder)
    assert 0 <= values["charts/success_rate"][0].value <= 1
    args = load_args(folder, sac.Args)
    env = sac.make_env(args)()
    env.reset(seed=np.random.SeedSequence((1, 0)).generate_state(3).tolist()[0])
    states = np.stack([env.step(action)[4]["states"] for action in actions[:, 0]])
    reward, expected = clip_reward.make_clip_reward(args, "cpu"), []
    for again in (args, sac.Args(env_id=args.env_id, render_size=64)):
        renderer = sac.make_renderer(again)
        expected.append(reward(renderer.render(states)).numpy())
        renderer.close()
    path.undo()
    np.testing.assert_allclose(rewards[SCORED, 0], expected[0][SCORED], atol=5e-4)
    between = np.interp(range(12), SCORED, expected[0][SCORED])
    np.testing.assert_allclose(rewards[:, 0], between, atol=5e-4)
    assert np.abs(expected[0] - expected[1]).mean() > 0.01, "seen differently, rewarded differently"


@pytest.mark.slow
def test_two_cameras_and_a_picture_as_the_only_goal(tmp_path):
    """The rewards, drawn and scored again here one camera at a time."""
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (80, 60, 3), np.uint8)).save(
        tmp_path / "goal.png"
    )
    goal = ["--target-prompt", "--target-image", tmp_path / "goal.png"]
    views = ["--camera-azimuth", 150, 210, "--total-timesteps", 24, "--action-repeat", 1]
    folder = learn(tmp_path / "runs", *goal, *views)
    args = load_args(folder, sac.Args)
    assert args.target_prompt == () and args.camera_azimuth == (150, 210)
    pictures = [event.value for event in scalars(folder)[0]["charts/clip_pictures"]]
    assert pictures == [4 * 2 * 2], "scored steps, environments, cameras"
    _, actions, rewards = (ring[0].numpy() for ring in rings(folder))
    env = sac.make_env(args)()
    env.reset(seed=np.random.SeedSequence((1, 0)).generate_state(3).tolist()[0])
    states = np.stack([env.step(0.4 * action)[4]["states"] for action in actions[:, 0]])
    reward, each = clip_reward.make_clip_reward(args, "cpu"), []
    for azimuth in args.camera_azimuth:
        one = sac.make_renderer(
            dataclasses.replace(args, render_size=64, camera_azimuth=(azimuth,))
        )
        each.append(reward(one.render(states)).numpy())
        one.close()
    np.testing.assert_allclose(rewards[SCORED, 0], np.mean(each, 0)[SCORED], atol=2e-3)
    assert np.abs(each[0] - each[1]).max() > 5e-3
    (video,) = (folder / "videos").glob("*.mp4")
    assert imageio.mimread(video)[0].shape == (240, 480, 3), "both views, side by side"


@pytest.mark.slow
def test_mountain_car_from_its_state(tmp_path):
    """No OpenGL, the goal of the task as success rate."""
    base = ["--env-id", MOUNTAIN_CAR, "--video-freq", 24, "--episode-length", 60]
    base += ["--learning-starts", 120]
    folder = learn(tmp_path, *base, "--total-timesteps", 360, MUJOCO_GL="disable")
    values, images = scalars(folder)
    assert [event.value for event in values["charts/success_rate"]] == [0, 0, 0]  # in 60 steps
    assert len(next(iter(images.values()))) == 3
    assert [event.value for event in values["charts/clip_pictures"]] == [32, 64, 96]
    observations, actions, rewards = rings(folder)
    # float32 observations are this task's very state: a fresh renderer and CLIP agree
    frames = classic.ClassicRenderer(MOUNTAIN_CAR, 64, textured=True).render(
        observations[0, 1:, 1].double().numpy()
    )
    expected = clip_reward.CLIPReward(clip_reward.load_clip(TINY), [KNEELING])(frames)
    scored = [*range(0, 60, 4), 59]
    torch.testing.assert_close(rewards[0, scored, 1], expected[scored], atol=2e-3, rtol=0)
    assert checkpoint(folder, "best")["global_step"] in (240, 360)


def test_a_task_without_states_has_no_judge_of_states():
    args = sac.Args(env_id="Pendulum-v1", judge="kneeling", clip_model=TINY)
    args.target_prompt = ("a pendulum",)
    with pytest.raises(UsageError, match="--judge"):
        sac.check_args(args)
    with pytest.raises(UsageError, match="judges of Pendulum-v1 are: none"):
        judges.episode_judge("kneeling", "Pendulum-v1", (), None)


def test_humanoid_episodes_have_a_fixed_length_and_little_info():
    import pickle

    env = sac.make_env(sac.Args())()
    env.reset(seed=0)
    for _ in range(120):  # it has long fallen
        observation, reward, terminated, truncated, info = env.step(env.action_space.sample())
        assert not terminated and not truncated
    data = env.unwrapped.data
    assert data.qpos[2] < 1.0
    np.testing.assert_array_equal(info["states"], np.concatenate([data.qpos, data.qvel]))
    assert len(pickle.dumps(info)) <= 1024, "crosses a pipe at every step"


def swing(observation):
    """Full force along the velocity: reaches the goal from anywhere within 150 steps."""
    return np.array([1.0 if observation[1] >= 0 else -1.0], np.float32)


def test_the_goal_of_the_mountain_car_absorbs():
    env = sac.make_env(sac.Args(env_id=MOUNTAIN_CAR))()
    plain = gym.make(MOUNTAIN_CAR).unwrapped  # Gymnasium's own, for comparison
    observation, _ = env.reset(seed=4)
    plain.reset(seed=4)
    arrived, steps = None, 0
    for t in range(250):
        action = swing(observation)
        observation, reward, terminated, truncated, info = env.step(action)
        assert not terminated and not truncated and info["states"].dtype == np.float64
        np.testing.assert_array_equal(info["states"], observation)
        if arrived is None:
            expected, expected_reward, reached, *_ = plain.step(action)
            np.testing.assert_array_equal(observation, expected)
            assert reward == pytest.approx(expected_reward) and info["success"] == reached
            if reached:
                assert observation[0] >= plain.goal_position == 0.45 and reward > 99
                arrived, steps = observation.copy(), t
        else:
            np.testing.assert_array_equal(observation, arrived)
            assert reward == 0 and info["success"]
    assert arrived is not None and 50 < steps < 200
    env.reset(seed=5)
    assert not env.step(np.zeros(1, np.float32))[4]["success"], "a new episode starts anew"


# ------------------------------------------------------------------------------ parts

SPACE = gym.spaces.Box(np.array([-2.0, 0.0], np.float32), np.array([2.0, 1.0], np.float32))


def networks(**options):
    """An actor and its critic for 3 observations and 2 actions."""
    args = sac.Args(**{"normalize": False} | options)
    actor = sac.Actor(3, SPACE, args)
    return actor, sac.TwinCritic(3, 2, args, actor.normalize)


def test_log_density_of_the_squashed_gaussian():
    torch.manual_seed(0)
    actor, _ = networks()
    observations = torch.randn(64, 3)
    mean, log_std = actor(observations)
    actions, log_density = actor.sample(observations)
    assert actions.abs().max() < 1
    expected = torch.distributions.TransformedDistribution(
        torch.distributions.Normal(mean.double(), log_std.double().exp()),
        torch.distributions.TanhTransform(),
    ).log_prob(actions.double())
    torch.testing.assert_close(log_density.double(), expected.sum(1), atol=1e-2, rtol=1e-3)
    scaled = actor.to_env(torch.tensor([[-1.0, -1.0], [1.0, 1.0]]))
    np.testing.assert_allclose(scaled, [[-2.0, 0.0], [2.0, 1.0]])
    low = np.random.default_rng(1).normal(size=300).astype(np.float32)
    space = gym.spaces.Box(low, low + np.float32(0.7))
    ends = sac.Actor(observations.shape[1], space, sac.Args()).to_env(torch.ones(2, 300))
    assert ends.dtype == np.float32 and all(map(space.contains, ends)), "float32 rounds"
    best = actor.best_actions(observations.numpy())  # the mean, in the environment's units
    expected = mean.tanh().detach().numpy() * [2.0, 0.5] + [0.0, 0.5]
    np.testing.assert_allclose(best, expected, atol=1e-5)


@pytest.mark.parametrize("T, pink", [(100, True), (7, True), (1, True), (100, False)])
def test_exploration_noise_is_standard_normal_with_the_power_of_its_colour(T, pink):
    torch.manual_seed(0)
    noise = sac.exploration_noise(T, 400, 17, pink, varied=False)
    assert noise.shape == (T, 400, 17)
    samples = noise.numpy().reshape(T, -1)
    assert np.abs(samples.mean(1)).max() < 0.05 and np.abs(samples.std(1) - 1).max() < 0.05
    correlations = np.corrcoef(noise[0].numpy().T) - np.eye(17)  # each action has its own noise
    assert np.abs(correlations).max() < 0.25
    if T < 100:
        return
    power = (np.abs(np.fft.rfft(samples, axis=0)) ** 2).mean(1)[1:]
    slope, _ = np.polyfit(np.log(np.arange(1, 50)), np.log(power[:49]), 1)
    assert slope == pytest.approx(-1 if pink else 0, abs=0.03)
    uniform = np.sort(torch.erf(noise[3] / 2**0.5).numpy().ravel())  # the random actions
    np.testing.assert_allclose(uniform, np.linspace(-1, 1, len(uniform)), atol=0.05)


def test_each_episode_and_action_dimension_has_its_own_amplitude_of_noise():
    torch.manual_seed(0)
    noise = sac.exploration_noise(50, 400, 17, pink=True, varied=False)
    torch.manual_seed(0)
    varied = sac.exploration_noise(50, 400, 17, pink=True, varied=True)
    amplitude = (varied / noise).numpy()
    np.testing.assert_allclose(amplitude, np.broadcast_to(amplitude[0], amplitude.shape), rtol=1e-4)
    levels = np.linspace(0.1, 0.95, 18)
    expected = -np.log1p(-levels)  # the quantiles of the exponential distribution
    np.testing.assert_allclose(np.quantile(amplitude[0], levels), expected, rtol=0.1)
    assert np.abs(np.corrcoef(amplitude[0].T) - np.eye(17)).max() < 0.25


def test_given_noise_replaces_the_actor_s_own():
    torch.manual_seed(0)
    actor, _ = networks()
    observations, noise = torch.randn(64, 3), torch.randn(64, 2)
    actions, log_density = actor.sample(observations, noise)
    mean, log_std = actor(observations)
    torch.testing.assert_close(actions, torch.tanh(mean + log_std.exp() * noise))
    torch.manual_seed(5)
    own = actor.sample(observations)
    torch.manual_seed(5)
    given = actor.sample(observations, torch.randn(64, 2))
    assert all(torch.equal(a, b) for a, b in zip(own, given))


def test_only_what_is_scored_is_rendered_and_the_film_has_every_step(monkeypatch):
    args = sac.Args(env_id="Pendulum-v1", episode_length=10, render_size=32)
    rendered = []
    real = gym.envs.classic_control.PendulumEnv.render
    monkeypatch.setattr(
        gym.envs.classic_control.PendulumEnv,
        "render",
        lambda self: rendered.append(1) or real(self),
    )
    for filmed, film, expected in (
        (False, False, [0, 4, 8, 9]),
        (False, True, [0, 4, 8, 9]),  # another environment is filmed
        (True, False, [0, 4, 8, 9]),
        (True, True, [*range(10)]),
    ):
        env = sac.make_env(args, filmed)()
        for _ in range(2):  # the second episode as the first
            rendered.clear()
            env.reset(seed=1, options={"film": film})
            infos = [env.step(env.action_space.sample())[4] for _ in range(10)]
            assert [t for t, info in enumerate(infos) if "frames" in info] == expected
            assert len(rendered) == len(expected)


def test_networks_see_normalised_observations():
    torch.manual_seed(0)
    norm, norm_critic = networks(normalize=True)
    plain, critic = copy.deepcopy((norm, norm_critic))
    plain.normalize = critic.normalize = torch.nn.Identity()
    # parts of unequal size, a mean far from 0, a constant, and something a thousand times larger
    seen = torch.randn(70, 2, 3) * torch.tensor([1.0, 0.0, 1000.0]) + torch.tensor([300.0, 7, 0])
    for part in seen.split([10, 1, 59]):
        norm.normalize.add(part)
    flat = seen.flatten(0, 1).double()
    expected = (flat - flat.mean(0)) / (flat.var(0, correction=0) + 1e-4).sqrt()
    flat, expected, actions = flat.float(), expected.float(), torch.rand(140, 2)
    close = dict(atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(norm.normalize(flat), expected, **close)
    torch.testing.assert_close(norm(flat), plain(expected), **close)
    torch.testing.assert_close(norm_critic(flat, actions), critic(expected, actions), **close)
    outlier = norm.normalize(torch.tensor([[1e9, 7.0, -1e9]]))
    torch.testing.assert_close(outlier, torch.tensor([[10.0, 0.0, -10.0]]))


def test_the_actor_step_improves_the_actor_and_spares_the_critics():
    torch.manual_seed(0)
    actor, critic = networks()
    observations = torch.randn(256, 3)
    optimizer = torch.optim.Adam(actor.parameters(), lr=1e-2)
    before = {key: value.clone() for key, value in critic.state_dict().items()}
    losses = [
        sac.update_actor(observations, actor, critic, optimizer, torch.tensor(0.01))["actor_loss"]
        for _ in range(50)
    ]
    assert losses[-1] < losses[0] - 0.01
    assert all(parameter.grad is None for parameter in critic.parameters())
    assert all(torch.equal(before[key], value) for key, value in critic.state_dict().items())


def test_replay_keeps_transitions_together_across_the_ring():
    steps, envs = 5, 3
    buffer = sac.ReplayBuffer(2, steps, envs, 1, 1, device="cpu")
    for rollout in range(3):  # the third replaces the first
        t, n = np.mgrid[: steps + 1, :envs].astype(np.float32)
        code = 1000 * rollout + 100 * n + t  # tells rollout, environment and time
        buffer.add(code[..., None], code[:steps, :, None] + 0.5, code[1:])
    here, after, actions, rewards = buffer.sample(4000)
    torch.testing.assert_close(after, here + 1)
    torch.testing.assert_close(actions, here + 0.5)
    torch.testing.assert_close(rewards, here[:, 0] + 1)
    seen = set(here[:, 0].tolist())
    expected = {1000 * r + 100 * n + t for r in (1, 2) for n in range(envs) for t in range(steps)}
    assert seen == expected
    three = sac.ReplayBuffer(2, steps, envs, 1, 1, "cpu", gamma=0.5, n_step=3)
    three.load_state_dict(buffer.state_dict())
    here, after, actions, rewards = three.sample(4000)
    torch.testing.assert_close(after, here + 3)
    torch.testing.assert_close(actions, here + 0.5)
    first = here[:, 0]  # the rewards are first + 1, first + 2, first + 3
    torch.testing.assert_close(rewards, first + 1 + 0.5 * (first + 2) + 0.25 * (first + 3))
    assert set(first.tolist()) == {code for code in expected if code % 100 <= steps - 3}
    copy = sac.ReplayBuffer(2, steps, envs, 1, 1, device="cpu")
    copy.load_state_dict(buffer.state_dict())
    torch.manual_seed(3)
    one = buffer.sample(50)
    torch.manual_seed(3)
    assert copy.count == 3
    assert all(torch.equal(a, b) for a, b in zip(one, copy.sample(50)))


@pytest.mark.parametrize("shape, kind", [((), "f4"), ((2,), "i4"), ((2,), "f8")])
def test_boxes_of_all_kinds_are_acted_in_or_refused(shape, kind):
    """A saturated action is in its own Box; actions that are whole numbers are not continuous."""
    space = gym.spaces.Box(-0.1, 0.7, shape, np.dtype(kind) if kind != "i4" else np.float32)
    if kind == "i4":
        space = gym.spaces.Box(-3, 4, shape, np.int32)
    Own = type("Own", (gym.Env,), {"action_space": space, "observation_space": space})
    Own.reset = lambda self, **_: (space.sample(), {})
    Own.step = lambda self, action: (space.sample(), 0, False, False, {})
    gym.register("OwnBox-v0", Own)
    args = sac.Args(env_id="OwnBox-v0", reward="ground-truth", video_freq=0)
    if kind == "i4":
        with pytest.raises(UsageError, match="needs bounded continuous actions, not Box.*int32"):
            sac.check_args(args)
        return
    assert sac.check_args(args) is None
    actor = sac.Actor(3, space, sac.Args(target_prompt=("words",)))
    ends = actor.to_env(torch.tensor([-1.0, 1.0])[:, None].expand(2, math.prod(shape)))
    for action, end in zip(ends, (space.low, space.high)):
        assert action.shape == shape and space.contains(np.asarray(action, space.dtype))
        np.testing.assert_allclose(action, end, atol=1e-6)


@pytest.mark.parametrize("script", [sac, dqn], ids=["sac", "dqn"])
@pytest.mark.parametrize(
    "flag, value",
    [
        ("buffer_size", 10**9),
        ("buffer_size", 10**30),
        ("num_envs", 10**12),
        ("batch_size", 10**7),
        ("render_size", 8192),
        ("episode_length", 10**6),
        ("HIDDEN", 10**6),
    ],
)
def test_what_is_larger_than_the_memory_is_refused(script, flag, value, monkeypatch):
    monkeypatch.setattr("training.run.free_memory", lambda: 10**10)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    flags = {"total_timesteps": 10**12, "num_envs": 1, "buffer_size": 10**6, "clip_model": TINY}
    if flag == "HIDDEN":
        monkeypatch.setattr(script, flag, value)
    else:
        flags |= {flag: value, "reward_devices": ("cpu",)}
        flags |= {"reward": "ground-truth"} if flag == "episode_length" else {}
    if flag == "num_envs":
        flags["buffer_size"] = 10**30
    names = {"episode_length": "--render-size, --video-freq", "num_envs": "buffer-size"}
    name = names.get(flag, flag.replace("_", "-"))
    message = f"{name}.*: [0-9,.]+ GB are needed, but 10.0 GB are free$"
    with pytest.raises(UsageError, match=message):
        script.check_args(script.Args(target_prompt=("words",), **flags))


def test_memory_is_what_a_container_may_use(monkeypatch):
    """The kernel's files say so, of its group or of one around that."""
    files = {
        "/proc/self/cgroup": "0::/job/step\n",
        "/proc/meminfo": "MemTotal: 9 kB\nMemAvailable:   8000000 kB\n",
        "/sys/fs/cgroup/job/memory.max": "3000000000\n",
        "/sys/fs/cgroup/job/step/memory.max": "max\n",
    }
    monkeypatch.setattr(Path, "read_text", lambda path: files[str(path)])
    monkeypatch.setattr(Path, "is_file", lambda path: str(path) in files)
    assert free_memory() == 3_000_000_000
    files["/sys/fs/cgroup/job/memory.max"] = "max\n"
    assert free_memory() == 8_192_000_000
    files["/proc/self/cgroup"] = "9:memory:/\n"
    assert free_memory() == 8_192_000_000
