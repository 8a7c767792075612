"""What several tests use: pieces for worker processes, running scripts, watching processes."""

import json
import os
import signal
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import torch

import clip_reward
import egl_render
from training.run import checkpoints

egl_render.setup_gl()  # before any test imports mujoco
ROOT = Path(clip_reward.__file__).resolve().parent
KNEELING = "a humanoid robot kneeling"
TINY = "local-dir:tiny_clip"


class PaintRenderer:
    """Paints the first number of a state (0..255) into every pixel of a tiny frame."""

    def __init__(self, device="cpu", size=4):
        self.frame_shape = (size, size, 3)

    def render(self, states, out=None):
        frames = np.empty((len(states), *self.frame_shape), np.uint8) if out is None else out
        for state, frame in zip(states, frames, strict=True):
            if state[0] < 0:
                raise ValueError(f"cannot paint {state[0]}")
            frame[:] = np.uint8(state[0])
        return frames

    def close(self):
        pass


class MeanReward(torch.nn.Module):
    """The mean pixel, after `delay` seconds a call, or else `error` is raised, or the process
    killed (`fatal`). A file named after its process and the first pixel is in `folder` from the
    beginning of a call."""

    def __init__(self, device, delay=0.0, folder=None, error=None, fatal=False):
        super().__init__()
        self.delay, self.folder, self.error, self.fatal = delay, folder, error, fatal

    def forward(self, frames):
        if self.folder:
            (self.folder / f"{os.getpid()}_{frames.flatten()[0]}").touch()
        time.sleep(self.delay)
        if self.fatal:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.error:
            raise self.error
        return frames.float().mean(dim=(1, 2, 3))


def reward_of_shape(device, shape):
    """A make_reward whose rewards are [B, *shape]."""
    return lambda frames: torch.ones(len(frames), *shape)


def make_nothing(device, error):
    """A make_renderer or make_reward that fails."""
    raise error


def first_is_slow(device, folder):
    """A make_reward that takes ten seconds in one of the processes."""
    try:
        (folder / "slow").touch(exist_ok=False)
        time.sleep(10)
    except FileExistsError:
        pass
    return MeanReward(device)


class Unpicklable(Exception):
    """What cannot be sent from one process to another."""

    def __init__(self):
        super().__init__("holds a lock")
        self.lock = threading.Lock()


def humanoid_states(count, seed=0):
    """[count, 47] float64: a random rollout of Humanoid-v5."""
    import gymnasium as gym

    env = gym.make("Humanoid-v5", terminate_when_unhealthy=False, max_episode_steps=-1)
    env.reset(seed=seed)
    env.action_space.seed(seed)
    data, states = env.unwrapped.data, []
    for _ in range(count):
        env.step(env.action_space.sample())
        states.append(np.concatenate([data.qpos, data.qvel]))
    env.close()
    return np.stack(states)


# ------------------------------------------------------------------------------ processes


# before a command: SIGHUP ends it, also where the tests run under nohup
HANGS_UP = ("env", "--default-signal=HUP")


def environment(**changes):
    """For a new Python process that can import what this one can, but starts like a user's: without
    what was set in this one by importing."""
    path = os.pathsep.join(path for path in sys.path if path)
    ours = ("GOMP_SPINCOUNT", "MUJOCO_GL", "PYGLFW_LIBRARY", "PYTHONWARNINGS")
    usual = {name: value for name, value in os.environ.items() if name not in ours}
    return usual | {"PYTHONPATH": path} | changes


def descendants(pid):
    """All living processes below `pid` (a zombie does not live)."""
    parents = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent, *_ = entry.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if state != "Z":
            parents.setdefault(int(parent), []).append(int(entry.parent.name))
    found = [pid]
    for process in found:
        found += parents.get(process, [])
    return found[1:]


def wait_until(condition, seconds=120):
    """Whether `condition()` came true within so many seconds."""
    deadline = time.monotonic() + seconds
    while not (true := condition()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return true


def gone(pids):
    """Whether none of these processes lives."""

    def lives(pid):
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        except (FileNotFoundError, ProcessLookupError):
            return False

    return not any(map(lives, pids))


# ------------------------------------------------------------------------------ scripts


def run(*words, code=0, **changes):
    """Run Python as a user does, with changes to the environment -> the finished process."""
    process = subprocess.run(
        [sys.executable, *map(str, words)],
        **{"capture_output": True, "text": True, "timeout": 600, "env": environment(**changes)},
    )
    assert process.returncode == code, process.stdout + process.stderr
    return process


def only_run(runs_dir):
    """The one run folder in there."""
    (folder,) = [path for path in Path(runs_dir).iterdir() if path.is_dir()]
    return folder


def checkpoint(folder, name=None):
    """A run's newest, or another."""
    name = name or f"step_{max(checkpoints(folder))}"
    return torch.load(folder / f"checkpoints/{name}.pt", weights_only=True)


def equal(one, two):
    """Whether two checkpoints are the same, to the last bit."""
    if isinstance(one, dict):
        return one.keys() == two.keys() and all(equal(one[key], two[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(two) and all(map(equal, one, two))
    if isinstance(one, torch.Tensor):  # bytes, because a NaN is not equal to itself
        return one.dtype == two.dtype and one.cpu().numpy().tobytes() == two.cpu().numpy().tobytes()
    return one == two


def rings(folder):
    """What lies in the replay buffer of a finished run."""
    return checkpoint(folder)["replay"]["rings"]


def wandb_history(path):
    """What a wandb run was told, {key: [value]}, from its file: records of a protocol buffer in
    blocks as LevelDB's log has them (crc, length, type; 1 and 4 end a record)."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, parts, history = path.read_bytes(), 7, b"", {}
    while at + 7 <= len(data):
        if (room := 32768 - at % 32768) < 7:  # a header is never split
            at += room
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            for item in Record.FromString(parts).history.item:
                key = item.key or "/".join(item.nested_key)
                history.setdefault(key, []).append(json.loads(item.value_json))
            parts = b""
    return history


def scalars(folder):
    """A run's TensorBoard events: {tag: scalar events}, {tag: image events}."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0, "images": 0}).Reload()
    values = {tag: events.Scalars(tag) for tag in events.Tags()["scalars"]}
    return values, {tag: events.Images(tag) for tag in events.Tags()["images"]}
