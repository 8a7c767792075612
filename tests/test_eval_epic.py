"""EPIC against tables, and the commands as a user runs them."""

import csv
import dataclasses
import functools
import html
import json
import logging
import math
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import urllib.parse
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
import tyro
from helpers import ROOT, TINY, environment, only_run, run
from PIL import Image
from scipy import stats

import clip_reward
import dqn_clip_classic as dqn
import eval_epic
import sac_clip_humanoid as sac
from clip_reward import RunError, UsageError
from environments import judges
from environments.classic import ClassicRenderer
from evaluation import compare, datasets, figures, rewards
from evaluation import runs as played
from evaluation.metrics import auc, epic_distance, gap, interval, spearman
from tiny_clip.data import facing_columns

epic_interval = functools.partial(interval, epic_distance)
MODEL = eval_epic.Rewards(clip_model=(TINY,), reward_alpha=(0.0,))


@pytest.fixture
def command(monkeypatch, capfd):
    """A function that runs `eval_epic.py` with these words in this process, and returns what it
    printed to stdout and stderr; its exit code has to be `code`."""

    def act(*words, code=0):
        monkeypatch.setattr(sys, "argv", ["eval_epic.py", *map(str, words)])
        capfd.readouterr()
        ended = 0
        try:
            runpy.run_path(eval_epic.__file__, run_name="__main__")
        except SystemExit as end:
            ended = end.code
        printed = capfd.readouterr()
        assert ended == code, printed
        return printed

    return act


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
    distance = epic_distance(f[later], g[later])

    def of_next(values):
        return np.broadcast_to(values[None, None], mdp.shape)

    for mdp.gamma in (0.0, 0.5, 0.999):
        assert distance == pytest.approx(mdp.direct(of_next(f), of_next(g)), abs=1e-9)
        shaped = of_next(f) + mdp.potential()  # rewards with the same optimal policies
        assert distance == pytest.approx(mdp.direct(shaped, of_next(g)), abs=1e-9)


def test_goal_based_values_are_relative():
    x, y = np.random.default_rng(0).normal(size=(2, 1000))
    assert epic_distance(x, 2 * x + 5) == pytest.approx(0, abs=1e-6)
    assert epic_distance(x, -x) == pytest.approx(1, abs=1e-6)
    rho = np.corrcoef(x, x + y)[0, 1]
    expected = math.sqrt(1 - rho) / math.sqrt(2)
    for scale in (1, 1e-7, 1e-30, 1e20):
        assert epic_distance(scale * x, x + y) == pytest.approx(expected, abs=1e-12)
        interval = epic_interval(scale * x, x + y, np.arange(1000), 50)
        assert interval == pytest.approx(epic_interval(x, x + y, np.arange(1000), 50))
        for constant in (np.full(1000, 0.3), 0.1 + 0.2 * np.ones(1000), 0 * x):
            assert math.isnan(epic_distance(scale * constant, x))


def test_the_bootstrap_interval_covers_and_knows_that_states_of_an_episode_are_alike():
    rng = np.random.default_rng(4)
    truth = math.sqrt((1 - 0.6) / 2)
    covered, widths = 0, {"episodes": [], "states": []}
    for trial in range(20):
        # 40 episodes of 10 equal states each: 40 independent draws, not 400
        pair = rng.multivariate_normal([0, 0], [[1, 0.6], [0.6, 1]], size=40)
        x, y = np.repeat(pair, 10, axis=0).T
        episodes = np.repeat(np.arange(40), 10)
        distance, low, high = epic_interval(x, y, episodes, 300, trial)
        assert low <= distance <= high
        covered += low <= truth <= high
        widths["episodes"].append(high - low)
        _, low, high = epic_interval(x, y, np.arange(400), 300, trial)
        widths["states"].append(high - low)
    assert covered >= 17  # 19 expected
    ratio = np.mean(widths["episodes"]) / np.mean(widths["states"])
    assert ratio == pytest.approx(math.sqrt(10), rel=0.15)
    assert all(map(math.isnan, epic_interval(x, np.ones(400), episodes)))
    exact = epic_interval(x, 3 * x - 1, episodes)
    assert exact == pytest.approx((0, 0, 0), abs=1e-5)
    # resamples without a goal state are left out, and of a single episode nothing is known
    rare = np.zeros(400)
    rare[:10] = 1
    assert np.isfinite(epic_interval(x, rare, episodes, 300)).all()
    assert np.isnan(epic_interval(x, y, np.zeros(400))[1:]).all()


# ------------------------------------------------------------------------------ runs to judge


def make_args(script, size=32, textured=True, **settings):
    """A script's Args, which draw small pictures."""
    look = {"clip_model": TINY, "render_size": size, "textured": textured}
    return script.Args(**look, **settings)


def save_flags(folder, args, **changes):
    """A run folder with nothing but args.json, in which some flags are changed."""
    folder.mkdir(parents=True, exist_ok=True)
    script = sys.modules[type(args).__module__].__file__
    flags = {"script": script} | vars(args) | changes
    (folder / "args.json").write_text(json.dumps(flags))
    return folder


def save_run(folder, args, checkpoints, key):
    """A run folder with the given {step: network}; the last one is best.pt as well."""
    (folder / "checkpoints").mkdir(parents=True)
    for step, network in checkpoints.items():
        saved = {key: network.state_dict(), "global_step": step}
        torch.save(saved, folder / "checkpoints" / f"step_{step}.pt")
        torch.save(saved, folder / "checkpoints" / "best.pt")
    return save_flags(folder, args)


def set_layers(net, *weights):
    """The three linear layers of a network, with no bias; all other hidden units are dead."""
    with torch.no_grad():
        for layer, weight in zip([part for part in net if hasattr(part, "in_features")], weights):
            layer.weight.zero_()
            layer.weight[: weight.shape[0], : weight.shape[1]] = weight
            layer.bias.zero_()


def new_network(kind, args):
    env = sys.modules[kind.__module__].make_env(args)()
    return kind(env.observation_space.shape[0], env.action_space, args)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """{name: run folder} of policies made by hand (or at random: the humanoid's)."""
    folder = tmp_path_factory.mktemp("runs")
    made = {}
    # Q-networks that push CartPole's cart under the falling pole, or away from it
    for name, sign, reward in (("good", 1, "clip"), ("bad", -1, "ground-truth")):
        args = make_args(dqn, seed=0, episode_length=30, reward=reward)
        network = new_network(dqn.QNetwork, args)
        lean = sign * torch.tensor([0.05, 0.1, 1.0, 0.4])
        set_layers(network.net, torch.stack([-lean, lean]), torch.eye(2), torch.eye(2))
        made[name] = save_run(folder / name, args, {64: network}, "q_network")
    # an actor that pushes MountainCar's car the way it is going
    plain = {"normalize": False}
    args = make_args(sac, env_id="MountainCarContinuous-v0", episode_length=150, **plain)
    actor = new_network(sac.Actor, args)
    ways = torch.tensor([[0.0, 1e3], [0.0, -1e3]])
    set_layers(actor.net, ways, torch.eye(2), torch.tensor([[1.0, -1.0], [0.0, 0.0]]))
    made["car"] = save_run(folder / "car", args, {10: actor}, "actor")
    settings = {"episode_length": 6, "camera_azimuth": (180.0,)}
    settings |= {"textured": False, "target_prompt": ("a humanoid robot standing up",)}
    args = make_args(sac, **settings)
    torch.manual_seed(0)
    checkpoints = {step: new_network(sac.Actor, args) for step in (100, 2000)}
    made["humanoid"] = save_run(folder / "humanoid", args, checkpoints, "actor")
    return made


def collect(source, out, **settings):
    eval_epic.Collect(source=source, out=out, **settings)()
    return out


@pytest.fixture(scope="module")
def data(runs, tmp_path_factory):
    """{name: dataset's file}."""
    folder = tmp_path_factory.mktemp("data")
    made = {
        name: collect("run", folder / f"{name}.npz", run=runs[name], episodes=2)
        for name in ("humanoid", "car")
    }
    small = eval_epic.Pictures(render_size=64)
    return made | {"cart": collect("uniform", folder / "cart.npz", states=150, render=small)}


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
    assert np.isfinite(held.env_reward).all() and (held.success == -1).all()
    assert played.task_of(None, held.args, held.path).name == "standing"
    # the same states out of Gymnasium itself, by the policy's mean action
    args = played.load_run(runs["humanoid"])
    env = sac.make_env(args)()
    (path,) = played.checkpoint_paths(runs["humanoid"], ["2000"])
    network, step = played.load_policy(path, args, env.observation_space, env.action_space)
    assert step == 2000
    sequence = np.random.SeedSequence(0, spawn_key=(2, 1))
    observation, _ = env.reset(seed=int(sequence.generate_state(2)[0]))
    for t in range(6):
        if t % 2 == 0:  # the policy holds it for two steps
            action = network.best_actions(observation[None])[0]
        observation, reward, _, _, info = env.step(action)
        # the actions are float32, and sums over a batch are rounded in another order
        np.testing.assert_allclose(held.states[12 + t], info["states"], rtol=1e-6, atol=1e-6)
        assert held.env_reward[12 + t] == pytest.approx(reward, rel=1e-4)
    # and its pictures are the run's
    renderer, scorer = sac.make_renderer(args), played.make_scorer(held.args)
    picture = scorer.render(held.states[17:18])
    np.testing.assert_array_equal(picture, renderer.render(held.states[17:18]))
    scorer.close()
    renderer.close()


def test_what_is_not_said_about_pictures_is_as_the_run_had_it(runs, tmp_path):
    look = eval_epic.Pictures(camera_azimuth=(145.0,), camera_lookat=(0.0, 0.0, 0.8))
    chosen = {"episodes": 1, "checkpoints": ("best", "all")}
    held = collect("run", tmp_path / "d.npz", run=runs["humanoid"], render=look, **chosen)
    args = (data := datasets.load_dataset(held)).args
    assert data.checkpoint_step.tolist() == np.repeat([2000, 100, 2000], len(data) // 3).tolist()
    seen = {"camera_azimuth": (145.0,), "camera_lookat": (0.0, 0.0, 0.8)}
    wanted = seen | {"render_size": 32, "textured": False, "camera_distance": None}
    assert wanted.items() <= vars(args).items()


def test_a_goal_that_absorbs_is_a_success_of_the_dataset(data):
    held = datasets.load_dataset(data["car"])
    assert (held.success == 1).all() and (held.states[held.step == 149, 0] >= 0.45).all()
    assert held.env_reward.max() > 90


def test_uniform_states_and_poses_are_what_they_say(data, tmp_path):
    held = datasets.load_dataset(data["cart"])
    assert held.states.shape == (150, 4) and np.abs(held.states).max(0)[2] > 3
    own = (np.abs(held.states[:, 2]) <= np.radians(12)) * 1.0
    np.testing.assert_array_equal(held.env_reward, own)
    look = eval_epic.Pictures(render_size=32, camera_azimuth=(180.0,))
    library = datasets.load_dataset(collect("poses", tmp_path / "p.npz", per_pose=1, render=look))
    assert len(library) == 15 and library.pose[0] == "kneeling"
    for name in judges.HUMANOID:
        passed = judges.TASKS[name].judge(library.states)
        with_arms = {"standing": {"arms_raised", "hands_on_hips", "arms_crossed"}}
        assert set(library.pose[passed]) == {name} | with_arms.get(name, set())
    eval_epic.Sheet(dataset=tmp_path / "p.npz", judge="splits")()
    with Image.open(tmp_path / "p" / "sheets" / "splits.png") as sheet:
        top = [sheet.getpixel((x * (120 + 2 * figures.BORDER) + 1, 60)) for x in range(4)]
    assert top == [figures.GOOD, *[figures.BAD] * 3]
    with Image.open(tmp_path / "p" / "sheets" / "states.png") as sheet:
        assert sheet.width == 10 * (120 + 2 * figures.BORDER)


def test_exploring_policies_thinned_episodes_and_chosen_checkpoints(runs, tmp_path, monkeypatch):
    def made(name, **settings):
        words = {"run": runs["humanoid"], "episodes": 2, "every": 3, "checkpoints": ("best",)}
        return datasets.load_dataset(collect("run", tmp_path / f"{name}.npz", **words | settings))

    once, again, other = made("a", explore=True), made("b", explore=True), made("c", seed=1)
    np.testing.assert_array_equal(once.states, again.states)
    assert np.abs(once.states - other.states).max() > 0.01
    assert once.step.tolist() == [2, 5] * 2 and set(once.checkpoint_step) == {2000}
    mean = made("d", checkpoints=("2000", "100"))
    assert mean.checkpoint_step.tolist() == [2000] * 4 + [100] * 4
    assert np.abs(mean.states[:4] - once.states).max() > 0.01
    drawn = []  # exploring uses the script's noise: without any, the actions are the mean ones

    def no_noise(T, N, action_dim, pink, varied):
        drawn.append((T, N, action_dim, pink, varied))
        return torch.zeros(T, N, action_dim)

    monkeypatch.setattr(sac, "exploration_noise", no_noise)
    still = made("f", explore=True)
    assert drawn == [(3, 2, 17, True, True)]
    np.testing.assert_array_equal(still.states, made("g").states)
    with pytest.raises(UsageError, match="only SAC's script has an exploration_noise"):
        made("e", run=runs["good"], explore=True)
    with pytest.raises(UsageError, match="--every 7: episodes have 6 steps"):
        made("e", every=7)


def test_collect_overwrites_nothing(cart):
    before = cart.read_bytes()
    with pytest.raises(UsageError, match="exists already"):
        collect("uniform", cart)
    assert cart.read_bytes() == before


# ------------------------------------------------------------------------------ epic


def write_labels(path, rows):
    with open(path, "w", newline="") as file:
        csv.writer(file).writerows([datasets.LABEL_COLUMNS, *rows])
    return str(path)


def read_table(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def cart_rewards(data):
    """CLIP rewards of the cart's states {alpha: [150]}, without eval_epic."""
    task = judges.TASKS["cartpole"]
    clip = clip_reward.load_clip(TINY)
    reward = clip_reward.CLIPReward(clip, [task.target_prompt], [task.baseline_prompt])
    renderer = ClassicRenderer("CartPole-v1", 64)
    frames = renderer.render(datasets.load_dataset(data["cart"]).states)
    found = {}
    for reward.alpha in (0.0, 1.0):
        found[reward.alpha] = reward(frames).double().numpy()
    return found


def expected_distance(rewards, labels):
    return math.sqrt((1 - np.corrcoef(rewards, labels)[0, 1]) / 2)


def run_epic(path, folder, alphas=(0.0,), target_prompt=(), **settings):
    """Rows of the table that `epic` writes to a folder beside the dataset, by alpha."""
    words = {"reward_alpha": alphas, "clip_model": (TINY,), "target_prompt": target_prompt}
    eval_epic.Epic(dataset=path, reward=eval_epic.Rewards(**words), **settings)()
    rows = read_table(path.with_suffix("") / folder / "epic.csv")
    return {float(row["reward_alpha"]): row for row in rows}


def test_epic_of_a_model_to_the_judge(cart, cart_rewards, capsys):
    goal = judges.TASKS["cartpole"].judge(datasets.load_dataset(cart).states)
    table = run_epic(cart, "epic_judge", alphas=(0.0, 1.0))
    for alpha, values in cart_rewards.items():
        row, expected = table[alpha], expected_distance(values, goal)
        assert float(row["epic"]) == pytest.approx(expected, abs=1e-4)
        assert float(row["epic_low"]) < expected < float(row["epic_high"])
        assert float(row["auc"]) == pytest.approx(auc(values, goal), abs=1e-3)
        assert row["dataset"] == "cart" and row["states"] == "150"
        weights = clip_reward.load_clip(TINY).model.parameters()
        count = sum(w.numel() for w in weights)  # without batch norm's, which it folds away
        assert int(row["parameters"]) == pytest.approx(count, rel=1e-3)
    out = capsys.readouterr().out
    assert f"{float(table[1.0]['epic']):.3f} (" in out and "labels are above their mean" in out
    with Image.open(cart.with_suffix("") / "epic_judge" / "epic.png") as image:
        assert len(np.unique(np.asarray(image.convert("L")))) > 20
    # and CartPole's own reward is the judge's verdict here
    assert run_epic(cart, "epic_env", labels="env")[0.0]["epic"] == table[0.0]["epic"]


def test_epic_to_a_persons_labels_and_to_ones_own_judge(cart, cart_rewards, tmp_path):
    answers = {index: int(index % 3 == 0) for index in range(0, 100, 2)}
    rows = [("cart", "frame", k, "cartpole", label) for k, label in answers.items()]
    rows += [("someone-elses", "frame", 9999, "cartpole", 1)]
    row = run_epic(cart, "epic_mine", labels=write_labels(tmp_path / "mine.csv", rows))[0.0]
    expected = expected_distance(cart_rewards[0.0][list(answers)], list(answers.values()))
    assert float(row["epic"]) == pytest.approx(expected, abs=1e-4) and row["states"] == "50"
    (tmp_path / "my.py").write_text("def leans(states):\n    return states[:, 2] > 0.5\n")
    words = {"target_prompt": judges.TASKS["cartpole"].prompts["target_prompt"]}
    row = run_epic(cart, "epic_judge", **words, judge=f"{tmp_path}/my.py:leans")[0.0]
    leans = datasets.load_dataset(cart).states[:, 2] > 0.5
    assert row["task"] == "leans" and 0.1 < leans.mean() < 0.9
    expected = expected_distance(cart_rewards[0.0], leans)
    assert float(row["epic"]) == pytest.approx(expected, abs=1e-4)


def test_parts_of_a_batch_score_as_the_whole(cart, cart_rewards):
    data, task = datasets.load_dataset(cart), judges.TASKS["cartpole"]
    model = clip_reward.RewardArgs(clip_model=TINY, baseline_prompt=(task.baseline_prompt,))
    found = rewards.score(model, [(task.target_prompt,)], (0.0, 1.0), data.args, data.states)
    assert found.shape == (150, 1, 1, 2)  # 150 states are two batches of 64 and one of 22
    for k, alpha in enumerate((0.0, 1.0)):
        np.testing.assert_allclose(found[:, 0, 0, k], cart_rewards[alpha], atol=1e-5)


def test_counting_parameters_leaves_logging_as_it_was(monkeypatch):
    import open_clip

    def fail(*words, **settings):
        raise RuntimeError("no such architecture")

    monkeypatch.setattr(open_clip, "create_model", fail)
    for level in (logging.NOTSET, logging.DEBUG):
        monkeypatch.setattr(logging.root.manager, "disable", level)
        with pytest.raises(RuntimeError, match="no such architecture"):
            rewards.count_parameters(TINY)
        assert logging.root.manager.disable == level


# ------------------------------------------------------------------------------ success


def judged(run, **settings):
    """Print and write the success of a run: (the newest folder, its table)."""
    eval_epic.Success(run=run, **settings)()
    folder = max(run.glob("success*"), key=lambda path: path.stat().st_ctime_ns)
    return folder, read_table(folder / "episodes.csv")


def test_success_of_a_good_and_a_bad_policy_side_by_side(runs, capsys):
    folder, rows = judged(runs["good"], compare=runs["bad"], episodes=12, videos=4)
    out = capsys.readouterr().out
    assert "success 100 % (12 of 12 episodes), 95 % interval 76 to 100 %" in out
    assert "success 0 % (0 of 12 episodes), 95 % interval 0 to 24 %" in out
    assert "ground-truth" in out and "successful steps 100 %" in out
    assert f"judged video: {folder}/episodes.mp4" in out
    assert f"contact sheet: {folder}/contact_sheet.png" in out
    text = (folder.parent / "index.html").read_text()
    assert "episodes.mp4: 100 % of 12 episodes" in text
    assert f'src="{folder.name}/episodes.mp4"' in text
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


def test_success_begins_where_no_training_did(runs, monkeypatch):
    """The run's seed is 0, and so is that of success: not one start may be the same."""
    rollout, seen = played.rollout, []

    def watched(args, path, seeds, explore=False):
        seen.extend(map(int, seeds))
        return rollout(args, path, seeds[:1], explore)

    monkeypatch.setattr(datasets, "rollout", watched)
    judged(runs["good"], episodes=50, videos=0)
    trained = [np.random.SeedSequence((0, rollout)).generate_state(64) for rollout in range(2000)]
    assert len(set(seen)) == 50 and not set(seen) & set(np.concatenate(trained).tolist())


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


def test_a_person_takes_the_judges_place(data, tmp_path, capsys):
    path = Path(shutil.copy(data["humanoid"], tmp_path / "humanoid.npz"))
    verdict = judges.TASKS["standing"].judge(datasets.load_dataset(path).states)
    # frames: 3 of 4 answers in episode 0, 1 of 3 in episode 1, none in episode 2; episode 3: yes
    rows = [("frame", k, int(k != 2)) for k in range(4)]
    rows += [("frame", 6, 1), ("frame", 7, 0), ("frame", 8, 0), ("episode", 3, 1)]
    labels = [("humanoid", *row[:2], "standing", row[2]) for row in rows]
    labels = write_labels(tmp_path / "mine.csv", labels)
    for words in ({"labels": labels}, {}):
        eval_epic.Success(dataset=path, **words)()
    out = capsys.readouterr().out
    table = read_table(tmp_path / "humanoid" / "success_mine" / "episodes.csv")
    assert [row["success"] for row in table] == ["1", "0", "1"]
    assert [row["steps"] for row in table] == ["4", "3", "0"]
    assert "step 100: success 50 % (1 of 2" in out and "step 2000: success 100 % (1 of 1" in out
    table = read_table(tmp_path / "humanoid" / "success_judge" / "episodes.csv")
    expected = verdict.reshape(4, 6).mean(1) >= 0.5
    assert [row["success"] == "1" for row in table] == expected.tolist()


# ------------------------------------------------------------------------------ a run's page


def test_the_page_of_a_run_says_what_it_is_and_escapes_names(runs, tmp_path, command):
    from torch.utils.tensorboard import SummaryWriter

    run = tmp_path / 'a "run" <b>&c'
    args = make_args(sac, target_prompt=("<script>alert(1)</script>",), total_timesteps=300)
    args.target_image = (str(tmp_path / "<i>goal.png"),)
    save_flags(run, args, judge="kneeling", script=f"{tmp_path}/<u>.py")
    writer = SummaryWriter(run)
    for step in (100, 200, 300):
        writer.add_scalar("charts/clip_reward", 0.25, step)
    writer.close()
    (run / "videos").mkdir()
    for age, name in enumerate(("step_300.mp4", "step_300.png", "step_100.mp4")):
        (run / "videos" / name).touch()
        os.utime(run / "videos" / name, (0, 1e9 - age))
    judged = run / 'success_"<s>'
    judged.mkdir()
    (judged / "success.json").write_text('[{"success_rate": 0.5, "episodes": 8}]')
    for name in ("episodes.mp4", "contact_sheet.png"):
        (judged / name).touch()
    assert f"wrote {run}/index.html" in command("page", "--run", run).out
    text = (run / "index.html").read_text()
    for tag in ("<script", "<b>&c", "<i>", "<u>", "<s>"):
        assert tag not in text.replace(f"<b>{html.escape(args.target_prompt[0])}", "")
    assert "300 of 300 steps" in text and "clip_reward 0.25" in text
    assert "<h2>videos/step_300.mp4</h2>" in text and "episodes.mp4: 50 % of 8 episodes" in text
    assert html.escape(shlex.join(["--resume", str(run), "--total-timesteps", "600"])) in text
    assert html.escape(shlex.join(["--run", str(run), "--judge", "kneeling"])) in text
    sources = re.findall(r'(?:src|href)="([^"#]*)"', text)
    files = [urllib.parse.unquote(html.unescape(source)) for source in sources]
    assert "videos/step_300.mp4" in files and 'success_"<s>/episodes.mp4' in files
    assert all((run / file).is_file() for file in files), files
    save_flags(run, args, target_prompt=None)
    assert "is damaged" in command("page", "--run", run, code=2).err


# ------------------------------------------------------------------------------ code of others


@pytest.fixture
def evil(tmp_path):
    """A file that leaves a mark where it is run -> (its path, the mark's)."""
    mark, path = tmp_path / "mark", tmp_path / "evil.py"
    path.write_text(f"open({str(mark)!r}, 'w')\ndef judge(states):\n    return states[:, 0] > 0\n")
    return path, mark


def on_dataset(path):
    """The commands on a dataset."""
    words = {"dataset": path}
    yield eval_epic.Epic(**words, reward=MODEL)
    yield eval_epic.Prompts(**words, reward=rewards.Prompts(clip_model=(TINY,)))
    yield from (kind(**words) for kind in (eval_epic.Success, eval_epic.Label, eval_epic.Sheet))


def test_a_judge_that_only_a_file_names_is_not_run(runs, evil, tmp_path):
    path, mark = evil
    judge = f"{path}:judge"
    run = shutil.copytree(runs["good"], tmp_path / "run", ignore=shutil.ignore_patterns("success*"))
    save_flags(run, make_args(dqn, episode_length=30), judge=judge)
    made = collect("run", tmp_path / "data.npz", run=run, episodes=1)
    *acts, sheet = on_dataset(made)
    for act in (*acts, eval_epic.Success(run=run)):
        assert f"type --judge {judge}" in refused(act)
    assert not made.with_suffix("").exists() and not list(run.glob("success*"))
    sheet()  # by the tasks that we know
    eval_epic.Page(run=run)()
    assert not mark.exists() and (tmp_path / "data/sheets/cartpole.png").exists()
    eval_epic.Success(run=run, judge=judge, episodes=1, videos=0)()
    assert mark.exists()


def test_a_script_that_only_a_file_names_is_not_run(runs, evil, tmp_path):
    path, mark = evil
    path.write_text(path.read_text() + Path(dqn.__file__).read_text())
    run = shutil.copytree(runs["good"], tmp_path / "run", ignore=shutil.ignore_patterns("success*"))
    args = make_args(dqn, episode_length=30)
    save_flags(run, args, script=str(path))
    acts = [eval_epic.Collect(source="run", out=tmp_path / "new.npz", run=run)]
    acts += [eval_epic.Success(run=run), eval_epic.Success(run=runs["good"], compare=run)]
    columns = datasets.uniform_columns("CartPole-v1", 20, 0)
    made = tmp_path / "data.npz"
    arguments = json.dumps({"source": "uniform", "script": str(path), "flags": vars(args)})
    held = vars(datasets.Dataset(args, {}, **columns))
    np.savez(made, arguments=arguments, **{name: held[name] for name in datasets.COLUMNS})
    for act in (*on_dataset(made), *acts):
        assert f"type --script {path}" in refused(act)
    eval_epic.Page(run=run)()
    assert not mark.exists() and not (tmp_path / "new.npz").exists()
    eval_epic.Success(run=run, script=path, episodes=2, videos=1)()
    assert mark.exists() and (run / "success_best" / "episodes.mp4").exists()
    path.with_name("evil_2.py").write_text("1 / 0")
    wrong = eval_epic.Success(run=run, script=path.with_name("evil_2.py"))
    assert "evil_2.py: division by zero" in refused(wrong)


def test_a_task_that_only_a_file_names_is_not_imported(evil, tmp_path, monkeypatch):
    path, mark = evil
    path = path.rename(tmp_path / "evil_task.py")
    monkeypatch.syspath_prepend(tmp_path)
    run = save_flags(tmp_path / "run", make_args(sac), env_id="evil_task:Task-v0")
    collecting = eval_epic.Collect(source="run", out=tmp_path / "d.npz", run=run)
    for act in (eval_epic.Success(run=run), collecting):
        assert "type --env-id evil_task:Task-v0" in refused(act)
    assert not mark.exists()
    text = "import gymnasium as gym\ngym.register('Task-v0', 'gymnasium.envs.mujoco.reacher_v5:"
    path.write_text(path.read_text() + text + "ReacherEnv')\n")
    args = played.load_run(run, played.Own(env_id="evil_task:Task-v0"))
    sac.make_env(args)().close()
    assert mark.exists()


# ------------------------------------------------------------------------------ bad input


def run_eval(line):
    """Run a line of shell, in which $EVAL is the command -> the finished process."""
    settings = {"shell": True, "executable": "/bin/bash", "capture_output": True, "text": True}
    names = {"EVAL": f"{sys.executable} {eval_epic.__file__}"}
    return subprocess.run(line, env=environment(**names), cwd=ROOT, timeout=300, **settings)


def test_help_keeps_the_lines_of_its_examples(command):
    text = command("--help").out
    assert "    python eval_epic.py epic --dataset data/kneeling.npz --judge kneeling \\\n" in text


@pytest.mark.parametrize(
    "line",
    [
        "set -o pipefail; $EVAL --help | head -1",
        "set -o pipefail; $EVAL collect --source uniform --out {}/a.npz --states 5 | head -0",
        "$EVAL collect --source uniform --out {}/a.npz --states 5 >/dev/full",
        "$EVAL collect --source uniform --out {}/a.npz --states 5 >&-",
    ],
    ids=["head", "nobody reads", "full", "closed"],
)
def test_a_stdout_that_ends_is_no_error(line, tmp_path):
    done = run_eval(line.format(tmp_path))
    assert done.returncode == 0 and not done.stderr, done
    assert "help" in line or len(datasets.load_dataset(tmp_path / "a.npz")) == 5


@pytest.mark.parametrize(
    "words, flag",  # more of them in test_bad_input.py
    [
        ("collect --source run --out a.npz --run x --camera-distance nan", "camera_distance"),
        ("collect --source run --out a.npz --run x --camera-azimuth nan", "camera_azimuth"),
        ("collect --source poses --out a.npz --per-pose 100001", "per_pose"),
        ("epic --dataset a.npz --reward-alpha 0 nan", "reward_alpha"),
        ("prompts --task kneeling --reward-alpha 1.01", "reward_alpha"),
        ("landscape --render-size nan", "--render-size"),
        ("success --run x --episodes nan", "--episodes"),
    ],
)
def test_a_value_out_of_bounds_names_its_flag(words, flag, command):
    said = command(*words.split(), code=2).err
    assert flag in said and "Traceback" not in said, said


def refused(act):
    with pytest.raises((UsageError, OSError)) as caught:
        act()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_missing_foreign_and_damaged_runs(runs, tmp_path):
    def message(run, **words):
        return refused(lambda: eval_epic.Success(run=run, **words)())

    assert "args.json" in message(tmp_path / "nowhere")
    args = json.loads((runs["good"] / "args.json").read_text())
    save_flags(tmp_path / "e", make_args(dqn), leap=True)
    assert "leap" in message(tmp_path / "e")
    assert "no step_7.pt; choose best or a step: 64" in message(runs["good"], checkpoint="7")
    assert "judges of CartPole-v1 are: cartpole;" in message(runs["good"], judge="kneeling")
    assert "cartpole cannot judge" in message(runs["good"], compare=runs["car"])
    ignored = shutil.ignore_patterns("success*", "index.html")
    broken = shutil.copytree(runs["good"], tmp_path / "c", ignore=ignored)
    best = broken / "checkpoints" / "best.pt"
    best.write_bytes(best.read_bytes()[:500])
    assert "best.pt is damaged or not a checkpoint" in message(broken)
    shutil.copy(runs["humanoid"] / "checkpoints" / "best.pt", best)
    assert "best.pt is not a checkpoint of this run" in message(broken)
    assert not list(broken.glob("success*"))
    dancing = make_args(sac, target_prompt=("a humanoid robot dancing",))
    save_flags(tmp_path / "d", dancing)
    words = "name a judge with --judge: the judges of Humanoid-v5 are: kneeling, lotus"
    assert words in message(tmp_path / "d")
    assert "needs either --run" in message(None)
    damages = ["", "{", "null", "[]", "7"]
    names = ["env_id", "target_prompt", "score_every", "reward_alpha", "script", "batch_size"]
    damages += [json.dumps(args | {name: None}) for name in names]
    damages += [json.dumps(args | {"episode_length": 0, "reward_alpha": math.nan})]
    for text in damages:
        (broken / "args.json").write_text(text)
        said = message(broken)
        assert "damaged" in said or "another script" in said, (text, said)


@pytest.mark.parametrize("name, key", [("good", "q_network"), ("car", "actor")])
def test_a_policy_of_nan_is_no_success_and_no_dataset(runs, tmp_path, name, key):
    run = shutil.copytree(runs[name], tmp_path / "run", ignore=shutil.ignore_patterns("success*"))
    best = run / "checkpoints" / "best.pt"
    saved = torch.load(best)
    for value in (math.nan, math.inf):
        bias = next(weights for weights in saved[key].values() if weights.ndim == 1)
        bias[-1] = value
        torch.save(saved, best)
        out = tmp_path / "states.npz"
        collect = eval_epic.Collect(source="run", run=run, checkpoints=("best",), out=out)
        for command in (eval_epic.Success(run=run, episodes=2), collect):
            with pytest.raises(UsageError, match="best.pt: NaN or .*earlier checkpoint"):
                command()
        assert not out.exists() and not list(run.glob("success*"))


@pytest.mark.parametrize("what", ["observation", "reward"])
def test_an_environment_of_nan_ends_the_judging(runs, monkeypatch, what):
    step = gym.vector.SyncVectorEnv.step

    def broken(self, actions):
        observations, rewards, *others = step(self, actions)
        (observations if what == "observation" else rewards)[1] = np.nan
        return observations, rewards, *others

    monkeypatch.setattr(gym.vector.SyncVectorEnv, "step", broken)
    with pytest.raises(RunError, match=f"NaN or infinity in the {what} of step 0"):
        eval_epic.Success(run=runs["good"], episodes=2)()


def test_a_torch_file_that_is_no_checkpoint_is_one_line(runs, tmp_path):
    run = shutil.copytree(runs["good"], tmp_path / "run", ignore=shutil.ignore_patterns("success*"))
    best = run / "checkpoints" / "best.pt"
    good = torch.load(best)
    wrong = [[], [1], {}, 7, "text", None, torch.ones(3), {"global_step": 3}, {"global_step": "3"}]
    wrong += [good | {"q_network": x} for x in (None, [], {}, 7, torch.ones(2), {"a": 1})]
    for content in wrong:
        torch.save(content, best)
        said = refused(lambda: eval_epic.Success(run=run)())
        assert str(best) in said and "checkpoint" in said and len(said) < 800, (content, said)


def test_absurd_args_json_is_one_short_line(runs, tmp_path):
    run = shutil.copytree(runs["good"], tmp_path / "run", ignore=shutil.ignore_patterns("success*"))
    path, args = run / "args.json", json.loads((runs["good"] / "args.json").read_text())
    texts = ["[" * 100_000, '{"a": ' * 100_000, " " * 2_000_000, "\0", "\ufeff{}"]
    texts += [json.dumps(args | {f"flag_{k}": k for k in range(5000)})]
    for value in (10**30, -1, math.inf, "x" * 100_000, [1] * 10_000, {}, None):
        texts += [json.dumps(args | {name: value}) for name in ("render_size", "seed")]
    texts += [json.dumps(args).replace('"seed": 0', f'"seed": {"9" * 5000}')]
    for text in texts:
        path.write_text(text)
        if text.endswith("null}") or '"render_size": null' in text:
            continue  # which is a value of this flag
        said = refused(lambda: eval_epic.Success(run=run)())
        assert "args.json" in said or str(run) in said, text[:100]
        assert len(said) < 800, said


def test_datasets_and_labels_that_do_not_do(cart, data, tmp_path):
    def message(path=cart, rows=None, **settings):
        if rows is not None:
            settings["labels"] = write_labels(tmp_path / "labels.csv", rows)
        text = refused(eval_epic.Epic(**{"dataset": path, "reward": MODEL} | settings))
        assert not path.with_suffix("").exists()
        return text

    def row(index, label, unit="frame", task="cartpole", name="cart"):
        return (name, unit, index, task, label)

    assert "all 2 labels on" in message(rows=[row(0, 1), row(1, 1)])
    assert "no label for cartpole" in message(rows=[row(0, 1, name="other")])
    assert "no label for cartpole" in message(rows=[row(0, 1, task="kneeling")])
    assert "line 3: " in message(rows=[row(0, 1), row(150, 0)])
    assert "must be a frame or episode of" in message(rows=[row(0, 1), row(150, 0)])
    assert "labelled 0 or 1, not frame 0, 'yes'" in message(rows=[row(0, "yes")])
    assert "all 0 labels on states" in message(rows=[row(4, 1, "episode"), row(5, 0, "episode")])
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    assert "the columns must include dataset,unit" in message(labels=str(tmp_path / "other.csv"))
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00\x80" * 50)
    assert "not labels" in message(labels=str(tmp_path / "binary.csv"))
    (tmp_path / "nul.csv").write_text(f"{','.join(datasets.LABEL_COLUMNS)}\ncart,frame,0\0")
    assert "NUL" in message(labels=str(tmp_path / "nul.csv"))
    assert "must be a frame" in (said := message(rows=[row("9" * 6000, 1)])) and len(said) < 300
    assert "No such file" in message(labels=str(tmp_path / "none.csv"))
    none = dataclasses.replace(MODEL, reward_alpha=())
    assert "--reward-alpha" in message(reward=none)
    assert "judges of CartPole-v1 are: cartpole;" in message(judge="lotus")
    none = {"dataset": cart, "labels": str(tmp_path / "none.csv")}
    assert "No such file" in refused(eval_epic.Success(**none))
    reward = dataclasses.replace(MODEL, target_prompt=("an arm",))
    reach = tmp_path / "reach.npz"
    held = datasets.Dataset(sac.Args(env_id="Reacher-v5"), {}, np.zeros((4, 8)), env_reward=1.0)
    datasets.save_dataset(held, reach)
    assert "--labels env: all 4 labels" in message(reach, labels="env", reward=reward)
    for kind in (eval_epic.Sheet, eval_epic.Success, eval_epic.Prompts):
        assert "judges of Reacher-v5 are: none" in refused(kind(dataset=reach, labels="env"))
    assert not cart.with_suffix("").exists() and not reach.with_suffix("").exists()


LABELS = """\
dataset,unit,index,task,label,note
cart,frame,0,cartpole,1,schief é
cart,frame,3,cartpole,0,
"""
SAVED = {  # by a spreadsheet: as what
    "UTF-8 with a BOM": LABELS.encode("utf-8-sig"),
    "Unicode text": LABELS.replace(",", "\t").replace("\n", "\r\n").encode("utf-16"),
    "semicolons": LABELS.replace(",", ";").replace("schief", "a, b, c, d, e, f, g").encode(),
    "tabs": LABELS.replace(",", "\t").encode(),
    "CRLF": LABELS.replace("\n", "\r\n").encode(),
    "CR": LABELS.replace("\n", "\r").encode(),
    "blank lines": f"\n  \n{LABELS}\n,,,,,\n\n".replace("\ncart", "\n\ncart").encode(),
    "empty columns": LABELS.replace("\n", ",,,\n").encode(),
    "every cell quoted": "".join(
        ";".join(f'"{cell}"' for cell in line.split(",")) + "\r\n" for line in LABELS.splitlines()
    ).encode("utf-8-sig"),
    "a note of two lines": LABELS.replace("schief é", '"first, ""so""\nthen"').encode(),
    "Windows' western European": LABELS.replace("schief", "5 €").encode("cp1252"),
    "spaces": LABELS.replace(",", " ,  ").replace("cartpole", "\u00a0cartpole").encode(),
    "capitals": LABELS.replace("dataset,unit", "Dataset,UNIT").encode(),
    "columns in another order": b"label,task,index,unit,dataset\n1,cartpole,0,frame,cart\n"
    b"0,cartpole,3,frame,cart\n",
    "no end of the last line": LABELS.strip().encode(),
    "the file's whole name": LABELS.replace("\ncart,", "\ncart.npz,").encode(),
}


@pytest.mark.parametrize("kind", SAVED)
def test_labels_that_a_spreadsheet_saved_are_read(cart, kind, tmp_path):
    path = tmp_path / "labels.csv"
    path.write_bytes(SAVED[kind])
    labels = datasets.read_labels(path, datasets.load_dataset(cart), "cartpole")
    assert labels == {"frame": {0: True, 3: False}, "episode": {}}


@pytest.mark.parametrize(
    "content, line, said",
    [
        (b"", 1, "the columns must include dataset,unit,index,task,label, each once, not ''"),
        (LABELS.replace("task,label", "task,label,label").encode(), 1, "each once"),
        (b"PK\x03\x04\x14\0\x06\0 a workbook", 1, "the columns must include dataset,unit"),
        (b"\ncart,frame,0,cartpole,1\n", 2, "not 'cart,frame,0,cartpole,1'"),
        ((LABELS + "\ncart,frame\n").encode(), 5, "dataset,unit,index,task,label must all have"),
        ((LABELS + "cart;frame;4;cartpole;1\n").encode(), 4, "must all have a value"),
        ((LABELS + 'cart,frame,4,cartpole,1,"note\n' + LABELS).encode(), 4, "end of data"),
        ((LABELS + "\ncart,frame,4,cartpole,yes\n").encode("utf-8-sig"), 5, "0 or 1, not frame 4"),
        (LABELS.replace("schief é", '"\n\n"').replace("3", "x").encode(), 5, "a frame or episode"),
    ],
)
def test_labels_that_cannot_be_read_name_their_line(cart, content, line, said, tmp_path):
    path = tmp_path / "labels.csv"
    path.write_bytes(content)
    with pytest.raises(UsageError) as error:
        datasets.read_labels(path, datasets.load_dataset(cart), "cartpole")
    message = str(error.value)
    assert message.startswith(f"{path}, line {line}: ") and said in message
    assert message.isprintable() and len(message) < len(str(path)) + 250


def test_a_sheet_of_what_nobody_labelled_has_states_alone(cart, tmp_path):
    rows = [("cart", "episode", 3, "cartpole", 1)]
    labels = write_labels(tmp_path / "labels.csv", rows)
    eval_epic.Sheet(dataset=cart, labels=labels)()
    assert [path.name for path in (tmp_path / "cart/sheets").iterdir()] == ["states.png"]


def test_a_malformed_dataset_is_one_line(cart, tmp_path, command):
    copy = tmp_path / "copy.npz"
    with np.load(cart) as file:
        good = {name: file[name] for name in file.files}
    arguments = json.loads(str(good["arguments"]))
    states, flags = good["states"], arguments["flags"]
    changes = [{"states": states[:, 0]}, {"states": states[:0]}, {"states": states * np.nan}]
    changes += [{"states": np.pad(states, ((0, 0), (0, 1)))}]
    changes += [{"states": states.astype("U")}, {"step": good["step"][:-1]}]
    changes += [{"states": np.array([{}, None], object)}]
    changes += [{"arguments": text} for text in ("", "null", "[]", "{}", "[1, 2]")]
    changed = [{"flags": None}, {"flags": flags | {"env_id": None}}, {"script": None}]
    changed += [{"flags": flags | {"render_size": "big"}}, {"flags": flags | {"seed": math.inf}}]
    changes += [{"arguments": json.dumps(arguments | change)} for change in changed]
    whole = cart.read_bytes()
    damages = [b"", b"not a dataset", whole[:300], whole[:-100], whole.replace(b"step", b"stop")]
    for damage in (*damages, *changes):
        if isinstance(damage, bytes):
            copy.write_bytes(damage)
        else:
            np.savez(copy, **good | damage)
        assert str(copy) in refused(eval_epic.Sheet(dataset=copy)), damage
    assert not copy.with_suffix("").exists()
    said = command("sheet", "--dataset", copy, code=2).err
    assert re.fullmatch(rf"error: {copy}.*\n", said), said
    assert "missing" in refused(eval_epic.Sheet(dataset=tmp_path / "none.npz"))


OWN_VERDICT = """
import gymnasium as gym
import gymnasium as gym
import numpy as np


class Line(gym.Env):
    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}
    observation_space = gym.spaces.Box(-100, 100, (1,))
    action_space = gym.spaces.Box(-1, 1, (1,))

    def __init__(self, render_mode=None):
        self.render_mode = render_mode

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.start = self.x = float(self.np_random.uniform(-1, 1))
        return np.array([self.x], np.float32), {}

    def step(self, action):
        self.x += 0.01 * float(action[0])
        verdict = {"success": self.start > 0}
        return np.array([self.x], np.float32), self.x, False, False, verdict

    def render(self):
        return np.zeros((16, 16, 3), np.uint8)


gym.register("Line-v0", Line)
"""


@pytest.mark.slow
def test_a_task_without_states_is_judged_by_its_own_verdict(tmp_path, command):
    (tmp_path / "line.py").write_text(OWN_VERDICT)
    words = ["--env-id", "line:Line-v0", "--reward", "ground-truth", "--num-envs", 2]
    words += ["--episode-length", 6, "--total-timesteps", 24, "--learning-starts", 12]
    words += ["--gradient-steps", 1, "--video-freq", 0]
    path = {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    run(sac.__file__, *words, "--runs-dir", tmp_path / "runs", **path)
    judged = [ROOT / "eval_epic.py", "success", "--run", tmp_path / "runs", "--episodes", 9]
    said = run(*judged, "--env-id", "line:Line-v0", **path).stdout
    folder = only_run(tmp_path / "runs")
    seeds = np.random.SeedSequence(0, spawn_key=(3, 0)).generate_state(9)
    starts = [
        np.random.default_rng(np.random.PCG64(np.random.SeedSequence(int(seed)))).uniform(-1, 1)
        for seed in seeds
    ]
    won = int(np.sum(np.array(starts) > 0))
    assert 0 < won < 9 and f"({won} of 9 episodes)" in said, said
    rows = read_table(folder / "success_best/episodes.csv")
    assert [int(row["success"]) for row in rows] == [int(x > 0) for x in starts]
    own = ["--env-id", "line:Line-v0", "--judge", "kneeling"]
    assert "no states" in run(*judged, *own, code=2, **path).stderr


# ------------------------------------------------------------------------------ landscape


def test_landscape_says_where_rewards_are_largest(tmp_path, capsys):
    both = dataclasses.replace(MODEL, reward_alpha=(0.0, 1.0))
    out = tmp_path / "land.png"
    eval_epic.Landscape(reward=both, render_size=64, out=out)()
    assert out.stat().st_size > 20_000
    said = capsys.readouterr().out
    assert said.count("Pearson correlation") == 6
    line = r"CartPole-v1, plain, alpha 0.00: largest at (\S+), goal at \+0.000; "
    line += r"Pearson correlation with goal (\S+)"
    largest, found = map(float, re.search(line, said).groups())
    assert abs(largest) < np.radians(1.5)  # one step of the grid is one degree
    values = np.linspace(-np.pi, np.pi, 361)
    states = np.zeros((361, 4))
    states[:, 2] = values
    prompt = judges.TASKS["cartpole"].target_prompt
    frames = ClassicRenderer("CartPole-v1", 64).render(states)
    scores = clip_reward.CLIPReward(clip_reward.load_clip(TINY), [prompt])(frames).double()
    assert largest == pytest.approx(values[scores.argmax()], abs=2e-3)
    expected = np.corrcoef(scores, np.abs(values) <= np.radians(12))[0, 1]
    assert found == pytest.approx(expected, abs=2e-3)


# ------------------------------------------------------------------------------ prompts


def test_auc_and_its_interval():
    rng = np.random.default_rng(0)
    for _ in range(5):
        x, good = rng.integers(0, 9, 80), rng.random(80) < 0.3
        pairs = x[good][:, None] - x[~good][None]
        expected = (pairs > 0).mean() + 0.5 * (pairs == 0).mean()
        assert auc(x, good) == pytest.approx(expected)
    assert math.isnan(auc(x, np.ones(80))) and auc(good, good) == 1
    value, low, high = interval(auc, x, good, np.arange(80), 200)
    assert low < value < high
    # eighty states of eight episodes, all ten of an episode alike, know less than eighty others
    x, good = np.repeat(rng.integers(0, 9, 8), 10), np.repeat(np.arange(8) < 3, 10)
    widths = []
    for episodes in np.arange(80) // 10, np.arange(80):
        _, low, high = interval(auc, x, good, episodes, 200)
        widths.append(high - low)
    assert widths[0] > 1.5 * widths[1]


def test_gap_and_rank_correlation():
    rng = np.random.default_rng(0)
    x, y, good = rng.normal(size=95), rng.normal(size=95), rng.random(95) < 0.3
    others = sorted(x[~good])
    drawn_to = others[-(len(others) // 10) :]  # a tenth
    expected = (np.mean(x[good]) - np.mean(drawn_to)) / np.std(x)
    assert gap(x, good) == pytest.approx(expected) == gap(3 * x - 7, good)
    assert math.isnan(gap(x, np.ones(95))) and math.isnan(gap(np.ones(95), good))
    assert spearman(x, y) == pytest.approx(stats.spearmanr(x, y).statistic)
    assert spearman(x, np.exp(x)) == pytest.approx(1)


def test_what_looking_was_worth_is_computed_from_the_table(capsys):
    compare.say_worth()
    lines = capsys.readouterr().out.splitlines()
    rows = read_table(compare.WORTH)
    assert f"success of {len(rows)} trained policies" in lines[0] and len(rows) >= 30
    tasks = np.array([row["task"] for row in rows])
    assert set(tasks) <= set(judges.HUMANOID)
    success = np.array([float(row["success"]) for row in rows])
    for line, name in zip(lines[-3:], ("auc", "epic", "gap")):
        values = np.array([float(row[name]) for row in rows])
        found = [float(cell.split()[0]) for cell in line.split("|")]
        assert found[0] == pytest.approx(stats.spearmanr(values, success).statistic, abs=6e-3)
        within = [
            np.concatenate(
                [x[tasks == task] - x[tasks == task].mean() for task in np.unique(tasks)]
            )
            for x in (values, success)
        ]
        assert found[1] == pytest.approx(stats.spearmanr(*within).statistic, abs=6e-3)


def prompts(reward=(), render=(), **words):
    """Run `prompts` with the embedded model and small pictures."""
    reward = rewards.Prompts(clip_model=(TINY,), **dict(reward))
    render = eval_epic.Pictures(**{"render_size": 64} | dict(render))
    eval_epic.Prompts(reward=reward, render=render, **words)()


def typed(line, script=sac):
    """The Args that a printed command means."""
    python, file, *words = shlex.split(line)
    assert python == "python" and Path(file).samefile(script.__file__)
    return tyro.cli(script.Args, args=words, config=(tyro.conf.OmitArgPrefixes,))


def test_prompts_compares_every_combination(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    azimuths, sentences = (180.0, 90.0, 120.0), ("a humanoid robot kneeling", "it's lying down")
    reward = {"target_prompt": sentences, "reward_alpha": (0.0, 1.0)}
    words = {"task": "kneeling", "per_pose": 6, "out": tmp_path / "p"}
    prompts(reward, {"camera_azimuth": azimuths}, **words)
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
    states = facing_columns(6)["states"]
    good = judges.TASKS["kneeling"].judge(states)
    args = sac.Args(render_size=64, camera_azimuth=(180.0, 90.0))
    goal = (row["prompt"],), ("a humanoid robot",), 1.0
    model = clip_reward.CLIPReward(clip_reward.load_clip(TINY), *goal)
    renderer = sac.make_renderer(args)
    expected = model(renderer.render(states)).numpy()
    renderer.close()
    assert float(row["auc"]) == pytest.approx(auc(expected, good), abs=2e-3)
    assert float(row["epic"]) == pytest.approx(epic_distance(expected, good), abs=2e-3)
    assert Image.open(out / "states.png").size[0] > 500
    # the command at the end is of the first row
    args = typed(capsys.readouterr().out.splitlines()[-1])
    assert args.target_prompt == ("a humanoid robot kneeling",)
    assert args.reward_alpha == float(rows[0]["reward_alpha"])
    assert args.camera_azimuth == tuple(map(float, rows[0]["camera_azimuth"].split()))


def test_the_command_of_prompts_trains_what_was_measured(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    seen = {"camera_distance": 2.5, "camera_lookat": (0.0, 0.0, 0.8), "textured": False}
    reward = {"baseline_prompt": ("it's a 'scene'",), "reward_alpha": (0.25,)}
    reward |= {"target_prompt": ('the "robot"',)}
    words = {"task": "kneeling", "per_pose": 3, "out": tmp_path / "p"}
    prompts(reward, seen | {"camera_azimuth": (-120.0,)}, **words)
    (row,) = read_table(tmp_path / "p_kneeling/prompts.csv")
    assert row["camera_azimuth"] == "-120"
    args = typed(capsys.readouterr().out.splitlines()[-1])
    expected = reward | {"reward_alpha": 0.25, "clip_model": TINY}
    expected |= seen | {"render_size": 64, "camera_azimuth": (-120.0,)}
    expected |= {"judge": "kneeling"}
    assert expected.items() <= vars(args).items()
    assert args.env_id == "Humanoid-v5"


def test_prompts_of_a_classic_task_has_no_cameras(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    prompts(task="cartpole", per_pose=10, out=tmp_path / "p")
    rows = read_table(tmp_path / "p_cartpole/prompts.csv")
    assert len(rows) == 3 * 3 and {row["camera_azimuth"] for row in rows} == {""}
    assert float(rows[0]["auc"]) > 0.95
    assert typed(capsys.readouterr().out.splitlines()[-1], dqn).env_id == "CartPole-v1"

    def message(reward=(), render=(), **words):
        return refused(functools.partial(prompts, reward, render, **words))

    assert "has no camera" in message(render={"camera_azimuth": (90.0,)}, task="cartpole")
    assert "--task" in message()


@pytest.mark.slow
def test_prompts_on_states_of_ones_own_task(tmp_path, capsys, monkeypatch):
    """Labelled by a function of one's own, drawn and named as the dataset's run had it."""
    monkeypatch.chdir(ROOT)
    args = sac.Args(env_id="Reacher-v5", render_size=64, camera_azimuth=(90.0, 30.0))
    states = np.random.default_rng(0).uniform(-1.5, 1.5, (40, 8))
    path = tmp_path / "reach.npz"
    datasets.save_dataset(datasets.Dataset(args, {}, states, np.arange(40) // 4), path)
    (tmp_path / "mine.py").write_text("def left(states):\n    return states[:, 0] > 0.5\n")
    own = {"dataset": path, "judge": f"{tmp_path}/mine.py:left", "out": tmp_path / "p"}
    reward = {"target_prompt": ("an arm", "an arm to the left"), "reward_alpha": (0.0,)}
    prompts(reward, **own)
    rows = read_table(tmp_path / "p_left/prompts.csv")
    assert {row["camera_azimuth"] for row in rows} == {"90", "30", "90 30"} and len(rows) == 6
    assert typed(capsys.readouterr().out.splitlines()[-1]).env_id == "Reacher-v5"
    row = next(row for row in rows if row["camera_azimuth"] == "90 30")
    clip = clip_reward.load_clip(TINY)
    renderer = sac.make_renderer(args)
    frames = renderer.render(states)
    renderer.close()
    expected = clip_reward.CLIPReward(clip, [row["prompt"]])(frames).numpy()
    assert float(row["auc"]) == pytest.approx(auc(expected, states[:, 0] > 0.5), abs=0.02)
    # EPIC of a picture as the goal, by both cameras
    goal = tmp_path / "goal.png"
    Image.fromarray(frames[0, 0]).save(goal)
    model = dataclasses.replace(MODEL, target_image=(str(goal),))
    eval_epic.Epic(dataset=path, judge=own["judge"], reward=model)()
    (row,) = read_table(tmp_path / "reach/epic_judge/epic.csv")
    expected = clip_reward.CLIPReward(clip, target_images=[str(goal)])(frames).numpy()
    distance = expected_distance(expected, states[:, 0] > 0.5)
    assert float(row["epic"]) == pytest.approx(distance, abs=1e-3)
