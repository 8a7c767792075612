"""How good is the reward, how good is the policy? Look before you train, and after.

Reward against pole angle and car position, one line per alpha (figure 2 of arXiv 2310.12921), for
any model; tiny_clip needs no network and takes seconds:

    python eval_epic.py landscape --clip-model local-dir:tiny_clip --render-size 96
    python eval_epic.py landscape --clip-model ViT-bigG-14/laion2b_s39b_b160k

States and their pictures, from all checkpoints of a run, from a classic task's whole state space,
or from the library of humanoid poses:

    python eval_epic.py collect --source run --run runs/RUN --episodes 5 --out data/kneeling
    python eval_epic.py collect --source uniform --env-id CartPole-v1 --out data/cartpole
    python eval_epic.py collect --source poses --render-size 96 --out data/poses

EPIC distance (arXiv 2006.13900) of reward models to labels, by alpha and by size, and the states
that a judge accepts and rejects, for a person to check:

    python eval_epic.py epic --dataset data/kneeling --task kneeling \
        --clip-model RN50/openai ViT-L-14/openai ViT-bigG-14/laion2b_s39b_b160k
    python eval_epic.py sheet --dataset data/poses

A page on which a person labels a dataset by key presses (pip install .[label]):

    python eval_epic.py label data/kneeling

Success rate of a policy, beside one that was trained on the environment's own reward:

    python eval_epic.py success --run runs/RUN --compare runs/GROUND_TRUTH_RUN
    python eval_epic.py success --dataset data/kneeling --human labels.csv
"""

from __future__ import annotations

import csv
import dataclasses
import hashlib
import json
import math
import os
import shutil
import sys
import types
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import tyro
from PIL import Image, ImageDraw
from tqdm import tqdm

import clip_reward
import dqn_clip_classic as dqn
import egl_render
import judges
import sac_clip_humanoid as sac
from clip_reward import UsageError

# ------------------------------------------------------------------------------ EPIC


def pearson(x, y):
    """Correlation of x [N] and y [N]; nan if one of them is constant."""
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    x, y = x - x.mean(), y - y.mean()
    tiny = 1e-12  # of a variance: what rounding leaves of a constant
    scale = math.sqrt((x @ x) * (y @ y))
    return float(np.clip(x @ y / scale, -1, 1)) if scale > tiny * len(x) else math.nan


def ranks(x):
    """Ranks of x [N] from 0, ties share their mean."""
    inverse, counts = np.unique(x, return_inverse=True, return_counts=True)[1:]
    return (np.cumsum(counts) - (counts + 1) / 2)[inverse]


def spearman(x, y):
    """Rank correlation of x and y [N]; nan if one of them is constant."""
    return pearson(ranks(x), ranks(y))


def distance_of(correlation):
    """EPIC distance of canonically shaped rewards of this Pearson correlation, in [0, 1]."""
    return np.sqrt((1 - correlation) / 2)


def epic_distance(x, y):
    """EPIC distance of two rewards that depend on the next state alone (goal-based form, section
    4.1 of arXiv 2310.12921), from their values x, y [N] on N states: sqrt((1 - rho) / 2).

    Canonical shaping takes from R(s, a, s') = f(s') only the constant E f(S'), which correlation
    does not see; so this is also the general form, exactly, whatever gamma and the samples of
    `canonical` are, if N states are the next states of the same transitions. nan if a reward is
    constant: EPIC is undefined there.
    """
    return float(distance_of(pearson(x, y)))


def canonical(reward, transitions, samples, gamma):
    """Canonically shaped reward of arXiv 2006.13900 (definition 4.1), expectations by samples:

        C(R)(s, a, s') = R(s, a, s') + E[gamma R(s', A, S') - R(s, A, S') - gamma R(S, A, S')]

    Rewards that differ by potential shaping get values that differ by a constant, also with few
    samples, since the same ones serve every transition.

    Args:
        reward: function of (s [K, ...], a [K, ...], s' [K, ...]) -> [K].
        transitions: (s, a, s'), N of each: where C(R) is wanted.
        samples: (S, A, S'), M of each, independent of each other and of the transitions.
        gamma: discount factor.
    Returns:
        [N] float64.
    """
    s, a, later = map(np.asarray, transitions)
    S, A, Later = map(np.asarray, samples)
    out = np.asarray(reward(s, a, later), np.float64).copy()
    block = max(1, 2**18 // len(A))  # of transitions at once: 2^18 rewards fit anywhere
    for start in range(0, len(s), block):
        part = slice(start, min(start + block, len(s)))
        n = part.stop - start
        i, j = np.repeat(np.arange(start, part.stop), len(A)), np.tile(np.arange(len(A)), n)
        from_next = np.asarray(reward(later[i], A[j], Later[j]), np.float64).reshape(n, -1)
        from_here = np.asarray(reward(s[i], A[j], Later[j]), np.float64).reshape(n, -1)
        out[part] += gamma * from_next.mean(1) - from_here.mean(1)
    return out - gamma * np.asarray(reward(S, A, Later), np.float64).mean()


def epic_general(reward_1, reward_2, transitions, samples, gamma):
    """EPIC distance of two rewards of (s, a, s'), arguments as in `canonical`. nan as in
    `epic_distance`."""
    shaped = [canonical(r, transitions, samples, gamma) for r in (reward_1, reward_2)]
    return epic_distance(*shaped)


def epic_interval(x, y, episodes, resamples=2000, seed=0):
    """`epic_distance(x, y)` and its 95 % bootstrap interval.

    Whole episodes are drawn, since states of one episode are alike: with single states the interval
    would be far too narrow.

    Args:
        x, y: [N] rewards (canonically shaped ones for the general form).
        episodes: [N] int, which episode a state is from.
    Returns:
        (distance, low, high); nan where undefined. Resamples in which a reward is constant are
        left out.
    """
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    distance = epic_distance(x, y)
    if math.isnan(distance):
        return math.nan, math.nan, math.nan
    x, y = (x - x.mean()) / x.std(), (y - y.mean()) / y.std()
    _, index = np.unique(episodes, return_inverse=True)
    # all that a correlation needs of an episode: six sums
    columns = (np.ones_like(x), x, y, x * x, y * y, x * y)
    sums = np.stack([np.bincount(index, column) for column in columns], 1)  # [E, 6]
    rng, count = np.random.default_rng(seed), len(sums)
    times = rng.multinomial(count, np.full(count, 1 / count), size=resamples)  # [R, E]
    n, mx, my, xx, yy, xy = ((times @ sums) / (times @ sums[:, :1])).T
    spread = (xx - mx * mx) * (yy - my * my)
    defined = spread > 1e-12
    rho = (xy - mx * my)[defined] / np.sqrt(spread[defined])
    low, high = np.quantile(distance_of(np.clip(rho, -1, 1)), [0.025, 0.975])
    return distance, float(low), float(high)


def wilson(successes, count, z=1.959964):
    """Wilson's 95 % interval (low, high) of a success rate; honest near 0 and 1 and for few."""
    rate, z2 = successes / count, z * z
    center = (rate + z2 / (2 * count)) / (1 + z2 / count)
    half = z / (1 + z2 / count) * math.sqrt(rate * (1 - rate) / count + z2 / (4 * count**2))
    return max(0.0, center - half), min(1.0, center + half)


# ------------------------------------------------------------------------------ runs and rollouts


@dataclass
class Run:
    """A run folder of one of the two scripts."""

    folder: Path
    script: types.ModuleType  # sac or dqn
    args: object  # its Args


def load_run(folder) -> Run:
    """Read a run's args.json.

    Raises:
        UsageError: no run folder, or not one of these scripts'.
    """
    folder = Path(folder)
    try:
        saved = json.loads((folder / "args.json").read_text())
    except OSError as error:
        raise UsageError(f"{folder}: not the folder of a run, it has no args.json") from error
    except ValueError as error:
        raise UsageError(f"{folder}/args.json is damaged: {error}") from error
    known = saved.keys() if isinstance(saved, dict) else ()
    script = dqn if "target_network_frequency" in known else sac if "policy_lr" in known else None
    if script is None or "env_id" not in known:
        raise UsageError(f"{folder}: not a run of sac_clip_humanoid.py or dqn_clip_classic.py")
    fields = {field.name for field in dataclasses.fields(script.Args)}
    values = {k: tuple(v) if isinstance(v, list) else v for k, v in saved.items() if k in fields}
    unknown = ", ".join(name for name, value in saved.items() if name not in fields and value)
    if unknown:  # of a changed script or another version
        print(
            f"WARNING: {folder} was made with flags that mean nothing here: {unknown}",
            file=sys.stderr,
        )
    run = Run(folder, script, script.Args(**values))
    if script is sac and sac.check_env(run.args.env_id) != "states":
        raise UsageError(f"{folder}: {run.args.env_id} has no states to draw pictures from")
    return run


def checkpoint_path(run, name) -> Path:
    """File of a checkpoint: "best" or a number of steps. Raises UsageError if there is none."""
    path = run.folder / "checkpoints" / ("best.pt" if name == "best" else f"step_{name}.pt")
    if not path.is_file():
        there = ", ".join(map(str, checkpoint_steps(run))) or "none"
        raise UsageError(f"{run.folder}: no checkpoint {name}; best.pt or one of: {there}")
    return path


def checkpoint_steps(run) -> list[int]:
    """The steps of all checkpoints of a run, ascending."""
    return sorted(int(path.stem[5:]) for path in run.folder.glob("checkpoints/step_*.pt"))


def load_policy(run, path, explore=False):
    """policy(t, observations [N, O]) -> actions [N, ...] in the environment's units, and the step
    at which the checkpoint was made. SAC: the mean action, or a sample if `explore`; DQN: greedy.

    Raises:
        UsageError: damaged, or not a checkpoint of this run's script.
    """
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True)
        if run.script is dqn:
            env = dqn.make_env(run.args.env_id)
            shape = (env.observation_space.shape[0], env.action_space.n)
            network = dqn.QNetwork(*shape, run.args.hidden_size, run.args.layer_norm)
            network.load_state_dict(saved["q_network"])
        else:
            env = sac.make_env(run.args.env_id)()
            shape = (env.observation_space.shape[0], env.action_space)
            normalize = run.args.normalize_observations
            network = sac.Actor(*shape, run.args.hidden_size, normalize)
            network.load_state_dict(saved["actor"])
        env.close()
        step = int(saved["global_step"])
    except Exception as error:  # unpickling alone raises half a dozen kinds
        reason = next(iter(str(error).splitlines()), repr(error))[:120]
        raise UsageError(f"{path}: damaged or not a checkpoint of this run: {reason}") from error
    if run.script is dqn:
        return lambda t, observations: network.best_actions(observations), step

    def act(t, observations):
        with torch.no_grad():
            observations = torch.as_tensor(observations, dtype=torch.float32)
            mean, _ = network(observations)
            action = network.sample(observations)[0] if explore else torch.tanh(mean)
            return network.to_env(action).numpy()

    return act, step


AT_ONCE = 10  # episodes side by side; part of what makes a rollout reproducible to the bit


def rollout(run, policy, seeds, bar=None):
    """Play whole episodes that never end early.

    Args:
        policy: as from `load_policy`.
        seeds: one per episode.
        bar: tqdm that counts steps.
    Returns:
        dict: states [N, T, S] float64 of s', previous [N, T, S] of s (the first of an episode is
        nan: a reset tells no state), actions [N, T, A], env_rewards [N, T], and success [N] bool,
        by the task's own rule, or None where it has none.
    """
    parts = []
    for start in range(0, len(seeds), AT_ONCE):
        play = _play_dqn if run.script is dqn else _play_sac
        torch.manual_seed(int(seeds[start]))
        parts.append(play(run.args, policy, [int(x) for x in seeds[start : start + AT_ONCE]]))
        if bar is not None:
            bar.update(parts[-1]["env_rewards"].size)
    has_success = parts[0]["success"] is not None
    episodes = {
        key: np.concatenate([p[key] for p in parts]) for key in parts[0] if key != "success"
    }
    states = episodes["states"]
    first = np.full_like(states[:, :1], np.nan)
    episodes["previous"] = np.concatenate([first, states[:, :-1]], 1)
    success = np.concatenate([p["success"] for p in parts]) if has_success else None
    return episodes | {"success": success}


def _play_dqn(args, policy, seeds):
    envs = [dqn.make_env(args.env_id) for _ in seeds]  # without early ends, as in training
    episode = dqn.play(envs, seeds, args.episode_length, policy)
    return {
        "states": episode["states"].swapaxes(0, 1),
        "actions": episode["actions"].T[..., None].astype(np.float64),
        "env_rewards": episode["rewards"].T,
        "success": np.array([env.success for env in envs]),
    }


def _play_sac(args, policy, seeds):
    import gymnasium as gym

    thunks = [sac.make_env(args.env_id, "states")] * len(seeds)
    disabled = gym.vector.AutoresetMode.DISABLED
    envs = gym.vector.SyncVectorEnv(thunks, autoreset_mode=disabled)
    observations, _ = envs.reset(seed=seeds)
    states, actions, rewards = [], [], []
    for t in range(args.episode_length):
        action = policy(t, observations).reshape(envs.action_space.shape)
        observations, reward, _, _, infos = envs.step(action)
        states.append(np.stack(infos["states"]))
        actions.append(action.reshape(len(seeds), -1))
        rewards.append(reward)
    envs.close()
    success = np.asarray(infos["success"], bool) if "success" in infos else None
    return {
        "states": np.stack(states, 1).astype(np.float64),
        "actions": np.stack(actions, 1).astype(np.float64),
        "env_rewards": np.stack(rewards, 1).astype(np.float64),
        "success": success,
    }


# ------------------------------------------------------------------------------ pictures


def make_renderer(env_id, size, textured, run_args=None):
    """What draws the states of a task, as a run with these arguments shows them to CLIP.

    size: pixels, None: the native size of a classic task. run_args: a run's, for its camera and
    quality; None: the defaults.
    """
    if env_id in egl_render.CLASSIC_STATE_SIZES:
        return egl_render.ClassicRenderer(env_id, size, textured and env_id != "CartPole-v1")
    gl = egl_render.setup_gl("cuda:0" if torch.cuda.is_available() else "cpu")
    args = dataclasses.replace(run_args or sac.Args(env_id=env_id), textured=textured)
    quality = args.render_quality
    if quality == "auto":
        quality = "light" if egl_render.is_software(gl) else "full"
    return sac.make_renderer(args, size, quality)


def contact_sheet(pictures, captions, columns=10, size=96, colors=None):
    """One PIL picture of many: pictures [H, W, 3] uint8 each, captions under them; colors: of a
    frame around each ("green", "red"), or None."""
    rows = math.ceil(len(pictures) / columns)
    sheet = Image.new("RGB", (columns * (size + 6), rows * (size + 20)), "white")
    draw = ImageDraw.Draw(sheet)
    for k, (picture, caption) in enumerate(zip(pictures, captions, strict=True)):
        x, y = k % columns * (size + 6) + 3, k // columns * (size + 20) + 3
        if colors is not None:
            draw.rectangle((x - 3, y - 3, x + size + 2, y + size + 2), fill=colors[k])
        sheet.paste(
            Image.fromarray(picture).resize((size, size), Image.Resampling.BILINEAR), (x, y)
        )
        draw.text((x, y + size + 3), caption, fill="black")
    return sheet


def write_atomically(path, write):
    """write(temporary path), then rename: whoever reads `path` never meets half a file."""
    path = Path(path)
    partial = path.with_name(f".{path.stem}.tmp{path.suffix}")
    write(partial)
    os.replace(partial, path)


def write_json(path, content):
    write_atomically(path, lambda partial: partial.write_text(json.dumps(content, indent=2) + "\n"))


def write_csv(path, head, rows):
    def write(partial):
        with open(partial, "w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(head)
            writer.writerows(rows)

    write_atomically(path, write)


# ------------------------------------------------------------------------------ collect

FORMAT = 1  # of a dataset folder


@dataclass
class Dataset:
    """A folder that `collect` made. All arrays have one row for each of N states."""

    folder: Path
    meta: dict  # dataset.json
    states: np.ndarray  # [N, S] float64
    previous: np.ndarray  # [N, S] the state before it, nan where unknown
    actions: np.ndarray  # [N, A] the action between them, nan where unknown
    episode: np.ndarray  # [N] int
    step: np.ndarray  # [N] int, in the episode, from 0
    checkpoint_step: np.ndarray  # [N] int, -1: from no checkpoint
    env_reward: np.ndarray  # [N] the environment's own reward of the step, nan where unknown
    success: np.ndarray  # [N] 1 or 0: of its episode, by the task's own rule; -1: it has none
    pose: np.ndarray  # [N] str, "" where unknown

    def __len__(self):
        return len(self.states)

    def frame_path(self, index):
        return self.folder / "frames" / f"{index:06d}.png"

    def frame(self, index):
        """[H, W, 3] uint8. Raises UsageError if the file is missing or damaged."""
        return read_picture(self.frame_path(index))


COLUMNS = [field.name for field in dataclasses.fields(Dataset)][2:]


def read_picture(path):
    """[H, W, 3] uint8 of a PNG. Raises UsageError if it is missing or damaged."""
    try:
        with Image.open(path) as image:
            return np.asarray(image.convert("RGB"))
    except (OSError, SyntaxError, ValueError, zlib.error) as error:
        reason = "missing" if isinstance(error, FileNotFoundError) else "damaged"
        raise UsageError(f"{path} is {reason}; run the same collect command again") from error


def read_meta(folder):
    """dataset.json of a folder. Raises UsageError: missing, damaged, or of another format."""
    folder = Path(folder)
    try:
        meta = json.loads((folder / "dataset.json").read_text())
        if meta["format"] != FORMAT:
            raise UsageError(f"{folder}: dataset format {meta['format']}; this knows {FORMAT}")
        return meta | {"id": meta["id"], "finished": meta["finished"]}
    except OSError as error:
        raise UsageError(f"{folder}: not a dataset, it has no dataset.json") from error
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{folder}/dataset.json is damaged: {error}") from error


def load_dataset(folder) -> Dataset:
    """A finished dataset; frames are read when they are asked for.

    Raises:
        UsageError: no dataset, an unfinished or a damaged one.
    """
    folder, meta = Path(folder), read_meta(folder)
    if not meta["finished"]:
        raise UsageError(f"{folder} is not finished; run the same collect command again")
    columns = read_states(folder)
    if content_id(columns, meta["arguments"]) != meta["id"]:
        raise UsageError(f"{folder}/states.npz does not belong to dataset.json; collect again")
    return Dataset(folder, meta, **columns)


def read_states(folder):
    """{column: array} of states.npz. Raises UsageError if it is missing or damaged."""
    path = Path(folder) / "states.npz"
    try:
        with np.load(path) as file:
            return {name: file[name] for name in COLUMNS}
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise UsageError(
            f"{path} is missing or damaged; delete {folder} and collect again"
        ) from error


def content_id(columns, arguments):
    """Twelve hexadecimal digits that tell one dataset from another."""
    digest = hashlib.sha256(json.dumps(arguments, sort_keys=True).encode())
    for name in COLUMNS:
        digest.update(np.ascontiguousarray(columns[name]).tobytes())
    return digest.hexdigest()[:12]


@dataclass
class Collect:
    """States and their pictures as a dataset folder; goes on where it was interrupted."""

    source: Literal["run", "uniform", "poses"]
    """rollouts of a run's checkpoints; a classic task's state space; the humanoid's pose library"""
    out: Path
    """the folder for the dataset"""
    run: Path | None = None
    """--source run: the run's folder"""
    checkpoints: tuple[str, ...] = ("all",)
    """--source run: "all", or some of "best" and numbers of steps"""
    episodes: int = 5
    """--source run: episodes of each checkpoint"""
    every: int = 1
    """--source run: keep every so manyth step of an episode"""
    explore: bool = False
    """--source run: sample SAC's actions as in training, instead of the mean action"""
    env_id: str = "CartPole-v1"
    """--source uniform: CartPole-v1, MountainCar-v0 or MountainCarContinuous-v0"""
    states: int = 1000
    """--source uniform: how many states"""
    per_pose: int = 40
    """--source poses: samples of each pose"""
    seed: int = 0
    """seed of all that is random"""
    render_size: int | None = None
    """height and width of the frames in pixels; default: the run's own, or 480"""
    textured: bool | None = None
    """realistic textures; default: the run's own, or yes"""


def check_collect(args: Collect) -> Run | None:
    """The run, if there is one. Raises UsageError for what cannot work, before anything slow."""
    for name in ("episodes", "every", "states", "per_pose"):
        if getattr(args, name) < 1:
            raise UsageError(f"--{name.replace('_', '-')} {getattr(args, name)} is less than 1")
    if args.seed < 0 or (args.render_size is not None and args.render_size < 1):
        raise UsageError("--seed and --render-size cannot be negative")
    if args.source == "uniform" and args.env_id not in egl_render.CLASSIC_STATE_SIZES:
        known = ", ".join(egl_render.CLASSIC_STATE_SIZES)
        raise UsageError(f"--env-id {args.env_id}: states can be drawn uniformly for {known}")
    if (args.source == "run") != (args.run is not None):
        raise UsageError("--source run needs --run RUN_DIR, and other sources have none")
    run = None
    if args.source == "run":
        run = load_run(args.run)
        if args.explore and run.script is dqn:
            raise UsageError("--explore: a run of DQN has no random policy to sample from")
        if not chosen_checkpoints(run, args.checkpoints):
            raise UsageError(f"--run {args.run}: it has no checkpoints yet")
    if args.out.exists() and not (args.out / "dataset.json").is_file():
        if not args.out.is_dir() or any(args.out.iterdir()):
            raise UsageError(f"--out {args.out} exists and is not a dataset; nothing was written")
    return run


def chosen_checkpoints(run, names):
    """Paths of the checkpoints that --checkpoints names, in its order."""
    names = [str(step) for step in checkpoint_steps(run)] if list(names) == ["all"] else names
    return [checkpoint_path(run, name) for name in names]


def recorded_arguments(args: Collect, run):
    """What a dataset is made from: all arguments, with defaults and "all" resolved."""
    arguments = {key: value for key, value in vars(args).items() if key != "out"}
    arguments["textured"], arguments["env_id"] = args.textured is not False, args.env_id
    arguments["render_size"] = args.render_size or 480
    if args.source == "poses":
        arguments["env_id"] = "Humanoid-v5"
    if run:
        textured = run.args.textured if args.textured is None else args.textured
        arguments |= {"run": run.folder.resolve().name, "env_id": run.args.env_id}
        arguments |= {"textured": textured, "checkpoints": []}
        arguments["render_size"] = args.render_size or run.args.render_size
        for path in chosen_checkpoints(run, args.checkpoints):
            digest = hashlib.sha256(path.read_bytes()).hexdigest()[:12]
            arguments["checkpoints"].append(f"{path.stem} {digest}")
    used = {
        "run": "run checkpoints episodes every explore",
        "uniform": "states",
        "poses": "per_pose",
    }[args.source]
    common = "source env_id seed render_size textured".split()
    return {key: arguments[key] for key in common + used.split()}


def blank_columns(states, **known):
    """Columns of a dataset for states [N, S], with "unknown" in all that is not given."""
    n = len(states)
    columns = {
        "states": np.asarray(states, np.float64),
        "previous": np.full_like(states, np.nan, dtype=np.float64),
        "actions": np.full((n, 1), np.nan),
        "episode": np.arange(n),
        "step": np.zeros(n, np.int64),
        "checkpoint_step": np.full(n, -1),
        "env_reward": np.full(n, np.nan),
        "success": np.full(n, -1),
        "pose": np.full(n, "", "<U16"),
    }
    return columns | known


def collect_uniform(env_id, count, seed):
    """Columns of states drawn uniformly. CartPole: the track, all angles, velocities up to 2 (no
    picture shows them); MountainCar: its observation space. Their own rewards are known but for
    MountainCarContinuous, whose reward depends on the action."""
    rng = np.random.default_rng(seed)
    if env_id == "CartPole-v1":
        high = np.array([2.4, 2.0, np.pi, 2.0])
        low = -high
    else:
        low, high = np.array([-1.2, -0.07]), np.array([0.6, 0.07])
    states = rng.uniform(low, high, (count, len(low)))
    good = judges.task_for(env_id).judge(states)
    own = {"CartPole-v1": good * 1.0, "MountainCar-v0": good - 1.0}
    return blank_columns(states, **({"env_reward": own[env_id]} if env_id in own else {}))


def collect_poses(per_pose, seed):
    """Columns of samples of every pose in the library."""
    from tiny_clip import poses

    states, names = [], []
    for index, name in enumerate(tqdm(poses.POSE_NAMES, unit="pose", disable=None)):
        qpos = poses.sample(name, np.random.default_rng((seed, index)), per_pose)
        states.append(np.pad(qpos, ((0, 0), (0, 23))))  # at rest
        names += [name] * per_pose
    return blank_columns(np.concatenate(states), pose=np.array(names, "<U16"))


def collect_run(run, args, parts_folder):
    """Columns of rollouts of a run's checkpoints. What is done is kept in parts_folder, one file
    for each checkpoint."""
    paths = chosen_checkpoints(run, args.checkpoints)
    parts_folder.mkdir(exist_ok=True)
    total = len(paths) * args.episodes * run.args.episode_length
    kept = slice(args.every - 1, None, args.every)
    parts = []
    with tqdm(total=total, unit="step", desc="rollouts", disable=None) as bar:
        for k, path in enumerate(paths):
            part_path = parts_folder / f"{path.stem}.npz"
            if part_path.is_file():
                with np.load(part_path) as file:
                    parts.append({name: file[name] for name in COLUMNS})
                bar.update(args.episodes * run.args.episode_length)
                continue
            policy, step = load_policy(run, path, args.explore)
            seeds = np.random.SeedSequence((args.seed, k, 2)).generate_state(args.episodes)
            played = rollout(run, policy, seeds, bar)
            states = played["states"][:, kept]
            N, T = states.shape[:2]
            success = np.full(N, -1) if played["success"] is None else played["success"].astype(int)
            columns = blank_columns(
                states.reshape(N * T, -1),
                previous=played["previous"][:, kept].reshape(N * T, -1),
                actions=played["actions"][:, kept].reshape(N * T, -1),
                episode=np.repeat(k * args.episodes + np.arange(N), T),
                step=np.tile(np.arange(run.args.episode_length)[kept], N),
                checkpoint_step=np.full(N * T, step),
                env_reward=played["env_rewards"][:, kept].reshape(-1),
                success=np.repeat(success, T),
            )
            write_atomically(part_path, lambda p: np.savez_compressed(p, **columns))  # noqa: B023
            parts.append(columns)
    return {name: np.concatenate([part[name] for part in parts]) for name in COLUMNS}


def collect(args: Collect) -> None:
    """Make a dataset folder: dataset.json, states.npz, frames/000000.png, contact_sheet.png."""
    run = check_collect(args)
    arguments = recorded_arguments(args, run)
    out, meta = args.out, None
    if (out / "dataset.json").is_file():
        meta = read_meta(out)
        for key in {**arguments, **meta["arguments"]}:
            was, now = meta["arguments"].get(key), arguments.get(key)
            if was != now:
                raise UsageError(
                    f"--out {out} is a dataset with {key} {was}, not {now}; choose another folder"
                )
        if meta["finished"]:
            print(f"{out} is finished already: {meta['states']} states, id {meta['id']}")
            return
    (out / "frames").mkdir(parents=True, exist_ok=True)
    meta = meta or {"format": FORMAT, "id": None, "finished": False, "arguments": arguments}
    if not (out / "dataset.json").is_file():
        prompts = {}
        if run:
            prompts = {"target_prompt": list(run.args.target_prompt)}
            task = judges.task_for(run.args.env_id, run.args.target_prompt)
            prompts["task"] = task and task.name
            meta |= {"episode_length": run.args.episode_length}
        elif args.source == "uniform":
            prompts["task"] = judges.task_for(args.env_id).name
        write_json(out / "dataset.json", meta | prompts)
        meta |= prompts

    # 1. States
    if (out / "states.npz").is_file():
        columns = read_states(out)
    else:
        if args.source == "run":
            columns = collect_run(run, args, out / ".parts")
        elif args.source == "uniform":
            columns = collect_uniform(args.env_id, args.states, args.seed)
        else:
            columns = collect_poses(args.per_pose, args.seed)
        write_atomically(out / "states.npz", lambda p: np.savez_compressed(p, **columns))
        shutil.rmtree(out / ".parts", ignore_errors=True)

    # 2. Pictures: those that are there already stay
    states = columns["states"]
    paths = [out / "frames" / f"{index:06d}.png" for index in range(len(states))]
    missing = [index for index, path in enumerate(paths) if not path.is_file()]
    size, textured = arguments["render_size"], arguments["textured"]
    if missing:
        renderer = make_renderer(arguments["env_id"], size, textured, run and run.args)
        with tqdm(
            total=len(states), initial=len(states) - len(missing), unit="frame", disable=None
        ) as bar:
            for start in range(0, len(missing), 32):
                chunk = missing[start : start + 32]
                for index, frame in zip(chunk, renderer.render(states[chunk])):
                    image = Image.fromarray(frame)
                    write_atomically(paths[index], lambda p: image.save(p, compress_level=3))  # noqa: B023
                bar.update(len(chunk))
        renderer.close()

    # 3. A look at it, and the seal
    shown = np.unique(np.linspace(0, len(states) - 1, 100).round().astype(int))
    captions = [caption(columns, index) for index in shown]
    sheet = contact_sheet([read_picture(paths[index]) for index in shown], captions)
    write_atomically(out / "contact_sheet.png", sheet.save)
    meta |= {"id": content_id(columns, arguments), "finished": True, "states": len(states)}
    meta["episodes"] = len(np.unique(columns["episode"]))
    write_json(out / "dataset.json", meta)
    print(f"{out}: {len(states)} states of {meta['episodes']} episodes, id {meta['id']}")


def caption(columns, index):
    """A few words under a picture: its index, and its pose or its place in the run."""
    pose, checkpoint = columns["pose"][index], columns["checkpoint_step"][index]
    where = f"{checkpoint}:{columns['step'][index]}" if checkpoint >= 0 else ""
    return f"{index} {pose or where}"[:16]


# ------------------------------------------------------------------------------ labels


def resolve_task(name, meta):
    """The judges.Task of that name, or the one that a dataset or a run is about.

    Raises:
        UsageError: unknown, of another environment, or not to be told from `meta`.
    """
    here = [task.name for task in judges.TASKS.values() if meta["env_id"] in task.env_ids]
    if name is None and meta.get("task") is None:
        problem = f"one of: {', '.join(here)}" if here else f"{meta['env_id']} has no judge"
        raise UsageError(f"--task says what to judge by; {problem}")
    name = name or meta["task"]
    if name not in here:
        raise UsageError(f"--task {name}: {meta['env_id']} has {', '.join(here) or 'no judge'}")
    return judges.TASKS[name]


LABEL_COLUMNS = ["dataset", "unit", "index", "task", "label"]


def read_labels(path, dataset, task):
    """A person's labels of a dataset.

    Args:
        path: CSV with LABEL_COLUMNS: dataset id, "frame" or "episode", its number, task, 1 or 0.
            Rows on other datasets and tasks are passed over.
    Returns:
        (of frames [N] float64: 1, 0 or nan for none, of episodes {number: bool})
    Raises:
        UsageError: no such file, not such a CSV, numbers that the dataset does not have, two
            answers to one question, nothing on this dataset and task.
    """
    frames, episodes = np.full(len(dataset), np.nan), {}
    known, seen = set(dataset.episode.tolist()), set()
    try:
        with open(path, newline="") as file:
            reader = csv.DictReader(file)
            if not set(LABEL_COLUMNS) <= set(reader.fieldnames or ()):
                raise UsageError(f"{path}: not labels; the columns are {','.join(LABEL_COLUMNS)}")
            for row in reader:
                seen.add((row["dataset"], row["task"]))
                if (row["dataset"], row["task"]) != (dataset.meta["id"], task):
                    continue
                where, unit = f"{path}, line {reader.line_num}", row["unit"]
                if unit not in ("frame", "episode") or row["label"] not in ("0", "1"):
                    raise UsageError(f"{where}: unit is frame or episode, and label 0 or 1")
                there = range(len(dataset)) if unit == "frame" else known
                if not row["index"].isdecimal() or int(row["index"]) not in there:
                    raise UsageError(f"{where}: {dataset.folder} has no {unit} {row['index']}")
                index, label = int(row["index"]), row["label"] == "1"
                before = frames[index] if unit == "frame" else episodes.get(index, math.nan)
                if before == (not label):
                    raise UsageError(f"{where}: {unit} {index} is labelled both 0 and 1")
                if unit == "frame":
                    frames[index] = label
                else:
                    episodes[index] = label
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise UsageError(f"{path}: not a CSV file: {error}") from error
    if not episodes and np.isnan(frames).all():
        there = ", ".join(sorted(f"{task} on {name}" for name, task in seen)) or "nothing"
        raise UsageError(f"{path}: no label for {task} on {dataset.meta['id']}; it has {there}")
    return frames, episodes


# ------------------------------------------------------------------------------ epic


@dataclass
class Epic:
    """EPIC distance of reward models to labels: table, CSV and figures."""

    dataset: Path
    """a folder made by collect"""
    clip_model: tuple[str, ...] = ("ViT-bigG-14/laion2b_s39b_b160k",)
    """models to compare, each as for training; offline: local-dir:tiny_clip"""
    reward_alpha: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    """strengths of goal-baseline regularisation"""
    labels: str = "judge"
    """what a good reward would be: judge (1 where the task is done, else 0), env (the
    environment's own reward), or a CSV file of a person's labels"""
    task: str | None = None
    """the task to judge by; default: the one that the dataset is about"""
    target_prompt: tuple[str, ...] = ()
    """what to do, in words; default: the task's"""
    baseline_prompt: tuple[str, ...] = ()
    """what the scene is anyway; default: the task's"""
    form: Literal["goal", "general"] = "goal"
    """goal: rewards of the next state alone, as in the paper; general: full canonical shaping,
    which matters with --labels env where that depends on the state before or on the action"""
    gamma: float = 0.99
    """discount factor of the general form"""
    samples: int = 256
    """samples for the expectations in the general form"""
    seed: int = 0
    """seed of those samples and of the bootstrap"""
    resamples: int = 2000
    """bootstrap resamples for the 95 % intervals"""
    clip_batch_size: int = 64
    """frames per forward pass of CLIP"""
    clip_cache_dir: str | None = None
    """where downloaded weights are kept, default: open_clip's own cache"""
    device: str = "cuda" if torch.cuda.is_available() else "cpu"
    """where CLIP computes"""
    allow_slow: bool = False
    """start even if this machine would need days for a model"""
    out: Path | None = None
    """folder for table and figures; default: the folder epic in the dataset"""


def check_epic(args: Epic):
    """(dataset, task or None, prompts, labels [N] with nan for unlabelled, whether they are goal or
    not). Raises UsageError for what cannot work, before anything slow."""
    check_alphas(args.reward_alpha)
    for name in ("samples", "resamples", "clip_batch_size"):
        if getattr(args, name) < 1:
            raise UsageError(f"--{name.replace('_', '-')} {getattr(args, name)} is less than 1")
    if not 0 < args.gamma < 1:
        raise UsageError(f"--gamma {args.gamma} is outside (0, 1)")
    check_device(args.device)
    dataset = load_dataset(args.dataset)
    meta = dataset.meta | dataset.meta["arguments"]
    needs_task = args.labels != "env" or not args.target_prompt
    task = resolve_task(args.task, meta) if needs_task or args.task else None
    prompts = (
        list(args.target_prompt or (task.target_prompt,)),
        list(args.baseline_prompt or ((task.baseline_prompt,) if task else ())),
    )
    if max(args.reward_alpha) > 0 and not prompts[1]:
        raise UsageError("--reward-alpha needs a --baseline-prompt")
    if args.labels == "judge":
        labels = task.judge(dataset.states).astype(np.float64)
    elif args.labels == "env":
        labels = dataset.env_reward
        if args.form == "general":  # computed for every s, a, s' and not read from the dataset
            own_reward(meta["env_id"])
            labels = np.nan_to_num(labels)
    else:
        labels, episodes = read_labels(args.labels, dataset, task.name)
        if np.isnan(labels).all():
            problem = f"labels {len(episodes)} episodes and no frames; EPIC needs frames"
            raise UsageError(f"{args.labels}: {problem}")
    there = labels[np.isfinite(labels)]
    if not len(there):
        raise UsageError(f"--labels {args.labels}: {args.dataset} has no such reward")
    if np.ptp(there) < 1e-12 and (args.labels, args.form) != ("env", "general"):
        what = f"{there[0]:g}" if args.labels == "env" else ("no", "yes")[int(there[0])]
        raise UsageError(
            f"--labels {args.labels}: all {len(there)} are {what}, and EPIC is undefined with a "
            "single class; collect states of both kinds"
        )
    for name in args.clip_model:
        paths = (args.clip_cache_dir,)
        clip_reward.check_cost(name, [args.device], len(there), args.allow_slow, *paths)
        clip_reward.check_model(name, *paths)
    return dataset, task, prompts, labels


def check_alphas(alphas):
    if not alphas or not all(0 <= alpha <= 1 for alpha in alphas):
        raise UsageError(f"--reward-alpha {alphas} is outside [0, 1]")


def check_device(device):
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UsageError(f"--device {device}: {str(error).splitlines()[0]}") from error


def dataset_rewards(args: Epic, model, prompts, dataset, rows):
    """Reward {alpha: [K] float64} of K frames of a dataset, and the model's parameter count."""
    clip = clip_reward.load_clip(model, args.device, cache_dir=args.clip_cache_dir)
    parameters = sum(weights.numel() for weights in clip.model.parameters())
    reward = clip_reward.CLIPReward(clip, *prompts)
    embeddings = []
    with tqdm(total=len(rows), unit="frame", desc=model, disable=None) as bar:
        for start in range(0, len(rows), args.clip_batch_size):
            chunk = rows[start : start + args.clip_batch_size]
            frames = np.stack([dataset.frame(index) for index in chunk])
            embeddings.append(reward.embed_images(torch.from_numpy(frames)))
            bar.update(len(chunk))
    if max(args.reward_alpha) > 0 and torch.dist(reward.g, reward.b) < 1e-6:
        raise UsageError(f"{model}: target and baseline prompt are the same to it; change one")
    return rewards_by_alpha(reward, torch.cat(embeddings), args.reward_alpha), parameters


def rewards_by_alpha(reward, embeddings, alphas):
    """{alpha: [K] float64} of pictures that were embedded once, [K, D]."""
    rewards = {}
    for reward.alpha in alphas:
        rewards[reward.alpha] = reward.reward(embeddings).double().cpu().numpy()
    return rewards


def own_reward(env_id):
    """The environment's own reward (of these scripts' version of it, whose goal absorbs) as a
    function of states [K, S], actions [K, A], next states [K, S] -> [K]."""
    task = judges.task_for(env_id)
    if env_id == "CartPole-v1":
        return lambda s, a, later: task.judge(later) * 1.0
    if env_id == "MountainCar-v0":
        return lambda s, a, later: task.judge(s) - 1.0
    if env_id == "MountainCarContinuous-v0":
        return lambda s, a, later: np.where(
            task.judge(s), 0.0, 100.0 * task.judge(later) - 0.1 * a[:, 0] ** 2
        )
    raise UsageError(
        f"--form general --labels env: {env_id}'s own reward comes out of its physics and is not "
        "known for any s, a and s'; use --form goal"
    )


def transitions_of(dataset, rows, count, seed):
    """Transitions that end in the dataset's rows, and samples for `canonical`.

    A state is a number into the array that comes first: of a state of the dataset, or of the one
    before it (from N on). Where a dataset does not know what was before, as with uniform states,
    state and action are drawn independently: EPIC may be taken over any distribution.

    Returns:
        all states [2N, S], transitions (s, a, s') of K, samples (S, A, S') of `count`.
    """
    N, rng = len(dataset), np.random.default_rng(seed)
    everything = np.concatenate([dataset.states, dataset.previous])
    known = np.isfinite(dataset.previous[rows]).all(1)
    before = np.where(known, N + rows, rng.choice(rows, len(rows)))
    actions = dataset.actions.copy()
    unknown = ~np.isfinite(actions).all(1)
    actions[unknown] = rng.uniform(-1, 1, (unknown.sum(), actions.shape[1]))
    samples = (rng.choice(rows, count), actions[rng.choice(rows, count)], rng.choice(rows, count))
    return everything, (before, actions[rows], rows), samples


def epic(args: Epic) -> None:
    """Print the table; write epic.csv, epic_alpha.png, epic_scaling.png, histograms.png."""
    dataset, task, prompts, labels = check_epic(args)
    rows = np.flatnonzero(np.isfinite(labels))
    env_id = dataset.meta["arguments"]["env_id"]
    if args.form == "general":
        everything, transitions, samples = transitions_of(dataset, rows, args.samples, args.seed)

    def shaped(values, reward=None):
        """What is correlated: the values of rows, or their canonical shaping."""
        if args.form == "goal":
            return values
        of_state = np.full(len(dataset), np.nan)
        of_state[rows] = values
        reward = reward or (lambda s, a, later: of_state[later])
        return canonical(reward, transitions, samples, args.gamma)

    truth = labels[rows]
    if (args.labels, args.form) == ("env", "general"):
        own = own_reward(env_id)
        reward = lambda s, a, later: own(everything[s], a, everything[later])  # noqa: E731
        reference, truth = shaped(truth, reward), reward(*transitions)
        if np.ptp(reference) < 1e-9:
            raise UsageError(f"--labels env: {env_id}'s own reward is the same for all transitions")
    else:
        reference = shaped(truth)
    binary = len(np.unique(truth)) == 2
    good = truth > truth.mean()
    out = args.out or args.dataset / "epic"
    make_folder(out)
    print(f'"{" / ".join(prompts[0])}", baseline "{" / ".join(prompts[1])}"')
    print(
        f"{len(rows)} states of {len(np.unique(dataset.episode[rows]))} episodes of {args.dataset} "
        f"({env_id}), labels: {args.labels}, {args.form} form"
        + (f", goal states: {100 * good.mean():.1f} %" if binary else "")
    )
    print(f"{'model':40} {'parameters':>12} {'alpha':>5}  EPIC distance (95 % interval)")
    table, curves, standardised = [], {}, {}
    for model in args.clip_model:
        rewards, parameters = dataset_rewards(args, model, prompts, dataset, rows)
        for alpha, values in rewards.items():
            result = epic_interval(
                shaped(values), reference, dataset.episode[rows], args.resamples, args.seed
            )
            curves.setdefault(model, []).append((parameters, alpha, *result))
            print(f"{model:40} {parameters:12,} {alpha:5.2f}  {result[0]:.4f} ", end="")
            print(f"({result[1]:.4f} to {result[2]:.4f})")
            table.append((dataset.meta["id"], args.labels, task and task.name, args.form, model))
            table[-1] += (parameters, alpha, *(f"{value:.6f}" for value in result), len(rows))
        values = rewards[args.reward_alpha[0]]
        standardised[model] = (values - values.mean()) / max(values.std(), 1e-12)
    head = "dataset labels task form model parameters reward_alpha epic low high states"
    write_csv(out / "epic.csv", head.split(), table)
    draw_epic(out, curves, standardised, good, binary, args.reward_alpha[0])
    print(f"wrote {out}/epic.csv, epic_alpha.png, epic_scaling.png, histograms.png")


def make_folder(path):
    """Raises UsageError if the folder cannot be made or written to."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--out {path} cannot be written: {error.strerror}") from error
    if not os.access(path, os.W_OK):
        raise UsageError(f"--out {path} cannot be written: no permission")


def pyplot():
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def short(model):
    """A model's name for a figure."""
    return Path(model.partition(":")[2]).name if ":" in model else model.replace("/", "\n")


def draw_epic(out, curves, standardised, good, binary, first_alpha):
    """The figures 4a, 4b and 7 of arXiv 2310.12921 for these models."""
    plt = pyplot()
    figure, ax = plt.subplots(figsize=(5.2, 3.4), layout="constrained")
    for model, points in curves.items():
        _, alpha, distance, low, high = np.array(sorted(points, key=lambda p: p[1])).T
        line = ax.plot(alpha, distance, marker="o", ms=4, label=short(model).replace("\n", " "))
        ax.fill_between(alpha, low, high, color=line[0].get_color(), alpha=0.15, lw=0)
    ax.set(xlabel="alpha", ylabel="EPIC distance")
    ax.legend(frameon=False, fontsize="small")
    write_figure(figure, out / "epic_alpha.png")

    figure, ax = plt.subplots(figsize=(5.2, 3.4), layout="constrained")
    points = [next(p for p in points if p[1] == first_alpha) for points in curves.values()]
    parameters, _, distance, low, high = np.array(points).T
    order = np.argsort(parameters)
    size = np.log10(parameters)
    ax.plot(size[order], distance[order], color="0.7", lw=1)
    ax.errorbar(
        size, distance, np.maximum([distance - low, high - distance], 0), fmt="o", capsize=3
    )
    for x, y, model in zip(size, distance, curves):
        ax.annotate(short(model), (x, y), (5, 4), textcoords="offset points", fontsize="x-small")
    ax.set(xlabel="log10(parameters)", ylabel=f"EPIC distance, alpha {first_alpha:g}")
    ax.margins(x=0.15)
    write_figure(figure, out / "epic_scaling.png")

    columns = min(3, len(standardised))
    lines = math.ceil(len(standardised) / columns)
    shape = {"figsize": (3.6 * columns, 2.6 * lines), "layout": "constrained", "squeeze": False}
    figure, axes = plt.subplots(lines, columns, **shape)
    bins = np.linspace(-4, 4, 41)
    names = ("goal", "not goal") if binary else ("above the mean", "below the mean")
    for ax, (model, values) in zip(axes.flat, standardised.items()):
        for which, name, color in zip((good, ~good), names, ("tab:green", "tab:red")):
            ax.hist(np.clip(values[which], -4, 4), bins, density=True, color=color, alpha=0.5,
                    label=name)  # fmt: skip
        ax.set(title=short(model).replace("\n", " "), xlabel="standardised reward", yticks=[])
        ax.spines[["top", "right", "left"]].set_visible(False)
    for ax in axes.flat[len(standardised) :]:
        ax.set_axis_off()
    axes.flat[0].legend(frameon=False, fontsize="small")
    write_figure(figure, out / "histograms.png")


def write_figure(figure, path):
    write_atomically(path, lambda partial: figure.savefig(partial, dpi=120))
    pyplot().close(figure)


# ------------------------------------------------------------------------------ sheet


@dataclass
class Sheet:
    """Pictures of states that a judge accepts and rejects, for a person to check at a glance."""

    dataset: Path
    """a folder made by collect"""
    task: tuple[str, ...] = ()
    """tasks; default: all that the dataset's environment has"""
    count: int = 20
    """accepted states, and as many rejected ones"""
    seed: int = 0
    """seed of the choice"""
    out: Path | None = None
    """folder for the pictures; default: the folder judged in the dataset"""


def sheet(args: Sheet) -> None:
    """Write judged/<task>.png: green frames are accepted, red ones rejected."""
    if args.count < 1:
        raise UsageError(f"--count {args.count} is less than 1")
    dataset = load_dataset(args.dataset)
    meta = dataset.meta | dataset.meta["arguments"]
    here = [task.name for task in judges.TASKS.values() if meta["env_id"] in task.env_ids]
    tasks = [resolve_task(name, meta) for name in args.task or here or (None,)]
    out = args.out or args.dataset / "judged"
    make_folder(out)
    columns = {name: getattr(dataset, name) for name in COLUMNS}
    if tasks[0].name in judges.HUMANOID:
        verdicts = judges.judge_humanoid(dataset.states)  # measures once for all
    else:
        verdicts = {tasks[0].name: tasks[0].judge(dataset.states)}
    for task in tasks:
        verdict, rng = verdicts[task.name], np.random.default_rng(args.seed)
        chosen = []
        for which in (True, False):
            there = np.flatnonzero(verdict == which)
            chosen += sorted(rng.choice(there, min(args.count, len(there)), replace=False))
        pictures = [dataset.frame(index) for index in chosen]
        captions = [caption(columns, index) for index in chosen]
        colors = ["green" if verdict[index] else "red" for index in chosen]
        picture = contact_sheet(pictures, captions, size=120, colors=colors)
        write_atomically(out / f"{task.name}.png", picture.save)
        print(f"{task.name}: {verdict.sum()} of {len(verdict)} accepted. {task.criterion}")
    print(f"wrote {out}")


# ------------------------------------------------------------------------------ success


@dataclass
class Success:
    """Success rate of a policy by judge or by a person's labels, with a video of the verdicts."""

    run: Path | None = None
    """folder of the run to judge"""
    checkpoint: str = "best"
    """best (highest training reward, as in the paper), or a number of steps"""
    compare: Path | None = None
    """folder of another run, such as one with --reward ground-truth, for side by side"""
    episodes: int = 100
    """episodes, without exploration, on starts that training never had"""
    task: str | None = None
    """the task to judge by; default: the one of the run's prompt or environment"""
    dataset: Path | None = None
    """judge the episodes of this dataset instead of new ones"""
    human: Path | None = None
    """with --dataset: a CSV file of a person's labels in place of the judge"""
    seed: int = 0
    """seed of the starts"""
    videos: int = 16
    """episodes in the video, 0: none"""
    video_size: int = 160
    """height and width of each episode in the video, in pixels"""
    out: Path | None = None
    """folder for the results; default: the folder success in the run or dataset"""


THRESHOLD = 0.5  # share of successful steps that makes an episode a success (arXiv 2310.12921)


@dataclass
class Judged:
    """Episodes with a verdict on every step."""

    name: str
    steps: np.ndarray  # [N, T] float64: 1, 0, nan where a person gave no answer
    success: np.ndarray  # [N] bool
    states: np.ndarray | None = None  # [N, T, S]
    run: Run | None = None

    @property
    def shares(self):
        """Share of successful steps [N]; nan without an answer."""
        answered = np.isfinite(self.steps).sum(1)
        return np.nansum(self.steps, 1) / np.where(answered, answered, np.nan)

    def line(self):
        """One line with the rate and its interval."""
        won, count = int(self.success.sum()), len(self.success)
        low, high = wilson(won, count)
        line = f"{self.name}: success {100 * won / count:.0f} % ({won} of {count} episodes), 95 % "
        line += f"interval {100 * low:.0f} to {100 * high:.0f} %"
        share = self.shares[np.isfinite(self.shares)]
        return line + (f"; successful steps {100 * share.mean():.0f} %" if len(share) else "")


def check_success(args: Success):
    """(task, [(Run, checkpoint path)], Dataset or None); UsageError for what cannot work."""
    if (args.run is None) == (args.dataset is None):
        raise UsageError("success needs either --run RUN_DIR or --dataset FOLDER")
    if args.human and not args.dataset:
        raise UsageError("--human labels are of a dataset: name it with --dataset")
    if args.compare and not args.run:
        raise UsageError("--compare goes with --run")
    if args.episodes < 1 or args.videos < 0 or args.video_size < 16:
        raise UsageError("--episodes is at least 1, --videos 0, --video-size 16")
    if args.dataset:
        dataset = load_dataset(args.dataset)
        if dataset.meta["arguments"]["source"] != "run":
            raise UsageError(f"--dataset {args.dataset} has single states and no episodes")
        return resolve_task(args.task, dataset.meta | dataset.meta["arguments"]), [], dataset
    runs = [load_run(args.run)]
    name = judges.task_for(runs[0].args.env_id, runs[0].args.target_prompt)
    meta = {"env_id": runs[0].args.env_id, "task": name and name.name}
    task = resolve_task(args.task, meta)
    if args.compare:
        runs.append(load_run(args.compare))
        if runs[1].args.env_id not in task.env_ids:
            raise UsageError(f"--compare {args.compare}: {runs[1].args.env_id} has no {task.name}")
    names = [args.checkpoint, "best"]
    return task, [(run, checkpoint_path(run, name)) for run, name in zip(runs, names)], None


def judge_run(run, path, task, args: Success):
    """Roll out a checkpoint and judge every step."""
    policy, step = load_policy(run, path)
    seeds = np.random.SeedSequence((args.seed, 0, 3)).generate_state(args.episodes)
    total = args.episodes * run.args.episode_length
    with tqdm(total=total, unit="step", desc=run.folder.name, disable=None) as bar:
        played = rollout(run, policy, seeds, bar)
    states = played["states"]
    N, T = states.shape[:2]
    steps = task.judge(states.reshape(N * T, -1)).reshape(N, T).astype(np.float64)
    success = played["success"]  # of classic tasks
    if success is None:
        success = steps.mean(1) >= THRESHOLD
    kind = "ground truth" if run.args.reward == "ground-truth" else run.args.clip_model
    return Judged(
        f"{run.folder.name} ({kind}, {path.stem}, step {step})", steps, success, states, run
    )


def judge_dataset(dataset, task, args: Success):
    """The episodes of a dataset, one Judged for each checkpoint."""
    frames, episodes = task.judge(dataset.states).astype(np.float64), {}
    if args.human:
        verdict = frames
        frames, episodes = read_labels(args.human, dataset, task.name)
        both = np.isfinite(frames)
        if both.any():
            agree = (frames == verdict)[both].mean()
            print(f"judge and person agree on {100 * agree:.1f} % of {both.sum()} frames")
    results = []
    for step in np.unique(dataset.checkpoint_step):
        numbers = np.unique(dataset.episode[dataset.checkpoint_step == step])
        steps = np.stack([frames[dataset.episode == number] for number in numbers])
        judged = Judged(f"{args.dataset.name}, step {step}", steps, np.zeros(len(numbers), bool))
        with np.errstate(invalid="ignore"):
            judged.success = judged.shares >= THRESHOLD
        own = dataset.success[np.searchsorted(dataset.episode, numbers)]
        if not args.human and (own >= 0).all():
            judged.success = own == 1
        for k, number in enumerate(numbers):
            judged.success[k] = episodes.get(number, judged.success[k])
        answered = np.isfinite(judged.shares) | np.isin(numbers, list(episodes))
        if answered.any():
            name, success = judged.name, judged.success[answered]
            results.append(Judged(name, judged.steps[answered], success))
    return results


def success(args: Success) -> None:
    """Print the rates; write success.json, episodes.csv, histogram.png and episodes.mp4."""
    task, runs, dataset = check_success(args)
    out = args.out or (args.run or args.dataset) / "success"
    print(f"{task.name}: {task.criterion}")
    results = judge_dataset(dataset, task, args) if dataset else []
    make_folder(out)
    results = results or [judge_run(run, path, task, args) for run, path in runs]
    summary, rows = [], []
    for result in results:
        print(result.line())
        counts = np.histogram(result.shares[np.isfinite(result.shares)], 10, (0, 1))[0]
        print(f"  episodes by share of successful steps, 0 to 100 % in tenths: {counts.tolist()}")
        low, high = wilson(int(result.success.sum()), len(result.success))
        rate = float(result.success.mean())
        summary.append({"name": result.name, "episodes": len(result.success), "success_rate": rate})
        summary[-1] |= {"low": low, "high": high, "judge": "human" if args.human else task.name}
        for k, (won, steps) in enumerate(zip(result.success, result.steps)):
            answered = int(np.isfinite(steps).sum())
            rows.append((result.name, k, int(np.nansum(steps)), answered, int(won)))
    write_json(out / "success.json", summary)
    write_csv(out / "episodes.csv", "name episode good_steps steps success".split(), rows)
    draw_success(out / "histogram.png", results, task)
    if args.videos and not dataset:
        egl_render.write_video(out / "episodes.mp4", verdict_video(results, args), 30)
    print(f"wrote {out}")


def draw_success(path, results, task):
    """Histogram of successful steps per episode (figures 5 and 6 of arXiv 2310.12921)."""
    plt = pyplot()
    figure, ax = plt.subplots(figsize=(5.2, 3.2), layout="constrained")
    shares = [100 * r.shares[np.isfinite(r.shares)] for r in results]
    names = [f"{r.name}: {100 * r.success.mean():.0f} %" for r in results]
    ax.hist(shares, np.linspace(0, 100, 21), label=names)
    ax.axvline(100 * THRESHOLD, color="0.5", ls="--", lw=1)
    ax.set(xlabel="successful steps of an episode, %", ylabel="episodes", title=task.name)
    ax.legend(frameon=False, fontsize="xx-small")
    write_figure(figure, path)


def verdict_video(results, args: Success):
    """[T, H, W, 3] uint8: a grid of episodes for each run, side by side. A green or red frame is
    the verdict on the step; the text counts successful steps and tells the episode's verdict."""
    size, blocks = args.video_size, []
    length = max(result.states.shape[1] for result in results)
    for result in results:
        count = min(args.videos, len(result.states))
        columns = math.ceil(math.sqrt(count))
        rows = math.ceil(count / columns)
        settings = result.run.args
        renderer = make_renderer(settings.env_id, size, settings.textured, settings)
        block = np.full((length, rows * size, columns * size, 3), 255, np.uint8)
        for k in tqdm(range(count), unit="episode", desc="video", disable=None):
            y, x = k // columns * size, k % columns * size
            frames = renderer.render(result.states[k])
            won = "success" if result.success[k] else "no success"
            for t in range(length):
                now = min(t, len(frames) - 1)
                image = Image.fromarray(frames[now])
                draw = ImageDraw.Draw(image)
                good = result.steps[k, now] == 1
                color = (0, 170, 0) if good else (210, 0, 0)
                draw.rectangle((0, 0, size - 1, size - 1), outline=color, width=3)
                total = int(result.steps[k, : now + 1].sum())
                draw.rectangle((3, 3, size - 4, 15), fill=color)
                draw.text((6, 4), f"{total} of {now + 1}, {won}", fill="white")
                block[t, y : y + size, x : x + size] = np.asarray(image)
        renderer.close()
        blocks.append(block)
    height = max(block.shape[1] for block in blocks)
    pad = [np.pad(b, ((0, 0), (0, height - b.shape[1]), (0, 8), (0, 0)), constant_values=255)
           for b in blocks]  # fmt: skip
    return np.concatenate(pad, 2)


# ------------------------------------------------------------------------------ landscape


@dataclass(frozen=True)
class Sweep:
    """One coordinate of a classic task from end to end; all others are zero."""

    env_id: str
    textured: bool
    label: str  # of the coordinate, with its unit
    values: tuple[float, float]
    index: int  # of the coordinate in the state
    state_size: int
    goal: float  # where the reward should be largest

    @property
    def task(self):
        """judges.Task: prompts, and which states are goal states."""
        return judges.task_for(self.env_id)

    def states(self, count):
        """(values [count], states [count, S]) float64."""
        values = np.linspace(*self.values, count)
        states = np.zeros((count, self.state_size))
        states[:, self.index] = values
        return values, states


MOUNTAIN = ("position", (-1.2, 0.6), 0, 2, egl_render.MOUNTAIN_GOALS["MountainCar-v0"])
SWEEPS = (
    Sweep("CartPole-v1", False, "pole angle (rad)", (-np.pi, np.pi), 2, 4, 0.0),
    Sweep("MountainCar-v0", False, *MOUNTAIN),
    Sweep("MountainCar-v0", True, *MOUNTAIN),
)


@dataclass
class Landscape:
    """Reward against pole angle and car position, plain and textured, one line per alpha."""

    clip_model: str = "ViT-bigG-14/laion2b_s39b_b160k"
    """ARCH/TAG of open_clip, hf-hub:ORG/NAME or local-dir:PATH; offline: local-dir:tiny_clip"""
    reward_alpha: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    """strengths of goal-baseline regularisation, one line each"""
    points: int = 361
    """states on each line"""
    render_size: int = 480
    """height and width of the frames in pixels"""
    clip_batch_size: int = 64
    """frames per forward pass of CLIP"""
    clip_cache_dir: str | None = None
    """where downloaded weights are kept, default: open_clip's own cache"""
    device: str = "cuda" if torch.cuda.is_available() else "cpu"
    """where CLIP computes"""
    allow_slow: bool = False
    """start even if this machine would need days for the model"""
    out: Path = Path("landscape.png")
    """the picture; a table of all values is written beside it as CSV"""


def check_landscape(args: Landscape) -> None:
    """Raises UsageError for what cannot work, before anything slow."""
    check_alphas(args.reward_alpha)
    for name, least in (("points", 3), ("render_size", 1), ("clip_batch_size", 1)):
        if getattr(args, name) < least:
            flag = name.replace("_", "-")
            raise UsageError(f"--{flag} {getattr(args, name)} is less than {least}")
    if args.out.suffix.lower() != ".png":
        raise UsageError(f"--out {args.out} does not end in .png")
    check_device(args.device)
    try:
        args.out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--out {args.out} cannot be written: {error.strerror}") from error
    for path in (args.out, args.out.with_suffix(".csv")):
        writable = os.access(path if path.exists() else path.parent, os.W_OK)
        if path.is_dir() or not writable:
            raise UsageError(f"--out {args.out}: {path} cannot be written")
    frames = len(SWEEPS) * args.points
    clip_reward.check_cost(
        args.clip_model, [args.device], frames, args.allow_slow, args.clip_cache_dir
    )
    clip_reward.check_model(args.clip_model, args.clip_cache_dir)


def sweep_rewards(sweep: Sweep, args: Landscape):
    """Values [points], whether each is a goal state [points] bool and, for every alpha, rewards
    [points] float64."""
    values, states = sweep.states(args.points)
    clip = clip_reward.load_clip(args.clip_model, args.device, cache_dir=args.clip_cache_dir)
    prompts = [sweep.task.target_prompt], [sweep.task.baseline_prompt]
    renderer = egl_render.ClassicRenderer(sweep.env_id, args.render_size, sweep.textured)
    chunks = np.array_split(states, math.ceil(len(states) / args.clip_batch_size))
    reward = clip_reward.CLIPReward(clip, *prompts)
    embeddings = [reward.embed_images(torch.from_numpy(renderer.render(c))) for c in chunks]
    renderer.close()
    rewards = rewards_by_alpha(reward, torch.cat(embeddings), args.reward_alpha)
    return values, sweep.task.judge(states), rewards


def rescaled(x):
    """x [N] to [0, 1]; a constant to 0."""
    return (x - x.min()) / max(x.max() - x.min(), 1e-12)


def landscape(args: Landscape) -> None:
    """Draw the figure, write the table, print where each line has its maximum."""
    check_landscape(args)
    plt = pyplot()
    figure, axes = plt.subplots(1, len(SWEEPS), figsize=(12, 3.4), layout="constrained")
    colors = plt.get_cmap("viridis")(np.linspace(0, 0.9, len(args.reward_alpha)))
    rows = []
    for sweep, ax in zip(SWEEPS, axes):
        look = "textured" if sweep.textured else "plain"
        values, is_goal, rewards = sweep_rewards(sweep, args)
        task = sweep.task
        print(f'{sweep.env_id} {look}, "{task.target_prompt}" / "{task.baseline_prompt}"')
        for (alpha, reward), color in zip(rewards.items(), colors):
            best, scaled = values[reward.argmax()], rescaled(reward)
            print(
                f"  alpha {alpha:.2f}: largest at {best:+.3f}, {abs(best - sweep.goal):.3f} from "
                f"the goal; Pearson correlation with goal / not goal "
                f"{pearson(reward, is_goal):+.3f}; reward {reward.min():.3f} to {reward.max():.3f}"
            )
            ax.plot(values, scaled, color=color, lw=1.4, label=f"{alpha:g}")
            rows += [
                (sweep.env_id, look, alpha, f"{value:.6f}", f"{r:.8f}", f"{s:.6f}", int(goal))
                for value, r, s, goal in zip(values, reward, scaled, is_goal)
            ]
        ax.axvline(sweep.goal, color="tab:red", ls="--", lw=1)
        ax.annotate("goal", (sweep.goal, 1.02), color="tab:red", ha="center", annotation_clip=False)
        ax.set(title=f"{sweep.env_id}, {look}", xlabel=sweep.label, ylim=(-0.02, 1.1))
        ax.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("reward, rescaled to [0, 1]")
    axes[0].legend(title="alpha", frameon=False, fontsize="small")
    figure.suptitle(args.clip_model.removeprefix("local-dir:"), fontsize="medium")
    table = args.out.with_suffix(".csv")
    write_figure(figure, args.out)
    write_csv(table, "env_id look reward_alpha value reward rescaled is_goal".split(), rows)
    print(f"wrote {args.out} and {table}")


COMMANDS = {
    Landscape: landscape,
    Collect: collect,
    Epic: epic,
    Sheet: sheet,
    Success: success,
}

if __name__ == "__main__":
    import label_page  # needs this module, so it cannot be imported above

    COMMANDS[label_page.Label] = label_page.label
    commands = {kind.__name__.lower(): kind for kind in COMMANDS}
    args = tyro.extras.subcommand_cli_from_dict(commands, description=__doc__)
    try:
        COMMANDS[type(args)](args)
    except (UsageError, egl_render.GLError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("stopped; collect goes on with the same command", file=sys.stderr)
        sys.exit(130)
