"""What both scripts promise, as a user meets it: a run's folder, resuming, copies of a script."""

import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import gymnasium as gym
import helpers
import imageio.v2 as imageio
import numpy as np
import pytest
import torch
from helpers import KNEELING, TINY, checkpoint, equal, only_run, rings, run, scalars
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar.layout_pb2 import Layout

import clip_reward
import dqn_clip_classic as dqn
import sac_clip_humanoid as sac
from clip_reward import Scorer, UsageError
from training.run import (
    STOP_SIGNALS,
    Run,
    cut,
    latest_run,
    load_args,
    load_checkpoint,
    parse_args,
    run_folder,
    saved_flags,
)

UPRIGHT = "pole vertically upright on top of the cart"
SMALL = [
    *("--num-envs", 2, "--episode-length", 12, "--render-size", 64),
    *("--batch-size", 16, "--gradient-steps", 6, "--learning-starts", 24),
]
CLIP = {
    sac: [*SMALL, "--target-prompt", KNEELING, "--clip-model", TINY, "--reward-devices", "cpu"],
    dqn: [*SMALL, "--target-prompt", UPRIGHT, "--clip-model", TINY, "--reward-devices", "cpu"],
}
TRUTH = [*SMALL, "--reward", "ground-truth", "--video-freq", 0]
CHEETAH = {sac: ["--env-id", "HalfCheetah-v5"], dqn: []}
BOTH = pytest.mark.parametrize("script", [sac, dqn], ids=["sac", "dqn"])


@pytest.fixture(scope="module", params=[sac, dqn], ids=["sac", "dqn"])
def finished(request, tmp_path_factory):
    """(script, folder, process) of a CLIP run with a judge: 4 rollouts of 2 x 12 steps."""
    script, runs_dir = request.param, tmp_path_factory.mktemp("runs")
    judge = runs_dir.parent / "high.py"
    judge.write_text("def high(states):\n    'The torso is high.'\n    return states[:, 2] > 1.0\n")
    more = ["--total-timesteps", 96, "--checkpoint-freq", 48, "--video-freq", 48]
    more += ["--judge", f"{judge}:high"] if script is sac else []
    process = run(script.__file__, *CLIP[script], *more, "--runs-dir", runs_dir)
    return script, only_run(runs_dir), process


# ------------------------------------------------------------------------------ a run


def test_one_lucky_rollout_among_the_first_is_no_bar_for_best(tmp_path, monkeypatch):
    """best.pt holds the newest networks until it has enough rollouts to take a mean of."""
    monkeypatch.setattr("training.run.BEST_WINDOW", 5)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)
    handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    run = Run(sac.Args(reward="ground-truth", runs_dir=str(tmp_path)))
    network, kept = torch.nn.Linear(1, 1, bias=False), []
    for step, reward in enumerate([9.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 7.0]):
        run.step = step
        network.weight.data.fill_(step)
        run.keep_best(reward, actor=network)
        best = checkpoint(run.folder, "best")
        assert best["actor"]["weight"] == best["global_step"]
        kept.append((best["global_step"], round(best["reward"], 3), best["rollouts"]))
    run.writer.close()
    for number, handler in handlers.items():
        signal.signal(number, handler)
    full = (4, 2.6, 5)  # the mean of 9, 1, 1, 1, 1; later 1, 1, 1, 1, 7 is 2.2
    first = [(0, 9.0, 1), (1, 5.0, 2), (2, 3.667, 3), (3, 3.0, 4)]
    assert kept == [*first, full, full, full, full]


def test_a_refused_start_leaves_no_folder(tmp_path, monkeypatch, capsys):
    """A checkpoint that a new run cannot begin with: other content, or networks of NaN."""
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)
    handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    network, path = torch.nn.Linear(2, 1), tmp_path / "step_3.pt"
    broken = {name: x * math.nan for name, x in network.state_dict().items()}
    for actor in (broken, None, [], 7, {}, torch.ones(2)):
        torch.save({"global_step": 3, "actor": actor}, path)
        runs_dir = tmp_path / "runs"
        run = Run(sac.Args(reward="ground-truth", runs_dir=str(runs_dir), resume=str(path)))
        with pytest.raises(UsageError) as caught:
            run.restore({"actor": network})
        assert actor is not broken or "step_3.pt: NaN or infinity in weight" in str(caught.value)
        assert only_run(runs_dir) == run.folder
        run.writer.close()
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            sys.excepthook(UsageError, caught.value, None)
        said = capsys.readouterr().err
        assert end.value.code == 2 and said == f"error: {caught.value}\n"
        assert not [*runs_dir.iterdir()]
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("count", [-1, 10**30, True, 1.0, "7", None])
def test_what_counts_no_steps_is_no_checkpoint(count, tmp_path):
    for name in ("global_step", "rollout"):
        torch.save({"global_step": 3, "rollout": 2} | {name: count}, tmp_path / "step_3.pt")
        with pytest.raises(UsageError, match="it holds no number of steps$"):
            load_checkpoint(tmp_path / "step_3.pt")


def test_a_refusal_is_one_printable_line_whatever_a_file_holds(tmp_path):
    (tmp_path / "args.json").symlink_to("/dev/zero")  # without an end
    with pytest.raises(UsageError, match="args.json is damaged: it is larger than a megabyte$"):
        saved_flags(tmp_path)
    assert cut(UsageError("a\nb\x1b[2J\0" + "c" * 10**6)) == "a b[2J" + "c" * 691 + " .."
    line = "the name as it is: ünï"
    assert cut(UsageError(line)) == line


@pytest.mark.slow
def test_an_action_of_nan_ends_the_run(tmp_path):
    """Also where the task takes it for a finite one, as MountainCarContinuous may."""
    code = "import runpy, sys, torch; torch.erf = lambda x: x * torch.nan; del sys.argv[0]; "
    code += "runpy.run_path(sys.argv[0], run_name='__main__')"
    words = [*TRUTH, "--env-id", "MountainCarContinuous-v0", "--runs-dir", tmp_path]
    said = run("-c", code, sac.__file__, *words, code=1).stderr
    where = "environment 0 is not finite after step [01] of the episode with seed"
    assert re.match(f"error: (action|observation) of {where}", said)


@pytest.mark.slow
def test_pictures_that_reward_nothing_do_not_bind_a_resumed_run(tmp_path):
    """Ground truth: videos may begin or end when it is resumed."""
    words = [sac.__file__, *CHEETAH[sac], *TRUTH, "--runs-dir", tmp_path]
    run(*words, "--total-timesteps", 24)
    folder = only_run(tmp_path)
    more = ["--resume", folder, "--video-freq", 24, "--total-timesteps"]
    run(sac.__file__, *more, 48)
    assert [path.name for path in (folder / "videos").glob("*.mp4")] == ["step_48.mp4"]
    more[3] = 0
    run(sac.__file__, *more, 72)
    assert checkpoint(folder)["global_step"] == 72


OWN_PICTURES = """
import gymnasium as gym
import numpy as np


class Lost(Exception):
    def __init__(self, context, why):
        super().__init__("the context is lost")

    def __reduce__(self):
        raise TypeError("it cannot be pickled")


class Task(gym.Env):
    observation_space = gym.spaces.Box(-1, 1, (2,))
    action_space = gym.spaces.Box(np.float32([-0.3, 0.1]), np.float32([0.7, 1.3]))
    metadata = {"render_modes": ["rgb_array"], "render_fps": None}
    pictures = 0

    def __init__(self, render_mode=None):
        self.render_mode = render_mode

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(2, np.float32), {}

    def step(self, action):
        assert self.action_space.contains(action), action
        done = bool(action[0] > 0)
        return np.float32(action) / 2, 0.0, False, False, {"is_success": done}

    def render(self):
        self.pictures += 1
        if self.pictures == LAST:
            raise Lost(1, 2)
        return np.full((32, 48, 3), 99, np.uint8)


gym.register("Task-v0", Task, disable_env_checker=True)
"""


@pytest.mark.parametrize("last", [None, pytest.param(7, marks=pytest.mark.slow)])
def test_a_task_with_pictures_of_its_own(last, tmp_path):
    """Without a frame rate; its success; what its render() raises ends the run and is named."""
    (tmp_path / "own_pictures.py").write_text(OWN_PICTURES.replace("LAST", str(last)))
    words = ["--env-id", "own_pictures:Task-v0", *CLIP[sac], "--video-freq", 48]
    words += ["--checkpoint-freq", 24, "--total-timesteps", 48, "--runs-dir", tmp_path / "runs"]
    path = os.pathsep.join([str(tmp_path), helpers.environment()["PYTHONPATH"]])
    process = run(sac.__file__, *words, code=1 if last else 0, PYTHONPATH=path)
    folder = only_run(tmp_path / "runs")
    if last:
        *above, line = process.stderr.splitlines()
        assert "raise Lost(1, 2)" in "".join(above)
        cause = "error: the environment failed: own_pictures.Lost: the context is lost; saved: "
        assert line.startswith(f"{cause}step_24.pt; resume with: python "), line
        return
    values, _ = scalars(folder)
    assert len(values["charts/success_rate"]) == 2
    assert (folder / "videos/step_48.mp4").stat().st_size


def test_a_run_leaves_everything_that_is_promised(finished):
    script, folder, process = finished
    upright = "pole_vertically_upright_on_top_of_the_ca"  # forty letters
    goal = "Humanoid-v5__kneeling__sac" if script is sac else f"CartPole-v1__{upright}__dqn"
    name = script.__name__.partition("_")[2]
    assert re.fullmatch(rf"{goal}_{name}__1__\d+", folder.name)
    values, images = scalars(folder)
    charts = "clip_reward episodic_clip_return episodic_return SPS success_rate clip_pictures"
    losses = ["td_loss", "q_values"]
    if script is sac:
        losses = (
            "qf1_loss qf2_loss qf1_values qf2_values actor_loss alpha_loss alpha entropy".split()
        )
    tags = [f"time/{part}_s" for part in "physics render clip update wait judge".split()]
    tags += [f"charts/{chart}" for chart in charts.split()] + [f"losses/{loss}" for loss in losses]
    for tag in tags:
        assert values[tag] and all(math.isfinite(event.value) for event in values[tag]), tag
    assert ("charts/epsilon" in values) == (script is dqn)
    assert [event.step for event in values["charts/clip_reward"]] == [24, 48, 72, 96]
    for mean, total in zip(values["charts/clip_reward"], values["charts/episodic_clip_return"]):
        assert total.value == pytest.approx(12 * mean.value, rel=1e-5)
    args = json.loads((folder / "args.json").read_text())
    assert len(args["target_prompt"]) == 1 and args["render_size"] == 64
    assert args["script"] == script.__file__
    baseline = ["a humanoid robot"] if script is sac else []  # the humanoid has one of its own
    assert args["baseline_prompt"] == baseline
    kept = {path.name for path in (folder / "checkpoints").iterdir()}
    assert kept == {"best.pt", "step_48.pt", "step_96.pt"}
    network = "averaged_actor" if script is sac else "q_network"
    assert checkpoint(folder, "best").keys() == {network, "global_step", "reward", "rollouts"}
    last, best = checkpoint(folder), checkpoint(folder, "best")
    assert last["global_step"] == 96 and last["rollout"] == 4
    assert last[network].keys() == best[network].keys() and equal(last["best"], best)
    videos = sorted((folder / "videos").glob("*.mp4"))
    assert [path.name for path in videos] == ["step_48.mp4", "step_96.mp4"]
    shape = (240, 720, 3) if script is sac else (240, 240, 3)
    assert np.stack(imageio.mimread(videos[0])).shape == (12, *shape)
    (films,) = images.values()
    assert len(films) == 2 and all(film.height <= 80 for film in films), "small, in TensorBoard"
    assert str(folder) in process.stdout
    line = r"^step \d.* left 0:\d\d:\d\d  (clip_reward +-?\d.* success_rate .* SPS \d+)"
    columns = re.findall(line, process.stdout, re.M)
    places = [[match.start() for match in re.finditer("[a-z_]+ ", text)] for text in columns]
    assert len(places) == 4 and places == [places[0]] * 4, "the same columns"
    assert f"\njudge it: python eval_epic.py success --run {folder}" in process.stdout
    assert all(len(line) <= 120 for line in process.stdout.splitlines() if folder.name not in line)
    assert not re.search("deprecat|error|XDG", process.stderr, re.IGNORECASE), process.stderr


def test_tensorboard_begins_with_what_matters_and_knows_the_flags(finished):
    script, folder, _ = finished
    events = EventAccumulator(str(folder)).Reload()
    (layout,) = events.Tensors("custom_scalars__config__")
    layout = Layout.FromString(layout.tensor_proto.string_val[0])
    titles = [chart.title for chart in layout.category[0].chart]
    assert titles[:2] == ["reward per step", "share of successful episodes"]
    tags = [tag for chart in layout.category[0].chart for tag in chart.multiline.tag]
    assert {"losses/qf1_loss", "losses/td_loss", "time/update_s"} <= set(tags)
    there = set(scalars(folder)[0])
    other = {"losses/td_loss"} if script is sac else {x for x in tags if "/qf" in x or "/act" in x}
    assert set(tags) - there == other
    (text,) = events.Tensors("hyperparameters/text_summary")
    rows = text.tensor_proto.string_val[0].decode().splitlines()
    assert "|seed|1|" in rows and "|render_size|64|" in rows
    assert len(rows) == 2 + len(vars(script.Args()))


def test_every_reward_is_that_of_its_own_next_states(finished):
    """Replays the first rollout's actions in Gymnasium's own task, scores and judges the states.
    SAC on the humanoid holds each action for two steps, whose rewards it averages."""
    script, folder, _ = finished
    held = 2 if script is sac else 1
    seed = np.random.SeedSequence((1, 0)).generate_state(3).tolist()[1]  # of the second of two
    if script is sac:
        observations, actions, rewards = (ring[0].numpy() for ring in rings(folder))
        observations, later = observations[:-1, 1], observations[1:, 1]
        env = gym.make("Humanoid-v5", terminate_when_unhealthy=False, **sac.NO_FORCES)
        low, high = env.action_space.low, env.action_space.high
        actions = ((actions[:, 1] + 1) / 2 * (high - low) + low).astype(np.float32)
    else:
        columns = [ring[:24].unflatten(0, (12, 2)).numpy() for ring in rings(folder)]
        observations, later, actions, rewards, terminations = columns
        assert not terminations.any()
        env = gym.make("CartPole-v1").unwrapped
        observations, later, actions = observations[:, 1], later[:, 1], actions[:, 1]
    first, _ = env.reset(seed=seed)
    np.testing.assert_array_equal(observations[0], first.astype(np.float32))
    states = []
    for t in range(12):
        observation, *_ = env.step(actions[t // held])
        if (t + 1) % held == 0:
            np.testing.assert_allclose(later[t // held], observation, rtol=1e-4, atol=1e-4)
        task = env.unwrapped
        states.append(np.hstack([task.data.qpos, task.data.qvel] if script is sac else task.state))
    args = load_args(folder, script.Args)
    scorer = Scorer(
        lambda device: script.make_renderer(args),
        lambda device: clip_reward.make_clip_reward(args, device),
    )
    expected, *_ = scorer.score(np.stack(states))
    scorer.close()
    scored = [0, 4, 8, 11]
    between = np.interp(range(12), scored, expected[scored])
    np.testing.assert_allclose(rewards[:, 1], between.reshape(-1, held).mean(1), atol=2e-3)
    assert np.ptp(expected) > 4e-3, "a reset's picture would score like the first"
    success = scalars(folder)[0]["charts/success_rate"]
    assert all(event.value in (0, 0.5, 1) for event in success)
    if script is sac:  # by the judge: half of an episode's steps
        high = np.mean(np.stack(states)[:, 2] > 1.0) >= 0.5
        assert success[0].value in ((0.5, 1) if high else (0, 0.5))


def interrupt(number, at, *words):
    """Send a script a signal when it reports step `at`; returns its exit code."""
    process = subprocess.Popen(
        [sys.executable, *map(str, words)],
        **{"stdout": subprocess.PIPE, "text": True, "env": helpers.environment()},
    )
    assert any(line.startswith(f"step {at:,}/") for line in process.stdout)
    process.send_signal(number)
    process.communicate(timeout=120)
    return process.returncode


def test_a_resumed_run_equals_the_uninterrupted_one(finished, tmp_path):
    script, whole, _ = finished
    half = shutil.copytree(whole, tmp_path / "half")
    (half / "checkpoints/step_96.pt").unlink()
    flags = json.loads((half / "args.json").read_text())
    run(script.__file__, "--resume", half, *(["--judge", flags["judge"]] if script is sac else []))
    one, two = checkpoint(half), checkpoint(whole)
    assert equal(one, two) and not equal(one, checkpoint(half, "step_48"))
    assert equal(checkpoint(half, "best"), checkpoint(whole, "best"))
    values, _ = scalars(half)
    assert [event.step for event in values["charts/SPS"]] == [24, 48, 72, 96]
    if script is not sac:
        return
    kept, actions, _ = rings(half)  # at the first step of each action; the mean is of all steps
    env = gym.make("Humanoid-v5", terminate_when_unhealthy=False, **sac.NO_FORCES)
    seen = []
    for rollout in range(4):
        seeds = np.random.SeedSequence((1, rollout)).generate_state(3).tolist()[:2]
        for i, seed in enumerate(seeds):
            seen.append(env.reset(seed=seed)[0])
            for action in actions[rollout, :, i].numpy() * env.action_space.high:
                seen += [env.step(action)[0] for _ in range(2)]
            np.testing.assert_allclose(seen[-1], kept[rollout, -1, i], rtol=1e-3, atol=1e-3)
    seen = torch.tensor(np.stack(seen))
    assert one["actor"]["normalize.count"] == len(seen) == 4 * 13 * 2
    best = checkpoint(half, "best")  # as it was played: with what had been seen before
    assert best["averaged_actor"]["normalize.count"] == (best["global_step"] / 24 - 1) * 13 * 2
    mean, var = one["actor"]["normalize.mean"], one["actor"]["normalize.var"]
    torch.testing.assert_close(mean.double(), seen.mean(0), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(var.double(), seen.var(0, correction=0), atol=1e-4, rtol=1e-3)


def test_a_quarter_of_the_environments_take_the_averaged_actors_mean_actions(tmp_path):
    flags = ["--num-envs", 4, "--total-timesteps", 144, "--checkpoint-freq", 48]
    run(sac.__file__, *TRUTH, *flags, "--runs-dir", tmp_path)
    folder = only_run(tmp_path)
    before, best = checkpoint(folder, "step_96"), checkpoint(folder, "best")
    observations, actions, rewards = (ring[2] for ring in rings(folder))  # the third rollout
    space = gym.spaces.Box(-0.4, 0.4, (17,))
    actor = sac.Actor(observations.shape[2], space, sac.Args())
    played = {}
    for name in ("averaged_actor", "actor"):
        actor.load_state_dict(before[name])
        mean, _ = actor(observations[:-1].flatten(0, 1))
        played[name] = mean.tanh().unflatten(0, actions.shape[:2]) - actions
    errors = played["averaged_actor"].abs().amax((0, 2))
    assert errors[0] < 1e-5 and errors[1:].min() > 0.01
    assert played["actor"][:, 0].abs().max() > 1e-4  # it is another network
    assert best["reward"] == pytest.approx(rings(folder)[2][1:, :, 0].mean(), rel=1e-5)


@pytest.mark.slow
@BOTH
def test_a_new_run_may_start_with_the_networks_of_a_checkpoint(script, tmp_path):
    more = [] if script is sac else ["--no-anneal-lr"]  # or 48 steps would anneal faster
    run(script.__file__, *TRUTH, *more, "--total-timesteps", 72, "--runs-dir", tmp_path / "first")
    start = only_run(tmp_path / "first") / "checkpoints/step_72.pt"
    words = [script.__file__, "--resume", start, "--gamma", 0.5, "--total-timesteps"]
    # with learning rates of next to nothing the networks stay what they were
    still = ["--learning-rate", 1e-30]
    still += ["--tau", 1e-30] if script is sac else []
    printed = run(*words, 24, *still, "--runs-dir", tmp_path / "still").stdout
    assert f"this run starts with the networks of {start}; all else is new" in printed
    was, now = torch.load(start), checkpoint(only_run(tmp_path / "still"))
    assert now["global_step"] == 24 and now["replay"]["count"] < was["replay"]["count"]
    networks = ("actor", "averaged_actor", "critic", "target_critic")
    for name in networks if script is sac else ("q_network",):
        for key, value in was[name].items():
            if "normalize" not in key:
                torch.testing.assert_close(now[name][key], value, rtol=0, atol=1e-20)
    if script is sac:  # which goes on counting; and it acts by its policy at once
        assert now["best"]["global_step"] == 24
        assert now["actor"]["normalize.count"] == was["actor"]["normalize.count"] + 13 * 2
        assert now["log_alpha"] == pytest.approx(math.log(0.05), abs=1e-6)
    # it is a run as any other
    for steps in 48, 96:
        run(*words, steps, "--runs-dir", tmp_path / str(steps))
    half, whole = only_run(tmp_path / "48"), only_run(tmp_path / "96")
    run(script.__file__, "--resume", half, "--total-timesteps", 96)
    assert equal(checkpoint(half), checkpoint(whole))
    saved = [json.loads((folder / "args.json").read_text()) for folder in (half, whole)]
    assert [flags["resume"] for flags in saved] == [str(start)] * 2
    assert saved[1]["gamma"] == 0.5 and saved[1]["learning_starts"] == 0
    layers = "--no-normalize" if script is sac else "--layer-norm"
    (line,) = run(*words, 48, layers, code=2).stderr.splitlines()
    assert "the checkpoint does not fit these flags or networks" in line
    words[2] = start.with_name("best.pt")
    assert "networks: it has no " in run(*words, 48, code=2).stderr


def test_a_run_is_found_by_latest_and_by_the_folder_around_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    one, two = Path("runs/kneeling/one"), Path("runs/two")
    for age, folder in enumerate((one, two)):
        folder.mkdir(parents=True)
        (folder / "args.json").write_text("{}")
        os.utime(folder / "args.json", (age, age))
    assert run_folder("latest") == two and run_folder(one) == run_folder("runs/kneeling") == one
    for name in ("nowhere", "runs/kneeling/one/none", "."):
        with pytest.raises(UsageError, match="neither a run's folder .* nor a folder with one run"):
            run_folder(name)
    (tmp_path / "runs/three").mkdir()
    (tmp_path / "runs/three/args.json").write_text("{}")
    with pytest.raises(UsageError, match="nor a folder with one run"):
        run_folder("runs")


def test_a_dqn_run_killed_twice_and_resumed_equals_the_uninterrupted_one(tmp_path):
    base = [dqn.__file__, *TRUTH, "--total-timesteps", 1200]
    base += ["--checkpoint-freq", 120, "--anneal-lr", "--layer-norm"]
    base += ["--target-network-frequency", 4, "--buffer-size", 60, "--runs-dir"]
    run(*base, tmp_path / "whole")
    assert interrupt(signal.SIGTERM, 240, *base, tmp_path / "half") == 128 + signal.SIGTERM
    half, whole = only_run(tmp_path / "half"), only_run(tmp_path / "whole")
    stopped = checkpoint(half)["global_step"]
    assert 240 <= stopped < 1200, "too late to interrupt it"
    assert interrupt(signal.SIGKILL, 600, dqn.__file__, "--resume", half) == -signal.SIGKILL
    assert stopped < checkpoint(half)["global_step"] < 1200
    run(dqn.__file__, "--resume", half)
    one, two = checkpoint(half), checkpoint(whole)
    assert equal(one, two)
    assert one["updates"] == 50 * 6 and one["replay"]["count"] == 1200
    assert equal(checkpoint(half, "best"), checkpoint(whole, "best"))
    values, _ = scalars(half)
    assert [event.step for event in values["charts/epsilon"]] == list(range(24, 1201, 24))


@pytest.mark.parametrize(
    "script", [pytest.param(sac, marks=pytest.mark.slow, id="sac"), pytest.param(dqn, id="dqn")]
)
def test_the_environments_own_reward_needs_no_prompt_and_no_gl(script, tmp_path):
    """Logged to wandb as well; and the updates follow the rollout."""
    spy = f"""
        import runpy, sys
        import gymnasium, torch

        def spied(function, name):
            def call(*args, **kwargs):
                events.append(name)
                return function(*args, **kwargs)
            return call

        events = []
        envs, adam = gymnasium.vector.SyncVectorEnv, torch.optim.Adam
        envs.step, adam.step = spied(envs.step, "step"), spied(adam.step, "update")
        try:
            runpy.run_path({script.__file__!r}, run_name="__main__")
        finally:
            print("EVENTS", *events)
    """
    options = [*CHEETAH[script], "--num-envs", 1, "--learning-starts", 12]
    options += ["--gradient-steps", 9, "--total-timesteps", 36, "--track", "--runs-dir", tmp_path]
    offline = {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "MUJOCO_GL": "disable"}
    output = run("-c", textwrap.dedent(spy), *TRUTH, *options, **offline).stdout
    values, _ = scalars(only_run(tmp_path))
    assert len(values["charts/episodic_return"]) == 3
    assert not {"charts/clip_reward", "charts/clip_pictures"} & values.keys()
    assert ("charts/success_rate" in values) == (script is dqn)
    (record,) = only_run(tmp_path).glob("wandb/offline-run-*/*.wandb")
    assert record.name == f"run-{only_run(tmp_path).name}.wandb", "resumed it is the same run"
    tracked = helpers.wandb_history(record)
    assert tracked["global_step"] == [12, 24, 36]
    for tag, those in values.items():
        assert tracked[tag] == pytest.approx([event.value for event in those], rel=1e-4), tag
    events = output.partition("EVENTS ")[2].split()
    each = 3 if script is sac else 1  # optimisers
    updates = [len(part.split()) // each for part in " ".join(events).split("step")[1:]]
    assert updates == 3 * ([0] * 11 + [9]), "9 updates once 12 steps are scored"


@BOTH
def test_help_lists_every_flag_and_examples_on_lines_of_their_own(script):
    text = run(script.__file__, "--help", COLUMNS="120").stdout
    names = {"--" + name.replace("_", "-") for name in vars(script.Args())}
    listed = set(re.findall(r"^[ │|]*(--[a-z-]+)", text, re.MULTILINE))
    assert names <= listed
    if script is sac:
        assert len(names) <= 43 and len(listed) == len(names)
    examples = [line.strip(" │|") for line in text.splitlines() if "python " in line]
    assert len(examples) >= 4 and all(line.startswith("python ") for line in examples)


# ------------------------------------------------------------------------------ workers


def workers(pid):
    """Its reward workers."""
    children = helpers.descendants(pid)
    return [p for p in children if b"spawn_main" in Path(f"/proc/{p}/cmdline").read_bytes()]


@pytest.mark.slow
def test_a_lost_worker_ends_the_run_and_a_shell_loop_resumes_it_to_the_bit(tmp_path):
    """The learner is saved as it was after the last rollout, however rare the checkpoints are."""
    flags = [sac.__file__, *CLIP[sac], "--reward-devices", "cpu", "cpu", "--video-freq", 0]
    flags += ["--total-timesteps", 144, "--clip-batch-size", 8, "--checkpoint-freq", 0]
    run(*flags, "--runs-dir", tmp_path / "whole")
    command = shlex.join(map(str, [sys.executable, *flags, "--runs-dir", tmp_path / "killed"]))
    process = subprocess.Popen(
        ["bash", "-c", f"until {command} --resume latest; do sleep 1; done"],
        **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True},
        env=helpers.environment(),
    )
    for line in process.stdout:
        if line.startswith("step 48/"):
            os.kill(workers(process.pid)[0], signal.SIGKILL)
    assert process.wait() == 0
    one, two = only_run(tmp_path / "whole"), only_run(tmp_path / "killed")
    errors = process.stderr.read().splitlines()
    for error in errors:
        resume = rf"python \S*{sac.__name__}\.py --resume {two}"
        died = r"error: a reward worker died \(exit code -9; .*\); saved: step_\d+\.pt"
        assert re.fullmatch(f"{died}; resume with: {resume}", error)
    assert len(errors) == 1
    for name in (None, "best"):
        assert helpers.equal(checkpoint(one, name), checkpoint(two, name))


def test_latest_is_the_newest_run_with_these_flags(finished):
    script, folder, _ = finished
    args = load_args(folder, script.Args)
    args.checkpoint_freq = 7  # a flag that --resume may change
    assert latest_run(args) == str(folder)
    args.seed = 2
    assert latest_run(args) is None


# ------------------------------------------------------------------------------ copies

CHANGES = {  # a layer, a loss and a scalar
    sac: [
        ("Sequential(*layers, ", "Sequential(*layers, nn.Linear(HIDDEN, HIDDEN), nn.Tanh(), "),
        ("losses = (values - targets)", "losses = 0.1 * values.mean() + (values - targets)"),
        ("run.log(scalars)", 'run.log(scalars | {"charts/mine": 42.0})'),
    ],
    dqn: [
        ("Sequential(*layers, ", "Sequential(*layers, nn.BatchNorm1d(HIDDEN), nn.Tanh(), "),
        ("loss = F.smooth", "loss = 0.1 * values.mean() + F.smooth"),
        ("run.log(scalars)", 'run.log(scalars | {"charts/mine": 42.0})'),
    ],
}
NEITHER = [("run.log(scalars)", "pass"), ("run.save(saved)", "pass")]


def copied(script, changes, tmp_path):
    """Run a copy of a script with some words replaced -> its folder."""
    text = Path(script.__file__).read_text()
    for words, others in changes:
        assert words in text
        text = text.replace(words, others)
    copy = tmp_path / "mine.py"
    copy.write_text(text)
    run(copy, *TRUTH, "--total-timesteps", 72, "--runs-dir", tmp_path / "runs")
    return only_run(tmp_path / "runs")


@BOTH
def test_a_copy_with_a_layer_a_loss_and_a_scalar_of_its_own(script, tmp_path):
    folder = copied(script, CHANGES[script], tmp_path)
    assert "__mine__1__" in folder.name
    assert [event.value for event in scalars(folder)[0]["charts/mine"]] == [42] * 3
    key, count = ("critic", 24) if script is sac else ("q_network", 11)  # each layer has two parts
    found = [name for name in checkpoint(folder)[key] if "normalize" not in name]
    assert len(found) == count


def test_a_copy_that_neither_logs_nor_saves_ends_all_the_same(tmp_path):
    folder = copied(sac, NEITHER, tmp_path)
    assert not scalars(folder)[0]
    assert {path.name for path in (folder / "checkpoints").iterdir()} == {"best.pt"}


# ------------------------------------------------------------------------------ bad input

PROMPT = dict(target_prompt=("a thing",), clip_model=TINY)


def test_no_gl_library_is_one_line_and_exit_code_2(tmp_path):
    script = """
        import ctypes.util, runpy, sys
        find_library = ctypes.util.find_library
        ctypes.util.find_library = lambda name: None if name in ("EGL", "OSMesa") else (
            find_library(name))
        sys.argv[0] = "sac_clip_humanoid.py"
        runpy.run_path("sac_clip_humanoid.py", run_name="__main__")
    """
    process = run(
        *("-c", textwrap.dedent(script), *CLIP[sac]),
        *("--runs-dir", tmp_path, "--renderer", "egl"),
        code=2,
        MUJOCO_GL="disable",
    )
    (line,) = [line for line in process.stderr.splitlines() if line.startswith("error: ")]
    assert "apt-get install -y libegl1" in line and "Traceback" not in process.stderr


@BOTH
def test_what_cannot_be_resumed(script, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # which parse_args changes, and
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # what Ctrl-C does

    def parse(*arguments):
        monkeypatch.setattr(sys, "argv", ["script.py", "--resume", *arguments])
        return parse_args(script.Args, "")

    folder, (other,) = str(tmp_path), {sac, dqn} - {script}
    flags = vars(script.Args(**PROMPT, batch_size=32))
    contents = [
        (None, "neither a run's folder"),
        (json.dumps(vars(other.Args())), "another script"),
        ("", "args.json is damaged"),
        ("{", "args.json is damaged"),
        ("[1]", "args.json is damaged"),
        (json.dumps(flags | {"target_prompt": None}), "args.json is damaged"),
        (json.dumps(flags | {"gamma": None}), "args.json is damaged"),
        (json.dumps(flags | {"gamma": 2}), "args.json is damaged"),
        ("null", "args.json is damaged"),
    ]
    for content, message in contents:
        if content is not None:
            (tmp_path / "args.json").write_text(content)
        with pytest.raises(UsageError, match=re.escape(message)):
            parse(folder)
    (tmp_path / "args.json").write_text(json.dumps({"script": script.__file__} | flags))
    with pytest.raises(UsageError, match="--gamma was 0.9"):
        parse(folder, "--gamma", "0.5")
    with pytest.raises(UsageError, match="--target-prompt was"):
        parse(folder, "--target-prompt", "something else")
    args = parse(folder, "--total-timesteps", "200", "--reward-devices", "cpu", "cpu")
    assert args.total_timesteps == 200 and args.reward_devices == ("cpu", "cpu")
    assert args.batch_size == 32 and args.target_prompt == ("a thing",)
    del flags["render_size"]  # as in runs older than a flag
    (tmp_path / "args.json").write_text(json.dumps(flags))
    assert parse(folder).frame_size == 64, "tiny_clip's own"
