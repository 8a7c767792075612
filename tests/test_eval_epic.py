"""EPIC against tables, and the commands as a user runs them."""

import csv
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import dqn_clip_classic as dqn
import eval_epic
import judges
import sac_clip_humanoid as sac
from clip_reward import UsageError

ROOT = Path(eval_epic.__file__).resolve().parent
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}


def command(*words, cwd=None, check=True):
    """Run a subcommand as a user does; returns the finished process."""
    line = [sys.executable, str(ROOT / "eval_epic.py"), *map(str, words)]
    done = subprocess.run(line, cwd=cwd or ROOT, env=ENVIRONMENT, capture_output=True, text=True)
    assert not check or done.returncode == 0, done.stderr[-3000:]
    return done


def refuses(*words, cwd=None):
    """The one line with which a command refuses."""
    done = command(*words, cwd=cwd, check=False)
    lines = done.stderr.strip().splitlines()
    assert done.returncode == 2 and len(lines) == 1 and lines[0].startswith("error: "), done.stderr
    return lines[0]


# ------------------------------------------------------------------------------ EPIC


class TabularMDP:
    """Random rewards R[s, a, s'] with distributions of S, A, S' by whole numbers of samples."""

    def __init__(self, seed, states=5, actions=3):
        self.rng = np.random.default_rng(seed)
        self.shape = (states, actions, states)
        self.gamma = self.rng.uniform(0.1, 0.99)
        # the expectation over (S, A, S') of a joint sample is the mean over this list
        count = 40
        self.samples = [self.rng.integers(n, size=count) for n in self.shape]
        self.transitions = [self.rng.integers(n, size=300) for n in self.shape]

    def reward(self):
        return self.rng.normal(size=self.shape)

    def potential(self):
        """gamma phi(s') - phi(s) as a table."""
        phi = self.rng.normal(size=self.shape[0])
        return np.broadcast_to(self.gamma * phi[None, None] - phi[:, None, None], self.shape)

    def distance(self, a, b):
        tables = [(lambda s, u, t, table=table: table[s, u, t]) for table in (a, b)]
        return eval_epic.epic_general(*tables, self.transitions, self.samples, self.gamma)

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


@pytest.mark.parametrize("seed", range(5))
def test_epic_equals_a_direct_computation_on_a_table(seed):
    mdp = TabularMDP(seed)
    a, b = mdp.reward(), mdp.reward()
    assert mdp.distance(a, b) == pytest.approx(mdp.direct(a, b), abs=1e-10)
    assert 0.2 < mdp.distance(a, b) < 1


@pytest.mark.parametrize("seed", range(5))
def test_epic_does_not_see_scale_shift_and_potential_shaping(seed):
    mdp = TabularMDP(seed)
    a, b = mdp.reward(), mdp.reward()
    same = [3.7 * a, a - 11.0, a + mdp.potential(), 0.2 * (a + 5 * mdp.potential()) + 1.5]
    for twin in same:
        assert mdp.distance(a, twin) == pytest.approx(0, abs=1e-6)
        assert mdp.distance(twin, b) == pytest.approx(mdp.distance(a, b), abs=1e-6)
    assert mdp.distance(a, -a) == pytest.approx(1, abs=1e-6)
    assert mdp.distance(a, mdp.potential() - 2 * a) == pytest.approx(1, abs=1e-6)


def test_epic_is_a_metric_and_sampling_converges():
    mdp = TabularMDP(3)
    a, b, c = mdp.reward(), mdp.reward(), mdp.reward()
    assert mdp.distance(a, b) == pytest.approx(mdp.distance(b, a), abs=1e-12)
    assert mdp.distance(a, c) <= mdp.distance(a, b) + mdp.distance(b, c)
    exact = mdp.distance(a, b)
    rng = np.random.default_rng(0)
    pick = rng.integers(40, size=4000)
    full, mdp.samples = mdp.samples, [column[pick] for column in mdp.samples]
    assert mdp.distance(a, b) == pytest.approx(exact, abs=0.01)
    mdp.samples = [column[pick[:5]] for column in full]  # few samples: shaping still cancels
    assert mdp.distance(a, a + mdp.potential()) == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("seed", range(4))
def test_the_goal_based_form_is_the_general_one_for_rewards_of_the_next_state(seed):
    mdp = TabularMDP(seed, states=9)
    f, g = mdp.rng.normal(size=9), mdp.rng.integers(2, size=9)
    later = mdp.transitions[2]
    goal_based = eval_epic.epic_distance(f[later], g[later])

    def of_next(values):
        return np.broadcast_to(values[None, None], mdp.shape)

    def of_here(values):
        return np.broadcast_to(values[:, None, None], mdp.shape)

    # For R = f(s') shaping only takes away E f(S'): equal for any gamma and any samples
    for mdp.gamma in (0.0, 0.5, 0.999):
        assert mdp.distance(of_next(f), of_next(g)) == pytest.approx(goal_based, abs=1e-9)
    # For R = f(s) it leaves gamma f(s') and constants: equal over s', but nothing is left at 0
    for mdp.gamma in (0.01, 0.9):
        assert mdp.distance(of_here(f), of_here(g)) == pytest.approx(goal_based, abs=1e-7)
        assert mdp.distance(of_here(f), of_next(g)) == pytest.approx(goal_based, abs=1e-7)
    mdp.gamma = 0.0
    assert math.isnan(mdp.distance(of_here(f), of_here(g)))
    # and for a reward that depends on the state before as well it is another number
    mdp.gamma = 0.9
    mixed = of_next(f) + of_here(2 * mdp.rng.normal(size=9))
    values = mixed[tuple(mdp.transitions)]
    assert abs(mdp.distance(mixed, of_next(g)) - eval_epic.epic_distance(values, g[later])) > 1e-4


def test_goal_based_values():
    x = np.random.default_rng(0).normal(size=1000)
    assert eval_epic.epic_distance(x, 2 * x + 5) == pytest.approx(0, abs=1e-6)
    assert eval_epic.epic_distance(x, -x) == pytest.approx(1, abs=1e-6)
    y = np.random.default_rng(1).normal(size=1000)
    assert eval_epic.epic_distance(x, y) == pytest.approx(math.sqrt(0.5), abs=0.03)
    rho = np.corrcoef(x, x + y)[0, 1]
    expected = math.sqrt(1 - rho) / math.sqrt(2)
    assert eval_epic.epic_distance(x, x + y) == pytest.approx(expected, abs=1e-12)
    assert math.isnan(eval_epic.epic_distance(x, np.full(1000, 0.3)))


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
    constant = eval_epic.epic_interval(x, np.ones(400), episodes)
    assert all(map(math.isnan, constant))
    exact = eval_epic.epic_interval(x, 3 * x - 1, episodes)
    assert exact == pytest.approx((0, 0, 0), abs=1e-5)


def test_wilson():
    low, high = eval_epic.wilson(100, 100)
    assert low == pytest.approx(0.9630, abs=1e-4) and high == 1
    low, high = eval_epic.wilson(64, 100)
    assert (low, high) == pytest.approx((0.5424, 0.7273), abs=1e-4)
    assert eval_epic.wilson(0, 10)[0] == 0


# ------------------------------------------------------------------------------ runs to judge


def save_run(folder, script, checkpoints, network_key, **settings):
    """A run folder with the given {step: network}; the last one is best.pt as well."""
    args = vars(script.Args(**settings))
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "args.json").write_text(json.dumps(args))
    for step, network in checkpoints.items():
        saved = {network_key: network.state_dict(), "global_step": step}
        torch.save(saved, folder / "checkpoints" / f"step_{step}.pt")
        torch.save(saved, folder / "checkpoints" / "best.pt")
    return folder


def balancing(sign):
    """A Q-network that pushes CartPole's cart under the falling pole, or away from it."""
    network = dqn.QNetwork(4, 2, 2)
    lean = sign * torch.tensor([0.05, 0.1, 1.0, 0.4])
    with torch.no_grad():
        for layer, weights in zip(
            [network.net[0], network.net[2], network.net[4]],
            [torch.stack([-lean, lean]), torch.eye(2), torch.eye(2)],
        ):
            layer.weight.copy_(weights)
            layer.bias.zero_()
    return network


def pumping():
    """An actor that pushes MountainCar's car the way it is going."""
    env = sac.make_env("MountainCarContinuous-v0")()
    actor = sac.Actor(2, env.action_space, 2)
    with torch.no_grad():
        for layer in (actor.net[0], actor.net[2], actor.net[4]):
            layer.bias.zero_()
        actor.net[0].weight.copy_(torch.tensor([[0.0, 1e3], [0.0, -1e3]]))
        actor.net[2].weight.copy_(torch.eye(2))
        actor.net[4].weight.copy_(torch.tensor([[1.0, -1.0], [0.0, 0.0]]))
    return actor


@pytest.fixture(scope="session")
def runs(tmp_path_factory):
    """{name: run folder} of policies made by hand (or at random: the humanoid's)."""
    folder = tmp_path_factory.mktemp("runs")
    made = {}
    for name, sign, reward in (("good", 1, "clip"), ("bad", -1, "ground-truth")):
        settings = {"episode_length": 30, "hidden_size": 2, "render_size": 32, "reward": reward}
        network = balancing(sign)
        made[name] = save_run(folder / name, dqn, {64: network}, "q_network", **settings)
    settings = {"episode_length": 150, "hidden_size": 2, "render_size": 32}
    settings["env_id"] = "MountainCarContinuous-v0"
    made["car"] = save_run(folder / "car", sac, {10: pumping()}, "actor", **settings)
    env = sac.make_env("Humanoid-v5")()
    torch.manual_seed(0)
    shape = (env.observation_space.shape[0], env.action_space, 8)
    actors = [sac.Actor(*shape, normalize=True) for _ in range(2)]
    settings = {"episode_length": 6, "hidden_size": 8, "render_size": 32, "textured": False}
    settings |= {"normalize_observations": True, "target_prompt": ("a humanoid robot standing up",)}
    checkpoints = {100: actors[0], 2000: actors[1]}
    made["humanoid"] = save_run(folder / "humanoid", sac, checkpoints, "actor", **settings)
    return made


@pytest.fixture(scope="session")
def datasets(runs, tmp_path_factory):
    """{name: dataset folder}."""
    folder, made = tmp_path_factory.mktemp("data"), {}
    for name in ("humanoid", "car"):
        made[name] = folder / name
        args = {"run": runs[name], "out": made[name], "episodes": 2}
        eval_epic.collect(eval_epic.Collect("run", **args))
    made["cart"] = folder / "cart"
    uniform = {"states": 150, "render_size": 64, "out": made["cart"]}
    eval_epic.collect(eval_epic.Collect("uniform", **uniform))
    return made


def contents(folder):
    """{file: bytes} of a folder."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


# ------------------------------------------------------------------------------ collect


def test_a_dataset_of_a_run_holds_what_was_played(runs, datasets):
    data = eval_epic.load_dataset(datasets["humanoid"])
    assert data.states.shape == (2 * 2 * 6, 47) and data.actions.shape == (24, 17)
    assert data.checkpoint_step.tolist() == [100] * 12 + [2000] * 12
    assert data.episode.tolist() == np.repeat(range(4), 6).tolist()
    assert data.step.tolist() == list(range(6)) * 4
    inside = data.step > 0
    np.testing.assert_array_equal(data.previous[inside], data.states[np.flatnonzero(inside) - 1])
    assert np.isnan(data.previous[~inside]).all() and np.isfinite(data.env_reward).all()
    assert (data.success == -1).all() and data.meta["task"] == "standing"
    # the same states out of Gymnasium itself, by the policy's mean action
    run = eval_epic.load_run(runs["humanoid"])
    policy, step = eval_epic.load_policy(run, eval_epic.checkpoint_path(run, 2000))
    assert step == 2000
    env = sac.make_env("Humanoid-v5", "states")()
    seed = int(np.random.SeedSequence((0, 1, 2)).generate_state(2)[0])
    observation, _ = env.reset(seed=seed)
    for t in range(6):
        action = policy(t, observation[None])[0]
        observation, reward, _, _, info = env.step(action)
        np.testing.assert_allclose(data.states[12 + t], info["states"], atol=1e-6)
        np.testing.assert_allclose(data.actions[12 + t], action, atol=1e-5)
        assert data.env_reward[12 + t] == pytest.approx(reward, rel=1e-4)
    renderer = eval_epic.make_renderer("Humanoid-v5", 32, False, run.args)
    picture = renderer.render(data.states[17:18])[0]
    renderer.close()
    np.testing.assert_array_equal(data.frame(17), picture)
    with Image.open(data.folder / "contact_sheet.png") as sheet:
        assert sheet.width > 500


def test_a_goal_that_absorbs_is_a_success_of_the_dataset(datasets):
    data = eval_epic.load_dataset(datasets["car"])
    assert (data.success == 1).all() and (data.states[data.step == 149, 0] >= 0.45).all()
    assert data.env_reward.max() > 90


def test_uniform_states_and_poses_are_what_they_say(datasets, tmp_path):
    data = eval_epic.load_dataset(datasets["cart"])
    assert data.states.shape == (150, 4) and np.abs(data.states).max(0)[2] > 3
    own = (np.abs(data.states[:, 2]) <= np.radians(12)) * 1.0
    np.testing.assert_array_equal(data.env_reward, own)
    eval_epic.collect(eval_epic.Collect("poses", tmp_path / "p", per_pose=1, render_size=32))
    library = eval_epic.load_dataset(tmp_path / "p")
    assert len(library) == 15 and library.pose[0] == "kneeling"
    for name, passed in judges.judge_humanoid(library.states).items():
        assert library.pose[passed].tolist() == [name]
    eval_epic.sheet(eval_epic.Sheet(tmp_path / "p", task=("splits",), count=3))
    with Image.open(tmp_path / "p" / "judged" / "splits.png") as sheet:
        top = [sheet.getpixel((x * 126 + 1, 60)) for x in range(4)]
    red, green = (255, 0, 0), (0, 128, 0)
    assert top == [green, red, red, red]


def test_exploring_policies_thinned_episodes_and_chosen_checkpoints(runs, datasets, tmp_path):
    def made(name, **settings):
        args = {"run": runs["humanoid"], "out": tmp_path / name, "episodes": 2, "every": 3}
        args["checkpoints"] = ("best",)
        eval_epic.collect(eval_epic.Collect("run", **args | settings))
        return eval_epic.load_dataset(tmp_path / name)

    once, again = made("a", explore=True), made("b", explore=True)
    assert once.meta["id"] == again.meta["id"] != made("c", explore=True, seed=1).meta["id"]
    np.testing.assert_array_equal(once.states, again.states)
    assert once.step.tolist() == [2, 5] * 2 and set(once.checkpoint_step) == {2000}
    mean = made("d", checkpoints=("2000", "100"))
    assert mean.checkpoint_step.tolist() == [2000] * 4 + [100] * 4
    assert np.abs(mean.actions[:4] - once.actions).max() > 0.05  # of 0.4
    with pytest.raises(UsageError, match="DQN has no random policy"):
        made("e", run=runs["good"], explore=True)


class Stop(Exception):
    pass


def test_an_interrupted_collection_goes_on_and_ends_the_same(runs, datasets, tmp_path, monkeypatch):
    args = eval_epic.Collect("run", tmp_path / "d", run=runs["humanoid"], episodes=2)
    played = []

    def rollout_once(*words, real=eval_epic.rollout):
        if played:
            raise Stop
        played.append(real(*words))
        return played[-1]

    with monkeypatch.context() as patch:  # in the second checkpoint's rollouts
        patch.setattr(eval_epic, "rollout", rollout_once)
        with pytest.raises(Stop):
            eval_epic.collect(args)
    with pytest.raises(UsageError, match="not finished; run the same collect"):
        eval_epic.load_dataset(tmp_path / "d")
    drawn = []

    def writes_ten(path, write, real=eval_epic.write_atomically):
        if len(drawn) == 10 and "frames" in str(path):
            raise Stop
        drawn.extend([path] * ("frames" in str(path)))
        real(path, write)

    def counts(*words, real=eval_epic.rollout):
        played.append(words)
        return real(*words)

    with monkeypatch.context() as patch:  # while it draws; only the second checkpoint is played
        patch.setattr(eval_epic, "write_atomically", writes_ten)
        patch.setattr(eval_epic, "rollout", counts)
        with pytest.raises(Stop):
            eval_epic.collect(args)
    assert len(played) == 2
    before = (tmp_path / "d" / "frames" / "000003.png").stat().st_mtime_ns
    eval_epic.collect(args)
    assert (tmp_path / "d" / "frames" / "000003.png").stat().st_mtime_ns == before
    ours, whole = contents(tmp_path / "d"), contents(datasets["humanoid"])
    assert ours.keys() == {k for k in whole if "/" not in k or k.startswith("frames")}
    same = [name for name in ours if not name.endswith(".npz")]  # npz files hold the time of day
    assert all(ours[name] == whole[name] for name in same)


def test_a_killed_collection_goes_on(tmp_path):
    words = "collect --source uniform --env-id CartPole-v1 --states 800 --render-size 200"
    words = [*words.split(), "--out"]
    words = [sys.executable, str(ROOT / "eval_epic.py"), *words, str(tmp_path / "d")]
    process = subprocess.Popen(words, env=ENVIRONMENT, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while len(list((tmp_path / "d").glob("frames/0*.png"))) < 20:
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not eval_epic.read_meta(tmp_path / "d")["finished"]
    args = eval_epic.Collect("uniform", tmp_path / "d", states=800, render_size=200)
    eval_epic.collect(args)
    data = eval_epic.load_dataset(tmp_path / "d")
    renderer = eval_epic.make_renderer("CartPole-v1", 200, True)
    for index in (0, 19, 20, 21, 799):
        frame = renderer.render(data.states[index : index + 1])[0]
        np.testing.assert_array_equal(data.frame(index), frame)


def test_collect_again_does_nothing_and_other_arguments_overwrite_nothing(datasets, capsys):
    before = contents(datasets["cart"])
    args = eval_epic.Collect("uniform", datasets["cart"], states=150, render_size=64)
    eval_epic.collect(args)
    assert "finished already" in capsys.readouterr().out
    args.seed = 5
    with pytest.raises(UsageError, match="is a dataset with seed 0, not 5; choose another"):
        eval_epic.collect(args)
    assert contents(datasets["cart"]) == before


# ------------------------------------------------------------------------------ epic


def write_labels(path, rows):
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(eval_epic.LABEL_COLUMNS)
        writer.writerows(rows)
    return path


def read_table(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="session")
def cart_rewards(datasets):
    """CLIP rewards of the cart's states {alpha: [150]}, without eval_epic."""
    import clip_reward

    data = eval_epic.load_dataset(datasets["cart"])
    task = judges.TASKS["cartpole"]
    prompts = [task.target_prompt], [task.baseline_prompt]
    reward = clip_reward.make_clip_reward("cpu", "local-dir:tiny_clip", *prompts)
    frames = torch.from_numpy(np.stack([data.frame(index) for index in range(150)]))
    rewards = {}
    for reward.alpha in (0.0, 1.0):
        rewards[reward.alpha] = reward(frames).double().numpy()
    return data, rewards


def run_epic(datasets, name, out, **settings):
    args = eval_epic.Epic(
        datasets[name], ("local-dir:tiny_clip",), device="cpu", out=out, **settings
    )
    eval_epic.epic(args)
    return {float(row["reward_alpha"]): row for row in read_table(out / "epic.csv")}


def test_epic_of_a_model_to_the_judge(datasets, cart_rewards, tmp_path, capsys):
    data, rewards = cart_rewards
    table = run_epic(datasets, "cart", tmp_path / "goal", reward_alpha=(0.0, 1.0))
    goal = judges.TASKS["cartpole"].judge(data.states)
    for alpha, values in rewards.items():
        expected = math.sqrt((1 - np.corrcoef(values, goal)[0, 1]) / 2)
        assert float(table[alpha]["epic"]) == pytest.approx(expected, abs=1e-4)
        assert float(table[alpha]["low"]) < expected < float(table[alpha]["high"])
        assert table[alpha]["dataset"] == data.meta["id"] and table[alpha]["states"] == "150"
        assert int(table[alpha]["parameters"]) > 1e6
    out = capsys.readouterr().out
    assert f"{float(table[1.0]['epic']):.4f} (" in out and "goal states: " in out
    for name in ("epic_alpha", "epic_scaling", "histograms"):
        with Image.open(tmp_path / "goal" / f"{name}.png") as image:
            assert len(np.unique(np.asarray(image.convert("L")))) > 20
    # labels of the next state alone: the general form is the same number
    general = run_epic(datasets, "cart", tmp_path / "general", reward_alpha=(0.0,), form="general")
    assert float(general[0.0]["epic"]) == pytest.approx(float(table[0.0]["epic"]), abs=2e-6)
    # and CartPole's own reward is the judge's verdict here
    own = run_epic(datasets, "cart", tmp_path / "own", reward_alpha=(0.0,), labels="env")
    assert own[0.0]["epic"] == table[0.0]["epic"]


def test_epic_to_a_persons_labels(datasets, cart_rewards, tmp_path):
    data, rewards = cart_rewards
    answers = {index: int(index % 3 == 0) for index in range(0, 100, 2)}
    rows = [(data.meta["id"], "frame", k, "cartpole", label) for k, label in answers.items()]
    rows += [("someone-elses", "frame", 9999, "cartpole", 1)]
    path = write_labels(tmp_path / "labels.csv", rows)
    table = run_epic(datasets, "cart", tmp_path / "e", reward_alpha=(0.0,), labels=str(path))
    values = rewards[0.0][list(answers)]
    expected = math.sqrt((1 - np.corrcoef(values, list(answers.values()))[0, 1]) / 2)
    assert float(table[0.0]["epic"]) == pytest.approx(expected, abs=1e-4)
    assert table[0.0]["states"] == "50"


def test_the_general_form_sees_what_the_action_costs(datasets, tmp_path):
    """MountainCarContinuous' own reward, by loops over the same transitions and samples."""
    data = eval_epic.load_dataset(datasets["car"])
    rows = np.arange(len(data))
    states, (s, a, later), samples = eval_epic.transitions_of(data, rows, 50, 0)
    own = eval_epic.own_reward("MountainCarContinuous-v0")

    def reward(s, a, later):
        return own(states[s], a, states[later])

    known = np.isfinite(data.previous).all(1)
    fresh = known & (data.previous[:, 0] < 0.45)  # until it has arrived
    np.testing.assert_allclose(reward(s, a, later)[fresh], data.env_reward[fresh], atol=1e-5)
    shaped = eval_epic.canonical(reward, (s, a, later), samples, 0.9)

    def expected(state):
        return np.mean([reward(np.array([state]), samples[1][[j]], samples[2][[j]])[0]
                        for j in range(50)])  # fmt: skip

    constant = 0.9 * reward(*samples).mean()
    for k in (1, 70, 140):
        value = reward(s[[k]], a[[k]], later[[k]])[0]
        value += 0.9 * expected(later[k]) - expected(s[k]) - constant
        assert shaped[k] == pytest.approx(value, abs=1e-9)


# ------------------------------------------------------------------------------ success


def test_success_of_a_good_and_a_bad_policy_side_by_side(runs, tmp_path, capsys):
    args = {"compare": runs["bad"], "episodes": 12, "videos": 4, "video_size": 64}
    eval_epic.success(eval_epic.Success(runs["good"], out=tmp_path / "s", **args))
    out = capsys.readouterr().out
    assert "success 100 % (12 of 12 episodes), 95 % interval 76 to 100 %" in out
    assert "success 0 % (0 of 12 episodes), 95 % interval 0 to 24 %" in out
    assert "ground truth" in out and "[0, 0, 0, 0, 0, 0, 0, 0, 0, 12]" in out
    summary = json.loads((tmp_path / "s" / "success.json").read_text())
    assert [entry["success_rate"] for entry in summary] == [1.0, 0.0]
    rows = read_table(tmp_path / "s" / "episodes.csv")
    assert [row["good_steps"] for row in rows[:12]] == ["30"] * 12
    assert all(0 < int(row["good_steps"]) < 30 for row in rows[12:])
    assert (tmp_path / "s" / "histogram.png").stat().st_size > 5000
    import imageio.v2 as imageio

    reader = imageio.get_reader(tmp_path / "s" / "episodes.mp4")
    frames = np.stack([frame for frame in reader]).astype(int)
    assert frames.shape == (30, 128, 2 * (128 + 8), 3)
    edge = frames[:, 40, 1]  # of the first episode's picture
    assert (edge[:, 1] - edge[:, 0] > 60).all(), "green in every step of a good policy"
    edge = frames[-1, [40, 104], 137]
    assert (edge[:, 0] - edge[:, 1] > 60).all(), "red where the pole lies"


def test_success_of_sac_on_the_mountain_and_on_the_humanoid(runs, tmp_path, capsys):
    eval_epic.success(eval_epic.Success(runs["car"], episodes=3, videos=0, out=tmp_path / "car"))
    assert "success 100 % (3 of 3" in capsys.readouterr().out
    args = {"episodes": 3, "videos": 2, "video_size": 32, "checkpoint": "100"}
    eval_epic.success(eval_epic.Success(runs["humanoid"], out=tmp_path / "h", **args))
    # six steps from the start: it still stands
    assert "standing" in capsys.readouterr().out
    rows = read_table(tmp_path / "h" / "episodes.csv")
    for row in rows:
        assert int(row["success"]) == (int(row["good_steps"]) >= 3) and row["steps"] == "6"
    assert (tmp_path / "h" / "episodes.mp4").is_file()


def test_a_person_takes_the_judges_place(datasets, tmp_path, capsys):
    data = eval_epic.load_dataset(datasets["humanoid"])
    verdict = judges.TASKS["standing"].judge(data.states)

    def human(rows):
        rows = [(data.meta["id"], *row[:2], "standing", row[2]) for row in rows]
        path = write_labels(tmp_path / "labels.csv", rows)
        args = {"dataset": datasets["humanoid"], "human": path, "out": tmp_path / "s"}
        eval_epic.success(eval_epic.Success(**args))
        return capsys.readouterr().out, read_table(tmp_path / "s" / "episodes.csv")

    # frames: 3 of 4 answers in episode 0, 1 of 3 in episode 1, none in episode 2; episode 3: yes
    rows = [("frame", k, int(k != 2)) for k in range(4)]
    rows += [("frame", 6, 1), ("frame", 7, 0), ("frame", 8, 0), ("episode", 3, 1)]
    out, table = human(rows)
    assert [row["success"] for row in table] == ["1", "0", "1"]
    assert [row["steps"] for row in table] == ["4", "3", "0"]
    agree = np.mean([verdict[k] == label for unit, k, label in rows if unit == "frame"])
    assert f"agree on {100 * agree:.1f} % of 7 frames" in out
    assert "step 100: success 50 % (1 of 2" in out and "step 2000: success 100 % (1 of 1" in out


# ------------------------------------------------------------------------------ bad input


def test_bad_input_is_one_line_and_exit_code_2(runs, datasets, tmp_path):
    assert "no args.json" in refuses("success", "--run", tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    words = ("collect", "--source", "uniform", "--out", tmp_path / "mine")
    assert "is not a dataset; nothing was written" in refuses(*words)
    assert contents(tmp_path / "mine") == {"thesis.txt": b"years of work"}


def foreign(folder, **files):
    folder.mkdir()
    for name, text in files.items():
        (folder / name.replace("_", ".")).write_text(text)
    return folder


def test_missing_foreign_and_damaged_runs(runs, tmp_path, capsys):
    def message(folder, **settings):
        with pytest.raises(UsageError) as caught:
            eval_epic.success(eval_epic.Success(folder, out=tmp_path / "s", **settings))
        assert "\n" not in str(caught.value)
        return str(caught.value)

    assert "no args.json" in message(tmp_path / "nowhere")
    assert "damaged" in message(foreign(tmp_path / "a", args_json="{"))
    args = json.loads((runs["good"] / "args.json").read_text()) | {"leap": True, "jump": False}
    eval_epic.load_run(foreign(tmp_path / "e", args_json=json.dumps(args)))
    assert "nothing here: leap\n" in capsys.readouterr().err
    alien = foreign(tmp_path / "b", args_json='{"env_id": "CartPole-v1", "lr": 1}')
    assert "not a run of sac_clip_humanoid.py or dqn" in message(alien)
    assert "no checkpoint 7; best.pt or one of: 64" in message(runs["good"], checkpoint="7")
    assert "CartPole-v1 has cartpole" in message(runs["good"], task="kneeling")
    assert "has no cartpole" in message(runs["good"], compare=runs["car"])
    broken = shutil.copytree(runs["good"], tmp_path / "c")
    best = broken / "checkpoints" / "best.pt"
    best.write_bytes(best.read_bytes()[:500])
    assert "best.pt: damaged or not a checkpoint" in message(broken)
    shutil.copy(runs["humanoid"] / "checkpoints" / "best.pt", best)
    assert "best.pt: damaged or not a checkpoint" in message(broken)
    args = json.loads((runs["humanoid"] / "args.json").read_text())
    args["target_prompt"] = ["a humanoid robot dancing"]
    dancing = foreign(tmp_path / "d", args_json=json.dumps(args))
    assert "--task says what to judge by; one of: kneeling, lotus" in message(dancing)
    assert "needs either --run" in message(None)
    assert not list((tmp_path / "s").glob("*"))


def test_datasets_and_labels_that_do_not_do(datasets, tmp_path):
    data = eval_epic.load_dataset(datasets["cart"])
    ours = data.meta["id"]

    def message(folder=datasets["cart"], rows=None, **settings):
        if rows is not None:
            settings["labels"] = str(write_labels(tmp_path / "labels.csv", rows))
        args = eval_epic.Epic(folder, ("local-dir:tiny_clip",), out=tmp_path / "e", **settings)
        with pytest.raises(UsageError) as caught:
            eval_epic.epic(args)
        assert "\n" not in str(caught.value) and not (tmp_path / "e").exists()
        return str(caught.value)

    def row(index, label, unit="frame", task="cartpole", name=ours):
        return (name, unit, index, task, label)

    assert "all 2 are yes, and EPIC is undefined" in message(rows=[row(0, 1), row(1, 1)])
    assert "no label for cartpole" in message(rows=[row(0, 1, name="0123456789ab")])
    assert "it has kneeling on" in message(rows=[row(0, 1, task="kneeling")])
    assert "line 3: " in message(rows=[row(0, 1), row(150, 0)])
    assert "has no frame 150" in message(rows=[row(0, 1), row(150, 0)])
    assert "label 0 or 1" in message(rows=[row(0, "yes")])
    assert "labelled both 0 and 1" in message(rows=[row(4, 1), row(4, 0)])
    assert "EPIC needs frames" in message(rows=[row(4, 1, "episode"), row(5, 0, "episode")])
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    assert "the columns are dataset,unit" in message(labels=str(tmp_path / "other.csv"))
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00\x80" * 50)
    assert "not a CSV file" in message(labels=str(tmp_path / "binary.csv"))
    assert "No such file" in message(labels=str(tmp_path / "none.csv"))
    assert "outside [0, 1]" in message(reward_alpha=(0.0, 2.0))
    assert "CartPole-v1 has cartpole" in message(task="lotus")
    assert "comes out of its physics" in message(
        datasets["humanoid"], labels="env", form="general", task="standing"
    )
    for name, damage in (
        ("dataset.json", b'{"format": 1'),
        ("dataset.json", b'{"format": 99, "id": "x", "finished": true}'),
        ("states.npz", (datasets["cart"] / "states.npz").read_bytes()[:300]),
        ("states.npz", (datasets["humanoid"] / "states.npz").read_bytes()),
        ("frames/000004.png", b"not a picture"),
    ):
        shutil.rmtree(tmp_path / "copy", ignore_errors=True)
        copy = shutil.copytree(datasets["cart"], tmp_path / "copy")
        (copy / name).write_bytes(damage)
        with pytest.raises(UsageError, match="damaged|format 99|does not belong"):
            eval_epic.load_dataset(copy).frame(4)


# ------------------------------------------------------------------------------ landscape


def test_landscape_writes_every_value_of_its_figure(tmp_path, capsys):
    out = tmp_path / "land.png"
    settings = {"reward_alpha": (0.0, 1.0), "points": 37, "render_size": 64, "device": "cpu"}
    eval_epic.landscape(eval_epic.Landscape("local-dir:tiny_clip", out=out, **settings))
    rows = read_table(tmp_path / "land.csv")
    assert len(rows) == 3 * 2 * 37 and out.stat().st_size > 20_000
    cart = [row for row in rows if row["env_id"] == "CartPole-v1" and row["reward_alpha"] == "0.0"]
    values = np.array([float(row["value"]) for row in cart])
    np.testing.assert_allclose(values, np.linspace(-np.pi, np.pi, 37), atol=1e-5)
    goal = np.array([row["is_goal"] == "1" for row in cart])
    np.testing.assert_array_equal(goal, np.abs(values) <= np.radians(12))
    states = np.zeros((37, 4))
    states[:, 2] = values
    np.testing.assert_array_equal(goal, judges.TASKS["cartpole"].judge(states))
    assert capsys.readouterr().out.count("Pearson correlation") == 6
    with pytest.raises(UsageError, match="does not end in .png"):
        eval_epic.landscape(eval_epic.Landscape("local-dir:tiny_clip", out=tmp_path / "a.pdf"))
