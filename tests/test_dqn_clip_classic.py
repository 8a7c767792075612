"""The script as a user runs it, and its parts against independent computations."""

import dataclasses
import json
import math
import re
import signal
import subprocess
import sys
from pathlib import Path

import gymnasium as gym
import helpers
import numpy as np
import pytest
import torch
from helpers import only_run, run_script, scalars

import dqn_clip_classic as dqn
import egl_render
from clip_reward import UsageError

ROOT = Path(dqn.__file__).parent
UPRIGHT = "pole vertically upright on top of the cart"
TINY = [
    "--target-prompt",
    UPRIGHT,
    "--clip-model",
    "local-dir:tiny_clip",
    "--reward-devices",
    "cpu",
]
SMALL = [
    *("--num-envs", "2", "--episode-length", "12", "--render-size", "64", "--hidden-size", "32"),
    *("--batch-size", "16", "--gradient-steps", "6", "--learning-starts", "24"),
    *("--target-network-frequency", "4", "--buffer-size", "60"),
    *("--eval-episodes", "3"),
]
TRUTH = [*SMALL, "--reward", "ground-truth", "--video-freq", "0"]


def command(*arguments):
    return [sys.executable, str(ROOT / "dqn_clip_classic.py"), *map(str, arguments)]


def run(*arguments, code=0, **environment):
    return run_script(command(*arguments), code, **environment)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished CLIP run on CartPole-v1: 4 rollouts of 2 x 12 steps."""
    runs_dir = tmp_path_factory.mktemp("runs")
    freq = ["--total-timesteps", 96, "--checkpoint-freq", 48, "--video-freq", 48]
    process = run(*TINY, *SMALL, *freq, "--buffer-size", 200, "--runs-dir", runs_dir)
    return only_run(runs_dir), process


# ------------------------------------------------------------------------------ a run


def test_a_run_leaves_everything_that_is_promised(finished):
    import imageio.v2 as imageio

    folder, process = finished
    assert re.fullmatch(r"CartPole-v1__dqn_clip_classic__1__\d+", folder.name)
    values, images = scalars(folder)
    for tag in (
        *("charts/clip_reward", "charts/episodic_clip_return", "charts/episodic_return"),
        *("charts/SPS", "charts/success_rate", "charts/epsilon", "losses/td_loss"),
        *("time/physics_s", "time/render_s", "time/clip_s", "time/update_s", "losses/q_values"),
    ):
        assert all(math.isfinite(event.value) for event in values[tag]), tag
    assert [event.step for event in values["charts/success_rate"]] == [24, 48, 72, 96]
    for mean, total in zip(values["charts/clip_reward"], values["charts/episodic_clip_return"]):
        assert total.value == pytest.approx(12 * mean.value, rel=1e-5)
    args = json.loads((folder / "args.json").read_text())
    assert args["target_prompt"] == [UPRIGHT] and args["render_size"] == 64
    kept = {path.name for path in (folder / "checkpoints").iterdir()}
    assert kept == {"best.pt", "replay_buffer.pt", "step_48.pt", "step_96.pt"}
    videos = sorted((folder / "videos").glob("*.mp4"))
    assert [path.name for path in videos] == ["step_48.mp4", "step_96.mp4"]
    assert np.stack(imageio.mimread(videos[0])).shape == (12, 400, 600, 3)
    assert len(next(iter(images.values()))) == 2, "videos in TensorBoard"
    assert "first tenth" in process.stdout and str(folder) in process.stdout
    assert len(re.findall(r"clip_reward -?\d", process.stdout)) == 4
    result = json.loads((folder / "evaluation.json").read_text())
    assert result["episodes"] == 3 and result["checkpoint_step"] in (48, 72, 96)
    for name in ("success_rate", "episodic_return"):
        (event,) = values[f"eval/{name}"]
        assert event.step == 96 and event.value == pytest.approx(result[name])
    line = "evaluation of checkpoints/best.pt: 3 episodes, success "
    assert line + f"{100 * result['success_rate']:.0f} %, return" in process.stdout


def test_every_reward_is_that_of_its_own_next_state(finished):
    """Replays the first rollout's actions in Gymnasium's own CartPole and scores the states."""
    import clip_reward

    folder, _ = finished
    stored = torch.load(folder / "checkpoints/replay_buffer.pt", weights_only=True)
    columns = [ring[:24].unflatten(0, (12, 2)).numpy() for ring in stored["rings"]]
    observations, next_observations, actions, rewards, terminations = columns
    seeds = np.random.SeedSequence((1, 0)).generate_state(3).tolist()
    env = gym.make("CartPole-v1").unwrapped
    first, _ = env.reset(seed=seeds[1])  # the second of the two environments
    np.testing.assert_array_equal(observations[0, 1], first)
    states = []
    for t in range(12):  # too few steps to fall
        observation, *_ = env.step(int(actions[t, 1]))
        np.testing.assert_allclose(next_observations[t, 1], observation, atol=1e-6)
        states.append(env.state)
    assert not terminations.any()
    clip = clip_reward.load_clip("local-dir:tiny_clip")
    reward = clip_reward.CLIPReward(clip, [UPRIGHT])
    frames = egl_render.ClassicRenderer("CartPole-v1", 64).render(np.stack(states))
    expected = reward(torch.from_numpy(frames)).numpy()
    np.testing.assert_allclose(rewards[:, 1], expected, atol=2e-3)


def test_the_evaluation_is_that_of_the_best_policy(finished):
    """Plays it again in Gymnasium's own CartPole, by hand."""
    folder, _ = finished
    best = torch.load(folder / "checkpoints/best.pt", weights_only=True)
    weights = [tensor.numpy() for tensor in best["q_network"].values()]
    returns = []
    for seed in np.random.SeedSequence((1, 0, 1)).generate_state(3).tolist():
        env = gym.make("CartPole-v1").unwrapped
        x, _ = env.reset(seed=seed)
        returns.append(0)
        for _ in range(12):
            for i in (0, 2):
                x = np.maximum(weights[i] @ x + weights[i + 1], 0)
            x, *_ = env.step(int(np.argmax(weights[4] @ x + weights[5])))
            returns[-1] += abs(x[2]) <= 12 * math.pi / 180 and abs(x[0]) <= 2.4
    result = json.loads((folder / "evaluation.json").read_text())
    assert result["episodic_return"] == pytest.approx(np.mean(returns))
    assert result["success_rate"] == np.mean(np.array(returns) == 12)


def interrupt(number, at, *arguments):
    """Send the script a signal when it reports step `at`; returns its exit code."""
    process = subprocess.Popen(command(*arguments), stdout=subprocess.PIPE, text=True)
    assert any(line.startswith(f"step {at:,} ") for line in process.stdout)
    process.send_signal(number)
    process.communicate(timeout=60)
    return process.returncode


@pytest.mark.parametrize("overlap", ["--no-async-rewards", "--async-rewards"])
def test_a_run_killed_twice_and_resumed_equals_the_uninterrupted_one(overlap, tmp_path):
    base = [*TRUTH, overlap, "--total-timesteps", 3600, "--checkpoint-freq", 480, "--anneal-lr"]
    base += ["--best-window", 3, "--layer-norm"]
    run(*base, "--runs-dir", tmp_path / "whole")
    whole = only_run(tmp_path / "whole")
    assert interrupt(signal.SIGTERM, 720, *base, "--runs-dir", tmp_path / "half") == 143
    half = only_run(tmp_path / "half")
    assert interrupt(signal.SIGKILL, 1920, "--resume", half) == -signal.SIGKILL
    assert not (half / "checkpoints/step_3600.pt").exists(), "too late to interrupt it"
    run("--resume", half)
    paths = [folder / "checkpoints/step_3600.pt" for folder in (half, whole)]
    one, two = (torch.load(path, weights_only=True) for path in paths)
    assert one.keys() == two.keys() and one["updates"] == 150 * 6
    for network in ("q_network", "target_network"):
        assert all(torch.equal(x, two[network][key]) for key, x in one[network].items())
    for key in ("global_step", "rollout", "updates", "best_reward", "history", "scores"):
        assert one[key] == two[key], key
    assert (half / "evaluation.json").read_text() == (whole / "evaluation.json").read_text()
    values, _ = scalars(half)
    assert [event.step for event in values["charts/epsilon"]] == list(range(24, 3601, 24))


def test_mountain_car_with_textures(tmp_path):
    """Scores the stored states itself, as pictures of the landscape."""
    import clip_reward

    target, baseline = "a car at the peak of the mountain", "a car in the mountain"
    prompts = ["--target-prompt", target, "--baseline-prompt", baseline, "--reward-alpha", 0.5]
    base = [*prompts, *TINY[2:], *SMALL, "--env-id", "MountainCar-v0", "--video-freq", 48]
    run(*base, "--total-timesteps", 48, "--runs-dir", tmp_path)
    folder = only_run(tmp_path)
    stored = torch.load(folder / "checkpoints/replay_buffer.pt", weights_only=True)["rings"]
    reward = clip_reward.make_clip_reward("cpu", TINY[3], [target], [baseline], 0.5)
    renderer = egl_render.ClassicRenderer("MountainCar-v0", 64, textured=True)
    expected = reward(torch.from_numpy(renderer.render(stored[1].double().numpy())))
    torch.testing.assert_close(stored[3], expected, atol=2e-3, rtol=0)
    assert stored[3].std() > 0 and list((folder / "videos").glob("*.mp4"))


def test_gymnasium_s_own_ends_with_terminate(tmp_path):
    """Random actions let the pole fall after some 20 steps; no step after that is stored."""
    base = [*TRUTH, "--terminate", "--episode-length", 100]
    base += ["--learning-starts", 10**6, "--buffer-size", 1000]
    run(*base, "--total-timesteps", 400, "--runs-dir", tmp_path)
    folder = only_run(tmp_path)
    stored = torch.load(folder / "checkpoints/replay_buffer.pt", weights_only=True)
    observations, next_observations, _, rewards, terminations = stored["rings"]
    assert stored["count"] == len(rewards) >= 400 and (rewards == 1).all()
    failed = (next_observations[:, 2].abs() > 12 * math.pi / 180) | (
        next_observations[:, 0].abs() > 2.4
    )
    assert torch.equal(failed, terminations.bool()) and failed.sum() > 8
    assert observations[:, 2].abs().max() <= 12 * math.pi / 180
    values, _ = scalars(folder)
    assert values["charts/episodic_return"][-1].step == len(rewards)
    total = sum(2 * event.value for event in values["charts/episodic_return"])
    assert total == pytest.approx(len(rewards)), "no step is counted twice"
    assert not (folder / "checkpoints/best.pt").exists(), "nothing was learned"


def test_wandb_offline(tmp_path):
    run(
        *TRUTH,
        "--track",
        "--total-timesteps",
        48,
        "--runs-dir",
        tmp_path,
        WANDB_MODE="offline",
        WANDB_SILENT="true",
    )
    offline = list(only_run(tmp_path).glob("wandb/offline-run-*/*.wandb"))
    assert len(offline) == 1 and offline[0].stat().st_size > 1000


def test_help_lists_every_flag(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["dqn_clip_classic.py", "--help"])
    with pytest.raises(SystemExit, match="0"):
        dqn.parse_args()
    text = capsys.readouterr().out
    for field in dataclasses.fields(dqn.Args):
        assert "--" + field.name.replace("_", "-") in text


def test_sigterm_leaves_a_checkpoint_and_no_process(tmp_path):
    arguments = [*TINY, *SMALL, "--total-timesteps", 10**6, "--video-freq", 0]
    process = subprocess.Popen(
        command(*arguments, "--runs-dir", tmp_path),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert any("clip_reward" in line and "step" in line for line in process.stdout)
    children = helpers.descendants(process.pid)
    assert children, "a reward worker"
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM and "--resume" in output
    assert list((only_run(tmp_path) / "checkpoints").glob("step_*.pt"))
    assert not helpers.wait_until_gone(children, 20)


# ------------------------------------------------------------------------------ bad input

PROMPT = dict(target_prompt=(UPRIGHT,))
BAD = [
    (dict(), "--target-prompt"),
    (dict(target_prompt=("  ",)), "--target-prompt"),
    (PROMPT | dict(reward_alpha=1.01), "reward-alpha"),
    (PROMPT | dict(reward_alpha=float("nan")), "reward-alpha"),
    (PROMPT | dict(reward_alpha=0.5), "--baseline-prompt"),
    (PROMPT | dict(reward_alpha=0.5, baseline_prompt=(UPRIGHT,)), "--baseline-prompt"),
    (PROMPT | dict(eval_episodes=-1), "--eval-episodes"),
    (PROMPT | dict(best_window=0), "--best-window"),
    (PROMPT | dict(terminate=True), "--terminate"),
    (PROMPT | dict(env_id="CartPole-v11"), "CartPole-v1 and MountainCar-v0"),
    (PROMPT | dict(env_id="Acrobot-v1"), "MountainCar-v0"),
    (PROMPT | dict(env_id="Pendulum-v1"), "sac_clip_humanoid.py"),
    (PROMPT | dict(env_id="MountainCarContinuous-v0"), "sac_clip_humanoid.py"),
    (PROMPT | dict(reward_devices=("cuda:99",)), "cuda:99 does not exist"),
    (PROMPT | dict(num_envs=0), "--num-envs 0"),
    (PROMPT | dict(render_size=-4), "--render-size -4"),
    (PROMPT | dict(episode_length=0), "--episode-length"),
    (PROMPT | dict(batch_size=0), "--batch-size"),
    (PROMPT | dict(total_timesteps=0), "--total-timesteps"),
    (PROMPT | dict(target_network_frequency=0), "--target-network-frequency"),
    (PROMPT | dict(exploration_fraction=1.5), "--exploration-fraction"),
    (PROMPT | dict(end_e=-0.1), "--end-e"),
    (PROMPT | dict(gamma=1.0), "--gamma"),
    (PROMPT | dict(tau=0.0), "--tau"),
    (PROMPT | dict(learning_rate=float("nan")), "--learning-rate"),
    (PROMPT | dict(buffer_size=10), "--buffer-size"),
    (PROMPT | dict(runs_dir="/proc/nowhere"), "--runs-dir /proc/nowhere"),
]


@pytest.mark.parametrize("changes, message", BAD)
def test_bad_values_are_found_before_anything_slow(changes, message):
    with pytest.raises(UsageError, match=re.escape(message)) as error:
        dqn.check_args(dqn.Args(**changes))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--target-prompt", "x"], "days"),  # the default ViT-bigG-14 without a GPU
        (["--target-prompt", "x", "--env-id", "Pendulum-v1"], "sac_clip_humanoid.py"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments, message, tmp_path):
    if torch.cuda.is_available() and message == "days":
        pytest.skip("this machine has a GPU")
    process = run(*arguments, "--runs-dir", tmp_path, code=2)
    (line,) = [line for line in process.stderr.splitlines() if line.strip()]
    assert line.startswith("error: ") and message in line
    assert not list(tmp_path.iterdir()), "nothing was started"


def test_what_cannot_be_resumed(finished, tmp_path, monkeypatch):
    folder, _ = finished
    other = tmp_path / "other"
    (other / "checkpoints").mkdir(parents=True)
    (other / "args.json").write_text('{"exp_name": "sac_clip_humanoid", "policy_lr": 1}')
    for arguments, message in (
        (["/nowhere"], "/nowhere: not the folder of a run"),
        ([str(other)], "no checkpoint there"),
        ([str(folder), "--gamma", "0.5"], "--gamma was 0.99 in the run to resume"),
    ):
        monkeypatch.setattr(sys, "argv", ["dqn_clip_classic.py", "--resume", *arguments])
        with pytest.raises(UsageError, match=re.escape(message)):
            dqn.parse_args()
    (other / "checkpoints/step_1.pt").touch()
    monkeypatch.setattr(sys, "argv", ["dqn_clip_classic.py", "--resume", str(other)])
    with pytest.raises(UsageError, match="another script, sac_clip_humanoid"):
        dqn.parse_args()
    (other / "args.json").write_text('{"exp_name": "dqn_clip_classic"}')
    with pytest.raises(UsageError, match="it has no checkpoints/replay_buffer.pt"):
        dqn.parse_args()
    for damaged in ("", "{", "[1]"):
        (other / "args.json").write_text(damaged)
        with pytest.raises(UsageError, match="args.json is damaged"):
            dqn.parse_args()
    monkeypatch.setattr(sys, "argv", [*sys.argv[:2], str(folder), "--total-timesteps", "200"])
    args = dqn.parse_args()
    assert args.total_timesteps == 200 and args.hidden_size == 32


# ------------------------------------------------------------------------------ environments


def test_cartpole_goes_on_clamped_and_wrapped():
    env = dqn.make_env("CartPole-v1")
    observation, _ = env.reset(seed=0)
    assert env.success
    angles, positions, rewards = [], [], []
    for _ in range(600):  # pushes to the right until the cart stands at the end of the track
        observation, reward, terminated, truncated, _ = env.step(1)
        assert not terminated and not truncated
        np.testing.assert_array_equal(observation, np.float32(env.unwrapped.state))
        assert env.observation_space.contains(observation)
        good = abs(observation[2]) <= env.unwrapped.theta_threshold_radians
        if abs(observation[0]) < 2.4:
            assert reward == float(good)
        angles.append(observation[2])
        positions.append(observation[0])
        rewards.append(reward)
    assert positions[-1] == np.float32(2.4) and max(positions) <= np.float32(2.4)
    assert max(angles) > 2 and min(angles) < -2 and np.abs(angles).max() <= math.pi + 1e-6
    assert not env.success and 0 < sum(rewards) < 600
    env.reset(seed=0)
    assert env.success


def test_cartpole_before_a_failure_is_gymnasium_s_own():
    ours, theirs = dqn.make_env("CartPole-v1"), gym.make("CartPole-v1")
    ours.reset(seed=4)
    theirs.reset(seed=4)
    for action in (0, 1) * 8:
        one, two = ours.step(action), theirs.step(action)
        np.testing.assert_allclose(one[0], two[0], atol=1e-6)
        assert one[1] == two[1] == 1.0
    assert ours.success
    ours.unwrapped.state = np.array([0.0, 0.0, 3.1, 8.0])
    observation, *_ = ours.step(0)  # 3.1 + 0.02 * 8 = 3.26, one turn back
    assert observation[2] == pytest.approx(3.26 - 2 * math.pi, abs=1e-5) and not ours.success
    ours.unwrapped.state = np.array([-2.39, -3.0, 0.0, 0.0])
    observation, *_ = ours.step(0)
    assert observation[0] == np.float32(-2.4) and observation[1] == 0


def test_mountain_car_s_goal_is_absorbing():
    env = dqn.make_env("MountainCar-v0")
    env.reset(seed=0)
    env.unwrapped.state = np.array([0.48, 0.05])
    observation, reward, terminated, _, _ = env.step(2)
    assert observation[0] > 0.5 and reward == -1 and not terminated and env.success
    for action in (0, 1, 2) * 5:
        later, reward, terminated, truncated, _ = env.step(action)
        np.testing.assert_array_equal(later, observation)
        assert reward == 0 and not terminated and not truncated
    env.reset(seed=0)
    assert not env.success
    for _ in range(250):  # beyond Gymnasium's own limit
        _, reward, terminated, truncated, _ = env.step(1)
        assert reward == -1 and not terminated and not truncated
    assert not env.success


# ------------------------------------------------------------------------------ parts


def test_the_update_learns_the_bellman_target_through_time_limits():
    torch.manual_seed(0)
    q_network, target = dqn.QNetwork(3, 2, 16), dqn.QNetwork(3, 2, 16)
    rewards = torch.tensor([0.3, -0.2, 5.0, 0.1])
    actions, ends = torch.tensor([0, 1, 1, 0]), torch.tensor([0.0, 0.0, 1.0, 1.0])
    batch = (torch.randn(4, 3), torch.randn(4, 3), actions, rewards, ends)
    losses, chosen = [], []
    for i in range(4):  # one transition after the other, in plain Python
        value = q_network.net(batch[0][i])[actions[i]].item()
        chooses, judges = q_network.net(batch[1][i]).tolist(), target.net(batch[1][i]).tolist()
        later = judges[0] if chooses[0] > chooses[1] else judges[1]  # double DQN
        error = value - (rewards[i].item() + (0.9 * later if ends[i] == 0 else 0.0))
        losses.append(0.5 * error**2 if abs(error) < 1 else abs(error) - 0.5)
        chosen.append(value)
    optimizer = torch.optim.SGD(q_network.parameters(), lr=0.1)
    before = {key: value.clone() for key, value in target.state_dict().items()}
    loss, mean = dqn.update(batch, q_network, target, optimizer, 0.9, 10.0)
    assert loss.item() == pytest.approx(np.mean(losses), rel=1e-5)
    assert mean.item() == pytest.approx(np.mean(chosen), rel=1e-5)
    again, _ = dqn.update(batch, q_network, target, optimizer, 0.9, 10.0)
    assert again < loss
    assert all(torch.equal(before[key], value) for key, value in target.state_dict().items())


def test_without_double_the_target_network_chooses_as_well():
    torch.manual_seed(0)
    q_network, target = dqn.QNetwork(3, 2, 16, True), dqn.QNetwork(3, 2, 16, True)
    here, after = torch.randn(4, 3), torch.randn(4, 3)
    actions, rewards = torch.tensor([0, 1, 1, 0]), torch.tensor([0.3, -0.2, 0.1, 0.4])
    chosen = q_network(here)[range(4), actions].detach().numpy()
    errors = chosen - (rewards.numpy() + 0.9 * target(after).detach().numpy().max(1))
    assert np.abs(errors).max() < 1
    optimizer = torch.optim.SGD(q_network.parameters(), lr=0.1)
    batch = (here, after, actions, rewards, torch.zeros(4))
    loss, _ = dqn.update(batch, q_network, target, optimizer, 0.9, 10.0, double=False)
    assert loss.item() == pytest.approx((0.5 * errors**2).mean(), rel=1e-4)
    assert len(list(q_network.parameters())) == 10, "two layer norms of two each"


def test_a_long_gradient_is_cut():
    torch.manual_seed(0)
    q_network, target = dqn.QNetwork(3, 2, 16), dqn.QNetwork(3, 2, 16)
    batch = (torch.randn(8, 3) * 100, torch.randn(8, 3), torch.zeros(8, dtype=torch.int64))
    batch += (torch.full((8,), 1e3), torch.zeros(8))
    before = torch.nn.utils.parameters_to_vector(q_network.parameters()).clone()
    optimizer = torch.optim.SGD(q_network.parameters(), lr=1.0)
    dqn.update(batch, q_network, target, optimizer, 0.9, 0.5)
    after = torch.nn.utils.parameters_to_vector(q_network.parameters())
    assert (after - before).norm().item() == pytest.approx(0.5, rel=1e-3)


def test_replay_keeps_transitions_together_across_the_ring():
    buffer = dqn.ReplayBuffer(10, 1, "cpu")
    for start in (0, 4, 8, 12):  # 16 transitions: the first 6 are replaced
        code = np.arange(start, start + 4)
        columns = (code[:, None], code[:, None] + 0.5, code % 3, code + 0.25, code % 2 == 0)
        buffer.add(*columns)
    here, after, actions, rewards, terminations = buffer.sample(4000)
    code = here[:, 0]
    assert set(code.tolist()) == set(range(6, 16))
    torch.testing.assert_close(after[:, 0], code + 0.5)
    torch.testing.assert_close(rewards, code + 0.25)
    assert torch.equal(actions, code.long() % 3) and torch.equal(terminations, 1 - code % 2)
    copy = dqn.ReplayBuffer(10, 1, "cpu")
    copy.load_state_dict(buffer.state_dict())
    torch.manual_seed(3)
    one = buffer.sample(50)
    torch.manual_seed(3)
    assert copy.count == 16
    assert all(torch.equal(a, b) for a, b in zip(one, copy.sample(50)))


def test_epsilon_falls_and_stays():
    values = [dqn.linear_schedule(1.0, 0.1, 100, step) for step in (0, 50, 100, 10**6)]
    assert values == pytest.approx([1.0, 0.55, 0.1, 0.1])
    assert dqn.linear_schedule(1.0, 0.1, 0, 1) == pytest.approx(0.1)
