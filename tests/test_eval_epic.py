"""EPIC against tables, and the commands as a user runs them."""

import csv
import dataclasses
import functools
import json
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import helpers
import numpy as np
import pytest
import torch
import tyro
from PIL import Image

import clip_reward
import dqn_clip_classic as dqn
import egl_render
import eval_epic
import sac_clip_humanoid as sac
from benchmarks import gallery, paid
from clip_reward import UsageError
from evaluation import datasets, figures, judges
from training.flags import flags_of

ROOT = Path(eval_epic.__file__).resolve().parent


def command(*words):
    """Run a subcommand as a user does; returns the finished process."""
    line = [sys.executable, str(ROOT / "eval_epic.py"), *map(str, words)]
    return subprocess.run(line, env=os.environ, capture_output=True, text=True)


# ------------------------------------------------------------------------------ EPIC


class TabularMDP:
    """Random rewards R[s, a, s'] with distributions of S, A, S' by whole numbers of samples."""

    def __init__(self, seed, states=5, actions=3):
        self.rng = np.random.default_rng(seed)
        self.shape = (states, actions, states)
        self.gamma = self.rng.uniform(0.1, 0.99)
        # the expectation over (S, A, S') of a joint sample is the mean over this list
        self.samples = [self.rng.integers(n, size=40) for n in self.shape]
        self.transitions = [self.rng.integers(n, size=300) for n in self.shape]

    def potential(self):
        """gamma phi(s') - phi(s) as a table."""
        phi = self.rng.normal(size=self.shape[0])
        return np.broadcast_to(self.gamma * phi[None, None] - phi[:, None, None], self.shape)

    def direct(self, a, b):
        """Definition 4.1 and 4.7 of arXiv 2006.13900, by loops over tables and weights."""
        n_states, n_actions, _ = self.shape
        weight = np.zeros((n_actions, n_states))  # of (A, S')
        for action, later in zip(*self.samples[1:]):
            weight[action, later] += 1 / len(self.samples[0])
        joint = np.zeros(self.shape)
        for s, action, later in zip(*self.samples):
            joint[s, action, later] += 1 / len(self.samples[0])
        values = []
        for R in (a, b):
            expected = [(weight * R[s]).sum() for s in range(n_states)]  # E R(s, A, S')
            table = np.empty(self.shape)
            for s in range(n_states):
                for action in range(n_actions):
                    for later in range(n_states):
                        shaping = self.gamma * expected[later] - expected[s]
                        table[s, action, later] = R[s, action, later] + shaping
            values.append(table - self.gamma * (joint * R).sum())
        coverage = np.zeros(self.shape)
        np.add.at(coverage, tuple(self.transitions), 1 / len(self.transitions[0]))
        means = [(coverage * v).sum() for v in values]
        x, y = (v - m for v, m in zip(values, means))
        rho = (coverage * x * y).sum()
        rho /= math.sqrt((coverage * x * x).sum() * (coverage * y * y).sum())
        return math.sqrt(1 - rho) / math.sqrt(2)


@pytest.mark.parametrize("seed", range(4))
def test_epic_of_rewards_of_the_next_state_is_that_of_the_definition(seed):
    mdp = TabularMDP(seed, states=9)
    f, g = mdp.rng.normal(size=9), mdp.rng.integers(2, size=9)
    later = mdp.transitions[2]
    distance = eval_epic.epic_distance(f[later], g[later])

    def of_next(values):
        return np.broadcast_to(values[None, None], mdp.shape)

    for mdp.gamma in (0.0, 0.5, 0.999):
        assert distance == pytest.approx(mdp.direct(of_next(f), of_next(g)), abs=1e-9)
        shaped = of_next(f) + mdp.potential()  # rewards with the same optimal policies
        assert distance == pytest.approx(mdp.direct(shaped, of_next(g)), abs=1e-9)


def test_goal_based_values_are_relative():
    x, y = np.random.default_rng(0).normal(size=(2, 1000))
    assert eval_epic.epic_distance(x, 2 * x + 5) == pytest.approx(0, abs=1e-6)
    assert eval_epic.epic_distance(x, -x) == pytest.approx(1, abs=1e-6)
    rho = np.corrcoef(x, x + y)[0, 1]
    expected = math.sqrt(1 - rho) / math.sqrt(2)
    for scale in (1, 1e-7, 1e-30, 1e20):
        assert eval_epic.epic_distance(scale * x, x + y) == pytest.approx(expected, abs=1e-12)
        interval = eval_epic.epic_interval(scale * x, x + y, np.arange(1000), 50)
        assert interval == pytest.approx(eval_epic.epic_interval(x, x + y, np.arange(1000), 50))
        for constant in (np.full(1000, 0.3), 0.1 + 0.2 * np.ones(1000), 0 * x):
            assert math.isnan(eval_epic.epic_distance(scale * constant, x))


def test_the_bootstrap_interval_covers_and_knows_that_states_of_an_episode_are_alike():
    rng = np.random.default_rng(4)
    truth = math.sqrt((1 - 0.6) / 2)
    covered, widths = 0, {"episodes": [], "states": []}
    for trial in range(60):
        # 40 episodes of 10 equal states each: 40 independent draws, not 400
        pair = rng.multivariate_normal([0, 0], [[1, 0.6], [0.6, 1]], size=40)
        x, y = np.repeat(pair, 10, axis=0).T
        episodes = np.repeat(np.arange(40), 10)
        distance, low, high = eval_epic.epic_interval(x, y, episodes, 300, trial)
        assert low <= distance <= high
        covered += low <= truth <= high
        widths["episodes"].append(high - low)
        _, low, high = eval_epic.epic_interval(x, y, np.arange(400), 300, trial)
        widths["states"].append(high - low)
    assert covered >= 52  # 57 expected
    ratio = np.mean(widths["episodes"]) / np.mean(widths["states"])
    assert ratio == pytest.approx(math.sqrt(10), rel=0.15)
    assert all(map(math.isnan, eval_epic.epic_interval(x, np.ones(400), episodes)))
    exact = eval_epic.epic_interval(x, 3 * x - 1, episodes)
    assert exact == pytest.approx((0, 0, 0), abs=1e-5)
    # resamples without a goal state are left out, and of a single episode nothing is known
    rare = np.zeros(400)
    rare[:10] = 1
    assert np.isfinite(eval_epic.epic_interval(x, rare, episodes, 300)).all()
    assert np.isnan(eval_epic.epic_interval(x, y, np.zeros(400))[1:]).all()


# ------------------------------------------------------------------------------ runs to judge


def make_args(script, size=32, textured=True, **settings):
    """A script's Args, which draw small pictures."""
    render = egl_render.RenderArgs(render_size=size, textured=textured)
    reward = {k: settings.pop(k) for k in ("reward", "target_prompt") if k in settings}
    reward = clip_reward.RewardArgs(clip_model="local-dir:tiny_clip", **reward)
    return script.Args(reward=reward, render=render, **settings)


def save_run(folder, args, checkpoints, key):
    """A run folder with the given {step: network}; the last one is best.pt as well."""
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "args.json").write_text(json.dumps(flags_of(args)))
    for step, network in checkpoints.items():
        saved = {key: network.state_dict(), "global_step": step}
        torch.save(saved, folder / "checkpoints" / f"step_{step}.pt")
        torch.save(saved, folder / "checkpoints" / "best.pt")
    return folder


def set_layers(net, *weights):
    """The three linear layers of a network, with no bias."""
    with torch.no_grad():
        for layer, weight in zip((net[0], net[2], net[4]), weights):
            layer.weight.copy_(weight)
            layer.bias.zero_()


def new_network(kind, args):
    env = sys.modules[kind.__module__].make_env(args)()
    return kind(env.observation_space.shape[0], env.action_space, args)


@pytest.fixture(scope="session")
def runs(tmp_path_factory):
    """{name: run folder} of policies made by hand (or at random: the humanoid's)."""
    folder = tmp_path_factory.mktemp("runs")
    made = {}
    # Q-networks that push CartPole's cart under the falling pole, or away from it
    for name, sign, reward in (("good", 1, "clip"), ("bad", -1, "ground-truth")):
        args = make_args(dqn, episode_length=30, hidden_size=2, reward=reward)
        network = new_network(dqn.QNetwork, args)
        lean = sign * torch.tensor([0.05, 0.1, 1.0, 0.4])
        set_layers(network.net, torch.stack([-lean, lean]), torch.eye(2), torch.eye(2))
        made[name] = save_run(folder / name, args, {64: network}, "q_network")
    # an actor that pushes MountainCar's car the way it is going
    args = make_args(sac, env_id="MountainCarContinuous-v0", episode_length=150, hidden_size=2)
    actor = new_network(sac.Actor, args)
    ways = torch.tensor([[0.0, 1e3], [0.0, -1e3]])
    set_layers(actor.net, ways, torch.eye(2), torch.tensor([[1.0, -1.0], [0.0, 0.0]]))
    made["car"] = save_run(folder / "car", args, {10: actor}, "actor")
    settings = {"episode_length": 6, "hidden_size": 8, "normalize_observations": True}
    settings |= {"textured": False, "target_prompt": ("a humanoid robot standing up",)}
    args = make_args(sac, **settings)
    torch.manual_seed(0)
    checkpoints = {step: new_network(sac.Actor, args) for step in (100, 2000)}
    made["humanoid"] = save_run(folder / "humanoid", args, checkpoints, "actor")
    return made


@pytest.fixture(scope="session")
def data(runs, tmp_path_factory):
    """{name: dataset's file}."""
    folder = tmp_path_factory.mktemp("data")
    made = {name: folder / f"{name}.npz" for name in ("humanoid", "car", "cart")}
    for name in ("humanoid", "car"):
        eval_epic.collect("run", made[name], eval_epic.Look(), runs[name], episodes=2)
    look = eval_epic.Look(render_size=64)
    eval_epic.collect("uniform", made["cart"], look, states=150)
    return made


@pytest.fixture
def cart(data, tmp_path):
    """The CartPole dataset in a folder of its own."""
    return Path(shutil.copy(data["cart"], tmp_path / "cart.npz"))


# ------------------------------------------------------------------------------ collect


def test_a_dataset_of_a_run_holds_what_was_played(runs, data):
    held = datasets.load_dataset(data["humanoid"])
    assert held.states.shape == (2 * 2 * 6, 47)
    assert held.checkpoint_step.tolist() == [100] * 12 + [2000] * 12
    assert held.episode.tolist() == np.repeat(range(4), 6).tolist()
    assert held.step.tolist() == list(range(6)) * 4
    assert np.isfinite(held.env_reward).all()
    assert (held.success == -1).all() and eval_epic.task_of(None, held.flags).name == "standing"
    # the same states out of Gymnasium itself, by the policy's mean action
    args = eval_epic.load_run(runs["humanoid"])
    env = sac.make_env(args)()
    (path,) = eval_epic.checkpoint_paths(runs["humanoid"], ["2000"])
    spaces = env.observation_space, env.action_space
    network, step = eval_epic.load_policy(path, args, *spaces)
    assert step == 2000
    seed = int(np.random.SeedSequence((0, 2, 1)).generate_state(2)[0])
    observation, _ = env.reset(seed=seed)
    for t in range(6):
        action = network.best_actions(observation[None])[0]
        observation, reward, _, _, info = env.step(action)
        np.testing.assert_allclose(held.states[12 + t], info["states"], atol=1e-6)
        assert held.env_reward[12 + t] == pytest.approx(reward, rel=1e-4)
    # and its pictures are the run's, or what was wished for instead
    renderer = sac.make_renderer(args)
    with eval_epic.pictures(held) as pool:
        picture = pool.render(held.states[17:18])
        np.testing.assert_array_equal(picture, renderer.render(held.states[17:18]))
    renderer.close()


def test_what_is_not_said_about_pictures_is_as_the_run_had_it(runs, tmp_path):
    look = eval_epic.Look(camera_azimuth=145.0, camera_lookat=(0.0, 0.0, 0.8))
    words = {"run": runs["humanoid"], "episodes": 1, "checkpoints": ("best",), "render": look}
    eval_epic.collect("run", tmp_path / "d.npz", **words)
    make_renderer = eval_epic.renderer_of(datasets.load_dataset(tmp_path / "d.npz"))
    expected = {"render_size": 32, "textured": False, "camera": "paper", "camera_azimuth": (145.0,)}
    render = make_renderer.args[0].render
    assert expected.items() <= vars(render).items() and tuple(render.camera_lookat) == (0, 0, 0.8)


def test_a_goal_that_absorbs_is_a_success_of_the_dataset(data):
    held = datasets.load_dataset(data["car"])
    assert (held.success == 1).all() and (held.states[held.step == 149, 0] >= 0.45).all()
    assert held.env_reward.max() > 90


def test_uniform_states_and_poses_are_what_they_say(data, tmp_path):
    held = datasets.load_dataset(data["cart"])
    assert held.states.shape == (150, 4) and np.abs(held.states).max(0)[2] > 3
    own = (np.abs(held.states[:, 2]) <= np.radians(12)) * 1.0
    np.testing.assert_array_equal(held.env_reward, own)
    look = eval_epic.Look(render_size=32)
    eval_epic.collect("poses", tmp_path / "p.npz", look, per_pose=1)
    library = datasets.load_dataset(tmp_path / "p.npz")
    assert len(library) == 15 and library.pose[0] == "kneeling"
    for name in judges.HUMANOID:
        passed = judges.TASKS[name].judge(library.states)
        with_arms = {"standing": {"arms_raised", "hands_on_hips", "arms_crossed"}}
        assert set(library.pose[passed]) == {name} | with_arms.get(name, set())
    eval_epic.sheet(tmp_path / "p.npz", judge="splits", count=3)
    with Image.open(tmp_path / "p" / "sheets" / "splits.png") as sheet:
        top = [sheet.getpixel((x * (120 + 2 * figures.BORDER) + 1, 60)) for x in range(4)]
    assert top == [figures.GOOD, *[figures.BAD] * 3]
    with Image.open(tmp_path / "p" / "sheets" / "states.png") as sheet:
        assert sheet.width == 10 * (120 + 2 * figures.BORDER)


def test_exploring_policies_thinned_episodes_and_chosen_checkpoints(runs, tmp_path):
    def made(name, **settings):
        words = {"run": runs["humanoid"], "episodes": 2, "every": 3, "checkpoints": ("best",)}
        path = tmp_path / f"{name}.npz"
        eval_epic.collect("run", path, eval_epic.Look(), **words | settings)
        return datasets.load_dataset(path)

    once, again, other = made("a", explore=True), made("b", explore=True), made("c", seed=1)
    np.testing.assert_array_equal(once.states, again.states)
    assert np.abs(once.states - other.states).max() > 0.01
    assert once.step.tolist() == [2, 5] * 2 and set(once.checkpoint_step) == {2000}
    mean = made("d", checkpoints=("2000", "100"))
    assert mean.checkpoint_step.tolist() == [2000] * 4 + [100] * 4
    assert np.abs(mean.states[:4] - once.states).max() > 0.01
    with pytest.raises(UsageError, match="DQN has no random policy"):
        made("e", run=runs["good"], explore=True)


def test_collect_overwrites_nothing(cart):
    before = cart.read_bytes()
    with pytest.raises(UsageError, match="exists already"):
        eval_epic.collect("uniform", cart, eval_epic.Look())
    assert cart.read_bytes() == before


# ------------------------------------------------------------------------------ epic


def write_labels(path, rows):
    with open(path, "w", newline="") as file:
        csv.writer(file).writerows([datasets.LABEL_COLUMNS, *rows])
    return path


def read_table(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="session")
def cart_rewards(data):
    """CLIP rewards of the cart's states {alpha: [150]}, without eval_epic."""
    task = judges.TASKS["cartpole"]
    clip = clip_reward.load_clip("local-dir:tiny_clip")
    reward = clip_reward.CLIPReward(clip, [task.target_prompt], [task.baseline_prompt])
    renderer = egl_render.ClassicRenderer("CartPole-v1", 64)
    frames = renderer.render(datasets.load_dataset(data["cart"]).states)
    rewards = {}
    for reward.alpha in (0.0, 1.0):
        rewards[reward.alpha] = reward(frames).double().numpy()
    return rewards


def expected_distance(rewards, labels):
    return math.sqrt((1 - np.corrcoef(rewards, labels)[0, 1]) / 2)


def run_epic(path, folder, alphas=(0.0,), target_prompt=None, **settings):
    """Rows of the table that `epic` writes to a folder beside the dataset, by alpha."""
    rewards = eval_epic.Rewards(reward_alpha=alphas, clip_model=("local-dir:tiny_clip",))
    rewards.target_prompt = (target_prompt,) if target_prompt else ()
    eval_epic.epic(path, rewards, **settings)
    rows = read_table(path.with_suffix("") / folder / "epic.csv")
    return {float(row["reward_alpha"]): row for row in rows}


def test_epic_of_a_model_to_the_judge(cart, cart_rewards, capsys):
    goal = judges.TASKS["cartpole"].judge(datasets.load_dataset(cart).states)
    table = run_epic(cart, "epic_judge", alphas=(0.0, 1.0))
    for alpha, values in cart_rewards.items():
        expected = expected_distance(values, goal)
        assert float(table[alpha]["epic"]) == pytest.approx(expected, abs=1e-4)
        assert float(table[alpha]["low"]) < expected < float(table[alpha]["high"])
        assert table[alpha]["dataset"] == "cart" and table[alpha]["states"] == "150"
        weights = clip_reward.load_clip("local-dir:tiny_clip").model.parameters()
        count = sum(w.numel() for w in weights)  # without batch norm's, which it folds away
        assert int(table[alpha]["parameters"]) == pytest.approx(count, rel=1e-3)
    out = capsys.readouterr().out
    assert f"{float(table[1.0]['epic']):.4f} (" in out and "above their mean: " in out
    for name in ("epic_alpha", "epic_scaling", "histograms"):
        with Image.open(cart.with_suffix("") / "epic_judge" / f"{name}.png") as image:
            assert len(np.unique(np.asarray(image.convert("L")))) > 20
    # and CartPole's own reward is the judge's verdict here
    assert run_epic(cart, "epic_env", labels="env")[0.0]["epic"] == table[0.0]["epic"]


def test_epic_to_a_persons_labels_and_to_ones_own_judge(cart, cart_rewards, tmp_path):
    answers = {index: int(index % 3 == 0) for index in range(0, 100, 2)}
    rows = [("cart", "frame", k, "cartpole", label) for k, label in answers.items()]
    rows += [("someone-elses", "frame", 9999, "cartpole", 1)]
    path = write_labels(tmp_path / "mine.csv", rows)
    row = run_epic(cart, "epic_mine", labels=str(path))[0.0]
    expected = expected_distance(cart_rewards[0.0][list(answers)], list(answers.values()))
    assert float(row["epic"]) == pytest.approx(expected, abs=1e-4) and row["states"] == "50"
    (tmp_path / "my.py").write_text("def leans(states):\n    return states[:, 2] > 0.5\n")
    task, words = judges.TASKS["cartpole"], {"judge": f"{tmp_path}/my.py:leans"}
    words |= {"target_prompt": task.target_prompt}
    row = run_epic(cart, "epic_judge", **words)[0.0]
    leans = datasets.load_dataset(cart).states[:, 2] > 0.5
    assert row["task"] == "leans" and 0.1 < leans.mean() < 0.9
    expected = expected_distance(cart_rewards[0.0], leans)
    assert float(row["epic"]) == pytest.approx(expected, abs=1e-4)


# ------------------------------------------------------------------------------ success


def judged(run, **settings):
    """Print and write the success of a run: (the newest folder, its table)."""
    eval_epic.success(run, **settings)
    folder = max(run.glob("success*"), key=lambda path: path.stat().st_ctime_ns)
    return folder, read_table(folder / "episodes.csv")


def test_success_of_a_good_and_a_bad_policy_side_by_side(runs, capsys):
    folder, rows = judged(runs["good"], compare=runs["bad"], episodes=12, videos=4)
    out = capsys.readouterr().out
    assert "success 100 % (12 of 12 episodes), 95 % interval 76 to 100 %" in out
    assert "success 0 % (0 of 12 episodes), 95 % interval 0 to 24 %" in out
    assert "ground truth" in out and "successful steps 100 %" in out
    assert f"judged video: {folder}/episodes.mp4" in out
    assert f"contact sheet: {folder}/contact_sheet.png" in out
    page = (folder.parent / "index.html").read_text()
    assert "Judged: 100 % of 12 episodes" in page
    assert f'src="{folder.name}/episodes.mp4"' in page
    summary = json.loads((folder / "success.json").read_text())
    assert [entry["success_rate"] for entry in summary] == [1.0, 0.0]
    assert [row["good_steps"] for row in rows[:12]] == ["30"] * 12
    assert all(0 < int(row["good_steps"]) < 30 for row in rows[12:])
    assert (folder / "histogram.png").stat().st_size > 5000
    width, height = (160 + 2 * figures.BORDER + more for more in (0, 2 * figures.LINE + 2))
    with Image.open(folder / "contact_sheet.png") as sheet:
        assert sheet.size == (10 * width, 8 * height)
    import imageio.v2 as imageio

    reader = imageio.get_reader(folder / "episodes.mp4")
    frames = np.stack([frame for frame in reader]).astype(int)
    assert frames.shape == (30, height, 8 * width, 3)
    edge = frames[:, 40, 1]  # of the first episode's picture
    assert (edge[:, 1] - edge[:, 0] > 60).all(), "green in every step of a good policy"
    edge = frames[-1, 40, 4 * width + 1 :: width]
    assert (edge[:, 0] - edge[:, 1] > 60).all(), "red where the pole lies"
    words = frames[:, height - 2 * figures.LINE : height - 2, 8 : width - 8]
    assert np.ptp(words, 3).max() < 40, "no colour in what is said of the episode"


def test_a_steps_colour_and_the_episodes_verdict_are_two_things():
    frames, steps = np.zeros((3, 120, 120, 3), np.uint8), np.array([1.0, 0.0, 1.0])
    lost, won = (figures.judged_video([(frames, steps, verdict)]) for verdict in (False, True))
    assert [tuple(frame[60, 1]) for frame in won] == [figures.GOOD, figures.BAD, figures.GOOD]
    np.testing.assert_array_equal(won[:, :120], lost[:, :120])
    assert (won[:, 120:] != lost[:, 120:]).any((1, 2, 3)).all()


def test_success_of_sac_on_the_mountain_and_on_the_humanoid(runs, capsys):
    folder, _ = judged(runs["car"], episodes=3, videos=0)
    assert "success 100 % (3 of 3" in capsys.readouterr().out
    assert not (folder / "episodes.mp4").exists()
    folder, rows = judged(runs["humanoid"], episodes=3, videos=2, checkpoint="100")
    assert "standing" in capsys.readouterr().out  # six steps from the start: it still stands
    for row in rows:
        assert int(row["success"]) == (int(row["good_steps"]) >= 3) and row["steps"] == "6"
    assert (folder / "episodes.mp4").is_file()


def test_ones_own_judge_and_a_folder_for_every_result(runs, tmp_path, capsys):
    run = tmp_path / "car"
    shutil.copytree(runs["car"], run, ignore=shutil.ignore_patterns("success*"))
    words = '"""It is left of -0.5."""'
    text = f"def on_the_left(states):\n    {words}\n    return states[:, 0] < -0.5\n"
    (tmp_path / "my.py").write_text(text)
    settings = {"episodes": 2, "videos": 0}
    judged(run, judge=f"{tmp_path}/my.py:on_the_left", **settings)
    out = capsys.readouterr().out
    assert "on_the_left: It is left of -0.5." in out and "0 %" in out
    first = (run / "success_best" / "episodes.csv").read_bytes()
    judged(run, **settings)
    judged(run, checkpoint="10", **settings)
    assert (run / "success_best" / "episodes.csv").read_bytes() == first
    made = {folder.name for folder in run.glob("success*")}
    assert made == {"success_best", "success_best_2", "success_10"}
    assert "success 100 % (2 of 2" in capsys.readouterr().out


def test_code_that_only_a_dataset_names_is_not_run(tmp_path):
    (tmp_path / "evil.py").write_text("raise SystemExit('owned')")
    columns = eval_epic.datasets.uniform_columns("CartPole-v1", 20, 0)
    args = dqn.Args(judge=f"{tmp_path}/evil.py:judge")
    dataset = eval_epic.make_dataset(args, columns, {"source": "uniform"})
    eval_epic.datasets.save_dataset(dataset, tmp_path / "data.npz")
    for command in (eval_epic.epic, eval_epic.success, eval_epic.label):
        more = {"reward": eval_epic.Rewards()} if command is eval_epic.epic else {}
        with pytest.raises(UsageError, match="evil.py:judge; to run it say --judge"):
            command(dataset=tmp_path / "data.npz", **more)


def test_a_person_takes_the_judges_place(data, tmp_path, capsys):
    path = Path(shutil.copy(data["humanoid"], tmp_path / "humanoid.npz"))
    verdict = judges.TASKS["standing"].judge(datasets.load_dataset(path).states)
    # frames: 3 of 4 answers in episode 0, 1 of 3 in episode 1, none in episode 2; episode 3: yes
    rows = [("frame", k, int(k != 2)) for k in range(4)]
    rows += [("frame", 6, 1), ("frame", 7, 0), ("frame", 8, 0), ("episode", 3, 1)]
    labels = [("humanoid", *row[:2], "standing", row[2]) for row in rows]
    labels = write_labels(tmp_path / "mine.csv", labels)
    for words in ({"human": labels}, {}):
        eval_epic.success(dataset=path, **words)
    out = capsys.readouterr().out
    table = read_table(tmp_path / "humanoid" / "success_mine" / "episodes.csv")
    assert [row["success"] for row in table] == ["1", "0", "1"]
    assert [row["steps"] for row in table] == ["4", "3", "0"]
    assert "step 100: success 50 % (1 of 2" in out and "step 2000: success 100 % (1 of 1" in out
    table = read_table(tmp_path / "humanoid" / "success_judge" / "episodes.csv")
    expected = verdict.reshape(4, 6).mean(1) >= 0.5
    assert [row["success"] == "1" for row in table] == expected.tolist()


# ------------------------------------------------------------------------------ bad input


def test_help_keeps_the_lines_of_its_examples_and_errors_are_one_line(tmp_path):
    text = command("--help").stdout
    assert "    python eval_epic.py epic --dataset data/kneeling.npz --judge kneeling \\\n" in text
    done = command("success", "--run", tmp_path)
    lines = done.stderr.strip().splitlines()
    assert done.returncode == 2 and len(lines) == 1 and "no args.json" in lines[0], done.stderr


def foreign(folder, **files):
    folder.mkdir()
    for name, text in files.items():
        (folder / name.replace("_", ".")).write_text(text)
    return folder


def refused(act, *words, **settings):
    with pytest.raises(UsageError) as caught:
        act(*words, **settings)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_missing_foreign_and_damaged_runs(runs, tmp_path):
    message = functools.partial(refused, judged)
    assert "no args.json" in message(tmp_path / "nowhere")
    assert "damaged" in message(foreign(tmp_path / "a", args_json="{"))
    args = json.loads((runs["good"] / "args.json").read_text()) | {"leap": True}
    assert "it has leap" in message(foreign(tmp_path / "e", args_json=json.dumps(args)))
    assert "no step_7.pt; best or one of these steps: 64" in message(runs["good"], checkpoint="7")
    assert "CartPole-v1 has cartpole" in message(runs["good"], judge="kneeling")
    assert "has no cartpole" in message(runs["good"], compare=runs["car"])
    broken = shutil.copytree(runs["good"], tmp_path / "c")
    best = broken / "checkpoints" / "best.pt"
    best.write_bytes(best.read_bytes()[:500])
    assert "best.pt is damaged or no checkpoint" in message(broken)
    shutil.copy(runs["humanoid"] / "checkpoints" / "best.pt", best)
    assert "best.pt is not a checkpoint of this run" in message(broken)
    args = json.loads((runs["humanoid"] / "args.json").read_text())
    args["target_prompt"] = ["a humanoid robot dancing"]
    dancing = foreign(tmp_path / "d", args_json=json.dumps(args))
    assert "say what to judge by with --judge: Humanoid-v5 has kneeling, lotus" in message(dancing)
    assert "needs either --run" in message(None)


def test_datasets_and_labels_that_do_not_do(cart, data, tmp_path):
    rewards = eval_epic.Rewards(clip_model=("local-dir:tiny_clip",))

    def message(path=cart, rows=None, **settings):
        if rows is not None:
            settings["labels"] = str(write_labels(tmp_path / "labels.csv", rows))
        epic = functools.partial(eval_epic.epic, **{"reward": rewards} | settings)
        text = refused(epic, path)
        assert not path.with_suffix("").exists()
        return text

    def row(index, label, unit="frame", task="cartpole", name="cart"):
        return (name, unit, index, task, label)

    assert "all 2 labels on" in message(rows=[row(0, 1), row(1, 1)])
    assert "no label for cartpole" in message(rows=[row(0, 1, name="other")])
    assert "it has kneeling on" in message(rows=[row(0, 1, task="kneeling")])
    assert "line 3: " in message(rows=[row(0, 1), row(150, 0)])
    assert "not a frame or episode of" in message(rows=[row(0, 1), row(150, 0)])
    assert "and 0 or 1: frame 0, 'yes'" in message(rows=[row(0, "yes")])
    assert "all 0 labels on states" in message(rows=[row(4, 1, "episode"), row(5, 0, "episode")])
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    assert "the columns are dataset,unit" in message(labels=str(tmp_path / "other.csv"))
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00\x80" * 50)
    assert "not a CSV file" in message(labels=str(tmp_path / "binary.csv"))
    wrong = dataclasses.replace(rewards, reward_alpha=(0.0, 2.0))
    assert "outside [0, 1]" in message(reward=wrong)
    assert "CartPole-v1 has cartpole" in message(judge="lotus")
    copy = tmp_path / "copy.npz"
    for damage in (cart.read_bytes()[:300], b"not a dataset", b""):
        copy.write_bytes(damage)
        assert "damaged or not what" in refused(datasets.load_dataset, copy)
    assert "No such file" in refused(datasets.load_dataset, tmp_path / "none.npz")


# ------------------------------------------------------------------------------ landscape


def test_landscape_writes_every_value_of_its_figure(tmp_path, capsys):
    rewards = eval_epic.Rewards(reward_alpha=(0.0, 1.0), clip_model=("local-dir:tiny_clip",))
    settings = {"points": 37, "render_size": 64}
    eval_epic.landscape(rewards, out=tmp_path / "land.png", **settings)
    rows = read_table(tmp_path / "land.csv")
    assert len(rows) == 3 * 2 * 37 and (tmp_path / "land.png").stat().st_size > 20_000
    cart = [row for row in rows if row["env_id"] == "CartPole-v1" and row["reward_alpha"] == "0.0"]
    values = np.array([float(row["value"]) for row in cart])
    np.testing.assert_allclose(values, np.linspace(-np.pi, np.pi, 37), atol=1e-5)
    goal = np.array([row["is_goal"] == "1" for row in cart])
    np.testing.assert_array_equal(goal, np.abs(values) <= np.radians(12))
    assert capsys.readouterr().out.count("Pearson correlation") == 6


# ------------------------------------------------------------------------------ prompts


def test_auc_and_its_interval():
    rng = np.random.default_rng(0)
    for _ in range(5):
        x, good = rng.integers(0, 9, 80), rng.random(80) < 0.3
        pairs = x[good][:, None] - x[~good][None]
        expected = (pairs > 0).mean() + 0.5 * (pairs == 0).mean()
        assert eval_epic.auc(x, good) == pytest.approx(expected)
    assert math.isnan(eval_epic.auc(x, np.ones(80))) and eval_epic.auc(good, good) == 1
    value, low, high = eval_epic.interval(eval_epic.auc, x, good, np.arange(80), 200)
    assert low < value < high
    # eighty states of eight episodes, all ten of an episode alike, know less than eighty others
    x, good = np.repeat(rng.integers(0, 9, 8), 10), np.repeat(np.arange(8) < 3, 10)
    widths = []
    for episodes in np.arange(80) // 10, np.arange(80):
        _, low, high = eval_epic.interval(eval_epic.auc, x, good, episodes, 200)
        widths.append(high - low)
    assert widths[0] > 1.5 * widths[1]


def test_prompts_compares_every_combination_and_its_command_runs(tmp_path):
    words = ["--task", "kneeling", "--clip-model", "local-dir:tiny_clip", "--render-size", 64]
    words += ["--azimuths", 180, 90, 120, "--alphas", 0, 1, "--per-pose", 6]
    words += ["--prompts", "a humanoid robot kneeling", "it's a robot that is lying down"]
    made = helpers.run(ROOT / "eval_epic.py", "prompts", *words, "--out", tmp_path / "p").stdout
    out = tmp_path / "p_kneeling"
    rows = read_table(out / "prompts.csv")
    cameras = {row["camera_azimuth"] for row in rows}
    several = {"180 90", "180 120", "90 120", "180 90 120"}
    assert len(rows) == 2 * 2 * 7 and cameras == {"180", "90", "120"} | several
    for row in rows:
        for name in ("auc", "epic"):
            value, low, high = (float(row[key]) for key in (name, f"{name}_low", f"{name}_high"))
            assert 0 <= low <= value <= high <= 1
    ranks = [(-round(float(row["auc"]), 3), float(row["epic"])) for row in rows]
    assert ranks == sorted(ranks) and rows[0]["prompt"] == "a humanoid robot kneeling"
    assert float(rows[0]["auc"]) > 0.95 > 0.8 > float(rows[-1]["auc"])
    # one of them again, by other means
    row = next(r for r in rows if r["camera_azimuth"] == "180 90" and r["reward_alpha"] == "1.0")
    states = datasets.facing_columns(6)["states"]
    good = judges.TASKS["kneeling"].judge(states)
    args = sac.Args()
    args.render = egl_render.RenderArgs(render_size=64, camera_azimuth=(180.0, 90.0))
    words = (row["prompt"],), ("a humanoid robot",), 1.0
    reward = clip_reward.CLIPReward(clip_reward.load_clip("local-dir:tiny_clip"), *words)
    renderer = sac.make_renderer(args)
    expected = reward(renderer.render(states)).numpy()
    renderer.close()
    assert float(row["auc"]) == pytest.approx(eval_epic.auc(expected, good), abs=2e-3)
    assert float(row["epic"]) == pytest.approx(eval_epic.epic_distance(expected, good), abs=2e-3)
    for name in ("prompts.png", "states.png"):
        assert Image.open(out / name).size[0] > 500
    script, *flags = shlex.split(made.splitlines()[-1])[1:]
    short = "--num-envs 1 --episode-length 4 --total-timesteps 4 --learning-starts 4 --video-freq 0"
    short += " --gradient-steps 1 --batch-size 4 --hidden-size 8 --buffer-size 4"
    helpers.run(ROOT / script, *flags, *short.split(), "--runs-dir", tmp_path / "runs")


def test_the_command_of_prompts_trains_what_was_measured(tmp_path, capsys):
    scene = Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8))
    scene.save(tmp_path / "it's a scene.png")
    picture = str(tmp_path / "it's a scene.png")
    model = eval_epic.Model(clip_model="local-dir:tiny_clip", baseline_image=(picture,))
    seen = {"camera_distance": 2.5, "camera_lookat": (0.0, 0.0, 0.8), "camera": "default"}
    look = eval_epic.Look(render_size=64, textured=False, camera_track=False, **seen)
    words = {"prompts": ("a robot",), "alphas": (0.25,), "azimuths": (-120.0,), "per_pose": 3}
    eval_epic.prompts(model, look, task="kneeling", out=tmp_path / "p", **words)
    (row,) = read_table(tmp_path / "p_kneeling/prompts.csv")
    assert row["camera_azimuth"] == "-120"
    line = capsys.readouterr().out.splitlines()[-1]
    args = tyro.cli(sac.Args, args=shlex.split(line)[2:], config=(tyro.conf.OmitArgPrefixes,))
    reward = clip_reward.RewardArgs(
        target_prompt=("a robot",), reward_alpha=0.25, baseline_image=(picture,)
    )
    assert args.reward == dataclasses.replace(reward, clip_model="local-dir:tiny_clip")
    expected = {"render_size": 64, "textured": False, "camera_track": False} | seen
    assert args.render == egl_render.RenderArgs(**expected, camera_azimuth=(-120.0,))


def test_prompts_of_a_classic_task_has_no_cameras(tmp_path):
    model = eval_epic.Model(clip_model="local-dir:tiny_clip")
    look = eval_epic.Look(render_size=64)
    eval_epic.prompts(model, look, task="cartpole", per_pose=10, out=tmp_path / "p")
    rows = read_table(tmp_path / "p_cartpole/prompts.csv")
    assert len(rows) == 3 * 3 and {row["camera_azimuth"] for row in rows} == {""}
    assert float(rows[0]["auc"]) > 0.95
    prompts = functools.partial(eval_epic.prompts, model)
    assert "has no camera" in refused(prompts, look, task="cartpole", azimuths=(90.0,))
    turned = eval_epic.Look(camera_azimuth=(90.0,))
    assert "are --azimuths" in refused(prompts, turned, task="kneeling")
    assert "--task" in refused(prompts, look)


def test_prompts_on_states_of_ones_own_task(tmp_path, capsys):
    """Labelled by a function of one's own, drawn and named as the dataset's run had it."""
    args = sac.Args(env_id="Reacher-v5")
    args.render = egl_render.RenderArgs(render_size=64, camera_azimuth=(90.0, 30.0))
    states = np.random.default_rng(0).uniform(-1.5, 1.5, (40, 8))
    columns = {"states": states, "episode": np.arange(40) // 4}
    datasets.save_dataset(eval_epic.make_dataset(args, columns, {}), tmp_path / "reach.npz")
    (tmp_path / "mine.py").write_text("def left(states):\n    return states[:, 0] > 0.5\n")
    model, look = eval_epic.Model(clip_model="local-dir:tiny_clip"), eval_epic.Look()
    own = {"dataset": tmp_path / "reach.npz", "judge": f"{tmp_path}/mine.py:left"}
    own |= {"prompts": ("an arm", "an arm to the left"), "alphas": (0.0,)}
    eval_epic.prompts(model, look, **own, out=tmp_path / "p")
    rows = read_table(tmp_path / "p_left/prompts.csv")
    assert {row["camera_azimuth"] for row in rows} == {"90", "30", "90 30"} and len(rows) == 6
    assert "--env-id Reacher-v5" in capsys.readouterr().out.splitlines()[-1]
    row = next(row for row in rows if row["camera_azimuth"] == "90 30")
    clip = clip_reward.load_clip("local-dir:tiny_clip")
    renderer = sac.make_renderer(args)
    expected = clip_reward.CLIPReward(clip, [row["prompt"]])(renderer.render(states)).numpy()
    renderer.close()
    assert float(row["auc"]) == pytest.approx(eval_epic.auc(expected, states[:, 0] > 0.5), abs=0.02)
    # EPIC of a picture as the goal, both cameras, with the run's own reduction and another
    goal = tmp_path / "goal.png"
    Image.fromarray(np.zeros((64, 64, 3), np.uint8)).save(goal)
    rewards = eval_epic.Rewards(target_image=(str(goal),), clip_model=("local-dir:tiny_clip",))
    found = []
    for reduction in None, "mean", "min":
        rewards = dataclasses.replace(rewards, reward_alpha=(0.0,), view_reduction=reduction)
        eval_epic.epic(tmp_path / "reach.npz", rewards, judge=own["judge"])
        found.append(re.search(r"0\.00  ([\d.]+)", capsys.readouterr().out)[1])
    assert found[0] == found[1] != found[2]


def test_the_gallery_shows_each_run_in_the_middle_of_an_episode(runs, tmp_path):
    out = tmp_path / "tasks.png"
    gallery.main([runs["humanoid"]] * 2, out, checkpoint="100", size=96)
    picture = np.asarray(Image.open(out))
    one = 96 + 2 * figures.BORDER
    assert picture.shape == (one + 3 * figures.LINE + 2, 4 * one, 3)
    assert tuple(picture[0, 0]) == tuple(picture[0, one]) == figures.BAD  # it still drops
    assert picture[20:100, 20:100].std() > 20 and (picture[:, 2 * one :] == 255).all()


def test_what_a_policy_is_paid_stands_beside_the_whole_pose(runs, tmp_path, capsys):
    from tiny_clip.data import degrees
    from tiny_clip.poses import describe

    out, run = tmp_path / "paid.png", runs["humanoid"]
    paid.main([run], out, checkpoint="100", step=5, size=64)
    found = re.findall(r": ([\d.]+) of it, paid (-?[\d.]+)", capsys.readouterr().out)
    (share, reward), (whole, most) = np.array(found, float)
    seeds = np.random.SeedSequence((0, 4, 0)).generate_state(20)
    played = eval_epic.rollout(eval_epic.load_run(run), run / "checkpoints/step_100.pt", seeds)
    at = played["states"][played["step"] == 4]
    assert len(at) == 20
    assert share == pytest.approx(degrees(describe(at[:, :24]))["standing"].mean(), abs=0.006)
    assert whole > 0.97 > share and most > reward > -0.3
    picture = np.asarray(Image.open(out))
    assert tuple(picture[0, 0]) == figures.BAD and tuple(picture[0, -1]) == figures.GOOD
