"""The script as a user runs it, and its parts against independent computations."""

import dataclasses
import json
import math
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import gymnasium as gym
import helpers
import numpy as np
import pytest
import torch
from helpers import only_run, run_script, scalars

import sac_clip_humanoid as sac
from clip_reward import UsageError

ROOT = Path(sac.__file__).parent
TINY = ["--target-prompt", "a humanoid robot kneeling", "--clip-model", "local-dir:tiny_clip"]
SMALL = [
    *("--num-envs", "2", "--episode-length", "12", "--render-size", "64", "--hidden-size", "32"),
    *("--batch-size", "32", "--gradient-steps", "3", "--learning-starts", "24"),
]


def command(*arguments):
    return [sys.executable, str(ROOT / "sac_clip_humanoid.py"), *map(str, arguments)]


def run(*arguments, code=0, **environment):
    return run_script(command(*arguments), code, **environment)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished CLIP run on Humanoid-v5: 4 rollouts of 2 x 12 steps."""
    runs_dir = tmp_path_factory.mktemp("runs")
    freq = ["--total-timesteps", 96, "--checkpoint-freq", 48, "--video-freq", 48]
    process = run(*TINY, *SMALL, *freq, "--runs-dir", runs_dir)
    return only_run(runs_dir), process


# ------------------------------------------------------------------------------ a run


def test_a_run_leaves_everything_that_is_promised(finished):
    import imageio.v2 as imageio

    folder, process = finished
    assert re.fullmatch(r"Humanoid-v5__sac_clip_humanoid__1__\d+", folder.name)
    values, images = scalars(folder)
    for tag in (
        *("charts/clip_reward", "charts/episodic_clip_return", "charts/episodic_return"),
        *("charts/SPS", "time/physics_s", "time/render_s", "time/clip_s", "time/update_s"),
        *("losses/qf1_loss", "losses/qf2_loss", "losses/actor_loss", "losses/alpha"),
    ):
        assert all(math.isfinite(event.value) for event in values[tag]), tag
    steps = [event.step for event in values["charts/clip_reward"]]
    assert steps == [24, 48, 72, 96]
    for mean, total in zip(values["charts/clip_reward"], values["charts/episodic_clip_return"]):
        assert total.value == pytest.approx(12 * mean.value, rel=1e-5)
    args = json.loads((folder / "args.json").read_text())
    assert args["target_prompt"] == ["a humanoid robot kneeling"] and args["render_size"] == 64
    kept = {path.name for path in (folder / "checkpoints").iterdir()}
    assert kept == {"best.pt", "replay_buffer.pt", "step_48.pt", "step_96.pt"}
    videos = sorted((folder / "videos").glob("*.mp4"))
    assert [path.name for path in videos] == ["step_48.mp4", "step_96.mp4"]
    assert np.stack(imageio.mimread(videos[0])).shape[0] == 12
    assert len(next(iter(images.values()))) == 2, "videos in TensorBoard"
    assert "first tenth" in process.stdout and str(folder) in process.stdout
    assert process.stdout.count("clip_reward 0") + process.stdout.count("clip_reward -") >= 4


def test_every_reward_is_that_of_its_own_next_state(finished):
    """Replays the first rollout's actions in a fresh environment and scores the states itself."""
    import clip_reward
    import egl_render

    folder, _ = finished
    stored = torch.load(folder / "checkpoints/replay_buffer.pt", weights_only=True)
    observations, actions, rewards = (tensor[0].numpy() for tensor in stored["rings"])
    seeds = np.random.SeedSequence((1, 0)).generate_state(3).tolist()
    env = gym.make("Humanoid-v5", terminate_when_unhealthy=False, max_episode_steps=-1)
    low, high = env.action_space.low, env.action_space.high
    first, _ = env.reset(seed=seeds[1])  # the second of the two environments
    np.testing.assert_array_equal(observations[0, 1], first.astype(np.float32))
    states = []
    for t in range(12):
        action = (actions[t, 1] + 1) / 2 * (high - low) + low
        observation, *_ = env.step(action.astype(np.float32))
        np.testing.assert_allclose(observations[t + 1, 1], observation, rtol=1e-4, atol=1e-4)
        states.append(np.concatenate([env.unwrapped.data.qpos, env.unwrapped.data.qvel]))
    egl_render.setup_gl("cpu")
    renderer = helpers.make_humanoid_renderer(64, textured=True)
    clip = clip_reward.load_clip("local-dir:tiny_clip")
    reward = clip_reward.CLIPReward(clip, ["a humanoid robot kneeling"])
    expected = reward(torch.from_numpy(renderer.render(np.stack(states)))).numpy()
    renderer.close()
    np.testing.assert_allclose(rewards[:, 1], expected, atol=2e-3)
    assert abs(expected[-1] - expected[0]) > 4e-3, "a reset's picture would score like the first"


def test_a_resumed_run_equals_the_uninterrupted_one(tmp_path):
    base = [*TINY, *SMALL, "--video-freq", 0, "--checkpoint-freq", 48]
    run(*base, "--runs-dir", tmp_path / "whole", "--total-timesteps", 120)
    run(*base, "--runs-dir", tmp_path / "half", "--total-timesteps", 72)
    half = only_run(tmp_path / "half")
    saved = json.loads((half / "args.json").read_text())
    del saved["eval_episodes"], saved["random_repeat"]  # as in runs older than these flags
    (half / "args.json").write_text(json.dumps(saved))
    run("--resume", half, "--total-timesteps", 120)
    one = torch.load(only_run(tmp_path / "whole") / "checkpoints/step_120.pt", weights_only=True)
    two = torch.load(half / "checkpoints/step_120.pt", weights_only=True)
    assert one["rollout"] == two["rollout"] == 5
    for network in ("actor", "critic", "target_critic"):
        for key, value in one[network].items():
            assert torch.equal(value, two[network][key]), (network, key)
    assert torch.equal(one["log_alpha"], two["log_alpha"])
    values, _ = scalars(half)
    assert [event.step for event in values["charts/clip_reward"]] == [24, 48, 72, 96, 120]


def test_async_rewards_are_one_rollout_behind_and_resumed_exactly(tmp_path):
    base = [*TINY, *SMALL, "--video-freq", 0, "--checkpoint-freq", 24, "--total-timesteps", 144]
    base += ["--async-rewards", "--normalize-observations", "--runs-dir"]
    run(*base, tmp_path / "whole")
    process = subprocess.Popen(command(*base, tmp_path / "half"), stdout=subprocess.PIPE, text=True)
    assert any(line.startswith("step 72 ") for line in process.stdout)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 143
    half, whole = only_run(tmp_path / "half"), only_run(tmp_path / "whole")
    checkpoints = sorted(half.glob("checkpoints/step_*.pt"), key=lambda path: int(path.stem[5:]))
    *_, before, last = [torch.load(path, weights_only=True) for path in checkpoints]
    assert last["global_step"] < 144, "too late to interrupt it"
    replay = torch.load(half / "checkpoints/replay_buffer.pt", weights_only=True)
    (ahead,) = replay["ahead"]  # played when the last checkpoint but one was made
    assert all(torch.equal(x, before["actor"][key]) for key, x in ahead["policy"].items())
    assert not all(torch.equal(x, last["actor"][key]) for key, x in ahead["policy"].items())
    run("--resume", half)
    one, two = (
        torch.load(folder / "checkpoints/step_144.pt", weights_only=True)
        for folder in (half, whole)
    )
    for network in ("actor", "critic", "target_critic"):
        assert all(torch.equal(x, two[network][key]) for key, x in one[network].items())
    assert one["history"] == two["history"] and len(one["history"]) == 6
    values, _ = scalars(half)
    assert [event.step for event in values["charts/clip_reward"]] == [24, 48, 72, 96, 120, 144]
    replay = torch.load(half / "checkpoints/replay_buffer.pt", weights_only=True)
    assert replay["ahead"] == [] and replay["count"] == 6, "nothing is played in vain"
    seen = replay["rings"][0].flatten(0, 2).double()
    assert one["actor"]["normalize.count"] == len(seen) == 6 * 13 * 2
    mean, var = one["actor"]["normalize.mean"], one["actor"]["normalize.var"]
    torch.testing.assert_close(mean.double(), seen.mean(0), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(var.double(), seen.var(0, correction=0), atol=1e-4, rtol=1e-3)


def test_any_continuous_task_through_frames(tmp_path):
    run(*TINY, *SMALL, "--env-id", "Pendulum-v1", "--total-timesteps", 48, "--runs-dir", tmp_path)
    folder = only_run(tmp_path)
    values, _ = scalars(folder)
    rewards = torch.load(folder / "checkpoints/replay_buffer.pt", weights_only=True)["rings"][2]
    assert rewards.std() > 0 and len(values["charts/clip_reward"]) == 2
    assert list((folder / "videos").glob("*.mp4"))


def test_mountain_car_from_its_state_to_its_evaluation(tmp_path):
    """No OpenGL, the goal of the task as success rate, and the best checkpoint judged by it."""
    import clip_reward
    import egl_render

    base = [*TINY, *SMALL, "--env-id", sac.MOUNTAIN_CAR, "--video-freq", 24, "--eval-episodes", 3]
    base += ["--random-repeat", 5]
    process = run(*base, "--total-timesteps", 72, "--runs-dir", tmp_path, MUJOCO_GL="disable")
    folder = only_run(tmp_path)
    values, _ = scalars(folder)
    assert [event.value for event in values["charts/success_rate"]] == [0, 0, 0]  # in 12 steps
    stored = torch.load(folder / "checkpoints/replay_buffer.pt", weights_only=True)
    observations, actions, rewards = stored["rings"]
    changes = (actions[0].diff(dim=0) != 0).all(1)[:, 0]
    assert (1 + changes.nonzero()[:, 0]).tolist() == [5, 10], "random actions held for 5 steps"
    # float32 observations are this task's very state: a fresh renderer and CLIP agree
    frames = egl_render.ClassicRenderer(sac.MOUNTAIN_CAR, 64, textured=True).render(
        observations[0, 1:, 1].double().numpy()
    )
    clip = clip_reward.load_clip("local-dir:tiny_clip")
    expected = clip_reward.CLIPReward(clip, [TINY[1]])(torch.from_numpy(frames))
    torch.testing.assert_close(rewards[0, :, 1], expected, atol=2e-3, rtol=0)

    result = json.loads((folder / "evaluation.json").read_text())
    assert result.keys() == {"episodes", "success_rate", "episodic_return", "checkpoint_step"}
    assert (result["episodes"], result["success_rate"]) == (3, 0)
    (event,) = values["eval/episodic_return"]
    assert event.step == 72 and event.value == pytest.approx(result["episodic_return"])
    assert values["eval/success_rate"][0].value == 0
    best = torch.load(folder / "checkpoints/best.pt", weights_only=True)
    assert result["checkpoint_step"] == best["global_step"]
    assert "evaluation of checkpoints/best.pt: 3 episodes, success 0 %, return" in process.stdout
    video = next((folder / "videos").glob("*_24.mp4"))
    import imageio.v2 as imageio

    assert np.stack(imageio.mimread(video)).shape[1:] == (400, 600, 3)


def test_looks_are_options(tmp_path):
    looks = ["--no-textured", "--camera", "default", "--camera-distance", 6]
    run(*TINY, *SMALL, *looks, "--total-timesteps", 24, "--runs-dir", tmp_path / "other")
    run(*TINY, *SMALL, "--total-timesteps", 24, "--video-freq", 0, "--runs-dir", tmp_path / "usual")
    other, usual = (
        torch.load(only_run(tmp_path / name) / "checkpoints/replay_buffer.pt")["rings"]
        for name in ("other", "usual")
    )
    torch.testing.assert_close(other[:2], usual[:2])  # the same random actions
    assert (other[2] - usual[2]).abs().mean() > 0.02, "seen differently, rewarded differently"


def test_ground_truth_needs_no_prompt_and_no_gl(tmp_path):
    base = ["--reward", "ground-truth", "--env-id", "HalfCheetah-v5", "--num-envs", 1]
    arguments = [*SMALL, *base, "--video-freq", 0, "--total-timesteps", 48, "--runs-dir", tmp_path]
    run(*arguments, MUJOCO_GL="disable")
    values, _ = scalars(only_run(tmp_path))
    assert "charts/clip_reward" not in values and len(values["charts/episodic_return"]) == 4
    assert "charts/success_rate" not in values and "eval/episodic_return" not in values


def test_wandb_offline(tmp_path):
    base = ["--reward", "ground-truth", "--env-id", "HalfCheetah-v5", "--track"]
    run(
        *[*SMALL, *base, "--video-freq", 0, "--total-timesteps", 48, "--runs-dir", tmp_path],
        WANDB_MODE="offline",
        WANDB_SILENT="true",
    )
    offline = list(only_run(tmp_path).glob("wandb/offline-run-*/*.wandb"))
    assert len(offline) == 1 and offline[0].stat().st_size > 1000


def test_help_lists_every_flag():
    text = run("--help").stdout
    for field in dataclasses.fields(sac.Args):
        assert "--" + field.name.replace("_", "-") in text


# ------------------------------------------------------------------------------ ending


def start_long_run(tmp_path):
    arguments = [*TINY, *SMALL, "--total-timesteps", 10**6, "--video-freq", 0]
    process = subprocess.Popen(
        command(*arguments, "--runs-dir", tmp_path),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    for line in process.stdout:
        if "clip_reward" in line and "step" in line:
            return process, helpers.descendants(process.pid)
    raise AssertionError("the run ended before its first rollout")


def test_nothing_outlives_a_killed_run(tmp_path):
    process, children = start_long_run(tmp_path)
    assert len(children) >= 3  # two environments and a reward worker
    process.kill()
    process.wait()
    assert not helpers.wait_until_gone(children, 20)


def test_sigterm_ends_a_run_with_a_checkpoint(tmp_path):
    process, children = start_long_run(tmp_path)
    time.sleep(1)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM and "--resume" in output
    assert list((only_run(tmp_path) / "checkpoints").glob("step_*.pt"))
    assert not helpers.wait_until_gone(children, 20)


# ------------------------------------------------------------------------------ bad input

PROMPT = dict(target_prompt=("a humanoid robot kneeling",))
BAD = [
    (dict(), "--target-prompt"),
    (dict(target_prompt=("",)), "--target-prompt"),
    (dict(target_prompt=("kneeling", "  ")), "--target-prompt"),
    (PROMPT | dict(reward_alpha=1.01), "reward-alpha"),
    (PROMPT | dict(reward_alpha=-0.5), "reward-alpha"),
    (PROMPT | dict(reward_alpha=float("nan")), "reward-alpha"),
    (PROMPT | dict(reward_alpha=0.5, baseline_prompt=()), "--baseline-prompt"),
    (PROMPT | dict(reward_alpha=0.5, baseline_prompt=PROMPT["target_prompt"]), "is the target"),
    (PROMPT | dict(reward_alpha=0.5, env_id=sac.MOUNTAIN_CAR), "--baseline-prompt"),
    (PROMPT | dict(entropy_coef=0.0), "--entropy-coef"),
    (PROMPT | dict(eval_episodes=-1), "--eval-episodes -1"),
    (PROMPT | dict(random_repeat=0), "--random-repeat 0"),
    (PROMPT | dict(env_id="Humanoid-v55"), "Humanoid"),
    (PROMPT | dict(env_id="Nonsense"), "no such environment"),
    (PROMPT | dict(env_id="CartPole-v1"), "use dqn_clip_classic.py"),
    (PROMPT | dict(env_id="MountainCar-v0"), "use dqn_clip_classic.py"),
    (PROMPT | dict(reward_devices=("cuda:99",)), "cuda:99 does not exist"),
    (PROMPT | dict(reward_devices=("gpu",)), "gpu"),
    (PROMPT | dict(num_envs=0), "--num-envs 0"),
    (PROMPT | dict(render_size=-4), "--render-size -4"),
    (PROMPT | dict(episode_length=0), "--episode-length"),
    (PROMPT | dict(batch_size=0), "--batch-size"),
    (PROMPT | dict(total_timesteps=0), "--total-timesteps"),
    (PROMPT | dict(clip_batch_size=0), "--clip-batch-size"),
    (PROMPT | dict(gamma=1.5), "--gamma"),
    (PROMPT | dict(tau=0.0), "--tau"),
    (PROMPT | dict(policy_lr=float("nan")), "--policy-lr"),
    (PROMPT | dict(buffer_size=10), "--buffer-size"),
    (PROMPT | dict(runs_dir="/proc/nowhere"), "--runs-dir /proc/nowhere"),
    (PROMPT | dict(runs_dir=str(ROOT / "README.md" / "runs")), "runs"),
]


@pytest.mark.parametrize("changes, message", BAD)
def test_bad_values_are_found_before_anything_slow(changes, message):
    with pytest.raises(UsageError, match=re.escape(message)) as error:
        args = sac.Args(**changes)
        sac.check_args(args)
        sac.check_env(args.env_id)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "--target-prompt"),
        (["--target-prompt", "x"], "days"),  # the default ViT-bigG-14 without a GPU
        (["--target-prompt", "x", "--clip-model", "ViT-B-32/laion2b"], "nearest"),
        (["--target-prompt", "x", "--clip-model", "local-dir:/nowhere"], "/nowhere"),
        (["--resume", "/nowhere"], "/nowhere"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments, message, tmp_path):
    if torch.cuda.is_available() and message == "days":
        pytest.skip("this machine has a GPU")
    runs = [] if "--resume" in arguments else ["--runs-dir", tmp_path]
    process = run(*arguments, *runs, code=2)
    (line,) = [line for line in process.stderr.splitlines() if line.strip()]
    assert line.startswith("error: ") and message in line
    assert not list(tmp_path.iterdir()), "nothing was started"


def test_no_gl_library_is_one_line_and_exit_code_2(tmp_path):
    script = f"""
import runpy, sys, egl_render
egl_render._egl_devices = lambda: []
egl_render.ctypes.util.find_library = lambda name: None
sys.argv = ["sac_clip_humanoid.py", *{TINY!r}, "--runs-dir", {str(tmp_path)!r}]
runpy.run_path({str(ROOT / "sac_clip_humanoid.py")!r}, run_name="__main__")
"""
    process = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT
    )
    assert process.returncode == 2
    assert process.stderr.startswith("error: ") and "apt-get install -y libegl1" in process.stderr


# ------------------------------------------------------------------------------ parts


def test_humanoid_episodes_have_a_fixed_length_and_little_info():
    from benchmarks.pipeline import crossing_bytes

    env = sac.make_env("Humanoid-v5", scene="states")()
    env.reset(seed=0)
    for _ in range(120):  # it has long fallen
        _, reward, terminated, truncated, info = env.step(env.action_space.sample())
        assert not terminated and not truncated
    data = env.unwrapped.data
    assert data.qpos[2] < 1.0
    np.testing.assert_array_equal(info["states"], np.concatenate([data.qpos, data.qvel]))
    assert crossing_bytes("Humanoid-v5") <= 1024


@pytest.mark.parametrize("env_id, baseline", [("Humanoid-v5", 1), ("Ant-v5", 0)])
def test_the_humanoid_has_a_baseline_prompt_of_its_own(env_id, baseline, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["sac", "--env-id", env_id])
    assert sac.parse_args().baseline_prompt == ("a humanoid robot",) * baseline
    monkeypatch.setattr(sys, "argv", ["sac", "--env-id", env_id, "--baseline-prompt", "a thing"])
    assert sac.parse_args().baseline_prompt == ("a thing",)


def swing(observation):
    """Full force along the velocity: reaches the goal from anywhere within 150 steps."""
    return np.array([1.0 if observation[1] >= 0 else -1.0], np.float32)


def test_the_goal_of_the_mountain_car_absorbs():
    env = sac.make_env(sac.MOUNTAIN_CAR, scene="states")()
    plain = gym.make(sac.MOUNTAIN_CAR).unwrapped  # Gymnasium's own, for comparison
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


class Swinger(torch.nn.Module):
    """An actor's interface around `swing`, with a spread that an evaluation must not use."""

    def forward(self, observations):
        mean = torch.where(observations[:, 1:2] >= 0, 20.0, -20.0)
        return mean, torch.full_like(mean, 3.0)

    def to_env(self, actions):
        return actions


def test_evaluation_plays_the_mean_action_on_its_own_starts():
    args = sac.Args(env_id=sac.MOUNTAIN_CAR, num_envs=4, episode_length=200)
    result = sac.evaluate(args, Swinger(), 6, "cpu")  # not a multiple of the environments
    assert result["episodes"] == 6 and result["success_rate"] == 1
    # 100 at the goal, -0.1 for every step at full force until then
    assert 100 - 20 < result["episodic_return"] < 100 - 5
    assert result == sac.evaluate(args, Swinger(), 6, "cpu")
    args.episode_length = 20  # too short
    assert sac.evaluate(args, Swinger(), 6, "cpu")["success_rate"] == 0
    args.env_id = "Pendulum-v1"
    assert "success_rate" not in sac.evaluate(args, Swinger(), 1, "cpu")


def small_space():
    return gym.spaces.Box(np.array([-2.0, 0.0], np.float32), np.array([2.0, 1.0], np.float32))


def test_log_density_of_the_squashed_gaussian():
    torch.manual_seed(0)
    actor = sac.Actor(5, small_space(), 16)
    observations = torch.randn(64, 5)
    mean, log_std = actor(observations)
    actions, log_density = actor.sample(observations)
    assert actions.abs().max() < 1
    expected = torch.distributions.TransformedDistribution(
        torch.distributions.Normal(mean.double(), log_std.double().exp()),
        torch.distributions.TanhTransform(),
    ).log_prob(actions.double())
    torch.testing.assert_close(log_density.double(), expected.sum(1), atol=1e-2, rtol=1e-3)
    scaled = actor.to_env(torch.tensor([[-1.0, -1.0], [1.0, 1.0]]))
    torch.testing.assert_close(scaled, torch.tensor([[-2.0, 0.0], [2.0, 1.0]]))


def test_networks_see_normalised_observations():
    torch.manual_seed(0)
    plain, norm = sac.Actor(3, small_space(), 16), sac.Actor(3, small_space(), 16, normalize=True)
    norm.load_state_dict(plain.state_dict(), strict=False)
    critic = sac.TwinCritic(3, 2, 16)
    norm_critic = sac.TwinCritic(3, 2, 16, normalize=norm.normalize)
    norm_critic.load_state_dict(critic.state_dict(), strict=False)
    # parts of unequal size, a mean far from 0, a constant, and something a thousand times larger
    seen = torch.randn(70, 2, 3) * torch.tensor([1.0, 0.0, 1000.0]) + torch.tensor([300.0, 7, 0])
    for part in seen.split([10, 1, 59]):
        norm.normalize.add(part)
    flat = seen.flatten(0, 1).double()
    expected = (flat - flat.mean(0)) / (flat.var(0, correction=0) + 1e-4).sqrt()
    expected = expected.float()
    torch.testing.assert_close(norm.normalize(flat.float()), expected, atol=1e-3, rtol=1e-3)
    for mine, usual in zip(norm(flat.float()), plain(expected), strict=True):
        torch.testing.assert_close(mine, usual, atol=1e-3, rtol=1e-3)
    actions = torch.rand(len(flat), 2)
    torch.testing.assert_close(
        norm_critic(flat.float(), actions), critic(expected, actions), atol=1e-3, rtol=1e-3
    )
    outlier = norm.normalize(torch.tensor([[1e9, 7.0, -1e9]]))
    torch.testing.assert_close(outlier, torch.tensor([[10.0, 0.0, -10.0]]))


def test_critics_learn_the_soft_bellman_target_through_time_limits():
    torch.manual_seed(0)
    actor = sac.Actor(3, small_space(), 16)
    critic, target = sac.TwinCritic(3, 2, 16), sac.TwinCritic(3, 2, 16)
    batch = (torch.randn(8, 3), torch.randn(8, 3), torch.rand(8, 2) * 2 - 1, torch.randn(8))
    with torch.no_grad():
        torch.manual_seed(1)
        next_actions, log_density = actor.sample(batch[1])
        inputs = torch.cat([batch[1], next_actions], 1)
        value = torch.minimum(target.qf1(inputs), target.qf2(inputs))[:, 0] - 0.2 * log_density
        y = batch[3] + 0.9 * value  # for every transition, also the last ones of episodes
        q1 = critic.qf1(torch.cat([batch[0], batch[2]], 1))[:, 0]
        expected = (q1 - y).square().mean()
    optimizer = torch.optim.SGD(critic.parameters(), lr=0.0)
    torch.manual_seed(1)
    alpha = torch.tensor(0.2)
    losses, values = sac.update_critic(batch, actor, critic, target, optimizer, alpha, 0.9)
    torch.testing.assert_close(losses[0], expected)
    torch.testing.assert_close(values[0], q1.mean())


def test_the_actor_step_improves_the_actor_and_spares_the_critics():
    torch.manual_seed(0)
    actor, critic = sac.Actor(3, small_space(), 16), sac.TwinCritic(3, 2, 16)
    observations = torch.randn(256, 3)
    optimizer = torch.optim.Adam(actor.parameters(), lr=1e-2)
    before = {key: value.clone() for key, value in critic.state_dict().items()}
    losses = [
        sac.update_actor(observations, actor, critic, optimizer, torch.tensor(0.01))[0]
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
    copy = sac.ReplayBuffer(2, steps, envs, 1, 1, device="cpu")
    copy.load_state_dict(buffer.state_dict())
    torch.manual_seed(3)
    one = buffer.sample(50)
    torch.manual_seed(3)
    assert all(torch.equal(a, b) for a, b in zip(one, copy.sample(50)))


def test_foreign_and_damaged_runs_are_not_resumed(tmp_path, monkeypatch):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints/step_1.pt").touch()
    monkeypatch.setattr(sys, "argv", ["sac_clip_humanoid.py", "--resume", str(tmp_path)])
    for content, message in (
        ('{"exp_name": "dqn_clip_classic", "double": true}', "another script, dqn_clip_classic"),
        ('{"exp_name": "sac_clip_humanoid"}', "it has no checkpoints/replay_buffer.pt"),
        ('{"exp_name": "sac', "args.json is damaged"),
    ):
        (tmp_path / "args.json").write_text(content)
        with pytest.raises(UsageError, match=message):
            sac.parse_args()
